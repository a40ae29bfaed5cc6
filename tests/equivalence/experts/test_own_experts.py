"""Experts that are modules of a list and one rank's each (expert parallelism), at fp64 against eager.

Covers: passes/experts/own_experts.py, passes/experts/drop_expert_values.py, analysis/experts.py, ops/owners.py. Every case runs
each rank's own graph, in which the others' experts are left out.
dist/test_owned_experts.py has one on real ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import index_dispatch as moe
import pytest
import torch
from calls import captured, compiled, eager, simulated, wanted_gradients
from harness import errors
from index_dispatch import collectives, tokens
from lowered import bound
from torch import Tensor, fx, nn
from torch.nn import functional as F

import megafx
from megafx.compiler.compiled import Compiled
from megafx.compiler.pipeline import compile_program, plan_only
from megafx.errors import MegafxError, PlacementError, PlanError
from megafx.ir.program import Input, Phase, Program
from megafx.ops.axes import AxisContext
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.experts.drop_expert_values import drop_expert_values
from megafx.passes.experts.own_experts import own_experts
from megafx.placements.data_axis import DataAxis
from megafx.placements.types import Owned, owned
from megafx.planner.plan import Plan
from megafx.testing import assert_same, expect, graph, make_context, run_pass

RTOL = 1e-10
SLOW = pytest.mark.slow
OVERRIDES = {"moe.experts": "expert"}
aten, ops = torch.ops.aten, torch.ops.megafx


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "EXPERTS", 5)


def made_for(model: nn.Module, t: int, overrides: Any = None, **config: Any) -> tuple[Program, Compiled]:
    call = {"x": tokens(3, 5)}
    program = captured(model, call)
    wanted = wanted_gradients(model, program, call)
    return program, compiled(program, t, wanted, overrides=overrides or OVERRIDES, **config)


def assert_as_eager(model: nn.Module, program: Program, made: Compiled, x: Tensor) -> set[str]:
    """-> parameters whose gradient eager leaves None; ours are zero there."""
    names = [made.program.outputs[i].name for i in made.differentiated]
    wanted, tangents = eager(model, program, {"x": x}, names)
    found = simulated(made, model, {"x": x}, tangents)
    off = errors(found, wanted)
    assert {"output loss", "output hidden"} <= off.keys() and len(off) > 4
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"
    none = found.gradients.keys() - wanted.gradients.keys()
    assert all(not found.gradients[n].any() for n in none)  # type: ignore[union-attr]
    return none


def planned_for(model: nn.Module, t: int) -> Plan:
    """The plan of `made_for`, without a graph."""
    program = captured(model, {"x": tokens(3, 5)})
    return plan_only(program, make_context(t, megafx.Config(overrides=OVERRIDES)))


def owner_of(made: Compiled) -> dict[int, set[int]]:
    """Expert -> ranks that have parameters of it."""
    found: dict[int, set[int]] = {}
    for name, placement in made.plan.params.items():
        if ".experts." in name:
            assert isinstance(placement, Owned), name
            found.setdefault(int(name.split(".")[2]), set()).add(placement.owner)
    return found


def each() -> Iterator[Any]:
    """(form, t, experts, sequence_parallel): all; each form once and the others marked slow."""
    cases = [(2, 4, "auto"), (3, 5, False), (4, 5, "auto"), (3, 4, True), (2, 5, True), (4, 4, False)]
    for i, name in enumerate(moe.FORMS):
        for k, case in enumerate(cases):
            yield pytest.param(name, *case, marks=[] if k == i % len(cases) else SLOW)


@pytest.mark.parametrize(("name", "t", "experts", "sp"), [*each()])
def test_form(name: str, t: int, experts: int, sp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for every routing and number of tokens, down to one; experts without tokens too."""
    monkeypatch.setattr(moe, "EXPERTS", experts)
    model = moe.Model(moe.FORMS[name], bias=True).double()
    program, made = made_for(model, t, sequence_parallel=sp)
    owners = owner_of(made)
    assert owners == {e: {e * t // experts} for e in range(experts)}
    assert max(list(owners.values()).count({r}) for r in range(t)) == -(-experts // t)
    assert not made.plan.params["moe.router.weight"].is_shard
    for x in (tokens(3, 5), tokens(1, 1)):
        assert_as_eager(model, program, made, x)
    moe.turn_off(model, [1, 3])
    none = assert_as_eager(model, program, made, tokens(3, 5))
    assert none == (
        {n for n, _ in model.named_parameters() if "experts.1." in n or "experts.3." in n}
        if name in moe.BRANCHING
        else set()
    )


@pytest.mark.parametrize("name", ["where_add_in_place", "boolean_of_own"])
def test_one_reduction_for_the_whole_mixture(name: str) -> None:
    """One all-reduce forward, one of the gradient of the tokens: as many as column- and row-parallel experts have."""
    _, made = made_for(moe.Model(moe.FORMS[name]).double(), 2, sequence_parallel=False)
    found = collectives(made)
    assert found["forward all_reduce"] == 2  # of `first`, and of the mixture
    assert found["backward all_reduce"] + found["backward all_reduce_coalesced"] == 2  # of the tokens; of the router
    assert found.total() == 4, found


@pytest.mark.slow
def test_without_the_reduction_it_is_wrong() -> None:
    model = moe.Model(moe.where_add_in_place).double()
    program, made = made_for(model, 2, sequence_parallel=False)
    graph = made.program.graph
    waits = graph.find_nodes(op="call_function", target=torch.ops._c10d_functional.wait_tensor.default)
    (wait,) = [n for n in waits if n.meta.get("fqn", "").startswith("moe") and n.meta.get("phase") != "backward"]
    wait.replace_all_uses_with(wait.args[0].args[0])
    with pytest.raises((AssertionError, PlacementError), match=r"is off by|differs between ranks"):
        assert_as_eager(model, program, made, tokens(3, 5))


# -- what a rank has


def targets(program: Program, target: Any) -> list[fx.Node]:
    return program.graph.find_nodes(op="call_function", target=target)


def test_a_rank_computes_its_own_experts_only(five: None) -> None:
    """Products, rows that the host waits for, gradients: no other rank's; and its graph adds no zeros."""
    model = moe.Model(moe.where_add_in_place, bias=True).double()
    _, made = made_for(model, 3, sequence_parallel=False)
    experts = [{"0", "1"}, {"2", "3"}, {"4"}]
    assert len(targets(made.program, ops.rows.default)) == 5
    for rank in range(3):
        program = bound(made.program, {"tp": AxisContext(rank, 3, "tp")})
        assert len(targets(program, ops.rows.default)) == len(experts[rank])
        computed = [n for n in program.graph.nodes if n.op == "call_function" and not is_zeros(n)]
        modules = {n.meta.get("fqn") or "" for n in computed}
        assert {fqn.split(".")[2] for fqn in modules if ".experts." in fqn} == experts[rank]
        for node, spec in zip(program.results(), program.outputs, strict=True):
            placement = made.plan.params.get(spec.name)
            if spec.kind == "gradient" and isinstance(placement, Owned):
                assert (node.meta["val"].numel() == 0) == (placement.owner != rank), spec.name
        adds = [n for n in program.graph.nodes if n.target is aten.add.Tensor]
        assert not any(is_zeros(a) for n in adds for a in n.all_input_nodes)
        assert not [n for n in program.graph.nodes if "_rank" in str(n.target) or "rank_" in str(n.target)]


def is_zeros(node: fx.Node) -> bool:
    return node.target is aten.full.default and node.args[1] == 0


def test_values_that_are_held(five: None) -> None:
    """A parameter of another rank's expert has no elements on this one."""
    from simulated_ranks import rank_of, sharded

    model = moe.Model(moe.where_add_in_place, bias=True).double()
    params = planned_for(model, 4).params
    held = []
    for rank in range(4):
        with rank_of(rank, 4) as mesh:
            mine = sharded(model, mesh, params)
            for name, p in mine.moe.experts.named_parameters():
                whole = int(name.split(".")[0]) * 4 // 5 == rank
                assert p.shape == model.moe.experts.get_parameter(name).shape
                assert p._local_tensor.numel() == (p.numel() if whole else 0), name
            held.append(sum(p._local_tensor.numel() for p in mine.moe.experts.parameters()))
    one = sum(p.numel() for p in model.moe.experts[0].parameters())
    assert held == [2 * one, one, one, one]


# -- other mixtures


class Dense(moe.Mixture):
    """Every expert sees every token. form(experts' results, weights of all) -> result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, moe.HIDDEN)
        weights = self.router(tokens).softmax(-1)
        return self.form([e(tokens) for e in self.experts], weights).view_as(x), weights.square().sum()  # type: ignore[call-arg,arg-type,operator]


def stacked(results: Sequence[Tensor], weights: Tensor) -> Tensor:
    return (torch.stack([*results], 1) * weights[..., None]).sum(1)


def added(results: Sequence[Tensor], weights: Tensor) -> Tensor:
    out = torch.zeros_like(results[0])
    for e, y in enumerate(results):
        out += weights[:, e, None] * y
    return out


def overwritten(out: Tensor, x: Tensor, weights: Tensor, chosen: Tensor, e: int, expert: nn.Module) -> Tensor:
    """Rows are given, not added to (Switch)."""
    mask = chosen[:, 0] == e
    out = out.clone()
    out[mask] = expert(x[mask]) * weights[mask, :1]
    return out


class Odd(nn.Module):
    """An expert unlike the others: with a norm, a number of its own and a residual, and a width of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(moe.HIDDEN),
            nn.Linear(moe.HIDDEN, width),
            nn.Linear(width, moe.HIDDEN),
        )
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


def odd() -> nn.Module:
    model = moe.Model(moe.nonzero_index_add_in_place)
    model.moe.experts[1], model.moe.experts[3] = Odd(5), nn.Sequential(nn.Linear(moe.HIDDEN, moe.HIDDEN), nn.Tanh())
    return model


def tied() -> nn.Module:
    """The experts share a projection, which every rank holds."""
    model = moe.Model(moe.where_add_in_place)
    for expert in model.moe.experts[1:]:
        expert.up = model.moe.experts[0].up
    return model


class Twice(moe.Model):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.first(x)
        for _ in range(2):
            y, balance = self.moe(self.norm(x))
            x = x + y
        return {"loss": x.square().mean() + 0.1 * balance, "hidden": x}


class Penalized(moe.Model):
    """The loss has the experts' weights themselves."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = super().forward(x)
        return {**made, "loss": made["loss"] + sum(p.square().sum() for p in self.moe.experts.parameters())}


def dense(form: Callable[..., Tensor]) -> nn.Module:
    model = moe.Model(moe.where_add_in_place)
    model.moe = Dense(form)  # type: ignore[arg-type]  # of another signature
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "dense, stacked": lambda: dense(stacked),
    "dense, added": lambda: dense(added),
    "overwritten": lambda: moe.Model(overwritten),
    "unlike each other": odd,
    "tied": tied,
    "called twice": lambda: Twice(moe.where_add_in_place),
    "penalized": lambda: Penalized(moe.squeezed_index_add),
}


@pytest.mark.parametrize("t", [2, pytest.param(3, marks=SLOW), pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("name", OTHERS)
def test_other_mixtures(name: str, t: int) -> None:
    torch.manual_seed(1)
    model = OTHERS[name]().double()
    program, made = made_for(model, t, {"*.experts.*": "expert"})
    assert any(isinstance(p, Owned) for p in made.plan.params.values())
    assert_as_eager(model, program, made, tokens(3, 5))
    assert_as_eager(model, program, made, tokens(2, 3))


@pytest.mark.parametrize("name", ["dense, added", "dense, stacked", "unlike each other"])
def test_experts_that_need_one_reduction_have_one(name: str) -> None:
    _, made = made_for(OTHERS[name]().double(), 2, sequence_parallel=False)
    assert collectives(made)["forward all_reduce"] == 2


class Dropped(moe.Expert):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(F.dropout(x, 0.3)), 0.5)


@pytest.mark.slow
def test_dropout_inside_of_experts() -> None:
    """Each expert draws for its own rows, by its own numbers: as megafx does on one rank."""
    model = moe.Model(moe.where_add_in_place)
    model.moe.experts = nn.ModuleList(Dropped() for _ in range(moe.EXPERTS))
    model.double()
    (program, one), (_, made) = made_for(model, 1), made_for(model, 3)
    call = {"x": tokens(3, 5)}
    wanted = simulated(one, model, call, {})
    assert errors(wanted, eager(model.eval(), program, call, [])[0])["output loss"] > 1e-3, "nothing was dropped"
    off = errors(simulated(made, model, call, {}), wanted)
    assert max(off.values()) <= RTOL, off


# -- plans, and what is refused


def test_plans_are_saved_and_given() -> None:
    model = moe.Model(moe.where_add_in_place).double()
    saved = Plan.from_json(planned_for(model, 3).to_json())
    assert saved.params["moe.experts.3.up.weight"] == owned(moe.FFN, 2)
    assert "moe.experts.3.up.weight" in str(saved) and "rank 2" in str(saved)
    verdict = megafx.verify(
        model, megafx.Config(tensor_model_parallel_size=3, overrides=OVERRIDES), example_inputs=(tokens(3, 5),)
    )
    assert verdict.ok, str(verdict)


def test_graphs_after_the_first_keep_the_owners() -> None:
    model = moe.Model(moe.where_add_in_place).double()
    program = captured(model, {"x": tokens(3, 5)})
    context = make_context(2, megafx.Config(overrides=OVERRIDES), training=False)
    context.fixed = {n: owned(p.shape[0], 1) for n, p in model.named_parameters() if ".experts.0." in n}
    canonicalize_program(program)
    assert own_experts(program, context) == 4
    owners = {n.args[0].name: n.args[1] for n in targets(program, ops.owner_parameter.default)}
    assert set(owners.values()) == {0, 1}
    assert all(owner == 1 for name, owner in owners.items() if "experts_0" in name)


class Alone(nn.Module):
    """What a direct call of one expert runs."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.moe = mixture

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": self.moe.experts[2](x)}  # type: ignore[index,operator]  # a ModuleList


def test_a_graph_of_one_expert_and_one_without_gradients() -> None:
    """Later graphs of a model whose first one has settled who owns what."""
    model, call = moe.Model(moe.where_add_in_place).double(), {"x": tokens(3, 5)}
    _, made = made_for(model, 3)
    for later, training in ((model, False), (Alone(model.moe), True)):
        program = captured(later, call)
        fixed = {spec.name: made.plan.params[spec.name] for spec in program.inputs if spec.kind == "param"}
        context = make_context(3, megafx.Config(overrides=OVERRIDES), training=training, fixed=fixed)
        if training:
            context.wants_grad = lambda spec: spec.kind == "param"
        found = compile_program(program.copy(), context)
        assert found.plan.params == fixed
        names = [found.program.outputs[i].name for i in found.differentiated]
        wanted, tangents = eager(later, program, call, names)
        off = errors(simulated(found, later, call, tangents), wanted)
        assert "output hidden" in off and len(off) == (4 if training else 2)
        assert max(off.values()) <= RTOL, off


class Chained(moe.Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for expert in self.experts:
            x = expert(x)
        return x, x.sum()


class Indices(moe.Mixture):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.experts[0](x)
        return self.experts[1](x) * first.argmax(-1, keepdim=True), x.sum()


def with_mixture(mixture: type[moe.Mixture]) -> nn.Module:
    model = moe.Model(moe.where_add_in_place)
    model.moe = mixture(moe.where_add_in_place)
    return model


@pytest.mark.parametrize(
    ("build", "overrides", "message"),
    [
        (lambda: with_mixture(Chained), OVERRIDES, r"'moe.experts.1' takes what 'moe.experts.0' computes"),
        (lambda: with_mixture(Indices), OVERRIDES, r"'moe.experts.0' gives by aten.argmax.* is no number to be summed"),
        (
            lambda: moe.Model(moe.where_add_in_place),
            {"moe": "expert"},
            r"'moe' is expert, but nothing that it matches can be",
        ),
        (
            lambda: moe.Model(moe.where_add_in_place),
            {"moe.experts": "expert", "*.up": "colwise"},
            r"'moe.experts.0.up.weight' of these experts is colwise by another override",
        ),
        (
            lambda: moe.Model(moe.where_add_in_place),
            {"moe.experts.*.up": "expert"},
            r"nothing that it matches can be split",
        ),
    ],
)
def test_what_is_refused(build: Callable[[], nn.Module], overrides: dict[str, str], message: str) -> None:
    with pytest.raises(PlanError, match=message) as error:
        made_for(build().double(), 2, overrides)
    print(error.value)


def test_data_parallelism_is_refused() -> None:
    model = moe.Model(moe.where_add_in_place).double()
    program = captured(model, {"x": tokens(3, 5)})
    context = make_context(2, megafx.Config(overrides=OVERRIDES), data=DataAxis(2))
    with pytest.raises(MegafxError, match=r"'moe.experts' is expert, but .* data-parallel"):
        own_experts(program, context)


# -- the pass


def two_experts(x: Any, rows: Any, w0: Any, w1: Any) -> Any:
    out = aten.linear(x, w0)
    return aten.index_add(out, 0, rows, aten.linear(aten.index(x, [rows]), w1))


def before() -> Program:
    made = graph(
        two_experts, x="f64[t=4 k=8] I@tp", rows="i64[r=3]", w0="param f64[n=6 k=8] I@tp", w1="param f64[n=6 k=8] I@tp"
    )
    made.inputs[2:] = [Input("param", f"experts.{e}.weight") for e in range(2)]
    made.phase = Phase.CANONICAL
    return made


def test_golden() -> None:
    start = before()
    context = make_context(2, megafx.Config(overrides={"experts": "expert"}), training=False)
    after = run_pass(own_experts, start, context)
    expect(
        after,
        """\
        %0 = x                                        # f64[4 8] I@tp
        %1 = rows                                     # i64[3]
        %2 = experts.0.weight                         # f64[6 8] I@tp param
        %3 = experts.1.weight                         # f64[6 8] I@tp param
        %4 = owner_parameter(%2, 0, 'tp', 1)          # f64[6 8]
        %5 = owner_parameter(%3, 1, 'tp', 1)          # f64[6 8]
        %6 = owner_input(%0, 0, 'tp', 1)              # f64[4 8]
        %7 = linear(%6, %4)                           # f64[4 6]
        %8 = owner_output(%7, 0, 'tp', 1)             # f64[4 6]
        %9 = owner_input(%0, 1, 'tp', 1)              # f64[4 8]
        %10 = index(%9, [%1])                         # f64[3 8]
        %11 = linear(%10, %5)                         # f64[3 6]
        %12 = full([4, 6], 0, dtype=f64, device=cpu)  # f64[4 6]
        %13 = index_add(%12, 0, %1, %11)              # f64[4 6]
        %14 = owner_output(%13, 1, 'tp', 1)           # f64[4 6]
        %15 = add(%8, %14)                            # f64[4 6]
        return %15
        """,
    )
    assert_same(start, after)
    again = context.config.replace(overrides={})
    assert own_experts(before(), make_context(2, again)) == 0, "nobody asks for it"
    assert own_experts(before(), make_context(1, context.config)) == 0, "one rank"


def both_ways(x: Any, y: Any, g: Any, w: Any) -> Any:
    """Rank 1's expert, and its gradients."""
    out = aten.linear(ops.owner_input(x, 1, "tp", 2), ops.owner_parameter(w, 1, "tp", 2))
    grad = ops.owner_input_gradient(aten.mm(g, w), 1, "tp", 2)
    return (
        aten.add(aten.neg(y), ops.owner_output(out, 1, "tp", 2)),
        aten.add(grad, aten.neg(x)),
        ops.owner_parameter_gradient(w, 1, "tp", 2),
    )


def dropped(program: Program, rank: int) -> int:
    return drop_expert_values(program, make_context(axes={"tp": AxisContext(rank, 2)}))


def test_golden_of_what_each_rank_runs() -> None:
    start = graph(
        both_ways,
        x="f64[t=4 k=8] I@tp",
        y="f64[t=4 n=6] P@tp",
        g="f64[t=4 n=6] R@tp",
        w="param f64[n=6 k=8] I@tp",
        out=("P@tp", "P@tp", "I@tp"),
    )
    owner, other = start.copy(), start.copy()
    assert dropped(owner, 1) == dropped(other, 0) == 5
    expect(
        owner,
        """\
        %0 = x               # f64[4 8] I@tp
        %1 = y               # f64[4 6] P@tp
        %2 = g               # f64[4 6] R@tp
        %3 = w               # f64[6 8] I@tp param
        %4 = linear(%0, %3)  # f64[4 6]
        %5 = mm(%2, %3)      # f64[4 8]
        %6 = neg(%1)         # f64[4 6]
        %7 = add(%6, %4)     # f64[4 6] P@tp
        %8 = neg(%0)         # f64[4 8]
        %9 = add(%5, %8)     # f64[4 8] P@tp
        return %7, %9, %3
        """,
    )
    expect(
        other,
        """\
        %0 = x                                       # f64[4 8] I@tp
        %1 = y                                       # f64[4 6] P@tp
        %2 = g                                       # f64[4 6] R@tp
        %3 = w                                       # f64[6 8] I@tp param
        %4 = neg(%1)                                 # f64[4 6] P@tp
        %5 = neg(%0)                                 # f64[4 8] P@tp
        %6 = full([0, 8], 0, dtype=f64, device=cpu)  # f64[0 8] I@tp
        return %4, %5, %6
        """,
    )
    assert dropped(owner, 1) == 0
