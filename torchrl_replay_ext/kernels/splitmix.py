"""SplitMix64 in torch: hashes, and the same random numbers as in loops (``loop.uniform``) and in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

# the odd constants, as signed integers
STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def mixed(number: Tensor) -> Tensor:
    """Hashes of int64 numbers, int64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * factor
    return number ^ ((number >> 31) & (2**33 - 1))


def uniform(seed: Tensor, count: int) -> Tensor:
    """The first ``count`` random numbers of ``seed``, int64 [1], in [0, 1) with 53 bits, float64 [count]."""
    number = seed + torch.arange(count, device=seed.device) * STEP
    return ((mixed(number) >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53
