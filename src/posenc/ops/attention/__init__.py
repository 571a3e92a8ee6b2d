"""Attention with a bias: the kinds of bias, the ops, their formulas, and their kernels."""
