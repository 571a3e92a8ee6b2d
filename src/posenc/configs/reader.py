"""Opening a config: its text model, its rope dict, one layer type, and its type's defaults."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from posenc._contract import checks, files
from posenc.configs import hub

# The key for the layout that posenc's conversion writes, if the model type has none.
LAYOUT = "posenc_rope_layout"
# Where a folder has its config; the second is that of a pipeline of diffusers.
_FILES = ("config.json", "transformer/config.json")
# Keys that name the kind of positions.
KIND_KEYS = ("position_embedding_type", "position_embeddings_type")
# Keys of the text model's config in a multimodal one.
_TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
# Keys of its other models.
_OTHERS = ("vision_config", "audio_config")
# Values of rope_type that scale nothing.
UNSCALED = ("default", "mrope")
# Keys of a rope dict that only some rules use: the numbers of a scaling.
SCALES = (
    "factor", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "alpha", "truncate",
    "short_mscale", "long_mscale",
)  # fmt: skip
# All of its keys.
_ROPE_KEYS = frozenset(
    "rope_type type rope_theta partial_rotary_factor original_max_position_embeddings "
    "mrope_section mrope_interleaved interleaved finetuned llama_4_scaling_beta "
    "max_position_embeddings".split()
).union(SCALES)
# Rotations that no RoPE has, by words that their rope dicts alone have.
_REFUSED = {
    "xdrope": (
        "XD-RoPE, whose coordinates are those of text, width, height and time, and differ between "
        "the two channels of a pair",
        "For text alone, whose coordinates are equal, use RoPE(head_dim, None, rope_theta, "
        "interleaved=False, scaling=NTK(alpha)); otherwise the model's own code.",
    ),
    "fope": (
        "FoPE, whose cosines and sines are sums over rates with weights that are learned for each "
        "head of keys",
        "Use the model's own code: posenc has no module for it.",
    ),
}
# More layers than any model has. Each is listed, so a file's number must be bounded.
MOST_LAYERS = 2**12
_TYPES = ("full_attention", "sliding_attention")
# Types of layers that have no attention, or one without queries and keys that could rotate.
ATTENTIONLESS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe")
_HINTS = {
    "from_config": "Fix the config, or construct RoPE(...) directly.",
    "convert": "Fix the config, or pass head_dim and rotary_dim.",
}
_FIX_SCALING = "Fix the dict, or pass a rule of posenc.scaling."


@functools.cache
def _known() -> dict[str, dict[str, Any]]:
    """What is known of model types, which ``tools/configs`` writes."""
    text = Path(__file__).with_name("models.json").read_text(encoding="utf-8")
    known: dict[str, dict[str, Any]] = json.loads(text)
    return known


def model_defaults(model_type: Any) -> Mapping[str, Any]:
    """The defaults of a model type; empty for an unknown one."""
    rows: dict[str, Mapping[str, Any]] = _known()["models"]
    return rows.get(model_type, {}) if isinstance(model_type, str) else {}


def types_with(key: str) -> frozenset[str]:
    """The model types that have a default for ``key``."""
    return frozenset(model_type for model_type, row in _known()["models"].items() if key in row)


@dataclass
class Config:
    """The config of a text model, for errors that begin with ``who``."""

    who: str
    top: dict[str, Any]
    # Where the keys of ``top`` are in the file.
    prefix: str = ""
    # rope_parameters or rope_scaling, and which of them.
    rope: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""
    # The dicts of ``rope`` by layer type, None for layers that do not rotate.
    by_layer: Mapping[str, Any] = field(default_factory=dict)
    # The key that each argument was read from.
    sources: dict[str, str] = field(default_factory=dict)
    # The key that the types of the layers were read from.
    types_key: str = "layer_types"

    def __post_init__(self) -> None:
        kind = self.top.get("model_type")
        self.kind = kind if isinstance(kind, str) else ""
        self.model = model_defaults(kind)

    def error(self, rule: str, got: object, hint: str = "") -> ValueError:
        """The error for a rule that does not hold."""
        return ValueError(
            checks.message(self.who, rule, got, hint or _HINTS.get(self.who, _FIX_SCALING))
        )

    def contradiction(self, a: str, b: str, got: str) -> ValueError:
        """The error for two keys that differ."""
        rule = f"{self.prefix}{a} and {self.prefix}{b} must agree"
        return self.error(rule, got, "Remove one of them.")

    def value(self, key: str) -> Any:
        """The value of ``key`` in the config, which may be null, or else that of the model type."""
        return self.top[key] if key in self.top else self.model.get(key)

    def source(self, key: str) -> str:
        """Where :meth:`value` reads ``key``."""
        return self.prefix + (key if key in self.top else "model_type")

    def layer_count(self) -> int | None:
        """The number of layers, if the config has a usable one."""
        key = "num_hidden_layers"
        count = self.top.get(key)
        if type(count) is not int or count < 1:
            return None
        if count > MOST_LAYERS:
            raise self.error(f"{key} must be at most {MOST_LAYERS}", count, "Fix the config.")
        return count

    def layer_types(self) -> list[str]:
        """The names in ``layer_types``; empty if the config has no list of them."""
        types = self.top.get("layer_types")
        return list(map(str, types)) if isinstance(types, (list, tuple)) else []

    def default(self, argument: str, key: str) -> Any:
        """The value of ``key`` for this model type, where the config has none."""
        if self.model.get(key) is not None:
            self.sources[argument] = f"{self.prefix}model_type"
        return self.model.get(key)

    def agreed(self, argument: str, inner: str, outer: tuple[str, ...]) -> Any:
        """The value of ``inner`` in the rope dict and of the ``outer`` keys, which must agree."""
        given = {f"{self.where}.{inner}": self.rope.get(inner)}
        if self.rope.get(inner) is None or "." not in self.where:
            # The value of one layer type overrides that of the model.
            given |= {key: self.top.get(key) for key in outer}
        given = {key: value for key, value in given.items() if value is not None}
        if not given:
            return None
        (first, value), *others = given.items()
        for other, different in others:
            if different != value:
                raise self.contradiction(first, other, f"{value} and {different}")
        self.sources[argument] = self.prefix + first
        return value

    def need(self, name: str) -> Any:
        """A value that the rope_type requires."""
        value, where = self.rope.get(name), f"{self.where}.{name}"
        if name == "max_position_embeddings":
            if value is None:
                value, where = self.top.get(name), name
            elif self.top.get(name) not in (None, value):
                raise self.contradiction(where, name, f"{value} and {self.top[name]}")
        if value is None:
            raise self.error(f"{where} must be given for this rope_type", None)
        return value

    def count(
        self, argument: str, *keys: str, default: int | None = None, most: int = checks.MAX_POSITION
    ) -> int:
        """The first of ``keys`` that the config has, for ``argument`` of an encoding."""
        for key in keys:
            if self.top.get(key) is not None:
                self.sources[argument] = self.prefix + key
                found = checks.integer(self.who, key, self.top[key])
                if found > most:
                    raise self.error(f"{key} must be at most {most}", found, "Fix the config.")
                return found
        if default is None:
            rule = f"{' or '.join(keys)} must be in the config"
            raise self.error(rule, None, f"Add {keys[0]}.")
        self.sources[argument] = f"{self.prefix}model_type"
        return default


def as_dict(who: str, config: Any) -> Mapping[str, Any]:
    """A dict of: a dict, an object with ``to_dict``, a diffusers model, a path, or a name."""
    if hub.is_name(config):
        config = hub.download(who, config, *_FILES, instead="a config.json")
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        if path.is_dir():
            found = (path / name for name in _FILES if (path / name).is_file())
            path = next(found, path / _FILES[0])
        return files.read_json(who, path)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif isinstance(getattr(config, "config", None), Mapping):
        # A model of diffusers, whose config has no class until it is saved.
        config = {**config.config, "_class_name": type(config).__name__}
    if not isinstance(config, Mapping):
        rule = "config must be a dict, a path, a model's name, or an object with to_dict()"
        got, hint = checks.describe(config), "Pass model.config, or the model's config.json."
        checks.fail(who, rule, got, hint, TypeError)
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


def other_parts(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The configs of images and sounds in that of a whole model, by their keys."""
    parts: dict[str, Mapping[str, Any]] = {}
    prefix = ""
    while True:
        for name in _OTHERS:
            part = config.get(name)
            if isinstance(part, Mapping):
                kind, whole = part.get("model_type"), config.get("model_type")
                if kind in (None, whole) and name == "vision_config":
                    # Older files give the part no type, or that of the whole.
                    kind = _known()["vision"].get(whole, kind) if isinstance(whole, str) else kind
                parts[prefix + name] = {**part, "model_type": kind}
        name = next((name for name in _TEXT if isinstance(config.get(name), Mapping)), "")
        if not name:
            return parts
        config, prefix = config[name], f"{prefix}{name}."


def mentions_rotation(config: Mapping[str, Any]) -> bool:
    """Whether a key other than qk_rope_head_dim, which may go unrotated, names a rotation."""
    words = [key for key, value in config.items() if value is not None]
    words += [str(config[key]) for key in KIND_KEYS if config.get(key)]
    named = (str(word) for word in words if word != "qk_rope_head_dim")
    return any("rope" in word or "rotary" in word for word in named)


def open_config(config: Any, who: str = "from_config") -> Config:
    """Find the text model and its rope dict in any config that `as_dict` takes."""
    config = as_dict(who, config)
    top, prefix = text_part(config)
    found = _with_layer_types(Config(who, dict(top), prefix))
    names = ("rope_parameters", "rope_scaling")
    given = {name: top[name] for name in names if top.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            rule, hint = f"{name} must be a dict", "Pass a dict, or leave it out."
            checks.fail(who, rule, checks.describe(value), hint, TypeError)
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise found.contradiction(*names, "different contents")
    for name, rope in given.items():
        found = replace(found, rope=rope, where=name)
        found = replace(found, by_layer=_by_layer(found))
        check_rope_keys(found)
        return found
    return found


def _by_layer(config: Config) -> dict[str, Any]:
    """The values of a rope dict whose keys are layer types."""
    rope, listed = config.rope, config.layer_types()
    known = {*listed, *_TYPES, *config.model.get("rope_types", ())}
    if listed or {"rope_type", "type"} & rope.keys():
        return {key: value for key, value in rope.items() if key in known}
    # Where a file does not name its layer types, they may be any with a rope dict of their own.
    return {
        key: value
        for key, value in rope.items()
        if key in known
        or (key not in _ROPE_KEYS and isinstance(value, Mapping) and _ROPE_KEYS & value.keys())
    }


def check_rope_keys(config: Config) -> None:
    """Refuse keys of the rope dict that are not known, or that no layer type reads."""
    types = {key: rope for key, rope in config.by_layer.items() if isinstance(rope, Mapping)}
    beside = {key: value for key, value in config.rope.items() if key not in config.by_layer}
    dicts = {f"{config.where}.{key}": rope for key, rope in types.items()}
    for where, rope in {config.where: beside, **dicts}.items():
        _refuse_others(config, where, rope)
        for key in rope:
            if key not in _ROPE_KEYS:
                raise config.error(f"{where}.{key} must be a known key", key, _meant(config, key))
    for key, value in beside.items() if config.by_layer else ():
        # Releases of transformers before 5.17 write the default type beside the layer types.
        harmless = value is None or (key in ("rope_type", "type") and value in UNSCALED)
        if not harmless and value not in [rope.get(key) for rope in types.values()]:
            rule = (
                f"{config.where}.{key} must repeat that of a layer type, because no layer reads it"
            )
            hint = f"Move it into {' or '.join(dicts) or 'the dict of a layer type'}."
            raise config.error(rule, value, hint)


def _refuse_others(config: Config, where: str, rope: Mapping[str, Any]) -> None:
    """Refuse rotations of other kinds by their names."""
    words = {key: key for key, value in rope.items() if value is not None}
    words |= {key: rope[key] for key in ("rope_type", "type") if isinstance(rope.get(key), str)}
    for key, word in words.items():
        for name, (noun, hint) in _REFUSED.items():
            if str(word).removeprefix("use_").startswith(name):
                rule = f"{where}.{key} says that the rotation is {noun}"
                raise ValueError(f"{config.who}: {rule}.\n  {hint}")


def _meant(config: Config, key: str) -> str:
    """What a key that is not known may have been meant to be."""
    types = [*config.layer_types(), *_TYPES] if config.by_layer else config.layer_types()
    near = get_close_matches(str(key), sorted({*_ROPE_KEYS, *types}), 1)
    if near:
        return f"Did you mean {near[0]}?"
    if isinstance(config.rope.get(key), Mapping):
        return "If it is a layer type, name it in layer_types."
    return f"Use one of {', '.join(sorted(_ROPE_KEYS))}."


def _with_layer_types(config: Config) -> Config:
    """Name the type of each layer where a file leaves that to its model type."""
    top, model = config.top, config.model
    if top.get("layer_types") is None:
        for key, read in _LISTS.items():
            value = top.get(key)
            types = read(config, value) if isinstance(value, (list, tuple)) and value else None
            if types is not None:
                top["layer_types"] = types
                return replace(config, types_key=key)
    known = model.get("layer_types") or "max_window_layers" in model
    count = config.layer_count() if known and top.get("layer_types") is None else None
    if count is None:
        return config
    key, types = (_cycle if model.get("layer_types") else _last_slide)(config, count)
    if types is None:
        return config
    if "last_layer" in model:
        types[-1] = model["last_layer"]
    top["layer_types"] = types[:count]
    return replace(config, types_key=key if key in top else "model_type")


def _flags(config: Config, value: Sequence[Any]) -> list[str]:
    """MiniMax's list holds 0 for linear attention."""
    return ["full_attention" if each else "linear_attention" for each in value]


def _blocks(config: Config, value: Sequence[Any]) -> list[str]:
    return ["full_attention" if each == "attention" else str(each) for each in value]


def _repeated(config: Config, value: Sequence[Any]) -> list[str] | None:
    """RecurrentGemma's layers, whose attention has a window, repeat the list."""
    names = ["sliding_attention" if each == "attention" else str(each) for each in value]
    count = config.layer_count()
    return None if count is None else (names * (count // len(names) + 1))[:count]


def _indices(config: Config, value: Sequence[Any]) -> list[str] | None:
    """The layers that have attention."""
    count = config.layer_count()
    if count is None:
        return None
    return ["full_attention" if i in value else "linear_attention" for i in range(count)]


# Keys that name the layers with attention where there is no layer_types, and how.
_LISTS: dict[str, Callable[[Config, Sequence[Any]], list[str] | None]] = {
    "layers_block_type": _blocks,
    "block_types": _repeated,
    "attn_type_list": _flags,
    "attn_layer_indices": _indices,
    "full_attn_idxs": _indices,
}


def _last_slide(config: Config, count: int) -> tuple[str, list[str]]:
    """Full attention, and windows from the layer ``max_window_layers`` on, if there are any."""
    key, start = "max_window_layers", count
    slides = config.value("use_sliding_window") is not False
    if slides and config.value("sliding_window") is not None:
        start = config.value(key)
    start = min(max(start, 0), count) if type(start) is int else count
    return key, ["full_attention"] * start + ["sliding_attention"] * (count - start)


def _cycle(config: Config, count: int) -> tuple[str, list[str] | None]:
    """The types of the first layers over and over, in a period that an older file may name."""
    top, cycle = config.top, config.model["layer_types"]
    key = config.model.get("layer_cycle", "")
    period, flags = top.get(key, len(cycle)), top.get("no_rope_layers")
    if key == "no_rope_layer_interval" and isinstance(flags, (list, tuple)) and flags:
        # Llama 4's list holds 1 for a layer that rotates.
        return "no_rope_layers", [cycle[0] if rotates else cycle[-1] for rotates in flags]
    none_slides = config.kind.startswith("exaone") or cycle == ["sliding_attention"]
    if none_slides and top.get("sliding_window", 1) is None:
        return key, None
    if type(period) is not int or not 0 < period <= MOST_LAYERS:
        return key, None
    if period != len(cycle):
        # One layer of a cycle differs from the others: its first or its last.
        first = 1 if cycle[1] == cycle[-1] else period - 1
        cycle = [cycle[0]] * first + [cycle[-1]] * (period - first)
    return key, (cycle * (count // period + 1))[:count]


def local_key(config: Config) -> str | None:
    """The key that gives sliding layers another rotation; None if they rotate like the others."""
    keys = ("rope_local_base_freq", "local_rope_theta")
    said = next((key for key in keys if config.top.get(key) is not None), None)
    if said is not None or keys[0] not in config.model:
        return said
    scaled = str(config.rope.get("rope_type") or config.rope.get("type"))
    differ = scaled not in ("None", *UNSCALED) or config.model[keys[0]] is not None
    return "model_type" if differ else None


def rotating_types(config: Config) -> tuple[str | None, ...]:
    """The layer types whose rotations differ; ``(None,)`` if all rotate alike."""
    if config.by_layer:
        names = (name for name, rope in config.by_layer.items() if rope is not None)
        return tuple(names) or (None,)
    return _TYPES if local_key(config) else (None,)


def choose_layer(config: Config, layer_type: str | None) -> tuple[Config, str | None]:
    """The config of one layer type, and the type; None will do if all layers rotate alike."""
    dicts, local = config.by_layer, local_key(config)
    if dicts:
        first, *others = dicts
        if layer_type is None and any(dicts[other] != dicts[first] for other in others):
            rule = f"layer_type must be given, one of {list(dicts)}"
            raise config.error(rule, None, "Pass layer_type, because rotations differ by it.")
        layer_type = first if layer_type is None else layer_type
        if layer_type not in dicts:
            raise config.error(f"layer_type must be one of {list(dicts)}", layer_type)
        where, rope = f"{config.where}.{layer_type}", dicts[layer_type]
        if not isinstance(rope, Mapping):
            hint = "Choose another type: layers with null do not rotate."
            raise config.error(f"{where} must be a dict", checks.describe(rope), hint)
        return replace(config, rope=rope, where=where), layer_type
    if layer_type is None and local:
        hint = "Pass layer_type='full_attention' or 'sliding_attention'."
        rule = f"layer_type must be given, because layers differ by {local}"
        raise config.error(rule, None, hint)
    known = set(config.layer_types()) or {*_TYPES, *(() if local else ("chunked_attention",))}
    known = known.difference(ATTENTIONLESS) or set(_TYPES)
    if layer_type is not None and layer_type not in known:
        raise config.error(f"layer_type must be one of {sorted(known)}", layer_type)
    if layer_type == "sliding_attention" and local:
        # Only full attention is scaled.
        config = replace(config, rope={}, where="")
    return config, layer_type


def at_layer(config: Config, index: int, **known: Any) -> Config:
    """The config of the layer at ``index``, whose ``known`` keys override those of the model."""
    types = config.layer_types()
    name = types[index] if index < len(types) else None
    top = {**config.top, **known, "layer_types": None}
    if not config.by_layer:
        return replace(config, top=top)
    if name is None or name not in config.by_layer:
        name = next(iter(config.by_layer))
    rope = config.by_layer[name] if isinstance(config.by_layer[name], Mapping) else {}
    return replace(config, top=top, rope=rope, where=f"{config.where}.{name}")
