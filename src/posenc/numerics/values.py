"""Descriptions that are compared by value."""

from __future__ import annotations


class ByValue:
    """Equal to another of its class that holds the same: rules and axes are keys of tables.

    Everything counts that an instance holds, whether it is a field of a dataclass or not.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(vars(self).items())))
