"""Values that one rank owns: the parameters of an expert that this rank alone holds, and what it computes with them.

    megafx::owner_parameter            Owned -> R   the owner's parameter
    megafx::owner_input                R -> R       a value that every rank holds
    megafx::owner_output               R -> P       summands of a result: the result on the owner, zeros elsewhere
    megafx::owner_parameter_gradient   P -> Owned   backward of owner_parameter: the gradient on the owner, no rows elsewhere
    megafx::owner_input_gradient       P -> P       backward of owner_input: the gradient on the owner, zeros elsewhere
    megafx::owner_stack                Owned -> S0  the parts of this rank, stacked: of n parts rank r has those from
                                                    r * ceil(n / ranks) on, and zeros where it has fewer

The backward of owner_output is another owner_output.

Values between an owner's inputs and parameters and its outputs are its expert values. As types they are R: every rank could
compute them, but only the owner does. What other ranks add does not depend on them, so `drop_expert_values` leaves them out of
their graphs; their gradients, which stem from those of owner_output, are zero there. There is no collective among them.

The ops have no sharding rules: the planner has one strategy for each expert value (passes/plan/plan_sharding.py). With size=1
(graphs on global shapes, before `localize_shapes`) each op is the identity.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from megafx.errors import UsageError
from megafx.ir.facts import FREE, declare
from megafx.ir.program import Program
from megafx.ops.axes import axis_rank
from megafx.ops.collectives import differentiate


def _define(name: str, types: str, compute: Callable[[Tensor, bool], Tensor], gradient: str = "") -> None:
    """megafx::name(x, owner, axis, size). compute(x, whether this rank is the owner); gradient: the op of its backward."""
    declare(f"megafx.{name}.default", types=types, outer="lin: ... -> ...", cost=FREE)

    def run(x: Tensor, owner: int, axis: str, size: int) -> Tensor:
        return compute(x, size == 1 or axis_rank(axis) == owner)

    made = torch.library.custom_op(f"megafx::{name}", run, mutates_args=())
    made.register_fake(lambda x, owner, axis, size: torch.empty_like(x, memory_format=torch.contiguous_format))
    if gradient:
        differentiate(made, lambda grad, _, *where: getattr(torch.ops.megafx, gradient)(grad, *where))


def _owner_parameter(x: Tensor, own: bool) -> Tensor:
    if not own:
        raise UsageError("a rank computes with a parameter that another one holds")
    return x.clone()


_define("owner_input", "R -> R", lambda x, own: x.clone(), "owner_input_gradient")
_define("owner_output", "R -> P", lambda x, own: x.clone() if own else torch.zeros_like(x), "owner_output")
_define("owner_parameter", "O -> R", _owner_parameter, "owner_parameter_gradient")
_define("owner_input_gradient", "P -> P", lambda x, own: x.clone() if own else torch.zeros_like(x))
_define("owner_parameter_gradient", "P -> O", lambda x, own: x.clone() if own else x.new_zeros([0, *x.shape[1:]]))


def _owner_stack(parts: list[Tensor], ranks: int, axis: str) -> Tensor:
    here = -(-len(parts) // ranks)
    own = parts[here * axis_rank(axis) :][:here]
    shape = next((x.shape for x in parts if x.shape[0]), parts[0].shape)
    return torch.stack([*own, *[parts[0].new_zeros(shape)] * (here - len(own))])


declare("megafx.owner_stack.default", outer="none: ", cost=FREE)
torch.library.custom_op("megafx::owner_stack", _owner_stack, mutates_args=()).register_fake(
    lambda parts, ranks, axis: parts[0].new_empty(-(-len(parts) // ranks), *parts[0].shape)
)

ops = torch.ops.megafx
OWNER_STACK = ops.owner_stack.default
OWNER_PARAMETER, OWNER_PARAMETER_GRADIENT = ops.owner_parameter.default, ops.owner_parameter_gradient.default
OWNER_INPUT, OWNER_INPUT_GRADIENT = ops.owner_input.default, ops.owner_input_gradient.default
OWNER_OUTPUT = ops.owner_output.default
OWNER_OPS = frozenset((OWNER_PARAMETER, OWNER_INPUT, OWNER_OUTPUT, OWNER_INPUT_GRADIENT, OWNER_PARAMETER_GRADIENT))
EXPERT = "expert"  # the factor of the strategies of expert values: each rank computes its share of the experts


def owners_of(program: Program) -> dict[fx.Node, int]:
    """The rank that computes each expert value, ops of this file included (of a program without gradients)."""
    found: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        if node.target in OWNER_OPS:
            found[node] = int(node.args[1])
            continue
        owners = {found[a] for a in node.all_input_nodes if a in found and a.target is not OWNER_OUTPUT}
        tensors = node.op == "call_function" and isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))
        if owners and tensors:
            assert len(owners) == 1, f"%{node.name} is of the ranks {owners}"
            found[node] = owners.pop()
    return found
