"""Numbers that the model reads from tensors and uses as sizes."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import Tensor, nn

ITEM = "https://github.com/pytorch/pytorch/issues/108195"  # GuardOnDataDependentSymNode where `.item()` is a size


class Trimmed(nn.Module):
    """The batch is cut to its longest sequence before the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max().item()
        return self.down(torch.relu(self.up(x[:, :n]))).square().mean()


@situation(ITEM)
def a_batch_is_cut_to_its_longest_sequence(loop: Loop) -> None:
    model = loop.model(Trimmed())
    for batch, length, longest in ((4, 9, 9), (4, 9, 5), (2, 7, 1)):
        x, lengths = torch.randn(batch, length, 8), torch.randint(1, longest + 1, (batch,))
        lengths[0] = longest
        loss = model(x, lengths)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Counting(nn.Module):
    """A mixture that sums the load of its experts in a buffer, and returns how often each class was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        counts = torch.bincount(chosen.flatten(), minlength=4)
        self.load = self.load + counts
        mass = torch.bincount(chosen.flatten(), weights=weights.detach().flatten(), minlength=4)
        return (out * (counts / counts.sum()).max()).square().mean(), mass, torch.bincount(chosen[:, 0])


@situation(ITEM)
def a_mixture_counts_the_load_of_its_experts(loop: Loop) -> None:
    model = loop.model(Counting())
    for batch, length in ((2, 5), (3, 4)):
        loss, mass, first = model(torch.randn(batch, length, 8))
        loss.backward()
        loop.see(loss=loss, mass=mass, first=first, load=model.load)
    loop.see_gradients(model)
