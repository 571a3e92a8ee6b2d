"""The rotations of all layers of a model, some of which may not rotate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posenc import configs
from posenc.nn.rope import RoPE


def rope_layers(config: dict[str, Any] | str | Path | Any, **keywords: Any) -> list[RoPE | None]:
    """The rotation of each layer of a model, from its config; None for layers that do not rotate.

    Llama 4 and SmolLM3 rotate in all but every fourth layer, Cohere 2 and EXAONE 4 only in layers
    with a sliding window, and Gemma 3 at another base in these. Layers that rotate alike share a
    module.

    Args:
        config: As in :meth:`posenc.RoPE.from_config`; it must name the number of layers. Their
            types, if rotations differ by them, are its ``layer_types``, or those that transformers
            fills in for the model type.
        **keywords: Arguments of :class:`posenc.RoPE`, which override the config.

    Returns:
        One for each layer, without a ``max_seq_len`` unless one is given.

    Examples:
        >>> config = {"model_type": "smollm3", "head_dim": 64, "num_hidden_layers": 8}
        >>> ropes = rope_layers(config)
        >>> [i for i, rope in enumerate(ropes) if rope is None]
        [3, 7]
    """
    layers = configs.read_layers(config, base=keywords.get("base"))
    made = {
        recipe: None
        if recipe is None
        else RoPE(**{"max_seq_len": None, **recipe.arguments(), **keywords})
        for recipe in dict.fromkeys(layers)
    }
    return [made[recipe] for recipe in layers]
