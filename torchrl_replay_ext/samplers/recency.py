"""Replay that favours recent transitions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import BETA, Anneal, exponent
from torchrl_replay_ext.arguments import as_number
from torchrl_replay_ext.compilation import uniform
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.rows import RowView


class RecencySampler(ReplaySampler):
    r"""Draws newer transitions more often: P decreases geometrically with age.

    P(age k) = (1 − q) q^k / (1 − q^N) with q = 2^(−1 / half_life); the newest of the N stored transitions has k = 0.
    Truncated geometric replay was proposed by Korniak et al. 2026 (arXiv 2605.10236). We specify q by a half-life, and
    add importance-sampling weights: w = (N · P)^−β divided by the largest weight.

    The age of a transition is its distance from the newest one in the order of writing. In a storage with ``ndim`` >=
    2, transitions of the same step are ordered by slot. TD errors are not used: ``update_priority`` does nothing. The
    writer must be a round-robin writer, the default.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        half_life: the age, in transitions, at which the probability has halved, > 0; ``math.inf`` is uniform. For a
            mean age near h in a much larger buffer, pass 0.7 h. Default: 100000.
        beta: exponent of the importance-sampling weights, a number in [0, 1]; with 0, all weights are 1. With beta > 0
            the newest of N transitions has weight 2^(−beta (N − 1) / half_life), at least 2^(−1022 beta). It is close
            to 0 if ``half_life`` is much shorter than the buffer. ``beta`` cannot be annealed, since schedules count
            priority updates. Default: 0.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range; at a write, if slots are not written one after the other.
        RuntimeError: at a draw, if the buffer is empty.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = RecencySampler(half_life=2)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.arange(5)}, [5]))
        >>> sampler.probabilities(rb.storage)
        tensor([0.0889, 0.1258, 0.1779, 0.2516, 0.3558], dtype=torch.float64)
    """

    needs_order, takes_priorities = True, False
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        half_life: float = 100_000,
        beta: float = 0.0,
    ):
        self._half_life = as_number("RecencySampler", "half_life", half_life)
        if not self._half_life > 0:
            raise ValueError(f"RecencySampler(half_life={half_life}): half_life must be > 0; use math.inf for uniform.")
        super().__init__(capacity, beta=as_number("RecencySampler", "beta", beta))

    def set_hyperparameter(self, name: str, value: float | Tensor | Anneal) -> None:
        """Assign a number; TypeError for a schedule."""
        super().set_hyperparameter(name, as_number("RecencySampler", name, value))

    @property
    def half_life(self) -> float:
        """The age, in transitions, at which the probability has halved."""
        return self._half_life

    def _repr_values(self) -> list[str]:
        return [f"half_life={self._half_life:g}", *super()._repr_values()]

    def allocate(self, layout: Layout) -> None:
        self._tree = SumTree(layout.size, device=layout.device)  # mass 1 for each stored slot
        self._end = torch.zeros(1, dtype=torch.int64, device=layout.device)  # the slot after the newest step

    def write(self, slots: Tensor, rows: RowView) -> None:
        if not rows.is_rewrite:
            lanes = self.layout.slots_per_step
            self._end.copy_((rows.slots_on_host[-1:] // lanes + 1) * lanes, non_blocking=True)
        self._tree.write(slots, torch.ones_like(slots))

    def remove(self, slots: Tensor) -> None:
        self._tree.write(slots, 0)

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        total = self._tree.total()
        u = uniform(count, device=total.device, generator=generator)
        rate = math.log(2) / self._half_life
        # the inverse of P(age <= k) = (1 − q^(k + 1)) / (1 − q^N), and its limit for q = 1
        real = -torch.log1p(u * torch.expm1(-rate * total.double())) / rate if rate else u * total
        age = torch.minimum(real.to(torch.int64), total - 1)
        rank = self._tree.prefix(self._end) - 1 - age
        # if nothing can be drawn, the rank is -1, which finds slot 0
        slots, mass = self._tree.find(torch.minimum(rank + total * (rank < 0), total - 1))
        smallest = self._decay(total - 1).clamp_min(2.0**-1022)  # must not underflow
        return Draw(slots, self._decay(age) * mass, smallest.reshape(1))

    def density(self, slots: Tensor) -> Tensor:
        age = (self._tree.prefix(self._end) - 1 - self._tree.prefix(slots)) % self._tree.total().clamp_min(1)
        return self._decay(age) * self._tree.get(slots)

    def _decay(self, age: Tensor) -> Tensor:
        return torch.exp2(-age.double() / self._half_life)

    def clear(self) -> None:
        self._tree.clear_()

    def tensors(self) -> dict[str, Tensor]:
        return {"ring_end": self._end}

    def rebuild(self) -> None:
        self._tree.leaves[: self.layout.size] = (self.slots.generation > 0).to(torch.int64)
        self._tree.rebuild_()
