"""Records the work of a compiled graph on a GPU as a CUDA graph, and replays it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

# The first calls run without a CUDA graph: kernels are loaded and chosen, and libraries allocate the memory they keep.
WARM_UP = 3


class CudaRecorder:
    """Records work on a GPU as a CUDA graph.

    torch registers its default generator with each CUDA graph, so each replay draws new random numbers.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device):
        if device.type != "cuda":
            raise RuntimeError(
                f"compile_step(cudagraphs=True): the step must use tensors on a CUDA device, not {device}."
            )
        self._device, self._stream = device, torch.cuda.Stream(device)

    def warm_up(self, work: Callable[[], Any]) -> Any:
        """Do the work in the stream that will record it; return its result."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = work()
        current.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        """Record the work without doing it; return a function that does it, and the result, which that overwrites."""
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those of a collector, may use the GPU meanwhile
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


class RecordedGraph:
    """A compiled graph that is recorded at its fourth call, and replayed then and from then on.

    Args:
        graph: the graph, a function of tensors.
        step: name of the step, for errors.
        names: names of the inputs, for errors.
        is_argument: whether an input is an argument of the step, which is copied at each call. The others are the
            state of the step, which is read and written where it is.
    """

    def __init__(
        self, graph: Callable[..., Sequence[Any]], step: str, names: Sequence[str], is_argument: Sequence[bool]
    ):
        self._graph, self._step, self._names = graph, step, names
        self._arguments = [number for number, each in enumerate(is_argument) if each]
        self._others = [number for number, each in enumerate(is_argument) if not each]
        self._state: list[Tensor] = []
        self._calls = 0
        self._recorder: CudaRecorder | None = None
        self._replay: Callable[[], object] | None = None

    def __call__(self, *inputs: Tensor) -> list[Any]:
        """The results for these inputs, in new memory unless they share the memory of the state.

        Raises:
            RuntimeError: if the inputs are not on one GPU, an argument has elements that share memory, the state is in
                other memory than at the first call, or the graph cannot be recorded.
        """
        if self._recorder is None:
            self._recorder = CudaRecorder(self._device_of(inputs))
            self._state = [inputs[number] for number in self._others]
        elif not all(map(is_, map(inputs.__getitem__, self._others), self._state)):
            self._require_same_memory(inputs)
        if self._calls < WARM_UP:
            results = self._recorder.warm_up(lambda: self._graph(*inputs))
            self._calls += 1
            return results
        arguments = [inputs[number] for number in self._arguments]
        if self._replay is None:
            self._record(self._recorder, inputs)
        else:
            _copy(self._inputs, arguments)
        return self._run(arguments)

    def _record(self, recorder: CudaRecorder, inputs: tuple[Tensor, ...]) -> None:
        # the graph reads the arguments from copies, with the strides that it was compiled for
        fixed = list(inputs)
        for number in self._arguments:
            given = inputs[number].detach()
            fixed[number] = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device=given.device)
            fixed[number].copy_(given).requires_grad_(inputs[number].requires_grad)
        self._inputs = [fixed[number] for number in self._arguments]
        versions = [each._version for each in self._inputs]
        try:
            replay, results = recorder.record(lambda: self._graph(*fixed))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"compile_step(cudagraphs=True): {self._step} cannot be recorded as a CUDA graph. All its work must be "
                "on the GPU, and it must not wait for the GPU, as .item(), .cpu() and bool(tensor) do."
            ) from error
        # the arguments that the graph writes to
        self._written = [number for number, each in enumerate(self._inputs) if each._version != versions[number]]
        memory = {_address(each) for each in self._state}
        self._results = [each.detach() if isinstance(each, Tensor) else each for each in results]
        self._copied = [
            number for number, each in enumerate(results) if isinstance(each, Tensor) and _address(each) not in memory
        ]
        self._replay = replay

    def _run(self, arguments: list[Tensor]) -> list[Any]:
        assert self._replay is not None
        self._replay()
        _copy([arguments[number] for number in self._written], [self._inputs[number] for number in self._written])
        results = self._results.copy()
        for number in self._copied:
            results[number] = torch.empty_like(results[number])
        _copy([results[number] for number in self._copied], [self._results[number] for number in self._copied])
        return results

    def _device_of(self, inputs: tuple[Tensor, ...]) -> torch.device:
        """The device of all inputs."""
        devices = [each.device for each in inputs] or [torch.device("cuda")]
        device = next((each for each in devices if each.type == "cuda"), devices[0])
        for name, each in zip(self._names, inputs, strict=True):
            if each.device != device:
                raise RuntimeError(
                    f"compile_step(cudagraphs=True): {name} is on {each.device}, other tensors of {self._step} are "
                    f"on {device}; move it there before the first call."
                )
        return device

    def _require_same_memory(self, inputs: tuple[Tensor, ...]) -> None:
        for number, before in zip(self._others, self._state, strict=True):
            if inputs[number].data_ptr() != before.data_ptr():
                raise RuntimeError(
                    f"compile_step(cudagraphs=True): {self._names[number]} is not the tensor that it was at the first "
                    f"call of {self._step}, but a CUDA graph reads the memory of that one. Change it in place: "
                    "tensor.copy_(value) instead of an assignment."
                )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@torch.no_grad()
def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, with one kernel per dtype."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        group = groups.setdefault(target.dtype, ([], []))
        group[0].append(target)
        group[1].append(source)
    for group in groups.values():
        torch._foreach_copy_(*group)  # pyright: ignore[reportPrivateImportUsage]: it has no public name
