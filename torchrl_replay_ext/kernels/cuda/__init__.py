"""The kernels for CUDA, written in Triton, with functions of the names and arguments of the loops for the CPU."""
