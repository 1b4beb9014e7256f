"""Retrace as a value estimator of TorchRL."""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrl.objectives import DQNLoss, LossModule
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_replay_ext.arguments import require_bool, require_choice
from torchrl_replay_ext.functional import retrace
from torchrl_replay_ext.functional.retrace import POWER, THRESHOLD, UNIT_INTERVAL
from torchrl_replay_ext.objectives.categorical import (
    action_index,
    evaluate_rows,
    expectation,
    log_probabilities,
    of_all_actions,
)
from torchrl_replay_ext.objectives.trajectory import (
    WRITTEN_BY_POLICY,
    Trajectories,
    entries_read,
    require_entry,
    require_shape,
)

NAME = "retrace"


@register_value_estimator(NAME, default_kwargs={"gamma": 0.99, "lmbda": 1.0})
class RetraceEstimator(ValueEstimatorBase):
    r"""Retrace(λ) for discrete actions: targets for Q from off-policy trajectories (Munos et al. 2016).

    With ρ_t = π(a_t|x_t) / μ(a_t|x_t) and V(x) = Σ_a π(a|x) Q(x, a) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ λ min(c, ρ_{t+1}^power) [Q^ret_{t+1} − Q(x_{t+1}, a_{t+1})] + γ V(x_{t+1})

    μ is the behaviour policy, π the target policy. :func:`~torchrl_replay_ext.functional.retrace` computes Q^ret. In a
    terminated step, V(x_{t+1}) is replaced by 0; in a done step, the correction from later steps is 0. Batches are
    trajectories [\*B, T], on-policy or replayed. The time dimension is the one named "time", else the last.

    ``value_estimate`` computes Q from one set of parameters: ``target_params`` if given, else the network's own.
    ``forward`` does the same, but it computes V(x_t) in the advantage Q^ret_t − V(x_t) from ``params``. π is the
    current ``actor_network``, or the greedy policy of the Q that is computed. If ``next_value`` is given, as by a
    double DQN loss, it replaces V(x_{t+1}), and only the traces use π.

    μ(a_t|x_t) is read from "action_log_prob", the log-probability that the policy wrote when it acted. If the batch has
    no such entry, μ is computed from the logits of the policy in "logits".

    The estimator supports :class:`~torchrl.objectives.DQNLoss`, which passes the parameters of the network that it
    trains. Other losses of TorchRL request V(x_{t+1}) of their own networks, or pass the parameters of another network;
    ``make_value_estimator`` and :meth:`for_loss` reject them. Pass an instance to ``DQNLoss.make_value_estimator``. The
    name "retrace" works with :func:`~torchrl.objectives.utils.build_value_estimator`, and with ``make_value_estimator``
    of a loss whose ``SUPPORTED_VALUE_ESTIMATORS`` contains the name: a subclass of DQNLoss, or a loss of your own.

    A recurrent network that reads "is_init" is reset at the start of each episode in a row, also for the states
    x_{t+1}.

    Args:
        gamma: discount factor in [0, 1].
        lmbda: λ in [0, 1]. Default: 1.0.
        value_network: a TensorDictModule that writes "action_value" [\*B, T, A], such as a
            :class:`~torchrl.modules.QValueActor`.
        actor_network: π if ``policy="actor"``: a :class:`~torchrl.modules.ProbabilisticActor` with a categorical
            distribution. Required in this case. Default: None.
        rho_thresh: truncation c of ρ^power, >= 0; ``math.inf``: no truncation. Default: 1.0.
        rho_power: exponent of ρ, > 0. Default: 1.0.
        policy: π: "actor" (default), or "greedy" for the greedy policy of ``value_network``.
        device: device of TorchRL's base class. Default: None, torch's default device.
        time_dim: the dimension of time in the batch. Default: None, the dimension named "time", else the last.
        shifted: see :meth:`~torchrl_replay_ext.ACERLoss.forward`; no effect if ``next_value`` is given. Default: False.

    The estimator reads the inputs of the networks, also under "next" for x_{t+1}, "action" (index [\*B, T] or
    [\*B, T, 1], or one-hot [\*B, T, A]), μ, ("next", "reward" | "done" | "terminated") [\*B, T, 1], and
    ("collector", "mask") if present. A step before a masked step ends its trajectory; masked steps may hold NaN. The
    estimator writes "value_target" (Q^ret) and "advantage", [\*B, T, 1]. ``set_keys`` changes the names: its
    ``sample_log_prob`` is the log-probability of μ, its ``behaviour`` the logits of μ.

    :class:`~torchrl.objectives.DQNLoss` runs its network on the batch before it computes targets. A QValueActor then
    replaces the stored actions by greedy actions, and the estimator raises an error. Pass the first module of the
    QValueActor, ``actor[0]``, which writes values only, to both the loss and the estimator. For double DQN, store a
    copy of the action instead and set its name with ``set_keys(action=...)``.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if the actor is not probabilistic, or the loss is not supported.
        ValueError: if an argument is out of range, a shape is wrong, or an action is invalid.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.objectives import DQNLoss, SoftUpdate
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> loss_module = DQNLoss(net, action_space="categorical", delay_value=True)
        >>> targets = SoftUpdate(loss_module, eps=0.99)
        >>> estimator = RetraceEstimator(gamma=0.99, value_network=net, policy="greedy")
        >>> _ = loss_module.make_value_estimator(estimator)
        >>> flags = dict.fromkeys(("done", "terminated"), torch.zeros(4, 20, 1, dtype=torch.bool))
        >>> batch = TensorDict(
        ...     observation=torch.randn(4, 20, 3),
        ...     action=torch.randint(2, (4, 20)),
        ...     action_log_prob=torch.full((4, 20), 0.5).log(),
        ...     next={"observation": torch.randn(4, 20, 3), "reward": torch.ones(4, 20, 1), **flags},
        ...     batch_size=[4, 20],
        ... )
        >>> loss_module(batch)["loss"].backward()
        >>> estimator(batch)["value_target"].shape
        torch.Size([4, 20, 1])
    """

    @dataclass
    class _AcceptedKeys(ValueEstimatorBase._AcceptedKeys):
        # inherited keys are repeated, because TorchRL accepts only keys that the class itself declares
        advantage: NestedKey = "advantage"
        value_target: NestedKey = "value_target"
        reward: NestedKey = "reward"
        done: NestedKey = "done"
        terminated: NestedKey = "terminated"
        steps_to_next_obs: NestedKey = "steps_to_next_obs"
        sample_log_prob: NestedKey | None = None
        action: NestedKey = "action"
        action_value: NestedKey = "action_value"
        behaviour: NestedKey = "logits"
        mask: NestedKey = ("collector", "mask")

    default_keys = _AcceptedKeys
    tensor_keys: _AcceptedKeys
    value_network: TensorDictModule
    actor_network: ProbabilisticTensorDictSequential | None

    def __init__(
        self,
        *,
        gamma: float | Tensor,
        lmbda: float | Tensor = 1.0,
        value_network: TensorDictModule,
        actor_network: ProbabilisticTensorDictSequential | None = None,
        rho_thresh: float | Tensor = 1.0,
        rho_power: float | Tensor = 1.0,
        policy: str = "actor",
        device: torch.device | None = None,
        time_dim: int | None = None,
        shifted: bool = False,
    ):
        require_bool("RetraceEstimator", "shifted", shifted)
        if policy == "actor" and not hasattr(actor_network, "get_dist"):
            raise TypeError(
                "RetraceEstimator: actor_network must be a ProbabilisticActor or another ProbabilisticTensorDict"
                f"Sequential, not {type(actor_network).__name__}; use policy='greedy' for the greedy policy of "
                "value_network."
            )
        super().__init__(value_network=value_network, shifted=shifted, device=device)
        name = "RetraceEstimator"
        self.gamma = UNIT_INTERVAL(name, "gamma", gamma)
        self.lmbda = UNIT_INTERVAL(name, "lmbda", lmbda)
        self.rho_thresh = THRESHOLD(name, "rho_thresh", rho_thresh)
        self.rho_power = POWER(name, "rho_power", rho_power)
        self.policy = require_choice(name, "policy", policy, ("actor", "greedy"))
        # like value_network, not a submodule: a loss that holds this estimator must not own its parameters
        self.__dict__["actor_network"] = actor_network
        self.time_dim = time_dim

    @classmethod
    def for_loss(cls, loss_module: LossModule, **hyperparams: Any) -> RetraceEstimator:
        """Make an estimator from the networks of a supported loss, with the actor's parameters in the loss.

        Args:
            loss_module: a DQNLoss, or a loss whose ``SUPPORTED_VALUE_ESTIMATORS`` contains "retrace".
            **hyperparams: arguments of :class:`RetraceEstimator`. Networks that are not given are those of the loss.

        Raises:
            TypeError: if the loss is not supported.
        """
        _require_supported(loss_module, f"RetraceEstimator.for_loss({type(loss_module).__name__})")
        actor: Any = getattr(loss_module, "actor_network", None)
        value = getattr(loss_module, "qvalue_network", getattr(loss_module, "value_network", None))
        for key, network in (("value_network", value), ("actor_network", actor)):
            if hyperparams.get(key) is None:
                hyperparams[key] = network
        params: Any = getattr(loss_module, "actor_network_params", None)
        if params is not None and hyperparams["actor_network"] is actor:
            # the network of a loss holds no parameters; the loss keeps them separately
            hyperparams["actor_network"] = copy.deepcopy(actor)
            params.to_module(hyperparams["actor_network"], preserve_module_state=False)
        return cls(**hyperparams)

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of entries; see ``RetraceEstimator.default_keys`` for the defaults."""
        # losses also pass the key of the state value, which this estimator does not use
        kwargs.pop("value", None)
        super().set_keys(**kwargs)

    @property
    def _networks(self) -> list[Any]:
        """The networks that are evaluated; a list, because torch would register a module."""
        return [self.value_network, *([self.actor_network] if self.policy == "actor" else [])]

    @property
    def _observed(self) -> list[NestedKey]:
        """The inputs of the networks."""
        return list(dict.fromkeys(key for network in self._networks for key in network.in_keys))

    @property
    def _entries(self) -> dict[NestedKey, str]:
        """The entries that the estimator reads, and the components that write them."""
        keys: Any = self.tensor_keys
        return entries_read(keys, self._observed, self._observed, [keys.sample_log_prob])

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that the estimator reads, except those that are optional."""
        return list(self._entries)

    @dispatch  # pyright: ignore[reportArgumentType]: it reads in_keys and out_keys of the class
    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        params: TensorDictBase | None = None,
        target_params: TensorDictBase | None = None,
    ) -> TensorDictBase:
        r"""Write targets and advantages, [\*B, T, 1], to a batch [\*B, T].

        Args:
            tensordict: the batch, changed in place.
            params: parameters of the value network for V(x_t). Default: None, the network's own.
            target_params: parameters of the value network for Q^ret. Default: None, ``params``.

        Returns:
            The batch.
        """
        if target_params is None:
            target_params = params
        q_ret, state, policy_and_values = self._estimate(tensordict, target_params)
        if params is not target_params:
            policy_and_values = self._evaluate(state, params)
        tensordict.set(self.tensor_keys.advantage, q_ret - expectation(*policy_and_values))
        tensordict.set(self.tensor_keys.value_target, q_ret)
        return tensordict

    def value_estimate(
        self,
        tensordict: TensorDictBase,
        target_params: TensorDictBase | None = None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        r"""Compute Q^ret of a batch [\*B, T].

        Args:
            tensordict: the batch.
            target_params: parameters of the value network. Default: None, the network's own.
            next_value: V(x_{t+1}) [\*B, T, 1]. Default: None, computed from the value network and π.
            time_dim: the dimension of time. Default: None, that of the estimator.
            **kwargs: ignored.

        Returns:
            Q^ret, [\*B, T, 1].
        """
        # a loss may have run the network on the batch, and thereby replaced the actions taken
        keys, key = self.value_network.out_keys, self.tensor_keys.action
        written = [tensordict.get(k, None) for k in keys if k != key]
        # entries read from a buffer do not require gradients; outputs of the network do
        if key in keys and written and all(x is not None and x.requires_grad for x in written):
            raise ValueError(
                f"RetraceEstimator: the loss ran value_network, which replaced the actions taken, {key!r}, by greedy "
                "actions. Give loss and estimator a network that writes values only, such as actor[0], the first "
                "module of a QValueActor; or store a copy of the action and set its name with set_keys(action=)."
            )
        return self._estimate(tensordict, target_params, next_value, time_dim)[0]

    @torch.no_grad()
    def _estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
    ) -> tuple[Tensor, TensorDictBase, tuple[Tensor, Tensor]]:
        """Compute Q^ret [*B, T, 1], the inputs of the networks for x_t, and log π and Q for x_t, [*B, T, A] each."""
        given: Any = time_dim
        keys: Any = self.tensor_keys
        dim, entries = int(self._get_time_dim(given, tensordict)), self._entries
        log_prob, logits = keys.sample_log_prob, keys.behaviour
        if tensordict.get(log_prob, None) is None:
            del entries[log_prob]
            entries[logits] = (
                f"nor {log_prob!r}, the log-probability of the action; a ProbabilisticActor(return_log_prob=True) "
                "writes both, and the collector stores them"
            )
        rows = Trajectories("RetraceEstimator", tensordict, keys, entries, [keys.mask], dim)
        networks = self._networks
        states = rows.states(self._observed, networks)
        evaluate = partial(self._evaluate, params=params)
        if next_value is None:
            log_pi, q, next_value = evaluate_rows(rows, states, networks, evaluate, shifted=bool(self.shifted))
        else:
            log_pi, q = evaluate(states[0])
        taken = action_index(rows, keys.action, q.shape[-1])
        q_taken = q.gather(-1, taken)
        if log_prob in entries:
            log_mu = rows.data.get(log_prob)
            require_shape(rows.owner, log_prob, log_mu, rows.shape, taken.shape, author=WRITTEN_BY_POLICY)
        else:
            mu = rows.data.get(logits)
            require_shape(rows.owner, logits, mu, q.shape, author=WRITTEN_BY_POLICY)
            log_mu = log_probabilities(mu, logits).gather(-1, taken)
        options = {"rho_thresh": self.rho_thresh, "rho_power": self.rho_power, "time_dim": dim}
        policies = log_pi.gather(-1, taken), log_mu.reshape(taken.shape)
        q_ret = retrace(self.gamma, self.lmbda, *policies, q_taken, next_value, *rows.ends, **options)
        if rows.valid is not None:
            # the loss's own next_value may be NaN in a masked step
            q_ret = torch.where(rows.valid.unsqueeze(-1), q_ret, q_taken)
        return q_ret, states[0], (log_pi, q)

    @torch.no_grad()
    def _evaluate(self, state: TensorDictBase, params: TensorDictBase | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities under π and Q of all actions, [*B, T, A] each."""
        network = self.value_network
        with nullcontext() if params is None else _filled(network, params):
            written = network(state.copy())
        author = "value_network writes it; set its name with set_keys(action_value=)"
        q = require_entry("RetraceEstimator", written, self.tensor_keys.action_value, author)
        if self.policy == "greedy":
            log_pi = torch.full_like(q, -math.inf).scatter(-1, q.argmax(-1, keepdim=True), 0.0)
        else:
            actor: Any = self.actor_network
            logits = getattr(actor.get_dist(state.select(*actor.in_keys)), "logits", None)
            log_pi = None if logits is None else logits.log_softmax(-1)
        return of_all_actions("RetraceEstimator", state.batch_size, log_pi, q)


def _filled(network: nn.Module, params: TensorDictBase) -> AbstractContextManager:
    """A context in which the network uses the parameters ``params``."""
    try:
        filled: Any = params.to_module(network, preserve_module_state=False)
        return filled
    except KeyError as error:
        raise ValueError(
            f"RetraceEstimator: the network of the loss has no parameter {error.args[0]!r}, but value_network has. "
            "Loss and estimator need the same network, one that writes values only, such as actor[0], the first module "
            "of a QValueActor."
        ) from error


def _require_supported(loss_module: nn.Module, call: str) -> None:
    """Raise TypeError unless a loss trains the network whose parameters it passes for the targets, as DQNLoss does."""
    if isinstance(loss_module, DQNLoss) or NAME in getattr(loss_module, "SUPPORTED_VALUE_ESTIMATORS", ()):
        return
    raise TypeError(
        f"{call}: RetraceEstimator supports DQNLoss. {type(loss_module).__name__} does not pass target_params of a "
        "network of Q(x, .), so its targets would not depend on the network that it trains. Use ACERLoss or "
        "ACERContinuousLoss for an actor and a critic on trajectories, or functional.retrace of this package in a loss "
        f"of your own. A loss that passes target_params as DQNLoss does can list {NAME!r} in its "
        "SUPPORTED_VALUE_ESTIMATORS."
    )


def _refuse_other_losses(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Reject a RetraceEstimator in an unsupported loss; torch calls this hook whenever a submodule is registered.

    TorchRL's ``make_value_estimator`` stores the instance without calling it, and DistributionalDQNLoss never calls it.
    So only this hook can reject every unsupported loss before training.
    """
    if isinstance(submodule, RetraceEstimator) and isinstance(module, LossModule) and name == "_value_estimator":
        try:
            _require_supported(module, f"{type(module).__name__}.make_value_estimator(RetraceEstimator)")
        except TypeError:
            if not hasattr(module, name):
                # torch has removed the attribute; restore its value, None
                object.__setattr__(module, name, None)
            raise


register_module_module_registration_hook(_refuse_other_losses)  # pyright: ignore[reportArgumentType]: None is allowed
