"""Checks of a configuration that need more than its values: packages, signatures of samplers, environments.

They do not import torch, so mistakes are reported at once. Ranges of the samplers' arguments are rules of the library,
which checks them when it builds the sampler.
"""

import inspect
import re
from collections.abc import Collection, Mapping
from typing import Any

import gymnasium
from gymnasium.envs.registration import load_env_creator
from gymnasium.spaces import Discrete

from recipes.common.config import DECOUPLED, EVENT_TABLES, EnvConfig, RunConfig
from recipes.common.environment import make_continuous_env, make_discrete_env, make_env
from recipes.common.errors import ConfigError
from recipes.common.hints import WITH_VECTORS, did_you_mean, unsupported_sampler, with_suggestion
from recipes.common.schemas.acer import ACERConfig
from recipes.common.signatures import LIBRARY, SAMPLER_CLASSES, SET_BY_RECIPES, Argument, arguments, sampler_arguments

MAKERS = {
    "dqn": make_discrete_env,
    "distributed": make_discrete_env,
    "r2d2": make_discrete_env,
    "sac": make_continuous_env,
    "td3": make_continuous_env,
    "acer": make_env,
}
# Class of each optimizer, and the arguments that the recipes set; see recipes.common.optimizers.
OPTIMIZERS = {"adam": ("torch.optim.adam", "Adam"), "rmsprop": ("recipes.common.optimizers", "RMSProp")}
SET_FOR_OPTIMIZERS = ("params", "parameters", "lr", "fused")
# Arguments of Adam that AdamStep does not support.
UNSUPPORTED = (
    "amsgrad",
    "maximize",
    "weight_decay",
    "decoupled_weight_decay",
    "foreach",
    "capturable",
    "differentiable",
)


def check(config: RunConfig, recipe: str, given: Collection[str]) -> None:
    """Check what can be checked before torch is imported.

    Args:
        config: the configuration of a training recipe.
        recipe: name of the recipe.
        given: the keys that the command line sets.

    Raises:
        ConfigError: if a package is missing, the recipe does not support the sampler, the command line replaces the
            sampler but not its options, an argument of the sampler or the optimizer does not exist or has a wrong kind
            of value, the environment cannot be made, or a hyperparameter does not apply to its actions.
    """
    try:
        config.logger.require_package()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if "sampler.name" in given:
        name = config.sampler["name"]
        raise ConfigError(f"sampler.name={name}: write sampler={name}, which also sets the options of this sampler")
    _check_sampler(config, recipe)
    optimizer = getattr(config.learning, "optimizer", None)
    if optimizer is not None:
        _check_optimizer(optimizer, f"{config.learning.group}.optimizer")
    space = _check_environment(config.env, recipe)
    if isinstance(config.learning, ACERConfig):
        try:
            names = [key.removeprefix("acer.") for key in given if key.startswith("acer.")]
            config.learning.check_actions(names, discrete=isinstance(space, Discrete))
        except ValueError as error:
            raise ConfigError(str(error)) from error


def _check_sampler(config: RunConfig, recipe: str) -> None:
    name = config.sampler["name"]
    if unsupported := unsupported_sampler(name, recipe):
        raise ConfigError(unsupported)
    checked = [(config.sampler, "sampler")]
    if name in DECOUPLED:
        critic = config.sampler.get("critic")
        names = [choice for choice in SAMPLER_CLASSES if choice not in DECOUPLED]
        if not isinstance(critic, dict):
            raise ConfigError(f"sampler.critic={_shown(critic)}: must be a group, as in sampler.critic={{name: per}}")
        if critic.get("name") not in names:
            text = f"sampler.critic.name={_shown(critic.get('name'))}: choose {', '.join(names)}"
            raise ConfigError(with_suggestion(text))
        checked.append((critic, "sampler.critic"))
    for settings, where in checked:
        if settings["name"] in EVENT_TABLES and not config.env.events:
            raise ConfigError(
                f"sampler={name}: env={config.env.name} has no events; define some, as in "
                "recipes/conf/env/threerooms.yaml"
            )
        if recipe == "acer" and settings["name"] in EVENT_TABLES and settings.get("retention", "pinned") == "pinned":
            raise ConfigError(
                f"sampler={name}: recipes.acer draws slices, so transitions must stay in their order; add "
                "sampler.retention=ring"
            )
        given = {key: value for key, value in settings.items() if key != "name"}
        for group, prefix in ((given, where), (given.get("priority"), f"{where}.priority")):
            for key in SET_BY_RECIPES:
                if isinstance(group, dict) and key in group:
                    raise ConfigError(f"{prefix}.{key}: the recipe sets it; leave it out")
        check_arguments(given, sampler_arguments(settings["name"]), where)


def _check_optimizer(settings: Mapping[str, Any], where: str) -> None:
    name = settings.get("name")
    if name not in OPTIMIZERS:
        raise ConfigError(with_suggestion(f"{where}.name={_shown(name)}: choose {', '.join(OPTIMIZERS)}"))
    known = {
        key: value for key, value in arguments(*OPTIMIZERS[name]).items() if key not in SET_FOR_OPTIMIZERS + UNSUPPORTED
    }
    check_arguments({key: value for key, value in settings.items() if key != "name"}, known, where)


def check_arguments(given: Mapping[str, Any], known: Mapping[str, Argument], where: str) -> None:
    """Check the names of arguments and the kinds of their values.

    Args:
        given: the values by name.
        known: the arguments of the class by name.
        where: key of the values in the configuration, for messages.

    Raises:
        ConfigError: if an argument does not exist, or its value is of a wrong kind or is not one of the choices.
    """
    for key, value in given.items():
        full = f"{where}.{key}"
        if key not in known:
            names = ", ".join(known) or "none"
            raise ConfigError(
                f"{full}: {where} has no key {key}{did_you_mean(key, known) or f'; its keys are {names}'}"
            )
        argument, shown = known[key], _shown(value)
        if argument.choices and value not in argument.choices:
            raise ConfigError(with_suggestion(f"{full}={shown}: choose {', '.join(map(_shown, argument.choices))}"))
        if (problem := argument.problem(value)) is not None:
            raise ConfigError(f"{full}={shown}: {problem}")
        if argument.fields and not isinstance(value, dict | None):
            raise ConfigError(f"{full}={shown}: must be a group, as in {full}={{{next(iter(argument.fields))}: ...}}")
        if argument.fields and isinstance(value, dict):
            check_arguments(value, argument.fields, full)
        elif isinstance(value, dict) and "Anneal" in argument.kinds:
            schedule = {name: part for name, part in arguments(LIBRARY, "Anneal").items() if name != "num_updates"}
            check_arguments(value, schedule, full)
            if missing := [name for name in schedule if name not in value]:
                raise ConfigError(f"{full}: needs {missing[0]}, as in {full}={{start: 0.4, end: 1.0}}")


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _check_environment(config: EnvConfig, recipe: str) -> gymnasium.Space:
    """Make the environments of the evaluations and, if they have other options, those of the training.

    Returns:
        The action space.
    """
    spaces = []
    cases = {"env.options": {}} | ({"env.training": config.training} if config.training else {})
    cases |= {f"env.evaluations.{name}": options for name, options in config.evaluations.items()}
    for where, options in cases.items():
        changed = {**vars(config), "options": {**config.options, **options}, "evaluations": {}}
        if where != "env.options":
            changed["events"] = {}
        try:
            env = MAKERS[recipe](EnvConfig(**changed))
            if recipe == WITH_VECTORS and len(env.observation_space.shape or ()) != 1:
                raise ConfigError(f"env.id={config.id}: recipes.{recipe} needs vector observations; use recipes.dqn")
            spaces.append(env.action_space)
            env.close()
        except ConfigError as error:
            if found := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
                raise ConfigError(
                    f"{where}.{found[1]}: {config.id} has no option {found[1]}{_similar(found[1], config.id)}"
                ) from error
            text = str(error).replace("`", "")
            if config.options or options:
                is_unknown = isinstance(error.__cause__, gymnasium.error.Error)
                text = text if is_unknown else text.replace(f"env.id={config.id}", where, 1)
            raise ConfigError(with_suggestion(text)) from error
    return spaces[0]


def _similar(option: str, env_id: str) -> str:
    """The end of a message that suggests options of an environment with a similar name."""
    creator = gymnasium.spec(env_id.split(":")[-1]).entry_point
    assert creator is not None
    load = creator if callable(creator) else load_env_creator(creator)
    return did_you_mean(option, inspect.signature(load).parameters)
