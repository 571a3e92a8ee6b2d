"""FSDP2 and torch.distributed.checkpoint. What the ranks do is in fsdp.py."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import posenc.interop.distributed  # noqa: F401
from support.modules import MODULES
from support.processes import assert_passed, run

# What is drawn: a DTensor draws other numbers than a tensor does.
RANDOM = re.compile(r"proj\.weight|mlp|linear_pos|pos_emb|raw_r")


@pytest.mark.slow
def test_a_model_born_on_meta_trains_and_loads_on_another_number_of_ranks(tmp_path):
    """Tables hold garbage after to_empty unless they are worked out again, on every rank."""
    assert_passed(run(2, "support.fsdp:train_and_save", tmp_path))
    assert_passed(run(4, "support.fsdp:load_elsewhere", tmp_path))


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("name", MODULES)
def test_a_sharded_module_is_reset(name):
    """As a model that was born on meta is initialized: `reset_parameters` of every module."""
    torch.manual_seed(0)
    wanted = MODULES[name].build()
    with torch.device("meta"):
        module = MODULES[name].build()
    fully_shard(module)
    module.to_empty(device="cpu")
    resets = [m for m in module.modules() if hasattr(m, "reset_parameters")]
    for part in resets:
        torch.manual_seed(0)
        part.reset_parameters()
    assert resets or not list(module.parameters())
    for (key, got), true in zip(module.named_parameters(), wanted.parameters(), strict=True):
        whole = got.full_tensor()
        assert whole.shape == true.shape, key
        assert whole.isfinite().all(), key
        if not RANDOM.search(f"{name}.{key}"):
            torch.testing.assert_close(whole, true, msg=key)
