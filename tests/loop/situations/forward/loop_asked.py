"""What forward asks of tensors beside their values (`is_leaf`, `grad_fn`, `.grad`); parameters that it freezes for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError

LEAF = "https://discuss.pytorch.org/t/what-is-the-purpose-of-is-leaf/87000"
FROZEN = "https://github.com/junyanz/pytorch-CycleGAN-and-pix2pix/blob/master/models/cycle_gan_model.py"


class Asks(nn.Module):
    def __init__(self, code: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.code = nn.Linear(8, 6), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.linear, x)


@situation(LEAF)
def forward_asks_how_its_argument_was_computed(loop: Loop) -> None:
    questions: list[Callable[[Tensor], bool]] = [
        lambda x: x.is_leaf,
        lambda x: x.grad_fn is None,
        lambda x: "Mul" in type(x.grad_fn).__name__,
    ]
    for question in questions:
        model = loop.model(Asks(lambda linear, x, asks=question: linear(x) * (2 if asks(x) else 3)))
        trained = torch.randn(3, 8, requires_grad=True)
        for x in (torch.randn(3, 8), trained, trained * 2, trained + 1):
            output = model(x)
            output.square().mean().backward()
            loop.see(output=output)
        loop.see(trained=trained.grad)
        loop.see_gradients(model)


@situation(LEAF)
def forward_reads_a_gradient_of_before(loop: Loop) -> None:
    """Refused; the advice is followed."""
    model = loop.model(Asks(lambda linear, x: linear(x) * (2 if linear.weight.grad is None else 3)))
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)reads `.grad` of a parameter.*pass what forward needs"):
            model(torch.randn(3, 8))
        return loop.see(refused=True)
    loop.see(refused=True)


class Adversarial(nn.Module):
    """Both losses of a GAN. The critic is frozen while the generator's is computed."""

    def __init__(self, freezing: Callable[[nn.Module], contextlib.AbstractContextManager[None]]) -> None:
        super().__init__()
        self.generator, self.freezing = nn.Linear(4, 8), freezing
        self.critic = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        made = self.generator(noise)
        with self.freezing(self.critic):
            fools = -self.critic(made).mean()
        tells = self.critic(made.detach()).mean() - self.critic(real).mean()
        return fools, tells + sum(p.square().sum() for p in self.critic.parameters())


@contextlib.contextmanager
def _by_method(module: nn.Module) -> Iterator[None]:
    module.requires_grad_(False)
    yield
    module.requires_grad_(True)


@contextlib.contextmanager
def _by_attribute(module: nn.Module) -> Iterator[None]:
    for p in module.parameters():
        p.requires_grad = False
    yield
    for p in module.parameters():
        p.requires_grad = True


@situation(FROZEN)
def forward_freezes_a_critic_for_one_of_its_losses(loop: Loop) -> None:
    for freezing in (_by_method, _by_attribute):
        model = loop.model(Adversarial(freezing))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            fools, tells = model(torch.randn(3, 4), torch.randn(3, 8))
            optimizer.zero_grad()
            (fools + 2 * tells).backward()
            loop.see(fools=fools, tells=tells, trained=[p.requires_grad for p in model.parameters()])
            loop.see_gradients(model)
            optimizer.step()


@situation(FROZEN)
def forward_freezes_or_frees_for_good(loop: Loop) -> None:
    """Refused; the advice is followed."""
    for trained in (True, False):
        module = Asks(lambda linear, x, wanted=not trained: linear.requires_grad_(wanted)(x))
        module.linear.requires_grad_(trained)
        model, x = loop.model(module), torch.randn(3, 8, requires_grad=True)
        if not loop.eager:
            with pytest.raises(CaptureError, match="still frozen when it returns|does not when the model is called"):
                model(x)
        model.linear.requires_grad_(not trained)
        model(x).square().mean().backward()
        loop.see(x=x.grad)
        loop.see_gradients(model)
