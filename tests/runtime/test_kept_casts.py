"""Covers: casts of weights to FP8 that micro-batches share (runtime/keep_casts.py, compiler/kept_values.py,
passes/lower/keep_casts.py, analysis/casts.py)."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from fp8_models import EVERY, Model, batch
from torch import Tensor, nn
from weight_writes import unnoticed

import megafx
from megafx import Config
from megafx.analysis.casts import casts_of_weights
from megafx.analysis.prices import bytes_of
from megafx.compiler.kept_values import KeptValues


def config(**options: Any) -> Config:
    return Config(**{**EVERY, "hardware": "h100-nvlink", **options})


def steps(model: Any, micro_batches: int) -> list[Tensor]:
    """Losses and gradients of two steps of SGD."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for k in range(micro_batches):
            loss = model(*batch(6 + k))
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("options", [{"fp8_recipe": "rowwise"}, {"gradient_accumulation_fusion": True}], ids=str)
def test_micro_batches_share_casts_to_the_bit(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = Model(layers=1).double()
    model = megafx.parallelize(copy.deepcopy(plain), config(**options))
    found, casts = steps(model, 3), model.megafx.settled.casts
    assert casts.made == 2  # a step each: the second micro-batch of the first, the first of the second
    assert not casts.kept  # the optimizer's step has their memory
    program = model.megafx.settled.last.program
    kept = model.megafx.settled.last.executable(None, casts).parts
    # of q, k, v (merged), o, up, down: both orientations and, tensorwise, one scale for both
    assert len(kept.casts) == 4 * 4 and kept.cast_weights is not None
    calls = [str(n.target) for n in kept.cast_weights.graph.nodes if n.op == "call_function"]
    assert sum("quantize" in c for c in calls) == 4, calls  # each weight is read once for both
    matrices = [p for n, p in plain.layers.named_parameters() if n.endswith("weight") and p.dim() == 2]
    casts_bytes = sum(bytes_of(program, n) for n in casts_of_weights(program))
    assert casts_bytes > 2 * sum(p.numel() for p in matrices)
    assert model.megafx.settled.last.memory().casts >= casts_bytes
    said = [n.message for n in model.megafx.notes if "serve several calls" in n.message]
    assert len(said) == 1 and "their casts are kept until they change" in said[0] and "of casts" in said[0]

    monkeypatch.setattr(KeptValues, "look", lambda *_: False)
    again = megafx.parallelize(copy.deepcopy(plain), config(**options))
    for a, b in zip(found, steps(again, 3), strict=True):
        assert torch.equal(a, b)
    assert again.megafx.settled.casts.made == 0


def test_one_micro_batch_a_step_keeps_nothing() -> None:
    model = megafx.parallelize(Model(layers=1).double(), config())
    steps(model, 1)
    casts = model.megafx.settled.casts
    assert casts.made == 0 and not any("serve" in n.message for n in model.megafx.notes)
    assert not model.megafx.settled.last.context.keeps_casts


def test_every_write_is_noticed() -> None:
    model = megafx.parallelize(Model(layers=1).double(), config())
    assert unnoticed(model, batch(7), model.layers[0].up.weight) == []
    model.layers[0].up.weight = nn.Parameter(model.layers[0].up.weight.detach() * 2)
    made = model.megafx.settled.casts.made
    model(*batch(7))
    assert model.megafx.settled.casts.made == made + 1
    assert type(model.layers[0].up.weight).__mro__[1] is nn.Parameter  # and it counts its changes from now on


def test_weights_are_parameters_as_others() -> None:
    """They count their changes, and are taken wherever torch asks for the exact type."""
    model: Any = megafx.parallelize(Model(layers=1).double(), config(accumulate_allreduce_grads_in_fp32=True))
    weight = model.layers[0].up.weight
    shared = nn.Parameter(weight)
    assert type(shared) is nn.Parameter and shared.data_ptr() == weight.data_ptr() and shared.requires_grad
    assert not nn.Parameter(weight, requires_grad=False).requires_grad and type(weight.detach()) is Tensor
    assert all(type(value) is Tensor for value in model.state_dict().values())
    assert type(pickle.loads(pickle.dumps(weight))) is nn.Parameter
    copied = copy.deepcopy(model)
    assert type(copied.layers[0].up.weight) is type(weight) and copied.layers[0].up.weight is not weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        before = [model(*batch(7)) for _ in range(2)][-1]
        model.to(torch.float64)
        model.float()
        assert model(*batch(7)).dtype == torch.float32
        torch.testing.assert_close(model(*batch(7)), before.float(), rtol=1e-2, atol=1e-2)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert type(model.layers[0].up.weight) is type(weight)


def test_a_change_between_forward_and_backward_is_refused() -> None:
    model = megafx.parallelize(Model(layers=1).double(), config())
    for _ in range(2):
        model(*batch(7)).backward()
    loss = model(*batch(7))
    model.layers[0].up.weight.data.mul_(2)
    with pytest.raises(megafx.errors.UsageError, match=r"'layers.0.up.weight' was changed in place"):
        loss.backward()


def test_without_room_casts_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = megafx.parallelize(Model(layers=1).double(), config())
    monkeypatch.setattr(type(model.megafx.state), "device_bytes", lambda *_: 2**20)
    for _ in range(3):
        model(*batch(7)).backward()
    assert model.megafx.settled.casts.made == 0
    (said,) = (n.message for n in model.megafx.notes if "serve several calls" in n.message)
    assert "there is no room to keep casts" in said and "of 962.6 KiB that are to be had" in said


def test_casts_that_cuda_graphs_read_stay_where_they_are() -> None:
    """Written again once a weight has changed, and not before."""
    weight, casts = nn.Parameter(torch.ones(3)), KeptValues()
    assert not casts.look({"w": weight})

    def values(stays: bool = True) -> Tensor:
        return casts.values("key", frozenset(["w"]), lambda: [weight.detach() * 2], stays)[0]

    first = values()
    where = first.data_ptr()
    assert casts.look({"w": weight}) and values() is first and casts.made == 1
    torch.optim.SGD([weight], lr=0.1).step()  # no gradient: nothing changes, but it might
    assert values() is first and casts.made == 2
    with torch.no_grad():
        weight.add_(1)
    assert not casts.look({"w": weight})
    assert values().data_ptr() == where and torch.equal(first, weight.detach() * 2) and casts.made == 3
