"""Parameters of tests that take long."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, of which only those that are kept belong to the default run; a tuple is of several parameters."""

    def slow(value: Any) -> Any:
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)

    return [value if value in kept else slow(value) for value in values]
