"""Where a checkpoint lies: its weights, its config, and the files that go along."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from posenc._contract import checks, files
from posenc.configs import LAYOUT, text_part
from posenc.interop.checkpoints import drafts, families
from posenc.interop.checkpoints.families import Config
from posenc.interop.checkpoints.layouts import Layout
from posenc.interop.checkpoints.safetensors import Advance, Source, copy_bytes

_fail = functools.partial(checks.fail, "convert")
# The first that is there is the checkpoint.
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
# Weights that nobody converted would keep the old layout under the new name.
_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data .ot .npz .npy".split()
)
# Folders within folders; no checkpoint comes near it, and code that walks them recurses.
_DEEPEST = 64
_CLEAN = "Remove it from the source, or convert a copy without it."


def check_paths(source: Path, target: Path) -> None:
    """Refuse paths that would fail after minutes of writing, or by which something is lost."""
    if not source.exists():
        rule = "source must be a .safetensors file or a folder with one"
        way_out, kept = "Check the path; nothing is downloaded.", drafts.workspace(source) / "old"
        if kept.exists():
            way_out = f"A run that was to replace it was stopped: it is whole in {kept}."
        _fail(rule, source, way_out, FileNotFoundError)
    old, new = source.resolve(), target.resolve()
    if {new, drafts.workspace(new)} & {old, *old.parents} or old in new.parents:
        way_out = "Pick another folder: the source is never written to."
        _fail("source and target must lie apart", f"{source} and {target}", way_out)
    if target.is_symlink() and not target.exists():
        _fail("target must not be a link to nothing", target, "Remove it first.", FileExistsError)
    if not new.parent.is_dir():
        rule = "target must lie in a folder that exists"
        _fail(rule, target, f"mkdir {target.parent}", FileNotFoundError)


def shards(source: Path) -> list[Source]:
    """The safetensors files of a checkpoint; they hold what its index says, if it has one."""
    if source.is_file():
        return [Source(source)]
    indices = list(source.glob("*.safetensors.index.json"))
    promised = _index(indices[0]) if len(indices) == 1 else {}
    names = sorted(set(promised.values()))
    names = names or [name for name in _SINGLE if (source / name).is_file()][:1]
    names = names or sorted(path.name for path in source.glob("*.safetensors"))
    if not promised and len(names) != 1:
        rule = f"a folder must have one of {', '.join(_SINGLE)}, or one index of shards"
        way_out = "Name the file instead." if names else "Save the weights as safetensors first."
        _fail(rule, f"{len(names)} .safetensors files in {source}", way_out)
    for name in names:
        _inside(source, source / name)
    found = [Source(source / name) for name in names]
    actual = {name: shard.path.name for shard in found for name in shard.entries}
    if promised and promised != actual:
        first = min(promised.items() ^ actual.items())[0]
        rule = "the index and the shards must list the same tensors"
        _fail(rule, f"a dispute over {first}", "Rebuild it.")
    return found


def _index(path: Path) -> dict[str, str]:
    """Which file of a sharded checkpoint has which tensor."""
    found = files.read_json("convert", path).get("weight_map")
    if not isinstance(found, dict) or not found:
        _fail(f"{path} must have a weight_map", checks.describe(found), "Download it again.")
    for name in found.values():
        # A name that leads out of the folder would be written out of it too.
        if not isinstance(name, str) or Path(name).name != name:
            rule, got = f"{path} must name files of its own folder", checks.describe(name)
            _fail(rule, got, "Do not trust it.")
        if not (path.parent / name).is_file():
            rule = f"every file of {path} must be there"
            _fail(rule, f"no {name}", "Download it.", FileNotFoundError)
    return found


def config(folder: Path) -> Config:
    """The config beside the weights, or that of an adapter's base model, or an empty one."""
    path, adapter = folder / "config.json", folder / "adapter_config.json"
    if not path.exists() and adapter.is_file():
        base = files.read_json("convert", adapter).get("base_model_name_or_path")
        if base and isinstance(base, str):
            # As PEFT looks for it: from the folder that the program runs in.
            path = Path(base) / "config.json"
    # A name that no disk could hold is not there either.
    return files.read_json("convert", path) if os.path.exists(path) else {}


@contextlib.contextmanager
def disk_space(target: Path, nbytes: int) -> Iterator[None]:
    """Refuse a disk that cannot hold the result, or that fills up in the block."""
    free = shutil.disk_usage(target.resolve().parent).free
    try:
        if free < nbytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        rule = f"the disk of {target} must have {nbytes} bytes free"
        got = f"{free} bytes" if free < nbytes else "a full disk"
        way_out = "Free some space, or write to another disk; nothing was left behind."
        raise OSError(checks.message("convert", rule, got, way_out)) from error


def others(source: Path, taken: Collection[Path]) -> tuple[dict[Path, int], list[str]]:
    """What is copied along with the weights ``taken``, with its bytes; what is left out.

    Weights that are not converted are left out. Folders that begin with a dot are somebody's own
    records: neither a repository's nor a cache's is part of a checkpoint. A linked folder is not
    walked through: what it leads to lies in the source too, and is copied once.
    """
    found: dict[Path, int] = {}
    left_out = []
    for folder, inner, names in os.walk(source, onerror=_raise):
        relative = Path(folder).relative_to(source)
        if len(relative.parts) > _DEEPEST:
            _fail(f"folders in {source} must be at most {_DEEPEST} deep", relative, _CLEAN)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        links = [relative / name for name in inner if os.path.islink(os.path.join(folder, name))]
        for path in links:
            _inside(source, source / path)
        found |= dict.fromkeys([relative, *links], 0)
        for path in (relative / name for name in sorted(names)):
            if source / path in taken:
                continue
            if path.suffix.lower() in _WEIGHTS:
                left_out.append(str(path))
                continue
            status = os.stat(_inside(source, source / path))
            if not stat.S_ISREG(status.st_mode):
                _fail(f"{source / path} must be a regular file", "a device or a pipe", _CLEAN)
            found[path] = status.st_size
    return found, left_out


def copy(old: Path, new: Path, nbytes: int, advance: Advance) -> None:
    """Make ``new`` what ``old`` is: a folder, a link to one within the source, or a file."""
    if old.is_symlink() and old.is_dir():
        leads_to = os.path.relpath(os.path.realpath(old), os.path.realpath(old.parent))
        os.symlink(leads_to, new, target_is_directory=True)
    elif old.is_dir():
        os.mkdir(new, 0o700)
        # What nobody may write into could be neither filled nor removed.
        files.set_mode(new, old.stat().st_mode | 0o700)
    else:
        opened = files.open_regular("convert", old)
        mode = os.fstat(opened.fileno()).st_mode
        with opened as source, files.create(new, mode) as target:
            # A file that grows meanwhile, without end perhaps, is copied as it was.
            copy_bytes(source, target, nbytes, advance)


def _raise(error: OSError) -> None:
    raise error


def _inside(source: Path, path: Path) -> str:
    """Where ``path`` leads. Links lead out of ``source`` to a Hugging Face cache's blobs alone."""
    real = os.path.realpath(path)
    if not path.is_symlink():
        return real
    # models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
    base = Path(os.path.realpath(source))
    caches = [folder for folder in base.parents if folder.name.startswith("models--")]
    allowed = {base, *(folder / "blobs" for folder in caches)} & {Path(real), *Path(real).parents}
    if not allowed or not os.path.exists(real):
        rule, got = f"links in {source} must lead to something in it", f"{path}, a link to {real}"
        _fail(rule, got, "Put the file in place of the link, if you know why it is there.")
    return real


def mark(folder: Path, to: Layout, native: bool) -> bool:
    """Write the layout into the config; whether its own code reads it there, or needs no mark.

    The key is the family's, where it has one. Else it is ours, and is left out of a config whose
    family has this layout anyway, which is ``native``.
    """
    path = folder / "config.json"
    config = files.read_json("convert", path) if path.is_file() else {}
    text, _ = text_part(config)
    if not config or not isinstance(text, dict):
        return native
    kind = text.get("model_type")
    has_key = isinstance(kind, str) and kind in families.SWITCHED
    marked = {key: value for key, value in text.items() if key != LAYOUT}
    if has_key:
        marked["rope_interleave"] = to == "interleaved"
    elif not native:
        marked[LAYOUT] = to
    if marked != text:
        text.clear()
        text.update(marked)
        mode = path.stat().st_mode
        os.unlink(path)
        with files.create(path, mode) as file:
            file.write(json.dumps(config, indent=2).encode() + b"\n")
    return has_key or native
