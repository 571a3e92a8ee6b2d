"""When a call is an ordinary eager one, so that values may be read and state may be kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from posenc._contract.sharding import is_sharded

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter))
_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch
_transforms = _functorch.peek_interpreter_stack
_is_legacy_batched = _functorch.is_legacy_batchedtensor
_jit_trace = torch._C._get_tracing_state


def is_plain(*xs: Tensor) -> bool:
    """Whether ``xs`` hold their own numbers: no compiler, transform, mode or subclass around them.

    Only then may a module store a table it built for one: a traced, batched or fake table would
    outlive the trace it belongs to.
    """
    if torch.compiler.is_compiling() or _modes() != 0 or _transforms() or _jit_trace():
        return False
    for x in xs:  # noqa: SIM110 (a generator would cost as much as the rest, at every token)
        if type(x) not in PLAIN_TYPES or _is_legacy_batched(x):
            return False
    return True


def has_real_storage(*xs: Tensor) -> bool:
    """Whether ``xs`` lie where they say: as :func:`is_plain`, but a mode may look on."""
    if is_plain(*xs):
        return True
    watched = not torch.compiler.is_compiling() and not in_transform(*xs)
    return watched and all(type(x) in PLAIN_TYPES for x in xs)


def may_keep(x: Tensor) -> bool:
    """Whether a table worked out for ``x`` now may be stored.

    What is spread over processes asks for tables of plain numbers all the same.
    """
    return is_plain() if is_sharded(x) else is_plain(x)


def is_read_by(x: Tensor) -> bool:
    """Whether an operation on ``x`` may read a plain tensor beside it.

    A FakeTensor outside of a compiler refuses it, and of other subclasses nothing is known.
    """
    return type(x) in PLAIN_TYPES or torch.compiler.is_compiling() or is_sharded(x)


def fix_sizes(x: Tensor) -> Tensor:
    """``x``, whose sizes torch.compile is not to leave open, as it would a plain tensor's.

    What torch._dynamo.mark_static does, without importing the compiler for it.
    """
    x._dynamo_static_indices = set(range(x.dim()))  # type: ignore[attr-defined]
    return x


def in_capture(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured: what is computed now is there once it is replayed."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# CUDA graphs read raw addresses, and never tell when they are destroyed.
_captured: dict[int, Any] = {}


def keep_alive_for_cuda_graph(owner: Any, tensors: tuple[Tensor, ...]) -> None:
    """Keep ``tensors`` for good, and ``owner``, if a CUDA graph that reads them is being captured.

    Who finds the owner again reads the same tensors, so that captures do not add up.
    """
    if not torch.compiler.is_compiling() and in_capture(tensors[0]):
        _captured[tensors[0].data_ptr()] = owner, tensors


def in_transform(*xs: Tensor) -> bool:
    """Whether torch.func or torch.jit.trace is at work, which know torch's own operations alone.

    Tensors batched the old way are what torch.autograd.grad(is_grads_batched=True) still makes.
    """
    if torch.compiler.is_compiling():
        return _compiles_transform()
    return bool(_transforms() or _jit_trace()) or any(_is_legacy_batched(x) for x in xs)


def _compiles_transform() -> bool:
    """Whether what is compiled has a torch.func around it; asked while it is."""
    return bool(_transforms())


# What torch.compiler.assume_constant_result does, without importing the compiler for it.
_compiles_transform._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_exporting() -> bool:
    """Whether torch.export is at work; ``torch.compile`` is not.

    Within a compiled program, torch.compiler.is_exporting() is true up to torch 2.11.
    """
    return torch.compiler._is_exporting_flag


def in_jit_trace() -> bool:
    """Whether torch.jit.trace is at work."""
    return _jit_trace() is not None


def is_readable(x: Tensor) -> bool:
    """Whether the values of ``x`` can be looked at now without waiting on a device.

    Under torch.func too, unless there are several of each.
    """
    if not x.is_cpu or is_plain(x):
        return x.is_cpu
    compiling = torch.compiler.is_compiling() or _modes() != 0 or _jit_trace()
    if compiling or type(x) not in PLAIN_TYPES or _is_legacy_batched(x):
        return False
    while _functorch.is_gradtrackingtensor(x):
        x = _functorch.get_unwrapped(x)
    return not _functorch.is_functorch_wrapped_tensor(x)
