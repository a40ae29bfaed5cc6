"""All ranks of one graph in one process, in lockstep, node by node, without autograd and without a process group.

    simulate(program, [inputs of rank 0, inputs of rank 1, ..]) -> [outputs of rank 0, outputs of rank 1, ..]
    simulate(program, inputs, mesh={"dp": 2, "tp": 3})             ranks in row-major order: the last axis varies fastest

Ops run rank by rank (as that rank: axes.on_mesh); a transition or a collective sees the values of all ranks at once,
by definitions that share nothing with the code of real ranks (placements/moves.py): transitions are put together and cut
by placements.Layout.pieces. What a joint graph computes is what its nodes say, so a wrong backward shows.

    run_logical(program, values, placements, t)   logical tensors in, logical outputs and gradients out

divergence.py finds the first node at which two runs part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import megafx.kernels.experts.dispatch_rows
import megafx.ops.collectives
import megafx.ops.gather_region
import megafx.ops.owners  # noqa: F401  registers the ops
from megafx.analysis.communication import is_region_gather
from megafx.errors import PlacementError
from megafx.ir.program import PLACEMENT, VAL, Batch, Input, Output, Program, fqn_of, source_of
from megafx.ir.sizes import symbol_sources
from megafx.ops.axes import AxisContext, Mesh, on_mesh
from megafx.placements.data_axis import COPY_AXIS, EXPERT_AXIS, EXPERT_COPY_AXIS, SHARD_AXIS, TENSOR_AXIS, DataAxis
from megafx.placements.tensors import cut_tensor, put_together, shard_tensor, unshard_tensors
from megafx.placements.types import Cuts, I, Placement, R, cut_further, dual, experts_held

Values = list[Any]  # one entry a rank
c10d, mfx = torch.ops._c10d_functional, torch.ops.megafx

# A gradient this much smaller than all of them together is zero but for rounding. 1e-10 of it is 45 times fp64's epsilon: what
# a sum leaves that is zero in exact arithmetic (the bias of keys, of logits over positions; 11 times was seen).
GRADIENT_FLOOR = 1e-4
# Rounding that a different order of summation explains: sqrt(terms) units in the last place, with room.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def simulate(
    program: Program | fx.GraphModule, per_rank_inputs: Sequence[Sequence[Any]], *,
    mesh: Mapping[str, int] | None = None, watch: Callable[[fx.Node, Values], None] | None = None,
    gradients: bool = False,
) -> list[list[Any]]:  # fmt: skip
    """Run the graph on len(per_rank_inputs) ranks. mesh: sizes of the axes by name; by default 'tp' has all ranks.
    watch: called with each node and its value on every rank. gradients: let autograd follow, of a graph without backward."""
    gm = program.gm if isinstance(program, Program) else program
    mesh = {TENSOR_AXIS: len(per_rank_inputs)} if mesh is None else mesh
    if math.prod(mesh.values()) != len(per_rank_inputs):
        raise PlacementError(f"inputs of {len(per_rank_inputs)} ranks for a mesh of {dict(mesh)}")
    with torch.set_grad_enabled(gradients):
        return _Lockstep(gm, mesh, watch).run(per_rank_inputs)


class _Lockstep:
    def __init__(
        self, gm: fx.GraphModule, mesh: Mapping[str, int], watch: Callable[[fx.Node, Values], None] | None
    ) -> None:
        self.gm, self.t, self.watch = gm, math.prod(mesh.values()), watch
        made = Mesh(mesh)
        self.ranks, self.groups = made.ranks, made.groups

    def run(self, per_rank_inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
        last_use = {a: n for n in self.gm.graph.nodes for a in n.all_input_nodes}
        dying: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last_use.items():
            dying.setdefault(user, []).append(node)
        inputs = zip(*per_rank_inputs, strict=True)
        values: dict[fx.Node, Values] = {}
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                value = list(next(inputs))
            else:
                own = [{n: values[n][rank] for n in node.all_input_nodes} for rank in range(self.t)]
                args, kwargs = zip(*(fx.map_arg((node.args, node.kwargs), v.__getitem__) for v in own), strict=True)
                if node.op == "output":
                    return [list(a[0]) if isinstance(a[0], (list, tuple)) else [a[0]] for a in args]
                value = self._call(node, args, kwargs)
            if self.watch is not None:
                self.watch(node, value)
            if node in last_use:
                values[node] = value
            for dead in dying.get(node, ()):
                del values[dead]
        raise AssertionError("a graph ends with its output")

    def _call(self, node: fx.Node, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> Values:
        if node.op == "get_attr":
            return [operator.attrgetter(str(node.target))(self.gm)] * self.t
        if node.op != "call_function":
            raise PlacementError(f"%{node.name}: a {node.op} cannot be simulated", fix="simulate graphs of ATen calls")
        if node.target in CROSS_RANK or node.target in EXCHANGES:
            return self._together(node, args, kwargs)
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "_c10d_functional":
            raise PlacementError(f"the simulator does not know the collective {node.target}")
        results = []
        for rank in range(self.t):
            with on_mesh(self.ranks[rank]):
                results.append(node.target(*args[rank], **kwargs[rank]))
        return results

    def _together(self, node: fx.Node, args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]) -> Values:
        """What the ranks of each group of the node's axis do."""
        axis = next((a for a in args[0][1:] if isinstance(a, str) and a in self.groups), None)
        results: Values = [None] * self.t
        for group in self.groups[axis] if axis is not None else [list(range(self.t))]:
            theirs = [args[r] for r in group]
            if node.target in EXCHANGES:
                for rank, value in zip(group, EXCHANGES[node.target](theirs), strict=True):
                    results[rank] = value
                continue
            alike = theirs if node.target is not mfx.owner_parameter.default else ()  # of which the others hold nothing
            for rank, given in enumerate(alike):  # ranks that disagree on a collective hang or mix data up
                if given[1:] != theirs[0][1:] or shapes_of(given[0]) != shapes_of(theirs[0][0]):
                    raise PlacementError(
                        f"%{node.name} ({node.target}): rank {rank} calls it with {shapes_of(given[0])}, {given[1:]}, "
                        f"rank 0 with {shapes_of(theirs[0][0])}, {theirs[0][1:]}",
                        module=fqn_of(node),
                        source=source_of(node),
                    )
            if node.target in SENDS_MEMORY and not all(a[0].is_contiguous() for a in theirs):
                found = f"%{node.name} ({node.target}) sends the memory of %{node.args[0]}, whose elements do not lie in order"
                raise PlacementError(found, module=fqn_of(node), source=source_of(node))
            made = CROSS_RANK[node.target]([a[0] for a in theirs], *theirs[0][1:], **kwargs[group[0]])
            for rank, value in zip(group, made, strict=True):
                results[rank] = value
        return results


def shapes_of(x: Any) -> Any:
    """The shapes of a tensor or of a list of tensors."""
    return tree_map(lambda v: tuple(v.shape) if isinstance(v, Tensor) else v, x)


# -- what ranks do together, by definition


def move_reference(
    xs: Values, src: str, dst: str, src_layout: Sequence[int], dst_layout: Sequence[int], axis: str, size: int
) -> Values:
    """All ranks' values at src -> all ranks' values at dst. A PLACED graph, written for one rank, moves nothing."""
    t = len(xs)
    a, b = Placement.parse(src, src_layout), Placement.parse(dst, dst_layout)
    if t == 1 or a == b or {a.kind, b.kind} == {"I", "R"}:
        return [x.clone() for x in xs]
    if size != t:
        raise PlacementError(f"a transition for {size} ranks runs on {t}")
    if b.kind == "P":
        if not a.is_shard:
            return [x.contiguous().clone() if r == 0 else torch.zeros_like(x).contiguous() for r, x in enumerate(xs)]
        zeros = torch.zeros_like(xs[0])
        return [unshard_tensors([x if r == q else zeros for q in range(t)], a, t) for r, x in enumerate(xs)]
    whole = xs if a.kind in ("I", "R") else [unshard_tensors(xs, a, t)] * t
    return [shard_tensor(w, b, r, t).contiguous().clone() for r, w in enumerate(whole)]


_REDUCTIONS: dict[str, Any] = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}


def _reduced(xs: Values, op: str) -> Tensor:
    if op not in _REDUCTIONS:
        raise PlacementError(f"the simulator does not know the reduction '{op}'")
    return _REDUCTIONS[op](torch.stack([*xs]), 0)


def _all_reduce(xs: Values, op: str, group: str) -> Values:
    total = _reduced(xs, op)
    return [total.clone() for _ in xs]


def _all_reduce_in_place(xs: Values, op: str, group: str) -> Values:
    total = _reduced(xs, op)
    return [x.copy_(total) for x in xs]


def _all_gather(xs: Values, size: int, group: str) -> Values:
    whole = torch.cat([*xs])
    return [whole.clone() for _ in xs]


def _reduce_scatter(xs: Values, op: str, size: int, group: str) -> Values:
    return [part.clone() for part in _reduced(xs, op).tensor_split(len(xs))]


def _all_to_all(xs: Values, received: Sequence[int], sent: Sequence[int], group: str) -> Values:
    parts = [x.split([*sent]) for x in xs]
    return [torch.cat([parts[q][r] for q in range(len(xs))]) for r in range(len(xs))]


def _owner_parameter(xs: Values, owner: int, axis: str, size: int) -> Values:
    """The owner's value. Real ranks do not send it, because no other computes with it; here all do, to the same effect."""
    return [xs[owner if size > 1 else r].clone() for r in range(len(xs))]


def _gather_region(lists: Values, size: int, axis: str) -> Values:
    """Tensor after tensor, each with the rows of all ranks, from the next multiple of 128 elements on."""
    wholes = [torch.cat([*xs]).flatten() for xs in zip(*lists, strict=True)]
    flat = torch.cat([F.pad(whole, (0, -whole.numel() % 128)) for whole in wholes])
    return [flat.clone() for _ in lists]


def _of_each(collective: Callable[..., Values]) -> Callable[..., Values]:
    """The coalesced form: a list of tensors on every rank."""

    def run(lists: Values, *args: Any) -> Values:
        moved = [collective(list(xs), *args) for xs in zip(*lists, strict=True)]
        return [list(xs) for xs in zip(*moved, strict=True)]

    return run


# -- tokens that travel to the ranks of their experts: every argument differs from rank to rank


def _room_needed(given: Sequence[tuple[Any, ...]]) -> Values:
    return [torch.stack([counts for counts, _ in given]) for _ in given]


def _experts_received(given: Sequence[tuple[Any, ...]]) -> Values:
    choices, experts = given[0][3:5]
    found = []
    for r in range(len(given)):
        parts = []
        for ids, _, sent, *_ in given:
            tokens = sent.view(len(given), -1)[r].tolist()
            chosen = [ids[t * choices : (t + 1) * choices].tolist() if t >= 0 else [-1] * choices for t in tokens]
            parts += [[e % experts if e // experts == r else experts for e in each] for each in chosen]
        found.append(torch.tensor(parts, dtype=torch.int32).view(-1, choices))
    return found


def _arrived(given: Sequence[tuple[Any, ...]]) -> Iterator[tuple[int, Tensor, int, Tensor]]:
    """(rank of the experts, rows there, rank of their tokens, rows of the tokens times choices, and their choices)."""
    choices = given[0][5]
    for r, (_, _, _, rows, *_) in enumerate(given):
        tokens = torch.stack([sent.view(len(given), -1)[r] for _, _, sent, *_ in given])
        slot = rows // choices
        at = ((rows >= 0) & (tokens.flatten()[slot] >= 0)).nonzero().flatten()
        slot = slot[at]
        row = tokens.flatten()[slot] * choices + rows[at] % choices
        for q in range(len(given)):
            theirs = slot // max(tokens.shape[1], 1) == q
            yield r, at[theirs], q, row[theirs]


def _dispatch_rows(given: Sequence[tuple[Any, ...]]) -> Values:
    choices, entries = given[0][5:7]
    made = [x.new_zeros(len(rows), *x.shape[1:]) for x, _, _, rows, *_ in given]
    for r, u, q, row in _arrived(given):
        made[r][u] = given[q][0][row if entries else row // choices]
    return made


def _combine_rows(given: Sequence[tuple[Any, ...]]) -> Values:
    choices, entries = given[0][5:7]
    made = [y.new_zeros(places.shape[0] * (choices if entries else 1), *y.shape[1:]) for y, places, *_ in given]
    for r, u, q, row in _arrived(given):
        made[q].index_add_(0, row if entries else row // choices, given[r][0][u])
    return made


EXCHANGES: dict[Any, Callable[[Sequence[tuple[Any, ...]]], Values]] = {
    mfx.room_needed.default: _room_needed,
    mfx.experts_received.default: _experts_received,
    mfx.dispatch_rows.default: _dispatch_rows,
    mfx.combine_rows.default: _combine_rows,
}

CROSS_RANK: dict[Any, Callable[..., Values]] = {
    mfx.transition.default: move_reference,
    mfx.owner_parameter.default: _owner_parameter,
    mfx.gather_region.default: _gather_region,
    c10d.wait_tensor.default: lambda xs: xs,
    c10d.all_reduce.default: _all_reduce,
    c10d.all_reduce_.default: _all_reduce_in_place,
    c10d.all_gather_into_tensor.default: _all_gather,
    c10d.reduce_scatter_tensor.default: _reduce_scatter,
    c10d.all_to_all_single.default: _all_to_all,
    c10d.all_reduce_coalesced.default: _of_each(_all_reduce),
    c10d.all_gather_into_tensor_coalesced.default: _of_each(_all_gather),
    c10d.reduce_scatter_tensor_coalesced.default: _of_each(_reduce_scatter),
}


# Of one tensor, which is sent as it lies in memory.
SENDS_MEMORY = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}


# -- logical values in and out


def relative_error(a: Tensor, b: Tensor, floor: float | None = None) -> float:
    """||a - b|| / max(||b||, floor); infinite where one is finite and the other is not. b: the reference.

    floor: by default eps * sqrt(numel), as true zeros may come out as rounding noise.
    """
    a, b = (x.detach().to_dense() if x.layout is not torch.strided else x.detach() for x in (a, b))
    a, b = (x.to(torch.float64 if not x.is_complex() else torch.complex128) for x in (a, b))
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    a, b = (torch.nan_to_num(x, 0.0, 1.0, -1.0) for x in (a, b))
    if floor is None:
        floor = torch.finfo(torch.float64).eps * max(1, b.numel()) ** 0.5
    return float((a - b).norm()) / max(float(b.norm()), floor)


@dataclass
class Logical:
    """What the ranks computed together, in the model's own terms."""

    outputs: dict[str, Tensor] = field(default_factory=dict)  # outputs, gradients, mutations: by name
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    mutations: dict[str, Tensor] = field(default_factory=dict)


def relative_errors(found: Logical, wanted: Logical) -> tuple[dict[str, float], dict[str, float]]:
    """`relative_error` of each output, infinite where it is not found, and of each gradient; no gradient counts as zeros."""
    tiny = torch.finfo(torch.float64).tiny
    tensors = {n: x for n, x in wanted.outputs.items() if isinstance(x, Tensor)}
    pairs = [(n, found.outputs.get(n), x) for n, x in tensors.items()]
    outputs = {n: math.inf if got is None else relative_error(got, x, tiny) for n, got, x in pairs}
    present = {n: g for n, g in wanted.gradients.items() if g is not None}
    finite = [(g.abs() if g.is_complex() else g).double().nan_to_num(0.0, 0.0, 0.0) for g in present.values()]
    floor = max(GRADIENT_FLOOR * sum(float(g.norm()) ** 2 for g in finite) ** 0.5, tiny)
    gradients = {}
    for name, gradient in present.items():
        got = found.gradients.get(name)
        gradients[name] = relative_error(torch.zeros_like(gradient) if got is None else got, gradient, floor)
    return outputs, gradients


def local_inputs(
    program: Program,
    values: Mapping[str, Any],
    placements: Mapping[str, Placement],
    t: int,
    data: DataAxis | None = None,
) -> list[list[Any]]:
    """Every rank's inputs, placed as `placements` says (by name; I where it does not). A tangent without a value is 1.

    data: values are of the whole batch, of which each of data.ranks groups of t ranks takes its part; or of one rank's, where
    losses are its own. Ranks that cut the sequence of a part are given the same.
    """
    if data is not None:
        inputs = []
        for part in (part for part in range(data.ranks) for _ in range(data.cp)):
            inputs += local_inputs(program, _part(program, values, part, data.ranks), placements, t)
        for mine, place in zip(inputs, _places(data, t), strict=True):
            for i, spec in enumerate(program.inputs):
                held = _stored(program, spec, values, placements, t, data)
                if held is not None:
                    mine[i] = cut_tensor(values[spec.name], held.cuts, place[held.axis].rank).clone()
        return inputs
    per_rank: list[list[Any]] = [[] for _ in range(t)]
    for node, spec in program.input_nodes():
        for rank in range(t):
            if spec.kind == "tangent":
                value = values.get(spec.name)
                value = torch.ones((), dtype=node.meta[VAL].dtype) if value is None else value
                placement = dual(at_run_time(program, _result_placement(program, spec.name), per_rank[0]))
            else:
                value = program.constants[spec.name] if spec.kind == "constant" else values[spec.name]
                placement = placements.get(spec.name, I)
            if isinstance(value, Tensor) and placement.kind == "P" and value.is_floating_point():
                value = value * (2 * (rank + 1) / (t * (t + 1)))  # no summand is zero, nor are two equal
            elif isinstance(value, Tensor):
                value = shard_tensor(value, placement, rank, t).clone()
            per_rank[rank].append(value)
    return per_rank


def _gathers(program: Program) -> bool:
    """True if ranks take shards of parameters and gather them."""
    return any(map(is_region_gather, program.graph.nodes))


class _Stored(NamedTuple):
    """How the ranks of one copy hold a parameter together, and the axis that they are on."""

    cuts: Cuts
    axis: str


def _stored(
    program: Program, spec: Input | Output, values: Mapping[str, Any], placements: Mapping[str, Placement], t: int,
    data: DataAxis,
) -> _Stored | None:  # fmt: skip
    """Of a parameter that data-parallel ranks hold shards of, or of its gradient; None of others."""
    if spec.kind not in ("param", "gradient"):
        return None
    assert program.batch is not None
    tensor, shape = placements.get(spec.name, I), values[spec.name].shape
    sharded = _gathers(program) and (spec.kind == "param" or program.batch.reduced)
    if spec.name in program.batch.experts:
        same = data.same_experts if sharded else 1
        held = experts_held(tensor, shape, t, data.experts, same, program.batch.experts[spec.name])
        axes = (EXPERT_AXIS, EXPERT_COPY_AXIS) if same == 1 else (SHARD_AXIS, COPY_AXIS)
        return _Stored(held, axes[tensor.is_shard and t > 1])
    if sharded:
        return _Stored(cut_further(tensor, shape, t, data.sharing), data.copy_axis)
    return None


def _places(data: DataAxis, t: int) -> list[dict[str, AxisContext]]:
    """Of each rank, where it is on each axis, those that join others included."""
    return Mesh({**data.mesh, TENSOR_AXIS: t}).ranks


def _part(program: Program, values: Mapping[str, Any], part: int, parts: int) -> dict[str, Any]:
    """What one data-parallel rank has of the inputs, and of tangents."""
    batch, mine = program.batch, dict(values)
    assert batch is not None
    leaves = {spec.name: p for spec, p in zip(program.outputs, batch.outputs, strict=False)}
    for node, spec in program.input_nodes() if batch.whole else ():
        placement = leaves[spec.name] if spec.kind == "tangent" else batch.inputs.get(spec.name, R)
        if placement.is_shard and spec.name in mine:
            mine[spec.name] = mine[spec.name].chunk(parts, placement.dim)[part].contiguous()
        elif spec.kind == "tangent" and not placement.is_shard:
            mine[spec.name] = mine.get(spec.name, torch.ones((), dtype=node.meta[VAL].dtype)) / parts
    return mine


def _result_placement(program: Program, name: str) -> Placement:
    """Placement of the user output `name`; whole on every rank where the graph says nothing."""
    for spec, node in zip(program.outputs, program.results(), strict=True):
        if spec.name == name and spec.kind == "user" and isinstance(node, fx.Node):
            return spec.placement or node.meta.get(PLACEMENT, I)
    return I


def run_logical(
    program: Program, values: Mapping[str, Any], placements: Mapping[str, Placement], t: int, *,
    data: DataAxis | None = None,
) -> Logical:  # fmt: skip
    """Simulate t ranks, or data.ranks groups of them, on logical `values` (by input name; tangents by their output's name).

    placements: of parameters (plan.params); gradients come back at the duals. Raises PlacementError where ranks that
    should hold the same result differ, or a gradient has something in its padding.
    """
    inputs = local_inputs(program, values, placements, t, data)
    results = simulate(program, inputs, mesh={**(data.mesh if data is not None else {}), TENSOR_AXIS: t})
    return logical_of(program, results, inputs, values, placements, t, data)


def logical_of(
    program: Program, results: Sequence[Sequence[Any]], inputs: Sequence[Sequence[Any]], values: Mapping[str, Any],
    placements: Mapping[str, Placement], t: int, data: DataAxis | None = None,
) -> Logical:  # fmt: skip
    """What the ranks computed together, of their results and their inputs (`local_inputs` of the values)."""
    if data is None:
        return _of_tensor_ranks(program, results, inputs[0], placements, t)
    batch = program.batch
    assert batch is not None
    shards = {i: held for i, spec in enumerate(program.outputs)
              if (held := _stored(program, spec, values, placements, t, data)) is not None}  # fmt: skip
    put = _of_the_sequence if data.cp > 1 else _of_the_batch
    found = put(program, results, inputs, placements, t, data, {program.outputs[i].name for i in shards})
    for i, (cuts, axis) in shards.items():
        name, groups = program.outputs[i].name, Mesh({**data.mesh, TENSOR_AXIS: t}).groups[axis]
        copies = [[results[rank][i] for rank in group] for group in groups]
        made: list[Any] = [None if c[0] is None else put_together(c, cuts) for c in copies]
        if made[0] is not None and axis in (EXPERT_AXIS, SHARD_AXIS):  # tensor-parallel ranks have the same
            for at in range(0, len(made), t):
                _check_same(made[at : at + t], f"the gradient of '{name}'", "of all tensor-parallel ranks")
            made = made[::t]
        found.gradients[name] = _of_copies(made, name, batch, data)
    if batch.whole and not batch.summed:  # the average is to be compared with the sum
        found.gradients = {n: None if g is None else g * data.ranks for n, g in found.gradients.items()}
    return found


def _of_the_batch(
    program: Program, results: Sequence[Sequence[Any]], inputs: Sequence[Sequence[Any]],
    placements: Mapping[str, Placement], t: int, data: DataAxis, skipped: Collection[str],
) -> Logical:  # fmt: skip
    """`logical_of` data-parallel ranks, without the gradients of `skipped`: outputs are of their parts of the batch."""
    batch = program.batch
    assert batch is not None
    each = [
        _of_tensor_ranks(program, results[k : k + t], inputs[k], placements, t, skipped)
        for k in range(0, len(results), t)
    ]
    found = each[0]
    for output, placement in zip(program.outputs, batch.outputs, strict=False):
        parts: list[Any] = [one.outputs.get(output.name) for one in each]
        if not isinstance(parts[0], Tensor):
            continue
        if placement.is_shard:
            found.outputs[output.name] = torch.cat(parts, placement.dim)
        elif batch.whole:
            _check_same(parts, f"output '{output.name}'", "whole")
    for name in found.gradients:
        found.gradients[name] = _of_copies([one.gradients[name] for one in each], name, batch, data)
    return found


def _of_copies(made: Values, name: str, batch: Batch, data: DataAxis) -> Tensor | None:
    """The gradient of a parameter, of those that each data-parallel copy has made: all the same once they are reduced."""
    first: Tensor | None = made[0]
    if first is None:
        return None
    if not batch.reduced:
        return torch.stack(made).sum(0) / (1 if batch.summed else data.ranks)
    _check_same(made, f"the gradient of '{name}'", "of all data-parallel ranks")
    return first


def _of_the_sequence(
    program: Program, results: Sequence[Sequence[Any]], inputs: Sequence[Sequence[Any]],
    placements: Mapping[str, Placement], t: int, data: DataAxis, skipped: Collection[str],
) -> Logical:  # fmt: skip
    """`logical_of` context-parallel ranks: outputs are the same on each, gradients summands until they are reduced."""
    c, parts = data.cp, range(0, len(results), t)
    each = []
    for at in range(c):
        members = [k + rank for k in parts if k // t % c == at for rank in range(t)]
        own, given = [results[k] for k in members], [inputs[k] for k in members]
        each.append(_of_the_batch(program, own, given, placements, t, data, skipped))
    found, last = each[0], "on context-parallel ranks"
    for what, name in (("output", "outputs"), ("buffer", "mutations")):
        for of, value in getattr(found, name).items():
            if isinstance(value, Tensor):
                _check_same([getattr(one, name)[of] for one in each], f"{what} '{of}'", f"whole {last}")
    params = {spec.name for spec in program.inputs if spec.kind == "param"}
    assert program.batch is not None
    for of, value in found.gradients.items():
        if value is None:
            continue
        mine = [g for one in each if (g := one.gradients[of]) is not None]
        if of in params and not program.batch.reduced:
            found.gradients[of] = torch.stack(mine).sum(0)
        else:
            _check_same(mine, f"the gradient of '{of}'", f"the same {last}")
    return found


def _of_tensor_ranks(
    program: Program, results: Sequence[Sequence[Any]], inputs: Sequence[Any], placements: Mapping[str, Placement],
    t: int, skipped: Collection[str] = (),
) -> Logical:  # fmt: skip
    """Results of t ranks put together, without the gradients of `skipped`. inputs: of the first rank."""
    logical = Logical()
    for i, spec in enumerate(program.outputs):
        if spec.kind == "gradient" and spec.name in skipped:
            continue
        locals_ = [r[i] for r in results]
        into: dict[str, Any] = logical.gradients
        if spec.kind == "gradient":
            what, placement = "the gradient of", dual(placements.get(spec.name, I))
        else:
            what, into = spec.kind, logical.outputs if spec.kind == "user" else logical.mutations
            placement = _result_placement(program, spec.name) if spec.kind == "user" else I
            placement = at_run_time(program, placement, inputs)
        if isinstance(locals_[0], Tensor):
            into[spec.name] = _together(locals_, placement, t, f"{what} '{spec.name}'", spec.kind == "gradient")
        else:
            into[spec.name] = locals_[0]
    return logical


def at_run_time(program: Program, placement: Placement, inputs: Sequence[Any]) -> Placement:
    """A placement with the sizes of this run in place of structural integers."""
    if not placement.is_shard:
        return placement
    given = dict(zip(program.placeholders(), inputs, strict=False))  # of inputs so far
    sources = symbol_sources(program.graph).items()
    sizes_now = {symbol: given[node].shape[dim] if dim >= 0 else given[node] for symbol, (node, dim) in sources}
    layout = [int(program.sizes.expr(n).xreplace(sizes_now)) for n in placement.flat_layout]
    return Placement.parse(placement.tag, layout)


def _together(locals_: Values, placement: Placement, t: int, what: str, zero_pads: bool) -> Tensor:
    if placement.kind in ("I", "R"):
        _check_same(locals_, what, str(placement))
    whole = unshard_tensors(locals_, placement, t)
    if zero_pads and placement.is_shard:
        for rank, local in enumerate(locals_):
            differs = shard_tensor(whole, placement, rank, t) != local
            if whole.isnan().any():  # padding takes part in what makes NaN of everything
                differs &= ~local.isnan()
            if differs.any():
                raise PlacementError(f"{what} is not zero in the padding of rank {rank}")
    return whole


def _check_same(locals_: Values, what: str, placement: str) -> None:
    error = replica_error(locals_)
    if error > TOLERANCE.get(locals_[0].dtype, 0.0):
        raise PlacementError(f"{what} differs between ranks by {error:.1e}, but is {placement}")


def replica_error(locals_: Values) -> float:
    """How far ranks are from rank 0."""
    return max((relative_error(x, locals_[0]) for x in locals_[1:] if not torch.equal(x, locals_[0])), default=0.0)
