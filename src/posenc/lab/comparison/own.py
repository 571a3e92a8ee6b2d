"""An encoding of the user's own: a class in a file, which is executed to load it."""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import traceback
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from posenc.lab.comparison.plan import Plan

FORM = "FILE.py:CLASS"
# By the number of arguments of a call: m(x), m(q, k) or m(q, k, v).
_ACTS_ON: dict[int, Literal["input", "queries and keys", "scores"]] = {
    1: "input",
    2: "queries and keys",
    3: "scores",
}


def is_own(name: str) -> bool:
    """Whether this is a class in a file, and not the name of a built-in encoding."""
    return ":" in name


def absolute(name: str) -> str:
    """The same class, found from every folder."""
    path, _, wanted = name.rpartition(":")
    return f"{os.path.abspath(path)}:{wanted}"


def label(name: str) -> str:
    """What a report calls it."""
    path, _, wanted = name.rpartition(":")
    return f"{Path(path).stem}.{wanted}"


def read(name: str) -> bytes:
    """The content of its file."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise ValueError(f"--encodings names {name}, and there is no file {path}.")
    return path.read_bytes()


def digest(name: str) -> str:
    """The SHA-256 of its file, so that a run is resumed only with the same code."""
    return hashlib.sha256(read(name)).hexdigest()


class Own(nn.Module):
    """The user's module; what it returns is checked at each call."""

    def __init__(self, name: str, plan: Plan) -> None:
        super().__init__()
        kind = _load(name)
        self.label, self.path = label(name), name.rpartition(":")[0]
        self.acts_on = _ACTS_ON[_inputs(self.label, kind)]
        words = _arguments(self.label, kind, plan)
        with _of_file(self.path):
            self.module = kind(**words)

    def forward(self, *inputs: Tensor, scale: float | None = None) -> Any:
        """Call it; ``scale`` is for encodings of the library, and it has its own."""
        with _of_file(self.path):
            found = self.module(*inputs)
        like, got = tuple(inputs[-1].shape), [_shape(found)]
        call, rule = f"m({'x' if len(inputs) == 1 else 'q, k, v'})", f"a tensor of shape {like}"
        wanted = [like]
        if self.acts_on == "queries and keys":
            call, rule = "m(q, k)", f"q and k, both of shape {like} or of another width than it"
            got = [_shape(x) for x in found] if isinstance(found, (tuple, list)) else []
            width = got[0][-1:] if got else ()
            wanted = [like[:-1] + width] * 2
        if got != wanted:
            raise ValueError(f"{self.label}: {call} must return {rule}; got {_shown(found)}.")
        return found


def check(name: str, plan: Plan) -> None:
    """Build it and call it once, so that what is wrong is known before anything is trained."""
    length = min(8, plan.train_length)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = Own(name, plan).to(plan.device).eval()
        count = next(n for n, acts_on in _ACTS_ON.items() if acts_on == module.acts_on)
        shape = (length, plan.width) if count == 1 else (plan.heads, length, plan.head_dim)
        inputs = torch.randn(count, 1, *shape, device=plan.device)
        later = inputs.clone()
        later[..., -1, :] += 10
        before, after = (
            x if isinstance(x, Tensor) else torch.cat([*x])
            for x in (module(*inputs.unbind()), module(*later.unbind()))
        )
    # A model that sees the symbol it is to predict has no loss to compare.
    if not torch.allclose(
        before[..., :-1, :], after[..., :-1, :], rtol=1e-4, atol=1e-4, equal_nan=True
    ):
        rule = "no token may see a later one, and earlier results change with the last token"
        raise ValueError(f"{module.label}: {rule}: attend with a causal mask.")


def _load(name: str) -> type[nn.Module]:
    path, _, wanted = name.rpartition(":")
    content = read(name)
    unique = f"posenc_own_{hashlib.sha256(path.encode() + content).hexdigest()[:16]}"
    module = sys.modules.get(unique)
    if module is None:
        module = types.ModuleType(unique)
        module.__file__ = path
        # It may import its neighbours; they are last, so they hide no installed package.
        if str(Path(path).parent) not in sys.path:
            sys.path.append(str(Path(path).parent))
        with _of_file(path):
            code = compile(content, path, "exec")
            sys.modules[unique] = module
            try:
                exec(code, vars(module))
            except BaseException:
                del sys.modules[unique]
                raise
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, nn.Module)
    }
    if wanted not in classes:
        there = ", ".join(n for n, c in classes.items() if c.__module__ == unique) or "none"
        rule = f"{path} must have a subclass of torch.nn.Module that is called {wanted or 'CLASS'}"
        raise ValueError(f"{rule}; it has {there}.")
    return classes[wanted]


def _arguments(who: str, kind: type[nn.Module], plan: Plan) -> dict[str, Any]:
    sizes = {
        "head_dim": plan.head_dim,
        "num_heads": plan.heads,
        "embed_dim": plan.width,
        "max_seq_len": plan.longest,
        "base": plan.base,
    }
    parameters = inspect.signature(kind).parameters
    named = {
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    for name in _required(parameters.values()):
        if name not in sizes.keys() & named:
            given = ", ".join(sizes)
            raise ValueError(
                f"{who}: its __init__ is called with those of {given} that it names; {name} is "
                "none of them: give it a default."
            )
    return {name: value for name, value in sizes.items() if name in named}


def _inputs(who: str, kind: type[nn.Module]) -> int:
    """How many tensors its call takes."""
    signature = inspect.signature(kind.forward)
    _, *parameters = signature.parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A default of k or v makes it no other call.
    named = [p.name == wanted for p, wanted in zip(places, "qkv", strict=False)]
    count = max(len(_required(places)), (*named, False).index(False))
    if count not in _ACTS_ON or len(_required(parameters)) > count:
        got = signature.replace(parameters=parameters, return_annotation=signature.empty)
        raise ValueError(f"{who}: its forward must take (x), (q, k) or (q, k, v); got {got}.")
    return count


def _required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    varied = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in varied]


@contextmanager
def _of_file(path: str) -> Iterator[None]:
    """An error of the user's code is one line, which names the line of the file."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == path]
        where = f"{path}{lines[-1] if lines else ''}"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(x.shape) if isinstance(x, Tensor) else ()


def _shown(found: Any) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of shape {tuple(found.shape)}"
    if isinstance(found, (tuple, list)):
        return f"a {type(found).__name__} of {', '.join(map(_shown, found)) or 'nothing'}"
    return type(found).__name__
