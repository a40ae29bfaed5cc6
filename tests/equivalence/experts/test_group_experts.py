"""Covers: passes/fuse/group_experts.py, analysis/joined_parameters.py: experts called one by one, as grouped products."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import index_dispatch as forms
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import megafx
from megafx.api import _compiled
from megafx.example_call import ExampleCall
from megafx.ir.nodes import op_name
from megafx.planner.hardware import Hardware

ops = torch.ops.megafx


class Gated(nn.Module):
    def __init__(self, hidden: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=bias), nn.Linear(hidden, ffn, bias=bias)
        self.down = nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    def __init__(self, hidden: int, ffn: int, bias: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, ffn, bias=bias), nn.Linear(ffn, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Mixture(nn.Module):
    """put: how an expert's result is added."""

    def __init__(self, kind: type[nn.Module], bias: bool, put: str, experts: int = 4, ffn: int = 12) -> None:
        super().__init__()
        self.put, self.number = put, experts
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleList(kind(8, ffn, bias) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows_of_tokens = x.view(-1, 8)
        weights, chosen = self.router(rows_of_tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(rows_of_tokens)
        mask = F.one_hot(chosen, self.number).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            which, rows = torch.where(mask[e])
            of_expert = (
                rows_of_tokens[None, rows].reshape(-1, 8) if self.put == "hugging_face" else rows_of_tokens[rows]
            )
            y = expert(of_expert) * weights[rows, which, None]
            if self.put in ("index_add", "hugging_face"):
                out.index_add_(0, rows, y)
            elif self.put == "functional":
                out = out.index_add(0, rows, y)
            else:
                out[rows] += y
        return out.view_as(x)


class Net(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.table, self.norm, self.moe = nn.Embedding(11, 8), nn.LayerNorm(8), Mixture(*args, **kwargs)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.moe(self.norm(x))
        return F.cross_entropy((x @ self.table.weight.t()).flatten(0, 1), labels.flatten())


def calls() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))


def grouped(model: nn.Module, **config: Any) -> tuple[int, list[str]]:
    """Grouped products of one rank's forward and backward, and what the report says of experts."""
    config = {"moe_grouped_gemm": True} | config
    model = megafx.parallelize(model, megafx.Config(**config), example_inputs=calls())
    model(*calls())
    graph = model.megafx.settled.last.program.graph
    targets = (ops.grouped_mm.default, ops.grouped_mm_weight.default)
    count = sum(len(graph.find_nodes(op="call_function", target=t)) for t in targets)
    return count, [n.message for n in model.megafx.notes if "experts" in n.message]


@pytest.mark.parametrize(
    "kind,bias,put,t",
    [
        (Gated, False, "index_add", 2),
        (Gated, True, "functional", 3),
        (Plain, True, "index_add", 4),
        (Plain, False, "functional", 2),
        (Gated, True, "assigned", 2),
        (Gated, True, "hugging_face", 2),  # [1, rows, ..], with biases in what gate and up are merged to
    ],
)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_ranks_compute_what_eager_does(
    kind: type[nn.Module], bias: bool, put: str, t: int, sequence_parallel: bool
) -> None:
    torch.manual_seed(0)
    model = Net(kind, bias, put).double()
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel, moe_grouped_gemm=True)
    verdict = megafx.verify(model, config, example_inputs=calls(), tolerance=1e-10)
    assert verdict, verdict
    products, notes = grouped(model)
    if put == "assigned":  # a token that an expert gets twice would count once; a one-hot mask is not seen through
        assert products == 0 and "are not grouped: their results are not all put back by index_add" in notes[0], notes
        return
    assert products == 2 * 3, notes  # forward, and the gradients of rows and weights
    assert notes == ["4 experts, of which moe.experts.0 is the first, grouped: their products are one"]


def test_an_expert_without_tokens_has_gradients_of_zero() -> None:
    torch.manual_seed(0)
    model = Net(Gated, True, "index_add").double()
    with torch.no_grad():
        model.moe.router.weight.copy_(torch.eye(4, 8) * torch.tensor([5.0, 4.0, -5.0, 3.0])[:, None])
        model.norm.bias.fill_(2.0)
        model.norm.weight.fill_(0.01)
    config = megafx.Config(tensor_model_parallel_size=2, moe_grouped_gemm=True)
    assert megafx.verify(model, config, example_inputs=calls(), tolerance=1e-10)
    model = megafx.parallelize(model, megafx.Config(moe_grouped_gemm=True), example_inputs=calls())
    model(*calls()).backward()
    assert not model.moe.experts[2].gate.weight.grad.any() and model.moe.experts[0].gate.weight.grad.any()


def test_knob_and_what_is_left_alone() -> None:
    assert grouped(Net(Gated, False, "index_add", experts=2).double(), moe_grouped_gemm=False) == (0, [])
    frozen = Net(Gated, False, "index_add", experts=2).double()
    frozen.moe.experts[1].down.weight.requires_grad_(False)
    products, notes = grouped(frozen)
    assert products == 0 and any("moe.experts.1.down.weight is frozen" in n for n in notes), notes
    tied = Net(Plain, False, "index_add", experts=2).double()
    tied.moe.experts[1].up.weight = tied.moe.experts[0].up.weight
    products, notes = grouped(tied)
    assert products == 0 and "is tied or used elsewhere too" in notes[0], notes
    other = Net(Plain, False, "index_add", experts=2).double()
    other.moe.experts[1].up, other.moe.experts[1].down = nn.Linear(8, 14).double(), nn.Linear(14, 8).double()
    products, notes = grouped(other)
    assert products == 0 and not any("are one" in n for n in notes), notes


def test_weights_and_gradients_lie_in_one_memory() -> None:
    torch.manual_seed(0)
    model = megafx.parallelize(
        Net(Gated, False, "index_add").double(), megafx.Config(moe_grouped_gemm=True), example_inputs=calls()
    )
    for _ in range(2):
        model(*calls()).backward()
    experts = model.moe.experts
    for get in (lambda p: p, lambda p: p.grad):
        downs = [get(e.down.weight) for e in experts]
        starts = [x.data_ptr() - downs[0].data_ptr() for x in downs]
        assert starts == [i * downs[0].numel() * 8 for i in range(4)]
        halves = itertools.chain.from_iterable((get(e.gate.weight), get(e.up.weight)) for e in experts)
        assert len({x.untyped_storage().data_ptr() for x in halves}) == 1


EACH = [{"tp": 1}, {"tp": 3}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("number,name", [*enumerate(forms.FORMS)])
def test_tokens_by_index_in_every_form(number: int, name: str) -> None:
    """Places in one mask of all experts, of which one gets no token; the type checker follows them on each axis."""
    model = forms.Model(forms.FORMS[name], bias=True).double()
    forms.turn_off(model, [1])
    config, mesh = megafx.Config(moe_grouped_gemm=True), EACH[number % len(EACH)]
    with megafx.debug(check=1):
        verdict = megafx.verify(model, config, example_inputs=(forms.tokens(4, 5),), mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)
    model = megafx.parallelize(model, config, example_inputs=(forms.tokens(4, 5),))
    nodes = [op_name(n) for n in model.megafx.settled.last.program.graph.nodes]
    if name == "boolean_of_own":  # each expert's rows in zeros of their own, which are then added
        assert nodes.count("grouped_mm") == 0 and nodes.count("rows") == 4
    else:
        assert nodes.count("grouped_mm") == 6 and nodes.count("rows") == 1, "gate, up and down, forward and backward"


def test_rows_of_all_experts_are_priced_as_the_choices_of_all_tokens() -> None:
    model = forms.Model(forms.where_add_in_place).double()
    _, made = forms.made_for(model, 2, seq_length=40, micro_batch_size=2, moe_grouped_gemm=True)
    (node,) = made.program.graph.find_nodes(op="call_function", target=ops.rows.default)
    sizes = made.program.sizes
    rows = sizes.shape(node.meta["val"])[0]
    assert sizes.from_data(rows) and sizes.workload(rows) == 2 * 40 * forms.TOP


def test_a_token_that_an_expert_may_get_twice_stays_in_a_sum_that_counts_it_once() -> None:
    """`out[rows] += y` where choices are no topk, so that both may be the same expert."""

    class Twice(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            rows_of_tokens = x.view(-1, 8)
            chosen = torch.stack([self.router(rows_of_tokens).argmax(-1)] * 2, -1)
            out = torch.zeros_like(rows_of_tokens)
            for e, expert in enumerate(self.experts):
                rows, _ = torch.where(chosen == e)
                out[rows] += expert(rows_of_tokens[rows])
            return out.view_as(x)

    torch.manual_seed(0)
    model = Net(Gated, False, "index_add").double()
    model.moe = Twice(Gated, False, "index_add").double()
    assert megafx.verify(model, megafx.Config(moe_grouped_gemm=True), example_inputs=calls(), tolerance=1e-10)
    assert grouped(model)[0] == 0


class Large(nn.Module):
    """That of benchmarks/grouped_experts.py."""

    def __init__(self, experts: int, ffn: int) -> None:
        super().__init__()
        self.router = nn.Linear(2048, experts, bias=False)
        self.experts = nn.ModuleList(Gated(2048, ffn, False) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 2048)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            which, rows = torch.where(mask[e])
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, which, None])
        return x + out.view_as(x)


@pytest.mark.parametrize(
    "experts,ffn,hardware,pays",
    [
        (8, 8192, "h100-nvlink", True),
        (32, 2048, "h100-nvlink", True),
        (4, 8192, "h100-nvlink", False),
        (4, 8192, "slow host", True),  # which launches less, and waits once
        (8, 8192, "cpu-gloo", False),
    ],
)
def test_the_price_decides(experts: int, ffn: int, hardware: str, pays: bool, tmp_path: Path) -> None:
    """As measured (RESULTS.md): 24.5 ms and 54.8 one by one of 32 experts, 8.27 and 16.5 of 8 large ones."""
    if hardware == "slow host":  # that of the profile's own run
        slow = replace(Hardware.load("h100-nvlink"), launch_seconds=4.8e-5)
        hardware = str(tmp_path / "slow.yaml")
        Path(hardware).write_text(yaml.safe_dump(asdict(slow)))
    with torch.device("meta"):
        model = Large(experts, ffn).to(torch.bfloat16)
        x = torch.empty(2, 4096, 2048, dtype=torch.bfloat16)
    config = megafx.Config(hardware=hardware, tensor_model_parallel_size=1)
    program = _compiled(ExampleCall.of(model, config, ((x,), {}), None, runs=False)).program
    count = len(program.graph.find_nodes(op="call_function", target=ops.grouped_mm.default))
    (note,) = [n.message for n in program.notes if "modelled at" in n.message]
    assert count == (3 if pays else 0), note  # forward, and of the last's rows: the model's input wants no gradient
    assert (" grouped: their products are one (modelled at" in note) == pays, note


def test_products_in_fp8_stay_single() -> None:
    with torch.device("meta"):
        model = Large(8, 8192).to(torch.bfloat16)
        x = torch.empty(2, 4096, 2048, dtype=torch.bfloat16)
    config = megafx.Config(hardware="h100-nvlink", tensor_model_parallel_size=1, fp8="hybrid")
    program = _compiled(ExampleCall.of(model, config, ((x,), {}), None, runs=False)).program
    assert any("not grouped: single products run in FP8" in n.message for n in program.notes)
    assert not program.graph.find_nodes(op="call_function", target=ops.grouped_mm.default)
