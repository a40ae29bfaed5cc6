"""The tables: ATen op -> factor string (grammar: megafx/rules/grammar.py). Data, alphabetical.

Ops whose dims depend on arguments are in rules/families.py. `megafx check-rules` brute-forces each row, forward and gradient,
against the real op.
"""

from __future__ import annotations

# Elementwise ops by their rule; overload `default` where none is given.
_ELEMENTWISE: dict[str, str] = {
    "lin: ... -> ...": (
        "alias clone _conj conj contiguous detach div.Scalar lift_fresh_copy mul.Scalar neg positive real "
        "resolve_conj resolve_neg to.device to.dtype to.dtype_layout to.prim_Device to.prim_dtype _to_copy"
    ),
    "nl: ... -> ...": (
        "abs acos acosh asin asinh atan atanh bitwise_not ceil celu clamp clamp_max clamp_min copysign.Scalar cos "
        "cosh digamma div.Scalar_mode elu eq.Scalar erf erfc erfinv exp exp2 expm1 floor fmod.Scalar frac ge.Scalar "
        "gelu gt.Scalar hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan le.Scalar leaky_relu lgamma "
        "log log10 log1p log2 log_sigmoid logical_not logit lt.Scalar mish nan_to_num ne.Scalar pow.Scalar "
        "pow.Tensor_Scalar reciprocal relu relu6 remainder.Scalar round rsqrt selu sgn sigmoid sign signbit silu sin "
        "sinc sinh softplus softshrink special_erf sqrt square tan tanh threshold trunc where.Scalar"
    ),
    "nl: ..., ... -> ...": (
        "atan2 bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor clamp_max.Tensor clamp_min.Tensor "
        "copysign.Tensor div.Tensor_mode eq.Tensor floor_divide fmax fmin fmod.Tensor ge.Tensor gt.Tensor hypot "
        "le.Tensor logaddexp logaddexp2 logical_and logical_or logical_xor lt.Tensor max.other maximum min.other "
        "minimum ne.Tensor polar pow.Tensor_Tensor _prelu_kernel remainder.Tensor"
    ),
    "nl[0]: ..., ... -> ...": (
        "elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward "
        "leaky_relu_backward logit_backward mish_backward sigmoid_backward silu_backward softplus_backward "
        "softshrink_backward tanh_backward threshold_backward"
    ),
}
RULES: dict[str, str] = {
    "aten.add.Tensor": "lin: +..., +... -> ...",
    "aten.addbmm.default": "lin: +m n, b m k, b k n -> m n",
    "aten.addcdiv.default": "lin[1]: +..., ..., ... -> ...",
    "aten.addcmul.default": "lin: +..., ..., ... -> ...",
    "aten.addmm.default": "lin: +n, m k, k n -> m n",
    "aten.baddbmm.default": "lin: +b m n, b m k, b k n -> b m n",
    "aten.batch_norm.default": "nl[1]: b! c ...!, c, +c, ~c, ~c -> b! c ...!",
    "aten.bmm.default": "lin: b m k, b k n -> b m n",
    "aten.clamp.Tensor": "nl: ..., ..., ... -> ...",
    "aten.div.Tensor": "lin[0]: ..., ... -> ...",
    "aten.dot.default": "lin: k, k -> ",
    "aten.embedding.default": "lin: v d, ~... -> ... d",
    "aten.embedding_dense_backward.default": "lin: ... d, ~... -> v! d",
    "aten._fused_rms_norm.default": "nl[1]: ... c!, c! -> ... c!; ~... 1",
    "aten._fused_rms_norm_backward.default": "nl[0]: ... c!, ... c!, ... 1, c! -> ... c!; c!",
    "aten.layer_norm.default": "nl[1]: ... c!, c!, +c! -> ... c!",
    "aten.lerp.Scalar": "lin: +..., +... -> ...",
    "aten.lerp.Tensor": "lin: +..., +..., ~... -> ...",
    "aten.linear.default": "lin: ... k, n k, +n -> ... n",
    "aten.masked_fill.Tensor": "lin: +..., ~..., + -> ...",
    "aten.mm.default": "lin: m k, k n -> m n",
    "aten.mul.Tensor": "lin: ..., ... -> ...",
    "aten.mv.default": "lin: m k, k -> m",
    "aten._native_batch_norm_legit.no_stats": "nl[1]: b! c ...!, c, +c -> b! c ...!; ~c; ~c",
    "aten._native_batch_norm_legit_no_training.default": "nl[1]: b c ..., c, +c, ~c, ~c -> b c ...; *; *",
    "aten.native_batch_norm_backward.default": ("nl[0]: b! c ...!, b! c ...!, c, ~c, ~c, c, c -> b! c ...!; c; c"),
    "aten.native_layer_norm.default": "nl[1]: ... c!, c!, +c! -> ... c!; ~... 1; ~... 1",
    "aten.native_layer_norm_backward.default": "nl[0]: ... c!, ... c!, ... 1, ... 1, c!, * -> ... c!; c!; c!",
    "aten.outer.default": "lin: m, n -> m n",
    "aten._prelu_kernel_backward.default": "nl[0]: ..., ..., ... -> ...; ...",
    "aten.rms_norm.default": "nl[1]: ... c!, c! -> ... c!",
    "aten.rsub.Tensor": "lin: +..., +... -> ...",
    "aten.scaled_dot_product_attention.default": "nl[2]: ... h t e!, ... h s! e!, ... h s! f, ... h t s! -> ... h t f",
    "aten._scaled_dot_product_attention_math.default": (
        "nl[2]: b h t e!, b h s! e!, b h s! f, b h t s!, ~b h t s! -> b h t f; ~b h t s!"
    ),
    "aten._scaled_dot_product_cudnn_attention.default": (
        "nl[2]: b h t e!, b h s! e!, b h s! f!, b h t s! -> b h t f!; ~b h t 1; *; *; *; *; *; *; *"
    ),
    "aten._scaled_dot_product_cudnn_attention_backward.default": (
        "nl[0]: b h t f!, b h t e!, b h s! e!, b h s! f!, b h t f!, b h t 1, *, *, b h t s!, *, *"
        " -> b h t e!; b h s! e!; b h s! f!"
    ),
    "aten._scaled_dot_product_efficient_attention.default": (
        "nl[2]: b h t! e!, b h s! e!, b h s! f, b h t! s! -> b h t! f; ~b h l!; *; *"
    ),
    "aten._scaled_dot_product_efficient_attention_backward.default": (
        "nl[0]: b h t f!, b h t! e!, b h s! e!, b h s! f!, b h t! s!, b h t! f!, b h l!, *, *"
        " -> b h t! e!; b h s! e!; b h s! f!; b h t! s!"
    ),
    "aten._scaled_dot_product_flash_attention.default": (
        "nl[2]: b h t e!, b h s! e!, b h s! f! -> b h t f!; ~b h t; *; *; *; *; *; *; *"
    ),
    "aten._scaled_dot_product_flash_attention_backward.default": (
        "nl[0]: b h t f!, b h t e!, b h s! e!, b h s! f!, b h t f!, b h t, *, *, *, * -> b h t e!; b h s! e!; b h s! f!"
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": (
        "nl[2]: b h t e!, b h s! e!, b h s! f!, b h t s! -> b h t f!; ~b h t"
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": (
        "nl[0]: b h t f!, b h t e!, b h s! e!, b h s! f!, b h t f!, b h t, b h t s! -> b h t e!; b h s! e!; b h s! f!"
    ),
    "aten.sub.Tensor": "lin: +..., +... -> ...",
    "aten.to.other": "lin: ..., * -> ...",
    "aten.tril.default": "lin: ... a! b! -> ... a! b!",
    "aten.triu.default": "lin: ... a! b! -> ... a! b!",
    "aten.true_divide.Tensor": "lin[0]: ..., ... -> ...",
    "aten.type_as.default": "lin: ..., * -> ...",
    "aten.vdot.default": "lin: k, k -> ",
    "aten.view_as_complex.default": "nl: ... c! -> ...",
    "aten.view_as_real.default": "nl: ... -> ... c!",
    "aten.where.self": "lin: ~..., +..., +... -> ...",
    "aten.xlogy.Tensor": "lin[0]: ..., ... -> ...",
}
RULES |= {
    f"aten.{op if '.' in op else op + '.default'}": rule for rule, ops in _ELEMENTWISE.items() for op in ops.split()
}
