"""Composes configurations, and explains why Hydra refuses a command line, with names similar to a misspelt one."""

import re
from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from recipes.common.atari_presets import GAMES
from recipes.common.config import RECIPES
from recipes.common.errors import closest, did_you_mean
from recipes.common.files import CONF


def compose_config(recipe: str, words: Sequence[str], *, hydra: bool = False) -> DictConfig:
    """The recipe's configuration for the words of a command line, such as `key=value`.

    `hydra`: include Hydra's own options, such as the run directory. Default: False.

    Raises:
        HydraException: if Hydra cannot read or compose it. OmegaConf's errors likewise.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(recipe.split(".")[-1], overrides=list(words), return_hydra_config=hydra)


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
    if found := re.search(r"Could not (?:override|delete)(?: from config)?[:.]? *'([^']+)'", text):
        return _no_such_key(found[1], recipe, words)
    return text


def _no_such_choice(group: str, name: str, recipe: str) -> str:
    family, names = name.split("/")[0], choices_of(group)
    fitting = [f"recipes.{key}" for key, settings in RECIPES.items() if family in choices_of(settings)]
    if group == RECIPES.get(recipe) and family in (*choices_of("env"), "atari"):
        return (
            f"env={name}: recipes.{recipe} has no settings for it; use {' or '.join(fitting) or 'another recipe'}, or "
            f"those of another environment, as in {group}={names[0]} env={name}"
        )
    hint = did_you_mean(name, names) or f"; choose {', '.join(each for each in names if '/' not in each)}"
    return f"{group}={name}: there is no such choice{hint}"


def _no_such_key(key: str, recipe: str, words: Sequence[str]) -> str:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    config = compose_config(recipe, [word for word in words if word.partition("=")[0] in groups])
    names = {name: name.rpartition(".")[2] for name in _names(OmegaConf.to_container(config))}
    similar = closest(key.rpartition(".")[2], names.values())
    found = [name for name, last in names.items() if last in similar] or closest(key, names)
    hint = f"; did you mean {' or '.join(found[:3])}?" if found else "."
    return f"{key}: there is no such option{hint} Options that no file lists are set with a +, as --help shows"


def _names(node: Any, path: str = "") -> list[str]:
    """The full names of all groups and values of nested dicts."""
    found = []
    for key, value in node.items():
        found.append(f"{path}{key}")
        if isinstance(value, dict):
            found += _names(value, f"{path}{key}.")
    return found
