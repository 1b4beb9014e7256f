"""Codes of kernels for rows of updates that are left out, and for updates that are refused."""

# of a row
LATE, PADDING = 1, 2
# of an update
OUT_OF_RANGE, INVALID, EMPTY = 1, 2, 3
