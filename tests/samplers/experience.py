"""Random experience in all supported layouts, written to a real buffer and to a naive reference."""

from __future__ import annotations

import copy
import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

import torchrl_replay_ext
from tests.reference import NaivePER, NaiveRanking, NaiveReaPER

LAYOUTS = ("single", "single_with_ids", "interleaved", "env_major", "uneven", "two_dim")
# the beginning of the warning that an episode was interrupted
INTERRUPTED = "A trajectory began before the last one had ended"


@dataclass
class Step:
    """One transition. ``episode`` is unique; ``traj_id`` is the id that a collector assigns."""

    episode: int
    traj_id: int
    terminated: bool = False
    truncated: bool = False


class Environments:
    """Environments with random ends of episodes, whose trajectory ids are numbered as by a collector."""

    def __init__(self, num_envs: int, rng: random.Random, end_probability: float = 0.2):
        self.num_envs, self.rng, self.end_probability = num_envs, rng, end_probability
        self.episodes_begun = 0
        self.ids_given = 0
        self.open: dict[int, Step] = {}  # environment -> the last step of its running episode
        self.has_restarted = False

    def step(self, env: int) -> Step:
        if env not in self.open:
            self.open[env] = Step(self.episodes_begun, self.ids_given)
            self.episodes_begun += 1
            self.ids_given += 1
        step = self.open[env] = Step(self.open[env].episode, self.open[env].traj_id)
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
    count = len(steps)
    terminated = torch.tensor([step.terminated for step in steps]).view(count, 1)
    truncated = torch.tensor([step.truncated for step in steps]).view(count, 1)
    td = TensorDict(
        {
            "observation": torch.arange(count, dtype=torch.float32)[:, None],
            "next": {"done": terminated | truncated, "terminated": terminated, "truncated": truncated},
        },
        [count],
    )
    if with_ids:
        td["collector", "traj_ids"] = torch.tensor([step.traj_id for step in steps])
    return td


class ReplayWithReference:
    """A ``TensorDictReplayBuffer`` and the naive reference of its sampler, with the same operations."""

    def __init__(
        self, kind, *, layout="single", capacity=16, num_envs=1, seed=0, end_probability=0.2, buffer=None, **sampler
    ):
        self.layout, self.rng = layout, random.Random(seed)
        self.num_envs = 1 if layout.startswith("single") else num_envs
        self.environments = Environments(self.num_envs, self.rng, end_probability)
        self.capacity = max(capacity // self.num_envs, 1) * self.num_envs  # a whole number of time steps
        self.rows = self.capacity // self.num_envs if layout == "two_dim" else self.capacity
        self.cursor = 0
        self.squared = sampler.get("td_error", "squared") == "squared"
        if kind == "per":
            self.sampler = torchrl_replay_ext.ProportionalSampler(self.capacity, **sampler)
            sampler.pop("stratified", None)
            self.reference = NaivePER(**sampler)
        elif kind == "rank":
            self.sampler = torchrl_replay_ext.RankBasedSampler(self.capacity, **sampler)
            self.reference = NaiveRanking(**sampler)
        else:
            lanes = {"num_streams": self.num_envs} if layout in ("interleaved", "env_major", "uneven") else {}
            self.sampler = torchrl_replay_ext.ReaPERSampler(self.capacity, **sampler, **lanes)
            self.reference = NaiveReaPER(**sampler)
        storage = LazyTensorStorage(self.capacity, ndim=2 if layout == "two_dim" else 1)
        self.buffer = TensorDictReplayBuffer(storage=storage, sampler=self.sampler, **(buffer or {}))

    # --- writing

    def extend(self, count: int) -> None:
        """Write ``count`` transitions, or ``count`` time steps of every environment, in one chunk."""
        step, envs = self.environments.step, range(self.num_envs)
        if self.layout == "two_dim":
            count = max(count, 2)  # TorchRL raises after writing an [E, 1] batch: it mistakes [E, 2] for E flat indices
            frames = [[step(env) for env in envs] for _ in range(count)]
            with self.environments.writing():
                self.buffer.extend(torch.stack([transitions(frame) for frame in frames], 1))
            for frame in frames:
                for env, taken in enumerate(frame):
                    self._tell(self.cursor * self.num_envs + env, taken)
                self.cursor = (self.cursor + 1) % self.rows
            return
        if self.layout == "uneven":
            activity = [1.0 / (1 + env) ** 2 for env in envs]
            steps = [step(self.rng.choices(envs, activity)[0]) for _ in range(count)]
            if count > self.rows:
                steps += [step(env) for env in envs]
        else:
            frames = [[step(env) for env in envs] for _ in range(count)]
            if self.layout == "env_major":
                frames = zip(*frames, strict=True)
            steps = [taken for frame in frames for taken in frame]
        if len(steps) > self.rows:
            self.environments.end_unseen(steps, self.rows)
        with self.environments.writing():
            self.buffer.extend(transitions(steps, with_ids=self.layout != "single"))
        for taken in steps:
            self._tell(self.cursor, taken)
            self.cursor = (self.cursor + 1) % self.rows

    def add(self) -> None:
        """Write one transition with ``add`` if the layout allows it."""
        if self.layout in ("two_dim", "env_major", "interleaved"):
            return self.extend(1)
        taken = self.environments.step(self.rng.randrange(self.num_envs))
        with self.environments.writing():
            self.buffer.add(transitions([taken], with_ids=self.layout != "single")[0])
        self._tell(self.cursor, taken)
        self.cursor = (self.cursor + 1) % self.rows

    def _tell(self, slot: int, step: Step) -> None:
        self.reference.write(slot, step.episode, step.terminated, step.truncated)

    def restart_collector(self) -> None:
        """Continue with a new collector, whose first steps all fit into the buffer."""
        if self.layout == "single" or (self.layout == "two_dim" and self.rows < 2):
            return
        self.environments.restart()
        self.extend(1)

    def empty(self) -> None:
        self.buffer.empty()
        self.reference.empty()
        self.environments.restart()
        self.cursor = 0

    # --- priorities

    def random_td_errors(self, count: int) -> torch.Tensor:
        """TD errors with magnitudes between 0.01 and 10, squared if the sampler expects this."""
        absolute = torch.tensor([10 ** self.rng.uniform(-2.0, 1.0) for _ in range(count)])
        return absolute.square() if self.squared else absolute

    def sample(self, batch_size: int) -> TensorDict:
        """Sample a batch, with an entry that identifies the transitions for the reference.

        Call :meth:`update` for it before :meth:`update_directly`: if a sampled slot was overwritten, the buffer would
        apply an update by index to the sampled transition.
        """
        batch = self.buffer.sample(batch_size)
        batch["stamp"] = torch.tensor(self.reference.stamps(self.slots(batch["index"])))
        return batch

    def slots(self, index: torch.Tensor) -> list[int]:
        """The slots for an index of the buffer."""
        return (index[:, 0] * self.num_envs + index[:, 1] if self.layout == "two_dim" else index).tolist()

    def update(self, batch: TensorDict) -> None:
        """Update the priorities of a sampled batch."""
        td_error = self.random_td_errors(len(batch))
        batch["td_error"] = td_error
        self.buffer.update_tensordict_priority(batch)
        self.reference.update(self.slots(batch["index"]), td_error.tolist(), batch["stamp"].tolist())

    def update_directly(self, count: int) -> None:
        """Update the priorities of ``count`` random slots by index, with duplicates."""
        slots = torch.tensor([self.rng.randrange(len(self.reference.transitions)) for _ in range(count)])
        index = torch.stack([slots // self.num_envs, slots % self.num_envs], -1) if self.layout == "two_dim" else slots
        td_error = self.random_td_errors(count)
        self.buffer.update_priority(index, td_error)
        self.reference.update(slots.tolist(), td_error.tolist())

    # --- comparing

    def probabilities(self) -> torch.Tensor:
        return self.sampler.probabilities(self.buffer.storage)

    def check(self, rtol: float = 1e-4, atol: float = 1e-9) -> None:
        """Check the sampler, and the probabilities of the buffer against the reference."""
        self.sampler.check_valid()
        probabilities = self.probabilities()
        expected = torch.tensor(self.reference.probabilities(), dtype=torch.float64)
        assert probabilities.dtype == torch.float64
        if isinstance(self.reference, NaiveRanking):
            bucket = torch.tensor(self.reference.buckets())
            probabilities, expected = sorted_within(bucket, probabilities), sorted_within(bucket, expected)
        torch.testing.assert_close(probabilities, expected, rtol=rtol, atol=atol)

    def random_operation(self) -> None:
        """Perform a random operation."""
        if not self.reference.transitions:
            return self.extend(self.rng.randint(1, 4))
        operation = self.rng.random()
        if operation < 0.3:
            self.extend(self.rng.randint(1, 5))
        elif operation < 0.4:
            self.add()
        elif operation < 0.7:
            self.update(self.sample(self.rng.randint(1, 6)))
        elif operation < 0.8:
            batch = self.sample(self.rng.randint(1, 6))
            self.extend(self.rng.randint(1, 5))
            self.update(batch)
        elif operation < 0.94:
            self.update_directly(self.rng.randint(1, 6))
        elif operation < 0.97:
            self.restart_collector()
        else:
            self.extend(self.rows + self.rng.randint(1, 7))


def probabilities(buffer) -> torch.Tensor:
    """The probability of each stored transition."""
    return buffer.sampler.probabilities(buffer.storage)


def sorted_within(group: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """``numbers`` [n], in order of their ``group`` [n] and sorted within it."""
    numbers, order = numbers.sort()
    return numbers[group[order].argsort(stable=True)]


def assert_priorities(buffer, priority: torch.Tensor, alpha: float = 1.0) -> None:
    """P ∝ d^α of all stored transitions, with d in ``priority`` [len(buffer)]."""
    expected = priority.double() ** alpha
    torch.testing.assert_close(probabilities(buffer), expected / expected.sum(), rtol=1e-5, atol=1e-9)


def assert_same_state(state: dict, expected: dict) -> None:
    """Check that two state_dicts are bitwise equal."""
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            assert_same_state(state[key], value)
        elif isinstance(value, torch.Tensor):
            # slots that were never written may hold NaN
            torch.testing.assert_close(state[key], value, rtol=0, atol=0, equal_nan=True, msg=key)
        else:
            assert state[key] == value, key


def assert_finite_stats(sampler) -> None:
    """Check that the statistics are finite scalars in a TensorDict without batch dimensions."""
    statistics = sampler.stats()
    assert isinstance(statistics, TensorDict) and statistics.batch_size == ()
    leaves = dict(statistics.items(include_nested=True, leaves_only=True))
    assert leaves
    for name, value in leaves.items():
        assert value.shape == () and torch.isfinite(value.double()), name


class Refuses:
    """Expect an error and an unchanged sampler."""

    def __init__(self, buffer, error, match):
        self.buffer, self.expectation = buffer, pytest.raises(error, match=match)

    def __enter__(self):
        self.state = copy.deepcopy(self.buffer.sampler.state_dict())
        self.expectation.__enter__()

    def __exit__(self, *raised):
        caught = self.expectation.__exit__(*raised)
        assert_same_state(self.buffer.sampler.state_dict(), self.state)
        return caught
