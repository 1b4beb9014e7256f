"""Saved states with damaged entries: they are refused and change nothing, or the buffer works with what they hold.

``python -m tests.test_damaged_states SEED COUNT [CASE]`` repeats a run.
"""

from __future__ import annotations

import copy
import math
import random
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data import linear_policy
from tests.operations import CASES, Driven
from tests.samplers.experience import assert_same_state
from torchrl_replay_ext import DecoupledSampler
from torchrl_replay_ext.writers.round_robin import bind_samplers

# what a load may raise
REFUSED = (ValueError, KeyError, TypeError)
# the errors of draws that find nothing
NOTHING_TO_DRAW = "all priorities are 0|no stored episode has|cannot sample from an empty storage"
# what the first use may raise that finds out what the storage holds
NOT_STORED = "but the storage holds"
# an entry that decides where the next rows belong; nothing else in a state says so
FREE = ["last_step"]
KINDS = ["bits", "bits", "bits", "number", "number", "swap", "shape", "dtype", "other"]


# --- damage


def entries(state: Any, path: tuple = ()) -> list[tuple]:
    """The paths of all tensors and numbers in a state."""
    if isinstance(state, dict):
        return [found for key in state for found in entries(state[key], (*path, key))]
    return [path] if isinstance(state, (Tensor, int, float)) and not isinstance(state, bool) else []


def damage(state: Any, rng: random.Random) -> tuple[str, str]:
    """Damage a random entry of a state in place; returns its key, and what was done."""
    *parents, key = path = rng.choice(entries(state))
    for parent in parents:
        state = state[parent]
    value, kind = state[key], rng.choice(KINDS)
    if not isinstance(value, Tensor):
        state[key] = rng.choice([-1, 2**40, value + 1, math.nan, "text", None])
        return key, f"{path} = {state[key]!r}"
    if key == "storage_shape":
        # another shape is refused later, when the sampler is used with the storage
        kind = "dtype"
    if kind in ("bits", "number", "swap") and not value.numel():
        kind = "shape"
    if kind == "bits":
        data = value.contiguous().reshape(-1).view(torch.uint8)
        for place in rng.choices(range(len(data)), k=rng.randint(1, 3)):
            data[place] ^= 1 if value.dtype == torch.bool else 1 << rng.randrange(8)
        state[key] = data.view(value.dtype).reshape(value.shape)
    elif kind == "number":
        numbers = [0, 1, -1, -2, 7, value.numel(), value.numel() + 1]
        if value.dtype.is_floating_point:
            numbers += [math.nan, math.inf, -math.inf, 1e30, -1e-30]
        elif value.dtype != torch.bool:
            numbers += [torch.iinfo(value.dtype).max, torch.iinfo(value.dtype).min]
        chosen = rng.choices(range(value.numel()), k=rng.randint(1, 3))
        value.view(-1)[chosen] = torch.tensor(rng.choice(numbers), dtype=value.dtype)
    elif kind == "swap":
        one, other = rng.randrange(value.numel()), rng.randrange(value.numel())
        value.view(-1)[[one, other]] = value.view(-1)[[other, one]]
    elif kind == "shape":
        longer = torch.cat([value.reshape(-1), value.new_zeros(rng.randint(1, 3))])
        state[key] = rng.choice(
            [value[:-1] if value.ndim else value.repeat(2), longer, value.unsqueeze(0), value[None]]
        )
    elif kind == "dtype":
        state[key] = value.to(rng.choice([torch.float64, torch.float16, torch.int32, torch.int8, torch.bool]))
    elif rng.random() < 0.5:
        del state[key]
    else:
        state[key] = rng.choice([None, "text", 3, [1, 2]])
    return key, f"{path}: {kind}"


# --- a buffer with such a state


class Damaged(Driven):
    """Random operations on a buffer whose state was damaged; only indices and weights are checked."""

    # the model of event tables does not end the episodes that a load ends
    OPERATIONS = tuple(operation for operation in Driven.OPERATIONS if operation[1] != "go_on_with_a_copy")
    # key of the damaged entry
    damaged = ""

    def __init__(self, name: str, seed: int):
        self.on_load = random.Random(seed).choice(["truncate", "continue"])
        super().__init__(name, seed)
        # the reference goes on in the middle of episodes
        self.reference = None

    def work(self) -> None:
        """Draw, update and write."""
        capacity, size = self.setting.capacity, self.batch_size()
        for count in (2, 1, capacity + 1, 3):
            for _ in range(2):
                try:
                    batch = self.buffer.sample(size)
                except RuntimeError as error:
                    assert any(part in str(error) for part in NOTHING_TO_DRAW.split("|")), error
                    continue
                index = torch.as_tensor(self.slots(batch["index"]))
                assert bool(((index >= 0) & (index < len(self.buffer))).all()), index
                weight = batch.get("priority_weight", torch.ones(1))
                assert bool(((weight >= 0) & (weight <= 1 + 1e-6)).all()), weight
                batch["td_error"] = torch.rand(len(batch))
                self.buffer.update_tensordict_priority(batch)
                self.check()
            self.write(count)
            self.check()
        for value in self.buffer.sampler.stats().values():
            assert not bool(value.isnan())

    def check(self) -> None:
        """Parts of the state do not contradict each other, unless the damage cannot be known before a write."""
        if self.damaged not in FREE:
            self.buffer.sampler.check_valid()

    def write(self, count: int) -> None:
        """Write ``count`` steps; their trajectories are new to the buffer."""
        if self.setting.ndim == 2:
            count = max(count, 2)
        self.environments.restart()
        _, data = self.chunk(count)
        with self.environments.writing():
            try:
                self.buffer.extend(data)
            except ValueError as error:
                assert "more simultaneous trajectories" in str(error) or "alternate in the same" in str(error), error


def load(part: Any, state: Any) -> Exception | None:
    """Load a state; returns the error if it is refused, in which case nothing may change."""
    before = copy.deepcopy(part.state_dict())
    try:
        part.load_state_dict(state)
    except REFUSED as error:
        assert len(str(error)) > 20, f"unclear: {error!r}"
        # a writer with tables lets the sampler use the storage after its own load
        if NOT_STORED not in str(error):
            assert_same_state(part.state_dict(), before)
        return error
    return None


def load_all(buffer: Any, state: dict[str, Any]) -> str | None:
    """Load a state as buffers do, and use the sampler; returns the part that refuses the state."""
    buffer.storage.load_state_dict(state["_storage"])
    for name, part in (("_sampler", buffer.sampler), ("_writer", buffer.writer)):
        error = load(part, state[name])
        if error is not None:
            return "_sampler" if NOT_STORED in str(error) else name
    try:
        bind_samplers(buffer.storage)
    except ValueError as error:
        assert NOT_STORED in str(error), error
        return "_sampler"
    return None


def donor(name: str, seed: int) -> tuple[Damaged, dict[str, Any]]:
    """A buffer in use, and its state."""
    torch.manual_seed(seed)
    used = Damaged(name, seed)
    for _ in range(60):
        used.operate()
    used.operate("extend")
    return used, copy.deepcopy(used.buffer.state_dict())


def attempt(used: Damaged, whole: dict[str, Any], seed: str) -> bool:
    """Load a damaged copy of the state ``whole`` into a buffer, which then has to work; False if it was refused."""
    rng = random.Random(seed)
    torch.manual_seed(rng.randrange(2**32))
    driven = copy.copy(used)
    # a new buffer, or one in use
    driven.buffer = used.make() if rng.random() < 0.7 else copy.deepcopy(used.buffer)
    driven.environments, driven.frames = copy.deepcopy((used.environments, used.frames))
    driven.environments.rng = driven.rng = rng
    if isinstance(driven.buffer.sampler, DecoupledSampler):
        driven.buffer.sampler.policy = linear_policy()
    state = copy.deepcopy(whole)
    which = "_sampler" if rng.random() < 0.7 or not used.sampler_has_tables else "_writer"
    driven.damaged, what = damage(state[which], rng)
    print(which, what, flush=True)
    refused = load_all(driven.buffer, state)
    assert refused in (None, which), refused
    if refused:
        driven.damaged = ""
        assert load_all(driven.buffer, copy.deepcopy(whole)) is None
    driven.work()
    return refused is None


def run(seed: int, count: int, names: list[str], *, per_buffer: int = 25) -> None:
    """Damage ``count`` states, ``per_buffer`` of each buffer."""
    accepted = 0
    for number in range(count):
        if number % per_buffer == 0:
            chosen = seed + number // per_buffer
            name = names[chosen % len(names)]
            print(f"{name!r}, seed {chosen}", flush=True)
            used, whole = donor(name, chosen)
        print(number, end=": ", flush=True)
        accepted += attempt(used, whole, f"{chosen}, {number % per_buffer}")
    print(f"{accepted} of {count} damaged states were accepted")


@pytest.mark.filterwarnings("ignore")
def test_some_damaged_states():
    run(0, 3 * len(CASES), [*CASES], per_buffer=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1400, 40))
def test_ten_thousand_damaged_states(seed):
    """Run in another process, whose crash is a failure of this one."""
    command = [sys.executable, "-m", "tests.test_damaged_states", str(seed), "1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = "\n".join(done.stdout.splitlines()[-2:])
    assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode} at\n{last}\n{done.stderr[-3000:]}"
    print(last)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] or [*CASES])
