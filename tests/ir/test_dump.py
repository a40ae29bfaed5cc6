"""Covers: dump.py."""

import operator
import re

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from megafx.errors import SourceLine, UsageError
from megafx.ir import dump
from megafx.ir.program import FQN, MADE_BY, PHASE, PLACEMENT, SOURCE, VAL, Input, Output, Phase, Program
from megafx.ir.sizes import Sizes
from megafx.placements.types import I, Layout, P, S

aten = torch.ops.aten


def program(fn, *inputs, names=(), dynamic=False) -> Program:
    gm = make_fx(fn, tracing_mode="symbolic" if dynamic else "fake")(*inputs)
    values = [n.meta[VAL] for n in gm.graph.find_nodes(op="placeholder")]
    out = gm.graph.output_node()
    if not isinstance(out.args[0], (tuple, list)):
        out.args = ((out.args[0],),)
    outputs = [Output("user", f"out{i}") for i in range(len(out.args[0]))]
    inputs = [Input("user", name) for name in names]
    return Program(gm, inputs, outputs, Sizes(), values[0].fake_mode, pytree.tree_structure(0))


def mm_relu(x, w):
    return aten.relu.default(aten.mm.default(x, w))


def test_text_of_a_placed_graph():
    g = program(mm_relu, torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(8, 6, dtype=torch.bfloat16), names="xw")
    x, w, mm, relu, _ = g.graph.nodes
    for node, p in ((x, S(1, Layout.contiguous(8, 2))), (w, S(0, Layout.contiguous(8, 2))), (mm, P), (relu, I)):
        node.meta[PLACEMENT] = p
    assert dump.text(g, t=2) == (
        "%0 = x           # bf16[4 8/2] S1@tp\n"
        "%1 = w           # bf16[8/2 6] S0@tp\n"
        "%2 = mm(%0, %1)  # bf16[4 6] P@tp\n"
        "%3 = relu(%2)    # bf16[4 6] I@tp\n"
        "return %3"
    )
    assert "%0 = x           # bf16[4 8] S1@tp\n" in dump.text(g)  # degree unknown: the dim as it is


def test_symbols_are_shown_by_name():
    def fn(x):
        return aten.view.default(x, [x.shape[0] * x.shape[1], 3])

    g = program(fn, torch.ones(4, 5, 3), names="x", dynamic=True)
    g.sizes.symbols["b"] = g.placeholders()[0].meta[VAL].shape[0].node.expr
    lines = dump.text(g).splitlines()
    assert lines[0].endswith("# f32[b d0 3]")
    assert "sym_size.int(%0, 0)" in lines[1] and lines[1].endswith("# int b")
    assert lines[-2].endswith("# f32[b*d0 3]")


def test_arguments_and_kinds():
    def fn(x, y):
        return aten.cat.default([x, y], 1), aten.sum.dim_IntList(x, [0], True, dtype=torch.float64)

    g = program(fn, torch.ones(2, 3), torch.ones(2, 3), names=("h.weight", "args[0]"))
    g.inputs[0] = Input("param", "h.weight")
    g.outputs[1] = Output("gradient", "h.weight")
    assert re.match(r"%0 = h.weight +# f32\[2 3\] param\n%1 = args\[0\] +# f32\[2 3\]\n", dump.text(g))
    assert "%2 = cat([%0, %1], 1) " in dump.text(g)
    assert "%3 = sum.dim_IntList(%0, [0], True, dtype=f64)  # f64[1 3]" in dump.text(g)
    assert dump.text(g).endswith("return %2  # user out0\nreturn %3  # gradient h.weight")


def test_details():
    g = program(mm_relu, torch.ones(4, 8), torch.ones(8, 6), names="xw")
    mm = list(g.graph.nodes)[2]
    mm.meta.update({FQN: "h.0.fc", SOURCE: SourceLine("/a/model.py", 12, "x @ w"), MADE_BY: ("canonicalize",)})
    line = "%2 = mm(%0, %1)  # f32[4 6]  [h.0.fc]  model.py:12  by canonicalize"
    assert dump.text(g, details=True).splitlines()[2] == line


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (aten.mm.default, "mm"),
        (aten.add.Tensor, "add"),
        (aten.add.Scalar, "add.Scalar"),
        (operator.getitem, "operator.getitem"),
        (torch.sym_max, "sym_max"),
    ],
)
def test_op_names(target, name):
    assert dump.target_text(target) == name


BEFORE = "%0 = x        # f32[4]\n%1 = relu(%0)  # f32[4]\n%2 = neg(%1)   # f32[4]\n%3 = exp(%2)   # f32[4]\nreturn %3"


def test_diff_ignores_renumbering_and_alignment():
    assert dump.diff(BEFORE, BEFORE.replace("  # f32", "      # f32")) == ""
    calls = ("x", "abs(%0)", "relu(%1)", "neg(%2)", "exp(%3)")
    after = "\n".join([*(f"%{n} = {call}  # f32[4]" for n, call in enumerate(calls)), "return %4"])
    assert dump.diff(BEFORE, after, context=1) == (
        "  %0 = x  # f32[4]\n"
        "- %1 = relu(%0)  # f32[4]\n"
        "+ %1 = abs(%0)  # f32[4]\n"
        "+ %2 = relu(%1)  # f32[4]\n"
        "  %3 = neg(%2)  # f32[4]"
    )


def test_diff_sees_another_operand():
    after = BEFORE.replace("exp(%2)", "exp(%1)")
    assert dump.diff(BEFORE, after, context=0) == "  ...\n- %3 = exp(%2)   # f32[4]\n+ %3 = exp(%1)   # f32[4]"


def test_diff_takes_a_replaced_value_as_one_change():
    after = BEFORE.replace("relu(%0)", "gelu(%0)")
    assert dump.diff(BEFORE, after, context=0) == "  ...\n- %1 = relu(%0)  # f32[4]\n+ %1 = gelu(%0)  # f32[4]"


def test_diff_folders(tmp_path):
    for name, body in (("a", BEFORE), ("b", BEFORE.replace("exp", "log"))):
        (tmp_path / name / "graph1").mkdir(parents=True)
        (tmp_path / name / "00_capture.txt").write_text(BEFORE)
        (tmp_path / name / "graph1" / "01_fuse.txt").write_text(body)
    found = dump.diff_folders(tmp_path / "a", tmp_path / "b")
    assert found.splitlines()[1] == f"+++ {tmp_path / 'b' / 'graph1' / '01_fuse.txt'}"
    assert "- %3 = exp(%2)   # f32[4]\n+ %3 = log(%2)   # f32[4]" in found
    assert "00_capture" not in found
    assert dump.diff_folders(tmp_path / "a", tmp_path / "a") == ""
    with pytest.raises(UsageError, match="is not a dump folder"):
        dump.diff_folders(tmp_path / "a", tmp_path / "none")


def a_block() -> Program:
    def fn(x, w):
        y = aten.mm.default(x, w)
        z = aten.relu.default(y)
        return aten.neg.default(aten.add.Tensor(z, x))

    g = program(fn, torch.ones(4, 4), torch.ones(4, 4), names="xw")
    g.inputs[1] = Input("param", "h.0.mlp.fc.weight")
    _, _, mm, relu, add, neg, _ = g.graph.nodes
    line = SourceLine("model.py", 12, "return act(self.fc(x))")
    for node, fqn in ((mm, "h.0.mlp.fc"), (relu, "h.0.mlp"), (add, "h.0"), (neg, "h.0.mlp2")):
        node.meta.update({FQN: fqn, SOURCE: line})
    relu.meta[MADE_BY] = ("canonicalize",)
    return g


def test_readable_code_of_one_module():
    assert dump.readable(a_block(), "h.0.mlp") == (
        "# forward of 'h.0.mlp': 2 nodes, phase CAPTURED\n"
        "def forward(\n"
        "    x_1,  # f32[4 4], user x\n"
        "    w_1,  # f32[4 4], param h.0.mlp.fc.weight\n"
        "):\n"
        "    # model.py:12 `return act(self.fc(x))`\n"
        "    mm = aten.mm(x_1, w_1)  # f32[4 4]\n"
        "    relu = aten.relu(mm)    # f32[4 4]; canonicalize\n"
        "    return relu\n"
    )


def test_readable_code_has_the_backward_apart():
    g = a_block()
    g.phase = Phase.JOINT
    list(g.graph.nodes)[3].meta[PHASE] = "backward"
    text = dump.readable(g, "h.0.mlp")
    assert "# forward of 'h.0.mlp': 1 nodes, phase JOINT" in text
    assert (
        "# backward of 'h.0.mlp': 1 nodes, phase JOINT\ndef backward(\n    mm,  # f32[4 4], from h.0.mlp.fc\n" in text
    )


def test_readable_code_of_a_module_without_nodes():
    with pytest.raises(UsageError, match=r"no node .* 'h\.0\.mpl'\n  fix: modules with nodes: 'h\.0\.mlp'"):
        dump.readable(a_block(), "h.0.mpl")
