"""Values of next states, taken from the values of the states in the same rows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if, values_can_be_read


def require_shiftable(owner: str, networks: Iterable[nn.Module], keys: Iterable[NestedKey]) -> None:
    """Raise ValueError if a network is recurrent: a module of TorchRL or torch, or one that reads "is_init".

    Args:
        owner: the class named in errors.
        networks: the networks that evaluate next states.
        keys: the entries that they read.
    """
    kinds = {type(module) for network in networks for module in network.modules()}
    recurrent = any(issubclass(kind, nn.RNNBase) or hasattr(kind, "recurrent_mode") for kind in kinds)
    if recurrent or any(key_path(key)[-1] == "is_init" for key in keys):
        raise ValueError(
            f"{owner}(shifted=True): a recurrent network does not evaluate each state on its own; use shifted=False."
        )


class ShiftedStates:
    r"""Finds the next states of a batch [\*B, T] that are not states of the batch.

    x_{t+1} is the state of the next step of the row, unless an episode or a slice ends with step t. Networks must then
    also evaluate one next state per row: that of the first step that ends without a termination.

    Args:
        owner: the class named in errors.
        ends: done and terminated, bool [\*B, T, 1] each; the step before a masked step is done.
        valid: bool [\*B, T]; None if all steps are valid.
        state: the inputs of the networks for x_t, [\*B, T].
        following: their inputs for x_{t+1}, [\*B, T].
        keys: the inputs.
        time_dim: the dimension of time, >= 0.

    Raises:
        ValueError: if a row has other next states. In a graph and on an accelerator, their values are NaN instead.
    """

    def __init__(
        self,
        owner: str,
        ends: tuple[Tensor, Tensor],
        valid: Tensor | None,
        state: TensorDictBase,
        following: TensorDictBase,
        keys: Iterable[NestedKey],
        *,
        time_dim: int,
    ):
        done, terminated = (flag.squeeze(-1) for flag in ends)
        self._dim, self._last = time_dim, done.shape[time_dim] - 1
        step = torch.arange(self._last + 1, device=done.device).reshape(-1, *(1,) * (done.ndim - 1 - time_dim))
        ended = done | (step == self._last)
        separate = ended & ~terminated
        if valid is not None:
            separate = separate & valid
        # the last step if there is no such step
        self._at = torch.where(separate, step, self._last).amin(time_dim, keepdim=True)
        self._separate = separate
        goes_on = ~ended.narrow(time_dim, 0, self._last)
        differs = torch.zeros_like(goes_on)
        for key in keys:
            before, after = following.get(key), state.get(key)
            pair = before.narrow(time_dim, 0, self._last), after.narrow(time_dim, 1, self._last)
            differs = differs | _differs(*pair, goes_on)
        differs = torch.cat([differs, torch.zeros_like(self._at, dtype=torch.bool)], time_dim)
        self._missing = missing = differs | (separate & (step > self._at))
        raise_if(
            missing.any,
            lambda: ValueError(
                f"{owner}(shifted=True): the next states of {int(missing.sum())} steps are neither the state of the "
                "next step of the row nor the first one of the row after an end without termination. shifted=True is "
                "for slices drawn by TrajectoryRetraceSampler, one per row; use shifted=False for other batches, such "
                "as those of newest()."
            ),
            skip_on=done,
        )

    def select(self, state: Tensor, following: Tensor) -> Tensor:
        r"""The next state of each row that is not a state of the batch, [\*B, T, ...] with T = 1.

        Args:
            state: an input of a network for x_t, [\*B, T, ...]; its last step is used where a row has no such state.
            following: the same input for x_{t+1}.
        """
        at = expand_as_right(self._at, following.narrow(self._dim, 0, 1))
        last = state.narrow(self._dim, self._last, 1)
        # the state after a termination may be NaN, and 0 times NaN is NaN in the gradients
        return torch.where(
            expand_as_right(self._separate.any(self._dim, keepdim=True), last), following.gather(self._dim, at), last
        )

    def append(self, state: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        r"""The states of the batch and those of :meth:`select`, [\*B, T + 1]."""
        shape = list(state.batch_size)
        shape[self._dim] += 1
        content = {}
        for key, value in state.items(include_nested=True, leaves_only=True):
            content[key] = torch.cat([value, self.select(value, following.get(key))], self._dim)
        return TensorDict(content, shape)

    def next_value(self, value: Tensor) -> Tensor:
        r"""V(x_{t+1}), [\*B, T, 1], from the values of the states of :meth:`append`, [\*B, T + 1, 1]."""
        shifted, separate = (
            value.narrow(self._dim, start, n) for start, n in ((1, self._last + 1), (self._last + 1, 1))
        )
        result = torch.where(self._separate.unsqueeze(-1), separate, shifted)
        return result.masked_fill(self._missing.unsqueeze(-1), torch.nan)


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
