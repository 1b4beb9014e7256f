"""Reads the first and last transitions of episodes from the rows of a write."""

from __future__ import annotations

import torch
from tensordict import NestedKey

from torchrl_replay_ext.core.lanes import EpisodeMarks
from torchrl_replay_ext.distributions.protocol import RowView


class EpisodeReader:
    """Reads the ends of episodes, the trajectory ids and the first transitions of episodes.

    Args:
        done_key: entry that marks the end of an episode, bool.
        traj_key: entry with trajectory ids, int64; used if present.
        init_key: entry that marks the first transition of an episode, bool; used if present.
    """

    def __init__(self, *, done_key: NestedKey, traj_key: NestedKey, init_key: NestedKey):
        self._done_key, self._traj_key, self._init_key = done_key, traj_key, init_key

    def read(self, rows: RowView, *, needs_ids: bool) -> EpisodeMarks:
        """Read the entries of ``rows``.

        Raises:
            KeyError: if the end of episodes is not stored, or trajectory ids are not stored although ``needs_ids``.
        """
        why = "which collectors write to identify trajectories; pass its name as traj_key=, or use num_streams=1."
        ended = rows.column(self._done_key, "which the environment writes; pass its name as done_key=.")
        trajectory = rows.column(self._traj_key, why if needs_ids else None)
        initial = rows.column(self._init_key)
        assert ended is not None
        return EpisodeMarks(
            ended.to(torch.bool),
            None if trajectory is None else trajectory.to(torch.int64),
            None if initial is None else initial.to(torch.bool),
        )
