"""Objects that are compared by value."""

from __future__ import annotations


class ByValue:
    """Base class: two objects are equal if their class and attributes are, fields or not.

    Rules and axes are part of the keys of tables.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(vars(self).items())))
