"""Reads where events occur in the rows of a write, and which rows begin and end episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.compilation import to_host
from torchrl_replay_ext.core.event_spec import EventSpec, StatefulCondition
from torchrl_replay_ext.core.streams import Episodes, require_ids


class EventRows(NamedTuple):
    """The rows of a write.

    Args:
        stream: stream of each row, int64 [n].
        trajectory: trajectory id, int64 [n]; -1 if unknown.
        ends: True if the row is the last of an episode, bool [n].
        begins: True if the row is marked as the first of an episode, bool [n].
        occurred: True if an event occurs in a row, bool [n, events].
    """

    stream: np.ndarray
    trajectory: np.ndarray
    ends: np.ndarray
    begins: np.ndarray
    occurred: np.ndarray


def _on_cpu(columns: list[Tensor]) -> list[np.ndarray]:
    """``columns`` of n bools or integers as arrays [n]; the host waits at most once for an accelerator."""
    columns = to_host(*(column.detach() for column in columns))
    # NumPy has no bfloat16
    columns = [column.float() if column.dtype == torch.bfloat16 else column for column in columns]
    return [column.numpy().reshape(-1) for column in columns]


class EventReader:
    """Reads rows and the events in them.

    Args:
        specs: the events.
        episodes: how rows are divided into episodes.
    """

    def __init__(self, specs: Sequence[EventSpec], episodes: Episodes):
        self._specs = specs
        self._keys = [key for key in (episodes.done_key, episodes.init_key, episodes.traj_key) if key is not None]
        self._optional = episodes.init_key, None if episodes.requires_ids else episodes.traj_key
        # numbers of the events that depend on the transitions written before, and of those without earlier steps
        self._stateful = [k for k, spec in enumerate(specs) if isinstance(spec.condition, StatefulCondition)]
        self._simple = [k for k, spec in enumerate(specs) if not spec.context and k not in self._stateful]

    def read(self, data: TensorDictBase, streams: int | None) -> EventRows:
        """The rows of ``data`` [n], and where the events occur that are a function of a row.

        Args:
            data: the rows, [n].
            streams: number of columns of the storage, each a stream; None: trajectory ids are the streams.
        """
        count, specs = data.shape[0], self._specs
        done, init, *ids_if_any = entries = _torchrl.entries_of(data, self._keys)
        for key, column in zip(self._keys, entries, strict=True):
            if column is None and key not in self._optional:
                raise KeyError(
                    f"EventTableWriter: the data has no entry {key!r}; pass the name of the right entry as "
                    "episodes=Episodes(...), or let the environment or collector write it."
                )
            if column is not None and column.numel() != count:
                raise ValueError(
                    f"EventTableWriter: the entry {key!r} has shape {tuple(column.shape)} for {count} transitions; "
                    "one value per transition is needed."
                )
        ids = ids_if_any[0] if ids_if_any else None
        if ids is not None:
            require_ids("EventTableWriter", self._keys[-1], ids)
        columns = [specs[number].signal(data) for number in self._simple]
        # NumPy has no bfloat16
        flags = (flag != 0 if flag.is_floating_point() else flag for flag in (done, init, ids) if flag is not None)
        values = _on_cpu([*columns, *flags])
        trajectory = np.full(count, -1) if ids is None else values.pop().astype(np.int64, copy=False)
        first = np.zeros(count, bool) if init is None else values.pop() != 0
        last = values.pop() != 0
        stream = trajectory if streams is None else np.arange(count) % streams
        rows = EventRows(stream, trajectory, last, first, np.zeros((count, len(specs)), bool))
        for number, column in zip(self._simple, values, strict=True):
            rows.occurred[:, number] = column
        return rows

    def read_stateful(self, data: TensorDictBase, rows: EventRows) -> None:
        """Set the columns of ``rows.occurred`` for Quantile and Novel, which remember the rows: call it last."""
        for number in self._stateful:
            rows.occurred[:, number] = self._specs[number].signal(data).numpy()
