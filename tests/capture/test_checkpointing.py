"""Gradient checkpointing in a model that is captured: the same numbers, and a note that nothing is recomputed.

Covers: capture/functions.py, and capture/prepare.py where it turns flags off.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from structures import IDS, LABELS, RIGHT, llama
from torch import nn
from torch.utils.checkpoint import checkpoint

import megafx
from megafx.capture.export import capture_call
from megafx.errors import CaptureError


@pytest.mark.parametrize("reentrant", [True, False])
def test_flags_of_hugging_face_change_nothing_but_a_note(reentrant: bool) -> None:
    """Gradients are eager's; the note says that memory is not what the flag asks for."""
    model = llama().float()
    eager = copy.deepcopy(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    megafx.parallelize(model)
    for m in (model, eager):
        m(input_ids=IDS, labels=LABELS, attention_mask=RIGHT).loss.backward()
    wanted = {name: p.grad for name, p in eager.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    (note,) = [
        n.message for n in model.megafx.notes if "checkpointing is on in the model: it has no effect" in n.message
    ]
    assert "activations are not recomputed" in note


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
def test_by_hand_changes_nothing_but_a_note(reentrant: bool) -> None:
    model = Checkpointed(partial(checkpoint, use_reentrant=reentrant)).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    found = megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=(x,))
    assert found.ok and len(found.gradients) == 6, str(found)
    (note,) = [n.message for n in capture_call(model, (x,)).notes]
    assert "torch.utils.checkpoint has no effect" in note and "activations are not recomputed" in note
    assert "sequence_parallel=True" in note


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


def test_those_of_other_libraries_is_refused() -> None:
    with pytest.raises(CaptureError, match="OwnCheckpoint .* is given a function to call") as error:
        capture_call(Checkpointed(OwnCheckpoint.apply), (torch.randn(3, 5, 8),))
    assert "capture/test_checkpointing.py" in str(error.value) and "self.own(layer, x)" in str(error.value)
