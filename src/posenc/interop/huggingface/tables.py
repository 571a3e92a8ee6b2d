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
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from posenc import configs
from posenc.interop.huggingface.probing import FAILURES, WIDEN, same
from posenc.interop.huggingface.rewrite import rewrapped
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

    def forward_of(self, kind: type) -> FunctionType:
        """Our forward, inside the decorators that the class puts around its own."""
        original: Any = kind.forward  # type: ignore[attr-defined]
        return rewrapped(original, inspect.unwrap(original), _forward(self))


def understood(module: nn.Module) -> Tables | None:
    """What our forward for a rotary module is to make, or None if the module is to keep its own."""
    inner = inspect.unwrap(type(module).forward)
    names = list(inspect.signature(inner).parameters)
    if names not in (["self", "x", "position_ids"], ["self", "x", "position_ids", "layer_type"]):
        return None
    # What a checkpoint fills may agree today and not tomorrow.
    if any(not name.endswith("inv_freq") for name in module.state_dict()):
        return None
    with torch.device("cpu"), torch.no_grad():
        tried = _another(module)
        if tried is None:
            return None
        kinds = _layer_types(tried) if len(names) == 4 else [None]
        from_config = {kind: _rates(tried, kind) for kind in kinds}
        for by_layer in (from_config, dict.fromkeys(kinds)):
            for tables in _candidates(tried, by_layer):
                if all(_agree(tried, tables, kind) for kind in kinds):
                    return tables
    return None


def holds_other_rates(module: nn.Module, tables: Tables) -> bool:
    """Whether a buffer holds other numbers than the rates of the config, rounded by a cast."""
    for kind, rates in tables.by_layer.items():
        held = getattr(module, f"{_prefix(kind)}inv_freq")
        if rates is None or held.is_meta or _follows_length(rates.spectrum):
            continue
        # What bfloat16 rounds off, and what float16 has no numbers for.
        exact = _ordered(scaled_rates(rates.spectrum), rates.order)
        if not torch.allclose(held.cpu().double(), exact, rtol=2**-7, atol=2**-24):
            return True
    return False


def differ_in_halves(module: nn.Module) -> bool:
    """Whether tokens with several coordinates turn the two channels of a pair by different ones."""
    recompose = getattr(module, "recomposition_frequencies", None)
    held = getattr(module, "inv_freq", None)
    if recompose is None or held is None or len(inspect.signature(recompose).parameters) != 1:
        return False
    pairs = held.shape[-1]
    for coordinates in (2, 3, 4):
        # No number twice.
        numbers = torch.arange(coordinates * pairs, device="cpu").view(-1, 1, 1, pairs)
        try:
            made = recompose(numbers.float().expand(-1, 1, 2, -1))
        except FAILURES:
            continue
        if isinstance(made, Tensor) and made.shape[-1] == 2 * pairs:
            doubled = torch.equal(made[..., :pairs], made[..., pairs:])
            return not doubled and not torch.equal(made[..., ::2], made[..., 1::2])
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


def _layer_types(module: nn.Module) -> list[Any]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) else [None]


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _rates(module: nn.Module, layer_type: str | None) -> Rates | None:
    """The float64 rates that the config asks for, if they are what the module rounded."""
    held = getattr(module, f"{_prefix(layer_type)}inv_freq").double()
    for read in (_as_read, _as_plain):
        try:
            spectrum = read(module, layer_type)
            rates = scaled_rates(spectrum)
        except FAILURES:
            continue
        for order in (None, held.argsort(descending=True).argsort().tolist()):
            if held.shape == rates.shape and _near(held, _ordered(rates, order)):
                return Rates(spectrum, order and tuple(order))
    return None


def _near(held: Tensor, exact: Tensor) -> bool:
    """Whether rates are these in float32."""
    return torch.allclose(held, exact, rtol=2e-6, atol=0)


def _ordered(of_pairs: Tensor, order: Sequence[int] | None) -> Tensor:
    if order is None:
        return of_pairs
    return of_pairs[..., constant(tuple(order), torch.int64, of_pairs.device)]


def _as_read(module: Any, layer_type: str | None) -> Spectrum:
    recipe = configs.read(module.config, layer_type=layer_type)
    return Spectrum(recipe.rotary_dim, recipe.base, recipe.scaling)


def _as_plain(module: Any, layer_type: str | None) -> Spectrum:
    """All the rates that the module has, from the base alone: those of vision towers."""
    said = module.config.rope_parameters
    base = float((said if layer_type is None else said[layer_type])["rope_theta"])
    return Spectrum(2 * getattr(module, f"{_prefix(layer_type)}inv_freq").shape[-1], base)


def _follows_length(spectrum: Spectrum) -> bool:
    return spectrum.scaling is not None and spectrum.scaling.trained_length() is not None


def _candidates(module: nn.Module, by_layer: dict[Any, Rates | None]) -> Iterator[Tables]:
    recompose = getattr(module, "recomposition_frequencies", None)
    if recompose is not None:
        named = "layer_type" in inspect.signature(recompose).parameters
        for coordinates in (0, 2, 3, 4):
            yield Tables("recomposed", by_layer, coordinates, named)
        return
    for form in WIDEN:
        yield Tables(form, by_layer)


def _forward(tables: Tables) -> Any:
    """A rotary module's forward: exact angles of ``position_ids``, in the module's own form."""
    form, by_layer = tables.form, tables.by_layer
    coordinates, named = tables.coordinates, tables.named

    def forward(
        self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        prefix, rates = _prefix(layer_type), by_layer.get(layer_type)
        at = position_ids.expand(coordinates, -1, -1) if coordinates else position_ids
        if rates is None:
            phi = angles(at, getattr(self, f"{prefix}inv_freq").to(x.device))
        else:
            seq_len = _seq_len(self, prefix, rates.spectrum, position_ids)
            phi = _ordered(angles(at, rates.spectrum, seq_len), rates.order)
        gain = getattr(self, f"{prefix}attention_scaling", None)
        gain = self.attention_scaling if gain is None else gain
        cos, sin = of_angles(phi, x.device, float(gain))
        if form == "complex":
            return torch.complex(cos, sin).to(torch.complex64)
        if form == "recomposed":
            more = (layer_type,) if named else ()
            cos = self.recomposition_frequencies(cos, *more)
            sin = self.recomposition_frequencies(sin, *more)
        else:
            cos, sin = WIDEN[form](cos), WIDEN[form](sin)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return cos.to(dtype), sin.to(dtype)

    return forward


def _seq_len(module: Any, prefix: str, spectrum: Spectrum, position_ids: Tensor) -> Tensor | None:
    """The length that a rule is to see; the longest of several calls if the module keeps that."""
    if not _follows_length(spectrum):
        return None
    if isinstance(spectrum.scaling, DynamicNTK):
        longest = getattr(module, f"{prefix}max_seq_len_cached", module.max_seq_len_cached)
        return torch.as_tensor(longest, device=position_ids.device)
    return position_ids.max() + 1


def _in_force(module: Any, kind: str | None, rates: Rates, at: Tensor) -> bool:
    """Whether these are the rates by which a module rotated when it was last called."""
    held = getattr(module, f"{_prefix(kind)}inv_freq").double()
    seq_len = _seq_len(module, _prefix(kind), rates.spectrum, at)
    return _near(held, _ordered(scaled_rates(rates.spectrum, None, seq_len), rates.order))


def _agree(module: nn.Module, tables: Tables, kind: str | None) -> bool:
    """Whether ours gives what the module gives, up to float32's error in the angle."""
    named = {} if kind is None else {"layer_type": kind}
    rates = tables.by_layer[kind]
    original, ours = type(module).forward, tables.forward_of(type(module))
    theirs, mine = copy.deepcopy(module), copy.deepcopy(module)
    x = torch.zeros(1, dtype=torch.float32)
    taken = 0
    # Near ones twice: some modules remember that a sequence was long.
    for positions in (_NEAR, _LONG, _FAR, _NEAR):
        for at in (positions, positions.T, torch.stack((positions, positions + 1, positions * 2))):
            try:
                expected = original(theirs, x, at, **named)
            except FAILURES:
                continue
            try:
                got = ours(mine, x, at, **named)
            except FAILURES:
                return False
            if not same(got, expected, 1e-5 + 1e-6 * float(at.max())):
                return False
            if rates is not None and not _in_force(theirs, kind, rates, at):
                return False
            taken += 1
    return taken > 0
