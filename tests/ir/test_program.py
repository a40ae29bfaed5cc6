"""Covers: what of ir/program.py no other file covers."""

from __future__ import annotations

import torch
import zoo

from megafx.capture.export import capture_call
from megafx.ir.program import number_nodes
from megafx.passes.canonicalize.canonicalize import canonicalize_program


def test_a_graph_and_its_copy_get_the_same_names() -> None:
    """A plan made for the one is for the other, whatever each was rewritten from."""
    model, inputs = zoo.build("nanogpt", layers=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # regions, which canonicalize inlines
        program = capture_call(model.float(), (), inputs(2, 16))
    programs = [program.copy(), program]
    for p in programs:
        canonicalize_program(p)
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        node.name = f"{node.name}_of_another_rewrite"
    for p in programs:
        number_nodes(p.graph)
        p.graph.lint()
    assert [n.name for n in program.graph.nodes] == [n.name for n in programs[0].graph.nodes]
    assert {"linear", "linear_1", "layer_norm"} <= {n.name for n in program.graph.nodes}
    assert [n.name for n in program.placeholders()] == [n.name for n in programs[0].placeholders()]
