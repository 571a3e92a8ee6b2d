"""A patched model that FSDP2 shards from the meta device: what the ranks of test_tables run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from posenc.interop.huggingface import patch
from support.hf_models import apart, llama, tokens
from support.processes import each


def patched_on_meta(folder: Path) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plain = llama()
    with torch.device("meta"):
        model = llama()
    patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)
    whole = plain.state_dict()
    pieces = {
        name: distribute_tensor(whole[name], p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    model.load_state_dict(pieces, assign=True, strict=False)

    def outputs_are_those_of_one_process():
        assert apart(plain(tokens()).logits, model(tokens()).logits) < 2e-5

    return each({"outputs": outputs_are_those_of_one_process})
