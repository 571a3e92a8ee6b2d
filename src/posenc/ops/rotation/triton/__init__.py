"""The kernels of the rotation, of RMSNorm with it, and of PoPE in Triton, with their plans."""
