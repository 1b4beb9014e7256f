"""The layouts of the arrays of kernels: constants, and what they mean. Unlike the loops, this file needs no Numba.

**Trees**, in which a node has 16 children. ``leaves`` are int64 numbers, padded with zeros to a multiple of 16.
``nodes`` holds the levels above them, from the root, which is entry 0. Each level has room for 16 children of every
node of the level above. All positions follow from the number of leaves, ``capacity``, by shifts:

* The node number i of a level is the parent of the nodes (or leaves) 16 i to 16 i + 15 of the level below.
* The last node of a level is ``capacity - 1``, shifted right by 4 bits for each level above the leaves.

``minima`` (of the positive leaves; empty if they are not tracked) and ``maxima`` have the same levels.

``pages`` is empty if all leaves are stored. Otherwise it maps each block of 256 leaves to the block of ``leaves`` that
stores it, and the lowest level of ``nodes`` has the 16 parents of each stored block. Such trees have more than 16
leaves and no minima.

**Ranks**: transitions are in buckets of nearly equal priorities.

* ``bucket`` and ``offset`` of each slot: its bucket, and its number among the members of this bucket. Within a bucket,
  ranks ascend with offsets. Member k has offset k, but -1 - k in bucket ``NEW``.
* ``members``: blocks of slots, one per bucket. ``start`` and ``room`` are the begin and the size of the block of each
  bucket; ``top`` is the first unused position after all blocks. A block that is full moves to the top with twice the
  space. When no space is left, all blocks are laid out anew, which happens once in O(N) changes.
* ``counts``: entry ``BUCKETS + b`` is the number of members of bucket b. Entry i > 0 counts for entry ``i >> 4`` too,
  so that entry 0 is the number of all transitions.
"""

import torch
from torch import Tensor

# --- trees

BITS = 4
CHILDREN = 1 << BITS
PAGE_BITS = 2 * BITS
# masses are integers, in fixed point: so many per unit of priority
UNIT = 2**23
# the minimum where no leaf is positive
NOTHING = 2**63 - 1


def lowest_width(num_stored: int) -> int:
    """The number of entries of the lowest level of nodes, above so many stored leaves."""
    return CHILDREN * -(-num_stored // CHILDREN**2)


def allocate(capacity: int, device: torch.device | str | None, num_pages: int | None = None) -> tuple[Tensor, Tensor]:
    """Zeros for the leaves and the nodes of a tree; ``num_pages``: how many blocks are stored, if not all of them."""
    stored = CHILDREN * -(-capacity // CHILDREN) if num_pages is None else num_pages << PAGE_BITS
    size, count = lowest_width(stored), -(-capacity // CHILDREN)
    while count > 1:
        count = -(-count // CHILDREN)
        size += CHILDREN * -(-count // CHILDREN)
    leaves = torch.zeros(stored, dtype=torch.int64, device=device)
    return leaves, leaves.new_zeros(size)


# --- ranks

BUCKETS = 1 << 15
# the bucket of slots without a transition, and that of transitions that were never updated
NOWHERE, NEW = -1, 0
# a priority keeps 7 bits of its mantissa
DROPPED_BITS = 16
# the first entry of ``counts`` below entry 0
FIRST_COUNT = BUCKETS >> 3 * BITS

# --- rows of updates

# why an update is refused, and for how many draws one of its rows can be late
OUT_OF_RANGE, INVALID, EMPTY = 1, 2, 3
WINDOW = 64

# --- lanes

# Rows of the array ``lanes``, int64 [4, lanes]: the last trajectory id; the number of the last row, counted over all
# lanes; 1 if the lane has an unfinished episode, else 0; the first of the trajectories that interrupted one another up
# to the last one, or NO_ID.
TRAJECTORY, LAST_ROW, OPEN, CHAIN = range(4)
NO_ID = -(2**63)
# outcomes of the loop ``lanes.assign``, and which of them leave the state unchanged: none, TOO_MANY, or also INTERRUPTS
DONE, TOO_MANY, INTERRUPTS = range(3)
UNCHECKED, CHECKED, CAREFUL = range(3)

# --- event tables

# ``position_of`` of a transition that has never been in a list, and of one that has left it
NEVER_LISTED, LEFT = -1, -2
# entries of ``counters``
WRITTEN, NEXT_SLOT, CHANGES, FREE_HEAD, FREE_TAIL = range(5)
