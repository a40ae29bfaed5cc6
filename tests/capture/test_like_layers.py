"""Covers: capture/like_layers.py. A capture with copies of layers is the one without: graph, lines, modules, guards."""

import re
import types

import pytest
import torch
import zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

from megafx.capture import like_layers
from megafx.capture.export import capture_call
from megafx.capture.followed import Followed
from megafx.ir import dump
from megafx.runtime.guards import DirectCall, guard_modules

STEPS = 0


class Block(nn.Module):
    def __init__(self, index: int, **facts) -> None:
        super().__init__()
        self.index, self.scale, self.sizes, self.norm = index, 2.0, {"n": [4, 4]}, nn.LayerNorm(4)
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)
        vars(self).update(facts)

    def forward(self, x, bias=None):
        x = x + self.dropout(self.linear(self.norm(x))).view(*x.shape[:2], *self.sizes["n"][1:]) * self.scale
        return x if bias is None else x + bias


class Numbered(Block):
    def forward(self, x, bias=None):
        return super().forward(x, bias) * self.index


class Counting(Block):
    def forward(self, x, bias=None):
        global STEPS
        STEPS += 1
        return super().forward(x, bias) * STEPS


class Listing(Block):
    def forward(self, x, bias=None):
        self.seen.append(x.mean())
        return super().forward(x, bias)


class Asking(Block):
    def forward(self, x, bias=None):
        return super().forward(x, bias) * self.shared.get("factor", 1)


class Writing(Block):
    def forward(self, x, bias=None):
        return super().forward(x.mul_(2), bias)


class Model(nn.Module):
    def __init__(self, blocks, call=lambda model, i, block, x: block(x)) -> None:
        super().__init__()
        self.blocks, self.call_block, self.shared = nn.ModuleList(blocks), call, {}
        self.start = nn.Parameter(torch.ones(4))
        for block in blocks:
            vars(block).update(shared=self.shared)

    def forward(self, x):
        x = x * self.start
        for i, block in enumerate(self.blocks):
            x = self.call_block(self, i, block, x)
        self.shared.clear()
        return x.sum()


def blocks(kind=Block, count=3, **facts):
    return [kind(i, **facts) for i in range(count)]


def other(index, **facts):
    made = blocks()
    vars(made[index]).update(facts)
    return made


def sets(model, i, block, x):
    model.shared["factor"] = i
    return block(x)


def hooked():
    made = blocks()
    made[1].linear.register_forward_hook(lambda module, args, output: output * 2)
    return made


def recorded():
    made, seen = blocks(), []
    made[1].linear.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    return made


def guarded(model):
    """As on several ranks, where a direct call of a module is a graph of its own."""

    def run(*call):
        raise AssertionError(call)

    guard_modules(model, lambda: True, run)
    assert isinstance(vars(model.blocks[1])["forward"], DirectCall)
    return model


def with_a_forward():
    """The user has put a forward on one of them."""
    made = blocks()
    made[1].forward = types.MethodType(lambda block, x, bias=None: type(block).forward(block, x) * 2, made[1])
    return made


def seen_in_a_list():
    return blocks(Listing, seen=[])


MODELS = {  # name -> (model, how many calls are copies; those of a list and of a counter are thrown away at the end)
    "alike": (lambda: Model(blocks()), 2),
    "one again": (lambda: Model(blocks(count=2), lambda model, i, block, x: block(block(x))), 3),
    "two kinds in turn": (lambda: Model([b for _ in range(3) for b in (Block(0), Block(0, scale=3.0))]), 4),
    "another argument": (lambda: Model(blocks(), lambda model, i, block, x: block(x, x if i == 1 else None)), 1),
    "on several ranks": (lambda: guarded(Model(blocks())), 2),
    "on several ranks, a forward on one": (lambda: guarded(Model(with_a_forward())), 1),
    "checkpoints": (lambda: Model(blocks(), lambda model, i, block, x: checkpoint(block, x, use_reentrant=False)), 2),
    "another number": (lambda: Model(other(1, scale=3.0)), 1),
    "another item": (lambda: Model(other(1, sizes={"n": [5, 4]})), 1),
    "in evaluation": (lambda: Model([b.train(i != 1) for i, b in enumerate(blocks())]), 1),
    "another dropout": (lambda: Model(other(2, dropout=nn.Dropout(0.5))), 1),
    "frozen": (lambda: Model([b.requires_grad_(i != 1) for i, b in enumerate(blocks())]), 1),
    "its number": (lambda: Model(blocks(Numbered)), 0),
    "a global counter": (lambda: Model(blocks(Counting)), 2),
    "a list": (lambda: Model(seen_in_a_list()), 2),
    "a dict of the caller's": (lambda: Model(blocks(Asking), sets), 0),
    "a write": (lambda: Model(blocks(Writing)), 0),
    "a hook": (lambda: Model(hooked()), 1),
    "a hook in each call": (lambda: Model(recorded()), 1),
    "no gradients": (lambda: Model(blocks(), lambda model, i, block, x: torch.no_grad()(block)(x) if i == 1 else block(x)), 0),
}  # fmt: skip


def captured(model, monkeypatch, *args, **kwargs):
    """(graph with the user's lines, names of what is guarded, how many calls were copies)"""
    made = []
    plain = like_layers._Trace.copy
    with monkeypatch.context() as patch:
        patch.setattr(like_layers._Trace, "copy", lambda *args: made.append(1) or plain(*args))
        program = capture_call(model, args, kwargs)
    text = re.sub(r"@\d+'", "'", dump.text(program, details=True))  # a border's number: of how many captures it was in
    return text, sorted(place.name for place, _ in program.call.state.guards), len(made)


def the_same_without(model, monkeypatch, *args, **kwargs):
    """How many calls are copies, in a capture that is the same without."""
    text, guards, copies = captured(model, monkeypatch, *args, **kwargs)
    monkeypatch.setattr(Followed, "each_layer", True)
    assert (text, guards, 0) == captured(model, monkeypatch, *args, **kwargs)
    return copies


@pytest.mark.parametrize(("model", "copies"), MODELS.values(), ids=MODELS)
def test_copies_are_what_layers_would_trace(model, copies, monkeypatch):
    found = the_same_without(model(), monkeypatch, torch.randn(3, 5, 4))
    assert found == copies and STEPS == 0


@pytest.mark.parametrize("name", ["llama", "nanogpt", "bert", "t5"])
def test_models(name, monkeypatch):
    model, inputs = zoo.build(name, layers=3)
    assert the_same_without(model, monkeypatch, **inputs(2, 6)) >= 2
