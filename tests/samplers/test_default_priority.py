"""The priority of new transitions; random operations compare it with the largest |δ| of a plain dict."""

import pytest
import torch

from tests.operations import Driven


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", ["proportional", "reaper", "tables, proportional", "tables, reaper"])
def test_the_largest_priority_falls_when_it_is_overwritten_only_with_max_priority_within_buffer(name, within, copied):
    choices = {"max_priority_within_buffer": within, "td_error": "absolute"}
    used = Driven(name, 1, layout="uneven", capacity=12, choices=choices)
    used.extend(12)
    used.buffer.update_priority(torch.tensor([4, 9]), torch.tensor([1e3, 2.0]))
    used.reference.update([4, 9], [1e3, 2.0])
    if copied:
        used.go_on_with_a_copy()
    used.extend(4)
    used.extend(4)
    used.check()
    assert (used.sampler.stats()["max_priority"] < 3) == within
    used.empty()
    used.extend(4)
    used.check()
    assert used.sampler.stats()["max_priority"] == 1
