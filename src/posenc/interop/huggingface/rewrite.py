"""Functions rebuilt so that names in them mean something else, and nothing else changes.

A rebuilt function has the code and the globals of the one it was made from. A global that is to
mean something else has another name in the code, and an entry under that name in the model's own
module. So every name is looked up when it is called, and one that is replaced later is obeyed.
"""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

# Names of functions that rotate; those that only make positions or rates have other endings.
_ROTATES = re.compile(r"rotary|rotate|rope")
_DOES_NOT = re.compile(r"get_rope_index|rope_(parameters|deltas|index)|_init")


class NotUnderstood(Exception):
    """A function that rotates, in a way that none of ours does."""


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _DOES_NOT.search(name)


class Rewriter:
    """Rebuilds functions over ``replace``, which maps a rotating function to ours or to None.

    A function that none of this concerns is returned as it is. ``replaced`` gathers the functions
    that made way.
    """

    def __init__(self, replace: Callable[[Callable[..., Any]], Callable[..., Any] | None]) -> None:
        self._replace = replace
        self._rebuilt: dict[FunctionType, tuple[FunctionType, tuple[Any, ...]]] = {}

    def rewrite(self, function: FunctionType) -> tuple[FunctionType, tuple[Any, ...]]:
        """``function`` over our rotation, and the rotating functions that it no longer calls."""
        if function not in self._rebuilt:
            # A function that calls itself meets itself unchanged.
            self._rebuilt[function] = function, ()
            self._rebuilt[function] = self._rebuild(function)
        return self._rebuilt[function]

    def _rebuild(self, function: FunctionType) -> tuple[FunctionType, tuple[Any, ...]]:
        gone: list[Any] = []
        names: dict[str, str] = {}
        scope = function.__globals__
        for name in dict.fromkeys(names_in(function.__code__)):
            value = scope.get(name)
            if _is_function(value):
                near = value is not function and _is_near(value, function)
                instead = self._instead(name, value, near, gone)
                if instead is not value:
                    names[name] = _alias(scope, name, value, instead)
        cells = [self._cell(cell, gone) for cell in function.__closure__ or ()]
        if not gone:
            return function, ()
        return _copied(function, _renamed(function.__code__, names), cells), tuple(gone)

    def _cell(self, cell: CellType, gone: list[Any]) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:
            return cell
        if not isinstance(value, FunctionType):
            return cell
        # What a decorator holds is the model's own code, wherever the decorator comes from.
        instead = self._instead(value.__name__, value, True, gone)
        return cell if instead is value else CellType(instead)

    def _instead(self, name: str, value: Any, near: bool, gone: list[Any]) -> Any:
        turns = rotates(name) and value.__module__ != "transformers.modeling_rope_utils"
        if turns:
            ours = self._replace(value)
            if ours is not None:
                gone.append((name, value))
                return ours
        if near and isinstance(value, FunctionType):
            try:
                made, inner = self.rewrite(value)
            except NotUnderstood:
                if turns:
                    raise NotUnderstood(f"{value.__module__}.{name}") from None
                raise
            gone.extend(inner)
            if inner or not turns:
                return made
        if turns:
            raise NotUnderstood(f"{value.__module__}.{name}")
        return value


def rewrapped(function: Any, inner: FunctionType, ours: FunctionType) -> FunctionType:
    """The decorators that ``function`` puts around ``inner``, put around ``ours``."""
    if function is inner:
        return ours
    cells = []
    for cell in function.__closure__ or ():
        held = cell.cell_contents
        wraps = isinstance(held, FunctionType) and inspect.unwrap(held) is inner
        cells.append(CellType(rewrapped(held, inner, ours)) if wraps else cell)
    return _copied(function, function.__code__, cells)


# Stands for the name that `_alias` puts in its place.
_theirs: Any = None


def _alias(scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> str:
    """A new name in ``scope`` that means ``ours`` for as long as ``name`` means ``theirs``."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return (ours if _theirs is theirs else _theirs)(*args, **kwargs)

    alias = f"_posenc_{name}"
    # A new function would make compiled models that call the old one compile again.
    if getattr(scope.get(alias), "__wrapped__", None) is not theirs:
        code = _renamed(called.__code__, {"_theirs": name})
        made = FunctionType(code, scope, alias, None, called.__closure__)
        made.__wrapped__ = theirs  # type: ignore[attr-defined]
        scope[alias] = made
    return alias


def _renamed(code: CodeType, names: dict[str, str]) -> CodeType:
    """``code`` with other global names."""
    for step in dis.get_instructions(code):
        # Globals and attributes share one list of names.
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
    # With the `kernels` package a decorated function is a module that calls it.
    return isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name")


def _is_near(value: Any, owner: FunctionType) -> bool:
    """Whether ``value`` is code of the model, rather than of a library."""
    return value.__module__ == owner.__module__ or ".models." in (value.__module__ or "")


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
