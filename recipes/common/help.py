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
from typing import Any, NamedTuple, get_origin

import yaml
from omegaconf import MISSING as OMITTED
from omegaconf import DictConfig, ListConfig, OmegaConf

from recipes.common.atari_presets import AtariConfig
from recipes.common.hints import (
    CONF,
    GAMES,
    RECIPES,
    atari_note,
    composed,
    did_you_mean,
    environments,
    no_such_option,
    options,
    type_of,
)
from recipes.common.signatures import argument_texts, sampler_arguments

# A key, its value, and the comment at the end of the line.
LINE = re.compile(r"( *)([\w ]+): *((?:[^#\s]|(?<=\S)#| (?!\s*#))*)\s*(?:# *(.*))?$")
LEAST_WIDTH, MOST_WIDTH, KEY_WIDTH = 80, 120, 38


class Row(NamedTuple):
    """One option: its name with the default (`key=value`), and its explanation."""

    option: str
    text: str


class Source(NamedTuple):
    """The content of a YAML file: its comment at the top, and value and comment of each key by its full name."""

    header: str
    values: dict[str, str]
    comments: dict[str, str]


def help_text(recipe: str, schema: Any, words: Sequence[str]) -> str:
    """The text that --help prints.

    Args:
        recipe: name of the recipe.
        schema: the class of its configuration.
        words: the other words of the command line: choices of groups to describe (env=..., sampler=...), or "atari"
            to list the games and their options. Values of single options are ignored.

    Raises:
        ValueError: if a word names no topic, or a choice that its group does not have.
    """
    topics = ["atari"] if atari_note(recipe) else []
    for word in words:
        if word.isidentifier() and word not in topics:
            groups = ", ".join(f"{group}=<choice>" for group in _choices(recipe, []))
            hint = did_you_mean(word, topics) or f"; use {groups}"
            raise ValueError(f"--help {word}: there is no such topic{hint}")
    if "atari" in words and topics:
        return _atari(recipe)
    description, *files = re.split(r"\n\n(?=\w+\.csv has )", _docstring(recipe), maxsplit=1)
    choices = _choices(recipe, words)
    config = composed(recipe, [f"{group}={choice}" for group, choice in choices.items() if group in _chosen(words)])
    assert config is not None
    settings = RECIPES.get(recipe)
    command = f"python -m recipes.{recipe}"
    parts = [_paragraphs(description)]
    if choices:
        parts.append("Groups of options, with their default choices:")
        parts += [_group(recipe, group, choice) for group, choice in choices.items() if group != settings]
        parts.append(
            _wrapped(
                f"To see the options of other choices: {command} --help "
                + " ".join(f"{group}=<choice>" for group in choices if group != settings)
            )
        )
    top = _source(CONF / f"{recipe.split('.')[-1]}.yaml", "")
    own = [key for key in config if key not in choices]
    tables = [("", [*_rows(config, own, schema, top, "")])]
    for group, choice in choices.items():
        source = _source(CONF / group / f"{choice}.yaml", f"{group}.")
        node, type_ = config[group], type_of(schema, group)
        title = f"{group}={choice}" + (" (chosen by env)" if group == settings else "")
        rows = [*_rows(node, list(node), type_, source, f"{group}.")]
        if group == "sampler":
            rows += _sampler_rows(node)
        tables.append((f"{title}: {source.header}".removesuffix(": "), rows))
    added = any(row.option.startswith("+") for _, rows in tables for row in rows)
    note = "; write the +, too, where there is one" if added else ""
    parts.append(_wrapped(f"Options of {command}, as key=value with their defaults{note}:", 0))
    parts += ["\n".join([*([_wrapped(title, 0)] if title else []), _table(rows)]) for title, rows in tables]
    parts += [_paragraphs(text) for text in files]
    parts.append(
        _table(
            [
                Row("hydra.run.dir=<directory>", "directory of the run"),
                Row("-m seed=1,2,3", "all combinations of values that are separated by commas"),
                Row("--cfg job", "show the configuration without a run"),
                Row("--hydra-help", "options of hydra"),
            ]
        )
    )
    return "\n\n".join(part for part in parts if part)


def _atari(recipe: str) -> str:
    """The games and the options of their preprocessing."""
    texts = _texts(AtariConfig)
    rows = [
        Row(f"env.atari.{key}={_flow(value)}", _without_default(texts[key]))
        for key, value in vars(AtariConfig()).items()
    ]
    return "\n\n".join(
        [
            _wrapped("env=atari/<game>, where <game> is one of: " + ", ".join(GAMES)),
            "Options of all games:",
            _table(rows),
            _wrapped(f"All other options: python -m recipes.{recipe} --help env=atari/pong"),
        ]
    )


def _docstring(recipe: str) -> str:
    """The docstring of the recipe's module. Parsing instead of importing avoids the import of torch."""
    return ast.get_docstring(ast.parse((CONF.parent / f"{recipe.replace('.', '/')}.py").read_text())) or ""


def _chosen(words: Sequence[str]) -> dict[str, str]:
    """The words of the form key=value."""
    pairs = (word.partition("=") for word in words)
    return {key: value for key, _, value in pairs if value}


def _choices(recipe: str, words: Sequence[str]) -> dict[str, str]:
    """The configuration groups of the recipe and their choices: those in `words`, or the defaults."""
    text = (CONF / f"{recipe.split('.')[-1]}.yaml").read_text()
    choices: dict[str, str] = dict(re.findall(r"^  - (\w+): (\S+)", text.split("\n\n")[0], re.MULTILINE))
    for group, choice in _chosen(words).items():
        if group in choices:
            if choice not in _names(recipe, group):
                raise ValueError(no_such_option(group, choice, recipe))
            choices[group] = choice
    settings = RECIPES.get(recipe)
    if settings in choices and choices[settings].startswith("${"):
        choices[settings] = choices["env"].split("/")[0]
    return choices


def _names(recipe: str, group: str) -> list[str]:
    """All choices of a group."""
    games = [f"atari/{game}" for game in GAMES] if atari_note(recipe) else []
    return [*environments(recipe), *games] if group == "env" else options(group, recipe)


def _group(recipe: str, group: str, default: str) -> str:
    """The choices of a group: environments in one paragraph, others with the first sentences of their files."""
    if group == "env":
        names = ", ".join(environments(recipe)) + atari_note(recipe)
        return _wrapped(f"  env={default}: {names}", 4)
    rows = []
    for name in options(group, recipe):
        header = _source(CONF / group / f"{name}.yaml", "").header
        rows.append(Row(f"  {name}", _first_sentence(header)))
    return f"  {group}={default}:\n" + _table(rows)


def _source(path: Path, prefix: str) -> Source:
    """Read a YAML file of recipes/conf, and the file that it inherits from, the first one in its defaults list.

    Atari games have no files of their own; for them the result is empty.
    """
    lines = path.read_text().splitlines() if path.is_file() else []
    header = []
    while lines and lines[0].startswith("#"):
        header.append(lines.pop(0).removeprefix("#").strip())
    parent = re.match(r"defaults:(?: \[|\n  - )(\w+)\b(?!:)", "\n".join(lines))
    base = _source(path.with_stem(parent[1]), prefix) if parent else Source("", {}, {})
    values, comments, parents = dict(base.values), dict(base.comments), []
    for line in lines:
        if match := LINE.match(line):
            indent, key, value, comment = match.groups()
            parents[len(indent) // 2 :] = [key]
            full = prefix + ".".join(parents)
            values[full], comments[full] = value, comment or ""
    return Source(" ".join(header) or base.header, values, comments)


def _rows(node: DictConfig, keys: Sequence[Any], type_: Any, source: Source, prefix: str) -> Iterator[Row]:
    """The options of a configuration group: those in the file, then those with defaults in its dataclass, `type_`."""
    texts = _texts(type_)
    for key in keys:
        full, value, item = f"{prefix}{key}", node[key], type_of(type_, key)
        text = source.comments.get(full) or _without_default(texts.get(key, ""))
        shown = source.values.get(full, "")
        if isinstance(value, ListConfig) and any("=" in str(word) for word in value):
            shown = "[" + ", ".join(f'"{word}"' for word in value) + "]"  # on the command line, such words need quotes
        if isinstance(value, DictConfig) and not shown:
            yield Row(full, text)
            yield from _rows(value, list(value), item, source, f"{full}.")
        else:
            yield Row(f"{full}={_flow(value) if not shown or '${' in shown else shown}", text)
        yield from _item_rows(item, f"{full}.")
    if prefix:
        yield from _fields(type_, prefix, keys)


def _fields(type_: Any, prefix: str, known: Sequence[Any] = (), *, added: bool = True) -> Iterator[Row]:
    """The fields of a dataclass that are not in `known` and have an explanation.

    `added`: whether the fields without a default need a +, too. Default: True.
    """
    texts = _texts(type_)
    for item in fields(type_) if texts else ():
        if item.name in known or item.name not in texts:
            continue
        default = item.default_factory() if item.default_factory is not MISSING else item.default
        required = default == OMITTED
        kind = "value" if item.type is Any else getattr(item.type, "__name__", "value")
        shown = f"<{kind}>" if required else _flow(default)
        mark = "+" if added or not required else ""
        yield Row(f"{mark}{prefix}{item.name}={shown}", _without_default(texts[item.name]))
        yield from _item_rows(type_of(type_, item.name), f"{prefix}{item.name}.", added=True)


def _item_rows(type_: Any, prefix: str, *, added: bool = False) -> Iterator[Row]:
    """The fields of the items, if the type is a dictionary of dataclasses."""
    item = type_of(type_, "") if get_origin(type_) is dict else None
    yield from _fields(item, f"{prefix}<name>.", added=added)


def _texts(schema: Any) -> dict[str, str]:
    """The explanations of the fields of a dataclass, from its docstring; empty for any other type."""
    return argument_texts(inspect.getdoc(schema) or "") if is_dataclass(schema) else {}


def _sampler_rows(node: DictConfig) -> Iterator[Row]:
    """The keyword arguments of the sampler that its file does not list."""
    for name, argument in sampler_arguments(node.name).items():
        if name not in node and (argument.kinds or argument.choices):
            shown = _flow(ast.literal_eval(argument.default or "None"))
            yield Row(f"+sampler.{name}={shown}", _first_sentence(_without_default(argument.text)))


def _first_sentence(text: str) -> str:
    return re.split(r"\. (?=[A-Z])", text)[0].removesuffix(".")


def _without_default(text: str) -> str:
    return re.sub(r" ?Default: [^.]*(?:\.\d[^.]*)?\.(?=\s|$)", "", _plain(text)).removesuffix(".")


def _plain(text: str) -> str:
    """A docstring's text without its markup, with values as on the command line."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    for mark, plain in (("``", ""), ("\\|", "|"), (" (default)", ""), ("if True, ", "")):
        text = text.replace(mark, plain)
    for python, on_command_line in (("None", "null"), ("True", "true"), ("False", "false")):
        text = re.sub(rf"\b{python}\b", on_command_line, text)
    return text


def _flow(value: Any) -> str:
    """A value as it is written on the command line."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value, resolve=True)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _width() -> int:
    """The width of the terminal, within limits."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, LEAST_WIDTH), MOST_WIDTH)


def _table(rows: Sequence[Row] | Iterator[Row]) -> str:
    """Options and explanations in two columns; the explanation of a long option begins in the next line."""
    rows = list(rows)
    column = min(KEY_WIDTH, max((len(row.option) for row in rows), default=0) + 4)
    lines = []
    for option, text in rows:
        start = f"  {option}"
        if text and len(start) > column - 2:
            lines.append(start)
            start = ""
        lines.append(_wrapped(f"{start:<{column}}{text}" if text else start, column))
    return "\n".join(lines)


def _wrapped(text: str, indent: int = 2) -> str:
    return textwrap.fill(text, _width(), subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)


def _paragraphs(text: str) -> str:
    """The text with its prose wrapped; indented blocks keep their lines, which are wrapped at their second column."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith(" "):
            for line in block.splitlines():
                columns = re.match(r"\s+(\S+(?: \S+)*\s{2,})(?=\S)", line)
                found.append(_wrapped(line, columns.end() if columns else 8))
            found.append("")
        else:
            items = re.split(r"\n(?=- )", block)
            found += [*(_wrapped(" ".join(item.split()), 2 if item.startswith("- ") else 0) for item in items), ""]
    return "\n".join(found).rstrip()
