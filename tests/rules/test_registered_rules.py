"""Covers: users' rules for operators with several results (`megafx.register_rule`), from the rule to the gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import megafx
from megafx.capture.export import capture_call
from megafx.checks.rules import check_rules
from megafx.compiler.pipeline import plan_only
from megafx.errors import PlanError
from megafx.placements.types import I
from megafx.planner.plan import Plan
from megafx.rules import grammar
from megafx.testing import make_context

SCAN = "nl[0]: b s! h, h -> b s! h; b h"
BACKWARD = "nl: b s! h, b h, b s! h, h, b s! h -> b s! h; h"

library = torch.library.Library("several", "DEF")
library.define("scan(Tensor x, Tensor decay) -> (Tensor, Tensor)")
library.define("scan_backward(Tensor dy, Tensor dlast, Tensor x, Tensor decay, Tensor y) -> (Tensor, Tensor)")


def scan(x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """x [b s h], decay [h] -> (all states [b s h], the last [b h]) of state = state * decay + x[:, i]."""
    states = [torch.zeros_like(x[:, 0])]
    for i in range(x.shape[1]):
        states.append(states[-1] * decay + x[:, i])
    return torch.stack(states[1:], 1), states[-1].clone()


def scan_backward(dy: Tensor, dlast: Tensor, x: Tensor, decay: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    grad, dx, ddecay = dlast, torch.empty_like(x), torch.zeros_like(decay)
    for i in reversed(range(x.shape[1])):
        grad = grad + dy[:, i]
        dx[:, i] = grad
        if i:
            ddecay = ddecay + (grad * y[:, i - 1]).sum(0)
        grad = grad * decay
    return dx, ddecay


def _gradients(ctx, dy, dlast):
    x, decay, y = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    dlast = torch.zeros_like(y[:, 0]) if dlast is None else dlast
    return torch.ops.several.scan_backward(dy, dlast, x, decay, y)


library.impl("scan", scan, "CompositeExplicitAutograd")
library.impl("scan_backward", scan_backward, "CompositeExplicitAutograd")
fake = torch.library.register_fake
fake("several::scan", lambda x, decay: (torch.empty_like(x), torch.empty_like(x[:, 0])), lib=library)
fake("several::scan_backward", lambda dy, dl, x, d, y: (torch.empty_like(x), torch.empty_like(d)), lib=library)
save = lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[0])  # one line
torch.library.register_autograd("several::scan", _gradients, setup_context=save, lib=library)


class Net(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(8, 26), nn.Linear(26, 8), nn.Linear(26, 8) if last else None
        self.decay = nn.Parameter(torch.rand(26) / 2)

    def forward(self, x: Tensor) -> Tensor:
        y, last = torch.ops.several.scan(self.up(x), self.decay)
        loss = (x + self.down(y)).square().mean()
        return loss if self.last is None else loss + self.last(last).square().mean()


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(grammar, "_registered", dict(grammar._registered))
    megafx.register_rule("several::scan", SCAN)
    megafx.register_rule("several::scan_backward", BACKWARD)


def config(t: int) -> megafx.Config:
    return megafx.Config(tensor_model_parallel_size=t, hardware="h100-nvlink")


def test_the_rules_are_right_and_a_wrong_one_is_found() -> None:
    key = "several.scan.default"
    assert check_rules({key: SCAN, "several.scan_backward.default": BACKWARD}).ok
    found = {finding.row for finding in check_rules({key: "nl[0]: b s h, h -> b s h; b h"}).of("wrong")}
    assert any("S1 R" in row for row in found), found


@pytest.mark.parametrize("last", [True, False], ids=["both", "one"])
@pytest.mark.parametrize("t", [2, 3])
def test_an_op_with_several_results_is_sharded(registered, t: int, last: bool) -> None:
    """26 channels: 3 ranks pad theirs."""
    torch.manual_seed(0)
    model, x = Net(last).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    plan = megafx.plan(model, config(t), example_inputs=(x,))
    assert plan.params["decay"].is_shard and plan.params["down.weight"].dim == 1
    assert "computed whole" not in str(megafx.explain(plan))
    verdict = megafx.verify(model, config(t), example_inputs=(x,), tolerance=1e-10)
    assert verdict and len(verdict.gradients) == (7 if last else 5), verdict


def test_a_saved_plan_is_taken_and_a_wrong_one_refused(registered, tmp_path) -> None:
    model, x = Net(True).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    program = capture_call(model, (x,))
    made = plan_only(program.copy(), make_context(2, config(2)))
    made.save(tmp_path / "plan.json")
    given = Plan.load(tmp_path / "plan.json")
    assert plan_only(program.copy(), make_context(2, config(2), given=given)).diff(made) == ""
    (first,) = (name for name, op in made.ops.items() if "getitem" in name and op.out.dim == 2)
    given = Plan.load(tmp_path / "plan.json")
    given.ops[first] = replace(given.ops[first], out=I)
    with pytest.raises(PlanError, match=f"the plan places %{first} .* -> I, which is no row"):
        plan_only(program.copy(), make_context(2, config(2), given=given))


def test_without_a_rule_a_note_says_so() -> None:
    model, x = Net(True).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    plan = megafx.plan(model, config(2), example_inputs=(x,))
    assert not plan.params["decay"].is_shard
    text = " ".join(str(megafx.explain(plan)).split())
    assert "no rule for several.scan.default; computed whole on every rank" in text
