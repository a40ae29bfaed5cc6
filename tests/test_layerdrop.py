"""Covers: capture_layerdrop.py. Layers dropped at random in training are dropped in one graph, by the seed of the step."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from eager import Promoted
from harness import assert_equal, promote_casts, values_of
from torch import nn

from megafx.capture import capture_call
from megafx.compiler import Request, compile_program
from megafx.config import Config
from megafx.errors import CaptureError
from megafx.hardware import Hardware
from megafx.simulate import Logical, run_logical

IDS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "labels": IDS}


def opt() -> nn.Module:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=24, word_embed_proj_dim=24, num_hidden_layers=2, ffn_dim=34, num_attention_heads=4, vocab_size=61,
        max_position_embeddings=64, dropout=0.0, attention_dropout=0.0, layerdrop=0.5,
    )  # fmt: skip
    model = OPTForCausalLM(config).double().train()
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


def as_drawn(model: nn.Module, draws: tuple[float, ...]) -> Logical:
    """Loss and gradients where the model's own code draws these numbers; zero for the layers that it left out."""
    model.zero_grad()
    with mock.patch("torch.rand", side_effect=[torch.tensor(x) for x in draws]), Promoted():
        loss = model(**CALL).loss
        loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Logical({"loss": loss.detach()}, gradients)


def test_each_call_drops_layers_by_its_seed() -> None:
    model = opt()
    program = capture_call(model, (), CALL)
    assert [n.message.split(" at random")[0] for n in program.notes] == [
        "layerdrop: layers of 'model.decoder.layers' are dropped"
    ]
    wanted = {draws: as_drawn(model, draws) for draws in itertools.product((0.1, 0.9), repeat=2)}
    losses = {draws: float(made.outputs["loss"]) for draws, made in wanted.items()}
    assert len(set(losses.values())) == 4
    seen = set()
    for t in (1, 2, 3):
        config = Config(passes=(("after canonicalize", promote_casts),))
        wants: Any = lambda index, spec: spec.kind == "param"  # noqa: E731
        request = Request(config, t, Hardware.load("h100-nvlink"), {}, None, wants)
        compiled = compile_program(program.copy(), request)
        values = values_of(compiled.program, model, CALL)
        (seed,) = [i.name for i in compiled.program.inputs if i.kind == "seed"]
        drawn = []
        for step in range(8):
            values[seed] = torch.tensor(step)
            found = run_logical(compiled.program, values, compiled.plan.params, t)
            loss = float(found.outputs["loss"])
            draws = min(losses, key=lambda k: abs(losses[k] - loss))
            drawn.append(draws)
            assert_equal(Logical({"loss": found.outputs["loss"]}, found.gradients), wanted[draws])
        seen.add(tuple(drawn))
        assert len(set(drawn)) > 2, "layers come and go"
    assert len(seen) == 1, "the same layers at every number of ranks"


class Layers(nn.Module):
    """Layers dropped by one kind of draw."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.draw, self.layerdrop = draw, 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.training and self.draw() < self.layerdrop:
                continue
            x = layer(x)
        return x


class Noise(Layers):
    """What the draw decides is no layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.rand([]) < self.layerdrop:
            return x
        return x * 2


def test_what_cannot_be_followed_is_said() -> None:
    x = torch.randn(3, 5, 4)
    program = capture_call(Layers(random.random).train(), (x,))
    assert [n.message for n in program.notes] == [
        "layerdrop=0.5 of module '': its layers are not dropped (captured with 0), since its code does not draw with torch.rand"
    ]
    assert sum("linear" in str(n.target) for n in program.graph.nodes) == 2
    with pytest.raises(CaptureError, match="compared with layerdrop, and no layer of a ModuleList was called"):
        capture_call(Noise(None).train(), (x,))
