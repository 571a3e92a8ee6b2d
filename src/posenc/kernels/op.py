"""An op of ``torch.ops.posenc``: defined once, and called in one way, whatever kind of call it is.

====================================  =========================================================
ordinary calls                        the implementation for the device: C, or Triton on CUDA
with a gradient                       the same, recorded by :class:`_Recorded`
torch.compile, modes, DTensor         the op, by the rules registered here and in interop
samples of torch.vmap                 the op, by its rule for samples; torch operations without one
torch.func.grad, forward mode         torch operations, as in `reference.py`
torch.export, torch.jit               torch operations: they may run without this package
====================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import increment_version

from posenc._contract.tracing import (
    builtin_of,
    in_forward_mode,
    in_func,
    is_ordinary,
    is_plain,
    is_recorded,
    is_traced_as_operations,
    is_writable,
)
from posenc.kernels import native, triton
from posenc.kernels.spec import USUAL_BITS

_LIBRARY = torch.library.Library("posenc", "DEF")


class Op:
    """``posenc::name``, whose arguments are tensors and what its schema says.

    Args:
        name: Its name.
        schema: What follows the name.
        run: The implementation in Python, for all devices, where native code refuses or is missing.
        operations: The same as torch operations that autograd and exporters follow.
        fake: Empty results, for a compiler.
        save: Keep in ``ctx`` what ``backward`` needs; called with ``ctx, arguments, results``.
        backward: The gradients of the arguments.
        vmap: The rule for a batch of samples, as `torch.library.register_vmap` takes it; without
            one, torch.func gets the ``operations``.
        writes: Indices of the arguments that are written.
        native: Types of the devices that native code serves.
        repeats: Whether native code on CUDA has no checks and repeats what Python did in a call
            like it, see `triton.launch`.
        rehearse: Launch the backward pass without running it, so that its kernels are compiled.
    """

    def __init__(
        self,
        name: str,
        schema: str,
        run: Callable[..., Any],
        operations: Callable[..., Any],
        fake: Callable[..., Any],
        *,
        save: Callable[..., None] | None = None,
        backward: Callable[..., Any] | None = None,
        vmap: Callable[..., Any] | None = None,
        writes: tuple[int, ...] = (),
        native: tuple[str, ...] = ("cpu", "cuda"),
        repeats: bool = False,
        rehearse: Callable[..., None] | None = None,
    ) -> None:
        self.run, self.operations, self.writes = run, operations, writes
        self.rehearse = rehearse
        self.save, self.backward, self.vmap = save, backward, vmap
        self.native, self.repeats = native, repeats
        # The index of the layout, if there is one; tensors are among the first arguments.
        before, has_layout, _ = schema.partition("int layout")
        self.layout = before.count(",") if has_layout else None
        self.tensors = schema.partition(") ->")[0].rpartition("Tensor")[0].count(",") + 1
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, self.run_now, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.posenc, name).default
        # Native code is behind an overload of its own: rules in Python would cost an ordinary call
        # as much as the call itself.
        _LIBRARY.define(f"{name}.plain{schema}")
        self.plain = builtin_of(getattr(torch.ops.posenc, name).plain)
        full = f"posenc::{name}"
        torch.library.register_fake(full, fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(full, backward, setup_context=save, lib=_LIBRARY)
        if vmap is not None:
            torch.library.register_vmap(full, vmap, lib=_LIBRARY)

    def __call__(self, *arguments: Any) -> Any:
        """The result, with gradients if autograd records."""
        tensors = [x for x in arguments[: self.tensors] if x is not None]
        if is_plain(*tensors) and not in_forward_mode():
            if is_recorded(*tensors):
                return _Recorded.apply(*arguments, self, False)
            return self.run_now(*arguments)
        if (
            in_forward_mode()
            or is_traced_as_operations()
            or (in_func() and (self.vmap is None or is_recorded(*tensors)))
        ):
            return self.operations(*arguments)
        return self.overload(*arguments)

    def run_now(self, *arguments: Any, recorded: bool = False) -> Any:
        """The result without gradients; if native code refuses, Python takes over, or says why.

        The first call of a kind that is recorded has the kernels of the gradient compiled too.
        """
        if arguments[0].is_meta:
            return self.overload(*arguments)
        if native.serves(arguments[0], self.native):
            try:
                return self._run_plain(arguments)
            except RuntimeError:
                call = native.missed()
            if call is not None:
                if recorded and self.rehearse is not None:
                    triton.rehearse(self.rehearse, arguments)
                return triton.run_and_install(call, self.run, arguments, self.repeats)
        return self.run(*arguments)

    def at_once(self, *arguments: Any) -> Any:
        """The result of a call that needs no preparation, or None: then nothing has happened.

        That is an ordinary call of native code, of arguments that it takes as they are. The result
        of an op that returns nothing is True.
        """
        if not is_ordinary():
            return None
        try:
            if torch.is_grad_enabled():
                for x in arguments[: self.tensors]:
                    if x is not None and x.requires_grad:
                        if not self.repeats:
                            return None
                        return _Recorded.apply(*arguments, self, True)
            if not self.writes:
                return self.plain(*arguments)
            for i in self.writes:
                if arguments[i] is not None and not is_writable(arguments[i]):
                    return None
            result = self._run_plain(arguments)
            return True if result is None else result
        except (RuntimeError, AttributeError):
            # There is no native code for them, or they do not fit, or they are no tensors; or they
            # fit, but the kernel was not launched before, and Python has to do so.
            call = native.missed()
        if call is None or self.layout is None or arguments[self.layout] & ~USUAL_BITS:
            return None
        result = triton.run_and_install(call, self.run, arguments, self.repeats)
        return True if result is None else result

    def _run_plain(self, arguments: tuple[Any, ...]) -> Any:
        result = self.plain(*arguments)
        if self.writes:
            increment_version([arguments[i] for i in self.writes if arguments[i] is not None])
        return result


class _Recorded(torch.autograd.Function):
    """An ordinary call that autograd records.

    The rules that torch.library makes of the same functions take twice as long; they serve
    compilers.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *given, op, at_once = arguments
        result = op.plain(*given) if at_once else op.run_now(*given, recorded=True)
        ctx.op = op
        op.save(ctx, given, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *ctx.op.backward(ctx, *gradients), None, None
