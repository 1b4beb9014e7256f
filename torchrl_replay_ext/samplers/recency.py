"""Replay that favours recent transitions."""

from __future__ import annotations

from functools import partial

from torchrl_replay_ext.arguments import as_number
from torchrl_replay_ext.distributions.recency import Recency
from torchrl_replay_ext.samplers.adapter import PrioritySampler
from torchrl_replay_ext.samplers.hyperparameters import BETA, exponent, make_exponents


class RecencySampler(PrioritySampler):
    r"""Draws newer transitions more often: P falls geometrically with age, truncated at the oldest.

    P(age k) = (1 − q) q^k / (1 − q^N) with q = 2^(−1 / half_life); the newest of the N stored transitions has k = 0.
    Truncated geometric replay is the idea of Korniak et al. 2026 (arXiv 2605.10236). The half-life is our own way to
    state q, and the importance-sampling weights are our addition: w = (N · P)^−β divided by the largest weight.

    Age follows the ring. Transitions of one step of a storage with ``ndim`` >= 2 are ordered by slot. TD errors are
    not used: ``update_priority`` does nothing. The writer must be a round-robin one, the default.

    Args:
        capacity: number of slots, at least that of the storage; None (default): that of the storage.
        half_life: the age, in transitions, at which the probability has halved, > 0; ``math.inf`` is uniform. Default:
            100,000. For a mean age near h in a much larger buffer, pass 0.7 h.
        beta: exponent of the importance-sampling weights in [0, 1], a number; it cannot be annealed, since schedules
            count priority updates. Default: 0, all weights are 1. With beta > 0 the newest of N transitions has
            weight 2^(−beta (N − 1) / half_life), which vanishes if ``half_life`` is much shorter than the buffer.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range; at a write, if slots are not written in turn.
        RuntimeError: at a draw, if nothing is stored.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> sampler = RecencySampler(half_life=2)
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=4)
        >>> index = rb.extend(TensorDict({"observation": torch.arange(5)}, [5]))
        >>> sampler.probabilities(rb.storage)
        tensor([0.0889, 0.1258, 0.1779, 0.2516, 0.3558], dtype=torch.float64)
    """

    beta = exponent("beta", BETA)

    def __init__(self, capacity: int | None = None, *, half_life: float = 100_000, beta: float = 0.0):
        self.half_life = as_number("RecencySampler", "half_life", half_life)
        if not self.half_life > 0:
            raise ValueError(f"RecencySampler(half_life={half_life}): half_life must be > 0; use math.inf for uniform.")
        exponents = make_exponents("RecencySampler", beta=as_number("RecencySampler", "beta", beta))
        super().__init__(capacity, partial(Recency, half_life=self.half_life), hyperparameters=exponents)
