import pytest
import torch

import oracles
from posenc import ALiBi
from posenc.attention import alibi_attention
from posenc.functional import alibi_bias, alibi_slopes
from support.assertions import compilations
from support.attention import HEADS, STEEP, WIDTH, qkv

CASES = {
    "square": {"size": (200, 200)},
    "odd": {"size": (77, 77)},
    "decode": {"size": (1, 300)},
    "chunk-of-a-cache": {"size": (50, 300)},
    "symmetric": {"size": (200, 200), "causal": False},
    "gqa": {"size": (130, 130), "groups": 2},
    "mqa-symmetric": {"size": (130, 130), "groups": 4, "causal": False},
    "static-cache": {"size": (3, 300), "query_offset": torch.tensor([9, 200])},
    "packed": {"size": (200, 200), "document_ids": torch.arange(200) // 70},
    "packed-by-sequence": {
        "size": (150, 200),
        "document_ids": torch.stack((torch.arange(200) // 70, torch.arange(200) // 33)),
    },
    "packed-symmetric": {
        "size": (200, 200),
        "document_ids": torch.arange(200) // 70,
        "causal": False,
    },
    "all-keys": {"size": (200, 200), "prune": False},
    "dense": {"size": (150, 200), "groups": 2, "backend": "dense"},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_and_its_gradients_match_the_whole_matrix(case):
    """float64, where a window leaves out less than 2^-55: nothing but rounding may remain."""
    case = dict(case)
    queries, keys = case.pop("size")
    xs = qkv(queries, keys, groups=case.pop("groups", 1), grad=True)
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)

    out = alibi_attention(*xs, slopes, **case)

    places = {n: case[n] for n in ("query_offset", "document_ids", "causal") if n in case}
    bias = alibi_bias(slopes, queries, keys, dtype=torch.float64, **places)
    exact = oracles.attention(*xs, bias, WIDTH**-0.5)
    assert (out - exact).abs().max() <= 1e-13
    g = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, xs, g), torch.autograd.grad(exact, xs, g), strict=True
    ):
        assert (got - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_decoding_token_by_token_is_the_whole_pass(groups):
    q, k, v = qkv(60, 60, groups=groups)
    alibi = ALiBi(HEADS, **STEEP)
    whole = alibi.attention(q, k, v)
    for n in range(60):
        step = alibi.attention(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1])
        static = alibi.attention(q[:, :, n : n + 1], k, v, query_offset=n)
        assert (step - whole[:, :, n : n + 1]).abs().max() <= 1e-14
        assert (static - whole[:, :, n : n + 1]).abs().max() <= 1e-14


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_a_padded_sequence_is_the_sequence_alone(causal):
    """Padding on the left or on the right: its own rows are zero, and it is seen by nobody."""
    alibi, documents = ALiBi(HEADS, causal=causal, **STEEP), torch.zeros(2, 150).long()
    documents[0, :70], documents[1, 100:] = -1, -1
    q, k, v = qkv(150, 150, grad=True)
    out = alibi.attention(q, k, v, document_ids=documents)
    for b, real in enumerate((slice(70, 150), slice(0, 100))):
        alone = alibi.attention(*(x[b : b + 1, :, real] for x in (q, k, v)))
        assert (out[b : b + 1, :, real] - alone).abs().max() <= 1e-14
    padding = documents < 0
    assert out.transpose(1, 2)[padding].eq(0).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.transpose(1, 2)[padding].eq(0).all()


def test_slopes_may_differ_by_sequence():
    q, k, v = qkv(100, 100)
    slopes = torch.stack((alibi_slopes(HEADS), alibi_slopes(HEADS, **STEEP))).double()
    out = alibi_attention(q, k, v, slopes)
    for b in range(2):
        alone = alibi_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], slopes[b])
        assert (out[b : b + 1] - alone).abs().max() <= 1e-14


def test_attention_compiles_whole_and_once_for_all_offsets():
    alibi = ALiBi(HEADS, **STEEP)
    q, k, v = qkv(2, 100, dtype=torch.float32)
    calls = [(q, k, v, torch.tensor(n)) for n in (0, 40, 98)]
    step = lambda q, k, v, n: alibi.attention(q, k, v, query_offset=n)  # noqa: E731
    assert compilations(step, calls, backend="aot_eager") == 1


@pytest.mark.parametrize("size", [(0, 0), (0, 5)], ids=str)
def test_empty_inputs_give_empty_outputs(size):
    xs = qkv(*size, grad=True)
    out = alibi_attention(*xs, alibi_slopes(HEADS))
    assert out.shape == (2, HEADS, 0, 8)
    assert [g.shape for g in torch.autograd.grad(out.sum(), xs)] == [x.shape for x in xs]


def test_bad_input_is_named():
    q, k, v = qkv(5, 7)
    slopes = alibi_slopes(HEADS)
    cases = [
        (ValueError, "q must have 8 heads, one for each slope, got 4", (q, k, v, alibi_slopes(8))),
        (ValueError, "k must have at least as many keys as there are queries, 5",
         (q, k[:, :, :4], v[:, :, :4], slopes)),
        (ValueError, "the 4 heads of q must be a multiple of those of k",
         (q, k[:, :3], v[:, :3], slopes)),
        (ValueError, "v must have shape", (q, k, v[:, :, :3], slopes)),
        (ValueError, "k must have the batch and head_dim of q", (q, k[..., :3], v, slopes)),
        (ValueError, "q, k and v must have one dtype", (q, k.float(), v, slopes)),
        (ValueError, r"q must have shape \(B, heads, tokens, D\)", (q[0], k, v, slopes)),
        (TypeError, "v must be a torch.Tensor", (q, k, None, slopes)),
    ]  # fmt: skip
    for error, match, arguments in cases:
        with pytest.raises(error, match=match):
            alibi_attention(*arguments)
    options = [
        (ValueError, "scale must be finite and above zero", {"scale": 0.0}),
        (ValueError, "query_offset must be at most k_len - q_len = 2", {"query_offset": 3}),
        (TypeError, r"\n  Pass torch.tensor\(query_offset\)", {"query_offset": [1, 2]}),
        (TypeError, r"torch.where\(document_ids, 0, -1\)", {"document_ids": torch.ones(7).bool()}),
        (
            ValueError,
            "query_offset must be for 1 or 2 sequences",
            {"query_offset": torch.zeros(3).long()},
        ),
        (ValueError, "document_ids must be for 1 or 2", {"document_ids": torch.zeros(3, 7).long()}),
        (ValueError, "backend must be 'triton', 'chunked', 'dense' or None", {"backend": "fast"}),
        (TypeError, "prune must be True or False", {"prune": 1}),
    ]
    for error, match, option in options:
        with pytest.raises(error, match=match):
            alibi_attention(q, k, v, slopes, **option)


def test_heads_without_channels_are_no_error():
    q, k = torch.randn(1, HEADS, 8, 0, requires_grad=True), torch.randn(1, HEADS, 8, 0)
    v = torch.randn(1, HEADS, 8, 3)
    for scale in (1.0, None):
        out = ALiBi(HEADS).attention(q, k, v, scale=scale)
        out.sum().backward()
        assert q.grad.shape == q.shape
        weights = alibi_bias(alibi_slopes(HEADS), 8).softmax(-1)
        torch.testing.assert_close(out, weights @ v)
