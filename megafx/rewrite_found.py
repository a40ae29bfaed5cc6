"""What matching comes to: a `Match`, or a `Refusal` that says why not; and the words for nodes and values in reasons."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from megafx import draws
from megafx.dump import op_name
from megafx.ir import VAL, Program, fqn_of, source_of
from megafx.pattern import Drop, Pattern, parameters
from megafx.rewrite_trace import Number, Size, Trace


class Refusal(NamedTuple):
    """Why a match did not come about. node: where; matched: nodes of the pattern that were found; whole: all of them."""

    reason: str
    node: fx.Node
    matched: int
    whole: bool


class Match:
    """A place in the graph where a pattern is found. `m["x"]` is what the pattern's name stands for there.

    A tensor's name gives its fake value (shape, dtype, device), or None where it is left out; a declared number's the number; a
    variant's its choice; a letter's the size; "drop" and "drops" what is known of dropout.
    """

    def __init__(self, trace: Trace, program: Program) -> None:
        self.trace, self.program = trace, program
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the pattern -> of the graph
        self.operands: dict[str, fx.Node] = {}
        self.letters: dict[str, int] = {}  # structural sizes
        self.numbers: dict[str, Any] = {}

    @property
    def pattern(self) -> type[Pattern]:
        return self.trace.pattern

    @property
    def roots(self) -> list[fx.Node]:
        """The nodes whose values are replaced."""
        return [self.nodes[r] for r in self.trace.roots]

    @property
    def matched(self) -> list[fx.Node]:
        """Every node that the pattern covers."""
        return list(dict.fromkeys(self.nodes[n] for n in self.trace.calls))

    @property
    def elements(self) -> int:
        """Elements of the largest value that the pattern covers, as a structural integer."""
        sizes = self.program.sizes
        values = [n.meta[VAL] for n in self.matched]
        counts = [math.prod(sizes.shape(v)) for v in values if isinstance(v, torch.Tensor)]
        return max(counts, key=sizes.workload, default=0)

    @property
    def drops(self) -> tuple[Drop, ...]:
        """The dropouts found, their seeds and layouts as graph nodes."""
        return tuple(Drop(**draws.drawn(self.nodes[n])) for n in self.trace.drops)

    def __getitem__(self, name: str) -> Any:
        if name in self.operands:
            return self.operands[name].meta[VAL]
        if name in self.trace.variant.absent:
            return None
        chosen = dict(self.trace.variant.values)
        if name in chosen:
            return chosen[name]
        if name in self.pattern.scalars:
            return self.numbers.get(name, self.letters.get(name))
        if name in self.letters:
            expr = self.program.sizes.expr(self.letters[name])
            return int(expr) if expr.is_Integer else expr
        if name == "drop":
            return self.drops[0] if self.drops else Drop()
        if name == "drops":
            return self.drops
        if name in parameters(self.pattern.match):
            return None  # a tensor of other variants
        raise KeyError(name)

    def node(self, name: str) -> fx.Node:
        """The graph node of a tensor."""
        return self.operands[name]


def op_text(node: fx.Node) -> str:
    return f"%{node.name}" if node.op != "call_function" else f"{op_name(node.target)} (%{node.name})"


def user_text(node: fx.Node) -> str:
    place = f" in '{fqn_of(node)}'" if fqn_of(node) else ""
    line = source_of(node)
    return "the output" if node.op == "output" else f"{op_text(node)}{place}" + (f" at {line}" if line else "")


def value_text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return op_text(value)
    if isinstance(value, Size):
        return "*".join([str(value.coefficient), *value.letters]) if value.coefficient != 1 else "*".join(value.letters)
    if isinstance(value, Number):
        return f"the number '{value.name}'"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    return repr(value)
