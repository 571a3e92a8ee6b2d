"""The smoke test of an installed posenc, with torch and nothing else: `python smoke.py c|pure`.

The word says whether the wheel has the C extension.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

import posenc

# What the extras and the tests bring, and torch does not.
OPTIONAL = "numpy typer rich matplotlib safetensors transformers diffusers onnx pytest".split()
B, H, T, D = 2, 4, 12, 16
WIDTH = H * D


def check_the_install(expected: str) -> None:
    """The package is the installed one, alone with torch, and has the kernels of its wheel."""
    installed = Path(sysconfig.get_path("platlib")), Path(sysconfig.get_path("purelib"))
    folder = Path(posenc.__file__).parents[1]
    assert folder in installed, f"posenc was imported from {folder}, which is not the installed one"
    others = [name for name in OPTIONAL if importlib.util.find_spec(name)]
    assert not others, f"the environment is not empty: it has {', '.join(others)}"
    assert posenc.__version__ == importlib.metadata.version("posenc"), posenc.__version__
    kernels = {backend.name: backend for backend in posenc.backends()}
    assert kernels["c"].available == (expected == "c"), f"wheel: {expected}; {kernels['c']}"
    print(f"posenc {posenc.__version__}, torch {torch.__version__}; C kernels: {kernels['c'].why}")


def check_the_encodings() -> None:
    """Every family of modules runs forward and backward, in two dtypes."""
    rope, yarn = posenc.RoPE(D, 64), posenc.scaling.YaRN(factor=4, original_length=16)
    added = [
        posenc.SinusoidalPosEmbedding(),
        posenc.LearnedPosEmbedding(64, WIDTH),
        posenc.SinusoidalGrid((3, 4), embed_dim=WIDTH),
    ]
    rotary = [
        rope,
        posenc.RoPE(D, 64, interleaved=False, scaling=yarn),
        posenc.XPos(D),
        posenc.MixedRoPE(D, num_kv_heads=H, coordinates=1),
        posenc.STRING(D, num_kv_heads=H, coordinates=1),
    ]
    attention = [
        posenc.PoPE(D, num_kv_heads=H, max_seq_len=64).attention,
        posenc.SelfExtend(rope, group=2, window=4),
        posenc.DualChunk(rope, chunk=6, window=2),
        posenc.ALiBi(H),
        posenc.T5Bias(H, causal=True),
        posenc.KERPLE(H),
        posenc.FIRE(H),
        posenc.CoPE(D, max_pos=8),
        posenc.GridBias((3, 4), num_heads=H),
        posenc.RelativeKeys(D, max_distance=8),
        posenc.TransformerXLBias(H, embed_dim=WIDTH),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for module in (*added, *rotary, *attention):
            if isinstance(module, torch.nn.Module):
                module.to(dtype)
            q, k, v = (torch.randn(B, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
            if module in added:
                result = module(q.transpose(1, 2).flatten(2))
            else:
                result = torch.cat(module(q, k)) if module in rotary else module(q, k, v)
            result.float().square().sum().backward()
            assert result.dtype == dtype, module
            assert result.isfinite().all(), module
            assert q.grad is not None, module
            assert q.grad.isfinite().all(), module
    features = posenc.FourierFeatures(2, num_frequencies=8, kind="learned")
    features(torch.rand(5, 2)).sum().backward()


def check_the_numbers() -> None:
    """A rotation of the kernels of this wheel is that of the formula, written out in float64."""
    x = torch.randn(1, 1, 33, 48, generator=torch.Generator().manual_seed(0))
    rates = 10_000.0 ** (-torch.arange(24, dtype=torch.float64) / 24)
    turn = torch.polar(torch.ones(33, 24, dtype=torch.float64), torch.arange(33)[:, None] * rates)
    exact = torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (24, 2))) * turn)
    found, _ = posenc.RoPE(48)(x, x)
    # Half a unit in the last place of a float32 as long as the longest pair.
    bound = x.unflatten(-1, (24, 2)).norm(dim=-1).max().item() * 2.0**-24
    assert (found.double() - exact.flatten(-2)).abs().max().item() <= bound


def check_the_command() -> None:
    """Without its extra, the command says how to install that."""
    command = shutil.which("posenc", path=sysconfig.get_path("scripts"))
    assert command is not None, "the command posenc was not installed"
    for start in ([command], [sys.executable, "-m", "posenc"]):
        done = subprocess.run([*start, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done
        assert "pip install 'posenc[cli]'" in done.stderr, done
        assert "Traceback" not in done.stderr, done


if __name__ == "__main__":
    if sys.argv[1:] not in (["c"], ["pure"]):
        raise SystemExit("smoke.py: say c, for a wheel with the C extension, or pure, without it")
    check_the_install(sys.argv[1])
    check_the_encodings()
    check_the_numbers()
    check_the_command()
    print("smoke test passed")
