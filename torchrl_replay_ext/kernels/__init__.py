"""Kernels: each hot operation written once, as a loop over flat arrays.

``tree`` has the loops, ``cuda`` their versions for CUDA, and ``ops`` registers both with torch.
"""
