"""Rotating functions of diffusers, which get cosines and sines in one argument of several forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from posenc.interop.huggingface import rotation
from posenc.interop.huggingface.probing import WIDEN, Known

Pair = tuple[Tensor, Tensor]


class Form(NamedTuple):
    """How the arguments after the rotated tensors hold cosines and sines."""

    name: str
    pack: Callable[[Tensor, Tensor], tuple[Any, ...]]
    unpack: Callable[..., Pair]

    def plain(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``original`` as a function that takes ``cos`` and ``sin`` by name, for the trials."""

        def called(**given: Any) -> Any:
            tables = self.pack(given.pop("cos"), given.pop("sin"))
            return original(*given.values(), *tables)

        return called

    def known(self, plain: Known, names: tuple[str, ...], rotated: int) -> Known:
        """Our function for ``plain``, with the parameters of the model's, tensors first."""
        ours, unpack = plain.function, self.unpack

        def function(*args: Any, **kwargs: Any) -> Any:
            given = (*args, *(kwargs[name] for name in names[len(args) :]))
            return ours(*given[:rotated], *unpack(*given[rotated:]))

        name = ", ".join((self.name, plain.variant)) if self.name else plain.variant
        return Known(name, plain.layout, function)


def _matrices(cos: Tensor, sin: Tensor) -> tuple[Tensor]:
    rows = torch.stack((cos, -sin), dim=-1), torch.stack((sin, cos), dim=-1)
    return (torch.stack(rows, dim=-2),)


_TWO = Form("", lambda cos, sin: (cos, sin), lambda cos, sin: (cos, sin))
_ONE = (
    Form("", lambda cos, sin: ((cos, sin),), lambda tables: (tables[0], tables[1])),
    Form(
        "complex",
        lambda cos, sin: (torch.complex(cos, sin),),
        lambda tables: (tables.real, tables.imag),
    ),
    Form("matrices", _matrices, lambda tables: (tables[..., 0, 0], tables[..., 1, 0])),
    Form(
        "joined",
        lambda cos, sin: (torch.cat((cos, sin), dim=-1),),
        lambda tables: tables.chunk(2, dim=-1),
    ),
)


def forms(names: tuple[str, ...]) -> tuple[Form, ...]:
    """The forms that parameters with these names may have."""
    if names == ("freqs_cos", "freqs_sin"):
        return (_TWO,)
    one = {"freqs", "freqs_cis", "rope", "rotary_emb"}
    return _ONE if len(names) == 1 and names[0] in one else ()


def by_flags(
    x: Tensor,
    freqs_cis: Any,
    use_real: bool = True,
    use_real_unbind_dim: int = -1,
    sequence_dim: int = 2,
) -> Tensor:
    """Rotate as ``diffusers.models.embeddings.apply_rotary_emb`` does, by its flags."""
    if not use_real:
        freqs = freqs_cis.unsqueeze(2)
        return _rotated(x, freqs.real, freqs.imag, interleaved=True)
    cos, sin = (table.unsqueeze({1: 1, 2: 0}[sequence_dim]) for table in freqs_cis)
    return _by_pairs(x, cos, sin, use_real_unbind_dim)


def by_fewer_flags(
    x: Tensor, freqs_cis: Any, use_real: bool = True, use_real_unbind_dim: int = -1
) -> Tensor:
    """Rotate as Qwen-Image does; complex tables have a row for each token."""
    if not use_real:
        freqs = freqs_cis.unsqueeze(1)
        return _rotated(x, freqs.real, freqs.imag, interleaved=True)
    cos, sin = freqs_cis
    return _by_pairs(x, cos, sin, use_real_unbind_dim)


def by_axis(x: Tensor, freqs_cis: Any, positions: Any) -> Tensor:
    """Allegro: a third of the channels for each coordinate, whose positions pick table rows."""
    ys = []
    for part, (cos, sin), ids in zip(x.chunk(3, dim=-1), freqs_cis, positions, strict=True):
        tables = (table[..., : table.shape[-1] // 2][ids][:, None] for table in (cos, sin))
        ys.append(_rotated(part, *tables, interleaved=False))
    return torch.cat(ys, dim=-1)


def by_angles(t: Tensor, freqs: Tensor) -> Tensor:
    """Stable Audio 3: the last rows of a table of angles, for ``(B, L, H, D)``."""
    phi = freqs[-t.shape[-3] :, : freqs.shape[-1] // 2].float().unsqueeze(1)
    return _rotated(t, phi.cos(), phi.sin(), interleaved=False)


def _by_pairs(x: Tensor, cos: Tensor, sin: Tensor, unbind_dim: int) -> Tensor:
    """Rotate neighbours by repeated tables, or halves by doubled ones."""
    interleaved = {-1: True, -2: False}[unbind_dim]
    pairs = slice(None, None, 2) if interleaved else slice(cos.shape[-1] // 2)
    c, s = (table[..., pairs].to(x.device) for table in (cos, sin))
    return _rotated(x, c, s, interleaved=interleaved)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    flags = {"interleaved": interleaved, "interleaved_out": interleaved}
    return rotation.rotate_all([x], cos, sin, **flags)[0]


def _probes() -> Iterator[tuple[Known, list[tuple[Any, ...]]]]:
    made = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=made, dtype=torch.float32)
    phi = torch.randn(2, 5, 4, generator=made, dtype=torch.float32)
    wide = (WIDEN[form](phi[0]) for form in ("repeated", "doubled"))
    repeated, doubled = ((angles.cos(), angles.sin()) for angles in wide)
    turned, complex_ = x.transpose(1, 2), torch.polar(torch.ones_like(phi), phi)
    tries: list[tuple[Any, ...]] = [(x, repeated), (x, doubled, True, -2)]
    fewer = [*tries, (turned, complex_[0], False)]
    more = [(turned, repeated, True, -1, 1), (turned, doubled, True, -2, 1)]
    said = "real or complex", "as the call says"
    yield Known(*said, by_flags), [*tries, *more, (turned, complex_, False)]
    yield Known(*said, by_fewer_flags), fewer
    axes, rows = torch.cat((x, x, x), dim=-1), torch.tensor([[4, 2, 0, 1, 1]])
    yield (
        Known("by axis, doubled", "half", by_axis),
        [(axes, [doubled] * 3, [rows, rows, 4 - rows])],
    )
    last = WIDEN["doubled"](phi[1])
    yield Known("angles, doubled", "half", by_angles), [(turned, last), (turned[:, 2:], last)]


# Probes are CPU tensors, whatever the caller's default device is.
with torch.device("cpu"):
    PROBES = {
        tuple(inspect.signature(known.function).parameters): (known, tries)
        for known, tries in _probes()
    }
