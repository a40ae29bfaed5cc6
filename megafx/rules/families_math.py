"""Families of products, norms, indices, constants, attention and losses."""

from __future__ import annotations

import re

from megafx.rules.aten import RULES
from megafx.rules.families import Arg, OpCall, RuleText, dims, family

# Losses of two values, element by element, with a reduction: none, mean or sum.
LOSSES_OF_ELEMENTS = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)

# -- products


@family("aten.matmul")
def _matmul(call: OpCall) -> str:
    a, b = len(call.get("self").shape), len(call.get("other").shape)
    left, right = ("k" if a == 1 else "... m k"), ("k" if b == 1 else "... k n")
    lead = "..." if a > 2 or b > 2 else ""
    out = f"{lead} {'m' if a > 1 else ''} {'n' if b > 1 else ''}".strip()
    return f"lin: {left if a > 1 else 'k'}, {right} -> {out}"


@family("aten.einsum")
def _einsum(call: OpCall) -> str:
    equation = call.get("equation").replace(" ", "")
    left, arrow, out = equation.partition("->")
    if not arrow:
        letters = left.replace(",", "").replace(".", "")
        out = ("..." if "..." in left else "") + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))

    def spaced(term: str) -> str:
        return " ".join(term.replace("...", ".")).replace(".", "...")

    return f"lin: {', '.join(spaced(t) for t in left.split(','))} -> {spaced(out)}"


@family(
    "aten.conv1d", "aten.conv2d", "aten.conv3d", "aten.convolution", "aten.conv1d.padding", "aten.conv2d.padding",
    "aten.conv3d.padding",
)  # fmt: skip
def _conv(call: OpCall) -> RuleText | None:
    grouped = call.get("groups", 1) != 1
    n = len(call.first.shape) - 2
    if len(call.results[0]) != n + 2 or n < 1 or len(call.get("weight").shape) != n + 2:
        return None
    c, o = ("c!", "o!") if grouped else ("c", "o")
    inside, kernel, out = (" ".join(f"{a}{i}!" for i in range(n)) for a in "xky")
    why = {f"{a}{i}": "the convolution runs over the dim" for a in "xky" for i in range(n)}
    if grouped:
        why |= dict.fromkeys("coi", "the channels of the convolution are in groups")
    weight = f"{c} {'j!' if grouped else o}" if call.get("transposed") else f"{o} {'i!' if grouped else c}"
    return RuleText(f"lin: b {c} {inside}, {weight} {kernel}, +{o} -> b {o} {out}", why)


@family("aten.convolution_backward")
def _conv_backward(call: OpCall) -> RuleText | None:
    """The gradient of the bias is a sum of the gradient alone, whole on every rank where channels of the input are cut."""
    n = len(call.first.shape) - 2
    inside, kernel, out = (" ".join(f"{a}{i}!" for i in range(n)) for a in "xky")
    o, c, i = ("o", "c", "c") if call.get("groups") == 1 else ("o!", "c!", "i!")
    weight = f"{o} {i}" if not call.get("transposed") else f"{c} {o if i == c else 'i!'}"
    bias = o if call.results[2] else "*"  # none: None, or no dims
    text = f"lin[0]: b {o} {out}, b {c} {inside}, {weight} {kernel} -> b {c} {inside}; {weight} {kernel}; {bias}"
    return RuleText(text, reads={2: (0,)})


@family(
    "aten.avg_pool1d", "aten.avg_pool2d", "aten.avg_pool3d", "aten.adaptive_avg_pool1d", "aten.adaptive_avg_pool2d",
    "aten._adaptive_avg_pool2d", "aten.max_pool1d", "aten.max_pool2d", "aten.max_pool3d",
)  # fmt: skip
def _pool(call: OpCall) -> RuleText:
    """A pool of n dims runs over the last n."""
    shape, op = call.first.shape, call.op.split(".")[1]
    over = range(len(shape) - int(op[-2]), len(shape))
    out = [f"y{i}!" if i in over else f"f{i}" for i in range(len(shape))]
    why = {f"{a}{i}": "the pooling runs over the dim" for a in "fy" for i in over}
    return RuleText(f"{'lin' if 'avg' in op else 'nl'}: {dims(shape, over)} -> {' '.join(out)}", why)


# -- norms over several dims


@family(*(op for op in RULES if op.split(".")[1].lstrip("_") in (
    "layer_norm", "native_layer_norm", "native_layer_norm_backward", "rms_norm", "fused_rms_norm",
    "fused_rms_norm_backward")))  # fmt: skip
def _norm(call: OpCall) -> RuleText:
    """normalized_shape of n dims: c becomes c0 ... ; statistics keep these dims as ones."""
    n = len(call.get("normalized_shape"))
    text = RULES[call.op].replace("c!", " ".join(f"c{i}!" for i in range(n))).replace(" 1", " 1" * n)
    weight = {"native_layer_norm_backward": 4, "fused_rms_norm_backward": 3}.get(call.op.split(".")[1].lstrip("_"))
    partials = (((weight,), "PRR"[: len(call.results)]),) if weight else ()  # so is the gradient of the input
    return RuleText(text, {f"c{i}": "the norm runs over the dim" for i in range(n)}, partials=partials)


@family("aten.group_norm")
def _group_norm(call: OpCall) -> str:
    inner = " ".join(f"x{i}!" for i in range(len(call.first.shape) - 2))
    return f"nl[1]: b c! {inner}, c!, +c! -> b c! {inner}"


# -- indices


def _indexed(call: OpCall, whole: str = "") -> tuple[str, str, list[str], dict[str, str]] | None:
    """x[:, ids, :]: (dims of x, those of each of the ids, dims of what it shows, why dims are whole); None where dims that are
    not neighbours are indexed, or a mask does it. whole: '!' where dims of the ids are not cut."""
    shape, indices = call.get("self").shape, call.get("indices")
    at = [i for i, a in enumerate(indices) if isinstance(a, Arg)]
    if not at or at != list(range(at[0], at[-1] + 1)) or any(indices[i].mask for i in at):
        return None
    width = max(len(indices[i].shape) for i in at)
    ids = [f"i{width - k}{whole}" for k in range(width)]
    left = [f"f{i}" for i in range(len(shape))]
    patterns = [f"~{' '.join(ids[width - len(indices[i].shape) :])}" for i in at]
    out = left[: at[0]] + ids + left[at[-1] + 1 :]
    return dims(shape, at), ", ".join(patterns), out, {f"f{i}": "the dim is indexed" for i in at}


@family("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(call: OpCall) -> RuleText | None:
    """x[:, ids, :]: the indexed dims stay whole, the dims of the ids are dims of the result."""
    if (found := _indexed(call)) is None:
        return None
    x, ids, out, why = found
    return RuleText(f"lin: {x}, {ids} -> {' '.join(out)}", why)


@family("aten.index_select")
def _index_select(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    out = dims(shape).replace(f"f{d}", "i")
    return RuleText(f"lin: {dims(shape, (d,))}, ~i -> {out}", {f"f{d}": "the dim is indexed"})


@family("aten.gather")
def _gather(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    index = [f"f{i}" for i in range(len(shape))]
    if index:
        index[d] = "i"
    why = {f"f{d}": "the dim is indexed"}
    return RuleText(f"lin: {dims(shape, (d,))}, ~{' '.join(index)} -> {' '.join(index)}", why)


@family("aten.scatter_add", "aten.scatter.src", "aten.scatter.value", "aten.index_add", "aten.index_copy")
def _scatter(call: OpCall) -> RuleText:
    shape, d = call.first.shape, call.dim()
    index = [f"f{i}" for i in range(len(shape))]
    at = "i" if "_add" in call.op else "i!"  # sums may be split over the index
    index[d] = at
    names = " ".join(index)
    ids = f"~{at}" if "index_" in call.op else f"~{names}"
    source = f", +{names}" if call.op != "aten.scatter.value" else ""
    linear = bool(source) or not call.get("value")
    whole, kind = dims(shape, (d,)), "lin: +" if linear else "nl: "
    return RuleText(f"{kind}{whole}, {ids}{source} -> {whole}", {f"f{d}": "the dim is indexed"})


@family("aten.index_put", "aten._unsafe_index_put")
def _index_put(call: OpCall) -> RuleText | None:
    """x[:, ids] += values: dims that are not indexed may be sharded."""
    if (found := _indexed(call, "" if call.get("accumulate") else "!")) is None:  # sums may be split over the index
        return None
    x, ids, value, why = found
    value = value[len(value) - len(call.get("values").shape) :]
    return RuleText(f"lin: +{x}, {ids}, +{' '.join(value)} -> {x}", why)


# -- no data is read


@family(
    "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like", "aten.new_zeros", "aten.new_ones",
    "aten.new_full", "aten.new_empty", "aten.new_empty_strided",
)  # fmt: skip
def _constant(call: OpCall) -> str:
    return f"lin: * -> {' '.join('1' for _ in call.results[0])}"


# -- attention and loss


@family(*(op for op in RULES if "scaled_dot_product" in op))
def _attention(call: OpCall) -> RuleText:
    """t (queries) stays whole under is_causal, whose mask counts rows from 0; grouped K/V heads are a merged dim."""
    text, why = RULES[call.op], {}
    if call.get("enable_gqa") or "._scaled" in call.op:  # the kernels take fewer KV heads without that argument
        text = re.sub(r"\bh (?=[tl])", "(n g) ", text).replace(" h s!", " n s!")
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
    return RuleText(text, why, partials=partials)


_DECOMPOSED = ("l1_loss", "kl_div", "binary_cross_entropy_with_logits")  # by autograd: they have no op for the gradient


@family(
    *(f"aten.{name}" for name in LOSSES_OF_ELEMENTS),
    *(f"aten.{name}_backward" for name in LOSSES_OF_ELEMENTS if name not in _DECOMPOSED),
)
def _loss_of_elements(call: OpCall) -> RuleText | None:
    """Without its reduction, which `canonicalize` takes apart, such a loss is elementwise."""
    if call.get("reduction") != 0:
        return None
    operands = ", ".join(
        "..." for name in call.names if name in ("grad_output", "self", "target", "weight", "pos_weight")
    )
    partials = (((1, 2), "P"),) if call.op == "aten.mse_loss_backward.default" else ()  # grad * 2 (x - target)
    return RuleText(f"{'nl[0]' if 'backward' in call.op else 'nl'}: {operands} -> ...", partials=partials)


@family("aten.nll_loss_forward", "aten.nll_loss", "aten.nll_loss_nd")
def _nll(call: OpCall) -> RuleText | None:
    if len(call.first.shape) != 2:
        return None
    alone, reduction = len(call.results) == 1, call.get("reduction")
    t = "t" if reduction == 0 or (reduction == 2 and alone) else "t!"
    results = ("t" if reduction == 0 else "") + ("" if alone else "; *" if reduction == 0 else "; ~")
    why = {"v": "the class is indexed"}
    if t == "t!":
        why["t"] = "the sum of weights is over all tokens"
    return RuleText(f"lin[0]: {t} v!, ~{t}, ~v! -> {results}", why)


@family("aten.nll_loss_backward")
def _nll_backward(call: OpCall) -> RuleText | None:
    if len(call.get("self").shape) != 2:
        return None
    grad = "t" if call.get("grad_output").shape else ""
    return RuleText(f"lin[0]: {grad}, t v!, ~t, ~v!, ~ -> t v!", {"v": "the class is indexed"})


# What torch has for packed rows: [t, heads, e], or rows [b, t, heads, e]. Documents end where a control operand says.


@family("aten._flash_attention_forward", "torch_attn._varlen_attn")
def _of_documents(call: OpCall) -> RuleText:
    q, k, lse = _tokens_first(call)
    varlen = call.op.startswith("torch_attn")
    slopes, rest = ("", "*") if varlen else (f"{_slopes(call)}, ", "*; *; *")
    controls = f"~d!, ~d!, ~u!, {slopes}~u! w!"  # ends of queries and keys, used keys, pages
    return RuleText(f"nl[2]: {q}, {k}, {k}, {controls} -> {q}; ~{lse}; {rest}", WHOLE_DOCUMENTS)


@family("aten._flash_attention_backward", "torch_attn._varlen_attn_backward")
def _of_documents_backward(call: OpCall) -> RuleText:
    q, k, lse = _tokens_first(call)
    controls = "~d!, ~d!, *" if call.op.startswith("torch_attn") else "~d!, ~d!, *, *"
    return RuleText(f"nl[0]: {q}, {q}, {k}, {k}, {q}, {lse}, {controls} -> {q}; {k}; {k}", WHOLE_DOCUMENTS)


@family("aten._efficient_attention_forward")
def _efficient(call: OpCall) -> RuleText:
    q, k, bias, lse = "b s! h e!", "b t! h e!", "b h s! t!", _statistics(call)
    text = f"nl[2]: {q}, {k}, b t! h f!, {bias}, ~d!, ~d!, ~u! -> b s! h f!; ~{lse}; *; *; *; *"
    return RuleText(text, WHOLE_DOCUMENTS)


@family("aten._efficient_attention_backward")
def _efficient_backward(call: OpCall) -> RuleText:
    q, k, v, out, bias, lse = "b s! h e!", "b t! h e!", "b t! h f!", "b s! h f!", "b h s! t!", _statistics(call)
    text = f"nl[0]: {out}, {q}, {k}, {v}, {bias}, {out}, ~d!, ~d!, {lse}, *, * -> {q}; {k}; {v}; "
    return RuleText(text + (bias if isinstance(call.get("bias"), Arg) else "*"), WHOLE_DOCUMENTS)


WHOLE_DOCUMENTS = dict.fromkeys("sct", "a query attends to any token of its document")


def _tokens_first(call: OpCall) -> tuple[str, str, str]:
    """Dims of q (and the output), of k and v, and of the log-sum-exps. Of packed rows those are [heads, t]."""
    q, k = call.get("query"), call.get("key")
    rows = "b " if len(q.shape) == 4 else ""
    keys = "p! c! n e!" if not rows and len(k.shape) == 4 else f"{rows}c! n e!"  # pages of keys
    return f"{rows}s! (n g) e!", keys, f"{rows}(n g) s!"


def _slopes(call: OpCall) -> str:
    """[heads] or [b, heads] fp32 of ALiBi."""
    slopes = call.get("alibi_slopes")
    return "~" if not isinstance(slopes, Arg) else "~(n g)" if len(slopes.shape) == 1 else "~b (n g)"


def _statistics(call: OpCall) -> str:
    return "i! h l!" if isinstance(call.get("cu_seqlens_q"), Arg) else "b h l!"


# -- transforms and distances

_TO_REAL = "fft_irfft fft_hfft fft_irfft2 fft_irfftn fft_fftshift fft_ifftshift"
_TO_COMPLEX = (
    "fft_fft fft_ifft fft_rfft fft_ihfft fft_fft2 fft_ifft2 fft_rfft2 fft_fftn fft_ifftn fft_rfftn "
    "_fft_r2c _fft_c2c _fft_c2r"
)


@family(*(f"aten.{op}" for op in f"{_TO_REAL} {_TO_COMPLEX}".split()))
def _transform(call: OpCall) -> RuleText:
    """Transformed dims are whole, and may come out with another length. All are linear; sums of complex values are not sent."""
    shape, given = call.first.shape, call.get("dim")
    if given is None:
        count = len(call.get("s") or shape)
        given = tuple(range(len(shape) - count, len(shape)))
    over = {d % len(shape) for d in ((given,) if isinstance(given, int) else given)}
    out = " ".join(f"g{i}!" if i in over else f"f{i}" for i in range(len(shape)))
    why = {f"{c}{i}": "the transform runs along the dim" for i in over for c in "fg"}
    kind = "lin" if call.op.removeprefix("aten.").removesuffix(".default") in _TO_REAL.split() else "nl"
    return RuleText(f"{kind}: {dims(shape, tuple(over))} -> {out}", why)


@family("aten.cdist", "aten._cdist_forward", "aten._euclidean_dist")
def _distances(call: OpCall) -> RuleText:
    """[..., m, k], [..., n, k] -> [..., m, n]."""
    return RuleText("nl: ... m k!, ... n k! -> ... m n", {"k": "a distance is of whole rows"})
