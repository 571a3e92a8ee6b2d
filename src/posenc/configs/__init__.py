"""What a model's ``config.json`` says of its positions; nothing of transformers is imported."""

from posenc.configs.defaults import HEADS, INTERLEAVED_TO_HALVES
from posenc.configs.nested import LAYOUT, text_part
from posenc.configs.others import Alibi, Buckets, Learned, Other, Sinusoidal, instead
from posenc.configs.reader import Config
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
    "HEADS", "INTERLEAVED_TO_HALVES", "LAYOUT", "Alibi", "Buckets", "Config", "Learned", "Other",
    "Positions", "Recipe", "Rotary", "Sinusoidal", "as_dict", "instead", "layer_types", "read",
    "read_alibi", "read_positions", "text_part",
]  # fmt: skip
