"""The kernels for CUDA, written in Triton. The functions have the names and arguments of the loops for the CPU."""
