"""Models that tests of weights make, by name or a small tied one, whole or on the meta device, and their tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import zoo
from torch import nn

from megafx.placements.slices import ShardSlice, shard_slices
from megafx.placements.tensors import shard_tensor
from megafx.placements.types import I
from megafx.weights.state import all_tensors


@dataclass
class Part:
    """A tensor of one rank, as `weights.state.Stored` describes one, without a process group."""

    names: tuple[str, ...]
    tensor: torch.Tensor
    local: torch.Tensor
    slices: list[ShardSlice]

    @property
    def name(self) -> str:
        return self.names[0]


def parts_of(model: nn.Module, placements: dict, rank: int, t: int) -> list[Part]:
    parts = []
    for s in all_tensors(model):
        placement = next((placements[n] for n in s.names if n in placements), I)
        local = torch.zeros_like(shard_tensor(torch.zeros(s.tensor.shape, dtype=s.tensor.dtype), placement, rank, t))
        parts.append(
            Part(
                s.names,
                s.tensor,
                local,
                shard_slices(s.tensor.shape, ((placement, t),) if placement.is_shard else (), rank),
            )
        )
    return parts


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def on_meta(make):
    with torch.device("meta"):
        return make()


def hugging_face(kind: str, **sizes) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 24, "intermediate_size": 50, "num_hidden_layers": 2, "vocab_size": 67}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape, **sizes))


class Net(nn.Module):
    """A tied weight; dtypes and buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight
        self.odd = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


class Odd(nn.Module):
    """Initialisers of every kind: drawn twice, tied, padded, orthogonal, truncated, by names, by numbers, by views."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 6, padding_idx=3)
        self.inner = nn.Linear(6, 7)
        self.square = nn.Linear(7, 7)
        self.recurrent = nn.LSTM(7, 6)
        self.attention = nn.MultiheadAttention(6, 2)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 19, bias=False)
        self.free = nn.Parameter(torch.randn(5, 6) * scale)
        self.column = nn.Parameter(torch.empty(4, 6))
        self.register_buffer("angles", 10000 ** -(torch.arange(0, 6, 2) / 6), persistent=False)
        self.register_buffer("mask", torch.ones(5, 5).tril())
        self.rates = [x.item() for x in torch.linspace(0, 0.1, 3, device="cpu")]
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.inner.weight, std=0.02)
        with torch.no_grad():
            self.column[:, :2].normal_()
            self.column[:, 2:] = torch.rand(4, 4).cumsum(1)
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith("square.bias"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2))
        self.head.weight = self.table.weight
        self.double_head = nn.Parameter(self.inner.weight.detach().clone() * self.rates[1])

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
            module.weight.data[module.padding_idx].zero_()


FACTORIES = {"odd": Odd, "odd_double": lambda: Odd(0.1).double()}
FACTORIES["copies"] = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3)
FACTORIES |= {name: (lambda name=name: zoo.ZOO[name]()[0]) for name in zoo.ZOO}
FACTORIES["neox"] = lambda: hugging_face("gpt_neox", num_attention_heads=4)
FACTORIES["mixtral"] = lambda: hugging_face("mixtral", num_attention_heads=4, num_local_experts=3)
