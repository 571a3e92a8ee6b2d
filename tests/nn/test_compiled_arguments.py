"""In one graph, every module takes each optional argument, whichever call it comes with.

A model often gets positions, documents or a mask only after calls without them. torch.compile then
has a length of the queries as a symbol, and the same length of the argument as a number.
"""

from __future__ import annotations

import inspect

import pytest
import torch

import posenc
from posenc import axes
from support.every import MODULES
from support.modules import DIM, HEADS, Use, attended_by_method, rotated

BATCH = 2
# An image has one length and always its positions, and coordinates have no other argument.
CALLED = {
    name: use
    for name, use in MODULES.items()
    if "Grid" not in name and "image" not in name and "Fourier" not in name
} | {"RoPE, with axes": Use(lambda: posenc.RoPE(DIM, 64, axes=axes.Sections((1, 1))), rotated)}
# Arguments that go together. Positions exclude an offset, and a mask goes another way than none.
TOGETHER = [
    ("offset", "seq_len"),
    ("position_ids", "seq_len"),
    ("query_offset", "document_ids", "window", "scale", "seq_len"),
    ("attn_mask", "dropout_p", "query_offset", "document_ids", "window"),
]
# Neither tensors nor numbers.
FLAGS = {"prune", "causal", "backend", "dtype"}
# A call is a length and how it gets the argument: "without", "passed", or "kept" by the model.
ORDERS = {
    "later": (None, [(5, "without"), (7, "without"), (9, "passed"), (6, "passed")]),
    "first": (None, [(9, "passed"), (7, "passed"), (5, "without"), (6, "without")]),
    "kept": (None, [(5, "without"), (7, "without"), (9, "kept")]),
    "dynamic": (True, [(9, "passed"), (7, "passed")]),
    "kept, dynamic": (True, [(9, "kept")]),
}


class Model(torch.nn.Module):
    """A module that is called with arguments of the call, or with those that it keeps."""

    def __init__(self, use, kept):
        super().__init__()
        self.encoding, self.call = use.build(), use.call
        self.numbers = {}
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value)
            else:
                self.numbers[name] = value

    def forward(self, q, k, v, passed, source):
        given = passed if source == "passed" else {}
        if source == "kept":
            given = self.numbers | dict(self.named_buffers(recurse=False))
        return self.call(self.encoding, q, k, v, **given)


def forms(tokens, coordinates):
    """Each form of each argument, for calls with so many tokens."""
    at = torch.arange(tokens)
    documents = at // 3
    ids = [at + 1, (at + 1).repeat(BATCH, 1), at[None] + 1]
    if coordinates is not None:
        ids = [at + 1] + [each.expand(coordinates, *each.shape).clone() for each in ids]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril(1)
    bias = torch.linspace(-1, 1, BATCH * HEADS * tokens**2).view(BATCH, HEADS, tokens, tokens)
    return {
        "offset": [tokens // 3, torch.tensor([2, 5])],
        "position_ids": ids,
        "seq_len": [tokens + 9, torch.tensor(tokens + 9), torch.tensor([tokens + 9, tokens + 5])],
        "query_offset": [0, torch.tensor(0), torch.tensor([0, 0])],
        "document_ids": [documents, documents.repeat(BATCH, 1), documents[None]],
        "window": [3, (2, 1)],
        "scale": [0.3],
        "attn_mask": [seen, seen[:1].expand(BATCH, 1, 1, -1).clone(), bias],
        "dropout_p": [0.5],
    }


def parameters(use, module):
    """The names of the optional arguments of a call."""
    function = module.attention if use.call is attended_by_method else module.forward
    found = inspect.signature(function).parameters.values()
    return {p.name for p in found if p.default is not p.empty} - {"x", "sums"}


def rounds(name):
    """Functions of the tokens; their arguments together have each form of each argument."""
    use = CALLED[name]
    module = use.build()
    coordinates = getattr(module, "coordinates", None)
    if getattr(module, "axes", None) is not None:
        coordinates = module.axes.count()
    taken, each = parameters(use, module), forms(9, coordinates)
    for names in TOGETHER:
        if names[0] not in taken:
            continue
        names = taken.intersection(names)
        for i in range(max(len(each[name]) for name in names)):

            def arguments(tokens, names=names, i=i):
                these = forms(tokens, coordinates)
                return {name: these[name][i % len(these[name])] for name in sorted(names)}

            yield arguments


def assert_compiles(name, arguments, dynamic, calls):
    torch.compiler.reset()
    torch.manual_seed(0)
    model = Model(CALLED[name], arguments(9))
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
    for tokens, source in calls:
        q, k, v = torch.randn(3, BATCH, HEADS, tokens, DIM).unbind()
        results = []
        for call in (model, compiled):
            # Dropout draws the same numbers twice.
            torch.manual_seed(tokens)
            with torch.no_grad():
                results.append(call(q, k, v, arguments(tokens), source))
        torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


def test_every_optional_argument_is_tried():
    tried = {name for names in TOGETHER for name in names}
    for name, use in CALLED.items():
        assert parameters(use, use.build()) - FLAGS <= tried, name


@pytest.mark.parametrize(("name", "argument"), [("RoPE", "position_ids"), ("ALiBi", "attn_mask")])
def test_an_argument_may_come_after_lengths_without(name, argument):
    """Dynamo's `in` does not find a symbolic shape among those that are allowed."""
    arguments = next(each for each in rounds(name) if argument in each(9))
    assert_compiles(name, arguments, *ORDERS["later"])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CALLED)
def test_an_argument_may_come_with_any_call(name, order):
    for arguments in rounds(name):
        assert_compiles(name, arguments, *ORDERS[order])
