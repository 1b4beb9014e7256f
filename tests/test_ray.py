"""A RayReplayBuffer with a sampler of the package, made in the actor, behaves like a buffer in this process."""

import os
import signal
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer

from tests.data import linear_policy
from tests.sharding.shards import STREAMS, event_tables, transitions
from tests.test_examples import guide_blocks
from torchrl_replay_ext import (
    Anneal,
    CompilableTensorStorage,
    DecoupledSampler,
    Episodes,
    ProportionalSampler,
    ReaPERSampler,
    ShardedReplayBuffer,
)

ray = pytest.importorskip("ray", reason="needs ray (pip install ray)")

CAPACITY, BATCH = 64, 16
BETA = Anneal(0.4, 1.0, num_updates=4)


def arguments():
    """New parts, so that two buffers share nothing."""
    storage = partial(LazyTensorStorage, CAPACITY)
    return {"storage": storage, "batch_size": BATCH, **event_tables(priority={"kind": "proportional", "beta": BETA})}


@pytest.fixture(scope="module")
def remote():
    # otherwise, Ray's workers have a lower priority than other processes
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield RayReplayBuffer(replay_buffer_cls=TensorDictReplayBuffer, remote_config={"num_cpus": 0}, **arguments())
    finally:
        ray.shutdown()


def assert_same(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)


def sampler_state(rb):
    return TensorDict(rb.state_dict()["_sampler"])


def test_it_does_what_a_local_buffer_does(remote):
    parts = {key: part() if callable(part) else part for key, part in arguments().items()}
    both = (remote, TensorDictReplayBuffer(**parts))
    for rb in both:
        rb.set_rng(torch.Generator().manual_seed(1))
    # draws, and updates by batch and by index, while beta is annealed
    for number in range(3):
        index = [rb.extend(transitions(32 * number, 8)) for rb in both]
        assert torch.equal(*index)
        batches = [rb.sample() for rb in both]
        assert_same(*batches)
        assert batches[0]["priority_weight"].shape == (BATCH,)
        for rb, batch in zip(both, batches, strict=True):
            batch["td_error"] = torch.linspace(0.1, 2.0, BATCH) ** 2
            rb.update_tensordict_priority(batch)
    for rb in both:
        rb.update_priority(index[0][:4], torch.full((4,), 9.0))
    assert_same(*map(sampler_state, both))
    assert sampler_state(remote)["beta"][0] == 1.0
    assert remote.write_count == 96 and len(remote) == CAPACITY


def test_an_actors_batch_needs_a_policy_in_this_process(remote):
    sampler = DecoupledSampler(ProportionalSampler(CAPACITY), linear_policy())
    with pytest.raises(ValueError, match="another process"):
        sampler.actor_buffer(remote)


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("block", list(guide_blocks(of_ray=True)))
def test_guides(block):
    block.run({"__name__": "__main__"})


def process_of(shard):
    return ray.get(shard.__ray_call__.remote(lambda _: os.getpid()))


@pytest.mark.usefixtures("remote")
def test_a_sharded_buffer(tmp_path):
    """Writes, draws, updates, a killed process, a checkpoint that is loaded, and a second process that writes."""
    rb = ShardedReplayBuffer(
        2,
        storage=partial(CompilableTensorStorage, 200),
        sampler=partial(ReaPERSampler, episodes=Episodes(num_streams=STREAMS), beta=BETA),
        batch_size=BATCH,
        seed=1,
        remote_config={"num_cpus": 0},
    )
    for first in range(0, 128, 32):
        rb.extend(transitions(first, 8))
    for _ in range(4):
        batch = rb.sample()
        assert batch.shape == (BATCH,) and set(batch["shard"].tolist()) <= {0, 1}
        batch["td_error"] = torch.linspace(0.1, 2.0, BATCH) ** 2
        rb.update_tensordict_priority(batch)
    assert rb.stats()["beta"] == 1.0 and len(rb) == 128
    rb.dumps(tmp_path)

    @ray.remote(num_cpus=0)
    def write(writer, data):
        data["collector", "traj_ids"] += 1000
        data["next", "done"][-STREAMS:] = True
        writer.extend(data)
        return writer.write_count

    # the last episodes of this process end first: there are as many streams
    ended = transitions(128, 8)
    ended["next", "done"][-STREAMS:] = True
    rb.extend(ended)
    assert ray.get(write.remote(rb.client(), transitions(0, 8))) == 32
    assert len(rb) == 192

    os.kill(process_of(rb._shards.handles[1]), signal.SIGKILL)
    with pytest.warns(UserWarning, match="the process of shard 1 of the replay buffer has ended"):
        for _ in range(3):
            assert rb.sample().shape == (BATCH,)
    rb.loads(tmp_path)  # waits until the process has been started again
    stats = rb.stats()
    assert stats["shards"] == 2 and stats["lost_shards"] == 1
    assert len(rb) == 128
    rb.extend(transitions(256, 8))
    assert rb.sample().shape == (BATCH,)
    rb.shutdown()


@pytest.mark.usefixtures("remote")
def test_errors_of_a_shard_pass_as_they_are():
    rb = ShardedReplayBuffer(
        1,
        storage=partial(CompilableTensorStorage, 64),
        sampler=partial(ReaPERSampler, episodes=Episodes(num_streams=1)),
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    with pytest.raises(ValueError, match="num_streams=1"):
        rb.extend(transitions(0, 8))
    rb.shutdown()
