"""Checkpoints between the half and the interleaved layout: tensors, state dicts and files."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from posenc._contract import checks
from posenc.configs import LAYOUT, as_dict, hub, text_part
from posenc.interop.checkpoints import families, files, layouts
from posenc.interop.checkpoints.families import Config, Model, Overrides
from posenc.interop.checkpoints.files import Shard
from posenc.interop.checkpoints.layouts import LAYOUTS, OTHER, Heads, Layout, permute
from posenc.interop.checkpoints.resize import resize_learned

__all__ = ["Conversion", "Heads", "convert", "convert_state", "permute", "resize_learned"]
__dir__ = __all__.copy

Progress = Callable[[str, float], None]
# The key in a file's metadata for the layout of its queries and keys.
METADATA = "posenc.rope_layout"
_fail = functools.partial(checks.fail, "convert")


@dataclass(frozen=True, slots=True)
class Conversion:
    """The result of a conversion.

    Args:
        source: The path that was read, or the model's name.
        target: The path that was written.
        layout: The layout of the target.
        family: The config's ``model_type``, if there was one.
        tensors: How many tensors the checkpoint has.
        moved: Names of those whose rows moved.
        nbytes: Bytes of all tensors.
        left_out: Files of the folder that were not copied: weights in the old layout.
        marked: Whether the layout differs from the one that the family's code reads.
    """

    source: str
    target: str
    layout: Layout
    family: str | None
    tensors: int
    moved: tuple[str, ...]
    nbytes: int
    left_out: tuple[str, ...]
    marked: bool


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Layout,
    config: Config | str | os.PathLike[str] | None = None,
    layout: Layout | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    fused: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Write a checkpoint again with its queries and keys in the other pair layout.

    Rows of the q and k projections (separate, fused, latent), their biases, scales and LoRA
    factors, and the weights of q and k norms move; no bit of them changes. One file is in memory
    at a time. The target is written in a temporary folder beside it and renamed at the end; an
    error leaves nothing behind. The source is never written to. Needs the safetensors package.

    The new layout is written into the config if the family's code has a key for it
    (``rope_interleave``). Otherwise it is in each file's metadata as ``posenc.rope_layout`` and in
    the folder's config as ``posenc_rope_layout``, which `RoPE.from_config` reads; the family's own
    code does not, and would rotate the new weights in the wrong pairs.

    Args:
        source: A ``.safetensors`` file, or a folder: a model's, sharded or not, or an adapter's.
            Or a model's name on the hub, ``"org/name"`` or ``"org/name@revision"``: its config and
            its weights are downloaded into the hub's cache, and nothing else is downloaded or
            copied.
        target: The file or folder to write.
        to: ``"interleaved"`` or ``"half"``.
        config: A config's dict, ``config.json``, its folder, or a model's name on the hub. None is
            the one beside the weights; for an adapter, the one in the folder of its base model.
        layout: The layout of the source. None takes it from the files' metadata, or the
            family; with neither config nor metadata it is the opposite of ``to``.
        num_heads: Heads of queries, instead of the config's.
        num_kv_heads: Heads of keys, instead of the config's.
        head_dim: Channels of a head, instead of the config's.
        rotary_dim: Channels of a head that are rotated, instead of the config's.
        fused: ``"qkv"`` or ``"qkv_grouped"``, as in :func:`permute`, for a fused projection of a
            family unknown here.
        overwrite: Whether an existing target may be replaced: a file, or a folder with weights.
        progress: Called with the name of each file of weights, and the fraction that is written.

    Returns:
        A :class:`Conversion`.
    """
    checks.choice("convert", "to", to, LAYOUTS)
    given, name = str(source), None
    if hub.is_name(source):
        source = files.download_config(source).parent
        # The folder's name is the commit, so all files are of the same one.
        name = f"{given.partition('@')[0]}@{source.name}"
    source, target = Path(source), Path(target)
    files.check_paths(source, target)
    folder = source.is_dir()
    # Where the target is a link, the file or folder it leads to is replaced.
    with files.atomic_write(target.resolve(), folder=folder, overwrite=overwrite) as new:
        shards = files.read_shards(source, name)
        beside = source if folder else source.parent
        described = files.read_config(beside) if config is None else as_dict("convert", config)
        overrides = Overrides(num_heads, num_kv_heads, head_dim, rotary_dim, fused)
        model = families.from_config(described, overrides)
        _check_layout(shards, model, described, layout, to)
        shapes = {name: shape for shard in shards for name, shape in shard.shapes.items()}
        orders = _orders(shapes, model, to)
        # By the old path.
        new_paths = {shard.path: new / shard.path.name if folder else new for shard in shards}
        others, left_out = files.other_files(source, new_paths, name) if folder else ([], [])
        size = sum(path.stat().st_size for path in new_paths)
        copied = (source / path for path in others if (source / path).is_file())
        files.check_disk_space(target, size + sum(path.stat().st_size for path in copied))
        for path in others:
            files.copy(source, path, new)
        native = files.mark(new, to, native=model.layout == to)
        done, nbytes = 0, 0
        for shard in shards:
            metadata = {k: v for k, v in shard.metadata.items() if k != METADATA}
            metadata |= {} if native else {METADATA: to}
            nbytes += files.write_shard(shard, new_paths[shard.path], metadata, orders)
            done += shard.path.stat().st_size
            if progress is not None:
                progress(shard.path.name, done / size)
    return Conversion(
        source=given,
        target=str(target),
        layout=to,
        family=model.family,
        tensors=len(shapes),
        moved=tuple(orders),
        nbytes=nbytes,
        left_out=tuple(left_out),
        marked=not native,
    )


def convert_state(
    state: Mapping[str, Tensor],
    *,
    to: Layout,
    config: Config | str | os.PathLike[str] | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    rotary_dim: int | None = None,
    fused: str | None = None,
) -> dict[str, Tensor]:
    """A state dict with its queries and keys in the other pair layout.

    As :func:`convert`, in memory: tensors that move are new, the others are the same objects.
    The layout of ``state``, which cannot be checked, must be the opposite of ``to``.

    Examples:
        >>> import torch
        >>> state = {"layers.0.attn.q_proj.bias": torch.arange(4), "head.bias": torch.arange(4)}
        >>> convert_state(state, to="interleaved", num_heads=1, head_dim=4)
        {'layers.0.attn.q_proj.bias': tensor([0, 2, 1, 3]), 'head.bias': tensor([0, 1, 2, 3])}
    """
    checks.choice("convert_state", "to", to, LAYOUTS)
    overrides = Overrides(num_heads, num_kv_heads, head_dim, rotary_dim, fused)
    model = families.from_config({} if config is None else as_dict("convert", config), overrides)
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        got, hint = checks.describe(state), "Pass model.state_dict()."
        checks.fail("convert_state", "state must be a dict by name", got, hint, TypeError)
    # Values that are no tensors, such as step counts, stay.
    shapes = {name: tuple(x.shape) for name, x in state.items() if isinstance(x, Tensor)}
    orders = _orders(shapes, model, to)
    return {
        name: layouts.take(tensor, orders[name]) if name in orders else tensor
        for name, tensor in state.items()
    }


def _orders(shapes: Mapping[str, tuple[int, ...]], model: Model, to: Layout) -> dict[str, Tensor]:
    """The new order of the rows of every tensor that moves."""
    maybe = {name: model.order(name, shape, to) for name, shape in shapes.items()}
    orders = {name: rows for name, rows in maybe.items() if rows is not None}
    if not orders:
        got = f"{len(shapes)} tensors, such as {', '.join(list(shapes)[:3])}"
        hint = "Rename them as transformers does, or use permute on each."
        _fail("a checkpoint must have projections of queries or keys", got, hint)
    projected = {families.module_of(name) for name in orders if model.kind(name) != "norm"}
    for name in orders:
        # The norm would move, and a projection with an unknown name would not.
        if families.module_of(name) not in projected:
            hint = "Convert the whole folder, or use permute on each tensor."
            _fail("a norm of queries or keys must come with their projection", name, hint)
    return orders


def _check_layout(
    shards: list[Shard], model: Model, config: Config, layout: Layout | None, to: Layout
) -> None:
    """Refuse a source that is, or may be, in the wanted layout already."""
    said: dict[str, Any] = {f"{METADATA} of {s.path}": s.metadata.get(METADATA) for s in shards}
    # The argument wins over the config, which may be another checkpoint's.
    said |= {LAYOUT: text_part(config)[0].get(LAYOUT)} if layout is None else {"layout": layout}
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        checks.choice("convert", name, value, LAYOUTS)
    found = set(said.values())
    if len(found) > 1:
        got, hint = " and ".join(sorted(found)), "Leave layout out, or convert each file."
        _fail("the metadata of all files, the config and layout= must agree", got, hint)
    words = {word for shard in shards for name in shard.shapes for word in name.split(".")}
    # The original releases have these names, and often another layout than transformers.
    if not found and model.layout and words & {"wq", "wk"}:
        rule = "the layout of the source must be given, because its names are not transformers'"
        _fail(rule, "wq and wk", "Pass layout='interleaved' (--layout) for Meta's or Mistral's.")
    actual = found.pop() if found else model.layout
    if actual is None and model.family is not None:
        rule, got = "the layout of the source must be known", f"the unknown family {model.family!r}"
        _fail(rule, got, "Read how it rotates, and pass layout='half' or 'interleaved' (--layout).")
    if actual == to:
        hint = f"Use it as it is; if it is {OTHER[to]}, pass layout={OTHER[to]!r}."
        _fail(f"the source must be in the other layout, {OTHER[to]}", to, hint)
