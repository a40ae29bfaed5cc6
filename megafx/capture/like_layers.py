"""Layers of a model that are alike are traced once: calls of the others are copies of the nodes of the first.

Before:  for layer in self.layers: x = layer(x, mask)       # 32 times the same code, op by op
After:   the nodes of layers.0, and 31 times the same nodes on the layer's own parameters
Legal because: a trace is decided by what code reads. A later layer is of the same classes, all that the first one's code has
read (reads.py) is the same there and now, and its inputs have the same form. What it would read is noted as if it had run.

A layer that does more than compute is traced like all other code: it writes into tensors or attributes, asks data, switches
gradients or autocast, leaves notes, or may ask which layer it is (`id(self)`, `self is FIRST`). Where a trace shows at its end
that something else was written (an item of a list, a global), `Followed.learn` has the model traced once more, without copies.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.fx.node import map_arg
from torch.nn.modules import module as of_all
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megafx.capture.functions import current_region, mark_region, region_of
from megafx.capture.hooks import HOOK_TABLES
from megafx.capture.quick_fakes import QuickFakeTensorMode, expressions
from megafx.capture.reads import TABLES, Reads
from megafx.ir.program import VAL
from megafx.ir.python_state import ABSENT, PLAIN, Container, Place, PythonState, parts_of, same, snapshot
from megafx.kernels.common.op import is_composite, is_kernel

_KINDS = 4  # of layers in one list, which may take turns
_STACK = "nn_module_stack"
_VALUES = (Tensor, *SymTypes, *PLAIN)


def like_layers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(layer, number of a group) of lists in which several layers are of one class, and made of modules."""
    groups: dict[tuple[int, type], list[nn.Module]] = defaultdict(list)
    for owner in model.modules():
        if isinstance(owner, (nn.ModuleList, nn.Sequential)):
            for layer in owner.children():
                groups[id(owner), type(layer)].append(layer)
    for number, group in enumerate(groups.values()):
        if len(group) > 1:
            yield from ((layer, number) for layer in group if any(True for _ in layer.children()))


class AroundForward:
    """Replaces the forward of a module, and in a trace calls it. replaced: the one that the user had put on
    the module; None: that of its class."""

    replaced: Any


@dataclass(frozen=True)
class _Call:
    """A call of a layer in a trace. given: the nodes of the tensors among its arguments, and of parameters and buffers."""

    layer: nn.Module
    tracer: Any
    leaves: list[Any]
    spec: pytree.TreeSpec
    given: list[fx.Node]
    context: tuple[Any, ...]
    region: int | None  # the call of checkpoint around it

    @staticmethod
    def of(layer: nn.Module, tracer: Any, args: Any, kwargs: Any) -> _Call | None:
        """None where forward may change an argument or look into one, and where a hook that is traced may do anything."""
        hooks = [vars(m).get(name) for m in layer.modules() for name in HOOK_TABLES]
        if any(hooks) or any(getattr(of_all, f"_global{name}") for name in HOOK_TABLES):
            return None
        if not all(map(_is_value, (*args, *kwargs.values()))):
            return None
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in (*leaves, *_states(layer)) if isinstance(x, Tensor)]
        slots = [get_proxy_slot(x, tracer, None) if isinstance(x, FakeTensor) else None for x in tensors]
        if any(slot is None or slot.constant is not None for slot in slots):
            return None
        given = [slot.proxy.node for slot in slots if slot is not None]
        return _Call(layer, tracer, leaves, spec, given, _context(), current_region())

    @property
    def versions(self) -> list[int]:
        with torch._C.DisableTorchFunction():  # a mode of the user's would ask for them as its own
            return [x._version for x in (*self.leaves, *_states(self.layer)) if isinstance(x, Tensor)]


@dataclass(frozen=True)
class _Trace:
    """What the call of a layer has traced."""

    call: _Call
    state: PythonState
    read: list[tuple[Any, str, Any]]  # (owner, name, value) of attributes
    nodes: list[fx.Node]
    path: str  # of the layer
    depth: int  # of the stack of modules around its nodes
    out: list[Any]  # for each leaf of the result (node, tensor), (None, value) or the number of an argument
    out_spec: pytree.TreeSpec

    def is_that_of(self, call: _Call) -> bool:
        """True if this call would trace the same on its own tensors."""
        was = self.call
        if (call.spec, call.context, call.region is None) != (was.spec, was.context, was.region is None):
            return False
        placed: dict[fx.Node, fx.Node] = {}
        return (
            len(call.given) == len(was.given)
            and all(placed.setdefault(old, new) is new for old, new in zip(was.given, call.given, strict=True))
            and all(map(_same_form, call.leaves, was.leaves))
            and _same_modules(was.layer, call.layer)
            and self.state.holds()
            and self._reads_the_same(call.layer)
        )

    def _reads_the_same(self, layer: nn.Module) -> bool:
        others = dict(zip(self.call.layer.modules(), layer.modules(), strict=True))
        mine = (
            (vars(o), vars(others[o]), name) for o, name, _ in self.read if isinstance(o, nn.Module) and o in others
        )
        return all(
            _equal(_traced_as(was.get(name, ABSENT)), _traced_as(now.get(name, ABSENT))) for was, now, name in mine
        )

    def copy(self, call: _Call, reads: Reads) -> Any:
        """The nodes once more, on this call's tensors; returns what its forward would."""
        stack = call.tracer.module_stack
        path = next(reversed(stack.values()))[0]
        around = {key: (fqn, _name_of(cls)) for key, (fqn, cls) in stack.items()}
        new = dict(zip(self.call.given, call.given, strict=True))
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for node in self.nodes:
                if isinstance(node.meta.get(VAL), (*SymTypes, int)):
                    continue  # a size, which both have
                args, kwargs = (map_arg(x, lambda n: new.get(n, n)) for x in (node.args, node.kwargs))
                made = call.tracer.graph.create_node(node.op, node.target, args, kwargs, node.name, node.type)
                made.meta = dict(node.meta)
                made.meta[VAL] = pytree.tree_map_only(FakeTensor, _another, node.meta[VAL])
                inside = itertools.islice(node.meta[_STACK].items(), self.depth, None)
                moved = {_moved(k, self.path, path): (_moved(fqn, self.path, path), cls) for k, (fqn, cls) in inside}
                made.meta[_STACK] = {**around, **moved}
                if call.region is not None:
                    mark_region(made, call.region)
                new[node] = made
        others = dict(zip(self.call.layer.modules(), call.layer.modules(), strict=True))
        for owner, name, value in self.read:
            if isinstance(owner, nn.Module) and others.get(owner, owner) is not owner:
                reads.repeat(owner, others[owner], name, value)
        out = []
        for each in self.out:
            if isinstance(each, int):
                out.append(call.leaves[each])
            elif each[0] is None:
                out.append(each[1])
            else:
                made = _like(each[1])
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    track_tensor(made, fx.Proxy(new[each[0]], call.tracer), constant=None, tracer=call.tracer)
                out.append(made)
        return pytree.tree_unflatten(out, self.out_spec)


class LikeLayers:
    """The layers of one trace. copied: how many calls were copies. notes: what the trace has noted so far.

    bordered: modules that are left eager, or at whose border hooks run: a layer with one inside is no copy.
    """

    def __init__(self, reads: Reads, notes: Sequence[str]) -> None:
        self.reads, self.notes, self.copied = reads, notes, 0
        self.traces: dict[int, list[_Trace]] = defaultdict(list)
        self.inside: set[nn.Module] = set()  # all layers, and what is in them
        self.bordered: Collection[nn.Module] = ()

    def call_for(self, layer: nn.Module, group: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of the layer's `_call_impl`."""
        self.inside.update(layer.modules())

        def call(*args: Any, **kwargs: Any) -> Any:
            mode, known = get_proxy_mode(), self.traces[group]
            if mode is None or not self.reads.on or getattr(mode.tracer, "enable_attr_proxy", True):
                return original(*args, **kwargs)
            this = _Call.of(layer, mode.tracer, args, kwargs)
            if this is None or any(m in self.bordered for m in layer.modules() if m is not layer):
                return original(*args, **kwargs)
            for before in known:
                if before.is_that_of(this):
                    self.copied += 1
                    return before.copy(this, self.reads)
            if len(known) == _KINDS:
                return original(*args, **kwargs)
            output, trace = self._traced(this, lambda: original(*args, **kwargs))
            known += [trace] if trace is not None else []
            return output

        return call

    def _traced(self, call: _Call, run: Callable[[], Any]) -> tuple[Any, _Trace | None]:
        """What the call gives, and its trace; None where it does more than compute."""
        stack, nodes = call.tracer.module_stack, call.tracer.graph.nodes
        path, depth = next(reversed(stack.values()))[0], len(stack)
        last, before = next(iter(reversed(nodes)), None), (*self._done(), call.versions)
        with self.reads.listing() as read:
            output = run()
        new = [*itertools.takewhile(lambda n: n is not last, reversed(nodes))][::-1]
        if (*self._done(), call.versions) != before or call.context != _context():
            return output, None
        around = {id(m) for m in self.reads.model.modules() if call.layer in m.children()}
        whole = any(name == "__dict__" or id(owner) in around for owner, name, _ in read.values())
        if whole or not all(_computes(n, call.region) for n in new):
            return output, None
        leaves, spec = pytree.tree_flatten(output)
        out = [_result(leaf, call, {*new}) for leaf in leaves]
        if any(each is None for each in out):
            return output, None
        guards = self.reads.guards(frozenset())
        if any(_names(value, self.inside) for _, value in guards):
            return output, None
        for owner, name, _ in read.values():
            place = Place(vars(owner) if hasattr(owner, "__dict__") else owner, name, name)
            guards.append((place, snapshot(place.get())))
        return output, _Trace(call, PythonState(guards), [*read.values()], new, path, depth, out, spec)

    def _done(self) -> tuple[int, ...]:
        """What does not change while a layer only computes."""
        return len(self.reads.written), len(self.notes), self.reads.clock(), self.reads.asked.addressed


def _names(value: Any, modules: Collection[nn.Module]) -> bool:
    """True if one of the modules is a key or a part of a snapshot: `TABLE[self]`, `self is FIRST`."""
    if isinstance(value, Container):
        return any(_names(x, modules) for pair in value.parts.items() for x in pair)
    return isinstance(value, nn.Module) and value in modules


def _is_value(argument: Any) -> bool:
    return all(map(_is_value, argument)) if type(argument) is tuple else isinstance(argument, _VALUES)


def _states(layer: nn.Module) -> list[Tensor]:
    tables = [vars(m)[name].values() for m in layer.modules() for name in TABLES[:2]]
    return [x for table in tables for x in table if x is not None]


def _context() -> tuple[Any, ...]:
    """Switches that change what code traces."""
    casts = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    modes = torch.overrides._get_current_function_mode_stack()
    return torch.is_grad_enabled(), *casts, [id(mode) for mode in modes]


def _same_form(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        with torch._C.DisableTorchFunction():
            kinds = [(type(x), x.dtype, x.device, x.layout, x.requires_grad, x.is_conj(), x.is_neg()) for x in (a, b)]
            return kinds[0] == kinds[1] and expressions(a) == expressions(b)
    if isinstance(a, SymTypes) and isinstance(b, SymTypes):
        return bool(a.node.expr == b.node.expr)
    return not isinstance(a, Tensor) and same(a, b)


def _same_modules(a: nn.Module, b: nn.Module) -> bool:
    """True if two layers are of the same classes, with parameters and buffers of the same form."""
    if a is b:
        return True
    mine, others = dict(a.named_modules()), dict(b.named_modules())
    if mine.keys() != others.keys():
        return False
    for x, y in zip(mine.values(), others.values(), strict=True):
        tables = [(vars(x)[name], vars(y)[name]) for name in TABLES]
        if type(x) is not type(y) or x.training != y.training or any([*s] != [*t] for s, t in tables):
            return False
        if not all(_same_form(s[name], t[name]) for s, t in tables[:2] for name in s):
            return False
    return True


def _traced_as(value: Any) -> Any:
    """What a trace runs of an attribute."""
    return (value.replaced or ABSENT) if isinstance(value, AroundForward) else value


def _equal(a: Any, b: Any) -> bool:
    if same(a, b):
        return True
    mine, others = parts_of(a), parts_of(b)
    if mine is None or others is None or type(a) is not type(b) or [*mine[1]] != [*others[1]]:
        return False
    return all(_equal(part, others[1][key]) for key, part in mine[1].items())


def _computes(node: fx.Node, region: int | None) -> bool:
    """True if a node only computes. region: that of the layer's call; others are of checkpoints inside."""
    if node.op != "call_function" or "unbacked_bindings" in node.meta or region_of(node) != region:
        return False
    if isinstance(node.target, OpOverload):
        own = node.target.namespace == "megafx"
        return not node.target._schema.is_mutable and (not own or is_kernel(node.target) or is_composite(node.target))
    return node.target is operator.getitem or isinstance(node.meta.get(VAL), SymTypes)


def _result(leaf: Any, call: _Call, made: set[fx.Node]) -> Any:
    """Where a leaf of the result comes from (see `_Trace.out`); None where a copy could not have its like."""
    for number, given in enumerate(call.leaves):
        if leaf is given and isinstance(leaf, Tensor):
            return number
    if not isinstance(leaf, Tensor):
        return (None, leaf) if isinstance(leaf, _VALUES) else None
    slot = get_proxy_slot(leaf, call.tracer, None)
    if slot is None or slot.constant is not None or slot.proxy.node not in made or not isinstance(leaf, FakeTensor):
        return None
    with torch._C.DisableTorchFunction():
        memories = {x.untyped_storage()._cdata for x in (*call.leaves, *_states(call.layer)) if isinstance(x, Tensor)}
        own = leaf.untyped_storage()._cdata not in memories
        return (
            (slot.proxy.node, leaf)
            if own and isinstance(leaf.storage_offset(), int) and not leaf.storage_offset()
            else None
        )


def _another(value: FakeTensor) -> FakeTensor:
    mode = value.fake_mode
    assert isinstance(mode, QuickFakeTensorMode)
    return mode.another(value)


def _like(value: FakeTensor) -> Tensor:
    """A tensor of the same form. Where a gradient goes through it, it is no leaf, so that the model may write into it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        made = _another(value)
        if not value.requires_grad:
            return made
        with value.fake_mode:
            return made.requires_grad_().clone()


def _name_of(cls: Any) -> Any:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else cls


def _moved(name: str, old: str, new: str) -> str:
    """'model.layers.0.mlp' -> 'model.layers.1.mlp'."""
    return new + name[len(old) :] if name == old or name.startswith((f"{old}.", f"{old}@")) else name
