"""Covers: everything between a model and its numbers, on random transformer-like models (fuzz/grammar.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

sys.path.append(str(Path(__file__).parent))
from grammar import CASE, EVENTS, HEADS, LOSSES, MLPS, POSITIONS, PROJECTIONS, RESIDUALS, SCORES, VIEWS, Case
from run import PLAIN, drawn, outcome


def check(case: Case) -> None:
    what, text = outcome(case)
    assert what in ("exact", "not a model"), (what, text)


def test_cases_differ_and_have_everything() -> None:
    """State between calls, changed parameters, other losses: a list of cases that lacks some of it finds less."""
    cases = drawn(150, 0)
    assert len({*cases}) == 150 and drawn(150, 0) == cases
    blocks = [block for case in cases for block in case.blocks]
    attentions = [block.attention for block in blocks if block.attention]
    missing = {*EVENTS, *VIEWS, *MLPS, *RESIDUALS} - {event for case in cases for event in case.events}
    missing -= {name for block in blocks for name in (block.view, block.mlp.kind, block.residual)}
    missing |= {*PROJECTIONS, *SCORES} - {name for each in attentions for name in (each.projection, each.scores)}
    missing |= {*HEADS, *LOSSES, *POSITIONS} - {name for c in cases for name in (c.head, c.loss, c.position)}
    assert not missing


@settings(max_examples=1, phases=[Phase.generate], **(PLAIN | {"derandomize": True}))
@given(CASE)
def test_some_random_models(case: Case) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=60, phases=[Phase.generate, Phase.shrink], **PLAIN)
@given(CASE)
def test_more_random_models(case: Case) -> None:
    """Others each time; hypothesis prints the smallest that fails."""
    check(case)
