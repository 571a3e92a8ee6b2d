import pytest
import torch

import oracles
from posenc.interop.checkpoints.layouts import Heads, permute

KINDS = ["q", "q_gated", "k", "qkv", "qkv_grouped", "qkv_codegen", "kv_a"]
FORMS = [
    pytest.param(Heads(4, 8), id="all-channels"),
    pytest.param(Heads(8, 6, num_kv_heads=2), id="grouped-queries"),
    pytest.param(Heads(4, 8, num_kv_heads=1, rotary_dim=4), id="multi-query-partial"),
    pytest.param(Heads(4, 10, rotary_dim=6, last=True, latent=5), id="latent-last"),
]
DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]


def rows_of(kind, heads):
    """How many rows a projection has, and which are queries and keys, by the models' own code.

    Each entry is the view and the pick that the model's own forward does on its output.
    """
    h, hk, d = heads.num_heads, heads.kv_heads, heads.head_dim
    group = h // hk
    rows = {"q": h * d, "q_gated": 2 * h * d, "k": hk * d, "kv_a": heads.latent + heads.rotated}
    every = torch.arange(rows.get(kind, (h + 2 * hk) * d))
    q = k = None
    if kind == "q":
        q = every.view(h, d)
    elif kind == "q_gated":
        q = every.view(h, 2 * d)[:, :d]
    elif kind == "k":
        k = every.view(hk, d)
    elif kind == "qkv":
        q, k, _ = every.split((h * d, hk * d, hk * d))
    elif kind == "qkv_grouped":
        grouped = every.view(hk, group + 2, d)
        q, k = grouped[:, :group], grouped[:, group]
    elif kind == "qkv_codegen":
        q, _, k = every.view(4, -1).chunk(3, dim=1)
    else:
        return len(every), None, every[heads.latent :].view(1, -1)
    q, k = (None if part is None else part.reshape(-1, d) for part in (q, k))
    return len(every), q, k


def rotate(x, heads, layout):
    """Rotation by complex multiplication of the channels that rotate."""
    x = x[None]
    angles = torch.randn(
        x.shape[2],
        heads.rotated // 2,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(3),
    )
    still = x.shape[-1] - heads.rotated if heads.last else 0
    rotated = oracles.rotate(
        x[..., still:], angles.cos(), angles.sin(), interleaved=layout == "interleaved"
    )
    return torch.cat((x[..., :still], rotated), dim=-1)[0]


@pytest.mark.parametrize("to", ["half", "interleaved"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", FORMS)
def test_rotated_heads_keep_their_products(kind, heads, to):
    """q·k of any two heads is the same after rotation in the new layout, for every kind."""
    if kind == "qkv_codegen" and heads.kv_heads != heads.num_heads:
        heads = Heads(heads.num_heads, heads.head_dim, rotary_dim=heads.rotary_dim)
    was = "half" if to == "interleaved" else "interleaved"
    rows, q_rows, k_rows = rows_of(kind, heads)
    weight = torch.randn(rows, 7, dtype=torch.float64)
    hidden = torch.randn(7, 5, dtype=torch.float64)

    moved = permute(weight, kind, heads, to=to)

    for part in (q_rows, k_rows):
        if part is not None:
            old = rotate((weight @ hidden)[part].mT, heads, was)
            new = rotate((moved @ hidden)[part].mT, heads, to)
            products = torch.einsum("htd,gsd->hgts", old, old)
            torch.testing.assert_close(torch.einsum("htd,gsd->hgts", new, new), products)
    others = torch.ones(rows, dtype=torch.bool)
    for part in (q_rows, k_rows):
        if part is not None:
            others[part.flatten()] = False
    assert torch.equal(moved[others], weight[others]), "values, gates and latents stay"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back_is_the_same_bits_in_every_dtype(dtype):
    """Rows move as bits, so that NaN payloads and dtypes without arithmetic survive."""
    heads = Heads(4, 8, num_kv_heads=2, rotary_dim=6)
    raw = torch.randint(0, 256, (32, 16), dtype=torch.uint8)
    weight = raw.bool() if dtype == torch.bool else raw.view(dtype)
    there = permute(weight, "q", heads, to="interleaved")
    back = permute(there, "q", heads, to="half")
    assert there.dtype == dtype
    assert not torch.equal(there.view(torch.uint8), weight.view(torch.uint8))
    assert torch.equal(back.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize("shape", [(8,), (32,), (16,), (4, 8)], ids=str)
def test_a_norm_moves_with_the_channels_it_scales(shape):
    heads = Heads(4, 8, num_kv_heads=2, rotary_dim=4)
    weight = torch.randn(shape)
    moved = permute(weight, "norm", heads, to="interleaved")
    expected = weight.reshape(-1, 8)[:, [0, 2, 1, 3, 4, 5, 6, 7]]
    assert torch.equal(moved, expected.reshape(shape))


def test_rows_may_lie_in_another_dimension():
    heads = Heads(2, 4)
    weight = torch.randn(3, 8)
    moved = permute(weight, "k", heads, to="half", dim=1)
    assert torch.equal(moved, permute(weight.T, "k", heads, to="half").T)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        pytest.param(lambda: Heads(4, 8, num_kv_heads=3), "a multiple of num_kv_heads=3", id="kv"),
        pytest.param(lambda: Heads(4, 8, rotary_dim=10), "at most head_dim=8", id="rotary-dim"),
        pytest.param(lambda: Heads(4, 8, rotary_dim=5), "must be even", id="odd"),
        pytest.param(
            lambda: permute(torch.ones(8), "v", Heads(1, 8), to="half"), "kind must be", id="kind"
        ),
        pytest.param(
            lambda: permute(torch.ones(8), "q", Heads(1, 8), to="x"), "to must be", id="to"
        ),
        pytest.param(
            lambda: permute(torch.ones(9), "q", Heads(1, 8), to="half"), "8 rows", id="rows"
        ),
        pytest.param(
            lambda: permute(torch.ones(9), "norm", Heads(2, 8), to="half"), "8 or 16", id="norm"
        ),
    ],
)
def test_impossible_arguments_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
