"""Ends the open episodes of a buffer whose environments do not continue them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import NestedKey
from torchrl.data import TensorDictReplayBuffer

from torchrl_replay_ext.core.event_spec import DEFAULT
from torchrl_replay_ext.writers.event_table import EventTableWriter


def stored_slots(buffer: TensorDictReplayBuffer) -> torch.Tensor:
    """The slots of all stored transitions, or with event tables of those in the default table; oldest first."""
    if isinstance(buffer.writer, EventTableWriter):
        return buffer.writer.tables[DEFAULT].index()
    length = len(buffer)
    return (buffer.write_count - length + torch.arange(length)) % buffer.storage.max_size


def truncate_at(
    buffer: TensorDictReplayBuffer, slots: torch.Tensor, done_key: tuple[str, ...], flags: Iterable[NestedKey]
) -> None:
    """Truncate episodes that have not ended at their newest transitions.

    Stored transitions must not be changed without the sampler. Therefore copies that are marked as truncated are
    written. Their event flags are cleared. An event that is a condition on entries also holds for the copy, which then
    enters the event's table next to the original.

    Args:
        buffer: the buffer, with flat storage.
        slots: slots of the newest transitions, int64 [n].
        done_key: entry that marks the end of an episode. ``"truncated"`` beside it is set too, if it is stored.
        flags: entries that flag events; those that are not stored are skipped.
    """
    if not len(slots):
        return
    rows = buffer[slots].exclude("index")
    for key in (done_key, (*done_key[:-1], "truncated")):
        if (column := rows.get(key, None)) is not None:
            rows[key] = torch.ones_like(column)
    for key in flags:
        if (column := rows.get(key, None)) is not None:
            rows[key] = torch.zeros_like(column)
    buffer.extend(rows)
