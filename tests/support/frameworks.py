"""Every module under DistributedDataParallel and FSDP2: what the ranks of test_frameworks run."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from support.models import Everything
from support.processes import each


def ours(dtype: torch.dtype = torch.float32) -> tuple[Everything, torch.Tensor]:
    torch.manual_seed(3)
    return Everything().to(dtype), torch.randn(2, 3, 5, 8).to(dtype)


def on_ranks(folder: Path) -> dict[str, str]:
    world = dist.get_world_size()

    def under_ddp():
        for dtype in (torch.float32, torch.bfloat16):
            model, x = ours(dtype)
            wrapped = DistributedDataParallel(copy.deepcopy(model))
            for _ in range(2):
                got = wrapped(x)
                got.sum().backward()
                assert torch.equal(got, model(x))
            assert list(wrapped.module.buffers()) == [], "nothing to send"

    def under_fsdp2():
        for dtype in (torch.float32, torch.bfloat16):
            plain, x = ours()
            with torch.device("meta"):
                model = Everything()
            # Dimension 0 of the learned frequencies is 1: one rank has them.
            policy = MixedPrecisionPolicy(param_dtype=dtype, cast_forward_inputs=False)
            fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
            model.to_empty(device="cpu")
            whole = plain.state_dict()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(distribute_tensor(whole[name], p.device_mesh, p.placements))
            x = x.to(dtype)
            assert torch.equal(model(x), plain.to(dtype)(x))

    return each({"DDP": under_ddp, "FSDP2": under_fsdp2})
