"""Write each transition out as local ops and a collective, started and waited for.

Before:  %2 = transition(%1, P -> S1)                      # bf16[4 16] P@tp -> bf16[4 8] S1@tp
After:   %2 = view(%1, [4, 2, 8])
         %3 = permute(%2, [1, 0, 2])
         %4 = contiguous(%3)
         %5 = view(%4, [8, 8])
         %6 = reduce_scatter_tensor(%5, 'sum', 2, 'tp')    # the group is named by the mesh axis until bind_mesh
         %7 = wait_tensor(%6)
Legal because: `stacking.move` is what the transition op itself runs; here its calls become nodes. Identities vanish, unless
the value's strides change (an expanded gradient), which later views were traced without: those are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import make_contiguous_strides_for

import megafx.collectives  # noqa: F401  registers the ops that expansions use
from megafx.aliasing import memory_of, overlaps
from megafx.ir import VAL, Builder, Phase, Program, inherit
from megafx.sizes import SizeEmitter
from megafx.stacking import Ops, Size, move, same_size

REQUIRES, ENSURES = (Phase.LOCAL, Phase.JOINT), Phase.LOWERED
NAME = "expand_transitions"
aten, c10d, mfx = torch.ops.aten, torch.ops._c10d_functional, torch.ops.megafx


def expand_transitions(program: Program) -> int:
    """Return the number of transitions expanded."""
    graph = program.graph
    sizes = SizeEmitter(graph, program.sizes)
    transitions = graph.find_nodes(op="call_function", target=mfx.transition.default)
    for node in transitions:
        _expand(program, node, sizes)
        if sizes.anchor is node:
            sizes.anchor = node.next
    for node in reversed(transitions):
        graph.erase_node(node)
    for node in reversed(graph.nodes):  # sizes of views that merged into others
        if node.op == "call_function" and not node.users and isinstance(node.meta[VAL], torch.SymInt):
            graph.erase_node(node)
    _separate_gradients(program)
    program.gm.recompile()
    program.phase = ENSURES
    return len(transitions)


def _expand(program: Program, node: fx.Node, sizes: SizeEmitter) -> None:
    source, src, dst, src_layout, dst_layout, axis, t = node.args
    ops = NodeOps(program, node, sizes, axis)  # type: ignore[arg-type]
    flats = [[n.meta[VAL] if isinstance(n, fx.Node) else n for n in flat] for flat in (src_layout, dst_layout)]  # type: ignore[union-attr]
    result = move(source, str(src), str(dst), flats[0], flats[1], int(t), ops)  # type: ignore[arg-type]
    if not _same_strides(result.meta[VAL], node.meta[VAL]):
        result = ops.call(aten.clone.default, result)
    if result in ops.emitted:
        for key, value in node.meta.items():
            if key != VAL:
                result.meta.setdefault(key, value)
    node.replace_all_uses_with(result)
    for made in reversed(ops.emitted):
        if not made.users and made is not result:
            if sizes.anchor is made:
                sizes.anchor = made.next
            program.graph.erase_node(made)


class NodeOps(Ops):
    """`stacking.Ops` that emits nodes before `where`. Sizes in calls become size nodes at the top of the graph."""

    def __init__(self, program: Program, where: fx.Node, sizes: SizeEmitter, axis: str) -> None:
        self.program, self.where, self.sizes, self.axis = program, where, sizes, axis
        self.build = Builder(program, where, where, NAME)
        self.emitted: list[fx.Node] = []

    def _size(self, size: Any) -> Any:
        if isinstance(size, torch.SymInt):
            return self.sizes(self.program.sizes.of(size))
        return [self._size(s) for s in size] if isinstance(size, (list, tuple)) else size

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._made(self.build(target, *(self._size(a) for a in args), **kwargs))

    def _made(self, node: fx.Node) -> fx.Node:
        if self.sizes.anchor is self.where:  # about to go; sizes stay in front of everything else
            self.sizes.anchor = node
        self.emitted.append(node)
        return node

    def shape(self, x: fx.Node) -> Sequence[Size]:
        return x.meta[VAL].shape

    def contiguous(self, x: fx.Node) -> fx.Node:
        """No node where the strides are known to be contiguous; else one that copies only if they are not when it runs."""
        value = x.meta[VAL]
        if _same_strides(value, None):
            return x
        with self.program.graph.inserting_before(self.where):
            node = self.program.graph.call_function(aten.contiguous.default, (x,))
        with self.program.fake_mode:
            node.meta[VAL] = value.new_empty(value.shape)  # asking the fake whether it is contiguous would add guards
        return self._made(inherit(node, self.where, NAME))

    def view(self, x: fx.Node, size: Sequence[Size]) -> fx.Node:
        """A view of a view is one view."""
        while x in self.emitted and x.target is aten.view.default:
            x = x.args[0]  # type: ignore[assignment]
        return super().view(x, size)

    def rank_select(self, x: fx.Node) -> fx.Node:
        return self.call(mfx.rank_select.default, x, self.axis)

    def rank_place(self, x: fx.Node, t: int) -> fx.Node:
        return self.call(mfx.rank_place.default, x, t, self.axis)

    def rank0_only(self, x: fx.Node) -> fx.Node:
        return self.call(mfx.rank0_only.default, x, self.axis)

    def _wait(self, started: fx.Node) -> fx.Node:
        return self.call(c10d.wait_tensor.default, started)

    def all_reduce(self, x: fx.Node) -> fx.Node:
        return self._wait(self.call(c10d.all_reduce.default, x, "sum", self.axis))

    def all_gather(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.all_gather_into_tensor.default, x, t, self.axis))

    def reduce_scatter(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.reduce_scatter_tensor.default, x, "sum", t, self.axis))

    def all_to_all(self, x: fx.Node, t: int) -> fx.Node:
        return self._wait(self.call(c10d.all_to_all_single.default, x, [1] * t, [1] * t, self.axis))


def _same_strides(value: torch.Tensor, like: torch.Tensor | None) -> bool:
    """Known to have the strides of `like` (None: contiguous ones); dims of one element have no stride to speak of."""
    wanted = make_contiguous_strides_for(value.shape) if like is None else like.stride()
    return all(same_size(n, 1) or same_size(a, b) for n, a, b in zip(value.shape, value.stride(), wanted, strict=True))


def _separate_gradients(program: Program) -> None:
    """A gradient that an identity left in memory of an input or of another result is copied: `.grad` owns its memory."""
    output = program.output_node()
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    taken: list[tuple[fx.Node, int, int]] = []
    for i, spec in enumerate(program.outputs):
        if not isinstance(results[i], fx.Node):
            continue
        memory = memory_of(results[i])
        if spec.kind == "gradient" and (memory[0].op == "placeholder" or any(overlaps(memory, m) for m in taken)):
            results[i] = Builder(program, output, results[i], NAME)(aten.clone.default, results[i])
            memory = memory_of(results[i])
        taken.append(memory)
    output.args = (tuple(results),)
