"""Sizes that are numbers beside sizes that are symbols, with sequence parallelism: tables longer than the sequence, quotients
of sizes, sequences of one and two tokens.

Covers: rules/families_dims.py (slices of dynamic length), ir/sizes.py (quotients), capture/export.py and capture/dims.py (sizes
of the trace), passes/canonicalize/views.py (where a slice starts).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx

HIDDEN, VOCAB = 12, 31


class Net(nn.Module):
    """One MLP behind a table of positions, or behind scores whose sizes are computed."""

    def __init__(self, kind: str, table: int = 16) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.table = nn.Embedding(VOCAB, HIDDEN), nn.Parameter(torch.randn(1, table, HIDDEN))
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        b, s = ids.shape
        x: Tensor = self.embed(ids)
        y = self.norm(x)
        scores = y @ y.transpose(1, 2)
        if self.kind == "first rows":  # minGPT
            x = x + self.table[:, :s]
        elif self.kind == "last rows":
            x = x + self.table[:, self.table.shape[1] - s :]
        elif self.kind == "inferred":
            x = x + scores.reshape(b, -1).view(b, s, -1) @ x
        elif self.kind == "quotient":
            x = x + scores.flatten(1).view(b, (s * s) // s, s) @ x
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), labels.view(-1))


@pytest.mark.parametrize("t, sequence_parallel", [(2, True), (3, False), (4, True)])
@pytest.mark.parametrize(
    "kind, shape",
    [("first rows", (3, 7)), ("first rows", (3, 1)), ("first rows", (2, 2)), ("last rows", (3, 16)), ("last rows", (1, 7)),
     ("inferred", (3, 7)), ("quotient", (3, 5))],
)  # fmt: skip
def test_loss_and_gradients_are_eagers(kind: str, shape: tuple[int, int], t: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model, ids = Net(kind).double(), torch.randint(0, VOCAB, shape)
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel)
    found = megafx.verify(model, config, example_inputs=(ids, ids), tolerance=1e-10)
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("table", [16, 128])
def test_a_table_of_positions_leaves_the_sequence_in_shards(table: int) -> None:
    ids = torch.randint(0, VOCAB, (3, 7))
    config = megafx.Config(tensor_model_parallel_size=2, sequence_parallel=True)
    plan = megafx.plan(Net("first rows", table), config, example_inputs=(ids, ids))
    assert plan.sequence_parallel and plan.ops["layer_norm_1"].out.is_shard
    assert megafx.verify(Net("first rows", table).double(), config, example_inputs=(ids, ids), tolerance=1e-10)
