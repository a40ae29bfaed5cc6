"""Parameters that forward finds elsewhere than in its modules' tables: in lists, dicts, tuples, closures, objects, optimizers;
and trained tensors and modules that are not registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError

LISTED = "https://discuss.pytorch.org/t/runtimeerror-when-calling-model-parameters-list-of-parameters/20241"
EWC = "https://github.com/pytorch/pytorch/issues/121020"
HIDDEN = "https://discuss.pytorch.org/t/how-to-prevent-a-submodule-from-being-registered/87404"
RATES = "https://github.com/Lightning-AI/pytorch-lightning/issues/1120"


class Net(nn.Module):
    """f(the module, hidden values [rows, 8]) -> hidden values."""

    def __init__(self, f: Callable[[Any, Tensor], Any] = lambda m, h: h) -> None:
        super().__init__()
        self.up, self.down, self.f = nn.Linear(6, 8), nn.Linear(8, 6), f
        self.held: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.f(self, torch.tanh(self.up(x))))
        return y.square().mean()


def train(loop: Loop, model: Any, free: tuple[Tensor, ...] = (), steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_free = torch.optim.SGD(free, lr=0.1) if free else None
    for _ in range(steps):
        loss = model(loop.rows(torch.randn(4, 6)))
        loss.backward()
        loop.see(loss=loop.mean(loss), free=[w.grad for w in free])
        loop.see_gradients(model)
        for each in (optimizer, of_free):
            if each is not None:
                each.step()
                each.zero_grad()
    loop.see_state(model)
    loop.see(free=free)


class Two(NamedTuple):
    number: int
    weight: Tensor


class Penalty:
    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self) -> Tensor:
        return self.weight.norm()


@situation(LISTED, data=("ddp", "fsdp"))
def a_penalty_finds_parameters_in_containers(loop: Loop) -> None:
    plain = Net(lambda m, h: h + sum(p.square().mean() for p in m.held[0]) + m.held[1][0].weight.mean() + m.penalty())
    model = loop.model(
        plain
    )  # from here on, the containers hold parameters that the model has replaced on several ranks
    model.held = ([model.up.weight, model.down.bias], (Two(1, model.down.weight),))
    model.penalty = Penalty(model.up.bias)
    train(loop, model)


@situation(LISTED, like="a_penalty_finds_parameters_in_containers")
def a_penalty_holds_parameters_of_before(loop: Loop) -> None:
    """Those that are there before `parallelize`: by a list, a dict and the variable of an enclosing function."""
    plain = Net()
    weight, plain.held = plain.up.weight, {"all": [*plain.parameters()]}
    plain.f = lambda m, h: h * weight.mean() + sum(p.abs().mean() for p in m.held["all"])
    train(loop, loop.model(plain))


@situation(EWC, like="a_state_in_an_object_is_passed_on")
def a_model_is_held_to_what_it_was(loop: Loop) -> None:
    """On several ranks what is computed of parameters is sharded."""

    class Held(Net):
        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = super().forward(x)
            pairs = zip(self.weights, self.parameters(), self.anchors, strict=True)
            return loss + sum((f * (p - was).square()).mean() for f, p, was in pairs)

    plain = Held()
    plain.weights = [torch.rand_like(p) for p in plain.parameters()]
    plain.anchors = [p.detach() + 1 for p in plain.parameters()]
    model = loop.model(plain)
    train(loop, model)
    model.anchors = [p.detach().clone() for p in model.parameters()]
    train(loop, model)


@situation(HIDDEN, like="norms_that_are_not_registered_and_rings")
def trained_tensors_and_modules_that_are_not_registered(loop: Loop) -> None:
    scale, hidden = torch.randn(8, requires_grad=True), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    model = loop.model(Net(lambda m, h: m.held[0](h) * scale))
    model.held = [hidden]
    train(loop, model, (scale, *hidden.parameters()))
    scale.requires_grad_(False)
    train(loop, model, (scale, *hidden.parameters()), 1)
    scale.requires_grad_(True)
    model.held[0] = nn.Linear(8, 8)
    train(loop, model, (scale, *model.held[0].parameters()), 2)


def _refused_and_registered(loop: Loop, trained: bool) -> None:
    scale = nn.Parameter(torch.randn(8))
    held, registered = (Net(f).requires_grad_(trained) for f in (lambda m, h: h * scale, lambda m, h: h * m.scale))
    registered.register_parameter("scale", scale)
    x = torch.randn(4, 6)
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)is no parameter of the model; .* as a submodule"):
            loop.model(held)(loop.rows(x))
    train(loop, loop.model(registered))


@situation(HIDDEN, ranks=(1,))
def what_is_not_registered_alone_has_a_gradient(loop: Loop) -> None:
    _refused_and_registered(loop, trained=False)


@situation(HIDDEN, ranks=(), data=("ddp",))
def data_parallel_ranks_do_not_reduce_what_is_not_registered(loop: Loop) -> None:
    _refused_and_registered(loop, trained=True)


@situation(RATES, like="a_penalty_finds_parameters_in_containers")
def forward_reads_the_rate_of_its_optimizer(loop: Loop) -> None:
    model = loop.model(Net(lambda m, h: h * m.held[0].param_groups[0]["lr"] + m.held[1].get_last_lr()[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model.held = [optimizer, schedule]
    for _ in range(4):
        loss = model(torch.randn(4, 6))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loop.see(loss=loss)
    if not loop.eager:
        assert model.megafx.captures == 2
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/97155", ranks=(1,))
def a_parameter_is_given_as_an_argument(loop: Loop) -> None:
    class Given(Net):
        def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
            loss = super().forward(x)
            return loss if weight is None else loss + weight.square().mean()

    model = loop.model(Given())
    for _ in range(2):
        model(torch.randn(4, 6), model.up.weight).backward()
        loop.see_gradients(model)


@situation("https://github.com/facebookresearch/moco/issues/3")
def norms_that_are_not_registered_and_rings(loop: Loop) -> None:
    """A batch norm in a list keeps its statistics; rows are written at a pointer that counts, a number or a tensor."""

    def turn(m: Any, h: Tensor) -> Tensor:
        h = m.held[0](h)
        m.ring[m.at % 3], m.ring[m.pointer % 3] = h.detach().mean(0), 1.0
        m.at += 1
        m.pointer += 2
        return h + m.ring.sum(0) + m.ring[m.pointer % 3]

    norm, plain = nn.BatchNorm1d(8), Net(turn)
    plain.register_buffer("ring", torch.zeros(3, 8))
    plain.register_buffer("pointer", torch.zeros((), dtype=torch.long))
    plain.at = 0
    model = loop.model(plain)
    model.held = [norm]
    for _ in range(5):
        loss = model(torch.randn(4, 6))
        loss.backward()
        loop.see(loss=loss, ring=model.ring, at=model.at, mean=norm.running_mean, seen=norm.num_batches_tracked)
    if not loop.eager:
        assert model.megafx.captures == 1
    loop.see(weight=norm.weight.grad)
    loop.see_gradients(model)
