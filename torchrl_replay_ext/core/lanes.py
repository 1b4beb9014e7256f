"""Assignment of the transitions in a ring buffer to lanes, one per stream, and detection of episode starts."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import Array, is_traced
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.kernels.lanes_layout import (
    CAREFUL,
    CHAIN,
    CHECKED,
    INTERRUPTS,
    NONE,
    OPEN,
    TOO_MANY,
    TRAJECTORY,
    UNCHECKED,
)
from torchrl_replay_ext.kernels.ops import Kernel, Views


class EpisodeMarks(NamedTuple):
    """Ends, trajectory ids and first transitions of episodes in the rows of a write.

    Args:
        ended: the episode ends with this transition, bool [n], a tensor or an array.
        trajectory: trajectory ids, int64 [n]; required if lanes are assigned. Default: None, not stored.
        initial: the transition is the first of its episode, bool [n]. Default: None, not stored.
    """

    ended: Array
    trajectory: Array | None = None
    initial: Array | None = None


class Lanes:
    """The lanes of a ring buffer and the streams that are assigned to them.

    A stream is the sequence of steps of one environment. Lanes are either fixed or assigned:

    * Fixed by the storage: slot t·lanes + e is step t of lane e. One environment in flat storage is a single lane.
    * Assigned by trajectory id, for several environments in one flat storage. A trajectory keeps its lane until it
      ends. A new trajectory takes a free lane, or else the lane that was written to least recently. No more lanes are
      used than there were unfinished trajectories.

    If the lane of a new trajectory has an unfinished episode, this episode is interrupted. This is counted, and a
    warning is issued once, unless the row is marked as the first of its episode. An interrupted trajectory may go on,
    but it is an error if it interrupts a trajectory that interrupted another one: there are too few lanes.

    The state is on the CPU, where the rows of a write are assigned one after the other.

    Args:
        layout: the slots.
        num_streams: number of environments that write to flat storage; from 2 on, lanes are assigned. Default: 1.
    """

    def __init__(self, layout: Layout, num_streams: int = 1):
        self.assigned = len(layout.shape) == 1 and num_streams > 1
        self.num_lanes = num_streams if self.assigned else layout.slots_per_step
        # see lanes_layout
        self._state = torch.zeros(4, self.num_lanes, dtype=torch.int64, device="cpu")
        # number of episodes that were interrupted by a row that is not marked as the first of its episode
        self.interrupted = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._result = torch.zeros(2, dtype=torch.int64, device="cpu")
        nothing = (torch.empty(0, dtype=kind, device="cpu") for kind in (torch.int64, torch.bool))
        self._views = Views(self._state, self.interrupted, self._result, *nothing)
        self._warned = False
        self.clear_()

    def write(self, kernel: Kernel, slots: Tensor, marks: EpisodeMarks, *arguments: Any) -> None:
        """Run the kernel of a write, which assigns the rows to lanes and finds where episodes begin.

        Args:
            kernel: begins with :func:`torchrl_replay_ext.kernels.lanes.assign`.
            slots: int64 [n], distinct, in the order of writing, on the CPU.
            marks: the ends and beginnings of episodes, and the trajectory ids, on the CPU.
            *arguments: the other arguments of the kernel.

        Raises:
            ValueError: if there are more simultaneous trajectories than lanes. Nothing is changed then.
        """
        can_raise = not is_traced()
        strictness = UNCHECKED if not can_raise else CHECKED if self._warned else CAREFUL
        state, interrupted, result, no_numbers, no_marks = self._views()
        trajectory = no_numbers if marks.trajectory is None else marks.trajectory
        initial = no_marks if marks.initial is None else marks.initial
        rows = slots.contiguous(), trajectory, marks.ended, initial, self.assigned, strictness
        kernel(state, interrupted, result, *rows, *arguments)
        if can_raise:
            outcome, number = result.tolist()
            if outcome == TOO_MANY:
                raise self._too_many(number)
            if outcome == INTERRUPTS and strictness == CAREFUL:
                self._warn()
                self.write(kernel, slots, marks, *arguments)

    def _warn(self) -> None:
        self._warned = True
        warnings.warn(
            "A trajectory began before the last one had ended (done); the unfinished one is closed at its last "
            "stored step. If several environments write to this buffer, pass "
            "episodes=Episodes(num_streams=<number of environments>) to the sampler.",
            stacklevel=2,
        )

    def _too_many(self, number: int) -> ValueError:
        if self.num_lanes > 1 and not self.assigned:
            return ValueError(
                f"trajectory {number} continues in a column of the storage after another one was written there: "
                "several workers or collectors alternate in the same columns. Use flat storage (ndim=1) with "
                "episodes=Episodes(num_streams=<number of environments that write to the buffer>). If a new collector "
                "restarted the trajectory ids, mark the first transition of each episode (torchrl's InitTracker does)."
            )
        return ValueError(
            f"trajectory {number} continues after others took its place: more simultaneous trajectories than "
            f"num_streams={self.num_lanes}. Pass episodes=Episodes(num_streams=<number of environments that write to "
            "the buffer>) to the sampler. If trajectories are cut off, mark the last transition as "
            "truncated and done (a collector does with set_truncated=True), or mark the first transition of the next "
            "trajectory (torchrl's InitTracker does). Leave out the padding of split_trajs=True: "
            "data[data['collector', 'mask']]."
        )

    def end_all(self) -> None:
        """End all unfinished episodes."""
        self._state[OPEN].zero_()

    def is_open(self) -> Tensor:
        """True for each lane with an unfinished episode, bool [lanes]."""
        return self._state[OPEN] > 0

    def tensors(self) -> dict[str, Tensor]:
        """The state by name."""
        return {"lanes": self._state, "interrupted": self.interrupted}

    def clear_(self) -> None:
        """Forget all trajectories."""
        self._state.zero_()
        self._state[TRAJECTORY].fill_(NONE)
        self._state[CHAIN].fill_(NONE)
        self.interrupted.zero_()
