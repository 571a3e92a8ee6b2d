"""What the ranks of test_train.py run: examples/train.py, on their mesh."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from support.processes import each

example = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples/train.py")))
# A model whose heads, tokens and sequences can be halved twice.
SMALL = "--steps 6 --batch 4 --length 16 --width 16 --heads 4 --lr 0.01 --device cpu"
MESHES = {
    1: ("",),
    2: ("--dp 2", "--tp 2", "--cp 2"),
    4: ("--dp 2 --tp 2", "--dp 2 --cp 2", "--tp 2 --cp 2"),
}
# Where what is learned has heads, has none, and where nothing is learned.
SOME = ("T5Bias", "LearnedPosEmbedding", "RoPE")
Trained: TypeAlias = tuple[list[float], dict[str, Tensor]]


def trained(encoding: str, more: str = "", dtype: torch.dtype = torch.float64) -> Trained:
    """The losses, and the whole parameters afterwards."""
    arguments = f"{SMALL} --encoding {encoding} {more}".split()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model, losses = example.train(example.parse(arguments, dist.get_world_size()))
    finally:
        torch.set_default_dtype(before)
    return losses, {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def assert_same(got: Trained, wanted: Trained) -> None:
    """In float64: Adam divides by gradients of any size, so that rounding may change an update.

    Gradients below 1 are rounded to 1e-16, over an epsilon of 1e-8: 1e-8 of an update of 0.01, in
    each of 6 steps. What a module keeps in float32 is rounded to 6e-8 of numbers below 1.
    """
    assert_close(torch.tensor(got[0]), torch.tensor(wanted[0]), rtol=1e-8, atol=0)
    assert got[1].keys() == wanted[1].keys()
    for name, p in wanted[1].items():
        tolerance = 1e-9 if p.dtype == torch.float64 else 1e-6
        say = partial("{}: {}".format, name)
        assert_close(got[1][name], p, rtol=tolerance, atol=tolerance, msg=say)


def one_process(folder: Path) -> dict[str, str]:
    """Train in one process, and keep the results for other meshes."""

    def keep(encoding: str) -> None:
        torch.save(trained(encoding), folder / f"{encoding}.pt")
        torch.save(trained(encoding, dtype=torch.float32)[0], folder / f"{encoding}-fp32.pt")

    return each({name: partial(keep, name) for name in example.ENCODINGS})


def meshes(encodings: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Encodings and meshes of this many ranks, without those that are refused."""
    found = {}
    for name in encodings:
        refused = {f"--{mode} 2" for mode in example.ENCODINGS[name].refuses}
        for mesh in MESHES[dist.get_world_size()]:
            if not any(mode in mesh for mode in refused):
                found[f"{name} {mesh}"] = name, mesh
    return found


def as_one_process(folder: Path) -> dict[str, str]:
    """Every encoding of which ``folder`` has the results of one process."""

    def compare(encoding: str, mesh: str) -> None:
        assert_same(trained(encoding, mesh), torch.load(folder / f"{encoding}.pt"))

    found = [name for name in example.ENCODINGS if (folder / f"{name}.pt").exists()]
    return each({name: partial(compare, *case) for name, case in meshes(found).items()})


def in_float32(folder: Path) -> dict[str, str]:
    """Rounding of float32 is 6e-8, of a few thousand terms in another order about 1e-6."""

    def compare(encoding: str, mesh: str) -> None:
        losses, _ = trained(encoding, mesh, torch.float32)
        wanted = torch.load(folder / f"{encoding}-fp32.pt")
        assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=0)

    return each({name: partial(compare, *case) for name, case in meshes(SOME).items()})


def in_bfloat16(folder: Path) -> dict[str, str]:
    """Rounding of bfloat16 is 0.4 %; the frequencies of MixedRoPE are not rounded."""

    def compare(encoding: str, mesh: str) -> None:
        losses, parameters = trained(encoding, f"{mesh} --bf16", torch.float32)
        wanted = torch.load(folder / f"{encoding}-fp32.pt")
        assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=4e-3, atol=0)
        assert {p.dtype for p in parameters.values()} == {torch.float32}

    names = *SOME, "MixedRoPE"
    return each({name: partial(compare, *case) for name, case in meshes(names).items()})


def stopped(folder: Path) -> dict[str, str]:
    """Train for half of the steps, and save."""
    mesh = MESHES[dist.get_world_size()][-1]

    def save(encoding: str) -> None:
        trained(encoding, f"{mesh} --steps 3 --checkpoint {folder / encoding}")

    return each({name: partial(save, name) for name in SOME})


def resumed(folder: Path) -> dict[str, str]:
    """The other half, on each mesh, after what `stopped` saved."""

    def go_on(encoding: str, mesh: str) -> None:
        # All ranks have looked at the folder of the case before.
        dist.barrier()
        if dist.get_rank() == 0:
            # Later checkpoints are those of other meshes; one without metadata is incomplete.
            for later in (folder / encoding).glob("step-[456]"):
                shutil.rmtree(later)
            (folder / encoding / "step-5").mkdir()
        dist.barrier()
        got = trained(encoding, f"{mesh} --save-every 2 --checkpoint {folder / encoding}")
        losses, parameters = torch.load(folder / f"{encoding}.pt")
        assert_same(got, (losses[3:], parameters))
        names = {path.parent.name for path in (folder / encoding).glob("*/.metadata")}
        assert names == {"step-3", "step-4", "step-6"}

    return each({name: partial(go_on, *case) for name, case in meshes(SOME).items()})


def compiled(folder: Path) -> dict[str, str]:
    def compare(encoding: str, mesh: str) -> None:
        torch.compiler.reset()
        got = trained(encoding, f"{mesh} --compile aot_eager")
        assert_same(got, torch.load(folder / f"{encoding}.pt"))

    return each({name: partial(compare, *case) for name, case in meshes(SOME).items()})
