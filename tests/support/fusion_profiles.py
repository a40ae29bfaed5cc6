"""Measured fusions that tests make up."""

from __future__ import annotations

from megafx.planner.fusion_profile import MODES, FusionProfile, Measured, Times

FAST, SLOW = (1.0, 2.0), (2.0, 1.0)  # fused, unfused


def measured(*patterns, small=SLOW, large=SLOW, needs=()):
    rows = [Times(n, dict.fromkeys(MODES, pair)) for n, pair in ((1_000, small), (1_000_000, large))]
    return Measured(patterns, needs, tuple(rows))


def profile(**fusions):
    return FusionProfile("a test's device", ("nowhere",), "made up", fusions)


def saved(path, **fusions):
    profile(**fusions).save(path)
    return str(path)
