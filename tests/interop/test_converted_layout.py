"""The layout that a conversion leaves in a config, and everybody who reads it."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from posenc import RoPE
from posenc.interop import huggingface
from posenc.interop.checkpoints import convert
from support import hf_models as models


def test_every_reader_of_a_converted_folder_knows_its_layout(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    models.build("Llama", models.GQA).save_pretrained(old)
    convert(old, new, to="interleaved")
    with pytest.raises(ValueError, match="posenc convert MODEL -o NEW --to half"):
        huggingface.patch(models.load("Llama", new))
    # The mark of the config is enough, and the two must agree.
    tensors = load_file(new / "model.safetensors")
    save_file(tensors, new / "model.safetensors")
    with pytest.raises(ValueError, match="the source must be in the other layout"):
        convert(new, tmp_path / "twice", to="interleaved")
    save_file(tensors, new / "model.safetensors", {"posenc.rope_layout": "half"})
    with pytest.raises(ValueError, match="must agree"):
        convert(new, tmp_path / "twice", to="half")
    # An adapter of the old layout beside the config of the new one.
    save_file(tensors, tmp_path / "other.safetensors")
    to = tmp_path / "moved.safetensors"
    convert(tmp_path / "other.safetensors", to, to="interleaved", layout="half", config=new)


def test_the_text_of_several_towers_is_marked_and_seen(tmp_path):
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32}
    text = LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64)
    vision = CLIPVisionConfig(**sizes, num_hidden_layers=1, image_size=8, patch_size=4)
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    )
    model.save_pretrained(tmp_path / "old")
    convert(tmp_path / "old", tmp_path / "new", to="interleaved")
    assert RoPE.from_config(tmp_path / "new").interleaved
    converted = LlavaForConditionalGeneration.from_pretrained(tmp_path / "new")
    with pytest.raises(ValueError, match="--to half"):
        huggingface.patch(converted)


@pytest.mark.parametrize("mark", ["Interleaved", ""])
@pytest.mark.parametrize("to", ["half", "interleaved"])
def test_a_mark_that_is_neither_word_is_refused_by_name(tmp_path, mark, to):
    """It would be converted twice."""
    tensors = {f"layers.0.{part}_proj.weight": torch.randn(8, 3) for part in "qk"}
    sizes = {"to": to, "num_heads": 1, "head_dim": 8}
    save_file(tensors, tmp_path / "a", {"posenc.rope_layout": mark})
    with pytest.raises(ValueError, match=r"posenc\.rope_layout of .*a must be") as error:
        convert(tmp_path / "a", tmp_path / "b", **sizes)
    assert repr(mark) in str(error.value)
    save_file(tensors, tmp_path / "a")
    with pytest.raises(ValueError, match="posenc_rope_layout must be") as error:
        convert(tmp_path / "a", tmp_path / "b", config={"posenc_rope_layout": mark}, **sizes)
    assert repr(mark) in str(error.value)
    with pytest.raises(ValueError, match="layout must be"):
        convert(tmp_path / "a", tmp_path / "b", layout=mark, **sizes)
