"""Mixtures that give their experts tokens by index, whose number the data decides: against eager at fp64.

Covers: ir/data_sizes.py, kernels/nonzero.py, passes/canonicalize/sizes.py, ir/sizes.py where sizes stem from data.
dist/on_ranks/call_structures.py has one on real ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import index_dispatch as moe
import pytest
import sympy
import torch
from calls import captured
from index_dispatch import RTOL, assert_as_eager, collectives, made_for, tokens
from torch import Tensor

import megafx
from megafx.errors import CaptureError
from megafx.ir.data_sizes import if_there_are_rows

SLOW = pytest.mark.slow


def each() -> list[Any]:
    """(form, t, sequence_parallel): all; each form once and the others marked slow."""
    cases = []
    for i, name in enumerate(moe.FORMS):
        for k, (t, sp) in enumerate([(2, "auto"), (3, False), (4, "auto"), (3, True)]):
            cases.append(pytest.param(name, t, sp, marks=[] if k == i % 4 else SLOW))
    return cases


@pytest.mark.parametrize(("name", "t", "sp"), each())
def test_form(name: str, t: int, sp: Any) -> None:
    """One graph for every routing and number of tokens, down to one; experts without tokens too."""
    model = moe.Model(moe.FORMS[name]).double()
    program, made = made_for(model, t, sequence_parallel=sp)
    for e in range(moe.EXPERTS):
        tags = {w: made.plan.params[f"moe.experts.{e}.{w}.weight"].tag for w in ("gate", "up", "down")}
        assert tags == {"gate": "S0", "up": "S0", "down": "S1"}
    assert not made.plan.params["moe.router.weight"].is_shard
    for x in (tokens(3, 5), tokens(2, 9), tokens(1, 1)):
        assert_as_eager(model, program, made, x)
    moe.turn_off(model, [1, 3])
    none = assert_as_eager(model, program, made, tokens(3, 5))
    off = {f"moe.experts.{e}.{w}.weight" for e in (1, 3) for w in ("gate", "up", "down")}
    assert none == (off if name in moe.BRANCHING else set())


@pytest.mark.slow
@pytest.mark.parametrize("form", [moe.where_add_in_place, moe.boolean_of_own])
def test_one_reduction_for_the_whole_mixture(form: Any) -> None:
    """Summands go through the index_adds, into zeros too: one all-reduce forward, one of the gradient of the tokens."""
    _, made = made_for(moe.Model(form).double(), 2, sequence_parallel=False)
    found = collectives(made)
    assert found["forward all_reduce"] == 2  # of `first`, and of the mixture
    assert found["backward all_reduce"] + found["backward all_reduce_coalesced"] == 2  # of the tokens; of the router
    assert found.total() == 4, found


@pytest.mark.slow
def test_biases_of_experts() -> None:
    model = moe.Model(moe.nonzero_index_add_in_place, bias=True).double()
    program, made = made_for(model, 3)
    moe.turn_off(model, [0])
    assert assert_as_eager(model, program, made, tokens(3, 5)) == set()


def test_notes_say_what_is_taken_for_granted() -> None:
    program = captured(moe.Model(moe.skip_if_empty).double(), {"x": tokens(3, 5)})
    (note,) = [n.message for n in program.notes if "taken for granted" in n.message]
    assert "index_dispatch.py" in note and "`if rows.numel() == 0:`" in note


def test_one_graph_of_a_parallelized_model() -> None:
    """Training, no_grad and inference; the plan prices an equal share of the tokens' choices."""
    model = moe.Model(moe.only_if_some).double()
    plain = copy.deepcopy(model)
    parallel = megafx.parallelize(model)
    for x in (tokens(3, 5), tokens(2, 9), tokens(1, 1)):
        found, wanted = parallel(x), plain(x)
        torch.testing.assert_close(found["loss"], wanted["loss"], rtol=RTOL, atol=0)
        found["loss"].backward()
    assert parallel.megafx.captures == 1
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(parallel(tokens(2, 3))["loss"], plain(tokens(2, 3))["loss"], rtol=RTOL, atol=0)


def test_equal_shares_are_priced() -> None:
    _, made = made_for(moe.Model(moe.where_add_in_place).double(), 2, seq_length=40, micro_batch_size=2)
    sizes = made.program.sizes
    assert len(sizes.row_counts) == moe.EXPERTS
    for symbol, count in sizes.row_counts.items():
        assert count.shares == moe.EXPERTS and sizes.workload(count.among) == 2 * 40 * moe.TOP
        assert sizes.workload(sizes.of_expr(symbol)) == 2 * 40 * moe.TOP // moe.EXPERTS
        assert sizes.from_data(sizes.of_expr(symbol) * 6)
    assert not sizes.from_data(sizes.of_expr(sizes.symbols["batch"]))


@pytest.mark.slow
def test_verify_and_dump() -> None:
    model = moe.Model(moe.squeezed_index_add).double()
    verdict = megafx.verify(model, megafx.Config(tensor_model_parallel_size=3), example_inputs=(tokens(3, 5),))
    assert verdict.ok, str(verdict)


# -- what is not handled


def enough(out, x, weights, chosen, e, expert):
    rows = torch.where(chosen == e)[0]
    return out if rows.numel() < 3 else out.index_add(0, rows, expert(x[rows]))


def length(out, x, weights, chosen, e, expert):
    rows = torch.where(chosen == e)[0]
    return out if len(rows) == 0 else out.index_add(0, rows, expert(x[rows]))


def any_of_mask(out, x, weights, chosen, e, expert):
    rows = torch.where(chosen == e)[0]
    return out.index_add(0, rows, expert(x[rows])) if (chosen == e).any() else out


class Hit(moe.Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(x[0]).topk(2)
        out = torch.zeros_like(x[0])
        hit = torch.bincount(chosen.flatten(), minlength=moe.EXPERTS).nonzero().squeeze(-1)
        for e in hit:
            out = moe.where_add_in_place(out, x[0], weights, chosen, e, self.experts[e])
        return out, weights.sum()


@pytest.mark.parametrize(
    ("form", "line"),
    [(enough, "if rows.numel() < 3"), (length, "if len(rows) == 0"), (any_of_mask, "if (chosen == e).any()")],
)
def test_other_questions_to_data_are_refused(form: moe.Form, line: str) -> None:
    with pytest.raises(CaptureError) as error:
        captured(moe.Model(form).double(), {"x": tokens(3, 5)})
    text = str(error.value)
    print(text)
    assert line in text and "'moe'" in text and "numel() == 0" in text


def test_loops_over_the_experts_that_were_hit_are_refused() -> None:
    model = moe.Model(moe.where_add_in_place).double()
    model.moe = Hit(moe.where_add_in_place).double()
    with pytest.raises(CaptureError) as error:
        captured(model, {"x": tokens(3, 5)})
    print(str(error.value))
    assert "for e in hit" in str(error.value) and "enumerate(self.experts)" in str(error.value)


# -- parts


def test_questions_about_numbers_of_rows() -> None:
    """Answered where every number of rows but 0 has the same answer."""
    u, s = sympy.Symbol("u", integer=True), sympy.Symbol("s", integer=True)
    answers: list[tuple[Any, bool | None]] = [
        (sympy.Eq(u, 0), False),
        (sympy.Ne(u, 0), True),
        (u > 0, True),
        (u >= 1, True),
        (u < 1, False),
        (u <= 0, False),
        (sympy.Eq(6 * u, 0, evaluate=False), False),
        (u > 1, None),
        (u < 2, None),
        (sympy.Eq(u, 1), None),
        (sympy.Ne(u, 7), None),
        (sympy.Eq(2 * u, 5, evaluate=False), False),
        (sympy.Eq(u, s), None),
        (sympy.Eq(s, 0), None),
        (u**2 > 4, None),
    ]
    for question, answer in answers:
        assert if_there_are_rows(question, lambda symbol: symbol == u) is answer, question
