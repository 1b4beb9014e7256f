"""ReaPERSampler against hand tables and the naive reference of its paper: episodes, draws, state and bad input."""

from functools import partial

import pytest
import torch

from tests import data
from tests.chi_square import p_value
from tests.reference import NaiveReaPER
from tests.samplers.experience import (
    INTERRUPTED,
    Refuses,
    ReplayWithReference,
    Step,
    probabilities,
    transitions,
)
from torchrl_replay_ext import Anneal, ProportionalSampler, ReaPERSampler

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


# --- truncation


@pytest.mark.parametrize(("truncated", "expected"), [("finished", [0.5, 1.0]), ("ongoing", [1 / 8, 2 / 8])])
def test_truncated_episodes(truncated, expected):
    buffer = buffer_of(8, **plain(truncated=truncated))
    buffer.extend(transitions(episode(0, 2, end="truncated") + episode(1, 2)))
    buffer.update_priority(torch.arange(4), torch.tensor([1.0, 1.0, 4.0, 4.0]))
    assert_psi(buffer, [*expected, 2.0, 4.0])


# --- trajectory ids


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
def test_an_abandoned_trajectory_stays_ongoing():
    buffer = buffer_of(12, **plain())
    buffer.extend(transitions(episode(3, 2, end=None)))
    buffer.update_priority(torch.arange(2), torch.tensor([1.0, 1.0]))
    buffer.extend(transitions(episode(0, 2)))  # a new collector
    buffer.update_priority(torch.tensor([2, 3]), torch.tensor([3.0, 5.0]))
    assert_psi(buffer, [1 / 8, 2 / 8, 3 * 3 / 8, 5.0])


def test_a_two_dimensional_storage_may_round_its_size_up():
    buffer = buffer_of(10, ndim=2, **plain())
    buffer.extend(torch.stack([transitions(episode(env, 4)) for env in range(3)]))
    assert len(buffer) == 12
    assert_psi(buffer, [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 3)


# --- against the naive reference


@pytest.mark.parametrize(("layout", "num_envs"), [("single", 1), ("uneven", 5)])
def test_large_buffers(layout, num_envs):
    replay = ReplayWithReference("reaper", layout=layout, num_envs=num_envs, capacity=600, end_probability=0.02, seed=9)
    for _ in range(12):
        # more rows than slots, so that pages of positions are freed and used again
        replay.extend(120)
        replay.update_directly(100)
        replay.update(replay.sample(64))
    replay.check()


# --- reduction to PER


def test_omega_0_is_proportional_prioritization():
    reaper = ReplayWithReference("reaper", layout="uneven", num_envs=3, capacity=20, alpha=0.6, omega=0.0, seed=4)
    per = data.buffer_of(ProportionalSampler, reaper.capacity, alpha=0.6)
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


@pytest.mark.parametrize(("omega", "length", "zeros"), [(0.6, 20, 10), (30.0, 100, 0), (400.0, 200, 0)])
def test_draws_are_exact_however_many_proposals_are_rejected(omega, length, zeros):
    """Against the naive reference. With omega 400, R^omega is below 10^-3 for all but a few transitions."""
    size = 2 * length + zeros
    options = plain(omega=0.0, alpha=0.0)
    buffer, reference = buffer_of(size, batch_size=500, **options), NaiveReaPER(**options)
    steps = episode(0, length) + episode(1, zeros) if zeros else episode(0, length)
    steps += episode(2, length)
    buffer.extend(transitions(steps))
    for slot, step in enumerate(steps):
        reference.write(slot, step.episode, step.terminated)
    error = torch.cat([torch.ones(length), torch.zeros(zeros), torch.linspace(0.5, 1.5, length)])
    buffer.update_priority(torch.arange(size), error)
    reference.update(range(size), error.tolist())
    buffer.sampler.omega = reference.omega = omega
    p = torch.tensor(reference.probabilities(), dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), p, rtol=1e-5, atol=1e-12)
    index = torch.cat([buffer.sample()["index"] for _ in range(60)])
    # transitions with a small probability are one class
    rare = p * 30_000 < 5
    number = torch.where(rare, 0, 1 + (~rare).cumsum(0) - 1)
    expected = torch.zeros(int(number.max()) + 1, dtype=torch.float64).index_add_(0, number, p)
    assert p_value(number[index], expected) > 1e-4


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


def test_annealed_omega_holds_for_everything_stored():
    buffer = example(omega=Anneal(1.0, 0.5, 2))
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert_psi(buffer, [6**-0.5, 2 * 2**-0.5, 3.0])


# --- statistics


def test_the_acceptance_rate_is_the_mean_reliability_of_proposals():
    """One finished episode, d = 1, 2, 3, 4: proposals have probability d / 10 and R = 0.1, 0.3, 0.6, 1."""
    buffer = buffer_of(4, **plain(alpha=1.0, omega=1.0))
    buffer.extend(transitions(episode(0, 4)))
    buffer.update_priority(torch.arange(4), torch.arange(1.0, 5.0))
    expected = (1 * 0.1 + 2 * 0.3 + 3 * 0.6 + 4 * 1.0) / 10
    assert float(buffer.sampler.stats()["acceptance_rate"]) == pytest.approx(expected)


# --- bad input


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
def test_any_number_of_trajectories_may_break_off_in_one_write():
    buffer = buffer_of(200)
    buffer.extend(transitions([Step(number, number) for number in range(100)]))
    assert int(buffer.sampler.stats()["interrupted"]) == 99
    with Refuses(buffer, ValueError, "trajectory 0 continues"):
        buffer.extend(transitions([Step(150, 150), Step(151, 0)]))


@pytest.mark.parametrize("on_load", ["truncate", "continue"])
@pytest.mark.parametrize("streams", [{}, {"num_streams": 2}])
def test_episodes_across_a_restart(on_load, streams):
    """R of Equation 16 by hand: Σd up to t, divided by the largest Σd of an episode, where no episode is finished."""
    ids = None if not streams else [0] * 4

    def make():
        sampler = ReaPERSampler(alpha=0.0, omega=1.0, eps=0.0, td_error="absolute", on_load=on_load, **streams)
        return data.buffer_with(sampler, 20)

    saved, buffer = make(), make()
    saved.extend(data.rows(4, ids=ids))
    buffer.load_state_dict(saved.state_dict())
    buffer.extend(data.rows(4, first=4, ids=ids))
    buffer.update_priority(torch.arange(8), torch.ones(8))
    buffer.sampler.check_valid()
    reliability = torch.tensor([1.0, 2.0, 3.0, 4.0] * 2) if on_load == "truncate" else torch.arange(1.0, 9.0)
    expected = (reliability / reliability.sum()).double()
    torch.testing.assert_close(buffer.sampler.probabilities(buffer.storage), expected)
    assert buffer.sampler.stats()["interrupted"] == 0
