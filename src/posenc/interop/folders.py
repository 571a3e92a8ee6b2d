"""Where a checkpoint lies: its weights, its config, and a target that appears whole or not."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from posenc._contract import checks
from posenc.interop import families
from posenc.interop.families import Config
from posenc.interop.layouts import Layout
from posenc.numerics.configs import LAYOUT, text_part

_INDEX = ".safetensors.index.json"
# The first that is there is the checkpoint.
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
# Weights that nobody converted would keep the old layout under the new name.
_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data .ot .npz .npy".split()
)


def refuse_paths(source: Path, target: Path, overwrite: bool) -> None:
    """What would fail after minutes of writing fails now."""
    if not source.exists():
        rule = "source must be a .safetensors file or a folder with one"
        way_out = "Check the path; nothing is downloaded."
        raise FileNotFoundError(checks.message("convert", rule, source, way_out))
    here, there = source.resolve(), target.resolve()
    if here == there or here in there.parents or there in here.parents:
        rule = "source and target must lie apart"
        way_out = "Pick another folder: the source is never written to."
        raise ValueError(checks.message("convert", rule, f"{source} and {target}", way_out))
    if target.is_symlink() and not target.exists():
        rule = "target must not be a link to nothing"
        raise FileExistsError(checks.message("convert", rule, target, "Remove it first."))
    if not there.parent.is_dir():
        rule = "target must lie in a folder that exists"
        raise FileNotFoundError(checks.message("convert", rule, target, f"mkdir {target.parent}"))
    if target.exists() and (not overwrite or target.is_dir() != source.is_dir()):
        rule = "target must be new, or a {} to overwrite".format(
            "folder" if source.is_dir() else "file"
        )
        way_out = "Pick another name, or pass overwrite=True (--overwrite)."
        raise FileExistsError(checks.message("convert", rule, target, way_out))
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        rule = "a folder to overwrite must be a checkpoint, because all in it goes"
        raise FileExistsError(checks.message("convert", rule, target, "Pick another name."))


def weights(source: Path) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if source.is_file():
        return [source]
    indices = sorted(source.glob(f"*{_INDEX}"))
    if len(indices) == 1:
        return [source / name for name in sorted(set(weight_map(indices[0]).values()))]
    for name in _SINGLE:
        if (source / name).is_file():
            return [source / name]
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        rule = f"a folder must have one of {', '.join(_SINGLE)}, or one index of shards"
        got = f"{len(found)} .safetensors files in {source}"
        way_out = "Name the file instead." if found else "Save the weights as safetensors first."
        raise ValueError(checks.message("convert", rule, got, way_out))
    return found


def weight_map(index: Path) -> dict[str, str]:
    """Which file of a sharded checkpoint has which tensor."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        rule = f"{index} must have a weight_map"
        raise ValueError(checks.message("convert", rule, found, "Download it again."))
    for name in found.values():
        # A name that leads out of the folder would be written out of it too.
        if not isinstance(name, str) or Path(name).name != name:
            rule = f"{index} must name files of its own folder"
            raise ValueError(checks.message("convert", rule, repr(name), "Do not trust it."))
        if not (index.parent / name).is_file():
            rule = f"every file of {index} must be there"
            got = f"no {name}"
            raise FileNotFoundError(checks.message("convert", rule, got, "Download it."))
    return found


def check_index(source: Path, files: Mapping[str, Collection[str]]) -> None:
    """Refuse shards that lack a tensor the index promises, or have one it does not know."""
    if source.is_file() or len(indices := sorted(source.glob(f"*{_INDEX}"))) != 1:
        return
    promised = weight_map(indices[0])
    there = {name: file for file, names in files.items() for name in names}
    if promised != there:
        first = sorted(promised.items() ^ there.items())[0][0]
        rule = f"{indices[0].name} and the shards must list the same tensors"
        raise ValueError(checks.message("convert", rule, f"a dispute over {first}", "Rebuild it."))


def config(source: Path | None, given: Config | str | os.PathLike[str] | None) -> Config:
    """The config as a dict: the one given, or the one beside the weights, or an empty one."""
    if isinstance(given, Mapping):
        return given
    if given is not None and hasattr(given, "to_dict"):
        return given.to_dict()  # type: ignore[no-any-return]
    if given is not None:
        path = Path(given)
        return read_json(path / "config.json" if path.is_dir() else path)
    if source is None:
        return {}
    path = (source if source.is_dir() else source.parent) / "config.json"
    return read_json(path) if path.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as wrong:
        found = wrong
    if not isinstance(found, dict):
        rule = f"{path} must be a JSON object"
        raise ValueError(checks.message("convert", rule, checks.describe(found), "Mend it."))
    return found


def check_space(target: Path, nbytes: int) -> None:
    """Refuse a disk that cannot hold the result."""
    free = shutil.disk_usage(target.resolve().parent).free
    if free < nbytes:
        rule = f"the disk of {target} must have {nbytes} bytes free"
        raise OSError(checks.message("convert", rule, free, "Write to another disk."))


def copy_others(source: Path, draft: Path, taken: Collection[Path]) -> tuple[str, ...]:
    """Copy all of a folder but its weights, and name the weights that stay behind.

    Links are followed, and folders that begin with a dot are somebody's own records: neither a
    repository's nor a cache's is part of a checkpoint.
    """
    left_out = []
    for folder, inner, files in os.walk(source, followlinks=True):
        here = Path(folder)
        (draft / here.relative_to(source)).mkdir()
        above = [here.resolve(), *here.resolve().parents]
        inner[:] = [
            name
            for name in sorted(inner)
            if not name.startswith(".") and (here / name).resolve() not in above
        ]
        for name in sorted(files):
            path = here / name
            if path in taken:
                continue
            if path.suffix.lower() in _WEIGHTS:
                left_out.append(str(path.relative_to(source)))
            else:
                shutil.copyfile(path, draft / path.relative_to(source))
    return tuple(left_out)


def switch(folder: Path, to: Layout, usual: bool) -> bool:
    """Write the layout into the config, and say whether the family's own code reads it there.

    Where it does not, the key is ours, and is left out if the layout is the family's ``usual``.
    """
    path = folder / "config.json"
    whole = read_json(path) if path.is_file() else {}
    text, _ = text_part(whole)
    if not whole or not isinstance(text, dict):
        return False
    before, read = json.dumps(whole), text.get("model_type") in families.SWITCHED
    text.pop(LAYOUT, None)
    if read:
        text[families.SWITCH] = to == "interleaved"
    elif not usual:
        text[LAYOUT] = to
    if json.dumps(whole) != before:
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
    return read


@contextlib.contextmanager
def whole(target: Path, overwrite: bool) -> Iterator[Path]:
    """A name beside ``target`` to write to; it becomes ``target`` at the end, or is removed."""
    draft, old = (target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.{end}" for end in "ab")
    try:
        yield draft
        if target.exists() and not overwrite:
            rule, way_out = "target must still be new", "Pick another name."
            raise FileExistsError(checks.message("convert", rule, target, way_out))
        _flush(draft)
        if target.is_dir():
            # Folders cannot be swapped in one step; the old one comes back if the second fails.
            target.rename(old)
            try:
                draft.rename(target)
            except BaseException:
                old.rename(target)
                raise
        else:
            draft.replace(target)
        _flush(target.parent)
    finally:
        for rest in (draft, old):
            if rest.is_dir():
                shutil.rmtree(rest)
            else:
                rest.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Ask the disk to hold what was written, where the system can be asked."""
    for each in [*path.rglob("*"), path] if path.name.endswith(".a") else [path]:
        with contextlib.suppress(OSError):
            handle = os.open(each, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
