"""The scaling rule that a config describes, by its ``rope_type``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posenc._contract import checks
from posenc.configs.reader import SCALES, UNSCALED, Config, check_rope_keys
from posenc.numerics import scaling


def scaling_rule(config: Config) -> scaling.Rule | None:
    """The rule that the rope dict describes; None if nothing is scaled."""
    given = {key: config.rope.get(key) for key in ("rope_type", "type")}
    kinds = {key: kind for key, kind in given.items() if kind not in (None, "")}
    aliases = {**dict.fromkeys(UNSCALED, "default"), "su": "longrope"}
    if "axial" in config.model:
        aliases["axial"] = "default"
    names = {aliases.get(kind, kind) for kind in map(str, kinds.values())}
    if len(names) == 2:
        raise config.contradiction("type", "rope_type", " and ".join(sorted(names)))
    scales = [key for key in SCALES if config.rope.get(key) is not None]
    if not names and scales:
        rule = f"{config.where}.rope_type must be given with {config.where}.{scales[0]}"
        raise config.error(rule, None, f"Add one of {', '.join(_RULES)}.")
    name = names.pop() if names else "default"
    key = f"{config.where}.{next(iter(kinds), 'rope_type')}"
    if name == "axial":
        rule = f"{key} axial is an image's, and differs between model types; {{}} is not known"
        hint = f"Construct RoPE(head_dim, None, base, axes=...) directly: {_MOST_AXIAL}."
        raise ValueError(f"{config.who}: {rule.format(repr(config.kind))}.\n  {hint}")
    if name not in ("default", *_RULES):
        raise config.error(f"{key} must be one of default, {', '.join(_RULES)}", name)
    used, reader = _USED.get(name, ()), f"{key}={name!r}"
    if name == "dynamic" and config.rope.get("alpha") is not None:
        used, reader = _HUNYUAN, f"{reader} with alpha"
    for other in scales:
        # One changes nothing.
        if other not in used and config.rope[other] != 1:
            users = ", ".join(rule for rule, keys in _USED.items() if other in keys)
            rule = f"{config.where}.{other} must be left out, because {reader} does not use it"
            hint = f"Remove it, or name a rule that uses it: {users}."
            raise config.error(rule, config.rope[other], hint)
    if name == "default":
        return None
    config.sources["scaling"] = config.prefix + key
    return _RULES[name](config)


def read_scaling(who: str, given: Any, base: float) -> Any:
    """The rule of a published dict, or of a ``rope_type``; anything else as it is.

    Examples:
        >>> read_scaling("RoPE", {"rope_type": "linear", "factor": 4.0}, 10_000.0)
        Linear(factor=4.0)
    """
    if isinstance(given, str):
        given = {"rope_type": given}
    if not isinstance(given, Mapping):
        return given
    config = Config(who, {}, rope=given, where="scaling")
    check_rope_keys(config)
    kind = given.get("rope_type") or given.get("type")
    # Two lengths give a factor; alpha stands for itself.
    other = {"factor", _LENGTH} if given.get("max_position_embeddings") else set()
    needed = [key for key in _NEEDED.get(str(kind), ()) if given.get(key) is None]
    if not other.issuperset(needed) and given.get("alpha") is None:
        rule = f"scaling of rope_type {kind!r} must have {', '.join(needed)}"
        hint = f'Pass {{"rope_type": "{kind}", "{needed[0]}": ...}}, or a rule.'
        raise config.error(rule, checks.describe(dict(given)), hint)
    theta, share = given.get("rope_theta"), given.get("partial_rotary_factor")
    if theta is not None and theta != base:
        raise config.error(f"base must be scaling.rope_theta={theta}", base, "Pass it as base too.")
    if given.get("mrope_section") or (share not in (None, 1.0) and kind != "proportional"):
        rule = "scaling must not have mrope_section or partial_rotary_factor"
        hint = "Leave them out and pass axes or rotary_dim, or call RoPE.from_config."
        raise config.error(rule, checks.describe(dict(given)), hint)
    return scaling_rule(config)


def _linear(config: Config) -> scaling.Rule:
    rule = scaling.Linear(config.need("factor"))
    if rule.factor < 1:
        raise config.error(f"{config.where}.factor must be at least 1", rule.factor)
    return rule


def _dynamic(config: Config) -> scaling.Rule:
    if config.rope.get("alpha") is not None:
        return scaling.NTK(config.rope["alpha"])
    trained, key = config.need("max_position_embeddings"), "max_position_embeddings"
    original = config.agreed("original_length", _LENGTH, (_LENGTH,))
    if original not in (None, trained):
        other = config.sources["original_length"].removeprefix(config.prefix)
        raise config.contradiction(other, key, f"{original} and {trained}")
    return scaling.DynamicNTK(config.need("factor"), original_length=trained)


def _yarn(config: Config) -> scaling.Rule:
    names = ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    given = {name: config.rope[name] for name in names if config.rope.get(name)}
    if config.rope.get("truncate") is not None:
        given["truncate"] = config.rope["truncate"]
    return scaling.YaRN(_factor(config), original_length=_original_length(config), **given)


def _longrope(config: Config) -> scaling.Rule:
    gain = config.rope.get("attention_factor")
    return scaling.LongRoPE(
        config.need("short_factor"),
        long_factor=config.need("long_factor"),
        original_length=_original_length(config),
        factor=_factor(config),
        attention_factor=config.rope.get("long_mscale") if gain is None else gain,
        short_attention_factor=config.rope.get("short_mscale"),
    )


def _llama3(config: Config) -> scaling.Rule:
    return scaling.Llama3(
        config.need("factor"),
        original_length=_original_length(config),
        low_freq_factor=config.need("low_freq_factor"),
        high_freq_factor=config.need("high_freq_factor"),
    )


def _proportional(config: Config) -> scaling.Rule:
    name = "partial_rotary_factor"
    share = config.agreed("scaling", name, (name,))
    return scaling.Proportional(
        1.0 if share is None else share, factor=config.rope.get("factor") or 1.0
    )


def _original_length(config: Config) -> Any:
    name = "original_max_position_embeddings"
    value = config.agreed("original_length", name, (name,))
    return config.need("max_position_embeddings") if value is None else value


def _factor(config: Config) -> Any:
    if config.rope.get("factor") is not None:
        return config.rope["factor"]
    name = "max_position_embeddings"
    longest = checks.integer(config.who, name, config.need(name))
    return longest / checks.integer(config.who, f"original_{name}", _original_length(config))


_MOST_AXIAL = "most have interleaved=False, axes=Axial(2), at positions.grid(rows, columns)"
# The keys without which there is no rule.
_LENGTH = "original_max_position_embeddings"
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "yarn": ("factor", _LENGTH),
    "longrope": ("short_factor", "long_factor", _LENGTH, "factor"),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
}
# Those of `SCALES` that a rule uses.
_USED = {
    "linear": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": (
        "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        "truncate",
    ),
    "longrope": (
        "short_factor", "long_factor", "factor", "attention_factor", "short_mscale", "long_mscale",
    ),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": ("factor",),
}  # fmt: skip
# Hunyuan's files have those of YaRN beside alpha; its models read alpha alone.
_HUNYUAN = ("alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


_RULES: dict[str, Callable[[Config], scaling.Rule]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
