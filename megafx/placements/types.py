"""Placements: the type of a tensor value on one mesh axis. No torch import.

    I          invariant: every rank holds the same value; its gradient is the same and complete on every rank
    R          replicate: every rank holds the same value; its gradient is a partial sum on every rank
    S(d, L)    shard: every rank holds a slice of dim d, cut as layout L says; its gradient likewise
    P          partial: ranks hold summands; its gradient is the same and complete on every rank
    M          maxima: ranks hold candidates, the value is the largest of each element; values only, there is no gradient

One kind of shard is for parameters only:

    Owned      a shard whose part on one rank, the owner, is the whole: a parameter of an expert that only this rank holds

Several axes may cut a parameter: tensor-parallel ranks, those that share out experts, then data-parallel ranks each shard's
rows again. `Cuts` has a placement for each.

A `Layout` says how one dim is cut over the `t` ranks of the axis. The dim is `rep` equal repeats of a pattern of blocks;
each block is `count` units of `unit` consecutive elements; each block is split over the ranks by whole units, rank r
taking units [r*c, (r+1)*c) with c = ceil(count / t). Where t does not divide count, the last ranks hold padding, so that
every rank's local dim has the same length: rep * sum(ceil(count/t) * unit). Examples:

    contiguous dim of n            rep 1, blocks ((n, 1),)
    25 heads of 64                 rep 1, blocks ((25, 64),)                 a head stays whole
    fused q|k|v of C each          rep 3, blocks ((heads, d),)
    fused q|k|v of unequal sizes   rep 1, blocks ((n, d), (kv, d), (kv, d))
    flattened batch x sequence     rep b, blocks ((s, 1),)                   sharded on the sequence

A head-tail layout splits each block into 2t chunks of ceil(count / 2t) units; rank r takes chunks r and 2t-1-r, in this order.
So queries of causal attention see as many keys on every rank (Llama 3 report, arXiv 2407.21783, 3.3.2).

Sizes are plain integers. Dynamic sizes enter as structural integers (`ir.Sizes`): large primes in place of symbols,
so products and equality mean the same as on the symbolic expressions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SYMBOLIC_PADDING = 1e-6  # padding below this share is that of a symbolic count (a large prime), so not known


class Block(NamedTuple):
    """`count` units of `unit` consecutive elements; a unit is never cut."""

    count: int  # type: ignore[assignment]  # hides tuple.count, which means nothing here
    unit: int

    @property
    def size(self) -> int:
        return self.count * self.unit


class Piece(NamedTuple):
    """`length` elements at `local_start` of a rank's dim are those at `global_start` of the whole dim."""

    global_start: int
    local_start: int
    length: int


@dataclass(frozen=True)
class Layout:
    """How one dim is cut over the ranks of an axis; see the module docstring. Build with `Layout.of`."""

    rep: int
    blocks: tuple[Block, ...]
    head_tail: bool = False

    @staticmethod
    def of(blocks: Iterable[tuple[int, int]], t: int, rep: int = 1, head_tail: bool = False) -> Layout:
        """The canonical layout on t ranks: equal cuts compare equal.

        A block that t divides is written as t units (only the cut points matter), and a periodic list of blocks as one
        period repeated; head-tail: 2t units.
        """
        parts = 2 * t if head_tail else t
        cut = tuple(Block(parts, c * u // parts) if c % parts == 0 else Block(c, u) for c, u in blocks)
        n = len(cut)
        period = next(p for p in range(1, n + 1) if n % p == 0 and cut == cut[:p] * (n // p))
        return Layout(rep * (n // period), cut[:period], head_tail)

    @staticmethod
    def contiguous(n: int, t: int) -> Layout:
        return Layout.of([(n, 1)], t)

    @property
    def pattern_size(self) -> int:
        return sum(b.size for b in self.blocks)

    @property
    def size(self) -> int:
        """Length of the whole (logical) dim."""
        return self.rep * self.pattern_size

    def local_size(self, t: int) -> int:
        """Length of every rank's dim, padding included."""
        return self.rep * sum(self.local_block(b, t) for b in self.blocks)

    def chunks(self, t: int) -> int:
        """Into how many equal parts, padding included, a block is split."""
        return 2 * t if self.head_tail else t

    def local_block(self, block: Block, t: int) -> int:
        """Length of a block on every rank, padding included."""
        chunks = self.chunks(t)
        return -(-block.count // chunks) * block.unit * (chunks // t)

    def padding(self, t: int) -> float:
        """Elements held by all ranks together, per element of the dim: 1 for an even cut, 4 for 2 units on 8 ranks."""
        held = self.local_size(t) * t / self.size
        return held if held > 1 + SYMBOLIC_PADDING else 1.0

    def padded(self, t: int) -> bool:
        """True if some rank holds padding (a symbolic count, being prime, counts as padded)."""
        return any(b.count % self.chunks(t) for b in self.blocks)

    def simple(self) -> bool:
        """One block, not repeated: rank r holds one contiguous range of the dim."""
        return self.rep == 1 and len(self.blocks) == 1 and not self.head_tail

    def contiguous_shards(self, t: int) -> bool:
        """The shards in rank order, one after another, are the dim itself (torch.chunk's layout)."""
        return self.simple() and not self.padded(t)

    def cuts_alike(self, other: Layout, t: int) -> bool:
        """True if every rank holds the same pieces and as much padding: 40 units of 1 and 20 of 2 on 7 ranks.

        For static sizes; a structural integer may agree by chance.
        """
        if (self.size, self.local_size(t)) != (other.size, other.local_size(t)):
            return False
        return all([*self.pieces(r, t)] == [*other.pieces(r, t)] for r in range(t))

    def pieces(self, rank: int, t: int) -> Iterator[Piece]:
        """The ranges of the whole dim that `rank` holds, in local order, padding left out."""
        local = 0
        for r in range(self.rep):
            start = r * self.pattern_size
            for count, unit in self.blocks:
                length = -(-count // self.chunks(t))
                for chunk in (rank, 2 * t - 1 - rank) if self.head_tail else (rank,):
                    have = max(0, min(count - chunk * length, length))
                    if have:
                        yield Piece(start + chunk * length * unit, local, have * unit)
                    local += length * unit
                start += count * unit

    def flat(self) -> tuple[int, ...]:
        """[rep, count0, unit0, count1, unit1, ...], and 2 at the end of a head-tail layout: the form that graphs carry."""
        return (self.rep, *(x for b in self.blocks for x in b), *(2,) * self.head_tail)

    @staticmethod
    def from_flat(flat: Iterable[int]) -> Layout:
        rep, *rest = flat
        head_tail = len(rest) % 2 == 1
        if head_tail:
            del rest[-1]
        return Layout(rep, tuple(Block(c, u) for c, u in zip(rest[::2], rest[1::2], strict=True)), head_tail)

    def text(self, number: Callable[[int], str] = str) -> str:
        """number: how to write a size."""
        body = "+".join(number(c) + (f"x{number(u)}" if u != 1 else "") for c, u in self.blocks)
        body = f"{number(self.rep)}*({body})" if self.rep != 1 else body
        return f"head-tail {body}" if self.head_tail else body

    def __str__(self) -> str:
        return self.text()


@dataclass(frozen=True)
class Placement:
    """I, R, P, M or S(dim, layout) on one mesh axis."""

    kind: str
    dim: int = -1
    layout: Layout | None = None

    @property
    def is_shard(self) -> bool:
        return self.kind == "S"

    @property
    def cut(self) -> Layout:
        """The layout of a shard."""
        assert self.layout is not None, f"{self} is not a shard"
        return self.layout

    @property
    def tag(self) -> str:
        """'I', 'R', 'P', 'M', or 'S<dim>': the form in which graphs carry a placement (the layout goes beside it)."""
        return f"S{self.dim}" if self.is_shard else self.kind

    @property
    def flat_layout(self) -> tuple[int, ...]:
        return self.cut.flat() if self.is_shard else ()

    @staticmethod
    def parse(tag: str, flat: Iterable[int] = ()) -> Placement:
        """Inverse of (`tag`, `flat_layout`)."""
        if tag in ("I", "R", "P", "M"):
            return Placement(tag)
        if not re.fullmatch(r"S\d+", tag):
            raise ValueError(f"'{tag}' is no placement: expected I, R, P, M or S<dim>")
        return S(int(tag[1:]), Layout.from_flat(flat))

    def __str__(self) -> str:
        if not self.is_shard:
            return self.kind
        return f"S{self.dim}" if self.cut.simple() else f"S{self.dim}/{self.cut}"

    __repr__ = __str__


I, R, P, M = (Placement(kind) for kind in "IRPM")  # noqa: E741  (the invariant placement is named I everywhere)


def S(dim: int, layout: Layout) -> Placement:
    assert dim >= 0, "shard dims are counted from the front"
    return Placement("S", dim, layout)


def dual(p: Placement) -> Placement:
    """The placement of the gradient of a value placed at p, which is not M."""
    assert p != M, "maxima have no gradient"
    return {"I": I, "R": P, "P": R}.get(p.kind, p)


class Collectives(NamedTuple):
    """One row of the table: what a transition sends forward and backward."""

    forward: str
    backward: str
    megatron: str = ""


LOCAL = "local"  # no communication: identity, slice, pad or mask
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"

NO_GRADIENT = ""  # of a value that has none

# The one source of truth. backward of (a -> b) is forward of (dual(b) -> dual(a)). M -> R reduces by max, all else by sum.
TRANSITIONS: dict[tuple[str, str], Collectives] = {
    ("I", "R"): Collectives(LOCAL, ALL_REDUCE, "copy_to_region"),
    ("P", "I"): Collectives(ALL_REDUCE, LOCAL, "reduce_from_region"),
    ("S", "R"): Collectives(ALL_GATHER, REDUCE_SCATTER, "gather_from_sequence_parallel"),
    ("P", "S"): Collectives(REDUCE_SCATTER, ALL_GATHER, "reduce_scatter_to_sequence_parallel"),
    ("S", "I"): Collectives(ALL_GATHER, LOCAL, "gather_from_region"),
    ("I", "S"): Collectives(LOCAL, ALL_GATHER, "scatter_to_region"),
    ("S", "S"): Collectives(ALL_TO_ALL, ALL_TO_ALL),
    ("P", "R"): Collectives(ALL_REDUCE, ALL_REDUCE),
    ("M", "R"): Collectives(ALL_REDUCE, NO_GRADIENT),
    ("R", "S"): Collectives(LOCAL, LOCAL),
    ("S", "P"): Collectives(LOCAL, LOCAL),
    ("R", "P"): Collectives(LOCAL, LOCAL),
    ("R", "I"): Collectives(LOCAL, LOCAL),
    ("I", "P"): Collectives(LOCAL, LOCAL),
}


def collectives(src: Placement, dst: Placement) -> Collectives:
    """The row for src -> dst; equal placements move nothing, and another cut of the same dim gathers it."""
    if src == dst:
        return Collectives(LOCAL, LOCAL)
    if src.is_shard and src.dim == dst.dim:
        return Collectives(ALL_GATHER, ALL_GATHER)  # no equal parts to exchange (placements/moves.py)
    return TRANSITIONS[src.kind, dst.kind]


def payload(collective: str, numel: int, t: int) -> int:
    """Elements that one rank sends for `collective` on a tensor of `numel` global elements (ring).

    all_reduce 2n(t-1)/t; all_gather and reduce_scatter n(t-1)/t; all_to_all n(t-1)/t^2.
    """
    if collective == LOCAL or t == 1:
        return 0
    share = math.ceil(numel * (t - 1) / t)
    return {ALL_REDUCE: 2 * share, ALL_TO_ALL: math.ceil(share / t)}.get(collective, share)


# -- parameters that several axes cut, or that one rank holds


@dataclass(frozen=True)
class Owned(Placement):
    """Build with `owned`. A shard of dim 0 in one block: the owner holds all rows, the other ranks a tensor of no rows."""

    owner: int = 0

    def __str__(self) -> str:
        return f"S0/rank {self.owner}"

    __repr__ = __str__


def owned(rows: int, owner: int) -> Owned:
    """How a tensor whose dim 0 has `rows` is held by `owner` alone."""
    return Owned("S", 0, Layout(1, (Block(1, rows),)), owner)


# How ranks hold a parameter: (placement, ranks) of each axis that cuts it, innermost first; () where all hold it whole. The
# first placement is of the parameter, each further one of dim 0 of what ranks hold by those before. Ranks of the first axis are
# neighbours.
Cuts = tuple[tuple[Placement, int], ...]


def on_axes(cuts: Cuts, rank: int) -> Iterator[tuple[Placement, int, int]]:
    """(placement, rank on the axis, ranks of it) of each axis, innermost first."""
    for placement, size in cuts:
        yield placement, rank % size, size
        rank //= size


def cuts_text(cuts: Cuts) -> str:
    (first, ranks), *others = cuts
    text = str(first)
    for cut, size in others:
        held = f"held by those of rank {cut.owner}" if isinstance(cut, Owned) else f"its rows cut over {size}"
        text, ranks = f"{text} of {ranks} ranks, {held}", ranks * size
    return text


def cut_further(tensor: Placement, shape: Sequence[int], t: int, ranks: int) -> Cuts:
    """How `ranks` groups of t tensor-parallel ranks, which hold a parameter of `shape` at `tensor` (I or S), cut it further.

    A parameter that tensor-parallel ranks hold whole is cut over all ranks * t, by one S(0); one without dims is not.
    """
    if not shape:
        return ()
    if not tensor.is_shard or t == 1:
        return ((S(0, Layout.contiguous(shape[0], ranks * t)), ranks * t),)
    return experts_held(tensor, shape, t, ranks)


def experts_held(tensor: Placement, shape: Sequence[int], t: int, ranks: int, same: int = 1, owner: int = -1) -> Cuts:
    """How `ranks` groups of t tensor-parallel ranks hold the experts of a stack [experts, ...], which these hold at `tensor`.

    Tensor-parallel ranks that hold whole experts hold the same ones, and cut nothing. same: so many of these groups of groups
    have the same experts, and cut what each has of them again. owner: of a parameter of one expert, the rank that has this
    expert.
    """
    cuts = [(tensor, t)] if tensor.is_shard and t > 1 else []
    rows = tensor.cut.local_size(t) if cuts and tensor.dim == 0 else shape[0]
    held = S(0, Layout.contiguous(rows, ranks)) if owner < 0 else owned(rows, owner)
    cuts.append((held, ranks))
    if same > 1 and owner < 0:
        cuts.append((S(0, Layout.contiguous(held.cut.local_size(ranks), same)), same))
    return tuple(cuts)


def local_shape(shape: Sequence[int], cuts: Cuts, rank: int) -> list[int]:
    """The shape of what `rank` holds of a tensor of logical `shape`."""
    local = [*shape]
    for cut, at, size in on_axes(cuts, rank):
        if isinstance(cut, Owned):
            local[0] *= at == cut.owner
        else:
            local[cut.dim] = cut.cut.local_size(size)
    return local
