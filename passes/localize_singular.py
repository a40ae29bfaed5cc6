"""Ops with a pole, or an infinite slope, at some finite number: pads hold what is far from it.

A pad's gradient is zero, and zero times an infinite slope is no number: it would reach the gradient of everything that the
pads are summed with. Pads are mostly zeros, where x / y, rsqrt and log are worst.
"""

from __future__ import annotations

from torch import fx

from megafx.ir import get_at, set_at
from megafx.passes.localize_common import Localizer
from megafx.plan import OpChoice

# op -> {position of an argument: what its pads hold}
POLES: dict[str, dict[int, float]] = {
    "aten.acos.default": {0: 0.0},
    "aten.acosh.default": {0: 2.0},
    "aten.asin.default": {0: 0.0},
    "aten.atanh.default": {0: 0.0},
    "aten.digamma.default": {0: 1.0},
    "aten.div.Tensor": {1: 1.0},
    "aten.div.Tensor_mode": {1: 1.0},
    "aten.erfinv.default": {0: 0.0},
    "aten.fmod.Tensor": {1: 1.0},
    "aten.hypot.default": {1: 1.0},
    "aten.lgamma.default": {0: 1.0},
    "aten.log.default": {0: 1.0},
    "aten.log10.default": {0: 1.0},
    "aten.log1p.default": {0: 1.0},
    "aten.log2.default": {0: 1.0},
    "aten.logit.default": {0: 0.5},
    "aten.pow.Tensor_Scalar": {0: 1.0},
    "aten.pow.Tensor_Tensor": {0: 1.0},
    "aten.reciprocal.default": {0: 1.0},
    "aten.remainder.Tensor": {1: 1.0},
    "aten.rsqrt.default": {0: 1.0},
    "aten.sqrt.default": {0: 1.0},
    "aten.addcdiv.default": {2: 1.0},
    "aten.xlogy.Tensor": {1: 1.0},
}


def keep_pads_off_poles(local: Localizer, node: fx.Node, choice: OpChoice) -> None:
    """Fill the pads of the operands that `POLES` names. A power with a whole exponent from 1 on has no pole."""
    poles = POLES.get(str(node.target), {})
    if str(node.target) == "aten.pow.Tensor_Scalar" and float(node.args[1]) >= 1 and float(node.args[1]).is_integer():  # type: ignore[arg-type]
        return
    for operand, placement in zip(local.rules[node].operands, choice.ins, strict=True):
        fill = poles.get(operand.path[0]) if isinstance(operand.path[0], int) else None
        if fill is not None and placement.is_shard and placement.cut.padded(local.t):
            set_at(node, operand.path, local.mask_pads(node, get_at(node, operand.path), placement, fill))
