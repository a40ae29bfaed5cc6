"""Programs in phase LOCAL, of functions, as passes after localization take them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.export import Dim, export

from megafx.ir.program import MADE_BY, SOURCE, Input, Output, Phase, Program
from megafx.ir.sizes import Sizes


def local_program(
    function: Callable[..., Any], inputs: Mapping[str, Any], varying: Iterable[str] = (), loss: bool = False
) -> Program:
    """A LOCAL program of `function(*inputs.values())`, a tuple of tensors, with placements nowhere.

    inputs: name -> example tensor; a Parameter is of kind 'param', an input named 'seed' of kind 'seed', all else of kind
    'user'. varying: names of inputs whose dim 0 is dynamic (one size for all). loss: the first output is the loss.
    """

    class Call(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    batch, names = Dim("batch", min=2), set(varying)
    shapes = tuple({0: batch} if name in names else None for name in inputs)
    examples = tuple(x.detach() for x in inputs.values())
    exported = export(Call(), examples, dynamic_shapes=(shapes,), strict=False)
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "assert" in str(node.target):
            graph.erase_node(node)
        elif node.op == "call_function":
            node.meta[SOURCE], node.meta[MADE_BY] = None, ()
    placeholders = graph.find_nodes(op="placeholder")
    kinds = [
        "param" if isinstance(x, torch.nn.Parameter) else "seed" if n == "seed" else "user" for n, x in inputs.items()
    ]
    sizes = Sizes()
    for node, x in zip(placeholders, examples, strict=True):
        for symbolic, size in zip(node.meta["val"].shape, x.shape, strict=True):
            if isinstance(symbolic, torch.SymInt):
                sizes.workload_of[symbolic.node.expr] = size
    exported.graph_module.recompile()
    return Program(
        exported.graph_module,
        [Input(kind, name) for kind, name in zip(kinds, inputs, strict=True)],  # type: ignore[arg-type]
        [Output("user", str(i), loss and i == 0) for i in range(len(graph.output_node().args[0]))],  # type: ignore[arg-type]
        sizes,
        placeholders[0].meta["val"].fake_mode,
        exported.call_spec.out_spec,
        phase=Phase.LOCAL,
    )
