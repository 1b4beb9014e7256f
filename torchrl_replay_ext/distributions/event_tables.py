"""Draws from event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
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
    to_device,
    uniform,
    where_int64,
)
from torchrl_replay_ext.core.event_tables import CHANGES, EventTables, TableView
from torchrl_replay_ext.core.layout import MOST
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView, ShardRows, Sums
from torchrl_replay_ext.distributions.table_joint import JointTables, why_not_joint
from torchrl_replay_ext.distributions.table_rows import TableRows
from torchrl_replay_ext.distributions.table_shares import TableShares
from torchrl_replay_ext.distributions.table_weights import Correction, TableWeights
from torchrl_replay_ext.distributions.within_table import Uniform
from torchrl_replay_ext.functional.allocation import METHODS, Allocation, table_ends
from torchrl_replay_ext.kernels.ops import events_draw, events_set_masses

_NO_SLOTS = torch.empty(0, dtype=torch.int64, device="cpu")


class EventTableMixture(Distribution):
    """p(i) = Σ_k η_k q_k(i), with q_k uniform over table k or by priority.

    See :class:`~torchrl_replay_ext.EventTableSampler`. A sum tree holds the mass of each entry of each table; the
    entries of a table are consecutive leaves.

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
    # True if masses depend on which tables hold a slot
    _by_membership = False

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
        self._allocation, self._beta = allocation, beta
        layout = log.layout
        self._size, self._device = size, device = layout.size, layout.device
        self._shares = shares
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
        # True if a kernel sets masses
        self._has_kernel = (
            events_set_masses.runs_on(self._tree.leaves)
            and not (view.is_empty or self._weights.counts_moves or self._by_membership)
            and within.power() is not None
        )
        self.takes_priorities, self.needs_order = within.takes_priorities, within.needs_order
        self.why_not_joint = within.why_not_joint or why_not_joint(correction, tables.retention)
        settings = self._min_sizes, allocation, correction or ("priority" if within.takes_priorities else None)
        self._joint = JointTables(self._tree, view, shares, *settings)
        # size of the last batch outside graphs: the default minimum size of a table for density()
        self._batch_size = 1
        # batch sizes for which the sizes of the tables were checked
        self._known_sizes: set[int] = set()

    @property
    def max_supported_priority(self) -> float:
        return self._within.max_supported_priority

    # --- masses

    def _masses(self, positions: Tensor, slots: Tensor) -> Tensor | int:
        """See :meth:`Uniform.masses`."""
        return self._within.masses(positions, slots)

    def _set(self, positions: Tensor, slots: Tensor, keep: Tensor | None = None) -> None:
        """Update the masses of ``slots`` [n] at ``positions`` [n]: 0 where not ``keep``; negative ones are skipped."""
        mass = self._masses(positions, slots)
        self._tree.write(positions, mass if keep is None else keep * mass)

    def _everywhere(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All positions of ``slots`` [n], and the slot of each position."""
        positions = self._view.positions(slots)
        return positions.reshape(-1), slots.expand(positions.shape).reshape(-1)

    def _set_masses(self, slots: Tensor) -> None:
        """Update the masses of ``slots`` [n], and of what has changed in the tables; negative slots are skipped."""
        power = self._within.power() if self._has_kernel else None
        if power is not None:
            if not is_traced():
                self._read_if_unknown()
            arrays = *self._tree.tensors(), self._seen, *power, slots.contiguous(), *self._tables.changed_arrays()
            events_set_masses(*arrays)
            return
        if not is_traced():
            self.sync()
        positions, repeated = self._everywhere(slots.clamp_min(0))
        is_row = (slots >= 0).repeat(len(positions) // len(slots))
        self._set(where_int64(is_row, positions, -1), repeated)

    def _read_if_unknown(self) -> None:
        """Read all entries of the tables, unless the changes since the last time are known."""
        resets, seen = self._tables.num_resets, self._seen.numpy()[0]
        is_new, self._resets = resets != self._resets, resets
        if is_new:
            self._view.send()
        # after a load, masses of entries that the tables do not have
        if not self._tables.has_changes_since(seen) or (is_new and not (self.takes_priorities and self._fits_tables())):
            self._view.send()
            self._seen.fill_(self._tables.counter(CHANGES))
            self._tree.clear_()
            self.reweight(torch.arange(self._size, device=self._device))
            self._within.sort()
            self._weights.recount()

    def _fits_tables(self) -> bool:
        """True if all entries with a mass are slots that hold a transition."""
        leaves, slot_at = self._tree.leaves, self._view.slot_at
        slots = slot_at[leaves[: len(slot_at)] > 0].to(torch.int64)
        stored = bool((slots >= 0).all()) and bool((self._log.generation[slots] > 0).all())
        return stored and not bool(leaves[len(slot_at) :].any())

    def sync(self) -> None:
        if self._view.is_empty:
            return
        self._read_if_unknown()
        tables, seen = self._tables, int(self._seen)
        if seen == tables.counter(CHANGES):
            return
        if self._has_kernel:
            self._set_masses(_NO_SLOTS)
            return
        position, slot = tables.changes(seen)
        if self._weights.counts_moves:
            slot = np.unique(slot)
        positions, slots, now = self._view.send_changes(position, slot)
        self._seen.fill_(tables.counter(CHANGES))
        self._within.count_changes(len(position))
        self._apply(positions, slots, now)
        if self._weights.counts_moves:
            self._weights.move(slots, to_device(tables.number[torch.from_numpy(slot)], self._device))

    def _apply(self, positions: Tensor, slots: Tensor, now: Tensor) -> None:
        """Update the masses at ``positions`` [n], where the slots ``now`` are; -1 if there is none."""
        self._set(positions, now.clamp_min(0), now >= 0)

    def before_ingest(self, count: int, next_slot: int) -> None:
        self._tables.adopt(count, next_slot)
        self._weights.before_ingest()

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        if is_traced():
            raise RuntimeError("EventTableSampler: events cannot be detected in a graph; call extend outside.")
        self._within.sort_if_due()
        self._within.insert(slots, priority, rows)
        self._weights.insert(slots, rows)
        if self.takes_priorities:
            self._priorities.insert(rows.slots_as_index)
        self._set_masses(slots)
        self._within.count_changes(len(slots))

    def remove(self, slots: Tensor) -> None:
        self._tables.remove(slots.cpu().numpy())
        self.sync()
        self._within.remove(slots)
        if self.slots_in_ring_order:
            self._tree.write(slots, 0)
        self._within.count_changes(len(slots))
        self._weights.remove(slots)

    def before_full_overwrite(self) -> None:
        self._within.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._within.update(slots, priority)
        self._set_masses(slots)
        self._within.count_changes(slots.shape[0])

    def reweight(self, slots: Tensor | None) -> None:
        if slots is None and self._within.sorts:
            self.sort()
            return
        slots = torch.arange(self._size, device=self._device) if slots is None else slots
        self._set_masses(where_int64(gather_in_bounds(self._log.generation, slots) > 0, slots, -1))

    def sort(self) -> None:
        """Sort the ranks, with priorities by rank; otherwise do nothing."""
        self._within.sort()

    # --- draws

    def _proportions(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """η (0 for tables that are too small), sum of masses before each table, sum of its masses, [tables] each."""
        ends = self._tree.prefix(self._view.begins)
        low, total = ends[:-1], ends[1:] - ends[:-1]
        needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
        return self._shares.among((self._view.counts >= needed) & (total > 0), self._drawn_shares()), low, total

    def _needed(self, batch_size: int) -> list[int]:
        """The number of transitions from which on each table is used."""
        return [batch_size if least < 0 else least for least in self._least_counts]

    def _warn_of_small_tables(self) -> None:
        """Warn of event tables with a share that are never drawn from because their capacity is too small."""
        for number, needed in enumerate(self._needed(self._batch_size)):
            capacity = self._tables.capacity_of(number)
            if number and capacity < needed and self._shares.current[number] > 0:
                warnings.warn(
                    f"EventTableSampler: table {self._tables.names[number]!r} is never drawn from: it holds at most "
                    f"{capacity} transitions and is used from {needed} on (min_size=, by default the batch size). Pass "
                    "a smaller min_size= or a larger capacity=.",
                    stacklevel=2,
                )

    def _random_numbers(self, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
        """Uniform numbers for the allocation, [1], and for the rows, [B]; 0, ..., B − 1 in random order, [B]."""
        drawn = uniform(2 * batch_size + 1, device=self._device, generator=generator)
        first, u, order = drawn.split([1, batch_size, batch_size])
        return first, u, order.argsort()

    def _ends_of_rows(self, eta: Tensor, batch_size: int, u: Tensor, generator: torch.Generator | None) -> Tensor:
        """For each table, the end of its rows if the rows are ordered by table, [tables].

        With multinomial allocation it draws its own random numbers instead of ``u`` [1].
        """
        if self._allocation == "multinomial":
            u = uniform(batch_size, device=self._device, generator=generator)
        return table_ends(eta, batch_size, self._allocation, u)

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        in_graph = is_traced()
        if not in_graph:
            self._batch_size = batch_size
            if batch_size not in self._known_sizes:
                self._known_sizes.add(batch_size)
                self._warn_of_small_tables()
        self._within.sort_if_due()
        if self._within.draws_by_mass and events_draw.runs_on(self._tree.leaves):
            slots, table, mass, probability, eta, total = self._draw_by_mass(batch_size, generator)
        else:
            eta, low, total = self._proportions(batch_size)
            first, u, order = self._random_numbers(batch_size, generator)
            ends = self._ends_of_rows(eta, batch_size, first, generator)
            table = torch.searchsorted(ends, order, right=True)
            position, mass, total = self._within.draw(u, TableRows(table, low, total), generator)
            slots = gather_in_bounds(self._view.slot_at, position).to(torch.int64)
            probability = self._mixture(slots, eta, total)
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

    def _draw_by_mass(self, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
        """Draw in proportion to the masses: slots, tables, masses and p(i); η and the sum of masses of each table."""
        view, leaves, is_uniform = self._view, self._tree.leaves, self._has_equal_masses()
        slots, table, mass = leaves.new_empty(3, batch_size)
        probability, eta = self._shares.state.new_empty(batch_size), torch.empty_like(self._shares.current)
        total = torch.empty_like(self._min_sizes)
        events_draw(
            random_seed(self._device, generator),
            *(self._drawn_shares(), self._min_sizes, METHODS.index(self._allocation), is_uniform),
            *(leaves, self._tree.nodes, leaves[:0], view.slot_at, view.places, view.counts, view.begins),
            *(slots, table, mass, probability, eta, total),
        )
        return slots, table, mass, probability, eta, total

    def _has_equal_masses(self) -> bool:
        """True if all entries have the same mass."""
        return not self._within.takes_priorities and not self._by_membership

    def _drawn_shares(self) -> Tensor:
        """η of each table, float64 [tables]."""
        return self._shares.current

    def sums(self) -> Sums:
        return self._joint.sums()

    def plan(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return self._joint.plan(*arguments)

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        return self._joint.draw_in_shard(wanted)

    def count_batch(self) -> None:
        if self._beta is not None and not self.takes_priorities:
            self._beta.step()
        self._shares.step()

    def _mixture(self, slots: Tensor, eta: Tensor, total: Tensor) -> Tensor:
        """p(i) of ``slots`` [n], float64 [n]."""
        positions, _ = self._everywhere(slots)
        density = self._within.density(self._tree.get(positions).view(-1, slots.shape[0]), slots)
        per_mass = eta / torch.where(total > 0, total, 1.0)
        return (density * per_mass[: density.shape[0]].unsqueeze(1)).sum(0)

    def density(self, slots: Tensor) -> Tensor:
        if not slots.numel():
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        self._within.sort_if_due()
        eta, _, total = self._proportions(self._batch_size)
        return self._mixture(slots, eta, self._within.exact_totals(total))

    def stored_slots(self) -> Tensor:
        everything = torch.arange(self._size, device=self._device)
        held = (self._view.positions(everything) >= 0).any(0)
        return everything[held & (self._log.generation > 0)]

    # --- state

    def clear(self) -> None:
        self._seen.fill_(-1)
        self._tree.clear_()
        self._within.clear()
        self._weights.clear()

    def tensors(self) -> dict[str, Tensor]:
        state = {"masses": self._tree.leaves, "eta": self._shares.state, "seen_changes": self._seen}
        return state | self._within.tensors() | self._weights.tensors()

    def limits(self) -> Mapping[str, tuple[float, float]]:
        own = {"masses": (0, self._tree.largest_mass), "eta": (0.0, MOST), "seen_changes": (-1, MOST)}
        return {**own, **self._within.limits(), **self._weights.limits()}

    def raise_numbers(self, last: int) -> None:
        self._within.raise_numbers(last)

    def rebuild(self) -> None:
        self._resets = -1
        self._tree.rebuild_()
        self._shares.rebuild()
        self._within.rebuild()
        self._weights.rebuild()

    def check_valid(self) -> None:
        self.sync()
        self._tables.check_valid()
        self._tree.check_valid()
        self._weights.check_valid()
        self._within.check_valid()
        stored = self._log.stored_slots()
        positions, _ = self._everywhere(stored)
        held, drawn = positions[positions >= 0], (self._tree.leaves > 0).nonzero().squeeze(1)
        is_complete = self._has_equal_masses() and not self._view.is_empty
        if not bool(torch.isin(drawn, held).all()) or (is_complete and len(drawn) != len(held)):
            raise AssertionError("EventTableMixture: the entries that can be drawn are not those of the tables")

    def stats(self) -> dict[str, Tensor]:
        names, eta = self._tables.names, self._shares.current
        stats = {f"size_{name}": size for name, size in zip(names, self._view.counts, strict=True)}
        return stats | self._within.stats(eta) | {f"eta_{name}": share for name, share in zip(names, eta, strict=True)}


class EventPriorities(EventTableMixture):
    """Draws from the whole storage, where transitions of event tables have a higher priority (SSET, Sec. 4).

    The masses of transitions inside and outside of the union of the event tables have the ratio (1 + η) / (1 − η), for
    η = Σ_{k>0} η_k.
    """

    _by_membership = True

    def _masses(self, positions: Tensor, slots: Tensor) -> Tensor:
        eta = 1 - self._shares.current[0]
        return SumTree.to_mass(1 + eta * (2.0 * self._view.holds(slots).any(0) - 1))

    def _everywhere(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return slots, slots

    def _apply(self, positions: Tensor, slots: Tensor, now: Tensor) -> None:
        self._set(slots, slots, gather_in_bounds(self._log.generation, slots) > 0)

    def _drawn_shares(self) -> Tensor:
        return self._shares.among(torch.zeros_like(self._view.counts, dtype=torch.bool))

    def _warn_of_small_tables(self) -> None:
        """Event tables of any size have an effect."""
