"""The write of keys and values to a cache: the op, its formula, and its kernels."""
