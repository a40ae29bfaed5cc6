"""torch.no_grad() and its relatives in a trace, as bodies of higher-order ops (passes/canonicalize/bodies.py inlines them)."""

from __future__ import annotations

import torch
from torch import fx
from torch._export.passes import replace_set_grad_with_hop_pass as grad_modes
from torch._export.passes.replace_autocast_with_hop_pass import replace_autocast_with_hop_pass

CHANGES = "_is_set_grad_enabled_sub_mod"  # what torch's pass asks of each part


def changes_grad_mode(node: fx.Node, omit_if_same_with_ambient: bool = False) -> bool:
    """True if a call of a submodule runs in another grad mode. torch splits a traced graph where the mode changes, and puts the
    autocast contexts around first into each part, in front of the node that says the mode."""
    if node.op != "call_module" or node.graph.owning_module is None:
        return False
    enter = torch.amp.autocast_mode._enter_autocast
    body = getattr(node.graph.owning_module, str(node.target))
    first = next((n for n in body.graph.nodes if n.op != "placeholder" and n.target is not enter), None)
    if first is None or first.target is not torch._C._set_grad_enabled:
        return False
    return first.args[0] != torch.is_grad_enabled() if omit_if_same_with_ambient else True


def contexts_as_bodies(gm: fx.GraphModule) -> fx.GraphModule:
    """What torch.export does with contexts of the grad mode and of autocast, of a graph that make_fx has traced."""
    before = vars(grad_modes)[CHANGES]
    vars(grad_modes)[CHANGES] = changes_grad_mode
    try:
        gm, _ = grad_modes.replace_set_grad_with_hop_pass(gm, None)
    finally:
        vars(grad_modes)[CHANGES] = before
    gm, _ = replace_autocast_with_hop_pass(gm, None)
    return gm
