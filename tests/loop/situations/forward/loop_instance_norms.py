"""Instance norms that keep running statistics: means over the rows of a batch, of which data-parallel ranks have some each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

STYLE = "https://github.com/pytorch/pytorch/issues/43037"
FORMS = ("ddp", "zero1", "fsdp")


class Net(nn.Module):
    def __init__(self, dims: int, **options: Any) -> None:
        super().__init__()
        kinds: Any = {1: (nn.Conv1d, nn.InstanceNorm1d), 2: (nn.Conv2d, nn.InstanceNorm2d)}[dims]
        self.a, self.norm, self.b = kinds[0](3, 6, 3, padding=1), kinds[1](6, **options), kinds[0](6, 2, 1)

    def normed(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.normed(self.a(x)).relu()).square().mean()


class ByFunction(Net):
    def normed(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, self.norm.running_mean, self.norm.running_var, momentum=0.2)


class NotRegistered(Net):
    """The norm is in a list, whose tensors are no buffers of the model."""

    def __init__(self) -> None:
        super().__init__(1, track_running_stats=True)
        self.held = [self.norm]
        del self.norm

    def normed(self, x: Tensor) -> Tensor:
        return self.held[0](x)


def _train(loop: Loop, net: Net, *shape: int) -> None:
    model = loop.model(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (4, 6, 4):
        loss = model(loop.rows(torch.randn(rows, *shape)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loop.mean(loss))
    loop.see_state(model)
    model.eval()
    loop.see(evaluated=loop.mean(model(loop.rows(torch.randn(4, *shape)))))


@situation(STYLE, data=FORMS, slow=(2, "zero1", "fsdp"))
def instance_norms_keep_running_statistics(loop: Loop) -> None:
    _train(loop, Net(1, track_running_stats=True, affine=True), 3, 8)
    _train(loop, Net(2, track_running_stats=True, momentum=0.3), 3, 4, 4)
    _train(loop, ByFunction(1, track_running_stats=True), 3, 8)


@situation(STYLE, slow=(2,))
def an_instance_norm_that_is_not_registered_keeps_statistics(loop: Loop) -> None:
    net = NotRegistered()
    _train(loop, net, 3, 8)
    loop.see(mean=net.held[0].running_mean, var=net.held[0].running_var)
