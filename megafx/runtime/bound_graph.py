"""A compiled graph bound to the parameters and buffers of a model, and run under one autograd.Function.

Parameters are inputs of the Function, so that they have autograd edges and hooks of all kinds work; graphs take their local
tensors without DTensor dispatch; each gradient is wrapped once with the parameter's own spec.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Protocol

import sympy
import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.distributed.tensor import DTensor

from megafx.analysis.communication import schedule
from megafx.capture.libraries.caches import give_back
from megafx.compiler.executable import Kept, LazyOutput, LazyOutputs, freed
from megafx.compiler.kept_values import KeptValues
from megafx.distributed import agreement
from megafx.distributed.board import AUTOCAST
from megafx.distributed.failures import stopping_with_others
from megafx.distributed.tensor import TPTensor
from megafx.distributed.tensor_layout import shard_of
from megafx.errors import LostRankError, UsageError
from megafx.ir.call_spec import CallSpec
from megafx.ir.program import VAL, Program, Reached, Saved
from megafx.ir.python_state import Place
from megafx.ops.rooms import Rooms
from megafx.ops.tapes import Running, check_all_taken, running
from megafx.placements.data_axis import OUTER_AXES
from megafx.placements.types import Placement
from megafx.runtime.again import Again, enters_grad
from megafx.runtime.cache_shard import CacheShard
from megafx.runtime.gradients_of_gradients import WHERE, EagerCall
from megafx.runtime.guards import TableGuard, changed_by_a_hook
from megafx.runtime.held_gradients import HeldBack
from megafx.runtime.hooks_of_absent import before_autograd_comes, only_with_gradients
from megafx.runtime.hooks_on_outputs import Arrived, Waiting, above_others, called_for, refused, watch
from megafx.runtime.keys import Call, bind_sizes
from megafx.runtime.model_state import ModelState
from megafx.runtime.outputs import LazyTensor, OutputShard, bind_shape, make_dtensor, make_lazy, output_shards
from megafx.runtime.separate_outputs import SeparateOutputs, sharing_of
from megafx.runtime.shard_gradients import as_shard, layouts_of, local_part
from megafx.runtime.written_arguments import written_arguments


class Runs(Protocol):
    """What runs a compiled graph (executable.Executable)."""

    read_in_backward: list[tuple[int, Saved]]
    gathered: KeptValues
    casts: KeptValues
    gathered_names: frozenset[str]
    rooms: Rooms | None

    def check(self, kept: Any) -> None: ...

    def forward(self, inputs: list[Any]) -> tuple[list[Any], Any]: ...

    def backward(self, kept: Any, tangents: list[Any], retain: bool = False) -> list[Any]: ...


@dataclass
class CompiledCall:
    """One graph, and how a call maps to it."""

    program: Program  # inputs and outputs in placeholder order (`program.call` is the CallSpec)
    # forward(inputs without tangents) -> (outputs without gradients, kept); backward(kept, tangents) -> gradients, one
    # for each of `wrt` (indices of inputs)
    executable: Runs
    wrt: list[int]
    differentiated: list[int]  # indices of outputs that bring a tangent
    params: Mapping[str, Placement]  # FQN -> storage
    joined: list[list[str]] = field(default_factory=list)  # FQNs of parameters that the graph reads as one
    shards: list[OutputShard | None] | None = None  # as `outputs.output_shards`
    holding: HeldBack | None = None  # other backward graphs, where ranks reduce gradients
    # indices of outputs that the graph does not differentiate, and eager mode does
    beside: list[int] = field(default_factory=list)
    differentiable: Callable[[], CompiledCall] | None = None  # compiles the form in which they have gradients
    weights_in_fp8: Sequence[str] = ()  # parameters whose casts another form of the graph keeps
    # (True if there is room for them, the numbers in words)
    casts_fit: Callable[[], tuple[bool, str]] = lambda: (False, "")
    keeping_casts: Callable[[], CompiledCall] | None = None  # compiles that
    spec: CallSpec = field(init=False)

    def __post_init__(self) -> None:
        assert self.program.call is not None
        self.spec = self.program.call
        self.shards = output_shards(self.program) if self.shards is None else self.shards


_STORED = ("param", "buffer")


class BoundGraph:
    """A compiled call, bound to the parameters and buffers of a model.

    about: what ranks that make this call agree on. stage: of a pipeline, whose inputs are another stage's outputs."""

    def __init__(self, state: ModelState, compiled: CompiledCall, about: str = "", stage: bool = False) -> None:
        self.state, self.compiled, self.about = state, compiled, about
        self.executable, self.spec = compiled.executable, compiled.spec
        program = compiled.program
        batch = program.batch
        self.equal_batches = batch is not None and batch.equal
        self.one_mask = batch is not None and batch.whole
        scheduled = schedule(program, OUTER_AXES) if batch else []
        lines = [f"{what}: {', '.join(names)}" for what, names in scheduled]
        lines += ["one dropout mask for all: "] if self.one_mask else []
        lines += [x for x in about.splitlines() if x.startswith(AUTOCAST)] if lines else []
        self.schedule = "\n".join(lines)
        self.ranks = 1 if state.meshes.tensor is None else state.meshes.tensor.size()
        self.tables = TableGuard(state.model, program.assumed)
        self.inputs = [i for i in program.inputs if i.kind != "tangent"]
        self.outputs = [o for o in program.outputs if o.kind != "gradient"]
        self.user_outputs = [i for i, o in enumerate(self.outputs) if o.kind == "user"]
        kinds = ("param", "user", "buffer")
        inputs = {node: i for i, (node, spec) in enumerate(program.input_nodes()) if spec.kind in kinds}
        results = program.results()
        self.given_back = {
            i: inputs[results[i]] for i in self.user_outputs if results[i] in inputs and not self.outputs[i].cache
        }
        self.mutations = [(i, o.name) for i, o in enumerate(self.outputs) if o.kind == "mutation"]
        written = compiled.spec.written  # arguments that forward writes into; what is read after the call is a copy
        self.written = {i for i, x in enumerate(self.inputs) if x.kind == "user" and x.name in written}
        names = {name for _, name in self.mutations}
        changed = self.written | {i for i, x in enumerate(self.inputs) if x.kind in _STORED and x.name in names}
        read = {i for i, _ in compiled.executable.read_in_backward} if changed else set()
        self.copied = {i for i in changed if i in read or compiled.beside or any(o.lazy for o in self.outputs)}
        self.changed = sorted(changed)  # inputs that a call writes into
        slots = state.slots
        self.read = [i for i, x in enumerate(self.inputs) if x.kind in kinds and i not in changed]
        self.slot_of = {i: slots[x.name] for i, x in enumerate(self.inputs) if x.kind == "param"}
        self.slot_names = [self.inputs[i].name for i in self.slot_of]
        self.slots = [*self.slot_of.values()]
        self.other_inputs = [(i, x) for i, x in enumerate(self.inputs) if x.kind != "param"]
        self.places = state.aliases(self.slots)
        places = {i: k for k, i in enumerate(self.slot_of)}
        self.wrt_places = [(places.get(i), i) for i in compiled.wrt]  # (which parameter, or None; which input)
        self.wrt_names = [i.name if i.kind == "param" else None for i in (self.inputs[k] for k in compiled.wrt)]
        self.weights_in_fp8 = [(name, slots[name]) for name in compiled.weights_in_fp8]
        self.losses = [i for i, o in enumerate(self.outputs) if o.loss]
        self.last: _Step | None = None  # the last call with tapes, until its backward: its output may be dropped before
        self.tapes = any(n.target is torch.ops.megafx.eager_call.default for n in program.graph.nodes)
        self.buffers_read = frozenset(i.name for n, i in program.input_nodes() if i.kind == "buffer" and n.users)
        self.lazy = [i for i, o in enumerate(self.outputs) if o.lazy]
        self.connected = [*compiled.differentiated, *compiled.beside]  # outputs that autograd knows of
        # What data-parallel ranks compute of outputs is averaged. Where gradients are added, it is so from the start.
        self.parts_of_mean = batch.ranks if batch is not None and batch.summed and self.losses else 1
        # So what is computed of inputs' gradients is averaged, too: they are those of this many times the loss.
        self.parts_of_input = 1 if stage else self.parts_of_mean
        self.enters_grad = enters_grad(compiled.program)
        self.make_differentiable: Callable[[], BoundGraph] | None = None
        self._differentiable: BoundGraph | None = None
        self.keep_casts: Callable[[], BoundGraph | None] | None = None
        self._keeping_casts: BoundGraph | None = None
        self.eager: Callable[[Call, str], Any] = lambda call, why: None  # the call as the user's own code computes it
        self.sharded = {i for i, s in enumerate(compiled.shards or ()) if s is not None}
        self.tangents = [self.outputs[i].name for i in compiled.differentiated]
        self.reached = program.reached or Reached({}, {})
        sources = [self.reached.inputs.get(program.inputs[i].name) for i in compiled.wrt]
        gradients = {o.name: x for o, x in zip(program.outputs, results, strict=True) if o.kind == "gradient"}
        pairs = zip(sources, compiled.wrt, strict=True)
        known = [s if program.reached else gradients[program.inputs[i].name] for s, i in pairs]
        # Inputs of which nothing differentiable is made (`state.detach()` in forward): their history is none of the outputs'.
        self.without_edge = {i for i, x in zip(compiled.wrt, known, strict=True) if i not in self.slot_of and not x}
        users = {i: (o.name, self._users(o.name)) for i, o in enumerate(self.outputs)}
        # Those on which most depend come last: users of an output have fewer users than it has.
        self.siblings = dict(sorted(((i, x) for i, x in users.items() if x[1]), key=lambda item: len(item[1][1])))
        self.sharing = sharing_of({i: self.outputs[i].name for i in self.connected}, self.reached.sharing)
        self.conditional = {k: s for k, s in enumerate(sources) if s is not None and not {*self.tangents} <= {*s}}
        self.given = [k for k in self.conditional if compiled.wrt[k] not in self.slot_of]  # inputs of the user

    def _users(self, name: str) -> frozenset[int]:
        """Outputs that depend on an output, or may by way of modules that stay eager."""
        sources = self.reached.outputs.get(name, ())
        every = any(not isinstance(source, str) for source in sources)
        return frozenset(
            i for i, o in enumerate(self.outputs) if o.name != name and (every or o.name in sources) and sources
        )

    def running(self) -> Running:
        """For one run. On the first calls ranks compare what code that is not captured returns. Where its last bits differ, all
        take rank 0's from then on, and rank 0's gradients."""
        state, step = self.state, self.state.step
        compared = self.tapes and self.ranks > 1 and step <= agreement.CHECKED_FIRST

        def agree(fqn: str, values: list[torch.Tensor], results: bool) -> list[torch.Tensor]:
            if compared and results and agreement.check_results(fqn, values, step - 1, state.group):
                state.round_as_first(fqn)
            return agreement.of_first_rank(values, state.group) if fqn in state.rounded else values

        wanted = agree if compared or state.rounded else None
        return Running(ranks=self.ranks, agree=wanted, writes=True, read=self.buffers_read)

    def fits(self, call: Call) -> bool:
        """Whether sizes and values are those of the graph, buffers that it relies on hold what they held, and what it keeps for
        backward is within a budget in bytes."""
        spec, chosen = self.compiled.spec, self.compiled.program.recomputed
        if spec.mismatch(*call.tree, call.flat) is not None or not self.tables.holds():
            return False
        return chosen is None or chosen.at is None or chosen.holds(bind_sizes(spec, call))

    def undecided(self, call: Call) -> dict[str, int]:
        """As CallSpec.undecided."""
        return self.compiled.spec.undecided(*call.tree) if self.tables.holds() else {}

    @property
    def differentiable(self) -> BoundGraph:
        """The form in which outputs beside the loss have gradients. Collective the first time."""
        if self._differentiable is None:
            assert self.make_differentiable is not None
            self._differentiable = self.make_differentiable()
            assert self._differentiable.wrt_names == self.wrt_names
        return self._differentiable

    def serving(self, call: Call) -> BoundGraph:
        """Itself, or its differentiable form where an earlier call has needed that; of either, the form that keeps casts of
        weights once they have served two calls. Collective when that is made."""
        other = self._differentiable
        if other is not None and other.fits(call):
            return other.serving(call)
        if self.weights_in_fp8:
            weights = {name: p for name, slot in self.weights_in_fp8 if (p := slot.get()) is not None}
            repeated = self.executable.casts.look(weights)
            if repeated and self.keep_casts is not None:
                self._keeping_casts, self.keep_casts = self.keep_casts(), None
        return self if self._keeping_casts is None else self._keeping_casts.serving(call)

    def state_inputs(self) -> dict[str, Any]:
        """What the Python state holds that is an input of the graph."""
        return self.compiled.spec.state.values()

    def state_places(self) -> dict[str, Place]:
        """Where those are, but for numbers that are computed."""
        return {name: p for name, p in self.compiled.spec.state.inputs.items() if isinstance(p, Place)}

    def run(self, call: Call) -> Any:
        call = replace(call, state=self.state_inputs())
        inputs, user, parameters = self._inputs(call)
        compiled, step = self.compiled, None
        written = written_arguments(compiled.spec.written, call, self.inputs, inputs)
        if compiled.wrt and torch.is_grad_enabled():
            wrt = [user[i] if k is None else parameters[k] for k, i in self.wrt_places]
            if self.without_edge:
                wrt = [
                    x.detach() if x is not None and i in self.without_edge else x
                    for i, x in zip(compiled.wrt, wrt, strict=True)
                ]
            for k in self.given:  # of an input that is no leaf, backward does not find them
                if (given := wrt[k]) is not None and not given.is_leaf:
                    only_with_gradients(given)
            step = _Step(self, inputs, call)
            step.again = Again(self, inputs, user, parameters, bool(compiled.beside))
            if self.tapes:  # code that it calls may keep tensors, and the user differentiate them: backward runs last
                step.wrt, self.last = wrt, step  # parameters are there
                step.run.anchor, step.run.own = _Anchor.apply(step, *wrt), frozenset(map(id, wrt))
                results = _Outputs.apply(step, step.run.anchor)
                step.run.anchor = None
            else:
                results = _Run.apply(step, *wrt)
            outputs, step.outputs = step.outputs, []
            for index, output in zip(self.connected, results, strict=True):
                outputs[index] = output
            step.separate.watch(outputs, self.siblings)
            if self.siblings:
                above_others(outputs, self, step)
        else:
            with running(self.running()) if self.tapes else contextlib.nullcontext():
                outputs = self.finish(self.executable.forward(inputs)[0], call)
        if self.tapes and (changed := compiled.spec.state.changed_by_hooks(call.state or {})):
            raise changed_by_a_hook(self.state.model, changed[0])
        found = self._results(outputs, user)
        if step is not None and self.siblings:
            pairs = zip(self.user_outputs, found, strict=True)
            made = {i: x for i, x in pairs if i in self.connected and x is outputs[i]}
            step.watched = watch(made, self.siblings, step)
        results = compiled.spec.unflatten(found)
        return give_back(results, call.caches, compiled.spec.state, written)

    def _results(self, outputs: list[Any], user: Mapping[int, torch.Tensor]) -> list[Any]:
        """What the user gets for each user output: never one object twice, without a gradient where eager mode gives none, and
        what came in as it is."""
        connected, seen, results = {*self.connected}, set[int](), []
        for index in self.user_outputs:
            value = self._given_back(index, user) if index in self.given_back else outputs[index]
            if isinstance(value, torch.Tensor):
                if index not in connected and index not in self.given_back and value.requires_grad:
                    value = value.detach()
                if id(value) in seen:
                    value = value.view_as(value)
                seen.add(id(value))
            results.append(value)
        return results

    def _given_back(self, index: int, user: Mapping[int, torch.Tensor]) -> Any:
        """The very tensor that an output is: of the model, or of the call."""
        place = self.given_back[index]
        spec = self.inputs[place]
        if spec.kind == "user":
            return user[place]
        if spec.kind == "buffer":
            return self.state.model.get_buffer(spec.name)
        slot = self.state.slots[spec.name]
        param = slot.module._parameters[slot.key]
        return param.full_tensor() if isinstance(param, DTensor) else param

    def _inputs(
        self, call: Call, again: Mapping[tuple[str, str], Any] = MappingProxyType({})
    ) -> tuple[list[Any], dict[int, torch.Tensor], list[Any]]:
        """(local tensors in placeholder order, position -> the user's own tensor, the parameters of `slots`). again: (kind,
        name) -> what it was."""
        state, copied = self.state, self.copied
        if names := self.executable.gathered_names:
            self.executable.gathered.look({n: p for n in names if (p := state.slots[n].get()) is not None})
        given = iter(self.compiled.spec.flatten(*call.tree, call.state, call.flat))
        inputs: list[Any] = [None] * len(self.inputs)
        parameters: list[Any] = [slot.module._parameters[slot.key] for slot in self.slots]
        for i, stored in zip(self.slot_of, state.local_parameters(self.slot_names, parameters), strict=True):
            inputs[i] = stored
        user: dict[int, torch.Tensor] = {}
        for i, spec in self.other_inputs:
            if spec.kind == "user":
                user[i] = value = next(given)
                inputs[i] = value.local.contiguous() if isinstance(value, CacheShard) else value.detach()
            elif spec.kind == "buffer":
                inputs[i] = state.model.get_buffer(spec.name)
            elif spec.kind == "constant":
                inputs[i] = self.compiled.program.constants[spec.name]
            elif (spec.kind, spec.name) not in again:
                inputs[i] = state.seed(one_mask=self.one_mask)
        if again:
            kept = ((i, x.kind, again.get((x.kind, x.name))) for i, x in enumerate(self.inputs))
            was = {i: value.detach() if kind == "user" else value for i, kind, value in kept if value is not None}
            copied = {i for i in copied if i not in was or i in self.slot_of}
            for i, value in was.items():
                inputs[i] = value
        for i in copied:
            inputs[i] = inputs[i].clone()
        return inputs, user, parameters

    def finish(self, outputs: list[Any], call: Call) -> list[Any]:
        """Write buffers and (whole) parameters back that forward changes; make lazy tensors and DTensors of such outputs."""
        for index, name in self.mutations:
            with torch.no_grad():
                value, slot = outputs[index], self.state.slots.get(name)
                if slot is not None and isinstance(param := slot.get(), TPTensor) and value.shape == param.shape:
                    value = shard_of(value, param._spec)
                self._stored(name).copy_(value)
        return self._as_the_user_gets(outputs, call)

    def _as_the_user_gets(self, outputs: list[Any], call: Call) -> list[Any]:
        for index in self.user_outputs:  # users may write into them: not into what autograd takes for a view of another
            if isinstance(outputs[index], torch.Tensor) and outputs[index]._is_view():
                outputs[index] = outputs[index].detach()
        lazy = [i for i in self.lazy if isinstance(outputs[i], LazyOutput)]
        if self.sharded or lazy:
            self._wrap(outputs, lazy, bind_sizes(self.compiled.spec, call))
        return outputs

    def _stored(self, name: str) -> torch.Tensor:
        """The buffer, or the local tensor of the parameter, that the graph changes."""
        slot = self.state.slots.get(name)
        if slot is None:
            return self.state.model.get_buffer(name)
        param = slot.module._parameters[slot.key]
        assert param is not None
        return param._local_tensor if isinstance(param, DTensor) else param.detach()

    def _wrap(self, outputs: list[Any], lazy: list[int], sizes: Mapping[sympy.Symbol, int]) -> None:
        shards, mesh, program = self.compiled.shards, self.state.meshes.tensor, self.compiled.program
        assert shards is not None
        self._watch({id(x.outputs): x.outputs for x in (outputs[i] for i in lazy)})
        for index in lazy:
            value: Any = program.results()[index].meta[VAL]
            made: LazyOutput = outputs[index]
            shape = bind_shape(value.shape, program.sizes, sizes)
            outputs[index] = LazyTensor.of(made.make, shape, value.dtype, made.outputs.device)
        for index in self.sharded:
            shard = shards[index]
            assert shard is not None and mesh is not None
            make: Callable[..., Any] = make_lazy if self.state.config.gather_outputs else make_dtensor
            make = CacheShard if self.outputs[index].cache else make
            outputs[index] = make(outputs[index], shard.bind(sizes), mesh)

    def backward(self, kept: Any, tangents: list[Any], retain: bool, edges: Sequence[Any], run: Running) -> list[Any]:
        """Gradients, one for each of `wrt`; None where eager mode has none, and where they have been put aside, or added to
        `.grad`. edges: where autograd sends each; run: of the forward."""
        run.tangents = {name for name, x in zip(self.tangents, tangents, strict=True) if x is not None}
        run.results, run.used = self.reached.results, {}
        with running(run) if self.tapes else contextlib.nullcontext():
            found = self._backward(kept, tangents, retain, edges, run)
        if self.parts_of_input == 1:
            return found
        pairs = zip(found, self.wrt_names, strict=True)
        return [g if g is None or name is not None else g * self.parts_of_input for g, name in pairs]

    def _backward(self, kept: Any, tangents: list[Any], retain: bool, edges: Sequence[Any], run: Running) -> list[Any]:
        holding, held, found = self.compiled.holding, self.state.held, None
        self.executable.casts.backwards += 1
        there = lambda i: i not in self.conditional or run.any_of(self.conditional[i])
        before: set[str] = set()  # of whom earlier calls hold a gradient
        if holding is not None and (held.now or held.sums or holding.fused):
            parameters = {n: p for n, slot in self.state.slots.items() if (p := slot.get()) is not None}
            if held.now or held.sums:
                held.settle(parameters)
                before = {*held.sums}
                found = holding.backward(held, parameters, self.wrt_names, kept, tangents, retain, there)
            elif self.state.meshes.data is None:
                found = holding.accumulate(
                    parameters, self.wrt_names, edges, kept, tangents, retain, self.check_gradients
                )
        found = self.executable.backward(kept, tangents, retain) if found is None else found
        if self.conditional:
            flags = [there(i) or self.wrt_names[i] in before for i in self.conditional]
            if self.schedule and not held.now:
                flags = agreement.on_any_rank(flags, self.state.device, self.state.everyone)
            absent = {i for i, flag in zip(self.conditional, flags, strict=True) if not flag}
            found = [None if i in absent else g for i, g in enumerate(found)]
        return found

    def recompute(self, again: Again, call: Call, tangents: Mapping[int, Any], edges: Sequence[Any]) -> list[Any]:
        """`backward` of a call that another form of this graph has run. tangents: of outputs, as autograd gives them."""
        with again.parameters():
            inputs, *_ = self._inputs(call, again.values)
        run = replace(self.running(), writes=False)
        with running(run) if self.tapes else contextlib.nullcontext():
            outputs, kept = self.executable.forward(inputs)
        outputs = self._as_the_user_gets(outputs, call)
        layouts = [outputs[i] if isinstance(outputs[i], TPTensor) else None for i in self.compiled.differentiated]
        given = self.local_tangents([tangents.get(i) for i in self.compiled.differentiated], layouts)
        return self.backward(kept, given, False, edges, run)

    def local_tangents(self, tangents: Sequence[Any], layouts: Sequence[TPTensor | None]) -> list[Any]:
        """The gradients of the differentiated outputs as the graph wants them."""
        found = [local_part(x, o) for x, o in zip(tangents, layouts, strict=True)]
        if self.parts_of_mean > 1:
            found = [None if x is None else x / self.parts_of_mean for x in found]
        return found

    def gradients_with_hooks(
        self, kept: Kept, call: Call, again: Again, tangents: Any, hooked: Sequence[Waiting], of: Waiting | None = None
    ) -> list[Any]:
        """As below, with hooks on outputs that other outputs depend on. of: an output, whose gradient is wanted alone."""
        found = (
            (self.state.meshes.data is not None, "data-parallel ranks have parts of the batch"),
            (any(o.kind == "order" for o in self.outputs), "hooks on modules would run once more"),
            (any(spec.kind == "seed" for spec in self.inputs), "its dropout would draw other masks"),
            (bool(call.caches), "it has changed a cache"),
            (not again.complete, f"it has changed {again.what_is_changed}, of which no copy is kept"),
            (self.compiled.holding is not None, "gradients are added to `main_grad` by the graph"),
            (not self.state.config.gather_outputs, "gather_outputs=False"),
        )
        if why := next((text for holds, text in found if holds), None):
            raise refused(hooked, why)
        return self._in_eager(kept, call, again, tangents, hooked, of)

    def gradients_with_graph(self, kept: Kept, call: Call, again: Again, tangents: Sequence[Any]) -> list[Any]:
        """Gradients, one for each of `wrt`, that can be differentiated again: of the call in eager mode, computed once more."""
        state = self.state
        if state.meshes.data is not None:
            raise UsageError(
                f"{WHERE}: data-parallel ranks do not reduce gradients of gradients",
                fix="split the model over these ranks instead: Config(tensor_model_parallel_size=N, data_parallel_size=1)",
            )
        if any(o.kind == "order" for o in self.outputs):
            raise UsageError(
                f"{WHERE}: it is computed in eager mode, and hooks on modules would run once more",
                fix="remove the hooks for calls whose gradients are differentiated again",
            )
        if any(spec.kind == "seed" for spec in self.inputs):
            raise UsageError(
                f"{WHERE}: it is computed in eager mode, whose dropout draws other masks than the graph's",
                fix="compute this term with dropout off (model.eval(), or p=0)",
            )
        if call.caches or not again.complete:
            raise UsageError(
                f"{WHERE}: it is computed in eager mode, from what the call has changed, of which no copy is kept "
                f"({'caches' if call.caches else again.what_is_changed})",
                fix="compute this term in a call that changes less (model.eval(), use_cache=False, a copy of an argument)",
            )
        return self._in_eager(kept, call, again, tangents, ())

    def _in_eager(
        self, kept: Kept, call: Call, again: Again, tangents: Any, hooked: Sequence[Waiting], of: Waiting | None = None
    ) -> list[Any]:
        self.executable.check(kept)
        state, where = self.state, "hooks on outputs that other outputs depend on" if hooked else WHERE
        why = where if hooked else "gradients of gradients (create_graph=True)"
        again.check(why, "")
        users = [i for i, spec in enumerate(self.inputs) if spec.kind == "user"]
        wrt = [self.slot_of.get(i, i) for i in self.compiled.wrt]

        def eager(call: Call) -> Any:
            return self.eager(call, why)

        made = EagerCall(
            state.model, state.slots, eager, call, self.compiled.spec, again.values, again.counters, wrt, users, where
        )
        with again.parameters():
            return made.gradients(self.connected, tangents, hooked, of)

    def check_gradients(self, gradients: list[torch.Tensor | None]) -> None:
        """Of one backward, as the graph gave them: of every `wrt`, this rank's part."""
        if not self.state.config.check_for_nan_in_loss_and_grad:
            return
        names = [self.inputs[i].name for i in self.compiled.wrt]
        pairs = [(n, g) for n, g in zip(names, gradients, strict=True) if g is not None]
        self.state.check_finite("gradients are", pairs)

    def watch_parameters(self, kept: Kept) -> None:
        """Parameters that backward reads and that are DTensors."""
        for i, saved in self.executable.read_in_backward:
            slot = self.slot_of.get(i)
            parameter = None if slot is None else slot.module._parameters[slot.key]
            if isinstance(parameter, TPTensor):
                kept.watch(parameter, saved)

    def _watch(self, lazy: Mapping[int, LazyOutputs]) -> None:
        """Tell lazy outputs which parameters they are made of: a change of a DTensor is none of its local tensor."""
        for outputs in lazy.values():
            for i in outputs.inputs:
                slot = self.slot_of.get(i)
                if slot is not None:
                    outputs.watch(self.inputs[i].name, slot.module._parameters[slot.key])


class _Step:
    """One call, from its forward to its backward. outputs: all of the graph's. kept: what forward keeps. layouts: of those
    outputs that bring a tangent, where they are DTensors. run: what code that the graph calls is given (ops/tapes.py)."""

    def __init__(self, graph: BoundGraph, inputs: list[Any], call: Call) -> None:
        self.graph, self.inputs = graph, inputs
        self.call: Call | None = call
        self.wrt: Sequence[torch.Tensor] = ()
        self.outputs: list[Any] = []
        boards = graph.state.boards
        self.numbers = graph.state.step - 1, 0 if boards is None else boards.shared
        self.kept: Any = None
        self.again: Again | None = None
        self.layouts: list[TPTensor | None] = []
        self.run = graph.running()
        self.tangents: list[Any] = []
        self.watched, self.arrived = list[Waiting](), Arrived(self)  # outputs that other outputs depend on
        self.separate = SeparateOutputs(graph.sharing)

    def forward(self, wrt: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The outputs that autograd knows of."""
        graph, call = self.graph, self.call
        assert call is not None
        with running(self.run) if graph.tapes else contextlib.nullcontext():
            outputs, self.kept = graph.executable.forward(self.inputs)
        graph.watch_parameters(self.kept)
        if (hooks := _top_saved_tensors_default_hooks(False)) is not None:
            self.kept.pack(*hooks)
        self.inputs = []
        self.outputs = graph.finish(outputs, call)
        graph.state.check_finite("the loss is", [(graph.outputs[i].name, self.outputs[i]) for i in graph.losses])
        results = tuple(self.outputs[i] for i in graph.connected)
        self.layouts = [o if isinstance(o, TPTensor) else None for o in results]
        return results

    def backward(self, tangents: Sequence[Any], edges: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
        """Gradients of `wrt`. edges: where autograd sends each; layouts: of those that are shards."""
        graph = self.graph
        tangents = self.arrived.tangents(graph.connected, tangents, edges)
        boards, again, call, in_eager = graph.state.boards, self.again, self.call, torch.is_grad_enabled()
        if all(x is None for x in tangents) and not graph.tapes:  # by way of what makes nothing of it
            return [None] * len(layouts)
        own = len(graph.compiled.differentiated)
        beside = any(x is not None for x in tangents[own:]) and not in_eager
        given = {i: x for i, x in zip(graph.connected, tangents, strict=True) if x is not None}
        retain = self.separate.begins(given, torch._C._autograd._get_current_graph_task_keep_graph())
        hooked = called_for(self.watched, given, self.arrived)
        if (beside or in_eager or hooked) and call is None:
            raise freed()
        if (beside or in_eager or hooked) and self.run.wrote:
            raise UsageError(
                f"this backward computes the call once more, in which code that stays eager has changed '{self.run.wrote[0]}'",
                fix="pass Config(differentiable_outputs=True) for gradients of outputs beside the loss; for hooks on outputs "
                "and create_graph=True, let the module return the value",
            )
        try:
            with stopping_with_others("backward"):
                about = f"backward of outputs beside the loss\n{graph.about}" if beside else graph.about
                about = f"a backward with create_graph=True\n{graph.about}" if in_eager else about
                about = (
                    f"a backward with hooks on {', '.join(w.name for w in hooked)}\n{graph.about}" if hooked else about
                )
                if boards is not None:
                    step, shared = self.numbers
                    boards.backward(graph, step, shared, graph.state.held.now, about)
                if hooked:
                    assert again is not None and call is not None
                    found = graph.gradients_with_hooks(self.kept, call, again, tangents, hooked)
                    if not retain and not in_eager:
                        self.free()
                    return found
                if in_eager:
                    assert again is not None and call is not None
                    return graph.gradients_with_graph(self.kept, call, again, tangents)
                if beside:
                    assert again is not None and call is not None
                    again.check(
                        "the gradients of outputs beside the loss", ", or pass Config(differentiable_outputs=True)"
                    )
                    by_output = dict(zip(graph.connected, tangents, strict=True))
                    gradients = graph.differentiable.recompute(again, call, by_output, edges)
                else:
                    local = graph.local_tangents(tangents[:own], self.layouts[:own])
                    gradients = graph.backward(self.kept, local, retain, edges, self.run)
                graph.check_gradients(gradients)
        except LostRankError:
            if boards is not None:
                boards.explain()
            raise
        check_all_taken(self.run.returned)
        if not retain:
            self.free()
        return [g if at is None else as_shard(g, at) for g, at in zip(gradients, layouts, strict=True)]

    def free(self) -> None:
        """Give up what backward needs."""
        self.again = self.call = None
        self.graph.last = None if self.graph.last is self else self.graph.last
        self.kept.values = []


class _Run(torch.autograd.Function):
    """Forward graph and backward graph as one autograd node; its outputs are those that bring a tangent."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *wrt: torch.Tensor) -> tuple[Any, ...]:
        results = step.forward(wrt)
        ctx.step = step
        ctx.layouts = layouts_of(wrt)
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return (None, *_backward(ctx, ctx.step, tangents))


class _Outputs(torch.autograd.Function):
    """The forward graph; what its outputs bring waits for `_Anchor`, which autograd runs after all that hangs on it."""

    @staticmethod
    def forward(ctx: Any, step: _Step, anchor: torch.Tensor) -> tuple[Any, ...]:
        ctx.step = step
        ctx.set_materialize_grads(False)
        wrt, step.wrt = step.wrt, ()
        return step.forward(wrt)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        ctx.step.tangents = list(tangents)
        return None, None


class _Anchor(torch.autograd.Function):
    """The backward graph."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *wrt: torch.Tensor) -> torch.Tensor:
        # What code keeps hangs on this function, and tapes, which the step owns, are made of it.
        ctx.step = weakref.ref(step)
        ctx.layouts = layouts_of(wrt)
        ctx.set_materialize_grads(False)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
        step: _Step | None = ctx.step()
        if step is None:
            raise UsageError(
                "a loss of what hooks recorded in an earlier call, whose output is gone",
                fix="keep the output of the call until backward, or call backward before the next call",
            )
        tangents, step.tangents = step.tangents or [None] * len(step.layouts), []
        return (None, *_backward(ctx, step, tangents))


def _backward(ctx: Any, step: _Step, tangents: Sequence[Any]) -> list[Any]:
    """The gradients that a node returns, one for each of `wrt`."""
    edges = [edge for edge, _ in ctx.next_functions]
    gradients = step.backward(tangents, edges, ctx.layouts)
    every = torch.is_grad_enabled() or all(x is None for x in tangents)
    before_autograd_comes(
        edges[i] for i in (range(len(edges)) if every else step.graph.conditional) if gradients[i] is None
    )
    return gradients
