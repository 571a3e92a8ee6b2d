"""Rebuild methods of a model so that they call our functions, with nothing else changed.

A rebuilt function has the code and the globals of the original. In the code, the name of a function
to replace becomes an alias, which is added to the globals. Other names are still looked up at every
call, so assigning a new function to one of them takes effect.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CellType, CodeType, FunctionType
from typing import Any

from posenc._contract import checks
from posenc.interop.huggingface import variants
from posenc.interop.huggingface.pending import taking_tensors
from posenc.interop.huggingface.probing import Known, NotUnderstood

# Names of functions that rotate, and exceptions that compute positions, rates or tables.
_ROTATES = re.compile(r"rotary|rotate|rope")
_EXCEPTIONS = re.compile(
    r"rope_(parameters|deltas|index|params|freqs)|rotary_freqs|_init|propert|^rope$"
    r"|^_?(get|build|create|pad|prepare|slice|store|pre)_|_mrope$"
)

# The function of diffusers that attends, by any of many packages; they take tensors only.
_ATTENDS = "dispatch_attention_fn"


def rotates(name: str) -> bool:
    """Whether a function's name says that it rotates."""
    return bool(_ROTATES.search(name)) and not _EXCEPTIONS.search(name)


def _known(name: str, function: Any) -> Known | None:
    if name == _ATTENDS:
        return Known("", "", taking_tensors(function))
    return variants.recognise(function) if rotates(name) else None


def _still(name: str, function: Any) -> Known | None:
    return variants.recognise(function, still=True) if rotates(name) else None


class Rewriter:
    """Rebuilds functions to call a replacement wherever ``replace(name, function)`` has one.

    The names of replacements begin with ``prefix``: one for each way to replace.
    """

    def __init__(
        self, replace: Callable[[str, Any], Known | None], prefix: str = "_posenc_"
    ) -> None:
        self._replace, self._prefix = replace, prefix
        self._rebuilt: dict[FunctionType, tuple[FunctionType, list[Any]]] = {}

    def rewrite(self, name: str, function: Any, of_model: bool = True) -> tuple[Any, list[Any]]:
        """``function`` rebuilt, and name, variant and layout of each function that was replaced.

        Functions that it calls are rebuilt too if ``of_model``: library code stays as it is.
        """
        known = self._replace(name, function)
        if known is not None:
            rotated = [(name, known.variant, known.layout)] if known.variant else []
            return known.function, rotated
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
        codes: dict[CodeType, CodeType] = {}
        scope, cells = function.__globals__, list(function.__closure__ or ())
        looked_up = ((scope, name) for name in dict.fromkeys(names_in(function.__code__)))
        for home, name in (*looked_up, *_imports(function.__code__, scope)):
            value = home.get(name)
            # The `kernels` package makes a module of a decorated function.
            if isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name"):
                source = value.__module__ or ""
                of_model = source == function.__module__ or ".models." in source
                made, inner = self.rewrite(name, value, of_model)
                replaced += inner
                if made is not value:
                    names[name] = _alias(home, self._prefix + name, value, made)
        for code in _codes(function.__code__):
            if rotates(code.co_name):
                value = _defined(code, function.__module__)
                made, inner = self.rewrite(code.co_name, value)
                name = f"{self._prefix}{code.co_name}_{code.co_firstlineno}"
                alias = _alias(scope, name, value, made)
                replaced += inner
                codes[code] = _calling(code, alias)
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
            self._rebuilt[function] = _copied(function, names, codes, cells), replaced
        return self._rebuilt[function]


def _alias(scope: dict[str, Any], alias: str, theirs: Any, ours: Any) -> str:
    """A new name in ``scope`` for ``ours``."""
    # A new function object would make torch.compile recompile the models patched earlier.
    if getattr(scope.get(alias), "__wrapped__", None) is not theirs:
        scope[alias] = ours
    return alias


def _imports(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Rotating functions that ``code`` imports: the names of their module, and each name."""
    home: dict[str, Any] = {}
    steps = list(dis.get_instructions(code)) if any(map(rotates, code.co_names)) else []
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            # The level of a relative import is loaded two steps before, and its names in between.
            relative = "." * steps[i - 2].argval + step.argval
            name = importlib.util.resolve_name(relative, scope.get("__package__"))
            home = vars(sys.modules[name]) if name in sys.modules else {}
        elif step.opname == "IMPORT_FROM" and rotates(step.argval):
            yield home, step.argval


# A new function object for each patch would be tried again, and compiled again.
@functools.cache
def _defined(code: CodeType, module: str) -> FunctionType:
    """The function that another one in ``module`` defines by ``code``."""
    if code.co_freevars:
        raise NotUnderstood(f"{module}.{code.co_name}, which has variables of another function,")
    return FunctionType(code, vars(sys.modules[module]))


@functools.cache
def _calling(code: CodeType, name: str) -> CodeType:
    """The code of a function with the parameters of ``code`` that calls the global ``name``."""
    given = ", ".join(code.co_varnames[: code.co_argcount])
    text = f"def {code.co_name}({given}): return {name}({given})"
    return _codes(compile(text, code.co_filename, "exec"))[0]


def _renamed(code: CodeType, names: dict[str, str], codes: dict[CodeType, CodeType]) -> CodeType:
    """``code`` with other global names, and other code for the functions that it defines."""
    for step in dis.get_instructions(code):
        # Globals and attributes share co_names.
        own = step.opname in ("LOAD_GLOBAL", "IMPORT_FROM")
        if step.opcode in dis.hasname and step.argval in names and not own:
            raise NotUnderstood(f"{step.argval}, which {code.co_name} also has as an attribute,")
    inner = {c: codes.get(c) or _renamed(c, names, {}) for c in _codes(code)}
    return code.replace(
        co_names=tuple(names.get(name, name) for name in code.co_names),
        co_consts=tuple(
            inner[constant] if isinstance(constant, CodeType) else constant
            for constant in code.co_consts
        ),
    )


def _codes(code: CodeType) -> list[CodeType]:
    """Code of the functions that ``code`` defines."""
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _copied(
    function: FunctionType,
    names: dict[str, str],
    codes: dict[CodeType, CodeType],
    cells: list[CellType],
) -> FunctionType:
    """``function`` with other global names, functions of its own, and cells."""
    code, scope = _renamed(function.__code__, names, codes), function.__globals__
    made = FunctionType(code, scope, None, function.__defaults__, tuple(cells) or None)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for inner in _codes(code):
        yield from names_in(inner)


# An attribute that every patched module has, and one of layers that attend by ours: what does.
PATCHED, HELD = "_posenc_patched", "_posenc_attention"
# The name of our attention in transformers' registries and in a config.
ATTENTION = "posenc"


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
            if HELD in vars(module) and module.config._attn_implementation != ATTENTION:
                rule = f"the attention implementation must stay {ATTENTION!r}, which rotates"
                got = module.config._attn_implementation
                checks.fail("the extended model", rule, got, "Call unpatch(model) first.")
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


def _replacement_of(kind: type, name: str, still: bool = False) -> Replacement:
    return next(one for one in replacements(kind, still=still) if one.name == name)


def replacements(kind: type, *, still: bool = False) -> list[Replacement]:
    """Replacements for the methods of a class that rotate, by ones that do not if ``still``."""
    return [
        Replacement(kind, name, made, replaced, (_replacement_of, (kind, name, still)))
        for name, (made, replaced) in rebuilt(kind, still=still).items()
    ]


def keeps_rotation(kind: type) -> bool:
    """Whether a class without replacements may rotate all the same, by code of its own.

    Such a class overrides a method that rotates, or its forward takes tables apart.
    """
    if any(rebuilt(base) for base in kind.__mro__[1:]):
        return True
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    given, code = inspect.signature(forward).parameters, getattr(forward, "__code__", None)
    return "position_embeddings" in given and {"cos", "sin"} <= set(
        getattr(code, "co_varnames", ())
    )


def rebuilt(kind: type, *special: str, still: bool = False) -> dict[str, tuple[Any, list[Any]]]:
    """The methods of a class that rotate, rebuilt, and what was replaced in each.

    Methods with names such as ``__call__`` are left out, except for ``special`` ones.
    """
    found: dict[str, tuple[Any, list[Any]]] = {}
    seen: dict[str, FunctionType] = {}
    for owner in kind.__mro__:
        library = owner.__module__.split(".")[0] in ("builtins", "torch", "accelerate", "peft")
        inside = owner.__module__.startswith(("transformers.", "diffusers."))
        if library or (inside and ".models." not in owner.__module__):
            continue
        for name, value in vars(owner).items():
            function = value.__func__ if isinstance(value, staticmethod) else value
            left_out = name.startswith("__") and name not in special
            if left_out or not isinstance(function, FunctionType):
                continue
            rewriter = Rewriter(_still, "_posenc_still_") if still else Rewriter(_known)
            made, replaced = rewriter.rewrite(name, function)
            # An instance cannot override a method that is called by super().
            if replaced and name in seen and "super" in seen[name].__code__.co_names:
                raise NotUnderstood(f"{owner.__name__}.{name}, called by super(),")
            if replaced and name not in seen:
                found[name] = made, replaced
            seen.setdefault(name, function)
    return found
