"""One batch for the critic, another for the actor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase, is_tensor_collection
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor
from torchrl.data import (
    Binary,
    Categorical,
    Composite,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import ImmutableDatasetWriter, PrioritizedSampler, RandomSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_replay_ext.compilation import is_traced
from torchrl_replay_ext.core.event_spec import is_key
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE
from torchrl_replay_ext.functional.gaussian import Covariance, _as_scale, divergence, require_noise_scale
from torchrl_replay_ext.policies import inside_bounds, is_squashed
from torchrl_replay_ext.samplers.base import ShowsArguments

_GROUP = 16
# Actor batches that are recognised if they come back as the critic's.
_REMEMBERED = 32

Score = Literal["kl", "mse", "logprob"]
Granularity = Literal["batch", "group", "transition"]


def _delegated(name: str) -> property:
    """An attribute of the critic's sampler."""

    def get(self: DecoupledSampler) -> Any:
        return getattr(self.critic_sampler, name)

    def set_(self: DecoupledSampler, value: Any) -> None:
        setattr(self.critic_sampler, name, value)

    return property(get, set_, doc=f"``{name}`` of the critic's sampler.")


@PrioritizedSampler.register
class DecoupledSampler(ShowsArguments, Sampler):
    r"""Critic and actor learn from batches of their own (DPER, arXiv 2512.05320).

    ``rb.sample()`` is the critic's batch, drawn by any sampler: prioritized, from event tables, or uniform. The actor's
    comes from :meth:`actor_buffer`: of K candidate batches, drawn uniformly, the one whose actions are nearest to the
    current policy's. With u the stored and π(s) the policy's actions, each candidate is scored by ::

        D_KL(N(μ, Σ) ‖ N(0, σ² I)),     μ, Σ the mean and covariance of u − π(s) over the candidate

    and the smallest score wins; the first of equal ones. The source's σ is the exploration noise's variance; here
    ``noise_scale`` is its standard deviation. There are no importance weights on the actor's batch.

    Only observations and actions of the K·B rows are read, with one call of the policy; then the rows that were chosen
    are read in full. They carry ``"score"``, [B], and ``"candidate_scores"``, [B, K]. Sample-time transforms of the
    buffer are applied before the policy sees the data.

    What the source leaves open:

    * **Stochastic policies** (a policy that writes ``"loc"`` and ``"scale"``): z = (u − loc) / scale is scored against
      N(0, I), for a tanh-normal policy with u = atanh(action). ``noise_scale`` has no part in it.
    * **Correlated noise**: ``noise_scale`` may be a covariance matrix; for Ornstein-Uhlenbeck noise, pass
      :func:`~torchrl_replay_ext.functional.ornstein_uhlenbeck_scale`.
    * **Why K shows no trend**: the means of whole batches are all much alike, so that choosing among them changes
      on-policyness by a few percent only. ``granularity="group"`` chooses each group of 16 rows among K,
      ``"transition"`` the nearest B of all K·B rows, by \|z\|² (the KL needs more than one row).

    The policy is held by reference, and therefore always current; copies hold the same one, pickles leave it out. Its
    actions are those of deterministic exploration, without gradient, in the mode it is in: batch normalization that is
    in training takes in the candidates.

    Args:
        critic_sampler: draws the critic's batches; whatever this sampler is asked for beyond the actor's, it answers.
        policy: a TensorDictModule that writes ``action_key``, or ``"loc"`` and ``"scale"``.
        num_candidates: K, >= 1; 1 is uniform. Default: 2.
        noise_scale: standard deviation of the exploration noise: one number > 0, [A]; or its covariance [A, A],
            symmetric and positive definite. All finite. Default: 0.1.
        score: ``"kl"`` (default); ``"mse"``, the mean of \|z\|², with z = (u − π(s)) / noise_scale; or ``"logprob"``,
            the mean of −log π(u \| s), which for a fixed Gaussian noise is the same up to constants.
        covariance: ``"diag"`` (default) or ``"full"``, see
            :func:`~torchrl_replay_ext.functional.gaussian_policy_kl`. ``"full"`` needs batches (or groups) of more
            rows than actions have dimensions.
        eps: added to the variances of the candidates. Default: 1e-6.
        granularity: ``"batch"`` (default), ``"group"`` or ``"transition"``.
        action_key: where actions are stored. Default: ``"action"``.
        group_size: rows of a group; divides the batch size. Default: 16.
        candidate_sampler: draws the candidates; by default uniform. Event tables of ``retention="pinned"`` need one.

    Raises:
        ValueError: if an argument is out of range or the policy does not write what is needed; at a draw, if actions
            are not continuous and [A] each, stored and of the policy alike, ``noise_scale`` does not fit them, or
            there are too few rows for ``covariance="full"``. One-hot actions are recognised by the policy: if its
            actions are integers, or if its ``spec`` or ``distribution_class`` is discrete. One-hot floats of a policy
            that has none of these cannot be told from continuous actions.
        RuntimeError: at a draw, if the buffer is empty or the policy was left behind by a pickle.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torchrl.data import LazyTensorStorage
        >>> from torchrl_replay_ext import ProportionalSampler
        >>> policy = TensorDictModule(torch.nn.Linear(3, 2), in_keys=["observation"], out_keys=["action"])
        >>> sampler = DecoupledSampler(ProportionalSampler(100), policy, num_candidates=2, noise_scale=0.1)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=4)
        >>> actor_rb = sampler.actor_buffer(rb)
        >>> index = rb.extend(TensorDict({"observation": torch.randn(20, 3), "action": torch.randn(20, 2)}, [20]))
        >>> critic_batch, actor_batch = rb.sample(), actor_rb.sample()
        >>> actor_batch["candidate_scores"].shape
        torch.Size([4, 2])
    """

    alpha, beta, omega, eta, event_share = map(_delegated, ("alpha", "beta", "omega", "eta", "event_share"))

    def __init__(
        self,
        critic_sampler: Sampler,
        policy: TensorDictModuleBase,
        *,
        num_candidates: int = 2,
        noise_scale: float | Tensor = 0.1,
        score: Score = "kl",
        covariance: Covariance = "diag",
        eps: float = 1e-6,
        granularity: Granularity = "batch",
        action_key: NestedKey = "action",
        group_size: int = _GROUP,
        candidate_sampler: Sampler | None = None,
    ):
        for name, value in (("num_candidates", num_candidates), ("group_size", group_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"DecoupledSampler({name}={value!r}): {name} must be an integer >= 1.")
        for name, value, allowed in (
            ("score", score, get_args(Score)),
            ("covariance", covariance, get_args(Covariance)),
            ("granularity", granularity, get_args(Granularity)),
        ):
            if value not in allowed:
                raise ValueError(f"DecoupledSampler({name}={value!r}): {name} must be one of {', '.join(allowed)}.")
        require_noise_scale("DecoupledSampler", noise_scale)
        scale = torch.as_tensor(noise_scale, dtype=torch.float32)
        if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 <= eps < math.inf:
            raise ValueError(f"DecoupledSampler(eps={eps!r}): eps must be >= 0 and finite.")
        if not is_key(action_key):
            raise TypeError(
                f"DecoupledSampler(action_key={action_key!r}): action_key must be the name of an entry, a string or a "
                "tuple of strings."
            )
        if not isinstance(critic_sampler, Sampler):
            raise TypeError(f"DecoupledSampler: critic_sampler must be a Sampler, not {type(critic_sampler).__name__}.")
        if not (candidate_sampler is None or isinstance(candidate_sampler, Sampler)):
            raise TypeError(
                f"DecoupledSampler: candidate_sampler must be a Sampler, not {type(candidate_sampler).__name__}."
            )
        self.critic_sampler = critic_sampler
        self.candidate_sampler = RandomSampler() if candidate_sampler is None else candidate_sampler
        self.num_candidates, self.granularity, self.group_size = num_candidates, granularity, group_size
        self._score, self._eps, self._action_key = score, eps, action_key
        self._covariance: Covariance = covariance
        self._scale = scale
        self._whitening = torch.linalg.inv(torch.linalg.cholesky(scale)) if scale.ndim == 2 else None
        # of the last draw: the mean score of what was chosen, and of all candidates
        self._chosen = torch.zeros(2)
        self._drawn: deque[Tensor] = deque(maxlen=_REMEMBERED)
        self._set_policy(policy)

    @property
    def policy(self) -> TensorDictModuleBase:
        """The policy to whose actions the actor's batches are near."""
        if self._policy is None:
            raise RuntimeError("DecoupledSampler: pickles leave the policy out; set sampler.policy first.")
        return self._policy

    @policy.setter
    def policy(self, value: TensorDictModuleBase) -> None:
        self._set_policy(value)

    def _set_policy(self, policy: TensorDictModuleBase) -> None:
        in_keys, out_keys = getattr(policy, "in_keys", None), getattr(policy, "out_keys", None)
        if in_keys is None or out_keys is None:
            raise ValueError(
                f"DecoupledSampler: the policy must be a TensorDictModule with in_keys and out_keys, not "
                f"{type(policy).__name__}."
            )
        self._stochastic = "loc" in out_keys and "scale" in out_keys
        if not self._stochastic and self._action_key not in out_keys:
            raise ValueError(
                f"DecoupledSampler: the policy writes {list(out_keys)}; it must write {self._action_key!r}, or 'loc' "
                "and 'scale'."
            )
        if self._score == "logprob" and self._whitening is not None and not self._stochastic:
            raise ValueError("DecoupledSampler(score='logprob'): noise_scale must be one number or [A].")
        self._require_continuous(policy)
        self._squashed = self._stochastic and is_squashed(policy, "DecoupledSampler")
        self._policy: TensorDictModuleBase | None = policy

    def _require_continuous(self, policy: TensorDictModuleBase) -> None:
        for module in policy.modules():
            spec = getattr(module, "spec", None)
            if isinstance(spec, Composite):
                spec = spec.get(self._action_key, None)
            distribution = getattr(module, "distribution_class", None)
            found = None
            if isinstance(spec, (Binary, Categorical, MultiCategorical, MultiOneHot, OneHot)):
                found = f"a spec of class {type(spec).__name__}"
            elif getattr(distribution, "has_enumerate_support", False) is True:
                found = f"the distribution {getattr(distribution, '__name__', distribution)}"
            if found is not None:
                raise ValueError(
                    f"DecoupledSampler: the policy has {found}, so its actions are discrete; it compares continuous "
                    "actions only. Use the critic's sampler by itself."
                )

    def actor_buffer(self, rb: TensorDictReplayBuffer, batch_size: int | None = None) -> TensorDictReplayBuffer:
        """A buffer over the same storage whose ``sample()`` is the actor's batch; it cannot be written to.

        It has the transforms and the ``collate_fn`` of ``rb``.

        Args:
            rb: the buffer of this sampler.
            batch_size: by default that of ``rb``.

        Raises:
            ValueError: if ``rb`` has another sampler or is in another process, or ``batch_size`` is missing.
        """
        if getattr(rb, "_sampler", None) is None:
            raise ValueError(
                f"DecoupledSampler.actor_buffer: {type(rb).__name__} is in another process, where the policy would be "
                "a copy that stays as it was. Keep the buffer in the learner's process; its collectors may be anywhere."
            )
        if rb.sampler is not self:
            raise ValueError("DecoupledSampler.actor_buffer: rb must be the buffer that has this sampler.")
        batch_size = rb._batch_size if batch_size is None else batch_size
        if batch_size is None:
            raise ValueError("DecoupledSampler.actor_buffer: pass batch_size=, the buffer has none.")
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(
                f"DecoupledSampler.actor_buffer(batch_size={batch_size!r}): batch_size must be an integer >= 1."
            )
        self._require_whole_groups(batch_size)
        self._require_live_candidates(rb._storage)
        device = getattr(rb._storage, "device", None)
        if isinstance(device, torch.device):
            self._to(device)
        sampler = _ActorSampler(self, rb._transform)
        buffer = type(rb)(
            storage=rb._storage,
            writer=ImmutableDatasetWriter(),
            sampler=sampler,
            batch_size=batch_size,
            collate_fn=rb._collate_fn,
            transform=rb._transform,
            generator=rb._rng,
        )
        sampler.ready = True
        return buffer

    def _require_whole_groups(self, batch_size: int) -> None:
        if self.granularity == "group" and batch_size % self.group_size:
            raise ValueError(
                f"DecoupledSampler: actor's batch_size is {batch_size}, group_size={self.group_size} must divide it."
            )

    def _require_enough_rows(self, rows: int, dims: int) -> None:
        uses_covariance = self._score == "kl" and self._covariance == "full" and self.granularity != "transition"
        if uses_covariance and rows <= dims:
            what = "group_size" if self.granularity == "group" else "the actor's batch_size"
            raise ValueError(
                f"DecoupledSampler(covariance='full'): {what} is {rows}, and actions have {dims} dimensions; the "
                f"covariance of fewer than {dims + 1} rows is singular, and every score would be inf. Use at least "
                f"{dims + 1} rows, or covariance='diag'."
            )

    def _require_live_candidates(self, storage: Any) -> None:
        tables = getattr(storage, STORAGE_ATTRIBUTE, None)
        if tables is not None and tables.retention == "pinned" and isinstance(self.candidate_sampler, RandomSampler):
            raise ValueError(
                "DecoupledSampler: with event tables of retention='pinned' not all slots hold what is in a table; use "
                "retention='ring', or pass a candidate_sampler that draws from the tables."
            )

    def _to(self, device: torch.device) -> None:
        self._chosen, self._scale = self._chosen.to(device), self._scale.to(device)
        self._whitening = None if self._whitening is None else self._whitening.to(device)

    def candidates(
        self, storage: Storage, batch_size: int, transform: Callable[[TensorDictBase], TensorDictBase] | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        """Draw K candidates and choose.

        Returns:
            The index of the rows that were chosen, [B] or a tuple of [B]; their scores, [B]; and the scores of the
            candidates of each, [B, K].
        """
        if not is_traced() and not len(storage):  # pyright: ignore[reportArgumentType]
            raise RuntimeError("DecoupledSampler: cannot sample from an empty storage.")
        count = self.num_candidates
        self._require_whole_groups(batch_size)
        index, _ = self.candidate_sampler.sample(storage, count * batch_size)
        columns = index if isinstance(index, tuple) else (index,)
        whitened, correction = self._whitened(storage, index, transform)
        size = {"batch": batch_size, "group": self.group_size, "transition": 1}[self.granularity]
        self._require_enough_rows(size, whitened.shape[-1])
        parts = whitened.reshape(count, -1, size, whitened.shape[-1])
        scores = self._scores(parts, correction.reshape(count, -1, size)).nan_to_num(nan=math.inf, posinf=math.inf)
        if self.granularity == "transition":
            order = scores.reshape(-1).argsort(stable=True)
            taken = order[:batch_size]
            chosen = scores.reshape(-1)[taken]
            of_row = scores.reshape(count, batch_size).T
        else:
            best = scores.argmin(0)
            groups = torch.arange(best.shape[0], device=best.device)
            rows = (best * best.shape[0] + groups).unsqueeze(1) * size + torch.arange(size, device=best.device)
            taken = rows.reshape(-1)
            chosen = scores.amin(0).repeat_interleave(size)
            of_row = scores.T.repeat_interleave(size, 0)
        if not is_traced() and self._chosen.device != chosen.device:
            self._to(chosen.device)
        self._chosen.copy_(torch.stack([chosen.mean(), of_row.mean()]))
        picked = tuple(column.index_select(0, taken.to(column.device)) for column in columns)
        return picked if isinstance(index, tuple) else picked[0], chosen, of_row

    @torch.no_grad()
    def _whitened(self, storage: Any, index: Any, transform: Any) -> tuple[Tensor, Tensor]:
        """Z of the rows, [n, A]; and what −log π has beyond ½ |z|², but for constants, [n]."""
        policy = self.policy
        data = storage._storage
        if not is_tensor_collection(data):
            raise TypeError(
                "DecoupledSampler: TensorDicts in a tensor storage are needed, LazyTensorStorage for example."
            )
        if data.ndim > storage.ndim:
            raise ValueError(
                f"DecoupledSampler: the storage holds entries of shape {tuple(data.shape[storage.ndim :])} in each "
                "slot, not single transitions."
            )
        keys = [*policy.in_keys, self._action_key]
        transformed = transform is not None and len(transform) > 0
        rows = data
        if transformed:
            # they may read and write anything
            rows = transform(storage.get(index))
        # a storage may hold more than its columns
        is_stacked = getattr(storage, "is_stacked", lambda key: False)
        stacked = not transformed and any(is_stacked(key) for key in keys)
        missing = [key for key in keys if not (stacked and is_stacked(key)) and rows.get(key, None) is None]
        if missing:
            raise KeyError(f"DecoupledSampler: the stored data has no entries {missing}, which the policy reads.")
        if not transformed:
            traced = is_traced() and isinstance(index, Tensor)
            rows = storage.take_columns(keys, index) if traced or stacked else data.select(*keys)[index]
        action: Tensor = rows.get(self._action_key)
        inputs = rows.select(*policy.in_keys)
        with nullcontext() if is_traced() else set_interaction_type(InteractionType.DETERMINISTIC):
            if self._stochastic and isinstance(policy, ProbabilisticTensorDictSequential):
                result = policy.get_dist_params(inputs)
            else:
                result = policy(inputs)
        expected: Tensor = result.get("loc" if self._stochastic else self._action_key)
        continuous = action.is_floating_point() and expected.is_floating_point()
        if action.ndim != 2 or expected.shape[1:] != action.shape[1:] or not continuous:
            raise ValueError(
                f"DecoupledSampler: stored actions are {action.dtype} of shape {tuple(action.shape)}, the policy's "
                f"{expected.dtype} of shape {tuple(expected.shape)}; both must be continuous, [B, A]."
            )
        if self._stochastic:
            scale = result.get("scale")
            correction = scale.log().sum(-1)
            if self._squashed:
                action = inside_bounds(action, "DecoupledSampler")
                correction = correction + (1 - action.square()).log().sum(-1)
                action = action.atanh()
            return (action - expected) / scale, correction
        difference = action - expected
        # checked here, where the number of dimensions is known
        scale = _as_scale(self._scale, difference)
        if self._score == "kl":
            return difference, difference[:, 0]
        whitened = difference / scale if self._whitening is None else difference @ self._whitening.to(scale).mT
        return whitened, whitened[:, 0] * 0

    def _scores(self, parts: Tensor, correction: Tensor) -> Tensor:
        """Scores of parts [K, n, size, A], [K, n]."""
        if self._score == "kl" and self.granularity != "transition":
            scale = 1.0 if self._stochastic else self._scale.to(parts.device)
            return divergence(parts, scale, self._covariance, self._eps)
        if self._score == "kl" and not self._stochastic:
            scale = self._scale.to(parts)
            parts = parts / scale if self._whitening is None else parts @ self._whitening.to(parts).mT
        distance = parts.square().sum(-1)
        if self._score == "logprob":
            distance = distance / 2 + correction
        return distance.mean(-1)

    # --- what the critic's sampler answers

    @property
    def reduction(self) -> str:
        """How TD errors of more than one entry per transition are reduced."""
        return getattr(self.critic_sampler, "reduction", "max")

    @property
    def takes_stamps(self) -> bool:
        """Whether samples carry the number of the write of each row."""
        return getattr(self.critic_sampler, "takes_stamps", False)

    @property
    def takes_priorities(self) -> bool:
        """True if the critic's draws depend on TD errors."""
        prioritized = isinstance(self.critic_sampler, PrioritizedSampler)
        return getattr(self.critic_sampler, "takes_priorities", prioritized)

    @property
    def writes_in_graphs(self) -> bool:
        """Whether writes lose nothing by being part of a graph."""
        return getattr(self.critic_sampler, "writes_in_graphs", True)

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.critic_sampler._rng

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        self.critic_sampler._rng = value
        self.candidate_sampler._rng = value

    @property
    def default_priority(self) -> float:
        """What a new transition has."""
        return self.critic_sampler.default_priority

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        """The critic's batch."""
        return self.critic_sampler.sample(storage, batch_size)

    def add(self, index: int) -> None:
        """Called after a write."""
        for sampler in self._samplers():
            sampler.add(index)

    def extend(self, index: Tensor) -> None:
        """Called after a write."""
        for sampler in self._samplers():
            sampler.extend(index)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer."""
        for sampler in self._samplers():
            sampler.mark_update(index, storage=storage)

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, stamp: Tensor | None = None
    ) -> Any:
        """Hand TD errors to the critic's sampler, if it takes any.

        Raises:
            ValueError: if ``index`` is that of one of the actor's last batches (not looked at in a graph).
        """
        # by identity: small buffers give the same rows to both
        drawn = [] if is_traced() or not isinstance(index, Tensor) else self._drawn
        if any(index.data_ptr() == own.data_ptr() for own in drawn):
            raise ValueError(
                "DecoupledSampler.update_priority: this is the actor's batch; priorities come from the critic's."
            )
        if not isinstance(self.critic_sampler, PrioritizedSampler):
            return None
        given = {} if stamp is None else {"stamp": stamp}
        return self.critic_sampler.update_priority(index, priority, storage=storage, **given)

    def stats(self) -> TensorDict:
        """Those of the critic's sampler, and the mean scores of the last actor batch and of its candidates."""
        ours = TensorDict({"actor_score": self._chosen[0].clone(), "actor_candidate_score": self._chosen[1].clone()})
        stats = getattr(self.critic_sampler, "stats", None)
        return ours if stats is None else stats().update(ours)

    def probabilities(self, storage: Storage) -> Tensor:
        """Of the critic's draws."""
        return self.critic_sampler.probabilities(storage)  # pyright: ignore[reportAttributeAccessIssue]

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the critic's sampler contradict each other. O(N)."""
        check = getattr(self.critic_sampler, "check_valid", None)
        if check is not None:
            check()

    def state_dict(self) -> dict[str, Any]:
        """That of the critic's sampler."""
        return self.critic_sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave."""
        self.critic_sampler.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Save the critic's sampler."""
        self.critic_sampler.dumps(path)

    def loads(self, path: str | Path) -> None:
        """Restore what :meth:`dumps` saved."""
        self.critic_sampler.loads(path)

    def _samplers(self) -> list[Sampler]:
        same = self.candidate_sampler is self.critic_sampler
        return [self.critic_sampler] if same else [self.critic_sampler, self.candidate_sampler]

    def _empty(self) -> None:
        for sampler in self._samplers():
            sampler._empty()

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoupledSampler:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(deepcopy(self.__getstate__(), memo), _policy=self._policy)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_policy": None, "_drawn": deque(maxlen=_REMEMBERED)}

    def __repr__(self) -> str:
        return (
            f"DecoupledSampler({self.critic_sampler!r}, num_candidates={self.num_candidates}, score={self._score!r}, "
            f"granularity={self.granularity!r})"
        )


@PrioritizedSampler.register
class _ActorSampler(Sampler):
    """The sampler of an actor's buffer."""

    reduction = "max"
    # CompilableReplayBuffer asks for TD errors first if this is True
    takes_priorities = False

    def __init__(self, decoupled: DecoupledSampler, transform: Any):
        self._decoupled, self._transform = decoupled, transform
        # a new buffer tells its sampler what its storage holds
        self.ready = False

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._decoupled._rng

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        # that of the critic's buffer
        pass

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        index, score, candidate_scores = self._decoupled.candidates(storage, batch_size, self._transform)
        if not is_traced() and isinstance(index, Tensor):
            self._decoupled._drawn.append(index)
        return index, {"score": score, "candidate_scores": candidate_scores}

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None, **_: Any) -> None:
        if self.ready:
            raise ValueError("The actor's buffer takes no priorities: hand the critic's batch to the critic's buffer.")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def dumps(self, path: str | Path) -> None:
        pass

    def loads(self, path: str | Path) -> None:
        pass

    def _empty(self) -> None:
        pass
