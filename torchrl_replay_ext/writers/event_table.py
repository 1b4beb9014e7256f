"""The writer that notices events and sends what led to them to their tables."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.event_spec import is_key
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.samplers.base import row_major
from torchrl_replay_ext.writers.round_robin import CompilableWriter

_TRAJECTORY = ("collector", "traj_ids")
_NEVER = np.iinfo(np.int64).max


@dataclass
class _Tail:
    """The latest transitions of an episode that goes on.

    Args:
        slot: where they are stored, int64 [n].
        number: their numbers, counted as they are written, int64 [n].
        sent: to which tables they were sent, bool [n, tables].
        trajectory: the episode's id, or -1.
    """

    slot: np.ndarray
    number: np.ndarray
    sent: np.ndarray
    trajectory: int

    def __len__(self) -> int:
        return len(self.slot)


@dataclass
class _Rows:
    """Rows about to be written.

    Args:
        stream: the stream of each, int64 [n].
        trajectory: the episode's id, or -1, int64 [n].
        ends: whether each ends its episode, bool [n].
        begins: whether each is known to begin one, bool [n].
    """

    stream: np.ndarray
    trajectory: np.ndarray
    ends: np.ndarray
    begins: np.ndarray

    def __len__(self) -> int:
        return len(self.stream)


@dataclass
class _Timeline:
    """Rows about to be written, each stream led by its tail: stream by stream, each in the order of time.

    Args:
        row: of those to be written, -1 in a tail, int64 [m].
        slot: where it is stored, int64 [m]; -1 if it is not yet.
        number: int64 [m].
        episode: rows of one episode share a number, int64 [m].
        sent: bool [m, tables].
    """

    row: np.ndarray
    slot: np.ndarray
    number: np.ndarray
    episode: np.ndarray
    sent: np.ndarray


class EventTableWriter(CompilableWriter):
    """Writes transitions in turn and fills event tables (SSET, Kompella et al. 2022, Algorithm 1).

    If an event occurs at step t, the last τ transitions of the same episode of the same stream, t included, enter the
    event's table, oldest first, but for those that were sent to that table before (even if they have left it since).
    A transition that is no longer in the default table cannot be sent. An episode ends with ``done_key``, terminated or
    truncated, or where ``init_key`` marks the beginning of the next. What enters does not depend on how the data is cut
    into calls of ``extend``.

    Lanes: in flat storage, the entry ``stream_key`` tells them apart, which TorchRL's collectors write (a trajectory
    id: each episode is a stream of its own then); data without that entry is one stream. In a storage of ``ndim`` >= 2
    each column is one, and the entry, if present, tells its episodes apart. Trajectory ids that restart, with a new
    collector for example, must not continue an episode that was left open: end it, or mark beginnings by ``init_key``
    (torchrl's ``InitTracker``).

    Writing events stays outside graphs: a :class:`~torchrl_replay_ext.CompilableReplayBuffer` samples and updates
    priorities in one, but its ``extend`` with this writer must be called outside.

    Args:
        tables: the tables to fill.
        stream_key: where the stream of each transition is stored, integers; None: one stream. Any but the default,
            ``("collector", "traj_ids")``, must be present.
        done_key: where the end of an episode is stored, bool. Default: ``("next", "done")``.
        init_key: where the first transition of an episode is marked, bool; used if present. Default: ``"is_init"``.

    Raises:
        TypeError: if an argument has the wrong type; at a write, if the data is not a TensorDict or an entry has the
            wrong dtype.
        KeyError: at a write, if an entry is missing, or if the rows have an entry that those stored before do not
            have. Nothing is written then, as in all these cases.
        ValueError: at a write, if an entry has the wrong shape, or the data of several streams is not flat.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> from torchrl_replay_ext import EventSpec, EventTables, EventTableSampler
        >>> tables = EventTables([EventSpec("goal", ("next", "terminated"), history=3)], capacity={"goal": 100})
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000),
        ...     writer=EventTableWriter(tables),
        ...     sampler=EventTableSampler(tables, eta={"default": 0.5, "goal": 0.5}, min_size=1),
        ...     batch_size=4,
        ... )
        >>> done = torch.zeros(10, 1, dtype=torch.bool)
        >>> done[7] = True
        >>> data = {"obs": torch.arange(10.0), "next": {"done": done, "terminated": done.clone()}}
        >>> index = rb.extend(TensorDict(data, [10]))
        >>> tables["goal"].index()
        tensor([5, 6, 7])
        >>> rb.sample()["table"]
        tensor([0, 0, 1, 1])
    """

    def __init__(
        self,
        tables: EventTables,
        *,
        stream_key: NestedKey | None = _TRAJECTORY,
        done_key: NestedKey = ("next", "done"),
        init_key: NestedKey = "is_init",
    ):
        if not isinstance(tables, EventTables):
            raise TypeError(f"EventTableWriter: tables must be EventTables, not {type(tables).__name__}.")
        for name, key in (("stream_key", stream_key), ("done_key", done_key), ("init_key", init_key)):
            if not is_key(key) and not (name == "stream_key" and key is None):
                raise TypeError(
                    f"EventTableWriter({name}={key!r}): {name} must be the name of an entry, a string or a tuple of "
                    "strings."
                )
        super().__init__()
        self._tables = tables
        self._stream_key, self._done_key, self._init_key = stream_key, done_key, init_key
        self._numbers = [tables.table_of(spec) for spec in tables.specs]
        # how many transitions of an episode may still be needed
        self._memory = max(max(spec.history - 1, spec.context) for spec in tables.specs)
        self._tails: dict[int, _Tail] = {}
        # how often the tables had been replaced when those were written
        self._resets = 0
        # so many that it is worth while to look for those that have come to nothing
        self._many_tails = 64

    @property
    def tables(self) -> EventTables:
        """The tables it fills."""
        return self._tables

    def register_storage(self, storage: Storage) -> None:
        """Called by the buffer; a sampler that was built apart finds the tables through the storage."""
        if getattr(storage, STORAGE_ATTRIBUTE, self._tables) is not self._tables:
            raise ValueError("EventTableWriter: another writer fills event tables of this storage already.")
        if self._tables.retention == "pinned" and storage.ndim != 1:
            raise ValueError("EventTableWriter: retention='pinned' needs a flat storage (ndim=1).")
        self._tables.check(storage.max_size)
        if self._tables.num_written and storage is not self._storage:
            raise ValueError("EventTableWriter: the tables are in use with another storage; give each buffer its own.")
        super().register_storage(storage)
        setattr(storage, STORAGE_ATTRIBUTE, self._tables)

    def add(self, data: TensorDictBase) -> int:
        """Write a single transition."""
        index = self.extend(data.unsqueeze(0))
        data.set("index", expand_as_right(index[0].to(data.device or index.device), data))
        return int(index[0])

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write ``data`` [n], or [t, e] in a storage of two dimensions, and fill the tables."""
        if is_traced():
            raise RuntimeError("EventTableWriter: events are not part of a graph; call extend outside of it.")
        if not is_tensor_collection(data):
            raise TypeError(f"EventTableWriter: the data must be a TensorDict, not {type(data).__name__}.")
        storage: Any = self._storage
        if data.ndim != storage.ndim:
            raise ValueError(
                f"EventTableWriter: data of shape {tuple(data.shape)} does not fit a storage of ndim={storage.ndim}. "
                "Flatten it, with the stream of each transition as stream_key: "
                "rb.append_transform(lambda td: td.reshape(-1), invert=True); or use a storage of that ndim."
            )
        if not data.shape[0]:
            raise RuntimeError("EventTableWriter.extend: there is nothing to write.")
        flat = data.reshape(-1) if data.ndim > 1 else data
        self._check(data, storage.ndim)
        self._tables.mend()
        if self._resets != self._tables.num_resets:
            # by another process
            self._forget()
        rows = self._read(flat, data.shape[1:].numel())
        occurred = self._occurred(flat, rows)
        if self._tables.retention == "pinned":
            piece = self._tables.capacity_of(0)
        else:
            piece = storage._max_size_along_dim0(batched_data=data)
        written = []
        steps, width = data.shape[0], data.shape[1:].numel()
        for first in range(0, steps, piece):
            part = data if piece >= steps else data[first : first + piece]
            of_part = slice(first * width, (first + piece) * width)
            with self._tables.change():
                written.append(self._write(part, _part(rows, of_part), occurred[of_part]))
        if len(written) > 1:
            index = torch.cat(written)
            if not storage._storage.ndim > 1:
                data.set("index", expand_as_right(index.to(data.device or index.device), data))
            return index
        return written[0]

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write at given slots, whose entries leave the event tables; no events are looked for."""
        if self._tables.retention == "pinned":
            raise RuntimeError("EventTableWriter.write_at: with retention='pinned' the tables choose the slots.")
        result = super().write_at(index, data)
        if self._tables.num_slots:
            slots = self._flat(torch.as_tensor(result).reshape(-1) if _is_flat(result) else result)
            self._tables.overwrite(slots.unique().to(self._tables.device), in_turn=False)
        return result

    def _numbers_of(self, data: TensorDictBase, key: NestedKey, *, required: bool) -> np.ndarray | None:
        """The entries of a column, one per row."""
        column = data.get(key, None)
        if column is None:
            if required:
                raise KeyError(f"EventTableWriter: the data has no entry {key!r}; pass its name, or let it be written.")
            return None
        if column.numel() != data.shape[0]:
            raise ValueError(
                f"EventTableWriter: the entry {key!r} has shape {tuple(column.shape)} for {data.shape[0]} transitions; "
                "one value per transition is needed."
            )
        return column.detach().reshape(-1).cpu().numpy()

    def _read(self, data: TensorDictBase, width: int) -> _Rows:
        count = data.shape[0]
        ends = self._numbers_of(data, self._done_key, required=True)
        begins = self._numbers_of(data, self._init_key, required=False)
        trajectory = None
        if self._stream_key is not None:
            required = self._stream_key != _TRAJECTORY
            trajectory = self._numbers_of(data, self._stream_key, required=required)
        if trajectory is not None and trajectory.dtype.kind not in "iu":
            raise TypeError(f"EventTableWriter: the entry {self._stream_key!r} must hold integers.")
        nowhere = np.full(count, -1)
        trajectory = nowhere if trajectory is None else trajectory.astype(np.int64)
        columns = self._storage.ndim > 1
        assert ends is not None
        return _Rows(
            stream=np.arange(count) % width if columns else trajectory,
            trajectory=trajectory if columns else nowhere,
            ends=ends.astype(bool),
            begins=np.zeros(count, bool) if begins is None else begins.astype(bool),
        )

    def _occurred(self, data: TensorDictBase, rows: _Rows) -> np.ndarray:
        """Whether each event occurs in each row, bool [n, events]."""
        occurred = np.zeros((len(rows), len(self._tables.specs)), bool)
        timeline: _Timeline | None = None
        for number, spec in enumerate(self._tables.specs):
            if not spec.context:
                occurred[:, number] = spec.occurs(data).detach().cpu().numpy()
                continue
            timeline = timeline or self._timeline(rows)
            for episode in np.split(np.arange(len(timeline.row)), np.flatnonzero(np.diff(timeline.episode)) + 1):
                new = timeline.row[episode] >= 0
                if not new.any():
                    continue
                earlier = self._stored(timeline, episode[~new][-spec.context :])
                segment = data[torch.as_tensor(timeline.row[episode[new]], device=data.device)]
                if earlier is not None:
                    keys = set(earlier.keys(True, True)) & set(segment.keys(True, True))
                    device = next(iter(segment.values(True, True))).device
                    segment = torch.cat([earlier.select(*keys).to(device), segment.select(*keys)])
                result = spec.occurs(segment).detach().cpu().numpy()
                occurred[timeline.row[episode[new]], number] = result[len(result) - new.sum() :]
        return occurred

    def _stored(self, timeline: _Timeline, places: np.ndarray) -> TensorDictBase | None:
        """The transitions at ``places`` of the timeline, as far back as they are stored without a gap; None if none."""
        alive = timeline.number[places] >= self._tables.oldest
        gap = np.flatnonzero(~alive)
        places = places[gap[-1] + 1 :] if len(gap) else places
        if not len(places):
            return None
        storage: Any = self._storage
        index = np.unravel_index(timeline.slot[places], storage._storage.shape[: storage.ndim])
        return storage._storage[tuple(torch.from_numpy(i) for i in index)]

    def _timeline(self, rows: _Rows) -> _Timeline:
        written = self._tables.num_written
        order = np.argsort(rows.stream, kind="stable")
        streams, first = np.unique(rows.stream[order], return_index=True)
        parts: list[tuple[np.ndarray, ...]] = []
        count = len(self._tables)
        for stream, chosen in zip(streams.tolist(), np.split(order, first[1:]), strict=True):
            starts = rows.begins[chosen].copy()
            starts[1:] |= rows.ends[chosen[:-1]] | (np.diff(rows.trajectory[chosen]) != 0)
            tail = self._tails.get(stream)
            if tail is None:
                starts[0] = True
            else:
                starts[0] |= rows.trajectory[chosen[0]] != tail.trajectory
                begin = np.zeros(len(tail), bool)
                begin[0] = True
                parts.append((np.full(len(tail), -1), tail.slot, tail.number, begin, tail.sent))
            nowhere, unsent = np.full(len(chosen), -1), np.zeros((len(chosen), count), bool)
            parts.append((chosen, nowhere, written + chosen, starts, unsent))
        row, slot, number, starts, sent = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _Timeline(row, slot, number, starts.cumsum(), sent)

    def _plan(self, rows: _Rows, occurred: np.ndarray) -> tuple[_Timeline, dict[int, tuple[np.ndarray, np.ndarray]]]:
        """Which rows enter which table, and at which row.

        Returns:
            The timeline, with what was sent marked in it; for each table that something enters, the places in the
            timeline, in the order in which they enter, and the row at which each does.
        """
        timeline = self._timeline(rows)
        size = len(timeline.row)
        here = np.arange(size)
        entering = {}
        new = timeline.row >= 0
        events = np.zeros((size, occurred.shape[1]), bool)
        events[new] = occurred[timeline.row[new]]
        reach, oldest = self._tables.capacity_of(0), self._tables.oldest
        for table in sorted(set(self._numbers)):
            trigger = np.full(size, _NEVER)
            for column, spec in enumerate(self._tables.specs):
                if self._numbers[column] != table or not events[:, column].any():
                    continue
                following = np.where(events[:, column], here, size)
                following = np.minimum.accumulate(following[::-1])[::-1]
                found = np.minimum(following, size - 1)
                reached = (following < size) & (following - here < spec.history)
                reached &= timeline.episode[found] == timeline.episode
                # an overwritten transition cannot be sent
                reached &= timeline.number[found] - timeline.number < reach
                reached &= timeline.number >= oldest
                trigger = np.minimum(trigger, np.where(reached, following, _NEVER))
            chosen = np.flatnonzero((trigger < _NEVER) & ~timeline.sent[:, table])
            if len(chosen):
                at = timeline.row[trigger[chosen]]
                order = np.argsort(at, kind="stable")
                timeline.sent[chosen, table] = True
                entering[table] = chosen[order], at[order]
        return timeline, entering

    def _write(self, data: TensorDictBase, rows: _Rows, occurred: np.ndarray) -> Tensor:
        """Write rows that fit into the default table."""
        tables, storage = self._tables, self._storage
        if not tables.num_slots and tables.retention == "pinned":
            tables.allocate(storage.max_size, self._device(data))
        if tables.retention == "pinned":
            timeline, entering = self._plan(rows, occurred)
            index = slots = self._write_pinned(data, timeline, entering)
            tables.insert(0, slots, tables.num_written + torch.arange(len(slots), device=slots.device))
        else:
            # in a ring, the first write tells how large it is
            index = self._write_ring(data)
            slots = self._flat(index).to(tables.device)
            timeline, entering = self._plan(rows, occurred)
        new = timeline.row >= 0
        timeline.slot[new] = slots.cpu().numpy()[timeline.row[new]]
        tables.written(slots)
        if tables.retention == "pinned":
            for table, (places, _) in entering.items():
                self._insert(table, timeline, places)
        else:
            self._fill_ring(slots, timeline, entering)
        self._remember(rows, timeline)
        return index

    def _insert(self, table: int, timeline: _Timeline, places: np.ndarray) -> None:
        device = self._tables.device
        slots, numbers = (torch.from_numpy(column[places]).to(device) for column in (timeline.slot, timeline.number))
        self._tables.insert(table, slots, numbers)

    def _fill_ring(
        self, slots: Tensor, timeline: _Timeline, entering: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Drop what was overwritten and add what enters, as if row after row had been written."""
        tables = self._tables
        alive = timeline.number >= tables.oldest
        dying = tables.holds(slots).any(1).tolist()
        in_turn = False
        for table, (places, _) in entering.items():
            full = tables.size(table) + len(places) > tables.capacity_of(table)
            deaths = dying[table - 1] or not alive[places].all()
            if full and deaths:
                # the order only matters where what dies is not what would have to make room anyway
                in_turn |= not tables.follows(table, torch.from_numpy(timeline.number[places]).to(tables.device))
        if not in_turn:
            tables.overwrite(slots)
            for table, (places, _) in entering.items():
                if alive[places].any():
                    self._insert(table, timeline, places[alive[places]])
            return
        done = 0
        for row in np.unique(np.concatenate([at for _, at in entering.values()])).tolist():
            tables.overwrite(slots[done : row + 1])
            done = row + 1
            for table, (places, at) in entering.items():
                if (at == row).any():
                    self._insert(table, timeline, places[at == row])
        tables.overwrite(slots[done:])

    def _write_ring(self, data: TensorDictBase) -> Tensor:
        # the slot to be written next
        first = int(self._cursor) * data.shape[1:].numel()
        storage: Any = self._storage
        if not self._tables.num_written and len(storage):
            self._allocate()
            self._tables.adopt(len(storage), first - 1)
        skipped = self._tables.skipped(first)
        if len(skipped) and int(self._write_count):
            # a write has broken off, in a process that was killed
            self._tables.overwrite(skipped)
            self._tables.written(skipped)
            self._tails.clear()
        try:
            index = super().extend(data)
        except BaseException:
            # the sampler has refused the rows, but they may be in the storage
            if self._tables.num_slots:
                slots = (first + torch.arange(data.numel(), device=self._tables.device)) % self._tables.num_slots
                self._tables.overwrite(slots)
                self._tables.written(slots)
                self._tails.clear()
            self._tables.settle()
            raise
        self._allocate()
        return index

    def _write_pinned(
        self, data: TensorDictBase, timeline: _Timeline, entering: dict[int, tuple[np.ndarray, np.ndarray]]
    ) -> Tensor:
        tables = self._tables
        slots_of = {
            table: torch.from_numpy(timeline.slot[places[-tables.capacity_of(table) :]]).to(tables.device)
            for table, (places, _) in entering.items()
        }
        slots = tables.take(data.shape[0], slots_of)
        index = slots.to(data.device or slots.device)
        data.set("index", expand_as_right(index, data))
        try:
            self._storage.set(slots, data)
            self._mark_update_entities(slots)
        except BaseException:
            tables.give_back(slots)
            self._tails.clear()
            tables.settle()
            raise
        self._write_count += data.shape[0]
        return index

    def _remember(self, rows: _Rows, timeline: _Timeline) -> None:
        """Keep the end of each stream's last episode, if it goes on."""
        order = np.flatnonzero(timeline.row >= 0)
        stream = rows.stream[timeline.row[order]]
        last = order[np.append(np.flatnonzero(np.diff(stream)), len(stream) - 1)]
        begins = np.searchsorted(timeline.episode, timeline.episode[last])
        for place, begin in zip(last.tolist(), begins.tolist(), strict=True):
            row = timeline.row[place]
            name = int(rows.stream[row])
            if rows.ends[row] or not self._memory:
                self._tails.pop(name, None)
                continue
            kept = slice(max(begin, place + 1 - self._memory), place + 1)
            self._tails[name] = _Tail(
                timeline.slot[kept], timeline.number[kept], timeline.sent[kept], int(rows.trajectory[row])
            )
        # episodes that broke off are forgotten with their transitions
        if len(self._tails) > self._many_tails:
            oldest = self._tables.oldest
            for name in [name for name, tail in self._tails.items() if tail.number[-1] < oldest]:
                del self._tails[name]
            self._many_tails = 2 * len(self._tails) + 64

    def _device(self, data: TensorDictBase) -> torch.device:
        device = getattr(self._storage, "device", "auto")
        return torch.device(data.device or "cpu") if device in (None, "auto") else torch.device(device)

    def _allocate(self) -> None:
        storage: Any = self._storage
        data = storage._storage
        shape = tuple(storage._total_shape)[: storage.ndim]
        device = next(column.device for column in data.values(True, True))
        self._tables.allocate(int(np.prod(shape)), device)

    def _flat(self, index: Tensor) -> Tensor:
        """Slots in row-major order of an index [n] or [n, ndim]."""
        if index.ndim == 1:
            return index
        storage: Any = self._storage
        return row_major(index, tuple(storage._total_shape)[: storage.ndim])

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count)
        self._tables.clear()
        self._forget()

    def _forget(self) -> None:
        """No episode goes on."""
        self._tails.clear()
        self._resets = self._tables.num_resets

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self._storage is not None and not self._tables.num_slots:
            raise RuntimeError(
                "EventTableWriter: the buffer must have been written to before it is sent to another process, so that "
                "both see the same tables: rb.extend(data), then rb.empty(). (TorchRL's collectors do so by "
                "themselves, but not with a storage of shared_init=True, nor with policy_factory= in place of policy=.)"
            )
        return super().__getstate__()

    def state_dict(self) -> dict[str, Any]:
        """A copy of the cursor, the tables and the latest transitions of the episodes that go on."""
        tails = list(self._tails.values())
        count = len(self._tables)

        def joined(arrays: list[np.ndarray], empty: np.ndarray) -> Tensor:
            return torch.from_numpy(np.concatenate([empty, *arrays]))

        state = {
            "stream": torch.tensor([*self._tails], dtype=torch.int64),
            "length": torch.tensor([len(tail) for tail in tails], dtype=torch.int64),
            "trajectory": torch.tensor([tail.trajectory for tail in tails], dtype=torch.int64),
            "slot": joined([tail.slot for tail in tails], np.zeros(0, np.int64)),
            "number": joined([tail.number for tail in tails], np.zeros(0, np.int64)),
            "sent": joined([tail.sent for tail in tails], np.zeros((0, count), bool)),
            "num_slots": torch.tensor(self._tables.num_slots),
        }
        described = [self._tables.retention, *self._tables.names]
        tables: dict[str, Tensor] = {}
        if self._tables.num_slots:
            begins = torch.tensor(self._tables.regions(self._tables.num_slots))
            tables = {**self._tables.tensors(), "begins": begins}
        return {
            **super().state_dict(),
            "tables": {key: tensor.clone() for key, tensor in tables.items()},
            "episodes": state,
            "described": described,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; ValueError if the tables differ, with nothing changed."""
        episodes, saved = state_dict["episodes"], dict(state_dict["tables"])
        num_slots = int(episodes["num_slots"])
        tables = self._tables
        device = saved["slot_at"].device if saved else torch.device("cpu")
        if tables.num_slots:
            device = tables.device
        described = [tables.retention, *tables.names]
        if state_dict["described"] != described:
            raise ValueError(
                f"EventTableWriter.load_state_dict: the state is for the tables {state_dict['described']}, this writer "
                f"has {described} (retention first)."
            )
        if num_slots:
            same = torch.equal(saved["begins"].cpu(), torch.tensor(tables.regions(num_slots)))
            if not same or (tables.num_slots and tables.num_slots != num_slots):
                raise ValueError(
                    "EventTableWriter.load_state_dict: the state is for tables of other capacities, or for a storage "
                    f"of {num_slots} slots."
                )
            if self._storage is not None and getattr(self._storage, "_storage", None) is not None:
                columns = self._storage._storage.values(True, True)  # pyright: ignore
                device = next(column.device for column in columns)
            tables.allocate(num_slots, device)
            tables.load(saved)
            self._many_tails = 64
        else:
            tables.clear()
        super().load_state_dict(state_dict)
        ends = np.cumsum(episodes["length"].numpy())[:-1]
        columns = [np.split(episodes[key].cpu().numpy().copy(), ends) for key in ("slot", "number", "sent")]
        self._tails = {
            int(stream): _Tail(slot, number, sent, int(trajectory))
            for stream, trajectory, slot, number, sent in zip(
                episodes["stream"], episodes["trajectory"], *columns, strict=False
            )
        }
        self._resets = tables.num_resets

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``."""
        super().dumps(path)
        state = self.state_dict()
        torch.save({key: state[key] for key in ("tables", "episodes", "described")}, Path(path) / "event_tables.pt")

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` saved."""
        saved = torch.load(Path(path) / "event_tables.pt", weights_only=True, map_location="cpu")
        self.load_state_dict({**super().state_dict(), **saved})
        super().loads(path)


def _is_flat(index: Any) -> bool:
    return not isinstance(index, Tensor) or index.ndim <= 1


def _part(rows: _Rows, part: slice) -> _Rows:
    return _Rows(rows.stream[part], rows.trajectory[part], rows.ends[part], rows.begins[part])
