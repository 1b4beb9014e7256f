"""P(i) proportional to R_i^ω d_i^α (ReaPER, Pleiss et al., arXiv 2506.18482, Eq. 15)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.arguments import WeightNorm
from torchrl_replay_ext.compilation import uniform
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.proportional import PowerTree
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView, ShardRows, Sums
from torchrl_replay_ext.distributions.rejection import Rejection
from torchrl_replay_ext.distributions.reliability import Reliability
from torchrl_replay_ext.kernels.ops import reaper_smallest


class ReliabilityAdjusted(Distribution):
    """P(i) = Ψ_i / Σ Ψ, Ψ = R^ω d^α, by rejection: proposals follow d^α and are accepted with probability R^ω.

    Args:
        log, priorities: the state of the slots.
        alpha: the exponent of d.
        make_reliability: creates the model of R from the log.
        weight_norm: ``"buffer"`` or ``"batch"``: weights are divided by the largest weight of the buffer or batch.
    """

    needs_order = rejects = True

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        *,
        alpha: Hyperparameter,
        make_reliability: Callable[[WriteLog], Reliability],
        weight_norm: WeightNorm,
    ):
        self._log, self._weight_norm = log, weight_norm
        self._num_slots, self._device = log.layout.num_slots, log.layout.device
        self._power = PowerTree(log, priorities, alpha)
        self._tree, self.power_parts = self._power.tree, self._power.parts
        self._reliability = make_reliability(log)
        self._rejection = Rejection(self._tree, self._reliability)

    @property
    def max_supported_priority(self) -> float:
        return min(self._power.max_supported_priority, self._reliability.max_supported_priority)

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        self._reliability.insert(slots, priority, rows)

    def remove(self, slots: Tensor) -> None:
        self._reliability.remove(slots)

    def before_full_overwrite(self) -> None:
        self._reliability.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor) -> None:
        self._reliability.update(slots, priority)

    def reweight(self, slots: Tensor | None) -> None:
        self._power.reweight(slots)

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        slots, density = self._rejection.draw(batch_size, generator)
        return Draw(slots, density, self._smallest())

    def _smallest(self) -> Tensor | None:
        """The smallest Ψ > 0 in the buffer; None if weights are normalised over the batch."""
        if self._weight_norm == "batch":
            return None
        result = torch.empty(1, dtype=torch.float64, device=self._device)
        masses = self._tree.leaves[: self._num_slots]
        reaper_smallest(masses, self._reliability.exponent(), result, *self._reliability.arrays())
        return result

    def sums(self) -> Sums:
        smallest = self._smallest()
        return Sums(
            self._tree.total().double().reshape(1),
            None if smallest is None else smallest[0],
            largest_episode=self._reliability.largest_episode(),
        )

    def draw_in_shard(self, wanted: ShardRows, generator: torch.Generator | None) -> Draw:
        slots, probability = self._power.draw_in_shard(wanted)
        factor = self._reliability.factor(slots)
        accepted = uniform(len(slots), device=self._device, generator=generator) < factor
        return Draw(slots[accepted], (probability * factor)[accepted])

    def note_other_shards(self, largest_episode: int) -> None:
        self._reliability.note_other_shards(largest_episode)

    def density(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots) * self._reliability.factor(slots)

    def clear(self) -> None:
        self._tree.clear_()
        self._reliability.clear()

    def tensors(self) -> dict[str, Tensor]:
        return {"proposals": self._tree.leaves} | self._reliability.tensors()

    def raise_numbers(self, last: int) -> None:
        self._reliability.raise_numbers(last)

    def rebuild(self) -> None:
        self._tree.rebuild_()
        self._reliability.rebuild()

    def check_valid(self) -> None:
        self._power.check_valid()
        self._reliability.check_valid()

    def stats(self) -> dict[str, Tensor]:
        slots = self._log.stored_slots()
        total = self._tree.total()
        return {
            "acceptance_rate": self.density(slots).sum() / total if total else torch.ones(()),
            "reliability_mean": self._reliability.mean(),
            "interrupted": self._reliability.interrupted(),
        }
