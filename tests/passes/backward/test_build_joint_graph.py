"""Covers: passes/backward/build_joint_graph.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from local_programs import local_program
from lowered import executable_of
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.errors import MegafxError
from megafx.ir.nodes import writes
from megafx.ir.program import FQN, MADE_BY, PHASE, VAL, Phase, Program
from megafx.passes.backward.build_joint_graph import differentiate


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=torch.float64))


def gpt_inputs(layers: int = 2, h: int = 8, vocab: int = 13) -> dict[str, Any]:
    torch.manual_seed(0)
    inputs: dict[str, Any] = {"wte": parameter(vocab, h)}
    for i in range(layers):
        for name, shape in {
            "ln1": (h,), "b1": (h,), "qkv": (3 * h, h), "bq": (3 * h,), "proj": (h, h), "bp": (h,),
            "ln2": (h,), "b2": (h,), "fc": (4 * h, h), "bf": (4 * h,), "fc2": (h, 4 * h), "bf2": (h,),
        }.items():  # fmt: skip
            inputs[f"{i}.{name}"] = parameter(*shape)
    return inputs


def gpt(*args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A GPT with tied embedding and head: (loss, logits)."""
    (wte, *weights), (ids, labels) = args[:-2], args[-2:]
    x = F.embedding(ids, wte)
    b, s, h = x.shape
    for i in range(0, len(weights), 12):
        ln1, b1, qkv, bq, proj, bp, ln2, b2, fc, bf, fc2, bf2 = weights[i : i + 12]
        y = F.linear(F.layer_norm(x, (h,), ln1, b1), qkv, bq).view(b, s, 3, 2, h // 2).permute(2, 0, 3, 1, 4)
        q, k, v = y.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + F.linear(y, proj, bp)
        x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (h,), ln2, b2), fc, bf)), fc2, bf2)
    logits = F.linear(x, wte)
    return F.cross_entropy(logits.reshape(b * s, wte.shape[0]), labels.reshape(b * s)), logits


def tokens(b: int, s: int = 5) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 13, (b, s)), "labels": torch.randint(0, 13, (b, s))}


def parameters_of(program: Program) -> list[int]:
    return [i for i, spec in enumerate(program.inputs) if spec.kind == "param"]


def run(program: Program, inputs: dict[str, Any], *tangents: torch.Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        return program.gm(*inputs.values(), *tangents)


def targets(program: Program, phase: str | None = None) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function" and n.meta.get(PHASE) == phase]


def test_bit_equal_to_autograd_at_every_batch_size() -> None:
    weights = gpt_inputs()
    program = local_program(gpt, {**weights, **tokens(2)}, varying=("ids", "labels"), loss=True)
    added = differentiate(program, parameters_of(program), [0])
    assert program.phase is Phase.JOINT and added == len(targets(program, "backward")) > 50
    assert (program.inputs[-1].kind, program.inputs[-1].name) == ("tangent", "0")
    assert [(o.kind, o.name) for o in program.outputs[2:]] == [("gradient", n) for n in weights]
    for b in (2, 7):
        inputs = {**weights, **tokens(b)}
        loss, logits, *gradients = run(program, inputs, torch.tensor(3.0, dtype=torch.float64))
        expected, expected_logits = gpt(*inputs.values())
        assert torch.equal(loss, expected) and torch.equal(logits, expected_logits)
        for got, want in zip(gradients, torch.autograd.grad(3 * expected, list(weights.values())), strict=True):
            assert torch.equal(got, want)


def test_every_node_has_a_value_an_origin_and_sizes_rooted_on_inputs() -> None:
    program = local_program(gpt, {**gpt_inputs(), **tokens(2)}, varying=("ids", "labels"), loss=True)
    for node in program.graph.nodes:
        if node.op == "call_function":
            node.meta[FQN] = f"module.{node.name}"
    names = {n.meta[FQN] for n in program.graph.nodes if FQN in n.meta}
    differentiate(program, parameters_of(program), [0])
    for node in program.graph.nodes:
        if node.op in ("placeholder", "call_function"):
            assert VAL in node.meta, node
        if node.op == "call_function" and isinstance(node.meta[VAL], torch.Tensor):
            assert node.meta[FQN] in names and MADE_BY in node.meta, node
            assert (node.meta.get(PHASE) == "backward") == ("build_joint_graph" in node.meta[MADE_BY]), node
    sizes = [n for n in program.graph.nodes if isinstance(n.meta.get(VAL), torch.SymInt)]
    assert len(sizes) == len({n.meta[VAL].node.expr for n in sizes}) <= 3
    assert not any("detach" in t or "alias" in t for t in targets(program) + targets(program, "backward"))


def test_backward_nodes_belong_to_the_node_they_differentiate() -> None:
    def function(w: Any, v: Any, x: Any) -> tuple[Any, ...]:
        return (F.gelu(x @ w).sum() + F.silu(x @ v).sum(),)

    program = local_program(function, {"w": parameter(4, 3), "v": parameter(4, 3), "x": torch.randn(5, 4).double()})
    for node in program.graph.nodes:
        node.meta[FQN] = str(node.target)
    differentiate(program, [0, 1], [0])
    by_target = {str(n.target): n.meta[FQN] for n in program.graph.nodes if n.meta.get(PHASE) == "backward"}
    assert by_target["aten.gelu_backward.default"] == "aten.gelu.default"
    assert by_target["aten.silu_backward.default"] == "aten.silu.default"
    assert by_target["aten.mm.default"] == "aten.matmul.default"


def test_tied_weight_counts_once() -> None:
    w = parameter(4, 4)
    program = local_program(lambda w, x: ((x @ w @ w).sum(),), {"w": w, "x": torch.ones(3, 4).double()})
    differentiate(program, [0], [0])
    gradient = run(program, {"w": w, "x": torch.ones(3, 4).double()}, torch.ones((), dtype=torch.float64))[1]
    assert torch.equal(gradient, torch.autograd.grad((torch.ones(3, 4).double() @ w @ w).sum(), w)[0])


def test_frozen_parameters_cost_no_backward() -> None:
    def built(wrt: slice) -> Program:
        program = local_program(gpt, {**gpt_inputs(), **tokens(2)}, loss=True)
        differentiate(program, parameters_of(program)[wrt], [0])
        return program

    def products(program: Program) -> int:
        return sum(t in ("aten.mm.default", "aten.addmm.default") for t in targets(program, "backward"))

    # 4 linears a layer and the head, each with a product for its input and one for its weight
    assert products(built(slice(None))) == 2 * (2 * 4 + 1)
    # of the last layer's fc2 alone: one for the head's input, one for the weight
    assert products(built(slice(23, 25))) == 2


def test_input_that_nothing_depends_on_has_no_gradient() -> None:
    inputs = {"w": parameter(3), "u": parameter(3), "x": torch.ones(3).double()}
    program = local_program(lambda w, u, x: ((w * x).sum(), u.detach().sum()), inputs)
    differentiate(program, [0, 1], [0])
    _, _, dw, du = run(program, inputs, torch.ones((), dtype=torch.float64))
    assert torch.equal(dw, torch.ones(3).double()) and du is None
    assert program.outputs[-1].name == "u"
    frozen = local_program(lambda w, u, x: ((w * x).sum(),), inputs)
    assert differentiate(frozen, [1], [0]) == 0
    assert run(frozen, inputs, torch.ones((), dtype=torch.float64))[1] is None


def test_gradients_are_contiguous_and_do_not_share_memory() -> None:
    inputs = {"a": parameter(3, 4), "b": parameter(3, 4), "c": parameter(4, 3)}
    program = local_program(lambda a, b, c: (a + b + c.t(),), inputs)
    differentiate(program, [0, 1, 2], [0])
    tangent = torch.randn(3, 4).double()
    _, *gradients = run(program, inputs, tangent)
    assert len({g.data_ptr() for g in [*gradients, tangent]}) == 4
    assert all(g.is_contiguous() for g in gradients)
    assert torch.equal(gradients[2], tangent.t())


def test_mutated_buffer_is_an_output_without_gradient() -> None:
    inputs = {"w": parameter(3), "running": torch.ones(3).double(), "x": torch.ones(2, 3).double()}
    program = local_program(lambda w, r, x: ((w * x).sum(), r * 0.9 + x.mean(0) * 0.1), inputs)
    differentiate(program, [0], [0])
    _, running, dw = run(program, inputs, torch.ones((), dtype=torch.float64))
    assert torch.equal(running, torch.ones(3).double() * 0.9 + 0.1) and torch.equal(dw, torch.full((3,), 2.0).double())


def test_two_outputs_differentiated() -> None:
    inputs = {"w": parameter(3), "x": torch.ones(3).double()}
    program = local_program(lambda w, x: ((w * x).sum(), w.exp()), inputs)
    differentiate(program, [0, 1], [1, 0])
    assert [i.name for i in program.inputs if i.kind == "tangent"] == ["1", "0"]
    seeds = torch.randn(3).double(), torch.tensor(2.0).double()
    _, _, dw, dx = run(program, inputs, *seeds)
    assert torch.equal(dw, seeds[1] * inputs["x"] + seeds[0] * inputs["w"].detach().exp())
    assert torch.equal(dx, seeds[1] * inputs["w"].detach())


def test_ambient_autocast_changes_no_dtype() -> None:
    inputs = {"w": nn.Parameter(torch.randn(4, 4)), "x": torch.randn(3, 4)}
    program = local_program(lambda w, x: (F.linear(x, w),), inputs)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        differentiate(program, [0], [0])
    assert {n.meta[VAL].dtype for n in program.graph.nodes if n.op == "call_function"} == {torch.float32}


def test_integer_input_is_refused() -> None:
    program = local_program(gpt, {**gpt_inputs(), **tokens(2)}, loss=True)
    with pytest.raises(MegafxError, match="input 'ids' has no gradient: it is no floating tensor"):
        differentiate(program, [program.inputs.index(next(i for i in program.inputs if i.name == "ids"))], [0])


@torch.library.custom_op("megafx_test::scaled", mutates_args=())
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, g: g * int(g.shape[0]))


def test_backward_that_fixes_a_dynamic_size_is_refused() -> None:
    inputs = {"w": parameter(3), "x": torch.ones(4, 3).double()}
    program = local_program(lambda w, x: (scaled(w * x).sum(),), inputs, varying=("x",))
    with pytest.raises(MegafxError, match=r"fixes the sizes .* to the traced ones, at megafx_test.scaled"):
        differentiate(program, [0], [0])


@torch.library.custom_op("megafx_test::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, g: g / 2 if g.shape[0] > 2 else g)


def test_backward_that_decides_by_a_dynamic_size_is_refused() -> None:
    inputs = {"w": parameter(3), "x": torch.ones(4, 3).double()}
    program = local_program(lambda w, x: (halved(w * x).sum(),), inputs, varying=("x",))
    with pytest.raises(MegafxError, match=r"fixes the sizes .* to the traced ones, at megafx_test.halved"):
        differentiate(program, [0], [0])


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(15, 8), nn.Linear(8, 15, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.table(ids))[:, :-1].contiguous()
        return F.cross_entropy(logits.view(-1, 15), labels[:, 1:].reshape(-1))


def test_an_op_may_ask_how_memory_is_laid_out_where_both_answers_are_right() -> None:
    """The reshape of shifted logits asks whether they are of more than one token (`guard_or_true`)."""
    torch.manual_seed(0)
    eager = Shifted().double()
    ours = megafx.parallelize(copy.deepcopy(eager), megafx.Config(tensor_model_parallel_size=1))
    for length in (8, 2, 3):
        ids = torch.randint(0, 15, (2, length))
        for model in (eager, ours):
            model.zero_grad()
            model(ids, ids).backward()
        torch.testing.assert_close(ours(ids, ids), eager(ids, ids), rtol=1e-10, atol=0)
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-14)
    assert ours.megafx.captures == 2, "two tokens have a graph of their own: `contiguous` copies nothing there"


def test_custom_ops_stay_whole() -> None:
    program = local_program(lambda w: (scaled(w).sum(),), {"w": parameter(3)})
    differentiate(program, [0], [0])
    assert targets(program) == ["megafx_test.scaled.default", "aten.sum.default"]


WRITERS = {
    "circular": lambda x: F.pad(x[None], (2, 1), mode="circular")[0],  # an empty tensor, then copies into its slices
    "as_strided": lambda x: x.as_strided((4, 3), (6, 2)),  # its gradient is written through a view of zeros
    "overlapping": lambda x: x.as_strided((4, 5), (6, 1)) + x.as_strided((4, 5), (2, 1)),
    "qr": lambda x: torch.cat([*torch.linalg.qr(x)], 1),  # of more columns than rows
}


@pytest.mark.parametrize("name", WRITERS)
def test_writes_become_values_that_survive_the_cut(name: str) -> None:
    """`partition` follows what nodes read: a write that stays would be lost."""
    function = WRITERS[name]
    inputs: dict[str, Any] = {"w": parameter(6, 5), "x": torch.randn(4, 5, dtype=torch.float64)}
    program = local_program(lambda w, x: (function(F.linear(x, w)).square().sum(),), inputs)
    differentiate(program, [0], [0])
    assert not any(map(writes, program.graph.nodes))
    assert all(MADE_BY in n.meta for n in program.graph.nodes if n.op == "call_function")
    wanted = torch.autograd.grad(function(F.linear(inputs["x"], inputs["w"])).square().sum(), inputs["w"])
    executable = executable_of(program)
    (loss,), kept = executable.forward([inputs["w"].detach(), inputs["x"]])
    assert kept is not None
    (gradient,) = executable.backward(kept, [torch.ones_like(loss)])
    assert gradient is not None
    torch.testing.assert_close(gradient, *wanted, rtol=1e-10, atol=1e-10)


def test_a_write_without_functional_form_is_refused() -> None:
    @torch.library.custom_op("testing::scale_into", mutates_args=("out",))
    def scale_into(out: torch.Tensor, x: torch.Tensor) -> None:
        out.copy_(2 * x)

    scale_into.register_fake(lambda out, x: None)

    class Writing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = torch.empty_like(g)
            scale_into(out, g)
            return out

    program = local_program(lambda w: (w.exp().sum(),), {"w": parameter(6)})
    for node in program.graph.nodes:
        if node.target is torch.ops.aten.exp.default:
            node.target = Writing.apply
    with pytest.raises(MegafxError, match="scale_into.* writes into memory") as caught:
        differentiate(program, [0], [0])
    assert caught.value.fix
