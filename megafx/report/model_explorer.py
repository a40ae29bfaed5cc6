"""The JSON of Model Explorer (`GraphCollection`), for those who have that viewer; written without importing it."""

from __future__ import annotations

from typing import Any

from megafx.planner.costed import CostedGraph, bytes_text

COLOURS = {"S": "#a8dcc3", "R": "#f9c995", "I": "#cbd7e3", "P": "#d0b8f2"}  # as in page.css
SENDS = "#f2c230"


def graph_collection(picture: CostedGraph, label: str = "megafx plan") -> dict[str, Any]:
    """One graph: a node for each op and collective; the module path is the namespace, so that modules fold."""
    nodes = []
    for number, drawn in enumerate(picture.nodes):
        region = picture.regions[drawn.region]
        layer = f"{region.name} x {region.times}" if region.times > 1 else region.name
        namespace = "/".join([layer, *filter(None, drawn.module.split("."))])
        attributes = {
            "placements": drawn.placements,
            "style": drawn.style,
            "value": drawn.value,
            "weight": drawn.weight,
            "forward (us)": "" if drawn.move else f"{drawn.us:.1f}",
            "kept for backward": bytes_text(drawn.kept) if drawn.kept else "",
            "source": drawn.source,
            "why": "\n".join(drawn.why),
            "instead": "\n".join(drawn.alternatives),
        }
        move = drawn.move or drawn.inner
        if move is not None:
            for way, what in (("forward", move.forward), ("backward", move.backward)):
                size = getattr(move, f"{way}_bytes")
                attributes[f"{way} collective"] = f"{what} {bytes_text(size)}" if size else ""
        nodes.append(
            {
                "id": str(number),
                "label": drawn.label,
                "namespace": namespace,
                "attrs": [{"key": key, "value": value} for key, value in attributes.items() if value],
                "incomingEdges": [
                    {"sourceNodeId": str(a), "sourceNodeOutputId": "0", "targetNodeInputId": str(i)}
                    for i, a in enumerate(a for a, b in picture.edges if b == number)
                ],
                "style": {"backgroundColor": SENDS if drawn.move else COLOURS[drawn.out]},
            }
        )
    return {"label": label, "graphs": [{"id": "plan", "nodes": nodes}]}
