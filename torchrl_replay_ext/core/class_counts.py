"""Counts of transitions by class, for importance weights of draws from event tables."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import gather_in_bounds
from torchrl_replay_ext.core.event_tables import LEFT, UNSENT

# There is a class for every subset of the event tables, so this limits the number of classes to 2^16.
MAX_EVENT_TABLES = 16


class ClassCounts:
    """Counts stored transitions by class, for tables that keep transitions for different times.

    The class of a transition is the set of event tables that it has entered, including tables that have dropped it
    again. So for transitions of the same class, only the age decides which tables still hold them.

    Args:
        size: number of slots.
        tables: number of tables, including the default table.
        device: device of the tensors.
    """

    def __init__(self, size: int, tables: int, *, device: torch.device):
        # bit k - 1 is set if the transition has entered table k
        self._class = torch.zeros(size, dtype=torch.int64, device=device)
        # the number of transitions written before this one; -1: there is none
        self._number = torch.full((size,), -1, dtype=torch.int64, device=device)
        self._held = torch.zeros((tables, size), dtype=torch.bool, device=device)
        # row k: transitions of each class in table k; last row: those in any table whose number is known
        self._counts = torch.zeros((tables + 1, 1 << (tables - 1)), dtype=torch.int64, device=device)
        # of the transitions that have entered a table, the table still holds all with at least this number
        self._complete_from = torch.zeros(tables, dtype=torch.int64, device=device)
        self._bits = 1 << torch.arange(tables - 1, device=device)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state."""
        return {
            "class": self._class,
            "class_number": self._number,
            "class_held": self._held,
            "class_counts": self._counts,
            "class_complete_from": self._complete_from,
        }

    def rebuild(self) -> None:
        """Count again after :meth:`tensors` were replaced."""
        self._counts.zero_()
        self._count(torch.arange(len(self._class), device=self._class.device), 1)

    def clear_(self, *, keep_history: bool) -> None:
        """Clear the counts.

        ``keep_history``: False if the tables are empty too; True if :meth:`moved` will be called for all slots.
        """
        for tensor in (self._held, self._counts, self._class):
            tensor.zero_()
        self._number.fill_(-1)
        if not keep_history:
            self._complete_from.zero_()

    def moved(self, slots: Tensor, places: Tensor, number: Tensor) -> None:
        """Update the counts for slots that have entered or left a table.

        Args:
            slots: int64 [n], without duplicates.
            places: position of each slot in each table; UNSENT or LEFT if it is not there, [tables, n].
            number: number of the transition in each slot, int64 [n].
        """
        held, entered, before = places >= 0, places[1:] != UNSENT, self._held[:, slots]
        last = self._number[slots]
        # transitions that were overwritten, and those that are still in other tables
        overwritten, left = before & (number != last), (places == LEFT) & (number >= 0)
        newest = torch.maximum(overwritten * (last + 1), left * (number + 1)).amax(1)
        self._complete_from.copy_(torch.maximum(self._complete_from, newest))
        self._count(slots, -1)
        self._number[slots], self._held[:, slots] = number, held
        self._class[slots] = (entered * self._bits.unsqueeze(1)).sum(0)
        self._count(slots, 1)

    def adopt(self, first: int) -> None:
        """Start to count tables that already hold transitions; the default table holds those from ``first`` on."""
        self._complete_from.fill_(first)

    def _count(self, slots: Tensor, sign: int) -> None:
        held = self._held[:, slots]
        known = held.any(0) & (self._number[slots] >= 0)
        change = torch.cat([held, known.unsqueeze(0)]).to(torch.int64)
        self._counts.index_add_(1, self._class[slots], change, alpha=sign)

    def weight(self, slots: Tensor, per_entry: Tensor, default_size: int | Tensor) -> Tensor:
        """For the class of each slot: rate at which it is written / probability that a draw is of this class.

        Args:
            slots: int64 [n].
            per_entry: η_k / |B_k| of each table, float64 [tables]; 0 if no rows are drawn from the table.
            default_size: |B_0|, the number of transitions in the default table.

        Returns:
            The ratios, float64 [n].
        """
        label = gather_in_bounds(self._class, slots)
        rows = torch.arange(len(self._counts), device=slots.device).unsqueeze(1) * self._counts.shape[1]
        counts = gather_in_bounds(self._counts.view(-1), (rows + label).view(-1)).view(-1, slots.shape[0])
        drawn = (counts[:-1] * per_entry.unsqueeze(1)).sum(0)
        # some table that the class has entered still holds all transitions of the class from number ``first`` on
        entered = (label & self._bits.unsqueeze(1)) > 0
        newest = self._complete_from[0]
        first = torch.where(entered, self._complete_from[1:].unsqueeze(1), newest).amin(0).clamp_max(newest)
        rate = counts[-1].to(torch.float64) / (newest + default_size - first).clamp_min(1)
        return rate / torch.where(drawn > 0, drawn, 1.0)

    def check_valid(self, held: Tensor) -> None:
        """Raise AssertionError if the counts do not agree with the tables; ``held`` is bool [tables, slots]."""
        expected = torch.zeros_like(self._counts)
        known = held.any(0) & (self._number >= 0)
        expected.index_add_(1, self._class, torch.cat([held, known.unsqueeze(0)]).to(torch.int64))
        entered = (self._class & self._bits.unsqueeze(1)) > 0
        if not torch.equal(self._held, held) or bool((held[1:] & ~entered).any()):
            raise AssertionError("EventTableSampler: the classes do not agree with the tables")
        if not torch.equal(self._counts, expected):
            raise AssertionError("EventTableSampler: the counts of the classes are wrong")
