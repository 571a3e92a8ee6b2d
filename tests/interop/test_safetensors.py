import json
import os

import pytest
import torch
from safetensors.torch import save_file

from posenc.interop.checkpoints import convert
from posenc.interop.checkpoints.safetensors import Source

NAME = "q_proj.weight"


def whole(header, body=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(start=0, stop=64, shape=(8, 2), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


def test_a_tensor_is_read_as_the_format_s_own_package_reads_it(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).bfloat16(),
        "c": torch.randn(2, 2).to(torch.float8_e5m2),
        "d": torch.tensor(7),
        "e": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "x")
    source = Source(tmp_path / "x")
    for name, tensor in tensors.items():
        got = source.tensor(name)
        assert got.dtype == tensor.dtype
        assert got.shape == tensor.shape
        assert torch.equal(got.double(), tensor.double())


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "does not fit", id="empty"),
        pytest.param(b"\xff" * 8 + b"{}", "does not fit", id="length"),
        pytest.param(whole(b"{nonsense"), "not JSON", id="json"),
        pytest.param(whole(b"\xff\xfe\xfd\xfc"), "not JSON", id="not-text"),
        pytest.param(whole(b"[1]"), "not a JSON object", id="list"),
        pytest.param(
            whole({NAME: entry(), "\ud800": entry(64, 64, (0,))}), "half of a surrogate", id="name"
        ),
        pytest.param(
            whole({NAME: entry(), "__metadata__": {"a": "\udfff"}}), "surrogate", id="metadata"
        ),
        pytest.param(whole({NAME: {"dtype": "F32"}}), "has no dtype, shape", id="entry"),
        pytest.param(whole({NAME: entry(shape=(-8, -2))}), "has no dtype, shape", id="negative"),
        pytest.param(whole({NAME: entry(shape=(8, 3))}), "64 bytes for shape", id="shape"),
        pytest.param(whole({NAME: entry()}, b"\0" * 63), "the file has 63", id="truncated"),
        pytest.param(whole({NAME: entry()}, b"\0" * 65), "the file has 65", id="trailing"),
        pytest.param(
            whole({NAME: entry(), "b": entry(32, 96)}, b"\0" * 96), "instead of 64", id="overlap"
        ),
        pytest.param(
            whole({NAME: entry(), "b": entry(68, 132)}, b"\0" * 132), "instead of 64", id="hole"
        ),
        pytest.param(
            whole(json.dumps({"a": entry(), "b": entry(64, 128)}).replace('"b"', '"a"').encode()),
            "starts at byte 64 instead of 0",
            id="a-name-twice",
        ),
    ],
)
def test_a_broken_file_is_a_clear_error(content, words, tmp_path):
    """And nothing is written."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must be a whole safetensors file") as error:
        convert(path, tmp_path / "y", to="half", num_heads=1, head_dim=8)
    assert words in str(error.value)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_dtype_unknown_here_passes_through(tmp_path):
    """Rows are bytes: what they mean is nobody's business."""
    body = bytes(range(64))
    (tmp_path / "x").write_bytes(whole({NAME: entry(shape=(8, 2), dtype="F32_NEW")}, body))
    convert(tmp_path / "x", tmp_path / "y", to="half", num_heads=1, head_dim=8)
    got = bytes(Source(tmp_path / "y").tensor(NAME).flatten().tolist())
    rows = [body[8 * i : 8 * i + 8] for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    assert got == b"".join(rows)
