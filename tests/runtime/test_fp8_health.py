"""Covers: runtime/fp8_health.py, megafx.fp8_health."""

from __future__ import annotations

import pytest
import torch
from fp8_models import EVERY, Model, batch

import megafx
from megafx import Config
from megafx.errors import UsageError


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_each_cast_of_a_call(recipe: str) -> None:
    torch.manual_seed(0)
    model = megafx.parallelize(Model(50, 1, p=0.1).double(), Config(hardware="h100-nvlink", fp8_recipe=recipe, **EVERY))
    model(*batch(7)).backward()
    up = model.layers[0].up.weight
    with torch.no_grad():
        up[0] = 1e-9  # below the least number of the format by the scale of all, not by that of the row
        up[1, 0] = -64.0
    gradients = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    health = megafx.fp8_health(model, batch(7))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    found = {(c.module, c.operand, c.scales): c for c in health.casts}
    each = ["one"] if recipe == "tensorwise" else ["rows", "columns"]
    linears = ("q", "o", "up", "down")
    assert {key[:2] for key in found} == {
        (f"layers.0.{n}", o) for n in linears for o in ("input", "weight", "gradient")
    }
    assert {scales for _, _, scales in found} == {*each} and len(found) == len(health.casts)
    assert {c.format for c in health.casts if c.operand == "gradient"} == {"e5m2"}  # the recomputed gelu is an input
    weight = found["layers.0.up", "weight", each[0]]
    assert weight.largest == 64.0 and weight.format == "e4m3"
    if recipe == "tensorwise":
        small = int((up.abs() < 64 / 448 * 2**-10).sum())  # half of the least number rounds to 0
        assert weight.zero == pytest.approx(small / up.numel()) and small >= 32
        assert weight.saturated == pytest.approx(1 / up.numel())
    else:
        assert weight.zero < 31 / up.numel() and weight.saturated >= 50 / up.numel()  # each row has one at the top
    assert found["layers.0.up", "gradient", each[0]].format == "e5m2"
    lines = str(health).splitlines()
    assert lines[0].split()[:3] == ["module", "operand", "format"] and len(lines) == 1 + len(health.casts)


def test_without_fp8() -> None:
    model = megafx.parallelize(Model(layers=1), Config(hardware="h100-nvlink"))
    model(*batch(7))
    assert str(megafx.fp8_health(model, batch(7))) == "no product of this call runs in FP8"
    with pytest.raises(UsageError, match="Model is not parallelized"):
        megafx.fp8_health(Model(layers=1), batch(7))
