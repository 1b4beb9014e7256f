"""Writes by the writer of compilable buffers."""

from contextlib import nullcontext

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from torchrl_replay_ext import (
    CompilableTensorStorage,
)
from torchrl_replay_ext.writers.round_robin import CompilableWriter

CAPACITY = 10


def rows(first: int, count: int, trajectory: int = 0) -> TensorDict:
    step = torch.arange(first, first + count, device="cpu")
    ends = torch.zeros(count, 1, dtype=torch.bool, device="cpu")
    data = {"step": step, "logits": torch.zeros(count, 2, device="cpu"), "next": {"done": ends}}
    return TensorDict(data | {"collector": {"traj_ids": torch.full_like(step, trajectory)}}, [count])


@pytest.mark.parametrize(
    "make", [lambda: CompilableTensorStorage(CAPACITY), lambda: LazyTensorStorage(CAPACITY, compilable=True)]
)
def test_later_writes_do_not_change_a_returned_index(make):
    rb = TensorDictReplayBuffer(storage=make(), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(0, 8))
    index = rb.extend(rows(8, 4))
    rb.extend(rows(12, 3))
    assert index.tolist() == [8, 9, 0, 1]


def test_a_list_takes_more_rows_than_it_has_room_for():
    rb = TensorDictReplayBuffer(storage=ListStorage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(0, 23))
    assert sorted(int(row["step"]) for row in rb.storage.get(range(CAPACITY))) == list(range(13, 23))


@pytest.mark.parametrize(
    ("stored", "cursor", "error"),
    [(4, 4, None), (4, 5, "end before step 4"), (4, -1, "expected an integer >= 0"), (CAPACITY, 5, None)],
)
def test_a_cursor_that_leaves_a_gap_is_refused(stored, cursor, error):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(0, stored))
    before = rb.writer.state_dict()
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        rb.writer.load_state_dict({**before, "_cursor": cursor})
    assert rb.writer.state_dict()["_cursor"] == (before["_cursor"] if error else cursor)
