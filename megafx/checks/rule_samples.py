"""A call of each op on small tensors, for `check_rules`. Data.

Ops of the table whose dims follow from their rule string need no entry: `sample_of` makes their tensors from the string.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

import torch

from megafx.rules.aten import RULES
from megafx.rules.grammar import Dim, Pattern, parse
from megafx.rules.strategies import schema_of


class T(NamedTuple):
    """A tensor argument. kind: 'x' needs a gradient, 'n' does not, 'i' ids below `high`, 'm' a mask."""

    shape: tuple[int, ...]
    kind: str = "x"
    high: float = 4
    low: float = -4

    def make(self, generator: torch.Generator) -> torch.Tensor:
        if self.kind == "i":
            return torch.randint(0, int(self.high), self.shape, generator=generator)
        if self.kind == "m":
            return torch.rand(self.shape, generator=generator) < 0.7
        spread = torch.rand(self.shape, generator=generator, dtype=torch.float64)
        return spread * (self.high - self.low) + self.low


@dataclass(frozen=True)
class Sample:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def x(*shape: int) -> T:
    return T(shape)


def ids(high: int, *shape: int) -> T:
    return T(shape, "i", high)


def mask(*shape: int) -> T:
    return T(shape, "m")


def plain(*shape: int) -> T:
    return T(shape, "n")


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

_Q, _K, _V = x(2, 4, 6, 6), x(2, 4, 4, 6), x(2, 4, 4, 6)
_G = x(2, 6, 4, 2)  # keys and values, each head for four of the queries
# scale, causal, window, softcap, p, op_id, shard_dim, layout, axis
_ATTENTION: tuple[Any, ...] = (0.4, False, 0, 2.0, 0.0, 3, -1, [], "tp")
_ATTENTION_DROPPED: tuple[Any, ...] = (0.4, False, 0, 0.0, 0.5, 3, -1, [], "tp")
_ATTENTION_CAUSAL: tuple[Any, ...] = (0.4, True, 2, 0.0, 0.5, 3, -1, [], "tp")
_SEED = T((), "i", 1000)
_RANGES = (ids(4, 4), ids(7, 4))  # of the rows of experts
_GATED = "v0 = megafx.glu_packed(h0, None, 'silu'); v0"
_BIASED = (
    "v0 = add.Tensor(h0, e0); v1 = megafx.glu(v0, h1, 'gelu'); v2 = softmax.int(v1, -1); v3 = add.Tensor(v2, r0); v3"
)
_DRAWN: tuple[Any, ...] = (0.5, 3, -1, [], "tp")
_UNDRAWN: tuple[Any, ...] = (0.0, 0, -1, [], "tp")

SAMPLES: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten._fused_rms_norm.default", (x(4, 6, 6), [6], x(6), 1e-5), {}),
    (
        "aten._fused_rms_norm_backward.default",
        (x(4, 6), x(4, 6), [6], plain(4, 1), x(6), [True, True]),
        {},
    ),
    ("aten._unsafe_index.Tensor", (x(4, 6, 6), [None, ids(6, 12)]), {}),
    ("aten._unsafe_index_put.default", (x(4, 6), [ids(4, 6)], x(6, 6), True), {}),
    ("aten.view_as_complex.default", (x(4, 6, 2),), {}),
    ("aten.adjoint.default", (x(4, 6),), {}),
    ("aten.all.default", (mask(4, 6),), {}),
    ("aten.all.dim", (mask(4, 6, 6), 1), {}),
    ("aten.all.dims", (mask(4, 6, 6), [0, -1], True), {}),
    ("aten.amax.default", (x(4, 6, 6), [1]), {}),
    ("aten.amin.default", (x(4, 6), [0], True), {}),
    ("aten.add.Tensor", (x(4, 6), 2.0), {}),
    ("aten.add.Tensor", (x(4, 6), x(6)), {"alpha": 2}),
    ("aten.add.Scalar", (x(4, 6), 0), {}),
    ("aten.aminmax.default", (x(4, 6),), {"dim": 1}),
    ("aten.any.default", (mask(4, 6),), {}),
    ("aten.any.dim", (mask(4, 6, 6), -1, True), {}),
    ("aten.any.dims", (mask(4, 6, 6), [0, 1]), {}),
    ("aten.any.dims", (mask(4, 6), []), {}),
    ("aten.argmax.default", (x(4, 6), -1), {}),
    ("aten.argmax.default", (x(4, 6),), {}),
    ("aten.argmin.default", (x(4, 6, 6), 1, True), {}),
    ("aten.batch_norm.default", (x(4, 6), x(6), x(6), plain(6), plain(6), True, 0.1, 1e-5, False), {}),
    ("aten.broadcast_to.default", (x(1, 6), [4, 6]), {}),
    ("aten.cat.default", ([x(4, 6), x(4, 6)], 1), {}),
    ("aten.cat.default", ([x(4, 6), x(2, 6)],), {}),
    ("megafx.join_parameters.default", ([x(4, 6), x(2, 6)],), {}),
    ("aten.clamp.Tensor", (x(4, 6), x(6), x(4, 1)), {}),
    ("aten.constant_pad_nd.default", (x(4, 6), [1, 0]), {}),
    ("aten.constant_pad_nd.default", (x(4, 6, 6), [0, 0, 1, -1]), {}),  # the size stays, the elements move
    ("aten.count_nonzero.default", (mask(4, 6),), {}),
    ("aten.count_nonzero.default", (mask(4, 6), 1), {}),
    ("aten.count_nonzero.dim_IntList", (mask(4, 6, 6), [0, 2]), {}),
    ("aten._adaptive_avg_pool2d.default", (x(4, 6, 5, 5), [2, 3]), {}),
    ("aten.adaptive_avg_pool1d.default", (x(4, 6, 5), [2]), {}),
    ("aten.adaptive_avg_pool2d.default", (x(4, 6, 5, 5), [2, 2]), {}),
    ("aten.avg_pool1d.default", (x(4, 6, 5), [2]), {}),
    ("aten.avg_pool2d.default", (x(4, 6, 5, 5), [2, 2], [1, 1]), {}),
    ("aten.avg_pool3d.default", (x(4, 6, 3, 3, 3), [2, 2, 2]), {}),
    ("aten.max_pool1d.default", (x(4, 6, 5), [2]), {}),
    ("aten.max_pool2d.default", (x(4, 6, 5, 5), [2, 2]), {}),
    ("aten.max_pool3d.default", (x(4, 6, 3, 3, 3), [2, 2, 2]), {}),
    ("aten.conv1d.default", (x(4, 6, 5), x(6, 6, 3), x(6)), {}),
    ("aten.conv1d.padding", (x(4, 6, 5), x(6, 6, 3), x(6), [1], "same"), {}),
    ("aten.conv2d.padding", (x(4, 6, 5, 5), x(6, 6, 2, 2), x(6), [2, 2], "valid"), {}),
    ("aten.conv3d.padding", (x(4, 6, 3, 3, 3), x(6, 6, 2, 2, 2), x(6), [1, 1, 1], "same"), {}),
    ("aten.conv2d.default", (x(4, 6, 5, 5), x(6, 6, 2, 2), x(6), [2, 2]), {}),
    ("aten.conv2d.default", (x(4, 6, 5, 5), x(6, 1, 2, 2), None, [1, 1], [0, 0], [1, 1], 6), {}),
    ("aten.convolution.default", (x(4, 6, 5), x(6, 6, 3), x(6), [1], [0], [1], False, [0], 1), {}),
    (
        "aten.convolution_backward.default",
        (x(4, 6, 3), x(4, 6, 5), x(6, 6, 3), [6], [1], [0], [1], False, [0], 1, [True, True, True]),
        {},
    ),
    ("aten.cumprod.default", (x(4, 6), 1), {}),
    ("aten.cumsum.default", (x(4, 6), 1), {}),
    ("aten.einsum.default", ("bshd,btd->bhst", [x(2, 4, 6, 4), x(2, 6, 4)]), {}),
    ("aten.einsum.default", ("...ij,jk", [x(4, 6, 4), x(4, 6)]), {}),
    ("aten.embedding.default", (x(12, 6), ids(12, 4, 6)), {}),
    ("aten.embedding_dense_backward.default", (x(4, 6), ids(12, 4), 12, -1, False), {}),
    ("aten.expand.default", (x(4, 1, 6), [6, 4, 6, 6]), {}),
    ("aten.flatten.using_ints", (x(4, 6, 6), 1), {}),
    ("aten.flip.default", (x(4, 6), [1]), {}),
    ("aten.gather.default", (x(4, 6), 1, ids(6, 4, 12)), {}),
    ("aten.glu.default", (x(4, 12), 1), {}),
    ("aten.group_norm.default", (x(4, 6, 6), 3, x(6), x(6)), {}),
    ("aten.index.Tensor", (x(4, 6, 6), [None, ids(6, 12)]), {}),
    ("aten.index.Tensor", (x(4, 6, 6), [None, ids(6, 4, 1), ids(6, 6)]), {}),
    ("aten.index_put.default", (x(4, 6, 6), [None, ids(6, 12)], x(4, 12, 6), True), {}),
    ("aten.index_select.default", (x(4, 6), 1, ids(6, 12)), {}),
    ("aten.layer_norm.default", (x(4, 6, 6), [6], x(6), x(6)), {}),
    ("aten.layer_norm.default", (x(4, 6, 6), [6, 6], x(6, 6)), {}),
    ("aten.linalg_vector_norm.default", (x(4, 6), 2, [1]), {}),
    ("aten.linear.default", (x(4, 6, 4), x(6, 4), x(6)), {}),
    ("aten.log_softmax.int", (x(4, 6, 6), 1), {}),
    ("aten._log_softmax.default", (x(4, 6), 1, False), {}),
    ("aten._log_softmax_backward_data.default", (x(4, 6), x(4, 6), 1, torch.float64), {}),
    ("aten.logsumexp.default", (x(4, 6, 6), [1]), {}),
    ("aten.mH.default", (x(4, 6),), {}),
    ("aten.mT.default", (x(4, 6, 4),), {}),
    ("aten.masked_fill.Scalar", (x(4, 6), mask(4, 6), -1e4), {}),
    ("aten.masked_fill.Scalar", (x(4, 6), mask(6), 0), {}),
    ("aten.masked_fill.Tensor", (x(4, 6), mask(4, 6), x()), {}),
    ("aten.matmul.default", (x(2, 4, 6, 4), x(4, 4, 6)), {}),
    ("aten.matmul.default", (x(4, 6, 4), x(4)), {}),
    ("aten.matmul.default", (x(4), x(6, 4, 6)), {}),
    ("aten.matmul.default", (x(4), x(4)), {}),
    ("aten.max.dim", (x(4, 6), 1), {}),
    ("aten.max.default", (x(4, 6),), {}),
    ("aten.mean.default", (x(4, 6),), {}),
    ("aten.mean.dim", (x(4, 6, 6), [-1], True), {}),
    ("aten.movedim.int", (x(4, 6, 2), 2, 0), {}),
    ("aten.mul.Tensor", (x(4, 6), 2.0), {}),
    ("aten.mul.Tensor", (x(4, 6), x(6)), {}),
    ("aten.narrow.default", (x(4, 6), 1, 2, 4), {}),
    ("aten.native_layer_norm.default", (x(4, 6, 6), [6], x(6), x(6), 1e-5), {}),
    (
        "aten.native_layer_norm_backward.default",
        (x(4, 6), x(4, 6), [6], plain(4, 1), plain(4, 1), x(6), x(6), [True, True, True]),
        {},
    ),
    ("aten.nll_loss_forward.default", (x(4, 6), ids(6, 4), plain(6), 2, -100), {}),
    ("aten.nll_loss_forward.default", (x(4, 6), ids(6, 4), plain(6), 1, -100), {}),
    ("aten.norm.ScalarOpt_dim", (x(4, 6), 2, [1]), {}),
    ("aten.numpy_T.default", (x(4, 6),), {}),
    ("aten.pad.default", (x(4, 6), [1, 2], "constant", 0.5), {}),
    ("aten.pad.default", (x(4, 6), [2, -2]), {}),
    ("aten.permute.default", (x(4, 6, 2), [2, 0, 1]), {}),
    ("aten.prod.dim_int", (x(4, 6), 1), {}),
    ("aten.ravel.default", (x(4, 6),), {}),
    ("aten.repeat.default", (x(4, 6), [2, 1, 3]), {}),
    ("aten.repeat_interleave.self_int", (x(4, 6), 3, 0), {}),
    ("aten.reshape.default", (x(4, 6, 4), [4, 24]), {}),
    ("aten.reshape.default", (x(4, 24), [4, 4, 6]), {}),
    ("aten.rms_norm.default", (x(4, 6, 6), [6], x(6)), {}),
    ("aten.roll.default", (x(4, 6), [1], [1]), {}),
    ("aten.rsub.Scalar", (x(4, 6), 1.0), {}),
    ("aten._safe_softmax.default", (x(4, 6), 1), {}),
    ("aten.scaled_dot_product_attention.default", (_Q, _K, _V, plain(6, 4)), {}),
    ("aten.scaled_dot_product_attention.default", (_Q, _K, _V, x(1, 4, 6, 4)), {}),
    ("aten.scaled_dot_product_attention.default", (_K, _K, _V), {"is_causal": True}),
    ("aten.scaled_dot_product_attention.default", (x(2, 24, 4, 2), x(2, 6, 4, 2), x(2, 6, 4, 2)), {"enable_gqa": True}),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", (_K, _K, _V), {}),
    (
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        (x(2, 4, 4, 6), _K, _K, _V, x(2, 4, 4, 6), plain(2, 4, 4), 0.0, False),
        {},
    ),
    ("aten.scatter.src", (x(4, 6), 1, ids(6, 4, 2), x(4, 2)), {}),
    ("aten.scatter_add.default", (x(4, 6), 1, ids(6, 4, 6), x(4, 6)), {}),
    ("aten.select.int", (x(4, 6, 6), 1, 2), {}),
    ("aten.select_backward.default", (x(4, 6), [4, 6, 6], 1, 2), {}),
    ("aten.select_scatter.default", (x(4, 6), x(4), 1, 2), {}),
    ("aten.slice.Tensor", (x(4, 12), 1, 6, 12), {}),
    ("aten.slice.Tensor", (x(4, 12), 1, 0, 12, 2), {}),
    ("aten.slice_backward.default", (x(4, 6), [4, 12], 1, 0, 6, 1), {}),
    ("aten.slice_scatter.default", (x(4, 12), x(4, 6), 1, 0, 6), {}),
    ("aten.softmax.int", (x(4, 6, 6), -1), {}),
    ("aten._softmax.default", (x(4, 6), 1, False), {}),
    ("aten._softmax_backward_data.default", (x(4, 6), x(4, 6), 1, torch.float64), {}),
    ("aten.sort.default", (x(4, 6), 1), {}),
    ("aten.squeeze.dim", (x(4, 1, 6), 1), {}),
    ("aten.stack.default", ([x(4, 6), x(4, 6)], 1), {}),
    ("aten.std.correction", (x(4, 6), [1]), {}),
    ("aten.sum.default", (x(4, 6),), {}),
    ("aten.sum.dim_IntList", (x(4, 6, 6), [0, 2]), {}),
    ("aten.t.default", (x(4, 6),), {}),
    ("aten.topk.default", (x(4, 6), 2), {}),
    ("aten.floor_divide.default", (ids(9, 4, 6), T((4, 6), "n", 9, 1)), {}),
    ("aten.histc.default", (plain(4, 6), 6, -4, 4), {}),
    ("aten.transpose.int", (x(4, 6, 2), 1, 2), {}),
    ("aten.unflatten.int", (x(4, 24), 1, [4, 6]), {}),
    ("aten.unsqueeze.default", (x(4, 6), 1), {}),
    ("aten._unsafe_view.default", (x(4, 6, 4), [24, 4]), {}),
    ("aten.var.correction", (x(4, 6), [1]), {"keepdim": True}),
    ("aten.var_mean.correction", (x(4, 6), [1]), {}),
    ("aten.view.default", (x(4, 6, 4), [24, 4]), {}),
    ("aten.where.ScalarOther", (mask(4, 6), x(4, 6), -1e4), {}),
    ("aten.where.ScalarOther", (mask(6), x(4, 6), 0), {}),
    ("aten.where.self", (mask(4, 6), x(4, 6), x(6)), {}),
    ("megafx.attention.default", (_Q, _K, _V, x(1, 4, 6, 4), None, None, *_ATTENTION), {}),
    ("megafx.attention.default", (x(2, 24, 4, 2), _G, _G, mask(2, 4), None, T((), "i", 1000), *_ATTENTION_DROPPED), {}),
    ("megafx.attention.default", (_K, _K, _V, None, None, T((), "i", 1000), *_ATTENTION_CAUSAL), {}),
    ("megafx.attention_forward.default", (_Q, _K, _V, None, None, None, *_ATTENTION), {}),
    ("megafx.attention_forward.default", (_Q, _K, _V, plain(1, 4, 6, 4), mask(2, 4), None, *_ATTENTION), {}),
    (
        "megafx.attention_backward.default",
        (x(2, 4, 6, 6), _Q, _K, _V, plain(2, 1, 6, 4), mask(2, 4), None, x(2, 4, 6, 6), plain(2, 4, 6), *_ATTENTION),
        {},
    ),
    (
        "megafx.attention_mask_backward.default",
        (x(2, 4, 6, 6), _Q, _K, _V, x(2, 4, 6, 4), None, None, x(2, 4, 6, 6), plain(2, 4, 6), *_ATTENTION),
        {},
    ),
    ("megafx.bias_dropout_add.default", (x(4, 6, 6), x(6), x(4, 6, 6), _SEED, *_DRAWN), {}),
    (
        "megafx.embedding_sum.default",
        (x(4, 6, 6), None, x(12, 6), ids(12, 1, 6), x(4, 6), ids(4, 4, 6), [-1, -1, -1], _SEED, *_DRAWN),
        {},
    ),
    (
        "megafx.embedding_sum.default",
        (x(12, 6), ids(12, 4, 6), x(1, 6, 6), *[None] * 3, [-1, -1, -1], None, *_UNDRAWN),
        {},
    ),
    ("megafx.embedding_sum_backward.default", (x(4, 6, 6), torch.float64, _SEED, *_DRAWN), {}),
    ("megafx.bias_dropout_add.default", (x(4, 6), None, x(4, 6), None, *_UNDRAWN), {}),
    ("megafx.bias_dropout_add_backward.default", (x(4, 6), torch.float64, torch.float64, _SEED, *_DRAWN), {}),
    ("megafx.dropout_add_backward.default", (x(4, 6), torch.float64, _SEED, *_DRAWN), {}),
    ("megafx.column_sum.default", (x(4, 6), torch.float64), {}),
    ("megafx.layer_norm.default", (x(4, 6, 6), x(6), x(6), 1e-5), {}),
    ("megafx.layer_norm.default", (x(4, 6), None, None, 1e-5), {}),
    ("megafx.layer_norm_forward.default", (x(4, 6, 6), x(6), x(6), 1e-5), {}),
    ("megafx.layer_norm_backward.default", (x(4, 6), x(4, 6), x(6), x(4), x(4), True, True), {}),
    ("megafx.rms_norm.default", (x(4, 6, 6), x(6), 1e-5, 1.0), {}),
    ("megafx.rms_norm_forward.default", (x(4, 6, 6), x(6), 1e-5, 1.0), {}),
    ("megafx.rms_norm_backward.default", (x(4, 6), x(4, 6), x(6), x(4), 1.0, True), {}),
    (
        "megafx.bias_dropout_add_layer_norm.default",
        (x(4, 6), x(6), x(4, 6), x(6), x(6), 1e-5, _SEED, *_DRAWN),
        {},
    ),
    (
        "megafx.bias_dropout_add_layer_norm_backward.default",
        (*[x(4, 6)] * 3, x(6), x(4), x(4), True, True, torch.float64, torch.float64, _SEED, *_DRAWN),
        {},
    ),
    (
        "megafx.bias_dropout_add_rms_norm.default",
        (x(4, 6), None, x(4, 6), x(6), 1e-5, 1.0, None, *_UNDRAWN),
        {},
    ),
    (
        "megafx.bias_dropout_add_rms_norm_backward.default",
        (*[x(4, 6)] * 3, x(6), x(4), 1.0, True, torch.float64, torch.float64, _SEED, *_DRAWN),
        {},
    ),
    ("megafx.bias_act.default", (x(4, 6, 6), x(6), "gelu"), {}),
    ("megafx.bias_act.default", (x(4, 6), None, "relu2"), {}),
    ("megafx.act_backward.default", (x(4, 6), x(4, 6), "silu"), {}),
    ("megafx.bias_act_backward.default", (x(4, 6), x(4, 6), x(6), "gelu_tanh"), {}),
    ("megafx.glu.default", (x(4, 6), x(4, 6), "silu"), {}),
    ("megafx.glu_backward.default", (x(4, 6), x(4, 6), x(4, 6), "gelu"), {}),
    ("megafx.glu_packed.default", (x(4, 6, 12), x(12), "silu"), {}),
    ("megafx.glu_packed.default", (x(4, 12), None, "gelu_tanh"), {}),
    ("megafx.glu_packed_backward.default", (x(4, 6), x(4, 12), "silu"), {}),
    ("megafx.glu_packed_bias_backward.default", (x(4, 6), x(4, 12), x(12), "gelu_quick"), {}),
    ("megafx.grouped_mlp.default", (x(6, 4), *_RANGES, [x(4, 4, 6)], x(4, 3, 2), None, [], [], _GATED), {}),
    (
        "megafx.grouped_mlp.default",
        (x(6, 4), *_RANGES, [x(4, 4, 3)] * 2, x(4, 3, 2), x(4, 2), [x(4, 3)], [x(6, 1)], _BIASED),
        {},
    ),
    (
        "megafx.grouped_mlp_backward.default",
        (x(6, 2), x(6, 4), *_RANGES, [x(4, 4, 3)] * 2, x(4, 3, 2), [x(4, 3)], [x(6, 1)], _BIASED, True),
        {},
    ),
    (
        "megafx.grouped_mlp_backward.default",
        (x(6, 2), x(6, 4), *_RANGES, [x(4, 4, 6)], x(4, 3, 2), [], [], _GATED, False),
        {},
    ),
    ("megafx.grouped_mm.default", (x(6, 4), x(4, 4, 6), ids(7, 4)), {}),
    ("megafx.grouped_mm_weight.default", (x(6, 4), x(6, 6), ids(7, 4)), {}),
    ("megafx.cross_entropy.default", (x(4, 6), ids(6, 4), -100, 0.1), {}),
    ("megafx.cross_entropy_backward.default", (x(4), x(4, 6), ids(6, 4), plain(4, 2), None, -100, 0.1), {}),
    ("megafx.cross_entropy_lse.default", (x(4, 6), ids(6, 4), -100, 0.1), {}),
    ("megafx.cross_entropy_forward.default", (x(4, 6), ids(6, 4), -100, 0.1), {}),
    ("megafx.rows.default", (mask(4, 6), "u0"), {}),
    ("megafx.rope.default", (x(2, 4, 6, 8), plain(1, 1, 6, 6), plain(1, 1, 6, 6), False, False), {}),
    ("megafx.rope.default", (x(4, 6, 6), plain(6, 2), plain(6, 2), True, True), {}),
    ("megafx.rope_backward.default", (x(2, 4, 6, 8), plain(1, 1, 6, 6), plain(1, 1, 6, 6), False, False), {}),
    ("megafx.rope_qk.default", (x(2, 8, 6, 4), x(2, 4, 6, 4), plain(1, 1, 6, 4), plain(1, 1, 6, 4), False, False), {}),
    ("megafx.rope_qk_backward.default", (x(2, 6, 4, 4), x(2, 6, 4, 4), plain(6, 1, 2), plain(6, 1, 2), True, True), {}),
    (
        "megafx.scale_mask_softmax.default",
        (x(2, 4, 3, 4), plain(2, 1, 3, 4), 0.5, True, 0, -1e4, T((), "i", 1000), 0.5, 3, -1, [], "tp"),
        {},
    ),
    (
        "megafx.scale_mask_softmax.default",
        (x(2, 4, 3, 4), x(1, 4, 3, 4), 0.5, True, 0, -1e4, T((), "i", 1000), 0.0, 3, -1, [], "tp"),
        {},
    ),
    (
        "megafx.scale_mask_softmax_forward.default",
        (x(2, 4, 3, 4), None, 0.5, True, 0, -1e4, T((), "i", 1000), 0.0, 3, -1, [], "tp"),
        {},
    ),
    (
        "megafx.scale_mask_softmax_backward.default",
        (x(2, 4, 3, 4), x(2, 4, 3, 4), None, None, 0.5, True, 0, -1e4, T((), "i", 1000), 0.0, 3, -1, [], "tp"),
        {},
    ),
    ("megafx.linear_cross_entropy.default", (x(4, 6), x(6, 6), x(6), ids(6, 4), -100, 0.1), {}),
    (
        "megafx.linear_cross_entropy_forward.default",
        (plain(4, 6), plain(6, 6), plain(6), ids(6, 4), -100, 0.1, True),
        {},
    ),
    ("megafx.linear_cross_entropy_backward.default", (plain(4, 6), plain()), {}),
    ("megafx.dropout.default", (x(4, 6), T((), "i", 1000), 0.5, 3, -1, [], "tp"), {}),
    ("aten.bitwise_and.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.bitwise_not.default", (mask(4, 6),), {}),
    ("aten.bitwise_or.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.bitwise_xor.Tensor", (mask(4, 6), mask(6)), {}),
    ("aten.concat.default", ([x(4, 6), x(4, 6)], 1), {}),
    ("aten.concatenate.default", ([x(4, 6), x(4, 6)], 1), {}),
    ("aten.conv3d.default", (x(4, 6, 3, 3, 3), x(6, 6, 2, 2, 2), x(6)), {}),
    ("aten.cummax.default", (x(4, 6), 1), {}),
    ("aten.cummin.default", (x(4, 6), 1), {}),
    ("aten.expand_as.default", (x(1, 6), plain(4, 6)), {}),
    ("aten.expand_copy.default", (x(4, 1), [4, 6]), {}),
    ("aten.fliplr.default", (x(4, 6),), {}),
    ("aten.flipud.default", (x(4, 6),), {}),
    ("aten.full_like.default", (x(4, 6), 2.0), {}),
    ("aten.index_add.default", (x(4, 6), 1, ids(6, 12), x(4, 12)), {}),
    ("aten.index_copy.default", (x(4, 6), 0, T((2,), "i", 1), x(2, 6)), {}),
    ("aten.index_put.default", (x(4, 6), [None, T((1,), "i", 6)], x(4, 1)), {}),
    ("aten.kthvalue.default", (x(4, 6), 2, 1), {}),
    ("aten.log_sigmoid_backward.default", (x(4, 6), x(4, 6), plain(4, 6)), {}),
    ("aten.log_sigmoid_forward.default", (x(4, 6),), {}),
    ("aten.logcumsumexp.default", (x(4, 6), 1), {}),
    ("aten.median.default", (x(4, 6),), {}),
    ("aten.median.dim", (x(4, 6), 1), {}),
    ("aten.min.default", (x(4, 6),), {}),
    ("aten.min.dim", (x(4, 6), 1), {}),
    ("aten.moveaxis.int", (x(4, 6, 2), 2, 0), {}),
    ("aten.movedim.intlist", (x(4, 6, 2), [0, 2], [1, 0]), {}),
    ("aten.new_full.default", (x(4, 6), [6], 2.0), {}),
    ("aten.new_ones.default", (x(4, 6), [6]), {}),
    ("aten.new_zeros.default", (x(4, 6), [4, 6]), {}),
    ("aten.nll_loss.default", (x(4, 6), ids(6, 4), plain(6), 0), {}),
    ("aten.nll_loss_backward.default", (x(), x(4, 6), ids(6, 4), plain(6), 2, -100, plain()), {}),
    ("aten.nll_loss_forward.default", (x(4, 6), ids(6, 4), plain(6), 0, -100), {}),
    ("aten.nll_loss_nd.default", (x(4, 6), ids(6, 4), plain(6), 2), {}),
    ("aten.norm.Scalar", (x(4, 6), 2), {}),
    ("aten.norm.ScalarOpt_dim_dtype", (x(4, 6), 2, [1], True), {"dtype": torch.float64}),
    ("aten.norm.ScalarOpt_dtype", (x(4, 6), 2), {"dtype": torch.float64}),
    ("aten.ones_like.default", (x(4, 6),), {}),
    ("aten.pow.Scalar", (2.0, x(4, 6)), {}),
    ("aten.prod.default", (x(4, 6),), {}),
    ("aten.reshape_as.default", (x(4, 6), plain(24)), {}),
    ("aten.scatter.value", (x(4, 6), 1, ids(6, 4, 2), 0), {}),
    ("aten.scatter.value", (x(4, 6), 1, ids(6, 4, 2), 1.5), {}),
    ("aten.select_copy.int", (x(4, 6, 6), 1, 2), {}),
    ("aten.slice_copy.Tensor", (x(4, 12), 1, 0, 6), {}),
    ("aten.squeeze.default", (x(4, 1, 6),), {}),
    ("aten.squeeze.dims", (x(4, 1, 6, 1), [1, 3]), {}),
    ("aten.std.default", (x(4, 6),), {}),
    ("aten.std.dim", (x(4, 6), [1]), {}),
    ("aten.std_mean.correction", (x(4, 6), [1]), {}),
    ("aten.sub.Scalar", (x(4, 6), 1.0), {}),
    ("aten.swapaxes.default", (x(4, 6, 2), 0, 2), {}),
    ("aten.swapdims.default", (x(4, 6, 2), 0, 2), {}),
    ("aten.tile.default", (x(4, 6), [2, 1]), {}),
    ("aten.to.device", (x(4, 6), torch.device("cpu"), torch.float64), {}),
    ("aten.var.default", (x(4, 6),), {}),
    ("aten.var.dim", (x(4, 6), [1]), {}),
    ("aten.view_as.default", (x(4, 6), plain(24)), {}),
    ("aten.view_copy.default", (x(4, 6), [24]), {}),
    ("aten.where.ScalarSelf", (mask(4, 6), 0.0, x(4, 6)), {}),
    ("aten.zeros_like.default", (x(4, 6),), {}),
]


def samples_of(op: str, rule: str | None = None) -> list[Sample]:
    """The calls to check an op with. rule: to make tensors from where the op has neither an entry nor a rule."""
    listed = [Sample(name, args, kwargs) for name, args, kwargs in SAMPLES if name == op]
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
            value = T(shape, "n" if pattern.role == "~" else "x", high, low)
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
