"""Families of ops that move, repeat, cut, join and reduce dims, and of scalars that decide linearity."""

from __future__ import annotations

from megafx.ir.sizes import FIRST_PRIME
from megafx.placements.types import Layout
from megafx.rules.families import Arg, OpCall, Part, RuleText, dims, family

# -- moving and repeating dims


@family(
    "aten.permute", "aten.transpose.int", "aten.t", "aten.numpy_T", "aten.mT", "aten.mH", "aten.swapaxes",
    "aten.swapdims", "aten.movedim.int", "aten.movedim.intlist", "aten.moveaxis.int", "aten.adjoint",
)  # fmt: skip
def _permute(call: OpCall) -> str:
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
def _expand(call: OpCall) -> str:
    """An expanded dim is a factor of the result alone: sharding it costs nothing."""
    out = call.results[0]
    other = ", *" if "expand_as" in call.op else ""
    return f"lin: {dims(call.first.shape, start=len(out) - len(call.first.shape))}{other} -> {dims(out)}"


@family("aten.repeat", "aten.tile")
def _repeat(call: OpCall) -> RuleText:
    """n repeats of a dim are a merged dim: (repeat, dim)."""
    repeats = call.get("repeats") or call.get("dims")
    out, lead = call.results[0], len(call.results[0]) - len(call.first.shape)
    repeats = (1,) * (len(out) - len(repeats)) + tuple(repeats)
    entries = [f"r{i}" if i < lead else f"f{i}" if r == 1 else f"(r{i} f{i})" for i, r in enumerate(repeats)]
    why = {f"r{i}": "the dim is repeated whole" for i in range(len(out))}
    return RuleText(f"lin: {dims(call.first.shape, start=lead)} -> {' '.join(entries)}", why)


@family("aten.repeat_interleave.self_int")
def _repeat_interleave(call: OpCall) -> RuleText | None:
    shape = call.first.shape
    if call.get("dim") is None and len(shape) != 1:
        return None
    d = 0 if call.get("dim") is None else call.dim()
    out = [f"(f{i} r)" if i == d and call.get("repeats") != 1 else f"f{i}" for i in range(len(shape))]
    return RuleText(f"lin: {dims(shape)} -> {' '.join(out)}", {"r": "each element is repeated whole"})


# -- parts of dims


@family("aten.slice.Tensor", "aten.narrow", "aten.slice_copy.Tensor")
def _slice(call: OpCall) -> RuleText | str:
    shape, d = call.first.shape, call.dim()
    n, out = shape[d], call.results[0][d]
    plain = f"lin: {dims(shape)} -> {dims(shape)}"
    if n == out:
        return plain
    start = call.get("start") or 0
    whole = f"lin: {dims(shape, (d,))} -> {dims(shape, (d,)).replace(f'f{d}!', '1')}"
    if not isinstance(start, int) or max(abs(start), n, out) >= FIRST_PRIME:
        return RuleText(whole, {f"f{d}": "a slice of a dim of dynamic length"})
    if call.get("step", 1) != 1:
        return RuleText(whole, {f"f{d}": "a slice with a step"})
    start = min(start + n if start < 0 else start, n)
    return RuleText(plain, parts={-1: Part(f"f{d}", start, start + out)})


@family("aten.split_with_sizes")
def _split(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    part = dims(shape, (d,)).replace(f"f{d}!", "1")
    text = f"lin: {dims(shape, (d,))} -> {'; '.join([part] * len(call.results))}"
    return RuleText(text, {f"f{d}": "each result is a part of the dim"})


@family("aten.select.int", "aten.select_copy.int")
def _select(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    left = " ".join(f"f{i}" for i in range(len(shape)) if i != d)
    return RuleText(f"lin: {dims(shape, (d,))} -> {left}", {f"f{d}": "one element of the dim is selected"})


@family("aten.diagonal", "aten.diagonal_copy", "aten.diagonal_backward")
def _diagonal(call: OpCall) -> RuleText:
    """The two dims become one, the last; backward the other way."""
    whole, backward = call.first.shape, call.op == "aten.diagonal_backward.default"
    whole = call.results[0] if backward else whole
    pair = [call.dim(name, len(whole)) for name in ("dim1", "dim2")]
    part = " ".join([*(f"f{i}" for i in range(len(whole)) if i not in pair), "y!"])
    text = f"lin: {part} -> {dims(whole, pair)}" if backward else f"lin: {dims(whole, pair)} -> {part}"
    return RuleText(text, dict.fromkeys((*(f"f{i}" for i in pair), "y"), "the diagonal runs over the dim"))


@family("aten.cat", "aten.concat", "aten.concatenate")
def _cat(call: OpCall) -> RuleText | None:
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
        return RuleText(text, {f"f{d}": "concatenation along a dim of dynamic length"}, parts)
    return RuleText(text, parts=parts)


@family("aten.stack")
def _stack(call: OpCall) -> str:
    shape = call.get("tensors")[0].shape
    out = [f"f{i}" for i in range(len(shape))]
    out.insert(call.dim(ndim=len(shape) + 1), "1")
    return f"lin: {', '.join('+' + dims(shape) for _ in call.get('tensors'))} -> {' '.join(out)}"


@family("aten.slice_backward", "aten.select_backward")
def _part_backward(call: OpCall) -> RuleText:
    out = call.results[0]
    d = call.dim(ndim=len(out))
    grad = [f"f{i}" for i in range(len(out))]
    if "select" in call.op:
        grad.pop(d)
    elif call.first.shape[d] != out[d]:
        grad[d] = "1"
    elif call.first.shape == out:
        return RuleText(f"lin: {' '.join(grad)} -> {' '.join(grad)}")
    return RuleText(f"lin: {' '.join(grad)} -> {dims(out, (d,))}", {f"f{d}": "the gradient of a part of the dim"})


@family("aten.slice_scatter", "aten.select_scatter")
def _part_scatter(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    source = [f"f{i}" for i in range(len(shape))]
    if "select" in call.op:
        source.pop(d)
    else:
        source[d] = "1"
    text = f"lin: +{dims(shape, (d,))}, +{' '.join(source)} -> {dims(shape, (d,))}"
    return RuleText(text, {f"f{d}": "a part of the dim is replaced"})


@family("aten.pad", "aten.constant_pad_nd")
def _pad(call: OpCall) -> RuleText:
    """A dim may keep its size and still move its elements: one is cut off in front, one added behind (a token shift)."""
    shape, out, amounts = call.first.shape, call.results[0], call.get("pad")
    last = len(shape) - 1  # amounts are pairs, from the last dim on
    whole = tuple(sorted({last - k // 2 for k, amount in enumerate(amounts) if amount != 0}))
    linear = call.get("mode", "constant") != "constant" or not call.get("value")
    right = " ".join("1" if i in whole else f"f{i}" for i in range(len(out)))
    why = {f"f{i}": "the dim is padded or cut, so its elements move" for i in whole}
    return RuleText(f"{'lin' if linear else 'nl'}: {dims(shape, whole)} -> {right}", why)


@family("aten.flip", "aten.roll", "aten.fliplr", "aten.flipud")
def _reorder(call: OpCall) -> RuleText:
    shape = call.first.shape
    named = {"aten.fliplr.default": (1,), "aten.flipud.default": (0,)}.get(call.op, call.get("dims"))
    moved = tuple(d % len(shape) for d in named) if named else tuple(range(len(shape)))
    why = {f"f{d}": "elements move along the dim" for d in moved}
    return RuleText(f"lin: {dims(shape, moved)} -> {dims(shape, moved)}", why)


# -- along a dim


@family(
    "aten.softmax.int", "aten.log_softmax.int", "aten._softmax", "aten._log_softmax", "aten.cumprod",
    "aten.logcumsumexp", "aten._safe_softmax", "aten.cummax", "aten.cummin", "aten.sort", "aten.argsort", "aten.cumsum",
    "aten._softmax_backward_data", "aten._log_softmax_backward_data",
)  # fmt: skip
def _along(call: OpCall) -> RuleText:
    d, op = call.dim(), call.op.split(".")[1].lstrip("_")
    text = dims(call.first.shape, (d,))
    kind = "lin" if op == "cumsum" else "nl[0]" if "backward" in op else "nl"
    operands = f"{text}, {text}" if "backward" in op else text
    return RuleText(
        f"{kind}: {operands} -> {'; '.join([text] * len(call.results))}", {f"f{d}": f"{op} runs along the dim"}
    )


@family("aten.glu", "aten.glu_backward")
def _glu(call: OpCall) -> RuleText:
    """A gated unit of the halves of a dim: a rank has the same part of both."""
    whole = call.get("self").shape
    out, d = [f"f{i}" for i in range(len(whole))], call.dim(ndim=len(whole))
    packed = [*out[:d], f"(two f{d})", *out[d + 1 :]]
    why = {"two": "the halves are read together"}
    if "backward" in call.op:
        return RuleText(f"nl[0]: {' '.join(out)}, {' '.join(packed)} -> {' '.join(packed)}", why)
    return RuleText(f"nl: {' '.join(packed)} -> {' '.join(out)}", why)


@family("aten.topk", "aten.kthvalue", "aten.mode")
def _resized(call: OpCall) -> RuleText:
    """The dim comes out with another length, or none."""
    shape, d = call.first.shape, call.dim()
    out = [f"f{i}" for i in range(len(shape))]
    out[d] = "1"
    if call.results[0] and len(call.results[0]) < len(shape):
        out.pop(d)
    results = "; ".join([" ".join(out)] * len(call.results))
    why = {f"f{d}": f"{call.op.split('.')[1]} runs along the dim"}
    return RuleText(f"nl: {dims(shape, (d,))} -> {results}", why)


@family("aten.log_sigmoid_forward", "aten.log_sigmoid_backward")
def _log_sigmoid(call: OpCall) -> str:
    """The buffer between forward and backward is as large as the input on CPU, empty on CUDA."""
    buffer = call.results[-1] if "forward" in call.op else call.get("buffer").shape
    kept = "..." if buffer == call.first.shape else "*"
    return f"nl: ... -> ...; {kept}" if "forward" in call.op else f"nl[0]: ..., ..., {kept} -> ..."


@family("aten.one_hot")
def _one_hot(call: OpCall) -> RuleText:
    """Classes are a dim of the result alone. (Of their number left open, the largest index decides.)"""
    whole = tuple(range(len(call.first.shape))) if call.get("num_classes", -1) == -1 else ()
    return RuleText(f"nl: {dims(call.first.shape, whole)} -> {dims(call.first.shape, whole)} c!")


# -- reductions

_SUMS = "sum.dim_IntList sum.default mean.dim mean.default"
_COUNTS = "count_nonzero.default count_nonzero.dim_IntList"  # sums of what is not linear
_OTHER_REDUCTIONS = (
    "any.default any.dim any.dims all.default all.dim all.dims argmax argmin amax amin max.default min.default max.dim "
    "min.dim logsumexp prod.default prod.dim_int var.correction var.default var.dim std.correction std.default std.dim "
    "norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype linalg_vector_norm "
    "var_mean.correction std_mean.correction aminmax median.default median.dim"
)


@family(*(f"aten.{op}" for op in f"{_SUMS} {_COUNTS} {_OTHER_REDUCTIONS}".split()))
def _reduce(call: OpCall) -> RuleText:
    """Sums over a sharded dim are partial (a mean divides by the whole count); other reductions keep the dim whole."""
    shape, named = call.first.shape, call.get("dim")
    if call.results[0] == shape and named in ((), []):  # any and all over no dims
        return RuleText("nl: ... -> ...")
    over = (named,) if isinstance(named, int) else named
    over = tuple(d % max(len(shape), 1) for d in over) if over else tuple(range(len(shape)))
    out = " ".join(f"f{i}" if i not in over else "1" for i in range(len(shape)) if i not in over or call.get("keepdim"))
    results = "; ".join([out] * len(call.results))
    op = call.op.removeprefix("aten.")
    if op in f"{_SUMS} {_COUNTS}".split():
        return RuleText(f"{'lin' if op in _SUMS.split() else 'nl'}: {dims(shape)} -> {results}")
    why = {f"f{d}": f"{op.split('.')[0]} over the dim is no sum" for d in over}
    return RuleText(f"nl: {dims(shape, over)} -> {results}", why)


@family("aten.histc")
def _histc(call: OpCall) -> RuleText | str:
    """Counts are summed, between bounds that are given; else the data decides about the bounds."""
    if call.get("min") != call.get("max"):
        return "sum: ... -> bin!"
    whole = tuple(range(len(call.first.shape)))
    return RuleText(
        f"nl: {dims(call.first.shape, whole)} -> bin!", {f"f{d}": "the data decides about bins" for d in whole}
    )


# -- scalars decide linearity


@family("aten.add.Tensor", "aten.sub.Tensor", "aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar")
def _affine(call: OpCall) -> str:
    """x + c with a nonzero scalar c is affine: P would add c once on each rank."""
    scalar = call.get("other")
    if sum(isinstance(v, Arg) for v in call.values) == 2:
        return "lin: +..., +... -> ..."
    return "lin: ... -> ..." if isinstance(scalar, (int, float)) and scalar == 0 else "nl: ... -> ..."


@family("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.masked_fill.Scalar")
def _where(call: OpCall) -> str:
    scalar = next((call.get(n) for n in ("other", "self", "value") if isinstance(call.get(n), (int, float))), 0)
    order = {"masked_fill": "+..., ~...", "where": "~..., +..."}[call.op.split(".")[1]]
    if call.op == "aten.where.self":
        return "lin: ~..., +..., +... -> ..."
    return f"{'lin' if scalar == 0 else 'nl'}: {order if scalar == 0 else order.replace('+', '')} -> ..."


# -- other axes


@family("megafx.transition")
def _transition(call: OpCall) -> RuleText:
    """A transition of another axis than the one that is placed: what it moves are whole dims, all others are free.

    Of heads that are exchanged for tokens, c ranks get h each: those h may be cut here, and so those of each rank before.
    """
    src, dst, ranks = call.get("src"), call.get("dst"), call.get("size")
    operand = [f"f{d}" for d in range(len(call.first.shape))]
    result, moved = [*operand], [int(tag[1:]) for tag in (src, dst) if tag[0] == "S"]
    for d in moved:
        operand[d], result[d] = f"f{d}!", f"m{d}!"
    exchanged = zip(moved, ("src_layout", "dst_layout"), (result, operand), (operand, result), strict=False)
    for d, flat, whole, part in exchanged if len({*moved}) == 2 else ():
        cut = Layout.from_flat(call.get(flat))
        if cut.size < FIRST_PRIME and cut.contiguous_shards(ranks):
            whole[d], part[d] = f"(r{d} f{d})", f"f{d}"
    why = {f"{letter}{d}": "the dim is moved on another axis" for d in moved for letter in "rm"}
    why |= {f"f{d}": "the dim is moved on another axis" for d in moved if operand[d] == f"f{d}!"}
    return RuleText(f"lin: {' '.join(operand)} -> {' '.join(result)}", why)
