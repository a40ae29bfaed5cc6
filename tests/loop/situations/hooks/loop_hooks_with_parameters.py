"""Hooks that compute with parameters of the model: steering vectors that are trained, adapters, gates."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

STEERING = "https://steering-vectors.github.io/steering-vectors/about.html"
COMPILED = "https://github.com/pytorch/pytorch/issues/91665"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.steering = nn.Parameter(torch.linspace(-1, 1, 12))
        self.gate = nn.Parameter(torch.ones(12))
        self.a, self.b = nn.Linear(12, 3, bias=False), nn.Linear(3, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh()).square().mean()


def train(loop: Loop, model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.randn(4, 8))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@situation(STEERING)
def hooks_add_a_parameter_and_an_adapter(loop: Loop) -> None:
    net = Net()
    net.up.register_forward_hook(lambda module, args, output: output + net.steering)
    net.down.register_forward_pre_hook(lambda module, args: (args[0] * net.gate,))
    net.down.register_forward_hook(lambda module, args, output: output + net.b(net.a(args[0])))
    net.down.register_forward_hook(lambda module, args, output: output * module.weight.mean())
    train(loop, loop.model(net))


class Steers:
    """A hook with state: how strong it is changes between steps, and it can be taken off."""

    def __init__(self, net: Net) -> None:
        self.net, self.strength = net, 0.5

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.strength * self.net.steering


@situation(COMPILED)
def an_object_steers_and_is_taken_off(loop: Loop) -> None:
    net = Net()
    model, steers = loop.model(net), Steers(net)
    handle = net.up.register_forward_hook(steers)
    train(loop, model, 1)
    steers.strength = -2.0
    train(loop, model, 1)
    handle.remove()
    train(loop, model, 1)


@situation(STEERING)
def a_hook_that_also_records_is_split(loop: Loop) -> None:
    """The hook that computes stores nothing; what records is another hook."""
    net, seen = Net(), []
    net.up.register_forward_hook(lambda module, args, output: output + net.steering)
    net.up.register_forward_hook(lambda module, args, output: seen.append(output.detach().clone()))
    model = loop.model(net)
    train(loop, model, 2)
    loop.see(seen=torch.stack(seen))


def scaled(vector: Tensor, strength: float) -> Tensor:
    return F.normalize(vector, dim=-1) * strength


def steered(output: Tensor, net: Net, strength: float = 0.5) -> Tensor:
    """Calls another function, and decides by what is no tensor."""
    if output.dim() == 2 and strength != 0:
        return output + scaled(net.steering, STRENGTH * strength)
    return output


STRENGTH = 2.0


class Adapts:
    """A hook in methods of a class."""

    def __init__(self, net: Net) -> None:
        self.net, self.scale = net, 0.1

    def low_rank(self, x: Tensor) -> Tensor:
        return self.mixed(self.net.a(x)) @ self.net.b.weight.t()

    @staticmethod
    def mixed(x: Tensor) -> Tensor:
        return x + torch.stack([part.flip(-1) for part in x.unbind(0)])

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + self.scale * self.low_rank(args[0])


@situation(STEERING)
def hooks_call_functions_and_methods(loop: Loop) -> None:
    global STRENGTH
    net = Net()
    adapts = Adapts(net)
    model = loop.model(net)
    net.up.register_forward_hook(lambda module, args, output: steered(output, net))
    net.down.register_forward_hook(adapts.hook)
    train(loop, model, 2)
    STRENGTH, adapts.scale = -1.0, 3.0
    train(loop, model, 2)
    STRENGTH = 2.0
