"""Ops whose dims depend on their arguments: small functions Call -> rule string, by family.

Each family writes the same factor strings as the table (dims are f0, f1, ... by position), so that one binder serves all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megafx.aten_rules import RULES
from megafx.sizes import FIRST_PRIME

Shape = tuple[int, ...]


class Arg(NamedTuple):
    """A tensor argument. cut: the dim known to be sharded (type checking on local shapes), or -1."""

    shape: Shape
    active: bool = True
    cut: int = -1


class Call(NamedTuple):
    """One call of an op by schema: argument names, values (Arg, numbers, tuples, strings for the rest), result shapes."""

    op: str
    names: tuple[str, ...]
    values: tuple[Any, ...]
    results: tuple[Any, ...]  # Shape, or None for a result that is no tensor
    several: bool = False  # a tuple of results

    def get(self, name: str, default: Any = None) -> Any:
        return self.values[self.names.index(name)] if name in self.names else default

    @property
    def first(self) -> Arg:
        """The first tensor argument."""
        return next(v for v in self.values if isinstance(v, Arg))

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """A dim argument, counted from the front."""
        ndim = len(self.first.shape) if ndim is None else ndim
        return int(self.get(name, 0)) % max(ndim, 1)


class Part(NamedTuple):
    """A dim that holds elements [start, end) of factor `factor`."""

    factor: str
    start: int
    end: int


@dataclass(frozen=True)
class Row:
    """A rule string with what strings cannot say.

    why: factor -> reason why it is not sharded (with or without '!' in the string); parts: operand (-1: result) -> Part;
    partials: further rows (operands that are partial, 'P' or 'R' for each result).
    """

    text: str
    why: dict[str, str] = field(default_factory=dict)
    parts: dict[int, Part] = field(default_factory=dict)
    partials: tuple[tuple[tuple[int, ...], str], ...] = ()


Family = Callable[[Call], "Row | str | None"]
FAMILIES: dict[str, Family] = {}


def family(*ops: str) -> Callable[[Family], Family]:
    def register(function: Family) -> Family:
        for op in ops:
            FAMILIES[op if "." in op.partition(".")[2] else op + ".default"] = function
        return function

    return register


def dims(shape: Shape, whole: Any = (), start: int = 0) -> str:
    """'f0 f1! f2' for a shape; `whole` are the positions marked '!'."""
    return " ".join(f"f{i + start}" + ("!" if i in whole else "") for i in range(len(shape)))


# -- views: mapped by views.py, not by factors

_VIEW_OPS = (
    "view.default reshape.default _unsafe_view.default unsqueeze.default squeeze.default squeeze.dim squeeze.dims "
    "flatten.using_ints unflatten.int ravel.default view_as.default reshape_as.default view_copy.default "
    "_reshape_alias.default"
)
VIEWS = frozenset(f"aten.{op}" for op in _VIEW_OPS.split())


# -- moving and repeating dims


@family(
    "aten.permute", "aten.transpose.int", "aten.t", "aten.numpy_T", "aten.mT", "aten.mH", "aten.swapaxes",
    "aten.swapdims", "aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.adjoint",
)  # fmt: skip
def _permute(call: Call) -> str:
    n = len(call.first.shape)
    order = list(range(n))
    op = call.op.split(".")[1]
    if op == "permute":
        order = [d % n for d in call.get("dims")]
    elif op in ("movedim", "moveaxis"):
        source, target = call.get("source"), call.get("destination")
        source, target = [(x,) if isinstance(x, int) else x for x in (source, target)]
        order = [d for d in order if d not in {s % n for s in source}]
        for at, d in sorted((b % n, a % n) for a, b in zip(source, target, strict=True)):
            order.insert(at, d)
    elif op == "numpy_T":
        order.reverse()
    elif n >= 2:
        a, b = {"t": (0, 1)}.get(op, (-2, -1))
        for name_a, name_b in (("dim0", "dim1"), ("axis0", "axis1")):
            a, b = call.get(name_a, a), call.get(name_b, b)
        order[a], order[b] = order[b], order[a]
    return f"lin: {dims(call.first.shape)} -> {' '.join(f'f{d}' for d in order)}"


@family("aten.expand", "aten.broadcast_to", "aten.expand_copy", "aten.expand_as")
def _expand(call: Call) -> str:
    """An expanded dim is a factor of the result alone: sharding it costs nothing."""
    out = call.results[0]
    other = ", *" if "expand_as" in call.op else ""
    return f"lin: {dims(call.first.shape, start=len(out) - len(call.first.shape))}{other} -> {dims(out)}"


@family("aten.repeat", "aten.tile")
def _repeat(call: Call) -> Row:
    """n repeats of a dim are a merged dim: (repeat, dim)."""
    repeats = call.get("repeats") or call.get("dims")
    out, lead = call.results[0], len(call.results[0]) - len(call.first.shape)
    repeats = (1,) * (len(out) - len(repeats)) + tuple(repeats)
    entries = [f"r{i}" if i < lead else f"f{i}" if r == 1 else f"(r{i} f{i})" for i, r in enumerate(repeats)]
    why = {f"r{i}": "the dim is repeated whole" for i in range(len(out))}
    return Row(f"lin: {dims(call.first.shape, start=lead)} -> {' '.join(entries)}", why)


@family("aten.repeat_interleave.self_int")
def _repeat_interleave(call: Call) -> Row | None:
    if call.get("dim") is None:
        return None
    d, shape = call.dim(), call.first.shape
    out = [f"(f{i} r)" if i == d and call.get("repeats") != 1 else f"f{i}" for i in range(len(shape))]
    return Row(f"lin: {dims(shape)} -> {' '.join(out)}", {"r": "each element is repeated whole"})


# -- parts of dims


@family("aten.slice.Tensor", "aten.narrow", "aten.slice_copy.Tensor")
def _slice(call: Call) -> Row | str:
    shape, d = call.first.shape, call.dim()
    n, out = shape[d], call.results[0][d]
    plain = f"lin: {dims(shape)} -> {dims(shape)}"
    if n == out:
        return plain
    start = call.get("start") or 0
    whole = f"lin: {dims(shape, (d,))} -> {dims(shape, (d,)).replace(f'f{d}!', '1')}"
    if not isinstance(start, int) or max(abs(start), n) >= FIRST_PRIME:
        return Row(whole, {f"f{d}": "a slice of a dim of dynamic length"})
    if call.get("step", 1) != 1:
        return Row(whole, {f"f{d}": "a slice with a step"})
    start = min(start + n if start < 0 else start, n)
    return Row(plain, parts={-1: Part(f"f{d}", start, start + out)})


@family("aten.select.int", "aten.select_copy.int")
def _select(call: Call) -> Row:
    shape, d = call.first.shape, call.dim()
    left = " ".join(f"f{i}" for i in range(len(shape)) if i != d)
    return Row(f"lin: {dims(shape, (d,))} -> {left}", {f"f{d}": "one element of the dim is selected"})


@family("aten.cat", "aten.concat", "aten.concatenate")
def _cat(call: Call) -> Row | None:
    tensors = call.get("tensors")
    if any(len(a.shape) != len(call.results[0]) for a in tensors):
        return None  # legacy: empty tensors of one dim are dropped
    d = call.dim(ndim=len(call.results[0]))
    parts, at = {}, 0
    for i, a in enumerate(tensors):
        parts[i] = Part(f"f{d}", at, at + a.shape[d])
        at += a.shape[d]
    text = f"lin: {', '.join('+' + dims(a.shape) for a in tensors)} -> {dims(call.results[0])}"
    if at >= FIRST_PRIME:
        return Row(text, {f"f{d}": "concatenation along a dim of dynamic length"}, parts)
    return Row(text, parts=parts)


@family("aten.stack")
def _stack(call: Call) -> str:
    shape = call.get("tensors")[0].shape
    out = [f"f{i}" for i in range(len(shape))]
    out.insert(call.dim(ndim=len(shape) + 1), "1")
    return f"lin: {', '.join('+' + dims(shape) for _ in call.get('tensors'))} -> {' '.join(out)}"


@family("aten.slice_backward", "aten.select_backward")
def _part_backward(call: Call) -> Row:
    out = call.results[0]
    d = call.dim(ndim=len(out))
    grad = [f"f{i}" for i in range(len(out))]
    if "select" in call.op:
        grad.pop(d)
    elif call.first.shape[d] != out[d]:
        grad[d] = "1"
    elif call.first.shape == out:
        return Row(f"lin: {' '.join(grad)} -> {' '.join(grad)}")
    return Row(f"lin: {' '.join(grad)} -> {dims(out, (d,))}", {f"f{d}": "the gradient of a part of the dim"})


@family("aten.slice_scatter", "aten.select_scatter")
def _part_scatter(call: Call) -> Row:
    shape, d = call.first.shape, call.dim()
    source = [f"f{i}" for i in range(len(shape))]
    if "select" in call.op:
        source.pop(d)
    else:
        source[d] = "1"
    text = f"lin: +{dims(shape, (d,))}, +{' '.join(source)} -> {dims(shape, (d,))}"
    return Row(text, {f"f{d}": "a part of the dim is replaced"})


@family("aten.pad", "aten.constant_pad_nd")
def _pad(call: Call) -> Row:
    shape, out = call.first.shape, call.results[0]
    whole = tuple(i for i in range(len(shape)) if shape[i] != out[i])
    constant = call.get("mode", "constant") == "constant"
    linear = not constant or not call.get("value")
    right = " ".join("1" if i in whole else f"f{i}" for i in range(len(out)))
    why = {f"f{i}": "the dim is padded" for i in whole}
    return Row(f"{'lin' if linear else 'nl'}: {dims(shape, whole)} -> {right}", why)


@family("aten.flip", "aten.roll", "aten.fliplr", "aten.flipud")
def _reorder(call: Call) -> Row:
    shape = call.first.shape
    named = {"aten.fliplr.default": (1,), "aten.flipud.default": (0,)}.get(call.op, call.get("dims"))
    moved = tuple(d % len(shape) for d in named) if named else tuple(range(len(shape)))
    why = {f"f{d}": "elements move along the dim" for d in moved}
    return Row(f"lin: {dims(shape, moved)} -> {dims(shape, moved)}", why)


# -- along a dim

_ALONG_NONLINEAR = "softmax.int log_softmax.int _softmax _log_softmax cumprod logcumsumexp _safe_softmax"


def _dim_whole(call: Call, kind: str, operands: int = 1) -> Row:
    shape, d = call.first.shape, call.dim()
    text = dims(shape, (d,))
    results = "; ".join([text] * len(call.results))
    why = {f"f{d}": f"{call.op.split('.')[1].lstrip('_')} runs along the dim"}
    return Row(f"{kind}: {', '.join([text] * operands)} -> {results}", why)


@family(*(f"aten.{op}" for op in _ALONG_NONLINEAR.split()), "aten.cummax", "aten.cummin", "aten.sort", "aten.argsort")
def _along(call: Call) -> Row:
    return _dim_whole(call, "nl")


@family("aten.cumsum")
def _cumsum(call: Call) -> Row:
    return _dim_whole(call, "lin")


@family("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def _softmax_backward(call: Call) -> Row:
    return _dim_whole(call, "nl[0]", 2)


@family("aten.glu", "aten.topk", "aten.kthvalue", "aten.mode")
def _resized(call: Call) -> Row:
    """The dim comes out with another length, or none."""
    shape, d = call.first.shape, call.dim()
    out = [f"f{i}" for i in range(len(shape))]
    out[d] = "1"
    if call.results[0] and len(call.results[0]) < len(shape):
        out.pop(d)
    results = "; ".join([" ".join(out)] * len(call.results))
    why = {f"f{d}": f"{call.op.split('.')[1]} runs along the dim"}
    return Row(f"nl: {dims(shape, (d,))} -> {results}", why)


@family("aten.log_sigmoid_forward", "aten.log_sigmoid_backward")
def _log_sigmoid(call: Call) -> str:
    """The buffer between forward and backward is as large as the input on CPU, empty on CUDA."""
    buffer = call.results[-1] if "forward" in call.op else call.get("buffer").shape
    kept = "..." if buffer == call.first.shape else "*"
    return f"nl: ... -> ...; {kept}" if "forward" in call.op else f"nl[0]: ..., ..., {kept} -> ..."


# -- reductions

_SUMS = "sum.dim_IntList sum.default mean.dim mean.default"
_OTHER_REDUCTIONS = (
    "amax amin max.default min.default max.dim min.dim logsumexp prod.default prod.dim_int var.correction var.default "
    "var.dim std.correction std.default std.dim norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype "
    "linalg_vector_norm var_mean.correction std_mean.correction aminmax median.default median.dim norm.ScalarOpt_dtype"
)


@family(*(f"aten.{op}" for op in (_SUMS + " " + _OTHER_REDUCTIONS).split()))
def _reduce(call: Call) -> Row:
    """Sums over a sharded dim are partial (a mean divides by the whole count); other reductions keep the dim whole."""
    shape = call.first.shape
    named = call.get("dim")
    over = (named,) if isinstance(named, int) else named
    over = tuple(d % max(len(shape), 1) for d in over) if over else tuple(range(len(shape)))
    out = " ".join(f"f{i}" if i not in over else "1" for i in range(len(shape)) if i not in over or call.get("keepdim"))
    results = "; ".join([out] * len(call.results))
    if f"{call.op.removeprefix('aten.')}" in _SUMS.split():
        return Row(f"lin: {dims(shape)} -> {results}")
    why = {f"f{d}": f"{call.op.split('.')[1]} over the dim is no sum" for d in over}
    return Row(f"nl: {dims(shape, over)} -> {results}", why)


# -- scalars decide linearity


@family("aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar")
def _affine(call: Call) -> str:
    """x + c with a nonzero scalar c is affine: P would add c once on each rank."""
    scalar = call.get("other")
    tensors = [v for v in call.values if isinstance(v, Arg)]
    if len(tensors) == 2:
        return "lin: +..., +... -> ..."
    return "lin: ... -> ..." if isinstance(scalar, (int, float)) and scalar == 0 else "nl: ... -> ..."


@family("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.masked_fill.Scalar")
def _where(call: Call) -> str:
    scalar = next((call.get(n) for n in ("other", "self", "value") if isinstance(call.get(n), (int, float))), 0)
    order = {"masked_fill": "+..., ~...", "where": "~..., +..."}[call.op.split(".")[1]]
    if call.op == "aten.where.self":
        return "lin: ~..., +..., +... -> ..."
    return f"{'lin' if scalar == 0 else 'nl'}: {order if scalar == 0 else order.replace('+', '')} -> ..."


# -- products


@family("aten.matmul")
def _matmul(call: Call) -> str:
    a, b = len(call.get("self").shape), len(call.get("other").shape)
    left, right = ("k" if a == 1 else "... m k"), ("k" if b == 1 else "... k n")
    lead = "..." if a > 2 or b > 2 else ""
    out = f"{lead} {'m' if a > 1 else ''} {'n' if b > 1 else ''}".strip()
    return f"lin: {left if a > 1 else 'k'}, {right} -> {out}"


@family("aten.einsum")
def _einsum(call: Call) -> str:
    equation = call.get("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        out = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))

    def spaced(term: str) -> str:
        return " ".join(term.replace("...", ".")).replace(".", "...")

    return f"lin: {', '.join(spaced(t) for t in left.split(','))} -> {spaced(out)}"


@family("aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution")
def _conv(call: Call) -> str | None:
    if call.get("transposed"):
        return None
    grouped = call.get("groups", 1) != 1
    n = len(call.first.shape) - 2
    if len(call.results[0]) != n + 2 or n < 1 or len(call.get("weight").shape) != n + 2:
        return None
    c, o = ("c!", "o!") if grouped else ("c", "o")
    inside, kernel, out = (" ".join(f"{a}{i}!" for i in range(n)) for a in "xky")
    return f"lin: b {c} {inside}, {o} {'i!' if grouped else c} {kernel}, +{o} -> b {o} {out}"


@family("aten.convolution_backward")
def _conv_backward(call: Call) -> str | None:
    if call.get("transposed") or call.get("groups") != 1:
        return None
    n = len(call.first.shape) - 2
    inside, kernel, out = (" ".join(f"{a}{i}!" for i in range(n)) for a in "xky")
    bias = "o" if len(call.results[2]) else "*"
    return f"lin[0]: b o {out}, b c! {inside}, o c! {kernel} -> b c! {inside}; o c! {kernel}; {bias}"


# -- norms over several dims


@family(*(op for op in RULES if op.split(".")[1].lstrip("_") in (
    "layer_norm", "native_layer_norm", "native_layer_norm_backward", "rms_norm", "fused_rms_norm",
    "fused_rms_norm_backward")))  # fmt: skip
def _norm(call: Call) -> Row:
    """normalized_shape of n dims: c becomes c0 ... ; statistics keep these dims as ones."""
    n = len(call.get("normalized_shape"))
    text = RULES[call.op].replace("c!", " ".join(f"c{i}!" for i in range(n))).replace(" 1", " 1" * n)
    weight = {"native_layer_norm_backward": 4, "fused_rms_norm_backward": 3}.get(call.op.split(".")[1].lstrip("_"))
    partials = (((weight,), "PRR"[: len(call.results)]),) if weight else ()  # so is the gradient of the input
    return Row(text, {f"c{i}": "the norm runs over the dim" for i in range(n)}, partials=partials)


@family("aten.group_norm")
def _group_norm(call: Call) -> str:
    inner = " ".join(f"x{i}!" for i in range(len(call.first.shape) - 2))
    return f"nl[1]: b c! {inner}, c!, +c! -> b c! {inner}"


# -- indices


@family("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: Call) -> Row | None:
    """x[:, ids, :]: the indexed dims stay whole, the dims of the ids are dims of the result."""
    shape, indices = call.get("self").shape, call.get("indices")
    at = [i for i, a in enumerate(indices) if isinstance(a, Arg)]
    if not at or at != list(range(at[0], at[-1] + 1)):
        return None
    width = len(call.results[0]) - (len(shape) - len(at))
    ids = [f"i{width - k}" for k in range(width)]
    left = [f"f{i}" for i in range(len(shape))]
    out = left[: at[0]] + ids + left[at[-1] + 1 :]
    patterns = [f"~{' '.join(ids[width - len(indices[i].shape) :])}" for i in at]
    why = {f"f{i}": "the dim is indexed" for i in at}
    return Row(f"lin: {dims(shape, at)}, {', '.join(patterns)} -> {' '.join(out)}", why)


@family("aten.index_select")
def _index_select(call: Call) -> Row:
    shape, d = call.first.shape, call.dim()
    out = dims(shape).replace(f"f{d}", "i")
    return Row(f"lin: {dims(shape, (d,))}, ~i -> {out}", {f"f{d}": "the dim is indexed"})


@family("aten.gather")
def _gather(call: Call) -> Row:
    shape, d = call.first.shape, call.dim()
    index = [f"f{i}" for i in range(len(shape))]
    if index:
        index[d] = "i"
    why = {f"f{d}": "the dim is indexed"}
    return Row(f"lin: {dims(shape, (d,))}, ~{' '.join(index)} -> {' '.join(index)}", why)


@family("aten.scatter_add", "aten.scatter.src", "aten.scatter.value", "aten.index_add", "aten.index_copy")
def _scatter(call: Call) -> Row:
    shape, d = call.first.shape, call.dim()
    index = [f"f{i}" for i in range(len(shape))]
    at = "i" if "_add" in call.op else "i!"  # sums may be split over the index
    index[d] = at
    names = " ".join(index)
    ids = f"~{at}" if "index_" in call.op else f"~{names}"
    source = f", +{names}" if call.op != "aten.scatter.value" else ""
    linear = bool(source) or not call.get("value")
    text = (
        f"{'lin' if linear else 'nl'}: {'+' if linear else ''}{dims(shape, (d,))}, {ids}{source} -> {dims(shape, (d,))}"
    )
    return Row(text, {f"f{d}": "the dim is indexed"})


@family("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: Call) -> Row | None:
    """x[:, ids] += values: dims that are not indexed may be sharded."""
    shape, indices, values = call.get("self").shape, call.get("indices"), call.get("values")
    at = [i for i, a in enumerate(indices) if isinstance(a, Arg)]
    if not at or at != list(range(at[0], at[-1] + 1)):
        return None
    width = max(len(indices[i].shape) for i in at)
    whole = "" if call.get("accumulate") else "!"  # sums may be split over the index
    ids = [f"i{width - k}{whole}" for k in range(width)]
    left = [f"f{i}" for i in range(len(shape))]
    value = left[: at[0]] + ids + left[at[-1] + 1 :]
    value = value[len(value) - len(values.shape) :]
    patterns = [f"~{' '.join(ids[width - len(indices[i].shape) :])}" for i in at]
    why = {f"f{i}": "the dim is indexed" for i in at}
    text = f"lin: +{dims(shape, at)}, {', '.join(patterns)}, +{' '.join(value)} -> {dims(shape, at)}"
    return Row(text, why)


# -- no data is read


@family(
    "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.new_zeros", "aten.new_ones",
    "aten.new_full", "aten.new_empty", "aten.new_empty_strided",
)  # fmt: skip
def _constant(call: Call) -> str:
    return f"lin: * -> {' '.join('1' for _ in call.results[0])}"


# -- attention and loss


@family(*(op for op in RULES if "scaled_dot_product" in op))
def _attention(call: Call) -> Row:
    """t (queries) stays whole under is_causal, whose mask counts rows from 0; grouped K/V heads are a merged dim."""
    text, why = RULES[call.op], {}
    if call.get("enable_gqa"):
        query, key, value, mask = (p.strip() for p in text.partition(":")[2].partition("->")[0].split(","))
        text = f"nl[2]: {query}, {key}, {value}, {mask} -> ... h t f".replace(" h ", " (n g) ")
        text = text.replace("(n g) s! e!", "n s! e!").replace("(n g) s! f", "n s! f")
    mask = call.get("attn_mask")
    if isinstance(mask, Arg) and len(mask.shape) < 3:
        text = re.sub(r"(\.\.\.|b) (h|\(n g\)) t s!", "t s!" if len(mask.shape) == 2 else "s!", text)
    if call.get("is_causal"):
        text = text.replace(" t ", " t! ", 1).replace(" t,", " t!,", 1)
        why["t"] = "is_causal needs the row index in the whole sequence"
    partials: tuple[tuple[tuple[int, ...], str], ...] = ()
    if call.op.endswith("_backward.default"):
        out = 5 if "efficient" in call.op else 4
        partials = (((3, out), "PPRR"[: len(call.results)]),)  # v partial: so are the output and the gradients of q, k
    return Row(text, why, partials=partials)


@family("aten.nll_loss_forward", "aten.nll_loss", "aten.nll_loss_nd")
def _nll(call: Call) -> Row | None:
    if len(call.first.shape) != 2:
        return None
    alone, reduction = len(call.results) == 1, call.get("reduction")
    t = "t" if reduction == 0 or (reduction == 2 and alone) else "t!"
    results = ("t" if reduction == 0 else "") + ("" if alone else "; *" if reduction == 0 else "; ~")
    why = {"v": "the class is indexed"}
    if t == "t!":
        why["t"] = "the sum of weights is over all tokens"
    return Row(f"lin[0]: {t} v!, ~{t}, ~v! -> {results}", why)


@family("aten.nll_loss_backward")
def _nll_backward(call: Call) -> Row | None:
    if len(call.get("self").shape) != 2:
        return None
    grad = "t" if call.get("grad_output").shape else ""
    return Row(f"lin[0]: {grad}, t v!, ~t, ~v!, ~ -> t v!", {"v": "the class is indexed"})
