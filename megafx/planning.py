"""What the planning passes share: the question (config, ranks, hardware) and, once planned, the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from megafx.config import Config
from megafx.fusion_profile import FusionProfile
from megafx.hardware import Hardware
from megafx.ir import PLACEMENT, Program
from megafx.op_rules import OpRule
from megafx.placements import Placement
from megafx.plan import Plan


@dataclass
class Planning:
    """One graph's planning, from `plan_sharding` to `localize_shapes`.

    fixed: storage of parameters that an earlier graph has settled. training: gradients will be taken, so transitions cost
    backward time. given: a plan to apply instead of solving. agree: this rank's plan -> the plan of all ranks.
    """

    config: Config
    t: int
    hardware: Hardware
    training: bool
    fixed: dict[str, Placement] = field(default_factory=dict)
    given: Plan | None = None
    agree: Callable[[Plan], Plan] | None = None
    fusions: FusionProfile | None = field(init=False)  # what was measured on this hardware
    # filled by plan_sharding
    plan: Plan | None = None
    rules: dict[fx.Node, OpRule] = field(default_factory=dict)
    weights: set[fx.Node] = field(default_factory=set)
    accepts: dict[fx.Node, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fusions = FusionProfile.choose(self.config.fusion_profile, self.hardware.name)

    @property
    def solved(self) -> Plan:
        assert self.plan is not None, "plan_sharding has not run"
        return self.plan


WHOLE = frozenset("I")
ANY_VALUE = frozenset("IRS")  # an output without gradient may stay sharded until somebody looks at it


def accepted_outputs(program: Program, active: set[fx.Node], config: Config) -> dict[fx.Node, frozenset[str]]:
    """For each active node that is a graph output: the placement kinds it may leave at.

    The loss and mutated buffers leave invariant. Beside a loss other outputs are lazy, and with gather_outputs=False they
    stay sharded; a value that is both must satisfy both.
    """
    accepts: dict[fx.Node, frozenset[str]] = {}
    has_loss = any(o.loss for o in program.outputs)
    lazy = (has_loss and not config.differentiable_outputs) or not config.gather_outputs
    for node, spec in zip(program.results(), program.outputs, strict=True):
        if not isinstance(node, fx.Node) or node not in active:
            continue
        kinds = ANY_VALUE if lazy and spec.kind == "user" and not spec.loss else WHOLE
        accepts[node] = accepts.get(node, kinds) & kinds
    return accepts


def price_workload(program: Program, config: Config) -> None:
    """Set the sizes that the planner prices: micro_batch_size and seq_length, where the graph has such symbols."""
    sizes = program.sizes
    if "batch" in sizes.symbols:
        sizes.workload_of[sizes.symbols["batch"]] = config.micro_batch_size
    if config.seq_length is not None:
        for name, symbol in sizes.symbols.items():
            if name == "seq" or name.startswith("target"):
                sizes.workload_of[symbol] = config.seq_length


def placement_of(node: fx.Node) -> Placement | None:
    return node.meta.get(PLACEMENT)
