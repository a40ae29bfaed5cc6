"""A small model with a tied weight."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight
        self.odd = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.register_buffer("flag", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
