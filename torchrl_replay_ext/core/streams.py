"""Which rows are steps of one environment: ``Episodes`` of users, lanes, and a warning if environments are mixed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey, TensorDictBase, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.arguments import require_integer, require_nested_keys
from torchrl_replay_ext.compilation import Array, is_traced, to_device
from torchrl_replay_ext.core.layout import Layout, unravel
from torchrl_replay_ext.kernels.layouts import (
    CAREFUL,
    CHAIN,
    CHECKED,
    INTERRUPTS,
    NO_ID,
    OPEN,
    TOO_MANY,
    TRAJECTORY,
    UNCHECKED,
)
from torchrl_replay_ext.kernels.ops import Kernel, Views


@dataclass(frozen=True)
class Episodes:
    """How the rows of a buffer are divided into episodes; pass one object to all parts of a buffer, if they need it.

    :class:`~torchrl_replay_ext.ReaPERSampler`, :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`,
    :class:`~torchrl_replay_ext.EventTableWriter` and :class:`~torchrl_replay_ext.FrameStackStorage` take it as
    ``episodes=``. The defaults fit data of TorchRL's collectors. In a storage with ``ndim`` >= 2, each column is a
    stream, the steps of one environment one after the other. In flat storage, trajectory ids identify the streams; rows
    without ids are one stream.

    Args:
        traj_key: entry with trajectory ids, integers. None: ids are not read. Default: ``("collector", "traj_ids")``,
            which TorchRL's collectors write; used if present. Another entry must be present.
        done_key: entry that marks the end of an episode by termination or truncation, bool. Default: ``("next",
            "done")``.
        init_key: entry that marks the first transition of an episode, bool; used if present. Default: ``"is_init"``,
            which TorchRL's ``InitTracker`` writes.
        num_streams: number of environments whose transitions are interleaved in flat storage. More unfinished
            trajectories than that interrupt each other: this is counted at first, and an error if it goes on. Default:
            None: 64, or 1 without trajectory ids. :class:`~torchrl_replay_ext.EventTableWriter` needs no number.

    Raises:
        TypeError: if a key is not a string or a tuple of strings, or the number is not an integer.
        ValueError: if ``num_streams`` is smaller than 1, or larger than 1 without ``traj_key``.
    """

    _: KW_ONLY
    traj_key: NestedKey | None = ("collector", "traj_ids")
    done_key: NestedKey = ("next", "done")
    init_key: NestedKey = "is_init"
    num_streams: int | None = None

    def __post_init__(self):
        require_nested_keys("Episodes", done_key=self.done_key, init_key=self.init_key)
        if self.traj_key is not None:
            require_nested_keys("Episodes", traj_key=self.traj_key)
        if self.num_streams is not None:
            require_integer("Episodes", "num_streams", self.num_streams)
            if self.num_streams > 1 and self.traj_key is None:
                raise ValueError(
                    f"Episodes(traj_key=None, num_streams={self.num_streams}): several streams in flat storage are "
                    "identified by trajectory ids; pass the name of their entry as traj_key=."
                )

    @property
    def requires_ids(self) -> bool:
        """Whether rows must have trajectory ids, because their entry was named."""
        return self.traj_key not in (None, Episodes.traj_key)


# streams in flat storage with trajectory ids, if their number was not passed
DEFAULT_STREAMS = 64


def require_episodes(owner: str, episodes: Episodes | None) -> Episodes:
    """``episodes``, or the default for None. TypeError if it is another object."""
    if episodes is None:
        return Episodes()
    if not isinstance(episodes, Episodes):
        raise TypeError(
            f"{owner}(episodes={episodes!r}): episodes must be an Episodes object, such as Episodes(num_streams=8)."
        )
    return episodes


def require_ids(owner: str, key: NestedKey | None, ids: Tensor) -> None:
    """Raise TypeError unless trajectory ids are integers."""
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(
            f"{owner}: the entry {key!r} must hold integers, from the first write on, not {ids.dtype}; pass the entry "
            "with trajectory ids: episodes=Episodes(traj_key=...), or traj_key=None for one stream."
        )


# Attribute of a storage: the number of rows that may still be compared, and of pairs of rows that were equal and that
# differed. Parts of one buffer share it, so there is one warning.
_ATTRIBUTE = "_compared_rows"
_ROWS, _PAIRS = 512, 16
# entries of both a state and the next one that do not identify it
_FLAGS = {"done", "terminated", "truncated", "reward", "is_init", "step_count"}
# with it, the next observation is that after several steps
_N_STEP = "steps_to_next_obs"


def check_streams(
    storage: Storage | None,
    slots: Tensor,
    done_key: NestedKey,
    traj_key: NestedKey | None,
    *,
    number: Tensor | None = None,
) -> None:
    """Warn once per storage if most rows do not go on with the row before, as steps of one environment do.

    In the first writes, the next observation of a row is compared with the observation of the row after it in the ring,
    unless the episode ended or the trajectory ids differ. They differ if several environments write in turn and the
    data has no trajectory ids. Nothing is checked in graphs.

    Args:
        storage: the storage, which holds the rows.
        slots: int64 [n], the rows of a write, in the order of writing.
        done_key: entry that marks the end of an episode.
        traj_key: entry with trajectory ids, if stored; None: there is none.
        number: number of the row in each slot, in the order of writing, if slots that follow each other may hold rows
            of other times. Default: None.
    """
    # first, so that graphs do not depend on the counts
    if is_traced():
        return
    left, same, different = vars(storage).get(_ATTRIBUTE, (_ROWS, 0, 0)) if storage is not None else (0, 0, 0)
    if not left:
        return
    slots = slots[:left]
    if number is not None:
        slots = slots[number[slots] - number[slots - 1] == 1]
    goes_on = _compare(storage, slots, done_key, traj_key)
    if goes_on is not None:
        same, different = same + goes_on.count(True), different + goes_on.count(False)
    left = 0 if goes_on is None or same + different >= _PAIRS else left - len(slots)
    vars(storage)[_ATTRIBUTE] = left, same, different
    if same + different >= _PAIRS and different > same:
        warnings.warn(
            'Most rows do not go on with the row before: ("next", "observation") of a row is not "observation" of the '
            "next one. If several environments write to this buffer, their steps are mixed. Store trajectory ids, "
            "which collectors write to ('collector', 'traj_ids'), and pass episodes=Episodes(num_streams=<number of "
            "environments>) if there are more than 64; or use a storage with a column for each environment (ndim=2). "
            "If each row follows the one before, ignore this warning.",
            stacklevel=2,
        )


def _compare(storage: Any, slots: Tensor, done_key: NestedKey, traj_key: NestedKey | None) -> list[bool] | None:
    """Whether rows go on with those before them; only of rows that are taken for consecutive steps.

    None if the stored entries do not tell.
    """
    known = _torchrl.shape_and_device(storage)
    if known is None or not is_tensor_collection(_torchrl.stored_data(storage)):
        return None
    shape, device = known
    # the step before those of the first step is unknown
    width = math.prod(shape[1:])
    slots = to_device(slots[slots >= width], device)
    if not len(slots):
        return []
    before, after = (storage.get(unravel(each, shape)) for each in (slots - width, slots))
    done, pair = before.get(done_key, None), next(_observations(before, after), None)
    if done is None or pair is None or _has_several_steps(before):
        return None
    goes_on = ~done.reshape(len(slots), -1).to(torch.bool).any(1)
    ids = None if traj_key is None else before.get(traj_key, None)
    if ids is not None:
        goes_on &= (ids == after.get(traj_key)).reshape(len(slots), -1).all(1)
    first, second = pair
    # NaN is equal to NaN
    is_same = ((first == second) | ((first != first) & (second != second))).reshape(len(slots), -1).all(1)
    return is_same[goes_on].tolist()


def _observations(before: TensorDictBase, after: TensorDictBase) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of the next state of one row and the state of the other, for each entry that both have."""
    # agents with different shapes are separate entries
    old, new = _torchrl.saved_columns(before), _torchrl.saved_columns(after)
    for path in sorted(new, key=lambda path: path[-1] != "observation"):
        first, second = old.get(("next", *path)), new[path]
        if first is None or path[-1] in _FLAGS:
            continue
        if (first.shape, first.dtype) == (second.shape, second.dtype):
            yield first, second


def _has_several_steps(rows: TensorDictBase) -> bool:
    return any(path[-1] == _N_STEP for path in _torchrl.saved_columns(rows))


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
        # see kernels.layouts
        self._state = torch.zeros(4, self.num_lanes, dtype=torch.int64, device="cpu")
        # number of episodes that were interrupted by a row that is not marked as the first of its episode
        self.interrupted = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._result = torch.zeros(2, dtype=torch.int64, device="cpu")
        nothing = (torch.empty(0, dtype=kind, device="cpu") for kind in (torch.int64, torch.bool))
        self._views = Views(self._state, self.interrupted, self._result, *nothing)
        self._warned = False
        self.clear_()

    def run_write(self, kernel: Kernel, slots: Tensor, marks: EpisodeMarks, *arguments: Any) -> None:
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
                self.run_write(kernel, slots, marks, *arguments)

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

    def tensors(self) -> dict[str, Tensor]:
        """The state by name."""
        return {"lanes": self._state, "interrupted": self.interrupted}

    def clear_(self) -> None:
        """Forget all trajectories."""
        self._state.zero_()
        self._state[TRAJECTORY].fill_(NO_ID)
        self._state[CHAIN].fill_(NO_ID)
        self.interrupted.zero_()
