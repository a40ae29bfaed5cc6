"""Covers: analysis/prices.py, analysis/costed_graph.py: seconds of grouped products, and of casts to FP8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sorted_mixtures import EXPERTS, FFN, HIDDEN, TOP, Model, a_call, as_transformers

import megafx
from megafx.analysis.prices import seconds
from megafx.api import _compiled
from megafx.example_call import ExampleCall
from megafx.planner.cost import grouped_seconds, memory_seconds, product_seconds
from megafx.planner.hardware import FLOAT8, Hardware

H100 = Hardware.load("h100-nvlink")
ROWS = 4 * 5 * TOP // EXPERTS  # an expert's equal share


def compiled(t: int, **options: Any) -> Any:
    options |= {"tensor_model_parallel_size": t, "hardware": "h100-nvlink"}
    return _compiled(
        ExampleCall.of(
            Model(as_transformers).to(torch.bfloat16), megafx.Config(**options), (bf16(), {}), None, runs=False
        )
    )


def bf16() -> tuple[torch.Tensor, ...]:
    return tuple(x.to(torch.bfloat16) for x in a_call())


def test_gradients_of_stacked_weights_are_products_and_not_copies() -> None:
    """In the joint graph: of each stack forward, and backward that of rows and that of weights."""
    made = compiled(1)
    found = []
    for name in ("grouped_mm", "grouped_mm_weight"):
        nodes = made.program.graph.find_nodes(op="call_function", target=getattr(torch.ops.megafx, name).default)
        found += [seconds(made.program, node, H100, 1) for node in nodes]
    shapes = [(HIDDEN, 2 * FFN), (FFN, HIDDEN)]
    want = [grouped_seconds(EXPERTS, ROWS, n, k, "bfloat16", 2, H100) for k, n in shapes]  # forward
    want += [
        grouped_seconds(EXPERTS, ROWS, k, n, "bfloat16", 2, H100) for k, n in shapes[1:]
    ]  # the input's rows want none
    want += [grouped_seconds(EXPERTS, k, n, ROWS, "bfloat16", 2, H100) for k, n in shapes]
    assert sorted(found) == pytest.approx(sorted(want))


@pytest.mark.parametrize("t,override", [(1, ""), (2, ""), (2, "expert")])
def test_the_timeline_has_groups_of_a_rank(t: int, override: str) -> None:
    """A rank's part of each expert's ffn, or some of the experts: of 5 on two ranks at most 3."""
    options = {"overrides": {"layers.*.up": override, "layers.*.down": override}} if override else {}
    model = Model(as_transformers).to(torch.bfloat16)
    config = megafx.Config(tensor_model_parallel_size=t, hardware="h100-nvlink", **options)
    report = megafx.explain(megafx.plan(model, config, example_inputs=bf16()))
    found = [n.us for n in report.costed.nodes if n.label.startswith("grouped_")]
    ffn = -(-FFN // t)
    want = [
        grouped_seconds(EXPERTS, ROWS, 2 * ffn, HIDDEN, "bfloat16", 2, H100),
        grouped_seconds(EXPERTS, ROWS, HIDDEN, ffn, "bfloat16", 2, H100),
    ]
    if override:  # the op's price has its first products in the terms of the last
        want = [grouped_seconds(3, ROWS, HIDDEN, FFN + HIDDEN * 2 * FFN // HIDDEN, "bfloat16", 2, H100)]
    assert found == pytest.approx([round(1e6 * s, 3) for s in want])


class _Two(torch.nn.Module):
    """Layers with two linears of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.ModuleList(torch.nn.Linear(64, 96) for _ in "ab") for _ in range(2))
        self.back = torch.nn.ModuleList(torch.nn.Linear(96, 64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (a, b), back in zip(self.layers, self.back, strict=True):
            x = x + back(torch.sin(a(x)) * torch.cos(b(x)))
        return x.float().square().mean()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("wgrad", [True, False])
def test_casts_to_fp8_are_in_the_price_of_products(recipe: str, wgrad: bool) -> None:
    """By hand: bytes that each operand of a linear in bf16 takes, and one cast of the input that two linears share."""
    m, n, k = 4 * 32, 96, 64
    config = megafx.Config(
        tensor_model_parallel_size=1, hardware="h100-nvlink", fp8="hybrid", fp8_recipe=recipe, fp8_wgrad=wgrad,
        first_last_layers_bf16=False,
    )  # fmt: skip
    model = _Two().to(torch.bfloat16)
    plan = megafx.plan(model, config, example_inputs=(torch.zeros(4, 32, 64).bfloat16(),))
    first, second = [
        node for node in megafx.explain(plan).costed.nodes if node.value.endswith("96]") and node.has_weight
    ]
    x, w, dy = m * k, n * k, m * n
    read = 2 + 2 * (recipe == "rowwise")  # for the scales, and for the cast
    cast_x, cast_w, cast_dy, turn_x = (
        x * (read + 1),
        w * 5,
        dy * (read + 2),
        x * (read + 1 if recipe == "rowwise" else 2),
    )
    again = w * (read + 1)
    weight = (FLOAT8, 1) if wgrad else ("bfloat16", 2)
    products = [
        product_seconds(m, n, k, FLOAT8, 1, H100), product_seconds(m, k, n, FLOAT8, 1, H100),
        product_seconds(k, n, m, *weight, H100),
    ]  # fmt: skip
    for node, of_x, turned in ((first, cast_x, turn_x if wgrad else 0), (second, 0, 0)):
        casts = [memory_seconds(moved, H100) for moved in (of_x + cast_w, cast_dy + again, turned)]
        want = [round(1e6 * (product + cast), 3) for product, cast in zip(products, casts, strict=True)]
        assert [node.us, node.back_us, node.weight_us] == pytest.approx(want, abs=2e-3)
