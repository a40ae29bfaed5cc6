"""Models that rearrange with einops, as lucidrains', timm's and many others do."""

from __future__ import annotations

import copy

import pytest
import torch
from einops import rearrange, reduce, repeat
from einops.layers.torch import Rearrange
from torch import Tensor, nn

import megafx


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(1, 8))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.cut = Rearrange("b n (h d) -> b h n d", h=2)  # a module of einops

    def forward(self, x: Tensor) -> Tensor:
        start = repeat(self.start, "n d -> b n d", b=x.shape[0])
        x = torch.cat([start, x], 1)
        q, k, v = (self.cut(t) for t in self.qkv(x).chunk(3, -1))
        weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
        x = x + self.out(rearrange(weights @ v, "b h n d -> b n (h d)"))
        return reduce(rearrange(x, "b n d -> b d n"), "b d n -> b d", "mean").pow(2).mean()


@pytest.fixture
def first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What einops has noted of types and shapes is forgotten: no call was made in eager mode before."""
    from einops import _backends
    from einops import einops as functions

    for table in ("_loaded_backends", "_type2backend"):
        monkeypatch.setattr(_backends, table, {})
    functions._reconstruct_from_shape.cache_clear()


def test_exact_without_an_eager_call_before(first_use: None) -> None:
    example = (torch.randn(2, 5, 8, dtype=torch.float64),)
    verdict = megafx.verify(Attends().double(), megafx.Config(tensor_model_parallel_size=3), example_inputs=example)
    assert verdict, str(verdict)


def test_other_lengths_have_the_same_graph(first_use: None) -> None:
    """einops looks shapes up in a cache of Python's: a size with a hash there would be one of a single length."""
    model = Attends().double()
    plain = copy.deepcopy(model)
    model = megafx.parallelize(model)
    for length in (5, 7, 9):
        x = torch.randn(2, length, 8, dtype=torch.float64)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-12, atol=0)
    (graphs,) = model.megafx.graphs.values()
    assert len(graphs) == 1
