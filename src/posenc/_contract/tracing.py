"""What kind of call this is: eager, traced, compiled, transformed or captured.

The only file that uses private names of torch; tests/_contract/test_tracing.py tries each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from posenc._contract.sharding import is_sharded

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
# torch.autograd.grad(is_grads_batched=True) still makes these.
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
in_jit_trace = torch.jit.is_tracing  # type: ignore[attr-defined]
Function = TypeVar("Function", bound=Callable[..., Any])


def is_plain(*xs: Tensor) -> bool:
    """Whether ``xs`` hold their own numbers: no compiler, transform, mode or subclass around them.

    Only then may a module store a table it built for one: a traced, batched or fake table would
    outlive the trace it belongs to.
    """
    if torch.compiler.is_compiling() or _modes() != 0 or _transforms() or in_jit_trace():
        return False
    for x in xs:  # noqa: SIM110 (a generator would cost as much as the rest, at every token)
        if type(x) not in PLAIN_TYPES or _is_legacy_batched(x):
            return False
    return True


def has_real_storage(*xs: Tensor) -> bool:
    """Whether ``data_ptr()`` of ``xs`` is meaningful; dispatch modes are allowed."""
    if is_plain(*xs):
        return True
    eager = not torch.compiler.is_compiling() and not in_transform(*xs)
    return eager and all(type(x) in PLAIN_TYPES for x in xs)


def may_keep(x: Tensor) -> bool:
    """Whether a table that is built for ``x`` now may be stored; a DTensor's table is plain."""
    return is_plain() if is_sharded(x) else is_plain(x)


def is_read_by(x: Tensor) -> bool:
    """Whether an operation on ``x`` may read a plain tensor beside it.

    A FakeTensor refuses it outside a compiler, and other subclasses may too.
    """
    return type(x) in PLAIN_TYPES or torch.compiler.is_compiling() or is_sharded(x)


def fix_sizes(x: Tensor) -> Tensor:
    """Keep torch.compile from making the sizes of ``x`` dynamic.

    This is torch._dynamo.mark_static, without the import of the compiler.
    """
    x._dynamo_static_indices = set(range(x.dim()))  # type: ignore[attr-defined]
    return x


def constant_under_compile(function: Function) -> Function:
    """Let torch.compile call ``function`` while it traces, and take the result as a constant.

    This is torch.compiler.assume_constant_result, without the import of the compiler.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def without_modes() -> AbstractContextManager[Any]:
    """A context in which tensors are real, whatever dispatch modes are active around it."""
    return _disable_current_modes()


def in_capture(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: results exist once the graph is replayed."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# CUDA graphs hold raw pointers, and never tell when they are destroyed.
_captured: dict[int, Any] = {}


def keep_alive_for_cuda_graph(owner: Any, tensors: tuple[Tensor, ...]) -> None:
    """Keep ``tensors`` and ``owner`` for good if a CUDA graph that reads them is being captured.

    Captures that find the same owner read the same tensors, so they do not add up.
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
    return bool(_transforms() or in_jit_trace()) or any(_is_legacy_batched(x) for x in xs)


@constant_under_compile
def _compiles_transform() -> bool:
    return bool(_transforms())


def is_exporting() -> bool:
    """Whether torch.export is active; ``torch.compile`` is not.

    Within a compiled program, torch.compiler.is_exporting() is true up to torch 2.11.
    """
    return torch.compiler._is_exporting_flag


def is_readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be read now without waiting on a device."""
    if not x.is_cpu or is_plain(x):
        return x.is_cpu
    traced = torch.compiler.is_compiling() or _modes() != 0 or in_jit_trace()
    if traced or type(x) not in PLAIN_TYPES or _is_legacy_batched(x):
        return False
    try:
        # torch.func.vmap refuses: there is one value for each sample. Other transforms have one.
        x.sum().item()
    except RuntimeError:
        return False
    return True


def device_assert(ok: Tensor, text: str) -> None:
    """Stop with ``text`` unless ``ok``, on its device, without waiting for the answer."""
    torch._assert_async(ok, text)


def view_base(x: Tensor) -> Tensor | None:
    """The tensor that ``x`` is a view of, as autograd records it."""
    return x._base


def has_native_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def dynamo() -> tuple[Any, Any]:
    """The settings and the exceptions of torch.compile, which are imported here."""
    from torch._dynamo import config, exc

    return config, exc
