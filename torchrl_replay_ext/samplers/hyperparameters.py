"""``exponent`` makes alpha, beta and omega attributes of a sampler that users read and assign."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.samplers.base import ReplaySampler

ALPHA = """Priority exponent. An assignment applies the new value to all stored transitions, in O(capacity).

While alpha is annealed (:class:`~torchrl_replay_ext.Anneal`), the priority of a transition uses the alpha of its last
write or update. When the schedule ends, its final value is applied to all stored transitions. A
:class:`~torchrl_replay_ext.CompilableReplayBuffer` cannot branch on the end of the schedule; there, each update applies
the current alpha to the next 64 slots instead."""
BETA = "Exponent of the importance-sampling weights."


def exponent(name: str, doc: str, *, only_with: str = "") -> Any:
    """A property for a hyperparameter of a sampler: reads a float, accepts a number or a schedule.

    Args:
        name: the name of the hyperparameter.
        doc: the docstring of the attribute.
        only_with: the argument without which the sampler does not have the hyperparameter. Default: none.
    """

    def require(sampler: ReplaySampler) -> None:
        if name not in sampler.hyperparameters:
            raise AttributeError(f"{type(sampler).__name__}.{name}: this sampler has no {name}; it needs {only_with}.")

    def get(sampler: ReplaySampler) -> float:
        require(sampler)
        return float(sampler.hyperparameters[name].value)

    def set_(sampler: ReplaySampler, value: float | Tensor | Anneal) -> None:
        require(sampler)
        sampler.set_hyperparameter(name, value)

    return property(get, set_, doc=doc)
