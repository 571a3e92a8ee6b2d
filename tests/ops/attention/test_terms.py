"""Attention with a vector for each distance: its kernels, its op, and the modules that use them."""

import pytest
import torch

import posenc
from posenc.functional import biased
from posenc.functional.biased import hide_padding
from posenc.ops.attention import op
from posenc.ops.attention.biases import NetworkFields, VectorFields
from posenc.ops.attention.call import Call
from support.attention import DEVICE, close, written_down
from support.plans import planned

SLOW = pytest.mark.slow
CASES = {
    "both-sides": {"size": (70, 70)},
    "causal": {"size": (70, 70), "causal": True, "rows": 20, "zero": 0},
    "cache": {"size": (40, 100), "heads": (4, 2), "width": (24, 40), "causal": True, "rows": 33},
    "few-rows": {"size": (150, 150), "rows": 5, "zero": 2},
    "few-rows-causal": {"size": (150, 150), "rows": 5, "zero": 0, "causal": True},
    "one-row": {"size": (40, 40), "rows": 1, "zero": 0},
    "every-distance": {"size": (70, 70), "rows": 139, "zero": 69},
    "for-queries": {"size": (70, 70), "has": (True, False), "shared": True},
    "own": {"size": (70, 70), "own": True, "heads": (4, 2), "rows": 20},
    "own-causal": {"size": (70, 70), "own": True, "causal": True, "zero": 0, "window": (50, 0)},
    "for-keys": {"size": (70, 70), "has": (False, True), "heads": (4, 2)},
    "window": {"size": (100, 100), "window": (20, 5)},
    "window-causal": {"size": (100, 100), "window": (20, 0), "causal": True, "rows": 40},
    "documents": {"size": (90, 90), "documents": True},
    "offsets": {"size": (40, 120), "starts": [3, 70], "causal": True, "rows": 30, "zero": 0},
    "one-query": {"size": (1, 100), "causal": True, "rows": 30, "zero": 0},
    "few-queries": {"size": (3, 300), "heads": (4, 2), "rows": 30, "zero": 9, "starts": [30, 297]},
    "few-queries-own": {"size": (2, 300), "heads": (4, 4), "own": True, "has": (True, False)},
    "curve-one-query": {"size": (1, 300), "has": (False, False), "knots": 5, "documents": True},
    "curve": {"size": (34, 34), "has": (False, False), "knots": 5, "causal": True},
    "curve-documents": {"size": (90, 90), "has": (False, False), "knots": 3, "documents": True},
    "curve-cache": {
        "size": (40, 100),
        "heads": (4, 2),
        "has": (False, False),
        "knots": 33,
        "starts": [3, 60],
        "causal": True,
    },
    "curve-both-sides": {"size": (70, 70), "has": (False, False), "knots": 4, "window": (40, 20)},
    "unaligned": {"size": (33, 40), "causal": True, "rows": 7, "zero": 0},
}
QUICK = {"unaligned", "curve"}
EACH = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else SLOW) for case in CASES]
)


def given(
    size, *, heads=(2, 2), width=(16, 16), causal=False, rows=9, zero=4, has=(True, True),
    shared=False, own=False, starts=None, documents=False, window=None, knots=0,
):  # fmt: skip
    """Tensors, vectors and the call of a case, in float32."""
    torch.manual_seed(1)
    queries, keys = size
    # Projections give (B, L, H, D) seen as (B, H, L, D).
    q, p = torch.randn(2, 2, queries, heads[0], width[0]).transpose(2, 3).to(DEVICE)
    k, m = torch.randn(2, 2, heads[1], keys, width[0]).to(DEVICE)
    v = torch.randn(2, heads[1], keys, width[1]).to(DEVICE)
    vectors = torch.randn(2, rows, 1 if shared else heads[0], width[0]).to(DEVICE)
    ids = torch.sort(torch.randint(-1, 2, (2, keys)), -1)[0].to(DEVICE) if documents else None
    begin = None if starts is None else torch.tensor(starts, device=DEVICE)
    first, last = hide_padding(ids)
    start = keys - queries if begin is None else begin
    how = {"scale": 0.3, "causal": causal, "first": first, "last": last, "window": window}
    # If own, the vectors are for q and k themselves.
    p, m = (x if one and not own else None for x, one in zip((p, m), has, strict=True))
    for_queries, for_keys = (x if one else None for x, one in zip(vectors, has, strict=True))
    bias = VectorFields(p, m, for_queries, for_keys, zero)
    if knots:
        # Minus c, and L; units with knots among the values of x, one that is always above zero and
        # one that is never; outputs.
        slopes = torch.randn(knots)
        low = -slopes * torch.rand(knots)
        low[-2:], slopes[-2:] = torch.tensor([0.3, -0.3]), torch.tensor([0.2, -0.2])
        ends, outputs = torch.stack((low, low + slopes)), torch.randn(1 + knots, heads[0])
        network = torch.cat((torch.tensor([-0.7, 25.3]), ends.flatten(), outputs.flatten()))
        bias = NetworkFields(network.to(DEVICE))
    return [q, k, v], ids, Call.of(bias, start=start, **how)


def wanted(inputs, bias, ids, call):
    """Output and log-sum-exp in float64, every score by its definition."""
    q, k, v = inputs
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    starts = torch.tensor([call.start] * 2, device=DEVICE) if call.starts is None else call.starts
    own = starts[:, None] + torch.arange(queries, device=DEVICE)
    distance = own[:, :, None] - torch.arange(keys, device=DEVICE)
    # Further channels of q and k give the products with the vectors of each pair.
    added = q.new_zeros(2, heads, queries, keys)
    sides = []
    if isinstance(bias, VectorFields):
        p, m = q if bias.p is None else bias.p, k if bias.m is None else bias.m
        sides = [(p, bias.for_queries, "bhid"), (m, bias.for_keys, "bhjd")]
    for x, vectors, form in sides:
        if vectors is not None:
            row = (distance + bias.zero).clamp(0, len(vectors) - 1)
            of_pairs = vectors.expand(-1, heads, -1)[row]
            x = x.repeat_interleave(heads // x.shape[1], 1)
            added = added + torch.einsum(f"{form},bijhd->bhij", x, of_pairs)
    if isinstance(bias, NetworkFields):
        network = bias.network
        units = (len(network) - 2 - heads) // (2 + heads)
        c, least, low, high, *outputs = network.split((1, 1, units, units, *[heads] * (1 + units)))
        c = -c
        begin = 0 if call.first is None else call.first.gather(1, own)
        longest = (own - begin)[:, :, None].double().maximum(least)
        x = (c * distance.abs() + 1).log() / (c * longest + 1).log()
        f = outputs[0][:, None, None]
        for at_0, at_1, output in zip(low, high, outputs[1:], strict=True):
            hidden = ((1 - x) * at_0 + x * at_1).clamp(min=0)[:, None]
            f = f + hidden * (output - outputs[0])[:, None, None]
        added = added + f / call.scale
    columns = torch.eye(keys, dtype=q.dtype, device=DEVICE).expand(2, heads, -1, -1)
    q, k, v = (
        torch.cat((q, added), -1),
        torch.cat((k.repeat_interleave(heads // k.shape[1], 1), columns), -1),
        v,
    )
    v = v.repeat_interleave(heads // v.shape[1], 1)
    how = {"own": own, "scale": call.scale, "causal": call.causal}
    return written_down(q, k, v, None, "none", documents=ids, window=call.window, **how)


def with_tensors(bias, tensors):
    """The fields of a bias with other tensors in the place of its own."""
    others = iter(tensors)
    return type(bias)(*[next(others) if isinstance(x, torch.Tensor) else x for x in bias])


@EACH
@pytest.mark.parametrize("by", ["kernel", "operations"])
def test_results_and_gradients_are_those_of_the_definition(by, case):
    if by == "kernel":
        pytest.importorskip("triton")
    inputs, ids, call = given(**CASES[case])
    tensors = [*inputs, *[x for x in call.bias if isinstance(x, torch.Tensor)]]
    wide = [x.double().requires_grad_() for x in tensors]
    out, lse = wanted(wide[:3], with_tensors(call.bias, wide[3:]), ids, call)
    g, g_lse = torch.randn(out.shape).to(DEVICE), torch.randn(lse.shape).to(DEVICE)
    g_lse = g_lse.masked_fill(lse == -torch.inf, 0.0)
    seen = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = torch.autograd.grad((out, seen), wide, (g.double(), g_lse.double()))
    ops, where = op.OPS[type(call.bias)], op.arguments(call._replace(to_bias=True))
    if by == "kernel":
        results = planned(ops.forward, *inputs, *where)
        dq, dk, dv, *to_bias = planned(ops.backward, g, g_lse, *results, *inputs, *where)
        pairs = zip(call.bias, to_bias, strict=False)
        found = [dq, dk, dv, *[grad for x, grad in pairs if x is not None]]
    else:
        leaves = [x.clone().requires_grad_() for x in tensors]
        bias = with_tensors(call.bias, leaves[3:])
        results = op.attend(*leaves[:3], call._replace(bias=bias))
        found = torch.autograd.grad(results, leaves, (g, g_lse))
    assert close(results[0].detach(), out.detach())
    assert close(results[1].detach(), lse.detach())
    for got, want in zip(found, grads, strict=True):
        assert close(got, want, 3e-5)


@SLOW
def test_the_ops_pass_opcheck():
    inputs, _, call = given((9, 12))
    ops, where = op.OPS[VectorFields], op.arguments(call._replace(to_bias=True))
    needed = [x.clone().requires_grad_() for x in inputs]
    torch.library.opcheck(ops.forward.overload, (*needed, *where))
    if DEVICE == "cpu":
        return  # the backward pass is an op only where there is a kernel
    out, lse = ops.forward(*inputs, *where)
    saved = torch.randn_like(out), None, out, lse
    torch.library.opcheck(ops.backward.overload, (*saved, *inputs, *where))


MISFITS = {
    "no-vectors": {"for_queries": lambda x: x[:0]},
    "narrow-vectors": {"for_queries": lambda x: x[:, :, :3]},
    "fewer-vectors": {"for_queries": lambda x: x[:3]},
    "vectors-of-float64": {"for_keys": lambda x: x.double()},
    "queries-of-fewer-heads": {"p": lambda x: x[:, :1]},
    "queries-without-vectors": {"for_queries": lambda x: None},
    "nothing": dict.fromkeys(("p", "m", "for_queries", "for_keys"), lambda x: None),
}


@pytest.mark.parametrize("change", MISFITS.values(), ids=MISFITS)
def test_the_op_refuses_vectors_that_do_not_fit(change):
    inputs, _, call = given((9, 12))
    changed = {name: make(getattr(call.bias, name)) for name, make in change.items()}
    with pytest.raises(ValueError, match=r"posenc::attend_vectors: .* must fit"):
        op.attend(*inputs, call._replace(bias=call.bias._replace(**changed)))


def test_the_op_refuses_keys_of_fewer_channels_than_queries():
    (q, k, v), _, call = given((9, 12))
    with pytest.raises(ValueError, match=r"posenc::attend_vectors: .* must fit"):
        op.attend(q, k[..., :3], v, call)


def test_the_op_refuses_a_network_of_another_number_of_heads():
    inputs, _, call = given((9, 12), has=(False, False), knots=3)
    bias = NetworkFields(call.bias.network[:-1])
    with pytest.raises(ValueError, match=r"posenc::attend_fire: .* must fit"):
        op.attend(*inputs, call._replace(bias=bias))


MODULES = {
    "RelativeKeys": lambda: posenc.RelativeKeys(16, max_distance=20),
    "RelativeKeys-both-sides": lambda: posenc.RelativeKeys(
        16, max_distance=20, causal=False, max_later=3
    ),
    "DeBERTa": lambda: posenc.DeBERTaBias(4, head_dim=16, max_relative_positions=30, causal=False),
    "DeBERTa-buckets": lambda: posenc.DeBERTaBias(
        4, head_dim=16, max_relative_positions=40, position_buckets=16, causal=False
    ),
    "TransformerXL": lambda: posenc.TransformerXLBias(4, embed_dim=64),
    "TransformerXL-both-sides": lambda: posenc.TransformerXLBias(
        4, embed_dim=64, causal=False, max_distance=30
    ),
    "FIRE": lambda: posenc.FIRE(4, threshold=20.0),
    "FIRE-both-sides": lambda: posenc.FIRE(4, causal=False, threshold=20.0),
    "CoPE": lambda: posenc.CoPE(16, max_pos=20),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_tell_the_op_what_they_are(make, monkeypatch):
    """On the CPU they go by rows; with the op, as on a GPU, the results are the same."""
    torch.manual_seed(2)
    module = make().double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    q, k, v = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 130, 16), torch.randn(1, 2, 130, 16)
    found = []
    for by_op in (False, True):
        monkeypatch.setattr(biased, "has_kernel", lambda *given, by_op=by_op: by_op)
        inputs = [x.double().requires_grad_() for x in (q, k, v)]
        out = module(*inputs)
        module.zero_grad()
        out.square().sum().backward()
        found.append([out, *[x.grad for x in (*inputs, *module.parameters())]])
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("learned", [True, False])
def test_the_network_of_halves_is_not_rounded_again(learned):
    fire = posenc.FIRE(4, hidden=8, threshold=100.7, learn_threshold=learned, dtype=torch.bfloat16)
    factor = 1.0
    if learned:
        fire.L_multiplier.data.fill_(-1.3)
        factor = fire.L_multiplier.item()
    network = fire.as_bias(200)
    assert {x.dtype for x in network} == {torch.float32}
    assert network.threshold.item() == pytest.approx(factor * 100.7, rel=1e-6)
    # The network at 0.3, from its numbers and by its layers.
    (low, high), outputs = network.units.double(), network.outputs.double()
    made = (low + 0.3 * (high - low)).relu() @ (outputs[1:] - outputs[0]) + outputs[0]
    wanted = fire.mlp.double()(torch.tensor([[0.3]], dtype=torch.float64))[0]
    assert torch.allclose(made, wanted, rtol=1e-5, atol=1e-5)
