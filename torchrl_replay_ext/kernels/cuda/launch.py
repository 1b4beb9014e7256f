"""What the kernels for CUDA have in common: how they are launched, and parts of them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "torchrl_replay_ext needs triton for buffers on a GPU: pip install triton (on Windows: triton-windows), or "
        "keep the storage on the CPU: device='cpu'."
    ) from error

# rows that a thread block of a small write or update processes together
_FEW = 32
# Arguments that change from call to call: for a number that is 1 or a multiple of 16, Triton would compile a variant.
_COUNTS = frozenset(("count", "num_smallest", "length", "num_removed"))


def jit(function: Any) -> Any:
    """``triton.jit``, with a result of any type; not compiled again for other numbers of rows."""
    arguments = inspect.signature(function).parameters
    return triton.jit(function, do_not_specialize=[name for name in arguments if name in _COUNTS])


def some(tensor: Tensor) -> Tensor | None:
    """None for an empty tensor; for None, Triton compiles a kernel of its own."""
    return tensor if len(tensor) else None


def in_blocks(kernel: Any, num_rows: int, count: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel with one thread block for every ``num_rows`` of ``count`` rows."""
    kernel[(triton.cdiv(count, num_rows),)](*arguments, count, num_rows=num_rows, **constants)


def in_one_block(kernel: Any, most: int, count: int, *arguments: Any, **options: Any) -> None:
    """Run a kernel with a single thread block, which processes at most ``most`` of ``count`` rows together.

    There are two variants: for the few rows of a step, and for all others.
    """
    rows = min(most, _FEW) if count <= _FEW else most
    options = {"num_warps": max(1, min(8, rows // 32)), **options}
    kernel[(1,)](*arguments, count, num_rows=rows, **options)


@jit
def _each(function: tl.constexpr, state, index, results, count, num_rows: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * num_rows + tl.arange(0, num_rows)
    given = tl.minimum(rows, count - 1)
    if index is not None:
        given = tl.load(index + given)
    found = function(state, given)
    if len(results) == 1:
        found = (found,)
    for number in tl.static_range(len(results)):
        tl.store(results[number] + rows, found[number], mask=rows < count)


def for_each(function: Any, state: Any, index: Tensor | None, *results: Tensor, num_rows: int = 64) -> None:
    """Set ``results`` [n] to a function of a state and of each of ``index`` [n], or of each row's number."""
    in_blocks(_each, num_rows, len(results[0]), function, state, index, results)


@jit
def within(number, size):
    """The number >= 0 and < ``size`` that is nearest."""
    return tl.minimum(tl.maximum(number.to(tl.int64), 0), tl.cast(size, tl.int64) - 1)


@jit
def add(pointer, value, mask=None):
    """Add to one number or several ones, in any order."""
    tl.atomic_add(pointer, value, mask=mask, sem="relaxed")


@jit
def random_number(seed, number):
    """The random numbers ``number`` of the sequence of a ``seed`` [1] (SplitMix64), in [0, 1) with 53 bits."""
    x = tl.load(seed).to(tl.uint64) + number.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return ((x ^ (x >> 31)) >> 11).to(tl.int64).to(tl.float64) * 2.0**-53
