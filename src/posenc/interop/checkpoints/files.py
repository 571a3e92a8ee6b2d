"""Files of a checkpoint: its weights, its config, and those that are copied along."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from torch import Tensor

from posenc._contract import checks, files
from posenc.configs import LAYOUT, hub, text_part
from posenc.interop.checkpoints import families, layouts
from posenc.interop.checkpoints.families import Config
from posenc.interop.checkpoints.layouts import Layout

_fail = functools.partial(checks.fail, "convert")
# The index of shards that a model on the hub has.
_INDEX = "model.safetensors.index.json"
# The first that exists is the checkpoint.
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
# Weights in formats that are not converted are not copied: they have the old layout.
_WEIGHTS = frozenset(
    ".safetensors .bin .pt .pth .ckpt .gguf .h5 .msgpack .onnx .onnx_data .ot .npz .npy".split()
)


@dataclass(frozen=True, slots=True)
class Shard:
    """A safetensors file: its metadata, and the shapes of its tensors by name."""

    path: Path
    metadata: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]


def check_paths(source: Path, target: Path) -> None:
    """Refuse paths that would fail after minutes of writing, or overwrite the source."""
    if not (source.is_dir() or source.is_file()):
        rule = "source must be a .safetensors file, a folder with one, or a model's name on the hub"
        _fail(rule, source, "Check the path; a name is org/name.", FileNotFoundError)
    old, new = source.resolve(), target.resolve()
    if new in (old, *old.parents) or old in new.parents:
        hint = "Pick another folder: the source is never written to."
        _fail("source and target must not contain each other", f"{source} and {target}", hint)
    if not new.parent.is_dir():
        rule = "target must lie in a folder that exists"
        _fail(rule, target, f"Run mkdir {target.parent}.", FileNotFoundError)


@contextlib.contextmanager
def atomic_write(target: Path, *, folder: bool, overwrite: bool) -> Iterator[Path]:
    """A path to write to, which becomes ``target`` after the block.

    It lies in a temporary folder beside ``target``, which is removed at the end. After an error or
    Ctrl-C the target is as it was.
    """
    _check_replaceable(target, folder, overwrite)
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.posenc-convert-", dir=target.parent))
    old, new = work / "old", work / "new"
    try:
        yield new
        # Another program may have written a target meanwhile.
        _check_replaceable(target, folder, overwrite)
        if target.is_dir():
            # Folders cannot be swapped in one step.
            os.rename(target, old)
        os.replace(new, target)
    finally:
        if {"old", "new"} <= set(os.listdir(work)):
            # If another program has taken the name, this raises, and both folders are kept.
            os.rename(old, target)
        shutil.rmtree(work)


def _check_replaceable(target: Path, folder: bool, overwrite: bool) -> None:
    replaceable = target.is_dir() if folder else target.is_file()
    if os.path.lexists(target) and not (overwrite and replaceable):
        rule = f"target must be new, or a {'folder' if folder else 'file'} to overwrite"
        hint = "or pass overwrite=True (--overwrite)." if replaceable else "or move it away."
        _fail(rule, target, f"Pick another name, {hint}", FileExistsError)
    if target.is_dir() and any(target.iterdir()) and not any(target.glob("*.safetensors")):
        rule = "a folder to overwrite must be a checkpoint, because everything in it is deleted"
        _fail(rule, target, "Pick another name.", FileExistsError)


def download_config(name: str) -> Path:
    """The config of a model on the hub, in the folder where its weights will be."""
    return hub.download("convert", name, "config.json", instead="a folder with one")


def _download(name: str) -> tuple[dict[str, str], list[str]]:
    """Get the weights of a model on the hub; its index, or none, and the names of the files."""
    instead = "a folder with the weights as safetensors"
    first = hub.download("convert", name, _INDEX, _SINGLE[0], instead=instead)
    index = _index(first) if first.name == _INDEX else {}
    names = sorted(set(index.values())) or [first.name]
    for file in names:
        hub.download("convert", name, file, instead=instead)
    return index, names


def read_shards(source: Path, name: str | None = None) -> list[Shard]:
    """The safetensors files of a checkpoint, compared with its index if it has one.

    ``name`` is the model's on the hub, with the revision that ``source`` is the folder of.
    """
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(
            "posenc.interop.checkpoints.convert needs safetensors: "
            "pip install 'posenc[cli]', or '.[cli]' in a clone"
        )
    if source.is_file():
        return [_read_shard(source)]
    index, names = _find(source) if name is None else _download(name)
    found = [_read_shard(source / name) for name in names]
    actual = {name: shard.path.name for shard in found for name in shard.shapes}
    if index and index != actual:
        first = min(index.items() ^ actual.items())[0]
        rule = "the index and the shards must list the same tensors"
        _fail(rule, f"a difference at {first}", "Build the index again.")
    return found


def _find(source: Path) -> tuple[dict[str, str], list[str]]:
    """The index of a folder, or none, and the names of its files of weights."""
    indices = list(source.glob("*.safetensors.index.json"))
    index = _index(indices[0]) if len(indices) == 1 else {}
    names = sorted(set(index.values()))
    names = names or [name for name in _SINGLE if (source / name).is_file()][:1]
    names = names or sorted(path.name for path in source.glob("*.safetensors"))
    if not index and len(names) != 1:
        rule = f"a folder must have one of {', '.join(_SINGLE)}, or one index of shards"
        hint = "Pass one of the files." if names else "Save the weights as safetensors first."
        _fail(rule, f"{len(names)} .safetensors files in {source}", hint)
    return index, names


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


def _open_regular(path: Path) -> BinaryIO:
    try:
        return files.open_regular(path)
    except OSError as error:
        _refuse_unreadable(path, error)


def _refuse_unreadable(path: Path, error: OSError) -> NoReturn:
    hint = "Put a copy in its place, or remove it."
    _fail(f"{path} must be a file that can be read", error.strerror or error, hint, type(error))


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    # safe_open would wait for the writer of a named pipe.
    _open_regular(path).close()
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        # A file of /proc is a regular one, and cannot be mapped.
        _refuse_unreadable(path, error)
    except SafetensorError as error:
        hint = "Download it again (git lfs pull for a pointer), or save a .bin file as safetensors."
        _fail(f"{path} must be a whole safetensors file", error, hint)


def _read_shard(path: Path) -> Shard:
    with _open(path) as file:
        names = file.keys()
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
        return Shard(path, file.metadata() or {}, shapes)


def write_shard(
    shard: Shard, target: Path, metadata: Mapping[str, str], orders: Mapping[str, Tensor]
) -> int:
    """Write ``shard`` again with new ``metadata``, and tensors in new ``orders`` of their rows.

    Returns:
        The bytes of all tensors, which are in memory at once.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _open(shard.path) as file:
        tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in shard.shapes}
    for name in orders.keys() & tensors.keys():
        tensors[name] = layouts.take(tensors[name], orders[name])
    try:
        save_file(tensors, target, dict(metadata) or None)
    except SafetensorError as error:
        raise OSError(f"convert: cannot write {shard.path.name}: {error}") from error
    _set_mode(target, shard.path.stat().st_mode)
    return sum(tensor.nbytes for tensor in tensors.values())


def read_config(folder: Path) -> Config:
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


def other_files(
    source: Path, converted: Collection[Path], name: str | None = None
) -> tuple[list[Path], list[str]]:
    """The other files and folders to copy, and the names of weights that are left out.

    Each folder comes before its content. Folders whose names begin with a dot are ignored, and
    links to folders are refused: they may lead out of ``source``, or round. The folder of a model
    on the hub, by its ``name``, may also have files of earlier downloads.
    """
    if name is not None:
        files = [Path(file) for file in ("", "config.json", _INDEX)]
        return [path for path in files if (source / path).exists()], []
    found, left_out = [], []
    for folder, inner, names in os.walk(source, onerror=_raise):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        relative = Path(folder).relative_to(source)
        for path in (source / relative / name for name in inner):
            if path.is_symlink():
                _refuse_link(path, "a folder")
        found.append(relative)
        for path in (relative / name for name in sorted(names)):
            if path.suffix.lower() not in _WEIGHTS:
                found.append(path)
            elif source / path not in converted:
                left_out.append(str(path))
    return found, left_out


def _raise(error: OSError) -> None:
    raise error


def copy(source: Path, name: Path, target: Path) -> None:
    """Copy a file, or a folder without its content, from a folder to another, with its mode.

    A link must lead to a file of the folder, or in the hub's cache to a blob. Any other may lead to
    what the author of the folder wants to see in the result, such as a key of the user.
    """
    old, new = source / name, target / name
    if old.is_dir():
        new.mkdir()
        # Without write permission, it could be neither filled nor removed.
        _set_mode(new, old.stat().st_mode | 0o700)
        return
    if old.is_symlink():
        # Path.resolve raises RuntimeError for a link to itself.
        file = Path(os.path.realpath(old))
        if not any(root in file.parents for root in _roots(source.resolve())):
            _refuse_link(old, str(file))
        old = file
    with _open_regular(old) as content, open(new, "xb") as copied:
        shutil.copyfileobj(content, copied)
        mode = os.fstat(content.fileno()).st_mode
    _set_mode(new, mode)


def _roots(folder: Path) -> Iterator[Path]:
    """Where files of ``folder`` may be."""
    yield folder
    for snapshots in folder.parents:
        # The hub's cache: CACHE/models--org--name/snapshots/COMMIT.
        model = snapshots.parent
        if snapshots.name == "snapshots" and model.name.startswith("models--"):
            yield model / "blobs"
            # Files that several models have.
            yield model.parent / "blobs"


def _refuse_link(path: Path, leads_to: str) -> NoReturn:
    hint = "Put a copy in its place, or remove it."
    _fail(f"{path} must be a link to a file of its folder, or no link", leads_to, hint)


def _set_mode(path: Path, mode: int) -> None:
    # Some file systems have no modes.
    with contextlib.suppress(PermissionError):
        os.chmod(path, mode & 0o777)


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
        # The file may be read-only; the folder is not.
        path.unlink()
        path.write_bytes(json.dumps(config, indent=2).encode() + b"\n")
        _set_mode(path, mode)
    return native
