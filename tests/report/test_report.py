"""Covers: report/ (report.py, exports.py, curve.py, alternatives.py, page.py and its scripts), and planner/problem.py
(`Neighbourhood`)."""

from __future__ import annotations

import html
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from lowered import saved_bytes

import megafx
from megafx.analysis.communication import communication
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.errors import UsageError
from megafx.planner.context import CompileContext
from megafx.planner.costed import CostedGraph
from megafx.planner.hardware import Hardware
from megafx.planner.plan import Plan
from megafx.planner.problem import Neighbourhood
from megafx.planner.solver import Table, solve
from megafx.planner.timeline import SEND
from megafx.report.curve import curve
from megafx.report.exports import graph_collection
from megafx.report.page import data_of, page
from megafx.report.report import Measured, Report
from megafx.runtime.compile_call import Settled, settle
from megafx.runtime.keys import Call
from megafx.units import bytes_text

LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES = {
    "llama-8b": ("LlamaForCausalLM", LLAMA | {"num_hidden_layers": 3, "vocab_size": 128256}, 8192),
    "llama-405b": (
        "LlamaForCausalLM",
        {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_hidden_layers": 3}
        | {"num_key_value_heads": 8, "vocab_size": 128256},
        8192,
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 3}, 1024),
    "t5": ("T5ForConditionalGeneration", {"num_layers": 3, "num_decoder_layers": 3}, 512),
}


@cache
def made(name: str, t: int = 8) -> tuple[Plan, Report]:
    architecture, sizes, seq = SHAPES[name]
    model, _ = megafx.load_model(architecture, sizes)
    config = megafx.Config(tensor_model_parallel_size=t, seq_length=seq, hardware="h100-nvlink", params_dtype="bf16")
    plan = megafx.plan(model, config)
    return plan, megafx.explain(plan)


@cache
def toy(t: int = 2, **options: Any) -> tuple[Plan, CompileContext]:
    model, inputs = zoo.build("nanogpt", layers=3)
    program = capture_call(model, (), inputs(2, 16))
    config = megafx.Config(tensor_model_parallel_size=t, **options)
    context = CompileContext(config, t, Hardware.load("h100-nvlink"), wants_grad=lambda spec: True, keeps_problem=True)
    return plan_only(program, context), context


# -- the costed graph


@pytest.mark.parametrize("name", ["llama-8b", "llama-405b", "gpt2"])
def test_the_costed_graph_is_the_plan(name: str) -> None:
    """Every op that is drawn is placed as the plan says, and all collectives are there with their bytes."""
    plan, report = made(name)
    costed = report.costed
    layers = [r for r in costed.regions if r.layer]
    assert [r.times for r in layers] == [SHAPES[name][1].get("num_hidden_layers", SHAPES[name][1].get("n_layer"))]
    sent: dict[str, list[int]] = {}
    for node in costed.nodes:
        times = costed.regions[node.region].times
        for move in (node.move, node.inner):
            pairs = () if move is None else (("forward", move.forward), ("backward", move.backward))
            for direction, collective in pairs:
                size = getattr(move, f"{direction}_bytes")
                if size:
                    total = sent.setdefault(f"{direction} {collective}", [0, 0])
                    total[0], total[1] = total[0] + times, total[1] + times * size
        if node.move is None:
            choice = plan.ops[node.name]
            assert node.out == choice.out.kind
            assert node.placements.count("->") == 1 and node.source
    if costed.gradients is not None:
        wanted = report.collectives().get("backward all_reduce", (0, 0))
        of_params = [m for r in report.rows if r.op == "parameter" for m in r.transitions]
        assert costed.gradients.backward_bytes == sum(m.backward_bytes for m in of_params)
        total = sent.setdefault("backward all_reduce", [0, 0])
        total[0], total[1] = total[0] + len(of_params), total[1] + costed.gradients.backward_bytes
        assert tuple(total) == wanted
    assert {what: tuple(total) for what, total in sent.items()} == report.collectives()
    assert all(a < b for a, b in costed.edges) and len(set(costed.edges)) == len(costed.edges)
    reached = {b for _, b in costed.edges}
    for number, node in enumerate(costed.nodes):  # but views of weights
        assert number in reached or not costed.regions[node.region].layer or not node.us, node


def test_memory_is_that_of_a_rank() -> None:
    plan, _ = toy(2)
    report = megafx.explain(plan)
    held = 0
    for name, (shape, _, _) in report.params.items():
        sizes, placement = [int(n) for n in shape.split("x")], plan.params[name]
        if placement.is_shard:
            sizes[placement.dim] = placement.cut.local_size(2)
        held += 8 * int(np.prod(sizes))
    kept = sum(report.costed.regions[n.region].times * n.kept for n in report.costed.nodes)
    assert kept and f"kept for backward, at most: {bytes_text(kept)}" in str(report)
    assert report.costed.memory == {"parameters": held, "gradients": held, "AdamW's moments": 2 * held}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_what_backward_keeps_is_at_most_what_is_said(sequence_parallel: bool) -> None:
    plan, context = toy(2, sequence_parallel=sequence_parallel)
    model, inputs = zoo.build("nanogpt", layers=3)
    program = capture_call(model, (), inputs(2, 16))
    compiled = compile_program(
        program, CompileContext(context.config, 2, context.hardware, wants_grad=lambda spec: True)
    )
    parts = compiled.for_rank(None)
    assert parts.partition is not None
    saved = sum(saved_bytes(parts.partition, parts.sizes).values())
    report = megafx.explain(plan)
    costed = report.costed
    told = sum(costed.regions[n.region].times * n.kept for n in costed.nodes)
    assert saved <= told <= 2 * saved, (saved, told)
    planned = curve(costed, report.step, None)
    assert planned.peak == sum(planned.held.values()) + told and planned.points[-1][1] == 0, "all of it is read"
    memory = compiled.memory()
    found = curve(costed, report.step, memory)
    assert found.peak == memory.peak and all(size >= 0 for point in found.points for size in point)
    assert found.points[-1][1:] == (0, memory.gradients, memory.step)
    most = {kind: max(point[1 + k] for point in found.points) for k, kind in enumerate(found.kinds)}
    assert saved <= most["kept for backward"] <= 1.1 * saved and most["gradients"] >= memory.gradients
    times = [point[0] for point in found.points]
    assert times == sorted(times) and times[-1] == report.step.total_us


@pytest.mark.parametrize("name", ["llama-8b", "gpt2"])
def test_a_trace_is_the_modelled_step(name: str, tmp_path: Path) -> None:
    """As Perfetto reads it: events in order, none over another on its track, and times that add up to the step's."""
    report = made(name)[1]
    report.trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"} and trace["otherData"]["axis"] == "tp=8"
    events = [e for e in trace["traceEvents"] if e["ph"] != "M"]
    assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
    tracks: dict[str, list[Any]] = {e["args"]["name"]: [] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            assert set(event) == {"ph", "pid", "tid", "name", "cat", "ts", "dur", "args"} and event["name"]
            tracks[names[event["tid"]]].append(event)
        else:
            assert event["ph"] == "C" and all(size >= 0 for size in event["args"].values())
    step = report.step
    total = lambda kind: sum(e["dur"] for e in events if e.get("cat") == kind)
    assert total("part") == pytest.approx(step.total_us, rel=1e-6)
    assert total("compute") == pytest.approx(step.compute_us, rel=1e-6)
    assert total("wait") == pytest.approx(step.exposed_us, rel=1e-6)
    assert total("send") == pytest.approx(step.send_us, rel=1e-6)
    for track, own in tracks.items():
        for before, after in itertools.pairwise(own):
            assert before["ts"] + before["dur"] <= after["ts"] + 2e-2, (track, before, after)
    layer = report.costed.order[2][0][0]
    (third,) = [e for e in tracks["parts of the step"] if e["name"] == f"forward {layer}"]
    own = [e for e in events if e["ph"] == "X" and third["ts"] <= e["ts"] < third["ts"] + third["dur"] - 2e-2]
    assert all(layer in e["name"] for e in own) and len(own) > 10
    sent = [e["args"]["bytes sent"] for e in events if e.get("cat") == "send"]
    assert sum(sent) >= sum(size for _, size in report.collectives().values()), (
        "what backward gathers again is sent too"
    )


def test_a_report_without_a_graph_has_no_trace(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this report has no graph"):
        Report({}, [], {}, {}).trace(tmp_path / "step.json")


# -- a step


@pytest.mark.parametrize(("name", "t"), [("llama-8b", 8), ("gpt2", 8), ("gpt2", 1)])
def test_a_step_adds_up(name: str, t: int) -> None:
    report = made(name, t)[1]
    costed, step = report.costed, report.step
    assert step.total_us == pytest.approx(step.compute_us + step.exposed_us + step.host_us, abs=0.1)
    assert step.exposed_us <= step.send_us + 1e-3
    alone = sum(costed.regions[n.region].times * (n.us + n.back_us + n.weight_us) for n in costed.nodes)
    assert alone + costed.optimizer_us <= step.compute_us * (1 + 1e-6) <= 1.25 * (alone + costed.optimizer_us)
    assert (step.send_us > 0) == (t > 1)
    for lanes in (("compute", "wait"), ("send",)):
        ends = 0.0
        for segment in sorted((s for p in step.parts for s in p.segments if s.lane in lanes), key=lambda s: s.start):
            assert segment.start >= ends - 2e-3, "what runs on one lane does not overlap"
            ends = segment.start + segment.us
    device_us = step.total_us - step.host_us
    assert device_us == pytest.approx(made(name, t)[0].cost_us, rel=0.5), "what the planner minimises"


def test_backward_hides_collectives_behind_the_gradients_of_weights() -> None:
    step = made("llama-8b")[1].step
    (part,) = [p for p in step.parts if p.direction == "backward" and p.times > 1]
    sends = [s for s in part.segments if s.lane == "send"]
    waits = [s for s in part.segments if s.lane == "wait"]
    assert sum(w.us for w in waits) < 0.97 * sum(s.us for s in sends)


# -- alternatives


def test_an_alternative_costs_what_a_plan_with_it_costs() -> None:
    """With all other ops as they are, and parameters stored as is then cheapest."""
    plan, context = toy(2)
    problem = context.problem
    chosen = {}
    for node in problem.context.rules:
        choice = plan.ops[node.name]
        chosen[node] = [(s.ins, s.out) for s in problem.domains[node]].index((choice.ins, choice.out))
    around, tried = Neighbourhood(problem, plan), 0

    def solved(node: Any, index: int) -> float:
        tables = []
        for other, at in chosen.items():
            cost = np.full(len(problem.domains[other]), np.inf)
            cost[index if other is node else at] = 0.0
            tables.append(Table((("op", other),), cost))
        return solve(problem.sizes_of_domains, [*problem.tables, *tables]).cost

    names = {n.name for n in megafx.explain(plan).costed.nodes if n.has_weight}
    for node in [n for n in chosen if n.name in names][:3]:
        now, best = around.cost(node, chosen[node])[0], solved(node, chosen[node])
        for index in range(len(problem.domains[node])):
            added = around.cost(node, index)[0] - now
            assert added == pytest.approx(solved(node, index) - best, abs=2e-8), (node, problem.domains[node][index])
            tried += 1
    assert tried > 10


def test_alternatives_are_told_with_their_collectives() -> None:
    costed = made("llama-8b")[1].costed
    (down,) = [n for n in costed.nodes if n.module == "mlp.gate_proj"]
    told = [a for a in down.alternatives if re.match(r"row-parallel \(S\d, S1 -> P\) here would cost \+", a)]
    assert len(told) == 1 and "1 more reduce_scatter of 196.0 MiB" in told[0], down.alternatives
    assert any("a matmul weight is sharded where it can be" in text for text in down.why)


# -- the page


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of a shape -> the file with its page."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def page_of(name: str) -> Path:
        made(name)[1].html(folder / f"{name}.html")
        return folder / f"{name}.html"

    return page_of


@pytest.mark.parametrize("name", SHAPES)
def test_a_page_is_small_whole_and_offline(name: str, pages: Callable[[str], Path]) -> None:
    text = pages(name).read_text()
    assert len(text) < (200_000 if name == "t5" else 100_000)  # t5 has six kinds of regions
    assert text.isascii() or (text.encode() and "http://" not in text.replace("http://www.w3.org/2000/svg", ""))
    for loads in ("src=", "href=", "@import", "url(http", "fetch("):
        assert loads not in text.replace("srcdoc=", ""), loads
    assert json.dumps(data_of(text)) == json.dumps(json.loads(json.dumps(made(name)[1].page_data())))


def test_text_of_the_model_does_not_end_the_script() -> None:
    data = made("llama-8b")[1].page_data()
    data["header"], data["title"] = {"axis": "</script><b>"}, "<b>"
    assert data_of(page(data))["header"] == {"axis": "</script><b>"} and "<b>" not in page(data)
    assert page(data).count("</script>") == 2


DRIVER = Path(__file__).parents[1] / "support" / "page_driver.js"
LISTEN = """<script>window.errors = []; addEventListener("error", (e) => errors.push(String(e.error || e.message)));
console.error = (...told) => errors.push(told.join(" "));</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no headless Chromium: none of chromium, chromium-browser, google-chrome is installed")
    return found


def in_a_browser(browser: str, path: Path, folder: Path, width: int = 1500) -> dict[str, Any]:
    """What headless Chromium finds in a page (page_driver.js)."""
    text = path.read_text().replace("<body>", "<body>" + LISTEN)
    driven = folder / path.name
    driven.write_text(text.replace("</body></html>", f"<script>{DRIVER.read_text()}</script></body></html>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000", "--enable-logging=stderr"]
    command = [browser, *options, f"--user-data-dir={folder / 'browser'}", "--dump-dom", f"file://{driven}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not lines, lines  # what an SVG has wrong is told there, and throws nothing
    result = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert result is not None, done.stderr[-1000:]
    found: dict[str, Any] = json.loads(html.unescape(result[1]))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_browser_draws_every_level(name: str, browser: str, pages: Callable[[str], Path], tmp_path: Path) -> None:
    """It opens fast and throws nothing, nothing lies over another thing, and every box can be opened and hovered over."""
    found, costed = in_a_browser(browser, pages(name), tmp_path), made(name)[1].costed
    assert not found["errors"] and not found["wrong"], (found["errors"], found["wrong"])
    assert found["opened"] < 2000, "milliseconds until the page is drawn"
    whole = found["levels"][0]
    assert whole["pills"] == sum(n.move is not None for n in costed.nodes) and whole["edges"] >= whole["boxes"] - 3
    assert whole["back"] == sum(n.move is not None and not n.move.forward_bytes for n in costed.nodes), "not forward's"
    assert len(found["levels"]) > 2 * len(costed.regions)
    first, zoomed, fitted = found["zoomed"]
    assert zoomed == pytest.approx(1.25 * first, rel=0.01) and fitted == first
    told = "\n".join(found["details"])
    shown = [n for n in costed.nodes if n.has_weight]
    assert all(n.weight in told and n.source.split("site-packages/")[-1] in told for n in shown)
    assert all(a in told for n in shown for a in n.alternatives)
    for move in [n.move for n in costed.nodes if n.move is not None]:
        assert not move.forward_bytes or f"forward {move.forward}" in told
    assert len(found["steps"]) == len([p for p in made(name)[1].step.parts if p.us > 0])
    assert any("waits for" in tip for tip in found["tips"]) and any("optimizer" in tip for tip in found["tips"])
    assert any("start: " in tip and "duration: " in tip and "sent by a rank" in tip for tip in found["tips"])
    assert "kept for backward" in found["memory"] and found["bands"] == 4
    first, middle, last = found["held"]
    assert ": forward, " in first and "in all " in middle and "optimizer" in last
    assert found["measured"].strip().startswith("Measured") and found["dark"][0] != found["dark"][1], "dark mode"
    assert found["dark"][2] in ("dark", "light"), "remembered"
    keys = found["keys"]
    assert keys["walked"] == keys["boxes"] and keys["back"] and keys["down"] == 1 and keys["none"] == 0
    assert keys["field"] == "search" and keys["help"] and keys["up"].strip().startswith("whole model")
    assert found["results"] > 3, "modules and ops of attention"
    assert found["nothing"] == ["nothing is called that"] and len(found["links"]) == -(-len(costed.nodes) // 5)
    assert name == "t5" or any(".mlp" in text for text in found["layer"]), "a layer by its number"
    assert "by a rank in" in found["headline"] and "sequence_parallel" in found["facts"]


def test_a_narrow_page_is_readable(browser: str, tmp_path: Path) -> None:
    """At 500 pixels nothing is wider than the window, and letters are as large as on a wide page. Measured times are shown."""
    report = made("gpt2")[1]
    times = [
        Measured("forward", "transformer.h.[0-2].mlp.c_fc", 30.0, 20.0),
        Measured("backward", "lm_head", 60.0, 30.0),
    ]
    measured = replace(report, measured=times)
    measured.html(tmp_path / "narrow.html")
    found = in_a_browser(browser, tmp_path / "narrow.html", tmp_path, 500)
    assert not found["errors"] and not found["wrong"], (found["errors"], found["wrong"])
    assert found["width"] == 500 and found["scale"] >= 0.95, "not shrunk"
    assert "transformer.h.[0-2].mlp.c_fc30.0 us20.0 us" in found["measured"]
    assert any(
        "measured forward, its module of all 3" in told and "30.0 us (modelled 20.0 us)" in told
        for told in found["details"]
    )


def test_a_browser_tells_what_is_wrong(browser: str, pages: Callable[[str], Path], tmp_path: Path) -> None:
    """The test above can fail: boxes that overlap, and an error of the script."""
    broken = tmp_path / "broken.html"
    text = pages("gpt2").read_text()
    assert "GAP = 26" in text
    broken.write_text(
        text.replace("GAP = 26", "GAP = -30").replace("\ndrawTexts();\n", '\ndrawTexts(); console.error("x");\n')
    )
    (tmp_path / "driven").mkdir()
    found = in_a_browser(browser, broken, tmp_path / "driven")
    assert found["errors"] == ["x"] and any("boxes overlap" in wrong for wrong in found["wrong"])


# -- two reports


def test_two_reports_are_compared(tmp_path: Path, pages: Callable[[str], Path]) -> None:
    plan, report = made("llama-8b")
    other = megafx.explain(toy(1)[0])
    (tmp_path / "a.json").write_text(report.to_json())
    other.html(tmp_path / "b.html")
    assert megafx.diff(pages("llama-8b"), tmp_path / "a.json") == ""
    found = megafx.diff(tmp_path / "a.json", tmp_path / "b.html", html=tmp_path / "both.html").splitlines()
    assert "-axis: tp=8" in found and "+axis: tp=1" in found
    assert any(line.startswith("-Collectives a step") for line in found)
    both = (tmp_path / "both.html").read_text()
    assert both.count("<iframe") == 2 and "-axis: tp=8" in both and len(both) < 300_000
    plan.save(tmp_path / "plan.json")
    with pytest.raises(UsageError, match="a saved plan has no report to draw"):
        megafx.diff(tmp_path / "plan.json", tmp_path / "plan.json", html=tmp_path / "x.html")
    (tmp_path / "other.txt").write_text("hello")
    with pytest.raises(UsageError, match="is no report and no plan"):
        megafx.diff(tmp_path / "other.txt", tmp_path / "plan.json")


def test_a_plan_is_priced_in_the_dtype_that_is_asked_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 64))
    config = megafx.Config(tensor_model_parallel_size=2)
    batch, sizes = torch.ones(8, 64), {}
    for dtype in (None, "bf16"):
        inputs = batch if dtype is None else batch.bfloat16()
        plan = megafx.plan(model, config.replace(params_dtype=dtype), example_inputs=inputs)
        sizes[dtype] = megafx.explain(plan).costed.memory["parameters"]
    assert sizes[None] == 2 * sizes["bf16"]
    assert model[0].weight.dtype == model[1].running_mean.dtype == torch.float32


class Scaled(torch.nn.Module):
    """Float inputs with an op on them alone, then a column- and a row-parallel linear."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 256, bias=False), torch.nn.Linear(256, 64, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(2 * x).relu()) - self.down(self.up(y).relu())).square().sum()


def _backward_all_reduces(costed: CostedGraph) -> int:
    return sum(n.move is not None and n.move.backward == "all_reduce" for n in costed.nodes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("wanted", [(False, False), (True, False), (True, True)])
def test_inputs_without_gradient_are_data(wanted: tuple[bool, bool], device: str) -> None:
    """The plan, its table and its step have the backward collectives of inputs that require a gradient, as the graph that
    runs has; so has the plan that `parallelize` makes of its first call."""
    model, config = Scaled(), megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink", micro_batch_size=8)
    inputs = tuple(torch.ones(8, 64, device=device, requires_grad=grad) for grad in wanted)
    plan = megafx.plan(model, config, example_inputs=inputs)
    report, program = megafx.explain(plan), capture_call(model, inputs)
    hardware = Hardware.load("h100-nvlink")
    names = {f"args[{i}]" for i, grad in enumerate(wanted) if grad}
    context = CompileContext(config, 2, hardware, wants_grad=lambda spec: spec.kind == "param" or spec.name in names)
    runs = communication(compile_program(program.copy(), context).program, 2)
    backward = [c for c in runs if c.direction == "backward"]
    assert len(backward) == _backward_all_reduces(report.costed) == sum(wanted)
    assert all(c.collective == "all_reduce" for c in backward)
    told = [m for row in report.rows for m in row.transitions if m.backward == "all_reduce"]
    assert len(told) == wanted[0], "2 * x, which is an op"
    back = [part for part in report.step.parts if part.direction == "backward"]
    assert len({s.node for part in back for s in part.segments if s.lane == SEND}) == sum(wanted)

    call, settled = Call.of(inputs, {}), Settled()
    settle(call, lambda training: program.copy(), CompileContext(config, 2, hardware), settled, True)
    assert settled.plan is not None and settled.plan.report is not None
    assert _backward_all_reduces(settled.plan.report.costed) == sum(wanted)
    assert settled.plan.cost_us == plan.cost_us


def test_what_is_priced_is_what_was_given() -> None:
    """The sizes of the example inputs, those of the config before them, and a default that is marked as one."""

    def workload(model: torch.nn.Module, example: Any = None, **options: Any) -> str:
        config = megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink", **options)
        return str(megafx.explain(megafx.plan(model, config, example_inputs=example)).header["workload"])

    net, inputs = zoo.build("nanogpt", layers=1)
    assert workload(net, inputs(8, 16)) == "batch=8, seq=16"
    assert workload(net, inputs(8, 16), micro_batch_size=2, seq_length=32) == "batch=2, seq=32"
    small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 16}
    small["decoder_start_token_id"] = 0
    t5, _ = megafx.load_model("T5ForConditionalGeneration", small)
    call = {"input_ids": torch.zeros(3, 20, dtype=torch.int64), "labels": torch.zeros(3, 7, dtype=torch.int64)}
    assert workload(t5, call) == "batch=3, seq=20, target=7"
    assert workload(t5, seq_length=32) == "batch=1 (default), seq=32, target=32"


def test_what_is_data_is_free_to_be_sliced() -> None:
    """The cost of a plan, not only its report, is without the collectives that are not there; nor does a search price them."""
    config = megafx.Config(tensor_model_parallel_size=2, hardware="h100-nvlink")
    cost, least = {}, {}
    for grad in (False, True):
        inputs = tuple(torch.ones(8, 64, requires_grad=grad) for _ in range(2))
        cost[grad] = megafx.plan(Scaled(), config, example_inputs=inputs).cost_us
        tried = megafx.search(Scaled(), 2, "1GiB", config, example_inputs=inputs, batches=(1,), shown=100)
        least[grad] = min(c.sent for c in tried.best if c.config.tensor_model_parallel_size == 2)
    assert cost[False] < cost[True] and least[False] < least[True]


# -- Model Explorer


@pytest.mark.parametrize("name", ["llama-8b"])
def test_the_graph_for_model_explorer(name: str) -> None:
    """Its classes GraphCollection, Graph, GraphNode, IncomingEdge and KeyValue: these fields, of these types."""
    costed = made(name)[1].costed
    (graph,) = graph_collection(costed, name)["graphs"]
    assert len(graph["nodes"]) == len(costed.nodes)
    ids = {node["id"] for node in graph["nodes"]}
    edges = [(e["sourceNodeId"], node["id"]) for node in graph["nodes"] for e in node["incomingEdges"]]
    assert sorted(edges) == sorted((str(a), str(b)) for a, b in costed.edges) and {a for a, _ in edges} <= ids
    for node, drawn in zip(graph["nodes"], costed.nodes, strict=True):
        assert set(node) == {"id", "label", "namespace", "attrs", "incomingEdges", "style"}
        assert all(isinstance(a["value"], str) for a in node["attrs"])
        attributes = {a["key"]: a["value"] for a in node["attrs"]}
        assert attributes["placements"] == drawn.placements
        assert ("forward collective" in attributes) == bool(
            (drawn.move or drawn.inner) and (drawn.move or drawn.inner).forward_bytes
        )
    assert any(node["namespace"] == "model.layers.[0-2] x 3/self_attn/q_proj" for node in graph["nodes"])
