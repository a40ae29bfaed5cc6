"""Covers: equivalence.py (what `megafx.verify` compares besides numbers of outputs and gradients)."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.ir.program import Program
from megafx.planner.context import CompileContext
from megafx.runtime.bound_graph import BoundGraph
from megafx.runtime.runtime import Runtime
from megafx.runtime.written_arguments import written_arguments

TWO = megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink")


class Averaging(nn.Module):
    """Returns a prediction, and the same detached; keeps a mean in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        out = self.down(self.up(x).relu())
        with torch.no_grad():
            self.mean.add_(out.mean(0))
        return out, out.detach()


def verdict(**options: Any) -> Any:
    torch.manual_seed(0)
    return megafx.verify(Averaging().double(), TWO.replace(**options), example_inputs=(torch.randn(5, 8).double(),))


def test_buffers_are_compared() -> None:
    found = verdict()
    assert found and found.buffers.keys() == {"mean"} and not found.requires_grad

    def forget(program: Program, context: CompileContext) -> int:
        results = [*program.results()]
        buffer = next(n for n, i in program.input_nodes() if i.name == "mean")
        results[next(i for i, o in enumerate(program.outputs) if o.kind == "mutation")] = buffer
        program.output_node().args = (tuple(results),)
        return 1

    found = verdict(passes=[("after canonicalize", forget)])
    assert not found and max(found.outputs.values()) < 1e-10
    assert "buffer mean" in str(found)


def test_requires_grad_of_outputs_is_compared() -> None:
    def detach(program: Program, context: CompileContext) -> int:
        program.outputs = [replace(o, requires_grad=o.requires_grad and k != 0) for k, o in enumerate(program.outputs)]
        return 1

    found = verdict(passes=[("after canonicalize", detach)])
    assert not found and "output [0]: requires_grad is not eager mode's" in str(found)


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_a_model_without_gradients(how: str) -> None:
    model, x = Averaging().double().requires_grad_(how != "frozen"), torch.randn(5, 8).double()
    with torch.set_grad_enabled(how != "no_grad"):
        found = megafx.verify(model, TWO, example_inputs=(x,))
    assert found and found.outputs.keys() == {"[0]", "[1]"} and found.gradients == {}


@pytest.mark.repeated_calls
def test_a_loss_of_the_output_alone() -> None:
    found = megafx.verify(
        nn.Linear(8, 4).double(), TWO, example_inputs=(torch.randn(5, 8).double(),), loss_fn=lambda y: y.square().mean()
    )
    assert found and found.outputs.keys() == {"[0]", "[1]"} and len(found.gradients) == 2, found


# -- more calls, with changed state between them


class Stateful(nn.Module):
    """Reads a number, a global, a tensor and its mode; leaves a loss term, a list and a count behind; gives a hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale, self.weights, self.calls = 0.5, torch.rand(16).double(), 0
        self.norms: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(x).tanh() * self.scale * self.weights * (2.0 if self.training else 1.0)
        self.aux, self.calls = hidden.square().mean(), self.calls + 1
        self.norms.append(hidden.norm())
        return (self.down(hidden) * COEFFICIENT).square().mean() + 0.1 * self.aux, hidden


COEFFICIENT = 1.5


def repeated(model: nn.Module) -> Any:
    torch.manual_seed(0)
    return megafx.verify(model.double(), TWO, example_inputs=(torch.randn(5, 8).double(),))


@pytest.mark.repeated_calls
def test_calls_with_changed_state_are_compared() -> None:
    model = Stateful()
    found = repeated(model)
    assert found, found
    assert not found.repeated.skipped and len(found.repeated.errors) == 6, found.repeated
    changed = " ".join(found.repeated.errors)
    assert all(what in changed for what in ("parameters", "rows", "scale", "once more", "mode")), changed
    assert (COEFFICIENT, model.scale, model.calls, model.norms, model.training) == (1.5, 0.5, 0, [], True)


class Normalized(nn.Module):
    """Of a number that no graph takes as an input: `F.layer_norm` wants one that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 6), nn.LayerNorm(6, eps=0.1), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x))).square().mean()


@pytest.mark.repeated_calls
def test_numbers_that_are_baked_in_change_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the first call serves again: the program is captured once for the ranks and this one, and once more for the
    other number, without and with it as an input."""
    captured: list[frozenset[str]] = []

    def counted(*args: Any, **options: Any) -> Program:
        captured.append(frozenset(options.get("state", ())))
        return capture_call(*args, **options)

    monkeypatch.setattr("megafx.compiler.captured.capture_call", counted)
    x = torch.randn(5, 8).double()
    found = megafx.verify(Normalized().double(), TWO, example_inputs={"x": x})
    assert found and [*found.repeated.errors][-2:] == ["of 'norm.eps'", "of 'norm.eps' and back"], found.repeated
    assert captured == [frozenset(), frozenset({"norm.eps"})]


@pytest.mark.repeated_calls
def test_a_graph_that_serves_another_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of the first number does not come back: the latest serves every call."""
    fits, bind, bound = BoundGraph.fits, Runtime._bind, list[BoundGraph]()

    def kept(*args: Any) -> BoundGraph:
        bound.append(bind(*args))
        return bound[-1]

    monkeypatch.setattr(Runtime, "_bind", kept)
    monkeypatch.setattr(
        BoundGraph, "fits", lambda graph, call: fits(graph, call) if len(bound) == 1 else graph is bound[-1]
    )
    found = megafx.verify(Normalized().double(), TWO, example_inputs={"x": torch.randn(5, 8).double()})
    assert not found and [*found.repeated.wrong(1e-10)] == ["of 'norm.eps' and back"], found


SEEN: list[float] = []
STEPS = 3


class Shared(nn.Module):
    """Counts calls in its class and in a global, and appends to a global list."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEPS
        type(self).calls, STEPS = type(self).calls + 1, STEPS + 2
        SEEN.append(float(self.calls))
        return self.linear(x) * type(self).calls / STEPS


@pytest.mark.repeated_calls
def test_state_that_models_share_is_that_of_one_call() -> None:
    found = repeated(Shared())
    assert found and not found.repeated.skipped and len(found.repeated.errors) > 2, found
    assert (Shared.calls, STEPS, SEEN) == (0, 3, [])


FAULTS = {  # what is broken -> (owner, name, what takes its place)
    "numbers that forward reads": ("megafx.ir.python_state.PythonState.holds", lambda state: True),
    "modes": ("megafx.runtime.runtime.module_state", lambda modules, configs: ((), ())),
    "what forward leaves behind": ("megafx.ir.python_state.PythonState.give", lambda state, written: None),
    "inputs that are state": (
        "megafx.ir.python_state.PythonState.values",
        lambda state: {name: place.get() * 0 + 0.5 for name, place in state.inputs.items()},
    ),
    "gradients of outputs beside a loss": (
        "megafx.runtime.bound_graph.BoundGraph.recompute",
        lambda graph, again, call, tangents, edges: [None] * len(graph.wrt_names),
    ),
}


@pytest.mark.repeated_calls
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_runtime_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[fault])
    found = repeated(Stateful())
    assert not found and found.repeated.wrong(1e-10), found
    assert "after a change of" in str(found)


class Writes(Stateful):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return super().forward(x)


@pytest.mark.repeated_calls
def test_what_forward_writes_into_arguments_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(5, 8).double()
    before = x.clone()
    found = megafx.verify(Writes().double(), TWO, example_inputs=(x,))
    assert found and found.outputs["args[0]"] <= 1e-10, found
    assert torch.equal(x, before)
    lost = lambda *of: {name: x.clone() for name, x in written_arguments(*of).items()}
    monkeypatch.setattr("megafx.runtime.bound_graph.written_arguments", lost)
    found = megafx.verify(Writes().double(), TWO, example_inputs=(before,))
    assert not found and "'argument 0'" in str(found), found


class Logarithm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 7), torch.nn.Linear(7, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.log(self.up(x))).square().mean()  # of numbers below 0


def test_nan_of_eager_mode_is_named() -> None:
    """Widths that are padded: 7 on two ranks."""
    found = megafx.verify(Logarithm().double(), TWO, example_inputs=(torch.randn(5, 8).double(),))
    assert found, found
    assert "NaN in eager mode too: output '', the gradient of 'up.weight'" in str(found), found
    assert "the first is %log" in str(found) and "torch.log(self.up(x))" in str(found), found


class Gained(nn.Module):
    """A plain tensor of an attribute meets what is sharded; 7 is no multiple of the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.gain = nn.Linear(8, 7), nn.Linear(7, 8), torch.linspace(1, 2, 7, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).tanh() * self.gain)


@pytest.mark.parametrize("t", [2, 3])
def test_a_plain_tensor_of_an_attribute_is_cut(t):
    """Its numbers are no matter of a pass: a fake that holds them had the passes' collectives computed."""
    config = TWO.replace(tensor_model_parallel_size=t)
    assert megafx.verify(Gained().double(), config, example_inputs=(torch.randn(5, 8).double(),))


class Normed(nn.Module):
    """Hooks set the weights before each call; the last output is kept."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own word on the old form
            self.up = nn.utils.weight_norm(nn.Linear(6, 8))  # type: ignore[no-untyped-call]  # torch's
        self.down, self.last = nn.utils.spectral_norm(nn.Linear(8, 6)), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.down(torch.tanh(self.up(x)))
        return self.last


@pytest.mark.parametrize("called", [False, True])
def test_weights_that_hooks_make_have_a_history(called: bool) -> None:
    model, x = Normed().double(), torch.randn(3, 6, dtype=torch.float64)
    if called:
        model(x)
    assert megafx.verify(model, TWO, example_inputs=(x,))


class StateInEvaluation(nn.Module):
    """As XLNet's memories: there in one mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.lin(x)
        return {"y": y} if self.training else {"y": y, "state": y.detach()}


@pytest.mark.repeated_calls
@pytest.mark.parametrize("training", [True, False])
def test_an_output_of_one_mode_alone(training: bool) -> None:
    model = StateInEvaluation().double().train(training)
    found = megafx.verify(model, example_inputs=(torch.randn(3, 4).double(),))
    assert found and ("output state" in str(found)) is not training and "the mode" not in str(found)


def test_an_output_may_have_the_name_of_a_parameter() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes, self.up = nn.Parameter(torch.randn(6, 8)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            near = self.up(x) @ self.codes.t()
            return {"codes": near.square().mean(), "up.bias": near}

    x = torch.randn(6, 8).double()
    for mesh in ({"tp": 2}, {"dp": 3, "tp": 2}):
        assert megafx.verify(Codes().double(), example_inputs=(x,), mesh=mesh, tolerance=1e-10, types=True)
