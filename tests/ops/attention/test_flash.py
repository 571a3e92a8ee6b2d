"""The one flash attention, by the tests of the kernels that it is to replace."""

import pytest
import torch

from ops.attention import test_attention, test_counted, test_terms
from posenc.ops import native
from posenc.ops.attention import op
from support.attention import DEVICE, call_of, numbers_of
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
