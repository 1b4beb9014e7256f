"""The loss of ACER for continuous actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictParams
from torch import Tensor, nn
from torch.distributions import Normal

from torchrl_replay_ext.arguments import require_bool, require_choice, require_integer
from torchrl_replay_ext.functional import acer_value_target, importance_ratio, importance_sampling_return, q_opc
from torchrl_replay_ext.modules import SeparateValueNetworks, StochasticDuelingNetwork
from torchrl_replay_ext.objectives.acer_base import ACERBase, Check, Terms, coefficient
from torchrl_replay_ext.objectives.trajectory import Trajectories, entries_read, require_entry, require_shape
from torchrl_replay_ext.policies import inside_bounds, is_squashed

_STATISTICS = (("loc",), ("loc", "scale"))
_TRUNCATED = "truncated_importance_sampling"


def _statistics(owner: str, name: str, value: Any) -> tuple[str, ...]:
    names = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    return require_choice(owner, name, names, _STATISTICS)


def _gaussian(loc: Tensor, scale: Tensor) -> Normal:
    return Normal(loc, scale, validate_args=False)


def _log_prob(policy: Normal, actions: Tensor) -> Tensor:
    """Log-densities [*B, T, m, 1] of m actions per state, [*B, T, m, A]."""
    return _gaussian(policy.loc.unsqueeze(-2), policy.scale.unsqueeze(-2)).log_prob(actions).sum(-1, keepdim=True)


class ACERContinuousLoss(ACERBase):
    r"""Actor-critic with experience replay for continuous actions (Wang et al. 2017, Sec. 5, Algorithm 3).

    The batch holds trajectories [\*B, T] with the stored Gaussian behaviour policy μ. The importance ratio is
    ρ_t(a) = π(a|x_t) / μ(a|x_t), with ρ_t = ρ_t(a_t); a'_t ~ π(·|x_t) is a sampled action, and d is the number of
    action dimensions. f(·|φ) is the distribution of the policy::

        loss_actor:  −φ(x_t)ᵀ z_t, where φ are the policy's statistics, z_t is detached, and
                     g_t = min(c, ρ_t) ∇_φ log f(a_t|φ) [Q^opc_t − V(x_t)]
                           + [1 − c / ρ_t(a'_t)]_+ ∇_φ log f(a'_t|φ) [Q̃(x_t, a'_t) − V(x_t)]      (Eq. 16)
                     k_t = ∇_φ D_KL[f(·|φ_avg) ‖ f(·|φ)]
                     z_t = g_t − max(0, (k_tᵀg_t − δ) / |k_t|²) k_t                              (Eq. 12)
        loss_qvalue: critic_coeff (Q^ret_t − Q̃(x_t, a_t))²
        loss_value:  value_coeff (V^target_t − V(x_t))²                                         (Eq. 14)
        loss_entropy: −entropy_coeff · H(π(·|x_t))

    Q^ret is :func:`~torchrl_replay_ext.functional.retrace` with traces λ min(retrace_thresh, ρ^{1/d}) (Algorithm 3
    prints 1/δ), Q^opc is :func:`~torchrl_replay_ext.functional.q_opc`. Q^ret, Q^opc, V^target, ρ and z are detached.

    The paper leaves these points open:

    * Q̃ of a_t and Q̃ of a'_t use the same samples u_i. No gradient flows to the policy through these samples.
    * The policies of the paper have a fixed diagonal covariance. ``statistics=("loc",)`` is this case: g_t and k_t have
      no component for the scale. ``("loc", "scale")`` also trains a learned scale.
    * With a TanhNormal, ratios, scores and divergences are computed for the Gaussian before the tanh, because the tanh
      cancels out. An action outside of [-1, 1] raises an error; in a compiled graph, where values cannot be checked, it
      is clamped. The critic reads the actions themselves, not their arctanh. ``loss_entropy`` uses the entropy of the
      Gaussian.
    * The average policy, truncated episodes, masks, weights and assignments to arguments are handled as in
      :class:`~torchrl_replay_ext.ACERLoss`.

    ``returns="truncated_importance_sampling"`` is the baseline TIS of the paper (App. E.2), and with the trust region
    Trust-TIS. Its critic is V alone. With importance ratios of 1, on-policy, it is A3C (Eq. 2) and Trust-A3C::

        w_t = min(c, ∏_{i<k} ρ_{t+i}),   R_t = Σ_{i<k} γ^i r_{t+i} + γ^k V(x_{t+k})
        g_t = w_t ∇_φ log f(a_t|φ) [R_t − V(x_t)]
        loss_value: value_coeff w_t (R_t − V(x_t))²

    The paper does not say how many steps k there are near the end of a trajectory. Here, as in A3C, step t + k − 1 is
    the last one of the row or of the episode. ``loss_qvalue`` and ``bc_weight`` are 0, and ``rho`` is the mean of w_t.
    ``lmbda``, ``num_samples``, ``critic_coeff``, ``retrace_thresh`` and ``use_q_opc`` have no effect.

    Args:
        actor_network: a :class:`~torchrl.modules.ProbabilisticActor` with the distribution Normal, IndependentNormal or
            TanhNormal. It writes "loc" and "scale" [\*B, T, A].
        sdn: the critic: a :class:`StochasticDuelingNetwork`; or :class:`SeparateValueNetworks`, for which V moves
            towards Q^ret with the weight ρ (App. E.4); or another module with the same ``forward`` and
            ``state_value``. With truncated importance sampling, only ``state_value`` is used.
        gamma: discount factor in [0, 1]. Default: 0.99.
        lmbda: λ of Retrace and of Q^opc, in [0, 1]. Default: 1.0.
        c: truncation of the importance weights in the policy gradient, >= 0. ``math.inf``: plain importance sampling,
            without the second term of g. Default: 5.0.
        delta: δ of the trust region, in nats per unit of step, >= 0. Default: 1.0.
        trust_region: True (default): z is the projection of g, Eq. 12; False: z = g.
        statistics: φ, ("loc",) or ("loc", "scale"). Default: ("loc",).
        num_samples: number n of sampled actions u_i per state, >= 1. Default: 5.
        entropy_coeff: weight of the entropy, >= 0. Default: 0.0.
        critic_coeff: weight of the loss of Q̃, >= 0. Default: 0.5.
        value_coeff: weight of the loss of V, >= 0. Default: 0.5.
        retrace_thresh: truncation of ρ^{1/d} in the traces of Retrace, >= 0. Default: 1.0.
        use_q_opc: True (default): g_t contains Q^opc, as in Eq. 16; False: Q^ret.
        returns: "retrace" (default); "importance_sampling", which replaces both Q^ret and Q^opc, as in an ablation of
            the paper (App. E.4); or "truncated_importance_sampling", the baseline described above.
        behaviour_keys: the entries with the mean and the standard deviation of μ. Default: ("loc", "scale").
        reduction: "mean" (default), "sum" or "none", over the steps that are valid in ("collector", "mask"). None is
            "mean".

    The loss reads "action" [\*B, T, A], ``behaviour_keys`` [\*B, T, A], the inputs of the actor, "observation" and
    ("next", "observation") for the critic, and ("next", "reward" | "done" | "terminated") [\*B, T, 1]. ``set_keys``
    changes the names.

    Returns:
        A TensorDict as that of :class:`~torchrl_replay_ext.ACERLoss`, with ``loss_value`` in addition. ``bc_weight`` is
        the mean of [1 − c/ρ(a')]_+.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if a network has an unsupported type, or a mask is not bool.
        ValueError: if an argument is out of range, a shape is wrong, or an action of a TanhNormal is outside of
            [-1, 1].

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import NormalParamExtractor, TensorDictModule
        >>> from torchrl.modules import IndependentNormal, ProbabilisticActor
        >>> from torchrl.objectives import SoftUpdate
        >>> from torchrl_replay_ext import StochasticDuelingNetwork
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), NormalParamExtractor())
        >>> policy = TensorDictModule(net, in_keys=["observation"], out_keys=["loc", "scale"])
        >>> actor = ProbabilisticActor(policy, in_keys=["loc", "scale"], distribution_class=IndependentNormal)
        >>> sdn = StochasticDuelingNetwork(torch.nn.Linear(3, 1), torch.nn.Linear(3 + 2, 1))
        >>> loss_module = ACERContinuousLoss(actor, sdn, c=5.0, delta=1.0)
        >>> average = SoftUpdate(loss_module, eps=0.995)
        >>> batch = actor(TensorDict({"observation": torch.randn(4, 20, 3)}, [4, 20]))
        >>> flags = dict.fromkeys(("done", "terminated"), torch.zeros(4, 20, 1, dtype=torch.bool))
        >>> batch["next"] = {"observation": torch.randn(4, 20, 3), "reward": torch.ones(4, 20, 1), **flags}
        >>> losses = loss_module(batch.detach())
        >>> (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_value"]).backward()
        >>> average.step()
    """

    @dataclass
    class _AcceptedKeys(ACERBase._AcceptedKeys):
        observation: NestedKey = "observation"
        loc: NestedKey = "loc"
        scale: NestedKey = "scale"
        behaviour_loc: NestedKey = "loc"
        behaviour_scale: NestedKey = "scale"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    sdn: StochasticDuelingNetwork | SeparateValueNetworks  # or another module with their forward() and state_value()
    sdn_params: TensorDictParams
    target_sdn_params: TensorDictParams
    statistics: tuple[str, ...]
    num_samples: int
    use_q_opc: bool
    value_coeff: Tensor
    _CRITIC = "sdn"
    _schedulable_buffers = frozenset({"value_coeff"})
    _ARGUMENTS: ClassVar[dict[str, Check]] = {
        **ACERBase._ARGUMENTS,
        "statistics": _statistics,
        "num_samples": require_integer,
        "use_q_opc": require_bool,
        "returns": partial(require_choice, choices=("retrace", "importance_sampling", _TRUNCATED)),
        "value_coeff": coefficient,
    }
    _LOSSES = ("loss_actor", "loss_qvalue", "loss_value", "loss_entropy")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        sdn: nn.Module,
        *,
        gamma: float = 0.99,
        lmbda: float = 1.0,
        c: float = 5.0,
        delta: float = 1.0,
        trust_region: bool = True,
        statistics: tuple[Literal["loc", "scale"], ...] = ("loc",),
        num_samples: int = 5,
        entropy_coeff: float = 0.0,
        critic_coeff: float = 0.5,
        value_coeff: float = 0.5,
        retrace_thresh: float = 1.0,
        use_q_opc: bool = True,
        returns: str = "retrace",
        behaviour_keys: tuple[NestedKey, NestedKey] = ("loc", "scale"),
        reduction: str | None = "mean",
    ):
        if len(behaviour_keys) != 2:
            raise ValueError(
                f"ACERContinuousLoss(behaviour_keys={behaviour_keys!r}): behaviour_keys must be two keys, one of the "
                "mean and one of the scale."
            )
        if not (isinstance(sdn, nn.Module) and callable(getattr(sdn, "state_value", None))):
            raise TypeError(
                f"ACERContinuousLoss: sdn must be a StochasticDuelingNetwork, or a module with the same forward() and "
                f"state_value(), not {type(sdn).__name__}."
            )
        super().__init__(locals())
        self._squashed = is_squashed(actor_network, "ACERContinuousLoss")
        self.set_keys(behaviour_loc=behaviour_keys[0], behaviour_scale=behaviour_keys[1])

    @property
    def _entries(self) -> dict[NestedKey, str]:
        keys = self.tensor_keys
        state = [*self.actor_network.in_keys, keys.observation]
        return entries_read(keys, state, [keys.observation], [keys.behaviour_loc, keys.behaviour_scale])

    def sample_actions(self, loc: Tensor, scale: Tensor, n: int) -> Tensor:
        """Draw n actions of the Gaussian policy for each state, before any tanh, from torch's global generator.

        Args:
            loc: means, [..., A].
            scale: standard deviations, [..., A].
            n: number of actions per state, >= 1.

        Returns:
            The actions, [..., n, A]. The loss uses the first one as a', the others as u_1, u_2, ...
        """
        noise = torch.randn(*loc.shape[:-1], n, loc.shape[-1], dtype=loc.dtype, device=loc.device)
        return loc.unsqueeze(-2) + scale.unsqueeze(-2) * noise

    def _policy(self, tensordict: TensorDictBase, *, average: bool = False) -> Normal:
        """The policy, with mean and standard deviation [*B, T, A]."""
        result = self._distribution(tensordict.select(*self.actor_network.in_keys), average=average)
        author = "actor_network writes it; set the names with set_keys(loc=, scale=)"
        keys = self.tensor_keys.loc, self.tensor_keys.scale
        return _gaussian(*(require_entry("ACERContinuousLoss", result, key, author) for key in keys))

    def _terms(self, rows: Trajectories, shifted: bool) -> Terms:
        key, networks = self.tensor_keys.observation, [self.sdn]
        states = rows.states([key], networks)
        following, join = rows.separate_states(states, networks) if shifted else (states[1], None)

        def next_value(value: Tensor) -> Tensor:
            """V(x_{t+1}), detached; ``value`` is V(x_t). Both have the shape [*B, T, 1]."""
            require_shape(rows.owner, "V", value, rows.reward.shape, author="sdn and its state_value return it")
            with torch.no_grad():
                after = self.sdn.state_value(following.get(key))
                return after if join is None else join(value, after)

        policy = self._policy(rows.data)
        action = rows.data.get(self.tensor_keys.action)
        if action.shape != policy.loc.shape or not action.is_floating_point():
            raise ValueError(
                f"ACERContinuousLoss: {self.tensor_keys.action!r} has shape {tuple(action.shape)} and dtype "
                f"{action.dtype}, expected real numbers of shape {tuple(policy.loc.shape)}, the shape of the policy's "
                "mean."
            )
        with torch.no_grad():
            average = self._policy(rows.data, average=True)
            keys = self.tensor_keys.behaviour_loc, self.tensor_keys.behaviour_scale
            mu = _gaussian(*(self._stored(rows, key, policy.loc) for key in keys))
            self._require_written(keys[1], mu.scale.amin(-1), rows)
            raw = inside_bounds(action, "ACERContinuousLoss").atanh() if self._squashed else action
        terms_of = self._truncated_terms if self.returns == _TRUNCATED else self._acer_terms
        with self._params("sdn"):
            actions, weights, terms = terms_of(rows, raw, policy, mu, next_value)
        with torch.no_grad():
            g, k, kl = self._gradients(actions, weights, policy, average)
        phi = torch.cat([policy.loc, policy.scale][: len(self.statistics)], -1)
        return Terms(phi=phi, g=g, k=k, kl=kl, entropy=policy.entropy().sum(-1), **terms)

    def _acer_terms(
        self, rows: Trajectories, raw: Tensor, policy: Normal, mu: Normal, next_value_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The terms of Algorithm 3.

        Args:
            rows: the batch.
            raw: the actions taken, before any tanh, [*B, T, A].
            policy: the current policy.
            mu: the behaviour policy.
            next_value_of: returns V(x_{t+1}) for V(x_t).

        Returns:
            m actions for each state, before any tanh, [*B, T, m, A]; the weights of their scores ∇ log f in the policy
            gradient, detached, [*B, T, m, 1]; and further terms of the losses.
        """
        with torch.no_grad():
            drawn = self.sample_actions(policy.loc, policy.scale, self.num_samples + 1)
            # of a_t and of a'_t
            both = torch.stack([raw, drawn[..., 0, :]], -2)
            log_pi, log_mu = _log_prob(policy, both), _log_prob(mu, both)
            (rho, _), (_, beyond) = (weight.unbind(-2) for weight in self._weights(log_pi, log_mu))
            seen = drawn.tanh() if self._squashed else drawn
            actions = torch.stack([rows.data.get(self.tensor_keys.action), seen[..., 0, :]], -2)
        observation = rows.data.get(self.tensor_keys.observation)
        q_both, value = self.sdn(observation, actions, seen[..., 1:, :])
        next_value = next_value_of(value)
        require_shape(rows.owner, "Q", q_both, (*value.shape[:-1], 2, 1), author="sdn returns it for two actions")
        q, q_other = q_both.unbind(-2)
        with torch.no_grad():
            of_taken = log_pi[..., 0, :], log_mu[..., 0, :]
            q_actor = q_ret = self._returns(rows, *of_taken, q, next_value, power=1 / raw.shape[-1])  # Eq. 5
            if self.use_q_opc and self.returns == "retrace":
                q_actor = q_opc(self.gamma, self.lmbda, q, next_value, *rows.ends)  # Eq. 21
            if isinstance(self.sdn, SeparateValueNetworks):
                value_weight, target = importance_ratio(*of_taken), q_ret  # App. E.4
            else:
                value_weight, target = torch.ones_like(q), acer_value_target(*of_taken, q_ret, q, value)  # Eq. 14
            weights = torch.stack([rho * (q_actor - value), beyond * (q_other - value)], -2)  # Eq. 16
        terms = {"rho": rho, "bc_weight": beyond, "q_error": q_ret - q}
        return both, weights, {**terms, "v_loss": self._value_loss(rows, value_weight, target - value)}

    def _truncated_terms(
        self, rows: Trajectories, raw: Tensor, policy: Normal, mu: Normal, next_value_of: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The terms of truncated importance sampling, App. E.2; arguments and result are those of ``_acer_terms``."""
        value = self.sdn.state_value(rows.data.get(self.tensor_keys.observation))
        next_value = next_value_of(value)
        zero, actions = torch.zeros_like(value), raw.unsqueeze(-2)
        with torch.no_grad():
            log_rho = (_log_prob(policy, actions) - _log_prob(mu, actions)).squeeze(-2)
            # the log of the product is a return without discount of the rewards log ρ
            log_product = importance_sampling_return(1.0, zero, zero, zero, log_rho, rows.done)
            rho = importance_ratio(log_product, zero).clamp_max(self.c)
            returns = importance_sampling_return(self.gamma, zero, zero, next_value, *rows.ends)
            weights = (rho * (returns - value)).unsqueeze(-2)
        error = returns - value
        terms = {"rho": rho, "bc_weight": zero, "q_error": zero, "td_error": error}
        return actions, weights, {**terms, "v_loss": self._value_loss(rows, rho, error)}

    def _value_loss(self, rows: Trajectories, weight: Tensor, error: Tensor) -> Tensor:
        return self.value_coeff * (rows.fill(weight) * rows.fill(error).square()).squeeze(-1)

    def _gradients(
        self, actions: Tensor, weights: Tensor, policy: Normal, average: Normal
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute g of Eq. 16 and k of Eq. 12, [*B, T, A] or [*B, T, 2 A], and the KL divergence [*B, T].

        ``actions`` and ``weights`` are those of ``_acer_terms``.
        """
        difference, variance = actions - policy.loc.unsqueeze(-2), policy.scale.square()
        score = difference / variance.unsqueeze(-2)
        shift = policy.loc - average.loc
        g, k = (weights * score).sum(-2), shift / variance
        spread = (average.scale.square() + shift.square()) / variance
        # torch's kl_divergence cannot be traced before its first call in eager code
        kl = (policy.scale / average.scale).log() + (spread - 1) / 2
        if "scale" in self.statistics:
            g_scale = (weights * (score * difference - 1)).sum(-2) / policy.scale
            g, k = torch.cat([g, g_scale], -1), torch.cat([k, (1 - spread) / policy.scale], -1)
        return g, k, kl.sum(-1)
