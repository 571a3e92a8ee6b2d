"""One training step on two ranks: what the ranks of test_training.py run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

# DistributedDataParallel imports it: now once, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from support.modules import KEEP_FLOAT32, MODULES, TOKENS, WIDTH, Block, loss
from support.processes import each

# torch 2.15 reduces in float32 where nothing is said, and older ones in the dtype of parameters.
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
RATE = 0.5


def batch(rank: int) -> Tensor:
    """The part of the batch that a rank has."""
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The mean gradients of the two parts, made in one process.

    The sum of two numbers does not depend on their order, and half of it is exact.
    """
    found = []
    for rank in range(2):
        model.zero_grad()
        x = batch(rank)
        loss(model, x if dtype is None else x.to(dtype)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    return {name: (g + found[1][name]) / 2 for name, g in found[0].items()}


def assert_same_step(wanted: nn.Module, mean: dict[str, Tensor], got: nn.Module) -> None:
    """Gradients and updated parameters of a sharded or replicated model, bit by bit."""
    torch.optim.SGD(got.parameters(), lr=RATE).step()
    before = dict(wanted.named_parameters())
    assert {name for name, _ in got.named_parameters()} == set(before)
    for name, p in got.named_parameters():
        assert p.grad is not None, name
        whole, grad = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (p, p.grad))
        assert torch.equal(grad, mean[name].to(p.dtype)), name
        updated = before[name].detach() - RATE * mean[name].to(p.dtype)
        assert torch.equal(whole.detach(), updated), name


def under_ddp(name: str) -> None:
    plain = Block(name)
    wrapped = DistributedDataParallel(copy.deepcopy(plain))
    loss(wrapped, batch(dist.get_rank())).backward()
    mean = gradients(copy.deepcopy(plain))
    assert_same_step(plain, mean, wrapped.module)
    assert any(g.any() for g in mean.values())


def under_fsdp2(name: str, *, own_unit: bool, policy: bool, cast: bool) -> None:
    plain = Block(name)
    keeps = isinstance(plain.encoding, KEEP_FLOAT32)
    if cast:
        plain.bfloat16()
    sharded, mesh = copy.deepcopy(plain), init_device_mesh("cpu", (2,))
    half = {"mp_policy": HALF} if policy else {}
    if own_unit:
        # What keeps float32 does so in a unit without the policy, as the manual says.
        fully_shard(sharded.encoding, mesh=mesh, **({} if keeps else half))
    fully_shard(sharded, mesh=mesh, **half)
    x = batch(dist.get_rank())
    loss(sharded, x.bfloat16() if cast else x).backward()

    one = copy.deepcopy(plain)
    if policy:
        # The policy rounds every parameter of its units, and the inputs.
        one.bfloat16()
        if keeps and not own_unit:
            for p in one.encoding.parameters():
                p.data = p.data.bfloat16()
    mean = gradients(one, torch.bfloat16 if policy or cast else None)
    assert_same_step(plain, mean, sharded)


def on_ranks(folder: Path) -> dict[str, str]:
    """Every module with DDP and FSDP2, in one dtype by turns, or in all if it keeps float32."""
    return each(cases(by_turns=True))


def in_every_dtype(folder: Path) -> dict[str, str]:
    return each(cases(by_turns=False))


def cases(*, by_turns: bool) -> dict[str, Callable[[], None]]:
    """A module is a unit of FSDP2, or in a block, by turns."""
    found = {}
    for i, name in enumerate(MODULES):
        found[f"{name}, DDP"] = partial(under_ddp, name)
        keeps = isinstance(MODULES[name].build(), KEEP_FLOAT32)
        for n, kind in enumerate(("float32", "bfloat16 policy", "bfloat16 model")):
            if by_turns and not keeps and n != i % 3:
                continue
            own_unit = (i + n) % 2 == 0 or (keeps and kind == "bfloat16 model")
            how = {"policy": kind == "bfloat16 policy", "cast": kind == "bfloat16 model"}
            where = "own unit" if own_unit else "in a block"
            found[f"{name}, FSDP2, {kind}, {where}"] = partial(
                under_fsdp2, name, own_unit=own_unit, **how
            )
    return found
