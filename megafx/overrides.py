"""Overrides: the user's own constraints on the planner, by module or parameter name.

    Config(overrides={"model.layers.*.mlp.up_proj": "colwise", "lm_head": "replicate"})

colwise shards a weight on its output features, rowwise on its input features (an embedding: colwise on the hidden dim,
rowwise on the vocabulary), replicate stores it whole, sequence runs the ops of a module on a shard of the sequence.
Names are those of PyTorch's ParallelStyle and Hugging Face's tp_plan. A pattern that matches nothing is an error.
"""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import fx

from megafx.errors import PlanError
from megafx.ir import Input, Program, fqn_of, source_of
from megafx.op_rules import OpRule, Strategy
from megafx.placements import P


class Overrides:
    """Filters domains by the user's styles and remembers which patterns were used."""

    def __init__(self, program: Program, styles: Mapping[str, str], weights: set[fx.Node]) -> None:
        self.styles, self.weights = styles, weights
        self._params = {
            n: (spec.name, *spec.aliases)
            for n, spec in zip(program.placeholders(), program.inputs, strict=True)
            if spec.kind == "param"
        }
        self._modules = {fqn_of(n) for n in program.graph.nodes if n.op == "call_function"}
        self._used: set[str] = set()
        self._style_of: dict[tuple[str, ...], str] = {}

    def filter_parameter(
        self, node: fx.Node, spec: Input, domain: list[Strategy]
    ) -> tuple[list[Strategy], dict[str, int]]:
        """'replicate' on a parameter leaves only whole storage."""
        style = self._style((spec.name, *spec.aliases))
        if style != "replicate":
            return domain, {}
        left = [s for s in domain if not s.out.is_shard]
        return left, {f"override: {spec.name} is replicated": len(domain) - len(left)}

    def filter_op(self, node: fx.Node, rule: OpRule, domain: list[Strategy]) -> tuple[list[Strategy], dict[str, int]]:
        """colwise and rowwise on the op that uses a weight matrix; sequence on every op of a module."""
        gone: dict[str, int] = defaultdict(int)
        if not self.styles:
            return domain, {}
        for index, operand in enumerate(rule.operands):
            names = self._weight_names(operand.node)
            style = self._style(names) if names else ""
            if style in ("colwise", "rowwise") and len(operand.factors) > 1 and node not in self.weights:
                left = [s for s in domain if s.ins[index].is_shard and (s.out == P) == (style == "rowwise")]
                domain = self._must(node, left, domain, f"override: {names[0]} is {style}", gone)
            elif style == "replicate" and node not in self.weights:
                left = [s for s in domain if not s.ins[index].is_shard]
                domain = self._must(node, left, domain, f"override: {names[0]} is replicated", gone)
        return domain, dict(gone)

    def sequence_pattern(self, node: fx.Node) -> str:
        """The pattern by which this node's module is to run on a shard of the sequence, or ''."""
        fqn = fqn_of(node)
        for pattern, style in self.styles.items():
            if style == "sequence" and _matches(fqn, pattern):
                self._used.add(pattern)
                return pattern
        return ""

    def check_used(self) -> None:
        """Raise PlanError for the first pattern that matched no parameter and no module."""
        names = sorted({n for names in self._params.values() for n in names} | self._modules)
        for pattern in self.styles:
            if pattern in self._used or any(_matches(n, pattern) for n in names):
                continue
            close = difflib.get_close_matches(pattern, [n.removesuffix(".weight") for n in names], 3, 0.4)
            raise PlanError(
                f"override '{pattern}' matches no parameter and no module of the model",
                fix=f"did you mean {', '.join(close)}?" if close else "see model.named_parameters()",
            )

    def _must(
        self, node: fx.Node, left: list[Strategy], domain: list[Strategy], reason: str, gone: dict[str, int]
    ) -> list[Strategy]:
        if not left:
            raise PlanError(
                f"{reason}, but no strategy of {node.target} that the policies leave does that",
                fix="drop the override, or use Config(planner_policy='free')",
                module=fqn_of(node),
                source=source_of(node),
            )
        if len(left) < len(domain):
            gone[reason] += len(domain) - len(left)
        return left

    def _weight_names(self, node: fx.Node) -> tuple[str, ...]:
        """FQNs of the parameter that a weight value stems from."""
        while node in self.weights and node.op == "call_function":
            node = next(a for a in node.all_input_nodes if a in self.weights)
        return self._params.get(node, ())

    def _style(self, names: tuple[str, ...]) -> str:
        if names not in self._style_of:
            self._style_of[names] = ""
            for pattern, style in self.styles.items():
                if any(_matches(n, pattern) for n in names):
                    self._used.add(pattern)
                    self._style_of[names] = style
        return self._style_of[names]


def _matches(name: str, pattern: str) -> bool:
    """A pattern names a parameter, its module, or a module above."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))
