"""Checks of the values of a configuration."""

from collections.abc import Callable, Collection
from typing import Any, ClassVar

import yaml

from recipes.common.errors import ConfigError


class Checked:
    """A dataclass whose values are checked; `prefix` precedes its fields in messages, such as "dqn."."""

    prefix: ClassVar[str] = ""

    def check(self, keys: str, valid: Callable[[Any], bool], rule: str) -> None:
        """Raise ConfigError if the value of a key is invalid; `keys` are separated by spaces."""
        for key in keys.split():
            value = getattr(self, key)
            if not valid(value):
                shown = yaml.safe_dump(value, default_flow_style=True).removesuffix("\n").removesuffix("\n...")
                raise ConfigError(f"{self.prefix}{key}={shown}: {rule}")

    def choose(self, key: str, choices: Collection[str | None]) -> None:
        """Raise ConfigError if the value of a key is not one of the choices."""
        names = ", ".join("null" if choice is None else choice for choice in choices)
        self.check(key, lambda value: value in choices, f"choose {names}")
