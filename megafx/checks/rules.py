"""Brute-force check of the sharding rules: every row of every op against the real op, forward and gradient.

For a sample call, each claimed row is run on every rank of a small axis: operands are cut, summed apart or copied as the row
says (pads hold anything), the op runs on each rank alone, and results and gradients must be what the row's placements say
of the whole call's. A row that is not is WRONG. All other combinations of placements are tried too: one that is right but
not claimed is MISSING. Gradients decide between I and R: a result that is right with a gradient that is not is wrong.

    P P -> P     of add: ranks hold summands of both operands and of the result, gradients are complete (R) on each rank
"""

from __future__ import annotations

import difflib
import importlib
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

from megafx.checks.rule_samples import SAMPLES, Sample, samples_of
from megafx.checks.simulate import simulate
from megafx.errors import PlacementError, UsageError
from megafx.ir.facts import SampleTensor, declared
from megafx.ir.nodes import is_draw
from megafx.ir.program import PLACEMENT, VAL, Phase, Program
from megafx.ir.sizes import Sizes
from megafx.meanwhile import meanwhile
from megafx.ops import axes
from megafx.passes.localize.localize_shapes import localize_shapes
from megafx.passes.localize.rewrites import REWRITES
from megafx.placements.types import I, Layout, M, P, Placement, R, S, dual
from megafx.planner.plan import OpChoice
from megafx.progress import stage
from megafx.rules.aten import RULES
from megafx.rules.candidates import find_candidates
from megafx.rules.families import FAMILIES, VIEWS
from megafx.rules.grammar import names, op_key, registered, registered_rule
from megafx.rules.strategies import OpRule, place, row, rule_of

# -- one op on the ranks of a small axis

TOLERANCE = 1e-9  # fp64, values of order 1
MAX_TRIED = 3000  # combinations of placements that are tried for missing rows of one call

Ins = tuple[Placement, ...]
Outs = tuple[Placement | None, ...]
Row = tuple[Ins, Outs]


class Trial:
    """One call, whole, and its op on single ranks."""

    def __init__(self, sample: Sample, own: str | None, t: int) -> None:
        self.sample, self.t = sample, t
        self.generator = torch.Generator().manual_seed(0)
        self._last: Any = None
        namespace, name, overload = sample.op.split(".")
        self.target = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        form = str(CANONICAL.get(sample.op, sample.op))
        given = tree_leaves((sample.args, sample.kwargs), is_leaf=_is_spec)
        self.specs: list[SampleTensor] = [a for a in given if _is_spec(a)]
        self.whole = [make_tensor(spec, self.generator) for spec in self.specs]
        leaves = [v.requires_grad_() if s.kind == "x" else v for s, v in zip(self.specs, self.whole, strict=True)]
        self.outputs = _tuple(self.run(leaves))
        self.rule = self._rule(own)
        layouts = self.candidates.layouts_of(self.rule.node)
        self.written_out = [
            made
            for f, layout in layouts
            if self.rule.template.written_out(f) and (made := row(self.rule.template, f, layout, t))
        ]
        self.rewritten = form in REWRITES or bool(self.written_out)
        index = {n: i for i, n in enumerate(self.placeholders)}
        self.operands = [index[o.node] for o in self.rule.operands]
        differentiable = [isinstance(y, Tensor) and y.is_floating_point() and y.requires_grad for y in self.outputs]
        self.cotangents = [
            torch.randn(y.shape, generator=self.generator, dtype=y.dtype) if d else None
            for y, d in zip(self.outputs, differentiable, strict=True)
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

    def run(self, tensors: list[Tensor]) -> Any:
        given = iter(tensors)
        args, kwargs = _map((self.sample.args, self.sample.kwargs), lambda _: next(given))
        return self.target(*args, **kwargs)

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
        layouts = list(self.candidates.layouts_of(self.rule.node))
        if template.several:
            sizes = [(f, k) for f, k in self.rule.sizes.items() if f not in self.rule.forbidden and k >= 2]
            layouts += [(f, Layout.contiguous(k, self.t)) for f, k in sizes]
        for f, layout in layouts:
            if n == 1:
                made = row(template, f, layout, self.t)
                if made is not None:
                    yield made.ins, (made.out,)
                continue
            ins_or_none = [place(template, i, f, layout, self.t) for i in range(len(active))]
            outs_or_none = [place(template, -1 - k, f, layout, self.t) for k in range(n)]
            if None not in ins_or_none and None not in outs_or_none:
                yield tuple(p for p in ins_or_none if p is not None), tuple(outs_or_none)

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
            for out in (R, P, *results, *((M,) if self.rule.template.reduces == "M" else ())):
                yield ins, (out,)

    # -- truth

    def fault(self, ins: Ins, outs: Outs) -> str:
        """Why the row is wrong; '' if it is right."""
        placements = dict(zip(self.operands, ins, strict=True))
        ranks, results, error = self._forward(ins, outs)
        if error:
            return error
        for k, out in enumerate(outs):
            result = self.outputs[k]
            if out is None or not isinstance(result, Tensor):
                continue
            if not self.holds([r[k].detach() for r in results], result.detach(), out):
                return f"result {k} is not {out}" if len(outs) > 1 else f"the result is not {out}"
        if all(c is None for c in self.cotangents):
            return ""
        by_result = [
            self.shards(c, dual(o), zero_pads=True) if c is not None and o is not None else [None] * self.t
            for c, o in zip(self.cotangents, outs, strict=True)
        ]
        for_rank = []
        for rank in range(self.t):
            try:
                with self.on_rank(rank):
                    for_rank.append(_gradients(results[rank], ranks[rank], [cs[rank] for cs in by_result]))
            except IndexError as e:  # ids of rows that the rank does not have
                return f"no gradient: {e}"
        for i, placement in placements.items():
            whole = self.gradients[i]
            if self.specs[i].kind != "x" or whole is None:
                continue
            parts = [g[i] if g[i] is not None else torch.zeros_like(ranks[r][i]) for r, g in enumerate(for_rank)]
            if not self.holds([p for p in parts if p is not None], whole, dual(placement)):
                return f"the gradient of operand {self.operands.index(i)} is not {dual(placement)}"
        return ""

    def _forward(self, ins: Ins, outs: Outs) -> tuple[list[list[Tensor]], list[tuple[Tensor, ...]], str]:
        """Operands and results of every rank, or why the op does not run.

        A row that sums over a sharded dim has zeros in its pads, as localize_shapes sees to. The last results are kept: most
        ops do not ask how the result is placed.
        """
        summed = P in outs and any(p.is_shard for p in ins)
        key = (ins, summed and any(p.is_shard and p.cut.padded(self.t) for p in ins))
        if self._last and self._last[0] == key and not self.rewritten and not is_draw(self.target):
            return self._last[1]
        ranks: list[list[Tensor]] = [[] for _ in range(self.t)]
        placements = dict(zip(self.operands, ins, strict=True))
        for i, value in enumerate(self.whole):
            pieces = self.shards(value, placements.get(i, I), zero_pads=summed and not self.rewritten)
            for rank, piece in enumerate(pieces):
                ranks[rank].append(piece.requires_grad_() if self.specs[i].kind == "x" else piece)
        results: list[tuple[Tensor, ...]] = []
        error = ""
        try:
            results = self._execute(ranks, ins, outs)
        except (RuntimeError, IndexError, ValueError, PlacementError) as e:
            error = f"does not run: {str(e).splitlines()[0][:60]}"
        self._last = (key, (ranks, results, error))
        return ranks, results, error

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
        """True if the ranks' parts are the value at this placement (pads aside)."""
        if placement == P:
            return value.is_floating_point() and _close(sum(parts[1:], parts[0]), value)
        if placement == M:
            return _close(torch.stack(parts).amax(0), value)
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

    # -- the op on all ranks

    def _execute(self, ranks: list[list[Tensor]], ins: Ins, outs: Outs) -> list[tuple[Tensor, ...]]:
        if self.rewritten and any(p is not None and p.is_shard for p in (*ins, *outs)):
            return self._localized(ranks, ins, outs)
        results = []
        for rank in range(self.t):
            with self.on_rank(rank):
                results.append(_tuple(self._call(ranks[rank], outs)))
        return results

    def _call(self, tensors: list[Tensor], outs: Outs) -> Any:
        """The op itself. One that draws gets the cut of its result, the gradient of a part gets the length of the whole."""
        if is_draw(self.target):
            out, template = outs[0], self.rule.template
            assert out is not None
            cut = out.is_shard and template.entries(-1)[out.dim] not in template.forbidden
            given, where = iter(tensors), (out.dim, list(out.flat_layout)) if cut else (-1, [])
            return self.target(*_map(self.sample.args[:-3], lambda _: next(given)), *where, "tp")
        if self.sample.op in PART_GRADIENTS and outs[0] is not None and outs[0].is_shard:
            shape = list(self.outputs[0].shape)
            shape[outs[0].dim] = outs[0].cut.local_size(self.t)
            return self.target(tensors[0], shape, *self.sample.args[2:])
        return self.run(tensors)

    def _localized(self, ranks: list[list[Tensor]], ins: Ins, outs: Outs) -> list[tuple[Tensor, ...]]:
        """What localize_shapes makes of the op for this row, in the simulator."""
        graph, mode = fx.Graph(), FakeTensorMode()
        inputs = []
        for i, value in enumerate(self.whole):
            inputs.append(graph.placeholder(f"x{i}"))
            inputs[i].meta[VAL] = mode.from_tensor(value)
        for i, placement in zip(self.operands, ins, strict=True):
            inputs[i].meta[PLACEMENT] = placement
        given = iter(inputs)
        target, args, kwargs = self._canonical(*_map((self.sample.args, self.sample.kwargs), lambda _: next(given)))
        node = graph.call_function(target, args, kwargs)
        node.meta |= {VAL: mode.from_tensor(self.outputs[0].detach()), PLACEMENT: outs[0]}
        graph.output((node,))
        program = Program(
            fx.GraphModule(torch.nn.Module(), graph), [], [], Sizes(), mode, tree_structure(()), phase=Phase.PLACED
        )
        operands = [replace(o, node=inputs[i]) for o, i in zip(self.rule.operands, self.operands, strict=True)]
        factor = next(
            (f for o, p in zip(operands, ins, strict=True) if p.is_shard for f in names(o.factors[p.dim])), ""
        )
        if (ins, outs) in [(made.ins, (made.out,)) for made in self.written_out]:
            factor = self.written_out[0].factor
        choice = OpChoice(ins, outs[0] or I, factor)
        context: Any = SimpleNamespace(
            solved=SimpleNamespace(t=self.t, axis="tp", ops={node.name: choice}),
            rules={node: replace(self.rule, node=node, operands=tuple(operands))},
            weights=set(),
        )
        # what does not run is no row, and is reported as that
        with meanwhile(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True):
            localize_shapes(program, context)
        return [tuple(found) for found in simulate(program, ranks, gradients=True)]

    def _canonical(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call in the spelling that canonicalize leaves, for the ops that localize_shapes knows in one spelling only."""
        form, shape = CANONICAL.get(self.sample.op, self.target), list(self.outputs[0].shape)
        if form in (aten.reshape.default, aten.expand.default):
            return form, (args[0], shape), {}
        if form is aten.slice.Tensor and self.sample.op == "aten.narrow.default":
            return form, (*args[:3], args[2] + args[3]), {}
        return form, args, kwargs

    def on_rank(self, rank: int) -> AbstractContextManager[None]:
        return axes.on_mesh({"tp": axes.AxisContext(rank, self.t, "check_rules")})


aten = torch.ops.aten
_EXPANDS = ("aten.expand.default", "aten.broadcast_to.default", "aten.expand_copy.default", "aten.expand_as.default")
CANONICAL: dict[str, Any] = {
    **dict.fromkeys(VIEWS, aten.reshape.default),
    **dict.fromkeys(_EXPANDS, aten.expand.default),
    **dict.fromkeys(("aten.narrow.default", "aten.slice_copy.Tensor"), aten.slice.Tensor),
}
PART_GRADIENTS = ("aten.slice_backward.default", "aten.select_backward.default", "aten.diagonal_backward.default")


# -- trees and numbers


def make_tensor(spec: SampleTensor, generator: torch.Generator) -> Tensor:
    if spec.kind == "i":
        return torch.randint(0, int(spec.high), spec.shape, generator=generator)
    if spec.kind == "m":
        return torch.rand(spec.shape, generator=generator) < 0.7
    spread = torch.rand(spec.shape, generator=generator, dtype=torch.float64)
    return spread * (spec.high - spec.low) + spec.low


def _is_spec(a: Any) -> bool:
    return isinstance(a, SampleTensor)


def _map(tree: Any, of_tensor: Callable[[SampleTensor], Any]) -> Any:
    return tree_map(lambda a: of_tensor(a) if _is_spec(a) else a, tree, is_leaf=_is_spec)


def _tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


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
        results, given = zip(*pairs, strict=True)
        operands = [leaves[i] for i in wanted]
        made = torch.autograd.grad(results, operands, given, allow_unused=True, retain_graph=True)
        for i, g in zip(wanted, made, strict=True):
            found[i] = torch.zeros_like(leaves[i]) if g is None else g
    return found


# -- all rules

# Rows that are right on finite numbers, and are not claimed on purpose.
POLICIES: dict[tuple[str, str], str] = {
    ("aten.nan_to_num.default", "P -> P"): "linear on finite numbers only",
    ("aten.nll_loss_backward.default", "R P I I I -> R"): "operand 1 is read for its shape only",
    ("aten.nll_loss_backward.default", "P P I I I -> P"): "operand 1 is read for its shape only",
    ("megafx.efficient_documents.default", "R R S3 R -> S3"): "its kernel takes widths that are multiples of 8",
    ("megafx.flash_documents.default", "R R S3 -> S3"): "its kernel takes q, k and v of one width",
    ("megafx.linear_cross_entropy.default", "S0 R R S0 -> P"): "made after planning, where tokens are whole",
}


@dataclass(frozen=True)
class Finding:
    """verdict: 'ok', 'wrong', 'missing', 'policy' (right, not claimed on purpose) or 'unchecked'."""

    op: str
    verdict: str
    row: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:9} {self.op:48} {self.row}" + (f"   ({self.detail})" if self.detail else "")


@dataclass
class RuleReport:
    findings: list[Finding] = field(default_factory=list)

    def of(self, verdict: str) -> list[Finding]:
        return [f for f in self.findings if f.verdict == verdict]

    @property
    def ok(self) -> bool:
        return not self.of("wrong") and not self.of("missing")

    def __str__(self) -> str:
        shown = [str(f) for v in ("wrong", "missing", "policy", "unchecked") for f in self.of(v)]
        ops = len({f.op for f in self.findings if f.verdict != "unchecked"})
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in ("wrong", "missing"))
        return "\n".join([*shown, f"{len(self.of('ok'))} rows of {ops} ops are right, {counts}"])


@stage("check_rules")
def check_rules(rules: Mapping[str, str] | Iterable[str] | None = None, t: Iterable[int] = (2, 3)) -> RuleReport:
    """rules: ops to check (all by default), or op -> rule string to check in place of the op's own."""
    given = dict(rules) if isinstance(rules, Mapping) else {}
    importlib.import_module("megafx.compiler.pipeline")  # ops are declared in the files that define them
    fused = {op for op, facts in declared().items() if facts.rule}
    every = sorted({*RULES, *FAMILIES, *VIEWS, *fused, *SAMPLES})
    ops = [op_key(op) for op in ([*every, *registered()] if rules is None else rules)]
    report = RuleReport()
    for op in ops:
        if op not in given and op not in every and not registered_rule(op):
            near = ", ".join(difflib.get_close_matches(op, every, n=3))
            raise UsageError(
                f"'{op}' has no sharding rule", fix=f"did you mean {near}?" if near else "docs/extending.md"
            )
    for op in dict.fromkeys(ops):
        own = given.get(op) or registered_rule(op)
        samples = samples_of(op, own)
        if not samples:
            why = "no sample call (`samples` of its definition, or rule_samples.py)"
            report.findings.append(Finding(op, "unchecked", "-", why))
        with stage(op):
            for sample in samples:
                for size in t:
                    report.findings += _check(sample, own, size)
    report.findings = list(dict.fromkeys(report.findings))
    return report


def _check(sample: Sample, own: str | None, t: int) -> Iterator[Finding]:
    try:
        trial = Trial(sample, own, t)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as e:
        yield Finding(sample.op, "wrong" if own else "unchecked", "-", str(e).splitlines()[0][:70])
        return
    if trial.rule.kind == "none":
        yield Finding(sample.op, "wrong", "-", trial.rule.reason)
        return
    claimed = dict.fromkeys(trial.claims())
    for claim in claimed:
        why = trial.fault(*claim)
        yield Finding(sample.op, "wrong" if why else "ok", text(claim), why)
    for tried in trial.combinations():
        if tried not in claimed and not trial.fault(*tried):
            policy = POLICIES.get((sample.op, text(tried)), "")
            yield Finding(sample.op, "policy" if policy else "missing", text(tried), policy)


def text(claim: Row) -> str:
    ins, outs = claim
    return f"{' '.join(map(str, ins))} -> {' '.join(str(o) for o in outs if o is not None)}"
