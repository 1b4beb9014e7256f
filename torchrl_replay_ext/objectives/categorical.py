"""Actions of which there is a finite number: their encodings, and the probabilities stored with them."""

from __future__ import annotations

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.tracing import is_traced


def log_probabilities(value: Tensor, key: NestedKey) -> Tensor:
    """Log-probabilities from logits, or from probabilities if the entry's name says so."""
    name = str(key if isinstance(key, str) else key[-1])
    if name.endswith("probs") and not name.endswith("log_probs"):
        return (value / value.sum(-1, keepdim=True)).log()
    return value.log_softmax(-1)


def action_index(action: Tensor, batch_size: torch.Size, num_actions: int, *, name: str, key: NestedKey) -> Tensor:
    r"""The actions as indices, int64 [\*B, 1]; from indices [\*B] or [\*B, 1], or one-hot [\*B, A].

    Raises:
        ValueError: if they are neither, by shape and dtype or (not in a graph) by value.
    """
    is_index = not action.is_floating_point() and action.dtype != torch.bool
    if action.shape == (*batch_size, num_actions) and (num_actions > 1 or not is_index):
        if not is_traced() and not bool(((action != 0).sum(-1) == 1).all() & (action.sum(-1) == 1).all()):
            raise ValueError(f"{name}: {key!r} has the shape of one-hot actions, but is not one-hot.")
        return action.to(torch.int64).argmax(-1, keepdim=True)
    if action.shape not in (batch_size, (*batch_size, 1)) or not is_index:
        raise ValueError(
            f"{name}: {key!r} has shape {tuple(action.shape)} and dtype {action.dtype}, expected indices "
            f"{tuple(batch_size)} or one-hot {(*batch_size, num_actions)}, as the policy that acted wrote them."
        )
    index = action.reshape(*batch_size, 1).to(torch.int64)
    if not is_traced() and not bool(((index >= 0) & (index < num_actions)).all()):
        raise ValueError(f"{name}: {key!r} holds indices that are not in [0, {num_actions}).")
    return index
