"""What the losses on trajectories have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictParams
from tensordict.utils import expand_as_right
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_replay_ext.functional import importance_sampling_return, retrace

RETURNS = ("retrace", "importance_sampling")
# Who is to blame if an entry is missing.
_COLLECTOR = "the collector stores what the policy wrote"
_ENVIRONMENT = "the environment writes it"
_SAMPLER = "the sampler writes it"


def blank_invalid(tensordict: TensorDictBase, keys: Iterable[NestedKey], valid: Tensor | None) -> TensorDictBase:
    r"""The entries ``keys`` of a batch [\*B, T], with 0 for real numbers in steps that are not ``valid`` [\*B, T].

    A network must not see a NaN in these steps: the loss masks its output, but the gradient of its weights is 0 · NaN.
    Entries that are missing stay missing.
    """
    if valid is None:
        return tensordict
    result = TensorDict(batch_size=tensordict.batch_size)
    for key in keys:
        value = tensordict.get(key, None)
        if value is not None and value.is_floating_point():
            value = value.masked_fill(~expand_as_right(valid, value), 0.0)
        if value is not None:
            result.set(key, value)
    return result


def separate_episodes(state: TensorDictBase, following: TensorDictBase, networks: Iterable[nn.Module]) -> None:
    """Mark, for recurrent networks, where the episodes of a row begin among the states that follow.

    In the row of next states, x_{t+1} of a new episode directly follows x_{t+1} of the previous one. A network that
    runs over the row must reset its hidden state there, as TorchRL's estimators do. A network that is called step by
    step reads the stored hidden state, so it must not be reset.
    """
    modules = [module for network in networks for module in network.modules() if hasattr(module, "recurrent_mode")]
    if modules and not any(module.recurrent_mode for module in modules):
        return
    for key in state.keys(include_nested=True, leaves_only=True):
        if (key if isinstance(key, str) else key[-1]) == "is_init":
            following.set(key, following.get(key) | state.get(key))


@dataclass(kw_only=True)
class Trajectories:
    """The rows of a batch of trajectories; all [*B, T, 1], ``valid`` [*B, T]."""

    reward: Tensor
    done: Tensor
    terminated: Tensor
    valid: Tensor | None

    def fill(self, x: Tensor) -> Tensor:
        """``x`` [*B, T, n] with 0 where a step is not valid."""
        return x if self.valid is None else x.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """The mean of ``x`` [*B, T] over valid steps; detached."""
        x = x.detach()
        if self.valid is None:
            return x.mean()
        return x.masked_fill(~self.valid, 0.0).sum() / self.valid.sum().clamp_min(1)


class TrajectoryLoss(LossModule):
    """Abstract loss on trajectories of stored behaviour: TensorDicts of shape [*B, T], time last.

    Its average policy is ``target_actor_network_params``, which a :class:`~torchrl.objectives.SoftUpdate` moves.
    """

    @dataclass
    class _AcceptedKeys:
        action: NestedKey = "action"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        priority: NestedKey = "td_error"
        priority_weight: NestedKey = "priority_weight"

    tensor_keys: _AcceptedKeys
    actor_network: ProbabilisticTensorDictSequential
    entropy_coeff: Tensor
    critic_coeff: Tensor
    _LOSSES: tuple[str, ...]
    _DIAGNOSTICS = ("entropy", "kl", "rho", "bc_weight", "tr_active")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        critic: tuple[str, nn.Module],
        *,
        gamma: float,
        lmbda: float,
        c: float,
        delta: float,
        trust_region: bool,
        retrace_thresh: float,
        returns: str,
        reduction: str,
        **coefficients: float,
    ):
        name = type(self).__name__
        super().__init__()
        if not isinstance(actor_network, ProbabilisticTensorDictSequential):
            raise TypeError(
                f"{name}: actor_network must be a ProbabilisticActor, or another ProbabilisticTensorDictSequential, "
                f"not {type(actor_network).__name__}."
            )
        for key, value, valid, requirement in (
            ("gamma", gamma, 0 <= gamma <= 1, "in [0, 1]"),
            ("lmbda", lmbda, 0 <= lmbda <= 1, "in [0, 1]"),
            ("c", c, c >= 0, ">= 0; use math.inf for importance sampling without truncation"),
            ("delta", delta, delta >= 0, ">= 0; use trust_region=False for none"),
            ("retrace_thresh", retrace_thresh, retrace_thresh >= 0, ">= 0"),
            ("returns", returns, returns in RETURNS, f"one of {', '.join(RETURNS)}"),
            ("reduction", reduction, reduction in ("mean", "sum", "none"), "one of mean, sum, none"),
            *((key, value, 0 <= value < math.inf, ">= 0 and finite") for key, value in coefficients.items()),
        ):
            if not valid:
                raise ValueError(f"{name}({key}={value!r}): {key} must be {requirement}.")
        self.gamma, self.lmbda, self.c, self.delta = gamma, lmbda, c, delta
        self.trust_region, self.retrace_thresh, self.returns, self.reduction = (
            trust_region,
            retrace_thresh,
            returns,
            reduction,
        )
        self.convert_to_functional(actor_network, "actor_network", create_target_params=True)
        # parameters that the two share learn from both
        self.convert_to_functional(critic[1], critic[0])  # pyright: ignore[reportArgumentType]: any module will do
        self._network_names = ("actor_network", critic[0])
        self.out_keys = [*self._LOSSES, *self._DIAGNOSTICS]
        device = next(self.parameters()).device
        for key, value in coefficients.items():
            self.register_coeff_buffer(key, value, device=device)

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        pass

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> None:
        """Not used: the returns are part of the loss."""
        raise NotImplementedError(
            f"{type(self).__name__} computes its returns by itself: pass gamma=, lmbda=, returns=."
        )

    @property
    @abstractmethod
    def _behaviour(self) -> tuple[NestedKey, ...]:
        """Where the statistics of the policy that acted are stored."""

    @property
    @abstractmethod
    def _read(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """What the networks read of a state, and of the one that followed."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """All entries that are read."""
        keys, (of_state, of_following) = self.tensor_keys, self._read
        of_step = [("next", key) for key in (keys.reward, keys.done, keys.terminated, *of_following)]
        return list(dict.fromkeys(unravel_key(k) for k in (*of_state, keys.action, *self._behaviour, *of_step)))

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.in_keys: use set_keys().")

    def _params(self, network: str, *, average: bool = False) -> AbstractContextManager:
        params: TensorDictParams = getattr(self, f"target_{network}_params" if average else f"{network}_params")
        # otherwise it would leave parameters that require gradients in the place of the average policy's buffers
        return params.to_module(getattr(self, network), preserve_module_state=False)

    def _distribution(self, state: TensorDictBase, *, average: bool = False) -> TensorDictBase:
        """``state`` and the parameters of the policy's distribution."""
        with self._params("actor_network", average=average):
            return self.actor_network.get_dist_params(state)  # pyright: ignore[reportReturnType]: annotated as a tuple

    def _get(self, tensordict: TensorDictBase, key: NestedKey, blame: str) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"{type(self).__name__}: the batch has no entry {key!r}; {blame}.")
        return value

    def _of_steps(self, value: Tensor, key: NestedKey, shape: torch.Size) -> Tensor:
        """What the sampler gave each step, [*B, T] or [*B, T, 1], as [*B, T]."""
        if value.shape not in (shape, (*shape, 1)):
            raise ValueError(
                f"{type(self).__name__}: {key!r} has shape {tuple(value.shape)}, expected {tuple(shape)}; {_SAMPLER}."
            )
        return value.reshape(shape)

    def _statistics(self, tensordict: TensorDictBase, shape: torch.Size) -> list[Tensor]:
        """The behaviour's statistics, which were stored; each of ``shape``."""
        result = []
        for key in self._behaviour:
            value = self._get(tensordict, key, f"{_COLLECTOR}: keep the parameters of its distribution")
            if value.shape != shape:
                raise ValueError(
                    f"{type(self).__name__}: the behaviour's {key!r} has shape {tuple(value.shape)}, expected "
                    f"{tuple(shape)}, that of the current policy's; {_COLLECTOR}."
                )
            result.append(value.detach())
        return result

    def _trajectories(self, tensordict: TensorDictBase) -> Trajectories:
        """Rewards and ends; a step that is followed by one that is not valid ends the trajectory."""
        keys, shape = self.tensor_keys, (*tensordict.batch_size, 1)
        if not tensordict.batch_dims:
            raise ValueError(f"{type(self).__name__}: the batch must have the shape [*B, T] of trajectories, not [].")
        columns = []
        for key in (keys.reward, keys.done, keys.terminated):
            key = unravel_key(("next", key))
            value = self._get(tensordict, key, _ENVIRONMENT)
            if value.shape != shape:
                raise ValueError(
                    f"{type(self).__name__}: {key!r} has shape {tuple(value.shape)}, expected {shape}; {_ENVIRONMENT}."
                )
            columns.append(value)
        reward, done, terminated = columns[0], columns[1].to(torch.bool), columns[2].to(torch.bool)
        valid = None
        for key in self._loss_mask_keys():
            mask = tensordict.get(key, None)
            if mask is not None:
                if mask.dtype != torch.bool:
                    raise TypeError(f"{type(self).__name__}: {key!r} is {mask.dtype}, must be bool; {_SAMPLER}.")
                mask = self._of_steps(mask, key, tensordict.batch_size)
                valid = mask if valid is None else valid & mask
        if valid is not None:
            goes_on = valid & torch.cat([valid[..., 1:], torch.ones_like(valid[..., :1])], -1)
            done = done | ~goes_on.unsqueeze(-1)
        return Trajectories(reward=reward, done=done, terminated=terminated, valid=valid)

    def _returns(
        self, rows: Trajectories, log_pi: Tensor, log_mu: Tensor, q: Tensor, next_value: Tensor, power: float = 1.0
    ) -> Tensor:
        """The estimate of Q^π at the actions taken; all [*B, T, 1]."""
        ends = rows.reward, rows.done, rows.terminated
        if self.returns == "importance_sampling":
            return importance_sampling_return(self.gamma, log_pi, log_mu, next_value, *ends)
        return retrace(
            self.gamma,
            self.lmbda,
            log_pi,
            log_mu,
            q,
            next_value,
            *ends,
            rho_thresh=self.retrace_thresh,
            rho_power=power,
        )

    def _result(
        self,
        tensordict: TensorDictBase,
        rows: Trajectories,
        losses: dict[str, Tensor],
        diagnostics: dict[str, Tensor],
        td_error: Tensor,
    ) -> TensorDict:
        """Losses [*B, T] reduced, and the means of the rest; the squared TD errors are written to the batch."""
        weights = self._maybe_get_priority_weight(tensordict)
        if weights is not None:
            weights = self._of_steps(weights, self.tensor_keys.priority_weight, tensordict.batch_size)
        tensordict.set(self.tensor_keys.priority, td_error.detach().square().squeeze(-1))
        result = {key: self._reduce_loss(value, tensordict, weights=weights) for key, value in losses.items()}
        result |= {key: rows.mean(value) for key, value in diagnostics.items()}
        self._clear_weakrefs(tensordict, *(f"{t}{n}_params" for n in self._network_names for t in ("", "target_")))
        return TensorDict(result)
