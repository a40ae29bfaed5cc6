"""Covers: what `parallelize` gives back, on one rank, for models of the zoo; what shows it: verify, explain, print_readable,
plans on disk; passes of the user's. (Keys, hooks, refusals: runtime/test_runtime.py. Several ranks: dist/.)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program
from megafx.errors import ConfigError, PlacementError, UsageError
from megafx.ir.program import Phase, Program
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan
from megafx.rules import grammar as rules
from megafx.runtime.outputs import LazyTensor
from megafx.testing import make_context

ONE = megafx.Config(tensor_model_parallel_size=1, hardware="h100-nvlink")
TWO = ONE.replace(tensor_model_parallel_size=2)


def close(a: Any, b: Any, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


def same_gradients(model: nn.Module, plain: nn.Module, rtol: float = 1e-10) -> None:
    found = megafx.full_gradients(model)
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        close(found[name], gradient, rtol)


@dataclass
class Identity:
    """What of a model must stay as it is."""

    model: int
    cls: type
    names: list[str]
    parameters: list[int]
    modules: list[tuple[str, int]]

    @staticmethod
    def of(model: nn.Module) -> Identity:
        named = [(n, id(m)) for n, m in model.named_modules()]
        names = [n for n, _ in model.named_parameters()]
        return Identity(id(model), type(model), names, [id(p) for p in model.parameters()], named)


@pytest.fixture(scope="module")
def made() -> tuple[nn.Module, nn.Module, Any, Identity]:
    """(plain, parallelized, inputs, what the latter was before)"""
    plain, inputs = zoo.build("nanogpt")
    model = copy.deepcopy(plain)
    before = Identity.of(model)
    return plain, megafx.parallelize(model, ONE, example_inputs=inputs(2, 16)), inputs, before


@pytest.fixture
def gpt(made: Any) -> tuple[nn.Module, nn.Module, Any]:
    """(plain, parallelized, inputs)"""
    return made[:3]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def gpt_plan() -> Plan:
    plain, inputs = zoo.build("nanogpt", layers=2)
    return megafx.plan(plain, TWO.replace(sequence_parallel=True), example_inputs=inputs(2, 16))


# -- the object


def test_it_is_the_same_object(made: Any) -> None:
    plain, model, _, before = made
    now = Identity.of(model)
    assert isinstance(model, type(plain)) and type(model).__name__ == "GPT" and type(model) is not before.cls
    assert type(model).__module__ == before.cls.__module__
    assert replace(now, cls=before.cls) == before, "on one rank parameters stay the user's objects, too"
    assert model.lm_head.weight is model.wte.weight
    assert list(model.state_dict()) == list(plain.state_dict())
    assert (model.config.n_layer, model.tp_size) == (1, 1)
    assert (model.training, model.eval().training, model.train().training) == (True, False, True)


@pytest.mark.slow
def test_made_under_autocast() -> None:
    plain, inputs = zoo.build("nanogpt")
    plain.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = megafx.parallelize(copy.deepcopy(plain), ONE, example_inputs=inputs(2, 16))
    call = inputs(2, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = model(**call), plain(**call)
    assert model.megafx.captures == 1
    assert (mine[0] + 0).dtype == theirs[0].dtype == torch.bfloat16
    close(mine[1], theirs[1], 1e-2)
    mine[1].backward()
    theirs[1].backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    for name, gradient in megafx.full_gradients(model).items():
        assert gradient.dtype == torch.float32
        assert float((gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-4)) < 5e-2, name


@pytest.mark.slow
def test_a_hugging_face_model_without_inputs() -> None:
    plain, inputs = zoo.build("gpt2")
    plain.float()
    model = megafx.parallelize(copy.deepcopy(plain), ONE)
    assert model.megafx.settled.plan is not None, "planned before any call"
    assert (model.tp_size, model.config.n_layer, model.get_input_embeddings() is model.transformer.wte) == (1, 1, True)
    call = inputs(3, 11)
    mine, theirs = model(**call), plain(**call)
    assert type(mine) is type(theirs)
    close(mine.loss, theirs.loss, 1e-6)
    assert isinstance(mine.logits, torch.Tensor) and mine.logits.requires_grad
    assert torch.equal(
        model.eval().generate(call["input_ids"][:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0),
        plain.eval().generate(call["input_ids"][:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0),
    )


class Statistics(nn.Module):
    """Nested inputs and outputs, batch norm, a counter, a buffer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(6, 9), nn.BatchNorm1d(9)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.arange(9.0), persistent=False)

    def forward(self, batch: dict[str, Any], extra: list[torch.Tensor], *, gain: float = 1.0) -> dict[str, Any]:
        self.calls.add_(1)
        x = self.norm(self.lin(batch["a"]["x"] + extra[0] * extra[1])) + self.table
        return {"loss": x.square().mean() * gain, "parts": [x, (x.sum(-1), "text")], "none": None}


def test_nested_inputs_and_mutated_buffers() -> None:
    torch.manual_seed(0)
    plain = Statistics().double()
    model = megafx.parallelize(copy.deepcopy(plain), ONE)
    for rows in (8, 5, 7):
        tensors = [torch.randn(rows, 6, dtype=torch.float64) for _ in range(3)]
        call: dict[str, Any] = {"batch": {"a": {"x": tensors[0]}, "b": "ignored"}, "extra": tensors[1:], "gain": 0.5}
        mine, theirs = model(**call), plain(**call)
        assert torch.utils._pytree.tree_structure(mine) == torch.utils._pytree.tree_structure(theirs)
        assert mine["parts"][1][1] == "text" and mine["none"] is None
        close(mine["loss"], theirs["loss"])
        close(mine["parts"][0] + 0, theirs["parts"][0].detach())
        mine["loss"].backward()
        theirs["loss"].backward()
    same_gradients(model, plain)
    assert model.megafx.captures == 1
    assert model.calls == 3 and model.norm.num_batches_tracked == 3
    for name, buffer in plain.named_buffers():
        close(model.get_buffer(name), buffer)
    assert "table" not in model.state_dict()
    close(model.eval()(**call)["parts"][0], plain.eval()(**call)["parts"][0])
    assert model.norm.num_batches_tracked == 3


def test_logits_of_one_rank_are_whole(gpt: Any) -> None:
    plain, model, inputs = gpt
    call = inputs(2, 16)
    logits, _ = model(**call)
    assert isinstance(logits, LazyTensor) and logits.requires_grad  # the loss goes without them
    close(logits + 0, plain(**call)[0])
    with torch.no_grad():
        logits, _ = model(**call)
    assert not isinstance(logits, LazyTensor)


# -- verify


def test_verify_of_a_right_model() -> None:
    plain, inputs = zoo.build("nanogpt")
    before = copy.deepcopy(plain.state_dict())
    verdict = megafx.verify(plain, TWO.replace(sequence_parallel=True), example_inputs=inputs(2, 13))
    assert verdict and verdict.ok and verdict.divergence is None
    assert (verdict.t, verdict.reference) == (2, "eager")
    assert verdict.gradients.keys() == {n for n, _ in plain.named_parameters()}
    assert str(verdict).startswith("equal: 2 ranks against eager, tolerance 1e-10\n")
    assert all(torch.equal(v, before[n]) for n, v in plain.state_dict().items())
    assert all(p.grad is None for p in plain.parameters())
    assert not hasattr(plain, "megafx")


@pytest.mark.parametrize("options", [{}, {"gather_outputs": False}, {"differentiable_outputs": True}])
@pytest.mark.parametrize("loss", [False, True])
def test_verify_of_other_outputs(options: dict[str, Any], loss: bool) -> None:
    plain, inputs = zoo.build("nanogpt")
    call = inputs(2, 13)
    if not loss:
        del call["targets"]
    verdict = megafx.verify(plain, TWO.replace(**options), example_inputs=call)
    assert verdict and max(verdict.gradients.values()) > 0, "nothing was compared"


@pytest.mark.slow
def test_verify_allows_what_the_models_own_casts_round() -> None:
    """HF computes the loss in fp32, in an fp64 model too."""
    plain, inputs = zoo.build("gpt2")
    verdict = megafx.verify(plain, TWO, example_inputs=inputs(2, 13))
    assert verdict and verdict.tolerance == 1e-4


@torch.library.custom_op("objecttests::centre", mutates_args=())
def centre(x: torch.Tensor) -> torch.Tensor:
    """x less its mean over the last dim, which no shard of that dim can know."""
    return x - x.mean(-1, keepdim=True)


@centre.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


centre.register_autograd(lambda ctx, grad: centre(grad))


class Centred(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return centre(x)


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


@pytest.fixture
def clean_rules() -> Iterator[None]:
    kept = dict(rules._registered)
    yield
    rules._registered.clear()
    rules._registered.update(kept)


@pytest.mark.parametrize(("rule", "right"), [("lin: ... c -> ... c", False), ("lin: ... c! -> ... c!", True)])
def test_verify_names_the_op_of_a_wrong_rule(rule: str, right: bool, clean_rules: None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Centred(), nn.Linear(8, 6), Squared()).double()
    megafx.register_rule(torch.ops.objecttests.centre.default, rule)
    x = torch.randn(3, 5, 6, dtype=torch.float64)
    verdict = megafx.verify(model, TWO, example_inputs=(x,))
    assert verdict.ok == right, str(verdict)
    if not right:
        assert verdict.divergence is not None
        assert (verdict.divergence.node, verdict.divergence.fqn) == ("centre", "1")
        assert str(verdict).startswith("DIFFERENT: 2 ranks against eager")
        assert "they first differ at %centre in '1' at S2: differs from one process by" in str(verdict)
        assert "`return centre(x)`" in str(verdict)


# -- looking at it


def test_print_readable(gpt: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, model, _ = gpt
    text = model.print_readable("h.0.mlp")
    assert capsys.readouterr().out == text + "\n"
    forward, backward = text.split("# backward of 'h.0.mlp'")
    for part in ("h.0.mlp.fc.weight", "h.0.mlp.proj.weight", "megafx.bias_act", "f64[batch seq 24] I@tp", "from h.0"):
        assert part in forward, part
    assert "gpt.py:" in forward and "`return self.drop(self.proj(F.gelu(self.fc(x))))`" in forward
    assert "megafx.bias_act_backward" in backward and "build_joint_graph" in backward
    assert "attn" not in text and "lm_head" not in text
    whole = model.print_readable()
    assert "h.0.attn.qkv.weight" in whole and len(whole) > 3 * len(text)


def test_explain_of_a_plan(gpt_plan: Plan, tmp_path: Path) -> None:
    report = megafx.explain(gpt_plan)
    text = str(report)
    for part in (
        "axis tp=2, sequence_parallel True",
        "h.[0-1].mlp.fc",
        "column-parallel",
        "row-parallel",
        "vocab-parallel",
        "P->S0 fwd reduce_scatter",
        "bwd all_gather",
        "Stored whole on every rank",
        "h.*.attn.proj.bias 24: added once, on rank 0, to the partial result of a row-parallel op (2 of them)",
    ):
        assert part in text, part
    assert {f"{row.fqn} {times}" for row, times in report.folded() if row.style == "row-parallel"} == {
        "h.[0-1].attn.proj 2",
        "h.[0-1].mlp.proj 2",
    }
    page = tmp_path / "plan.html"
    report.html(page)
    assert page.read_text().startswith("<!doctype html>") and "column-parallel" in page.read_text()
    data = json.loads(report.to_json())
    assert data["header"]["axis"] == "tp=2"
    assert data["params"]["h.0.mlp.fc.weight"][:2] == ["96x24", "S0"]
    assert data["params"]["h.0.ln_1.weight"][2] == "the norm runs over the dim"


def test_explain_of_a_model_counts_graphs(gpt: Any) -> None:
    _, model, _ = gpt
    report = megafx.explain(model)
    assert report.header["graphs captured"] == model.megafx.captures >= 1
    assert report.collectives() == {}, "one rank does not communicate"


def test_plans_are_saved_loaded_and_compared(gpt_plan: Plan, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    gpt_plan.save(file)
    loaded = Plan.load(file)
    assert gpt_plan.diff(loaded) == "" and str(loaded) == str(gpt_plan)
    assert loaded.params == gpt_plan.params and loaded.removals == gpt_plan.removals
    assert str(loaded.placement_of("h.0.mlp.fc.weight")) == "S0"
    plain, inputs = zoo.build("nanogpt", layers=2)
    config = TWO.replace(sequence_parallel=True, overrides={"h.0.mlp": "replicate"})
    other = megafx.plan(plain, config, example_inputs=inputs(2, 16))
    changed = [line for line in loaded.diff(other).splitlines() if line[0] in "+-" and ".weight" in line]
    assert {" ".join(line.split()) for line in changed} == {
        "- h.0.mlp.fc.weight S0",
        "+ h.0.mlp.fc.weight I",
        "- h.0.mlp.proj.weight S1",
        "+ h.0.mlp.proj.weight I",
    }
    with pytest.raises(UsageError, match="this plan was loaded, so it has no graph to explain"):
        megafx.explain(loaded)


# -- passes of the user's


def test_a_pass_of_the_users_runs_where_it_is_named() -> None:
    plain, inputs = zoo.build("nanogpt")
    phases = []

    def relu_for_gelu(program: Program, context: CompileContext) -> int:
        phases.append(program.phase.name)
        nodes = program.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
        for node in nodes:
            node.target = torch.ops.aten.relu.default
            node.kwargs = {}
        return len(nodes)

    config = ONE.replace(passes=(("after canonicalize", relu_for_gelu),))
    model = megafx.parallelize(copy.deepcopy(plain), config, example_inputs=inputs(2, 16))
    call = inputs(3, 7)
    mine = model(**call)[1]
    assert set(phases) == {"CANONICAL"}
    assert abs(float(mine.detach() - plain(**call)[1].detach())) > 1e-6
    torch.nn.functional.gelu, gelu = torch.relu, torch.nn.functional.gelu
    try:
        close(mine, plain(**call)[1])
    finally:
        torch.nn.functional.gelu = gelu


def test_a_pass_beside_one_that_does_not_exist() -> None:
    plain, inputs = zoo.build("nanogpt")
    config = ONE.replace(passes=(("after canonicalise", lambda program, context: 0),))
    with pytest.raises(ConfigError, match="canonicalise.*\n.*canonicalize"):
        megafx.plan(plain, config, example_inputs=inputs(2, 16))


def test_a_users_pass_on_the_joint_graph() -> None:
    """It runs where there is a joint graph; planning, and graphs without gradients, go without."""
    plain, inputs = zoo.build("nanogpt")
    seen = []

    def count_nodes(program: Program, context: CompileContext) -> int:
        seen.append(program.phase)
        return 0

    model = megafx.parallelize(plain, ONE.replace(passes=(("after build_joint_graph", count_nodes),)))
    model(**inputs(2, 9))
    assert seen == [Phase.JOINT]
    with torch.no_grad():
        model(**inputs(2, 9))
    assert seen == [Phase.JOINT] and model.megafx.captures == 2


def test_what_the_type_checker_cannot_confirm_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PlacementError("%sum is partial", module="h.0")

    monkeypatch.setattr("megafx.checks.types.check_types", refuse)
    plain, inputs = zoo.build("nanogpt")
    context = make_context(2, wants_grad=lambda spec: spec.kind == "param")
    compiled = compile_program(capture_call(plain, (), inputs(2, 16)), context)
    (note,) = [str(n) for n in compiled.program.notes if n.topic == "types"]
    assert "the type checker cannot confirm this graph: %sum is partial; megafx.verify" in note and "h.0" in note
    with megafx.debug(check=1), pytest.raises(PlacementError, match="%sum is partial"):
        compile_program(capture_call(plain, (), inputs(2, 16)), context)
