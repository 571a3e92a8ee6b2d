"""The cosines and sines of a model's own rotary modules, with the rounding taken out.

A module of transformers multiplies positions and rates in float32, which is off by 2e-4 at
position 4 000 and by 6e-2 at a million; and it keeps its rates in a buffer, which a cast of the
model rounds to bfloat16 and `to_empty` leaves without numbers. Where its forward does that and
nothing else, ours takes its place inside the decorators that it had: rates come from the config in
float64, angles are exact, and cosines and sines are rounded once, to float32 also where the model
is bfloat16: only our rotation reads them.

What a module does is found by trying another one of its class, made of the same config on the CPU:
the buffers of the model's own are not read. Modules that do anything else keep their forward.
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

# Positions to compare on; a float32 angle is off by some millionths of the position.
_NEAR = torch.tensor([[0, 1, 2, 3, 7], [5, 4, 9, 1, 0]], device="cpu")
# Two sequences: modules that take no coordinates refuse them only if these are several.
_LONG = torch.arange(2100, device="cpu").expand(2, -1)
_FAR = _NEAR * 40_009


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of a config, and their order in the module: Pixtral's has the even ones first."""

    spectrum: Spectrum
    order: tuple[int, ...] | None

    def follow_length(self) -> bool:
        """Whether the rule of these rates depends on the length of the sequence."""
        rule = self.spectrum.scaling
        return rule is not None and rule.trained_length() is not None

    def exact(self, seq_len: Tensor | None = None) -> Tensor:
        """The rates in float64, as the module has them in float32."""
        return _ordered(scaled_rates(self.spectrum, None, seq_len), self.order)


@dataclass(frozen=True, slots=True)
class Tables:
    """What our forward for a rotary module makes.

    Attributes:
        form: How a row holds its numbers.
        by_layer: The rates of each layer type; None for those that the module's buffer holds.
        coordinates: How many coordinates a position is expanded to, or zero.
        named: Whether ``recomposition_frequencies`` is told the layer type.
    """

    form: str
    by_layer: dict[str | None, Rates | None]
    coordinates: int = 0
    named: bool = False

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
    """What our forward for a rotary module is to make, or None if the module is to keep its own.

    Raises NotUnderstood if no rotation is what the module's tables are for.
    """
    kind = type(module)
    names = list(inspect.signature(kind.forward).parameters)
    if names not in (["self", "x", "position_ids"], ["self", "x", "position_ids", "layer_type"]):
        return None
    # What a checkpoint fills may agree today and not tomorrow.
    if any(not name.endswith("inv_freq") for name in module.state_dict()):
        return None
    with torch.device("cpu"), torch.no_grad():
        tried = _another(module)
        if tried is None:
            return None
        types = getattr(tried, "rope_type", None) if len(names) == 4 else None
        layers = list(types) if isinstance(types, dict) else [None]
        answers = {layer: list(_answers(tried, layer)) for layer in layers}
        from_config = {layer: _rates(tried, layer) for layer in layers}
        for by_layer in (from_config, dict.fromkeys(layers)):
            for tables in _candidates(kind, by_layer):
                if all(_agree(tried, tables, layer, answers[layer]) for layer in layers):
                    return tables
    return None


def _candidates(kind: Any, by_layer: dict[str | None, Rates | None]) -> Iterator[Tables]:
    recompose = getattr(kind, "recomposition_frequencies", None)
    if recompose is None:
        yield from (Tables(form, by_layer) for form in WIDEN)
        return
    named = "layer_type" in inspect.signature(recompose).parameters
    yield from (Tables("recomposed", by_layer, n, named) for n in (0, 2, 3, 4))


def holds_other_rates(module: nn.Module, tables: Tables) -> bool:
    """Whether a buffer holds other numbers than the rates of the config, rounded by a cast."""
    for layer_type, rates in tables.by_layer.items():
        held = _attribute(module, layer_type, "inv_freq")
        if rates is None or held.is_meta or rates.follow_length():
            continue
        # What bfloat16 rounds off, and what float16 has no numbers for.
        if not torch.allclose(held.cpu().double(), rates.exact(), rtol=2**-7, atol=2**-24):
            return True
    return False


def _another(module: nn.Module) -> nn.Module | None:
    """A module like this one, on the CPU; made of the config if its class needs nothing else."""
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


def _rates(module: nn.Module, layer_type: str | None) -> Rates | None:
    """The float64 rates that the config asks for, if they are what the module rounded."""
    held = _attribute(module, layer_type, "inv_freq").double()
    ranks = tuple(held.argsort(descending=True).argsort().tolist())
    for spectrum in _spectra(module, layer_type, held.shape[-1]):
        for rates in (Rates(spectrum, None), Rates(spectrum, ranks)):
            with contextlib.suppress(*FAILURES):
                if _near(held, rates.exact()):
                    return rates
    return None


def _spectra(module: Any, layer_type: str | None, pairs: int) -> Iterator[Spectrum]:
    """What a config may mean: what it says, or its base alone, as for vision towers."""
    with contextlib.suppress(*FAILURES):
        recipe = configs.read(module.config, layer_type=layer_type)
        yield Spectrum(recipe.rotary_dim, recipe.base, recipe.scaling)
    with contextlib.suppress(*FAILURES):
        said = module.config.rope_parameters
        base = (said if layer_type is None else said[layer_type])["rope_theta"]
        yield Spectrum(2 * pairs, float(base))


def _near(held: Tensor, exact: Tensor) -> bool:
    """Whether rates are these in float32."""
    return torch.allclose(held.double(), exact, rtol=2e-6, atol=0)


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
    widen = WIDEN.get(tables.form) or module.recomposition_frequencies
    more = (layer_type,) if tables.named else ()
    dtype = torch.promote_types(x.dtype, torch.float32)
    return widen(cos, *more).to(dtype), widen(sin, *more).to(dtype)


def _seq_len(
    module: Any, layer_type: str | None, rates: Rates, position_ids: Tensor
) -> Tensor | None:
    """The length that a rule is to see; the longest of several calls if the module keeps that."""
    if not rates.follow_length():
        return None
    if isinstance(rates.spectrum.scaling, DynamicNTK):
        longest = _attribute(module, layer_type, "max_seq_len_cached")
        return torch.as_tensor(longest, device=position_ids.device)
    return position_ids.max() + 1


def _options(layer_type: str | None) -> dict[str, str]:
    return {} if layer_type is None else {"layer_type": layer_type}


def _answers(module: Any, layer_type: str | None) -> Iterator[tuple[Tensor, Any]]:
    """Positions, with one coordinate and with several, and what a module makes of them."""
    pairs = _attribute(module, layer_type, "inv_freq").shape[-1]
    module, forward = copy.deepcopy(module), type(module).forward
    # Near ones twice: some modules remember that a sequence was long.
    for p in (_NEAR, _LONG, _FAR, _NEAR):
        several = torch.stack((p, p + 1, p * 2, p * 3))
        for positions in (p, p.T, several[:2], several[:3], several):
            try:
                made = forward(module, torch.zeros(1), positions, **_options(layer_type))
            except FAILURES:
                continue
            cos = made[0]
            if cos.shape[-3:] == (*positions.shape[-2:], 2 * pairs):
                doubled = same(cos[..., :pairs], cos[..., pairs:])
                if not doubled and not same(cos[..., ::2], cos[..., 1::2]):
                    raise NotUnderstood("a table of two angles for a pair")
            yield positions, made


def _agree(
    module: nn.Module,
    tables: Tables,
    layer_type: str | None,
    answers: list[tuple[Tensor, Any]],
) -> bool:
    """Whether ours gives what the module gives, up to float32's error in the angle."""
    rates = tables.by_layer[layer_type]
    module, ours = copy.deepcopy(module), tables.forward_of(type(module))
    for positions, expected in answers:
        try:
            got = ours(module, torch.zeros(1), positions, **_options(layer_type))
        except FAILURES:
            return False
        if not same(got, expected, 1e-5 + 1e-6 * float(positions.max())):
            return False
        if rates is not None:
            # What the decorators made of the rates in the buffer tells slow pairs apart.
            seq_len = _seq_len(module, layer_type, rates, positions)
            if not _near(_attribute(module, layer_type, "inv_freq"), rates.exact(seq_len)):
                return False
    return bool(answers)
