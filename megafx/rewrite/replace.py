"""What a pattern's `make` computes, put in the place of a match.

`make` is traced on the fake tensors of a match. Matches that are alike (shapes, dtypes, numbers) share one `MakeTrace`; only
the numbers and layouts of their dropouts are their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from megafx.ir.dump import dtype_text
from megafx.ir.nodes import Draw, argument, draw_of, is_draw, mark, set_arguments
from megafx.ir.program import PLACEMENT, VAL, Fusion, Program, erase_unused, fqn_of, inherit, source_of
from megafx.ir.sizes import SizeEmitter, is_size
from megafx.rewrite.match import Match
from megafx.rewrite.pattern import PatternError, parameters
from megafx.rewrite.trace import canonical_form, plain_modes, without_code

_LINEAR = torch.ops.aten.linear.default
Refuse = Callable[[list[fx.Node], list[tuple[fx.Node, fx.Node]]], str]  # (new ops, (new, replaced) of each result)


class MakeTrace(NamedTuple):
    """make as a graph. seeds: placeholder -> number of the drop; refusal: why its results do not fit, or ''."""

    graph: fx.Graph
    operands: dict[fx.Node, str]
    seeds: dict[fx.Node, int]
    results: tuple[Any, ...]
    refusal: str


class Replacer:
    """Replaces matches in one program. refuse: why new ops may not replace the old ones, or ''."""

    def __init__(self, program: Program, by: str, refuse: Refuse | None = None) -> None:
        self.program, self.by, self.refuse = program, by, refuse
        self.sizes = SizeEmitter(program.graph, program.sizes)
        self.made: dict[Any, MakeTrace] = {}

    def replace(self, match: Match) -> list[fx.Node] | str:
        """The new nodes in the graph, or why the match cannot be replaced."""
        traced = self._made_for(match)
        if traced.refusal:
            return traced.refusal
        where = self._place(match)
        if where is None:
            return "its results are used before all of its operands are there"
        made = self._instantiate(match, traced, where)
        new = [made[n] for n in traced.graph.nodes if n.op == "call_function" and not is_size(n)]
        if self.refuse is not None:
            pairs = zip((made[n] for n in traced.results), match.roots, strict=True)
            reason = self.refuse(new, list(pairs))
            if reason:
                for node in reversed(new):
                    self.program.graph.erase_node(node)
                return reason
        self._finish(match, traced, made)
        return [n for n in new if not n._erased]

    # -- tracing make

    def _made_for(self, match: Match) -> MakeTrace:
        operands = tuple((n, self._type(match.operands[n])) for n in match.operands)
        drops = tuple((d.p, d.seed is None) for d in match.drops)
        letters = tuple(sorted(match.letters.items()))
        roots = tuple(self._type(r) for r in match.roots)
        key = (id(match.trace), operands, drops, tuple(sorted(match.numbers.items())), letters, roots)
        if key not in self.made:
            self.made[key] = self._make(match)
        return self.made[key]

    def _type(self, node: fx.Node) -> Any:
        value = node.meta[VAL]
        if not isinstance(value, torch.Tensor):
            return None
        of = self.program.sizes.of
        return (tuple(map(of, value.shape)), tuple(map(of, value.stride())), value.dtype, value.device)

    def _make(self, match: Match) -> MakeTrace:
        """Trace make on the match's values."""
        pattern = match.pattern
        names = list(match.operands)
        given = [k for k, d in enumerate(match.drops) if d.seed is not None]
        takes = parameters(pattern.make)
        mode = self.program.fake_mode
        with mode:
            values = [match.operands[n].meta[VAL].detach() for n in names]
            seeds = [torch.empty((), dtype=torch.int64, device=match.drops[k].seed.meta[VAL].device) for k in given]

        def call(*tensors: torch.Tensor) -> Any:
            tensor_of = dict(zip(names, tensors, strict=False))
            seed_of = dict(zip(given, tensors[len(names) :], strict=True))
            drops = tuple(Draw(seed_of.get(k), d.p, k) for k, d in enumerate(match.drops))
            special = {"drop": drops[0] if drops else Draw(), "drops": drops}
            return pattern.make(
                **{n: tensor_of[n] if n in tensor_of else special[n] if n in special else match[n] for n in takes}
            )

        try:
            with plain_modes(), without_code(), torch.no_grad():
                gm = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*values, *seeds)
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            raise PatternError(
                f"{match.trace}: make cannot be traced: {type(error).__name__}: {text}",
                module=fqn_of(match.roots[0]),
                source=source_of(match.roots[0]),
                fix="make gets tensors of these shapes: "
                + ", ".join(f"{n} {dtype_text(v.dtype)}{list(v.shape)}" for n, v in zip(names, values, strict=True)),
            ) from error
        placeholders = list(gm.graph.find_nodes(op="placeholder"))
        returned: Any = gm.graph.output_node().args[0]
        results = tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)
        erase_unused(gm.graph)
        operands = dict(zip(placeholders, names, strict=False))
        seed_nodes = dict(zip(placeholders[len(names) :], given, strict=True))
        self._check(match, gm.graph)
        return MakeTrace(gm.graph, operands, seed_nodes, results, self._misfit(match, results))

    def _check(self, match: Match, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="get_attr"):
            raise PatternError(
                f"{match.trace}: make brings a tensor of its own (%{node.name})", fix="make it of operands"
            )
        for node in graph.nodes:
            target = node.target
            if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
                continue
            if target._schema.is_mutable:
                raise PatternError(f"{match.trace}: make writes in place ({target})", fix="use the functional operator")
            seeded = torch.Tag.nondeterministic_seeded in target.tags and not is_draw(target)
            if seeded and argument(node, "dropout_p") != 0:
                raise PatternError(
                    f"{match.trace}: make draws random numbers by {target}",
                    fix="pass *drop.args to an op that takes them",
                )

    def _misfit(self, match: Match, results: tuple[Any, ...]) -> str:
        if len(results) != len(match.roots):
            raise PatternError(f"{match.trace}: match has {len(match.roots)} results, make {len(results)}")
        for node, root in zip(results, match.roots, strict=True):
            made = node.meta[VAL] if isinstance(node, fx.Node) else node
            have = root.meta[VAL]
            if not isinstance(made, torch.Tensor):
                raise PatternError(f"{match.trace}: make returns {made!r}, which is no tensor")
            sizes = self.program.sizes
            if made.dtype != have.dtype or sizes.shape(made) != sizes.shape(have):
                new, old = (f"{dtype_text(x.dtype)}{list(x.shape)}" for x in (made, have))
                return f"it would make {new} of {old}"
        return ""

    # -- into the graph

    def _place(self, match: Match) -> fx.Node | None:
        """The node in front of which the new ones go: after every operand, before every user of a result."""
        roots, inside = match.roots, set(match.matched)
        if len(roots) == 1:
            return roots[0]
        needs = [*match.operands.values()]
        for drop in match.drops:
            needs += [n for n in (drop.seed, *drop.layout) if isinstance(n, fx.Node)]
        last = max(needs, default=roots[0])
        first = min((u for r in roots for u in r.users if u not in inside), default=None)
        if first is None or max(roots) < first:
            return max(roots)
        return first if last < first else self._make_room(match, needs, last)

    def _make_room(self, match: Match, needs: list[fx.Node], last: fx.Node) -> fx.Node | None:
        """Move what depends on the results behind the last operand; None where an operand itself depends on them."""
        matched = set(match.matched)
        dependent: dict[fx.Node, None] = {}
        node = min(matched)
        while node is not last.next:
            if node not in matched and any(a in matched or a in dependent for a in node.all_input_nodes):
                dependent[node] = None
            node = node.next
        if any(n in dependent for n in needs):
            return None
        behind = last
        for moved in dependent:
            behind.append(moved)
            behind = moved
        return next(iter(dependent))

    def _instantiate(self, match: Match, traced: MakeTrace, where: fx.Node) -> dict[fx.Node, Any]:
        made: dict[fx.Node, Any] = {n: match.operands[name] for n, name in traced.operands.items()}
        drops = match.drops
        made |= {n: drops[k].seed for n, k in traced.seeds.items()}
        free = list(match.matched)
        for node in traced.graph.nodes:
            if node.op != "call_function":
                continue
            value = node.meta[VAL]
            if is_size(node):
                made[node] = self.sizes(self.program.sizes.of(value))
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: made[n])
            with self.program.graph.inserting_before(where):
                new = self.program.graph.call_function(node.target, args, kwargs)
            # The node that it corresponds to: the same op, on the same operand if there is one.
            alike, operands = [n for n in free if n.target == new.target], set(new.all_input_nodes)
            nearest = (n for n in alike if operands & set(n.all_input_nodes))
            origin = next(nearest, alike[0] if alike else match.roots[0])
            if origin in free:
                free.remove(origin)
            inherit(new, origin, self.by)
            seed = draw_of(node).seed if is_draw(new) else None
            if seed is not None:  # the number and the layout of the dropout that it replaces
                drop = drops[traced.seeds[seed]]
                layout = list(drop.layout)
                set_arguments(new, op_id=drop.op_id, shard_dim=drop.shard_dim, layout=layout, axis=drop.axis)
            new.meta[VAL] = self._like(value)
            made[node] = new
        return made

    def _like(self, value: Any) -> Any:
        """A new value like that of a node of the trace: matches of one trace have the same types."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self._like, value))
        if not isinstance(value, torch.Tensor):
            return value
        with self.program.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def _finish(self, match: Match, traced: MakeTrace, made: dict[fx.Node, Any]) -> None:
        """Users read the new results; what nobody reads any more leaves the graph."""
        program = self.program
        for node, root in zip(traced.results, match.roots, strict=True):
            new = made[node]
            if new not in match.operands.values():
                inherit(new, root, self.by)
                mark(new, root.meta.get(PLACEMENT))
            root.replace_all_uses_with(new)
        first = match.roots[0]
        place = (fqn_of(first), source_of(first))
        program.fusions.append(Fusion(match.pattern.name, *place, self.by, match.elements))
        matched = set(match.matched)
        for node in sorted(matched, reverse=True):
            if not node.users:
                program.graph.erase_node(node)
        nodes = (n for n in traced.graph.nodes if n.op == "call_function" and not is_size(n))
        odd = [made[n] for n in nodes if getattr(n.target, "namespace", "") == "aten" and n.target is not _LINEAR]
        if odd:
            canonical_form().nodes(program, odd)
