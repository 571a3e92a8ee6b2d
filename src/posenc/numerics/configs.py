"""What a Hugging Face config says about rotation, in every spelling that published files use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posenc._contract import checks, files
from posenc.numerics import scaling
from posenc.numerics._config import Config
from posenc.numerics._defaults import HEADS, ROTATED, SHARES, WIDTHS, instead
from posenc.numerics._nested import LAYOUT, text_part
from posenc.numerics.axes import Axes

__all__ = [
    "HEADS", "LAYOUT", "ROTATED", "SHARES", "WIDTHS", "Recipe", "as_dict", "instead", "layer_types",
    "read", "text_part",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments of a `RoPE`, and the key of the config that each one came from."""

    head_dim: int
    base: float
    rotary_dim: int
    interleaved: bool
    interleaved_out: bool | None
    scaling: scaling.Rule | None
    axes: Axes | None
    sources: Mapping[str, str] = field(compare=False)

    def arguments(self) -> dict[str, Any]:
        """Keywords for `RoPE`."""
        given = {name: getattr(self, name) for name in self.__slots__ if name != "sources"}
        # All of a head, whatever its width is made to be.
        return {**given, "rotary_dim": None} if self.rotary_dim == self.head_dim else given


def read(config: Any, *, layer_type: str | None = None, base: float | None = None) -> Recipe:
    """The rotation that a config describes.

    Args:
        config: A dict, the path of a ``config.json`` or of a folder with one, or an object with
            ``to_dict``, as the configs of transformers are.
        layer_type: Which layers, where some rotate differently.
        base: Instead of the config's.

    Examples:
        >>> recipe = read({"head_dim": 64, "rope_theta": 1e6, "rotary_pct": 0.5})
        >>> recipe.base, recipe.rotary_dim, recipe.sources["rotary_dim"]
        (1000000.0, 32, 'rotary_pct')
    """
    found = Config(as_dict("from_config", config))
    layer_type = found.layer(layer_type)
    head_dim = found.head_dim(layer_type)
    rule = found.rule()
    # Proportional rules leave pairs still instead of leaving channels out.
    proportional = isinstance(rule, scaling.Proportional)
    rotary_dim = head_dim if proportional else found.rotary_dim(head_dim)
    interleaved, interleaved_out = found.layout()
    return Recipe(
        head_dim,
        found.base(layer_type) if base is None else base,
        rotary_dim,
        interleaved,
        interleaved_out,
        rule,
        found.axes(),
        found.sources,
    )


def layer_types(config: Any) -> tuple[str | None, ...]:
    """The layer types that rotate differently; ``(None,)`` if all rotate alike.

    Examples:
        >>> layer_types({"head_dim": 64, "rope_theta": 1e6, "rope_local_base_freq": 1e4})
        ('full_attention', 'sliding_attention')
    """
    return Config(as_dict("from_config", config)).rotations()


def as_dict(who: str, config: Any) -> Mapping[str, Any]:
    """A config as :func:`read` takes it, as a dict; errors say that ``who`` wanted it."""
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
