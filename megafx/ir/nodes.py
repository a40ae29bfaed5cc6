"""What one node is: its op and arguments, whether it is a view and of what memory, a value of zeros, a random draw."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Collection, Container
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx.ir.program import PHASE, PLACEMENT, VAL, Builder, Program, copied_graph, graph_module
from megafx.placements.types import Placement

aten = torch.ops.aten
BACKWARD = "backward"  # node.meta[PHASE] of a backward node


def aten_ops(names: str) -> frozenset[Any]:
    """ATen's operators of these names: 'view to.dtype' are aten.view.default and aten.to.dtype."""
    overloads = (name if "." in name else f"{name}.default" for name in names.split())
    return frozenset(
        getattr(getattr(aten, packet), overload) for packet, _, overload in (n.partition(".") for n in overloads)
    )


# Ops that give the elements of their first operand in the same order (`detach` does too, but stops its gradient).
RESHAPES = aten_ops("view _unsafe_view reshape")
COPIES = aten_ops("clone contiguous alias")
CASTS = aten_ops("to.dtype _to_copy")
PASS_ON = COPIES | CASTS | aten_ops("detach")  # what it gives are its operand's values, rounded where a cast does that
# Ops that read dtype, device and perhaps sizes of their operand, no data.
SHAPED = aten_ops("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty new_empty_strided")
NUMBERS = aten_ops("item _local_scalar_dense")  # read from tensors
MASKS = (torch.bool, torch.uint8)  # dtypes of indices that select where they are not 0
# Checks of a value that the program does not need.
ASSERTS = {torch._check}.union(
    aten_ops("_assert_tensor_metadata _assert_async _assert_async.msg _assert_scalar _functional_assert_async.msg"),
    aten_ops("sym_constrain_range sym_constrain_range_for_size"),
)


# -- op and arguments


def op_name(node: Any) -> str:
    """'view' for aten.view.default, 'getitem' for operator.getitem; '' for a node that is no call."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1]
    return getattr(node.target, "__name__", "")


def in_backward(node: fx.Node) -> bool:
    return node.meta.get(PHASE) == BACKWARD


@cache
def argument_places(target: Any) -> dict[str, int]:
    """Position of each argument in the schema of an operator, by name; {} for other functions."""
    return {a.name: i for i, a in enumerate(target._schema.arguments)} if hasattr(target, "_schema") else {}


def argument(node: fx.Node, name: str, default: Any = None) -> Any:
    """An argument by its schema name, however it was passed: else the schema's default, else `default`."""
    if name in node.kwargs:
        return node.kwargs[name]
    place = argument_places(node.target).get(name)
    if place is None:
        return default
    if place < len(node.args):
        return node.args[place]
    spec = node.target._schema.arguments[place]
    return spec.default_value if spec.has_default_value() else default


def set_arguments(node: fx.Node, **values: Any) -> None:
    """Change arguments that the call has, by their schema names."""
    for name, value in values.items():
        place = argument_places(node.target)[name]
        if place < len(node.args):
            node.update_arg(place, value)
        else:
            node.update_kwarg(name, value)


def changed_copy(gm: fx.GraphModule, *changes: Callable[[fx.Node], bool]) -> tuple[fx.GraphModule, int]:
    """(the same code with the nodes that `changes` change, one after the other, their number); `gm` itself where there are
    none."""
    graph = copied_graph(gm.graph)
    count = sum(change(node) for change in changes for node in graph.nodes)
    return (graph_module(gm, graph), count) if count else (gm, 0)


def change_parts(program: Program, *changes: Callable[[fx.Node], bool]) -> int:
    """Change nodes of the forward and the backward graph, one change after the other; return how many were changed."""
    if program.partition is None:
        return 0
    program.partition, total = program.partition.changed(lambda gm, direction: changed_copy(gm, *changes))
    return total


def replace(node: fx.Node, by: Any) -> bool:
    """Give the node's users another value, and take the node out of the graph. Returns True."""
    node.replace_all_uses_with(by)
    node.graph.erase_node(node)
    return True


def mark(node: fx.Node, placement: Any) -> fx.Node:
    """Say how a node is placed, where that is known."""
    if isinstance(placement, Placement):
        node.meta[PLACEMENT] = placement
    return node


def between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The nodes behind the first and before the last."""
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def behind(node: Any, ops: Collection[Any]) -> Any:
    """The value before a chain of these ops, each applied to its first operand; the value itself if there is none."""
    while isinstance(node, fx.Node) and node.target in ops:
        node = node.args[0]
    return node


def masks(node: fx.Node, operand: fx.Node) -> bool:
    """True if the node puts a number in the place of some elements of the operand: of padding."""
    return node.target is aten.where.self and node.args[1] is operand and node.args[2].meta["val"].ndim == 0


def behind_padding(node: fx.Node) -> fx.Node:
    """The value before reshapes and masks."""
    found: Any = node
    while found.target in RESHAPES or (found.target is aten.where.self and masks(found, found.args[1])):
        found = found.args[1] if found.target is aten.where.self else found.args[0]
    return found


# -- views and memory


def is_view(node: fx.Node) -> bool:
    """True if the op returns views of its first operand, by its schema (`Tensor(a)`), `unbind` and `split` included."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target is aten._unsafe_view.default:
        return True  # declared a fresh tensor for autograd's sake; it is a view
    return (
        bool(node.args)
        and isinstance(node.args[0], fx.Node)
        and any(r.alias_info is not None for r in target._schema.returns)
        and not target._schema.is_mutable
    )


def writes(node: fx.Node) -> bool:
    """True if the op changes memory of an operand: its schema says so."""
    return (
        node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    )


def shows_operand(node: fx.Node) -> bool:
    """True if the node is a view of its first operand, or one part of a tuple of views."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return is_view(node)


def storage_of(node: fx.Node) -> fx.Node:
    """The node that this one is a view of; itself if it is no view."""
    while shows_operand(node):
        node = node.args[0]
    return node


def readers_of(base: fx.Node, also: Container[Any] = ()) -> set[fx.Node]:
    """Nodes that read the memory of `base`, through whatever view. also: ops whose result may be their operand's memory."""
    found: set[fx.Node] = set()
    for user in base.users:
        found |= readers_of(user, also) if shows_operand(user) or user.target in also else {user}
    return found


def _is_all_of(view: Any, base: fx.Node) -> bool:
    """True if a view shows the whole memory of its base, in order."""
    if behind(view, RESHAPES) is base:
        return True
    sizes = [n.meta[VAL].numel() if n.meta[VAL].is_contiguous() else None for n in (view, base)]
    return isinstance(sizes[0], int) and sizes[0] == sizes[1]


def memory_of(node: fx.Node) -> tuple[fx.Node, int, int]:
    """(base, start, stop): the node shows elements [start, stop) of base's memory; all of it if that is not known."""
    base, node = storage_of(node), behind(node, RESHAPES)
    if node is base or node.target is not aten.slice.Tensor or not _is_all_of(node.args[0], base):
        return base, 0, sys.maxsize
    source, dim, start, stop = (*node.args, 0, 0, 0)[:4]
    value = source.meta.get(VAL)
    known = isinstance(start, int) and isinstance(stop, int) and len(node.args) == 4 and 0 <= start <= stop
    if not (known and dim == 0 and isinstance(value, torch.Tensor) and value.is_contiguous()):
        return base, 0, sys.maxsize
    row = math.prod(value.shape[1:])
    return (base, start * row, stop * row) if isinstance(row, int) else (base, 0, sys.maxsize)


def overlaps(a: tuple[fx.Node, int, int], b: tuple[fx.Node, int, int]) -> bool:
    """True if two results of `memory_of` share elements."""
    return a[0] is b[0] and a[1] < b[2] and b[1] < a[2]


def own_gradients(program: Program, by: str) -> None:
    """Make each gradient contiguous memory of its own, as `.grad` must be: a copy if it shows an input or another result.

    Gradients of joined parameters may be rows of one tensor: `.grad` of each is then a view that nobody else shows.
    """
    output, results = program.output_node(), list(program.results())
    taken: list[tuple[fx.Node, int, int]] = []
    for i, spec in enumerate(program.outputs):
        node = results[i]
        if not isinstance(node, fx.Node):
            continue
        memory = memory_of(node) if spec.kind == "gradient" else (storage_of(node), 0, sys.maxsize)
        if spec.kind == "gradient":
            shared = memory[0].op == "placeholder" or any(overlaps(memory, m) for m in taken)
            if shared or not node.meta[VAL].is_contiguous():
                origin = results[0] if node.op == "placeholder" and isinstance(results[0], fx.Node) else node
                build = Builder(program, output, origin, by)
                results[i] = build(aten.clone.default, node, memory_format=torch.contiguous_format)
                results[i].meta[PHASE] = BACKWARD
                memory = memory_of(results[i])
        taken.append(memory)
    output.args = (tuple(results),)


# -- constant values

FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0}  # op name -> the number
FILLS_BY_ARGUMENT = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0}  # op name -> position of the number
_SAME_ELEMENTS = ("view", "reshape", "expand", "unsqueeze", "squeeze", "detach", "clone", "alias", "to", "_to_copy")


def is_zero(node: Any) -> bool:
    """True if a value is 0 in all elements by construction."""
    while op_name(node) in _SAME_ELEMENTS:
        node = node.args[0]
    name = op_name(node)
    if name in FILLS_BY_ARGUMENT:
        value = node.args[FILLS_BY_ARGUMENT[name]]
        return isinstance(value, (int, float)) and value == 0
    return name in FILLS or (isinstance(node, (int, float)) and node == 0)


# -- random draws


class Draw(NamedTuple):
    """The arguments of an op that draws random bits; an op whose schema has all of them is one.

    seed: a 0-d tensor, or None: nothing is drawn; p: probability that an element is dropped; op_id: the op's number in the
    graph; shard_dim, layout: how the (first) result is cut over the ranks of `axis` (-1 and []: whole). An element's bits
    follow from its linear index in the whole result.
    """

    seed: Any = None
    p: float = 0.0
    op_id: int = 0
    shard_dim: int = -1
    layout: Any = ()
    axis: str = "tp"

    @property
    def args(self) -> tuple[Any, ...]:
        """In the order that ops take them."""
        return (self.seed, self.p, self.op_id, self.shard_dim, list(self.layout), self.axis)


def is_draw(op: Any) -> bool:
    """True if a node, or an operator, draws random bits."""
    return argument_places(op.target if isinstance(op, fx.Node) else op).keys() >= set(Draw._fields)


def draw_of(node: fx.Node) -> Draw:
    """The arguments of a node that draws."""
    assert is_draw(node), f"{node.target} draws nothing"
    return Draw(*(argument(node, name) for name in Draw._fields))
