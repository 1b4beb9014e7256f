"""ReaPERSampler against hand tables and the naive reference of its paper: episodes, draws, state and bad input."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler

from tests import data
from tests.chi_square import p_value
from tests.data import learnable
from tests.reference import NaiveReaPER
from tests.samplers.experience import (
    INTERRUPTED,
    LAYOUTS,
    Refuses,
    ReplayWithReference,
    Step,
    assert_finite_stats,
    assert_same_state,
    probabilities,
    transitions,
)
from torchrl_replay_ext import (
    Anneal,
    ProportionalSampler,
    ReaPERSampler,
)

STREAMS = [("interleaved", 2), ("interleaved", 3), ("env_major", 3), ("uneven", 3), ("uneven", 5), ("two_dim", 3)]


buffer_of = partial(data.buffer_of, ReaPERSampler)


def plain(**options):
    """Arguments for which probabilities directly give R and d: d = TD error, Psi = R d."""
    return {"alpha": 1.0, "omega": 1.0, "eps": 0.0, "td_error": "absolute", **options}


def episode(number, length, *, end="terminated", traj_id=None):
    """``length`` steps of one episode; ``end`` is the flag of the last step, or None."""
    steps = [Step(number, number if traj_id is None else traj_id) for _ in range(length)]
    if end:
        setattr(steps[-1], end, True)
    return steps


def assert_psi(buffer, expected, rtol=1e-5):
    """Check that the probabilities are proportional to ``expected``."""
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), expected / expected.sum(), rtol=rtol, atol=0.0)


# --- hand tables


def test_finished_and_ongoing_episodes_by_hand():
    # finished: d = 1, 2, 3 -> R = 1/6, 3/6, 6/6.  ongoing: d = 2, 2 with F = 6 -> R = 2/6, 4/6.
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 3) + episode(1, 2, end=None)))
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0]))
    assert_psi(buffer, [1 / 6, 1.0, 3.0, 4 / 6, 8 / 6])


def test_exponents_and_squared_td_errors_by_hand():
    buffer = buffer_of(4, alpha=0.5, omega=0.5, eps=1.0, td_error="squared")
    buffer.extend(transitions(episode(0, 2)))
    buffer.update_priority(torch.arange(2), torch.tensor([4.0, 25.0]))  # d = 3, 6; R = 1/3, 1
    assert_psi(buffer, [(1 / 3) ** 0.5 * 3**0.5, 6**0.5])


def test_the_largest_episode_may_be_an_ongoing_one():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 2) + episode(1, 2, end=None)))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 1.0, 3.0, 5.0]))
    assert_psi(buffer, [0.5, 1.0, 3 / 8 * 3, 5.0])


def test_an_update_changes_the_reliability_of_the_whole_episode():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 3)))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 1.0, 2.0]))
    assert_psi(buffer, [1 / 4, 2 / 4, 2.0])
    buffer.update_priority(torch.tensor([2]), torch.tensor([6.0]))
    assert_psi(buffer, [1 / 8, 2 / 8, 6.0])


def test_a_new_maximum_changes_the_reliability_of_other_ongoing_episodes():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 1) + episode(1, 1, end=None)))
    buffer.update_priority(torch.arange(2), torch.tensor([4.0, 2.0]))
    assert_psi(buffer, [4.0, 1.0])
    buffer.update_priority(torch.tensor([0]), torch.tensor([8.0]))
    assert_psi(buffer, [8.0, 0.5])


def test_an_overwritten_head_leaves_the_sums():
    buffer = buffer_of(4, **plain())
    buffer.extend(transitions(episode(0, 3)))
    buffer.update_priority(torch.arange(3), torch.tensor([5.0, 1.0, 3.0]))
    assert_psi(buffer, [5 * 5 / 9, 6 / 9, 3.0])
    buffer.extend(transitions(episode(1, 2)))  # slots 3 and 0; new items have d = 5, and their episode has ended
    buffer.update_priority(torch.tensor([3, 0]), torch.tensor([1.0, 1.0]))
    assert_psi(buffer, [1.0, 1 / 4, 3.0, 0.5])


# --- new transitions (refinement I)


def test_new_transitions_have_the_maximum_priority_and_full_reliability():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 2)))
    buffer.update_priority(torch.arange(2), torch.tensor([3.0, 1.0]))
    buffer.extend(transitions(episode(1, 2, end=None)))
    assert_psi(buffer, [3 * 3 / 4, 1.0, 3.0, 3.0])


def test_the_first_update_of_an_episode_ends_the_waiting_of_all_its_transitions():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 3, end=None)))
    assert_psi(buffer, [1.0, 1.0, 1.0])
    buffer.update_priority(torch.tensor([1]), torch.tensor([2.0]))  # d = 1, 2, 1; F = 4
    assert_psi(buffer, [1 / 4, 2 * 3 / 4, 1.0])


def test_a_transition_appended_after_the_update_waits_for_the_next_one():
    buffer = buffer_of(8, **plain())
    running = episode(0, 6, end=None)
    buffer.extend(transitions(running[:2]))
    buffer.update_priority(torch.tensor([0]), torch.tensor([2.0]))  # d = 2, 1
    buffer.extend(transitions(running[2:4]))  # d = 2, 2 and waiting; their d is in F = 7
    assert_psi(buffer, [2 * 2 / 7, 3 / 7, 2.0, 2.0])
    buffer.update_priority(torch.tensor([1]), torch.tensor([1.0]))
    assert_psi(buffer, [2 * 2 / 7, 3 / 7, 2 * 5 / 7, 2.0])


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("truncated", ["finished", "ongoing"])
def test_the_end_of_an_episode_ends_the_waiting(end, truncated):
    buffer = buffer_of(8, **plain(truncated=truncated))
    running = episode(0, 2, end=end)
    buffer.extend(transitions(running[:1]))
    buffer.extend(transitions(running[1:]))
    assert_psi(buffer, [1 / 2, 1.0])


def test_another_episodes_update_does_not_end_the_waiting():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 2) + episode(1, 2, end=None)))
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert_psi(buffer, [0.5, 1.0, 1.0, 1.0])


def test_single_transitions_added_stay_new():
    buffer = buffer_of(8, **plain())
    for step in episode(0, 3, end=None):
        buffer.add(transitions([step])[0])
        assert_psi(buffer, [1.0] * len(buffer))
    buffer.update_priority(torch.tensor([2]), torch.tensor([2.0]))
    buffer.add(transitions(episode(0, 1, end=None))[0])
    assert_psi(buffer, [1 / 6, 2 / 6, 2 * 4 / 6, 2.0])


# --- truncation


@pytest.mark.parametrize(("truncated", "expected"), [("finished", [0.5, 1.0]), ("ongoing", [1 / 8, 2 / 8])])
def test_truncated_episodes(truncated, expected):
    buffer = buffer_of(8, **plain(truncated=truncated))
    buffer.extend(transitions(episode(0, 2, end="truncated") + episode(1, 2)))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 1.0, 4.0, 4.0]))
    assert_psi(buffer, [*expected, 2.0, 4.0])


def test_the_step_after_a_truncation_begins_another_episode():
    buffer = buffer_of(8, **plain(truncated="ongoing"))
    buffer.extend(transitions(episode(0, 2, end="truncated") + episode(1, 1), with_ids=False))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 1.0, 4.0]))
    assert_psi(buffer, [1 / 4, 2 / 4, 4.0])


# --- trajectory ids


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
def test_an_abandoned_trajectory_stays_ongoing():
    buffer = buffer_of(12, **plain())
    buffer.extend(transitions(episode(3, 2, end=None)))
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 1.0]))
    buffer.extend(transitions(episode(0, 2)))  # a new collector
    buffer.update_priority(torch.tensor([2, 3]), torch.tensor([3.0, 5.0]))
    assert_psi(buffer, [1 / 8, 2 / 8, 3 * 3 / 8, 5.0])


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
def test_the_id_of_an_abandoned_trajectory_may_come_again():
    buffer = buffer_of(12, num_streams=2, **plain())
    buffer.extend(transitions([Step(9, 0, terminated=True), Step(0, 2), Step(1, 1), Step(0, 2), Step(1, 1)]))
    # 3 interrupts 2, and 2 interrupts 1
    restarted = [Step(2, 3), Step(3, 2, terminated=True), Step(2, 3, terminated=True), Step(4, 5), Step(4, 5)]
    buffer.extend(transitions(restarted))
    assert int(buffer.sampler.stats()["interrupted"]) == 2
    buffer.update_priority(torch.arange(10), torch.tensor([1.0, 1.0, 2.0, 1.0, 2.0, 4.0, 1.0, 4.0, 1.0, 1.0]))
    # ongoing: {1, 3} and {2, 4} abandoned, {8, 9} running; finished: {0}, {5, 7}, {6};  F = 8
    assert_psi(buffer, [1.0, 1 / 8, 4 / 8, 2 / 8, 2 * 4 / 8, 2.0, 1.0, 4.0, 1 / 8, 2 / 8])


def test_interleaved_episodes_by_hand():
    buffer = buffer_of(8, num_streams=2, **plain())
    a, b = episode(0, 3), episode(1, 2)
    buffer.extend(transitions([a[0], b[0], a[1], b[1], a[2]]))
    buffer.update_priority(torch.arange(5), torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0]))
    assert_psi(buffer, [1 / 4, 2 * 2 / 4, 2 / 4, 2.0, 2.0])


def test_a_stream_may_be_silent_for_longer_than_the_buffer_remembers():
    buffer = buffer_of(4, num_streams=2, **plain())
    buffer.extend(transitions([Step(0, 0), Step(1, 1)]))
    buffer.extend(transitions([Step(1, 1)] * 5))
    buffer.extend(transitions([Step(0, 0), Step(1, 1)]))
    buffer.update_priority(torch.arange(4), torch.ones(4))
    # nine steps in four slots: slots 1, 2, 3, 0 from old to new; stream 1 has slots 1, 2, 0, stream 0 slot 3; F = 3
    assert_psi(buffer, [1.0, 1 / 3, 2 / 3, 1 / 3])


def test_ids_in_one_chunk_need_not_be_in_order():
    # env 0 runs through trajectories 0 and 2 before env 1's trajectory 1 is written: no restart
    buffer = buffer_of(8, num_streams=2, **plain())
    buffer.extend(transitions([*episode(0, 2), *episode(2, 1, end=None), *episode(1, 3, end=None)]))
    buffer.extend(transitions([*episode(2, 1), *episode(1, 1)]))
    buffer.update_priority(torch.arange(8), torch.ones(8))
    assert_psi(buffer, [1 / 2, 1.0, 1 / 2, 1 / 4, 2 / 4, 3 / 4, 1.0, 1.0])


def test_ids_may_come_late():
    # two collecting processes share the numbering of trajectories, and their chunks arrive one after the other
    buffer = buffer_of(12, num_streams=2, **plain())
    buffer.extend(transitions([*episode(0, 2), *episode(2, 2, end=None)]))
    buffer.extend(transitions([*episode(1, 2), *episode(3, 1, end=None)]))
    buffer.extend(transitions([*episode(2, 1), *episode(4, 1, end=None)]))
    buffer.update_priority(torch.arange(9), torch.ones(9))
    assert_psi(buffer, [1 / 2, 1.0, 1 / 3, 2 / 3, 1 / 2, 1.0, 1 / 3, 1.0, 1 / 3])


def test_two_dimensional_storage_by_hand():
    buffer = buffer_of(8, ndim=2, **plain())
    data = torch.stack([transitions(episode(0, 3)), transitions(episode(1, 3, end=None))])
    buffer.extend(data)
    index = torch.tensor([[time, env] for time in range(3) for env in range(2)])
    buffer.update_priority(index, torch.tensor([1.0, 2.0, 1.0, 2.0, 2.0, 2.0]))
    assert_psi(buffer, [1 / 4, 2 * 2 / 6, 2 / 4, 2 * 4 / 6, 2.0, 2.0])


def test_a_two_dimensional_storage_may_round_its_size_up():
    buffer = buffer_of(10, ndim=2, **plain())
    buffer.extend(torch.stack([transitions(episode(env, 4)) for env in range(3)]))
    assert len(buffer) == 12
    assert_psi(buffer, [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 3)


# --- against the naive reference


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("truncated", ["finished", "ongoing"])
@pytest.mark.parametrize(("layout", "num_envs"), [("single", 1), ("single_with_ids", 1), *STREAMS])
def test_long_random_sequences(layout, num_envs, truncated, seed):
    replay = ReplayWithReference(
        "reaper",
        layout=layout,
        num_envs=num_envs,
        capacity=23 + seed,
        alpha=0.5,
        omega=0.7,
        truncated=truncated,
        td_error=["squared", "absolute"][seed],
        seed=seed,
        end_probability=[0.2, 0.05][seed],
    )
    for _ in range(150):
        replay.random_operation()
        replay.check()


@pytest.mark.parametrize(("layout", "num_envs"), [("single", 1), *STREAMS])
def test_large_buffers(layout, num_envs):
    replay = ReplayWithReference("reaper", layout=layout, num_envs=num_envs, capacity=600, end_probability=0.02, seed=9)
    for _ in range(12):
        replay.extend(120 // replay.num_envs)
        replay.update_directly(100)
        replay.update(replay.sample(64))
    replay.check()


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    layout=st.sampled_from(LAYOUTS),
    capacity=st.integers(1, 12),
    num_envs=st.integers(1, 4),
    truncated=st.sampled_from(["finished", "ongoing"]),
    alpha=st.sampled_from([0.0, 0.4, 1.0]),
    omega=st.sampled_from([0.0, 0.2, 1.0]),
    end_probability=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**16),
    operations=st.integers(0, 20),
)
def test_any_sequence(layout, capacity, num_envs, truncated, alpha, omega, end_probability, seed, operations):
    replay = ReplayWithReference(
        "reaper",
        layout=layout,
        capacity=max(capacity, num_envs),
        num_envs=num_envs,
        truncated=truncated,
        alpha=alpha,
        omega=omega,
        end_probability=end_probability,
        seed=seed,
    )
    for _ in range(operations):
        replay.random_operation()
    replay.extend(1)
    replay.check()


# --- reduction to PER


@pytest.mark.parametrize(("layout", "num_envs"), [("single", 1), ("uneven", 3), ("two_dim", 2)])
def test_omega_0_is_proportional_prioritization(layout, num_envs):
    reaper = ReplayWithReference("reaper", layout=layout, num_envs=num_envs, capacity=20, alpha=0.6, omega=0.0, seed=4)
    per = data.buffer_of(ProportionalSampler, reaper.capacity, ndim=2 if layout == "two_dim" else 1, alpha=0.6)
    written, updated = reaper.buffer.extend, reaper.buffer.update_priority

    def extend(data):
        per.extend(data.clone())
        return written(data)

    def update_priority(index, priority):
        per.update_priority(index, priority)
        return updated(index, priority)

    reaper.buffer.extend, reaper.buffer.update_priority = extend, update_priority
    for _ in range(30):
        reaper.extend(3)
        reaper.update_directly(5)
        assert torch.equal(reaper.probabilities(), per.sampler.probabilities(per.storage))


def test_alpha_0_and_omega_0_is_uniform():
    replay = ReplayWithReference("reaper", capacity=20, alpha=0.0, omega=0.0, seed=4)
    for _ in range(10):
        replay.random_operation()
    count = len(replay.buffer)
    torch.testing.assert_close(replay.probabilities(), torch.full((count,), 1 / count, dtype=torch.float64))


# --- draws


def filled_buffer(**options):
    """64 transitions of finished, ongoing, new and overwritten episodes, none with a very small probability."""
    options = {"alpha": 0.3, "omega": 0.6, **options}
    replay = ReplayWithReference("reaper", capacity=64, num_envs=2, end_probability=0.15, seed=10, **options)
    for _ in range(10):
        replay.extend(30 // replay.num_envs)
        replay.update_directly(60)
    return replay


@pytest.mark.parametrize("layout", ["single", "interleaved", "two_dim"])
@pytest.mark.parametrize("batch_size", [1_000, 32])
def test_draws_follow_the_probabilities_and_the_test_can_fail(layout, batch_size):
    replay = filled_buffer(layout=layout)
    index = [replay.slots(replay.buffer.sample(batch_size)["index"]) for _ in range(50_000 // batch_size)]
    index = torch.tensor(index).flatten()
    assert p_value(index, replay.probabilities()) > 1e-4
    replay.sampler.omega = 0.0
    assert p_value(index, replay.probabilities()) < 1e-4


@pytest.mark.parametrize("omega", [0.2, 0.6, 1.0])
def test_draws_when_most_transitions_are_unreliable(omega):
    # one long ongoing episode below the sum of a large finished one: acceptance is rare
    buffer = buffer_of(40, **plain(omega=omega, alpha=0.3))
    buffer.extend(transitions(episode(0, 20) + episode(1, 20, end=None)))
    buffer.update_priority(torch.arange(40), torch.cat([torch.full((20,), 5.0), torch.linspace(0.1, 1.0, 20)]))
    p = probabilities(buffer)
    index = torch.cat([buffer.sample(1_000)["index"] for _ in range(50)])
    likely = p * 50_000 >= 5
    counts = torch.bincount(index, minlength=40).double()
    grouped = torch.cat([counts[likely], counts[~likely].sum()[None]])
    expected = torch.cat([p[likely], p[~likely].sum()[None]]) * 50_000
    if expected[-1] < 5:
        grouped, expected = grouped[:-1], expected[:-1] / expected[:-1].sum() * grouped[:-1].sum()
    assert stats.chisquare(grouped.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize(("omega", "length", "zeros"), [(0.6, 20, 10), (30.0, 100, 0), (400.0, 200, 0)])
def test_draws_are_exact_however_many_proposals_are_rejected(omega, length, zeros, in_graph):
    """Against the naive reference. With omega 400, R^omega is below 10^-3 for all but a few transitions."""
    size = 2 * length + zeros
    options = plain(omega=0.0, alpha=0.0)
    buffer, reference = buffer_of(size, compilable=True, batch_size=500, **options), NaiveReaPER(**options)
    steps = episode(0, length) + episode(1, zeros) if zeros else episode(0, length)
    steps += episode(2, length)
    buffer.extend(transitions(steps))
    for slot, step in enumerate(steps):
        reference.write(slot, step.episode, step.terminated)
    error = torch.cat([torch.ones(length), torch.zeros(zeros), torch.linspace(0.5, 1.5, length)])
    buffer.update_priority(torch.arange(size), error)
    reference.update(range(size), error.tolist())

    def draw():
        return buffer.sample()["index"]

    draw = torch.compile(draw, fullgraph=True) if in_graph else draw
    draw()
    # also in a graph that was compiled before
    buffer.sampler.omega = reference.omega = omega
    p = torch.tensor(reference.probabilities(), dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), p, rtol=1e-5, atol=1e-12)
    index = torch.cat([draw() for _ in range(60)])
    # transitions with a small probability are one class
    rare = p * 30_000 < 5
    number = torch.where(rare, 0, 1 + (~rare).cumsum(0) - 1)
    expected = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add_(0, number, p)
    assert p_value(number[index], expected) > 1e-4


def test_items_without_priority_are_never_drawn():
    buffer = buffer_of(64, **plain(alpha=0.4, omega=0.2))
    buffer.extend(transitions(episode(0, 30) + episode(1, 34, end=None)))
    magnitude = torch.rand(64) + 0.5
    magnitude[::3] = 0.0
    buffer.update_priority(torch.arange(64), magnitude)
    assert (probabilities(buffer)[::3] == 0).all()
    index = torch.cat([buffer.sample(1_000)["index"] for _ in range(50)])
    assert not torch.isin(index, torch.arange(0, 64, 3)).any()
    assert p_value(index, probabilities(buffer)) > 1e-4


def test_unwritten_slots_are_never_drawn():
    buffer = buffer_of(1_000)
    buffer.extend(transitions(episode(0, 3)))
    assert buffer.sample(500)["index"].unique().tolist() == [0, 1, 2]
    assert probabilities(buffer).shape == (3,)


def test_one_item():
    buffer = buffer_of(1)
    buffer.extend(transitions(episode(0, 1, end=None)))
    for _ in range(3):
        batch = buffer.sample(5)
        assert batch["index"].tolist() == [0] * 5
        assert batch["priority_weight"].tolist() == [1.0] * 5
        buffer.update_priority(torch.tensor([0]), torch.tensor([2.0]))


# --- importance weights


@pytest.mark.parametrize("weight_norm", ["buffer", "batch"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("layout", ["single", "uneven", "two_dim"])
def test_weights(weight_norm, beta, layout):
    replay = ReplayWithReference(
        "reaper", layout=layout, capacity=24, num_envs=3, omega=0.6, beta=beta, weight_norm=weight_norm, seed=5
    )
    for _ in range(20):
        replay.random_operation()
        batch = replay.sample(9)
        weight = batch["priority_weight"]
        assert weight.dtype == torch.float32 and weight.shape == (9,)
        expected = torch.tensor(replay.reference.weights(replay.slots(batch["index"])), dtype=torch.float32)
        torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-7)
        assert beta or (weight == 1).all()
        replay.update(batch)


def test_weights_are_finite_for_extreme_td_errors():
    buffer = buffer_of(4, td_error="absolute", alpha=1.0, omega=1.0, beta=1.0)
    buffer.extend(transitions(episode(0, 4)))
    buffer.update_priority(torch.arange(4), torch.tensor([0.0, 1e-12, 1e-4, 1e4]))
    for _ in range(20):
        weight = buffer.sample(8)["priority_weight"]
        assert weight.isfinite().all() and (weight >= 0).all() and (weight <= 1).all()


# --- alpha, omega and beta


def example(**options):
    buffer = buffer_of(3, **plain(**options))
    buffer.extend(transitions(episode(0, 3)))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))  # R = 1/6, 1/2, 1
    return buffer


def test_defaults():
    sampler = ReaPERSampler(8)
    assert [float(sampler.alpha), float(sampler.omega), float(sampler.beta)] == pytest.approx([0.4, 0.2, 0.4])


def test_assigning_the_exponents_reweights_everything_stored():
    buffer = example()
    buffer.sampler.alpha = 2.0
    assert_psi(buffer, [1 / 6, 4 / 2, 9.0])
    buffer.sampler.omega = 0.5
    assert_psi(buffer, [6**-0.5, 4 * 2**-0.5, 9.0])
    buffer.sampler.alpha, buffer.sampler.omega = 1.0, 0.0
    assert_psi(buffer, [1.0, 2.0, 3.0])
    index = torch.cat([buffer.sample(1_000)["index"] for _ in range(20)])
    assert p_value(index, probabilities(buffer)) > 1e-4


def test_schedulers():
    buffer = example(beta=0.2)
    linear = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=2)
    factor = LambdaScheduler(buffer, "omega", lambda step: 1 / (1 + step))
    for step in (1, 2):
        linear.step()
        factor.step()
        assert float(buffer.sampler.beta) == pytest.approx(0.2 + 0.4 * step)
        assert float(buffer.sampler.omega) == pytest.approx(1 / (1 + step))
        assert_psi(buffer, [(1 / 6) ** (1 / (1 + step)), 2 * 0.5 ** (1 / (1 + step)), 3.0])


@pytest.mark.parametrize("name", ["alpha", "omega", "beta"])
def test_anneal_moves_with_every_update(name):
    buffer = example(**{name: Anneal(1.0, 0.2, 4)})
    for updates in range(1, 8):
        assert float(getattr(buffer.sampler, name)) == pytest.approx(1.0 - 0.8 * min(updates / 4, 1.0))
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))


def test_annealed_omega_holds_for_everything_stored():
    buffer = example(omega=Anneal(1.0, 0.5, 2))
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert_psi(buffer, [6**-0.5, 2 * 2**-0.5, 3.0])


def test_annealed_alpha_holds_for_what_was_updated_since():
    buffer = example(alpha=Anneal(0.0, 2.0, 2))
    for _ in range(3):
        buffer.update_priority(torch.arange(3), torch.tensor([1.0, 2.0, 3.0]))
    assert_psi(buffer, [1 / 6, 4 / 2, 9.0])


# --- overwritten slots


def test_updates_of_overwritten_slots_are_dropped():
    buffer = buffer_of(4, **plain())
    buffer.extend(transitions(episode(0, 4)))
    batch = buffer.sample(200)
    assert batch["index"].unique().tolist() == [0, 1, 2, 3]
    buffer.extend(transitions(episode(1, 2, end=None)))
    batch["td_error"] = torch.full((200,), 3.0)
    buffer.update_tensordict_priority(batch)
    # slots 0 and 1 hold new transitions with d = 1 and R = 1; of episode 0, d = 3, 3 remain
    assert_psi(buffer, [1.0, 1.0, 1.5, 3.0])


def test_updates_nobody_sampled_for_are_applied():
    buffer = buffer_of(4, **plain())
    buffer.extend(transitions(episode(0, 4)))
    buffer.extend(transitions(episode(1, 2)))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 3.0]))
    assert_psi(buffer, [1 / 4, 3.0, 1 / 2, 1.0])


# --- saving and restoring


def with_history(layout, **options):
    """A wrapped-around buffer with unfinished episodes, new transitions, and a maximum above all stored d."""
    replay = ReplayWithReference(
        "reaper", layout=layout, capacity=24, num_envs=2, seed=6, end_probability=0.1, **options
    )
    replay.extend(9)
    replay.update_directly(12)
    largest = torch.tensor([[0, 0]] if layout == "two_dim" else [0])
    replay.buffer.update_priority(largest, torch.tensor([400.0]))
    replay.reference.update([0], [400.0])
    replay.extend(20 // replay.num_envs)
    replay.update(replay.sample(8))
    replay.extend(2)
    return replay


def fresh_like(replay, **options):
    two_dim = replay.layout == "two_dim"
    lanes = {} if two_dim else {"num_streams": replay.num_envs}
    return buffer_of(replay.capacity, ndim=2 if two_dim else 1, **lanes, **options)


def assert_continues(replay, restored):
    """Check that both buffers draw the same and stay equal after further writes and updates."""
    for buffer in (replay.buffer, restored):
        buffer.set_rng(torch.Generator().manual_seed(7))
    assert torch.equal(restored.sampler.probabilities(restored.storage), replay.probabilities())
    for _ in range(4):
        batch, other = replay.sample(10), restored.sample(10)
        assert torch.equal(batch["index"], other["index"])
        assert torch.equal(batch["priority_weight"], other["priority_weight"])
        replay.update(batch)
        other["td_error"] = batch["td_error"]
        restored.update_tensordict_priority(other)
        assert torch.equal(restored.sampler.probabilities(restored.storage), replay.probabilities())
    replay.buffer, replay.sampler = restored, restored.sampler
    for _ in range(40):
        replay.random_operation()
        replay.check()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dumps_and_loads_round_trip(layout, tmp_path):
    replay = with_history(layout)
    replay.buffer.dumps(tmp_path)
    restored = fresh_like(replay)
    restored.loads(tmp_path)
    assert_continues(replay, restored)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_pickle_and_deepcopy(layout, duplicate):
    replay = with_history(layout)
    assert_same_state(duplicate(replay.sampler).state_dict(), replay.sampler.state_dict())
    copied = duplicate(replay.buffer)
    state = copy.deepcopy(replay.sampler.state_dict())
    assert_same_state(copied.sampler.state_dict(), state)
    slot = torch.tensor([[0, 1]] if layout == "two_dim" else [1])
    duplicate(replay.buffer).update_priority(slot, torch.tensor([900.0]))
    assert_same_state(replay.sampler.state_dict(), state)  # nothing is shared
    assert_continues(replay, copied)


def test_a_state_dict_is_not_a_view():
    replay = with_history("single")
    saved = replay.buffer.sampler.state_dict()
    before = copy.deepcopy(saved)
    replay.extend(5)
    replay.update_directly(5)
    assert_same_state(saved, before)


def test_the_annealed_value_is_restored():
    replay = with_history("single", beta=Anneal(0.4, 1.0, 8), omega=Anneal(0.0, 1.0, 8))
    restored = fresh_like(replay, beta=Anneal(0.4, 1.0, 8), omega=Anneal(0.0, 1.0, 8))
    restored.load_state_dict(copy.deepcopy(replay.buffer.state_dict()))
    for _ in range(8):
        assert float(restored.sampler.beta) == float(replay.sampler.beta)
        assert float(restored.sampler.omega) == float(replay.sampler.omega)
        for buffer in (restored, replay.buffer):
            buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert float(restored.sampler.beta) == 1.0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_forgets_everything(layout):
    replay = with_history(layout)
    replay.empty()
    with pytest.raises(RuntimeError, match="empty"):
        replay.buffer.sample(2)
    for _ in range(40):
        replay.random_operation()
        replay.check()


# --- random numbers


# --- with a loss


def test_dqn_loss_end_to_end():
    from tensordict.nn import TensorDictModule
    from torchrl.data import Categorical
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    torch.manual_seed(1)
    network = torch.nn.Linear(3, 2)
    actor = QValueActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"]), spec=Categorical(2)
    )
    loss = DQNLoss(actor, action_space="categorical", delay_value=False)
    loss.make_value_estimator(gamma=0.9)
    steps = episode(0, 10) + episode(1, 9, end="truncated") + episode(2, 5, end=None)
    count = len(steps)
    data = learnable(count, observation=3).update(transitions(steps).exclude("observation"))
    with torch.no_grad():
        q = network(data["observation"]).gather(1, data["action"][:, None])
        bootstrap = 0.9 * ~data["next", "terminated"] * network(data["next", "observation"]).amax(1, True)
        magnitude = (q - data["next", "reward"] - bootstrap).abs().squeeze(1).double() + 1e-6
    buffer = buffer_of(count)
    buffer.extend(data)
    updated = torch.zeros(count, dtype=torch.bool)
    while not updated.all():
        batch = buffer.sample(8)
        assert loss(batch)["loss"].isfinite()
        buffer.update_tensordict_priority(batch)
        updated[batch["index"]] = True
    parts = magnitude.split([10, 9, 5])
    largest = max(part.sum() for part in parts)
    r = torch.cat(
        [parts[0].cumsum(0) / parts[0].sum(), parts[1].cumsum(0) / parts[1].sum(), parts[2].cumsum(0) / largest]
    )
    assert_psi(buffer, (r**0.2 * magnitude**0.4).tolist(), rtol=1e-3)


# --- statistics


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("updates", [0, 3])
def test_stats_are_finite_scalars(updates, layout):
    replay = ReplayWithReference("reaper", layout=layout, num_envs=2, capacity=16, seed=8)
    replay.extend(10)
    for _ in range(updates):
        replay.update(replay.sample(4))
    assert_finite_stats(replay.sampler)


def test_the_acceptance_rate_is_the_mean_reliability_of_proposals():
    """One finished episode, d = 1, 2, 3, 4: proposals have probability d / 10 and R = 0.1, 0.3, 0.6, 1."""
    buffer = buffer_of(4, **plain(alpha=1.0, omega=1.0))
    buffer.extend(transitions(episode(0, 4)))
    buffer.update_priority(torch.arange(4), torch.arange(1.0, 5.0))
    expected = (1 * 0.1 + 2 * 0.3 + 3 * 0.6 + 4 * 1.0) / 10
    assert float(buffer.sampler.stats()["acceptance_rate"]) == pytest.approx(expected)


# --- bad input


@pytest.mark.parametrize("td_error", ["squared", "absolute"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_td_errors_name_the_first_offender(bad, td_error):
    buffer = buffer_of(50, td_error=td_error)
    buffer.extend(transitions(episode(0, 50)))
    with Refuses(buffer, ValueError, r"index 37\b"):
        buffer.update_priority(torch.tensor([41, 37, 45]), torch.tensor([1.0, bad, bad]))


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 2)])
def test_bad_shapes(shape):
    buffer = example()
    with Refuses(buffer, ValueError, "TD errors"):
        buffer.update_priority(torch.tensor([0, 1, 2]), torch.ones(shape))


@pytest.mark.parametrize("index", [-9, 3, 1_000])
def test_bad_indices(index):
    buffer = example()
    with Refuses(buffer, (ValueError, IndexError), rf"{index}\b.* out of range"):
        buffer.update_priority(torch.tensor([0, index]), torch.ones(2))


@pytest.mark.parametrize("index", [[4, 0], [0, 2], [-5, 1], [0, -3]])
def test_bad_indices_in_two_dimensions(index):
    buffer = buffer_of(8, ndim=2)
    buffer.extend(torch.stack([transitions(episode(0, 4)), transitions(episode(1, 4))]))
    with Refuses(buffer, (ValueError, IndexError), "out of range"):
        buffer.update_priority(torch.tensor([[0, 0], index]), torch.ones(2))


BAD_ARGUMENTS = [
    ("alpha", -0.1),
    ("alpha", float("nan")),
    ("omega", -0.1),
    ("omega", float("nan")),
    ("beta", -0.1),
    ("beta", float("nan")),
    ("eps", -1e-6),
    ("eps", float("nan")),
    ("td_error", "square"),
    ("weight_norm", "maximum"),
    ("truncated", "terminated"),
    ("num_streams", 0),
    ("num_streams", -2),
]


@pytest.mark.parametrize(("name", "value"), BAD_ARGUMENTS)
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=name):
        ReaPERSampler(8, **{name: value})


@pytest.mark.parametrize(("name", "value"), [bad for bad in BAD_ARGUMENTS if bad[0] in ("alpha", "omega", "beta")])
def test_bad_assignments(name, value):
    buffer = example()
    with Refuses(buffer, ValueError, name):
        setattr(buffer.sampler, name, value)


@pytest.mark.parametrize("capacity", [0, -1])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match="capacity"):
        ReaPERSampler(capacity)


def test_a_capacity_smaller_than_the_storage():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=ReaPERSampler(4))
    with pytest.raises(ValueError, match="capacity"):
        buffer.extend(transitions(episode(0, 2)))


@pytest.mark.parametrize("missing", ["done", "terminated"])
def test_missing_done_flags(missing):
    buffer = buffer_of(5, truncated="ongoing")
    data = transitions(episode(0, 2)).exclude(("next", missing))
    with pytest.raises(KeyError, match=missing):
        buffer.extend(data)


def test_missing_trajectory_ids():
    buffer = buffer_of(5, num_streams=2)
    with pytest.raises((KeyError, ValueError), match="traj_ids"):
        buffer.extend(transitions(episode(0, 2), with_ids=False))


def test_other_keys():
    buffer = buffer_of(
        6, **plain(num_streams=2, done_key=("next", "over"), terminated_key=("next", "dead"), traj_key="trajectory")
    )
    a, b = episode(0, 3), episode(1, 2)
    data = transitions([a[0], b[0], a[1], b[1], a[2]])
    data["next"].rename_key_("done", "over").rename_key_("terminated", "dead")
    data["trajectory"] = data.pop("collector")["traj_ids"]
    buffer.extend(data)
    assert_psi(buffer, [1 / 3, 1 / 2, 2 / 3, 1.0, 1.0])


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
@pytest.mark.parametrize(("num_streams", "ids"), [(1, [1, 0]), (2, [2, 0, 1])])
def test_more_simultaneous_trajectories_than_streams(num_streams, ids):
    buffer = buffer_of(20, num_streams=num_streams)
    buffer.extend(transitions([Step(number, number) for number in range(num_streams)]))
    with Refuses(buffer, ValueError, "num_streams"):
        buffer.extend(transitions([Step(number, number) for number in ids]))


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
def test_any_number_of_trajectories_may_break_off_in_one_write():
    buffer = buffer_of(200)
    buffer.extend(transitions([Step(number, number) for number in range(100)]))
    assert int(buffer.sampler.stats()["interrupted"]) == 99
    with Refuses(buffer, ValueError, "trajectory 0 continues"):
        buffer.extend(transitions([Step(150, 150), Step(151, 0)]))


def test_too_many_trajectories_in_one_chunk():
    buffer = buffer_of(20, num_streams=2)
    with pytest.raises(ValueError, match="num_streams"):
        buffer.extend(transitions([Step(0, 0), Step(1, 1), Step(2, 2), Step(0, 0), Step(1, 1), Step(2, 2)]))
