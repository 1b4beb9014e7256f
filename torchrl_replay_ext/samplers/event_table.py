"""Stratified sampling from event tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey, is_tensor_collection
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage
from typing_extensions import Required, TypedDict

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import TDError
from torchrl_replay_ext.compilation import EagerFallback, gather_in_bounds, is_traced, uniform, where_int64
from torchrl_replay_ext.core.class_counts import MAX_EVENT_TABLES, ClassCounts
from torchrl_replay_ext.core.event_spec import DEFAULT, is_key
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.core.pair_counts import PairCounts
from torchrl_replay_ext.core.sum_tree import SumTree, UpdateMask
from torchrl_replay_ext.functional.allocation import METHODS, Allocation, table_ends
from torchrl_replay_ext.functional.priorities import FEW
from torchrl_replay_ext.samplers.base import PrioritySampler, _length, draws_sequences
from torchrl_replay_ext.samplers.reaper import ReaPERSampler, Truncated

Correction = Literal["mixture", "conditional", "lemma2", "priority"]
_CORRECTIONS = (None, *get_args(Correction))
_COUNTING = ("conditional", "lemma2")
# What priority=dict(kind=...) takes, and its defaults.
_KINDS: dict[str, dict[str, Any]] = {
    "proportional": {
        "alpha": 0.6,
        "beta": 0.4,
        "eps": 1e-6,
        "td_error": "squared",
        "max_priority_within_buffer": False,
    },
    "rank": {"alpha": 0.7, "beta": 0.4, "td_error": "squared", "stale_fraction": 0.05},
    "reaper": {
        "alpha": 0.4,
        "omega": 0.2,
        "beta": 0.4,
        "eps": 1e-6,
        "td_error": "squared",
        "max_priority_within_buffer": False,
    },
}
# What it takes beyond that, and hands on.
_REAPER = ("num_streams", "truncated", "done_key", "terminated_key", "traj_key", "init_key")
# ReaPER: proposals per row, and rounds until every Ψ is computed.
_TRIES = 4
_MAX_ROUNDS = 8
# Units of mass for the first rank; the tree's own is too coarse for the last of a million.
_RANK_UNIT = 2**36


class TablePriority(TypedDict, total=False):
    """What ``priority=`` of an :class:`EventTableSampler` takes; which entries go with a ``kind``, see there."""

    kind: Required[Literal["proportional", "rank", "reaper"]]
    alpha: float | Anneal
    beta: float | Anneal
    omega: float | Anneal
    eps: float
    td_error: TDError
    stale_fraction: float
    max_priority_within_buffer: bool
    num_streams: int
    truncated: Truncated
    done_key: NestedKey
    terminated_key: NestedKey
    traj_key: NestedKey
    init_key: NestedKey


@PrioritizedSampler.register
class EventTableSampler(PrioritySampler):
    r"""Draws batches from all event tables in fixed proportions (SSET, Kompella et al. 2022, Algorithm 1).

    A row comes from table k with probability η_k; inside a table, transitions are drawn with replacement, all with the
    same probability q_k(i) = 1 / \|B_k\|, or by ``priority``. A table with fewer than ``min_size`` transitions is left
    out, and the η of the others are scaled up; the default table is never too small. In one draw, transition i has the
    probability ::

        p(i) = Σ_k η_k q_k(i)      over the tables k that hold it

    Rows carry ``"table"``, int64 [B], the number of their table (0: default, then in the order of ``tables``; rows
    stand in that order), ``"sample_probability"``, float32 [B], p(i), and ``"priority_weight"``, float32 [B], which
    TorchRL's losses apply: w divided by the largest of the batch, with w by ``correction``:

    * ``None``: 1; what the source does for deterministic or mildly stochastic tasks. With ``priority``,
      (\|B_k\| q_k(i))^−β with β from ``priority``: as if draws inside the tables were uniform.
    * ``"mixture"``: with β = 1 the expected loss is that of uniform replay, so it also removes the over-sampling of
      events; 0 < β < 1 is a compromise, as in PER. The formula depends on the tables' ``retention``:

      * ``"ring"``: (1 / (N p(i)))^β, N the number of transitions stored. Exact for any task and any priority.
      * ``"pinned"``: (r(c) / P(c))^β. c is the class of transition i: the set of event tables it has entered. r(c) is
        the rate at which transitions of this class were written, counted over the time for which the tables still hold
        all of them; P(c) = Σ_k η_k \|B_k ∩ c\| / \|B_k\| is the probability that a draw is of class c. With
        ``priority``, the weight is multiplied by p(i) without priorities over p(i). Uniform weights over what is stored
        would be biased: pinned tables keep outcomes with an event longer than outcomes of the same (s, a) without one.
        The weights are exact if the transitions of a class are distributed alike over that time, which holds for a
        fixed policy and environment. As the policy changes, old transitions keep the (s, a) of the old policy; only
        ``retention="ring"`` is exact then. The class of a transition is final when its episode has ended, so the newest
        τ transitions of each stream may be counted in a smaller class. With η = 0 for the default table, transitions
        without an event are not drawn, and no weight makes up for them. At most 16 event tables. A sampler attached to
        tables in use knows only the tables that hold a transition now, and the age of what the default table holds.

    * ``"conditional"``: (m / p(i))^β, m the mean of p over the stored transitions with the same state and action.
      With β = 1, the outcomes of each (s, a) weigh as they were experienced, while (s, a) that lead to events stay
      over-sampled. For discrete states and actions, see ``pair_keys``. Needs ``retention="ring"``: where tables keep
      events longer, the stored outcomes of (s, a) are not in the proportions in which they were experienced.
    * ``"lemma2"``: the source's Lemma 2 as printed, read per transition: 1 − η P((s, a, ·) ∉ B^ν) inside the union B^ν
      of the event tables, 1 / (1 − η) outside, η = Σ_{k>0} η_k. It is right to first order only: where half of the
      outcomes lead to an event and η = .5, that half has .5294 of the weighted draws instead of .5, against .75 without
      correction (``"conditional"`` gives .5). Needs ``retention="ring"``: it counts outcomes as they were experienced.
    * ``"priority"``: the source's version for continuous tasks (Sec. 4): no proportions, but one draw over all with
      probabilities in the ratio (1 + η) / (1 − η) inside and outside of the union, w = 1 / p. Every expectation is that
      of uniform replay: aggressive, as the source says. Needs ``retention="ring"``: uniform over what pinned tables
      store is not uniform over experience.

    One priority per transition serves all tables. ``priority=dict(kind=...)``:

    * ``"proportional"``: q_k(i) ∝ (\|δ\| + eps)^α, as in :class:`~torchrl_replay_ext.ProportionalSampler`; also
      ``alpha``, ``beta``, ``eps``, ``td_error``, ``max_priority_within_buffer``.
    * ``"rank"``: q_k(i) ∝ rank^−α, its rank in table k; also ``alpha``, ``beta``, ``td_error`` and ``stale_fraction``:
      ranks are those of the last sort, and of the moment for a transition that was updated or inserted since; sorted
      anew outside of graphs when so large a share of all entries has changed. New transitions have the first rank.

    * ``"reaper"``: q_k(i) ∝ Ψ_i, as in :class:`~torchrl_replay_ext.ReaPERSampler`, whose other arguments it takes too
      (but ``weight_norm``); for ``retention="ring"``. Draws follow Ψ exactly; the sum of Ψ over a table, of which p and
      w are made, is estimated from the proposals of the last batches. (:meth:`probabilities` is exact.)

    New transitions have the largest priority so far.

    Args:
        tables: the tables, which an :class:`~torchrl_replay_ext.EventTableWriter` of the same buffer fills.
        eta: η of each table, ``"default"`` included, in [0, 1]; they sum to 1. An
            :class:`~torchrl_replay_ext.Anneal` counts batches drawn.
        min_size: transitions that a table needs to be drawn from, d_k; by default the batch size, which
            :meth:`probabilities` and :meth:`stats` take from the last draw (1 before the first). A number for all event
            tables, or one for each.
        allocation: how rows are divided among tables: ``"systematic"`` (default), ``"multinomial"`` or
            ``"largest_remainder"``, see :func:`~torchrl_replay_ext.functional.allocate`.
        correction: see above. Default: None.
        beta: exponent of the correction in [0, 1], or :class:`~torchrl_replay_ext.Anneal`, which counts priority
            updates, or batches drawn if there are no priorities; without effect if there is no correction. Default: 1.
        priority: see above; None (default): all transitions of a table are drawn with the same probability.
        pair_keys: where state and action are stored, for ``"conditional"`` and ``"lemma2"``; entries of any dtype that
            repeat exactly. They are counted by hash: for D different pairs in a buffer of N, two share a count with a
            chance of about D² / 8N. Default: ``("observation", "action")``.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range or they do not fit together; at the first write, if the buffer's
            writer has other tables.
        RuntimeError: at the first write, if the buffer's writer is no EventTableWriter.

    Examples:
        See :class:`~torchrl_replay_ext.EventTableWriter`.
    """

    _grows = True
    _writes_in_turn = True
    writes_in_graphs = False

    def __init__(
        self,
        tables: EventTables,
        *,
        eta: Mapping[str, float | Anneal],
        min_size: int | Mapping[str, int] | None = None,
        allocation: Allocation = "systematic",
        correction: Correction | None = None,
        beta: float | Anneal = 1.0,
        priority: TablePriority | None = None,
        pair_keys: tuple[NestedKey, ...] = ("observation", "action"),
    ):
        if not isinstance(tables, EventTables):
            raise TypeError(f"EventTableSampler: tables must be EventTables, not {type(tables).__name__}.")
        if allocation not in METHODS:
            raise ValueError(
                f"EventTableSampler(allocation={allocation!r}): allocation must be one of {', '.join(METHODS)}."
            )
        if correction not in _CORRECTIONS:
            raise ValueError(
                f"EventTableSampler(correction={correction!r}): correction must be None, 'mixture', 'conditional', "
                "'lemma2' or 'priority'."
            )
        values = (beta.start, beta.end) if isinstance(beta, Anneal) else (beta,)
        if not all(_is_number(value) and 0 <= value <= 1 for value in values):
            raise ValueError(f"EventTableSampler(beta={beta!r}): beta must be in [0, 1].")
        if not (isinstance(pair_keys, (tuple, list)) and pair_keys and all(map(is_key, pair_keys))):
            raise TypeError(
                f"EventTableSampler(pair_keys={pair_keys!r}): pair_keys must be a tuple of the names of entries, "
                "('observation', 'action') for example."
            )
        settings = _settings(priority)
        self._kind: str | None = settings.pop("kind")
        if correction in ("conditional", "lemma2", "priority"):
            if self._kind is not None:
                raise ValueError(
                    f"EventTableSampler(correction={correction!r}): knows no priorities inside tables; use "
                    "correction='mixture'."
                )
            if tables.retention == "pinned":
                raise ValueError(
                    f"EventTableSampler(correction={correction!r}): needs tables of retention='ring'; pinned tables "
                    "keep events longer than other transitions, so what is stored is not in the proportions in which "
                    "it was experienced. Use retention='ring' or correction='mixture'."
                )
        if correction is not None and priority is not None and "beta" in priority:
            raise ValueError(
                f"EventTableSampler(correction={correction!r}): its exponent is beta=, priority must not have one."
            )
        self._tables = tables
        self._allocation, self._correction = allocation, correction
        self._pair_keys = pair_keys
        # in a ring all that is stored is the default table
        self._by_class = correction == "mixture" and tables.retention == "pinned"
        if self._by_class and len(tables) - 1 > MAX_EVENT_TABLES:
            raise ValueError(
                f"EventTableSampler(correction='mixture'): there are {len(tables) - 1} event tables; with tables of "
                f"retention='pinned' it counts every set of them, for at most {MAX_EVENT_TABLES}. Use "
                "retention='ring', or let several events share a table."
            )
        self._stale_fraction = settings.pop("stale_fraction", 0.0)
        self._source: ReaPERSampler | None = None
        if self._kind == "reaper":
            if tables.retention == "pinned":
                raise ValueError("EventTableSampler(priority='reaper'): needs tables of retention='ring'.")
            handed_on = {key: settings.pop(key) for key in ("omega", *_REAPER) if key in settings}
            self._source = ReaPERSampler(1, alpha=settings["alpha"], **handed_on)
        self._min_sizes = _min_sizes(min_size, tables)
        self._eta = torch.zeros(4, len(tables), dtype=torch.float64)
        self._set_eta(eta)
        # whether all entries of a table are drawn alike
        self._plain = self._kind is None and correction in (None, "mixture")
        own_beta = settings.pop("beta")
        super().__init__(1, beta=own_beta if correction is None else beta, weight_norm="batch", **settings)
        if self._source is not None:
            self._hyperparameters["omega"] = self._source._omega
            self._source._hyperparameters = self._hyperparameters

    @property
    def tables(self) -> EventTables:
        """The tables it draws from."""
        return self._tables

    @property
    def eta(self) -> dict[str, float]:
        """η of each table. Assigning a dict (of numbers or Anneal) replaces all."""
        return dict(zip(self._tables.names, self._eta[0].tolist(), strict=True))

    @eta.setter
    def eta(self, value: Mapping[str, float | Anneal]) -> None:
        before = self._eta.clone()
        self._set_eta(value)
        if self._correction == "priority" and not torch.equal(before[0], self._eta[0]):
            with self._change():
                self._reweight()

    @property
    def omega(self) -> float:
        """Exponent of the reliability, with ``priority=dict(kind="reaper")``."""
        return self._reaper().omega

    @omega.setter
    def omega(self, value: float | Tensor | Anneal) -> None:
        self._reaper().omega = value

    def _reaper(self) -> ReaPERSampler:
        if self._source is None:
            raise AttributeError("EventTableSampler.omega: only with priority=dict(kind='reaper').")
        return self._source

    @property
    def event_share(self) -> float:
        """Σ_{k>0} η_k. Assigning it scales the η of the event tables; TorchRL's ParameterScheduler can."""
        return float(1 - self._eta[0, 0])

    @event_share.setter
    def event_share(self, value: float) -> None:
        events = self._eta[0, 1:]
        share = float(events.sum())
        if not (_is_number(value) and 0 <= value <= 1) or (share == 0 and value > 0):
            raise ValueError(f"EventTableSampler.event_share={value}: must be in [0, 1], and 0 if all η of events are.")
        scaled = (events * (value / share if share else 0.0)).tolist()
        self.eta = dict(zip(self._tables.names, [max(0.0, 1 - sum(scaled)), *scaled], strict=True))

    def _set_eta(self, eta: Mapping[str, float | Anneal]) -> None:
        names = self._tables.names
        if not isinstance(eta, Mapping):
            raise TypeError(f"EventTableSampler(eta={eta!r}): eta must be a dict with a number for each of {names}.")
        if set(eta) != set(names):
            raise ValueError(f"EventTableSampler: eta names {sorted(eta)}, the tables are {sorted(names)}.")
        for name, value in eta.items():
            if not isinstance(value, Anneal) and not _is_number(value):
                raise TypeError(
                    f"EventTableSampler(eta={{{name!r}: {value!r}}}): every eta must be a number or Anneal."
                )
        schedules = [v if isinstance(v, Anneal) else Anneal(v, v, 1) for v in (eta[name] for name in names)]
        for which in ("start", "end"):
            values = [getattr(schedule, which) for schedule in schedules]
            if not all(math.isfinite(v) and 0 <= v <= 1 for v in values):
                raise ValueError(f"EventTableSampler(eta={dict(eta)}): every eta must be in [0, 1].")
            if abs(sum(values) - 1) > 1e-6:
                raise ValueError(
                    f"EventTableSampler(eta={dict(eta)}): they must sum to 1, not {sum(values):g}"
                    f"{' at the end of their schedules' if which == 'end' else ''}."
                )
        self._annealed = any(schedule.start != schedule.end for schedule in schedules)
        if self._annealed and self._correction == "priority":
            raise ValueError("EventTableSampler(correction='priority'): eta cannot be annealed; assign it instead.")
        if self._annealed and len({s.num_updates for s in schedules if s.start != s.end}) > 1:
            raise ValueError("EventTableSampler: the schedules of eta must have the same num_updates, to sum to 1.")
        rows = [[s.start for s in schedules], [s.start for s in schedules], [s.end for s in schedules]]
        steps = [0.0] * len(names)
        duration = max((s.num_updates for s in schedules if s.start != s.end), default=1)
        steps[-1] = float(duration)
        self._eta.copy_(torch.tensor([*rows, steps], dtype=torch.float64))

    def _count_batch(self) -> None:
        """Move along the schedules that count batches."""
        if self._kind is None:
            self._hyperparameters["beta"].step()
        # the last row holds the batches so far, ..., the batches of the schedule
        if self._annealed:
            current, start, end, steps = self._eta.unbind()
            steps[:1].add_(1)
            done = (steps[:1] / steps[-1:]).clamp_max(1.0)
            current.copy_(start + done * (end - start))

    def _bind(self, storage: Storage | None) -> None:
        if storage is not None and storage is not self._bound:
            tables = getattr(storage, STORAGE_ATTRIBUTE, None)
            if tables is None:
                raise RuntimeError(
                    "EventTableSampler: the buffer's writer fills no tables; pass writer=EventTableWriter(tables)."
                )
            if tables is not self._tables:
                if not tables.fits(self._tables):
                    raise ValueError(
                        "EventTableSampler: the buffer's writer has other tables; pass both the same EventTables, or "
                        "equal ones."
                    )
                self._tables = tables
        super()._bind(storage)

    def _allocate(self, size: int, device: torch.device) -> None:
        self._eta = self._eta.to(device)
        self._min_sizes = self._min_sizes.to(device)
        begins = self._tables.regions(size)
        self._begins = torch.tensor(begins, device=device)
        self._nowhere = begins[-1]
        self._tree = SumTree(self._nowhere + 1, device=device)
        # rank-based: of each table behind one another, what the entries were sorted by, and how many there are
        keys = self._nowhere if self._kind == "rank" else 0
        self._keys = torch.full((keys,), torch.iinfo(torch.int64).max, device=device)
        self._changes = torch.zeros((), dtype=torch.int64, device=device)
        self._pairs = PairCounts(size, len(self._tables), device=device) if self._correction in _COUNTING else None
        self._classes = ClassCounts(size, len(self._tables), device=device) if self._by_class else None
        # running mean of R^ω of the proposals for each table, and the sum of its weights
        self._acceptance = torch.zeros(2, len(self._tables), dtype=torch.float64, device=device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=device)
        # whether the default table may have slots that cannot be drawn
        self._holes = torch.zeros((), dtype=torch.bool, device=device)
        self._shape_changed()

    def _share(self, source: ReaPERSampler) -> None:
        """Let ``source`` keep the episodes: its state is ours, its tree the default table's part of ours."""
        for name in ("_size", "_device", "_shape", "_traceable", "_stamp", "_priority", "_clock", "_max_priority"):
            setattr(source, name, getattr(self, name))
        source._tree = self._tree
        source._shape_changed()
        self._episodes = source._episodes

    def _shape_changed(self) -> None:
        if self._source is not None:
            self._share(self._source)
        if self._shape is not None and self._num_slots == self._size:
            self._tables.allocate(self._num_slots, self._device)
            self._tables.attach(self)
        super()._shape_changed()
        if self._traceable and self._source is not None:
            omega = self._hyperparameters["omega"].tensors()
            state = [*self._tree.graph_tensors(), *self._episodes.graph_tensors(), self._stamp, *omega]
            self._fallback = EagerFallback(lambda drawn, inputs: list(self._accepted(*inputs, len(drawn[0]))), state)

    def _clear(self) -> None:
        self._tree.clear_()
        self._keys.fill_(torch.iinfo(torch.int64).max)
        self._changes.zero_()
        if self._pairs is not None:
            self._pairs.clear_()
        if self._classes is not None:
            self._classes.clear_counts_()
        if self._source is not None:
            self._source._clear()
            self._acceptance.zero_()
            self._repeated.zero_()

    def _empty(self) -> None:
        super()._empty()
        if self._classes is not None:
            self._classes.clear_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave, in place; ValueError if it does not fit, with nothing changed."""
        clock, stamp = state_dict.get("clock"), state_dict.get("stamp")
        if clock is not None and stamp is not None and not int(clock) and len(stamp) < self._size:
            # that of a sampler that had no storage yet
            kept = {key: state_dict[key] for key in ("eta", *self._hyperparameters) if key in state_dict}
            self._empty()
            state_dict = self.state_dict() | kept
        super().load_state_dict(state_dict)

    def _tensors(self) -> dict[str, Tensor]:
        state = {"masses": self._tree.rows, "keys": self._keys, "changes": self._changes, "eta": self._eta}
        if self._pairs is not None:
            state |= self._pairs.tensors()
        if self._classes is not None:
            state |= self._classes.tensors()
        if self._source is not None:
            state |= {"acceptance": self._acceptance, "repeated": self._repeated}
            state |= {f"episodes_{name}": tensor for name, tensor in self._episodes.tensors().items()}
        return state

    def _check(self) -> None:
        self._tables.check_valid()
        if self._source is not None:
            self._episodes.check_valid()
        if self._classes is not None and self._tables.num_slots:
            self._classes.check_valid(self._tables.holds(torch.arange(self._size, device=self._device)))
        if self._correction != "priority" and self._tables.num_slots:
            positions = self._tables.positions(self._stored_slots()).unique()
            drawn = (self._tree.leaves > 0).nonzero().squeeze(1)
            if not bool(torch.isin(drawn, positions).all()) or bool((drawn == self._nowhere).any()):
                raise AssertionError("EventTableSampler: what is in no table can be drawn")

    def _restored(self) -> None:
        self._holes.fill_(True)
        self._tree.rebuild_()
        if self._source is not None:
            self._episodes.rebuild_()
        self._annealed = not torch.equal(self._eta[1], self._eta[2])

    def _limit(self, alpha: float) -> float:
        if self._source is not None:
            return min(self._largest(self._tree, alpha), self._source._episodes.max_priority)
        return 1e30 if self._kind != "proportional" else self._largest(self._tree, alpha)

    def _masses(self, positions: Tensor, slots: Tensor) -> Tensor:
        """Masses of ``slots`` [n] at ``positions`` [n]."""
        if self._correction == "priority":
            eta = 1 - self._eta[0, 0]
            return SumTree.to_mass(1 + eta * (2.0 * self._inside(slots) - 1))
        priority = gather_in_bounds(self._priority, slots)
        if self._kind == "rank":
            return self._rank_masses(positions, priority)
        if self._kind is None:
            return torch.full_like(positions, SumTree.UNIT)
        return self._mass(priority.abs())

    def _inside(self, slots: Tensor) -> Tensor:
        """Whether any event table holds each of ``slots`` [n], bool [n]."""
        return self._tables.holds(slots).any(0)

    def _set(self, positions: Tensor, slots: Tensor, mask: UpdateMask | None = None) -> None:
        """Bring the masses of ``slots`` [n] at ``positions`` [n] up to date."""
        mass = self._masses(positions, slots) * (positions != self._nowhere)
        self._tree.write(positions, mass, mask=mask)

    def entered(self, positions: Tensor, slots: Tensor) -> None:
        """Called by the tables: ``slots`` [n] are now at ``positions`` [n]."""
        self._changes.add_(len(slots))
        if self._correction == "priority":
            self._set(slots, slots)
            return
        self._set(positions, slots)
        self._count_pairs(slots)
        self._count_classes(slots)

    def left(self, positions: Tensor, slots: Tensor) -> None:
        """Called by the tables: ``slots`` [n] are no longer at ``positions`` [n]."""
        self._changes.add_(len(slots))
        if self._correction == "priority":
            self._set(slots, slots)
            return
        self._tree.write(positions, torch.zeros_like(positions))
        self._count_pairs(slots)
        self._count_classes(slots.unique() if self._classes is not None else slots)

    def lists_changed(self) -> None:
        """Called by the tables: entries may be anywhere else now."""
        self._changing.fill_(True)

    def _mend(self, storage: Storage | None, writing: Tensor | None = None) -> None:
        self._tables.mend()
        broke_off = bool(self._changing) and storage is not None
        if broke_off:
            self._holes.fill_(True)
            last = getattr(storage, "_last_cursor_index", None)
            if self._in_ring and last is not None:
                # rows were written, but what they wrote over has not left the tables
                self._tables.overwrite(self._tables.skipped((int(last) + 1) * self._slots_per_step))
        super()._mend(storage, writing)
        if broke_off:
            self._recount_classes()

    def _count_classes(self, slots: Tensor) -> None:
        if self._classes is not None:
            self._classes.moved(slots, self._tables.holds(slots), self._tables.num_written)

    def _recount_classes(self) -> None:
        if self._classes is not None:
            everything = torch.arange(self._size, device=self._device)
            self._classes.clear_counts_()
            self._classes.recount(everything, self._tables.holds(everything))

    def _count_pairs(self, slots: Tensor) -> None:
        if self._pairs is not None:
            slots = slots.unique()
            self._pairs.list(slots, self._tables.holds(slots))

    def _table_of(self, positions: Tensor) -> Tensor:
        return (positions.unsqueeze(1) >= self._begins[1:-1]).sum(1)

    def _everywhere(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """All positions of ``slots`` [n], and the slots repeated accordingly."""
        positions = self._tables.positions(slots)
        if self._correction == "priority":
            positions = positions[:1]
        return positions.reshape(-1), slots.expand(positions.shape).reshape(-1)

    def _adopt(self, storage: Storage) -> None:
        last = getattr(storage, "_last_cursor_index", None)
        self._tables.adopt(_length(storage), None if last is None else (int(last) + 1) * self._slots_per_step - 1)
        super()._adopt(storage)
        if self._classes is not None:
            self._recount_classes()
            self._classes.adopt(self._tables.index(0), self._tables.num_written)

    def _write(self, slots: Tensor, storage: Storage | None) -> None:
        if is_traced():
            raise RuntimeError("EventTableSampler: events are not part of a graph; call extend outside of it.")
        if self._pairs is not None:
            columns = [self._column(storage, key, slots) for key in self._pair_keys]
            self._pairs.write(slots, columns)
            # marked again, they are where they were; otherwise they leave the tables next
            self._count_pairs(slots)
        if self._source is not None:
            self._source._write(slots, storage)
            self._just_written = slots
        else:
            self._stamp_slots(slots)
        self._set(*self._everywhere(slots))
        self._changes.add_(len(slots))
        self._sort_if_due()

    def _drop(self, slots: Tensor) -> None:
        self._tables.overwrite(slots)
        self._holes.fill_(True)
        if self._source is not None:
            self._source._drop(slots)
        self._tree.write(slots, torch.zeros_like(slots))
        self._changes.add_(len(slots))
        if self._pairs is not None:
            self._pairs.drop(slots)

    @property
    def _in_ring(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        # pinned tables choose slots; what was not written to the end is in none
        return self._tables.retention == "ring"

    def _has_holes(self) -> bool:
        """Whether the default table has slots of which nobody knows what they hold."""
        if bool(self._holes):
            self._holes.copy_((self._stamp[: self._tables.size(0)] == 0).any())
        return bool(self._holes)

    def _column(self, storage: Storage | None, key: NestedKey, slots: Tensor) -> Tensor:
        stored: Any = storage
        if getattr(storage, "is_stacked", lambda key: False)(key):
            return stored.take_columns([key], slots).get(key).flatten(1)
        data: Any = getattr(storage, "_storage", None)
        column = data.get(key, None) if is_tensor_collection(data) else None
        if column is None:
            raise KeyError(
                f"EventTableSampler(correction={self._correction!r}): the stored data has no entry {key!r}; pass where "
                "state and action are stored as pair_keys=."
            )
        return column.reshape(self._num_slots, -1)[slots]

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict]:
        """Draw ``batch_size`` slots, see :class:`~torchrl_replay_ext.ProportionalSampler`.

        Raises:
            ValueError: if the buffer has ``sample_unit=Sequence(...)`` and the tables ``retention="pinned"``.
        """
        if self._tables.retention == "pinned" and not is_traced() and draws_sequences(self, storage):
            raise ValueError(
                "EventTableSampler: the buffer has sample_unit=Sequence(...), which reads consecutive slots; with "
                "retention='pinned' consecutive slots are not consecutive steps. Use retention='ring'."
            )
        return super().sample(storage, batch_size)

    @property
    def takes_priorities(self) -> bool:
        """True if draws depend on TD errors."""
        return self._kind is not None

    def update_priority(
        self, index: Any, priority: Any, *, storage: Storage | None = None, stamp: Tensor | None = None
    ) -> None:
        """Set priorities from TD errors, see :class:`~torchrl_replay_ext.ProportionalSampler`; without, do nothing."""
        if self._kind is not None:
            super().update_priority(index, priority, storage=storage, stamp=stamp)

    def _update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        if self._source is not None:
            self._source._update(slots, priority, mask)
        positions, repeated = self._everywhere(slots)
        if mask is not None:
            count = positions.shape[0] // slots.shape[0]
            mask = UpdateMask(mask.valid.repeat(count), mask.is_last.repeat(count))
        self._set(positions, repeated, mask)
        self._changes.add_(slots.shape[0])

    def _reweight(self, slots: Tensor | None = None) -> None:
        if self._kind == "rank" and slots is None:
            self.sort()
        elif slots is not None:
            taken = (gather_in_bounds(self._stamp, slots) > 0) & (
                torch.arange(len(slots), device=self._device) < self._size
            )
            positions, repeated = self._everywhere(slots)
            count = positions.shape[0] // slots.shape[0]
            self._set(positions, repeated, UpdateMask(taken.repeat(count), taken.repeat(count)))
        elif self._tables.num_slots:
            self._set(*self._everywhere(self._stored_slots()))

    def _sort_keys(self, positions: Tensor, priority: Tensor) -> Tensor:
        """What entries are sorted by: the table, then the priority, largest first, new ones ahead of all."""
        bits = torch.where(priority < 0, math.inf, priority).view(torch.int32).to(torch.int64)
        return (self._table_of(positions) << 32) - bits

    def _rank_masses(self, positions: Tensor, priority: Tensor) -> Tensor:
        table = self._table_of(positions)
        ahead = torch.searchsorted(self._keys, self._sort_keys(positions, priority))
        first = torch.searchsorted(self._keys, (table << 32) - 2**31)
        return self._of_rank(ahead - first)

    def _of_rank(self, rank: Tensor) -> Tensor:
        alpha = self._hyperparameters["alpha"].value
        return ((rank + 1).to(torch.float64) ** -alpha * _RANK_UNIT).ceil().to(torch.int64)

    def _sort_if_due(self) -> None:
        if self._kind == "rank":
            changes = self._changes.item()
            if changes and changes >= self._stale_fraction * self._tables.counts.sum().item():
                self.sort()

    @torch.no_grad()
    def sort(self) -> None:
        """Rank-based: bring the ranks up to date; needed only where nothing is written or drawn outside of graphs."""
        if self._kind == "rank" and self._tables.num_slots:
            with self._change():
                self._sort()

    def _sort(self) -> None:
        everything = torch.arange(self._size, device=self._device)
        positions, slots = self._everywhere(everything[self._stamp > 0])
        listed = positions != self._nowhere
        positions, slots = positions[listed], slots[listed]
        keys, order = self._sort_keys(positions, self._priority[slots]).sort(stable=True)
        self._keys.fill_(torch.iinfo(torch.int64).max)
        self._keys[: len(keys)] = keys
        table = self._table_of(positions[order])
        begins = torch.searchsorted(table, torch.arange(len(self._tables), device=self._device))
        rank = torch.arange(len(keys), device=self._device) - begins[table]
        leaves = self._tree.leaves
        leaves.zero_()
        leaves[positions[order]] = self._of_rank(rank)
        self._tree.rebuild_()
        self._changes.zero_()

    def _proportions(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """η of the tables that are large enough, where each one's masses begin, and their sums; [tables] each."""
        ends = self._tree.prefix(self._begins)
        low, total = ends[:-1], ends[1:] - ends[:-1]
        eta = self._eta[0]
        if self._correction == "priority":
            eta = eta * 0
        else:
            needed = torch.where(self._min_sizes < 0, batch_size, self._min_sizes)
            eta = eta * ((self._tables.counts >= needed) & (total > 0))
        share = eta.sum()
        # nothing but the default table where no other will do
        only = (self._begins[:-1] == 0) * (share == 0)
        eta = (eta + only) / (share + (share == 0))
        return eta, low, total

    def _plain_rows(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor, list[float]] | None:
        """A draw where all entries of a table are alike and none is dead: slots, tables, p(i), and η_k / |B_k|.

        Then no tree is needed, and outside graphs most is done on numbers: this takes half the time.
        """
        runs = self._tables.runs()
        if runs is None or self._has_holes():
            return None
        begins, lengths, oldest, sizes = zip(*runs, strict=True)
        needed = [batch_size if d < 0 else d for d in self._min_sizes.tolist()]
        eta = [share * (size >= d) for share, size, d in zip(self._eta[0].tolist(), sizes, needed, strict=True)]
        total = sum(eta)
        eta = [share / total for share in eta] if total else [1.0, *(0.0 for _ in eta[1:])]
        u = uniform(batch_size + 1, device=self._device, generator=self._rng)
        if self._allocation == "systematic" and batch_size <= FEW:
            # as table_ends, in a quarter of the time
            first, parts = u[0].item(), [*accumulate(eta)]
            ends = [math.ceil(batch_size * (part / parts[-1]) - first) for part in parts]
            counts = [end - begin for begin, end in pairwise([0, *ends])]
            row_tables = [number for number, count in enumerate(counts) for _ in range(count)]
            table = torch.tensor(row_tables, device=self._device)
        else:
            table = self._tables_of_rows(torch.tensor(eta, dtype=torch.float64, device=self._device), batch_size, u)
        # in the order of positions, as in the tree: first those that have wrapped around, then a gap
        starts = [old % length for old, length in zip(oldest, lengths, strict=True)]
        wrapped = [max(at + n - length, 0) for at, n, length in zip(starts, sizes, lengths, strict=True)]
        offsets = [begin + at - n for begin, at, n in zip(begins, starts, wrapped, strict=True)]
        layout = torch.tensor([sizes, offsets, begins, wrapped], device=self._device)
        size, offset, begin, before = layout.index_select(1, table).unbind()
        position = (u[1:] * size).to(torch.int64)
        if any(wrapped):
            offset = torch.where(position >= before, offset, begin)
        slots = self._tables.slot_at.index_select(0, position.add_(offset)).to(torch.int64)
        share = [portion / max(count, 1) for portion, count in zip(eta, sizes, strict=True)]
        return slots, table, self._tables.share(slots, share), share

    def _tables_of_rows(self, eta: Tensor, batch_size: int, u: Tensor) -> Tensor:
        """The table of each row, in order, [B]; by the first of ``u``, or by numbers of its own."""
        if self._allocation == "multinomial":
            u = uniform(batch_size, device=self._device, generator=self._rng)
        ends = table_ends(eta, batch_size, self._allocation, u)
        return torch.searchsorted(ends, torch.arange(batch_size, device=self._device), right=True)

    def _rows(self, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        if not is_traced():
            self._batch_size = batch_size
            plain = self._plain_rows(batch_size) if self._plain else None
            if plain is not None:
                slots, table, probability, share = plain
                if self._correction is None:
                    weight = torch.ones_like(probability)
                else:
                    weight = 1 / probability
                    if self._classes is not None:
                        share = torch.tensor(share, dtype=torch.float64, device=self._device)
                        weight = self._classes.weight(slots, share, self._tables.counts[0])
                    weight = self._normalized(weight).to(torch.float32)
                self._count_batch()
                return slots, {"priority_weight": weight, "table": table, "sample_probability": probability}
            self._sort_if_due()
        eta, low, total = self._proportions(batch_size)
        if not is_traced() and total[0].item() == 0:
            raise RuntimeError("EventTableSampler: all priorities are 0, nothing can be drawn; use eps > 0.")
        u = uniform(batch_size + 1, device=self._device, generator=self._rng)
        table = self._tables_of_rows(eta, batch_size, u)
        if self._source is not None:
            position, mass = self._accepted(table, low, total, batch_size)
            total = total * self._accepted_share()
        else:
            position, mass = self._proposed(u[1:], gather_in_bounds(low, table), gather_in_bounds(total, table))
        slots = gather_in_bounds(self._tables.slot_at, position).to(torch.int64)
        probability = self._mixture(slots, eta, total)
        weight = self._weight(
            slots, probability, eta, mass, gather_in_bounds(total, table), gather_in_bounds(self._tables.counts, table)
        )
        if is_traced():
            weight = torch.where(mass > 0, weight, 0.0)
        self._count_batch()
        return slots, {
            "priority_weight": weight.to(torch.float32),
            "table": table,
            "sample_probability": probability.to(torch.float32),
        }

    def _proposed(self, u: Tensor, low: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Positions drawn, and their masses, in ranges that begin at ``low`` [n] and are ``total`` [n] long."""
        target = torch.minimum((u * total).to(torch.int64), total - 1)
        return self._tree.find((low + target).clamp_min(0))

    def _accepted(self, table: Tensor, low: Tensor, total: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """Positions drawn from Ψ inside the table of each row, [B] in order, and Ψ of each.

        Proposals are drawn by d^α and accepted with probability R^ω. The rows of a table get its accepted proposals in
        turn. If there are fewer, more are drawn; a graph on the CPU has eager code draw the rows anew. A graph on
        another device would have to read from it for that: there, accepted proposals are given out again from the
        first on, and proposals are taken as they are if none is accepted.
        """
        rows = torch.arange(batch_size, device=self._device)
        numbers = torch.arange(len(total), device=self._device)
        first_row = torch.searchsorted(table, numbers)
        rows_of_table = torch.searchsorted(table, numbers, right=True) - first_row
        tries = _TRIES
        for _ in range(_MAX_ROUNDS):
            of_proposal = table.repeat_interleave(tries, output_size=tries * batch_size)
            u, v = uniform(2, tries * batch_size, device=self._device, generator=self._rng)
            position, mass = self._proposed(u, gather_in_bounds(low, of_proposal), gather_in_bounds(total, of_proposal))
            factor = self._factor(gather_in_bounds(self._tables.slot_at, position).to(torch.int64))
            running = (v < factor).cumsum(0)
            # accepted ahead of each table's proposals, and among them
            ends = gather_in_bounds(running, (tries * (first_row + rows_of_table) - 1).clamp_min(0))
            ends = ends * (first_row + rows_of_table > 0)
            ahead = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
            found = ends - ahead
            missing = (rows_of_table - found).clamp_min(0).sum()
            if is_traced() or not missing.item():
                break
            tries *= 2
        else:
            return self._exactly(table, rows.shape[0])
        sums = torch.zeros_like(self._acceptance[0]).index_add_(0, of_proposal, factor.to(torch.float64))
        mean = sums / (tries * rows_of_table).clamp_min(1)
        latest = torch.stack([mean, torch.ones_like(mean)])
        self._acceptance.copy_(torch.where(rows_of_table > 0, 0.9 * self._acceptance + 0.1 * latest, self._acceptance))
        in_table = rows - gather_in_bounds(first_row, table)
        wanted = in_table % gather_in_bounds(found, table).clamp_min(1)
        place = torch.searchsorted(running, gather_in_bounds(ahead, table) + wanted + 1)
        # where none is accepted, proposals are taken as they are
        place = where_int64(gather_in_bounds(found, table) > 0, place, tries * rows)
        drawn = [gather_in_bounds(position, place), gather_in_bounds(mass * factor, place)]
        if is_traced() and self._device.type == "cpu":
            assert self._fallback is not None
            drawn = self._fallback.replace((missing > 0) & (total.sum() > 0), drawn, [table, low, total])
        else:
            self._repeated.add_(missing)
        return drawn[0], drawn[1]

    def _accepted_share(self) -> Tensor:
        """The mean of R^ω over each table's proposals; 1 before the first."""
        mean, weight = self._acceptance.unbind()
        return torch.where(weight > 0, mean / torch.where(weight > 0, weight, 1.0), 1.0)

    def _exactly(self, table: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
        """:meth:`_accepted` from all Ψ, where hardly a proposal is accepted."""
        density = self._tree.leaves[: self._nowhere].to(torch.float64)
        listed = density.nonzero().squeeze(1)
        density[listed] *= self._factor(self._tables.slot_at[listed].to(torch.int64))
        running = torch.cat([density.new_zeros(1), density.cumsum(0)])
        low, high = running[self._begins[:-1][table]], running[self._begins[1:][table]]
        u = uniform(batch_size, device=self._device, generator=self._rng)
        position = torch.searchsorted(running, low + u * (high - low), right=True).clamp_max(self._nowhere) - 1
        return position, density[position]

    def _factor(self, slots: Tensor) -> Tensor:
        """R^ω of ``slots`` [n]."""
        omega = self._hyperparameters["omega"].current()
        return self._episodes.reliability(slots, self._stamp) ** omega

    def _mixture(self, slots: Tensor, eta: Tensor, total: Tensor) -> Tensor:
        """p(i) of ``slots`` [n], float64 [n]."""
        positions, _ = self._everywhere(slots)
        mass = self._tree.get(positions).view(-1, slots.shape[0])
        if self._source is not None:
            mass = mass * self._factor(slots)
        share = eta / torch.where(total > 0, total, 1.0)
        return (mass * share[: mass.shape[0]].unsqueeze(1)).sum(0)

    def _weight(
        self, slots: Tensor, probability: Tensor, eta: Tensor, mass: Tensor, total: Tensor, count: Tensor
    ) -> Tensor:
        """Importance-sampling weights, at most 1, float64 [n]."""
        if self._correction is None:
            if self._kind is None:
                return torch.ones_like(probability)
            weight = total / (count * mass)
        elif self._correction == "mixture":
            weight = 1 / probability if self._classes is None else self._class_weight(slots, probability, eta)
        elif self._correction == "priority":
            share = 1 - self._eta[0, 0]
            weight = 1 / torch.where(self._inside(slots), 1 + share, 1 - share)
        else:
            assert self._pairs is not None
            of_pair = self._pairs.of(slots)
            if self._correction == "conditional":
                per_copy = eta / self._tables.counts.clamp_min(1)
                weight = (of_pair[:-1] * per_copy.unsqueeze(1)).sum(0) / of_pair[0] / probability
            else:
                share = 1 - eta[0]
                outside = 1 - of_pair[-1] / of_pair[0]
                weight = torch.where(self._inside(slots), 1 - share * outside, 1 / (1 - share))
        return self._normalized(weight)

    def _class_weight(self, slots: Tensor, probability: Tensor, eta: Tensor) -> Tensor:
        """Weights for what pinned tables keep, up to a factor, float64 [n]."""
        assert self._classes is not None
        share = eta / self._tables.counts.clamp_min(1)
        weight = self._classes.weight(slots, share, self._tables.counts[0])
        if self._kind is None:
            return weight
        # within a class, as if draws inside the tables were uniform
        return weight * (self._tables.holds(slots) * share.unsqueeze(1)).sum(0) / probability

    def _normalized(self, weight: Tensor) -> Tensor:
        """``weight`` [n] to the power of β, over the largest; 0 where all are 0."""
        weight = weight ** self._hyperparameters["beta"].current()
        largest = weight.amax()
        return weight / torch.where(largest > 0, largest, 1.0)

    def _unnormalized(self, slots: Tensor) -> Tensor:
        if not slots.numel():
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        self._sort_if_due()
        eta, _, total = self._proportions(self._batch_size)
        if self._source is not None:
            stored = self._stored_slots()
            positions = self._tables.positions(stored)
            total = (self._tree.get(positions.reshape(-1)).view(positions.shape) * self._factor(stored)).sum(1)
        return self._mixture(slots, eta, total)

    # of the last batch outside graphs: what min_size=None means where none is being drawn
    _batch_size = 1

    def _stored_slots(self) -> Tensor:
        everything = torch.arange(self._size, device=self._device)
        if not self._tables.num_slots:
            return everything[:0]
        return everything[(self._tables.positions(everything) != self._nowhere).any(0) & (self._stamp > 0)]

    def _extra_stats(self) -> dict[str, Tensor]:
        names = self._tables.names
        sizes = self._tables.counts if self._tables.num_slots else torch.zeros(len(names), dtype=torch.int64)
        stats = {f"size_{name}": size for name, size in zip(names, sizes, strict=True)}
        if self._source is not None:
            rate = (self._accepted_share() * self._eta[0]).sum()
            stats |= {"acceptance_rate": rate, "repeated_draws": self._repeated}
        return stats | {f"eta_{name}": eta for name, eta in zip(names, self._eta[0], strict=True)}


def _settings(priority: TablePriority | None) -> dict[str, Any]:
    """What the base class takes, and ``kind``."""
    if priority is None:
        return {"kind": None, "alpha": 0.0, "beta": 0.0, "eps": 1e-6, "td_error": "squared"}
    if not isinstance(priority, Mapping):
        raise TypeError(
            f"EventTableSampler(priority={priority!r}): priority must be a dict, dict(kind='proportional') for example."
        )
    kind = priority.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"EventTableSampler(priority={dict(priority)}): kind must be one of {', '.join(_KINDS)}.")
    known = [*_KINDS[kind], *(_REAPER if kind == "reaper" else ())]
    unknown = set(priority) - {"kind", *known}
    if unknown:
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): kind={kind!r} knows {', '.join(known)}, not "
            f"{', '.join(sorted(unknown))}."
        )
    stale_fraction = priority.get("stale_fraction", 0.0)
    if not (_is_number(stale_fraction) and 0 <= stale_fraction <= 1):
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): stale_fraction must be in [0, 1]; 0 sorts before every "
            "draw that follows a change."
        )
    return {"eps": 1e-6, **_KINDS[kind], **priority}


def _is_number(value: Any) -> bool:
    """Whether this is a single real number, and not a bool."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, Real) and not isinstance(value, bool)


def _min_sizes(min_size: int | Mapping[str, int] | None, tables: EventTables) -> Tensor:
    """For each table its d; -1 stands for the batch size."""
    given: dict[str, Any] = {}
    if isinstance(min_size, Mapping):
        given = dict(min_size)
    elif min_size is not None:
        given = {name: min_size for name in tables.names if name != DEFAULT}
    unknown = set(given) - set(tables.names)
    if unknown:
        raise ValueError(f"EventTableSampler: min_size names {sorted(unknown)}, the tables are {tables.names}.")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"EventTableSampler(min_size={value!r}): {name}'s must be an integer >= 1.")
    return torch.tensor([given.get(name, 1 if name == DEFAULT else -1) for name in tables.names])
