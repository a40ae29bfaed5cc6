"""What a legal graph is after each phase. Checks only: reads the graph, changes nothing, knows no pass.

`verify(program)` raises PlacementError at the first broken promise of `program.phase`, naming node, module and the user's
line. Contracts grow by phase: what holds after canonicalize holds ever after.

    CAPTURED   one placeholder for each input, one result for each output, a value on every node
    CANONICAL  only functional operators; no asserts; sizes computed from sizes of graph inputs
    PLACED     a transition goes from its operand's placement to its own; an op mixes no invariant operand with others
    LOCAL      a shard's dim is as long as its layout makes it on one rank
    JOINT      a gradient for each wanted input, shaped like it
    LOWERED    no transition left; each started collective has one wait and no other reader
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

from megafx.errors import PlacementError
from megafx.ir.facts import facts_of
from megafx.ir.nodes import SHAPED
from megafx.ir.program import PLACEMENT, VAL, Phase, Program, fqn_of, source_of
from megafx.ir.sizes import COUNTING, size_sources
from megafx.placements.data_axis import TENSOR_AXIS
from megafx.placements.types import TRANSITIONS, Layout, Placement

TRANSITION = "megafx.transition.default"
WAIT = "_c10d_functional.wait_tensor.default"
COLLECTIVE_NAMESPACE = "_c10d_functional"
GATHER = "megafx.gather_region.default"
QUANTIZE = "megafx.fp8_quantize.default"
_SYMBOLIC = frozenset(
    f for name in dir(torch) if name.startswith("sym_") and callable(f := getattr(torch, name))
) | frozenset({math.ceil, math.floor, math.trunc, round, max, min, int, float})
_ASSERTIONS = ("_assert", "sym_constrain", "_functional_assert", "_functional_sym_constrain")
SAMPLES = (3, 10, 29, 64, 131, 1000, 4099)  # sizes at which two expressions must agree to count as equal


def verify(program: Program) -> None:
    """Check every promise that holds at `program.phase`; raises PlacementError at the first broken one."""
    for phase, checks in CONTRACTS.items():
        if phase <= program.phase:
            for check in checks:
                check(program)


def fail(node: fx.Node, found: str, fix: str = "") -> PlacementError:
    """The error of a broken promise at this node."""
    found = f"%{node.name} ({node.target}): {found}"
    return PlacementError(found, fix=fix, module=fqn_of(node), source=source_of(node))


_op_name = functools.cache(str)  # torch makes the text anew each time


def _name(target: Any) -> str:
    return _op_name(target) if isinstance(target, torch._ops.OpOverload) else str(target)


# -- every phase


def check_interface(program: Program) -> None:
    placeholders, output = program.placeholders(), program.output_node()
    if len(placeholders) != len(program.inputs):
        raise PlacementError(f"the graph has {len(placeholders)} placeholders for {len(program.inputs)} inputs")
    results = output.args[0]
    if not isinstance(results, (tuple, list)) or len(results) != len(program.outputs):
        count = len(results) if isinstance(results, (tuple, list)) else 1
        raise PlacementError(f"the graph returns {count} results for {len(program.outputs)} outputs")


def check_values(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op in ("placeholder", "call_function") and VAL not in node.meta:
            raise fail(node, "has no meta['val']", "set it with ir.Builder or ir.recompute_val")


# -- CANONICAL


def check_functional(program: Program) -> None:
    for node in program.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op != "call_function":
            raise fail(node, f"is a {node.op}", "a canonical graph has placeholders, operators and one output")
        target = node.target
        if isinstance(target, torch._ops.OpOverload):
            if target._schema.is_mutable:
                raise fail(node, "writes to its operand", "use the functional form of the operator")
            if target._schema.name.split("::")[1].startswith(_ASSERTIONS):
                raise fail(node, "is an assertion", "canonicalize removes assertions")
        elif not (target in _SYMBOLIC or getattr(operator, getattr(target, "__name__", "_"), None) is target):
            raise fail(node, "is no operator overload and no arithmetic on sizes", "call an OpOverload")


def check_sizes_rooted(program: Program) -> None:
    known, rooted = set(size_sources(program.graph)), set[sympy.Expr]()
    for node in program.graph.nodes:
        if any(isinstance(a, torch.SymInt) for a in _leaves((node.args, node.kwargs))):
            raise fail(node, "has a symbolic size that no node computes", "emit it with sizes.SizeEmitter")
        source: Any = node.args[0] if _name(node.target) == "aten.sym_size.int" else None
        if source is not None and source.op != "placeholder" and getattr(source.target, "_opname", "") not in COUNTING:
            raise fail(node, "reads the size of an intermediate value", "emit the size with sizes.SizeEmitter")
        for size in _sizes(node.meta.get(VAL)):
            expr = size.node.expr
            if expr in rooted:
                continue
            rooted.add(expr)
            for symbol in expr.free_symbols - known:
                if not size.node.shape_env.is_unbacked_symint(symbol):  # a size that data decides has no root
                    raise fail(node, f"its size {size} is made of {symbol}, which is the size of no graph input")


def _leaves(args: Any) -> Iterator[Any]:
    if isinstance(args, (tuple, list)):
        for a in args:
            yield from _leaves(a)
    elif isinstance(args, dict):
        yield from _leaves(tuple(args.values()))
    elif isinstance(args, slice):
        yield from (args.start, args.stop, args.step)
    else:
        yield args


def _sizes(value: Any) -> Iterator[torch.SymInt]:
    for v in _leaves(value):
        if isinstance(v, torch.SymInt):
            yield v
        elif isinstance(v, torch.Tensor):
            yield from filter(lambda n: isinstance(n, torch.SymInt), v.shape)


# -- PLACED


def is_transition(node: fx.Node, axis: str = TENSOR_AXIS) -> bool:
    """True if the node is a transition on this axis."""
    return node.op == "call_function" and _name(node.target) == TRANSITION and node.args[5] == axis


def ends_of(program: Program, node: fx.Node) -> tuple[Placement, Placement]:
    """(src, dst) of a transition node, layouts as structural integers."""
    _, src, dst, *layouts = node.args[:5]
    flats = [layout_of(program, layout) for layout in layouts]
    try:
        return Placement.parse(str(src), flats[0]), Placement.parse(str(dst), flats[1])
    except ValueError as error:
        raise fail(node, f"has ends that cannot be read: {error}") from None


def layout_of(program: Program, flat: Any) -> list[int]:
    """The structural integers of a layout argument (ints and size nodes)."""
    return [program.sizes.of(n.meta[VAL] if isinstance(n, fx.Node) else n) for n in flat]


def check_transitions(program: Program) -> None:
    for node in filter(is_transition, program.graph.nodes):
        src, dst = ends_of(program, node)
        if src != dst and (src.kind, dst.kind) not in TRANSITIONS:
            raise fail(node, f"{src} -> {dst} is no row of the transition table")
        source = node.args[0]
        have = source.meta.get(PLACEMENT)
        if have is not None and have != src:
            raise fail(node, f"starts from {_full(src)}, but %{source.name} is {_full(have)}")
        if PLACEMENT in node.meta and node.meta[PLACEMENT] != dst:
            raise fail(node, f"goes to {_full(dst)}, but is marked {_full(node.meta[PLACEMENT])}")
        whole = [p.cut.size for p in (src, dst) if p.is_shard]
        if len(whole) == 2 and src.dim == dst.dim and whole[0] != whole[1]:
            raise fail(node, f"its layouts are of dims of {whole[0]} and {whole[1]} elements")


def _full(p: Placement) -> str:
    """A placement with its layout written out: S0 by 4x1."""
    return f"S{p.dim} by {p.cut}" if p.is_shard else str(p)


def check_placements(program: Program) -> None:
    """An op of invariant operands gives an invariant result, and mixes none with others: the gradient of the invariant one
    would come out partial. Holds until localize_shapes, which writes some ops out as several."""
    if program.phase > Phase.PLACED:
        return
    for node in program.graph.nodes:
        placement = node.meta.get(PLACEMENT)
        if placement is None or node.op != "call_function":
            continue
        _check_shard_fits(program, node, placement, local=False)
        localized = facts_of(node.target).localize
        if is_transition(node) or node.target in SHAPED or (localized is not None and localized.gives == "I"):
            continue  # the last gathers what it needs: an invariant result of a shard (the loss of a sharded vocabulary)
        operands = [(a, a.meta[PLACEMENT]) for a in node.all_input_nodes if PLACEMENT in a.meta]
        for operand, have in operands:
            if (have.kind == "I") != (placement.kind == "I"):
                fix = "an op takes invariant operands only with an invariant result: insert a transition"
                raise fail(node, f"is {placement}, but its operand %{operand.name} is {have}", fix)


# -- LOCAL


def check_local_shapes(program: Program) -> None:
    if program.phase >= Phase.BOUND:
        return  # a rank has no rows of what others own
    ranks = ranks_of(program)
    for node in program.graph.nodes:
        if PLACEMENT in node.meta:
            _check_shard_fits(program, node, node.meta[PLACEMENT], local=True, t=ranks)
        if is_transition(node):
            src, dst = ends_of(program, node)
            _check_shard_fits(program, node.args[0], src, local=True, t=node.args[6], at=node)
            _check_shard_fits(program, node, dst, local=True, t=node.args[6])


def _check_shard_fits(
    program: Program,
    node: fx.Node,
    placement: Placement,
    *,
    local: bool,
    t: int | None = None,
    at: fx.Node | None = None,
) -> None:
    """The value's sharded dim exists and is as long as the layout says: the whole dim, or one rank's."""
    value = node.meta.get(VAL)
    if not placement.is_shard or not isinstance(value, torch.Tensor):
        return
    at = node if at is None else at
    if placement.dim >= value.ndim:
        raise fail(at, f"%{node.name} is {placement}, but has {value.ndim} dims")
    if local and t is None:
        return
    found, wanted = value.shape[placement.dim], program.sizes.expr(placement.cut.size)
    if local and t is not None:
        wanted = local_size_expr(program, placement.cut, t)
    if not same_size(found.node.expr if isinstance(found, torch.SymInt) else sympy.Integer(found), wanted):
        where = f"on each of {t} ranks" if local else "whole"
        fix = "a size in the op's arguments is not localized, or its sharding rule is wrong (megafx check-rules)"
        made = f"which makes dim {placement.dim} {wanted} long {where}; it is {found}"
        raise fail(at, f"%{node.name} is {placement}, {made}", fix)


def ranks_of(program: Program) -> int | None:
    """Ranks of the axis, as the first transition says (1 until shapes are local); None without one."""
    return next((int(n.args[6]) for n in program.graph.nodes if is_transition(n)), None)


def local_size_expr(program: Program, layout: Layout, t: int) -> sympy.Expr:
    """`layout.local_size(t)` with symbols."""
    total = sympy.Integer(0)
    chunks = layout.chunks(t)
    for count, unit in layout.blocks:
        whole = program.sizes.expr(count)
        each = sympy.Integer(-(-count // chunks)) if whole.is_Integer else FloorDiv(whole + (chunks - 1), chunks)
        total += each * (chunks // t) * program.sizes.expr(unit)
    return program.sizes.expr(layout.rep) * total


def same_size(a: sympy.Expr, b: sympy.Expr) -> bool:
    """Equal as expressions, or at sample sizes: a ceil can be written in many ways."""
    if a == b:
        return True
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    for i in range(len(SAMPLES)):
        at = {s: sympy.Integer(SAMPLES[(i + k) % len(SAMPLES)]) for k, s in enumerate(symbols)}
        if a.xreplace(at) != b.xreplace(at):
            return False
    return True


# -- JOINT


def check_gradients(program: Program) -> None:
    if program.phase >= Phase.BOUND:
        return
    inputs = {spec.name: node for node, spec in program.input_nodes()}
    outputs = {o.name for o in program.outputs if o.kind != "gradient"}
    results: Any = program.output_node().args[0]
    for spec, node in zip(program.outputs, results, strict=True):
        if spec.kind != "gradient" or not isinstance(node, fx.Node):
            continue
        if spec.name not in inputs:
            raise fail(node, f"is returned as the gradient of '{spec.name}', which is no input")
        have, want = node.meta[VAL].shape, inputs[spec.name].meta[VAL].shape
        alike = len(have) == len(want) and all(map(_same, have, want))
        if not alike and not _is_before_reduction(have, inputs[spec.name]):
            raise fail(node, f"the gradient of '{spec.name}' is {tuple(have)}, its input {tuple(want)}")
    for tangent in program.inputs:
        if tangent.kind == "tangent" and tangent.name not in outputs:
            raise PlacementError(f"the graph takes a tangent of '{tangent.name}', which is no output")


def _is_before_reduction(have: Sequence[Any], parameter: fx.Node) -> bool:
    """True if this is the shape of a gradient before its reduce-scatter to the parameter's rows over data-parallel ranks."""
    readers = [*parameter.users]
    for node in readers:  # casts of it may be what is gathered
        readers += [u for u in node.users if _name(node.target) == QUANTIZE or node.target is operator.getitem]
    ranks: list[Any] = [u.args[1] for u in readers if _name(u.target) == GATHER]
    first, *rest = parameter.meta[VAL].shape
    return bool(ranks) and list(have[1:]) == rest and -(-have[0] // ranks[0]) == first


def _same(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    left, right = (n.node.expr if isinstance(n, torch.SymInt) else sympy.Integer(n) for n in (a, b))
    return same_size(left, right)


# -- LOWERED


def check_collectives(program: Program) -> None:
    for node in program.graph.nodes:
        if _name(node.target) == TRANSITION:
            raise fail(node, "is still whole", "expand_transitions writes transitions out as local ops and collectives")
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if _name(node.target) == WAIT:
            if not _is_started(node.args[0]):
                raise fail(node, f"waits for %{node.args[0]}, which starts no collective")
        elif _starts(node.target):
            for started in [*node.users] if isinstance(node.meta[VAL], (tuple, list)) else [node]:
                waits = [u for u in started.users if _name(u.target) == WAIT]
                readers = [u for u in started.users if u not in waits]
                if len(waits) != 1:
                    raise fail(started, f"is waited for {len(waits)} times", "each collective has one wait_tensor")
                if readers:
                    raise fail(started, f"%{readers[0].name} reads it before it has arrived", "read its wait_tensor")


def _is_started(node: Any) -> bool:
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        node = node.args[0]
    target = node.target if isinstance(node, fx.Node) else None
    return isinstance(target, torch._ops.OpOverload) and _starts(target)


def _starts(target: torch._ops.OpOverload) -> bool:
    return target.namespace == COLLECTIVE_NAMESPACE or _name(target) == GATHER


# -- BOUND


def check_owned(program: Program) -> None:
    for node in program.graph.nodes:
        if _name(node.target).startswith("megafx.owner_"):
            fix = "drop_expert_values leaves out what other ranks own"
            raise fail(node, "asks for a rank, but the graph is of one", fix)


# -- PARTITIONED


def check_partition(program: Program) -> None:
    parts = program.partition
    if parts is None:
        raise PlacementError("the program is cut, but has no forward graph")
    later = sum(spec.kind in ("tangent", "pending") for spec in program.inputs)
    values = [s for s in (*parts.saved, *parts.saved_for_lazy) if s.kind != "input"]
    outputs = sum(spec.kind != "gradient" for spec in program.outputs)
    wanted = [("forward", parts.forward, len(program.inputs) - later + len(parts.origins), outputs + len(values))]
    if parts.backward is not None:
        wanted.append(("backward", parts.backward, len(parts.saved) + later, len(program.outputs) - outputs))
    for name, gm, takes, gives in wanted:
        results: Any = gm.graph.output_node().args[0]
        found = len(gm.graph.find_nodes(op="placeholder")), len(results)
        if found != (takes, gives):
            text = f"takes {found[0]} values and gives {found[1]}, where {takes} and {gives} are expected"
            raise PlacementError(f"the {name} graph {text}")


Check = Callable[[Program], None]
CONTRACTS: dict[Phase, tuple[Check, ...]] = {
    Phase.CAPTURED: (check_interface, check_values),
    Phase.CANONICAL: (check_functional, check_sizes_rooted),
    Phase.PLACED: (check_transitions, check_placements),
    Phase.LOCAL: (check_local_shapes,),
    Phase.JOINT: (check_gradients,),
    Phase.LOWERED: (check_collectives,),
    Phase.BOUND: (check_owned,),
    Phase.PARTITIONED: (check_partition,),
}
