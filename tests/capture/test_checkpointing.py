"""Gradient checkpointing in a model that is captured: the same numbers, and what eager mode keeps.

Covers: capture/functions.py, passes/recompute/regions.py.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from structures import IDS, LABELS, RIGHT, llama
from torch import nn
from torch.fx import traceback
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import checkpoint

import megafx
from megafx.capture.export import capture_call
from megafx.capture.functions import Regions
from megafx.errors import CaptureError
from megafx.ir.program import REGION, Recomputed


def kept(model: nn.Module) -> Recomputed:
    settled = model.megafx.settled.last
    assert settled is not None and settled.program.recomputed is not None
    return settled.program.recomputed


@pytest.mark.parametrize("reentrant", [True, False])
def test_flags_of_hugging_face_keep_the_inputs_of_layers(reentrant: bool) -> None:
    """Gradients are eager's; of a layer nothing stays but the value that it hands on."""
    model = llama().float()
    eager = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    megafx.parallelize(model)
    for m in (model, eager):
        m(input_ids=IDS, labels=LABELS, attention_mask=RIGHT).loss.backward()
    wanted = {name: p.grad for name, p in eager.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    assert kept(model).kept < 0.5 * kept(model).without
    made = model.megafx.settled.last
    saved = [s for s in made.executable().parts.saved if s.kind == "value" and "layers." in s.fqn]
    sizes = [
        made.program.sizes.workload(s.numel) for s in saved
    ]  # the rest: a number a row, of the norm behind the layers
    assert sizes.count(max(sizes)) == model.config.num_hidden_layers and sum(sizes) < 1.1 * max(sizes), sizes


class Checkpointed(nn.Module):
    """Checkpoints its layers by hand. own: what checkpoints them."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.own = own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.relu(self.own(layer, x))
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [True, False])
def test_by_hand(reentrant: bool) -> None:
    model = Checkpointed(partial(checkpoint, use_reentrant=reentrant)).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=(x,))
    assert found.ok and len(found.gradients) == 6, str(found)
    program = capture_call(model, (x,))
    marked = [n.meta[REGION] for n in program.graph.nodes if REGION in n.meta]
    assert marked == [1, 2] and program.notes == []


def test_nested_calls_are_one_region_and_contexts_are_told() -> None:
    inner = Checkpointed(partial(checkpoint, use_reentrant=False)).double()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = inner, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(self.inner, x, use_reentrant=False)
            y = (
                y
                + checkpoint(self.last, x, use_reentrant=False, context_fn=lambda: (nullcontext(), nullcontext())).sum()
            )
            return y

    program = capture_call(Outer().double(), (torch.randn(3, 5, 8, dtype=torch.float64),))
    regions = [n.meta[REGION] for n in program.graph.nodes if REGION in n.meta]
    assert {*regions} == {1, 2} and regions.count(2) == 1 and regions.count(1) > 6
    (note,) = [n.message for n in program.notes]
    assert "context_fn of torch.utils.checkpoint is not followed" in note


class OwnCheckpoint(torch.autograd.Function):
    """As libraries write theirs: the function runs without gradients, and again in backward."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            y: torch.Tensor = function(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


class Counts(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.linear, self.reentrant, self.calls, self.norms = nn.Linear(6, 6), reentrant, 0, []
        self.norm = nn.BatchNorm1d(6)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.norms.append(x.detach().norm())
        return self.norm(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_region_writes_is_noted(reentrant: bool) -> None:
    """Once in a call; eager mode writes again in backward (docs/compatibility.md)."""
    made, x = Counts(reentrant), torch.randn(4, 6, requires_grad=True)
    eager = copy.deepcopy(made)
    model = megafx.parallelize(made)
    for each in (eager, model):
        each(x).sum().backward()
    assert (eager.calls, len(eager.norms), int(eager.norm.num_batches_tracked)) == (2, 2, 2)
    assert (model.calls, len(model.norms), int(model.norm.num_batches_tracked)) == (1, 1, 1)
    (note,) = (n.message for n in model.megafx.notes if "torch.utils.checkpoint" in n.message)
    assert "'norm.running_mean'" in note and "once in each call" in note
    with torch.no_grad():
        model(x)
        eager(x)
    assert (eager.calls, model.calls) == (3, 2)


class Doubled(OwnCheckpoint):
    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return OwnCheckpoint.backward(ctx, 2 * grad)


class OfInputs(OwnCheckpoint):
    """What the function holds has no gradient."""

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.function(x), x, grad)


def test_those_of_other_libraries_are_regions() -> None:
    eager, x = Checkpointed(OwnCheckpoint.apply), torch.randn(3, 5, 8)
    model = megafx.parallelize(copy.deepcopy(eager))
    eager(x).backward()
    model(x).backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    program = capture_call(Checkpointed(OwnCheckpoint.apply), (x,))
    assert {n.meta[REGION] for n in program.graph.nodes if n.meta.get(REGION)}


@pytest.mark.parametrize("function", [Doubled, OfInputs])
def test_other_functions_that_are_given_one_are_refused(function: Any) -> None:
    with pytest.raises(CaptureError, match=f"{function.__name__} .* is given a function or module") as error:
        capture_call(Checkpointed(function.apply), (torch.randn(3, 5, 8),))
    assert "capture/test_checkpointing.py" in str(error.value) and "self.own(layer, x)" in str(error.value)


def test_another_thread_replaces_what_fx_is_about_to_put_on_nodes() -> None:
    """`traceback.current_meta` is one for all threads: the end of a region does not rely on what its beginning put there."""
    with preserve_node_meta(False):
        traceback.current_meta = {}  # two threads that trace may leave torch's own marks
        with Regions(lambda text: None, dict).enter():
            traceback.current_meta = {}
        assert "custom" not in traceback.current_meta
