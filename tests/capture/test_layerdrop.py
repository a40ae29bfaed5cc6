"""Covers: capture/draws.py. Layers dropped at random in training are dropped in one graph, by the seed of the step."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
from data_mesh import compile_on, run_on
from eager import Promoted
from harness import Case, assert_equal, promote_casts, values_of
from torch import nn

from megafx.capture.export import capture_call
from megafx.checks.simulate import Logical, run_logical
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.errors import CaptureError
from megafx.placements.data_axis import DataAxis
from megafx.testing import make_context

IDS = torch.randint(3, 61, (3, 9), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": IDS, "labels": IDS}
EACH_DRAW = list(itertools.product((0.1, 0.9), repeat=2))


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


def as_drawn(model: nn.Module, draws: tuple[float, ...], call: Any = CALL) -> Logical:
    """Loss and gradients where the model's own code draws these numbers; zero for the layers that it left out."""
    model.zero_grad()
    with mock.patch("torch.rand", side_effect=[torch.tensor(x) for x in draws]), Promoted():
        loss = model(**call).loss
        loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Logical({"loss": loss.detach()}, gradients)


def test_each_call_drops_layers_by_its_seed() -> None:
    model = opt()
    program = capture_call(model, (), CALL)
    assert [n.message.split(" at random")[0] for n in program.notes] == [
        "layerdrop: layers of 'model.decoder.layers' are dropped"
    ]
    wanted = {draws: as_drawn(model, draws) for draws in EACH_DRAW}
    losses = {draws: float(made.outputs["loss"]) for draws, made in wanted.items()}
    assert len(set(losses.values())) == 4
    seen = set()
    for t in (1, 3):
        config = Config(passes=(("after canonicalize", promote_casts),))
        compiled = compile_program(
            program.copy(), make_context(t, config, wants_grad=lambda spec: spec.kind == "param")
        )
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


@pytest.mark.parametrize(("t", "sharded"), [(1, False), (2, False), (2, True)])
def test_ranks_of_data_parallelism_drop_the_same_layers(t: int, sharded: bool) -> None:
    """Those of one process on the whole batch, with its loss and gradients."""
    model = opt()
    ids = torch.randint(3, 61, (4, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100  # the ranks count unequal numbers of labels
    call = {"input_ids": ids, "labels": labels}
    wanted = {draws: as_drawn(model, draws, call) for draws in EACH_DRAW}
    case = Seeded(model, None, capture_call(model, (), call))
    data = DataAxis(2, "fsdp", 2) if sharded else DataAxis(2)
    compiled = compile_on(case, data, t)
    drawn = set()
    for step in range(6):
        case.step = step
        found = run_on(case, compiled, data, call)
        loss = float(found.outputs["loss"])
        draws = min(wanted, key=lambda k: abs(float(wanted[k].outputs["loss"]) - loss))
        assert_equal(Logical({"loss": found.outputs["loss"]}, found.gradients), wanted[draws])
        drawn.add(draws)
    assert len(drawn) > 1, "layers come and go"


class Seeded(Case):
    """With the seed of a step."""

    step = 0

    def values(self, program: Any, inputs: Any) -> dict[str, Any]:
        (seed,) = [i.name for i in program.inputs if i.kind == "seed"]
        return super().values(program, inputs) | {seed: torch.tensor(self.step)}


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


class Narrowing(Layers):
    """Its layers return fewer features than they take: what follows a dropped one has another shape."""

    def __init__(self, draw: Any) -> None:
        super().__init__(draw)
        self.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(3, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.layerdrop:
                continue
            x = layer(x)
        return x.sum()


def test_a_layer_that_changes_the_shape_is_refused() -> None:
    with pytest.raises(CaptureError, match="does not return a tensor like its first argument") as error:
        capture_call(nn.Sequential(Narrowing(None)).train(), (torch.randn(3, 5, 4),))
    text = str(error.value)
    assert (
        "'0.layers.0'" in text
        and "capture/test_layerdrop.py" in text
        and "`x = layer(x)`" in text
        and "layerdrop to 0" in text
    )


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
