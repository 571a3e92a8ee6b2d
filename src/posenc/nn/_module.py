"""What every module here is: its constructor's arguments, read-only, and what follows from them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self


class ReadOnlyArguments(nn.Module):
    """A module whose constructor arguments are attributes that do not change.

    What follows from them is worked out once. :meth:`replace` makes another module.
    """

    _arguments: frozenset[str] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._arguments = cls._arguments.union(_parameters(cls))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._arguments and name in self.__dict__:
            who = type(self).__name__
            problem = f"{who}: {name} is read-only once the module is made."
            raise AttributeError(f"{problem}\n  Make another: module.replace({name}=...).")
        super().__setattr__(name, value)

    def replace(self, **arguments: Any) -> Self:
        """A new module with these arguments of the constructor, and this one's for the others.

        Nothing that was learned is taken along.
        """
        return type(self)(**{**self._given(), **arguments})

    def _given(self) -> dict[str, Any]:
        """The arguments of the constructor, by name."""
        return {name: getattr(self, name) for name in _parameters(type(self))}

    def extra_repr(self) -> str:
        """Shown by ``print(module)``: the arguments, without keywords that were left out."""
        kinds = _parameters(type(self))
        return ", ".join(
            f"{name}={_short(value)}"
            for name, value in self._given().items()
            if kinds[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or value
            or value != kinds[name].default
        )


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    return dict(list(inspect.signature(cls.__init__).parameters.items())[1:])  # type: ignore[misc]


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
