"""Reliability-adjusted prioritized experience replay."""

from __future__ import annotations

from typing import get_args

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.annealing import ALPHA, BETA, Anneal, exponent
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_choice
from torchrl_replay_ext.compilation import random_seed, uniform
from torchrl_replay_ext.core.episodes import EpisodeIndex
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.streams import Episodes, require_episodes
from torchrl_replay_ext.kernels.ops import empty, reaper_draw, reaper_smallest
from torchrl_replay_ext.samplers.base import Draw
from torchrl_replay_ext.samplers.proportional import PowerSampler
from torchrl_replay_ext.samplers.rows import EpisodeReader, Truncated
from torchrl_replay_ext.samplers.shard_draws import ShardRows, Sums


class ReaPERSampler(PowerSampler):
    r"""Draws transitions by TD error, adjusted for how reliable their target is (Pleiss et al., arXiv 2506.18482).

    With d_t = \|δ_t\| + eps for the stored transitions t = 1..n of an episode, in time order::

        R_t = Σ_{i≤t} d_i / Σ_i d_i     episode finished                        (Eq. 16)
        R_t = Σ_{i≤t} d_i / F           episode ongoing                         (Eq. 16)
        F: the largest sum of d over one episode in the buffer                  (Eq. 17)
        Ψ_t = R_t^ω d_t^α,  P(t) = Ψ_t / Σ Ψ                                    (Eq. 15)
        w_t = (N P(t))^−β, divided by the largest weight                        (Eq. 18, Algorithm 1, line 12)

    With ω = 0 this is exactly proportional PER. It can be used as the ``sampler`` of a
    :class:`~torchrl.data.TensorDictReplayBuffer` with a round-robin writer.

    Every draw follows the current Ψ: transitions are proposed in proportion to d^α and accepted with probability R^ω,
    where R is computed from prefix sums. An update costs O(log N) for any episode length. On CUDA, a row that rejects
    65,536 proposals gets the last one.

    Departures from the paper:

    * Weights: Algorithm 1 (line 12) divides by the largest weight of all N stored transitions. This needs all N values
      of Ψ for each draw, O(N). The default ``weight_norm="batch"`` divides by the largest weight of the batch instead,
      which scales up the loss of each batch by a different factor. ``"buffer"`` follows the paper.
    * Priority of a new transition: the paper uses the largest normalised priority p = Ψ / Σ Ψ, either seen so far
      (Algorithm 1, lines 3 and 14) or stored (Algorithm 2, line 5). However, values of p from different times cannot be
      compared, because Σ Ψ changes. Here a new transition gets the largest d seen so far, at least 1, and
      reliability 1, so Ψ = d^α. It keeps reliability 1 until its episode ends or, after it was written, a transition
      of its episode is updated. Its d is included in the sums of its episode: a large default outweighs the d of
      updated rows and reduces the R of the rows before it. ``max_priority_within_buffer`` limits the default to the
      largest d of the stored transitions.

    Choices where the paper is not specific:

    * Sums include stored transitions only. When the ring overwrites the first transitions of an episode, their d are
      subtracted.
    * Episodes are finished if they are terminated or truncated, as in the authors' code. Pass ``truncated="ongoing"``
      if the target of a truncated episode should not be treated as exact.
    * Interrupted episodes: a trajectory with a new id takes the lane of a stream that has no unfinished episode, or
      else the lane that was written to least recently, whose episode then stays ongoing. This is counted in
      :meth:`stats` and a warning is issued once, unless ``init_key`` marks the first transition of the new episode. It
      is an error if interrupted trajectories go on interrupting each other, because there are more than
      ``episodes.num_streams``; in graphs they are only counted. An unfinished episode goes on if its id appears again,
      also if a new collector has restarted the ids; mark first transitions (TorchRL's ``InitTracker``) to begin a new
      one.

    Environments: a single environment, or one per column of a storage with ``ndim`` >= 2, needs no arguments. In flat
    storage, trajectory ids, which TorchRL's collectors write, identify the episodes of several environments. Flatten
    data of shape [E, T] before it is written there: ``rb.append_transform(lambda td: td.reshape(-1), invert=True)``.

    d and d^α are stored in fixed point, in units of 2^-23 = 1.2e-7 (rounded up): scale rewards so that \|δ\| is
    typically above 1e-5. At a capacity of 10^6, d can be up to 5 · 10^5.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        alpha: exponent of the TD error, >= 0, or :class:`~torchrl_replay_ext.Anneal`. Default: 0.4.
        omega: exponent of the reliability, >= 0, or :class:`~torchrl_replay_ext.Anneal`. Default: 0.2.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.4.
        eps: constant added to \|δ\|, >= 0, so that every transition can be drawn. Default: 1e-6.
        td_error: ``"squared"`` (default) if the loss writes δ² to the buffer's priority key, ``"absolute"`` if it
            writes \|δ\|, see :class:`~torchrl_replay_ext.ProportionalSampler`.
        truncated: whether truncated episodes are ``"finished"`` (default) or ``"ongoing"``.
        terminated_key: entry that marks termination, bool; used if ``truncated="ongoing"``. Default: ``("next",
            "terminated")``.
        weight_norm: ``"batch"`` (default) divides weights by the largest weight of the batch, ``"buffer"`` by the
            largest weight of all stored transitions, which costs O(N) for each draw, about 10 ns per slot on the CPU.
        max_priority_within_buffer: if True, new transitions get the largest d of the stored transitions that have been
            updated, instead of the largest d ever seen, see :class:`~torchrl_replay_ext.ProportionalSampler`. The sums
            of episodes use this d for rows that have not been updated. Default: False.
        episodes: how rows are divided into episodes. Default: None, as :class:`~torchrl_replay_ext.Episodes` says.
            When a state is loaded, no later step joins an unfinished episode; it stays ongoing.

    Raises:
        TypeError: if a number or a flag has the wrong type.
        ValueError: if an argument is out of range; at a write, if ``capacity`` is smaller than the storage, if more
            trajectories than ``episodes.num_streams`` go on in turn.
        KeyError: at a write, if a required entry is missing.

    Warns:
        UserWarning: at a write, once, if an episode was interrupted without an end.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=ReaPERSampler(1000), batch_size=4)
        >>> done = torch.zeros(10, 1, dtype=torch.bool)
        >>> done[4] = done[9] = True
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3), "next": {"done": done}}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    alpha = exponent("alpha", ALPHA)
    beta = exponent("beta", BETA)
    omega = exponent("omega", "Exponent of the reliability.")

    def __init__(
        self,
        capacity: int | None = None,
        *,
        alpha: float | Anneal = 0.4,
        omega: float | Anneal = 0.2,
        beta: float | Anneal = 0.4,
        eps: float = 1e-6,
        td_error: TDError = "squared",
        truncated: Truncated = "finished",
        terminated_key: NestedKey = ("next", "terminated"),
        weight_norm: WeightNorm = "batch",
        max_priority_within_buffer: bool = False,
        episodes: Episodes | None = None,
    ):
        name = "ReaPERSampler"
        self._weight_norm = require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        self._reader = EpisodeReader(
            name, require_episodes(name, episodes), truncated=truncated, terminated_key=terminated_key
        )
        super().__init__(
            capacity,
            alpha=alpha,
            beta=beta,
            omega=omega,
            eps=eps,
            td_error=td_error,
            max_priority_within_buffer=max_priority_within_buffer,
        )
        self.episode_readers.append(self._reader)

    def allocate(self, layout: Layout) -> None:
        super().allocate(layout)
        self._episodes = EpisodeIndex(self.slots, self._reader)
        self.parts = (self._episodes,)
        # running mean of R^ω over the masses, for draws from several shards; 0: it was not computed yet
        self._acceptance = 0.0

    @property
    def max_supported_priority(self) -> float:
        return min(super().max_supported_priority, self._episodes.max_supported_priority)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._episodes.update(slots, priority)

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        # proposals follow d^α, and are accepted with probability R^ω
        arrays = self._tree.arrays()
        self._tree.raise_if_empty(arrays[1])
        slots, density = empty(arrays[0], count, torch.int64), empty(arrays[0], count, torch.float64)
        seed, omega = random_seed(self.layout.device, generator), self.hyperparameters["omega"].views()[0]
        reaper_draw(seed, omega, *arrays, slots, density, *self._episodes.arrays())
        return Draw(slots, density, self._smallest())

    def density(self, slots: Tensor) -> Tensor:
        return super().density(slots) * self._factor(slots)

    def _factor(self, slots: Tensor) -> Tensor:
        """R^ω of ``slots`` [n], float64 [n]."""
        return self._episodes.reliability(slots) ** self.hyperparameters["omega"].tensor[0]

    def _smallest(self) -> Tensor | None:
        """The smallest Ψ > 0 in the buffer; None if weights are normalised over the batch."""
        if self._weight_norm == "batch":
            return None
        result = torch.empty(1, dtype=torch.float64, device=self.layout.device)
        omega, masses = self.hyperparameters["omega"].views()[0], self._tree.leaves[: self.layout.size]
        reaper_smallest(masses, self.slots.priority, omega, result, *self._episodes.arrays())
        return result

    def own_stats(self) -> dict[str, Tensor]:
        total = self._tree.total()
        rate = self.density(self.slots.stored()).sum() / total if total else torch.ones((), dtype=torch.float64)
        return {"acceptance_rate": rate, **self._episodes.stats()}

    # --- draws from several shards

    def shard_sums(self) -> Sums:
        total = self._tree.total().item()
        if total and not self._acceptance:
            self._acceptance = self._mean_factor()
        return Sums([total * self._acceptance], largest_episode=self._episodes.largest_total())

    def _mean_factor(self) -> float:
        """The mean R^ω of 256 slots that are drawn by their masses."""
        slots, _ = self._tree.draw(uniform(256, device=self.layout.device, generator=self._rng))
        return self._factor(slots).mean().item()

    def draw_of_shard(self, wanted: ShardRows, sums: Sums) -> Draw:
        # F of Eq. 16
        self._episodes.least_largest = wanted.largest_episode
        drawn = super().draw_of_shard(wanted, sums)
        self._acceptance += 0.1 * (self._mean_factor() - self._acceptance)
        return drawn
