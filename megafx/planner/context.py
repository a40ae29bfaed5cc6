"""`CompileContext`, the record of one compile, and what its passes ask of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import fx

from megafx.config import Config
from megafx.ir.program import VAL, Input, Program
from megafx.ops.axes import AxisContext
from megafx.placements.data_axis import TENSOR_AXIS, DataAxis
from megafx.placements.types import I, Placement
from megafx.planner.fusion_profile import FusionProfile, mode_of
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.rewrite.driver import Declines
from megafx.rewrite.match import Match
from megafx.rewrite.pattern import registered_patterns
from megafx.rules.strategies import OpRule

Accepts = frozenset[str | Placement]  # kinds ('S'), tags ('S1') or full placements
Gradients = Literal["reduce", "hold", "add", "accumulate"]


@dataclass
class CompileContext:
    """One compile: what is asked, and what has been decided so far. Every pass takes it as its second argument."""

    config: Config  # what the user asked for
    t: int  # ranks of the axis that is planned
    hardware: Hardware  # what times are priced by
    data: DataAxis | None = None  # data- and context-parallel ranks; None: one
    wants_grad: Callable[[Input], bool] | None = None  # None: a graph without backward
    fixed: dict[str, Placement] = field(default_factory=dict)  # storage that an earlier graph has settled; caches, too
    fixed_experts: dict[str, int] | None = None  # `experts`, where an earlier graph has settled them
    given: Plan | None = None  # applied instead of solving
    agree: Callable[[Plan], Plan] | None = None  # this rank's plan -> the plan of all ranks
    caches: dict[str, Placement] = field(default_factory=dict)  # path in a key-value cache -> where it leaves a graph
    gradients: Gradients = "reduce"  # over data-parallel ranks: reduce; `no_sync`: hold, or add to those held
    axes: Mapping[str, AxisContext] | None = None  # this rank's places; None: one rank, or all of them
    at_call: bool = False  # memory is counted at the sizes of the captured call, not at those that are priced
    axis: str = TENSOR_AXIS  # the one that is planned
    cuts: Collection[str] = ()  # names of sizes that it cuts wherever a rule lets it; none: any size that pays
    head_tail: bool = False  # cuts are such layouts
    by_heads: Collection[fx.Node] = ()  # attentions whose heads it may cut instead
    always_by_heads: bool = False  # it does
    fits: bool = False  # the activation memory budget, a fraction, was chosen to fit the device: it promises bytes
    device_bytes: int | None = None  # memory of a rank's device, where known
    keeps_casts: bool = False  # casts of weights to FP8 are kept until a weight changes
    fusions: FusionProfile | None = field(init=False)  # what was measured on this hardware
    # decided by dispatch_experts
    experts: dict[str, int] = field(default_factory=dict)  # parameters of which a rank needs its experts alone
    # decided by plan_sharding
    plan: Plan | None = None  # the strategy of each op, the placement of each parameter
    rules: dict[fx.Node, OpRule] = field(default_factory=dict)  # how each planned op may be cut
    differentiable: set[fx.Node] = field(default_factory=set)  # values that get a gradient
    owners: dict[fx.Node, int] = field(default_factory=dict)  # the rank that alone computes a value (ops/owners.py)
    weights: set[fx.Node] = field(default_factory=set)  # parameters and views of them
    in_fp8: set[fx.Node] = field(default_factory=set)  # linears that are priced so
    accepts: dict[fx.Node, Accepts] = field(default_factory=dict)  # placements at which outputs may leave
    keeps_problem: bool = False  # for a report that prices alternatives
    problem: Any = None  # the Problem without policies and overrides, where it is kept

    def __post_init__(self) -> None:
        self.fusions = FusionProfile.choose(self.config.fusion_profile, self.hardware.name)

    @property
    def training(self) -> bool:
        """Gradients will be taken, so that transitions cost backward time too."""
        return self.wants_grad is not None

    @property
    def solved(self) -> Plan:
        assert self.plan is not None, "plan_sharding has not run"
        return self.plan


def in_training(inputs: Collection[str]) -> Callable[[Input], bool]:
    """Whose gradients a training call is planned with: every parameter's, and those of the user's tensors of these names."""
    return lambda spec: spec.kind == "param" or (spec.kind == "user" and spec.name in inputs)


WHOLE: Accepts = frozenset("I")
ANY_VALUE: Accepts = frozenset("IRS")  # an output without gradient may stay sharded until somebody looks at it


def accepts(wanted: Accepts, placement: Placement) -> bool:
    """True if an output may leave the graph at this placement."""
    return placement.kind in wanted or placement.tag in wanted or placement in wanted


def output_placement(wanted: Accepts) -> Placement:
    """The placement that an output is moved to where its own is not accepted."""
    return next((p for p in wanted if isinstance(p, Placement)), I)


def accepted_outputs(
    program: Program, active: set[fx.Node], config: Config, caches: Mapping[str, Placement] = MappingProxyType({})
) -> dict[fx.Node, Accepts]:
    """For each active node that is a graph output: the placements it may leave at.

    The loss and mutated buffers leave invariant. Beside a loss other outputs are lazy, and with gather_outputs=False they
    stay sharded. A cache leaves as it left an earlier graph; the first graph may cut it along any dim of a fixed size. A
    value that is several outputs satisfies all of them.
    """
    found: dict[fx.Node, Accepts] = {}
    has_loss = any(o.loss for o in program.outputs)
    lazy = (has_loss and not config.differentiable_outputs) or not config.gather_outputs
    for node, spec in zip(program.results(), program.outputs, strict=True):
        if not isinstance(node, fx.Node) or node not in active:
            continue
        kinds: Accepts = ANY_VALUE if lazy and spec.kind == "user" and not (spec.loss or spec.written) else WHOLE
        if spec.cache:
            shape, settled = node.meta[VAL].shape, caches.get(spec.cache)
            static = [f"S{d}" for d, n in enumerate(shape) if isinstance(n, int)] if settled is None else []
            kinds = frozenset(["I", "R", *static])
            if settled is not None and settled.is_shard and settled.cut.size == shape[settled.dim]:
                kinds = frozenset([settled])
        found[node] = found.get(node, kinds) & kinds or WHOLE
    return found


def price_workload(program: Program, config: Config) -> None:
    """Set the sizes that the planner prices, where the graph has such symbols: micro_batch_size and seq_length, else those of
    the call that was captured (of one row, where it was made up).

    A target sequence is as long as in the call where seq_length is that of the call.
    """
    sizes = program.sizes
    sizes.workload_of.update({s: max(n, 1) for s, n in sizes.of_call.items()})
    if "batch" in sizes.symbols and config.micro_batch_size is not None:
        sizes.workload_of[sizes.symbols["batch"]] = config.micro_batch_size
    if config.seq_length is not None:
        of_call = sizes.of_call.get(sizes.symbols["seq"]) if "seq" in sizes.symbols else None
        for name, symbol in sizes.symbols.items():
            if name == "seq" or name.startswith("target"):
                known = sizes.of_call.get(symbol) if of_call == config.seq_length else None
                sizes.workload_of[symbol] = known or config.seq_length


def declines(program: Program, context: CompileContext) -> Declines | None:
    """For `rewrite`: the reason why a match is left as it is, or ''; None where nothing was measured.

    Judged at the workload that the planner prices: before planning that is the same on any number of ranks. Numbers do not
    depend on what is chosen: a dropout that would draw other bits when fused is fused whatever was measured.
    """
    profile = context.fusions
    if profile is None:
        return None
    price_workload(program, context.config)
    mode = mode_of(context.config.compile is True, context.training)
    redraw = {p.name for p in registered_patterns() if p.redraws}
    redraw |= profile.needed_by(redraw)

    def reason(match: Match) -> str:
        if match.pattern.name in redraw and any(d.seed is not None for d in match.drops):
            return ""
        elements = program.sizes.workload(match.elements)
        found = profile.slower(match.pattern.name, elements, mode)
        if found is None:
            return ""
        return f"slower by measurement on {profile.device} ({found[0]:.4g} ms against {found[1]:.4g} ms, {mode})"

    return reason
