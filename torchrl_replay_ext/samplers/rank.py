"""Rank-based prioritized experience replay."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import TDError, WeightNorm, as_number, require_bool, require_choice
from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    is_traced,
    scalar,
    scatter_in_bounds,
    stratify,
    uniform,
    where_int64,
)
from torchrl_replay_ext.core.sum_tree import SumTree, UpdateMask
from torchrl_replay_ext.functional.priorities import is_last_occurrence, last_occurrence
from torchrl_replay_ext.samplers.base import PrioritySampler

# Above this number of transitions the sort looks at 7 bits of the mantissa only, which is several times faster.
_EXACT_SORT = 50_000
_DROPPED_BITS = 16
# Gaps that are tried, from where a transition belongs; and what spreads slots evenly (Knuth's multiplicative hash).
_PROBES = (0, 1, -1, 2)
_HASH = 2654435761
# As how many changes one counts that could not move.
_STAYED = 10

Segments = Literal["exact", "piecewise"]


def _rounded(number: Tensor) -> Tensor:
    """Without the bits that a coarse sort does not look at."""
    return ((number.view(torch.int32) >> _DROPPED_BITS) << _DROPPED_BITS).view(torch.float32)


@PrioritizedSampler.register
class RankBasedSampler(PrioritySampler):
    r"""Draws transitions by the rank of their TD error (Schaul et al. 2016, rank-based variant).

    P(i) = rank(i)^−α / Σ_{r≤N} r^−α, where rank 1 is the largest \|δ\| of the N stored transitions, and
    w_i = (N · P(i))^−β divided by the largest weight. The size of a TD error does not count, only their order: an
    outlier changes nothing, and neither does the scale of the rewards.

    New transitions stand before all others, the newest first, until their first update. What the ring overwrites leaves
    the order at once.

    The order is sorted anew before a draw when writes and updates since the last time have reached ``stale_fraction``
    of the number of transitions. In between, an updated transition moves into a gap where it belongs in the last sort;
    if the gaps there are taken it stays, and counts tenfold. Above 50,000 transitions, \|δ\| behind the first eighth of
    the ranks that differ by less than 0.8 % may be sorted as equal, unless ``stale_fraction=0``; equal ones keep their
    order.

    In a graph (:class:`~torchrl_replay_ext.CompilableReplayBuffer`) nothing is sorted; writes outside of it do that as
    soon as it is due. Where those are part of the graph too, call :meth:`sort` now and then.

    Args:
        capacity: number of slots, at least that of the storage.
        alpha: exponent of the rank, >= 0, or :class:`~torchrl_replay_ext.Anneal`, which the draws then follow from sort
            to sort; 0 is uniform. Default: 0.7.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.5.
        stratified: draw one transition from each of B segments of equal probability instead of B independent ones.
            Default: True.
        segments: ``"exact"`` (default): draws follow P exactly, for any N and B. ``"piecewise"``: the paper's
            approximation, the cumulative distribution made linear over B segments of equal probability: within a
            segment all transitions are equally likely. Weights are those of the probabilities drawn with. Where rank 1
            has a probability above 1 / B, a segment that would be empty holds the rank it falls on.
        stale_fraction: share of the transitions in [0, 1] that may be written or updated before the next sort; 0 sorts
            before each draw that follows a change. Default: 0.05.
        td_error: ``"squared"`` (default) if the loss writes δ², ``"absolute"`` if it writes \|δ\|. Only the order
            counts, so both draw the same.
        weight_norm: ``"buffer"`` (default): weights are divided by the largest weight of any stored transition, that of
            the last rank, so that w = (rank / N)^(αβ); ``"batch"``: by the largest of the batch.

    Raises:
        TypeError: if a number or a flag has another type.
        ValueError: if an argument is out of range, or, at the first write, ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=RankBasedSampler(1000), batch_size=4)
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    # nothing is sorted in graphs, but by writes outside them
    writes_in_graphs = False

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | Anneal = 0.7,
        beta: float | Anneal = 0.5,
        stratified: bool = True,
        segments: Segments = "exact",
        stale_fraction: float = 0.05,
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
    ):
        require_choice("RankBasedSampler", "segments", segments, get_args(Segments))
        require_bool("RankBasedSampler", "stratified", stratified)
        if not 0 <= as_number("RankBasedSampler", "stale_fraction", stale_fraction) <= 1:
            raise ValueError(f"RankBasedSampler(stale_fraction={stale_fraction}): stale_fraction must be in [0, 1].")
        self._stratified, self._segments, self._stale_fraction = stratified, segments, stale_fraction
        super().__init__(capacity, alpha=alpha, beta=beta, eps=0.0, td_error=td_error, weight_norm=weight_norm)

    def _allocate(self, size: int, device: torch.device) -> None:
        # Places in the order, the first rank first: those of what was written since the last sort, filled from their
        # end; those of the last sort, with a gap before each and more before and behind all; and one for slots that
        # hold nothing. The tree counts the places in use.
        self._margin = size // 8 + 64
        self._num_gaps = size + 2 * self._margin
        self._nowhere = size + 2 * self._num_gaps
        self._tree = SumTree(self._nowhere + 1, device=device)
        self._slot_at = torch.zeros(self._nowhere + 1, dtype=torch.int64, device=device)
        # the last one takes writes that are masked out
        self._place = torch.full((size + 1,), self._nowhere, dtype=torch.int64, device=device)
        # -d of the last sort in its order, then inf; and how many they are
        self._keys = torch.full((size,), math.inf, device=device)
        self._num_sorted = torch.zeros((), dtype=torch.int64, device=device)
        # below, d is rounded in the keys
        self._exact_above = torch.zeros(1, device=device)
        self._probes = torch.tensor(_PROBES, device=device).unsqueeze(1)
        # since the last sort: slots written; slots written or updated
        self._written = torch.zeros((), dtype=torch.int64, device=device)
        self._changes = torch.zeros((), dtype=torch.int64, device=device)
        # Σ_{r≤k} r^-alpha, and its alpha
        self._cumulative = torch.zeros(size, dtype=torch.float64, device=device)
        self._table_alpha = torch.zeros(1, dtype=torch.float64, device=device)
        self._tabulate(self._hyperparameters["alpha"].value)
        # piecewise: size of the last batch, which is the number of segments; 0 before, when probabilities are exact
        self._num_segments = 0
        self._shape_changed()

    def _tabulate(self, alpha: Tensor) -> None:
        self._table_alpha.copy_(alpha.reshape(1))
        ranks = torch.arange(1, self._size + 1, dtype=torch.float64, device=self._device)
        torch.cumsum(ranks.pow_(-self._table_alpha), 0, out=self._cumulative)

    def _clear(self) -> None:
        self._tree.clear_()
        self._slot_at.zero_()
        self._place.fill_(self._nowhere)
        self._keys.fill_(math.inf)
        self._num_sorted.zero_()
        self._exact_above.zero_()
        self._written.zero_()
        self._changes.zero_()

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "places_in_use": self._tree.rows,
            "slot_at": self._slot_at,
            "place": self._place,
            "keys": self._keys,
            "num_sorted": self._num_sorted,
            "exact_above": self._exact_above,
            "written": self._written,
            "changes": self._changes,
            "table_alpha": self._table_alpha,
        }

    def _check(self) -> None:
        place = self._place[:-1]
        placed = (place != self._nowhere).nonzero().squeeze(1)
        if not torch.equal(placed, self._stored_slots()):
            raise AssertionError("RankBasedSampler: a slot that holds nothing has a place, or the other way round")
        in_use = (self._tree.leaves > 0).nonzero().squeeze(1)
        places = place[placed]
        if not torch.equal(places.sort().values, in_use) or not torch.equal(self._slot_at[places], placed):
            raise AssertionError("RankBasedSampler: a place is in use for another slot")

    def _restored(self) -> None:
        self._tree.rebuild_()
        self._tabulate(self._table_alpha.clone())

    def _limit(self, alpha: float) -> float:
        return torch.finfo(torch.float32).max

    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        count = slots.shape[0]
        if not is_traced():
            if self._traceable:
                self._sort_if_due()
            if int(self._written) + count > self._size:
                self.sort()
        self._stamp_slots(slots)
        rows = torch.arange(count, device=self._device)
        place = self._size - 1 - (self._written + rows) % self._size
        self._move(slots, place, is_last_occurrence(slots))
        self._written.add_(count)
        self._changes.add_(count)

    def _drop(self, slots: Tensor) -> None:
        left = self._place[slots]
        self._tree.write(left, torch.zeros_like(left))
        self._place[slots] = self._nowhere

    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        """Move what is updated into the gap where it belongs; if that and the next ones are taken, it stays."""
        count = slots.shape[0]
        moves = is_last_occurrence(slots) if mask is None else mask.valid & mask.is_last
        key = -torch.where(priority >= self._exact_above, priority, _rounded(priority))
        low = torch.searchsorted(self._keys, key)
        high = torch.searchsorted(self._keys, key, right=True)
        # equal ones are spread over the gaps between them
        gap = self._margin + low + slots * _HASH % (high - low + 1)
        ahead, behind = self._outside(priority, slots)
        gap = where_int64(high == 0, ahead, gap)
        gap = where_int64(low == self._num_sorted, behind, gap)
        gaps = (gap + self._probes).clamp(0, self._num_gaps - 1)
        free = self._tree.get((self._size + 2 * gaps).reshape(-1)).view(gaps.shape) == 0
        first = free.to(torch.int64).argmax(0, keepdim=True)
        place = self._size + 2 * gaps.gather(0, first).squeeze(0)
        # one of those that would take the same gap
        wanted, moves = moves, moves & free.any(0)
        moves = moves & (last_occurrence(place, moves) == torch.arange(count, device=self._device))
        self._changes.add_(count + (_STAYED - 1) * (wanted & ~moves).sum())
        self._move(slots, place, moves)

    def _move(self, slots: Tensor, place: Tensor, moves: Tensor) -> None:
        """Put ``slots`` [n] at ``place`` [n] where ``moves`` [n] says so, once per slot and place at most."""
        nowhere = torch.full_like(place, self._nowhere)
        left, taken = (
            where_int64(moves, gather_in_bounds(self._place, slots), nowhere),
            where_int64(moves, place, nowhere),
        )
        self._tree.write(torch.cat([left, taken]), torch.cat([torch.zeros_like(slots), moves.to(torch.int64)]))
        scatter_in_bounds(self._slot_at, taken, slots)
        scatter_in_bounds(self._place, where_int64(moves, slots, torch.full_like(slots, self._size)), taken)

    def _outside(self, priority: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The gaps before all of the last sort, and behind all, for those that belong there."""
        last = gather_in_bounds(self._keys, (self._num_sorted - 1).clamp_min(0).reshape(1))
        largest, smallest = (torch.where(key.isfinite() & (key < 0), -key, 1.0) for key in (self._keys[:1], last))
        ahead = self._margin / (1 + priority / largest)
        behind = self._margin / 2 * (1 + 1 / (1 + priority / smallest))
        spread = slots * _HASH % (self._margin // 4)
        return ahead.to(torch.int64), self._margin + self._num_sorted + behind.to(torch.int64) - spread

    def _reweight(self, slots: Tensor | None = None) -> None:
        if slots is None:
            self._tabulate(self._hyperparameters["alpha"].value)

    def _sort_if_due(self) -> None:
        changes = self._changes.item()
        if changes and changes >= self._stale_fraction * self._tree.total().item():
            self.sort()

    @torch.no_grad()
    def sort(self) -> None:
        """Bring the order up to date; O(N log N). Needed only where all writes are part of a graph."""
        with self._change():
            self._sort()

    def _sort(self) -> None:
        in_use = self._tree.leaves > 0
        slots = self._slot_at[in_use.nonzero().squeeze(1)]
        key = self._priority[slots]
        key = torch.where(key < 0, math.inf, key)
        count = len(slots)
        if count > _EXACT_SORT and self._stale_fraction > 0:
            order = (key.view(torch.int32) >> _DROPPED_BITS).to(torch.int16).sort(stable=True, descending=True).indices
            # the first ranks differ most in probability
            head = order[: count // 8]
            order[: len(head)] = head[key[head].sort(stable=True, descending=True).indices]
            self._exact_above.copy_(key[order[len(head) - 1]])
            key = torch.where(key >= self._exact_above, key, _rounded(key))
        else:
            order = key.sort(stable=True, descending=True).indices
            self._exact_above.zero_()
        slots = slots[order]
        places = self._size + 1 + 2 * (self._margin + torch.arange(count, device=self._device))
        self._slot_at[places] = slots
        self._place[slots] = places
        self._keys.fill_(math.inf)
        self._keys[:count] = -key[order]
        self._num_sorted.fill_(count)
        self._tree.leaves.zero_()
        self._tree.leaves[places] = 1
        self._tree.rebuild_()
        self._written.zero_()
        self._changes.zero_()
        alpha = self._hyperparameters["alpha"].value
        if alpha.item() != self._table_alpha.item():
            self._tabulate(alpha)

    def _draw(self, batch_size: int) -> tuple[Tensor, Tensor, float | Tensor | None]:
        if not is_traced():
            self._sort_if_due()
        num = self._tree.total()
        u = uniform(batch_size, device=self._device, generator=self._rng)
        if self._stratified:
            u = stratify(u)
        bounds = None
        if self._segments == "exact":
            rank = torch.searchsorted(self._cumulative, u * self._mass_of(num), right=True)
            rank = torch.minimum(rank, num - 1)
            smallest = num.to(torch.float64) ** -self._table_alpha
        else:
            self._num_segments = batch_size
            bounds = begin, width = self._bounds(num, batch_size)
            scaled = u * batch_size
            segment = scaled.to(torch.int64).clamp_max(batch_size - 1)
            rank = gather_in_bounds(begin, segment) + ((scaled - segment) * gather_in_bounds(width, segment)).to(
                torch.int64
            )
            smallest = self._density(begin, bounds).amin()
        rank = rank.clamp_min(0)
        place, in_use = self._tree.find(rank)
        slots = gather_in_bounds(self._slot_at, place)
        density = self._density(rank, bounds) * (in_use > 0)
        return slots, density, None if self._weight_norm == "batch" else scalar(smallest.reshape(()))

    def _mass_of(self, num: Tensor) -> Tensor:
        """Σ_{r≤num} r^-alpha, float64 [1]."""
        return gather_in_bounds(self._cumulative, (num - 1).clamp_min(0).reshape(1))

    def _bounds(self, num: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """For each of ``count`` segments, the first rank, counted from 0, and the number of ranks; int64 [count]."""
        parts = torch.arange(1, count + 1, dtype=torch.float64, device=self._device) / count
        ends = torch.searchsorted(self._cumulative, parts * self._mass_of(num)) + 1
        # the last one ends with the last rank, however small its probability
        ends = torch.maximum(torch.minimum(ends, num), num * (parts == 1))
        begins = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        return torch.minimum(begins, ends - 1), (ends - begins).clamp_min(1)

    def _density(self, rank: Tensor, bounds: tuple[Tensor, Tensor] | None) -> Tensor:
        """A number proportional to the probability of each ``rank`` [n], counted from 0; float64 [n].

        ``bounds``: the segments (:meth:`_bounds`), None for exact probabilities.
        """
        if bounds is None:
            return (rank + 1).to(torch.float64) ** -self._table_alpha
        begin, width = bounds
        # the segments that hold a rank are successive: one of any width, and those that fall on its last rank
        first = torch.searchsorted(begin + width, rank, right=True)
        behind = torch.searchsorted(begin, rank, right=True)
        first_width = gather_in_bounds(width, first.clamp_max(len(width) - 1))
        return 1 / first_width.to(torch.float64) + (behind - first - 1)

    def _unnormalized(self, slots: Tensor) -> Tensor:
        self._sort_if_due()
        place = self._place[slots]
        bounds = self._bounds(self._tree.total(), self._num_segments) if self._num_segments else None
        return self._density(self._tree.prefix(place), bounds) * self._tree.get(place)

    def _extra_stats(self) -> dict[str, Tensor]:
        return {"stale": self._changes / self._tree.total().clamp_min(1)}
