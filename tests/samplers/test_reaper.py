"""ReaPERSampler against hand tables and the naive reference of its paper: episodes, draws, state and bad input."""

from functools import partial

import pytest
import torch

from tests import data
from tests.chi_square import p_value
from tests.operations import Driven
from tests.reference import NaiveReaPER
from tests.samplers.experience import INTERRUPTED, Refuses, Step, assert_priorities, probabilities, transitions
from torchrl_replay_ext import Anneal, Episodes, ProportionalSampler, ReaPERSampler

buffer_of = partial(data.buffer_of, ReaPERSampler)


def plain(**options):
    """Arguments for which probabilities directly give R and d: d = TD error, Psi = R d."""
    return {"alpha": 1.0, "omega": 1.0, "eps": 0.0, "td_error": "absolute", **options}


def episode(number, length, *, end="terminated"):
    """``length`` steps of one episode; ``end`` is the flag of the last step, or None."""
    steps = [Step(number, number) for _ in range(length)]
    if end:
        setattr(steps[-1], end, True)
    return steps


def updated(steps, td_errors, **options):
    """A buffer with ``steps``, which have these TD errors."""
    buffer = buffer_of(8, **plain(**options))
    buffer.extend(transitions(steps))
    buffer.update_priority(torch.arange(len(steps)), torch.tensor(td_errors))
    return buffer


# --- hand tables


def test_finished_and_ongoing_episodes_by_hand():
    # finished: d = 1, 2, 3 -> R = 1/6, 3/6, 6/6.  ongoing: d = 2, 2 with F = 6 -> R = 2/6, 4/6.
    buffer = updated(episode(0, 3) + episode(1, 2, end=None), [1.0, 2.0, 3.0, 2.0, 2.0])
    assert_priorities(buffer, [1 / 6, 1.0, 3.0, 4 / 6, 8 / 6])


# --- new transitions (refinement I)


def test_new_transitions_have_the_maximum_priority_and_full_reliability():
    buffer = updated(episode(0, 2), [3.0, 1.0])
    buffer.extend(transitions(episode(1, 2, end=None)))
    assert_priorities(buffer, [3 * 3 / 4, 1.0, 3.0, 3.0])


def test_the_first_update_of_an_episode_ends_the_waiting_of_all_its_transitions():
    buffer = buffer_of(8, **plain())
    buffer.extend(transitions(episode(0, 3, end=None)))
    assert_priorities(buffer, [1.0, 1.0, 1.0])
    buffer.update_priority(torch.tensor([1]), torch.tensor([2.0]))  # d = 1, 2, 1; F = 4
    assert_priorities(buffer, [1 / 4, 2 * 3 / 4, 1.0])


# --- truncation


@pytest.mark.parametrize(("truncated", "expected"), [("finished", [0.5, 1.0]), ("ongoing", [1 / 8, 2 / 8])])
def test_truncated_episodes(truncated, expected):
    steps = episode(0, 2, end="truncated") + episode(1, 2)
    buffer = updated(steps, [1.0, 1.0, 4.0, 4.0], truncated=truncated)
    assert_priorities(buffer, [*expected, 2.0, 4.0])


# --- trajectory ids


def test_a_two_dimensional_storage_may_round_its_size_up():
    buffer = buffer_of(10, ndim=2, **plain())
    buffer.extend(torch.stack([transitions(episode(env, 4)) for env in range(3)]))
    assert len(buffer) == 12
    assert_priorities(buffer, [0.25] * 3 + [0.5] * 3 + [0.75] * 3 + [1.0] * 3)


# --- against the naive reference


@pytest.mark.parametrize("num_envs", [1, 5])
def test_large_buffers(num_envs):
    used = Driven("reaper", 9, layout="uneven", num_envs=num_envs, capacity=600, end_probability=0.02)
    for _ in range(12):
        # more rows than slots, so that pages of positions are freed and used again
        used.extend(120)
        used.update_by_index(100)
        used.sample(64)
        used.update_all()
    used.check()


# --- reduction to PER


def test_omega_0_is_proportional_prioritization():
    options, first = {"alpha": 0.6, "compilable": False}, 0
    reaper = buffer_of(20, omega=0.0, episodes=Episodes(num_streams=3), **options)
    per = data.buffer_of(ProportionalSampler, 20, **options)
    for step in range(30):
        rows = data.rows(3, first=first, ids=torch.arange(3) + 3 * (step // 4), done=range(3) if step % 4 == 3 else ())
        index, error = torch.randint(min(first + 3, 20), (5,)), torch.rand(5)
        for buffer in (reaper, per):
            buffer.extend(rows.clone())
            buffer.update_priority(index, error)
        first += 3
        assert torch.equal(probabilities(reaper), probabilities(per))


# --- draws


@pytest.mark.parametrize(("omega", "length", "zeros"), [(0.6, 20, 10), (30.0, 100, 0), (400.0, 200, 0)])
def test_draws_are_exact_however_many_proposals_are_rejected(omega, length, zeros):
    """Against the naive reference. With omega 400, R^omega is below 10^-3 for all but a few transitions."""
    size = 2 * length + zeros
    options = plain(omega=0.0, alpha=0.0)
    buffer, reference = buffer_of(size, batch_size=500, **options), NaiveReaPER(**options)
    steps = episode(0, length) + (episode(1, zeros) if zeros else []) + episode(2, length)
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
    assert p_value(index, p) > 1e-4


# --- alpha, omega and beta


def test_annealed_omega_holds_for_everything_stored():
    buffer = updated(episode(0, 3), [1.0, 2.0, 3.0], omega=Anneal(1.0, 0.5, 2))  # R = 1/6, 1/2, 1
    buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    assert_priorities(buffer, [6**-0.5, 2 * 2**-0.5, 3.0])


# --- statistics


def test_the_acceptance_rate_is_the_mean_reliability_of_proposals():
    """One finished episode, d = 1, 2, 3, 4: proposals have probability d / 10 and R = 0.1, 0.3, 0.6, 1."""
    buffer = updated(episode(0, 4), [1.0, 2.0, 3.0, 4.0])
    expected = (1 * 0.1 + 2 * 0.3 + 3 * 0.6 + 4 * 1.0) / 10
    assert float(buffer.sampler.stats()["acceptance_rate"]) == pytest.approx(expected)


# --- bad input


def test_other_keys():
    episodes = Episodes(num_streams=2, done_key=("next", "over"), traj_key="trajectory")
    buffer = buffer_of(6, **plain(terminated_key=("next", "dead"), episodes=episodes))
    a, b = episode(0, 3), episode(1, 2)
    data = transitions([a[0], b[0], a[1], b[1], a[2]])
    data["next"].rename_key_("done", "over").rename_key_("terminated", "dead")
    data["trajectory"] = data.pop("collector")["traj_ids"]
    buffer.extend(data)
    assert_priorities(buffer, [1 / 3, 1 / 2, 2 / 3, 1.0, 1.0])


@pytest.mark.filterwarnings(f"ignore:{INTERRUPTED}")
def test_any_number_of_trajectories_may_break_off_in_one_write():
    buffer = buffer_of(200, episodes=Episodes(num_streams=1))
    buffer.extend(transitions([Step(number, number) for number in range(100)]))
    assert int(buffer.sampler.stats()["interrupted"]) == 99
    with Refuses(buffer, ValueError, "trajectory 0 continues"):
        buffer.extend(transitions([Step(150, 150), Step(151, 0)]))
