"""The base of all modules: constructor arguments are read-only attributes."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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
            cls._arguments = _parameters(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._arguments and name in self.__dict__ and self.__dict__[name] != value:
            who = type(self).__name__
            problem = f"{who}: {name} is read-only once the module is made."
            raise AttributeError(f"{problem}\n  Make another: module.replace({name}=...).")
        super().__setattr__(name, value)

    def replace(self, **arguments: Any) -> Self:
        """A new module: these constructor arguments, and this module's others.

        Learned parameters are not copied.
        """
        taken = _parameters(type(self))
        if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
            taken = self._arguments
        lost = [name for name in taken if name not in arguments and not hasattr(self, name)]
        if lost:
            who = type(self).__name__
            problem = f"{who}.replace: {', '.join(lost)} must be given, because it was not kept."
            raise TypeError(f"{problem}\n  Pass it, or set an attribute of that name.")
        return type(self)(**{**self._given(taken), **arguments})

    def _given(self, names: Iterable[str]) -> dict[str, Any]:
        """Constructor arguments by name."""
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def extra_repr(self) -> str:
        """The arguments; keyword-only ones if they are True or not the default."""
        return ", ".join(
            f"{name}={_short(value)}"
            for name, value in self._given(self._arguments).items()
            if self._arguments[name].kind is not inspect.Parameter.KEYWORD_ONLY
            or value is True
            or value != self._arguments[name].default
        )


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    return dict(list(parameters.items())[1:])


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else text[:77] + "..."
