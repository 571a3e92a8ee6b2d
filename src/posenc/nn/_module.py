"""The base of all modules: constructor arguments are read-only attributes."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self


class ReadOnlyArguments(nn.Module):
    """A module whose constructor arguments, which decide its tables, are read-only attributes.

    Arguments that a user's subclass adds may change.
    """

    _arguments: ClassVar[dict[str, inspect.Parameter]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if cls.__module__.startswith("posenc."):
            cls._arguments = dict(inspect.signature(cls).parameters)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._arguments and name in self.__dict__ and self.__dict__[name] != value:
            who = type(self).__name__
            problem = f"{who}: {name} is read-only once the module is made."
            raise AttributeError(f"{problem}\n  Call module.replace({name}=...) for a new module.")
        super().__setattr__(name, value)

    def replace(self, **arguments: Any) -> Self:
        """A new module with this one's constructor arguments, except for those passed here.

        Learned parameters are not copied. A subclass whose constructor takes other arguments
        overrides this.
        """
        return type(self)(**{**self._argument_values(), **arguments})

    def _argument_values(self) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in self._arguments}

    def extra_repr(self) -> str:
        """The arguments; of keyword-only ones, those that are True or differ from the default."""
        return ", ".join(
            f"{name}={_short(value)}"
            for name, value in self._argument_values().items()
            if self._arguments[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or value is True
            or value != self._arguments[name].default
        )


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
