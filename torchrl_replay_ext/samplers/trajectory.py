"""Slices of trajectories for off-policy traces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import require_bool, require_integer
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, where_int64
from torchrl_replay_ext.distributions.episode_reader import EpisodeReader
from torchrl_replay_ext.distributions.slice_starts import BEHAVIOUR, SliceStarts
from torchrl_replay_ext.samplers.adapter import STAMP_KEY, PrioritySampler
from torchrl_replay_ext.samplers.rows import stored_tensordict
from torchrl_replay_ext.samplers.signature import ShowsArguments
from torchrl_replay_ext.samplers.slot_index import unravel
from torchrl_replay_ext.samplers.td_errors import is_initialization

MASK_KEY = ("collector", "mask")
# Batches whose padded rows are remembered until their TD errors come back.
_REMEMBERED = 128
_OWNER = "TrajectoryRetraceSampler"
_NO_SEQUENCES = (
    f"{_OWNER}: the buffer has sample_unit=Sequence(...), but this sampler draws sequences itself. Leave sample_unit "
    "out, or use ProportionalSampler, RankBasedSampler or ReaPERSampler with it."
)


class _UniformStarts(PrioritySampler):
    """Draws the starts of slices, all with the same probability."""

    def __init__(self, capacity: int | None, make: partial[SliceStarts]):
        super().__init__(capacity, make, hyperparameters={})


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
      that were padded have no effect. In TorchRL's own buffers, hand the flat batch back as it came, whole or in
      slices: rows of a shuffled copy are not recognised as padded.

    The on-policy slices of Algorithm 1 are :meth:`newest`.

    Which transition follows another is kept at writes, and a draw only follows it: nothing is searched. Environments
    and trajectory ids are treated as by :class:`~torchrl_replay_ext.ReaPERSampler`: one environment, or one per column
    of a storage of ``ndim`` >= 2, need nothing more; several that write to one flat storage are told apart by
    ``traj_key``, and their number is ``num_streams``. The writer must be a round-robin one, the default.

    Args:
        capacity: number of slots, at least that of the storage; None (default): that of the storage.
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
        capacity: int | None = None,
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
        for name, value in (("slice_len", slice_len), ("num_streams", num_streams)):
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
        self._behaviour_keys = (behaviour_keys,) if isinstance(behaviour_keys, str) else tuple(behaviour_keys)
        make = partial(
            SliceStarts,
            slice_len=slice_len,
            num_streams=num_streams,
            reader=EpisodeReader(done_key=done_key, traj_key=traj_key, init_key=init_key),
            behaviour_keys=self._behaviour_keys,
            pad=pad,
        )
        self._is_prioritized = not isinstance(anchors, str)
        if isinstance(anchors, str):
            self._sampler: PrioritySampler = _UniformStarts(capacity, make)
        else:
            anchors.observe(make)
            self._sampler = anchors
        # which rows of the last batches are real, by the memory of their slots
        self._masks: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    @property
    def anchors(self) -> Literal["uniform"] | PrioritySampler:
        """What draws the starts."""
        return self._sampler if self._is_prioritized else "uniform"

    @property
    def _starts(self) -> SliceStarts:
        starts = self._sampler.state.observers[-1] if self._is_prioritized else self._sampler.distribution
        assert isinstance(starts, SliceStarts)
        return starts

    @property
    def takes_stamps(self) -> bool:
        """Whether samples carry the generation of each row."""
        return self._is_prioritized

    @property
    def takes_priorities(self) -> bool:
        """Whether draws depend on TD errors."""
        return self._sampler.takes_priorities

    @property
    def writes_in_graphs(self) -> bool:
        """Whether writes lose nothing by being part of a graph."""
        return self._sampler.writes_in_graphs

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]: TorchRL assigns it
        return _torchrl.sampler_generator(self._sampler)

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        _torchrl.set_sampler_generator(self._sampler, value)

    @property
    def default_priority(self) -> float:
        """What ``update_priority`` would have to be given for the priority of a new transition."""
        return self._sampler.default_priority

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer for slots just written."""
        self._sampler.mark_update(index, storage=storage)

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
        if not is_traced() and _torchrl.draws_sequences(self, storage):
            raise ValueError(_NO_SEQUENCES)
        start, drawn = self._sampler.draw(storage, batch_size // self._slice_len)
        starts = self._starts
        slots = starts.slices.walk(start)
        # not so from an empty buffer in a graph
        known = starts.may_start(start)
        mask = torch.cat([known.unsqueeze(1), (slots[:, 1:] != slots[:, :-1]) & known.unsqueeze(1)], 1)
        mark = torch.cat([~mask[:, 1:], torch.ones_like(mask[:, :1])], 1)
        return self._rows(storage, slots, mask, mark, drawn)

    def _rows(
        self, storage: Any, slots: Tensor, mask: Tensor, mark: Tensor, drawn: dict[str, Tensor] | None
    ) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Index and info of the rows ``slots`` [n, slice_len].

        Args:
            storage: the storage.
            slots: int64 [n, slice_len].
            mask: which rows are real, [n, slice_len].
            mark: rows behind which no trace goes on, [n, slice_len].
            drawn: what was drawn with each start; None for the newest slices, which were not drawn.
        """
        slots, mask, mark = slots.reshape(-1), mask.reshape(-1), mark.reshape(-1)
        data = stored_tensordict(_OWNER, storage)
        for key in self._behaviour_keys:
            if data.get(key, None) is None:
                raise KeyError(f"{_OWNER}: the stored data has no entry {key!r}, {BEHAVIOUR}")

        def flag(key: NestedKey) -> Tensor | None:
            column = data.get(key, None)
            if column is None:
                return None
            flat = column.flatten(0, storage.ndim - 1) if storage.ndim > 1 else column
            return gather_in_bounds(flat, slots).to(torch.bool)

        done = flag(self._done_key)
        assert done is not None
        mark = mark.view(-1, *(1,) * (done.ndim - 1))
        cut = mark & ~done
        truncated = flag(self._truncated_key)
        info = {
            **{key: value.repeat_interleave(self._slice_len, 0) for key, value in (drawn or {}).items()},
            MASK_KEY: mask,
            self._done_key: done | mark,
            self._truncated_key: cut if truncated is None else cut | truncated,
        }
        if self._is_prioritized:
            if self._sampler.layout.for_graphs:
                # no write has the number of a padded row
                info[STAMP_KEY] = where_int64(mask, self._sampler.state.generation(slots), torch.full_like(slots, -1))
            if not is_traced():
                # the batch of newest() was not drawn, and no TD errors are expected of it
                self._sampler.state.remember_draw(slots, comes_back=drawn is not None)
                self._masks[_memory(slots)] = (slots, mask)
                if len(self._masks) > _REMEMBERED:
                    self._masks.popitem(last=False)
        return unravel(slots, self._sampler.layout.shape), info

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
        if not is_traced():
            if _torchrl.draws_sequences(self, rb.storage):
                raise ValueError(_NO_SEQUENCES)
            if getattr(rb.sampler, "critic_sampler", rb.sampler) is not self:
                raise ValueError(f"{_OWNER}.newest: rb must be the buffer that has this sampler.")
            if not len(rb):
                raise RuntimeError(f"{_OWNER}: cannot sample from an empty storage.")
            self._sampler.ready(rb.storage)
        else:
            self._sampler.require_bound(rb.storage)
        view = _torchrl.with_sampler(rb, _Newest(self))
        return view.sample(self._starts.slices.streams.lanes * self._slice_len)

    @torch.no_grad()
    def newest_rows(self, storage: Storage) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Index and info of the batch of :meth:`newest`."""
        slices = self._starts.slices
        slots, count = slices.newest()
        place = torch.arange(self._slice_len, device=slots.device)
        mask = place < count.unsqueeze(1)
        going_on = slices.is_followed(slots) & mask[:, 1:]
        mark = torch.cat([~going_on, torch.ones_like(mask[:, :1])], 1)
        index, info = self._rows(storage, slots, mask, mark, None)
        if self._is_prioritized:
            info["priority_weight"] = torch.ones(slots.numel(), device=slots.device)
        return index, info

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
        sampler = self._sampler
        if is_traced():
            sampler.update_priority(index, priority, storage=storage, stamp=stamp)
            return
        if sampler.ready(storage) and is_initialization(priority, storage, sampler.state.priorities):
            return
        if sampler.lacks_td_errors(priority, storage):
            return
        slots, error = sampler.flat_slots(index), torch.as_tensor(priority, device=sampler.layout.device)
        mask = self._real_rows(slots) if stamp is None else stamp.reshape(-1) >= 0
        if mask is None or error.numel() not in (1, mask.numel()):
            sampler.update_priority(index, priority, storage=storage, stamp=stamp)
            return
        generation = stamp.reshape(-1) if stamp is not None else sampler.state.generation_if_current(slots)
        chosen = tuple(i[mask] for i in index) if isinstance(index, tuple) else index[mask]
        error = error.reshape(-1)[mask] if error.numel() == mask.numel() else error
        sampler.update_priority(chosen, error, storage=storage, stamp=generation[mask])

    def _real_rows(self, slots: Tensor) -> Tensor | None:
        """Which of ``slots`` [n] are no padding, bool [n]; None if they are not part of a batch that is remembered."""
        found = self._masks.get(_memory(slots))
        if found is not None and slots.is_contiguous():
            begin = slots.storage_offset() - found[0].storage_offset()
            return found[1][begin : begin + len(slots)]
        equal = [mask for drawn, mask in self._masks.values() if torch.equal(drawn, slots)]
        return equal[-1] if equal else None

    # --- inspection and state

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot to be a start, float64 [len(storage)], slots in row-major order. O(N)."""
        return self._sampler.probabilities(storage)

    def stats(self) -> TensorDict:
        """Numbers worth logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: transitions stored. ``num_starts``: those where a slice may begin. ``broken_off``: trajectories
        that broke off without an end, and those that were too many for ``num_streams`` in a compiled step, which cannot
        raise. And those of the anchors' sampler.
        """
        with self._sampler.exclusive():
            ours = {key: value.to(torch.float32) for key, value in self._starts.stats().items()}
        ours = TensorDict(ours, device=self._sampler.layout.device)
        return self._sampler.stats().update(ours) if self._is_prioritized else ours

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the state contradict each other. O(N)."""
        self._sampler.check_valid()

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on, as tensors."""
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, in place; ValueError if it does not fit, with nothing changed."""
        if "starts" in state_dict:
            # saved by an earlier version
            state_dict = state_dict["starts"]
        self._sampler.load_state_dict(state_dict)
        self._masks.clear()

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``, as memory-mapped tensors."""
        self._sampler.dumps(path)

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` saved."""
        self._sampler.loads(path)
        self._masks.clear()

    def _empty(self) -> None:
        _torchrl.empty_sampler(self._sampler)

    def __getstate__(self) -> dict[str, Any]:
        # draws belong to this process
        return {**vars(self), "_masks": OrderedDict()}

    def __repr__(self) -> str:
        return (
            f"{_OWNER}(capacity={self._sampler.capacity}, slice_len={self._slice_len}, pad={self._pad}, "
            f"anchors={self.anchors!r})"
        )


def _memory(slots: Tensor) -> int:
    return slots.untyped_storage().data_ptr()


class _Newest:
    """In the place of a buffer's sampler: the newest slices."""

    def __init__(self, sampler: TrajectoryRetraceSampler):
        self._sampler = sampler

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        return self._sampler.newest_rows(storage)
