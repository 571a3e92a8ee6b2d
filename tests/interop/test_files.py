"""What a conversion makes of the folder around its weights, and of what it is told."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc.interop.checkpoints import convert, convert_state

LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


@pytest.fixture
def small(tmp_path):
    """A folder with one layer's projections and a config."""
    folder = tmp_path / "old"
    folder.mkdir()
    stem = "model.layers.0.self_attn"
    state = {f"{stem}.{name}.weight": torch.randn(32, 32) for name in ("q_proj", "k_proj")}
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_everything_but_weights_goes_along(small, tmp_path):
    (small / "tokenizer").mkdir()
    (small / "tokenizer" / "vocab.txt").write_text("v")
    (small / "vocab.txt").symlink_to("tokenizer/vocab.txt")
    (small / "onnx").mkdir()
    (small / ".git").mkdir()
    (small / ".git" / "HEAD").write_text("h")
    (small / ".gitattributes").write_text("a")
    others = ["a.SAFETENSORS", "b.bin", "c.ot", "d.npz", "onnx/e.onnx", "onnx/e.onnx_data"]
    for name in others:
        (small / name).write_bytes(b"w")
    report = convert(small, tmp_path / "new", to="interleaved")
    assert sorted(report.left_out) == others
    files = [p for p in (tmp_path / "new").rglob("*") if p.is_file()]
    names = {str(p.relative_to(tmp_path / "new")) for p in files}
    copied = {".gitattributes", "config.json", "tokenizer/vocab.txt", "vocab.txt"}
    assert names == copied | {"model.safetensors"}
    assert not any(path.is_symlink() for path in (tmp_path / "new").rglob("*"))


def test_a_link_is_written_as_the_file_it_leads_to(small, tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    convert(small, link, to="interleaved", overwrite=True)
    assert link.is_symlink()
    assert (tmp_path / "real" / "model.safetensors").is_file()
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    convert(small, tmp_path / "dangling", to="interleaved")
    assert (tmp_path / "later" / "model.safetensors").is_file()


LINKS = {
    "a-file-outside": "../secret",
    "a-device": "/dev/null",
    "what-a-process-is": "/proc/self/environ",
    "nothing": "../nothing",
    "a-folder": "tokenizer",
    "the-folder-above": "..",
}


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "tokenizer/notes.txt"])
@pytest.mark.parametrize("leads_to", LINKS.values(), ids=LINKS)
def test_a_link_out_of_the_folder_or_to_a_folder_is_not_copied(small, tmp_path, name, leads_to):
    """Who publishes the result would publish what the link leads to."""
    (tmp_path / "secret").write_text("{}")
    (small / "tokenizer").mkdir()
    (small / name).unlink(missing_ok=True)
    (small / name).symlink_to(os.path.join(*[".."] * name.count("/"), leads_to))
    with pytest.raises(
        ValueError, match=f"convert: {small / name} must be a link to a file of its"
    ):
        convert(small, tmp_path / "new", to="interleaved", config=LLAMA)
    assert sorted(os.listdir(tmp_path)) == ["old", "secret"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no named pipes among its files")
@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", "model.safetensors", "model.safetensors.index.json"]
)
def test_a_pipe_is_refused_instead_of_waited_for(small, tmp_path, name):
    (small / name).unlink(missing_ok=True)
    os.mkfifo(small / name)
    with pytest.raises(
        (OSError, ValueError), match=f"convert: .*{name}.* a folder, a pipe or a device"
    ):
        convert(small, tmp_path / "new", to="interleaved")
    with pytest.raises(FileNotFoundError, match=f"source must be .*, got {small / name}"):
        convert(small / name, tmp_path / "new", to="interleaved")
    assert os.listdir(tmp_path) == ["old"]


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="only Linux has it")
def test_weights_that_are_a_file_of_proc_are_an_error_with_their_name(small, tmp_path):
    """It is a regular file, which safetensors cannot map."""
    (small / "model.safetensors").unlink()
    (small / "model.safetensors").symlink_to("/proc/self/environ")
    with pytest.raises(OSError, match=r"convert: .*model\.safetensors must be a file that can be"):
        convert(small, tmp_path / "new", to="interleaved")
    assert os.listdir(tmp_path) == ["old"]


def test_files_that_are_only_copied_need_space_too(small, tmp_path, monkeypatch):
    """A sparse file takes no place where it is, and would fill the disk as a copy."""
    (small / "notes.txt").write_bytes(b"n" * 100)
    files = ("model.safetensors", "config.json")
    free = sum((small / name).stat().st_size for name in files) + 99
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(OSError, match=rf"convert: the disk of .* must have {free + 1} bytes free"):
        convert(small, tmp_path / "new", to="interleaved")
    assert os.listdir(tmp_path) == ["old"]
    (small / "notes.txt").write_bytes(b"n" * 99)
    convert(small, tmp_path / "new", to="interleaved")


def test_a_link_to_itself_is_an_error_with_its_name(small, tmp_path):
    (small / "notes.txt").symlink_to("notes.txt")
    with pytest.raises(OSError, match=r"notes\.txt must be a file that can be read, got Too many"):
        convert(small, tmp_path / "new", to="interleaved")


def test_weights_may_be_links_to_other_folders(small, tmp_path):
    """They are read as numbers, so nothing else can get into the result."""
    os.rename(small / "model.safetensors", tmp_path / "weights")
    (small / "model.safetensors").symlink_to("../weights")
    convert(small, tmp_path / "new", to="interleaved")
    moved = convert_state(load_file(tmp_path / "weights"), to="interleaved", config=LLAMA)
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], moved[name]) for name in moved)


@pytest.mark.parametrize("subfolder", ["", "text_encoder"])
def test_a_snapshot_of_the_hub_s_cache_is_converted_with_its_other_files(
    small, tmp_path, subfolder
):
    """All of its files are links to blobs, which may be links to blobs of several models."""
    cache = tmp_path / "hub"
    model = cache / "models--org--name"
    snapshot = model / "snapshots" / "0123abc" / subfolder
    for folder in (snapshot, model / "blobs", cache / "blobs" / "fe", cache / "models--b--c"):
        folder.mkdir(parents=True)
    blobs = os.path.relpath(model / "blobs", snapshot)
    (small / "tokenizer.json").write_text("t")
    for path in small.iterdir():
        os.rename(path, model / "blobs" / path.name.upper())
        (snapshot / path.name).symlink_to(f"{blobs}/{path.name.upper()}")
    (cache / "blobs" / "fe" / "fedc").write_text("m")
    (model / "blobs" / "MERGES").symlink_to("../../blobs/fe/fedc")
    (snapshot / "merges.txt").symlink_to(f"{blobs}/MERGES")
    convert(snapshot, tmp_path / "new", to="interleaved")
    new = tmp_path / "new"
    copied = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(new)) == copied
    assert not any(path.is_symlink() for path in new.iterdir())
    assert [(new / name).read_text() for name in ("merges.txt", "tokenizer.json")] == ["m", "t"]

    (cache / "models--b--c" / "key").write_text("k")
    (snapshot / "notes.txt").symlink_to(f"{blobs}/../../models--b--c/key")
    with pytest.raises(ValueError, match=r"notes\.txt must be a link to a file of its folder"):
        convert(snapshot, tmp_path / "third", to="interleaved")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"rope_parameters": "x"}, "rope_parameters must be a dict"),
        ({"num_attention_heads": 4.0}, "num_attention_heads must be an int"),
        ({"model_type": "gpt2"}, r"must be rotary, got model_type='gpt2'.*\n.*as they are"),
        ({"num_key_value_heads": 3}, "multiple of num_kv_heads=3"),
    ],
)
def test_bad_configs_are_named(small, tmp_path, config, text):
    with pytest.raises((TypeError, ValueError), match=text):
        convert(small, tmp_path / "new", to="interleaved", config={**LLAMA, **config})
    assert not (tmp_path / "new").exists()


def test_bad_arguments_are_named(small, tmp_path):
    for bad in ({"num_heads": 0}, {"rotary_dim": 0}, {"fused": "bogus"}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"):
            convert(small, tmp_path / "new", to="interleaved", **bad)
    torch.save({}, tmp_path / "a.bin")
    pointer = tmp_path / "b.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for path in (tmp_path / "a.bin", pointer):
        with pytest.raises(ValueError, match=f"{path} must be a whole safetensors file"):
            convert(path, tmp_path / "new", to="interleaved", config=LLAMA)
    index = {"weight_map": {"a": ["x"]}}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="must name files of its own folder"):
        convert(small, tmp_path / "new", to="interleaved")


def test_a_fused_weight_of_an_unknown_family_needs_its_layout_named():
    """Rows of values would move."""
    state = {"model.layers.0.self_attn.query_key_value.weight": torch.randn(96, 32)}
    config = {"model_type": "unheard_of", "hidden_size": 32, "num_attention_heads": 4}
    with pytest.raises(ValueError, match="fused must be given"):
        convert_state(state, to="interleaved", config=config)
    convert_state(state, to="interleaved", config=config, fused="qkv_grouped")


def test_weights_with_original_names_need_the_layout_named(small, tmp_path):
    """Mistral's files lie beside a config whose family rotates in halves, and theirs do not."""
    released = {f"layers.0.attention.{name}.weight": torch.randn(32, 32) for name in ("wq", "wk")}
    save_file(released, small / "consolidated.safetensors")
    source, target = small / "consolidated.safetensors", tmp_path / "new.safetensors"
    for to in ("half", "interleaved"):
        with pytest.raises(ValueError, match=r"layout of the source must be given.*got wq and wk"):
            convert(source, target, to=to)
    assert not target.exists()
    convert(source, target, to="half", layout="interleaved")
    moved = convert_state(released, to="half", config=LLAMA)
    assert all(torch.equal(load_file(target)[name], moved[name]) for name in released)


def test_layers_that_look_ahead_move_with_the_text():
    text = {**LLAMA, "model_type": "qwen3_5_text", "head_dim": 8, "rotary_dim": 8}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    stems = ("mtp.layers.0", "model.language_model.layers.0", "model.visual.blocks.0")
    state = {f"{stem}.self_attn.k_proj.weight": torch.randn(32, 32) for stem in stems}
    moved = convert_state(state, to="interleaved", config=config)
    assert [not torch.equal(moved[name], state[name]) for name in state] == [True, True, False]


def test_only_a_checkpoint_is_overwritten(small, tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "one.tex").write_text("x")
    (tmp_path / "papers" / "config.json").write_text("{}")
    with pytest.raises(
        FileExistsError, match="must be a checkpoint, because everything in it is deleted"
    ):
        convert(small, tmp_path / "papers", to="interleaved", overwrite=True)
    assert (tmp_path / "papers" / "one.tex").read_text() == "x"


def test_an_adapter_finds_the_config_of_its_base_on_this_machine(small, tmp_path, monkeypatch):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    save_file({name: torch.randn(32, 4)}, adapter / "adapter_model.safetensors")
    said = adapter / "adapter_config.json"
    monkeypatch.chdir(tmp_path)
    for number, base in enumerate((str(small), "old")):
        said.write_text(json.dumps({"base_model_name_or_path": base}))
        report = convert(adapter, tmp_path / f"new-{number}", to="interleaved")
        assert report.family == "llama"
        assert report.moved == (name,)
    for base in ("meta-llama/Llama-3.2-1B", None, 3, "", "a\0b", "a" * 9999):
        said.write_text(json.dumps({"base_model_name_or_path": base}))
        with pytest.raises(ValueError, match=r"num_attention_heads.*\n.*--config"):
            convert(adapter, tmp_path / "none", to="interleaved")


def test_a_file_that_cannot_be_read_is_not_left_out_in_silence(small, tmp_path):
    if os.name == "nt" or os.geteuid() == 0:
        pytest.skip("everything can be read")
    (small / "closed").mkdir(mode=0)
    with pytest.raises(PermissionError):
        convert(small, tmp_path / "new", to="interleaved")
    assert os.listdir(tmp_path) == ["old"]
