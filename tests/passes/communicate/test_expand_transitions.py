"""Covers passes/communicate/expand_transitions.py, passes/communicate/merge_transitions.py and
megafx/analysis/communication.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafx.analysis.communication import COLLECTIVES, collective_nodes, communication
from megafx.ir.program import FQN, MADE_BY, PHASE, Phase, Program
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.communicate.merge_transitions import merge_transitions
from megafx.placements.types import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, LOCAL, REDUCE_SCATTER, TRANSITIONS
from megafx.testing import assert_same, expect, graph, make_context, run_logically, run_pass, transition, with_backward

aten = torch.ops.aten


def moving(dst: str, **x: str) -> Program:
    return graph(lambda x: transition(x, dst), out=dst.partition("/")[0] + "@tp", local=True, **x)


def check_moving(dst: str, x: str, text: str) -> None:
    """What a transition of x to `dst` becomes."""
    expect(run_pass(expand_transitions, moving(dst, x=x)), text, t=2)


def row_parallel() -> Program:
    return graph(
        lambda x, w: transition(aten.mm(x, w), "I", src="P"),
        x="bf16[t=4 k=8] S1@tp",
        w="bf16[k=8 n=6] S0@tp",
        local=True,
    )


def test_row_parallel_all_reduces_forward_only() -> None:
    before = with_backward(row_parallel())
    after = run_pass(expand_transitions, before)
    expect(
        after,
        """
        %0 = x                            # bf16[4 8/2] S1@tp
        %1 = w                            # bf16[8/2 6] S0@tp
        %2 = 0                            # bf16[4 6] tangent
        %3 = mm(%0, %1)                   # bf16[4 6]
        %4 = all_reduce(%3, 'sum', 'tp')  # bf16[4 6]
        %5 = wait_tensor(%4)              # bf16[4 6] I@tp
        %6 = t(%0)                        # bf16[4 4]
        %7 = mm(%6, %2)                   # bf16[4 6]
        %8 = t(%1)                        # bf16[6 4]
        %9 = mm(%2, %8)                   # bf16[4 4]
        return %5  # user 0
        return %9  # gradient x
        return %7  # gradient w
        """,
        t=2,
    )
    assert_same(before, after)
    assert after.phase == Phase.LOWERED


def test_column_parallel_all_reduces_backward_only() -> None:
    before = with_backward(
        graph(
            lambda x, w: aten.mm(transition(x, "R"), w),
            x="bf16[t=4 k=8] I@tp",
            w="bf16[k=8 n=6] S1@tp",
            out="S1@tp",
            local=True,
        )
    )
    after = run_pass(expand_transitions, before)
    (only,) = collective_nodes(after.graph)
    assert COLLECTIVES[only.target] == ALL_REDUCE and only.meta[PHASE] == "backward"
    assert_same(before, after)


def test_contiguous_shards_of_dim0_are_gathered_as_they_are() -> None:
    check_moving(
        "R",
        "f32[4 6] S0@tp",
        """
        %0 = x                                    # f32[4/2 6] S0@tp
        %1 = all_gather_into_tensor(%0, 2, 'tp')  # f32[4 6]
        %2 = wait_tensor(%1)                      # f32[4 6] R@tp
        return %2
        """,
    )


def test_padding_is_dropped() -> None:
    check_moving(
        "R",
        "f32[5 6] S0@tp",
        """
        %0 = x                                    # f32[5/2 6] S0@tp
        %1 = all_gather_into_tensor(%0, 2, 'tp')  # f32[6 6]
        %2 = wait_tensor(%1)                      # f32[6 6]
        %3 = slice(%2, 0, 0, 5)                   # f32[5 6] R@tp
        return %3
        """,
    )


def test_reduce_scatter_of_an_inner_dim() -> None:
    check_moving(
        "S1",
        "f32[4 6] P@tp",
        """
        %0 = x                                          # f32[4 6] P@tp
        %1 = view(%0, [4, 2, 3])                        # f32[4 2 3]
        %2 = permute(%1, [1, 0, 2])                     # f32[2 4 3]
        %3 = contiguous(%2)                             # f32[2 4 3]
        %4 = view(%3, [8, 3])                           # f32[8 3]
        %5 = reduce_scatter_tensor(%4, 'sum', 2, 'tp')  # f32[4 3]
        %6 = wait_tensor(%5)                            # f32[4 6/2] S1@tp
        return %6
        """,
    )


def test_all_to_all_is_native() -> None:
    check_moving(
        "S1",
        "f32[5 6] S0@tp",
        """
        %0 = x                                            # f32[5/2 6] S0@tp
        %1 = view(%0, [3, 2, 3])                          # f32[3 2 3]
        %2 = permute(%1, [1, 0, 2])                       # f32[2 3 3]
        %3 = contiguous(%2)                               # f32[2 3 3]
        %4 = all_to_all_single(%3, [1, 1], [1, 1], 'tp')  # f32[2 3 3]
        %5 = wait_tensor(%4)                              # f32[2 3 3]
        %6 = view(%5, [6, 3])                             # f32[6 3]
        %7 = slice(%6, 0, 0, 5)                           # f32[5 6/2] S1@tp
        return %7
        """,
    )


def test_a_dynamic_sequence_takes_its_sizes_from_the_inputs() -> None:
    after = run_pass(
        expand_transitions,
        graph(
            lambda ids, x: (ids, transition(x, "R")),
            ids="i64[b s]",
            x="f32[b s 6] S1@tp",
            out=("I@tp", "R@tp"),
            local=True,
        ),
    )
    expect(
        after,
        """
        %0 = ids                                  # i64[b s] I@tp
        %1 = x                                    # f32[b s/2 6] S1@tp
        %2 = sym_size.int(%0, 1)                  # int s
        %3 = sym_size.int(%0, 0)                  # int b
        %4 = operator.add(1, %2)                  # int s+1
        %5 = operator.floordiv(%4, 2)             # int ((s+1)//2)
        %6 = operator.mul(2, %5)                  # int 2*(((s+1)//2))
        %7 = all_gather_into_tensor(%1, 2, 'tp')  # f32[2*b ((s+1)//2) 6]
        %8 = wait_tensor(%7)                      # f32[2*b ((s+1)//2) 6]
        %9 = view(%8, [2, %3, %5, 6])             # f32[2 b ((s+1)//2) 6]
        %10 = permute(%9, [1, 0, 2, 3])           # f32[b 2 ((s+1)//2) 6]
        %11 = contiguous(%10)                     # f32[b 2 ((s+1)//2) 6]
        %12 = view(%11, [%3, %6, 6])              # f32[b 2*(((s+1)//2)) 6]
        %13 = slice(%12, 1, 0, %2)                # f32[b s 6]
        %14 = contiguous(%13)                     # f32[b s 6] R@tp
        return %0, %14
        """,
        t=2,
    )


@pytest.mark.parametrize("row", [("I", "R"), ("R", "I")])
def test_identities_vanish(row: tuple[str, str]) -> None:
    before = graph(
        lambda x: aten.mul(transition(x, row[1]), 2.0), x=f"f32[4 6] {row[0]}@tp", out=f"{row[1]}@tp", local=True
    )
    expect(
        run_pass(expand_transitions, before),
        f"""
        %0 = x            # f32[4 6] {row[0]}@tp
        %1 = mul(%0, 2.0)  # f32[4 6] {row[1]}@tp
        return %1
        """.replace("= x            #", "= x             #"),
        t=2,
    )


def test_an_identity_whose_value_is_expanded_is_copied() -> None:
    """Views after it were traced on the dense result of the op."""
    before = with_backward(
        graph(lambda x: aten.sum(transition(x, "I")), x="f32[4 6] R@tp", local=True)
    )  # backward: expand, I -> P
    after = run_pass(expand_transitions, before)
    assert_same(before, after)


def test_a_gradient_owns_its_memory() -> None:
    before = with_backward(graph(lambda x: transition(x, "I"), x="f32[4 6] P@tp", local=True))
    after = run_pass(expand_transitions, before)
    result: Any = after.output_node().args[0]
    assert result[1].op != "placeholder"
    assert_same(before, after)


def test_meta_of_backward_collectives() -> None:
    before = with_backward(
        graph(
            lambda x, w: aten.mm(transition(x, "R"), w), x="f32[5 8] S0@tp", w="f32[8 6] S1@tp", out="S1@tp", local=True
        )
    )
    for node in before.graph.find_nodes(op="call_function", target=torch.ops.megafx.transition.default):
        node.meta[FQN] = "layers.0.norm"
    after = run_pass(expand_transitions, before)
    forward, backward = collective_nodes(after.graph)
    assert (COLLECTIVES[forward.target], COLLECTIVES[backward.target]) == (ALL_GATHER, REDUCE_SCATTER)
    assert PHASE not in forward.meta and backward.meta[PHASE] == "backward"
    assert backward.meta[FQN] == "layers.0.norm" and "expand_transitions" in backward.meta[MADE_BY]


@pytest.mark.parametrize("row", sorted(row for row in TRANSITIONS if "M" not in row), ids="->".join)
def test_collectives_are_those_of_the_table(row: tuple[str, str]) -> None:
    """And the bytes are placements.payload's: ring traffic of the whole (padded) tensor."""
    src, dst = ("S0" if row[0] == "S" else row[0]), ("S1" if row[1] == "S" else row[1])
    program = graph(
        lambda x: aten.mul(transition(x, dst), 2.0), x=f"f32[8 12] {src}@tp", out=f"{dst}@tp", mesh="tp=4", local=True
    )
    found = communication(run_pass(expand_transitions, with_backward(program)), 4)
    whole = 8 * 12 * 4
    bytes_of = {
        ALL_REDUCE: whole * 2 * 3 // 4,
        ALL_GATHER: whole * 3 // 4,
        REDUCE_SCATTER: whole * 3 // 4,
        ALL_TO_ALL: whole * 3 // 16,
    }
    table = TRANSITIONS[row]
    expected = [(table.forward, "forward"), (table.backward, "backward")]
    expected = [e for e in expected if e[0] != LOCAL]
    assert [(c.collective, c.direction) for c in found] == expected
    assert [c.bytes_moved for c in found] == [bytes_of[c.collective] for c in found]


def test_bytes_of_dynamic_sizes_are_those_of_the_workload() -> None:
    program = run_pass(expand_transitions, moving("I", x="bf16[b 6] P@tp"))
    (found,) = communication(program, 2)
    assert found.bytes_moved == 5 * 6 * 2  # the traced hint of b is 5; 2 (t - 1) / t of the tensor


def test_the_same_value_is_gathered_once() -> None:
    before = with_backward(
        graph(
            lambda x, v, w: (aten.mm(transition(x, "R"), v), aten.mm(transition(x, "R"), w)),
            x="f32[4 8] S0@tp",
            v="f32[8 6] S1@tp",
            w="f32[8 2] S1@tp",
            out="S1@tp",
            local=True,
        )
    )
    after = run_pass(merge_transitions, before)
    assert len(collective_nodes(run_pass(expand_transitions, before).graph)) == 4
    assert len(collective_nodes(run_pass(expand_transitions, after).graph)) == 3
    assert merge_transitions(after.copy(), make_context()) == 0
    assert_same(before, after)


def test_transitions_to_other_cuts_are_not_merged() -> None:
    before = graph(
        lambda x: (transition(x, "S1"), transition(x, "S1/2x1+2x1")), x="f32[2 4] I@tp", out="S1@tp", local=True
    )
    assert merge_transitions(before.copy(), make_context()) == 0


def test_a_graph_without_transitions_is_left_alone() -> None:
    program = graph(lambda x: aten.mul(x, 2.0), x="f32[4 6] I@tp", local=True)
    changed = program.copy()
    assert expand_transitions(changed, make_context()) == 0
    assert [n.name for n in changed.graph.nodes] == [n.name for n in program.graph.nodes]
    assert changed.phase == Phase.LOWERED


def test_deleting_or_swapping_a_collective_is_seen() -> None:
    """The equality test that guards passes sees each single fault of a graph with both directions."""
    before = with_backward(
        graph(
            lambda x, w, v: transition(aten.mm(aten.tanh(aten.mm(transition(x, "R"), w)), v), "S0", src="P"),
            x="f32[4 8] S0@tp",
            w="f32[8 6] S1@tp",
            v="f32[6 8] S0@tp",
            out="S0@tp",
            local=True,
        )
    )
    sound = run_pass(expand_transitions, before)
    names = [n.name for n in collective_nodes(sound.graph)]
    assert len(names) == 4
    for name in names:
        program = sound.copy()
        node = next(n for n in program.graph.nodes if n.name == name)
        x = node.args[0]
        with program.graph.inserting_before(node):
            if COLLECTIVES[node.target] == ALL_GATHER:  # this rank's shard instead of every rank's
                args, target = ([x, x], 0), aten.cat.default
            else:  # a slice of this rank's summand instead of the sum
                args, target = (x, 0, 0, 2), aten.slice.Tensor
            wrong = program.graph.call_function(target, args)
        wrong.meta.update(node.meta)
        node.replace_all_uses_with(wrong)
        with pytest.raises(AssertionError, match="differs by"):
            assert_same(before, program)


def test_run_logically_is_deterministic() -> None:
    first, second = (run_logically(row_parallel(), 2) for _ in range(2))
    assert torch.equal(first.outputs["0"], second.outputs["0"])
