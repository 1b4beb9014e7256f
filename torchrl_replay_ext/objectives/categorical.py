"""Discrete actions: their encodings, log-probabilities from logits or probabilities, and the values of all actions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from torch import Tensor, nn

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if
from torchrl_replay_ext.objectives.trajectory import WRITTEN_BY_POLICY, Trajectories


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
    """V = Σ_a π(a) Q(a), [..., 1], of log-probabilities and values [..., A] of :func:`of_all_actions`."""
    return (log_pi.exp() * q).sum(-1, keepdim=True)


def of_all_actions(owner: str, shape: torch.Size, log_pi: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    r"""The log π and Q of all actions, [\*B, T, A] each; Q is 0 where it is not finite and π is 0.

    Raises:
        ValueError: if the shapes differ, or are not those of one action per step of the batch ``shape`` [\*B, T].
    """
    if log_pi is None or log_pi.shape != q.shape or q.shape[:-1] != shape:
        found = None if log_pi is None else tuple(log_pi.shape)
        raise ValueError(
            f"{owner}: the logits of the policy have shape {found} and the action values shape {tuple(q.shape)}, "
            f"expected {(*shape, 'A')} for both: one categorical distribution per step, and one value for each of its "
            "actions. For several agents, give the batch one row per agent and trajectory."
        )
    # x − x is NaN unless x is finite
    return log_pi, q.masked_fill((log_pi == -math.inf) & (q - q).isnan(), 0.0)


def evaluate_rows(
    rows: Trajectories,
    states: tuple[TensorDictBase, TensorDictBase],
    networks: Iterable[nn.Module],
    evaluate: Callable[[TensorDictBase], tuple[Tensor, Tensor]],
    *,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Log-probabilities and values of all actions in x_t, [\*B, T, A] each, and V(x_{t+1}), [\*B, T, 1], detached.

    Args:
        rows: the batch.
        states: the inputs of the networks for x_t and for x_{t+1}, see :meth:`Trajectories.states`.
        networks: the networks.
        evaluate: maps inputs of the networks to log-probabilities and values of all actions, [\*B, T, A] each.
        shifted: True: V(x_{t+1}) is that of the next step of the row, see :meth:`Trajectories.separate_states`.
    """
    if not shifted:
        log_pi, q = evaluate(states[0])
        with torch.no_grad():
            return log_pi, q, expectation(*evaluate(states[1]))
    separate, next_value = rows.separate_states(states, networks)
    # one pass for both
    both: Any = torch.cat([states[0], separate], rows.time_dim)
    parts = [x.split([rows.shape[rows.time_dim], 1], rows.time_dim) for x in evaluate(both)]
    (log_pi, q), of_separate = zip(*parts, strict=True)
    with torch.no_grad():
        return log_pi, q, next_value(expectation(log_pi, q), expectation(*of_separate))


def action_index(rows: Trajectories, key: NestedKey, num_actions: int) -> Tensor:
    r"""The indices of the actions taken, int64 [\*B, T, 1]; 0 in excluded steps.

    Args:
        rows: the batch.
        key: the entry of the actions: indices [\*B, T] or [\*B, T, 1], or one-hot actions [\*B, T, A].
        num_actions: the number of actions A.

    Raises:
        ValueError: if shape, dtype or values fit neither encoding. Values are not checked in a compiled graph.
    """
    action, shape = rows.data.get(key), rows.shape
    is_index = not action.is_floating_point() and action.dtype != torch.bool
    if action.shape == (*shape, num_actions) and (num_actions > 1 or not is_index):
        index = action.to(torch.int64).argmax(-1, keepdim=True)
        wrong = ((action != 0).sum(-1, keepdim=True) != 1) | (action.sum(-1, keepdim=True) != 1)
        problem = "has the shape of one-hot actions, but is not one-hot"
    elif action.shape in (shape, (*shape, 1)) and is_index:
        index = action.reshape(*shape, 1).to(torch.int64)
        wrong = (index < 0) | (index >= num_actions)
        problem = f"holds indices that are not in [0, {num_actions})"
    else:
        raise ValueError(
            f"{rows.owner}: {key!r} has shape {tuple(action.shape)} and dtype {action.dtype}, expected indices "
            f"{tuple(shape)} or one-hot {(*shape, num_actions)}; {WRITTEN_BY_POLICY}."
        )
    wrong = rows.fill(wrong)
    raise_if(wrong.any, lambda: ValueError(f"{rows.owner}: {key!r} {problem}; {WRITTEN_BY_POLICY}."))
    return rows.fill(index)
