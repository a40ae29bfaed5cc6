"""Covers: passes/backward/scaled_products.py: which products run in FP8, what they become, and that it is the same on any
number of ranks."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from advice import refused
from fp8_models import EVERY, Model, batch
from local_programs import local_program
from torch import Tensor, nn

import megafx
from megafx.analysis.communication import collective_nodes
from megafx.analysis.prices import seconds
from megafx.checks.sabotage import changed_collective, with_another, without, without_transition
from megafx.checks.simulate import run_logical
from megafx.config import Config
from megafx.errors import ConfigError, PlacementError
from megafx.ir.contracts import is_transition
from megafx.ir.dump import text
from megafx.ir.program import FQN, PLACEMENT, Program
from megafx.kernels.fp8 import scaled_mm
from megafx.kernels.fp8.quantize import FORMATS
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.scaled_products import scaled_products
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import I, Layout, Placement, R, S
from megafx.planner.cost import product_rate
from megafx.planner.hardware import FLOAT8, FP8_GAIN, Hardware
from megafx.testing import make_context

aten, mfx = torch.ops.aten, torch.ops.megafx
T = 2


def cut(dim: int, n: int, t: int = T) -> Placement:
    return S(dim, Layout.contiguous(n, t))


# -- one linear of one rank's graph


def linear(t: int, tokens: int = 6, **options: Any) -> tuple[Program, Any, dict[str, Any]]:
    """A column-parallel linear that gathers its tokens: the joint graph after the pass, its context, and whole values."""
    torch.manual_seed(0)
    here, weight = cut(0, tokens, t), cut(0, 4 * t, t)
    local = {
        "x": torch.randn(here.cut.local_size(t) if t > 1 else tokens, 8).double(),
        "layers.0.up.weight": nn.Parameter(torch.randn(4, 8).double()),
        "layers.1.up.weight": nn.Parameter(torch.randn(4, 8).double()),
    }

    def function(x: Tensor, w: Tensor, other: Tensor) -> tuple[Tensor]:
        if t > 1:
            x = mfx.transition(x, "S0", "R", list(here.flat_layout), [], "tp", t)
        return (torch.mm(x, w.t()),)

    program = local_program(function, local)
    for node in program.graph.nodes:
        if node.target is aten.mm.default:
            node.meta |= {FQN: "layers.0.up", PLACEMENT: cut(1, 4 * t, t) if t > 1 else I}
    program.placeholders()[0].meta[PLACEMENT] = here if t > 1 else I
    differentiate(program, [0, 1], [0])
    context: Any = make_context(t, Config(**{**EVERY, **options}))
    context.plan = SimpleNamespace(axis="tp", params={n: weight if t > 1 else I for n in local if n != "x"}, t=t)
    assert scaled_products(program, context) == (3 if options.get("fp8_wgrad", True) else 2)
    generator = torch.Generator().manual_seed(3)
    whole: dict[str, Any] = {"x": torch.randn(tokens, 8, generator=generator).double()}
    for name in ("layers.0.up.weight", "layers.1.up.weight"):
        whole[name] = torch.randn(4 * t, 8, generator=generator).double()
    whole["0"] = torch.randn(tokens, 4 * t, generator=generator).double()
    return program, context, whole


def test_golden() -> None:
    program, _, _ = linear(T)
    lines = [re.sub(r"\s*#.*", "", line) for line in text(program).splitlines()]
    found = "\n".join(line for line in lines if re.search(r"fp8|scaled|transition|return", line))
    assert found == GOLDEN


GOLDEN = """\
%4 = fp8_amax(%0, -1, 0, [1, 2, 3], 'tp')
%5 = transition(%4, M -> R)
%6 = fp8_quantize(%0, %5, -1, 'e4m3', False, True, False)
%9 = transition(%7, S0 -> R)
%10 = fp8_amax(%1, -1, -1, [], 'tp')
%11 = transition(%10, M -> R)
%12 = fp8_quantize(%1, %11, -1, 'e4m3', False, True, False)
%15 = scaled_mm(%9, %13, %8, %14, 'e4m3', 'e4m3', f64)
%16 = fp8_amax(%3, -1, -1, [], 'tp')
%17 = transition(%16, M -> R)
%18 = fp8_quantize(%3, %17, -1, 'e5m2', False, True, True)
%22 = fp8_transposed(%9)
%23 = scaled_mm(%20, %22, %21, %8, 'e5m2', 'e4m3', f64)
%24 = fp8_quantize(%1, %11, -1, 'e4m3', False, False, True)
%27 = scaled_mm(%19, %25, %21, %26, 'e5m2', 'e4m3', f64)
%28 = transition(%27, P -> S0)
return %15
return %28
return %23"""


def emulated(x: Tensor, format: str, dim: int | None) -> Tensor:
    """x rounded to FP8 with a scale for all, or for each row along `dim`, which is summed over."""
    top = torch.finfo(FORMATS[format]).max
    largest = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = largest / top
    return (x * (1 / scale)).to(FORMATS[format]).double() * scale


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
@pytest.mark.parametrize(("t", "tokens"), [(1, 6), (2, 6), (2, 7), (3, 7), (4, 5)])
def test_a_linear_is_its_emulation(t: int, tokens: int, fp8: str, recipe: str) -> None:
    program, context, whole = linear(t, tokens, fp8=fp8, fp8_recipe=recipe)
    x, w, dy = whole["x"], whole["layers.0.up.weight"], whole["0"]
    placements = context.plan.params | {"x": cut(0, tokens, t) if t > 1 else I}
    each, gradient = recipe == "rowwise", "e5m2" if fp8 == "hybrid" else "e4m3"

    def rounded(value: Tensor, format: str, dim: int) -> Tensor:
        return emulated(value, format, dim if each else None)

    y = rounded(x, "e4m3", 1) @ rounded(w, "e4m3", 1).t()
    dx = rounded(dy, gradient, 1) @ rounded(w, "e4m3", 0)
    dw = rounded(dy, gradient, 0).t() @ rounded(x, "e4m3", 0)
    for _ in range(2):
        found = run_logical(program, whole, placements, t)
        for value, wanted in (
            (found.outputs["0"], y),
            (found.gradients["x"], dx),
            (found.gradients["layers.0.up.weight"], dw),
        ):
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-10)
        if not collective_nodes(program.graph):
            expand_transitions(program, context)


def test_types_and_numbers_notice_a_largest_that_is_not_reduced() -> None:
    """And every other collective of the graph, of which tokens travel as bytes."""
    program, context, whole = linear(T)
    moves = [n for n in program.graph.nodes if is_transition(n) and n.args[1] == "M"]
    assert len(moves) == 3  # of x, of the weight, of the gradient
    placements = context.plan.params | {"x": cut(0, 6)}
    wanted = run_logical(program, whole, placements, T)

    def wrong() -> bool:
        try:
            found = run_logical(program, whole, placements, T)
        except PlacementError:
            return True
        pairs: list[Any] = [
            (found.outputs["0"], wanted.outputs["0"]),
            *((g, wanted.gradients[n]) for n, g in found.gradients.items()),
        ]
        return not all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in pairs)

    assert not wrong()
    for move in moves:
        with without_transition(program.graph, move):
            assert wrong(), move
    expand_transitions(program, context)
    starts: list[Any] = collective_nodes(program.graph)
    assert {n.args[0].meta["val"].dtype for n in starts if "gather" in str(n.target)} == {torch.uint8}
    for start in starts:
        for change in (without, with_another):
            with changed_collective(program.graph, start, T, change):
                assert wrong(), (start, change)


def test_gradients_of_weights_stay_as_they_are_by_option() -> None:
    program, _, _ = linear(T, fp8_wgrad=False)
    products = [n for n in program.graph.nodes if n.target is aten.mm.default]
    assert len(products) == 1 and products[0].args[0].target is aten.t.default
    gathers = [n for n in program.graph.nodes if is_transition(n) and n.args[1] == "S0"]
    assert [n.meta["val"].dtype for n in gathers] == [torch.float64]  # x is gathered once, for both


def left(function: Any, product: Placement = I, t: int = 1, **values: Tensor) -> list[str]:
    """What is said of a function of x and layers.0.up.weight, of which nothing is to be scaled."""
    program = local_program(function, {"x": torch.randn(6, 8), "layers.0.up.weight": nn.Parameter(torch.randn(4, 8))})
    for node in program.graph.nodes:
        if node.target is aten.mm.default:
            node.meta |= {FQN: "layers.0.up", PLACEMENT: product}
    differentiate(program, [0, 1], [0])
    context: Any = make_context(t, Config(**EVERY))
    context.plan = SimpleNamespace(axis="tp", params={"layers.0.up.weight": product}, t=t)
    before = str(program.graph)
    assert scaled_products(program, context) == 0 and str(program.graph) == before
    return [note.message for note in program.notes if note.topic == "fp8"]


def test_a_router_is_left() -> None:
    def route(x: Tensor, w: Tensor) -> tuple[Tensor]:
        return (torch.mm(x, w.t()).softmax(-1).topk(2).values,)

    assert left(route) == ["left in float32: its result decides (topk)"]


def test_a_linear_that_every_rank_computes_is_left() -> None:
    (said,) = left(lambda x, w: (torch.mm(x, w.t()),), R, T)
    assert said == (
        "left in float32: every rank computes all of it, so that its gradient is a sum over ranks yet to be made"
    )


def test_values_that_several_linears_read_are_cast_once() -> None:
    """And a bias is added to what is summed; products of three linears on one x find the gradients that are theirs."""
    names = ("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight")
    values: dict[str, Any] = {"x": torch.randn(6, 8).double()}
    values |= {name: nn.Parameter(torch.randn(4, 8).double()) for name in names}
    values["bias"] = nn.Parameter(torch.randn(4).double())

    def function(x: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return torch.addmm(bias, x, q.t()), torch.mm(x, k.t()), torch.mm(x, v.t())

    program = local_program(function, values)
    products = [n for n in program.graph.nodes if n.target in (aten.mm.default, aten.addmm.default)]
    for node, name in zip(products, names, strict=True):
        node.meta[FQN] = name.removesuffix(".weight")
    differentiate(program, [0, 1, 2, 3, 4], [0, 1, 2])
    assert scaled_products(program, make_context(1, Config(**EVERY))) == 9
    targets = [n.target for n in program.graph.nodes]
    # x and three gradients once each; a weight in forward and, from the same largest magnitude, in backward
    assert (targets.count(mfx.fp8_quantize.default), targets.count(mfx.fp8_amax.default)) == (1 + 3 + 6, 1 + 3 + 3)
    tangents = {str(i): torch.randn(6, 4).double() for i in range(3)}
    found = run_logical(program, {**values, **tangents}, {}, 1)
    x, dx = emulated(values["x"], "e4m3", None), 0.0
    for i, name in enumerate(names):
        w, dy = emulated(values[name].detach(), "e4m3", None), emulated(tangents[str(i)], "e5m2", None)
        y = x @ w.t() + (values["bias"].detach() if i == 0 else 0)
        torch.testing.assert_close(found.outputs[str(i)], y, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found.gradients[name], dy.t() @ x, rtol=1e-10, atol=1e-10)
        dx = dx + dy @ w
    torch.testing.assert_close(found.gradients["x"], dx, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found.gradients["bias"], tangents["0"].sum(0), rtol=1e-10, atol=1e-10)


# -- whole models


@pytest.mark.parametrize(
    ("t", "options"),
    [
        (2, {"sequence_parallel": True, "fp8_recipe": "rowwise"}),
        (3, {"sequence_parallel": True, "p": 0.1, "fp8_wgrad": False}),
        (3, {"sequence_parallel": False, "fp8": "e4m3", "fp8_recipe": "rowwise"}),
        (4, {"sequence_parallel": True, "p": 0.1}),
    ],
    ids=str,
)
def test_it_is_the_same_on_any_number_of_ranks(t: int, options: dict[str, Any]) -> None:
    """Uneven: 7 tokens a row, 50 columns and 4 heads; and the same bits of dropout."""
    torch.manual_seed(0)
    model = Model(50, 1, options.pop("p", 0.0)).double()
    config = Config(**{**EVERY, "tensor_model_parallel_size": t, "hardware": "h100-nvlink", **options})
    verdict = megafx.verify(model, config, example_inputs=batch(7), tolerance=1e-10)
    assert verdict.reference == "megafx at t=1" and verdict, str(verdict)


def test_the_report_says_what_runs_in_fp8_and_why_the_rest_does_not() -> None:
    parallel = megafx.parallelize(Model(), Config(fp8="hybrid", hardware="h100-nvlink"), example_inputs=batch(8))
    parallel(*batch(8)).backward()
    report = re.sub(r"\s+", " ", str(megafx.explain(parallel)))
    for wanted in (
        "forward, dgrad, wgrad in FP8: e4m3, gradients e5m2; one scale a matrix",
        "left in float32: it is in the first of the layers (num_layers_at_start_in_bf16=1)",
        "left in float32: it is in the last of the layers (num_layers_at_end_in_bf16=1)",
        "left in float32: it is the head (fp8_head=False)",
    ):
        assert wanted in report, report


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_no_more_is_kept_for_backward_than_without(recipe: str) -> None:
    saved = []
    for options in ({}, {**EVERY, "fp8_recipe": recipe}):
        torch.manual_seed(0)
        config = Config(hardware="h100-nvlink", **options)
        model = megafx.parallelize(Model(256, 2).bfloat16(), config, example_inputs=batch(64))
        model(*batch(64)).backward()
        saved.append(megafx.explain(model).memory("adamw").saved)
    assert saved[1] <= saved[0]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_backward_reads_as_it_is_is_not_kept_in_fp8_too(recipe: str) -> None:
    """Attention's output, which its gradient reads: it is cast again for the gradient of the weight behind it."""
    config = Config(hardware="h100-nvlink", fp8_recipe=recipe, **EVERY)
    model = megafx.parallelize(Model(64, 2).bfloat16(), config, example_inputs=batch(64))
    model(*batch(64)).backward()
    saved = [s for s in model.megafx.settled.last.executable().parts.saved if s.kind == "value"]
    casts = [s.fqn for s in saved if s.itemsize == 1]
    assert casts and not [fqn for fqn in casts if fqn.endswith(".o")], casts


def test_products_are_priced_by_the_rate_of_fp8() -> None:
    program, _, _ = linear(1)
    hardware = replace(Hardware.load("h100-nvlink"), memory_bytes_per_second=1e30, kernel_seconds=0.0)
    node = next(n for n in program.graph.nodes if n.target is mfx.scaled_mm.default)
    flops = 2.0 * 6 * 4 * 8
    assert seconds(program, node, hardware, 1) == pytest.approx(flops / product_rate(6, 4, 8, FLOAT8, hardware))
    assert product_rate(6, 4, 8, FLOAT8, hardware) == pytest.approx(
        FP8_GAIN * product_rate(6, 4, 8, "bfloat16", hardware)
    )


@pytest.mark.slow
def test_a_plan_prices_the_linears_that_will_run_in_fp8() -> None:
    """By layer and option as the pass leaves them; the schedule of the plan and the search read the same."""
    times, linears = {}, {}
    for name, options in (
        ("bf16", {}),
        ("fp8", EVERY),
        ("no wgrad", {**EVERY, "fp8_wgrad": False}),
        ("ends", {"fp8": "e4m3"}),
    ):
        with torch.device("meta"):
            model, (ids, labels) = Model(8192, 3, width=2048).bfloat16(), (torch.zeros(2, 2048, dtype=torch.long),) * 2
        plan = megafx.plan(model, Config(hardware="h100-nvlink", **options), example_inputs=(ids, labels))
        report = megafx.explain(plan)
        times[name] = report.step.total_us
        ops = [op for op in report.costed.nodes if op.name.startswith("linear")]
        linears[name] = [op.us + op.back_us + op.weight_us for op in ops]
    assert times["fp8"] < times["no wgrad"] < times["bf16"] and times["fp8"] < times["ends"] < times["bf16"]
    halves = [a / b for a, b in zip(linears["fp8"], linears["bf16"], strict=True)]
    assert all(0.4 < x < 0.8 for x in halves[:-1]) and halves[-1] == 1.0, halves  # the head is in no layer; with casts


def test_a_gpu_without_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with refused("fp8 on <name>: its products need <needed>"):
        scaled_mm._check_device(torch.device("cuda", 7))
    program, context, _ = linear(1)
    context.config = Config(fp8=None)
    assert scaled_products(program, context) == 0


def test_options() -> None:
    with refused("fp8_recipe='delayed' takes scales from earlier steps, and saturates where values grow"):
        Config(fp8="hybrid").replace(fp8_recipe="delayed")
    assert Config(fp8="hybrid", fp8_recipe="tensorwise").fp8_recipe == "tensorwise"
    with pytest.raises(ConfigError, match="fp8 must be 'e4m3' or 'hybrid'"):
        Config().replace(fp8="e5m2")
    program, context, _ = linear(1)
    context.config = Config()
    before = str(program.graph)
    assert scaled_products(program, context) == 0 and str(program.graph) == before
