"""Find out whether a call is eager, traced, compiled, transformed or captured.

Only this file uses private names of torch, except attributes and methods of nn.Module;
tests/_contract/test_tracing.py tests each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from posenc._contract.sharding import is_sharded

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
# torch.autograd.grad(is_grads_batched=True) creates such tensors.
is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
in_jit_trace = torch.jit.is_tracing  # type: ignore[attr-defined]
# A transform of torch.func creates such tensors.
_is_of_func = torch._C._functorch.is_functorch_wrapped_tensor
Function = TypeVar("Function", bound=Callable[..., Any])


def is_plain(*xs: Tensor) -> bool:
    """Whether ``xs`` are ordinary tensors outside any compiler, transform or dispatch mode.

    Only then may a module store a table that it built: a traced, batched or fake table would
    outlive its trace.
    """
    if torch.compiler.is_compiling() or _modes() != 0 or _transforms() or in_jit_trace():
        return False
    for x in xs:  # noqa: SIM110 (a generator would cost as much as the rest, at every token)
        if type(x) not in PLAIN_TYPES or is_legacy_batched(x):
            return False
    return True


def is_ordinary() -> bool:
    """Whether nothing stands between a call and its kernel: no compiler, mode or transform."""
    return not (
        torch.compiler.is_compiling()
        or _modes()
        or _transforms()
        or in_jit_trace()
        or forward_ad._current_level >= 0
    )


def is_recorded(*tensors: Tensor) -> bool:
    """Whether autograd records operations on one of ``tensors``; a compiler can trace this."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t.requires_grad:
                return True
    return False


def builtin_of(overload: Any) -> Any:
    """The builtin function that an overload of an op calls: one Python frame less."""
    return overload._op


def apply_of(function: type[torch.autograd.Function], tensors: Sequence[int]) -> Callable[..., Any]:
    """``function.apply`` for ordinary calls, whose arguments at ``tensors`` are tensors or None.

    That of torch's class first does in Python what torch.func needs, for as long as a small kernel
    takes. An ordinary call needs that only for a tensor that has outlived its transform.
    """
    apply_to_any = function.apply
    apply = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply_to_ordinary(*arguments: Any) -> Any:
        for i in tensors:
            if (x := arguments[i]) is not None and _is_of_func(x):
                return apply_to_any(*arguments)
        return apply(*arguments)

    return apply_to_ordinary


def is_traced_as_operations() -> bool:
    """Whether a trace must consist of torch's operations: it may run without this package.

    torch.func inside a compiler cannot trace an op with rules in Python.
    """
    if torch.compiler.is_compiling():
        return is_exporting() or _compiles_transform()
    return is_exporting() or in_jit_trace()


def is_writable(x: Tensor) -> bool:
    """Whether native code may write ``x``, outside inference mode too."""
    return not x.is_neg() and (not x.is_inference() or torch.is_inference_mode_enabled())


def has_real_storage(*xs: Tensor) -> bool:
    """Whether ``data_ptr()`` of ``xs`` is an address; dispatch modes may be active."""
    eager = not torch.compiler.is_compiling() and not in_transform(*xs)
    return eager and all(type(x) in PLAIN_TYPES for x in xs)


def may_keep(x: Tensor) -> bool:
    """Whether a table built for ``x`` may be stored; the table of a DTensor is a plain tensor."""
    return is_plain(x) or (is_sharded(x) and is_plain())


def mixes_with_plain(x: Tensor) -> bool:
    """Whether an operation may mix ``x`` with plain tensors: a FakeTensor refuses them."""
    return type(x) in PLAIN_TYPES or torch.compiler.is_compiling() or is_sharded(x)


def fix_sizes(x: Tensor) -> Tensor:
    """Mark all sizes static, as torch._dynamo.mark_static does, without importing the compiler."""
    x._dynamo_static_indices = set(range(x.dim()))  # type: ignore[attr-defined]
    return x


def constant_under_compile(function: Function) -> Function:
    """Do as torch.compiler.assume_constant_result, without importing the compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_modes() -> AbstractContextManager[Any]:
    """A context without the dispatch modes that are active around it."""
    return _disable_current_modes()


def in_capture(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: results exist only after a replay."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# CUDA graphs hold raw pointers, and their destruction is not reported.
_captured: dict[int, Any] = {}


def keep_alive_for_cuda_graph(owner: Any, tensors: tuple[Tensor, ...]) -> None:
    """During the capture of a CUDA graph, keep ``tensors`` and their ``owner`` alive for good.

    Captures with the same tensors share one entry.
    """
    if not torch.compiler.is_compiling() and in_capture(tensors[0]):
        _captured[tensors[0].data_ptr()] = owner, tensors


def in_func() -> bool:
    """Whether a transform of torch.func is active in eager mode."""
    return not torch.compiler.is_compiling() and bool(_transforms())


def in_forward_mode() -> bool:
    """Whether forward-mode automatic differentiation is active."""
    return forward_ad._current_level >= 0


def in_transform(*xs: Tensor) -> bool:
    """Whether torch.func or torch.jit.trace is active, or one of ``xs`` is batched by autograd."""
    if torch.compiler.is_compiling():
        return _compiles_transform()
    return bool(_transforms() or in_jit_trace()) or any(is_legacy_batched(x) for x in xs)


@constant_under_compile
def _compiles_transform() -> bool:
    return bool(_transforms())


def is_exporting() -> bool:
    """Whether torch.export is active; up to torch 2.11, the public flag is true in compile too."""
    return torch.compiler._is_exporting_flag


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """No autocast on the device of ``x``; the meta device has none, and refuses the question."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def is_readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now without a device synchronisation."""
    if not x.is_cpu or is_plain(x):
        return x.is_cpu
    traced = torch.compiler.is_compiling() or _modes() != 0 or in_jit_trace()
    if traced or type(x) not in PLAIN_TYPES or is_legacy_batched(x):
        return False
    try:
        # Under vmap, item() raises: there is one value for each sample.
        x.sum().item()
    except RuntimeError:
        return False
    return True


def device_assert(ok: Tensor, text: str) -> None:
    """Raise an error with ``text`` on the device of ``ok`` if it is false, asynchronously."""
    torch._assert_async(ok, text)


def has_native_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 matrix products."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def cpu_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """SDPA's kernel for CPUs, which reads ``mask`` by its strides, and its log-sum-exp.

    q, k and v have one width. A query that sees no key gets zero, and a log-sum-exp of zero.
    """
    flash = torch._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, attn_mask=mask, scale=scale)
    return out, lse


def cpu_flash_gradients(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v for :func:`cpu_flash_attention`; its heads run in parallel."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = flash(g, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    return dq, dk, dv
