"""Biases of vectors and their formulas: relative keys, Transformer-XL, DeBERTa and CoPE."""

import copy
import math

import pytest
import torch

import oracles
import posenc
from posenc.attention import biased_attention, relative_terms
from posenc.ops.attention import rows as by_rows
from posenc.ops.attention.biases.cope import _gather
from support.assertions import assert_exports
from support.biases import drawn, leaves, qkv

SLOW = pytest.mark.slow
H, D = 4, 6
E = H * D


def shaw(given, q, k, h, i, j):
    vectors = given["weight"] if given["weight"].dim() == 2 else given["weight"][:, h]
    return oracles.relative_keys(q, k, i, j, vectors, 3)


def xl(alternate):
    def formula(given, q, k, h, i, j):
        project = given["linear_pos.weight"].unflatten(0, (H, D))[h]
        u, v = given["pos_bias_u"][h], given["pos_bias_v"][h]
        return oracles.transformer_xl(q, k, i, j, project, u, v, alternate=alternate)

    return formula


def deberta(given, q, k, h, i, j):
    return oracles.deberta(q, k, i, j, given["pos_key"][:, h], given["pos_query"][:, h])


MODULES = {
    "RelativeKeys": (lambda: posenc.RelativeKeys(D, max_distance=3), shaw),
    "RelativeKeys-both-sides": (lambda: posenc.RelativeKeys(D, max_distance=3, causal=False), shaw),
    "RelativeKeys-asymmetric": (
        lambda: posenc.RelativeKeys(D, max_distance=3, causal=False, max_later=1),
        shaw,
    ),
    "RelativeKeys-of-heads": (lambda: posenc.RelativeKeys(D, max_distance=3, num_heads=H), shaw),
    "TransformerXL": (lambda: posenc.TransformerXLBias(H, embed_dim=E), xl(False)),
    "TransformerXL-conformer": (
        lambda: posenc.TransformerXLBias(H, embed_dim=E, causal=False, concatenated=False),
        xl(True),
    ),
    "DeBERTa": (
        lambda: posenc.DeBERTaBias(H, head_dim=D, max_relative_positions=3, causal=False),
        deberta,
    ),
    "DeBERTa-causal": (
        lambda: posenc.DeBERTaBias(H, head_dim=D, max_relative_positions=3, causal=True),
        deberta,
    ),
}
EACH = pytest.mark.parametrize(("make", "formula"), MODULES.values(), ids=MODULES)
MAKES = {name: make for name, (make, _) in MODULES.items()}
MAKES["DeBERTa-buckets"] = lambda: posenc.DeBERTaBias(
    H, head_dim=D, max_relative_positions=8, position_buckets=4, causal=False
)
EACH_MADE = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def scale_of(module):
    return (3 * D) ** -0.5 if isinstance(module, posenc.DeBERTaBias) else D**-0.5


def matrix(module, formula, given, q, k, starts):
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    hidden = torch.tensor(-math.inf, dtype=torch.float64)
    entries = [
        hidden
        if module.causal and j > start + r
        else formula(given, q[b, h, r], k[b, h, j], h, start + r, j) * scale_of(module)
        for b, start in enumerate(starts)
        for h in range(H)
        for r in range(q.shape[2])
        for j in range(k.shape[2])
    ]
    return torch.stack(entries).view(*q.shape[:3], k.shape[2])


@EACH
@pytest.mark.parametrize(
    "starts", [(0, 2), pytest.param((3, 3), marks=pytest.mark.slow)], ids=["offsets", "last"]
)
def test_attention_is_the_formula_with_its_gradients(make, formula, starts, monkeypatch):
    """Pieces of two queries, the last of one; two heads share keys."""
    monkeypatch.setattr(by_rows, "SCORES", 2 * 2 * H * 6)
    monkeypatch.setattr(by_rows, "KEPT", 0)
    module = drawn(make)
    q, k, v = qkv(H, 3, 6, D, kv_heads=2)
    copies, given = [x.detach().clone().requires_grad_() for x in (q, k, v)], leaves(module)
    wanted = matrix(module, formula, given, *copies[:2], starts)
    offset = None if starts == (3, 3) else torch.tensor(starts)
    got = module.bias(q, k, query_offset=offset, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)

    out = module.attention(q, k, v, query_offset=offset)
    exact = oracles.attention(*copies, wanted, scale_of(module))
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-12)
    weight = torch.randn(out.shape, dtype=torch.float64)
    (out * weight).sum().backward()
    (exact * weight).sum().backward()
    for x, copied in zip((q, k, v), copies, strict=True):
        torch.testing.assert_close(x.grad, copied.grad, rtol=1e-9, atol=1e-11)
    for name, p in module.named_parameters():
        # Gradients are rounded to the parameter's float32.
        bound = 2**-23 * given[name].grad.abs().max().item()
        torch.testing.assert_close(p.grad.double(), given[name].grad, rtol=1e-6, atol=bound)


@EACH_MADE
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, *(pytest.param(x, marks=pytest.mark.slow) for x in (torch.half, torch.float))],
)
def test_the_output_is_within_the_rounding_of_its_dtype(make, dtype):
    module, (q, k, v) = drawn(make), (x.detach() for x in qkv(H, 20, 20, D, dtype=dtype))
    with torch.autocast("cpu", torch.bfloat16):
        got = module.to(dtype).attention(q, k, v)
    wanted = module.attention(*(x.double() for x in (q, k, v)))
    assert got.dtype == dtype
    # The output's rounding, and that of float32 scores below 32 and of sums of 20 products.
    bound = torch.finfo(dtype).eps / 2 + 128 * 2**-24
    assert ((got - wanted).abs() <= bound * v.abs().max()).all()


@EACH_MADE
def test_gradients_repeat_bit_for_bit_and_inputs_may_be_strided(make):
    module, (q, k, v) = drawn(make), qkv(H, 17, 17, D, dtype=torch.float32)
    strided = [x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    runs = []
    for given in ((q, k, v), (q, k, v), [x.requires_grad_() for x in strided]):
        out = module.attention(*given)
        runs.append(torch.autograd.grad(out.square().sum(), [*given, *module.parameters()]))
    for one, two, three in zip(*runs, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[] if name == "TransformerXL-conformer" else SLOW)
        for name, make in MAKES.items()
    ],
)
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
def test_an_exported_program_takes_any_length(make, strict):
    traced, others = (qkv(H, n, n, D, dtype=torch.float32) for n in (9, 2))
    assert_exports(drawn(make), traced, others, strict=strict)


@EACH_MADE
@pytest.mark.slow
def test_torch_func_gives_the_same_gradient(make):
    module, (q, k, v) = drawn(make), qkv(H, 3, 4, D, batch=1)
    wanted = torch.autograd.grad(module.attention(q, k, v).sum(), q)[0]
    ours = torch.func.grad(lambda x: module.attention(x, k.detach(), v.detach()).sum())
    torch.testing.assert_close(ours(q.detach()), wanted)


@EACH_MADE
def test_empty_tensors_give_empty_results(make):
    module = drawn(make)
    for queries, keys in ((0, 0), (0, 3)):
        q, k, v = torch.randn(2, H, queries, D), *torch.randn(2, 2, H, keys, D)
        assert module.attention(q, k, v).shape == (2, H, queries, D)
        assert module.bias(q, k).shape == (2, H, queries, keys)
    empty = torch.randn(0, H, 3, D)
    assert module.attention(empty, empty, empty).shape == empty.shape
    meta = torch.empty(2, H, 5, D, device="meta")
    assert make().to("meta").attention(meta, meta, meta).shape == meta.shape


@EACH_MADE
def test_a_cast_rounds_the_parameters_and_nothing_else(make):
    module = drawn(make).bfloat16()
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    q, k, v = (x.detach() for x in qkv(H, 7, 7, D))
    assert torch.equal(module(q, k, v), copy.deepcopy(module).double()(q, k, v))


def test_distances_are_clipped_as_published():
    """clamp_len of Transformer-XL: farther keys have one sinusoid."""
    module = drawn(posenc.TransformerXLBias, H, embed_dim=E, max_distance=4)
    q = torch.randn(1, H, 1, D, dtype=torch.float64).expand(-1, -1, 9, -1)
    bias = module.bias(q, torch.zeros_like(q), dtype=torch.float64)
    far, row = bias[0, :, -1, :5], bias[0, :, -1, 4:5]
    assert torch.equal(far, row.expand_as(far))
    assert (bias[0, :, -1, 5] != row[:, 0]).all()


def test_a_function_takes_vectors_that_a_layer_projects():
    """DeBERTa shares its projections between content and position."""
    module, (q, k, v) = (
        drawn(posenc.DeBERTaBias, H, head_dim=D, max_relative_positions=3, causal=False),
        qkv(H, 6, 6, D),
    )
    scale = (3 * D) ** -0.5
    vectors = {"for_queries": module.pos_key, "for_keys": module.pos_query}
    bias = relative_terms(q, k, module.distance_rows, **vectors)
    got = biased_attention(q, k, v, bias, scale=scale, causal=False)
    assert torch.equal(got, module.attention(q, k, v))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: posenc.RelativeKeys(0, max_distance=3),
            "RelativeKeys: head_dim must be at least 1",
        ),
        (
            lambda: posenc.RelativeKeys(8, max_distance=-1),
            "RelativeKeys: max_distance must be at least 0",
        ),
        (
            lambda: posenc.RelativeKeys(8, max_distance=3, max_later=2),
            "max_later must be None if causal",
        ),
        (lambda: posenc.CoPE(8, max_pos=0), "CoPE: max_pos must be at least 1"),
        (
            lambda: posenc.TransformerXLBias(4, embed_dim=10),
            "embed_dim must be a multiple of num_heads=4",
        ),
        (
            lambda: posenc.DeBERTaBias(
                2, head_dim=8, max_relative_positions=5, position_buckets=8, causal=False
            ),
            "max_relative_positions must be above 5",
        ),
        (
            lambda: posenc.DeBERTaBias(
                2, head_dim=8, max_relative_positions=5, position_buckets=1, causal=False
            ),
            "position_buckets must be at least 2",
        ),
        (
            lambda: posenc.DeBERTaBias(
                2, head_dim=8, max_relative_positions=8, position_buckets=5, causal=False
            ),
            "position_buckets must be even",
        ),
    ],
    ids=[
        "width",
        "distance",
        "later",
        "positions",
        "heads",
        "buckets",
        "few-buckets",
        "odd-buckets",
    ],
)
def test_bad_arguments_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_tensors_of_another_layer_are_refused():
    q, k, v = torch.randn(3, 1, 2, 5, D).unbind()
    with pytest.raises(ValueError, match="RelativeKeys: head_dim must be 8, got 6"):
        posenc.RelativeKeys(8, max_distance=3).attention(q, k, v)
    with pytest.raises(ValueError, match=r"for_queries must have shape \(R, 6\) or \(R, 2, 6\)"):
        posenc.RelativeKeys(D, max_distance=3, num_heads=4).attention(q, k, v)
    with pytest.raises(ValueError, match="q must have 4 heads, one for each of the bias, got 2"):
        posenc.TransformerXLBias(H, embed_dim=E).attention(q, k, v)


@pytest.mark.parametrize("reach", [(3, 5), (-5, -3)])
def test_a_reach_is_a_pair_around_zero(reach):
    q, k = torch.randn(2, 1, 2, 4, 6).unbind()
    with pytest.raises(ValueError, match="reach must be a pair of ints"):
        relative_terms(q, k, lambda d: d.clamp(0, 3), for_queries=torch.randn(4, 6), reach=reach)


def drawn_cope():
    return drawn(posenc.CoPE, 8, max_pos=4)


def cope_bias(given, q, k, scale, start, mask=None):
    """Position by position, as the paper defines it."""
    table = given["pos_emb"][0]
    most = table.shape[1] - 1
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    matrix = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for r in range(q.shape[2]):
                i, query = start + r, q[b, h, r].double()
                scores = k[b, h].double() @ query * scale
                gates = torch.sigmoid(scores if mask is None else scores + mask[b, h, r])
                for j in range(k.shape[2]):
                    if j > i:
                        matrix.append(query.new_full((), -math.inf))
                        continue
                    at = gates[j : i + 1].sum().clamp(max=most)
                    low, high = math.floor(at.item()), math.ceil(at.item())
                    share = at - low
                    matrix.append((1 - share) * (query @ table[:, low]))
                    matrix[-1] = matrix[-1] + share * (query @ table[:, high])
    return torch.stack(matrix).view(*q.shape[:3], k.shape[2])


@pytest.mark.parametrize("queries", [7, 2, 1])
def test_cope_is_the_formula_with_its_gradients(queries):
    cope = drawn_cope()
    q, k, v = qkv(4, queries, 7, kv_heads=2)
    copies, given = [x.detach().clone().requires_grad_() for x in (q, k, v)], leaves(cope)
    wanted = cope_bias(given, *copies[:2], 8**-0.5, 7 - queries)
    got = cope.bias(q, k, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)

    out, exact = cope.attention(q, k, v), oracles.attention(*copies, wanted, 8**-0.5)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)
    weight = torch.randn(out.shape, dtype=torch.float64)
    (out * weight).sum().backward()
    (exact * weight).sum().backward()
    for x, copied in zip((q, k, v), copies, strict=True):
        torch.testing.assert_close(x.grad, copied.grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        cope.pos_emb.grad.double(), given["pos_emb"].grad, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["bool", "float", "keys"])
def test_cope_does_not_count_a_hidden_key(kind, monkeypatch):
    """The authors' gates are those of the masked scores."""
    monkeypatch.setattr("posenc.ops.attention.rows.SCORES", 2 * 2 * 4 * 9)
    monkeypatch.setattr("posenc.ops.attention.rows.KEPT", 0)
    cope, (q, k, v) = drawn_cope(), (x.detach() for x in qkv(4, 5, 9, kv_heads=2))
    seen = torch.rand(*q.shape[:2], 5, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    if kind == "keys":
        seen = seen[:1, :1, :1].index_fill(3, torch.arange(4), True)
    else:
        seen = seen | torch.eye(9, dtype=torch.bool)[-5:]
    mask = torch.where(seen, torch.randn(seen.shape).double(), -math.inf)
    mask = mask if kind == "float" else seen.double().log()
    given, whole = leaves(cope), mask.expand(*q.shape[:3], 9)
    wanted = cope_bias(given, q, k, 8**-0.5, 4, whole) + whole
    exact = oracles.attention(q, k, v, wanted, 8**-0.5)
    got = cope.attention(q, k, v, attn_mask=mask if kind == "float" else seen)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)
    mask = mask if kind == "float" else seen
    matrix = cope.bias(q, k, attn_mask=mask, dtype=torch.float64)
    torch.testing.assert_close(matrix, wanted, rtol=1e-11, atol=1e-11)


def test_pieces_of_cope_are_the_whole_also_with_offsets(monkeypatch):
    cope, (q, k, v) = drawn_cope(), (x.detach() for x in qkv(2, 5, 9))
    whole = cope.attention(q, k, v)
    monkeypatch.setattr("posenc.ops.attention.rows.SCORES", 2 * 2 * 9 * 2)
    torch.testing.assert_close(cope.attention(q, k, v), whole, rtol=1e-12, atol=1e-12)
    got = cope.attention(q, k, v, query_offset=torch.tensor([1, 3]))
    for b, start in enumerate((1, 3)):
        one = [x[b : b + 1] for x in (q, k, v)]
        alone = cope.attention(*one, query_offset=start)
        torch.testing.assert_close(got[b : b + 1], alone, rtol=1e-12, atol=1e-12)


def test_cope_counts_in_each_document():
    cope, (q, k, v) = drawn_cope(), (x.detach() for x in qkv(2, 7, 7))
    got = cope.attention(q, k, v, document_ids=torch.tensor([0] * 3 + [1] * 4))
    parts = [
        cope.attention(*(x[:, :, part] for x in (q, k, v))) for part in (slice(3), slice(3, 7))
    ]
    torch.testing.assert_close(got, torch.cat(parts, 2), rtol=1e-11, atol=1e-11)


def test_cope_of_bfloat16_is_computed_in_float32():
    cope = drawn_cope().bfloat16()
    assert cope.pos_emb.dtype == torch.bfloat16
    q, k, v = (x.detach() for x in qkv(2, 20, 20, dtype=torch.bfloat16))
    got, wanted = cope.attention(q, k, v), cope.attention(*(x.double() for x in (q, k, v)))
    bound = (2**-9 + 2**-16) * v.abs().max()
    assert ((got.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("backend", [None, "dense"])
def test_a_score_that_is_nan_makes_its_own_query_nan(backend):
    cope = posenc.CoPE(8, max_pos=4)
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    q[0, 0, 3, 0] = float("nan")
    got = cope(q, k, v, backend=backend).isnan().any(-1)
    assert got.nonzero().tolist() == [[0, 0, 3]]


def test_the_deterministic_gather_is_gather():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    index = torch.randint(5, (2, 3, 4, 7))
    got, wanted = _gather(x, index), x.gather(-1, index)
    assert torch.equal(got, wanted)
    g = torch.randint(9, got.shape).float()
    assert torch.equal(*(torch.autograd.grad(y, x, g)[0] for y in (got, wanted)))
