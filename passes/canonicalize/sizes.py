"""Sizes: every size is computed from those of graph inputs, at the top; data decides how many rows are selected.

Before:  %n = sym_size(%embedding, 1); %m = mul(%n, 4); %r = arange(%m)
After:   %s = sym_size(%input_ids, 1); %m = mul(%s, 4); %r = arange(%m)
Legal because: the symbolic value of each size is known, and its symbols are sizes of inputs.

Selecting by data becomes indexing with `megafx.rows`, whose number of rows is a size like others from here on.

Before:  %n = nonzero(%mask)                              # [u0 1]
         %y = index(%x, [%m])                             # %m a mask: [u1 h]
         %w = where(%m)
After:   %n = rows(%mask, 'u0')                           # [s9 1]
         %r = rows(%m, 'u1'); %c = select(%r, 1, 0); %y = index(%x, [%c])
         %w[i] = select(%r, 1, i)
A whole number that is read from a tensor is the size of a result of `megafx.length`, rows that are repeated are those of
`megafx.repeats`, bincount adds ones to zeros of such a length, and a check for each relation that the trace relies on is an
output of the graph.

Before:  %n = item(%count); %a = arange(%n); %y = add(%x, %a)
After:   %l = length(%count, 'u0'); %k = check_sizes([%l], [0], [%s], 'n0 == s0', ...); %a = arange(%s); %y = add(%x, %a)
Legal because: that is how these ops are defined, and sizes that a check compares are equal behind it. A write to rows that a
mask selects (`y[mask] = rows`) becomes one to their indices in the same way. What is written without having the size of the
rows is chosen with `where` (names.py).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import SymTypes
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

import megafx.kernels.lengths
import megafx.kernels.nonzero  # noqa: F401  registers the ops
from megafx.errors import CaptureError, in_part, or_leave_eager
from megafx.ir.data_sizes import DataShapeEnv, same_rows
from megafx.ir.nodes import MASKS, NUMBERS, argument, aten_ops, replace
from megafx.ir.program import VAL, Builder, Output, fqn_of, located, recompute_val, source_of
from megafx.ir.sizes import RowCount, row_sources
from megafx.ops.eager_call import name_sizes
from megafx.passes.canonicalize.editor import BY, Editor, arguments, respell
from megafx.passes.experts.expert_units import chosen_among

aten = torch.ops.aten
rows = torch.ops.megafx.rows.default
length, repeats = torch.ops.megafx.length.default, torch.ops.megafx.repeats.default
check = torch.ops.megafx.check_sizes.default
eager_call = torch.ops.megafx.eager_call.default
_RELATIONS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Le: "<=", sympy.Lt: "<", sympy.Ge: ">=", sympy.Gt: ">"}
_PRINTER = PythonPrinter()
_UNKNOWN = 128  # what is priced for a number of which nothing is known
_CHOICES = aten_ops("topk sort sort.stable max.dim")  # of several results
_ORDERS = aten_ops("argmax argsort argsort.stable")
_FAR = 64  # values looked at behind a mask: it is an estimate
_OF_SOME_ROWS = aten_ops(
    "mean mean.dim var var.dim var.correction std std.dim std.correction var_mean var_mean.dim var_mean.correction std_mean "
    "std_mean.dim std_mean.correction amax amin aminmax max max.dim min min.dim median median.dim argmax argmin logsumexp"
)
_LOSSES = aten_ops(
    "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div "
    "binary_cross_entropy_with_logits soft_margin_loss hinge_embedding_loss margin_ranking_loss cosine_embedding_loss"
)
_DIVISIONS = aten_ops("div.Tensor div.Scalar div_.Tensor div_.Scalar")
_REPEATS = (aten.repeat_interleave.self_Tensor, aten.repeat_interleave.Tensor)
_PARTS = aten_ops("where nonzero_numpy")
_WHOLES = aten_ops("nonzero argwhere")
_WRITES = aten_ops("index_put index_put_")


def name_sizes_of_data(editor: Editor) -> int:
    """Rewrite every op that selects by data or reads a number, and give all values that follow sizes with hints."""
    env = editor.program.fake_mode.shape_env
    if not isinstance(env, DataShapeEnv):
        return 0
    nodes = [n for n in editor.graph.nodes if n.op == "call_function"]
    makers = _makers(nodes, env)
    _refuse_means_of_none(nodes, env)
    selecting = _Selecting(editor, env, makers)
    for node in nodes:
        if node.target is aten.slice.Tensor:
            _follow_slice(env, node, makers.get(node, []))
    env.rely({s for n, made in makers.items() if n.target not in (*NUMBERS, *_REPEATS, eager_call) for s in made})
    count = sum(selecting.rewrite(n) for n in nodes if _unbacked(n, env) or n in makers or n.target in _WRITES)
    if count:
        env.name({s: str(selecting.same.get(s, s)) for made in makers.values() for s in made})
        for node in editor.graph.nodes:
            if node.op == "call_function" and _unbacked(node, env):
                node.meta[VAL] = _with_sizes(editor, env, node.meta[VAL])
                _try_with_hints(editor, env, node)
        editor.know_sizes()
        _price(editor, env)
    return count


def _refuse_means_of_none(nodes: list[fx.Node], env: DataShapeEnv) -> None:
    """Where code skips work on no rows, the graph does that work: what is NaN or an error of no rows is not left out."""
    asked = {s for symbol in env.asked_for for s in env.replace(symbol).free_symbols}
    if not asked:
        return

    def about(value: Any) -> set[sympy.Symbol]:
        parts = pytree.tree_leaves(value)
        sizes = [
            n for x in parts for n in (x.shape if isinstance(x, torch.Tensor) else (x,)) if isinstance(n, SymTypes)
        ]
        return {s for n in sizes for s in env.replace(n.node.expr).free_symbols} & asked

    for node in nodes:
        tensors = [n.meta[VAL] for n in node.all_input_nodes if isinstance(n.meta.get(VAL), torch.Tensor)]
        by = node.args[1] if node.target in _DIVISIONS else None
        none = (
            about(by.meta.get(VAL))
            if isinstance(by, fx.Node) and not isinstance(by.meta.get(VAL), torch.Tensor)
            else set()
        )
        if node.target in _OF_SOME_ROWS or (node.target in _LOSSES and argument(node, "reduction") in (None, 1)):
            none |= about(tensors) - about(node.meta.get(VAL))
        if none:
            found = f"code asks whether there are any rows, and {node.target} of none is no number: the graph would compute it"
            fix = or_leave_eager("compute sums, and divide by `max(count, 1)`", fqn_of(node))
            raise in_part(CaptureError(found, fix=fix, **located(node)))


def _makers(nodes: list[fx.Node], env: DataShapeEnv) -> dict[fx.Node, list[sympy.Symbol]]:
    """The symbols of whole numbers that a node makes, as no node before has them: what it reads, sizes of its result. (Its
    value may have other sizes by now, to which the trace has found these to be equal.)"""
    seen: set[sympy.Symbol] = set()
    makers = {}
    for node in nodes:
        symbols = [n.node._expr for n in _sizes_of(node) if n.node._expr.is_Symbol]
        new = [s for s in symbols if env.is_unbacked_symint(s) and s not in seen]
        if new:
            makers[node] = list(dict.fromkeys(new))
            seen |= {*new}
    return makers


def _follow_slice(env: DataShapeEnv, node: fx.Node, made: list[sympy.Symbol]) -> None:
    """x[a:b] has b - a rows if 0 <= a <= b <= len(x), which the graph checks; torch has a symbol of its own for that number."""
    x, dim, start, end = arguments(node, "self", "dim", "start", "end")
    step = argument(node, "step")
    value = x.meta[VAL]
    whole = value.shape[dim]
    first, last = ((n.meta[VAL] if isinstance(n, fx.Node) else n) for n in (start or 0, end))
    last = whole if last is None or (isinstance(last, int) and last == sys.maxsize) else last
    bounds = [env.whole(n) for n in (first, last, whole)]
    of_data = any(env.of_data(n) for n in bounds[:2])
    if step != 1 or not of_data or any(n.could_extract_minus_sign() or n.is_negative for n in bounds):
        return
    (first, last, whole) = bounds
    env.demand([sympy.Le(first, last), sympy.Le(last, whole)], {s: last - first for s in made})


def _with_sizes(editor: Editor, env: DataShapeEnv, value: Any) -> Any:
    """The value with named sizes in place of those of the trace."""

    def size(n: Any) -> Any:
        return env.create_symintnode(env.with_names(env.whole(n)), hint=None) if isinstance(n, torch.SymInt) else n

    def renamed(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return size(x)
        with editor.program.fake_mode:
            made = torch.empty_strided([*map(size, x.shape)], [*map(size, x.stride())], dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)

    return pytree.tree_map(renamed, value)


def _try_with_hints(editor: Editor, env: DataShapeEnv, node: fx.Node) -> None:
    """Refuse an op whose fake is another at sizes with hints than in the trace: passes compute it on such fakes."""
    value = node.meta[VAL]
    if node.target in NUMBERS or _unbacked(node, env):
        return  # the latter are refused where their sizes are used
    try:
        recompute_val(editor.program, node)
        pairs = zip(pytree.tree_leaves(value), pytree.tree_leaves(node.meta[VAL]), strict=True)
        if all(not isinstance(a, torch.Tensor) or editor.same_shape(a, b) for a, b in pairs):
            return
    except Exception:  # torch's own text is about symbols
        pass
    raise in_part(
        CaptureError(
            f"{node.target} of sizes that are read from tensors cannot be followed: how its result is laid out depends on them",
            fix=or_leave_eager(
                "use sizes of inputs here, or compute with masks (torch.where) on the whole tensor", fqn_of(node)
            ),
            **located(node),
        )
    )


def check_sizes_of_data(editor: Editor) -> int:
    """Have the graph check what the trace relies on between numbers that are read from tensors and other sizes."""
    env = editor.program.fake_mode.shape_env
    if not isinstance(env, DataShapeEnv):
        return 0
    sources = row_sources(editor.graph)
    last: fx.Node | None = None
    done = 0
    for relation in env.relied_on:
        named = env.with_names(relation, settled=False)
        symbols = sorted(named.free_symbols, key=str)
        if any(s in env.traced and s not in sources for s in symbols) or any(map(env.is_unbacked_symint, symbols)):
            continue  # of a number that nothing but a check has read
        if named == sympy.true:
            continue
        read = [sources[s] for s in symbols if s in sources]
        sizes = [editor.size_node(editor.program.sizes.of_expr(s)) for s in symbols if s not in sources]
        names = {s: sympy.Symbol(f"n{i}") for i, s in enumerate(s for s in symbols if s in sources)}
        names |= {s: sympy.Symbol(f"s{i}") for i, s in enumerate(s for s in symbols if s not in sources)}
        text = _text(named.xreplace(names))
        latest = max(node for node, _ in read)
        where = f"{source_of(latest) or 'the model'} relies on {relation}"
        behind = max(n for n in (latest, *sizes, last) if isinstance(n, fx.Node))
        emit = Builder(editor.program, behind.next, latest, BY)
        last = emit(check, [n for n, _ in read], [d for _, d in read], sizes, text, where, last)
        done += 1
    if last is not None:
        editor.program.outputs.append(Output("check", "check_sizes"))
        output = editor.program.output_node()
        output.args = ((*output.args[0], last),)
    return done


def _text(relation: sympy.Basic) -> str:
    if isinstance(relation, sympy.Or):
        return " or ".join(map(_text, relation.args))
    return f" {_RELATIONS[type(relation)]} ".join(map(_PRINTER.doprint, relation.args))


class _Selecting:
    """found: (mask, name of the size) -> the rows of that mask."""

    def __init__(self, editor: Editor, env: DataShapeEnv, makers: Mapping[fx.Node, list[sympy.Symbol]]) -> None:
        self.editor, self.env, self.same, self.makers = editor, env, same_rows(env), makers
        self.found: dict[tuple[fx.Node, str], fx.Node] = {}

    def rewrite(self, node: fx.Node) -> bool:
        if node.target in NUMBERS:
            for symbol in self.makers.get(node, ()):
                self.editor.at(node)(length, node.args[0], str(symbol))
            return node in self.makers
        if node.target is eager_call:
            return node in self.makers and self._name_results(node)
        if node.target in _REPEATS:
            return node in self.makers and self._repeat(node, str(self.makers[node][0]))
        if node.target is aten.bincount.default:
            return node in self.makers and self._count(node, str(self.makers[node][0]))
        if node.target in _WHOLES:
            return replace(node, self._rows(node, node.args[0], node.meta[VAL].shape[0]))
        if node.target in _PARTS:
            if any(user.target is not operator.getitem for user in node.users):
                return False
            parts = self._columns(node, node.args[0], node.meta[VAL][0].shape[0], range(len(node.meta[VAL])))
            for user in list(node.users):
                replace(user, parts[user.args[1]])
            node.graph.erase_node(node)
            return True
        if node.target is aten.masked_select.default:
            return self._masked_select(node)
        if node.target is aten.index.Tensor:
            at = [i for i, a in enumerate(node.args[1]) if a is not None]
            if self._has_mask(node):
                together = at == [*range(at[0], at[-1] + 1)]  # else what is selected comes first
                size = node.meta[VAL].shape[at[0] if together else 0]
                return respell(node, node.target, (node.args[0], self._indices(node, size)))
        if node.target in _WRITES and self._has_mask(node):
            size = next((n for n in argument(node, "values").meta[VAL].shape if self._name(n)), None)
            if size is not None:
                return respell(node, node.target, (node.args[0], self._indices(node, size), *node.args[2:]))
        return False

    def _repeat(self, node: fx.Node, name: str) -> bool:
        """repeat_interleave(x, counts) -> index_select(x, dim, repeats(counts)); without x its indices."""
        emit = self.editor.at(node)
        if node.target is aten.repeat_interleave.Tensor:
            return replace(node, emit(repeats, node.args[0], name))
        x, counts, dim = arguments(node, "self", "repeats", "dim")
        if dim is None:
            x, dim = emit(aten.flatten.using_ints, x, 0, -1), 0
        if counts.meta[VAL].dim() == 0 or counts.meta[VAL].shape[0] == 1:
            counts = emit(aten.expand.default, counts, [self.editor.arg(x.meta[VAL].shape[dim])])
        return respell(node, aten.index_select.default, (x, dim, emit(repeats, counts, name)))

    def _count(self, node: fx.Node, name: str) -> bool:
        """bincount(x, weights, minlength) -> index_add(zeros(n), 0, x, weights or ones), n = max(x.max() + 1, minlength):
        minlength where x are indices of topk, argmax or the like among no more."""
        emit = self.editor.at(node)
        x, weights, least = arguments(node, "self", "weights", "minlength")
        made = node.meta[VAL]
        x = emit(aten.to.dtype, x, torch.int64)
        known = 0 < chosen_among(x) <= (least or 0)  # of experts, say: ranks that have a part of x know it, too
        least = emit(aten.full.default, [] if known else [1], least or 0, dtype=torch.int64, device=made.device)
        greatest = (
            least if known else emit(aten.amax.default, emit(aten.cat.default, [emit(aten.add.Tensor, x, 1), least]))
        )
        numbers = emit(length, greatest, name)
        # ranks' summands are no integers
        exact = torch.float64 if known and not made.dtype.is_floating_point else made.dtype
        like = {"dtype": exact, "device": made.device}
        size = made.shape[0] if not self._name(made.shape[0]) else emit(aten.sym_size.int, numbers, 0)
        zeros = emit(aten.full.default, [size if isinstance(size, fx.Node) else self.editor.arg(size)], 0, **like)
        shape = [self.editor.arg(x.meta[VAL].shape[0])]
        added = (
            emit(aten.full.default, shape, 1, **like)
            if weights is None
            else emit(aten.detach.default, emit(aten.to.dtype, weights, made.dtype))
        )
        if exact != made.dtype:
            return respell(node, aten.to.dtype, (emit(aten.index_add.default, zeros, 0, x, added), made.dtype))
        return respell(node, aten.index_add.default, (zeros, 0, x, added))

    def _name_results(self, node: fx.Node) -> bool:
        """The sizes of the results of an eager module that its code decides."""
        of_symbol = lambda s: str(self.same.get(s, s))
        name_sizes(node.args[4], [[getattr(n, "node", n) for n in x.shape] for x in node.meta[VAL][2:]], of_symbol)
        for symbol in self.makers[node]:
            self.env.row_count(of_symbol(symbol))
        return True

    def _name(self, size: Any) -> str:
        """The name of a size that data decides; '' for other sizes."""
        if not isinstance(size, torch.SymInt):
            return ""
        expr = self.env.replace(size.node.expr)
        expr = self.same.get(expr, expr)
        return str(expr) if expr.is_Symbol and self.env.is_unbacked_symint(expr) else ""

    def _rows(self, where: fx.Node, mask: Any, size: Any) -> fx.Node:
        """The rows of a mask, made once, before `where`. (A name that is no single symbol is refused when its size is used.)"""
        made = [str(self.same.get(s, s)) for s in self.makers.get(where, ())]
        key = (mask, made[0] if made else self._name(size) or str(size))
        if mask.meta[VAL].dtype != torch.bool:
            mask = self.editor.at(where)(aten.ne.Scalar, mask, 0)
        if key not in self.found:
            self.found[key] = self.editor.at(where)(rows, mask, key[1])
        return self.found[key]

    def _columns(self, where: fx.Node, mask: Any, size: Any, indices: range) -> list[fx.Node]:
        found = self._rows(where, mask, size)
        return [self.editor.at(where)(aten.select.int, found, 1, i) for i in indices]

    def _masked_select(self, node: fx.Node) -> bool:
        x, mask = node.args
        emit = self.editor.at(node)
        both: Any = torch.broadcast_shapes(x.meta[VAL].shape, mask.meta[VAL].shape)
        shape = [self.editor.arg(n) for n in both]
        x, mask = (emit(aten.expand.default, v, shape) for v in (x, mask))
        columns = self._columns(node, mask, node.meta[VAL].shape[0], range(len(both)))
        return respell(node, aten.index.Tensor, (x, columns))

    def _has_mask(self, node: fx.Node) -> bool:
        indices = node.args[1]
        return any(a is not None and a.meta[VAL].dtype in MASKS for a in indices)

    def _indices(self, node: fx.Node, size: Any) -> list[Any]:
        """The indices with a column of rows for each dim of each mask."""
        made: list[Any] = []
        for a in node.args[1]:
            mask = a is not None and a.meta[VAL].dtype in MASKS
            made += self._columns(node, a, size, range(a.meta[VAL].dim())) if mask else [a]
        return made


def _sizes_of(node: fx.Node) -> list[torch.SymInt]:
    """The sizes of the node's value that are no constants; a number itself."""
    value = node.meta.get(VAL)
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = (n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return [n for n in sizes if isinstance(n, torch.SymInt)]


def _unbacked(node: fx.Node, env: DataShapeEnv) -> bool:
    """True if a size in the node's value is one of data as export has it."""
    return any(env.of_data(n.node.expr) for n in _sizes_of(node))


def _price(editor: Editor, env: DataShapeEnv) -> None:
    """Note for each number of rows what it is an equal share of: masks made of the same choice share its elements, numbers
    that are read from tensors the size that they add up to."""
    sizes, sources = editor.program.sizes, row_sources(editor.graph)
    parts = {
        s: (total, len(each)) for each, total in map(_parts, env.relied_on) for s in each if not env.of_data(total)
    }
    masks = {symbol: node for symbol, (node, _) in sources.items() if node.target is rows}
    names = {count.node._expr: name for name, count in env.row_counts.items()}
    choices = {symbol: _choice(node.args[0]) for symbol, node in masks.items()}
    for symbol in sources:
        if symbol in choices:
            among = math.prod(sizes.shape(choices[symbol].meta[VAL]))
            shares = list(choices.values()).count(choices[symbol])
        else:
            total, shares = parts.get(env.traced[symbol], (sympy.Integer(_UNKNOWN), 1))
            among = sizes.of_expr(total)
        sizes.row_counts[symbol] = RowCount(names[symbol], among, shares)


def _parts(relation: sympy.Basic) -> tuple[list[sympy.Symbol], sympy.Expr]:
    """(u0 and u1, n) of u0 + u1 == n."""
    for sides in (relation.args, relation.args[::-1]):
        parts = sympy.Add.make_args(sides[0])
        if (
            isinstance(relation, sympy.Eq)
            and all(p.is_Symbol for p in parts)
            and not set(parts) & sides[1].free_symbols
        ):
            return list(parts), sides[1]
    return [], sympy.Integer(0)


def _choice(mask: fx.Node) -> fx.Node:
    """The indices of a topk, sort or argmax that a mask is made of; the mask itself where it is made of none."""
    seen, todo = {mask}, [mask]
    while todo and len(seen) < _FAR:
        node = todo.pop(0)
        if node.target in _ORDERS:
            return node
        for operand in node.all_input_nodes:
            if operand.target in _CHOICES:
                return node
            if operand not in seen and isinstance(operand.meta.get(VAL), torch.Tensor):
                seen.add(operand)
                todo.append(operand)
    return mask


# -- sizes of inputs


def root_sizes(editor: Editor) -> int:
    """Replace each use of a size by an int or by the node that the inputs' sizes give. SymFloats are computed from those."""
    count = 0
    rooted: dict[fx.Node, Any] = {}

    def root(size: fx.Node) -> Any:
        if not isinstance(size.meta.get(VAL), (torch.SymInt, int)) or isinstance(size.meta[VAL], bool):
            return size
        if size not in rooted:
            value = size.meta[VAL]
            constant = isinstance(value, torch.SymInt) and value.node.expr.is_Integer
            rooted[size] = editor.arg(int(value.node.expr) if constant else value)
        return rooted[size]

    for node in list(editor.graph.nodes):
        if node.op not in ("call_function", "output"):
            continue
        if node.op == "call_function" and isinstance(node.meta.get(VAL), (torch.SymInt, int)):
            continue  # left without users
        if any(not isinstance(n.meta.get(VAL), torch.Tensor) for n in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), root)
            if pytree.tree_leaves((node.args, dict(node.kwargs))) != pytree.tree_leaves((args, dict(kwargs))):
                node.args, node.kwargs = args, kwargs
                count += 1
    return count


def refuse_numbers_from_data(editor: Editor) -> None:
    """A number read from a tensor that is no size (a float, a truth value): a traced backward cannot compute with it.

    What selects by data and is no `rows` by now has a size that something fixed: it would be right for these data alone.
    """
    for node in editor.graph.nodes:
        if node.op == "call_function" and (node.target in _WHOLES or node.target is aten.masked_select.default):
            raise in_part(
                CaptureError(
                    f"{node.target} selects by data, and what follows needs a fixed number of rows",
                    fix=or_leave_eager("compute with masks (torch.where) instead of selecting by data", fqn_of(node)),
                    **located(node),
                )
            )
        if node.op == "call_function" and node.target in NUMBERS:
            raise in_part(
                CaptureError(
                    "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `.numpy()`, `int(tensor)`)",
                    fix=or_leave_eager("keep it a tensor, or pass the number as an argument of the call", fqn_of(node)),
                    **located(node),
                )
            )
