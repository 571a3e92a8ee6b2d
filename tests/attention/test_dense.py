"""Derivatives that the kernels lack."""

import pytest
import torch
from torch.autograd import forward_ad

import oracles
from posenc import ALiBi
from posenc.attention import alibi_attention
from posenc.functional import alibi_slopes
from support.assertions import Attention

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1])
SLOPES = alibi_slopes(4, dtype=torch.float64)
CASES = {
    "causal": {},
    "symmetric": {"causal": False},
    "documents": {"document_ids": DOCUMENTS},
    "cache": {"query_offset": torch.tensor([0, 2])},
}


def qkv():
    sizes = [(2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 6)]
    return [torch.randn(size, dtype=torch.float64) for size in sizes]


def exact(q, k, v, slopes=SLOPES, *, causal=True, document_ids=None, query_offset=None):
    """Every score written down."""
    start = torch.full((2,), 2) if query_offset is None else query_offset
    at, index = start[:, None, None] + torch.arange(7)[:, None], torch.arange(9)
    seen = (index <= at) if causal else torch.ones(2, 7, 9, dtype=torch.bool)
    if document_ids is not None:
        seen = seen & (document_ids == document_ids[at])
    bias = -slopes[:, None, None] * (at - index).abs()[:, None]
    bias = bias.masked_fill(~seen[:, None], float("-inf"))
    out = oracles.attention(q, k, v, bias, 8**-0.5)
    if document_ids is None:
        return out
    return out.masked_fill((document_ids[at[..., 0]] < 0)[:, None, :, None], 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_mode_and_torch_func_agree_with_autograd(case):
    xs, ts = qkv(), qkv()
    near = {"rtol": 1e-10, "atol": 1e-12}
    wanted = torch.func.jvp(lambda *x: exact(*x, **case), tuple(xs), tuple(ts))
    got = torch.func.jvp(lambda *x: alibi_attention(*x, SLOPES, **case), tuple(xs), tuple(ts))
    torch.testing.assert_close(got, wanted, **near)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(xs, ts, strict=True)]
        out = forward_ad.unpack_dual(alibi_attention(*duals, SLOPES, **case))
    torch.testing.assert_close((out.primal, out.tangent), wanted, **near)
    for derive in (torch.func.grad, torch.func.hessian):
        of = [
            derive(lambda k, f=f: f(xs[0], k, xs[2]).square().sum())(xs[1])
            for f in (
                lambda *x: alibi_attention(*x, SLOPES, **case),
                lambda *x: exact(*x, **case),
            )
        ]
        torch.testing.assert_close(*of, **near)


def test_vmap_over_queries():
    q, k, v = qkv()
    many = torch.stack((q, -q, 2 * q))
    got = torch.func.vmap(lambda x: alibi_attention(x, k, v, SLOPES))(many)
    torch.testing.assert_close(got, torch.stack([exact(x, k, v) for x in many]))


def test_slopes_can_be_learned():
    xs, grads = qkv(), []
    for attend in (alibi_attention, exact):
        slopes = SLOPES.clone().requires_grad_()
        attend(*xs, slopes).square().sum().backward()
        grads.append(slopes.grad)
    torch.testing.assert_close(*grads)
    assert not alibi_attention(*xs, SLOPES).requires_grad


def test_a_query_that_sees_nothing_has_no_nan():
    q, k, v = (x.requires_grad_() for x in qkv())
    slopes = SLOPES.clone().requires_grad_()
    out = alibi_attention(q, k, v, slopes, document_ids=torch.full((9,), -1))
    out.sum().backward()
    assert not out.any()
    assert all(not x.grad.any() for x in (q, k, v, slopes))


def test_a_compiled_transform_reaches_the_slopes():
    xs = qkv()
    derive = torch.func.grad(lambda slopes: alibi_attention(*xs, slopes).square().sum())
    compiled = torch.compile(derive, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(SLOPES), derive(SLOPES))
    assert derive(SLOPES).all()


def test_an_exported_program_holds_operations_of_torch_alone():
    attend = Attention(ALiBi(4))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=512)
    given = [torch.randn(3, 4, 6, 8) for _ in range(3)]
    open_sizes = ({0: batch, 2: length},) * 3
    program = torch.export.export(attend, tuple(given), dynamic_shapes=open_sizes)
    assert not [node for node in program.graph.nodes if "posenc" in str(node.target)]
    other = [torch.randn(5, 4, 11, 8) for _ in range(3)]
    torch.testing.assert_close(program.module()(*other), attend(*other))
