"""Graphs for GPUs, on hosts without one; tests/test_cuda.py runs them.

torch replays a graph that writes to a tensor as a CUDA graph only if it knows that the tensor stays at its address.
"""

from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext

from recipes.common import update as updates
from recipes.common.cli import DONE
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, DEFAULT, step
from torchrl_replay_ext import AdamStep, compile_step

pytestmark = pytest.mark.usefixtures("from_scratch")


class Backend:
    """Runs graphs as they are, and counts the tensors that they write to; in place of inductor."""

    def __init__(self):
        self.written = self.movable = 0

    def __call__(self, graph, inputs, **_):
        return aot_autograd(fw_compiler=self._look, inference_compiler=self._look)(graph, inputs)

    def _look(self, graph, inputs):
        metadata = TracingContext.get().fw_metadata
        written = {number for number, info in enumerate(metadata.input_info) if info.mutates_data}
        self.written += len(written)
        self.movable += len(written.difference(metadata.static_input_indices))
        return graph.forward


@pytest.fixture
def backend():
    return Backend()


@pytest.mark.parametrize("name", slow_but(DEFAULT, CASES))
def test_buffers_mark_all_that_they_write_to(name, backend):
    case = CASES[name]
    # tensors on the CPU are not marked
    with patch.object(torch.Tensor, "is_cuda", True):
        buffer, experience = case.buffer(), case.experience()
        for _ in range(10):
            buffer.extend(experience.take(4))
        step(buffer, experience.take(4))
    torch.compile(lambda data: step(buffer, data, case.extends), fullgraph=True, backend=backend)(experience.take(4))
    assert (backend.written or "events, uniform" in name) and not backend.movable


@dataclass
class Box:
    value: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: ((tensor,), {}),
        lambda tensor: ((), {"last": tensor}),
        lambda tensor: (([{"value": tensor}],), {}),
        lambda tensor: ((Box(tensor),), {}),
        lambda tensor: ((TensorDict({"value": tensor}),), {}),
        lambda tensor: ((lazy_stack([TensorDict({"value": tensor})]),), {}),
    ],
    ids=["positional", "keyword", "nested", "dataclass", "TensorDict", "lazy stack"],
)
def test_compile_step_marks_all_but_its_arguments(make, backend):
    network, count = nn.Linear(3, 1), torch.zeros(())
    adam, x = AdamStep(torch.optim.Adam(network.parameters())), torch.ones(4, 3)

    def step(last):
        adam(torch.autograd.grad(network(x).square().mean(), adam.parameters))
        count.add_(1)
        last = last[0] if isinstance(last, list | LazyStackedTensorDict) else last
        last = last["value"] if isinstance(last, dict | TensorDict) else last
        (last.value if isinstance(last, Box) else last).copy_(count)

    with patch.object(torch._inductor.compile_fx, "compile_fx", backend):
        compiled = compile_step(step, cudagraphs=True)
        for number in (1, 2, 3):
            last = torch.zeros(())
            torch._dynamo.mark_static_address(last)
            arguments, keywords = make(last)
            compiled(*arguments, **keywords)
            assert last == count == number
    # the parameters, Adam's moments and step counts, and `count`, but not `last`
    assert backend.written == 2 * 4 + 1 + 1 and backend.movable == 1


@pytest.mark.parametrize("name", slow_but(["dqn, event tables", "td3, decoupled", "acer, continuous"], RUNS))
def test_updates_of_recipes_write_to_fixed_addresses(name, backend, tmp_path, monkeypatch):
    recipe, overrides = RUNS[name]
    module = import_module(f"recipes.{recipe}")
    real = updates.compiled
    for place in (updates, module):
        if hasattr(place, "compiled"):
            monkeypatch.setattr(place, "compiled", lambda function, cudagraphs: real(function, cudagraphs=True))
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", backend)
    assert module.train(composed(recipe, *overrides, "compile=true", "device=cpu"), tmp_path) == DONE
    assert backend.written > 10 and not backend.movable


def test_writes_of_whole_slices_are_compiled_as_for_a_gpu():
    """There, inductor computes concatenations in the kernels that read them."""
    case = CASES["slices, uniform, two columns, not padded"]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(4))
    with torch._inductor.config.patch(force_pointwise_cat=True):
        torch.compile(lambda data: buffer.extend(data), fullgraph=True)(experience.take(4))
    buffer.sampler.check_valid()


@pytest.mark.parametrize("name", ["slices, uniform", "proportional"])
def test_eager_writes_between_the_calls_of_a_graph_change_nothing(name):
    case = CASES[name]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(4))
    counters.clear()
    graph = torch.compile(lambda data: step(buffer, data), fullgraph=True, backend="eager")
    for _ in range(3):
        graph(experience.take(4))
        buffer.extend(experience.take(10))
        buffer.sample()
    assert counters["stats"]["unique_graphs"] == 1
