"""Reliability of targets, computed from the TD errors of an episode (Pleiss et al., arXiv 2506.18482)."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import Array, as_array
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.episode_reader import EpisodeReader
from torchrl_replay_ext.distributions.protocol import RowView, WriteObserver

Truncated = Literal["finished", "ongoing"]


class Reliability(WriteObserver):
    """R of Eq. 16: the share of the TD errors of an episode up to and including a transition.

    Args:
        log: the generations of the slots.
        omega: the exponent of R.
        reader: reads the ends of episodes.
        num_streams: number of environments whose transitions are interleaved in flat storage.
        truncated: whether truncated episodes are ``"finished"`` or ``"ongoing"``.
        terminated_key: entry that marks termination; used if ``truncated="ongoing"``.
    """

    def __init__(
        self,
        log: WriteLog,
        *,
        omega: Hyperparameter,
        reader: EpisodeReader,
        num_streams: int,
        truncated: Truncated,
        terminated_key: NestedKey,
    ):
        self._log, self.omega, self._reader = log, omega, reader
        self._truncated, self._terminated_key = truncated, terminated_key
        steps, num_lanes, assigned = log.layout.lanes(num_streams)
        self._episodes = EpisodeIndex(
            steps, num_lanes, assigned=assigned, device=log.layout.device, validate=log.layout.validate
        )

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        marks = self._reader.read(rows, needs_ids=self._episodes.assigned)
        finished = marks.ended
        if self._truncated == "ongoing":
            terminated = rows.column(
                self._terminated_key,
                "which truncated='ongoing' needs. The environment should write it; pass its name as terminated_key=.",
            )
            assert terminated is not None
            finished = terminated.to(torch.bool)
        if rows.is_rewrite:
            # the position of the transition in its episode does not change
            self._episodes.update(slots, SumTree.to_mass(as_array(priority)), None)
            return
        self._episodes.write(slots, priority, self._log.num_writes, marks, finished)

    def remove(self, slots: Tensor) -> None:
        self._episodes.remove(slots)

    def before_full_overwrite(self) -> None:
        self._episodes.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Set d of ``slots`` [n] to ``priority`` [n]; see :meth:`Distribution.update`."""
        self._episodes.update(slots, SumTree.to_mass(as_array(priority)), self._log.num_writes)

    def of(self, slots: Tensor) -> Tensor:
        """R of ``slots`` [n], float64 [n]."""
        return self._episodes.reliability(slots, self._log.generation)

    def factor(self, slots: Tensor) -> Tensor:
        """R^ω of ``slots`` [n], float64 [n]."""
        return self.of(slots) ** self.omega.current()

    def exponent(self) -> Array:
        """ω as kernels take it."""
        return self.omega.views()[0]

    def arrays(self) -> list[Array]:
        """The state that kernels read, see :meth:`EpisodeIndex.arrays`."""
        return self._episodes.arrays(self._log.views()[0])

    @property
    def max_supported_priority(self) -> float:
        """The largest d that can be represented."""
        return self._episodes.max_supported_priority

    def largest_episode(self) -> int:
        """F of Eq. 16: the largest sum of d of a stored episode, in units of the mass."""
        return self._episodes.largest_total()

    def note_other_shards(self, largest_episode: int) -> None:
        """F is at least ``largest_episode``, that of the episodes in other shards."""
        self._episodes.least_largest = largest_episode

    def mean(self) -> Tensor:
        """Mean reliability of the stored transitions, float32 []; 1 if there are none."""
        slots = self._log.stored_slots()
        return self.of(slots).mean() if slots.numel() else torch.ones(())

    def interrupted(self) -> Tensor:
        """Number of episodes that were interrupted without an end, int64 []."""
        return self._episodes.lanes.interrupted.sum()

    def clear(self) -> None:
        self._episodes.clear_()

    def tensors(self) -> dict[str, Tensor]:
        return {f"episodes_{name}": tensor for name, tensor in self._episodes.tensors().items()}

    def raise_numbers(self, last: int) -> None:
        self._episodes.raise_numbers(last)

    def rebuild(self) -> None:
        self._episodes.rebuild_()

    def check_valid(self) -> None:
        self._episodes.check_valid()
        slots = torch.arange(self._log.layout.num_slots, device=self._log.layout.device)
        if not torch.equal(self._episodes.holds(slots), self._log.generation[: len(slots)] > 0):
            raise AssertionError("Reliability: an empty slot is in an episode, or a stored transition is in none")
