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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megafx import agreement
from megafx.bound_graph import BoundGraph, CompiledCall
from megafx.errors import CaptureError, UsageError
from megafx.graph_keys import Call, KeyMaker, Normalizer, module_state, parameter_state
from megafx.guards import guard_modules
from megafx.ir import Note
from megafx.parallel_class import RUNTIME, announce, parallel_class
from megafx.params import (
    Slot,
    parameter_slots,
    place_joined,
    refuse_stale_optimizers,
    replicate_parameters,
    shard_parameters,
)
from megafx.placements import Placement
from megafx.tp_tensor import TPTensor


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
        mesh: DeviceMesh | None,
        *,
        check_inputs_every: int = 100,
        gather_outputs: bool = True,
        loss_in_graph: bool = False,
    ) -> None:
        """mesh: 1-d, of the tensor-parallel axis; None for one rank. loss_in_graph: `loss_fn=` was given, and calls may bring
        `loss_inputs=`."""
        self.model, self.compile_call, self.mesh = model, compile_call, mesh
        self.group = mesh.get_group() if mesh is not None else None
        self.rank = mesh.get_local_rank() if mesh is not None else 0
        self.t = mesh.size() if mesh is not None else 1
        self.original: type[nn.Module] = type(model)
        self.check_inputs_every, self.gather_outputs = check_inputs_every, gather_outputs
        self.loss_in_graph = loss_in_graph
        self.captures = 0
        self.step = 0
        self.capturing = False
        self.notes: list[Note] = []
        self.params: Mapping[str, Placement] | None = None
        self.parallelizer: Any = None
        self.graphs: dict[Hashable, list[BoundGraph]] = {}
        self.keys = KeyMaker(model)
        self.normalize = Normalizer(self.original.forward)
        self.modules: list[nn.Module] = []
        self.slots: dict[str, Slot] = {}

    # -- setting up

    def take_over(self) -> nn.Module:
        """Turn the model into its parallel subclass; parameters become replicated DTensors where there are several ranks."""
        model = self.model
        if RUNTIME in vars(model):
            raise UsageError("the model is parallelized already", fix="call megafx.parallelize once a model")
        if self.mesh is not None:
            refuse_stale_optimizers(model)
            replicate_parameters(model, self.mesh)
            for name in agreement.agree_on_weights(model, self.group):
                self.note("agreement", f"'{name}' differed between tensor-parallel ranks: rank 0's value is used")
        self._install()
        return model

    def _install(self) -> None:
        model = self.model
        for fqn in guard_modules(model, lambda: self.capturing, self.mesh is not None):
            self.note(
                "hooks",
                "hooks that were on this module run at capture only: what they compute is part of the graph",
                fqn,
            )
        vars(model)[RUNTIME] = self
        model.__class__ = parallel_class(self.original)
        announce(model, self.t)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Look up modules and parameters again (keys say whether a graph still fits)."""
        self.modules = list(self.model.modules())
        self.slots = dict(parameter_slots(self.model))

    def copy_for(self, model: nn.Module) -> nn.Module:
        """A parallel model made of a deep copy of this one's modules."""
        new = Runtime(
            model,
            self.compile_call,
            self.mesh,
            check_inputs_every=self.check_inputs_every,
            gather_outputs=self.gather_outputs,
            loss_in_graph=self.loss_in_graph,
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
        loss_inputs = kwargs.pop("loss_inputs", None) if self.loss_in_graph else None
        call = self._call_of(args, kwargs, loss_inputs)
        if self.mesh is not None and self._checks_inputs():
            agreement.check_inputs(call.tensors(), str(self._describe(call)), self.step, self.group)
        self.step += 1
        return self._graph(call).run(call)

    def _call_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss_inputs: Mapping[str, Any] | None) -> Call:
        args, kwargs = self.normalize(args, kwargs)
        return Call.of(args, kwargs, loss_inputs)

    def _checks_inputs(self) -> bool:
        every = self.check_inputs_every
        return self.step < agreement.CHECKED_FIRST or (every > 0 and self.step % every == 0)

    def _describe(self, call: Call) -> str:
        """What ranks have to agree on besides tensors: structure, Python values, mode."""
        values = [(n, v) for n, v in zip(call.names(), call.leaves, strict=True) if not isinstance(v, torch.Tensor)]
        training = hashlib.blake2b(str(module_state(self.modules)).encode(), digest_size=8).hexdigest()
        return f"{call.names()}\n{values}\ngrad mode {torch.is_grad_enabled()}, train/eval of modules {training}"

    def _graph(self, call: Call) -> BoundGraph:
        present: list[torch.Tensor] = self._parameters()
        grad = torch.is_grad_enabled()
        state = (module_state(self.modules), parameter_state(present))
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
            code = re.sub(r"index=\d+|cuda:\d+", "cuda", compiled.program.gm.code)  # each rank has its own device
            agreement.check_same("the graph", code, self.group)
        self._adopt(compiled.params)
        for note in compiled.program.notes:
            if note not in self.notes:
                self.notes.append(note)
        with torch.inference_mode(False):
            apart = place_joined(self.model, self.slots, compiled.joined)
        for names in apart:
            text = "their memory is shared or of a kind of its own, so they are copied together at each call"
            self.note("merge", f"{', '.join(names)}: {text}")
        return BoundGraph(self, compiled)

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
                with torch.inference_mode(False):
                    shard_parameters(self.model, self.params)

    def plain_parameter(self, name: str, param: torch.Tensor | None) -> torch.Tensor:
        """What graphs take of a parameter that is no TPTensor: there may be such on one rank only."""
        if self.mesh is not None or param is None:
            raise UsageError(
                f"parameter '{name}' was replaced after megafx.parallelize by a {type(param).__name__}",
                fix="change the model first, then parallelize it; or assign with load_state_dict or param.copy_",
            )
        return param.detach()

    def seed(self) -> torch.Tensor:
        """The seed of this step."""
        return agreement.draw_seed(self._device(), self.group)

    def same_generators(self) -> None:
        """Rank 0's state of torch's default generators on every rank."""
        if self.group is not None:
            agreement.same_generators(self._device(), self.group)

    def _device(self) -> torch.device:
        for param in self.model.parameters():
            return param.device
        return torch.device("cpu")


def make_parallel(
    model: nn.Module, compile_call: CompileCall, mesh: DeviceMesh | None = None, **options: Any
) -> Runtime:
    """The same model object, its forward now running compiled graphs; returns its Runtime (`model.megafx`).

    options: of `Runtime`. Collective over `mesh`.
    """
    runtime = Runtime(model, compile_call, mesh, **options)
    runtime.take_over()
    return runtime
