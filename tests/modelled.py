"""A replay buffer with a plain-Python model of its content, to which its draws and its state are compared."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from tensordict import TensorDict

from tests.data import buffer_with
from tests.events import NaiveTables
from tests.reference import NaiveRanking
from tests.samplers.experience import Environments, assert_draws_as_rebuilt, sorted_within, transitions
from tests.settings import FLAT, HISTORY, LAYOUTS, Setting
from torchrl_replay_ext import EventTables, EventTableSampler, FrameStackStorage, TrajectoryRetraceSampler

DEPTH = 2


class Modelled:
    """A buffer and a model of its expected content, on which random operations are performed.

    Args:
        name: name of the case; "pinned", "frames" and "rank" in it mean pinned tables, frames that are stored once, and
            draws by rank.
        parts: makes the sampler, the writer and the reference of a setting, see ``settings.py``.
        seed: seed of the setting and of all operations.
        device: device of the storage. On another device than the CPU, half of the writes bring CPU data.
        buffer: further arguments of the buffer.
        end_probability: probability that a step ends an episode.
        setting: fields of ``Setting`` that are not random.
    """

    def __init__(self, name, parts, seed=0, *, device="cpu", buffer=None, end_probability=None, **setting):
        self.arguments, self.device = buffer or {}, device
        self.parts, self.rng = parts, random.Random(seed)
        self.pinned, self.frames_once, self.ranked = "pinned" in name, "frames" in name, "rank" in name
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
        self.setting = Setting(**{"layout": layout, "num_envs": num_envs, **chosen, **setting})
        self.buffer = self.make()
        self.environments = Environments(num_envs, rng, end_probability or rng.choice([0.05, 0.3]))
        # without numbers of writes, a sampler on an accelerator does not always know the newest ranks
        has_reference = callable(self.make_reference) and (device == "cpu" or not self.ranked)
        self.reference: Any = self.make_reference() if has_reference else None
        self.rows = self.setting.capacity // (num_envs if layout == "columns" else 1)
        self.written = 0
        # the only environment that is active, or None
        self.alone: int | None = None
        self.frames: dict[int, list[int]] = {}
        self.begin()

    def begin(self) -> None:
        """Reset the model to an empty buffer."""
        self.cursor = 0
        # number of the transition in each slot, and what :meth:`observed` returns for it
        self.content: dict[int, tuple[int, torch.Tensor]] = {}
        # drawn batches; "slot" and "stamp" of a row are its slot, and the write in it at the draw
        self.late: list[TensorDict] = []
        self.tables: Any = None
        if self.sampler_has_tables:
            tables = self.tables_of()
            names = [name for name in tables.names if self.pinned or name != "default"]
            sizes = {name: tables[name].capacity for name in names}
            specs = [(name, history, table) for name, (history, table) in HISTORY.items()]
            self.tables = NaiveTables(specs, sizes, None if self.pinned else self.setting.capacity)
            self.number_of: list[int] = []

    def start_again(self) -> None:
        """Model a new sampler, which has seen the stored transitions in their order, and environments that begin."""
        self.environments.restart()
        before, self.reference = self.reference, self.make_reference and self.make_reference()
        if self.reference is not None:
            for slot, stored in sorted(before.transitions.items(), key=lambda item: item[1].written):
                self.reference.write(slot, stored.episode, stored.terminated, stored.truncated)

    # --- parts

    def make(self) -> Any:
        """Create the buffer of this setting."""
        setting = self.setting
        parts = self.parts(setting, random.Random(setting.seed))
        self.make_reference: Any = parts.pop("reference", None)
        tables = parts["writer"].tables if self.pinned else None
        size = setting.capacity if tables is None else sum(tables[name].capacity for name in tables)
        if self.frames_once:
            parts["storage"] = FrameStackStorage(size, frame_capacity=4 * size + 8, device=self.device)
        settings = {"compilable": setting.compilable, "ndim": setting.ndim, "device": self.device}
        buffer = buffer_with(parts.pop("sampler"), size, **settings, **parts, **self.arguments)
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
            activity = [(1.0 / (1 + env) ** 2) * (self.alone in (None, env)) for env in envs]
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
        data["next", "reward"] = torch.tensor([[-(step.episode % 3 + 0.9)] for step in steps])
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
        rows = zip(steps, flat["number"].tolist(), self.observed(flat), strict=True)
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

    def add(self) -> None:
        if self.setting.ndim == 2:
            return self.extend()
        steps, data = self.chunk(1, of_all=False)
        with self.environments.writing():
            self.buffer.add(data[0].clone())
        self.tell(steps, data)

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

    def sample(self, count: int | None = None) -> TensorDict | None:
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
            for slot, number, row in zip(slots, numbers, self.observed(data), strict=True):
                assert number == self.content[slot][0] and torch.equal(row, self.content[slot][1])
        weight = data.get("priority_weight", None)
        if weight is not None:
            assert bool((weight > 0).all() and (weight <= 1 + 1e-6).all()), weight
        stamps = [0] * size
        if self.reference is not None:
            stamps = self.reference.stamps(slots)
            self.check_batch(data, slots)
            self.reference.draws.draw(slots)
        data["slot"], data["stamp"] = torch.tensor(slots), torch.tensor(stamps)
        self.late.append(data)
        return data

    def observed(self, data: TensorDict) -> torch.Tensor:
        """The observations of each row; with stacks of frames also the next ones."""
        if not self.frames_once:
            return data["observation"]
        return torch.cat([data["observation"], data["next", "observation"]], 1)

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
        newest = list(self.slices_of(data))
        # otherwise, lanes that were never needed are left out, and trajectories that broke off keep theirs
        are_fixed = not is_flat or bool(self.setting.episodes) or not self.setting.with_ids
        if are_fixed:
            assert len(newest) == num_envs
        for env, (row, mask, flags) in enumerate(newest):
            real = row[: sum(mask)]
            cuts = {place for place, pair in enumerate(pairwise(real)) if following.get(pair[0]) != pair[1]}
            self.check_slice(row, mask, flags, cuts | {len(real) - 1})
            assert [stored[slot].written for slot in real] == sorted({stored[slot].written for slot in real})
            # in flat storage, environments change lanes
            if not is_flat or (num_envs == 1 and are_fixed):
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

    # --- comparing

    def check(self) -> None:
        """Check that the buffer matches the model, and what it derives from its state."""
        assert_draws_as_rebuilt(self.buffer)
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
