"""The positions that a model's ``config.json`` describes; transformers is not imported."""

from posenc.configs.models import facts_of, types_with
from posenc.configs.nested import LAYOUT, as_dict, text_part
from posenc.configs.others import Alibi, Buckets, Learned, Other, Sinusoidal, not_rotary
from posenc.configs.reader import Config, at_layer, open_config
from posenc.configs.recipes import (
    Positions,
    Recipe,
    Rotary,
    layer_types,
    read,
    read_alibi,
    read_positions,
)

__all__ = [
    "LAYOUT", "Alibi", "Buckets", "Config", "Learned", "Other", "Positions", "Recipe", "Rotary",
    "Sinusoidal", "as_dict", "at_layer", "facts_of", "layer_types", "not_rotary", "open_config",
    "read", "read_alibi", "read_positions", "text_part", "types_with",
]  # fmt: skip
