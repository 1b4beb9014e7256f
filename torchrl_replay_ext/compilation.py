"""What differs where values cannot be looked at: in a graph that is being compiled, or captured by CUDA."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_EXACT_BITS = 53
# Modules whose objects hold state.
_STATE = tuple(f"torchrl_replay_ext.{name}" for name in ("annealing", "core.", "distributions.", "samplers.slot_state"))


def is_traced() -> bool:
    """Whether this code becomes part of a graph, so that it must not wait for the value of a tensor."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def values_can_be_read(tensor: Tensor) -> bool:
    """True outside graphs on the CPU, where a choice by value is free.

    Elsewhere use code without such a choice: a graph has no values, and reading one from an accelerator waits for it.
    """
    return tensor.device.type == "cpu" and not is_traced()


def raise_if(condition: Callable[[], Any], error: Callable[[], Exception]) -> None:
    """Raise ``error()`` if ``condition()`` holds; in a graph, which cannot raise errors by value, do nothing."""
    if not is_traced() and bool(condition()):
        raise error()


def refuse_in_graph(error: Callable[[], Exception]) -> None:
    """Raise ``error()`` if this code becomes part of a graph."""
    if is_traced():
        raise error()


def rows_where(mask: Tensor) -> Tensor:
    """The rows to compute where only those in ``mask`` [n] count: these rows, or all if values cannot be read."""
    return mask.nonzero().squeeze(1) if values_can_be_read(mask) else torch.arange(len(mask), device=mask.device)


def scalar(value: Tensor) -> Any:
    """A 0-dim tensor as a number, which is faster on the CPU; where it is traced it must stay a tensor."""
    return value if is_traced() else value.item()


def uniform(*size: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Uniform numbers in [0, 1) of 53 random bits, float64.

    In a compiled graph they come from the global generator, whatever ``generator`` is: it cannot be traced. There,
    ``torch.rand`` would give float32 numbers, too coarse to find every leaf of a large tree.

    A ``generator`` of another device gives the seed instead, see :func:`generator_on`.
    """
    if torch.compiler.is_compiling():
        return torch.randint(0, 2**_EXACT_BITS, size, device=device).to(torch.float64) * 2.0**-_EXACT_BITS
    if generator is not None and generator.device.type != device.type:
        # a generator made now cannot be used while CUDA captures a graph
        generator = None if is_traced() else generator_on(device, generator)
    return torch.rand(*size, dtype=torch.float64, device=device, generator=generator)


def generator_on(device: torch.device, source: torch.Generator) -> torch.Generator:
    """A new generator on ``device``, seeded by the next number of ``source``, which may be on another device.

    ``source`` alone decides what is drawn: seed it, or restore its state, to repeat the draws.

    Examples:
        >>> source = torch.Generator().manual_seed(0)
        >>> first = generator_on(torch.device("cpu"), source).initial_seed()
        >>> first == generator_on(torch.device("cpu"), source.manual_seed(0)).initial_seed()
        True
    """
    seed = torch.randint(2**63 - 1, (), generator=source, device=source.device)
    return torch.Generator(device).manual_seed(int(seed))


def stratify(u: Tensor) -> Tensor:
    """Uniform numbers ``u`` [n] in [0, 1), one moved into each of n parts of equal length, in their order."""
    num = u.shape[0]
    # the last may be rounded up to 1
    return ((torch.arange(num, device=u.device) + u) / num).clamp_(max=1 - 2**-_EXACT_BITS)


def where_int64(condition: Tensor, yes: Tensor | int, no: Tensor) -> Tensor:
    """``torch.where`` for int64 by arithmetic: compiled for AVX2, torch.where on int64 can return wrong values."""
    return no + (yes - no) * condition


def gather_in_bounds(source: Tensor, index: Tensor) -> Tensor:
    """``source[index]`` for an index [n] within bounds.

    Compiled code makes sure that it is at each access, which takes longer than the access. Here, it is forced to be.
    """
    if torch.compiler.is_compiling():
        return torch.ops.aten._unsafe_index(source, [index.clamp(0, source.shape[0] - 1)])
    return source.index_select(0, index)


def scatter_in_bounds(destination: Tensor, index: Tensor, values: Tensor, *, accumulate: bool = False) -> None:
    """``destination[index] = values`` (``+=`` with ``accumulate``) in place, for an index [n] within bounds.

    See :func:`gather_in_bounds`.
    """
    if torch.compiler.is_compiling():
        index = index.clamp(0, destination.shape[0] - 1)
        destination.copy_(torch.ops.aten._unsafe_index_put(destination, [index], values, accumulate))
    elif accumulate:
        destination.index_add_(0, index, values)
    else:
        destination.index_copy_(0, index, values)


def mark_static(*parts: Any) -> None:
    """Tell CUDA graphs that these tensors, and those in trees, episodes, lists and dicts among them, stay in place."""
    for part in parts:
        if isinstance(part, Tensor):
            if part.is_cuda:
                torch._dynamo.mark_static_address(part)
        elif isinstance(part, list):
            mark_static(*part)
        elif isinstance(part, dict):
            mark_static(*part.values())
        elif type(part).__module__.startswith(_STATE):
            mark_static(getattr(part, "__dict__", {}))


class EagerFallback:
    """A computation that a graph on the CPU hands to eager code in the rare case that it needs it.

    Eager code may loop until it is done; a graph has a fixed number of operations.

    Args:
        compute: called with ``results`` and ``inputs`` of :meth:`replace`; returns tensors of the same shapes. It
            may change running statistics, but no tensor of ``state``.
        state: the tensors that ``compute`` reads and that graphs change in place.
    """

    def __init__(self, compute: Callable[[list[Tensor], list[Tensor]], list[Tensor]], state: list[Tensor]):
        self.compute, self.state = compute, state
        # a custom operation takes numbers, but no objects
        self._number = next(_numbers)
        _fallbacks[self._number] = self

    def replace(self, condition: Tensor, results: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        """``compute(results, inputs)`` if ``condition``, bool [], holds; otherwise ``results``."""

        def computed():
            return torch.ops.torchrl_replay_ext.eager_fallback(self._number, results, inputs, self.state)

        def kept():
            return [result.clone() for result in results]

        return torch.cond(condition, computed, kept, ())


_numbers = itertools.count()
_fallbacks: WeakValueDictionary[int, EagerFallback] = WeakValueDictionary()


@torch.library.custom_op(
    "torchrl_replay_ext::eager_fallback",
    mutates_args=(),
    schema="(int number, Tensor[] results, Tensor[] inputs, Tensor[] state) -> Tensor[]",
)
def _eager_fallback(number: int, results: list[Tensor], inputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    fallback = _fallbacks[number]
    pairs = zip(fallback.state, state, strict=True)
    # plain torch.compile may keep the current values in copies until the graph ends
    moved = [(own, own.clone(), now) for own, now in pairs if own.data_ptr() != now.data_ptr()]
    for own, _, now in moved:
        own.copy_(now)
    try:
        return fallback.compute(results, inputs)
    finally:
        for own, before, _ in moved:
            own.copy_(before)


@_eager_fallback.register_fake
def _(number: int, results: list[Tensor], inputs: list[Tensor], state: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(result) for result in results]
