"""`megafx.verify`: all ranks of a training call, in one process or real ones, against the plain model, and where they part."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafx.analysis.communication import collective_nodes
from megafx.capture.libraries.caches import is_cache, state_of
from megafx.capture.libraries.flex import flex_on_cpu
from megafx.capture.libraries.records import kept, taken_apart
from megafx.checks import simulate
from megafx.checks.divergence import Divergence, first_divergence, first_nan
from megafx.checks.sabotage import changed_collective, with_another, without, without_transition
from megafx.checks.types import check_batch_types, check_types
from megafx.compiler.all_ranks import run_ranks
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.debugging import debug
from megafx.distributed.data import broadcast_data
from megafx.distributed.mesh import Meshes, make_meshes
from megafx.errors import PlacementError, SourceLine, UsageError
from megafx.example_call import ExampleCall
from megafx.ir.call_spec import call_tree, leaf_name
from megafx.ir.contracts import is_transition
from megafx.ir.model_copies import deep_copy
from megafx.ir.nodes import is_zero
from megafx.ir.program import VAL, Program, fqn_of, source_of
from megafx.ir.python_state import Place, unchanged
from megafx.ops.axes import Mesh
from megafx.placements.data_axis import BATCH_AXIS, CONTEXT_AXIS, DDP, EXPERT_AXIS, TENSOR_AXIS, DataAxis
from megafx.planner.context import CompileContext
from megafx.progress import stage
from megafx.runtime.module import make_parallel
from megafx.runtime.repeated_calls import Repeated, RepeatedCalls, copy_of, copy_of_model, named_outputs
from megafx.runtime.runtime import Runtime
from megafx.weights.state import full_gradients

FLOOR = torch.finfo(torch.float64).tiny


@dataclass
class Verdict:
    """Relative errors by name. reference: 'eager', or 'megafx at t=1' where eager computes something else: dropout draws
    other bits, and FP8 rounds."""

    t: int
    reference: str
    tolerance: float
    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)  # after the call
    requires_grad: list[str] = field(default_factory=list)  # outputs for which it is another than in eager mode
    divergence: Divergence | None = None
    refused: PlacementError | None = None  # by the type checker, where nothing was computed
    backend: str = ""  # of real ranks
    mesh: str = ""  # of simulated ones, where it has more than one axis: 'dp 2 x tp 3'
    nan: str = ""  # what of eager mode's results has NaN, and which value is the first that has
    repeated: Repeated = field(default_factory=Repeated)  # more calls, on one rank, with changed state between them

    @property
    def ok(self) -> bool:
        errors = (*self.outputs.values(), *self.gradients.values(), *self.buffers.values())
        one = self.refused is None and not self.requires_grad and all(e <= self.tolerance for e in errors)
        return one and not self.repeated.wrong(self.tolerance)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        if not self.outputs:
            return (
                f"typed: {self.t} ranks, no value is used at a placement that it does not have"
                if self.ok
                else str(self.refused)
            )
        worst = max(self.gradients.items(), key=lambda kv: kv[1], default=("none", 0.0))
        ranks = f"{self.t} real ranks ({self.backend})" if self.backend else f"{self.t} ranks"
        ranks += f" ({self.mesh})" if self.mesh else ""
        other = "" if self.reference == "eager" else " (eager draws other masks, or does not round to FP8)"
        against = f"{self.reference}{other}, tolerance {self.tolerance:.0e}"
        lines = [
            f"{'equal' if self.ok else 'DIFFERENT'}: {ranks} against {against}",
            *(f"  output {name}: {error:.1e}" for name, error in self.outputs.items()),
            *(f"  output {name}: requires_grad is not eager mode's" for name in self.requires_grad),
            *(f"  buffer {name}: {error:.1e}" for name, error in self.buffers.items() if error > self.tolerance),
            f"  {len(self.gradients)} gradients, worst {worst[1]:.1e} ({worst[0]})",
        ]
        if self.nan:
            lines.append(f"  NaN in eager mode too: {self.nan}")
        if self.repeated.errors:
            most = max(error for error, _ in self.repeated.errors.values())
            lines.append(
                f"  {len(self.repeated.errors)} calls on one rank, with changes between them, worst {most:.1e}"
            )
        lines += [f"  not compared, with a change {what}: {why}" for what, why in self.repeated.skipped.items()]
        if wrong := self.repeated.wrong(self.tolerance):
            lines += [f"  after a change {what}: {error:.1e}, {where}" for what, (error, where) in wrong.items()]
        elif self.divergence is not None:
            lines.append(f"  they first differ at {self.divergence}")
        elif not self.ok:
            where = "ranks that are simulated in one process agree: look at the backend, the device and its kernels"
            if self.mesh:
                where = "MEGAFX_CHECK=2 names the pass that changes numbers"
            elif not self.backend:
                where = "they part at no node of the joint graph: the passes of stage 'rank' change numbers"
            lines.append(f"  {where}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Tried:
    """One change of the graph, and whether `by` (numbers or types) noticed it."""

    change: str
    fqn: str
    source: SourceLine | None
    by: str
    noticed: bool

    def __str__(self) -> str:
        where = f" in '{self.fqn}'" if self.fqn else ""
        found = "noticed" if self.noticed else "NOT NOTICED"
        return f"{found} by {self.by}: {self.change}{where}" + (f" ({self.source})" if self.source else "")


@dataclass
class Sabotage:
    """True where every change of the graph was noticed."""

    t: int
    tried: list[Tried] = field(default_factory=list)

    def __bool__(self) -> bool:
        return all(one.noticed for one in self.tried)

    def __str__(self) -> str:
        lines = []
        for by in dict.fromkeys(one.by for one in self.tried):
            mine = [one for one in self.tried if one.by == by]
            lines.append(
                f"{sum(one.noticed for one in mine)} of {len(mine)} changes on {self.t} ranks are noticed by {by}"
            )
        return (
            "\n".join([*lines, *(f"  {one}" for one in self.tried)]) if lines else f"no collectives on {self.t} ranks"
        )


def _ranks(call: ExampleCall) -> int:
    return call.config.tensor_model_parallel_size or 2


def _context(call: ExampleCall, ranks: int, config: Config, data: DataAxis | None = None) -> CompileContext:
    wanted = call.trained if torch.is_grad_enabled() else set()
    return CompileContext(config, ranks, call.hardware, data, (lambda spec: spec.name in wanted) if wanted else None)


def config_of(mesh: Mapping[str, int], config: Config | None) -> Config:
    """The config with the sizes of a mesh of data-, context- and tensor-parallel ranks. Raises UsageError for other axes."""
    if other := mesh.keys() - {BATCH_AXIS, CONTEXT_AXIS, TENSOR_AXIS}:
        known = f"'{BATCH_AXIS}', '{CONTEXT_AXIS}' and '{TENSOR_AXIS}'"
        raise UsageError(f"mesh {dict(mesh)} has an axis '{sorted(other)[0]}'", fix=f"give the sizes of {known}")
    sizes = {"tensor_model_parallel_size": mesh.get(TENSOR_AXIS, 1), "data_parallel_size": mesh.get(BATCH_AXIS, 1)}
    sizes["context_parallel_size"] = mesh.get(CONTEXT_AXIS, 1)
    return (config or Config()).replace(**sizes)


@dataclass
class _Trial:
    """One call on t ranks, or data.ranks groups of them, and on one."""

    sharded: Compiled
    single: Callable[[], Compiled]  # compiles the call for one rank
    values: dict[str, Any]  # logical, by input
    wanted: simulate.Logical  # what one process computes
    reference: str
    limit: float  # tolerance
    requires_grad: list[str]  # outputs for which the graph's is not eager mode's
    captured: Program

    @property
    def t(self) -> int:
        return self.sharded.plan.t

    def verdict(self, found: simulate.Logical) -> Verdict:
        data = self.sharded.context.data
        verdict = Verdict(self.t * (1 if data is None else data.ranks * data.cp), self.reference, self.limit)
        if data is not None:
            verdict.mesh = " x ".join(f"{axis} {size}" for axis, size in {**data.mesh, TENSOR_AXIS: self.t}.items())
        verdict.outputs, verdict.gradients = simulate.relative_errors(found, self.wanted)
        verdict.buffers = {
            n: simulate.relative_error(found.mutations.get(n, self.values.get(n, b)), b, FLOOR)
            for n, b in self.wanted.mutations.items()
        }
        verdict.requires_grad, verdict.nan = self.requires_grad, self.nan()
        return verdict

    def nan(self) -> str:
        """What one process computes that has NaN, and which of its values is the first."""
        gradients = {f"the gradient of '{n}'": g for n, g in self.wanted.gradients.items()}
        results = {f"output '{n}'": x for n, x in self.wanted.outputs.items()} | gradients
        has = [what for what, x in results.items() if isinstance(x, Tensor) and bool(x.isnan().any())]
        if not has:
            return ""
        single = self.single()
        inputs = simulate.local_inputs(single.program, self.values, single.plan.params, 1)[0]
        first = first_nan(single.program, inputs)
        more = f" and {len(has) - 3} more" if len(has) > 3 else ""
        return f"{', '.join(has[:3])}{more}" + (f"; the first is {first}" if first else "")


@flex_on_cpu()
def verify_call(call: ExampleCall, tolerance: float | None = None, data: DataAxis | None = None) -> Verdict:
    """Compare output, loss and every gradient of config.tensor_model_parallel_size simulated ranks with one process; data: of
    so many groups of them, each with its part of the batch.

    Ranks run what real ones run (`run_ranks`): their own graphs, after all passes, with collectives among themselves.
    The model is used as it is (train or eval, with its weights) and left unchanged: a copy is captured, whose graph serves the
    repeated calls, too.
    """
    call = replace(call, model=copy_of_model(call.model))
    trial = _trial(call, call.config, tolerance, data)
    verdict = trial.verdict(run_ranks(trial.sharded, trial.values))
    if not verdict.ok and data is not None:
        return verdict
    if not verdict.ok:
        sharded, single = trial.sharded, trial.single()
        ours = simulate.local_inputs(sharded.program, trial.values, sharded.plan.params, trial.t)
        theirs = simulate.local_inputs(single.program, trial.values, single.plan.params, 1)[0]
        limit = trial.limit
        verdict.divergence = first_divergence(sharded.program, ours, single.program, theirs, tolerance=limit)
    elif call.config.rounds:
        verdict.repeated.skipped["of any kind"] = "eager does not round to FP8"
    else:
        verdict.repeated = repeat(call, trial)
    return verdict


def repeat(call: ExampleCall, trial: _Trial) -> Repeated:
    """More calls of the model on one rank, which they change, with changes between them. The first has the graph that `trial`
    captured."""
    model, random = call.model, trial.reference != "eager"
    alone = call.config.of_one_rank(cache=False)
    runtime = Runtime(model, alone, Meshes(None), call.hardware, call.loss_fn)
    runtime.uncaptured.earlier |= call.uncaptured.earlier  # captures of a copy go as those of the model
    make_parallel(runtime)
    written = _written(trial.sharded.program)
    captured = trial.captured.copy()
    with unchanged(written):
        return RepeatedCalls(model, call.args, call.kwargs, call.loss_inputs, captured, written).run(
            random, trial.limit
        )


def verify_on_ranks(call: ExampleCall, tolerance: float | None = None) -> Verdict:
    """`verify_call` on the ranks of the world: each runs a copy of the model on all of them, and one by itself.

    Collective. Weights and inputs are those of rank 0; the verdict is the same on every rank. Raises UsageError where the ranks
    are not all tensor-parallel.
    """
    device = next(iter(call.model.parameters())).device
    meshes = make_meshes(call.config, None, device)
    if meshes.data is not None or meshes.tensor is None:
        found = "real ranks are compared with one process for tensor parallelism alone"
        raise UsageError(
            found, fix="leave data_parallel_size at 1, and start as many ranks as tensor_model_parallel_size"
        )
    seed = torch.initial_seed() % 2**62
    args, kwargs, loss_inputs, seed = broadcast_data((tuple(call.args), dict(call.kwargs), call.loss_inputs, seed))
    plain, loss_fn = copy_of_model(call.model), call.loss_fn
    for tensor in (*plain.parameters(), *plain.buffers()):
        torch.distributed.broadcast(tensor.detach(), 0)
    t = torch.distributed.get_world_size()

    def run(of: nn.Module, runtime: Runtime | None) -> tuple[simulate.Logical, set[str]]:
        """Outputs, gradients and buffers, and which outputs require a gradient. Those that the graph differentiates are."""
        torch.manual_seed(seed)
        own, named_own, for_loss = copy_of((args, kwargs, loss_inputs))
        named = named_outputs(of, own, named_own, for_loss, loss_fn)
        needs = {name for name, x in named.items() if x.requires_grad}
        last = runtime.settled.last if runtime is not None else None
        if last is not None:
            chosen.update(last.program.outputs[i].name or "output" for i in last.differentiated)
        roots = [x for name, x in named.items() if name in chosen and x.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        gradients: dict[str, Tensor | None] = {name: p.grad for name, p in of.named_parameters()}
        gradients |= {} if runtime is None else full_gradients(of)
        outputs = {name: x.detach() for name, x in named.items()}
        return simulate.Logical(outputs, gradients, dict(of.named_buffers())), needs

    def parallel(meshes: Meshes, config: Config) -> tuple[nn.Module, Runtime]:
        runtime = Runtime(deep_copy(plain), config, meshes, call.hardware, loss_fn)
        return make_parallel(runtime), runtime

    chosen: set[str] = set()
    sharded, runtime = parallel(meshes, call.config)
    ours, needs = run(sharded, runtime)
    assert runtime.settled.last is not None
    program = runtime.settled.last.program
    verdict = Verdict(t, "eager", _rounding(program) if tolerance is None else tolerance)
    verdict.backend = f"{torch.distributed.get_backend()} on {device.type}"
    if any(spec.kind == "seed" for spec in program.inputs) or call.config.rounds:
        verdict.reference = "megafx at t=1"
        alone = call.config.of_one_rank()
        wanted, needed = run(*parallel(Meshes(None), alone))
    else:
        wanted, needed = run(plain, None)
    verdict.requires_grad = sorted(needs ^ needed)
    buffers = {n: simulate.relative_error(ours.mutations[n], b, FLOOR) for n, b in wanted.mutations.items()}
    errors: list[Any] = [None] * t
    torch.distributed.all_gather_object(errors, (*simulate.relative_errors(ours, wanted), buffers))
    for mine in errors:
        for total, part in zip((verdict.outputs, verdict.gradients, verdict.buffers), mine, strict=True):
            total.update({name: max(error, total.get(name, 0.0)) for name, error in part.items()})
    nan = any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in wanted.outputs.values())
    nan = nan or any(g is not None and bool(g.isnan().any()) for g in wanted.gradients.values())
    if nan or not verdict.ok:
        config = call.config.replace(tensor_model_parallel_size=t)
        whole = replace(call, model=plain, args=args, kwargs=kwargs, loss_inputs=loss_inputs, config=config)
        simulated = verify_call(whole, tolerance)
        verdict.nan, verdict.divergence = simulated.nan, None if verdict.ok else simulated.divergence
    return verdict


@flex_on_cpu()
def sabotage_call(call: ExampleCall) -> Sabotage:
    """Take away each collective of the call's graph, put another in its place, and see whether the comparison notices.

    The type checker gets the same graph before transitions become collectives, without each transition in turn.
    """
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    watched = call.config.replace(passes=(*call.config.passes, ("after scaled_products", keep)))
    data = DataAxis.of_context(call.config)
    if data is not None:  # parameters are whole: how they are stored is not what the graph computes
        data = replace(data, form=DDP, shard_ranks=1)
    trial = _trial(call, watched, None, data)
    program, plan, t = trial.sharded.program, trial.sharded.plan, trial.t

    def is_right() -> bool:
        try:
            return trial.verdict(simulate.run_logical(program, trial.values, plan.params, t, data=data)).ok
        except PlacementError:
            return False

    def is_typed() -> bool:
        try:
            check_types(joint, plan, t)
            check_batch_types(joint)
        except PlacementError:
            return False
        return True

    joint = next(p for p in kept if any(s.kind == "gradient" for s in p.outputs)) if len(kept) > 1 else kept[0]
    if not is_right():
        raise PlacementError("the call is not right as it is", fix="look at what megafx.verify says")
    mesh = Mesh({**({} if data is None else data.mesh), TENSOR_AXIS: t})
    ranks = {axis: len(groups[0]) for axis, groups in mesh.groups.items()}
    found = Sabotage(len(mesh.ranks))
    counts = torch.ops.megafx.room_needed.default  # with other numbers nothing runs
    for start in [node for node in collective_nodes(program.graph) if node.target is not counts]:
        for what, change in (("without", without), ("with another instead of", with_another)):
            with (
                stage(f"{what} {start.name}"),
                changed_collective(program.graph, start, ranks[str(start.args[-1])], change),
            ):
                found.tried.append(
                    Tried(f"{what} %{start.name}", fqn_of(start), source_of(start), "numbers", not is_right())
                )
    if is_typed():
        # of experts: a parameter's own, which `hold_experts` takes away
        axes = [axis for axis in ranks if axis != EXPERT_AXIS]
        moved = [n for axis in axes for n in joint.graph.nodes if is_transition(n, axis)]
        for node in [n for n in moved if set(n.args[1:3]) != {"I", "R"} and not is_zero(n.args[0])]:
            with without_transition(joint.graph, node):
                found.tried.append(
                    Tried(f"without %{node.name}", fqn_of(node), source_of(node), "types", not is_typed())
                )
    return found


def _trial(call: ExampleCall, config: Config, tolerance: float | None, data: DataAxis | None = None) -> _Trial:
    leaves = [x for x in (*call.args, *call.kwargs.values()) if isinstance(x, Tensor)]
    if any(x.device.type == "meta" for x in (*call.model.parameters(), *leaves)):
        raise UsageError("verify computes, so it needs real weights and inputs", fix="materialise the model first")
    captured, t = call.program(_ranks(call)), _ranks(call)

    def compiled(ranks: int, data: DataAxis | None = None) -> Compiled:
        return compile_program(captured.copy(), _context(call, ranks, config, data))

    sharded, single = compiled(t, data), functools.cache(lambda: compiled(1))
    plain = copy_of_model(call.model)
    with unchanged(_written(sharded.program)):
        eager = _eager_outputs(plain, sharded.program, call)
    seed = torch.initial_seed() % 2**62
    values = input_values(sharded.program, call.model, call.args, call.kwargs, loss_inputs=call.loss_inputs, seed=seed)
    values = {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()}
    differentiated = [sharded.program.outputs[i].name for i in sharded.differentiated]
    tangents = {name: torch.ones_like(eager[name]) for name in differentiated}
    values |= tangents
    if data is not None:
        _check_parts(sharded.program, values, data)
    random = any(spec.kind == "seed" for spec in sharded.program.inputs) or config.rounds
    if random:
        wanted = run_ranks(single(), values)
    else:
        if tangents:
            torch.autograd.backward([eager[name] for name in tangents], [*tangents.values()])
        outputs = {name: value.detach() for name, value in eager.items()}
        wanted = simulate.Logical(outputs, {name: p.grad for name, p in plain.named_parameters()})
        wanted.mutations = dict(plain.named_buffers())
    limit = _rounding(sharded.program) if tolerance is None else tolerance
    reference = "megafx at t=1" if random else "eager"
    needs = {o.name: o.requires_grad for o in sharded.program.outputs if o.kind == "user"}
    differ = [name for name, value in eager.items() if value.requires_grad != needs[name]]
    return _Trial(sharded, single, values, wanted, reference, limit, differ, captured)


def _written(program: Program) -> list[Place]:
    """Where forward leaves something; other models share what is in classes and globals."""
    assert program.call is not None
    return [write.place for write in program.call.state.writes.values()]


def input_values(
    program: Program,
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_inputs: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Values of the inputs by name for a call of `model` (any model with the same FQNs, e.g. an fp64 copy); no tangents."""
    if program.call is None:
        raise UsageError("this program was not made by capture, so its inputs have no names in a call")
    state: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    user = iter(program.call.flatten(args, kwargs, loss_inputs))
    values: dict[str, Any] = {}
    for spec in program.inputs:
        if spec.kind in ("param", "buffer"):
            values[spec.name] = state[spec.name]
        elif spec.kind == "constant":
            values[spec.name] = program.constants[spec.name]
        elif spec.kind == "user":
            values[spec.name] = next(user)
        elif spec.kind == "seed":
            values[spec.name] = torch.tensor(seed, dtype=torch.int64)
    return values


def _check_parts(program: Program, values: Mapping[str, Any], data: DataAxis) -> None:
    """Raise UsageError where ranks cannot be given equal parts of the batch, or the graph has no batch of all ranks."""
    if program.batch is None or not program.batch.whole:
        found = "with data_parallel_loss='average' ranks compute no loss of one batch"
        raise UsageError(found, fix="leave it at 'batch', or verify {'tp': ...} alone")
    for name, placement in program.batch.inputs.items():
        rows = values[name].shape[placement.dim]
        if rows % data.ranks:
            found = f"'{name}' has {rows} rows, which {data.ranks} ranks cannot share out equally"
            raise UsageError(found, fix=f"give example_inputs with {2 * data.ranks} rows")


def _eager_outputs(plain: nn.Module, program: Program, call: ExampleCall) -> dict[str, Tensor]:
    """Tensor outputs of the plain model, with autograd's graph, by the names that the graph gives them."""
    args, kwargs, loss_inputs = call_tree(*copy_of((tuple(call.args), call.kwargs, call.loss_inputs or {})))
    output = plain(*args, **kwargs)
    if call.loss_fn is not None:
        output = (call.loss_fn(output, **loss_inputs), output)
    assert program.call is not None
    order = any(o.kind == "order" for o in program.outputs)
    wanted = program.call.out_leaves[: len(program.call.out_leaves) - order]
    writes = program.call.state.writes.values()  # what forward leaves in attributes, lists and dicts
    left = [leaf for write in writes for leaf in write.left(write.place.get_in(plain))]
    tree = taken_apart((args, kwargs, loss_inputs))
    inputs = {leaf_name(path): x for path, x in pytree.tree_flatten_with_path(tree)[0]}
    state = {f"state[{name}]": p for name, p in program.call.state.inputs.items() if isinstance(p, Place)}
    left += [state[name].get_in(plain) if name in state else inputs[name] for name in program.call.written]
    leaves = [leaf for leaf in pytree.tree_leaves(kept(output), is_leaf=is_cache) if not is_cache(leaf)]
    if len(leaves) + len(left) < len(wanted):  # caches that the model was asked for, or filled itself (prefix tuning)
        states = pytree.tree_map(lambda x: state_of(x) if is_cache(x) else x, output, is_leaf=is_cache)
        leaves = pytree.tree_leaves(states)
    user = [o for o in program.outputs if o.kind == "user"]
    named: dict[str, Tensor] = {}
    for out, leaf in zip(wanted, (*leaves, *left), strict=True):
        place = out.value[1] if out.number and out.value[0] == "of" else out.index
        if place >= 0 and (out.number or isinstance(leaf, Tensor)):
            named.setdefault(user[place].name, leaf if isinstance(leaf, Tensor) else torch.tensor(leaf))
    return named


def types_of_call(call: ExampleCall, data: DataAxis | None = None) -> Verdict:
    """Check the types of the joint graph alone, once for each axis: no numbers, so the model may be on the meta device."""
    program, verdict = call.program(_ranks(call)), Verdict(_ranks(call), "the types of its values", 0.0)
    try:
        with debug(check=1):
            compile_program(program, _context(call, _ranks(call), call.config, data))
    except PlacementError as error:
        verdict.refused = error
    return verdict


def _rounding(program: Program) -> float:
    """What the coarsest dtype of inputs and casts rounds to: fp64 models may compute their loss in fp32."""
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" or "_to_copy" in str(n.target)]
    dtypes = {n.meta[VAL].dtype for n in nodes if isinstance(n.meta[VAL], Tensor)}
    known = [simulate.TOLERANCE[d] for d in dtypes if d in simulate.TOLERANCE]
    return max(known, default=simulate.TOLERANCE[torch.float32])
