"""Norms of queries and keys that are computed with the rotation: which, found by trying.

A norm is compared with ours on random numbers. Its attention is then run without memory, on the
meta device, to see whether what the norm returns is what is rotated.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc import kernels
from posenc.interop.huggingface import diffusion
from posenc.interop.huggingface.pending import NormCall, Pending
from posenc.interop.huggingface.probing import FAILURES, WIDEN, same
from posenc.interop.huggingface.rewrite import PATCHED, Replacement

# The argument of an attention in transformers that has its cosines and sines.
_TABLES = "position_embeddings"
# Such arguments of an attention processor in diffusers.
_TURNS = re.compile("rotary|freqs|rope")


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one module that rotates.

    Attributes:
        module: Path of the module in the model.
        cls: Its class; that of its attention processor in a model of diffusers.
        fused: Names of its norms that are computed with the rotation, in one kernel; in a call
            that does not rotate, on their own.
        others: Names of the others, and why each still runs on its own.
    """

    module: str
    cls: str
    fused: tuple[str, ...]
    others: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        said = [f"{', '.join(self.fused)} fused"] * bool(self.fused)
        said += [f"{name} not fused: {why}" for name, why in self.others]
        return f"{self.module} ({self.cls}): norms [{'; '.join(said)}]"


# A new function object for each norm would make torch.compile compile each layer on its own.
@functools.cache
def norm_forward(kind: Any, eps: float, shift: float) -> Replacement:
    """The forward of an RMSNorm whose result waits for the rotation."""
    theirs = kind.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or _has_hooks(module):
            return theirs(module, *args, **kwargs)
        weight = module.weight
        # Of two dtypes, the model's result has the wider one in some families.
        if x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            return theirs(module, x)
        return Pending(NormCall(partial(theirs, module), x, weight, eps, shift), x)

    return Replacement(kind, "forward", forward, (), (norm_forward, (kind, eps, shift)))


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks see the result of a norm, or take its weight away after the call."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    # Those of accelerate and of diffusers wrap the forward.
    return bool(hooks) or hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")


def plan(
    path: str, module: nn.Module, methods: Sequence[Replacement], processor: Any = None
) -> tuple[list[tuple[nn.Module, Replacement]], list[Norms]]:
    """What to fuse in a module that rotates by ``methods`` or by a ``processor`` of diffusers.

    Returns norms with our forwards, and a report.
    """
    known: dict[str, Replacement] = {}
    others: dict[str, str] = {}
    for name, norm in module.named_children():
        kind: Any = type(norm)
        if "norm" not in kind.__name__.lower():
            continue
        if _has_hooks(norm) or "forward" in vars(norm):
            others[name] = "it has hooks, or a forward of its own"
        elif (formula := _formula(norm)) is None:
            others[name] = "it is no RMSNorm with a weight"
        else:
            known[name] = norm_forward(kind, *formula)
    why, rotated = "no rotation took its result as it is, in a trial", set[str]()
    # In diffusers, such a module has the processor of the others, but gets no tables.
    if processor is not None and getattr(module, "is_cross_attention", False):
        why = "it is of attention to other tokens, which does not rotate"
    elif known and processor is not None:
        rotated = _rotated_by(processor, module, known)
    elif known:
        rotated = _rotated(module, methods, known)
    fused = tuple(name for name in known if name in rotated)
    others |= {name: why for name in known if name not in rotated}
    cls = type(module if processor is None else processor).__name__
    report = [Norms(path, cls, fused, tuple(others.items()))]
    ours = [(module.get_submodule(name), known[name]) for name in fused]
    return ours, report if known or others else []


def _formula(module: nn.Module) -> tuple[float, float] | None:
    """``eps`` and ``shift`` of an RMSNorm, found among its attributes; None if it is another."""
    held = dict(module.named_parameters())
    if list(held) != ["weight"] or held["weight"].dim() != 1 or any(True for _ in module.buffers()):
        return None
    made = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"), torch.no_grad(), contextlib.suppress(*FAILURES):
        one = _copy(module, "cpu")
        weight = one.weight.normal_(generator=made)
        x = torch.randn(3, weight.shape[0], generator=made, dtype=torch.float32)
        # eps hardly shows in numbers around one.
        x *= torch.tensor([[1.0], [1e-3], [30.0]])
        expected = one(x)
        still = torch.ones(3, 1), torch.zeros(3, 1)
        for eps in {value for value in vars(module).values() if isinstance(value, float)}:
            for shift in (0.0, 1.0):
                norm = kernels.Norm(eps, shift)
                got = kernels.norm_rotate(
                    x[None, None], weight, *still, kernels.Rows(), kernels.Spec(), norm
                )
                if same(got[0, 0], expected):
                    return eps, shift
    return None


def _rotated(
    module: nn.Module, methods: Sequence[Replacement], known: dict[str, Replacement]
) -> set[str]:
    """Names of the norms whose results are rotated as they are, whenever the module runs."""
    form = methods[0].replaced[0][1].split(",")[0]
    for lead in ((1, 2), (2,)):
        table = WIDEN.get(form, WIDEN["doubled"])(torch.empty(*lead, 1, device="meta"))
        tables = torch.complex(table, table) if form == "complex" else (table, table)
        given = _arguments(module, type(module).forward, lead) | {_TABLES: tables}
        taken = _tried(module, methods, known, given)
        fused = {name for name, is_fused in taken.items() if is_fused}
        if fused:
            # Some models get no tables in layers that do not rotate.
            return fused - _tried(module, methods, known, given | {_TABLES: None}).keys()
    return set()


def _rotated_by(processor: Any, module: nn.Module, known: dict[str, Replacement]) -> set[str]:
    """Names of the norms whose results a processor rotates as they are, in calls with tables."""
    kind, given = type(processor), _arguments(module, processor.__call__, (1, 2))
    names = [one for one in inspect.signature(kind.__call__).parameters if _TURNS.search(one)]

    def fused(tables: Any) -> dict[str, bool]:
        return _tried(module, [], known, given | dict.fromkeys(names, tables), processor)

    # Norms that are computed before the tables are read are not rotated as they are.
    if len(fused(object())) == len(known):
        return set()
    forms = [_taken[kind]] if kind in _taken else list(_forms())
    results = [{name for name, is_fused in fused(form).items() if is_fused} for form in forms]
    best = max(results, key=len)
    if best:
        _taken[kind] = forms[results.index(best)]
    return best


# Tables in the form that a class of processors takes, once one of its modules was tried.
_taken: dict[type, Any] = {}


def _forms() -> Iterator[Any]:
    """Tables of two tokens in all forms that processors get: of one stream, two, or in a dict."""
    for packed in (lambda x: x, lambda x: (x, x), lambda x: {"query": x, "key": x}):
        for form in diffusion.forms(("freqs",)):
            for rows in ((2,), (1, 2), (1, 2, 1), (1, 1, 2)):
                table = torch.empty(*rows, 2, device="meta")
                yield packed(*form.pack(table, table))


class _Decided(Exception):
    """It is known of each norm whether it was fused."""


def _tried(
    module: nn.Module,
    methods: Sequence[Replacement],
    known: dict[str, Replacement],
    given: dict[str, Any],
    processor: Any = None,
) -> dict[str, bool]:
    """The norms whose results were used in a run of a copy, and whether a rotation took them."""
    fused: dict[str, bool] = {}

    def decided(name: str, is_fused: bool) -> None:
        fused[name] = is_fused or fused.get(name, False)
        if len(fused) == len(known):
            raise _Decided

    def watched(name: str, norm: nn.Module, x: Tensor) -> Any:
        made = known[name](norm, x)
        if isinstance(made, Pending):
            made.call.decided = partial(decided, name)
        return made

    # The model's code may fail in any way, as some of its arguments are None.
    with torch.device("meta"), torch.no_grad(), contextlib.suppress(Exception):
        one = _copy(module, "meta")
        vars(one).update({method.name: partial(method, one) for method in methods})
        for name in known:
            norm = one.get_submodule(name)
            vars(norm)["forward"] = partial(watched, name, norm)
        one(**given) if processor is None else processor(one, **given)
    return fused


def _arguments(module: Any, attend: Any, lead: tuple[int, ...]) -> dict[str, Any]:
    """Arguments for ``attend``, after ``module``: hidden states, and None for what it needs."""
    widths = [one.in_features for one in module.modules() if hasattr(one, "in_features")]
    given: dict[str, Any] = {}
    for p in list(inspect.signature(attend).parameters.values())[1:]:
        if p.name.endswith("hidden_states"):
            given[p.name] = torch.empty(*lead, *widths[:1], device="meta")
        elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            given[p.name] = None
    return given


class _Linear(nn.Linear):
    """Any linear layer, for states of any width: those of a second stream may have another."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.out_features))


def _copy(module: Any, device: str) -> Any:
    """A float32 copy for our methods, without values and hooks."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return _Linear(module.in_features, module.out_features, dtype=torch.float32)
    made: nn.Module = object.__new__(type(module))
    nn.Module.__init__(made)
    left_out = {*vars(made), "forward", "_old_forward", "_hf_hook"}
    vars(made).update({name: v for name, v in vars(module).items() if name not in left_out})
    for name, weight in module._parameters.items():
        made.register_parameter(name, weight if weight is None else _empty(weight, device))
    for name, buffer in module._buffers.items():
        made.register_buffer(name, buffer if buffer is None else _empty(buffer, device))
    for name, child in module._modules.items():
        made.add_module(name, child if child is None else _copy(child, device))
    vars(made)[PATCHED] = True
    return made.eval()


def _empty(x: Tensor, device: str) -> nn.Parameter:
    dtype = torch.float32 if x.is_floating_point() else x.dtype
    return nn.Parameter(torch.empty(x.shape, dtype=dtype, device=device), requires_grad=False)
