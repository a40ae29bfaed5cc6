"""Several calls of a model on one rank, with changed state between them, each against a plain copy in eager mode.

A graph is made once and serves many calls. What one call cannot show is compared here: parameters, sizes, numbers, tensors and
modes that change, values that forward leaves behind for the next call, and gradients of outputs beside a loss.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafx.capture.libraries.caches import is_cache
from megafx.capture.libraries.records import kept
from megafx.capture.program import output_path
from megafx.capture.reads import IGNORED
from megafx.checks.simulate import Logical, relative_error, relative_errors
from megafx.distributed.parameters import RUNTIME
from megafx.errors import CaptureError
from megafx.ir.model_copies import deep_copy
from megafx.ir.program import Program
from megafx.ir.python_state import PLAIN, Place, leaf_places, parts_of, same, unchanged
from megafx.runtime.bound_graph import BoundGraph
from megafx.runtime.keys import Call
from megafx.runtime.runtime import Runtime

OWN = (RUNTIME, "tp_size", "_tp_size")  # attributes that only a parallelized model has
FIRST = "of nothing"
FACTOR = 0.75  # of numbers and tensors that change: probabilities stay probabilities


@dataclass
class Repeated:
    """errors: what was changed before a call -> its largest relative error, and where. skipped: calls that were not compared,
    and why."""

    errors: dict[str, tuple[float, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def wrong(self, tolerance: float) -> dict[str, tuple[float, str]]:
        return {call: found for call, found in self.errors.items() if not found[0] <= tolerance}


@dataclass
class _Seen:
    """What one call computed. state: path -> tensor or plain value that modules hold after it."""

    logical: Logical
    requires_grad: dict[str, bool]
    state: dict[str, Any]


class RepeatedCalls:
    """model: parallelized on one rank, and changed here. args, kwargs, loss_inputs: of a call. captured: its program, which is
    compiled. written: where forward leaves something; what of that is in classes and globals, eager mode leaves as it was."""

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        loss_inputs: Mapping[str, Any] | None,
        captured: Program,
        written: Sequence[Place] = (),
    ) -> None:
        self.model, self.written = model, written
        self.runtime: Runtime = vars(model)[RUNTIME]
        normal = self.runtime._call_of(tuple(args), {**kwargs, **({"loss_inputs": loss_inputs} if loss_inputs else {})})
        self.args, self.kwargs, self.loss_inputs = normal.args, normal.kwargs, normal.loss_inputs
        self.runtime.example = self.runtime._skeleton(normal, torch.is_grad_enabled()), captured
        self.found = Repeated()

    def run(self, random: bool, tolerance: float) -> Repeated:
        """Make the calls. random: as it is, the call draws random numbers, other ones than eager mode; then it is made in
        evaluation. tolerance: changes that make less of a difference would not be noticed, and are left out. State that is
        shared with other models, as that of globals, is put back."""
        if random:
            self.model.eval()
        self._compare(FIRST, loss_alone=True)
        graph = self._last_graph()
        if graph is None or FIRST in self.found.skipped:
            return self.found
        self._scale_parameters()
        self._compare("of parameters")
        if (other := self._other_batch(graph)) is not None:
            before = self.args, self.kwargs, self.loss_inputs
            self.args, self.kwargs, self.loss_inputs = other
            self._compare("of the number of rows", optional=True)
            self.args, self.kwargs, self.loss_inputs = before
        self._with_other_numbers([*_changeable(graph)], tolerance)
        if not random:
            self._in_the_other_mode(tolerance)
        return self.found

    def _with_other_numbers(self, places: list[Place], tolerance: float) -> None:
        """Numbers and tensors change twice: a new graph is made, which serves the second time too. Where it has them baked in,
        they change back instead, and the first graph has to serve again."""
        before = [(place, place.get()) for place in places]
        names = ", ".join(f"'{p.name}'" for p in places[:3]) + (f" and {len(places) - 3} more" if places[3:] else "")
        try:
            if self._matters(lambda: self._change(places), tolerance):
                self._compare(f"of {names}", loss_alone=True, optional=True)
                graph = self._last_graph()
                if graph is not None and graph.state_inputs():
                    self._change(places)
                    self._compare(f"of {names} once more", loss_alone=True, optional=True)
                else:
                    self._put(before)
                    self._compare(f"of {names} and back", loss_alone=True, optional=True)
        finally:
            self._put(before)

    def _put(self, values: list[tuple[Place, Any]]) -> None:
        for place, value in values:
            place.set(value)

    def _in_the_other_mode(self, tolerance: float) -> None:
        modes = {m: m.training for m in self.model.modules()}

        def switch() -> None:
            for module, mode in modes.items():
                module.training = not mode

        if self._matters(switch, tolerance):
            self._compare("of the mode (training or evaluation)", loss_alone=True, optional=True)
        for module, mode in modes.items():
            module.training = mode

    def _matters(self, change: Callable[[], None], tolerance: float) -> bool:
        """Change the state, and look whether eager mode computes something else then. False where it raises."""
        seen = []
        for step in (lambda: None, change):
            step()
            plain = self._plain()
            try:
                with torch.no_grad(), torch.random.fork_rng(devices=[]), unchanged(self.written):
                    seen.append(self._seen(plain, False))
            except Exception:  # whatever the user's code makes of such numbers
                return False
        return any(error > tolerance for error, _ in _errors(*seen))

    def _change(self, places: list[Place]) -> None:
        for place in places:
            value = place.get()
            place.set(value.detach() * FACTOR if isinstance(value, Tensor) else value * FACTOR)

    def _scale_parameters(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.requires_grad and (parameter.is_floating_point() or parameter.is_complex()):
                    parameter.mul_(FACTOR)

    def _last_graph(self) -> BoundGraph | None:
        graphs = [graph for graphs in self.runtime.graphs.values() for graph in graphs]
        return graphs[-1] if graphs else None

    # -- one call

    def _compare(self, what: str, *, loss_alone: bool = False, optional: bool = False) -> None:
        """optional: a call that the user has not shown; it may be one that cannot be captured, or that eager mode refuses."""
        self.model.zero_grad()
        plain, generator = self._plain(), torch.random.get_rng_state()
        try:
            with unchanged(self.written):
                wanted = self._seen(plain, loss_alone)
        except Exception as error:
            if not optional:
                raise
            self.found.skipped[what] = f"eager mode raises {type(error).__name__}"
            return
        torch.random.set_rng_state(generator)
        try:
            got = self._seen(self.model, loss_alone)
        except CaptureError as error:
            if not optional:
                raise
            self.found.skipped[what] = error.found
            return
        graph = self._last_graph()
        if graph is not None and any(spec.kind == "seed" for spec in graph.inputs):
            self.found.skipped[what] = "random numbers are drawn, other ones than in eager mode"
            return
        self.found.errors[what] = max(_errors(got, wanted), key=lambda found: found[0], default=(0.0, ""))

    def _plain(self) -> nn.Module:
        """A copy that is not parallelized, with all state as it is now."""
        for holder, key, value in [*_tensors_with_a_past(self.model)]:
            holder[key] = value.detach()
        plain = deep_copy(self.model)
        vars(plain)[RUNTIME].release()
        return plain

    def _seen(self, model: nn.Module, loss_alone: bool) -> _Seen:
        """loss_alone: gradients are those of the loss, where there is one; else of all that requires a gradient."""
        args, kwargs, loss_inputs = copy_of((self.args, self.kwargs, self.loss_inputs))
        inputs = [x for x in pytree.tree_leaves((args, kwargs, loss_inputs)) if isinstance(x, Tensor)]
        before = dict(_leaves(model))  # kept, so that no id is given out anew
        named = named_outputs(model, args, kwargs, loss_inputs, self.runtime.loss_fn)
        state = dict(_leaves(model)) | {f"argument {k}": x for k, x in enumerate(inputs)}
        old = {id(x) for x in before.values()}
        old |= {id(x) for x in inputs}
        left = {path: x for path, x in state.items() if isinstance(x, Tensor) and id(x) not in old}
        losses = [x for x in named.values() if x.requires_grad and x.numel() == 1]
        roots = [x for x in {**named, **left}.values() if x.requires_grad and x.grad_fn is not None]
        if losses and loss_alone:
            roots = losses[:1]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        gradients = {name: p.grad for name, p in model.named_parameters()}
        gradients |= {f"input {k}": x.grad for k, x in enumerate(inputs) if x.requires_grad and x.is_leaf}
        logical = Logical({name: x.detach() for name, x in named.items()}, gradients, dict(model.named_buffers()))
        needs = {name: x.requires_grad for name, x in named.items()}
        return _Seen(logical, needs, state)

    def _other_batch(self, graph: BoundGraph) -> tuple[Any, Any, Any] | None:
        """The call with one row more, where its graph takes any number of rows."""
        call = Call.of(self.args, self.kwargs, self.loss_inputs)
        given = [(leaf, x) for leaf, x in zip(graph.compiled.spec.leaves, call.leaves, strict=False) if leaf.tensor]
        rows = next((leaf.dims[0] for leaf, _ in given if leaf.dims and isinstance(leaf.dims[0], sympy.Symbol)), None)
        sizes = [size for leaf, _ in given for size in leaf.dims if isinstance(size, sympy.Expr) and size != rows]
        if rows is None or call.caches or any(rows in size.free_symbols for size in sizes):
            return None

        def longer(leaf: Any, x: Any) -> Any:
            for dim in [d for d, size in enumerate(leaf.dims) if leaf.tensor and size == rows]:
                x = torch.cat([x, x.narrow(dim, 0, 1)], dim).detach().requires_grad_(x.requires_grad)
            return x

        leaves = [longer(*pair) for pair in zip(graph.compiled.spec.leaves, call.leaves, strict=False)]
        args, kwargs, loss_inputs = pytree.tree_unflatten(leaves, call.spec)
        return args, kwargs, loss_inputs


def named_outputs(model: nn.Module, args: Any, kwargs: Any, loss_inputs: Any, loss_fn: Any) -> dict[str, Tensor]:
    """Tensors that a call of a model gives, parallelized or not, by path."""
    if RUNTIME in vars(model):
        output = model(*args, **kwargs, **({"loss_inputs": loss_inputs} if loss_inputs else {}))
    else:
        output = model(*args, **kwargs)
        output = (loss_fn(output, **loss_inputs), output) if loss_fn is not None and loss_inputs else output
    # Caches are leaves, and left out: graphs make them where they are asked for.
    leaves, _ = pytree.tree_flatten_with_path(kept(output), is_leaf=is_cache)
    return {output_path(path) or "output": x for path, x in leaves if isinstance(x, Tensor)}


def copy_of(values: Any) -> Any:
    """Arguments of a call, which it may change. Tensors are leaves of autograd where the caller's are."""

    def fresh(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return copy.deepcopy(x)
        own = x.detach().clone().requires_grad_(x.requires_grad)
        return own if x.is_leaf else own.clone()

    return pytree.tree_map(fresh, values, is_leaf=is_cache)


def _changeable(graph: BoundGraph) -> Iterator[Place]:
    """Places that the graph's capture read, with a number that is no count, or with a tensor."""
    for place, wanted in graph.compiled.spec.state.guards:
        for leaf, _ in leaf_places(place, wanted):
            value = leaf.get()
            if not leaf.can_be_input():
                continue
            if isinstance(value, Tensor):
                fits = value.is_floating_point() and not isinstance(value, nn.Parameter)
            else:
                fits = isinstance(value, float) and math.isfinite(value) and value != 0
            if fits:
                yield leaf


def _errors(found: _Seen, wanted: _Seen) -> Iterator[tuple[float, str]]:
    outputs, gradients = relative_errors(found.logical, wanted.logical)
    yield from ((error, f"output {name}") for name, error in outputs.items())
    yield from ((error, f"the gradient of {name}") for name, error in gradients.items())
    for name, needs in wanted.requires_grad.items():
        if found.requires_grad.get(name) != needs:
            yield math.inf, f"requires_grad of output {name}"
    for name, buffer in wanted.logical.mutations.items():
        yield _error(found.logical.mutations[name], buffer), f"buffer {name}"
    for path in {**wanted.state, **found.state}:
        yield _error(found.state.get(path), wanted.state.get(path)), f"what forward leaves in '{path}'"


def _error(a: Any, b: Any) -> float:
    if not isinstance(b, Tensor):
        return 0.0 if same(a, b) or (isinstance(a, float) and math.isclose(a, b, rel_tol=1e-10)) else math.inf
    if not isinstance(a, Tensor) or a.shape != b.shape or a.requires_grad != b.requires_grad:
        return math.inf
    return relative_error(a, b, torch.finfo(torch.float64).tiny)


# -- what modules hold


def _held(model: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """(path, what holds it, key, value) of all that attributes of modules hold, containers part by part."""
    for name, module in model.named_modules():
        for key, value in [*vars(module).items()]:
            if key not in IGNORED and key not in OWN:
                yield from _parts(f"{name}.{key}".lstrip("."), vars(module), key, value, set())


def _parts(path: str, holder: Any, key: Any, value: Any, above: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    yield path, holder, key, value
    found = None if id(value) in above or isinstance(value, (set, frozenset)) else parts_of(value)
    if found is None:
        return
    for inner, part in found[1].items():
        yield from _parts(f"{path}[{inner!r}]", found[0], inner, part, above | {id(value)})


def _leaves(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values that modules hold, by path."""
    for path, _, _, value in _held(model):
        if isinstance(value, (Tensor, *PLAIN)) and not isinstance(value, nn.Parameter):
            yield path, value


def copy_of_model(model: nn.Module) -> nn.Module:
    """A deep copy. What earlier calls have left behind with their graphs (the weight that `weight_norm` has set) has none."""
    return deep_copy(model, {id(x): x.detach().clone() for _, _, x in _tensors_with_a_past(model)})


def _tensors_with_a_past(model: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """Tensors that an earlier call has left behind with its graph, and where they can be replaced."""
    for _, holder, key, value in _held(model):
        if isinstance(value, Tensor) and value.grad_fn is not None and isinstance(holder, (dict, list)):
            yield holder, key, value
