"""One op on the ranks of a small axis: rows of its rule, and whether a row is what the op does, forward and gradient."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, fx

from megafx.checks.rule_samples import Sample
from megafx.ir.facts import SampleTensor
from megafx.ir.nodes import is_draw
from megafx.ir.program import VAL
from megafx.ir.sizes import Sizes
from megafx.ops import axes
from megafx.placements.types import I, Layout, P, Placement, R, S, dual
from megafx.placements.views import local_offset
from megafx.rules.candidates import find_candidates
from megafx.rules.families import VIEWS
from megafx.rules.strategies import OpRule, place, row, rule_of

TOLERANCE = 1e-9  # fp64, values of order 1
MAX_TRIED = 3000  # combinations of placements that are tried for missing rows of one call

Row = tuple[tuple[Placement, ...], tuple[Placement | None, ...]]


class Trial:
    """One call, whole, and its op on single ranks."""

    def __init__(self, sample: Sample, own: str | None, t: int) -> None:
        self.sample, self.t = sample, t
        self.generator = torch.Generator().manual_seed(0)
        self._last: Any = None
        namespace, name, overload = sample.op.split(".")
        self.target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        leaves_of_call = _leaves((sample.args, sample.kwargs))
        self.specs: list[SampleTensor] = [a for a in leaves_of_call if isinstance(a, SampleTensor)]
        self.whole = [make_tensor(spec, self.generator) for spec in self.specs]
        leaves = [v.requires_grad_() if s.kind == "x" else v for s, v in zip(self.specs, self.whole, strict=True)]
        self.outputs = _tuple(self.run(leaves))
        self.rule = self._rule(own)
        index = {n: i for i, n in enumerate(self.placeholders)}
        self.operands = [index[o.node] for o in self.rule.operands]
        self.cotangents = [
            torch.randn(y.shape, generator=self.generator, dtype=y.dtype) if _differentiable(y) else None
            for y in self.outputs
        ]
        self.gradients: list[Tensor | None] = [None] * len(leaves)
        try:
            self.gradients = _gradients(self.outputs, leaves, self.cotangents)
        except (RuntimeError, NotImplementedError) as e:
            if not re.search("is not implemented|no autograd formula", str(e)):
                raise
            self.cotangents = [None] * len(self.outputs)  # a backward op: forward only
        self.whole = [v.detach() for v in self.whole]

    def _rule(self, own: str | None) -> OpRule:
        graph = fx.Graph()
        self.placeholders: list[fx.Node] = []

        def placeholder(spec: SampleTensor) -> fx.Node:
            node = graph.placeholder(f"x{len(self.placeholders)}")
            node.meta[VAL] = self.whole[len(self.placeholders)]
            self.placeholders.append(node)
            return node

        args, kwargs = _map((self.sample.args, self.sample.kwargs), placeholder)
        node = graph.call_function(self.target, args, kwargs)
        node.meta[VAL] = self.outputs if len(self.outputs) > 1 else self.outputs[0]
        active = {n for n, s in zip(self.placeholders, self.specs, strict=True) if s.kind == "x"}
        rule = rule_of(node, Sizes(), active | {node}, own)
        inputs = [n for n in self.placeholders if n in active]
        self.candidates = find_candidates({node: rule}, inputs, Sizes(), self.t)
        return rule

    def run(self, tensors: list[Tensor], **patch: Any) -> Any:
        given = iter(tensors)
        args, kwargs = _map((self.sample.args, self.sample.kwargs), lambda _: next(given))
        return self.target(*args, **{**kwargs, **patch})

    # -- rows

    def claims(self) -> Iterator[Row]:
        """The rows of the rule, one placement for each result."""
        template = self.rule.template
        n = len(template.results)
        active = [s.active for s in template.operands]
        yield tuple(I for _ in active), (I,) * n
        yield tuple(R if a else I for a in active), (R,) * n
        for group, outs in template.groups:
            if group and all(active[i] for i in group):
                ins = tuple(P if i in group else R if a else I for i, a in enumerate(active))
                yield ins, tuple(P if o == "P" else R for o in outs)
        for f, layout in self._layouts():
            if n == 1:
                made = row(template, f, layout, self.t)
                if made is not None:
                    yield made.ins, (made.out,)
                continue
            ins_or_none = [place(template, i, f, layout, self.t) for i in range(len(active))]
            outs_or_none = [place(template, -1, f, layout, self.t, k) for k in range(n)]
            if None not in ins_or_none and None not in outs_or_none:
                yield tuple(p for p in ins_or_none if p is not None), tuple(outs_or_none)

    def _layouts(self) -> Iterator[tuple[str, Layout]]:
        yield from self.candidates.layouts_of(self.rule.node)
        if self.rule.template.several:
            for f, n in self.rule.sizes.items():
                if f not in self.rule.forbidden and n >= 2:
                    yield f, Layout.contiguous(n, self.t)

    def combinations(self) -> Iterator[Row]:
        """Other rows worth trying: each operand R, P or evenly sharded, with every such result."""
        options = []
        for i in self.operands:
            value, needs = self.whole[i], self.specs[i].kind == "x"
            shards = [
                S(d, Layout.contiguous(n, self.t)) for d, n in enumerate(value.shape) if n > 1 and n % self.t == 0
            ]
            options.append([R, P, *shards] if needs else [I, *shards])
        if math.prod(map(len, options)) > MAX_TRIED or len(self.outputs) > 1:
            return
        (y,) = self.outputs
        if not y.is_floating_point():
            return  # comparisons with summands are false of any numbers
        results = [S(d, Layout.contiguous(n, self.t)) for d, n in enumerate(y.shape) if n > 1 and n % self.t == 0]
        for ins in itertools.product(*options):
            if all(p in (R, I) for p in ins) or not any(self.specs[i].kind == "x" for i in self.operands):
                continue
            for out in (R, P, *results):
                yield ins, (out,)

    # -- truth

    def fault(self, ins: tuple[Placement, ...], outs: tuple[Placement | None, ...]) -> str:
        """Why the row is wrong; '' if it is right."""
        placements = dict(zip(self.operands, ins, strict=True))
        ranks, results, error = self._forward(ins, outs)
        if error:
            return error
        for k, out in enumerate(outs):
            if out is not None and not self.holds([r[k].detach() for r in results], self.outputs[k].detach(), out):
                return f"result {k} is not {out}" if len(outs) > 1 else f"the result is not {out}"
        if all(c is None for c in self.cotangents):
            return ""
        by_result = [
            self.shards(c, dual(o), zero_pads=True) if c is not None and o is not None else [None] * self.t
            for c, o in zip(self.cotangents, outs, strict=True)
        ]
        for_rank = []
        for rank in range(self.t):
            with self.on_rank(rank):
                for_rank.append(_gradients(results[rank], ranks[rank], [cs[rank] for cs in by_result]))
        for i, placement in placements.items():
            whole = self.gradients[i]
            if self.specs[i].kind != "x" or whole is None:
                continue
            parts = [g[i] if g[i] is not None else torch.zeros_like(ranks[r][i]) for r, g in enumerate(for_rank)]
            if not self.holds([p for p in parts if p is not None], whole, dual(placement)):
                at = self.operands.index(i)
                return f"the gradient of operand {at} is not {dual(placement)}"
        return ""

    def _forward(
        self, ins: tuple[Placement, ...], outs: tuple[Placement | None, ...]
    ) -> tuple[list[list[Tensor]], list[tuple[Tensor, ...]], str]:
        """Operands and results of every rank, or why the op does not run. The last ones are kept: most ops do not ask how
        the result is placed."""
        summed = self._summed(ins, outs)
        key = (ins, summed and any(p.is_shard and p.cut.padded(self.t) for p in ins))
        if self._last and self._last[0] == key and self.sample.op not in _LOCAL and not is_draw(self.target):
            return self._last[1]
        ranks: list[list[Tensor]] = [[] for _ in range(self.t)]
        placements = dict(zip(self.operands, ins, strict=True))
        for i, value in enumerate(self.whole):
            pieces = self.shards(value, placements.get(i, I), zero_pads=summed)
            for rank, piece in enumerate(pieces):
                ranks[rank].append(piece.requires_grad_() if self.specs[i].kind == "x" else piece)
        made: tuple[list[list[Tensor]], list[tuple[Tensor, ...]], str]
        try:
            made = ranks, self._execute(ranks, ins, outs), ""
        except (RuntimeError, IndexError, ValueError) as e:
            made = ranks, [], f"does not run: {str(e).splitlines()[0][:60]}"
        self._last = (key, made)
        return made

    def _summed(self, ins: tuple[Placement, ...], outs: tuple[Placement | None, ...]) -> bool:
        """Whether the row sums over a sharded dim: pads must then be 0 (localize_shapes masks them)."""
        return P in outs and any(p.is_shard for p in ins)

    def shards(self, value: Tensor, placement: Placement, *, zero_pads: bool) -> list[Tensor]:
        """What each rank holds of a value; pads hold anything, unless zeros are asked for."""
        if placement == P:
            if not value.is_floating_point():
                return [value] * self.t
            parts = [torch.randn(value.shape, generator=self.generator, dtype=value.dtype) for _ in range(self.t - 1)]
            return [*parts, value - sum(parts)]
        if not placement.is_shard:
            return [value.clone() for _ in range(self.t)]
        shape = list(value.shape)
        shape[placement.dim] = placement.cut.local_size(self.t)
        pieces = []
        for rank in range(self.t):
            floating = value.is_floating_point() and not zero_pads
            piece = torch.rand(shape, generator=self.generator, dtype=torch.float64) if floating else torch.zeros(shape)
            piece = piece.to(value.dtype)
            for start, local, n in placement.cut.pieces(rank, self.t):
                piece.narrow(placement.dim, local, n).copy_(value.narrow(placement.dim, start, n))
            pieces.append(piece)
        return pieces

    def holds(self, parts: list[Tensor], value: Tensor, placement: Placement) -> bool:
        """Whether the ranks' parts are the value at this placement (pads aside)."""
        if placement == P:
            return value.is_floating_point() and _close(sum(parts[1:], parts[0]), value)
        if not placement.is_shard:
            return all(_close(part, value) for part in parts)
        dim = placement.dim
        for rank, part in enumerate(parts):
            if part.ndim != value.ndim or part.shape[dim] != placement.cut.local_size(self.t):
                return False
            for start, local, n in placement.cut.pieces(rank, self.t):
                if not _close(part.narrow(dim, local, n), value.narrow(dim, start, n)):
                    return False
        return True

    # -- ops on single ranks, as localize_shapes leaves them

    def _execute(
        self, ranks: list[list[Tensor]], ins: tuple[Placement, ...], outs: tuple[Placement | None, ...]
    ) -> list[tuple[Tensor, ...]]:
        local = _LOCAL.get(self.sample.op, _drawing if is_draw(self.target) else _as_is)
        results = []
        for rank in range(self.t):
            with self.on_rank(rank):
                results.append(_tuple(local(self, ranks, rank, ins, outs)))
        return results

    def on_rank(self, rank: int) -> AbstractContextManager[None]:
        return axes.on_mesh({"tp": axes.AxisContext(rank, self.t, "check_rules")})

    def local_shape(self, k: int, out: Placement | None) -> list[int]:
        shape = list(self.outputs[k].shape)
        if out is not None and out.is_shard:
            shape[out.dim] = out.cut.local_size(self.t)
        return shape


Local = Callable[[Trial, list[list[Tensor]], int, tuple[Placement, ...], tuple[Placement | None, ...]], Any]


def _as_is(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    return trial.run(ranks[rank])


def _view(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    return ranks[rank][0].reshape(trial.local_shape(0, outs[0]))


def _expand(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    return ranks[rank][0].expand(trial.local_shape(0, outs[0]))


def _slice(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    part = trial.rule.template.parts.get(-1)
    if part is None or not ins[0].is_shard or trial.rule.operands[0].factors[ins[0].dim] != part.factor:
        return trial.run(ranks[rank])
    start, end = (local_offset(ins[0].cut, x, trial.t) for x in (part.start, part.end))
    if start is None or end is None:
        raise ValueError("the slice cuts a block")
    return ranks[rank][0].narrow(ins[0].dim, start, end - start)


def _mean(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    """localize_shapes: the local sum over the whole count."""
    local, whole = ranks[rank][0], trial.whole[0]
    share = local.numel() / whole.numel() if outs[0] == P and ins[0].is_shard else 1.0
    return trial.run(ranks[rank]) * share


def _part_backward(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    return trial.target(ranks[rank][0], trial.local_shape(0, outs[0]), *trial.sample.args[2:])


def _embedding(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    if not (ins[0].is_shard and ins[0].dim == 0):
        return trial.run(ranks[rank])
    table, index = ranks[rank]
    index = index - rank * table.shape[0]
    mine = (index >= 0) & (index < table.shape[0])
    return torch.where(mine[..., None], trial.run([table, torch.where(mine, index, 0)]), 0.0)


def _cross_entropy(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    if not (ins[0].is_shard and ins[0].dim == 1):
        return trial.run(ranks[rank])
    stats = []
    for other in range(trial.t):
        with trial.on_rank(other):
            local = torch.ops.megafx.ce_stats(*(x.detach() for x in ranks[other]), ins[0].flat_layout, trial.t, "tp")
            stats.append(local)
    rest = (*trial.sample.args[2:], ins[0].flat_layout, trial.t, "tp")
    return torch.ops.megafx.ce_loss(*ranks[rank], torch.stack(stats), *rest)


def _drawing(trial: Trial, ranks: list[list[Tensor]], rank: int, ins: Any, outs: Any) -> Any:
    """localize_shapes: an op that draws is told how its result is cut (its last arguments: shard_dim, layout, axis)."""
    out, template = outs[0], trial.rule.template
    cut = out.is_shard and template.entries(-1)[out.dim] not in template.forbidden
    where = (out.dim, list(out.flat_layout)) if cut else (-1, [])
    given = iter(ranks[rank])
    args = _map(trial.sample.args[:-3], lambda _: next(given))
    return trial.target(*args, *where, "tp")


_LOCAL: dict[str, Local] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(
        ("aten.expand.default", "aten.broadcast_to.default", "aten.expand_copy.default", "aten.expand_as.default"),
        _expand,
    ),
    **dict.fromkeys(("aten.slice.Tensor", "aten.narrow.default", "aten.slice_copy.Tensor"), _slice),
    **dict.fromkeys(("aten.mean.dim", "aten.mean.default"), _mean),
    **dict.fromkeys(("aten.slice_backward.default", "aten.select_backward.default"), _part_backward),
    "aten.embedding.default": _embedding,
    "megafx.cross_entropy.default": _cross_entropy,
}


# -- trees and numbers


def make_tensor(spec: SampleTensor, generator: torch.Generator) -> Tensor:
    if spec.kind == "i":
        return torch.randint(0, int(spec.high), spec.shape, generator=generator)
    if spec.kind == "m":
        return torch.rand(spec.shape, generator=generator) < 0.7
    spread = torch.rand(spec.shape, generator=generator, dtype=torch.float64)
    return spread * (spec.high - spec.low) + spec.low


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)) and not isinstance(tree, SampleTensor):
        for a in tree:
            yield from _leaves(a)
    else:
        yield tree


def _map(tree: Any, of_tensor: Callable[[SampleTensor], Any]) -> Any:
    if isinstance(tree, SampleTensor):
        return of_tensor(tree)
    if isinstance(tree, dict):
        return {k: _map(v, of_tensor) for k, v in tree.items()}
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(v, of_tensor) for v in tree)
    return tree


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _differentiable(y: Tensor) -> bool:
    return isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(torch.isfinite(a).all()) and bool(((a - b).abs() <= TOLERANCE * (1 + b.abs())).all())


def _gradients(outputs: Any, leaves: list[Tensor], cotangents: list[Tensor | None]) -> list[Tensor | None]:
    pairs = [(y, c) for y, c in zip(outputs, cotangents, strict=True) if c is not None]
    wanted = [i for i, x in enumerate(leaves) if x.requires_grad]
    found: list[Tensor | None] = [None] * len(leaves)
    if pairs and wanted:
        made = torch.autograd.grad(
            [y for y, _ in pairs],
            [leaves[i] for i in wanted],
            [c for _, c in pairs],
            allow_unused=True,
            retain_graph=True,
        )
        for i, g in zip(wanted, made, strict=True):
            found[i] = torch.zeros_like(leaves[i]) if g is None else g
    return found
