"""Why an update is refused, and how long draws wait for their updates; see the loops in ``rows``."""

OUT_OF_RANGE, INVALID, EMPTY = 1, 2, 3
# A draw waits for its update while at most so many draws follow.
WINDOW = 64
# Draws are numbered modulo 2^31.
NUMBERS = 2**31 - 1
