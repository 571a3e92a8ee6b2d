"""One folder of transformers: which classes rotate, and which models drive them."""

from __future__ import annotations

import importlib
import inspect
import re
import traceback
from pathlib import Path
from typing import Any

import judge
import recipes
import tiny
import transformers
from torch import nn
from transformers import PreTrainedModel

from posenc.interop.huggingface import patched
from posenc.interop.huggingface.recognition import NotUnderstood
from posenc.interop.huggingface.rewrite import replacements


def folders() -> dict[str, list[str]]:
    """Rotary folders of transformers, and the modules with their code."""
    found: dict[str, list[str]] = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        classes = re.search(r"^class \w*(rotary|rope(?![a-z])|RoPE|Rope[A-Z])", text, re.M | re.I)
        names = set(re.findall(r"^ *def (\w*(?:rotary|rotate|rope)\w*)\(", text, re.M))
        names = {n for n in names if not re.match("get_rope_index|compute_", n)}
        if classes or names:
            found.setdefault(path.parent.name, []).append(path.stem)
    return found


def rotating(module: Any) -> set[str]:
    """Classes of a module whose instances rotate."""
    return {
        name
        for name, kind in list(vars(module).items())
        if inspect.isclass(kind)
        and issubclass(kind, nn.Module)
        and kind.__module__ == module.__name__
        and _replaces(kind)
    }


def _replaces(kind: type) -> bool:
    """Whether a class rotates, by functions that posenc knows or not."""
    try:
        return bool(replacements(kind))
    except NotUnderstood:
        return True


def study(folder: str, modules: list[str]) -> dict[str, Any]:
    """What became of one folder."""
    transformers.logging.set_verbosity_error()
    cancels = folder in recipes.CANCELS
    result: dict[str, Any] = {"folder": folder, "driven": [], "trouble": [], "cancels": cancels}
    need: set[str] = set()
    for stem in modules:
        module = importlib.import_module(f"transformers.models.{folder}.{stem}")
        want = rotating(module) - recipes.UNREACHABLE.get(folder, set())
        need |= want
        for kind in _models(module, recipes.CLASSES.get(folder)):
            if want <= {owner for d in result["driven"] for owner in d["owners"]}:
                break
            name = kind.__name__
            try:
                named = recipes.CONFIG_CLASSES.get(name)
                config_class = getattr(module, named) if named else kind.config_class
                model = tiny.build(kind, tiny.tiny(config_class))
            except Exception as error:
                result["trouble"].append(f"{name}: {said(error)}")
                continue
            inside = {type(m).__name__ for m in model.modules()} & want
            covered = {owner for d in result["driven"] for owner in d["owners"]}
            if not inside - covered:
                continue
            try:
                with patched(model):
                    pass
            except ValueError as error:
                result["trouble"].append(f"{name}: {said(error)}")
                continue
            for label, call in recipes.calls(name, model, inside - covered):
                try:
                    call()
                except Exception as error:
                    result["trouble"].append(f"{name} on {label}: {said(error)}")
                    continue
                try:
                    judged = judge.judge(model, call)
                except Exception as error:
                    result["trouble"].append(f"{name} on {label}: {said(error)}")
                    continue
                if set(judged["owners"]) & (inside - covered):
                    result["driven"].append({"model": name, "by": label, **judged})
                    covered |= set(judged["owners"])
                if inside <= covered:
                    break
    result["need"] = sorted(need)
    return result


def _models(module: Any, chosen: list[str] | None) -> list[Any]:
    if chosen is not None:
        return [getattr(module, name) for name in chosen]
    return [
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == module.__name__
        and kind.config_class is not None
        and not name.endswith("PreTrainedModel")
    ]


def said(error: BaseException) -> str:
    """An error in one line, with the place it came from."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
