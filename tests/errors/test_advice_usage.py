"""Covers: the advice of errors of parallelized models in use, of the command and of tools: each is raised, and then followed.
(On ranks: the tests that tests/house/test_advice.py lists.)"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from advice import refused
from torch import nn

import megafx
from megafx import cli
from megafx.checks.rules import check_rules
from megafx.config import Config
from megafx.planner.plan import Plan
from megafx.rehearsal_of_stages import proposed
from megafx.report.report import Report

ONE = Config(tensor_model_parallel_size=1, cache=False)
X = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down = nn.Linear(4, 6), nn.Dropout(p), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        out = self.down(self.drop(self.up(x).tanh()))
        return out if targets is None else (F.mse_loss(out, targets), out)


def net(p: float = 0.0) -> Net:
    return Net(p).double()


def ours(config: Config = ONE, p: float = 0.0, **options: Any) -> Any:
    return megafx.parallelize(net(p), config, **options)


def test_a_meter() -> None:
    model = nn.Linear(8, 2)
    with refused("<__name__> is not parallelized"):
        megafx.Meter(model)
    model = megafx.parallelize(model, Config(tensor_model_parallel_size=1))
    with refused("every=<every>"):
        megafx.Meter(model, every=0)
    meter = megafx.Meter(model, every=1)
    model(torch.randn(3, 8)).sum().backward()
    assert meter.step(tokens=3)


def test_reports_and_plans(tmp_path: Path) -> None:
    two = Config(tensor_model_parallel_size=2, hardware="h100-nvlink")
    with refused("<__name__> is not parallelized"):
        megafx.explain(net())
    model = ours()
    with refused("no call is planned yet"):
        megafx.explain(model)
    with refused("no call is compiled yet"):
        model.print_readable()
    model(X)
    assert str(megafx.explain(model)) and model.print_readable()
    assert str(megafx.explain(ours(example_inputs=(X,))))
    plan = megafx.plan(net(), two, example_inputs=(X,))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with refused("this plan was loaded, so it has no graph to explain"):
        megafx.explain(loaded)
    assert "plan on tp=2" in str(loaded) and str(megafx.explain(plan))
    with refused("no node of the graph belongs to module"):
        model.print_readable("upp")
    assert model.print_readable("up")
    megafx.explain(plan).html(tmp_path / "page.html")
    (tmp_path / "text").write_text("?")
    with refused("'<path>' is no report and no plan"):
        megafx.diff(tmp_path / "text", tmp_path / "plan.json")
    with refused("there is no file '<path>'"):
        megafx.diff(tmp_path / "page.htm", tmp_path / "plan.json")
    assert megafx.diff(tmp_path / "page.html", tmp_path / "page.html") == ""
    assert megafx.diff(tmp_path / "plan.json", tmp_path / "plan.json") == ""
    with refused("a saved plan has no report to draw"):
        megafx.diff(tmp_path / "plan.json", tmp_path / "plan.json", html=tmp_path / "both.html")
    megafx.diff(tmp_path / "page.html", tmp_path / "page.html", html=tmp_path / "both.html")
    assert isinstance(megafx.explain(plan), Report)
    with refused("no optimizer '<optimizer>' is known") as error:
        megafx.predict_memory(net(), two, example_inputs=(X,), optimizer="adamm")
    megafx.predict_memory(net(), two, example_inputs=(X,), optimizer=error[0].fix.split()[2].rstrip(","))
    with refused("<world> ranks are no multiple of the <inner> that tensor_model_parallel_size"):
        megafx.rehearse(net(), two, 3, example_inputs=(X.repeat(2, 1),))
    with refused("the mesh <text> has <ranks> ranks, not <world>"):
        megafx.rehearse(net(), two.replace(data_parallel_size=2), 2, example_inputs=(X.repeat(2, 1),))
    assert megafx.rehearse(net(), two.replace(data_parallel_size=2), 4, example_inputs=(X.repeat(2, 1),)).world == 4
    with refused("stages without microbatches"):
        megafx.rehearse(net(), ONE, 2, stages=2, example_inputs=(X,))
    with refused("<world> ranks are no pipeline of tensor_model_pa"):
        megafx.rehearse(net(), two, 5, stages=2, microbatches=2, example_inputs=(X,))
    assert proposed(two, 8, 2, 2, "1F1B")[1].ranks == proposed(two, 4, 4, 2, "Interleaved1F1B")[1].ranks == 2
    with refused("gpus=<gpus>, batches=<batches>, global_batch=<glob"):
        megafx.search(net(), gpus=0, memory="80GiB", example_inputs=(X,))


def test_calls() -> None:
    model = ours()
    with refused("the model is parallelized already"):
        megafx.parallelize(model, ONE)
    with refused("a parallelized model cannot be pickled"):
        pickle.dumps(model)
    again = net()
    again.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    torch.testing.assert_close(megafx.parallelize(again, ONE)(X), model(X))
    with refused("forward-mode automatic differentiation"), forward_ad.dual_level():
        model(forward_ad.make_dual(X, torch.ones_like(X)))
    _, tangent = torch.autograd.functional.jvp(model, X, torch.ones_like(X))
    torch.testing.assert_close(tangent, torch.autograd.functional.jvp(net(), X, torch.ones_like(X))[1])
    loss = model(X).sum()
    loss.backward()
    with refused("backward ran through this call's graph before"):
        loss.backward()
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_gradients_of_gradients() -> None:
    model, x = ours(p=0.5), X.clone().requires_grad_()
    with refused("<WHERE>: it is computed in eager mode, whose dropout draws other masks"):
        torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    model.eval()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    grad.square().sum().backward()


class Counting(nn.Module):
    """Decides by data; counts rows in a buffer, or returns the new count."""

    def __init__(self, returns: bool) -> None:
        super().__init__()
        self.returns = returns
        self.register_buffer("rows", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.rows + x.shape[0]
        if not self.returns:
            self.rows = rows
        x = x * 2 if x.sum() > 0 else x
        return (x, rows) if self.returns else x


class WithCount(nn.Module):
    def __init__(self, returns: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.count = nn.Linear(4, 4).double(), Counting(returns)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.count(self.up(x).tanh())
        h = h[0] if isinstance(h, tuple) else h
        return {"loss": h.square().mean(), "h": h}


def test_a_buffer_that_code_left_eager_has_changed() -> None:
    out = megafx.parallelize(WithCount(False), ONE)(X)
    with refused("this backward computes the call once more"):
        (out["loss"] + out["h"].mean()).backward()
    model, plain = megafx.parallelize(WithCount(False), ONE.replace(differentiable_outputs=True)), WithCount(False)
    for each in (model, plain):
        out = each(X)
        (out["loss"] + out["h"].mean()).backward()
    torch.testing.assert_close(model.up.weight.grad, plain.up.weight.grad)
    x = X.clone().requires_grad_()
    with refused("this backward computes the call once more"):
        torch.autograd.grad(megafx.parallelize(WithCount(False), ONE)(x)["loss"], x, create_graph=True)
    model = megafx.parallelize(WithCount(True), ONE)
    torch.autograd.grad(model(x)["loss"], x, create_graph=True)[0].square().sum().backward()


def test_values_on_meta(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net().double()
    model = megafx.parallelize(model, ONE)
    with refused("a call of a model whose parameters are on the meta device"):
        model(X)
    with refused("<bare> have no values"):
        megafx.save_pretrained(model, tmp_path)
    with refused("'<name>' is on the meta device: it has no values to save"):
        megafx.save_checkpoint(tmp_path, model, step=0)
    with refused("verify computes, so it needs real weights and inputs"):
        megafx.verify(Net().to("meta"), Config(tensor_model_parallel_size=2), example_inputs=(X.to("meta"),))
    with refused("how a <__name__> is built is not known"):
        megafx.initialize(model)
    with refused("the factory made a <__name__>"):
        megafx.initialize(model, lambda: (net(),))
    with refused("the factory's model is not this one"):
        megafx.initialize(model, lambda: nn.Linear(4, 4))
    megafx.initialize(model, net)
    torch.testing.assert_close(model(X), net()(X))
    megafx.save_pretrained(model, tmp_path / "files")
    megafx.save_checkpoint(tmp_path / "run", model, step=0)
    with torch.device("meta"):
        other = megafx.parallelize(Net().double(), ONE)
    megafx.load_safetensors(other, tmp_path / "files")
    torch.testing.assert_close(other(X), net()(X))


def test_meshes_of_simulated_ranks() -> None:
    def verified(rows: int, axes: dict[str, int], config: Config | None = None, **options: Any) -> Any:
        x = torch.linspace(-1, 1, 4 * rows, dtype=torch.float64).view(rows, 4)
        return megafx.verify(net(), config, example_inputs=(x, x.flip(0)), mesh=axes, **options)

    with refused("mesh is of simulated ranks"):
        verified(4, {"dp": 2, "tp": 2}, on_ranks=True)
    with refused("mesh <mesh> has an axis '<other>'"):
        verified(4, {"dp": 2, "sp": 2})
    with refused("'<name>' has <rows> rows, which <ranks> ranks cannot share out equally"):
        verified(3, {"dp": 2})
    average = Config(data_parallel_loss="average")
    with refused("with data_parallel_loss='average' ranks compute no loss of one batch"):
        verified(4, {"dp": 2}, average)
    assert verified(4, {"dp": 2, "tp": 2}) and verified(4, {"tp": 2}, average)


def test_constructors() -> None:
    with torch.device("meta"):
        model = megafx.parallelize(Net().double(), ONE)
    shared = torch.ones(4, dtype=torch.float64)

    def by_values() -> nn.Module:
        made = net()
        nn.init.constant_(made.up.bias, float(made.up.weight[made.up.weight > 0].sum()))
        return made

    def writes() -> nn.Module:
        shared.add_(1)
        return net()

    with refused("the constructor makes something of the values of a tensor"):
        megafx.initialize(model, by_values)
    with refused("<func> writes a tensor that was there before the constructor ran"):
        megafx.initialize(model, writes)
    megafx.initialize(model, net)
    built = megafx.parallelize(by_values(), ONE)
    torch.testing.assert_close(built(X), by_values()(X))


def test_checkpoints(tmp_path: Path) -> None:
    model = ours()
    optimizer = torch.optim.AdamW(model.parameters())
    with refused("save_checkpoint(step="):
        megafx.save_checkpoint(tmp_path, model, step=-1)
    saved = megafx.save_checkpoint(tmp_path, model, optimizer, step=1)
    with refused("'<folder>' is a checkpoint itself"):
        megafx.save_checkpoint(saved, model, step=2)
    megafx.save_checkpoint(saved.parent, model, step=2)
    with refused("the optimizer holds <unknown> parameters that the model does not have"):
        megafx.save_checkpoint(tmp_path / "other", ours(), optimizer, step=1)
    megafx.save_checkpoint(tmp_path / "other", model, optimizer, step=1)


def test_rules_and_dumps(tmp_path: Path) -> None:
    with refused("'<op>' has no sharding rule") as error:
        check_rules(["aten.addmmm.default"])
    name = error[0].fix.removeprefix("did you mean ").rstrip("?").split(", ")[0]
    assert check_rules([name])
    with refused("'<folder>' is not a dump folder"):
        megafx.replay(tmp_path, net(), example_inputs=(X,))
    with megafx.debug(dump=str(tmp_path / "dump")):
        megafx.plan(net(), Config(tensor_model_parallel_size=2, hardware="h100-nvlink"), example_inputs=(X,))
    megafx.replay(tmp_path / "dump", net(), example_inputs=(X,))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "command_nets.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    def __init__(self): super().__init__(4, 4)\n"
    )

    def run(*words: str) -> str:
        assert cli.main([*words]) == 2, words
        return str(capsys.readouterr().err)

    one = ["plan", "command_nets:Net", "--tp", "2", "--hardware", "h100-nvlink"]
    for wrong, text in (
        (["--gpus", "8"], "--gpus and --memory go together"),
        (["--json", "x.json"], "--json without --gpus"),
        (["--global-batch", "8"], "--global-batch without --gpus"),
        (["--set", "size"], "--set size has no value"),
        ([], "the inputs of a Net are unknown"),
    ):
        assert text in run(*one, *wrong)
    assert "--import nothing" in run("check-rules", "--import", "nothing_here")
    good = [*one, "--input", "float32[3,4]"]
    assert cli.main([*good, "--save", "plan.json"]) == 0 and json.loads((tmp_path / "plan.json").read_text())
    assert cli.main(["explain", *good[1:], "--json", "report.json"]) == 0
    (tmp_path / "rules.py").write_text("")
    assert cli.main(["check-rules", "--import", "rules", "aten.relu.default"]) == 0


def test_copies() -> None:
    model = ours()
    model(X)
    torch.testing.assert_close(copy.deepcopy(model)(X), net()(X))


def test_a_model_with_a_parallelized_part_and_a_read_only_mapping() -> None:
    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2

    with refused("the model's submodule '<inner>' is parallelized already"):
        megafx.parallelize(Outer(ours()), ONE)
    wanted = net()(X) * 2
    torch.testing.assert_close(megafx.parallelize(Outer(net()), ONE)(X), wanted)
    torch.testing.assert_close(Outer(ours())(X), wanted)

    class Parts(nn.Module):
        def __init__(self, kind: type) -> None:
            super().__init__()
            self.inner, self.kind = net(), kind

        def forward(self, x: torch.Tensor) -> Any:
            return self.kind({"out": self.inner(x)})

    with refused("forward returns a <kind>, whose parts a graph does not know"):
        megafx.parallelize(Parts(MappingProxyType), ONE)(X)
    torch.testing.assert_close(megafx.parallelize(Parts(dict), ONE)(X)["out"], net()(X))


def test_iterators_in_what_forward_returns() -> None:
    class Yields(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

        def forward(self, x: torch.Tensor) -> Any:
            yield self.inner(x)
            yield self.inner(2 * x)

    class Collects(Yields):
        def forward(self, x: torch.Tensor) -> Any:
            return [*super().forward(x)]

    with refused("forward returns a <kind>: what it gives out is"):
        megafx.parallelize(Yields(), ONE)(X)
    torch.testing.assert_close(megafx.parallelize(Collects(), ONE)(X), [net()(X), net()(2 * X)])
