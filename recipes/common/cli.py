"""Command-line handling shared by all recipes: Hydra, exit codes, run directories, resuming, Ctrl-C.

This module does not import torch, so most mistakes on the command line are reported within a second or two.
"""

import argparse
import itertools
import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from recipes.common.config import RECIPES
from recipes.common.errors import ConfigError
from recipes.common.files import CHECKPOINT, CONFIG, load_config
from recipes.common.help import help_text
from recipes.common.hints import compose_config, did_you_mean, explain, with_suggestion

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "video", "checkpoint_interval")

Schema = TypeVar("Schema")

OmegaConf.register_new_resolver("lcm", math.lcm, replace=True)


def run_recipe(name: str, function: str = "train") -> NoReturn:
    """Read the command line with Hydra, run the recipe once per job and exit with its exit code.

    The configurations of all jobs are checked before the recipe's module is imported, because that imports torch.

    Args:
        name: the recipe's module, without the leading "recipes.". The last part of the name is also that of its
            configuration, recipes/conf/<part>.yaml, and of its class, recipes.common.schemas.<part>.Config.
        function: name of the module's function that runs a job. It is called with the configuration and the run
            directory and returns an exit code. It may raise ConfigError before training starts. Default: "train".
    """
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{name}", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("words", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    try:
        jobs = [options.words]
        with explained(name, options.words):
            if options.help:
                print(help_text(name, schema_of(name), options.words))
                sys.exit(DONE)
            if options.multirun:
                overrides = OverridesParser.create().parse_overrides(options.words)
                (jobs,) = BasicSweeper.split_arguments(overrides, None)
        configs = [composed_job(name, words) for words in jobs]
        if options.cfg is not None:
            print(OmegaConf.to_yaml(without_hydra(configs[0])))
            sys.exit(DONE)
        for config in configs:
            code = run_job(name, function, config, multirun=options.multirun)
            if code != DONE:
                sys.exit(code)
    except ConfigError as error:
        sys.stderr.write(f"bad configuration: {' '.join(str(error).split())}\n")
        sys.exit(BAD_CONFIG)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(DONE)


def schema_of(name: str) -> type:
    """The class of a recipe's configuration."""
    return import_module(f"recipes.common.schemas.{name.split('.')[-1]}").Config


@contextmanager
def explained(name: str, words: Sequence[str]) -> Iterator[None]:
    """Raise ConfigError, with an explanation, instead of an error of Hydra or OmegaConf."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, name, words)) from error


def composed_job(name: str, words: Sequence[str]) -> DictConfig:
    """The checked configuration of a job, with Hydra's options.

    Args:
        name: the recipe's module, see run_recipe.
        words: the words of the command line, without flags.

    Raises:
        ConfigError: if the configuration cannot be run, as far as this can be found out without importing torch. For a
            study, also if a variant cannot be run in one of its environments.
    """
    with explained(name, words):
        config = compose_config(name, words, hydra=True)
    for word in words:
        if word.lstrip("+").startswith("sampler.name="):
            raise ConfigError(f"{word}: write {word.replace('.name', '')}, which also sets the options of this sampler")
    if config.get("resume") is not None:
        for file in (CONFIG, CHECKPOINT):
            if not Path(config.resume, file).is_file():
                raise ConfigError(
                    f"resume={config.resume}: no {file} there; pass the directory of a run that has saved a checkpoint"
                )
        resumed = resumed_config(config, Path(config.resume), words)
        config = OmegaConf.merge(resumed, {"hydra": config.hydra})
    assert isinstance(config, DictConfig)
    parsed = parse_config(without_hydra(config), schema_of(name))
    if study := getattr(parsed, "study", None):
        for variant, env in itertools.product(study.variants, study.envs):
            try:
                composed_job(study.recipe, [f"env={env}", *study.fixed, *study.variants[variant]])
            except ConfigError as error:
                raise ConfigError(f"study.variants.{variant}, env={env}: {error}") from error
    return config


def without_hydra(config: DictConfig) -> DictConfig:
    """The configuration without Hydra's own options."""
    return OmegaConf.masked_copy(config, [key for key in map(str, config) if key != "hydra"])


def run_job(name: str, function: str, config: DictConfig, *, multirun: bool) -> int:
    """Run a job in its directory and return its exit code. If it leaves no files, the directory is removed."""
    directory = Path(config.hydra.sweep.dir, config.hydra.sweep.subdir) if multirun else Path(config.hydra.run.dir)
    run_dir = Path(config.get("resume") or directory)
    made = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(run_dir, os.W_OK | os.X_OK):
            raise ConfigError(f"{run_dir}: directory is not writable; choose another directory")
        recipe = import_module(f"recipes.{name}")
        logging.getLogger("torchrl").setLevel(logging.WARNING)  # its messages would break the progress bar
        return getattr(recipe, function)(without_hydra(config), run_dir)
    except (OSError, MemoryError, RuntimeError) as error:
        # config.yaml is written after everything is built: without it, the sizes in the configuration are too large
        if not (run_dir / CONFIG).is_file() and is_out_of_memory(error):
            text = f"not enough memory ({reason(error)}): reduce the sizes of buffer, batches or networks"
            raise ConfigError(text) from error
        if isinstance(error, OSError) and not run_dir.is_dir():
            raise ConfigError(f"{run_dir}: {reason(error)}") from error
        raise
    finally:
        with suppress(OSError):
            for path in made:
                path.rmdir()


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: an error of Python, NumPy or torch, on a CPU or a GPU."""
    return isinstance(error, MemoryError) or re.search(r"allocate memory|out of memory", str(error)) is not None


def reason(error: Exception) -> str:
    """A short text for the error: the system's text if there is one, else the first line of the message."""
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def resumed_config(config: DictConfig, run_dir: Path, words: Sequence[str]) -> DictConfig:
    """The configuration that the run was started with, plus the values of the keys in RESUMABLE in `words`.

    Args:
        config: the configuration composed from this command line.
        run_dir: directory of the run.
        words: the `key=value` words of this command line.

    Raises:
        ConfigError: if it is a run of another recipe, or if another key is set: that could change the learning problem.
    """
    resumed = load_config(run_dir / CONFIG)
    if (other := recipe_of(resumed)) != recipe_of(config):
        if other is None:
            raise ConfigError(f"resume={run_dir}: {CONFIG} there is not that of a training run")
        recipe = f"recipes.{other}"
        raise ConfigError(f"resume={run_dir}: a run of {recipe}; use python -m {recipe} resume={run_dir}")
    for word in words:
        key = word.split("=")[0]
        if key not in RESUMABLE:
            raise ConfigError(
                f"{word}: a resumed run keeps its configuration; only {', '.join(RESUMABLE[1:])} can change"
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
        names = [field.name for field in fields(error.object_type)] if is_dataclass(error.object_type) else []
        hint = did_you_mean(key, names) or f"; its keys are {', '.join(names)}"
        raise ConfigError(f"{error.full_key}: {where or 'the configuration'} has no key {key}{hint}") from error
    except ValidationError as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(with_suggestion(str(error).splitlines()[0])) from error
    assert isinstance(parsed, schema)
    return parsed


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
