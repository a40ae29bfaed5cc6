"""Functions and modules of TorchScript inside of a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError
from megafx.meanwhile import meanwhile

GELU = "https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/fusions/fused_bias_gelu.py"
SEDD = "https://github.com/louaaron/Score-Entropy-Discrete-Diffusion/blob/main/model/fused_add_dropout_scale.py"
FROZEN = "https://github.com/pytorch/audio/issues/1337"


@torch.jit.script
def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


@torch.jit.script
def repeated(x: Tensor, times: int) -> tuple[Tensor, int]:
    x = x.clone()
    x[:, 0] = 0.0
    for i in range(times):
        x = x + i * x.sin()
    if x.shape[0] > 3:
        x.mul_(2)
    return x, x.shape[0]


@torch.jit.script
def by_data(x: Tensor) -> Tensor:
    if bool(x.sum() > 0):
        return x * 2
    return x * 3


def centered(x: Tensor) -> Tensor:
    with torch.no_grad():
        mean = x.mean()
    return x - mean


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12, bias=False), nn.Linear(12, 5)
        self.bias, self.times = nn.Parameter(torch.ones(12)), 2
        self.traced = [torch.jit.trace(lambda x: x.reshape(x.shape[0], -1).cos() * x.shape[0], torch.randn(4, 5))]

    def forward(self, x: Tensor) -> Tensor:
        h, rows = repeated(bias_gelu(self.bias, self.up(x)), self.times)
        return self.traced[0](self.down(h)) / rows  # type: ignore[no-any-return]  # of torch.jit


@situation(GELU, like="a_function_of_torchscript_switches_gradients_off")
def functions_of_torchscript_have_gradients(loop: Loop) -> None:
    for _ in range(4):  # TorchScript optimises, and differentiates by itself, what has run before
        bias_gelu(torch.ones(12, requires_grad=True), torch.randn(4, 12)).sum().backward()
    model = loop.model(Two())
    for rows, times in ((4, 2), (4, 3), (2, 3), (6, 3)):
        model.times = times
        loss = model(torch.randn(rows, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
    bias = torch.ones(12, requires_grad=True)
    for _ in range(3):
        bias_gelu(bias, torch.randn(4, 12)).sum().backward()
    loop.see(outside=bias.grad)


@situation("https://github.com/pytorch/pytorch/issues/29637")
def a_function_of_torchscript_decides_by_data(loop: Loop) -> None:
    class Inner(Two):
        def forward(self, x: Tensor) -> Tensor:
            return by_data(super().forward(x))

    model = loop.model(nn.Sequential(Inner(), nn.Linear(5, 3)))
    for sign in (1.0, -1.0):
        loss = model(sign * torch.ones(4, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Taught(nn.Module):
    def __init__(self, teacher: nn.Module, held: bool) -> None:
        super().__init__()
        self.student = nn.Linear(7, 5)
        self.teacher = [teacher] if held else teacher

    def forward(self, x: Tensor) -> Tensor:
        teacher = self.teacher[0] if isinstance(self.teacher, list) else self.teacher
        return F.mse_loss(self.student(x), teacher(x.tanh()))


@situation(FROZEN)
def a_frozen_module_of_torchscript_teaches(loop: Loop) -> None:
    plain = nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5))
    scripted = torch.jit.script(plain)
    if not loop.eager:
        with pytest.raises(CaptureError, match=r"(?s)RecursiveScriptModule of torch.jit.*module 'teacher'"):
            loop.model(Taught(scripted, held=False))(torch.randn(4, 7))
        trained = loop.model(Taught(scripted, held=True))
        with pytest.raises(CaptureError, match=r"(?s)has parameters that are trained.*line|loop_torchscript"):
            trained(torch.randn(4, 7))
    torch.manual_seed(1)
    registered = loop.model(Taught(copy.deepcopy(plain), held=False))
    registered(torch.randn(4, 7)).backward()
    loop.see_gradients(registered)
    for p in scripted.parameters():
        p.requires_grad_(False)
    model = loop.model(Taught(scripted, held=True))
    for _ in range(3):
        loss = model(torch.randn(4, 7))
        loss.backward()
        loop.see(loss=loss)
        for p in scripted.parameters():
            p.mul_(0.5)
    loop.see_gradients(model)


@situation(FROZEN)
def a_library_calls_the_methods_of_torchscript(loop: Loop) -> None:
    """torch.testing does: there torch asks whether it exports, and would call the Python method, with `self` twice."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 5)))
    for p in scripted.parameters():
        p.requires_grad_(False)
    names = {"old": torch._C.ScriptMethod.__call__}
    exec(compile("def call(*args, **kwargs):\n    return old(*args, **kwargs)", torch.__file__, "exec"), names)
    with meanwhile(torch._C.ScriptMethod, __call__=names["call"]):
        model = loop.model(Taught(scripted, held=True))
        loss = model(torch.randn(4, 7))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/49063")
def a_function_of_torchscript_switches_gradients_off(loop: Loop) -> None:
    class Inner(Two):
        center = staticmethod(torch.jit.script(centered))

        def forward(self, x: Tensor) -> Tensor:
            return self.center(super().forward(x))  # type: ignore[no-any-return]  # of torch.jit

    class Outer(Inner):
        center = staticmethod(centered)  # type: ignore[assignment]  # what TorchScript has made of it

    if not loop.eager:
        with pytest.raises(
            CaptureError, match=r"(?s)'centered' of torch.jit.script switches gradients off.*loop_torch"
        ):
            loop.model(Inner())(torch.randn(4, 7))
    torch.manual_seed(1)
    model = loop.model((Inner if loop.eager else Outer)())
    loss = model(torch.randn(4, 7)).square().mean()
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(SEDD)
def a_function_is_scripted_where_profiling_is_off(loop: Loop) -> None:
    """torch has another executor for such functions, which cannot forget what it has compiled."""
    torch._C._jit_set_profiling_executor(False)
    try:
        scripted = torch.jit.script(centered_and_scaled)
        x = torch.randn(4, 7)
        scripted(x, x)
    finally:
        torch._C._jit_set_profiling_executor(True)
    model = loop.model(Scales(scripted))
    for rows in (4, 6):
        loss = model(torch.randn(rows, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


def centered_and_scaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * (1 + scale)


class Scales(nn.Module):
    def __init__(self, scripted: Any) -> None:
        super().__init__()
        self.up, self.scale, self.down, self.scripted = nn.Linear(7, 12), nn.Linear(7, 12), nn.Linear(12, 5), [scripted]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.scripted[0](self.up(x), self.scale(x)))  # type: ignore[no-any-return]  # of torch.jit
