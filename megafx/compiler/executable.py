"""Run a compiled program on this rank: a forward graph and a backward graph, as generated Python code.

Both run without autograd and without ambient autocast: derivatives are nodes already, and dtypes are what the graph says.
Values are freed after their last use, kept ones too.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch

from megafx.compiler.cuda_graphs import CudaGraphs
from megafx.compiler.kept_values import CastWeights, Gathered, KeptValues
from megafx.distributed.parameters import JoinedParameters
from megafx.errors import UsageError, UsageRuntimeError
from megafx.ir.call_spec import no_autocast
from megafx.ir.program import Program, Saved, compiled_graph
from megafx.kernels.common.ahead import Compiling, compile_ahead
from megafx.kernels.common.op import direct
from megafx.kernels.experts.dispatch_rows import ROOM
from megafx.ops import collectives  # noqa: F401  registers pad_rows
from megafx.ops.rooms import Rooms
from megafx.ops.tapes import is_handle
from megafx.progress import stage


class LazyOutputs:
    """Lazy outputs of one call, computed once: from values that forward kept, and from inputs, which may not change before.

    `make(i)` gives the i-th. What they need is freed once they are made, or with this object.
    """

    def __init__(
        self, saved: Sequence[Saved], values: list[Any], run: Callable[[list[Any]], list[Any]], inputs: Sequence[int]
    ) -> None:
        """saved: what each of the values is. inputs: indices of the program's inputs among them."""
        self.saved, self.values, self.run, self.inputs = saved, values, run, inputs
        self.watched: list[tuple[str, torch.Tensor, int | None]] = []
        for what, value in zip(saved, values, strict=True):
            self.watch(what.name, value)
        self.made: list[Any] | None = None

    def watch(self, name: str, value: Any) -> None:
        """Outputs are not made once this tensor has changed in place."""
        if isinstance(value, torch.Tensor):
            self.watched.append((name, value, _version(value)))

    def own(self) -> None:
        """Copy what forward kept for them to memory of their own, which nobody can change."""
        pairs = zip(self.saved, self.values, strict=False)
        kept = {id(v): v for s, v in pairs if s.kind == "value" and isinstance(v, torch.Tensor)}
        self.values = [kept[id(v)].clone() if id(v) in kept else v for v in self.values]
        self.watched = [w for w in self.watched if id(w[1]) not in kept]

    @property
    def device(self) -> torch.device:
        return next(v.device for v in (*(self.made or ()), *self.values) if isinstance(v, torch.Tensor))

    def make(self, index: int) -> torch.Tensor:
        if self.made is None:
            for name, value, version in self.watched:
                if _version(value) != version:
                    raise UsageError(
                        f"logits of a training call are read after '{name}' was changed in place (by an optimizer's step?): "
                        f"they are computed at the first use, from the weights at that time",
                        fix="read them before the weights change, or pass Config(lazy_outputs=False)",
                    )
            self.made = self.run(self.values)
            self.values, self.watched = [], []
        found: torch.Tensor = self.made[index]
        return found


class LazyOutput(NamedTuple):
    """Represents a lazy output among the results of forward: `make()` is its local value."""

    outputs: LazyOutputs
    place: int

    def make(self) -> torch.Tensor:
        return self.outputs.make(self.place)


def _version(x: Any) -> int | None:
    return x._version if isinstance(x, torch.Tensor) and not x.is_inference() else None


Context = Callable[[], contextlib.AbstractContextManager[Any]]


class _Packed:
    """A kept tensor in the hands of the user's hooks (`torch.autograd.graph.saved_tensors_hooks`)."""

    def __init__(self, value: torch.Tensor, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        self.size, self.stride, self.unpack = value.size(), value.stride(), unpack
        self.packed = pack(value)

    def value(self) -> torch.Tensor:
        found: torch.Tensor = self.unpack(self.packed)
        if found.stride() == self.stride:
            return found
        return found.new_empty_strided(self.size, self.stride).copy_(found)  # graphs were traced on these strides


class Kept:
    """What one forward call hands to its backward. values: `Partition.saved` in order, first `inputs` of the program, then what
    forward made; emptied by backward."""

    def __init__(
        self,
        values: list[Any],
        versions: list[tuple[int, int]],
        parts: list[tuple[torch.Tensor, int, Saved]],
        tangents: list[torch.Tensor],
        inputs: int,
    ) -> None:
        self.values, self.inputs = values, inputs
        self.versions = versions  # (position in values, version) of memory that the user can reach and change
        self.parts = parts  # DTensors of kept local tensors: (DTensor, version, what was kept)
        self.like = [(t.shape, t.dtype, t.device) for t in tangents]
        self.packed = False

    def pack(self, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
        """Give what forward made to these hooks. What they return is theirs: it may change without an error."""
        self.packed = True
        self.versions = [(i, version) for i, version in self.versions if i < self.inputs]
        made = self.values[self.inputs :]
        packed = (isinstance(x, torch.Tensor) and not is_handle(x) for x in made)
        self.values[self.inputs :] = [_Packed(x, pack, unpack) if p else x for x, p in zip(made, packed, strict=True)]

    def watch(self, parameter: torch.Tensor, saved: Saved) -> None:
        """Backward refuses to run once it has changed. (A change of a DTensor does not count as one of its local tensor.)"""
        self.parts.append((parameter, parameter._version, saved))


class Executable:
    """forward(inputs) -> (outputs, kept); backward(kept, tangents) -> gradients, None for inputs that none depends on.

    program: PARTITIONED. inputs: tensors (and ints) in the order of `program.inputs` without the tangents. outputs: in the
    order of `program.outputs` without the gradients, with a LazyOutput for each lazy one. kept is None where there is no
    backward. tangents: one per differentiated output. context: entered around each run, such as `lambda: on_mesh(...)`.
    gathered, casts: what the graphs of one model have gathered, and cast. gathered_names: parameters at which `gathered` has to
    look before forward.
    """

    def __init__(
        self,
        program: Program,
        context: Context = contextlib.nullcontext,
        gathered: KeptValues | None = None,
        casts: KeptValues | None = None,
    ) -> None:
        assert program.partition is not None
        self.parts = parts = program.partition
        names = [o.name for o in program.outputs if o.kind != "gradient"]
        self.outputs = len(names)
        self.differentiated = [names.index(i.name) for i in program.inputs if i.kind == "tangent"]
        self.context = context
        self.gathered = gathered or KeptValues(whole=True)
        inputs = [i.name for i in program.inputs if i.kind not in ("tangent", "pending")]
        joined_names = [tuple(inputs[i] for i in indices) for indices in parts.joins]
        self.gathered_names = frozenset(name for k in parts.gathered for name in joined_names[k])
        self.rooms = rooms_of(parts.forward)
        self._ran: set[str] = set()
        self._compiling: dict[str, list[Compiling]] = {}
        self._forward: Callable[..., Any] = compiled_graph(parts.forward)
        if self.rooms is not None:
            self._forward = self.rooms.watching(self._forward)
        self._kept_outputs: list[int] | None = None  # outputs that are kept, too: the same at each call
        self._backward: Callable[[list[Any]], Any] | None = None
        self._last_backward: Callable[[list[Any]], Any] | None = None
        if parts.backward is not None and parts.last_backward is not None:
            self._backward, self._last_backward = compiled_graph(parts.backward), compiled_graph(parts.last_backward)
        self._given = [s.index for s in parts.saved if s.kind == "input"]
        self._values = sum(s.kind != "input" for s in parts.saved)
        self.joins = [
            Gathered(indices, joined_names[k], *parts.gathered[k], self.gathered)
            if k in parts.gathered
            else JoinedParameters(indices)
            for k, indices in enumerate(parts.joins)
        ]
        self.casts = casts or KeptValues()
        self._cast_weights: CastWeights | None = None
        if parts.cast_weights is not None:
            read = frozenset(program.inputs[i].name for indices in parts.casts for i in indices)
            self._cast_weights = CastWeights(parts.cast_weights, read, self.casts)
        count = len(parts.forward.graph.find_nodes(op="placeholder")) - len(parts.origins)
        kinds = [i.kind for i in program.inputs if i.kind not in ("tangent", "pending")]
        further = [True] * len(parts.origins)
        self.stored = [kind in ("param", "buffer") for kind in kinds] + further  # inputs that stay in place
        self.graphs: CudaGraphs | None = None
        self._lazy: Callable[[], LazyOutputs | None] = lambda: None  # of the last call, while somebody holds them
        self._watched = [i for i, s in enumerate(parts.saved) if s.shared and s.index < count]
        joined = [s for s in parts.saved if s.index >= count]
        self._watched_parts = [(k, s) for s in joined for k in parts.origins[s.index - count]]
        own = [(s.index, s) for s in parts.saved if s.kind == "input" and s.index < count]
        self.read_in_backward = own + self._watched_parts  # (index of an input, what is kept of it)

    def recorded(self, always: bool, note: Callable[[str], None]) -> Executable:
        """This one, whose calls are recorded as CUDA graphs and replayed. always, note: of `CudaGraphs`."""
        stored = {i for i, s in enumerate(self.stored) if s}
        if self._cast_weights is not None:
            self._cast_weights.stays = True
        self.graphs = CudaGraphs(self._forward, self._last_backward, self.outputs, stored, always, note)
        self._forward = self.graphs.forward
        if self.rooms is not None:
            self.rooms.changed = self.graphs.drop
        if self._last_backward is not None:
            self._last_backward = self.graphs.backward
        return self

    def compile_kernels(self, sizes: Mapping[sympy.Symbol, int]) -> None:
        """Start to compile what the first calls launch, on the current device. sizes: of such a call."""
        parts, made = self.parts, self._compiling
        pairs = [("forward", parts.cast_weights), ("forward", parts.forward), ("backward", parts.last_backward)]
        graphs = [(direction, gm.graph) for direction, gm in pairs if gm is not None]
        with self.context():
            compiling = compile_ahead([graph for _, graph in graphs], sizes)
        for (direction, _), kernels in zip(graphs, compiling, strict=True):
            made.setdefault(direction, []).append(kernels)

    def takes_what(self, other: Executable) -> bool:
        """True if backward can run on what the other one's forward keeps."""
        mine, theirs = ([(s.kind, s.index, s.fqn, s.numel) for s in x.parts.saved] for x in (self, other))
        return mine == theirs

    def forward(self, inputs: list[Any]) -> tuple[list[Any], Kept | None]:
        given, inputs = inputs, [_contiguous(x) for x in inputs]
        if self.graphs is not None and (lazy := self._lazy()) is not None:
            lazy.own()  # a replay would overwrite what it is made of
        with self._first("forward"), self._running():
            inputs += [join(inputs) for join in self.joins]
            inputs += [] if self._cast_weights is None else self._cast_weights(inputs)
            results = self._forward(*inputs) if self.rooms is None else self.rooms.run(self._forward, inputs)
        outputs = list(results[: self.outputs])
        if self._backward is None:
            return outputs, None
        last = self.outputs + self._values
        if self.parts.lazy:
            self._postpone(outputs, [*given, *inputs[len(given) :]], list(results[last:]))
        values = [*(inputs[i] for i in self._given), *results[self.outputs : last]]
        if self._kept_outputs is None:
            kept = set(map(id, values))
            self._kept_outputs = [i for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and id(x) in kept]
        # The user's tensor leads to the node of the call, which leads to what is kept: a cycle, were they one object.
        for i in self._kept_outputs:
            outputs[i] = outputs[i].detach()
        versions = [(i, values[i]._version) for i in self._watched if not values[i].is_inference()]
        parts = [(inputs[k], inputs[k]._version, s) for k, s in self._watched_parts if not inputs[k].is_inference()]
        return outputs, Kept(values, versions, parts, [outputs[i] for i in self.differentiated], len(self._given))

    def _postpone(self, outputs: list[Any], inputs: list[Any], values: list[Any]) -> None:
        parts = self.parts
        read = [s.index for s in parts.saved_for_lazy if s.kind == "input"]
        own = len(inputs) - len(parts.origins)
        indices = [k for i in read for k in ((i,) if i < own else parts.origins[i - own])]
        values = [*(inputs[i] for i in read), *values]
        lazy = LazyOutputs(parts.saved_for_lazy, values, self._make_lazy_outputs, indices)
        self._lazy = weakref.ref(lazy)
        for index, place in enumerate(parts.lazy):
            outputs[place] = LazyOutput(lazy, index)

    def _make_lazy_outputs(self, values: list[Any]) -> list[Any]:
        assert self.parts.lazy_graph is not None
        with self._running():
            pairs = zip(self.parts.saved_for_lazy, values, strict=True)
            return list(self.parts.lazy_graph(*(_contiguous(v) if s.kind == "input" else v for s, v in pairs)))

    def backward(
        self,
        kept: Kept,
        tangents: list[torch.Tensor | None],
        retain: bool = False,
        pending: Sequence[torch.Tensor] = (),
    ) -> list[torch.Tensor | None]:
        """retain: leave `kept` as it is for another backward. pending: for the program's inputs of that kind."""
        assert self._backward is not None, "this program was built without gradients"
        self.check(kept)
        seeds = [_tangent(t, like) for t, like in zip(tangents, kept.like, strict=True)]
        values = [x.value() if isinstance(x, _Packed) else x for x in kept.values]
        arguments = [*values, *seeds, *pending]
        if not retain:
            kept.values = []
        del seeds, values
        run = self._backward if retain or kept.packed else self._last_backward  # the last may overwrite what was kept
        assert run is not None
        with self._first("backward"), self._running():
            return list(run(arguments))

    def _first(self, direction: str) -> contextlib.AbstractContextManager[Any]:
        """The first run. It begins when its kernels are compiled, and compiles those that were not foreseen."""
        if direction in self._ran:
            return contextlib.nullcontext()
        self._ran.add(direction)
        return self._first_run(direction)

    @contextlib.contextmanager
    def _first_run(self, direction: str) -> Iterator[None]:
        with stage(f"first {direction}"):
            for compiling in self._compiling.pop(direction, ()):
                compiling.finish()
            yield

    def check(self, kept: Kept) -> None:
        """Raise where backward cannot run: it ran before, or what it needs was changed."""
        if self.parts.saved and not kept.values:
            raise freed()
        changed = [self.parts.saved[i] for i, version in kept.versions if kept.values[i]._version != version]
        changed += [saved for part, version, saved in kept.parts if part._version != version]
        for saved in changed:
            raise UsageRuntimeError(
                f"'{saved.name}' was changed in place between forward and backward, which needs its old value",
                module=saved.fqn,
                source=saved.source,
            )

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with torch.no_grad(), no_autocast(), self.context():
            yield


def rooms_of(forward: torch.fx.GraphModule) -> Rooms | None:
    """Of the mixtures of a graph; None where there are none, or where forward may not run once more: it calls a user's code."""
    targets = {n.target for n in forward.graph.nodes if n.op == "call_function"}
    return Rooms() if targets & {ROOM, direct(ROOM)} and torch.ops.megafx.eager_call.default not in targets else None


def _contiguous(x: Any) -> Any:
    """The graphs were traced on contiguous inputs: their views are legal on no others. A sparse buffer is none of theirs."""
    return x.contiguous() if isinstance(x, torch.Tensor) and x.layout is torch.strided else x


def freed() -> UsageRuntimeError:
    return UsageRuntimeError(
        "backward ran through this call's graph before, and its values are freed",
        fix="call backward(retain_graph=True) the first time",
    )


def _tangent(tangent: torch.Tensor | None, like: tuple[Any, Any, Any]) -> torch.Tensor:
    if tangent is None:
        shape, dtype, device = like
        return torch.zeros(shape, dtype=dtype, device=device)
    return tangent.contiguous()
