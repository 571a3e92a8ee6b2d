"""What of a checkpoint moves, what it says of itself afterwards, and what is refused."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from posenc.interop.checkpoints import Heads, convert, convert_state, permute
from support import hf_models as models
from support.checkpoints import SIZES, save_layers

HEADS = Heads(4, 8, num_kv_heads=2)


@pytest.fixture
def saved(tmp_path):
    return save_layers(tmp_path / "old.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8)) for name in a
    )


def test_a_sharded_folder_keeps_its_shards_and_other_files(tmp_path):
    model = models.build("Llama", models.GQA)
    old, new = tmp_path / "old", tmp_path / "new"
    model.save_pretrained(old, max_shard_size="40KB")
    (old / "tokenizer").mkdir()
    (old / "tokenizer" / "merges.txt").write_text("a b")
    (old / "pytorch_model.bin").write_bytes(b"old layout")
    shards = sorted(path.name for path in old.glob("*.safetensors"))
    assert len(shards) > 2

    report = convert(old, new, to="interleaved")

    assert sorted(path.name for path in new.glob("*.safetensors")) == shards
    assert (new / "tokenizer" / "merges.txt").read_text() == "a b"
    assert report.left_out == ("pytorch_model.bin",)
    assert not (new / "pytorch_model.bin").exists()
    for shard in shards:
        with safe_open(new / shard, "pt") as file:
            assert file.metadata() == {"format": "pt", "posenc.rope_layout": "interleaved"}
    config = json.loads((old / "config.json").read_text())
    state = convert_state(model.state_dict(), to="interleaved", config=config)
    assert same(models.load("Llama", new).state_dict(), state)


def test_only_the_text_tower_moves(tmp_path):
    """A vision tower may have heads of the same shape, and rotates in its own way."""
    parts = {"q_proj.weight": torch.randn(32, 16), "k_proj.weight": torch.randn(16, 16)}
    names = ["model.language_model.layers.0.self_attn.", "model.visual.blocks.0.attn."]
    save_file({a + b: t.clone() for a in names for b, t in parts.items()}, tmp_path / "a")
    text = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"text_config": {**text, "hidden_size": 32}, "vision_config": {}}
    report = convert(tmp_path / "a", tmp_path / "b", to="interleaved", config=config)
    assert sorted(report.moved) == [names[0] + "k_proj.weight", names[0] + "q_proj.weight"]


def test_only_the_second_factor_of_an_adapter_moves(tmp_path):
    """Even where the first has as many rows as the projection."""
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{stem}.lora_A.weight": torch.randn(32, 16),
        f"{stem}.lora_B.weight": torch.randn(32, 32),
        f"{stem}.lora_magnitude_vector": torch.randn(32),
    }
    folder = tmp_path / "old"
    folder.mkdir()
    save_file(adapter, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text("{}")

    convert(folder, tmp_path / "new", to="interleaved", **SIZES)

    found = load_file(tmp_path / "new" / "adapter_model.safetensors")
    moved = {"q_proj.lora_B.weight", "q_proj.lora_magnitude_vector"}
    for name, tensor in adapter.items():
        moves = any(name.endswith(end) for end in moved)
        expected = permute(tensor, "q", HEADS, to="interleaved") if moves else tensor
        assert torch.equal(found[name], expected), name
    assert (tmp_path / "new" / "adapter_config.json").exists()


def test_rows_of_four_bit_numbers_move(tmp_path):
    """torch computes nothing with this dtype."""
    rows = torch.randint(256, (16, 8), dtype=torch.uint8)
    name = "layers.0.attn.k_proj.weight"
    save_file({name: rows.view(torch.float4_e2m1fn_x2)}, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", to="half", **SIZES)
    found = load_file(tmp_path / "b")[name]
    assert found.dtype == torch.float4_e2m1fn_x2
    assert torch.equal(found.view(torch.uint8), permute(rows, "k", HEADS, to="half"))


def test_quantised_rows_move_with_their_scales(tmp_path):
    stem = "layers.0.attn"
    tensors = {
        f"{stem}.q_proj.weight": torch.randint(-128, 128, (32, 16), dtype=torch.int8),
        f"{stem}.q_proj.weight_scale": torch.rand(32, 1),
        f"{stem}.k_proj.weight": torch.randn(16, 16).to(torch.float8_e4m3fn),
        f"{stem}.k_proj.weight_scale": torch.tensor(0.5),
        f"{stem}.k_proj.input_scale": torch.rand(16),
    }
    save_file(tensors, tmp_path / "a")
    report = convert(tmp_path / "a", tmp_path / "b", to="half", **SIZES)
    found = load_file(tmp_path / "b")
    assert len(report.moved) == 3
    for name, kind in ((f"{stem}.q_proj.weight", "q"), (f"{stem}.q_proj.weight_scale", "q")):
        assert torch.equal(found[name], permute(tensors[name], kind, HEADS, to="half"))
    key = f"{stem}.k_proj.weight"
    assert same({key: found[key]}, {key: permute(tensors[key], "k", HEADS, to="half")})
    for name in (f"{stem}.k_proj.weight_scale", f"{stem}.k_proj.input_scale"):
        assert torch.equal(found[name], tensors[name])


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        pytest.param("weight_scale_inv", torch.ones(1, 2), id="fp8-blocks"),
        pytest.param("qweight", torch.ones(2, 32, dtype=torch.int32), id="gptq"),
        pytest.param("weight.absmax", torch.ones(8), id="4-bit-statistics"),
        pytest.param("weight", torch.ones(256, 1, dtype=torch.uint8), id="4-bit-packed"),
        pytest.param("weight_zero_point", torch.ones(4, 1, dtype=torch.int32), id="packed-zeros"),
    ],
)
def test_blocks_that_rows_cannot_leave_are_refused(part, tensor, tmp_path):
    name = f"layers.0.attn.q_proj.{part}"
    save_file({name: tensor}, tmp_path / "a")
    with pytest.raises(ValueError, match="quantised in blocks"):
        convert(tmp_path / "a", tmp_path / "b", to="half", **SIZES)
    assert os.listdir(tmp_path) == ["a"]


def test_a_converted_file_is_marked_and_not_converted_twice(saved, tmp_path):
    new = tmp_path / "new.safetensors"
    convert(saved, new, to="interleaved", **SIZES)
    with safe_open(new, "pt") as file:
        noted = {"posenc.rope_layout": "interleaved"}
        assert file.metadata() == {"format": "pt", "who": "größer"} | noted
    with pytest.raises(ValueError, match="must be in the other layout, half"):
        convert(new, tmp_path / "twice", to="interleaved", **SIZES)
    with pytest.raises(ValueError, match="must agree"):
        convert(new, tmp_path / "twice", to="interleaved", layout="half", **SIZES)
    convert(new, tmp_path / "back", to="half", **SIZES)
    assert same(load_file(tmp_path / "back"), load_file(saved))


@pytest.mark.parametrize(
    ("config", "arguments", "words"),
    [
        pytest.param({}, {}, "num_attention_heads", id="no-sizes"),
        pytest.param({"model_type": "mine"}, SIZES, "unknown family 'mine'", id="family"),
        pytest.param({"model_type": "cohere"}, SIZES, "other layout, half", id="already"),
        pytest.param({}, {**SIZES, "head_dim": 4}, "must have 8 rows", id="shape"),
        pytest.param({"attention_k_eq_v": True}, SIZES, "values must not be the keys", id="values"),
        pytest.param({}, {**SIZES, "layout": "x"}, "layout must be", id="layout"),
    ],
)
def test_impossible_arguments_are_refused_and_leave_nothing(
    config, arguments, words, saved, tmp_path
):
    arguments = {"to": "interleaved", **arguments}
    with pytest.raises(ValueError, match=words):
        convert(saved, tmp_path / "new", config=config, **arguments)
    assert os.listdir(tmp_path) == [saved.name]


@pytest.mark.parametrize(
    "names",
    [["layers.0.mlp.up.weight"], ["layers.0.attn.q_norm.weight", "layers.0.attn.strange.weight"]],
    ids=["nothing", "a-norm-alone"],
)
def test_a_checkpoint_of_which_nothing_is_recognised_is_an_error(names, tmp_path):
    save_file({name: torch.randn(8) for name in names}, tmp_path / "a")
    with pytest.raises(ValueError, match="projection"):
        convert(tmp_path / "a", tmp_path / "b", to="interleaved", **SIZES)
