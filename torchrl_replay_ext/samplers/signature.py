"""Signatures of samplers."""

from __future__ import annotations

import inspect
from typing import Any


class ShowsArguments:
    """Base class that lets ``inspect.signature`` of a sampler show its arguments, which TorchRL's metaclass hides."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        arguments = list(inspect.signature(cls.__init__).parameters.values())
        cls.__signature__ = inspect.Signature(arguments[1:])
