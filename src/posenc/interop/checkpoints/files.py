"""Files of a checkpoint: its weights, its config, and those that are copied along."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from posenc._contract import checks, files
from posenc.configs import LAYOUT, text_part
from posenc.interop.checkpoints import drafts, families
from posenc.interop.checkpoints.families import Config
from posenc.interop.checkpoints.layouts import Layout
from posenc.interop.checkpoints.safetensors import Source

_fail = functools.partial(checks.fail, "convert")
# The first that exists is the checkpoint.
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
# Weights in formats that are not converted are not copied: they have the old layout.
_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data .ot .npz .npy".split()
)


def check_paths(source: Path, target: Path) -> None:
    """Refuse paths that would fail after minutes of writing, or overwrite the source."""
    if not source.exists():
        rule = "source must be a .safetensors file or a folder with one"
        way_out, kept = "Check the path; nothing is downloaded.", drafts.workspace(source) / "old"
        if kept.exists():
            way_out = f"Use {kept}, the complete source: a run that was replacing it was killed."
        _fail(rule, source, way_out, FileNotFoundError)
    old, new = source.resolve(), target.resolve()
    if {new, drafts.workspace(new)} & {old, *old.parents} or old in new.parents:
        way_out = "Pick another folder: the source is never written to."
        _fail("source and target must not contain each other", f"{source} and {target}", way_out)
    if not new.parent.is_dir():
        rule = "target must lie in a folder that exists"
        _fail(rule, target, f"Run mkdir {target.parent}.", FileNotFoundError)


def shards(source: Path) -> list[Source]:
    """The safetensors files of a checkpoint, compared with its index if it has one."""
    if source.is_file():
        return [Source(source)]
    indices = list(source.glob("*.safetensors.index.json"))
    index = _index(indices[0]) if len(indices) == 1 else {}
    names = sorted(set(index.values()))
    names = names or [name for name in _SINGLE if (source / name).is_file()][:1]
    names = names or sorted(path.name for path in source.glob("*.safetensors"))
    if not index and len(names) != 1:
        rule = f"a folder must have one of {', '.join(_SINGLE)}, or one index of shards"
        way_out = "Pass one of the files." if names else "Save the weights as safetensors first."
        _fail(rule, f"{len(names)} .safetensors files in {source}", way_out)
    for name in names:
        _inside(source, source / name)
    found = [Source(source / name) for name in names]
    actual = {name: shard.path.name for shard in found for name in shard.entries}
    if index and index != actual:
        first = min(index.items() ^ actual.items())[0]
        rule = "the index and the shards must list the same tensors"
        _fail(rule, f"a difference at {first}", "Build the index again.")
    return found


def _index(path: Path) -> dict[str, str]:
    """Which file of a sharded checkpoint has which tensor."""
    found = files.read_json("convert", path).get("weight_map")
    if not isinstance(found, dict) or not found:
        _fail(f"{path} must have a weight_map", checks.describe(found), "Download it again.")
    for name in found.values():
        # A path that leads out of the folder could overwrite other files.
        if not isinstance(name, str) or Path(name).name != name:
            rule, got = f"{path} must name files of its own folder", checks.describe(name)
            _fail(rule, got, "Download it again, from a source you trust.")
    return found


def config(folder: Path) -> Config:
    """The config beside the weights, or that of an adapter's base model, or an empty one."""
    path, adapter = folder / "config.json", folder / "adapter_config.json"
    if not path.exists() and adapter.is_file():
        base = files.read_json("convert", adapter).get("base_model_name_or_path")
        if base and isinstance(base, str):
            # As in PEFT, the path is relative to the current directory.
            path = Path(base) / "config.json"
    # os.path.exists is False for names that are too long, where Path.exists raises.
    return files.read_json("convert", path) if os.path.exists(path) else {}


def check_disk_space(target: Path, nbytes: int) -> None:
    """Refuse a disk that cannot hold the result."""
    free = shutil.disk_usage(target.resolve().parent).free
    if free < nbytes:
        rule = f"the disk of {target} must have {nbytes} bytes free"
        _fail(rule, free, "Free some space, or write to another disk.", OSError)


def others(source: Path, taken: Collection[Path]) -> tuple[dict[Path, int], list[str]]:
    """The other files and folders to copy, with their sizes, and the names of weights left out.

    ``taken`` are the converted weights. Folders whose names begin with a dot are ignored.
    """
    found: dict[Path, int] = {}
    left_out = []
    for folder, inner, names in os.walk(source, onerror=_raise):
        relative = Path(folder).relative_to(source)
        found[relative] = 0
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        links = [name for name in inner if os.path.islink(os.path.join(folder, name))]
        for path in (relative / name for name in sorted(names + links)):
            if source / path in taken:
                continue
            if path.suffix.lower() in _WEIGHTS:
                left_out.append(str(path))
                continue
            status = os.stat(_inside(source, source / path))
            if not stat.S_ISREG(status.st_mode):
                got = "a device, a pipe or a link to a folder"
                way_out = "Remove it from the source, or convert a copy without it."
                _fail(f"{source / path} must be a regular file", got, way_out)
            found[path] = status.st_size
    return found, left_out


def copy(old: Path, new: Path) -> None:
    """Copy a folder without its content, or a file."""
    mode = old.stat().st_mode
    if old.is_dir():
        os.mkdir(new)
        # Without write permission, it could be neither filled nor removed.
        files.set_mode(new, mode | 0o700)
    else:
        with files.open_regular("convert", old) as source, files.create(new, mode) as target:
            shutil.copyfileobj(source, target)


def _raise(error: OSError) -> None:
    raise error


def _inside(source: Path, path: Path) -> str:
    """The real path; a link may leave ``source`` only for the blobs of a Hugging Face cache."""
    real = os.path.realpath(path)
    if not path.is_symlink():
        return real
    # models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
    base = Path(os.path.realpath(source))
    caches = [folder for folder in base.parents if folder.name.startswith("models--")]
    allowed = {base, *(folder / "blobs" for folder in caches)} & {Path(real), *Path(real).parents}
    if not allowed or not os.path.exists(real):
        rule, got = f"links in {source} must lead to a file in it", f"{path}, a link to {real}"
        _fail(rule, got, "Replace the link by the file, if you trust it.")
    return real


def mark(folder: Path, to: Layout, native: bool) -> bool:
    """Write the layout into the config; return whether the family's own code then reads it right.

    The key is the family's, or else ``posenc_rope_layout``; a ``native`` layout needs none.
    """
    path = folder / "config.json"
    config = files.read_json("convert", path) if path.is_file() else {}
    text, _ = text_part(config)
    if not config or not isinstance(text, dict):
        return native
    before = dict(text)
    text.pop(LAYOUT, None)
    if str(text.get("model_type")) in families.SWITCHED:
        text["rope_interleave"] = to == "interleaved"
        native = True
    elif not native:
        text[LAYOUT] = to
    if text != before:
        mode = path.stat().st_mode
        os.unlink(path)
        with files.create(path, mode) as file:
            file.write(json.dumps(config, indent=2).encode() + b"\n")
    return native
