"""P decreases geometrically with age (the idea of arXiv 2605.10236)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import raise_if, uniform
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import SumTree
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView


class Recency(Distribution):
    """P(k) = (1 − q) q^k / (1 − q^N) for the ages k = 0, ..., N − 1 of the stored slots; q = 2^(−1 / half_life)."""

    needs_order, takes_priorities = True, False
    why_not_joint = "ages need the order of the writes to all shards; use RandomSampler or ProportionalSampler."

    def __init__(self, log: WriteLog, priorities: Priorities, *, half_life: float):
        self._log, self._lanes, self._half_life = log, log.layout.slots_per_step, half_life
        self._tree = SumTree(log.layout.size, device=log.layout.device)  # mass 1 for each stored slot
        self._end = torch.zeros(1, dtype=torch.int64, device=log.layout.device)  # the slot after the newest step

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        if not rows.is_rewrite:
            self._end.copy_((slots[-1:] // self._lanes + 1) * self._lanes)
        self._tree.write(slots, torch.ones_like(slots))

    def remove(self, slots: Tensor) -> None:
        self._tree.write(slots, torch.zeros_like(slots))

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        total = self._tree.total()
        message = "RecencySampler: no stored transition can be drawn; write to the buffer first."
        raise_if(lambda: total == 0, lambda: RuntimeError(message), skip_on=self._log.layout.skip_checks_on)
        u = uniform(batch_size, device=total.device, generator=generator)
        rate = math.log(2) / self._half_life
        # the inverse of P(age <= k) = (1 − q^(k + 1)) / (1 − q^N), and its limit for q = 1
        real = -torch.log1p(u * torch.expm1(-rate * total.double())) / rate if rate else u * total
        age = torch.minimum(real.to(torch.int64), total - 1)
        rank = self._tree.prefix(self._end) - 1 - age
        # if nothing can be drawn, the rank is -1, which finds slot 0
        slots, mass = self._tree.find(torch.minimum(rank + total * (rank < 0), total - 1))
        return Draw(
            slots, self._decay(age) * mass, self._decay(total - 1).clamp_min(2.0**-1022).reshape(1)
        )  # must not underflow

    def density(self, slots: Tensor) -> Tensor:
        age = (self._tree.prefix(self._end) - 1 - self._tree.prefix(slots)) % self._tree.total().clamp_min(1)
        return self._decay(age) * self._tree.get(slots)

    def _decay(self, age: Tensor) -> Tensor:
        return torch.exp2(-age.double() / self._half_life)

    def clear(self) -> None:
        self._tree.clear_()

    def tensors(self) -> dict[str, Tensor]:
        return {"ring_end": self._end}

    def rebuild(self) -> None:
        self._tree.leaves[: len(self._log.generation)] = (self._log.generation > 0).to(torch.int64)
        self._tree.rebuild_()

    def check_valid(self) -> None:
        self._tree.check_valid()
        if not torch.equal(self._tree.leaves.nonzero()[:, 0], self.stored_slots()):
            raise AssertionError("Recency: the slots in the tree differ from the stored slots")
