"""Generates the code that torch's compiler would run on a CUDA device, on hosts without one.

A graph is traced with tensors on the CPU, and handed to the compiler as a graph of fake tensors on a CUDA device. So
code that branches on the device of a tensor while it is traced takes the CPU's branch. Nothing is run.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.compile_fx as inductor
import torch._inductor.config
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import scheduler
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from torchrl_replay_ext import compile_step

# an H200
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    uuid="",
    gcnArchName="",
    major=9,
    minor=0,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    L2_cache_size=50 << 20,
    total_memory=139 << 30,
)
DRIVER = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    get_current_device=lambda: 0,
    get_active_torch_device=lambda: torch.device("cuda", 0),
    get_device_interface=lambda: torch.cuda,
)
ANSWERS = {
    "is_available": True,
    "is_current_stream_capturing": False,
    "current_device": 0,
    "device_count": 1,
    "get_device_properties": PROPERTIES,
    "get_device_capability": (9, 0),
    "synchronize": None,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": None,
    "_lazy_init": None,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
}


class _Generated(Exception):
    """The code of a graph."""


def _generate(graph: GraphLowering) -> Any:
    code: Any = graph.codegen()[0]
    raise _Generated(getattr(code, "value", code))


@contextmanager
def _pretended_device() -> Iterator[None]:
    """A CUDA device, as far as the compiler asks for it."""
    with ExitStack() as stack:

        def replace(owner: Any, name: str, answer: Any) -> None:
            stack.enter_context(patch.object(owner, name, staticmethod(lambda *_, **__: answer)))

        for name, answer in ANSWERS.items():
            replace(torch.cuda, name, answer)
        for name in ("is_available", "current_device", "get_device_properties", "synchronize"):
            replace(CudaInterface, name, ANSWERS[name])
        replace(CudaInterface, "get_compute_capability", 90)
        replace(CudaInterface.Worker, "get_device_properties", PROPERTIES)
        replace(scheduler, "has_triton", True)
        replace(fake_tensor, "init_gpu_context", None)
        stack.enter_context(patch.object(driver, "_active", DRIVER))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", _generate))
        yield


def _on_cuda(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
    """Compile a graph of fake tensors on the CPU as one of fake tensors on a CUDA device."""

    def moved(argument: Any) -> Any:
        return torch.device("cuda", 0) if argument == torch.device("cpu") else argument

    for node in graph.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    graph.recompile()
    mode = next(each.fake_mode for each in inputs if isinstance(each, fake_tensor.FakeTensor))
    with _pretended_device():
        with mode:
            inputs = [
                torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda:0")
                if isinstance(each, torch.Tensor)
                else each
                for each in inputs
            ]
            _Propagation(graph).run(*inputs)
        return _compile(graph, inputs, **options)


class _Propagation(torch.fx.Interpreter):
    """Sets the fake result of each node."""

    def run_node(self, n: torch.fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


_compile, _compile_all = inductor.compile_fx_inner, inductor.compile_fx


def code_for_cuda(step: Callable[..., Any], *arguments: Any) -> str:
    """The code that `compile_step(step, cudagraphs=True)` would run on a CUDA device, with these arguments."""

    def compile_fx(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        # the compiler calls this function again, with settings for inner_compile
        return _compile_all(graph, inputs, **{"inner_compile": _on_cuda} | options)

    cached = torch._inductor.config.patch(fx_graph_cache=False)
    try:
        with patch.object(inductor, "compile_fx", compile_fx), cached:
            compile_step(step, cudagraphs=True)(*arguments)
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, _Generated):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        return cause.args[0]
    raise AssertionError("nothing was compiled")
