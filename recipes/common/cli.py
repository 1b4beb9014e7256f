"""Command-line handling shared by all recipes: Hydra, exit codes, run directories, resuming, Ctrl-C.

This module does not import torch, so most mistakes on the command line are reported within a second or two.
"""

import argparse
import itertools
import logging
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from recipes.common.config import RECIPES
from recipes.common.errors import ConfigError, did_you_mean
from recipes.common.files import CHECKPOINT, CONFIG, PROGRESS, load_config, read_csv, require_files, was_stopped
from recipes.common.options import compose_config, explain, help_text
from recipes.common.schemas import SCHEMAS

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "checkpoint_interval")

OmegaConf.register_new_resolver("lcm", math.lcm, replace=True)


def run_recipe(name: str, module: str | None = None, function: str = "train") -> NoReturn:
    """Read the command line with Hydra, run the recipe once per job and exit with its exit code.

    The configurations of all jobs are checked before the recipe's module is imported, because that imports torch.

    Args:
        name: the recipe; names its configuration, recipes/conf/<name>.yaml, and its class in SCHEMAS.
        module: the module to import. Default: recipes.<name>.
        function: name of the module's function that runs a job. It is called with the checked configuration and the
            run directory, which it makes, and returns an exit code. It may raise ConfigError before training starts.
            Default: "train".
    """
    parser = argparse.ArgumentParser(prog=f"python -m recipes.{name}", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-m", "--multirun", action="store_true")
    parser.add_argument("words", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args()
    try:
        jobs = [options.words]
        with explained(name, options.words):
            if options.help:
                print(help_text(name, SCHEMAS[name], options.words))
                sys.exit(DONE)
            if options.multirun:
                overrides = OverridesParser.create().parse_overrides(options.words)
                (jobs,) = BasicSweeper.split_arguments(overrides, None)
        for config, run_dir in [compose_job(name, words, multirun=options.multirun) for words in jobs]:
            recipe = import_module(module or f"recipes.{name}")
            logging.getLogger("torchrl").setLevel(logging.WARNING)  # its messages would break the progress bar
            code = getattr(recipe, function)(config, run_dir)
            if code != DONE:
                sys.exit(code)
    except ConfigError as error:
        sys.stderr.write(f"bad configuration: {' '.join(str(error).split())}\n")
        sys.exit(BAD_CONFIG)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(DONE)


def launch() -> None:
    """Run the training recipe that `python -m recipes.<name>` names, before Python imports its module, and torch."""
    words = [*sys.orig_argv, ""]
    name = words[words.index("-m") + 1].removeprefix("recipes.") if "-m" in words else ""
    if name in RECIPES:
        run_recipe(name)


@contextmanager
def explained(name: str, words: Sequence[str]) -> Iterator[None]:
    """Raise ConfigError, with an explanation, instead of an error of Hydra or OmegaConf."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error, name, words)) from error


def compose_job(name: str, words: Sequence[str], *, multirun: bool = False) -> tuple[Any, Path]:
    """The checked configuration of a job, and its directory.

    Args:
        name: the recipe's module, see run_recipe.
        words: the words of the command line, without flags.
        multirun: whether it is one of several jobs, with a directory of the sweep. Default: False.

    Raises:
        ConfigError: if the configuration cannot be run, as far as this can be found out without importing torch. For a
            study, also if a variant cannot be run in one of its environments.
    """
    for word in words:
        if word.lstrip("+").startswith("sampler.name="):
            raise ConfigError(f"{word}: write {word.replace('.name', '')}, which also sets the options of this sampler")
    with explained(name, words):
        given = {each.key_or_group: each.value() for each in OverridesParser.create().parse_overrides([*words])}
        if given.get("resume") is not None:
            run_dir = Path(str(given["resume"]))
            config = resumed_config(name, run_dir, given)
        else:
            composed = compose_config(name, words, hydra=True)
            hydra, own = composed.hydra, [key for key in map(str, composed) if key != "hydra"]
            run_dir = Path(hydra.sweep.dir, hydra.sweep.subdir) if multirun else Path(hydra.run.dir)
            config = OmegaConf.masked_copy(composed, own)
    parsed = parse_config(config, SCHEMAS[name])
    if study := getattr(parsed, "study", None):
        for variant, env in itertools.product(study.variants, study.envs):
            try:
                compose_job(study.recipe, [f"env={env}", *study.fixed, *study.variants[variant]])
            except ConfigError as error:
                raise ConfigError(f"study.variants.{variant}, env={env}: {error}") from error
    return parsed, run_dir


def resumed_config(name: str, run_dir: Path, given: Mapping[str, Any]) -> DictConfig:
    """The configuration that the run was started with, plus the values of the keys in RESUMABLE and more steps.

    Args:
        name: the recipe.
        run_dir: directory of the run.
        given: the keys and values of the command line.

    Raises:
        ConfigError: if the run cannot be resumed, is one of another recipe, or if another key is set: that could change
            the learning problem.
    """
    require_files(run_dir, (CONFIG, CHECKPOINT), "pass the directory of a run with a checkpoint", "resume=")
    resumed = load_config(run_dir / CONFIG)
    if other := sorted({*map(str, resumed)} ^ {field.name for field in fields(SCHEMAS[name])}):
        raise ConfigError(f"resume={run_dir}: a run of another recipe; only one of the two has {', '.join(other)}")
    (group,) = (key for key, value in resumed.items() if OmegaConf.is_dict(value) and "total_steps" in value)
    for key, value in given.items():
        if key == f"{group}.total_steps":
            extend(resumed[group], value, f"{key}={value}")
        elif key in RESUMABLE:
            resumed[key] = value
        else:
            others = f"{', '.join(RESUMABLE[1:])}, {group}.total_steps"
            raise ConfigError(f"{key}={value}: a resumed run keeps its configuration; only {others} can change")
    rows = read_csv(run_dir / PROGRESS) if (run_dir / PROGRESS).is_file() else []
    if f"{group}.total_steps" in given and rows and was_stopped(resumed, rows):
        raise ConfigError(f"resume={run_dir}: the run ended at env.reward_threshold; pass stop_at_threshold=false too")
    return resumed


def extend(learning: DictConfig, total_steps: Any, word: str) -> None:
    """Set a larger number of steps of a resumed run; its schedules stay as they were."""
    if not isinstance(total_steps, int) or total_steps <= learning.total_steps:
        raise ConfigError(f"{word}: must be an integer > {learning.total_steps}, the steps of the run")
    learning.schedule_steps = learning.get("schedule_steps") or learning.total_steps
    learning.total_steps = total_steps


def parse_config(config: DictConfig | ListConfig, schema: Any) -> Any:
    """The configuration as a `schema` dataclass.

    Raises:
        ConfigError: if a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))
    except ConfigKeyError as error:
        where, _, key = str(error.full_key).rpartition(".")
        names = [field.name for field in fields(error.object_type)] if is_dataclass(error.object_type) else []
        hint = did_you_mean(key, names) or f"; its keys are {', '.join(names)}"
        raise ConfigError(f"{error.full_key}: {where or 'the configuration'} has no key {key}{hint}") from error
    except ValidationError as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error


@contextmanager
def interruption(stop: Callable[[], object] = lambda: None) -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C (SIGINT) and SIGTERM, so that the training loop can stop between two batches.

    A second signal raises KeyboardInterrupt at once.

    Args:
        stop: called at the first signal. Default: does nothing.

    Yields:
        A function that returns whether a signal has arrived.
    """
    signals: list[int] = []

    def note(number: int, _frame: object) -> None:
        if signals:
            raise KeyboardInterrupt
        signals.append(number)
        stop()

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
