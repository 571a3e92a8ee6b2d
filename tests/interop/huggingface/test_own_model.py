"""A user's own transformers model with relative biases, saved and loaded again."""

import pytest
import torch

import posenc

transformers = pytest.importorskip("transformers")


class Config(transformers.PretrainedConfig):
    model_type = "own-biases"


class Model(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.factor = torch.nn.Parameter(torch.randn(3, 1, 1, 32))
        self.biases = torch.nn.ModuleList(
            [
                posenc.T5Bias(4, causal=True),
                posenc.LearnedBias(4, max_distance=16),
                posenc.KERPLE(4),
                posenc.Sandwich(4),
                posenc.FIRE(4),
                posenc.ALiBi(4),
                posenc.ALiBi(4, learned=True),
                posenc.GridBias((5, 8), num_heads=4),
                posenc.GridBias((5, 8), num_heads=4, continuous=True),
            ]
        )
        self.products = torch.nn.ModuleList(
            [
                posenc.CoPE(8, max_pos=16),
                posenc.RelativeKeys(8, max_distance=16),
                posenc.TransformerXLBias(4, embed_dim=32),
                posenc.DeBERTaBias(4, head_dim=8, max_relative_positions=16, causal=False),
                posenc.DeBERTaBias(
                    4, head_dim=8, max_relative_positions=16, position_buckets=8, causal=False
                ),
            ]
        )
        self.pope = posenc.PoPE(8, num_kv_heads=4, init="uniform")
        self.gate = posenc.ForgetGate(4, embed_dim=32)
        self.string = posenc.STRING(8, num_kv_heads=4, coordinates=1)
        self.extend = posenc.SelfExtend(posenc.RoPE(8), group=3, window=7)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x):
        q, k, v = (self.factor * x).unflatten(-1, (4, 8)).transpose(2, 3)
        outs = [bias(q, k, v) for bias in (*self.biases, *self.products)]
        outs.append(self.pope.attention(q, k, v))
        outs.append(self.gate(q, k, v, x))
        outs += [self.string(q, k)[0], self.extend(q, k, v)]
        return torch.stack(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_loaded_model_gives_the_outputs_of_the_saved_one(dtype, tmp_path):
    """from_pretrained builds on the meta device; a bias without parameters must come back too."""
    model = Model(Config())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path, dtype=dtype)
    x = torch.randn(2, 40, 32, dtype=dtype)
    assert torch.equal(loaded(x), model(x))
    for name, p in loaded.named_parameters():
        is_kept = name.startswith(("pope", "string"))
        assert p.dtype == (torch.float32 if is_kept else dtype), name


def test_a_loaded_bias_shows_its_numbers(tmp_path):
    """Tables are neither parameters nor buffers, so no loader moves them from the meta device."""
    Model(Config()).save_pretrained(tmp_path)
    loaded = Model.from_pretrained(tmp_path)
    alibi, sandwich = loaded.biases[5], loaded.biases[3]
    assert torch.equal(alibi.slopes, posenc.ALiBi(4).slopes)
    assert torch.equal(alibi.get_bias(9), posenc.ALiBi(4).get_bias(9))
    assert torch.equal(alibi.select_heads(1, 3).slopes, posenc.ALiBi(4).slopes[1:3])
    assert torch.equal(sandwich.bias(9), posenc.Sandwich(4).bias(9))


class Added(transformers.PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.features = torch.nn.ModuleList(
            [
                posenc.FourierFeatures(2, num_frequencies=4, kind=kind, seed=3)
                for kind in ("random", "learned", "nerf")
            ]
        )
        self.sums = torch.nn.ModuleList(
            [
                posenc.SinusoidalPosEmbedding(scale_input=True, scale=0.3, learn_scale=True),
                posenc.SinusoidalPE(64, 32, dropout=0.1),
                posenc.SinusoidalGrid((5, 8), embed_dim=32, prefix=1, learn_scale=True),
            ]
        )
        self.proj = torch.nn.Linear(32, 32)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, x, at):
        made = [features(at, dtype=x.dtype) for features in self.features]
        for encoding in self.sums:
            x = encoding(x)
        return torch.cat((self.proj(x), *made), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_encodings_that_are_added_come_back_too(dtype, tmp_path):
    """Random frequencies are saved, and neither they nor learned ones are rounded."""
    model = Added(Config()).eval()
    with torch.no_grad():
        for learned in (*model.parameters(), *model.buffers()):
            learned.add_(0.1 * torch.randn_like(learned))
    model.to(dtype).save_pretrained(tmp_path)
    loaded = Added.from_pretrained(tmp_path, dtype=dtype)
    x, at = torch.randn(2, 41, 32, dtype=dtype), torch.rand(2, 41, 2)
    assert torch.equal(loaded(x, at), model(x, at))
    assert {x.dtype for x in loaded.features.state_dict().values()} == {torch.float32}
    assert {p.dtype for p in loaded.sums.parameters()} == {dtype}
