"""The array ``lanes``, int64 [4, lanes], and the outcomes of :func:`torchrl_replay_ext.kernels.lanes.assign`."""

# Rows of ``lanes``: the last trajectory id; the number of the last row, counted over all lanes; 1 if the lane has an
# unfinished episode, else 0; the first of the trajectories that interrupted one another up to the last one, or NONE.
TRAJECTORY, WRITTEN, OPEN, CHAIN = range(4)
NONE = -(2**63)

DONE, TOO_MANY, INTERRUPTS = range(3)
# which outcomes leave the state unchanged: none of them, TOO_MANY, or also INTERRUPTS
UNCHECKED, CHECKED, CAREFUL = range(3)
