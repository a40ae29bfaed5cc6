"""The forward of a model, replaced on the instance before it is parallelized: its class's would not be called."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

WRAPPED = "https://github.com/unslothai/unsloth-zoo/pull/680"
PATCHED = "https://github.com/huggingface/diffusers/issues/2719"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def train(loop: Loop, model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


def is_used(loop: Loop, model: Any) -> None:
    """That there are graphs: in eager mode all would be equal, too."""
    loop.see(graphs=loop.eager or len(model.megafx.graphs) > 0)


@situation(WRAPPED, like="an_instance_gets_a_method_as_its_forward")
def the_forward_of_an_instance_is_wrapped(loop: Loop) -> None:
    net, settings = Net(), {"scale": 3.0}
    old = net.forward
    net.forward = lambda *args, **kwargs: settings["scale"] * old(*args, **kwargs)  # type: ignore[method-assign]
    model = loop.model(net)
    train(loop, model)
    settings["scale"] = 0.5  # it is a part of what forward reads
    train(loop, model)
    is_used(loop, model)


@situation(PATCHED)
def an_instance_gets_a_method_as_its_forward(loop: Loop) -> None:
    """With other names of arguments; a copy has its own."""

    def forward(self: Any, values: Tensor) -> Tensor:
        return self.scale * self.down(self.up(values).relu()) + values

    net = Net()
    net.forward = types.MethodType(forward, net)  # type: ignore[method-assign]
    model = loop.model(net, example_inputs=(torch.randn(4, 8),))
    copied = copy.deepcopy(model)
    train(loop, model)
    copied.scale = -1.0
    train(loop, copied)
    train(loop, model)
    is_used(loop, copied)
