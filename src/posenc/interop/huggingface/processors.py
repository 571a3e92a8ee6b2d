"""Attention processors of diffusers: objects that an attention module calls to attend.

Python looks ``__call__`` up in a class, so a patched module gets another processor: one of a
subclass with our methods, which shares the attributes of the first.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from posenc.interop.huggingface.rewrite import rebuilt

_NAME = "processor"
# An attribute of our subclasses: the class of the model.
_THEIRS = "_posenc_theirs"


def ours_for(module: nn.Module) -> tuple[Any, list[Any]]:
    """Our processor for a module, or None; and name, variant and layout of what was replaced."""
    processor = getattr(module, _NAME, None)
    if not callable(processor) or isinstance(processor, type):
        return None, []
    theirs: Any = type(processor)
    kind, replaced = _subclass(theirs)
    return (_converted(processor, kind), list(replaced)) if replaced else (None, [])


def install(module: nn.Module, processor: Any) -> None:
    """Let ``module`` call ``processor``."""
    setattr(module, _NAME, processor)


def restore(module: nn.Module) -> None:
    """Let ``module`` call a processor of the model's class, if it calls one of ours."""
    processor = getattr(module, _NAME, None)
    theirs = getattr(processor, _THEIRS, None)
    if theirs is not None:
        install(module, _converted(processor, theirs))


def _converted(processor: Any, kind: type) -> Any:
    made: Any = object.__new__(kind)
    # One dict for both: what is set on one of them, such as the backend, holds for the other.
    object.__setattr__(made, "__dict__", vars(processor))
    return made


# A new class for each patch would be compiled again.
@functools.cache
def _subclass(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A subclass of a processor's class that calls our functions, and what was replaced."""
    methods = rebuilt(kind, "__call__")
    replaced = dict.fromkeys(one for _, found in methods.values() for one in found)
    body = {
        **{name: made for name, (made, _) in methods.items()},
        _THEIRS: kind,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__reduce__": lambda self: (_new, (kind,), vars(self)),
    }
    return type(kind.__name__, (kind,), body), tuple(replaced)


def _new(kind: type) -> Any:
    # Pickle cannot find a class that is made at run time, so loading makes it again.
    return object.__new__(_subclass(kind)[0])
