"""What forward asks of tensors beside their values (`is_leaf`, `grad_fn`, `.grad`, `x is y`); parameters that it freezes."""

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
def forward_reads_and_sets_what_autograd_keeps(loop: Loop) -> None:
    """Refused, with advice."""
    codes: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
        r"reads `.grad` of a parameter.*pass what forward needs": lambda linear, x: (
            linear(x) * (2 if linear.weight.grad is None else 3)
        ),
        r"sets `.grad`.*set it in the training loop": lambda linear, x: (setattr(linear.bias, "grad", None), linear(x))[
            1
        ],
        r"calls zero_grad.*call it in the training loop": lambda linear, x: (linear.zero_grad(), linear(x))[1],
        r"reads `._version`.*count changes": lambda linear, x: linear(x) * (1 + linear.weight._version),
        r"where a tensor's memory is.*by a name or a number": lambda linear, x: linear(x) * (x.data_ptr() > 0),
    }
    for text, code in codes.items():
        model = loop.model(Asks(code))
        if not loop.eager:
            with pytest.raises(CaptureError, match=f"(?s){text}"):
                model(torch.randn(3, 8))
    loop.see(refused=True)


class Remembers(nn.Module):
    """x, y [rows, 8] -> [rows, 6], by whether they are one tensor, and whether x is the one of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last, self.pair, self.in_pair = nn.Linear(8, 6), None, (None, 0), False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        again = x is (self.pair[0] if self.in_pair else self.last)
        self.last, self.pair = x, (x, 1)
        return self.linear(x if x is y else x - y) * (2 if again else 3)


@situation("https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/activation.py")
def forward_asks_whether_two_tensors_are_one(loop: Loop) -> None:
    """As MultiheadAttention does of query and key, and caches do of what they were computed for."""
    model, a, b = loop.model(Remembers()), torch.randn(3, 8), torch.randn(3, 8, requires_grad=True)
    if not loop.eager:  # the advice is followed below
        model.in_pair, model.pair = True, (a, 1)
        with pytest.raises(CaptureError, match=r"(?s)the very tensor that the call gives it.*not in a tuple"):
            model(a, b)
        model.in_pair = False
    for x, y in ((a, b), (a, a), (b, a), (b, b), (b, a), (a, b)):
        output = model(x, y)
        output.square().mean().backward()
        loop.see(output=output)
    loop.see(b=b.grad)
    loop.see_gradients(model)


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


@situation(FROZEN, like="batches_are_dicts_with_defaults_and_deques")
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


class Teaches(nn.Module):
    """The teacher is put into evaluation by forward, and stays so until train() is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.teacher = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        scale = 2 if self.teacher.training else 3
        self.teacher.eval()
        return self.linear(x) * scale - self.teacher(x)


@situation(
    "https://github.com/lucidrains/byol-pytorch/blob/master/byol_pytorch/byol_pytorch.py",
    like="forward_asks_how_its_argument_was_computed",
)
def forward_puts_its_teacher_into_evaluation(loop: Loop) -> None:
    model = loop.model(Teaches())
    for mode in (True, None, None, True, False):
        if mode is not None:
            model.train(mode)
        output = model(torch.randn(3, 8))
        output.square().mean().backward()
        loop.see(output=output, training=[m.training for m in model.modules()])
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/proper-way-to-do-weight-clipping-in-forward/111453")
def forward_writes_a_weight_after_its_use_or_wants_a_gradient_of_its_argument(loop: Loop) -> None:
    """Refused: the weight's gradient would be lost, and the caller's tensor would have none. The advice is followed."""
    model, x = (loop.model(Asks(lambda linear, x: (linear(x), linear.weight.data.fill_(0.1))[0])), torch.randn(3, 8))
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)read parameter 'linear.weight'.*or between calls"):
            model(x)
    model = loop.model(Asks(lambda linear, x: linear(x.requires_grad_())))
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)of an argument.*before the call"):
            model(x)
    nn.init.constant_(model.linear.weight, 0.1)
    model(x.requires_grad_()).square().mean().backward()
    loop.see(x=x.grad)
    loop.see_gradients(model)
    model = loop.model(Asks(lambda linear, x: (linear(x), nn.init.constant_(linear.weight, 0.1))[0]))
    model(x.detach()).square().mean().backward()
    loop.see(weight=model.linear.weight.sum().detach())
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/115774")
def a_table_that_is_no_buffer_is_read_as_a_list(loop: Loop) -> None:
    """And changed in place, or replaced."""
    module = Asks(lambda linear, x: linear(x) * linear.table.tolist()[1])
    module.linear.table = torch.tensor([1, 2, 3])
    model, x = loop.model(module), torch.randn(3, 8)
    for change in range(4):
        if change == 1:
            model.linear.table[1] = 9
        if change == 3:
            model.linear.table = torch.tensor([4, 5, 6])
        output = model(x)
        output.square().mean().backward()
        loop.see(output=output)
    loop.see_gradients(model)
