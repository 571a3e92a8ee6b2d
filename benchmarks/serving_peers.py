"""Norm, rotation and write to a cache with the Triton kernels of other libraries.

Each function takes a `Case` of serving.py and returns its call, or raises `Missing`. Tables are in
bfloat16 and gathered beforehand where a peer needs it, as a model does once for all its layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rotation_peers import Missing, load
from torch import Tensor

Call = Callable[[int], Tensor]


def liger(case: Any) -> Call:
    """Norm and rotation of Liger, on copies, which it rotates in place."""
    rotate = load("liger_kernel.ops.rope").LigerRopeFunction.apply
    normalise = load("liger_kernel.ops.rms_norm").LigerRMSNormFunction.apply
    if case.how["interleaved"]:
        raise Missing("Liger rotates halves only")
    dense = torch.contiguous_format
    inputs = [[x.clone(memory_format=dense) for x in case.qkv(i)] for i in range(len(case.packed))]
    at = case.how["position_ids"]
    cos, sin = (table[at].repeat(1, 2)[None].bfloat16() for table in case.tables)
    write = _write(case)

    def call(i: int) -> Tensor:
        q, k, v = inputs[i % len(inputs)]
        if case.weights:
            q, k = (normalise(x, w, 1e-6) for x, w in zip((q, k), case.weights, strict=True))
        q, k = rotate(q[None].transpose(1, 2), k[None].transpose(1, 2), cos, sin)
        write(k.transpose(1, 2)[0], v)
        return q.transpose(1, 2)[0]

    return call


def flash_attention(case: Any) -> Call:
    """Rotation of FlashAttention: each token is a sequence whose position is an offset."""
    rotate = load("flash_attn.ops.triton.rotary").apply_rotary
    if case.weights:
        raise Missing("FlashAttention has no norm of heads")
    cos, sin = (table.bfloat16() for table in case.tables)
    write, heads = _write(case), case.heads

    def call(i: int) -> Tensor:
        packed = case.packed[i % len(case.packed)]
        at, pairs = case.how["position_ids"], case.how["interleaved"]
        rotated = rotate(packed[:, None, : sum(heads)], cos, sin, at, interleaved=pairs)
        q, k = rotated[:, 0].split(heads, 1)
        write(k, packed[:, sum(heads) :])
        return q

    return call


def _write(case: Any) -> Callable[[Tensor, Tensor], None]:
    """The write of vLLM."""
    module = "vllm.v1.attention.ops.triton_reshape_and_cache_flash"
    write = load(module).triton_reshape_and_cache_flash
    dtype = "fp8" if case.scales else "auto"
    one = torch.ones((), device=case.slots.device)
    scales = [case.scales.get(name, one) for name in ("k_scale", "v_scale")]
    return lambda k, v: write(k, v, *case.caches, case.slots, dtype, *scales)


PEERS = {"Liger, vLLM": liger, "FlashAttention, vLLM": flash_attention}
