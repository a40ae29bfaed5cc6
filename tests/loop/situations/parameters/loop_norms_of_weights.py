"""Modules that write buffers in forward or compute their weight: norms of weights, codebooks, batch norm, embeddings."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from loop import Loop, situation
from loop_models import Classifier
from torch import Tensor, nn
from torch.nn.utils import parametrizations

SPECTRAL = "https://github.com/pytorch/pytorch/issues/51800"
CODES = "https://github.com/lucidrains/vector-quantize-pytorch/issues/27"
EMBEDDING = "https://github.com/pytorch/pytorch/issues/26175"
PARAMETRIZED = "https://docs.pytorch.org/tutorials/intermediate/parametrizations.html"


class Mlp(nn.Module):
    """An embedding and two linears, the first of them wrapped."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module], **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, **options)
        self.up, self.down = wrap(nn.Linear(8, 12)), nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def train(loop: Loop, model: nn.Module, rows: int = 4) -> None:
    model = loop.model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(loop.rows(torch.randint(9, (rows, 4))))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation(SPECTRAL, slow=(1, "ddp"), data=("ddp",))
def spectral_norm_in_training(loop: Loop) -> None:
    train(loop, Mlp(parametrizations.spectral_norm))


@situation(SPECTRAL, like="spectral_norm_in_training")
def spectral_norm_by_hooks(loop: Loop) -> None:
    train(loop, Mlp(torch.nn.utils.spectral_norm))


@situation(SPECTRAL, slow=(1,))
def weight_norm_in_training(loop: Loop) -> None:
    train(loop, Mlp(parametrizations.weight_norm))


@situation(SPECTRAL, slow=(1,))
def batch_norm_between_linears(loop: Loop) -> None:
    train(
        loop,
        Mlp(lambda up: nn.Sequential(up, nn.ReLU(), nn.Flatten(0, 1), nn.BatchNorm1d(12), nn.Unflatten(0, (3, 4)))),
        rows=3,
    )


class Codebook(nn.Module):
    """Nearest codes with a straight-through gradient; the codes follow the values by an average in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.outer = nn.Embedding(9, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("count", torch.ones(5))

    def forward(self, ids: Tensor) -> Tensor:
        z = self.inner(self.embed(ids))
        flat = z.reshape(-1, 4)
        index = torch.cdist(flat, self.codes).argmin(-1)
        q = self.codes[index].view_as(z)
        if self.training:
            with torch.no_grad():
                chosen = F.one_hot(index, 5).to(z.dtype)
                self.count.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.codes.mul_(0.9).add_((chosen.T @ flat) / (self.count[:, None] + 1e-5), alpha=0.1)
        commitment = (z - q.detach()).square().mean()
        return self.outer(z + (q - z).detach()).square().mean() + 0.25 * commitment


@situation(CODES, data=("fsdp",), like="codes_are_a_frozen_parameter")
def a_codebook_follows_its_values(loop: Loop) -> None:
    train(loop, Codebook())


class Fourier(nn.Module):
    """FNet: tokens and features are mixed by a transform."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mlp = nn.Embedding(9, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = self.norm(x + torch.fft.fft2(x, dim=(-2, -1)).real)
        return (x + self.mlp(x)).square().mean()


@situation("https://github.com/huggingface/transformers/issues/14466", slow=(1, "ddp"), data=("ddp",))
def tokens_are_mixed_by_a_fourier_transform(loop: Loop) -> None:
    train(loop, Fourier())


@situation(EMBEDDING, slow=("fsdp",), data=("ddp", "fsdp"))
def embedding_with_padding_and_scaled_gradients(loop: Loop) -> None:
    """Rows are counted in the batch of all ranks."""
    train(loop, Mlp(lambda up: up, padding_idx=2, scale_grad_by_freq=True))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Generated(nn.Module):
    """A weight that a module makes of nothing but its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.linear = nn.Parameter(torch.randn(7, 5)), nn.Linear(5, 5)

    def forward(self) -> Tensor:
        return self.linear(self.code)


class OfGenerated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight_of, self.square = Generated(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(x @ self.weight_of())


@situation(PARAMETRIZED, slow=(1, 2, "fsdp"), data=("ddp", "fsdp"))
def calls_without_arguments(loop: Loop) -> None:
    """A parametrized weight is read beside the loss, a submodule and a whole model are called without arguments."""
    made = OfGenerated()
    nn.utils.parametrize.register_parametrization(made.square, "weight", Symmetric())
    model = loop.model(made)
    for _ in range(2):
        loss = model(loop.rows(torch.randn(4, 7))).square().mean() + 0.1 * model.square.weight.square().sum()
        loss = loss + model.weight_of().abs().mean()
        loss.backward()
        loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)
    alone = loop.model(Generated())
    alone().square().sum().backward()
    loop.see(alone=alone())
    loop.see_gradients(alone)


class Adapter(nn.Module):
    """A low-rank term of a weight."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(rows, 2)), nn.Parameter(torch.randn(2, columns))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@situation(PARAMETRIZED, ranks=(1, 2, 3), slow=(1, 3))
def a_parametrization_is_registered_and_merged_later(loop: Loop) -> None:
    model = loop.model(Classifier())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            torch.manual_seed(1)
            nn.utils.parametrize.register_parametrization(model.up, "weight", Adapter(13, 7))
        if step == 2:
            nn.utils.parametrize.remove_parametrizations(model.up, "weight", leave_parametrized=True)
        loss = model(loop.rows(torch.randn(4, 7))).square().mean()
        loss.backward()
        loop.see(loss=loop.mean(loss))
        optimizer.step()
        model.zero_grad()
    loop.see_state(model)
