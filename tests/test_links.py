"""Links and commands of the READMEs and guides: files, headings and modules exist."""

import bisect
import itertools
import re
from pathlib import Path

import pytest

from tests.params import module_names
from tests.test_examples import GUIDES, ROOT

NAMES = [str(guide.relative_to(ROOT)) for guide in GUIDES]
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def headings(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    anchors: set[str] = set()
    for title in re.findall(r"^#+ +(.+?) *$", CODE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        text = re.sub(r"\[([^]]*)]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        copies = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other) is not None for other in anchors)
        anchors.add(f"{anchor}-{copies}" if copies else anchor)
    return anchors


def broken(link: str, page: Path) -> bool:
    target, _, anchor = link.partition("#")
    path = (page.parent / target).resolve() if target else page
    if not path.is_relative_to(ROOT) or not path.exists():
        return True
    return bool(anchor) and (path.suffix != ".md" or anchor not in headings(path))


def links(text: str) -> list[tuple[int, str]]:
    """The links to files, with their places in the text."""
    found = re.finditer(r"]\(\s*([^)\s]+)\s*\)|(?:src|href)=\"([^\"]+)\"", text)
    return [(m.end(), m[1] or m[2]) for m in found if not re.match(r"https?://|mailto:", m[1] or m[2])]


def links_by_line(page: Path) -> list[tuple[str, str]]:
    """The links of a page, each after the page's name and the line of its end."""
    # blocks of code become as many empty lines
    text = CODE.sub(lambda code: "\n" * code[0].count("\n"), page.read_text(encoding="utf-8"))
    ends = list(itertools.accumulate(len(line) for line in text.splitlines(keepends=True)))
    return [(f"{page.name}:{bisect.bisect(ends, place) + 1}", link) for place, link in links(text)]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    assert [link for link in links_by_line(ROOT / name) if broken(link[1], ROOT / name)] == []


@pytest.mark.parametrize("module", module_names())
def test_docstrings_and_errors_name_pages_of_the_guide(module):
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    source = source if source.is_file() else source.with_suffix("") / "__init__.py"
    for page in re.findall(r"\b(guide/\w+\.md|CONVERTING\.md)", source.read_text(encoding="utf-8")):
        assert (ROOT / "torchrl_replay_ext" / page).is_file(), page


def test_broken_links_are_found(tmp_path):
    page = ROOT / "README.md"
    assert broken("no_such_file.md", page) and broken("#no-such-heading", page) and broken(str(tmp_path), page)
    found = links('[a\nb](x.md#y) ![](p.png) <img src="q.png"> [c](https://d)')
    assert [link for _, link in found] == ["x.md#y", "p.png", "q.png"]
    page = tmp_path / "page.md"
    page.write_text("```text\n[a](b.md)\n```\n[c\nd](e.md) [f](g.md)\n")
    assert links_by_line(page) == [("page.md:5", "e.md"), ("page.md:5", "g.md")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_name_modules_of_the_recipes(name):
    for module in re.findall(r"python -m (recipes\.\w+(?:\.\w+)*)", (ROOT / name).read_text(encoding="utf-8")):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_functions_beside_links_are_in_those_files():
    page = ROOT / "torchrl_replay_ext" / "guide" / "own_sampler.md"
    pairs = re.findall(r"\]\((\.\./\S+\.py)\): `(\w+)`(?:(?:,| and) `(\w+)`)?", page.read_text(encoding="utf-8"))
    assert len(pairs) > 8
    for file, *names in pairs:
        source = (page.parent / file).read_text(encoding="utf-8")
        assert all(re.search(rf"(def |self\.){name}\b", source) for name in names if name), (file, names)
