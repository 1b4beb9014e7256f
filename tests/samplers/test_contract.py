"""The contract of all samplers: rewritten rows, late updates, checkpoints, copies, prefetching, bad input."""

import copy
import pickle
import threading
import time
from functools import cache

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler

from tests.data import buffer_of, buffer_with, learn, rows
from tests.operations import CASES, Driven
from tests.samplers.experience import Refuses, assert_same_state
from torchrl_replay_ext import ProportionalSampler, RankBasedSampler, ReaPERSampler

prioritized = pytest.mark.parametrize("make", [ProportionalSampler, RankBasedSampler, ReaPERSampler])


@pytest.mark.parametrize("data", [torch.arange(14.0), {"a": torch.arange(14.0), "b": (torch.zeros(14, 2),)}])
def test_plain_tensors_and_pytrees(data):
    buffer = ReplayBuffer(storage=LazyTensorStorage(20), sampler=ProportionalSampler(20), batch_size=4)
    buffer.extend(data)
    _, info = buffer.sample(return_info=True)
    buffer.update_priority(info["index"], torch.ones(4))
    with pytest.raises(TypeError, match="TensorDicts"):
        ReplayBuffer(storage=LazyTensorStorage(20), sampler=ReaPERSampler(20), batch_size=4).extend(data)


def test_one_sampler_for_one_buffer():
    buffer = buffer_of(ReaPERSampler)
    buffer.extend(rows(5))
    other = TensorDictReplayBuffer(storage=LazyTensorStorage(10), sampler=buffer.sampler, batch_size=4)
    with pytest.raises(RuntimeError, match="another storage"):
        other.extend(rows(3))


@pytest.mark.parametrize("compilable", [False, True])
def test_batches_from_before_empty_change_nothing(compilable):
    sampler = ProportionalSampler(10, td_error="absolute")
    buffer = buffer_with(sampler, 10, compilable=compilable, batch_size=4, prefetch=2)
    buffer.extend(rows(10))
    batch = buffer.sample()
    buffer.empty()
    if compilable:
        # TorchRL's buffer takes an update of rows that were all written since for the caller's own
        buffer.extend(rows(10))
    batch["td_error"] = torch.full((4,), 100.0)
    buffer.update_tensordict_priority(batch)
    if not compilable:
        buffer.extend(rows(10))
    assert sampler.probabilities(buffer.storage).tolist() == pytest.approx([0.1] * 10)
    assert sampler.stats()["dropped_updates"] == 4


@pytest.mark.parametrize("ndim", [1, 2])
@prioritized
def test_without_a_capacity_it_is_that_of_the_storage(make, ndim):
    sampler = make()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(12, ndim=ndim), sampler=sampler, batch_size=4)
    for _ in range(3):
        data = rows(6)
        buffer.extend(data if ndim == 1 else torch.stack([data, data]))
    learn(buffer)
    assert len(sampler.probabilities(buffer.storage)) == len(buffer) == 12
    restored = make()
    restored.load_state_dict(sampler.state_dict())
    assert torch.equal(restored.probabilities(buffer.storage), sampler.probabilities(buffer.storage))


# --- what holds for every sampler, after random operations

every_sampler = pytest.mark.parametrize("name", [name for name in CASES if "frames" not in name])


@cache
def first_driven(name, seed, operations):
    torch.manual_seed(seed)
    result = Driven(name, seed)
    for _ in range(operations):
        result.operate()
    result.update_all()
    result.extend()
    return result


def driven(name, seed=1, operations=60):
    """A buffer after some random operations, not empty."""
    torch.manual_seed(seed)
    return copy.deepcopy(first_driven(name, seed, operations))


def rewrite(buffer, how):
    """Write stored rows again, by each of the calls for it."""
    storage = buffer.storage
    for slot in (0, len(storage) // 2, len(storage) - 1):
        row = storage.get(slot) if storage.ndim == 1 else storage[slot]
        if how == "storage.set":
            storage.set(slot, row.clone())
        elif how == "storage[i]":
            storage[slot] = row.clone()
        elif how == "rb[i]":
            buffer[slot] = row.clone()
        elif how == "rb.mark_update":
            buffer.mark_update(slot if storage.ndim == 1 else torch.tensor([[slot, 0]]))
    if how == "load the storage":
        storage.load_state_dict(copy.deepcopy(storage.state_dict()))


@every_sampler
@pytest.mark.parametrize("how", ["storage.set", "storage[i]", "rb[i]", "rb.mark_update", "load the storage"])
def test_rewriting_stored_rows_loses_nothing(name, how):
    """Nothing is lost at once, nor at later writes; unless rows are marked, no probability changes either."""
    used = driven(name)
    if used.pinned and how == "rb.mark_update":
        pytest.skip("slots of pinned tables may be empty")
    for _ in range(2):
        before = used.sampler.probabilities(used.buffer.storage).clone()
        rewrite(used.buffer, how)
        after = used.sampler.probabilities(used.buffer.storage)
        if how == "rb.mark_update":
            assert torch.equal(after > 0, before > 0)
        else:
            torch.testing.assert_close(after, before)
        if used.reference is None or how != "rb.mark_update":
            used.check()
        used.extend()
    assert used.sampler.stats()["num_items"] == len(used.buffer) or used.pinned


def draws(buffer, size):
    """The draws for a seed."""
    torch.manual_seed(3)
    buffer.set_rng(torch.Generator().manual_seed(3))
    return torch.cat([buffer.sample(size).exclude("write_stamp") for _ in range(3)])


def restored_by(how, used, path):
    """A saved and restored buffer, or a copy of it."""
    if how == "deepcopy":
        return copy.deepcopy(used.buffer)
    if how == "pickle":
        return pickle.loads(pickle.dumps(used.buffer))
    other = used.make()
    if how == "dumps":
        used.buffer.dumps(path)
        other.loads(path)
    else:
        other.load_state_dict(copy.deepcopy(used.buffer.state_dict()))
    return other


@every_sampler
@pytest.mark.parametrize("how", ["state_dict", "dumps", "pickle", "deepcopy"])
def test_a_copy_draws_the_same_and_goes_on_alike(name, how, tmp_path):
    used = driven(name)
    if how in ("state_dict", "dumps"):
        # loaded episodes do not go on
        used.buffer.load_state_dict(copy.deepcopy(used.buffer.state_dict()))
        used.environments.restart()
    other = restored_by(how, used, tmp_path)
    _, data = used.chunk(3)
    state = copy.deepcopy(used.buffer.sampler.state_dict())
    other.extend(data.clone())
    assert_same_state(used.buffer.sampler.state_dict(), state)  # nothing is shared
    used.buffer.extend(data)
    first, second = (draws(buffer, used.batch_size()) for buffer in (used.buffer, other))
    assert set(first.keys(True, True)) == set(second.keys(True, True))
    assert (first == second).all()


@every_sampler
def test_a_state_with_rows_that_the_storage_does_not_hold_is_refused(name):
    used = driven(name)
    state = copy.deepcopy(used.buffer.state_dict())
    used.empty()
    used.extend(2)
    with Refuses(used.buffer, ValueError, "but the storage holds . rows. Load the states of one buffer"):
        used.buffer.sampler.load_state_dict(state["_sampler"])
    # a sampler that was not used with its storage yet does not know it; the first use is refused
    other = used.make()
    other.sampler.load_state_dict(state["_sampler"])
    with pytest.raises(ValueError, match=r"Load the states of one buffer"):
        other.extend(used.chunk(2)[1])


@every_sampler
def test_an_emptied_buffer_is_a_new_one(name):
    used = driven(name)
    used.empty()
    assert used.sampler.stats()["num_items"] == 0
    assert all(value.isfinite() for value in used.sampler.stats().values())
    for buffer in (used.make(), used.buffer):
        with pytest.raises(RuntimeError, match=r"^Cannot sample from an empty storage\."):
            buffer.sample(used.batch_size())
    first = used.written
    used.extend(4)
    used.check()
    if used.can_draw():
        assert int(used.buffer.sample(used.batch_size())["number"].min()) >= first


@every_sampler
def test_a_generator_decides_all_draws(name):
    used = driven(name)
    # piecewise ranks depend on the batch size of the last draw
    used.buffer.sample(used.batch_size())
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        used.buffer.set_rng(torch.Generator().manual_seed(5))
        results.append(used.buffer.sample(used.batch_size()))
    assert torch.equal(results[0]["index"], results[1]["index"])


@every_sampler
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_storage_that_was_filled_before(name, is_loaded, tmp_path):
    """A new sampler is attached to stored transitions; the next write shows the order of loaded ones."""
    used = driven(name)
    if used.sampler_has_tables:
        # tables cannot be rebuilt from the storage
        pytest.skip("event tables are filled by their writer")
    if is_loaded:
        used.buffer.set_sampler(RandomSampler())
        used.buffer.dumps(tmp_path)
        used.buffer = used.make()
        used.buffer.set_sampler(RandomSampler())
        used.buffer.loads(tmp_path)
    used.buffer.set_sampler(used.make().sampler)
    assert used.buffer.sampler.stats()["num_items"] == 0
    used.buffer.sample(used.batch_size())
    assert used.sampler.stats()["num_items"] == len(used.buffer)
    used.start_again()
    used.extend(2)
    used.check()


@every_sampler
def test_batches_drawn_ahead_hold_what_was_stored(name):
    used = Driven(name, 1, compilable=True, capacity=48, slice_len=2, buffer={"prefetch": 2, "batch_size": 6})
    for _ in range(24):
        used.extend()
        if used.can_draw():
            assert bool((learn(used.buffer)["number"] < used.written).all())


@every_sampler
def test_inspection_waits_for_a_draw_of_another_thread(name):
    """With ``prefetch``, draws run in other threads; some queries modify state, for example they sort ranks."""
    used = driven(name)
    buffer, sampler = used.buffer, used.sampler
    storage, is_drawing, may_go_on = buffer.storage, threading.Event(), threading.Event()
    # a CompilableReplayBuffer reads rows by take()
    name = "take" if hasattr(storage, "take") else "get"
    read = getattr(storage, name)

    def slow_read(index):
        is_drawing.set()
        assert may_go_on.wait(60)
        return read(index)

    setattr(storage, name, slow_read)
    draw = threading.Thread(target=lambda: buffer.sample(used.batch_size()))
    draw.start()
    assert is_drawing.wait(60)
    uses = [sampler.stats, sampler.state_dict, lambda: sampler.probabilities(storage)]
    if used.sampler_has_tables:
        uses.append(lambda: setattr(sampler, "eta", sampler.eta))
    waiting = [threading.Thread(target=use) for use in uses]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    still_waiting = [thread.is_alive() for thread in waiting]
    may_go_on.set()
    for thread in (draw, *waiting):
        thread.join(60)
        assert not thread.is_alive()
    assert all(still_waiting)


@prioritized
@pytest.mark.parametrize("td_error", ["squared", "absolute"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_td_errors_name_the_first_offender(make, bad, td_error):
    buffer = buffer_of(make, 50, td_error=td_error)
    buffer.extend(rows(50))
    with Refuses(buffer, ValueError, r"index 37 \(position 1 of the update\)"):
        buffer.update_priority(torch.tensor([41, 37, 45]), torch.tensor([1.0, bad, bad]))


def test_priorities_of_an_empty_buffer_are_refused():
    with pytest.raises(IndexError, match=r"ProportionalSampler.update_priority: the storage is empty"):
        buffer_of(ProportionalSampler).update_priority(torch.arange(2), torch.ones(2))


def test_a_capacity_smaller_than_the_storage_is_refused():
    with pytest.raises(ValueError, match="capacity"):
        buffer_with(ProportionalSampler(4), 8).extend(rows(2))


def test_a_subclass_cannot_refuse_td_errors_that_its_base_takes():
    with pytest.raises(TypeError, match="a subclass of a sampler with TD errors expects them too"):

        class Own(ProportionalSampler):
            takes_priorities = False


def test_without_priorities_the_error_is_about_priorities():
    buffer = buffer_of(ProportionalSampler, batch_size=4, eps=0.0)
    buffer.extend(rows(4))
    buffer.update_priority(torch.arange(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match=r"^all priorities are 0, so no transition can be drawn; use eps > 0"):
        buffer.sample()
