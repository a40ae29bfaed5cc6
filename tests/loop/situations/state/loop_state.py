"""Python state that is changed between calls, and state that forward changes itself."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from loop import Loop, situation
from torch import nn
from torch.nn import functional as F

import megafx

TEMPERATURE = 1.0
OPTIONS = {"gain": 1.0}
STEP = 0


def _squash(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * TEMPERATURE * OPTIONS["gain"]


class Options:
    """A config object as many projects have one."""

    offset = 0.0

    def __init__(self) -> None:
        self.alpha, self.residual = 1.0, True
        self.more = types.SimpleNamespace(beta=1.0)


class Block(nn.Module):
    sharpness = 1.0

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.options, self.activation, self.weights, self.extra = options, _squash, [1.0, 0.5], None

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.sharpness

    @property
    def doubled(self) -> float:
        return 2 * self.options.alpha

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.down(self.activation(self.up(self.norm(x)))) * self.doubled * self.options.more.beta
        h = h + self.options.offset
        for weight in self.weights:
            h = h + weight * self.mix(h)
        if self.extra is not None:
            h = h * self.extra
        if hasattr(self, "late"):
            h = h - self.late
        return x + h if self.options.residual else h


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = Options()
        self.blocks = nn.ModuleList([Block(self.options), Block(self.options)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _step(loop: Loop, model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    loss = model(x)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/115774", like="layers_are_replaced")
def attributes_are_changed_between_calls(loop: Loop) -> None:
    model, x = loop.model(Net()), torch.randn(4, 8)
    first: Any = model.blocks[0]
    changes = [
        lambda: None,
        lambda: setattr(model.options, "alpha", 0.5),
        lambda: setattr(model.options, "alpha", 0.25),
        lambda: setattr(model.options, "residual", False),
        lambda: setattr(first, "sharpness", 3.0),
        lambda: setattr(first.norm, "eps", 0.5),
        lambda: setattr(first, "extra", 0.7),
        lambda: setattr(first, "activation", F.silu),
    ]
    for change in changes:
        change()
        _step(loop, model, x)


@situation("https://github.com/huggingface/trl/issues/639", like="layers_are_replaced")
def containers_and_late_attributes_are_changed(loop: Loop) -> None:
    model, x = loop.model(Net()), torch.randn(4, 8)
    first: Any = model.blocks[0]
    changes = [
        lambda: first.weights.__setitem__(1, 0.75),
        lambda: first.weights.append(0.1),
        lambda: setattr(first, "weights", [0.3]),
        lambda: setattr(model.options.more, "beta", 2.0),
        lambda: setattr(first, "late", 0.25),
        lambda: delattr(first, "late"),
        lambda: vars(first).update(sharpness=2.0),
        lambda: setattr(model.options, "offset", 0.25),
        lambda: setattr(first, "options", Options()),
    ]
    for change in changes:
        change()
        _step(loop, model, x)


@situation("https://github.com/pytorch/pytorch/issues/115774", like="layers_are_replaced")
def globals_classes_and_methods_are_changed(loop: Loop) -> None:
    global TEMPERATURE
    model, x = loop.model(Net()), torch.randn(4, 8)
    _step(loop, model, x)
    TEMPERATURE = 0.5
    _step(loop, model, x)
    OPTIONS["gain"] = 2.0
    _step(loop, model, x)
    mix = Block.mix
    Block.sharpness = 0.5
    _step(loop, model, x)
    Block.mix = lambda self, x: x.sin()  # type: ignore[method-assign]
    _step(loop, model, x)
    Block.sharpness, Block.mix, TEMPERATURE, OPTIONS["gain"] = 1.0, mix, 1.0, 1.0  # type: ignore[method-assign]
    _step(loop, model, x)


class Branches(nn.Module):
    """What the branches of a dict give, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)})
        self.stack = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.scales = {"a": 1.0, "b": 2.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([scale * self.branches[name](x) for name, scale in self.scales.items()], -1)
        return self.stack(both).square().mean()


@situation(
    "https://github.com/pytorch/pytorch/issues/115774",
    slow=(2,),
    like="forward_asks_whether_its_argument_is_contiguous",
)
def a_dict_is_put_into_another_order(loop: Loop) -> None:
    model, x = loop.model(Branches()), torch.randn(4, 8)
    _step(loop, model, x)
    model.scales["a"] = model.scales.pop("a")
    _step(loop, model, x)
    model.scales = dict(sorted(model.scales.items()))
    _step(loop, model, x)
    layers: Any = model.stack._modules  # what Sequential goes through
    layers["0"] = layers.pop("0")
    _step(loop, model, x)


class Annealed(nn.Module):
    """A coefficient that changes at every call, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta, self.target = nn.Linear(8, 8), 0.0, torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x)
        return (out - self.target).square().mean() + self.beta * out.abs().mean()


@situation("https://github.com/huggingface/peft/issues/2860", like="descriptors_compute_what_forward_reads")
def a_coefficient_is_annealed(loop: Loop) -> None:
    model, x = loop.model(Annealed()), torch.randn(4, 8)
    for i in range(6):
        model.beta = i / 10
        model.target = torch.full((8,), float(i))
        _step(loop, model, x)
    if not loop.eager:
        assert model.megafx.captures <= 3, "one graph serves all values"


@situation("https://discuss.pytorch.org/t/dropout-rate-changing-during-training/112158")
def dropout_is_switched_by_its_rate(loop: Loop) -> None:
    model, x = loop.model(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 1))), torch.randn(4, 8)
    for p in (0.0, 1.0, 0.0):
        model[1].p = p
        model.zero_grad()
        loss = model(x).mean()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)


class Recording(nn.Module):
    """Leaves a loss of its own, statistics and a counter behind."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norms: list[torch.Tensor] = []
        self.seen: dict[str, Any] = {}
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        self.aux = h.square().mean()
        self.norms.append(h.norm().detach())
        self.seen["mean"] = h.mean()
        self.seen["rows"] = x.shape[0]
        self.calls += 1
        return self.down(h).square().mean()


@situation("https://github.com/NVIDIA/Megatron-LM/issues/1652", like="functions_closures_and_globals_count")
def a_loss_that_forward_stores_is_added(loop: Loop) -> None:
    model = loop.model(Recording())
    for rows in (4, 5, 3):
        model.zero_grad()
        loss = model(torch.randn(rows, 8))
        (loss + 0.1 * model.aux + model.seen["mean"]).backward()
        loop.see(loss=loss, aux=model.aux, norms=list(model.norms), seen=dict(model.seen), calls=model.calls)
        loop.see_gradients(model)
    model.norms.clear()
    model(torch.randn(2, 8))
    loop.see(norms=list(model.norms), calls=model.calls)


class Scheduled(nn.Module):
    """A schedule that forward computes from its own counter, and a global one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global STEP
        warm = min(1.0, (self.steps + 1) / 4)
        self.steps += 1
        STEP += 1
        loss = self.linear(x).square().mean() * warm
        if self.steps % 3 == 0:
            loss = loss + self.linear.weight.square().sum()
        return loss


@situation("https://discuss.pytorch.org/t/kl-annealing-in-vae/98432")
def forward_counts_its_steps(loop: Loop) -> None:
    global STEP
    STEP = 0
    model, x = loop.model(Scheduled()), torch.randn(4, 8)
    for _ in range(7):
        _step(loop, model, x)
        loop.see(steps=model.steps, step=STEP)
    if not loop.eager:
        assert model.megafx.captures <= 5


class Memory(nn.Module):
    """Passes a state on to its next call."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.linear, self.state, self.detached = nn.Linear(8, 8), None, detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if self.state is not None:
            h = h + torch.tanh(self.state)
        self.state: torch.Tensor | None = h.detach() if self.detached else h
        return h.square().mean()


@situation("https://github.com/kimiyoung/transformer-xl", like="a_state_in_an_object_is_passed_on")
def a_state_is_passed_on_to_the_next_call(loop: Loop) -> None:
    model = loop.model(Memory(detached=True))
    for i in range(4):
        _step(loop, model, torch.randn(4, 8))
        if i == 2:
            model.state = None


@situation(
    "https://pytorch.org/tutorials/intermediate/seq2seq_translation_tutorial.html",
    like="a_state_in_an_object_is_passed_on",
)
def gradients_flow_through_a_state(loop: Loop) -> None:
    model = loop.model(Memory(detached=False))
    for _ in range(2):
        model.zero_grad()
        model.state = None
        (model(torch.randn(4, 8)) + model(torch.randn(4, 8)) + model(torch.randn(4, 8))).backward()
        loop.see_gradients(model)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        self.active = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.heads[self.active](torch.relu(self.body(x))).square().mean()


@situation("https://github.com/huggingface/peft/issues/1045", like="forward_asks_whether_its_argument_is_contiguous")
def one_of_several_heads_is_chosen(loop: Loop) -> None:
    model = loop.model(Heads())
    for active in (0, 1, 0, 1):
        model.active = active
        _step(loop, model, torch.randn(4, 8))
    if not loop.eager:
        assert model.megafx.captures == 2


class Placed(nn.Module):
    """Reads what each rank sets for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rank, self.scale = nn.Linear(8, 8), 0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank < 100:  # for a log, say
            self.last_rank = self.rank
        return self.linear(x).square().mean() * self.scale


@situation("https://github.com/huggingface/accelerate/issues/2184", ranks=(2,))
def ranks_hold_numbers_of_their_own(loop: Loop) -> None:
    model, x = loop.model(Placed()), torch.randn(4, 8)
    model.rank = 0 if loop.eager else torch.distributed.get_rank()
    _step(loop, model, x)
    assert model.last_rank == model.rank
    if not loop.eager:
        model.scale = 1.0 + model.rank
        with pytest.raises(megafx.MegafxError):  # not another loss on each rank
            model(x)
