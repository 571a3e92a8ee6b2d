"""Small files that claim much, read by a process that may take a gigabyte and a minute.

As a script, with the name of an empty folder. A reader that builds what a file claims ends by the
limits; one whose cost is in proportion to the file ends long before.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import pytest
import torch

from posenc import RoPE
from posenc.interop.checkpoints import convert, convert_state

GIGABYTE = 1 << 30
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 4}


def limit() -> None:
    """A gigabyte and a minute more than until now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    room = pages * resource.getpagesize() + GIGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CPU, (int(used) + 60, int(used) + 60))


def refused(
    root: Path,
    name: str,
    config: dict,
    shape: list[int],
    nbytes: int,
    dtype: str = "F32",
    tensor: str = "model.layers.0.self_attn.q_proj.weight",
) -> None:
    """Hold that a file with this one tensor is refused, in a sentence."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, nbytes]}
    text = json.dumps({tensor: entry}).encode()
    path = root / f"{name}.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * nbytes)
    with pytest.raises(ValueError, match="convert: ") as error:
        convert(path, root / "out", to="interleaved", config=config)
    assert len(str(error.value)) < 3000, name


def main(root: Path) -> None:
    limit()
    many = {**LLAMA, "num_attention_heads": 5 * 10**8, "head_dim": 2}
    refused(root, "heads", many, [8, 2], 64)
    fused = {**many, "model_type": "gpt_neox", "head_dim": 8}
    refused(root, "fused heads", fused, [8, 2], 64, tensor="layers.0.query_key_value.weight")
    refused(root, "rows", {**LLAMA, "hidden_size": 4 * 10**7}, [4 * 10**7, 0], 0)
    refused(
        root, "rows of a new dtype", {**LLAMA, "hidden_size": 4 * 10**7}, [4 * 10**7], 8, dtype="N"
    )
    refused(root, "dimensions", LLAMA, [2**62] * 50_000, 64)
    refused(root, "digits", LLAMA, [10**4000] * 300, 64)

    count = 200_000
    layers = {str(index): {"head_dim": 64} for index in range(count)}
    types = ["full_attention"] * count
    config = {**LLAMA, "rope_theta": 1e4, "layer_types": types, "per_layer_config": layers}
    (root / "config.json").write_text(json.dumps(config))
    assert RoPE.from_config(root, layer_type="full_attention").head_dim == 64

    rope = {f"type-{index}": {"rope_theta": 1e4} for index in range(100_000)}
    state = {f"layers.{index}.q_proj.bias": torch.arange(32) for index in range(10_000)}
    convert_state(state, to="interleaved", config={**LLAMA, "rope_parameters": rope})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
