"""Rank-based prioritized experience replay; ranks follow from buckets of nearly equal priorities."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import BETA, Anneal, exponent
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_bool, require_choice
from torchrl_replay_ext.compilation import Array, gather_in_bounds, stratified_uniform, uniform
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.sum_tree import read_root
from torchrl_replay_ext.kernels.layouts import BUCKETS, DROPPED_BITS, NEW, NOWHERE
from torchrl_replay_ext.kernels.ops import (
    Views,
    empty,
    rank_draw,
    rank_find,
    rank_move,
    rank_rank_of,
    rank_rebuild,
    rank_tabulate,
)
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.rows import RowView


class RankBuckets:
    """Slots in the order of their ranks, counted from 0.

    A bucket holds the slots whose float32 priorities have the same upper 16 bits, which differ by less than 0.8 %.
    Ranks descend from bucket to bucket. Within a bucket they follow the offsets of its members in an array: a slot gets
    the last offset when it is updated, and when one leaves, the last one takes its offset. The first bucket is
    for slots that were never updated; there the last offset has rank 0.

    The arrays are those of ``kernels/layouts.py``. On the CPU, changes take effect at once and cost O(1) per row.
    On CUDA, :meth:`refresh` sorts, and within a bucket the slots that were written last come first.

    Args:
        size: number of slots.
        device: device of the arrays.
    """

    def __init__(self, size: int, device: torch.device):
        self._size = size

        def numbers(count: int, dtype: torch.dtype, value: int = 0) -> Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        self._bucket = numbers(size, torch.int32, NOWHERE)
        self._offset = numbers(size, torch.int64)
        # blocks with space for half as many more slots, and space for blocks that grow
        self._members = numbers(3 * size + 2 * min(size, BUCKETS) + 2, torch.int32)
        self._start = numbers(BUCKETS, torch.int64)
        self._room = numbers(BUCKETS, torch.int32)
        self._counts = numbers(2 * BUCKETS, torch.int32)
        self._top = numbers(1, torch.int64)
        arrays = self._bucket, self._offset, self._members, self._start, self._room, self._counts, self._top
        self._views = Views(*arrays)
        # the priorities of all new transitions, and of all that are removed
        self._new, self._removed = numbers(1, torch.float32, -1), numbers(1, torch.float32) * math.nan

    def insert(self, slots: Tensor) -> None:
        """Give new transitions in ``slots`` [n] the first ranks, the last one rank 0."""
        rank_move(*self._views(), slots.contiguous(), self._new)

    def remove(self, slots: Tensor) -> None:
        """Remove ``slots`` [n]."""
        rank_move(*self._views(), slots.contiguous(), self._removed)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        """Move each of ``slots`` [n] to the rank of its ``priority`` [n]; see :meth:`ReplaySampler.update`."""
        rank_move(*self._views(), slots.contiguous(), priority.contiguous())

    def refresh(self) -> None:
        """Bring the ranks up to date before they are read."""
        if not self._bucket.is_cpu:
            rank_rebuild(*self._views())

    def total(self) -> Tensor:
        """Number of transitions, int64 []."""
        # within limits also while another thread changes the counts
        return read_root(self._counts).to(torch.int64).clamp_(0, self._size)

    def draw(self, u: Tensor, cumulative: Tensor, alpha: Tensor) -> tuple[Array, Array, Array]:
        """Draw slots by rank^-alpha; see :func:`torchrl_replay_ext.kernels.rank.draw`.

        Returns:
            The slots, int64 [n]; rank^-alpha of each, float64 [n]; and that of the last rank, float64 [1].
        """
        _, _, members, start, _, counts, _ = self._views()
        slots = empty(members, u.shape[0], torch.int64)
        density, smallest = empty(members, u.shape[0], torch.float64), empty(members, 1, torch.float64)
        rank_draw(members, start, counts, self._size, cumulative, alpha, u, slots, density, smallest)
        return slots, density, smallest

    def find(self, rank: Tensor) -> Tensor:
        """The slot of each ``rank`` [n], int64 [n]; 0 if there are not so many transitions."""
        slots = torch.empty_like(rank)
        rank_find(self._members, self._start, self._counts, self._size, rank.contiguous(), slots)
        return slots

    def rank_of(self, slots: Tensor) -> Tensor:
        """The rank of each of ``slots`` [n], int64 [n]; -1 for slots without a transition."""
        rank = torch.empty_like(slots)
        rank_rank_of(self._bucket, self._offset, self._members, self._counts, slots.contiguous(), rank)
        return rank

    def density(self, slots: Tensor, alpha: Tensor) -> Tensor:
        """rank^-alpha of each of ``slots`` [n], for ranks from 1 on, float64 [n]; 0 for slots without a transition."""
        rank = self.rank_of(slots)
        return (rank + 1).clamp_min(1).to(torch.float64) ** -alpha * (rank >= 0)

    def clear(self) -> None:
        """Remove all transitions."""
        self._bucket.fill_(NOWHERE)
        self._offset.zero_()
        self._top.zero_()
        rank_rebuild(*self._views())

    def tensors(self) -> dict[str, Tensor]:
        """The state to save; the rest follows from the priorities."""
        return {"place": self._offset}

    def rebuild(self, priority: Tensor, stored: Tensor) -> None:
        """Recompute the buckets after :meth:`tensors` were replaced.

        Args:
            priority: of each slot, negative if it was never updated, float32 [slots].
            stored: True if a slot holds a transition, bool [slots].
        """
        # the bits of positive floats are ordered like the floats
        bucket = torch.where(priority < 0, NEW, BUCKETS - 1 - (priority.view(torch.int32) >> DROPPED_BITS))
        self._bucket.copy_(torch.where(stored, bucket, NOWHERE))
        # saved offsets of other devices, or wrong ones, still are an order
        order = self._offset.argsort(stable=True)
        order = order[self._bucket[order].argsort(stable=True)]
        ordered = self._bucket[order]
        # new transitions: the number of those that follow, negative
        origin = torch.searchsorted(ordered, torch.where(ordered == NEW, NEW + 1, ordered))
        self._offset[order] = torch.arange(self._size, device=order.device) - origin
        self._top.fill_(self._size)
        rank_rebuild(*self._views())


# An annealed alpha is applied in steps of this size.
STEP = 0.01

Segments = Literal["exact", "piecewise"]


def piecewise_density(rank: Tensor, begin: Tensor, width: Tensor) -> Tensor:
    """A number proportional to the probability of each ``rank`` [n], counted from 0; float64 [n].

    ``begin`` and ``width``: the first rank and the number of ranks of each segment.
    """
    # a rank lies in consecutive segments: the first has any width, the others contain only this rank
    first = torch.searchsorted(begin + width, rank, right=True)
    end = torch.searchsorted(begin, rank, right=True)
    first_width = gather_in_bounds(width, first.clamp_max(len(width) - 1))
    return 1 / first_width.to(torch.float64) + (end - first - 1)


class RankBasedSampler(ReplaySampler):
    r"""Draws transitions by the rank of their TD error (Schaul et al. 2016, rank-based variant).

    P(i) = rank(i)^−α / Σ_{r≤N} r^−α, where rank 1 is the largest \|δ\| of the N stored transitions, and
    w_i = (N · P(i))^−β divided by the largest weight. Only the order of the TD errors matters, so P is insensitive to
    outliers and to the scale of the rewards.

    Until their first update, new transitions have the first ranks; a transition that is written gets rank 1. Once rows
    are overwritten, equal values, such as those of new transitions, are in no particular order. Overwritten transitions
    are removed from the order immediately.

    Ranks are exact after each write and update, in eager code and in graphs, up to ties: values of \|δ\| that agree in
    the first 8 binary digits (they differ by less than 0.8 %) count as equal. Transitions with equal values have
    consecutive ranks, an updated one the last of them, and draws, probabilities and weights use these ranks. On CUDA,
    each draw sorts the transitions; of equal values the newest transition has the first rank there.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        alpha: exponent of the rank, >= 0, or :class:`~torchrl_replay_ext.Anneal`; 0 is uniform. An annealed value is
            applied in steps of 0.01. Default: 0.7.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.5.
        stratified: draw one transition from each of B segments of equal probability instead of B independent ones.
            Default: True.
        segments: ``"exact"`` (default): draws follow P exactly, for any N and B. ``"piecewise"``: the approximation of
            the paper with a piecewise linear cumulative distribution: the ranks are divided into B segments of equal
            probability, and within a segment all transitions are equally likely. Weights use the approximate
            probabilities. If rank 1 has a probability above 1 / B, some segments would be empty; such a segment
            contains the rank at its boundary. :meth:`probabilities` and :meth:`stats` have as many segments as the last
            batch, or exact probabilities before the first batch, also after a load.
        td_error: ``"squared"`` (default) if the loss writes δ², ``"absolute"`` if it writes \|δ\|. Both have the same
            order, so the draws are the same, up to ties.
        weight_norm: ``"buffer"`` (default) divides weights by the largest weight of all stored transitions, which is
            that of the last rank: w = (rank / N)^(αβ). ``"batch"`` divides by the largest weight of the batch.

    Raises:
        TypeError: if a number or a flag has the wrong type.
        ValueError: if an argument is out of range; at the first write, if ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=RankBasedSampler(1000), batch_size=4)
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    alpha = exponent("alpha", "Exponent of the rank. An assignment takes effect at the next draw.")
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        alpha: float | Anneal = 0.7,
        beta: float | Anneal = 0.5,
        stratified: bool = True,
        segments: Segments = "exact",
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
    ):
        name = "RankBasedSampler"
        self._segments = require_choice(name, "segments", segments, get_args(Segments))
        self._weight_norm = require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        self._stratified = require_bool(name, "stratified", stratified)
        super().__init__(capacity, alpha=alpha, beta=beta, td_error=td_error)

    def allocate(self, layout: Layout) -> None:
        size, device = layout.size, layout.device
        self._ranks = RankBuckets(size, device)
        # Σ_{r≤k} r^-alpha, and the alpha of this table
        self._cumulative = torch.zeros(size, dtype=torch.float64, device=device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=device)
        self._views = Views(self._cumulative, self._table_alpha)
        self._tabulate(self.hyperparameters["alpha"].tensor, 0.0)
        # piecewise: size of the last batch, which is the number of segments; 0 (exact probabilities) before the first
        self._num_segments = 0

    def write(self, slots: Tensor, rows: RowView) -> None:
        self._ranks.insert(slots)

    def remove(self, slots: Tensor) -> None:
        self._ranks.remove(slots)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._ranks.update(slots, priority)

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        self._prepare()
        numbers = stratified_uniform if self._stratified else uniform
        u = numbers(count, device=self.layout.device, generator=generator)
        if self._segments == "exact":
            slots, density, smallest = self._ranks.draw(u, *self._views())
        else:
            slots, density, smallest = self._draw_piecewise(u)
        return Draw(slots, density, None if self._weight_norm == "batch" else smallest)

    def density(self, slots: Tensor) -> Tensor:
        self._prepare()
        if not self._num_segments:
            return self._ranks.density(slots, self._table_alpha)
        rank = self._ranks.rank_of(slots)
        return piecewise_density(rank.clamp_min(0), *self._bounds(self._num_segments)) * (rank >= 0)

    def reweight(self, slots: Tensor | None) -> None:
        if slots is None:
            self._tabulate(self.hyperparameters["alpha"].tensor, 0.0)

    def _tabulate(self, alpha: Tensor, step: float) -> None:
        rank_tabulate(self._cumulative, self._table_alpha, alpha, step)

    def _prepare(self) -> None:
        """Bring ranks and alpha up to date before a draw."""
        self._ranks.refresh()
        alpha = self.hyperparameters["alpha"]
        if alpha.annealed:
            self._tabulate(alpha.tensor, STEP)

    def _draw_piecewise(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self._num_segments = count = u.shape[0]
        begin, width = self._bounds(count)
        scaled = u * count
        segment = scaled.to(torch.int64).clamp_max(count - 1)
        within = (scaled - segment) * gather_in_bounds(width, segment)
        rank = gather_in_bounds(begin, segment) + within.to(torch.int64)
        # if nothing can be drawn, the rank is -1, which finds slot 0
        density = piecewise_density(rank.clamp_min(0), begin, width) * (rank >= 0)
        return self._ranks.find(rank), density, piecewise_density(begin, begin, width).amin().reshape(1)

    def _bounds(self, count: int) -> tuple[Tensor, Tensor]:
        """For each of ``count`` segments, the first rank, counted from 0, and the number of ranks; int64 [count]."""
        num = self._ranks.total()
        parts = torch.arange(1, count + 1, dtype=torch.float64, device=num.device) / count
        total = gather_in_bounds(self._cumulative, (num - 1).clamp_min(0).reshape(1))
        # a boundary that lies on the end of a rank must not include the next rank because of rounding
        ends = torch.searchsorted(self._cumulative, parts * total * (1 - 1e-12)) + 1
        # the last segment ends with the last rank, however small its probability
        ends = torch.maximum(torch.minimum(ends, num), num * (parts == 1))
        begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return torch.minimum(begins, ends - 1), (ends - begins).clamp_min(1)

    def clear(self) -> None:
        self._ranks.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {"table_alpha": self._table_alpha, **self._ranks.tensors()}

    def rebuild(self) -> None:
        self._ranks.rebuild(self.slots.priority, self.slots.generation > 0)
        self._tabulate(self._table_alpha.clone(), 0.0)
