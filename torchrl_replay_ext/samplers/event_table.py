"""Stratified sampling from event tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage
from typing_extensions import Required, TypedDict

from torchrl_replay_ext.annealing import Anneal, Hyperparameter
from torchrl_replay_ext.arguments import TDError, is_number, require_choice, require_integer
from torchrl_replay_ext.core.class_counts import MAX_EVENT_TABLES
from torchrl_replay_ext.core.event_spec import DEFAULT, is_key
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.distributions.episode_reader import EpisodeReader
from torchrl_replay_ext.distributions.event_tables import EventTableMixture, Kind
from torchrl_replay_ext.distributions.reliability import Reliability, Truncated
from torchrl_replay_ext.distributions.table_shares import TableShares
from torchrl_replay_ext.distributions.table_weights import Correction, TableWeights
from torchrl_replay_ext.functional.allocation import METHODS, Allocation
from torchrl_replay_ext.samplers.adapter import PrioritySampler
from torchrl_replay_ext.samplers.hyperparameters import ALPHA, BETA, exponent, make_exponents

_CORRECTIONS = (None, *get_args(Correction))
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
# What kind="reaper" takes beyond that, and its defaults.
_REAPER: dict[str, Any] = {
    "num_streams": 1,
    "truncated": "finished",
    "done_key": ("next", "done"),
    "terminated_key": ("next", "terminated"),
    "traj_key": ("collector", "traj_ids"),
    "init_key": "is_init",
}


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

    alpha = exponent("alpha", ALPHA)
    beta = exponent("beta", BETA)
    omega = exponent("omega", "Exponent of the reliability.", only_with="priority=dict(kind='reaper')")

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
        if not all(is_number(value) and 0 <= value <= 1 for value in values):
            raise ValueError(f"EventTableSampler(beta={beta!r}): beta must be in [0, 1].")
        if not (isinstance(pair_keys, (tuple, list)) and pair_keys and all(map(is_key, pair_keys))):
            raise TypeError(
                f"EventTableSampler(pair_keys={pair_keys!r}): pair_keys must be a tuple of the names of entries, "
                "('observation', 'action') for example."
            )
        settings = _settings(priority)
        kind: Kind | None = settings.pop("kind")
        if correction in ("conditional", "lemma2", "priority"):
            if kind is not None:
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
        by_class = correction == "mixture" and tables.retention == "pinned"
        if by_class and len(tables) - 1 > MAX_EVENT_TABLES:
            raise ValueError(
                f"EventTableSampler(correction='mixture'): there are {len(tables) - 1} event tables; with tables of "
                f"retention='pinned' it counts every set of them, for at most {MAX_EVENT_TABLES}. Use "
                "retention='ring', or let several events share a table."
            )
        own_beta = settings.pop("beta")
        exponents = {"alpha": settings.pop("alpha"), "beta": own_beta if correction is None else beta}
        if kind == "reaper":
            if tables.retention == "pinned":
                raise ValueError("EventTableSampler(priority='reaper'): needs tables of retention='ring'.")
            exponents["omega"] = settings.pop("omega")
        hyperparameters = make_exponents("EventTableSampler", **exponents)
        self._shares = TableShares(tables.names, eta, may_anneal=correction != "priority")
        self._tables, self._correction = tables, correction
        self._arguments: dict[str, Any] = dict(
            shares=self._shares,
            min_sizes=_min_sizes(min_size, tables),
            allocation=allocation,
            correction=correction,
            make_weights=partial(
                TableWeights,
                shares=self._shares,
                correction=correction,
                beta=hyperparameters["beta"],
                prioritized=kind is not None,
                pair_keys=tuple(pair_keys),
            ),
            kind=kind,
            alpha=hyperparameters["alpha"],
            beta=hyperparameters["beta"],
            stale_fraction=settings.pop("stale_fraction", 0.0),
            make_reliability=_reliability(settings, hyperparameters) if kind == "reaper" else None,
        )
        make = partial(EventTableMixture, tables=tables, **self._arguments)
        super().__init__(None, make, hyperparameters=hyperparameters, on_bind=self._find_tables, **settings)

    def _find_tables(self, storage: Storage) -> bool:
        """Take the tables that the buffer's writer fills; True if the distribution must be made anew for them."""
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
            self.make = partial(EventTableMixture, tables=tables, **self._arguments)
            return True
        return not self.layout.known

    @property
    def tables(self) -> EventTables:
        """The tables it draws from."""
        return self._tables

    @property
    def eta(self) -> dict[str, float]:
        """η of each table. Assigning a dict (of numbers or Anneal) replaces all."""
        return self._shares.as_dict()

    @eta.setter
    def eta(self, value: Mapping[str, float | Anneal]) -> None:
        with self.exclusive():
            before = self._shares.current.clone()
            self._shares.set(value)
            if self._correction == "priority" and not torch.equal(before, self._shares.current):
                self.state.reweight()

    @property
    def event_share(self) -> float:
        """Σ_{k>0} η_k. Assigning it scales the η of the event tables; TorchRL's ParameterScheduler can."""
        return float(1 - self._shares.current[0])

    @event_share.setter
    def event_share(self, value: float) -> None:
        self.eta = self._shares.with_event_share(value)

    def sort(self) -> None:
        """Rank-based: bring the ranks up to date; needed only where nothing is written or drawn outside of graphs."""
        distribution = self.distribution
        assert isinstance(distribution, EventTableMixture)
        with self.exclusive():
            distribution.sort()


def _reliability(settings: dict[str, Any], hyperparameters: dict[str, Hyperparameter]) -> partial[Reliability]:
    """The model of R for ``kind="reaper"``; takes its arguments out of ``settings``."""
    given = {key: settings.pop(key, default) for key, default in _REAPER.items()}
    require_integer("EventTableSampler", "num_streams", given["num_streams"])
    require_choice("EventTableSampler", "truncated", given["truncated"], get_args(Truncated))
    keys = {key: given.pop(key) for key in ("done_key", "traj_key", "init_key")}
    return partial(Reliability, omega=hyperparameters["omega"], reader=EpisodeReader(**keys), **given)


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
    if not (is_number(stale_fraction) and 0 <= stale_fraction <= 1):
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): stale_fraction must be in [0, 1]; 0 sorts before every "
            "draw that follows a change."
        )
    return {"eps": 1e-6, **_KINDS[kind], **priority}


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
