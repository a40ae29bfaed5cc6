"""Covers: compiler/runner.py."""

import copy

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import megafx
from megafx.checks.numbers import NumberCheck
from megafx.compiler.runner import Pass, PassRecord, PipelineStopped, Runner, insert_user_passes
from megafx.config import Config
from megafx.debugging import Debug
from megafx.errors import ConfigError, MegafxError
from megafx.ir.program import VAL, Input, Output, Phase, Program
from megafx.ir.sizes import Sizes
from megafx.planner.context import CompileContext
from megafx.testing import make_context

aten = torch.ops.aten


def run(program: Program, passes: list[Pass], settings: Debug) -> list[PassRecord]:
    return Runner(make_context(), settings=settings).run(program, passes)


@pytest.fixture
def program() -> Program:
    gm = make_fx(lambda x: (aten.relu.default(aten.neg.default(x)),), tracing_mode="fake")(torch.ones(4))
    fake_mode = gm.graph.find_nodes(op="placeholder")[0].meta[VAL].fake_mode
    spec = pytree.tree_structure(0)
    return Program(gm, [Input("user", "x")], [Output("user", "y")], Sizes(), fake_mode, spec)


def canonicalize(program: Program, context: CompileContext) -> int:
    program.phase = Phase.CANONICAL
    return 0


def use_abs(program: Program, context: CompileContext) -> int:
    """neg -> abs, as a pass with a change."""
    nodes = program.graph.find_nodes(op="call_function", target=aten.neg.default)
    for node in nodes:
        node.target = aten.abs.default
    return len(nodes)


def plan(program: Program, context: CompileContext) -> int:
    program.phase = Phase.PLANNED
    return 1


PASSES = [
    Pass("canonicalize", canonicalize, (Phase.CAPTURED,), Phase.CANONICAL),
    Pass("use_abs", use_abs, (Phase.CANONICAL,)),
    Pass("plan", plan, (Phase.CANONICAL,), Phase.PLANNED),
]


def test_runs_in_order_and_recompiles(program):
    records = run(program, PASSES, Debug())
    assert [(r.index, r.name, r.changes) for r in records] == [
        (1, "canonicalize", 0),
        (2, "use_abs", 1),
        (3, "plan", 1),
    ]
    assert program.phase == Phase.PLANNED
    assert program.gm(torch.tensor([-2.0]))[0].item() == 2.0  # generated code is that of the changed graph


def test_quiet_by_default(program, capfd):
    run(program, PASSES, Debug())
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("level", "has", "has_not"),
    [
        (1, ["01 canonicalize", "02 use_abs", "    1 changes       4 nodes (+0)"], ["abs(%0)"]),
        (2, ["- %1 = neg(%0)", "+ %1 = abs(%0)"], ["\n%1 = abs(%0)"]),
        (4, ["+ %1 = abs(%0)", "\n%1 = abs(%0)"], []),
    ],
)
def test_debug_ladder(program, capfd, level, has, has_not):
    run(program, PASSES, Debug(level=level))
    log = capfd.readouterr().err
    assert all(text in log for text in has), log
    assert not any(text in log for text in has_not), log


def test_dumps_are_numbered_and_further_runs_have_folders(program, tmp_path):
    settings = Debug(dump=str(tmp_path / "dumps"))
    run(program, PASSES, settings)
    names = ["00_capture.txt", "01_canonicalize.txt", "02_use_abs.txt", "03_plan.txt", "about.json"]
    assert sorted(p.name for p in (tmp_path / "dumps").iterdir()) == names
    assert "neg(%0)" in (tmp_path / "dumps" / names[1]).read_text()
    assert "abs(%0)" in (tmp_path / "dumps" / names[2]).read_text()
    program.phase = Phase.CAPTURED
    run(program, PASSES, settings)
    assert sorted(p.name for p in (tmp_path / "dumps" / "graph1").iterdir()) == names


def test_other_ranks_do_not_dump(program, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    run(program, PASSES, Debug(level=4, dump=str(tmp_path / "dumps")))
    assert not (tmp_path / "dumps").exists()
    assert capfd.readouterr().err == ""


def test_skip(program):
    records = run(program, PASSES, Debug(skip=("use_abs",)))
    assert [r.skipped for r in records] == [False, True, False]
    assert program.gm(torch.tensor([-2.0]))[0].item() == 2.0
    assert program.graph.find_nodes(op="call_function", target=aten.neg.default)


def test_illegal_skip(program):
    with pytest.raises(ConfigError) as error:
        run(program, PASSES, Debug(skip=("canonicalize",)))
    assert str(error.value) == (
        "pass 'use_abs' requires phase CANONICAL, but the program is at CAPTURED\n"
        "  fix: do not skip canonicalize: a later pass needs what it does"
    )


def test_stop_after(program):
    with pytest.raises(PipelineStopped, match="stopped after pass 'use_abs'") as stopped:
        run(program, PASSES, Debug(stop_after="use_abs"))
    assert stopped.value.program is program
    assert program.phase == Phase.CANONICAL


@pytest.mark.parametrize("settings", [Debug(skip=("use_ab",)), Debug(stop_after="use_ab")])
def test_unknown_names(program, settings):
    with pytest.raises(
        ConfigError, match="names 'use_ab', which is no pass\n  fix: passes: canonicalize, use_abs, plan"
    ):
        run(program, PASSES, settings)
    assert program.phase == Phase.CAPTURED


def test_wrong_phase(program):
    with pytest.raises(MegafxError, match="pass 'plan' requires phase CANONICAL, but the program is at CAPTURED"):
        run(program, PASSES[2:], Debug())
    broken = Pass("plan", lambda program, context: 0, (Phase.CAPTURED,), Phase.PLANNED)
    with pytest.raises(MegafxError, match="pass 'plan' left phase CAPTURED, but its contract says PLANNED"):
        run(program, [broken], Debug())


def test_a_pass_that_breaks_the_graph_is_caught(program):
    def break_it(program: Program, context: CompileContext) -> int:
        neg, relu = list(program.graph.nodes)[1:3]
        relu.append(neg)  # now used before it is computed
        return 1

    with pytest.raises(RuntimeError, match="used before it has been defined"):
        run(program, [Pass("break_it", break_it)], Debug())


def my_pass(program: Program, context: CompileContext) -> int:
    return context.t


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("after use_abs", ["canonicalize", "use_abs", "my_pass", "plan"]),
        ("before use_abs", ["canonicalize", "my_pass", "use_abs", "plan"]),
    ],
)
def test_users_pass(program, where, names):
    passes, others = [*PASSES], [Pass("last", plan)]
    insert_user_passes([passes, others], Config(passes=[(where, my_pass)]))
    assert [p.name for p in passes] == names and len(others) == 1
    assert {r.name: r.changes for r in run(program, passes, Debug())}["my_pass"] == 1


def test_users_pass_at_no_such_place():
    with pytest.raises(ConfigError, match="'after fuse', but the pipeline has no such pass"):
        insert_user_passes([[*PASSES]], Config(passes=[("after fuse", my_pass)]))
    with pytest.raises(ConfigError, match="brings a second pass 'plan'"):
        insert_user_passes([[*PASSES]], Config(passes=[("after plan", plan)]))


def test_pass_of_reads_the_contract_of_its_module(monkeypatch):
    import sys

    module = sys.modules[my_pass.__module__]
    assert Pass.of(my_pass).requires == tuple(Phase)
    monkeypatch.setattr(module, "REQUIRES", Phase.LOCAL, raising=False)
    monkeypatch.setattr(module, "ENSURES", Phase.JOINT, raising=False)
    mine = Pass.of(my_pass)
    assert (mine.name, mine.requires, mine.ensures) == ("my_pass", (Phase.LOCAL,), Phase.JOINT)
    assert mine.run is my_pass


def checked(program: Program, passes: list[Pass]) -> list[PassRecord]:
    """As the pipeline runs them under MEGAFX_CHECK=2."""
    return Runner(make_context(), settings=Debug(check=2)).run(program, passes, NumberCheck(1))


def test_check_2_names_the_first_pass_that_changed_numbers(program):
    with pytest.raises(MegafxError, match="pass 'use_abs' changed numbers: output 'y' by .*, 1 of 1 results differ"):
        checked(program, PASSES)


def test_check_2_accepts_what_changes_nothing(program):
    def double_negation(program: Program, context: CompileContext) -> int:
        relu = next(iter(program.graph.find_nodes(op="call_function", target=aten.relu.default)))
        with program.graph.inserting_before(relu), program.fake_mode:
            for _ in range(2):
                neg = program.graph.call_function(aten.neg.default, (relu.args[0],))
                neg.meta[VAL] = aten.neg.default(relu.args[0].meta[VAL])
                relu.args = (neg,)
        return 2

    passes = [PASSES[0], Pass("double_negation", double_negation), PASSES[2]]
    assert checked(program, passes)[1].nodes_after == 6


def test_a_pass_after_the_cut_changes_what_runs_or_is_an_error() -> None:
    """The graph of all is no longer what runs then (findings S12)."""
    sine = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.LayerNorm(4, elementwise_affine=False), torch.nn.Tanh()
    ).double()
    x = torch.ones(2, 4).double()

    def swap(graph: torch.fx.Graph) -> int:
        nodes = [n for n in graph.nodes if n.op == "call_function" and "tanh" in str(n.target)]
        for node in nodes:
            node.target = aten.sin.default
        return len(nodes)

    def whole(program: Program, context: CompileContext) -> int:
        return swap(program.graph)

    def part(program: Program, context: CompileContext) -> int:
        assert program.partition is not None
        return swap(program.partition.forward.graph)

    wanted = torch.sin(sine[:2](x))
    with torch.no_grad():
        for where, change in (("before partition", whole), ("after partition", part)):
            model = megafx.parallelize(copy.deepcopy(sine), Config(passes=[(where, change)]))
            torch.testing.assert_close(model(x), wanted)
        model = megafx.parallelize(copy.deepcopy(sine), Config(passes=[("after partition", whole)]))
        with pytest.raises(
            MegafxError, match="'whole' changes program.graph after it was cut .*\n.*'before partition'"
        ):
            model(x)
