"""Random writes, draws and updates, late ones too, of each prioritized sampler against the reference of its paper."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.samplers.experience import LAYOUTS, ReplayWithReference


@pytest.mark.parametrize("kind", ["per", "rank", "reaper"])
@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    layout=st.sampled_from(LAYOUTS),
    capacity=st.integers(1, 24),
    num_envs=st.integers(1, 5),
    td_error=st.sampled_from(["squared", "absolute"]),
    alpha=st.sampled_from([0.0, 0.4, 1.0]),
    omega=st.sampled_from([0.0, 0.2, 1.0]),
    truncated=st.sampled_from(["finished", "ongoing"]),
    end_probability=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
    operations=st.integers(0, 40),
)
def test_any_sequence(kind, layout, capacity, num_envs, omega, truncated, operations, **arguments):
    if kind == "reaper":
        arguments |= {"omega": omega, "truncated": truncated}
    replay = ReplayWithReference(kind, layout=layout, capacity=max(capacity, num_envs), num_envs=num_envs, **arguments)
    for number in range(operations):
        replay.random_operation()
        if number % 8 == 0:
            replay.check()
    replay.extend(1)
    replay.check()
