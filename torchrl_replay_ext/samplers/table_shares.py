"""The arguments of EventTableSampler: η of each table, constant or on a schedule, and checks of the others."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import ROUNDING, is_key, is_number, require_choice, require_integer, within_limits
from torchrl_replay_ext.compilation import outside_inference_mode
from torchrl_replay_ext.core.event_spec import DEFAULT
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.samplers.proportional import ProportionalSampler

_OWNER = "EventTableSampler"


class TableShares:
    """η of each table, constant or on a linear schedule that counts batches.

    Args:
        names: names of the tables.
        eta: η of each table by name, including ``"default"``, each in [0, 1], with sum 1.
        may_anneal: True to allow schedules.
    """

    @outside_inference_mode()
    def __init__(self, names: list[str], eta: Mapping[str, float | Anneal], *, may_anneal: bool):
        self._names, self._may_anneal = names, may_anneal
        # rows: current value; start; end of the schedule; number of batches so far (first) and in the schedule (last)
        self._state = torch.zeros(4, len(names), dtype=torch.float64, device="cpu")
        # η of each table, float64 [tables]; a copy, because torch takes no input of a graph as static if two of them
        # have the same memory
        self.current = self._state[0].clone()
        self.set(eta)

    def as_dict(self) -> dict[str, float]:
        """η of each table, by name."""
        return dict(zip(self._names, self.current.tolist(), strict=True))

    def set(self, eta: Mapping[str, float | Anneal]) -> None:
        """Assign η of all tables."""
        names = self._names
        if not isinstance(eta, Mapping):
            raise TypeError(f"{_OWNER}(eta={eta!r}): eta must be a dict with a number for each of {names}.")
        if set(eta) != set(names):
            raise ValueError(f"{_OWNER}: eta names {sorted(eta)}, but the tables are {sorted(names)}.")
        for name, value in eta.items():
            if not isinstance(value, Anneal) and not is_number(value):
                raise TypeError(f"{_OWNER}(eta={{{name!r}: {value!r}}}): every eta must be a number or Anneal.")
        schedules = [v if isinstance(v, Anneal) else Anneal(v, v, 1) for v in (eta[name] for name in names)]
        start: list[Any] = [within_limits(schedule.start, 1.0) for schedule in schedules]
        end: list[Any] = [within_limits(schedule.end, 1.0) for schedule in schedules]
        if None in start + end:
            raise ValueError(f"{_OWNER}(eta={dict(eta)}): every eta must be in [0, 1].")
        for values, when in ((start, ""), (end, " at the end of their schedules")):
            if abs(sum(values) - 1) > ROUNDING:
                raise ValueError(f"{_OWNER}(eta={dict(eta)}): the values must sum to 1, not {sum(values):.7g}{when}.")
        durations = {s.num_updates for s in schedules if s.start != s.end}
        if durations and not self._may_anneal:
            raise ValueError(f"{_OWNER}(correction='priority'): eta cannot be annealed; assign it instead.")
        if len(durations) > 1:
            raise ValueError(
                f"{_OWNER}(eta={dict(eta)}): all schedules must have the same num_updates, so that the sum stays 1."
            )
        steps = [*[0.0] * (len(names) - 1), max(durations, default=1)]
        self._state.copy_(torch.tensor([start, start, end, steps], dtype=torch.float64, device="cpu"))
        self._publish()

    def with_event_share(self, value: float) -> dict[str, float]:
        """η of each table, with the event tables scaled to a sum of ``value``."""
        events = self.current[1:]
        share, wanted = float(events.sum()), within_limits(float(value), 1.0) if is_number(value) else None
        if wanted is None or (share == 0 and wanted > 0):
            raise ValueError(
                f"{_OWNER}.event_share={value}: event_share must be in [0, 1]; if the η of all event tables are 0, "
                "assign eta instead."
            )
        scaled = (events * (wanted / share if share else 0.0)).tolist()
        return dict(zip(self._names, [max(0.0, 1 - sum(scaled)), *scaled], strict=True))

    def step(self) -> None:
        """Count a batch and advance the schedules."""
        if self.annealed:
            current, start, end, steps = self._state.unbind()
            steps[:1].add_(1)
            done = (steps[:1] / steps[-1:]).clamp_max(1.0)
            current.copy_(start.lerp(end, done))
            self.current.copy_(current)

    def state(self) -> Tensor:
        """The state to save, float64 [4, tables] on the CPU."""
        return self._state.to("cpu", copy=True)

    def load(self, state: Tensor) -> None:
        """Restore a state that :meth:`state` returned."""
        self._state.copy_(state)
        self._publish()

    def _publish(self) -> None:
        """Compute what follows from the state."""
        self.annealed = not torch.equal(self._state[1], self._state[2])
        self.current.copy_(self._state[0])

    def to(self, device: torch.device) -> None:
        """Move to ``device``."""
        self._state, self.current = self._state.to(device), self.current.to(device)


Correction = Literal["mixture", "conditional", "lemma2", "priority"]

# the entries of priority=, with the defaults of ProportionalSampler
_PRIORITY = ("alpha", "beta", "eps", "td_error", "max_priority_within_buffer")


def require_correction(correction: Correction | None, beta: Any, pair_keys: Any) -> None:
    """Error if the correction, its exponent or the keys of pairs are invalid."""
    require_choice("EventTableSampler", "correction", correction, (None, *get_args(Correction)))
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


def require_compatible(correction: Correction | None, tables: EventTables, priority: Mapping[str, Any] | None) -> None:
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


def priority_settings(priority: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries of ``priority`` with their defaults, checked."""
    settings = {"eps": 1e-6, "td_error": "squared"}
    if priority is None:
        return settings
    if not isinstance(priority, Mapping):
        raise TypeError(
            f"EventTableSampler(priority={priority!r}): priority must be a dict, dict(kind='proportional') for example."
        )
    entries = dict(priority)
    if entries.pop("kind", None) != "proportional":
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): kind must be 'proportional'; priorities by rank and of "
            "ReaPER work without event tables only."
        )
    if unknown := set(entries) - set(_PRIORITY):
        raise ValueError(
            f"EventTableSampler(priority={dict(priority)}): kind='proportional' has the entries "
            f"{', '.join(_PRIORITY)}, not {', '.join(sorted(map(str, unknown)))}."
        )
    defaults = signature(ProportionalSampler).parameters
    return settings | {name: defaults[name].default for name in _PRIORITY} | entries


def min_sizes(min_size: int | Mapping[str, int] | None, tables: EventTables) -> Tensor:
    """The value of d for each table; -1 stands for the batch size."""
    least: Any = {} if min_size is None else min_size
    if not isinstance(least, Mapping):
        least = dict.fromkeys(tables.names[1:], min_size)
    if unknown := set(least) - set(tables.names[1:]):
        raise ValueError(
            f"EventTableSampler: min_size names {sorted(unknown)}, but the event tables are {tables.names[1:]}."
        )
    for name, value in least.items():
        require_integer("EventTableSampler", f"min_size[{name!r}]", value)
    return torch.tensor([least.get(name, 1 if name == DEFAULT else -1) for name in tables.names], device="cpu")
