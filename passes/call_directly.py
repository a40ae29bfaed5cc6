"""Fused ops called without the dispatcher.

Before:  %y = megafx.glu.default(%gate, %up, "silu")
After:   %y = glu(%gate, %up, "silu")            # `kernels.op.direct`: what the dispatcher would end in
Legal because: the graph is run without autograd and on plain tensors; under dispatch modes the function calls the op.

Runs on a graph that is executed as it stands. Numbers that the dispatcher would convert are written as the schema has them.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from megafx.kernels.op import direct


def call_directly(gm: fx.GraphModule) -> fx.GraphModule:
    """The same code with such calls; `gm` itself where it has none of these ops."""
    if not any(direct(node.target) for node in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        function = direct(node.target)
        args = None if function is None else _arguments(node)
        if args is not None:
            node.target, node.args, node.kwargs = function, args, {}
    graph.set_codegen(gm.graph._codegen)
    return fx.GraphModule(gm, graph)


def _arguments(node: fx.Node) -> tuple[Any, ...] | None:
    """All arguments by position, of the schema's types; None where that is not to be seen from the graph."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    found = []
    for i, argument in enumerate(arguments):
        if i >= len(node.args) and argument.name not in node.kwargs:
            return None
        value = node.args[i] if i < len(node.args) else node.kwargs[argument.name]
        kind = _NUMBERS.get(str(argument.real_type))
        if kind is not None:
            if isinstance(value, fx.Node) and kind is not int:
                return None
            value = value if isinstance(value, fx.Node) else kind(value)
        found.append(value)
    return tuple(found)


_NUMBERS: dict[str, type] = {"float": float, "int": int, "bool": bool}
