"""A model with one of each module, sharded by FSDP2: what the ranks of test_fsdp.py run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor, init_device_mesh

from support.models import Model
from support.processes import each


def in_one_process() -> tuple[Model, Tensor]:
    torch.manual_seed(5)
    model = Model()
    return model, torch.randint(0, 11, (2, 40))


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def step(model: nn.Module, ids: Tensor) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    value = loss(model, ids)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(value)


def sharded(world: int) -> Model:
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = Model()
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def assert_tables_are_right(model: Model) -> None:
    """Tables are worked out on every rank, whole; nobody sends them."""
    fresh = Model()
    assert list(model.buffers()) == []
    for held, wanted in (
        (model.fixed.encodings, fresh.fixed.encodings),
        (model.rotary.cos_cached, fresh.rotary.cos_cached),
        (model.block.rope.sin_cached, fresh.block.rope.sin_cached),
        (model.block.alibi.slopes, fresh.block.alibi.slopes),
    ):
        assert not isinstance(held, DTensor)
        assert torch.equal(held, wanted)


def train_and_save(folder: Path) -> dict[str, str]:
    world, (plain, ids) = dist.get_world_size(), in_one_process()
    model = sharded(world)
    whole = plain.state_dict()
    pieces = {
        name: distribute_tensor(whole[name], p.device_mesh, p.placements)
        for name, p in model.named_parameters()
    }
    set_model_state_dict(model, pieces)

    def tables():
        assert_tables_are_right(model)

    def the_learned_table_is_sharded():
        weight = model.learned.pos_emb.weight
        assert isinstance(weight, DTensor)
        assert weight.to_local().shape == (48 // world, 32)

    def a_step_is_that_of_one_process():
        assert step(model, ids) == step(plain, ids)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.full_tensor(), plain.state_dict()[name])

    def saving():
        dcp.save(get_model_state_dict(model), checkpoint_id=folder / "checkpoint")
        full = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        if dist.get_rank() == 0:
            torch.save(full, folder / "whole.pt")

    return each(
        {
            "tables": tables,
            "learned": the_learned_table_is_sharded,
            "step": a_step_is_that_of_one_process,
            "saving": saving,
        }
    )


def load_elsewhere(folder: Path) -> dict[str, str]:
    model = sharded(dist.get_world_size())
    wanted = torch.load(folder / "whole.pt")

    def only_what_is_learned_is_saved_and_once():
        held = FileSystemReader(folder / "checkpoint").read_metadata().state_dict_metadata
        assert set(held) == set(wanted)
        for name, tensor in held.items():
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == wanted[name].numel()

    def loading():
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        set_model_state_dict(model, state)
        for name, p in model.named_parameters():
            assert torch.equal(p.full_tensor(), wanted[name]), name

    def the_same_model():
        assert_tables_are_right(model)
        plain, ids = in_one_process()
        plain.load_state_dict(wanted)
        assert torch.equal(model(ids), plain(ids))

    return each(
        {
            "saved": only_what_is_learned_is_saved_and_once,
            "loading": loading,
            "same model": the_same_model,
        }
    )
