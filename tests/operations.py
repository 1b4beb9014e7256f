"""Random operations on a replay buffer, including invalid calls and checkpoints, compared to a plain-Python model."""

from __future__ import annotations

import copy
import math
import pickle
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.data import linear_policy
from tests.events import NaiveTables
from tests.reference import NaivePER, NaiveReaPER
from tests.samplers.experience import Environments, assert_same_state, transitions
from torchrl_replay_ext import (
    CompilableReplayBuffer,
    CompilableTensorStorage,
    DecoupledSampler,
    EventSpec,
    EventTables,
    EventTableSampler,
    EventTableWriter,
    FrameStackStorage,
    ProportionalSampler,
    RankBasedSampler,
    ReaPERSampler,
    RecencySampler,
    TrajectoryRetraceSampler,
)
from torchrl_replay_ext.writers.round_robin import CompilableWriter

HISTORY = {"a": (3, "a"), "b": (2, "b")}
SLICE = 3
DEPTH = 2


@dataclass(frozen=True)
class Setting:
    """The random configuration of a buffer.

    Args:
        capacity: capacity of the buffer; with pinned tables, capacity of the default table.
        num_envs: number of environments; if there are several in flat storage, the data has trajectory ids.
        ndim: number of dimensions of the storage.
        compilable: True for the compilable classes of buffer and storage.
        seed: seed of the arguments and of the buffer.
    """

    capacity: int
    num_envs: int
    ndim: int
    compilable: bool
    seed: int


@dataclass(frozen=True)
class Case:
    """A kind of buffer.

    Args:
        parts: creates sampler and writer from a capacity, a number of streams, a random generator and ``validate``.
        reference: class of the naive sampler for comparison, if there is one.
        ndims: supported numbers of dimensions of the storage.
        pinned: True for event tables with retention="pinned".
        frames: True if the storage stores each frame once.
        ranked: True if draws are by rank, so a TD error cannot be too large.
    """

    parts: Callable[[int, int, random.Random, bool], dict[str, Any]]
    reference: type | None = None
    ndims: tuple[int, ...] = (1, 2)
    pinned: bool = False
    frames: bool = False
    ranked: bool = False


def proportional(capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any) -> dict[str, Any]:
    choices = {"td_error": rng.choice(["squared", "absolute"]), "weight_norm": rng.choice(["buffer", "batch"])}
    sampler = ProportionalSampler(capacity, stratified=rng.random() < 0.5, validate=validate, **choices)
    return {"sampler": sampler, "choices": choices}


def rank(capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any) -> dict[str, Any]:
    choices = {"segments": rng.choice(["exact", "piecewise"]), "weight_norm": rng.choice(["buffer", "batch"])}
    choices |= {"stratified": rng.random() < 0.5, "validate": validate}
    return {"sampler": RankBasedSampler(capacity, **choices)}


def reaper(capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any) -> dict[str, Any]:
    choices = {"td_error": rng.choice(["squared", "absolute"]), "weight_norm": rng.choice(["buffer", "batch"])}
    choices["truncated"] = rng.choice(["finished", "ongoing"])
    sampler = ReaPERSampler(capacity, num_streams=streams, on_load=on_load, validate=validate, **choices)
    return {"sampler": sampler, "choices": choices}


def recency(capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any) -> dict[str, Any]:
    choices = {"half_life": rng.choice([0.5, 3, math.inf]), "beta": rng.choice([0.0, 0.5])}
    return {"sampler": RecencySampler(capacity, validate=validate, **choices)}


def events(
    kind: str | None, retention: str, capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any
) -> dict[str, Any]:
    specs = [EventSpec(name, ("next", name), history, table=table) for name, (history, table) in HISTORY.items()]
    sizes = {"a": max(capacity // 2, 3), "b": 4}
    if retention == "pinned":
        sizes["default"] = capacity
    tables = EventTables(specs, sizes, retention=retention)
    priority: dict[str, Any] | None = None if kind is None else {"kind": kind}
    if kind == "reaper":
        priority |= {"num_streams": streams, "on_load": on_load}
    corrections = [None, "mixture"]
    if kind is None and retention == "ring":
        corrections += ["conditional", "lemma2", "priority"]
    sampler = EventTableSampler(
        tables,
        eta={"default": 0.5, "a": 0.3, "b": 0.2},
        min_size=rng.choice([1, 3]),
        allocation=rng.choice(["systematic", "multinomial", "largest_remainder"]),
        correction=rng.choice(corrections),
        priority=priority,
        pair_keys=("observation",),
        validate=validate,
    )
    return {"sampler": sampler, "writer": EventTableWriter(tables, on_load=on_load)}


def decoupled(capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any) -> dict[str, Any]:
    parts = proportional(capacity, streams, rng, validate, on_load)
    arguments = {
        "granularity": rng.choice(["batch", "transition"]),
        "candidate_sampler": RecencySampler(capacity, half_life=2) if rng.random() < 0.5 else None,
    }
    decoupled = DecoupledSampler(parts["sampler"], linear_policy(), num_candidates=2, **arguments)
    return parts | {"sampler": decoupled}


def slices(
    anchors: Callable[..., Any] | None, capacity: int, streams: int, rng: random.Random, validate: bool, on_load: Any
) -> dict[str, Any]:
    drawn_by = "uniform" if anchors is None else anchors(capacity, streams, rng, validate, on_load)["sampler"]
    pad = anchors is not None or rng.random() < 0.7
    sampler = TrajectoryRetraceSampler(
        capacity,
        slice_len=SLICE,
        num_streams=streams,
        behaviour_keys=(),
        on_load=on_load,
        anchors=drawn_by,
        pad=pad,
        validate=validate and anchors is None,
    )
    return {"sampler": sampler}


# add one line for each new sampler
CASES = {
    "proportional": Case(proportional, NaivePER),
    "rank": Case(rank, ranked=True),
    "reaper": Case(reaper, NaiveReaPER),
    "recency": Case(recency),
    "tables": Case(partial(events, None, "ring")),
    "tables, pinned": Case(partial(events, None, "pinned"), ndims=(1,), pinned=True),
    "tables, proportional": Case(partial(events, "proportional", "ring")),
    "tables, proportional, pinned": Case(partial(events, "proportional", "pinned"), ndims=(1,), pinned=True),
    "tables, rank": Case(partial(events, "rank", "ring"), ranked=True),
    "tables, reaper": Case(partial(events, "reaper", "ring")),
    "decoupled": Case(decoupled, NaivePER),
    "slices": Case(partial(slices, None)),
    "slices, proportional": Case(partial(slices, proportional)),
    "slices, reaper": Case(partial(slices, reaper)),
    "frames": Case(proportional, NaivePER, ndims=(1,), frames=True),
    "frames, slices": Case(partial(slices, rank), ndims=(1,), frames=True, ranked=True),
}


class Refused(Exception):
    """An invalid operation raised no error."""


class Driven:
    """A buffer and a model of its expected content, on which random operations are performed.

    Args:
        name: name of the case.
        seed: seed of the setting and of all operations.
        device: device of the storage. On another device than the CPU, half of the writes bring CPU data.
        validate: True if invalid input raises errors on all devices.
        buffer: further arguments of the buffer.
    """

    # a copy from a checkpoint goes on in the middle of episodes, as the reference does
    on_load = "continue"

    def __init__(self, name: str, seed: int, device: str = "cpu", validate: bool = False, **buffer: Any):
        self.arguments, self.device, self.validate = buffer, device, validate
        self.case, rng = CASES[name], random.Random(seed)
        self.rng = rng
        num_envs, ndim = rng.choice([1, 1, 2, 3]), rng.choice(self.case.ndims)
        steps = rng.randint(2, 7) if ndim == 2 else rng.randint(4, 24)
        capacity = steps * num_envs if ndim == 2 else steps
        compilable = rng.random() < 0.5
        self.setting = Setting(capacity, num_envs, ndim, compilable, rng.randrange(2**31))
        self.buffer = self.make()
        self.environments = Environments(num_envs, rng, rng.choice([0.05, 0.3]))
        self.reference = self.make_reference()
        self.rows = capacity // num_envs if ndim == 2 else capacity
        self.written = 0
        self.frames: dict[int, list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Reset the model to an empty buffer."""
        self.cursor = 0
        # number of the transition in each slot, and observation of each transition
        self.content: dict[int, int] = {}
        self.observed: dict[int, torch.Tensor] = {}
        self.length = 0
        self.late: list[tuple[TensorDict, list[int]]] = []
        self.tables = None
        if self.sampler_has_tables:
            tables = self.tables_of()
            names = [name for name in tables.names if self.case.pinned or name != "default"]
            sizes = {name: tables[name].capacity for name in names}
            specs = [(name, history, table) for name, (history, table) in HISTORY.items()]
            self.tables = NaiveTables(specs, sizes, None if self.case.pinned else self.setting.capacity)
            self.number_of: list[int] = []

    # --- parts

    def make(self) -> Any:
        """Create the buffer of this setting."""
        setting = self.setting
        rng, capacity = random.Random(setting.seed), setting.capacity
        parts = self.case.parts(
            capacity, setting.num_envs if setting.ndim == 1 else 1, rng, self.validate, self.on_load
        )
        tables = parts["writer"].tables if self.case.pinned else None
        size = capacity if tables is None else sum(tables[name].capacity for name in tables)
        compilable = setting.compilable
        if self.case.frames:
            storage: Any = FrameStackStorage(size, frame_capacity=4 * size + 8, device=self.device)
        else:
            storage_class = CompilableTensorStorage if compilable else LazyTensorStorage
            storage = storage_class(size, ndim=setting.ndim, device=self.device)
        make = CompilableReplayBuffer if compilable else TensorDictReplayBuffer
        # the arguments that the reference needs too
        self.choices = parts.pop("choices", {})
        buffer = make(storage=storage, **parts, **self.arguments)
        buffer.set_rng(torch.Generator().manual_seed(setting.seed))
        return buffer

    def make_reference(self) -> Any:
        """Create the naive sampler of this setting."""
        if self.case.reference is None:
            return None
        return self.case.reference(**self.choices)

    @property
    def sampler(self) -> Any:
        """The sampler that has the priorities."""
        sampler = self.buffer.sampler
        return getattr(sampler, "critic_sampler", sampler)

    @property
    def priorities(self) -> Any:
        """The object that has the exponents; "uniform" for slices without priorities."""
        return getattr(self.sampler, "anchors", self.sampler)

    @property
    def sampler_has_tables(self) -> bool:
        return isinstance(self.buffer.sampler, EventTableSampler)

    def tables_of(self) -> EventTables:
        return self.buffer.writer.tables

    # --- writing

    def chunk(self, count: int) -> tuple[list[Any], TensorDict]:
        """Collect ``count`` steps, of each environment if the storage has columns; data of shape [E, T] or [n]."""
        envs, setting = range(self.setting.num_envs), self.setting
        step = self.environments.step
        if setting.ndim == 2:
            frames = [[step(env) for env in envs] for _ in range(count)]
            steps = [taken for frame in frames for taken in frame]
        else:
            steps = [step(self.rng.choice(envs)) for _ in range(count)]
            if count > self.rows and not self.sampler_has_tables:
                self.environments.end_unseen(steps, self.rows)
        with_ids = setting.num_envs > 1 and setting.ndim == 1
        data = transitions(steps, with_ids=with_ids)
        numbers = torch.arange(self.written, self.written + len(steps))
        self.written += len(steps)
        data["number"] = numbers
        data["action"] = torch.rand(len(steps), 1)
        data["observation"] = (numbers % 4).float().unsqueeze(1)
        for name in HISTORY:
            data["next", name] = torch.tensor([[self.rng.random() < 0.15] for _ in steps])
        if self.case.frames:
            self.stack(data, steps)
        if setting.ndim == 2:
            data = data.reshape(count, setting.num_envs).transpose(0, 1)
        # after load_state_dict, TorchRL's storage no longer moves CPU data to its device
        moves_data = not len(self.buffer) or self.buffer.storage[:].device is not None
        if self.device != "cpu" and (self.rng.random() < 0.5 or not moves_data):
            data = data.to(self.device)
        return steps, data

    def stack(self, data: TensorDict, steps: list[Any]) -> None:
        """Replace observations by stacks of the last frames of the episode; a frame is one byte."""
        before, after = [], []
        for taken in steps:
            frames = self.frames.setdefault(taken.episode, [self.rng.randrange(256)] * DEPTH)
            before.append(list(frames))
            frames[:] = [*frames[1:], self.rng.randrange(256)]
            after.append(list(frames))
            if taken.terminated or taken.truncated:
                del self.frames[taken.episode]
        if len(self.frames) > 64:
            for episode in sorted(self.frames)[:-16]:
                del self.frames[episode]
        data["observation"], data["next", "observation"] = (
            torch.tensor(stack, dtype=torch.uint8).view(len(steps), DEPTH, 1) for stack in (before, after)
        )

    def tell(self, steps: list[Any], data: TensorDict) -> None:
        """Update the model after a write."""
        width = self.setting.num_envs if self.setting.ndim == 2 else 1
        flat = data.transpose(0, 1).reshape(-1) if self.setting.ndim == 2 else data
        rows = zip(steps, flat["number"].tolist(), flat["observation"], strict=True)
        flags = {name: flat["next", name].reshape(-1).tolist() for name in HISTORY} if self.tables is not None else {}
        for row, (taken, number, observation) in enumerate(rows):
            if self.tables is not None:
                stream = row % width if width > 1 else taken.traj_id if self.setting.num_envs > 1 else 0
                happened = {name: flags[name][row] for name in HISTORY}
                self.tables.write(stream, happened, taken.terminated or taken.truncated)
                self.number_of.append(number)
            if self.case.pinned:
                continue
            slot = self.cursor
            self.cursor = (self.cursor + 1) % self.setting.capacity
            self.content[slot], self.observed[number] = number, observation
            self.length = min(self.length + 1, self.setting.capacity)
            if self.reference is not None:
                self.reference.write(slot, taken.episode, taken.terminated, taken.truncated)
        if len(self.observed) > 1000:
            stored = set(self.content.values())
            self.observed = {number: row for number, row in self.observed.items() if number in stored}

    def extend(self, count: int | None = None) -> None:
        count = self.rng.randint(1, 5) if count is None else count
        if self.setting.ndim == 2:
            # TorchRL raises after writing an [E, 1] batch: it mistakes [E, 2] for E flat indices
            count = max(count, 2)
        steps, data = self.chunk(count)
        with self.environments.writing():
            self.buffer.extend(data.clone())
        self.tell(steps, data)

    def extend_beyond_capacity(self) -> None:
        if self.sampler_has_tables and self.setting.num_envs > 1 and self.setting.ndim == 1:
            return self.extend()
        self.extend(self.rows + self.rng.randint(0, 5))

    def add(self) -> None:
        if self.setting.ndim == 2:
            return self.extend()
        steps, data = self.chunk(1)
        with self.environments.writing():
            self.buffer.add(data[0].clone())
        self.tell(steps, data)

    def set_item(self) -> None:
        """Assign another action to a stored transition. The sampler is not notified and does not need to be."""
        if self.case.pinned or self.setting.ndim == 2 or self.case.frames or not self.content:
            return
        slot = self.rng.choice(sorted(self.content))
        row = self.buffer.storage[slot].clone()
        row["action"] = torch.rand(1)
        self.buffer[slot] = row
        assert torch.equal(self.buffer[slot]["action"], row["action"])

    def restart_collector(self) -> None:
        """Start new trajectories."""
        if self.sampler_has_tables or self.setting.num_envs == 1 or self.setting.ndim == 2:
            return
        self.environments.restart()
        self.extend(1)

    def write_wrongly(self) -> None:
        """Write invalid rows, which must be rejected before anything is written."""
        if not isinstance(self.buffer.writer, CompilableWriter):
            # after an error TorchRL's writer has moved its cursor, and the storage may hold incomplete rows
            return
        environments, frames = copy.deepcopy(self.environments), copy.deepcopy(self.frames)
        _, data = self.chunk(2)
        self.environments, self.frames = environments, frames
        self.environments.rng = self.rng
        action = torch.rand(*data.shape, 3)
        wrong = data.exclude(("next", "done")) if self.rng.random() < 0.5 else data.set("action", action)
        self.refused(lambda: self.buffer.extend(wrong))

    # --- drawing

    def batch_size(self) -> int:
        """The batch size for 6 transitions or slices."""
        return 6 * (SLICE if isinstance(self.sampler, TrajectoryRetraceSampler) else 1)

    def can_draw(self) -> bool:
        """False for slices if no episode is long enough."""
        return bool(self.sampler.stats().get("num_starts", torch.ones(())) > 0)

    def slots(self, index: torch.Tensor) -> list[int]:
        if self.setting.ndim == 2:
            return (index[:, 0] * self.setting.num_envs + index[:, 1]).tolist()
        return index.tolist()

    def sample(self) -> TensorDict | None:
        size = self.rng.randint(1, 6)
        if isinstance(self.buffer.sampler, TrajectoryRetraceSampler):
            size *= SLICE
        try:
            batch = self.buffer.sample(size)
        except RuntimeError:
            assert self.buffer.sampler.stats()["num_starts"] == 0, "no episode is long enough"
            return None
        assert batch.shape == (size,)
        numbers = batch["number"].tolist()
        slots = self.slots(batch["index"])
        if self.case.pinned:
            stored = {self.number_of[number] for number in self.tables.stored()}
            assert set(numbers) <= stored
        else:
            assert numbers == [self.content[slot] for slot in slots]
            for number, row in zip(numbers, batch["observation"], strict=True):
                assert torch.equal(row, self.observed[number])
        weight = batch.get("priority_weight", None)
        if weight is not None:
            assert bool((weight > 0).all() and (weight <= 1 + 1e-6).all()), weight
        stamps = [] if self.reference is None else self.reference.stamps(slots)
        self.late.append((batch, stamps))
        if len(self.late) > 4:
            self.update(0)
        return batch

    def td_errors(self, count: int) -> torch.Tensor:
        """Random TD errors from 1e-3 to 10, sometimes 0."""
        if self.reference is not None:
            # the reference does not round
            return torch.tensor([10 ** self.rng.uniform(-1, 1) for _ in range(count)])
        return torch.tensor([0.0 if self.rng.random() < 0.05 else 10 ** self.rng.uniform(-3, 1) for _ in range(count)])

    def update(self, position: int | None = None) -> None:
        """Update the priorities of a drawn batch, which may be late; in a TorchRL buffer, of the oldest batch."""
        if not self.late:
            self.sample()
        if not self.late:
            return
        if position is None:
            position = self.rng.randrange(len(self.late)) if self.setting.compilable else 0
        batch, stamps = self.late.pop(position)
        batch["td_error"] = self.td_errors(len(batch))
        self.buffer.update_tensordict_priority(batch)
        if self.reference is not None:
            rows = zip(self.slots(batch["index"]), batch["td_error"].tolist(), stamps, strict=True)
            for slot, error, stamp in rows:
                if slot in self.reference.transitions:
                    self.reference.update([slot], [error], [stamp])

    def update_all(self) -> None:
        """Update the priorities of all drawn batches."""
        while self.late:
            self.update(0)

    def some_index(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """Random stored slots, with duplicates. All drawn batches are updated first, so no slot is taken for theirs."""
        self.update_all()
        if self.case.pinned:
            tables = self.tables_of()
            held = (tables.places >= 0).any(0).nonzero().squeeze(1).tolist()
        else:
            held = sorted(self.content)
        slots = self.rng.choices(held, k=count)
        index = torch.tensor(slots)
        if self.setting.ndim == 2:
            index = torch.stack([index // self.setting.num_envs, index % self.setting.num_envs], -1)
        return index, slots

    def update_by_index(self) -> None:
        count = self.rng.randint(1, 6)
        index, slots = self.some_index(count)
        error = self.td_errors(count)
        self.buffer.update_priority(index, error)
        if self.reference is not None:
            self.reference.update(slots, error.tolist())

    def update_wrongly(self) -> None:
        sampler = self.sampler
        if not sampler.takes_priorities:
            return
        count = self.rng.randint(1, 4)
        index, slots = self.some_index(count)
        error = self.td_errors(count)
        kind = self.rng.choice(["nan", "inf", "negative", "huge", "short", "long", "outside", "below", "float"])
        wrong = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0, "huge": 3e38}
        if kind in wrong:
            if kind == "huge" and (self.case.ranked or self.priorities.alpha < 0.6):
                return
            # equal slots may be those of a short slice, of which only the first row is real
            is_slice = isinstance(self.buffer.sampler, TrajectoryRetraceSampler) and len(set(slots)) < count
            error[0 if is_slice else self.rng.randrange(count)] = wrong[kind]
        elif kind in ("short", "long"):
            error = torch.ones(count + 1 if kind == "long" else count + 2)
        elif kind == "float":
            index = index.float() + 0.5
        else:
            index[self.rng.randrange(count)] = -1000 if kind == "below" else 1000
        if self.device == "cpu" or self.validate or kind in ("short", "long", "float"):
            self.refused(lambda: self.buffer.update_priority(index, error))
        else:
            self.left_out(index, slots, error)

    def left_out(self, index: torch.Tensor, slots: list[int], error: torch.Tensor) -> None:
        """Check that an update of which one row is invalid changes only the others, and counts it."""
        before = int(self.buffer.sampler.stats()["rejected_updates"])
        self.buffer.update_priority(index, error)
        assert int(self.buffer.sampler.stats()["rejected_updates"]) == before + 1
        if self.reference is not None:
            inside = (index.reshape(len(slots), -1).abs() < 1000).all(1)
            for slot, value, is_inside in zip(slots, error.tolist(), inside.tolist(), strict=True):
                if is_inside and 0 <= value < 1e38:
                    self.reference.update([slot], [value])

    def refused(self, operation: Callable[[], Any], error: Any = (ValueError, IndexError, TypeError, KeyError)) -> None:
        """Check that ``operation`` raises an error and changes nothing."""
        before = copy.deepcopy((self.buffer.sampler.state_dict(), self.buffer.writer.state_dict()))
        size = len(self.buffer)
        try:
            operation()
        except error:
            pass
        else:
            raise Refused(f"not refused: {operation}")
        after = self.buffer.sampler.state_dict(), self.buffer.writer.state_dict()
        for one, other in zip(after, before, strict=True):
            assert_same_state(one, other)
        assert len(self.buffer) == size

    # --- other operations

    def set_exponents(self) -> None:
        sampler = self.sampler
        part = self.priorities
        if part == "uniform":
            return
        name = self.rng.choice(["alpha", "beta", "omega", "eta"])
        if name == "eta":
            if self.sampler_has_tables:
                share = self.rng.choice([0.0, 0.25, 0.9])
                sampler.eta = {"default": 1 - share, "a": share / 2, "b": share / 2}
            return
        if name not in part.hyperparameters:
            return
        value = self.rng.choice([0.0, 0.3, 0.7, 1.0])
        setattr(part, name, value)
        if self.reference is not None:
            setattr(self.reference, name, value)
        wrong = self.rng.choice([-0.5, float("nan"), float("inf")])
        try:
            setattr(part, name, wrong)
        except ValueError:
            assert abs(getattr(part, name) - value) < 1e-6
        else:
            raise Refused(f"{name} = {wrong}")

    def go_on_with_a_copy(self) -> None:
        """Replace the buffer by one from a checkpoint, a pickle or a copy."""
        kind = self.rng.choice(["state_dict", "into another", "dumps", "pickle", "deepcopy"])
        self.update_all()
        if kind == "state_dict":
            # load an older state over a newer one
            state = copy.deepcopy(self.buffer.state_dict())
            batch = self.sample() if self.sampler is self.buffer.sampler and len(self.buffer) else None
            self.buffer.load_state_dict(state)
            if batch is not None:
                # drawn before the load: all rows are late
                batch["td_error"] = self.td_errors(len(batch))
                self.buffer.update_tensordict_priority(batch)
        elif kind == "into another":
            other = self.make()
            other.load_state_dict(copy.deepcopy(self.buffer.state_dict()))
            self.buffer = other
        elif kind == "dumps":
            with tempfile.TemporaryDirectory() as path:
                self.buffer.dumps(path)
                other = self.make()
                other.loads(path)
                # loaded tensors may be memory-mapped to the deleted files
                self.buffer = copy.deepcopy(other)
        elif kind == "pickle":
            self.buffer = pickle.loads(pickle.dumps(self.buffer))
        else:
            self.buffer = copy.deepcopy(self.buffer)
        if isinstance(self.buffer.sampler, DecoupledSampler):
            # the policy is not copied
            self.buffer.sampler.policy = linear_policy()
        self.late.clear()

    def empty(self) -> None:
        self.update_all()
        self.buffer.empty()
        self.environments.restart()
        self.begin()
        if self.reference is not None:
            self.reference.empty()

    # --- comparing

    def check(self) -> None:
        """Check that the buffer is consistent and matches the model."""
        self.buffer.sampler.check_valid()
        storage = self.buffer.storage
        if self.tables is not None and len(self.buffer):
            tables = self.tables_of()
            numbers = storage[:]["number"].reshape(-1)
            for name, expected in [*self.tables.tables.items(), ("default", self.tables.default)]:
                found = numbers[tables[name].index()].tolist()
                assert found == [self.number_of[number] for number in expected], name
        if self.case.pinned:
            # the comparison of the tables above is sufficient
            return
        assert len(self.buffer) == self.length
        if not self.content:
            return
        stored = storage[:]["number"].reshape(-1).tolist()
        assert all(stored[slot] == number for slot, number in self.content.items())
        probabilities = self.buffer.sampler.probabilities(storage).cpu()
        if self.reference is not None:
            criterion = self.reference.criterion()
            expected = torch.tensor([criterion.get(slot, 0.0) for slot in range(self.length)], dtype=torch.float64)
            torch.testing.assert_close(probabilities, expected / expected.sum(), rtol=1e-3, atol=1e-7)
        holes = [slot for slot in range(self.length) if slot not in self.content]
        assert not bool(probabilities[holes].any())

    OPERATIONS = (
        (22, "extend"),
        (9, "add"),
        (1, "extend_beyond_capacity"),
        (26, "sample"),
        (22, "update"),
        (8, "update_by_index"),
        (3, "update_wrongly"),
        (2, "write_wrongly"),
        (2, "set_item"),
        (2, "set_exponents"),
        (1, "go_on_with_a_copy"),
        (1, "restart_collector"),
        (0.2, "empty"),
    )

    def operate(self, name: str | None = None) -> None:
        """Perform one operation, a random one by default."""
        if name is None:
            weights, names = zip(*self.OPERATIONS, strict=True)
            name = self.rng.choices(names, weights)[0]
        if not self.content and not (self.case.pinned and len(self.buffer)) and name != "empty":
            name = "extend"
        getattr(self, name)()
