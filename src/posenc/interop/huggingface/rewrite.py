"""Rebuild methods of a model so that they call our functions, with nothing else changed.

A rebuilt function has the code and the globals of the original. In the code, the name of a function
to replace becomes an alias, which is added to the globals. Other names are still looked up at every
call, so assigning a new function to one of them takes effect.
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

# Names of functions that rotate, and exceptions that compute positions or rates.
_ROTATES = re.compile(r"rotary|rotate|rope")
_EXCEPTIONS = re.compile(r"get_rope_index|rope_(parameters|deltas|index)|_init")


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _EXCEPTIONS.search(name)


def _known(name: str, function: Any) -> Known | None:
    return variants.recognise(function) if rotates(name) else None


class Rewriter:
    """Rebuilds functions to call a replacement wherever ``replace(name, function)`` has one."""

    def __init__(self, replace: Callable[[str, Any], Known | None]) -> None:
        self._replace = replace
        self._rebuilt: dict[FunctionType, tuple[FunctionType, list[Any]]] = {}

    def rewrite(self, name: str, function: Any, of_model: bool = True) -> tuple[Any, list[Any]]:
        """``function`` rebuilt, and name, variant and layout of each function that was replaced.

        Functions that it calls are rebuilt too if ``of_model``: library code stays as it is.
        """
        known = self._replace(name, function)
        if known is not None:
            return known.function, [(name, known.variant, known.layout)]
        must_change = rotates(name) and function.__module__ != "transformers.modeling_rope_utils"
        made, replaced = function, list[Any]()
        if of_model and isinstance(function, FunctionType):
            try:
                made, replaced = self._rebuild(function)
            except NotUnderstood:
                if not must_change:
                    raise
        if must_change and not replaced:
            raise NotUnderstood(f"{function.__module__}.{name}")
        return made, replaced

    def _rebuild(self, function: FunctionType) -> tuple[FunctionType, list[Any]]:
        if function in self._rebuilt:
            return self._rebuilt[function]
        # A recursive call still calls the original.
        self._rebuilt[function] = function, []
        replaced: list[Any] = []
        names: dict[str, str] = {}
        scope, cells = function.__globals__, list(function.__closure__ or ())
        for name in dict.fromkeys(names_in(function.__code__)):
            value = scope.get(name)
            # The `kernels` package makes a module of a decorated function.
            if isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name"):
                home = value.__module__ or ""
                of_model = home == function.__module__ or ".models." in home
                made, inner = self.rewrite(name, value, of_model)
                if inner:
                    replaced += inner
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
                    replaced += inner
                    cells[i] = CellType(made)
        if replaced:
            self._rebuilt[function] = _copied(function, names, cells), replaced
        return self._rebuilt[function]


def _alias(scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> str:
    """A new name in ``scope`` for ``ours``."""
    alias = f"_posenc_{name}"
    # A new function object would make torch.compile recompile the models patched earlier.
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


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


# An attribute that every patched module has.
PATCHED = "_posenc_patched"


class Replacement:
    """Our method for the method ``name`` of the class ``kind``.

    ``replaced`` has name, variant and layout of each function that was replaced. The class's method
    runs instead if it was reassigned since, or if the module was unpatched below a wrapper.
    """

    def __init__(
        self,
        kind: type,
        name: str,
        ours: Callable[..., Any],
        replaced: Sequence[tuple[str, str, str]],
        remake: tuple[Any, ...],
    ) -> None:
        self.kind, self.name, self.replaced = kind, name, tuple(dict.fromkeys(replaced))
        self._ours, self._theirs, self._remake = ours, getattr(kind, name), remake
        self._static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        functools.update_wrapper(self, self._theirs)
        # torch.export reads this of the model that it is given.
        self.__code__ = ours.__code__

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run our method, or the one of the class."""
        method = getattr(self.kind, self.name)
        if method is self._theirs and hasattr(module, PATCHED):
            method = self._ours
        return method(*args, **kwargs) if self._static else method(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle cannot store functions that are built at run time, so loading rebuilds them.
        return self._remake


def rotary_forward(kind: type, tables: Any) -> Replacement:
    """The forward of a rotary module whose tables are ours."""
    forward = tables.forward_of(kind)
    return Replacement(kind, "forward", forward, (), (rotary_forward, (kind, tables)))


def _replacement_of(kind: type, name: str) -> Replacement:
    return next(one for one in replacements(kind) if one.name == name)


def replacements(kind: type) -> list[Replacement]:
    """Replacements for the methods of a class that rotate."""
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
            made, replaced = Rewriter(_known).rewrite(name, function)
            # An instance cannot override a method that is called by super().
            if replaced and name in seen and "super" in seen[name].__code__.co_names:
                raise NotUnderstood(f"{owner.__name__}.{name}, called by super(),")
            if replaced and name not in seen:
                remake = _replacement_of, (kind, name)
                found.append(Replacement(kind, name, made, replaced, remake))
            seen.setdefault(name, function)
    return found
