"""Scores of candidate batches by their distance to the current policy (DPER, arXiv 2512.05320)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_choice, require_finite, require_integer
from torchrl_replay_ext.functional.gaussian import divergence, require_noise_scale
from torchrl_replay_ext.policies import inside_bounds

Granularity = Literal["batch", "group"]

_OWNER = "DecoupledSampler"


@dataclass(eq=False)
class CandidateScorer:
    """Scores K candidates for a batch and chooses those nearest to the policy.

    The arguments are those of :class:`~torchrl_replay_ext.DecoupledSampler`.

    Args:
        num_candidates: K.
        noise_scale: standard deviation [] or [A] of the exploration noise.
        eps: added to the variances of the candidates.
        granularity: unit of choice: batches or groups.
        group_size: rows per group.
    """

    num_candidates: int
    noise_scale: float | Tensor
    eps: float
    granularity: Granularity
    group_size: int

    def __post_init__(self):
        for name in ("num_candidates", "group_size"):
            require_integer(_OWNER, name, getattr(self, name))
        require_choice(_OWNER, "granularity", self.granularity, get_args(Granularity))
        require_noise_scale(_OWNER, self.noise_scale)
        self.eps = require_finite(_OWNER, "eps", self.eps)
        device = getattr(self.noise_scale, "device", "cpu")
        self._scale = torch.as_tensor(self.noise_scale, dtype=torch.float32, device=device)

    def to(self, device: torch.device) -> None:
        """Move the tensors to ``device``."""
        self._scale = self._scale.to(device)

    def require_whole_groups(self, batch_size: int) -> None:
        """ValueError if ``group_size`` does not divide the batch size."""
        if self.granularity == "group" and batch_size % self.group_size:
            raise ValueError(
                f"{_OWNER}: the actor's batch_size is {batch_size}; group_size={self.group_size} must divide it."
            )

    def choose(
        self, action: Tensor, expected: Tensor, scale: Tensor | None, is_squashed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Score K candidates of B rows each and choose.

        Args:
            action: stored actions of the candidates, [K·B, A]; the rows of each candidate are consecutive.
            expected: actions of a deterministic policy for these rows, or means of a stochastic policy, [K·B, A].
            scale: standard deviations of a stochastic policy, [K·B, A]; None for a deterministic policy.
            is_squashed: True if the actions are the tanh of a Gaussian.

        Returns:
            Row numbers of the chosen rows among the candidates, int64 [B]; the score of each row's group or batch, [B];
            and the scores of the K candidates for each row, [B, K].

        Raises:
            ValueError: if the actions are not continuous or do not have the shape [K·B, A], or if ``noise_scale`` has
                another number of dimensions.
        """
        continuous = action.is_floating_point() and expected.is_floating_point()
        if action.ndim != 2 or expected.shape[1:] != action.shape[1:] or not continuous:
            raise ValueError(
                f"{_OWNER}: stored actions are {action.dtype} of shape {tuple(action.shape)}, the policy's "
                f"{expected.dtype} of shape {tuple(expected.shape)}; both must be continuous, [B, A], and a slot "
                "must hold one step."
            )
        if scale is None:
            difference, noise_scale = action - expected, self._scale.to(action.device)
        else:
            action = inside_bounds(action, _OWNER).atanh() if is_squashed else action
            difference, noise_scale = (action - expected) / scale, 1.0
        batch_size = len(action) // self.num_candidates
        size = batch_size if self.granularity == "batch" else self.group_size
        units = difference.reshape(self.num_candidates, -1, size, difference.shape[-1])
        scores = divergence(units, noise_scale, self.eps).nan_to_num(nan=math.inf, posinf=math.inf)
        best = scores.argmin(0)
        groups = torch.arange(best.shape[0], device=best.device)
        rows = (best * best.shape[0] + groups).unsqueeze(1) * size + torch.arange(size, device=best.device)
        return rows.reshape(-1), scores.amin(0).repeat_interleave(size), scores.T.repeat_interleave(size, 0)
