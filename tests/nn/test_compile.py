"""torch.compile makes one graph of a module, whatever the length."""

import pytest
import torch

import posenc
from posenc import positions
from support.assertions import COMPILERS, compilations
from support.every import MODULES, qkv
from support.modules import DIM, HEADS

# A window of an image has one length. PoPE's attention chooses by the lengths of queries and keys.
NAMES = [n for n in MODULES if "Grid" not in n and "image" not in n and n != "PoPE"]
# Tables that grow. Other quick tests compile RoPE and ALiBi, whose tables do not.
QUICK = {"SinusoidalPosEmbedding", "RoPE, growing"}
EACH = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMES]


@COMPILERS
@pytest.mark.parametrize("name", EACH)
def test_one_graph_serves_every_length(name, backend):
    use = MODULES[name]
    module = use.build()
    # Past the lengths from which some modules compute in another way.
    calls = [qkv(torch.float32, 2, HEADS, n, DIM) for n in (12, 10, 15)]

    def call(q, k, v):
        return use.call(module, q, k, v)

    assert compilations(call, calls, dynamic=True, backend=backend) == 1


@pytest.mark.slow
def test_one_graph_serves_every_image():
    rope = posenc.MixedRoPE(8, num_kv_heads=2)

    def call(q, k, at):
        return rope(q, k, position_ids=at)

    calls = [
        (torch.randn(1, 2, n * n, 8), torch.randn(1, 2, n * n, 8), positions.grid(n, n))
        for n in (2, 3, 4)
    ]
    assert compilations(call, calls, dynamic=True, backend="aot_eager") == 1
