"""Methods of patched modules that replace those of their classes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from posenc.interop.huggingface import variants
from posenc.interop.huggingface.probing import Known, NotUnderstood
from posenc.interop.huggingface.rewrite import Rewriter, rotates
from posenc.interop.huggingface.tables import Tables

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
        gone: Sequence[tuple[str, str, str]] = (),
        tables: Tables | None = None,
    ) -> None:
        self.kind, self.name, self.gone = kind, name, tuple(dict.fromkeys(gone))
        self._ours, self._theirs, self._tables = ours, getattr(kind, name), tables
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
        return _rebuilt, (self.kind, self.name, self._tables)


def _rebuilt(kind: type, name: str, tables: Tables | None) -> Replacement:
    if tables is not None:
        return of_tables(kind, tables)
    return next(one for one in replacements(kind) if one.name == name)


def of_tables(kind: type, tables: Tables) -> Replacement:
    """The forward of a rotary module whose tables are ours."""
    return Replacement(kind, "forward", tables.forward_of(kind), tables=tables)


def replacements(kind: type) -> list[Replacement]:
    """The methods that the instances of a class need to rotate by our op."""
    found: list[Replacement] = []
    seen: dict[str, FunctionType] = {}

    def ours_for(name: str, function: Callable[..., Any]) -> Known | None:
        return variants.recognise(function) if rotates(name) else None

    for owner in kind.__mro__:
        library = owner.__module__.split(".")[0] in ("builtins", "torch", "accelerate", "peft")
        inside = owner.__module__.startswith("transformers.")
        if library or (inside and ".models." not in owner.__module__):
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            if name.startswith("__") or not isinstance(function, FunctionType):
                continue
            made, gone = Rewriter(ours_for).rewrite(name, function)
            # An instance cannot override a method that is called by super().
            if gone and name in seen and "super" in seen[name].__code__.co_names:
                raise NotUnderstood(f"{owner.__name__}.{name}, called by super(),")
            if gone and name not in seen:
                found.append(Replacement(kind, name, made, gone))
            seen.setdefault(name, function)
    return found
