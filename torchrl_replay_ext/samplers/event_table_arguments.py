"""Checks of the arguments of EventTableSampler."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import is_key, is_number, require_choice, require_integer
from torchrl_replay_ext.core.event_spec import DEFAULT
from torchrl_replay_ext.core.event_tables import EventTables
from torchrl_replay_ext.samplers.proportional import ProportionalSampler

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


def min_sizes(min_size: int | Mapping[str, int] | None, tables: EventTables) -> Tensor:
    """The value of d for each table; -1 stands for the batch size."""
    given: Any = {} if min_size is None else min_size
    if not isinstance(given, Mapping):
        given = dict.fromkeys(tables.names[1:], min_size)
    if unknown := set(given) - set(tables.names):
        raise ValueError(f"EventTableSampler: min_size names {sorted(unknown)}, but the tables are {tables.names}.")
    for name, value in given.items():
        require_integer("EventTableSampler", f"min_size[{name!r}]", value)
    return torch.tensor([given.get(name, 1 if name == DEFAULT else -1) for name in tables.names], device="cpu")
