"""What the two losses of ACER share: arguments, networks, Retrace, the trust region, and the losses themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictParams, dispatch
from torch import Tensor
from torchrl.objectives import LossModule

from torchrl_replay_ext.arguments import require_bool, require_choice, require_finite, require_number
from torchrl_replay_ext.compilation import raise_if, values_can_be_read
from torchrl_replay_ext.functional import (
    THRESHOLD,
    UNIT_INTERVAL,
    importance_sampling_return,
    log_ratio,
    max_log_ratio,
    retrace,
    trust_region_projection,
)
from torchrl_replay_ext.objectives.trajectory import WRITTEN_BY_POLICY, Trajectories, require_shape

# Return the value of an attribute; the arguments are the class, the name, and the value that is assigned.
Check = Callable[[str, str, Any], Any]


def _reduction(owner: str, name: str, value: Any) -> str:
    """Check the reduction of a loss; None is "mean"."""
    return require_choice(owner, name, "mean" if value is None else value, ("mean", "sum", "none"))


def coefficient(owner: str, name: str, value: Any) -> float | Tensor:
    """Check the weight of a loss; a real tensor stays a tensor, whose value is not read on an accelerator."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return require_finite(owner, name, value)
    if value.numel() != 1 or values_can_be_read(value):
        require_finite(owner, name, value)
    return value


def inverse(log_p: Tensor) -> Tensor:
    """1 / p, at most e^40, in float16 e^5.5."""
    return (-log_p).clamp_max(max_log_ratio(log_p.dtype)).exp()


@dataclass(kw_only=True)
class Terms:
    """The terms of the losses of a batch [*B, T]. Gradients flow through φ, the entropy and the errors only.

    Args:
        phi: the statistics φ of the policy, [*B, T, n].
        g: the gradient of the objective with respect to φ, Eq. 10 or 16, in the shape of ``phi``.
        k: the gradient of the divergence with respect to φ, in the shape of ``phi``.
        kl: the divergence D_KL(average ‖ current policy), [*B, T].
        entropy: the entropy of the policy, [*B, T].
        rho: truncated importance weights, [*B, T] or [*B, T, 1].
        bc_weight: weights of the bias correction, [*B, T] or [*B, T, 1].
        q_error: errors of Q, [*B, T, 1].
        v_loss: weighted squared errors of V, [*B, T]. Default: None, V has no loss.
        td_error: errors that determine the priorities, [*B, T, 1]. Default: None, ``q_error``.
    """

    phi: Tensor
    g: Tensor
    k: Tensor
    kl: Tensor
    entropy: Tensor
    rho: Tensor
    bc_weight: Tensor
    q_error: Tensor
    v_loss: Tensor | None = None
    td_error: Tensor | None = None


class ACERBase(LossModule):
    """Abstract loss of ACER (Wang et al. 2017) on trajectories [*B, T] with a stored behaviour policy, time last.

    The average policy is ``target_actor_network_params``; a :class:`~torchrl.objectives.SoftUpdate` updates it.

    Subclasses compute the :class:`Terms`. They list the checks of their arguments in ``_ARGUMENTS``, and the weights of
    their losses, which are buffers, in TorchRL's ``_schedulable_buffers``.

    Args:
        arguments: the arguments of the constructor by name: ``actor_network``, the critic, and those in ``_ARGUMENTS``,
            which become attributes.
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
    actor_network_params: TensorDictParams
    target_actor_network_params: TensorDictParams
    gamma: float
    lmbda: float
    c: float
    delta: float
    retrace_thresh: float
    trust_region: bool
    returns: str
    reduction: str
    entropy_coeff: Tensor
    critic_coeff: Tensor
    _schedulable_buffers = frozenset({"entropy_coeff", "critic_coeff"})
    # the check of each argument that can be assigned; it returns the value of the attribute
    _ARGUMENTS: ClassVar[dict[str, Check]] = {
        "gamma": UNIT_INTERVAL,
        "lmbda": UNIT_INTERVAL,
        "c": THRESHOLD,
        "delta": partial(require_number, valid=lambda x: x >= 0, rule=">= 0; use trust_region=False for none"),
        "retrace_thresh": THRESHOLD,
        "trust_region": require_bool,
        "returns": partial(require_choice, choices=("retrace", "importance_sampling")),
        "reduction": _reduction,
        "entropy_coeff": coefficient,
        "critic_coeff": coefficient,
    }
    # the name of the critic
    _CRITIC: str
    _LOSSES: tuple[str, ...] = ("loss_actor", "loss_qvalue", "loss_entropy")
    _DIAGNOSTICS = ("entropy", "kl", "rho", "bc_weight", "tr_active")

    def __init__(self, arguments: Mapping[str, Any]):
        super().__init__()
        name, actor_network = type(self).__name__, arguments["actor_network"]
        if not isinstance(actor_network, ProbabilisticTensorDictSequential):
            raise TypeError(
                f"{name}: actor_network must be a ProbabilisticActor or another ProbabilisticTensorDictSequential, "
                f"not {type(actor_network).__name__}."
            )
        checked = {key: check(name, key, arguments[key]) for key, check in self._ARGUMENTS.items()}
        self.convert_to_functional(actor_network, "actor_network", create_target_params=True)
        # without ``compare_against``: parameters that the two networks share get the gradients of both losses
        self.convert_to_functional(arguments[self._CRITIC], self._CRITIC)
        self.out_keys = [*self._LOSSES, *self._DIAGNOSTICS]
        device = next(self.parameters()).device
        for key, value in checked.items():
            if key in self._all_schedulable_buffers:
                self.register_coeff_buffer(key, value, device=device)
            else:
                setattr(self, key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._ARGUMENTS.get(name)
        # a number is copied into a buffer, a tensor replaces it, as in all losses of TorchRL
        super().__setattr__(name, value if check is None else check(type(self).__name__, name, value))

    def reset_parameters_recursive(self) -> None:
        """Reset the networks by the ``reset_parameters()`` of their modules, and copy the policy to the average policy.

        Modules without this method keep their values.
        """
        for name in ("actor_network", self._CRITIC):
            with self._params(name):
                for module in getattr(self, name).modules():
                    if hasattr(module, "reset_parameters"):
                        module.reset_parameters()
        # not as an attribute, which warns if no updater is associated yet
        average: Any = dict(self.named_children())["target_actor_network_params"]
        average.data.update_(self.actor_network_params.data)

    def _forward_value_estimator_keys(self, **kwargs: Any) -> None:
        pass

    def make_value_estimator(self, value_type: Any = None, **hyperparams: Any) -> None:
        """Raise NotImplementedError: the loss computes its own returns."""
        raise NotImplementedError(
            f"{type(self).__name__}.make_value_estimator: the loss computes its own returns; pass gamma=, "
            "lmbda=, returns= to its constructor."
        )

    @property
    @abstractmethod
    def _entries(self) -> dict[NestedKey, str]:
        """The entries that the loss reads, and the components that write them."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """All entries that the loss reads, except those that are optional."""
        return list(self._entries)

    def _params(self, network: str, *, average: bool = False) -> AbstractContextManager:
        params: TensorDictParams = getattr(self, f"target_{network}_params" if average else f"{network}_params")
        # with preserve_module_state=True, parameters that require gradients would replace buffers of the average policy
        return params.to_module(getattr(self, network), preserve_module_state=False)

    def _distribution(self, state: TensorDictBase, *, average: bool = False) -> TensorDictBase:
        """Add the parameters of the policy's distribution to ``state``."""
        with self._params("actor_network", average=average):
            return self.actor_network.get_dist_params(state)  # pyright: ignore[reportReturnType]: annotated as a tuple

    def _stored(self, rows: Trajectories, key: NestedKey, policy: Tensor) -> Tensor:
        """A stored statistic of the behaviour policy, detached, in the shape of that of the current ``policy``."""
        value = rows.data.get(key).detach()
        require_shape(rows.owner, key, value, policy.shape, author=f"as for the current policy; {WRITTEN_BY_POLICY}")
        return value.to(torch.promote_types(value.dtype, policy.dtype))

    def _require_written(self, key: NestedKey, positive: Tensor, rows: Trajectories) -> None:
        """Raise ValueError if ``positive`` [*B, T] is not > 0 in a valid step, except on accelerators and in graphs."""
        missing = rows.fill(positive <= 0)
        raise_if(
            missing.any,
            lambda: ValueError(
                f"{rows.owner}: {key!r} of the behaviour policy is not > 0 in {int(missing.sum())} steps, so no policy "
                "has written it. A collector with init_random_frames= stores zeros for its random actions: leave "
                "init_random_frames out, or do not store these steps."
            ),
            skip_on=missing,
        )

    def _weights(self, log_pi: Tensor, log_mu: Tensor) -> tuple[Tensor, Tensor]:
        """The weights min(c, ρ) and [1 − c / ρ]_+ of actions, Eqs. 7 to 10 and 16, in the shape of ``log_pi``."""
        ratio = log_ratio(log_pi, log_mu)
        # 1 / ρ is at least e^−40, so ∞ · 0 cannot occur for c = ∞
        return ratio.exp().clamp_max(self.c), (1 - self.c * inverse(ratio)).clamp_min(0)

    def _returns(
        self, rows: Trajectories, log_pi: Tensor, log_mu: Tensor, q: Tensor, next_value: Tensor, power: float = 1.0
    ) -> Tensor:
        """Estimate Q^π of the actions taken; arguments and result have shape [*B, T, 1]."""
        if self.returns == "importance_sampling":
            return importance_sampling_return(self.gamma, log_pi, log_mu, next_value, *rows.ends)
        options: Any = {"rho_thresh": self.retrace_thresh, "rho_power": power}
        return retrace(self.gamma, self.lmbda, log_pi, log_mu, q, next_value, *rows.ends, **options)

    @abstractmethod
    def _terms(self, rows: Trajectories, shifted: bool) -> Terms:
        """Compute the terms of the losses."""

    @dispatch()
    def forward(self, tensordict: TensorDictBase, *, shifted: bool = False) -> TensorDict:
        r"""Compute the losses of a batch [\*B, T].

        Args:
            tensordict: the batch.
            shifted: True: V_{t+1} is V of the next step of the row, and the networks evaluate one further state per row
                instead of T. Each row may have one step whose next state is not the state of the next step, apart from
                terminated steps: use it for slices drawn by :class:`~torchrl_replay_ext.TrajectoryRetraceSampler`, one
                per row, and not for those of its ``newest``. The networks must evaluate each state on its own. False
                (default): the networks evaluate all next states, which is right for any batch.

        Raises:
            ValueError: if ``shifted`` is True, and a row has more such steps or a network is recurrent. In a graph and
                on an accelerator, the values of these next states, and so the losses, are NaN instead.
        """
        name, time_dim = type(self).__name__, tensordict.batch_dims - 1
        rows = Trajectories(name, tensordict, self.tensor_keys, self._entries, self._loss_mask_keys(), time_dim)
        terms = self._terms(rows, shifted)
        z, active = terms.g, torch.zeros_like(terms.kl)
        if self.trust_region:
            z, active = trust_region_projection(terms.g, terms.k, self.delta)  # Eq. 12
        losses = {
            "loss_actor": -(terms.phi * rows.fill(z)).sum(-1),
            "loss_qvalue": self.critic_coeff * rows.fill(terms.q_error).square().squeeze(-1),
            **({} if terms.v_loss is None else {"loss_value": terms.v_loss}),
            "loss_entropy": -self.entropy_coeff * terms.entropy,
        }
        diagnostics = {key: rows.mean(getattr(terms, key)) for key in self._DIAGNOSTICS[:-1]}
        diagnostics["tr_active"] = rows.mean(active.to(terms.kl.dtype))
        weights = self._maybe_get_priority_weight(tensordict)
        if weights is not None:
            weights = rows.fill(rows.of_steps(self.tensor_keys.priority_weight, weights))
        error = terms.q_error if terms.td_error is None else terms.td_error
        tensordict.set(self.tensor_keys.priority, rows.fill(error.detach()).square().squeeze(-1))
        reduced = {key: self._reduced(value, tensordict, rows, weights) for key, value in losses.items()}
        networks = "actor_network", self._CRITIC
        self._clear_weakrefs(tensordict, *(f"{t}{name}_params" for name in networks for t in ("", "target_")))
        return TensorDict({**reduced, **diagnostics})

    def _reduced(self, loss: Tensor, tensordict: TensorDictBase, rows: Trajectories, weights: Tensor | None) -> Tensor:
        """Reduce ``loss`` [*B, T] over the valid steps with ``weights`` [*B, T]."""
        if weights is None or rows.valid is None or self.reduction != "mean":
            return self._reduce_loss(loss, tensordict, weights=weights)
        # TorchRL divides by the sum of the weights, which is 0 if no step is valid
        total = weights.sum()
        return (rows.fill(loss) * weights).sum() / torch.where(total > 0, total, 1.0)
