"""Attention with a bias against its definition, and tensors as users have them."""

import itertools

import pytest
import torch

from posenc import FIRE, ALiBi, GridBias
from posenc.attention import (
    DistanceTable,
    RowBias,
    RunningSum,
    Slopes,
    alibi_attention,
    biased_attention,
    biased_attention_with_lse,
    relative_bias,
    relative_score_mod,
    relative_terms,
)
from posenc.functional import alibi_bias, alibi_slopes, biased
from posenc.interop.ring import ring_attention
from posenc.ops.attention import rows as by_rows
from posenc.ops.op import Op
from support.attention import HEADS, STEEP, WIDTH, qkv, written_down

B, COLUMNS, ZERO = 2, 37, 7
KINDS = ("none", "slopes", "table", "sums")
BACKENDS = ("chunked", "dense")
# Queries and keys, where the queries are among the keys, whether there are documents and padding.
PLACES = [
    ((140, 140), "end", False),
    ((140, 140), "end", True),
    ((3, 17), "middle", True),
    ((3, 17), "each", False),
    ((1, 300), "each", True),
]
# What a user writes, and the keys before and after.
WINDOWS = {
    "all": (None, (10**6, 10**6)),
    "own": (1, (0, 0)),
    "20": (20, (19, 19)),
    "pair": ((5, 2), (5, 2)),
    "left": ((9, -1), (9, 10**6)),
}


def numbers_of(kind, keys):
    if kind == "sums":
        # Neither falling nor rising, and far apart: pruned all the same.
        return torch.randn(B, HEADS, keys, dtype=torch.float64).cumsum(-1) * 3
    shapes = {"slopes": (B, HEADS), "table": (HEADS, COLUMNS), "rows": (HEADS, COLUMNS)}
    return torch.rand(shapes[kind], dtype=torch.float64) if kind in shapes else None


def bias_of(kind, values):
    if kind == "rows":
        columns = torch.arange(values.shape[1])

        def rows(own, index):
            # By sums over all columns: the gradient of indexing may depend on the order of threads.
            column = (own[..., None] - index + ZERO).clamp(0, values.shape[1] - 1)
            return torch.einsum("bnkr,hr->bhnk", (column[..., None] == columns).to(values), values)

        return RowBias(rows)
    makers = {"slopes": Slopes, "sums": RunningSum, "table": lambda x: DistanceTable(x, ZERO)}
    return makers[kind](values) if kind in makers else None


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("kind", [*KINDS, "rows"])
def test_outputs_and_gradients_are_those_of_the_definition(kind, causal, monkeypatch):
    """float64, where pruning leaves out less than 2^-55, wherever the queries are.

    Constant numbers take SDPA's backward pass, and the padded queries see no key. Each kind meets
    each window at one place, and another kind meets it at another.
    """
    monkeypatch.setattr(by_rows, "SCORES", 2**12)
    first = [*KINDS, "rows"].index(kind) + 2 * causal
    ways = [(None, True), (None, False), ("dense", True)]
    for (n, where), (backend, learned) in itertools.product(enumerate(PLACES), ways):
        if kind == "rows" and backend:
            continue
        (queries, keys), place, packed = where
        given, sides = [*WINDOWS.values()][(first + n) % len(WINDOWS)]
        torch.manual_seed(0)
        q, k = qkv(queries, keys, groups=2, grad=True)[:2]
        v = torch.randn_like(k).requires_grad_()
        values, most = numbers_of(kind, keys), keys - queries
        if values is not None:
            values.requires_grad_(learned)
        offset = {"end": None, "middle": most // 2, "each": torch.tensor([0, most])}[place]
        ids = (torch.arange(keys) // max(2, keys // 3)).expand(B, -1) - 1 if packed else None
        how = {"query_offset": offset, "document_ids": ids, "window": given, "backend": backend}
        got = biased_attention_with_lse(q, k, v, bias_of(kind, values), causal=causal, **how)

        start = torch.as_tensor(most if offset is None else offset).reshape(-1, 1)
        own = (start + torch.arange(queries)).expand(B, -1)
        named = "table" if kind == "rows" else kind
        how = {"own": own, "scale": WIDTH**-0.5, "zero": ZERO, "causal": causal}
        wanted = written_down(q, k, v, values, named, **how, documents=ids, window=sides)
        inputs = [x for x in (q, k, v, values) if x is not None and x.requires_grad]
        above = [torch.randn_like(x) * (learned or n == 0) for n, x in enumerate(got)]
        grads = zip(*(torch.autograd.grad(x, inputs, above) for x in (got, wanted)), strict=True)
        for a, b in (*zip(got, wanted, strict=True), *grads):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_owes_the_rounding_of_its_scores(kind):
    """A running sum of thousands, too: its differences are taken before they are rounded."""
    xs, values = qkv(300, 300), numbers_of(kind, 300)
    if kind == "sums":
        values = values + 5000
    wanted = biased_attention(*xs, bias_of(kind, values), causal=True, backend="dense")
    fixed = values.float() if kind in ("slopes", "table") else values
    got = biased_attention(*(x.float() for x in xs), bias_of(kind, fixed), causal=True)
    # Scores that count are below 32 in size: they are off by 2^-19 and a weight by 2^-18 of it.
    assert (got - wanted).abs().max() <= 2**-17 * xs[2].abs().max()


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_dense_takes_masks_and_functions_too(sign):
    """A backend that is named never falls back: here all scores are in one tensor."""
    xs = qkv(9, 12)
    bias = RowBias(lambda own, index: sign * (own[:, None, :, None] - index).double())
    mask, sizes = torch.rand(9, 12) < 0.8, []

    def watched(own, index):
        sizes.append((own.shape[1], index.shape[0]))
        return bias.rows(own, index)

    got = biased_attention(
        *xs, RowBias(watched), causal=True, attn_mask=mask, window=3, backend="dense"
    )
    assert sizes == [(9, 12)]
    torch.testing.assert_close(
        got, biased_attention(*xs, bias, causal=True, attn_mask=mask, window=3)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gates_get_gradients_that_rounding_does_not_add_up(dtype):
    """A gate adds those of all later sums; together they are zero, for c + 1 is as good as c."""
    xs = [x.to(dtype) for x in qkv(600, 600)]
    sums = numbers_of("sums", 600)
    above = torch.randn(2, HEADS, 600, 8).to(dtype), torch.randn(2, HEADS, 600)

    def gradient(tensors, backend):
        values = sums.clone().requires_grad_()
        results = biased_attention_with_lse(
            *tensors, RunningSum(values), causal=True, backend=backend
        )
        seeds = [g.to(x.dtype) for g, x in zip(above, results, strict=True)]
        return torch.autograd.grad(results, values, seeds)[0]

    got, wanted = gradient(xs, "chunked"), gradient([x.double() for x in xs], "dense")
    assert (got.sum(-1).abs() <= 2**-16 * got.abs().sum(-1)).all()
    of_gates = [x.flip(-1).cumsum(-1) for x in (got, wanted)]
    error = (of_gates[0] - of_gates[1]).norm()
    assert error <= 4 * torch.finfo(dtype).eps * of_gates[1].norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gives_the_same_bits_twice(kind):
    xs = [x.detach().requires_grad_() for x in qkv(150, 150, groups=2, dtype=torch.float32)]
    values = numbers_of(kind, 150)
    inputs = xs if values is None else [*xs, values.requires_grad_()]

    def step():
        out = biased_attention(*xs, bias_of(kind, values), causal=True)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    assert all(map(torch.equal, step(), step()))


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


@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_keys_may_lie_in_memory_with_their_channels_first(which):
    """SDPA's kernel for CPUs takes rows as dense, whatever their strides are."""
    given = qkv(70, 70)
    given[2] = torch.randn_like(given[1])
    given[which] = given[which].mT.contiguous().mT
    exact = [x.clone().requires_grad_() for x in given]
    given = [x.requires_grad_() for x in given]
    wanted, _ = written_down(*exact, None, "none", own=torch.arange(70).expand(2, -1), scale=0.5)

    out, _ = biased_attention_with_lse(*given, causal=True, scale=0.5)

    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), given)
    for grad, true in zip(grads, torch.autograd.grad(wanted.square().sum(), exact), strict=True):
        torch.testing.assert_close(grad, true, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "symmetric"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_of_minus_infinity_hides_keys(backend, causal):
    """Here all but the own key and that before: the first query of the second head sees none."""
    q, k, v = (x[:, :2].detach().requires_grad_() for x in qkv(9, 9))
    table = torch.tensor([[0.5, 1.0, -torch.inf], [-torch.inf, 1.0, -torch.inf]]).double()
    bias = DistanceTable(torch.cat((torch.full((2, 1), -torch.inf), table), 1), 1)
    own = torch.arange(9).expand(2, -1)
    wanted, sums = written_down(q, k, v, bias.values, "table", own=own, scale=0.5, zero=1)
    wanted = wanted.index_fill(2, torch.tensor(0), 0.0)
    wanted[:, 0, 0] = v[:, 0, 0]

    out, lse = biased_attention_with_lse(q, k, v, bias, scale=0.5, causal=causal, backend=backend)

    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, sums, rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(out.sum(), (q, k, v)):
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["slopes", "sums"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_in_halves_is_not_rounded_again(backend, kind):
    """A slope of 1/64 is a bfloat16, and its product with 301 is none: 0.4 % off at the far key."""
    values = torch.full((1, 2), 2**-6)
    if kind == "sums":
        values = (-(2**-6) * torch.arange(303.0)).expand(2, 2, -1)
    values = values.to(torch.bfloat16)
    q, k, v = torch.zeros(2, 2, 1, 8), torch.zeros(2, 2, 303, 8), torch.zeros(2, 2, 303, 8)
    v[:, :, 1] = 1
    own, exact = torch.tensor([[302], [302]]), [x.double() for x in (q, k, v, values)]
    wanted, _ = written_down(*exact, kind, own=own, scale=1.0)

    bias = {"slopes": Slopes, "sums": RunningSum}[kind](values)
    out, _ = biased_attention_with_lse(q, k, v, bias, causal=True, scale=1.0, backend=backend)

    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("backend", [None, "dense"])
def test_slopes_of_float32_are_multiplied_in_float64(backend):
    q, k, v = qkv(5, 4000)
    slopes = torch.tensor([0.1, 0.007, 0.03, 0.2])
    how = {"causal": True, "prune": False, "backend": backend}
    got = biased_attention(q, k, v, Slopes(slopes), **how)
    exact = biased_attention(q, k, v, Slopes(slopes.double()), **how)
    assert torch.equal(got, exact)
    matrix = relative_bias(Slopes(slopes), 5, 4000, dtype=torch.float64)
    assert torch.equal(matrix, relative_bias(Slopes(slopes.double()), 5, 4000, dtype=torch.float64))


def test_attention_runs_on_the_meta_device():
    """A model on the meta device runs to count its operations."""
    q, k, v = torch.empty(3, 1, 2, 6, 8, device="meta").unbind()
    assert (
        biased_attention(q, k, v, Slopes(torch.ones(2, device="meta")), causal=True).shape
        == q.shape
    )


@pytest.mark.parametrize("size", [(0, 0), (0, 5)], ids=str)
def test_empty_inputs_give_empty_outputs(size):
    xs = qkv(*size, grad=True)
    out = alibi_attention(*xs, alibi_slopes(HEADS), causal=True)
    assert out.shape == (2, HEADS, 0, 8)
    assert [g.shape for g in torch.autograd.grad(out.sum(), xs)] == [x.shape for x in xs]


@pytest.mark.parametrize("backend", [None, "dense"])
def test_an_empty_batch_has_empty_document_ids(backend):
    xs, ids = torch.randn(3, 0, HEADS, 5, 8).unbind(), torch.zeros(0, 5, dtype=torch.int64)
    assert (
        biased_attention(*xs, causal=True, document_ids=ids, backend=backend).shape == xs[0].shape
    )


def test_heads_without_channels_are_no_error():
    q, k = torch.randn(1, HEADS, 8, 0, requires_grad=True), torch.randn(1, HEADS, 8, 0)
    v = torch.randn(1, HEADS, 8, 3)
    for scale in (1.0, None):
        out = ALiBi(HEADS).attention(q, k, v, scale=scale)
        out.sum().backward()
        assert q.grad.shape == q.shape
        weights = alibi_bias(alibi_slopes(HEADS), 8).softmax(-1)
        torch.testing.assert_close(out, weights @ v)


@pytest.mark.parametrize(
    "function", [alibi_attention, biased_attention, biased_attention_with_lse, ring_attention]
)
def test_causal_has_no_default(function):
    """With one, a model that is moved from SDPA, whose own is False, changes without an error."""
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(TypeError, match="'causal'"):
        function(q, q, q, torch.ones(2))


def test_bad_arguments_are_refused():
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
            alibi_attention(*arguments, causal=True)
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
            alibi_attention(q, k, v, slopes, causal=True, **option)


@pytest.mark.parametrize("function", [relative_bias, relative_score_mod])
@pytest.mark.parametrize(
    ("bias", "text"),
    [
        pytest.param(Slopes(torch.ones(3, 2)), "must be for 1 or 4 sequences", id="slopes"),
        pytest.param(RunningSum(torch.ones(3, 2, 5)), "must be for 1 or 4 sequences", id="sums"),
        pytest.param(None, "bias must be Slopes", id="none"),
        pytest.param("alibi", "bias must be Slopes", id="text"),
    ],
)
def test_a_bias_for_other_sequences_is_refused(function, bias, text):
    """A score_mod would read past the end of the smaller tensor."""
    at = torch.zeros(4, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError), match=text):
        function(bias, 5, 5, query_offset=at)


FIRE_BY_ROWS = FIRE(4, threshold=2.0)
REFUSED = {
    "table": (lambda x: FIRE_BY_ROWS.table(9), "only, got the bias of FIRE."),
    "table of rows": (lambda x: GridBias(3, num_heads=4).table(9), "only, got a RowBias."),
    "table of slopes": (
        lambda x: ALiBi(2, slopes=torch.ones(3, 2)).table(9),
        "only, got slopes for each sequence",
    ),
    "score_mod": (lambda x: FIRE_BY_ROWS.score_mod(9, 9), "Sum, got the bias of FIRE."),
    "relative_score_mod": (
        lambda x: relative_score_mod(
            relative_terms(x, x, torch.abs, for_queries=torch.ones(9, 8)), 9, 9
        ),
        "Sum, got what relative_terms returns.",
    ),
    "a matrix": (
        lambda x: biased_attention(x, x, x, torch.ones(9, 9), causal=True),
        "RowBias, what relative_terms or as_bias of a module returns, or None, got a torch",
    ),
}


@pytest.mark.parametrize(("call", "text"), REFUSED.values(), ids=REFUSED)
def test_an_error_names_only_what_can_be_imported(call, text):
    """`FireNetwork`, for example, has no public name."""
    with pytest.raises((TypeError, ValueError), match=text):
        call(torch.ones(1, 4, 9, 8))


@pytest.mark.parametrize("shape", [(2, 6, 6), (1, 3, 6, 6), (3, 2, 6, 6)], ids=str)
def test_rows_of_another_shape_are_named(shape):
    """(2, 6, 6) could be two heads or two sequences."""
    q, k, v = (x[:, :2] for x in qkv(6, 6))
    with pytest.raises(ValueError, match=r"rows must return a tensor of shape \(2, 2, 6, 6\)"):
        biased_attention(q, k, v, RowBias(lambda own, index: torch.zeros(shape)), causal=True)
    with pytest.raises(ValueError, match="backend must be"):
        biased_attention(
            q, k, v, RowBias(lambda own, index: torch.zeros(())), causal=True, backend="fast"
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_autocast_to_another_dtype_changes_nothing(dtype):
    """Sequences that see different keys are joined, which autocast does in a dtype of its own."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in qkv(9, 9))
    ids = torch.tensor([[0] * 4 + [1] * 5, [0] * 9])
    how = {"causal": True, "document_ids": ids, "query_offset": torch.zeros(B, dtype=torch.int64)}
    wanted = biased_attention(q, k, v, **how)
    back = torch.autograd.grad(wanted.sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        got = biased_attention(q, k, v, **how)
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    assert all(map(torch.equal, torch.autograd.grad(got.sum(), (q, k, v)), back))


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_options_gives_native_code_the_arguments_of_any_other(kind, monkeypatch):
    """Native code would refuse others without a word, and every call on a GPU would go the long
    way."""
    seen = []
    q, k, v = qkv(9, 30, groups=2)
    bias = bias_of(kind, numbers_of(kind, 30))

    def spy(self, *arguments):
        seen.append(arguments)

    monkeypatch.setattr(Op, "try_native", spy)
    monkeypatch.setattr(Op, "__call__", lambda self, *arguments: (spy(self, *arguments), None))
    biased._try_native(q, k, v, bias, True)
    biased_attention(q, k, v, bias, causal=True)
    quick, long = seen
    assert len(quick) == len(long)
    for a, b in zip(quick, long, strict=True):
        assert type(a) is type(b)
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_subclass_of_a_bias_is_a_bias_of_its_kind(kind):
    bias = bias_of(kind, numbers_of(kind, 30))

    class Named(type(bias)):
        pass

    inputs = qkv(9, 30, groups=2)
    wanted = biased_attention(*inputs, bias, causal=True)
    assert torch.equal(biased_attention(*inputs, Named(*bias), causal=True), wanted)
