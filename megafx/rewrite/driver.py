"""Finds patterns in a program and replaces them, in a fixed order: larger ones first, then by name, each in graph order.

Traces are made (and cached for the process) only for patterns whose `needs` are in the graph, and for the dtypes and ranks
that the graph has. What a pattern makes can be part of another: the sweep is repeated for those while something changes.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from megafx.config import Config
from megafx.debugging import current, say
from megafx.errors import SourceLine
from megafx.ir.nodes import behind
from megafx.ir.program import VAL, Program, fqn_of, source_of
from megafx.rewrite.match import Match, Matcher, Refusal
from megafx.rewrite.pattern import Pattern, Variant, needs_of, specs_of, variants_of
from megafx.rewrite.replace import Refuse, Replacer
from megafx.rewrite.trace import Trace, trace_of

Declines = Callable[[Match], str]
NEAR = 0.6  # share of a pattern's nodes that must be found for MEGAFX_DEBUG=3 to print why the rest was not
_CASTS = {torch.ops.aten.to.dtype}
# after the first, at most: fused ops become part of larger ones (a sink: seven, with bias, scale and groups)
SWEEPS = 8
FIRST_LEAD = 2  # leading dims of the first trace: batch and sequence


@dataclass(frozen=True)
class NearMiss:
    """A place where a pattern almost matched. whole: all of its operators were there, and something else refused it."""

    pattern: str
    reason: str
    whole: bool
    root: fx.Node
    fqn: str
    source: SourceLine | None

    def __str__(self) -> str:
        where = f" [{self.fqn}]" if self.fqn else ""
        return f"{self.pattern}{where}: {self.reason}" + (f" ({self.source})" if self.source else "")


@dataclass
class Rewritten:
    """The result of one run. counts: matches by pattern; declined: matches that were left as they are, by pattern and root."""

    counts: Counter[str] = field(default_factory=Counter)
    near_misses: list[NearMiss] = field(default_factory=list)
    declined: dict[tuple[str, fx.Node], NearMiss] = field(default_factory=dict)


def patterns_of(patterns: Iterable[type[Pattern]], config: Config, *, local: bool) -> list[type[Pattern]]:
    """Those of one stage that the config's knobs leave on."""
    return [p for p in patterns if p.local == local and (p.knob is None or getattr(config, p.knob))]


def rewrite(
    program: Program, patterns: Iterable[type[Pattern]], by: str, refuse: Refuse | None = None,
    declines: Declines | None = None,
) -> Rewritten:  # fmt: skip
    """Replace every match, in place.

    by: the pass that asks. refuse: what new ops have to pass. declines: why a match is left as it is although it could be
    replaced; '': it is replaced.
    """
    run = _Run(program, Replacer(program, by, refuse), declines)
    run.sweep(sorted(patterns, key=lambda p: p.name))
    if run.done.counts:
        program.erase_unused()
    _report(program, run.done, by)
    return run.done


class _Run:
    def __init__(self, program: Program, replacer: Replacer, declines: Declines | None = None) -> None:
        self.program, self.replacer, self.declines = program, replacer, declines
        self.matcher = Matcher(program, self.candidates)
        self.done = Rewritten()
        self.nodes: dict[Any, list[fx.Node]] = defaultdict(list)
        self.unsorted: set[Any] = set()  # ops of which some were appended
        self.maker: dict[fx.Node, type[Pattern]] = {}  # a pattern does not match what it made
        self.refusals: dict[tuple[str, fx.Node], tuple[Refusal, int]] = {}
        self._index()

    def _index(self) -> None:
        self.nodes.clear()
        for node in self.program.graph.nodes:
            if node.op == "call_function":
                self.nodes[node.target].append(node)

    def candidates(self, target: Any) -> list[fx.Node]:
        """Nodes of an op, in graph order."""
        alive = [n for n in self.nodes.get(target, ()) if not n._erased]
        if target in self.unsorted:
            alive.sort()
            self.unsorted.discard(target)
        self.nodes[target] = alive
        return alive

    def sweep(self, patterns: list[type[Pattern]]) -> None:
        made = self._apply(self._traces(patterns))
        for _ in range(SWEEPS):
            if made:
                self._index()
                made = self._apply([t for t in self._traces(patterns) if any(target in made for target in t.targets)])
        self.done.near_misses = [
            NearMiss(name, refusal.reason, refusal.whole, root, fqn_of(refusal.node), source_of(refusal.node))
            for (name, root), (refusal, _) in self.refusals.items()
            if not root._erased
        ]

    # -- which traces

    def _traces(self, patterns: list[type[Pattern]]) -> list[Trace]:
        """Largest first; equal ones once."""
        have = {str(target).split(".")[1] for target, nodes in self.nodes.items() if nodes and "." in str(target)}
        values = (n.meta.get(VAL) for n in self.program.graph.nodes)
        floats = (v.dtype for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point)
        dtypes = list(dict.fromkeys(floats))  # in order of appearance
        found: dict[Any, Trace] = {}
        for pattern in patterns:
            for variant, needs, free in _forms(pattern):
                if not have.issuperset(needs):
                    continue
                choices = [dict(zip(free, c, strict=True)) for c in itertools.product(dtypes, repeat=len(free))]
                for trace in self._of_dtypes(pattern, variant, choices):
                    found.setdefault((pattern, trace.key), trace)
        traces = list(found.values())
        return sorted(traces, key=lambda t: (-t.pattern.priority, -t.size, t.pattern.name))

    def _of_dtypes(
        self, pattern: type[Pattern], variant: Variant, choices: list[dict[str, torch.dtype]]
    ) -> Iterator[Trace]:
        """One variant's traces for those dtypes of its letters that the graph may have."""
        first: Trace | None = None
        for dtypes in choices:
            if first is not None and not self._may_have(first, dtypes):
                continue
            trace = trace_of(pattern, variant, dtypes, FIRST_LEAD)
            if trace is None:
                continue
            first = first or trace
            if any(not self.nodes.get(target) for target in trace.targets.keys() - _CASTS):
                if trace is first:
                    return  # as it is with other dtypes
                continue
            yield from self._leads(trace)

    def _may_have(self, first: Trace, dtypes: dict[str, torch.dtype]) -> bool:
        """True if the graph has a node that could be the root with these dtypes, going by the trace with other ones.

        What differs between the traces is dtypes, and which casts there are.
        """
        root = behind(first.anchor, _CASTS)
        if root.op != "call_function":
            return True
        old, new, have = set(first.dtypes.values()), set(dtypes.values()), root.meta[VAL].dtype
        wanted = next(iter(new)) if {have} == old else have
        certain = len(old) == len(new) == 1
        operands = _targets(root)
        return any(
            (not certain or n.meta[VAL].dtype == wanted) and not operands - _targets(n)
            for n in self.nodes.get(root.target, ())
        )

    def _leads(self, first: Trace) -> Iterator[Trace]:
        """The trace for each number of leading dims that a root in the graph leaves possible."""
        root = first.anchor
        wanted = _targets(root)
        values = (n.meta[VAL] for n in self.nodes.get(root.target, ()) if not wanted - _targets(n))
        ranks = {v.dim() for v in values if isinstance(v, torch.Tensor) and v.dtype == root.meta[VAL].dtype}
        for rank in sorted(ranks):
            lead = first.lead + rank - root.meta[VAL].dim()
            if lead == first.lead:
                yield first
            elif lead >= 0 and any(s.dots for s in first.specs.values()):
                trace = trace_of(first.pattern, first.variant, first.dtypes, lead)
                if trace is not None:
                    yield trace

    # -- replacing

    def _apply(self, traces: list[Trace]) -> set[Any]:
        """Targets of the ops that were made."""
        made: set[Any] = set()
        for trace in traces:
            if any(not self.nodes.get(target) for target in trace.targets):
                continue
            name = trace.pattern.name
            for root in self.candidates(trace.anchor.target):
                if root._erased or self.maker.get(root) is trace.pattern:
                    continue
                found = self.matcher.at(trace, root)
                if isinstance(found, Match):
                    if self.declines is not None and (reason := self.declines(found)):
                        miss = NearMiss(name, reason, True, root, fqn_of(root), source_of(root))
                        self.done.declined.setdefault((name, root), miss)
                        continue
                    new = self.replacer.replace(found)
                    if not isinstance(new, str):
                        self.done.counts[name] += 1
                        self.matcher.forget(new)
                        for node in new:
                            self.maker[node] = trace.pattern
                            self.nodes[node.target].append(node)
                        self.unsorted |= {n.target for n in new}
                        made |= {n.target for n in new}
                        continue
                    found = Refusal(new, root, trace.size, True)
                self._remember(trace, root, found)
        return made

    def _remember(self, trace: Trace, root: fx.Node, refusal: Refusal) -> None:
        """The refusal of the variant that came furthest."""
        if not refusal.whole and (refusal.matched < NEAR * trace.size or refusal.matched < 2):
            return
        key = (trace.pattern.name, root)
        before = self.refusals.get(key)
        rank = trace.size + refusal.matched if refusal.whole else refusal.matched
        if before is None or rank > before[1]:
            self.refusals[key] = (refusal, rank)


_read: dict[Any, list[tuple[Variant, tuple[str, ...], list[str]]]] = {}


def _forms(pattern: type[Pattern]) -> list[tuple[Variant, tuple[str, ...], list[str]]]:
    """(variant, names of ops that it needs, letters of a dtype) of each variant."""
    if pattern not in _read:
        found = _read[pattern] = []
        for variant in variants_of(pattern):
            chosen = dict(variant.values)
            specs = [s for n, s in specs_of(pattern, chosen).items() if n not in variant.absent]
            found.append((variant, needs_of(pattern, chosen), sorted({s.dtype for s in specs if s.free_dtype})))
    return _read[pattern]


def _targets(node: fx.Node) -> Counter[Any]:
    """Ops of a node's operands, under casts."""
    operands = (behind(n, _CASTS) for n in node.all_input_nodes)
    return Counter(n.target for n in operands if n.op == "call_function")


# -- notes


def _report(program: Program, done: Rewritten, by: str) -> None:
    """Whole near misses and declined matches become notes, one for like layers. MEGAFX_DEBUG=2 prints counts, 3 all near
    misses."""
    groups: dict[Any, list[NearMiss]] = defaultdict(list)
    missed = [("does not match", miss) for miss in done.near_misses if miss.whole]
    missed += [("not fused", miss) for miss in done.declined.values() if not miss.root._erased]
    for what, miss in missed:
        groups[miss.pattern, what, fold(miss.reason, r"%\w+"), fold(miss.fqn)].append(miss)
    for (_, what, *_rest), misses in groups.items():
        more = f"; {len(misses)} places alike" if len(misses) > 1 else ""
        program.note("fuse", f"{misses[0].pattern} {what}: {misses[0].reason}{more}", misses[0].root)
    level = current().level
    if level >= 2:
        for name, count in sorted(done.counts.items()):
            say(f"megafx {by}: {name} matches {count}")
    if level >= 3:
        for miss in done.near_misses:
            say(f"megafx {by}: near miss of {miss}")


def fold(text: str, pattern: str = r"(?<=\.)\d+(?=\.|$)") -> str:
    """Module paths (or texts) of like layers in one form."""
    return re.sub(pattern, "*", text)
