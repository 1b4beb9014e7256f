"""Base class of samplers that contain another sampler."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data.replay_buffers import PrioritizedSampler, Storage
from torchrl.data.replay_buffers.samplers import Sampler

from torchrl_replay_ext._torchrl import empty_sampler, sampler_generator, set_sampler_generator
from torchrl_replay_ext.samplers.signature import ShowsArguments

_MISSING: Any = object()


def delegated(part: str, name: str, default: Any = _MISSING, *, read_only: bool = False) -> Any:
    """A property that reads and sets ``name`` of the attribute ``part``. ``default`` is its value if missing."""

    def get(self: Sampler) -> Any:
        owner = getattr(self, part)
        return getattr(owner, name) if default is _MISSING else getattr(owner, name, default)

    def set_(self: Sampler, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(get, None if read_only else set_, doc=f"``{name}`` of ``{part}``.")


class SamplerWrapper(ShowsArguments, Sampler):
    """Abstract sampler that forwards calls to :attr:`_inner`, and notifies all :meth:`_samplers` of writes."""

    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = delegated("_inner", "reduction", "max")
    # True if samples carry the generation of each row
    takes_stamps = delegated("_inner", "takes_stamps", False)
    # True if writes have the same effect in a graph as outside
    writes_in_graphs = delegated("_inner", "writes_in_graphs", True)

    @property
    @abstractmethod
    def _inner(self) -> Any:
        """The sampler that has the priorities and the statistics, and whose state is saved."""

    def _samplers(self) -> list[Sampler]:
        """The samplers that are notified of writes. Default: :attr:`_inner`."""
        return [self._inner]

    def synchronize(self, storage: Storage) -> None:
        """Synchronize the state of all samplers with the storage; called before a compiled draw."""
        for sampler in self._samplers():
            if synchronize := getattr(sampler, "synchronize", None):
                synchronize(storage)

    @property
    def takes_priorities(self) -> bool:
        """True if draws depend on TD errors."""
        return getattr(self._inner, "takes_priorities", isinstance(self._inner, PrioritizedSampler))

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]: delegated
        return sampler_generator(self._inner)

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        for sampler in self._samplers():
            set_sampler_generator(sampler, value)

    @property
    def default_priority(self) -> float:
        """The number that TorchRL's buffers pass for rows without TD errors."""
        return self._inner.default_priority

    def add(self, index: int) -> None:
        """Called after a write of one row."""
        for sampler in self._samplers():
            sampler.add(index)

    def extend(self, index: Tensor) -> None:
        """Called after a write of several rows."""
        for sampler in self._samplers():
            sampler.extend(index)

    def mark_update(self, index: int | Tensor, *, storage: Storage | None = None) -> None:
        """Called by the writer after it has written slots."""
        for sampler in self._samplers():
            sampler.mark_update(index, storage=storage)

    def discard(self, index: Tensor) -> None:
        """Remove rows: they were overwritten by a write that failed."""
        for sampler in self._samplers():
            if discard := getattr(sampler, "discard", None):
                discard(index)

    def _empty(self) -> None:
        for sampler in self._samplers():
            empty_sampler(sampler)

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability that each stored slot is drawn, float64 [len(storage)], slots in row-major order. O(N)."""
        return self._inner.probabilities(storage)

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the state contradict each other. O(N)."""
        for sampler in self._samplers():
            getattr(sampler, "check_valid", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """A copy of everything that sampling depends on."""
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self._inner.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Save the state under the directory ``path``."""
        self._inner.dumps(path)

    def loads(self, path: str | Path) -> None:
        """Load a state saved by :meth:`dumps`."""
        self._inner.loads(path)
