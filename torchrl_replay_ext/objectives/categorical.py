"""Actions of which there is a finite number: their encodings, and the probabilities stored with them."""

from __future__ import annotations

import math

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.compilation import raise_if


def log_probabilities(value: Tensor, key: NestedKey) -> Tensor:
    """Log-probabilities from logits, or from probabilities if the entry's name says so."""
    name = str(key if isinstance(key, str) else key[-1])
    if name.endswith("probs") and not name.endswith("log_probs"):
        value = value / value.sum(-1, keepdim=True)
        possible = value > 0
        # the derivative of log(0) is no number, also where nothing depends on it
        return torch.where(possible, value, torch.ones_like(value)).log().masked_fill(~possible, -math.inf)
    return value.log_softmax(-1)


def action_index(
    action: Tensor,
    batch_size: torch.Size,
    num_actions: int,
    *,
    name: str,
    key: NestedKey,
    valid: Tensor | None = None,
) -> Tensor:
    r"""The actions as indices, int64 [\*B, 1]; from indices [\*B] or [\*B, 1], or one-hot [\*B, A].

    Where they are not ``valid`` [\*B], anything may be given, and 0 is returned.

    Raises:
        ValueError: if they are neither, by shape and dtype or (not in a graph) by value.
    """
    is_index = not action.is_floating_point() and action.dtype != torch.bool
    if action.shape == (*batch_size, num_actions) and (num_actions > 1 or not is_index):
        index = action.to(torch.int64).argmax(-1, keepdim=True)
        wrong = ((action != 0).sum(-1, keepdim=True) != 1) | (action.sum(-1, keepdim=True) != 1)
        problem = "has the shape of one-hot actions, but is not one-hot"
    elif action.shape in (batch_size, (*batch_size, 1)) and is_index:
        index = action.reshape(*batch_size, 1).to(torch.int64)
        wrong = (index < 0) | (index >= num_actions)
        problem = f"holds indices that are not in [0, {num_actions})"
    else:
        raise ValueError(
            f"{name}: {key!r} has shape {tuple(action.shape)} and dtype {action.dtype}, expected indices "
            f"{tuple(batch_size)} or one-hot {(*batch_size, num_actions)}, as the policy that acted wrote them."
        )
    if valid is not None:
        padding = ~valid.unsqueeze(-1)
        index, wrong = index.masked_fill(padding, 0), wrong.masked_fill(padding, False)
    raise_if(
        wrong.any,
        lambda: ValueError(f"{name}: {key!r} {problem}; the collector stores what the policy that acted chose."),
    )
    return index
