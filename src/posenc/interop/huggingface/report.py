"""What a patch replaced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """One rotating function that one module no longer calls.

    Attributes:
        module: Path of the module in the model, as in ``named_modules``.
        cls: Its class.
        function: The function that made way for ours.
        variant: How the model's tables hold their numbers.
        layout: ``half``, ``interleaved``, or ``interleaved to half``.
    """

    module: str
    cls: str
    function: str
    variant: str
    layout: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): {self.function} [{self.variant}; {self.layout}]"


@dataclass(frozen=True, slots=True)
class Table:
    """One rotary module, and where its cosines and sines come from.

    Attributes:
        module: Path of the module in the model.
        cls: Its class.
        form: How a row of our tables holds its numbers; ``unchanged`` where the module makes its
            own tables as before.
        rates: ``from the config``, worked out in float64; or ``its own``, as its buffer holds them.
    """

    module: str
    cls: str
    form: str
    rates: str

    def __str__(self) -> str:
        return f"{self.module} ({self.cls}): tables [{self.form}; rates {self.rates}]"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was replaced.

    Attributes:
        places: One for each module and function that rotates.
        tables: One for each rotary module.
    """

    places: tuple[Place, ...]
    tables: tuple[Table, ...] = ()

    def __str__(self) -> str:
        return "\n".join(map(str, (*self.places, *self.tables)))
