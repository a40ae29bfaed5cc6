"""Covers: megafx/report/curve.py and `runs` of steps.py, on hand-made pictures."""

from __future__ import annotations

from megafx.analysis.memory import Memory, Point, Timeline
from megafx.planner.costed import CostedGraph, CostedOp, Region
from megafx.planner.hardware import Hardware
from megafx.planner.timeline import runs, timeline
from megafx.report.curve import SHOWN, curve

HW = Hardware("made", {"bfloat16": 1e12}, 1e12, 1e9, 0.0, "made")


def costed() -> CostedGraph:
    """Two kinds of layers that alternate, each of two ops of 10 us (of the second kind: 20 us), then a head of 5 us."""
    nodes = [
        CostedOp(f"n{i}", i // 2, "abcd"[i], "I", "op", us=10.0 * (1 + i // 2), back_us=10.0, kept=100)
        for i in range(4)
    ]
    nodes.append(CostedOp("n4", 2, "head", "I", "op", us=5.0, back_us=5.0))
    regions = [Region("l.[0,2]", 2, True, [0, 1]), Region("l.[1,3]", 2, True, [2, 3]), Region("after", 1, False, [4])]
    order = [((f"l.{i}",), i % 2) for i in range(4)] + [(("head",), 2)]
    return CostedGraph(regions, nodes, [(0, 1), (2, 3)], {"parameters": 1000}, None, 7.0, True, order, HW, 1, False)


def test_layers_that_alternate_run_in_their_order() -> None:
    found = runs(costed(), timeline(costed()))
    forward = [(run.name, run.start) for run in found if run.part.direction == "forward"]
    assert forward == [("l.0", 0.0), ("l.1", 20.0), ("l.2", 60.0), ("l.3", 80.0), ("after", 120.0)]
    backward = [(run.name, run.start) for run in found if run.part.direction == "backward"]
    assert backward[0] == ("after", 125.0) and [name for name, _ in backward[1:5]] == ["l.3", "l.2", "l.1", "l.0"]
    assert found[-1].start + found[-1].part.us == timeline(costed()).total_us


def test_what_a_plan_keeps_rises_op_by_op_and_falls_again() -> None:
    found = curve(costed(), timeline(costed()), None)
    assert found.points[:4] == [(0.0, 0), (10.0, 100), (20.0, 200), (40.0, 300)]
    assert max(size for _, size in found.points) == 800 and found.peak == 1800 and not found.predicted
    assert found.points[-2:] == [(210.0, 0), (217.0, 0)]


def memory(points: list[Point]) -> Memory:
    graph = Timeline(tuple(points), (), 0, 0)
    return Memory(1000, 50, 2000, 0, 10, 0, 1, 30, graph, Timeline((Point("x", "head", 5, 3, 2),), (), 0, 0))


def test_nodes_are_at_the_times_of_their_modules() -> None:
    """Also of modules inside of those; one that passes moved far is between its neighbours, as is one of no module."""
    modules = ["l.0.a", "l.0.b.inner", "l.3.d", "", "l.1.c", "l.1.c", "l.2", "l.3.d", "head", "elsewhere"]
    points = [Point(f"p{k}", module, 100 + k, 0, 40) for k, module in enumerate(modules)]
    found = curve(costed(), timeline(costed()), memory(points))
    sizes = {point[0]: point[1:] for point in found.points}
    assert found.kinds == ["kept for backward", "gradients", "working memory"] and found.predicted
    assert found.held == {"parameters": 1000, "optimizer state": 2000, "inputs, workspace of cuBLAS": 11}
    times = [point[0] for point in found.points]
    assert times == sorted(times) and {0.0, 10.0, 20.0, 100.0, 120.0} <= set(times)
    assert sizes[100.0] == (40, 0, 67) and sizes[120.0] == (40, 0, 68), "l.3.d, and the head"
    assert found.points[-2:] == [(210.0, 0, 50, 30), (217.0, 0, 50, 30)] and (3, 2, 0) in sizes.values()
    assert found.peak == 3011 + 109


def test_a_long_curve_keeps_its_peaks() -> None:
    points = [Point(f"p{k}", "", 10**6 if k == 4321 else k, 0, 0) for k in range(10_000)]
    found = curve(costed(), timeline(costed()), memory(points))
    assert len(found.points) <= 2 * SHOWN + 1 and found.peak == 3011 + 10**6
