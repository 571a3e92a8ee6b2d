"""The kernel of the write to a cache in Triton, with its plan."""
