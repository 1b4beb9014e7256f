"""Writes by the writer of compilable buffers."""

from contextlib import nullcontext

import pytest
from torchrl.data import LazyTensorStorage, ListStorage, TensorDictReplayBuffer

from tests.data import rows
from torchrl_replay_ext import CompilableTensorStorage
from torchrl_replay_ext.writers.round_robin import CompilableWriter

CAPACITY = 10


@pytest.mark.parametrize(
    "make", [lambda: CompilableTensorStorage(CAPACITY), lambda: LazyTensorStorage(CAPACITY, compilable=True)]
)
def test_later_writes_do_not_change_a_returned_index(make):
    rb = TensorDictReplayBuffer(storage=make(), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(8))
    index = rb.extend(rows(4, first=8))
    rb.extend(rows(3, first=12))
    assert index.tolist() == [8, 9, 0, 1]


def test_a_list_takes_more_rows_than_it_has_room_for():
    rb = TensorDictReplayBuffer(storage=ListStorage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(23))
    assert sorted(int(row["number"]) for row in rb.storage.get(range(CAPACITY))) == list(range(13, 23))


@pytest.mark.parametrize(
    ("stored", "cursor", "error"),
    [(4, 4, None), (4, 5, "end before step 4"), (4, -1, "expected an integer >= 0"), (CAPACITY, 5, None)],
)
def test_a_cursor_that_leaves_a_gap_is_refused(stored, cursor, error):
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), writer=CompilableWriter(), batch_size=4)
    rb.extend(rows(stored))
    before = rb.writer.state_dict()
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        rb.writer.load_state_dict({**before, "_cursor": cursor})
    assert rb.writer.state_dict()["_cursor"] == (before["_cursor"] if error else cursor)
