"""Draws fixed shares of a batch from event tables."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext import _torchrl
from torchrl_replay_ext.annealing import ALPHA, BETA, Anneal, exponent
from torchrl_replay_ext.arguments import require_choice
from torchrl_replay_ext.compilation import is_traced, random_seed, uniform
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.core.layout import Layout
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.functional import METHODS, Allocation, allocate
from torchrl_replay_ext.kernels.ops import Views, as_tensor, empty, events_draw
from torchrl_replay_ext.samplers.base import Draw, ReplaySampler
from torchrl_replay_ext.samplers.entry_masses import EntryMasses
from torchrl_replay_ext.samplers.proportional import MAX_PRIORITY, largest_priority
from torchrl_replay_ext.samplers.rows import RowView
from torchrl_replay_ext.samplers.shard_draws import ShardRows, Sums
from torchrl_replay_ext.samplers.table_shares import (
    Correction,
    TableShares,
    min_sizes,
    priority_settings,
    require_compatible,
    require_correction,
)


class EventTableSampler(ReplaySampler):
    r"""Draws batches from all event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1).

    A row comes from table k with probability η_k. Inside a table, transitions are drawn with replacement, either
    uniformly, q_k(i) = 1 / \|B_k\|, or by ``priority``. Tables with fewer than ``min_size`` transitions are not used,
    and the η of the other tables are scaled up; the default table is always used. One draw returns transition i with
    probability ::

        p(i) = Σ_k η_k q_k(i)      over the tables k that hold i

    The sampler adds three entries to a batch:

    * ``"table"``, int64 [B]: the number of the table (0: default, then in the order of ``tables``).
    * ``"sample_probability"``, float32 [B]: p(i).
    * ``"priority_weight"``, float32 [B]: the importance-sampling weight w divided by the largest weight of the batch.
      TorchRL's losses apply it.

    ``correction`` selects w. All corrections need ``retention="ring"``: pinned tables keep outcomes with an event
    longer than outcomes of the same (s, a) without one, so the stored transitions do not show how often each outcome
    was experienced.

    * ``None``: w = 1. The paper does this for deterministic or mildly stochastic tasks. With ``priority``,
      w = (\|B_k\| q_k(i))^−β with β from ``priority``; this corrects for the priorities only.
    * ``"mixture"``: with β = 1 the expected loss is that of uniform replay, so the over-sampling of events is removed
      too; 0 < β < 1 is a compromise, as in PER. w = (1 / (N p(i)))^β for N stored transitions, which is exact for any
      task and any priority.
    * ``"conditional"``: (m / p(i))^β, where m is the mean of p over the stored transitions with the same state and
      action. With β = 1, the outcomes of each (s, a) are weighted by how often they were experienced, while (s, a) that
      lead to events stay over-sampled. For discrete states and actions, see ``pair_keys``.
    * ``"lemma2"``: Lemma 2 of the paper as printed, applied to each transition: 1 − η P((s, a, ·) ∉ B^ν) inside the
      union B^ν of the event tables, 1 / (1 − η) outside, with η = Σ_{k>0} η_k. It is correct to first order only. For
      example, if half of the outcomes lead to an event and η = .5, this half gets .5294 of the weighted draws instead
      of .5; without correction it gets .75, with ``"conditional"`` .5.
    * ``"priority"``: the paper's version for continuous tasks (Sec. 4). Transitions are drawn from the whole storage
      instead of from tables in proportions η; probabilities inside and outside of the union B^ν have the ratio
      (1 + η) / (1 − η), and w = 1 / p. All expectations are those of uniform replay; the paper calls this aggressive.
      ``min_size`` has no effect.

    With ``priority=dict(kind="proportional")``, q_k(i) ∝ (\|δ\| + eps)^α, as in
    :class:`~torchrl_replay_ext.ProportionalSampler`. Further entries of the dict, with their defaults: ``alpha`` 0.6,
    ``beta`` 0.4, ``eps`` 1e-6, ``td_error`` ``"squared"``, ``max_priority_within_buffer`` False. A transition has the
    same priority in all tables. New transitions have the largest priority seen so far; in the buffer, a transition that
    pinned tables have removed counts until its slot is written again.

    Args:
        tables: the tables, which an :class:`~torchrl_replay_ext.EventTableWriter` of the same buffer fills.
        eta: η of each table by name, including ``"default"``, each in [0, 1], with sum 1. The schedule of an
            :class:`~torchrl_replay_ext.Anneal` counts drawn batches.
        min_size: d_k, the number of transitions from which on a table is used, >= 1: one number for all event tables,
            or a dict with numbers for some of them. Default: None, the batch size. (:meth:`probabilities` and
            :meth:`stats` use the batch size of the last draw, or 1 before the first draw.)
        allocation: how rows are divided among tables: ``"systematic"`` (default), ``"multinomial"`` or
            ``"largest_remainder"``, see :func:`~torchrl_replay_ext.functional.allocate`.
        correction: see above. Default: None.
        beta: exponent of the correction in [0, 1], or :class:`~torchrl_replay_ext.Anneal`, whose schedule counts
            priority updates, or drawn batches if there are no priorities. Without correction it must be 1. Default: 1.
        priority: see above. Default: None, transitions of a table are drawn uniformly.
        pair_keys: entries with the state and the action, for ``"conditional"`` and ``"lemma2"``. They can have any
            dtype; equal states and actions must have exactly equal values. Pairs are counted by hash: with D different
            pairs in a buffer of N transitions, the counts of about a share of (1 − e^(−D/2N))³ are too large, such as
            1 % for D = N/2. Default: ``("observation", "action")``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range or arguments contradict each other; at the first write, if the
            buffer's writer has other tables.
        RuntimeError: at the first write, if the buffer's writer is not an EventTableWriter.

    Examples:
        See :class:`~torchrl_replay_ext.EventTableWriter`.
    """

    writes_in_graphs = False
    alpha = exponent("alpha", ALPHA, only_with="priority=")
    beta = exponent("beta", BETA, only_with="correction= or priority=")

    def __init__(
        self,
        tables: EventTables,
        *,
        eta: Mapping[str, float | Anneal],
        min_size: int | Mapping[str, int] | None = None,
        allocation: Allocation = "systematic",
        correction: Correction | None = None,
        beta: float | Anneal = 1.0,
        priority: Mapping[str, Any] | None = None,
        pair_keys: tuple[NestedKey, ...] = ("observation", "action"),
    ):
        if not isinstance(tables, EventTables):
            raise TypeError(f"EventTableSampler: tables must be EventTables, not {type(tables).__name__}.")
        self._allocation: Allocation = require_choice("EventTableSampler", "allocation", allocation, METHODS)
        require_correction(correction, beta, pair_keys)
        settings = priority_settings(priority)
        require_compatible(correction, tables, priority)
        if correction is not None:
            settings["beta"] = beta
        self._shares = TableShares(tables.names, eta, may_anneal=correction != "priority")
        # the tables that the sampler draws from
        self.tables, self._correction, self._pair_keys = tables, correction, tuple(pair_keys)
        # minimum number of entries of each table, int64 [tables]; -1 stands for the batch size
        self._min_sizes = min_sizes(min_size, tables)
        self.takes_priorities = priority is not None
        super().__init__(None, **settings)

    def _find_parts(self, storage: Storage) -> bool:
        """Use the tables of the buffer's writer; returns True if the state must be allocated again."""
        tables = getattr(storage, STORAGE_ATTRIBUTE, None)
        if tables is None:
            raise RuntimeError(
                "EventTableSampler: the buffer's writer does not fill event tables; pass "
                "writer=EventTableWriter(tables)."
            )
        if tables is not self.tables:
            if tables.description() != self.tables.description():
                raise ValueError(
                    "EventTableSampler: the buffer's writer has other tables; pass the same EventTables to both, or "
                    "tables with the same arguments."
                )
            self.tables = tables
            return True
        return not self.layout.known

    # --- writes and updates

    def allocate(self, layout: Layout) -> None:
        tables, shares = self.tables, self._shares
        shares.to(layout.device)
        alpha, self._pairs, self.parts = self.hyperparameters.get("alpha"), None, ()
        if self._correction in ("conditional", "lemma2"):
            self._pairs = PairCounts(layout.size, len(tables), self._pair_keys, device=layout.device)
            self.parts = (self._pairs,)
        is_by_share = self._correction == "priority"
        self._masses = EntryMasses(
            self.slots,
            tables,
            alpha=None if alpha is None else alpha.tensor,
            shares=shares if is_by_share else None,
            pairs=self._pairs,
        )
        # η of each table, which is changed in place later; with correction "priority" all rows come from the default
        # table
        default = torch.arange(len(tables), device=layout.device) == 0
        self._eta = default.to(torch.float64) if is_by_share else shares.current
        self._least = self._min_sizes.to(layout.device)
        self._views = Views(self._eta, self._least, self._masses.view.begins)
        # size of the last batch outside graphs: the default minimum size of a table for density()
        self._batch_size = 1
        # batch sizes for which the sizes of the tables were checked
        self._known_sizes: set[int] = set()

    @property
    def max_supported_priority(self) -> float:
        alpha = self.hyperparameters.get("alpha")
        return MAX_PRIORITY if alpha is None else largest_priority(self._masses.tree, alpha)

    def synchronize(self, storage: Storage | None) -> bool:
        """Bring the state up to date with the storage and the tables; see the base class."""
        in_graph = super().synchronize(storage)
        if not in_graph:
            self._masses.sync()
        return in_graph

    def before_ingest(self, count: int, next_slot: int) -> None:
        self.tables.adopt(count, next_slot)

    def write(self, slots: Tensor, rows: RowView) -> None:
        if self.takes_priorities:
            # the masses are computed from d before the write is recorded
            self.slots.priority[slots] = -self.slots.largest.float()
        self._masses.follow(slots)

    def remove(self, slots: Tensor) -> None:
        self.tables.remove(slots.cpu().numpy())
        self._masses.sync()
        if not self.tables.is_pinned:
            # the default table has an entry for each slot
            self._masses.tree.write(slots, 0)

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._masses.follow(slots)

    def reweight(self, slots: Tensor | None) -> None:
        slots = torch.arange(self.layout.size, device=self.layout.device) if slots is None else slots
        self._masses.follow(self._masses.stored(slots))

    # --- draws

    def draw(self, count: int, generator: torch.Generator | None) -> Draw:
        if self.tables.is_pinned and _torchrl.draws_sequences(self, self._bound_storage):
            raise ValueError(
                f"{self.owner}: the buffer has sample_unit=Sequence(...), which reads consecutive slots; with "
                "retention='pinned' consecutive slots are not consecutive steps. Use retention='ring'."
            )
        if not is_traced():
            self._batch_size = count
            if count not in self._known_sizes:
                self._known_sizes.add(count)
                self._warn_of_small_tables()
        masses = self._masses
        leaves, nodes, pages, _ = masses.tree.arrays()
        masses.tree.raise_if_empty(nodes)
        # 1 / w corrects for the priorities inside the tables only, or it is in proportion to the probability
        is_mixed = self._correction is not None
        shares, least, begins = self._views()
        slot_at, position_of, counts, _ = masses.view.views()
        table, eta = empty(leaves, count, torch.int64), empty(leaves, len(counts), torch.float64)
        slots, density = empty(leaves, count, torch.int64), empty(leaves, count, torch.float64)
        probability = empty(leaves, count, torch.float32)
        events_draw(
            random_seed(self.layout.device, generator),
            *(shares, least, METHODS.index(self._allocation), leaves, nodes, pages, masses.is_uniform),
            *(counts, begins, slot_at, position_of, is_mixed, table, eta, slots, density, probability),
        )
        if self._pairs is not None:
            density = self._corrected(self._pairs, *map(as_tensor, (slots, density, eta)))
        self.count_batch()
        extras = {"table": as_tensor(table), "sample_probability": as_tensor(probability)}
        if "beta" not in self.hyperparameters:
            # 0 if nothing can be drawn
            extras["priority_weight"] = (extras["sample_probability"] > 0).to(torch.float32)
            return Draw(slots, extras=extras)
        return Draw(slots, density, extras=extras)

    def _corrected(self, pairs: PairCounts, slots: Tensor, probability: Tensor, eta: Tensor) -> Tensor:
        """1 / w of ``slots`` [n] up to a factor, for the corrections that count transitions; float64 [n]."""
        of_pair = pairs.of(slots)
        if self._correction == "conditional":
            per_entry = (eta / self._masses.view.counts.clamp_min(1)).unsqueeze(1)
            result = of_pair[0] * probability / (of_pair[:-1] * per_entry).sum(0)
        else:
            event_share = 1 - eta[0]
            inside = 1 - event_share * (1 - of_pair[-1] / of_pair[0])
            result = torch.where(self._masses.in_events(slots), 1 / inside, 1 - event_share)
        return torch.where(probability > 0, result, 0.0)

    def _warn_of_small_tables(self) -> None:
        """Warn of event tables with a share that are never drawn from because their capacity is too small."""
        for number, least in enumerate(self._min_sizes.tolist()):
            needed, name = self._batch_size if least < 0 else least, self.tables.names[number]
            capacity = self.tables[name].capacity
            if number and capacity < needed and self._eta[number] > 0:
                warnings.warn(
                    f"EventTableSampler: table {name!r} is never drawn from: it holds at most "
                    f"{capacity} transitions and is used from {needed} on (min_size=, by default the batch size). Pass "
                    "a smaller min_size= or a larger capacity=.",
                    stacklevel=2,
                )

    def density(self, slots: Tensor) -> Tensor:
        mass = self._masses.of_tables()
        eta = self._used(self._masses.view.counts, mass, self._batch_size, self._eta)
        return self._masses.mixture(slots, eta / mass.clamp_min(1))

    def stored_slots(self) -> Tensor:
        everything = torch.arange(self.layout.size, device=self.layout.device)
        held = (self._masses.view.positions(everything) >= 0).any(0)
        return everything[held & (self.slots.generation > 0)]

    def _used(self, counts: Tensor, mass: Tensor, batch_size: int, eta: Tensor) -> Tensor:
        """η of the tables that are used for a batch, with sum 1; see :func:`torchrl_replay_ext.kernels.events.draw`."""
        needed = torch.where(self._least < 0, batch_size, self._least)
        eta = eta * ((counts >= needed) & (mass > 0))
        # if no table is used, rows come from the default table
        eta = torch.where(eta.sum() > 0, eta, torch.eye(len(eta), dtype=eta.dtype, device=eta.device)[0])
        return eta / eta.sum()

    # --- draws from several shards: a table of the whole buffer is the union of the tables of the same name

    def shard_sums(self) -> Sums | None:
        if self._correction not in (None, "mixture"):
            # the others count outcomes, which may lie in several shards
            return None
        return Sums(self._masses.of_tables().tolist(), self._masses.view.counts.tolist())

    def rows_of_tables(
        self, mass: np.ndarray, count: np.ndarray, batch_size: int, u: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The number of rows of each table in a batch from all shards, int64 [tables], and η, float64 [tables].

        Args:
            mass: sums of the masses of the tables in all shards, float64 [tables].
            count: number of transitions of the tables in all shards, int64 [tables].
            batch_size: number of rows.
            u: uniform random numbers, float64 [batch_size].
        """
        eta = self._used(torch.from_numpy(count), torch.from_numpy(mass), batch_size, self._shares.current)
        return allocate(eta, batch_size, self._allocation, torch.from_numpy(u)).numpy(), eta.numpy()

    def draw_of_shard(self, wanted: ShardRows, sums: Sums) -> Draw:
        tree, view = self._masses.tree, self._masses.view
        rows, probability, eta, count = (torch.from_numpy(np.asarray(part)) for part in wanted[:4])
        ends = tree.prefix(view.begins)
        totals = ends.diff()
        table = torch.arange(len(totals), device=ends.device).repeat_interleave(rows * (totals > 0))
        u = uniform(len(table), device=ends.device, generator=self._rng)
        target = torch.minimum((u * totals[table]).to(torch.int64), totals[table] - 1)
        position, mass = tree.find(ends[table] + target)
        slots = view.slot_at[position].to(torch.int64)
        # q_k(i) = probability · mass / total in the whole buffer
        scale = probability / totals.clamp_min(1)
        sampled = self._masses.mixture(slots, eta * scale)
        extras = {"table": table, "sample_probability": sampled.float()}
        if self._correction == "mixture":
            return Draw(slots, sampled, extras=extras)
        if self.takes_priorities:
            return Draw(slots, count[table] * mass * scale[table], extras=extras)
        return Draw(slots, extras=extras | {"priority_weight": torch.ones_like(sampled, dtype=torch.float32)})

    # --- proportions of the tables

    def count_batch(self) -> None:
        beta = self.hyperparameters.get("beta")
        if beta is not None and beta.annealed and not self.takes_priorities:
            beta.step()
        self._shares.step()

    @property
    def eta(self) -> dict[str, float]:
        """η of each table. Assign a dict of numbers or :class:`~torchrl_replay_ext.Anneal` to replace all of them."""
        return self._shares.as_dict()

    @eta.setter
    def eta(self, value: Mapping[str, float | Anneal]) -> None:
        with self.exclusive():
            before = self._shares.current.clone()
            self._shares.set(value)
            if self._correction == "priority" and not torch.equal(before, self._shares.current):
                self.reweight(None)

    @property
    def event_share(self) -> float:
        """Σ_{k>0} η_k. An assignment scales the η of the event tables; TorchRL's ParameterScheduler can do this."""
        return float(1 - self._shares.current[0])

    @event_share.setter
    def event_share(self, value: float) -> None:
        self.eta = self._shares.with_event_share(value)

    # --- state

    def settings(self) -> dict[str, Any]:
        """The hyperparameters and η of each table."""
        return {**super().settings(), "eta": self._shares}

    def clear(self) -> None:
        self._masses.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def rebuild(self) -> None:
        self._masses.rebuild()

    def own_stats(self) -> dict[str, Tensor]:
        names, eta = self.tables.names, self._shares.current
        stats = {f"size_{name}": size for name, size in zip(names, self._masses.view.counts, strict=True)}
        return stats | {f"eta_{name}": share for name, share in zip(names, eta, strict=True)}
