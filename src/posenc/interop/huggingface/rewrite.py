"""Rebuild methods of a model so that they call our rotation, and give them to modules.

A rebuilt function has the code and the globals of the original. In the code, the name of a function
to replace becomes an alias, which is in the globals as long as a rebuilt function needs it. Other
names are still looked up at every call, so assigning a new function to one of them takes effect.
"""

from __future__ import annotations

import dis
import functools
import importlib.util
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from posenc._contract import checks
from posenc.interop.huggingface.recognition import Match, NotUnderstood, recognise, rotates
from posenc.interop.huggingface.rotation import taking_tensors


class Rewriter:
    """Rebuilds functions to call ours wherever ``match(name, function)`` has one.

    The names of aliases begin with ``prefix``: one for each way to replace.
    """

    def __init__(self, match: Callable[[str, Any], Match | None], prefix: str = "_posenc_") -> None:
        self._match, self._prefix = match, prefix
        self._rebuilt: dict[FunctionType, tuple[FunctionType, list[Any]]] = {}

    def rewrite(self, name: str, function: Any, of_model: bool = True) -> tuple[Any, list[Any]]:
        """``function`` rebuilt, and name, variant and layout of each function that was replaced.

        Functions that it calls are rebuilt too if ``of_model``: library code stays as it is.
        """
        match = self._match(name, function)
        if match is not None:
            replaced = [(name, match.variant, match.layout)] if match.variant else []
            return match.function, replaced
        must_change = rotates(name) and function.__module__ != "transformers.modeling_rope_utils"
        result, replaced = function, []
        if of_model and isinstance(function, FunctionType):
            try:
                result, replaced = self._rebuild(function)
            except NotUnderstood:
                if not must_change:
                    raise
        if must_change and not replaced:
            raise NotUnderstood(f"{function.__module__}.{name}")
        return result, replaced

    def _rebuild(self, function: FunctionType) -> tuple[FunctionType, list[Any]]:
        if function in self._rebuilt:
            return self._rebuilt[function]
        # A recursive call still calls the original.
        self._rebuilt[function] = function, []
        replaced: list[Any] = []
        names: dict[str, str] = {}
        codes: dict[CodeType, CodeType] = {}
        aliases: list[_Alias] = []
        scope, cells = function.__globals__, list(function.__closure__ or ())
        looked_up = ((scope, name) for name in dict.fromkeys(names_in(function.__code__)))
        for home, name in (*looked_up, *_imports(function.__code__, scope)):
            value = home.get(name)
            # The `kernels` package makes a module of a decorated function.
            if isinstance(value, FunctionType) or hasattr(type(value), "kernel_layer_name"):
                source = value.__module__ or ""
                of_model = source == function.__module__ or ".models." in source
                result, inner = self.rewrite(name, value, of_model)
                replaced += inner
                if result is not value:
                    names[name] = self._prefix + name
                    aliases.append(_alias(home, names[name], value, result))
        for code in _codes(function.__code__):
            if rotates(code.co_name):
                value = _defined(code, function.__module__)
                result, inner = self.rewrite(code.co_name, value)
                name = f"{self._prefix}{code.co_name}_{code.co_firstlineno}"
                replaced += inner
                codes[code] = _calling(code, name)
                aliases.append(_alias(scope, name, value, result))
        for i, cell in enumerate(cells):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            # The function inside a decorator is the model's, wherever the decorator comes from.
            if isinstance(value, FunctionType):
                result, inner = self.rewrite(value.__name__, value)
                if inner:
                    replaced += inner
                    cells[i] = CellType(result)
        if replaced:
            code = _renamed(function.__code__, names, codes)
            defaults, closure = function.__defaults__, tuple(cells) or None
            copy = FunctionType(code, scope, None, defaults, closure)
            copy.__kwdefaults__ = function.__kwdefaults__
            functools.update_wrapper(copy, function)
            vars(copy)[_ALIASES] = aliases
            self._rebuilt[function] = copy, replaced
        return self._rebuilt[function]


class _Alias:
    """A name in ``scope``, the globals of a module, for ``ours``; it goes with this object."""

    def __init__(self, scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> None:
        self.theirs = theirs
        scope[name] = ours
        weakref.finalize(self, _remove, scope, name, ours)


def _remove(scope: dict[str, Any], name: str, ours: Any) -> None:
    # A later function may have the name.
    if scope.get(name) is ours:
        del scope[name]


# An attribute of a rebuilt function, and all that are in use, by module and name.
_ALIASES = "_posenc_aliases"
_IN_USE: weakref.WeakValueDictionary[tuple[int, str], _Alias] = weakref.WeakValueDictionary()


def _alias(scope: dict[str, Any], name: str, theirs: Any, ours: Any) -> _Alias:
    """The name ``name`` in ``scope`` for ``ours``, or for an earlier function like it."""
    alias = _IN_USE.get((id(scope), name))
    # A new function object would make torch.compile recompile the models patched earlier.
    if alias is None or alias.theirs is not theirs:
        alias = _IN_USE[id(scope), name] = _Alias(scope, name, theirs, ours)
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
    parameters = ", ".join(code.co_varnames[: code.co_argcount])
    text = f"def {code.co_name}({parameters}): return {name}({parameters})"
    return _codes(compile(text, code.co_filename, "exec"))[0]


def _renamed(code: CodeType, names: dict[str, str], codes: dict[CodeType, CodeType]) -> CodeType:
    """``code`` with other global names, and other code for the functions that it defines."""
    for step in dis.get_instructions(code):
        # Globals and attributes share co_names.
        is_attribute = step.opname not in ("LOAD_GLOBAL", "IMPORT_FROM")
        if step.opcode in dis.hasname and step.argval in names and is_attribute:
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


def names_in(code: CodeType) -> Iterator[str]:
    """Every name that ``code`` and the functions inside it look up."""
    yield from code.co_names
    for inner in _codes(code):
        yield from names_in(inner)


# Attributes of patched modules, of layers that attend by ours, and DataParallel's method.
PATCHED, EXTENSION = "_posenc_patched", "_posenc_attention"
_REPLICATE = "_replicate_for_data_parallel"
# The name of our attention in transformers' registries and in a config.
ATTENTION = "posenc"


class Replacement:
    """Our method for the method ``name`` of the class ``kind``.

    ``replaced`` has name, variant and layout of each function that was replaced; ``rebuild`` is a
    function and its arguments, which pickle calls to get this again. The class's method runs
    instead of ours if it was reassigned since, or if the module was unpatched below a wrapper.
    """

    def __init__(
        self,
        kind: type,
        name: str,
        ours: Callable[..., Any],
        rebuild: tuple[Any, ...],
        replaced: Sequence[tuple[str, str, str]] = (),
    ) -> None:
        self.kind, self.name, self.replaced = kind, name, tuple(dict.fromkeys(replaced))
        self._ours, self._theirs, self._rebuild = ours, getattr(kind, name), rebuild
        self._static = isinstance(inspect.getattr_static(kind, name), staticmethod)
        functools.update_wrapper(self, self._theirs)
        # torch.export reads this attribute of the model's forward.
        self.__code__ = ours.__code__

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run our method, or the one of the class."""
        method = getattr(self.kind, self.name)
        if method is self._theirs and hasattr(module, PATCHED):
            method = self._ours
            if EXTENSION in vars(module) and module.config._attn_implementation != ATTENTION:
                rule = f"the attention implementation must stay {ATTENTION!r}, which rotates"
                got = module.config._attn_implementation
                checks.fail("the extended model", rule, got, "Call unpatch(model) first.")
        return method(*args, **kwargs) if self._static else method(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replacement:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._rebuild


# The function of diffusers that attends, by any of many packages; they take tensors only.
_ATTENDS = "dispatch_attention_fn"


def _match(name: str, function: Any) -> Match | None:
    if name == _ATTENDS:
        return Match("", "", taking_tensors(function))
    return recognise(function) if rotates(name) else None


def _identity(name: str, function: Any) -> Match | None:
    match = recognise(function) if rotates(name) else None
    if match is None or match.identity is None:
        return None
    return match._replace(function=match.identity)


def rebuilt(kind: type, *special: str, identity: bool = False) -> dict[str, tuple[Any, list[Any]]]:
    """The methods of a class that rotate, rebuilt, and what was replaced in each.

    Methods with names such as ``__call__`` are left out, except for ``special`` ones. If
    ``identity``, the rebuilt methods do not rotate.
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
            rewriter = Rewriter(_identity, "_posenc_identity_") if identity else Rewriter(_match)
            method, replaced = rewriter.rewrite(name, function)
            # An instance cannot override a method that is called by super().
            if replaced and name in seen and "super" in seen[name].__code__.co_names:
                raise NotUnderstood(f"{owner.__name__}.{name}, called by super(),")
            if replaced and name not in seen:
                found[name] = method, replaced
            seen.setdefault(name, function)
    return found


def replacements(kind: type, *, identity: bool = False) -> list[Replacement]:
    """Replacements for the methods of a class that rotate, by ones that do not if ``identity``."""
    return [
        Replacement(kind, name, method, (_replacement, (kind, name, identity)), replaced)
        for name, (method, replaced) in rebuilt(kind, identity=identity).items()
    ]


def _replacement(kind: type, name: str, identity: bool) -> Replacement:
    return next(one for one in replacements(kind, identity=identity) if one.name == name)


def keeps_rotation(kind: type) -> bool:
    """Whether a class without replacements may rotate all the same, by code of its own.

    Such a class overrides a method that rotates, or its forward takes tables apart.
    """
    if any(rebuilt(base) for base in kind.__mro__[1:]):
        return True
    forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
    local_names = set(getattr(getattr(forward, "__code__", None), "co_varnames", ()))
    takes_tables = "position_embeddings" in inspect.signature(forward).parameters
    return takes_tables and {"cos", "sin"} <= local_names


# Attributes of our classes of processors: the class of the model, and what was replaced in it.
_THEIRS, _REPLACED = "_posenc_theirs", "_posenc_replaced"


def processor_for(module: nn.Module) -> tuple[Any, list[Any]]:
    """An attention processor of diffusers with our rotation, and what was replaced in it.

    A processor is an object that an attention module calls. Python looks ``__call__`` up in its
    class, so ours is of a subclass, and shares the attributes of the model's. None if ``module``
    has no processor that rotates.
    """
    processor = getattr(module, "processor", None)
    if not callable(processor) or isinstance(processor, type):
        return None, []
    kind = _subclass(type(processor))
    return (
        (None, [])
        if kind is None
        else (_converted(processor, kind), list(getattr(kind, _REPLACED)))
    )


def restore_processor(module: Any) -> None:
    """Let ``module`` call a processor of the model's class, if it calls one of ours."""
    processor = getattr(module, "processor", None)
    theirs = getattr(processor, _THEIRS, None)
    if theirs is not None:
        module.processor = _converted(processor, theirs)


def _converted(processor: Any, kind: type) -> Any:
    converted: Any = object.__new__(kind)
    # One dict for both: what is set on one of them, such as the backend, holds for the other.
    object.__setattr__(converted, "__dict__", vars(processor))
    return converted


# A new class for each module would be compiled again.
_SUBCLASSES: weakref.WeakValueDictionary[type, Any] = weakref.WeakValueDictionary()


def _subclass(kind: Any) -> Any:
    """A subclass of a processor's class that calls our functions; None if it does not rotate."""
    subclass = _SUBCLASSES.get(kind)
    if subclass is None and (methods := rebuilt(kind, "__call__")):
        body = {
            **{name: method for name, (method, _) in methods.items()},
            _THEIRS: kind,
            _REPLACED: tuple(dict.fromkeys(one for _, found in methods.values() for one in found)),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__reduce__": lambda self: (_new, (kind,), vars(self)),
        }
        subclass = _SUBCLASSES[kind] = type(kind.__name__, (kind,), body)
    return subclass


def _new(kind: type) -> Any:
    # Pickle cannot find a class that is made at run time, so loading makes it again.
    return object.__new__(_subclass(kind))


def attribute_for(module: nn.Module, path: str, method: Replacement) -> str:
    """The attribute of ``module`` that gets ``method``."""
    name = method.name
    # accelerate's hooks wrap forward and call the original by this name.
    if name == "forward" and "_old_forward" in vars(module):
        name = "_old_forward"
    theirs, value = getattr(method.kind, method.name), vars(module).get(name)
    if value is not None and getattr(value, "__func__", value) is not theirs:
        rule, got = f"'{path}' must have the {method.name} of its class", repr(value)[:80]
        checks.fail("patch", rule, got, "Patch before wrapping methods.")
    return name


def install(module: nn.Module, methods: dict[str, Replacement]) -> None:
    """Give ``module`` our methods, by the attributes that get them."""
    # Pickle can store a partial, but not a bound method that the class does not have.
    vars(module).update({name: partial(ours, module) for name, ours in methods.items()})
    vars(module).update({PATCHED: True, _REPLICATE: partial(_replica, module)})


def uninstall(module: nn.Module) -> None:
    """Undo `install`."""
    for name, ours in _replacements_of(module).items():
        if name == ours.name:
            del vars(module)[name]
        else:
            vars(module)[name] = MethodType(getattr(ours.kind, ours.name), module)
    del vars(module)[PATCHED], vars(module)[_REPLICATE]


def _replacements_of(module: nn.Module) -> dict[str, Replacement]:
    """The replacements among a module's attributes, except those that were wrapped since."""
    functions = {name: getattr(value, "func", None) for name, value in vars(module).items()}
    return {name: ours for name, ours in functions.items() if isinstance(ours, Replacement)}


def _replica(module: nn.Module) -> nn.Module:
    """A replica for DataParallel, whose methods are bound to the replica."""
    replica: nn.Module = type(module)._replicate_for_data_parallel(module)
    install(replica, _replacements_of(module))
    return replica
