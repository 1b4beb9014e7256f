"""Draws slices, consecutive steps of one episode, for Retrace and ACER."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, RandomSampler, Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import (
    key_path,
    require_bool,
    require_choice,
    require_integer,
    require_nested_keys,
)
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, raise_if, uniform
from torchrl_replay_ext.core.layout import Layout, unravel
from torchrl_replay_ext.core.streams import Episodes, require_episodes
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.event_table import EventTableSampler
from torchrl_replay_ext.samplers.rows import EpisodeReader, stored_tensordict
from torchrl_replay_ext.samplers.shard_draws import STAMP_KEY, Sums
from torchrl_replay_ext.samplers.slice_starts import OWNER, SliceStarts, Starts
from torchrl_replay_ext.samplers.wrapper import SamplerWrapper, delegated

MASK_KEY = ("collector", "mask")
_NO_SEQUENCES = (
    f"{OWNER}: the buffer has sample_unit=Sequence(...), but this sampler draws sequences itself. Leave sample_unit "
    "out, or use ProportionalSampler, RankBasedSampler or ReaPERSampler with it."
)


class _UniformStarts(ReplaySampler):
    """Draws the starts of slices, all equally likely. Errors name the sampler that has it."""

    owner = OWNER
    takes_priorities = False

    def __init__(self, capacity: int | None, slices: SliceStarts):
        self._slices = slices
        super().__init__(capacity)

    def allocate(self, layout: Layout) -> None:
        pass

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        if not is_traced():
            self._slices.require_start()
        slots, _ = self._slices.starts.draw(uniform(count, device=self.layout.device, generator=generator))
        return Draw(slots)

    def density(self, slots: Tensor) -> Tensor:
        return self._slices.starts.get(slots).double()

    def shard_sums(self) -> Sums:
        return Sums([self._slices.starts.total().item()])


@PrioritizedSampler.register
class TrajectoryRetraceSampler(SamplerWrapper):
    r"""Draws slices of trajectories with the behaviour statistics that Retrace and ACER need (Wang et al. 2017).

    ``rb.sample(batch_size)`` returns a flat batch of ``batch_size`` transitions. ``batch.reshape(-1, slice_len)`` has
    one slice per row: up to ``slice_len`` consecutive steps of one episode, beginning at a drawn start ("sample
    trajectory from the replay memory", Algorithms 1 and 2 and Sec. 3). A slice ends at the end of an episode and before
    the write position of the ring. It contains steps of one stream only.

    Samples contain the stored entries and:

    * ``("collector", "mask")``, bool [B]: False for padded rows, which repeat the last real step of the slice.
    * ``("next", "done")``: True at the last real step of each slice and in padded rows, also if the episode continues,
      so that no trace leaves the slice. In the same rows, ``("next", "truncated")`` is True unless the episode
      terminated there, so that the value of the next state completes the return. ``("next", "terminated")`` is
      unchanged. If neither ``("next", "truncated")`` nor ``("next", "terminated")`` is stored, an episode that is done
      counts as terminated.

    Choice of starts:

    * ``pad=True``: all stored transitions are equally likely to be a start. This includes transitions of short episodes
      and the last steps of long episodes. Every slice has at least one real step.
    * ``pad=False``: all transitions followed by ``slice_len`` - 1 stored steps of their episode are equally likely.
    * ``anchors``: another sampler draws the starts. Its ``priority_weight`` applies to all steps of a slice. TD errors
      of all steps become priorities; if slices overlap, the largest one of a slot counts. So padded rows have no effect
      if their TD error is 0, as the losses write it, and they come back in one update with the rest of their slice.
      Slices may come back in any order and as copies.

    :meth:`newest` returns the on-policy slices of Algorithm 1.

    Every write records the successor of each transition, so a draw needs no search. Environments and trajectory ids are
    handled as in :class:`~torchrl_replay_ext.ReaPERSampler`. The writer must be a round-robin writer, the default.

    Args:
        capacity: number of slots, at least the capacity of the storage. None (default): the capacity of the storage.
        slice_len: steps per slice, k in the paper, which uses 20 for discrete and 50 for continuous actions.
        behaviour_keys: required entries with statistics of the behaviour policy: ``("logits",)`` (default), ``("loc",
            "scale")``, ``("action_log_prob",)``, or () for none.
        pad: if True, slices may have fewer than ``slice_len`` steps and are padded, see above. Default: True.
        anchors: ``"uniform"`` (default), or a :class:`~torchrl_replay_ext.ReplaySampler`, such as ProportionalSampler;
            an EventTableSampler needs tables of ``retention="ring"``. Do not use this sampler in another buffer.
            Requires ``pad=True``.
        starts: where slices begin: ``"any"`` (default), or ``"episode"``: at the first transition that the buffer got
            of each episode, for recurrent networks that learn from the first step on. All are equally likely. (A write
            of more rows than slots counts from its first row that stays.) Requires ``anchors="uniform"``.
        episodes: how rows are divided into episodes. The last part of ``done_key`` must not be ``"terminated"``;
            ``"truncated"`` is written beside this entry. Default: None: those of ``anchors``, which must be the same,
            if these read episodes; else as :class:`~torchrl_replay_ext.Episodes` says. When a state is loaded,
            unfinished episodes end with their last stored transition.

    Raises:
        TypeError: if a number or a flag has another type.
        ValueError: if an argument is out of range. At a write, if ``capacity`` is smaller than the storage, or more
            trajectories than ``episodes.num_streams`` go on in turn. At a draw, if ``batch_size`` is not a multiple of
            ``slice_len`` or the buffer has ``sample_unit=Sequence(...)``.
        KeyError: at a write, if a required entry is missing.
        RuntimeError: at a draw, if the buffer is empty or no slice can begin. In a graph the mask is False instead.

    Warns:
        UserWarning: at a write, once, if a trajectory is interrupted without an end.

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

    # with uniform anchors, updates do nothing
    update_priority = delegated("starts_sampler", "update_priority", read_only=True)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        slice_len: int,
        behaviour_keys: Sequence[NestedKey] = ("logits",),
        pad: bool = True,
        anchors: Literal["uniform"] | ReplaySampler = "uniform",
        starts: Starts = "any",
        episodes: Episodes | None = None,
    ):
        slice_len = require_integer(OWNER, "slice_len", slice_len)
        require_bool(OWNER, "pad", pad)
        require_choice(OWNER, "starts", starts, get_args(Starts))
        if not isinstance(behaviour_keys, (str, Sequence)):
            raise TypeError(f"{OWNER}(behaviour_keys={behaviour_keys!r}): behaviour_keys must be a list of keys.")
        names = (behaviour_keys,) if isinstance(behaviour_keys, str) else tuple(behaviour_keys)
        for name in names:
            require_nested_keys(OWNER, behaviour_keys=name)
        if anchors != "uniform":
            if not isinstance(anchors, ReplaySampler):
                raise ValueError(
                    f"{OWNER}(anchors={anchors!r}): anchors must be 'uniform' or a prioritized sampler of this "
                    f"package. To combine with a DecoupledSampler, pass the {OWNER} to it as critic_sampler."
                )
            if anchors.followers:
                raise ValueError(
                    f"{OWNER}: this anchors= already belongs to another {OWNER}; create a sampler for each of them."
                )
            if isinstance(anchors, EventTableSampler) and anchors.tables.is_pinned:
                raise ValueError(
                    f"{OWNER}: with event tables of retention='pinned' slots are not in time order; use "
                    "retention='ring'."
                )
            if starts == "episode":
                raise ValueError(
                    f"{OWNER}(starts='episode', anchors={anchors!r}): anchors may draw any step of an episode; use "
                    "starts='any', or anchors='uniform'."
                )
            if not pad:
                raise ValueError(
                    f"{OWNER}(pad=False): anchors may draw starts of slices shorter than slice_len={slice_len}; "
                    "use pad=True, or anchors='uniform'."
                )
            for other in anchors.episode_readers:
                episodes = require_episodes(OWNER, other.episodes if episodes is None else episodes)
                if other.episodes != episodes:
                    raise ValueError(
                        f"{OWNER}(episodes={episodes!r}): anchors= have {other.episodes!r}; pass one object to both."
                    )
        reader = EpisodeReader(OWNER, require_episodes(OWNER, episodes))
        path = key_path(reader.episodes.done_key)
        if path[-1] == "terminated":
            raise ValueError(
                f"{OWNER}(episodes={reader.episodes!r}): done_key must be True at every end of an episode, also a "
                "truncated one; use ('next', 'done')."
            )
        # steps per slice
        self.slice_len, self._pad = slice_len, pad
        self._done_key, self._truncated_key = path, (*path[:-1], "truncated")
        self._starts = SliceStarts(slice_len=slice_len, reader=reader, behaviour_keys=names, pad=pad, starts=starts)
        self._is_prioritized = not isinstance(anchors, str)
        if isinstance(anchors, str):
            anchors = _UniformStarts(capacity, self._starts)
        else:
            # errors of draws and updates name both
            anchors.owner = f"{OWNER}(anchors={type(anchors).__name__}(...))"
        anchors.attach(self._starts, reader)
        # draws the starts
        self.starts_sampler: ReplaySampler = anchors

    @property
    def anchors(self) -> Literal["uniform"] | ReplaySampler:
        """The sampler that draws the starts, or ``"uniform"``."""
        return self.starts_sampler if self._is_prioritized else "uniform"

    @property
    def _inner(self) -> ReplaySampler:
        return self.starts_sampler

    # --- drawing

    @torch.no_grad()
    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` / ``slice_len`` slices.

        Returns:
            The index, [B], or a tuple of [B] for a storage of more dimensions, and a dict with the further entries.
        """
        if type(batch_size) is not int:
            batch_size = require_integer(f"{OWNER}.sample", "batch_size", batch_size)
        if batch_size < 1 or batch_size % self.slice_len:
            raise ValueError(
                f"{OWNER}.sample(batch_size={batch_size}): batch_size is the number of transitions; it must be a "
                f"multiple of slice_len={self.slice_len}."
            )
        if _torchrl.draws_sequences(self, storage):
            raise ValueError(_NO_SEQUENCES)
        return self.slices(storage, *self.starts_sampler.draw_rows(storage, batch_size // self.slice_len))

    def slices(self, storage: Storage, start: Tensor, drawn: dict[str, Tensor]) -> tuple[Any, dict]:
        """Index and info of the slices that begin at ``start`` [n]; ``drawn``: further columns, [n] each."""
        # the mask is all False if the buffer is empty, in a graph
        slots, mask = self._starts.walk(start)
        return self._rows(storage, slots, mask, mask[:, 1:], drawn)

    def _rows(
        self, storage: Any, slots: Tensor, mask: Tensor, goes_on: Tensor, drawn: dict[str, Tensor] | None
    ) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Index and info of the rows ``slots`` [n, slice_len].

        Args:
            storage: the storage.
            slots: int64 [n, slice_len].
            mask: True for real rows, bool [n, slice_len].
            goes_on: True where the next row continues the trace, bool [n, slice_len - 1].
            drawn: further columns of the starts, [n] each; None for the newest slices, which are not drawn.
        """
        ends = torch.cat([~goes_on, torch.ones_like(mask[:, :1])], 1)
        is_slice = mask[:, :1].expand_as(mask).reshape(-1)
        slots, mask, ends = slots.reshape(-1), mask.reshape(-1), ends.reshape(-1)
        data = stored_tensordict(OWNER, storage)

        def flag(key: NestedKey) -> Tensor | None:
            column = data.get(key, None)
            if column is None:
                return None
            flat = column.flatten(0, storage.ndim - 1) if storage.ndim > 1 else column
            return gather_in_bounds(flat, slots).to(torch.bool)

        done = flag(self._done_key)
        assert done is not None
        ends = ends.view(-1, *(1,) * (done.ndim - 1))
        cut, truncated = ends & ~done, flag(self._truncated_key)
        if truncated is None and (terminated := flag((*self._done_key[:-1], "terminated"))) is not None:
            truncated = done & ~terminated.reshape(done.shape)
        info = {
            **{key: value.repeat_interleave(self.slice_len, 0) for key, value in (drawn or {}).items()},
            MASK_KEY: mask,
            self._done_key: done | ends,
            self._truncated_key: cut if truncated is None else cut | truncated,
        }
        if self._is_prioritized:
            state = self.starts_sampler.slots
            if self.starts_sampler.layout.for_graphs:
                # where no slice could be drawn, a stamp that no write has
                info[STAMP_KEY] = state.generation_of(slots) * is_slice
            # an update with the batch of newest() is not expected
            if drawn is not None:
                state.drawn(slots)
        return unravel(slots, self.starts_sampler.layout.shape), info

    def newest(self, rb: TensorDictReplayBuffer) -> TensorDictBase:
        """The newest ``slice_len`` steps of each stream: the on-policy batch of Algorithm 1.

        Args:
            rb: the buffer that has this sampler.

        Returns:
            A flat batch of num_streams (or columns) · ``slice_len`` rows with the entries of a sample.
            ``priority_weight`` is 1. Unlike a slice of a sample, these slices contain steps of several episodes in time
            order, with ``("next", "done")`` True at the end of each. The mask is False where a stream has fewer steps.
            In flat storage a stream is one of ``num_streams`` lanes, and a lane may contain episodes of different
            environments. If ``num_streams`` was not passed, lanes without steps are left out in eager code.

        Raises:
            ValueError: if ``rb`` is another buffer, or has ``sample_unit=Sequence(...)``.
            RuntimeError: if ``rb`` is empty.
        """
        raise_if(lambda: _torchrl.draws_sequences(self, rb.storage), lambda: ValueError(_NO_SEQUENCES))
        raise_if(
            lambda: getattr(rb.sampler, "critic_sampler", rb.sampler) is not self,
            lambda: ValueError(f"{OWNER}.newest: rb must be the buffer that has this sampler."),
        )
        raise_if(
            lambda: not len(rb),
            lambda: RuntimeError(f"Cannot sample from an empty storage. {OWNER}: write to the buffer first."),
        )
        self.starts_sampler.synchronize(rb.storage)
        view = _torchrl.with_sampler(rb, _Newest(self))
        return view.sample(self._starts.lanes.num_lanes * self.slice_len)

    @torch.no_grad()
    def newest_rows(self, storage: Storage) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Index and info of the batch of :meth:`newest`."""
        slots, mask = self._starts.newest()
        index, info = self._rows(storage, slots, mask, self._starts.is_followed(slots) & mask[:, 1:], None)
        if self._is_prioritized:
            info["priority_weight"] = torch.ones(slots.numel(), dtype=torch.float32, device=slots.device)
        return index, info

    def episode(self, storage: Storage, index: int | Tensor | tuple) -> TensorDictBase:
        """The stored transitions of one episode, in time order. O(N).

        Args:
            storage: the storage of the buffer, ``rb.storage``.
            index: the index of one of its transitions, such as a row of ``batch["index"]``.

        Returns:
            The stored entries and ``"index"``, [n]. The beginning of the episode may have been overwritten.

        Raises:
            IndexError: if the slot is empty or out of range.
        """
        sampler = self.starts_sampler
        with _torchrl.exclusive(storage):
            sampler.synchronize(storage)
            slot = sampler.flat_slots(index).reshape(-1)
            if slot.numel() != 1 or not bool(sampler.slots.generation_of(slot) > 0):
                raise IndexError(f"{OWNER}.episode(index={index}): pass the index of one stored transition.")
            steps: Any = unravel(self._starts.episode(int(slot)), sampler.layout.shape)
            rows = storage.get(steps).clone()
        return rows.set("index", torch.stack(steps, -1) if isinstance(steps, tuple) else steps)

    # --- inspection and state

    def stats(self) -> TensorDict:
        """Statistics for logging, as a TensorDict of float32 scalars. O(N).

        ``num_items``: stored transitions. ``num_starts``: transitions where a slice may begin. ``interrupted``:
        trajectories that another one interrupted before their end, unless its first row is marked. And the statistics
        of the anchors' sampler.
        """
        with self.starts_sampler.exclusive():
            ours = {key: value.to(torch.float32) for key, value in self._starts.stats().items()}
        ours = TensorDict(ours, device=self.starts_sampler.layout.device)
        return self.starts_sampler.stats().update(ours) if self._is_prioritized else ours

    def __repr__(self) -> str:
        return (
            f"{OWNER}(capacity={self.starts_sampler.capacity}, slice_len={self.slice_len}, pad={self._pad}, "
            f"anchors={self.anchors!r})"
        )


class _Newest(RandomSampler):
    """Replaces the sampler of a buffer; samples are the newest slices."""

    def __init__(self, sampler: TrajectoryRetraceSampler):
        self._slices = sampler

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        return self._slices.newest_rows(storage)
