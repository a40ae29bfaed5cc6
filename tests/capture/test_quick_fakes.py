"""Covers: results that fakes of known ops get sooner, from their own trace or an earlier one, are those that torch makes: form,
memory, and whose memory it is."""

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from megafx.capture import quick_fakes
from megafx.capture.quick_fakes import QuickFakeTensorMode
from megafx.ir.data_sizes import DataShapeEnv

aten = torch.ops.aten
CALLS = {
    "new": lambda x: aten.mul.Tensor(x, 2.0),
    "several": lambda x: aten.native_layer_norm.default(x, [6], None, None, 1e-5)[1],
    "view": lambda x: aten.slice.Tensor(aten.transpose.int(x, 0, 1), 2, 1, 4),
    "view of another dtype": lambda x: aten.view.dtype(x, torch.int32),
    "complex": lambda x: aten._conj.default(aten.view_as_complex.default(aten.view.default(x, [*x.shape[:2], 3, 2]))),
    "itself": lambda x: aten.expand.default(x, [-1, -1, 6]),
    "in place": lambda x: aten.add_.Tensor(x, 1.0),
}


def run(kind, call):
    """(form of the results of three equal calls, whether each has the memory of its operand, their memories)."""
    env = ShapeEnv()
    mode = kind(shape_env=env)
    sizes = []
    for hint in (4, 10):
        source = ConstantSource(f"n{hint}")
        sizes.append(
            env.create_symintnode(env.create_symbol(hint, source, DimDynamic.DYNAMIC), hint=hint, source=source)
        )
    with mode:
        xs = [torch.empty(*sizes, 6) for _ in range(3)]
        ys = [call(x) for x in xs]
    exprs = lambda ns: [n.node.expr if isinstance(n, torch.SymInt) else n for n in ns]
    forms = [
        str(
            (
                exprs(y.shape),
                exprs(y.stride()),
                exprs([y.storage_offset()]),
                y.dtype,
                y.device,
                y.is_conj(),
                y.requires_grad,
            )
        )
        for y in ys
    ]
    memories = [y.untyped_storage()._cdata for y in ys]
    own = [m == x.untyped_storage()._cdata for m, x in zip(memories, xs, strict=True)]
    return forms, own, len({*memories})


@pytest.fixture
def known(monkeypatch):
    """What traces of the process know, and nothing yet."""
    shared = {}
    monkeypatch.setattr(quick_fakes, "_shared", shared)
    return shared


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_are_those_of_torch(call, known):
    wanted = run(FakeTensorMode, call)
    for _ in range(2):  # the second trace begins with what the first one knew
        found = run(QuickFakeTensorMode, call)
        assert found == wanted
        assert found[2] == 3 and len({*found[0]}) == 1


def test_another_trace_runs_no_op_once_more(known, monkeypatch):
    ran = []
    plain = FakeTensorMode.dispatch
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda self, func, *a: ran.append(func) or plain(self, func, *a))
    counts = []
    for _ in range(2):
        run(QuickFakeTensorMode, CALLS["view"])
        counts.append(sum(func in (aten.slice.Tensor, aten.transpose.int) for func in ran))
    assert counts == [2, 2]  # once each in the first trace, of three equal calls


def sum_of_two(hints):
    """The sum of x[n] and y[m], in a trace of its own: (its size, what the trace then takes for granted)."""
    env = ShapeEnv()
    mode = QuickFakeTensorMode(shape_env=env)
    sizes = []
    for name, hint in zip("nm", hints, strict=True):
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=source))
    with mode:
        xs = [torch.empty(n) for n in sizes]
        total = aten.add.Tensor(*xs)
    return total.shape[0].node.expr, [g.expr for g in env.guards]


def test_what_an_op_takes_for_granted_is_taken_in_every_trace(known):
    first, again = sum_of_two((4, 4)), sum_of_two((4, 4))
    assert first == again and [type(g).__name__ for g in first[1]] == ["Equality"]


def test_what_is_known_of_a_size_is_part_of_the_question(known):
    answers = []
    for least in (0, 7, 0):
        env = ShapeEnv()
        mode = QuickFakeTensorMode(shape_env=env)
        source = ConstantSource("n")
        size = env.create_symintnode(env.create_symbol(9, source, DimDynamic.DYNAMIC), hint=9, source=source)
        assert not least or bool(size >= least)
        with mode:
            aten.slice.Tensor(torch.empty(size), 0, 0, 5)
        answers.append([g.expr for g in env.guards])
    assert answers[0] == answers[2] and len(answers[1]) == 1  # at least 7 rows: that 5 are there follows


def test_a_size_that_an_op_makes_is_not_that_of_another_trace(known):
    for _ in range(2):
        env = DataShapeEnv()
        with QuickFakeTensorMode(shape_env=env):
            found = torch.ops.megafx.rows(torch.empty(4, dtype=torch.bool), "chosen")
        assert found.shape[0].node.expr == env.row_counts["chosen"].node.expr


def test_other_arguments_give_other_results():
    mode = QuickFakeTensorMode(shape_env=ShapeEnv())
    with mode:
        x = torch.empty(3, 4, dtype=torch.int64)
        for _ in range(2):
            assert [(x + n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]
            assert [torch.empty(n, 3).sum(dim).shape for n, dim in ((2, 0), (4, 0), (4, 1))] == [(3,), (3,), (4,)]
            assert [torch.matmul(torch.empty(a, 3), torch.empty(3, b)).shape for a, b in ((2, 5), (5, 2))] == [
                (2, 5),
                (5, 2),
            ]
        number = torch.tensor(2)
        assert [int(number + n) for n in (1, 2)] == [3, 4]  # of constants the values are known
