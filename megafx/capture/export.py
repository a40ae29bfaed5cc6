"""torch.export of one call of a model -> `Program`.

Non-strict export under FakeTensors: nothing is allocated, and the model is as before when capture returns. The graph is
pre-dispatch ATen in training form: `linear`, `layer_norm`, `dropout` and the like are whole, in-place ops are still there.

A loss that is computed in the user's loop enters the graph by `loss_fn`: the captured call is then
`loss_fn(output, **loss_inputs)` on top of the model, and its result is the pair (loss, output).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import sympy
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from megafx.analysis.tables import read_table
from megafx.capture.asked import Asked
from megafx.capture.conversions import Converting
from megafx.capture.dims import NamedDims, Traced, max_length, name_dims, plain_lists, suggested_fixes
from megafx.capture.eager_parts import CallValues
from megafx.capture.errors import refuse_leaves, refuse_quantised, refuse_scripted, translate
from megafx.capture.exported_call import ExportedCall, part_forward
from megafx.capture.followed import Followed, Trace, TraceAgain
from megafx.capture.libraries.caches import growing_dims, states_for_caches, written_arguments
from megafx.capture.libraries.huggingface import part_group, sequence_group
from megafx.capture.libraries.records import taken_apart
from megafx.capture.like_layers import LikeLayers
from megafx.capture.messages import Warned
from megafx.capture.prepare import alone, fake_like, prepared, target_device
from megafx.capture.program import (
    Returned,
    drop_unread,
    mark_losses,
    mark_nodes,
    name_inputs,
    name_outputs,
    refuse_nodes,
)
from megafx.capture.small_sizes import listing, writes_in_place
from megafx.capture.tensor_hooks import place_hooks
from megafx.errors import CaptureError, MegafxError
from megafx.ir.call_spec import (
    CallSpec,
    Leaf,
    call_tree,
    leaf_name,
    no_autocast,
    register_dataclasses,
    same_tensors,
    violated,
)
from megafx.ir.data_sizes import DataShapeEnv
from megafx.ir.program import VAL, Note, Phase, Program, number_sizes
from megafx.ir.python_state import Place
from megafx.ir.sizes import Sizes
from megafx.ops.eager_call import matching
from megafx.ops.eager_probes import forget_made_up, refuse_made_up
from megafx.progress import stage

_OF_EXPORT = (type(None), bool, int, float, str)  # constants that torch.export takes
_GREATEST = 2**31 - 1  # a dim without an upper bound


def capture_call(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    loss_inputs: Mapping[str, Any] | None = None,
    dynamic: bool = True,
    device: torch.device | None = None,
    forward: Callable[..., Any] | None = None,
    stand_ins: Mapping[str, torch.Tensor] | None = None,
    varying: frozenset[str] = frozenset(),
    eager: Sequence[str] = (),
    part: str = "",
    data_ranks: int = 1,
    fixed: Collection[str] = (),
    state: Mapping[str, Place] | None = None,
    functions: Sequence[CodeType] = (),
    scaled: bool = False,
    converting: Converting | None = None,
    earlier: dict[Hashable, Traced] | None = None,
    under_no_grad: bool = False,
    asking: bool = True,
) -> Program:
    """Capture model(*args, **kwargs) in the model's present per-module train/eval state, grad mode and autocast state.

    dynamic: batch and sequence are symbols; else every size is that of the call.
    device: where the graph runs (default: where the model or its inputs are; for a model on meta CUDA if there is any).
    forward: what to call as forward(model, *args, **kwargs) (default: the model itself).
    stand_ins: FQN -> tensor (meta will do) whose shape and dtype the parameter has in the graph.
    varying: names of Python numbers among the inputs (`kwargs[scale]`) that enter as 0-d tensors; all others are baked in.
    eager: globs of submodules that are one node each (ops/eager_call.py).
    part: FQN of the submodule that is called instead of the model (its own hooks are not: they run when it is called). The
    graph has no other parameters and buffers than those that it reads, under their names in the model, and no loss.
    data_ranks: over how many ranks the batch is cut: the model sees that many times the rows of this call.
    fixed: names of dims that are constants of the graph. Sizes of 0 and 1 become such by themselves where the model may
    compute something else at them than the graph (small_sizes.py).
    state: names of places whose values (numbers, tensors) are inputs of the graph instead of being baked in.
    functions: code of functions that are one node each (eager_parts.py). scaled: see `Probes`. converting: code whose
    `float(tensor)` is `.item()` (conversions.py).
    earlier: how captures of this model went before, by kind of call; this one adds to it. under_no_grad: the call is made under
    torch.no_grad(), and what forward computes in torch.enable_grad() has gradients. asking: code
    may decide by values of the arguments, for calls that decide the same.
    """
    args, kwargs, _ = states_for_caches(args, kwargs or {})
    if loss_inputs and loss_fn is None:
        raise CaptureError("loss_inputs without a loss_fn", fix="pass loss_fn= to parallelize, or drop loss_inputs")
    tree = call_tree(args, kwargs, loss_inputs)
    while register_dataclasses(pytree.tree_leaves(tree)):
        pass
    args, kwargs, loss_inputs = tree = taken_apart(tree)
    leaves = [(leaf_name(path), value) for path, value in pytree.tree_flatten_with_path(tree)[0]]
    refuse_leaves(leaves)
    refuse_scripted(model)
    refuse_quantised(model)
    refuse_lazy(model)
    module = model.get_submodule(part)
    where = device or target_device(model, [value for _, value in leaves])
    root = ExportedCall(model, loss_fn, part_forward(module) if part else forward)
    root.under_no_grad, root.reads_sizes = under_no_grad, converting is not None and converting.reads_sizes

    tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor)]

    def named() -> NamedDims:
        if not dynamic:
            return NamedDims([{} for _ in tensors])
        group_of = part_group if part else sequence_group(model)
        return name_dims(tensors, max_length(module) or max_length(model), group_of, growing_dims(tree))

    def captured(varying: frozenset[str], state: Mapping[str, Place], fixed: frozenset[str]) -> Program:
        dims, followed = named(), Followed(dict(state))
        dims.constant |= fixed
        capture = _Capture(
            root, tree, leaves, dims, where, stand_ins or {}, varying, eager, part, data_ranks, followed, functions, scaled,
            converting,
            {} if earlier is None else earlier, asking and data_ranks == 1,
        )  # fmt: skip
        program = capture.run(fixed)
        warned[id(program)] = capture.trace.reads.warned
        return program

    def served(program: Program) -> bool:
        assert program.call is not None
        return program.call.mismatch(args, kwargs, loss_inputs) is None

    few = frozenset(name for name, size in named().user.items() if size < 2 and (name != "batch" or data_ranks == 1))
    constant, general, small, warned = frozenset(fixed), None, {}, dict[int, list[Warned]]()
    with alone(), stage("capture"):
        while True:
            try:
                program = _both_ways(functools.partial(captured, fixed=constant), varying, state or {})
            except CaptureError:
                if few <= constant:
                    raise
                constant, general = constant | few, None  # the error may be of code that is for larger sizes
                continue
            assert program.call is not None
            if general is not None and general.call and general.call.prove(small, program.call) and served(general):
                serving = general
                break
            serving = program
            if few <= constant or served(program):
                break
            small = program.call.undecided(args, kwargs, loss_inputs)
            general = program if small else None
            constant |= small.keys() or few
    for each in warned[id(serving)]:
        each.show()
    return serving


def refuse_lazy(model: nn.Module) -> None:
    """Raise CaptureError where a parameter or buffer has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise CaptureError(
                f"'{name}' has no shape yet: a lazy module takes it from its first call",
                fix="call the model once on a batch before it is parallelized",
                module=name.rpartition(".")[0],
            )


def _both_ways(
    captured: Callable[[frozenset[str], Mapping[str, Place]], Program],
    varying: frozenset[str],
    state: Mapping[str, Place],
) -> Program:
    """With the numbers `varying`, and the values of `state`, as tensors, where these mean the same to the model."""
    baked = captured(frozenset(), {})
    if not varying and not state:
        return baked
    try:
        program = captured(varying, state)
    except CaptureError as error:
        reason = error.found
    else:
        if _result_types(program) == _result_types(baked) and _numbers_read(program) == _numbers_read(baked):
            return program
        reason = "as tensors they mean something else to the model"
    names = ", ".join(sorted([*varying, *state]))
    baked.note("capture", f"{names}: baked into the graph, captured anew for each value ({reason})")
    return baked


def _result_types(program: Program) -> list[Any]:
    """Equal for two captures unless a number, given as a tensor, was taken for something else (an index, say)."""
    values = [n.meta[VAL] for n in program.output_node().all_input_nodes]
    return [(str(v.shape), v.dtype) if isinstance(v, torch.Tensor) else str(v) for v in values]


def _numbers_read(program: Program) -> int:
    """How many values of tensors become Python numbers."""
    return sum(len(program.graph.find_nodes(op="call_function", target=target)) for target in _ITEMS)


_ITEMS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


@dataclass
class _Capture:
    """One capture: the call's leaves by name, the attempts at exporting it, and the making of the Program."""

    root: ExportedCall
    tree: Any
    leaves: list[tuple[str, Any]]
    dims: NamedDims
    device: torch.device
    stand_ins: Mapping[str, torch.Tensor]
    varying: frozenset[str]
    eager: Sequence[str]
    part: str
    data_ranks: int
    followed: Followed
    functions: Sequence[CodeType] = ()
    scaled: bool = False
    converting: Converting | None = None
    earlier: dict[Hashable, Traced] = field(default_factory=dict)
    asking: bool = True
    notes: list[str] = field(default_factory=list)
    eager_notes: dict[tuple[str, str], str] = field(default_factory=dict)
    baked: list[str] = field(default_factory=list)  # notes of numbers that are
    returned: Sequence[Returned] = ()  # leaves of what the last trace returned
    trace: Trace = field(init=False)
    in_spec: pytree.TreeSpec = field(init=False)

    def __post_init__(self) -> None:
        self.given, self.given_dims = self.leaves, self.dims.names
        self.times = {"batch": self.data_ranks}  # what the model sees of a call's sizes
        self.kind, self.without_fixed = self._kind(self.dims.constant), self._kind(())

    def run(self, fixed: frozenset[str]) -> Program:
        """fixed: names of dims that keep the call's size, for all that the model's code may do."""
        sizes = {name: size for name, size in self.dims.user.items() if name in fixed}
        if sizes:
            listed = " and ".join(f"{size} of {name}" for name, size in sizes.items())
            self.notes.append(f"a graph for the size {listed} alone: at it the model's code computes something else")
        exported, sizes = self._traced()
        while self.followed.learn(self.trace):  # some state has to enter the graph in another form
            self.notes.clear()
            exported, sizes = self._traced()
        program = self._program(exported, sizes, fixed)
        self.root.release()
        self.trace.reads.forget()
        model = self.root.model
        program.table = functools.cache(lambda name: read_table(model.get_buffer(name)))
        for message in dict.fromkeys([*self.notes, *self.baked]):
            program.note("capture", message)
        inside = f"{self.part}." if self.part else ""
        for (topic, fqn), text in self.eager_notes.items():
            if f"{fqn}.".startswith(inside):
                program.notes.append(Note(topic, text, fqn))
        return program

    # -- exporting

    def _traced(self) -> tuple[ExportedProgram, dict[str, int]]:
        """An export in which hooks that store what forward reads are traced, and in which tensors that it writes are inputs."""
        while True:
            try:
                found = self._export()
                if not self._reads_counted(found[0]):
                    return found
                reason = "code needs it as a number"
            except TraceAgain:
                self.notes.clear()
                continue
            except CaptureError as error:
                if self.followed.decides or not (self.trace.numbers.inputs or self.followed.counters):
                    raise
                reason = error.found
            self.followed.decides, self.followed.computed = True, []
            self.notes.clear()
            counted = (x.name.partition(" #")[0] for x in self.trace.numbers.inputs)
            names = ", ".join(dict.fromkeys(map(repr, counted))) or ", ".join(map(repr, self.followed.counters))
            self.baked += [f"{names}: baked into the graph, captured anew for each value ({reason})"]

    def _reads_counted(self, exported: ExportedProgram) -> bool:
        """True if code reads a number out of a tensor that represents one which forward counts."""
        users = [s.arg.name for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        counted = {*users[len(users) - len(self.followed.computed) :]}
        nodes = (n for target in _ITEMS for n in exported.graph.find_nodes(op="call_function", target=target))
        return any(n.args[0].name in counted for n in nodes)

    def _export(self) -> tuple[ExportedProgram, dict[str, int]]:
        """An export that serves the call at hand: as the one before of the same kind of call went, or the first that works."""
        self._take_state()
        before = self.earlier.get(self.kind) or self.earlier.get(self.without_fixed)
        exported = None if before is None else self._as_before(before)
        if before is not None and exported is not None:
            return exported, before.sizes
        exported, sizes, mode = self._first_that_works()
        self.earlier[self.kind] = Traced.of(self.dims, sizes, mode)
        return exported, sizes

    def _kind(self, constant: Collection[str]) -> Hashable:
        """Calls in which the model's code most likely asks the same of sizes. No capture is right or wrong by it."""
        leaves = tuple(getattr(value, "dtype", type(value)) for _, value in self.given)
        dims = tuple(tuple(names.items()) for names in self.given_dims)
        modes = tuple(module.training for module in self.root.model.modules())
        return leaves, dims, frozenset(constant), modes, torch.is_grad_enabled(), self.part

    def _as_before(self, before: Traced) -> ExportedProgram | None:
        """The export with what was known after the one before; None where it does not work, or not for this call."""
        dims, plain = before.dims(self.dims), self.dims
        if dims is None:
            return None
        self.dims = dims
        try:
            exported = self._attempt(before.sizes, before.mode)
            if self._serves(exported):
                return exported
        except (MegafxError, TraceAgain):
            raise
        except Exception:  # whatever it is: other state of the model may be why, and all attempts are made
            pass
        self.dims = plain
        return None

    def _first_that_works(self) -> tuple[ExportedProgram, dict[str, int], str]:
        """The first attempt that works and that serves the call at hand, the sizes of its trace, and its mode.

        Sizes: the trace's own, then the call's (at least 2: export takes 0 and 1 for constants). Dims: shared and named; with
        the conditions on them that export cannot prove left to be checked at each call; at last each dim on its own.
        """
        fixed = {name: self.dims.user[name] for name in self.dims.constant}
        of = lambda times: {n: max(size * times.get(n, 1), 2) for n, size in self.dims.user.items()} | fixed
        user, own = of(self.times), of({})  # own: a rank's rows are a constant of the model; refused later
        hints = self.dims.hints | fixed
        plan = [(hints, "named"), (hints, "deferred")]
        plan += [(user, "named"), (user, "deferred"), (user, "automatic"), (own, "automatic")]
        plan = plan if self.dims.user else [({}, "named")]
        failures: list[Exception] = []
        tried: list[tuple[dict[str, int], str]] = []
        for sizes, mode in plan:
            unproven = bool(failures) and _violates_constraints(failures[-1])
            if (sizes, mode) in tried or (mode == "deferred" and not unproven):
                continue
            tried.append((sizes, mode))
            try:
                exported, sizes = self._attempt_with_fixes(sizes, mode)
            except (MegafxError, TraceAgain):
                raise
            except Exception as error:
                failures.append(error)
                if "GuardOnDataDependent" in type(error).__name__ or "data-dependent" in str(error):
                    break  # no other choice of sizes helps
                continue
            if sizes == user or self._serves(exported) or (sizes == own and self.dims.no_batch_in(exported)):
                return exported, sizes, mode
        # The model's own error says more than export's complaint about the dims that we asked for.
        telling = [e for e in failures if not _violates_constraints(e)] or failures
        raise translate(telling[-1], self.root.model) from None

    def _take_state(self) -> None:
        """The call's leaves with the state that is an input behind them. Its sizes are fixed."""
        state = self.followed.values()
        self.in_spec = pytree.tree_structure((*self.tree, state))
        self.leaves = [*self.given, *((f"state[{name}]", value) for name, value in state.items())]
        self.root.names = [name for name, _ in self.leaves]
        self.root.same = same_tensors([value for _, value in self.leaves], self.followed.compared)
        constants = ((i, x) for i, (name, x) in enumerate(self.leaves) if not self._enters(name, x))
        self.root.constants = {i: x for i, x in constants if type(x) not in _OF_EXPORT}
        self.root.numbers = frozenset(n for n, value in self.given if not isinstance(value, torch.Tensor))
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        self.dims.names = [*self.given_dims, *({} for _ in tensors)]

    def _attempt_with_fixes(self, sizes: dict[str, int], mode: str) -> tuple[ExportedProgram, dict[str, int]]:
        """(export, the sizes of the trace). Where it finds the bound of a dim (`assert t <= block_size`, a table of positions),
        or that it is a constant, once more so: with sizes near the bound, as a trace at 1 or 2 holds for these alone."""
        try:
            return self._attempt(sizes, mode), sizes
        except Exception as error:
            fixes = suggested_fixes(str(error)) if mode != "automatic" and _violates_constraints(error) else None
            if fixes is None or not self.dims.apply(fixes):
                raise
        within = self.dims.hints_within_bounds()
        if within != sizes:
            exported = None
            with contextlib.suppress(Exception):  # where these do not work, those of the call say why
                exported = self._attempt(within, mode)
            if exported is not None and self._serves(exported):
                return exported, within
        return self._attempt(sizes, mode), sizes

    def _serves(self, exported: ExportedProgram) -> bool:
        """True if the conditions under which the trace holds are true for the call itself."""
        bound, follow = dict[sympy.Symbol, int](), list[tuple[sympy.Expr, int]]()
        users = [s for s in exported.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
        nodes = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
        named = iter(self.dims.names)
        for spec, (_, leaf) in zip(users, self.leaves, strict=True):
            if isinstance(leaf, torch.Tensor):
                names = next(named)
                for d, (want, own) in enumerate(zip(nodes[spec.arg.name].meta[VAL].shape, leaf.shape, strict=True)):
                    size = own * self.times.get(names.get(d, ""), 1)
                    if isinstance(want, torch.SymInt) and isinstance(want.node.expr, sympy.Symbol):
                        bound[want.node.expr] = size
                    elif isinstance(want, torch.SymInt):
                        follow.append((want.node.expr, size))
        if any(expr.free_symbols <= bound.keys() and expr.xreplace(bound) != size for expr, size in follow):
            return False
        return violated(_conditions(exported), bound, _decided(exported)) is None and all(
            least <= bound.get(s, least) <= greatest for s, (least, greatest) in _ranges(exported).items()
        )

    def _attempt(self, sizes: dict[str, int], mode: str) -> ExportedProgram:
        notes: list[str] = []
        self.root.note = notes.append
        self.root.returned = functools.partial(setattr, self, "returned")
        fake_mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
        note = lambda topic, text, fqn: self.eager_notes.update({(topic, fqn): text})
        self.trace = self.root.trace = Trace(self.root.model, self.followed, self.eager, notes.append)
        self.trace.memos.sizes_are_real = all(sizes.get(n, size) == size for n, size in self.dims.user.items())
        model = self.root.model
        unhooked = [model.get_submodule(self.part)] if self.root.calls_forward or self.part else []
        outside = {*unhooked, *(m for left in matching(model, self.eager).values() for m in left.modules())}
        self.trace.reads.unhooked = unhooked
        real = {n: x for n, x in self.leaves if type(x) is torch.Tensor}
        self.trace.reads.asked = Asked(model, real, self.given if self.asking else ())
        self.trace.reads.asked.note = notes.append
        order = self.root.order
        self.trace.reads.clock = lambda: order.count
        layers = self.trace.layers = None if self.followed.each_layer else LikeLayers(self.trace.reads, notes)
        with (
            self._learning_hooks(outside),
            _without_ambient_modes(),
            _use_lazy_graph_module(True),
            prepared(
                model,
                fake_mode,
                self.device,
                self.stand_ins,
                notes.append,
                self.eager,
                note,
                self.trace.reads,
                self.root.order,
                unhooked,
                self.followed.storing,
                self.functions,
                self._values(),
                self.converting,
                layers,
            ),
        ):
            call, shapes = self._fake_call(fake_mode, sizes, mode)
            try:
                exported = torch.export.export(
                    self.root,
                    call,
                    dynamic_shapes=shapes,
                    strict=False,
                    prefer_deferred_runtime_asserts_over_guards=mode == "deferred",
                )
            finally:  # what torch keeps for ever: nodes by their fakes, and fakes of inputs in what its caches have as keys
                proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear()
                DataShapeEnv.end_trace()
        shape_env = _shape_env(exported)
        for relation in _conditions(exported):
            if isinstance(relation := shape_env.replace(relation), sympy.Eq):
                shape_env.make_one(relation)
        self.notes += notes
        return exported

    @contextlib.contextmanager
    def _learning_hooks(self, outside: Collection[nn.Module]) -> Iterator[None]:
        """Around a trace; raises where it has read what hooks store, and these were not traced."""
        try:
            yield
        except TraceAgain:
            raise
        except Exception:  # whatever it is: a value that a hook has not stored in this trace may be why
            if self.followed.learn_hooks(self.trace, outside):
                raise TraceAgain from None
            raise
        if self.followed.learn_hooks(self.trace, outside):
            raise TraceAgain

    def _values(self) -> CallValues:
        """The call's inputs as they are, for what stays eager in the trace that begins."""
        dims, values, names = iter(self.dims.names), [], []
        for name, value in self.leaves:
            if isinstance(value, torch.Tensor):
                values.append(value.detach())
                names.append(next(dims))
            elif self._enters(name, value):
                values.append(torch.tensor(value, device=self.device))
                names.append({})
        self.root.values = CallValues(values, names, self.scaled)
        return self.root.values

    def _enters(self, name: str, value: Any) -> bool:
        """True if a leaf is an input of the graph: a tensor, or a number that varies."""
        varies = name in self.varying or name.startswith("state[")
        return isinstance(value, torch.Tensor) or (varies and isinstance(value, (int, float)))

    def _fake_call(self, fake_mode: FakeTensorMode, sizes: dict[str, int], mode: str) -> tuple[Any, Any]:
        """The call on fakes of these sizes, and its dynamic_shapes."""
        specs = enumerate(self.dims.specs(automatic=mode == "automatic"))
        leaves: list[Any] = []
        dynamic: list[Any] = []
        for place, (name, value) in enumerate(self.leaves):
            if isinstance(value, torch.Tensor):
                index, spec = next(specs)
                shape = self.dims.shape(index, value, sizes)
                leaves.append(fake_like(value, fake_mode, self.device, keep=value, shape=shape))
                dynamic.append(spec)
            elif self._enters(name, value):
                dtype = {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)
                with fake_mode:
                    leaves.append(torch.empty((), dtype=dtype, device=self.device))
                dynamic.append({})
            else:
                leaves.append(None if place in self.root.constants else value)
                dynamic.append(None)
        return pytree.tree_unflatten(leaves, self.in_spec), plain_lists(pytree.tree_unflatten(dynamic, self.in_spec))

    # -- the Program

    def _program(self, exported: ExportedProgram, sizes: dict[str, int], fixed: frozenset[str]) -> Program:
        gm, spec = _LazyGraphModule.from_graphmodule(exported.graph_module), exported.call_spec.out_spec
        assert spec is not None
        fake_mode = next(n.meta[VAL] for n in gm.graph.find_nodes(op="placeholder")).fake_mode
        mark_nodes(gm)
        place_hooks(gm)
        refuse_nodes(gm)
        entering = [name for name, value in self.leaves if self._enters(name, value)]
        inputs, constants = name_inputs(exported, self.root.model, entering)
        refuse_made_up(constants.values())
        forget_made_up()
        outputs, out_leaves = name_outputs(exported, gm.graph, self.returned)
        number_sizes(gm.graph)
        program = Program(gm, inputs, outputs, Sizes(), fake_mode, spec, constants)
        values = {each.name: node.meta[VAL] for node, each in program.input_nodes() if each.kind == "user"}
        names = self._name_symbols(program, values, sizes, fixed)
        asked = {name: tuple(answers.items()) for name, answers in self.trace.reads.asked.asked.items()}
        leaves = tuple(
            replace(_leaf(n, x, values.get(n)), asked=asked.get(n, ()), same=self.root.same.get(i))
            for i, (n, x) in enumerate(self.leaves)
        )
        batch = program.sizes.symbols.get("batch")
        program.call = CallSpec(
            self.in_spec,
            leaves,
            spec,
            out_leaves,
            _ranges(exported),
            _conditions(exported),
            _decided(exported),
            names,
            {} if batch is None or self.data_ranks == 1 else {batch: self.data_ranks},
            state=self.trace.state(),
            listing=listing(gm, [i.name for i in inputs], constants, out_leaves),
            written=written_arguments(spec),
            compared=self.trace.reads.compared,
            questions=(*self.trace.reads.asked.questions.values(),),
        )
        if self.part:
            drop_unread(program)
        else:
            mark_losses(program)
        program.phase = Phase.CAPTURED
        gm.graph.lint()
        gm.recompile()
        return program

    def _name_symbols(
        self, program: Program, values: Mapping[str, torch.Tensor], sizes: dict[str, int], fixed: frozenset[str]
    ) -> dict[sympy.Symbol, str]:
        """Fill `sizes.symbols` and the default workload; note each dim that export made static. Returns the names of all
        symbols that are dims."""
        named: dict[sympy.Symbol, str] = {}
        names = [name for name, value in self.leaves if isinstance(value, torch.Tensor)]
        for name, dims in zip(names, self.dims.names, strict=True):
            for dim, dim_name in dims.items():
                size = values[name].shape[dim]
                if dim_name in fixed:
                    continue
                if isinstance(size, int) or size.node.expr.is_Integer:
                    self.notes.append(
                        f"dim {dim} ({dim_name}) of {name} is fixed to {size}: the model's code depends on it, so another "
                        f"size is captured anew"
                    )
                elif isinstance(size.node.expr, sympy.Symbol):
                    named[size.node.expr] = dim_name
                    program.sizes.symbols.setdefault(dim_name, size.node.expr)
                    program.sizes.workload_of.setdefault(size.node.expr, sizes[dim_name])
                    program.sizes.of_call[size.node.expr] = self.dims.user.get(dim_name, sizes[dim_name])
                    program.sizes.traced_of.setdefault(size.node.expr, sizes[dim_name])
        return named


def _leaf(name: str, value: Any, traced: torch.Tensor | None) -> Leaf:
    """How a leaf of the call enters the graph: as a tensor of these dims, a number that varies, or a constant."""
    if isinstance(value, torch.Tensor):
        assert traced is not None
        dims = tuple(sympy.sympify(s) if isinstance(s, int) else s.node.expr for s in traced.shape)
        return Leaf(name, True, value.dtype, dims)
    return Leaf(name, False, value=value) if traced is None else Leaf(name, True, traced.dtype, scalar=True)


def _shape_env(exported: ExportedProgram) -> Any:
    return next(n.meta[VAL] for n in exported.graph.find_nodes(op="placeholder")).fake_mode.shape_env


def _conditions(exported: ExportedProgram) -> tuple[sympy.Basic, ...]:
    """What export assumed of the sizes of the inputs while it traced. What it assumed of sizes that data decides, ops check
    when they run."""
    shape_env = _shape_env(exported)
    assumed = [*shape_env.read, *(g.expr for g in shape_env.guards)]
    assumed += [a.expr for asserts in shape_env.deferred_runtime_asserts.values() for a in asserts]
    for s, (least, greatest) in _ranges(exported).items():
        if shape_env.replace(s) != s:  # it is equal to other sizes, which are within these bounds then
            assumed += [sympy.Ge(s, least), *([sympy.Le(s, greatest)] if greatest < _GREATEST else [])]
    known = [e for e in map(shape_env.replace, assumed) if not any(map(shape_env.is_unbacked_symint, e.free_symbols))]
    return tuple(dict.fromkeys(e for e in known if e.free_symbols))


def _decided(exported: ExportedProgram) -> tuple[sympy.Basic, ...]:
    """What the model's code asked of sizes, as conditions that hold in the trace. Whether `contiguous` copies changes nothing
    where nothing is written in place."""
    shape_env = _shape_env(exported)
    asked = [*shape_env.decided, *(shape_env.laid_out if writes_in_place(exported.graph_module) else ())]
    return tuple(dict.fromkeys(e for e in map(shape_env.replace, asked) if e.free_symbols))


def _ranges(exported: ExportedProgram) -> dict[sympy.Symbol, tuple[int, int]]:
    """Sizes that the graph is valid for. A least size of 2 is export's assumption, not the model's: what the model assumes of
    0 and 1 is in `_decided`."""
    found, shape_env = {}, _shape_env(exported)
    for symbol, bounds in exported.range_constraints.items():
        if any(map(shape_env.is_unbacked_symint, symbol.free_symbols)):  # it may be a sum with a number, too
            continue
        least = int(bounds.lower) if bounds.lower.is_Integer else 0
        greatest = int(bounds.upper) if bounds.upper.is_Integer else _GREATEST
        found[symbol] = (least if least > 2 else 0, greatest)
    return found


def _violates_constraints(error: Exception) -> bool:
    return "Constraints violated" in str(error)


@contextlib.contextmanager
def _without_ambient_modes() -> Iterator[None]:
    """`ExportedCall` enters the caller's autocast inside of the graph, where export records it; outside it is off. Fakes made
    in inference mode could not be traced: within, it is no_grad."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_autocast())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield
