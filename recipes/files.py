"""Files that are replaced as a whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of the file `path` when the block ends; it is on the disk by then.

    After an error `path` is as it was. A killed process leaves a directory behind, which the next call removes.
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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
