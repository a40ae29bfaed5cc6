"""Which keys a mask of attention shows: causal, windows, documents, padding, and what rows become that see none.

read_visible(MaskReader(program), mask, visible=True, symmetric=True) -> Visible | None
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import fx

from megafx.analysis.masks import (
    Choice,
    Cond,
    Index,
    Leaf,
    MaskReader,
    Sum,
    condition_of,
    conjuncts,
    counts_runs,
    hides,
)
from megafx.ir.nodes import op_name
from megafx.ir.program import VAL, Input, Program


@dataclass
class Visible:
    """What a mask lets be seen."""

    causal: bool = False
    window: int = 0
    padding: list[tuple[Leaf, bool]] = field(default_factory=list)  # (tensor, whether True is visible)
    segments: Leaf | None = None  # ids of documents, whose queries see their own keys; the view of the keys
    fill: float = -math.inf  # what hidden scores become, or have added
    rest: tuple[Leaf, ...] = ()  # tensors that are added
    exact: bool = True  # a row that sees no key has `fill` throughout
    replaced: bool = False  # where `fill` hides, `rest` is not added
    parts: tuple[Cond, ...] = ()  # conditions that all hold where a key is seen

    @property
    def by_position(self) -> bool:
        return self.causal or self.window > 0


def read_visible(reader: MaskReader, mask: fx.Node, visible: bool, symmetric: bool) -> Visible | None:
    """What the mask shows. visible: what True of a boolean mask means; symmetric: windows reach both ways."""
    value = reader.value_of(mask)
    shown, seen = condition_of(value), Visible()
    if shown is not None and not visible:
        shown = Cond("not", (shown,))
    if isinstance(value, Sum):
        value, seen.rest, seen.replaced = value
    if isinstance(value, Choice) and not isinstance(value.on, bool):
        seen.exact = not value.mixed
        if value.on == 0 and hides(value.off):
            shown, seen.fill = value.where, float(value.off)
        elif value.off == 0 and hides(value.on):
            shown, seen.fill = Cond("not", (value.where,)), float(value.on)
    parts = None if shown is None else conjuncts(shown)
    if parts is None:
        return None
    seen.parts = tuple(parts)
    return seen if _sorted(reader, seen, symmetric) else None


def _sorted(reader: MaskReader, seen: Visible, symmetric: bool) -> bool:
    """Fill in causal, window and padding; False where a condition is none of them."""
    back, ahead = 0, 0  # keys before and after the query that are seen, plus one
    for part in sorted(seen.parts, key=lambda part: part.kind == "order"):  # once segments are known
        if part.kind in ("leaf", "not"):
            leaf = (part if part.kind == "leaf" else part.of[0]).of[0]
            if not isinstance(leaf, Leaf) or any(d not in (None, -1, -4) for d in leaf.dims):
                return False
            seen.padding.append((leaf, part.kind == "leaf"))
            continue
        if part.kind == "same":
            keys = _of_keys(*part.of)
            if keys is None or seen.segments not in (None, keys):
                return False
            seen.segments = keys
            continue
        index = _by_place(reader, seen.segments, *part.of) if part.kind == "order" else part.of[0]
        if index is None:
            return False
        if index.terms == ((-2, -1), (-1, 1)):  # key - query + constant <= 0
            if index.constant > 0:
                return False
            if index.constant == 0:
                seen.causal = True
            else:
                ahead = min(ahead or 1 - index.constant, 1 - index.constant)
        elif index.terms == ((-2, 1), (-1, -1)) and index.constant <= 0:  # query - key + constant <= 0
            back = min(back or 1 - index.constant, 1 - index.constant)
        else:
            return False
    if not seen.causal and (back != ahead or (back and not symmetric)):
        return False
    seen.window = back
    return True


def _of_keys(a: Leaf, b: Leaf) -> Leaf | None:
    """Of two views of one tensor, the one along keys, where the other is the same along queries; else None."""
    for queries, keys in ((a, b), (b, a)):
        along = tuple(-2 if d == -1 else d for d in keys.dims)
        if -1 in keys.dims and queries.dims == along and all(d in (None, -2, -4) for d in along):
            return keys
    return None


def _by_place(reader: MaskReader, segments: Leaf | None, a: Leaf, b: Leaf, number: int) -> Index | None:
    """a - b + number, of places in documents that `segments` counts, as positions: within a document they differ alike."""
    keys = _of_keys(a, b)
    if (
        keys is None
        or segments is None
        or keys.dims != segments.dims
        or not counts_runs(reader, segments.node, keys.node)
    ):
        return None
    sign = 1 if keys is a else -1
    return Index(((-2, -sign), (-1, sign)), number)


LARGE = 5000.0  # numbers from here on may hide scores


def may_hide(program: Program, leaves: tuple[Leaf, ...]) -> bool:
    """True if tensors that are added to scores may hold a mask: a large number is in them, or values of a call or a buffer.

    What depends on parameters is a bias.
    """
    inputs, seen = dict(program.input_nodes()), set()
    todo = [leaf.node for leaf in leaves]
    while todo:
        node = todo.pop()
        if node in seen or not isinstance(node.meta.get(VAL), torch.Tensor):  # a size, which is no value
            continue
        seen.add(node)
        spec = inputs.get(node)
        if spec is not None:
            floating = node.meta[VAL].is_floating_point()
            if floating and (spec.kind == "user" or (spec.kind != "param" and not _small(program, spec))):
                return True
            continue
        numbers = [
            a for a in (*node.args, *node.kwargs.values()) if isinstance(a, (int, float)) and not isinstance(a, bool)
        ]
        counts = op_name(node) in ("arange", "slice", "select") if node.op == "call_function" else True
        if not counts and any(abs(a) >= LARGE for a in numbers):
            return True
        todo += node.all_input_nodes
    return False


def masked_before(program: Program, scores: fx.Node) -> bool:
    """True if a mask may be in scores already: one of their own is filled, or added to them."""
    while op_name(scores) in ("add", "mul", "div", "to", "reshape", "view"):
        if op_name(scores) == "add":
            both = [a for a in scores.args[:2] if isinstance(a, fx.Node)]
            made = [a for a in both if op_name(a) in (*_SCORES, "add", "mul", "div", "to", "reshape", "view")]
            others = [a for a in both if a is not (made or both)[0]]
            if may_hide(program, tuple(Leaf(a, ()) for a in others)):
                return True
            scores = (made or both)[0]
        else:
            scores = scores.args[0]
    return op_name(scores) in ("masked_fill", "where")


_SCORES = ("matmul", "bmm", "baddbmm", "masked_fill", "where")


def _small(program: Program, spec: Input) -> bool:
    """True if a buffer or constant holds one number, and no large one."""
    kind, name = spec.kind, spec.name
    if kind == "constant":
        value = program.constants[name]
        return bool(value.numel() == 0 or value.abs().max() < LARGE)
    table = program.table(name) if kind == "buffer" else None
    return isinstance(table, (int, float)) and abs(table) < LARGE
