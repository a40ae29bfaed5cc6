"""Calls of ATen ops on small tensors, for `check_rules`. Data. Samples of megafx's own ops are facts of theirs (ir/facts.py).

Ops of the table whose dims follow from their rule string need no entry: `samples_of` makes their tensors from the string.
torch's own samples (op_db) do not serve: of 5,047 for these ops, none has sizes that 2 and 3 ranks divide, so that no shard
would be tried for missing rows; they name Python functions, not overloads; and they take a test library and seconds to import.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from megafx.ir.facts import SampleTensor, facts_of, fixed, ids, mask, real
from megafx.rules.aten import RULES
from megafx.rules.grammar import Dim, Factors, parse
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

_M, _M3, _V = real(4, 6), real(4, 6, 6), real(6)
_Q, _K, _V4 = real(2, 4, 6, 6), real(2, 4, 4, 6), real(2, 4, 4, 6)
_ROWS, _ROWS2 = real(2, 4, 6, 4), real(2, 4, 6, 2)  # [b, t, heads, e]
_CHANCES = SampleTensor((4, 6), "x", 0.9, 0.1), SampleTensor((4, 6), "n", 0.9, 0.1)  # of classes, and targets

_CONV = ([1], [0], [1], False, [0], 1)  # stride, padding, dilation, transposed, output padding, groups

# ATen ops (without 'aten.' and '.default'), and arguments of one call of each; a dict at the end: keyword arguments.
CALLS: list[tuple[Any, ...]] = [
    ("adaptive_avg_pool1d avg_pool1d max_pool1d", real(4, 6, 5), [2]),
    ("adaptive_avg_pool2d max_pool2d", real(4, 6, 5, 5), [2, 2]),
    ("add.Tensor mul.Tensor full_like", _M, 2.0),
    ("adjoint argmax fliplr flipud log_sigmoid_forward mH max mean median min", _M),
    ("numpy_T ones_like prod ravel std sum t var zeros_like", _M),
    ("all any count_nonzero bitwise_not", mask(4, 6)),
    ("amax logsumexp", _M3, [1]),
    ("avg_pool3d max_pool3d", real(4, 6, 3, 3, 3), [2, 2, 2]),
    ("bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor", mask(4, 6), mask(6)),
    ("cat stack concat concatenate", [_M, _M], 1),
    ("cummax cummin cumprod cumsum logcumsumexp sort unsqueeze", _M, 1),
    ("max.dim median.dim min.dim prod.dim_int _safe_softmax", _M, 1),
    ("flatten.using_ints log_softmax.int", _M3, 1),
    ("flip std.correction var_mean.correction std.dim std_mean.correction var.dim", _M, [1]),
    ("linalg_vector_norm norm.ScalarOpt_dim", _M, 2, [1]),
    ("_log_softmax _softmax", _M, 1, False),
    ("_log_softmax_backward_data _softmax_backward_data", _M, _M, 1, torch.float64),
    ("movedim.int moveaxis.int", real(4, 6, 2), 2, 0),
    ("one_hot", ids(5, 4, 6), 5),
    ("cdist", real(2, 4, 6), real(2, 6, 6)),
    ("_cdist_forward", real(2, 4, 6), real(2, 6, 6), 2.0, None),
    ("_euclidean_dist", _M, real(6, 6)),
    ("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", _M3, None, 1),
    ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn", _M3),
    ("fft_fftshift fft_ifftshift", _M3, [1]),
    ("reshape_as view_as", _M, fixed(24)),
    ("rsub.Scalar sub.Scalar", _M, 1.0),
    ("select.int select_copy.int", _M3, 1, 2),
    ("swapaxes swapdims", real(4, 6, 2), 0, 2),
    ("topk norm.Scalar", _M, 2),
    ("_unsafe_index.Tensor index.Tensor", _M3, [None, ids(6, 12)]),
    ("_unsafe_view view", real(4, 6, 4), [24, 4]),
    ("_adaptive_avg_pool2d", real(4, 6, 5, 5), [2, 3]),
    ("add.Scalar", _M, 0),
    ("add.Tensor", _M, _V, {"alpha": 2}),
    ("all.dim", mask(4, 6, 6), 1),
    ("all.dims", mask(4, 6, 6), [0, -1], True),
    ("amin", _M, [0], True),
    ("aminmax", _M, {"dim": 1}),
    ("any.dim", mask(4, 6, 6), -1, True),
    ("any.dims", mask(4, 6, 6), [0, 1]),
    ("any.dims", mask(4, 6), []),
    ("argmax", _M, -1),
    ("argmin", _M3, 1, True),
    ("avg_pool2d", real(4, 6, 5, 5), [2, 2], [1, 1]),
    ("batch_norm", _M, _V, _V, fixed(6), fixed(6), True, 0.1, 1e-5, False),
    ("broadcast_to", real(1, 6), [4, 6]),
    ("cat", [_M, real(2, 6)]),
    ("clamp.Tensor", _M, _V, real(4, 1)),
    ("constant_pad_nd", _M, [1, 0]),
    ("constant_pad_nd", _M3, [0, 0, 1, -1]),  # the size stays, the elements move
    ("conv1d", real(4, 6, 5), real(6, 6, 3), _V),
    ("conv1d.padding", real(4, 6, 5), real(6, 6, 3), _V, [1], "same"),
    ("conv2d", real(4, 6, 5, 5), real(6, 6, 2, 2), _V, [2, 2]),
    ("conv2d", real(4, 6, 5, 5), real(6, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], 6),
    ("conv2d.padding", real(4, 6, 5, 5), real(6, 6, 2, 2), _V, [2, 2], "valid"),
    ("conv3d", real(4, 6, 3, 3, 3), real(6, 6, 2, 2, 2), _V),
    ("conv3d.padding", real(4, 6, 3, 3, 3), real(6, 6, 2, 2, 2), _V, [1, 1, 1], "same"),
    ("convolution", real(4, 6, 5), real(6, 6, 3), _V, *_CONV),
    ("convolution_backward", real(4, 6, 3), real(4, 6, 5), real(6, 6, 3), [6], *_CONV, [True, True, True]),
    ("convolution_backward", real(4, 6, 3), real(4, 6, 5), real(6, 1, 3), [6], *_CONV[:-1], 6, [True, True, True]),
    ("convolution", real(4, 6, 3), real(6, 4, 3), real(4), [2], [0], [1], True, [0], 1),
    ("convolution", real(4, 6, 3), real(6, 2, 3), real(12), [1], [0], [1], True, [0], 6),
    ("convolution_backward", real(4, 4, 5), real(4, 6, 3), real(6, 4, 3), [4], [1], [0], [1], True, [0], 1, [True] * 3),
    ("count_nonzero", mask(4, 6), 1),
    ("count_nonzero.dim_IntList", mask(4, 6, 6), [0, 2]),
    ("diagonal diagonal_copy", _M3, 0, 1, 2),
    ("diagonal_backward", real(4, 6), [4, 6, 6], 0, -2, -1),
    ("einsum", "bshd,btd->bhst", [real(2, 4, 6, 4), real(2, 6, 4)]),
    ("einsum", "...ij,jk", [real(4, 6, 4), _M]),
    ("embedding", real(12, 6), ids(12, 4, 6)),
    ("embedding_dense_backward", _M, ids(12, 4), 12, -1, False),
    ("expand", real(4, 1, 6), [6, 4, 6, 6]),
    ("expand_as", real(1, 6), fixed(4, 6)),
    ("expand_copy", real(4, 1), [4, 6]),
    ("floor_divide", ids(9, 4, 6), SampleTensor((4, 6), "n", 9, 1)),
    ("_fused_rms_norm", _M3, [6], _V, 1e-5),
    ("_fused_rms_norm_backward", _M, _M, [6], fixed(4, 1), _V, [True, True]),
    ("gather", _M, 1, ids(6, 4, 12)),
    ("glu", real(4, 12), 1),
    ("glu", real(4, 12, 6), -2),
    ("glu_backward", real(4, 6), real(4, 12), 1),
    ("mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss", _M, fixed(4, 6), 0),
    ("mse_loss_backward soft_margin_loss_backward", _M, _M, fixed(4, 6), 0),
    ("smooth_l1_loss_backward huber_loss_backward", _M, _M, fixed(4, 6), 0, 0.7),
    ("kl_div", _M, _CHANCES[1], 0),
    ("binary_cross_entropy", *_CHANCES, fixed(6), 0),
    ("binary_cross_entropy_backward", _M, *_CHANCES, None, 0),
    ("binary_cross_entropy_with_logits", _M, fixed(4, 6), None, fixed(6), 0),
    ("group_norm", _M3, 3, _V, _V),
    ("histc", fixed(4, 6), 6, -4, 4),
    ("index.Tensor", _M3, [None, ids(6, 4, 1), ids(6, 6)]),
    ("index_add", _M, 1, ids(6, 12), real(4, 12)),
    ("index_copy", _M, 0, SampleTensor((2,), "i", 1), real(2, 6)),
    ("index_put", _M3, [None, ids(6, 12)], real(4, 12, 6), True),
    ("index_put", _M, [None, SampleTensor((1,), "i", 6)], real(4, 1)),
    ("index_select", _M, 1, ids(6, 12)),
    ("kthvalue", _M, 2, 1),
    ("layer_norm", _M3, [6], _V, _V),
    ("layer_norm", _M3, [6, 6], real(6, 6)),
    ("linear", real(4, 6, 4), real(6, 4), _V),
    ("log_sigmoid_backward", _M, _M, fixed(4, 6)),
    ("mT", real(4, 6, 4)),
    ("masked_fill.Scalar", _M, mask(4, 6), -1e4),
    ("masked_fill.Scalar", _M, mask(6), 0),
    ("masked_fill.Tensor", _M, mask(4, 6), real()),
    ("matmul", real(2, 4, 6, 4), real(4, 4, 6)),
    ("matmul", real(4, 6, 4), real(4)),
    ("matmul", real(4), real(6, 4, 6)),
    ("matmul", real(4), real(4)),
    ("mean.dim", _M3, [-1], True),
    ("movedim.intlist", real(4, 6, 2), [0, 2], [1, 0]),
    ("mul.Tensor", _M, _V),
    ("narrow", _M, 1, 2, 4),
    ("_native_batch_norm_legit.no_stats", real(4, 6, 3), _V, _V, True, 0.1, 1e-5),
    (
        "_native_batch_norm_legit_no_training",
        real(4, 6, 3),
        _V,
        _V,
        fixed(6),
        SampleTensor((6,), "n", 3, 0.3),
        0.1,
        1e-5,
    ),
    ("native_batch_norm_backward", *(_M, _M, _V, None, None, fixed(6), fixed(6), True, 1e-5, [True, True, True])),
    ("native_layer_norm", _M3, [6], _V, _V, 1e-5),
    ("native_layer_norm_backward", _M, _M, [6], fixed(4, 1), fixed(4, 1), _V, _V, [True, True, True]),
    ("new_full", _M, [6], 2.0),
    ("new_ones", _M, [6]),
    ("new_zeros", _M, [4, 6]),
    ("nll_loss", _M, ids(6, 4), fixed(6), 0),
    ("nll_loss_backward", real(), _M, ids(6, 4), fixed(6), 2, -100, fixed()),
    *(("nll_loss_forward", _M, ids(6, 4), fixed(6), reduction, -100) for reduction in (2, 1, 0)),
    ("nll_loss_nd", _M, ids(6, 4), fixed(6), 2),
    ("norm.ScalarOpt_dim_dtype", _M, 2, [1], True, {"dtype": torch.float64}),
    ("norm.ScalarOpt_dtype", _M, 2, {"dtype": torch.float64}),
    ("pad", _M, [1, 2], "constant", 0.5),
    ("permute", real(4, 6, 2), [2, 0, 1]),
    ("pow.Scalar", 2.0, _M),
    ("repeat", _M, [2, 1, 3]),
    ("repeat_interleave.self_int", _M, 3, 0),
    ("reshape", real(4, 6, 4), [4, 24]),
    ("reshape", real(4, 24), [4, 4, 6]),
    ("rms_norm", _M3, [6], _V),
    ("roll", _M, [1], [1]),
    ("scaled_dot_product_attention", _Q, _K, _V4, fixed(6, 4)),
    ("scaled_dot_product_attention", _Q, _K, _V4, real(1, 4, 6, 4)),
    ("scaled_dot_product_attention", _K, _K, _V4, {"is_causal": True}),
    ("scaled_dot_product_attention", real(2, 24, 4, 2), real(2, 6, 4, 2), real(2, 6, 4, 2), {"enable_gqa": True}),
    ("_efficient_attention_forward", _ROWS, _ROWS, _ROWS, real(2, 6, 4, 4), None, None, None, None, 0.0, 2, True),
    (
        "_efficient_attention_backward",
        _ROWS,
        _ROWS,
        _ROWS,
        _ROWS,
        real(2, 6, 4, 4),
        _ROWS,
        None,
        None,
        4,
        4,
        fixed(2, 6, 4),
        0.0,
        torch.zeros((), dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        2,
        True,
    ),
    ("_flash_attention_forward", real(2, 4, 24, 2), _ROWS2, _ROWS2, None, None, 4, 4, 0.0, True, False),
    ("_scaled_dot_product_flash_attention_for_cpu", _K, _K, _V4),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", _K, _K, _K, _V4, _K, fixed(2, 4, 4), 0.0, False),
    ("scatter.src", _M, 1, ids(6, 4, 2), real(4, 2)),
    ("scatter.value", _M, 1, ids(6, 4, 2), 0),
    ("scatter.value", _M, 1, ids(6, 4, 2), 1.5),
    ("scatter_add", _M, 1, ids(6, 4, 6), _M),
    ("select_backward", _M, [4, 6, 6], 1, 2),
    ("select_scatter", _M, real(4), 1, 2),
    ("slice.Tensor", real(4, 12), 1, 6, 12),
    ("split_with_sizes", real(4, 12), [4, 8], 1),
    ("slice.Tensor", real(4, 12), 1, 0, 12, 2),
    ("slice_backward", _M, [4, 12], 1, 0, 6, 1),
    ("slice_copy.Tensor", real(4, 12), 1, 0, 6),
    ("slice_scatter", real(4, 12), _M, 1, 0, 6),
    ("softmax.int", _M3, -1),
    ("squeeze", real(4, 1, 6)),
    ("squeeze.dim", real(4, 1, 6), 1),
    ("squeeze.dims", real(4, 1, 6, 1), [1, 3]),
    ("sum.dim_IntList", _M3, [0, 2]),
    ("tile", _M, [2, 1]),
    ("to.device", _M, torch.device("cpu"), torch.float64),
    ("transpose.int", real(4, 6, 2), 1, 2),
    ("unflatten.int", real(4, 24), 1, [4, 6]),
    ("_unsafe_index_put", _M, [ids(4, 6)], real(6, 6), True),
    ("var.correction", _M, [1], {"keepdim": True}),
    ("view_as_complex", real(4, 6, 2)),
    ("view_copy", _M, [24]),
    ("where.Scalar", mask(4, 6), 1.0, -2.0),
    ("where.ScalarOther", mask(4, 6), _M, -1e4),
    ("where.ScalarOther", mask(6), _M, 0),
    ("where.ScalarSelf", mask(4, 6), 0.0, _M),
    ("where.self", mask(4, 6), _M, _V),
]
SAMPLES: dict[str, list[tuple[Any, ...]]] = {}
for _ops, *_args in CALLS:
    for _op in _ops.split():
        SAMPLES.setdefault(f"aten.{_op}" if "." in _op else f"aten.{_op}.default", []).append(tuple(_args))


def samples_of(op: str, rule: str | None = None) -> list[Sample]:
    """The calls to check an op with. rule: to make tensors from where the op has neither an entry nor a rule."""
    listed = [_sample(op, args) for args in (*facts_of(op).samples, *SAMPLES.get(op, ()))]
    text = RULES.get(op) or rule
    if listed or text is None:
        return listed
    made = _from_rule(op, text)
    return [made] if made else []


def _sample(op: str, args: tuple[Any, ...]) -> Sample:
    keywords = args[-1] if isinstance(args[-1], dict) else None
    return Sample(op, args if keywords is None else args[:-1], keywords or {})


def _from_rule(op: str, text: str) -> Sample | None:
    """A call whose tensors fit the rule string: factors of 4 and 6 elements, two lead dims."""
    lengths: dict[str, int] = defaultdict(cycle((4, 6)).__next__)
    patterns = list(parse(text).operands)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    low, high = DOMAINS.get(op.split(".")[1].lstrip("_"), (-4.0, 4.0))
    for name, default, tensor, keyword in schema_of(op):
        value: Any
        if tensor:
            pattern = patterns.pop(0) if patterns else Factors("*")
            lead = (Dim(("_2",)), Dim(("_1",))) if pattern.dots else ()
            dims = (*pattern.head, *lead, *pattern.tail)
            shape = tuple(math.prod(lengths[f] for f in d.factors) for d in dims)
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
