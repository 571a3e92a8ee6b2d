"""Rotations of images whose ``rope_type`` is axial, against the modules of transformers."""

import importlib
import inspect
import json

import pytest
import torch
from transformers import CONFIG_MAPPING

import posenc
from posenc import RoPE, configs, rope_layers
from support.hf_models import knows_all_families

KINDS = sorted(configs.types_with("axial"))
ROWS, COLUMNS = 3, 5


def module_of(kind):
    where = CONFIG_MAPPING[kind].__module__
    return importlib.import_module(where.replace("configuration_", "modeling_"))


def its_positions(kind, config):
    """The position of each patch, row by row, as its model counts them."""
    rows, columns = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    at = torch.stack([rows.flatten(), columns.flatten()], dim=-1)
    if kind.startswith("muse"):
        return at.flip(-1) + 1
    if kind == "inkling2_vision":
        return torch.cat([torch.zeros(1, 2, dtype=torch.int64), at + 1])
    if kind.startswith("minimax"):
        return torch.cat([torch.zeros(len(at), 1, dtype=torch.int64), at], dim=-1)
    if kind.startswith(("sam", "edgetam")):
        at = at.flip(-1)
    return at * (config.window_size / COLUMNS) if kind == "sam3_vit_model" else at


def rotated(kind, config, q):
    """What the model makes of queries ``(1, H, L, D)`` of an image."""
    module = module_of(kind)
    (tables,) = (
        each
        for each in vars(module).values()
        if inspect.isclass(each) and hasattr(each, "compute_axial_rope_parameters")
    )
    cos, sin = tables(config)(q, its_positions(kind, config))
    if kind.startswith(("sam", "edgetam")):
        return q * cos + module.rotate_pairwise(q) * sin
    if kind == "pixtral":
        return module.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=0)[0]
    rotate = module.apply_rotary_pos_emb_vision
    # Tokens come before heads.
    return rotate(q.transpose(1, 2), q.transpose(1, 2), cos, sin)[0].transpose(1, 2)


@knows_all_families
@pytest.mark.parametrize("kind", KINDS)
def test_the_line_of_the_error_rotates_as_the_model_does(kind):
    """Tables of transformers are float32, of angles up to a window of 24: 1e-5 of a vector."""
    if kind not in CONFIG_MAPPING:
        pytest.skip("a model of a newer release of transformers")
    if kind == "step3p5_vision" and "lfm3" not in CONFIG_MAPPING:
        pytest.skip("transformers had rows before columns, until 5.23 corrected it")
    config = CONFIG_MAPPING[kind]()
    file = json.loads(config.to_json_string())

    with pytest.raises(ValueError, match="it rotates the patches of images") as refused:
        RoPE.from_config(file)

    line, at = str(refused.value).split("Use ")[1].removesuffix(".").split(" at ")
    names = {"posenc": posenc, "rows": ROWS, "columns": COLUMNS, "frames": 1}
    names["window_size"] = getattr(config, "window_size", None)
    rope, at = eval(line, names), eval(at, names)
    q = torch.randn(1, 2, at.shape[1], rope.head_dim, generator=torch.Generator().manual_seed(0))
    wanted = rotated(kind, config, q)
    torch.testing.assert_close(rope.rotate(q, position_ids=at), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("read", [RoPE.from_config, rope_layers])
def test_older_files_that_name_no_rotation_are_refused_with_the_same_line(read):
    """Qwen2-VL's vision_config has its own names for its sizes, and no base."""
    file = {"model_type": "qwen2_vl_vision", "embed_dim": 1280, "num_heads": 16, "depth": 32}
    with pytest.raises(ValueError, match=r"RoPE\(80, None, 10000\.0, interleaved=False"):
        read({**file, "hidden_size": 3584})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        pytest.param(
            {"model_type": "my_vit", "rope_parameters": {"rope_type": "axial"}},
            r"axial is an image's, and differs between model types; 'my_vit' is not known\."
            r"\n  Construct RoPE\(head_dim, None, base, axes=\.\.\.\) directly",
            id="axial-of-another-family",
        ),
        pytest.param(
            {"model_type": "gemma4_vision", "rope_parameters": {"rope_type": "axial"}},
            r"each half of a head is RoPE\(head_dim // 2",
            id="gemma4",
        ),
        pytest.param(
            {
                "model_type": "hunyuan_vl",
                "rope_scaling": {"type": "xdrope", "alpha": 1e3, "xdrope_section": [8] * 4},
            },
            r"rope_scaling.type says that the rotation is XD-RoPE.*\n.*scaling=NTK\(alpha\)",
            id="xd-rope",
        ),
        pytest.param(
            {
                "model_type": "interns1_pro_text",
                "rope_scaling": {"rope_type": "default", "fope_init_factor": 0.5},
            },
            "rope_scaling.fope_init_factor says that the rotation is FoPE.*\n.*the model's own",
            id="fope",
        ),
    ],
)
def test_rotations_of_other_kinds_are_refused_by_name(config, text):
    sizes = {"hidden_size": 512, "num_attention_heads": 8}
    with pytest.raises(ValueError, match=text):
        configs.read_positions({**sizes, **config})


def test_text_of_hunyuan_vl_rotates_as_the_error_says():
    """With equal coordinates, XD-RoPE is NTK's scaling by alpha."""
    from transformers.models.hunyuan_vl import modeling_hunyuan_vl as theirs

    rope = {"rope_type": "xdrope", "alpha": 1e3, "factor": 1.0, "xdrope_section": [8] * 4}
    config = CONFIG_MAPPING["hunyuan_vl_text"](head_dim=64, rope_parameters=rope)
    at = torch.arange(50)
    tables = theirs.HunYuanVLRotaryEmbedding(config)(torch.zeros(1), at.expand(4, 1, 50))
    q = torch.randn(1, 2, 50, 64, generator=torch.Generator().manual_seed(0))
    ours = RoPE(64, None, 1e4, interleaved=False, scaling=posenc.scaling.NTK(1e3))
    wanted = theirs.apply_rotary_pos_emb(q, q, *tables)[0]
    torch.testing.assert_close(ours.rotate(q), wanted, rtol=0, atol=1e-5)
