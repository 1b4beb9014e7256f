"""Runs the examples of the docstrings, and of the READMEs and guides: each block is a case named by page and line."""

import doctest
import importlib
import re
from pathlib import Path
from typing import NamedTuple

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


class Block(NamedTuple):
    """A block of Python on a page; ``line`` is the one above its first."""

    page: Path
    line: int
    code: str

    def run(self, names):
        exec(compile("\n" * self.line + self.code, str(self.page), "exec"), names)


def blocks(page):
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^ *```python[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield Block(page, text.count("\n", 0, match.start(1)), match[1])


def guide_blocks(of_ray=False):
    """Every block of Python in the guides that needs Ray or not."""
    for block in (block for page in GUIDES for block in blocks(page)):
        if any(name in block.code for name in ("RayReplayBuffer", "ShardedReplayBuffer")) == of_ray:
            yield pytest.param(block, id=f"{block.page.relative_to(ROOT)}:{block.line + 1}")


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
    block.run(namespaces[-1])


def test_examples_are_found_at_their_lines(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```python\na = 1\n```\n\n- item\n\n  ```python\n  ```\n\n```text\nno Python\n```\n")
    assert [(block.line, block.code) for block in blocks(page)] == [(3, "a = 1\n"), (9, "")]
    page.write_text("```python\n\nno_such_name\n```\n")
    with pytest.raises(NameError) as error:
        next(blocks(page)).run({})
    assert (str(error.traceback[-1].path), error.traceback[-1].lineno + 1) == (str(page), 3)


def test_pages_with_examples_are_found():
    pages = {str(block.values[0].page.relative_to(ROOT)) for block in guide_blocks()}
    assert {"README.md", "torchrl_replay_ext/CONVERTING.md", "torchrl_replay_ext/guide/priorities.md"} <= pages
