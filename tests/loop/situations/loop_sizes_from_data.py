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
