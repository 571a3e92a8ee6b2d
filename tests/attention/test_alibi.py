from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import oracles
from assertions import compilations
from posenc import ALiBi
from posenc.attention import alibi_attention, chunked, score_bound, windows
from posenc.functional import alibi_bias, alibi_slopes

HEADS, WIDTH = 4, 16
STEEP = {"bias_max": 3.0}  # windows well inside a few hundred keys


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """So that short sequences are cut, too."""
    monkeypatch.setattr(chunked, "SCORES", 2**12)
    monkeypatch.setattr(chunked, "AT_ONCE", 2**12)
    monkeypatch.setattr(chunked, "CHUNK", 32)


def qkv(queries, keys, *, groups=1, dtype=torch.float64, batch=2, grad=False):
    q = torch.randn(batch, HEADS, queries, WIDTH, dtype=dtype)
    k = torch.randn(batch, HEADS // groups, keys, WIDTH, dtype=dtype)
    v = torch.randn(batch, HEADS // groups, keys, 8, dtype=dtype)
    return [x.requires_grad_(grad) for x in (q, k, v)]


CASES = {
    "square": {"size": (200, 200)},
    "odd": {"size": (77, 77)},
    "decode": {"size": (1, 300)},
    "chunk-of-a-cache": {"size": (50, 300)},
    "symmetric": {"size": (200, 200), "causal": False},
    "gqa": {"size": (130, 130), "groups": 2},
    "mqa-symmetric": {"size": (130, 130), "groups": 4, "causal": False},
    "static-cache": {"size": (3, 300), "offset": torch.tensor([9, 200])},
    "packed": {"size": (200, 200), "documents": torch.arange(200) // 70},
    "packed-by-sequence": {
        "size": (150, 200),
        "documents": torch.stack((torch.arange(200) // 70, torch.arange(200) // 33)),
    },
    "packed-symmetric": {"size": (200, 200), "documents": torch.arange(200) // 70, "causal": False},
    "no-windows": {"size": (200, 200), "windows": False},
    "bound": {"size": (200, 200), "score_bound": 40.0},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_and_its_gradients_match_the_whole_matrix(case):
    """float64, where a window leaves out less than 2^-55: nothing but rounding may remain."""
    case = dict(case)
    queries, keys = case.pop("size")
    xs = qkv(queries, keys, groups=case.pop("groups", 1), grad=True)
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)

    out = alibi_attention(*xs, slopes, **case)

    places = {n: case[n] for n in ("offset", "documents", "causal") if n in case}
    bias = alibi_bias(slopes, queries, keys, dtype=torch.float64, **places)
    exact = oracles.attention(*xs, bias, WIDTH**-0.5)
    assert (out - exact).abs().max() <= 1e-13
    g = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, xs, g), torch.autograd.grad(exact, xs, g), strict=True
    ):
        assert (got - wanted).abs().max() <= 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_what_windows_leave_out_is_below_half_an_ulp(dtype):
    """The claim of the inequality, in float64 arithmetic with the windows of each dtype.

    The unit is the spacing at the largest value that is averaged.
    """
    from posenc.attention.windows import needed

    q, k, v = qkv(400, 400)
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)
    # Windows of this dtype: taken from its inputs, used on exact arithmetic.
    cut = [x.to(dtype) for x in (q, k, v)]
    options = {"causal": True, "windowed": True}
    _, low, _ = needed(cut[0], cut[1], slopes, 0, None, None, WIDTH**-0.5, **options)
    bias = alibi_bias(slopes, 400, dtype=torch.float64)
    exact = oracles.attention(*cut, bias, WIDTH**-0.5)
    far = torch.arange(400) < low[..., None]
    windowed = oracles.attention(*cut, bias.masked_fill(far, float("-inf")), WIDTH**-0.5)
    assert far.any()
    largest = cut[2].double().abs().amax(2, keepdim=True)
    half = oracles.ulp(largest, dtype) / 2
    assert ((exact - windowed).abs() <= half).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scores_as_adverse_as_the_bound_allows_are_still_within_it(dtype):
    """All keys that are left out point along the query, and all others against it."""
    slopes = alibi_slopes(1, bias_max=2.0, dtype=torch.float64)
    bias, key = alibi_bias(slopes, 300, dtype=torch.float64), torch.arange(300)
    q = torch.full((1, 1, 300, WIDTH), 1.5, dtype=torch.float64)

    def left_out(k):
        given = q.to(dtype), k.to(dtype), slopes, 0, None, None, 0.25
        return key < windows.needed(*given, causal=True, windowed=True)[1][0, 0, 299]

    # The own key is against the query from the start: it decides how far others can be above it.
    k = torch.where(left_out(-q), 1.0, -1.0)[:, None] * q
    far, v = left_out(k), torch.where(k[..., :1] > 0, 1.0, -1.0).double()
    assert far.any()
    # The softmax is the oracle's own: what kernels round is not the window's.
    exact = oracles.attention(q, k, v, bias, 0.25)
    near = oracles.attention(q, k, v, bias.masked_fill(far, -torch.inf), 0.25)
    # At most eps / 8 of the weight is left out, and moves from one value to the other.
    moved = (near - exact)[..., 299, :].abs().max()
    assert moved <= torch.finfo(dtype).eps / 4 + 2.0**-50


@pytest.mark.parametrize("groups", [1, 2])
def test_decoding_token_by_token_is_the_whole_pass(groups):
    q, k, v = qkv(60, 60, groups=groups)
    alibi = ALiBi(HEADS, **STEEP)
    whole = alibi.attention(q, k, v)
    for n in range(60):
        step = alibi.attention(q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1])
        static = alibi.attention(q[:, :, n : n + 1], k, v, offset=n)
        assert (step - whole[:, :, n : n + 1]).abs().max() <= 1e-14
        assert (static - whole[:, :, n : n + 1]).abs().max() <= 1e-14


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
def test_a_padded_sequence_is_the_sequence_alone(causal):
    """Padding on the left or on the right: its own rows are zero, and it is seen by nobody."""
    alibi, documents = ALiBi(HEADS, causal=causal, **STEEP), torch.zeros(2, 150).long()
    documents[0, :70], documents[1, 100:] = -1, -1
    q, k, v = qkv(150, 150, grad=True)
    out = alibi.attention(q, k, v, documents=documents)
    for b, real in enumerate((slice(70, 150), slice(0, 100))):
        alone = alibi.attention(*(x[b : b + 1, :, real] for x in (q, k, v)))
        assert (out[b : b + 1, :, real] - alone).abs().max() <= 1e-14
    padding = documents < 0
    assert out.transpose(1, 2)[padding].eq(0).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.transpose(1, 2)[padding].eq(0).all()


def test_packed_documents_are_each_alone():
    alibi, lengths = ALiBi(HEADS, **STEEP), [40, 1, 90, 69]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    q, k, v = qkv(200, 200)
    out = alibi.attention(q, k, v, documents=documents).split(lengths, 2)
    parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    for got, part in zip(out, parts, strict=True):
        assert (got - alibi.attention(*part)).abs().max() <= 1e-14


def test_a_bound_the_data_breaks_costs_the_window_and_not_the_answer():
    """Per head: the norms of the others still confirm it."""
    q, k, v = qkv(200, 200)
    q[:, 1] *= 50
    slopes = alibi_slopes(HEADS, dtype=torch.float64, **STEEP)
    exact = oracles.attention(q, k, v, alibi_bias(slopes, 200, dtype=torch.float64), WIDTH**-0.5)
    out = alibi_attention(q, k, v, slopes, score_bound=10.0)
    assert (out - exact).abs().max() <= 1e-12


def test_a_bound_that_is_the_product_of_the_norms_is_confirmed():
    """As after a norm of q and k, where it is met with equality."""
    from posenc.attention.windows import confirmed_gap

    q, k = torch.nn.functional.normalize(torch.randn(2, 1, 2, 50, 64), dim=-1).mul(8).unbind()
    gap = confirmed_gap(q, k, 0.125, torch.tensor([[8.0, 7.9]]))
    assert torch.isfinite(gap[0, 0]).all()
    assert torch.isinf(gap[0, 1]).all()


def test_score_bound_is_above_every_score():
    q, k, _ = qkv(100, 100, groups=2)
    scores = q @ k.repeat_interleave(2, 1).mT * WIDTH**-0.5
    bound = score_bound(q, k)
    assert bound.shape == (2, HEADS)
    assert (scores.abs().amax((2, 3)) <= bound).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_key_does_not_silence_the_others(value):
    """Its norm is no bound, so nothing is left out, and what never sees it is as ever."""
    q, k, v = qkv(100, 100)
    wanted = alibi_attention(q, k, v, alibi_slopes(HEADS), documents=torch.arange(100) // 50)
    k[:, :, 99] = value
    got = alibi_attention(q, k, v, alibi_slopes(HEADS), documents=torch.arange(100) // 50)
    assert torch.equal(got[:, :, :50], wanted[:, :, :50])


def test_a_slope_of_zero_is_plain_attention():
    q, k, v = qkv(150, 150)
    out = alibi_attention(q, k, v, torch.zeros(HEADS))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out - exact).abs().max() <= 1e-13


def test_slopes_may_differ_by_sequence():
    q, k, v = qkv(100, 100)
    slopes = torch.stack((alibi_slopes(HEADS), alibi_slopes(HEADS, **STEEP))).double()
    out = alibi_attention(q, k, v, slopes)
    for b in range(2):
        alone = alibi_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], slopes[b])
        assert (out[b : b + 1] - alone).abs().max() <= 1e-14


def test_it_compiles_whole_and_once_for_all_offsets():
    alibi = ALiBi(HEADS, **STEEP)
    q, k, v = qkv(2, 100, dtype=torch.float32)
    calls = [(q, k, v, torch.tensor(n)) for n in (0, 40, 98)]
    step = lambda q, k, v, n: alibi.attention(q, k, v, offset=n)  # noqa: E731
    assert compilations(step, calls, backend="aot_eager") == 1


def test_the_op_keeps_torchs_rules():
    q, k, v = qkv(40, 40, grad=True)
    at = torch.arange(40)[None]
    low, slopes = (at - 20).clamp(min=0)[None], alibi_slopes(HEADS).double()[None]
    plan = (at, torch.zeros_like(at), at, low, at[None], slopes, 0.25)
    torch.library.opcheck(chunked.attend, (q, k, v, *plan))
    *where, slopes, scale = plan
    for wrong in (
        (q, k, v, *where, slopes[..., :1], scale),
        (q, k[:, :, 1:], v, *where, slopes, scale),
        (q[:, :, 1:], k, v, *where, slopes, scale),
        (q, k, v[:1], *where, slopes, scale) if len(q) > 1 else (q[..., 1:], k, v, *plan),
    ):
        with pytest.raises(ValueError, match="alibi_chunked: q, k, v must be"):
            chunked.attend(*wrong)


@pytest.mark.parametrize("size", [(0, 0), (0, 5)], ids=str)
def test_nothing_in_nothing_out(size):
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
        (ValueError, "k must have the batch and width of q", (q, k[..., :3], v, slopes)),
        (ValueError, "q, k and v must have one dtype", (q, k.float(), v, slopes)),
        (ValueError, r"q must have shape \(B, heads, tokens, D\)", (q[0], k, v, slopes)),
        (TypeError, "v must be a torch.Tensor", (q, k, None, slopes)),
    ]  # fmt: skip
    for error, match, arguments in cases:
        with pytest.raises(error, match=match):
            alibi_attention(*arguments)
    options = [
        (ValueError, "score_bound must not be negative or NaN", {"score_bound": -1.0}),
        (ValueError, "score_bound must not be negative or NaN", {"score_bound": float("nan")}),
        (ValueError, "scale must be finite and above zero", {"scale": 0.0}),
        (ValueError, "offset must be at most k_len - q_len = 2", {"offset": 3}),
        (TypeError, r"\n  Pass torch.tensor\(offset\)", {"offset": [1, 2]}),
        (TypeError, r"torch.where\(documents, 0, -1\)", {"documents": torch.ones(7).bool()}),
        (ValueError, "offset must be for 1 or 2 sequences", {"offset": torch.zeros(3).long()}),
        (ValueError, "documents must be for 1 or 2", {"documents": torch.zeros(3, 7).long()}),
        (ValueError, "path must be 'flex', 'chunked' or None", {"path": "fast"}),
        (ValueError, "path='flex' needs CUDA", {"path": "flex"}),
        (TypeError, "windows must be True or False", {"windows": 1}),
    ]
    for error, match, option in options:
        with pytest.raises(error, match=match):
            alibi_attention(q, k, v, slopes, **option)


def test_gradients_are_there_under_a_mode():
    """Selective checkpoints and counters of operations see an op without autograd inside."""
    q, k, v = qkv(70, 70, groups=2, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wanted = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    with FlopCounterMode(display=False):
        got = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("casting", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_run_in_what_the_cpu_multiplies(dtype, casting, monkeypatch):
    seen = []

    def spy(q, *rest, **keywords):
        seen.append(q.dtype)
        return torch.nn.functional.scaled_dot_product_attention(q, *rest, **keywords)

    monkeypatch.setattr(chunked, "F", SimpleNamespace(scaled_dot_product_attention=spy))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casting):
        out = ALiBi(HEADS).attention(*qkv(70, 70, dtype=dtype))
    native = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert set(seen) == {dtype if native else torch.float32}
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rounded_once(dtype):
    """Each weight and value is exact in float32, whether or not the CPU multiplies halves."""
    q, k, v = qkv(70, 70, dtype=dtype, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    got, wanted = alibi.attention(q, k, v), alibi.attention(*wide)
    above = torch.randn_like(got)
    pairs = [(got, wanted)]
    pairs += zip(
        torch.autograd.grad(got, (q, k, v), above),
        torch.autograd.grad(wanted, wide, above.float()),
        strict=True,
    )
    # A CPU that multiplies bfloat16 rounds the weights to it as well.
    room = 4 if dtype == torch.bfloat16 else 1
    for half, exact in pairs:
        assert (half - exact).abs().max() <= room * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("at_once", [2**20, 0], ids=["at-once", "pieces"])
def test_second_derivatives(at_once, monkeypatch):
    monkeypatch.setattr(chunked, "AT_ONCE", at_once)
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [x.detach()[:, :, :5, :4].requires_grad_() for x in qkv(5, 5, groups=2, batch=1)]
    assert torch.autograd.gradgradcheck(alibi.attention, inputs)


@pytest.mark.parametrize("at_once", [2**20, 0], ids=["at-once", "pieces"])
def test_results_lie_in_memory_as_a_compiler_was_told(at_once, monkeypatch):
    """Projections give ``(B, L, H, D)`` seen as ``(B, H, L, D)``, and strides follow from less."""
    monkeypatch.setattr(chunked, "AT_ONCE", at_once)
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [torch.randn(2, 40, HEADS, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    above = torch.randn(2, HEADS, 40, 8)

    def run(function):
        out = function(*inputs)
        return out, *torch.autograd.grad(out, inputs, above)

    wanted, got = run(alibi.attention), run(torch.compile(alibi.attention, fullgraph=True))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert wanted[0].is_contiguous()
    assert all(grad.is_contiguous() for grad in wanted[1:])


def test_heads_without_channels_are_no_error():
    q, k = torch.randn(1, HEADS, 8, 0, requires_grad=True), torch.randn(1, HEADS, 8, 0)
    v = torch.randn(1, HEADS, 8, 3)
    for scale in (1.0, None):
        out = ALiBi(HEADS).attention(q, k, v, scale=scale)
        out.sum().backward()
        assert q.grad.shape == q.shape
        weights = alibi_bias(alibi_slopes(HEADS), 8).softmax(-1)
        torch.testing.assert_close(out, weights @ v)


def test_at_decode_no_norms_are_taken_of_keys_that_are_all_read(monkeypatch):
    q, k, v = torch.randn(1, 4, 1, 16), *torch.randn(2, 1, 2, 300, 16).unbind()
    wanted = alibi_attention(q, k, v, alibi_slopes(4), windows=False)
    monkeypatch.setattr(windows, "norms", None)
    assert torch.equal(alibi_attention(q, k, v, alibi_slopes(4)), wanted)
    assert torch.equal(alibi_attention(q, k, v, alibi_slopes(4), score_bound=9.0), wanted)


@pytest.mark.parametrize("batch", [1, 3])
def test_keys_are_taken_in_windows_once_there_are_many(batch, monkeypatch):
    q, k, v = torch.randn(batch, 4, 1, 16), *torch.randn(2, batch, 2, 300, 16).unbind()
    wanted = alibi_attention(q, k, v, alibi_slopes(4))
    monkeypatch.setattr(chunked, "KEYS_AT_ONCE", batch * 4 * 300 - 1)
    assert not chunked.at_once(q, k)
    assert chunked.at_once(q, k[:, :, 1:])
    torch.testing.assert_close(alibi_attention(q, k, v, alibi_slopes(4)), wanted)
