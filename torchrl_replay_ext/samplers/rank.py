"""Rank-based prioritized experience replay."""

from __future__ import annotations

from functools import partial
from typing import get_args

from torchrl_replay_ext.annealing import Anneal, make_exponents
from torchrl_replay_ext.arguments import TDError, WeightNorm, require_bool, require_choice
from torchrl_replay_ext.distributions.rank import RankBased, Segments
from torchrl_replay_ext.samplers.adapter import DistributionSampler
from torchrl_replay_ext.samplers.hyperparameters import BETA, exponent


class RankBasedSampler(DistributionSampler):
    r"""Draws transitions by the rank of their TD error (Schaul et al. 2016, rank-based variant).

    P(i) = rank(i)^−α / Σ_{r≤N} r^−α, where rank 1 is the largest \|δ\| of the N stored transitions, and
    w_i = (N · P(i))^−β divided by the largest weight. Only the order of the TD errors matters, so P is insensitive to
    outliers and to the scale of the rewards.

    Until their first update, new transitions have the first ranks; a transition that is written gets rank 1.
    Overwritten transitions are removed from the order immediately.

    Ranks are exact after each write and update, in eager code and in graphs, up to ties: values of \|δ\| that agree in
    the first 8 binary digits (they differ by less than 0.8 %) count as equal. Transitions with equal values have
    consecutive ranks, an updated one the last of them, and draws, probabilities and weights use these ranks. On CUDA,
    each draw sorts the transitions.

    Args:
        capacity: number of slots, at least that of the storage. Default: None, the size of the storage.
        alpha: exponent of the rank, >= 0, or :class:`~torchrl_replay_ext.Anneal`; 0 is uniform. An annealed value is
            applied in steps of 0.01. Default: 0.7.
        beta: exponent of the importance-sampling weights in [0, 1], or :class:`~torchrl_replay_ext.Anneal`. Default:
            0.5.
        stratified: draw one transition from each of B segments of equal probability instead of B independent ones.
            Default: True.
        segments: ``"exact"`` (default): draws follow P exactly, for any N and B. ``"piecewise"``: the approximation of
            the paper with a piecewise linear cumulative distribution: the ranks are divided into B segments of equal
            probability, and within a segment all transitions are equally likely. Weights use the approximate
            probabilities. If rank 1 has a probability above 1 / B, some segments would be empty; such a segment
            contains the rank at its boundary.
        td_error: ``"squared"`` (default) if the loss writes δ², ``"absolute"`` if it writes \|δ\|. Both have the same
            order, so the draws are the same.
        weight_norm: ``"buffer"`` (default) divides weights by the largest weight of all stored transitions, which is
            that of the last rank: w = (rank / N)^(αβ). ``"batch"`` divides by the largest weight of the batch.
        validate: raise errors for invalid input on accelerators too, see
            :class:`~torchrl_replay_ext.ProportionalSampler`. Default: False.

    Raises:
        TypeError: if a number or a flag has the wrong type.
        ValueError: if an argument is out of range; at the first write, if ``capacity`` is smaller than the storage.

    Examples:
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=RankBasedSampler(1000), batch_size=4)
        >>> index = rb.extend(TensorDict({"obs": torch.randn(10, 3)}, [10]))
        >>> batch = rb.sample()
        >>> batch["td_error"] = torch.rand(4) ** 2  # a loss module writes it
        >>> rb.update_tensordict_priority(batch)
    """

    alpha = exponent("alpha", "Exponent of the rank. An assignment takes effect at the next draw.")
    beta = exponent("beta", BETA)

    def __init__(
        self,
        capacity: int | None = None,
        *,
        alpha: float | Anneal = 0.7,
        beta: float | Anneal = 0.5,
        stratified: bool = True,
        segments: Segments = "exact",
        td_error: TDError = "squared",
        weight_norm: WeightNorm = "buffer",
        validate: bool = False,
    ):
        name = "RankBasedSampler"
        require_choice(name, "segments", segments, get_args(Segments))
        require_choice(name, "weight_norm", weight_norm, get_args(WeightNorm))
        require_bool(name, "stratified", stratified)
        hyperparameters = make_exponents(name, alpha=alpha, beta=beta)
        super().__init__(
            capacity,
            partial(
                RankBased,
                alpha=hyperparameters["alpha"],
                stratified=stratified,
                segments=segments,
                weight_norm=weight_norm,
            ),
            hyperparameters=hyperparameters,
            td_error=td_error,
            validate=validate,
        )
