import json

import pytest
from typer.testing import CliRunner

from posenc.cli import application

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
def run(tmp_path):
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
    assert "YaRN(" in lines["scaling"]
    assert lines["reference:"].startswith("reference: serves every device")


def test_json_has_values_sources_and_rates(run):
    found = json.loads(run(YARN, "--json").stdout)
    (layer,) = found["layers"]
    assert layer["layer_type"] is None
    assert layer["arguments"]["base"] == {"value": 500000.0, "from": "rope_theta"}
    assert layer["arguments"]["rotary_dim"]["from"] == "default"
    assert len(layer["inv_freq"]) == 32
    assert layer["attention_factor"] > 1
    assert set(found["kernels"]) == {"c", "triton", "reference"}


def test_all_layer_types_or_the_one_that_is_named(run):
    found = json.loads(run(LAYERS, "--json").stdout)
    assert [each["layer_type"] for each in found["layers"]] == [
        "full_attention",
        "sliding_attention",
    ]
    one = json.loads(run(LAYERS, "--json", "--layer-type", "sliding_attention").stdout)
    assert [each["arguments"]["base"]["value"] for each in one["layers"]] == [1e4]


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
        ({"head_dim": 64, "rope_scaling": {"typ": "yarn"}}, (), "rope_scaling.typ must be a key"),
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


def test_help_has_an_example():
    result = CliRunner().invoke(application(), ["explain", "--help"])
    assert result.exit_code == 0
    assert "Example: posenc explain" in result.stdout
