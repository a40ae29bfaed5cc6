"""Union-find. By hand: networkx has one, and takes 0.2 s to import, which every start would pay."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Groups(Generic[Item]):
    """Items that were joined, directly or by others, are in one group. An item that was joined to none is one by itself."""

    def __init__(self) -> None:
        self._above: dict[Item, Item] = {}  # the first item of a group is above itself

    def __getitem__(self, item: Item) -> Item:
        """The first of the item's group: the same for all items of it."""
        above = self._above.setdefault(item, item)
        while above != self._above[above]:  # halves the way for those who come after
            self._above[item] = self._above[above]
            item, above = above, self._above[above]
        return above

    def join(self, item: Item, *others: Item) -> None:
        first = self[item]
        for other in others:
            self._above[self[other]] = first

    def all(self) -> list[set[Item]]:
        found: dict[Item, set[Item]] = {}
        for item in [*self._above]:
            found.setdefault(self[item], set()).add(item)
        return [*found.values()]
