"""Adapters of peft that are switched, scaled and turned off between calls."""

from __future__ import annotations

import pytest
import torch
from loop import Loop, situation
from torch import nn


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def _adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["up", "down"], init_lora_weights=False)
    model = peft.get_peft_model(Base(), options, "first")
    model.add_adapter("second", options)
    model.set_adapter("first")
    return model


@situation("https://github.com/huggingface/trl/issues/2698")
def an_adapter_is_turned_off_for_the_reference(loop: Loop) -> None:
    model, x = loop.model(_adapted()), torch.randn(4, 8)
    for _ in range(2):
        model.zero_grad()
        loss = model(x)
        with torch.no_grad(), model.disable_adapter():
            reference = model(x)
        (loss - reference).square().backward()
        loop.see(loss=loss, reference=reference)
        loop.see_gradients(model)


@situation("https://github.com/huggingface/peft/issues/2860", slow=(2,))
def adapters_are_switched_and_scaled(loop: Loop) -> None:
    model, x = loop.model(_adapted()), torch.randn(4, 8)
    for name in ("first", "second", "first"):
        model.set_adapter(name)
        for scale in (2.0, 1.0, 0.5):
            for module in model.modules():
                if hasattr(module, "scaling"):
                    module.scaling[name] = scale
            model.zero_grad()
            loss = model(x)
            loss.backward()
            loop.see(loss=loss)
            loop.see_gradients(model)
    if not loop.eager:
        assert model.megafx.captures <= 6
