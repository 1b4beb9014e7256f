"""The base class of the ACER losses, and helpers for batches of trajectories."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, unravel_key
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictParams
from tensordict.utils import expand_as_right
from torch import Tensor, nn
from torchrl.objectives import LossModule

from torchrl_replay_ext.arguments import key_path, require_bool, require_choice, require_finite, require_number
from torchrl_replay_ext.compilation import raise_if, values_can_be_read
from torchrl_replay_ext.functional import importance_sampling_return, retrace
from torchrl_replay_ext.objectives.shifted import ShiftedStates, require_shiftable

# The component that should have written an entry, for error messages.
WRITTEN_BY_POLICY = "the policy writes it, and the collector stores it"
WRITTEN_BY_ENVIRONMENT = "the environment writes it"
READ_BY_NETWORKS = f"the networks read it; {WRITTEN_BY_ENVIRONMENT}"
_WRITTEN_BY_SAMPLER = "the sampler writes it"


def require_entry(owner: str, tensordict: TensorDictBase, key: NestedKey, written_by: str) -> Tensor:
    """Return the entry ``key``; if it is missing, the KeyError of ``owner`` names the component that writes it."""
    value = tensordict.get(key, None)
    if value is None:
        raise KeyError(f"{owner}: the batch has no entry {unravel_key(key)!r}; {written_by}.")
    return value


def of_steps(owner: str, value: Tensor, key: NestedKey, shape: torch.Size) -> Tensor:
    """Reshape an entry of the sampler from [*B, T] or [*B, T, 1] to [*B, T], ``shape``."""
    if value.shape not in (shape, (*shape, 1)):
        raise ValueError(
            f"{owner}: {key!r} has shape {tuple(value.shape)}, expected {tuple(shape)}; {_WRITTEN_BY_SAMPLER}."
        )
    return value.reshape(shape)


def read_masks(owner: str, tensordict: TensorDictBase, keys: Iterable[NestedKey]) -> Tensor | None:
    """True for steps that no mask excludes, bool [*B, T]; None if the batch has none of the masks ``keys``."""
    valid = None
    for key in keys:
        mask = tensordict.get(key, None)
        if mask is not None:
            if mask.dtype != torch.bool:
                raise TypeError(f"{owner}: {key!r} is {mask.dtype}, but must be bool; {_WRITTEN_BY_SAMPLER}.")
            mask = of_steps(owner, mask, key, tensordict.batch_size)
            valid = mask if valid is None else valid & mask
    return valid


def require_single_steps(owner: str, tensordict: TensorDictBase, key: NestedKey = "steps_to_next_obs") -> None:
    """Raise ValueError if the transitions of a batch span several steps, so that rewards would count repeatedly."""
    if tensordict.get(key, None) is not None:
        raise ValueError(
            f"{owner}: the batch has {key!r}, so its transitions span several steps; store single steps, without a "
            "multi-step transform."
        )


def blank_invalid(tensordict: TensorDictBase, keys: Iterable[NestedKey], valid: Tensor | None) -> TensorDictBase:
    r"""Copy the entries ``keys`` of a batch [\*B, T], with floating-point values set to 0 in invalid steps.

    A network must not read a NaN there: the loss masks the output, but the gradient of the weights is 0 · NaN = NaN.
    Missing entries are skipped.

    Args:
        tensordict: the batch.
        keys: the entries to copy.
        valid: bool [\*B, T]. None: all steps are valid, and the batch itself is returned.
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
    """Set "is_init" of the next states where an episode begins, so that recurrent networks are reset there.

    In a row of next states, x_{t+1} of a new episode directly follows x_{t+1} of the previous episode. A network that
    runs over the row must reset its hidden state there, as TorchRL's estimators do. A network that is called step by
    step reads the stored hidden state, so it must not be reset.

    Args:
        state: the inputs of the networks for x_t, [*B, T].
        following: their inputs for x_{t+1}, [*B, T]; "is_init" is changed in place.
        networks: the networks that read them.
    """
    modules = [module for network in networks for module in network.modules() if hasattr(module, "recurrent_mode")]
    if modules and not any(module.recurrent_mode for module in modules):
        return
    for key in state.keys(include_nested=True, leaves_only=True):
        if key_path(key)[-1] == "is_init":
            following.set(key, following.get(key) | state.get(key))


@dataclass(kw_only=True)
class Trajectories:
    """Rewards and ends of the trajectories of a batch.

    Args:
        reward: [*B, T, 1].
        done: bool [*B, T, 1], True also before an invalid step.
        terminated: bool [*B, T, 1].
        valid: bool [*B, T]; None if all steps are valid.
        time_dim: the dimension of time.
    """

    reward: Tensor
    done: Tensor
    terminated: Tensor
    valid: Tensor | None
    time_dim: int

    @classmethod
    def read(
        cls, owner: str, tensordict: TensorDictBase, keys: Any, valid: Tensor | None, time_dim: int
    ) -> Trajectories:
        """Read the rewards and ends of a batch.

        Args:
            owner: the class that error messages name.
            tensordict: the batch.
            keys: the names of the entries, ``tensor_keys`` of a loss or estimator.
            valid: bool [*B, T]; None if all steps are valid.
            time_dim: the dimension of time.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if an entry has not the shape [*B, T, 1].
        """
        shape, columns = (*tensordict.batch_size, 1), []
        for name in (keys.reward, keys.done, keys.terminated):
            key = unravel_key(("next", name))
            value = require_entry(owner, tensordict, key, WRITTEN_BY_ENVIRONMENT)
            if value.shape != shape:
                raise ValueError(
                    f"{owner}: {key!r} has shape {tuple(value.shape)}, expected {shape}; {WRITTEN_BY_ENVIRONMENT}."
                )
            columns.append(value)
        reward, done, terminated = columns[0], columns[1].to(torch.bool), columns[2].to(torch.bool)
        if valid is not None:
            in_time = valid.movedim(time_dim, 0)
            goes_on = in_time & torch.cat([in_time[1:], torch.ones_like(in_time[:1])])
            done = done | ~goes_on.movedim(0, time_dim).unsqueeze(-1)
        return cls(reward=reward, done=done, terminated=terminated, valid=valid, time_dim=time_dim)

    def shift(
        self,
        owner: str,
        state: TensorDictBase,
        following: TensorDictBase,
        observed: Iterable[NestedKey],
        networks: Iterable[nn.Module],
    ) -> ShiftedStates:
        """Find the next states that are not states of the batch.

        Args:
            owner: the class that error messages name.
            state: the inputs of the networks for x_t, [*B, T].
            following: their inputs for x_{t+1}, [*B, T].
            observed: the entries that the networks read for x_{t+1}.
            networks: the networks that evaluate next states.
        """
        observed = [*observed]
        require_shiftable(owner, networks, observed)
        ends = self.done, self.terminated
        return ShiftedStates(owner, ends, self.valid, state, following, observed, time_dim=self.time_dim)

    def fill(self, x: Tensor) -> Tensor:
        """Replace ``x`` [*B, T, n] by 0 in invalid steps."""
        return x if self.valid is None else x.masked_fill(~self.valid.unsqueeze(-1), 0.0)

    def mean(self, x: Tensor) -> Tensor:
        """Mean of ``x`` [*B, T] over the valid steps, detached."""
        x = x.detach()
        if self.valid is None:
            return x.mean()
        return x.masked_fill(~self.valid, 0.0).sum() / self.valid.sum().clamp_min(1)


# Return the value of an attribute; the arguments are the class, the name, and the value that is assigned.
Check = Callable[[str, str, Any], Any]


def _number(valid: Callable[[float], bool], rule: str) -> Check:
    """Make the check of a number; ``rule`` completes "must be" in its error."""
    return partial(require_number, valid=valid, rule=rule)


def _reduction(owner: str, name: str, value: Any) -> str:
    return require_choice(owner, name, "mean" if value is None else value, ("mean", "sum", "none"))


def coefficient(owner: str, name: str, value: Any) -> float | Tensor:
    """Check the weight of a loss; a real tensor stays a tensor, whose value is not read on an accelerator."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return require_finite(owner, name, value)
    if value.numel() != 1 or values_can_be_read(value):
        require_finite(owner, name, value)
    return value


class TrajectoryLoss(LossModule):
    """Abstract loss on trajectories with a stored behaviour policy: TensorDicts of shape [*B, T], time last.

    The average policy is ``target_actor_network_params``; a :class:`~torchrl.objectives.SoftUpdate` updates it.

    Subclasses list the checks of their arguments in ``_ARGUMENTS``, and the weights of their losses, which are buffers,
    in TorchRL's ``_schedulable_buffers``.
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
        "gamma": _number(lambda x: 0 <= x <= 1, "in [0, 1]"),
        "lmbda": _number(lambda x: 0 <= x <= 1, "in [0, 1]"),
        "c": _number(lambda x: x >= 0, ">= 0; use math.inf for importance sampling without truncation"),
        "delta": _number(lambda x: x >= 0, ">= 0; use trust_region=False for no trust region"),
        "retrace_thresh": _number(lambda x: x >= 0, ">= 0"),
        "trust_region": require_bool,
        "returns": partial(require_choice, choices=("retrace", "importance_sampling")),
        "reduction": _reduction,
        "entropy_coeff": coefficient,
        "critic_coeff": coefficient,
    }
    _LOSSES: tuple[str, ...]
    _DIAGNOSTICS = ("entropy", "kl", "rho", "bc_weight", "tr_active")

    def __init__(self, actor_network: ProbabilisticTensorDictSequential, critic: tuple[str, nn.Module], **arguments):
        name = type(self).__name__
        super().__init__()
        if not isinstance(actor_network, ProbabilisticTensorDictSequential):
            raise TypeError(
                f"{name}: actor_network must be a ProbabilisticActor or another ProbabilisticTensorDictSequential, "
                f"not {type(actor_network).__name__}."
            )
        for key, value in arguments.items():
            self._ARGUMENTS[key](name, key, value)
        self.convert_to_functional(actor_network, "actor_network", create_target_params=True)
        # without ``compare_against``: parameters that the two networks share get the gradients of both losses
        self.convert_to_functional(critic[1], critic[0])  # pyright: ignore[reportArgumentType]: any module will do
        self._network_names = ("actor_network", critic[0])
        self.out_keys = [*self._LOSSES, *self._DIAGNOSTICS]
        device = next(self.parameters()).device
        for key, value in arguments.items():
            if key in self._all_schedulable_buffers:
                self.register_coeff_buffer(key, self._ARGUMENTS[key](name, key, value), device=device)
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
        for name in self._network_names:
            network: nn.Module = getattr(self, name)
            with self._params(name):
                for module in network.modules():
                    reset = getattr(module, "reset_parameters", None)
                    if reset is not None:
                        reset()
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
    def _behaviour(self) -> tuple[NestedKey, ...]:
        """The entries with the statistics of the behaviour policy."""

    @property
    @abstractmethod
    def _read(self) -> tuple[list[NestedKey], list[NestedKey]]:
        """The entries that the networks read for x_t, and those that they read for x_{t+1}."""

    @property
    def in_keys(self) -> list[NestedKey]:
        """All entries that the loss reads, except those that are optional."""
        keys, (of_state, of_following) = self.tensor_keys, self._read
        of_step = [("next", key) for key in (keys.reward, keys.done, keys.terminated, *of_following)]
        return list(dict.fromkeys(unravel_key(k) for k in (*of_state, keys.action, *self._behaviour, *of_step)))

    @in_keys.setter
    def in_keys(self, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__}.in_keys: use set_keys().")

    def _params(self, network: str, *, average: bool = False) -> AbstractContextManager:
        params: TensorDictParams = getattr(self, f"target_{network}_params" if average else f"{network}_params")
        # with preserve_module_state=True, parameters that require gradients would replace buffers of the average policy
        return params.to_module(getattr(self, network), preserve_module_state=False)

    def _distribution(self, state: TensorDictBase, *, average: bool = False) -> TensorDictBase:
        """Add the parameters of the policy's distribution to ``state``."""
        with self._params("actor_network", average=average):
            return self.actor_network.get_dist_params(state)  # pyright: ignore[reportReturnType]: annotated as a tuple

    def _statistics(self, tensordict: TensorDictBase, policy: Tensor) -> list[Tensor]:
        """The stored statistics of the behaviour policy, detached, in the shape of those of the current ``policy``."""
        result = []
        for key in self._behaviour:
            value = require_entry(
                type(self).__name__,
                tensordict,
                key,
                f"{WRITTEN_BY_POLICY}; let it store the parameters of the distribution",
            )
            if value.shape != policy.shape:
                raise ValueError(
                    f"{type(self).__name__}: {key!r} of the behaviour policy has shape {tuple(value.shape)}, expected "
                    f"{tuple(policy.shape)}, as for the current policy; {WRITTEN_BY_POLICY}."
                )
            result.append(value.detach().to(torch.promote_types(value.dtype, policy.dtype)))
        return result

    def _require_written(self, key: NestedKey, positive: Tensor, rows: Trajectories) -> None:
        """Raise ValueError if ``positive`` [*B, T] is not > 0 in a valid step, except on accelerators and in graphs."""
        missing = positive <= 0 if rows.valid is None else (positive <= 0) & rows.valid
        raise_if(
            missing.any,
            lambda: ValueError(
                f"{type(self).__name__}: {key!r} of the behaviour policy is not > 0 in {int(missing.sum())} steps, so "
                "no policy has written it. A collector with init_random_frames= stores zeros for its random actions: "
                "leave init_random_frames out, or do not store these steps."
            ),
            skip_on=missing,
        )

    def _trajectories(self, tensordict: TensorDictBase) -> Trajectories:
        """Read rewards, ends and mask of a batch; a step before an invalid step ends its trajectory."""
        name = type(self).__name__
        if not tensordict.batch_dims:
            raise ValueError(f"{name}: the batch must have the shape [*B, T] of trajectories, not [].")
        require_single_steps(name, tensordict)
        valid = read_masks(name, tensordict, self._loss_mask_keys())
        return Trajectories.read(name, tensordict, self.tensor_keys, valid, tensordict.batch_dims - 1)

    def _shift(
        self, rows: Trajectories, states: TensorDictBase, following: TensorDictBase, networks: Iterable[nn.Module]
    ) -> ShiftedStates:
        """Find the next states that are not states of the batch; for the arguments see :meth:`Trajectories.shift`."""
        return rows.shift(type(self).__name__, states, following, self._read[1], networks)

    def _returns(
        self, rows: Trajectories, log_pi: Tensor, log_mu: Tensor, q: Tensor, next_value: Tensor, power: float = 1.0
    ) -> Tensor:
        """Estimate Q^π of the actions taken; arguments and result have shape [*B, T, 1]."""
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
        """Reduce losses [*B, T], average diagnostics [*B, T], and write the squared TD errors to the batch."""
        weights = self._maybe_get_priority_weight(tensordict)
        if weights is not None:
            key = self.tensor_keys.priority_weight
            weights = of_steps(type(self).__name__, weights, key, tensordict.batch_size)
        tensordict.set(self.tensor_keys.priority, td_error.detach().square().squeeze(-1))
        result = {key: self._reduced(value, tensordict, rows, weights) for key, value in losses.items()}
        result |= {key: rows.mean(value) for key, value in diagnostics.items()}
        self._clear_weakrefs(tensordict, *(f"{t}{n}_params" for n in self._network_names for t in ("", "target_")))
        return TensorDict(result)

    def _reduced(self, loss: Tensor, tensordict: TensorDictBase, rows: Trajectories, weights: Tensor | None) -> Tensor:
        """Reduce ``loss`` [*B, T] over the valid steps with ``weights`` [*B, T]."""
        if weights is None or rows.valid is None or self.reduction != "mean":
            return self._reduce_loss(loss, tensordict, weights=weights)
        # TorchRL divides by the sum of the weights, which is 0 if no step is valid
        weights = weights.masked_fill(~rows.valid, 0.0)
        total = weights.sum()
        return (loss.masked_fill(~rows.valid, 0.0) * weights).sum() / torch.where(total > 0, total, 1.0)
