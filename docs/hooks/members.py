"""An extension of griffe, which reads the sources for the API pages without running them.

It sees the methods that a function makes, and puts the members of a class in order.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

try:
    from griffe import Docstring, Extension, Function, Parameters
except ImportError:  # The suite reads this file without the docs extra.
    Extension = object


class Members(Extension):
    """Methods and properties that are made by a call, and the order of all members."""

    def on_attribute_instance(self, *, node: Any, attr: Any, **_: Any) -> None:
        """Read ``attention = called(forward)`` and ``cos_cached = shown_table(0, "Cosines")``."""
        if not isinstance(getattr(node, "value", None), ast.Call):
            return
        maker, arguments = ast.unparse(node.value.func), node.value.args
        if maker == "shown_table":
            attr.docstring = Docstring(arguments[1].value, parent=attr)
            attr.value, attr.labels = None, {"property"}
        elif maker == "called":
            forward = attr.parent.members[arguments[0].id]
            method = Function(
                attr.name,
                parameters=Parameters(*forward.parameters),
                returns=forward.returns,
                lineno=attr.lineno,
            )
            attr.parent.set_member(attr.name, method)
            method.docstring = Docstring(
                "The same as calling the module: :meth:`forward`.", parent=method
            )

    def on_package(self, *, pkg: Any, **_: Any) -> None:
        """Name the members of each class in the order in which its page shows them."""
        for each in _classes(pkg):
            each.exports = in_order([list(base.members) for base in (each, *each.mro())])


def in_order(members: list[list[str]]) -> list[str]:
    """What a call does first, then the class's own members, then those of each base.

    Examples:
        >>> in_order([["slopes", "forward"], ["replace", "attention", "forward"]])
        ['forward', 'attention', 'slopes', 'replace']
    """
    names = list(dict.fromkeys(name for each in members for name in each))
    first = [name for name in ("forward", "attention") if name in names]
    return [*first, *(name for name in names if name not in first)]


def _classes(scope: Any) -> Iterator[Any]:
    for name, member in list(scope.members.items()):
        if member.is_alias:
            continue
        if member.is_module:
            yield from _classes(member)
            # A function in a file of its name, ``polar``, which griffe takes for the file.
            if name in member.members and name in map(str, scope.exports or []):
                scope.set_member(name, member.members[name])
        elif member.is_class:
            yield member
