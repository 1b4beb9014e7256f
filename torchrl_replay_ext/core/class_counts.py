"""How often transitions of each class were written, and how often draws from tables give them."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds

# Counts are kept for every set of event tables.
MAX_EVENT_TABLES = 16


class ClassCounts:
    """Counts of transitions by class, for tables that keep transitions of different age.

    The class of a transition is the set of event tables it has entered, including those that have dropped it since.
    Within a class, whether a transition is still stored therefore depends only on its age, not on its content.

    Args:
        size: number of slots.
        tables: number of tables, the default one included.
        device: where the tensors live.
    """

    def __init__(self, size: int, tables: int, *, device: torch.device):
        # bit k - 1: whether the transition entered table k
        self._class = torch.zeros(size, dtype=torch.int64, device=device)
        # how many transitions were written before it; -1: unknown
        self._number = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._held = torch.zeros((tables, size), dtype=torch.bool, device=device)
        # of each class in each table; last, of each class in any table, with a known number
        self._counts = torch.zeros((tables + 1, 1 << (tables - 1)), dtype=torch.int64, device=device)
        # each table still holds everything that entered it and has this number or a larger one
        self._complete_from = torch.zeros(tables, dtype=torch.int64, device=device)
        self._bits = 1 << torch.arange(tables - 1, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The state."""
        return {
            "class": self._class,
            "class_number": self._number,
            "class_held": self._held,
            "class_counts": self._counts,
            "class_complete_from": self._complete_from,
        }

    def clear_(self) -> None:
        """Nothing was ever written."""
        self.clear_counts_()
        self._class.zero_()
        self._number.fill_(-1)
        self._complete_from.zero_()

    def clear_counts_(self) -> None:
        """Nothing is held; classes and numbers stay, for :meth:`recount`."""
        self._held.zero_()
        self._counts.zero_()

    def moved(self, slots: Tensor, held: Tensor, written: int) -> None:
        """``slots`` [n], all different, have entered or left a table.

        Args:
            slots: int64 [n].
            held: which tables hold them now, bool [tables, n].
            written: how many transitions were written before those that are being written.
        """
        before = self._held[:, slots]
        left = before & ~held
        newest = torch.where(left, self._number[slots] + 1, 0).amax(1)
        self._complete_from.copy_(torch.maximum(self._complete_from, newest))
        self._count(slots, -1)
        is_new = held[0] & ~before.any(0)
        number = written + torch.arange(len(slots), device=slots.device)
        self._number[slots] = torch.where(is_new, number, self._number[slots])
        self._class[slots] = torch.where(is_new, 0, self._class[slots])
        self._enter(slots, held)

    def recount(self, slots: Tensor, held: Tensor) -> None:
        """Count ``slots`` [n], all different, anew, by the tables that hold them, bool [tables, n]."""
        self._count(slots, -1)
        self._enter(slots, held)

    def adopt(self, default: Tensor, written: int) -> None:
        """Take over tables in use: ages are known of the default table alone, ``default`` [n], oldest first."""
        stored = self._held.any(0).nonzero().squeeze(1)
        self._count(stored, -1)
        first = written - len(default)
        self._number[default] = first + torch.arange(len(default), device=default.device)
        self._complete_from.fill_(first)
        self._count(stored, 1)

    def _enter(self, slots: Tensor, held: Tensor) -> None:
        self._held[:, slots] = held
        self._class[slots] |= (held[1:] * self._bits.unsqueeze(1)).sum(0)
        self._count(slots, 1)

    def _count(self, slots: Tensor, sign: int) -> None:
        held = self._held[:, slots]
        known = held.any(0) & (self._number[slots] >= 0)
        change = torch.cat([held, known.unsqueeze(0)]).to(torch.int64)
        self._counts.index_add_(1, self._class[slots], change, alpha=sign)

    def weight(self, slots: Tensor, share: Tensor, default_size: int | Tensor) -> Tensor:
        """The rate at which the class of each slot is written, over the probability that a draw is of this class.

        Args:
            slots: int64 [n].
            share: η_k / |B_k| of each table, float64 [tables]; 0 if it is not drawn from.
            default_size: |B_0|.

        Returns:
            Float64 [n].
        """
        label = gather_in_bounds(self._class, slots)
        rows = torch.arange(len(self._counts), device=slots.device).unsqueeze(1) * self._counts.shape[1]
        counts = gather_in_bounds(self._counts.view(-1), (rows + label).view(-1)).view(-1, slots.shape[0])
        drawn = (counts[:-1] * share.unsqueeze(1)).sum(0)
        # a class is complete as far back as the table with the longest memory among those it entered
        entered = (label & self._bits.unsqueeze(1)) > 0
        newest = self._complete_from[0]
        first = torch.where(entered, self._complete_from[1:].unsqueeze(1), newest).amin(0).clamp_max(newest)
        rate = counts[-1].to(torch.float64) / (newest + default_size - first).clamp_min(1)
        return rate / torch.where(drawn > 0, drawn, 1.0)

    def check_valid(self, held: Tensor) -> None:
        """Raise AssertionError if the counts are not those of tables that hold ``held``, bool [tables, slots]."""
        expected = torch.zeros_like(self._counts)
        known = held.any(0) & (self._number >= 0)
        expected.index_add_(1, self._class, torch.cat([held, known.unsqueeze(0)]).to(torch.int64))
        entered = (self._class & self._bits.unsqueeze(1)) > 0
        if not torch.equal(self._held, held) or bool((held[1:] & ~entered).any()):
            raise AssertionError("EventTableSampler: the classes do not agree with the tables")
        if not torch.equal(self._counts, expected):
            raise AssertionError("EventTableSampler: the counts of the classes are wrong")
