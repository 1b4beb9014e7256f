"""Checks of the values of a configuration."""

import argparse
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import yaml
from omegaconf import MISSING

from recipes.common.errors import ConfigError, did_you_mean


def flow(value: Any) -> str:
    """A value as it is written on the command line."""
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def positive(text: str) -> int:
    """Parse the value of an option: an integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least 1")
    return int(text)


def within(rule: str, default: Any = MISSING) -> Any:
    """A field of a Checked dataclass whose value must keep a rule; None is always allowed.

    Args:
        rule: "> 0", ">= 0" or an interval such as "[0, 1)".
        default: the default value. Default: MISSING, a file in recipes/conf must set it.
    """
    return field(default=default, metadata={"rule": rule})


def one_of(*choices: str, default: Any = MISSING) -> Any:
    """A field of a Checked dataclass that must have one of these values; None is always allowed."""
    return field(default=default, metadata={"choices": choices})


def fits(value: float, rule: str) -> bool:
    """Whether a number keeps a rule of :func:`within`."""
    if rule[0] == ">":
        sign, least = rule.split()
        return value > float(least) or (sign == ">=" and value == float(least))
    low, high = map(float, rule[1:-1].split(", "))
    return low < value < high or (value == low and rule[0] == "[") or (value == high and rule[-1] == "]")


@dataclass
class Checked:
    """A dataclass whose values are checked; `prefix` precedes its fields in messages, such as "dqn."."""

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, rule, choices = getattr(self, item.name), item.metadata.get("rule"), item.metadata.get("choices")
            if value is None:
                continue
            if rule is not None:
                self.require(item.name, fits(value, rule), f"must be {rule if rule[0] == '>' else f'in {rule}'}")
            if choices is not None:
                hint = did_you_mean(str(value), choices)
                self.require(item.name, value in choices, f"choose {', '.join(choices)}{hint}")

    def require(self, key: str, valid: bool, rule: str) -> None:
        """Raise ConfigError, which names the key, its value and the rule, if the value is not valid."""
        if not valid:
            raise ConfigError(f"{self.prefix}{key}={flow(getattr(self, key))}: {rule}")
