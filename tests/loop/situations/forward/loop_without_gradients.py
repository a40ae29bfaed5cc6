"""Forward that computes under `no_grad` with what it differentiates later on."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F


class Cast(nn.Linear):
    """HRM's and nanochat's: the weight in the dtype of the activations, in which it may be already."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.type_as(x))


class Recursive(nn.Module):
    """Hierarchical reasoning: all cycles but the last one without gradients, by the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down, self.head = nn.Embedding(9, 8), Cast(8, 12), Cast(12, 8), Cast(8, 9, bias=False)

    def cycle(self, z: Tensor, x: Tensor) -> Tensor:
        return F.rms_norm(z + self.down(F.silu(self.up(z + x))), (8,))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(ids)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(2):
                z = self.cycle(z, x)
        z = self.cycle(z, x)
        return F.cross_entropy(self.head(z).flatten(0, 1), ids.flatten()), z.detach()


class Twice(nn.Module):
    """Ops that return their operand: dropout that is off, contiguous(), flatten of one dim, real() of a real number."""

    def __init__(self, function: str) -> None:
        super().__init__()
        self.up, self.down, self.function = nn.Linear(6, 8), nn.Linear(8, 5), function

    def same(self, x: Tensor) -> Tensor:
        if self.function == "dropout":
            return F.dropout(x, 0.5, training=False)
        if self.function == "contiguous":
            return x.contiguous()
        if self.function == "flatten":
            return x.flatten(1, 1)
        return torch.real(x)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        with torch.no_grad():
            scale = self.same(h).abs().mean()
        return self.down(h / scale).square().mean()


@situation("https://github.com/sapientinc/HRM")
def cycles_without_gradients_before_one_with_them(loop: Loop) -> None:
    model, ids = loop.model(Recursive()), torch.randint(9, (3, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss, z = model(ids)
        loss.backward()
        loop.see(loss=loss, z=z)
        loop.see_gradients(model)
        optimizer.step()


@situation(
    "https://discuss.pytorch.org/t/with-torch-no-grad-changes-requires-grad-status/43811",
    like="cycles_without_gradients_before_one_with_them",
)
def a_statistic_without_gradients_of_what_is_differentiated(loop: Loop) -> None:
    for function in ("dropout", "contiguous", "flatten", "real"):
        model = loop.model(Twice(function))
        loss = model(torch.randn(4, 6))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
