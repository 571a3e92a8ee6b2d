"""The calls that calls.py times, with their results in float64 by plain torch.

One token, q of ``(1, 32, 1, 128)`` and k of ``(1, 8, 1, 128)``, in pairs ``(i, P + i)``, which the
peers have too; and attention over 256 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rotation_peers import Missing, load
from torch import Tensor

import posenc
from posenc.functional import alibi_slopes, qk_norm_rope, rotate_and_cache, rotate_qk, rotate_qk_
from posenc.interop.huggingface import apply_rotary_pos_emb

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
HEADS, KV_HEADS, WIDTH, POSITION, BASE, EPS = 32, 8, 128, 1000, 10_000.0, 1e-6
# Heads, tokens and width of the attention.
ATTENTION = 16, 256, 64
# Units in the last place at the largest number. Peers round each product and sum of a pair;
# attention in float32 rounds each of 256 sums.
LIMIT, ATTENTION_LIMIT = 4.0, {"cuda": 4.0, "cpu": 16.0}
CLONES, PRODUCTS, SDPA = "q.clone(), k.clone()", "q * 2, k * 2, forward + backward", "SDPA, causal"


class Row(NamedTuple):
    """A call to time, and what it must give."""

    call: Callable[[], Any]
    # The results in float64; none for calls of torch.
    exact: Sequence[Tensor] = ()
    # What the call writes besides its results: views of a cache.
    written: Sequence[Tensor] = ()
    # The row that a ratio is to.
    unit: str = CLONES
    grad: bool = False
    limit: float = LIMIT


Rows = dict[str, Row]


class Token:
    """Queries, keys and values of one token, what its calls take, and their exact results."""

    def __init__(self, device: str) -> None:
        draw = torch.Generator(device).manual_seed(0)

        def random(*shape: int, dtype: torch.dtype = DTYPES[device]) -> Tensor:
            return torch.randn(shape, generator=draw, device=device).to(dtype)

        self.q, self.grad_q = random(1, HEADS, 1, WIDTH), random(1, HEADS, 1, WIDTH)
        self.k, self.grad_k = random(1, KV_HEADS, 1, WIDTH), random(1, KV_HEADS, 1, WIDTH)
        self.v, self.weight = random(1, KV_HEADS, 1, WIDTH), random(WIDTH)
        self.device, self.delta = device, -random(KV_HEADS, WIDTH, dtype=torch.float32).abs()
        self.position_ids = torch.tensor([[POSITION]], device=device)
        self.phi = POSITION * rates(WIDTH // 2, device)
        # Tables of (T, P) as RoPE has them, and of (1, 1, D) as models of transformers do.
        angles = torch.arange(2048, device=device)[:, None] * rates(WIDTH // 2, device)
        wide = torch.float32 if device == "cuda" else torch.float64
        self.tables = angles.cos().to(wide), angles.sin().to(wide)
        twice = self.phi.repeat(2)[None, None]
        self.doubled = twice.cos().to(self.q.dtype), twice.sin().to(self.q.dtype)
        self.exact = rotated(self.q, self.phi), rotated(self.k, self.phi)
        self.normed = [rotated(rms_normed(x, self.weight), self.phi) for x in (self.q, self.k)]


def rates(count: int, device: str) -> Tensor:
    """Radians per position in float64."""
    return BASE ** (-torch.arange(count, dtype=torch.float64, device=device) / count)


def rotated(x: Tensor, phi: Tensor) -> Tensor:
    """The rotation of pairs ``(i, P + i)`` in float64."""
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * phi.cos() - b * phi.sin(), a * phi.sin() + b * phi.cos()), -1)


def rms_normed(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in float64."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def polar(x: Tensor, phi: Tensor) -> Tensor:
    """PoPE in float64."""
    size = torch.logaddexp(x.double(), torch.zeros((), dtype=torch.float64, device=x.device))
    return torch.cat((size * phi.cos(), size * phi.sin()), -1)


def torch_rows(t: Token) -> Rows:
    """Calls of torch on the same tensors."""
    return {
        CLONES: Row(lambda: (t.q.clone(), t.k.clone())),
        "q * 2": Row(lambda: t.q * 2),
        "F.rms_norm of q": Row(lambda: F.rms_norm(t.q, (WIDTH,), t.weight, EPS)),
        "SDPA of one token": Row(lambda: F.scaled_dot_product_attention(t.q, t.q, t.q)),
    }


def rotation_rows(t: Token) -> Rows:
    """Calls that rotate, by a table row for the token or by a module."""
    q, k, tables, norms = t.q, t.k, t.tables, (t.weight, t.weight)
    first, second = ([x.clone() for x in (q, k)] for _ in range(2))
    rope = posenc.RoPE(WIDTH, interleaved=False).to(t.device)
    endless = posenc.RoPE(WIDTH, None, interleaved=False).to(t.device)
    pope = posenc.PoPE(WIDTH, num_kv_heads=KV_HEADS).to(t.device)
    pope.delta.data.copy_(t.delta)
    phi = POSITION * rates(WIDTH, t.device)
    polar_qk = polar(q, phi), polar(k, phi + t.delta.double()[:, None])
    at, ids = {"offset": POSITION}, {"position_ids": t.position_ids}
    how: Any = {"interleaved": False}
    calls = {
        "rotate_qk, offset": lambda: rotate_qk(q, k, *tables, **at, **how),
        "rotate_qk, position_ids": lambda: rotate_qk(q, k, *tables, **ids, **how),
        "rotate_qk_, offset": lambda: rotate_qk_(*first, *tables, **at, **how),
        "RoPE, offset": lambda: rope(q, k, **at),
        "RoPE, position_ids": lambda: rope(q, k, **ids),
        "RoPE(max_seq_len=None), offset": lambda: endless(q, k, **at),
        "RoPE(max_seq_len=None), position_ids": lambda: endless(q, k, **ids),
        "RoPE.forward_, offset": lambda: rope.forward_(*second, **at),
        "apply_rotary_pos_emb of posenc": lambda: apply_rotary_pos_emb(q, k, *t.doubled),
    }
    norm_rope = partial(qk_norm_rope, q, k, *norms, *tables, **at, **how)
    return {
        **{name: Row(call, t.exact) for name, call in calls.items()},
        "qk_norm_rope, offset": Row(norm_rope, t.normed),
        "PoPE, offset": Row(lambda: pope(q, k, **at), polar_qk),
    }


def cache_rows(t: Token) -> Rows:
    """Calls that rotate and write keys and values to pages."""
    rope = posenc.RoPE(WIDTH, interleaved=False).to(t.device)
    slots, weights = torch.tensor([[37]], device=t.device), (t.weight, t.weight)
    rows: Rows = {}
    for words, (q, k), norms in (("", t.exact, (None, None)), (", norm", t.normed, weights)):
        how: Any = {"position_ids": t.position_ids, "q_weight": norms[0], "k_weight": norms[1]}
        functional = partial(rotate_and_cache, t.q, t.k, t.v, *t.tables, interleaved=False)
        method = partial(rope.rotate_and_cache, t.q, t.k, t.v)
        calls = {"rotate_and_cache": functional, "RoPE.rotate_and_cache": method}
        for name, write in calls.items():
            # Each has pages of its own, of 16 tokens: slot 37 is in the third.
            caches = t.k.new_zeros(2, 64, 16, KV_HEADS, WIDTH).unbind()
            written = [cache[2, 5] for cache in caches]
            exact = q, k[0, :, 0], t.v[0, :, 0].double()
            rows[name + words] = Row(partial(write, *caches, slots, **how), exact, written)
    return rows


def transformers_row(t: Token) -> Row:
    """The function of Llama's file."""
    apply = load("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    return Row(lambda: apply(t.q, t.k, *t.doubled), t.exact)


def liger_row(t: Token) -> Row:
    """Liger's kernel, which writes into its inputs."""
    rotate = load("liger_kernel.ops.rope").LigerRopeFunction.apply
    refuse_cpu(t)
    q, k = t.q.clone(), t.k.clone()
    return Row(lambda: rotate(q, k, *t.doubled), t.exact)


def flash_attention_row(t: Token) -> Row:
    """FlashAttention's kernel, once for queries and once for keys."""
    rotate = load("flash_attn.ops.triton.rotary").apply_rotary
    refuse_cpu(t)
    q, k = (x.transpose(1, 2).contiguous() for x in (t.q, t.k))
    cos, sin = (table.to(q.dtype) for table in t.tables)
    exact = [x.transpose(1, 2) for x in t.exact]
    return Row(lambda: (rotate(q, cos, sin, POSITION), rotate(k, cos, sin, POSITION)), exact)


def refuse_cpu(t: Token) -> None:
    """Refuse tensors that a Triton kernel cannot read."""
    if t.device != "cuda":
        raise Missing("it runs on CUDA only")


PEERS: Mapping[str, Callable[[Token], Row]] = {
    "apply_rotary_pos_emb of transformers": transformers_row,
    "Liger, in place": liger_row,
    "FlashAttention": flash_attention_row,
}


def gradient_rows(t: Token) -> Rows:
    """Forward and backward of the rotation, beside that of two products."""
    leaves = [x.clone().requires_grad_() for x in (t.q, t.k)]
    gradients = t.grad_q, t.grad_k
    rope = posenc.RoPE(WIDTH, interleaved=False).to(t.device)
    how: Any = {"offset": POSITION, "interleaved": False}
    calls = {
        PRODUCTS: lambda q, k: (q * 2, k * 2),
        "rotate_qk, forward + backward": lambda q, k: rotate_qk(q, k, *t.tables, **how),
        "RoPE, forward + backward": lambda q, k: rope(q, k, POSITION),
    }
    back = [rotated(x, -t.phi) for x in gradients]
    return {
        name: Row(
            lambda call=call: torch.autograd.grad(call(*leaves), leaves, gradients),
            () if name == PRODUCTS else back,
            unit=PRODUCTS,
            grad=True,
        )
        for name, call in calls.items()
    }


def attention_rows(device: str) -> Rows:
    """ALiBi beside SDPA without a bias."""
    heads, length, width = ATTENTION
    draw = torch.Generator(device).manual_seed(0)
    made = torch.randn(4, 1, heads, length, width, generator=draw, device=device)
    *qkv, gradient = made.to(DTYPES[device]).unbind()
    leaves = [x.clone().requires_grad_() for x in qkv]
    alibi = posenc.ALiBi(heads).to(device)
    limit, rows = ATTENTION_LIMIT[device], Rows()
    for name, attend, slopes in (
        (SDPA, causal_sdpa, torch.zeros(heads, device=device)),
        ("ALiBi", alibi, alibi_slopes(heads, device=device)),
    ):
        wide = [x.double().requires_grad_() for x in qkv]
        out = attended(*wide, slopes.double())
        back = torch.autograd.grad(out, wide, gradient.double())
        rows[name] = Row(lambda attend=attend: attend(*qkv), [out.detach()], unit=SDPA, limit=limit)
        rows[f"{name}, forward + backward"] = Row(
            lambda attend=attend: torch.autograd.grad(attend(*leaves), leaves, gradient),
            back,
            unit=f"{SDPA}, forward + backward",
            grad=True,
            limit=limit,
        )
    return rows


def causal_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of torch without a bias."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def attended(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """Causal attention with ALiBi, by its formula."""
    index = torch.arange(q.shape[2], device=q.device)
    ahead = index - index[:, None]
    scores = q @ k.mT / math.sqrt(q.shape[-1]) + slopes[:, None, None] * ahead
    return scores.masked_fill(ahead > 0, -math.inf).softmax(-1) @ v


def all_rows(device: str) -> tuple[Rows, dict[str, str]]:
    """Everything that is timed, and why peers are missing."""
    t = Token(device)
    rows, missing = {**torch_rows(t), **rotation_rows(t), **cache_rows(t)}, {}
    for name, peer in PEERS.items():
        try:
            rows[name] = peer(t)
        except Missing as why:
            missing[name] = str(why)
    return {**rows, **gradient_rows(t), **attention_rows(device)}, missing


def check(name: str, row: Row) -> None:
    """Stop if a result is off by more than the limit."""
    if not row.exact:
        return
    with torch.set_grad_enabled(row.grad):
        result = row.call()
    got = [*(result if isinstance(result, Sequence) else [result]), *row.written]
    for x, exact in zip(got, row.exact, strict=True):
        off = (x.double() - exact).abs().max() / exact.abs().max() / torch.finfo(x.dtype).eps
        if not off <= row.limit:
            raise SystemExit(f"{name} is off by {off:.3g} ulp: not timed")
