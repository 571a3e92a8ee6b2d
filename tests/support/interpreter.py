"""Triton's interpreter, without a search that it repeats, and with numpy 2.4."""

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


def read_numbers_of_one_element() -> None:
    """Let numbers that a kernel computes be the ends of a range, as Triton 3.7 does itself.

    Those of Triton 3.6 are arrays of one element, which are no numbers to numpy 2.4.
    """
    if find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patch_lang_tensor
