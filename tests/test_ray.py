"""A RayReplayBuffer with each sampler of the package, made in the actor, behaves like a buffer in this process."""

import os
import signal
from functools import partial

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.data import LazyTensorStorage, RayReplayBuffer, TensorDictReplayBuffer

from tests.data import rows
from tests.test_examples import guide_blocks
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    Episodes,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    ProportionalSampler,
    ReaPERSampler,
    ShardedReplayBuffer,
    Threshold,
)

ray = pytest.importorskip("ray", reason="needs ray (pip install ray)")

CAPACITY, BATCH = 64, 16
BETA = Anneal(0.4, 1.0, num_updates=4)


def tables():
    return EventTables([EventSpec("high", Threshold(("next", "reward"), ">", 1.0), history=4)], {"high": 32})


# Each call makes new parts, so that two buffers share nothing.
PARTS = {
    "proportional": lambda: {"sampler": partial(ProportionalSampler, CAPACITY, beta=BETA)},
    "event_tables": lambda: {
        "sampler": partial(
            EventTableSampler,
            tables(),
            eta={"default": 0.5, "high": 0.5},
            min_size=1,
            priority={"kind": "proportional", "beta": BETA},
        ),
        "writer": partial(EventTableWriter, tables()),
    },
}


def arguments(name):
    # one case uses the storage with which samples carry write stamps
    storage = partial(CompilableTensorStorage if name == "proportional" else LazyTensorStorage, CAPACITY)
    return {"storage": storage, "batch_size": BATCH, **PARTS[name]()}


def buffer_class(name):
    return CompilableReplayBuffer if name == "proportional" else TensorDictReplayBuffer


def local_buffer(name):
    parts = {key: part() if callable(part) else part for key, part in arguments(name).items()}
    rb = buffer_class(name)(**parts)
    rb.set_rng(torch.Generator().manual_seed(1))
    return rb


def remote_buffer(name):
    return RayReplayBuffer(replay_buffer_cls=buffer_class(name), remote_config={"num_cpus": 0}, **arguments(name))


@pytest.fixture(scope="module")
def buffers():
    """One buffer per case; all start at the same time."""
    # otherwise, Ray's workers have a lower priority than other processes
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        yield {name: remote_buffer(name) for name in PARTS}
    finally:
        ray.shutdown()


def transitions(first, count=32):
    """Transitions of two environments that alternate, with episodes of 8 steps."""
    step = torch.arange(first, first + count)
    rng = torch.Generator().manual_seed(first)
    data = rows(
        count,
        done=(step // 2 % 8 == 7).nonzero().squeeze(1).tolist(),
        ids=step // 16 * 2 + step % 2,
        observation=torch.randn(count, 3, generator=rng),
        action=torch.zeros(count, dtype=torch.int64),
        logits=torch.randn(count, 2, generator=rng),
    )
    data["next", "observation"] = torch.randn(count, 3, generator=rng)
    data["next", "reward"] = torch.randn(count, 1, generator=rng)
    return data


def assert_same(left, right):
    assert set(left.keys(True, True)) == set(right.keys(True, True))
    for key in left.keys(True, True):
        torch.testing.assert_close(left[key], right[key], rtol=0, atol=0, equal_nan=True)


def sampler_state(rb):
    return TensorDict(rb.state_dict()["_sampler"])


@pytest.mark.parametrize("name", PARTS)
def test_it_does_what_a_local_buffer_does(buffers, name):
    remote, local = buffers[name], local_buffer(name)
    remote.set_rng(torch.Generator().manual_seed(1))
    both = (remote, local)

    # draws, and updates by batch and by index, while beta is annealed
    for number in range(3):
        index = [rb.extend(transitions(32 * number)) for rb in both]
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


def test_an_actors_batch_needs_a_policy_in_this_process(buffers):
    policy = TensorDictModule(torch.nn.Linear(3, 1), in_keys=["observation"], out_keys=["action"])
    sampler = DecoupledSampler(ProportionalSampler(CAPACITY), policy)
    with pytest.raises(ValueError, match="another process"):
        sampler.actor_buffer(buffers["proportional"])


@pytest.mark.parametrize("block", list(guide_blocks(of_ray=True)))
def test_guides(buffers, block):
    block.run({"__name__": "__main__"})


def process_of(shard):
    return ray.get(shard.__ray_call__.remote(lambda _: os.getpid()))


def test_a_sharded_buffer(buffers, tmp_path):
    """Writes, draws, updates, a killed process, a checkpoint that is loaded, and a second process that writes."""
    rb = ShardedReplayBuffer(
        2,
        storage=partial(CompilableTensorStorage, 200),
        sampler=partial(ReaPERSampler, episodes=Episodes(num_streams=2), beta=BETA),
        batch_size=BATCH,
        seed=1,
        remote_config={"num_cpus": 0},
    )
    for first in range(0, 128, 32):
        rb.extend(transitions(first))
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
        data["next", "done"][-2:] = True
        writer.extend(data)
        return writer.write_count

    # the last episodes of this process end first: there are two streams
    ended = transitions(128)
    ended["next", "done"][-2:] = True
    rb.extend(ended)
    assert ray.get(write.remote(rb.client(), transitions(0))) == 32
    assert len(rb) == 192

    os.kill(process_of(rb._shards.handles[1]), signal.SIGKILL)
    with pytest.warns(UserWarning, match="the process of shard 1 of the replay buffer has ended"):
        for _ in range(3):
            assert rb.sample().shape == (BATCH,)
    rb.loads(tmp_path)  # waits until the process has been started again
    stats = rb.stats()
    assert stats["shards"] == 2 and stats["lost_shards"] == 1
    assert len(rb) == 128
    rb.extend(transitions(256))
    assert rb.sample().shape == (BATCH,)
    rb.shutdown()


def test_errors_of_a_shard_pass_as_they_are(buffers):
    rb = ShardedReplayBuffer(
        1,
        storage=partial(CompilableTensorStorage, 64),
        sampler=partial(ReaPERSampler, episodes=Episodes(num_streams=1)),
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    with pytest.raises(ValueError, match="num_streams=1"):
        rb.extend(transitions(0))
    rb.shutdown()
