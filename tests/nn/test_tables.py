"""What every module with derived tables owes its owner, whatever is done to it."""

import copy

import pytest
import torch

import posenc

MODULES = {
    "SinusoidalPosEmbedding": (lambda: posenc.SinusoidalPosEmbedding(), (2, 5, 8)),
    "SinusoidalPE": (lambda: posenc.SinusoidalPE(16, 8), (2, 5, 8)),
    "SinusoidalGrid": (lambda: posenc.SinusoidalGrid((2, 3), embed_dim=8), (2, 6, 8)),
    "RotaryPosEmbedding": (lambda: posenc.RotaryPosEmbedding(), (2, 5, 8)),
    "RotaryPosEmbedding-fixed": (lambda: posenc.RotaryPosEmbedding(8, 16, False), (2, 5, 8)),
    "RoPE": (lambda: posenc.RoPE(8, 16), (2, 3, 5, 8)),
    "RoPE-growing": (lambda: posenc.RoPE(8, None), (2, 3, 5, 8)),
    "RoPE-freqs": (lambda: posenc.RoPE(8, None, inv_freq=(1.0, 0.3, 0.1, 0.0)), (2, 3, 5, 8)),
    "XPos": (lambda: posenc.XPos(8, max_seq_len=16, scale_base=3.0), (2, 3, 5, 8)),
    "ALiBi": (lambda: posenc.ALiBi(3), (2, 3, 5, 8)),
}


@pytest.fixture(params=MODULES)
def case(request):
    make, shape = MODULES[request.param]
    return make, torch.randn(shape)


def call(module, x):
    if isinstance(module, posenc.ALiBi):
        return module.add_bias(x)
    return module(x, x)[0] if isinstance(module, (posenc.RoPE, posenc.XPos)) else module(x)


def test_a_cast_rounds_no_table(case):
    make, x = case
    for cast in (torch.bfloat16, torch.float16, torch.float64):
        module = make()
        wanted = call(module, x)
        module.to(cast)
        assert torch.equal(call(module, x), wanted)


def test_nothing_is_registered_saved_or_trained(case):
    """What a framework finds it may refill, broadcast, cast or shard."""
    make, x = case
    module = make()
    call(module, x)
    assert module.state_dict() == {}
    assert list(module.parameters()) == []
    assert list(module.buffers()) == []
    module.load_state_dict({})


def test_a_module_left_on_meta_works_once_called(case):
    """`load_state_dict(assign=True)` never touches derived buffers: the first call must."""
    make, x = case
    with torch.device("meta"):
        module = make()
    assert torch.equal(call(module, x), call(make(), x))


def test_autocast_and_inference_mode_change_nothing(case):
    make, x = case
    wanted = call(make(), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(make(), x), wanted)
    with torch.inference_mode():
        assert torch.equal(call(make(), x), wanted)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_module_can_be_traced(case):
    make, x = case
    module, other = make(), torch.randn_like(x)
    traced = torch.jit.trace(lambda x: call(module, x), (x,))
    assert torch.equal(traced(other), call(module, other))


def test_a_copy_made_in_inference_mode_serves_training(case):
    make, x = case
    with torch.inference_mode():
        module = copy.deepcopy(make())
    found = []
    for each in (module, make()):
        leaf = x.clone().requires_grad_()
        y = call(each, leaf)
        # A bias is minus infinity where nothing may be seen.
        y.masked_fill(y == -torch.inf, 0.0).square().sum().backward()
        found.append((y.detach(), leaf.grad))
    (got, grad), (wanted, wanted_grad) = found
    assert torch.equal(got, wanted)
    assert torch.equal(grad, wanted_grad)


@pytest.mark.parametrize("strict", [True, False])
def test_every_module_is_exported(case, strict):
    make, x = case

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.position = make()

        def forward(self, x):
            return call(self.position, x)

    model = Model()
    program = torch.export.export(model, (x,), strict=strict)
    other = torch.randn_like(x)
    assert torch.equal(program.module()(other), model(other))


def test_fake_tensors_of_a_module_that_is_real(case):
    """Who estimates memory fakes a model that was built."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    make, x = case
    module = make()
    with FakeTensorMode() as mode:
        assert call(module, mode.from_tensor(x)).shape == x.shape
    assert torch.equal(call(module, x), call(make(), x))
