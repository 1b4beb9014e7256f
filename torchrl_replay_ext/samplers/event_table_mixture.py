"""Draws from event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    is_traced,
    raise_if,
    random_seed,
    scalar,
    scatter_in_bounds,
    to_device,
    uniform,
    where_int64,
)
from torchrl_replay_ext.core.event_tables import CHANGES, RESETS, EventTables, TableView
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.functional.allocation import METHODS, Allocation, table_ends
from torchrl_replay_ext.kernels.ops import events_draw, events_plan, events_set_masses
from torchrl_replay_ext.samplers.base import Distribution, Draw, RowView, ShardRows, Sums
from torchrl_replay_ext.samplers.table_shares import TableShares
from torchrl_replay_ext.samplers.table_weights import Correction, TableWeights
from torchrl_replay_ext.samplers.within_table import Uniform

# why joint draws of several shards are not possible
_PAIRS = "this correction counts outcomes, which may lie in several shards; use correction=None or 'mixture'."
_CLASSES = (
    "correction='mixture' with retention='pinned' counts combinations of tables, which needs all of them; use "
    "retention='ring'."
)


class EventTableMixture(Distribution):
    """p(i) = Σ_k η_k q_k(i), with q_k uniform over table k or by priority.

    See :class:`~torchrl_replay_ext.EventTableSampler`. A sum tree holds the mass of each entry of each table; the
    entries of a table are consecutive leaves. With ``correction="priority"`` (SSET, Sec. 4), rows are drawn from the
    default table alone, where the masses of transitions inside and outside of the union of the event tables have the
    ratio (1 + η) / (1 − η), for η = Σ_{k>0} η_k.

    Args:
        log, priorities: the state of the slots.
        tables: the event tables.
        shares: η of each table.
        min_sizes: minimum number of entries of each table, int64 [tables]; -1 stands for the batch size.
        allocation: how rows are divided among tables.
        correction: type of the importance-sampling weights.
        make_weights: creates the weights from a layout and the tables.
        make_within: creates the distribution within a table, see :class:`Uniform` for the arguments.
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
        make_weights: partial[TableWeights],
        make_within: Callable[..., Uniform],
        beta: Hyperparameter | None,
    ):
        self._log, self._priorities, self._tables = log, priorities, tables
        self._allocation: Allocation = allocation
        self._beta, self._shares, self._correction = beta, shares, correction
        layout = log.layout
        self._size, self._device = size, device = layout.size, layout.device
        shares.to(device)
        self._least_counts, self._min_sizes = min_sizes.tolist(), min_sizes.to(device)
        # pinned tables choose the slots of new transitions
        self.slots_in_ring_order = tables.retention == "ring"
        if layout.known and layout.num_slots == size:
            tables.allocate(size, device)
        self._view = view = TableView(tables, size, device)
        self._tree = SumTree(len(view.slot_at), device=device)
        # the counter of changes of the tables that this distribution has applied; -1: none
        self._seen = torch.full((1,), -1, dtype=torch.int64, device="cpu")
        # the counter of resets of the tables when the view was sent
        self._resets = -1
        self._weights = make_weights(layout, tables, view)
        self._within = within = make_within(log, priorities, self._tree, view)
        # masses inside and outside of the union of the event tables, with correction="priority"
        self._is_union = correction == "priority"
        self._union = torch.zeros(2 * self._is_union, dtype=torch.int64, device=device)
        self._set_union()
        self._only_default = (torch.arange(len(tables), device=device) == 0).to(torch.float64)
        self.takes_priorities, self.needs_order = within.takes_priorities, within.needs_order
        self.why_not_joint = within.why_not_joint
        if correction not in (None, "mixture"):
            self.why_not_joint = _PAIRS
        elif correction == "mixture" and not self.slots_in_ring_order:
            self.why_not_joint = _CLASSES
        # size of the last batch outside graphs: the default minimum size of a table for density()
        self._batch_size = 1
        # batch sizes for which the sizes of the tables were checked
        self._known_sizes: set[int] = set()

    @property
    def max_supported_priority(self) -> float:
        return self._within.max_supported_priority

    # --- masses

    def _set_union(self) -> None:
        if self._is_union:
            sign = torch.tensor([1.0, -1.0], dtype=torch.float64).to(self._device, non_blocking=True)
            self._union.copy_(SumTree.to_mass(1 + sign * (1 - self._shares.current[0])))

    def _set_masses(self, slots: Tensor) -> None:
        """Update the masses of ``slots`` [n], and of what has changed in the tables; negative slots are skipped."""
        tables, view, first, begin, end, changes = self._tables, self._view, 0, 0, 0, None
        if not (view.is_empty or is_traced()):
            self._read_if_unknown()
            seen = self._seen.numpy()
            begin, end = first, _ = int(seen[0]), int(tables.counters()[CHANGES])
            if begin != end and (view.is_copy or self._within.follows or self._weights.counts_moves):
                changes = view.changes(begin)
            seen[0] = end
        leaves, nodes, pages, _ = self._tree.arrays()
        slot_at, places, counts, journal = view.views()
        if view.is_copy and changes is not None:
            begin, end, journal = 0, len(changes), changes
        elif view.is_copy:
            begin = end
        masses = *self._within.power(), self._union, self._log.generation, slots.contiguous()
        events_set_masses(leaves, nodes, pages, *masses, slot_at, places, counts, journal, begin, end)
        if self._within.follows:
            positions = where_int64(slots >= 0, view.positions(slots.clamp_min(0)), -1).reshape(-1)
            self._within.move(positions if changes is None else torch.cat([changes[:, 0], positions]))
        if changes is not None and self._weights.counts_moves:
            moved = torch.from_numpy(np.unique(tables.changes(first)[1]))
            self._weights.move(to_device(moved, self._device), to_device(tables.number[moved], self._device))

    def _read_if_unknown(self) -> None:
        """Read all entries of the tables, unless the changes since the last time are known."""
        resets, seen = self._tables.counter(RESETS), self._seen.numpy()
        is_new, self._resets = resets != self._resets, resets
        if is_new:
            self._view.send()
        if not self._tables.has_changes_since(seen[0]) or (is_new and not self._fits_tables()):
            self._view.send()
            seen[0] = self._tables.counter(CHANGES)
            self._tree.clear_()
            if self._within.follows:
                self._within.clear()
            self._set_masses(self._stored(torch.arange(self._size, device=self._device)))
            self._weights.recount()
        elif is_new:
            # the tables were loaded after the sampler
            self._within.rebuild()

    def _fits_tables(self) -> bool:
        """True if the masses follow from priorities and belong to entries that hold a transition."""
        leaves, slot_at = self._tree.leaves, self._view.slot_at
        slots = slot_at[leaves[: len(slot_at)] > 0].to(torch.int64)
        stored = bool((slots >= 0).all()) and bool((self._log.generation[slots] > 0).all())
        return self.takes_priorities and stored and not bool(leaves[len(slot_at) :].any())

    def _stored(self, slots: Tensor) -> Tensor:
        """``slots`` [n]; -1 for those without a transition."""
        return where_int64(gather_in_bounds(self._log.generation, slots) > 0, slots, -1)

    def sync(self) -> None:
        if not self._view.is_empty:
            self._read_if_unknown()
            if self._seen.numpy()[0] != self._tables.counters()[CHANGES]:
                self._set_masses(self._view.begins[:0])

    def before_ingest(self, count: int, next_slot: int) -> None:
        self._tables.adopt(count, next_slot)
        self._weights.before_ingest()

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        if is_traced():
            raise RuntimeError("EventTableSampler: events cannot be detected in a graph; call extend outside.")
        self._within.insert(slots, priority, rows)
        self._weights.insert(slots, rows)
        if self.takes_priorities:
            # the masses are computed from d before the write is recorded
            scatter_in_bounds(self._priorities.of_slot, rows.slots_as_index, -scalar(priority))
        self._set_masses(slots)

    def remove(self, slots: Tensor) -> None:
        self._tables.remove(slots.cpu().numpy())
        self.sync()
        self._within.remove(slots)
        if self.slots_in_ring_order:
            self._tree.write(slots, 0)
        self._weights.remove(slots)

    def before_full_overwrite(self) -> None:
        self._within.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._within.update(slots, priority)
        self._set_masses(slots)

    def reweight(self, slots: Tensor | None) -> None:
        self._set_union()
        self._within.reweight()
        if not self._within.follows:
            slots = torch.arange(self._size, device=self._device) if slots is None else slots
            self._set_masses(self._stored(slots))

    # --- draws

    def _warn_of_small_tables(self) -> None:
        """Warn of event tables with a share that are never drawn from because their capacity is too small."""
        for number, least in enumerate(self._least_counts):
            capacity, needed = self._tables.capacity_of(number), self._batch_size if least < 0 else least
            if number and capacity < needed and self._shares.current[number] > 0 and not self._is_union:
                warnings.warn(
                    f"EventTableSampler: table {self._tables.names[number]!r} is never drawn from: it holds at most "
                    f"{capacity} transitions and is used from {needed} on (min_size=, by default the batch size). Pass "
                    "a smaller min_size= or a larger capacity=.",
                    stacklevel=2,
                )

    def _plan(self, batch_size: int, seed: Tensor) -> tuple[list[Any], tuple[Tensor, Tensor, Tensor, Tensor]]:
        """The arguments of the kernel that divides a batch among tables, and its results.

        The results are the table of each row, η of each table, and the sums of the masses before each table and in it.
        """
        leaves, nodes, pages, _ = self._tree.arrays()
        table, low, total = (torch.empty_like(seed.expand(count)) for count in (batch_size, *[len(self._tables)] * 2))
        results = table, torch.empty_like(self._only_default), low, total
        shares = self._only_default if self._is_union else self._shares.current
        settings = seed, shares, self._min_sizes, METHODS.index(self._allocation)
        return [*settings, leaves, nodes, pages, self._view.counts, self._view.begins, *results], results

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        if not is_traced():
            self._batch_size = batch_size
            if batch_size not in self._known_sizes:
                self._known_sizes.add(batch_size)
                self._warn_of_small_tables()
        self._within.refresh()
        arguments, (table, eta, low, total) = self._plan(batch_size, random_seed(self._device, generator))
        if self._within.draws_by_mass:
            slots, mass = torch.empty_like(table), torch.empty_like(table)
            probability = torch.empty_like(table, dtype=torch.float64)
            is_uniform = not self.takes_priorities and not self._is_union
            slot_at, places, _, _ = self._view.views()
            events_draw(*arguments, slot_at, places, is_uniform, slots, mass, probability)
        else:
            events_plan(*arguments)
            position, mass, total = self._within.draw(table, low, total, generator)
            slots = gather_in_bounds(self._view.slot_at, position).to(torch.int64).clamp_min(0)
            probability = self._within.mixture(slots, eta / torch.where(total > 0, total, 1.0))
        message = "EventTableSampler: all priorities are 0, so no transition can be drawn; use eps > 0."
        raise_if(lambda: total[0] == 0, lambda: RuntimeError(message), skip_on=self._log.layout.skip_checks_on)
        weight = self._weights.of_draw(slots, probability, eta, mass, table, total)
        self.count_batch()
        extras = {
            "priority_weight": weight.to(torch.float32),
            "table": table,
            "sample_probability": probability.to(torch.float32),
        }
        return Draw(slots, extras=extras)

    def count_batch(self) -> None:
        if self._beta is not None and self._beta.annealed and not self.takes_priorities:
            self._beta.step()
        self._shares.step()

    def density(self, slots: Tensor) -> Tensor:
        if not slots.numel():
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        self._within.refresh()
        # any seed: only the proportions matter
        arguments, (_, eta, _, total) = self._plan(self._batch_size, self._view.begins[:1])
        events_plan(*arguments)
        total = self._within.exact_totals(total)
        return self._within.mixture(slots, eta / torch.where(total > 0, total, 1.0))

    def stored_slots(self) -> Tensor:
        everything = torch.arange(self._size, device=self._device)
        held = (self._view.positions(everything) >= 0).any(0)
        return everything[held & (self._log.generation > 0)]

    # --- joint draws: a table of the whole buffer is the union of the tables of the same name of all shards

    def sums(self) -> Sums:
        masses = self._tree.prefix(self._view.begins).diff().double()
        return Sums(masses, None, self._view.counts.clone(), self._shares.current.clone())

    def plan(
        self, everywhere: Sums, num_rows: int, batch_size: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert everywhere.count is not None and everywhere.eta is not None
        needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
        eta = self._shares.among((everywhere.count >= needed) & (everywhere.mass > 0), everywhere.eta)
        first = uniform(num_rows if self._allocation == "multinomial" else 1, device=eta.device, generator=generator)
        ends = table_ends(eta, num_rows, self._allocation, first)
        table = torch.searchsorted(ends, torch.arange(num_rows), right=True)
        return table, uniform(num_rows, device=eta.device, generator=generator), eta

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        assert wanted.table is not None and wanted.count is not None
        ends = self._tree.prefix(self._view.begins)
        totals = ends.diff()
        kept = totals[wanted.table] > 0
        table, u = wanted.table[kept], wanted.u[kept]
        target = torch.minimum((u * totals[table]).to(torch.int64), totals[table] - 1)
        position, mass = self._tree.find(ends[table] + target)
        slots = self._view.slot_at[position].to(torch.int64)
        # q_k(i) = probability · mass / total in the whole buffer
        scale = wanted.probability / totals.clamp_min(1)
        probability = self._within.mixture(slots, wanted.eta * scale)
        extras = {"table": table, "sample_probability": probability.float()}
        if self._correction == "mixture":
            return Draw(slots, probability, extras=extras)
        if self.takes_priorities:
            return Draw(slots, wanted.count[table] * mass * scale[table], extras=extras)
        return Draw(slots, extras=extras | {"priority_weight": torch.ones(len(slots), dtype=torch.float32)})

    # --- state

    def clear(self) -> None:
        self._seen.fill_(-1)
        self._tree.clear_()
        self._within.clear()
        self._weights.clear()

    def tensors(self) -> dict[str, Tensor]:
        state = {"masses": self._tree.leaves, "eta": self._shares.state, "seen_changes": self._seen}
        return state | self._within.tensors() | self._weights.tensors()

    def raise_numbers(self, last: int) -> None:
        self._within.raise_numbers(last)

    def rebuild(self) -> None:
        self._view.send()
        self._resets = -1
        self._tree.rebuild_()
        self._shares.rebuild()
        self._set_union()
        self._within.rebuild()
        self._weights.rebuild()

    def check_valid(self) -> None:
        # first, because sync() may compute masses again
        self._tree.check_valid()
        self.sync()
        self._tables.check_valid()
        self._shares.check_valid()
        self._weights.check_valid()
        self._within.check_valid()
        positions = self._view.positions(self._log.stored_slots())
        held, drawn = positions[positions >= 0], (self._tree.leaves > 0).nonzero().squeeze(1)
        is_complete = not (self.takes_priorities or self._is_union or self._view.is_empty)
        if not bool(torch.isin(drawn, held).all()) or (is_complete and len(drawn) != len(held)):
            raise AssertionError("EventTableMixture: the entries that can be drawn are not those of the tables")

    def stats(self) -> dict[str, Tensor]:
        names, eta = self._tables.names, self._shares.current
        stats = {f"size_{name}": size for name, size in zip(names, self._view.counts, strict=True)}
        return stats | self._within.stats(eta) | {f"eta_{name}": share for name, share in zip(names, eta, strict=True)}
