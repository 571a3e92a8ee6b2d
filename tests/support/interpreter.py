"""Triton's interpreter, without work that it repeats, and with numpy 2.4."""

from __future__ import annotations

import os
from dataclasses import replace
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


def leave_out_repetitions() -> None:
    """Leave out what the interpreter works out again for each operation, or for nothing.

    With small blocks that is two thirds of the time that a kernel takes.
    """
    if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    # It repeats sums and products of integers in 64 bits, for an assertion that it only makes if
    # `debug` is on.
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)

    # It puts its own functions into the language for a kernel, and again for each function that
    # the kernel calls.
    function, tl = interpreter.InterpretedFunction, interpreter.tl
    call = function.__call__

    def call_with_the_same_language(self, *args, **kwargs):
        seen = self.fn.__globals__.values()
        if any(is_builtin(lang.load) for lang in (tl, tl.core) if any(x is lang for x in seen)):
            return call(self, *args, **kwargs)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    function.__call__ = call_with_the_same_language

    # It makes a dictionary of all types to find one.
    find, found = interpreter._get_np_dtype, {}

    def numpy_dtype(dtype):
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = numpy_dtype

    # It checks the shape of every block, and makes objects of its numbers.
    initialize_once(tl.block_type, lambda element_ty, shape: (element_ty.name, *shape))
    initialize_once(tl.tensor, lambda handle, type: type.name, own="handle")


def initialize_once(kind, key_of, own=None) -> None:
    """Give objects of one key the attributes of the first, but for the first argument, ``own``."""
    initialize, known = kind.__init__, {}

    def copy_known(self, *arguments):
        key = key_of(*arguments)
        if key not in known:
            initialize(self, *arguments)
            known[key] = {name: x for name, x in vars(self).items() if name != own}
        else:
            vars(self).update(known[key])
            if own is not None:
                setattr(self, own, arguments[0])

    kind.__init__ = copy_known


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
