"""Tables are exact, shared by equal modules, and left alone by traced and refused calls."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

import oracles
import posenc
from support.assertions import assert_rotated


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
def test_a_bfloat16_model_is_right_at_position_4095(interleaved):
    """The promise of the library in one line: peers are off by up to 2.0 here."""
    x = torch.randn(3, 1, 1, 128).bfloat16()
    rope = posenc.RoPE(128, 4096, interleaved=interleaved).bfloat16()
    assert_rotated(rope.apply(x, x, 4095)[0], x, [4095], interleaved=interleaved)
    embedding = posenc.RotaryPosEmbedding(interleaved=interleaved).bfloat16()
    got = embedding(x, torch.tensor([4095]))
    assert_rotated(got, x, [4095], interleaved=interleaved)


def test_added_encodings_are_right_in_bfloat16_at_position_4095():
    """Half an ulp of the sum, and float32 noise at the magnitude of the terms."""
    x = torch.randn(64, 1, 128).bfloat16()
    truth = x.double() + oracles.sinusoid([4095], 128)
    budget = 0.5 * oracles.ulp(truth.abs(), torch.bfloat16) + 4e-7
    fixed = posenc.SinusoidalPE(4096, 128).bfloat16()
    free = posenc.SinusoidalPosEmbedding().bfloat16()
    for module in (fixed, free):
        assert ((module(x, offset=4095).double() - truth).abs() <= budget).all()
    learned = posenc.LearnedPosEmbedding(4096, 128).bfloat16()
    truth = x.double() + learned.pos_emb.weight[4095].double()
    budget = 0.5 * oracles.ulp(truth.abs(), torch.bfloat16) + 4e-7
    assert ((learned(x, offset=4095).double() - truth).abs() <= budget).all()


def test_positions_on_another_device_are_moved():
    rope = posenc.RotaryPosEmbedding()
    out = rope(torch.randn(4, 8, device="meta"), torch.arange(4))
    assert out.is_meta


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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_functions_of_shapes_can_be_traced():
    from posenc.functional import rotary_pos_embedding, sinusoidal_grid_embedding

    x, other = torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    at = torch.arange(10).view(2, 5)
    for function in (
        rotary_pos_embedding,
        lambda x: x + sinusoidal_grid_embedding(at, x.shape[-1]),
    ):
        assert torch.equal(torch.jit.trace(function, (x,))(other), function(other))


def test_a_subclass_keeps_its_own_buffers_as_torch_would():
    class Scaled(posenc.RoPE):
        def __init__(self):
            super().__init__(8, 16)
            self.register_buffer("scale", torch.ones(3))

    module = Scaled().bfloat16()
    assert module.scale.dtype == torch.bfloat16
    assert module.cos_cached.dtype == torch.float64


def test_vmap_over_positions():
    rope, x, ids = posenc.RotaryPosEmbedding(), torch.randn(5, 3, 4), torch.arange(15).view(5, 3)
    assert torch.equal(torch.func.vmap(rope)(x, ids), rope(x, ids))


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


def test_a_table_goes_with_the_last_module_that_reads_it():
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


def test_a_table_is_for_reading():
    for module in (posenc.RoPE(8, 16), posenc.RotaryPosEmbedding(8, 16)):
        for name in ("cos_cached", "sin_cached"):
            with pytest.raises(AttributeError):
                setattr(module, name, torch.zeros(16, 4))
    with pytest.raises(AttributeError):
        posenc.SinusoidalPE(16, 8).encodings = None
    with pytest.raises(AttributeError):
        posenc.XPos(8, max_seq_len=16).q_cos = None


def test_halves_on_a_gpu_read_the_same_numbers_in_float32():
    """The kernel rounds float64 tables to float32 for them; rounding before gives the same."""
    rope, x = posenc.RoPE(8, 16), torch.randn(1, 1, 4, 8)
    narrow = rope._tables.read(x, torch.float32)
    assert torch.equal(narrow[0], rope.cos_cached.float())
    assert torch.equal(narrow[1], rope.sin_cached.float())
    assert rope._tables.read(x, torch.float32)[0] is narrow[0]


def test_a_pickle_holds_no_numbers():
    small, large = (len(pickle.dumps(posenc.RoPE(64, n))) for n in (2, 20_000))
    assert abs(large - small) < 16


def test_a_call_elsewhere_does_not_move_a_module():
    rope, alibi, x = posenc.RoPE(8, 16), posenc.ALiBi(4), torch.zeros(1, 1, 2, 8, device="meta")
    assert rope(x, x)[0].is_meta
    assert alibi.bias(4, device="meta").is_meta
    assert not rope.cos_cached.is_meta
    assert not alibi.slopes.is_meta


def test_a_module_on_meta_stays_there_through_a_cast_and_leaves_by_to():
    """A model that was loaded by assignment has modules on meta beside weights that are not."""
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


def test_an_exported_length_has_no_bound_of_ours():
    """Tables that grow stop at 2**17 rows, and programs do not know of that."""
    x = torch.randn(1, 1, 8, 4)
    length = torch.export.Dim("length", max=2**18)
    shapes = ({2: length}, {2: length})
    program = torch.export.export(posenc.RoPE(4, None), (x, x), dynamic_shapes=shapes)
    longer = torch.randn(1, 1, 2**17 + 3, 4)
    got, wanted = program.module()(longer, longer)[0], posenc.RoPE(4, None)(longer, longer)[0]
    assert torch.allclose(got, wanted, rtol=0, atol=1e-6)
