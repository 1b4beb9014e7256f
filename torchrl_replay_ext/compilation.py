"""Operations that differ between eager code and graphs (torch.compile or CUDA capture), which cannot read values.

:func:`is_traced` is True where values cannot be read: under torch.compile, and while a CUDA graph is captured.
``torch.compiler.is_dynamo_compiling`` is used where only the code that the compiler generates differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

# A tensor or a NumPy array, used through what both have in common. On the CPU, operations on a few numbers take several
# times longer in torch than in NumPy.
Array: TypeAlias = Any

_FLOAT64_BITS = 53


def is_traced() -> bool:
    """True if this code becomes part of a graph. It must not read the value of a tensor then."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """What is allocated here can be changed in place later, inside ``torch.inference_mode`` and outside of it."""
    if torch.is_inference_mode_enabled() and not is_traced():
        # leaving the mode turns gradients on
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def values_can_be_read(where: Tensor | torch.device) -> bool:
    """True outside graphs on the CPU, where a branch on a value is cheap; ``where``: a tensor, or its device.

    If False, use code without such branches: a graph has no values, and to read one from an accelerator, the host waits
    until the device has finished all its work.
    """
    on_cpu = where.is_cpu if isinstance(where, Tensor) else where.type == "cpu"
    return on_cpu and not is_traced()


def raise_if(
    condition: Callable[[], Any], error: Callable[[], Exception], *, skip_on: Tensor | torch.device | None = None
) -> None:
    """Raise ``error()`` if ``condition()`` is true. In a graph, do nothing: a graph cannot raise errors by value.

    Args:
        condition: returns True, or a tensor with the value True, if there is an error.
        error: creates the error.
        skip_on: device whose tensors the condition reads, or one of these tensors. If it is an accelerator, nothing is
            checked, because the host would wait. None (default): always check.
    """
    if not is_traced() and (skip_on is None or values_can_be_read(skip_on)) and bool(condition()):
        raise error()


def to_host(*values: Any) -> list[Any]:
    """The values, of which tensors are on the CPU then; the host waits at most once for an accelerator."""
    is_far = [isinstance(value, Tensor) and not value.is_cpu for value in values]
    if not any(is_far):
        return [*values]
    parts = [value.reshape(-1).view(torch.uint8) for value, far in zip(values, is_far, strict=True) if far]
    found = iter(torch.cat(parts).cpu().split([len(part) for part in parts]))
    # copies, because the memory of numbers must be aligned
    return [
        next(found).clone().view(value.dtype).view(value.shape) if far else value
        for value, far in zip(values, is_far, strict=True)
    ]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. The host waits only for copies to the CPU and from pinned memory."""
    if tensor.device == device:
        return tensor
    # the caller may change pinned memory before it was copied
    return tensor.to(device, non_blocking=device.type != "cpu" and not tensor.is_pinned())


class Counter:
    """An integer attribute that is held in a tensor [], for graphs.

    In a graph, the attribute is the tensor. Outside, it is a number: for an accelerator, the owner also keeps it in
    ``known_counters``, by the name of the tensor, so that the host does not wait to read it. It must wait once a graph
    or another process may change the tensor; the owner then has no such dict.

    Args:
        name: the attribute of the owner with the tensor, int64 [].
    """

    def __init__(self, name: str):
        self._name = name

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        tensor = getattr(owner, self._name)
        if is_traced():
            return tensor
        if tensor.is_cpu or owner.known_counters is None:
            return tensor.item()
        if self._name not in owner.known_counters:
            owner.known_counters[self._name] = tensor.item()
        return owner.known_counters[self._name]

    def __set__(self, owner: Any, value: int | Tensor) -> None:
        tensor = getattr(owner, self._name)
        if isinstance(value, Tensor):
            tensor.copy_(value)
        else:
            tensor.fill_(value)
        if is_traced():
            owner.known_counters = None
        elif owner.known_counters is not None:
            if isinstance(value, Tensor):
                owner.known_counters.pop(self._name, None)
            else:
                owner.known_counters[self._name] = value


def uniform(*size: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Uniform random numbers in [0, 1) with 53 random bits, float64.

    A graph uses the global generator and ignores ``generator``, which cannot be traced. In compiled code,
    ``torch.rand`` would produce float32 numbers, which are too coarse to reach every leaf of a large tree.

    Args:
        *size: the shape.
        device: device of the result.
        generator: source of randomness; if it is on another device, its next number seeds a new generator. None
            (default): the global generator.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.randint(0, 2**_FLOAT64_BITS, size, device=device).to(torch.float64) * 2.0**-_FLOAT64_BITS
    if generator is not None and is_traced():
        generator = None
    if generator is not None and generator.device.type != device.type:
        generator = torch.Generator(device).manual_seed(int(random_seed(generator.device, generator)))
    return torch.rand(*size, dtype=torch.float64, device=device, generator=generator)


def random_seed(device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """A random number that seeds a kernel, int64 [1] on ``device``; ``generator`` as for :func:`uniform`."""
    if generator is None or is_traced():
        return torch.randint(2**63 - 1, (1,), device=device)
    return to_device(torch.randint(2**63 - 1, (1,), device=generator.device, generator=generator), device)


def stratified_uniform(num: int, *, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """One random number in each of ``num`` intervals of length 1 / ``num`` of [0, 1), in random order, float64 [num].

    For the arguments see :func:`uniform`.
    """
    if generator is not None and is_traced():
        generator = None
    if device.type == "cpu" and (generator is None or generator.device == device):
        u = uniform(num, device=device, generator=generator)
        order = torch.randperm(num, device=device, generator=generator)
    else:
        u, keys = uniform(2, num, device=device, generator=generator)
        order = keys.argsort()
    # rounding may give 1 for the last interval
    return order.add(u).div_(num).clamp_(max=1 - 2**-_FLOAT64_BITS)


def where_int64(condition: Tensor, yes: Tensor | int, no: Tensor | int) -> Tensor:
    """``torch.where`` for int64; by arithmetic in graphs, because ``torch.where`` compiled for AVX2 can be wrong."""
    if torch.compiler.is_dynamo_compiling():
        return no + (yes - no) * condition
    return torch.where(condition, yes, no)


def gather_in_bounds(source: Tensor, index: Tensor) -> Tensor:
    """``source[index]`` for an index within bounds, of any shape.

    Compiled code checks the bounds at each access, which takes longer than the access. Clamping is faster.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.aten._unsafe_index(source, [index.clamp(0, source.shape[0] - 1)])
    return source.index_select(0, index) if index.ndim == 1 else source[index]


def scatter_in_bounds(destination: Tensor, index: Tensor, values: Tensor) -> None:
    """``destination[index] = values`` [n] in place, for an index [n] within bounds; see :func:`gather_in_bounds`."""
    if torch.compiler.is_dynamo_compiling():
        index = index.clamp(0, destination.shape[0] - 1)
        destination.copy_(torch.ops.aten._unsafe_index_put(destination, [index], values))
    else:
        destination.index_copy_(0, index, values)


def mark_static(*parts: Any) -> None:
    """Mark the addresses of tensors as static for CUDA graphs, also inside lists, dicts and objects of this package."""
    seen: set[int] = set()
    left = list(parts)
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            if part.is_cuda:
                torch._dynamo.mark_static_address(part)
        elif isinstance(part, list | tuple):
            left += part
        elif isinstance(part, dict):
            left += part.values()
        elif type(part).__module__.startswith("torchrl_replay_ext."):
            left += getattr(part, "__dict__", {}).values()
