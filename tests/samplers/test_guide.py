"""The guide's sampler of one's own works in all buffers, in graphs and on accelerators, and is saved."""

import copy
import re
import sys
import types
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import torchrl_replay_ext
from tests.chi_square import p_value
from tests.data import as_graphs, buffer_with
from tests.emulated_device import EmulatedDevice

GUIDE = (Path(torchrl_replay_ext.__file__).parent / "guide" / "own_sampler.md").read_text(encoding="utf-8")
NAN = float("nan")
# |reward| + 0.1 of the rows
SIZES = torch.tensor([1.0, 2.0, 3.0]).repeat(4)


@pytest.fixture(scope="module")
def reward_sampler():
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "class RewardSampler(" in block)
    # torch's compiler looks the names up in the module
    module = types.ModuleType("module_of_the_guide")
    sys.modules[module.__name__] = module
    exec(block, vars(module))
    return vars(module)["RewardSampler"]


def rows(first, count, device="cpu"):
    number = torch.arange(first, first + count)
    reward = -(number % 3 + 0.9).unsqueeze(1)
    return TensorDict({"number": number, "next": {"reward": reward}}, [count]).to(device)


def assert_drawn(rb, expected):
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage).cpu(), (expected / expected.sum()).double())
    drawn = torch.cat([rb.sample(64) for _ in range(10)])
    index = drawn["index"].cpu()
    assert p_value(index, expected) > 1e-4
    # each weight is divided by the largest of its batch
    weights = (drawn["priority_weight"].cpu() * expected[index]).view(10, 64)
    assert torch.allclose(weights, weights[:, :1].expand_as(weights))


def drive(rb, device, *, stamped=True):
    """Writes, updates with invalid rows, late rows and duplicates, and draws."""
    rb.extend(rows(0, 6, device))
    rb.sample(64)
    # slots 3 and 4 have no valid row, and the last row of slot 2 is invalid
    slots, error = [0, 1, 2, 0, 2, 3, 4, 2], [9.0, 2.0, 3.0, 1.0, 8.0, NAN, -1.0, NAN]
    update = TensorDict({"index": torch.tensor(slots), "td_error": torch.tensor(error)}, [8]).to(device)
    if stamped:
        update["write_stamp"] = rb.sample(8)["write_stamp"][:1].repeat(8)
    else:
        # eager code on the CPU refuses invalid rows
        update = update[~(update["td_error"].isnan() | (update["td_error"] < 0))]
    rb.update_tensordict_priority(update)
    assert rb.sampler.stats()["rejected_updates"] == 3 * stamped
    # of the two valid rows of slots 0 and 2 the largest counts
    d = torch.tensor([9.0, 2, 8, 1, 1, 1])
    assert_drawn(rb, d * SIZES[:6])
    # an overwritten row, and the priority of a new one, which is the largest so far
    rb.extend(rows(6, 3, device))
    if stamped:
        rb.update_tensordict_priority(update)
        assert rb.sampler.stats()["dropped_updates"] == 2
    d = torch.tensor([9.0, 2, 8, 1, 1, 1, 9, 9])
    assert_drawn(rb, d * SIZES[[8, *range(1, 8)]])


def buffer(sampler, device="cpu", *, compilable=True):
    return buffer_with(sampler, 8, compilable=compilable, device=device)


def test_in_graphs(reward_sampler):
    drive(as_graphs(buffer(reward_sampler(beta=1.0, td_error="absolute"))), "cpu")


def test_on_an_accelerator(reward_sampler):
    with EmulatedDevice("torchrl_replay_ext", "tests"):
        drive(buffer(reward_sampler(beta=1.0, td_error="absolute"), "emulated"), "emulated")


@pytest.mark.parametrize("compilable", [False, True])
def test_in_eager_code(reward_sampler, compilable):
    drive(buffer(reward_sampler(beta=1.0, td_error="absolute"), compilable=compilable), "cpu", stamped=False)


@pytest.mark.parametrize("error", [float("inf"), 1e30])
def test_td_errors_that_the_tree_cannot_hold_are_refused(reward_sampler, error):
    rb = buffer(reward_sampler(beta=0.4))
    rb.extend(rows(0, 6))
    before = rb.sampler.probabilities(rb.storage)
    with pytest.raises(ValueError, match=r"td_error|TD error"):
        rb.update_priority(torch.arange(2), torch.tensor([1.0, error]))
    assert torch.equal(rb.sampler.probabilities(rb.storage), before)


@pytest.mark.parametrize("known", [False, True])
def test_it_is_saved_copied_and_emptied(reward_sampler, known):
    rb, other = buffer(reward_sampler(beta=0.4)), buffer(reward_sampler(beta=1.0))
    rb.extend(rows(0, 6))
    rb.update_priority(torch.arange(6), torch.rand(6))
    if known:
        other.extend(rows(3, 4))
    other.load_state_dict(copy.deepcopy(rb.state_dict()))
    assert other.sampler.beta == 0.4
    for each in (other, copy.deepcopy(rb)):
        assert torch.equal(each.sampler.probabilities(each.storage), rb.sampler.probabilities(rb.storage))
        each.extend(rows(6, 4))
        assert not torch.equal(each.sampler.probabilities(each.storage)[:6], rb.sampler.probabilities(rb.storage))
    with pytest.raises(ValueError, match="another sampler"):
        rb.sampler.load_state_dict(torchrl_replay_ext.ProportionalSampler(8).state_dict())
    rb.empty()
    assert rb.sampler.stats()["num_items"] == 0
    with pytest.raises(RuntimeError, match="empty storage"):
        rb.sample(4)


def test_a_missing_entry_is_named(reward_sampler):
    with pytest.raises(KeyError, match=r"RewardSampler: the stored data has no entry \('next', 'reward'\)"):
        buffer(reward_sampler()).extend(TensorDict({"number": torch.arange(2)}, [2]))


def test_arguments_that_do_not_exist_are_refused(reward_sampler):
    with pytest.raises(TypeError, match=r"RewardSampler\(epsilon=...\): there is no such argument"):
        reward_sampler(epsilon=0.1)


def test_private_names_of_the_base_class_are_refused(reward_sampler):
    """Two attributes of one name in one object would be one."""

    class Counts(reward_sampler):
        def __init__(self):
            self._storage_writes = 3
            super().__init__()

    class Allocates(Counts):
        def __init__(self):
            self._saved_names = []
            reward_sampler.__init__(self)

    class Generates(Counts):
        def __init__(self):
            self._rng = None
            reward_sampler.__init__(self)

    class Plants(reward_sampler):
        def allocate(self, layout):
            super().allocate(layout)
            self._trees = torch.zeros(layout.size)

    makers = (Counts, "_storage_writes"), (Allocates, "_saved_names"), (Generates, "_rng"), (Plants, "_trees")
    for make, name in makers:
        with pytest.raises(TypeError, match=rf"{make.__name__}.{name}: the base class uses this name"):
            make()
    with pytest.raises(TypeError, match=r"Appends._append_rows: the base class uses this name"):

        class Appends(reward_sampler):
            def _append_rows(self):
                pass
