"""What every recipe does around its training: hydra, exit codes, run directories, resuming, Ctrl-C.

Nothing here imports torch, so that a mistake on the command line is reported within a second or two.
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

from recipes.help import help_text
from recipes.hints import did_you_mean, explain, field_names

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
CONFIG, CHECKPOINT = "config.yaml", "checkpoint.zip"  # in a run's directory
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "video", "checkpoint_interval")

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot be run; its message is what the user reads."""


class LostProcess(RuntimeError):
    """A process that a run cannot go on without has ended; its message says which."""


def run_recipe(name: str, function: str = "train") -> NoReturn:
    """Reads the command line with hydra, runs the recipe once per job and exits with its code.

    The configuration is checked before the recipe's module, and torch with it, is imported.

    Args:
        name: the recipe; its module is recipes.<name>, the class of its configuration recipes.schemas.<name>.Config,
            its top file recipes/conf/<name>.yaml.
        function: the function of the module that runs a job. Called with the configuration and the directory of the
            run, it returns an exit code, and raises ConfigError before it starts to train.
    """
    if {"--help", "-h"} & set(sys.argv):
        try:
            print(help_text(name, sys.argv[1:]))
        except ValueError as error:
            exit_bad_config(error)
        sys.exit(DONE)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises its errors instead of printing pages and exiting with 1
    schema = import_module(f"recipes.schemas.{name}").Config
    started = False

    @hydra.main(version_base="1.3", config_path=str(Path(__file__).parent / "conf"), config_name=name)
    def job(config: DictConfig) -> None:
        nonlocal started
        started = True
        run_dir = output_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            if config.get("resume") is not None:
                run_dir = Path(run_directory(config.resume, ""))
                config = resumed_config(config, run_dir, list(HydraConfig.get().overrides.task))
            if not os.access(run_dir, os.W_OK | os.X_OK):
                raise ConfigError(f"{run_dir}: files cannot be written there; choose another directory")
            checked = parse_config(config, schema)
            if hasattr(checked, "logger"):
                try:
                    checked.logger.require_package()
                except ValueError as error:
                    raise ConfigError(str(error)) from error
            recipe = import_module(f"recipes.{name}")
            logging.getLogger("torchrl").setLevel(logging.WARNING)  # its notes would tear the progress bar
            code = getattr(recipe, function)(config, run_dir)
        except ConfigError as error:
            exit_bad_config(error)
        except (MemoryError, RuntimeError) as error:
            # config.yaml is written when everything is built
            if (run_dir / CONFIG).is_file() or not is_out_of_memory(error):
                raise
            exit_bad_config(
                ConfigError(f"not enough memory ({reason(error)}): reduce the sizes of buffer, batches or networks")
            )
        finally:
            if not any(output_dir.iterdir()):
                output_dir.rmdir()  # hydra made it before it was known to be of no use
        if code != DONE:
            sys.exit(code)  # ends a sweep too

    try:
        job()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        exit_bad_config(ConfigError(explain(error, name, schema, sys.argv[1:]) or one_line(error)))
    except (OSError, ValueError) as error:
        if started:
            raise
        # hydra could not make the directory of the run, or refuses its own options
        where = f"{error.filename}: " if isinstance(error, OSError) else ""
        exit_bad_config(ConfigError(f"{where}{reason(error)}"))
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)
    sys.exit(DONE)


def exit_bad_config(error: Exception) -> NoReturn:
    """Says in one line on stderr what is wrong with the configuration, and exits with code 2."""
    sys.stderr.write(f"bad configuration: {one_line(error)}\n")
    sys.exit(BAD_CONFIG)


def one_line(error: Exception) -> str:
    """The message of an error of ours, hydra's or omegaconf's in one line, without their internals."""
    text = str(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        text += f" ({str(error.__cause__).splitlines()[0]})"
    text = re.split(r"\n\s*(?:Config search path|object_type=|reference_type=|See https://hydra.cc)", text)[0]
    text = re.sub(r"^ConfigError raised while resolving interpolation: ", "", text)
    text = re.sub(r"\s*\n\s*full_key: *(\S*)", r" (key: \1)", text)
    return " ".join(text.split())


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory could not be had: Python's or NumPy's error, or one of torch's, on a CPU or a GPU."""
    return isinstance(error, MemoryError) or re.search(r"allocate memory|out of memory", str(error)) is not None


def reason(error: Exception) -> str:
    """What went wrong, with a file for one, in words."""
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]


def run_directory(resume: str | None, fresh: str) -> str:
    """The directory of the run: a new one, or that of the run to go on with.

    Raises:
        ConfigError: `resume` holds no checkpoint (before hydra makes that directory).
    """
    if resume is None:
        return fresh
    for name in (CONFIG, CHECKPOINT):
        if not (Path(resume) / name).is_file():
            raise ConfigError(f"resume={resume}: no {name} there; pass the directory of a run that was checkpointed")
    return resume


OmegaConf.register_new_resolver("run_dir", run_directory, replace=True)
OmegaConf.register_new_resolver("lcm", math.lcm, replace=True)


def resumed_config(config: DictConfig, run_dir: Path, overrides: list[str]) -> DictConfig:
    """The configuration a run was started with, changed only where that leaves the learning problem as it was.

    Args:
        config: what hydra composed of this command line.
        run_dir: directory of the run.
        overrides: the command line's `key=value` words.
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
        ConfigError: an unknown key, a missing one, a value of the wrong type or out of range.
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
    """Turns Ctrl-C (SIGINT) and SIGTERM into a question the loop asks where its state is whole.

    A second Ctrl-C interrupts at once.

    Yields:
        A function that says whether to stop.
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
