"""Storage and sampler on a CUDA device: the same state as on the CPU, and CUDA graphs without device reads.

    python -m pytest -m cuda -n 8 --max-seconds 330

needs torch >= 2.13 built for CUDA, with its Triton, and the torchrl of pyproject.toml. TorchRL's own PER is not used.
Most of the time goes to compiling. Tests that have not begun after --max-seconds are skipped.
"""

import copy
import math
import sys
from importlib import import_module

import pytest
import torch
import torch._dynamo
from tensordict import TensorDict
from tensordict.nn import CudaGraphModule
from torch._dynamo.utils import counters

from recipes.common.cli import DONE
from tests.chi_square import p_value
from tests.data import buffer_with
from tests.recipes.emulated_runs import RUNS
from tests.recipes.runs import composed, rows
from tests.test_compiled import (
    BATCH,
    CASES,
    DEFAULT,
    PRIORITIZED,
    Case,
    Experience,
    assert_same_sampler,
    step,
)
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    compile_step,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("no_schemas_of_torchrl"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # warnings of torch's compiler for CUDA devices, of its first CUDA graph, and of set_sync_debug_mode
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:Online softmax is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    # of tensordict
    pytest.mark.filterwarnings("ignore:Tensordict is registered in PyTree:UserWarning"),
]

DEVICE = "cuda"
# cases whose buffers keep rows that are older than the capacity
PINNED = ("events, proportional, pinned",)


@pytest.fixture(autouse=True)
def from_scratch():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.cuda.set_sync_debug_mode("default")
    torch._dynamo.reset()


def filled(case: Case) -> tuple[CompilableReplayBuffer, Experience]:
    """A buffer on the device whose ring has wrapped, after some eager steps."""
    buffer, experience = case.buffer(device=DEVICE), case.experience()
    torch.manual_seed(3)
    buffer.extend(experience.take(4).to(DEVICE))
    for _ in range(case.capacity // 3):
        step(buffer, experience.take(4).to(DEVICE))
    return buffer, experience


def assert_one_graph() -> None:
    """Nothing was compiled twice, and no CUDA graph was left out."""
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.fixture
def same_numbers(monkeypatch):
    """Make random numbers on the CPU and move them, so that both devices draw the same slots."""

    def uniform(*size: int, device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(*size, dtype=torch.float64).to(device)

    def random_seed(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.randint(2**63 - 1, (1,)).to(device)

    for name, module in list(sys.modules.items()):
        for function in (uniform, random_seed):
            if name.startswith("torchrl_replay_ext") and hasattr(module, function.__name__):
                monkeypatch.setattr(module, function.__name__, function)


# ranks of TD errors that differ by less than 0.8 % may differ: the CPU does not sort
@pytest.mark.usefixtures("same_numbers")
@pytest.mark.parametrize("name", [name for name in PRIORITIZED if "rank" not in name])
def test_the_device_has_the_state_that_the_cpu_has(name, tmp_path):
    """The device gets the CPU's batches. Both draw the same, but ReaPER rejects with other random numbers."""
    case = CASES[name]
    on_cpu, on_device, experience = case.buffer(), case.buffer(device=DEVICE), case.experience()
    for number in range(case.capacity):
        data = experience.take(4)
        on_cpu.extend(data.clone())
        on_device.extend(data.to(DEVICE))
        torch.manual_seed(number)
        first = on_cpu.sample()
        torch.manual_seed(number)
        second = on_device.sample().to("cpu")
        assert set(first.keys(True, True)) == set(second.keys(True, True))
        for key, value in first.items(True, True) if "reaper" not in name else ():
            if key == "priority_weight":
                torch.testing.assert_close(value, second[key])
            else:
                assert torch.equal(value, second[key]), key
        first["td_error"] = 1024 * (first["error"] + data["error"].amax())
        on_cpu.update_tensordict_priority(first)
        on_device.update_tensordict_priority(first.to(DEVICE))
        if number == case.capacity // 2:
            # a checkpoint from the device continues on the device and on the CPU
            on_device.dumps(tmp_path)
            on_device, on_cpu = case.buffer(device=DEVICE), case.buffer()
            on_device.loads(tmp_path)
            on_cpu.loads(tmp_path)
    assert_same_sampler(on_cpu, on_device, but=("acceptance_rate",))


def compiled_step(buffer: CompilableReplayBuffer, mode: str | None, extends: bool = True):
    return torch.compile(lambda data: step(buffer, data, extends), fullgraph=True, mode=mode)


WAYS = {
    "reduce-overhead": lambda buffer, extends: compiled_step(buffer, "reduce-overhead", extends),
    "compiled": lambda buffer, extends: compiled_step(buffer, None, extends),
    "CudaGraphModule": lambda buffer, extends: CudaGraphModule(lambda data: step(buffer, data, extends), warmup=3),
    "CudaGraphModule of compiled": lambda buffer, extends: CudaGraphModule(
        compiled_step(buffer, None, extends), warmup=3
    ),
    "compile_step": lambda buffer, extends: compile_step(lambda data: step(buffer, data, extends), cudagraphs=True),
}


# all cases in the ways that this package makes; the others compile the same code
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in CASES for way in WAYS if name in DEFAULT or way in ("compile_step", "CudaGraphModule")],
)
def test_steps_write_draw_and_update_without_waiting(name, way):
    """Every drawn row is stored, from a nearly empty buffer until the ring has wrapped often."""
    case = CASES[name]
    buffer, experience = case.buffer(device=DEVICE), case.experience()
    buffer.extend(experience.take(4).to(DEVICE))
    extends = case.extends and getattr(buffer.sampler, "writes_in_graphs", True)
    in_graph = WAYS[way](buffer, extends)
    columns = experience.ndim
    for number in range(case.capacity):
        data = experience.take(4).to(DEVICE)
        if not extends:
            buffer.extend(data)
        torch.cuda.synchronize()
        # the first steps warm up and record the graph, and may wait
        waits = number < 8
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        torch.compiler.cudagraph_mark_step_begin()
        batch = in_graph(data).clone()
        torch.cuda.set_sync_debug_mode("default")
        written = experience.time * columns
        index = batch["index"] if columns == 1 else batch["index"][:, 0] * columns + batch["index"][:, 1]
        assert torch.equal(buffer.storage[:].flatten()["number"][index], batch["number"])
        assert int(batch["number"].max()) < written
        if name not in PINNED:
            assert torch.equal(index, batch["number"] % case.capacity)
            assert int(batch["number"].min()) >= written - case.capacity
        weight = batch.get("priority_weight", torch.ones(1))
        assert bool(((weight > 0) & (weight <= 1)).all())
        if number == case.capacity // 2:
            # another batch size, in eager code
            buffer.extend(experience.take(10).to(DEVICE))
    assert len(buffer) == case.capacity
    assert buffer.write_count == experience.time
    if "Module" not in way:
        assert_one_graph()
    if name in PRIORITIZED:
        assert int(buffer.sampler.stats()["dropped_updates"]) == int(buffer.sampler.stats()["rejected_updates"]) == 0


@pytest.mark.parametrize("way", ["eager", "reduce-overhead", "CudaGraphModule"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ProportionalSampler(80, alpha=0.6, td_error="absolute"),
        lambda: RankBasedSampler(80, td_error="absolute"),
        lambda: ReaPERSampler(80, alpha=0.6, omega=0.5, td_error="absolute"),
    ],
    ids=["proportional", "rank", "reaper"],
)
def test_draws_follow_the_probabilities(make, way):
    """Chi-square test with 64 items and 50,000 draws; the negative control is another exponent."""
    buffer = buffer_with(make(), 80, compilable=True, device=DEVICE, batch_size=500)
    buffer.extend(Experience("flat").take(64).to(DEVICE))
    buffer.update_priority(torch.arange(64, device=DEVICE), torch.linspace(0.2, 3.0, 64)[torch.randperm(64)].to(DEVICE))

    def draw():
        return buffer.sample()["index"]

    if way == "reduce-overhead":
        draw = torch.compile(draw, fullgraph=True, mode="reduce-overhead")
    elif way == "CudaGraphModule":
        draw = CudaGraphModule(draw, warmup=3)
    batches = []
    for _ in range(100):
        torch.compiler.cudagraph_mark_step_begin()
        batches.append(draw().clone())
    assert p_value(torch.cat(batches), buffer.sampler.probabilities(buffer.storage)) > 1e-4
    buffer.sampler.alpha = 0.5
    assert p_value(torch.cat(batches), buffer.sampler.probabilities(buffer.storage)) < 1e-4


@pytest.mark.parametrize("name", ["proportional", "reaper, two streams"])
def test_a_checkpoint_is_restored_under_a_recorded_graph(name):
    """A checkpoint is loaded in place: the recorded graph continues with the restored state."""
    case = CASES[name]
    buffer, experience = filled(case)
    in_graph = compiled_step(buffer, "reduce-overhead", buffer.sampler.writes_in_graphs)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        in_graph(experience.take(4).to(DEVICE))
    saved, before = copy.deepcopy(buffer.sampler.state_dict()), buffer.sampler.probabilities(buffer.storage)
    batch = buffer.sample()
    batch["td_error"] = torch.full((BATCH,), 50_000.0, device=DEVICE)
    buffer.update_tensordict_priority(batch)
    buffer.sampler.load_state_dict(saved)
    assert torch.equal(buffer.sampler.probabilities(buffer.storage), before)
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        assert bool((in_graph(experience.take(4).to(DEVICE))["priority_weight"] > 0).all())
    assert_one_graph()
    # step() gives TD errors of up to 3,200
    assert float(buffer.sampler.stats()["max_priority"]) < 4_000


def test_a_recorded_step_runs_once_per_call_and_draws_new_numbers():
    total = torch.zeros(3, device=DEVICE)

    def step(x):
        total.add_(x["x"])
        return {"double": 2 * x["x"], "drawn": torch.rand(4, device=DEVICE)}

    def call(number):
        return compiled(TensorDict({"x": torch.full((3,), float(number), device=DEVICE)}, [3]))

    compiled = compile_step(step, cudagraphs=True)
    results = [call(number) for number in range(8)]
    assert total.tolist() == [sum(range(8))] * 3
    assert [result["double"].tolist() for result in results] == [[2.0 * number] * 3 for number in range(8)]
    assert len({tuple(result["drawn"].tolist()) for result in results}) == 8
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(call(0)["drawn"])
    assert torch.equal(*drawn)


def test_a_recorded_step_refuses_tensors_on_the_cpu():
    factor = torch.tensor(2.0)
    with pytest.raises(RuntimeError, match=r"factor is on cpu, other tensors of <lambda> are on cuda:0"):
        compile_step(lambda x: factor * x, cudagraphs=True)(torch.ones(3, device=DEVICE))


def test_overwritten_slots_are_dropped_on_the_device():
    buffer, experience = filled(CASES["reaper"])
    batch = buffer.sample()
    buffer.extend(experience.take(CASES["reaper"].capacity).to(DEVICE))
    batch["td_error"] = torch.ones(BATCH, device=DEVICE)
    torch.compile(buffer.update_tensordict_priority, fullgraph=True, mode="reduce-overhead")(batch)
    assert int(buffer.sampler.stats()["dropped_updates"]) == BATCH
    assert float(buffer.sampler.stats()["never_updated"]) == 1


@pytest.mark.parametrize("name", RUNS)
def test_recipes_train_with_cuda_graphs(name, tmp_path):
    recipe, overrides = RUNS[name]
    options = ["device=cuda", "compile=true", "cudagraphs=true"]
    assert import_module(f"recipes.{recipe}").train(composed(recipe, *overrides, *options), tmp_path) == DONE
    assert not counters["inductor"]["cudagraph_skips"]
    losses = [float(value) for key, value in rows(tmp_path)[-1].items() if key.startswith("loss")]
    assert losses and all(math.isfinite(loss) for loss in losses)
