"""Stratified sampling from event tables."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from inspect import signature
from typing import Any, get_args

import torch
from tensordict import NestedKey
from torch import Tensor
from torchrl.data.replay_buffers import Storage

from torchrl_replay_ext.annealing import Anneal, make_exponents
from torchrl_replay_ext.arguments import is_key, is_number, require_choice, require_integer
from torchrl_replay_ext.core.event_spec import DEFAULT
from torchrl_replay_ext.core.event_tables import STORAGE_ATTRIBUTE, EventTables
from torchrl_replay_ext.functional.allocation import METHODS, Allocation
from torchrl_replay_ext.samplers.adapter import DistributionSampler
from torchrl_replay_ext.samplers.event_table_mixture import Correction, EventTableMixture
from torchrl_replay_ext.samplers.hyperparameters import ALPHA, BETA, exponent
from torchrl_replay_ext.samplers.proportional import ProportionalSampler
from torchrl_replay_ext.samplers.table_shares import TableShares

_CORRECTIONS = (None, *get_args(Correction))
# the entries of priority=, with the defaults of ProportionalSampler
_PRIORITY = ("alpha", "beta", "eps", "td_error", "max_priority_within_buffer")


class EventTableSampler(DistributionSampler):
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

    With ``priority=dict(kind="proportional")``, q_k(i) ∝ (\|δ\| + eps)^α, as in
    :class:`~torchrl_replay_ext.ProportionalSampler`. Further entries of the dict, with their defaults: ``alpha`` 0.6,
    ``beta`` 0.4, ``eps`` 1e-6, ``td_error`` ``"squared"``, ``max_priority_within_buffer`` False. A transition has the
    same priority in all tables. New transitions have the largest priority seen so far.

    Args:
        tables: the tables, which an :class:`~torchrl_replay_ext.EventTableWriter` of the same buffer fills.
        eta: η of each table by name, including ``"default"``, each in [0, 1], with sum 1. The schedule of an
            :class:`~torchrl_replay_ext.Anneal` counts drawn batches.
        min_size: d_k, the number of transitions from which on a table is used, >= 1: one number for all event tables,
            or a dict with numbers for single tables. Default: None, the batch size. (:meth:`probabilities` and
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
        require_choice("EventTableSampler", "allocation", allocation, METHODS)
        require_choice("EventTableSampler", "correction", correction, _CORRECTIONS)
        if correction is None and not (is_number(beta) and beta == 1):
            raise ValueError(
                f"EventTableSampler(beta={beta!r}): beta is the exponent of correction=; for the weights of priorities "
                "pass priority=dict(kind=..., beta=...)."
            )
        if not (isinstance(pair_keys, (tuple, list)) and pair_keys and all(map(is_key, pair_keys))):
            raise TypeError(
                f"EventTableSampler(pair_keys={pair_keys!r}): pair_keys must be a tuple of the names of entries, "
                "('observation', 'action') for example."
            )
        settings = _settings(priority)
        _require_compatible(correction, tables, priority)
        exponents = {name: settings.pop(name) for name in ("alpha", "beta") if name in settings}
        if correction is not None:
            exponents["beta"] = beta
        hyperparameters = make_exponents("EventTableSampler", **exponents)
        self._shares = TableShares(tables.names, eta, may_anneal=correction != "priority")
        # the tables that the sampler draws from
        self.tables, self._correction = tables, correction
        make = partial(
            EventTableMixture,
            tables=tables,
            shares=self._shares,
            min_sizes=_min_sizes(min_size, tables),
            allocation=allocation,
            correction=correction,
            pair_keys=tuple(pair_keys),
            alpha=hyperparameters.get("alpha"),
            beta=hyperparameters.get("beta"),
        )
        super().__init__(None, make, hyperparameters=hyperparameters, **settings)

    def _find_parts(self, storage: Storage) -> bool:
        """Use the tables of the buffer's writer; returns True if the distribution must be created again."""
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
            make: Any = self.make
            self.make = partial(make, tables=tables)
            return True
        return not self.layout.known

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
                self.distribution.reweight(None)

    @property
    def event_share(self) -> float:
        """Σ_{k>0} η_k. An assignment scales the η of the event tables; TorchRL's ParameterScheduler can do this."""
        return float(1 - self._shares.current[0])

    @event_share.setter
    def event_share(self, value: float) -> None:
        self.eta = self._shares.with_event_share(value)


def _require_compatible(correction: Correction | None, tables: EventTables, priority: Mapping[str, Any] | None) -> None:
    """ValueError if the tables, their priorities and the correction cannot be combined."""
    if correction is None:
        return
    if tables.is_pinned:
        raise ValueError(
            f"EventTableSampler(correction={correction!r}): a correction needs tables of retention='ring', because "
            "pinned tables store transitions with events for longer than others. Use retention='ring' or "
            "correction=None."
        )
    if correction != "mixture" and priority is not None:
        raise ValueError(
            f"EventTableSampler(correction={correction!r}): this correction does not support priorities inside "
            "tables; use correction='mixture' or priority=None."
        )
    if priority is not None and "beta" in priority:
        raise ValueError(
            f"EventTableSampler(correction={correction!r}): its exponent is beta=; remove 'beta' from priority."
        )


def _settings(priority: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of ``priority`` with their defaults, checked."""
    settings = {"eps": 1e-6, "td_error": "squared"}
    if priority is None:
        return settings
    if not isinstance(priority, Mapping):
        raise TypeError(
            f"EventTableSampler(priority={priority!r}): priority must be a dict, dict(kind='proportional') for example."
        )
    given = dict(priority)
    if given.pop("kind", None) != "proportional":
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): kind must be 'proportional'; priorities by rank and of "
            "ReaPER work without event tables only."
        )
    if unknown := set(given) - set(_PRIORITY):
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): kind='proportional' has the entries "
            f"{', '.join(_PRIORITY)}, not {', '.join(sorted(map(str, unknown)))}."
        )
    defaults = signature(ProportionalSampler).parameters
    return settings | {name: defaults[name].default for name in _PRIORITY} | given


def _min_sizes(min_size: int | Mapping[str, int] | None, tables: EventTables) -> Tensor:
    """The value of d for each table; -1 stands for the batch size."""
    given: Any = {} if min_size is None else min_size
    if not isinstance(given, Mapping):
        given = dict.fromkeys(tables.names[1:], min_size)
    if unknown := set(given) - set(tables.names):
        raise ValueError(f"EventTableSampler: min_size names {sorted(unknown)}, but the tables are {tables.names}.")
    for name, value in given.items():
        require_integer("EventTableSampler", f"min_size[{name!r}]", value)
    return torch.tensor([given.get(name, 1 if name == DEFAULT else -1) for name in tables.names], device="cpu")
