"""An op of ``torch.ops.posenc``: defined once, and called in one way, whatever kind of call it is.

====================================  =========================================================
ordinary calls                        the implementation for the device: C, or Triton on CUDA
with a gradient                       the same, recorded by :class:`_Recorded`
torch.compile, modes, DTensor         the op, by the rules registered here and in interop
samples of torch.vmap                 the op, by its rule for samples
torch.func.grad, forward mode         torch operations, as in `reference.py`
torch.export, torch.jit               torch operations: they may run without this package
====================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc._contract.tracing import (
    PLAIN_TYPES,
    builtin_of,
    has_real_storage,
    in_forward_mode,
    in_func,
    is_legacy_batched,
    is_ordinary,
    is_traced_as_operations,
    is_writable,
    redispatch_below_versions,
    without_modes,
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
        # The same native code for calls that need no gradient: rules in Python would cost them
        # as much as the call itself.
        _LIBRARY.define(f"{name}.plain{schema}")
        self.plain = builtin_of(getattr(torch.ops.posenc, name).plain)
        full = f"posenc::{name}"
        torch.library.register_fake(full, fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(full, backward, setup_context=save, lib=_LIBRARY)
        if vmap is not None:
            torch.library.register_vmap(full, vmap, lib=_LIBRARY)
        if writes:
            _LIBRARY.impl(name, self._count_versions, "ADInplaceOrView", with_keyset=True)

    def __call__(self, *arguments: Any) -> Any:
        """The result, with gradients if autograd records."""
        if is_ordinary() and self._are_plain(arguments):
            if self._is_recorded(arguments):
                return _Recorded.apply(*arguments, self, self.run_recorded)
            return self.run_now(*arguments)
        if (
            in_forward_mode()
            or is_traced_as_operations()
            or (in_func() and (self.vmap is None or self._is_recorded(arguments)))
        ):
            return self.operations(*arguments)
        try:
            return self.overload(*arguments)
        except RuntimeError:
            if in_func():
                return self.operations(*arguments)
            if not has_real_storage(*[x for x in arguments if isinstance(x, Tensor)]):
                raise
            with without_modes():
                return self.run(*arguments)

    def run_now(self, *arguments: Any) -> Any:
        """The result without gradients; if native code refuses, Python takes over, or says why."""
        if arguments[0].is_meta:
            return self.overload(*arguments)
        if native.serves(arguments[0], self.native):
            try:
                return self._run_plain(arguments)
            except RuntimeError:
                call = native.missed()
            if call is not None:
                return triton.run_and_install(call, self.run, arguments, self.repeats)
        return self.run(*arguments)

    def run_recorded(self, *arguments: Any) -> Any:
        """As `run_now`, for a call with a gradient.

        The first call of a kind has the kernels of the gradient compiled beside its own.
        """
        if self.rehearse is None or not native.serves(arguments[0], self.native):
            return self.run_now(*arguments)
        try:
            return self._run_plain(arguments)
        except RuntimeError:
            if native.missed() is not None:
                triton.rehearse(self.rehearse, arguments)
        return self.run_now(*arguments)

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
                        return _Recorded.apply(*arguments, self, self.plain)
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

    def _are_plain(self, arguments: tuple[Any, ...]) -> bool:
        """Whether no tensor is of a subclass, or batched, which PyTorch's dispatcher has to see."""
        for x in arguments[: self.tensors]:
            if x is not None and (type(x) not in PLAIN_TYPES or is_legacy_batched(x)):
                return False
        return True

    def _is_recorded(self, arguments: tuple[Any, ...]) -> bool:
        """Whether autograd records a call with these tensors."""
        if torch.is_grad_enabled():
            for x in arguments[: self.tensors]:
                if x is not None and x.requires_grad:
                    return True
        return False

    def _count_versions(self, keyset: Any, *arguments: Any) -> Any:
        result = redispatch_below_versions(self.overload, keyset, *arguments)
        increment_version([arguments[i] for i in self.writes if arguments[i] is not None])
        return result


class _Recorded(torch.autograd.Function):
    """An ordinary call that autograd records.

    The rules that torch.library makes of the same functions take twice as long; they serve
    compilers.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *given, op, run = arguments
        result = run(*given)
        ctx.op = op
        op.save(ctx, given, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *ctx.op.backward(ctx, *gradients), None, None
