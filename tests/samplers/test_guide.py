"""The guide's sampler of one's own works in graphs and on accelerators."""

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


@pytest.fixture(scope="module")
def linear_sampler():
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "class Linear(" in block)
    # torch's compiler looks the names up in the module
    module = types.ModuleType("module_of_the_guide")
    sys.modules[module.__name__] = module
    exec(block, vars(module))
    return vars(module)["LinearSampler"]


def drive(rb, device):
    """Writes, updates with invalid rows, late rows and duplicates, and draws."""
    rb.extend(TensorDict({"number": torch.arange(6, device=device)}, [6], device=device))
    batch = rb.sample(64)
    assert (batch["priority_weight"] == 1).all()
    # slots 3 and 4 have no valid row, and the last row of slot 2 is invalid
    slots, error = [0, 1, 2, 0, 2, 3, 4, 2], [9.0, 2.0, 3.0, 1.0, 8.0, NAN, -1.0, NAN]
    rows = TensorDict({"index": torch.tensor(slots), "td_error": torch.tensor(error)}, [8]).to(device)
    rows["write_stamp"] = batch["write_stamp"][:1].repeat(8)
    rb.update_tensordict_priority(rows)
    assert rb.sampler.stats()["rejected_updates"] == 3
    # of the two valid rows of slots 0 and 2 the largest counts
    d = torch.tensor([9.0, 2, 8, 1, 1, 1])
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage).cpu(), (d / d.sum()).double())
    drawn = [rb.sample(64) for _ in range(10)]
    assert p_value(torch.cat([batch["index"] for batch in drawn]), d) > 1e-4
    assert all(torch.allclose(b["priority_weight"].cpu(), 1 / d[b["index"].cpu()]) for b in drawn)
    # an overwritten row, and the priority of a new one, which is the largest so far
    rb.extend(TensorDict({"number": torch.arange(6, 9, device=device)}, [3], device=device))
    rb.update_tensordict_priority(rows)
    assert rb.sampler.stats()["dropped_updates"] == 2
    d = torch.tensor([9.0, 2, 8, 1, 1, 1, 9, 9])
    torch.testing.assert_close(rb.sampler.probabilities(rb.storage).cpu(), (d / d.sum()).double())


def buffer(sampler, device="cpu"):
    return buffer_with(sampler, 8, compilable=True, device=device)


def test_in_graphs(linear_sampler):
    drive(as_graphs(buffer(linear_sampler(beta=1.0))), "cpu")


def test_td_errors_that_are_infinite_are_refused(linear_sampler):
    rb = buffer(linear_sampler())
    rb.extend(TensorDict({"number": torch.arange(6)}, [6]))
    with pytest.raises(ValueError, match=r"td_error|TD error"):
        rb.update_priority(torch.arange(2), torch.tensor([1.0, float("inf")]))


def test_on_an_accelerator(linear_sampler):
    with EmulatedDevice("torchrl_replay_ext", "tests"):
        drive(buffer(linear_sampler(beta=1.0), "emulated"), "emulated")
