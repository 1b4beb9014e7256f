"""TorchRL's samplers in our buffer; ours with n-step returns, filled storages, and ensembles."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import (
    ImmutableDatasetWriter,
    LazyMemmapStorage,
    ReplayBufferEnsemble,
    TensorDictReplayBuffer,
    TensorStorage,
)
from torchrl.data.replay_buffers import samplers as torchrl_samplers
from torchrl.envs import MultiStepTransform

from tests import data
from tests.data import buffer_with, learn, random_rows, rows
from tests.params import both_buffers, trees_of_torchrl
from tests.reference import NaiveReaPER
from tests.samplers.experience import probabilities
from torchrl_replay_ext import ProportionalSampler, RankBasedSampler, ReaPERSampler

CAPACITY, BATCH = 40, 8
ABSOLUTE = {"alpha": 1.0, "eps": 0.0, "td_error": "absolute"}
SAMPLERS = {
    "proportional": lambda: ProportionalSampler(**ABSOLUTE),
    "rank": RankBasedSampler,
    "reaper": lambda: ReaPERSampler(omega=1.0, **ABSOLUTE),
}

# --- TorchRL's samplers

PER = {"max_capacity": CAPACITY, "alpha": 0.6, "beta": 0.4}
SLICES = {"slice_len": 3, "traj_key": ("collector", "traj_ids")}
TORCHRL = {
    "ConsumingSampler": [{}],
    "PrioritizedSampler": [PER],
    "PrioritizedSliceSampler": [PER | SLICES],
    "PromptGroupSampler": [{"num_groups": 4, "group_key": ("collector", "traj_ids")}],
    "SamplerWithoutReplacement": [{}],
    "SliceSampler": [
        SLICES,
        {"num_slices": 4},
        {"slice_len": 12, "strict_length": False},
        {"slice_len": 12, "strict_length": False, "pad_output": True},
        SLICES | {"fragmented": True, "step_key": "step_count"},
    ],
    "SliceSamplerWithoutReplacement": [{"slice_len": 3}],
    "StalenessAwareSampler": [{}],
    "StreamingSliceSampler": [{"slice_len": 3}],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        pytest.param(name, arguments, marks=trees_of_torchrl if name.startswith("Prioritized") else ())
        for name, settings in TORCHRL.items()
        for arguments in settings
    ],
)
def test_samplers_of_torchrl_draw_the_same_batches_from_our_buffer(name, arguments):
    if not hasattr(torchrl_samplers, name):
        pytest.skip(f"torchrl has no {name}")

    def batches(compilable):
        torch.manual_seed(0)
        np.random.seed(0)
        sampler = getattr(torchrl_samplers, name)(**arguments)
        rb = buffer_with(sampler, CAPACITY, compilable=compilable, batch_size=12)
        found = []
        for first in (0, 20, 40):
            step = torch.arange(20) % 10
            version = {"step_count": step, "policy_version": torch.zeros(20, dtype=torch.int64)}
            rb.extend(rows(20, first=first, episode=10, ids=first // 10 + torch.arange(20) // 10, **version))
            found.append(rb.sample())
            if isinstance(sampler, torchrl_samplers.PrioritizedSampler):
                found[-1]["td_error"] = found[-1]["number"] + 1.0
                rb.update_tensordict_priority(found[-1])
        return found

    for ours, theirs in zip(batches(True), batches(False), strict=True):
        assert len(ours) > 0 and (ours == theirs).all()


# --- n-step returns


@both_buffers
def test_with_n_step_returns_reliability_is_the_share_of_the_errors_of_all_later_steps(compilable):
    """The stored ``done`` is that of a transition's own step: order and ends of episodes are as without n steps."""
    n, episode, count = 3, 6, 20
    sampler = SAMPLERS["reaper"]()
    rb = buffer_with(sampler, CAPACITY, compilable=compilable, batch_size=BATCH)
    rb.append_transform(MultiStepTransform(n_steps=n, gamma=0.9))
    steps = rows(count, episode=episode)
    steps["next", "reward"] = torch.ones(count, 1)
    rb.extend(steps)
    naive = NaiveReaPER(omega=1.0, **ABSOLUTE)
    # the transform holds back the newest n transitions
    stored = count - n
    assert sampler.stats()["num_items"] == len(rb) == stored
    for slot in range(stored):
        naive.write(slot, episode=slot // episode, terminated=slot % episode == episode - 1)
    errors = torch.rand(stored) + 0.1
    rb.update_priority(torch.arange(stored), errors)
    naive.update(range(stored), errors.tolist())
    expected = torch.tensor(naive.probabilities(), dtype=torch.float64)
    torch.testing.assert_close(probabilities(rb), expected, rtol=1e-5, atol=1e-9)


# --- storages that were filled before


@pytest.mark.parametrize(
    ("name", "filled"), [("proportional", "loaded"), ("rank", "loaded"), ("reaper", "loaded"), ("reaper", "written")]
)
def test_many_memory_mapped_transitions_that_were_stored_before(name, filled, tmp_path):
    count, sampler = 200_000, SAMPLERS[name]()
    if filled == "loaded":
        rows(count, episode=100).memmap(tmp_path)
        storage = TensorStorage(TensorDict.load_memmap(tmp_path))
    else:
        storage = LazyMemmapStorage(count, scratch_dir=tmp_path)
        storage.set(range(count), rows(count, episode=100))
    rb = TensorDictReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), sampler=sampler, batch_size=256)
    batch = learn(rb, error=4.0)
    assert torch.equal(batch["number"], batch["index"])
    stats = sampler.stats()
    assert stats["num_items"] == count and 0.9987 < stats["never_updated"] < 0.9988
    assert float(sampler.probabilities(storage).sum()) == pytest.approx(1.0)


# --- ensembles


def members(name, compilable):
    buffers = [
        buffer_with(data.SAMPLERS[name](CAPACITY), CAPACITY, compilable=compilable, batch_size=BATCH) for _ in range(2)
    ]
    for number, rb in enumerate(buffers):
        rb.extend(random_rows(30, first=100 * number).set("member", torch.full((30,), number)))
    return buffers


@both_buffers
@pytest.mark.parametrize(
    "name", ["proportional", "rank", "reaper", "tables, proportional", "slices, proportional", "decoupled"]
)
def test_an_ensemble_draws_with_the_samplers_of_its_members_which_take_the_priorities(name, compilable):
    buffers = members(name, compilable)
    rb = ReplayBufferEnsemble(*buffers, p=[0.3, 0.7], num_buffer_sampled=3, batch_size=3 * BATCH)
    for _ in range(3):
        batch, info = rb.sample(return_info=True)
        index = info["index"]
        assert batch.shape == info["priority_weight"].shape == (3, BATCH)
        assert torch.equal(batch["member"], index["buffer_ids"])
        for part in range(3):
            member = buffers[int(index["buffer_ids"][part, 0])]
            assert torch.equal(member.storage.get(index["index"][part])["number"], batch["number"][part])
            before = probabilities(member)
            member.update_priority(index["index"][part], torch.rand(BATCH) + 2)
            assert not torch.equal(probabilities(member), before)
    for member in buffers:
        assert member.sampler.stats()["dropped_updates"] == 0


@both_buffers
def test_routed_writes_of_an_ensemble_reach_the_samplers(compilable):
    buffers = members("proportional", compilable)
    rb = ReplayBufferEnsemble(*buffers, sample_from_all=True, routing_key="member", batch_size=2 * BATCH)
    rb.extend(random_rows(6, first=200).set("member", torch.tensor([0, 1, 1, 0, 1, 1])))
    assert [int(member.sampler.stats()["num_items"]) for member in buffers] == [32, 34]
