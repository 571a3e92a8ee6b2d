"""Tables are exact, shared by equal modules, and nothing that is done to a module changes them."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import posenc
from support.assertions import assert_rotated

MODULES = {
    "SinusoidalPosEmbedding": (lambda: posenc.SinusoidalPosEmbedding(), (2, 5, 8)),
    "SinusoidalPE": (lambda: posenc.SinusoidalPE(16, 8), (2, 5, 8)),
    "SinusoidalGrid": (lambda: posenc.SinusoidalGrid((2, 3), embed_dim=8), (2, 6, 8)),
    "RotaryPosEmbedding": (lambda: posenc.RotaryPosEmbedding(), (2, 5, 8)),
    "RotaryPosEmbedding-fixed": (lambda: posenc.RotaryPosEmbedding(8, 16, False), (2, 5, 8)),
    "RoPE": (lambda: posenc.RoPE(8, 16), (2, 3, 5, 8)),
    "RoPE-growing": (lambda: posenc.RoPE(8, None), (2, 3, 5, 8)),
    "RoPE-inv_freq": (lambda: posenc.RoPE(8, None, inv_freq=(1.0, 0.3, 0.1, 0.0)), (2, 3, 5, 8)),
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


class Everything(torch.nn.Module):
    """All of these modules, with an input for each."""

    def __init__(self):
        super().__init__()
        self.encodings = torch.nn.ModuleList(make() for make, _ in MODULES.values())

    def forward(self, *inputs):
        return tuple(map(call, self.encodings, inputs))


def inputs():
    return [torch.randn(shape) for _, shape in MODULES.values()]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_every_module_can_be_traced():
    model, others = Everything(), inputs()
    traced = torch.jit.trace(model, tuple(inputs()))
    assert all(map(torch.equal, traced(*others), model(*others)))


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_module_is_exported(strict):
    model, others = Everything(), inputs()
    program = torch.export.export(model, tuple(inputs()), strict=strict).module()
    assert all(map(torch.equal, program(*others), model(*others)))


def test_a_module_takes_fake_tensors(case):
    """Who estimates memory fakes a model that was built."""
    make, x = case
    module = make()
    with FakeTensorMode() as mode:
        assert call(module, mode.from_tensor(x)).shape == x.shape
    assert torch.equal(call(module, x), call(make(), x))


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
def test_a_bfloat16_model_is_right_at_position_4095(interleaved):
    """The promise of the library in one line: peers are off by up to 2.0 here."""
    x = torch.randn(3, 1, 1, 128).bfloat16()
    rope = posenc.RoPE(128, 4096, interleaved=interleaved).bfloat16()
    assert_rotated(rope.apply(x, x, 4095)[0], x, [4095], interleaved=interleaved)
    embedding = posenc.RotaryPosEmbedding(interleaved=interleaved).bfloat16()
    got = embedding(x, torch.tensor([4095]))
    assert_rotated(got, x, [4095], interleaved=interleaved)


def test_threads_share_a_module():
    """A thread must never pair the cosines of one table with the sines of another."""
    rope, wrong = posenc.RotaryPosEmbedding(), []
    inputs = [torch.randn(n, d) for n in (1, 7, 40, 300) for d in (8, 12)]
    wanted = [posenc.functional.rotary_pos_embedding(x) for x in inputs]

    def work():
        for _ in range(15):
            for x, y in zip(inputs, wanted, strict=True):
                if not torch.equal(rope(x), y):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("bad", [-1, 16], ids=["negative", "past-the-end"])
def test_positions_are_refused_before_they_are_moved(bad):
    """The meta device stands for any that cannot be read without waiting."""
    ids, x = torch.tensor([0, bad, 1]), torch.zeros(1, 1, 3, 8, device="meta")
    with torch.device("meta"):
        rope, learned = posenc.RoPE(8, 16), posenc.LearnedPosEmbedding(16, 8)
    calls = (
        lambda: rope(x, x, position_ids=ids),
        lambda: posenc.RotaryPosEmbedding(8, 16)(x, ids),
        lambda: learned(x[0], position_ids=ids),
        lambda: posenc.functional.rotate_(x, rope.cos_cached, rope.sin_cached, position_ids=ids),
    )
    for call_it in calls:
        with pytest.raises(ValueError, match=r"must not be negative|must stay below"):
            call_it()


def test_equal_modules_share_one_table():
    """Eight layers take the memory of one."""
    layers = [posenc.RoPE(128, 64) for _ in range(8)]
    assert len({layer.cos_cached.data_ptr() for layer in layers}) == 1
    assert posenc.RoPE(128, 64, base=5e5).cos_cached.data_ptr() != layers[0].cos_cached.data_ptr()
    for name in ("sin_cached", "cos_cached"):
        assert getattr(layers[0], name).shape == (64, 64)
    kept = copy.deepcopy(layers[0])
    assert kept.cos_cached.data_ptr() == layers[0].cos_cached.data_ptr()


def test_tables_that_grow_are_shared_too():
    one, other, x = posenc.RoPE(8, None), posenc.RoPE(8, None), torch.randn(1, 1, 40, 8)
    one(x, x)
    other(x[:, :, :3], x[:, :, :3])
    assert one.cos_cached.data_ptr() == other.cos_cached.data_ptr()
    assert one.cos_cached.shape == (40, 4)
    other(x, x, 5)
    assert torch.equal(one(x, x, 2)[0], posenc.RoPE(8, 64)(x, x, 2)[0])


def test_a_table_grows_when_positions_pass_its_end():
    """The held table is tried first: in place too, nothing is written before it is long enough."""
    rope, fixed, x = posenc.RoPE(8, None), posenc.RoPE(8, 128), torch.randn(2, 1, 3, 8)
    rope(x, x)
    for ids in (torch.tensor([1, 2, 70]), torch.tensor([[0, 1, 2], [99, 3, 4]])):
        wanted, y, z = fixed.rotate(x, position_ids=ids), x.clone(), x.clone()
        assert torch.equal(rope.rotate(x, position_ids=ids), wanted)
        assert torch.equal(posenc.RoPE(8, None).forward_(y, z, position_ids=ids)[0], wanted)
    before, y, z = rope.cos_cached.shape, x.clone(), x.clone()
    with pytest.raises(ValueError, match=r"RoPE.forward_: positions must not be negative, got -1"):
        rope.forward_(y, z, position_ids=torch.tensor([500, -1, 2]))
    assert torch.equal(y, x)
    assert rope.cos_cached.shape == before


@pytest.mark.parametrize(
    "where",
    [{}, {"offset": torch.tensor([1, 2])}, {"position_ids": torch.arange(20, 26)}],
    ids=["first", "offsets", "ids"],
)
@pytest.mark.parametrize("learned", ["q", "k", "qk"])
def test_a_table_may_grow_between_a_call_and_its_activation_checkpoint(learned, where):
    """The second call must save tensors of the shapes that the first one saved."""
    rope, x = posenc.RoPE(8, None), torch.randn(2, 2, 6, 8)
    rope(x[:, :, :3], x[:, :, :3])
    q, k = (x.clone().requires_grad_(name in learned) for name in "qk")
    out = checkpoint(lambda q, k: torch.stack(rope(q, k, **where)), q, k, use_reentrant=False)
    longer = torch.randn(1, 1, 90, 8)
    rope(longer, longer)
    out.sum().backward()
    fixed = posenc.RoPE(8, 128)
    for name, index, leaf in (("q", 0, q), ("k", 1, k)):
        if name in learned:
            again = x.clone().requires_grad_()
            fixed(again, again, **where)[index].sum().backward()
            assert torch.equal(leaf.grad, again.grad)


def test_a_table_is_freed_with_the_last_module_that_reads_it():
    """The process must not hold memory that nobody reads."""
    rope, growing, x = posenc.RoPE(24, 77), posenc.RotaryPosEmbedding(), torch.randn(77, 24)
    growing(x)
    held = [weakref.ref(rope._tables._held[x.device, torch.float64])]
    held.append(weakref.ref(growing._tables._held[x.device, torch.float64]))
    twin = copy.deepcopy(rope)
    del rope, growing
    assert held[0]() is not None
    del twin
    gc.collect()
    assert [each() for each in held] == [None, None]


def test_a_table_is_a_read_only_attribute():
    for module in (posenc.RoPE(8, 16), posenc.RotaryPosEmbedding(8, 16)):
        for name in ("cos_cached", "sin_cached"):
            with pytest.raises(AttributeError):
                setattr(module, name, torch.zeros(16, 4))
    with pytest.raises(AttributeError):
        posenc.SinusoidalPE(16, 8).encodings = None
    with pytest.raises(AttributeError):
        posenc.XPos(8, max_seq_len=16).q_cos = None


def test_a_pickle_has_no_table():
    small, large = (len(pickle.dumps(posenc.RoPE(64, n))) for n in (2, 20_000))
    assert abs(large - small) < 16


def test_a_call_on_another_device_does_not_move_a_module():
    rope, alibi, x = posenc.RoPE(8, 16), posenc.ALiBi(4), torch.zeros(1, 1, 2, 8, device="meta")
    assert rope(x, x)[0].is_meta
    assert alibi.bias(4, device="meta").is_meta
    assert not rope.cos_cached.is_meta
    assert not alibi.slopes.is_meta


def test_a_module_on_meta_stays_there_through_a_cast_and_leaves_by_to():
    """A model that was loaded by assignment may have modules on meta whose weights are not."""
    with torch.device("meta"):
        rope, alibi = posenc.RoPE(8, 16), posenc.ALiBi(4)
    assert rope.half().cos_cached.is_meta
    assert torch.equal(alibi.double().slopes, posenc.ALiBi(4).slopes), "right also before it leaves"
    assert torch.equal(rope.to("cpu").cos_cached, posenc.RoPE(8, 16).cos_cached)
    assert torch.equal(alibi.cpu().slopes, posenc.ALiBi(4).slopes)


def test_a_traced_call_in_float64_is_as_exact_as_an_eager_one():
    """The table of the constructor is float32: too narrow to stand in for float64."""
    x = torch.zeros(8, 4, dtype=torch.float64)
    wanted = posenc.SinusoidalPE(64, 4)(x)
    assert torch.equal(torch.export.export(posenc.SinusoidalPE(64, 4), (x,)).module()(x), wanted)
    compiled = torch.compile(posenc.SinusoidalPE(64, 4), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), wanted)


def test_an_exported_length_has_no_bound():
    """Tables that grow stop at 2**17 rows, and programs do not know of that."""
    x = torch.randn(1, 1, 8, 4)
    length = torch.export.Dim("length", max=2**18)
    shapes = ({2: length}, {2: length})
    program = torch.export.export(posenc.RoPE(4, None), (x, x), dynamic_shapes=shapes)
    longer = torch.randn(1, 1, 2**17 + 3, 4)
    got, wanted = program.module()(longer, longer)[0], posenc.RoPE(4, None)(longer, longer)[0]
    assert torch.allclose(got, wanted, rtol=0, atol=1e-6)
