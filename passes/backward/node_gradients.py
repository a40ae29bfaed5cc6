"""Part of `build_joint_graph`: each kind of node is traced once, forward and backward, and copied where it comes again.

A graph repeats itself: 32 layers have the same nodes, and the same formulas for their gradients. What torch dispatches for a
node follows from its target, its other arguments and the forms of its operands (dtype, sizes, strides, whether a gradient is
wanted); what autograd dispatches follows from these and from the forms of the gradients of its results. Both are traced on
leaves, node by node. A node of a kind that is known gets a copy of the traced nodes, on its own operands.

The order is autograd's, which runs the functions of the last op first and adds each gradient to those that came before it.
The gradient that an operand already has is part of the trace, as a gradient of the operand itself: so several functions of one
node add to it one after the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor, fx
from torch._subclasses.fake_impls import fast_detach
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv

from megafx.ir.nodes import BACKWARD
from megafx.ir.program import MADE_BY, PHASE, PLACEMENT, VAL, Program, copied_node, inherit

_PLAIN = (type(None), bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(eq=False)
class Value:
    """A tensor of the graph that is traced."""

    node: fx.Node | None  # None for a constant
    like: Tensor  # a tensor of its form
    form: Hashable  # equal for values of which ops make the same
    requires_grad: bool = False
    tensor: Tensor | None = None  # by which ops are traced on it, for autograd a leaf; None until one is


@dataclass
class _Traced:
    """Nodes that were traced on others."""

    nodes: list[fx.Node]
    metas: list[dict[str, Any]]  # what the trace says of each
    # node -> its place among those that it was traced on and, behind these, its own
    places: dict[fx.Node | None, int]


@dataclass
class _Kind:
    """A kind of node, as it was traced first."""

    traced: _Traced
    nodes: list[fx.Node | None]  # nodes, given, results: as in `Call`
    given: list[Value]
    results: Any
    # kind of gradients -> the nodes, and the gradients of the operands that want one
    backwards: dict[Hashable, tuple[_Traced, list[Value | None]]] = field(default_factory=dict)


@dataclass
class _Call:
    """A node of the forward graph."""

    origin: fx.Node
    kind: _Kind
    nodes: list[fx.Node | None]  # those of its operands, and those that it became, in the order of its kind
    given: list[Value]  # its operands, each once
    results: Any  # what it returned, tensors as `Value`


def _tells_sizes_apart(guard: Any) -> bool:
    """True of a guard by which of two sizes is larger, or by what a number computed of one is (`1 / size`). Sizes of 0 and 1
    have graphs of their own, what is computed of sizes that may differ holds for equal ones, and quotients are of sizes that
    the call has to have."""
    if isinstance(guard, sympy.Eq) and any(side.has(sympy.Float) and not side.is_integer for side in guard.args):
        return True
    if not isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)) or guard.has(FloorDiv):
        return False
    number = next((n for n in guard.args if n.is_number), None)
    return number is None or number > (1 if isinstance(guard, (sympy.Gt, sympy.Lt)) else 2)


class NodeGradients:
    """Traces a graph and its backward, within `make_fx`. by: the pass that does so.

    fixing: the first node at which one of the symbols became a number, or decided by being larger than another size.
    decided: the symbols that did the latter.
    """

    def __init__(self, program: Program, symbols: set[Any], by: str) -> None:
        mode = get_proxy_mode()
        assert mode is not None and program.fake_mode.shape_env is not None, "runs inside make_fx"
        self.program, self.by, self.symbols = program, by, symbols
        self.tracer: Any = mode.tracer
        self.graph: fx.Graph = mode.tracer.graph
        self.last = next(iter(reversed(self.graph.nodes)), None)
        env: Any = program.fake_mode.shape_env
        self.replacements, self.guards, self.general = env.replacements, env.guards, getattr(env, "general", ())
        self.known, self.guarded = len(self.replacements), len(self.guards)
        self.fixing: fx.Node | None = None
        self.decided: set[Any] = set()
        self.kinds: dict[Hashable, _Kind] = {}
        self.calls: list[_Call] = []
        self.inputs: list[Any] = []

    # -- forward

    def forward(self, run: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
        """The results of the program's graph on args, tensors as `Value`. run(target, args, kwargs): calls an op."""
        env: dict[fx.Node, Any] = {}
        self.inputs = [self._found(x) if isinstance(x, Tensor) else x for x in args]
        inputs = iter(self.inputs)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(inputs)
            elif node.op == "get_attr":
                held = operator.attrgetter(str(node.target))(self.program.gm)
                env[node] = Value(None, held, object(), tensor=held) if isinstance(held, Tensor) else held
            elif node.op == "call_function":
                given: Any = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                found = node.target(*given[0]) if node.target is operator.getitem else self._call(run, node, given)
                made = found.node if isinstance(found, Value) else None
                if made is not None and made.op == "call_function" and PLACEMENT in node.meta:
                    made.meta.setdefault(PLACEMENT, node.meta[PLACEMENT])
                env[node] = found
        results: Any = fx.node.map_arg(self.program.results(), env.__getitem__)
        return list(results)

    def _call(self, run: Callable[..., Any], node: fx.Node, arguments: Any) -> Any:
        leaves, spec = pytree.tree_flatten(arguments)
        given = [*dict.fromkeys(x for x in leaves if isinstance(x, Value))]
        on = [x.node for x in given]
        others = [given.index(x) if isinstance(x, Value) else _constant(x) for x in leaves]
        key = node.target, spec, *others, *(x.form for x in given), _pattern(on)
        kind = self.kinds.get(key)
        if kind is None:
            kind = self._trace(run, node, leaves, spec, given)
            if all(_is_placed(x, kind.traced) for x in pytree.tree_leaves(kind.results)):
                self.kinds[key] = kind
            nodes, results = kind.nodes, kind.results
        else:
            nodes = [*on, *self._copies(kind.traced, on, node, self._forward_meta(node))]
            results = pytree.tree_map(lambda x: _same(x, kind, nodes, given), kind.results)
        if any(isinstance(x, Value) and x.requires_grad for x in pytree.tree_leaves(results)):
            self.calls.append(_Call(node, kind, nodes, given, results))
        return results

    def _trace(self, run: Callable[..., Any], node: fx.Node, leaves: list[Any], spec: Any, given: list[Value]) -> _Kind:
        arguments = pytree.tree_unflatten([*map(self.tensor, leaves)], spec)
        found = run(node.target, *arguments)
        on = [x.node for x in given]
        traced = self._traced(on, node, self._forward_meta(node))
        values = {id(x.tensor): x for x in given}
        for x in pytree.tree_leaves(found):
            if isinstance(x, Tensor) and id(x) not in values:
                values[id(x)] = self._found(x)
        results = pytree.tree_map(lambda x: values.get(id(x), x), found)
        return _Kind(traced, [*on, *traced.nodes], given, results)

    def _forward_meta(self, node: fx.Node) -> dict[str, Any]:
        return {MADE_BY: node.meta.get(MADE_BY, ())}

    # -- backward

    def backward(self, outputs: Sequence[Value], seeds: Sequence[Tensor], wrt: Sequence[int]) -> list[Tensor | None]:
        """d outputs / d inputs, for the gradients `seeds` of the outputs; None for an input that no output depends on.

        wrt: numbers of inputs.
        """
        come: dict[Value, list[Tensor]] = {}
        for output, seed in zip(outputs, seeds, strict=True):
            if output.requires_grad:
                come.setdefault(output, []).append(seed)
        gradients: dict[Value, Value] = {}
        for output, several in come.items():
            leaf = self.tensor(output)
            found = several if len(several) == 1 else torch.autograd.grad([leaf for _ in several], [leaf], several)
            gradients[output] = self._found(found[0])
        self._fresh()
        for call in reversed(self.calls):
            self._differentiate(call, gradients)
        return [self.tensor(gradients[x]) if (x := self.inputs[i]) in gradients else None for i in wrt]

    def _differentiate(self, call: _Call, gradients: dict[Value, Value]) -> None:
        """Take the gradients of a node's results, and leave those of its operands."""
        come = [(i, gradients.pop(x)) for i, x in enumerate(_results(call)) if x in gradients]
        wanted = [i for i, x in enumerate(call.given) if x.requires_grad]
        if not come or not wanted:
            return
        before = [(i, gradients[x]) for i, x in enumerate(call.given) if x in gradients]
        on = [*call.nodes, *(x.node for _, x in (*come, *before))]
        key = tuple((i, x.form) for i, x in come), tuple((i, x.form) for i, x in before), _pattern(on)
        if key in call.kind.backwards:
            traced, likes = call.kind.backwards[key]
            nodes = [*on, *self._copies(traced, on, call.origin, {PHASE: BACKWARD})]
            found = [None if x is None else Value(nodes[traced.places[x.node]], x.like, x.form) for x in likes]
        else:
            traced, found = self._trace_backward(call, come, before, wanted, on)
            if all(_is_placed(x, traced) for x in found):
                call.kind.backwards[key] = traced, found
        for i, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradients[call.given[i]] = gradient

    def _trace_backward(
        self,
        call: _Call,
        come: list[tuple[int, Value]],
        before: list[tuple[int, Value]],
        wanted: list[int],
        on: list[fx.Node | None],
    ) -> tuple[_Traced, list[Value | None]]:
        """Traces by the tensors of the kind, and puts the nodes of the call in the place of its."""
        kind, stand_ins = call.kind, list[fx.Node]()
        seeds = []
        for _, gradient in (*come, *before):
            stand_ins.append(self.graph.create_node("placeholder", "gradient"))
            seeds.append(self._leaf(stand_ins[-1], gradient.like))
        self._fresh()
        results = _results(kind)
        outputs = [results[i].like for i, _ in come] + [self.tensor(kind.given[i]) for i, _ in before]
        inputs = [self.tensor(kind.given[i]) for i in wanted]
        found = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, retain_graph=True)
        own = dict(zip([*kind.nodes, *stand_ins], on, strict=True))
        fresh = self._fresh()
        for node in fresh:
            node.args, node.kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: own.get(n, n))
        values: list[Value | None] = []
        for x in found:
            value = None if x is None else self._found(x)
            if value is not None and value.node in own:
                value.node, value.tensor = own[value.node], None
            values.append(value)
        for node in stand_ins:
            self.graph.erase_node(node)
        return self._traced(on, call.origin, {PHASE: BACKWARD}, fresh), values

    # -- nodes and tensors

    def _fresh(self) -> list[fx.Node]:
        """The nodes that were traced since the last question."""
        fresh = [*takewhile(lambda n: n is not self.last, reversed(self.graph.nodes))][::-1]
        self.last = fresh[-1] if fresh else self.last
        return fresh

    def _traced(
        self, on: list[fx.Node | None], origin: fx.Node, meta: dict[str, Any], nodes: list[fx.Node] | None = None
    ) -> _Traced:
        """nodes: None for those that were traced since the last question. They stem from `origin`."""
        nodes = self._fresh() if nodes is None else nodes
        if self.fixing is None and len(self.replacements) != self.known:
            self.known = len(self.replacements)
            if any(self.replacements.get(s, s).is_Integer for s in self.symbols):
                self.fixing = origin
        if len(self.guards) > self.guarded:
            new = [g.expr for i, g in enumerate(self.guards) if i >= self.guarded and i not in self.general]
            self.guarded = len(self.guards)
            decided = {s for guard in new if _tells_sizes_apart(guard) for s in guard.free_symbols}
            self.decided |= decided & self.symbols
            self.fixing = origin if decided and self.fixing is None else self.fixing
        metas = [dict(n.meta) for n in nodes]
        for node in nodes:
            inherit(node, origin, self.by).meta.update(meta)
        return _Traced(nodes, metas, {n: i for i, n in reversed([*enumerate([*on, *nodes])])})

    def _copies(
        self, traced: _Traced, on: list[fx.Node | None], origin: fx.Node, meta: dict[str, Any]
    ) -> list[fx.Node]:
        """The same nodes on others. A size stays: it is equal."""
        nodes: list[Any] = [*on]

        def placed(node: fx.Node) -> fx.Node:
            place = traced.places.get(node)
            return node if place is None else nodes[place]

        for node, known in zip(traced.nodes, traced.metas, strict=True):
            if isinstance(known.get(VAL), SymTypes):
                nodes.append(node)
                continue
            made = copied_node(self.graph, node, placed)
            made.meta = dict(known)
            inherit(made, origin, self.by).meta.update(meta)
            nodes.append(made)
            self.last = made
        return nodes[len(on) :]

    def _found(self, x: Tensor) -> Value:
        """A tensor that the trace has made."""
        slot = get_proxy_slot(x, self.tracer, None)
        if slot is None:
            return Value(None, x, object(), x.requires_grad, x)
        if slot.constant is not None:
            return Value(slot.proxy.node, x, object(), x.requires_grad, x)
        return Value(slot.proxy.node, x, _form(x), x.requires_grad, x if x.is_leaf else None)

    def tensor(self, value: Any) -> Any:
        """By which ops are traced on a value; what is none stays."""
        if not isinstance(value, Value):
            return value
        if value.tensor is None:
            assert value.node is not None
            value.tensor = self._leaf(value.node, value.like).requires_grad_(value.requires_grad)
        return value.tensor

    def _leaf(self, node: fx.Node, like: Any) -> Tensor:
        mode: Any = self.program.fake_mode
        leaf: Tensor = mode.another(like) if hasattr(mode, "another") else fast_detach(mode, like)
        for new, known in zip(leaf.stride(), like.stride(), strict=True):
            if isinstance(new, SymInt) and new.node.expr.has(sympy.Pow):  # which torch cannot make of the tracked sizes
                slot = get_proxy_slot(known, self.tracer, None)
                if slot is not None:
                    set_proxy_slot(new, self.tracer, slot)
        self.tracer.tensor_tracker[leaf] = _ProxyTensor(fx.Proxy(node, self.tracer), None)
        return leaf


def _is_placed(result: Any, traced: _Traced) -> bool:
    """True if a copy of the nodes has this result."""
    return result is None or (isinstance(result, Value) and result.node in traced.places)


def _same(result: Any, kind: _Kind, nodes: list[fx.Node | None], given: list[Value]) -> Any:
    """A result of a kind, as another node of it gives it."""
    if not isinstance(result, Value):
        return result
    if result in kind.given:
        return given[kind.given.index(result)]
    return Value(nodes[kind.traced.places[result.node]], result.like, result.form, result.requires_grad)


def _results(call: _Call | _Kind) -> list[Value]:
    """The results of a node that are not its operands, each once."""
    values = (x for x in pytree.tree_leaves(call.results) if isinstance(x, Value))
    return [x for x in dict.fromkeys(values) if x not in call.given]


def _pattern(nodes: Iterable[fx.Node | None]) -> tuple[int, ...]:
    """Which of the nodes are one."""
    first: dict[fx.Node | None, int] = {}
    return tuple(first.setdefault(n, len(first)) for n in nodes)


def _form(x: Tensor) -> Hashable:
    """Equal for tensors of which ops, and their gradients, make the same."""
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return object()
    sizes = tuple(map(_constant, (*x.shape, *x.stride(), x.storage_offset())))
    return x.dtype, x.device, x.requires_grad, x.is_conj(), x.is_neg(), sizes


def _constant(x: Any) -> Hashable:
    """Equal for arguments other than tensors by which ops make the same."""
    if isinstance(x, SymTypes):
        return x.node.expr
    return (
        (type(x), x)
        if isinstance(x, _PLAIN)
        else (type(x), repr(x))
        if type(x) in (float, complex)
        else (id(x), type(x))
    )
