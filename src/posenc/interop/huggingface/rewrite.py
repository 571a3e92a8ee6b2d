"""Rebuild methods of a model so that they call our functions, with nothing else changed.

A rebuilt function has the code and the globals of the original. The name of a function to replace
is changed in the code to an alias, and the model's module gets an entry for that alias. Other names
are still looked up at every call, so a function that is replaced later takes effect.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from posenc.interop.huggingface import variants
from posenc.interop.huggingface.probing import Known, NotUnderstood

# Names of functions that rotate, and of those among them that compute positions or rates.
_ROTATES = re.compile(r"rotary|rotate|rope")
_DOES_NOT = re.compile(r"get_rope_index|rope_(parameters|deltas|index)|_init")


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _DOES_NOT.search(name)


def _known(name: str, function: Any) -> Known | None:
    return variants.recognise(function) if rotates(name) else None


class Rewriter:
    """Rebuilds functions to call what ``replace`` returns for a name and function, if not None."""

    def __init__(self, replace: Callable[[str, Any], Known | None]) -> None:
        self._replace = replace
        self._rebuilt: dict[FunctionType, tuple[FunctionType, list[Any]]] = {}

    def rewrite(self, name: str, function: Any, of_model: bool = True) -> tuple[Any, list[Any]]:
        """``function`` rebuilt; and name, variant and layout of each function it no longer calls.

        Functions that it calls are rebuilt too if it is code ``of_model``, not of a library.
        """
        known = self._replace(name, function)
        if known is not None:
            return known.function, [(name, known.variant, known.layout)]
        must = rotates(name) and function.__module__ != "transformers.modeling_rope_utils"
        made, gone = function, list[Any]()
        if of_model and isinstance(function, FunctionType):
            try:
                made, gone = self._rebuild(function)
            except NotUnderstood:
                if not must:
                    raise
        if must and not gone:
            raise NotUnderstood(f"{function.__module__}.{name}")
        return made, gone

    def _rebuild(self, function: FunctionType) -> tuple[FunctionType, list[Any]]:
        if function in self._rebuilt:
            return self._rebuilt[function]
        # In a recursive function, the inner call stays the original.
        self._rebuilt[function] = function, []
        gone: list[Any] = []
        names: dict[str, str] = {}
        scope, cells = function.__globals__, list(function.__closure__ or ())
        for name in dict.fromkeys(names_in(function.__code__)):
            value = scope.get(name)
            if _is_function(value):
                home = value.__module__ or ""
                of_model = home == function.__module__ or ".models." in home
                made, inner = self.rewrite(name, value, of_model)
                if inner:
                    gone += inner
                    names[name] = _alias(scope, name, value, made)
        for i, cell in enumerate(cells):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            # The function inside a decorator is the model's, wherever the decorator comes from.
            if isinstance(value, FunctionType):
                made, inner = self.rewrite(value.__name__, value)
                if inner:
                    gone += inner
                    cells[i] = CellType(made)
        if gone:
            self._rebuilt[function] = _copied(function, names, cells), gone
        return self._rebuilt[function]


def _alias(scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> str:
    """A new name in ``scope`` for ``ours``."""
    alias = f"_posenc_{name}"
    # A function rebuilt again would make torch.compile recompile the models that call the old one.
    if getattr(scope.get(alias), "__wrapped__", None) is not theirs:
        scope[alias] = ours
    return alias


def _renamed(code: CodeType, names: dict[str, str]) -> CodeType:
    """``code`` with other global names."""
    for step in dis.get_instructions(code):
        # Globals and attributes share co_names.
        if step.opcode in dis.hasname and step.argval in names and step.opname != "LOAD_GLOBAL":
            raise NotUnderstood(f"{step.argval}, which {code.co_name} also has as an attribute,")
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            _renamed(constant, names) if isinstance(constant, CodeType) else constant
            for constant in code.co_consts
        ),
    )


def _copied(function: FunctionType, names: dict[str, str], cells: list[CellType]) -> FunctionType:
    """``function`` with other global names and cells."""
    code, scope = _renamed(function.__code__, names), function.__globals__
    made = FunctionType(code, scope, None, function.__defaults__, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def _is_function(value: Any) -> bool:
    # The `kernels` package makes a module of a decorated function.
    return isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name")


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


# An attribute that every patched module has.
PATCHED = "_posenc_patched"


class Replacement:
    """A method of ours in place of the method ``name`` of the class ``kind``.

    ``gone`` has name, variant and layout of each function that it no longer calls. It calls the
    method of the class if that was replaced since, or if the module was unpatched, because wrappers
    may still hold ours then.
    """

    def __init__(
        self,
        kind: type,
        name: str,
        ours: Callable[..., Any],
        gone: Sequence[tuple[str, str, str]],
        remake: tuple[Any, ...],
    ) -> None:
        self.kind, self.name, self.gone = kind, name, tuple(dict.fromkeys(gone))
        self._ours, self._theirs, self._remake = ours, getattr(kind, name), remake
        self._static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        functools.update_wrapper(self, self._theirs)

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run our method, or the one of the class."""
        method = getattr(self.kind, self.name)
        if method is self._theirs and hasattr(module, PATCHED):
            method = self._ours
        return method(*args, **kwargs) if self._static else method(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle cannot write functions that are made here, so loading makes them again.
        return self._remake


def of_tables(kind: type, tables: Any) -> Replacement:
    """The forward of a rotary module whose tables are ours."""
    forward = tables.forward_of(kind)
    return Replacement(kind, "forward", forward, (), (of_tables, (kind, tables)))


def _of_rotation(kind: type, name: str) -> Replacement:
    return next(one for one in replacements(kind) if one.name == name)


def replacements(kind: type) -> list[Replacement]:
    """The methods that the instances of a class need to rotate by our op."""
    found: list[Replacement] = []
    seen: dict[str, FunctionType] = {}

    for owner in kind.__mro__:
        library = owner.__module__.split(".")[0] in ("builtins", "torch", "accelerate", "peft")
        inside = owner.__module__.startswith("transformers.")
        if library or (inside and ".models." not in owner.__module__):
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if name.startswith("__") or not isinstance(function, FunctionType):
                continue
            made, gone = Rewriter(_known).rewrite(name, function)
            # An instance cannot override a method that is called by super().
            if gone and name in seen and "super" in seen[name].__code__.co_names:
                raise NotUnderstood(f"{owner.__name__}.{name}, called by super(),")
            if gone and name not in seen:
                remake = _of_rotation, (kind, name)
                found.append(Replacement(kind, name, made, gone, remake))
            seen.setdefault(name, function)
    return found
