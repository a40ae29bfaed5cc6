"""Covers: passes/recompute/, megafx/analysis/kept.py, megafx/ops/again.py, and what lower/partition.py makes of their tags."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from dataclasses import replace
from typing import Any

import numpy
import pytest
import scipy.optimize
import torch
from harness import Case, chosen
from torch import nn

from megafx.analysis.kept import Kept, is_free, is_given, is_replayable, is_value
from megafx.analysis.prices import bytes_of, seconds
from megafx.checks.simulate import Logical
from megafx.compiler.all_ranks import run_ranks
from megafx.compiler.compiled import Compiled
from megafx.config import Config
from megafx.errors import ConfigError, PlanError
from megafx.ir.nodes import in_backward, is_draw, op_name
from megafx.ir.program import RECOMPUTE, Program, Recomputed
from megafx.ops.again import when_repeated
from megafx.passes.lower.partition import cut
from megafx.passes.recompute.budget import allowed, whole
from megafx.passes.recompute.choose_kept import split_norms

BUDGETS = [n / 10 for n in range(11)]
OPTIONS: list[dict[str, Any]] = [
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "*.mlp*"]},
    {"recompute_granularity": "full"},
    {"recompute_granularity": "full", "recompute_num_layers": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["norm", "act"]},
    {"recompute_granularity": "full", "recompute_method": "block", "activation_memory_budget": 0.3},
]


@functools.cache
def case(name: str) -> Case:
    return Case.of(name, layers=2, dropout=0.1)


@functools.cache
def plain(name: str, t: int, sp: bool) -> tuple[Compiled, Logical]:
    """The model as it is compiled without a budget, and what it computes."""
    made = case(name).compile(t, sequence_parallel=sp)
    assert made.program.recomputed is None
    return made, case(name).run(made, case(name).inputs(2, 16))


def outcome(made: Compiled) -> Recomputed:
    assert made.program.recomputed is not None
    return made.program.recomputed


def differing(found: Logical, wanted: Logical) -> list[str]:
    """Names of outputs and gradients that do not have the same bits."""
    pairs = [(n, found.outputs[n], v) for n, v in wanted.outputs.items()]
    pairs += [(n, found.gradients[n], v) for n, v in wanted.gradients.items()]
    assert len(pairs) > 10
    return [n for n, a, b in pairs if (a is None) != (b is None) or (b is not None and not torch.equal(a, b))]


def check(name: str, t: int, sp: bool, **options: Any) -> Recomputed:
    made, wanted = plain(name, t, sp)
    again = chosen(made, **options)
    assert differing(case(name).run(again, case(name).inputs(2, 16)), wanted) == []
    return outcome(again)


PLACES = [(1, False), (2, True), (3, False), (4, True)]


@pytest.mark.parametrize(("t", "sp"), PLACES)
def test_same_bits_at_some_budgets(t: int, sp: bool) -> None:
    found = [check("nanogpt", t, sp, activation_memory_budget=budget) for budget in (0.6, 0.3, 0.0)]
    assert all(f.promise is not None and f.kept <= f.promise for f in found) and found[-1].kept == 0


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o.values())))
def test_same_bits_with_each_option(options: dict[str, Any]) -> None:
    for t, sp in PLACES[:2]:
        found = check("nanogpt", t, sp, **options)
        assert found.kept < found.without


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("t", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["nanogpt", "gpt2", "llama", "t5"])
def test_same_bits_everywhere(name: str, t: int, sp: bool) -> None:
    for budget in BUDGETS:
        check(name, t, sp, activation_memory_budget=budget)
    for options in OPTIONS:
        if name == "nanogpt" or "recompute_modules" not in options:
            check(name, t, sp, **options)


@pytest.mark.parametrize(("name", "t", "sp"), [("nanogpt", 2, True), ("llama", 1, False)])
def test_a_larger_budget_keeps_the_promise_and_never_takes_longer(name: str, t: int, sp: bool) -> None:
    made, _ = plain(name, t, sp)
    without = outcome(chosen(made, activation_memory_budget=1.0)).without
    found = [outcome(chosen(made, activation_memory_budget=without * n // 40 + 2)) for n in range(41)]
    assert all(f.kept <= (f.promise or 0) for f in found) and len({f.kept for f in found}) > 15
    times = [f.seconds for f in found]
    assert times == sorted(times, reverse=True) and times[-1] == 0.0 < times[0]
    assert [f.kept for f in found] == sorted(f.kept for f in found)


@functools.cache
def deep(name: str, t: int, layers: int = 4) -> Compiled:
    return Case.of(name, layers=layers, dropout=0.1).compile(t, sequence_parallel=t > 1)


def copied_products(made: Compiled, again: Compiled) -> int:
    count = lambda c: sum(op_name(n) in ("mm", "addmm") for n in c.program.graph.nodes)
    return count(again) - count(made)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "t"), [("nanogpt", 1), ("nanogpt", 2)])
def test_keeping_less_than_what_layers_pass_on_does_not_raise_the_peak(name: str, t: int) -> None:
    """What a layer makes again for the next one is freed, and made once more for itself."""
    made = deep(name, t)
    found = [chosen(made, activation_memory_budget=n / 80) for n in range(0, 13, 2)]
    first = next(
        i for i, c in enumerate(found) if not copied_products(made, c)
    )  # the smallest that keeps what is passed on
    peaks = [max(m.forward.peak, m.backward.peak) for c in found[: first + 1] if (m := c.memory()).backward]
    assert first >= 2 and peaks == sorted(peaks), peaks
    times = [outcome(c).seconds for c in found]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.slow
def test_values_that_layers_pass_on_anew_have_the_same_bits() -> None:
    made, own, inputs = deep("nanogpt", 2, 3), Case.of("nanogpt", layers=3, dropout=0.1), case("nanogpt").inputs(2, 16)
    again = own.compile(2, sequence_parallel=True, activation_memory_budget=0.0)  # with the passes that come behind
    assert copied_products(made, again) > 0
    assert differing(own.run(again, inputs), own.run(made, inputs)) == []


def test_a_fused_loss_is_priced_by_the_dtype_of_its_products() -> None:
    """Its result is fp32 where they are bf16."""
    made = deep("nanogpt", 1)
    program, hardware = (
        made.program.copy(),
        replace(made.context.hardware, memory_bytes_per_second=1e30, kernel_seconds=0.0),
    )
    (node,) = [n for n in program.graph.nodes if op_name(n) == "linear_cross_entropy_forward"]
    before = seconds(program, node, hardware, 1)
    for operand in node.all_input_nodes:
        if operand.meta["val"].is_floating_point():
            operand.meta["val"] = operand.meta["val"].to(torch.bfloat16)
    found = seconds(program, node, hardware, 1)
    assert found * hardware.flops("bfloat16") == pytest.approx(before * hardware.flops("float64")) and found > 0


def test_a_long_chain_is_made_again_without_recursion() -> None:
    program = chosen(deep("nanogpt", 1), activation_memory_budget=0.0).program
    depth: dict[Any, int] = {}  # of a chain of what is made again
    for node in program.graph.nodes:
        if node.meta.get(RECOMPUTE):
            depth[node] = 1 + max((depth.get(a, 0) for a in node.all_input_nodes), default=0)
    limit, room = sys.getrecursionlimit(), 110
    sys.setrecursionlimit(len(inspect.stack()) + room)
    try:
        parts = cut(program)
    finally:
        sys.setrecursionlimit(limit)
    assert max(depth.values()) > room
    assert parts.backward is not None and len(parts.backward.graph.nodes) > len(depth)


def least_seconds(made: Compiled, promise: int) -> float:
    """The least time in which values can be made again so that at most `promise` bytes are kept, by integer programming:
    each value is kept (k) or made (r), and what is made has its operands."""
    program, context = made.program.copy(), made.context
    split_norms(program)
    kept, may = Kept(program, lambda n: bool(n.meta.get(RECOMPUTE))), allowed(program, context)
    readers = {n: [r for r in found if in_backward(r) or r in kept.lazy] for n, found in kept.readers.items()}
    index: dict[Any, int] = {}
    todo = needed = [n for n, found in readers.items() if found and not in_backward(n)]
    while todo:
        index |= {n: len(index) + i for i, n in enumerate(dict.fromkeys(todo)) if n not in index}
        todo = [a for n in todo for a in when_repeated(n) if a not in index and not is_given(a)]
        todo = [*dict.fromkeys(todo)]
    index = {n: i for i, n in enumerate(index)}
    count = len(index)
    cost, most, rows, least = numpy.zeros(2 * count), numpy.ones(2 * count), [], []
    sizes = numpy.zeros(2 * count)
    for node, i in index.items():
        free, already = is_free(node, kept.parameters), node in kept.again
        most[i] = (is_value(node) and not free and not already) or not isinstance(
            node.meta.get("val"), (torch.Tensor, tuple)
        )
        most[count + i] = free or already or may(whole(node))
        sizes[i] = bytes_of(program, node)
        cost[count + i] = 0 if already else 1e6 * seconds(program, node, context.hardware, context.t)
        for operand in when_repeated(node):
            if operand in index:
                rows.append({index[operand]: 1, count + index[operand]: 1, count + i: -1})
                least.append(0)
    for node in needed:
        if node in index:
            rows.append({index[node]: 1, count + index[node]: 1})
            least.append(1)
    matrix = numpy.zeros((len(rows) + 1, 2 * count))
    for row, terms in zip(matrix, rows, strict=False):
        for column, factor in terms.items():
            row[column] += factor
    matrix[-1] = -sizes
    limits = scipy.optimize.LinearConstraint(matrix, numpy.array([*least, -promise]), numpy.inf)
    found = scipy.optimize.milp(
        cost, constraints=limits, integrality=numpy.ones(2 * count), bounds=scipy.optimize.Bounds(0, most)
    )
    return float(found.fun) * 1e-6


@pytest.mark.parametrize("name", ["nanogpt", "llama"])
def test_the_choice_is_near_the_least_time_of_all(name: str) -> None:
    """Down to what layers pass on; beside, the last value of a few is larger than it need be."""
    made, ratios = deep(name, 1), []
    for budget in (0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        found = outcome(chosen(made, activation_memory_budget=budget))
        ratios.append(found.seconds / least_seconds(made, found.promise or 0))
    assert min(ratios) > 1 - 1e-6 and sum(ratios) / len(ratios) < 1.03 and max(ratios) < 1.1, ratios


@pytest.mark.slow
def test_the_choice_goes_through_the_pipeline_and_is_the_same_again() -> None:
    made, wanted = plain("nanogpt", 2, True)
    whole = [case("nanogpt").compile(2, sequence_parallel=True, activation_memory_budget="0.4") for _ in range(2)]
    assert differing(case("nanogpt").run(whole[0], case("nanogpt").inputs(2, 16)), wanted) == []
    tags = [[n.name for n in w.program.graph.nodes if n.meta.get(RECOMPUTE)] for w in whole]
    assert tags[0] == tags[1] and len(tags[0]) > 10
    assert outcome(whole[0]) == outcome(chosen(made, activation_memory_budget=0.4))


# -- the tests can fail


def spoiled(made: Compiled, change: Any) -> list[str]:
    """What differs once one node that backward makes again is changed. Forward stays as it is."""
    program = made.program.copy()
    parts = cut(program)
    assert parts.backward is not None
    node = next(n for n in parts.backward.graph.nodes if change(n, False))
    change(node, True)
    parts.backward.recompile()
    values = case("nanogpt").values(program, case("nanogpt").inputs(2, 16))

    class Spoiled(Compiled):
        def for_rank(self, axes: Any) -> Program:
            program.partition = parts
            return program

    return differing(run_ranks(Spoiled(program, made.context), values), plain("nanogpt", 1, False)[1])


def test_another_counter_of_one_dropout_changes_gradients() -> None:
    def change(node: Any, now: bool) -> bool:
        found = node.op == "call_function" and is_draw(node) and not in_backward(node)
        if now:
            places = [a.name for a in node.target._schema.arguments].index("op_id")
            node.update_arg(places, node.args[places] + 1)
        return found

    made = chosen(plain("nanogpt", 1, False)[0], activation_memory_budget=0.0)
    assert spoiled(made, lambda node, now: not now and node.op == "call_function") == []
    assert len(spoiled(made, change)) > 5


def test_a_value_that_is_not_made_again_changes_gradients() -> None:
    def change(node: Any, now: bool) -> bool:
        found = op_name(node) == "addmm" and not in_backward(node)
        if now:
            with node.graph.inserting_after(node):
                zero = node.graph.call_function(torch.zeros_like, (node.args[0],))
            node.update_arg(0, zero)  # its bias is lost
            node.prepend(zero)
        return found

    assert len(spoiled(chosen(plain("nanogpt", 1, False)[0], activation_memory_budget=0.0), change)) > 2


# -- what may not be made again


def test_ops_of_users_and_random_ops_are_kept() -> None:
    with torch.library._scoped_library("megafx_test_kept", "FRAGMENT") as library:
        library.define("own(Tensor x) -> Tensor")
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        ops = [torch.ops.megafx_test_kept.own.default, torch.ops.aten.bernoulli.default, torch.ops.aten.add_.Tensor]
        nodes = [
            graph.call_function(op, (x,)) for op in (*ops, torch.ops.aten.nonzero.default, torch.ops.aten.relu.default)
        ]
    assert [is_replayable(n, "tp") for n in nodes] == [False, False, False, False, True]
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert [is_replayable(graph.call_function(attention, (x, x, x, p)), "tp") for p in (0.0, 0.1)] == [True, False]
    reduce = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "tp"))
    assert is_replayable(reduce, "tp") and not is_replayable(reduce, "dp")


class Own(nn.Module):
    """A layer with an op of a user in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.ops.megafx_test_own.twice(torch.tanh(self.up(x)))
        return torch.tanh(self.down(torch.tanh(hidden))).square().mean()


def test_a_budget_below_what_must_stay_is_an_error_with_the_least() -> None:
    @torch.library.custom_op("megafx_test_own::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    twice.register_autograd(lambda ctx, grad: grad * 2)
    from megafx.capture.export import capture_call

    model = Own().double()
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    own = Case(model, lambda b, s: {"x": x}, capture_call(model, (), {"x": x}))
    made = own.compile(1)
    with pytest.raises(PlanError, match=r"a budget of at least ([\d,]+) bytes; the largest .* is %tanh_1") as error:
        chosen(made, activation_memory_budget=2)
    least = int(re.findall(r"of at least ([\d,]+) bytes", str(error.value))[0].replace(",", ""))
    found = chosen(made, activation_memory_budget=least)
    assert outcome(found).kept == least
    asked_for_none = chosen(made, activation_memory_budget=0.0)
    assert outcome(asked_for_none).kept == least
    assert any(f"{least:,} that cannot be recomputed" in note.message for note in asked_for_none.program.notes)
    assert differing_small(own.run(found, {"x": x}), own.run(made, {"x": x}))


def differing_small(found: Logical, wanted: Logical) -> bool:
    return all(torch.equal(found.gradients[n], g) for n, g in wanted.gradients.items() if g is not None)


def test_names_that_match_nothing_are_told() -> None:
    made, _ = plain("nanogpt", 1, False)
    with pytest.raises(ConfigError, match="names '\\*.mpl', which matches no module"):
        chosen(made, recompute_granularity="selective", recompute_modules=["*.mpl"])


# -- collectives


def test_full_recompute_repeats_no_collective_that_nobody_needs() -> None:
    """ORACLE: Megatron's full recompute has 6 all-reduces a layer; the last of the forward is not needed again: 5."""
    made, _ = plain("nanogpt", 2, False)
    before, after = (len(m.communication({})) for m in (made, chosen(made, recompute_granularity="full")))
    layers = 2
    assert after - before == layers
    everything = len(chosen(made, activation_memory_budget=0.0).communication({}))
    assert everything > after


@pytest.mark.parametrize("value", ["24 Gib", "-1", -0.5, 1.5, True, "most", [1]])
def test_budgets_that_say_nothing(value: Any) -> None:
    with pytest.raises(ConfigError, match="a size such as '24GiB'"):
        Config(activation_memory_budget=value)


def test_budgets() -> None:
    sizes = {"24GiB": 24 * 2**30, "1.5 MB": 1500000, "0.25": 0.25, 1: 1.0, 4096: 4096, "fit": "fit", None: None}
    for given, wanted in sizes.items():
        assert Config(activation_memory_budget=given).activation_memory_budget == wanted
    with pytest.raises(ConfigError, match="must be 'selective' or 'full', or None"):
        Config(recompute_granularity="ful")  # type: ignore[arg-type]
    for options in ({"recompute_method": "block"}, {"recompute_granularity": "full", "recompute_modules": ["mlp"]}):
        with pytest.raises(ConfigError, match="as recompute_granularity is"):
            Config(**options)  # type: ignore[arg-type]
