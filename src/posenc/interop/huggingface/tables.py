"""Exact cosines and sines for the rotary modules of a model.

A rotary module of transformers multiplies positions and rates in float32, which is off by 2e-4 at
position 4 000 and by 6e-2 at a million; and its rates are in a buffer, which a cast of the model
rounds to bfloat16 and `to_empty` leaves uninitialised. Our forward takes rates from the config in
float64, computes exact angles, and rounds cosines and sines once, to float32 in a bfloat16 model
too, if only our rotation reads them.

To learn what a module's forward computes, another one is made from the same config on the CPU and
called. If its results differ from ours, the module keeps its forward.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from posenc import configs
from posenc.interop.huggingface.probing import FAILURES, WIDEN, Known, NotUnderstood, same
from posenc.interop.huggingface.rewrite import Rewriter
from posenc.numerics.constants import constant
from posenc.numerics.frequencies import Spectrum, scaled_rates
from posenc.numerics.scaling import DynamicNTK
from posenc.numerics.tables import angles, of_angles

# Positions at which forwards are compared.
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

    form: str  # how a row holds the numbers of its pairs: a key of WIDEN, or "recomposed"
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
        inner, ours = inspect.unwrap(kind.forward), Known(self.form, "", partial(_forward, self))
        rewriter = Rewriter(lambda name, function: ours if function is inner else None)
        return rewriter.rewrite("forward", kind.forward)[0]


def understood(module: nn.Module) -> Tables | None:
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
            candidates = [Tables(form, rates) for form in WIDEN]
            if hasattr(kind, "recomposition_frequencies"):
                named = "layer_type" in inspect.signature(kind.recomposition_frequencies).parameters
                candidates = [Tables("recomposed", rates, n, named) for n in (0, 2, 3, 4)]
            for tables in candidates:
                if all(_agree(fresh, tables, layer, results[layer]) for layer in layers):
                    return tables
    return None


def _fresh_copy(module: nn.Module) -> nn.Module | None:
    """A copy on the CPU, made from the config if its class needs nothing else."""
    kind, made = type(module), module
    if set(inspect.signature(kind.__init__).parameters) <= {"self", "config", "device"}:
        with contextlib.suppress(*FAILURES):
            made = kind(module.config)
    if any(buffer.is_meta for buffer in made.buffers()):
        return None
    return copy.deepcopy(made).cpu()


def _attribute(module: Any, layer_type: str | None, name: str) -> Any:
    """An attribute of a rotary module, which may have one for each layer type."""
    own = None if layer_type is None else getattr(module, f"{layer_type}_{name}", None)
    return getattr(module, name) if own is None else own


def is_rounded(module: nn.Module) -> bool:
    """Whether the rates in a buffer are in half precision."""
    buffers = module.named_buffers(recurse=False)
    return any(buffer.itemsize < 4 for name, buffer in buffers if name.endswith("inv_freq"))


def holds_other_rates(module: nn.Module, tables: Tables) -> bool:
    """Whether a buffer differs from the rates of the config by more than a cast rounds."""
    for layer_type, rates in tables.by_layer.items():
        held = _attribute(module, layer_type, "inv_freq")
        unknown = rates is None or held.is_meta or rates.follow_length()
        # Tolerances are the rounding of bfloat16 and the smallest float16.
        if rates and not (unknown or _near(held.cpu(), rates.exact(), rtol=2**-7, atol=2**-24)):
            return True
    return False


def _rates(fresh: nn.Module, layer_type: str | None) -> Rates | None:
    """The float64 rates of the config, if a fresh module holds them rounded to float32."""
    made = _attribute(fresh, layer_type, "inv_freq")
    ranks = tuple(made.argsort(descending=True).argsort().tolist())
    for spectrum in _spectra(fresh, layer_type, made.shape[-1]):
        for rates in (Rates(spectrum, None), Rates(spectrum, ranks)):
            with contextlib.suppress(*FAILURES):
                if _near(made, rates.exact()):
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


def _near(held: Tensor, exact: Tensor, rtol: float = 2e-6, atol: float = 0.0) -> bool:
    """Whether the rates ``held`` are ``exact``, by default up to the rounding of float32."""
    return torch.allclose(held.double(), exact, rtol=rtol, atol=atol)


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
            made = _called(forward, module, positions, layer_type)
            if made is None:
                continue
            cos = made[0]
            if cos.shape[-3:] == (*positions.shape[-2:], 2 * pairs):
                doubled = same(cos[..., :pairs], cos[..., pairs:])
                if not doubled and not same(cos[..., ::2], cos[..., 1::2]):
                    raise NotUnderstood("a table of two angles for a pair")
            yield positions, made


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
