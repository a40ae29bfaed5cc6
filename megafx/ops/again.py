"""megafx::again: a value that backward makes in another way than forward did.

    again(made, other) -> made      both hold the same bits; forward computes `made` alone, backward `other` alone

The kernel that adds and normalises gives the sum and its norm at once. Backward has the sum, so it makes the norm of that,
and need not add again. The op is in a joint graph of any phase up to PARTITIONED: the cut leaves one operand on each side.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_library = torch.library.Library("megafx", "FRAGMENT")
_library.define("again(Tensor(a) made, Tensor other) -> Tensor(a)", tags=(torch.Tag.pt2_compliant_tag,))


def _made(made: Tensor, other: Tensor) -> Tensor:
    return made.view(made.shape)


_library.impl("again", _made, "CompositeExplicitAutograd")
torch.library.register_fake("megafx::again", _made, lib=_library)
AGAIN = torch.ops.megafx.again.default


def in_forward(node: fx.Node) -> list[fx.Node]:
    """What forward needs to compute a node."""
    return [node.args[0]] if node.target is AGAIN else node.all_input_nodes


def when_repeated(node: fx.Node) -> list[fx.Node]:
    """What backward needs to compute a node again."""
    return [node.args[1]] if node.target is AGAIN else node.all_input_nodes
