"""Where a config lies, and which part of it describes the text model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc._contract import checks, files

# The key that a conversion writes where the family has none of its own.
LAYOUT = "posenc_rope_layout"
# Keys that say what kind of positions a model has.
KIND_KEYS = ("position_embedding_type", "position_embeddings_type")
# Where a model of several inputs keeps the config of its text model.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def as_dict(who: str, config: Any) -> Mapping[str, Any]:
    """A dict, a path, or an object with ``to_dict``, as a dict; errors begin with ``who``."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return files.read_json(who, path / "config.json" if path.is_dir() else path)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        rule = "config must be a dict, a path, or an object with to_dict()"
        way_out = "Pass the model's config.json."
        raise TypeError(checks.message(who, rule, checks.describe(config), way_out))
    return config


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of a config that describes the text model, and the prefix of its keys."""
    prefix = ""
    while True:
        for name in _TEXT:
            inner = config.get(name)
            # Some configs keep a few keys there, and the model's own above.
            if isinstance(inner, Mapping) and (
                "hidden_size" in inner or "hidden_size" not in config
            ):
                config, prefix = inner, f"{prefix}{name}."
                break
        else:
            return config, prefix


def converted_layout(config: Mapping[str, Any]) -> Any:
    """The layout that a conversion has written, into the config or one within it."""
    parts = [config]
    # The list grows while it is read: nothing recurses, however deep a file goes.
    for part in parts:
        if part.get(LAYOUT) is not None:
            return part[LAYOUT]
        parts += [inner for inner in part.values() if isinstance(inner, Mapping)]
    return None


def mentions_rotation(config: Mapping[str, Any]) -> bool:
    """Whether any key says that there is rotation; latent attention without it has a width too."""
    words = [key for key, value in config.items() if value is not None]
    words += [str(config[key]) for key in KIND_KEYS if config.get(key)]
    named = (str(word) for word in words if word != "qk_rope_head_dim")
    return any("rope" in word or "rotary" in word for word in named)


def per_layer(config: Mapping[str, Any], layer_type: str | None, key: str) -> Any:
    """The value that ``per_layer_config`` has for the layers of one type, by their indices."""
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
