"""Why an update is refused, and for how many draws one of its rows can be late; see the loops in ``rows``."""

OUT_OF_RANGE, INVALID, EMPTY = 1, 2, 3
WINDOW = 64
