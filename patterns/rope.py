"""Rotary position embedding, as it is written by hand and in Hugging Face models, to megafx.rope; q and k then in one kernel.

x * cos + rotate_half(x) * sin          Llama, GPT-NeoX, Falcon, Gemma, Phi (partly rotated); GPT-J with pairs
(a cos - b sin, b cos + a sin)          a, b = halves or pairs of x, joined again
"""

from __future__ import annotations

import torch
from torch import Tensor

import megafx.kernels.attention.rope  # noqa: F401  registers the ops
from megafx.rewrite.pattern import Pattern, register

_CASTS = ("none", "back", "both")
# Dims of the tables as they broadcast against x: [b n s d], or [b s n d].
_TABLES = {4: "[1|b 1|n 1|s {}]", 3: "[1|n 1|s {}]", 2: "[s {}]"}


def _four(table: Tensor) -> Tensor:
    """With four dims, so that what is made matches the patterns below."""
    return table[(None,) * (4 - table.dim())]


def _up(x: Tensor, cast: str) -> Tensor:
    return x.float() if cast == "both" else x


def _down(y: Tensor, x: Tensor, cast: str) -> Tensor:
    """back: wide tables promote; both: x was made wide."""
    return y if cast == "none" else y.to(x.dtype)


@register
class Rope(Pattern):
    """x * cos + rotate(x) * sin -> rope(x, cos, sin)."""

    name = "rope"
    knob = "apply_rope_fusion"
    variants = {"rotate": ("halves", "pairs"), "dims": tuple(_TABLES), "cast": _CASTS}

    def tensors(rotate, dims, cast):
        table = ("D" if cast == "none" else "f32") + _TABLES[dims].format("2h")
        return {"x": "D[b n s 2h]", "cos": table, "sin": table}

    def needs(rotate, dims, cast):
        return ("neg", "slice", "cat" if rotate == "halves" else "stack")

    def match(x, cos, sin, *, rotate, cast):
        h, wide = cos.shape[-1] // 2, _up(x, cast)
        if rotate == "halves":
            turned = torch.cat((-wide[..., h:], wide[..., :h]), -1)
        else:
            turned = torch.stack((-wide[:, :, :, 1::2], wide[:, :, :, ::2]), -1).flatten(-2)
        return _down(wide * cos + turned * sin, x, cast)

    def make(x, cos, sin, *, rotate):
        return torch.ops.megafx.rope(x, _four(cos), _four(sin), rotate == "pairs", False)


@register
class RopeOfPart(Pattern):
    """cat(rope(x[..., :r]), x[..., r:]) -> rope(x): the columns that are not rotated pass through the same kernel."""

    name = "rope_partial"
    knob = "apply_rope_fusion"
    needs = ("rope", "slice", "cat")
    variants = {"interleaved": (False, True)}
    tensors = {"cos": "T[1|b 1|n 1|s r]", "sin": "T[1|b 1|n 1|s r]", "x": "D[b n s d]"}

    def match(cos, sin, x, *, interleaved):
        r = cos.shape[-1]
        return torch.cat((torch.ops.megafx.rope(x[..., :r], cos, sin, interleaved, False), x[..., r:]), -1)

    def make(cos, sin, x, *, interleaved):
        return torch.ops.megafx.rope(x, cos, sin, interleaved, False)


@register
class RopeOfPairs(Pattern):
    """(a cos - b sin, b cos + a sin) of halves or pairs (a, b) of x -> rope(x, cos, sin), one column of the tables a pair."""

    name = "rope_pairs"
    knob = "apply_rope_fusion"
    variants = {"pairs": ("halves", "slices", "unbind"), "dims": tuple(_TABLES), "back": (False, True), "cast": _CASTS}

    def tensors(pairs, dims, back, cast):
        table = ("D" if cast == "none" else "f32") + _TABLES[dims].format("h")
        return {"x": "D[b n s 2h]", "cos": table, "sin": table}

    def needs(pairs, dims, back, cast):
        return ("cat" if pairs == "halves" else "stack", "select" if pairs == "unbind" else "slice")

    def match(x, cos, sin, *, pairs, back, cast):
        h, wide = cos.shape[-1], _up(x, cast)
        if pairs == "halves":
            a, b = wide[..., :h], wide[..., h:]
        elif pairs == "slices":
            a, b = wide[..., ::2], wide[..., 1::2]
        else:
            split = wide.reshape(*wide.shape[:-1], h, 2)
            a, b = split[..., 0], split[..., 1]
        if back:  # rotation by the negative angle
            first, second = a * cos + b * sin, -a * sin + b * cos
        else:
            first, second = a * cos - b * sin, b * cos + a * sin
        y = torch.cat((first, second), -1) if pairs == "halves" else torch.stack((first, second), -1).flatten(-2)
        return _down(y, x, cast)

    def make(x, cos, sin, *, pairs, back):
        return torch.ops.megafx.rope(x, _four(cos), _four(-sin if back else sin), pairs != "halves", True)


@register
class RopeOfBoth(Pattern):
    """rope(q), rope(k) with the same tables -> rope_qk(q, k): one kernel reads the tables once."""

    name = "rope_qk"
    knob = "apply_rope_fusion"
    local = True
    needs = ("rope",)
    variants = {"heads": (1, 2), "interleaved": (False, True), "per_pair": (False, True)}

    def tensors(heads, interleaved, per_pair):
        q, k, table = ("n s", "m s", "1 1|s") if heads == 1 else ("s n", "s m", "1|s 1")
        return {"q": f"D[b {q} d]", "k": f"D[b {k} d]", **dict.fromkeys(("cos", "sin"), f"T[1|b {table} r]")}

    def match(q, k, cos, sin, *, interleaved, per_pair):
        how = (cos, sin, interleaved, per_pair)
        return torch.ops.megafx.rope(q, *how), torch.ops.megafx.rope(k, *how)

    def make(q, k, cos, sin, *, interleaved, per_pair):
        return torch.ops.megafx.rope_qk(q, k, cos, sin, interleaved, per_pair)
