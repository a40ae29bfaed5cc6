"""Covers: megafx/analysis/layers.py."""

from __future__ import annotations

import pytest
from torch import nn

from megafx.analysis.layers import Layers


def layers(*modules: tuple[str, nn.Module]) -> set[str]:
    root = nn.Module()
    for name, module in modules:
        root.add_module(name, module)
    return set(Layers.of({n: p.shape for n, p in root.named_parameters()}).paths)


def block(h: int = 4, *, extra: int = 0, experts: int = 0) -> nn.Module:
    made = nn.Module()
    made.norm, made.attn = nn.LayerNorm(h), nn.Sequential(nn.Linear(h, h), nn.Linear(h, h))
    if extra:
        made.bias_table = nn.Embedding(extra, h)
    if experts:
        made.experts = nn.ModuleList([nn.Sequential(nn.Linear(h, h), nn.Linear(h, h)) for _ in range(experts)])
    return made


def stack(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleList(blocks)


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"embed": nn.Embedding(9, 4), "h": stack(block(), block(), block())}, {"h.0", "h.1", "h.2"}),
        ({"h": stack(block())}, {"h.0"}),
        ({"h": stack(block(extra=3), block(experts=2), block(experts=2))}, {"h.0", "h.1", "h.2"}),
        ({"a": stack(block(4), block(4)), "b": stack(block(6), block(6))}, {"a.0", "a.1", "b.0", "b.1"}),
        # stages of unlike sizes have layers of their own; a backbone and a head are no layers
        ({"s": stack(stack(block(4), block(4)), stack(block(6), block(6)))}, {"s.0.0", "s.0.1", "s.1.0", "s.1.1"}),
        ({"m": nn.Sequential(nn.Sequential(block(), block()), nn.Linear(4, 4))}, {"m.0.0", "m.0.1"}),
        ({"block1": block(), "block2": block(), "head": nn.Linear(4, 9)}, {"block1", "block2"}),
        ({"one": block()}, set()),
        ({"m": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))}, set()),
    ],
)
def test_layers_are_found_by_structure(modules, expected):
    assert layers(*modules.items()) == expected


def test_what_is_outside_of_layers_goes_by_its_place():
    found = Layers(frozenset({"enc.0", "enc.1", "dec.0"}))
    used = ["embed", "enc.0.norm", "enc.1.attn.q", "enc.1", "enc_norm", "embed", "dec.0.x", "norm", "head"]
    names = ["before the layers", "enc.0", "enc.1", "enc.1", *["after enc.1"] * 2, "dec.0", *["after dec.0"] * 2]
    assert [*found.regions(used)] == names
    assert [*Layers(frozenset()).regions(["up", "down"])] == ["up", "down"]
    assert found.layer_of("enc.10.norm") == ""
