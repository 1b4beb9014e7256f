"""Kernels of frame stacks."""

import copy

import pytest
import torch

from tests.kernels.implementations import INTERPRETED, assert_equal, plainly, tensors_of
from tests.stacks import StackedStreams
from torchrl_replay_ext.core.frame_pool import FramePool


def comparable(pool):
    """The state without the names of frames: which of the frames that a write frees is taken next may differ."""
    state = tensors_of(pool)
    words, ids, free = state.pop("_words"), state.pop("_ids"), state.pop("_free")
    references = state.pop("_references").sort().values
    stored = words.view(pool.capacity + 1, -1)[ids.long()] * (ids > 0).unsqueeze(-1)
    return {**state, "references": references, "stored": stored, "num_free": free[-1]}


@pytest.mark.parametrize("shape", [(3, 2), (4, 2)])
@pytest.mark.parametrize("depth", [1, 3])
def test_all_implementations_store_the_same_frames(run, depth, shape, monkeypatch):
    """Against a dict of what was written. Every third write is one of a graph, which stores what it cannot refuse."""
    pool = FramePool(20, 20, num_stacked=depth, shape=shape, num_streams=4)
    other, streams = copy.deepcopy(pool), StackedStreams(5, depth=depth, lost=0.1, still=0.3, shape=shape)
    written, outcomes = {}, set()
    for number in range(10 if INTERPRETED else 40):
        monkeypatch.setattr("torchrl_replay_ext.core.frame_pool.is_traced", lambda number=number: number % 3 == 2)
        data, lost = streams.chunk("any", 1 + number % 9), int(pool.counts[0])
        before, after = data["observation"], data["next", "observation"]
        if number % 10 > 7:
            after[-1] = 255 - after[-1]
        slots, apart = torch.randperm(20)[: len(data)], len(data) - 1 if depth > 1 and number % 10 > 7 else -1
        for each, call in ((pool, plainly), (other, run)):
            outcome = None
            try:
                call(each.write, slots, before, after, data["collector", "traj_ids"])
            except (RuntimeError, ValueError) as error:
                outcome = str(error)
                assert f"row {apart} of" in outcome if apart >= 0 else "need all" in outcome
            outcomes.add(outcome)
        assert_equal(comparable(pool), comparable(other))
        for row, slot in enumerate(slots.tolist() if outcome is None else ()):
            written[slot] = torch.cat([before[row], after[row, -1:]]) if int(pool.counts[0]) == lost else None
        for slot, frames in written.items():
            assert frames is None or torch.equal(run(other.read, torch.tensor(slot)), frames)
    assert None in outcomes and len(outcomes) > 1
    assert pool.counts[0] > 0 and (pool.counts[1] > 0) == (depth > 1)


def test_frames_stay_in_range_whatever_the_state_holds(run, monkeypatch):
    streams = StackedStreams(5, depth=3)
    for seed in range(2 if INTERPRETED else 20):
        torch.manual_seed(seed)
        pool = FramePool(20, 40, num_stacked=3, shape=(3, 2), num_streams=4)
        for tensor in [*tensors_of(pool).values()][1:]:
            tensor.copy_(torch.randint(-(2**30), 2**30, tensor.shape))
        monkeypatch.setattr("torchrl_replay_ext.core.frame_pool.is_traced", lambda seed=seed: seed % 2 == 1)
        data, slots = streams.chunk("any", 15), torch.randint(-5, 25, (15,))
        rows = slots, data["observation"], data["next", "observation"], data["collector", "traj_ids"]
        try:
            run(pool.write, *rows)
        except RuntimeError as error:
            assert "need all" in str(error)
            continue
        ids = pool._ids[slots.clamp(0, 19)]
        assert int(ids.min()) >= 0 and int(ids.max()) <= 40
