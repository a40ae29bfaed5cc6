"""Covers: passes/communicate/gather_parameters.py, and passes/communicate/read_shards.py, passes/lower/regather.py."""

from __future__ import annotations

import torch
from lowered import parts_of

from megafx.checks.simulate import simulate
from megafx.ir.program import FQN, RECOMPUTE, VAL, Program
from megafx.passes.communicate.gather_parameters import gather_parameters, gathers
from megafx.passes.communicate.read_shards import gather_what_is_read
from megafx.passes.lower.regather import start_next_region
from megafx.placements.data_axis import COPY_AXIS, SHARD_AXIS, DataAxis
from megafx.placements.types import I, Layout, Placement, S
from megafx.planner.context import CompileContext
from megafx.planner.plan import Plan
from megafx.testing import expect, graph, make_context

aten = torch.ops.aten
SHAPES = {"a": (5, 3), "b": (5,), "c": (2, 5)}


def two_layers() -> Program:
    """a and b of one module, c of the next one."""

    def function(x, a, b, c):
        return aten.mm.default(aten.add.Tensor(aten.mm.default(x, aten.t.default(a)), b), aten.t.default(c))

    values = {n: f"param f64[{' '.join(f'd{i}{n}={k}' for i, k in enumerate(s))}]" for n, s in SHAPES.items()}
    program = graph(function, local=True, x="f64[t=4 k=3]", **values)
    for node in program.graph.nodes:
        later = node.op == "output" or program.output_node() in node.users or program.placeholders()[3] in node.args
        node.meta[FQN] = "second" if later else "first"
    return program


def run(program: Program, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = {n: torch.randn(s, generator=generator).double() for n, s in {"x": (4, 3), **SHAPES}.items()}
    inputs = []
    for rank in range(ranks):
        mine = [whole["x"]]
        for name in SHAPES:
            rows = -(-len(whole[name]) // ranks)
            padded = torch.cat([whole[name], whole[name].new_full((ranks, *SHAPES[name][1:]), 7.0)])
            mine.append((padded[rank * rows : (rank + 1) * rows] if ranks > 1 else whole[name]).clone())
        inputs.append(mine)
    return [r[0] for r in simulate(program, inputs, mesh={"dp_shard": ranks, "tp": 1})]


def context_of(data: DataAxis, stored: dict[str, Placement], t: int = 1) -> CompileContext:
    return make_context(t, data=data, plan=Plan(t, params=stored))


def gathered(form: str) -> Program:
    program = two_layers()
    assert gather_parameters(program, context_of(DataAxis(2, form, 2), dict.fromkeys(SHAPES, I))) == 2
    return program


def test_regions_are_gathered_in_one_collective_each_one_ahead():
    after = gathered("fsdp")
    expect(
        after,
        """
        %0 = x                                       # f64[4 3]
        %1 = a                                       # f64[3 3] param
        %2 = b                                       # f64[3] param
        %3 = c                                       # f64[1 5] param
        %4 = gather_region([%1, %2], 2, 'dp_shard')  # f64[256]
        %5 = wait_tensor(%4)                         # f64[256]
        %6 = slice(%5, 0, 0, 15)                     # f64[15]
        %7 = view(%6, [5, 3])                        # f64[5 3]
        %8 = slice(%5, 0, 128, 133)                  # f64[5]
        %9 = view(%8, [5])                           # f64[5]
        %10 = gather_region([%3], 2, 'dp_shard')     # f64[128]
        %11 = t(%7)                                  # f64[3 5]
        %12 = mm(%0, %11)                            # f64[4 5]
        %13 = add(%12, %9)                           # f64[4 5]
        %14 = wait_tensor(%10)                       # f64[128]
        %15 = slice(%14, 0, 0, 10)                   # f64[10]
        %16 = view(%15, [2, 5])                      # f64[2 5]
        %17 = t(%16)                                 # f64[5 2]
        %18 = mm(%13, %17)                           # f64[4 2] I@tp
        return %18
    """,
    )
    (wanted,) = run(two_layers(), 1)
    for found in run(after, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_each_dtype_and_group_of_ranks_has_its_own():
    program = two_layers()
    with program.fake_mode:
        program.placeholders()[2].meta[VAL] = torch.empty(5, dtype=torch.float32)
    assert gather_parameters(program, context_of(DataAxis(2, "fsdp", 2), dict.fromkeys(SHAPES, I))) == 3
    program = two_layers()
    stored = {"a": S(0, Layout.contiguous(10, 2)), "b": I, "c": I}
    assert gather_parameters(program, context_of(DataAxis(2, "fsdp", 2), stored, t=2)) == 3
    assert [(n.args[1], n.args[2]) for n in gathers(program.graph)] == [(2, SHARD_AXIS), (4, COPY_AXIS), (4, COPY_AXIS)]


def test_backward_gathers_again_in_one_form_and_reads_what_is_kept_in_the_other():
    fsdp, zero1 = gathered("fsdp"), gathered("zero1")
    assert all(n.meta.get(RECOMPUTE) for n in gathers(fsdp.graph))
    assert parts_of(fsdp).joins == () and len([*gathers(parts_of(fsdp).forward.graph)]) == 2
    parts = parts_of(zero1)  # the gathers are further inputs
    assert parts.joins == ((1, 2), (3,)) and parts.gathered == {0: (2, SHARD_AXIS), 1: (2, SHARD_AXIS)}
    assert [*gathers(parts.forward.graph)] == [] and len(parts.forward.graph.find_nodes(op="placeholder")) == 6


def test_only_what_is_read_is_gathered_again():
    program = gathered("fsdp")
    (add,) = program.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    add.replace_all_uses_with(add.args[0])
    program.graph.eliminate_dead_code()
    assert gather_what_is_read(program.graph) == 1 and gather_what_is_read(program.graph) == 0
    first, _ = gathers(program.graph)
    (wait,) = first.users
    assert [n.name for n in first.args[0]] == ["a"] and wait.meta[VAL].shape == (128,)
    # of the parameter that is left out, the next one takes the place
    program = gathered("fsdp")
    (product, _) = program.graph.find_nodes(op="call_function", target=aten.mm.default)
    product.replace_all_uses_with(product.args[0])
    program.graph.eliminate_dead_code()
    assert gather_what_is_read(program.graph) == 1
    first, _ = gathers(program.graph)
    (part,) = next(iter(first.users)).users
    assert [n.name for n in first.args[0]] == ["b"] and part.args[2:] == (0, 5)


def test_backward_starts_the_next_region_while_one_computes():
    nodes = [n for n in gathered("fsdp").graph.nodes if n.op == "call_function"]
    first, second = (n for n in nodes if n.target is torch.ops.megafx.gather_region.default)
    late = [n for n in nodes if n is not second]
    late.insert(late.index(next(iter(second.users))), second)  # as partition writes it: in front of its first use
    order = start_next_region(late)
    assert sorted(order) == sorted(late) and order[0] is first
    assert order.index(second) == order.index(next(iter(first.users))) + 1
    assert start_next_region(order) == order and start_next_region(nodes[-2:]) == nodes[-2:]
