"""The kernels of attention in Triton, with their plans."""
