import inspect
import subprocess
import sys
import warnings

import pytest

import posenc
import posenc.functional
import posenc.nn
import posenc.nn.functional


def test_every_public_name_exists():
    for room in (posenc, posenc.nn, posenc.functional, posenc.nn.functional):
        for name in room.__all__:
            assert hasattr(room, name), f"{room.__name__}.{name}"


def test_the_names_are_the_same_objects_everywhere():
    for name in posenc.functional.__all__:
        assert getattr(posenc.nn.functional, name) is getattr(posenc.functional, name)
    for name in set(posenc.nn.__all__) - {"functional"}:
        assert getattr(posenc, name) is getattr(posenc.nn, name)


def test_importing_needs_torch_alone():
    """Nothing of the extras is imported, and triton's absence goes unnoticed.

    Distributed tensors are left alone: their rules are in `posenc.interop.distributed`.
    """
    script = (
        "import sys; sys.modules['triton'] = None; import torch;"
        "torch_brought = set(sys.modules); import posenc;"
        "new = {m.split('.')[0] for m in set(sys.modules) - torch_brought};"
        "allowed = set(sys.stdlib_module_names) | {'posenc', 'torch'};"
        "assert new <= allowed, new - allowed;"
        "assert 'torch.distributed.tensor' not in sys.modules;"
        # A first call on CUDA does this.
        "from posenc._contract.tracing import SeenOperations\n"
        "with SeenOperations(): torch.empty(1)\n"
        "assert 'torch._dynamo' not in sys.modules, 'the compiler costs a second and more'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def parameters(function):
    return list(inspect.signature(function).parameters.values())


def test_seed_arguments_come_first_and_ours_are_keyword_only():
    seeds = {
        posenc.SinusoidalPosEmbedding: ["seq_len", "embed_dim"],
        posenc.SinusoidalPosEmbedding.forward: ["self", "input_"],
        posenc.functional.sinusoidal_pos_embedding: ["seq_len", "embed_dim", "device", "dtype"],
        posenc.LearnedPosEmbedding: ["max_len", "embed_dim"],
        posenc.LearnedPosEmbedding.forward: ["self", "x", "offset"],
        posenc.RotaryPosEmbedding: ["embed_dim", "max_seq_len", "interleaved"],
        posenc.RotaryPosEmbedding.forward: ["self", "input_", "position_ids"],
        posenc.functional.rotary_pos_embedding: ["input_", "position_ids", "interleaved"],
        posenc.SinusoidalPE: ["max_seq_len", "embed_dim"],
        posenc.SinusoidalPE.get_encoding: ["self", "seq_len"],
        posenc.SinusoidalPE.forward: ["self", "input"],
        posenc.RoPE: ["head_dim", "max_seq_len", "base"],
        posenc.RoPE.forward: ["self", "q", "k", "offset"],
        posenc.ALiBi: ["num_heads"],
        posenc.ALiBi.get_bias: ["self", "seq_len"],
    }
    for function, names in seeds.items():
        found = parameters(function)
        assert [p.name for p in found[: len(names)]] == names, function
        assert all(p.kind is p.KEYWORD_ONLY for p in found[len(names) :]), function


def test_a_warning_of_ours_is_an_error():
    """Whatever is installed: with versions that are not pinned those of others are let pass."""
    with pytest.raises(UserWarning, match="of a test"):
        warnings.warn("of a test", stacklevel=1)
    with pytest.raises(UserWarning, match="of the package"):
        exec("import warnings; warnings.warn('of the package')", {"__name__": "posenc.nn.rope"})
