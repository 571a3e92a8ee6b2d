"""The contestants: posenc, plain torch, and one small adapter for each peer.

An adapter takes a workload, builds the tables and modules that a model builds once, and returns the
function that every layer calls, which is timed. If it cannot run, it raises :class:`Missing`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, TypeAlias

import torch
from rotation_cases import BASE, EPS, Workload
from rotation_truth import cis
from torch import Tensor

from posenc import functional, nn

Call: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Missing(Exception):
    """Why a contestant does not take part."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """Code that rotates q and k."""

    name: str
    # Returns the function to time for a workload.
    prepare: Callable[[Workload], Call]
    # The package that has the code; None for posenc and for formulas in plain torch.
    package: str | None = None
    # Whether the call writes into q and k.
    in_place: bool = False
    # Whether its own code computes angles in float32.
    float32_angles: bool = False

    def version(self) -> str | None:
        """Installed version of the package, None if there is none."""
        try:
            return metadata.version(self.package) if self.package else None
        except metadata.PackageNotFoundError:
            return None


def contestants(work: Workload, *, peers: bool = True) -> list[Contestant]:
    """Everyone who may take part in ``work``, present or not; without ``peers``, posenc alone."""
    everyone = _QK_NORM if work.qk_norm else _ROTARY
    return [c for c in everyone if peers or c.name.startswith("posenc")]


def posenc_forward(work: Workload) -> Call:
    """``RoPE.forward``: new tensors, positions checked, table rows picked."""
    return partial(_rope(work), **_positions(work))


def posenc_in_place(work: Workload) -> Call:
    """``functional.rotate_qk_``: q and k in one pass, in place."""
    _only(not work.training, "without gradients")
    rope = _rope(work)
    rotate: Any = partial(functional.rotate_qk_, interleaved=work.interleaved, **_positions(work))
    return lambda q, k: rotate(q, k, rope.cos_cached, rope.sin_cached)


def posenc_qk_norm(work: Workload) -> Call:
    """``functional.qk_norm_rope``: norm and rotation in one pass."""
    fused = partial(functional.qk_norm_rope, eps=EPS, interleaved=work.interleaved)
    at = work.positions() if work.ids else work.positions()[0]
    weights, tables = work.weights(), _rope(work).tables(at)
    return lambda q, k: fused(q, k, *weights, *tables)


def transformers(work: Workload) -> Call:
    """Llama's function for the half layout, Cohere's for the interleaved one."""
    name = "Cohere" if work.interleaved else "Llama"
    folder = f"transformers.models.{name.lower()}"
    modeling = load(f"{folder}.modeling_{name.lower()}")
    config = getattr(load(f"{folder}.configuration_{name.lower()}"), f"{name}Config")(
        hidden_size=work.heads * work.dim,
        num_attention_heads=work.heads,
        max_position_embeddings=work.max_seq_len,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    tables = getattr(modeling, f"{name}RotaryEmbedding")(config).to(work.device)
    like = torch.empty(0, dtype=work.dtype, device=work.device)
    cos, sin = tables(like, work.positions())
    apply = modeling.apply_rotary_pos_emb
    return lambda q, k: apply(q, k, cos, sin)


def rotary_embedding_torch(work: Workload) -> Call:
    """Its ``rotate_queries_or_keys``, with the cache it keeps by default."""
    _only(work.interleaved and not work.ids, "interleaved and offset")
    peer = load("rotary_embedding_torch").RotaryEmbedding(work.dim, theta=BASE)
    return _each(partial(peer.to(work.device).rotate_queries_or_keys, offset=work.offset))


def complex_multiply(work: Workload) -> Call:
    """Neighbouring channels seen as complex numbers, times a complex64 table."""
    _only(work.interleaved, "interleaved")
    table = cis(work)[:, None].to(torch.complex64)

    def rotate(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(z * table).flatten(-2).to(x.dtype)

    return _each(rotate)


def liger(work: Workload) -> Call:
    """Its Triton kernel, in place; in training on clones, or it would overwrite the leaves."""
    _only(work.device == "cuda" and not work.interleaved, "CUDA and half")
    rotate = load("liger_kernel.ops.rope").LigerRopeFunction.apply
    table = cis(work).repeat(1, 1, 2)
    cos, sin = table.real.to(work.dtype), table.imag.to(work.dtype)
    if work.training:
        return lambda q, k: rotate(q.clone(), k.clone(), cos, sin)
    return lambda q, k: rotate(q, k, cos, sin)


def norm_then_rotate(work: Workload) -> Call:
    """``rms_norm`` of torch, then the rotation as a formula in float32."""
    table = cis(work)[:, None]
    cos, sin = table.real.float(), table.imag.float()
    grid, axis = ((-1, 2), -1) if work.interleaved else ((2, -1), -2)

    def rotate(x: Tensor, weight: Tensor) -> Tensor:
        x = torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
        a, b = x.float().unflatten(-1, grid).unbind(axis)
        y = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis)
        return y.flatten(-2).to(x.dtype)

    q_weight, k_weight = work.weights()
    return lambda q, k: (rotate(q, q_weight), rotate(k, k_weight))


def _compiled(prepare: Callable[[Workload], Call]) -> Callable[[Workload], Call]:
    # Shapes are fixed, as they are for the kernels it is compared with.
    return lambda work: torch.compile(prepare(work), dynamic=False)


def _each(rotate: Callable[[Tensor], Tensor]) -> Call:
    return lambda q, k: (rotate(q), rotate(k))


def _rope(work: Workload) -> nn.RoPE:
    rope = nn.RoPE(work.dim, work.max_seq_len, BASE, interleaved=work.interleaved)
    return rope.to(work.device)


def _positions(work: Workload) -> dict[str, Any]:
    return {"position_ids": work.positions()} if work.ids else {"offset": work.offset}


def load(module: str) -> Any:
    """Import a module of a peer; raise :class:`Missing` if that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except Exception as broken:
            # A missing package is only one of the ways in which an import of a peer fails.
            why = " ".join(str(broken).split()) or type(broken).__name__
            raise Missing(f"cannot import {module}: {why}") from broken


def _only(fits: bool, what: str) -> None:
    if not fits:
        raise Missing(f"{what} only")


_HF: dict[str, Any] = {"package": "transformers", "float32_angles": True}
_LUCIDRAINS = "rotary-embedding-torch"
_ROTARY = (
    Contestant("posenc", posenc_forward),
    Contestant("posenc in place", posenc_in_place, in_place=True),
    Contestant("transformers eager", transformers, **_HF),
    Contestant("transformers compiled", _compiled(transformers), **_HF),
    Contestant(_LUCIDRAINS, rotary_embedding_torch, _LUCIDRAINS, float32_angles=True),
    Contestant("complex multiply", complex_multiply),
    Contestant("Liger in place", liger, "liger-kernel", in_place=True),
)
_QK_NORM = (
    Contestant("posenc", posenc_qk_norm),
    Contestant("torch eager", norm_then_rotate),
    Contestant("torch compiled", _compiled(norm_then_rotate)),
)
