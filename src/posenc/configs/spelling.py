"""The keys that are known, and those that somebody mistyped."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from posenc.configs.nested import LAYOUT

# Keys of a dict of rotation.
KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings "
    "attention_factor beta_fast beta_slow short_factor long_factor low_freq_factor "
    "high_freq_factor mscale mscale_all_dim truncate mrope_section mrope_interleaved interleaved "
    "short_mscale long_mscale alpha finetuned llama_4_scaling_beta max_position_embeddings".split()
)
# Keys of a config beside it, whose misspelling would go unnoticed.
OUTSIDE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "rope_local_base_freq",
    "partial_rotary_factor", "rotary_dim", "rotary_pct", "rope_pct", "rotary_emb_base",
    "rotary_embedding_base", "original_max_position_embeddings", "max_position_embeddings", LAYOUT,
)  # fmt: skip


def is_slip(key: str, meant: str) -> bool:
    """Whether one letter is wrong, missing or too many, or two are swapped; not at the ends."""
    if abs(len(key) - len(meant)) > 1 or meant in key or key in meant:
        return False
    if len(key) == len(meant):
        apart = [i for i, (a, b) in enumerate(zip(key, meant, strict=True)) if a != b]
        swapped = sorted(key) == sorted(meant) and len(apart) == 2
        return swapped or len(apart) == 1
    short, long = sorted((key, meant), key=len)
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def nearest(key: object, known: Sequence[str]) -> str | None:
    """The known key that was probably meant."""
    near = get_close_matches(str(key), known, 1)
    return near[0] if near else None
