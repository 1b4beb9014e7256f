"""Special values and positions of counters in the arrays of event tables; see the loops in ``events``."""

# ``position_of`` of a transition that has never been in a list, and of one that has left it
NEVER_LISTED, LEFT = -1, -2
# entries of ``counters``
WRITTEN, NEXT_SLOT, CHANGES, FREE_HEAD, FREE_TAIL = range(5)
