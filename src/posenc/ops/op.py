"""An op of ``torch.ops.posenc``: defined once, and called in one way, whatever kind of call it is.

A call of an op is a NamedTuple. Its fields and their types make the schema, and they are the
arguments of every function that implements the op.

====================================  =========================================================
ordinary calls                        the implementation for the device: C; on CUDA, a plan
with a gradient                       the same, recorded by :func:`_recorded`
torch.compile, modes, DTensor         the op, by the rules registered here and in interop
samples of torch.vmap                 the op, by its rule for samples; torch operations without one
torch.func.grad, forward mode         torch operations, as in `reference.py`
torch.export, torch.jit               torch operations: they may run without this package
====================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from posenc._contract.tracing import (
    PLAIN_TYPES,
    apply_of,
    builtin_of,
    in_forward_mode,
    in_func,
    is_legacy_batched,
    is_ordinary,
    is_recorded,
    is_traced_as_operations,
    is_writable,
)
from posenc.ops import execute, native

_LIBRARY = torch.library.Library("posenc", "DEF")

# What a field of a call may be, besides a tensor, an int and a float.
Written = Annotated[Tensor, "written"]
MaybeWritten = Annotated[Tensor | None, "written"]
# An int that a compiler may keep as a symbol.
Size = Annotated[int, "SymInt"]
# Such an int that may differ between the calls of one plan.
Start = Annotated[int, "SymInt", "start"]


Call = TypeVar("Call", bound="tuple[Any, ...]")


def replaced(call: Call, fields: dict[str, Any]) -> Call:
    """The call with other values in these fields."""
    call_type: Any = type(call)
    result: Call = call_type(**{**call._asdict(), **fields})  # type: ignore[attr-defined]
    return result


class Field(NamedTuple):
    """A field of a call, as the schema of its op and the extension name it."""

    name: str
    type: str  # that of the schema, but for tensors that are written
    letter: str  # see native/plans.h
    is_tensor: bool
    is_written: bool


def fields_of(call: type) -> tuple[Field, ...]:
    """The fields of a class of calls."""
    fields = []
    for name, hint in get_type_hints(call, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        is_written = "written" in marks
        if kind in (Tensor, Tensor | None):
            text, letter = ("Tensor", "tw") if kind is Tensor else ("Tensor?", "?W")
            fields.append(Field(name, text, letter[is_written], True, is_written))
        elif kind is int:
            text = "SymInt" if "SymInt" in marks else "int"
            fields.append(Field(name, text, "s" if "start" in marks else "i", False, False))
        elif kind is float:
            fields.append(Field(name, "float", "f", False, False))
        else:
            raise TypeError(f"{call.__name__}.{name} cannot be a field of a call: {hint}")
    return tuple(fields)


def schema_of(fields: tuple[Field, ...], results: int) -> str:
    """What follows the name of an op."""
    parts, mark = [], ord("a")
    for field in fields:
        text = field.type
        if field.is_written:
            text = text.replace("Tensor", f"Tensor({chr(mark)}!)")
            mark += 1
        parts.append(f"{text} {field.name}")
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    return f"({', '.join(parts)}) -> {returned}"


class Op:
    """``posenc::name``; its functions take a call, and return a tuple of tensors.

    Args:
        name: Its name, and another one when its fields or the shapes of its results change: torch
            finds graphs that it compiled earlier, on disk, by the names of their ops.
        call: The class of its calls. The first field is a tensor.
        results: New empty results of a call, from the shapes of its tensors alone. The plan makes
            them, and so does a compiler.
        count: The number of results.
        run: The implementation where there is neither native code nor a plan. It refuses calls
            with which a kernel would access memory out of bounds.
        operations: The same as torch operations that autograd and exporters follow.
        plan: What to do on a GPU: called with the call, whose tensors are `Operand`s, a `Plan` with
            the results, and the `Target`. It refuses what ``run`` refuses, but for the start.
        has_plan: Whether a call has one; all have if this is None.
        save: Keep in ``ctx`` what ``backward`` needs; called with ``ctx``, the call, and the result
            as torch returns it, one tensor or several.
        backward: The gradients of fields by their names, of ``ctx`` and the results' gradients;
            fields that are not named get none.
        backward_call: The op and the call of the backward pass, from a call and its results: its
            kernels are compiled beside those of the first call of a kind that is recorded.
        vmap: The rule for a batch of samples, as `torch.library.register_vmap` takes it; without
            one, torch.func gets the ``operations``.
        has_cpu: Whether native code serves the CPU.
    """

    def __init__(
        self,
        name: str,
        call: Any,
        results: Callable[[Any], tuple[Tensor, ...]],
        count: int,
        run: Callable[[Any], tuple[Tensor, ...]],
        operations: Callable[[Any], tuple[Tensor, ...]],
        *,
        plan: Callable[..., None] | None = None,
        has_plan: Callable[[Any], bool] | None = None,
        save: Callable[..., None] | None = None,
        backward: Callable[..., dict[str, Tensor | None]] | None = None,
        backward_call: Callable[..., tuple[Op, tuple[Any, ...]]] | None = None,
        vmap: Callable[..., Any] | None = None,
        has_cpu: bool = True,
    ) -> None:
        self.call, self.run, self.operations, self.results = call, run, operations, results
        self.plan, self.save, self.backward, self.vmap = plan, save, backward, vmap
        self.has_plan, self.has_cpu, self.backward_call = has_plan, has_cpu, backward_call
        self.fields = fields_of(call)
        self.names = [field.name for field in self.fields]
        self.writes = [i for i, field in enumerate(self.fields) if field.is_written]
        self.tensors = [i for i, field in enumerate(self.fields) if field.is_tensor]
        schema = schema_of(self.fields, count)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, self.run_now, "CompositeExplicitAutograd")
        self.overload = getattr(torch.ops.posenc, name).default
        # Native code is behind an overload of its own: rules in Python would cost an ordinary call
        # as much as the call itself.
        _LIBRARY.define(f"{name}.plain{schema}")
        self.native = builtin_of(getattr(torch.ops.posenc, name).plain)
        if plan is not None:
            native.define_cuda(f"{name}.plain", "".join([field.letter for field in self.fields]))
        full = f"posenc::{name}"
        torch.library.register_fake(full, self._fake, lib=_LIBRARY)
        if backward is not None:
            self._record = _recorded(self, self.run_now)
            self._record_native = _recorded(self, self.native)
            torch.library.register_autograd(
                full, self._gradients, setup_context=self._save, lib=_LIBRARY
            )
        if vmap is not None:
            torch.library.register_vmap(full, vmap, lib=_LIBRARY)

    def __call__(self, *call: Any) -> Any:
        """The result, with gradients if autograd records."""
        if is_ordinary():
            requires_grad = False
            for i in self.tensors:
                if (x := call[i]) is not None:
                    if type(x) not in PLAIN_TYPES or is_legacy_batched(x):
                        break
                    requires_grad = requires_grad or x.requires_grad
            else:
                if requires_grad and torch.is_grad_enabled():
                    return self._record(*call)
                return self.run_now(*call)
        tensors = [call[i] for i in self.tensors if call[i] is not None]
        if (
            in_forward_mode()
            or is_traced_as_operations()
            or (in_func() and (self.vmap is None or is_recorded(*tensors)))
        ):
            return _as_torch(self.operations(self.call(*call)))
        return self.overload(*call)

    def run_now(self, *call: Any) -> Any:
        """The result without gradients; if native code refuses, Python takes over, or says why."""
        key = None
        if native.serves(call[0], self.has_cpu):
            try:
                return self.run_native(call)
            except RuntimeError:
                key = native.pop_missed()
        elif call[0].is_meta:
            return self.overload(*call)
        return self._run_in_python(self.call(*call), key)

    def _run_in_python(self, call: Any, key: bytes | None) -> Any:
        has_plan = call[0].is_cuda and execute.installed and self.plan is not None
        if has_plan and (self.has_plan is None or self.has_plan(call)):
            return _as_torch(execute.run(self, call, key))
        return _as_torch(self.run(call))

    def try_native(self, *call: Any) -> Any:
        """The result of native code, or None if it does not serve this call; nothing is done then.

        It serves ordinary calls of arguments that it takes as they are. The result of an op that
        returns nothing is True.
        """
        if not is_ordinary():
            return None
        recorded = False
        try:
            if torch.is_grad_enabled():
                for i in self.tensors:
                    if (x := call[i]) is not None and x.requires_grad:
                        if self.backward is None:
                            return None
                        recorded = True
                        return self._record_native(*call)
            if not self.writes:
                return self.native(*call)
            for i in self.writes:
                if call[i] is not None and not is_writable(call[i]):
                    return None
            result = self.run_native(call)
            return True if result is None else result
        except (RuntimeError, AttributeError):
            # There is no native code for the arguments, or they do not fit, or they are no tensors;
            # or a call like this one was not made before.
            if (key := native.pop_missed()) is None:
                return None
        try:
            if recorded:
                return self._record(*call)
            result = self._run_in_python(self.call(*call), key)
        except (RuntimeError, TypeError, ValueError):
            return None
        return True if result is None else result

    def quick(self, *call: Any) -> Any:
        """The same as a call; sooner if :meth:`try_native` serves it, as most of a gradient."""
        result = self.try_native(*call)
        return self(*call) if result is None else result

    def run_native(self, call: tuple[Any, ...]) -> Any:
        """The result of native code; RuntimeError if it does not serve the call."""
        result = self.native(*call)
        if self.writes:
            self.count_writes(call)
        return result

    def count_writes(self, call: tuple[Any, ...]) -> None:
        """Tell autograd what was written."""
        increment_version([call[i] for i in self.writes if call[i] is not None])

    def _fake(self, *call: Any) -> Any:
        return _as_torch(self.results(self.call(*call)))

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        assert self.save is not None
        self.save(ctx, self.call(*inputs), output)

    def _gradients(self, ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        assert self.backward is not None
        return tuple(map(self.backward(ctx, *gradients).get, self.names))


def _as_torch(results: tuple[Tensor, ...]) -> Any:
    """Results as an op of torch returns them: a tensor, several, or None."""
    return results[0] if len(results) == 1 else results or None


def _recorded(op: Op, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, an ordinary call of an op, as autograd records it.

    The rules that torch.library makes of the same functions take twice as long; they serve
    compilers.
    """
    call_of, save = op.call, cast("Callable[..., None]", op.save)

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *call: Any) -> Any:
            result = run(*call)
            save(ctx, call_of(*call), result)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return op._gradients(ctx, *gradients)

    return apply_of(Recorded, op.tensors)
