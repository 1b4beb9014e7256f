"""``Episodes``: how users say by which entries the rows of a buffer are divided into episodes."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from tensordict import NestedKey

from torchrl_replay_ext.arguments import require_integer, require_nested_keys


@dataclass(frozen=True)
class Episodes:
    """How the rows of a buffer are divided into episodes; pass one object to all parts of a buffer, if they need it.

    :class:`~torchrl_replay_ext.ReaPERSampler`, :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`,
    :class:`~torchrl_replay_ext.EventTableWriter` and :class:`~torchrl_replay_ext.FrameStackStorage` take it as
    ``episodes=``. The defaults fit data of TorchRL's collectors. In a storage with ``ndim`` >= 2, each column is a
    stream, the steps of one environment one after the other. In flat storage, trajectory ids identify the streams; rows
    without ids are one stream.

    Args:
        traj_key: entry with trajectory ids, int64; used if present. None: ids are not read. Default: ``("collector",
            "traj_ids")``, which TorchRL's collectors write.
        done_key: entry that marks the end of an episode by termination or truncation, bool. Default: ``("next",
            "done")``.
        init_key: entry that marks the first transition of an episode, bool; used if present. Default: ``"is_init"``,
            which TorchRL's ``InitTracker`` writes.
        num_streams: number of environments whose transitions are interleaved in flat storage. More unfinished
            trajectories than that are an error. Default: None: if the first write has trajectory ids, the number of
            its unfinished trajectories, at least 16 and at most 64 (frame stacks: always 64), else 1.
            :class:`~torchrl_replay_ext.EventTableWriter` needs no number.

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


def require_episodes(owner: str, episodes: Episodes | None) -> Episodes:
    """``episodes``, or the default for None. TypeError if it is another object."""
    if episodes is None:
        return Episodes()
    if not isinstance(episodes, Episodes):
        raise TypeError(
            f"{owner}(episodes={episodes!r}): episodes must be an Episodes object, such as Episodes(num_streams=8)."
        )
    return episodes
