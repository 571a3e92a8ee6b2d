"""The one flash attention, by the tests of the kernels that it is to replace."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ops.attention import test_attention, test_counted, test_terms
from posenc.ops import execute, native
from posenc.ops.attention import op
from posenc.ops.plan import Operand, Plan, layout_of
from support.attention import DEVICE, call_of, close, numbers_of
from support.flash import use_one_attention
from support.plans import planned_attention

pytest.importorskip("triton")
SLOW = pytest.mark.slow
QUICK = {("square", "slopes"), ("symmetric", "table"), ("one-query-one-key", "sums")}


@pytest.fixture(autouse=True)
def _one_attention(monkeypatch):
    use_one_attention(monkeypatch.setattr)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[] if (name, kind) in QUICK else SLOW)
        for name in test_attention.CASES
        for kind in test_attention.KINDS
    ],
)
def test_a_number_for_each_distance(name, kind):
    test_attention.test_results_and_gradients_are_those_of_float64(name, kind)


@pytest.mark.parametrize(
    ("kind", "causal"),
    [
        pytest.param("slopes", True, id="slopes"),
        pytest.param("slopes", False, id="symmetric", marks=SLOW),
        pytest.param("sums", True, id="sums", marks=SLOW),
    ],
)
def test_pruning(kind, causal, monkeypatch):
    from posenc.ops.attention.triton.flash import plans

    monkeypatch.setattr(plans, "PRUNE_FROM", 0)
    test_attention.test_pruning_leaves_keys_out_and_changes_nothing(kind, causal, monkeypatch)


@SLOW
@pytest.mark.parametrize("kind", ["slopes", "sums"])
def test_a_window_and_pruning(kind, monkeypatch):
    from posenc.ops.attention.triton.flash import plans

    monkeypatch.setattr(plans, "PRUNE_FROM", 0)
    test_attention.test_a_window_and_pruning_together(kind, monkeypatch)


@SLOW
@pytest.mark.parametrize("size", [(90, 90), (3, 300)], ids=str)
@pytest.mark.parametrize("kind", ["window", "far"])
def test_any_ranges_of_keys(kind, size):
    test_attention.test_any_ranges_of_keys(kind, size)


@SLOW
@pytest.mark.parametrize("columns", [90, 60])
def test_a_column_of_a_table_gets_the_rounding_of_its_own_weights(columns):
    test_attention.test_a_column_of_a_table_gets_the_rounding_of_its_own_weights(columns)


@SLOW
def test_gradients_of_a_running_sum_are_zero_together():
    test_attention.test_gradients_of_a_running_sum_are_zero_together()


@SLOW
@pytest.mark.parametrize(("kind", "columns"), [("slopes", 0), ("table", 30)])
def test_a_gradient_has_the_dtype_of_its_numbers(kind, columns):
    test_attention.test_a_gradient_has_the_dtype_of_its_numbers(kind, columns)


class PaddedCall(NamedTuple):
    """A call of attention and which keys are not hidden, ``(1 or B, K)``; no op has that yet."""

    q: Tensor
    k: Tensor
    v: Tensor
    numbers: Tensor | None
    padding: Tensor
    out: Tensor
    lse: Tensor
    g: Tensor
    g_lse: None = None
    ranges: None = None


def carried_out(plan_it, given, call, results):
    """The results of a plan of a padded call."""
    named = {name: x for name, x in given._asdict().items() if isinstance(x, Tensor)}
    tensors = list(named.values())
    operands = {
        name: Operand(place, layout_of(x), x.device)
        for place, (name, x) in enumerate(named.items())
    }
    plan = Plan(len(tensors), [layout_of(x) for x in results], given.q.device)
    bias = call.bias
    if "numbers" in operands:
        bias = bias._replace(values=operands["numbers"])
    operands = given._replace(**operands)
    plan_it(operands, call._replace(bias=bias), plan, execute.target_of(given.q.device))
    return execute.execute(plan, tensors, call.start)


@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("kind", ["none", "slopes", "table"])
def test_hidden_keys(kind, queries):
    """Any keys of any sequence: between others, and all that a query sees."""
    from posenc.ops.attention.triton.flash import plans

    torch.manual_seed(3)
    keys, shape = 100, (2, 2, queries, 16)
    q, g = torch.randn(2, *shape, device=DEVICE)
    k, v = torch.randn(2, 2, 2, keys, 16, device=DEVICE)
    padding = torch.rand(2, keys, device=DEVICE) < 0.6
    padding[0, :50] = False
    values = numbers_of(kind, 2, keys, batch=1, columns=40, steep=1.0)
    values = None if values is None else values.to(DEVICE)
    start = keys - queries - 10
    call = call_of(values, kind, start=start, scale=0.25, prune=False)._replace(to_bias=True)

    i = start + torch.arange(queries, device=DEVICE)[:, None]
    j = torch.arange(keys, device=DEVICE)
    seen = (j <= i) & padding[:, None, None]
    exact = [x.double().requires_grad_() for x in (q, k, v, values) if x is not None]
    bias = 0.0
    if kind == "slopes":
        bias = -exact[3].view(1, 2, 1, 1) * (i - j).abs()
    if kind == "table":
        bias = exact[3][:, (i - j).clamp(0, 39)]
    scores = exact[0] @ exact[1].mT * 0.25 + bias
    nothing = ~seen.any(-1, keepdim=True)
    weights = scores.masked_fill(~seen, -torch.inf).masked_fill(nothing, 0.0).softmax(-1)
    wanted = weights.masked_fill(~seen, 0.0) @ exact[2]
    grads = torch.autograd.grad(wanted, exact, g.double())

    lse = torch.empty(shape[:3], device=DEVICE)
    empty = PaddedCall(q, k, v, values, padding.byte(), torch.empty_like(q), lse, g)
    unused = torch.empty(0, dtype=torch.int32, device=DEVICE)
    out, lse, _ = carried_out(plans.plan_forward, empty, call, (empty.out, lse, unused))
    given = empty._replace(out=out, lse=lse)
    to_bias = [] if values is None else [values]
    results = carried_out(plans.plan_backward, given, call, (q, k, v, *to_bias))
    assert queries == 3 or nothing.any()
    assert close(out, wanted.detach())
    for got, true in zip(results, grads, strict=False):
        assert close(got, true, 3e-5)


@test_terms.EACH
def test_vectors_and_networks(case):
    test_terms.test_results_and_gradients_are_those_of_the_definition("kernel", case)


@test_counted.EACH
def test_counted_positions(case):
    test_counted.test_results_and_gradients_are_those_of_the_definition("kernel", case)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.skipif(not native.carries_out_plans, reason="needs the extension")
@pytest.mark.parametrize("size", [(3, 391), (391, 391), (1301, 1301)], ids=str)
@pytest.mark.parametrize("kind", test_attention.KINDS)
def test_both_executors_give_the_same_bits(kind, size):
    """The second call of a kind is carried out by C; no other test has these lengths."""
    queries, keys = size
    q, k, v = (torch.randn(1, 2, n, 64, device=DEVICE).bfloat16() for n in (queries, keys, keys))
    values = numbers_of(kind, 2, keys, batch=1, columns=40, steep=1.0)
    values = None if values is None else values.to(DEVICE)
    start = keys - queries
    call = call_of(values, kind, start=start, scale=0.125)
    wanted = planned_attention(q, k, v, call)
    for _ in "ab":
        results = op.attend(q, k, v, call)
        assert all(torch.equal(x, y) for x, y in zip(results[:2], wanted[:2], strict=True))
