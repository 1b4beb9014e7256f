"""Separate batches for critic and actor (DPER, arXiv 2512.05320)."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    set_interaction_type,
)
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import PrioritizedSampler, RandomSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler
from torchrl.envs.transforms import Compose

from torchrl_replay_ext._torchrl import is_stacked, length, read_only_buffer
from torchrl_replay_ext.arguments import require_choice, require_finite, require_integer, require_nested_keys
from torchrl_replay_ext.compilation import outside_inference_mode
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE
from torchrl_replay_ext.functional import divergence, require_noise_scale
from torchrl_replay_ext.policies import inside_bounds, is_squashed, require_continuous_actions
from torchrl_replay_ext.samplers.rows import stored_tensordict
from torchrl_replay_ext.samplers.wrapper import SamplerWrapper, delegated
from torchrl_replay_ext.storages.compilable import CompilableTensorStorage

Granularity = Literal["batch", "group"]

_OWNER = "DecoupledSampler"


@PrioritizedSampler.register
class DecoupledSampler(SamplerWrapper):
    r"""Critic and actor learn from separate batches (DPER, arXiv 2512.05320).

    ``rb.sample()`` draws the critic's batch with any sampler: prioritized, from event tables, or uniform. The buffer
    returned by :meth:`actor_buffer` draws the actor's batch. It draws K uniform candidate batches and returns the one
    whose actions are nearest to the actions of the current policy. With stored actions u and the policy's actions π(s),
    the score of a candidate is ::

        D_KL(N(μ, Σ) ‖ N(0, σ² I)),     μ, Σ the mean and covariance of u − π(s) over the candidate

    The candidate with the smallest score wins, and the first one if scores are equal. In the paper σ is the variance
    of the exploration noise; here ``noise_scale`` is the standard deviation. The actor's batch has no importance
    weights.

    Scoring reads only the observations and actions of the K·B rows and calls the policy once. The chosen rows are then
    read in full. They carry ``"score"``, [B], and ``"candidate_scores"``, [B, K]. The buffer's sample-time transforms
    are applied before the policy reads the data.

    Beyond the paper:

    * **Stochastic policies** (a policy that writes ``"loc"`` and ``"scale"``): z = (u − loc) / scale is compared with
      N(0, I); for a tanh-normal policy u = atanh(action). ``noise_scale`` is not used.
    * **Correlated noise**: for Ornstein-Uhlenbeck noise pass
      :func:`~torchrl_replay_ext.functional.ornstein_uhlenbeck_scale` as ``noise_scale``.
    * **Groups**: uniform batches have nearly the same mean, so choosing one of K batches makes the data only a little
      more on-policy (5 to 31 % in our measurements). ``granularity="group"`` chooses one of K candidates for each
      group of rows.

    The sampler holds a reference to the policy, so parameter updates take effect at once. Copies of the sampler share
    the policy; pickles do not contain it. The policy is called without exploration and without gradients, in its
    current mode: batch normalization in training mode includes the candidates in its statistics.

    Args:
        critic_sampler: draws the critic's batches. Priorities and statistics belong to this sampler.
        policy: a TensorDictModule that writes ``action_key``, or ``"loc"`` and ``"scale"``.
        num_candidates: K, >= 1; 1 draws uniform batches. Default: 2.
        noise_scale: standard deviation of the exploration noise, one number > 0 or [A], finite. Default: 0.1.
        eps: added to the variances of the candidates, >= 0. Default: 1e-6.
        granularity: ``"batch"`` (default) or ``"group"``.
        action_key: entry with the actions. Default: ``"action"``.
        group_size: rows per group; must divide the batch size. Default: 16.

    Raises:
        ValueError: if an argument is out of range, or the policy does not write the required entries. At a draw, if
            the stored actions or the policy's actions are not continuous with shape [A], or if ``noise_scale`` has
            another number of dimensions. A policy with one-hot actions is rejected if its actions are integers, or if
            its ``spec`` or ``distribution_class`` is discrete. Other one-hot floats cannot be distinguished from
            continuous actions.
        TypeError: if an argument has the wrong type.
        RuntimeError: at a draw, if the buffer is empty, or the sampler was unpickled and has no policy yet.

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

    alpha = delegated("critic_sampler", "alpha")
    beta = delegated("critic_sampler", "beta")
    omega = delegated("critic_sampler", "omega")
    eta = delegated("critic_sampler", "eta")
    event_share = delegated("critic_sampler", "event_share")
    num_candidates = property(lambda self: self._num_candidates)
    granularity = property(lambda self: self._granularity)
    group_size = property(lambda self: self._group_size)
    # draws the critic's batch
    sample = delegated("critic_sampler", "sample", read_only=True)

    def __init__(
        self,
        critic_sampler: Sampler,
        policy: TensorDictModuleBase,
        *,
        num_candidates: int = 2,
        noise_scale: float | Tensor = 0.1,
        eps: float = 1e-6,
        granularity: Granularity = "batch",
        action_key: NestedKey = "action",
        group_size: int = 16,
    ):
        self._num_candidates = require_integer(_OWNER, "num_candidates", num_candidates)
        self._granularity = require_choice(_OWNER, "granularity", granularity, get_args(Granularity))
        self._group_size = require_integer(_OWNER, "group_size", group_size)
        require_noise_scale(_OWNER, noise_scale)
        self._eps = require_finite(_OWNER, "eps", eps)
        device = getattr(noise_scale, "device", "cpu")
        self._noise_scale = torch.as_tensor(noise_scale, dtype=torch.float32, device=device)
        require_nested_keys(_OWNER, action_key=action_key)
        if not isinstance(critic_sampler, Sampler):
            raise TypeError(f"DecoupledSampler: critic_sampler must be a Sampler, not {type(critic_sampler).__name__}.")
        self.critic_sampler = critic_sampler
        self._candidate_sampler = RandomSampler()
        self._action_key = action_key
        # mean score of the last actor batch, and mean score of all its candidates
        with outside_inference_mode():
            self._chosen = torch.zeros(2, dtype=torch.float32, device="cpu")
        self.policy = policy

    @property
    def _inner(self) -> Any:
        return self.critic_sampler

    @property
    def policy(self) -> TensorDictModuleBase:
        """The policy whose actions are compared with the stored actions."""
        if self._policy is None:
            raise RuntimeError("DecoupledSampler: a pickle does not contain the policy; set sampler.policy first.")
        return self._policy

    @policy.setter
    def policy(self, policy: TensorDictModuleBase) -> None:
        in_keys, out_keys = getattr(policy, "in_keys", None), getattr(policy, "out_keys", None)
        if in_keys is None or out_keys is None:
            raise ValueError(
                f"DecoupledSampler: the policy must be a TensorDictModule with in_keys and out_keys, not "
                f"{type(policy).__name__}."
            )
        is_stochastic = "loc" in out_keys and "scale" in out_keys
        if not is_stochastic and self._action_key not in out_keys:
            raise ValueError(
                f"DecoupledSampler: the policy writes {list(out_keys)}; it must write {self._action_key!r}, or 'loc' "
                "and 'scale'."
            )
        require_continuous_actions(policy, self._action_key, "DecoupledSampler")
        hint = (
            " For another distribution, name its parameters other than 'loc' and 'scale', and set noise_scale to the "
            "standard deviation of its actions."
        )
        self._squashed = is_stochastic and is_squashed(policy, "DecoupledSampler", hint)
        self._stochastic = is_stochastic
        self._policy: TensorDictModuleBase | None = policy

    def actor_buffer(self, rb: TensorDictReplayBuffer, batch_size: int | None = None) -> TensorDictReplayBuffer:
        """Return a read-only buffer over the same storage whose ``sample()`` draws the actor's batch.

        The buffer has the transforms and the ``collate_fn`` of ``rb``, and a draw holds the locks of ``rb``, so that
        writes wait. Its samples have no ``"index"``: TD errors of the actor's batch are no priorities.

        Args:
            rb: the buffer that has this sampler.
            batch_size: number of rows. None (default): the batch size of ``rb``.

        Raises:
            ValueError: if ``rb`` has another sampler or is in another process, or ``batch_size`` is smaller than 1.
            TypeError: if neither ``batch_size`` nor that of ``rb`` is an integer.
        """
        if getattr(rb, "sampler", None) is not self:
            raise ValueError(
                "DecoupledSampler.actor_buffer: rb must be the buffer that has this sampler. A buffer in another "
                "process has a copy, whose policy is never updated."
            )
        batch_size = rb.batch_size if batch_size is None else batch_size
        batch_size = require_integer("DecoupledSampler.actor_buffer", "batch_size", batch_size)
        self._require_whole_groups(batch_size)
        tables = getattr(rb.storage, STORAGE_ATTRIBUTE, None)
        if tables is not None and tables.retention == "pinned":
            raise ValueError(
                "DecoupledSampler: candidates are drawn from all slots, and event tables of retention='pinned' leave "
                "some slots in no table; use retention='ring'."
            )
        device = getattr(rb.storage, "device", None)
        if isinstance(device, torch.device):
            self._to(device)
        return read_only_buffer(rb, _ActorSampler(self, rb.transform), batch_size)

    def _require_whole_groups(self, batch_size: int) -> None:
        """ValueError if ``group_size`` does not divide the batch size."""
        if self.granularity == "group" and batch_size % self.group_size:
            raise ValueError(
                f"{_OWNER}: the actor's batch_size is {batch_size}; group_size={self.group_size} must divide it."
            )

    @outside_inference_mode()
    def _to(self, device: torch.device) -> None:
        self._chosen, self._noise_scale = self._chosen.to(device), self._noise_scale.to(device)

    def candidates(self, storage: Storage, batch_size: int, transform: Compose) -> tuple[Any, Tensor, Tensor]:
        """Draw K candidates and choose the rows of an actor batch.

        Args:
            storage: the storage of the buffer.
            batch_size: B.
            transform: applied to the candidates before the policy reads them.

        Returns:
            The index of the chosen rows, [B] or a tuple of [B]; their scores, [B]; and the scores of each row's
            candidates, [B, K].
        """
        if not length(storage):
            raise RuntimeError("Cannot sample from an empty storage. DecoupledSampler: write to the buffer first.")
        self._require_whole_groups(batch_size)
        index, _ = self._candidate_sampler.sample(storage, self.num_candidates * batch_size)
        rows, score, candidate_scores = self._choose(*self._actions(storage, index, transform))
        if self._chosen.device != score.device:
            self._to(score.device)
        self._chosen.copy_(torch.stack([score.mean(), candidate_scores.mean()]))
        if isinstance(index, tuple):
            return tuple(column.index_select(0, rows.to(column.device)) for column in index), score, candidate_scores
        return index.index_select(0, rows.to(index.device)), score, candidate_scores

    def _choose(
        self, action: Tensor, expected: Tensor, scale: Tensor | None, is_squashed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score K candidates of B rows each and choose.

        Args:
            action: stored actions of the candidates, [K·B, A]; the rows of each candidate are consecutive.
            expected: actions of a deterministic policy for these rows, or means of a stochastic policy, [K·B, A].
            scale: standard deviations of a stochastic policy, [K·B, A]; None for a deterministic policy.
            is_squashed: True if the actions are the tanh of a Gaussian.

        Returns:
            Row numbers of the chosen rows among the candidates, int64 [B]; the score of each row's group or batch, [B];
            and the scores of the K candidates for each row, [B, K].

        Raises:
            ValueError: if the actions are not continuous or do not have the shape [K·B, A], or if ``noise_scale`` has
                another number of dimensions.
        """
        continuous = action.is_floating_point() and expected.is_floating_point()
        if action.ndim != 2 or expected.shape[1:] != action.shape[1:] or not continuous:
            raise ValueError(
                f"{_OWNER}: stored actions are {action.dtype} of shape {tuple(action.shape)}, the policy's "
                f"{expected.dtype} of shape {tuple(expected.shape)}; both must be continuous, [B, A], and a slot "
                "must hold one step."
            )
        if scale is None:
            difference, noise_scale = action - expected, self._noise_scale.to(action.device)
        else:
            action = inside_bounds(action, _OWNER).atanh() if is_squashed else action
            difference, noise_scale = (action - expected) / scale, 1.0
        batch_size = len(action) // self.num_candidates
        size = batch_size if self.granularity == "batch" else self.group_size
        units = difference.reshape(self.num_candidates, -1, size, difference.shape[-1])
        scores = divergence(units, noise_scale, self._eps).nan_to_num(nan=math.inf, posinf=math.inf)
        best = scores.argmin(0)
        groups = torch.arange(best.shape[0], device=best.device)
        rows = (best * best.shape[0] + groups).unsqueeze(1) * size + torch.arange(size, device=best.device)
        return rows.reshape(-1), scores.amin(0).repeat_interleave(size), scores.T.repeat_interleave(size, 0)

    @torch.no_grad()
    def _actions(self, storage: Any, index: Any, transform: Compose) -> tuple[Tensor, Tensor, Tensor | None, bool]:
        """The actions of the candidates and of the policy, see :meth:`_choose`."""
        policy = self.policy
        rows = self._rows(storage, index, transform)
        inputs = rows.select(*policy.in_keys)
        with set_interaction_type(InteractionType.DETERMINISTIC):
            result: Any
            if self._stochastic and isinstance(policy, ProbabilisticTensorDictSequential):
                result = policy.get_dist_params(inputs)
            else:
                result = policy(inputs)
        mean = result.get("loc" if self._stochastic else self._action_key)
        scale = result.get("scale") if self._stochastic else None
        return rows.get(self._action_key), mean, scale, self._squashed

    def _rows(self, storage: Any, index: Any, transform: Compose) -> TensorDictBase:
        """The policy's input entries and the actions of the candidates."""
        data, keys = stored_tensordict("DecoupledSampler", storage), [*self.policy.in_keys, self._action_key]
        # whole rows, because a transform may read and write any entry
        rows = transform(storage.get(index)) if len(transform) else data
        missing = [key for key in keys if rows.get(key, None) is None and not is_stacked(storage, key)]
        if missing:
            raise KeyError(f"DecoupledSampler: the stored data has no entries {missing}, which the policy reads.")
        if len(transform):
            return rows
        if isinstance(storage, CompilableTensorStorage) and isinstance(index, Tensor):
            return storage.take(index, keys)
        return data.select(*keys)[index]

    def _samplers(self) -> list[Sampler]:
        return [self.critic_sampler, self._candidate_sampler]

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, stamp: Tensor | None = None
    ) -> Any:
        """Pass TD errors to the critic's sampler, if that sampler is prioritized.

        Args:
            index: index of a critic batch.
            priority: TD errors of the rows.
            storage: the storage of the buffer. Default: None.
            stamp: the entry ``"write_stamp"`` of the batch, if there is one. Default: None.
        """
        critic_sampler: Any = self.critic_sampler
        if not isinstance(critic_sampler, PrioritizedSampler):
            return None
        keywords: Any = {"storage": storage} if stamp is None else {"storage": storage, "stamp": stamp}
        return critic_sampler.update_priority(index, priority, **keywords)

    def stats(self) -> TensorDict:
        """Statistics of the critic's sampler, and the mean scores of the last actor batch and of its candidates."""
        ours = TensorDict({"actor_score": self._chosen[0].clone(), "actor_candidate_score": self._chosen[1].clone()})
        stats = getattr(self.critic_sampler, "stats", None)
        return ours if stats is None else stats().update(ours)

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoupledSampler:
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(deepcopy(self.__getstate__(), memo), _policy=self._policy)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_policy": None}

    def __repr__(self) -> str:
        return (
            f"DecoupledSampler({self.critic_sampler!r}, num_candidates={self.num_candidates}, "
            f"granularity={self.granularity!r})"
        )


@PrioritizedSampler.register
class _ActorSampler(RandomSampler):
    reduction = "max"
    # read by CompilableReplayBuffer, which requires TD errors if this is True
    takes_priorities = False

    def __init__(self, decoupled: DecoupledSampler, transform: Any):
        self._decoupled, self._transform = decoupled, transform

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        index, score, candidate_scores = self._decoupled.candidates(storage, batch_size, self._transform)
        return index, {"score": score, "candidate_scores": candidate_scores}

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None, **_: Any) -> None:
        """Do nothing: the constructor of a buffer calls this for the rows in the storage."""
