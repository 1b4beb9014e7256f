"""Random numbers of kernels; ``splitmix`` has the same for torch."""

from __future__ import annotations

import numpy as np

from torchrl_replay_ext.kernels.loop import part


@part
def uniform(seed, number):
    """The random number ``number`` of a sequence (SplitMix64), in [0, 1) with 53 bits."""
    x = np.uint64(seed) + np.uint64(number) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.float64((x ^ (x >> np.uint64(31))) >> np.uint64(11)) * 2.0**-53
