"""Draws from event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.compilation import gather_in_bounds, is_traced, raise_if, uniform, where_int64
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView, ShardRows, Sums
from torchrl_replay_ext.distributions.table_joint import JointTables, why_not_joint
from torchrl_replay_ext.distributions.table_masses import TableMasses
from torchrl_replay_ext.distributions.table_rows import TableRows
from torchrl_replay_ext.distributions.table_shares import TableShares
from torchrl_replay_ext.distributions.table_weights import Correction, TableWeights
from torchrl_replay_ext.distributions.within_table import Uniform
from torchrl_replay_ext.functional.allocation import Allocation, table_ends


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
        self._log, self._tables, self._allocation, self._beta = log, tables, allocation, beta
        layout = log.layout
        self._size, self._device = size, device = layout.size, layout.device
        # values are read on the CPU only, and not in graphs
        self._on_cpu = device.type == "cpu"
        self._shares = shares
        shares.to(device)
        self._least_counts, self._min_sizes = min_sizes.tolist(), min_sizes.to(device)
        self._weights = make_weights(layout, tables)
        # pinned tables choose the slots of new transitions
        self.slots_in_ring_order = tables.retention == "ring"
        begins = tables.regions(size)
        self._begins = torch.tensor(begins, device=device)
        self._nowhere = begins[-1]
        self._tree = SumTree(self._nowhere + 1, device=device)
        self._within = within = make_within(log, priorities, self._tree, tables, begins)
        self.takes_priorities, self.needs_order = within.takes_priorities, within.needs_order
        # True if all entries of a table have the same probability, and p(i) depends on nothing else
        self._is_uniform = not within.takes_priorities and correction in (None, "mixture")
        self.why_not_joint = within.why_not_joint or why_not_joint(correction, tables.retention)
        settings = self._min_sizes, allocation, correction or ("priority" if within.takes_priorities else None)
        self._joint = JointTables(self._tree, tables, self._begins, shares, *settings)
        # True if the default table may have slots that cannot be drawn
        self._holes = torch.zeros((), dtype=torch.bool, device=device)
        self._entries = TableMasses(self._tree, skips_unchanged=not within.takes_priorities)
        # True if stored transitions may lack their masses: then insert() sets masses in all tables
        self._is_incomplete = True
        # size of the last batch outside graphs: the default minimum size of a table for density()
        self._batch_size = 1
        # batch sizes for which the sizes of the tables were checked
        self._known_sizes: set[int] = set()
        if layout.known and layout.num_slots == size:
            tables.allocate(size, device)
            tables.attach(self)

    @property
    def max_supported_priority(self) -> float:
        return self._within.max_supported_priority

    # --- masses

    def _masses(self, positions: Tensor, slots: Tensor, priority: Tensor | None) -> Tensor | int:
        """See :meth:`Uniform.masses`."""
        return self._within.masses(positions, slots, priority)

    def _set(self, positions: Tensor, slots: Tensor, priority: Tensor | None = None) -> None:
        """Update the masses of ``slots`` [n] at ``positions`` [n]; negative positions are skipped."""
        self._tree.write(positions, (positions != self._nowhere) * self._masses(positions, slots, priority))

    def _set_new(self, positions: Tensor, slots: Tensor, priority: Tensor) -> None:
        """Set the masses of new transitions ``slots`` [n] at ``positions`` [n]; a negative priority marks them."""
        self._set(positions, slots, priority=-priority.float().expand(len(slots)))

    def _everywhere(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All positions of ``slots`` [n], and the slot of each position."""
        positions = self._tables.positions(slots)
        return positions.reshape(-1), slots.expand(positions.shape).reshape(-1)

    def on_insert(self, positions: Tensor, slots: Tensor) -> None:
        """Called by the tables: ``slots`` [n] are now at ``positions`` [n]."""
        self._within.count_changes(len(slots))
        self._entries.add(positions, slots, constant=self._is_uniform and not self._is_incomplete)
        self._weights.move(slots)

    def on_remove(self, positions: Tensor, slots: Tensor, distinct: Tensor) -> None:
        """Called by the tables: ``slots`` [n] are no longer at ``positions`` [n]; ``distinct``: without duplicates."""
        self._within.count_changes(len(slots))
        self._entries.add(positions, None)
        self._weights.move(distinct)

    def on_settled(self) -> None:
        """Called by the tables: their change is complete."""
        self._is_incomplete = False
        self._entries.flush(partial(self._masses, priority=None))

    def on_relayout(self) -> None:
        """Called by the tables: all positions may have changed."""
        self._log.mark_dirty()

    def sync(self, next_slot: Callable[[], int | None]) -> None:
        if self._tables.needs_recovery:
            self._tables.recover(next_slot())

    def before_ingest(self, count: int, next_slot: int) -> None:
        self._tables.adopt(count, next_slot)
        self._weights.before_ingest()

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        if is_traced():
            raise RuntimeError("EventTableSampler: events cannot be detected in a graph; call extend outside.")
        self._within.sort_if_due()
        self._within.insert(slots, priority, rows)
        self._weights.insert(slots, rows)
        self._within.count_changes(len(slots))
        if self._is_incomplete or not self._tables.is_changing:
            # no write of the writer is under way: the lists of all tables are up to date
            self._set_new(*self._everywhere(slots), priority)
        elif self.slots_in_ring_order:
            # the default table; the writer removes the slots from the event tables after this call
            if self._is_uniform:
                self._tree.write(rows.slots_as_index, SumTree.UNIT)
            else:
                self._set_new(slots, slots, priority)
        # else pinned tables: the writer inserts the slots after this call, see on_insert

    def remove(self, slots: Tensor) -> None:
        self._tables.overwrite(slots.cpu().numpy())
        # before the masses of the slots themselves
        self.on_settled()
        self._holes.fill_(True)
        self._within.remove(slots)
        if self.slots_in_ring_order:
            self._tree.write(slots, torch.zeros_like(slots))
        self._within.count_changes(len(slots))
        self._weights.remove(slots)

    def before_full_overwrite(self) -> None:
        self._within.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._within.update(slots, priority)
        valid = slots >= 0
        positions, repeated = self._everywhere(slots.clamp_min(0))
        self._set(where_int64(valid.repeat(len(positions) // len(slots)), positions, -1), repeated)
        self._within.count_changes(slots.shape[0])

    def reweight(self, slots: Tensor | None) -> None:
        if self._within.sorts and slots is None:
            self.sort()
        elif slots is not None:
            in_use = gather_in_bounds(self._log.generation, slots) > 0
            positions, repeated = self._everywhere(slots)
            in_use = in_use.repeat(len(positions) // len(slots))
            self._set(where_int64(in_use, positions, -1), repeated)
        elif self._tables.is_allocated:
            self._set(*self._everywhere(self.stored_slots()))

    def sort(self) -> None:
        """Sort the ranks, with priorities by rank; otherwise do nothing."""
        self._within.sort()

    # --- draws

    def _proportions(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """η (0 for tables that are too small), sum of masses before each table, sum of its masses, [tables] each."""
        ends = self._tree.prefix(self._begins)
        low, total = ends[:-1], ends[1:] - ends[:-1]
        needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
        return self._shares.among((self._tables.counts >= needed) & (total > 0)), low, total

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

    def _draw_uniform(
        self, batch_size: int, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor, Tensor, list[float]] | None:
        """Draw if all entries of each table have the same probability: slots, tables, p(i), and η_k / |B_k|.

        Returns None if some entries cannot be drawn. This draw needs no tree. Most steps use Python numbers, which
        takes half the time; it reads values, so it is for eager code on the CPU only.
        """
        runs = self._tables.runs()
        if runs is None or self._has_holes():
            return None
        begins, lengths, oldest, sizes = zip(*runs, strict=True)
        needed = self._needed(batch_size)
        eta = [share * (size >= d) for share, size, d in zip(self._shares.current.tolist(), sizes, needed, strict=True)]
        total = sum(eta)
        eta = [share / total for share in eta] if total else [1.0, *(0.0 for _ in eta[1:])]
        first, u, order = self._random_numbers(batch_size, generator)
        if self._allocation == "systematic":
            # same result as table_ends, in a quarter of the time
            shift, parts = first.item(), [*accumulate(eta)]
            ends = torch.tensor(
                [math.ceil(batch_size * (part / parts[-1]) - shift) for part in parts], device=self._device
            )
        else:
            portions = torch.tensor(eta, dtype=torch.float64, device=self._device)
            ends = self._ends_of_rows(portions, batch_size, first, generator)
        table = torch.searchsorted(ends, order, right=True)
        # in the order of positions, as in the tree: first the entries after the wrap of the ring, then a gap
        starts = [old % length for old, length in zip(oldest, lengths, strict=True)]
        wrapped = [max(at + n - length, 0) for at, n, length in zip(starts, sizes, lengths, strict=True)]
        offsets = [begin + at - n for begin, at, n in zip(begins, starts, wrapped, strict=True)]
        layout = torch.tensor([sizes, offsets, begins, wrapped], device=self._device)
        size, offset, begin, before = layout.index_select(1, table).unbind()
        position = (u * size).to(torch.int64)
        if any(wrapped):
            offset = torch.where(position >= before, offset, begin)
        slots = self._tables.slot_at.index_select(0, position.add_(offset)).to(torch.int64)
        per_entry = [portion / max(count, 1) for portion, count in zip(eta, sizes, strict=True)]
        return slots, table, self._tables.sum_over_tables(slots, per_entry), per_entry

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
        if self._on_cpu and self._is_uniform and not in_graph:
            drawn = self._draw_uniform(batch_size, generator)
            if drawn is not None:
                slots, table, probability, per_entry = drawn
                weight = self._weights.of_uniform_draw(slots, probability, per_entry)
                self.count_batch()
                extras = {"priority_weight": weight, "table": table, "sample_probability": probability}
                return Draw(slots, extras=extras)
        self._within.sort_if_due()
        eta, low, total = self._proportions(batch_size)
        message = "EventTableSampler: all priorities are 0, so no transition can be drawn; use eps > 0."
        raise_if(lambda: total[0] == 0, lambda: RuntimeError(message), skip_on=self._log.layout.skip_checks_on)
        first, u, order = self._random_numbers(batch_size, generator)
        ends = self._ends_of_rows(eta, batch_size, first, generator)
        table = torch.searchsorted(ends, order, right=True)
        position, mass, total = self._within.draw(u, TableRows(table, low, total), generator)
        slots = gather_in_bounds(self._tables.slot_at, position).to(torch.int64)
        probability = self._mixture(slots, eta, total)
        count = gather_in_bounds(self._tables.counts, table)
        weight = self._weights.of_draw(slots, probability, eta, mass, gather_in_bounds(total, table), count)
        # in a graph and on an accelerator, rows have mass 0 if nothing can be drawn
        weight = torch.where(mass > 0, weight, 0.0)
        self.count_batch()
        extras = {
            "priority_weight": weight.to(torch.float32),
            "table": table,
            "sample_probability": probability.to(torch.float32),
        }
        return Draw(slots, extras=extras)

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

    def _has_holes(self) -> bool:
        """True if the default table may have slots whose content is unknown."""
        if not self._holes.item():
            return False
        self._holes.copy_((self._log.generation[: self._tables.size(0)] == 0).any())
        return bool(self._holes)

    def density(self, slots: Tensor) -> Tensor:
        if not slots.numel():
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        self._within.sort_if_due()
        eta, _, total = self._proportions(self._batch_size)
        return self._mixture(slots, eta, self._within.exact_totals(total))

    def stored_slots(self) -> Tensor:
        everything = torch.arange(self._size, device=self._device)
        if not self._tables.is_allocated:
            return everything[:0]
        held = (self._tables.positions(everything) != self._nowhere).any(0)
        return everything[held & (self._log.generation > 0)]

    # --- state

    def clear(self) -> None:
        self._entries.clear()
        self._is_incomplete = True
        self._holes.fill_(True)
        self._tree.clear_()
        self._within.clear()
        self._weights.clear()

    def tensors(self) -> dict[str, Tensor]:
        state = {"masses": self._tree.leaves, "eta": self._shares.state}
        return state | self._within.tensors() | self._weights.tensors()

    def raise_numbers(self, last: int) -> None:
        self._within.raise_numbers(last)

    def rebuild(self) -> None:
        self._holes.fill_(True)
        self._tree.rebuild_()
        self._shares.rebuild()
        self._within.rebuild()

    def check_valid(self) -> None:
        self._tables.check_valid()
        self._tree.check_valid()
        self._weights.check_valid()
        self._within.check_valid()
        if self._tables.is_allocated:
            positions = self._tables.positions(self._log.stored_slots())
            held, drawn = positions[positions != self._nowhere].unique(), (self._tree.leaves > 0).nonzero().squeeze(1)
            is_complete = self._is_uniform and not self._is_incomplete
            if not bool(torch.isin(drawn, held).all()) or (is_complete and len(drawn) != len(held)):
                raise AssertionError("EventTableMixture: the entries that can be drawn are not those of the tables")

    def stats(self) -> dict[str, Tensor]:
        names, eta = self._tables.names, self._shares.current
        sizes = self._tables.counts if self._tables.is_allocated else torch.zeros(len(names), dtype=torch.int64)
        stats = {f"size_{name}": size for name, size in zip(names, sizes, strict=True)}
        return stats | self._within.stats(eta) | {f"eta_{name}": share for name, share in zip(names, eta, strict=True)}


class EventPriorities(EventTableMixture):
    """Draws from the whole storage, where transitions of event tables have a higher priority (SSET, Sec. 4).

    The masses of transitions inside and outside of the union of the event tables have the ratio (1 + η) / (1 − η), for
    η = Σ_{k>0} η_k.
    """

    def _masses(self, positions: Tensor, slots: Tensor, priority: Tensor | None) -> Tensor:
        eta = 1 - self._shares.current[0]
        return SumTree.to_mass(1 + eta * (2.0 * self._tables.holds(slots).any(0) - 1))

    def _everywhere(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        return self._tables.positions(slots)[0], slots

    def on_insert(self, positions: Tensor, slots: Tensor) -> None:
        self._entries.add(slots, slots)

    def on_remove(self, positions: Tensor, slots: Tensor, distinct: Tensor) -> None:
        self._entries.add(distinct, distinct)

    def _proportions(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        _, low, total = super()._proportions(batch_size)
        return self._shares.among(torch.zeros_like(total, dtype=torch.bool)), low, total

    def _warn_of_small_tables(self) -> None:
        """Event tables of any size have an effect."""
