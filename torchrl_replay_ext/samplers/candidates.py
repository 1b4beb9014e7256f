"""Scores of candidate batches by their distance to the current policy (DPER, arXiv 2512.05320)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from torchrl_replay_ext.arguments import require_choice, require_finite, require_integer
from torchrl_replay_ext.functional.gaussian import Covariance, as_noise_scale, divergence, require_noise_scale
from torchrl_replay_ext.policies import inside_bounds

Score = Literal["kl", "mse", "logprob"]
Granularity = Literal["batch", "group", "transition"]

_OWNER = "DecoupledSampler"


@dataclass(eq=False)
class CandidateScorer:
    """Scores K candidates for a batch and chooses those nearest to the policy.

    The arguments are those of :class:`~torchrl_replay_ext.DecoupledSampler`.

    Args:
        num_candidates: K.
        noise_scale: standard deviation [] or [A] of the exploration noise, or its covariance [A, A].
        score: the score.
        covariance: form of the candidates' covariance, for ``score="kl"``.
        eps: added to the variances of the candidates.
        granularity: unit of choice: batches, groups or single transitions.
        group_size: rows per group.
    """

    num_candidates: int
    noise_scale: float | Tensor
    score: Score
    covariance: Covariance
    eps: float
    granularity: Granularity
    group_size: int

    def __post_init__(self):
        for name in ("num_candidates", "group_size"):
            require_integer(_OWNER, name, getattr(self, name))
        for name, allowed in (("score", Score), ("covariance", Covariance), ("granularity", Granularity)):
            require_choice(_OWNER, name, getattr(self, name), get_args(allowed))
        require_noise_scale(_OWNER, self.noise_scale)
        self.eps = require_finite(_OWNER, "eps", self.eps)
        self._scale = scale = torch.as_tensor(self.noise_scale, dtype=torch.float32)
        # a covariance matrix may be positive definite in float64 only
        require_noise_scale(_OWNER, scale)
        self._whitening = torch.linalg.inv(torch.linalg.cholesky(scale)) if scale.ndim == 2 else None
        # a single transition has no covariance
        self._uses_divergence = self.score == "kl" and self.granularity != "transition"

    def to(self, device: torch.device) -> None:
        """Move the tensors to ``device``."""
        self._scale = self._scale.to(device)
        self._whitening = None if self._whitening is None else self._whitening.to(device)

    def require_whole_groups(self, batch_size: int) -> None:
        """ValueError if ``group_size`` does not divide the batch size."""
        if self.granularity == "group" and batch_size % self.group_size:
            raise ValueError(
                f"{_OWNER}: the actor's batch_size is {batch_size}; group_size={self.group_size} must divide it."
            )

    def _require_enough_rows(self, rows: int, dims: int) -> None:
        if self._uses_divergence and self.covariance == "full" and rows <= dims:
            what = "group_size" if self.granularity == "group" else "the actor's batch_size"
            raise ValueError(
                f"{_OWNER}(covariance='full'): {what} is {rows}, and actions have {dims} dimensions; the covariance "
                f"of fewer than {dims + 1} rows is singular, and every score would be inf. Use at least {dims + 1} "
                "rows, or covariance='diag'."
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
            Row numbers of the chosen rows among the candidates, int64 [B]; the score of each row, or of the row's group
            or batch, [B]; and the scores of the K candidates for each row, [B, K].

        Raises:
            ValueError: if the actions are not continuous or do not have the shape [K·B, A], if ``noise_scale`` has
                another number of dimensions, or if there are too few rows for ``covariance="full"``.
        """
        count, batch_size = self.num_candidates, len(action) // self.num_candidates
        whitened, correction = self._whiten(action, expected, scale, is_squashed)
        size = {"batch": batch_size, "group": self.group_size, "transition": 1}[self.granularity]
        self._require_enough_rows(size, whitened.shape[-1])
        units = whitened.reshape(count, -1, size, whitened.shape[-1])
        if self._uses_divergence:
            noise_scale = self._scale.to(units.device) if scale is None else 1.0
            scores = divergence(units, noise_scale, self.covariance, self.eps)
        else:
            distance = units.square().sum(-1)
            if self.score == "logprob":
                distance = distance / 2 + correction.reshape(count, -1, size)
            scores = distance.mean(-1)
        scores = scores.nan_to_num(nan=math.inf, posinf=math.inf)
        if self.granularity == "transition":
            # not by score: in the order in which they were drawn, which is random
            rows = scores.reshape(-1).argsort(stable=True)[:batch_size].sort().values
            return rows, scores.reshape(-1)[rows], scores.reshape(count, batch_size).T
        best = scores.argmin(0)
        groups = torch.arange(best.shape[0], device=best.device)
        rows = (best * best.shape[0] + groups).unsqueeze(1) * size + torch.arange(size, device=best.device)
        return rows.reshape(-1), scores.amin(0).repeat_interleave(size), scores.T.repeat_interleave(size, 0)

    def _whiten(
        self, action: Tensor, expected: Tensor, scale: Tensor | None, is_squashed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return z, [n, A]; and the row-dependent terms of −log π other than ½ |z|², [n].

        For a deterministic policy, z is u − π(s) if the divergence divides by the scale.
        """
        continuous = action.is_floating_point() and expected.is_floating_point()
        if action.ndim != 2 or expected.shape[1:] != action.shape[1:] or not continuous:
            raise ValueError(
                f"{_OWNER}: stored actions are {action.dtype} of shape {tuple(action.shape)}, the policy's "
                f"{expected.dtype} of shape {tuple(expected.shape)}; both must be continuous, [B, A], and a slot "
                "must hold one step."
            )
        if scale is not None:
            correction = scale.expand_as(expected).log().sum(-1)
            if is_squashed:
                action = inside_bounds(action, _OWNER)
                correction = correction + (1 - action.square()).log().sum(-1)
                action = action.atanh()
            return (action - expected) / scale, correction
        difference = action - expected
        # the number of action dimensions is unknown before the first batch
        noise_scale, no_correction = as_noise_scale(self._scale, difference), difference[:, 0] * 0
        if self._uses_divergence:
            return difference, no_correction
        if self._whitening is not None:
            return difference @ self._whitening.to(noise_scale).mT, no_correction
        return difference / noise_scale, no_correction
