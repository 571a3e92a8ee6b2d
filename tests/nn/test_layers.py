"""The rotations of all layers, against models of transformers built small."""

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel

from posenc import RoPE, rope_layers
from support.hf_models import knows_all_families

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"intermediate_size": 32, "num_hidden_layers": 8, "vocab_size": 50, "pad_token_id": 0}
SLOW = pytest.mark.slow
FEW = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 32}


@knows_all_families
@pytest.mark.parametrize(
    ("kind", "given", "still"),
    [
        pytest.param("llama4_text", FEW, [3, 7], id="llama4"),
        pytest.param("smollm3", {}, [3, 7], id="smollm3", marks=SLOW),
        pytest.param(
            "smollm3", {"no_rope_layer_interval": 3}, [2, 5], id="smollm3-interval", marks=SLOW
        ),
        pytest.param("cohere2", {"sliding_window": 4}, [3, 7], id="cohere2"),
        pytest.param("exaone4", {"sliding_window": 4}, [3, 7], id="exaone4", marks=SLOW),
        pytest.param("gemma3_text", {}, [], id="gemma3", marks=SLOW),
        pytest.param("llama", {}, [], id="llama", marks=SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_each_layer_rotates_as_that_of_the_model(kind, given, still, monkeypatch):
    """A layer's score of one query and key, as the model's own attention computes it."""
    config = CONFIG_MAPPING[kind](**{**SMALL, **given})
    config._attn_implementation = "posenc-test"
    seen = []

    def attend(module, query, key, value, mask, **_):
        seen.append((query, key))
        return torch.zeros_like(query).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("posenc-test", attend)
    torch.manual_seed(0)
    model = AutoModel.from_config(config).double().eval()
    at = torch.tensor([[0, 1, 5, 900]])
    ids = torch.tensor([[5, 5, 5, 5]])
    ropes = rope_layers(config)
    assert [i for i, rope in enumerate(ropes) if rope is None] == still
    assert len(ropes) == 8
    with torch.no_grad():
        model(input_ids=ids, position_ids=at, use_cache=False)
    for rope, (q, k) in zip(ropes, seen, strict=True):
        # One token at four positions: its first is not rotated.
        start_q, start_k = (x[:, :, :1].expand(-1, -1, 4, -1) for x in (q, k))
        wanted = (start_q, start_k)
        if rope is not None:
            wanted = rope(start_q, start_k, position_ids=at[0])
            assert not torch.allclose(q, start_q)
        # transformers rounds its angles to float32: 900 radians to 3e-5.
        for a, b in zip((q, k), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4 * float(b.abs().max()))


def test_layers_that_rotate_alike_share_a_module_and_keywords_override():
    config = {"model_type": "smollm3", "head_dim": 16, "num_hidden_layers": 8}
    ropes = rope_layers(config, max_seq_len=128, base=100.0)
    assert len({id(rope) for rope in ropes}) == 2
    assert isinstance(ropes[0], RoPE)
    assert (ropes[0].max_seq_len, ropes[0].base) == (128, 100.0)


def test_an_incomplete_config_is_refused():
    with pytest.raises(ValueError, match="num_hidden_layers or n_layer"):
        rope_layers({"model_type": "llama", "head_dim": 16})
    types = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}
    config = {"model_type": "my_own", "head_dim": 16, "num_hidden_layers": 2}
    config["rope_parameters"] = types
    with pytest.raises(ValueError, match=r"layer_types must name the 2 layers"):
        rope_layers(config)
    for other in ("chunked_attention", None, ["full_attention"]):
        with pytest.raises(ValueError, match="layer_types must be among"):
            rope_layers({**config, "layer_types": ["full_attention", other]})
    with pytest.raises(ValueError, match="num_hidden_layers must be at most"):
        rope_layers({**config, "num_hidden_layers": 10**9})


def test_each_layer_may_have_a_base_of_its_own():
    """Granite with sliding windows; zero is for a layer that does not rotate."""
    bases = [10_000.0, 0.0, 500_000.0, 10_000.0]
    given = {**SMALL, "num_hidden_layers": 4, "layer_rope_theta": bases}
    config = CONFIG_MAPPING["granite_swa"](**given)
    theirs = {
        e.config.rope_parameters["rope_theta"]: e for e in AutoModel.from_config(config).rotary_embs
    }
    ropes = rope_layers(config)
    assert ropes[1] is None
    assert ropes[0] is ropes[3]
    for rope, base in zip(ropes, bases, strict=True):
        if rope is not None:
            torch.testing.assert_close(rope.scaled_inv_freq().float(), theirs[base].inv_freq)
    with pytest.raises(ValueError, match="layer_rope_theta must have one base for one RoPE"):
        RoPE.from_config(config)
    assert RoPE.from_config(config, base=100.0).base == 100.0
    with pytest.raises(ValueError, match="a number for each of the 5 layers, got 4"):
        rope_layers({**config.to_dict(), "num_hidden_layers": 5})
    config.layer_rope_theta = [7.0, 0.0, 7.0, 7.0]
    assert RoPE.from_config(config).base == 7.0
