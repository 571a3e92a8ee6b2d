"""A model that is born on the meta device and sharded by FSDP2."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import posenc.interop.distributed  # noqa: F401
from support.every import qkv
from support.modules import MODULES

# What is drawn: a DTensor draws other numbers than a tensor does.
RANDOM = re.compile(r"proj\.weight|mlp|linear_pos|pos_emb|raw_r")


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators may not")
@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("name", MODULES)
def test_a_sharded_module_is_reset_and_computes_its_tables(name):
    """As a model that was born on meta is initialized: `reset_parameters` of every module.

    Tables would hold garbage after `to_empty` if that filled them.
    """
    torch.manual_seed(0)
    wanted = MODULES[name].build()
    # A seed is drawn by the constructor, numbers by reset_parameters.
    torch.manual_seed(0)
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
        with torch.no_grad():
            got.to_local().copy_(true)
    with torch.no_grad():
        got, exact = (MODULES[name].call(each, *qkv()) for each in (module, wanted))
    assert torch.equal(got, exact)
