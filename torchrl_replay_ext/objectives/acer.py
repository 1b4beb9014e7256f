"""The loss of ACER for discrete actions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictParams,
    dispatch,
)
from torch import Tensor
from torch.distributions import Categorical, OneHotCategorical

from torchrl_replay_ext.arguments import key_path, require_choice
from torchrl_replay_ext.functional import trust_region_projection
from torchrl_replay_ext.functional.retrace import log_ratio, max_log_ratio
from torchrl_replay_ext.objectives.categorical import action_index, expectation, is_probability, log_probabilities
from torchrl_replay_ext.objectives.trajectory import (
    READ_BY_NETWORKS,
    WRITTEN_BY_POLICY,
    Check,
    TrajectoryLoss,
    blank_invalid,
    require_entry,
    separate_episodes,
)

Statistics = Literal["probs", "logits", "log_probs"]
STATISTICS = get_args(Statistics)
# TorchRL's own categorical distributions are subclasses of these.
_DISTRIBUTIONS = (Categorical, OneHotCategorical)
# Their arguments that do not change the probabilities.
_WITHOUT_EFFECT = {"grad_method", "validate_args"}


def _inverse(log_p: Tensor) -> Tensor:
    """1 / p, at most e^40, in float16 e^5.5."""
    return (-log_p).clamp_max(max_log_ratio(log_p.dtype)).exp()


class ACERLoss(TrajectoryLoss):
    r"""Actor-critic with experience replay for discrete actions (Wang et al. 2017, Sec. 3, Algorithm 2).

    The batch holds trajectories [\*B, T], on-policy or replayed, with the stored behaviour policy μ. The importance
    ratio is ρ_t(a) = π(a|x_t) / μ(a|x_t), with ρ_t = ρ_t(a_t); f(·|φ) is the distribution of the policy::

        loss_actor:   −φ(x_t)ᵀ z_t, where φ are the policy's statistics, z_t is detached, and
                      g_t = min(c, ρ_t) ∇_φ log f(a_t|φ) [Q^ret_t − V_t]
                            + Σ_a [1 − c / ρ_t(a)]_+ f(a|φ) ∇_φ log f(a|φ) [Q(x_t, a) − V_t]     (Eq. 10)
                      k_t = ∇_φ D_KL[f(·|φ_avg) ‖ f(·|φ)]
                      z_t = g_t − max(0, (k_tᵀg_t − δ) / |k_t|²) k_t                            (Eq. 12)
        loss_qvalue:  critic_coeff (Q^ret_t − Q(x_t, a_t))²; with critic_coeff = 0.5, its gradient is that of Eq. 6
        loss_entropy: −entropy_coeff · H(π(·|x_t))

    V_t = Σ_a π(a|x_t) Q(x_t, a). Q^ret is :func:`~torchrl_replay_ext.functional.retrace` with traces
    λ min(retrace_thresh, ρ). Q^ret, V, ρ and z are detached. g, k and z are computed in closed form for each step, so
    there is no second backward pass.

    The paper leaves these points open:

    * The average policy is ``target_actor_network_params``; ``SoftUpdate(loss, eps=α)`` after each update gives
      θ_avg ← α θ_avg + (1 − α) θ.
    * The trust region does not apply to the gradient of the entropy: in Algorithm 2, g has no entropy term.
    * A truncated episode bootstraps from its last observation.
    * Log-ratios are at most 40, so probabilities of 1e-17 and less cause no overflow. There is no other eps.

    Networks may share parameters; shared parameters get the gradients of all losses. The critic runs after the actor
    and may read the actor's outputs, such as a hidden layer. A recurrent network that reads "is_init" is reset at the
    start of each episode in a row, also for the states x_{t+1}.

    Each step has one distribution. If several agents share a policy, the batch must have one row per agent and
    trajectory.

    Args:
        actor_network: a :class:`~torchrl.modules.ProbabilisticActor` with a categorical distribution that reads
            "logits" or "probs" [\*B, T, A]. To read an entry with another name, pass
            ``in_keys={"logits": <entry>}`` to the actor.
        qvalue_network: a TensorDictModule that writes "action_value" [\*B, T, A].
        gamma: discount factor in [0, 1]. Default: 0.99.
        lmbda: λ of Retrace, in [0, 1]. Default: 1.0.
        c: truncation of the importance weights in the policy gradient, >= 0. ``math.inf``: plain importance sampling,
            without the second term of g; 0: only the second term, with weight 1. Default: 10.0.
        delta: δ of the trust region, in nats per unit of step, >= 0. Default: 1.0.
        trust_region: True (default): z is the projection of g, Eq. 12; False: z = g.
        statistics: φ, the statistics of the policy in which g is projected: "probs" (default), as in the paper,
            "logits" or "log_probs".
        entropy_coeff: weight of the entropy, >= 0. Default: 1e-3.
        critic_coeff: weight of the critic's loss, >= 0. Default: 0.5.
        retrace_thresh: truncation of ρ in the traces of Retrace, >= 0. Default: 1.0.
        returns: "retrace" (default), or "importance_sampling" as in an ablation of the paper (App. E.4).
        behaviour_key: the entry with the statistics of μ [\*B, T, A]: probabilities if the name ends with "probs", else
            logits. If the actor's distribution reads an entry with another name, pass that name. Default: "logits".
        reduction: "mean" (default), "sum" or "none", over the steps that are valid in ("collector", "mask"). None is
            "mean".

    The loss reads "action" (index [\*B, T] or [\*B, T, 1], or one-hot [\*B, T, A]), ``behaviour_key``, the inputs of
    the networks, also under "next" for x_{t+1}, and ("next", "reward" | "done" | "terminated") [\*B, T, 1].
    ``set_keys`` changes the names. If the batch has "priority_weight", losses are weighted averages, as in TorchRL.
    Steps that are masked out by ("collector", "mask") may hold any values, including NaN.

    Every argument except networks and keys can be assigned later, as in ``loss.entropy_coeff = 0.003``, and is checked
    as in the constructor. A compiled graph uses new values of ``entropy_coeff`` and ``critic_coeff``, which are
    buffers, as they are; it compiles once more when another real number, such as ``c``, first changes.

    Returns:
        A TensorDict of the losses and of detached diagnostics: ``entropy``, ``kl`` (D_KL(average ‖ current
        policy) in nats), ``rho`` (mean of min(c, ρ)), ``bc_weight`` (mean of Σ_a π(a) [1 − c/ρ(a)]_+) and
        ``tr_active`` (fraction of steps that were projected). With ``statistics="probs"``, ``tr_active`` says
        little: the constraint then also counts a common scaling of all probabilities, which the softmax cancels. The
        squared TD errors [\*B, T] are written to the batch as "td_error".

    Raises:
        KeyError: if an entry is missing.
        TypeError: if a network is not a TensorDictModule, or a mask is not bool.
        ValueError: if an argument is out of range, a shape is wrong, or an action is invalid. Actions are not checked
            in a compiled graph.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.modules import ProbabilisticActor
        >>> from torchrl.objectives import SoftUpdate
        >>> policy = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["logits"])
        >>> actor = ProbabilisticActor(policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
        >>> critic = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> loss_module = ACERLoss(actor, critic, c=10.0, delta=1.0)
        >>> average = SoftUpdate(loss_module, eps=0.99)
        >>> batch = actor(TensorDict({"observation": torch.randn(4, 20, 3)}, [4, 20]))
        >>> flags = dict.fromkeys(("done", "terminated"), torch.zeros(4, 20, 1, dtype=torch.bool))
        >>> batch["next"] = {"observation": torch.randn(4, 20, 3), "reward": torch.ones(4, 20, 1), **flags}
        >>> losses = loss_module(batch.detach())
        >>> (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_entropy"]).backward()
        >>> average.step()
    """

    @dataclass
    class _AcceptedKeys(TrajectoryLoss._AcceptedKeys):
        action_value: NestedKey = "action_value"
        behaviour: NestedKey = "logits"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    statistics: Statistics
    _ARGUMENTS: ClassVar[dict[str, Check]] = {
        **TrajectoryLoss._ARGUMENTS,
        "statistics": partial(require_choice, choices=STATISTICS),
    }
    _LOSSES = ("loss_actor", "loss_qvalue", "loss_entropy")

    def __init__(
        self,
        actor_network: ProbabilisticTensorDictSequential,
        qvalue_network: TensorDictModule,
        *,
        gamma: float = 0.99,
        lmbda: float = 1.0,
        c: float = 10.0,
        delta: float = 1.0,
        trust_region: bool = True,
        statistics: Statistics = "probs",
        entropy_coeff: float = 1e-3,
        critic_coeff: float = 0.5,
        retrace_thresh: float = 1.0,
        returns: str = "retrace",
        behaviour_key: NestedKey = "logits",
        reduction: str | None = "mean",
    ):
        if not isinstance(qvalue_network, TensorDictModuleBase):
            raise TypeError(
                f"ACERLoss: qvalue_network must be a TensorDictModule that writes the values of all actions, not "
                f"{type(qvalue_network).__name__}."
            )
        super().__init__(
            actor_network,
            ("qvalue_network", qvalue_network),
            gamma=gamma,
            lmbda=lmbda,
            c=c,
            delta=delta,
            trust_region=trust_region,
            statistics=statistics,
            retrace_thresh=retrace_thresh,
            returns=returns,
            reduction=reduction,
            entropy_coeff=entropy_coeff,
            critic_coeff=critic_coeff,
        )
        last = actor_network[-1]
        kind = getattr(last, "distribution_class", None)
        known = isinstance(kind, type) and issubclass(kind, _DISTRIBUTIONS)
        # the names of the distribution's arguments; without a mapping, these are the last parts of the keys
        names = [key_path(key)[-1] for key in getattr(last, "dist_keys", last.in_keys)]
        # any other argument, such as an action mask, would change the probabilities
        if not known or names not in (["logits"], ["probs"]):
            raise ValueError(
                f"ACERLoss: the actor's distribution must be Categorical or OneHotCategorical and read 'logits' or "
                f"'probs' alone, not {kind} that reads {names} from {list(last.in_keys)}. To read an entry with "
                "another name, pass in_keys={'logits': <entry>} to the actor."
            )
        if others := sorted({*(getattr(last, "distribution_kwargs", None) or ())} - _WITHOUT_EFFECT):
            raise ValueError(
                f"ACERLoss: the actor's distribution {kind} has the arguments {others}, which may change its "
                "probabilities; let the network write the logits of impossible actions as -inf instead."
            )
        self._parameter, self._parameter_name = last.in_keys[0], names[0]
        self.set_keys(behaviour=behaviour_key)

    @property
    def _behaviour(self) -> tuple[NestedKey, ...]:
        return (self.tensor_keys.behaviour,)

    @property
    def _read(self) -> tuple[list[NestedKey], list[NestedKey]]:
        of_critic = [key for key in self.qvalue_network.in_keys if key not in self.actor_network.out_keys]
        keys = list(dict.fromkeys([*self.actor_network.in_keys, *of_critic]))
        return keys, keys

    def _evaluate(self, state: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values of all actions, [*B, T, A]."""
        state = self._distribution(state)
        with self._params("qvalue_network"):
            state = self.qvalue_network(state)
        log_pi, key = self._log_policy(state), self.tensor_keys.action_value
        if log_pi.shape[:-1] != state.batch_size:
            raise ValueError(
                f"ACERLoss: {self._parameter!r} of actor_network has shape {tuple(log_pi.shape)}, expected "
                f"{(*state.batch_size, 'A')}: one categorical distribution per step. For several agents, give the "
                "batch one row per agent and trajectory."
            )
        value = require_entry(
            "ACERLoss", state, key, "qvalue_network writes it; set its name with set_keys(action_value=)"
        )
        if value.shape != log_pi.shape:
            raise ValueError(
                f"ACERLoss: {key!r} has shape {tuple(value.shape)}, expected {tuple(log_pi.shape)}: one value for each "
                "action of the actor; qvalue_network writes it."
            )
        # the value of an action with probability 0 may be infinite
        return log_pi, value.masked_fill((log_pi == -math.inf) & value.isinf(), 0.0)

    def _log_policy(self, state: TensorDictBase) -> Tensor:
        """Log-probabilities of all actions [*B, T, A] from the distribution's parameters."""
        return log_probabilities(state.get(self._parameter), self._parameter_name)

    def _states(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """The inputs of the networks for x_t and for x_{t+1}, [*B, T] each."""
        states = []
        for prefix, keys in zip(((), ("next",)), self._read, strict=True):
            content = {}
            for key in keys:
                full = (*prefix, *key_path(key))
                content[key] = require_entry("ACERLoss", tensordict, full, READ_BY_NETWORKS)
            states.append(TensorDict(content, tensordict.batch_size))
        separate_episodes(states[0], states[1], (self.actor_network, self.qvalue_network))
        return states[0], states[1]

    @dispatch()
    def forward(self, tensordict: TensorDictBase, *, shifted: bool = False) -> TensorDict:
        r"""Compute the losses of a batch [\*B, T].

        Args:
            tensordict: the batch.
            shifted: True: V_{t+1} is V of the next step of the row, and the networks evaluate one further state per row
                instead of T. Each row may have one step whose next state is not the state of the next step, apart from
                terminated steps: use it for slices drawn by :class:`TrajectoryRetraceSampler`, one per row, and not for
                those of its ``newest``. The networks must evaluate each state on its own. False (default): the networks
                evaluate all next states, which is right for any batch.

        Raises:
            ValueError: if ``shifted`` is True, and a row has more such steps or a network is recurrent. In a graph and
                on an accelerator, the values of these next states, and so the losses, are NaN instead.
        """
        rows = self._trajectories(tensordict)
        batch = blank_invalid(tensordict, self.in_keys, rows.valid)
        states, following = self._states(batch)
        if shifted:
            shift = self._shift(rows, states, following, (self.actor_network, self.qvalue_network))
            log_pi, q = self._evaluate(shift.append(states, following))
            next_value = shift.next_value(expectation(log_pi, q).detach())
            log_pi, q = log_pi[..., :-1, :], q[..., :-1, :]
        else:
            log_pi, q = self._evaluate(states)
            with torch.no_grad():
                next_value = expectation(*self._evaluate(following))
        with torch.no_grad():
            average = self._distribution(states.select(*self.actor_network.in_keys), average=True)
            log_average = self._log_policy(average)
            (behaviour,) = self._statistics(batch, log_pi)
            key = self.tensor_keys.behaviour
            if is_probability(key):
                self._require_written(key, behaviour.sum(-1), rows)
            log_mu = log_probabilities(behaviour, key)
        key = self.tensor_keys.action
        taken = action_index(
            require_entry("ACERLoss", batch, key, WRITTEN_BY_POLICY),
            tensordict.batch_size,
            log_pi.shape[-1],
            name="ACERLoss",
            key=key,
            valid=rows.valid,
        )
        q_taken = q.gather(-1, taken)
        with torch.no_grad():
            q_ret = self._returns(rows, log_pi.gather(-1, taken), log_mu.gather(-1, taken), q_taken, next_value)
            z, diagnostics = self._gradient(log_pi, log_mu, log_average, taken, q, q_ret)

        probability = log_pi.exp()
        # an action of probability 0 gets no gradient
        finite = log_pi.masked_fill(log_pi.isinf(), 0.0)
        phi = probability if self.statistics == "probs" else finite
        entropy = -(probability * finite).sum(-1)
        td_error = rows.fill(q_ret - q_taken)
        losses = {
            "loss_actor": -(phi * rows.fill(z)).sum(-1),
            "loss_qvalue": self.critic_coeff * td_error.square().squeeze(-1),
            "loss_entropy": -self.entropy_coeff * entropy,
        }
        return self._result(tensordict, rows, losses, {"entropy": entropy, **diagnostics}, td_error)

    def _gradient(
        self, log_pi: Tensor, log_mu: Tensor, log_average: Tensor, taken: Tensor, q: Tensor, q_ret: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute z of Eq. 12, [*B, T, A], and diagnostics [*B, T]."""
        pi, average = log_pi.exp(), log_average.exp()
        value = (pi * q).sum(-1, keepdim=True)
        advantage = q - value
        ratio = log_ratio(log_pi, log_mu)
        rho = ratio.gather(-1, taken).exp().clamp_max(self.c)
        # [1 − c / ρ(a)]_+; 1 / ρ is at least e^−40, so inf · 0 cannot occur
        beyond = (1 - self.c * _inverse(ratio)).clamp_min(0)
        if self.statistics == "probs":
            # min(c, ρ) / π(a_t) = min(c / π, 1 / μ), a form that is safe if π underflows to 0
            inverse_pi, inverse_mu = _inverse(log_pi.gather(-1, taken)), _inverse(log_mu.gather(-1, taken))
            of_taken = torch.minimum(self.c * inverse_pi, inverse_mu) * (q_ret - value)
            g = (beyond * advantage).scatter_add(-1, taken, of_taken)
            k = -log_ratio(log_average, log_pi).exp()
        else:
            g = (beyond * pi * advantage).scatter_add(-1, taken, rho * (q_ret - value))
            k = -average
            if self.statistics == "logits":
                g = g - pi * g.sum(-1, keepdim=True)
                k = pi - average
        z, active = g, torch.zeros_like(value.squeeze(-1))
        if self.trust_region:
            z, active = trust_region_projection(g, k, self.delta)
        kl = (average * (log_average - log_pi).masked_fill(average == 0, 0.0)).sum(-1)
        return z, {
            "kl": kl,
            "rho": rho.squeeze(-1),
            "bc_weight": (pi * beyond).sum(-1),
            "tr_active": active.to(pi.dtype),
        }
