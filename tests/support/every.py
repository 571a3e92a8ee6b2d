"""Every module, and a call of every function, of the library's public rooms.

As a script this file writes what they make under each of torch's default dtypes to a folder.
"""

from __future__ import annotations

import inspect
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import posenc
from posenc import attention, axes, functional, positions, scaling

# As a script, this file's own folder is where Python looks first.
sys.path.insert(0, str(Path(__file__).parents[1]))

from support import modules
from support.modules import Use, attended, rotated

TOKENS, HEADS, WIDTH = 144, 4, 8


def _of_cells(module: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Any:
    return module(q, k, position_ids=positions.grid(2, 3, device=q.device))


def _rope(**options: Any) -> posenc.RoPE:
    return posenc.RoPE(modules.DIM, 16, **options)


# Lengths that decide how a module computes are 8, between those that are traced and run.
MODULES = modules.MODULES | {
    "DeBERTaBias, in buckets": Use(
        lambda: posenc.DeBERTaBias(
            modules.HEADS,
            head_dim=modules.DIM,
            max_relative_positions=512,
            position_buckets=256,
            causal=False,
        ),
        attended,
    ),
    "FIRE, by rows from 8": Use(
        lambda: posenc.FIRE(modules.HEADS, hidden=3, threshold=8.0, learn_threshold=False), attended
    ),
    "MixedRoPE, of an image": Use(
        lambda: posenc.MixedRoPE(modules.DIM, num_kv_heads=modules.HEADS), _of_cells
    ),
    "RoPE, of an image": Use(lambda: _rope(axes=axes.Axial(2)), _of_cells),
    "RoPE, dynamic": Use(
        lambda: _rope(scaling=scaling.DynamicNTK(2.0, original_length=8)), rotated
    ),
    "RoPE, llama3": Use(lambda: _rope(scaling=scaling.Llama3(8.0, original_length=8)), rotated),
    "RoPE, longrope": Use(
        lambda: _rope(
            scaling=scaling.LongRoPE(
                (1.1,) * 2, long_factor=(2.3,) * 2, original_length=8, factor=4.0
            )
        ),
        rotated,
    ),
    "SelfExtend, from 8": Use(lambda: posenc.SelfExtend(_rope(), group=2, window=8), attended),
    "RoPE, yarn": Use(lambda: _rope(scaling=scaling.YaRN(4.0, original_length=8)), rotated),
}


def qkv(dtype: torch.dtype = torch.float32, *shape: int) -> list[Tensor]:
    """Queries, keys and values, whatever the default dtype."""
    make = torch.Generator().manual_seed(0)
    shape = shape or (2, modules.HEADS, modules.TOKENS, modules.DIM)
    drawn = torch.randn(3, *shape, generator=make, dtype=torch.float32, device="cpu")
    return list(drawn.to(dtype).unbind())


def draw_parameters(module: nn.Module) -> None:
    """Random numbers in place of what a module starts with, which is often zero."""
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=make, dtype=torch.float32, device="cpu") / 2)


def functions(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """A call of each public function, by its name in `posenc`."""
    f, p, a = functional, positions, attention
    cos, sin = torch.linspace(-1, 1, 2 * TOKENS * WIDTH, dtype=torch.float64).view(2, TOKENS, WIDTH)
    half = cos[:, : WIDTH // 2], sin[:, : WIDTH // 2]
    slopes, at = f.alibi_slopes(HEADS), p.grid(12, 12)
    line, shape = torch.arange(TOKENS), (16, 16, HEADS, WIDTH)
    table = torch.linspace(-1, 1, HEADS * 50, dtype=torch.float32).view(HEADS, 50)
    vectors = torch.linspace(-1, 1, 50 * WIDTH, dtype=torch.float32).view(50, WIDTH)
    places = torch.tensor(0), torch.arange(HEADS)[:, None, None], line[:, None], line

    def mod(made: Any) -> Any:
        return made(torch.zeros((), dtype=torch.float32), *places)

    def cached() -> Any:
        k_cache, v_cache = (torch.zeros(shape, dtype=q.dtype) for _ in "kv")
        flat = [x[0].transpose(0, 1) for x in (q, k, v)]
        out = f.rotate_and_cache(*flat, *half, k_cache, v_cache, line, position_ids=line)
        return out, k_cache, v_cache

    def blocks() -> Any:
        mask = a.alibi_block_mask(slopes, TOKENS, score_bound=0.1, dtype=q.dtype, block=16)
        return mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices

    def terms() -> Any:
        rows = a.relative_terms(q, k, lambda d: d.clamp(0, 49), for_queries=vectors)
        return a.biased_attention(q, k, v, rows, causal=True)

    ones = torch.ones(WIDTH, dtype=q.dtype)
    jitter = {"shift": 0.1, "jitter": 2.0, "rescale": 2.0}
    return {
        "functional.alibi_bias": lambda: f.alibi_bias(slopes, TOKENS),
        "functional.alibi_model_slopes": lambda: [
            f.alibi_model_slopes(model, 12, head_dim=WIDTH) for model in ("bloom", "falcon", "mpt")
        ],
        "functional.alibi_slopes": lambda: f.alibi_slopes(12),
        "functional.fourier_features": lambda: f.fourier_features(at.T, vectors[:5, :2]),
        "functional.nerf_features": lambda: f.nerf_features(at.T, 5),
        "functional.pixel_frequencies": lambda: f.pixel_frequencies(8, linear=False),
        "functional.polar": lambda: f.polar(q, cos, sin, vectors[:HEADS]),
        "functional.qk_norm_rope": lambda: f.qk_norm_rope(q, k, ones, ones, *half),
        "functional.rotary_pos_embedding": lambda: f.rotary_pos_embedding(q),
        "functional.rotate": lambda: f.rotate(q, *half),
        "functional.rotate_": lambda: f.rotate_(q.clone(), *half),
        "functional.rotate_and_cache": cached,
        "functional.rotate_qk": lambda: f.rotate_qk(q, k, *half),
        "functional.rotate_qk_": lambda: f.rotate_qk_(q.clone(), k.clone(), *half),
        "functional.sinusoidal_grid_embedding": lambda: f.sinusoidal_grid_embedding(at, WIDTH),
        "functional.sinusoidal_pos_embedding": lambda: f.sinusoidal_pos_embedding(TOKENS, WIDTH),
        "functional.t5_buckets": lambda: f.t5_buckets(line),
        "functional.timestep_embedding": lambda: f.timestep_embedding(line, WIDTH),
        "positions.context_parallel": lambda: p.context_parallel(TOKENS, 0, 2, zigzag=True),
        "positions.from_cu_seqlens": lambda: p.from_cu_seqlens(torch.tensor([0, 3, 8])),
        "positions.from_left_padding": lambda: p.from_left_padding(line[None] > 3),
        "positions.from_offset": lambda: p.from_offset(TOKENS, torch.tensor([3, 5])),
        "positions.grid": lambda: p.grid(3, 4, prefix=1),
        "positions.mrope": lambda: p.mrope([2, (1, 2, 2), 1]),
        "positions.normalized_grid": lambda: p.normalized_grid(
            3, 7, generator=torch.Generator().manual_seed(0), **jitter
        ),
        "attention.alibi_attention": lambda: a.alibi_attention(q, k, v, slopes, causal=True),
        "attention.alibi_block_mask": blocks,
        "attention.alibi_mask_mod": lambda: a.alibi_mask_mod(TOKENS, TOKENS)(*places),
        "attention.alibi_reach": lambda: a.alibi_reach(
            slopes, TOKENS, score_bound=0.1, dtype=q.dtype
        ),
        "attention.alibi_score_mod": lambda: mod(a.alibi_score_mod(slopes, TOKENS, TOKENS)),
        "attention.biased_attention": lambda: [
            a.biased_attention(q, k, v, bias, causal=True)
            for bias in (None, a.DistanceTable(table), a.RunningSum(-line * slopes[:, None]))
        ],
        "attention.biased_attention_with_lse": lambda: a.biased_attention_with_lse(
            q, k, v, causal=True
        ),
        "attention.bound_scores": lambda: a.bound_scores(q, k),
        "attention.relative_bias": lambda: a.relative_bias(a.DistanceTable(table), TOKENS),
        "attention.relative_score_mod": lambda: mod(
            a.relative_score_mod(a.DistanceTable(table), TOKENS, TOKENS)
        ),
        "attention.relative_terms": terms,
    }


def public_functions() -> set[str]:
    """The names of all public functions of the rooms that `functions` calls."""
    rooms = {"functional": functional, "positions": positions, "attention": attention}
    return {
        f"{room}.{name}"
        for room, module in rooms.items()
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
    }


def made_under(default: torch.dtype) -> dict[tuple[str, str], Any]:
    """What every module and function makes, holds and starts with under a default dtype."""
    torch.set_default_dtype(default)
    found: dict[tuple[str, str], Any] = {}
    for name, use in MODULES.items():
        torch.manual_seed(0)
        module = use.build().eval()
        # Those in torch's default dtype start as roundings to it.
        start = {n: p.detach().clone() for n, p in module.named_parameters()}
        found[name, "start"] = {n: p for n, p in start.items() if p.dtype == torch.float32}
        tables = getattr(module, "_tables", None)
        found[name, "tables"] = () if tables is None else tables.shown() or ()
        module.float()
        draw_parameters(module)
        for dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                found[name, str(dtype)] = use.call(module, *qkv(dtype))
    for dtype in (torch.float32, torch.bfloat16):
        for name, call in functions(*qkv(dtype, 2, HEADS, TOKENS, WIDTH)).items():
            torch.manual_seed(0)
            found[name, str(dtype)] = call()
    return found


def _write(name: str, folder: str) -> None:
    torch.save(made_under(getattr(torch, name)), Path(folder, f"{name}.pt"))


if __name__ == "__main__":
    # A process for each: caches would give tables that were made under another dtype.
    start = multiprocessing.get_context("fork").Process
    for dtype_name in sys.argv[2:]:
        process = start(target=_write, args=(dtype_name, sys.argv[1]))
        process.start()
        process.join()
