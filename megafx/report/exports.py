"""The modelled step and the graph as JSON for other viewers, written without importing them.

A Chrome trace, which Perfetto and chrome://tracing show: every layer by itself. The format: "Trace Event Format" of Chromium.
Times are microseconds. Tracks: parts of the step, what the device computes and waits for, what is on the link, and the memory
of a rank. And the `GraphCollection` of Model Explorer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafx.planner.costed import CostedGraph, bytes_text
from megafx.planner.timeline import COMPUTE, SEND, WAIT, Run, Segment, StepTimes, runs
from megafx.report.curve import Curve

PARTS, DEVICE, LINK = 1, 2, 3
TRACKS = {PARTS: "parts of the step", DEVICE: "device: computes, waits", LINK: "link: collectives"}


def trace_events(costed: CostedGraph, step: StepTimes, memory: Curve, about: Mapping[str, Any]) -> dict[str, Any]:
    """about: what the trace says of itself."""
    events = [
        _complete(PARTS, f"{r.part.direction} {r.name}", "part", r.start, r.part.us, {}) for r in runs(costed, step)
    ]
    for run in runs(costed, step):
        for s in run.part.segments:
            track = LINK if s.lane == SEND else DEVICE
            start = run.start + s.start - run.part.start
            events.append(_complete(track, _name(costed, run, s), s.lane, start, s.us, _arguments(costed, s)))
    held = memory.held.items()
    for point in memory.points:
        sizes = {**dict(held), **dict(zip(memory.kinds, point[1:], strict=True))}
        events.append({"ph": "C", "pid": 1, "name": "memory (bytes)", "ts": point[0], "args": sizes})
    events.sort(key=lambda event: (event["ts"], event.get("tid", 0)))
    names = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "one rank, by megafx's cost model"}}]
    for track, name in TRACKS.items():
        names.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}})
        names.append({"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}})
    return {
        "displayTimeUnit": "ms",
        "otherData": {k: str(v) for k, v in about.items()},
        "traceEvents": [*names, *events],
    }


def _complete(
    track: int, name: str, kind: str, start: float, us: float, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(start, 3), "dur": round(us, 3)}
    return {"ph": "X", "pid": 1, "tid": track, "name": name, "cat": kind, **times, "args": dict(arguments)}


def _name(costed: CostedGraph, run: Run, segment: Segment) -> str:
    if segment.node < 0:
        what = "optimizer" if segment.node == -2 else "gradients of whole parameters"
    else:
        node = costed.nodes[segment.node]
        inside = costed.regions[node.region].layer
        module = ".".join(filter(None, [run.name if inside else "", node.module]))
        what = ": ".join(filter(None, [module, "" if segment.collective else node.label]))
    if segment.collective:
        what = f"{segment.collective} {what}"
    return f"wait for {what}" if segment.lane == WAIT else what


def _arguments(costed: CostedGraph, segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {"bytes sent": segment.sent} if segment.sent else {}
    if segment.node < 0:
        return found
    node = costed.nodes[segment.node]
    found |= {"placements": node.placements, "value": node.value, "source": node.source}
    if segment.lane == COMPUTE:
        found |= {"style": node.style, "weight": node.weight}
    return {key: value for key, value in found.items() if value}


# -- Model Explorer

COLOURS = {"S": "#a8dcc3", "R": "#f9c995", "I": "#cbd7e3", "P": "#d0b8f2"}  # as in page.css
SENDS = "#f2c230"


def graph_collection(costed: CostedGraph, label: str = "megafx plan") -> dict[str, Any]:
    """One graph: a node for each op and collective; the module path is the namespace, so that modules fold."""
    nodes = []
    for number, op in enumerate(costed.nodes):
        region = costed.regions[op.region]
        layer = f"{region.name} x {region.times}" if region.times > 1 else region.name
        namespace = "/".join([layer, *filter(None, op.module.split("."))])
        attributes = {
            "placements": op.placements,
            "style": op.style,
            "value": op.value,
            "weight": op.weight,
            "forward (us)": "" if op.move else f"{op.us:.1f}",
            "kept for backward": bytes_text(op.kept) if op.kept else "",
            "source": op.source,
            "why": "\n".join(op.why),
            "instead": "\n".join(op.alternatives),
        }
        move = op.move or op.inner
        if move is not None:
            for way, what in (("forward", move.forward), ("backward", move.backward)):
                size = getattr(move, f"{way}_bytes")
                attributes[f"{way} collective"] = f"{what} {bytes_text(size)}" if size else ""
        nodes.append(
            {
                "id": str(number),
                "label": op.label,
                "namespace": namespace,
                "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
                "incomingEdges": [
                    {"sourceNodeId": str(a), "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
                    for i, a in enumerate(a for a, b in costed.edges if b == number)
                ],
                "style": {"backgroundColor": SENDS if op.move else COLOURS[op.out]},
            }
        )
    return {"label": label, "graphs": [{"id": "plan", "nodes": nodes}]}
