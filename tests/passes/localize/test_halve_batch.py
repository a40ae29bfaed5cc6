"""Covers: passes/plan/choose_halves.py, passes/localize/halve_batch.py, analysis/batch_rows.py, draws of some rows."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import Case, assert_equal
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.analysis.communication import is_product, is_start, is_wait
from megafx.compiler.pipeline import Compiled
from megafx.config import Config
from megafx.ir import nodes
from megafx.ir.nodes import in_backward
from megafx.ir.program import HALVED, ROWS, VAL, Program
from megafx.passes.localize.halve_batch import halve_batch
from megafx.testing import assert_same, expect, graph, make_planner, run_pass, transition

aten = torch.ops.aten
SLOW = pytest.mark.slow


def halved(before: Program, wanted: bool | str = True) -> Program:
    """Calls of `before` run on halves, but the last one."""
    value = next(n for n in before.placeholders() if n.name == "x").meta[VAL]
    before.sizes.symbols["batch"] = value.shape[0].node.expr
    nodes = [n for n in before.graph.nodes if n.op != "output"]
    for node in nodes:
        if node.op == "call_function" and node is not nodes[-1]:
            node.meta[HALVED] = True
        if isinstance(node.meta[VAL], torch.Tensor) and str(node.meta[VAL].shape[0]) == str(value.shape[0]):
            node.meta[ROWS] = 0
    return run_pass(halve_batch, before, make_planner(2, Config(tp_batch_overlap=wanted)))


def block() -> Program:
    return graph(
        lambda x, w, v: aten.relu(transition(aten.linear(aten.linear(transition(x, "R"), w), v), "I", src="P")),
        local=True, out="I@tp",
        x="f64[b h=5] I@tp", w="param f64[n=6 h=5] S0@tp", v="param f64[h=5 n=6] S1@tp",
    )  # fmt: skip


def test_a_block_runs_on_two_halves():
    """The first one waits for its sum while the second one computes; a part of the batch is what the sizes say."""
    before = block()
    after = halved(before)
    expect(after, """\
        %0 = x                                  # f64[batch 5] I@tp
        %1 = w                                  # f64[6/2 5] S0@tp param
        %2 = v                                  # f64[5 6/2] S1@tp param
        %3 = sym_size.int(%0, 0)                # int batch
        %4 = operator.floordiv(%3, 2)           # int (batch//2)
        %5 = operator.mul(-1, %4)               # int -((batch//2))
        %6 = operator.add(%3, %5)               # int batch-((batch//2))
        %7 = split_with_sizes(%0, [%6, %4], 0)  # (f64[batch-((batch//2)) 5], f64[(batch//2) 5])
        %8 = operator.getitem(%7, 0)            # f64[batch-((batch//2)) 5] I@tp
        %9 = operator.getitem(%7, 1)            # f64[(batch//2) 5] I@tp
        %10 = transition(%8, I -> R)            # f64[batch-((batch//2)) 5] R@tp
        %11 = transition(%9, I -> R)            # f64[(batch//2) 5] R@tp
        %12 = linear(%10, %1)                   # f64[batch-((batch//2)) 3]
        %13 = linear(%12, %2)                   # f64[batch-((batch//2)) 5]
        %14 = transition(%13, P -> I)           # f64[batch-((batch//2)) 5] I@tp
        %15 = linear(%11, %1)                   # f64[(batch//2) 3]
        %16 = linear(%15, %2)                   # f64[(batch//2) 5]
        %17 = transition(%16, P -> I)           # f64[(batch//2) 5] I@tp
        %18 = cat([%14, %17], 0)                # f64[batch 5] I@tp
        %19 = relu(%18)                         # f64[batch 5] I@tp
        return %19
    """)  # fmt: skip
    assert_same(before, after, sizes=9)
    assert_same(before, after, sizes=2)


def test_without_marks_nothing_changes():
    before = block()
    after = run_pass(halve_batch, before, make_planner(2, Config(tp_batch_overlap=True)))
    assert len(after.graph.nodes) == len(before.graph.nodes)


def test_auto_is_by_price():
    """Sums of many rows take longer than the launch of a second one; those of few do not."""
    for rows, wanted in ((64, False), (2**24, True)):
        before = block()
        before.sizes.workload_of[before.placeholders()[0].meta[VAL].shape[0].node.expr] = rows
        after = halved(before, "auto")
        assert (len(after.graph.nodes) > len(before.graph.nodes)) == wanted, rows


# -- models


@functools.cache
def model(name: str, dropout: float) -> tuple[Case, Compiled]:
    """And its graph for one rank."""
    case = Case.of(name, dropout=dropout) if dropout else Case.of(name)
    return case, case.compile(1)


def runs(name: str, t: int, batches: tuple[int, ...], dropout: float = 0.2, **config: Any) -> Compiled:
    """On all ranks as one process computes."""
    case, one = model(name, dropout)
    compiled = case.compile(t, tp_batch_overlap=True, **config)
    (note,) = (n.message for n in compiled.program.notes if n.topic in ("halves", "types"))
    assert note.startswith("layers run on two halves of the batch; by the cost model ")
    for batch in batches:
        inputs = case.inputs(batch, 12)
        assert_equal(case.run(compiled, inputs), case.run(one, inputs))
    beside = beside_products(compiled)
    assert sum(beside) >= 2, beside
    return compiled


def beside_products(compiled: Compiled) -> list[bool]:
    """Of the collectives of forward: whether they run beside products."""
    order = list(compiled.program.graph.nodes)
    found = []
    for start in filter(is_start, order):
        wait = next((u for u in start.users if is_wait(u)), None)
        if wait is not None and not in_backward(start):
            found.append(any(is_product(n) for n in order[order.index(start) : order.index(wait)]))
    return found


@pytest.mark.parametrize(
    ("name", "t", "batches", "options"),
    [
        ("nanogpt", 2, (2, 3), {"sequence_parallel": False, "tp_comm_overlap": False}),
        ("nanogpt", 3, (3, 4), {"sequence_parallel": True, "tp_comm_overlap": True}),
        pytest.param("gpt2", 4, (2, 5), {"sequence_parallel": True}, marks=SLOW),
        pytest.param("gpt2", 2, (2, 5), {"sequence_parallel": False, "tp_comm_overlap": True}, marks=SLOW),
        pytest.param(
            "llama", 2, (3,), {"sequence_parallel": True, "tp_comm_overlap": True, "dropout": 0.0}, marks=SLOW
        ),
        pytest.param("bert", 3, (3,), {"sequence_parallel": True}, marks=SLOW),
        pytest.param("t5", 2, (3,), {"sequence_parallel": False}, marks=SLOW),
    ],
)
def test_models_are_exact(name, t, batches, options):
    """Loss and gradients, with the dropout of one process, for batches that halves divide and others. Some of the
    collectives of forward run beside products, which are those of the other half."""
    runs(name, t, batches, **options)


@pytest.mark.slow
def test_a_draw_that_is_told_other_rows_shows(monkeypatch):
    of_rows = nodes.Draw.of_rows
    monkeypatch.setattr(nodes.Draw, "of_rows", lambda self, first, rows: of_rows(self, 0, rows))
    with pytest.raises(AssertionError, match="is off by"):
        runs("nanogpt", 2, (3,), sequence_parallel=False)


class Mixing(nn.Module):
    """Two layers, between which each row sees the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.layers[0](x)
        x = x - x.mean(0, keepdim=True)
        return F.cross_entropy(self.head(x + self.layers[1](x)).flatten(0, 1), y.flatten())


def notes(module: nn.Module, *call: torch.Tensor) -> list[str]:
    config = megafx.Config(tensor_model_parallel_size=2, tp_batch_overlap=True, sequence_parallel=False)
    plan = megafx.plan(module, config, example_inputs=call)
    return [n for n in megafx.explain(plan).notes if n.startswith("halves")]


def test_an_op_that_mixes_rows_is_named():
    x, y = torch.randn(4, 6, 8).double(), torch.randint(0, 5, (4, 6))
    mixing = Mixing().double()
    config = megafx.Config(tensor_model_parallel_size=2, tp_batch_overlap=True, sequence_parallel=False)
    assert megafx.verify(mixing, config, example_inputs=(x, y))
    (note,) = notes(mixing, x, y)
    assert note.startswith(
        "halves: the batch is whole from aten.mean.dim on, which computes with several rows at a time"
    )
    assert "x.mean(0" in note


@pytest.mark.slow
def test_one_row_is_no_two_halves():
    """It has a graph of its own, and so have more rows."""
    x, y = torch.randn(1, 6, 8).double(), torch.randint(0, 5, (1, 6))
    assert notes(Mixing().double(), x, y) == ["halves: the batch is not cut into halves: it is one row"]
    config = megafx.Config(tensor_model_parallel_size=2, tp_batch_overlap=True, sequence_parallel=False)
    assert megafx.verify(Mixing().double(), config, example_inputs=(x, y))
    case, _ = model("nanogpt", 0.2)
    for rows, wanted in ((1, [1]), (2, [2, 3])):
        case.program.sizes.of_call[case.program.sizes.symbols["batch"]] = rows
        call = case.compile(2, tp_batch_overlap=True).program.call
        assert [n for n in (1, 2, 3) if call.mismatch((), case.inputs(n, 12)) is None] == wanted
