"""Sizes of 0 and 1: a graph that was traced at larger ones serves them only if the model computes the same at them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from interpret import run_program
from torch import nn

import megafx
from megafx.capture.export import capture_call

Head = Callable[[torch.Tensor], Any]


class Model(nn.Module):
    def __init__(self, head: Head) -> None:
        super().__init__()
        self.lin, self.head = nn.Linear(4, 4), head

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lin(x))


def _last(h: torch.Tensor) -> torch.Tensor:
    return h[:, -1] if h.shape[1] >= 2 else 3 * h[:, 0]


def _steps(h: torch.Tensor) -> torch.Tensor:
    for _ in range(h.shape[1] - 1):
        h = h + 1
    return h


def _halve(h: torch.Tensor) -> torch.Tensor:
    n = h.shape[1]
    while n > 2:
        n = n // 2
    return h * n


def _difference(h: torch.Tensor) -> torch.Tensor:
    change = h[:, 1:] - h[:, :-1]
    return h.sum() + (change.mean() if change.numel() else 0.0)


def _unsqueezed(h: torch.Tensor) -> torch.Tensor:
    h = h.mean(1)
    h = h.squeeze(0) if h.shape[0] == 1 else h
    return h if h.dim() == 2 else 2 * h.unsqueeze(0)


# What depends on a size of 0 or 1.
BRANCHES: dict[str, Head] = {
    "greater": lambda h: h if h.shape[1] > 1 else -h,
    "not greater": lambda h: -h if not h.shape[1] > 1 else h,
    "rows": lambda h: 2 * h if h.shape[0] == 1 else h,
    "other rows": lambda h: 2 * h if h.shape[0] != 1 else h,
    "none": lambda h: h.sum() if h.size(0) == 0 else h,
    "squeeze": lambda h: h.squeeze().cumsum(0),
    "squeeze a dim": lambda h: h.squeeze(1).cumsum(0),
    "squeeze dims": lambda h: torch.squeeze(h, (0, 1)).cumsum(0),
    "even": lambda h: h if h.shape[1] % 2 == 0 else -h,
    "deviation": lambda h: h / (1 + h.std(1, keepdim=True)) if h.size(1) > 1 else h,
    "greatest": lambda h: h * max(h.shape[1], 2),
    "last": _last,
    "truth of a difference": lambda h: 2 * h if h.shape[1] - 1 else h,
    "elements": lambda h: 2 * h if h.numel() > 4 else h,
    "len": lambda h: h * (2 if len(h) > 1 else 3),
    "number of a truth": lambda h: h * int(h.shape[1] > 1),
    "arithmetic of a truth": lambda h: h + (h.shape[1] > 1) * 3,
    "flag of attention": lambda h: nn.functional.scaled_dot_product_attention(h, h, h, is_causal=h.shape[1] > 1),
    "flag of a sum": lambda h: h.sum(1, keepdim=h.shape[1] != 5) + h.shape[0],
    "logarithm of numpy": lambda h: h[:, : np.ceil(np.log(h.shape[1])).astype("int").item()] / np.sqrt(h.shape[1] / 2),
    "tuple": lambda h: 2 * h if h.shape[:2] == (1, 1) else h,
    "member": lambda h: 2 * h if h.shape[1] in (1, 9) else h,
    "or": lambda h: h / (h.shape[1] - 1 or 1),
    "key": lambda h: h * {1: 2.0}.get(h.shape[1], 1.0),
    "loop": _steps,
    "halve": _halve,
    "difference": _difference,
    "unsqueeze": _unsqueezed,
    "pool": lambda h: nn.functional.avg_pool1d(h.transpose(1, 2), 2 if h.shape[1] > 1 else 1),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_each_call_gets_what_eager_mode_computes(name: str) -> None:
    """By a graph that says that it serves the call, in whichever order the sizes come."""
    model = Model(BRANCHES[name]).double()
    sizes = [(3, 5), (1, 5), (3, 1), (1, 1), (0, 5), (2, 4)]
    for order in (sizes, sizes[3:1:-1]):
        programs: list[Any] = []
        for batch, length in order:
            x = torch.randn(batch, length, 4, dtype=torch.float64)
            served = (p for p in programs if p.call.mismatch((x,)) is None)
            program = next(served, None) or capture_call(model, (x,))
            programs.append(program)
            assert program.call.mismatch((x,)) is None
            torch.testing.assert_close(run_program(program, model, (x,)), model(x), equal_nan=True)


# What computes the same at 1, although torch's ops and the code ask about sizes.
SAME: dict[str, Head] = {
    "nothing": lambda h: h,
    "folded": lambda h: h.flatten(0, 1).view(h.shape),
    "expanded": lambda h: h + torch.ones(h.shape[0], 1, 4, dtype=h.dtype).expand(-1, h.shape[1], -1),
    "asked": lambda h: h.expand(h.shape) if h.shape[0] != 1 else h,
    "contiguous": lambda h: h.transpose(0, 1).contiguous().view(h.shape[1], -1).sum(0),
    "attention": lambda h: nn.functional.scaled_dot_product_attention(*[h[:, None]] * 3, is_causal=True),
}


@pytest.mark.parametrize("name", SAME)
def test_one_graph_where_nothing_depends_on_it(name: str) -> None:
    model = megafx.parallelize(Model(SAME[name]), megafx.Config(tensor_model_parallel_size=1, compile=False))
    for batch, length in ((1, 5), (3, 5), (3, 1), (1, 1), (0, 5)):
        model(torch.randn(batch, length, 4))
    assert model.megafx.captures == 1


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each trace."""
    found: list[Any] = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **options: found.append(1) or export(*args, **options))
    return found


def test_a_batch_of_one_is_traced_once(traces: list[Any]) -> None:
    """Neither transformers' question whether positions have as many rows nor the memory of heads asks for a second trace."""
    hf = pytest.importorskip("transformers")
    config = hf.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    net, ids = hf.LlamaForCausalLM(config), torch.arange(10).view(1, 10)
    one = {"input_ids": ids, "labels": ids}
    model = megafx.parallelize(copy.deepcopy(net), megafx.Config(tensor_model_parallel_size=1), example_inputs=one)
    for rows in (1, 3):
        call = {"input_ids": ids.expand(rows, -1), "labels": ids.expand(rows, -1)}
        wanted = net(**call)
        got = model(**call)
        torch.testing.assert_close((got.loss, got.logits), (wanted.loss, wanted.logits))
    assert len(traces) == 1 and model.megafx.captures == 1


@pytest.mark.parametrize("rows", [(3, 1), (1, 3)])
def test_a_copy_that_one_row_does_not_need_is_written(rows: tuple[int, int]) -> None:
    """Of one row the turned tensor is contiguous, and a write into it is one into the operand."""

    def head(h: torch.Tensor) -> torch.Tensor:
        turned = h.transpose(0, 1).contiguous()
        turned.mul_(2)
        return h + turned.transpose(0, 1)

    net = Model(head)
    model = megafx.parallelize(copy.deepcopy(net), megafx.Config(tensor_model_parallel_size=1))
    for count in rows:
        x = torch.randn(count, 5, 4)
        torch.testing.assert_close(model(x), net(x))


def test_copies_of_memory_ask_for_no_trace(traces: list[Any]) -> None:
    for name, count in (("contiguous", 1), ("asked", 2)):
        traces.clear()
        capture_call(Model(SAME[name]), (torch.randn(1, 5, 4),))
        assert len(traces) == count


def test_the_first_call_decides_for_its_size_alone() -> None:
    """A graph for one row is none for two, and the note says so."""
    model = Model(BRANCHES["rows"])
    program = capture_call(model, (torch.randn(1, 5, 4),))
    assert program.call is not None
    assert program.call.mismatch((torch.randn(1, 7, 4),)) is None
    assert "is 2, captured as 1" in str(program.call.mismatch((torch.randn(2, 7, 4),)))
    assert any("size 1 of batch" in note.message for note in program.notes)


def test_data_parallel_ranks_have_parts_of_the_batch() -> None:
    """One row on each of two ranks is a batch of two to the model."""
    program = capture_call(Model(BRANCHES["rows"]), (torch.randn(1, 5, 4),), data_ranks=2)
    assert program.call is not None and "batch" in program.sizes.symbols
    assert program.call.mismatch((torch.randn(1, 5, 4),)) is None
    assert program.call.undecided((torch.randn(1, 1, 4),)) == {}
