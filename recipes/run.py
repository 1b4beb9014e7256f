"""What every recipe does around its training: hydra, exit codes, run directories, resuming, Ctrl-C."""

import logging
import math
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar, cast

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

DONE, FAILED, BAD_CONFIG, INTERRUPTED = 0, 1, 2, 130
CONFIG, CHECKPOINT = "config.yaml", "checkpoint.zip"  # in a run's directory
RESUMABLE = ("resume", "device", "num_threads", "stop_at_threshold", "video", "checkpoint_interval")

Schema = TypeVar("Schema")


class ConfigError(ValueError):
    """A configuration that cannot be run; its message is what the user reads."""


class LostProcess(RuntimeError):
    """A process that a run cannot go on without has ended; its message says which."""


def run_recipe(train: Callable[[DictConfig, Path], int], config_name: str) -> None:
    """Reads the command line with hydra, calls `train(config, run_dir)` once per job and exits with its code.

    Args:
        train: returns an exit code; raises ConfigError before it starts to train.
        config_name: the recipe's top file in recipes/conf.
    """
    logging.getLogger("torchrl").setLevel(logging.WARNING)  # its notes would tear the progress bar
    os.environ["HYDRA_FULL_ERROR"] = "1"  # hydra raises its errors instead of printing pages and exiting with 1

    @hydra.main(version_base="1.3", config_path=str(Path(__file__).parent / "conf"), config_name=config_name)
    def job(config: DictConfig) -> None:
        run_dir = output_dir = Path(HydraConfig.get().runtime.output_dir)
        try:
            if config.get("resume") is not None:
                run_dir = Path(run_directory(config.resume, ""))
                config = resumed_config(config, run_dir, list(HydraConfig.get().overrides.task))
            code = train(config, run_dir)
        except ConfigError as error:
            exit_bad_config(error)
        finally:
            if not any(output_dir.iterdir()):
                output_dir.rmdir()  # hydra made it before it was known to be of no use
        if code != DONE:
            sys.exit(code)  # ends a sweep too

    try:
        job()
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        exit_bad_config(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(INTERRUPTED)


def exit_bad_config(error: Exception) -> NoReturn:
    """Says in one line on stderr what is wrong with the configuration, and exits with code 2."""
    sys.stderr.write(f"bad configuration: {one_line(error)}\n")
    sys.exit(BAD_CONFIG)


def one_line(error: Exception) -> str:
    """The message of an error of ours, hydra's or omegaconf's in one line, without their internals."""
    text = str(error)
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        text += f" ({str(error.__cause__).splitlines()[0]})"
    text = re.split(r"\n\s*(?:Config search path|object_type=|reference_type=)", text)[0]
    text = re.sub(r"^ConfigError raised while resolving interpolation: ", "", text)
    text = re.sub(r"\s*\n\s*full_key: *(\S*)", r" (key: \1)", text)
    return " ".join(text.split())


def reason(error: Exception) -> str:
    """What went wrong, with a file for one, in words."""
    return getattr(error, "strerror", None) or str(error)


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


def typed(config: DictConfig, schema: type[Schema]) -> Schema:
    """The configuration as a `schema` dataclass.

    Raises:
        ConfigError: an unknown key, a missing one, a value of the wrong type or out of range.
    """
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), config))  # pyright: ignore
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(one_line(error)) from error


def find_device(name: str) -> torch.device:
    """`auto` is the first CUDA device where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device={name}: {str(error).splitlines()[0]}") from error
    return device


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


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
