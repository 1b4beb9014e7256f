"""The writer that detects events and fills event tables."""

from __future__ import annotations

import math
import warnings
import weakref
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensorclass
from tensordict.utils import expand_as_right
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.core.layout import as_index, row_major
from torchrl_replay_ext.core.streams import Episodes, check_streams, require_episodes
from torchrl_replay_ext.kernels.layouts import CHANGES
from torchrl_replay_ext.kernels.ops import events_earlier, events_write
from torchrl_replay_ext.samplers.bound_state import require_fitting_tables
from torchrl_replay_ext.writers.event_rows import EventReader, EventRows
from torchrl_replay_ext.writers.round_robin import CompilableWriter, bind_samplers

# slot and number of the last step of an open episode, and its trajectory
_NO_STEP = [-1, -1, -1]


class EventTableWriter(CompilableWriter):
    """Writes transitions in order and fills event tables (SSET, Kompella et al. 2022, Algorithm 1).

    If an event occurs at step t, the last τ transitions of the same episode of the same stream, including step t, enter
    the event's table, oldest first. A transition enters a table at most once, even if it was removed from the table in
    the meantime. Only transitions that are still in the default table can enter. An episode ends where ``done_key`` is
    True (terminated or truncated), or before a transition that ``init_key`` marks as the first one of an episode. The
    tables do not depend on how the data is split into calls of ``extend``, except that a condition with ``context``
    sees earlier transitions only if the default table still holds them.

    Streams: in flat storage, the entry ``traj_key`` identifies the stream of a transition. TorchRL's collectors write
    a trajectory id to this entry, so each episode is a separate stream. Data without this entry is one stream. In a
    storage with ``ndim`` >= 2 each column is a stream, and the entry, if present, separates its episodes. Trajectory
    ids can restart, for example with a new collector. Then a restarted id would continue an unfinished episode with the
    same id; end that episode first, or mark first transitions with ``init_key`` (TorchRL's ``InitTracker``).

    Events cannot be detected in a compiled graph. With a :class:`~torchrl_replay_ext.CompilableReplayBuffer`, sampling
    and priority updates can be compiled, but ``extend`` must be called outside of the graph.

    If a write raises an error, nothing of it is stored; what it would have displaced is gone. Quantile and Novel may
    remember its rows, if the storage raised the error. Data that does not fit into the default table at once is written
    in parts, of which the first may be stored already.

    Args:
        tables: the tables to fill.
        episodes: how rows are divided into episodes; ``num_streams`` is not needed. Default: None, as
            :class:`~torchrl_replay_ext.Episodes` says. When a state is loaded, unfinished episodes end: a later event
            does not reach their transitions.

    Raises:
        TypeError: if an argument has the wrong type; at a write, if the data is not a TensorDict or an entry has the
            wrong dtype.
        KeyError: at a write, if an entry is missing, or if the data has an entry that stored rows do not have.
        ValueError: at a write, if an entry has the wrong shape, or the data of several streams is not flat.

    List storages take rows with any entries, shapes and dtypes.

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
        episodes: Episodes | None = None,
    ):
        if not isinstance(tables, EventTables):
            raise TypeError(f"EventTableWriter: tables must be EventTables, not {type(tables).__name__}.")
        episodes = require_episodes("EventTableWriter", episodes)
        super().__init__()
        # the tables that the writer fills
        self.tables = tables
        # pinned tables choose the slots
        self._follows_ring = not tables.is_pinned
        self._reader = EventReader(tables.specs, episodes)
        self._has_context = any(spec.context for spec in tables.specs)
        self._table_of = np.array([tables.names.index(spec.table or spec.name) for spec in tables.specs])
        self._history = np.array([spec.history for spec in tables.specs])
        # the last step of the unfinished episode of each stream; the tables know the steps before it
        self._last_steps: dict[int, list[int]] = {}
        # the content of the storage for which the tables were allocated
        self._sized_by: Any = None
        self._done_and_ids = episodes.done_key, episodes.traj_key
        self._warned_of_cut = False

    def register_storage(self, storage: Storage) -> None:
        """Called by the buffer. Stores the tables at the storage, where the sampler finds them."""
        if self.tables.is_pinned and storage.ndim != 1:
            raise ValueError(
                f"EventTableWriter: retention='pinned' needs a flat storage (ndim=1), not ndim={storage.ndim}."
            )
        if not _torchrl.has_size(storage):
            kind = type(storage).__name__
            raise ValueError(f"EventTableWriter: the {kind} has no size; pass one: {kind}(1000).")
        self.tables.check(storage.max_size)
        other = None if self.tables.storage is None else self.tables.storage()
        if getattr(storage, STORAGE_ATTRIBUTE, self.tables) is not self.tables or other not in (None, storage):
            raise ValueError(
                "EventTableWriter: the tables are used with another storage, or the storage with other tables; give "
                "each buffer its own EventTables, and each storage one writer."
            )
        super().register_storage(storage)
        self.tables.storage = weakref.ref(storage)
        setattr(storage, STORAGE_ATTRIBUTE, self.tables)

    def add(self, data: TensorDictBase) -> int:
        """Write a single transition, a TensorDict []."""
        self._require_tensordict("add", data)
        if self._storage.ndim > 1:
            raise ValueError(
                f"EventTableWriter.add: the storage has ndim={self._storage.ndim}: a write has one row per column. "
                "Use extend."
            )
        index = self._extend(data.unsqueeze(0), as_number=True)
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
        if 0 in data.shape:
            return super().extend(data)
        return self._extend(data)

    def _extend(self, data: TensorDictBase, *, as_number: bool = False) -> Tensor:
        """:meth:`extend`; ``as_number``: samplers are notified of a single row by a number."""
        storage: Any = self._storage
        if data.ndim != storage.ndim:
            raise ValueError(
                f"EventTableWriter: data of shape {tuple(data.shape)} does not fit a storage of ndim={storage.ndim}. "
                "Flatten it, with trajectory ids: "
                f"rb.append_transform(lambda td: td.reshape(-1), invert=True); or use a storage with ndim={data.ndim}."
            )
        self._check(data, storage.ndim)
        stored = _torchrl.stored_data(storage)
        if stored is None or stored is not self._sized_by:
            self._allocate(data)
            self._sized_by = stored
        steps, is_flat = data.shape[0], data.ndim == 1
        width = data.numel() // steps
        flat_data = data if is_flat else data.reshape(-1)
        rows = self._reader.read(flat_data, None if is_flat else width)
        if self._has_context:
            self._detect_with_context(flat_data, rows)
        self._reader.read_stateful(flat_data, rows)
        # a write fits into the default table
        piece = self.tables.capacities[0] // width
        if piece >= steps:
            return self._write(data, rows, as_number)
        written = []
        for first in range(0, steps, piece):
            flat = slice(first * width, (first + piece) * width)
            written.append(
                self._write(data[first : first + piece], EventRows(*(column[flat] for column in rows)), False)
            )
        index = torch.cat(written)
        if is_flat:
            self._set_index(data, index)
        return index

    def _allocate(self, data: Any) -> None:
        """Allocate the tables for the storage, which the first write of ``data`` allocates."""
        known = _torchrl.shape_and_device(self._storage)
        if known is None:
            device = getattr(self._storage, "device", "auto")
            device = torch.device(data.device or "cpu") if device in (None, "auto") else torch.device(device)
            known = (_torchrl.rows_of_ring(self._storage, data), *data.shape[1:]), device
        self.tables.allocate(math.prod(known[0]), known[1])

    def write_at(self, index: int | Tensor, data: Any) -> Any:
        """Write at given slots and remove them from the event tables. Events in the data are ignored."""
        if self.tables.is_pinned:
            raise RuntimeError(
                "EventTableWriter.write_at: with retention='pinned' the tables choose the slots; use extend or add."
            )
        result = super().write_at(index, data)
        slots = result if isinstance(result, Tensor) else torch.as_tensor(result, device="cpu")
        known = _torchrl.shape_and_device(self._storage) if slots.ndim > 1 else None
        slots = slots.reshape(-1) if known is None else row_major(slots, known[0])
        self.tables.remove(slots.cpu().numpy())
        return result

    # --- reading the data

    def _detect_with_context(self, data: TensorDictBase, rows: EventRows) -> None:
        """Set the columns of ``rows.occurred`` for events whose conditions need earlier transitions."""
        specs = [(number, spec) for number, spec in enumerate(self.tables.specs) if spec.context]
        most = max(spec.context for _, spec in specs)
        order = rows.stream.argsort(kind="stable")
        stream, trajectory, ends, begins, _ = (column[order] for column in rows)
        is_first_of_stream = np.append(True, stream[1:] != stream[:-1])
        is_next = ~is_first_of_stream[1:] & (trajectory[1:] == trajectory[:-1]) & ~ends[:-1] & ~begins[1:]
        firsts = np.append(0, np.flatnonzero(~is_next) + 1)
        # of each episode: the slots of its earlier rows, and where its rows are in the data
        none, goes_on = np.zeros(0, np.int64), is_first_of_stream & ~begins
        of_firsts = (column[firsts].tolist() for column in (stream, trajectory, goes_on))
        earlier = [self._earlier(s, t, most) if goes else none for s, t, goes in zip(*of_firsts, strict=True)]
        episodes = np.split(order, firsts[1:])
        joined, begin = self._joined(data, earlier, episodes), 0
        for slots, episode in zip(earlier, episodes, strict=True):
            end = begin + len(slots) + len(episode)
            for number, spec in specs:
                count = min(len(slots), spec.context)
                result = spec.signal(joined[begin + len(slots) - count : end]).detach().cpu().numpy().reshape(-1)
                rows.occurred[episode, number] = result[count:]
            begin = end

    def _earlier(self, stream: int, trajectory: int, count: int) -> np.ndarray:
        """The slots of the last stored transitions of the unfinished episode of a stream, at most ``count``."""
        slot, number, last_trajectory = self._last_steps.get(stream, _NO_STEP)
        slots = np.full(count, -1)
        if slot >= 0 and last_trajectory == trajectory:
            events_earlier(slots, slot, number, *self.tables.arrays())
        return slots[slots >= 0][::-1]

    def _joined(self, data: Any, earlier: list[np.ndarray], episodes: list[np.ndarray]) -> Any:
        """For each episode the stored rows in the slots ``earlier``, then its rows of ``data``."""
        storage: Any = self._storage
        slots, known = np.concatenate(earlier), _torchrl.shape_and_device(storage)
        if known is not None and len(slots):
            index = [*map(torch.from_numpy, np.unravel_index(slots, known[0]))]
            stored: Any = storage.get(tuple(index) if len(index) > 1 else index[0])
            stored = torch.stack(stored) if isinstance(stored, list) else stored
            keys = set(stored.keys(True, True)) & set(data.keys(True, True))
            device = next(iter(data.values(True, True))).device
            data = torch.cat([part.select(*keys).to(device) for part in (stored, data)])
        of_stored = np.split(np.arange(len(slots)), np.cumsum([len(part) for part in earlier])[:-1])
        order = [part for pair in zip(of_stored, episodes, strict=True) for part in (pair[0], len(slots) + pair[1])]
        return data[torch.as_tensor(np.concatenate(order), device=data.device)]

    # --- writing

    def _write(self, data: Any, rows: EventRows, as_number: bool) -> Tensor:
        """Write at most as many rows as fit into the default table. After an error nothing is written."""
        tables, storage, count = self.tables, self._storage, len(rows.stream)
        arrays, streams = tables.arrays(), dict[int, int]()
        stream_of = np.array([streams.setdefault(stream, len(streams)) for stream in rows.stream.tolist()])
        last_steps = np.array([self._last_steps.get(stream, _NO_STEP) for stream in streams])
        cursor, write_count, length_before = self._cursor, self._write_count, _torchrl.length(storage)
        first, counts = cursor * (count // len(data)), arrays[4]
        if not counts[0]:
            tables.adopt(length_before, first)
        slots = np.full(count, -1) if tables.is_pinned else np.arange(first, first + count) % tables.num_slots
        size = int(counts[0])
        cut = np.zeros(1, np.int64)
        fill = last_steps, cut, slots, stream_of, *rows[1:], self._table_of, self._history, *arrays
        try:
            if tables.is_pinned:
                events_write(*fill)
                index, on_host = self._store_at(slots, data)
            else:
                # not extend(), which moves the cursor to the device of the storage, for graphs
                index, on_host = self._store(data)
                events_write(*fill)
            # TorchRL updates the priority of an added row with a number as the index
            self._mark_update_entities(on_host[0] if as_number else on_host)
        except BaseException:
            self._cursor, self._write_count = cursor, write_count
            tables.undo(slots[slots >= 0], size)
            if tables.is_pinned:
                _torchrl.set_length(storage, length_before)
            else:
                self._discard(cursor, data, length_before)
            raise
        for stream, last_step in zip(streams, last_steps.tolist(), strict=True):
            self._last_steps[stream] = last_step
            if last_step[0] < 0:
                del self._last_steps[stream]
        if len(self._last_steps) > 2 * tables.num_slots:
            # episodes that were interrupted
            number = tables.number.tolist()
            open_steps = self._last_steps.items()
            self._last_steps = {stream: step for stream, step in open_steps if number[step[0]] == step[1]}
        number = tables.number if tables.is_pinned else None
        check_streams(storage, torch.from_numpy(slots), *self._done_and_ids, number=number)
        if cut[0] and not self._warned_of_cut:
            self._warn_of_cut()
        return index

    def _warn_of_cut(self) -> None:
        self._warned_of_cut = True
        larger = "capacity['default'] of the tables" if self.tables.is_pinned else "storage"
        warnings.warn(
            "EventTableWriter: an event took fewer earlier steps than its history=: the default table no longer holds "
            f"them, because it has the last {int(self.tables.capacities[0])} transitions of all streams together. If "
            "S streams are written in turn, a history of τ steps needs τ · S transitions. Pass a smaller history=, or "
            f"a larger {larger}.",
            stacklevel=2,
        )

    def _store_at(self, slots: np.ndarray, data: Any) -> tuple[Tensor, Tensor]:
        """Write ``data`` to ``slots``; returns the index on the device of the data, and on the CPU."""
        device, on_cpu = self.tables.device, torch.from_numpy(slots)
        written = on_cpu.to(device, non_blocking=True)
        index = written if data.device in (None, device) else on_cpu.to(data.device, non_blocking=True)
        self._set_index(data, index)
        consecutive = isinstance(as_index(slots), slice)
        _torchrl.set_rows(self._storage, written, data, first=int(slots[0]) if consecutive else None)
        self._write_count += len(slots)
        return index, on_cpu

    def _empty(self, empty_write_count: bool = True) -> None:
        super()._empty(empty_write_count)
        self.tables.clear()
        self._last_steps = {}

    # --- saving

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None and self._storage is not None and not self.tables.is_allocated:
            raise RuntimeError(
                "EventTableWriter: the buffer is sent to another process before its first write, so the processes "
                "would not share the tables. Call rb.extend(data), then rb.empty(), before. (TorchRL's collectors do "
                "this, except with a storage of shared_init=True, or with policy_factory= instead of policy=.)"
            )
        return {**super().__getstate__(), "_sized_by": None}

    def _described(self) -> list[str]:
        return [self.tables.retention, *self.tables.names]

    def state_dict(self) -> dict[str, Any]:
        """A copy of the cursor and the tables; unfinished episodes end when it is loaded."""
        tables: dict[str, Tensor] = {}
        if self.tables.is_allocated:
            tables = {key: tensor.clone() for key, tensor in self.tables.tensors().items()}
            # it numbers the changes of this buffer only, and also counts loads
            tables["counters"][CHANGES] = 0
        return {**super().state_dict(), "tables": tables, "described": self._described()}

    def require_loadable(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError if a state does not fit this writer and its storage."""
        super().require_loadable(state_dict)
        name, tables, saved = "EventTableWriter.load_state_dict", self.tables, state_dict["tables"]
        if state_dict["described"] != self._described():
            raise ValueError(
                f"{name}: the state is for the tables {state_dict['described']}, this writer has {self._described()} "
                "(retention first); create it with the same events and retention."
            )
        if saved:
            known = None if self._storage is None else _torchrl.shape_and_device(self._storage)
            num_slots = len(saved["number"]) if known is None else math.prod(known[0])
            require_fitting_tables(name, saved, tables, num_slots)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`.

        Raises:
            ValueError: if the state does not fit this writer; nothing is changed then.
        """
        super().load_state_dict(state_dict)
        tables, saved = self.tables, state_dict["tables"]
        tables.clear()
        self._last_steps = {}
        if saved:
            known = None if self._storage is None else _torchrl.shape_and_device(self._storage)
            tables.allocate(len(saved["number"]), tables.device if known is None else known[1])
            tables.load(saved)
        if self._storage is not None:
            # they read the restored tables
            bind_samplers(self._storage)

    def saved_at(self, path: str | Path) -> dict[str, Any]:
        """What :meth:`dumps` saved in the directory ``path``."""
        return torch.load(Path(path) / "event_tables.pt", weights_only=True, map_location="cpu")

    def dumps(self, path: str | Path) -> None:
        """Save the state to the directory ``path``."""
        Path(path).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict(), Path(path) / "event_tables.pt")

    def loads(self, path: str | Path) -> None:
        """Restore a state that :meth:`dumps` saved to the directory ``path``."""
        self.load_state_dict(self.saved_at(path))
