"""`posenc.functional` under the name PyTorch users look for."""

from posenc.functional import *  # noqa: F403
from posenc.functional import __all__ as __all__

__dir__ = __all__.copy
