"""Uniform distribution over the transitions where a slice of a trajectory may begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import is_traced, raise_if
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.slices import SliceIndex
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.episode_reader import EpisodeReader
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView, ShardRows, Sums

BEHAVIOUR = (
    "the statistics of the behaviour policy. The policy in the collector writes this entry: torchrl's "
    "ProbabilisticActor writes the parameters of its distribution ('logits', or 'loc' and 'scale'), and with "
    "return_log_prob=True the log-probability. Pass the names of these entries as behaviour_keys=."
)


class SliceStarts(Distribution):
    """Draws the starts of slices uniformly, and keeps the successor of each transition.

    Args:
        log: the generations of the slots.
        priorities: not used.
        slice_len: steps per slice.
        num_streams: number of environments whose transitions are interleaved in flat storage.
        reader: reads the ends of episodes.
        behaviour_keys: entries that rows must have.
        pad: if True, slices may be shorter than ``slice_len``.
    """

    needs_order = True
    takes_priorities = False
    # True after a draw that found a transition where a slice may begin
    _had_starts = False

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities | None = None,
        *,
        slice_len: int,
        num_streams: int,
        reader: EpisodeReader,
        behaviour_keys: Sequence[NestedKey],
        pad: bool,
    ):
        self._log, self._slice_len = log, slice_len
        self._reader, self._behaviour_keys = reader, behaviour_keys
        steps, num_lanes, assigned = log.layout.lanes(num_streams)
        layout = log.layout
        self.slices = SliceIndex(
            steps,
            num_lanes,
            length=slice_len,
            padded=pad,
            assigned=assigned,
            device=layout.device,
            validate=layout.validate,
        )
        self._tree = self.slices.starts

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        for key in self._behaviour_keys:
            rows.require(key, BEHAVIOUR)
        marks = self._reader.read(rows, needs_ids=self.slices.lanes.assigned)
        if not rows.is_rewrite:
            self.slices.write(slots, marks)

    def remove(self, slots: Tensor) -> None:
        self.slices.remove(slots)

    def before_full_overwrite(self) -> None:
        self.slices.before_full_overwrite()

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        if not is_traced():
            raise_if(
                lambda: self._tree.total() == 0,
                lambda: RuntimeError(
                    f"TrajectoryRetraceSampler(slice_len={self._slice_len}, pad=False): no stored episode has "
                    f"{self._slice_len} consecutive steps; wait for longer episodes, or pass a smaller slice_len=, or "
                    "pad=True."
                ),
                # on an accelerator only until there is a start for the first time
                skip_on=self._log.layout.skip_checks_on if self._had_starts else None,
            )
            self._had_starts = True
        return Draw(self._tree.sample(batch_size, generator=generator)[0])

    def sums(self) -> Sums:
        return Sums(self._tree.total().double().reshape(1), None)

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        if not self._tree.total():
            return Draw(torch.zeros(0, dtype=torch.int64))
        return Draw(self._tree.draw(wanted.u)[0])

    def density(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots).double()

    def clear(self) -> None:
        self.slices.clear_()
        self._had_starts = False

    def tensors(self) -> dict[str, Tensor]:
        return {f"slices_{name}": tensor for name, tensor in self.slices.tensors().items()}

    def rebuild(self) -> None:
        self.slices.rebuild_(self._stored())

    def check_valid(self) -> None:
        stored = self._stored()
        self.slices.check_valid(stored)
        layout, step, time = self._log.layout, int(self._log.last_seen_step), int(self.slices.time)
        end = (step + 1) * layout.slots_per_step
        # the rows of a write that was refused later are not stored
        if step >= 0 and bool(stored[time % layout.num_slots]) and (end - time - 1) % layout.num_slots:
            raise AssertionError("SliceStarts: the last row is not in the last step of the ring")

    def _stored(self) -> Tensor:
        return self._log.generation[: self._log.layout.num_slots] > 0

    def stats(self) -> dict[str, Tensor]:
        """``num_items``, ``num_starts`` and ``interrupted``; see TrajectoryRetraceSampler."""
        return {
            "num_items": self._stored().sum(),
            "num_starts": self._tree.leaves.sum(),
            "interrupted": self.slices.lanes.interrupted.sum(),
        }
