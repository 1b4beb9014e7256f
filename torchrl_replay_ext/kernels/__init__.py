"""Kernels: each hot operation written once, as a loop over flat arrays.

A module has the loops of one subject, and ``<module>_layout`` describes its arrays. ``cuda`` has their versions for
CUDA, and ``ops`` registers both with torch.
"""
