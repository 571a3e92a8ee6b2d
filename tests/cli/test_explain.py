import json
import math

import pytest
import torch
from typer.testing import CliRunner

import posenc
from posenc.cli import application
from support.configs import (
    BLOOM,
    DEBERTA,
    DEEPSEEK,
    DINOV3,
    FACTORS,
    FALCON,
    GEMMA3,
    LLAMA4,
    MODERNBERT,
    MPT,
    OPT,
    PHI3,
    QWEN_1M,
    QWEN_VL,
    SMOLLM3,
    T5,
    WHISPER,
)

TEN_TIMES = {"short_factor": [1.0] * 48, "long_factor": [10.0] * 48}
TYPO = {"head_dim": 64, "rope_scaling": {"typ": "yarn"}}
YARN = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "rope_theta": 5e5,
    "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
}
LAYERS = {
    "head_dim": 64,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")

    def go(config, *arguments):
        path = tmp_path / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        return CliRunner().invoke(application(), ["explain", str(path), *arguments])

    return go


def test_every_argument_is_shown_with_its_key(run):
    result = run(YARN)
    assert result.exit_code == 0
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
    assert "500000.0" in lines["base"]
    assert "rope_theta" in lines["base"]
    assert "hidden_size / num_attention_heads" in lines["head_dim"]
    assert "YaRN(factor=4.0, original_length=4096," in lines["scaling"]
    # Arguments that are left out take no line.
    assert "axes" not in lines


def test_json_has_values_sources_and_rates(run):
    found = json.loads(run(YARN, "--json").stdout)
    (layer,) = found["layers"]
    assert layer["layer_type"] is None
    assert layer["arguments"]["base"] == {"value": 500000.0, "from": "rope_theta"}
    # Nothing names the model, so nothing is of its code.
    silent = ("rotary_dim", "interleaved", "interleaved_out", "axes")
    assert {layer["arguments"][name]["from"] for name in silent} == {"assumed"}
    assert len(layer["inv_freq"]) == 32
    assert layer["attention_factor"] > 1


def test_the_length_decides_where_a_rule_asks_for_it(run):
    config = {
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
    }
    short, long = (
        json.loads(run(config, "--json", "--seq-len", n).stdout)["layers"][0]["inv_freq"]
        for n in ("2048", "8192")
    )
    assert long[-1] < short[-1]


@pytest.mark.parametrize(
    ("config", "arguments", "text"),
    [
        ("{", (), "is not JSON"),
        (TYPO, (), "rope_scaling.typ must be a known key"),
        (LAYERS, ("--layer-type", "none"), "layer_type must be one of"),
        (YARN, ("--seq-len", "0"), "seq-len"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, config, arguments, text):
    result = run(config, *arguments)
    assert result.exit_code == 2
    assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not result.stdout


@pytest.mark.parametrize(
    ("config", "words"),
    [
        pytest.param(
            BLOOM, ["ALiBi", "16 n_head", "2048 seq_length", "maximal length any"], id="bloom"
        ),
        pytest.param(OPT, ["LearnedPosEmbedding(2050, 768), and call it with offset=2"], id="opt"),
        pytest.param(WHISPER, ["sinusoidal, encoder", "learned table, decoder"], id="whisper"),
        pytest.param({"model_type": "mamba"}, ["no positional encoding"], id="mamba"),
        pytest.param(
            DEBERTA,
            [
                "DeBERTaBias",
                "head_dim 64 hidden_size / num_attention_heads",
                "position_buckets 256 position_buckets",
                "max_relative_positions 512 max_position_embeddings",
                "build posenc.DeBERTaBias.from_config(config)",
                "maximal length any",
            ],
            id="deberta-v3",
        ),
        pytest.param(
            {"model_type": "wav2vec2-conformer", "hidden_size": 1024, "num_attention_heads": 16},
            [
                "embed_dim 1024 hidden_size",
                "concatenated False the model's code",
                "build posenc.TransformerXLBias.from_config(config)",
            ],
            id="wav2vec2-conformer",
        ),
        pytest.param(
            {"model_type": "wav2vec2-bert", "hidden_size": 1024, "num_attention_heads": 16},
            [
                "max_distance 64 model_type",
                "max_later 8 model_type",
                "build posenc.RelativeKeys.from_config(config)",
            ],
            id="w2v-bert",
        ),
        pytest.param(
            {**MPT, "attn_config": {"alibi": False, "rope": True}},
            ["rotary embeddings of its own code", "posenc has no module for it"],
            id="mpt-rope",
        ),
        pytest.param(
            SMOLLM3,
            [
                "layers without RoPE 3, 7, ..., 35 (9 layers)",
                "length 65536",
                "posenc.rope_layers(config)",
            ],
            id="smollm3",
        ),
        pytest.param(
            LLAMA4,
            [
                "layers without RoPE 3, 7, ..., 47 (12 layers) text_config.model_type",
                "chunk 8192 tokens: a query sees keys of its own text_config.model_type",
                "query scale 1 + 0.1 * log(1 + (p + 1) // 8192) at position p, in layers without",
                "chunked_attention the other layers",
                "trained length 8192 text_config.original_max_position_embeddings",
                "maximal length 10485760 text_config.max_position_embeddings",
            ],
            id="llama4",
        ),
        pytest.param(
            GEMMA3,
            [
                "sliding window 512 keys: a query's own, and 511 before it sliding_window",
                "full_attention 5, 11, ..., 23 (4 layers) sliding_window_pattern",
                "sliding_attention the other layers sliding_window_pattern",
            ],
            id="gemma3",
        ),
        pytest.param(
            MODERNBERT,
            [
                "sliding window 129 keys: a query's own, and 64 on each side local_attention",
                "full_attention 0, 3, ..., 21 (8 layers) global_attn_every_n_layers",
            ],
            id="modernbert",
        ),
        pytest.param(
            QWEN_1M,
            [
                "RoPE with Dual Chunk Attention",
                "chunk 253952 dual_chunk_attention_config",
                "window 8193 dual_chunk_attention_config",
                "posenc.DualChunk(posenc.RoPE.from_config(config), chunk=253952, window=8193)",
                "trained length 262144 dual_chunk_attention_config.original_max_position",
                "maximal length 1010000 max_position_embeddings",
                "query scale max(1, 1 + 0.1 * log(n / 262144)) for n tokens",
            ],
            id="qwen2.5-1m",
        ),
        pytest.param(
            DINOV3,
            [
                "axes Axial(coordinates=2",
                "position_ids math.tau * posenc.positions.normalized_grid(rows, columns, prefix=5)",
            ],
            id="dinov3",
        ),
        # 2 pi 10000^(94/96) times the last factor: 1 in short sequences, then 10.
        pytest.param(
            {**PHI3, "rope_scaling": {**PHI3["rope_scaling"], **TEN_TIMES}},
            [
                "wavelengths 6.283 to 51,862 tokens at the trained length",
                "wavelengths 62.83 to 518,617 tokens at 131072 tokens",
            ],
            id="longrope",
        ),
        pytest.param(
            {"head_dim": 64},
            ["trained length not in the config", "interleaved False assumed"],
            id="nothing",
        ),
        # Of a model that posenc has never seen, the key says the base alone.
        pytest.param(
            {**YARN, "model_type": "my_llm"},
            ["base 500000.0 rope_theta", "interleaved False assumed"],
            id="unknown",
        ),
        pytest.param(
            {**YARN, "model_type": "llama"}, ["interleaved False the model's code"], id="llama"
        ),
        # Older files give the part of images no type.
        pytest.param(
            {
                **QWEN_VL,
                "model_type": "qwen2_vl",
                "vision_config": {"embed_dim": 1280, "num_heads": 16, "hidden_size": 3584},
                "audio_config": {"model_type": "my_ears", "hidden_size": 64},
            },
            [
                "vision_config RoPE: posenc.RoPE(80, None, 10000.0, interleaved=False, "
                "axes=posenc.axes.Axial(2)) at posenc.positions.grid(rows, columns) vision_config",
                "audio_config not shown: model_type 'my_ears' is not known",
            ],
            id="qwen2-vl",
        ),
        pytest.param(
            {"text_config": YARN, "vision_config": {"model_type": "idefics3_vision"}},
            ["vision_config a learned vector for each patch of an image: Use LearnedPosEmbedding."],
            id="idefics3",
        ),
        # transformers 4 had it in BERT and its relatives, and transformers 5 ignores the key.
        pytest.param(
            {"model_type": "bert", "position_embedding_type": "relative_key_query"},
            ["Shaw's vectors for each distance, and no table", "attention.relative_terms"],
            id="bert",
        ),
        pytest.param(
            {"text_config": YARN, "vision_config": {"model_type": "gemma4_vision"}},
            ["vision_config not shown: model_type 'gemma4_vision' is not read as a RoPE: each"],
            id="gemma4",
        ),
        pytest.param(
            {"model_type": "pixtral", "head_dim": 64},
            [
                "axes Axial(coordinates=2, rates=shared) model_type",
                "build posenc.RoPE(64, None, 10000.0, interleaved=False, "
                "axes=posenc.axes.Axial(2, rates='shared'))",
                "position_ids posenc.positions.grid(rows, columns)",
            ],
            id="pixtral",
        ),
    ],
)
def test_the_encoding_the_lengths_and_the_layers_are_printed(run, config, words):
    result = run(config)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    for each in words:
        assert each in text


def test_json_has_the_same_facts(run):
    found = json.loads(run(LLAMA4, "--json").stdout)
    assert found["without_rope"]["value"] == list(range(3, 48, 4))
    assert found["trained_length"]["value"] == 8192
    assert found["max_length"]["value"] == 10485760
    assert json.loads(run(DEEPSEEK, "--json").stdout)["softmax_scale"]["value"] == pytest.approx(
        (0.1 * math.log(40) + 1) ** 2 / math.sqrt(192)
    )
    (alibi,) = json.loads(run(BLOOM, "--json").stdout)["layers"]
    assert alibi["kind"] == "ALiBi"
    assert alibi["slopes"] == posenc.ALiBi(16).slopes.tolist()
    assert alibi["python"] == "posenc.ALiBi.from_model('bloom', num_heads=16, bias_max=8.0)"
    (long,) = json.loads(run(PHI3, "--json").stdout)["layers"]
    assert repr(tuple(FACTORS)) in long["arguments"]["scaling"]["value"]


def executed(run, config):
    names = {}
    exec(run(config, "--python").stdout, names)
    return names["positions"]


@pytest.mark.parametrize(
    "config",
    [YARN, SMOLLM3, LLAMA4, DEEPSEEK, PHI3, QWEN_VL],
    ids=["yarn", "smollm3", "llama4", "deepseek", "longrope", "mrope"],
)
def test_the_python_that_is_printed_builds_the_rotation(run, config):
    made, wanted = executed(run, config), posenc.RoPE.from_config(config)
    for name in ("head_dim", "max_seq_len", "base", "rotary_dim", "scaling", "axes"):
        assert getattr(made, name) == getattr(wanted, name)
    assert (made.interleaved, made.interleaved_out) == (wanted.interleaved, wanted.interleaved_out)
    assert torch.equal(made.scaled_inv_freq(50_000), wanted.scaled_inv_freq(50_000))


def test_the_python_of_qwen_1m_counts_as_qwen_does(run):
    """As its authors do in vLLM: keys modulo the chunk, queries at most ``chunk_size`` ahead."""
    size, local = 16, 4
    dual = {"chunk_size": size, "local_size": local, "original_max_position_embeddings": 16}
    found = executed(run, {**QWEN_1M, "dual_chunk_attention_config": dual}).distances(60)
    chunk = size - local
    for i in range(60):
        for j in range(i + 1):
            ahead = {0: i % chunk, 1: min(i % chunk + chunk, size)}
            assert found[i, j] == ahead.get(i // chunk - j // chunk, size) - j % chunk


def test_the_python_of_layer_types_is_a_dict(run):
    made = executed(run, LAYERS)
    assert list(made) == ["full_attention", "sliding_attention"]
    for name, rope in made.items():
        wanted = posenc.RoPE.from_config(LAYERS, layer_type=name)
        assert (rope.base, rope.scaling) == (wanted.base, wanted.scaling)


@pytest.mark.parametrize("config", [BLOOM, MPT, FALCON], ids=["bloom", "mpt", "falcon"])
def test_the_python_that_is_printed_builds_the_biases(run, config):
    made = executed(run, config)
    assert torch.equal(made.slopes, posenc.ALiBi.from_config(config).slopes)


def test_the_python_that_is_printed_builds_vectors(run):
    assert executed(run, DEBERTA).pos_key.shape == (512, 12, 64)
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    made = executed(run, {"model_type": "wav2vec2-bert", **sizes})
    assert (made.max_distance, made.max_later, made.causal) == (64, 8, False)
    made = executed(run, {"model_type": "wav2vec2-conformer", **sizes})
    assert (made.embed_dim, made.causal, made.concatenated) == (64, False, False)


def test_the_python_that_is_printed_builds_tables(run):
    assert executed(run, T5).weight.shape == (32, 8)
    assert executed(run, OPT).pos_emb.weight.shape == (2050, 768)
    made = executed(run, WHISPER)
    assert made["encoder"].shape == (1500, 384)
    assert made["decoder"].pos_emb.weight.shape == (448, 384)


def test_python_for_an_encoding_that_no_key_describes_is_refused(run):
    result = run({"model_type": "funnel"}, "--python")
    assert result.exit_code == 2
    assert "posenc has no module for it" in result.stderr
    result = run(BLOOM, "--python", "--json")
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


def test_long_factors_are_shortened(run):
    text = run(PHI3).stdout
    assert "48 in all" in text
    assert str(FACTORS[20]) not in text


HOSTILE = "\x1b]0;gone\x07[link=https://example.com]x[/link]\u202e"


def test_control_characters_of_a_file_do_not_reach_the_terminal(run, monkeypatch):
    """Neither a control code nor markup, in a cell, in a title, or in Python."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = {"head_dim": 64, "rope_parameters": {HOSTILE: rope, "b": {**rope, "rope_theta": 2e4}}}
    for arguments in ((), ("--python",), ("--json",), ("--layer-type", HOSTILE)):
        result = run(config, *arguments)
        assert result.exit_code == 0
        assert result.stdout.replace("\n", "").isprintable()
    # In a title, as a source, and in what builds it.
    monkeypatch.setenv("COLUMNS", "400")
    shown = r"\x1b]0;gone\x07[link=https://example.com]x[/link]\u202e"
    assert run(config).stdout.count(shown) == 3
    assert list(executed(run, config)) == [HOSTILE, "b"]


def test_a_name_in_a_file_is_never_python(run):
    name = "x': 0}; raise SystemExit('run'); y = {'"
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = {"head_dim": 64, "rope_parameters": {name: rope, "b": {**rope, "rope_theta": 2e4}}}
    assert list(executed(run, config)) == [name, "b"]


def test_a_rotation_without_a_turn_has_no_wavelengths(run):
    rope = {"rope_type": "proportional", "partial_rotary_factor": 0.01, "rope_theta": 1e4}
    result = run({"head_dim": 64, "rope_parameters": rope})
    assert result.exit_code == 0
    assert "wavelengths" not in result.stdout
