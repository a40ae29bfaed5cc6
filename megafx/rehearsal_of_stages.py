"""`megafx.rehearse` of a pipeline: the ranks of each stage, what they send each other, and the memory of its schedule.

The ranks of a stage are a mesh of their own, whose orders are proven as those of a run without stages (megafx/rehearsal.py), of
each backward that micro-batches have. They start the graphs of their stage in one order, that of the schedule. So a run is free
of deadlock if one column of ranks is, a rank of each stage: its messages and waits are those of megafx/stage_orders.py. What is
sent is read off the graphs that run, what is received off the buffers that the cut says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megafx.analysis.memory import Memory
from megafx.compiler.compiled import Compiled
from megafx.compiler.cut_stages import Crossing, StageGraph, Whole, share_out
from megafx.compiler.pipeline import compile_program
from megafx.errors import ConfigError
from megafx.example_call import ExampleCall
from megafx.ir.program import VAL, Input, Program
from megafx.ir.sizes import Sizes
from megafx.ops.axes import AxisContext, Mesh
from megafx.placements.data_axis import PIPELINE_AXIS, TENSOR_AXIS, DataAxis
from megafx.planner.context import CompileContext, Gradients, in_training, price_workload
from megafx.planner.pipeline_step import Split
from megafx.progress import stage, uncollected
from megafx.rehearsal import Edit, Proven, RankClass, Rehearsal, mesh_of, proven, room_of
from megafx.stage_orders import Compute, Ends, Order, check_messages, most_alive, orders_of
from megafx.staging import Divided, divide, schedule_of, several_stages, with_stages
from megafx.what_if import modelled_step

Change = Callable[[int, StageGraph], StageGraph]
AFTERWARDS = "sums of parameters that several stages hold, and the loss, which ranks exchange after the last backward"


@dataclass(frozen=True)
class Proposal:
    """A pipeline as `megafx.pipeline` takes it. ranks: of its axis."""

    stages: int | Sequence[str]
    microbatches: int
    kind: Any
    ranks: int


def proposed(
    config: Any, world: int | None, stages: int | Sequence[str], microbatches: int | None, schedule: str
) -> tuple[Any, Proposal, int]:
    """(config, pipeline, ranks in all). Without data_parallel_size, data-parallel ranks are those that are left, where the
    schedule says how many a pipeline has. Raises ConfigError."""
    if microbatches is None:
        raise ConfigError(
            "stages without microbatches", fix="say into how many micro-batches a step cuts a rank's batch"
        )
    kind, config = schedule_of(schedule), with_stages(config, microbatches)
    count = stages if isinstance(stages, int) else len(stages) + 1
    t, d = config.tensor_model_parallel_size or 1, config.data_parallel_size
    inner = t * config.context_parallel_size
    if world is None:
        world = count * inner * (d or 1)
    if d is None:
        d = 1 if several_stages(kind) else max(world // (inner * count), 1)
        config = config.replace(data_parallel_size=d)
    ranks = world // (inner * d)
    if ranks < 2 or ranks * inner * d != world:
        c = config.context_parallel_size
        found = (
            f"{world} ranks are no pipeline of tensor_model_parallel_size={t}, context_parallel_size={c} "
            f"and data_parallel_size={d}"
        )
        raise ConfigError(found, fix="give a multiple of their product, of at least two pipeline ranks")
    return config, Proposal(stages, microbatches, kind, ranks), world


@uncollected()
def rehearse_stages(
    call: ExampleCall, asked: Proposal, world: int, edit: Edit | None = None, change: Change | None = None
) -> Rehearsal:
    """edit, change: as `stages_of` takes them. Raises PlacementError where ranks of a group, or the two ends of a message,
    differ; ConfigError where the mesh has another number of ranks."""
    made = stages_of(call, asked, edit, change)
    sizes = {PIPELINE_AXIS: asked.ranks, **_inner(made.call)}
    return _rehearsed(made, asked, sizes, mesh_of(sizes, world))


@dataclass(frozen=True)
class Staged:
    """call: with the sizes of a micro-batch."""

    call: ExampleCall
    divided: Divided
    stages: list[OneStage]

    def orders(self, asked: Proposal, place: int = 0) -> list[Order]:
        """Of the pipeline ranks at this place of the stages' meshes."""
        ends = [each.ends[each.last.proof.kinds[place]] for each in self.stages]
        return orders_of(asked.kind, ends, asked.ranks, asked.microbatches)


def stages_of(call: ExampleCall, asked: Proposal, edit: Edit | None = None, change: Change | None = None) -> Staged:
    """The stages of a call, each compiled, and proven on its own. edit(program, places): as in `rehearse_compiled`, places with
    that on 'pp'; change(stage, its graph): other graphs. Tests plant faults so."""
    if call.given and call.config.micro_batch_size is not None:  # that of the whole batch
        rows = max(1, call.config.micro_batch_size // asked.microbatches)
        call = replace(call, config=call.config.replace(micro_batch_size=rows))
    config, data = call.config, DataAxis.of(call.config)
    context = CompileContext(config, call.t, call.hardware, data, wants_grad=in_training(frozenset()))
    average = config.data_parallel_loss == "average"
    parts = 1 if average else asked.microbatches * (config.data_parallel_size or 1)
    with stage("stages"):
        whole = share_out(call.program(data_ranks=parts), replace(context), asked.microbatches)
        divided = divide(whole, context, asked.kind, asked.stages, asked.ranks, call.trained)
    if change is not None:
        divided = replace(divided, graphs=[change(k, graph) for k, graph in enumerate(divided.graphs)])
    mesh, stages = Mesh(_inner(call)), []
    for k, graph in enumerate(divided.graphs):
        with stage(f"stage {k}"):
            stages.append(OneStage.of(call, asked, divided, whole, k, graph, mesh, edit))
    return Staged(call, divided, stages)


def _inner(call: ExampleCall) -> dict[str, int]:
    """Sizes of the mesh of a stage."""
    data = DataAxis.of(call.config)
    return {**(data.mesh if data is not None else {}), TENSOR_AXIS: call.t}


@dataclass(frozen=True)
class _Form:
    """A backward of a stage."""

    proof: Proven
    memory: Mapping[Any, Memory]  # by class of ranks
    held: int  # bytes of gradients that wait for others


@dataclass(frozen=True)
class OneStage:
    """forms: name of a backward -> what it is; ends: class of ranks -> what crosses the cuts. Of a micro-batch: bytes of what
    the stage before it sends (received), of gradients from the stage after it, and of the call's inputs."""

    mesh: Mesh
    forms: Mapping[Gradients, _Form]
    ends: Mapping[Any, Ends]
    received: int
    gradients: int
    inputs: int

    @classmethod
    def of(
        cls,
        call: ExampleCall,
        asked: Proposal,
        divided: Divided,
        whole: Whole,
        k: int,
        graph: StageGraph,
        mesh: Mesh,
        edit: Edit | None,
    ) -> OneStage:
        compiled = compile_program(graph.program.copy(), _context(call, divided, graph))
        at = AxisContext(k % asked.ranks, asked.ranks, PIPELINE_AXIS)
        here = edit and (lambda program, places: edit(program, {**places, PIPELINE_AXIS: at}))
        forms: dict[Gradients, _Form] = {}
        known = None
        for gradients in _backwards(compiled, asked.microbatches):
            one = compiled if gradients == "reduce" else compiled.with_gradients(gradients)
            proof = known = proven(one, mesh, here, f" of stage {k}", known)
            memory = {kind: one.memory(axes=mesh.ranks[ranks[0]]) for kind, ranks in proof.members.items()}
            forms[gradients] = _Form(proof, memory, _held(one))
        assert known is not None
        price_workload(whole.program, call.config)
        ends = {kind: _ends(graph, program, whole.program.sizes) for kind, program in known.programs.items()}
        bytes_of = lambda crossing: sum(whole.program.sizes.bytes(c.value) for c in crossing)
        own = {f"kwargs[{keyword}]" for keyword, name in graph.takes.items() if not name.startswith("value:")}
        program = compiled.program
        inputs = sum(program.sizes.bytes(n.meta[VAL]) for n, spec in program.input_nodes() if spec.name in own)
        back = bytes_of(c for c in graph.sends if c.differentiable)
        return cls(mesh, forms, ends, bytes_of(graph.receives), back, inputs)

    @property
    def last(self) -> _Form:
        return [*self.forms.values()][-1]

    def form(self, number: int, last: bool) -> Gradients:
        """The backward that comes as this one of a stage."""
        names = [*self.forms]
        return names[-1] if last else names[min(number, max(len(names) - 2, 0))]


def _context(call: ExampleCall, divided: Divided, graph: StageGraph) -> CompileContext:
    """What a stage is compiled with."""
    come = {f"value:{c.name}" for c in graph.receives if c.differentiable}
    wanted = {f"kwargs[{keyword}]" for keyword, name in graph.takes.items() if name in come}
    trained = call.trained

    def wants(spec: Input) -> bool:
        return spec.name in wanted if spec.kind == "user" else spec.kind == "param" and spec.name in trained

    names = {spec.name for spec in graph.program.inputs if spec.kind == "param"}
    fixed = {name: placement for name, placement in divided.plan.params.items() if name in names}
    return CompileContext(
        call.config, call.t, call.hardware, DataAxis.of(call.config), wants_grad=wants, fixed=fixed,
        fixed_experts=divided.plan.experts, device_bytes=call.hardware.memory_bytes,
    )  # fmt: skip


def _backwards(compiled: Compiled, microbatches: int) -> list[Gradients]:
    """Those of the micro-batches, in their order: data-parallel ranks reduce gradients once, after the last."""
    if compiled.context.data is None or microbatches == 1:
        return ["reduce"]
    more: list[Gradients] = ["accumulate"] if compiled.context.config.gradient_accumulation_fusion else []
    return ["hold", *(more if microbatches > 2 else []), "add"]


def _held(compiled: Compiled) -> int:
    """Bytes of gradients of a micro-batch, as they wait for those of the others."""
    program = compiled.program
    return sum(program.sizes.bytes(node.meta[VAL]) for _, node, _ in program.parameter_gradients())


def _ends(graph: StageGraph, program: Program, sizes: Sizes) -> Ends:
    """program: PARTITIONED, of a rank; sizes: of the whole call, in which the cut gives what crosses."""
    parts = program.partition
    assert parts is not None
    results: Any = parts.forward.graph.output_node().args[0]
    kept = [spec for spec in program.outputs if spec.kind != "gradient"]
    user = [node for node, spec in zip(results, kept, strict=False) if spec.kind == "user"]
    moved = {c.name: _text(c.value, sizes) for c in (*graph.receives, *graph.sends)}
    sent = moved | {name: _text(node.meta[VAL], program.sizes) for name, node in zip(graph.made, user, strict=False)}
    keyword = {f"kwargs[{k}]": name.removeprefix("value:") for k, name in graph.takes.items()}
    gradients: dict[str, str] = {c.name: moved[c.name] for c in graph.receives}
    if parts.last_backward is not None:
        grads: Any = parts.last_backward.graph.output_node().args[0]
        specs = [spec for spec in program.outputs if spec.kind == "gradient"]
        for node, spec in zip(grads, specs, strict=True):
            if spec.name in keyword and node is not None:
                gradients[keyword[spec.name]] = _text(node.meta[VAL], program.sizes)

    def listed(values: Sequence[Crossing], texts: Mapping[str, str], all_: bool) -> tuple[tuple[str, str], ...]:
        return tuple((c.name, texts[c.name]) for c in values if all_ or c.differentiable)

    return Ends(
        listed(graph.receives, moved, True), listed(graph.sends, sent, True),
        listed(graph.receives, gradients, False), listed(graph.sends, sent, False),
    )  # fmt: skip


def _text(value: torch.Tensor, sizes: Sizes) -> str:
    numbers = (str(sizes.workload(n)) for n in sizes.shape(value))
    return f"{str(value.dtype).removeprefix('torch.')}[{' '.join(numbers)}]"


# -- together


def _rehearsed(made: Staged, asked: Proposal, sizes: Mapping[str, int], mesh: Mesh) -> Rehearsal:
    call, stages, inner = made.call, made.stages, len(made.stages[0].mesh.ranks)
    columns: dict[tuple[Any, ...], int] = {}  # classes of a column's ranks in each stage -> the first such place
    for place in range(inner):
        columns.setdefault(tuple(each.last.proof.kinds[place] for each in stages), place)
    orders: list[Order] = []
    for place in columns.values():
        orders = made.orders(asked, place)
        check_messages(orders, lambda r, place=place: f"rank {r * inner + place} (pp {r})")  # type: ignore[misc]  # bound now
    context = CompileContext(call.config, call.t, call.hardware, device_bytes=call.hardware.memory_bytes)
    room, classes = room_of(context), []
    counts: dict[str, int] = defaultdict(int)
    for rank, order in enumerate(orders):
        mine = {k: each for k, each in enumerate(stages) if k % asked.ranks == rank}
        started = _started(order, mine)
        for axis, count in started.items():
            counts[axis] = max(counts[axis], count)
        alive = most_alive(order)
        kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for place in range(inner):
            kinds[tuple(each.last.proof.kinds[place] for each in mine.values())].append(place)
        read = [axis for axis in stages[0].mesh.groups if any(axis in each.last.proof.read for each in mine.values())]
        for kind, members in kinds.items():
            peak = _peak(order, mine, dict(zip(mine, kind, strict=True)))
            named = replace(next(iter(mine.values())).last.proof, read=read).name(stages[0].mesh, members)
            name = f"pp {rank}, {named}" if named else f"pp {rank}"
            first, last = rank * inner + members[0], rank * inner + members[-1]
            fits = None if room is None else peak <= room
            classes.append(RankClass(name, len(members), first, last, sum(started.values()), peak, fits, alive))
    groups = {a: (len(g), len(g[0]), counts[a]) for a, g in mesh.groups.items() if counts.get(a)}
    report = made.divided.plan.report
    assert report is not None
    split = Split(asked.ranks, len(stages) // asked.ranks, asked.microbatches, made.divided.begins)
    parts, unpriced = modelled_step(report.costed, report.step, call.config, call.hardware, split)
    seen = dict.fromkeys(text for each in stages for text in each.last.proof.not_seen)
    return Rehearsal(len(mesh.ranks), sizes, tuple(classes), groups, parts, room, (*seen, AFTERWARDS, *unpriced))


def _started(order: Order, stages: Mapping[int, OneStage]) -> dict[str, int]:
    """Collectives by axis, and messages, that a rank of these stages starts in a step."""
    counts: dict[str, int] = defaultdict(int)
    done: dict[int, int] = defaultdict(int)
    begun: set[int] = set()
    for act in order:
        if isinstance(act, Compute):
            each, backward = stages[act.stage], act.direction == "backward"
            form = each.form(done[act.stage], act.last) if backward else next(iter(each.forms))
            done[act.stage] += backward
            proof = each.forms[form].proof
            for one in proof.orders[proof.kinds[0]]:
                once = one.direction == "before forward"
                if one.direction == act.direction or (once and not backward and act.stage not in begun):
                    counts[one.axis] += 1
            begun |= set() if backward else {act.stage}
        elif messages := getattr(act, "messages", ()):
            counts[PIPELINE_AXIS] += len(messages)
    return counts


def _peak(order: Order, stages: Mapping[int, OneStage], kinds: Mapping[int, Any]) -> int:
    """Bytes of a rank of these stages at the highest point of a step, by the one model of memory: what is held throughout, what
    each micro-batch under way keeps, gradients that wait, and the graph that runs."""
    first = {k: next(iter(each.forms.values())).memory[kinds[k]] for k, each in stages.items()}
    final = {k: each.last.memory[kinds[k]] for k, each in stages.items()}
    workspace = next(iter(first.values())).workspace
    standing = workspace + sum(m.standing - m.workspace + m.casts - stages[k].received for k, m in first.items())
    count = sum(isinstance(act, Compute) and act.direction == "forward" for act in order) // len(stages)
    standing += (count - 1) * sum(each.inputs for each in stages.values())
    peak = standing + sum(m.gradients + m.step for m in final.values())  # the optimizer's step
    alive: dict[int, int] = dict.fromkeys(stages, 0)
    done: dict[int, int] = dict.fromkeys(stages, 0)
    for act in order:
        if not isinstance(act, Compute):
            continue
        k, each = act.stage, stages[act.stage]
        running = first[k].forward
        now = standing + each.received
        if act.direction == "backward":
            alive[k] -= 1
            made = each.forms[each.form(done[k], act.last)].memory[kinds[k]].backward
            running = running if made is None else made
            now += each.gradients
        for j, m in first.items():
            kept = 0 if m.backward is None else m.backward.start
            now += alive[j] * (kept + stages[j].received) + _gradients(stages[j], final[j], done[j], count)
        peak = max(peak, now + running.peak)
        if act.direction == "backward":
            done[k] += 1
        else:
            alive[k] += 1
    return peak


def _gradients(each: OneStage, memory: Memory, done: int, count: int) -> int:
    """Bytes of the gradients that a stage has after so many backwards of `count`."""
    if done == 0:
        return 0
    return memory.gradients if len(each.forms) == 1 or done == count else next(iter(each.forms.values())).held
