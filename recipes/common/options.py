"""Composes the options of a recipe; explains them (--help), and mistakes in them with similar names.

An option in a YAML file is explained by its comment there. Options that the files do not list have their defaults in a
dataclass or in a sampler of the library, and are explained by its docstring.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from recipes.common.atari_presets import GAMES, AtariConfig
from recipes.common.config import RECIPES, EventConfig
from recipes.common.errors import ConfigError, closest, did_you_mean
from recipes.common.files import CONF, load_config


def compose_config(recipe: str, words: Sequence[str], *, hydra: bool = False) -> DictConfig:
    """The recipe's configuration for the words of a command line, such as `key=value`.

    `hydra`: include Hydra's own options, such as the run directory. Default: False.

    `study=<path>.yaml` selects a study in a file of one's own.

    Raises:
        HydraException: if Hydra cannot read or compose it. OmegaConf's errors likewise.
        ConfigError: if there is no such file.
    """
    GlobalHydra.instance().clear()
    words = [_own_study(word) for word in words]
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(recipe, overrides=words, return_hydra_config=hydra)


def _own_study(word: str) -> str:
    """The word that selects a study in a file of one's own; other words are returned unchanged."""
    key, _, path = word.partition("=")
    if key != "study" or not path.endswith(".yaml"):
        return word
    if not Path(path).is_file():
        raise ConfigError(f"{word}: no such file")
    ConfigStore.instance().store("own", load_config(Path(path)), group="study")
    return "study=own"


def choices_of(group: str) -> list[str]:
    """The choices of a configuration group: its files in recipes/conf, and the Atari games."""
    games = [f"atari/{game}" for game in GAMES] if group == "env" else []
    return sorted(path.stem for path in (CONF / group).glob("*.yaml")) + games


def environments(recipe: str) -> list[str]:
    """The environments for which a recipe has settings; "atari" stands for all games."""
    return [name for name in choices_of(RECIPES[recipe]) if name in (*choices_of("env"), "atari")]


def explain(error: Exception, recipe: str, words: Sequence[str]) -> str:
    """Explain in one line why the command line of a recipe is refused.

    Args:
        error: the error of Hydra or OmegaConf.
        recipe: name of the recipe.
        words: the words of the command line.
    """
    internals = r"\n\s*(?:Config search path|object_type=|reference_type=|See http)"
    text = " ".join(re.split(internals, str(error))[0].split())
    if isinstance(error, OverrideParseException):
        return f"{error.override}: {text}; write key=value, with special characters quoted: 'key={{name: [value]}}'"
    if found := re.search(r"Could not find '([^/]+)/([^']+)'", text):
        return _no_such_choice(found[1], found[2], recipe)
    if found := re.search(r"Could not load '([^/]+)/([^']+)'", text):
        names = [name for name in environments(found[1]) if name != "atari"]
        hint = did_you_mean(found[2], names) or f"; choose {', '.join(names)}"
        return f"env={found[2]}: algorithm={found[1]} has no settings for it{hint}"
    if found := re.search(r"Could not (?:override|delete)(?: from config)?[:.]? *'([^']+)'", text):
        return _no_such_key(found[1], recipe, words)
    return text


def _no_such_choice(group: str, name: str, recipe: str) -> str:
    family, names = name.split("/")[0], choices_of(group)
    fitting = [f"recipes.{key}" for key, settings in RECIPES.items() if family in choices_of(settings)]
    if group == RECIPES.get(recipe) and family in (*choices_of("env"), "atari"):
        other = f"those of another environment, as in {group}={names[0]} env={name}"
        return f"env={name}: recipes.{recipe} has no settings for it; use {' or '.join(fitting) or other}"
    hint = did_you_mean(name, names) or f"; choose {', '.join(each for each in names if '/' not in each)}"
    return f"{group}={name}: there is no such choice{hint}"


def _no_such_key(key: str, recipe: str, words: Sequence[str]) -> str:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    config = compose_config(recipe, [word for word in words if word.partition("=")[0] in groups])
    if OmegaConf.is_dict(node := OmegaConf.select(config, key)):
        return f"{key}: its value has keys that are not known; choose {', '.join(map(str, node))}"
    names = {name: name.rpartition(".")[2] for name in _names(OmegaConf.to_container(config))}
    similar = closest(key.rpartition(".")[2], names.values())
    found = [name for name, last in names.items() if last in similar] or closest(key, names)
    hint = f"; did you mean {' or '.join(found[:3])}?" if found else "."
    return f"{key}: there is no such option{hint} Options that no file lists are set with a +, as --help shows"


def _names(node: Any, path: str = "") -> Iterator[str]:
    """The full names of all groups and values of nested dicts."""
    for key, value in node.items():
        yield f"{path}{key}"
        if isinstance(value, dict):
            yield from _names(value, f"{path}{key}.")


def help_text(recipe: str, schema: Any, words: Sequence[str]) -> str:
    """The text that --help prints: choices, the files in recipes/conf that they name, and the classes of the options.

    Args:
        recipe: name of the recipe.
        schema: the class of its configuration.
        words: the other words of the command line: choices of groups to describe (env=..., sampler=...), or "atari"
            to list the games and their options.
    """
    if "atari" in words:
        games = _wrapped("env=atari/<game>, where <game> is one of: " + ", ".join(GAMES), 2)
        return f"{games}\n\nenv.atari.<option>=\n\n{_arguments(AtariConfig)}"
    config = compose_config(recipe, words, hydra=True)
    chosen = {group: choice for group, choice in config.hydra.runtime.choices.items() if group in config}
    # in recipes.distributed, algorithm= chooses the group of hyperparameters
    algorithm = chosen.get("algorithm", RECIPES.get(recipe))
    # parsing instead of importing avoids the import of torch
    docstring = ast.get_docstring(ast.parse((CONF.parent / f"{recipe}.py").read_text())) or ""
    parts = [docstring, "Groups of options, with their default choices; --help env=<choice> shows another:"]
    for group, choice in chosen.items():
        if group != algorithm:
            names = environments(algorithm) if group == "env" and algorithm else choices_of(group)
            allowed = schema.samplers if group == "sampler" else names
            parts.append(_wrapped(f"  {group}={choice}: " + ", ".join(each for each in names if each in allowed), 4))
    parts += ["Options with their defaults; hydra.run.dir=<directory> is that of the run, -m seed=1,2,3 runs all", ""]
    parts.append(_options(CONF / f"{recipe}.yaml"))
    if chosen.pop("algorithm", None):
        chosen[algorithm] = chosen["env"]
    for group, choice in chosen.items():
        parts += [f"{group}={choice}, options {group}.<option>=", "", _options(CONF / group / f"{choice}.yaml")]
        hint = get_type_hints(schema).get(group)
        classes = [*filter(is_dataclass, (hint, *get_args(hint))), *[EventConfig] * (group == "env")]
        if group == "sampler":
            from recipes.common.replay import SAMPLERS  # imported late: it imports torch

            classes = [SAMPLERS[config.sampler.name]]
        for each in classes:
            prefix = f"+{group}.events.<name>" if each is EventConfig else f"+{group}"
            parts += [f"Options that the file does not list are set as {prefix}.<option>=", _arguments(each), ""]
    return "\n".join(parts)


def _arguments(type_: Any) -> str:
    """The `Args:` section of a class's docstring."""
    found = re.search(r"^Args:\n(?:[ \t]+.*\n?|\n)*", inspect.getdoc(type_) or "", re.MULTILINE)
    return found[0].rstrip() if found else ""


def _options(path: Path) -> str:
    """The text of a YAML file with options, after that of the file whose settings it takes over."""
    text = path.read_text() if path.is_file() else ""
    parent = re.search(r"^defaults:(?: \[|\n  - )(\w+)\b(?!:)", text, re.MULTILINE)
    before = _options(path.with_stem(parent[1])) if parent and parent[1] != path.stem else ""
    return before + re.sub(r"^(defaults|hydra):.*\n(?: .*\n)*\n?", "", text, flags=re.MULTILINE)


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, 100, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
