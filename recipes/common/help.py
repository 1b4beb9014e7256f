"""The text of --help: every option of a recipe with its default and an explanation.

An option in a YAML file is explained by its comment there. Options that the files do not list have their defaults in a
dataclass or in a sampler of the library, and are explained by its docstring.
"""

import ast
import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import OmegaConf

from recipes.common.atari_presets import GAMES, AtariConfig
from recipes.common.checked import flow
from recipes.common.config import RECIPES, EventConfig
from recipes.common.files import CONF
from recipes.common.hints import choices_of, compose_config, environments

Row = tuple[str, str]  # an option with its default (`key=value`), and its explanation
COLUMN = 38


def help_text(recipe: str, schema: Any, words: Sequence[str]) -> str:
    """The text that --help prints.

    Args:
        recipe: name of the recipe.
        schema: the class of its configuration.
        words: the other words of the command line: choices of groups to describe (env=..., sampler=...), or "atari"
            to list the games and their options.
    """
    if "atari" in words:
        rows = [*_fields(AtariConfig, "env.atari.", vars(AtariConfig()))]
        return "\n".join([_wrapped("env=atari/<game>, where <game> is one of: " + ", ".join(GAMES), 2), *_table(rows)])
    name = recipe.split(".")[-1]
    config = compose_config(recipe, words, hydra=True)
    chosen = {group: choice for group, choice in config.hydra.runtime.choices.items() if group in config}
    parts = [_docstring(recipe), "Groups of options, with their default choices; --help env=<choice> shows another:"]
    for group, choice in chosen.items():
        if group != RECIPES.get(recipe):
            names = environments(recipe) if group == "env" else choices_of(group)
            allowed = schema.samplers if group == "sampler" else names
            parts.append(_wrapped(f"  {group}={choice}: " + ", ".join(each for each in names if each in allowed), 4))
    parts.append("Options with their defaults; write the +, too, where there is one:")
    comments = _comments(CONF / "run.yaml") | _comments(CONF / f"{name}.yaml")
    own = [key for key in map(str, config) if key not in (*chosen, "hydra")]
    parts += _table([(f"{key}={_flow(config[key])}", comments.get(key, "")) for key in own])
    for group, choice in chosen.items():
        parts.append(f"\n{group}={choice}:")
        parts += _table(_rows(group, choice, config[group], get_type_hints(schema).get(group)))
    parts += _table([("hydra.run.dir=<directory>", "directory of the run"), ("-m seed=1,2,3", "all combinations")])
    return "\n".join(parts)


def _rows(group: str, choice: str, node: Any, type_: Any) -> Iterator[Row]:
    """The options of a group: those in its file, then those that only its class has."""
    comments = _comments(CONF / group / f"{choice}.yaml")
    texts = _texts(type_) if is_dataclass(type_) else {}
    for key, value in node.items():
        yield f"{group}.{key}={_flow(value)}", comments.get(key) or texts.get(key, "")
    if is_dataclass(type_):
        missing = {item.name: item for item in fields(type_) if item.name in texts and item.name not in node}
        values = {key: item.default for key, item in missing.items() if item.default is not MISSING}
        made = {key: item.default_factory() for key, item in missing.items() if item.default_factory is not MISSING}
        yield from _fields(type_, f"+{group}.", values | made)
    if group == "env":
        yield from _fields(EventConfig, "+env.events.<name>.", vars(EventConfig(1, 0.0)))
    if group == "sampler":
        from recipes.common.replay import SAMPLERS  # imported late: it imports torch

        texts, parameters = _texts(SAMPLERS[node.name]), inspect.signature(SAMPLERS[node.name]).parameters
        values = {key: item.default for key, item in parameters.items() if key not in node}
        simple = {key: value for key, value in values.items() if value is None or isinstance(value, str | int | float)}
        yield from _fields(SAMPLERS[node.name], "+sampler.", {key: simple[key] for key in simple if key in texts})


def _fields(type_: Any, prefix: str, values: dict[str, Any]) -> Iterator[Row]:
    texts = _texts(type_)
    yield from ((f"{prefix}{key}={_flow(value)}", texts[key]) for key, value in values.items())


def _texts(type_: Any) -> dict[str, str]:
    """The explanations in the `Args:` section of a class, by name, each in one line."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)*)", inspect.getdoc(type_) or "", re.MULTILINE)
    found = re.findall(r"^    (\w+): ((?:.*\n?)(?:^     +.*\n?)*)", section[1] if section else "", re.MULTILINE)
    return {name: re.sub(r":\w+:`~?|`|\\", "", " ".join(text.split())) for name, text in found}


def _comments(path: Path) -> dict[str, str]:
    """The comments of the keys of a YAML file, and of the file whose settings it takes over (`defaults: [name]`)."""
    text = path.read_text() if path.is_file() else ""
    parent = re.search(r"^defaults:(?: \[|\n  - )(\w+)\b(?!:)", text, re.MULTILINE)
    before = _comments(path.with_stem(parent[1])) if parent and parent[1] != path.stem else {}
    return before | dict(re.findall(r"^(\w+):.*? # (.*)$", text, re.MULTILINE))


def _docstring(recipe: str) -> str:
    """The docstring of the recipe's module. Parsing instead of importing avoids the import of torch."""
    return ast.get_docstring(ast.parse((CONF.parent / f"{recipe.replace('.', '/')}.py").read_text())) or ""


def _flow(value: Any) -> str:
    return flow(OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)


def _table(rows: Sequence[Row] | Iterator[Row]) -> list[str]:
    """Options and explanations in two columns; the explanation of a long option begins in the next line."""
    return [
        _wrapped(f"  {option:<{COLUMN - 4}}  {text}", COLUMN)
        if len(option) < COLUMN - 4
        else f"  {option}\n" + _wrapped(" " * COLUMN + text, COLUMN)
        for option, text in rows
    ]


def _wrapped(text: str, indent: int) -> str:
    width = min(shutil.get_terminal_size((100, 24)).columns, 120)
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
