"""Base classes of samplers: one that shows the arguments, and one for samplers that contain another sampler."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from typing import Any

import torch
from torchrl.data.replay_buffers import PrioritizedSampler
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_replay_ext._torchrl import empty_sampler, sampler_generator, set_sampler_generator

_MISSING: Any = object()


def delegated(part: str, name: str, default: Any = _MISSING, *, read_only: bool = False) -> Any:
    """A property that reads and sets ``name`` of the attribute ``part``. ``default`` is its value if missing."""

    def get(self: Sampler) -> Any:
        owner = getattr(self, part)
        return getattr(owner, name) if default is _MISSING else getattr(owner, name, default)

    def set_(self: Sampler, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(get, None if read_only else set_, doc=f"``{name}`` of ``{part}``.")


def _by_all(name: str, doc: str) -> Any:
    """A method that calls ``name`` of all samplers that have it."""

    def call(self: SamplerWrapper, *arguments: Any, **keywords: Any) -> None:
        for sampler in self._samplers():
            if method := getattr(sampler, name, None):
                method(*arguments, **keywords)

    call.__doc__ = doc
    return call


class ShowsArguments:
    """Base class that makes ``inspect.signature`` show the arguments of a sampler; TorchRL's metaclass hides them."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        arguments = list(inspect.signature(cls.__init__).parameters.values())
        cls.__signature__ = inspect.Signature(arguments[1:])


def _generator() -> Any:
    """The random generator, of all samplers."""

    def set_(self: SamplerWrapper, value: torch.Generator | None) -> None:
        for sampler in self._samplers():
            set_sampler_generator(sampler, value)

    return property(lambda self: sampler_generator(self._inner), set_)


class SamplerWrapper(ShowsArguments, Sampler):
    """Abstract sampler that forwards calls to :attr:`_inner`, and notifies all :meth:`_samplers` of writes."""

    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = delegated("_inner", "reduction", "max")
    # True if writes have the same effect in a graph as outside
    writes_in_graphs = delegated("_inner", "writes_in_graphs", True)
    # the number that TorchRL's buffers pass for rows without TD errors
    default_priority = delegated("_inner", "default_priority", read_only=True)
    probabilities = delegated("_inner", "probabilities", read_only=True)

    state_dict = delegated("_inner", "state_dict", read_only=True)
    load_state_dict = delegated("_inner", "load_state_dict", read_only=True)
    require_loadable = delegated("_inner", "require_loadable", read_only=True)
    dumps = delegated("_inner", "dumps", read_only=True)
    loads = delegated("_inner", "loads", read_only=True)
    saved_at = delegated("_inner", "saved_at", read_only=True)

    _rng = _generator()

    add = _by_all("add", "Called after a write of one row.")
    extend = _by_all("extend", "Called after a write of several rows.")
    mark_update = _by_all("mark_update", "Called by the writer after it has written slots.")
    discard = _by_all("discard", "Remove rows: they were overwritten by a write that failed.")

    @property
    @abstractmethod
    def _inner(self) -> Any:
        """The sampler that has the priorities and the statistics, and whose state is saved."""

    def _samplers(self) -> list[Sampler]:
        """The samplers that are notified of writes. Default: :attr:`_inner`."""
        return [self._inner]

    @property
    def takes_priorities(self) -> bool:
        """True if draws depend on TD errors."""
        return getattr(self._inner, "takes_priorities", isinstance(self._inner, PrioritizedSampler))

    def _empty(self) -> None:
        for sampler in self._samplers():
            empty_sampler(sampler)
