"""Calls under transforms, compilers, exporters and modes, and derivatives that kernels lack."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from posenc import ALiBi
from posenc.attention import RowBias, RunningSum, alibi_attention, biased_attention
from posenc.functional import alibi_slopes
from support.assertions import Attention, compilations
from support.attention import HEADS, STEEP, qkv, written_down

DOCUMENTS = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1])
SLOPES = alibi_slopes(HEADS, dtype=torch.float64)
CASES = {
    "causal": {"causal": True},
    "symmetric": {"causal": False},
    "documents": {"causal": True, "document_ids": DOCUMENTS},
    "cache": {"causal": True, "query_offset": torch.tensor([0, 2])},
}


def exact(q, k, v, slopes=SLOPES, *, causal=True, document_ids=None, query_offset=None):
    """Every score by its definition."""
    start = torch.full((2,), 2) if query_offset is None else query_offset
    ids = None if document_ids is None else document_ids.expand(2, -1)
    how = {"own": start[:, None] + torch.arange(7), "scale": q.shape[-1] ** -0.5, "causal": causal}
    return written_down(q, k, v, slopes[None], "slopes", documents=ids, **how)[0]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_mode_and_torch_func_agree_with_autograd(case):
    xs, ts = qkv(7, 9, groups=2), qkv(7, 9, groups=2)
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
    q, k, v = qkv(7, 9, groups=2)
    many = torch.stack((q, -q, 2 * q))
    got = torch.func.vmap(lambda x: alibi_attention(x, k, v, SLOPES, causal=True))(many)
    torch.testing.assert_close(got, torch.stack([exact(x, k, v) for x in many]))


def test_second_derivatives():
    alibi = ALiBi(HEADS, **STEEP)
    inputs = [x.detach()[:, :, :4, :2].requires_grad_() for x in qkv(4, 4, groups=2, batch=1)]
    assert torch.autograd.gradgradcheck(alibi.attention, inputs)


def test_a_compiled_transform_reaches_the_slopes():
    xs = qkv(7, 9, groups=2)
    derive = torch.func.grad(
        lambda slopes: alibi_attention(*xs, slopes, causal=True).square().sum()
    )
    compiled = torch.compile(derive, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(SLOPES), derive(SLOPES))
    assert derive(SLOPES).all()


def test_torch_func_reaches_a_bias_by_rows():
    """torch.func refuses the hooks of a checkpoint."""
    q, k, v = (x[:, :2] for x in qkv(5, 5))

    def loss(row):
        return biased_attention(
            q, k, v, RowBias(lambda own, index: row[:, index][None, :, None]), causal=True
        ).sum()

    row = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(row), row)
    torch.testing.assert_close(torch.func.grad(loss)(row.detach()), wanted)


def test_gradients_are_there_under_a_mode():
    """Selective checkpoints and counters of operations see an op without autograd inside."""
    q, k, v = qkv(70, 70, groups=2, grad=True)
    alibi = ALiBi(HEADS, **STEEP)
    wanted = torch.autograd.grad(alibi.attention(q, k, v).sum(), (q, k, v))
    with FlopCounterMode(display=False):
        # Its tracker of modules takes no leaves in autograd.grad.
        got = torch.autograd.grad(alibi.attention(q + 0, k + 0, v + 0).sum(), (q, k, v))
    assert all(map(torch.equal, got, wanted))


def test_attention_compiles_whole_and_once_for_all_offsets():
    alibi = ALiBi(HEADS, **STEEP)
    q, k, v = qkv(2, 100, dtype=torch.float32)
    calls = [(q, k, v, torch.tensor(n)) for n in (0, 40, 98)]
    step = lambda q, k, v, n: alibi.attention(q, k, v, query_offset=n)  # noqa: E731
    assert compilations(step, calls, backend="aot_eager") == 1


def test_a_running_sum_compiles_once_for_all_lengths():
    inputs = [(*qkv(n, n, dtype=torch.float32), torch.rand(2, HEADS, n)) for n in (5, 9, 40)]

    def step(q, k, v, gates):
        return biased_attention(q, k, v, RunningSum(gates.cumsum(-1)), causal=True)

    assert compilations(step, inputs, backend="aot_eager", dynamic=True) == 1


def test_results_are_contiguous_as_the_compiler_was_told():
    """Projections give ``(B, L, H, D)`` seen as ``(B, H, L, D)``, and strides follow from less."""
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


def test_an_exported_program_holds_only_operations_of_torch():
    attend = Attention(ALiBi(4))
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=512)
    given = [torch.randn(3, 4, 6, 8) for _ in range(3)]
    open_sizes = ({0: batch, 2: length},) * 3
    program = torch.export.export(attend, tuple(given), dynamic_shapes=open_sizes)
    assert not [node for node in program.graph.nodes if "posenc" in str(node.target)]
    other = [torch.randn(5, 4, 11, 8) for _ in range(3)]
    torch.testing.assert_close(program.module()(*other), attend(*other))
