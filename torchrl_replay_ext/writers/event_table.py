"""The writer that detects events and fills event tables."""

from __future__ import annotations

import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from tensordict import NestedKey, TensorDictBase, is_tensorclass
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext._torchrl import (
    has_size,
    length,
    rows_of_ring,
    set_length,
    set_rows,
    shape_and_device,
    stored_data,
)
from torchrl_replay_ext.arguments import require_nested_keys
from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.indices import as_index
from torchrl_replay_ext.samplers.slot_index import row_major
from torchrl_replay_ext.writers.columns import column_of, holds_integers, on_cpu
from torchrl_replay_ext.writers.event_history import Entering, EpisodeTails, Timeline, WrittenRows
from torchrl_replay_ext.writers.round_robin import CompilableWriter, bind_samplers, length_now

_TRAJECTORY = ("collector", "traj_ids")
_TWO_STORAGES = "EventTableWriter: the tables are used with another storage; give each buffer its own EventTables."
# the writer of this process that last wrote to each EventTables
_LAST_WRITER: WeakKeyDictionary[EventTables, weakref.ref[EventTableWriter]] = WeakKeyDictionary()


class EventTableWriter(CompilableWriter):
    """Writes transitions in order and fills event tables (SSET, Kompella et al. 2022, Algorithm 1).

    If an event occurs at step t, the last τ transitions of the same episode of the same stream, including step t, enter
    the event's table, oldest first. A transition enters a table at most once, even if it was removed from the table in
    the meantime. Only transitions that are still in the default table can enter. An episode ends where ``done_key`` is
    True (terminated or truncated), or before a transition that ``init_key`` marks as the first one of an episode. The
    tables do not depend on how the data is split into calls of ``extend``, except that a condition with ``context``
    sees earlier transitions only if the default table still holds them.

    Streams: in flat storage, the entry ``stream_key`` identifies the stream of a transition. TorchRL's collectors write
    a trajectory id to this entry, so each episode is a separate stream. Data without this entry is one stream. In a
    storage with ``ndim`` >= 2 each column is a stream, and the entry, if present, separates its episodes. Trajectory
    ids can restart, for example with a new collector. Then a restarted id would continue an unfinished episode with the
    same id; end that episode first, or mark first transitions with ``init_key`` (TorchRL's ``InitTracker``).

    Events cannot be detected in a compiled graph. With a :class:`~torchrl_replay_ext.CompilableReplayBuffer`, sampling
    and priority updates can be compiled, but ``extend`` must be called outside of the graph.

    If a write raises an error, nothing is written.

    Args:
        tables: the tables to fill.
        stream_key: entry with the stream of each transition, integers. None: all data is one stream. The entry is
            optional only for the default key. Default: ``("collector", "traj_ids")``.
        done_key: entry that marks the end of an episode, bool. Default: ``("next", "done")``.
        init_key: entry that marks the first transition of an episode, bool; used if present. Default: ``"is_init"``.

    Raises:
        TypeError: if an argument has the wrong type; at a write, if the data is not a TensorDict or an entry has the
            wrong dtype.
        KeyError: at a write, if an entry is missing, or if the data has an entry that stored rows do not have.
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
        >>> rb.sample()["table"].sort().values
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
        require_nested_keys("EventTableWriter", done_key=done_key, init_key=init_key)
        if stream_key is not None:
            require_nested_keys("EventTableWriter", stream_key=stream_key)
        super().__init__()
        self._tables = tables
        self._stream_key, self._done_key, self._init_key = stream_key, done_key, init_key
        self._tails = EpisodeTails(tables)
        # num_resets of the tables at the time when the tails were valid
        self._resets = 0
        # the content of the storage for which the tables were allocated
        self._sized_by: Any = None
        # True during add()
        self._adds = False

    @property
    def tables(self) -> EventTables:
        """The tables that the writer fills."""
        return self._tables

    @property
    def _pinned(self) -> bool:
        return self._tables.retention == "pinned"

    def register_storage(self, storage: Storage) -> None:
        """Called by the buffer. Stores the tables at the storage, where the sampler finds them."""
        if getattr(storage, STORAGE_ATTRIBUTE, self._tables) is not self._tables:
            raise ValueError(
                "EventTableWriter: another writer already fills event tables for this storage; use one writer for each "
                "storage."
            )
        if self._pinned and storage.ndim != 1:
            raise ValueError(
                f"EventTableWriter: retention='pinned' needs a flat storage (ndim=1), not ndim={storage.ndim}."
            )
        if not has_size(storage):
            kind = type(storage).__name__
            raise ValueError(f"EventTableWriter: the {kind} has no size; pass one: {kind}(1000).")
        self._tables.check(storage.max_size)
        if self._tables.num_written and storage is not self._storage:
            raise ValueError(_TWO_STORAGES)
        super().register_storage(storage)
        setattr(storage, STORAGE_ATTRIBUTE, self._tables)

    def add(self, data: TensorDictBase) -> int:
        """Write a single transition, a TensorDict []."""
        self._require_tensordict("add", data)
        if self._storage.ndim > 1:
            raise ValueError(
                f"EventTableWriter.add: the storage has ndim={self._storage.ndim}: a write has one row per column. "
                "Use extend."
            )
        self._adds = True
        try:
            index = self.extend(data.unsqueeze(0))
        finally:
            self._adds = False
        self._set_index(data, index[0])
        return int(index[0])

    @staticmethod
    def _set_index(data: Any, index: Tensor) -> None:
        if not is_tensorclass(data):
            data.set("index", expand_as_right(index.to(data.device or index.device), data))

    def extend(self, data: TensorDictBase) -> Tensor:
        """Write ``data`` [n], or [t, e] in a storage of two dimensions, and fill the tables."""
        if is_traced():
            raise RuntimeError(
                "EventTableWriter.extend: events cannot be detected in a compiled graph; call extend outside of it."
            )
        self._require_tensordict("extend", data)
        storage: Any = self._storage
        if data.ndim != storage.ndim:
            raise ValueError(
                f"EventTableWriter: data of shape {tuple(data.shape)} does not fit a storage of ndim={storage.ndim}. "
                "Flatten it, with the stream of each transition as stream_key: "
                f"rb.append_transform(lambda td: td.reshape(-1), invert=True); or use a storage with ndim={data.ndim}."
            )
        if not data.shape[0]:
            raise RuntimeError("EventTableWriter.extend: the data has no rows; write at least one transition.")
        self._check(data, storage.ndim)
        self._claim_tables()
        self._tables.recover()
        if self._resets != self._tables.num_resets:
            # another process has reset the tables
            self._forget()
        steps, is_flat = data.shape[0], data.ndim == 1
        width = data.numel() // steps
        rows, occurred = self._read(data if is_flat else data.reshape(-1), width)
        piece = self._tables.capacity_of(0) if self._pinned else rows_of_ring(storage, data)
        if piece >= steps:
            return self._write(data, rows, occurred)
        written = []
        for first in range(0, steps, piece):
            of_part = slice(first * width, (first + piece) * width)
            written.append(self._write(data[first : first + piece], rows[of_part], occurred[of_part]))
        index = torch.cat(written)
        if is_flat:
            self._set_index(data, index)
        return index

    def _mark_update_entities(self, index: Tensor) -> None:
        # TorchRL updates the priority of an added row with a number as the index
        super()._mark_update_entities(index[0] if self._adds else index)

    def _claim_tables(self) -> None:
        """Raise ValueError if another writer of this process has filled the tables, else note that this one does."""
        last = _LAST_WRITER.get(self._tables)
        if last is not None and last() not in (None, self) and self._tables.num_written:
            raise ValueError(_TWO_STORAGES)
        _LAST_WRITER[self._tables] = weakref.ref(self)

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write at given slots and remove them from the event tables. Events in the data are ignored."""
        if self._pinned:
            raise RuntimeError(
                "EventTableWriter.write_at: with retention='pinned' the tables choose the slots; use extend or add."
            )
        result = super().write_at(index, data)
        if self._tables.is_allocated:
            slots = torch.as_tensor(result)
            known = shape_and_device(self._storage) if slots.ndim > 1 else None
            slots = slots.reshape(-1) if known is None else row_major(slots, known[0])
            self._tables.overwrite(np.unique(slots.cpu().numpy()), in_turn=False)
        return result

    # --- reading the data

    def _read(self, data: TensorDictBase, width: int) -> tuple[WrittenRows, np.ndarray]:
        """The rows of ``data`` [n], and where events occur in them, bool [n, events]."""
        count, specs = data.shape[0], self._tables.specs
        ends = column_of(data, self._done_key, required=True)
        begins = column_of(data, self._init_key, required=False)
        trajectory = None
        if self._stream_key is not None:
            trajectory = column_of(data, self._stream_key, required=self._stream_key != _TRAJECTORY)
        if trajectory is not None and not holds_integers(trajectory):
            raise TypeError(
                f"EventTableWriter: the entry {self._stream_key!r} must hold integers, not {trajectory.dtype}; pass "
                "the entry with the stream of each transition as stream_key=, or None for one stream."
            )
        assert ends is not None
        columns: dict[str | int, Tensor] = {"ends": ends.to(torch.bool)}
        if begins is not None:
            columns["begins"] = begins.to(torch.bool)
        if trajectory is not None:
            columns["trajectory"] = trajectory
        columns |= {number: spec.occurs(data).detach() for number, spec in enumerate(specs) if not spec.context}
        values = on_cpu(columns)
        stream, known = values.get("trajectory"), None
        if stream is not None:
            stream = stream.astype(np.int64, copy=False)
        if self._storage.ndim > 1:
            stream, known = np.arange(count) % width, stream
        elif stream is None:
            stream = np.full(count, -1)
        rows = WrittenRows(stream, known, values["ends"], values.get("begins"))
        occurred = np.zeros((count, len(specs)), bool)
        for number, spec in enumerate(specs):
            if not spec.context:
                occurred[:, number] = values[number]
        if any(spec.context for spec in specs):
            self._detect_with_context(data, rows, occurred)
        return rows, occurred

    def _detect_with_context(self, data: TensorDictBase, rows: WrittenRows, occurred: np.ndarray) -> None:
        """Set the columns of ``occurred``, bool [n, events], for events whose conditions need earlier transitions."""
        timeline = self._tails.timeline(rows)
        episodes = np.split(np.arange(len(timeline.row)), np.flatnonzero(np.diff(timeline.episode)) + 1)
        for number, spec in enumerate(self._tables.specs):
            for episode in episodes if spec.context else ():
                new = timeline.row[episode] >= 0
                if not new.any():
                    continue
                earlier = self._stored(timeline, episode[~new][-spec.context :])
                segment: Any = data[torch.as_tensor(timeline.row[episode[new]], device=data.device)]
                if earlier is not None:
                    keys = set(earlier.keys(True, True)) & set(segment.keys(True, True))
                    device = next(iter(segment.values(True, True))).device
                    segment = torch.cat([earlier.select(*keys).to(device), segment.select(*keys)])
                result = spec.occurs(segment).detach().cpu().numpy().reshape(-1)
                occurred[timeline.row[episode[new]], number] = result[len(result) - new.sum() :]

    def _stored(self, timeline: Timeline, places: np.ndarray) -> TensorDictBase | None:
        """The transitions at ``places`` of the timeline after the last overwritten one; None if there are none."""
        overwritten = np.flatnonzero(timeline.number[places] < self._tables.oldest)
        if len(overwritten):
            places = places[overwritten[-1] + 1 :]
        known = shape_and_device(self._storage)
        if not len(places) or known is None:
            return None
        index = np.unravel_index(timeline.slot[places], known[0])
        return stored_data(self._storage)[tuple(torch.from_numpy(i) for i in index)]

    # --- writing

    def _write(self, data: Any, rows: WrittenRows, occurred: np.ndarray) -> Tensor:
        """Write at most as many rows as fit into the default table."""
        tables = self._tables
        with tables.transaction():
            if self._pinned:
                if not tables.is_allocated:
                    tables.allocate(self._storage.max_size, self._device(data))
                timeline, entering = self._plan(rows, occurred)
                slots, index = self._write_pinned(data, timeline, entering)
                tables.list_of(0).insert(slots, np.arange(len(slots)) + tables.num_written)
                if timeline is not None:
                    timeline.set_slots(slots)
                    for table, (places, _) in entering.items():
                        self._insert(table, timeline, places)
            else:
                # the first write determines the size of the ring
                slots, index = self._write_ring(data)
                timeline, entering = self._plan(rows, occurred)
                if timeline is None:
                    tables.overwrite(slots)
                else:
                    timeline.set_slots(slots)
                    self._fill_ring(slots, timeline, entering)
            # last: if filling the lists is interrupted, recovery then removes these slots from the tables
            tables.written(slots)
            self._tails.update(rows, slots, timeline)
        return index

    def _plan(self, rows: WrittenRows, occurred: np.ndarray) -> tuple[Timeline | None, Entering]:
        """The streams with events, None if there are none, and the transitions that enter each table."""
        if not occurred.any():
            return None, {}
        timeline = self._tails.timeline(rows, occurred)
        return timeline, self._tails.plan(timeline, occurred)

    def _insert(self, table: int, timeline: Timeline, places: np.ndarray) -> None:
        self._tables.list_of(table).insert(timeline.slot[places], timeline.number[places])

    def _fill_ring(self, slots: np.ndarray, timeline: Timeline, entering: Entering) -> None:
        """Remove overwritten entries and insert new ones. The result is the same as for one write per row."""
        tables = self._tables
        is_stored = timeline.number >= tables.oldest + len(slots)
        overwritten = tables.holding(slots)
        row_by_row = False
        for table, (places, _) in entering.items():
            full = tables.size(table) + len(places) > tables.capacity_of(table)
            if full and (overwritten[table - 1].any() or not is_stored[places].all()):
                # in an ordered list, the overwritten entries are the oldest, which are removed first in any case
                row_by_row |= not tables.list_of(table).stays_ordered(timeline.number[places])
        if not row_by_row:
            tables.overwrite(slots)
            for table, (places, _) in entering.items():
                if is_stored[places].any():
                    self._insert(table, timeline, places[is_stored[places]])
            return
        done = 0
        for row in np.unique(np.concatenate([at for _, at in entering.values()])).tolist():
            tables.overwrite(slots[done : row + 1])
            done = row + 1
            for table, (places, at) in entering.items():
                if (at == row).any():
                    self._insert(table, timeline, places[at == row])
        tables.overwrite(slots[done:])

    def _write_ring(self, data: TensorDictBase) -> tuple[np.ndarray, Tensor]:
        """Write to the storage; returns the slots, int64 [n], and TorchRL's index of them."""
        tables = self._tables
        count = data.numel()
        first = self._cursor * (count // len(data))
        if not tables.num_written and length(self._storage):
            self._allocate()
            tables.adopt(length(self._storage), first)
        if tables.skip_to(first):
            self._tails.clear()
        try:
            # not extend(), which moves the cursor to the device of the storage, for graphs
            index = self._undone_if_refused(self._extend, data)
        except BaseException:
            # the rows may be in the storage already
            if tables.num_slots:
                tables.overwrite(tables.ring(first, count))
                self._tails.clear()
            tables.abandon_write()
            raise
        self._allocate()
        return tables.ring(first, count), index

    def _write_pinned(
        self, data: TensorDictBase, timeline: Timeline | None, entering: Entering
    ) -> tuple[np.ndarray, Tensor]:
        """Like :meth:`_write_ring`, to free slots."""
        tables, storage = self._tables, self._storage
        slots_of = {
            table: timeline.slot[places[-tables.capacity_of(table) :]]
            for table, (places, _) in entering.items()
            if timeline is not None
        }
        slots = tables.take(data.shape[0], slots_of)
        device = tables.device
        to_write = torch.from_numpy(slots).to(device, non_blocking=True)
        index = (
            to_write if data.device in (None, device) else torch.from_numpy(slots).to(data.device, non_blocking=True)
        )
        data.set("index", expand_as_right(index, data))
        length_before = length_now(storage)
        try:
            set_rows(storage, to_write, data, first=int(slots[0]) if isinstance(as_index(slots), slice) else None)
            self._mark_update_entities(to_write)
        except BaseException:
            # transitions that were about to enter a table may have left the default one
            tables.give_back(np.concatenate([slots, *(entering[entering >= 0] for entering in slots_of.values())]))
            set_length(storage, int(length_before))
            self._tails.clear()
            tables.abandon_write()
            raise
        self._write_count += data.shape[0]
        return slots, index

    def _device(self, data: TensorDictBase) -> torch.device:
        device = getattr(self._storage, "device", "auto")
        return torch.device(data.device or "cpu") if device in (None, "auto") else torch.device(device)

    def _allocate(self) -> None:
        data = stored_data(self._storage)
        if data is self._sized_by and self._tables.is_allocated:
            return
        known = shape_and_device(self._storage)
        assert known is not None
        self._tables.allocate(int(np.prod(known[0])), known[1])
        self._sized_by = data

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count)
        self._tables.clear()
        self._forget()

    def _forget(self) -> None:
        self._tails.clear()
        self._resets = self._tables.num_resets

    # --- saving

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self._storage is not None and not self._tables.is_allocated:
            raise RuntimeError(
                "EventTableWriter: the buffer is sent to another process before its first write, so the processes "
                "would not share the tables. Call rb.extend(data), then rb.empty(), before. (TorchRL's collectors do "
                "this, except with a storage of shared_init=True, or with policy_factory= instead of policy=.)"
            )
        return {**super().__getstate__(), "_sized_by": None}

    def _described(self) -> list[str]:
        return [self._tables.retention, *self._tables.names]

    def state_dict(self) -> dict[str, Any]:
        """A copy of the cursor, the tables and the newest transitions of each unfinished episode."""
        tables: dict[str, Tensor] = {}
        num_slots = self._tables.num_slots
        if self._tables.is_allocated:
            tables = {key: tensor.clone() for key, tensor in self._tables.tensors().items()}
            tables["begins"] = torch.tensor(self._tables.regions(num_slots))
        return {
            **super().state_dict(),
            "tables": tables,
            "episodes": {**self._tails.tensors(), "num_slots": torch.tensor(num_slots)},
            "described": self._described(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            ValueError: if the state does not fit this writer; nothing is changed then.
        """
        episodes, saved = state_dict["episodes"], state_dict["tables"]
        num_slots = int(episodes["num_slots"])
        tables = self._tables
        if state_dict["described"] != self._described():
            raise ValueError(
                f"EventTableWriter.load_state_dict: the state is for the tables {state_dict['described']}, this writer "
                f"has {self._described()} (retention first); create it with the same events and retention."
            )
        if num_slots:
            same = torch.equal(saved["begins"].cpu(), torch.tensor(tables.regions(num_slots)))
            if not same or (tables.num_slots and tables.num_slots != num_slots):
                raise ValueError(
                    "EventTableWriter.load_state_dict: the state is for tables of other capacities or another storage "
                    f"size ({num_slots} slots); create the buffer with the same capacities and size."
                )
            known = None if self._storage is None else shape_and_device(self._storage)
            current = tables.device if tables.is_allocated else saved["slot_at"].device
            tables.allocate(num_slots, current if known is None else known[1])
            tables.load(saved)
        else:
            tables.clear()
        super().load_state_dict(state_dict)
        self._tails.load(episodes)
        self._resets = tables.num_resets
        if self._storage is not None:
            # the next write notifies them of removed entries before it notifies them of itself
            bind_samplers(self._storage)

    def dumps(self, path: str | Path) -> None:
        """Save the state to the directory ``path``."""
        super().dumps(path)
        state = self.state_dict()
        torch.save({key: state[key] for key in ("tables", "episodes", "described")}, Path(path) / "event_tables.pt")

    def loads(self, path: str | Path) -> None:
        """Restore a state that :meth:`dumps` saved to the directory ``path``."""
        saved = torch.load(Path(path) / "event_tables.pt", weights_only=True, map_location="cpu")
        self.load_state_dict({**super().state_dict(), **saved})
        super().loads(path)
