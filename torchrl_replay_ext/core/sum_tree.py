"""The sum tree under every prioritized draw: exact int64 sums in plain torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrl_replay_ext.compilation import (
    gather_in_bounds,
    is_traced,
    scalar,
    scatter_in_bounds,
    stratify,
    uniform,
    where_int64,
)
from torchrl_replay_ext.functional.priorities import FEW, write_last

_INT64_MAX = torch.iinfo(torch.int64).max
# Lazy writes until minima are brought up to date.
_MAX_STALE = 64
# Inside graphs: entries that make one of the next level, and the largest number of entries on the last one.
_COMPILED_FANOUT = 4
_ROOT = 16


class UpdateMask(NamedTuple):
    """What becomes of each row of an update that cannot be looked at.

    Args:
        valid: bool [n], False where the row changes nothing; rows of one leaf agree, and so do their values.
        is_last: bool [n], True for one row of each leaf: of duplicates, the one that wins.
    """

    valid: Tensor
    is_last: Tensor


def _rounded_up(number: int) -> int:
    return -(-number // _COMPILED_FANOUT) * _COMPILED_FANOUT


def _less_one(mass: Tensor) -> Tensor:
    """Mass - 1, and the largest int64 for 0: so that a minimum passes over empty leaves."""
    return (mass - 1) & _INT64_MAX


class ReductionTree:
    """Sums, minima or maxima of int64 leaves: of rows of ``fanout`` of them, of blocks of rows, up to a dense top.

    Outside graphs, where every operation has its price, rows are reduced as a whole. Inside graphs only the arithmetic
    counts: for them (:meth:`prepare`), results for 4, 16, ... entries of each row and of the top are kept too, and an
    update reduces 4 entries at a time. The leaves belong to the caller, who writes them first; every ancestor is then
    recomputed from its children, so duplicates are safe.

    Args:
        blocks: number of rows of leaves, as they are counted above the leaves.
        stored: number of rows that are stored.
        fanout: width of a row, a power of two.
        top: the largest number of entries in the dense top.
        kind: ``"sum"``, ``"min"`` or ``"max"``; a minimum is that of the positive leaves, less 1.
        device: where the tensors live.
    """

    def __init__(
        self, blocks: int, *, stored: int, fanout: int, top: int, kind: str, device: torch.device | str | None
    ):
        self.kind, self._stored, self._fanout, self._device = kind, stored, fanout, device
        self._shift = fanout.bit_length() - 1
        self._nothing = _INT64_MAX if kind == "min" else 0
        shapes: list[tuple[int, ...]] = []
        while blocks > top:
            blocks = -(-blocks // fanout)
            shapes.append((blocks, fanout))
        self._shapes = [*shapes, (_rounded_up(blocks),)]
        # what graphs use: all levels one behind the other, since each tensor costs them time
        self._flat: Tensor | None = None
        self._carve()

    def _carve(self) -> None:
        """Make the levels, as parts of ``self._flat`` if there is one."""
        steps: list[tuple[int, int]] = []
        used = 0

        def part(*shape: int) -> Tensor:
            nonlocal used
            if self._flat is None:
                return torch.full(shape, self._nothing, dtype=torch.int64, device=self._device)
            steps.append((used, min(shape[-1] if len(shape) > 1 else _COMPILED_FANOUT, _COMPILED_FANOUT)))
            used += math.prod(shape)
            return self._flat[used - math.prod(shape) : used].view(shape)

        self.levels: list[Tensor] = []
        # of the rows of the leaves and of each level of blocks; above the top
        self._partial: list[list[Tensor]] = []
        heights = [self._stored, *(shape[0] for shape in self._shapes)]
        for height, shape in zip(heights, self._shapes, strict=False):
            widths = self._widths() if self._flat is not None else []
            self._partial.append([part(height, width) for width in widths])
            self.levels.append(part(*shape))
        self._root_levels = [part(length) for length in self._lengths()] if self._flat is not None else []
        ends = [first for first, _ in steps[1:]] + [used]
        # where each level begins, its length, and how many of its entries make one of the next
        self._steps = tuple((first, end - first, n) for (first, n), end in zip(steps, ends, strict=False))

    @torch._dynamo.assume_constant_result
    def _layout(self) -> tuple[tuple[int, int, int], ...]:
        """``_steps``, for whose every number a graph would otherwise make sure each time that it is still the same."""
        return self._steps

    def _widths(self) -> list[int]:
        """Results kept per row, from the finest upwards: 16 and 4 for 64."""
        widths, width = [], self._fanout
        while width > _COMPILED_FANOUT:
            width //= _COMPILED_FANOUT
            widths.append(width)
        return widths

    def _lengths(self) -> list[int]:
        """Lengths of the levels above the top."""
        lengths, length = [], self._shapes[-1][0]
        while length > _ROOT:
            length = _rounded_up(length // _COMPILED_FANOUT)
            lengths.append(length)
        return lengths

    def prepare(self) -> None:
        """Keep what graphs need; to be followed by :meth:`rebuild`."""
        heights = [self._stored, *(shape[0] for shape in self._shapes[:-1])]
        size = sum(map(math.prod, self._shapes)) + sum(heights) * sum(self._widths()) + sum(self._lengths())
        self._flat = torch.full((size,), self._nothing, dtype=torch.int64, device=self._device)
        self._carve()

    def __getstate__(self) -> dict[str, Any]:
        state = vars(self).copy()
        if self._flat is not None:
            # they are parts of it
            del state["levels"], state["_partial"], state["_root_levels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._flat is not None:
            self._carve()

    @property
    def top(self) -> Tensor:
        """The dense top, int64 [.]."""
        return self.levels[-1]

    def flat(self) -> Tensor:
        """All levels inside graphs, one behind the other, int64 [.]."""
        assert self._flat is not None
        return self._flat

    def root(self) -> Tensor:
        """The last level inside graphs, int64 [.]."""
        return self.flat()[self._layout()[-1][0] :]

    def tensors(self) -> list[Tensor]:
        """All levels."""
        return [*self.levels, *(tensor for row in self._partial for tensor in row), *self._root_levels]

    def _reduced(self, rows: Tensor) -> Tensor:
        if self.kind == "sum":
            return rows.sum(-1)
        # several times faster than amin for int64
        return torch.aminmax(rows, dim=-1).min if self.kind == "min" else rows.amax(-1)

    def _of_leaves(self, leaves: Tensor) -> Tensor:
        return _less_one(leaves) if self.kind == "min" else leaves

    def refresh(self, rows: Tensor, row: Tensor, node: Tensor) -> None:
        """Recompute what stands above ``rows`` [n, fanout] of the leaves, stored at ``row`` and counted as ``node``."""
        rows = self._of_leaves(rows)
        for level, partial in zip(self.levels, self._partial, strict=True):
            for results in partial:
                rows = self._reduced(rows.view(-1, results.shape[1], _COMPILED_FANOUT))
                results.index_copy_(0, row, rows)
            level.view(-1).index_copy_(0, node, self._reduced(rows))
            if level is not self.top:
                row = node = node >> self._shift
                rows = level.index_select(0, row)
        self._refresh_root()

    def _refresh_root(self) -> None:
        below = self.top
        for level in self._root_levels:
            level[: below.numel() // _COMPILED_FANOUT] = self._reduced(below.view(-1, _COMPILED_FANOUT))
            below = level

    def walk(self, leaves: Tensor) -> list[tuple[Tensor, int, int, int]]:
        """All levels from ``leaves`` [stored · fanout] up, for graphs.

        Returns:
            For each level a flat tensor, where in it the level begins, its length, and how many of its entries make one
            of the next.
        """
        own = [(self.flat(), *step) for step in self._layout()]
        return [(leaves, 0, leaves.shape[0], min(self._fanout, _COMPILED_FANOUT)), *own]

    @property
    def last_in_rows(self) -> int:
        """The number of the level in :meth:`walk` behind which rows are counted as nodes, wherever they are stored."""
        return len(self._partial[0])

    def refresh_compiled(self, leaves: Tensor, place: Tensor, node: Tensor) -> None:
        """Recompute what stands above the leaves at ``place`` among all that are stored, in the row ``node``."""
        pair: Callable[[Tensor, Tensor], Tensor] = {
            "sum": torch.add,
            "min": torch.minimum,
            "max": torch.maximum,
        }[self.kind]
        steps = self.walk(leaves)
        for number, (level, begin, _, children) in enumerate(steps[:-1]):
            first = begin + (place & -children)
            entries = [gather_in_bounds(level, first + k) for k in range(children)]
            if number == 0:
                entries = [self._of_leaves(entry) for entry in entries]
            value = entries[0]
            for entry in entries[1:]:
                value = pair(value, entry)
            place = node if number == self.last_in_rows else place >> (children.bit_length() - 1)
            level, begin, *_ = steps[number + 1]
            scatter_in_bounds(level, begin + place, value)

    def rebuild(self, leaves: Tensor, rows_in_order: Tensor) -> None:
        """Recompute everything from ``leaves`` [stored, fanout], and from the rows as they are counted."""
        value = self._reduced(self._of_leaves(rows_in_order))
        for level, partial in zip(self.levels, self._partial, strict=True):
            below = self._of_leaves(leaves) if level is self.levels[0] else leaves
            for results in partial:
                results.copy_(self._reduced(below.view(-1, results.shape[1], _COMPILED_FANOUT)))
                below = results
            level.view(-1)[: value.numel()] = value
            if level is not self.top:
                value, leaves = self._reduced(level), level
        self._refresh_root()

    def clear(self) -> None:
        """All leaves are 0."""
        for tensor in self.tensors():
            tensor.fill_(self._nothing)


def _child(entry: Callable[[int], Tensor], children: int, rest: Tensor) -> tuple[Tensor, Tensor]:
    """In which of its ``children`` a node's target ``rest`` [n] falls, and what of it remains there.

    Written out child by child: so it becomes part of one loop over the targets.
    """
    running = entry(0)
    number = torch.zeros_like(rest)
    ahead = torch.zeros_like(rest)
    for k in range(1, children):
        passed = (running <= rest).to(torch.int64)
        number = number + passed
        ahead = torch.maximum(ahead, running * passed)
        if k < children - 1:
            running = running + entry(k)
    return number, rest - ahead


class SumTree:
    """Masses of ``capacity`` leaves, their sums, and draws in proportion to them.

    Masses are int64 in fixed point, ``SumTree.UNIT`` = 2^23 per unit of priority. Sums are therefore exact and do not
    depend on the order of updates, nothing drifts, and a leaf of mass 0 is never drawn. Leaves lie in rows of
    ``fanout``; above them come blocks of ``fanout`` sums and a dense top. All shapes are static, and
    only checks wait for the device; an update writes the leaves first and then recomputes every ancestor from its
    children, so duplicates are safe: the last one wins. ``max_priority`` is the largest priority a leaf may hold.

    Outside graphs a draw walks the tree a row at a time, inside them by 4 entries; see :class:`ReductionTree`. Before
    the tree becomes part of a graph, :meth:`prepare` must be called.

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
        # one-dimensional: a graph that writes to a view of a tensor copies the whole tensor
        self.leaves = torch.zeros(stored * fanout, dtype=torch.int64, device=device)
        layout = {"stored": stored, "fanout": fanout, "top": top, "device": device}
        self._sums = ReductionTree(blocks, kind="sum", **layout)
        self._minima = ReductionTree(blocks, kind="min", **layout) if track_min else None
        # the smallest positive mass if known, and the blocks whose minimum is out of date
        self._min: int | None = None
        self._stale: list[Tensor] = []
        # row k selects the first k of a row
        self._first = -torch.ones((fanout, fanout), dtype=torch.int64, device=device).tril(-1)
        # the largest priority a leaf may hold: the sum of all leaves that are stored must stay below 2^62
        self.max_priority = float(2**62 // min(capacity, self.leaves.shape[0]) // self.UNIT)
        # whether it may become part of a graph, which would not see what is remembered in Python
        self.prepared = False
        # running sums of the top, behind a 0; computed anew for each draw
        self._running = torch.zeros(self._sums.top.numel() + 1, dtype=torch.int64, device=device)

    @property
    def rows(self) -> Tensor:
        """The leaves by stored row, int64 [rows, fanout]: a view for code outside graphs."""
        return self.leaves.view(-1, self.fanout)

    def _pyramids(self) -> list[ReductionTree]:
        return [self._sums] if self._minima is None else [self._sums, self._minima]

    def prepare(self) -> None:
        """Make the tree fit to become part of a graph."""
        if not self.prepared:
            self.prepared = True
            for pyramid in self._pyramids():
                pyramid.prepare()
            self.rebuild_()

    def graph_tensors(self) -> list[Tensor]:
        """What graphs read and change, once the tree is prepared."""
        paged = [] if self.page_table is None else [self.page_table]
        return [self.leaves, *(pyramid.flat() for pyramid in self._pyramids()), *paged]

    def nbytes(self) -> int:
        """Memory of the tree in bytes, the page table left out."""
        tensors = [self.leaves, self._first, self._running, *(t for p in self._pyramids() for t in p.tensors())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

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
        return gather_in_bounds(self.leaves, place)

    def total(self) -> Tensor:
        """Sum of all masses, int64 []."""
        return (self._sums.root() if is_traced() else self._sums.top).sum()

    def min(self) -> int | Tensor:
        """Smallest positive mass; needs ``track_min`` and a positive total."""
        assert self._minima is not None
        if self.prepared:
            return scalar(self._minima.root().amin() + 1)
        if self._min is None:
            self._refresh_minima()
            self._min = int(self._minima.top.amin()) + 1
        return self._min

    def forget_min(self) -> None:
        """To be called when somebody else has written to these tensors, another process for instance."""
        self._min = None

    def _refresh_minima(self) -> None:
        if self._stale and self._minima is not None:
            block = torch.cat(self._stale)
            self._stale.clear()
            row = self._row(block)
            self._minima.refresh(self.rows.index_select(0, row), row, block)

    def _row(self, block: Tensor) -> Tensor:
        return block if self.page_table is None else self.page_table[block]

    def _rows_in_order(self) -> Tensor:
        return self.rows if self.page_table is None else self.rows[self.page_table]

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

    def write(self, index: Tensor, mass: Tensor, *, lazy: bool = False, mask: UpdateMask | None = None) -> None:
        """Unchecked update in int64 masses; of duplicates in ``index`` [n] the last one wins if not ``mask``.

        With ``lazy``, minima are brought up to date only when they are needed, which they seldom are: as long as no
        leaf of the smallest mass is written, the smallest mass can only become that of a leaf that is.
        """
        block, row, place = self._address(index)
        leaves = self.leaves
        lazy = lazy and not self.prepared and self._min is not None and index.shape[0] <= FEW
        before = leaves.index_select(0, place).tolist() if lazy else []
        if mask is None:
            write_last(leaves, place, mass)
        else:
            scatter_in_bounds(leaves, place, where_int64(mask.valid, mass, gather_in_bounds(leaves, place)))
        if is_traced():
            for pyramid in self._pyramids():
                pyramid.refresh_compiled(leaves, place, block)
            return
        rows = self.rows.index_select(0, row)
        self._sums.refresh(rows, row, block)
        if lazy:
            self._stale.append(block)
            written = dict(zip(index.tolist(), mass.tolist(), strict=True)).values()
            smallest, after = self._min, min(filter(None, written), default=_INT64_MAX)
            if smallest is not None and after <= smallest:
                self._min = after
            elif smallest in before or len(self._stale) > _MAX_STALE:
                self._min = None
        elif self._minima is not None:
            self._minima.refresh(rows, row, block)
            self._min = None

    def _find_compiled(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`find`, 4 children at a time."""
        *steps, (root, begin, length, _) = self._sums.walk(self.leaves)
        node, rest = _child(lambda k: root[begin + k], length, target)
        block = node
        for number in reversed(range(len(steps))):
            level, begin, _, children = steps[number]
            if number == self._sums.last_in_rows:
                block, node = node, self._row(node)
            first = begin + node * children
            child, rest = _child(lambda k, level=level, first=first: gather_in_bounds(level, first + k), children, rest)
            node = node * children + child
        mass = gather_in_bounds(self.leaves, node)
        # Masses are below 2^62. To add 0 makes whatever is done with the leaf wait until its mass was read: otherwise
        # the compiler may postpone that, and then an update has to copy the whole tree for its sake.
        return (block << self._shift) + (node & (self.fanout - 1)) + (mass >> 62), mass

    def _prefix_compiled(self, index: Tensor) -> Tensor:
        """:meth:`prefix`, 4 children at a time."""
        *steps, (root, root_begin, length, _) = self._sums.walk(self.leaves)
        block, _, place = self._address(index)
        result = torch.zeros_like(index)
        for number, (level, begin, _, children) in enumerate(steps):
            first = place & -children
            for k in range(children - 1):
                result = result + gather_in_bounds(level, begin + first + k) * (first + k < place)
            place = block if number == self._sums.last_in_rows else place >> (children.bit_length() - 1)
        for k in range(length - 1):
            result = result + root[root_begin + k] * (k < place)
        return result

    def find(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """The leaves in which ``target`` falls: the i with Σ_{j<i} m_j <= target < Σ_{j<=i} m_j.

        Args:
            target: int64 [n] in [0, total).

        Returns:
            The leaves and their masses, int64 [n] each.
        """
        return self._find_compiled(target) if is_traced() else self._find(target, self._run())

    def _run(self) -> Tensor:
        """Running sums of the top, inclusive; ``self._running`` holds the exclusive ones after it."""
        return torch.cumsum(self._sums.top, 0, out=self._running[1:])

    def _find(self, target: Tensor, running: Tensor) -> tuple[Tensor, Tensor]:
        blocks = self._sums.levels[:-1]
        node = torch.searchsorted(running, target, right=True)
        rest = target - self._running.index_select(0, node)
        for level in reversed(blocks):
            children = level.index_select(0, node)
            running = children.cumsum(1)
            child = torch.searchsorted(running, rest.unsqueeze(1), right=True)
            rest = rest - (running - children).gather(1, child).squeeze(1)
            node = torch.add(child.squeeze(1), node, alpha=self.fanout)
        children = self.rows.index_select(0, self._row(node))
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
        return self.draw(stratify(u) if stratified else u)

    def draw(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`sample` with given uniform numbers ``u``, float64 [n] in [0, 1), which it may overwrite."""
        if is_traced():
            total = self.total()
            # the product may have been rounded up to the total
            return self._find_compiled(torch.minimum((u * total).to(torch.int64), total - 1))
        running = self._run()
        total = running[-1].item()
        if total == 0:
            raise RuntimeError("SumTree.sample: all priorities are 0, nothing can be drawn; use eps > 0.")
        target = u.mul_(total).to(torch.int64)
        if total > 2**53:
            target = target.clamp_(max=total - 1)
        return self._find(target, running)

    def prefix(self, index: Tensor) -> Tensor:
        """Sum of the masses of the leaves [0, i) for each i of ``index`` [n], 0 <= i <= capacity. int64 [n]."""
        if is_traced():
            return self._prefix_compiled(index)
        if 2 * index.shape[0] > self.leaves.shape[0]:
            return self._prefix_of_many(index)
        blocks = self._sums.levels[:-1]
        node, row, _ = self._address(index)
        result = self._before(self.rows.index_select(0, row), index)
        for level in blocks:
            parent = node >> self._shift
            result = result + self._before(level.index_select(0, parent), node)
            node = parent
        self._run()
        return result + self._running.index_select(0, node)

    def _prefix_of_many(self, index: Tensor) -> Tensor:
        """:meth:`prefix` by one pass over all leaves."""
        block, _, place = self._address(index)
        running = self.rows.cumsum(1)
        sums = running[:, -1] if self.page_table is None else running[:, -1][self.page_table]
        ahead = sums.cumsum(0) - sums
        return ahead[block] + (running - self.rows).view(-1)[place]

    def _before(self, children: Tensor, index: Tensor) -> Tensor:
        return (children & self._first.index_select(0, index & (self.fanout - 1))).sum(1)

    def probability(self, index: Tensor) -> Tensor:
        """Probability of each leaf of ``index`` in one draw, float64; 0 everywhere if the tree is empty."""
        return self.get(index).double() / self.total().clamp_min(1)

    def clear_(self) -> None:
        """Set every mass to 0."""
        self.leaves.zero_()
        for pyramid in self._pyramids():
            pyramid.clear()
        self._min = None
        self._stale.clear()

    def rebuild_(self) -> None:
        """Recompute all sums from the leaves."""
        for pyramid in self._pyramids():
            pyramid.rebuild(self.rows, self._rows_in_order())
        self._min = None
        self._stale.clear()

    def check_valid(self) -> None:
        """Raise AssertionError if a sum or a minimum is not that of its children."""
        if int(self.leaves.min()) < 0:
            raise AssertionError("SumTree: a negative mass")
        positive = self.leaves[self.leaves > 0]
        if self._min is not None and (not positive.numel() or self._min != int(positive.min())):
            raise AssertionError("SumTree: the smallest mass is not that of the leaves")
        self._refresh_minima()
        for pyramid in self._pyramids():
            expected = copy.deepcopy(pyramid)
            expected.rebuild(self.rows, self._rows_in_order())
            if not all(map(torch.equal, pyramid.tensors(), expected.tensors())):
                raise AssertionError(f"SumTree: a {pyramid.kind} does not agree with the leaves")


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
        self._fanout, self._shift = fanout, fanout.bit_length() - 1
        rows = -(-capacity // fanout)
        # the values, to be written in place; one-dimensional as in SumTree
        self.leaves = torch.zeros(rows * fanout, dtype=torch.int64, device=device)
        self._maxima = ReductionTree(rows, stored=rows, fanout=fanout, top=top, kind="max", device=device)
        self._prepared = False

    def prepare(self) -> None:
        """Make the tree fit to become part of a graph."""
        if not self._prepared:
            self._prepared = True
            self._maxima.prepare()
            self.rebuild_()

    @property
    def _rows(self) -> Tensor:
        return self.leaves.view(-1, self._fanout)

    def graph_tensors(self) -> list[Tensor]:
        """What graphs read and change, once the tree is prepared."""
        return [self.leaves, self._maxima.flat()]

    def refresh(self, index: Tensor) -> None:
        """Recompute the ancestors of the leaves ``index`` [n]."""
        block = index >> self._shift
        if is_traced():
            self._maxima.refresh_compiled(self.leaves, index, block)
        else:
            self._maxima.refresh(self._rows.index_select(0, block), block, block)

    def max(self) -> Tensor:
        """The largest leaf, int64 []."""
        return (self._maxima.root() if is_traced() else self._maxima.top).amax()

    def rebuild_(self) -> None:
        """Recompute all maxima from the leaves."""
        self._maxima.rebuild(self._rows, self._rows)

    def check_valid(self) -> None:
        """Raise AssertionError if the maximum is not that of the leaves."""
        if int(self.max()) != int(self.leaves.max()):
            raise AssertionError("MaxTree: the maximum does not agree with the leaves")

    def nbytes(self) -> int:
        """Memory in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.leaves, *self._maxima.tensors()))
