"""Slices of trajectories for off-policy traces."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_replay_ext.arguments import require_bool, require_integer
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, where_int64
from torchrl_replay_ext.core.slices import SliceIndex
from torchrl_replay_ext.core.sum_tree import UpdateMask
from torchrl_replay_ext.samplers.base import (
    STAMP_KEY,
    PrioritySampler,
    ShowsArguments,
    draws_sequences,
    is_same_memory,
)
from torchrl_replay_ext.samplers.episode_reader import EpisodeReader, is_rewrite

MASK_KEY = ("collector", "mask")
# Batches that are remembered until their TD errors come back.
_OUTSTANDING = 32
_OWNER = "TrajectoryRetraceSampler"
_NO_SEQUENCES = (
    f"{_OWNER}: the buffer has sample_unit=Sequence(...), but this sampler draws sequences itself. Leave sample_unit "
    "out, or use ProportionalSampler, RankBasedSampler or ReaPERSampler with it."
)


class SliceStarts(PrioritySampler):
    """Draws the transitions where slices may begin, all alike, and knows what follows each.

    The part of :class:`TrajectoryRetraceSampler` that reads episodes at writes. It takes no priorities.
    """

    _needs_order = True
    _writes_in_turn = True

    def __init__(
        self,
        capacity: int,
        *,
        slice_len: int,
        num_streams: int,
        reader: EpisodeReader,
        behaviour_keys: Sequence[NestedKey],
        pad: bool,
    ):
        self._slice_len, self._num_streams, self._pad = slice_len, num_streams, pad
        self._reader, self._behaviour_keys = reader, behaviour_keys
        super().__init__(capacity, alpha=0.0, beta=0.0, eps=0.0, td_error="absolute", weight_norm="batch")

    def _allocate(self, size: int, device: torch.device) -> None:
        self._shape_changed()

    def _shape_changed(self) -> None:
        layout = self._streams_layout(self._num_streams)
        current: SliceIndex | None = getattr(self, "slices", None)
        streams = None if current is None else (current.streams.steps, current.streams.lanes, current.streams.assigned)
        if current is None or streams != layout or current.device != self._device:
            self.slices = SliceIndex(
                *layout[:2], length=self._slice_len, padded=self._pad, assigned=layout[2], device=self._device
            )
        self._tree = self.slices.starts
        super()._shape_changed()

    def ready(self, storage: Storage) -> None:
        """Take in what the storage held before, if nothing was done yet."""
        if is_traced():
            self._require_bound(storage)
            return
        self._bind(storage)
        if not int(self._clock) and len(storage):  # pyright: ignore[reportArgumentType]
            self._adopt(storage)
        self._catch_up(storage)

    def columns(self, storage: Storage) -> Any:
        """The stored TensorDict; KeyError if it lacks behaviour statistics."""
        data = self._reader.data(storage)
        for key in self._behaviour_keys:
            if data.get(key, None) is None:
                raise KeyError(
                    f"{_OWNER}: the stored data has no entry {key!r}, the statistics of the behaviour policy. The "
                    "policy in the collector writes them: torchrl's ProbabilisticActor keeps the parameters of its "
                    "distribution ('logits', or 'loc' and 'scale'), and with return_log_prob=True the log-probability; "
                    "pass their names as behaviour_keys=."
                )
        return data

    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        if storage is None:
            raise ValueError(f"{_OWNER}.mark_update: the storage is needed, to read where episodes end.")
        self.columns(storage)
        streams = self.slices.streams
        ended, trajectory, initial = self._reader.read(storage, slots, self._num_slots, needs_ids=streams.assigned)
        if not is_traced():
            if is_rewrite(slots, self._stamp, streams, storage):
                # the transition stays where it is in its episode
                self._stamp_slots(slots)
                return
            self._reader.require_in_turn(slots, self._num_slots)
            if slots.shape[0] < self._num_slots:
                self._lose(streams.skipped(slots))
        self.slices.write(slots, self._clock + 1, ended=ended, trajectory=trajectory, initial=initial)
        self._stamp_slots(slots)

    def _drop(self, slots: Tensor) -> None:
        self.slices.drop(slots)
        self.slices.streams.skip(slots)

    def _forget(self) -> None:
        self.slices.forget()

    def _rows(self, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        if not is_traced() and not int(self._tree.total()):
            raise RuntimeError(
                f"{_OWNER}(slice_len={self._slice_len}, pad=False): no stored episode has {self._slice_len} steps in a "
                "row; wait for longer ones, pass a smaller slice_len=, or pad=True."
            )
        return self._tree.sample(batch_size, generator=self._rng)[0], {}

    def _unnormalized(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots).double()

    def _clear(self) -> None:
        self.slices.clear_()

    def _tensors(self) -> dict[str, Tensor]:
        return {f"slices_{name}": tensor for name, tensor in self.slices.tensors().items()}

    def _check(self) -> None:
        self.slices.check_valid(self._stamp[: self._num_slots] > 0)

    def _restored(self) -> None:
        self.slices.rebuild_(self._stamp[: self._num_slots] > 0)

    def _limit(self, alpha: float) -> float:
        return math.inf

    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        pass

    def _reweight(self, slots: Tensor | None = None) -> None:
        pass


@PrioritizedSampler.register
class TrajectoryRetraceSampler(ShowsArguments, Sampler):
    r"""Draws slices of trajectories with what Retrace and ACER need of the behaviour policy (Wang et al. 2017).

    ``rb.sample(batch_size)`` is a flat batch of ``batch_size`` transitions; ``batch.reshape(-1, slice_len)`` has one
    slice per row: consecutive steps of one episode of one stream, from the start that was drawn on, as many as there
    are up to ``slice_len`` ("sample trajectory from the replay memory", Algorithms 1 and 2 and Sec. 3). A slice never
    goes over the end of an episode, into another stream, or over the place where the ring is being written.

    Each row carries, beside what is stored:

    * ``("collector", "mask")``, bool [B]: False for steps after the end, which repeat the last real one.
    * ``("next", "done")`` is True at the last real step of a slice (and behind it), also where the episode goes on, so
      that no trace leaves the slice. ``("next", "truncated")`` is True there unless the episode ended by itself: the
      value of the next state closes the return. ``("next", "terminated")`` is what was stored.

    Which slices:

    * ``pad=True``: every stored transition is equally likely to be a start, those of short episodes and the last steps
      of long ones included. Every slice has at least one real step.
    * ``pad=False``: starts are the transitions with ``slice_len`` steps stored, all equally likely.
    * ``anchors``: any prioritized sampler of ours draws the starts instead. Its ``priority_weight`` holds for all steps
      of a slice. TD errors of all real steps become priorities (of a slot in several slices, the last); those of steps
      that were padded have no effect. Hand the flat batch back, as it came; the last 32 are remembered.

    The on-policy slices of Algorithm 1 are :meth:`newest`.

    Which transition follows another is kept at writes, and a draw only follows it: nothing is searched. Environments
    and trajectory ids are treated as by :class:`~torchrl_replay_ext.ReaPERSampler`: one environment, or one per column
    of a storage of ``ndim`` >= 2, need nothing more; several that write to one flat storage are told apart by
    ``traj_key``, and their number is ``num_streams``. The writer must be a round-robin one, the default.

    Args:
        capacity: number of slots, at least that of the storage.
        slice_len: steps of a slice, k in the paper: 20 for discrete, 50 for continuous actions there.
        num_streams: number of environments that write to one flat storage. Default: 1.
        done_key: where the end of an episode is marked, bool: by termination or truncation. Its last part must not be
            ``"terminated"``; ``"truncated"`` is written beside it. Default: ``("next", "done")``.
        traj_key: where trajectory ids are stored, int64; used if present, needed if ``num_streams`` > 1. Default:
            ``("collector", "traj_ids")``.
        behaviour_keys: the statistics of the behaviour policy that must be stored: ``("logits",)`` (default), ``("loc",
            "scale")``, ``("action_log_prob",)``, or () for none.
        pad: see above. Default: True.
        anchors: ``"uniform"`` (default), or a sampler: ProportionalSampler, RankBasedSampler, ReaPERSampler,
            EventTableSampler with tables of ``retention="ring"``. It belongs to this one from then on. Needs
            ``pad=True``.
        init_key: where the first transition of an episode is marked, bool; used if present. Default: ``"is_init"``.

    Raises:
        TypeError: if a flag has another type.
        ValueError: if an argument is out of range; at a write, if ``capacity`` is smaller than the storage, more
            trajectories go on at once than ``num_streams``, or a trajectory comes back after it was broken off; at a
            draw, if ``batch_size`` is no multiple of ``slice_len`` or the buffer has ``sample_unit=Sequence(...)``.
        KeyError: at a write, if a key is missing.
        RuntimeError: at a draw, if nothing is stored, or with ``pad=False`` no slice is long enough. (In a graph, the
            mask is False then.)

    Warns:
        UserWarning: at a write, once, if an episode broke off without an end.

    Examples:
        >>> from torchrl.data import LazyTensorStorage
        >>> sampler = TrajectoryRetraceSampler(1000, slice_len=5)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=20)
        >>> done = (torch.arange(30) % 10 == 9).unsqueeze(1)
        >>> data = {"observation": torch.randn(30, 3), "logits": torch.randn(30, 2), "next": {"done": done}}
        >>> index = rb.extend(TensorDict(data, [30]))
        >>> slices = rb.sample().reshape(-1, 5)
        >>> slices.shape, slices["collector", "mask"][:, 0].all()
        (torch.Size([4, 5]), tensor(True))
        >>> sampler.newest(rb)["index"]
        tensor([25, 26, 27, 28, 29])
    """

    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = "max"

    def __init__(
        self,
        capacity: int,
        *,
        slice_len: int,
        num_streams: int = 1,
        done_key: NestedKey = ("next", "done"),
        traj_key: NestedKey = ("collector", "traj_ids"),
        behaviour_keys: Sequence[NestedKey] = ("logits",),
        pad: bool = True,
        anchors: Literal["uniform"] | PrioritySampler = "uniform",
        init_key: NestedKey = "is_init",
    ):
        for name, value in (("capacity", capacity), ("slice_len", slice_len), ("num_streams", num_streams)):
            require_integer(_OWNER, name, value)
        require_bool(_OWNER, "pad", pad)
        path = (done_key,) if isinstance(done_key, str) else tuple(done_key)
        if path[-1] == "terminated":
            raise ValueError(
                f"{_OWNER}(done_key={done_key!r}): done_key must be True at every end of an episode, truncated ones "
                "included; ('next', 'done') is."
            )
        if anchors != "uniform":
            if not isinstance(anchors, PrioritySampler):
                raise ValueError(
                    f"{_OWNER}(anchors={anchors!r}): anchors must be 'uniform' or a prioritized sampler of this "
                    "package; a DecoupledSampler goes around this one."
                )
            tables: Any = getattr(anchors, "tables", None)
            if tables is not None and tables.retention == "pinned":
                raise ValueError(
                    f"{_OWNER}: with event tables of retention='pinned' the order of slots is not that of time; use "
                    "retention='ring'."
                )
            if not pad:
                raise ValueError(
                    f"{_OWNER}(pad=False): anchors may be drawn where less than slice_len={slice_len} steps follow; "
                    "use pad=True, or anchors='uniform'."
                )
        self._slice_len, self._pad = slice_len, pad
        self._done_key, self._truncated_key = path, (*path[:-1], "truncated")
        self._starts = SliceStarts(
            capacity,
            slice_len=slice_len,
            num_streams=num_streams,
            reader=EpisodeReader(_OWNER, done_key=done_key, traj_key=traj_key, init_key=init_key),
            behaviour_keys=(behaviour_keys,) if isinstance(behaviour_keys, str) else tuple(behaviour_keys),
            pad=pad,
        )
        self._anchors: PrioritySampler = self._starts if isinstance(anchors, str) else anchors
        # of the last batches: slots [B], which rows are real, and the numbers of their writes
        self._outstanding: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=_OUTSTANDING)

    @property
    def anchors(self) -> Literal["uniform"] | PrioritySampler:
        """What draws the starts."""
        return self._anchors if self._prioritized else "uniform"

    @property
    def _prioritized(self) -> bool:
        return self._anchors is not self._starts

    @property
    def takes_stamps(self) -> bool:
        """Whether samples carry the number of the write of each row."""
        return self._prioritized

    @property
    def takes_priorities(self) -> bool:
        """True if draws depend on TD errors."""
        return self._prioritized and self._anchors.takes_priorities

    @property
    def writes_in_graphs(self) -> bool:
        """Whether writes lose nothing by being part of a graph."""
        return getattr(self._anchors, "writes_in_graphs", True)

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._anchors._rng

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        self._anchors._rng = value

    @property
    def default_priority(self) -> float:
        """What ``update_priority`` would have to be given for the priority of a new transition."""
        return self._anchors.default_priority

    # --- writing

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer for slots just written."""
        self._agree()
        for sampler in self._samplers():
            sampler.mark_update(index, storage=storage)

    def add(self, index: int) -> None:
        """Called after a write."""
        for sampler in self._samplers():
            sampler.add(index)

    def extend(self, index: Tensor) -> None:
        """Called after a write."""
        for sampler in self._samplers():
            sampler.extend(index)

    def _samplers(self) -> list[PrioritySampler]:
        # the one that reads the data first: it may refuse it
        return [self._starts, self._anchors] if self._prioritized else [self._starts]

    def _agree(self) -> None:
        """What only the first of our samplers has taken in, since the write broke off in between, is known to none.

        Nor do anchors take in what it has refused, of which they were not told.
        """
        if self._prioritized and not is_traced():
            self._anchors._only_refused |= self._starts._only_refused
            ours, theirs = int(self._starts._told), int(self._anchors._told)
            if ours >= 0 and theirs >= 0 and ours != theirs:
                self._starts._told.fill_(theirs)
                self._starts._changing.fill_(True)

    # --- drawing

    @torch.no_grad()
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` / ``slice_len`` slices.

        Returns:
            The index, [B], or a tuple of [B] for a storage of more dimensions, and what rows carry beside their data.
        """
        if batch_size < 1 or batch_size % self._slice_len:
            raise ValueError(
                f"{_OWNER}.sample(batch_size={batch_size}): batch_size is the number of transitions, a multiple of "
                f"slice_len={self._slice_len}."
            )
        if not is_traced() and draws_sequences(self, storage):
            raise ValueError(_NO_SEQUENCES)
        if self._prioritized:
            self._agree()
            self._starts.ready(storage)
        index, drawn = self._anchors.sample(storage, batch_size // self._slice_len)
        start = self._anchors._slots(index)
        slots = self._starts.slices.walk(start)
        # not so from an empty buffer in a graph, nor where anchors draw what a refused write has left
        known = self._starts._tree.get(start) > 0
        mask = torch.cat([known.unsqueeze(1), (slots[:, 1:] != slots[:, :-1]) & known.unsqueeze(1)], 1)
        mark = torch.cat([~mask[:, 1:], torch.ones_like(mask[:, :1])], 1)
        drawn.pop(STAMP_KEY, None)
        extra = {key: value.repeat_interleave(self._slice_len, 0) for key, value in drawn.items()}
        return self._rows(storage, slots, mask, mark, extra)

    def _rows(
        self, storage: Any, slots: Tensor, mask: Tensor, mark: Tensor, extra: dict
    ) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Index and info of the rows ``slots`` [n, slice_len]; ``mark``: no trace goes on behind them."""
        slots, mask, mark = slots.reshape(-1), mask.reshape(-1), mark.reshape(-1)
        data = self._starts.columns(storage)

        def flag(key: NestedKey) -> Tensor | None:
            column = data.get(key, None)
            if column is None:
                return None
            return gather_in_bounds(column.flatten(0, storage.ndim - 1) if storage.ndim > 1 else column, slots).to(
                torch.bool
            )

        done = flag(self._done_key)
        assert done is not None
        mark = mark.view(-1, *(1,) * (done.ndim - 1))
        cut = mark & ~done
        truncated = flag(self._truncated_key)
        info = {
            **extra,
            MASK_KEY: mask,
            self._done_key: done | mark,
            self._truncated_key: cut if truncated is None else cut | truncated,
        }
        if self._prioritized:
            # no write has the number of a padded row
            stamp = where_int64(mask, gather_in_bounds(self._anchors._stamp, slots), torch.full_like(slots, -1))
            if self._anchors._traceable:
                info[STAMP_KEY] = stamp
            if not is_traced():
                self._outstanding.append((slots, mask, stamp))
        index: list[Tensor] = []
        for length in reversed(self._starts._dims[1:]):
            index.append(slots % length)
            slots = slots // length
        return (slots, *reversed(index)) if index else slots, info

    def newest(self, rb: TensorDictReplayBuffer) -> TensorDictBase:
        """The newest ``slice_len`` steps of each stream: the on-policy batch of Algorithm 1.

        Args:
            rb: the buffer of this sampler.

        Returns:
            A flat batch of num_streams (or columns) · ``slice_len`` rows with the entries of a sample;
            ``priority_weight`` is 1. Unlike there, a slice holds whatever episodes its stream had, in time order, with
            ``("next", "done")`` True at their ends. The mask is False where a stream has fewer steps. In flat storage
            a stream is one of ``num_streams`` lanes, which at the end of an episode may pass to another environment.

        Raises:
            ValueError: if ``rb`` is another buffer, or draws sequences (``sample_unit``).
            RuntimeError: if it is empty.
        """
        if not is_traced() and draws_sequences(self, rb._storage):
            raise ValueError(_NO_SEQUENCES)
        if is_traced():
            self._starts.ready(rb._storage)
        elif rb._storage is not self._starts._bound or not int(self._starts._clock):
            self._take_up(rb)
        # the same buffer, locks and transforms included, but for what is drawn
        view: Any = object.__new__(type(rb))
        vars(view).update(vars(rb))
        view._sampler, view._prefetch, view._batch_size = _Newest(self), False, None
        return view.sample(self._starts.slices.streams.lanes * self._slice_len)

    def _take_up(self, rb: TensorDictReplayBuffer) -> None:
        if getattr(rb.sampler, "critic_sampler", rb.sampler) is not self:
            raise ValueError(f"{_OWNER}.newest: rb must be the buffer that has this sampler.")
        if not len(rb):
            raise RuntimeError(f"{_OWNER}: cannot sample from an empty storage.")
        for sampler in self._samplers():
            sampler._bind(rb._storage)
        self._starts.ready(rb._storage)

    @torch.no_grad()
    def _newest(self, storage: Storage) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        slices = self._starts.slices
        slots, count = slices.newest()
        place = torch.arange(self._slice_len, device=slots.device)
        mask = place < count.unsqueeze(1)
        going_on = slices.is_followed(slots) & mask[:, 1:]
        mark = torch.cat([~going_on, torch.ones_like(mask[:, :1])], 1)
        ones = torch.ones(slots.numel(), device=slots.device)
        return self._rows(storage, slots, mask, mark, {"priority_weight": ones} if self._prioritized else {})

    # --- priorities

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, stamp: Tensor | None = None
    ) -> None:
        """Hand TD errors of real steps to the anchors' sampler; with uniform anchors, do nothing.

        Args:
            index: that of a sample.
            priority: TD errors, one per transition.
            storage: the buffer's storage.
            stamp: the entry ``"write_stamp"`` of the sample, [B], if it has one.
        """
        if not self.takes_priorities:
            return
        if is_traced():
            if stamp is None:
                self._anchors.update_priority(index, priority, storage=storage)
                return
            padded = stamp.reshape(-1) < 0
            error = torch.where(padded, 0.0, torch.as_tensor(priority).reshape(-1))
            self._anchors.update_priority(index, error, storage=storage, stamp=stamp)
            # padded rows were no updates
            self._anchors._dropped.sub_(padded.sum())
            return
        if self._anchors._lacks_errors(priority, storage):
            return
        mask = None if stamp is None else stamp.reshape(-1) >= 0
        if stamp is None:
            mask, stamp = self._recall(self._anchors._slots(index))
        error = torch.as_tensor(priority)
        if mask is None or stamp is None or error.numel() not in (1, mask.numel()):
            self._anchors.update_priority(index, priority, storage=storage)
            return
        chosen = tuple(i[mask] for i in index) if isinstance(index, tuple) else index[mask]
        error = error.reshape(-1)[mask] if error.numel() == mask.numel() else error
        self._anchors.update_priority(chosen, error, storage=storage, stamp=stamp.reshape(-1)[mask])

    def _recall(self, slots: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Which rows are real, and the numbers of their writes, if ``slots`` are a batch that was drawn."""
        # the batch itself, or one like it
        for same in (is_same_memory, torch.equal):
            for position in range(len(self._outstanding) - 1, -1, -1):
                drawn, mask, stamp = self._outstanding[position]
                if drawn.shape == slots.shape and same(drawn, slots):
                    del self._outstanding[position]
                    return mask, stamp
        return None, None

    # --- inspection and state

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot to be a start, float64 [len(storage)], slots in row-major order. O(N)."""
        return self._anchors.probabilities(storage)

    def stats(self) -> TensorDict:
        """Numbers worth logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: transitions stored. ``num_starts``: those where a slice may begin. ``broken_off``: trajectories
        that broke off without an end, and those that were too many for ``num_streams`` in a compiled step, which cannot
        raise. And those of the anchors' sampler.
        """
        starts = self._starts
        values = {
            "num_items": (starts._stamp > 0).sum(),
            "num_starts": starts._tree.leaves.sum(),
            "broken_off": starts.slices.streams.broken_off.sum(),
        }
        ours = TensorDict({key: value.to(torch.float32) for key, value in values.items()}, device=starts._device)
        return self._anchors.stats().update(ours) if self._prioritized else ours

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the state contradict each other. O(N)."""
        for sampler in self._samplers():
            sampler.check_valid()

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on, as tensors."""
        state: dict[str, Any] = {"starts": self._starts.state_dict()}
        return state | {"anchors": self._anchors.state_dict()} if self._prioritized else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, in place; ValueError if it does not fit, with nothing changed."""
        expected = {"starts", "anchors"} if self._prioritized else {"starts"}
        if set(state_dict) != expected:
            raise ValueError(
                f"{_OWNER}.load_state_dict: missing {sorted(expected - set(state_dict))}, unexpected "
                f"{sorted(set(state_dict) - expected)}; the anchors must be of the same kind."
            )
        before = self._starts.state_dict()
        self._starts.load_state_dict(state_dict["starts"])
        if self._prioritized:
            try:
                self._anchors.load_state_dict(state_dict["anchors"])
            except ValueError:
                self._starts.load_state_dict(before)
                raise
        self._outstanding.clear()

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``, as memory-mapped tensors."""
        self._starts.dumps(Path(path) / "starts")
        if self._prioritized:
            self._anchors.dumps(Path(path) / "anchors")

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` saved."""
        names = ["starts", "anchors"] if self._prioritized else ["starts"]
        states = {name: TensorDict.load_memmap(str(Path(path) / name)) for name in names}
        self.load_state_dict(
            {name: {str(key): value.clone() for key, value in state.items()} for name, state in states.items()}
        )

    def _empty(self) -> None:
        for sampler in self._samplers():
            sampler._empty()
        # batches in flight are of no use any more
        batches = ((slots, mask, torch.full_like(stamp, -1)) for slots, mask, stamp in self._outstanding)
        self._outstanding = deque(batches, maxlen=_OUTSTANDING)

    def __getstate__(self) -> dict[str, Any]:
        # batches in flight belong to this process
        return {**vars(self), "_outstanding": deque(maxlen=_OUTSTANDING)}

    def __repr__(self) -> str:
        return (
            f"{_OWNER}(capacity={self._starts._capacity}, slice_len={self._slice_len}, pad={self._pad}, "
            f"anchors={self.anchors!r})"
        )


class _Newest:
    """In the place of a buffer's sampler: the newest slices."""

    def __init__(self, sampler: TrajectoryRetraceSampler):
        self._sampler = sampler

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        return self._sampler._newest(storage)
