"""Slow references for prioritized replay in plain Python, written from the papers without code of the package.

``NaivePER`` follows Schaul et al. (2016), ``NaiveReaPER`` Pleiss et al. (arXiv 2506.18482), Eqs. 4-18 and Algorithm 2.
Pass every write to them in order; they recompute all values at each query.
"""

from __future__ import annotations

import math
import struct
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Transition:
    """The transition in one slot."""

    # number of earlier writes: gives the order within an episode and identifies the content of a slot
    written: int
    episode: Hashable
    terminated: bool
    truncated: bool
    # d = |delta| + eps
    magnitude: float
    # True until an update of its episode or the end of the episode
    waiting: bool = True
    updated: bool = False


@dataclass
class Draws:
    """The last draw of each slot, and the number of draws at its last write."""

    number: int = 0
    drawn: dict[int, int] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    def draw(self, slots: Sequence[int]) -> None:
        self.number += 1
        self.drawn |= dict.fromkeys(slots, self.number)

    def write(self, slot: int) -> None:
        self.written[slot] = self.number

    def load(self) -> None:
        """All contents are replaced by others, which are not those of a later write."""
        self.written |= dict.fromkeys(self.drawn, self.number)
        self.number += 1

    def late(self, slots: Sequence[int]) -> list[bool]:
        """Which rows of an update are dropped: drawn and overwritten within 64 draws, and not drawn since."""
        if all(self.written.get(slot) == self.number for slot in slots):
            return [False] * len(slots)
        return [self.number - 64 < self.drawn.get(slot, -64) <= self.written.get(slot, -1) for slot in slots]


def rank_probabilities(num_items: int, alpha: float) -> torch.Tensor:
    """P(r) = r^-alpha / sum_k k^-alpha of ranks 1 to ``num_items`` (Schaul et al. 2016, Sec. 3.3), float64."""
    masses = [rank**-alpha for rank in range(1, num_items + 1)]
    return torch.tensor(masses, dtype=torch.float64) / math.fsum(masses)


class NaiveReplay(ABC):
    """The common part of PER and ReaPER: slots, magnitudes, the running maximum and importance weights."""

    def __init__(
        self,
        *,
        alpha=0.0,
        beta=0.0,
        eps=0.0,
        min_priority=0.0,
        td_error="squared",
        weight_norm="buffer",
        max_priority_within_buffer=False,
    ):
        assert td_error in ("squared", "absolute") and weight_norm in ("buffer", "batch")
        self.alpha, self.beta, self.eps, self.min_priority = alpha, beta, eps, min_priority
        self.td_error, self.weight_norm = td_error, weight_norm
        self.within_buffer = max_priority_within_buffer
        self.transitions: dict[int, Transition] = {}
        self.draws = Draws()
        self.writes = 0
        self.maximum = max(1.0, min_priority)

    def write(self, slot: int, episode: Hashable = None, terminated: bool = False, truncated: bool = False) -> None:
        """Write a transition to ``slot`` with the largest magnitude seen so far, or now in the buffer."""
        self.draws.write(slot)
        self.transitions[slot] = Transition(self.writes, episode, bool(terminated), bool(truncated), self.maximum)
        self.writes += 1
        if terminated or truncated:
            for transition in self.transitions.values():
                if transition.episode == episode:
                    transition.waiting = False

    def stamps(self, slots: Sequence[int]) -> list[int]:
        """Identify the current content of ``slots``. Pass the result to :meth:`update` to model a late update."""
        return [self.transitions[slot].written for slot in slots]

    def update(self, slots: Sequence[int], td_error: Sequence[float], stamps: Sequence[int] | None = None) -> None:
        """Set TD errors; the largest of duplicates counts. Overwritten transitions are skipped."""
        stamps = self.stamps(slots) if stamps is None else stamps
        largest: dict[tuple[int, int], float] = {}
        for slot, value, stamp in zip(slots, td_error, stamps, strict=True):
            largest[slot, stamp] = max(value, largest.get((slot, stamp), value))
        for (slot, stamp), value in largest.items():
            updated = self.transitions[slot]
            if updated.written != stamp:
                continue
            absolute = math.sqrt(value) if self.td_error == "squared" else value
            updated.magnitude, updated.updated = max(absolute + self.eps, self.min_priority), True
            self.maximum = max(self.maximum, updated.magnitude)
            for transition in self.transitions.values():
                if transition is updated or transition.episode == updated.episode:
                    transition.waiting = False
        self.forget_overwritten()

    def remove(self, slots: Sequence[int]) -> None:
        """Remove what the rows of the next write replace."""
        for slot in slots:
            self.transitions.pop(slot, None)
        self.forget_overwritten()

    def forget_overwritten(self) -> None:
        """Find the largest magnitude among the transitions in the buffer."""
        if self.within_buffer:
            stored = [transition.magnitude for transition in self.transitions.values() if transition.updated]
            self.maximum = max(stored, default=self.maximum)

    def episodes(self) -> dict[Hashable, list[int]]:
        """The slots of each stored episode, in the order of writing."""
        episodes: dict[Hashable, list[int]] = {}
        for slot, transition in sorted(self.transitions.items(), key=lambda item: item[1].written):
            episodes.setdefault(transition.episode, []).append(slot)
        return episodes

    def empty(self) -> None:
        self.transitions.clear()
        self.draws.load()
        self.maximum = max(1.0, self.min_priority)

    @abstractmethod
    def criterion(self) -> dict[int, float]:
        """Unnormalised sampling probability of each slot."""

    def probabilities(self) -> list[float]:
        """P of slot 0, 1, 2, ..."""
        criterion = self.criterion()
        total = math.fsum(criterion.values())
        return [criterion[slot] / total for slot in range(len(criterion))]

    def weights(self, slots: Sequence[int]) -> list[float]:
        """w = (N P)^-beta divided by the largest weight (Eq. 18)."""
        probabilities = self.probabilities()

        def weight(slot):
            return (len(probabilities) * probabilities[slot]) ** -self.beta

        compared = slots if self.weight_norm == "batch" else range(len(probabilities))
        largest = max(weight(slot) for slot in compared if probabilities[slot] > 0)
        return [weight(slot) / largest for slot in slots]


class NaivePER(NaiveReplay):
    """P(i) = d_i^alpha / sum_k d_k^alpha."""

    def __init__(self, *, alpha=0.6, beta=0.4, eps=1e-6, **choices):
        super().__init__(alpha=alpha, beta=beta, eps=eps, **choices)

    def criterion(self) -> dict[int, float]:
        return {slot: transition.magnitude**self.alpha for slot, transition in self.transitions.items()}


class NaiveRewards(NaiveReplay):
    """P(i) ∝ d_i (|r_i| + 0.1); the rewards of episode e are -(e mod 3 + 0.9)."""

    def __init__(self, **choices):
        super().__init__(weight_norm="batch", **choices)

    def criterion(self) -> dict[int, float]:
        return {slot: t.magnitude * (t.episode % 3 + 1.0) for slot, t in self.transitions.items()}


class NaiveRecency(NaiveReplay):
    """P(i) ∝ 2^(-age / half_life), the age in transitions."""

    def __init__(self, *, half_life, beta):
        super().__init__(beta=beta)
        self.half_life = half_life

    def criterion(self) -> dict[int, float]:
        newest = max(transition.written for transition in self.transitions.values())
        return {slot: 0.5 ** ((newest - t.written) / self.half_life) for slot, t in self.transitions.items()}


class NaiveSlices(NaiveReplay):
    """All starts of slices have the same probability; with ``starts="episode"``, the first steps of episodes."""

    def __init__(self, *, pad, length, starts="any", **choices):
        super().__init__(**choices)
        self.pad, self.length, self.starts = pad, length, starts
        # the number of the write of the first step that the buffer got, by episode; and of the next rows that it does
        # not get, because later rows of the same call overwrite them
        self.first: dict[Hashable, int] = {}
        self.dropped = 0

    def remove(self, slots: Sequence[int]) -> None:
        super().remove(slots)
        self.dropped = len(slots) - len(set(slots))
        if self.dropped:
            self.first.clear()

    def write(self, slot: int, episode: Hashable = None, *ends) -> None:
        if self.dropped:
            self.dropped -= 1
        else:
            self.first.setdefault(episode, self.writes)
        super().write(slot, episode, *ends)

    def begins(self) -> list[int]:
        """The slots where slices may begin."""
        shortest, found = 1 if self.pad else self.length, []
        for episode, slots in self.episodes().items():
            begins = slots[: max(len(slots) + 1 - shortest, 0)]
            if self.starts == "episode":
                begins = [slot for slot in begins if self.transitions[slot].written == self.first[episode]]
            found += begins
        return found

    def criterion(self) -> dict[int, float]:
        return dict.fromkeys(self.transitions, 0.0) | dict.fromkeys(self.begins(), 1.0)


class NaiveRanking(NaiveReplay):
    """P(i) ∝ rank(i)^-alpha. First all transitions without a TD error, then by |δ|.

    The order of transitions in the same one of :meth:`buckets` is not specified.
    """

    def __init__(self, *, alpha=0.7, td_error="squared"):
        super().__init__(alpha=alpha, beta=0.4, td_error=td_error)

    def write(self, slot: int, *episode) -> None:
        super().write(slot, *episode)
        self.transitions[slot].magnitude = math.inf

    def criterion(self) -> dict[int, float]:
        def order(slot):
            return self.transitions[slot].magnitude, self.transitions[slot].written

        return {slot: rank**-self.alpha for rank, slot in enumerate(sorted(self.transitions, key=order)[::-1], 1)}

    def buckets(self) -> list[int]:
        """The upper half of the bits of |δ| as float32, by slot."""
        magnitudes = [self.transitions[slot].magnitude for slot in sorted(self.transitions)]
        return [struct.unpack("<I", struct.pack("<f", magnitude))[0] >> 16 for magnitude in magnitudes]


class NaiveReaPER(NaiveReplay):
    """P(t) = Psi_t / sum Psi, Psi_t = R_t^omega d_t^alpha (Eq. 15-17)."""

    def __init__(self, *, alpha=0.4, omega=0.2, beta=0.4, eps=1e-6, truncated="finished", **choices):
        super().__init__(alpha=alpha, beta=beta, eps=eps, **{"weight_norm": "batch", **choices})
        assert truncated in ("finished", "ongoing")
        self.omega, self.truncated = omega, truncated

    def finished(self, transition: Transition) -> bool:
        return transition.terminated or (transition.truncated and self.truncated == "finished")

    def reliabilities(self) -> dict[int, float]:
        """R_t of each slot (Eq. 16); 1 if its episode was neither updated nor ended since it was written."""
        episodes = [[(slot, self.transitions[slot]) for slot in slots] for slots in self.episodes().values()]
        largest_sum = max(math.fsum(t.magnitude for _, t in episode) for episode in episodes)  # F, Eq. 17
        reliabilities = {}
        for episode in episodes:
            magnitudes = [transition.magnitude for _, transition in episode]
            finished = any(self.finished(transition) for _, transition in episode)
            for position, (slot, transition) in enumerate(episode):
                total = math.fsum(magnitudes) if finished else largest_sum
                if transition.waiting or total == 0.0:
                    reliability = 1.0
                elif finished:
                    reliability = 1.0 - math.fsum(magnitudes[position + 1 :]) / total
                else:
                    reliability = 1.0 - (total - math.fsum(magnitudes[: position + 1])) / total
                reliabilities[slot] = max(reliability, 0.0)  # rounding
        return reliabilities

    def criterion(self) -> dict[int, float]:
        reliabilities = self.reliabilities()
        return {
            slot: reliabilities[slot] ** self.omega * transition.magnitude**self.alpha
            for slot, transition in self.transitions.items()
        }
