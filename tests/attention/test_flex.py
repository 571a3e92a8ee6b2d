"""FlexAttention's kernels need a GPU; the graph around them does not, and is run here."""

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

import oracles
from posenc.attention import flex
from posenc.attention.pruning import Plan
from posenc.functional import alibi_bias, alibi_slopes
from posenc.numerics.spans import document_ends

HEADS, WIDTH = 4, 16


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch):
    """torch's own dense form of FlexAttention, traced as the compiled one is."""
    compiled = torch.compile(flex._attend, backend="eager", fullgraph=True)

    def with_lists_of_the_backward_pass(*given, grad, **flags):
        return compiled(*given, grad=True, **flags)

    monkeypatch.setattr(flex, "_compiled", lambda: with_lists_of_the_backward_pass)
    monkeypatch.setattr(flex, "_refused", set())


def run(queries, keys, *, offset=None, documents=None, bound=None, causal=True, groups=1, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(2, HEADS, queries, WIDTH)
    k, v = torch.randn(2, 2, HEADS // groups, keys, WIDTH).unbind()
    slopes = alibi_slopes(HEADS, bias_max=3.0)
    place = torch.tensor(keys - queries if offset is None else offset, dtype=torch.int32)
    plan = Plan(slopes, document_ends(documents), bound, 0.25, causal, True, offset is None)
    out = flex.attend(q, k, v, place, plan)
    place = None if offset is None else place
    places = {"query_offset": place, "document_ids": documents}
    bias = alibi_bias(slopes, queries, keys, **places, causal=causal)
    return out, oracles.attention(q, k, v, bias, 0.25)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"queries": 256, "keys": 256}, id="square"),
        pytest.param({"queries": 100, "keys": 300}, id="cache"),
        pytest.param({"queries": 200, "keys": 200, "causal": False}, id="symmetric"),
        pytest.param({"queries": 130, "keys": 130, "groups": 2}, id="gqa"),
        pytest.param({"queries": 1, "keys": 300, "offset": [7, 200]}, id="static-cache"),
        pytest.param(
            {"queries": 150, "keys": 150, "documents": torch.arange(150) // 60}, id="documents"
        ),
        pytest.param({"queries": 200, "keys": 200, "bound": torch.ones(1, 1)}, id="bound"),
    ],
)
def test_the_graph_is_the_attention(case):
    out, exact = run(**case)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=2e-6)


def test_another_offset_does_not_compile_again():
    counters.clear()
    for offset in (3, 100, 299, [5, 6]):
        run(1, 300, offset=offset)
    # One for a number, one for a number of each sequence.
    assert counters["stats"]["unique_graphs"] == 2


def test_a_kernel_that_does_not_compile_is_tried_once_then_the_other(monkeypatch):
    tried = []

    def refuses(q, k, v, *rest, general, **flags):
        tried.append(general)
        if not general:
            raise TorchDynamoException("no such kernel")
        return q

    monkeypatch.setattr(flex, "_compiled", lambda: refuses)
    run(1, 300)
    run(1, 300, seed=1)
    assert tried == [False, True, True]


def test_chunks_take_over_with_one_warning(monkeypatch):
    def refuses(*args, **flags):
        raise TorchDynamoException("no such kernel")

    monkeypatch.setattr(flex, "_compiled", lambda: refuses)
    q = torch.randn(1, HEADS, 8, WIDTH)
    plan = Plan(alibi_slopes(HEADS), None, None, 0.25, causal=True, prune=True, aligned=True)
    with pytest.warns(RuntimeWarning, match="attention runs in chunks instead: no such kernel"):
        assert flex.attend(q, q, q, 0, plan) is None
    assert flex.attend(q, q, q, 0, plan) is None


@pytest.mark.parametrize("why", ["cpu", "float64", "narrow"])
def test_inputs_without_a_kernel_are_known_before_a_launch(why):
    q = torch.empty(1, 2, 3, 8 if why == "narrow" else 64, device="meta")
    assert not flex.can_run(q.double() if why == "float64" else q, q)
