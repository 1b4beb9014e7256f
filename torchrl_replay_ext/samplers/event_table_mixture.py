"""Draws from event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1)."""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from tensordict import NestedKey
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    is_traced,
    random_seed,
    uniform,
    where_int64,
)
from torchrl_replay_ext.core.event_tables import EventTables, TableView
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.functional.allocation import METHODS, Allocation, allocate
from torchrl_replay_ext.kernels.events_layout import CHANGES
from torchrl_replay_ext.kernels.ops import Views, as_tensor, empty, events_draw, events_mixture, events_set_masses
from torchrl_replay_ext.samplers.base import Distribution, Draw, RowView, ShardRows, Sums
from torchrl_replay_ext.samplers.proportional import MAX_PRIORITY, largest_priority
from torchrl_replay_ext.samplers.table_shares import TableShares

Correction = Literal["mixture", "conditional", "lemma2", "priority"]

# why rows cannot be drawn from several shards
_PAIRS = "this correction counts outcomes, which may lie in several shards; use correction=None or 'mixture'."


class EventTableMixture(Distribution):
    """p(i) = Σ_k η_k q_k(i), with q_k(i) ∝ d_i^α, or uniform over table k without ``alpha``.

    See :class:`~torchrl_replay_ext.EventTableSampler`. A sum tree holds the mass of each entry of each table; the
    entries of a table are consecutive leaves.

    With correction "priority", p(i) ∝ 1 + η inside of the union of the event tables and 1 − η outside, for
    η = Σ_{k>0} η_k (SSET, Sec. 4).

    Args:
        log, priorities: the state of the slots.
        tables: the event tables.
        shares: η of each table.
        min_sizes: minimum number of entries of each table, int64 [tables]; -1 stands for the batch size.
        allocation: how rows are divided among tables.
        correction: type of the importance-sampling weights.
        pair_keys: entries with the state and the action, for corrections that count pairs of them.
        alpha: exponent of d; None: draws do not depend on TD errors.
        beta: exponent of weights; None: all weights are 1.
    """

    writes_in_graphs = False
    settings = ("eta",)

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        *,
        tables: EventTables,
        shares: TableShares,
        min_sizes: Tensor,
        allocation: Allocation,
        correction: Correction | None,
        pair_keys: tuple[NestedKey, ...],
        alpha: Hyperparameter | None,
        beta: Hyperparameter | None,
    ):
        self._log, self._priorities, self._tables, self._shares = log, priorities, tables, shares
        self._allocation: Allocation = allocation
        self._correction, self._alpha, self._beta = correction, alpha, beta
        self.takes_priorities = alpha is not None
        layout = log.layout
        self._size, self._device = layout.size, layout.device
        shares.to(self._device)
        self._least_counts, self._min_sizes = min_sizes.tolist(), min_sizes.to(self._device)
        # pinned tables choose the slots of new transitions
        self.slots_in_ring_order = not tables.is_pinned
        self._is_bound = layout.known
        if self._is_bound:
            tables.allocate(layout.size, self._device)
        self._view = TableView(tables, self._device)
        self._tree = SumTree(len(self._view.slot_at), device=self._device)
        # numbers and an exponent, whose power is the mass of each slot; no numbers if all masses are 0 or 1 unit
        nothing = priorities.of_slot[:0].clone(), priorities.of_slot[:0].to(torch.float64)
        self._power = nothing if alpha is None else (priorities.of_slot, alpha.tensor)
        # the counter of changes of the tables that this distribution has applied; -1: none
        self._seen = torch.full((1,), -1, dtype=torch.int64, device="cpu")
        self._pairs: PairCounts | None = None
        if correction in ("conditional", "lemma2"):
            self._pairs = PairCounts(layout.size, len(tables), pair_keys, device=self._device)
            self.parts = (self._pairs,)
        # η of each table, which is changed in place later
        self._eta = shares.current
        if correction == "priority":
            # all rows come from the default table, in proportion to these numbers
            self._eta = (torch.arange(len(tables), device=self._device) == 0).to(torch.float64)
            numbers = torch.ones_like(priorities.of_slot)
            self._power = numbers, torch.ones(1, dtype=torch.float64, device=self._device)
        self._settings = Views(self._eta, self._min_sizes, self._view.begins)
        # size of the last batch outside graphs: the default minimum size of a table for density()
        self._batch_size = 1
        # batch sizes for which the sizes of the tables were checked
        self._known_sizes: set[int] = set()

    @property
    def max_supported_priority(self) -> float:
        return MAX_PRIORITY if self._alpha is None else largest_priority(self._tree, self._alpha)

    # --- masses

    def _follow(self, slots: Tensor) -> None:
        """Update the masses of what has changed in the tables, and of ``slots`` [n]; negative slots are skipped."""
        tables, view, begin, end, changes, is_new = self._tables, self._view, 0, 0, None, False
        if self._is_bound and not is_traced():
            begin, end = int(self._seen), int(tables.counters[CHANGES])
            self._seen.fill_(end)
            if not tables.has_changes_since(begin):
                is_new, begin = True, end
                # those that are being inserted are not stored yet
                slots = torch.cat([self._stored(torch.arange(self._size, device=self._device)), slots])
                view.send()
                self._tree.clear_()
            elif begin != end and (view.is_copy or self._pairs or self._correction == "priority"):
                changes = view.changes(begin)
        if self._correction == "priority":
            slots = slots if changes is None else torch.cat([slots, self._stored(changes[:, 1])])
            self._set_numbers(slots.clamp_min(0))
        slot_at, places, counts, journal = view.views()
        if view.is_copy:
            begin, end, journal = (0, 0, journal) if changes is None else (0, len(changes), changes)
        leaves, nodes, pages, _ = self._tree.arrays()
        masses = *self._power, slots.contiguous()
        events_set_masses(leaves, nodes, pages, *masses, slot_at, places, counts, journal, begin, end)
        if self._pairs is not None and not is_traced():
            moved = slots if changes is None else torch.cat([changes[:, 1], slots])
            moved = torch.arange(self._size, device=self._device) if is_new else moved
            self._pairs.set_tables(moved, view.find(moved) >= 0)

    def _set_numbers(self, slots: Tensor) -> None:
        """Set the numbers of ``slots`` [n] for correction "priority": 1 + η, or 1 − η outside of the event tables."""
        event_share, inside = 1 - self._shares.current[0].float(), (self._view.find(slots) >= 0).any(0)
        self._power[0].index_copy_(0, slots, torch.where(inside, 1 + event_share, 1 - event_share))

    def _stored(self, slots: Tensor) -> Tensor:
        """``slots`` [n]; -1 for those without a transition."""
        return where_int64(gather_in_bounds(self._log.generation, slots) > 0, slots, -1)

    def sync(self) -> None:
        if self._is_bound and self._seen.item() != self._tables.counters.numpy()[CHANGES]:
            self._follow(self._view.begins[:0])

    def before_ingest(self, count: int, next_slot: int) -> None:
        self._tables.adopt(count, next_slot)

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        if self.takes_priorities:
            # the masses are computed from d before the write is recorded
            self._priorities.of_slot[slots] = -priority.float()
        self._follow(slots)

    def remove(self, slots: Tensor) -> None:
        self._tables.remove(slots.cpu().numpy())
        self.sync()
        if self.slots_in_ring_order:
            self._tree.write(slots, 0)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._follow(slots)

    def reweight(self, slots: Tensor | None) -> None:
        self._follow(self._stored(torch.arange(self._size, device=self._device) if slots is None else slots))

    # --- draws

    def _warn_of_small_tables(self) -> None:
        """Warn of event tables with a share that are never drawn from because their capacity is too small."""
        for number, least in enumerate(self._least_counts):
            needed, name = self._batch_size if least < 0 else least, self._tables.names[number]
            capacity = self._tables[name].capacity
            if number and capacity < needed and self._eta[number] > 0:
                warnings.warn(
                    f"EventTableSampler: table {name!r} is never drawn from: it holds at most "
                    f"{capacity} transitions and is used from {needed} on (min_size=, by default the batch size). Pass "
                    "a smaller min_size= or a larger capacity=.",
                    stacklevel=2,
                )

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        if not is_traced():
            self._batch_size = batch_size
            if batch_size not in self._known_sizes:
                self._known_sizes.add(batch_size)
                self._warn_of_small_tables()
        leaves, nodes, pages, _ = self._tree.arrays()
        self._tree.raise_if_empty(nodes)
        # 1 / w corrects for the priorities inside the tables only, or it is in proportion to the probability
        is_mixed = self._correction is not None
        shares, min_sizes, begins = self._settings()
        slot_at, places, counts, _ = self._view.views()
        table, eta = empty(leaves, batch_size, torch.int64), empty(leaves, len(counts), torch.float64)
        slots, density = empty(leaves, batch_size, torch.int64), empty(leaves, batch_size, torch.float64)
        probability = empty(leaves, batch_size, torch.float32)
        events_draw(
            random_seed(self._device, generator),
            *(shares, min_sizes, METHODS.index(self._allocation), leaves, nodes, pages, not len(self._power[0])),
            *(counts, begins, slot_at, places, is_mixed, table, eta, slots, density, probability),
        )
        if self._pairs is not None:
            density = self._corrected(self._pairs, *map(as_tensor, (slots, density, eta)))
        self.count_batch()
        extras = {"table": as_tensor(table), "sample_probability": as_tensor(probability)}
        if self._beta is None:
            # 0 if nothing can be drawn
            extras["priority_weight"] = (extras["sample_probability"] > 0).to(torch.float32)
            return Draw(slots, extras=extras)
        return Draw(slots, density, extras=extras)

    def _corrected(self, pairs: PairCounts, slots: Tensor, probability: Tensor, eta: Tensor) -> Tensor:
        """1 / w of ``slots`` [n] up to a factor, for the corrections that count transitions; float64 [n]."""
        of_pair = pairs.of(slots)
        if self._correction == "conditional":
            per_entry = (eta / self._view.counts.clamp_min(1)).unsqueeze(1)
            result = of_pair[0] * probability / (of_pair[:-1] * per_entry).sum(0)
        else:
            event_share = 1 - eta[0]
            inside = 1 - event_share * (1 - of_pair[-1] / of_pair[0])
            result = torch.where((self._view.find(slots) >= 0).any(0), 1 / inside, 1 - event_share)
        return torch.where(probability > 0, result, 0.0)

    def count_batch(self) -> None:
        if self._beta is not None and self._beta.annealed and not self.takes_priorities:
            self._beta.step()
        self._shares.step()

    def density(self, slots: Tensor) -> Tensor:
        mass = self._tree.prefix(self._view.begins).diff()
        eta = self._used(self._view.counts, mass, self._batch_size, self._eta)
        return self._mixture(slots, eta / mass.clamp_min(1))

    def stored_slots(self) -> Tensor:
        everything = torch.arange(self._size, device=self._device)
        held = (self._view.positions(everything) >= 0).any(0)
        return everything[held & (self._log.generation > 0)]

    def _mixture(self, slots: Tensor, per_mass: Tensor) -> Tensor:
        """The sum over the tables of ``per_mass`` [tables] times the mass of each of ``slots`` [n], float64 [n]."""
        probability = per_mass.new_empty(slots.shape[0])
        events_mixture(slots.contiguous(), per_mass, self._tree.leaves, self._view.places, probability)
        return probability

    def _used(self, counts: Tensor, mass: Tensor, batch_size: int, eta: Tensor) -> Tensor:
        """η of the tables that are used for a batch, with sum 1; see :func:`torchrl_replay_ext.kernels.events.draw`."""
        needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
        eta = eta * ((counts >= needed) & (mass > 0))
        # if no table is used, rows come from the default table
        eta = torch.where(eta.sum() > 0, eta, torch.eye(len(eta), dtype=eta.dtype, device=eta.device)[0])
        return eta / eta.sum()

    # --- draws from several shards: a table of the whole buffer is the union of the tables of the same name

    def sums(self) -> Sums:
        if self._correction not in (None, "mixture"):
            raise ValueError(_PAIRS)
        masses = self._tree.prefix(self._view.begins).diff().double()
        return Sums(masses, count=self._view.counts.clone())

    def rows_of_tables(
        self, everywhere: Sums, batch_size: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        assert everywhere.count is not None
        eta = self._used(everywhere.count, everywhere.mass, batch_size, self._shares.current)
        u = uniform(batch_size if self._allocation == "multinomial" else 1, device=eta.device, generator=generator)
        return allocate(eta, batch_size, self._allocation, u), eta

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        assert wanted.count is not None
        ends = self._tree.prefix(self._view.begins)
        totals = ends.diff()
        table = torch.arange(len(totals), device=self._device).repeat_interleave(wanted.rows * (totals > 0))
        u = uniform(len(table), device=self._device, generator=generator)
        target = torch.minimum((u * totals[table]).to(torch.int64), totals[table] - 1)
        position, mass = self._tree.find(ends[table] + target)
        slots = self._view.slot_at[position].to(torch.int64)
        # q_k(i) = probability · mass / total in the whole buffer
        scale = wanted.probability / totals.clamp_min(1)
        probability = self._mixture(slots, wanted.eta * scale)
        extras = {"table": table, "sample_probability": probability.float()}
        if self._correction == "mixture":
            return Draw(slots, probability, extras=extras)
        if self.takes_priorities:
            return Draw(slots, wanted.count[table] * mass * scale[table], extras=extras)
        return Draw(slots, extras=extras | {"priority_weight": torch.ones_like(probability, dtype=torch.float32)})

    # --- state

    def clear(self) -> None:
        self._seen.fill_(-1)
        self._tree.clear_()

    def tensors(self) -> dict[str, Tensor]:
        return {"eta": self._shares.state}

    def rebuild(self) -> None:
        # the masses follow from the tables and the priorities, and the tables may be loaded later
        self._seen.fill_(-1)
        self._shares.rebuild()

    def stats(self) -> dict[str, Tensor]:
        names, eta = self._tables.names, self._shares.current
        stats = {f"size_{name}": size for name, size in zip(names, self._view.counts, strict=True)}
        return stats | {f"eta_{name}": share for name, share in zip(names, eta, strict=True)}
