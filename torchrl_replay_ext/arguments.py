"""Literal types of arguments, and checks of arguments."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from tensordict import NestedKey
from torch import Tensor

# How a loss writes the TD error δ: δ² or |δ|.
TDError = Literal["squared", "absolute"]
WeightNorm = Literal["buffer", "batch"]
# A hyperparameter that exceeds a limit by at most this much is set to the limit: schedulers in float32 round.
ROUNDING = 1e-6


def is_key(value: Any) -> bool:
    """True if ``value`` can be the name of an entry: a string, or a tuple of strings."""
    parts = (value,) if isinstance(value, str) else value
    return isinstance(parts, tuple) and bool(parts) and all(isinstance(part, str) and part for part in parts)


def require_nested_keys(owner: str, **keys: Any) -> None:
    """TypeError if an argument cannot be the name of an entry."""
    for name, key in keys.items():
        if not is_key(key):
            raise TypeError(
                f"{owner}({name}={key!r}): {name} must be the name of an entry, a string or a tuple of strings."
            )


def key_path(key: NestedKey) -> tuple[str, ...]:
    """The name of an entry as a tuple, the names of the nested TensorDicts first."""
    return (key,) if isinstance(key, str) else tuple(map(str, key))


def require_choice(owner: str, name: str, value: Any, choices: Sequence[Any]) -> Any:
    """Return ``value``. ValueError if it is not one of ``choices``."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ValueError(f"{owner}({name}={value!r}): {name} must be {', '.join(others)} or {last}.")
    return value


def require_bool(owner: str, name: str, value: Any) -> bool:
    """Return ``value``. TypeError if it is not a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}({name}={value!r}): {name} must be True or False.")
    return value


def require_integer(owner: str, name: str, value: Any, *, least: int = 1) -> int:
    """Return ``value`` as an int.

    Raises:
        TypeError: unless it is an integer of Python or NumPy.
        ValueError: if it is smaller than ``least``.
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_integer or value < least:
        error = ValueError if is_integer else TypeError
        raise error(f"{owner}({name}={value!r}): {name} must be an integer >= {least}.")
    return int(value)


def is_number(value: Any) -> bool:
    """True for a real number, or a tensor with one element, but not for a bool."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_number(owner: str, name: str, value: Any) -> float:
    """Return ``value`` as a float. TypeError unless it is a real number or a tensor with one element."""
    if not is_number(value):
        raise TypeError(f"{owner}({name}={value!r}): {name} must be a number, not {type(value).__name__}.")
    return float(value)


def within_limits(number: float, high: float = math.inf) -> float | None:
    """``number``, or the limit of [0, ``high``] that it exceeds by rounding, see :data:`ROUNDING`; otherwise None."""
    nearest = min(max(number, 0.0), high)
    return nearest if math.isfinite(number) and abs(number - nearest) <= ROUNDING else None


def shown(number: float | np.floating) -> str:
    """``number`` with as few digits as identify it in its precision."""
    return str(number).removesuffix(".0")


def require_number(owner: str, name: str, value: Any, valid: Callable[[float], bool], rule: str) -> float:
    """Return ``value`` as a float. TypeError if it is not a number, ValueError with the ``rule`` if it is not valid."""
    number = as_number(owner, name, value)
    if not valid(number):
        raise ValueError(f"{owner}({name}={value}): {name} must be {rule}.")
    return number


def require_finite(owner: str, name: str, value: Any) -> float:
    """Return ``value`` as a float. TypeError if it is not a number, ValueError if it is negative or not finite."""
    return require_number(owner, name, value, lambda x: math.isfinite(x) and x >= 0, ">= 0 and finite")
