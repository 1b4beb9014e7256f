"""Compiles the loops of kernels for the CPU, and gives them random numbers."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

try:
    import numba
    from numba.core import event as numba_event
    from numba.core.sigutils import normalize_signature
except ImportError as error:
    raise ImportError("torchrl_replay_ext needs numba for its kernels on the CPU: pip install 'numba>=0.61'") from error


# seconds of compiling in a process after which one line says what happens
NOTICE_AFTER = 1.0
_compile: Any = numba.njit
_OPTIONS = {"nogil": True, "no_cfunc_wrapper": True}
_log = logging.getLogger("torchrl_replay_ext")
# Machine code on disk is valid for these sources: loops contain the code of others, of which Numba checks none.
_SOURCES = sorted(
    (path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in Path(__file__).parent.glob("*.py")
)


def loop(function: Callable[..., Any]) -> Any:
    """Compile a loop over arrays at its first call, and keep the machine code on disk for other processes.

    ``loop(function).py_func`` is the function itself, the reference for tests.
    """
    try:
        compiled = _compile(**_OPTIONS, cache=True)(function)
    except RuntimeError:
        # neither the folder of the package nor the user's cache folder can be written to
        return _compile(**_OPTIONS)(function)
    # a later release of Numba may keep its stamp elsewhere; a test fails then
    cache = vars(compiled).get("_cache")
    file = vars(cache or compiled).get("_cache_file")
    if file is not None:
        vars(file)["_source_stamp"] = _SOURCES
        vars(compiled)["_cache"] = _TolerantCache(cache)
    return compiled


def part(function: Callable[..., Any]) -> Any:
    """Compile a part that several loops call; this takes less time than :func:`loop`.

    A literal number as an argument would be another type, for which it is compiled again: pass ``np.int64(0)``.
    """
    return _compile(**_OPTIONS, no_cpython_wrapper=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a part as lines of the one loop that calls it, which takes less time than :func:`part`."""
    return _compile(**_OPTIONS, inline="always")(function)


@part
def uniform(seed, index):
    """The random number ``index`` of the sequence of a seed (SplitMix64), in [0, 1) with 53 bits."""
    x = np.uint64(seed) + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53


class _Notice(numba_event.Listener):
    """Says once in a process why the first calls take so long, after some time of compiling."""

    def __init__(self) -> None:
        # the loops that are being compiled: a loop and its parts
        self._running: list[Any] = []
        self._begin = self._before = 0.0

    def on_start(self, event: Any) -> None:
        """A function is compiled from now on, perhaps one of another package."""
        if _is_ours(event):
            if not self._running:
                self._begin = time.perf_counter()
            self._running.append(event.data["dispatcher"])

    def on_end(self, event: Any) -> None:
        """A function was compiled."""
        if not (_is_ours(event) and self._running):
            return
        seconds, outermost = self._before + time.perf_counter() - self._begin, self._running[0]
        self._running.pop()
        if not self._running:
            self._before = seconds
        if seconds > NOTICE_AFTER:
            numba_event.unregister("numba:compile", self)
            _log.warning(
                "Numba compiles the loops of replay buffers for this machine, which takes seconds. %s "
                "`python -m torchrl_replay_ext.kernels` compiles all of them ahead.",
                _where(outermost),
            )


def _is_ours(event: Any) -> bool:
    function = getattr(event.data.get("dispatcher"), "py_func", None)
    return getattr(function, "__module__", "").startswith("torchrl_replay_ext.")


def _where(compiled: Any) -> str:
    folder = compiled.stats.cache_path
    if folder is None:
        return "No folder for the machine code can be written to: set NUMBA_CACHE_DIR, or each process compiles again."
    return f"This happens once: other processes find the machine code in {folder}."


class _TolerantCache:
    """Numba's cache of a function. If its files are damaged or cannot be written, the function is compiled anyway."""

    # one warning is enough for all functions
    has_warned = False

    def __init__(self, cache: Any):
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The machine code for a signature; None if there is none that can be used."""
        try:
            found = self._cache.load_overload(signature, target)
            wanted, _ = normalize_signature(signature)
            if found is None or found.signature.args == tuple(wanted):
                return found
            # two processes have written at the same time
            raise ValueError(f"found code for {found.signature.args}, not for {wanted}")
        except Exception as error:
            self._warn(error)
            # the index without entries, so that the code is written again
            with suppress(Exception):
                self._cache.flush()
        return None

    def save_overload(self, signature: Any, data: Any) -> None:
        """Write the machine code."""
        try:
            self._cache.save_overload(signature, data)
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not type(self).has_warned:
            type(self).has_warned = True
            warnings.warn(
                f"torchrl_replay_ext: the cache of compiled kernels in {self._cache.cache_path} cannot be used, so "
                f"kernels are compiled in each process ({type(error).__name__}: {error}). Set NUMBA_CACHE_DIR to "
                "another directory, or make space.",
                RuntimeWarning,
                stacklevel=2,
            )


numba_event.register("numba:compile", _Notice())
