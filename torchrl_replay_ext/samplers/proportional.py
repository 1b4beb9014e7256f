"""Proportional prioritized experience replay."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import ALPHA, BETA, Anneal, Hyperparameter, exponent
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_bool, require_choice
from torchrl_replay_ext.compilation import gather_in_bounds, stratified_uniform, uniform, where_int64
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.shard_draws import Sums

# The largest d that is accepted. float32 holds larger numbers, but their products overflow.
MAX_PRIORITY = 1e30


def largest_priority(tree: SumTree, alpha: Hyperparameter) -> float:
    """The largest d whose d^α fits into ``tree``, at most :data:`MAX_PRIORITY`."""
    # with a smaller α the power may overflow; it exceeds MAX_PRIORITY already
    return min(tree.max_supported_priority ** (1 / max(alpha.bound, 0.05)), MAX_PRIORITY)


class PowerSampler(ReplaySampler):
    """Base class of samplers that draw from a sum tree of the masses d^α.

    The kernels of writes and updates set the masses, see :class:`~torchrl_replay_ext.core.sum_tree.PowerMasses`.
    """

    # True if the sampler needs the smallest mass
    _tracks_min = False

    def allocate(self, layout: Layout) -> None:
        alpha = self.hyperparameters["alpha"]
        self._tree = SumTree(layout.size, track_min=self._tracks_min, device=layout.device)
        self.slots.set_masses(self._tree.powers(alpha.tensor))

    @property
    def max_supported_priority(self) -> float:
        return largest_priority(self._tree, self.hyperparameters["alpha"])

    def density(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots).double()

    def reweight(self, slots: Tensor | None) -> None:
        generation, priority, alpha = (
            self.slots.generation,
            self.slots.priority,
            self.hyperparameters["alpha"].tensor[0],
        )
        if slots is not None:
            generation, priority = gather_in_bounds(generation, slots), gather_in_bounds(priority, slots)
        # float64, because above 1 the rounding of a float32 exceeds a unit of mass
        mass = SumTree.to_mass(priority.abs().to(torch.float64) ** alpha)
        if slots is None:
            self._tree.leaves[: self.layout.size] = mass * (generation > 0)
            self._tree.rebuild_()
        else:
            self._tree.write(where_int64(generation > 0, slots, -1), mass)

    def remove(self, slots: Tensor) -> None:
        self._tree.write(slots, 0)

    def clear(self) -> None:
        self._tree.clear_()


class ProportionalSampler(PowerSampler):
    r"""Draws transitions in proportion to a power of their TD error (Schaul et al. 2016, proportional variant).

    P(i) = d_i^α / Σ_k d_k^α with d_i = \|δ_i\| + eps, and w_i = (N · P(i))^−β divided by the largest weight. New
    transitions get the largest d seen so far, at least 1. Where all \|δ\| are much smaller than 1, they are drawn much
    more often than others until their first update; scale the rewards then. A single outlier determines the priority of
    all later transitions; ``max_priority_within_buffer`` limits this.

    LAP (Fujimoto et al. 2020) is ``ProportionalSampler(alpha=0.4, beta=0.0, eps=0.0, min_priority=1.0)`` with a Huber
    loss: P(i) ∝ max(\|δ_i\|^α, 1) and no importance-sampling weights.

    It can be used as the ``sampler`` of a :class:`~torchrl.data.TensorDictReplayBuffer`. Sums are exact: d^α is stored
    in fixed point, in units of 2^-23 = 1.2e-7 (rounded up). At a capacity of 10^6, d^α can be up to 5 · 10^5.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        alpha: priority exponent, >= 0, or :class:`~torchrl_replay_ext.Anneal`; 0 is uniform. Default: 0.6.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.4.
        eps: constant added to \|δ\|, >= 0; with 0, transitions with a TD error of 0 are never drawn, unless
            ``min_priority`` is positive or ``alpha`` is 0. Default: 1e-6.
        stratified: draw one transition from each of B segments of equal mass instead of B independent ones. Default:
            False.
        td_error: ``"squared"`` (default) if the loss writes δ² to the buffer's priority key, ``"absolute"`` if it
            writes \|δ\|. Most TorchRL losses write δ² (DQN, TD3, DDPG, REDQ, IQL, CQL); SAC, DiscreteSAC, CrossQ and
            TQC write \|δ\|. A wrong value raises no error: it doubles or halves the exponent.
        weight_norm: ``"buffer"`` (default) divides weights by the largest weight of all stored transitions,
            ``"batch"`` by the largest weight of the batch.
        max_priority_within_buffer: if True, new transitions get the largest d of the stored transitions that have been
            updated, instead of the largest d ever seen; rows that the same write overwrites are not included. If no
            stored transition has been updated, or all d are 0, the last such value is kept. Default: False.
        min_priority: the smallest d of an updated transition, >= 0: smaller values of \|δ\| + eps are raised to it.
            Default: 0.

    Raises:
        TypeError: if a number or a flag has the wrong type.
        ValueError: if an argument is out of range; at the first write, if ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000), sampler=ProportionalSampler(1000, alpha=0.6), batch_size=4
        ... )
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    alpha = exponent("alpha", ALPHA)
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        alpha: float | Anneal = 0.6,
        beta: float | Anneal = 0.4,
        eps: float = 1e-6,
        stratified: bool = False,
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
        max_priority_within_buffer: bool = False,
        min_priority: float = 0.0,
    ):
        name = "ProportionalSampler"
        self._stratified = require_bool(name, "stratified", stratified)
        self._tracks_min = require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm)) == "buffer"
        super().__init__(
            capacity,
            alpha=alpha,
            beta=beta,
            eps=eps,
            min_priority=min_priority,
            td_error=td_error,
            max_priority_within_buffer=max_priority_within_buffer,
        )

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        numbers = stratified_uniform if self._stratified else uniform
        slots, mass, minima = self._tree.walk(numbers(count, device=self.layout.device, generator=generator))
        return Draw(slots, mass, minima if self._tracks_min else None)

    def shard_sums(self) -> Sums:
        return Sums([self._tree.total().item()])
