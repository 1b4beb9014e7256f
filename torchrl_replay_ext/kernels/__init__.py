"""Kernels: each hot operation written once, as a loop over flat arrays.

A module has the loops of one subject, and ``layouts`` describes their arrays. ``cuda`` has the versions for
CUDA, and ``ops`` registers both with torch.
"""
