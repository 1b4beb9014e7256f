"""Docstrings describe every parameter with its default. Pages are short and have an index."""

import ast
import importlib
import inspect
import re
from typing import Any

import pytest
from torchrl.data import ReplayBuffer

import torchrl_replay_ext
from tests.params import module_names
from tests.test_examples import ROOT


def public() -> dict[str, object]:
    """The classes and functions in ``__all__`` of the package and of its modules, by name."""
    # an import of configs would register configurations with Hydra for all tests of the process
    modules = {torchrl_replay_ext.__name__, *module_names()} - {"torchrl_replay_ext.configs"}
    found = {}
    for module in map(importlib.import_module, modules):
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            # a protocol has no constructor of its own
            if callable(value) and not getattr(value, "_is_protocol", False):
                found[name] = value
    return found


PUBLIC = public()


def parameters(value: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function or a constructor, by name."""
    if isinstance(value, type) and issubclass(value, ReplayBuffer):
        # the metaclass of TorchRL's buffers hides the signature of their constructor
        found = list(inspect.signature(value.__init__).parameters.items())[1:]
        # Ray adds a parameter to the classes that it has run in this process
        return {name: parameter for name, parameter in found if not name.startswith("_ray")}
    return dict(inspect.signature(value).parameters)


def documented(docstring: str | None) -> dict[str, str]:
    """The text of each parameter in the section "Args" of a docstring."""
    texts: dict[str, str] = {}
    name = None
    inside = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        if line and not line.startswith(" "):
            inside = line == "Args:"
        elif inside and (start := re.match(r" {4}\*{0,2}(\w+): ?(.*)", line)):
            name = start[1]
            texts[name] = start[2]
        elif inside and name is not None:
            texts[name] += f" {line.strip()}"
    return texts


def is_literal(text: str, value: object) -> bool:
    """Whether ``text`` is a Python literal for ``value``."""
    try:
        literal = ast.literal_eval(text.strip())
    except (SyntaxError, ValueError):
        return False
    return literal == value and isinstance(literal, bool) == isinstance(value, bool)


def states_default(text: str, value: object) -> bool:
    """Whether a text has "Default: <value>" or "<value> (default)"; None may also be described in words."""
    text = text.replace("``", "")
    if value is None and re.search(r"[Dd]efault", text):
        return True
    after = [text[m.end() :] for m in re.finditer("Default:", text)]
    before = [text[: m.start()] for m in re.finditer(r"\(default\)", text)]
    return any(is_literal(x[:end], value) for x in after for end in range(len(x) + 1)) or any(
        is_literal(x[start:], value) for x in before for start in range(len(x))
    )


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_parameter_is_documented_with_its_default_and_no_other(name):
    texts = documented(PUBLIC[name].__doc__)
    assert texts.keys() == parameters(PUBLIC[name]).keys()
    defaults = {key: parameter.default for key, parameter in parameters(PUBLIC[name]).items()}
    wrong = {k: v for k, v in defaults.items() if v is not inspect.Parameter.empty and not states_default(texts[k], v)}
    assert not wrong


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("discount factor in [0, 1]. Default: 0.99.", 0.99, True),
        ("discount factor in [0, 1]. Default: 0.9.", 0.99, False),
        ('``"ring"`` (default) or ``"pinned"``.', "ring", True),
        ("a flag. Default: True.", 1, False),
        ("a device. Default: None, that of the data.", None, True),
        ("a device.", None, False),
    ],
)
def test_the_check_finds_missing_and_wrong_defaults(text, value, expected):
    assert states_default(text, value) == expected


# --- pages

START = ROOT / "torchrl_replay_ext" / "README.md"


def test_what_visitors_read_first_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1_300
    assert len(START.read_text(encoding="utf-8").splitlines()) <= 200
    assert len((ROOT / ".github" / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("page", sorted(path.name for path in (START.parent / "guide").glob("*")))
def test_the_start_of_the_guide_links_to_every_page(page):
    assert f"](guide/{page})" in START.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", torchrl_replay_ext.__all__)
def test_the_index_has_every_public_name(name):
    index = START.read_text(encoding="utf-8").partition("## API index")[2]
    assert f"`{name}`" in index


def test_the_citation_names_the_version():
    citation = (ROOT / ".github" / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {torchrl_replay_ext.__version__}\n" in citation
