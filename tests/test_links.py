"""Links and commands of the READMEs and guides: files, headings and modules exist."""

import re
from pathlib import Path

import pytest

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


def links(text: str) -> list[str]:
    found = re.findall(r"]\(\s*([^)\s]+)\s*\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)
    return [link for link in found if not re.match(r"https?://|mailto:", link)]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    assert [link for link in links(text) if broken(link, page)] == []


def test_broken_links_are_found(tmp_path):
    page = ROOT / "README.md"
    assert broken("no_such_file.md", page) and broken("#no-such-heading", page) and broken(str(tmp_path), page)
    assert links('[a\nb](x.md#y) ![](p.png) <img src="q.png"> [c](https://d)') == ["x.md#y", "p.png", "q.png"]


@pytest.mark.parametrize("name", NAMES)
def test_commands_name_modules_of_the_recipes(name):
    for module in re.findall(r"python -m (recipes\.\w+(?:\.\w+)*)", (ROOT / name).read_text(encoding="utf-8")):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), module


def test_the_readme_holds_one_test_command():
    # .ci/run takes the line from there
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert sum(re.fullmatch(r"pip install .* && python -m pytest.*", line) is not None for line in lines) == 1
