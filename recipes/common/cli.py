"""Command-line handling shared by all recipes: hydra, exit codes, run directories, resuming, Ctrl-C.

This module does not import torch, so mistakes on the command line are reported within a second or two.
"""

import itertools
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from recipes.common.errors import ConfigError
from recipes.common.files import load_config
from recipes.common.help import help_text
from recipes.common.hints import CONF, RECIPES, compose_config, did_you_mean, explain, field_names, with_suggestion
from recipes.common.schemas.study import StudyConfig

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
CONFIG, CHECKPOINT = "config.yaml", "checkpoint.zip"  # file names in a run directory
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "video", "checkpoint_interval")

Schema = TypeVar("Schema")


def run_recipe(name: str, function: str = "train") -> NoReturn:
    """Read the command line with hydra, run the recipe once per job and exit with its exit code.

    The configuration is checked before the recipe's module is imported, because that imports torch.

    Args:
        name: the recipe's module, without the leading "recipes.". The last part of the name is also that of its
            configuration, recipes/conf/<part>.yaml, and of its class, recipes.common.schemas.<part>.Config.
        function: name of the module's function that runs a job. It is called with the configuration and the run
            directory and returns an exit code. It may raise ConfigError before training starts. Default: "train".
    """
    words = sys.argv[1:]
    schema = import_module(f"recipes.common.schemas.{name.split('.')[-1]}").Config
    if {"--help", "-h"} & set(words):
        try:
            print(help_text(name, schema, [word for word in words if not word.startswith("-")]))
        except ValueError as error:
            exit_bad_config(error)
        sys.exit(DONE)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises its errors instead of printing pages and exiting with 1
    started = False
    try:
        checked = check_command_line(name, schema, words)
    # hydra raises ValueError, too
    except (ValueError, HydraException, OmegaConfBaseException) as error:
        exit_bad_config(ConfigError(explain(error, name, schema, words) or one_line(error)))

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=name.split(".")[-1])
    def job(config: DictConfig) -> None:
        nonlocal started
        started = True
        run_dir = output_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            if config.get("resume") is not None:
                run_dir = Path(run_directory(config.resume, ""))
                config = resumed_config(config, run_dir, list(HydraConfig.get().overrides.task))
            if not os.access(run_dir, os.W_OK | os.X_OK):
                raise ConfigError(f"{run_dir}: directory is not writable; choose another directory")
            if not checked:
                check_config(name, schema, config, list(HydraConfig.get().overrides.task))
            recipe = import_module(f"recipes.{name}")
            logging.getLogger("torchrl").setLevel(logging.WARNING)  # its messages would break the progress bar
            code = getattr(recipe, function)(config, run_dir)
        except ConfigError as error:
            exit_bad_config(error)
        except (MemoryError, RuntimeError) as error:
            # config.yaml is written after everything is built: without it, the sizes in the configuration are too large
            if (run_dir / CONFIG).is_file() or not is_out_of_memory(error):
                raise
            exit_bad_config(
                ConfigError(f"not enough memory ({reason(error)}): reduce the sizes of buffer, batches or networks")
            )
        finally:
            remove_empty(output_dir)
        if code != DONE:
            sys.exit(code)  # also stops a sweep (-m)

    try:
        job()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        exit_bad_config(ConfigError(explain(error, name, schema, words) or one_line(error)))
    except (OSError, ValueError) as error:
        if started:
            raise
        # hydra could not create the run directory, or rejected one of its own options
        where = f"{error.filename}: " if isinstance(error, OSError) else ""
        exit_bad_config(ConfigError(f"{where}{reason(error)}"))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(DONE)


def check_command_line(name: str, schema: type, words: list[str]) -> bool:
    """Check the configurations of all jobs of a command line, before hydra creates a directory.

    Args:
        name: the recipe's module, see run_recipe.
        schema: the class of its configuration.
        words: the words of the command line.

    Returns:
        True if the configuration was checked; False if options of hydra choose another command than a run.

    Raises:
        ConfigError: if a configuration cannot be run.
        HydraException: if hydra cannot read or compose it. OmegaConf's errors likewise.
    """
    parser = get_args_parser()
    flags = re.findall(r"--[\w-]+", parser.format_usage())

    def refuse(message: str) -> NoReturn:
        if found := re.search(r"unrecognized arguments: (-\S+)", message):
            plain = found[1].lstrip("-")
            hint = did_you_mean(found[1], flags) or f"; options have no dashes: {plain.split('=')[0]}=<value>"
            raise ConfigError(f"{found[1]}: there is no such flag{hint}")
        raise ConfigError(message)

    parser.error = refuse
    arguments = vars(parser.parse_args(words))
    overrides = OverridesParser.create().parse_overrides(arguments["overrides"])
    used = {key for key, value in arguments.items() if value and key != "overrides"}
    if used - {"run", "multirun"} or any(override.key_or_group.startswith("hydra/") for override in overrides):
        return False
    jobs = [[str(override.input_line)] for override in overrides]
    if "multirun" in used:
        jobs = [
            [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
            if override.is_sweep_override() and override.is_discrete_sweep()
            else [str(override.input_line)]
            for override in overrides
        ]
    for job in itertools.product(*jobs):
        config = compose_config(name, job)
        if config.get("resume") is not None:
            config = resumed_config(config, Path(run_directory(config.resume, "")), list(job))
        check_config(name, schema, config, job)
    return True


def check_config(name: str, schema: type, config: DictConfig, words: Iterable[str]) -> None:
    """Raise ConfigError if a configuration cannot be run, as far as this can be found out without importing torch.

    Args:
        name: the recipe's module, see run_recipe.
        schema: the class of its configuration.
        config: the configuration.
        words: the words of the command line, without flags.

    Raises:
        ConfigError: if the configuration cannot be run.
    """
    parsed = parse_config(config, schema)
    if hasattr(parsed, "learning"):
        import_module("recipes.common.checks").check(
            parsed, name, [word.lstrip("+").partition("=")[0] for word in words]
        )
    if hasattr(parsed, "study"):
        check_study(parsed.study)


def check_study(study: StudyConfig) -> None:
    """Raise ConfigError if a variant of the study cannot be run in one of its environments."""
    schema = import_module(f"recipes.common.schemas.{study.recipe}").Config
    for variant, env in itertools.product(study.variants, study.envs):
        words = [f"env={env}", *study.fixed, *study.variants[variant]]
        try:
            check_command_line(study.recipe, schema, words)
        except (ValueError, HydraException, OmegaConfBaseException) as error:
            problem = explain(error, study.recipe, schema, words) or one_line(error)
            raise ConfigError(f"study.variants.{variant}, env={env}: {problem}") from error


def remove_empty(run_dir: Path) -> None:
    """Remove a run directory and its parents in runs/, if they are empty. Hydra creates them before a job starts."""
    runs = Path.cwd() / "runs"
    for directory in (run_dir, *run_dir.absolute().parents):
        if any(directory.iterdir()):
            return
        directory.rmdir()
        if directory == runs or runs not in directory.parents:
            return


def exit_bad_config(error: Exception) -> NoReturn:
    """Write the error to stderr in one line and exit with code 2."""
    sys.stderr.write(f"bad configuration: {one_line(error)}\n")
    sys.exit(BAD_CONFIG)


def one_line(error: Exception) -> str:
    """The message of an error in one line, without the internals of hydra and OmegaConf."""
    text = str(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        text += f" ({str(error.__cause__).splitlines()[0]})"
    text = re.split(r"\n\s*(?:Config search path|object_type=|reference_type=|See https://hydra.cc)", text)[0]
    text = re.sub(r"^ConfigError raised while resolving interpolation: ", "", text)
    text = re.sub(r"\s*\n\s*full_key: *(\S*)", r" (key: \1)", text)
    return " ".join(text.split())


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: an error of Python, NumPy or torch, on a CPU or a GPU."""
    return isinstance(error, MemoryError) or re.search(r"allocate memory|out of memory", str(error)) is not None


def reason(error: Exception) -> str:
    """A short text for the error: the system's text if there is one, else the first line of the message."""
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def run_directory(resume: str | None, fresh: str) -> str:
    """The run directory: `resume` if it is given, else `fresh`.

    Raises:
        ConfigError: if `resume` holds no checkpoint. It is raised before hydra creates a directory.
    """
    if resume is None:
        return fresh
    for name in (CONFIG, CHECKPOINT):
        if not (Path(resume) / name).is_file():
            raise ConfigError(
                f"resume={resume}: no {name} there; pass the directory of a run that has saved a checkpoint"
            )
    return resume


OmegaConf.register_new_resolver("run_dir", run_directory, replace=True)
OmegaConf.register_new_resolver("lcm", math.lcm, replace=True)


def resumed_config(config: DictConfig, run_dir: Path, overrides: list[str]) -> DictConfig:
    """The configuration that the run was started with, plus overrides of the keys in RESUMABLE.

    Args:
        config: the configuration that hydra composed from this command line.
        run_dir: directory of the run.
        overrides: the `key=value` words of this command line.

    Raises:
        ConfigError: if it is a run of another recipe, or if another key is overridden: that could change the learning
            problem.
    """
    resumed = load_config(run_dir / CONFIG)
    if (other := recipe_of(resumed)) != recipe_of(config):
        if other is None:
            raise ConfigError(f"resume={run_dir}: {CONFIG} there is not that of a training run")
        recipe = f"recipes.{other}"
        raise ConfigError(f"resume={run_dir}: a run of {recipe}; use python -m {recipe} resume={run_dir}")
    for override in overrides:
        key = override.split("=")[0]
        if key not in RESUMABLE:
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration; only {', '.join(RESUMABLE[1:])} can change"
            )
        resumed[key] = config[key]
    return resumed


def recipe_of(config: DictConfig) -> str | None:
    """The recipe that a configuration belongs to; None if it is of none."""
    # recipes.distributed has the hyperparameters of recipes.dqn
    names = [name for name, group in RECIPES.items() if group in config]
    return next((name for name in names if (name == "distributed") == ("num_collectors" in config)), None)


def parse_config(config: DictConfig | ListConfig, schema: type[Schema]) -> Schema:
    """The configuration as a `schema` dataclass.

    Raises:
        ConfigError: if a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    try:
        parsed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))
    except ConfigKeyError as error:
        where, _, key = str(error.full_key).rpartition(".")
        names = field_names(error.object_type)
        hint = did_you_mean(key, names) or f"; its keys are {', '.join(names)}"
        raise ConfigError(f"{error.full_key}: {where or 'the configuration'} has no key {key}{hint}") from error
    except ValidationError as error:
        raise ConfigError(wrong_type(error, config)) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(with_suggestion(one_line(error))) from error
    assert isinstance(parsed, schema)
    return parsed


def wrong_type(error: ValidationError, config: DictConfig | ListConfig) -> str:
    """The message for a value of the wrong type."""
    text, key = str(error), error.full_key
    value = OmegaConf.select(config, key) if key else None
    given = "null" if value is None else value
    for pattern, requirement in (
        ("not a valid bool", f"must be true or false{did_you_mean(str(given), ('true', 'false'))}"),
        ("converted to Integer", f"must be a whole number{_as_integer(value)}"),
        ("converted to Float", "must be a number"),
        ("not a ListConfig", f"must be a list, as in {key}=[{given}]"),
        ("Cannot assign str to Dict", f"must be a group, as in {key}={{name: {given}}}"),
        ("Incompatible value 'None'", "must have a value"),
    ):
        if pattern in text and key:
            return f"{key}={given}: {requirement}"
    return one_line(error)


def _as_integer(value: Any) -> str:
    """The end of a message that suggests 10000 for 1e4; empty if the value is not a whole number."""
    return f", as in {value:.0f}" if isinstance(value, float) and value.is_integer() else ""


@contextmanager
def interruption() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C (SIGINT) and SIGTERM, so that the training loop can stop between two batches.

    A second signal raises KeyboardInterrupt at once.

    Yields:
        A function that returns whether a signal has arrived.
    """
    signals: list[int] = []

    def note(number: int, _frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
