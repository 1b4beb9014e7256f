"""Which rows of a write are the last ones of their slots."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_replay_ext.core.layout import is_last_occurrence


@settings(deadline=None, derandomize=True, max_examples=60)
@given(index=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_last_occurrence_against_a_loop(index):
    where = {value: position for position, value in enumerate(index)}
    expected = [where[value] == position for position, value in enumerate(index)]
    assert is_last_occurrence(torch.tensor(index)).tolist() == expected
