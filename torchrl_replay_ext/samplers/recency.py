"""Replay that favours recent transitions."""

from __future__ import annotations

from functools import partial

from torchrl_replay_ext.annealing import make_exponents
from torchrl_replay_ext.arguments import as_number
from torchrl_replay_ext.distributions.recency import Recency
from torchrl_replay_ext.samplers.adapter import DistributionSampler
from torchrl_replay_ext.samplers.hyperparameters import BETA, exponent


class RecencySampler(DistributionSampler):
    r"""Draws newer transitions more often: P decreases geometrically with age.

    P(age k) = (1 − q) q^k / (1 − q^N) with q = 2^(−1 / half_life); the newest of the N stored transitions has k = 0.
    Truncated geometric replay was proposed by Korniak et al. 2026 (arXiv 2605.10236). We specify q by a half-life, and
    add importance-sampling weights: w = (N · P)^−β divided by the largest weight.

    The age of a transition is its distance from the newest one in the order of writing. In a storage with ``ndim`` >=
    2, transitions of the same step are ordered by slot. TD errors are not used: ``update_priority`` does nothing. The
    writer must be a round-robin writer, the default.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        half_life: the age, in transitions, at which the probability has halved, > 0; ``math.inf`` is uniform. For a
            mean age near h in a much larger buffer, pass 0.7 h. Default: 100000.
        beta: exponent of the importance-sampling weights, a number in [0, 1]; with 0, all weights are 1. With beta > 0
            the newest of N transitions has weight 2^(−beta (N − 1) / half_life), which is close to 0 if ``half_life``
            is much shorter than the buffer. It cannot be annealed, since schedules count priority updates. Default: 0.
        validate: raise errors for invalid input on accelerators too, see
            :class:`~torchrl_replay_ext.ProportionalSampler`. Default: False.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range; at a write, if slots are not written one after the other.
        RuntimeError: at a draw, if the buffer is empty.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = RecencySampler(half_life=2)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.arange(5)}, [5]))
        >>> sampler.probabilities(rb.storage)
        tensor([0.0889, 0.1258, 0.1779, 0.2516, 0.3558], dtype=torch.float64)
    """

    expects_td_errors = False
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        half_life: float = 100_000,
        beta: float = 0.0,
        validate: bool = False,
    ):
        self._half_life = as_number("RecencySampler", "half_life", half_life)
        if not self._half_life > 0:
            raise ValueError(f"RecencySampler(half_life={half_life}): half_life must be > 0; use math.inf for uniform.")
        exponents = make_exponents("RecencySampler", beta=as_number("RecencySampler", "beta", beta))
        make = partial(Recency, half_life=self._half_life)
        super().__init__(capacity, make, hyperparameters=exponents, validate=validate)

    @property
    def half_life(self) -> float:
        """The age, in transitions, at which the probability has halved."""
        return self._half_life

    def _repr_values(self) -> list[str]:
        return [f"half_life={self._half_life:g}", *super()._repr_values()]
