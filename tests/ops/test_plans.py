"""What a GPU would do, and under which key it is kept: plans are data, and need no GPU."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import OrderedDict
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import posenc
from oracles import tables
from posenc.ops.attention.biases import (
    KINDS,
    DistanceTable,
    LevelFields,
    NetworkFields,
    NoBias,
    RunningSum,
    Slopes,
    VectorFields,
)
from posenc.ops.attention.call import Call
from posenc.ops.attention.op import OPS, arguments
from posenc.ops.cache.cache import rotate_and_cache_op
from posenc.ops.op import MaybeWritten, Size, Start, Written, fields_of, schema_of
from posenc.ops.plan import START, Constant, Launch, Operand, Plan, Step, layout_of, plan_of
from posenc.ops.rotation import reference
from posenc.ops.rotation.polar import polar_op
from posenc.ops.rotation.rotation import (
    norm_rotate_backward_op,
    norm_rotate_qk_op,
    rotate_in_place_op,
    rotate_qk_op,
)
from posenc.ops.rotation.spec import Spec, TableRows
from support.plans import H200, plan_for, planned, planned_attention, planned_gradients
from support.rotations import GPU

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


class AnyCall(NamedTuple):
    x: Written
    y: Tensor | None
    scales: MaybeWritten
    z: Tensor
    many: Size
    start: Start
    layout: int
    eps: float


def test_the_fields_of_a_call_are_its_schema():
    fields = fields_of(AnyCall)
    wanted = "(Tensor(a!) x, Tensor? y, Tensor(b!)? scales, Tensor z, SymInt many, SymInt start, "
    assert schema_of(fields, 2) == f"{wanted}int layout, float eps) -> (Tensor, Tensor)"
    assert schema_of(fields, 1).endswith("-> Tensor")
    assert schema_of(fields, 0).endswith("-> ()")
    assert "".join(field.letter for field in fields) == "w?Wtisif"


def test_a_field_of_another_type_is_refused():
    class Wrong(NamedTuple):
        x: Tensor
        name: str

    with pytest.raises(TypeError, match=r"Wrong\.name cannot be a field"):
        fields_of(Wrong)


def rotation(length=40, start=3, dtype=torch.bfloat16, layout=0, rows=64):
    q, k = (torch.zeros(2, heads, length, 64, dtype=dtype) for heads in (4, 2))
    return rotate_qk_op, q, k, *torch.zeros(2, rows, 32).unbind(), None, start, layout


BIASES = {
    "none": lambda length: NoBias(),
    "slopes": lambda length: Slopes(torch.ones(1, 4)),
    "table": lambda length: DistanceTable(torch.zeros(4, 90), 3),
    "sums": lambda length: RunningSum(torch.zeros(1, 4, length)),
    "vectors": lambda length: VectorFields(
        None, None, torch.zeros(9, 1, 64).bfloat16(), torch.zeros(9, 4, 64).bfloat16(), 3
    ),
    "fire": lambda length: NetworkFields(torch.ones(2 + 4 + 6 * 8)),
    "cope": lambda length: LevelFields(torch.zeros(1, 4, length, 5)),
}


def attention(length=40, start=0, kind="table", to_bias=False):
    q, k, v = (torch.zeros(1, 4, length, 64, dtype=torch.bfloat16) for _ in range(3))
    call = Call.of(BIASES[kind](length), start=start, scale=0.125, causal=True, prune=True)
    call = call._replace(to_bias=to_bias)
    return OPS[type(call.bias)].forward, q, k, v, *arguments(call)


def requests(plan):
    from posenc.ops import execute

    return [execute.request_of(step) for step in plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("call", [rotation, attention], ids=["rotation", "attention"])
def test_a_new_length_compiles_nothing(call):
    """Nor does a length that is one, or a multiple of 16: no number is specialised by its value."""
    found = [requests(plan_for(*call(length=length))) for length in (1100, 1104, 1203, 1099)]
    assert found[0]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("call", [rotation, attention], ids=["rotation", "attention"])
def test_a_plan_does_not_know_its_start(call):
    """The start is read at run time: a kernel for 16 would be wrong for 17."""
    plans = [plan_for(*call(start=start)) for start in (0, 1, 16, 17)]
    steps = [
        str([step._replace(arguments=shown(step.arguments)) for step in plan.steps])
        for plan in plans
    ]
    assert len(set(steps)) == 1
    assert has_start(plans[0].steps[-1].arguments)


def shown(value):
    """Arguments with the places of operands in their place, and aggregates as their parts."""
    if isinstance(value, Operand):
        return value.place
    if isinstance(value, tuple) and not isinstance(value, (Step, Constant)):
        return tuple([shown(part) for part in value])
    return value


def steps_in(value):
    """The strides among arguments and their parts."""
    for part in value:
        if isinstance(part, Step):
            yield part
        elif isinstance(part, tuple) and not isinstance(part, Constant):
            yield from steps_in(part)


def has_start(value):
    return value is START or (isinstance(value, tuple) and any(has_start(part) for part in value))


def test_a_plan_is_for_the_starts_that_have_rows():
    plan = plan_for(*rotation(length=40, rows=64))
    assert (plan.least, plan.most) == (0, 24)
    assert str(plan.wrong_start(25)).startswith("positions must be in [0, 64), got 64")


def test_only_a_start_that_a_plan_does_not_know_is_held_to_its_bounds():
    """That of a backward call is part of its plan: below zero if a ring's keys are later."""
    q, k, v, slopes = *torch.randn(3, 1, 1, 3, 16, device=GPU), torch.ones(1, 1, device=GPU)
    bias = -(torch.arange(3)[:, None] - torch.arange(3) - 5.0).abs().to(GPU)
    call = Call.of(Slopes(slopes), start=-5, scale=0.25, causal=False)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = (inputs[0] @ inputs[1].mT * 0.25 + bias).softmax(-1) @ inputs[2]
    wanted = torch.autograd.grad(out.sum(), inputs)

    saved = q, k, v, *planned_attention(q, k, v, call)
    got = planned_gradients(torch.ones_like(out), None, saved, call, False)
    for gradient, exact in zip(got, wanted, strict=False):
        torch.testing.assert_close(gradient, exact)

    op, *arguments = rotation(length=40, start=25, rows=64)
    arguments = [x.to(GPU) if isinstance(x, Tensor) else x for x in arguments]
    with pytest.raises(ValueError, match=r"positions must be in \[0, 64\), got 64"):
        planned(op, *arguments)


@contextmanager
def set_to(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


MATMUL = torch.backends.cuda.matmul
DETERMINISTIC = torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
# Settings of the process that no plan may read.
SURROUNDINGS = {
    "tf32": lambda: set_to(
        lambda: MATMUL.allow_tf32, lambda x: setattr(MATMUL, "allow_tf32", x), True
    ),
    "deterministic": lambda: set_to(*DETERMINISTIC, True),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference-mode": torch.inference_mode,
    "default-dtype": lambda: set_to(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
}


def described(plan):
    made = [(x.dtype, x.shape, x.stride()) for x in plan.made]
    steps = [
        (step[0].__name__, step.grid, str(shown(step.arguments)), str(step.constants))
        for step in plan.steps
    ]
    return made, steps, requests(plan)


def test_strides_are_aligned_all_together_or_not_at_all():
    """Else a length that is a multiple of 16 would be another kernel."""
    q = torch.zeros(1, 4, 48, 40, dtype=torch.bfloat16)
    cos = torch.zeros(64, 16)
    plan = plan_for(rotate_qk_op, q, q, cos, cos, None, 0, 0)
    steps = list(steps_in(plan.steps[-1].arguments))
    assert {x.is_multiple for x in steps if x.value in (1920, 40)} == {False}


def cache_call(**changes):
    given = {
        "q": torch.zeros(1, 4, 3, 64).bfloat16(),
        "k": torch.zeros(1, 2, 3, 64).bfloat16(),
        "v": torch.zeros(1, 2, 3, 64).bfloat16(),
        "k_cache": torch.zeros(4, 2, 8, 64).to(torch.float8_e4m3fn),
        "v_cache": torch.zeros(4, 2, 8, 64).to(torch.float8_e4m3fn),
        "k_scales": torch.zeros(4, 2, 8),
        "v_scales": None,
        "slots": torch.zeros(1, 3, dtype=torch.int64),
        "q_weight": torch.ones(64),
        "k_weight": torch.ones(64),
        "k_scale": None,
        "v_scale": torch.ones(()),
        "cos": torch.zeros(32, 32),
        "sin": torch.zeros(32, 32),
        "positions": torch.zeros(1, 3, dtype=torch.int64),
        "start": 0,
        "layout": 0,
        "eps": 1e-6,
        "shift": 0.0,
    }
    return rotate_and_cache_op.call(**{**given, **changes})


def norm_call():
    _, q, k, *how = rotation()
    return norm_rotate_qk_op.call(q, k, *torch.ones(2, 64).unbind(), *how, 1e-6, 0.0)


def polar_call():
    x, delta, tables = torch.zeros(1, 2, 4, 32), torch.zeros(2, 32), torch.zeros(2, 9, 32)
    return polar_op.call(x, delta, *tables.unbind(), None, 0)


def attention_call(kind):
    op, *given = attention(kind=kind)
    return op.call(*given)


CALLS = {
    "rotate_qk": (rotate_qk_op, lambda: rotate_qk_op.call(*rotation()[1:])),
    "norm": (norm_rotate_qk_op, norm_call),
    "cache": (rotate_and_cache_op, cache_call),
    "polar": (polar_op, polar_call),
    **{
        f"attend_{kind}": (OPS[fields].forward, partial(attention_call, kind))
        for fields, kind in KINDS.items()
    },
}


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)
@pytest.mark.parametrize("name", CALLS)
def test_a_plan_reads_nothing_but_the_call(name, surrounding):
    op, make = CALLS[name]
    call = make()
    wanted = described(plan_of(op, call, H200))
    with surrounding():
        assert described(plan_of(op, call, H200)) == wanted


def tensor_changes(x):
    """Tensors that differ from ``x`` in one property."""
    yield "dtype", x.double() if x.dtype != torch.float64 else x.float()
    yield "shape", torch.stack((x, x))
    if x.dim():
        yield "stride", torch.stack((x, x), -1)[..., 0]
    room = torch.empty(x.numel() + 16, dtype=x.dtype)
    by_one = room[1:] if room.data_ptr() % 16 == 0 else room
    yield "alignment", by_one[: x.numel()].view(x.shape)
    yield "presence", None


@pytest.mark.parametrize("name", CALLS)
def test_the_key_has_every_property_of_every_argument(name):
    """What a key lacked would be met by the plan of another call: right shapes, wrong kernel."""
    from posenc.ops.execute import key_of

    op, make = CALLS[name]
    call = make()
    key, changed = key_of(op, call), 0
    assert key_of(op, make()) == key
    for field, value in zip(op.fields, call, strict=True):
        if isinstance(value, Tensor):
            others = [other for _, other in tensor_changes(value)]
        elif value is None:
            others = [torch.zeros(1)]
        elif field.letter == "s":
            assert key_of(op, call._replace(**{field.name: value + 1})) == key
            continue
        else:
            others = [value + 1]
        for other in others:
            assert key_of(op, call._replace(**{field.name: other})) != key, field.name
            changed += 1
    assert changed > 8


def test_gradients_of_numbers_are_launches_only():
    """A copy or a torch operation between launches would cost more than they do."""
    for kind in ("table", "slopes"):
        plan = backward_plan(kind)
        assert all(isinstance(step, Launch) for step in plan.steps)


def backward_plan(kind, g=None):
    op, q, *given = attention(kind=kind, to_bias=True)
    (backward,) = [OPS[fields].backward for fields, name in KINDS.items() if name == kind]
    results = op.results(op.call(q, *given))
    return plan_for(backward, q if g is None else g, None, *results, q, *given)


def test_a_gradient_without_rows_of_its_own_is_copied_once():
    """That of a sum: all of its strides are zero."""
    plan = backward_plan("none", torch.zeros(()).bfloat16().expand(1, 4, 40, 64))
    assert [type(step).__name__ for step in plan.steps].count("Copy") == 1


def test_results_are_those_of_the_fake():
    for op, make in CALLS.values():
        call = make()
        plan = plan_of(op, call, H200)
        wanted = op.results(call)
        made = [(x.shape, x.dtype) for x in plan.made[: len(plan.results)]]
        assert made == [(x.shape, x.dtype) for x in wanted]


def test_an_empty_call_is_planned():
    x, weight = torch.zeros(0, 2, 5, 8), torch.ones(8)
    tables = torch.zeros(9, 4), torch.zeros(9, 4)
    plan = plan_for(norm_rotate_backward_op, x, x, weight, *tables, None, 0, 0, 1e-6, 0.0)
    assert [type(step).__name__ for step in plan.steps] == ["FillWithZeros"]


@pytest.mark.parametrize("name", CALLS)
def test_no_plan_is_made_for_tensors_on_two_devices(name):
    """A kernel would take an address of the one for one of the other."""
    op, make = CALLS[name]
    call, places = make(), iter(range(20))
    devices = iter([torch.device("cuda"), *[torch.device("cpu")] * 20])
    operands = [
        Operand(next(places), layout_of(x), next(devices)) if isinstance(x, Tensor) else x
        for x in call
    ]
    plan = Plan(len(op.tensors), [layout_of(x) for x in op.results(call)], torch.device("cuda"))
    with pytest.raises(ValueError, match="must be on one device"):
        op.plan(op.call(*operands), plan, H200)


@pytest.mark.parametrize("kind", KINDS.values())
def test_every_kind_of_bias_has_a_plan_forward_and_backward(kind):
    assert plan_for(*attention(kind=kind)).steps
    plan = backward_plan(kind)
    assert plan.steps
    assert len(plan.results) == 3 + sum(isinstance(x, Tensor) or x is None for x in BIASES[kind](9))


@pytest.mark.parametrize("kind", KINDS.values())
def test_a_backward_plan_makes_whole_results_whatever_is_asked_of_it(kind):
    """An empty result would be written past its end."""
    op, q, *given = attention(kind=kind)
    (ops,) = [OPS[fields] for fields, name in KINDS.items() if name == kind]
    results = op.results(op.call(q, *given))
    plan = plan_for(ops.backward, q, None, *results, q, *given)
    written = {
        x.place
        for step in plan.steps
        for x in leaves_of(step.arguments if isinstance(step, Launch) else step)
        if isinstance(x, Operand)
    }
    for result in plan.results:
        assert result.numel() or result.place not in written


def leaves_of(value):
    if isinstance(value, tuple):
        for part in value:
            yield from leaves_of(part)
    else:
        yield value


def test_native_code_has_room_for_every_op():
    """C launches for no more of them, and would leave the others to Python without a word."""
    header = Path(posenc.__file__).parent / "ops" / "native" / "plans.h"
    most = int(re.search(r"MOST_OPS = (\d+)", header.read_text())[1])
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if "posenc::" in schema.name]
    assert 20 < sum(schema.overload_name == "plain" for schema in schemas) <= most


def test_plans_that_python_keeps_are_bounded(monkeypatch):
    """Each length has one of its own; the ones that were not used for longest go first."""
    from posenc.ops import execute

    monkeypatch.setattr(execute, "_plans", OrderedDict())
    monkeypatch.setattr(execute, "MOST_PLANS", 4)
    calls = [rotate_qk_op.call(*rotation(length=n)[1:]) for n in range(1, 9)]
    first = execute.find_plan(rotate_qk_op, calls[0], H200)
    for call in calls:
        plan = execute.find_plan(rotate_qk_op, call, H200)
        assert execute.find_plan(rotate_qk_op, call, H200) is plan
        assert execute.find_plan(rotate_qk_op, calls[0], H200) is first
        assert len(execute._plans) <= 4


def test_what_is_written_to_a_copy_is_written_back():
    """A tensor with a negative bit has the negatives of its numbers in memory."""
    x = torch.complex(*torch.randn(2, 1, 2, 3, 8, device=GPU)).conj().imag
    assert x.is_neg()
    cos, sin = (t.float().to(GPU) for t in tables(3, 4))
    wanted = reference.rotate(x.resolve_neg(), cos, sin, TableRows(), Spec())
    planned(rotate_in_place_op, x, cos, sin, None, 0, Spec().bits())
    torch.testing.assert_close(x.resolve_neg(), wanted)


def test_kernels_have_few_parameters():
    """What belongs together is an aggregate; two numbers in the wrong order are no error."""
    import posenc.ops

    found = {}
    for module in pkgutil.walk_packages(posenc.ops.__path__, "posenc.ops."):
        if ".triton." in module.name:
            for name, value in vars(importlib.import_module(module.name)).items():
                if hasattr(value, "arg_names"):
                    found[module.name, name] = len(value.arg_names)
    assert len(found) > 100
    assert max(found.values()) <= 24, {name: n for name, n in found.items() if n > 24}


@pytest.mark.parametrize("kind", KINDS.values())
def test_attention_makes_nothing_for_each_query_and_tile(kind):
    """Without a gradient: that would be a matrix again, for long sequences."""
    plan = plan_for(*attention(length=4096, kind=kind))
    made = [x.numel() for x in plan.made[len(plan.results) :]]
    assert max(made, default=0) < 4 * 4096 * 4096 // 64
