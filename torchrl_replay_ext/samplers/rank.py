"""Rank-based prioritized experience replay."""

from __future__ import annotations

from functools import partial
from typing import get_args

from torchrl.data.replay_buffers import PrioritizedSampler

from torchrl_replay_ext.annealing import Anneal
from torchrl_replay_ext.arguments import TDError, WeightNorm, as_number, require_bool, require_choice
from torchrl_replay_ext.distributions.rank import RankBased, Segments
from torchrl_replay_ext.samplers.adapter import PrioritySampler
from torchrl_replay_ext.samplers.hyperparameters import BETA, exponent, make_exponents


@PrioritizedSampler.register
class RankBasedSampler(PrioritySampler):
    r"""Draws transitions by the rank of their TD error (Schaul et al. 2016, rank-based variant).

    P(i) = rank(i)^−α / Σ_{r≤N} r^−α, where rank 1 is the largest \|δ\| of the N stored transitions, and
    w_i = (N · P(i))^−β divided by the largest weight. The size of a TD error does not count, only their order: an
    outlier changes nothing, and neither does the scale of the rewards.

    New transitions stand before all others, the newest first, until their first update. What the ring overwrites leaves
    the order at once.

    The order is sorted anew before a draw when writes and updates since the last time have reached ``stale_fraction``
    of the number of transitions. In between, an updated transition moves into a gap where it belongs in the last sort;
    if the gaps there are taken it stays, and counts tenfold. Above 50,000 transitions, \|δ\| behind the first eighth of
    the ranks that differ by less than 0.8 % may be sorted as equal, unless ``stale_fraction=0``; equal ones keep their
    order.

    In a graph (:class:`~torchrl_replay_ext.CompilableReplayBuffer`) nothing is sorted; writes outside of it do that as
    soon as it is due. Where those are part of the graph too, call :meth:`sort` now and then.

    Args:
        capacity: number of slots, at least that of the storage; None (default): that of the storage.
        alpha: exponent of the rank, >= 0, or :class:`~torchrl_replay_ext.Anneal`, which the draws then follow from sort
            to sort; 0 is uniform. Default: 0.7.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.5.
        stratified: draw one transition from each of B segments of equal probability instead of B independent ones.
            Default: True.
        segments: ``"exact"`` (default): draws follow P exactly, for any N and B. ``"piecewise"``: the paper's
            approximation, the cumulative distribution made linear over B segments of equal probability: within a
            segment all transitions are equally likely. Weights are those of the probabilities drawn with. Where rank 1
            has a probability above 1 / B, a segment that would be empty holds the rank it falls on.
        stale_fraction: share of the transitions in [0, 1] that may be written or updated before the next sort; 0 sorts
            before each draw that follows a change. Default: 0.05.
        td_error: ``"squared"`` (default) if the loss writes δ², ``"absolute"`` if it writes \|δ\|. Only the order
            counts, so both draw the same.
        weight_norm: ``"buffer"`` (default): weights are divided by the largest weight of any stored transition, that of
            the last rank, so that w = (rank / N)^(αβ); ``"batch"``: by the largest of the batch.

    Raises:
        TypeError: if a number or a flag has another type.
        ValueError: if an argument is out of range, or, at the first write, ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=RankBasedSampler(1000), batch_size=4)
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    alpha = exponent("alpha", "Exponent of the rank. Assigning it applies it to the next draw.")
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        alpha: float | Anneal = 0.7,
        beta: float | Anneal = 0.5,
        stratified: bool = True,
        segments: Segments = "exact",
        stale_fraction: float = 0.05,
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
    ):
        name = "RankBasedSampler"
        require_choice(name, "segments", segments, get_args(Segments))
        require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        require_bool(name, "stratified", stratified)
        if not 0 <= as_number(name, "stale_fraction", stale_fraction) <= 1:
            raise ValueError(f"{name}(stale_fraction={stale_fraction}): stale_fraction must be in [0, 1].")
        hyperparameters = make_exponents(name, alpha=alpha, beta=beta)
        super().__init__(
            capacity,
            partial(
                RankBased,
                alpha=hyperparameters["alpha"],
                stratified=stratified,
                segments=segments,
                stale_fraction=stale_fraction,
                weight_norm=weight_norm,
            ),
            hyperparameters=hyperparameters,
            td_error=td_error,
        )

    def sort(self) -> None:
        """Bring the order up to date; O(N log N). Needed only where all writes are part of a graph."""
        distribution = self.distribution
        assert isinstance(distribution, RankBased)
        with self.exclusive():
            distribution.sort()
