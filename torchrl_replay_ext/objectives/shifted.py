"""Values of next states, taken from the values of the states in the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if, values_can_be_read
from torchrl_replay_ext.objectives.categorical import expectation
from torchrl_replay_ext.objectives.trajectory import Trajectories

# Maps inputs of the networks to log-probabilities and values of all actions, [*B, T, A] each.
Evaluate = Callable[[TensorDictBase], tuple[Tensor, Tensor]]


class ShiftedStates:
    r"""Finds the next states of a batch [\*B, T] that are not states of the batch.

    x_{t+1} is the state of the next step of the row, unless an episode or a slice ends with step t. Networks must then
    also evaluate one next state per row: that of the first step that ends without a termination.

    Args:
        rows: the batch.
        state: the inputs of the networks for x_t, [\*B, T], see :meth:`Trajectories.states`.
        following: their inputs for x_{t+1}.
        networks: the networks that evaluate next states.

    Raises:
        ValueError: if a network is recurrent, that is, a module of TorchRL or torch, or one that reads "is_init"; or if
            a row has other next states. In a graph and on an accelerator, their values are NaN instead.
    """

    def __init__(
        self, rows: Trajectories, state: TensorDictBase, following: TensorDictBase, networks: Iterable[nn.Module]
    ):
        kinds = {type(module) for network in networks for module in network.modules()}
        recurrent = any(issubclass(kind, nn.RNNBase) or hasattr(kind, "recurrent_mode") for kind in kinds)
        keys = list(state.keys(include_nested=True, leaves_only=True))
        if recurrent or any(key_path(key)[-1] == "is_init" for key in keys):
            raise ValueError(
                f"{rows.owner}(shifted=True): a recurrent network does not evaluate each state on its own; use "
                "shifted=False."
            )
        self._state, self._following = state, following
        done, terminated = rows.done.squeeze(-1), rows.terminated.squeeze(-1)
        dim, self._length = rows.time_dim, done.shape[rows.time_dim]
        self._dim = dim
        step = torch.arange(self._length, device=done.device).reshape(-1, *(1,) * (done.ndim - 1 - dim))
        last = step == self._length - 1
        separate = (done | last) & ~terminated
        self._separate = separate if rows.valid is None else separate & rows.valid
        # the last step if there is no such step
        self._at = torch.where(self._separate, step, self._length - 1).amin(dim, keepdim=True)
        goes_on = ~(done | last)
        differs = torch.zeros_like(goes_on)
        for key in keys:
            differs = differs | _differs(following.get(key), state.get(key).roll(-1, dim), goes_on)
        self._missing = missing = differs | (self._separate & (step > self._at))
        raise_if(
            missing.any,
            lambda: ValueError(
                f"{rows.owner}(shifted=True): the next states of {int(missing.sum())} steps are neither the state of "
                "the next step of the row nor the first one of the row after an end without termination. shifted=True "
                "is for slices drawn by TrajectoryRetraceSampler, one per row; use shifted=False for other batches, "
                "such as those of newest()."
            ),
            skip_on=done,
        )

    @property
    def separate(self) -> TensorDictBase:
        r"""The next state of each row that is not a state of the batch, [\*B, T] with T = 1.

        In a row without such a state, it is any state.
        """
        shape = [*self._state.batch_size]
        shape[self._dim] = 1
        content = {}
        for key, value in self._following.items(include_nested=True, leaves_only=True):
            content[key] = value.gather(self._dim, expand_as_right(self._at, value.narrow(self._dim, 0, 1)))
        return TensorDict(content, shape)

    @property
    def all(self) -> Any:
        r"""The states of the batch and those of :attr:`separate`, [\*B, T + 1]."""
        return torch.cat([self._state, self.separate], self._dim)

    def next_value(self, value: Tensor) -> Tensor:
        r"""V(x_{t+1}), [\*B, T, 1], from the values of the states of :attr:`all`, [\*B, T + 1, 1]."""
        shifted, separate = value.narrow(self._dim, 1, self._length), value.narrow(self._dim, self._length, 1)
        result = torch.where(self._separate.unsqueeze(-1), separate, shifted)
        return result.masked_fill(self._missing.unsqueeze(-1), torch.nan)


def evaluate_rows(
    rows: Trajectories,
    states: tuple[TensorDictBase, TensorDictBase],
    networks: Iterable[nn.Module],
    evaluate: Evaluate,
    *,
    shifted: bool,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Log-probabilities and values of all actions in x_t, [\*B, T, A] each, and V(x_{t+1}), [\*B, T, 1].

    Args:
        rows: the batch.
        states: the inputs of the networks for x_t and for x_{t+1}, see :meth:`Trajectories.states`.
        networks: the networks.
        evaluate: runs the networks.
        shifted: True: V(x_{t+1}) is that of the next step of the row, see :class:`ShiftedStates`.
        differentiable: whether gradients flow through V(x_{t+1}). Default: False.
    """
    if shifted:
        shift = ShiftedStates(rows, *states, networks)
        log_pi, q = evaluate(shift.all)
        next_value = shift.next_value(expectation(log_pi, q))
        log_pi, q = (x.narrow(rows.time_dim, 0, x.shape[rows.time_dim] - 1) for x in (log_pi, q))
    else:
        log_pi, q = evaluate(states[0])
        with torch.set_grad_enabled(differentiable):
            next_value = expectation(*evaluate(states[1]))
    return log_pi, q, next_value if differentiable else next_value.detach()


def _differs(first: Tensor, second: Tensor, where: Tensor) -> Tensor:
    """True where two states [*B, T, ...] differ by more than rounding and ``where`` [*B, T] is True."""

    def any_of_state(flags: Tensor) -> Tensor:
        return where & (flags.flatten(where.ndim).any(-1) if flags.ndim > where.ndim else flags)

    flags = first != second
    result = any_of_state(flags)
    if not first.is_floating_point() or (values_can_be_read(first) and not result.any()):
        return result
    # a transform that was applied to both may have rounded differently
    tolerance = torch.finfo(first.dtype).eps ** 0.5
    return any_of_state(flags & ~((first - second).abs() <= tolerance * (1 + second.abs())))
