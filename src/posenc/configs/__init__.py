"""The positions that a model's ``config.json`` describes; transformers is not imported."""

from posenc.configs.non_rotary import (
    Alibi,
    Buckets,
    Disentangled,
    Keys,
    PositionTable,
    Sinusoids,
    not_rotary,
)
from posenc.configs.reader import (
    LAYOUT,
    as_dict,
    mentions_rotation,
    model_defaults,
    open_config,
    other_parts,
    text_part,
    types_with,
)
from posenc.configs.recipes import (
    Positions,
    Recipe,
    read,
    read_bias,
    read_layers,
    read_positions,
)
from posenc.configs.rules import read_scaling

__all__ = [
    "LAYOUT", "Alibi", "Buckets", "Disentangled", "Keys", "PositionTable", "Positions", "Recipe",
    "Sinusoids", "as_dict", "mentions_rotation", "model_defaults", "not_rotary", "open_config",
    "other_parts", "read", "read_bias", "read_layers", "read_positions", "read_scaling",
    "text_part", "types_with",
]  # fmt: skip
