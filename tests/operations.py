"""Random operations on a replay buffer, including invalid calls and checkpoints, compared to a plain-Python model."""

from __future__ import annotations

import copy
import pickle
import random
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict

from tests.data import linear_policy
from tests.modelled import Modelled
from tests.reference import Draws
from tests.samplers.experience import Refuses
from tests.settings import Setting, decoupled, events, proportional, rank, reaper, recency, rewards, slices
from torchrl_replay_ext import DecoupledSampler
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.writers.round_robin import CompilableWriter

# add one line for each new sampler
CASES: dict[str, Callable[[Setting, random.Random], dict[str, Any]]] = {
    "proportional": proportional,
    "rank": rank,
    "reaper": reaper,
    "recency": recency,
    "of one's own": rewards,
    "tables": partial(events, None, "ring"),
    "tables, pinned": partial(events, None, "pinned"),
    "tables, proportional": partial(events, "proportional", "ring"),
    "tables, proportional, pinned": partial(events, "proportional", "pinned"),
    "decoupled": decoupled,
    "slices": partial(slices, None),
    "slices, unpadded": partial(slices, None, pad=False),
    "slices, whole": partial(slices, None, starts="episode"),
    "slices, proportional": partial(slices, proportional),
    "slices, reaper": partial(slices, reaper),
    "frames": proportional,
    "frames, slices, rank": partial(slices, rank),
}


class Driven(Modelled):
    """Random operations on the buffer of a case, and on its model.

    Args:
        name: name of the case.
        seed: seed of the setting and of all operations.
        setting: further arguments of ``Modelled``.
    """

    def __init__(self, name, seed=0, **setting):
        super().__init__(name, CASES[name], seed, **setting)

    # --- writing

    def extend_beyond_capacity(self) -> None:
        self.extend(self.rows + self.rng.randint(0, 5))

    def let_others_idle(self) -> None:
        """Overwrite the whole ring with steps of one environment, in small writes. The other episodes go on later."""
        if self.setting.layout != "uneven" or self.setting.num_envs == 1:
            return
        self.alone, end = self.rng.randrange(self.setting.num_envs), self.written + self.rows
        while self.written < end:
            self.extend()
        self.alone = None

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
            chosen = [torch.cat(chosen)]
        for batch in chosen:
            # whole slices, because a padded row counts only beside the row that it repeats
            starts = self.rng.sample(range(0, len(batch), self.unit), len(batch) // self.unit)
            parts = {"split": [starts[::2], starts[1::2]], "shuffled": [starts]}.get(way, [])
            parts = [[start + step for start in part for step in range(self.unit)] for part in parts]
            for part in [batch[torch.tensor(part)] for part in parts if part] or [batch] * (1 + (way == "repeated")):
                self.hand_back(part)

    def hand_back(self, batch: TensorDict) -> None:
        """Update the priorities of drawn rows."""
        errors = self.td_errors(len(batch))
        if self.draws_slices:
            # as the losses do
            errors *= batch["collector", "mask"].cpu()
        batch["td_error"] = errors
        before = self.dropped_updates()
        self.buffer.update_tensordict_priority(batch)
        self.expect(before, batch["slot"].tolist(), errors.tolist(), batch["stamp"].tolist())

    def expect(self, dropped: int, slots: list[int], errors: list[float], stamps: list[int] | None = None) -> None:
        """Update the reference with rows that were drawn, or with the caller's own; ``dropped``: late rows before."""
        if self.reference is None or not self.sampler.takes_priorities:
            return
        late = self.reference.draws.late(slots)
        if stamps is not None:
            is_other = [now != then for now, then in zip(self.reference.stamps(slots), stamps, strict=True)]
            assert all(other for is_late, other in zip(late, is_other, strict=True) if is_late), "a row was in time"
            late = is_other if self.setting.compilable else late
        fresh = [row for row, is_late in zip(zip(slots, errors, strict=True), late, strict=True) if not is_late]
        self.reference.update([slot for slot, _ in fresh], [error for _, error in fresh])
        assert self.dropped_updates() == dropped + sum(late)

    def dropped_updates(self) -> int:
        return int(self.sampler.stats().get("dropped_updates", torch.zeros(())))

    def update_all(self) -> None:
        """Update the priorities of all drawn batches."""
        while self.late:
            self.update()

    def some_index(self, count: int) -> tuple[torch.Tensor, list[int]]:
        """Random stored slots, with duplicates."""
        if self.pinned:
            tables = self.tables_of()
            held = (tables.position_of >= 0).any(0).nonzero().squeeze(1).tolist()
        else:
            held = sorted(self.content)
        slots = self.rng.choices(held, k=count)
        index = torch.tensor(slots)
        if self.setting.ndim == 2:
            index = torch.stack([index // self.setting.num_envs, index % self.setting.num_envs], -1)
        return index, slots

    def update_by_index(self, count: int | None = None) -> None:
        index, slots = self.some_index(count or self.rng.randint(1, 6))
        error = self.td_errors(len(slots))
        before = self.dropped_updates()
        self.buffer.update_priority(index, error)
        self.expect(before, slots, error.tolist())

    def extend_with_priorities(self) -> None:
        """Give new rows their first priorities, in an update for one or several writes, with an index of any form."""
        if self.setting.ndim == 2 or self.pinned or not self.sampler.takes_priorities:
            return
        written = []
        for _ in range(self.rng.choice([1, 1, 3])):
            begin = self.cursor
            self.extend()
            written += [(begin + row) % self.rows for row in range((self.cursor - begin - 1) % self.rows + 1)]
        before = self.dropped_updates()
        index, error = torch.tensor(self.rng.sample(written, len(written))), self.td_errors(len(written))
        form = self.rng.choice([torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist])
        self.buffer.update_priority(form(index), error)
        self.expect(before, index.tolist(), error.tolist())
        assert self.dropped_updates() == before

    def update_wrongly(self) -> None:
        if not self.sampler.takes_priorities:
            return
        index, slots = self.some_index(self.rng.randint(1, 4))
        count = len(slots)
        error = self.td_errors(count)
        kind = self.rng.choice(["nan", "inf", "negative", "huge", "short", "long", "outside", "below", "float"])
        wrong = {"nan": float("nan"), "inf": float("inf"), "negative": -1.0, "huge": 3e38}
        if kind in wrong:
            if kind == "huge" and (self.ranked or getattr(self.priorities, "alpha", 1.0) < 0.6):
                return
            error[self.rng.randrange(count)] = wrong[kind]
        elif kind in ("short", "long"):
            error = torch.ones(count + 1 if kind == "long" else count - 1 or 2)
        elif kind == "float":
            index = index.float() + 0.5
        else:
            # in storages of several columns, only the column is out of range
            index.reshape(count, -1)[self.rng.randrange(count), -1] = -1 if kind == "below" else self.outside
        if self.device == "cpu" or Layout((1,), torch.device("cpu")).validate or kind in ("short", "long", "float"):
            with self.refuses():
                self.buffer.update_priority(index, error)
        else:
            self.left_out(index, slots, error)

    @property
    def outside(self) -> int:
        """A column, or a slot, that is out of range."""
        return self.setting.num_envs if self.setting.ndim == 2 else 1000

    def left_out(self, index: torch.Tensor, slots: list[int], error: torch.Tensor) -> None:
        """Check that an update of which one row is invalid changes only the others, and counts it."""
        before, dropped = int(self.buffer.sampler.stats()["rejected_updates"]), self.dropped_updates()
        self.buffer.update_priority(index, error)
        assert int(self.buffer.sampler.stats()["rejected_updates"]) == before + 1
        inside = ((index >= 0) & (index < self.outside)).reshape(len(slots), -1)[:, -1].tolist()
        rows = zip(slots, error.tolist(), inside, strict=True)
        valid = [(slot, value) for slot, value, is_inside in rows if is_inside and 0 <= value < 1e38]
        self.expect(dropped, [slot for slot, _ in valid], [value for _, value in valid])

    # --- other operations

    def set_exponents(self) -> None:
        part = self.priorities
        if part == "uniform":
            return
        name = self.rng.choice(["alpha", "beta", "omega", "eta"])
        if name == "eta":
            if self.sampler_has_tables:
                share = self.rng.choice([0.0, 0.25, 0.9])
                self.sampler.eta = {"default": 1 - share, "a": share / 2, "b": share / 2}
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
        if kind == "state_dict":
            # load an older state over a newer one
            state = copy.deepcopy(self.buffer.state_dict())
            batch = self.sample() if self.sampler is self.buffer.sampler and len(self.buffer) else None
            self.buffer.load_state_dict(state)
            if self.reference is not None:
                self.reference.draws.load()
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
        if kind not in ("pickle", "deepcopy"):
            self.environments.load()
            if self.tables is not None:
                self.tables.episodes.clear()
        if self.reference is not None and kind in ("into another", "dumps"):
            # draws are not saved
            self.reference.draws = Draws()

    def empty(self) -> None:
        self.late.clear()
        self.buffer.empty()
        self.environments.restart()
        self.begin()
        if self.reference is not None:
            self.reference.empty()

    def refuses(self) -> Refuses:
        """Expect an error and no changes."""
        errors = ValueError, IndexError, TypeError, KeyError
        return Refuses(self.buffer, errors, None, ("sampler", "writer"))

    OPERATIONS = (
        (22, "extend"),
        (9, "add"),
        (1, "extend_beyond_capacity"),
        (1, "let_others_idle"),
        (26, "sample"),
        (22, "update"),
        (8, "update_by_index"),
        (4, "extend_with_priorities"),
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
