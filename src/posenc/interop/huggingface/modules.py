"""The forwards that `patch` gives to rotary modules and to norms of queries and keys.

A rotary module of transformers multiplies positions and rates in float32, which is off by 2e-4 at
position 4 000 and by 6e-2 at a million; and its rates are in a buffer, which a cast of the model
rounds to bfloat16 and `to_empty` leaves uninitialised. Our forward takes rates from the config in
float64, computes exact angles, and rounds cosines and sines once, to float32 in a bfloat16 model
too, if only our rotation reads them. To learn what a module's forward computes, another one is
built from the same config on the CPU and called. If its results differ from ours, the module keeps
its forward.

A norm is compared with ours on random numbers. Its attention is then run without memory, on the
meta device, to see whether the rotation takes what the norm returns.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc import configs, ops
from posenc.interop.huggingface.recognition import FAILURES, Match, NotUnderstood, same
from posenc.interop.huggingface.rewrite import PATCHED, Replacement, Rewriter
from posenc.interop.huggingface.rotation import ONE_ARGUMENT, WIDEN, NormCall, Pending
from posenc.numerics.constants import constant
from posenc.numerics.frequencies import Spectrum, scaled_rates
from posenc.numerics.scaling import DynamicNTK
from posenc.numerics.tables import angles, of_angles
from posenc.ops import Norm, Spec, TableRows

# Positions at which forwards of rotary modules are compared.
_NEAR = torch.tensor([[0, 1, 2, 3, 7], [5, 4, 9, 1, 0]], device="cpu")
# Two sequences, because modules for one coordinate raise on [3, B, T] only if B is above 1.
_LONG = torch.arange(2100, device="cpu").expand(2, -1)
_FAR = _NEAR * 40_009


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates from the config, and their order in the module: Pixtral has the even ones first."""

    spectrum: Spectrum
    order: tuple[int, ...] | None

    def follow_length(self) -> bool:
        """Whether these rates depend on the length of the sequence."""
        scaling = self.spectrum.scaling
        return scaling is not None and scaling.trained_length() is not None

    def exact(self, seq_len: Tensor | None = None) -> Tensor:
        """The rates in float64, in the module's order."""
        return _ordered(scaled_rates(self.spectrum, None, seq_len), self.order)


@dataclass(frozen=True, slots=True)
class Tables:
    """What our forward for a rotary module computes."""

    form: str  # how a row holds the numbers of its pairs: a key of WIDEN, complex, or recomposed
    by_layer: dict[str | None, Rates | None]  # by layer type; None for the rates in the buffer
    coordinates: int = 0  # how many coordinates a position is expanded to, if any
    named: bool = False  # recomposition_frequencies takes the layer type
    rounded: bool = False  # to the dtype of the input, because code of the model reads them

    @property
    def rates(self) -> str:
        """Where the rates come from."""
        return "its own" if None in self.by_layer.values() else "from the config"

    def forward_of(self, kind: Any) -> Any:
        """Our forward, inside the decorators that the class puts around its own."""

        def forward(
            module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
        ) -> Any:
            return _forward(self, module, x, position_ids, layer_type)

        inner, ours = inspect.unwrap(kind.forward), Match(self.form, "", forward)
        rewriter = Rewriter(lambda name, function: ours if function is inner else None)
        return rewriter.rewrite("forward", kind.forward)[0]


def tables_of(module: nn.Module) -> Tables | None:
    """The tables that a rotary module computes, or None if it must keep its own forward.

    Raises NotUnderstood if the two channels of a pair have different angles.
    """
    kind = type(module)
    names = list(inspect.signature(kind.forward).parameters)
    if names not in (["self", "x", "position_ids"], ["self", "x", "position_ids", "layer_type"]):
        return None
    # Tensors that a checkpoint fills may change what the module computes.
    if any(not name.endswith("inv_freq") for name in module.state_dict()):
        return None
    with torch.device("cpu"), torch.no_grad():
        fresh = _fresh_copy(module)
        if fresh is None:
            return None
        types = getattr(fresh, "rope_type", None) if len(names) == 4 else None
        layers = list(types) if isinstance(types, dict) else [None]
        results = {layer: list(_results(fresh, layer)) for layer in layers}
        # Try the rates of the config first, then those in the buffer.
        of_config = {layer: _rates(fresh, layer) for layer in layers}
        for rates in (of_config, dict.fromkeys(layers)):
            candidates = [Tables(form, rates) for form in (*WIDEN, "complex")]
            if hasattr(kind, "recomposition_frequencies"):
                named = "layer_type" in inspect.signature(kind.recomposition_frequencies).parameters
                candidates = [Tables("recomposed", rates, n, named) for n in (0, 2, 3, 4)]
            for tables in candidates:
                if all(_agree(fresh, tables, layer, results[layer]) for layer in layers):
                    return tables
    return None


def _fresh_copy(module: nn.Module) -> nn.Module | None:
    """A copy on the CPU, built from the config if its class needs nothing else."""
    kind, fresh = type(module), module
    if set(inspect.signature(kind.__init__).parameters) <= {"self", "config", "device"}:
        with contextlib.suppress(*FAILURES):
            fresh = kind(module.config)
    if any(buffer.is_meta for buffer in fresh.buffers()):
        return None
    return copy.deepcopy(fresh).cpu()


def _attribute(module: Any, layer_type: str | None, name: str) -> Any:
    """An attribute of a rotary module, which may have one for each layer type."""
    of_layer = None if layer_type is None else getattr(module, f"{layer_type}_{name}", None)
    return getattr(module, name) if of_layer is None else of_layer


def holds_other_rates(module: nn.Module, tables: Tables) -> bool:
    """Whether a buffer differs from the rates of the config by more than a cast rounds."""
    for layer_type, rates in tables.by_layer.items():
        buffer = _attribute(module, layer_type, "inv_freq")
        unknown = rates is None or buffer.is_meta or rates.follow_length()
        # Tolerances are the rounding of bfloat16 and the smallest float16.
        if rates and not (unknown or _near(buffer.cpu(), rates.exact(), rtol=2**-7, atol=2**-24)):
            return True
    return False


def _rates(fresh: nn.Module, layer_type: str | None) -> Rates | None:
    """The float64 rates of the config, if a fresh module holds them rounded to float32."""
    buffer = _attribute(fresh, layer_type, "inv_freq")
    ranks = tuple(buffer.argsort(descending=True).argsort().tolist())
    for spectrum in _spectra(fresh, layer_type, buffer.shape[-1]):
        for rates in (Rates(spectrum, None), Rates(spectrum, ranks)):
            with contextlib.suppress(*FAILURES):
                if _near(buffer, rates.exact()):
                    return rates
    return None


def _spectra(module: Any, layer_type: str | None, pairs: int) -> Iterator[Spectrum]:
    """The spectrum that the config describes, then an unscaled one, as in vision towers."""
    with contextlib.suppress(*FAILURES):
        recipe = configs.read(module.config, layer_type=layer_type)
        yield Spectrum(recipe.rotary_dim, recipe.base, recipe.scaling)
    with contextlib.suppress(*FAILURES):
        parameters = module.config.rope_parameters
        base = (parameters if layer_type is None else parameters[layer_type])["rope_theta"]
        yield Spectrum(2 * pairs, float(base))


def _near(rates: Tensor, exact: Tensor, rtol: float = 2e-6, atol: float = 0.0) -> bool:
    """Whether ``rates`` are the ``exact`` ones, by default up to the rounding of float32."""
    return torch.allclose(rates.double(), exact, rtol=rtol, atol=atol)


def _ordered(of_pairs: Tensor, order: Sequence[int] | None) -> Tensor:
    if order is None:
        return of_pairs
    return of_pairs[..., constant(tuple(order), torch.int64, of_pairs.device)]


def _forward(
    tables: Tables, module: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """A rotary module's forward: exact angles of ``position_ids``, in the module's own form."""
    rates, positions = tables.by_layer.get(layer_type), position_ids
    if tables.coordinates:
        positions = position_ids.expand(tables.coordinates, -1, -1)
    if rates is None:
        phi = angles(positions, _attribute(module, layer_type, "inv_freq").to(x.device))
    else:
        seq_len = _seq_len(module, layer_type, rates, position_ids)
        phi = _ordered(angles(positions, rates.spectrum, seq_len), rates.order)
    gain = float(_attribute(module, layer_type, "attention_scaling"))
    cos, sin = of_angles(phi, x.device, gain)
    if tables.form == "complex":
        return torch.complex(cos, sin).to(torch.complex64)
    dtype = x.dtype if tables.rounded else torch.promote_types(x.dtype, torch.float32)
    widen = WIDEN.get(tables.form) or module.recomposition_frequencies
    more = (layer_type,) if tables.named else ()
    return widen(cos, *more).to(dtype), widen(sin, *more).to(dtype)


def _seq_len(
    module: Any, layer_type: str | None, rates: Rates, position_ids: Tensor
) -> Tensor | None:
    """The length that the scaling depends on: for DynamicNTK, the longest so far."""
    if not rates.follow_length():
        return None
    if isinstance(rates.spectrum.scaling, DynamicNTK):
        longest = _attribute(module, layer_type, "max_seq_len_cached")
        return torch.as_tensor(longest, device=position_ids.device)
    return position_ids.max() + 1


def _called(forward: Any, module: nn.Module, positions: Tensor, layer_type: str | None) -> Any:
    """What a forward returns, or None where it raises."""
    more = () if layer_type is None else (layer_type,)
    with contextlib.suppress(*FAILURES):
        return forward(module, torch.zeros(1), positions, *more)
    return None


def _results(module: Any, layer_type: str | None) -> Iterator[tuple[Tensor, Any]]:
    """Yield positions, with one coordinate or several, and the module's result for each."""
    pairs = _attribute(module, layer_type, "inv_freq").shape[-1]
    module, forward = copy.deepcopy(module), type(module).forward
    # The first positions come twice, because some modules change after a long sequence.
    for p in (_NEAR, _LONG, _FAR, _NEAR):
        several = torch.stack((p, p + 1, p * 2, p * 3))
        for positions in (p, p.T, several[:2], several[:3], several):
            result = _called(forward, module, positions, layer_type)
            if result is None:
                continue
            cos = result[0]
            if cos.shape[-3:] == (*positions.shape[-2:], 2 * pairs):
                doubled = same(cos[..., :pairs], cos[..., pairs:])
                if not doubled and not same(cos[..., ::2], cos[..., 1::2]):
                    raise NotUnderstood("a table of two angles for a pair")
            yield positions, result


def _agree(
    module: nn.Module, tables: Tables, layer_type: str | None, results: list[tuple[Tensor, Any]]
) -> bool:
    """Whether our forward gives the same results, up to float32's error in the angle."""
    rates = tables.by_layer[layer_type]
    module, ours = copy.deepcopy(module), tables.forward_of(type(module))
    for positions, expected in results:
        got = _called(ours, module, positions, layer_type)
        if not same(got, expected, 1e-5 + 1e-6 * float(positions.max())):
            return False
        if rates is not None:
            # Rates are compared too, because the slowest ones hardly change the angles.
            seq_len = _seq_len(module, layer_type, rates, positions)
            if not _near(_attribute(module, layer_type, "inv_freq"), rates.exact(seq_len)):
                return False
    return bool(results)


def rotary_forward(kind: type, tables: Tables) -> Replacement:
    """The forward of a rotary module whose tables are ours."""
    return Replacement(kind, "forward", tables.forward_of(kind), (rotary_forward, (kind, tables)))


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one module that rotates.

    Attributes:
        module: Path of the module in the model.
        cls: Its class; that of its attention processor in a model of diffusers.
        fused: Names of its norms that are computed with the rotation, in one kernel; in a call
            that does not rotate, on their own.
        others: Names of the others, and why each still runs on its own.
    """

    module: str
    cls: str
    fused: tuple[str, ...]
    others: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        text = [f"{', '.join(self.fused)} fused"] * bool(self.fused)
        text += [f"{name} not fused: {why}" for name, why in self.others]
        return f"{self.module} ({self.cls}): norms [{'; '.join(text)}]"


# A new function object for each norm would make torch.compile compile each layer on its own.
@functools.cache
def norm_forward(kind: Any, eps: float, shift: float) -> Replacement:
    """The forward of an RMSNorm whose result waits for the rotation."""
    theirs = kind.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or _has_hooks(module):
            return theirs(module, *args, **kwargs)
        weight = module.weight
        # Of two dtypes, the model's result has the wider one in some families.
        if x.dtype != weight.dtype or x.shape[-1] != weight.shape[0]:
            return theirs(module, x)
        return Pending(NormCall(partial(theirs, module), x, weight, eps, shift), x)

    return Replacement(kind, "forward", forward, (norm_forward, (kind, eps, shift)))


def _has_hooks(module: nn.Module) -> bool:
    """Whether hooks see the result of a norm, or take its weight away after the call."""
    hooks = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    # Those of accelerate and of diffusers wrap the forward.
    return bool(hooks) or hasattr(module, "_hf_hook") or hasattr(module, "_diffusers_hook")


def plan_norms(
    path: str, module: nn.Module, methods: Sequence[Replacement], processor: Any
) -> tuple[list[tuple[nn.Module, Replacement]], list[Norms]]:
    """What to fuse in a module that rotates by ``methods`` or by a ``processor`` of diffusers.

    Returns norms with our forwards, and a report.
    """
    known: dict[str, Replacement] = {}
    others: dict[str, str] = {}
    for name, norm in module.named_children():
        kind: Any = type(norm)
        if "norm" not in kind.__name__.lower():
            continue
        if _has_hooks(norm) or "forward" in vars(norm):
            others[name] = "it has hooks, or a forward of its own"
        elif (formula := _formula(norm)) is None:
            others[name] = "it is no RMSNorm with a weight"
        else:
            known[name] = norm_forward(kind, *formula)
    why, rotated = "no rotation took its result as it is, in a trial", set[str]()
    # In diffusers, such a module has the processor of the others, but gets no tables.
    if processor is not None and getattr(module, "is_cross_attention", False):
        why = "it is of attention to other tokens, which does not rotate"
    elif known:
        rotated = _rotated(module, methods, processor, known)
    fused = tuple(name for name in known if name in rotated)
    others |= {name: why for name in known if name not in rotated}
    cls = type(module if processor is None else processor).__name__
    report = [Norms(path, cls, fused, tuple(others.items()))]
    ours = [(module.get_submodule(name), known[name]) for name in fused]
    return ours, report if known or others else []


def _formula(module: nn.Module) -> tuple[float, float] | None:
    """``eps`` and ``shift`` of an RMSNorm, found among its attributes; None if it is another."""
    weights = dict(module.named_parameters())
    has_buffers = any(True for _ in module.buffers())
    if list(weights) != ["weight"] or weights["weight"].dim() != 1 or has_buffers:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.device("cpu"), torch.no_grad(), contextlib.suppress(*FAILURES):
        twin = _empty_copy(module, "cpu")
        weight = twin.weight.normal_(generator=generator)
        x = torch.randn(3, weight.shape[0], generator=generator, dtype=torch.float32)
        # eps hardly shows in numbers around one.
        x *= torch.tensor([[1.0], [1e-3], [30.0]])
        expected = twin(x)
        unit = torch.ones(3, 1), torch.zeros(3, 1), TableRows(), Spec()
        for eps in {value for value in vars(module).values() if isinstance(value, float)}:
            for shift in (0.0, 1.0):
                got = ops.norm_rotate(x[None, None], weight, *unit, Norm(eps, shift))
                if torch.allclose(got[0, 0], expected, rtol=0.0, atol=1e-5):
                    return eps, shift
    return None


# Arguments of an attention in transformers, or of a processor in diffusers, that are tables.
_TABLES = re.compile("position_embeddings|rotary|freqs|rope")
# A trial that fused norms, by the class of an attention or of a processor.
_successful: weakref.WeakKeyDictionary[type, tuple[tuple[int, ...], Any]]
_successful = weakref.WeakKeyDictionary()


def _rotated(
    module: nn.Module, methods: Sequence[Replacement], processor: Any, known: dict[str, Replacement]
) -> set[str]:
    """Names of the norms whose results are rotated as they are, whenever the module rotates."""
    kind = type(module if processor is None else processor)
    attend: Any = type(module).forward if processor is None else processor.__call__
    names = [name for name in inspect.signature(attend).parameters if _TABLES.search(name)]

    def tried(lead: tuple[int, ...], tables: Any) -> dict[str, bool]:
        given = _arguments(module, attend, lead) | dict.fromkeys(names, tables)
        return _tried(module, methods, processor, known, given)

    # Some models get no tables in layers that do not rotate; processors then attend by tensors.
    @functools.cache
    def without_rotation(lead: tuple[int, ...]) -> set[str]:
        return set(tried(lead, None if processor is None else object()))

    best: set[str] = set()
    for lead, tables in [_successful[kind]] if kind in _successful else _trials(processor):
        if without_rotation(lead) != set(known):
            taken = {name for name, is_fused in tried(lead, tables).items() if is_fused}
            if len(taken - without_rotation(lead)) > len(best):
                best, _successful[kind] = taken - without_rotation(lead), (lead, tables)
    return best


def _trials(processor: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Axes of hidden states before their channels, and tables of two tokens, in every form.

    Tables of a processor may be those of one stream, of two, or in a dict.
    """
    if processor is None:
        for lead in ((1, 2), (2,)):
            for form in ONE_ARGUMENT[:2]:
                table = torch.empty(*lead, 2, device="meta")
                yield lead, *form.pack(table, table)
        return
    for packed in (lambda x: x, lambda x: (x, x), lambda x: {"query": x, "key": x}):
        for form in ONE_ARGUMENT:
            for rows in ((2,), (1, 2), (1, 2, 1), (1, 1, 2)):
                table = torch.empty(*rows, 2, device="meta")
                yield (1, 2), packed(*form.pack(table, table))


class _Decided(Exception):
    """It is known of each norm whether it was fused: the model's attention need not run."""


def _tried(
    module: nn.Module,
    methods: Sequence[Replacement],
    processor: Any,
    known: dict[str, Replacement],
    given: dict[str, Any],
) -> dict[str, bool]:
    """The norms whose results were used in a run of a copy, and whether a rotation took them."""
    fused: dict[str, bool] = {}

    def decided(name: str, is_fused: bool) -> None:
        fused[name] = is_fused or fused.get(name, False)
        if len(fused) == len(known):
            raise _Decided

    def watched(name: str, norm: nn.Module, x: Tensor) -> Any:
        result = known[name](norm, x)
        if isinstance(result, Pending):
            result.call.decided = partial(decided, name)
        return result

    # The model's code may fail in any way, as some of its arguments are None.
    with torch.device("meta"), torch.no_grad(), contextlib.suppress(Exception):
        twin = _empty_copy(module, "meta")
        vars(twin).update({method.name: partial(method, twin) for method in methods})
        for name in known:
            norm = twin.get_submodule(name)
            vars(norm)["forward"] = partial(watched, name, norm)
        try:
            twin(**given) if processor is None else processor(twin, **given)
        finally:
            # They hold it, and it holds them, until Python looks for such cycles.
            for method in methods:
                del vars(twin)[method.name]
    return fused


def _arguments(module: Any, attend: Any, lead: tuple[int, ...]) -> dict[str, Any]:
    """Arguments for ``attend``, after ``module``: hidden states, and None for what it needs."""
    widths = [one.in_features for one in module.modules() if hasattr(one, "in_features")]
    given: dict[str, Any] = {}
    for p in list(inspect.signature(attend).parameters.values())[1:]:
        if p.name.endswith("hidden_states"):
            given[p.name] = torch.empty(*lead, *widths[:1], device="meta")
        elif p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD:
            given[p.name] = None
    return given


class _Linear(nn.Linear):
    """Any linear layer, for states of any width: those of a second stream may have another."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], self.out_features))


def _empty_copy(module: Any, device: str) -> Any:
    """A float32 copy for our methods, without values and hooks."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return _Linear(module.in_features, module.out_features, dtype=torch.float32)
    twin: nn.Module = object.__new__(type(module))
    nn.Module.__init__(twin)
    left_out = {*vars(twin), "forward", "_old_forward", "_hf_hook"}
    vars(twin).update({name: v for name, v in vars(module).items() if name not in left_out})
    for name, weight in module._parameters.items():
        twin.register_parameter(name, weight if weight is None else _empty(weight, device))
    for name, buffer in module._buffers.items():
        twin.register_buffer(name, buffer if buffer is None else _empty(buffer, device))
    for name, child in module._modules.items():
        twin.add_module(name, child if child is None else _empty_copy(child, device))
    vars(twin)[PATCHED] = True
    return twin.eval()


def _empty(x: Tensor, device: str) -> nn.Parameter:
    dtype = torch.float32 if x.is_floating_point() else x.dtype
    return nn.Parameter(torch.empty(x.shape, dtype=dtype, device=device), requires_grad=False)
