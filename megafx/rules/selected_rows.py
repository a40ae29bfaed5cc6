"""What ranks hold of rows that each selects of its own: tokens of an expert, by a mask of the tokens.

    %at = rows(%mask)                        # mask S0: each rank has the places in its part of the mask
    %r = select(%at, 1, 0)                   # S0, of numbers that count the rank's own rows
    %x = index(%tokens, [%r])                # tokens S0 -> S0: the rows that the rank selects
    %o = index_add(%out, 0, %r, %y)          # out S0, y S0 -> S0

The rows that a rank selects are as many as the data says. Those of all ranks together are the rows that one process selects, in
some order. Their numbers mean something on the rank alone, so they may index values that are cut along the same dim, and
nothing else. Sharding rules have no word for that: an op has two dims here that are cut at once.

Rows that arrive at the ranks of their experts (kernels/experts/dispatch_rows.py) are such rows, too: all ranks together have
those of all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from megafx.ir.nodes import COPIES, SHAPED, argument, op_name
from megafx.placements.types import Layout, Placement, R, S
from megafx.placements.views import view_options
from megafx.rules.families import VIEWS

_READS = ("index", "_unsafe_index", "index_select")
_WRITES = ("index_add", "index_put", "_unsafe_index_put")
# What is of tokens that travel, and of those that arrive.
_OF_TOKENS = ("tokens_to_ranks", "places_of")
_TRAVEL = (
    *_OF_TOKENS, "tokens_sent", "experts_received", "received_rows", "ends_received", "rows_of_tokens", "dispatch_rows",
    "combine_rows",
)  # fmt: skip


class NotOwnRows(Exception):
    """Numbers of a rank's own rows are used as if they were those of all ranks. Its text: what the op does with them."""


class SelectedRows:
    """On one axis. facts: what ranks hold of a value (each reading of it is true); shape: of what all ranks hold together, as
    structural sizes; count: how many rows are selected, likewise; same: whether a value is the same all along a dim."""

    def __init__(
        self,
        ranks: int,
        facts: Callable[[fx.Node], tuple[Placement, ...]],
        shape: Callable[[fx.Node], tuple[int, ...]],
        count: Callable[[fx.Node], int],
        same: Callable[[fx.Node, int], bool],
    ) -> None:
        self.ranks, self.facts, self.shape, self.count, self.same = ranks, facts, shape, count, same
        self.places: dict[fx.Node, int] = {}  # results of `rows` -> the dim of the mask that is cut
        # numbers of a rank's own rows -> the mask, the dim that is cut
        self.numbers: dict[fx.Node, tuple[fx.Node, int]] = {}
        self.masks: dict[int, fx.Node] = {}  # number of selected rows -> the mask
        # numbers and places of tokens that travel -> how choices and tokens are cut
        self.tokens: dict[fx.Node, tuple[Placement, Placement]] = {}
        self.joined: dict[int, tuple[int, ...]] = {}  # number of rows of several masks, one below the other -> of each

    def typed(self, node: fx.Node) -> Placement | None:
        """Placement of a result; None for an op that has nothing to do with selected rows. Raises NotOwnRows."""
        name, args = op_name(node), node.args
        if name == "rows":
            return self._places(node)
        if name in _TRAVEL:
            return self._travels(node)
        if name == "cat" and self._are_selected(node):
            return self._below(node)
        source: Any = args[0] if args else None
        if source in self.places:
            return self._column(node, source)
        no_data = node.target in SHAPED or name == "group_of_rows"
        if no_data or not any(a in self.numbers for a in node.all_input_nodes):
            return None
        if source in self.numbers and (node.target in COPIES or name == "detach"):
            self.numbers[node] = self.numbers[source]
            return self.fact(source)
        if name in _READS + _WRITES and source not in self.numbers:
            indices, first = self._indices(node)
            return self._indexed(node, source, indices, first)
        raise NotOwnRows(f"{name} of them")

    def _places(self, node: fx.Node) -> Placement | None:
        mask = node.args[0]
        held = self.fact(mask)
        if not held.is_shard:
            return None
        count = self.count(node)
        other = self.masks.setdefault(count, mask)
        if not _alike(other, mask):
            raise NotOwnRows("as many of them are taken as another mask selects, which need not be so on each rank")
        self.places[node] = held.dim
        return S(0, Layout.contiguous(count, self.ranks))

    def _travels(self, node: fx.Node) -> Placement:
        """Where a rank's tokens go is its own affair, and no value that others have a part of. Sums come home as tokens lie."""
        given = node.args
        name, source = op_name(node), self.fact(given[0])
        if name == "places_of":
            self.tokens[node] = self.tokens[given[0]]
        if name == "tokens_to_ranks":
            of_ids: tuple[int, ...] = self.shape(given[0])
            views = (
                view_options(of_ids, (of_ids[0] // given[1], given[1]), 0, source.cut, self.ranks)
                if source.is_shard
                else []
            )
            self.tokens[node] = source, next((S(*view) for view in views), source)
        if name in (*_OF_TOKENS, "ends_received"):
            return R
        if name in ("dispatch_rows", "combine_rows") and not source.is_shard and not self.same(given[0], 0):
            raise NotOwnRows(f"{name} of rows that are {source}")
        home = self.tokens[given[1]][0 if argument(node, "entries") else 1] if name == "combine_rows" else R
        return home if home.is_shard else S(0, Layout.contiguous(self.count(node), self.ranks))

    def _are_selected(self, node: fx.Node) -> bool:
        parts = node.args[0]
        dim = int(argument(node, "dim")) % max(node.meta["val"].dim(), 1)
        each = [self.fact(part) for part in parts]
        return all(p.is_shard and p.dim == dim and p.cut.size in self.masks for p in each)

    def _below(self, node: fx.Node) -> Placement:
        """Rows of several masks, one below the other."""
        parts = node.args[0]
        held = [self.fact(part) for part in parts]
        counts = tuple(p.cut.size for p in held)
        if self.joined.setdefault(sum(counts), counts) != counts:
            raise NotOwnRows("as many of them are taken as other masks select, which need not be so on each rank")
        sources = [self.numbers[part] for part in parts if part in self.numbers]
        if sources:
            mask, cut = sources[0]
            alike = len(sources) == len(parts) and all(self.shape(m)[c] == self.shape(mask)[cut] for m, c in sources)
            if not alike:
                raise NotOwnRows("cat of them and of other numbers")
            self.numbers[node] = mask, cut
        return S(held[0].dim, Layout.contiguous(sum(counts), self.ranks))

    def _column(self, node: fx.Node, places: fx.Node) -> Placement:
        """One column of the places, or all of a mask of one dim."""
        mask = places.args[0]
        cut, name = self.places[places], op_name(node)
        alone = mask.meta["val"].dim() == 1
        if node.target in COPIES or name == "detach":
            self.places[node] = cut
        elif name == "select" and argument(node, "dim") == 1:
            if int(argument(node, "index")) % mask.meta["val"].dim() == cut:
                self.numbers[node] = mask, cut
        elif alone and str(node.target) in VIEWS and node.meta["val"].dim() == 1:
            self.numbers[node] = mask, cut
        else:
            raise NotOwnRows(f"{name} of their places")
        return self.fact(places)

    def _indices(self, node: fx.Node) -> tuple[dict[int, fx.Node], int]:
        """(dim of the indexed value -> its index, the dim of the indices in the result, or in what is written)."""
        if op_name(node) in ("index_select", "index_add"):
            dim = int(argument(node, "dim")) % max(node.args[0].meta["val"].dim(), 1)
            return {dim: argument(node, "index")}, dim
        given = {d: index for d, index in enumerate(argument(node, "indices")) if index is not None}
        dims = sorted(given)
        if dims != list(range(dims[0], dims[-1] + 1)) or any(a.meta["val"].dim() != 1 for a in given.values()):
            raise NotOwnRows(f"{op_name(node)} by them and by indices of several dims")
        return given, dims[0]

    def _indexed(self, node: fx.Node, source: fx.Node, indices: dict[int, fx.Node], first: int) -> Placement:
        name = op_name(node)
        own = [d for d, index in indices.items() if index in self.numbers]
        if len(own) != 1:
            raise NotOwnRows(f"{name} by them where they are no index, or two")
        dim, numbers = own[0], indices[own[0]]
        mask, cut = self.numbers[numbers]
        length, selected = self.shape(mask)[cut], self.fact(numbers).cut
        whole = S(dim, Layout.contiguous(length, self.ranks))
        there = self.shape(source)[dim]
        if there != length and (self.fact(source).is_shard or there * self.ranks != length):
            raise NotOwnRows(f"{name} of a dim of another length by them")
        if not self._is(source, whole):
            raise NotOwnRows(f"{name} by them of a value that is {self.fact(source)}")
        others = [index for d, index in indices.items() if d != dim]
        if not all(self._is(index, S(0, selected)) for index in others):
            raise NotOwnRows(f"{name} by them and by other indices")
        if name in _READS:
            return S(first, selected)
        value: Any = argument(node, "source" if name == "index_add" else "values")
        rows = len(value.meta["val"].shape) - (len(source.meta["val"].shape) - len(indices)) - 1 + first
        if rows >= 0 and not self._is(value, S(rows, selected)):
            raise NotOwnRows(f"{name} by them of values that are {self.fact(value)}")
        return whole

    def _is(self, node: fx.Node, wanted: Placement) -> bool:
        return wanted in self.facts(node) or (not self.fact(node).is_shard and self.same(node, wanted.dim))

    def fact(self, node: fx.Node) -> Placement:
        facts = self.facts(node)
        return next((fact for fact in facts if fact.is_shard), facts[0])


def _alike(a: Any, b: Any) -> bool:
    """True if two values are computed in the same way."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return bool(a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b))
    if a.target is not b.target or a.op == "placeholder" or len(a.args) != len(b.args) or a.kwargs != b.kwargs:
        return False
    return all(
        len(x) == len(y) and all(map(_alike, x, y))
        if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple))
        else _alike(x, y)
        for x, y in zip(a.args, b.args, strict=True)
    )
