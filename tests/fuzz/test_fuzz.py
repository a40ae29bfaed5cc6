"""Covers: everything between a model and its numbers, on random transformer-like models (fuzz/grammar.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings

sys.path.append(str(Path(__file__).parent))
from grammar import CASE, Case
from run import PLAIN, outcome


def check(case: Case) -> None:
    what, text = outcome(case)
    assert what in ("exact", "not a model"), (what, text)


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
