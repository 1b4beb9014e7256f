"""What torch needs to replay a graph as a CUDA graph, on hosts without a GPU; tests/test_cuda.py replays them.

A graph that writes to a tensor is replayed only if torch knows that the tensor stays at its address.
"""

from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx
from tensordict import TensorDict
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext

from recipes.common import update as updates
from recipes.common.cli import DONE
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, step
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


@pytest.mark.parametrize("name", CASES)
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


def test_compile_step_marks_all_but_its_arguments(backend):
    network, count = nn.Linear(3, 1), torch.zeros(())
    adam = AdamStep(torch.optim.Adam(network.parameters()))

    def step(batch, last):
        adam(torch.autograd.grad(network(batch["x"]).square().mean(), adam.parameters))
        count.add_(1)
        last["loss"].copy_(batch["x"].mean())

    with patch.object(torch._inductor.compile_fx, "compile_fx", backend):
        compiled = compile_step(step, cudagraphs=True)
        for _ in range(3):
            last = {"loss": torch.zeros(())}
            compiled(TensorDict({"x": torch.ones(4, 3)}, [4]), last)
            assert last["loss"] == 1
    assert count == 3
    # the parameters, Adam's moments and step counts, and `count`, but not `last`
    assert backend.written == 2 * 4 + 1 + 1 and backend.movable == 1


@pytest.mark.parametrize("name", RUNS)
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
