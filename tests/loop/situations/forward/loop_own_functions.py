"""`torch.autograd.Function`s of the user whose backward depends on masks, limits, globals, or does more than compute."""

from __future__ import annotations

import math
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

REVERSAL = "https://discuss.pytorch.org/t/solved-reverse-gradients-in-backward-pass/3589"
STRENGTH = 1.0
NORMS: list[float] = []


class Masked(Function):
    """Gradients of some rows alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0][:, None], None


class OfClass(Function):
    """Rows of class 1 get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.where((ctx.saved_tensors[0] == 1)[:, None], 0.0, grad * 2), None


class Clamped(Function):
    """A gradient also a little beyond the limit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0].abs() <= 2 * ctx.limit), None


class ByGlobal(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * STRENGTH


class ByClass(Function):
    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Any:
        return grad * cls.strength


class Recording(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        NORMS.append(float(grad.norm()))
        return grad


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.up, self.down, self.function, self.limit = nn.Linear(6, 8), nn.Linear(8, 6), function, 0.3

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return self.down(self.function(self.up(x), *args)).square().mean()


class Limited(Net):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x, self.limit)


def step(loop: Loop, model: nn.Module, *args: Tensor) -> None:
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(REVERSAL)
def backward_reads_masks_and_labels(loop: Loop) -> None:
    masked, of_class, x = loop.model(Net(Masked.apply)), loop.model(Net(OfClass.apply)), torch.randn(4, 6)
    for last in (0, 1, 3):
        labels = torch.tensor([1, 0, 3, last])
        step(loop, masked, x, labels > 0)
        step(loop, of_class, x, labels)


@situation("https://github.com/pytorch/pytorch/issues/115774", like="backward_reads_a_global_and_its_class")
def a_limit_of_a_function_is_annealed(loop: Loop) -> None:
    model, x = loop.model(Limited(Clamped.apply)), torch.randn(4, 6)
    for limit in (0.3, 0.5, 0.7):
        model.limit = limit
        step(loop, model, x)


@situation(REVERSAL)
def backward_reads_a_global_and_its_class(loop: Loop) -> None:
    global STRENGTH
    by_global, by_class, x = loop.model(Net(ByGlobal.apply)), loop.model(Net(ByClass.apply)), torch.randn(4, 6)
    for strength in (1.0, 0.5, 0.1):
        STRENGTH = ByClass.strength = strength
        step(loop, by_global, x)
        step(loop, by_class, x)


@situation(
    "https://discuss.pytorch.org/t/why-cant-i-see-grad-of-an-intermediate-variable/94",
    like="backward_records_by_helpers",
)
def backward_records(loop: Loop) -> None:
    NORMS.clear()
    model, x = loop.model(Net(Recording.apply)), torch.randn(4, 6)
    for _ in range(3):
        step(loop, model, x)
        loop.see(norms=list(NORMS))


class Recomputed(Function):
    """guided-diffusion's checkpointing, which latent diffusion took over."""

    @staticmethod
    def forward(ctx: Any, function: Any, count: int, *args: Tensor) -> Tensor:
        ctx.function, ctx.inputs, ctx.parameters = function, list(args[:count]), list(args[count:])
        with torch.no_grad():
            return ctx.function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            output = ctx.function(*[x.view_as(x) for x in ctx.inputs])
        found = torch.autograd.grad(output, ctx.inputs + ctx.parameters, grads, allow_unused=True)
        del ctx.inputs, ctx.parameters
        return (None, None, *found)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.time, self.down = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 6)

    def block(self, x: Tensor, time: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x) * (1 + self.time(time))))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return Recomputed.apply(self.block, 2, x, time, *self.parameters())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks, self.out = nn.Linear(6, 6), nn.ModuleList([Residual(), Residual()]), nn.Linear(6, 2)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, time)
        return self.out(x).square().mean()


@situation("https://github.com/openai/guided-diffusion/blob/main/guided_diffusion/nn.py")
def checkpointing_of_ones_own(loop: Loop) -> None:
    model = loop.model(Stack())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 6), torch.randn(4, 3))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()


class Bounded(Function):
    """Elements of a gradient are at most 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.clamp(-10, 10)


class Guarded(Function):
    """A gradient that is no number is left out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.nan_to_num(grad, 0.0, 0.0, 0.0)


class OneAtZero(Function):
    """The derivative of relu at 0 is 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * (ctx.saved_tensors[0] >= 0)


class Scaled(Net):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = self.function(self.up(x), *args)
        return (self.down(y) * self.limit).sum()


@situation("https://discuss.pytorch.org/t/gradient-clipping/2836", like="backward_reads_masks_and_labels")
def backward_bounds_and_guards_what_is_rare(loop: Loop) -> None:
    for function, scale in ((Bounded, 1e3), (Guarded, float("nan")), (OneAtZero, 1.0)):
        model = loop.model(Scaled(function.apply))
        model.limit = scale
        with torch.no_grad():
            model.up.weight[:4], model.up.bias[:4] = 0.0, 0.0
        step(loop, model, torch.randn(4, 6))


def note(grad: Tensor) -> None:
    NORMS.append(float(grad.norm()))


class Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, {"calls": 0}

    def update(self, value: float) -> None:
        self.total += value

    def __call__(self, value: float) -> None:
        self.count["calls"] += 1


METER = Meter()


class ByHelper(Function):
    """Records by a function, an object that is called, and a method."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        note(grad)
        return grad


class ByObject(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        METER(float(grad.norm()))
        return grad


class ByArgument(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter) -> Tensor:
        ctx.meter = meter
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.meter.update(float(grad.norm()))
        return grad, None


class Metered(Net):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(x, METER)


@situation("https://github.com/pytorch/pytorch/issues/172248")
def backward_records_by_helpers(loop: Loop) -> None:
    NORMS.clear()
    METER.__init__()  # type: ignore[misc]
    for kind, function in ((Net, ByHelper), (Net, ByObject), (Metered, ByArgument)):
        model = loop.model(kind(function.apply))
        for _ in range(2):
            step(loop, model, torch.randn(4, 6))
    loop.see(norms=NORMS[:], total=METER.total, calls=METER.count["calls"])


class Reversed(Function):
    @staticmethod
    def forward(x: Tensor, strength: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.strength * gradient, None


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 9)

    def forward(self, h: Tensor, scale: float) -> Tensor:
        assert h.detach().abs().max().item() < 1e9
        return self.layer(h) * scale


class Adversary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.domain = nn.Linear(7, 9), ScaledLayer(), nn.Linear(9, 2)
        self.step = 0

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        self.step += 1
        strength = 2 / (1 + math.exp(-10 * self.step / 100)) - 1
        h = F.relu(self.features(x))
        loss = self.label(h, self.step * 0.1).square().mean() + self.domain(Reversed.apply(h, strength)).square().mean()
        return loss, strength


@situation("https://github.com/fungtion/DANN/issues/8")
def a_function_and_an_eager_module_get_numbers_that_forward_counts(loop: Loop) -> None:
    model, x = loop.model(Adversary()), torch.randn(6, 7)
    for _ in range(4):
        loss, strength = model(x)
        loss.backward()
        loop.see(loss=loss, strength=strength)
        loop.see_gradients(model)
    if not loop.eager:
        assert model.megafx.captures == 1
