"""Covers: passes/fuse/merge_linears.py, kernels/join_parameters.py, distributed/parameters.py, params.place_joined:
linears of one value as one."""

from __future__ import annotations

import copy
import io

import harness
import pytest
import torch
import torch.nn.functional as F
from small_plans import FAST, SLOW, measured, saved
from torch import nn

import megafx
from megafx.config import Config
from megafx.distributed.parameters import JoinedParameters, parameter_slots, place_joined, side_by_side
from megafx.ir import dump
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.passes.fuse.merge_linears import merge_linears
from megafx.testing import assert_same, expect, graph, make_context, run_pass, transition

aten, ops = torch.ops.aten, torch.ops.megafx


def merged(before, t=2, trains=lambda spec: True, **config):
    context = make_context(t, Config(**config), hardware="cpu-gloo", training=False, wants_grad=trains)
    return run_pass(merge_linears, before, context)


def notes(program):
    return [n.message for n in program.notes if n.topic == "merge"]


def test_queries_keys_and_values():
    before = graph(
        lambda x, q, k, v: (aten.linear(x, q), aten.linear(x, k), aten.linear(x, v)), local=True, out="S2@tp",
        x="f64[b s h=5] R@tp", q="param f64[n=6 h=5] S0@tp", k="param f64[m=4 h=5] S0@tp", v="param f64[m=4 h=5] S0@tp",
    )  # fmt: skip
    after = merged(before)
    expect(after, """\
        %0 = x                              # f64[b s 5] R@tp
        %1 = q                              # f64[6/2 5] S0@tp param
        %2 = k                              # f64[4/2 5] S0@tp param
        %3 = v                              # f64[4/2 5] S0@tp param
        %4 = join_parameters([%1, %2, %3])  # f64[14/2 5] S0/2x3+2x2+2x2@tp
        %5 = linear(%0, %4)                 # f64[b s 14/2] S2/2x3+2x2+2x2@tp
        %6 = slice(%5, 2, 0, 3)             # f64[b s 6/2] S2@tp
        %7 = slice(%5, 2, 3, 5)             # f64[b s 4/2] S2@tp
        %8 = slice(%5, 2, 5, 7)             # f64[b s 4/2] S2@tp
        return %6, %7, %8
    """, t=2)  # fmt: skip
    assert_same(before, after)
    assert notes(after) == ["q, k, v merged: by count, 14 elements a token are copied for 40 that are not moved"]


def test_a_view_of_a_part_is_copied_before_it_is_gathered():
    """Its strides were found when the product had memory of its own; all_gather wants contiguous memory."""

    def heads(x, k, v):
        return tuple(transition(aten.unsqueeze(aten.linear(x, w), 1), "I", src="S2") for w in (k, v))

    before = graph(
        heads, local=True, out="I@tp", x="f64[b h=5] R@tp", k="param f64[m=4 h=5] S0@tp", v="param f64[m=4 h=5] S0@tp"
    )
    after = run_pass(expand_transitions, merged(before))
    gathers = [n for n in after.graph.nodes if n.target is torch.ops._c10d_functional.all_gather_into_tensor.default]
    assert [n.args[0].target for n in gathers] == [aten.contiguous.default] * 2
    assert_same(before, after)


def test_gate_and_up_with_biases_become_the_packed_unit():
    before = graph(
        lambda x, g, u, a, b: ops.glu(aten.linear(x, g, a), aten.linear(x, u, b), "silu"), local=True, out="S1@tp",
        x="f64[t h=5] R@tp", g="param f64[n=6 h=5] S0@tp", u="param f64[n=6 h=5] S0@tp",
        a="param f64[n=6] S0@tp", b="param f64[n=6] S0@tp",
    )  # fmt: skip
    after = merged(before)
    text = dump.text(after, t=2)
    assert "glu_packed(%7, %6, 'silu')" in text and text.count("join_parameters") == 2 and "glu(" not in text
    assert_same(before, after)


def linears(fn, **values):
    return graph(fn, local=True, out="I@tp", **{"x": "f64[t h=5] I@tp", **values})


TWO = {"w": "param f64[n=6 h=5] I@tp", "v": "param f64[m=4 h=5] I@tp"}
VECTOR = {"b": "param f64[n=6] I@tp"}


@pytest.mark.parametrize(
    "before, reason",
    [
        (linears(lambda x, w, v, b: (aten.linear(x, w, b), aten.linear(x, v)), **TWO, **VECTOR), "some have a bias"),
        (linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, v * 2)), **TWO), "is no parameter as it is stored"),
        (linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, w)), **TWO), "w is tied or used elsewhere too"),
        (linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, v), aten.sum(v)), **TWO), "v is tied or used elsewhere"),
        (linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, v)), w="param f64[n=6 h=5] I@tp",
                 v="param f64[m=4 h=5] S0@tp"), "they are placed apart"),
        (linears(lambda x, w, v: (ops.glu(aten.linear(x, w), u := aten.linear(x, v), "silu"), u),
                 w=TWO["w"], v=TWO["w"]), "what goes into the gated unit is used elsewhere too"),
    ],
)  # fmt: skip
def test_near_misses_say_why(before, reason):
    after = merged(before)
    assert dump.text(after) == dump.text(before)
    (note,) = notes(after)
    assert "not merged: " in note and reason in note


def test_what_is_no_match_is_left_alone():
    for before in (
        linears(lambda x, y, w, v: (aten.linear(x, w), aten.linear(y, v)), y="f64[t h=5] I@tp", **TWO),  # two values
        linears(lambda x, w: aten.linear(x, w), w=TWO["w"]),
    ):
        after = merged(before)
        assert dump.text(after) == dump.text(before) and not notes(after)
        assert dump.text(merged(before, merge_linears=False)) == dump.text(before)


def test_frozen_ones_stay_apart_in_training():
    before = linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, v)), **TWO)
    after = merged(before, trains=lambda spec: spec.name != "v")
    assert dump.text(after) == dump.text(before) and notes(after) == ["w, v not merged: v is frozen"]
    assert "join_parameters" in dump.text(merged(before, trains=None))  # without gradients that is nothing


def test_modules_of_different_parents_stay_apart():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(5, 6)), nn.Sequential(nn.Linear(5, 6))

        def forward(self, x):
            return (self.a(x) * self.b(x)).sum()

    model = megafx.parallelize(Two(), example_inputs=(torch.randn(3, 5),))
    assert not megafx.explain(model).fusions


def test_it_is_done_where_it_pays(tmp_path):
    """By count where nothing was measured, else by measurement; the report says which."""
    wide = linears(
        lambda x, w, v: (aten.linear(x, w), aten.linear(x, v)),
        w="param f64[n=60 h=5] I@tp", v="param f64[n=60 h=5] I@tp",
    )  # fmt: skip
    reason = "by count, 240 elements a token are copied for 20 that are not moved"
    assert notes(merged(wide)) == [f"w, v not merged: {reason}"]
    assert notes(merged(wide, fusion_profile="all")) == ["w, v merged: whatever it costs (fusion_profile)"]
    pays = saved(tmp_path / "pays.yaml", merge=measured("merge_linears", small=FAST, large=FAST))
    assert notes(merged(wide, fusion_profile=pays)) == [
        "w, v merged: pays as measured on a test's device, eager training"
    ]
    narrow = linears(lambda x, w, v: (aten.linear(x, w), aten.linear(x, v)), **TWO)
    slow = saved(tmp_path / "slow.yaml", merge=measured("merge_linears", small=SLOW))
    reason = "slower by measurement on a test's device (2 ms against 1 ms, eager training)"
    assert notes(merged(narrow, fusion_profile=slow)) == [f"w, v not merged: {reason}"]


@pytest.fixture(scope="module")
def llama():
    return harness.Case.of("llama")


@pytest.mark.parametrize("t, sequence_parallel", [(1, False), (2, True), (3, False), (4, True)])
def test_ranks_compute_what_one_does(llama, t, sequence_parallel):
    """Grouped heads that do not divide by the ranks, 50 columns of gate and up."""
    with megafx.debug(check=1):
        compiled = llama.compile(t, sequence_parallel=sequence_parallel, micro_batch_size=8, seq_length=4096)
    assert {f.pattern for f in compiled.program.fusions} >= {"merge_gate_up", "merge_linears"}
    inputs = llama.inputs(3, 5)
    harness.assert_equal(llama.run(compiled, inputs), llama.reference(inputs))


# -- parameters


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(12, 12), nn.Linear(12, 6), nn.Linear(12, 6)
        self.gate, self.up = nn.Linear(12, 14, bias=False), nn.Linear(12, 14, bias=False)
        self.down = nn.Linear(14, 12)

    def forward(self, x, y):
        h = self.q(x) + torch.cat((self.k(x), self.v(x)), -1)
        return F.mse_loss(self.down(F.silu(self.gate(h)) * self.up(h)), y)


@pytest.fixture
def nets():
    """(parallelized, eager, batch)."""
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    eager = Net().double()
    return megafx.parallelize(copy.deepcopy(eager), example_inputs=batch), eager, batch


GROUPS = [["q.weight", "k.weight", "v.weight"], ["q.bias", "k.bias", "v.bias"], ["gate.weight", "up.weight"]]


def together(model, names, get=lambda p: p):
    params = dict(model.named_parameters())
    return side_by_side([get(params[n]).detach() for n in names]) is not None


def test_parameters_and_gradients_are_views_of_one_memory(nets):
    net, eager, batch = nets
    mine = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, eager)]
    for step in range(3):
        for model, optimizer in zip((net, eager), mine, strict=True):
            model(*batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if step != 1:  # accumulates once
                optimizer.zero_grad()
        for a, b in zip(net.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    net(*batch).backward()
    for names in GROUPS:
        assert together(net, names) and together(net, names, lambda p: p.grad)


def test_state_goes_in_and_out_as_ever(nets, tmp_path):
    from safetensors.torch import load_file, save_file

    net, eager, batch = nets
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    save_file(net.state_dict(), tmp_path / "w.safetensors")
    for state in (torch.load(file), load_file(tmp_path / "w.safetensors")):
        assert all(torch.equal(v, state[n]) for n, v in eager.state_dict().items())
    other = Net().double()
    net.load_state_dict(other.state_dict())
    assert together(net, GROUPS[0])
    torch.testing.assert_close(net(*batch), other(*batch), rtol=1e-12, atol=0)
    twin = copy.deepcopy(net)
    torch.testing.assert_close(twin(*batch), other(*batch), rtol=1e-12, atol=0)
    assert together(twin, GROUPS[0]) and twin.q.weight.data_ptr() != net.q.weight.data_ptr()


def test_where_they_lie_apart_again_it_is_right_too(nets):
    net, _, batch = nets
    other = Net().double()
    net.load_state_dict(other.state_dict(), assign=True)
    assert not together(net, GROUPS[0])
    loss = net(*batch)
    loss.backward()
    other(*batch).backward()
    torch.testing.assert_close(loss.detach(), other(*batch).detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(net.k.weight.grad, other.k.weight.grad, rtol=1e-10, atol=1e-12)


def test_a_change_between_forward_and_backward_is_seen(nets):
    net, _, batch = nets
    loss = net(*batch)
    with torch.no_grad():
        net.up.weight.mul_(2)
    with pytest.raises(megafx.errors.UsageError, match="was changed in place between forward and backward"):
        loss.backward()


def test_memory_that_is_shared_is_left_alone():
    net = Net()
    net.k.weight.data = net.v.weight.data  # one memory, two parameters
    slots = dict(parameter_slots(net))
    assert place_joined(net, slots, GROUPS) == [GROUPS[0]]
    assert net.k.weight.data_ptr() == net.v.weight.data_ptr() and together(net, GROUPS[1])
    assert place_joined(net, slots, [GROUPS[1]]) == []  # already so
    model = megafx.parallelize(net, example_inputs=(torch.randn(2, 3, 12), torch.randn(2, 3, 12)))
    assert any("copied together at each call" in str(n) for n in model.megafx.notes)


def test_joined_follows_parameters_that_move():
    a, b = torch.arange(6.0).view(3, 2), torch.arange(4.0).view(2, 2)
    join = JoinedParameters((1, 0))
    assert torch.equal(join([a, b]), torch.cat([b, a])) and join.view is None
    memory = torch.cat([b.flatten(), a.flatten()])
    b, a = memory[:4].view(2, 2), memory[4:].view(3, 2)
    view = join([a, b])
    assert torch.equal(view, torch.cat([b, a])) and view.data_ptr() == memory.data_ptr() and join([a, b]) is view
    assert side_by_side([a, b]) is None  # the other way round
