"""The rest of a sharded buffer: checkpoints, several updates, and bad input."""

import copy
from functools import partial

import pytest
import torch

from tests.sharding.local_calls import LocalCalls
from tests.sharding.shards import (
    BATCH,
    PARTS,
    STREAMS,
    agreement,
    draw,
    event_tables,
    fill,
    learn,
    probability_of_rows,
    rows_in,
    set_priorities,
    sharded,
    transitions,
)
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    ProportionalSampler,
    RankBasedSampler,
    RecencySampler,
    ShardWriter,
    TrajectoryRetraceSampler,
)


@pytest.mark.parametrize("name", [name for name in PARTS if "pinned" not in name])
def test_state_dict_and_checkpoint(name, tmp_path):
    many = sharded(name, 2)
    fill(many)
    learn(many, 5)
    late = many.sample()
    many.dumps(tmp_path)
    state = many.state_dict()
    for load in (lambda rb: rb.load_state_dict(state), lambda rb: rb.loads(tmp_path)):
        restored = sharded(name, 2)
        load(restored)
        # the open episodes were truncated
        assert len(restored) == len(many) + STREAMS * 0 or len(restored) > len(many)
        assert restored.sample().shape == (BATCH,)
        restored.check_valid()
    many.empty()
    assert len(many) == 0
    with pytest.raises(RuntimeError, match="no transition can be drawn: the buffer is empty"):
        many.sample()
    fill(many)
    if many._takes_priorities:
        late["td_error"] = torch.full((BATCH,), 1e4)
        many.update_tensordict_priority(late)
        assert max(report.largest_priority for report, _ in many._group.call("report")) < 10
    many.check_valid()


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_shards": 0}, ValueError, r"num_shards=0\): num_shards must be an integer >= 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be an integer >= 1"),
        ({"prefetch": -1}, ValueError, "prefetch must be an integer >= 0"),
        ({"two_phase": True, "prefetch": 1}, ValueError, r"two_phase=True\): pass prefetch=0"),
        ({"sampler": RankBasedSampler}, ValueError, "ranks need the priorities of all shards"),
        ({"sampler": partial(RecencySampler, half_life=100)}, ValueError, "ages need the order of the writes"),
        (
            {"sampler": partial(ProportionalSampler, max_priority_within_buffer=True)},
            ValueError,
            "max_priority_within_buffer=True needs",
        ),
        (event_tables(priority={"kind": "rank"}), ValueError, "ranks need the priorities of all shards"),
        (event_tables(correction="conditional"), ValueError, "counts outcomes"),
        (
            {"sampler": partial(TrajectoryRetraceSampler, slice_len=5, behaviour_keys=())},
            ValueError,
            "must be a multiple of slice_len=5",
        ),
    ],
)
def test_bad_arguments(arguments, error, message):
    calls = LocalCalls()
    with pytest.raises(error, match=message):
        sharded("", **{"num_shards": 2, **copy.deepcopy(arguments)}, calls=calls)
    assert not calls.shards


@pytest.mark.parametrize("sampler", [RankBasedSampler, partial(RecencySampler, half_life=20)])
def test_one_shard_draws_as_the_buffer_itself_if_that_needs_all_rows(sampler):
    one = CompilableReplayBuffer(storage=CompilableTensorStorage(256), sampler=sampler(), batch_size=BATCH)
    many = sharded("", 1, sampler=sampler)
    fill(one)
    fill(many)
    learn(many, 3)
    if sampler is RankBasedSampler:
        set_priorities(one, many)
    assert agreement(draw(many)[0], probability_of_rows(one)) > 1e-4
    assert 0 < many.sample()["priority_weight"].min() <= 1
    many.check_valid()


def test_batches_with_other_entries_write_nothing():
    many = sharded("proportional", 3)
    fill(many)
    before = rows_in(many)
    data = transitions(1000, 8)
    for wrong in (
        data.exclude("value"),
        data.clone().set("value", data["value"].double()),
        data.clone().set("value", torch.zeros(32, 2)),
        data.reshape(4, 8),
    ):
        with pytest.raises(ValueError, match=r"value|shape"):
            many.extend(wrong)
        # also another process
        with pytest.raises(ValueError, match=r"value|shape"):
            many.client().extend(wrong)
    assert rows_in(many) == before


def test_a_refused_first_batch_leaves_no_trace():
    many = sharded("event tables", 2)
    with pytest.raises(KeyError, match="value"):
        many.extend(transitions(0, 8).exclude("value"))
    assert len(many) == 0
    fill(many)
    assert len(many) == 160 and many.sample().shape == (BATCH,)


@pytest.mark.parametrize(
    ("entry", "column", "message"),
    [
        (("collector", "traj_ids"), torch.zeros(32, dtype=torch.int32), "must have one int64 per transition"),
        (("collector", "traj_ids"), torch.zeros(32, 2, dtype=torch.int64), "must have one int64 per transition"),
        ("shard", torch.zeros(32), r"samples get the entries .*'shard'"),
        ("half", torch.zeros(32, dtype=torch.bfloat16), r"dtypes that NumPy has, .*'half': torch.bfloat16"),
    ],
)
def test_entries_of_the_wrong_kind(entry, column, message):
    many = sharded("proportional", 2)
    with pytest.raises((TypeError, ValueError), match=message):
        many.extend(transitions(0, 8).set(entry, column))
    fill(many)


def test_a_td_error_that_is_too_large_is_refused_at_once():
    many = sharded("", 2, sampler=partial(ProportionalSampler, alpha=1.0, beta=Anneal(0.0, 1.0, num_updates=10)))
    fill(many)
    batch = many.sample()
    batch["td_error"] = torch.cat([torch.ones(BATCH - 1), torch.full((1,), 1e25)])
    with pytest.raises(ValueError, match=r"TD errors must lie in \[0, .* has 1e\+25|has 9.99"):
        many.update_tensordict_priority(batch)
    assert many.stats()["beta"] == 0


def test_one_shard_with_slices_and_ranks():
    slices = lambda: TrajectoryRetraceSampler(  # noqa: E731
        slice_len=4, num_streams=STREAMS, behaviour_keys=(), anchors=RankBasedSampler()
    )
    many = sharded("", 1, sampler=slices)
    fill(many)
    assert many.sample().shape == (BATCH,)


@pytest.mark.parametrize("errors", [(), (1,), (2,)])
def test_td_errors_of_batches_with_padding_may_have_several_entries(errors):
    """NaN in padded rows has no effect; of several entries the largest counts."""
    many = sharded("slices, priorities", 2)
    fill(many)
    batch = many.sample()
    padded = ~batch["collector", "mask"]
    assert padded.any()
    batch["td_error"] = torch.rand(BATCH, *errors) + 1
    batch["td_error"][padded] = torch.nan
    many.update_tensordict_priority(batch)
    assert many.stats()["rejected_updates"] == 0 and many.stats()["max_priority"] > 1


def test_bad_td_errors_change_nothing():
    many = sharded("proportional", 2)
    fill(many)
    batch = many.sample()
    before = many.state_dict()
    with pytest.raises(KeyError, match="no entry 'td_error'"):
        many.update_tensordict_priority(batch)
    batch["td_error"] = torch.full((BATCH,), float("nan"))
    with pytest.raises(ValueError, match=r"must lie in \[0, .* has nan"):
        many.update_tensordict_priority(batch)
    after = many.state_dict()
    for left, right in zip(before["shards"], after["shards"], strict=True):
        assert torch.equal(left["_sampler"]["priority"], right["_sampler"]["priority"])


def test_updates_after_the_buffer_was_emptied_are_dropped():
    many = sharded("proportional", 2, prefetch=1)
    fill(many)
    batch = many.sample()
    many.empty()
    batch["td_error"] = torch.ones(BATCH)
    many.update_tensordict_priority(batch)
    with pytest.raises(RuntimeError, match="the buffer is empty"):
        many.sample()


def test_a_stored_weight_does_not_become_the_weight_of_a_draw():
    many = sharded("proportional", 2)
    data = transitions(0, 20)
    many.extend(data.set("priority_weight", torch.full((len(data),), 7.0)))
    assert (many.sample()["priority_weight"] == 1).all()


def test_entries_that_are_not_tensors_are_refused():
    many = sharded("proportional", 2)
    data = transitions(0, 8)
    with pytest.raises(TypeError, match="'name' must be a tensor"):
        many.extend(data.clone().set_non_tensor("name", "a"))
    many.extend(data)


def test_slices_can_be_updated_in_rows_and_padding_is_left_out():
    many = sharded("slices, priorities", 2)
    fill(many)
    batch = many.sample()
    error = torch.ones(BATCH)
    error[~batch["collector", "mask"]] = float("nan")
    batch["td_error"] = error
    assert error.isnan().any()
    many.update_tensordict_priority(batch.reshape(-1, 4))
    many.check_valid()
    batch["shard"] = torch.full((BATCH,), 2)
    with pytest.raises(ValueError, match=r"the entry 'shard' must lie in \[0, 1\]"):
        many.update_tensordict_priority(batch)


@pytest.mark.parametrize("arguments", [{"ndim": 2}, {"device": "meta"}])
def test_storages_that_shards_cannot_use(arguments):
    with pytest.raises(ValueError, match="shards need a storage with ndim=1 on the CPU"):
        sharded("", 2, storage=partial(CompilableTensorStorage, 64, **arguments))


def test_a_checkpoint_of_another_number_of_shards(tmp_path):
    many, other = sharded("proportional", 2), sharded("proportional", 3)
    fill(many)
    fill(other)
    many.dumps(tmp_path)
    for load in (lambda: other.load_state_dict(many.state_dict()), lambda: other.loads(tmp_path)):
        with pytest.raises(ValueError, match="the checkpoint has 2 shards, this buffer has 3"):
            load()
    assert len(other) == 160
    other.sample()
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        other.loads(tmp_path / "nothing")


def test_writes_end_if_no_shard_comes_back():
    many = sharded("proportional", 2)
    fill(many)
    writer = ShardWriter(
        many._group.handles,
        LocalCalls(),
        number=9,
        traj_key=("collector", "traj_ids"),
        done_key=("next", "done"),
        timeout=0.2,
    )
    for handle in many._group.handles:
        handle.kill()
    with pytest.raises(RuntimeError, match=r"none was started again in 0.2 s; 32 transitions were not written"):
        writer.extend(transitions(1000, 8))
