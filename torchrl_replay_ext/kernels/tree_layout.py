"""The arrays of a tree in which a node has 16 children.

``leaves`` are int64 numbers, padded with zeros to a multiple of 16. ``nodes`` holds the levels above them, from the
root, which is entry 0. Each level has room for 16 children of every node of the level above. All positions follow
from the number of leaves, ``capacity``, by shifts:

* The node number i of a level is the parent of the nodes (or leaves) 16 i to 16 i + 15 of the level below.
* The last node of a level is ``capacity - 1``, shifted right by 4 bits for each level above the leaves.

``minima`` (of the positive leaves; empty if they are not tracked) and ``maxima`` have the same levels.

``pages`` is empty if all leaves are stored. Otherwise it maps each block of 256 leaves to the block of ``leaves`` that
stores it, and the lowest level of ``nodes`` has the 16 parents of each stored block. Such trees have more than 16
leaves and no minima.
"""

import torch
from torch import Tensor

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
