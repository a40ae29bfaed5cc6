"""The report as one page: HTML with its data, style and script inside, so that it opens offline. The script is page.js."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

BODY = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body>
<h1>{title}</h1>
<dl id="facts"></dl>
<h2>The model</h2>
<p class="told">Layers that are alike are drawn once. Click to look inside; hover over a box for its cost, its line of code,
what was chosen and why, and what else it could be. Rounded boxes are collectives.</p>
<p class="legend" id="legend"></p>
<div id="path"></div>
<div id="graph"><div id="drawing"></div><div id="about"></div></div>
<h2>A step</h2>
<p class="told">By the cost model, of one rank: it computes (in the colours above), waits for a collective (red), and sends
(yellow). Layers that are alike are drawn once, with their number.</p>
<div id="step"></div>
<h2>Memory of a rank</h2>
<p class="told">Parameters and gradients follow from the plan; moments are those of AdamW in the parameters' dtype. What is kept
for backward is at most this, since fused ops compute some of it again.</p>
<div id="memory"></div>
<div id="texts"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body></html>
"""
SIDES = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{style}</style></head><body style="max-width: none">
<h1>{title}</h1>
<pre class="code">{text}</pre>
<div class="sides"><iframe srcdoc="{before}"></iframe><iframe srcdoc="{after}"></iframe></div>
</body></html>
"""
OPENS, CLOSES = '<script type="application/json" id="data">', "</script>"


@cache
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def page(data: dict[str, Any], title: str = "megafx plan") -> str:
    """The page of a report's data (`Report.page_data`)."""
    text = json.dumps(data, separators=(",", ":")).replace(
        "<", "\\u003c"
    )  # so that no text of the model ends the script
    style, script = _asset("page.css"), _asset("page.js")
    return BODY.format(title=html.escape(title), style=style, data=text, script=script)


def data_of(text: str) -> dict[str, Any]:
    """The data inside of a page; raises ValueError where there is none."""
    _, found, rest = text.partition(OPENS)
    if not found:
        raise ValueError("this is no page of megafx")
    data: dict[str, Any] = json.loads(rest.partition(CLOSES)[0])
    return data


def side_by_side(before: dict[str, Any], after: dict[str, Any], text: str) -> str:
    """Two reports in one page, below what differs between them."""
    pages = {"before": html.escape(page(before, "before")), "after": html.escape(page(after, "after"))}
    return SIDES.format(title="two plans", style=_asset("page.css"), text=html.escape(text or "no difference"), **pages)


def picture_data(picture: Any, step: Any) -> dict[str, Any]:
    """The parts of a page's data that are drawn."""
    data = asdict(picture)
    for node in data["nodes"]:
        node["flops"] = round(node["flops"])
    parts = [{**asdict(p), "segments": [[s.lane, s.node, s.start, s.us] for s in p.segments]} for p in step.parts]
    return {
        "regions": data["regions"],
        "nodes": data["nodes"],
        "edges": data["edges"],
        "memory": data["memory"],
        "step": {**{k: v for k, v in asdict(step).items() if k != "parts"}, "parts": parts},
    }
