"""One model, driven as it is, patched, and as it is again: how far apart, and what still runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from posenc.interop.huggingface import patch, patched, rotation, unpatch
from posenc.interop.huggingface.recognition import rotates
from posenc.interop.huggingface.rewrite import names_in


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
        code = frame.f_code
        # A function that was rebuilt over ours has the code of the model, with names of ours.
        rebuilt = any(name.startswith("_posenc_") for name in names_in(code))
        own = re.search(r"(transformers|diffusers)/models/", code.co_filename) and not rebuilt
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
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, (list, tuple, type({}.values()))):
        return [x for item in value for x in tensors(item)]
    return []


def run(model: Any, call: Any) -> tuple[list[Any], list[Any]]:
    """Outputs of a call, and the gradients of every parameter."""
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
        "tables": sorted(
            {(t.cls, t.form, t.rates) for t in report.tables if t.form != "unchanged"}
        ),
        "norms": sorted({(n.cls, n.fused, n.others) for n in report.norms}),
        "moved": _moved(model, call, out),
    }


def _moved(model: Any, call: Any, out: list[Any]) -> float:
    """How far outputs go if nothing rotates: a comparison that cannot fail would show here."""
    ours = rotation.rotate_all
    try:
        with patched(model):
            rotation.rotate_all = lambda xs, *_, **__: list(xs)
            return apart(out, run(model, call)[0])
    finally:
        rotation.rotate_all = ours
