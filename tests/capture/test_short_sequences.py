"""Models whose tables bound the sequence to about the number of ranks: sizes that vary stay symbols, no part is wrong.

Found by the fuzzer: a traced shard of one row is taken for a number, and so is a size that is traced at its bound.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx import Config
from megafx.capture.export import capture_call


class Short(nn.Module):
    """Positions from a table of so many rows; the sequence first in one norm."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(17, 12), nn.Parameter(torch.randn(longest, 12))
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.join, self.head = nn.Linear(24, 12), nn.Linear(12, 17)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids) + self.positions[: ids.shape[1]]
        x = self.norm(x.transpose(0, 1) * 1.5).transpose(0, 1)
        x = self.join(torch.cat((x, F.dropout(self.down(F.relu(self.up(x))), 0.1)), -1))
        return F.cross_entropy(self.head(x + x.flip(1) * 0.5).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(("longest", "batch", "length", "t"), [(4, 3, 4, 4), (5, 1, 2, 4), (2, 2, 2, 3), (64, 1, 3, 4)])
def test_short_sequences_are_exact(longest, batch, length, t):
    torch.manual_seed(0)
    ids = torch.randint(0, 17, (batch, length))
    config = Config(tensor_model_parallel_size=t, sequence_parallel=True)
    found = megafx.verify(Short(longest).double(), config, example_inputs=(ids, ids.roll(1, 1)))
    assert found, found


def test_a_trace_is_shorter_than_its_bound():
    ids = torch.randint(0, 17, (2, 5))
    sizes = capture_call(Short(5), (ids, ids)).sizes
    assert sizes.traced_of[sizes.symbols["seq"]] == 3
