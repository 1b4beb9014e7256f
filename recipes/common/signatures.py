"""Keyword arguments of classes, read from their source: an import of the classes would import torch."""

import ast
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Kinds of values, by their names in annotations.
KINDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "None": "null",
    "Anneal": "{start, end}",
}


# Class of each sampler of the recipes, sampler.name; None: TorchRL's RandomSampler, which has no keyword arguments.
SAMPLER_CLASSES = {
    "uniform": None,
    "per": "ProportionalSampler",
    "rank": "RankBasedSampler",
    "reaper": "ReaPERSampler",
    "recency": "RecencySampler",
    "lap": "ProportionalSampler",
    "sset": "EventTableSampler",
    "sset_per": "EventTableSampler",
    "dper": "DecoupledSampler",
    "dper_uniform": "DecoupledSampler",
}
LIBRARY = "torchrl_replay_ext"
# Arguments of samplers that the recipes set.
SET_BY_RECIPES = (
    "capacity",
    "td_error",
    "num_streams",
    "tables",
    "eta",
    "critic_sampler",
    "policy",
    "noise_scale",
)


@dataclass(frozen=True)
class Argument:
    """A keyword argument of a class.

    Args:
        default: the source of its default; None: required.
        kinds: keys of KINDS that its annotation consists of; empty if the annotation has other parts.
        choices: the values that its annotation lists. Default: none.
        fields: the arguments that make up its value, if the annotation is a TypedDict. Default: none.
        text: its explanation in the docstring of the class. Default: none.
    """

    default: str | None
    kinds: frozenset[str] = frozenset()
    choices: tuple[Any, ...] = ()
    fields: "dict[str, Argument]" = field(default_factory=dict)
    text: str = ""

    def problem(self, value: Any) -> str | None:
        """An error message about the kind of a value; None if it is valid, or if the annotation is unknown."""
        given = {bool: "bool", int: "int", float: "float", type(None): "None", dict: "Anneal"}.get(type(value))
        if not self.kinds or given in self.kinds or (given == "int" and "float" in self.kinds):
            return None
        return "must be " + " or ".join(text for kind, text in KINDS.items() if kind in self.kinds)


@cache
def arguments(module: str, name: str) -> dict[str, Argument]:
    """The arguments of a class by name: of its `__init__`, or the fields of a dataclass or TypedDict.

    Args:
        module: the module that defines or imports the class.
        name: name of the class.
    """
    tree, module = _definition(module, name)
    texts = argument_texts(ast.get_docstring(tree) or "")
    init = next((item for item in tree.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if init is None:
        found = [(item.target, item.annotation, item.value) for item in tree.body if isinstance(item, ast.AnnAssign)]
        rows = [(target.id, annotation, value) for target, annotation, value in found if isinstance(target, ast.Name)]
    else:
        listed, keywords = init.args.args[1:], init.args.kwonlyargs
        defaults = [None] * (len(listed) - len(init.args.defaults)) + [*init.args.defaults]
        both = [*zip(listed, defaults, strict=True), *zip(keywords, init.args.kw_defaults, strict=True)]
        rows = [(argument.arg, argument.annotation, default) for argument, default in both]
    result = {}
    for key, annotation, default in rows:
        kinds, choices, parts = _meaning(annotation, module)
        source = None if default is None else ast.unparse(default)
        result[key] = Argument(source, kinds, choices, parts, texts.get(key, ""))
    return result


def sampler_arguments(name: str) -> dict[str, Argument]:
    """The keyword arguments of a sampler that a user may set, by name; `name`: a key of SAMPLER_CLASSES."""
    owner = SAMPLER_CLASSES[name]
    found = {} if owner is None else dict(arguments(LIBRARY, owner))
    if owner == "EventTableSampler":
        found["retention"] = arguments(LIBRARY, "EventTables")["retention"]
    if owner == "DecoupledSampler":
        found["critic"] = Argument(default=None)
    return {key: argument for key, argument in found.items() if key not in SET_BY_RECIPES}


def argument_texts(docstring: str) -> dict[str, str]:
    """The explanations of arguments in the `Args:` section of a docstring, by name, each in one line."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", docstring, re.MULTILINE)
    if section is None:
        return {}
    found = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     +.*\n?)*)", section[1], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


@cache
def _tree(module: str) -> ast.Module:
    top, *rest = module.split(".")
    spec = find_spec(top)  # of a submodule, find_spec would import the package
    assert spec is not None and spec.submodule_search_locations, module
    path = Path(next(iter(spec.submodule_search_locations)), *rest)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _definition(module: str, name: str) -> tuple[ast.ClassDef, str]:
    """The class and the module that defines it."""
    found, home = _find(module, name)
    assert isinstance(found, ast.ClassDef), f"{module}.{name}"
    return found, home


def _find(module: str, name: str) -> tuple[ast.ClassDef | ast.expr | None, str]:
    """The class or assigned value that a name has in a module; None if the module does not define it."""
    for item in _tree(module).body:
        if isinstance(item, ast.ClassDef) and item.name == name:
            return item, module
        if isinstance(item, ast.Assign) and [ast.unparse(target) for target in item.targets] == [name]:
            return item.value, module
        top = module.split(".")[0]
        if isinstance(item, ast.ImportFrom) and item.module and item.module.split(".")[0] == top:
            names = [alias.name for alias in item.names]
            if name in names:
                return _find(item.module, name)
    return None, module


def _meaning(annotation: ast.expr | None, module: str) -> tuple[frozenset[str], tuple[Any, ...], dict[str, Argument]]:
    """Kinds, choices and fields of an annotation, see Argument."""
    if isinstance(annotation, ast.BinOp):
        sides = [_meaning(side, module) for side in (annotation.left, annotation.right)]
        choices = sides[0][1] + sides[1][1]
        if choices:
            choices += (None,) if any("None" in side[0] for side in sides) else ()
            return frozenset(), choices, {}
        kinds = sides[0][0] | sides[1][0] if all(side[0] for side in sides) else frozenset()
        return frozenset(kinds), (), sides[0][2] | sides[1][2]
    if isinstance(annotation, ast.Subscript):
        outer = ast.unparse(annotation.value)
        if outer == "Literal":
            return frozenset(), tuple(_literals(annotation.slice)), {}
        return _meaning(annotation.slice, module) if outer == "Required" else (frozenset(), (), {})
    text = "" if annotation is None else ast.unparse(annotation)
    if text in KINDS:
        return frozenset({text}), (), {}
    found, home = _find(module, text) if text.isidentifier() else (None, module)
    if isinstance(found, ast.ClassDef):
        is_typed_dict = any(ast.unparse(base) == "TypedDict" for base in found.bases)
        return frozenset(), (), arguments(home, text) if is_typed_dict else {}
    return _meaning(found, home) if isinstance(found, ast.Subscript) else (frozenset(), (), {})


def _literals(node: ast.expr) -> list[Any]:
    value = ast.literal_eval(node)
    return list(value) if isinstance(value, tuple) else [value]
