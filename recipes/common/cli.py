"""Command-line handling shared by all recipes: hydra, exit codes, run directories, resuming, Ctrl-C.

This module does not import torch, so mistakes on the command line are reported within a second or two.
"""

import logging
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from recipes.common.help import help_text
from recipes.common.hints import CONF, did_you_mean, explain, field_names

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
CONFIG, CHECKPOINT = "config.yaml", "checkpoint.zip"  # file names in a run directory
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "video", "checkpoint_interval")

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """The configuration cannot be run. The message is shown to the user."""


class LostProcess(RuntimeError):
    """A process that the run needs has ended. The message names it."""


def run_recipe(name: str, function: str = "train") -> NoReturn:
    """Read the command line with hydra, run the recipe once per job and exit with its exit code.

    The configuration is checked before the recipe's module is imported, because that imports torch.

    Args:
        name: the recipe's module, without the leading "recipes.". The last part of the name is also that of its
            configuration, recipes/conf/<part>.yaml, and of its class, recipes.common.schemas.<part>.Config.
        function: name of the module's function that runs a job. It is called with the configuration and the run
            directory and returns an exit code. It may raise ConfigError before training starts. Default: "train".
    """
    if {"--help", "-h"} & set(sys.argv):
        try:
            print(help_text(name, sys.argv[1:]))
        except ValueError as error:
            exit_bad_config(error)
        sys.exit(DONE)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises its errors instead of printing pages and exiting with 1
    schema = import_module(f"recipes.common.schemas.{name.split('.')[-1]}").Config
    started = False

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
            checked = parse_config(config, schema)
            if hasattr(checked, "logger"):
                try:
                    checked.logger.require_package()
                except ValueError as error:
                    raise ConfigError(str(error)) from error
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
            if not any(output_dir.iterdir()):
                output_dir.rmdir()  # hydra creates the directory before the configuration is checked
        if code != DONE:
            sys.exit(code)  # also stops a sweep (-m)

    try:
        job()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        exit_bad_config(ConfigError(explain(error, name, schema, sys.argv[1:]) or one_line(error)))
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
        ConfigError: if another key is overridden: it could change the learning problem.
    """
    resumed = cast(DictConfig, OmegaConf.load(run_dir / CONFIG))
    for override in overrides:
        key = override.split("=")[0]
        if key not in RESUMABLE:
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration; only {', '.join(RESUMABLE[1:])} can change"
            )
        resumed[key] = config[key]
    return resumed


def parse_config(config: DictConfig | ListConfig, schema: type[Schema]) -> Schema:
    """The configuration as a `schema` dataclass.

    Raises:
        ConfigError: if a key is unknown or missing, or a value has the wrong type or is out of range.
    """
    try:
        parsed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))
    except ConfigKeyError as error:
        hint = did_you_mean(str(error.key), field_names(error.object_type))
        raise ConfigError(one_line(error) + hint) from error
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(error)) from error
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
