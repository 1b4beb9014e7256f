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
from tensordict.utils import expand_as_right
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torchrl.objectives import DQNLoss, LossModule
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_replay_ext.functional import retrace
from torchrl_replay_ext.objectives.categorical import action_index, log_probabilities
from torchrl_replay_ext.objectives.trajectory import blank_invalid, separate_episodes

POLICIES = ("actor", "greedy")
NAME = "retrace"
# Who is to blame if an entry is missing.
_ENVIRONMENT = "the environment writes it"


@register_value_estimator(NAME, default_kwargs={"gamma": 0.99, "lmbda": 1.0})
class RetraceEstimator(ValueEstimatorBase):
    r"""Retrace(λ) for discrete actions: targets for Q from trajectories of another policy (Munos et al. 2016).

    With ρ_t = π(a_t|x_t) / μ(a_t|x_t) and V(x) = Σ_a π(a|x) Q(x, a) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ λ min(c, ρ_{t+1}^power) [Q^ret_{t+1} − Q(x_{t+1}, a_{t+1})] + γ V(x_{t+1})

    which :func:`~torchrl_replay_ext.functional.retrace` computes: terminated cuts the bootstrap, done the trace.
    Batches are trajectories [\*B, T], replayed or not; time is their dimension named "time", else the last.

    ``value_estimate`` takes Q from one set of parameters throughout: ``target_params``, else the network's own. So does
    ``forward``, but for V(x_t) in the advantage Q^ret_t − V(x_t), which is of ``params``. π is ``actor_network`` as it
    is now, or greedy in that Q. With ``next_value`` (a loss's double Q) that is V(x_{t+1}), and only the traces ask π.

    Where to take μ(a_t|x_t) from: the log-probability that the policy wrote when it acted, under "action_log_prob"; if
    there is none, its logits under "logits".

    The estimator serves :class:`~torchrl.objectives.DQNLoss`, which hands over the parameters of the network that it
    trains. Other losses of TorchRL ask an estimator for V(x_{t+1}) of their own networks, or hand over parameters of
    another network; ``make_value_estimator`` and :meth:`for_loss` refuse them. Pass an instance to
    ``DQNLoss.make_value_estimator``. By the name "retrace", estimators are made by
    :func:`~torchrl.objectives.utils.build_value_estimator`, and by ``make_value_estimator`` of a loss that lists the
    name among its ``SUPPORTED_VALUE_ESTIMATORS``, as a subclass of DQNLoss can. A loss of your own that lists it is
    served too.

    A recurrent network that reads "is_init" starts each episode of a row anew, also among the states x_{t+1}.

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

    Read are the networks' keys, also under "next", "action" (index [\*B, T] or [\*B, T, 1], or one-hot [\*B, T, A]),
    μ, ("next", "reward" | "done" | "terminated") [\*B, T, 1], and ("collector", "mask") if there is one: a step before
    one that is masked ends its trajectory, and what a masked step holds may be NaN. Written are "value_target" (Q^ret)
    and "advantage", [\*B, T, 1]. Names can be changed by ``set_keys``; that of μ's log-probability is
    ``sample_log_prob``, of its logits ``behaviour``.

    :class:`~torchrl.objectives.DQNLoss` runs its network on the batch before it asks for targets. A QValueActor then
    replaces the actions taken by greedy ones, which is an error here: give both, loss and estimator, its first module,
    ``actor[0]``, which writes values alone; or, for double DQN, store a copy of the action and name it,
    ``set_keys(action=...)``.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if the actor is not probabilistic, or a loss is given that is not served.
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
        # all of them, as only those of the class itself are accepted
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
        # as value_network, not a part: its parameters are not those of a loss that holds this estimator
        self.__dict__["actor_network"] = actor_network
        self.gamma, self.lmbda, self.rho_thresh, self.rho_power = gamma, lmbda, rho_thresh, rho_power
        self.policy, self.time_dim = policy, time_dim

    @classmethod
    def for_loss(cls, loss_module: LossModule, **hyperparams: Any) -> RetraceEstimator:
        """Make an estimator from the networks of a loss that is served; the actor's parameters are the loss's own."""
        _require_served(loss_module, f"RetraceEstimator.for_loss({type(loss_module).__name__})")
        for key, names in (
            ("value_network", ("qvalue_network", "value_network")),
            ("actor_network", ("actor_network",)),
        ):
            found = [getattr(loss_module, name, None) for name in names]
            if hyperparams.get(key) is None:
                hyperparams[key] = next((network for network in found if network is not None), None)
        params: Any = getattr(loss_module, "actor_network_params", None)
        if params is not None and hyperparams["actor_network"] is getattr(loss_module, "actor_network", None):
            # the loss's own has no parameters
            hyperparams["actor_network"] = copy.deepcopy(hyperparams["actor_network"])
            params.to_module(hyperparams["actor_network"], preserve_module_state=False)
        return cls(**hyperparams)

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of entries."""
        # losses also name a state's value, which is not written here
        kwargs.pop("value", None)
        super().set_keys(**kwargs)

    @property
    def _observed(self) -> list[NestedKey]:
        """What the networks read of a state."""
        keys = list(self.value_network.in_keys)
        if self.policy == "actor":
            keys += self.actor_network.in_keys  # pyright: ignore[reportOptionalMemberAccess]
        return list(dict.fromkeys(keys))

    @property
    def in_keys(self) -> list[NestedKey]:
        """All entries that are read, μ's log-probability among them."""
        keys = self.tensor_keys
        of_step = [("next", key) for key in (keys.reward, keys.done, keys.terminated, *self._observed)]
        return [unravel_key(key) for key in (*self._observed, keys.action, keys.sample_log_prob, *of_step)]

    @dispatch  # pyright: ignore[reportArgumentType]
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
        # what comes from a buffer has no gradients
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
        """Q^ret [*B, T, 1]; what the networks read of x_t, and for it all Q and log π, [*B, T, A]."""
        if not tensordict.batch_dims:
            raise RuntimeError("RetraceEstimator: the batch must have the shape [*B, T] of trajectories, not [].")
        keys, dim = self.tensor_keys, int(self._get_time_dim(time_dim, tensordict))  # pyright: ignore[reportArgumentType]
        if tensordict.get(keys.steps_to_next_obs, None) is not None:
            raise ValueError(
                f"RetraceEstimator: the batch has {keys.steps_to_next_obs!r}, of transitions over several steps; the "
                "returns are made here, of single ones."
            )
        valid = self._valid(tensordict)
        read = (*self.in_keys, keys.behaviour, *self._existing)
        tensordict = blank_invalid(tensordict, read, valid)
        reward, done, terminated = self._ends(tensordict, dim, valid)
        state, following = self._states(tensordict, done, terminated, dim)
        q = self._action_values(state, params)
        log_pi = self._log_policy(state, q)
        if next_value is None:
            next_q = self._action_values(following, params)
            next_value = _expectation(self._log_policy(following, next_q), next_q)
        taken = action_index(
            self._get(tensordict, keys.action, "the collector stores what the policy chose"),
            tensordict.batch_size,
            q.shape[-1],
            name="RetraceEstimator",
            key=keys.action,
            valid=valid,
        )
        q_taken = q.gather(-1, taken)
        q_ret = retrace(
            self.gamma,
            self.lmbda,
            log_pi.gather(-1, taken),
            self._log_mu(tensordict, taken, q.shape),
            q_taken,
            next_value,
            reward,
            done,
            terminated,
            rho_thresh=self.rho_thresh,
            rho_power=self.rho_power,
            time_dim=dim,
        )
        if valid is not None:
            # the loss's own next_value may be NaN in a masked step
            q_ret = torch.where(valid.unsqueeze(-1), q_ret, q_taken)
        return q_ret, state, q, log_pi

    @property
    def _existing(self) -> list[NestedKey]:
        """Where values of all actions may be in the batch already."""
        key = self.tensor_keys.action_value
        return [key, unravel_key(("next", key))] if self.skip_existing else []

    def _valid(self, tensordict: TensorDictBase) -> Tensor | None:
        """The steps [*B, T] that are not masked; None if there is no mask."""
        mask = tensordict.get(self.tensor_keys.mask, None)
        return None if mask is None else mask.reshape(tensordict.batch_size)

    def _get(self, tensordict: TensorDictBase, key: NestedKey, blame: str) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"RetraceEstimator: the batch has no entry {unravel_key(key)!r}; {blame}.")
        return value

    def _ends(self, tensordict: TensorDictBase, time_dim: int, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rewards, done and terminated, [*B, T, 1]; a step before one that is masked is done."""
        keys, shape = self.tensor_keys, (*tensordict.batch_size, 1)
        columns = []
        for name in (keys.reward, keys.done, keys.terminated):
            value = self._get(tensordict, ("next", name), _ENVIRONMENT)
            if value.shape != shape:
                raise ValueError(
                    f"RetraceEstimator: {('next', name)!r} has shape {tuple(value.shape)}, expected {shape}; "
                    f"{_ENVIRONMENT}."
                )
            columns.append(value)
        reward, done, terminated = columns[0], columns[1].to(torch.bool), columns[2].to(torch.bool)
        if valid is not None:
            valid = valid.movedim(time_dim, 0)
            goes_on = valid & torch.cat([valid[1:], torch.ones_like(valid[:1])])
            done = done | ~goes_on.movedim(0, time_dim).unsqueeze(-1)
        return reward, done, terminated

    def _states(
        self, tensordict: TensorDictBase, done: Tensor, terminated: Tensor, time_dim: int
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """What the networks read, of x_t and x_{t+1}."""
        networks: list[Any] = [self.value_network, *([self.actor_network] if self.policy == "actor" else [])]
        written = [unravel_key(key) for network in networks for key in network.out_keys]
        last = torch.zeros_like(done.movedim(time_dim, 0))
        last[-1] = True
        ended = (done | last.movedim(0, time_dim)).squeeze(-1)
        state, following = TensorDict(batch_size=tensordict.batch_size), TensorDict(batch_size=tensordict.batch_size)
        for key in self._observed:
            blame = f"the networks read it; {_ENVIRONMENT}"
            value = self._get(tensordict, key, blame)
            behind = self._get(tensordict, unravel_key(("next", key)), blame)
            if behind.shape == value.shape and unravel_key(("next", key)) in written:
                # a hidden state: a loss that ran the network over the rows has overwritten those stored under "next"
                # with zeros, but where a trajectory ends
                behind = torch.where(expand_as_right(ended, value), behind, value.roll(-1, time_dim))
            if behind.shape == value.shape:
                # not looked at, and it may be NaN, which distributions refuse
                behind = torch.where(expand_as_right(terminated.squeeze(-1), value), value, behind)
            state.set(key, value)
            following.set(key, behind)
        separate_episodes(state, following, networks)
        if self.skip_existing:
            key = self.tensor_keys.action_value
            for part, source in ((state, tensordict), (following, tensordict.get("next"))):
                if source.get(key, None) is not None:
                    part.set(key, source.get(key))
        return state, following

    def _action_values(self, state: TensorDictBase, params: TensorDictBase | None) -> Tensor:
        """All Q, [*B, T, A]."""
        network, key = self.value_network, self.tensor_keys.action_value
        with _constant(network) if params is None else _filled(network, params):
            written = network(state.copy())
        value = self._get(written, key, "value_network writes it; name its key with set_keys(action_value=)")
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

    def _log_mu(self, tensordict: TensorDictBase, taken: Tensor, shape: torch.Size) -> Tensor:
        """Log-probability of the actions under the policy that took them, [*B, T, 1]."""
        log_prob: Any = self.tensor_keys.sample_log_prob
        behaviour = self.tensor_keys.behaviour
        for key, expected in ((log_prob, (tensordict.batch_size, taken.shape)), (behaviour, (shape,))):
            value = tensordict.get(key, None)
            if value is None:
                continue
            if value.shape not in expected:
                raise ValueError(
                    f"RetraceEstimator: {key!r} has shape {tuple(value.shape)}, expected {tuple(expected[0])}; the "
                    "policy that acted wrote it."
                )
            if key == log_prob:
                return value.reshape(taken.shape)
            return log_probabilities(value, key).gather(-1, taken)
        raise KeyError(
            f"RetraceEstimator: the batch has neither {log_prob!r} nor {behaviour!r}, the log-probability of the "
            "action or the logits of the policy that took it; the collector stores what the policy writes, and "
            "ProbabilisticActor(return_log_prob=True) writes both."
        )


def _filled(network: nn.Module, params: TensorDictBase) -> AbstractContextManager:
    """In which the network has these parameters."""
    try:
        return params.to_module(network, preserve_module_state=False)  # pyright: ignore[reportReturnType]
    except KeyError as error:
        raise ValueError(
            f"RetraceEstimator: the loss's network has no parameter {error.args[0]!r}, which value_network has; both "
            "must be the same network: one that writes values alone, as a QValueActor's first module does, actor[0]."
        ) from error


def _constant(network: nn.Module) -> AbstractContextManager:
    """In which no gradients reach the network's parameters."""
    if not torch.is_grad_enabled():
        return nullcontext()
    params: Any = TensorDict.from_module(network)
    return params.data.to_module(network, preserve_module_state=False)


def _expectation(log_pi: Tensor, q: Tensor) -> Tensor:
    """V [*B, T, 1]; the value of an action that is never chosen may be infinite."""
    return (log_pi.exp() * q.masked_fill(log_pi == -math.inf, 0.0)).sum(-1, keepdim=True)


def _require_served(loss_module: nn.Module, call: str) -> None:
    """Raise TypeError if the loss would not train on Retrace's targets, or not on its own network's."""
    if isinstance(loss_module, DQNLoss) or NAME in getattr(loss_module, "SUPPORTED_VALUE_ESTIMATORS", ()):
        return
    raise TypeError(
        f"{call}: RetraceEstimator serves DQNLoss. {type(loss_module).__name__} does not hand over target_params of a "
        "network of Q(x, .), so its targets would not depend on what it trains. Use ACERLoss or ACERContinuousLoss for "
        "an actor and a critic on trajectories, or functional.retrace of this package in a loss of your own. A loss "
        f"that hands over target_params as DQNLoss does can list {NAME!r} in its SUPPORTED_VALUE_ESTIMATORS."
    )


def _refuse_other_losses(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
    """Called whenever a module becomes part of another: refuse to become the estimator of a loss that is not served.

    TorchRL's ``make_value_estimator`` stores the instance without calling it, and DistributionalDQNLoss never calls it.
    This hook is the only place to refuse all losses before training.
    """
    if isinstance(submodule, RetraceEstimator) and isinstance(module, LossModule) and name == "_value_estimator":
        try:
            _require_served(module, f"{type(module).__name__}.make_value_estimator(RetraceEstimator)")
        except TypeError:
            if name not in module._modules:
                # torch has removed what was there: no estimator so far
                object.__setattr__(module, name, None)
            raise


register_module_module_registration_hook(_refuse_other_losses)  # pyright: ignore[reportArgumentType]
