"""Random experience, and comparisons of buffers."""

from __future__ import annotations

import copy
import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict

from tests.data import rows

# the beginning of the warning that an episode was interrupted
INTERRUPTED = "A trajectory began before the last one had ended"


@dataclass
class Step:
    """One transition. ``episode`` is unique; ``traj_id`` is the id that a collector assigns."""

    episode: int
    traj_id: int
    terminated: bool = False
    truncated: bool = False
    initial: bool = False


class Environments:
    """Environments with random ends of episodes, whose trajectory ids are numbered as by a collector."""

    def __init__(self, num_envs: int, rng: random.Random, end_probability: float = 0.2):
        self.num_envs, self.rng, self.end_probability = num_envs, rng, end_probability
        self.episodes_begun = 0
        self.ids_given = 0
        self.open: dict[int, Step] = {}  # environment -> the last step of its running episode
        self.has_restarted = False

    def step(self, env: int) -> Step:
        initial = env not in self.open
        if initial:
            self.open[env] = Step(self.episodes_begun, self.ids_given)
            self.episodes_begun += 1
            self.ids_given += 1
        step = self.open[env] = Step(self.open[env].episode, self.open[env].traj_id, initial=initial)
        if self.rng.random() < self.end_probability:
            kind = self.rng.choice(["terminated", "truncated", "both"])
            step.terminated, step.truncated = kind != "truncated", kind != "terminated"
            del self.open[env]
        return step

    def restart(self) -> None:
        """Start a new collector. Ids start at 0 again unless there are unfinished episodes, which do not go on."""
        self.has_restarted |= len(self.open) > 0
        if not self.has_restarted:
            self.ids_given = 0
        self.open.clear()

    def load(self) -> None:
        """Start a new collector for a buffer that is loaded, which expects no episode to go on; with any ids."""
        self.open.clear()
        self.has_restarted, self.ids_given = False, self.rng.randint(0, self.ids_given)

    def end_unseen(self, written: list[Step], visible: int) -> None:
        """End unfinished episodes that are not in the last ``visible`` steps of a chunk larger than the buffer."""
        seen = {step.episode for step in written[-visible:]}
        for env, step in list(self.open.items()):
            if step.episode not in seen:
                step.truncated = True
                del self.open[env]

    @contextmanager
    def writing(self):
        """Ignores the warning of episodes that are interrupted, if there may be any."""
        with warnings.catch_warnings():
            if self.has_restarted:
                warnings.filterwarnings("ignore", INTERRUPTED)
            yield


def transitions(steps: list[Step], with_ids: bool = True) -> TensorDict:
    """The data of ``steps`` as a collector returns it, [len(steps)]."""
    terminated = [place for place, step in enumerate(steps) if step.terminated]
    truncated = [place for place, step in enumerate(steps) if step.truncated]
    ids = [step.traj_id for step in steps] if with_ids else None
    return rows(len(steps), done=terminated, truncated=truncated, ids=ids)


def probabilities(buffer) -> torch.Tensor:
    """The probability of each stored transition."""
    return buffer.sampler.probabilities(buffer.storage)


def sorted_within(group: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` [n], in order of their ``group`` [n] and sorted within it."""
    numbers, order = numbers.sort()
    return numbers[group[order].argsort(stable=True)]


def assert_priorities(buffer, priority: torch.Tensor | list[float], alpha: float = 1.0) -> None:
    """P ∝ d^α of all stored transitions, with d in ``priority`` [len(buffer)]."""
    expected = torch.as_tensor(priority, dtype=torch.float64) ** alpha
    torch.testing.assert_close(probabilities(buffer), expected / expected.sum(), rtol=1e-5, atol=1e-9)


def assert_draws_as_rebuilt(buffer) -> None:
    """Draws and probabilities are those of a copy that has derived all sums and orders from the saved state."""
    found = []
    for is_rebuilt in (False, True):
        sampler = copy.deepcopy(buffer.sampler)
        if is_rebuilt:
            sampler.load_state_dict(buffer.sampler.state_dict())
        if not len(buffer):
            continue
        sampler._rng = torch.Generator().manual_seed(0)
        found.append([sampler.probabilities(buffer.storage)])
        if bool(found[-1][0].sum() > 0):
            index = sampler.sample(buffer.storage, 8 * getattr(sampler, "slice_len", 1))[0]
            found[-1].append(torch.stack(index, -1) if isinstance(index, tuple) else index)
    if found:
        torch.testing.assert_close(*found, rtol=1e-9, atol=0)


def assert_same_state(state: dict, expected: dict) -> None:
    """Check that two state_dicts are bitwise equal."""
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_state(state[key], value)
        elif isinstance(value, torch.Tensor):
            # slots that were never written may hold NaN; a state that is loaded moves to its device at the first use
            torch.testing.assert_close(state[key].cpu(), value.cpu(), rtol=0, atol=0, equal_nan=True, msg=key)
        else:
            assert state[key] == value, key


class Refuses:
    """Expect an error and an unchanged sampler, or other unchanged parts of a buffer."""

    def __init__(self, buffer, error, match, parts=("sampler",)):
        self.buffer, self.expectation, self.parts = buffer, pytest.raises(error, match=match), parts

    def __enter__(self):
        self.before = self.found()
        self.expectation.__enter__()

    def __exit__(self, *raised):
        caught = self.expectation.__exit__(*raised)
        for part, before in zip(self.found(), self.before, strict=True):
            assert_same_state(part, before)
        return caught

    def found(self):
        # the call may set the shape of an empty storage
        stored = int(self.buffer.sampler.stats()["num_items"])
        parts = [getattr(self.buffer, part) for part in self.parts] if stored else []
        return [{"stored": stored}, *copy.deepcopy([part.state_dict() for part in parts])]
