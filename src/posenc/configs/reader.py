"""Reading a config key by key: where each value came from, and what contradicts what."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping
from copy import copy
from difflib import SequenceMatcher
from typing import Any

from posenc._contract import checks
from posenc.configs import defaults, others
from posenc.configs.nested import LAYOUT, mark_of, of_layers, text_part
from posenc.numerics.axes import Axes, Sections

# Keys beside the dict of rotation, whose misspelling would go unnoticed.
_OUTSIDE = (
    "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "rope_local_base_freq",
    "partial_rotary_factor", "rotary_dim", "rotary_pct", "rope_pct", "rotary_emb_base",
    "rotary_embedding_base", "original_max_position_embeddings", "max_position_embeddings", LAYOUT,
)  # fmt: skip
# Values of rope_type that scale nothing.
PLAIN = ("default", "mrope")
_TYPES = ("full_attention", "sliding_attention")
# The width of a model, and the heads that share it.
_SIZES = (
    ("hidden_size", "num_attention_heads"), ("hidden_size", "n_head"), ("n_embd", "n_head"),
    ("d_model", "n_heads"), ("dim", "n_heads"),
)  # fmt: skip
# One head is not wider than this in any model; a larger number is not a width.
_WIDEST_HEAD = 2**13
_BY_HAND = {
    "from_config": "Fix the config, or construct RoPE(...) directly.",
    "convert": "Fix the config, or pass head_dim and rotary_dim.",
}


class Config:
    """A config that remembers which of its keys were asked, and refuses two answers to one."""

    def __init__(self, config: Mapping[str, Any], who: str = "from_config") -> None:
        self.who = who
        self.sources: dict[str, str] = {}
        self.mark = mark_of(config)
        top, self.prefix = text_part(config)
        self.top: MutableMapping[str, Any] = dict(top)
        kind = self.top.get("model_type")
        self.kind = kind if isinstance(kind, str) else ""
        self.where = ""
        self.rope: Mapping[str, Any] = {}
        self._find()
        known = self._known()
        self.nested = {k: v for k, v in self.rope.items() if isinstance(v, Mapping) or k in known}

    def refuse(self) -> None:
        """Refuse positions that no RoPE has, misspelled keys, and rotations left unsaid."""
        other, why = others.kind_of(self.top), defaults.unlike(self.top)
        if other is not None:
            noun, way_out = others.NOUNS[other]
            rule = f"model_type {self.kind!r} has no rotary embedding"
            raise ValueError(f"{self.who}: {rule}. It has {noun}.\n  {way_out}")
        if why is not None:
            rule = f"model_type {self.kind!r} has a rotation that RoPE does not: {why}"
            raise ValueError(f"{self.who}: {rule}.\n  Use functional.rotate with its tables.")
        found = others.instead(self.top)
        if found is not None:
            rule = f"{self.prefix}{found[0]} must say that positions are rotary"
            way_out = "Construct RoPE(...) directly if the model rotates."
            if found[0] == "alibi":
                way_out = "Use ALiBi(num_heads), whose biases the model has."
            raise ValueError(self.text(rule, found[1], way_out))
        # A base that only the model's own code makes of its key.
        if self.top.get("rope_ratio") not in (None, 1, 1.0):
            rule = f"{self.prefix}rope_ratio must be left out"
            way_out = "Give rope_theta, which is 10000 times it."
            raise ValueError(self.text(rule, self.top["rope_ratio"], way_out))
        self._refuse_misspelled()
        if not self.where and self.kind in defaults.SPECIAL:
            rule = f"{self.prefix}rope_parameters must be given, because this is {self.kind}"
            way_out = "Without them its rotation is scaled, or differs by layer."
            raise ValueError(self.text(rule, None, way_out))

    def _refuse_misspelled(self) -> None:
        for key, value in self.top.items():
            for meant in _OUTSIDE if isinstance(key, str) and value else ():
                if self.top.get(meant) is None and _is_slip(key, meant):
                    rule = f"{self.prefix}{key} must be a key that is known"
                    raise ValueError(self.text(rule, key, f"Did you mean {meant}?"))

    def rotations(self) -> tuple[str | None, ...]:
        """The layer types whose rotations differ; None alone if there is one for all."""
        if self.nested:
            # Layers with null do not rotate.
            return tuple(name for name in self.nested if self.nested[name] is not None) or (None,)
        return _TYPES if self._local() else (None,)

    def layer(self, layer_type: str | None) -> str | None:
        """Find the dict of parameters, that of ``layer_type`` if each has its own."""
        if layer_type is not None and not isinstance(layer_type, str):
            got = checks.describe(layer_type)
            raise TypeError(self.text("layer_type must be a string", got, "Or None."))
        local, known = self._local(), self._known()
        if self.nested:
            return self._choose(layer_type)
        if layer_type is None and local:
            way_out = "Pass layer_type='full_attention' or 'sliding_attention'."
            rule = f"layer_type must be given, because {local} is for some layers alone"
            if local == "model_type":
                rule = f"layer_type must be given, because layers of {self.kind} differ"
            raise ValueError(self.text(rule, layer_type, way_out))
        known = known or frozenset(_TYPES if local else (*_TYPES, "chunked_attention"))
        if layer_type is not None and layer_type not in known:
            raise ValueError(self.text(f"layer_type must be one of {sorted(known)}", layer_type))
        if layer_type == "sliding_attention" and local:
            # Local layers are not scaled.
            self.rope, self.where = {}, ""
        return layer_type

    def at(self, index: int, **known: Any) -> Config:
        """The config of one layer, with what is ``known`` of it. Nothing is copied or searched."""
        types = self.top.get("layer_types")
        name = types[index] if isinstance(types, (list, tuple)) and index < len(types) else None
        found = copy(self)
        found.top = ChainMap({**known, "layer_types": None}, self.top)
        if self.nested:
            if not isinstance(name, str) or name not in self.nested:
                name = next(iter(self.nested))
            rope = self.nested[name]
            found.rope = rope if isinstance(rope, Mapping) else {}
            found.where = f"{self.where}.{name}"
        return found

    def _find(self) -> None:
        dicts = {name: self.top.get(name) for name in ("rope_parameters", "rope_scaling")}
        given = {name: value for name, value in dicts.items() if value is not None}
        for name, value in given.items():
            if not isinstance(value, Mapping):
                got = checks.describe(value)
                raise TypeError(
                    self.text(f"{name} must be a dict", got, "Pass a dict, or leave it out.")
                )
        if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
            raise self.contradiction("rope_parameters", "rope_scaling", "different contents")
        if given:
            self.where, self.rope = next(iter(given.items()))

    def _known(self) -> frozenset[str]:
        types = self.top.get("layer_types")
        types = types if isinstance(types, (list, tuple)) else ()
        return frozenset(name for name in types if isinstance(name, str))

    def _local(self) -> str | None:
        """The key that says of some layers that they are local, if they differ from the others."""
        keys = ("rope_local_base_freq", "local_rope_theta")
        said = next((key for key in keys if self.top.get(key) is not None), None)
        if said is not None or self.kind not in defaults.LOCAL_BASES:
            return said
        scaled = str(self.rope.get("rope_type") or self.rope.get("type")) not in ("None", *PLAIN)
        return "model_type" if scaled or defaults.LOCAL_BASES[self.kind] is not None else None

    def _choose(self, layer_type: str | None) -> str:
        nested = self.nested
        if layer_type is None:
            first, *others = nested
            if any(nested[other] != nested[first] for other in others):
                rule = f"layer_type must be given, one of {list(nested)}"
                way_out = "Pass layer_type: their rotations differ."
                raise ValueError(self.text(rule, layer_type, way_out))
            layer_type = first
        if layer_type not in nested:
            raise ValueError(self.text(f"layer_type must be one of {list(nested)}", layer_type))
        if not isinstance(nested[layer_type], Mapping):
            rule = f"{self.where}.{layer_type} must be a dict"
            got = checks.describe(nested[layer_type])
            way_out = "Choose another type: layers with null do not rotate."
            raise ValueError(self.text(rule, got, way_out))
        self.rope, self.where = nested[layer_type], f"{self.where}.{layer_type}"
        return layer_type

    def head_dim(self, layer_type: str | None) -> int:
        """Channels of a head, or those of the part that is rotated where it is kept apart."""
        names = ["qk_rope_head_dim", "head_dim", "attention_head_dim", "kv_channels"]
        if layer_type == "full_attention":
            names.insert(0, "global_head_dim")
        own = of_layers(self.top, layer_type, "head_dim")
        if own is not None:
            return self._width("head_dim", own, "per_layer_config")
        for name in names:
            if self.top.get(name) is not None and self.top[name] != 0:
                return self._width(name, self.top[name], name)
        for widths in (defaults.ROTATED_WIDTHS, defaults.WIDTHS):
            if self.kind in widths:
                return self._width("head_dim", widths[self.kind], "model_type")
        for size, heads in _SIZES:
            if self.top.get(size) is not None and self.top.get(heads) is not None:
                whole = checks.integer(self.who, size, self.top[size])
                parts = checks.integer(self.who, heads, self.top[heads])
                if whole % parts and self.who == "convert":
                    # transformers rounds down; rows of weights have to belong to a head.
                    rule = f"{size} must be a multiple of the {parts} heads"
                    raise ValueError(self.text(rule, whole, "Pass head_dim (--head-dim)."))
                return self._width("head_dim", whole // parts, f"{size} / {heads}")
        if self.kind in defaults.USUAL_WIDTHS and "hidden_size" not in self.top:
            return self._width("head_dim", defaults.USUAL_WIDTHS[self.kind], "model_type")
        rule = "head_dim must be in the config, or hidden_size and num_attention_heads"
        keys = ", ".join(sorted(str(key) for key in self.top if self.top[key] is not None))
        got = f"keys {keys if len(keys) <= 200 else keys[:197] + '...'}" if keys else "no keys"
        raise ValueError(self.text(rule, got, "Add head_dim."))

    def _width(self, name: str, value: Any, source: str) -> int:
        width = checks.even(self.who, name, value)
        if width > _WIDEST_HEAD:
            raise ValueError(self.text(f"{name} must be at most {_WIDEST_HEAD}", width))
        self.sources["head_dim"] = self.prefix + source
        return width

    def base(self, layer_type: str | None) -> float:
        """The base of the rates."""
        keys = ["rope_theta", "rotary_emb_base", "rope_base", "rotary_embedding_base"]
        keys.append("rope_embedding_base")
        usual = defaults.BASES.get(self.kind)
        if layer_type == "sliding_attention" and (local := self._local()):
            own = defaults.LOCAL_BASES.get(self.kind)
            if local != "model_type" or own is not None:
                keys, usual = [local] if local != "model_type" else [], own
        elif self.top.get("global_rope_theta") is not None:
            keys = ["global_rope_theta"]
        value = self.one("base", ["rope_theta"], keys)
        inner = self.top.get("attn_config")
        if value is None and isinstance(inner, Mapping) and inner.get("rope_theta") is not None:
            value = inner["rope_theta"]
            self.sources["base"] = f"{self.prefix}attn_config.rope_theta"
        if value is None and usual is not None:
            value, self.sources["base"] = usual, f"{self.prefix}model_type"
        if value is None and self.kind and not defaults.speaks(self.top):
            rule = f"rope_theta must be given, because {self.kind} is not known to rotate"
            raise ValueError(self.text(rule, None, "Where it does, 10000 is the usual one."))
        name = self.sources.get("base", "base")
        return 10_000.0 if value is None else checks.base(self.who, value, name)

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head that are rotated."""
        if self.top.get("qk_rope_head_dim"):
            # They are kept apart from the others, and rotated all.
            return head_dim
        if "proportional" in (self.rope.get("rope_type"), self.rope.get("type")):
            # Such a rule leaves pairs still instead of leaving channels out.
            return head_dim
        name = "partial_rotary_factor"
        share = self.one(
            "rotary_dim", [name], [name, "rotary_pct", "rope_pct", "rotary_emb_fraction"]
        )
        count = self.top.get("rotary_dim")
        if share is None and "rotary_dim" not in self.top:
            # Null would be all of the head.
            count = defaults.ROTATED.get(self.kind)
        if share is None and count is None and self.kind in defaults.SHARES:
            share = defaults.SHARES[self.kind]
            self.sources["rotary_dim"] = f"{self.prefix}model_type"
        if share is None and count is None:
            return head_dim
        if share is not None:
            share = checks.positive_float(self.who, name, share)
            width = int(head_dim * share) if share <= 1 else 0
            if width < 2 or width % 2:
                rule = f"{name} must be at most 1, and rotate an even number of the {head_dim}"
                raise ValueError(self.text(f"{rule} channels", f"{share:g}"))
            if count is not None and count != width:
                raise self.contradiction("rotary_dim", name, f"{count} and {width} channels")
            return width
        source = "rotary_dim" if "rotary_dim" in self.top else "model_type"
        self.sources["rotary_dim"] = self.prefix + source
        return checks.even(self.who, "rotary_dim", count)

    def layout(self) -> tuple[bool, bool | None]:
        """Whether pairs are adjacent, in the input and, if it differs, in the output."""
        said = self.mark
        if said is not None:
            if said not in ("half", "interleaved"):
                raise ValueError(self.text(f"{LAYOUT} must be 'half' or 'interleaved'", said))
            self.sources["interleaved"] = LAYOUT
            return said == "interleaved", None
        return self.own_layout()

    def own_layout(self) -> tuple[bool, bool | None]:
        """As `layout`, of the model's own code, whatever a conversion has made of the weights."""
        flag = self.top.get("rope_interleave")
        if self.top.get("use_mla") is False:
            # DeepSeek's without latent attention are Llama's.
            return False, None
        if flag is None and self.kind in defaults.INTERLEAVED_TO_HALVES:
            flag = True
        if flag is not None:
            source = "rope_interleave" if "rope_interleave" in self.top else "model_type"
            self.sources["interleaved"] = self.prefix + source
            adjacent = checks.boolean(self.who, "rope_interleave", flag)
            return adjacent, False if adjacent else None
        if self.kind in defaults.INTERLEAVED:
            self.sources["interleaved"] = f"{self.prefix}model_type"
        return self.kind in defaults.INTERLEAVED, None

    def axes(self) -> Axes | None:
        """Coordinates of M-RoPE."""
        sizes = self.rope.get("mrope_section")
        if sizes is None:
            return None
        self.sources["axes"] = f"{self.prefix}{self.where}.mrope_section"
        dealt = self.rope.get("mrope_interleaved") or self.rope.get("interleaved") or False
        if self.kind in defaults.DEALT:
            # Their code does so without asking.
            dealt = True
        return Sections(sizes, checks.boolean(self.who, "mrope_interleaved", dealt))

    def need(self, name: str) -> Any:
        """A value that the rope_type cannot do without."""
        value = self.rope.get(name)
        if value is None and name == "max_position_embeddings":
            value = self.top.get(name)
        if value is None:
            where = name if name == "max_position_embeddings" else f"{self.where}.{name}"
            raise ValueError(self.text(f"{where} must be given for this rope_type", None))
        return value

    def one(self, what: str, inner: list[str], outer: list[str]) -> Any:
        """The value that any of the keys gives; two that differ are refused."""
        given = {f"{self.where}.{key}": self.rope[key] for key in inner if key in self.rope}
        given = {key: value for key, value in given.items() if value is not None}
        if not given or "." not in self.where:
            # What one layer type says of itself comes before what is said of all.
            given |= {key: self.top[key] for key in outer if self.top.get(key) is not None}
        if not given:
            return None
        (first, value), *others = given.items()
        for other, different in others:
            if different != value:
                raise self.contradiction(first, other, f"{value} and {different}")
        self.sources[what] = self.prefix + first
        return value

    def contradiction(self, a: str, b: str, got: str) -> ValueError:
        """What to raise where two keys differ."""
        rule = f"{self.prefix}{a} and {self.prefix}{b} must agree"
        return ValueError(self.text(rule, got, "Leave one of them out."))

    def text(self, rule: str, got: object, way_out: str = "") -> str:
        """The message of an error."""
        return checks.message(self.who, rule, got, way_out or _BY_HAND[self.who])


def _is_slip(key: str, meant: str) -> bool:
    """Whether one letter is wrong, missing or too many, or two are swapped; not at the ends."""
    if abs(len(key) - len(meant)) > 1 or meant in key or key in meant:
        return False
    # A wrong letter and its place are two that match nothing.
    blocks = SequenceMatcher(None, key, meant).get_matching_blocks()
    return len(key) + len(meant) - 2 * sum(block.size for block in blocks) <= 2
