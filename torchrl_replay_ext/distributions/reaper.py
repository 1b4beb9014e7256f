"""P(i) proportional to R_i^ω d_i^α (ReaPER, Pleiss et al., arXiv 2506.18482, Eq. 15)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from torchrl_replay_ext.annealing import Hyperparameter
from torchrl_replay_ext.arguments import WeightNorm
from torchrl_replay_ext.compilation import EagerFallback, gather_in_bounds, is_traced, uniform, where_int64
from torchrl_replay_ext.core.priorities import Priorities
from torchrl_replay_ext.core.sum_tree import UpdateMask
from torchrl_replay_ext.core.write_log import WriteLog
from torchrl_replay_ext.distributions.proportional import PowerTree
from torchrl_replay_ext.distributions.protocol import Distribution, Draw, RowView
from torchrl_replay_ext.distributions.reliability import Reliability

# A pass over all N slots costs about as much as N / 32 proposals.
_PASS = 32
# Proposals beyond the multiple of the batch that is expected to be enough.
_SPARE = 16
# Above this omega the number of proposals no longer grows.
_MAX_OMEGA = 4.0


class ReliabilityAdjusted(Distribution):
    """P(i) = Ψ_i / Σ Ψ, Ψ = R^ω d^α: slots are proposed in proportion to d^α and accepted with probability R^ω.

    Args:
        log, priorities: the state of the slots.
        alpha: the exponent of d.
        make_reliability: makes the model of R for the log.
        weight_norm: whether weights are divided by the largest of the buffer or of the batch.
        may_be_zero: whether all TD errors of an episode may be 0.
    """

    needs_order = requires_sequential_writer = True

    def __init__(
        self,
        log: WriteLog,
        priorities: Priorities,
        *,
        alpha: Hyperparameter,
        make_reliability: Callable[[WriteLog], Reliability],
        weight_norm: WeightNorm,
        may_be_zero: bool,
    ):
        self._log, self._weight_norm = log, weight_norm
        self._num_slots, self._device = log.layout.num_slots, log.layout.device
        self._power = PowerTree(log, priorities, alpha)
        self._tree = self._power.tree
        self._reliability = make_reliability(log)
        self._omega = self._reliability.omega
        # a cheaper form of R that is enough for draws
        self._exact = may_be_zero or log.layout.for_graphs
        # running mean of the share of proposals that are accepted
        self._rate = torch.ones(1, dtype=torch.float64, device=self._device)
        self._repeated = torch.zeros((), dtype=torch.int64, device=self._device)
        self._fallback: EagerFallback | None = None
        self._make_fallback()

    def _make_fallback(self) -> None:
        if self._log.layout.for_graphs:
            state = [*self._tree.graph_tensors(), *self._reliability.graph_tensors()]
            self._fallback = EagerFallback(lambda drawn, _: list(self._draw_eagerly(len(drawn[0]), None)), state)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_fallback": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        self._make_fallback()

    @property
    def max_priority(self) -> float:
        return min(self._power.max_priority, self._reliability.max_priority)

    def insert(self, slots: Tensor, priority: Tensor, rows: RowView) -> None:
        self._reliability.insert(slots, priority, rows)
        self._power.insert(slots, priority)

    def remove(self, slots: Tensor) -> None:
        self._reliability.remove(slots)
        self._power.remove(slots)

    def before_full_overwrite(self) -> None:
        self._reliability.before_full_overwrite()

    def update(self, slots: Tensor, priority: Tensor, mask: UpdateMask | None) -> None:
        self._tree.write(slots, self._power.mass(priority), mask=mask)
        self._reliability.update(slots, priority, mask)

    def reweight(self, slots: Tensor | None) -> None:
        self._power.reweight(slots)

    def draw(self, batch_size: int, generator: torch.Generator | None) -> Draw:
        draw = self._draw_in_graph if is_traced() else self._draw_eagerly
        slots, density = draw(batch_size, generator)
        return Draw(slots, density, self._smallest())

    def _num_proposals(self, need: int) -> int:
        """Proposals for ``need`` draws: where R is evenly spread over (0, 1), one of 1 + omega is accepted."""
        return math.ceil(1.25 * (1 + min(self._omega.bound, _MAX_OMEGA)) * need) + _SPARE

    def _propose(self, num: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw ``num`` proposals in proportion to d^α.

        Returns:
            Their slots, d^α, acceptance probability R^ω, and whether they are accepted, [num] each.
        """
        u, v = uniform(2, num, device=self._device, generator=generator)
        slots, mass = self._tree.draw(u)
        factor = self._reliability.factor(slots, exact=self._exact)
        return slots, mass, factor, v < factor

    def _draw_eagerly(self, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Slots drawn from Ψ, and Ψ of each.

        Each round makes twice as many proposals per missing row. Where they would cost more than one pass over all
        Ψ, that pass draws the missing rows.
        """
        chosen: list[tuple[Tensor, Tensor]] = []
        need, made, scale = batch_size, 0, 1
        while need:
            if made > self._num_slots // _PASS:
                everything = self._log.stored_slots()
                density = self.density(everything)
                running = density.cumsum(0)
                u = uniform(need, device=self._device, generator=generator) * running[-1]
                drawn = torch.searchsorted(running, u, right=True).clamp_max(len(everything) - 1)
                chosen.append((everything[drawn], density[drawn].to(chosen[0][1].dtype)))
                break
            num = scale * self._num_proposals(need)
            made, scale = made + num, 2 * scale
            slots, mass, factor, accept = self._propose(num, generator)
            accepted = accept.nonzero().squeeze(1)
            self._rate.mul_(0.9).add_(0.1 * accepted.shape[0] / num)
            accepted = accepted[:need]
            chosen.append((slots.index_select(0, accepted), (factor * mass).index_select(0, accepted)))
            need -= accepted.shape[0]
        if len(chosen) == 1:
            return chosen[0]
        return torch.cat([s for s, _ in chosen]), torch.cat([d for _, d in chosen])

    def _draw_in_graph(self, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """:meth:`_draw_eagerly` with one round of proposals.

        If too few proposals are accepted, a graph on the CPU has eager code draw the batch anew; each row follows Ψ
        either way, since accepted proposals are independent draws from Ψ however many there are. On other devices that
        would read from the device: there, accepted proposals are repeated, and if none is accepted, proposals are drawn
        in proportion to R^ω.
        """
        slots, mass, factor, accept = self._propose(self._num_proposals(batch_size), generator)
        running = accept.cumsum(0)
        num = running[-1]
        self._rate.mul_(0.9).add_(0.1 / accept.shape[0] * num)
        wanted = torch.arange(batch_size, device=self._device)
        if self._device.type == "cpu":
            place = torch.searchsorted(running, wanted + 1)
            drawn = [gather_in_bounds(slots, place), gather_in_bounds(factor * mass, place)]
            short = (num < batch_size) & (self._tree.total() > 0)
            assert self._fallback is not None
            slots, density = self._fallback.replace(short, drawn, [])
            return slots, density
        self._repeated.add_((batch_size - num).clamp_min(0))
        place = torch.searchsorted(running, wanted % num.clamp_min(1) + 1)
        share = factor.cumsum(0)
        target = uniform(batch_size, device=self._device) * share[-1]
        unconditional = torch.searchsorted(share, target, right=True).clamp_max(len(share) - 1)
        place = where_int64(num > 0, place, unconditional)
        return gather_in_bounds(slots, place), gather_in_bounds(factor * mass, place)

    def _smallest(self) -> Tensor | None:
        """The smallest Ψ > 0 in the buffer, if weights are normalised by it."""
        if self._weight_norm == "batch":
            return None
        slots = torch.arange(self._num_slots, device=self._device) if is_traced() else self._log.stored_slots()
        everything = self.density(slots)
        return torch.where(everything > 0, everything, math.inf).min()

    def density(self, slots: Tensor) -> Tensor:
        return self._tree.get(slots) * self._reliability.factor(slots)

    def stored_slots(self) -> Tensor:
        return self._log.stored_slots()

    def clear(self) -> None:
        self._tree.clear_()
        self._reliability.clear()
        self._rate.fill_(1.0)
        self._repeated.zero_()

    def tensors(self) -> dict[str, Tensor]:
        own = {"proposals": self._tree.rows, "acceptance_rate": self._rate, "repeated": self._repeated}
        return own | self._reliability.tensors()

    def rebuild(self) -> None:
        self._tree.rebuild_()
        self._reliability.rebuild()

    def check_valid(self) -> None:
        self._power.check_valid()
        self._reliability.check_valid()

    def stats(self) -> dict[str, Tensor]:
        slots = self._log.stored_slots()
        return {
            "acceptance_rate": self._rate,
            "reliability_mean": self._reliability.of(slots).mean() if slots.numel() else torch.ones(()),
            "repeated_draws": self._repeated,
            "broken_off": self._reliability.broken_off(),
        }
