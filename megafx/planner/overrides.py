"""Overrides: the user's own constraints on the planner, by module or parameter name.

    Config(overrides={"model.layers.*.mlp.up_proj": "colwise", "lm_head": "replicate"})

colwise shards a weight on its output features, rowwise on its input features (an embedding: colwise on the hidden dim,
rowwise on the vocabulary), replicate stores it whole, sequence runs the ops of a module on a shard of the sequence. expert
splits a stack of experts' weights [E, .., ..] over experts, for all weights of a mixture, with or without naming its biases;
of a list of modules it gives each module to one rank, whole (expert parallelism).
Names are those of PyTorch's ParallelStyle and Hugging Face's tp_plan. Where several patterns match, the last one holds.

An override beats the default policies (but no plan shards the batch). One that matches nothing, or that none of its
matches can follow, is an error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from torch import fx

from megafx.errors import PlanError
from megafx.ir.facts import facts_of
from megafx.ir.program import Input, Program, fqn_of, source_of
from megafx.placements.types import P
from megafx.rules.strategies import OpRule, Strategy

Filtered = tuple[list[Strategy], dict[str, int]]  # the strategies left, {reason: how many it took}
ADJECTIVE = {"replicate": "replicated", "expert": "split over experts", "sequence": "on a shard of the sequence"}


class Overrides:
    """Filters domains by the user's styles and remembers which patterns were used. t: ranks of the axis."""

    def __init__(self, program: Program, styles: Mapping[str, str], weights: set[fx.Node], t: int) -> None:
        self.styles, self.weights, self.t = styles, weights, t
        self._params = {n: (spec.name, *spec.aliases) for n, spec in program.input_nodes() if spec.kind == "param"}
        self._modules = {fqn_of(n) for n in program.graph.nodes if n.op == "call_function"}
        self._applied: set[str] = set()
        self._pattern_of: dict[tuple[str, ...], str] = {}

    def filter_parameter(self, spec: Input, domain: list[Strategy]) -> Filtered:
        """'replicate' on a parameter leaves only whole storage."""
        pattern = self._pattern((spec.name, *spec.aliases))
        if self.styles.get(pattern) != "replicate":
            return domain, {}
        self._applied.add(pattern)
        left = [s for s in domain if not s.out.is_shard]
        return left, {_reason(spec.name, "replicate"): len(domain) - len(left)}

    def note_expert(self, spec: Input) -> None:
        """The parameter is one rank's (passes/experts/own_experts.py)."""
        self._applied.add(self._pattern((spec.name, *spec.aliases)))

    def style_of_parameter(self, spec: Input) -> tuple[str, str]:
        """(style, pattern) that hold for a parameter; ('', '') where none does."""
        pattern = self._pattern((spec.name, *spec.aliases))
        return self.styles.get(pattern, ""), pattern

    def filter_op(
        self, node: fx.Node, rule: OpRule, domain: list[Strategy], on_sequence: Callable[[Strategy], bool]
    ) -> Filtered:
        """The strategies that follow the styles of this op's weights and module. on_sequence: whether one cuts the sequence."""
        if not self.styles or node in self.weights or self.t == 1:
            return domain, {}
        left, gone = domain, {}
        weighted = False
        for index, operand in enumerate(rule.operands):
            names = self.names_of(operand.node, node)
            pattern = self._pattern(names) if names else ""
            style = self.styles.get(pattern, "")
            weighted |= style != "" and style != "sequence"
            if style == "replicate":
                follow = [s for s in left if not s.ins[index].is_shard]
            elif style in ("colwise", "rowwise") and len(operand.factors) > 1:
                follow = [s for s in left if s.ins[index].is_shard and (s.out == P) == (style == "rowwise")]
            elif style == "expert" and (len(operand.factors) > 2 or facts_of(node.target).experts):
                follow = [s for s in left if s.ins[index].is_shard and s.ins[index].dim == 0]
            else:
                continue
            if not follow:
                fix = "drop the override, or choose another style"
                found = f"{_reason(names[0], style)}, but {node.target} cannot be sharded so"
                raise PlanError(found, fix=fix, module=fqn_of(node), source=source_of(node))
            self._applied.add(pattern)
            gone[_reason(names[0], style)] = len(left) - len(follow)
            left = follow
        pattern = self._pattern((fqn_of(node),))
        if self.styles.get(pattern) == "sequence" and not weighted:
            follow = [s for s in left if on_sequence(s)]
            if follow:
                self._applied.add(pattern)
                gone[_reason(pattern, "sequence")] = len(left) - len(follow)
                left = follow
        return left, {reason: count for reason, count in gone.items() if count}

    def style_of(self, value: fx.Node, user: fx.Node) -> str:
        """The style of the parameter that a weight value stems from, or ''."""
        return self.styles.get(self._pattern(self.names_of(value, user)), "")

    def check_used(self) -> None:
        """Raise PlanError for the first pattern that matched no parameter and no module, or that nothing could follow."""
        names = sorted({n for names in self._params.values() for n in names} | self._modules)
        for pattern, style in self.styles.items():
            matching = [n for n in names if _matches(n, pattern)]
            if not matching:
                known = sorted({*names, *(n.removesuffix(".weight") for n in names)})
                close = difflib.get_close_matches(pattern, known, 3, 0.4)
                fix = f"did you mean {', '.join(close)}?" if close else "see model.named_parameters()"
                raise PlanError(f"override '{pattern}' matches no parameter and no module of the model", fix=fix)
            shadowed = all(self._pattern((n,)) != pattern for n in matching)
            if pattern not in self._applied and not shadowed and self.t > 1:
                raise PlanError(
                    f"override '{pattern}' is {style}, but nothing that it matches can be {ADJECTIVE.get(style, style)}: "
                    f"it matches {', '.join(matching[:3])}" + (", ..." if len(matching) > 3 else ""),
                    fix="colwise and rowwise are for weights of linears and embeddings, expert for stacks of experts' weights "
                    "and lists of experts, sequence for modules whose values have a sequence dim",
                )

    def names_of(self, value: fx.Node, user: fx.Node) -> tuple[str, ...]:
        """FQNs of the parameter that a weight value stems from; of a tied one that of the user's own module."""
        while value in self.weights and value.op == "call_function":
            value = next(a for a in value.all_input_nodes if a in self.weights)
        names = self._params.get(value, ())
        own = tuple(n for n in names if n.rpartition(".")[0] == fqn_of(user))
        return own or names

    def _pattern(self, names: tuple[str, ...]) -> str:
        """The last pattern that matches one of the names, or ''."""
        if names not in self._pattern_of:
            found = [p for p in self.styles if any(_matches(n, p) for n in names)]
            self._pattern_of[names] = found[-1] if found else ""
        return self._pattern_of[names]


def _reason(name: str, style: str) -> str:
    return f"override: {name} is {ADJECTIVE.get(style, style)}"


def _matches(name: str, pattern: str) -> bool:
    """A pattern names a parameter, its module, or a module above."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[: i + 1]), pattern) for i in range(len(parts)))
