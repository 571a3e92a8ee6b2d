"""What a model's config comes down to, and which of its keys said so."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from posenc import RoPE, backends
from posenc.numerics import configs


@dataclass(frozen=True, slots=True)
class Explanation:
    """The rotation of one layer type: each argument of `RoPE`, its value and its source."""

    layer_type: str | None
    arguments: dict[str, tuple[Any, str]]
    attention_factor: float
    inv_freq: list[float]

    def wavelengths(self) -> tuple[float, float]:
        """Tokens in one turn of the fastest pair, and of the slowest that turns."""
        turning = [rate for rate in self.inv_freq if rate > 0]
        return math.tau / max(turning), math.tau / min(turning)

    def as_json(self) -> dict[str, Any]:
        """For a program to read."""
        arguments = {
            name: {"value": _plain(value), "from": source}
            for name, (value, source) in self.arguments.items()
        }
        return {
            "layer_type": self.layer_type,
            "arguments": arguments,
            "attention_factor": self.attention_factor,
            "inv_freq": self.inv_freq,
        }


def explain(
    config: Any, *, layer_type: str | None = None, seq_len: int | None = None
) -> list[Explanation]:
    """Resolve a config: one explanation for each layer type, or for the one that is named.

    Args:
        config: As `RoPE.from_config` takes it.
        layer_type: The one to explain; all if None.
        seq_len: The length at which rules that depend on it are taken.

    Examples:
        >>> (found,) = explain({"head_dim": 64, "rotary_emb_base": 5e5})
        >>> found.arguments["base"]
        (500000.0, 'rotary_emb_base')
    """
    names = configs.layer_types(config) if layer_type is None else (layer_type,)
    found = []
    for name in names:
        recipe = configs.read(config, layer_type=name)
        rope = RoPE(max_seq_len=None, **recipe.arguments())
        arguments = {
            key: (value, recipe.sources.get(key, "default"))
            for key, value in recipe.arguments().items()
        }
        factor, rates = rope.attention_factor(seq_len), rope.inv_freq(seq_len)
        found.append(Explanation(name, arguments, factor, rates.tolist()))
    return found


def kernels() -> dict[str, str]:
    """Which kernels there are, and why not the others."""
    return {
        each.name: f"{'serves' if each.available else 'not for'} {each.serves}: {each.why}"
        for each in backends()
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
