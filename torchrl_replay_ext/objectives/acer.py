"""The loss of ACER for discrete actions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, TensorDictModuleBase, TensorDictParams
from torch import Tensor
from torch.distributions import Categorical, OneHotCategorical

from torchrl_replay_ext.arguments import key_path, require_choice
from torchrl_replay_ext.functional import log_ratio
from torchrl_replay_ext.objectives.acer_base import ACERBase, Check, Terms, inverse
from torchrl_replay_ext.objectives.categorical import (
    action_index,
    evaluate_rows,
    is_probability,
    log_probabilities,
    of_all_actions,
)
from torchrl_replay_ext.objectives.trajectory import Trajectories, entries_read, require_entry

Statistics = Literal["probs", "logits", "log_probs"]
# TorchRL's own categorical distributions are subclasses of these.
_DISTRIBUTIONS = (Categorical, OneHotCategorical)
# Their arguments that do not change the probabilities.
_WITHOUT_EFFECT = {"grad_method", "validate_args"}


class ACERLoss(ACERBase):
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
        >>> from tensordict import TensorDict
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
    class _AcceptedKeys(ACERBase._AcceptedKeys):
        action_value: NestedKey = "action_value"
        behaviour: NestedKey = "logits"

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    qvalue_network: TensorDictModule
    qvalue_network_params: TensorDictParams
    target_qvalue_network_params: TensorDictParams
    statistics: Statistics
    _CRITIC = "qvalue_network"
    _ARGUMENTS: ClassVar[dict[str, Check]] = {
        **ACERBase._ARGUMENTS,
        "statistics": partial(require_choice, choices=get_args(Statistics)),
    }

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
        super().__init__(locals())
        last = actor_network[-1]
        kind = getattr(last, "distribution_class", None)
        known = isinstance(kind, type) and issubclass(kind, _DISTRIBUTIONS)
        # the names of the distribution's arguments; without a mapping, these are the last parts of the keys
        names = [key_path(key)[-1] for key in getattr(last, "dist_keys", last.in_keys)]
        # any other argument, such as an action mask, would change the probabilities
        others = sorted({*(getattr(last, "distribution_kwargs", None) or ())} - _WITHOUT_EFFECT)
        if not known or names not in (["logits"], ["probs"]) or others:
            raise ValueError(
                f"ACERLoss: the actor's distribution must be Categorical or OneHotCategorical and read 'logits' or "
                f"'probs' alone, not {kind} that reads {names} from {list(last.in_keys)} and has the arguments "
                f"{others}, since others may change its probabilities. To read an entry with another name, pass "
                "in_keys={'logits': <entry>} to the actor; to exclude actions, let the network write their logits as "
                "-inf."
            )
        self._parameter, self._parameter_name = last.in_keys[0], names[0]
        self.set_keys(behaviour=behaviour_key)

    @property
    def _observed(self) -> list[NestedKey]:
        """The inputs of the networks."""
        of_critic = [key for key in self.qvalue_network.in_keys if key not in self.actor_network.out_keys]
        return list(dict.fromkeys([*self.actor_network.in_keys, *of_critic]))

    @property
    def _entries(self) -> dict[NestedKey, str]:
        return entries_read(self.tensor_keys, self._observed, self._observed, [self.tensor_keys.behaviour])

    def _log_policy(self, state: TensorDictBase) -> Tensor:
        """Log-probabilities of all actions [*B, T, A] from the distribution's parameters."""
        return log_probabilities(state.get(self._parameter), self._parameter_name)

    def _evaluate(self, state: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values of all actions, [*B, T, A]."""
        state = self._distribution(state)
        with self._params("qvalue_network"):
            state = self.qvalue_network(state)
        author = "qvalue_network writes it; set its name with set_keys(action_value=)"
        q = require_entry("ACERLoss", state, self.tensor_keys.action_value, author)
        return of_all_actions("ACERLoss", state.batch_size, self._log_policy(state), q)

    def _terms(self, rows: Trajectories, shifted: bool) -> Terms:
        networks, keys = (self.actor_network, self.qvalue_network), self.tensor_keys
        states = rows.states(self._observed, networks)
        log_pi, q, next_value = evaluate_rows(rows, states, networks, self._evaluate, shifted=shifted)
        with torch.no_grad():
            average = self._distribution(states[0].select(*self.actor_network.in_keys), average=True)
            log_average = self._log_policy(average)
            behaviour = self._stored(rows, keys.behaviour, log_pi)
            if is_probability(keys.behaviour):
                self._require_written(keys.behaviour, behaviour.sum(-1), rows)
            log_mu = log_probabilities(behaviour, keys.behaviour)
        taken = action_index(rows, keys.action, log_pi.shape[-1])
        q_taken = q.gather(-1, taken)
        probability = log_pi.exp()
        # an action of probability 0 gets no gradient
        finite = log_pi.masked_fill(log_pi.isinf(), 0.0)
        with torch.no_grad():
            log_pi_taken, log_mu_taken = log_pi.gather(-1, taken), log_mu.gather(-1, taken)
            q_ret = self._returns(rows, log_pi_taken, log_mu_taken, q_taken, next_value)  # Eq. 5
            pi, pi_average = probability.detach(), log_average.exp()
            value = (pi * q).sum(-1, keepdim=True)
            rho, beyond = self._weights(log_pi, log_mu)
            rho = rho.gather(-1, taken)
            # g of Eq. 10, and k of Eq. 12
            if self.statistics == "probs":
                # min(c, ρ) / π(a_t) = min(c / π, 1 / μ), a form that is safe if π underflows to 0
                weight = torch.minimum(self.c * inverse(log_pi_taken), inverse(log_mu_taken))
                g = (beyond * (q - value)).scatter_add(-1, taken, weight * (q_ret - value))
                k = -log_ratio(log_average, log_pi).exp()
            else:
                g = (beyond * pi * (q - value)).scatter_add(-1, taken, rho * (q_ret - value))
                k = -pi_average
                if self.statistics == "logits":
                    g = g - pi * g.sum(-1, keepdim=True)
                    k = pi + k
            kl = (pi_average * (log_average - log_pi).masked_fill(pi_average == 0, 0.0)).sum(-1)
        return Terms(
            phi=probability if self.statistics == "probs" else finite,
            g=g,
            k=k,
            kl=kl,
            entropy=-(probability * finite).sum(-1),
            rho=rho,
            bc_weight=(pi * beyond).sum(-1),
            q_error=q_ret - q_taken,  # Eq. 6
        )
