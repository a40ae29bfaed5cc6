"""The layer between a user's calls and compiled graphs.

`make_parallel` turns a model, in place, into an instance of a subclass of its class; `Runtime.call` finds or compiles the graph
of a call, runs it under one autograd.Function, and gives outputs back in the user's structure.

benchmarks/host_overhead.py measures what this layer and bound_graph.py cost (at most 10 us a parameter and step).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafx.distributed import agreement
from megafx.distributed.failures import stopping_with_others
from megafx.distributed.mesh import Meshes
from megafx.distributed.parameters import (
    RUNTIME,
    Slot,
    parameter_slots,
    place_joined,
    refuse_stale_optimizers,
    replicate_parameters,
    shard_over_data,
    shard_parameters,
)
from megafx.distributed.tensor import TPTensor
from megafx.errors import CaptureError, UsageError
from megafx.ir.program import Note
from megafx.ops.eager_call import matching
from megafx.placements.types import Placement
from megafx.runtime.bound_graph import BoundGraph, CompiledCall
from megafx.runtime.guards import guard_modules
from megafx.runtime.held_gradients import HeldGradients
from megafx.runtime.keys import Call, KeyMaker, Normalizer, module_state, parameter_state
from megafx.runtime.module import announce, parallel_class


@dataclass(frozen=True)
class CompileRequest:
    """What `compile_call` is asked for.

    varying: names of Python numbers that enter as 0-d tensors. wants_grad: names of the inputs (FQNs and user inputs) whose
    gradients are wanted; None: no backward. fixed: storage of the parameters, where an earlier graph settled it.
    """

    model: nn.Module
    call: Call
    varying: frozenset[str]
    wants_grad: frozenset[str] | None
    fixed: Mapping[str, Placement] | None


CompileCall = Callable[[CompileRequest], CompiledCall]


class Runtime:
    """Graphs and parameters of one parallelized model. `model.megafx` is it.

    captures: graphs captured so far. notes: what the user should know. params: FQN -> storage, once that is settled.
    parallelizer: what compiles (set by api).
    """

    def __init__(
        self,
        model: nn.Module,
        compile_call: CompileCall,
        meshes: Meshes,
        *,
        check_inputs_every: int = 100,
        check_numbers: bool = False,
        gather_outputs: bool = True,
        loss_in_graph: bool = False,
        eager_modules: Sequence[str] = (),
    ) -> None:
        """loss_in_graph: `loss_fn=` was given, and calls may bring `loss_inputs=`. eager_modules: of the Config."""
        self.model, self.compile_call, self.meshes = model, compile_call, meshes
        self.mesh = mesh = meshes.tensor
        self.group = mesh.get_group() if mesh is not None else None
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.t = mesh.size() if mesh is not None else 1
        self.original: type[nn.Module] = type(model)
        self.check_inputs_every, self.gather_outputs = check_inputs_every, gather_outputs
        self.check_numbers = check_numbers
        self.loss_in_graph = loss_in_graph
        self.eager_modules = eager_modules
        self.captures = 0
        self.step = 0
        self.capturing = False
        self.notes: list[Note] = []
        self.params: Mapping[str, Placement] | None = None
        self.parallelizer: Any = None
        self.held = HeldGradients()
        self.graphs: dict[Hashable, list[BoundGraph]] = {}
        self.keys = KeyMaker(model)
        self.normalizers: dict[str, Normalizer] = {}
        self.modules: list[nn.Module] = []
        self.slots: dict[str, Slot] = {}
        self.known: frozenset[str] = frozenset()  # names of the parameters when the model was parallelized
        self.trees = 0  # how often submodules were replaced
        self.unplaced: list[list[str]] = []

    # -- setting up

    def take_over(self) -> nn.Module:
        """Turn the model into its parallel subclass; parameters become replicated DTensors where there are several ranks."""
        model = self.model
        if RUNTIME in vars(model):
            raise UsageError("the model is parallelized already", fix="call megafx.parallelize once a model")
        if self.mesh is not None:
            refuse_stale_optimizers(model)
            replicate_parameters(model, self.mesh)
            for name in agreement.agree_on_weights(model, self.meshes.everyone or self.group):
                self.note("agreement", f"'{name}' differed between ranks: rank 0's value is used")
        self._install()
        return model

    def _install(self) -> None:
        model = self.model
        eager = matching(model, self.eager_modules)
        run = self.call_part if self.mesh is not None else None
        for fqn in guard_modules(model, lambda: self.capturing, run, eager):
            self.note(
                "hooks",
                "hooks that were on this module run at capture only: what they compute is part of the graph",
                fqn,
            )
        vars(model)[RUNTIME] = self
        model.__class__ = parallel_class(self.original)
        announce(model, self.t, 1 if self.meshes.data is None else self.meshes.data.ranks)
        self.parameters_changed()
        self.known = frozenset(self.slots)

    def parameters_changed(self) -> None:
        """Look up modules and parameters again (keys say whether a graph still fits)."""
        self.modules = list(self.model.modules())
        self.slots = dict(parameter_slots(self.model))
        self.children = [(m._modules, k, c) for m in self.modules for k, c in m._modules.items()]

    def _check_tree(self) -> None:
        """Submodules that were replaced since (adapters around linears) are captured anew, or refused once a plan is made."""
        if all(table.get(key) is child for table, key, child in self.children):
            return
        new = [name for name, _ in parameter_slots(self.model) if name not in self.known]
        if self.params is not None and new:
            raise UsageError(
                f"{len(new)} parameters were added after megafx.parallelize, the first of them '{new[0]}'",
                module=new[0].rpartition(".")[0],
                fix="put adapters and other modules into the model first (peft.get_peft_model), then parallelize it",
            )
        self.parameters_changed()
        self.trees += 1

    def copy_for(self, model: nn.Module) -> nn.Module:
        """A parallel model made of a deep copy of this one's modules."""
        new = Runtime(
            model,
            self.compile_call,
            self.meshes,
            check_inputs_every=self.check_inputs_every,
            check_numbers=self.check_numbers,
            gather_outputs=self.gather_outputs,
            loss_in_graph=self.loss_in_graph,
            eager_modules=self.eager_modules,
        )
        new.params, new.notes, new.parallelizer = self.params, list(self.notes), self.parallelizer
        new._install()
        return model

    def note(self, topic: str, message: str, fqn: str = "") -> None:
        note = Note(topic, message, fqn)
        if note not in self.notes:
            self.notes.append(note)

    # -- calling

    def prepare(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], loss_inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Compile the graph of a call ahead of it; the first one settles the placements of the parameters."""
        self._graph(self._call_of(tuple(args), dict(kwargs), loss_inputs))

    def settle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Plan the training form of a call and shard the parameters by it, without compiling the call."""
        call = self._call_of(tuple(args), dict(kwargs), None)
        with self._capturing(True):
            params = self.parallelizer.settle(self._request(call, frozenset(), True))
        self._adopt(params)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the root forward does."""
        if self.capturing:
            return self.original.forward(self.model, *args, **kwargs)
        with stopping_with_others(f"the forward of call {self.step}"):
            return self._call(args, kwargs)

    def call_part(self, part: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A direct call of the submodule `part`: a graph of its own, with the parameters as they are stored."""
        if self.params is None:
            raise UsageError(
                f"a direct call of '{part}' ({type(self.model.get_submodule(part)).__name__}), a submodule of a parallelized "
                f"model, before the first call of the whole model, which decides how parameters are cut",
                module=part,
                fix="call the whole model first, or pass example_inputs= to megafx.parallelize",
            )
        with stopping_with_others(f"the forward of call {self.step}, of '{part}'"):
            return self._call(args, kwargs, part)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: str = "") -> Any:
        loss_inputs = kwargs.pop("loss_inputs", None) if self.loss_in_graph and not part else None
        call = self._call_of(args, kwargs, loss_inputs, part)
        if self.mesh is not None and self._checks_inputs():
            agreement.check_inputs(call.tensors(), str(self._describe(call)), self.step, self.group)
        graph = self._graph(call)
        if graph.equal_batches and self._checks_inputs():
            agreement.check_shapes(call.tensors(), self.step, self.meshes.batch)
        self.step += 1
        return graph.run(call)

    def _call_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: Mapping[str, Any] | None, part: str = ""
    ) -> Call:
        normalize = self.normalizers.get(part)
        if normalize is None:
            module = self.model.get_submodule(part)
            normalize = self.normalizers[part] = Normalizer(module.forward)
        args, kwargs = normalize(args, kwargs)
        return Call.of(args, kwargs, loss_inputs, part)

    def _checks_inputs(self) -> bool:
        every = self.check_inputs_every
        return self.step < agreement.CHECKED_FIRST or (every > 0 and self.step % every == 0)

    def _describe(self, call: Call) -> str:
        """What ranks have to agree on besides tensors: structure, Python values, mode."""
        values = [(n, v) for n, v in zip(call.names(), call.leaves, strict=True) if not isinstance(v, torch.Tensor)]
        training = hashlib.blake2b(str(module_state(self.modules)).encode(), digest_size=8).hexdigest()
        mode = f"grad mode {torch.is_grad_enabled()}, train/eval of modules {training}"
        return f"{call.part}{call.names()}\n{values}\n{mode}"

    def _graph(self, call: Call) -> BoundGraph:
        self._check_tree()
        present: list[torch.Tensor] = self._parameters()
        grad = torch.is_grad_enabled()
        state = (self.trees, module_state(self.modules), parameter_state(present))
        skeleton = self.keys.skeleton(call, state, grad)
        while True:
            key, varying = self.keys.key(skeleton, call)
            graphs = self.graphs.setdefault(key, [])
            for graph in graphs:
                if graph.fits(call):
                    return graph
            try:
                graph = self._compile(call, varying, present, grad)
            except CaptureError:
                if not varying:
                    raise
                self.keys.numbers.bake(skeleton)  # a number that cannot be a tensor: one graph a value
                continue
            graphs.append(graph)
            return graph

    def _parameters(self) -> list[torch.Tensor]:
        """Parameters as they are now, in the order of `slots`."""
        try:
            found = [slot.module._parameters[slot.key] for slot in self.slots.values()]
        except KeyError:
            self.parameters_changed()
            found = [slot.module._parameters[slot.key] for slot in self.slots.values()]
        return [p for p in found if p is not None]

    def _compile(self, call: Call, varying: frozenset[int], params: Sequence[torch.Tensor], grad: bool) -> BoundGraph:
        if self.mesh is not None:
            for name, param in zip(self.slots, params, strict=True):
                if not isinstance(param, TPTensor):
                    self.plain_parameter(name, param)
            agreement.check_same("the call that is to be captured", self._describe(call), self.group)
        with self._capturing(grad):
            compiled = self.compile_call(self._request(call, varying, grad))
        self.captures += 1
        if self.mesh is not None:
            # Each rank has its own device, and its own numbers of calls that stay eager (ops/eager_call.py).
            code = re.sub(r"index=\d+|cuda:\d+|@\d+", "*", compiled.program.gm.code)
            agreement.check_same("the graph", code, self.group)
        self._adopt(compiled.params)
        for note in compiled.program.notes:
            if note not in self.notes:
                self.notes.append(note)
        self._place_joined(compiled.joined)
        return BoundGraph(self, compiled)

    def _place_joined(self, groups: Sequence[list[str]]) -> None:
        """Put parameters that a graph reads as one tensor side by side; those without memory wait for `memory_given`."""

        def waits(name: str) -> bool:
            return (parameter := self.slots[name].get()) is not None and parameter.is_meta

        self.unplaced += [names for names in groups if any(map(waits, names))]
        with torch.inference_mode(False):
            apart = place_joined(self.model, self.slots, [g for g in groups if not any(map(waits, g))])
        for names in apart:
            text = "their memory is shared or of a kind of its own, so they are copied together at each call"
            self.note("merge", f"{', '.join(names)}: {text}")

    def memory_given(self) -> None:
        """To be called when parameters and buffers of a model on meta have got memory."""
        self.parameters_changed()
        groups, self.unplaced = self.unplaced, []
        self._place_joined(groups)

    def _request(self, call: Call, varying: frozenset[int], grad: bool) -> CompileRequest:
        names = call.names()
        wanted = {n for n, slot in self.slots.items() if (p := slot.get()) is not None and p.requires_grad}
        wanted |= {
            n for n, v in zip(names, call.leaves, strict=True) if isinstance(v, torch.Tensor) and v.requires_grad
        }
        wants_grad = frozenset(wanted) if grad and wanted else None
        return CompileRequest(self.model, call, frozenset(names[i] for i in varying), wants_grad, self.params)

    @contextlib.contextmanager
    def _capturing(self, grad: bool) -> Iterator[None]:
        """The model is the user's own within: its forward, its hooks."""
        self.capturing = True
        try:
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                yield
        finally:
            self.capturing = False

    def _adopt(self, params: Mapping[str, Placement]) -> None:
        """Settle how parameters are stored, once."""
        if self.params is None:
            self.params = dict(params)
            if self.mesh is not None:
                if self.meshes.data is not None:
                    agreement.check_same("the plan", str(self.params), self.meshes.everyone)
                with torch.inference_mode(False):
                    shard_parameters(self.model, self.params)
                    if (shards := self.meshes.shards) is not None:
                        shard_over_data(self.model, shards, shards.size() // self.t)

    def plain_parameter(self, name: str, param: torch.Tensor | None) -> torch.Tensor:
        """What graphs take of a parameter that is no TPTensor: there may be such on one rank only."""
        if self.mesh is not None or param is None:
            raise UsageError(
                f"parameter '{name}' was replaced after megafx.parallelize by a {type(param).__name__}",
                fix="change the model first, then parallelize it; or assign with load_state_dict or param.copy_",
            )
        return param.detach()

    def seed(self, *, one_mask: bool) -> torch.Tensor:
        """The seed of this step. one_mask: the ranks of data parallelism draw parts of one mask."""
        return agreement.draw_seed(self._device(), self.meshes.everyone if one_mask else self.group)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here keeps gradients to this rank; the first one outside reduces the sums over data-parallel ranks."""
        before, self.held.now = self.held.now, True
        try:
            yield
        finally:
            self.held.now = before

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files: the first of all tensor- and data-parallel ranks."""
        return self.rank == 0 and all(place.rank == 0 for place in self.meshes.axes.values())

    def check_finite(self, what: str, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Raise on every rank where `Config.check_for_nan_in_loss_and_grad` is set and something is not finite."""
        if self.check_numbers:
            agreement.check_finite(f"call {self.step - 1}: {what}", named, self.everyone)

    @property
    def everyone(self) -> dist.ProcessGroup | None:
        """The tensor-parallel and data-parallel ranks together."""
        return self.meshes.everyone or self.group

    def same_generators(self, everywhere: bool = False) -> None:
        """Rank 0's state of torch's default generators on every tensor-parallel rank; everywhere: on every rank."""
        group = self.everyone if everywhere else self.group
        if group is not None:
            agreement.same_generators(self._device(), group)

    def _device(self) -> torch.device:
        for param in self.model.parameters():
            return param.device
        return torch.device("cpu")


def make_parallel(model: nn.Module, compile_call: CompileCall, meshes: Meshes, **options: Any) -> Runtime:
    """The same model object, its forward now running compiled graphs; returns its Runtime (`model.megafx`).

    options: of `Runtime`. Collective over all ranks of `meshes`.
    """
    runtime = Runtime(model, compile_call, meshes, **options)
    runtime.take_over()
    return runtime
