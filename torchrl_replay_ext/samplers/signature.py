"""The signature of sampler classes."""

from __future__ import annotations

import inspect
from typing import Any


class ShowsArguments:
    """Base class that makes ``inspect.signature`` show the arguments of a sampler; TorchRL's metaclass hides them."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        arguments = list(inspect.signature(cls.__init__).parameters.values())
        cls.__signature__ = inspect.Signature(arguments[1:])
