"""The guide's sampler of one's own in graphs, and its errors. The random operations use it too."""

import pytest
import torch

from tests.data import as_graphs, buffer_with, rows
from tests.operations import Driven
from tests.settings import reward_sampler


@pytest.mark.usefixtures("from_scratch")
def test_in_graphs():
    """Draws and updates, with late rows, duplicates and an invalid row."""
    used = Driven("of one's own", 1, compilable=True, layout="uneven", num_envs=2, capacity=12)
    used.extend(8)
    update = torch.compile(as_graphs(used.buffer).update_priority, fullgraph=True)
    used.buffer.update_priority = update
    for _ in range(8):
        used.sample(6)
        used.extend(3)
        if len(used.late) > 2:
            used.hand_back(used.late.pop(0))
        used.check()
    assert used.dropped_updates() > 0
    slots = [0, 1, 1, 2, 1, 0]
    used.left_out(torch.tensor(slots), slots, torch.tensor([1.0, 2.0, 4.0, torch.nan, 3.0, 0.5]))
    used.check()


def test_a_missing_entry_is_named():
    with pytest.raises(KeyError, match=r"RewardSampler: the stored data has no entry \('next', 'reward'\)"):
        buffer_with(reward_sampler()(), 8).extend(rows(2))


def test_arguments_that_do_not_exist_are_refused():
    with pytest.raises(TypeError, match=r"RewardSampler\(epsilon=...\): there is no such argument"):
        reward_sampler()(epsilon=0.1)


def test_private_names_of_the_base_class_are_refused():
    """Two attributes of one name in one object would be one."""

    class Counts(reward_sampler()):
        def __init__(self):
            self._storage_writes = 3
            super().__init__()

    class Allocates(Counts):
        def __init__(self):
            self._saved_names = []
            reward_sampler().__init__(self)

    class Generates(Counts):
        def __init__(self):
            self._rng = None
            reward_sampler().__init__(self)

    class Plants(reward_sampler()):
        def allocate(self, layout):
            super().allocate(layout)
            self._trees = torch.zeros(layout.size)

    makers = (Counts, "_storage_writes"), (Allocates, "_saved_names"), (Generates, "_rng"), (Plants, "_trees")
    for make, name in makers:
        with pytest.raises(TypeError, match=rf"{make.__name__}.{name}: the base class uses this name"):
            make()
    with pytest.raises(TypeError, match=r"Appends._append_rows: the base class uses this name"):

        class Appends(reward_sampler()):
            def _append_rows(self):
                pass
