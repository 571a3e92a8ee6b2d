"""What every module with derived tables owes its owner, whatever is done to it."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import posenc

MODULES = {
    "SinusoidalPosEmbedding": (lambda: posenc.SinusoidalPosEmbedding(), (2, 5, 8)),
    "SinusoidalPE": (lambda: posenc.SinusoidalPE(16, 8), (2, 5, 8)),
    "SinusoidalGrid": (lambda: posenc.SinusoidalGrid((2, 3), embed_dim=8), (2, 6, 8)),
    "RotaryPosEmbedding": (lambda: posenc.RotaryPosEmbedding(), (2, 5, 8)),
    "RotaryPosEmbedding-fixed": (lambda: posenc.RotaryPosEmbedding(8, 16, False), (2, 5, 8)),
    "RoPE": (lambda: posenc.RoPE(8, 16), (2, 3, 5, 8)),
    "RoPE-growing": (lambda: posenc.RoPE(8, None), (2, 3, 5, 8)),
    "RoPE-freqs": (lambda: posenc.RoPE(8, None, freqs=(1.0, 0.3, 0.1, 0.0)), (2, 3, 5, 8)),
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


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_default_dtype_is_in_no_table(case, bfloat16_by_default):
    make, x = case
    got = call(make(), x)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(got, call(make(), x))


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


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda module: torch.load(_saved(module), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_copies_are_equal(case, duplicate, used):
    make, x = case
    module = make()
    wanted = call(make(), x)
    if used:
        call(module, x)
    assert torch.equal(call(duplicate(module), x), wanted)


def _saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


def test_meta_and_to_empty_give_the_right_numbers(case):
    make, x = case
    with torch.device("meta"):
        module = make()
        assert call(module, x.to("meta")).is_meta
    module.to_empty(device="cpu")
    assert torch.equal(call(module, x), call(make(), x))


def test_loading_by_assignment_brings_a_model_off_meta(case):
    make, x = case

    def model():
        return torch.nn.ModuleDict({"other": torch.nn.Linear(2, 2), "position": make()})

    saved = model().state_dict()
    with torch.device("meta"):
        made = model()
        call(made["position"], x.to("meta"))
    made.load_state_dict(saved, assign=True)
    made.to("cpu")
    assert torch.equal(call(made["position"], x), call(make(), x))


def test_to_empty_on_the_same_device_keeps_the_numbers(case):
    make, x = case
    module = make()
    wanted = call(module, x)
    module.to_empty(device="cpu")
    assert torch.equal(call(module, x), wanted)


def test_a_module_left_on_meta_works_once_called(case):
    """`load_state_dict(assign=True)` never touches derived buffers: the first call must."""
    make, x = case
    with torch.device("meta"):
        module = make()
    assert torch.equal(call(module, x), call(make(), x))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("use_buffers", [False, True])
@pytest.mark.parametrize("name", sorted(set(MODULES) - {"RotaryPosEmbedding", "SinusoidalGrid"}))
def test_weights_are_averaged_whatever_was_called(name, use_buffers, called):
    """torch goes through the buffers of both models side by side."""
    make, shape = MODULES[name]
    x = torch.randn(shape)
    model = torch.nn.ModuleDict({"position": make(), "other": torch.nn.Linear(2, 2)})
    wanted = call(make(), x)
    if called:
        call(model["position"], x[..., :2, :])
    averaged = AveragedModel(model, use_buffers=use_buffers)
    for _ in range(3):
        call(model["position"], x)
        averaged.update_parameters(model)
    assert torch.equal(call(averaged.module["position"], x), wanted)
    assert torch.equal(call(model["position"], x), wanted)


def test_a_module_inside_a_model_follows_its_casts_and_copies(case):
    make, x = case
    model = torch.nn.ModuleDict({"position": make(), "other": torch.nn.Linear(2, 2)})
    wanted = call(model["position"], x)
    model.half().float().bfloat16()
    assert torch.equal(call(model["position"], x), wanted)
    assert model["other"].weight.dtype == torch.bfloat16


def test_autocast_and_inference_mode_change_nothing(case):
    make, x = case
    wanted = call(make(), x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(call(make(), x), wanted)
    with torch.inference_mode():
        assert torch.equal(call(make(), x), wanted)


def test_the_default_dtype_changes_nothing(case):
    make, x = case
    wanted = call(make(), x)
    torch.set_default_dtype(torch.float64)
    try:
        got = call(make(), x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, wanted)


def test_repr_shows_the_class_and_its_arguments(case):
    make, _ = case
    text = repr(make())
    assert text.startswith(type(make()).__name__ + "(")
    assert "=" in text


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


def test_a_model_that_was_loaded_by_assignment_can_be_shared(case):
    make, x = case
    with torch.device("meta"):
        module = torch.nn.ModuleDict({"position": make(), "other": torch.nn.Linear(2, 2)})
    module.load_state_dict(
        {"other.weight": torch.ones(2, 2), "other.bias": torch.ones(2)}, assign=True
    )
    module.share_memory()
    assert torch.equal(call(module["position"], x), call(make(), x))
