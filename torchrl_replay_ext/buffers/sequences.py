"""Windows of consecutive steps, in graphs too."""

from __future__ import annotations

import math
from typing import Any

import torch
from tensordict import is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import Sequence

from torchrl_replay_ext._torchrl import next_step, shape_and_device, stored_data
from torchrl_replay_ext.compilation import gather_in_bounds, where_int64
from torchrl_replay_ext.core.layout import row_major

_OWNER = "CompilableReplayBuffer(sample_unit=Sequence(...))"


class CompilableSequence(Sequence):
    """TorchRL's :class:`~torchrl.data.Sequence` with the same windows, without reads of values.

    It works in graphs, and on an accelerator the host does not wait. It reads the end flags of the steps that a window
    can reach. TorchRL searches the whole storage after each write.

    Args:
        unit: the windows.
    """

    def __init__(self, unit: Sequence):
        vars(self).update(vars(unit))

    def expand(self, index: Any, info: dict[str, Any], storage: Any) -> tuple[Any, dict[str, Any]]:
        """Index and info of the windows around the drawn slots; see :class:`torchrl.data.Sequence`."""
        known = shape_and_device(storage)
        assert known is not None, "a draw from an empty buffer is an error"
        (steps, *columns), _ = known
        anchor = torch.stack(index, -1) if isinstance(index, tuple) else index.unsqueeze(1)
        column = row_major(anchor[:, 1:], (*columns,)) if columns else torch.zeros_like(anchor[:, 0])
        time, ahead = anchor[:, 0], self.dilation * (self.length + self.bootstrap - 1)
        forward, backward = _to_ends_of_ring(storage, time, steps, math.prod(columns))
        shifts = self.episode_boundary == "stop"
        reach_back = self.dilation * self.burn_in + ahead * shifts
        stops = self.done_key is not None and self.episode_boundary != "include_reset"
        if stops and reach_back + ahead:
            reach = torch.arange(-reach_back, ahead, device=time.device)
            near = (time.unsqueeze(1) + reach) % steps
            ends = self._ends(storage, near * math.prod(columns) + column.unsqueeze(1))
            forward = torch.minimum(forward, _first(ends[:, reach_back:]))
            backward = torch.minimum(backward, _first(ends[:, :reach_back].flip(1)))
        if shifts:
            shift = torch.minimum((ahead - forward).clamp_min(0), backward)
            time, forward, backward = time - shift, forward + shift, backward - shift
        rows = self.burn_in + self.length + self.bootstrap
        place = torch.arange(rows, device=time.device)
        wanted = ((place - self.burn_in) * self.dilation).expand(len(time), rows)
        offset = torch.maximum(torch.minimum(wanted, forward.unsqueeze(1)), -backward.unsqueeze(1))
        learning = (place >= self.burn_in) & (place < self.burn_in + self.length)
        given = {key: value.repeat_interleave(rows, 0) if value.ndim else value for key, value in info.items()}
        info = {
            **given,
            "sequence_id": torch.arange(len(time), device=time.device).repeat_interleave(rows),
            "step_in_sequence": place.repeat(len(time)),
            "learning_mask": learning.repeat(len(time)),
            "anchor_index": (anchor if columns else anchor.squeeze(1)).repeat_interleave(rows, 0),
            "validity_mask": (offset == wanted).flatten(),
        }
        slots = ((time.unsqueeze(1) + offset) % steps).flatten()
        if not columns:
            return slots, info
        return (slots, *(part.repeat_interleave(rows) for part in anchor[:, 1:].unbind(1))), info

    def _ends(self, storage: Any, slots: Tensor) -> Tensor:
        """Whether an episode ends in each of ``slots`` [n, k], bool [n, k]."""
        data = stored_data(storage)
        flags = data.get(self.done_key, None) if is_tensor_collection(data) else None
        if flags is None:
            raise KeyError(f"{_OWNER}: the stored data has no entry {self.done_key!r}, which marks ends of episodes.")
        flags = flags.flatten(0, storage.ndim - 1)
        return gather_in_bounds(flags, slots).to(torch.bool).reshape(*slots.shape, -1).any(-1)


def _first(mask: Tensor) -> Tensor:
    """The place of the first True of each row of ``mask`` [n, k], k if there is none; int64 [n]."""
    return (mask.cumsum(1) == 0).sum(1)


def _to_ends_of_ring(storage: Any, time: Tensor, steps: int, columns: int) -> tuple[Tensor, Tensor]:
    """The number of steps from ``time`` [n] to the newest and to the oldest stored step, int64 [n] each."""
    following: Any = next_step(storage)
    written = storage.num_rows // columns
    oldest = where_int64(written >= steps, torch.zeros_like(written) + following, torch.zeros_like(written))
    newest = oldest + written - 1
    return (newest - time) % steps, (time - oldest) % steps
