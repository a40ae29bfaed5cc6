"""The Plan object: print, save, load on another capture, compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_plans
import sympy
import torch
from torch.utils._sympy import functions

from megafx.errors import PlanError
from megafx.ir.program import Program
from megafx.ir.sizes import Sizes
from megafx.passes.plan.insert_transitions import insert_transitions
from megafx.passes.plan.plan_sharding import plan_sharding
from megafx.placements.types import I, Layout, P, Placement, R, S
from megafx.planner.context import CompileContext
from megafx.planner.plan import OpChoice, Plan, Removal, Transition, _SizeText
from megafx.testing import assert_same


def _sizes(*names: str) -> Sizes:
    sizes = Sizes()
    for i, name in enumerate(names):
        sizes.symbols[name] = sympy.Symbol(f"s{i}", integer=True, positive=True)
    return sizes


def _size(sizes: Sizes, text: str) -> int:
    return sizes.of_expr(sympy.sympify(text, locals=sizes.symbols))


def _plan(sizes: Sizes | None = None) -> Plan:
    """A plan with a fused projection and values cut on dynamic dims."""
    sizes = _sizes("batch", "seq") if sizes is None else sizes
    sequence = S(1, Layout.contiguous(_size(sizes, "seq"), 4))
    flat = S(0, Layout.of([(_size(sizes, "seq"), 1)], 4, rep=_size(sizes, "batch")))
    shifted = S(1, Layout.contiguous(_size(sizes, "seq - 1"), 4))
    return Plan(
        t=4,
        sequence_parallel=True,
        params={"qkv.weight": S(0, Layout.of([(25, 64)] * 3, 4)), "norm.weight": I},
        ops={
            "linear": OpChoice((R, S(0, Layout.contiguous(8, 4))), P, "k", "mlp.down", "a note"),
            "add": OpChoice((sequence, flat), sequence, "t", ""),
            "slice_1": OpChoice((R,), shifted, "t", ""),
        },
        transitions={"linear": (Transition(P, sequence), Transition(sequence, R))},
        removals=[Removal("linear", "mlp.down", 3, "the batch is not sharded")],
        replicated={"norm.weight": "the norm runs over the dim"},
        cost_us=12.5,
        hardware="h100-nvlink",
        workload={"batch": 1, "seq": 2048},
        sizes=sizes,
    )


def test_text() -> None:
    static = Plan(
        t=2,
        params={"w": S(0, Layout.of([(4, 8)] * 3, 2)), "b": I},
        ops={"mm": OpChoice((R, S(0, Layout.contiguous(8, 2))), P, "k")},
        transitions={"mm": (Transition(P, I),)},
        hardware="cpu",
    )
    assert static.lines() == [
        "plan on tp=2, sequence_parallel=False, hardware cpu",
        "  w                                                S0/3*(2x16)",
        "  b                                                I",
        "  mm                               R, S0 -> P  k  [P->I]",
    ]


def test_layers_that_are_alike_are_printed_once() -> None:
    rows, columns = S(0, Layout.contiguous(8, 2)), S(1, Layout.contiguous(8, 2))
    params = {f"h.{i}.{name}": p for i in range(3) for name, p in (("up", rows), ("down", rows if i == 2 else columns))}
    ops = {f"linear_{i}": OpChoice((R, rows), columns, "n", f"h.{i // 2}") for i in range(6)}
    shown = [line.split() for line in str(Plan(t=2, params=params, ops=ops, hardware="cpu")).splitlines()]
    assert [x for x in shown if x[0].startswith("h.")] == [
        ["h.[0-2].up", "S0"],
        ["h.[0-1].down", "S1"],
        ["h.2.down", "S0"],
        *[["h.[0-2]", "linear", "R,", "S0", "->", "S1", "n"]] * 2,
    ]


def test_dynamic_cuts_are_shown_by_name() -> None:
    line = next(line for line in str(_plan()).splitlines() if " add " in line)
    assert line.split() == ["<root>", "add", "S1,", "S0/batch*(seq)", "->", "S1", "t"]


def test_json_round_trip_keeps_everything() -> None:
    plan = _plan()
    loaded = Plan.from_json(plan.to_json())
    assert loaded.to_json() == plan.to_json()
    assert loaded.params == plan.params
    assert loaded.removals == plan.removals
    assert (loaded.t, loaded.sequence_parallel, loaded.cost_us) == (4, True, 12.5)
    assert loaded.transitions.keys() == plan.transitions.keys()


def test_dynamic_sizes_are_written_by_name() -> None:
    data = json.loads(_plan().to_json())
    assert data["ops"]["add"]["ins"] == [["S1", 1, "seq", 1], ["S0", "batch", "seq", 1]]
    assert data["ops"]["slice_1"]["out"] == ["S1", 1, "seq - 1", 1]


def test_a_plan_binds_to_the_sizes_of_another_capture() -> None:
    other = _sizes("seq", "batch")  # other symbols, other primes
    _size(other, "batch*seq")
    bound = _plan().bind(other)
    cut = bound.ops["add"].out.cut
    assert other.text(cut.size) == "seq"
    assert cut.size == _size(other, "seq")
    assert bound.ops["add"].ins[1] == S(0, Layout.of([(_size(other, "seq"), 1)], 4, rep=_size(other, "batch")))
    assert other.text(bound.ops["slice_1"].out.cut.size) == "seq-1"
    assert bound.sizes is other


def test_save_and_load(tmp_path: Path) -> None:
    plan = _plan()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").diff(plan) == ""


def test_diff_shows_what_changed_and_only_that() -> None:
    plan, other = _plan(), _plan()
    assert plan.diff(other) == ""
    other.params["norm.weight"] = S(0, Layout.contiguous(8, 4))
    changed = [line for line in plan.diff(other).splitlines() if line[0] in "+-" and line[:3] not in ("---", "+++")]
    assert [line.split() for line in changed] == [["-", "norm.weight", "I"], ["+", "norm.weight", "S0"]]


@pytest.mark.parametrize("change", ["ops", "transitions", "t"])
def test_diff_sees_every_kind_of_change(change: str) -> None:
    plan, other = _plan(), _plan()
    if change == "ops":
        other.ops["linear"] = OpChoice((R, R), R)
    elif change == "transitions":
        other.transitions = {}
    else:
        other.t = 2
    assert plan.diff(other)


def test_diff_sees_another_cut_of_the_same_dim() -> None:
    plan, other = _plan(), _plan()
    plan.params["w"], other.params["w"] = (S(0, Layout.of([b], 4)) for b in ((25, 64), (50, 32)))
    assert [line.split()[-1] for line in plan.diff(other).splitlines()[-2:]] == ["S0/25x64", "S0/50x32"]


def test_an_unknown_parameter_is_an_error_with_advice() -> None:
    with pytest.raises(PlanError) as raised:
        _plan().placement_of("qkv.weigth")
    assert str(raised.value) == "the plan has no parameter 'qkv.weigth'\n  fix: did you mean qkv.weight?"
    found: Placement = _plan().placement_of("norm.weight")
    assert found == I


def test_another_format_is_refused() -> None:
    text = _plan().to_json().replace('"format": 3', '"format": 99')
    with pytest.raises(PlanError, match="plan format 99, expected 3"):
        Plan.from_json(text)


def _saved() -> tuple[Program, CompileContext, Plan]:
    """A graph that is yet to be planned, and a plan of it as it comes from a file."""
    fn = torch.ops.aten.linear
    values = {"x": "f32[b k=8]", "w": "param f32[n=6 k=8]"}
    _, found = small_plans.planned(lambda x, w: fn(x, w), {"linear": "S1, S1 -> P", "w": "S1"}, **values)
    program, context = small_plans.planned(lambda x, w: fn(x, w), {}, **values)
    context.plan, context.given = None, Plan.from_json(found.solved.to_json())
    return program, context, context.given


@pytest.mark.parametrize(
    "size",
    [
        "__import__('pathlib').Path('ran').touch() or 8",
        "().__class__.__base__.__subclasses__()",
        "[open('ran', 'w') for _ in 'x']",
        "batch.__class__",
        "(lambda: 8)()",
        "Max(*[8])",
        "9**9**9**9",
        "((seq**8)**8)**8",
        "'8'",
        "8.5",
        "8 if 1 else 9",
        "(" * 400 + "8" + ")" * 400,
        "seq//0",
        "",
        None,
        [8],
        True,
    ],
)
def test_sizes_of_a_file_are_not_run(size: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = json.loads(_plan().to_json())
    data["params"]["qkv.weight"][1] = size
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"plan.json': this is no plan: "):
        Plan.load(tmp_path / "plan.json")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "null", '{"format": 3}', "{" * 5000, '{"format": 3, "workload": 3}', "\x80"]
)
def test_what_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(PlanError, match=r"plan.json'"):
        Plan.load(tmp_path / "plan.json")


WRONG = {
    **{"t": [0, -1, 2.0, "2", True, None], "axis": [3], "sequence_parallel": [1, "yes"], "flat_tokens": [None]},
    **{"hardware": [None, 3], "cost_us": ["1", None, True], "workload": [[], {"batch": "1"}, {"batch": 1.5}]},
    **{
        "replicated": [[], 3],
        "removals": [{}, [3]],
        "conversions": [[], {"x": 3}],
        "params": [[], {"w": 3}, {"w": ["X"]}],
        "experts": [3, [], {"w": "0"}],
    },
    **{"ops": [3, {"mm": {}}, {"mm": 3}], "more": [1]},
}


def test_entries_of_wrong_types_are_refused(tmp_path: Path) -> None:
    right, file = json.loads(_plan().to_json()), tmp_path / "plan.json"
    for name, values in WRONG.items():
        for value in values:
            file.write_text(json.dumps(right | {name: value}))
            with pytest.raises(PlanError, match=r"plan.json': this is no plan: "):
                Plan.load(file)
    for name in right.keys() - {"format"}:
        file.write_text(json.dumps({k: v for k, v in right.items() if k != name}))
        with pytest.raises(PlanError, match=r"plan.json': this is no plan: "):
            Plan.load(file)
    file.write_text(json.dumps(right))
    assert Plan.load(file).t == right["t"]


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    with open(tmp_path / "plan.json", "wb") as file:
        file.truncate(60 * 2**30)  # a sparse one
    with pytest.raises(PlanError, match=r"plan.json' has 61440 MiB; a plan has 256 MiB at most\n  fix: give the file"):
        Plan.load(tmp_path / "plan.json")


def test_every_form_of_a_size_is_read_back() -> None:
    """Quotients are torch's, as in the graph: `sympy.floor` would be another size."""
    sizes = _sizes("batch", "seq")
    batch, seq = sizes.symbols["batch"], sizes.symbols["seq"]
    other = sympy.Symbol("s77", integer=True, positive=True)
    for expr in (
        functions.FloorDiv(seq + 1, 2) ** 2,
        functions.CeilDiv(seq, 3) * batch,
        functions.Mod(seq, 4),
        functions.Max(seq, 7),
        functions.ModularIndexing(seq, 2, 3),
        functions.PythonMod(batch, 2),
        (seq - 1) ** 2 * batch,
        other * 5 - seq,
        seq / 2,
    ):
        text = _SizeText(sizes)
        assert text.decode(text.encode(sizes.of_expr(expr))) == sizes.of_expr(expr), expr


def test_a_loaded_plan_is_applied() -> None:
    program, context, _ = _saved()
    before = program.copy()
    plan_sharding(program, context)
    assert insert_transitions(program, context) == 2
    assert_same(before, program)


def _refusal(program: Program, context: CompileContext) -> str:
    with pytest.raises(PlanError) as raised:
        plan_sharding(program, context)
        insert_transitions(program, context)
    return str(raised.value)


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    program, context, given = _saved()
    given.t = 4
    assert _refusal(program, context).startswith("the plan is for 4 ranks, not for 2")


def test_a_plan_of_another_graph_is_refused() -> None:
    program, context, given = _saved()
    given.ops["mm"] = given.ops.pop("linear")
    del given.params["w"]
    assert _refusal(program, context).startswith("the plan is for another graph: it does not place 'linear' and 1 more")


def test_an_edited_plan_must_follow_the_rules() -> None:
    program, context, given = _saved()
    choice = given.ops["linear"]
    given.ops["linear"] = OpChoice(choice.ins, I, choice.factor)
    assert _refusal(program, context).startswith(
        "the plan places %linear (aten.linear.default) as S1, S1 -> I, which is no row of its sharding rule"
    )


def test_an_edited_plan_must_convert_what_it_uses() -> None:
    program, context, given = _saved()
    given.transitions.pop("x")
    assert _refusal(program, context).startswith("the plan uses %x at S1, but it is I and has no transition to there")
