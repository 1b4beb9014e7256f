"""A replay buffer for compiled training steps, and its windows of consecutive steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, Sequence
from torchrl.envs import Compose

from torchrl_replay_ext._torchrl import (
    count_sample,
    expands_draws,
    locked,
    next_step,
    set_entries,
    shape_and_device,
    stored_data,
)
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, where_int64
from torchrl_replay_ext.core.layout import row_major
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage
from torchrl_replay_ext.writers.round_robin import CompilableWriter, bind_samplers

_OWNER = "CompilableReplayBuffer(sample_unit=Sequence(...))"


class CompilableSequence(Sequence):
    """TorchRL's :class:`~torchrl.data.Sequence` with the same windows, without reads of values.

    It works in graphs, and on an accelerator the host does not wait. It reads the end flags of the steps that a window
    can reach. TorchRL searches the whole storage after each write.

    Args:
        unit: the windows.
    """

    def __init__(self, unit: Sequence):
        vars(self).update(vars(unit))

    def expand(self, index: Any, info: dict[str, Any], storage: Any) -> tuple[Any, dict[str, Any]]:
        """Index and info of the windows around the drawn slots; see :class:`torchrl.data.Sequence`."""
        known = shape_and_device(storage)
        assert known is not None, "a draw from an empty buffer is an error"
        (steps, *columns), _ = known
        anchor = torch.stack(index, -1) if isinstance(index, tuple) else index.unsqueeze(1)
        column = row_major(anchor[:, 1:], (*columns,)) if columns else torch.zeros_like(anchor[:, 0])
        time, ahead = anchor[:, 0], self.dilation * (self.length + self.bootstrap - 1)
        forward, backward = _to_ends_of_ring(storage, time, steps, math.prod(columns))
        shifts = self.episode_boundary == "stop"
        reach_back = self.dilation * self.burn_in + ahead * shifts
        stops = self.done_key is not None and self.episode_boundary != "include_reset"
        if stops and reach_back + ahead:
            reach = torch.arange(-reach_back, ahead, device=time.device)
            near = (time.unsqueeze(1) + reach) % steps
            ends = self._ends(storage, near * math.prod(columns) + column.unsqueeze(1))
            forward = torch.minimum(forward, _first(ends[:, reach_back:]))
            backward = torch.minimum(backward, _first(ends[:, :reach_back].flip(1)))
        if shifts:
            shift = torch.minimum((ahead - forward).clamp_min(0), backward)
            time, forward, backward = time - shift, forward + shift, backward - shift
        rows = self.burn_in + self.length + self.bootstrap
        place = torch.arange(rows, device=time.device)
        wanted = ((place - self.burn_in) * self.dilation).expand(len(time), rows)
        offset = torch.maximum(torch.minimum(wanted, forward.unsqueeze(1)), -backward.unsqueeze(1))
        learning = (place >= self.burn_in) & (place < self.burn_in + self.length)
        given = {key: value.repeat_interleave(rows, 0) if value.ndim else value for key, value in info.items()}
        info = {
            **given,
            "sequence_id": torch.arange(len(time), device=time.device).repeat_interleave(rows),
            "step_in_sequence": place.repeat(len(time)),
            "learning_mask": learning.repeat(len(time)),
            "anchor_index": (anchor if columns else anchor.squeeze(1)).repeat_interleave(rows, 0),
            "validity_mask": (offset == wanted).flatten(),
        }
        slots = ((time.unsqueeze(1) + offset) % steps).flatten()
        if not columns:
            return slots, info
        return (slots, *(part.repeat_interleave(rows) for part in anchor[:, 1:].unbind(1))), info

    def _ends(self, storage: Any, slots: Tensor) -> Tensor:
        """Whether an episode ends in each of ``slots`` [n, k], bool [n, k]."""
        data = stored_data(storage)
        flags = data.get(self.done_key, None) if is_tensor_collection(data) else None
        if flags is None:
            raise KeyError(f"{_OWNER}: the stored data has no entry {self.done_key!r}, which marks ends of episodes.")
        flags = flags.flatten(0, storage.ndim - 1)
        return gather_in_bounds(flags, slots).to(torch.bool).reshape(*slots.shape, -1).any(-1)


def _first(mask: Tensor) -> Tensor:
    """The place of the first True of each row of ``mask`` [n, k], k if there is none; int64 [n]."""
    return (mask.cumsum(1) == 0).sum(1)


def _to_ends_of_ring(storage: Any, time: Tensor, steps: int, columns: int) -> tuple[Tensor, Tensor]:
    """The number of steps from ``time`` [n] to the newest and to the oldest stored step, int64 [n] each."""
    following: Any = next_step(storage)
    written = storage.num_rows // columns
    oldest = where_int64(written >= steps, torch.zeros_like(written) + following, torch.zeros_like(written))
    newest = oldest + written - 1
    return (newest - time) % steps, (time - oldest) % steps


# the parts whose states are checked before any is loaded
_PARTS = ("_storage", "_sampler", "_writer")


class CompilableReplayBuffer(TensorDictReplayBuffer):
    """A :class:`~torchrl.data.TensorDictReplayBuffer` that can be part of one compiled graph.

    ``extend``, ``sample`` and ``update_tensordict_priority`` run under ``torch.compile(fullgraph=True)``. They are
    compiled once: no write, wrap of the ring or annealing of an exponent causes a recompilation. In CUDA graphs
    (``mode="reduce-overhead"``, or tensordict's ``CudaGraphModule``) the host never waits for the device. Outside
    graphs the buffer behaves like its base class.

    * The first write must run outside the graph, because it sets up storage and sampler. So must all writes with event
      tables and, on accelerators, with ReaPER and slices.
    * A graph draws from torch's global generator (``torch.manual_seed``). It ignores the buffer's ``generator``, which
      cannot be traced.
    * A graph takes no locks. Do not let other threads write, sample or update while it runs. ``prefetch`` has no effect
      in a graph.
    * A graph raises no errors, except those of FrameStackStorage. TD errors that are negative, not finite or too large
      change nothing and are counted in ``sampler.stats()`` as ``rejected_updates``. Draws from an empty buffer return
      slot 0 with weight 0.
    * Samples of this package's prioritized samplers carry ``"write_stamp"``, int64 [B]: the number of the write of each
      row. ``update_tensordict_priority`` uses the stamps to drop rows whose slot was overwritten after the draw.
    * ``mark_update`` in a graph needs distinct rows.
    * ``sample_unit=Sequence(...)`` works in graphs too. Other sample units, and subclasses of ``Sequence``, work
      outside graphs only.

    Args:
        **arguments: keyword arguments of :class:`~torchrl.data.TensorDictReplayBuffer`, with its defaults except for
            two: ``storage`` is required and must be a :class:`CompilableTensorStorage`; the default of ``writer`` is
            :class:`~torchrl_replay_ext.writers.round_robin.CompilableWriter`.

    Raises:
        TypeError: if the storage is of another class.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl_replay_ext import ProportionalSampler
        >>> rb = CompilableReplayBuffer(
        ...     storage=CompilableTensorStorage(1000), sampler=ProportionalSampler(1000), batch_size=4
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> @torch.compile(fullgraph=True)
        ... def step():
        ...     batch = rb.sample()
        ...     batch["td_error"] = batch["obs"].square().sum(-1)
        ...     rb.update_tensordict_priority(batch)
        ...     return batch
        >>> step()["obs"].shape
        torch.Size([4, 3])
    """

    # True while add() runs: TorchRL then calls update_tensordict_priority for the new row, which may have no TD error
    _adding = False
    _storage: CompilableTensorStorage
    _transform: Compose | None

    def __init__(self, **arguments: Any):
        unit = arguments.get("sample_unit")
        if isinstance(unit, Sequence) and type(unit) is Sequence:
            arguments["sample_unit"] = CompilableSequence(unit)
        if arguments.get("writer") is None:
            arguments["writer"] = CompilableWriter
        super().__init__(**arguments)

    def _init(self) -> None:
        super()._init()
        if not isinstance(self._storage, CompilableTensorStorage):
            raise TypeError(
                f"CompilableReplayBuffer(storage={type(self._storage).__name__}): pass storage="
                "CompilableTensorStorage(capacity); for other storages use torchrl's TensorDictReplayBuffer."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``. The first write or sample after this call may run in a graph.

        Raises:
            ValueError: if the state of a part does not fit; nothing is changed then, unless the parts are not of one
                moment.
        """
        for name in _PARTS:
            if check := getattr(getattr(self, name), "require_loadable", None):
                check(state_dict[name])
        super().load_state_dict(state_dict)
        bind_samplers(self._storage)

    def loads(self, path: Any) -> None:
        """Load what ``dumps`` saved; errors are those of :meth:`load_state_dict`."""
        for name in _PARTS:
            part: Any = getattr(self, name)
            if getattr(part, "saved_at", None):
                part.require_loadable(part.saved_at(Path(path) / name[1:]))
        super().loads(path)
        bind_samplers(self._storage)

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        **waiting: Any,
    ) -> Any:
        """Draw a batch; see :meth:`torchrl.data.TensorDictReplayBuffer.sample`.

        Args:
            batch_size: number of rows. None (default): that of the buffer.
            return_info: return a tuple of the batch and a dict with the columns that the sampler adds. Default: False.
            include_info: deprecated in TorchRL.
            **waiting: ``wait``, ``timeout`` and ``cancel_event`` of releases of torchrl after 0.14.

        Raises:
            RuntimeError: if there is no batch size, or the buffer is empty; in a graph, with ``wait``.
            TimeoutError: if there is no data after ``timeout`` seconds.
            TypeError: if torchrl cannot wait.
        """
        size = self._batch_size if batch_size is None else batch_size
        if is_traced():
            if waiting.get("wait"):
                raise RuntimeError("CompilableReplayBuffer.sample(wait=True): a graph cannot wait; leave wait= out.")
            if size is None:
                raise RuntimeError("CompilableReplayBuffer.sample: pass batch_size= to the buffer or to sample().")
            if expands_draws(self) and not isinstance(self._sample_unit, CompilableSequence):
                raise NotImplementedError(
                    f"CompilableReplayBuffer(sample_unit={type(self._sample_unit).__name__}(...)): a graph can contain "
                    "no sample unit other than TorchRL's Sequence. Call sample() and update_tensordict_priority() "
                    "outside the compiled function, and pass it the sample."
                )
            return self._draw(size, return_info)
        # samplers raise an error if the buffer is empty; to read its length, the host would wait for an accelerator
        if size is None or include_info is not None or waiting or not self._reads_columns():
            return super().sample(batch_size, return_info, include_info, **waiting)
        with locked(self):
            drawn = self._draw(size, return_info)
        count_sample(self, size)
        return drawn

    def _reads_columns(self) -> bool:
        """True if a batch is the stored columns at the drawn index, which needs none of TorchRL's further steps."""
        storage = self._storage
        if self._prefetch or self._pin_memory or self._has_transforms or self._writer.tracks_generations:
            return False
        return storage.ndim == 1 and type(stored_data(storage)) is TensorDict

    def _notify_replay_state_change(self) -> None:
        # torch cannot trace the condition variable that wakes other threads; they must not wait while a graph runs
        if not is_traced():
            super()._notify_replay_state_change()  # pyright: ignore[reportAttributeAccessIssue]: not in torchrl 0.14

    @property
    def _has_transforms(self) -> bool:
        return self._transform is not None and len(self._transform) > 0

    def _draw(self, batch_size: int, return_info: bool) -> Any:
        """:meth:`sample` in a graph, or of columns."""
        storage, unit = self._storage, self._sample_unit
        if storage.ndim > 1 or not is_tensor_collection(stored_data(storage)) or self._has_transforms:
            data, info = self._sample(batch_size)
        else:
            index, info = self._sampler.sample(storage, batch_size)
            if unit is not None:
                index, info = unit.expand(index, info, storage)
            info["index"] = index
            # TorchRL's samplers of slices return tuples, others may return lists or slices
            if isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64:
                data = self._collate_fn(storage.take(index))
            else:
                data = self._collate_fn(storage.get(index))
        entries = {key: torch.stack(value, -1) if isinstance(value, tuple) else value for key, value in info.items()}
        set_entries(data, entries)
        return (data, info) if return_info else data

    def update_priority(self, index: int | Tensor | tuple[Tensor, ...], priority: float | Tensor) -> None:
        """Set priorities by index; see :meth:`torchrl.data.ReplayBuffer.update_priority`."""
        index = torch.stack(index, -1) if isinstance(index, tuple) else index
        priority = (
            priority if isinstance(priority, Tensor) else torch.as_tensor(priority, dtype=torch.float32, device="cpu")
        )
        if self.dim_extend and priority.ndim > 1:
            priority = self._transpose(priority).flatten()
        with locked(self):
            self._sampler.update_priority(index, priority, storage=self._storage)

    def _set_index_in_td(self, tensordict: TensorDictBase, index: Any) -> None:
        # a write of one step per environment, [envs, 1], for which TorchRL raises
        if self._storage.ndim > 1 and isinstance(index, Tensor) and index.shape[:1] == tensordict.shape[:1]:
            tensordict.set("index", index.unflatten(0, tensordict.shape[: self._storage.ndim]))
        else:
            super()._set_index_in_td(tensordict, index)

    def add(self, data: TensorDictBase) -> int:
        """Write a single row. Without a TD error it gets the priority of a new transition."""
        self._adding = True
        try:
            return super().add(data)
        finally:
            self._adding = False

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample from its TD errors (the entry ``priority_key``).

        Rows whose slot was overwritten after the draw are dropped. With ``sample_unit=Sequence(...)``, only the
        anchors of the windows are updated, each with the largest TD error of the valid rows of its windows.

        Args:
            data: a sample, whole or in part, with TD errors of its batch shape or with further dimensions, squared or
                absolute as the sampler requires. Its batch shape may be [B], or [slices, steps].

        Raises:
            KeyError: if the entry ``priority_key`` is missing. Nothing is changed.
        """
        sampler = self._sampler
        if not isinstance(sampler, PrioritizedSampler):
            return
        if data.get(self.priority_key, None) is None and getattr(sampler, "takes_priorities", True):
            if self._adding:
                return
            raise KeyError(
                f"CompilableReplayBuffer.update_tensordict_priority: the sample has no entry {self.priority_key!r} "
                f"with TD errors, only {list(data.keys(True, True))}. Pass the batch to which the loss has "
                "written the TD errors, or pass the name that the loss uses as priority_key= to the buffer."
            )
        if data.get("index", None) is None:
            raise KeyError(
                "CompilableReplayBuffer.update_tensordict_priority: the sample has no entry 'index'; pass a batch that "
                "this buffer drew. The actor's batch of DecoupledSampler takes no priorities."
            )
        anchored = expands_draws(self) and data.get("anchor_index", None) is not None
        # a row that is copied from another buffer may have the stamp of that buffer
        stamped = not self._adding and data.get(STAMP_KEY, None) is not None
        stamped = stamped and getattr(sampler, "takes_priorities", False)
        if anchored or (stamped and data.ndim != 1):
            # TorchRL would take the largest TD error of each row of a batch [slices, steps]
            needed = ("anchor_index", "validity_mask", "index", STAMP_KEY, self.priority_key)
            data = data.select(*needed, strict=False).reshape(-1)
        if not stamped:
            super().update_tensordict_priority(data)
            return
        stamp = data[STAMP_KEY]
        error = data.get(self.priority_key, None)
        if error is None or error.ndim != 1:
            # the largest of several TD errors of a row
            error = self._get_priority_vector(data)
        if anchored and (valid := data.get("validity_mask", None)) is not None:
            # the row of the anchor is always valid
            error = error.masked_fill(~valid, 0.0)
        rows = data["anchor_index" if anchored else "index"], stamp, error.detach()
        # the batch may have been moved, for example to the device of the networks
        index, stamp, priority = (row.to(self._storage.counters_device) for row in rows)
        own: dict[str, Any] = {"storage": self._storage, "stamp": stamp}
        with locked(self):
            sampler.update_priority(index, priority, **own)
