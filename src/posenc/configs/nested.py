"""Reading a config, and the parts that are nested in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posenc._contract import checks, files

# The key for the layout that posenc's conversion writes, if the model type has none.
LAYOUT = "posenc_rope_layout"
# Keys that name the kind of positions.
KIND_KEYS = ("position_embedding_type", "position_embeddings_type")
# Keys of the text model's config in a multimodal one.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")


def as_dict(who: str, config: Any) -> Mapping[str, Any]:
    """A dict, an object with ``to_dict``, or the path of a config or its folder, as a dict."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        return files.read_json(who, path / "config.json" if path.is_dir() else path)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        rule = "config must be a dict, a path, or an object with to_dict()"
        got, way_out = checks.describe(config), "Pass the model's config.json."
        checks.fail(who, rule, got, way_out, TypeError)
    return config


def text_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of a config that describes the text model, and the prefix of its keys."""
    prefix = ""
    while True:
        for name in _TEXT:
            inner = config.get(name)
            # Some configs nest a few keys only, and keep those of the text model outside.
            if isinstance(inner, Mapping) and (
                "hidden_size" in inner or "hidden_size" not in config
            ):
                config, prefix = inner, f"{prefix}{name}."
                break
        else:
            return config, prefix


def converted_layout(config: Mapping[str, Any]) -> Any:
    """The layout that posenc's conversion has written into the config, or into a nested one."""
    parts = [config]
    # The loop appends to its list: a deep config does not recurse.
    for part in parts:
        if part.get(LAYOUT) is not None:
            return part[LAYOUT]
        parts += [inner for inner in part.values() if isinstance(inner, Mapping)]
    return None


def mentions_rotation(config: Mapping[str, Any]) -> bool:
    """Whether a key names rotary positions, besides qk_rope_head_dim, which may go unrotated."""
    words = [key for key, value in config.items() if value is not None]
    words += [str(config[key]) for key in KIND_KEYS if config.get(key)]
    named = (str(word) for word in words if word != "qk_rope_head_dim")
    return any("rope" in word or "rotary" in word for word in named)


def per_layer(config: Mapping[str, Any], layer_type: str | None, key: str) -> Any:
    """The ``key`` that ``per_layer_config`` gives to all layers of one type."""
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
        checks.fail("from_config", rule, checks.describe(found), "Fix the config.")
    return found[0] if found else None
