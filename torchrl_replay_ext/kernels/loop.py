"""Compiles the loops of kernels for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import numba
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
    file = vars(vars(compiled).get("_cache", compiled)).get("_cache_file")
    if file is not None:
        vars(file)["_source_stamp"] = _SOURCES
    return compiled
