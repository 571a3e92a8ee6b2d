"""CoPE counts positions by gates."""

import math

import pytest
import torch

import oracles
import posenc
from posenc.attention.terms import _gather
from support.biases import drawn, leaves, qkv


def made(dim=8, positions=4):
    return drawn(posenc.CoPE, dim, max_pos=positions)


def exact_bias(given, q, k, scale, start, mask=None):
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
def test_attention_is_the_formula_with_its_gradients(queries):
    cope = made()
    q, k, v = qkv(4, queries, 7, kv_heads=2)
    copies, given = [x.detach().clone().requires_grad_() for x in (q, k, v)], leaves(cope)
    wanted = exact_bias(given, *copies[:2], 8**-0.5, 7 - queries)
    got = cope.bias(q, k, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)

    out, exact = cope.attention(q, k, v), oracles.attention(*copies, wanted, 8**-0.5)
    torch.testing.assert_close(out, exact, rtol=1e-11, atol=1e-11)
    weight = torch.randn(out.shape, dtype=torch.float64)
    (out * weight).sum().backward()
    (exact * weight).sum().backward()
    for x, copy in zip((q, k, v), copies, strict=True):
        torch.testing.assert_close(x.grad, copy.grad, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(
        cope.pos_emb.grad.double(), given["pos_emb"].grad, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["bool", "float", "keys"])
def test_a_hidden_key_is_not_counted(kind, monkeypatch):
    """The authors' gates are those of the masked scores."""
    monkeypatch.setattr("posenc.attention.rows.SCORES", 2 * 2 * 4 * 9)
    monkeypatch.setattr("posenc.attention.rows.KEPT", 0)
    cope, (q, k, v) = made(), (x.detach() for x in qkv(4, 5, 9, kv_heads=2))
    seen = torch.rand(*q.shape[:2], 5, 9, generator=torch.Generator().manual_seed(2)) < 0.6
    if kind == "keys":
        seen = seen[:1, :1, :1].index_fill(3, torch.arange(4), True)
    else:
        seen = seen | torch.eye(9, dtype=torch.bool)[-5:]
    mask = torch.where(seen, torch.randn(seen.shape).double(), -math.inf)
    mask = mask if kind == "float" else seen.double().log()
    given, whole = leaves(cope), mask.expand(*q.shape[:3], 9)
    wanted = exact_bias(given, q, k, 8**-0.5, 4, whole) + whole
    exact = oracles.attention(q, k, v, wanted, 8**-0.5)
    got = cope.attention(q, k, v, attn_mask=mask if kind == "float" else seen)
    torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)
    mask = mask if kind == "float" else seen
    matrix = cope.bias(q, k, attn_mask=mask, dtype=torch.float64)
    torch.testing.assert_close(matrix, wanted, rtol=1e-11, atol=1e-11)


def test_pieces_are_put_together_and_rows_are_found_by_their_offsets(monkeypatch):
    cope, (q, k, v) = made(), (x.detach() for x in qkv(2, 5, 9))
    whole = cope.attention(q, k, v)
    monkeypatch.setattr("posenc.attention.rows.SCORES", 2 * 2 * 9 * 2)
    torch.testing.assert_close(cope.attention(q, k, v), whole, rtol=1e-12, atol=1e-12)
    got = cope.attention(q, k, v, query_offset=torch.tensor([1, 3]))
    for b, start in enumerate((1, 3)):
        one = [x[b : b + 1] for x in (q, k, v)]
        alone = cope.attention(*one, query_offset=start)
        torch.testing.assert_close(got[b : b + 1], alone, rtol=1e-12, atol=1e-12)


def test_documents_count_alone():
    cope, (q, k, v) = made(), (x.detach() for x in qkv(2, 7, 7))
    got = cope.attention(q, k, v, document_ids=torch.tensor([0] * 3 + [1] * 4))
    parts = [
        cope.attention(*(x[:, :, part] for x in (q, k, v))) for part in (slice(3), slice(3, 7))
    ]
    torch.testing.assert_close(got, torch.cat(parts, 2), rtol=1e-11, atol=1e-11)


def test_bfloat16_is_computed_in_float32():
    cope = made().bfloat16()
    assert cope.pos_emb.dtype == torch.bfloat16
    q, k, v = (x.detach() for x in qkv(2, 20, 20, dtype=torch.bfloat16))
    got, wanted = cope.attention(q, k, v), cope.attention(*(x.double() for x in (q, k, v)))
    bound = (2**-9 + 2**-16) * v.abs().max()
    assert ((got.double() - wanted).abs() <= bound).all()


def test_another_width_is_refused():
    q, k, v = torch.randn(3, 1, 2, 5, 6).unbind()
    with pytest.raises(ValueError, match="CoPE: head_dim must be 8, got 6"):
        made().attention(q, k, v)
    with pytest.raises(ValueError, match="CoPE: max_pos must be at least 1"):
        posenc.CoPE(8, max_pos=0)


def test_the_gather_of_devices_is_gather():
    x = torch.randn(2, 3, 4, 5, requires_grad=True)
    index = torch.randint(5, (2, 3, 4, 7))
    got, wanted = _gather(x, index), x.gather(-1, index)
    assert torch.equal(got, wanted)
    g = torch.randint(9, got.shape).float()
    assert torch.equal(*(torch.autograd.grad(y, x, g)[0] for y in (got, wanted)))
