"""What a model's ``config.json`` says of its positions; nothing of transformers is imported."""

from posenc.configs.defaults import HEADS, ROTATED, SHARES, WIDTHS
from posenc.configs.nested import LAYOUT, text_part
from posenc.configs.others import Alibi, Buckets, Learned, Other, Sinusoidal, instead
from posenc.configs.recipes import (
    Positions,
    Recipe,
    Rotary,
    as_dict,
    layer_types,
    read,
    read_alibi,
    read_positions,
)

__all__ = [
    "HEADS", "LAYOUT", "ROTATED", "SHARES", "WIDTHS", "Alibi", "Buckets", "Learned", "Other",
    "Positions", "Recipe", "Rotary", "Sinusoidal", "as_dict", "instead", "layer_types", "read",
    "read_alibi", "read_positions", "text_part",
]  # fmt: skip
