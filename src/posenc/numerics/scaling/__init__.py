r"""Scaling rules: how a model trained on one length rotates slower for a longer one.

A rule takes the rates :math:`\theta_i = b^{-2i/d}` of the pairs, in float64, and returns the
scaled rates; ``gain()`` is the factor of cosines and sines. Rules are frozen and hashable: a rule
is part of the key of every table made with it. `at` returns the rule for a sequence of some length;
most rules do not depend on the length and return themselves.
"""

from posenc.numerics.scaling.by_length import DynamicNTK, LongRoPE
from posenc.numerics.scaling.fixed import NTK, Linear, Llama3, Proportional, YaRN
from posenc.numerics.scaling.rule import Rule

__all__ = ["NTK", "DynamicNTK", "Linear", "Llama3", "LongRoPE", "Proportional", "Rule", "YaRN"]
