"""Writes ``src/posenc/configs/models.json``: what each model type does where its config is silent.

    python tools/configs

A ``config.json`` may leave out what is the default of its class. The defaults are read off the
config classes of the installed transformers, and pair layouts by trying the rotating functions of
its models. `by_hand.BY_HAND` has the facts that neither says. Nothing is downloaded. Half a minute.

The file is written with the newest transformers, which may be newer than the one that
``constraints.txt`` pins: put a folder with it first in ``PYTHONPATH``. With the pinned release, the
suite asserts that the file has all that the tool finds in it.

``vision`` has, for each type of a whole model, that of its ``vision_config``, which older files
leave out.

Keys of a row that are also keys of a config have the value of a config that lacks them:
``rope_theta``, ``rope_local_base_freq`` (null: as ``rope_theta``, unscaled), ``head_dim``,
``qk_rope_head_dim``, ``rotary_dim``, ``partial_rotary_factor``, ``rope_interleave``,
``mrope_interleaved``, ``num_attention_heads``, ``num_key_value_heads``, ``no_rope_layer_interval``
and those of `FIELDS`. The other keys:

- ``rope_parameters``: ``"required"`` if rotations are scaled, or differ by layer, by default
- ``rope_types``: the keys of ``rope_parameters`` that have a dict each, where ``layer_types`` need
  not have them
- ``layout``: ``"interleaved"`` if pairs are adjacent channels
- ``layer_types``: those of the first layers, which repeat; null if they follow no cycle
- ``layer_cycle``: the key of older files that says after how many layers they do
- ``last_layer``: the type of the last layer, whatever the others are
- ``window``: ``"both sides"`` if ``sliding_window`` counts the keys on each side of a query
- ``coordinates``: how many numbers are the position of a patch
- ``axial``: how these are divided among the pairs, where ``rope_type`` is or would be axial:
  ``"runs"`` for a run of pairs each, ``"shared"`` for runs of one range of rates,
  ``"alternating"`` for one pair after the other
- ``patches``: these positions, as Python
- ``refused``: why no RoPE rotates as this type does
- ``positions``: the kind of positions of a type that does not rotate; see ``by_hand.py``
- ``converted``: a tiny model was converted to the other layout, and kept its logits
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from by_hand import BY_HAND
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from posenc.configs import text_part
from posenc.interop.huggingface.recognition import recognise, rotates

PATH = Path(__file__).resolve().parents[2] / "src" / "posenc" / "configs" / "models.json"
RULES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
# Their rotation is not along a sequence, or belongs to a part that has a type of its own.
SKIPPED = {"blt", "edgetam_video", "efficientloftr", "mlcd", "sam2_video", "sam3_tracker_video"}
# Their older files name the base of sliding layers beside that of the others.
LOCAL = {"gemma3_text", "gemma3n_text", "modernbert", "modernbert-decoder"}

# Fields of a class that say what attention sees and how queries are scaled. Some classes have one
# that their models do not read.
FIELDS = (
    "sliding_window", "local_attention", "use_sliding_window", "max_window_layers",
    "attention_chunk_size", "attn_temperature_tuning", "attn_scale", "floor_scale",
    "num_register_tokens",
)  # fmt: skip
# Older files have one of these in place of layer_types.
CYCLES = (
    "sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval",
    "layer_group_size", "no_rope_layer_interval",
)  # fmt: skip


def main() -> None:
    """Write the file."""
    found = rows()
    PATH.write_text(text(found, vision(found)))
    print(f"Written to {PATH}.")


def text(found: dict[str, dict[str, Any]], parts: dict[str, str]) -> str:
    """The file: a line for each model type."""
    lines = {
        name: ",\n".join(f"  {json.dumps(kind)}: {json.dumps(row)}" for kind, row in each.items())
        for name, each in {"models": found, "vision": parts}.items()
    }
    head = f'{{\n "transformers": {json.dumps(transformers.__version__)}'
    return (
        head + "".join(f',\n "{name}": {{\n{rows}\n }}' for name, rows in lines.items()) + "\n}\n"
    )


def vision(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The type of each model's ``vision_config``, if it is one of those ``found``."""
    parts: dict[str, str] = {}
    for kind in sorted(CONFIG_MAPPING):
        part = _config(kind).get("vision_config")
        if isinstance(part, dict) and part.get("model_type") in found:
            parts[kind] = part["model_type"]
    return parts


def rows() -> dict[str, dict[str, Any]]:
    """What is known of each model type, keys sorted; types of which nothing is are left out."""
    found: dict[str, dict[str, Any]] = {}
    for _, kinds, facts in BY_HAND:
        for kind in kinds.split():
            found[kind] = found.get(kind, {}) | facts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()
        for kind in CONFIG_MAPPING:
            said = found.get(kind, {})
            if "refused" not in said:
                found[kind] = _read(kind, said) | said
    return {kind: dict(sorted(found[kind].items())) for kind in sorted(found) if found[kind]}


def _read(kind: str, said: dict[str, Any]) -> dict[str, Any]:
    """What transformers knows of a type; ``said`` is what is known by hand."""
    config = _config(kind)
    text, _ = text_part(config)
    if text is not config:
        # Older files may have the keys of the text part beside the type of the whole.
        inner = CONFIG_MAPPING[text["model_type"]] if text.get("model_type") else None
        beside = inner is not None and _module(kind) == _module(text["model_type"])
        layout = _tried(kind) if beside and text.get("rope_parameters") else {}
        return {key: layout[key] for key in ("layout", "rope_interleave") if key in layout}
    row = _defaults(kind, config, said)
    if "axial" in said:
        # The functions beside the class may be those of its text.
        return row
    # An empty dict has an entry for each layer type, once a file names them.
    has_rotation = row or "layout" in said or config.get("rope_parameters") == {}
    return row | _tried(kind) | _layers(kind) if has_rotation else {}


def _config(kind: str) -> dict[str, Any]:
    try:
        return CONFIG_MAPPING[kind]().to_dict()
    except (ValueError, StrictDataclassError):
        # Configs that are made of two others have no default.
        return {}


def _defaults(kind: str, config: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """What the config class of a type that rotates fills in."""
    rope = config.get("rope_parameters")
    if not rope and "rope_theta" in said:
        rope = {"rope_theta": said["rope_theta"]}
    if not rope or (kind in SKIPPED and "axial" not in said):
        return {}
    layers = {name: each for name, each in rope.items() if isinstance(each, dict) or each is None}
    dicts = [each for each in layers.values() if each] or [rope]
    own = {"axial"} if "axial" in said else set[str]()
    if {each.get("rope_type", "default") for each in dicts} - RULES - own:
        return {}
    row: dict[str, Any] = {}
    differ = any(each != dicts[0] for each in dicts) or None in layers.values()
    scaled = any(each.get("rope_type", "default") not in {"default", *own} for each in dicts)
    if kind in LOCAL:
        dicts, differ = [layers["full_attention"]], False
        row["rope_local_base_freq"] = float(layers["sliding_attention"]["rope_theta"])
    elif differ or scaled or len(layers) == 1 or "mrope_section" in rope:
        row["rope_parameters"] = "required"
    if layers.keys() - {"full_attention", "sliding_attention"}:
        # transformers has them in the order of a set.
        row["rope_types"] = sorted(layers)
    if not differ:
        row["rope_theta"] = float(dicts[0]["rope_theta"])
        share = dicts[0].get("partial_rotary_factor")
        if share not in (None, 1) and not config.get("qk_rope_head_dim"):
            row["partial_rotary_factor"] = share
    row |= {key: config[key] for key in ("rotary_dim", "qk_rope_head_dim") if config.get(key)}
    # A width that is worked out from others is none of the class's own.
    fixed = {each.name: each.default for each in dataclasses.fields(CONFIG_MAPPING[kind])}
    width = fixed.get("head_dim") or fixed.get("kv_channels")
    if isinstance(width, int) and "qk_rope_head_dim" not in row:
        row["head_dim"] = width
    return row


def _layers(kind: str) -> dict[str, Any]:
    """The kinds of layers, as seen from models of two depths, and what attention sees in them."""
    defaults = {each.name: each.default for each in dataclasses.fields(CONFIG_MAPPING[kind])}
    row = {key: defaults[key] for key in FIELDS if key in defaults}
    spec = importlib.util.find_spec(_module(kind))
    masks = vars(importlib.import_module(_module(kind))) if spec else {}
    causal = "create_sliding_window_causal_mask" in masks
    both = "create_bidirectional_sliding_window_mask" in masks
    if causal == both:
        # Nothing slides, or the config does not say which way.
        for key in FIELDS[:4]:
            row.pop(key, None)
    elif both:
        row["window"] = "both sides"
    few, many = _types(kind, 25), _types(kind, 27)
    if few is None or many is None:
        return row
    if "max_window_layers" in row:
        asked = {"use_sliding_window": True} if "use_sliding_window" in row else {}
        late = _types(kind, 3, **asked, sliding_window=8, max_window_layers=1)
        if late == ["full_attention"] + ["sliding_attention"] * 2:
            return row
        del row["max_window_layers"]
    elif len(set(few)) == 1 and "use_sliding_window" not in row:
        # All layers slide, or none does.
        return row | ({"layer_types": few[:1]} if "sliding_window" in row else {})
    row["layer_types"] = None
    for period in range(2, 9) if len(set(few)) > 1 else ():
        cycle = few[:period]
        if few[:24] + many[:26] == (cycle * 24)[:24] + (cycle * 26)[:26]:
            row["layer_types"] = cycle
            if (few[24], many[26]) != (cycle[24 % period], cycle[26 % period]):
                row["last_layer"] = few[24]
            for key in CYCLES:
                if _types(kind, 25, **{key: period + 1}) != few:
                    row["layer_cycle"] = key
            break
    return row


def _types(kind: str, count: int, **given: int) -> list[str] | None:
    try:
        found = CONFIG_MAPPING[kind](num_hidden_layers=count, **given)
    except (TypeError, ValueError, StrictDataclassError):
        return None
    return getattr(found, "layer_types", None)


def _module(kind: str) -> str:
    return CONFIG_MAPPING[kind].__module__.replace("configuration_", "modeling_")


def _tried(kind: str) -> dict[str, Any]:
    """How the rotating functions beside a config class pair channels, and mix coordinates."""
    if importlib.util.find_spec(_module(kind)) is None:
        # Some folders have configs alone.
        return {}
    beside = vars(importlib.import_module(_module(kind)))
    functions = [
        function
        for name, function in beside.items()
        if inspect.isfunction(function) and rotates(name) and "vision" not in name
    ]
    layouts = {known.layout for known in map(recognise, functions) if known is not None}
    row: dict[str, Any] = {}
    if "interleaved to half" in layouts:
        row["rope_interleave"] = True
    elif layouts == {"interleaved"}:
        row["layout"] = "interleaved"
    mixers = [
        each.recomposition_frequencies
        for name, each in beside.items()
        if hasattr(each, "recomposition_frequencies") and "Vision" not in name
    ]
    if any(map(_interleaves, mixers)):
        row["mrope_interleaved"] = True
    return row


def _interleaves(mixer: Any) -> bool:
    """Whether coordinates alternate pair by pair, seen from four pairs of sections 2, 1 and 1."""
    by_layer = "layer_type" in inspect.signature(mixer).parameters
    sections = {"all": [2, 1, 1]} if by_layer else [2, 1, 1]
    axes = torch.arange(3.0)[:, None].repeat(1, 4)
    mixed = mixer(SimpleNamespace(mrope_section=sections), axes, *(["all"] if by_layer else []))
    return mixed[:4].tolist() == [0.0, 1.0, 2.0, 0.0]


if __name__ == "__main__":
    main()
