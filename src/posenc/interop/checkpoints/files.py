"""Where a checkpoint lies: its weights, its config, and the files that go along."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from posenc._contract import checks, files
from posenc.configs import LAYOUT, as_dict, text_part
from posenc.interop.checkpoints import drafts, families, safetensors
from posenc.interop.checkpoints.families import Config
from posenc.interop.checkpoints.layouts import Layout

_INDEX = ".safetensors.index.json"
# The first that is there is the checkpoint.
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
# Weights that nobody converted would keep the old layout under the new name.
_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data .ot .npz .npy".split()
)
# Folders within folders; no checkpoint comes near it, and code that walks them recurses.
_DEEPEST = 64
_CLEAN = "Remove it from the source, or convert a copy without it."


def refuse_paths(source: Path, target: Path, overwrite: bool) -> None:
    """What would fail after minutes of writing fails now."""
    if not source.exists():
        rule = "source must be a .safetensors file or a folder with one"
        way_out, kept = "Check the path; nothing is downloaded.", drafts.workspace(source) / "old"
        if kept.exists():
            way_out = f"A run that was to replace it was stopped: it is whole in {kept}."
        raise FileNotFoundError(checks.message("convert", rule, source, way_out))
    here, there = source.resolve(), target.resolve()
    inside = {there, drafts.workspace(there)} & {here, *here.parents}
    if inside or here in there.parents:
        rule = "source and target must lie apart"
        way_out = "Pick another folder: the source is never written to."
        raise ValueError(checks.message("convert", rule, f"{source} and {target}", way_out))
    if target.is_symlink() and not target.exists():
        rule = "target must not be a link to nothing"
        raise FileExistsError(checks.message("convert", rule, target, "Remove it first."))
    if not there.parent.is_dir():
        rule = "target must lie in a folder that exists"
        raise FileNotFoundError(checks.message("convert", rule, target, f"mkdir {target.parent}"))
    drafts.recover(there)
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
    found = [source / name for name in sorted(set(index(source).values()))]
    if not found:
        found = [source / name for name in _SINGLE if (source / name).is_file()][:1]
    if not found:
        found = sorted(source.glob("*.safetensors"))
        if len(found) != 1:
            rule = f"a folder must have one of {', '.join(_SINGLE)}, or one index of shards"
            got = f"{len(found)} .safetensors files in {source}"
            way_out = (
                "Name the file instead." if found else "Save the weights as safetensors first."
            )
            raise ValueError(checks.message("convert", rule, got, way_out))
    for path in found:
        _inside(source, path)
    return found


def index(source: Path) -> dict[str, str]:
    """Which file of a sharded checkpoint has which tensor; of one without an index, nothing."""
    indices = [] if source.is_file() else sorted(source.glob(f"*{_INDEX}"))
    if len(indices) != 1:
        return {}
    path = indices[0]
    found = files.read_json("convert", path).get("weight_map")
    if not isinstance(found, dict) or not found:
        rule, got = f"{path} must have a weight_map", checks.describe(found)
        raise ValueError(checks.message("convert", rule, got, "Download it again."))
    # A name that leads out of the folder would be written out of it too.
    wrong = [n for n in found.values() if not isinstance(n, str) or Path(n).name != n]
    if wrong:
        rule, got = f"{path} must name files of its own folder", checks.describe(wrong[0])
        raise ValueError(checks.message("convert", rule, got, "Do not trust it."))
    for name in sorted(set(found.values())):
        if not (source / name).is_file():
            rule, got = f"every file of {path} must be there", f"no {name}"
            raise FileNotFoundError(checks.message("convert", rule, got, "Download it."))
    return found


def check_index(source: Path, shards: Mapping[str, Collection[str]]) -> None:
    """Refuse shards that lack a tensor the index promises, or have one it does not know."""
    promised = index(source)
    there = {name: file for file, names in shards.items() for name in names}
    if promised and promised != there:
        first = sorted(promised.items() ^ there.items())[0][0]
        rule = "the index and the shards must list the same tensors"
        raise ValueError(checks.message("convert", rule, f"a dispute over {first}", "Rebuild it."))


def config(source: Path | None, given: Config | str | os.PathLike[str] | None) -> Config:
    """The config as a dict: the one given, or the one beside the weights, or an empty one."""
    if given is not None:
        return as_dict("convert", given)
    if source is None:
        return {}
    folder = source if source.is_dir() else source.parent
    path = folder / "config.json"
    if not path.exists():
        path = _base(folder) / "config.json"
    # A name that no disk could hold is not there either.
    return files.read_json("convert", path) if os.path.exists(path) else {}


def _base(folder: Path) -> Path:
    """The folder of the model that an adapter is for, if it is on this machine."""
    path = folder / "adapter_config.json"
    said = files.read_json("convert", path) if path.is_file() else {}
    name = said.get("base_model_name_or_path")
    # As PEFT looks for it: from the folder that the program runs in.
    return Path(name) if name and isinstance(name, str) else folder


def check_space(target: Path, nbytes: int) -> None:
    """Refuse a disk that cannot hold the result."""
    free = shutil.disk_usage(target.resolve().parent).free
    if free < nbytes:
        raise no_space(target, nbytes, f"{free} bytes")


def no_space(target: Path, nbytes: int, got: str) -> OSError:
    """The error of a disk that is full, or that will be."""
    rule = f"the disk of {target} must have {nbytes} bytes free"
    way_out = "Free some space, or write to another disk; nothing was left behind."
    return OSError(checks.message("convert", rule, got, way_out))


@dataclass(frozen=True, slots=True)
class Others:
    """What a folder holds beside its weights; paths are relative to it.

    Args:
        folders: Each after the one it is in.
        files: Regular files, and links to such, with their sizes.
        links: Links to folders, and where they lead.
        left_out: Weights that are not converted.
    """

    folders: list[Path] = field(default_factory=list)
    files: dict[Path, int] = field(default_factory=dict)
    links: dict[Path, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)


def others(source: Path, taken: Collection[Path]) -> Others:
    """What is copied along with the weights ``taken``, and the weights that stay behind.

    Folders that begin with a dot are somebody's own records: neither a repository's nor a cache's
    is part of a checkpoint. A linked folder is not walked through: what it leads to lies in the
    source too, and is copied once.
    """
    found, taken = Others(), set(taken)
    for folder, inner, names in os.walk(source, onerror=_fail):
        here = Path(folder).relative_to(source)
        if len(here.parts) > _DEEPEST:
            rule = f"folders in {source} must be at most {_DEEPEST} deep"
            raise ValueError(checks.message("convert", rule, here, _CLEAN))
        found.folders.append(here)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in inner:
            if (source / here / name).is_symlink():
                real = _inside(source, source / here / name)
                found.links[here / name] = os.path.relpath(real, os.path.realpath(folder))
        for name in sorted(names):
            path = source / here / name
            if path in taken:
                continue
            if path.suffix.lower() in _WEIGHTS:
                found.left_out.append(str(here / name))
                continue
            status = os.stat(_inside(source, path))
            if not stat.S_ISREG(status.st_mode):
                rule = f"{path} must be a regular file"
                raise ValueError(checks.message("convert", rule, "a device or a pipe", _CLEAN))
            found.files[here / name] = status.st_size
    return found


def copy(source: Path, draft: Path, found: Others, tell: Callable[[str, int], None]) -> None:
    """Make ``draft`` a folder with all of these, and with the modes that they have."""
    for here in found.folders:
        os.mkdir(draft / here, 0o700)
        # What nobody may write into could be neither filled nor removed.
        drafts.set_mode(draft / here, os.stat(source / here).st_mode | 0o700)
    for here, leads in found.links.items():
        os.symlink(leads, draft / here, target_is_directory=True)
    for here, size in found.files.items():
        opened = files.open_regular("convert", source / here)
        mode = os.fstat(opened.fileno()).st_mode
        with opened as old, drafts.written(draft / here, mode) as new:
            # A file that grows meanwhile, without end perhaps, is copied as it was.
            while size and (data := old.read(min(safetensors.CHUNK, size))):
                new.write(data)
                size -= len(data)
                tell(str(here), len(data))


def _fail(wrong: OSError) -> None:
    raise wrong


def _inside(source: Path, path: Path) -> str:
    """Where ``path`` leads. Links lead out of ``source`` to a Hugging Face cache's blobs alone."""
    real = os.path.realpath(path)
    if not path.is_symlink():
        return real
    base = Path(os.path.realpath(source))
    allowed = base == Path(real) or base in Path(real).parents
    for folder in (base, *base.parents):
        # models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
        cache = folder.parent.parent
        if folder.parent.name == "snapshots" and cache.name.startswith("models--"):
            allowed = allowed or Path(real).parent == cache / "blobs"
    if not allowed or not os.path.exists(real):
        rule = f"links in {source} must lead to something in it"
        got = f"{path}, which leads to {real}"
        way_out = "Put the file in place of the link, if you know why it is there."
        raise ValueError(checks.message("convert", rule, got, way_out))
    return real


def switch(folder: Path, to: Layout, usual: bool) -> bool:
    """Write the layout into the config, and say whether the family's own code reads it there.

    Where it does not, the key is ours, and is left out if the layout is the family's ``usual``.
    """
    path = folder / "config.json"
    whole = files.read_json("convert", path) if path.is_file() else {}
    text, _ = text_part(whole)
    if not whole or not isinstance(text, dict):
        return False
    kind = text.get("model_type")
    before, read = json.dumps(whole), isinstance(kind, str) and kind in families.SWITCHED
    text.pop(LAYOUT, None)
    if read:
        text["rope_interleave"] = to == "interleaved"
    elif not usual:
        text[LAYOUT] = to
    if json.dumps(whole) != before:
        mode = path.stat().st_mode
        os.unlink(path)
        with drafts.written(path, mode) as file:
            file.write(json.dumps(whole, indent=2).encode() + b"\n")
    return read
