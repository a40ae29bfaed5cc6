"""The layer between a user's calls and compiled graphs.

`Runtime.call` finds or compiles the graph of a call, runs it under one autograd.Function, and gives outputs back in the
user's structure. benchmarks/host_overhead.py measures what this layer and bound_graph.py cost.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import eq
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.analysis.communication import Communication, meets_others
from megafx.capture.libraries.huggingface import adapted, synthesize_inputs
from megafx.capture.prepare import alone, configs_of, released, without_hooks_on_saved
from megafx.compiler.captured import Uncaptured
from megafx.config import Config
from megafx.distributed import agreement
from megafx.distributed.board import FORWARD, STATE, Entry, calls_differ, make_board
from megafx.distributed.failures import stopping_with_others
from megafx.distributed.mesh import Meshes
from megafx.distributed.parameters import (
    RUNTIME,
    count_changes,
    parameter_slots,
    place_joined,
    shard_parameters,
    take_fp32_gradients,
)
from megafx.errors import CaptureError, LostRankError, UsageError
from megafx.ir import dump
from megafx.ir.call_spec import ambient_autocast
from megafx.ir.holders import as_of_the_call
from megafx.ir.program import Input, Note, Program
from megafx.ir.python_state import Place
from megafx.meanwhile import in_modes
from megafx.ops.axes import AxisContext
from megafx.ops.eager_call import in_eager_code, matching
from megafx.placements.data_axis import EXPERT_AXIS, TENSOR_AXIS
from megafx.placements.types import Placement
from megafx.planner.context import CompileContext
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.progress import stage, uncollected
from megafx.report.report import Report, refresh
from megafx.runtime.again import EntersGrad, in_eager_mode
from megafx.runtime.bound_graph import BoundGraph, CompiledCall
from megafx.runtime.changed_parameters import ParametersNow, take_new_parameters
from megafx.runtime.compile_call import Settled, compile_call, settle
from megafx.runtime.failed_calls import failed_call
from megafx.runtime.guards import Hooked, guard_modules, name_now, remove_guards, root_call, root_forward
from megafx.runtime.keep_casts import keep_casts
from megafx.runtime.keys import (
    MANY,
    TRANSFORM_FIX,
    Call,
    KeyMaker,
    Normalizer,
    Wanted,
    describe,
    labels_of,
    module_state,
    numbers_of,
    parameter_state,
    refuse_tangents,
    transform_around,
    want_state,
    warn_of_many,
)
from megafx.runtime.model_state import Boards, ModelState
from megafx.runtime.program_cache.program_cache import Situation, tell
from megafx.runtime.turns import Turns


class Runtime:
    """Graphs and parameters of one parallelized model. `model.megafx` is it.

    state: what graphs share while they run. settled: what the first calls decided. captures: graphs captured so far. notes:
    what the user should know. params: FQN -> storage, once that is settled.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        meshes: Meshes,
        hardware: Hardware,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        compile: Callable[..., CompiledCall] = compile_call,
    ) -> None:
        """loss_fn: calls may bring `loss_inputs=` for it. compile: as `compile_call`."""
        self.model = model
        self.config, self.meshes, self.hardware = config, meshes, hardware
        self.loss_fn, self.compile = loss_fn, compile
        self.mesh = mesh = meshes.tensor
        self.group = meshes.calls or (mesh.get_group() if mesh is not None else None)
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.t = mesh.size() if mesh is not None else 1
        self.original: type[nn.Module] = type(model)
        self.state = ModelState(model, config, meshes)
        self.settled = Settled()
        self.captures, self.turns = 0, Turns()
        self.example: tuple[Hashable, Program | None] = None, None  # a program of its first call, and the form of that
        self.notes: list[Note] = []
        self.params: Mapping[str, Placement] | None = None
        self.graphs: dict[Hashable, list[BoundGraph]] = {}
        self.keys = KeyMaker()
        self.normalizers: dict[str, Normalizer] = {}
        self.hooked = Hooked(model)
        self.modules: list[nn.Module] = []
        self.configs: list[Any] = []
        self.replacements = 0  # how often submodules were replaced
        self.parameters = ParametersNow()
        self.fixed_state: set[str] = set()  # places whose values are baked into graphs, since they cannot be inputs
        self.unplaced: list[list[str]] = []
        self.entering: set[str] = set()  # parts whose forward enters torch.enable_grad() in calls under torch.no_grad()
        self.cached = ""  # what the cache on disk did with the last graph
        # Of a stage of a pipeline: names of parameters that other stages hold, and of buffers that are of other stages; how
        # names begin of inputs that another stage sends, of which context-parallel ranks have their own tokens.
        self.elsewhere: frozenset[str] | None = None
        self.received = ""
        self.borrowed: frozenset[str] = frozenset()
        self.uncaptured, self.eager = Uncaptured(model, config), matching(model, config.eager_modules)

    # -- setting up

    def parameters_changed(self) -> None:
        """Look up modules and parameters again (keys say whether a graph still fits)."""
        self.modules = list(self.model.modules())
        self.eager = matching(self.model, self.config.eager_modules)
        self.classes = [*map(type, self.modules)]
        self.configs = configs_of(self.model)
        self.state.slots = dict(parameter_slots(self.model))
        self.parameters.look(self.state.slots)
        self.state.steps.watch(self.model.parameters())
        if self.config.gradients_in_fp32:
            take_fp32_gradients(self.parameters.current)
        count_changes(self.parameters.current if self.config.fp8 else ())
        containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)  # which may be empty at first
        self.tables = [m._modules for m in self.modules if m._modules or isinstance(m, containers)]
        self.children = [[*table.values()] for table in self.tables]

    def _check_tree(self) -> None:
        """Submodules that were replaced since (adapters around linears) are captured anew, or refused once a plan is made."""
        now = map(list, map(dict.values, self.tables))  # modules are equal only to themselves
        if all(map(eq, now, self.children)) and [*map(type, self.modules)] == self.classes:
            return
        take_new_parameters(self)
        self.guard()
        self.hooked.changed = True
        self.replacements += 1

    def guard(self) -> None:
        """On several ranks a direct call of a submodule is a graph of its own."""
        if self.mesh is not None:
            guard_modules(self.model, lambda: self.turns.capturing or in_eager_code(), self.call_part, self.eager)

    def release(self) -> None:
        """Give the model up: it is a plain one again, an instance of its own class, as before megafx.parallelize."""
        remove_guards(self.model)
        self.model.__class__ = self.original
        for name in (RUNTIME, "tp_size", "_tp_size", "_is_distributed_loading_by_transformers"):
            vars(self.model).pop(name, None)
        self.graphs.clear()

    def copy_for(self, model: nn.Module) -> Runtime:
        """The runtime of a deep copy of this one's model."""
        new = Runtime(model, self.config, self.meshes, self.hardware, self.loss_fn, self.compile)
        new.params, new.notes = self.params, list(self.notes)
        new.settled = Settled(self.settled.plan, self.settled.of_parts, dict(self.settled.caches), self.settled.last)
        return new

    def note(self, topic: str, message: str, fqn: str = "") -> None:
        note = Note(topic, message, fqn)
        if note not in self.notes:
            self.notes.append(note)

    # -- calling

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, compile: bool) -> None:
        """Plan by an example of a training call, and shard the parameters. compile: make the graph of the call too."""
        call = self._call_of(args, kwargs)
        if compile:
            self._graph(call)
            return
        context = self._context(call, True)
        situation = self._situation("plan", call, context, ())
        with self._capturing(True):
            planned = settle(
                call, lambda _: self._capture(call, frozenset(), training=True), context, self.settled, True, situation
            )
        self._tell(situation)
        assert self.settled.plan is not None
        if planned is not None:
            device = self.state.device  # the example's tensors are on the meta device
            leaves = [torch.empty_like(x, device=device) if isinstance(x, torch.Tensor) else x for x in call.leaves]
            self.example = self._skeleton(replace(call, leaves=leaves), True, training=True), planned.captured
        self._adopt(self.settled.plan.params)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the root forward does."""
        if self.turns.capturing:
            return self.original.forward(self.model, *args, **kwargs)
        if (around := transform_around()) is not None:
            return self._transformed(around, args, kwargs)
        with self._with_others(f"the forward of call {self.state.step}"):
            return self._call(args, kwargs)

    def _transformed(self, around: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's own forward, where parameters are whole."""
        if self.mesh is not None:
            raise UsageError(f"a call of a parallelized model inside of {around}", fix=TRANSFORM_FIX)
        self.note("transforms", f"calls inside of {around} run the model as in eager mode, without a graph")
        loss_inputs = kwargs.pop("loss_inputs", None) if self.loss_fn is not None else None
        output = root_call(self.model, self.original)(self.model, *args, **kwargs)
        return (self.loss_fn(output, **loss_inputs), output) if self.loss_fn is not None and loss_inputs else output

    def call_part(self, part: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A direct call of a submodule, which was `part` at the last look: a graph of its own, with the parameters as they are
        stored."""
        self._check_tree()
        part = name_now(self.model, module, part)
        if self.params is None and (base := adapted(self.model)) is not None:
            self.start(*synthesize_inputs(base), compile=False)  # `generate` of adapters calls the model inside
        if not self.settled.whole and self.meshes.data is not None and self.t > 1:
            raise UsageError(
                f"a direct call of the submodule '{part}' before the first call of the model, which says how to cut",
                module=part,
                fix="call the whole model first, or pass example_inputs= to megafx.parallelize",
            )
        with self._with_others(f"the forward of call {self.state.step}, of '{part}'"):
            return self._call(args, kwargs, part)

    @contextlib.contextmanager
    def _with_others(self, what: str) -> Iterator[None]:
        """Explain the loss of a rank where calls of ranks differ."""
        try:
            with stopping_with_others(what):
                yield
        except LostRankError:
            if self.state.boards is not None:
                self.state.boards.explain()
            raise

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = "") -> Any:
        with self.turns.call(self.mesh is not None):
            return self._run(args, kwargs, part)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str) -> Any:
        if self.state.device.type == "meta":
            raise UsageError(
                "a call of a model whose parameters are on the meta device: they have no values",
                fix="megafx.load_safetensors(model, files), megafx.initialize(model, lambda: Net(...)), or "
                "model.to_empty(device=...) and values of your own, before the first call",
            )
        call = self._call_of(args, kwargs, part)
        if part in self.entering and not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            with torch.enable_grad():
                return self._run_call(replace(call, under_no_grad=True))
        try:
            return self._run_call(call)
        except EntersGrad:
            self.entering.add(part)
        with torch.enable_grad():
            return self._run_call(replace(call, under_no_grad=True))

    def _run_call(self, call: Call) -> Any:
        refuse_tangents(lambda: [*call.tensors(), *self.model.named_parameters()])
        try:
            graph = self._graph(call).serving(call)
        except CaptureError as error:
            raise self._failed(call, error) from None
        off = not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        # A leaf that forward has written into requires its gradient anyway.
        if graph.enters_grad and off and graph.enters_grad - call.differentiable():
            raise EntersGrad
        assert self.state.boards is not None
        self.state.boards.forward(graph, call, self.state.held.now)
        self.state.step += 1
        return graph.run(call)

    def _failed(self, call: Call, error: CaptureError) -> Exception:
        """What a call raises that cannot be captured."""
        grad, together = torch.is_grad_enabled(), self.meshes.data is None

        def trace() -> None:
            with self._capturing(grad):
                self._capture_alone(call, frozenset(), {}, False, self._context(call, grad).training, (), dynamic=False)

        return failed_call(error, trace, lambda: self.as_written(call), self.model, self.group, together)

    def as_written(self, call: Call) -> Any:
        """What the user's own code makes of a call."""
        module = self.model.get_submodule(call.part)
        forward = module if call.part else functools.partial(root_call(self.model, self.original), module)
        args, kwargs = call.given()
        with torch.no_grad() if call.under_no_grad else contextlib.nullcontext():
            output = forward(*args, **kwargs)
        return (self.loss_fn(output, **call.loss_inputs), output) if self.loss_fn and call.loss_inputs else output

    def _compare(self, call: Call, graph: BoundGraph | None) -> None:
        """Raise unless all tensor-parallel ranks are about to make this call. graph: that of it, where there is one."""
        state, several = self.state, self.mesh is not None
        if state.boards is None:
            state.boards = Boards(make_board(self.group, state.device), make_board(self.meshes.batch, state.device))
        checks = several and self._checks_inputs()
        described = self._describe(call) if several and (checks or graph is None) else ""
        tensors, whole = (call.tensors(), state.replicated()) if checks else ([], [])
        if (board := state.boards.calls) is not None:
            about = f"{described}\n{STATE}new" if graph is None else graph.about
            more = {} if graph is None else graph.state_inputs()
            numbers = [state.steps.count, *call.numbers(), *numbers_of(more.values())]
            if (found := board.exchange(Entry(FORWARD, state.step, about, numbers))) is not None:
                labels = [*call.labels(), *labels_of(more)]
                raise calls_differ(found, labels, state.stepped())
        if checks:
            agreement.check_inputs(tensors, described, state.step, self.group)
            agreement.check_parameters(whole, state.step, self.group)
        if several and graph is None:
            agreement.check_same("the call that is to be captured", described, self.group)

    def _call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = "") -> Call:
        loss_inputs = kwargs.pop("loss_inputs", None) if self.loss_fn is not None and not part else None
        normalize = self.normalizers.get(part)
        if normalize is None:
            module = self.model.get_submodule(part)
            normalize = self.normalizers[part] = Normalizer(module.forward)
        args, kwargs = normalize(args, kwargs)
        return Call.of(args, kwargs, loss_inputs, part, self.received)

    def _checks_inputs(self) -> bool:
        every, step = self.config.check_inputs_every, self.state.step
        return step < agreement.CHECKED_FIRST or (every > 0 and step % every == 0)

    def _describe(self, call: Call) -> str:
        """What ranks have to agree on, other than values of tensors."""
        params = {n: p for n, slot in self.state.slots.items() if (p := slot.get()) is not None}
        return describe(call, self.modules, self.configs, params, torch.is_grad_enabled())

    def _graph(self, call: Call) -> BoundGraph:
        self._check_tree()
        if not self.parameters.same(self.state.slots):
            take_new_parameters(self)
        grad = torch.is_grad_enabled()
        skeleton = self._skeleton(call, grad)
        compared = False
        while True:
            key, varying = self.keys.key(skeleton, call)
            graphs = self.graphs.setdefault(key, [])
            known = next((graph for graph in graphs if graph.fits(call)), None)
            if not compared:
                self._compare(call, known)
                compared = True
            if known is not None:
                return known
            if self.state.slots != dict(parameter_slots(self.model)):  # one more in a module
                take_new_parameters(self)
                skeleton = self._skeleton(call, grad)
                continue
            try:
                known, captured = self._small_sizes(graphs, call, varying, grad)
                if known is not None:
                    return known
                state, examples = self._begin_with(graphs, skeleton, call)
                graph = self._compile(call, varying, state, grad, captured, examples)
            except CaptureError:
                if not varying:
                    raise
                self.keys.numbers.bake(skeleton)  # a number that cannot be a tensor: one graph a value
                continue
            self.fixed_state |= state.keys() - graph.state_inputs().keys()
            graphs.append(graph)
            return graph

    def _skeleton(self, call: Call, grad: bool, training: bool = False) -> Hashable:
        """What a graph of this call depends on, but for its numbers. training: as if every module were in training mode."""
        hooks = self.hooked.state(self.eager)
        parameters = parameter_state(self.parameters.all())
        trained, cached = module_state(self.modules, self.configs)
        trained = (True,) * len(trained) if training else trained
        forward = root_forward(self.model, self.original)
        modes = self.replacements, self.parameters.layout, forward, trained, cached, parameters, hooks
        return self.keys.skeleton(call, modes, grad)

    def _begin_with(
        self, graphs: Sequence[BoundGraph], skeleton: Hashable, call: Call
    ) -> tuple[dict[str, Place], dict[bool, Program]]:
        """What the next graph begins with: (numbers and tensors in Python objects that are to be its inputs, what was captured
        already of the model's first call, as it is (False) or in its training form (True)).

        Inputs are those that changed since the last graph that would serve the call. (What cannot be an input is baked in, a
        graph for each value.)
        """
        (form, program), self.example = self.example, (None, None)
        given, forms, examples = (call.args, call.kwargs, call.loss_inputs), {False: skeleton}, dict[bool, Program]()
        if program is not None and torch.is_grad_enabled():
            forms[True] = self._skeleton(call, True, training=True)
        if program is not None and program.call is not None and program.call.mismatch(*given) is None:
            examples = {training: program for training, wanted in forms.items() if wanted == form}
        if len(graphs) == MANY:
            warn_of_many(graphs[-1].compiled.spec, call)
        for graph in reversed(graphs):
            spec = graph.compiled.spec
            if spec.structure_mismatch(*given) is None:
                places = graph.state_places() | {p.name: p for p in spec.state.changed() if p.can_be_input()}
                return {n: p for n, p in places.items() if n not in self.fixed_state}, examples
        return {}, examples

    def _small_sizes(
        self, graphs: Sequence[BoundGraph], call: Call, varying: frozenset[int], grad: bool
    ) -> tuple[BoundGraph | None, Program | None]:
        """Where only sizes of 0 and 1 keep a graph from serving the call, that is looked into once: (the graph, if the model
        computes the same at these sizes; else None, and what it computes)."""
        graph, small = next(((g, small) for g in graphs if (small := g.undecided(call))), (None, {}))
        if graph is None:
            return None, None
        with self._capturing(grad):
            program = self._capture(call, varying, graph.state_places(), training=False, grad=grad, fixed=small)
        assert program.call is not None
        same = graph.compiled.spec.prove(small, program.call) and graph.fits(call)
        return (graph, None) if same else (None, program)

    @uncollected()
    def _compile(
        self,
        call: Call,
        varying: frozenset[int],
        state: Mapping[str, Place],
        grad: bool,
        captured: Program | None = None,
        examples: Mapping[bool, Program] = MappingProxyType({}),
    ) -> BoundGraph:
        """captured: the program of the call, where it was captured already; examples: as of `_begin_with`."""
        if self.mesh is not None:
            held = {n: p for n, p in zip(self.state.slots, self.parameters.current, strict=True) if p is not None}
            self.state.local_parameters([*held], [*held.values()])
        context = self._context(call, grad, state)
        is_training = context.training and all(m.training for m in self.modules) and not call.under_no_grad

        def capture(training: bool) -> Program:
            made = examples.get(training) if training or captured is None else captured
            made = made or self._capture(call, varying, state, training=training, grad=grad)
            want_state(context.wants_grad, made, grad, reduced=self.meshes.data is not None)
            return made

        about = (is_training, sorted(varying), [(n, type(p.get()).__name__) for n, p in sorted(state.items())])
        situation = None if captured is not None else self._situation("graph", call, context, about)
        more = {} if situation is None else {"situation": situation}
        with stage("compile a call"), self._capturing(grad):
            compiled = self.compile(call, is_training, capture, context, self.settled, **more)
        self._tell(situation)
        self.captures += 1
        self._check_graph("the graph", compiled.program)
        self._adopt(compiled.params)
        described = f"{self._describe(call)}\n{STATE}of graph {self.captures}"  # ranks capture together
        return self._bind(compiled, described, ambient_autocast())

    def _situation(self, what: str, call: Call, context: CompileContext, about: Any) -> Situation | None:
        """What decides which entry of the cache on disk serves this call. None where it is off."""
        if not self.config.cache:
            return None
        plan, wants = self.settled.plan, context.wants_grad
        cuts = None if plan is None else (plan.experts, [(n, str(p), p.flat_layout) for n, p in plan.params.items()])
        autocast = [sorted(map(str, settings.items())) for settings in ambient_autocast()]
        trained = None if wants is None else [n for n in self.state.slots if wants(Input("param", n))]
        own = [self._describe(call), str(call.spec), self.original.__qualname__, autocast, cuts, trained, about]
        loss = self.loss_fn if call.loss_inputs else None
        hooks = "hooks on modules" if self.hooked.found else ""
        return Situation(what, self.model, call, context, own, loss, self.group, self.state.device, hooks)

    def _tell(self, situation: Situation | None) -> None:
        """Put what the cache did where users find it."""
        if situation is not None:
            self.cached = tell(situation)
            for text in situation.notes:
                self.note("cache", text)

    def _bind(self, compiled: CompiledCall, about: str, autocast: Sequence[dict[str, Any]]) -> BoundGraph:
        """autocast: the contexts that the call was made in."""
        for note in compiled.program.notes:
            if note not in self.notes:
                self.notes.append(note)
        self._place_joined(compiled.joined)
        if (rooms := compiled.executable.rooms) is not None:
            rooms.say = functools.partial(self.note, "experts")
            if meets_others(compiled.program, EXPERT_AXIS):
                rooms.agree = lambda needs: agreement.most(needs, self.everyone)
        graph = BoundGraph(self.state, compiled, about, stage=self.elsewhere is not None)
        graph.make_differentiable = lambda: self._differentiable(compiled, about, autocast)
        graph.keep_casts = compiled.keeping_casts and (lambda: keep_casts(self, compiled, about, autocast))
        training = {m: m.training for m in self.modules}
        graph.eager = lambda call, why: in_eager_mode(self, call, why, autocast, training)
        return graph

    def _differentiable(self, compiled: CompiledCall, about: str, autocast: Sequence[dict[str, Any]]) -> BoundGraph:
        """The form of a graph in which outputs beside the loss have gradients. Collective; runs in a backward."""
        names = ", ".join(f"'{compiled.program.outputs[i].name}'" for i in compiled.beside)
        text = (
            f"gradients arrive at outputs beside the loss ({names}): this call was computed once more, with what they need; "
            "from the next one on it is kept. Config(differentiable_outputs=True) keeps it from the first call on"
        )
        self.note("outputs", text)
        assert compiled.differentiable is not None
        with self._capturing(True), alone():
            other = compiled.differentiable()
        self._check_graph("the graph", other.program)
        return self._bind(other, about, autocast)

    def _check_graph(self, what: str, program: Program) -> None:
        """Raise unless all tensor-parallel ranks have the same."""
        # Each rank has its own device, and its own numbers of calls that stay eager (ops/eager_call.py).
        code = re.sub(r"index=\d+|cuda:\d+|@\d+", "*", program.gm.code)
        agreement.check_same(what, code, self.group)

    def _place_joined(self, groups: Sequence[list[str]]) -> None:
        """Put parameters that a graph reads as one tensor side by side; those without memory wait for `memory_given`."""

        def waits(name: str) -> bool:
            return (parameter := self.state.slots[name].get()) is not None and parameter.is_meta

        self.unplaced += [names for names in groups if any(map(waits, names))]
        with torch.inference_mode(False):
            apart = place_joined(self.model, self.state.slots, [g for g in groups if not any(map(waits, g))])
        for names in apart:
            text = "their memory is shared or of a kind of its own, so they are copied together at each call"
            self.note("merge", f"{', '.join(names)}: {text}")

    def memory_given(self) -> None:
        """To be called when parameters and buffers of a model on meta have got memory."""
        self.parameters_changed()
        groups, self.unplaced = self.unplaced, []
        self._place_joined(groups)

    def _context(self, call: Call, grad: bool, state: Mapping[str, Place] = MappingProxyType({})) -> CompileContext:
        """The record of one compile. Gradients are wanted of what requires them, where any does."""
        values = [*zip(call.names(), call.leaves, strict=True), *((f"state[{n}]", p.get()) for n, p in state.items())]
        values += [(n, slot.get()) for n, slot in self.state.slots.items()]
        wanted = Wanted(n for n, x in values if grad and isinstance(x, torch.Tensor) and x.requires_grad)
        return CompileContext(
            self.config, self.t, self.hardware, self.meshes.data, wants_grad=wanted or None, agree=self._plan_of_rank_0,
            caches=dict(self.settled.caches), axes=self._axes(), at_call=True,
            device_bytes=self.state.device_bytes(self.hardware),
        )  # fmt: skip

    def _plan_of_rank_0(self, plan: Plan) -> Plan:
        """Rank 0's plan on every rank, in the sizes of this rank's graph: this rank's own, where it is the same."""
        if self.mesh is None:
            return plan
        own = plan.to_json()
        with released():  # ranks may have begun with models of other threads
            text = agreement.broadcast_object(own, self.group)
        return plan if text == own else Plan.from_json(text, plan.sizes)

    def _axes(self) -> dict[str, AxisContext] | None:
        if self.mesh is None:
            return None
        return {TENSOR_AXIS: AxisContext(self.rank, self.t, self.mesh.get_group().group_name), **self.meshes.axes}

    def _capture(
        self,
        call: Call,
        varying: frozenset[int],
        state: Mapping[str, Place] = MappingProxyType({}),
        *,
        training: bool,
        grad: bool = True,
        fixed: Collection[str] = (),
    ) -> Program:
        """The call as it is, or with every module in training mode and with gradients (training). The same on all ranks.

        Graphs are captured on logical shapes. varying: positions of Python numbers that enter as 0-d tensors. state: places
        in Python objects whose values are inputs. fixed: names of dims that are constants of the graph.
        """
        with agreement.raising_together(self.group):
            program = self._capture_alone(call, varying, state, training, grad, fixed)
        self._check_graph("what the model computes", program)
        return program

    def _capture_alone(
        self,
        call: Call,
        varying: frozenset[int],
        state: Mapping[str, Place],
        training: bool,
        grad: bool,
        fixed: Collection[str],
        dynamic: bool = True,
    ) -> Program:
        model, names = self.model, call.names()
        if training and not torch.is_grad_enabled():  # a plan: a leaf that the call may write into would be an error
            call = call.without_gradients()
        modes = {m: training or m.training for m in model.modules()}
        tensors = [*model.parameters(), *(x for x in call.leaves if isinstance(x, torch.Tensor))]
        whole = {
            name: torch.empty(p.shape, dtype=p.dtype, device="meta")
            for name, p in model.named_parameters(remove_duplicate=False)
        }
        with in_modes(modes), torch.set_grad_enabled(training or grad):
            return self.uncaptured.capture(
                call.args,
                call.kwargs,
                loss_fn=self.loss_fn if call.loss_inputs else None,
                loss_inputs=call.loss_inputs or None,
                device=next((x.device for x in tensors if x.device.type != "meta"), None),
                forward=root_call(self.model, self.original),
                stand_ins=whole,
                varying=frozenset(names[i] for i in varying),
                part=call.part,
                data_ranks=self._data_ranks(),
                fixed=fixed,
                state=state,
                dynamic=dynamic,
                under_no_grad=call.under_no_grad and not training,
                asking=self.meshes.data is None,
            )

    def _data_ranks(self) -> int:
        """Over how many ranks one batch is cut: not where each rank has a loss of its own rows."""
        data = self.meshes.data
        return 1 if data is None or self.config.data_parallel_loss == "average" else data.ranks

    @contextlib.contextmanager
    def _capturing(self, grad: bool) -> Iterator[None]:
        """The model is the user's own within: its forward, its hooks. Hooks on what autograd saves are the run's alone."""
        with (
            self.turns.capture(),
            as_of_the_call(),
            without_hooks_on_saved(),
            torch.inference_mode(False),
            torch.set_grad_enabled(grad),
        ):
            yield

    def _adopt(self, params: Mapping[str, Placement]) -> None:
        """Settle how parameters are stored, once: of each call of a submodule before the first of the model."""
        first, new = self.params is None, {n: p for n, p in params.items() if n not in (self.params or {})}
        self.params = {**(self.params or {}), **new}
        if self.mesh is None or not (first or new):
            return
        if self.meshes.data is not None:
            agreement.check_same("the plan", str(self.params), self.meshes.everyone)
        with stage("shard the parameters"), torch.inference_mode(False):
            experts = self.settled.plan.experts if first and self.settled.plan is not None else {}
            shard_parameters(self.model, new, self.meshes if first else None, experts)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backward in here keeps gradients to this rank; the first one outside reduces the sums over data-parallel ranks."""
        return self.state.held.holding()

    @property
    def is_first(self) -> bool:
        """True if this is the rank that writes files: the first of all tensor- and data-parallel ranks."""
        return self.rank == 0 and all(place.rank == 0 for place in self.meshes.axes.values())

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The tensor-parallel and data-parallel ranks together."""
        return self.state.everyone

    def same_generators(self, everywhere: bool = False) -> None:
        """Rank 0's state of torch's default generators on every tensor-parallel rank; everywhere: on every rank."""
        group = self.everyone if everywhere else self.group
        if group is not None:
            agreement.same_generators(self.state.device, group)

    # -- what users ask for

    def readable(self, fqn: str = "") -> str:
        """The graph of the last compiled call (a training one, where there is one) under one module path, as Python."""
        if self.settled.last is None:
            raise UsageError("no call is compiled yet", fix="call the model once, or pass example_inputs=")
        return dump.readable(self.settled.last.program, fqn, t=self.t)

    def communication(self) -> list[Communication]:
        """Collectives of one step of the same call, with the bytes that a rank sends."""
        if self.settled.last is None:
            return []
        return self.settled.last.communication({name: place.size for name, place in self.meshes.axes.items()})

    def report(self) -> Report:
        """Of the training plan, with the notes of everything since."""
        plan, last = self.settled.plan, self.settled.last
        if plan is None or plan.report is None:
            raise UsageError("no call is planned yet", fix="call the model once, or pass example_inputs=")
        plan.report.header |= {"graphs captured": self.captures} | ({"cache": self.cached} if self.cached else {})
        refresh(plan.report, self.notes, None if last is None else last.program)
        if last is not None:
            plan.report.emitted, plan.report.predict = self.communication(), last.memory
        return plan.report
