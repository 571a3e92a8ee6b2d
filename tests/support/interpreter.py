"""Triton's interpreter, without a search that it repeats."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from inspect import getmembers


def search_the_language_once() -> None:
    """Keep which names of ``triton.language`` are builtins.

    The interpreter looks through the whole language for them at every call of a device function,
    and that is a third of the time that a kernel takes. Which names they are does not change.
    """
    if find_spec("triton") is None:
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    @cache
    def builtins(pkg):
        return [name for name, member in getmembers(pkg) if is_builtin(member)]

    def patch_builtin(pkg, builder, scope):
        for name in builtins(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    tl = interpreter.tl
    for pkg in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(pkg)
    interpreter._patch_builtin = patch_builtin
