"""The sum tree under every prioritized draw: exact int64 sums in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from torchrl_replay_ext.functional.priorities import FEW, write_last
from torchrl_replay_ext.tracing import is_traced, scalar, uniform

_INT64_MAX = torch.iinfo(torch.int64).max
# Lazy writes until minima are brought up to date.
_MAX_STALE = 64


def _level_shapes(rows: int, fanout: int, top: int) -> list[tuple[int, ...]]:
    """Shapes above ``rows`` rows of leaves: blocks of ``fanout`` until at most ``top`` nodes are left."""
    shapes: list[tuple[int, ...]] = []
    while rows > top:
        nodes = rows
        rows = -(-nodes // fanout)
        shapes.append((rows, fanout))
    return [*shapes, (rows,)]


def _propagate(levels: list[Tensor], node: Tensor, value: Tensor, shift: int, reduce) -> None:
    """Write ``value`` at ``node`` of the lowest of ``levels`` and recompute every ancestor from its children."""
    *blocks, top = levels
    for level in blocks:
        level.view(-1).index_copy_(0, node, value)
        node = node >> shift
        value = reduce(level.index_select(0, node))
    top.index_copy_(0, node, value)


def _fill(levels: list[Tensor], value: Tensor, reduce) -> None:
    """Recompute all ``levels`` from ``value``, the reduced leaf rows."""
    *blocks, top = levels
    for level in blocks:
        level.view(-1)[: value.numel()] = value
        value = reduce(level)
    top.copy_(value)


def _sum(rows: Tensor) -> Tensor:
    return rows.sum(-1)


def _min(rows: Tensor) -> Tensor:
    # several times faster than amin for int64
    return torch.aminmax(rows, dim=-1).min


def _max(rows: Tensor) -> Tensor:
    return rows.amax(-1)


def _less_one(mass: Tensor) -> Tensor:
    """Mass - 1, and the largest int64 for 0: so that a minimum passes over empty leaves."""
    return (mass - 1).bitwise_and_(_INT64_MAX)


class SumTree:
    """Masses of ``capacity`` leaves, their sums, and draws in proportion to them.

    Masses are int64 in fixed point, ``SumTree.UNIT`` = 2^23 per unit of priority. Sums are therefore exact and do not
    depend on the order of updates, nothing drifts, and a leaf of mass 0 is never drawn. Leaves lie in rows of
    ``fanout``; above them come blocks of ``fanout`` sums and a dense top. All shapes are static, and
    only checks wait for the device; an update writes the leaves first and then recomputes every ancestor from its
    children, so duplicates are safe: the last one wins. ``max_priority`` is the largest priority a leaf may hold.

    Args:
        capacity: number of leaves, >= 1.
        fanout: width of a row, a power of two.
        top: the largest number of nodes in the dense top.
        track_min: also keep the smallest positive mass, for :meth:`min`.
        page_table: int64 [capacity // fanout + 1], the row of ``leaves`` that stores each block of ``fanout``
            leaves; for trees over a sparsely used range. The tree reads it, its owner writes it. Row ``num_pages``
            always holds zeros and stands for a block that is not stored.
        num_pages: number of stored rows; needed with ``page_table``.
        device: where the tensors live.

    Examples:
        >>> tree = SumTree(4)
        >>> tree.update(torch.tensor([0, 3]), torch.tensor([1.0, 3.0]))
        >>> tree.probability(torch.tensor([0, 1, 3]))
        tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """

    UNIT = 2**23

    def __init__(
        self,
        capacity: int,
        *,
        fanout: int = 64,
        top: int = 16384,
        track_min: bool = False,
        page_table: Tensor | None = None,
        num_pages: int | None = None,
        device: torch.device | str | None = None,
    ):
        if capacity < 1:
            raise ValueError(f"SumTree(capacity={capacity}): capacity must be >= 1.")
        if fanout < 2 or fanout & (fanout - 1):
            raise ValueError(f"SumTree(fanout={fanout}): fanout must be a power of two, >= 2.")
        blocks = capacity // fanout + 1
        if top < 1:
            raise ValueError(f"SumTree(top={top}): top must be >= 1.")
        if page_table is not None:
            if num_pages is None or page_table.shape != (blocks,):
                raise ValueError(f"SumTree: page_table must have shape ({blocks},) and come with num_pages.")
            device = page_table.device
        self.capacity = capacity
        self.fanout = fanout
        self._shift = fanout.bit_length() - 1
        self.page_table = page_table
        stored = blocks if page_table is None or num_pages is None else num_pages + 1
        shapes = _level_shapes(blocks, fanout, top)
        self.leaves = torch.zeros((stored, fanout), dtype=torch.int64, device=device)
        self._sums = [torch.zeros(shape, dtype=torch.int64, device=device) for shape in shapes]
        self._mins = [torch.full(shape, _INT64_MAX, device=device) for shape in shapes] if track_min else []
        # the smallest positive mass if known, and the blocks whose minimum is out of date
        self._min: int | None = None
        self._stale: list[Tensor] = []
        # row k selects the first k of a row
        self._first = -torch.ones((fanout, fanout), dtype=torch.int64, device=device).tril(-1)
        # the largest priority a leaf may hold: the sum of all leaves that are stored must stay below 2^62
        self.max_priority = float(2**62 // min(capacity, self.leaves.numel()) // self.UNIT)
        # whether the smallest mass may be remembered in Python, where a graph would not see it
        self.may_cache = True
        # running sums of the top, behind a 0; computed anew for each draw
        self._running = torch.zeros(shapes[-1][0] + 1, dtype=torch.int64, device=device)

    def nbytes(self) -> int:
        """Memory of the tree in bytes, the page table left out."""
        return sum(t.numel() * t.element_size() for t in (self.leaves, *self._sums, *self._mins, self._first))

    @classmethod
    def to_mass(cls, priority: Tensor) -> Tensor:
        """Fixed-point masses of floating-point priorities >= 0, rounded up to a unit of 2^-23: only 0 has mass 0."""
        return priority.mul(cls.UNIT).ceil_().to(torch.int64)

    def _address(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The block of each leaf, the row that stores the block, and the leaf's place among all rows."""
        block = index >> self._shift
        row = self._row(block)
        if self.page_table is None:
            return block, row, index
        return block, row, (row << self._shift) + (index & (self.fanout - 1))

    def get(self, index: Tensor) -> Tensor:
        """Masses at ``index`` [n], int64 [n]."""
        place = index if self.page_table is None else self._address(index)[2]
        return self.leaves.view(-1).index_select(0, place)

    def total(self) -> Tensor:
        """Sum of all masses, int64 []."""
        return self._sums[-1].sum()

    def min(self) -> int | Tensor:
        """Smallest positive mass; needs ``track_min`` and a positive total."""
        if is_traced():
            return self._mins[-1].amin() + 1
        if not self.may_cache:
            return int(self._mins[-1].amin()) + 1
        if self._min is None:
            self._refresh_minima()
            self._min = int(self._mins[-1].amin()) + 1
        return self._min

    def forget_min(self) -> None:
        """To be called when somebody else has written to these tensors, another process for instance."""
        self._min = None

    def _refresh_minima(self) -> None:
        if self._stale:
            block = torch.cat(self._stale)
            self._stale.clear()
            self._write_minima(block, self.leaves.index_select(0, self._row(block)))

    def _write_minima(self, block: Tensor, rows: Tensor) -> None:
        _propagate(self._mins, block, _min(_less_one(rows)), self._shift, _min)

    def _row(self, block: Tensor) -> Tensor:
        return block if self.page_table is None else self.page_table[block]

    def _rows_in_order(self) -> Tensor:
        return self.leaves if self.page_table is None else self.leaves[self.page_table]

    def update(self, index: Tensor, priority: Tensor) -> None:
        """Set the priorities of the leaves ``index`` [n] to ``priority`` [n]; of duplicates the last one wins.

        Raises:
            ValueError: if shapes differ, or an index or a priority is out of range; nothing is changed then.
        """
        if index.ndim != 1 or priority.shape != index.shape:
            raise ValueError(
                f"SumTree.update: index and priority must share one shape [n]; got {tuple(index.shape)} and "
                f"{tuple(priority.shape)}."
            )
        if not bool(((index >= 0) & (index < self.capacity)).all()):
            raise ValueError(f"SumTree.update: index must lie in [0, {self.capacity}).")
        if not bool(((priority >= 0) & (priority <= self.max_priority)).all()):
            raise ValueError(f"SumTree.update: priorities must be finite and lie in [0, {self.max_priority:g}].")
        self.write(index.to(torch.int64), self.to_mass(priority.double()))

    def write(self, index: Tensor, mass: Tensor, *, lazy: bool = False, resolved: bool = False) -> None:
        """Unchecked update in int64 masses; of duplicates in ``index`` [n] the last one wins.

        With ``lazy``, minima are brought up to date only when they are needed, which they seldom are: as long as no
        leaf of the smallest mass is written, the smallest mass can only become that of a leaf that is. With
        ``resolved``, duplicates are known to have the same mass.
        """
        block, row, place = self._address(index)
        leaves = self.leaves
        lazy = lazy and self.may_cache and bool(self._mins) and self._min is not None and index.shape[0] <= FEW
        lazy = lazy and not is_traced()
        before = leaves.view(-1).index_select(0, place).tolist() if lazy else []
        if resolved:
            leaves.view(-1).scatter_(0, place, mass)
        else:
            write_last(leaves.view(-1), place, mass)
        rows = leaves.index_select(0, row)
        _propagate(self._sums, block, _sum(rows), self._shift, _sum)
        if lazy:
            self._stale.append(block)
            written = dict(zip(index.tolist(), mass.tolist(), strict=True)).values()
            smallest, after = self._min, min(filter(None, written), default=_INT64_MAX)
            if smallest is not None and after <= smallest:
                self._min = after
            elif smallest in before or len(self._stale) > _MAX_STALE:
                self._min = None
        elif self._mins:
            self._write_minima(block, rows)
            self._min = None

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The leaves in which ``target`` falls: the i with Σ_{j<i} m_j <= target < Σ_{j<=i} m_j.

        Args:
            target: int64 [n] in [0, total).

        Returns:
            The leaves and their masses, int64 [n] each.
        """
        return self._find(target, self._run())

    def _run(self) -> Tensor:
        """Running sums of the top, inclusive."""
        if is_traced():
            return self._sums[-1].cumsum(0)
        return torch.cumsum(self._sums[-1], 0, out=self._running[1:])

    def _ahead_of(self, node: Tensor, running: Tensor) -> Tensor:
        """The sum of the top ahead of ``node`` [n], after :meth:`_run` gave ``running``."""
        if is_traced():
            return running.index_select(0, node) - self._sums[-1].index_select(0, node)
        return self._running.index_select(0, node)

    def _find(self, target: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self._sums[:-1]
        node = torch.searchsorted(running, target, right=True)
        rest = target - self._ahead_of(node, running)
        for level in reversed(blocks):
            children = level.index_select(0, node)
            running = children.cumsum(1)
            child = torch.searchsorted(running, rest.unsqueeze(1), right=True)
            rest = rest - (running - children).gather(1, child).squeeze(1)
            node = torch.add(child.squeeze(1), node, alpha=self.fanout)
        children = self.leaves.index_select(0, self._row(node))
        child = torch.searchsorted(children.cumsum(1), rest.unsqueeze(1), right=True)
        leaf = torch.add(child.squeeze(1), node, alpha=self.fanout)
        return leaf, children.gather(1, child).squeeze(1)

    def sample(
        self, num: int, *, stratified: bool = False, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw ``num`` leaves with replacement, in proportion to their masses.

        Args:
            num: number of draws.
            stratified: one draw in each of ``num`` strata of equal mass, instead of independent ones.
            generator: source of randomness, on the tree's device.

        Returns:
            The leaves and their masses, int64 [num] each; stratified draws come in the order of their strata.

        Raises:
            RuntimeError: if the total is 0. (Where this is traced, the draws are leaf 0, with mass 0.)
        """
        u = uniform(num, device=self.leaves.device, generator=generator)
        if stratified:
            # the last may be rounded up to 1
            u = ((torch.arange(num, device=u.device) + u) / num).clamp_(max=1 - 2**-53)
        return self.draw(u)

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`sample` with given uniform numbers ``u``, float64 [n] in [0, 1), which it may overwrite."""
        running = self._run()
        total = scalar(running[-1])
        traced = is_traced()
        if not traced and total == 0:
            raise RuntimeError("SumTree.sample: all priorities are 0, nothing can be drawn; use eps > 0.")
        target = u.mul_(total).to(torch.int64)
        if traced or total > 2**53:
            # the product may have been rounded up to the total
            target = target.clamp_(max=total - 1)
        return self._find(target, running)

    def prefix(self, index: Tensor) -> Tensor:
        """Sum of the masses of the leaves [0, i) for each i of ``index`` [n], 0 <= i <= capacity. int64 [n]."""
        blocks = self._sums[:-1]
        node, row, _ = self._address(index)
        result = self._before(self.leaves.index_select(0, row), index)
        for level in blocks:
            parent = node >> self._shift
            result = result + self._before(level.index_select(0, parent), node)
            node = parent
        return result + self._ahead_of(node, self._run())

    def _before(self, children: Tensor, index: Tensor) -> Tensor:
        return (children & self._first.index_select(0, index & (self.fanout - 1))).sum(1)

    def probability(self, index: Tensor) -> Tensor:
        """Probability of each leaf of ``index`` in one draw, float64; 0 everywhere if the tree is empty."""
        return self.get(index).double() / self.total().clamp_min(1)

    def clear_(self) -> None:
        """Set every mass to 0."""
        for tensor in (self.leaves, *self._sums):
            tensor.zero_()
        for tensor in self._mins:
            tensor.fill_(_INT64_MAX)
        self._min = None
        self._stale.clear()

    def rebuild_(self) -> None:
        """Recompute all sums from the leaves."""
        rows = self._rows_in_order()
        _fill(self._sums, _sum(rows), _sum)
        if self._mins:
            _fill(self._mins, _min(_less_one(rows)), _min)
            self._min = None
            self._stale.clear()

    def check_valid(self) -> None:
        """Raise AssertionError if a sum or a minimum is not that of its children."""
        rows = self._rows_in_order()
        if int(self.leaves.min()) < 0:
            raise AssertionError("SumTree: a negative mass")
        positive = self.leaves[self.leaves > 0]
        if self._min is not None and (not positive.numel() or self._min != int(positive.min())):
            raise AssertionError("SumTree: the smallest mass is not that of the leaves")
        self._refresh_minima()
        for name, levels, value, reduce in (
            ("sums", self._sums, _sum(rows), _sum),
            ("minima", self._mins, _min(_less_one(rows)), _min),
        ):
            if not levels:
                continue
            expected = [level.clone() for level in levels]
            _fill(expected, value, reduce)
            if any(not torch.equal(a, b) for a, b in zip(levels, expected, strict=True)):
                raise AssertionError(f"SumTree: {name} do not agree with the leaves")


class MaxTree:
    """Non-negative int64 values of ``capacity`` leaves and their maximum, kept current by :meth:`refresh`.

    The owner writes ``leaves`` and names the changed ones.

    Args:
        capacity: number of leaves, >= 1.
        fanout: width of a row, a power of two.
        top: the largest number of nodes in the dense top.
        device: where the tensors live.
    """

    def __init__(self, capacity: int, *, fanout: int = 64, top: int = 16384, device: torch.device | str | None = None):
        self._shift = fanout.bit_length() - 1
        rows = -(-capacity // fanout)
        self._rows = torch.zeros((rows, fanout), dtype=torch.int64, device=device)
        self._maxima = [
            torch.zeros(shape, dtype=torch.int64, device=device) for shape in _level_shapes(rows, fanout, top)
        ]

    @property
    def leaves(self) -> Tensor:
        """The values, int64, to be written in place."""
        return self._rows.view(-1)

    def refresh(self, index: Tensor) -> None:
        """Recompute the ancestors of the leaves ``index`` [n]."""
        block = index >> self._shift
        _propagate(self._maxima, block, _max(self._rows.index_select(0, block)), self._shift, _max)

    def max(self) -> Tensor:
        """The largest leaf, int64 []."""
        return self._maxima[-1].amax()

    def rebuild_(self) -> None:
        """Recompute all maxima from the leaves."""
        _fill(self._maxima, _max(self._rows), _max)

    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(t.numel() * t.element_size() for t in (self._rows, *self._maxima))
