"""A call of each op on small tensors, for `check_rules`. Data.

Ops of the table whose dims follow from their rule string need no entry: `sample_of` makes their tensors from the string.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from megafx.ir.facts import SampleTensor, facts_of, fixed, ids, mask, real
from megafx.rules.aten import RULES
from megafx.rules.grammar import Dim, Pattern, parse
from megafx.rules.strategies import schema_of


@dataclass(frozen=True)
class Sample:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


# Where an op is real and smooth, by name of the op; elsewhere (-4, 4).
DOMAINS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-0.9, 0.9)),
    **dict.fromkeys(("logit", "logit_backward"), (0.1, 0.9)),
    **dict.fromkeys(("log", "log10", "log1p", "log2", "sqrt", "rsqrt", "lgamma", "digamma", "xlogy"), (0.3, 3.0)),
    "acosh": (1.1, 3.0),
    "pow": (0.5, 2.0),
    "addcdiv": (1.0, 3.0),
}

# Values of arguments that are no tensors and have no default, by name.
SCALARS: dict[str, Any] = {
    **dict(threshold=0.1, value=2.5, min_val=-1.0, max_val=1.0, negative_slope=0.1, alpha=1.2, scale=1.1, beta=1.0),
    **dict(input_scale=0.9, is_result=False, self_is_result=False, lambd=0.5, eps=1e-5, other=2.0, exponent=3),
    **dict(weight=0.3, min=-1.0, max=1.0, dtype=torch.float64, rounding_mode="floor", training=False, momentum=0.1),
    **dict(cudnn_enabled=False, ignore_index=-100, label_smoothing=0.1, is_causal=False, dropout_p=0.0),
}

_Q, _K, _V = real(2, 4, 6, 6), real(2, 4, 4, 6), real(2, 4, 4, 6)

SAMPLES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten._fused_rms_norm.default", (real(4, 6, 6), [6], real(6), 1e-5), {}),
    (
        "aten._fused_rms_norm_backward.default",
        (real(4, 6), real(4, 6), [6], fixed(4, 1), real(6), [True, True]),
        {},
    ),
    ("aten._unsafe_index.Tensor", (real(4, 6, 6), [None, ids(6, 12)]), {}),
    ("aten._unsafe_index_put.default", (real(4, 6), [ids(4, 6)], real(6, 6), True), {}),
    ("aten.view_as_complex.default", (real(4, 6, 2),), {}),
    ("aten.adjoint.default", (real(4, 6),), {}),
    ("aten.all.default", (mask(4, 6),), {}),
    ("aten.all.dim", (mask(4, 6, 6), 1), {}),
    ("aten.all.dims", (mask(4, 6, 6), [0, -1], True), {}),
    ("aten.amax.default", (real(4, 6, 6), [1]), {}),
    ("aten.amin.default", (real(4, 6), [0], True), {}),
    ("aten.add.Tensor", (real(4, 6), 2.0), {}),
    ("aten.add.Tensor", (real(4, 6), real(6)), {"alpha": 2}),
    ("aten.add.Scalar", (real(4, 6), 0), {}),
    ("aten.aminmax.default", (real(4, 6),), {"dim": 1}),
    ("aten.any.default", (mask(4, 6),), {}),
    ("aten.any.dim", (mask(4, 6, 6), -1, True), {}),
    ("aten.any.dims", (mask(4, 6, 6), [0, 1]), {}),
    ("aten.any.dims", (mask(4, 6), []), {}),
    ("aten.argmax.default", (real(4, 6), -1), {}),
    ("aten.argmax.default", (real(4, 6),), {}),
    ("aten.argmin.default", (real(4, 6, 6), 1, True), {}),
    ("aten.batch_norm.default", (real(4, 6), real(6), real(6), fixed(6), fixed(6), True, 0.1, 1e-5, False), {}),
    ("aten.broadcast_to.default", (real(1, 6), [4, 6]), {}),
    ("aten.cat.default", ([real(4, 6), real(4, 6)], 1), {}),
    ("aten.cat.default", ([real(4, 6), real(2, 6)],), {}),
    ("aten.clamp.Tensor", (real(4, 6), real(6), real(4, 1)), {}),
    ("aten.constant_pad_nd.default", (real(4, 6), [1, 0]), {}),
    ("aten.constant_pad_nd.default", (real(4, 6, 6), [0, 0, 1, -1]), {}),  # the size stays, the elements move
    ("aten.count_nonzero.default", (mask(4, 6),), {}),
    ("aten.count_nonzero.default", (mask(4, 6), 1), {}),
    ("aten.count_nonzero.dim_IntList", (mask(4, 6, 6), [0, 2]), {}),
    ("aten._adaptive_avg_pool2d.default", (real(4, 6, 5, 5), [2, 3]), {}),
    ("aten.adaptive_avg_pool1d.default", (real(4, 6, 5), [2]), {}),
    ("aten.adaptive_avg_pool2d.default", (real(4, 6, 5, 5), [2, 2]), {}),
    ("aten.avg_pool1d.default", (real(4, 6, 5), [2]), {}),
    ("aten.avg_pool2d.default", (real(4, 6, 5, 5), [2, 2], [1, 1]), {}),
    ("aten.avg_pool3d.default", (real(4, 6, 3, 3, 3), [2, 2, 2]), {}),
    ("aten.max_pool1d.default", (real(4, 6, 5), [2]), {}),
    ("aten.max_pool2d.default", (real(4, 6, 5, 5), [2, 2]), {}),
    ("aten.max_pool3d.default", (real(4, 6, 3, 3, 3), [2, 2, 2]), {}),
    ("aten.conv1d.default", (real(4, 6, 5), real(6, 6, 3), real(6)), {}),
    ("aten.conv1d.padding", (real(4, 6, 5), real(6, 6, 3), real(6), [1], "same"), {}),
    ("aten.conv2d.padding", (real(4, 6, 5, 5), real(6, 6, 2, 2), real(6), [2, 2], "valid"), {}),
    ("aten.conv3d.padding", (real(4, 6, 3, 3, 3), real(6, 6, 2, 2, 2), real(6), [1, 1, 1], "same"), {}),
    ("aten.conv2d.default", (real(4, 6, 5, 5), real(6, 6, 2, 2), real(6), [2, 2]), {}),
    ("aten.conv2d.default", (real(4, 6, 5, 5), real(6, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], 6), {}),
    ("aten.convolution.default", (real(4, 6, 5), real(6, 6, 3), real(6), [1], [0], [1], False, [0], 1), {}),
    (
        "aten.convolution_backward.default",
        (real(4, 6, 3), real(4, 6, 5), real(6, 6, 3), [6], [1], [0], [1], False, [0], 1, [True, True, True]),
        {},
    ),
    ("aten.cumprod.default", (real(4, 6), 1), {}),
    ("aten.cumsum.default", (real(4, 6), 1), {}),
    ("aten.einsum.default", ("bshd,btd->bhst", [real(2, 4, 6, 4), real(2, 6, 4)]), {}),
    ("aten.einsum.default", ("...ij,jk", [real(4, 6, 4), real(4, 6)]), {}),
    ("aten.embedding.default", (real(12, 6), ids(12, 4, 6)), {}),
    ("aten.embedding_dense_backward.default", (real(4, 6), ids(12, 4), 12, -1, False), {}),
    ("aten.expand.default", (real(4, 1, 6), [6, 4, 6, 6]), {}),
    ("aten.flatten.using_ints", (real(4, 6, 6), 1), {}),
    ("aten.flip.default", (real(4, 6), [1]), {}),
    ("aten.gather.default", (real(4, 6), 1, ids(6, 4, 12)), {}),
    ("aten.glu.default", (real(4, 12), 1), {}),
    ("aten.group_norm.default", (real(4, 6, 6), 3, real(6), real(6)), {}),
    ("aten.index.Tensor", (real(4, 6, 6), [None, ids(6, 12)]), {}),
    ("aten.index.Tensor", (real(4, 6, 6), [None, ids(6, 4, 1), ids(6, 6)]), {}),
    ("aten.index_put.default", (real(4, 6, 6), [None, ids(6, 12)], real(4, 12, 6), True), {}),
    ("aten.index_select.default", (real(4, 6), 1, ids(6, 12)), {}),
    ("aten.layer_norm.default", (real(4, 6, 6), [6], real(6), real(6)), {}),
    ("aten.layer_norm.default", (real(4, 6, 6), [6, 6], real(6, 6)), {}),
    ("aten.linalg_vector_norm.default", (real(4, 6), 2, [1]), {}),
    ("aten.linear.default", (real(4, 6, 4), real(6, 4), real(6)), {}),
    ("aten.log_softmax.int", (real(4, 6, 6), 1), {}),
    ("aten._log_softmax.default", (real(4, 6), 1, False), {}),
    ("aten._log_softmax_backward_data.default", (real(4, 6), real(4, 6), 1, torch.float64), {}),
    ("aten.logsumexp.default", (real(4, 6, 6), [1]), {}),
    ("aten.mH.default", (real(4, 6),), {}),
    ("aten.mT.default", (real(4, 6, 4),), {}),
    ("aten.masked_fill.Scalar", (real(4, 6), mask(4, 6), -1e4), {}),
    ("aten.masked_fill.Scalar", (real(4, 6), mask(6), 0), {}),
    ("aten.masked_fill.Tensor", (real(4, 6), mask(4, 6), real()), {}),
    ("aten.matmul.default", (real(2, 4, 6, 4), real(4, 4, 6)), {}),
    ("aten.matmul.default", (real(4, 6, 4), real(4)), {}),
    ("aten.matmul.default", (real(4), real(6, 4, 6)), {}),
    ("aten.matmul.default", (real(4), real(4)), {}),
    ("aten.max.dim", (real(4, 6), 1), {}),
    ("aten.max.default", (real(4, 6),), {}),
    ("aten.mean.default", (real(4, 6),), {}),
    ("aten.mean.dim", (real(4, 6, 6), [-1], True), {}),
    ("aten.movedim.int", (real(4, 6, 2), 2, 0), {}),
    ("aten.mul.Tensor", (real(4, 6), 2.0), {}),
    ("aten.mul.Tensor", (real(4, 6), real(6)), {}),
    ("aten.narrow.default", (real(4, 6), 1, 2, 4), {}),
    ("aten.native_layer_norm.default", (real(4, 6, 6), [6], real(6), real(6), 1e-5), {}),
    (
        "aten.native_layer_norm_backward.default",
        (real(4, 6), real(4, 6), [6], fixed(4, 1), fixed(4, 1), real(6), real(6), [True, True, True]),
        {},
    ),
    ("aten.nll_loss_forward.default", (real(4, 6), ids(6, 4), fixed(6), 2, -100), {}),
    ("aten.nll_loss_forward.default", (real(4, 6), ids(6, 4), fixed(6), 1, -100), {}),
    ("aten.norm.ScalarOpt_dim", (real(4, 6), 2, [1]), {}),
    ("aten.numpy_T.default", (real(4, 6),), {}),
    ("aten.pad.default", (real(4, 6), [1, 2], "constant", 0.5), {}),
    ("aten.permute.default", (real(4, 6, 2), [2, 0, 1]), {}),
    ("aten.prod.dim_int", (real(4, 6), 1), {}),
    ("aten.ravel.default", (real(4, 6),), {}),
    ("aten.repeat.default", (real(4, 6), [2, 1, 3]), {}),
    ("aten.repeat_interleave.self_int", (real(4, 6), 3, 0), {}),
    ("aten.reshape.default", (real(4, 6, 4), [4, 24]), {}),
    ("aten.reshape.default", (real(4, 24), [4, 4, 6]), {}),
    ("aten.rms_norm.default", (real(4, 6, 6), [6], real(6)), {}),
    ("aten.roll.default", (real(4, 6), [1], [1]), {}),
    ("aten.rsub.Scalar", (real(4, 6), 1.0), {}),
    ("aten._safe_softmax.default", (real(4, 6), 1), {}),
    ("aten.scaled_dot_product_attention.default", (_Q, _K, _V, fixed(6, 4)), {}),
    ("aten.scaled_dot_product_attention.default", (_Q, _K, _V, real(1, 4, 6, 4)), {}),
    ("aten.scaled_dot_product_attention.default", (_K, _K, _V), {"is_causal": True}),
    (
        "aten.scaled_dot_product_attention.default",
        (real(2, 24, 4, 2), real(2, 6, 4, 2), real(2, 6, 4, 2)),
        {"enable_gqa": True},
    ),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", (_K, _K, _V), {}),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        (real(2, 4, 4, 6), _K, _K, _V, real(2, 4, 4, 6), fixed(2, 4, 4), 0.0, False),
        {},
    ),
    ("aten.scatter.src", (real(4, 6), 1, ids(6, 4, 2), real(4, 2)), {}),
    ("aten.scatter_add.default", (real(4, 6), 1, ids(6, 4, 6), real(4, 6)), {}),
    ("aten.select.int", (real(4, 6, 6), 1, 2), {}),
    ("aten.select_backward.default", (real(4, 6), [4, 6, 6], 1, 2), {}),
    ("aten.select_scatter.default", (real(4, 6), real(4), 1, 2), {}),
    ("aten.slice.Tensor", (real(4, 12), 1, 6, 12), {}),
    ("aten.slice.Tensor", (real(4, 12), 1, 0, 12, 2), {}),
    ("aten.slice_backward.default", (real(4, 6), [4, 12], 1, 0, 6, 1), {}),
    ("aten.slice_scatter.default", (real(4, 12), real(4, 6), 1, 0, 6), {}),
    ("aten.softmax.int", (real(4, 6, 6), -1), {}),
    ("aten._softmax.default", (real(4, 6), 1, False), {}),
    ("aten._softmax_backward_data.default", (real(4, 6), real(4, 6), 1, torch.float64), {}),
    ("aten.sort.default", (real(4, 6), 1), {}),
    ("aten.squeeze.dim", (real(4, 1, 6), 1), {}),
    ("aten.stack.default", ([real(4, 6), real(4, 6)], 1), {}),
    ("aten.std.correction", (real(4, 6), [1]), {}),
    ("aten.sum.default", (real(4, 6),), {}),
    ("aten.sum.dim_IntList", (real(4, 6, 6), [0, 2]), {}),
    ("aten.t.default", (real(4, 6),), {}),
    ("aten.topk.default", (real(4, 6), 2), {}),
    ("aten.floor_divide.default", (ids(9, 4, 6), SampleTensor((4, 6), "n", 9, 1)), {}),
    ("aten.histc.default", (fixed(4, 6), 6, -4, 4), {}),
    ("aten.transpose.int", (real(4, 6, 2), 1, 2), {}),
    ("aten.unflatten.int", (real(4, 24), 1, [4, 6]), {}),
    ("aten.unsqueeze.default", (real(4, 6), 1), {}),
    ("aten._unsafe_view.default", (real(4, 6, 4), [24, 4]), {}),
    ("aten.var.correction", (real(4, 6), [1]), {"keepdim": True}),
    ("aten.var_mean.correction", (real(4, 6), [1]), {}),
    ("aten.view.default", (real(4, 6, 4), [24, 4]), {}),
    ("aten.where.ScalarOther", (mask(4, 6), real(4, 6), -1e4), {}),
    ("aten.where.ScalarOther", (mask(6), real(4, 6), 0), {}),
    ("aten.where.self", (mask(4, 6), real(4, 6), real(6)), {}),
    ("aten.bitwise_and.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.bitwise_not.default", (mask(4, 6),), {}),
    ("aten.bitwise_or.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.bitwise_xor.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.concat.default", ([real(4, 6), real(4, 6)], 1), {}),
    ("aten.concatenate.default", ([real(4, 6), real(4, 6)], 1), {}),
    ("aten.conv3d.default", (real(4, 6, 3, 3, 3), real(6, 6, 2, 2, 2), real(6)), {}),
    ("aten.cummax.default", (real(4, 6), 1), {}),
    ("aten.cummin.default", (real(4, 6), 1), {}),
    ("aten.expand_as.default", (real(1, 6), fixed(4, 6)), {}),
    ("aten.expand_copy.default", (real(4, 1), [4, 6]), {}),
    ("aten.fliplr.default", (real(4, 6),), {}),
    ("aten.flipud.default", (real(4, 6),), {}),
    ("aten.full_like.default", (real(4, 6), 2.0), {}),
    ("aten.index_add.default", (real(4, 6), 1, ids(6, 12), real(4, 12)), {}),
    ("aten.index_copy.default", (real(4, 6), 0, SampleTensor((2,), "i", 1), real(2, 6)), {}),
    ("aten.index_put.default", (real(4, 6), [None, SampleTensor((1,), "i", 6)], real(4, 1)), {}),
    ("aten.kthvalue.default", (real(4, 6), 2, 1), {}),
    ("aten.log_sigmoid_backward.default", (real(4, 6), real(4, 6), fixed(4, 6)), {}),
    ("aten.log_sigmoid_forward.default", (real(4, 6),), {}),
    ("aten.logcumsumexp.default", (real(4, 6), 1), {}),
    ("aten.median.default", (real(4, 6),), {}),
    ("aten.median.dim", (real(4, 6), 1), {}),
    ("aten.min.default", (real(4, 6),), {}),
    ("aten.min.dim", (real(4, 6), 1), {}),
    ("aten.moveaxis.int", (real(4, 6, 2), 2, 0), {}),
    ("aten.movedim.intlist", (real(4, 6, 2), [0, 2], [1, 0]), {}),
    ("aten.new_full.default", (real(4, 6), [6], 2.0), {}),
    ("aten.new_ones.default", (real(4, 6), [6]), {}),
    ("aten.new_zeros.default", (real(4, 6), [4, 6]), {}),
    ("aten.nll_loss.default", (real(4, 6), ids(6, 4), fixed(6), 0), {}),
    ("aten.nll_loss_backward.default", (real(), real(4, 6), ids(6, 4), fixed(6), 2, -100, fixed()), {}),
    ("aten.nll_loss_forward.default", (real(4, 6), ids(6, 4), fixed(6), 0, -100), {}),
    ("aten.nll_loss_nd.default", (real(4, 6), ids(6, 4), fixed(6), 2), {}),
    ("aten.norm.Scalar", (real(4, 6), 2), {}),
    ("aten.norm.ScalarOpt_dim_dtype", (real(4, 6), 2, [1], True), {"dtype": torch.float64}),
    ("aten.norm.ScalarOpt_dtype", (real(4, 6), 2), {"dtype": torch.float64}),
    ("aten.ones_like.default", (real(4, 6),), {}),
    ("aten.pow.Scalar", (2.0, real(4, 6)), {}),
    ("aten.prod.default", (real(4, 6),), {}),
    ("aten.reshape_as.default", (real(4, 6), fixed(24)), {}),
    ("aten.scatter.value", (real(4, 6), 1, ids(6, 4, 2), 0), {}),
    ("aten.scatter.value", (real(4, 6), 1, ids(6, 4, 2), 1.5), {}),
    ("aten.select_copy.int", (real(4, 6, 6), 1, 2), {}),
    ("aten.slice_copy.Tensor", (real(4, 12), 1, 0, 6), {}),
    ("aten.squeeze.default", (real(4, 1, 6),), {}),
    ("aten.squeeze.dims", (real(4, 1, 6, 1), [1, 3]), {}),
    ("aten.std.default", (real(4, 6),), {}),
    ("aten.std.dim", (real(4, 6), [1]), {}),
    ("aten.std_mean.correction", (real(4, 6), [1]), {}),
    ("aten.sub.Scalar", (real(4, 6), 1.0), {}),
    ("aten.swapaxes.default", (real(4, 6, 2), 0, 2), {}),
    ("aten.swapdims.default", (real(4, 6, 2), 0, 2), {}),
    ("aten.tile.default", (real(4, 6), [2, 1]), {}),
    ("aten.to.device", (real(4, 6), torch.device("cpu"), torch.float64), {}),
    ("aten.var.default", (real(4, 6),), {}),
    ("aten.var.dim", (real(4, 6), [1]), {}),
    ("aten.view_as.default", (real(4, 6), fixed(24)), {}),
    ("aten.view_copy.default", (real(4, 6), [24]), {}),
    ("aten.where.ScalarSelf", (mask(4, 6), 0.0, real(4, 6)), {}),
    ("aten.zeros_like.default", (real(4, 6),), {}),
]


def samples_of(op: str, rule: str | None = None) -> list[Sample]:
    """The calls to check an op with. rule: to make tensors from where the op has neither an entry nor a rule."""
    listed = [Sample(op, args, {}) for args in facts_of(op).samples]
    listed += [Sample(name, args, kwargs) for name, args, kwargs in SAMPLES if name == op]
    text = RULES.get(op) or rule
    if listed or text is None:
        return listed
    made = _from_rule(op, text)
    return [made] if made else []


def _from_rule(op: str, text: str) -> Sample | None:
    """A call whose tensors fit the rule string: factors of 4 and 6 elements, two lead dims."""
    lengths: dict[str, int] = {}
    sizes = cycle((4, 6))
    patterns = list(parse(text).operands)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    low, high = DOMAINS.get(op.split(".")[1].lstrip("_"), (-4.0, 4.0))
    for name, default, tensor, keyword in schema_of(op):
        value: Any
        if tensor:
            pattern = patterns.pop(0) if patterns else Pattern("*")
            shape = _shape(pattern, lengths, sizes)
            value = SampleTensor(shape, "n" if pattern.role == "~" else "x", high, low)
        elif name in SCALARS and default is None:
            value = SCALARS[name]
        elif default is None and name not in _OPTIONAL:
            return None
        else:
            value = default
        if keyword:
            kwargs[name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs)


_OPTIONAL = ("memory_format", "layout", "device", "pin_memory", "decimals", "generator", "nan", "posinf", "neginf")


def _shape(pattern: Pattern, lengths: dict[str, int], sizes: Any) -> tuple[int, ...]:
    def length(d: Dim) -> int:
        product = 1
        for f in d.factors:
            if f not in lengths:
                lengths[f] = next(sizes)
            product *= lengths[f]
        return product

    lead = (Dim(("_2",)), Dim(("_1",))) if pattern.dots else ()
    return tuple(length(d) for d in (*pattern.head, *lead, *pattern.tail))
