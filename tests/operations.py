"""Random operations on a replay buffer, including invalid calls and checkpoints, compared to a plain-Python model."""

from __future__ import annotations

import copy
import math
import pickle
import random
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from tests.data import linear_policy
from tests.events import NaiveTables
from tests.reference import (
    Draws,
    NaiveEpisodePER,
    NaiveEpisodeRanking,
    NaivePER,
    NaiveRanking,
    NaiveReaPER,
    NaiveRecency,
    NaiveSlices,
)
from tests.samplers.experience import Environments, Refuses, sorted_within, transitions
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
DEPTH = 2
# the order of the rows of several environments in a write; in "columns", each environment has a column of the storage
FLAT = ("uneven", "time_major", "env_major")
LAYOUTS = (*FLAT, "columns")
OPTIONS = {
    "td_error": ["squared", "absolute"],
    "weight_norm": ["buffer", "batch"],
    "max_priority_within_buffer": [False, True],
    "truncated": ["finished", "ongoing"],
    "half_life": [0.5, 3, math.inf],
    "beta": [0.0, 0.5],
}


@dataclass(frozen=True)
class Setting:
    """The random configuration of a buffer.

    Args:
        capacity: capacity of the buffer; with pinned tables, capacity of the default table.
        num_envs: number of environments.
        layout: one of ``LAYOUTS``.
        with_ids: True if the data has trajectory ids.
        with_marks: True if the data marks the first rows of episodes.
        slice_len: length of slices.
        min_size: size from which an event table is drawn from.
        compilable: True for the compilable classes of buffer and storage.
        seed: seed of the arguments and of the buffer.
        choices: arguments of the sampler that are not random.
        validate: True if invalid input raises errors on all devices.
        on_load: argument of samplers and writers.
    """

    capacity: int
    num_envs: int
    layout: str
    with_ids: bool
    with_marks: bool
    slice_len: int
    min_size: int
    compilable: bool
    seed: int
    choices: dict[str, Any]
    validate: bool
    on_load: Any

    @property
    def ndim(self) -> int:
        return 1 + (self.layout == "columns")

    @property
    def streams(self) -> int:
        return self.num_envs if self.ndim == 1 else 1

    def choose(self, rng: random.Random, *names: str) -> dict[str, Any]:
        return {name: rng.choice(OPTIONS[name]) for name in names} | self.choices


# --- the parts of a buffer, and its reference: a naive sampler with the same arguments


def proportional(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "td_error", "weight_norm", "max_priority_within_buffer")
    sampler = ProportionalSampler(own.capacity, stratified=rng.random() < 0.5, validate=own.validate, **chosen)
    return {"sampler": sampler, "reference": partial(NaivePER, **chosen)}


def rank(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen, is_exact = own.choose(rng, "td_error"), rng.random() < 0.7
    further = {"segments": "exact" if is_exact else "piecewise", "stratified": rng.random() < 0.5}
    sampler = RankBasedSampler(own.capacity, validate=own.validate, **further, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveRanking, **chosen) if is_exact else None}


def reaper(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "td_error", "weight_norm", "max_priority_within_buffer", "truncated")
    common = {"num_streams": own.streams, "on_load": own.on_load, "validate": own.validate}
    return {"sampler": ReaPERSampler(own.capacity, **common, **chosen), "reference": partial(NaiveReaPER, **chosen)}


def recency(own: Setting, rng: random.Random) -> dict[str, Any]:
    chosen = own.choose(rng, "half_life", "beta")
    sampler = RecencySampler(own.capacity, validate=own.validate, **chosen)
    return {"sampler": sampler, "reference": partial(NaiveRecency, **chosen)}


def events(kind: str | None, retention: Any, own: Setting, rng: random.Random) -> dict[str, Any]:
    specs = [EventSpec(name, ("next", name), history, table=table) for name, (history, table) in HISTORY.items()]
    sizes = {"a": max(own.capacity // 2, 3), "b": 4}
    if retention == "pinned":
        sizes["default"] = own.capacity
    tables = EventTables(specs, sizes, retention=retention)
    chosen = own.choose(rng, "td_error", "max_priority_within_buffer")
    priority: Any = None if kind is None else {"kind": kind}
    if kind in ("proportional", "reaper"):
        priority |= chosen
    if kind == "reaper":
        priority |= {"num_streams": own.streams, "on_load": own.on_load}
    corrections = [None, "mixture"]
    if kind is None and retention == "ring":
        corrections += ["conditional", "lemma2", "priority"]
    sampler = EventTableSampler(
        tables,
        eta={"default": 0.5, "a": 0.3, "b": 0.2},
        min_size=own.min_size,
        allocation=rng.choice(["systematic", "multinomial", "largest_remainder"]),
        correction=(correction := rng.choice(corrections)),
        priority=priority,
        pair_keys=("observation",),
        validate=own.validate,
    )
    # of the transitions in each table
    uniform = partial(NaiveSlices, pad=True, length=1)
    references = {None: uniform, "proportional": partial(NaivePER, **chosen), "reaper": partial(NaiveReaPER, **chosen)}
    is_mixture = retention == "ring" and correction != "priority"
    reference = references.get(kind) if is_mixture else None
    return {"sampler": sampler, "writer": EventTableWriter(tables, on_load=own.on_load), "reference": reference}


def decoupled(own: Setting, rng: random.Random) -> dict[str, Any]:
    parts = proportional(own, rng)
    arguments = {
        "granularity": rng.choice(["batch", "transition"]),
        "candidate_sampler": RecencySampler(own.capacity, half_life=2) if rng.random() < 0.5 else None,
    }
    return parts | {"sampler": DecoupledSampler(parts["sampler"], linear_policy(), num_candidates=2, **arguments)}


def slices(
    anchors: Callable[..., Any] | None, own: Setting, rng: random.Random, *, pad: bool = True, starts: Any = "any"
) -> dict[str, Any]:
    uniform = {"sampler": "uniform", "reference": partial(NaiveSlices, pad=pad, length=own.slice_len, starts=starts)}
    parts = uniform if anchors is None else anchors(own, rng)
    reference = parts["reference"]
    if anchors is not None and starts == "episode" and reference is not None:
        whole = {NaivePER: NaiveEpisodePER, NaiveRanking: NaiveEpisodeRanking}
        reference = partial(whole[reference.func], **reference.keywords)
    sampler = TrajectoryRetraceSampler(
        own.capacity,
        slice_len=own.slice_len,
        num_streams=own.streams,
        behaviour_keys=(),
        on_load=own.on_load,
        anchors=parts["sampler"],
        pad=pad,
        starts=starts,
        validate=own.validate and anchors is None,
    )
    return {"sampler": sampler, "reference": reference}


# draws by rank, which take any TD errors; pinned tables and frames that are stored once have these words in their names
RANKED = ("rank", "tables, rank", "slices, whole, rank", "frames, slices")
# add one line for each new sampler
CASES: dict[str, Callable[[Setting, random.Random], dict[str, Any]]] = {
    "proportional": proportional,
    "rank": rank,
    "reaper": reaper,
    "recency": recency,
    "tables": partial(events, None, "ring"),
    "tables, pinned": partial(events, None, "pinned"),
    "tables, proportional": partial(events, "proportional", "ring"),
    "tables, proportional, pinned": partial(events, "proportional", "pinned"),
    "tables, rank": partial(events, "rank", "ring"),
    "tables, reaper": partial(events, "reaper", "ring"),
    "decoupled": decoupled,
    "slices": partial(slices, None),
    "slices, unpadded": partial(slices, None, pad=False),
    "slices, whole": partial(slices, None, starts="episode"),
    "slices, whole, proportional": partial(slices, proportional, starts="episode"),
    "slices, whole, rank": partial(slices, rank, starts="episode"),
    "slices, proportional": partial(slices, proportional),
    "slices, reaper": partial(slices, reaper),
    "frames": proportional,
    "frames, slices": partial(slices, rank),
}


@dataclass
class Batch:
    """Drawn rows: their slots, the write in each of these at the draw, and False for padded rows of slices."""

    data: TensorDict
    slots: list[int]
    stamps: list[int]
    real: list[bool]

    def __getitem__(self, rows: list[int]) -> Batch:
        columns: Any = ([column[row] for row in rows] for column in (self.slots, self.stamps, self.real))
        return Batch(self.data[torch.tensor(rows)], *columns)

    def __add__(self, other: Batch) -> Batch:
        columns = (getattr(self, name) + getattr(other, name) for name in ("slots", "stamps", "real"))
        return Batch(torch.cat([self.data, other.data]), *columns)

    def __len__(self) -> int:
        return len(self.slots)


class Driven:
    """A buffer and a model of its expected content, on which random operations are performed.

    Args:
        name: name of the case.
        seed: seed of the setting and of all operations.
        device: device of the storage. On another device than the CPU, half of the writes bring CPU data.
        validate: True if invalid input raises errors on all devices.
        buffer: further arguments of the buffer.
        end_probability: probability that a step ends an episode.
        choices: arguments of the sampler and of its reference.
        setting: fields of ``Setting`` that are not random.
    """

    # a copy from a checkpoint goes on in the middle of episodes, as the reference does
    on_load = "continue"

    def __init__(
        self, name, seed=0, *, device="cpu", validate=False, buffer=None, end_probability=None, choices=None, **setting
    ):
        self.arguments, self.device, self.validate = buffer or {}, device, validate
        self.name, self.parts, self.rng = name, CASES[name], random.Random(seed)
        self.pinned, self.frames_once, self.ranked = "pinned" in name, "frames" in name, name in RANKED
        rng = self.rng
        layout = setting.get("layout", rng.choice(FLAT if self.pinned or self.frames_once else LAYOUTS))
        num_envs = setting.get("num_envs", rng.choice([1, 1, 2, 3]))
        steps = rng.randint(2, 7) * num_envs if layout == "columns" else rng.randint(4, 24)
        chosen = {
            "capacity": max(setting.pop("capacity", steps) // num_envs, 1) * num_envs,
            "with_ids": rng.random() < 0.5 or (num_envs > 1 and layout != "columns"),
            "with_marks": rng.random() < 0.3,
            "slice_len": rng.choice([1, 2, 3, 3, 5]),
            "min_size": rng.choice([1, 3]),
            "compilable": rng.random() < 0.5,
            "seed": rng.randrange(2**31),
        }
        fixed = {"choices": choices or {}, "validate": validate, "on_load": self.on_load}
        self.setting = Setting(**{"layout": layout, "num_envs": num_envs, **chosen, **fixed, **setting})
        self.buffer = self.make()
        self.environments = Environments(num_envs, rng, end_probability or rng.choice([0.05, 0.3]))
        # without numbers of writes, a sampler on an accelerator does not always know the newest ranks
        has_reference = callable(self.make_reference) and (device == "cpu" or not self.ranked)
        self.reference: Any = self.make_reference() if has_reference else None
        self.rows = self.setting.capacity // (num_envs if layout == "columns" else 1)
        self.written = 0
        self.frames: dict[int, list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Reset the model to an empty buffer."""
        self.cursor = 0
        # number and observation of the transition in each slot
        self.content: dict[int, tuple[int, torch.Tensor]] = {}
        self.late: list[Batch] = []
        # slots and mask of the last batches of slices
        self.padded: deque[tuple[list[int], list[bool]]] = deque(maxlen=Draws.WINDOW)
        self.tables: Any = None
        if self.sampler_has_tables:
            tables = self.tables_of()
            names = [name for name in tables.names if self.pinned or name != "default"]
            sizes = {name: tables[name].capacity for name in names}
            specs = [(name, history, table) for name, (history, table) in HISTORY.items()]
            self.tables = NaiveTables(specs, sizes, None if self.pinned else self.setting.capacity)
            self.number_of: list[int] = []

    # --- parts

    def make(self) -> Any:
        """Create the buffer of this setting."""
        setting = self.setting
        parts = self.parts(setting, random.Random(setting.seed))
        self.make_reference: Any = parts.pop("reference", None)
        tables = parts["writer"].tables if self.pinned else None
        size = setting.capacity if tables is None else sum(tables[name].capacity for name in tables)
        if self.frames_once:
            storage: Any = FrameStackStorage(size, frame_capacity=4 * size + 8, device=self.device)
        else:
            storage_class = CompilableTensorStorage if setting.compilable else LazyTensorStorage
            storage = storage_class(size, ndim=setting.ndim, device=self.device)
        make = CompilableReplayBuffer if setting.compilable else TensorDictReplayBuffer
        buffer = make(storage=storage, **parts, **self.arguments)
        buffer.set_rng(torch.Generator().manual_seed(setting.seed))
        return buffer

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

    @property
    def draws_slices(self) -> bool:
        return isinstance(self.sampler, TrajectoryRetraceSampler)

    @property
    def unit(self) -> int:
        """The number of rows of each draw."""
        return self.setting.slice_len if self.draws_slices else 1

    def tables_of(self) -> EventTables:
        return self.buffer.writer.tables

    # --- writing

    def chunk(self, count: int, of_all: bool = True) -> tuple[list[Any], TensorDict]:
        """Collect ``count`` steps, of each environment unless activity is uneven; data of shape [E, T] or [n]."""
        envs, setting = range(self.setting.num_envs), self.setting
        step, layout = self.environments.step, setting.layout if of_all else "uneven"
        if layout == "uneven":
            activity = [1.0 / (1 + env) ** 2 for env in envs]
            order = self.rng.choices(envs, activity, k=count)
            if count > self.rows and not self.sampler_has_tables:
                order += envs
        elif layout == "env_major":
            order = [env for env in envs for _ in range(count)]
        else:
            order = [*envs] * count
        steps = [step(env) for env in order]
        if setting.ndim == 1 and len(steps) > self.rows and not self.sampler_has_tables:
            self.environments.end_unseen(steps, self.rows)
        data = transitions(steps, with_ids=setting.with_ids)
        numbers = torch.arange(self.written, self.written + len(steps))
        self.written += len(steps)
        data["number"] = numbers
        if setting.with_marks:
            data["is_init"] = torch.tensor([[step.initial] for step in steps])
        data["action"] = torch.rand(len(steps), 1)
        data["observation"] = (numbers % 4).float().unsqueeze(1)
        for name in HISTORY:
            data["next", name] = torch.tensor([[self.rng.random() < 0.15] for _ in steps])
        if self.frames_once:
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
        if self.reference is not None:
            self.reference.remove([(self.cursor + row) % self.setting.capacity for row in range(len(steps))])
        for row, (taken, number, observation) in enumerate(rows):
            if self.tables is not None:
                stream = row % width if width > 1 else taken.traj_id if self.setting.num_envs > 1 else 0
                happened = {name: flags[name][row] for name in HISTORY}
                self.tables.write(stream, happened, taken.terminated or taken.truncated)
                self.number_of.append(number)
            if self.pinned:
                continue
            self.content[self.cursor] = number, observation
            if self.reference is not None:
                self.reference.write(self.cursor, taken.episode, taken.terminated, taken.truncated)
            self.cursor = (self.cursor + 1) % self.setting.capacity

    def extend(self, count: int | None = None) -> None:
        count = self.rng.randint(1, 5) if count is None else count
        if self.setting.ndim == 2:
            # TorchRL raises after writing an [E, 1] batch: it mistakes [E, 2] for E flat indices
            count = max(count, 2)
        elif self.sampler_has_tables and self.setting.num_envs > 1:
            count = min(count, self.rows // self.setting.num_envs)
        steps, data = self.chunk(count)
        with self.environments.writing():
            self.buffer.extend(data.clone())
        self.tell(steps, data)

    def extend_beyond_capacity(self) -> None:
        self.extend(self.rows + self.rng.randint(0, 5))

    def add(self) -> None:
        if self.setting.ndim == 2:
            return self.extend()
        steps, data = self.chunk(1, of_all=False)
        with self.environments.writing():
            self.buffer.add(data[0].clone())
        self.tell(steps, data)

    def set_item(self) -> None:
        """Assign another action to a stored transition. The sampler is not notified and does not need to be."""
        if self.pinned or self.setting.ndim == 2 or self.frames_once or not self.content:
            return
        slot = self.rng.choice(sorted(self.content))
        row = self.buffer.storage[slot].clone()
        row["action"] = torch.rand(1)
        self.buffer[slot] = row
        assert torch.equal(self.buffer[slot]["action"], row["action"])

    def restart_collector(self) -> None:
        """Start new trajectories, of which the first steps all fit into the buffer."""
        if self.sampler_has_tables or not (self.setting.with_ids or self.setting.with_marks) or self.rows < 2:
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
        with self.refuses():
            self.buffer.extend(wrong)

    # --- drawing

    def batch_size(self) -> int:
        """The batch size for 6 transitions or slices."""
        return 6 * self.unit

    def can_draw(self) -> bool:
        """False for slices if no episode is long enough."""
        return bool(self.sampler.stats().get("num_starts", torch.ones(())) > 0)

    def slots(self, index: torch.Tensor) -> list[int]:
        if self.setting.ndim == 2:
            return (index[:, 0] * self.setting.num_envs + index[:, 1]).tolist()
        return index.tolist()

    def sample(self, count: int | None = None) -> Batch | None:
        size = (count or self.rng.randint(1, 6)) * self.unit
        try:
            data = self.buffer.sample(size)
        except RuntimeError:
            assert self.buffer.sampler.stats()["num_starts"] == 0, "no episode is long enough"
            return None
        assert data.shape == (size,)
        numbers, slots = data["number"].tolist(), self.slots(data["index"])
        if self.pinned:
            assert set(numbers) <= {self.number_of[number] for number in self.tables.stored()}
        else:
            for slot, number, row in zip(slots, numbers, data["observation"], strict=True):
                assert number == self.content[slot][0] and torch.equal(row, self.content[slot][1])
        weight = data.get("priority_weight", None)
        if weight is not None:
            assert bool((weight > 0).all() and (weight <= 1 + 1e-6).all()), weight
        real, stamps = data.get(("collector", "mask"), torch.ones(size, dtype=torch.bool)).tolist(), [0] * size
        if self.reference is not None:
            stamps = self.reference.stamps(slots)
            self.check_batch(data, slots)
            self.reference.draws.draw([slot for slot, is_real in zip(slots, real, strict=True) if is_real])
        self.padded.append((slots, real))
        batch = Batch(data, slots, stamps, real)
        self.late.append(batch)
        return batch

    def check_batch(self, data: TensorDict, slots: list[int]) -> None:
        """Check the weights of a sample, and slices, against the reference."""
        weight, unit = data.get("priority_weight", None), self.unit
        # those of tables depend on the table of each row, and the order of equal ranks is unknown
        if weight is not None and self.tables is None and not isinstance(self.reference, NaiveRanking):
            expected = torch.tensor(self.reference.weights(slots[::unit])).repeat_interleave(unit)
            torch.testing.assert_close(weight.cpu(), expected, rtol=1e-3, atol=1e-6)
        if not self.draws_slices:
            return
        criterion = self.reference.criterion()
        following = {
            slot: episode[place : place + unit]
            for episode in self.reference.episodes().values()
            for place, slot in enumerate(episode)
        }
        for row, mask, flags in self.slices_of(data):
            real = [slot for slot, is_real in zip(row, mask, strict=True) if is_real]
            assert criterion[row[0]] > 0 and real == following[row[0]]
            self.check_slice(row, mask, flags, {len(real) - 1})

    def slices_of(self, data: TensorDict) -> Iterator[tuple[list[int], list[bool], list[list[bool]]]]:
        """The slots, the mask, and the flags done, terminated and truncated of each slice."""
        grid = data.cpu().reshape(-1, self.unit)
        rows = torch.tensor(self.slots(data["index"])).view(-1, self.unit).tolist()
        flags = torch.stack([grid["next", name][..., 0] for name in ("done", "terminated", "truncated")], 1)
        return zip(rows, grid["collector", "mask"].tolist(), flags.tolist(), strict=True)

    def check_slice(self, row: list[int], mask: list[bool], flags: list[list[bool]], cuts: set[int]) -> None:
        """Padding repeats the last step; traces end at ``cuts`` and at the ends of episodes."""
        count = sum(mask)
        assert mask == [place < count for place in range(self.unit)]
        assert row[count:] == row[max(count - 1, 0) : max(count, 1)] * (self.unit - count)
        for place, slot in enumerate(row):
            stored, cut = self.reference.transitions[slot], place in cuts or place >= count
            ended = stored.terminated or stored.truncated
            expected = [ended or cut, stored.terminated, stored.truncated or (cut and not ended)]
            assert [flag[place] for flag in flags] == expected

    def check_newest(self) -> None:
        """Check the newest steps of each stream."""
        stored, ends = self.reference.transitions, set()
        episodes = self.reference.episodes()
        following = {slot: after for slots in episodes.values() for slot, after in pairwise(slots)}
        order = sorted(stored, key=lambda slot: stored[slot].written)
        num_envs, is_flat = self.setting.num_envs, self.setting.ndim == 1
        data = self.sampler.newest(self.buffer)
        self.padded.append((self.slots(data["index"]), data["collector", "mask"].tolist()))
        newest = list(self.slices_of(data))
        assert len(newest) == num_envs
        for env, (row, mask, flags) in enumerate(newest):
            real = row[: sum(mask)]
            cuts = {place for place, pair in enumerate(pairwise(real)) if following.get(pair[0]) != pair[1]}
            self.check_slice(row, mask, flags, cuts | {len(real) - 1})
            assert [stored[slot].written for slot in real] == sorted({stored[slot].written for slot in real})
            # in flat storage, environments change lanes
            if not is_flat or num_envs == 1:
                assert real == [slot for slot in order if is_flat or slot % num_envs == env][-self.unit :]
            ends.update(real[-1:])
        open_episodes = {step.episode for step in self.environments.open.values()}
        assert {slots[-1] for episode, slots in episodes.items() if episode in open_episodes} <= ends
        slot = self.rng.choice(order)
        whole = next(slots for slots in episodes.values() if slot in slots)
        found = self.sampler.episode(self.buffer.storage, slot if is_flat else (slot // num_envs, slot % num_envs))
        assert self.slots(found["index"]) == whole
        numbers = self.buffer.storage[:]["number"].reshape(-1)
        assert found["number"].reshape(-1).tolist() == numbers[torch.tensor(whole)].tolist()

    # --- updating

    def td_errors(self, count: int) -> torch.Tensor:
        """Random TD errors from 1e-3 to 10, sometimes 0 or an outlier."""
        if self.reference is not None:
            # the reference does not round
            return torch.tensor([10 ** self.rng.uniform(-1, 1) for _ in range(count)])
        return torch.tensor([0.0 if self.rng.random() < 0.05 else 10 ** self.rng.uniform(-3, 1) for _ in range(count)])

    def update(self) -> None:
        """Hand back one or two of the drawn batches, which may be late: whole, in parts, joined or twice."""
        if not self.late:
            self.sample()
        chosen = [self.late.pop(self.rng.randrange(len(self.late))) for _ in range(min(len(self.late), 2))]
        way = self.rng.choice(["whole", "whole", "split", "shuffled", "joined", "repeated"])
        if way == "joined" and len(chosen) == 2:
            chosen = [chosen[0] + chosen[1]]
        for batch in chosen:
            rows = self.rng.sample(range(len(batch)), len(batch))
            parts = {"split": [rows[::2], rows[1::2]], "shuffled": [rows]}.get(way, [])
            for part in [batch[part] for part in parts if part] or [batch] * (1 + (way == "repeated")):
                self.hand_back(part)

    def hand_back(self, batch: Batch) -> None:
        """Update the priorities of drawn rows."""
        real = batch.real
        if not self.setting.compilable:
            # padded rows are known in a whole batch only
            known = [mask for slots, mask in self.padded if slots == batch.slots]
            real = known[-1] if known else [True] * len(batch)
        errors = self.td_errors(len(batch))
        batch.data["td_error"] = torch.where(torch.tensor(real), errors, math.nan)
        counts = [self.dropped_updates()]
        self.buffer.update_tensordict_priority(batch.data)
        if self.reference is None or not self.sampler.takes_priorities:
            return
        draws, fresh = self.reference.draws, []
        for slot, stamp, error, is_real in zip(batch.slots, batch.stamps, errors.tolist(), real, strict=True):
            if is_real:
                is_stamped = self.setting.compilable
                late = self.reference.stamps([slot]) != [stamp] if is_stamped else draws.expects_late(slot)
                draws.update(slot, late)
                counts.append(late)
                if not late:
                    fresh.append((slot, error))
        self.reference.update([slot for slot, _ in fresh], [error for _, error in fresh])
        assert self.dropped_updates() == sum(counts)

    def dropped_updates(self) -> int:
        return int(self.sampler.stats().get("dropped_updates", torch.zeros(())))

    def update_all(self) -> None:
        """Update the priorities of all drawn batches."""
        while self.late:
            self.update()

    def some_index(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """Random stored slots, with duplicates. All drawn batches are updated first, so no slot is taken for theirs."""
        self.update_all()
        if self.pinned:
            tables = self.tables_of()
            held = (tables.places >= 0).any(0).nonzero().squeeze(1).tolist()
        else:
            held = sorted(self.content)
        # equal slots may be those of a short slice, of which only the first row is real
        slots = self.rng.sample(held * (1 if self.draws_slices else count), min(count, len(held)))
        index = torch.tensor(slots)
        if self.setting.ndim == 2:
            index = torch.stack([index // self.setting.num_envs, index % self.setting.num_envs], -1)
        return index, slots

    def update_by_index(self, count: int | None = None) -> None:
        index, slots = self.some_index(count or self.rng.randint(1, 6))
        error = self.td_errors(len(slots))
        self.buffer.update_priority(index, error)
        if self.reference is not None:
            self.reference.update(slots, error.tolist())

    def update_wrongly(self) -> None:
        sampler = self.sampler
        if not sampler.takes_priorities:
            return
        index, slots = self.some_index(self.rng.randint(1, 4))
        count = len(slots)
        error = self.td_errors(count)
        kind = self.rng.choice(["nan", "inf", "negative", "huge", "short", "long", "outside", "below", "float"])
        wrong = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0, "huge": 3e38}
        if kind in wrong:
            if kind == "huge" and (self.ranked or self.priorities.alpha < 0.6):
                return
            error[self.rng.randrange(count)] = wrong[kind]
        elif kind in ("short", "long"):
            error = torch.ones(count + 1 if kind == "long" else count + 2)
        elif kind == "float":
            index = index.float() + 0.5
        else:
            index[self.rng.randrange(count)] = -1000 if kind == "below" else 1000
        if self.device == "cpu" or self.validate or kind in ("short", "long", "float"):
            with self.refuses():
                self.buffer.update_priority(index, error)
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

    def refuses(self) -> Refuses:
        """Expect an error and no changes."""
        errors = ValueError, IndexError, TypeError, KeyError
        return Refuses(self.buffer, errors, None, ("sampler", "writer"))

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
                batch.data["td_error"] = self.td_errors(len(batch))
                self.buffer.update_tensordict_priority(batch.data)
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
        if kind != "state_dict":
            # padded rows are not saved
            self.padded.clear()
        if self.reference is not None:
            self.reference.draws = Draws()

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
        if self.pinned:
            # the comparison of the tables above is sufficient
            return
        assert len(self.buffer) == len(self.content)
        if not self.content:
            return
        stored = storage[:]["number"].reshape(-1).tolist()
        assert all(stored[slot] == number for slot, (number, _) in self.content.items())
        probabilities = self.buffer.sampler.probabilities(storage).cpu()
        if self.reference is None:
            return
        expected = self.expected()
        if isinstance(self.reference, NaiveRanking):
            bucket = torch.tensor(self.reference.buckets())
            probabilities, expected = sorted_within(bucket, probabilities), sorted_within(bucket, expected)
        torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-9)
        if self.sampler.takes_priorities and not self.ranked:
            assert abs(float(self.sampler.stats()["max_priority"]) / self.reference.maximum - 1) < 1e-3
        if self.draws_slices:
            self.check_newest()

    def expected(self) -> torch.Tensor:
        """The probability of each slot according to the reference: of one table with all slots, or of the mixture."""
        criterion = self.reference.criterion()
        tables, shares = {"default": [*criterion]}, {"default": 1.0}
        if self.tables is not None:
            slot_of = {number: slot for slot, (number, _) in self.content.items()}
            for name, numbers in self.tables.tables.items():
                tables[name] = [slot_of[self.number_of[number]] for number in numbers]
            large = [name for name, slots in tables.items() if len(slots) >= self.setting.min_size]
            shares = {name: self.sampler.eta[name] for name in large} or shares
        result = torch.zeros(len(self.content), dtype=torch.float64)
        for name, share in shares.items():
            mass = torch.tensor([criterion[slot] for slot in tables[name]], dtype=torch.float64)
            share /= sum(shares.values()) * float(mass.sum().clamp_min(1e-300))
            result[tables[name]] += share * mass
        return result

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

    def operate(self, name: Any = None) -> None:
        """Perform one operation, a random one by default."""
        if name is None:
            weights, names = zip(*self.OPERATIONS, strict=True)
            name = self.rng.choices(names, weights)[0]
        if not self.content and not (self.pinned and len(self.buffer)) and name != "empty":
            name = "extend"
        getattr(self, name)()
