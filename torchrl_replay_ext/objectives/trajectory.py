"""Reads batches of trajectories, for the losses of ACER and for Retrace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.utils import expand_as_right
from torch import Tensor, nn

from torchrl_replay_ext.arguments import key_path
from torchrl_replay_ext.compilation import raise_if, values_can_be_read
from torchrl_replay_ext.functional import last_steps

# The component that should have written an entry, for error messages.
WRITTEN_BY_POLICY = "the policy writes it, and the collector stores it"
_WRITTEN_BY_ENVIRONMENT = "the environment writes it"
_READ_BY_NETWORKS = f"the networks read it; {_WRITTEN_BY_ENVIRONMENT}"
_BEHAVIOUR = f"{WRITTEN_BY_POLICY}; let it store the parameters of the distribution"
_WRITTEN_BY_SAMPLER = "the sampler writes it"


def entries_read(
    keys: Any, state: Iterable[NestedKey], following: Iterable[NestedKey], behaviour: Iterable[NestedKey]
) -> dict[NestedKey, str]:
    """The entries of a batch that a loss or an estimator reads, and the component that writes each of them.

    Args:
        keys: the names of the entries, ``tensor_keys`` of the loss or the estimator.
        state: the entries that the networks read for x_t.
        following: the entries that they read for x_{t+1}.
        behaviour: the entries of the behaviour policy.
    """
    by_policy = {keys.action: WRITTEN_BY_POLICY, **dict.fromkeys(behaviour, _BEHAVIOUR)}
    entries: dict[Any, str] = {**dict.fromkeys(state, _READ_BY_NETWORKS), **by_policy}
    entries |= {("next", key): _WRITTEN_BY_ENVIRONMENT for key in (keys.reward, keys.done, keys.terminated)}
    entries |= {("next", key): _READ_BY_NETWORKS for key in following}
    return {unravel_key(key): author for key, author in entries.items()}


def require_entry(owner: str, tensordict: TensorDictBase, key: NestedKey, written_by: str) -> Tensor:
    """Return the entry ``key``; if it is missing, the KeyError of ``owner`` names the component that writes it."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"{owner}: the batch has no entry {unravel_key(key)!r}; {written_by}.")
    return value


def require_shape(owner: str, key: NestedKey, value: Tensor, *shapes: Iterable[int], author: str) -> None:
    """Raise ValueError unless the entry ``key`` has one of ``shapes``."""
    expected = [tuple(shape) for shape in shapes]
    if tuple(value.shape) not in expected:
        raise ValueError(f"{owner}: {key!r} has shape {tuple(value.shape)}, expected {expected[0]}; {author}.")


class Trajectories:
    r"""A batch of trajectories [\*B, T]: what the networks read, rewards and ends.

    Masks may exclude steps, which may hold any values. The entries that are read are copied then, with floating-point
    values set to 0 in excluded steps: a network must not read a NaN there. The loss masks the output of the network,
    but the gradient of its weights would be 0 · NaN = NaN.

    Args:
        owner: the class that error messages name.
        tensordict: the batch.
        keys: the names of the entries, ``tensor_keys`` of a loss or estimator.
        entries: the entries that must exist, see :func:`entries_read`.
        masks: the entries of masks, bool [\*B, T] or [\*B, T, 1], if they exist.
        time_dim: the dimension of time; negative for a batch without dimensions.

    Attributes:
        data: the batch, or the copy of its entries.
        reward: [\*B, T, 1].
        done: bool [\*B, T, 1], True also in an excluded step and before one; without meaning in the last step of a row.
        terminated: bool [\*B, T, 1].
        valid: bool [\*B, T], False in excluded steps; None if there is no mask.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if a mask is not bool.
        ValueError: if the batch has no dimension of time, rewards, ends or masks have a wrong shape, or transitions
            span several steps.
    """

    def __init__(
        self,
        owner: str,
        tensordict: TensorDictBase,
        keys: Any,
        entries: Mapping[NestedKey, str],
        masks: Iterable[NestedKey],
        time_dim: int,
    ):
        self.owner, self.shape, self.time_dim = owner, tensordict.batch_size, time_dim
        if time_dim < 0:
            raise ValueError(f"{owner}: the batch must have the shape [*B, T] of trajectories, not [].")
        steps = getattr(keys, "steps_to_next_obs", "steps_to_next_obs")
        if tensordict.get(steps, None) is not None:
            raise ValueError(
                f"{owner}: the batch has {steps!r}, so its transitions span several steps; store single steps, without "
                "a multi-step transform."
            )
        for key, author in entries.items():
            require_entry(owner, tensordict, key, author)
        self.data, self.valid = tensordict, None
        for key in masks:
            if (mask := tensordict.get(key, None)) is None:
                continue
            if mask.dtype != torch.bool:
                raise TypeError(f"{owner}: {key!r} is {mask.dtype}, but must be bool; {_WRITTEN_BY_SAMPLER}.")
            mask = self.of_steps(key, mask)
            self.valid = mask if self.valid is None else self.valid & mask
        if self.valid is not None:
            read: Any = tensordict.select(*entries)
            self.data = read.apply(lambda x: self.fill(x) if x.is_floating_point() else x)
        columns = [unravel_key(("next", key)) for key in (keys.reward, keys.done, keys.terminated)]
        for key in columns:
            require_shape(owner, key, self.data.get(key), (*self.shape, 1), author=_WRITTEN_BY_ENVIRONMENT)
        self.reward, done, terminated = (self.data.get(key) for key in columns)
        self.done, self.terminated = done.to(torch.bool), terminated.to(torch.bool)
        if self.valid is not None:
            # in the last step of a row, the flag has no effect
            self.done = self.done | ~(self.valid & self.valid.roll(-1, time_dim)).unsqueeze(-1)

    @property
    def last(self) -> Tensor:
        r"""True in done steps and in the last step of a row, bool [\*B, T]."""
        return last_steps(self.done, self.time_dim).squeeze(-1)

    @property
    def ends(self) -> tuple[Tensor, Tensor, Tensor]:
        r"""Rewards and flags of ends, [\*B, T, 1], the last arguments of the functions that estimate returns."""
        return self.reward, self.done, self.terminated

    def of_steps(self, key: NestedKey, value: Tensor, author: str = _WRITTEN_BY_SAMPLER) -> Tensor:
        r"""Reshape an entry with a number per step from [\*B, T] or [\*B, T, 1] to [\*B, T]."""
        require_shape(self.owner, key, value, self.shape, (*self.shape, 1), author=author)
        return value.reshape(self.shape)

    def fill(self, x: Tensor) -> Tensor:
        r"""Replace ``x`` [\*B, T, ...] by 0 in excluded steps."""
        return x if self.valid is None else x.masked_fill(~expand_as_right(self.valid, x), 0)

    def mean(self, x: Tensor) -> Tensor:
        r"""Mean of ``x`` [\*B, T] or [\*B, T, 1] over the steps that are not excluded, detached."""
        x = x.detach()
        return x.mean() if self.valid is None else self.fill(x).sum() / self.valid.sum().clamp_min(1)

    def states(self, keys: Iterable[NestedKey], networks: Iterable[nn.Module]) -> tuple[TensorDictBase, TensorDictBase]:
        r"""The inputs ``keys`` of ``networks`` for x_t and for x_{t+1}, [\*B, T] each.

        In a row of next states, x_{t+1} of a new episode directly follows x_{t+1} of the previous episode. A recurrent
        network that runs over the row must be reset there, as TorchRL's estimators do, so "is_init" is set. A network
        that is called step by step reads the stored hidden state, so it must not be reset.
        """
        networks = [*networks]
        written = [unravel_key(key) for network in networks for key in getattr(network, "out_keys", ())]
        modules = [module for network in networks for module in network.modules()]
        modes = [module.recurrent_mode for module in modules if hasattr(module, "recurrent_mode")]
        resets = not modes or any(modes)
        state, following = TensorDict(batch_size=self.shape), TensorDict(batch_size=self.shape)
        for key in keys:
            next_key = unravel_key(("next", key))
            value, after = self.data.get(key), self.data.get(next_key)
            if after.shape == value.shape and next_key in written:
                # A hidden state. If the loss ran the network over the rows, those under "next" are 0 except where a
                # trajectory ends. So the hidden state stored for the next step is used, except there.
                after = torch.where(expand_as_right(self.last, value), after, value.roll(-1, self.time_dim))
            if after.shape == value.shape:
                # the state after termination has no effect, but it may be NaN, which distributions reject
                after = torch.where(expand_as_right(self.terminated.squeeze(-1), value), value, after)
            if resets and key_path(key)[-1] == "is_init":
                after = after | value
            state.set(key, value)
            following.set(key, after)
        return state, following

    def separate_states(
        self, states: tuple[TensorDictBase, TensorDictBase], networks: Iterable[nn.Module]
    ) -> tuple[Any, Callable[[Tensor, Tensor], Tensor]]:
        r"""The next states of a batch [\*B, T] that are not states of the batch.

        x_{t+1} is the state of the next step of the row, unless an episode or a slice ends with step t. Networks must
        then also evaluate one next state per row: that of the first step that ends without a termination.

        Args:
            states: the inputs of the networks for x_t and for x_{t+1}, [\*B, T], see :meth:`states`.
            networks: the networks that evaluate next states.

        Returns:
            The inputs of the networks for one such state per row, [\*B, T] with T = 1; any state in a row without one.
            And a function that returns V(x_{t+1}), [\*B, T, 1], from V(x_t), [\*B, T, 1], and V of these states,
            [\*B, 1, 1].

        Raises:
            ValueError: if a network is recurrent, that is, a module of TorchRL or torch, or one that reads "is_init";
                or if a row has other next states. In a graph and on an accelerator, their values are NaN instead.
        """
        state, following = states
        kinds = {type(module) for network in networks for module in network.modules()}
        recurrent = any(issubclass(kind, nn.RNNBase) or hasattr(kind, "recurrent_mode") for kind in kinds)
        keys = list(state.keys(include_nested=True, leaves_only=True))
        if recurrent or any(key_path(key)[-1] == "is_init" for key in keys):
            raise ValueError(
                f"{self.owner}(shifted=True): a recurrent network does not evaluate each state on its own; use "
                "shifted=False."
            )
        last, dim = self.last, self.time_dim
        length = last.shape[dim]
        step = torch.arange(length, device=last.device).reshape(-1, *(1,) * (last.ndim - 1 - dim))
        is_separate = self.fill(last & ~self.terminated.squeeze(-1))
        # the last step if there is no such step
        at = torch.where(is_separate, step, length - 1).amin(dim, keepdim=True)
        missing = is_separate & (step > at)
        for key in keys:
            missing = missing | _differs(following.get(key), state.get(key).roll(-1, dim), ~last)
        raise_if(
            missing.any,
            lambda: ValueError(
                f"{self.owner}(shifted=True): the next states of {int(missing.sum())} steps are neither the state of "
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
