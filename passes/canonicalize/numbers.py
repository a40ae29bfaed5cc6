"""Numbers of tensors' data that only leave the graph: the tensors leave it, and a call computes the numbers from these.

Before:  %n = item(%loss); %m = truediv(%n, 2); return %loss, %m         # `return loss, loss.item() / 2`
After:   %d = detach(%loss); return %loss, %d                            # the second result is `item of output 1, / 2`
Legal because: Python computes with the same numbers in the same order, behind the graph. The tensor is whole on every rank, as
each output that is no larger than a number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from megafx.ir.call_spec import FUNCTION_NAMES, OutputLeaf
from megafx.ir.nodes import NUMBERS
from megafx.ir.program import VAL, Output
from megafx.ops.of_numbers import OF_NUMBERS
from megafx.passes.canonicalize.editor import Editor

aten = torch.ops.aten


def numbers_behind_the_graph(editor: Editor) -> int:
    """Rewrite the outputs that are computed of numbers of tensors' data; return how many there were."""
    program = editor.program
    users = sum(output.kind == "user" for output in program.outputs)
    results = list(program.results())
    computed = _computed_of_numbers(editor.graph)
    if not computed.intersection(n for n in results[:users] if isinstance(n, fx.Node)):
        return 0
    assert program.call is not None
    leaving = _Leaving(editor, computed)
    place: dict[int, int] = {}  # of an output that stays -> among those
    for i, (value, output) in enumerate(zip(results[:users], program.outputs[:users], strict=True)):
        if value not in computed:
            place[i] = leaving.add(value, output)
    leaves = []
    for leaf in program.call.out_leaves:
        if leaf.index < 0 or leaf.index in place:
            leaves.append(replace(leaf, index=place[leaf.index]) if leaf.index >= 0 else leaf)
        else:
            leaves.append(OutputLeaf(-1, leaving.number(results[leaf.index], program.outputs[leaf.index]), True))
    program.call = replace(program.call, out_leaves=tuple(leaves))
    program.outputs = [*leaving.outputs, *program.outputs[users:]]
    program.output_node().args = ((*leaving.values, *results[users:]),)
    _erase_unused(editor.graph, computed)
    return users - len(place)


def _computed_of_numbers(graph: fx.Graph) -> set[fx.Node]:
    """Numbers that are read from tensors, and those that Python computes of these."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target is OF_NUMBERS and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
        if node.op == "call_function" and not isinstance(node.meta.get(VAL), torch.Tensor):
            known = node.target in FUNCTION_NAMES and not found.isdisjoint(node.all_input_nodes)
            if known or node.target in NUMBERS:
                found.add(node)
    return found


class _Leaving:
    """The outputs of the graph that is made."""

    def __init__(self, editor: Editor, computed: set[fx.Node]) -> None:
        self.editor, self.computed = editor, computed
        self.values: list[Any] = []
        self.outputs: list[Output] = []
        self.known: dict[fx.Node, int] = {}  # a tensor or size -> the output that it leaves by

    def add(self, value: Any, output: Output) -> int:
        self.values.append(value)
        self.outputs.append(output)
        return len(self.values) - 1

    def number(self, node: fx.Node, output: Output, plain: bool = True) -> Any:
        """How a number is computed (`OutputLeaf`). output: what it was an output as, plain: as it was read."""
        if node not in self.computed:  # a size
            return ("of", self._known(node, output, False))
        if node.target in NUMBERS:
            (tensor,) = node.all_input_nodes
            if tensor.target is OF_NUMBERS:
                return ("call", f"math.{tensor.args[0]}", *map(lambda x: self._operand(x, output), tensor.args[1:]))
            return ("of", self._known(tensor, output, plain))
        assert not node.kwargs
        args = (self._operand(x, output) for x in node.args)
        return ("call", FUNCTION_NAMES[node.target], *args)

    def _operand(self, x: Any, output: Output) -> Any:
        return self.number(x, output, False) if isinstance(x, fx.Node) else ("is", x)

    def _known(self, key: fx.Node, output: Output, plain: bool) -> int:
        if key not in self.known:
            name = output.name if plain else f"{output.name} of #{len(self.known)}"
            value = key
            if isinstance(value.meta[VAL], torch.Tensor):
                at = self.editor.at(self.editor.program.output_node())
                value = at(aten.detach.default, value)
                value = at(aten.reshape.default, value, []) if value.meta[VAL].dim() else value
            self.known[key] = self.add(value, replace(output, name=name, loss=False, requires_grad=False))
        return self.known[key]


def _erase_unused(graph: fx.Graph, computed: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in computed and not node.users:
            graph.erase_node(node)
