"""The text of --help: every option of a recipe with its default and the comment from its YAML file."""

import ast
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from recipes.common.hints import CONF, GAMES, RECIPES, atari_note, environments, no_such_option, options

# A top-level key, its value, and the comment at the end of the line.
LINE = re.compile(r"(\w+): *((?:[^#\s]|(?<=\S)#| (?!\s*#))*)\s*(?:# *(.*))?$")
SECTIONS = ("defaults", "hydra")


def help_text(recipe: str, words: Sequence[str]) -> str:
    """The text that --help prints.

    Args:
        recipe: name of the recipe.
        words: the other words of the command line: choices of groups to describe (env=..., sampler=...), or "atari"
            to list the games.

    Raises:
        ValueError: if a group has no such choice.
    """
    if "atari" in words and atari_note(recipe):
        return _wrapped("", "env=atari/<game>, where <game> is one of: " + ", ".join(GAMES))
    parts = [
        _description(recipe),
        f"Options of python -m recipes.{recipe}, as key=value with their defaults, and groups with their choices:",
    ]
    parts.append(_explained(CONF / f"{recipe.split('.')[-1]}.yaml", ""))
    choices = _defaults(recipe)
    for word in words:
        key, _, value = word.partition("=")
        if key in choices and value:
            choices[key] = value
            if not (CONF / key / f"{value}.yaml").is_file() and value not in (f"atari/{game}" for game in GAMES):
                raise ValueError(no_such_option(key, value, recipe))
    settings = RECIPES.get(recipe)
    if settings in choices and "env" in choices and choices[settings].startswith("${"):
        choices[settings] = choices["env"].split("/")[0]
    for group, choice in choices.items():
        if group == "env":
            names = ", ".join(environments(recipe)) + atari_note(recipe)
        elif group == settings:
            names = "chosen by env"
        else:
            names = ", ".join(options(group))
        path = CONF / group / f"{choice}.yaml"
        parts.append(_wrapped("", f"{group}={choice}: {names}{_purpose(path)}"))
        if path.is_file():
            parts.append(_explained(path, f"{group}."))
    others = " ".join(f"{group}=<choice>" for group in choices if group != settings)
    parts.append(
        _wrapped("", f"To see the defaults of other choices: python -m recipes.{recipe} --help {others}") + "\n"
        "hydra.run.dir=... sets the directory of the run, -m runs all combinations of values separated by commas,\n"
        "--cfg job shows the configuration without running it, --hydra-help lists hydra's own options."
    )
    return "\n\n".join(part for part in parts if part)


def _description(recipe: str) -> str:
    """The docstring of the recipe's module. Parsing instead of importing avoids the import of torch."""
    return ast.get_docstring(ast.parse((CONF.parent / f"{recipe.replace('.', '/')}.py").read_text())) or ""


def _defaults(recipe: str) -> dict[str, str]:
    """The configuration groups of the recipe and their default choices."""
    text = (CONF / f"{recipe.split('.')[-1]}.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\S+)", text.split("\n\n")[0], re.MULTILINE))


def _purpose(path: Path) -> str:
    """The comment in the first line of a file."""
    first = path.read_text().splitlines()[0] if path.is_file() else ""
    return f". {first.removeprefix('#').strip()}" if first.startswith("#") else ""


def _explained(path: Path, prefix: str) -> str:
    """The top-level keys of a file, with their values and comments."""
    found = [match for line in path.read_text().splitlines() if (match := LINE.match(line))]
    keys = [
        (f"  {prefix}{match[1]}={match[2] or '...'}", match[3] or "") for match in found if match[1] not in SECTIONS
    ]
    width = min(44, max((len(key) for key, _ in keys), default=0) + 2)
    return "\n".join(_wrapped(f"{key:<{width}}  " if comment else key, comment, width + 2) for key, comment in keys)


def _wrapped(start: str, text: str, indent: int = 2) -> str:
    return textwrap.fill(start + text, 120, subsequent_indent=" " * indent, break_on_hyphens=False)
