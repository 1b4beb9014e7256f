"""Where episodes begin and end among the rows of a write."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.distributions.protocol import RowView


class EpisodeReader:
    """Reads where episodes end and which trajectory a transition belongs to.

    Args:
        done_key: where the end of an episode is marked, bool.
        traj_key: where trajectory ids are stored, int64; used if present.
        init_key: where the first transition of an episode is marked, bool; used if present.
    """

    def __init__(self, *, done_key: NestedKey, traj_key: NestedKey, init_key: NestedKey):
        self._done_key, self._traj_key, self._init_key = done_key, traj_key, init_key

    def read(self, rows: RowView, *, needs_ids: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Of each row: whether an episode ends, the trajectory id, whether an episode begins; None if not stored.

        Raises:
            KeyError: if there is no end, or no id where ids are needed.
        """
        why = (
            "by which a collector tells trajectories apart; pass its name as traj_key=, or store one environment only."
        )
        ended = rows.column(self._done_key, "which the environment writes; pass its name as done_key=.")
        trajectory = rows.column(self._traj_key, why if needs_ids else None)
        initial = rows.column(self._init_key)
        assert ended is not None
        return (
            ended.to(torch.bool),
            None if trajectory is None else trajectory.to(torch.int64),
            None if initial is None else initial.to(torch.bool),
        )
