"""Covers: passes/backward/store_activation_inputs.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fp8_models import EVERY, Model, batch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.kernels.fp8.quantize import FORMATS

STORE: dict[str, Any] = {"activation_func_fp8_input_store": True, "hardware": "h100-nvlink"}


class Gated(nn.Module):
    """A block of Llama's kind: attention, and a gated unit of two weights."""

    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        y = self.norm1(x)
        q, k, v = (w(y).view(b, s, 4, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(Model):
    def __init__(self, ffn: int, layers: int, width: int = 32) -> None:
        super().__init__(ffn, 0, width=width)
        self.layers = nn.ModuleList(Gated(width, ffn) for _ in range(layers))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax() / torch.finfo(FORMATS["e4m3"]).max
    return (x * (1 / scale)).to(FORMATS["e4m3"]).double() * scale


def test_gradients_are_those_of_the_rounded_input() -> None:
    """And the output, of which the gradient of the next weight is made."""
    torch.manual_seed(0)
    model, x = MLP().double(), torch.randn(5, 8).double()
    up, down = model.up, model.down
    product = x @ up.weight.t()
    u = (rounded(product) + up.bias).detach().requires_grad_()
    h = F.gelu(product + up.bias)
    wanted = (h @ down.weight.t() + down.bias).square().mean()
    dy = 2 * (h @ down.weight.t() + down.bias).detach() / 40
    (du,) = torch.autograd.grad(F.gelu(u), u, dy @ down.weight.detach())
    parallel = megafx.parallelize(model, Config(**STORE), example_inputs=(x,))
    loss = parallel(x)
    loss.backward()
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(loss, wanted, **close)
    torch.testing.assert_close(up.weight.grad, du.t() @ x, **close)
    torch.testing.assert_close(up.bias.grad, du.sum(0), **close)
    torch.testing.assert_close(down.weight.grad, dy.t() @ F.gelu(u.detach()), **close)
    torch.testing.assert_close(down.bias.grad, dy.sum(0), **close)


@pytest.mark.parametrize(
    ("t", "gated", "options"),
    [
        (2, True, {"sequence_parallel": True, **EVERY}),
        (3, True, {}),
        (3, False, {"sequence_parallel": True, **EVERY, "fp8_recipe": "rowwise"}),
        (4, False, {"recompute_activation_func": False}),
    ],
    ids=str,
)
def test_it_is_the_same_on_any_number_of_ranks(t: int, gated: bool, options: dict[str, Any]) -> None:
    """Uneven: 50 columns, 7 tokens."""
    torch.manual_seed(0)
    model = Llama(50, 1) if gated else Model(50, 1)
    config = Config(**STORE, **options, tensor_model_parallel_size=t)
    verdict = megafx.verify(model.double(), config, example_inputs=batch(7), tolerance=1e-10)
    assert verdict.reference == "megafx at t=1" and verdict, str(verdict)


def test_a_removed_collective_is_noticed() -> None:
    """That of the largest magnitude too."""
    torch.manual_seed(0)
    config = Config(**STORE, tensor_model_parallel_size=2)
    model = MLP().double()
    found = megafx.sabotage(model, config, example_inputs=(torch.randn(5, 8).double(),))
    assert found and "without %all_reduce_default in 'up'" in str(found), str(found)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_quarter_less_is_kept_than_in_bf16(recipe: str) -> None:
    """Of Llama's shape: 3.5 times the width in the gated unit."""
    saved = []
    for options in ({}, {**EVERY, "fp8_recipe": recipe}, {**EVERY, "fp8_recipe": recipe, **STORE}):
        torch.manual_seed(0)
        config = Config(**{"hardware": "h100-nvlink", **options})
        model = megafx.parallelize(Llama(448, 2, 128).bfloat16(), config, example_inputs=batch(64))
        model(*batch(64)).backward()
        saved.append(megafx.explain(model).memory("adamw").saved)
    assert saved[2] <= 0.75 * saved[0] and saved[2] < saved[1] <= saved[0], saved


def test_what_something_else_reads_stays() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(x)
            return (self.down(F.silu(gate) * self.up(x)) + gate[:, :8].sin()).square().mean()

    torch.manual_seed(0)
    x = torch.randn(5, 8).double()
    model = megafx.parallelize(Both().double(), Config(**STORE), example_inputs=(x,))
    model(x).backward()
    report = re.sub(r"\s+", " ", str(megafx.explain(model)))
    assert "an activation's input is kept as it is: something else reads it too" in report, report
