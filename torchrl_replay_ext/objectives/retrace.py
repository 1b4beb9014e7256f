"""Retrace as one of TorchRL's value estimators."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch, set_skip_existing
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrl.objectives import DQNLoss, LossModule
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_replay_ext.functional import retrace
from torchrl_replay_ext.objectives.retrace_batch import TrajectoryBatch, require_entry

POLICIES = ("actor", "greedy")
NAME = "retrace"


@register_value_estimator(NAME, default_kwargs={"gamma": 0.99, "lmbda": 1.0})
class RetraceEstimator(ValueEstimatorBase):
    r"""Retrace(λ) for discrete actions: targets for Q from trajectories of another policy (Munos et al. 2016).

    With ρ_t = π(a_t|x_t) / μ(a_t|x_t) and V(x) = Σ_a π(a|x) Q(x, a) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ λ min(c, ρ_{t+1}^power) [Q^ret_{t+1} − Q(x_{t+1}, a_{t+1})] + γ V(x_{t+1})

    :func:`~torchrl_replay_ext.functional.retrace` computes it. terminated cuts the bootstrap, done cuts the trace.
    Batches are trajectories [\*B, T], replayed or not. The time dimension is the one named "time", else the last.

    ``value_estimate`` computes Q from one set of parameters: ``target_params`` if given, else the network's own.
    ``forward`` does the same, except that V(x_t) in the advantage Q^ret_t − V(x_t) is computed from ``params``. π is
    the current ``actor_network``, or the greedy policy of that Q. If ``next_value`` is given (a loss's double Q), it is
    used as V(x_{t+1}), and π is used in the traces only.

    μ(a_t|x_t) is read from "action_log_prob", the log-probability that the policy wrote when it acted; if there is no
    such entry, from the policy's logits in "logits".

    The estimator supports :class:`~torchrl.objectives.DQNLoss`, which passes it the parameters of the network that it
    trains. Other losses of TorchRL ask an estimator for V(x_{t+1}) of their own networks, or pass the parameters of
    another network; ``make_value_estimator`` and :meth:`for_loss` reject them. Pass an instance to
    ``DQNLoss.make_value_estimator``. The name "retrace" works with
    :func:`~torchrl.objectives.utils.build_value_estimator`, and with ``make_value_estimator`` of a loss that lists the
    name in its ``SUPPORTED_VALUE_ESTIMATORS``: a subclass of DQNLoss, or a loss of your own.

    A recurrent network that reads "is_init" is reset at the start of each episode in a row, also for the states
    x_{t+1}.

    Args:
        gamma: discount factor in [0, 1].
        lmbda: λ in [0, 1].
        value_network: writes "action_value" [\*B, T, A]; a :class:`~torchrl.modules.QValueActor`, or any module.
        actor_network: a :class:`~torchrl.modules.ProbabilisticActor` with a categorical distribution; not used if the
            policy is greedy.
        rho_thresh: c >= 0.
        rho_power: exponent of ρ, > 0.
        policy: π: "actor", or "greedy" in the value network.
        differentiable: whether gradients flow through the estimate; never to parameters of the networks held here.
        skip_existing: as in TorchRL's estimators: if True, an "action_value" in the batch is used as it is.
        device: as in TorchRL's estimators.
        time_dim: the dimension of time in the batch.

    The estimator reads the networks' keys, also under "next", "action" (index [\*B, T] or [\*B, T, 1], or one-hot
    [\*B, T, A]), μ, ("next", "reward" | "done" | "terminated") [\*B, T, 1], and ("collector", "mask") if present. A
    step before a masked step ends its trajectory; masked steps may hold NaN. It writes "value_target" (Q^ret) and
    "advantage", [\*B, T, 1]. ``set_keys`` changes the names. In it, ``sample_log_prob`` is μ's log-probability, and
    ``behaviour`` the logits of μ.

    :class:`~torchrl.objectives.DQNLoss` runs its network on the batch before it asks for targets. A QValueActor then
    replaces the stored actions by greedy ones, which raises an error here. Pass the QValueActor's first module,
    ``actor[0]``, which writes values only, to both the loss and the estimator. For double DQN, store a copy of the
    action instead and name it with ``set_keys(action=...)``.

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
        # also the inherited ones: TorchRL accepts only keys of the class itself
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
        differentiable: bool = False,
        skip_existing: bool | None = None,
        device: torch.device | None = None,
        time_dim: int | None = None,
    ):
        gamma, lmbda, rho_thresh, rho_power = (float(x) for x in (gamma, lmbda, rho_thresh, rho_power))
        for key, value, valid, requirement in (
            ("gamma", gamma, 0 <= gamma <= 1, "in [0, 1]"),
            ("lmbda", lmbda, 0 <= lmbda <= 1, "in [0, 1]"),
            ("rho_thresh", rho_thresh, rho_thresh >= 0, ">= 0; use math.inf to cut nothing"),
            ("rho_power", rho_power, 0 < rho_power < math.inf, "> 0 and finite"),
            ("policy", policy, policy in POLICIES, f"one of {', '.join(POLICIES)}"),
        ):
            if not valid:
                raise ValueError(f"RetraceEstimator({key}={value!r}): {key} must be {requirement}.")
        if policy == "actor" and not hasattr(actor_network, "get_dist"):
            raise TypeError(
                "RetraceEstimator: actor_network must be a ProbabilisticActor, or another ProbabilisticTensorDict"
                f"Sequential, not {type(actor_network).__name__}; use policy='greedy' for one greedy in value_network."
            )
        space = getattr(value_network, "action_space", None)
        if space in ("mult_one_hot", "binary"):
            raise ValueError(f"RetraceEstimator: value_network has actions {space!r}; there must be one of A actions.")
        super().__init__(
            value_network=value_network, differentiable=differentiable, skip_existing=skip_existing, device=device
        )
        # like value_network, not a submodule: a loss that holds this estimator must not own its parameters
        self.__dict__["actor_network"] = actor_network
        self.gamma, self.lmbda, self.rho_thresh, self.rho_power = gamma, lmbda, rho_thresh, rho_power
        self.policy, self.time_dim = policy, time_dim

    @classmethod
    def for_loss(cls, loss_module: LossModule, **hyperparams: Any) -> RetraceEstimator:
        """Make an estimator from the networks of a supported loss; the actor's parameters are those of the loss."""
        _require_supported(loss_module, f"RetraceEstimator.for_loss({type(loss_module).__name__})")
        for key, names in (
            ("value_network", ("qvalue_network", "value_network")),
            ("actor_network", ("actor_network",)),
        ):
            found = [getattr(loss_module, name, None) for name in names]
            if hyperparams.get(key) is None:
                hyperparams[key] = next((network for network in found if network is not None), None)
        params: Any = getattr(loss_module, "actor_network_params", None)
        if params is not None and hyperparams["actor_network"] is getattr(loss_module, "actor_network", None):
            # the loss keeps the parameters apart from the network
            hyperparams["actor_network"] = copy.deepcopy(hyperparams["actor_network"])
            params.to_module(hyperparams["actor_network"], preserve_module_state=False)
        return cls(**hyperparams)

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of entries."""
        # losses also pass the key of the state value, which this estimator does not write
        kwargs.pop("value", None)
        super().set_keys(**kwargs)

    @property
    def _observed(self) -> list[NestedKey]:
        """The entries of a state that the networks read."""
        keys = list(self.value_network.in_keys)
        if self.policy == "actor":
            actor: Any = self.actor_network
            keys += actor.in_keys
        return list(dict.fromkeys(keys))

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that the estimator reads."""
        keys = self.tensor_keys
        of_step = [("next", key) for key in (keys.reward, keys.done, keys.terminated, *self._observed)]
        return [unravel_key(key) for key in (*self._observed, keys.action, keys.sample_log_prob, *of_step)]

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
            tensordict: the batch.
            params: parameters of the value network for V(x_t); by default its own.
            target_params: those for Q^ret; by default ``params``.
        """
        if params is not None:
            params = params.detach()
        if target_params is None:
            target_params = params
        with self._evaluation():
            q_ret, state, q, log_pi = self._estimate(tensordict, target_params)
            if params is not target_params:
                q = self._action_values(state, params)
                log_pi = self._log_policy(state, q)
            tensordict.set(self.tensor_keys.advantage, q_ret - _expectation(log_pi, q))
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
        r"""Q^ret [\*B, T, 1] of a batch [\*B, T].

        Args:
            tensordict: the batch.
            target_params: parameters of the value network; by default its own.
            next_value: V(x_{t+1}) [\*B, T, 1]; by default of the value network.
            time_dim: the dimension of time; by default that of the estimator.
            **kwargs: not used.
        """
        self._check_action(tensordict)
        with self._evaluation():
            return self._estimate(tensordict, target_params, next_value, time_dim)[0]

    def _check_action(self, tensordict: TensorDictBase) -> None:
        """Raise an error if the network was run on the batch and wrote its own actions over those taken."""
        keys, key = self.value_network.out_keys, self.tensor_keys.action
        written = [tensordict.get(k, None) for k in keys if k != key]
        # entries of a buffer have no gradients
        if key in keys and written and all(x is not None and x.requires_grad for x in written):
            raise ValueError(
                f"RetraceEstimator: value_network, run by the loss, replaced the actions taken, {key!r}, by greedy "
                "ones. Give loss and estimator a network that writes values alone, as a QValueActor's first module "
                "does, actor[0]; or store a copy of the action and name it with set_keys(action=)."
            )

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        skip = nullcontext() if self.skip_existing is None else set_skip_existing(self.skip_existing)
        with torch.set_grad_enabled(self.differentiable), skip:
            yield

    def _estimate(
        self,
        tensordict: TensorDictBase,
        params: TensorDictBase | None,
        next_value: Tensor | None = None,
        time_dim: int | None = None,
    ) -> tuple[Tensor, TensorDictBase, Tensor, Tensor]:
        """Q^ret [*B, T, 1]; the networks' inputs for x_t; Q and log π of all actions in x_t, [*B, T, A]."""
        if not tensordict.batch_dims:
            raise RuntimeError("RetraceEstimator: the batch must have the shape [*B, T] of trajectories, not [].")
        given: Any = time_dim
        keys, dim = self.tensor_keys, int(self._get_time_dim(given, tensordict))
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"RetraceEstimator: the batch has {keys.steps_to_next_obs!r}, of transitions over several steps; "
                "store single steps, the estimator computes the returns."
            )
        existing: Any = keys.action_value if self.skip_existing else None
        read = [*self.in_keys, keys.behaviour]
        if existing is not None:
            read += [existing, unravel_key(("next", existing))]
        batch = TrajectoryBatch(tensordict, keys, dim, read)
        networks: list[Any] = [self.value_network, *([self.actor_network] if self.policy == "actor" else [])]
        state, following = batch.states(self._observed, networks, existing)
        q = self._action_values(state, params)
        log_pi = self._log_policy(state, q)
        if next_value is None:
            next_q = self._action_values(following, params)
            next_value = _expectation(self._log_policy(following, next_q), next_q)
        taken = batch.action_taken(q.shape[-1])
        q_taken = q.gather(-1, taken)
        q_ret = retrace(
            self.gamma,
            self.lmbda,
            log_pi.gather(-1, taken),
            batch.log_mu(taken, q.shape[-1]),
            q_taken,
            next_value,
            batch.reward,
            batch.done,
            batch.terminated,
            rho_thresh=self.rho_thresh,
            rho_power=self.rho_power,
            time_dim=dim,
        )
        if batch.valid is not None:
            # the loss's own next_value may be NaN in a masked step
            q_ret = torch.where(batch.valid.unsqueeze(-1), q_ret, q_taken)
        return q_ret, state, q, log_pi

    def _action_values(self, state: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        """Q of all actions, [*B, T, A]."""
        network, key = self.value_network, self.tensor_keys.action_value
        with _constant(network) if params is None else _filled(network, params):
            written = network(state.copy())
        value = require_entry(written, key, "value_network writes it; name its key with set_keys(action_value=)")
        if value.shape[:-1] != state.batch_size:
            raise ValueError(
                f"RetraceEstimator: {key!r} of value_network has shape {tuple(value.shape)}, expected one value for "
                f"each action, {(*state.batch_size, 'A')}."
            )
        return value

    def _log_policy(self, state: TensorDictBase, q: Tensor) -> Tensor:
        """Log-probabilities under π of all actions, [*B, T, A]."""
        if self.policy == "greedy":
            return torch.full_like(q, -math.inf).scatter(-1, q.argmax(-1, keepdim=True), 0.0)
        actor: Any = self.actor_network
        with _constant(actor):
            logits = getattr(actor.get_dist(state.select(*actor.in_keys)), "logits", None)
        if logits is None or logits.shape != q.shape:
            found = "no logits" if logits is None else f"logits of shape {tuple(logits.shape)}"
            raise ValueError(
                f"RetraceEstimator: actor_network's distribution has {found}, expected a categorical one over the "
                f"actions of value_network, {tuple(q.shape)}; several agents are not supported."
            )
        return logits.log_softmax(-1)


def _filled(network: nn.Module, params: TensorDictBase) -> AbstractContextManager:
    """A context in which the network has these parameters."""
    try:
        filled: Any = params.to_module(network, preserve_module_state=False)
        return filled
    except KeyError as error:
        raise ValueError(
            f"RetraceEstimator: the loss's network has no parameter {error.args[0]!r}, which value_network has; both "
            "must be the same network: one that writes values alone, as a QValueActor's first module does, actor[0]."
        ) from error


def _constant(network: nn.Module) -> AbstractContextManager:
    """A context in which no gradients reach the network's parameters."""
    if not torch.is_grad_enabled():
        return nullcontext()
    params: Any = TensorDict.from_module(network)
    return params.data.to_module(network, preserve_module_state=False)


def _expectation(log_pi: Tensor, q: Tensor) -> Tensor:
    """V [*B, T, 1]. The value of an action with probability 0 may be infinite."""
    return (log_pi.exp() * q.masked_fill(log_pi == -math.inf, 0.0)).sum(-1, keepdim=True)


def _require_supported(loss_module: nn.Module, call: str) -> None:
    """TypeError if the loss would not use Retrace's targets, or would compute them from a network it does not train."""
    if isinstance(loss_module, DQNLoss) or NAME in getattr(loss_module, "SUPPORTED_VALUE_ESTIMATORS", ()):
        return
    raise TypeError(
        f"{call}: RetraceEstimator serves DQNLoss. {type(loss_module).__name__} does not hand over target_params of a "
        "network of Q(x, .), so its targets would not depend on what it trains. Use ACERLoss or ACERContinuousLoss for "
        "an actor and a critic on trajectories, or functional.retrace of this package in a loss of your own. A loss "
        f"that hands over target_params as DQNLoss does can list {NAME!r} in its SUPPORTED_VALUE_ESTIMATORS."
    )


def _refuse_other_losses(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Called whenever a module becomes part of another: reject a RetraceEstimator in a loss that is not supported.

    TorchRL's ``make_value_estimator`` stores the instance without calling it, and DistributionalDQNLoss never calls it.
    Only this hook can reject every such loss before training.
    """
    if isinstance(submodule, RetraceEstimator) and isinstance(module, LossModule) and name == "_value_estimator":
        try:
            _require_supported(module, f"{type(module).__name__}.make_value_estimator(RetraceEstimator)")
        except TypeError:
            if not hasattr(module, name):
                # torch has removed the attribute, which was None
                object.__setattr__(module, name, None)
            raise


register_module_module_registration_hook(_refuse_other_losses)  # pyright: ignore[reportArgumentType]: None is allowed
