"""What every sampler with priorities shares: TorchRL's contract, validation, write stamps, state."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, get_args

import torch
from tensordict import TensorDict, is_tensor_collection
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torchrl.data.replay_buffers import RoundRobinWriter, Sampler, Sequence, Storage

from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import (
    TDError,
    WeightNorm,
    as_number,
    require_bool,
    require_choice,
    require_finite,
    require_integer,
)
from torchrl_replay_ext.compilation import (
    EagerFallback,
    gather_in_bounds,
    is_traced,
    mark_static,
    scalar,
    scatter_in_bounds,
)
from torchrl_replay_ext.core.sum_tree import MaxTree, SumTree, UpdateMask
from torchrl_replay_ext.functional import extremes, last_occurrence, write_last

# Batches that are remembered until their priorities come back.
_OUTSTANDING = 32
# Slots per update to which an annealed alpha is applied in turn, where the end of its schedule cannot be seen.
_SWEEP = 64
# Instead of the step at which the last write ended: the writer is none that writes in turn.
_OUT_OF_TURN = -2
# The largest priority is kept in float64, priorities in float32 after several roundings: this much may lie in between.
_ROUNDING = 4 * torch.finfo(torch.float32).eps
# Where a sample for a traced step carries the number of the write of each row.
STAMP_KEY = "write_stamp"


def _length(storage: Storage) -> int:
    return len(storage)  # pyright: ignore[reportArgumentType]: the abstract class declares no result


def _has_turns(storage: Any) -> bool:
    """Whether a single writer fills this storage, slot after slot."""
    buffers = storage._attached_entities
    return len(buffers) == 1 and isinstance(getattr(buffers[0], "_writer", None), RoundRobinWriter)


def draws_sequences(sampler: Sampler, storage: Any) -> bool:
    """True if a buffer expands this sampler's draws to windows (TorchRL's ``sample_unit=Sequence(...)``)."""
    for buffer in storage._attached_entities:
        own = getattr(buffer, "_sampler", None)
        if sampler in (own, getattr(own, "critic_sampler", None)):
            return isinstance(getattr(buffer, "_sample_unit", None), Sequence)
    return False


def _as_float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def is_same_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are one and the same."""
    return first.data_ptr() == second.data_ptr()


def row_major(index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flat slots, in row-major order, of an index [n, ndim] into a storage of this shape; [n]."""
    slots = index[:, 0]
    for dim, length in enumerate(shape[1:], start=1):
        slots = slots * length + index[:, dim]
    return slots


class ShowsArguments:
    """Base class that lets ``inspect.signature`` of a sampler show its arguments, which TorchRL's metaclass hides."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        arguments = list(inspect.signature(cls.__init__).parameters.values())
        cls.__signature__ = inspect.Signature(arguments[1:])


class PrioritySampler(ShowsArguments, Sampler):
    """Abstract sampler that draws by priorities d = |δ| + eps of the stored transitions.

    It translates between TorchRL's buffer and flat slots: a storage of shape [T, E, ...] has T·E·... slots in row-major
    order. A subclass keeps the distribution over slots and provides :meth:`_allocate`, :meth:`_clear`, :meth:`_write`,
    :meth:`_update`, :meth:`_draw` or :meth:`_rows`, :meth:`_limit`, :meth:`_tensors`, :meth:`_restored`,
    :meth:`_reweight` and :meth:`_unnormalized`.

    * New transitions get the largest d seen so far (1 at first), or with ``max_priority_within_buffer`` the largest of
      the stored transitions that have been updated.
    * Of duplicates in one update the last one wins.
    * A batch that comes back for its update is recognised by its indices; slots that were overwritten since it was
      drawn keep the priority of their new content. The last 32 batches are remembered.
    * In a traced step (:class:`~torchrl_replay_ext.CompilableReplayBuffer`) nothing is kept in Python and nothing
      looked at: rows bring the number of their slot's write with them, and what eager mode refuses is counted.
    """

    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = "max"
    # read by CompilableReplayBuffer: samples carry the number of the write of each row
    takes_stamps = True
    # read by CompilableReplayBuffer: True if draws depend on TD errors
    takes_priorities = True
    # whether writes lose nothing by being part of a graph
    writes_in_graphs = True

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | Anneal,
        beta: float | Anneal,
        eps: float,
        td_error: TDError,
        weight_norm: WeightNorm,
        max_priority_within_buffer: bool = False,
    ):
        name = type(self).__name__
        require_integer(name, "capacity", capacity)
        require_choice(name, "td_error", td_error, get_args(TDError))
        require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        require_bool(name, "max_priority_within_buffer", max_priority_within_buffer)
        self._capacity = capacity
        self._eps = require_finite(name, "eps", eps)
        self._within_buffer = max_priority_within_buffer
        self._td_error = td_error
        self._weight_norm = weight_norm
        self._hyperparameters = {
            "alpha": Hyperparameter(name, "alpha", alpha, hint="; use 0 for uniform sampling"),
            "beta": Hyperparameter(name, "beta", beta, high=1.0),
        }
        self._shape: tuple[int, ...] | None = None
        self._setup(capacity, torch.device("cpu"))

    def _setup(self, size: int, device: torch.device) -> None:
        self._size, self._device = size, device
        for hyperparameter in self._hyperparameters.values():
            hyperparameter.to(device)
        # the number of writes so far when a slot was last written, itself included; 0: never
        self._stamp = torch.zeros(size, dtype=torch.int64, device=device)
        # d of each slot; negated until its first update
        self._priority = torch.zeros(size, device=device)
        self._clock = torch.zeros((), dtype=torch.int64, device=device)
        # float64 numbers have shape [1]: torch 2.13 drops what a compiled graph writes to 0-dim ones
        self._max_priority = torch.ones(1, dtype=torch.float64, device=device)
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)
        self._rejected = torch.zeros((), dtype=torch.int64, device=device)
        self._swept = torch.zeros((), dtype=torch.int64, device=device)
        self._largest_d = torch.zeros(1, dtype=torch.float64, device=device)
        # the step of the ring at which the last write ended that we were told of; -1: not known
        self._told = torch.full((), -1, dtype=torch.int64, device=device)
        # whether the state is being changed; always on the CPU, where looking costs nothing
        self._changing = torch.zeros((), dtype=torch.bool)
        self._outstanding: deque[tuple[Tensor, float]] = deque(maxlen=_OUTSTANDING)
        self._just_written: Tensor | None = None
        # d of each slot since its first update, as the bits of the float32 number, which have its order
        self._updated = MaxTree(size, device=device) if self._within_buffer else None
        self._allocate(size, device)
        self._set_limit()

    def _set_limit(self) -> None:
        self._largest_d.fill_(self._limit(self._hyperparameters["alpha"].bound))

    @abstractmethod
    def _allocate(self, size: int, device: torch.device) -> None:
        """Make the state for ``size`` slots."""

    @abstractmethod
    def _clear(self) -> None:
        """Reset that state in place."""

    @abstractmethod
    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        """Take in newly written ``slots`` [n]; ``self._clock`` is already theirs. Raises before it changes anything."""

    def _forget(self) -> None:
        """Called before a write that replaces everything, parts of itself included."""

    @abstractmethod
    def _limit(self, alpha: float) -> float:
        """The largest d that can be stored with this alpha."""

    @abstractmethod
    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        """Take in that d of ``slots`` [n] is now ``priority`` (float32 [n]).

        Of duplicates the last one wins if not ``mask``.
        """

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor, float | Tensor | None]:
        """Slots drawn, a number proportional to the probability of each, and the smallest such number in the buffer.

        The third is None where the weights are normalised over the batch.
        """
        raise NotImplementedError

    @abstractmethod
    def _unnormalized(self, slots: Tensor) -> Tensor:
        """A number proportional to the probability of each of ``slots``, float64."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """The subclass's state, to be saved and restored in place."""

    @abstractmethod
    def _restored(self) -> None:
        """Called after the tensors of :meth:`_tensors` were overwritten."""

    def _bind(self, storage: Storage | None) -> None:
        """Take shape and device from the storage once it has them."""
        if storage is None:
            return
        if self._shape is None or storage is not self._bound:
            name = type(self).__name__
            if self._bound is not None and int(self._clock):
                raise RuntimeError(
                    f"{name}: holds the priorities of another storage; give each buffer its own sampler."
                )
            data: Any = getattr(storage, "_storage", None)
            if data is None:
                return
            shape, device = (storage.max_size,), torch.device("cpu")
            if not isinstance(data, list):
                tensors: Any = storage
                shape = tuple(tensors._total_shape)[: storage.ndim]
                columns = data.values(True, True) if is_tensor_collection(data) else tree_leaves(data)
                device = next((c.device for c in columns if isinstance(c, Tensor)), device)
                if is_tensor_collection(data) and data.ndim > storage.ndim:
                    raise ValueError(
                        f"{name}: the storage holds entries of shape {tuple(data.shape[storage.ndim :])} in each slot, "
                        f"not single transitions. Use LazyTensorStorage(..., ndim={data.ndim}), or flatten the data "
                        "before it is written: rb.append_transform(lambda td: td.reshape(-1), invert=True)."
                    )
            # TorchRL rounds the size of a storage of ndim >= 2 up to a multiple of its columns
            lanes = math.prod(shape[1:])
            if not self._grows and -(-self._capacity // lanes) < shape[0]:
                raise ValueError(
                    f"{name}(capacity={self._capacity}): capacity must not be smaller than the storage, which has "
                    f"{math.prod(shape)} slots."
                )
            size = max(self._capacity, math.prod(shape))
            if self._spawned and (size > self._size or device != self._device or (self._shape is None and lanes > 1)):
                raise RuntimeError(
                    f"{name}: a process that was started by the learner cannot make the state for a storage of shape "
                    f"{shape}: the learner would not see it. Let the learner write to the buffer before it starts the "
                    "process (rb.extend(data), then rb.empty())."
                )
            if size > self._size or device != self._device:
                state = self.state_dict() if int(self._clock) else None
                self._setup(size, device)
                if state is not None:
                    self.load_state_dict(state)
            if self._shape not in (None, shape):
                raise ValueError(f"{name}: the sampler's state is for a storage of shape {self._shape}, not {shape}.")
            self._shape = shape
            self._bound = storage
            # in such a storage nothing that a graph cannot see may be kept
            self._traceable = bool(getattr(storage, "_compilable", False))
            self._shape_changed()
            mark_static(vars(self))

    def _require_bound(self, storage: Storage | None) -> None:
        """A graph is made for a storage and a sampler that exist already, and keep nothing in Python."""
        if storage is self._bound and not self._traceable:
            raise TypeError(
                f"{type(self).__name__}: {type(storage).__name__} cannot be compiled; use CompilableReplayBuffer with "
                "CompilableTensorStorage."
            )
        if storage is not self._bound:
            raise RuntimeError(
                f"{type(self).__name__}: the first write to the buffer, or the first sample of one that was filled "
                "before, must run outside the compiled function: it sets up storage and sampler."
            )

    # default_priority, if it was read since the last update
    _default_asked: float | None = None
    # what the draws are made from
    _tree: SumTree
    _bound: Storage | None = None
    _traceable = False
    # whether the capacity is that of the storage, which becomes known when it is written to
    _grows = False
    # whether all that was there before the first write is what was refused
    _only_refused = False
    # draws for graphs whose own round of proposals was not enough
    _fallback: EagerFallback | None = None
    # whether this is a copy in a process that was spawned, whose tensors are those of the process that spawned it
    _spawned = False
    # whether slots are written in the order of the ring, by writers in turn; and whether by no others
    _in_ring = True
    _writes_in_turn = False
    # whether the order of slots matters, and is not known
    _needs_order = False
    _order_unknown = False

    @property
    def _dims(self) -> tuple[int, ...]:
        """The storage's shape; before it is known, that of flat storage."""
        return self._shape or (self._size,)

    @property
    def _num_slots(self) -> int:
        return math.prod(self._dims)

    @property
    def _slots_per_step(self) -> int:
        return math.prod(self._dims[1:])

    def _streams_layout(self, num_streams: int) -> tuple[int, int, bool]:
        """Steps and lanes of the storage, and whether streams are assigned to lanes: ``num_streams`` if it is flat."""
        if len(self._dims) > 1:
            return self._dims[0], self._slots_per_step, False
        return self._dims[0], num_streams, num_streams > 1

    def _shape_changed(self) -> None:
        """Called when the state was made and when the storage's shape has become known: makes it fit for graphs."""
        if self._traceable:
            self._tree.prepare()
            if self._updated is not None:
                self._updated.prepare()

    def _adopt(self, storage: Storage) -> None:
        """Take in what a storage held before this sampler was attached, oldest first, as new transitions."""
        steps = torch.arange(_length(storage) // self._slots_per_step, device=self._device)
        last = getattr(storage, "_last_cursor_index", None)
        if last is not None:
            steps = (steps + int(last) + 1) % len(steps)
        # a storage that was loaded does not know where its ring begins, but will after the next write
        self._order_unknown = last is None and len(steps) == self._dims[0]
        with self._change():
            self._write_over(self._slots_at(steps).reshape(-1), storage)

    def _slots_at(self, steps: Tensor) -> Tensor:
        """The slots of ``steps`` [n] of the ring, int64 [n, lanes]."""
        lanes = self._slots_per_step
        return steps.unsqueeze(1) * lanes + torch.arange(lanes, device=self._device)

    def _slots(self, index: int | Tensor | tuple) -> Tensor:
        """Flat slots of TorchRL's index: an int, [n], [n, ndim] or a tuple of ndim tensors; in range if ndim > 1."""
        shape = self._dims
        if len(shape) == 1 and isinstance(index, Tensor) and index.ndim == 1 and index.dtype == torch.int64:
            return index if index.device == self._device else index.to(self._device)
        if isinstance(index, tuple):
            index = torch.stack([torch.as_tensor(i) for i in index], -1)
        coordinates = torch.as_tensor(index, device=self._device)
        if coordinates.dtype.is_floating_point or coordinates.dtype == torch.bool:
            raise TypeError(f"{type(self).__name__}: index must hold integers, got {coordinates.dtype}.")
        coordinates = coordinates.to(torch.int64)
        if len(shape) == 1:
            return coordinates.reshape(-1)
        if coordinates.ndim < 1 or coordinates.shape[-1] != len(shape):
            raise ValueError(
                f"{type(self).__name__}: index has shape {tuple(coordinates.shape)}; a storage of shape {shape} needs "
                f"[n, {len(shape)}]."
            )
        coordinates = coordinates.reshape(-1, len(shape))
        if not is_traced():
            coordinates = self._in_range(coordinates, torch.tensor(shape, device=self._device))
        return row_major(coordinates, shape)

    def _in_range(self, index: Tensor, high: int | Tensor) -> Tensor:
        if is_traced() or not index.numel():
            return index
        outside = (index < 0) | (index >= high)
        if bool(outside.any()):
            wrong = index[outside if index.ndim == 1 else outside.any(1)][0].tolist()
            raise IndexError(
                f"{type(self).__name__}: index {wrong} is out of range for a storage of shape {self._dims}."
            )
        return index

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer for slots just written: gives them the default priority."""
        if is_traced():
            self._require_bound(storage)
            slots = self._slots(index)
            self._write_over(slots[-self._num_slots :], storage)
            self._told.copy_(slots[-1] // self._slots_per_step)
            return
        self._bind(storage)
        slots = self._slots(index)
        if len(self._dims) == 1:
            # TensorDictMaxValueWriter marks what it did not store by -1
            slots = self._in_range(slots[slots >= 0], self._num_slots)
        if not slots.numel():
            return
        self._mend(storage, slots)
        try:
            with self._change():
                self._take_in(slots, storage)
        except (KeyError, TypeError, ValueError, Warning):
            # refused, with nothing changed (also by a warning that is turned into an error)
            self._changing.fill_(False)
            self._only_refused |= storage is not None and _length(storage) <= slots.numel()
            raise

    def _take_in(self, slots: Tensor, storage: Storage | None) -> None:
        """A write of ``slots`` [n], of which the first may be overwritten by the last."""
        if self._needs_order and self._order_unknown and getattr(storage, "_last_cursor_index", None) is not None:
            self._empty()
        adopts = not int(self._clock) and not self._only_refused
        if adopts and storage is not None and _length(storage) > slots.numel():
            self._adopt(storage)
            self._told.fill_(self._ends_at(slots, storage))
        else:
            told = self._ends_at(slots, storage)
            if slots.numel() > self._num_slots:
                # rows that were overwritten by later rows of the same write; nothing from before is left either
                self._forget()
            self._write_over(slots[-self._num_slots :], storage)
            # only now: it may have been refused
            self._told.fill_(told)

    def _ends_at(self, slots: Tensor, storage: Storage | None) -> int:
        """What ``_told`` is after the write of ``slots`` [n]; what the writer has skipped is forgotten."""
        last, told = getattr(storage, "_last_cursor_index", None), int(self._told)
        lanes = self._slots_per_step
        if not self._in_ring or last is None or int(slots[-1]) // lanes != int(last):
            return told
        first = int(slots[0]) // lanes
        if slots.shape[0] < self._num_slots and told != -1:
            if told == int(last):
                # marked again
                return told
            if first != (told + 1) % self._dims[0]:
                if not (self._writes_in_turn or _has_turns(storage)):
                    return _OUT_OF_TURN
                self._forget_up_to((first - 1) % self._dims[0])
        return int(last)

    def _catch_up(self, storage: Storage | None) -> None:
        """Forget slots that were written to without our being told: by a write that broke off, or was refused.

        What they hold may be half of this and half of that. Writer and storage move on before they write.
        """
        self._mend(storage)
        last, told = getattr(storage, "_last_cursor_index", None), int(self._told)
        if told >= 0 and last is not None and int(last) != told:
            with self._change():
                self._forget_up_to(int(last))
                self._told.fill_(int(last))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What is left before its end leaves a state of which parts contradict each other; see :meth:`_mend`."""
        outer = bool(self._changing)
        self._changing.fill_(True)
        yield
        self._changing.fill_(outer)

    def _mend(self, storage: Storage | None, writing: Tensor | None = None) -> None:
        """Make the state anew if a change of it broke off: by Ctrl-C, or since its process was killed.

        What was stored and updated before is kept, with each transition's last TD error; which of those without one are
        new, and the exponents of the time when alpha was annealed, are not.

        Args:
            storage: what the slots hold.
            writing: slots that are being written.
        """
        if storage is None or not self._changing:
            return
        known, priority = self._stamp > 0, self._priority.clone()
        steps, told, last = self._dims[0], int(self._told), getattr(storage, "_last_cursor_index", None)
        newest = told if told >= 0 else -1 if last is None else int(last)
        order = (newest + 1 + torch.arange(steps, device=self._device)) % steps
        if told >= 0 and last is not None:
            # what was not told is not known
            order = order[(int(last) - told) % steps :]
        if writing is not None:
            known[writing] = False
        slots = self._slots_at(order)
        kept = known[slots].all(1)
        self._clear()
        self._stamp.zero_()
        self._priority.zero_()
        if self._updated is None:
            self._max_priority.copy_(torch.maximum(self._max_priority, priority.abs().max()))
        # runs of what is known
        ends = ((kept[1:] != kept[:-1]).nonzero().squeeze(1) + 1).cpu()
        for run, is_kept in zip(slots.tensor_split(ends), kept.tensor_split(ends), strict=True):
            if bool(is_kept[0]):
                self._write(run.reshape(-1), storage)
        learned = ((self._stamp > 0) & (priority > 0)).nonzero().squeeze(1)
        if learned.numel():
            self._priority[learned] = priority[learned]
            self._update(learned, priority[learned], None)
        self._recount_updated()
        self._just_written = None
        self._changing.fill_(False)

    def _forget_up_to(self, step: int) -> None:
        """Forget the slots behind the last write that we were told of, up to a step of the ring."""
        steps, told = self._dims[0], int(self._told)
        if told < 0:
            return
        behind = (told + 1 + torch.arange((step - told) % steps, device=self._device)) % steps
        self._just_written = None
        # batches drawn before are no longer what is stored
        self._clock.add_(1)
        self._lose(self._slots_at(behind).reshape(-1))

    def _lose(self, slots: Tensor) -> None:
        """Forget ``slots`` [n], all different, of which nobody knows what they hold, until they are written again."""
        if slots.numel():
            self._drop(slots)
            self._stamp[slots] = 0
            self._priority[slots] = 0.0
            self._count_updated(slots)

    @abstractmethod
    def _drop(self, slots: Tensor) -> None:
        """Take ``slots`` [n], all different, out of what is drawn from until they are written again."""

    def _write_over(self, slots: Tensor, storage: Storage | None) -> None:
        """Take in newly written ``slots`` [n]; what they held no longer counts for the largest priority."""
        if self._updated is None:
            self._write(slots, storage)
            return
        before = self._max_priority.clone()
        self._count_updated(slots, torch.zeros_like(slots))
        try:
            self._write(slots, storage)
        except (KeyError, TypeError, ValueError, Warning):
            # refused: the slots count as before
            self._count_updated(slots)
            self._max_priority.copy_(before)
            raise

    def _count_updated(self, slots: Tensor, bits: Tensor | None = None) -> None:
        """With ``max_priority_within_buffer``: set what ``slots`` [n] count for (None: their d), and the largest.

        If no stored transition has been updated, the largest stays what it was.
        """
        if self._updated is None:
            return
        if bits is None:
            bits = self._bits(gather_in_bounds(self._priority, slots))
        scatter_in_bounds(self._updated.leaves, slots, bits)
        self._updated.refresh(slots)
        largest = self._updated.max().reshape(1)
        d = largest.to(torch.int32).view(torch.float32).to(torch.float64)
        self._max_priority.copy_(torch.where(largest > 0, d, self._max_priority))

    @staticmethod
    def _bits(priority: Tensor) -> Tensor:
        """The bits of d [n], int64, which are ordered like d; 0 for new transitions."""
        return priority.clamp_min(0.0).view(torch.int32).to(torch.int64)

    def _recount_updated(self) -> None:
        """Recompute what all slots count for, after priorities were changed outside ``update_priority``."""
        if self._updated is not None:
            self._updated.leaves.zero_()
            self._updated.rebuild_()
            self._count_updated(torch.arange(self._size, device=self._device))

    def _stamp_slots(self, slots: Tensor) -> None:
        """Count one write, and stamp ``slots`` with it."""
        if not is_traced():
            self._just_written = slots
        self._clock.add_(1)
        self._stamp[slots] = self._clock
        self._priority[slots] = -self._max_priority.float()

    @property
    def default_priority(self) -> float:
        """What ``update_priority`` would have to be given for the priority of a new transition."""
        self._default_asked = self._default()
        return self._default_asked

    def _default(self) -> float:
        error = max(float(self._max_priority) - self._eps, 0.0)
        return error**2 if self._td_error == "squared" else error

    def _lacks_errors(self, priority: Any, storage: Storage | None) -> bool:
        """True, and counted, if ``priority`` is what TorchRL hands over for a sample without TD errors.

        Its TensorDictReplayBuffer then reads ``default_priority`` and expands it to all rows. Constant TD errors are
        told apart by their memory, which only an expanded tensor shares between rows; after a reduction to the anchors
        of sequences, by their value alone.
        """
        default, self._default_asked = self._default_asked, None
        if default is None or not isinstance(priority, Tensor) or priority.ndim != 1 or not priority.numel():
            return False
        expanded = priority.stride(0) == 0 or (storage is not None and draws_sequences(self, storage))
        if not (expanded and bool((priority == _as_float32(default)).all())):
            return False
        self._rejected.add_(priority.shape[0])
        return True

    @torch.no_grad()
    def update_priority(
        self,
        index: int | Tensor | tuple,
        priority: float | Tensor,
        *,
        storage: Storage | None = None,
        stamp: Tensor | None = None,
    ) -> None:
        """Set the priorities of slots from their TD errors.

        Args:
            index: slots, as TorchRL hands them out: int, [n], or [n, ndim] for a storage of more dimensions.
            priority: TD errors, one per slot or a single number: δ² if ``td_error="squared"``, |δ| if ``"absolute"``.
            storage: the buffer's storage.
            stamp: the entry ``"write_stamp"`` of the sample, [B]; rows whose slot was overwritten since are dropped.

        Raises:
            ValueError: if a TD error is negative or not finite, or the shapes do not match.
            IndexError: if a slot is out of range or holds nothing. The state is unchanged in all these cases.
                In a traced step neither is an error: such rows change nothing and are counted in :meth:`stats`.
        """
        if is_traced():
            self._require_bound(storage)
            self._update_traced(self._slots(index), torch.as_tensor(priority, device=self._device), stamp)
            return
        name = type(self).__name__
        if storage is not self._bound:
            self._bind(storage)
        self._catch_up(storage)
        clock = self._clock.item()
        if not clock and storage is not None and _length(storage):
            self._adopt(storage)
            clock = self._clock.item()
            if self._is_initialization(priority, storage):
                return
        slots = self._slots(index)
        error = torch.as_tensor(priority, dtype=torch.float32, device=self._device)
        if error.ndim != 1:
            error = error.reshape(-1)
        count = slots.shape[0]
        if error.shape[0] != count:
            if torch.as_tensor(priority).ndim != 0:
                raise ValueError(
                    f"{name}.update_priority: there are {error.shape[0]} TD errors for {count} indices; one TD error "
                    "per transition is needed."
                )
            error = error.expand(count)
        if not count:
            return
        if self._lacks_errors(priority, storage):
            return
        smallest, largest = extremes(error)
        limit = self._limit(self._hyperparameters["alpha"].bound)
        if not (smallest >= 0 and self._size_of(largest) <= limit):
            wrong = int((~((error >= 0) & (self._size_of(error) <= limit))).nonzero()[0])
            raise ValueError(
                f"{name}.update_priority: TD error {float(error[wrong]):g} at index {int(slots[wrong])} (position "
                f"{wrong} of the update); TD errors must be >= 0 and finite, and the priority |δ| + eps at most "
                f"{limit:g}."
            )
        written, self._just_written = self._just_written, None
        if stamp is not None:
            fresh = self._stamps(slots) == stamp.reshape(-1)
            self._dropped.add_(count - fresh.sum())
            if not bool(fresh.all()):
                slots, error = slots[fresh], error[fresh]
                largest = float(error.max()) if slots.numel() else 0.0
            drawn_at = clock
        elif (drawn_at := self._drawn_at(slots, is_same_memory)) is not None:
            pass
        elif written is not None and written.shape == slots.shape and torch.equal(written, slots):
            # the buffer hands on the TD errors that came with the data
            drawn_at = None
            if torch.as_tensor(index).ndim == 0 and largest == _as_float32(self._default()):
                # TensorDictReplayBuffer.add() sends the default back for a transition without one
                return
        else:
            drawn_at = self._drawn_at(slots, torch.equal)
        if drawn_at != clock:
            # not a batch that was just drawn: it may name anything
            stamp = self._stamps(slots)
            oldest, newest = extremes(stamp)
            if drawn_at is not None and (newest > drawn_at or oldest == 0):
                fresh = (stamp <= drawn_at) & (stamp > 0)
                self._dropped.add_(count - fresh.sum())
                slots, error = slots[fresh], error[fresh]
                largest = float(error.max()) if slots.numel() else 0.0
            elif oldest == 0:
                wrong = int((stamp == 0).nonzero()[0])
                raise IndexError(
                    f"{name}.update_priority: slot {int(slots[wrong])} is out of range: nothing is stored there."
                )
        if slots.numel():
            priority = self._size_of(error)
            with self._change():
                write_last(self._priority, slots, priority)
                self._update(slots, priority, None)
                self._count_updated(slots)
                if not self._within_buffer and self._size_of(largest) > self._max_priority.item():
                    self._max_priority.fill_(self._size_of(largest))
        self._step()

    def _is_initialization(self, priority: Any, storage: Storage) -> bool:
        """Whether ``priority`` is what TorchRL hands over for all slots when a buffer is made of a filled storage."""
        given = torch.as_tensor(priority, dtype=torch.float32)
        return given.numel() == _length(storage) and bool((given == _as_float32(self._default())).all())

    def _update_traced(self, slots: Tensor, error: Tensor, stamp: Tensor | None) -> None:
        error = error.to(torch.float32).reshape(-1).expand(slots.shape[0])
        priority = self._size_of(error)
        given, slots = slots, slots.clamp(0, self._num_slots - 1)
        # False for NaN too
        valid = (error >= 0) & (priority <= self._largest_d) & (given == slots)
        written = gather_in_bounds(self._stamp, slots)
        fresh = written > 0
        if stamp is not None:
            fresh = fresh & (written == stamp.reshape(-1))
        self._rejected.add_((~valid).sum())
        self._dropped.add_((valid & ~fresh).sum())
        taken = valid & fresh
        source = last_occurrence(slots, taken)
        once = source == torch.arange(slots.shape[0], device=slots.device)
        priority = torch.where(taken, priority, 0.0)
        largest = torch.where(taken, error, 0.0).amax().to(torch.float64)
        if not self._within_buffer:
            self._max_priority.copy_(torch.maximum(self._max_priority, self._size_of(largest)))
        priority, taken = gather_in_bounds(priority, source), gather_in_bounds(taken, source)
        scatter_in_bounds(self._priority, slots, torch.where(taken, priority, gather_in_bounds(self._priority, slots)))
        self._count_updated(slots)
        self._update(slots, priority, UpdateMask(taken, once))
        self._step()

    def _step(self) -> None:
        for hyperparameter in self._hyperparameters.values():
            hyperparameter.step()
        alpha = self._hyperparameters["alpha"]
        if not self._traceable:
            if alpha.just_ended():
                with self._change():
                    self._reweight()
        elif alpha.annealed:
            slots = (self._swept + torch.arange(_SWEEP, device=self._device)) % self._size
            self._swept.add_(_SWEEP)
            self._reweight(slots)

    def _size_of(self, error: Any) -> Any:
        """The priority d = |δ| + eps of a TD error, tensor or number."""
        if isinstance(error, Tensor):
            return error.sqrt().add_(self._eps) if self._td_error == "squared" else error + self._eps
        return (math.sqrt(error) if self._td_error == "squared" else error) + self._eps

    def _stamps(self, slots: Tensor) -> Tensor:
        try:
            if self._device.type != "cpu":
                # there, an index out of range would stop the device
                self._in_range(slots, self._size)
            return self._stamp.index_select(0, slots)
        except (IndexError, RuntimeError):
            return self._stamp.index_select(0, self._in_range(slots, self._size))

    def _drawn_at(self, slots: Tensor, same: Callable[[Tensor, Tensor], bool]) -> float | None:
        """The clock when ``slots`` were drawn, if they are a batch that was drawn; it is then forgotten."""
        for position in range(len(self._outstanding) - 1, -1, -1):
            drawn, clock = self._outstanding[position]
            if drawn.shape == slots.shape and same(drawn, slots):
                del self._outstanding[position]
                return clock
        return None

    @torch.no_grad()
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` slots.

        Returns:
            The index, [B], or a tuple of [B] for a storage of more dimensions, and a dict with ``priority_weight``,
            float32 [B], at most 1.

        Raises:
            RuntimeError: if the buffer is empty, or all priorities are 0. In a traced step nothing is raised: the rows
                are slot 0, with weight 0.
        """
        if batch_size < 1:
            raise ValueError(f"{type(self).__name__}.sample(batch_size={batch_size}): batch_size must be >= 1.")
        traced = is_traced()
        clock = 0
        if traced:
            self._require_bound(storage)
        else:
            if storage is not self._bound:
                self._bind(storage)
            self._catch_up(storage)
            clock = self._clock.item()
            if not clock:
                if not _length(storage):
                    raise RuntimeError(f"{type(self).__name__}: cannot sample from an empty storage.")
                self._adopt(storage)
                clock = self._clock.item()
        slots, info = self._rows(batch_size)
        if not traced:
            self._outstanding.append((slots, clock))
        if self._traceable:
            info[STAMP_KEY] = gather_in_bounds(self._stamp, slots)
        shape = self._dims
        if len(shape) == 1:
            return slots, info
        index = []
        for length in reversed(shape[1:]):
            index.append(slots % length)
            slots = slots // length
        return (slots, *reversed(index)), info

    def _rows(self, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The slots drawn and what else their rows carry."""
        slots, density, smallest = self._draw(batch_size)
        if smallest is None:
            smallest = scalar(density.amin())
        weight = (density / smallest).pow_(-self._hyperparameters["beta"].current())
        if weight.dtype != torch.float32:
            weight = weight.to(torch.float32)
        if is_traced():
            weight = torch.where(density > 0, weight, 0.0)
        return slots, {"priority_weight": weight}

    def _mass(self, priority: Tensor) -> Tensor:
        # in float64: d^alpha in float32 is coarser than a unit of mass above 1
        return SumTree.to_mass(priority.to(torch.float64) ** self._hyperparameters["alpha"].current())

    def _reweight_tree(self, tree: SumTree, slots: Tensor | None) -> None:
        """Recompute the masses of ``slots``, in turn (None: all), from the stored d, with the current alpha."""
        if slots is not None:
            once = torch.arange(len(slots), device=self._device) < self._size
            mass = self._mass(gather_in_bounds(self._priority, slots).abs())
            tree.write(slots, mass, mask=UpdateMask(gather_in_bounds(self._stamp, slots) > 0, once))
            return
        tree.leaves[: self._size] = self._mass(self._priority.abs()) * (self._stamp > 0)
        tree.rebuild_()

    @staticmethod
    def _largest(tree: SumTree, alpha: float) -> float:
        """The largest d whose d^alpha fits into ``tree``."""
        return min(tree.max_priority ** (1 / max(alpha, 0.05)), 1e30)

    def _stored_slots(self) -> Tensor:
        return (self._stamp > 0).nonzero().squeeze(1)

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot in one draw, float64 [len(storage)], slots in row-major order. O(N)."""
        self._bind(storage)
        self._catch_up(storage)
        density = self._unnormalized(torch.arange(_length(storage), device=self._device))
        return density / density.sum().clamp_min(torch.finfo(torch.float64).tiny)

    def stats(self) -> TensorDict:
        """Numbers worth logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: transitions stored. ``effective_sample_size``: (Σp)²/Σp² as a share of ``num_items``; 1 is
        uniform. ``priority_min``, ``_median``, ``_max``: of what draws are proportional to, relative to its mean.
        ``never_updated``: share of transitions that still have the priority of a new one. ``max_priority``: the
        largest |δ| + eps seen, which new transitions get. ``dropped_updates``: updates not applied because their
        slot had been overwritten. ``rejected_updates``: rows not updated, in a graph because their TD errors were
        negative, not finite or too large (elsewhere an error), in TorchRL's TensorDictReplayBuffer because the sample
        had no entry ``priority_key`` (an error in CompilableReplayBuffer). And each hyperparameter's current value.

        A TensorDict prints shapes. To print the numbers, use ``to_dict()``.

        Examples:
            >>> from torchrl_replay_ext import ProportionalSampler
            >>> {name: round(number.item(), 2) for name, number in ProportionalSampler(8).stats().to_dict().items()}
            {'num_items': 0.0, 'effective_sample_size': 1.0, 'priority_min': 1.0, 'priority_median': 1.0,
             'priority_max': 1.0, 'never_updated': 0.0, 'max_priority': 1.0, 'dropped_updates': 0.0,
             'rejected_updates': 0.0, 'alpha': 0.6, 'beta': 0.4}
        """
        self._mend(self._bound)
        density = self._unnormalized(self._stored_slots())
        count = density.numel()
        if not count or not bool(density.sum() > 0):
            density = torch.ones(1, dtype=torch.float64, device=self._device)
        relative = density / density.mean()
        values = {
            "num_items": torch.tensor(count),
            "effective_sample_size": 1 / (relative**2).mean(),
            "priority_min": relative.min(),
            "priority_median": relative.median(),
            "priority_max": relative.max(),
            "never_updated": (self._priority < 0).sum() / max(count, 1),
            "max_priority": self._max_priority,
            "dropped_updates": self._dropped,
            "rejected_updates": self._rejected,
            **{name: hyperparameter.value for name, hyperparameter in self._hyperparameters.items()},
            **self._extra_stats(),
        }
        scalars = {key: value.to(self._device, torch.float32).reshape(()) for key, value in values.items()}
        return TensorDict(scalars, device=self._device)

    def _extra_stats(self) -> dict[str, Tensor]:
        return {}

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the state contradict each other. O(N)."""
        self._tree.check_valid()
        if bool(((self._stamp == 0) & (self._priority != 0)).any()):
            raise AssertionError(f"{type(self).__name__}: a slot that holds nothing has a priority")
        if bool((self._stamp > self._clock).any()):
            raise AssertionError(f"{type(self).__name__}: a slot was written after the last write")
        # those of new transitions are what was the largest when they were written
        if self._priority.max().item() > self._max_priority.item() * (1 + _ROUNDING):
            raise AssertionError(f"{type(self).__name__}: a priority is larger than the largest so far")
        if self._updated is not None:
            self._updated.check_valid()
            if not torch.equal(self._updated.leaves[: self._size], self._bits(self._priority)):
                raise AssertionError(f"{type(self).__name__}: the largest priority is not that of the buffer")
        self._check()

    def _check(self) -> None:
        """What a subclass adds to :meth:`check_valid`."""

    def __repr__(self):
        values = ", ".join(f"{name}={float(h.value):g}" for name, h in self._hyperparameters.items())
        return f"{type(self).__name__}(capacity={self._capacity}, {values}, td_error={self._td_error!r})"

    @property
    def alpha(self) -> float:
        """Priority exponent. Assigning it applies it to everything stored, in O(capacity).

        While alpha is annealed (:class:`~torchrl_replay_ext.Anneal`), a transition has the exponent of the time when it
        was last written or updated; when the schedule ends, its end is applied to everything stored. In a
        :class:`~torchrl_replay_ext.CompilableReplayBuffer`, where that moment cannot be seen, each update applies the
        current alpha to the next 64 slots instead, in turn.
        """
        return float(self._hyperparameters["alpha"].value)

    @alpha.setter
    def alpha(self, value: float | Tensor | Anneal) -> None:
        before = self.alpha
        name = type(self).__name__
        bound = max(value.start, value.end) if isinstance(value, Anneal) else as_number(name, "alpha", value)
        largest = max(self._max_priority.item(), self._priority.abs().max().item())
        if largest > self._limit(bound):
            raise ValueError(
                f"{name}(alpha={bound:g}): alpha is too large for the largest priority so far, {largest:g}."
            )
        self._hyperparameters["alpha"].set(value)
        self._set_limit()
        if self.alpha != before:
            with self._change():
                self._reweight()

    @abstractmethod
    def _reweight(self, slots: Tensor | None = None) -> None:
        """Recompute what draws of ``slots`` (None: all) are proportional to from the stored d and the current alpha."""

    @property
    def beta(self) -> float:
        """Exponent of the importance-sampling weights."""
        return float(self._hyperparameters["beta"].value)

    @beta.setter
    def beta(self, value: float | Tensor | Anneal) -> None:
        self._hyperparameters["beta"].set(value)

    def _state(self) -> dict[str, Tensor]:
        return {
            "stamp": self._stamp,
            "priority": self._priority,
            "clock": self._clock,
            "max_priority": self._max_priority,
            "dropped": self._dropped,
            "rejected": self._rejected,
            "swept": self._swept,
            **self._tensors(),
        }

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on, as tensors."""
        self._mend(self._bound)
        state = {key: value.clone() for key, value in self._state().items()}
        state |= {key: hyperparameter.state() for key, hyperparameter in self._hyperparameters.items()}
        state["storage_shape"] = torch.tensor(self._shape or (), dtype=torch.int64)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, in place; ValueError if it does not fit, with nothing changed."""
        state = dict(state_dict)
        name = type(self).__name__
        expected = {*self._state(), *self._hyperparameters, "storage_shape"}
        if set(state) != expected:
            raise ValueError(
                f"{name}.load_state_dict: missing {sorted(expected - set(state))}, "
                f"unexpected {sorted(set(state) - expected)}."
            )
        shape = tuple(state["storage_shape"].tolist()) or None
        if self._shape is not None and shape not in (None, self._shape):
            raise ValueError(f"{name}.load_state_dict: the state is for a storage of shape {shape}, not {self._shape}.")
        size = state["stamp"].numel()
        if size < self._capacity:
            raise ValueError(f"{name}.load_state_dict: the state has {size} slots, the sampler {self._capacity}.")
        before = vars(self).copy()
        try:
            self._fit(shape, size, state)
        except ValueError:
            vars(self).update(before)
            raise
        for key, tensor in self._state().items():
            tensor.copy_(state[key])
        for key, hyperparameter in self._hyperparameters.items():
            hyperparameter.load(state[key])
        self._set_limit()
        self._told.fill_(-1)
        self._changing.fill_(False)
        self._outstanding.clear()
        self._just_written = None
        self._restored()
        self._recount_updated()
        mark_static(vars(self))

    def _fit(self, shape: tuple[int, ...] | None, size: int, state: dict[str, Any]) -> None:
        """Make room for a state; ValueError if it does not fit."""
        if shape is not None and self._shape is None:
            self._shape = shape
            self._shape_changed()
        if size != self._size:
            self._setup(size, self._device)
        for key, tensor in self._state().items():
            if tensor.shape != state[key].shape:
                raise ValueError(
                    f"{type(self).__name__}.load_state_dict: {key} has shape {tuple(state[key].shape)}, expected "
                    f"{tuple(tensor.shape)}."
                )

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``, as memory-mapped tensors."""
        TensorDict(self.state_dict(), device="cpu").memmap(str(path), copy_existing=True)

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` saved."""
        self.load_state_dict({str(k): v.clone() for k, v in TensorDict.load_memmap(str(path)).items()})

    def _empty(self) -> None:
        for tensor in (self._stamp, self._priority, self._clock, self._dropped, self._rejected, self._swept):
            tensor.zero_()
        self._max_priority.fill_(1.0)
        self._told.fill_(-1)
        self._changing.fill_(False)
        self._only_refused = False
        # batches in flight are of no use any more
        self._outstanding = deque(((slots, -1) for slots, _ in self._outstanding), maxlen=_OUTSTANDING)
        self._just_written = None
        self._order_unknown = False
        self._recount_updated()
        self._clear()

    def __getstate__(self):
        state = super().__getstate__()
        # batches in flight belong to this process, and the storage comes with the buffer
        own = {"_outstanding": deque(maxlen=_OUTSTANDING), "_just_written": None, "_bound": None, "_fallback": None}
        return {**state, **own, "_spawned": get_spawning_popen() is not None}
