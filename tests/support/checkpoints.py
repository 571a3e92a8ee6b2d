"""Small checkpoints to convert."""

import json

import torch
from safetensors.torch import save_file

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}


def save_layers(path):
    """Two layers of ``SIZES`` in one file, with metadata."""
    tensors = {"embed.weight": torch.randn(10, 16)}
    for layer in range(2):
        tensors[f"layers.{layer}.attn.q_proj.weight"] = torch.randn(32, 16)
        tensors[f"layers.{layer}.attn.k_proj.weight"] = torch.randn(16, 16)
        tensors[f"layers.{layer}.attn.v_proj.weight"] = torch.randn(16, 16)
    save_file(tensors, path, metadata={"format": "pt", "who": "größer"})
    return path


def save_folder(folder, config):
    """A folder with the queries and keys of one layer, of one head of eight channels."""
    folder.mkdir(parents=True)
    tensors = {f"layers.0.{part}_proj.weight": torch.randn(8, 3) for part in "qk"}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
