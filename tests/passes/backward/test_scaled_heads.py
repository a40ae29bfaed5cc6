"""Covers: passes/backward/scaled_products.py, of heads that are fused with their loss: by option, the same on any number of
ranks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fp8_models import EVERY, Model, batch
from local_programs import local_program
from torch import Tensor, nn

import megafx
import megafx.kernels.loss.vocab_linear_cross_entropy
from megafx.analysis.communication import collective_nodes
from megafx.checks.sabotage import changed_collective, with_another, without, without_transition
from megafx.checks.simulate import run_logical
from megafx.config import Config
from megafx.errors import PlacementError
from megafx.ir.contracts import is_transition
from megafx.ir.program import FQN, PLACEMENT, Program
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.scaled_products import scaled_products
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.types import I, Layout, S
from megafx.testing import make_context

aten, mfx = torch.ops.aten, torch.ops.megafx
T, TOKENS, CLASSES = 2, 6, 13
HEAD = {**EVERY, "fp8_head": True}


def fused(t: int, **options: Any) -> tuple[Program, Any, dict[str, Any], int]:
    """A head whose tokens are gathered and whose classes are cut: the joint graph after the pass, its context, whole values,
    and the number of products that changed."""
    torch.manual_seed(0)
    here, cut, one = (S(0, Layout.contiguous(n, t)) for n in (TOKENS, CLASSES, t))
    local = {
        "x": torch.randn(here.cut.local_size(t), 8).double(),
        "head.weight": nn.Parameter(torch.randn(cut.cut.local_size(t), 8).double()),
        "layers.0.up.weight": nn.Parameter(torch.randn(4, 8).double()),
        "layers.1.up.weight": nn.Parameter(torch.randn(4, 8).double()),
        "y": torch.randint(CLASSES, (TOKENS,)),
    }
    place = (list(cut.flat_layout), t, "tp")

    def function(x: Tensor, w: Tensor, up: Tensor, other: Tensor, y: Tensor) -> tuple[Tensor]:
        x = mfx.transition(x, "S0", "R", list(here.flat_layout), [], "tp", t)
        stats = mfx.linear_ce_stats(x.detach(), w.detach(), None, y, *place)
        everyone = mfx.transition(stats.unsqueeze(0), "S0", "I", list(one.flat_layout), [], "tp", t)
        return (mfx.linear_ce_loss(x, w, None, y, everyone, -100, 0.0, False, *place),)

    program = local_program(function, local)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta[FQN] = "head"
        if node.target is mfx.linear_ce_loss.default:
            node.meta[PLACEMENT] = I
    program.placeholders()[0].meta[PLACEMENT] = here
    differentiate(program, [0, 1], [0])
    context: Any = make_context(t, Config(**{**HEAD, **options}))
    context.plan = SimpleNamespace(axis="tp", params={"head.weight": cut, **dict.fromkeys([*local][2:4], I)}, t=t)
    count = scaled_products(program, context)
    generator = torch.Generator().manual_seed(3)
    whole: dict[str, Any] = {"x": torch.randn(TOKENS, 8, generator=generator).double(), "y": local["y"]}
    whole["head.weight"] = torch.randn(CLASSES, 8, generator=generator).double()
    whole |= {name: torch.zeros(4, 8).double() for name in [*local][2:4]}
    whole["0"] = torch.rand(TOKENS, generator=generator).double()
    return program, context, whole, count


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_types_and_numbers_notice_what_is_not_reduced(recipe: str) -> None:
    program, context, whole, count = fused(T, fp8_recipe=recipe)
    assert count == 3
    placements = context.plan.params | {"x": S(0, Layout.contiguous(TOKENS, T))}
    wanted = run_logical(program, whole, placements, T)

    def wrong() -> bool:
        try:
            found = run_logical(program, whole, placements, T)
        except PlacementError:
            return True
        pairs = [(found.outputs["0"], wanted.outputs["0"])]
        pairs += [(g, wanted.gradients[n]) for n, g in found.gradients.items() if g is not None]
        return not all(torch.allclose(a, b, rtol=1e-10, atol=1e-10) for a, b in pairs)

    assert not wrong()
    moves = [n for n in program.graph.nodes if is_transition(n) and n.args[1] == "M"]
    # of x and the weight; rowwise, a token's is its rank's, and features of both are of all ranks
    assert len(moves) == 2
    for move in moves:
        with without_transition(program.graph, move):
            assert wrong(), move
    expand_transitions(program, context)
    starts: list[Any] = collective_nodes(program.graph)
    tokens = [n.args[0].meta["val"] for n in starts if "gather" in str(n.target)]
    assert torch.uint8 in {v.dtype for v in tokens if v.ndim == 2}
    assert not [v for v in tokens if v.ndim == 2 and v.shape[1] == 8 and v.is_floating_point()]  # bytes travel alone
    for start in starts:
        for change in (without, with_another):
            with changed_collective(program.graph, start, T, change):
                assert wrong(), (start, change)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fp8_head": False}, "left in float64: it is the head (fp8_head=False)"),
        ({"fp8_wgrad": False}, "left in float64: its loss makes both gradients (fp8_wgrad=False)"),
    ],
)
def test_it_is_left_by_option(options: dict[str, Any], why: str) -> None:
    program, _, _, count = fused(T, **options)
    assert count == 0 and [n.message for n in program.notes if n.topic == "fp8"] == [why]


# -- whole models


@pytest.mark.parametrize(
    ("t", "options"),
    [
        (2, {"sequence_parallel": True}),
        (2, {"cross_entropy_fusion": False, "fp8_wgrad": False}),
        (3, {"sequence_parallel": True, "fp8_recipe": "rowwise", "fp8": "e4m3"}),
        (4, {"sequence_parallel": False, "fp8_recipe": "rowwise"}),
    ],
    ids=str,
)
def test_it_is_the_same_on_any_number_of_ranks(t: int, options: dict[str, Any]) -> None:
    """Uneven: 7 tokens a row, 43 classes; with a bias, fused with the loss and not."""
    torch.manual_seed(0)
    model = Model(50, 1)
    model.head = nn.Linear(32, 43)
    config = Config(**{**HEAD, "tensor_model_parallel_size": t, "hardware": "h100-nvlink", **options})
    verdict = megafx.verify(model.double(), config, example_inputs=batch(7), tolerance=1e-10)
    assert verdict.reference == "megafx at t=1" and verdict, str(verdict)


@pytest.mark.parametrize("fused", [True, False])
def test_the_head_changes_by_the_option_and_is_named(fused: bool) -> None:
    losses, gradients = [], []
    for head in (False, True):
        torch.manual_seed(0)
        config = Config(fp8="hybrid", fp8_head=head, cross_entropy_fusion=fused, hardware="h100-nvlink")
        model = megafx.parallelize(Model(layers=2), config, example_inputs=batch(8))  # both layers in bf16
        loss = model(*batch(8))
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(model.head.weight.grad)
        report = re.sub(r"\s+", " ", str(megafx.explain(model)))
        assert ("forward, dgrad, wgrad in FP8: e4m3, gradients e5m2" in report) == head, report
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.05 * losses[0]
    off = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
    assert 1e-3 < off < 0.2


def test_the_plan_prices_it_and_less_is_kept() -> None:
    times, saved = {}, {}
    for head in (False, True):
        with torch.device("meta"):
            model, (ids, labels) = Model(8192, 1, width=2048).bfloat16(), (torch.zeros(2, 2048, dtype=torch.long),) * 2
            model.head = nn.Linear(2048, 32000, bias=False).bfloat16()
        config = Config(hardware="h100-nvlink", fp8="hybrid", fp8_head=head)
        times[head] = megafx.explain(megafx.plan(model, config, example_inputs=(ids, labels))).step.total_us
        torch.manual_seed(0)
        config = Config(hardware="h100-nvlink", fp8="hybrid", fp8_head=head)
        small = megafx.parallelize(Model(48, 1).bfloat16(), config, example_inputs=batch(64))
        small(*batch(64)).backward()
        saved[head] = megafx.explain(small).memory("adamw").saved
    assert 0.5 < times[True] / times[False] < 0.9, times
    assert saved[True] <= saved[False]


class Two(Model):
    """One head for two losses, the second of another state, and logits that are returned."""

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        logits = [self.head(state) for state in states[-2:]]
        losses = [nn.functional.cross_entropy(y.flatten(0, 1), labels.flatten()) for y in logits]
        return losses[0] + 0.3 * losses[1], logits[1]


@pytest.mark.parametrize("t", [1, 2])
def test_two_losses_may_have_one_head_and_logits_are_those_of_the_weight(t: int) -> None:
    torch.manual_seed(0)
    model = Two(50, 2).double()
    model.head = nn.Linear(32, 43).double()
    config = Config(**HEAD, tensor_model_parallel_size=t, hardware="h100-nvlink")
    verdict = megafx.verify(model, config, example_inputs=batch(7), loss_fn=lambda found: found[0], tolerance=1e-10)
    assert verdict, str(verdict)
    wanted = model(*batch(7))[0]
    alone = megafx.parallelize(model, config.of_one_rank(), example_inputs=batch(7))
    loss, logits = alone(*batch(7))
    loss.backward()
    assert 1e-6 < abs(float((loss - wanted).detach())) < 0.05 and logits.shape == (2, 7, 43)
    report = re.sub(r"\s+", " ", str(megafx.explain(alone)))
    assert "its weight is that of a head that is fused with its loss" in report, report
