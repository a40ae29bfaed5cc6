"""What megafx knows of an operator beside its schema: one record an op, written where the op is defined, read where needed.

    define_op("scale_rows(Tensor x, Tensor by) -> Tensor", rule="lin: ... c, ... -> ... c", samples=[(real(4, 6), real(4))], ..)
    declare("aten.addmm.default", inplace=(0, torch.ops.aten.addmm_.default))

| fact                | who reads it                                                                          |
|---------------------|---------------------------------------------------------------------------------------|
| rule, partials, why | rules/strategies.py: which placements the op takes and gives                          |
| samples             | checks/rules.py: calls on which the rule is tried by brute force                      |
| cost, terms         | planner/cost.py: what the op does                                                     |
| localize            | rules/strategies.py, ir/contracts.py, passes/localize: an op that ranks write out     |
| types               | rules/inference.py, checks: what ranks hold of the result, where a rule cannot say    |
| experts             | planner/overrides.py, report.py: the factor that counts experts                       |
| inplace             | passes/lower/reuse_buffers.py: the form that writes over an operand                   |
| recompute           | passes/backward/recompute_activations.py: the op whose result a gradient recomputes   |
| workspace           | analysis/memory.py: memory that the op takes while it runs                            |
| largest             | passes/lower/fuse_maxima.py: results of which kernels leave the largest magnitude     |

Facts of users' ops are their rules (`megafx.register_rule`). Samples are data, so that this file needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

Partials = tuple[tuple[tuple[int, ...], str], ...]  # (operands, 'P' or 'R' for each result), ...

MATMUL, ATTENTION, FREE = "matmul", "attention", "free"


QUERY_HEADS = "(n g)"  # the merged dim of g query heads for each of n key-value heads


class Localized(NamedTuple):
    """How ranks compute an op with one factor sharded: not by the op on shards, but by other ops, collectives included.

    factor: a name, or a merged dim '(n g)' that is cut wherever its groups end; operands that have n alone then stay whole.
    gives: what the result then is: 'I', 'P', or 'S' of that factor. write(emit, node, layout, t, axis) -> the node of the
    result, where emit(target, *args, placement=None) adds a node, and layout is the factor's, as ops take it. None: the pass
    knows how.
    """

    factor: str
    gives: str
    write: Callable[..., Any] | None = None


@dataclass(frozen=True)
class OpFacts:
    """By default a field says nothing.

    rule        a factor string (rules/grammar.py), or a function of the call (rules/families.py) that gives one
    partials    further groups of operands that may be partial together, where not all results then are: the gradient of a
                gated unit's gate is linear in `up`, that of `up` does not depend on it
    why         factor -> why it is not sharded, in plain words
    samples     arguments of calls on small tensors (`real`, `fixed`, `ids`, `mask` below)
    cost        MATMUL or ATTENTION, of which arithmetic counts; FREE: moves no memory; else each operand is read once
    terms       of a MATMUL, where the rule does not tell: shapes of its arguments -> terms summed for an element of the result
    groups      of a MATMUL of many products: the number of the argument whose first dim counts them
    types       'S1, R -> R': what ranks hold of the tensor operands, and of the results ('; ' between them): R, P. S0, S1,
                S-3: cut by the argument `layout`; O: held by the rank `owner` alone; stats: what an op of the same operands
                made on each rank, and, as an operand, gathered
    outer       of an op for the ranks of one axis: its rule (as `rule`) on the axes outside of that
    outer_if    (argument, op): `outer` holds where the argument is made by the op
    experts     the factor of the rule that counts experts: sharding it gives each rank some of them
    inplace     (operand, op): with the arguments of this op, writes the result into that operand
    recompute   name of the op whose result this one, its backward, can recompute as its last result
    workspace   (arguments, with shapes for tensors; bytes of an element) -> bytes that it allocates in addition to its results
    largest     numbers of the results of which its kernels can leave the largest magnitude (kernels/fp8/largest.py)
    """

    rule: str | Callable[[Any], Any] | None = None
    partials: Partials = ()
    why: Mapping[str, str] = field(default_factory=dict)
    samples: Sequence[tuple[Any, ...]] = ()
    cost: str = ""
    terms: Callable[..., int] | None = None
    groups: int | None = None
    localize: Localized | None = None
    types: str = ""
    outer: str | Callable[[Any], str] | None = None
    outer_if: tuple[str, str] | None = None
    experts: str = ""
    inplace: tuple[int, Any] | None = None
    recompute: str = ""
    workspace: Callable[[Sequence[Any], int], int] | None = None
    largest: tuple[int, ...] = ()


_facts: dict[str, OpFacts] = {}
_NOTHING = OpFacts()


def declare(op: Any, **facts: Any) -> None:
    """Add to what is known of an op: 'namespace.name.overload', or an OpOverload."""
    _facts[str(op)] = replace(facts_of(op), **facts)


def facts_of(op: Any) -> OpFacts:
    """op: as for `declare`; whatever else a node may call has no facts."""
    return _facts.get(str(op), _NOTHING)


def declared() -> Mapping[str, OpFacts]:
    """Facts by op; of megafx's own ops once their files have been imported."""
    return _facts


# -- samples


class SampleTensor(NamedTuple):
    """A tensor argument. kind: 'x' needs a gradient, 'n' does not, 'i' ids below `high`, 'm' a mask."""

    shape: tuple[int, ...]
    kind: str = "x"
    high: float = 4
    low: float = -4


def real(*shape: int) -> SampleTensor:
    """A tensor that takes part in gradients."""
    return SampleTensor(shape)


def fixed(*shape: int) -> SampleTensor:
    """A tensor that no gradient is asked for."""
    return SampleTensor(shape, "n")


def ids(high: int, *shape: int) -> SampleTensor:
    """Whole numbers from 0 on, below `high`."""
    return SampleTensor(shape, "i", high)


def mask(*shape: int) -> SampleTensor:
    return SampleTensor(shape, "m")


SEED = ids(1000)
DRAWN: tuple[Any, ...] = (0.5, 3, -1, [], "tp")  # p, op_id, shard_dim, layout, axis of an op that draws
UNDRAWN: tuple[Any, ...] = (0.0, 0, -1, [], "tp")
