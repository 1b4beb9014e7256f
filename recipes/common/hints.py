"""Explains mistakes on the command line: replaces hydra's errors by shorter ones that suggest similar names."""

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipes.common.atari_scores import OTHER_GAMES, SCORES
from recipes.common.config import CONF, DECOUPLED, EVENT_TABLES, PLAIN
from recipes.common.schemas.acer import FOR_CONTINUOUS, FOR_DISCRETE
from recipes.common.signatures import SAMPLER_CLASSES, sampler_arguments

# Training recipes -> configuration group with their settings per environment; the most common recipes first.
RECIPES = {"dqn": "dqn", "sac": "sac", "td3": "td3", "acer": "acer", "r2d2": "r2d2", "distributed": "dqn"}
HYDRA_OPTIONS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
# The recipes whose actor can learn from separate batches, with the samplers in DECOUPLED.
WITH_ACTOR = ("td3", "sac")
# Recipes whose loss can be the Huber loss, which LAP needs.
WITH_HUBER_LOSS = ("td3", "dqn", "distributed")
# The recipe whose buffer has a column for each environment; event tables need a flat buffer.
WITH_COLUMNS = "r2d2"
# Atari games, whose buffer stores each frame once.
WITH_ATARI = ("dqn", "acer")
# Environments that observe images, and the recipe that needs vectors.
IMAGES = ("atari", "minatar_breakout", "minatar_space_invaders")
WITH_VECTORS = "r2d2"
ONE_KIND_OF_ACTIONS = (*FOR_CONTINUOUS, *FOR_DISCRETE)
GAMES = tuple(sorted((*SCORES, *OTHER_GAMES)))
# Groups whose keys are keyword arguments of a class: keys that their files do not list are allowed.
OPEN = ("sampler", "sampler.critic", "env.options", "dqn.optimizer", "acer.optimizer")


def closest(word: str, names: Iterable[str], count: int = 3, least: float = 0.6) -> list[str]:
    """Return at most `count` names similar to `word`, the most similar first, and names that it abbreviates.

    `least`: smallest similarity in [0, 1]; 1 is equality.
    """
    by_lower = {name.lower(): name for name in names}
    word = word.lower()
    found = difflib.get_close_matches(word, by_lower, n=count, cutoff=least)
    # abbreviations, such as lr for learning_rate or critic_learning_rate
    initials = {name: "".join(part[:1] for part in name.split("_")) for name in by_lower}
    short = [name for name, letters in initials.items() if len(word) > 1 and letters.endswith(word)]
    return [by_lower[name] for name in dict.fromkeys((*found, *short))]


def with_suggestion(text: str) -> str:
    """Complete a message of the form `key=value: choose a, b or c` with the choice that is similar to the value."""
    found = re.search(r"='?([\w.:-]*)'?\)?: (?:choose|must be one of) (.+)$", text)
    names = re.findall(r"[\w:/-]+", found[2]) if found else []
    return text + (did_you_mean(found[1], [name for name in names if name != "or"]) if found else "")


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The end of an error message that suggests names similar to `word`; empty if there are none."""
    found = closest(word, names)
    return f"; did you mean {_or(found)}?" if found else ""


def keyword_hint(error: Exception, function: Callable[..., Any]) -> str:
    """The end of the message of a TypeError: suggests keywords of `function` similar to the unexpected one."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    return did_you_mean(found[1], inspect.signature(function).parameters) if found else ""


def field_names(schema: Any) -> list[str]:
    """The field names of a dataclass; an empty list for any other type."""
    return [field.name for field in fields(schema)] if is_dataclass(schema) else []


def options(group: str, recipe: str | None = None) -> list[str]:
    """The choices of a configuration group: its file names in recipes/conf. Atari games are not included.

    `recipe`: omit the samplers that this recipe does not support. Default: None, omit none.
    """
    names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
    if group != "sampler" or recipe is None:
        return names
    return [name for name in names if unsupported_sampler(name, recipe) is None]


def unsupported_sampler(name: str, recipe: str) -> str | None:
    """Explain that the recipe does not support a sampler; None if it does."""
    others = WITH_ACTOR if name in DECOUPLED else WITH_HUBER_LOSS if name == "lap" else (recipe,)
    if recipe not in others:
        use = _or([f"recipes.{key}" for key in others])
    elif name in EVENT_TABLES and recipe == WITH_COLUMNS:
        use = _or([f"sampler={key}" for key in PLAIN if key != "lap"])
    else:
        return None
    return f"sampler={name}: recipes.{recipe} does not support it; use {use}"


def explain(error: Exception, recipe: str, schema: Any, words: Sequence[str]) -> str | None:
    """Explain why hydra rejects a command line; None if there is no better explanation than hydra's message.

    Args:
        error: the error of hydra or OmegaConf.
        recipe: name of the recipe.
        schema: the class of its configuration.
        words: the words of the command line.
    """
    text = str(error)
    if isinstance(error, OverrideParseException):
        if "EQUAL" in text:
            key = str(error.override).rstrip(":")
            return f"{error.override}: write {key}=<value>, without spaces around the equals sign"
        lines = [line for line in text.splitlines()[1:] if line.strip() and not line.startswith("See ")]
        word = str(error.override)
        if any(word.count(opening) > word.count(closing) for opening, closing in ("[]", "{}")):
            return f"{word}: a bracket is not closed; quote the whole word: 'key={{name: [value]}}'"
        problem = lines[0] if lines else "cannot be read"
        return f"{error.override}: {problem}; write key=value, and quote values with special characters: 'key=\"a b\"'"
    if found := re.search(r"Ambiguous value for argument '(\S+?)=(.*?)'", text):
        key, values = found.groups()
        return (
            f"{key}={values}: several values; add -m for one run with each of them, or write a list: {key}=[{values}]"
        )
    if found := re.search(r"^(\w+) appears more than once", text):
        return f"+{found[1]}=...: write {found[1]}=..., without the +"
    if found := re.search(r"Could not find '([^/']+)/([^']+)'", text):
        return no_such_option(found[1], found[2], recipe, words)
    if found := re.search(r"Could not (?:override|delete)(?: from config)?[:.]? *'([^']+)'", text):
        inner = re.search(r"Key '(\w+)' is not in struct", str(error.__cause__))
        return _no_such_key(found[1], recipe, schema, words) or (
            _no_such_key(f"{found[1]}.{inner[1]}", recipe, schema, words) if inner else None
        )
    return None


def no_such_option(group: str, option: str, recipe: str, words: Sequence[str] = ()) -> str:
    """Explain that `group=option` does not exist, or that `env=` selects an option that the recipe does not have."""
    if group == "env":
        ours = environments(recipe)
        if option == "atari" and atari_note(recipe):
            return f"env=atari: name the game, as env=atari/pong{atari_note(recipe).removeprefix(', or atari/<game>')}"
        games = {game: f"atari/{game}" for game in GAMES}
        found = closest(option, ours) or closest(option, options("env"))
        if option.startswith("atari") or not found:
            least = 0.6 if option.startswith("atari") else 0.8
            found = [games[game] for game in closest(option.removeprefix("atari/"), games, least=least)] or found
        if found:
            return f"env={option}: there is no such environment; did you mean {' or '.join(found)}?"
        return f"env={option}: there is no such environment; choose one of {', '.join(ours)}{atari_note(recipe)}"
    if group == RECIPES.get(recipe) and not any(word.startswith(f"{group}=") for word in words):
        return _wrong_recipe(option, recipe)
    names = options(group, recipe)
    return f"{group}={option}: there is no such choice{did_you_mean(option, names) or f'; choose {_or(names)}'}"


def environments(recipe: str) -> list[str]:
    """The environments for which a recipe has settings, without Atari games."""
    return sorted(set(options("env")) & set(options(RECIPES.get(recipe, recipe))))


def atari_note(recipe: str) -> str:
    """A hint how to list the Atari games; empty if the recipe does not support them."""
    if recipe not in WITH_ATARI:
        return ""
    return f", or atari/<game> (python -m recipes.{recipe} --help atari lists the games)"


def similar(env: str, recipe: str) -> str | None:
    """The environment whose settings of the recipe also work for `env`; None if the recipe does not support `env`.

    It has the same kind of actions: recipes.dqn and recipes.r2d2 have settings for discrete ones. Of several, it is the
    one with a similar name, or the first.
    """
    family, discrete = env.split("/")[0], {*options("dqn"), *options("r2d2")}
    if family in IMAGES and (recipe == WITH_VECTORS or (family == "atari" and recipe not in WITH_ATARI)):
        return None
    fitting = [name for name in environments(recipe) if (name in discrete) == (family in discrete)]
    return next(iter([*closest(env, fitting, 1), *fitting]), None)


def _wrong_recipe(env: str, recipe: str) -> str:
    """Explain that the environment exists, but the recipe has no settings for it."""
    family, group = env.split("/")[0], RECIPES[recipe]
    fitting = [name for name, group in RECIPES.items() if name != "distributed" and family in options(group)]
    # acer supports discrete and continuous actions; suggest the better-known recipes first
    first = [f"recipes.{name}" for name in fitting if name != "acer"] or [f"recipes.{name}" for name in fitting]
    if not first:
        return (
            f"env={env}: there are no settings for it; write recipes/conf/{group}/{env}.yaml, or choose those of "
            f"another environment, as in {group}={environments(recipe)[0]} env={env}"
        )
    also = " (recipes.acer has settings for it, too)" if "acer" in fitting and "recipes.acer" not in first else ""
    other = similar(env, recipe)
    way = (
        f"or those of another environment: {group}={other} env={env}"
        if other
        else "or choose one of " + ", ".join(environments(recipe))
    )
    return f"env={env}: recipes.{recipe} has no settings for it; use {_or(first)}{also}, {way}"


def _no_such_key(key: str, recipe: str, schema: Any, words: Sequence[str]) -> str | None:
    """Explain an override of a key that does not exist."""
    word = next((word for word in words if word.lstrip("~+").split("=")[0] == key), key)
    if key.startswith("hydra."):
        return f"{word}: hydra has no such option{did_you_mean(key, HYDRA_OPTIONS)}"
    config = composed(recipe, words)
    if config is None:
        return None
    node, type_, parts = config, schema, key.split("@")[0].replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        names = [str(name) for name in node] if isinstance(node, DictConfig) else []
        path = ".".join(parts[:depth])
        if part not in names:
            break
        node, type_ = OmegaConf.select(node, part), type_of(type_, part)
    else:
        return None
    where = path or f"recipes.{recipe}"
    if not isinstance(node, DictConfig):
        return f"{word}: {where} is a value and has no keys"
    if path == "acer" and part in ONE_KIND_OF_ACTIONS and not any("env.id=" in word for word in words):
        # the files of the environments set all that apply to their actions
        return f"{word}: acer.{part} has no effect on the actions of env={config.env.name}; leave it out"
    if part in field_names(type_):
        return f"{word}: {where} does not set {part} by default; write +{word.lstrip('~+')}"
    if path == "sampler":
        return _no_such_argument(word, part, config.sampler.name)
    text = f"{word}: {where} has no key {part}"
    names += [name for name in field_names(type_) if name not in names]
    if not path:
        names.append("hydra")
    found = [name for name in names if f"_{part}_" in f"_{name}_"] or closest(part, names, 1)
    paths = {full: full.split(".")[-1] for full in _leaves(config)}
    # the same name in other groups
    found += [full for full, last in paths.items() if last == part]
    if not found and path not in OPEN:
        found = [full for full, last in paths.items() if last in closest(part, paths.values(), 1)]
    if found:
        return f"{text}; did you mean {_or(found[:3])}?"
    added = f"; add a keyword that the file does not list with +{word.lstrip('~+')}" if path in OPEN else ""
    return f"{text}; its keys are {', '.join(names)}{added}"


def _no_such_argument(word: str, key: str, sampler: str) -> str:
    """Explain an override of an argument that the file of a sampler does not list."""
    own, text = sampler_arguments(sampler), f"{word}: sampler has no key {key}"
    if key in own:
        return f"{text}; add a keyword that the file does not list with +{word.lstrip('~+')}"
    if hint := did_you_mean(key, own):
        return text + hint
    others = [f"sampler={name}" for name in SAMPLER_CLASSES if key in sampler_arguments(name)]
    return f"{text}; it is an option of {_or(others)}" if others else f"{text}; its keys are {', '.join(own) or 'none'}"


def type_of(type_: Any, name: str) -> Any:
    """The type of a field of a dataclass, or of an item of a dictionary; X for X | None, None if it is not known."""
    if get_origin(type_) is dict:
        return get_args(type_)[1]
    hint = get_type_hints(type_).get(name) if is_dataclass(type_) else None
    return next((choice for choice in get_args(hint) if is_dataclass(choice)), hint) if _is_optional(hint) else hint


def _is_optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _leaves(node: DictConfig, path: str = "") -> list[str]:
    """The full names of all values."""
    found = []
    for name in node:
        value = None if OmegaConf.is_interpolation(node, str(name)) else OmegaConf.select(node, str(name))
        full = f"{path}{name}"
        found += _leaves(value, f"{full}.") if isinstance(value, DictConfig) else [full]
    return found


def compose_config(recipe: str, overrides: Sequence[str]) -> DictConfig:
    """The recipe's configuration with these overrides, words such as `key=value`.

    Raises:
        HydraException: if hydra cannot read or compose it. OmegaConf's errors likewise.
    """
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
        return compose(recipe.split(".")[-1], overrides=list(overrides))


def composed(recipe: str, words: Sequence[str]) -> DictConfig | None:
    """The recipe's configuration with the groups chosen on the command line, or else with the defaults.

    None if neither can be composed.
    """
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    chosen = [word for word in words if word.partition("=")[0] in groups and "," not in word]
    for overrides in (chosen, []):
        try:
            return compose_config(recipe, overrides)
        except (HydraException, OmegaConfBaseException):
            continue
    return None


def _or(names: Sequence[str]) -> str:
    return " or ".join([", ".join(names[:-1])] * (len(names) > 1) + [*names[-1:]])
