"""Runs the examples of the docstrings and of the READMEs."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import torchrl_replay_ext

ROOT = Path(__file__).parents[1]
README, PACKAGE_README = ROOT / "README.md", ROOT / "torchrl_replay_ext" / "README.md"
MODULES = [
    "torchrl_replay_ext",
    *sorted(m.name for m in pkgutil.walk_packages(torchrl_replay_ext.__path__, "torchrl_replay_ext.")),
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def readme_blocks(of_ray=False, readme=README):
    """The Python blocks of a README, with or without Ray, and the numbers of their first lines."""
    text = readme.read_text(encoding="utf-8")
    for match in re.finditer(r"^```python[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if ("RayReplayBuffer" in match[1]) != of_ray:
            continue
        line = text.count("\n", 0, match.start(1))
        yield pytest.param("\n" * line + match[1], id=f"line-{line + 1}")


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, capsys):
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch}, optionflags=FLAGS)
    assert not result.failed, capsys.readouterr().out


def test_docstring_examples_are_found():
    finder = doctest.DocTestFinder()
    assert any(test.examples for name in MODULES for test in finder.find(importlib.import_module(name)))


namespaces: list[dict[str, object]] = []


def run(block, readme):
    # compiled graphs refer to these names, so the names must live as long as the graphs
    namespaces.append({"__name__": "__main__"})
    exec(compile(block, str(readme), "exec"), namespaces[-1])


# pytest skips the test if there is no block
@pytest.mark.parametrize("block", list(readme_blocks()))
def test_readme(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(block, README)


@pytest.mark.parametrize("block", list(readme_blocks(readme=PACKAGE_README)))
def test_readme_of_the_package(block):
    run(block, PACKAGE_README)


def test_the_readme_of_the_package_has_an_example():
    assert list(readme_blocks(readme=PACKAGE_README))
