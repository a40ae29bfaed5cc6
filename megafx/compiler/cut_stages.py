"""Cut the graph of a whole training call into the graphs of pipeline stages.

Before:  captured program of a call on all rows
After:   for each stage a program whose inputs are parameters, values of earlier stages, and inputs of the call
Legal because: what a stage needs of earlier ones crosses every cut between them. What depends on no parameter (masks,
positions, rotary tables) is computed by each stage that uses it. Gradients of a parameter that several stages use add up.

Micro-batches are an axis like the data-parallel one, whose ranks come one after the other: the whole graph is typed on it. So a
mean over tokens divides by the tokens of all micro-batches. That count depends on inputs alone: it is computed first, and given
to the stage (`Total`). The loss of a micro-batch is its summand of the loss, and gradients add up. Another sum over rows in the
middle of the graph would need all micro-batches at once: that is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from megafx.capture.prepare import alone
from megafx.compiler.cut_sequence import cut_sequence
from megafx.compiler.stages import before, passes_of, runner_of
from megafx.errors import PlanError
from megafx.ir.call_spec import CallSpec, Leaf, OutputLeaf
from megafx.ir.contracts import is_transition
from megafx.ir.holders import own_functional
from megafx.ir.nodes import argument, op_name
from megafx.ir.program import (
    HELD,
    VAL,
    Batch,
    Builder,
    Input,
    Output,
    Phase,
    Program,
    ancestors,
    differentiable_nodes,
    fqn_of,
    graph_module,
    located,
)
from megafx.passes.plan.place_axes import Policy, Typer, place_axes
from megafx.passes.plan.statistics import spell_out_statistics
from megafx.placements.data_axis import BATCH_AXIS, CONTEXT_AXIS, MICRO_AXIS
from megafx.placements.types import I, Placement, R
from megafx.planner.context import CompileContext

eager_call = torch.ops.megafx.eager_call.default
NAME = "cut_stages"
AVERAGE = (
    "Config(data_parallel_loss='average'), with which each micro-batch has a loss of its own, and losses are averaged"
)
FORM = "form"  # the input of a stage's call that says which graph it is
RECEIVED = "value"  # what inputs are called that another stage has sent


@dataclass(frozen=True)
class Total:
    """A sum over the rows of the whole batch. graph: inputs of this micro-batch by name -> its summand."""

    graph: fx.GraphModule
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Whole:
    """A training call of the whole model, of one micro-batch's rows."""

    program: Program
    rows: Mapping[str, int]  # name of an input that is cut -> its dim of rows
    totals: Sequence[Total] = ()  # in the order in which they are computed; the i-th is the user input `total[i]`


@dataclass(frozen=True)
class Crossing:
    """A value that crosses a cut. value: as traced; differentiable: whether a gradient comes back."""

    name: str
    value: torch.Tensor
    differentiable: bool


@dataclass(frozen=True)
class StageGraph:
    """One stage's program."""

    program: Program
    # keyword of its call -> name of an input of the whole call, or of a value of an earlier stage
    takes: Mapping[str, str]
    receives: tuple[Crossing, ...]  # receives, sends: what crosses the cuts before and after it, in order
    sends: tuple[Crossing, ...]
    made: tuple[str, ...]  # those of `sends` that the program returns, in order


# -- one micro-batch of the whole


def share_out(program: Program, context: CompileContext, microbatches: int) -> Whole:
    """CAPTURED program of all rows of a rank -> its micro-batches. The loss is the only output that is kept.

    Raises PlanError where the call has no loss, where one micro-batch needs values of others, and for code that stays eager.
    """
    losses = [i for i, spec in enumerate(program.outputs) if spec.loss and not spec.written]
    if len(losses) != 1:
        raise PlanError(
            f"a pipeline needs one loss in the graph, and this call has {len(losses)}",
            fix="call the model so that it returns its loss (labels=...), or give loss_fn= to megafx.pipeline and loss_inputs= "
            "to step",
        )
    results = program.results()
    kept = [i for i, spec in enumerate(program.outputs) if i in losses or spec.kind in ("mutation", "check")]
    program.outputs = [program.outputs[i] for i in kept]
    program.output_node().args = (tuple(results[i] for i in kept),)
    program.erase_unused()
    with alone():
        runner_of(context, quiet=True).run(program, before(place_axes, passes_of(context, "planning")))
    for node in program.graph.nodes:
        if node.target is eager_call:
            raise PlanError(
                "code that is not captured runs in the graph of a pipeline",
                fix="Config(uncaptured='error') names the line that cannot be captured: change it, or use no stages",
                **located(node),
            )
    if context.config.data_parallel_loss == "average":
        return _average(program, context, microbatches)
    changed = next((spec.name for spec in program.outputs if spec.kind == "mutation"), None)
    if changed is not None:
        what = f"each micro-batch would change buffer '{changed}', which one process changes once for the whole batch"
        raise PlanError(what, fix=f"freeze it (eval mode of its module), or {AVERAGE}")
    symbol = program.sizes.symbols.get("batch")
    if symbol is None:
        what = "the batch of this call is no size that may vary, so it cannot be cut into micro-batches"
        raise PlanError(what, fix="give a batch of at least two rows, all tensors with the batch as their first dim")
    micro = Policy(MICRO_AXIS, microbatches, "batch", "a pipeline", "batch", AVERAGE)
    typer = Typer(program, micro, symbol)
    spell_out_statistics(program, typer.over_rows)
    typer.run()
    assert program.batch is not None
    rows, program.batch = {name: placement.dim for name, placement in program.batch.inputs.items()}, None
    totals = _settle_moves(program, microbatches)
    _of_microbatch(program, symbol, microbatches)
    return Whole(_of_a_rank(program, context), rows, totals)


def _of_microbatch(program: Program, batch: sympy.Symbol, microbatches: int) -> None:
    """Memory is counted at the rows of a micro-batch, not at those of the call that was captured."""
    of_call = program.sizes.of_call
    of_call[batch] = max(of_call.get(batch, 1) // microbatches, 1)


def _of_a_rank(program: Program, context: CompileContext) -> Program:
    """That of one rank of the axes outside of the tensor-parallel one, so that stages send each other what this rank has.
    Passes run on it once more: it is what a capture could have given."""
    with alone(), own_functional():
        place_axes(program, context)
        cut_sequence(program, context)
    program.erase_unused()
    program.graph.lint()
    program.phase = Phase.CAPTURED
    return program


def _average(program: Program, context: CompileContext, microbatches: int) -> Whole:
    """Each micro-batch has a loss of its own rows, of which the mean is taken."""
    symbol = program.sizes.symbols.get("batch")
    if symbol is not None:
        _of_microbatch(program, symbol, microbatches)
    rows: dict[str, int] = {}
    for node, spec in program.input_nodes():
        if spec.kind == "user":
            sizes = [n.node.expr if isinstance(n, torch.SymInt) else n for n in node.meta[VAL].shape]
            if symbol in sizes:
                rows[spec.name] = sizes.index(symbol)
    _divide_loss(program, microbatches)
    return Whole(_of_a_rank(program, context), rows)


def _divide_loss(program: Program, microbatches: int) -> None:
    """One that is no sum over rows is divided among the micro-batches."""
    for node, spec in zip(program.results(), program.outputs, strict=True):
        if spec.loss and not is_transition(node, MICRO_AXIS):
            build = Builder(program, program.output_node(), node, NAME)
            share = build(torch.ops.aten.div.Tensor, node, microbatches)
            program.output_node().replace_input_with(node, share)


def _settle_moves(program: Program, microbatches: int) -> list[Total]:
    """Take the transitions between micro-batches out of the graph."""
    totals: list[Total] = []
    graph, loss = program.graph, {n for n, s in zip(program.results(), program.outputs, strict=True) if s.loss}
    _divide_loss(program, microbatches)
    inputs = dict(program.input_nodes())
    for node in [n for n in graph.nodes if is_transition(n, MICRO_AXIS)]:
        operand: Any = argument(node, "x")
        if argument(node, "src") == "R":
            made = Builder(program, node, operand, NAME)(torch.ops.aten.div.Tensor, operand, microbatches)
        elif node in loss and len(node.users) == 1:
            made = operand
        else:
            found = ancestors([operand])
            if any(inputs[n].kind in ("param", "seed") for n in found if n in inputs):
                raise PlanError(
                    f"a pipeline computes one micro-batch after the other, and %{operand.name} ({op_name(operand)}) sums over "
                    "the rows of the whole batch in the middle of the graph",
                    fix=f"compute it from one row at a time, or use {AVERAGE}",
                    **located(operand),
                )
            needs = [n for n in graph.nodes if n in found and n.op == "placeholder"]
            part = fx.Graph()
            part.output(_copied(part, graph, found, {}, operand))
            totals.append(Total(graph_module(program.gm, part), tuple(_full_name(inputs[n]) for n in needs)))
            with graph.inserting_after(program.placeholders()[-1]):
                made = graph.placeholder(f"total_{len(totals) - 1}")
            made.meta[VAL] = node.meta[VAL]
            spec = Input("user", f"total[{len(totals) - 1}]")
            program.inputs.append(spec)
            inputs[made] = spec
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return totals


def _full_name(spec: Input) -> str:
    return spec.name if spec.kind == "user" else f"{spec.kind}:{spec.name}"


def _copied(
    part: fx.Graph, graph: fx.Graph, wanted: Collection[fx.Node], env: dict[fx.Node, fx.Node], last: Any
) -> Any:
    """Copy the wanted nodes that are not in env, in their order; the copy of `last`."""
    for node in graph.nodes:
        if node in wanted and node not in env:
            env[node] = part.node_copy(node, lambda n: env[n])
    return fx.node.map_arg(last, lambda n: env[n])


# -- stages


class Cut:
    """Which stage a module is in. stages: of each stage, paths of modules that it runs."""

    def __init__(self, stages: Sequence[Sequence[str]]) -> None:
        self.count = len(stages)
        self.stage: dict[str, int] = {}
        for number, modules in enumerate(stages):
            for name in modules:
                self.stage.setdefault(name, number)

    def of(self, fqn: str) -> int | None:
        """The stage of the module or of the nearest module around it; None where the cut does not say."""
        while fqn:
            if fqn in self.stage:
                return self.stage[fqn]
            fqn = fqn.rpartition(".")[0]
        return None

    def place(self, program: Program) -> dict[fx.Node, int]:
        """The stage of each node that depends on a parameter. A value is never computed before its operands."""
        found: dict[fx.Node, int] = {}
        first: set[fx.Node] = set()  # they depend on no module that the cut names
        params = {node for node, spec in program.input_nodes() if spec.kind == "param"}
        for node in program.graph.nodes:
            operands = [a for a in node.all_input_nodes if a in found]
            if node.op != "call_function" or not (operands or any(a in params for a in node.all_input_nodes)):
                continue
            own = self.of(fqn_of(node))
            found[node] = max([own or 0, *(found[a] for a in operands)])
            if own is None and all(a in first for a in operands):
                first.add(node)
        # what forward itself makes of parameters (a cast of the head's): where it is used
        for node in reversed(list(found)):
            users = [found[user] for user in node.users if user in found]
            if node in first and users:
                found[node] = min(users)
        return found


def cut_program(whole: Whole, cut: Cut, trained: Collection[str], number: int) -> list[StageGraph]:
    """The stages of a call. trained: names of parameters that require gradients. number: of this kind of call, which tells its
    graphs from others. Raises PlanError where a stage would compute nothing, or a value may not cross."""
    program = whole.program
    place = cut.place(program)
    ends: dict[int, list[tuple[fx.Node, Output]]] = {k: [] for k in range(cut.count)}
    for node, spec in zip(program.results(), program.outputs, strict=True):
        ends[place.get(node, 0 if not spec.loss else cut.count - 1)].append((node, spec))
    idle = sorted(set(range(cut.count)) - set(place.values()))
    if idle:
        what = f"stage {idle[0]} of {cut.count} computes nothing"
        raise PlanError(what, fix="ask for fewer stages, or begin each of them with a layer that the loss depends on")
    differentiable = differentiable_nodes(
        program, lambda spec: spec.kind == "param" and not {spec.name, *spec.aliases}.isdisjoint(trained)
    )
    last_use: dict[fx.Node, int] = {}
    for node, stage in place.items():
        for operand in node.all_input_nodes:
            if operand in place:
                last_use[operand] = max(last_use.get(operand, 0), stage)
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    crossing = [
        sorted((n for n, use in last_use.items() if place[n] <= k < use), key=order.__getitem__)
        for k in range(cut.count - 1)
    ]
    for node in {n for nodes in crossing for n in nodes}:
        _check_crossing(node, program)
    known = {n: Crossing(n.name, n.meta[VAL], n in differentiable) for nodes in crossing for n in nodes}
    made = []
    for k in range(cut.count):
        receives = tuple(crossing[k - 1]) if k else ()
        sends = tuple(crossing[k]) if k < cut.count - 1 else ()
        own = [n for n in sends if place[n] == k]
        made.append(
            _Slice(whole, place, k, number).graph(
                own, ends[k], tuple(known[n] for n in receives), tuple(known[n] for n in sends)
            )
        )
    return made


def _check_crossing(node: fx.Node, program: Program) -> None:
    known = {*program.sizes.symbols.values()}
    if any(isinstance(n, torch.SymInt) and not n.node.expr.free_symbols <= known for n in node.meta[VAL].shape):
        raise PlanError(
            f"%{node.name} ({op_name(node)}) has a size that data decides, which the next stage would not know",
            fix="begin the stage at another layer (stages= takes the paths of the modules that begin one), or ask for fewer",
            **located(node),
        )


class _Slice:
    def __init__(self, whole: Whole, place: Mapping[fx.Node, int], stage: int, number: int) -> None:
        self.whole, self.program, self.place, self.stage, self.number = whole, whole.program, place, stage, number

    def graph(
        self,
        own: Sequence[fx.Node],
        ends: Sequence[tuple[fx.Node, Output]],
        receives: tuple[Crossing, ...],
        sends: tuple[Crossing, ...],
    ) -> StageGraph:
        program, inputs = self.program, dict(self.program.input_nodes())
        results = [*own, *(node for node, _ in ends)]
        received = lambda n: self.place.get(n, self.stage) < self.stage
        wanted = ancestors(results, received)
        sizes = self._sized(wanted, inputs)
        wanted |= sizes
        stored = [n for n in inputs if n in wanted and inputs[n].kind != "user"]
        given = {n: inputs[n].name for n in inputs if n in wanted and inputs[n].kind == "user"}
        given |= {n: f"value:{n.name}" for n in program.graph.nodes if n in wanted and received(n)}
        keywords = {node: f"{RECEIVED if received(node) else 'input'}{i:03d}" for i, node in enumerate(given)}
        part, env, specs = fx.Graph(), dict[fx.Node, fx.Node](), []
        for node in stored:
            env[node] = part.node_copy(node)
            specs.append(inputs[node])
        for node, keyword in keywords.items():
            env[node] = part.placeholder(keyword)
            env[node].meta.update(node.meta)
            specs.append(Input("user", f"kwargs[{keyword}]"))
        part.output(_copied(part, program.graph, wanted, env, tuple(results)))
        outputs = [Output("user", f"[{i}]") for i in range(len(own))]
        outputs += [replace(spec, name=f"[{len(own)}]") if spec.loss else spec for _, spec in ends]
        users = [i for i, o in enumerate(outputs) if o.kind == "user"]
        out_spec = pytree.tree_structure((0,) * len(users))
        leaves = tuple(OutputLeaf(i) for i in range(len(users)))
        made = replace(
            program,
            gm=graph_module(program.gm, part),
            inputs=specs,
            outputs=outputs,
            out_spec=out_spec,
            notes=list(program.notes),
            fusions=[],
            assumed={n: v for n, v in program.assumed.items() if any(n == spec.name for spec in specs)},
            batch=self._batch(keywords, results),
            call=self._call(keywords, out_spec, leaves),
        )
        takes = {keyword: given[node] for node, keyword in keywords.items()}
        return StageGraph(made, takes, receives, sends, tuple(n.name for n in own))

    def _sized(self, wanted: Collection[fx.Node], inputs: Mapping[fx.Node, Input]) -> set[fx.Node]:
        """Inputs of the call from which sizes of the graph follow."""
        found: dict[sympy.Symbol, fx.Node] = {}
        for node, spec in inputs.items():
            value = node.meta[VAL]
            for size in value.shape if spec.kind == "user" and isinstance(value, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    found.setdefault(size.node.expr, node)
        return {*found.values()}

    def _batch(self, keywords: Mapping[fx.Node, str], results: Sequence[fx.Node]) -> Batch | None:
        known = self.program.batch
        if known is None:
            return None
        held = lambda n, axis, other: n.meta.get(HELD, {}).get(axis, other)
        inputs = {f"kwargs[{k}]": n for n, k in keywords.items()}
        kinds: dict[str, Placement] = {name: held(n, BATCH_AXIS, R) for name, n in inputs.items()}
        return replace(
            known,
            inputs={name: placement for name, placement in kinds.items() if placement != R},
            outputs=tuple(held(n, BATCH_AXIS, R) for n in results),
            context_inputs={name: held(n, CONTEXT_AXIS, I) for name, n in inputs.items() if RECEIVED in name},
            context_outputs=tuple(held(n, CONTEXT_AXIS, I) for n in results),
        )

    def _call(self, keywords: Mapping[fx.Node, str], out_spec: Any, out_leaves: tuple[OutputLeaf, ...]) -> CallSpec:
        whole = self.program.call
        assert whole is not None
        leaves = [Leaf(f"kwargs[{FORM}]", False, value=f"{self.number}:{self.stage}")]
        for node, keyword in keywords.items():
            dims = tuple(sympy.sympify(n) if isinstance(n, int) else n.node.expr for n in node.meta[VAL].shape)
            leaves.append(Leaf(f"kwargs[{keyword}]", True, node.meta[VAL].dtype, dims))
        names = [FORM, *keywords.values()]
        in_spec = pytree.tree_structure(((), dict.fromkeys(names, 0), {}, {}))
        return CallSpec(in_spec, tuple(leaves), out_spec, out_leaves, whole.ranges, whole.conditions, parts=whole.parts)


def bound_shape(value: torch.Tensor, sizes: Mapping[sympy.Symbol, int]) -> tuple[int, ...]:
    """The shape of a traced value at these sizes."""
    return tuple(int(n.node.expr.xreplace(sizes)) if isinstance(n, torch.SymInt) else n for n in value.shape)


def total_of(total: Total, values: Mapping[str, Any]) -> torch.Tensor:
    """The summand of one micro-batch. values: of its inputs, by name."""
    with torch.no_grad():
        made: torch.Tensor = total.graph(*(values[name] for name in total.inputs))
    return made
