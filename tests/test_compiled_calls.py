"""``CompilableReplayBuffer(compile=True)``: the calls of an eager loop run as graphs."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import RandomSampler

from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    ProportionalSampler,
    TrajectoryRetraceSampler,
)

CAPACITY, BATCH = 40, 8
slow_to_compile = pytest.mark.usefixtures("from_scratch")


def rows(first: int, count: int) -> TensorDict:
    step = torch.arange(first, first + count)
    done = (step % 10 == 9).unsqueeze(1)
    return TensorDict({"step": step, "logits": torch.zeros(count, 2), "next": {"done": done}}, [count])


def make_buffer(sampler, **arguments) -> CompilableReplayBuffer:
    arguments = {"batch_size": BATCH, "compile": True} | arguments
    return CompilableReplayBuffer(storage=CompilableTensorStorage(CAPACITY), sampler=sampler, **arguments)


def expected_weights(rb: CompilableReplayBuffer, index: torch.Tensor, beta: float) -> torch.Tensor:
    probability = rb.sampler.probabilities(rb.storage)
    return (probability[index] / probability[probability > 0].min()) ** -beta


@slow_to_compile
def test_samples_and_updates_are_those_of_an_eager_buffer():
    compiled, eager = (make_buffer(ProportionalSampler(CAPACITY), compile=flag) for flag in (True, False))
    for step in range(12):
        for rb in (compiled, eager):
            rb.extend(rows(5 * step, 5))
        batch = compiled.sample()
        assert torch.equal(batch["step"], compiled.storage.get(batch["index"])["step"])
        torch.testing.assert_close(
            batch["priority_weight"].double(), expected_weights(compiled, batch["index"], 0.4), rtol=1e-5, atol=0
        )
        batch["td_error"] = torch.rand(BATCH)
        compiled.update_tensordict_priority(batch)
        eager.update_tensordict_priority(batch.clone())
        compiled.sampler.check_valid()
        torch.testing.assert_close(
            compiled.sampler.probabilities(compiled.storage), eager.sampler.probabilities(eager.storage)
        )


@slow_to_compile
def test_settings_may_change_between_calls():
    rb = make_buffer(ProportionalSampler(CAPACITY))
    rb.extend(rows(0, 20))
    for size, beta in ((BATCH, 1.0), (3, 0.5), (BATCH, Anneal(0.2, 0.8, num_updates=3))):
        rb.sampler.beta = beta
        value = float(rb.sampler.beta)
        batch = rb.sample(size)
        expected = expected_weights(rb, batch["index"], value)
        torch.testing.assert_close(batch["priority_weight"].double(), expected, rtol=1e-5, atol=0)
        batch["td_error"] = torch.rand(size)
        rb.update_tensordict_priority(batch)
    assert float(rb.sampler.beta) == pytest.approx(0.4)


@slow_to_compile
def test_rows_of_an_interrupted_write_are_not_drawn(monkeypatch):
    rb = make_buffer(ProportionalSampler(CAPACITY))
    rb.extend(rows(0, 10))
    rb.sample()
    with monkeypatch.context() as patch:

        def interrupted(*arguments, **keywords):
            raise KeyboardInterrupt

        patch.setattr(ProportionalSampler, "mark_update", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rb.extend(rows(10, 10))
    assert max(int(rb.sample()["index"].max()) for _ in range(20)) < 10


@slow_to_compile
def test_a_replaced_sampler_is_updated():
    rb = make_buffer(ProportionalSampler(CAPACITY))
    rb.extend(rows(0, 10))
    for sampler in (rb.sampler, ProportionalSampler(CAPACITY)):
        rb.set_sampler(sampler)
        batch = rb.sample()
        batch["td_error"] = torch.full((BATCH,), 4.0)
        rb.update_tensordict_priority(batch)
        assert float(sampler.stats()["never_updated"]) < 1


@slow_to_compile
def test_transforms_and_subclasses_are_applied_once_and_may_change():
    class Doubling(CompilableReplayBuffer):
        def sample(self, *arguments, **keywords):
            batch = super().sample(*arguments, **keywords)
            batch["step"] *= 2
            return batch

    rb = Doubling(storage=CompilableTensorStorage(CAPACITY), sampler=RandomSampler(), batch_size=BATCH, compile=True)
    rb.extend(rows(1, 1))
    assert rb.sample()["step"].tolist() == BATCH * [2]
    offset = 10
    rb.append_transform(lambda batch: batch.set("step", batch["step"] + offset))
    assert rb.sample()["step"].tolist() == BATCH * [22]
    offset = 20
    assert rb.sample()["step"].tolist() == BATCH * [42]


def test_without_a_compiler_the_calls_are_eager():
    rb = make_buffer(ProportionalSampler(CAPACITY))
    rb.extend(rows(0, 10))
    with torch.compiler.set_stance("force_eager"):
        batch = rb.sample()
        batch["td_error"] = torch.rand(BATCH)
        rb.update_tensordict_priority(batch)
    rb.sampler.check_valid()


@slow_to_compile
def test_a_copy_has_its_own_graphs():
    rb = make_buffer(RandomSampler())
    rb.extend(rows(0, 10))
    rb.sample()
    twin = copy.deepcopy(rb)
    twin.extend(rows(100, CAPACITY))
    assert int(twin.sample()["step"].min()) >= 100
    assert int(rb.sample()["step"].max()) < 10


@slow_to_compile
def test_the_newest_slices_are_not_drawn():
    rb = make_buffer(TrajectoryRetraceSampler(CAPACITY, slice_len=4))
    rb.extend(rows(0, 20))
    slices = rb.sample()["step"].view(-1, 4)
    assert bool(((slices.diff(dim=1) == 1) | (slices.diff(dim=1) == 0)).all())
    assert rb.sampler.newest(rb)["step"].tolist() == [16, 17, 18, 19]


def test_errors_are_those_of_eager_code():
    rb = make_buffer(ProportionalSampler(CAPACITY))
    with pytest.raises(RuntimeError, match="empty"):
        rb.sample()
    rb.extend(rows(0, 10))
    with pytest.raises(KeyError, match="td_error"):
        rb.update_tensordict_priority(rows(0, 2))


@pytest.mark.parametrize(
    "arguments",
    [{"prefetch": 2}, {"generator": torch.Generator()}],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_graphs_ignore_is_refused(arguments):
    with pytest.raises(ValueError, match=f"a graph cannot use {next(iter(arguments))}="):
        make_buffer(ProportionalSampler(CAPACITY), **arguments)


def test_a_generator_is_refused():
    with pytest.raises(ValueError, match="a graph cannot use generator="):
        make_buffer(ProportionalSampler(CAPACITY)).set_rng(torch.Generator())
