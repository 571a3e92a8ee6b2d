"""Which models of the installed transformers run on our rotation: builds, drives and compares each.

    python docs/models.py                  # every rotary folder, a few at a time; resumes
    python docs/models.py llama sam2_video  # these, afresh, with what went wrong

Each folder is worked on in a process of its own, with a limit on its time. Results are kept in
``build/models``, and ``docs/models.md`` is written from them. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import inspect
import json
import multiprocessing
import re
import resource
import sys
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT = HERE.parent / "build" / "models"
SECONDS = 240
LIMIT = 2e-5


def folders() -> dict[str, list[str]]:
    """Rotary folders of transformers, and the modules with their code."""
    import transformers

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
    from torch import nn

    from posenc.interop.huggingface.patching import replacements

    return {
        name
        for name, kind in vars(module).items()
        if inspect.isclass(kind)
        and issubclass(kind, nn.Module)
        and kind.__module__ == module.__name__
        and replacements(kind)
    }


class Watch:
    """Which rotating functions of transformers run, and for which class."""

    def __enter__(self) -> Watch:
        self.calls: set[str] = set()
        self.owners: set[str] = set()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: Any, event: str, _: Any) -> None:
        from posenc.interop.huggingface.rewrite import rotates

        code = frame.f_code
        # A function that was rebuilt over ours has the code of the model, in a scope of its own.
        own = "transformers/models/" in code.co_filename and "__name__" in frame.f_globals
        if event == "call" and own and rotates(code.co_name):
            self.calls.add(code.co_name)
            while frame is not None:
                owner = frame.f_locals.get("self")
                if owner is not None:
                    self.owners.add(type(owner).__name__)
                    break
                frame = frame.f_back


def tensors(value: Any) -> list[Any]:
    """The floating tensors in what a model returned, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple, type({}.values()))):
        return [x for item in value for x in tensors(item)]
    return []


def run(model: Any, call: Any) -> tuple[list[Any], list[Any]]:
    """Outputs of a call, and the gradients of every parameter."""
    import torch

    torch.manual_seed(2)
    model.zero_grad(set_to_none=True)
    out = tensors(call())
    loss = sum(
        (x.double() * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum()
        for x in out
        if x.requires_grad
    )
    gradients = []
    if isinstance(loss, torch.Tensor):
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [x.detach().clone() for x in out], gradients


def apart(a: list[Any], b: list[Any]) -> float:
    """Largest difference of two lists of tensors, over the largest value."""
    assert len(a) == len(b), "other tensors came out"
    top = max((x.abs().max().item() for x in a if x.numel()), default=0.0)
    gap = max(
        ((x - y).abs().max().item() for x, y in zip(a, b, strict=True) if x.numel()), default=0.0
    )
    return gap / top if top else gap


def judge(model: Any, call: Any) -> dict[str, Any]:
    """Patch, compare, unpatch, compare; what was measured."""
    import torch

    from posenc.interop.huggingface import patch, unpatch

    with Watch() as before:
        out, grads = run(model, call)
    if not before.calls:
        raise RuntimeError("it ran, but called nothing that rotates")
    if not all(bool(x.isfinite().all()) for x in out):
        raise RuntimeError("its own outputs are not finite")
    again, _ = run(model, call)
    if not all(map(torch.equal, again, out)):
        raise RuntimeError("it gives other outputs each time")
    report = patch(model)
    try:
        with Watch() as after:
            ours, our_grads = run(model, call)
    finally:
        unpatch(model)
    back, _ = run(model, call)
    return {
        "outputs": apart(out, ours),
        "gradients": apart(grads, our_grads),
        "parameters": len(grads),
        "still": sorted(after.calls),
        "restored": all(map(torch.equal, back, out)),
        "owners": sorted(before.owners),
        "places": sorted({(p.cls, p.function, p.variant, p.layout) for p in report.places}),
        "tables": sorted({(t.cls, t.form, t.rates) for t in report.tables}),
        "moved": _moved(model, call, out),
    }


def _moved(model: Any, call: Any, out: list[Any]) -> float:
    """How far outputs go if nothing turns: a comparison that cannot fail would show here."""
    from posenc.interop.huggingface import patched, special, turning, variants

    try:
        special.turn = variants.turn = lambda xs, *_, **__: list(xs)
        with patched(model):
            return apart(out, run(model, call)[0])
    finally:
        special.turn = variants.turn = turning.turn


def study(folder: str, modules: list[str]) -> dict[str, Any]:
    """What became of one folder."""
    import recipes
    import tiny
    import transformers

    transformers.logging.set_verbosity_error()
    result: dict[str, Any] = {"folder": folder, "driven": [], "trouble": []}
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
                result["trouble"].append(f"{name}: {_said(error)}")
                continue
            inside = {type(m).__name__ for m in model.modules()} & want
            covered = {owner for d in result["driven"] for owner in d["owners"]}
            if not inside - covered:
                continue
            for label, call in recipes.calls(name, model, inside - covered):
                try:
                    call()
                except Exception as error:
                    result["trouble"].append(f"{name} on {label}: {_said(error)}")
                    continue
                try:
                    judged = judge(model, call)
                except Exception as error:
                    result["trouble"].append(f"{name} on {label}: {_said(error)}")
                    continue
                if set(judged["owners"]) & (inside - covered):
                    result["driven"].append({"model": name, "by": label, **judged})
                    covered |= set(judged["owners"])
                if inside <= covered:
                    break
    result["need"] = sorted(need)
    return result


def _models(module: Any, chosen: list[str] | None) -> list[Any]:
    from transformers import PreTrainedModel

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


def _said(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"


def main() -> None:
    """Study the folders that are asked for, or every one that was not studied yet."""
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(HERE))
    import torch
    import transformers.modeling_utils  # noqa: F401 (before the processes part, not in each)

    torch.set_num_threads(1)
    asked, known = sys.argv[1:], folders()
    KEPT.mkdir(parents=True, exist_ok=True)
    todo = asked or [f for f in known if not (KEPT / f"{f}.json").exists()]
    with ThreadPoolExecutor(2) as pool:
        for number, result in enumerate(pool.map(partial(_apart, known), todo), 1):
            print(f"{number}/{len(todo)} {result['folder']}: {verdict(result)}", flush=True)
            for line in result["trouble"] if asked else ():
                print("    ", line)


def _apart(known: dict[str, list[str]], folder: str) -> dict[str, Any]:
    """Study a folder in a process of its own, so that its end is not ours."""
    path = KEPT / f"{folder}.json"
    path.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(
        target=_keep, args=(path, folder, known[folder])
    )
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    if not path.exists():
        said = f"took more than {SECONDS} s" if process.exitcode == -9 else "crashed"
        path.write_text(json.dumps({"folder": folder, "driven": [], "need": [], "trouble": [said]}))
    return json.loads(path.read_text())


def _keep(path: Path, folder: str, modules: list[str]) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (16 * 2**30,) * 2)
    try:
        result = study(folder, modules)
    except Exception as error:
        result = {"folder": folder, "driven": [], "need": [], "trouble": [_said(error)]}
    path.write_text(json.dumps(result, indent=1))


def verdict(result: dict[str, Any]) -> str:
    """What a row of the table says about a folder."""
    driven = result["driven"]
    if not result["need"] and not driven and not result["trouble"]:
        return "no code that rotates runs"
    missing = set(result["need"]) - {owner for d in driven for owner in d["owners"]}
    if missing or not driven:
        return f"not driven: {', '.join(sorted(missing)) or result['trouble'][-1]}"
    for d in driven:
        if d["moved"] < 100 * LIMIT:
            return f"not driven: {d['model']} does not depend on the rotation"
        if d["still"]:
            return f"still calls {', '.join(d['still'])}"
        if not d["restored"]:
            return "unpatch does not restore it"
        if max(d["outputs"], d["gradients"]) > LIMIT:
            return f"differs: outputs {d['outputs']:.1e}, gradients {d['gradients']:.1e}"
    return "patched"


if __name__ == "__main__":
    main()
