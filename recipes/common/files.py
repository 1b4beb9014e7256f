"""Configuration files, atomic replacement of files, locks of directories, and the version of the code."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipes.common.errors import ConfigError, reason

CONF = Path(__file__).parents[1] / "conf"
CONFIG, CHECKPOINT = "config.yaml", "checkpoint.zip"  # file names in a run directory

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


def load_config(path: Path) -> DictConfig:
    """Read the configuration of a run or a study; ConfigError if the file is damaged."""
    try:
        config = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: damaged: {' '.join(str(error).split())}") from error
    if not isinstance(config, DictConfig):
        raise ConfigError(f"{path}: damaged: a list instead of keys")
    return config


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Replace the file `path` atomically at the end of the block; the new content is then on the disk.

    After an error, `path` is unchanged. A killed process leaves a temporary directory behind; the next call removes it.

    Yields:
        The path to write the new content to.
    """
    aside = path.parent / f".{path.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        yield aside / path.name
        _sync(aside / path.name)
        os.replace(aside / path.name, path)
        _sync(path.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Make a directory and lock it against other processes, where the system and its files have such locks.

    Raises:
        ConfigError: if it cannot be made, or if another process has locked it.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{directory}: {reason(error)}") from error
    if fcntl is None:
        yield
        return
    with _opened(directory) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{directory}: another process runs there") from error
        except OSError:  # some network file systems
            pass
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def code_version() -> str:
    """The commit of this checkout, followed by "+" if files have changed since; "unknown" without git."""
    root = Path(__file__).parents[1]
    try:
        commit, changes = (
            subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + "+" * bool(changes)
