"""Retrace as a value estimator of TorchRL."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule, dispatch
from torch import Tensor
from torchrl.objectives.utils import register_value_estimator
from torchrl.objectives.value import ValueEstimatorBase

from torchrl_replay_ext.functional import POWER, THRESHOLD, UNIT_INTERVAL, retrace
from torchrl_replay_ext.objectives.categorical import action_index, evaluate_rows, expectation, of_all_actions
from torchrl_replay_ext.objectives.trajectory import WRITTEN_BY_POLICY, Trajectories, entries_read, require_entry

_NAME = "RetraceEstimator"


@register_value_estimator("retrace", default_kwargs={"gamma": 0.99, "lmbda": 1.0})
class RetraceEstimator(ValueEstimatorBase):
    r"""Retrace(λ) for discrete actions: targets for Q from off-policy trajectories (Munos et al. 2016).

    With ρ_t = π(a_t|x_t) / μ(a_t|x_t) and V(x) = Σ_a π(a|x) Q(x, a) (Wang et al. 2017, Eq. 5)::

        Q^ret_t = r_t + γ λ min(c, ρ_{t+1}^power) [Q^ret_{t+1} − Q(x_{t+1}, a_{t+1})] + γ V(x_{t+1})

    μ is the behaviour policy, π the target policy. :func:`~torchrl_replay_ext.functional.retrace` computes Q^ret. In a
    terminated step, V(x_{t+1}) is replaced by 0; in a done step, the correction from later steps is 0. Batches are
    trajectories [\*B, T], on-policy or replayed. The time dimension is the one named "time", else the last.

    ``value_estimate`` computes Q from one set of parameters: ``target_params`` if given, else the network's own.
    ``forward`` does the same, but it computes V(x_t) in the advantage Q^ret_t − V(x_t) from ``params``. π is the
    current ``actor_network``, or without one the greedy policy of the Q that is computed. If ``next_value`` is given,
    as by a double DQN loss, it replaces V(x_{t+1}), and only the traces use π.

    The estimator is for :class:`~torchrl.objectives.DQNLoss`, which passes the parameters of the network that it
    trains: pass an instance to ``DQNLoss.make_value_estimator``. Do not use it in other losses of TorchRL. They request
    V(x_{t+1}) of their own networks, or pass the parameters of another network, so targets would not follow the network
    that they train. Use :class:`~torchrl_replay_ext.ACERLoss` for an actor and a critic. The name "retrace" works with
    :func:`~torchrl.objectives.utils.build_value_estimator`, and with ``make_value_estimator`` of a subclass of DQNLoss
    whose ``SUPPORTED_VALUE_ESTIMATORS`` contains the name.

    A recurrent network that reads "is_init" is reset at the start of each episode in a row, also for the states
    x_{t+1}.

    Args:
        gamma: discount factor in [0, 1].
        lmbda: λ in [0, 1]. Default: 1.0.
        value_network: a TensorDictModule that writes "action_value" [\*B, T, A], such as a
            :class:`~torchrl.modules.QValueActor`.
        actor_network: π, a :class:`~torchrl.modules.ProbabilisticActor` with a categorical distribution. Default: None,
            the greedy policy of ``value_network``.
        rho_thresh: truncation c of ρ^power, >= 0; ``math.inf``: no truncation. Default: 1.0.
        rho_power: exponent of ρ, > 0. Default: 1.0.
        device: device of TorchRL's base class. Default: None, torch's default device.
        time_dim: the dimension of time in the batch. Default: None, the dimension named "time", else the last.
        shifted: see :meth:`~torchrl_replay_ext.ACERLoss.forward`; no effect if ``next_value`` is given. Default: False.

    The estimator reads the inputs of the networks, also under "next" for x_{t+1}, "action" (index [\*B, T] or
    [\*B, T, 1], or one-hot [\*B, T, A]), "action_log_prob" (log μ(a_t|x_t), which the policy wrote when it acted),
    ("next", "reward" | "done" | "terminated") [\*B, T, 1], and ("collector", "mask") if present. A step before a masked
    step ends its trajectory; masked steps may hold NaN. The estimator writes "value_target" (Q^ret) and "advantage",
    [\*B, T, 1]. ``set_keys`` changes the names: its ``sample_log_prob`` is that of "action_log_prob".

    :class:`~torchrl.objectives.DQNLoss` runs its network on the batch before it computes targets. A QValueActor then
    replaces the stored actions by greedy actions, and the estimator raises an error. Pass the first module of the
    QValueActor, ``actor[0]``, which writes values only, to both the loss and the estimator. For double DQN, store a
    copy of the action instead and set its name with ``set_keys(action=...)``.

    Raises:
        KeyError: if an entry is missing.
        TypeError: if the actor is not probabilistic.
        ValueError: if an argument is out of range, a shape is wrong, or an action is invalid.

    Examples:
        >>> from tensordict import TensorDict
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.objectives import DQNLoss, SoftUpdate
        >>> net = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        >>> loss_module = DQNLoss(net, action_space="categorical", delay_value=True)
        >>> targets = SoftUpdate(loss_module, eps=0.99)
        >>> estimator = RetraceEstimator(gamma=0.99, value_network=net)
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
        sample_log_prob: NestedKey | None = None
        action: NestedKey = "action"
        action_value: NestedKey = "action_value"
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
        device: torch.device | None = None,
        time_dim: int | None = None,
        shifted: bool = False,
    ):
        if actor_network is not None and not hasattr(actor_network, "get_dist"):
            raise TypeError(f"{_NAME}: actor_network must be a ProbabilisticActor, not {type(actor_network).__name__}.")
        super().__init__(value_network=value_network, shifted=shifted, device=device)
        self.gamma = UNIT_INTERVAL(_NAME, "gamma", gamma)
        self.lmbda = UNIT_INTERVAL(_NAME, "lmbda", lmbda)
        self.rho_thresh = THRESHOLD(_NAME, "rho_thresh", rho_thresh)
        self.rho_power = POWER(_NAME, "rho_power", rho_power)
        self.time_dim = time_dim
        # like value_network, not a submodule: a loss that holds this estimator must not own its parameters
        self.__dict__["actor_network"] = actor_network
        self._networks = [value_network] if actor_network is None else [value_network, actor_network]
        self._observed = list(dict.fromkeys(key for network in self._networks for key in network.in_keys))

    def set_keys(self, **kwargs: Any) -> None:
        """Set the names of entries; see ``RetraceEstimator.default_keys`` for the defaults."""
        # losses also pass the key of the state value, which this estimator does not use
        kwargs.pop("value", None)
        super().set_keys(**kwargs)

    @property
    def _entries(self) -> dict[NestedKey, str]:
        """The entries that the estimator reads, and the components that write them."""
        keys: Any = self.tensor_keys
        by_actor = "a ProbabilisticActor(return_log_prob=True) writes it, and the collector stores it"
        return {**entries_read(keys, self._observed, self._observed, ()), keys.sample_log_prob: by_actor}

    @property
    def in_keys(self) -> list[NestedKey]:
        """The entries that the estimator reads, except those that are optional."""
        return list(self._entries)

    @dispatch  # pyright: ignore[reportArgumentType]: it reads in_keys and out_keys of the class
    @torch.no_grad()
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
        q_ret = self.value_estimate(tensordict, params if target_params is None else target_params)
        state, _ = self._rows(tensordict).states(self._observed, self._networks)
        tensordict.set(self.tensor_keys.advantage, q_ret - expectation(*self._evaluate(state, params)))
        tensordict.set(self.tensor_keys.value_target, q_ret)
        return tensordict

    @torch.no_grad()
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
        keys: Any = self.tensor_keys
        rows = self._rows(tensordict, time_dim)
        states, evaluate = rows.states(self._observed, self._networks), partial(self._evaluate, params=target_params)
        if next_value is None:
            log_pi, q, next_value = evaluate_rows(rows, states, self._networks, evaluate, shifted=bool(self.shifted))
        else:
            log_pi, q = evaluate(states[0])
        taken = action_index(rows, keys.action, q.shape[-1])
        log_mu = rows.of_steps(keys.sample_log_prob, rows.data.get(keys.sample_log_prob), WRITTEN_BY_POLICY)
        policies, q_taken = (log_pi.gather(-1, taken), log_mu.unsqueeze(-1)), q.gather(-1, taken)
        options = {"rho_thresh": self.rho_thresh, "rho_power": self.rho_power, "time_dim": rows.time_dim}
        q_ret = retrace(self.gamma, self.lmbda, *policies, q_taken, next_value, *rows.ends, **options)
        # the loss's own next_value may be NaN in a masked step
        return q_ret if rows.valid is None else torch.where(rows.valid.unsqueeze(-1), q_ret, q_taken)

    def _rows(self, tensordict: TensorDictBase, time_dim: Any = None) -> Trajectories:
        """The batch. ValueError if a loss ran the network on it, and thereby replaced the actions taken."""
        keys = self.tensor_keys
        # entries read from a buffer do not require gradients; outputs of the network do
        value = tensordict.get(keys.action_value, None)
        if keys.action in self.value_network.out_keys and value is not None and value.requires_grad:
            raise ValueError(
                f"{_NAME}: the loss ran value_network, which replaced the actions taken, {keys.action!r}, by greedy "
                "actions. Give loss and estimator a network that writes values only, such as actor[0], the first "
                "module of a QValueActor; or store a copy of the action and set its name with set_keys(action=)."
            )
        time_dim = int(self._get_time_dim(time_dim, tensordict))
        return Trajectories(_NAME, tensordict, keys, self._entries, [keys.mask], time_dim)

    def _evaluate(self, state: TensorDictBase, params: TensorDictBase | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities under π and Q of all actions, [*B, T, A] each."""
        network, written = self.value_network, state.copy()
        replaced: Any = nullcontext() if params is None else params.to_module(network, preserve_module_state=False)
        with replaced:
            network(written)
        author = "value_network writes it; set its name with set_keys(action_value=)"
        q = require_entry(_NAME, written, self.tensor_keys.action_value, author)
        actor: Any = self.actor_network
        if actor is None:
            log_pi = torch.full_like(q, -math.inf).scatter(-1, q.argmax(-1, keepdim=True), 0.0)
        else:
            logits = getattr(actor.get_dist(state.select(*actor.in_keys)), "logits", None)
            log_pi = None if logits is None else logits.log_softmax(-1)
        return of_all_actions(_NAME, state.batch_size, log_pi, q)
