"""Compiles the loops of kernels for the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

try:
    import numba
    from numba.core.sigutils import normalize_signature
except ImportError as error:
    raise ImportError("torchrl_replay_ext needs numba for its kernels on the CPU: pip install 'numba>=0.61'") from error


# Machine code on disk is valid for these sources: loops contain the code of others, of which Numba checks none.
_SOURCES = sorted(
    (path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in Path(__file__).parent.glob("*.py")
)


def loop(function: Callable[..., Any]) -> Any:
    """Compile a loop over arrays at its first call, and keep the machine code on disk for other processes.

    ``loop(function).py_func`` is the function itself, the reference for tests.
    """
    return _compiled(function)


def part(function: Callable[..., Any]) -> Any:
    """Compile a part of loops, which only loops can call; this takes less time than :func:`loop`."""
    return _compiled(function, no_cpython_wrapper=True)


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    options |= {"nogil": True, "no_cfunc_wrapper": True}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # neither the folder of the package nor the user's cache folder can be written to
        return numba.njit(**options)(function)
    # a later release of Numba may keep its stamp elsewhere; a test fails then
    cache = vars(compiled).get("_cache")
    file = vars(cache or compiled).get("_cache_file")
    if file is not None:
        vars(file)["_source_stamp"] = _SOURCES
        vars(compiled)["_cache"] = _TolerantCache(cache)
    return compiled


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
