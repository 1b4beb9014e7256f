"""Values of next states, taken from the values of the states in the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if, values_can_be_read
from torchrl_replay_ext.objectives.categorical import expectation
from torchrl_replay_ext.objectives.trajectory import Trajectories

# Maps inputs of the networks to log-probabilities and values of all actions, [*B, T, A] each.
Evaluate = Callable[[TensorDictBase], tuple[Tensor, Tensor]]


def separate_states(
    rows: Trajectories, states: tuple[TensorDictBase, TensorDictBase], networks: Iterable[nn.Module]
) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
    r"""The next states of a batch [\*B, T] that are not states of the batch.

    x_{t+1} is the state of the next step of the row, unless an episode or a slice ends with step t. Networks must then
    also evaluate one next state per row: that of the first step that ends without a termination.

    Args:
        rows: the batch.
        states: the inputs of the networks for x_t and for x_{t+1}, [\*B, T], see :meth:`Trajectories.states`.
        networks: the networks that evaluate next states.

    Returns:
        The inputs of the networks for one such state per row, [\*B, T] with T = 1; any state in a row without one. And
        a function that returns V(x_{t+1}), [\*B, T, 1], from V(x_t), [\*B, T, 1], and V of these states, [\*B, 1, 1].

    Raises:
        ValueError: if a network is recurrent, that is, a module of TorchRL or torch, or one that reads "is_init"; or if
            a row has other next states. In a graph and on an accelerator, their values are NaN instead.
    """
    state, following = states
    kinds = {type(module) for network in networks for module in network.modules()}
    recurrent = any(issubclass(kind, nn.RNNBase) or hasattr(kind, "recurrent_mode") for kind in kinds)
    keys = list(state.keys(include_nested=True, leaves_only=True))
    if recurrent or any(key_path(key)[-1] == "is_init" for key in keys):
        raise ValueError(
            f"{rows.owner}(shifted=True): a recurrent network does not evaluate each state on its own; use "
            "shifted=False."
        )
    last, dim = rows.last, rows.time_dim
    length = last.shape[dim]
    step = torch.arange(length, device=last.device).reshape(-1, *(1,) * (last.ndim - 1 - dim))
    is_separate = last & ~rows.terminated.squeeze(-1)
    if rows.valid is not None:
        is_separate = is_separate & rows.valid
    # the last step if there is no such step
    at = torch.where(is_separate, step, length - 1).amin(dim, keepdim=True)
    missing = is_separate & (step > at)
    for key in keys:
        missing = missing | _differs(following.get(key), state.get(key).roll(-1, dim), ~last)
    raise_if(
        missing.any,
        lambda: ValueError(
            f"{rows.owner}(shifted=True): the next states of {int(missing.sum())} steps are neither the state of "
            "the next step of the row nor the first one of the row after an end without termination. shifted=True "
            "is for slices drawn by TrajectoryRetraceSampler, one per row; use shifted=False for other batches, "
            "such as those of newest()."
        ),
        skip_on=missing,
    )

    def next_value(value: Tensor, of_separate: Tensor) -> Tensor:
        shifted = torch.cat([value.narrow(dim, 1, length - 1), of_separate], dim)
        result = torch.where(is_separate.unsqueeze(-1), of_separate, shifted)
        return result.masked_fill(missing.unsqueeze(-1), torch.nan)

    separate: Any = following.apply(
        lambda value: value.gather(dim, expand_as_right(at, value.narrow(dim, 0, 1))), batch_size=at.shape
    )
    return separate, next_value


def evaluate_rows(
    rows: Trajectories,
    states: tuple[TensorDictBase, TensorDictBase],
    networks: Iterable[nn.Module],
    evaluate: Evaluate,
    *,
    shifted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Log-probabilities and values of all actions in x_t, [\*B, T, A] each, and V(x_{t+1}), [\*B, T, 1], detached.

    Args:
        rows: the batch.
        states: the inputs of the networks for x_t and for x_{t+1}, see :meth:`Trajectories.states`.
        networks: the networks.
        evaluate: runs the networks.
        shifted: True: V(x_{t+1}) is that of the next step of the row, see :func:`separate_states`.
    """
    if not shifted:
        log_pi, q = evaluate(states[0])
        with torch.no_grad():
            return log_pi, q, expectation(*evaluate(states[1]))
    separate, next_value = separate_states(rows, states, networks)
    # one pass for both
    both: Any = torch.cat([states[0], separate], rows.time_dim)
    parts = [x.split([rows.shape[rows.time_dim], 1], rows.time_dim) for x in evaluate(both)]
    (log_pi, q), of_separate = zip(*parts, strict=True)
    with torch.no_grad():
        return log_pi, q, next_value(expectation(log_pi, q), expectation(*of_separate))


def _differs(first: Tensor, second: Tensor, where: Tensor) -> Tensor:
    """True where two states [*B, T, ...] differ by more than rounding and ``where`` [*B, T] is True."""

    def of_states(flags: Tensor) -> Tensor:
        return where & flags.unsqueeze(-1).flatten(where.ndim).any(-1)

    differs = of_states(first != second)
    if not first.is_floating_point() or (values_can_be_read(first) and not differs.any()):
        return differs
    # a transform that was applied to both may have rounded differently
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    return of_states(~torch.isclose(first, second, tolerance, tolerance))
