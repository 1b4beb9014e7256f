"""What samplers that need to know which transitions follow each other read at every write."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext.core.lanes import Lanes


class EpisodeReader:
    """Reads from a storage where episodes end and which trajectory a transition belongs to.

    Args:
        owner: the sampler, for messages.
        done_key: where the end of an episode is marked, bool.
        traj_key: where trajectory ids are stored, int64; used if present.
        init_key: where the first transition of an episode is marked, bool; used if present.
    """

    def __init__(self, owner: str, *, done_key: NestedKey, traj_key: NestedKey, init_key: NestedKey):
        self._owner = owner
        self._done_key, self._traj_key, self._init_key = done_key, traj_key, init_key

    def data(self, storage: Storage | None) -> Any:
        """The stored TensorDict."""
        data: Any = getattr(storage, "_storage", None)
        if not is_tensor_collection(data):
            raise TypeError(
                f"{self._owner}: TensorDicts in a tensor storage are needed, LazyTensorStorage for example."
            )
        return data

    def column(self, storage: Storage | None, key: NestedKey, num_slots: int, why: str | None = None) -> Tensor | None:
        """A column, flat; None if it is missing and no reason is given why it must be there."""
        column = self.data(storage).get(key, None)
        if column is None:
            if why is None:
                return None
            raise KeyError(f"{self._owner}: the stored data has no entry {key!r}, {why}")
        if column.numel() != num_slots:
            raise ValueError(
                f"{self._owner}: the entry {key!r} has shape {tuple(column.shape)}; one number per transition is "
                "needed."
            )
        return column.reshape(-1)

    def read(
        self, storage: Storage | None, slots: Tensor, num_slots: int, *, needs_ids: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of ``slots`` [n]: whether an episode ends, the trajectory id, whether an episode begins; None if not stored.

        Raises:
            KeyError: if there is no end, or no id where ids are needed.
        """
        why = (
            "by which a collector tells trajectories apart; pass its name as traj_key=, or store one environment only."
        )
        columns = (
            self.column(
                storage, self._done_key, num_slots, "which the environment writes; pass its name as done_key=."
            ),
            self.column(storage, self._traj_key, num_slots, why if needs_ids else None),
            self.column(storage, self._init_key, num_slots),
        )
        ended, trajectory, initial = (None if c is None else c.index_select(0, slots) for c in columns)
        assert ended is not None
        return (
            ended.to(torch.bool),
            None if trajectory is None else trajectory.to(torch.int64),
            None if initial is None else initial.to(torch.bool),
        )

    def require_in_turn(self, slots: Tensor, num_slots: int) -> None:
        """ValueError if ``slots`` [n] do not follow each other in the ring."""
        if not torch.equal(slots, (slots[0] + torch.arange(slots.shape[0], device=slots.device)) % num_slots):
            raise ValueError(f"{self._owner}: slots must be written in turn; use a round-robin writer, the default.")


def is_rewrite(slots: Tensor, stamp: Tensor, streams: Lanes, storage: Storage | None) -> bool:
    """Whether ``slots`` [n] are marked by ``rb.mark_update``, or written out of turn, not by the writer in turn."""
    if not bool((stamp.index_select(0, slots) > 0).all()):
        return False
    first, last = streams.step_of(slots[0]), streams.step_of(slots[-1])
    expected = streams.expected_step()
    # the storage knows where the writer has written last
    written = getattr(storage, "_last_cursor_index", None)
    if written is None or int(written) != last:
        return True
    return first != expected and (last + 1) % streams.steps == expected
