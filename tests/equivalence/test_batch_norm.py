"""Batch norm in training, inside of a block of attention and an MLP: outputs, gradients and running statistics are eager's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx import Config


class Block(nn.Module):
    """kind: how tokens reach the norm: as rows, as a sequence of channels, or as an image."""

    def __init__(self, kind: str, h: int = 12, wide: int = 22, heads: int = 3) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if kind == "image" else nn.BatchNorm1d
        self.kind, self.heads = kind, heads
        self.first, self.inner = norm(h), norm(wide)
        self.qkv, self.proj, self.up, self.down = (nn.Linear(*s) for s in ((h, 3 * h), (h, h), (h, wide), (wide, h)))

    def normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        b, s, h = x.shape
        if self.kind == "rows":
            return norm(x.reshape(-1, h)).view(b, s, h)
        if self.kind == "sequence":
            return norm(x.transpose(1, 2)).transpose(1, 2)
        return norm(x.transpose(1, 2).reshape(b, h, s, 1)).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = [
            y.view(b, s, self.heads, -1).transpose(1, 2) for y in self.qkv(self.normed(self.first, x)).chunk(3, -1)
        ]
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.normed(self.inner, self.up(x))))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(kind))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


def base(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind).double()


X, Y = (
    torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64).repeat(2, 1, 1, 1).unbind()
)


@pytest.mark.parametrize(("kind", "t"), [("rows", 2), ("sequence", 3), ("image", 3)])
def test_is_exact_on_shards_of_channels(kind, t):
    for sequence_parallel in (False, True):
        config = Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel)
        with megafx.debug(check=1):  # what the type checker cannot confirm is an error
            found = megafx.verify(base(kind), config, example_inputs=(X, Y.flip(0)))
        assert found, found


def test_running_statistics_are_eagers():
    eager = base("image")
    ours = megafx.parallelize(base("image"), Config(tensor_model_parallel_size=1))
    for x in (X, X + 1):
        ours(x, Y), eager(x, Y)
    buffers = dict(ours.named_buffers())
    assert int(buffers["blocks.0.inner.num_batches_tracked"]) == 2
    for name, wanted in eager.named_buffers():
        torch.testing.assert_close(buffers[name], wanted, rtol=1e-10, atol=1e-12)
