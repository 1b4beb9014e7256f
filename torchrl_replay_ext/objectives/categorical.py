"""Discrete actions: index and one-hot encodings, and log-probabilities from stored logits or probabilities."""

from __future__ import annotations

import math

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if


def is_probability(key: NestedKey) -> bool:
    """True if the name in ``key`` says that the entry holds probabilities."""
    name = key_path(key)[-1]
    return name.endswith("probs") and not name.endswith("log_probs")


def log_probabilities(value: Tensor, key: NestedKey) -> Tensor:
    """Log-probabilities [..., A] from probabilities if the name in ``key`` ends with "probs", else from logits."""
    if is_probability(key):
        value = value / value.sum(-1, keepdim=True)
        possible = value > 0
        # log(1) in place of log(0), whose derivative would make gradients NaN, even if the result is masked
        return torch.where(possible, value, torch.ones_like(value)).log().masked_fill(~possible, -math.inf)
    return value.log_softmax(-1)


def expectation(log_pi: Tensor, q: Tensor) -> Tensor:
    """V = Σ_a π(a) Q(a), [..., 1], of log-probabilities and values [..., A].

    The value of an action with probability 0 may be infinite.
    """
    return (log_pi.exp() * q.masked_fill(log_pi == -math.inf, 0.0)).sum(-1, keepdim=True)


def action_index(
    action: Tensor,
    batch_size: torch.Size,
    num_actions: int,
    *,
    name: str,
    key: NestedKey,
    valid: Tensor | None = None,
) -> Tensor:
    r"""Convert actions to indices, int64 [\*B, 1].

    Args:
        action: indices [\*B] or [\*B, 1], or one-hot actions [\*B, A].
        batch_size: the batch size B.
        num_actions: the number of actions A.
        name: the class that error messages name.
        key: the entry that error messages name.
        valid: bool [\*B]. Where it is False, ``action`` may hold any value and the result is 0. Default: None, all
            True.

    Raises:
        ValueError: if shape, dtype or values fit neither encoding. Values are not checked in a compiled graph.
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
            f"{tuple(batch_size)} or one-hot {(*batch_size, num_actions)}; the policy that acted writes it."
        )
    if valid is not None:
        padding = ~valid.unsqueeze(-1)
        index, wrong = index.masked_fill(padding, 0), wrong.masked_fill(padding, False)
    raise_if(
        wrong.any,
        lambda: ValueError(f"{name}: {key!r} {problem}; the policy that acted writes it, and the collector stores it."),
    )
    return index
