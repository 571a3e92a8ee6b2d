"""Rebuild functions of a model so that they call ours, with nothing else changed.

A rebuilt function has the code and the globals of the original. The name of a function to replace
is changed in the code to an alias, and the model's module gets an entry for that alias. Names are
still looked up at every call, so a function of the module that is replaced later takes effect.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

from posenc.interop.huggingface.probing import Known, NotUnderstood

# Names of functions that rotate, and of those among them that compute positions or rates.
_ROTATES = re.compile(r"rotary|rotate|rope")
_DOES_NOT = re.compile(r"get_rope_index|rope_(parameters|deltas|index)|_init")


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _DOES_NOT.search(name)


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
                made, inner = self.rewrite(name, value, _is_of_model(value, function))
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
            code = _renamed(function.__code__, names)
            self._rebuilt[function] = _copied(function, code, cells), gone
        return self._rebuilt[function]


# A global name that `_alias` replaces by the model's.
_theirs: Any = None


def _alias(scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> str:
    """A new name in ``scope`` that means ``ours`` for as long as ``name`` means ``theirs``."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return (ours if _theirs is theirs else _theirs)(*args, **kwargs)

    alias = f"_posenc_{name}"
    # A new function would make torch.compile recompile the models that call the old one.
    if getattr(scope.get(alias), "__wrapped__", None) is not theirs:
        code = _renamed(called.__code__, {"_theirs": name})
        made = FunctionType(code, scope, alias, None, called.__closure__)
        made.__wrapped__ = theirs  # type: ignore[attr-defined]
        scope[alias] = made
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


def _copied(function: FunctionType, code: CodeType, cells: list[CellType]) -> FunctionType:
    scope, defaults = function.__globals__, function.__defaults__
    made = FunctionType(code, scope, function.__name__, defaults, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(function.__dict__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__
    return made


def _is_function(value: Any) -> bool:
    # The `kernels` package makes a module of a decorated function.
    return isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name")


def _is_of_model(value: Any, caller: FunctionType) -> bool:
    """Whether ``value`` is code of the model, rather than of a library."""
    return value.__module__ == caller.__module__ or ".models." in (value.__module__ or "")


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
