"""The rest of a sharded buffer: checkpoints, several updates, and bad input."""

import copy
from functools import partial

import pytest
import torch

from tests.chi_square import p_value
from tests.sharding.shards import (
    BATCH,
    PARTS,
    draw,
    event_tables,
    fill,
    filled,
    learn,
    probability_of_rows,
    require_own_priorities,
    rows_in,
    set_priorities,
    sharded,
    slices,
    takes_priorities,
    td_errors,
    transitions,
    update,
)
from torchrl_replay_ext import (
    Anneal,
    CompilableReplayBuffer,
    CompilableTensorStorage,
    ProportionalSampler,
    RankBasedSampler,
    RecencySampler,
)

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.mark.parametrize("name", [name for name in PARTS if "pinned" not in name])
def test_state_dict_and_checkpoint(name, tmp_path):
    """Both restore all rows, and end the open episodes; updates of rows that were replaced are dropped."""
    many = filled(name, 2)
    learn(many, 5)
    late = many.sample()
    held = rows_in(many)
    many.dumps(tmp_path)
    state = many.state_dict()

    def late_update():
        if takes_priorities(many):
            update(many, late, torch.full((BATCH,), 1e4))
            assert many.stats()["max_priority"] < 10

    for load in (lambda rb: rb.load_state_dict(state), lambda rb: rb.loads(tmp_path)):
        for restored in (sharded(name, 2), many):
            load(restored)
            assert rows_in(restored) == held and len(restored) == 160
            assert restored.sample().shape == (BATCH,)
        late_update()
    many.empty()
    assert len(many) == 0
    with pytest.raises(RuntimeError, match="no transition can be drawn: the buffer is empty"):
        many.sample()
    fill(many)
    late_update()


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_shards": 0}, r"num_shards=0\): num_shards must be an integer >= 1"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1"),
        ({"sampler": RankBasedSampler}, r"RankBasedSampler\(.*\) needs all transitions in one place"),
        ({"sampler": partial(RecencySampler, half_life=100)}, "needs all transitions in one place"),
        (
            {"sampler": partial(ProportionalSampler, max_priority_within_buffer=True)},
            "without max_priority_within_buffer=True",
        ),
        (event_tables(correction="conditional"), "needs all transitions in one place"),
        ({"sampler": partial(slices, slice_len=5)}, "must be a multiple of slice_len=5"),
        ({"storage": partial(CompilableTensorStorage, 64, ndim=2)}, "with ndim=1 on the CPU"),
        ({"storage": partial(CompilableTensorStorage, 64, device="meta")}, "with ndim=1 on the CPU"),
    ],
)
def test_bad_arguments(arguments, message, local_ray):
    with pytest.raises(ValueError, match=message):
        sharded("", **{"num_shards": 2, **copy.deepcopy(arguments)})
    assert not local_ray.actors


def slices_by_rank():
    return slices(anchors=RankBasedSampler())


@pytest.mark.parametrize("sampler", [RankBasedSampler, partial(RecencySampler, half_life=20), slices_by_rank])
def test_one_shard_draws_as_the_buffer_itself_if_that_needs_all_rows(sampler):
    one = CompilableReplayBuffer(storage=CompilableTensorStorage(256), sampler=sampler(), batch_size=BATCH)
    fill(one)
    many = filled("", 1, sampler=sampler)
    learn(many, 3)
    set_priorities(one, many)
    unit = 4 if sampler is slices_by_rank else 1
    assert p_value(draw(many, unit=unit)[0], probability_of_rows(one)) > 1e-4
    assert 0 < many.sample()["priority_weight"].min() <= 1


DIFFERS = r"entries differ in name, shape or dtype from those of the first batch: .*'value'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.exclude("collector"), "episodes stay in one shard; collectors write it"),
        (lambda data: data.exclude(("next", "done")), "episodes stay in one shard; collectors write it"),
        (lambda data: data.set("half", torch.zeros(32, dtype=torch.bfloat16)), "BFloat16"),
        (lambda data: data.set_non_tensor("name", "a"), "'name' must be a tensor"),
        (lambda data: data.reshape(4, 8), "the batch has the shape"),
        (lambda data: data.exclude("value"), DIFFERS),
        (lambda data: data.set("value", data["value"].double()), DIFFERS),
        (lambda data: data.set("value", torch.zeros(32, 2)), DIFFERS),
    ],
)
def test_batches_that_shards_cannot_store(change, message):
    many = filled("proportional", 2)
    before = rows_in(many)
    with pytest.raises((KeyError, TypeError, ValueError), match=message):
        many.extend(change(transitions(1000, 8)))
    assert rows_in(many) == before
    many.extend(transitions(1000, 8))


@pytest.mark.parametrize("errors", [(), (1,), (2,)])
def test_padding_has_no_effect_on_updates(errors):
    """0 in padded rows has no effect, because the largest of several TD errors of a row counts."""
    many = filled("slices, priorities", 2)
    batch = many.sample()
    padded = ~batch["collector", "mask"]
    assert padded.any()
    batch["td_error"] = td_errors(batch["number"]).reshape(-1, *[1] * len(errors)).expand(-1, *errors).clone()
    batch["td_error"][padded] = 0.0
    many.update_tensordict_priority(batch if errors else batch.reshape(-1, 4))
    assert require_own_priorities(many) > 0


def test_bad_updates_change_nothing():
    sampler = partial(ProportionalSampler, alpha=1.0, beta=Anneal(0.0, 1.0, num_updates=10))
    many = filled("", 1, sampler=sampler)
    batch = many.sample()
    before = many.state_dict()
    with pytest.raises(KeyError, match='"td_error" not found'):
        many.update_tensordict_priority(batch)
    for value in ("nan", "-1", "1e25"):
        batch["td_error"] = torch.cat([torch.ones(BATCH - 1), torch.full((1,), float(value))])
        with pytest.raises(
            ValueError, match=rf"TD error ({value}|-1.0|1e\+25|9.99).* TD errors must be >= 0 and finite"
        ):
            many.update_tensordict_priority(batch)
    after = many.state_dict()
    for entry in ("priority", "beta"):
        assert torch.equal(before["shards"][0]["_sampler"][entry], after["shards"][0]["_sampler"][entry])


def test_a_checkpoint_of_another_number_of_shards(tmp_path):
    many, other = filled("proportional", 2), filled("proportional", 3)
    many.dumps(tmp_path)
    for load in (lambda: other.load_state_dict(many.state_dict()), lambda: other.loads(tmp_path)):
        with pytest.raises(ValueError, match="the checkpoint needs a buffer with num_shards=2"):
            load()
    assert len(other) == 160
    other.sample()
    with pytest.raises(FileNotFoundError, match="nothing"):
        other.loads(tmp_path / "nothing")
