"""The report as one page: HTML with its data, style and script inside, so that it opens offline.

page.html is its frame and page.css its style; the script is page.js and the files after it in SCRIPTS, as one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from megafx.planner.timeline import runs

SIDES = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body style="max-width: none">
<h1>{title}</h1>
<pre class="code">{text}</pre>
<div class="sides"><iframe srcdoc="{before}"></iframe><iframe srcdoc="{after}"></iframe></div>
</body></html>
"""
SCRIPTS = ("page.js", "charts.js", "texts.js", "tools.js")
OPENS, CLOSES = '<script type="application/json" id="data">', "</script>"


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def page(data: dict[str, Any]) -> str:
    """The page of a report's data (`Report.page_data`)."""
    # so that no text of the model ends the script
    text = json.dumps(_packed(data), separators=(",", ":")).replace("<", "\\u003c")
    title, about = (html.escape(data[key]) for key in ("title", "about"))
    script = "\n".join(map(_asset, SCRIPTS))
    return _asset("page.html").format(title=title, about=about, style=_asset("page.css"), data=text, script=script)


def data_of(text: str) -> dict[str, Any]:
    """The data inside of a page; raises ValueError where there is none."""
    _, found, rest = text.partition(OPENS)
    if not found:
        raise ValueError("this is no page of megafx")
    data: dict[str, Any] = json.loads(rest.partition(CLOSES)[0])
    texts = data.pop("texts")
    for node in data["nodes"]:
        node.update({key: _each(node[key], texts.__getitem__) for key in REPEATED})
    return data


REPEATED = ("source", "why", "alternatives")  # of nodes: many have the same texts, so the page holds each once


def _packed(data: dict[str, Any]) -> dict[str, Any]:
    texts: dict[str, int] = {}
    number = lambda text: texts.setdefault(text, len(texts))
    nodes = [{**node, **{key: _each(node[key], number) for key in REPEATED}} for node in data["nodes"]]
    return {**data, "nodes": nodes, "texts": list(texts)}


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [change(item) for item in value] if isinstance(value, (list, tuple)) else change(value)


def side_by_side(before: dict[str, Any], after: dict[str, Any], text: str) -> str:
    """Two reports in one page, below what differs between them."""
    sides = {"before": before, "after": after}
    pages = {name: html.escape(page({**data, "title": f"{name}: {data['title']}"})) for name, data in sides.items()}
    return SIDES.format(title="two plans", style=_asset("page.css"), text=html.escape(text or "no difference"), **pages)


def drawn_data(costed: Any, step: Any) -> dict[str, Any]:
    """The parts of a page's data that are drawn."""
    data = asdict(costed)
    for node in data["nodes"]:
        node["flops"] = round(node["flops"])
    parts = []
    for p in step.parts:
        segments = [[s.lane, s.node, s.start, s.us, s.collective, s.sent] for s in p.segments]
        parts.append({**asdict(p), "segments": segments})
    order = [
        [r.name, r.part.direction if r.part.region >= 0 else "optimizer", round(r.start, 3)] for r in runs(costed, step)
    ]
    return {
        "regions": data["regions"],
        "nodes": data["nodes"],
        "edges": data["edges"],
        "memory": data["memory"],
        "runs": order,
        "step": {**{k: v for k, v in asdict(step).items() if k != "parts"}, "parts": parts},
    }
