"""Covers: passes/fuse/fuse.py, passes/fuse/fuse_local.py, the knobs and the report. Fused ops through the whole
pipeline, on t ranks."""

from __future__ import annotations

from collections import Counter

import harness
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import AddNorm, BiasGelu, DropAdd, Rms, half_turn

import megafx
from megafx.capture.export import capture_call
from megafx.checks.types import check_types
from megafx.compiler.pipeline import compile_program
from megafx.config import FUSIONS, Config
from megafx.errors import ConfigError
from megafx.ir import dump
from megafx.ir.program import PLACEMENT
from megafx.rewrite import pattern as registry
from megafx.rewrite.driver import patterns_of
from megafx.rewrite.pattern import register, unregister
from megafx.testing import make_context

toy = torch.ops.toy
# The library's own patterns off; a workload that is worth sharding.
ALONE = {**dict.fromkeys(FUSIONS, False), "micro_batch_size": 8, "seq_length": 4096}
PATTERNS = (BiasGelu, Rms, DropAdd, AddNorm)


@pytest.fixture(autouse=True)
def toy_patterns():
    kept = dict(registry._patterns)  # a toy may have the name of one of the library's
    for pattern in PATTERNS:
        register(pattern)
    yield
    registry._patterns.clear()
    registry._patterns.update(kept)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    """norm(x + y), MLP with bias and GeLU, dropout and residual: everything the toy patterns know."""

    def __init__(self, width=32, inner=66, p=0.0):
        super().__init__()
        self.norm, self.p = Norm(width), p
        self.mix = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x):
        total = x + self.mix(x)
        y = self.down(F.gelu(self.up(self.norm(total))))
        return total + F.dropout(y, self.p, self.training)


class Net(nn.Module):
    def __init__(self, layers=2, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList(Block(p=p) for _ in range(layers))
        self.head = nn.Linear(32, 7)

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def case_of(p):
    torch.manual_seed(0)
    model = Net(p=p).double()

    def inputs(batch, seq):
        generator = torch.Generator().manual_seed(batch * 100 + seq)
        x = torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64)
        return {"x": x, "target": torch.randint(0, 7, (batch, seq), generator=generator)}

    return harness.Case(model, inputs, capture_call(model, (), inputs(2, 8)))


@pytest.fixture(scope="module")
def cases():
    return {p: case_of(p) for p in (0.0, 0.25)}


def counts(program):
    return Counter(f.pattern for f in program.fusions)


@pytest.mark.slow
def test_one_rank_computes_the_same(cases):
    case = cases[0.0]
    compiled = case.compile(1, **ALONE)
    assert counts(compiled.program) == {"bias_gelu": 2, "rms": 2, "add_norm": 2}
    harness.assert_equal(case.run(compiled, case.inputs(3, 5)), case.reference(case.inputs(3, 5)))


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.25])
def test_ranks_compute_the_same(cases, t, sequence_parallel, p):
    case = cases[p]
    compiled = case.compile(t, sequence_parallel=sequence_parallel, **ALONE)
    assert counts(compiled.program)["bias_gelu"] == 2
    assert counts(compiled.program)["drop_add"] == (2 if p else 0)
    found = case.run(compiled, case.inputs(3, 5))
    wanted = case.run(case.compile(1, **ALONE), case.inputs(3, 5)) if p else case.reference(case.inputs(3, 5))
    harness.assert_equal(found, wanted)


@pytest.mark.parametrize("p", [0.25, 0.0])
def test_fused_graphs_have_the_collectives_of_unfused_ones(cases, p):
    def collectives(**knobs):
        compiled = cases[p].compile(2, sequence_parallel=True, **knobs)
        names = (str(n.target) for n in compiled.program.graph.nodes)
        return Counter(n for n in names if "_c10d_functional" in n)

    fused = collectives(**ALONE)
    for pattern in PATTERNS:
        unregister(pattern.name)
    assert fused == collectives(**ALONE) and fused


@pytest.mark.slow
def test_dropout_draws_the_same_bits_fused_or_not(cases):
    case = cases[0.25]
    fused = case.run(case.compile(2, **ALONE), case.inputs(3, 5))
    for pattern in PATTERNS:
        unregister(pattern.name)
    plain = case.run(case.compile(1, **ALONE), case.inputs(3, 5))
    harness.assert_equal(fused, plain)


def placed(case, t, stop, **config):
    """The program as the named pass leaves it."""
    context = make_context(t, Config(**ALONE, **config), wants_grad=lambda spec: spec.kind == "param")
    with megafx.debug(check=1, stop_after=stop), pytest.raises(megafx.compiler.runner.PipelineStopped) as stopped:
        compile_program(case.program.copy(), context)
    return stopped.value.program


def test_results_of_a_local_op_have_the_placements_of_what_they_replace(cases):
    program = placed(cases[0.0], 2, "fuse_local", sequence_parallel=True)
    fused = program.graph.find_nodes(op="call_function", target=toy.add_norm.default)
    assert len(fused) == 2
    for node in fused:
        assert PLACEMENT not in node.meta
        assert [str(u.meta[PLACEMENT]) for u in node.users] == ["S0", "S0"]
        assert all(u.meta["made_by"][-1] == "fuse_local" for u in node.users)


def test_the_checker_types_what_is_fused(cases):
    program = placed(cases[0.25], 3, "build_joint_graph", sequence_parallel=True)
    plan = cases[0.25].compile(3, sequence_parallel=True, **ALONE).plan
    check_types(program, plan, 3)
    drops = [n for n in program.graph.nodes if "dropout" in str(n.target)]
    assert drops and any(n.args[4] >= 0 for n in drops)


def test_a_local_op_without_a_rule_is_refused_on_shards(cases, capfd):
    class NoRule(AddNorm):
        name = "no_rule"

        def make(x, residual, weight, *, eps):
            total = x + residual
            return total, toy.rms_norm(total.view(x.shape), weight, eps)

    unregister("add_norm")
    register(NoRule)
    try:
        with megafx.debug(level=3):
            compiled = cases[0.0].compile(2, sequence_parallel=True, **ALONE)
        assert counts(compiled.program)["no_rule"] == 2  # aten's own rules place them
        NoRule.make = staticmethod(lambda x, residual, weight: toy.without_rule(x, residual, weight))
        with megafx.debug(level=3):
            compiled = cases[0.0].compile(2, sequence_parallel=True, **ALONE)
        assert counts(compiled.program)["no_rule"] == 0
        assert "near miss of no_rule" in capfd.readouterr().err
        found = cases[0.0].run(compiled, cases[0.0].inputs(3, 5))
        harness.assert_equal(found, cases[0.0].reference(cases[0.0].inputs(3, 5)))
    finally:
        unregister("no_rule")


def test_fuse_leaves_no_match_alone(cases):
    before = dump.text(placed(cases[0.0], 1, "canonicalize"))
    for pattern in PATTERNS:
        unregister(pattern.name)
    assert dump.text(placed(cases[0.0], 1, "fuse")) == before


def test_knobs_switch_families_off():
    class Off(BiasGelu):
        name = "off"
        knob = "bias_activation_fusion"

    assert patterns_of([Off, BiasGelu], Config(), local=False) == [Off, BiasGelu]
    assert patterns_of([Off, BiasGelu], Config(bias_activation_fusion=False), local=False) == [BiasGelu]
    assert patterns_of([Off, AddNorm], Config(), local=True) == [AddNorm]
    with pytest.raises(ConfigError, match="Config.norm_fusion = 'no' is out of range"):
        Config(norm_fusion="no")


def test_the_report_says_what_was_fused_and_what_not():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.up = nn.ModuleList([Block(), Block()]), nn.Linear(32, 32)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            y = self.up(x)
            return y + F.gelu(y)

    plan = megafx.plan(Odd(), Config(**ALONE), example_inputs=(torch.randn(2, 8, 32),))
    report = megafx.explain(plan)
    assert [(f.pattern, f.modules, f.count) for f in report.fusions] == [
        ("rms", "layers.[0-1].norm", 2),
        ("bias_gelu", "layers.[0-1]", 2),
    ]
    text = str(report)
    assert "2 x bias_gelu in layers.[0-1]" in text
    (note,) = [n for n in report.notes if n.startswith("fuse") and "bias_gelu" in n]
    assert "bias_gelu does not match: linear (%linear" in note
    assert "inside of it is also used by add (%add" in note and "fuse/test_fuse.py" in note
    assert '"fusions"' in report.to_json()


def test_local_fusions_are_in_the_report_of_a_model():
    model = megafx.parallelize(Net(), Config(**ALONE), example_inputs=(torch.randn(2, 8, 32), torch.zeros(2, 8).long()))
    assert {f.pattern: f.count for f in megafx.explain(model).fusions} == {"rms": 2, "bias_gelu": 2, "add_norm": 2}


def test_debug_levels_print_counts_and_near_misses(cases, capfd):
    def lines(level):
        with megafx.debug(level=level):
            placed(cases[0.0], 1, "fuse")
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("megafx fuse:")]

    assert lines(1) == []
    assert lines(2) == ["megafx fuse: bias_gelu matches 2", "megafx fuse: rms matches 2"]
    assert [line for line in lines(3) if "near miss of drop_add" in line]


def test_rotated_queries_and_keys_on_ranks():
    """A local pattern whose operands are cut on heads, which do not divide by the ranks."""
    from toys import TurnBoth

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False), nn.Linear(24, 24)

        def forward(self, x, cos, sin):
            batch, seq, _ = x.shape
            q, k = (f(x).view(batch, seq, 4, 6).transpose(1, 2) for f in (self.q, self.k))
            q, k = q * cos + half_turn(q) * sin, k * cos + half_turn(k) * sin
            y = F.scaled_dot_product_attention(q, k, q).transpose(1, 2).reshape(batch, seq, 24)
            return self.o(y).square().mean()

    def inputs(batch, seq):
        generator = torch.Generator().manual_seed(seq)
        angles = torch.randn(1, 1, seq, 6, generator=generator, dtype=torch.float64)
        x = torch.randn(batch, seq, 24, generator=generator, dtype=torch.float64)
        return {"x": x, "cos": angles.cos(), "sin": angles.sin()}

    register(TurnBoth)
    try:
        model = Heads().double()
        case = harness.Case(model, inputs, capture_call(model, (), inputs(2, 8)))
        compiled = case.compile(3, sequence_parallel=False, **ALONE)
        assert counts(compiled.program)["turn_both"] == 1
        harness.assert_equal(case.run(compiled, inputs(2, 8)), case.reference(inputs(2, 8)))
    finally:
        unregister("turn_both")
