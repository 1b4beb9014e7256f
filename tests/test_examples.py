"""Runs the examples of the docstrings and of the READMEs."""

import doctest
import importlib
import re
from pathlib import Path

import pytest
import torch

from tests.params import module_names

ROOT = Path(__file__).parents[1]
FOLDERS = (".github", "recipes", "tests", "torchrl_replay_ext")
# every README and guide; all examples in them run
GUIDES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
MODULES = [
    "torchrl_replay_ext",
    *module_names(),
]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def guide_blocks(of_ray=False):
    """Every block of Python in the guides that needs Ray or not, with its guide, at the lines it has there."""
    for guide in GUIDES:
        text = guide.read_text(encoding="utf-8")
        for match in re.finditer(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            if any(name in match[1] for name in ("RayReplayBuffer", "ShardedReplayBuffer")) != of_ray:
                continue
            line = text.count("\n", 0, match.start(1))
            name = f"{guide.relative_to(ROOT)}-line-{line + 1}"
            yield pytest.param(compile("\n" * line + match[1], str(guide), "exec"), id=name)


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name, capsys):
    result = doctest.testmod(importlib.import_module(name), extraglobs={"torch": torch}, optionflags=FLAGS)
    assert not result.failed, capsys.readouterr().out


def test_docstring_examples_are_found():
    finder = doctest.DocTestFinder()
    assert any(test.examples for name in MODULES for test in finder.find(importlib.import_module(name)))


namespaces: list[dict[str, object]] = []


@pytest.mark.parametrize("block", list(guide_blocks()))
def test_guides(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # kept, since graphs must not outlive the names they were made of
    namespaces.append({"__name__": "__main__"})
    exec(block, namespaces[-1])


@pytest.mark.parametrize("guide", ["README.md", "torchrl_replay_ext/README.md", "torchrl_replay_ext/CONVERTING.md"])
def test_guides_with_examples_are_found(guide):
    assert any(str(block.id).startswith(f"{guide}-line-") for block in guide_blocks())
