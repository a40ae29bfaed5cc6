"""Products of layers with their weights, and the gradients of these, become products of FP8 with scales.

Before:  %y = mm(%x, t(%w))                                          # %x is gathered: transition(%s, S0 -> R); %w S0
         %dx = mm(%dy, %w); %dw = mm(t(%dy), %x)
After:   %a = transition(fp8_amax(%s), M -> R)                       # the largest over ranks: one scale, as on one rank
         %q, _, %scale = fp8_quantize(%s, %a); %xq = transition(%q, S0 -> R)       # bytes travel, not bf16
         %b = transition(fp8_amax(%w), M -> R); %wq, _, %ws = fp8_quantize(%w, %b)
         %y = scaled_mm(%xq, %wq, %scale, %ws)
         %dyq, %dyt, %dys = fp8_quantize(%dy, ...)                                 # both orientations, in one pass
         _, %wt, _ = fp8_quantize(%w, %b)                                          # in backward: not kept for it
         %dx = scaled_mm(%dyq, %wt, %dys, %ws); %dw = scaled_mm(%dyt, fp8_transposed(%xq), %dys, %scale)
Legal because: the user asked for the rounding. It is the same at every degree: scales are maxima, whose order does not matter,
a cast is elementwise, so that a gather of casts is the cast of a gather, and what is summed is as wide as without FP8.

Each value is cast once for each way of scaling, whoever reads it. Weights, outputs of activations that backward recomputes,
and values that backward reads as they are too, are cast once in forward and once in backward: a copy that is kept would take a
byte of each element. 'tensorwise': one scale a matrix. 'rowwise': one for each row along the summed dim, so that products read
each operand with two sets of scales.
A head that is fused with its loss becomes the form of it that reads FP8 (kernels/loss/scaled_head.py), by option.
Left as they are, with a note: what is outside of layers (embedding, head), the first and last layers by option, routers (whose
result decides), and products whose gradient is partial, which cannot be cast before it is summed. Megatron's options:
`fp8`, `fp8_recipe`, `fp8_wgrad`, `first_last_layers_bf16`; `fp8_head` is ours.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from megafx.analysis.fp8 import places
from megafx.analysis.layers import Layers
from megafx.errors import PlacementError
from megafx.ir.contracts import layout_of
from megafx.ir.facts import declared
from megafx.ir.nodes import SHAPED, behind_padding, in_backward, op_name, shows_operand, storage_of
from megafx.ir.program import PHASE, PLACEMENT, VAL, Builder, Phase, Program, fqn_of, tensors_of
from megafx.kernels import join_parameters  # noqa: F401  registers the op
from megafx.kernels.fp8.quantize import quantize, transposed
from megafx.kernels.fp8.scaled_mm import mm as scaled_mm
from megafx.kernels.loss import scaled_head
from megafx.kernels.products_fp32 import mm_fp32
from megafx.passes.backward.maxima import TRANSITION, Maxima
from megafx.placements.types import P, Placement, R
from megafx.planner.context import CompileContext
from megafx.planner.cost import MATMUL, cost_kind
from megafx.rewrite.driver import fold

REQUIRES, ENSURES = Phase.JOINT, Phase.JOINT
NAME = "scaled_products"
aten, mfx = torch.ops.aten, torch.ops.megafx

ALL, ROWS, COLUMNS = -1, 0, 1  # what a scale is of
LINEARS = (aten.mm.default, aten.addmm.default)
STATS, LOSS = mfx.linear_ce_stats.default, mfx.linear_ce_loss.default
WHOLES = (mfx.linear_cross_entropy_forward.default, mfx.linear_cross_entropy_forward_fp32.default)
BACKWARDS = (mfx.linear_ce_loss_backward.default, mfx.linear_ce_loss_fp32_backward.default)
_OF_HEADS = {*WHOLES, *BACKWARDS, STATS, *scaled_head.OPS}
_WEIGHTS = (TRANSITION, mfx.join_parameters.default, aten._to_copy.default)  # between a parameter and a product


def scaled_products(program: Program, context: CompileContext) -> int:
    """Return the number of products that changed."""
    if context.config.fp8 is None:
        return 0
    scaler = _Scaler(program, context)
    for head in scaler.heads():
        head.kept = scaler.refusal_of_head(head)
    for linear in scaler.linears():
        linear.kept = scaler.refusal(linear)
    scaled = [linear for linear in scaler.found if not linear.kept]
    heads = [head for head in scaler.found_heads if not head.kept]
    for linear in scaled:
        scaler.note_reads(linear)
    for head in heads:
        scaler.note_reads_of_head(head)
    for linear in scaled:
        scaler.rewrite(linear)
    of_node = {node: head for head in heads for node in head.nodes}
    for node in sorted(of_node):
        scaler.rewrite_head(of_node[node], node)
    scaler.say()
    if scaler.changes:
        program.erase_unused()
        program.graph.lint()
    return scaler.changes


@dataclass
class _Linear:
    """y = x w' (+ bias), and the products that make the gradients of x and w."""

    product: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    dgrads: list[fx.Node] = field(default_factory=list)
    wgrads: list[fx.Node] = field(default_factory=list)
    kept: str = ""  # why it is left as it is


@dataclass
class _Head:
    """A linear that is fused with its loss. nodes: of forward and backward, in their order."""

    x: fx.Node
    weight: fx.Node
    nodes: list[fx.Node] = field(default_factory=list)
    kept: str = ""


@dataclass
class _Cast:
    """A value in FP8. qt: its transpose, once it is asked for."""

    q: fx.Node | None
    qt: fx.Node | None
    scale: fx.Node
    format: str


class _Scaler(Maxima):
    def __init__(self, program: Program, context: CompileContext) -> None:
        super().__init__(program, context)
        self.again = {f"megafx.{facts.recompute}.default" for facts in declared().values() if facts.recompute}
        self.rowwise = self.config.fp8_recipe == "rowwise"
        self.gradients = "e5m2" if self.config.fp8 == "hybrid" else "e4m3"
        self.changes = 0
        # values that are read so, by scaled products
        self.read: dict[str, set[fx.Node]] = {"plain": set(), "turned": set()}
        self.casts: dict[Any, _Cast] = {}
        self.found: list[_Linear] = []
        self.found_heads: list[_Head] = []
        self.placed: Callable[[fx.Node], str] = lambda product: ""
        # forward values that backward casts, and the products for which it does
        self.late: dict[fx.Node, list[fx.Node]] = {}
        nodes = program.input_nodes()
        shapes = {s.name: tuple(map(str, n.meta[VAL].shape)) for n, s in nodes if s.kind == "param"}
        self.layers = Layers.of(shapes)

    # -- which

    def linears(self) -> list[_Linear]:
        """Products with weights in forward, each with those of its backward."""
        for node in self.program.graph.nodes:
            if node.target not in LINEARS or in_backward(node):
                continue
            args = node.args
            bias, x, turned = (None, *args) if node.target is aten.mm.default else args[:3]
            is_turned = isinstance(turned, fx.Node) and turned.target is aten.t.default
            if not is_turned or node.kwargs or not self._is_weight(turned.args[0]):
                continue
            self.found.append(_Linear(node, x, turned.args[0], bias))
        for linear in self.found:
            linear.dgrads = [
                n for n in linear.weight.users if _is_product(n) and in_backward(n) and n.args[1] is linear.weight
            ]
            results = {n.args[0] for n in linear.dgrads}
            for n in linear.x.users:
                if _is_product(n) and in_backward(n) and n.args[1] is linear.x:
                    left = n.args[0]
                    mine = left.target is aten.t.default and self._made_by(linear, left.args[0], n, results)
                    linear.wgrads += [n] if mine else []
        self.placed = places((linear.product for linear in self.found), self.layers, self.config)
        return self.found

    def _made_by(self, linear: _Linear, gradient: fx.Node, product: fx.Node, results: set[Any]) -> bool:
        """True if dy' x is the gradient of this linear's weight: of several with one x, it is the one with its dy."""
        return gradient in results or (not results and fqn_of(product) == fqn_of(linear.product))

    def _is_weight(self, node: Any) -> bool:
        while isinstance(node, fx.Node) and node.target in _WEIGHTS:
            first = node.args[0]
            node = first[0] if isinstance(first, (list, tuple)) else first
        return node in self.params

    def heads(self) -> list[_Head]:
        """Losses with a linear in them."""
        found: dict[Any, _Head] = {}
        for node in self.program.graph.nodes:
            if node.target in (*WHOLES, *BACKWARDS, STATS, LOSS):
                x, weight = node.args[1:3] if node.target in BACKWARDS else node.args[:2]
                found.setdefault((x, weight), _Head(x, weight)).nodes.append(node)
        self.found_heads = [*found.values()]
        return self.found_heads

    def refusal_of_head(self, head: _Head) -> str:
        if not self.config.fp8_head:
            return "it is the head (fp8_head=False)"
        if not self.config.fp8_wgrad:
            return "its loss makes both gradients (fp8_wgrad=False)"
        last = head.nodes[-1]
        if not self._is_weight(head.weight) or not (
            last.target in BACKWARDS or (last.target in WHOLES and last.args[-1])
        ):
            return "its weight is no parameter" if last.target in BACKWARDS else "no gradient of its loss is taken"
        return self._of_operands(head.x, head.weight)

    def _of_operands(self, *operands: fx.Node) -> str:
        try:
            held = [self.placement(n) for n in operands]
        except PlacementError as error:
            return f"what ranks hold of its operands is not known: {error.found}"
        return "an operand is a sum over ranks yet to be made" if P in held[:2] else ""

    def refusal(self, linear: _Linear) -> str:
        """Why the linear is left as it is, or ''."""
        if why := self.placed(linear.product):
            return why
        if any(linear.weight is head.weight for head in self.found_heads):
            return "its weight is that of a head that is fused with its loss"  # logits that are made when somebody reads them
        if why := self._of_operands(linear.x, linear.weight, linear.product):
            return why
        if self.t > 1 and self._shown(linear.product) == R:
            return "every rank computes all of it, so that its gradient is a sum over ranks yet to be made"
        return ""

    # -- what ranks hold

    def _shown(self, product: fx.Node) -> Placement:
        """The placement of a result, where I and R differ: its own, or that of a view of it."""
        marks = [n.meta[PLACEMENT] for n in (product, *product.users) if PLACEMENT in n.meta]
        return marks[0] if marks else self.placement(product)

    # -- casts

    def note_reads(self, linear: _Linear) -> None:
        """Which values its products read as they are, and which transposed."""
        self.read["plain"] |= {linear.x, *(dgrad.args[0] for dgrad in linear.dgrads)}
        for wgrad in linear.wgrads if self.config.fp8_wgrad else ():
            self.read["turned"].add(wgrad.args[0].args[0])
            if self._is_there(linear.x):
                self.late.setdefault(linear.x, []).append(wgrad)
            else:
                self.read["turned"].add(linear.x)

    def note_reads_of_head(self, head: _Head) -> None:
        """Where forward makes the gradients too, both orientations come from one pass; else backward transposes bytes."""
        self.read["plain"].add(head.x)
        if self.rowwise or head.nodes[-1].target in WHOLES:
            self.read["turned"].add(head.x)

    def _is_there(self, x: fx.Node) -> bool:
        """True if backward recomputes the value (`recompute_activations`), or reads it in its own dtype too (attention's
        output): a cast that is kept would cost memory."""
        if self.config.recompute_activation_func and str(behind_padding(x).target) in self.again:
            return True
        scaled = {n for linear in self.found if not linear.kept for n in linear.wgrads}
        views, readers = [storage_of(x)], set[fx.Node]()
        for view in views:
            later = {n for n in view.users if in_backward(n)}
            views += [n for n in view.users if n not in later and shows_operand(n)]
            readers |= {n for n in later if n.target not in SHAPED and tensors_of(n)}
        return x.target is not TRANSITION and bool(readers - scaled)

    def cast_here(
        self, value: fx.Node, placement: Placement, kept: int, before: fx.Node, turned: bool | None = None
    ) -> _Cast:
        """A forward value in FP8 for one product, in front of it: recomputed in backward, for which nothing is then kept.

        turned: transposed, as products of backward read it.
        """
        late = in_backward(before)
        turned = late if turned is None else turned
        key = (value, kept, late, turned)
        if key not in self.casts:
            build = Builder(self.program, before, before, NAME)
            found = self.largest(build, value, value, placement, kept)
            made = build(quantize, value, found, kept, "e4m3", False, not turned, turned)
            q, qt, scale = (build(operator.getitem, made, i) for i in range(3))
            self.casts[key] = _Cast(None if turned else q, qt if turned else None, scale, "e4m3")
        return self.casts[key]

    def cast(self, value: fx.Node, placement: Placement, kept: int, format: str, before: fx.Node) -> _Cast:
        """`value` [m, k] in FP8, made where the value is; whole where that is gathered.

        placement: of the value. A value that is gathered for scaled products alone is cast before. before: the first product
        that asks, whose module the cast counts for.
        """
        key = (value, kept, format)
        if key not in self.casts:
            source, moved = self._source(value)
            held = moved if moved is not None else placement
            place = min(source.users) if source.op == "placeholder" else source.next
            build = Builder(self.program, place, before if source is not value else source, NAME)
            if source.op == "placeholder" or not in_backward(source):
                build.origin = before
            self.casts[key] = self._cast(build, source, value, held, kept, format)
        return self.casts[key]

    def _source(self, value: fx.Node) -> tuple[fx.Node, Placement | None]:
        """What to cast, and how ranks hold it where the cast is to be gathered."""
        if value.target is not TRANSITION or str(value.args[1])[0] != "S" or str(value.args[2]) not in ("I", "R"):
            return value, None
        scaled = {n for linear in self.found for n in (linear.product, *linear.dgrads, *linear.wgrads)}
        scaled |= {n for head in self.found_heads if not head.kept for n in head.nodes}
        readers = {u for user in value.users for u in ((user,) if user.target is not aten.t.default else user.users)}
        if not self._all_scaled(readers, scaled):
            return value, None
        return value.args[0], Placement.parse(str(value.args[1]), layout_of(self.program, value.args[3]))

    def _all_scaled(self, readers: set[fx.Node], scaled: set[fx.Node]) -> bool:
        kept = {n for linear in self.found if linear.kept for n in (linear.product, *linear.dgrads, *linear.wgrads)}
        if not self.config.fp8_wgrad:
            kept |= {n for linear in self.found for n in linear.wgrads}
        return readers <= scaled - kept

    def _cast(self, build: Builder, source: fx.Node, value: fx.Node, held: Placement, kept: int, format: str) -> _Cast:
        gathered = source is not value
        found = self.largest(build, source, value, held, kept)
        plain = gathered or (kept != COLUMNS and value in self.read["plain"])
        turned = not gathered and kept != ROWS and value in self.read["turned"]
        made = build(quantize, source, found, kept, format, False, plain, turned)
        q, qt, scale = (build(operator.getitem, made, i) for i in range(3))
        if gathered:
            move = (*value.args[3:5], self.axis, self.t)
            q = build(TRANSITION, q, held.tag, "R", *move)
            if held.dim == kept:
                scale = build(TRANSITION, scale, "S0", "R", *move)
        return _Cast(q if plain else None, qt if turned else None, scale, format)

    def turned(self, cast: _Cast, before: fx.Node) -> fx.Node:
        """The transpose of a cast."""
        if cast.qt is None:
            assert cast.q is not None
            cast.qt = Builder(self.program, before, before, NAME)(transposed, cast.q)
        return cast.qt

    # -- products

    def rewrite(self, linear: _Linear) -> None:
        """Its products, read from FP8."""
        product, over_rows, over_columns = linear.product, *((ROWS, COLUMNS) if self.rowwise else (ALL, ALL))
        x_held, w_held, y_held = self.placement(linear.x), self.placement(linear.weight), self.placement(product)
        dy_held = R if y_held == P else y_held
        x = self.cast(linear.x, x_held, over_rows, "e4m3", product)
        w = self.cast_here(linear.weight, w_held, over_rows, product)
        y = self._product(product, x.q, w.q, x, w)
        if linear.bias is not None:
            build = Builder(self.program, product, product, NAME)
            total = build(aten.add.Tensor, y, linear.bias)
            _marked(total, product)
            y = total
        product.replace_all_uses_with(y)
        for dgrad in linear.dgrads:
            dy = self.cast(dgrad.args[0], dy_held, over_rows, self.gradients, dgrad)
            w = self.cast_here(linear.weight, w_held, over_columns, dgrad)
            dgrad.replace_all_uses_with(self._product(dgrad, dy.q, self.turned(w, dgrad), dy, w))
        for wgrad in linear.wgrads if self.config.fp8_wgrad else ():
            dy = self.cast(wgrad.args[0].args[0], dy_held, over_columns, self.gradients, wgrad)
            x = (
                self.cast_here(linear.x, x_held, over_columns, min(self.late[linear.x]))
                if linear.x in self.late
                else self.cast(linear.x, x_held, over_columns, "e4m3", product)
            )
            made = self._product(wgrad, self.turned(dy, wgrad), self.turned(x, wgrad), dy, x)
            wgrad.replace_all_uses_with(made)

    def rewrite_head(self, head: _Head, node: fx.Node) -> None:
        """One of its nodes; all are given in the order of the graph, so that a cast is there for those behind."""
        over_rows, over_columns = (ROWS, COLUMNS) if self.rowwise else (ALL, ALL)
        x_held, w_held, first = self.placement(head.x), self.placement(head.weight), head.nodes[0]
        dtype = head.x.meta[VAL].dtype
        x = self.cast(head.x, x_held, over_rows, "e4m3", first)
        w = self.cast_here(head.weight, w_held, over_rows, node, False)
        if node.target is LOSS:  # which reads statistics alone
            node.args = (x.q, w.q, *node.args[2:])
            return
        operands: tuple[Any, ...] = (x.q, w.q, x.scale, w.scale)
        if node.target is STATS:
            self._head(node, scaled_head.stats, *operands, *node.args[2:], dtype)
            return
        wt = self.cast_here(head.weight, w_held, over_columns, node, True)
        xt = self.cast(head.x, x_held, over_columns, "e4m3", first)
        operands += (self.turned(xt, node), wt.qt, xt.scale, wt.scale, self.gradients)
        if node.target in WHOLES:
            op = scaled_head.wholes[WHOLES.index(node.target)]
            self._head(node, op, *operands, *node.args[2:-1], dtype)
        else:
            op = scaled_head.backwards[BACKWARDS.index(node.target)]
            self._head(node, op, node.args[0], *operands, *node.args[3:], dtype)
        self.changes += 3

    def _head(self, old: fx.Node, target: Any, *args: Any) -> None:
        made = Builder(self.program, old, old, NAME)(target, *args)
        old.replace_all_uses_with(_marked(made, old))

    def _product(self, old: fx.Node, a: fx.Node | None, b: fx.Node | None, left: _Cast, right: _Cast) -> fx.Node:
        build = Builder(self.program, old, old, NAME)
        formats = left.format, right.format
        made = build(scaled_mm, a, b, left.scale, right.scale, *formats, old.meta[VAL].dtype)
        self.changes += 1
        return _marked(made, old)

    # -- the report

    def say(self) -> None:
        """Notes on what runs in FP8 and what does not, like linears together."""
        texts: Counter[tuple[str, str]] = Counter()
        first: dict[tuple[str, str], fx.Node] = {}
        for linear in self.found:
            text = f"left in {_name(linear.product)}: {linear.kept}" if linear.kept else self._what(linear)
            key = fold(fqn_of(linear.product)), text
            texts[key] += 1
            first.setdefault(key, linear.product)
        for head in self.found_heads:
            product = head.nodes[0]
            text = f"left in {_name(product)}: {head.kept}" if head.kept else self._what(head)
            texts[fold(fqn_of(product)), text] += 1
            first.setdefault((fold(fqn_of(product)), text), product)
        for node in self.program.graph.nodes:
            if (
                cost_kind(op_name(node)) == MATMUL
                and not in_backward(node)
                and node.target not in LINEARS
                and node.target not in _OF_HEADS
                and self._reads_weight(node)
            ):
                key = fold(fqn_of(node)), f"left in {_name(node)}: {op_name(node)} has no form in FP8"
                texts[key] += 1
                first.setdefault(key, node)
        for key, count in texts.items():
            self.program.note("fp8", key[1] + (f"; {count} alike" if count > 1 else ""), first[key])

    def _reads_weight(self, node: fx.Node) -> bool:
        return any(self._is_weight(a.args[0] if a.target is aten.t.default else a) for a in node.all_input_nodes)

    def _what(self, linear: _Linear | _Head) -> str:
        parts = ["forward", "dgrad", "wgrad"]
        if isinstance(linear, _Linear):
            parts = ["forward", *(["dgrad"] if linear.dgrads else [])]
            parts += ["wgrad"] if linear.wgrads and self.config.fp8_wgrad else []
        gradients = f", gradients {self.gradients}" if len(parts) > 1 else ""
        scale = "a scale for each row along the summed dim" if self.rowwise else "one scale a matrix"
        return f"{', '.join(parts)} in FP8: e4m3{gradients}; {scale}"


def _is_product(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, mm_fp32)


def _marked(made: fx.Node, old: fx.Node) -> fx.Node:
    for key in (PLACEMENT, PHASE):
        if key in old.meta:
            made.meta[key] = old.meta[key]
    return made


def _name(node: fx.Node) -> str:
    value = node.meta[VAL]
    return str((value[0] if isinstance(value, (tuple, list)) else value).dtype).removeprefix("torch.")
