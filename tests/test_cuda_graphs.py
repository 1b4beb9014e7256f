"""CUDA graphs, on hosts without a GPU; tests/test_cuda.py records and replays real ones."""

from dataclasses import dataclass
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch._inductor.compile_fx
import torch._inductor.config
from tensordict import TensorDict, lazy_stack
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext

import torchrl_replay_ext.cuda_graphs as cuda_graphs
from recipes.common import update as updates
from recipes.common.cli import DONE
from tests.params import slow_but
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed
from tests.test_compiled import CASES, assert_same_sampler, step
from torchrl_replay_ext import AdamStep, compile_step

pytestmark = pytest.mark.usefixtures("from_scratch", "no_schemas_of_torchrl")


class Backend:
    """Runs graphs as they are, and counts the tensors that they write to; in place of inductor.

    torch replays a graph that writes to a tensor in the mode "reduce-overhead" only if the tensor is marked as one that
    stays at its address.
    """

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


class Recorder:
    """Records work that is done on the CPU: the work is done when it is recorded, in place of the first replay."""

    recorded = replays = 0

    def __init__(self, device):
        assert device.type == "cpu"

    def warm_up(self, work):
        return work()

    def record(self, work):
        Recorder.recorded += 1
        results, is_new = work(), True

        def replay():
            nonlocal is_new
            Recorder.replays += 1
            if is_new:
                is_new = False
                return
            for result, value in zip(results, work(), strict=True):
                if isinstance(result, torch.Tensor):
                    result.detach().copy_(value.detach())

        return replay, results


@pytest.fixture
def backend():
    return Backend()


@pytest.fixture
def recorder(monkeypatch, backend):
    """compile_step records graphs on the CPU, which are not compiled by inductor."""
    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", backend)
    monkeypatch.setattr(cuda_graphs, "CudaRecorder", Recorder)
    Recorder.recorded = Recorder.replays = 0
    return Recorder


@pytest.mark.parametrize("name", slow_but(["reaper", "slices, proportional, two streams"], CASES))
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


# how the step gets a tensor: its arguments, and the tensor in the argument
WAYS = {
    "positional": (lambda tensor: ((tensor,), {}), lambda last: last),
    "keyword": (lambda tensor: ((), {"last": tensor}), lambda last: last),
    "nested": (lambda tensor: (([{"value": tensor}],), {}), lambda last: last[0]["value"]),
    "dataclass": (lambda tensor: ((Box(tensor),), {}), lambda last: last.value),
    "TensorDict": (lambda tensor: ((TensorDict({"a": {"value": tensor}}),), {}), lambda last: last["a", "value"]),
    "lazy stack": (lambda tensor: ((lazy_stack([TensorDict({"value": tensor})]),), {}), lambda last: last[0]["value"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_a_recorded_step_runs_it_once_with_its_own_arguments(way, recorder):
    arguments_of, value_of = WAYS[way]
    network, total = nn.Linear(3, 1), torch.zeros(3)
    adam = AdamStep(torch.optim.Adam(network.parameters()))

    def step(last):
        value = value_of(last)
        adam(torch.autograd.grad(network(value).square().mean(), adam.parameters))
        total.add_(value)
        return {"double": 2 * value, "whole": value.long(), "total": total}

    compiled, results = compile_step(step, cudagraphs=True), []
    values = [torch.full((4, 3), float(number))[number % 4] for number in range(8)]
    for value in values:
        arguments, keywords = arguments_of(value)
        results.append(compiled(*arguments, **keywords))
    assert (recorder.recorded, recorder.replays) == (1, 5)
    assert total.tolist() == [sum(range(8))] * 3 and float(adam._states[0]["step"]) == 8
    for number, result in enumerate(results):
        assert result["double"].tolist() == [2 * number] * 3 and result["whole"].tolist() == [number] * 3
        # a result that is a tensor of the step
        assert torch.equal(result["total"], total)


def test_a_recorded_step_may_write_to_its_arguments(recorder):
    count = torch.zeros(())

    def step(batch, last):
        count.add_(1)
        last.copy_(count)
        batch["td_error"] = batch["x"] + count
        batch["x"].add_(1)

    compiled = compile_step(step, cudagraphs=True)
    for number in range(1, 8):
        batch, last = TensorDict({"x": torch.zeros(2)}, [2]), torch.zeros(())
        compiled(batch, last)
        assert last == number
        assert batch["td_error"].tolist() == [number] * 2 and batch["x"].tolist() == [1, 1]


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_recorded_step_refuses_arguments_that_do_not_fit(calls, recorder):
    total = torch.zeros(())
    step = compile_step(lambda rows: total.add_(rows["x"].sum()), cudagraphs=True)
    for _ in range(calls):
        step(TensorDict({"x": torch.ones(4)}, [4]))
    for wrong, message in (
        (TensorDict({"x": torch.ones(3)}, [3]), r"argument 0 of <lambda> has batch size \[3\]"),
        (TensorDict({"x": torch.ones(4).double()}, [4]), "of torch.float64"),
        (TensorDict({"x": torch.ones(4, device="meta")}, [4]), "on meta"),
        (TensorDict({"y": torch.ones(4)}, [4]), "has nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            step(wrong)
    assert total == 4 * calls


def test_a_recorded_step_must_not_replace_its_tensors(recorder):
    module = nn.Module()
    module.register_buffer("total", torch.zeros(()))

    def step():
        module.total = module.total + 1
        return module.total * 1

    compiled = compile_step(step, cudagraphs=True)
    compiled()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"module\.total is not the tensor .* first call of step.*tensor\.copy_"):
            compiled()
    assert module.total == 1


@pytest.mark.parametrize("calls", [1, 6])
def test_tensors_of_a_recorded_step_must_not_be_replaced(calls, recorder):
    state = {"total": torch.zeros(())}
    compiled = compile_step(lambda: state["total"].add_(1), cudagraphs=True)
    for _ in range(calls):
        compiled()
    first, state["total"] = state["total"], torch.zeros(())
    with pytest.raises(RuntimeError, match=r"state\['total'\] is not the tensor"):
        compiled()
    # another view of the same memory
    state["total"] = first.view(())
    compiled()
    assert first == calls + 1


def test_elements_of_arguments_that_share_memory_are_refused(recorder):
    compiled = compile_step(lambda x: x.sum(), cudagraphs=True)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        for _ in range(cuda_graphs.WARM_UP + 1):
            compiled(torch.ones(1).expand(3))


def test_tensors_on_different_devices_are_refused(recorder):
    there, x = torch.ones(2, device="meta"), torch.ones(2)
    compiled = compile_step(lambda x: (x + 1, there + 1), cudagraphs=True)
    with pytest.raises(RuntimeError, match=r"is on meta, other tensors of <lambda> are on cpu"):
        compiled(x)


def test_cuda_graphs_need_a_gpu():
    compiled = compile_step(lambda x: x + 1, cudagraphs=True)
    with pytest.raises(RuntimeError, match="must use tensors on a CUDA device, not cpu"):
        compiled(torch.ones(1))


def test_a_step_that_cannot_be_recorded_is_named(recorder, monkeypatch):
    def fail(self, work):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Recorder, "record", fail)
    total = torch.zeros(())
    compiled = compile_step(lambda: total.add_(1), cudagraphs=True)
    for _ in range(cuda_graphs.WARM_UP):
        compiled()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"<lambda> cannot be recorded as .* must not wait") as caught:
            compiled()
        assert "not permitted" in str(caught.value.__cause__)
    assert total == cuda_graphs.WARM_UP


def test_a_recorded_cycle_of_a_buffer_is_the_compiled_one(recorder):
    case = CASES["proportional"]
    buffers = [case.buffer(), case.buffer()]
    steps = [
        compile_step(lambda data, buffer=buffer: step(buffer, data), cudagraphs=buffer is buffers[0])
        for buffer in buffers
    ]
    experience = case.experience()
    first = experience.take(4)
    for buffer in buffers:
        buffer.extend(first.clone())
    for number in range(20):
        data = experience.take(4)
        batches = []
        for run in steps:
            torch.manual_seed(number)
            batches.append(run(data.clone()))
        torch.testing.assert_close(batches[0].to_dict(), batches[1].to_dict())
    assert_same_sampler(buffers[0], buffers[1])
    assert recorder.replays == 17


def train(name, path, monkeypatch, compile_step, *options):
    """Run a recipe with another ``compile_step``."""
    recipe, overrides = RUNS[name]
    module = import_module(f"recipes.{recipe}")
    for place in (updates, module):
        if hasattr(place, "compile_step"):
            monkeypatch.setattr(place, "compile_step", compile_step)
    assert module.train(composed(recipe, *overrides, "compile=true", "device=cpu", *options), path) == DONE


@pytest.mark.parametrize("name", slow_but(["dqn, event tables"], RUNS))
def test_recipes_train_with_recorded_updates(name, recorder, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_graphs, "WARM_UP", 1)

    def recorded(function, cudagraphs):
        return compile_step(function, cudagraphs=True)

    train(name, tmp_path, monkeypatch, recorded, f"{RUNS[name][0]}.total_steps=64")
    assert recorder.recorded and recorder.replays > recorder.recorded


def test_eager_writes_between_the_calls_of_a_graph_change_nothing():
    case = CASES["slices, proportional, two streams"]
    buffer, experience = case.buffer(), case.experience()
    buffer.extend(experience.take(4))
    counters.clear()
    graph = torch.compile(lambda data: step(buffer, data), fullgraph=True, backend="eager")
    for _ in range(3):
        graph(experience.take(4))
        buffer.extend(experience.take(10))
        buffer.sample()
    assert counters["stats"]["unique_graphs"] == 1
