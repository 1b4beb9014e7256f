"""Numbers in the arrays of event tables; :mod:`torchrl_replay_ext.kernels.events` describes the arrays."""

# ``places`` of a transition that has never been in a list, and of one that has left it
UNSENT, LEFT = -1, -2
# entries of ``counters``
WRITTEN, NEXT_SLOT, CHANGES, FREE_HEAD, FREE_TAIL = range(5)
