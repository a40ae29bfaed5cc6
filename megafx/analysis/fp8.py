"""Which linears run in FP8: what `Config` says of their places, and of what their results are for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from megafx.analysis.layers import Layers
from megafx.config import Config
from megafx.ir.nodes import in_backward, op_name
from megafx.ir.program import Program, fqn_of

aten = torch.ops.aten

_DECIDES = ("topk", "argmax", "max", "sort", "argsort")  # ops that choose by the largest
_NUMBERS = ("_to_copy", "add", "mul", "div", "sub", "softmax", "_softmax", "sigmoid", "softplus", "masked_fill")
# from a router's product to its choice
_ON_THE_WAY = {*_NUMBERS, "view", "_unsafe_view", "reshape", "getitem", "slice"}


def places(linears: Iterable[fx.Node], layers: Layers, config: Config) -> Callable[[fx.Node], str]:
    """A function of a linear, or of its product: why its place or its use leave it as it is, or ''. linears: all of them."""
    linears = [*linears]
    inside = [layers.layer_of(fqn_of(n)) for n in linears]
    order = [*dict.fromkeys(filter(None, inside))]
    behind = max((i + 1 for i, layer in enumerate(inside) if layer), default=len(inside))
    heads = set(linears[behind:]) if config.fp8_head else set()

    def why(linear: fx.Node) -> str:
        layer = layers.layer_of(fqn_of(linear))
        if not layer and linear not in heads:
            return "it is in no layer"
        place = order.index(layer) if layer else 0
        if layer and config.first_last_layers_bf16:
            if place < config.num_layers_at_start_in_bf16:
                return f"it is in the first of the layers (num_layers_at_start_in_bf16={config.num_layers_at_start_in_bf16})"
            if place >= len(order) - config.num_layers_at_end_in_bf16:
                return f"it is in the last of the layers (num_layers_at_end_in_bf16={config.num_layers_at_end_in_bf16})"
        decides = _decides(linear)
        return f"its result decides ({decides})" if decides else ""

    return why


def _decides(product: fx.Node) -> str:
    """The op that chooses by the product's result, or ''."""
    todo, seen = [product], {product}
    while todo:
        for user in todo.pop().users:
            if op_name(user) in _DECIDES:
                return op_name(user)
            if user not in seen and not in_backward(user) and op_name(user) in _ON_THE_WAY:
                seen.add(user)
                todo.append(user)
    return ""


def linears_in_fp8(program: Program, config: Config) -> set[fx.Node]:
    """The linears of a CANONICAL program that will run in FP8, for their price. (`scaled_products` may leave some more of them,
    by what ranks hold.)"""
    if config.fp8 is None:
        return set()
    params = {node for node, spec in program.input_nodes() if spec.kind == "param"}
    shapes = {s.name: tuple(map(str, n.meta["val"].shape)) for n, s in program.input_nodes() if s.kind == "param"}
    found = [
        n for n in program.graph.find_nodes(op="call_function", target=aten.linear.default) if _weight(n) in params
    ]
    why = places(found, Layers.of(shapes), config)
    return {n for n in found if not why(n)}


def _weight(linear: fx.Node) -> object:
    weight = linear.args[1]
    return weight.args[0] if isinstance(weight, fx.Node) and op_name(weight) == "_to_copy" else weight
