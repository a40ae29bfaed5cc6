"""Scale, mask, softmax and dropout of attention scores, in any of the usual spellings, to megafx.scale_mask_softmax.

    softmax(scores * scale + mask)                         Hugging Face's eager attention; the mask holds finfo.min or -inf
    softmax(masked_fill(scores * scale, mask, fill))       by hand (nanoGPT: tril buffer == 0, -inf), Megatron (-10000)
    softmax(where(visible, scores * scale, fill))          GPT-2 of old

with the softmax in fp32 and cast back or not, the scores cast before or not, and dropout or not.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import megafx.kernels.masked_softmax  # noqa: F401  registers the ops
from megafx.pattern import Pattern, register

_CASTS = ("no", "dtype", "same", "late", "early")
_OPS = {"add": "add", "fill": "masked_fill", "keep": "where"}


def _needs(scaled: str, cast: str, dropped: bool) -> tuple[str, ...]:
    return (
        "softmax",
        *(() if scaled == "no" else (scaled,)),
        *(("dropout",) if dropped else ()),
        *(("to",) if cast in ("dtype", "late", "early") else ()),
    )


def _scaled(scores: Tensor, scaled: str, cast: str, scale: float) -> Tensor:
    z = scores.float() if cast == "early" else scores
    return z * scale if scaled == "mul" else z / scale if scaled == "div" else z


def _weights(z: Tensor, dtype: torch.dtype, cast: str, dropped: bool, p: float) -> Tensor:
    if cast == "dtype":
        y = torch.softmax(z, -1, dtype=torch.float32).to(dtype)
    elif cast == "same":
        y = torch.softmax(z, -1, dtype=dtype)
    elif cast == "late":
        y = torch.softmax(z.float(), -1).to(dtype)
    else:
        y = torch.softmax(z, -1).to(dtype)
    return F.dropout(y, p, True) if dropped else y


def _factor(scaled: str, scale: float) -> float:
    return scale if scaled == "mul" else 1.0 / scale if scaled == "div" else 1.0


@register
class ScaleMaskSoftmax(Pattern):
    """dropout(softmax(mask(scale * scores))) -> scale_mask_softmax(scores, mask): one pass over the scores."""

    name = "scale_mask_softmax"
    knob = "masked_softmax_fusion"
    variants = {
        "mask_by": ("add", "fill", "keep"),
        "flat": (False, True),
        "scaled": ("mul", "div", "no"),
        "cast": _CASTS,
        "dropped": (True, False),
    }
    scalars = {"scale": float, "fill": float, "p": float}

    def tensors(mask_by, flat, scaled, cast, dropped):
        dtype = "bool" if mask_by != "add" else "f32" if cast == "early" else "M" if cast == "no" else "D"
        return {"scores": "D[b n s t]", "mask": dtype + ("[s t]" if flat else "[1|b 1|n 1|s t]")}

    def needs(mask_by, flat, scaled, cast, dropped):
        return (_OPS[mask_by], *_needs(scaled, cast, dropped))

    def match(scores, mask, *, mask_by, flat, scaled, cast, dropped, scale, fill, p):
        z = _scaled(scores, scaled, cast, scale)
        if mask_by == "add":
            z = z + mask
        elif mask_by == "fill":
            z = z.masked_fill(mask, fill)
        else:
            z = torch.where(mask, z, fill)
        return _weights(z, scores.dtype, cast, dropped, p)

    def make(scores, mask, *, mask_by, scaled, scale, fill, drop):
        hidden = mask.logical_not() if mask_by == "keep" else mask
        fill = float("-inf") if mask_by == "add" else fill
        return torch.ops.megafx.scale_mask_softmax(scores, hidden, _factor(scaled, scale), False, 0, fill, *drop.args)


@register
class ScaleSoftmax(Pattern):
    """dropout(softmax(scale * scores)) -> scale_mask_softmax(scores, None)."""

    name = "scale_softmax"
    knob = "masked_softmax_fusion"
    variants = {"scaled": ("mul", "div", "no"), "cast": _CASTS, "dropped": (True, False)}
    scalars = {"scale": float, "p": float}
    tensors = {"scores": "D[b n s t]"}
    needs = _needs

    def match(scores, *, scaled, cast, dropped, scale, p):
        return _weights(_scaled(scores, scaled, cast, scale), scores.dtype, cast, dropped, p)

    def make(scores, *, scaled, scale, drop):
        how = (_factor(scaled, scale), False, 0, float("-inf"))
        return torch.ops.megafx.scale_mask_softmax(scores, None, *how, *drop.args)
