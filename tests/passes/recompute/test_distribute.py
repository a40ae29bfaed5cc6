"""Covers: passes/recompute/distribute.py."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import Case, chosen

from megafx.checks.simulate import Logical
from megafx.compiler.compiled import Compiled
from megafx.config import Config
from megafx.errors import ConfigError

FULL: dict[str, Any] = {"recompute_granularity": "full"}
SPREAD = {**FULL, "distribute_saved_activations": True}
LAYERS, BATCH, SEQ = 3, 2, 16


@functools.cache
def case() -> Case:
    return Case.of("gpt2", layers=LAYERS, dropout=0.1)


@functools.cache
def plain(t: int, sp: bool | str) -> tuple[Compiled, Logical]:
    made = case().compile(t, sequence_parallel=sp)
    return made, case().run(made, case().inputs(BATCH, SEQ))


def kept(made: Compiled) -> int:
    assert made.program.recomputed is not None
    return made.program.recomputed.kept


@pytest.mark.parametrize("t", [2, 3, 4])
def test_ranks_keep_parts_of_the_inputs_of_layers(t: int) -> None:
    made, wanted = plain(t, False)
    whole, parts = chosen(made, **FULL), chosen(made, **SPREAD)
    found = case().run(parts, case().inputs(BATCH, SEQ))
    for name, value in (*wanted.outputs.items(), *wanted.gradients.items()):
        other = found.outputs[name] if name in wanted.outputs else found.gradients[name]
        assert torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value, name
    sizes = made.program.sizes
    tokens = [sizes.workload(sizes.of_expr(s)) for s in sizes.symbols.values()]
    width = case().model.config.n_embd
    one = tokens[0] * tokens[1] * width * 8  # bytes of one layer's input
    count = LAYERS + 1  # the sum behind the last layer is the input of its norm
    assert kept(whole) - kept(parts) == count * (one - one // t)
    gathers = [sum("all_gather" in c.collective for c in x.communication({})) for x in (whole, parts)]
    assert gathers[1] == gathers[0] + count


def test_with_offload_too() -> None:
    made, wanted = plain(2, False)
    both = chosen(made, **SPREAD, cpu_offloading=True)
    found = case().run(both, case().inputs(BATCH, SEQ))
    assert all(torch.equal(found.gradients[n], g) for n, g in wanted.gradients.items())
    assert both.program.recomputed is not None and both.program.recomputed.offloaded > 0


def test_where_there_is_nothing_to_spread() -> None:
    for t, sp in ((1, False), (2, True)):
        made, _ = plain(t, sp)
        found = chosen(made, **{**SPREAD, "sequence_parallel": "auto"})
        assert kept(found) == kept(chosen(made, **FULL))


def test_other_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="distribute_saved_activations"):
        Config(distribute_saved_activations=True)
    with pytest.raises(ConfigError, match="keeps slices anyway"):
        Config(**SPREAD, sequence_parallel=True)
