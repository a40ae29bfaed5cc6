"""Local data movement of transitions: a whole dim <-> the ranks' shards of it, stacked on a leading rank dim.

    to_stacked:       [.., n, ..] -> [t, .., local, ..]    zeros in the padding; a pure view for a contiguous even cut
    from_stacked:     [t, .., local, ..] -> [.., n, ..]    padding dropped
    apply_transition: one row of placements.TRANSITIONS, given the collectives of an `Ops`

Written once for two uses, through the few calls of `Ops`: on tensors (`collectives.transition` in eager mode) and on graph
nodes (`passes.expand_transitions`, which emits each call). Layouts are flat ([rep, count0, unit0, ...], placements.Layout);
sizes may be SymInts: a symbolic count is taken to need padding (with SymInts nothing here asks whether it does, so that no
size gets specialised), and a symbolic `rep` to differ from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

from megafx.errors import PlacementError

Size = int | SymInt
aten = torch.ops.aten


def same_size(a: Size, b: Size) -> bool:
    """True if two sizes are known to be equal, without specialising them."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return statically_known_true(a == b)


def same_sizes(a: Sequence[Size], b: Sequence[Size]) -> bool:
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b, strict=True))


class Ops:
    """What `apply_transition` is written with, on tensors. x: a tensor here, a graph node in `expand_transitions`."""

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    def shape(self, x: Any) -> Sequence[Size]:
        return x.shape

    def contiguous(self, x: Any) -> Any:
        return x.contiguous()

    def view(self, x: Any, size: Sequence[Size]) -> Any:
        return x if same_sizes(self.shape(x), size) else self.call(aten.view.default, x, [*size])

    def pad_rows(self, x: Any, rows: Size) -> Any:
        """[n, ...] -> [rows, ...] with zeros behind; x itself where n is rows already."""
        if same_size(x.shape[0], rows):
            return x
        return self.call(aten.cat.default, [x, x.new_zeros([rows - x.shape[0], *x.shape[1:]])])

    def split_head_tail(self, x: Any, dim: int, t: int, local: Size) -> Any:
        """[.., n, ..] -> [t, .., local, ..] contiguous: of 2t ranges those r and 2t - 1 - r, zeros in the padding."""
        out = x.new_empty([t, *x.shape[:dim], local, *x.shape[dim + 1 :]])
        if x.shape[dim] < t * local:
            out.zero_()
        _copy_ranges(out, x, dim, into_parts=True)
        return out

    def join_head_tail(self, x: Any, dim: int, n: Size) -> Any:
        """[t, .., local, ..] -> [.., n, ..] contiguous: inverse of split_head_tail."""
        out = x.new_empty([*x.shape[1 : dim + 1], n, *x.shape[dim + 2 :]])
        _copy_ranges(x, out, dim, into_parts=False)
        return out

    def rank_select(self, x: Any) -> Any:
        """[t, ...] -> [...]: this rank's entry."""
        raise NotImplementedError

    def rank_place(self, x: Any, t: int) -> Any:
        """[...] -> [t, ...]: x at this rank's entry, zeros elsewhere."""
        raise NotImplementedError

    def rank0_only(self, x: Any) -> Any:
        raise NotImplementedError

    def all_reduce(self, x: Any, op: str = "sum") -> Any:
        """op: 'sum' or 'max'."""
        raise NotImplementedError

    def all_gather(self, x: Any, t: int) -> Any:
        """[n, ...] -> [t*n, ...], rank by rank."""
        raise NotImplementedError

    def reduce_scatter(self, x: Any, t: int) -> Any:
        """[t*n, ...] -> [n, ...]."""
        raise NotImplementedError

    def all_to_all(self, x: Any, t: int) -> Any:
        """[t, ...] -> [t, ...]: entry r goes to rank r and comes from rank r."""
        raise NotImplementedError


def _copy_ranges(parts: torch.Tensor, whole: torch.Tensor, dim: int, *, into_parts: bool) -> None:
    """Between each rank's two ranges, [t, .., local, ..], and where they are in the whole, [.., n, ..]."""
    t, half, pairs = parts.shape[0], parts.shape[dim + 1] // 2, list[tuple[torch.Tensor, torch.Tensor]]()
    for i in range(2 * t):
        length = min(half, whole.shape[dim] - i * half)
        if length > 0:
            part = parts[i] if i < t else parts[2 * t - 1 - i]
            pairs.append((part.narrow(dim, half * (i >= t), length), whole.narrow(dim, i * half, length)))
    if pairs:
        of_parts, of_whole = ([*x] for x in zip(*pairs, strict=True))
        torch._foreach_copy_(*((of_parts, of_whole) if into_parts else (of_whole, of_parts)))  # to, from


TENSORS = Ops()


class Cut:
    """A flat layout read on t ranks. blocks: (elements, elements on each rank, padded) of each block."""

    def __init__(self, flat: Sequence[Size], t: int) -> None:
        self.rep, *rest = flat
        self.head_tail = len(rest) % 2 == 1
        chunks = 2 * t if self.head_tail else t
        if self.head_tail:
            del rest[-1]
        self.repeated = not (isinstance(self.rep, int) and self.rep == 1)
        self.blocks = []
        for count, unit in zip(rest[::2], rest[1::2], strict=True):
            padded = not isinstance(count, int) or count % chunks != 0
            per_rank = (count + (chunks - 1)) // chunks * (chunks // t)
            self.blocks.append((count * unit, per_rank * unit, padded))

    @property
    def size(self) -> Size:
        return self.rep * sum(whole for whole, _, _ in self.blocks)

    @property
    def local_size(self) -> Size:
        return self.rep * sum(local for _, local, _ in self.blocks)


def _slice(ops: Ops, x: Any, dim: int, start: Size, length: Size) -> Any:
    if isinstance(start, int) and start == 0 and same_size(ops.shape(x)[dim], length):
        return x
    return ops.call(aten.slice.Tensor, x, dim, start, start + length)


def _permute(ops: Ops, x: Any, source: int, target: int) -> Any:
    """Move dim `source` to position `target`."""
    if source == target:
        return x
    order = list(range(len(ops.shape(x))))
    order.insert(target, order.pop(source))
    return ops.call(aten.permute.default, x, order)


def _blocks_by_rank(x: Any, dim: int, cut: Cut, t: int, ops: Ops) -> list[Any]:
    """Each block as [t, .., (rep,) local, ..]; `(rep,)` only where the pattern of blocks repeats."""
    shape = [*ops.shape(x)]
    pre, post = shape[:dim], shape[dim + 1 :]
    if cut.repeated:
        x = ops.view(x, [*pre, cut.rep, sum(whole for whole, _, _ in cut.blocks), *post])
        pre = [*pre, cut.rep]
    at, found = len(pre), []
    start: Size = 0
    for whole, local, padded in cut.blocks:
        block = x if len(cut.blocks) == 1 else _slice(ops, x, at, start, whole)
        start = start + whole
        if cut.head_tail:
            found.append(ops.split_head_tail(block, at, t, local))
            continue
        if padded and at == 0:
            block = ops.pad_rows(block, t * local)
        elif padded:
            zeros = ops.call(aten.new_zeros.default, block, [*pre, t * local - whole, *post])
            block = ops.call(aten.cat.default, [block, zeros], at)
        found.append(_permute(ops, ops.view(block, [*pre, t, local, *post]), at, 0))
    return found


def _join(blocks: list[Any], dim: int, repeated: bool, ops: Ops) -> Any:
    """Blocks [.., (rep,) local_b, ..] -> [.., rep * local, ..] with the result's dim at `dim`."""
    x = blocks[0] if len(blocks) == 1 else ops.call(aten.cat.default, blocks, dim + repeated)
    if not repeated:
        return x
    shape = [*ops.shape(x)]
    return ops.view(ops.contiguous(x), [*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :]])


def to_stacked(x: Any, dim: int, layout: Sequence[Size], t: int, ops: Ops = TENSORS) -> Any:
    """x: [.., n, ..] whole -> [t, .., local, ..]: entry r is what rank r holds, zeros in its padding."""
    cut = Cut(layout, t)
    return _join(_blocks_by_rank(x, dim, cut, t, ops), dim + 1, cut.repeated, ops)


def slice_of_rank(x: Any, dim: int, layout: Sequence[Size], t: int, ops: Ops) -> Any:
    """x: [.., n, ..] whole -> [.., local, ..]: to_stacked of which only this rank's entry is made."""
    cut = Cut(layout, t)
    return _join([ops.rank_select(b) for b in _blocks_by_rank(x, dim, cut, t, ops)], dim, cut.repeated, ops)


def from_stacked(stacked: Any, dim: int, layout: Sequence[Size], t: int, ops: Ops = TENSORS) -> Any:
    """[t, .., local, ..] -> [.., n, ..] whole and contiguous; inverse of to_stacked, whatever the padding holds."""
    cut = Cut(layout, t)
    shape = [*ops.shape(stacked)][1:]
    pre, post = shape[:dim], shape[dim + 1 :]
    if cut.repeated:
        pre = [*pre, cut.rep]
        stacked = ops.view(stacked, [t, *pre, sum(local for _, local, _ in cut.blocks), *post])
    at, blocks = len(pre), []
    start: Size = 0
    for whole, local, padded in cut.blocks:
        block = stacked if len(cut.blocks) == 1 else _slice(ops, stacked, at + 1, start, local)
        start = start + local
        if cut.head_tail:
            blocks.append(ops.join_head_tail(block, at, whole))
            continue
        block = ops.view(ops.contiguous(_permute(ops, block, 0, at)), [*pre, t * local, *post])
        blocks.append(_slice(ops, block, at, 0, whole) if padded else block)
    return ops.contiguous(_join(blocks, dim, cut.repeated, ops))


def is_identity(src: str, dst: str, src_layout: Sequence[Size], dst_layout: Sequence[Size], t: int) -> bool:
    """True if every rank's value stays as it is."""
    if t == 1 or {src, dst} == {"I", "R"}:
        return True
    return src == dst and same_sizes(src_layout, dst_layout)


def shape_after(
    shape: Sequence[Size], src: str, dst: str, src_layout: Sequence[Size], dst_layout: Sequence[Size], t: int
) -> list[Size]:
    """Local shape after a transition of a local value."""
    out = [*shape]
    if is_identity(src, dst, src_layout, dst_layout, t):
        return out
    if src[0] == "S":
        out[int(src[1:])] = Cut(src_layout, t).size
    if dst[0] == "S":
        out[int(dst[1:])] = Cut(dst_layout, t).local_size
    return out


def apply_transition(
    x: Any, src: str, dst: str, src_layout: Sequence[Size], dst_layout: Sequence[Size], t: int, ops: Ops
) -> Any:
    """x: a rank's local value at src -> its local value at dst. Identities return x itself, all else is contiguous."""
    if is_identity(src, dst, src_layout, dst_layout, t):
        return x
    match src[0] + dst[0]:
        case "PI" | "PR":
            return ops.all_reduce(ops.contiguous(x))
        case "MR":
            return ops.all_reduce(ops.contiguous(x), "max")
        case "SI" | "SR":
            return _gather(x, int(src[1:]), src_layout, t, ops)
        case "PS":
            stacked = ops.contiguous(to_stacked(x, int(dst[1:]), dst_layout, t, ops))
            _, first, *rest = ops.shape(stacked)
            return ops.reduce_scatter(ops.view(stacked, [t * first, *rest]), t)
        case "SS" if src != dst:
            stacked = ops.contiguous(to_stacked(x, int(dst[1:]), dst_layout, t, ops))
            return from_stacked(ops.all_to_all(stacked, t), int(src[1:]), src_layout, t, ops)
        case "SS":  # another cut of the same dim: no equal parts to exchange
            whole = _gather(x, int(src[1:]), src_layout, t, ops)
            return slice_of_rank(whole, int(dst[1:]), dst_layout, t, ops)
        case "IS" | "RS":
            return slice_of_rank(x, int(dst[1:]), dst_layout, t, ops)
        case "SP":
            return from_stacked(ops.rank_place(x, t), int(src[1:]), src_layout, t, ops)
        case "IP" | "RP":
            return ops.rank0_only(ops.contiguous(x))
    raise PlacementError(f"no transition from {src} to {dst}", fix="placements.TRANSITIONS lists those that exist")


def _gather(x: Any, dim: int, layout: Sequence[Size], t: int, ops: Ops) -> Any:
    shape = ops.shape(x)
    gathered = ops.all_gather(ops.contiguous(x), t)
    return from_stacked(ops.view(gathered, [t, *shape]), dim, layout, t, ops)
