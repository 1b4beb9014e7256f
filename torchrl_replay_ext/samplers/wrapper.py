"""Base class of samplers that forward calls to the sampler of the critic."""

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


def delegated(part: str, name: str, default: Any = _MISSING) -> Any:
    """A property that reads and sets ``name`` of the attribute ``part``. ``default`` is its value if missing."""

    def get(self: Sampler) -> Any:
        owner = getattr(self, part)
        return getattr(owner, name) if default is _MISSING else getattr(owner, name, default)

    def set_(self: Sampler, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(get, set_, doc=f"``{name}`` of ``{part}``.")


class SamplerWrapper(ShowsArguments, Sampler):
    """Abstract sampler that forwards calls to ``critic_sampler``, and writes to all :meth:`_samplers`."""

    critic_sampler: Sampler

    alpha = delegated("critic_sampler", "alpha")
    beta = delegated("critic_sampler", "beta")
    omega = delegated("critic_sampler", "omega")
    eta = delegated("critic_sampler", "eta")
    event_share = delegated("critic_sampler", "event_share")
    # read by TensorDictReplayBuffer for TD errors with more than one entry per transition
    reduction = delegated("critic_sampler", "reduction", "max")
    # True if samples carry the generation of each row
    takes_stamps = delegated("critic_sampler", "takes_stamps", False)
    # True if writes have the same effect in a graph as outside
    writes_in_graphs = delegated("critic_sampler", "writes_in_graphs", True)

    def ready(self, storage: Storage) -> None:
        """Synchronize the state of all samplers with the storage; called before a compiled draw."""
        for sampler in self._samplers():
            if ready := getattr(sampler, "ready", None):
                ready(storage)

    @abstractmethod
    def _samplers(self) -> list[Sampler]:
        """The samplers that are notified of writes."""

    @property
    def takes_priorities(self) -> bool:
        """True if the critic's draws depend on TD errors."""
        return getattr(self.critic_sampler, "takes_priorities", isinstance(self.critic_sampler, PrioritizedSampler))

    @property
    def _rng(self) -> torch.Generator | None:  # pyright: ignore[reportIncompatibleVariableOverride]: delegated
        return sampler_generator(self.critic_sampler)

    @_rng.setter
    def _rng(self, value: torch.Generator | None) -> None:
        for sampler in self._samplers():
            set_sampler_generator(sampler, value)

    @property
    def default_priority(self) -> float:
        """The argument of ``update_priority`` that results in the priority of a new transition."""
        return self.critic_sampler.default_priority

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict]:
        """Draw the critic's batch."""
        return self.critic_sampler.sample(storage, batch_size)

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

    def _empty(self) -> None:
        for sampler in self._samplers():
            empty_sampler(sampler)

    def probabilities(self, storage: Storage) -> Tensor:
        """Probability of each stored slot in one draw of the critic's sampler."""
        critic_sampler: Any = self.critic_sampler
        return critic_sampler.probabilities(storage)

    def check_valid(self) -> None:
        """Raise AssertionError if parts of the critic's sampler contradict each other. O(N)."""
        getattr(self.critic_sampler, "check_valid", lambda: None)()

    def state_dict(self) -> dict[str, Any]:
        """The state of the critic's sampler."""
        return self.critic_sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a :meth:`state_dict`."""
        self.critic_sampler.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Save the critic's sampler."""
        self.critic_sampler.dumps(path)

    def loads(self, path: str | Path) -> None:
        """Load a state saved by :meth:`dumps`."""
        self.critic_sampler.loads(path)
