"""The rotation, RMSNorm with it, and PoPE: the ops, their formulas, and their kernels."""
