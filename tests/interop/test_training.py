"""Every module learns under every framework as it does alone: gradients and updated parameters."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from support.modules import MODULES, Block, loss
from support.processes import assert_passed, run
from support.training import RATE, batch

EACH = pytest.mark.parametrize("name", MODULES)
# One of each way to compute: tables, learned parameters, rows, a kernel, and what calls the op.
COMPILED = {"SinusoidalPE", "RoPE", "MixedRoPE", "PoPE", "ALiBi, learned", "T5Bias", "ForgetGate"}
COMPILED |= {"FIRE, by rows", "CoPE", "DeBERTaBias"}
SOME = [
    name if name in COMPILED else pytest.param(name, marks=pytest.mark.slow) for name in MODULES
]


def step(model, call=None):
    """Gradients and updated parameters of one step."""
    call = model if call is None else call
    dtype = next(p for name, p in model.named_parameters() if name.startswith("after")).dtype
    loss(call, batch(0).to(dtype)).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def assert_same_step(got, wanted):
    assert got.keys() == wanted.keys()
    for name, both in wanted.items():
        assert all(map(torch.equal, got[name], both)), name


@EACH
def test_every_parameter_gets_a_gradient(name):
    grads = [g for key, (g, _) in step(Block(name)).items() if key.startswith("encoding")]
    assert all(g is not None for g in grads)
    assert not grads or any(g.any() for g in grads)


@pytest.mark.parametrize(
    "job", ["on_ranks", pytest.param("in_every_dtype", marks=pytest.mark.slow)]
)
def test_ddp_and_fsdp2_train_as_one_process(tmp_path, job):
    """Each as its own unit of FSDP2 or inside a block; float32, bfloat16 policy and model."""
    assert_passed(run(2, f"support.training:{job}", tmp_path))


@EACH
def test_a_copy_and_a_checkpointed_call_train_the_same(name):
    model = Block(name)
    other, again = copy.deepcopy(model), copy.deepcopy(model)
    wanted = step(model)
    assert_same_step(step(other), wanted)
    run_again = lambda x: checkpoint(again, x, use_reentrant=False)  # noqa: E731
    assert_same_step(step(again, run_again), wanted)


@pytest.mark.parametrize("name", SOME)
def test_a_compiled_module_trains_the_same(name):
    """In float64, where other kernels and another order of sums are far below the tolerance."""
    torch.compiler.reset()
    model = Block(name).double()
    other = copy.deepcopy(model)
    wanted = step(model)
    got = step(other, torch.compile(other, backend="aot_eager", fullgraph=True))
    assert got.keys() == wanted.keys()
    for key, both in wanted.items():
        for x, exact in zip(got[key], both, strict=True):
            torch.testing.assert_close(x, exact, rtol=1e-10, atol=1e-10, msg=key)
