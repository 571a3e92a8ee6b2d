"""Configs within configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from posenc._contract import checks

# What a checkpoint converted here says of itself, where its family has no key for it.
LAYOUT = "posenc_rope_layout"

# Where a model of several kinds of input keeps what it says of text.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of a config that describes the text model, and what its keys are found under."""
    prefix = ""
    while True:
        for name in _TEXT:
            inner = config.get(name)
            # Some keep a few keys there, and the model's own above.
            if isinstance(inner, Mapping) and (
                "hidden_size" in inner or "hidden_size" not in config
            ):
                config, prefix = inner, f"{prefix}{name}."
                break
        else:
            return config, prefix


def mark_of(config: Mapping[str, Any]) -> Any:
    """What a conversion has left, in the config or in one within it."""
    parts = [config]
    # The list grows while it is read: nothing recurses, however deep a file goes.
    for part in parts:
        if part.get(LAYOUT) is not None:
            return part[LAYOUT]
        parts += [inner for inner in part.values() if isinstance(inner, Mapping)]
    return None


def of_layers(config: Mapping[str, Any], layer_type: str | None, key: str) -> Any:
    """What ``per_layer_config`` says of the layers of one type, by their indices."""
    types, layers = config.get("layer_types"), config.get("per_layer_config")
    if not isinstance(types, (list, tuple)) or not isinstance(layers, Mapping):
        return None
    wanted = {str(index) for index, kind in enumerate(types) if kind == layer_type}
    found = [
        value.get(key)
        for name, value in layers.items()
        if isinstance(value, Mapping) and str(name) in wanted
    ]
    if any(value != found[0] for value in found):
        rule = f"per_layer_config must give all {layer_type} layers one {key}"
        got = checks.describe(found)
        raise ValueError(checks.message("from_config", rule, got, "Fix the config."))
    return found[0] if found else None
