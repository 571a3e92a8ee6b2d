"""The methods that a patched module calls instead of those of its class."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

from posenc._contract import checks
from posenc.interop.huggingface import variants
from posenc.interop.huggingface.rewrite import NotUnderstood, Rewriter, rotates
from posenc.interop.huggingface.tables import Tables

# The attribute of a module that holds its replacements for as long as it is patched.
RECORD = "_posenc_patch"


@dataclass(frozen=True, slots=True, eq=False)
class Replacement:
    """A method for instances of a class, and the functions that it no longer calls.

    Attributes:
        kind: The class.
        name: The method's name there.
        function: Ours. It calls the method of the class if that was replaced since, or if the
            module is not patched any more.
        bound: Whether it takes the instance; static methods do not.
        gone: Name, variant and layout of each function that made way.
        tables: What it makes, if it is the forward of a rotary module.
    """

    kind: type
    name: str
    function: Callable[..., Any]
    bound: bool = True
    gone: tuple[tuple[str, str, str], ...] = ()
    tables: Tables | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions made here have no name to be found by, and are made again where they are loaded.
        return _again, (self.kind, self.name, self.tables)


def _again(kind: type, name: str, tables: Tables | None) -> Replacement:
    if tables is not None:
        return of_tables(kind, tables)
    return next(one for one in replacements(kind) if one.name == name)


def of_tables(kind: type, tables: Tables) -> Replacement:
    """The forward of a rotary module whose tables are ours."""
    function = _while_patched(kind, "forward", tables.forward_of(kind), True)
    return Replacement(kind, "forward", function, tables=tables)


def replacements(kind: type, path: str = "") -> list[Replacement]:
    """What the instances of a class need to rotate by our op."""
    found: dict[str, Replacement] = {}
    seen: dict[str, Any] = {}
    for owner in kind.__mro__:
        library = owner.__module__.split(".")[0] in ("builtins", "torch", "accelerate", "peft")
        inside = owner.__module__.startswith("transformers.")
        if library or (inside and ".models." not in owner.__module__):
            continue
        for name, value in vars(owner).items():
            static = isinstance(value, staticmethod)
            function = value.__func__ if static else value
            if name.startswith("__") or not isinstance(function, FunctionType):
                continue
            method = _method(name, function, not static, kind, path)
            if name in seen:
                # A method behind another is reached by super(), which no instance overrides.
                if method is not None and "super" in seen[name].__code__.co_names:
                    refuse(kind, path, f"{owner.__name__}.{name}, called by super()")
                continue
            seen[name] = function
            if method is not None:
                found[name] = method
    return list(found.values())


def _method(
    name: str, function: FunctionType, bound: bool, kind: type, path: str
) -> Replacement | None:
    if rotates(name):
        known = variants.recognise(function)
        if known is not None:
            ours = _while_patched(kind, name, known.function, bound)
            return Replacement(kind, name, ours, bound, ((name, known.variant, known.layout),))
    rewriter = Rewriter(_ours)
    try:
        made, replaced = rewriter.rewrite(function)
    except NotUnderstood as error:
        refuse(kind, path, str(error))
    if replaced:
        gone = tuple(dict.fromkeys(_described(*one) for one in replaced))
        return Replacement(kind, name, _while_patched(kind, name, made, bound), bound, gone)
    if rotates(name):
        refuse(kind, path, f"the method {name}")
    return None


def _while_patched(
    kind: type, name: str, ours: Callable[..., Any], bound: bool
) -> Callable[..., Any]:
    """``ours`` while the class has the method that it has now and the module is patched."""
    theirs = getattr(kind, name)

    @functools.wraps(theirs)
    def method(*args: Any, **kwargs: Any) -> Any:
        now = getattr(kind, name)
        patched = now is theirs and (not bound or hasattr(args[0], RECORD))
        return (ours if patched else now)(*args, **kwargs)

    return method


def _ours(original: Callable[..., Any]) -> Callable[..., Any] | None:
    known = variants.recognise(original)
    return None if known is None else known.function


def _described(name: str, original: Callable[..., Any]) -> tuple[str, str, str]:
    known = variants.recognise(original)
    assert known is not None
    return name, known.variant, known.layout


def refuse(kind: type, path: str, what: str) -> NoReturn:
    """Raise the error that names what rotates and is not understood."""
    rule = "every function that rotates must be one that is understood"
    got = f"{what} in {kind.__module__}.{kind.__name__} at '{path}'"
    raise ValueError(checks.message("patch", rule, got, "The model is left as it was."))
