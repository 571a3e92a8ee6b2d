"""The cosines and sines of a model's own rotary modules, with the rounding taken out.

A module of transformers multiplies positions and rates in float32, which is off by 2e-4 at
position 4 000 and by 6e-2 at a million. Where its forward does that and nothing else (which is
tried, as the rotation is), ours takes its place inside the decorators that it had: rates come from
the config in float64, angles are exact, and cosines and sines are rounded once, to float32 also
where the model is bfloat16: only our rotation reads them. Other modules keep their own.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from posenc.interop.huggingface.rewrite import rewrapped
from posenc.numerics import configs
from posenc.numerics.frequencies import Spectrum, scaled_rates
from posenc.numerics.tables import angles, of_angles

# All that a forward may look up if ours is to take its place: a module that reads anything else
# (a learned rate, a length) may agree today and not tomorrow. The last line is how all of them were
# written before transformers 5.18.
_READS = set(
    """torch no_grad float to device dtype type cat stack cos sin inv_freq attention_scaling expand
    getattr recomposition_frequencies repeat_interleave polar ones_like len mrope_section
    isinstance str maybe_autocast transpose shape""".split()
)
_WIDEN: dict[str, Callable[[Tensor], Tensor]] = {
    "doubled": lambda table: torch.cat((table, table), dim=-1),
    "repeated": lambda table: table.repeat_interleave(2, dim=-1),
    "single": lambda table: table,
}
# Positions to compare on; a float32 angle is off by some millionths of the position.
_NEAR = torch.tensor([[0, 1, 2, 3, 7], [5, 4, 9, 1, 0]], device="cpu")
_FAR = _NEAR * 40_009


def forward_for(module: nn.Module) -> tuple[str, str, FunctionType] | None:
    """Form, rates and our forward for a rotary module, or None if it is to keep its own."""
    original = type(module).forward
    inner = inspect.unwrap(original)
    if not isinstance(inner, FunctionType) or not _is_known(inner.__code__):
        return None
    names = list(inspect.signature(inner).parameters)
    if names not in (["self", "x", "position_ids"], ["self", "x", "position_ids", "layer_type"]):
        return None
    kinds = _layer_types(module) if len(names) == 4 else [None]
    held = [getattr(module, f"{_prefix(kind)}inv_freq", None) for kind in kinds]
    if any(rates is None or rates.is_meta for rates in held):
        return None
    spectra = {kind: _spectrum(module, kind) for kind in kinds}
    for form, ours in _candidates(module, spectra):
        if all(_agree(module, inner, ours, kind) for kind in kinds):
            rates = "from the config" if None not in spectra.values() else "its own"
            return form, rates, rewrapped(original, inner, ours)
    return None


def _is_known(code: CodeType) -> bool:
    """Whether nothing is looked up but what ours depends on too; of shapes, how many sequences."""
    steps = list(dis.get_instructions(code))
    sizes = (after.argval for step, after in pairwise(steps) if step.argval == "shape")
    return set(code.co_names) <= _READS and all(size in (0, 1) for size in sizes)


def differ_in_halves(module: nn.Module) -> bool:
    """Whether tokens with several coordinates turn the two channels of a pair by different ones."""
    recompose = getattr(module, "recomposition_frequencies", None)
    held = getattr(module, "inv_freq", None)
    if recompose is None or held is None or len(inspect.signature(recompose).parameters) != 1:
        return False
    pairs = held.shape[-1]
    for coordinates in (2, 3, 4):
        # No number twice.
        numbers = torch.arange(coordinates * pairs, device=held.device).view(-1, 1, 1, pairs)
        try:
            made = recompose(numbers.float().expand(-1, 1, 2, -1))
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
        if isinstance(made, Tensor) and made.shape[-1] == 2 * pairs:
            doubled = torch.equal(made[..., :pairs], made[..., pairs:])
            return not doubled and not torch.equal(made[..., ::2], made[..., 1::2])
    return False


def _layer_types(module: nn.Module) -> list[Any]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) else [None]


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _spectrum(module: nn.Module, layer_type: str | None) -> Spectrum | None:
    """The float64 rates that the config asks for, if they are what the module rounded."""
    held = getattr(module, f"{_prefix(layer_type)}inv_freq")
    kind = getattr(module, "rope_type", None)
    kind = kind.get(layer_type) if isinstance(kind, dict) else kind
    # These change with the length of the sequence, in the module's own forward.
    if kind in ("dynamic", "longrope"):
        return None
    try:
        recipe = configs.read(module.config, layer_type=layer_type)
        spectrum = Spectrum(recipe.rotary_dim, recipe.base, recipe.scaling)
        rates = scaled_rates(spectrum)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    same = held.shape == rates.shape and torch.allclose(
        held.cpu().double(), rates, rtol=2e-6, atol=0
    )
    return spectrum if same else None


def _candidates(
    module: nn.Module, spectra: dict[Any, Spectrum | None]
) -> Iterator[tuple[str, Any]]:
    recompose = getattr(module, "recomposition_frequencies", None)
    if recompose is not None:
        named = "layer_type" in inspect.signature(recompose).parameters
        for coordinates in (0, 2, 3, 4):
            yield "recomposed", _forward(spectra, "single", coordinates, True, named)
        return
    for form in (*_WIDEN, "complex"):
        yield form, _forward(spectra, form)


def _forward(
    spectra: dict[Any, Spectrum | None],
    form: str,
    coordinates: int = 0,
    recompose: bool = False,
    named: bool = False,
) -> Any:
    """A rotary module's forward: exact angles of ``position_ids``, in the module's own form."""

    def forward(
        self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        prefix = _prefix(layer_type)
        rates = spectra.get(layer_type)
        if rates is None:
            rates = getattr(self, f"{prefix}inv_freq").to(x.device)
        if coordinates:
            position_ids = position_ids.expand(coordinates, -1, -1)
        gain = getattr(self, f"{prefix}attention_scaling", None)
        gain = self.attention_scaling if gain is None else gain
        cos, sin = of_angles(angles(position_ids, rates), x.device, float(gain))
        if form == "complex":
            return torch.complex(cos, sin).to(torch.complex64)
        if recompose:
            more = (layer_type,) if named else ()
            cos = self.recomposition_frequencies(cos, *more)
            sin = self.recomposition_frequencies(sin, *more)
        else:
            cos, sin = _WIDEN[form](cos), _WIDEN[form](sin)
        dtype = torch.promote_types(x.dtype, torch.float32)
        return cos.to(dtype), sin.to(dtype)

    return forward


def _agree(module: nn.Module, inner: FunctionType, ours: Any, kind: str | None) -> bool:
    """Whether ``ours`` gives what ``inner`` gives, up to float32's error in the angle."""
    named = {} if kind is None else {"layer_type": kind}
    held = getattr(module, f"{_prefix(kind)}inv_freq")
    x = torch.zeros(1, dtype=torch.float32, device=held.device)
    taken = 0
    for positions in (_NEAR, _FAR):
        for at in (positions, positions.T, torch.stack((positions, positions + 1, positions * 2))):
            at = at.to(held.device)
            try:
                expected = inner(module, x, at, **named)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
            try:
                got = ours(module, x, at, **named)
            except (RuntimeError, ValueError, IndexError, TypeError):
                return False
            if not _close(got, expected, 1e-5 + 1e-6 * float(at.max())):
                return False
            taken += 1
    return taken > 0


def _close(got: Any, expected: Any, error: float) -> bool:
    if isinstance(expected, Tensor):
        alike = isinstance(got, Tensor) and got.shape == expected.shape
        return alike and torch.allclose(got, expected.to(got.dtype), rtol=0, atol=error)
    return len(got) == len(expected) and all(_close(a, b, error) for a, b in zip(got, expected))  # noqa: B905
