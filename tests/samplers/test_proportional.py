"""ProportionalSampler against hand tables and the naive reference of PER: draws, weights, state and bad input."""

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.scheduler import LambdaScheduler, LinearScheduler

from tests import data
from tests.chi_square import p_value
from tests.data import learnable
from tests.samplers.experience import (
    Refuses,
    ReplayWithReference,
    Step,
    assert_finite_stats,
    assert_same_state,
    probabilities,
    transitions,
)
from torchrl_replay_ext import Anneal, ProportionalSampler

buffer_of = partial(data.buffer_of, ProportionalSampler)


def items(count):
    return TensorDict({"observation": torch.arange(float(count))[:, None]}, [count])


def filled(values, /, **options):
    """A full buffer in which item i was updated with ``values[i]``, by default its magnitude."""
    values = torch.as_tensor(values)
    buffer = buffer_of(len(values), **{"eps": 0.0, "td_error": "absolute", **options})
    index = buffer.extend(items(len(values)))
    buffer.update_priority(index, values)
    return buffer


def draw(buffer, draws, batch_size=1_000):
    return torch.cat([buffer.sample(batch_size)["index"] for _ in range(draws // batch_size)])


# --- the distribution


def test_hand_table():
    # d = 1, 2, 3, alpha = 2: d^2 = 1, 4, 9
    buffer = filled([1.0, 2.0, 3.0], alpha=2.0)
    expected = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64) / 14
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-6, atol=0.0)


def test_squared_td_errors_are_rooted_and_eps_is_added_to_the_root():
    buffer = filled([1.0, 4.0, 9.0], td_error="squared", eps=1.0, alpha=1.0)
    expected = torch.tensor([2.0, 3.0, 4.0], dtype=torch.float64) / 9
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-6, atol=0.0)


def test_defaults():
    sampler = ProportionalSampler(8)
    assert [float(sampler.alpha), float(sampler.beta)] == pytest.approx([0.6, 0.4])


def test_alpha_0_is_uniform():
    buffer = filled([1.0, 20.0, 0.3, 0.0], alpha=0.0)
    torch.testing.assert_close(probabilities(buffer), torch.full((4,), 0.25, dtype=torch.float64))


@pytest.mark.parametrize("td_error", ["squared", "absolute"])
@pytest.mark.parametrize("layout", ["single", "two_dim"])
@pytest.mark.parametrize("seed", range(3))
def test_long_random_sequences(layout, td_error, seed):
    replay = ReplayWithReference(
        "per", layout=layout, capacity=13 + seed, num_envs=1 + seed, td_error=td_error, alpha=0.7, seed=seed
    )
    for _ in range(150):
        replay.random_operation()
        replay.check()


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    capacity=st.integers(1, 9),
    layout=st.sampled_from(["single", "two_dim"]),
    num_envs=st.integers(1, 3),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
    seed=st.integers(0, 2**16),
    operations=st.integers(0, 25),
)
def test_any_sequence(capacity, layout, num_envs, alpha, seed, operations):
    replay = ReplayWithReference("per", layout=layout, capacity=capacity, num_envs=num_envs, alpha=alpha, seed=seed)
    for _ in range(operations):
        replay.random_operation()
    replay.extend(1)
    replay.check()


def test_new_items_get_the_running_maximum():
    buffer = buffer_of(6, alpha=1.0, eps=0.0, td_error="absolute")
    buffer.extend(items(2))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([0.25, 0.5]))
    buffer.extend(items(1))  # nothing above the initial maximum of 1 was seen
    buffer.update_priority(torch.tensor([0]), torch.tensor([4.0]))
    buffer.update_priority(torch.tensor([0]), torch.tensor([0.25]))  # the maximum does not come down again
    buffer.add(items(1)[0])
    expected = torch.tensor([0.25, 0.5, 1.0, 4.0], dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), expected / expected.sum(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("td_error", ["squared", "absolute"])
def test_a_valid_state_is_valid_however_the_largest_priority_was_rounded(td_error):
    for seed in range(200):
        torch.manual_seed(seed)
        buffer = filled(100 * torch.rand(8), eps=0.1, td_error=td_error)
        buffer.sampler.check_valid()
        buffer.extend(items(2))
        buffer.sampler.check_valid()


def test_of_duplicates_in_one_update_the_last_wins():
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    buffer.update_priority(torch.tensor([1, 0, 1, 1]), torch.tensor([7.0, 2.0, 5.0, 3.0]))
    expected = torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64) / 6
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("form", [int, torch.tensor, lambda slot: torch.tensor([slot])])
def test_a_single_index_can_be_updated(form):
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    buffer.update_priority(form(1), torch.tensor(3.0) if form is not int else 3.0)
    expected = torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64) / 5
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-6, atol=0.0)


def test_td_errors_with_a_trailing_dimension():
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    batch = buffer.sample(4)
    batch["td_error"] = batch["index"].float()[:, None] + 2
    buffer.update_tensordict_priority(batch)
    drawn = set(batch["index"].tolist())
    magnitude = torch.tensor([slot + 2.0 if slot in drawn else 1.0 for slot in range(3)], dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), magnitude / magnitude.sum(), rtol=1e-6, atol=0.0)


def test_extended_data_may_carry_its_td_errors():
    buffer = buffer_of(4, alpha=1.0, eps=0.0, td_error="absolute")
    data = items(3)
    data["td_error"] = torch.tensor([1.0, 2.0, 5.0])
    buffer.extend(data)
    expected = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64) / 8
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-6, atol=0.0)


def test_extending_beyond_the_capacity_keeps_the_last_items():
    buffer = buffer_of(4)
    buffer.extend(items(4))
    buffer.update_priority(torch.arange(4), torch.full((4,), 0.01))
    buffer.extend(items(11))
    torch.testing.assert_close(probabilities(buffer), torch.full((4,), 0.25, dtype=torch.float64))


def test_priorities_of_very_different_size():
    values = torch.logspace(-15, 15, 31)
    buffer = filled(values, alpha=0.6)
    p = probabilities(buffer)
    expected = values.double() ** 0.6
    assert (p > 0).all()
    torch.testing.assert_close(p[15:], (expected / expected.sum())[15:], rtol=1e-4, atol=0.0)
    assert p_value(draw(buffer, 20_000).clamp(min=24) - 24, torch.cat([p[:25].sum()[None], p[25:]])) > 1e-4


# --- draws


def test_draws_follow_the_probabilities_and_the_test_can_fail():
    magnitude = torch.rand(64, generator=torch.Generator().manual_seed(1)) * 3 + 0.2
    buffer = filled(magnitude, alpha=0.8)
    index = draw(buffer, 50_000)
    assert p_value(index, probabilities(buffer)) > 1e-4
    wrong = (magnitude**0.7).double()
    assert p_value(index, wrong / wrong.sum()) < 1e-4


@pytest.mark.parametrize("stratified", [False, True])
def test_items_without_priority_are_never_drawn(stratified):
    magnitude = torch.rand(64, generator=torch.Generator().manual_seed(2)) + 0.5
    magnitude[::3] = 0.0
    magnitude[-1] = 0.0
    buffer = filled(magnitude, alpha=0.5, stratified=stratified)
    assert (probabilities(buffer)[::3] == 0).all()
    index = draw(buffer, 50_000)
    assert not torch.isin(index, torch.arange(0, 64, 3)).any()
    assert (index != 63).all()


def test_unwritten_slots_are_never_drawn():
    buffer = buffer_of(1_000)
    buffer.extend(items(3))
    assert draw(buffer, 5_000).unique().tolist() == [0, 1, 2]
    assert probabilities(buffer).shape == (3,)


def test_one_item():
    buffer = buffer_of(1)
    buffer.extend(items(1))
    batch = buffer.sample(5)
    assert batch["index"].tolist() == [0] * 5
    assert batch["priority_weight"].tolist() == [1.0] * 5


def test_two_dimensional_storage_is_indexed_by_time_and_environment():
    buffer = buffer_of(12, ndim=2, eps=0.0, td_error="absolute", alpha=1.0)
    observation = torch.arange(12.0).view(3, 4)  # [environment, time]
    buffer.extend(TensorDict({"observation": observation}, [3, 4]))
    index = torch.tensor([[time, env] for time in range(4) for env in range(3)])
    buffer.update_priority(index, torch.tensor([float(env == 1 and time == 2) for time, env in index.tolist()]))
    batch = buffer.sample(7)
    assert batch["index"].shape == (7, 2)
    assert batch["index"].tolist() == [[2, 1]] * 7
    assert batch["observation"].tolist() == [observation[1, 2].item()] * 7


@pytest.mark.parametrize("batch_size", [1, 7, 32, 200])
def test_a_stratified_batch_has_one_draw_in_each_segment_of_equal_mass(batch_size):
    magnitude = torch.rand(64, generator=torch.Generator().manual_seed(3)) * 5
    magnitude[10:20] = 0.0
    buffer = filled(magnitude, alpha=0.6, stratified=True)
    p = probabilities(buffer)
    last = p.cumsum(0)
    first = last - p
    segment = torch.arange(batch_size, dtype=torch.float64) / batch_size
    for _ in range(50):
        index = buffer.sample(batch_size)["index"].sort().values
        assert (first[index] < segment + 1 / batch_size + 1e-6).all()
        assert (last[index] > segment - 1e-6).all()


def test_an_unstratified_batch_is_not_stratified():
    buffer = filled(torch.ones(64), alpha=0.6)
    segment = torch.arange(64)
    assert any((buffer.sample(64)["index"].sort().values != segment).any() for _ in range(5))


def test_stratified_marginals():
    magnitude = torch.rand(64, generator=torch.Generator().manual_seed(4)) * 5 + 0.05
    buffer = filled(magnitude, alpha=0.9, stratified=True)
    p, batch_size, batches = probabilities(buffer), 32, 1_500
    counts = torch.bincount(draw(buffer, batch_size * batches, batch_size), minlength=64).double()
    # a stratified count varies no more than a multinomial one; 5 standard deviations
    assert ((counts - batches * batch_size * p).abs() < 5 * (batches * batch_size * p * (1 - p)).sqrt()).all()
    wrong = (magnitude**0.6).double()
    wrong /= wrong.sum()
    assert ((counts - batches * batch_size * wrong).abs() > 5 * (batches * batch_size * wrong).sqrt()).any()


# --- importance weights


@pytest.mark.parametrize("weight_norm", ["buffer", "batch"])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("layout", ["single", "two_dim"])
def test_weights(weight_norm, beta, layout):
    replay = ReplayWithReference(
        "per", layout=layout, capacity=24, num_envs=3, alpha=0.6, beta=beta, weight_norm=weight_norm, seed=5
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


@pytest.mark.parametrize("weight_norm", ["buffer", "batch"])
def test_weights_are_finite_for_extreme_td_errors(weight_norm):
    buffer = filled([0.0, 1e-12, 1e-4, 1e4], eps=1e-6, alpha=1.0, beta=1.0, weight_norm=weight_norm)
    for _ in range(20):
        weight = buffer.sample(8)["priority_weight"]
        assert weight.isfinite().all() and (weight >= 0).all() and (weight <= 1).all()


def test_items_that_cannot_be_drawn_do_not_normalise_the_weights():
    buffer = filled([0.0, 1.0, 1.0], alpha=0.5, beta=1.0)
    assert buffer.sample(6)["priority_weight"].tolist() == [1.0] * 6


# --- alpha and beta


def test_assigning_alpha_reweights_everything_stored():
    buffer = filled([1.0, 2.0, 3.0], alpha=1.0)
    buffer.sampler.alpha = 2.0
    expected = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64) / 14
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)
    buffer.sampler.alpha = 0.0
    torch.testing.assert_close(probabilities(buffer), torch.full((3,), 1 / 3, dtype=torch.float64))
    buffer.sampler.alpha = 1.0  # and nothing was lost on the way
    expected = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) / 6
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)


def test_new_items_after_a_change_of_alpha():
    buffer = buffer_of(4, alpha=1.0, eps=0.0, td_error="absolute")
    buffer.extend(items(2))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, 2.0]))
    buffer.sampler.alpha = 2.0
    buffer.extend(items(1))
    expected = torch.tensor([9.0, 4.0, 9.0], dtype=torch.float64) / 22
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)


def test_linear_scheduler_on_beta():
    buffer = filled([1.0, 4.0], alpha=1.0, beta=0.2)
    scheduler = LinearScheduler(buffer, "beta", final_value=1.0, num_steps=4)
    for expected in (0.4, 0.6, 0.8, 1.0, 1.0):
        scheduler.step()
        assert float(buffer.sampler.beta) == pytest.approx(expected)
        batch = buffer.sample(20)
        for index, weight in zip(batch["index"].tolist(), batch["priority_weight"].tolist(), strict=True):
            assert weight == pytest.approx(1.0 if index == 0 else 0.25**expected, rel=1e-4)


def test_lambda_scheduler_on_alpha():
    buffer = filled([1.0, 2.0], alpha=1.0)
    scheduler = LambdaScheduler(buffer, "alpha", lambda step: 1 + step)
    scheduler.step()
    assert float(buffer.sampler.alpha) == pytest.approx(2.0)
    torch.testing.assert_close(
        probabilities(buffer), torch.tensor([0.2, 0.8], dtype=torch.float64), rtol=1e-5, atol=0.0
    )


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_anneal_moves_with_every_update(name):
    buffer = filled([1.0, 2.0], **{name: Anneal(0.2, 1.0, 4)})
    before = 1  # filled() updated once
    for updates in range(before, 8):
        assert float(getattr(buffer.sampler, name)) == pytest.approx(0.2 + 0.8 * min(updates / 4, 1.0))
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))


def test_annealed_alpha_holds_for_what_was_updated_since():
    buffer = filled([1.0, 2.0], alpha=Anneal(0.0, 2.0, 3))
    for _ in range(4):
        buffer.update_priority(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
    expected = torch.tensor([0.2, 0.8], dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)


def test_writing_does_not_anneal():
    buffer = buffer_of(4, beta=Anneal(0.2, 1.0, 4))
    buffer.extend(items(2))
    buffer.add(items(1)[0])
    assert float(buffer.sampler.beta) == pytest.approx(0.2)


# --- overwritten slots


def test_updates_of_overwritten_slots_are_dropped():
    buffer = filled([1.0, 1.0, 1.0, 1.0], alpha=1.0)
    batch = buffer.sample(64)
    assert batch["index"].unique().tolist() == [0, 1, 2, 3]
    buffer.extend(items(2))
    batch["td_error"] = torch.full((64,), 3.0)
    buffer.update_tensordict_priority(batch)
    magnitude = probabilities(buffer) / probabilities(buffer)[2] * 3
    torch.testing.assert_close(magnitude[2:], torch.full((2,), 3.0, dtype=torch.float64), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(magnitude[:2], torch.ones(2, dtype=torch.float64), rtol=1e-5, atol=0.0)


def test_updates_nobody_sampled_for_are_applied():
    buffer = filled([1.0, 1.0, 1.0], alpha=1.0)
    buffer.extend(items(2))
    buffer.update_priority(torch.tensor([0, 2]), torch.tensor([2.0, 3.0]))
    expected = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64) / 6
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)


def test_a_direct_update_long_after_a_finished_sample_is_applied():
    buffer = filled([1.0, 1.0], alpha=1.0)
    batch = buffer.sample(16)
    batch["td_error"] = torch.ones(16)
    buffer.update_tensordict_priority(batch)
    buffer.extend(items(2))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([3.0, 1.0]))
    expected = torch.tensor([0.75, 0.25], dtype=torch.float64)
    torch.testing.assert_close(probabilities(buffer), expected, rtol=1e-5, atol=0.0)


# --- saving and restoring


def with_history(layout="single", **options):
    replay = ReplayWithReference("per", layout=layout, capacity=20, num_envs=2, seed=6, end_probability=0.1, **options)
    replay.extend(7)
    replay.update_directly(6)
    replay.extend(6)
    replay.update(replay.sample(8))
    return replay


def assert_continue_alike(replay, restored):
    """Check that draws agree, also after further writes and updates."""
    for buffer in (replay.buffer, restored):
        buffer.set_rng(torch.Generator().manual_seed(7))
    for _ in range(6):
        batches = [buffer.sample(10) for buffer in (replay.buffer, restored)]
        assert torch.equal(batches[0]["index"], batches[1]["index"])
        assert torch.equal(batches[0]["priority_weight"], batches[1]["priority_weight"])
        for buffer, batch in zip((replay.buffer, restored), batches, strict=True):
            batch["td_error"] = torch.linspace(0.1, 5.0, 10)
            buffer.update_tensordict_priority(batch)
            buffer.extend(transitions([Step(episode=0, traj_id=0)] * 3, with_ids=False))
        assert torch.equal(*[buffer.sampler.probabilities(buffer.storage) for buffer in (replay.buffer, restored)])


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_pickle_and_deepcopy(duplicate):
    replay = with_history()
    assert_same_state(duplicate(replay.sampler).state_dict(), replay.sampler.state_dict())
    copied = duplicate(replay.buffer)
    state = copy.deepcopy(replay.sampler.state_dict())
    assert_same_state(copied.sampler.state_dict(), state)
    copied.update_priority(torch.tensor([0]), torch.tensor([90.0]))
    assert_same_state(replay.sampler.state_dict(), state)  # nothing is shared
    replay.buffer.update_priority(torch.tensor([0]), torch.tensor([90.0]))
    assert_continue_alike(replay, copied)


def test_a_fresh_sampler_can_be_pickled():
    sampler = pickle.loads(pickle.dumps(ProportionalSampler(8, alpha=0.3)))
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=sampler)
    buffer.extend(items(3))
    assert float(sampler.alpha) == pytest.approx(0.3)
    assert buffer.sample(4)["index"].max() < 3


# --- random numbers


def test_without_a_generator_the_global_one_is_used():
    buffer = buffer_of(32)
    buffer.extend(items(32))
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        drawn.append(buffer.sample(16)["index"])
    assert torch.equal(*drawn)


# --- with a loss


def test_dqn_loss_end_to_end():
    from torchrl.data import Categorical
    from torchrl.modules import QValueActor
    from torchrl.objectives import DQNLoss

    count, gamma = 24, 0.9
    network = nn.Linear(3, 2)
    actor = QValueActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["action_value"]), spec=Categorical(2)
    )
    loss = DQNLoss(actor, action_space="categorical", delay_value=False)
    loss.make_value_estimator(gamma=gamma)
    data = learnable(count, observation=3, done=0.2)
    with torch.no_grad():
        q = network(data["observation"]).gather(1, data["action"][:, None])
        value = network(data["next", "observation"]).amax(1, True)
        target = data["next", "reward"] + gamma * ~data["next", "terminated"] * value
        magnitude = (q - target).abs().squeeze(1).double() + 1e-6
    buffer = buffer_of(count, alpha=0.6)
    buffer.extend(data)
    updated = torch.zeros(count, dtype=torch.bool)
    while not updated.all():
        batch = buffer.sample(8)
        assert loss(batch)["loss"].isfinite()
        buffer.update_tensordict_priority(batch)
        updated[batch["index"]] = True
    expected = magnitude**0.6
    torch.testing.assert_close(probabilities(buffer), expected / expected.sum(), rtol=1e-3, atol=1e-6)


# --- statistics


@pytest.mark.parametrize("updates", [0, 3])
def test_stats_are_finite_scalars(updates):
    replay = ReplayWithReference("per", capacity=16, seed=8)
    replay.extend(10)
    for _ in range(updates):
        replay.update(replay.sample(4))
    assert_finite_stats(replay.sampler)


# --- bad input


@pytest.mark.parametrize("td_error", ["squared", "absolute"])
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), -float("inf")])
def test_bad_td_errors_name_the_first_offender(bad, td_error):
    buffer = filled(torch.ones(50), td_error=td_error)
    with Refuses(buffer, ValueError, r"index 37\b"):
        buffer.update_priority(torch.tensor([41, 37, 45]), torch.tensor([1.0, bad, bad]))


@pytest.mark.parametrize("shape", [(2,), (4,), (3, 2)])
def test_bad_shapes(shape):
    buffer = filled(torch.ones(5))
    with Refuses(buffer, ValueError, "TD errors"):
        buffer.update_priority(torch.tensor([0, 1, 2]), torch.ones(shape))


@pytest.mark.parametrize("index", [-9, 5, 1_000])
def test_bad_indices(index):
    buffer = filled(torch.ones(5))
    with Refuses(buffer, (ValueError, IndexError), rf"{index}\b.* out of range"):
        buffer.update_priority(torch.tensor([0, index]), torch.ones(2))


def test_an_index_that_was_never_written():
    buffer = buffer_of(5)
    buffer.extend(items(3))
    with Refuses(buffer, (ValueError, IndexError), r"\b4\b.* out of range"):
        buffer.update_priority(torch.tensor([0, 4]), torch.ones(2))


BAD_ARGUMENTS = [
    ("alpha", -0.1),
    ("alpha", float("nan")),
    ("alpha", float("inf")),
    ("beta", -0.1),
    ("beta", float("nan")),
    ("eps", -1e-6),
    ("eps", float("nan")),
    ("td_error", "square"),
    ("weight_norm", "maximum"),
]


@pytest.mark.parametrize(("name", "value"), BAD_ARGUMENTS)
def test_bad_arguments(name, value):
    with pytest.raises(ValueError, match=name):
        ProportionalSampler(8, **{name: value})


@pytest.mark.parametrize(("name", "value"), [bad for bad in BAD_ARGUMENTS if bad[0] in ("alpha", "beta")])
def test_bad_assignments(name, value):
    buffer = filled(torch.ones(5))
    with Refuses(buffer, ValueError, name):
        setattr(buffer.sampler, name, value)


@pytest.mark.parametrize("arguments", [(-0.1, 1.0, 10), (0.1, -1.0, 10), (0.1, float("nan"), 10)])
def test_bad_anneal(arguments):
    with pytest.raises(ValueError, match=r"alpha|Anneal"):
        ProportionalSampler(8, alpha=Anneal(*arguments))


@pytest.mark.parametrize("num_updates", [0, -3])
def test_anneal_needs_updates(num_updates):
    with pytest.raises(ValueError, match="num_updates"):
        Anneal(0.4, 1.0, num_updates)


@pytest.mark.parametrize("capacity", [0, -1])
def test_bad_capacity(capacity):
    with pytest.raises(ValueError, match="capacity"):
        ProportionalSampler(capacity)


def test_a_capacity_smaller_than_the_storage():
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), sampler=ProportionalSampler(4))
    with pytest.raises(ValueError, match="capacity"):
        buffer.extend(items(2))


def test_drawing_where_nothing_can_be_drawn():
    buffer = filled([0.0, 0.0, 0.0], alpha=0.5)
    with Refuses(buffer, RuntimeError, "eps"):
        buffer.sample(2)


def test_a_td_error_beyond_the_range_of_the_sums():
    buffer = filled(torch.ones(5), alpha=1.0)
    with Refuses(buffer, ValueError, r"index 3\b.*at most"):
        buffer.update_priority(torch.tensor([2, 3]), torch.tensor([1.0, 1e30]))


def test_a_graph_takes_the_root_of_squared_td_errors():
    buffer = buffer_of(64, compilable=True, batch_size=64, alpha=0.5, eps=0.25)
    buffer.extend(items(64))
    batch, error = buffer.sample(64), 4 * torch.rand(64)
    batch["td_error"] = error[batch["index"]]
    torch.compile(buffer.update_tensordict_priority, fullgraph=True)(batch)
    d = torch.ones(64, dtype=torch.float64)
    d[batch["index"]] = batch["td_error"].double().sqrt() + 0.25
    # tolerance for float32 after two roundings, with any vector width
    torch.testing.assert_close(probabilities(buffer), d.sqrt() / d.sqrt().sum(), rtol=1e-6, atol=0)
    buffer.sampler.check_valid()
