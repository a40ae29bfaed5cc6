"""Covers: passes/backward/gradients_in_fp32.py, kernels/products_fp32.py, passes/communicate/add_pending.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_programs import local_program
from torch import Tensor, nn
from torch.nn import functional as F

from megafx.checks.simulate import run_logical
from megafx.config import Config
from megafx.ir.program import VAL, Program
from megafx.kernels.products_fp32 import add_product_, product
from megafx.passes.backward.accumulate_products import accumulate_products
from megafx.passes.backward.build_joint_graph import differentiate
from megafx.passes.backward.gradients_in_fp32 import gradients_in_fp32
from megafx.passes.communicate.add_pending import add_pending
from megafx.placements.types import Layout
from megafx.testing import make_context

BF16 = torch.bfloat16
FUSED = Config(gradient_accumulation_fusion=True)
CAST = Config(accumulate_allreduce_grads_in_fp32=True)
V, H, T = 7, 4, 2


def weights(dtype: torch.dtype = BF16) -> dict[str, Any]:
    torch.manual_seed(0)
    sizes = {"table": (V, H), "w": (6, H), "b": (6,), "scale": (6,)}
    values: dict[str, Any] = {n: nn.Parameter(torch.randn(s).to(dtype)) for n, s in sizes.items()}
    return values | {"ids": torch.randint(0, V, (5,))}


def function(table: Any, w: Any, b: Any, scale: Any, ids: Any) -> tuple[Any, ...]:
    """An embedding, a linear, a sum over tokens, and a product that has no form in fp32."""
    y = F.linear(F.embedding(ids, table), w, b).tanh() * scale
    return (y @ y.t(),)


def joint(values: dict[str, Any], fn: Any = function) -> Program:
    program = local_program(fn, values)
    differentiate(program, [i for i, v in enumerate(values.values()) if isinstance(v, nn.Parameter)], [0])
    return program


def ops(program: Program) -> list[str]:
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    return [str(n.target).split(".", 1)[1].removesuffix(".default") for n in nodes]


def gradient_dtypes(program: Program) -> list[torch.dtype]:
    pairs = zip(program.results(), program.outputs, strict=True)
    return [r.meta[VAL].dtype for r, o in pairs if o.kind == "gradient"]


def run(program: Program, values: dict[str, Any], t: int = 1) -> dict[str, Tensor]:
    shape = next(r for r, o in zip(program.results(), program.outputs, strict=True) if o.kind == "user").meta[VAL].shape
    tangent = torch.randn([*shape], generator=torch.Generator().manual_seed(1)).to(next(iter(values.values())).dtype)
    return run_logical(program, {**values, "0": tangent}, {}, t).gradients


def test_products_sums_and_embeddings_write_fp32() -> None:
    values = weights()
    program = joint(values)
    before, plain = ops(program), run(program, values)
    assert gradients_in_fp32(program, make_context(config=FUSED)) == 4
    assert gradient_dtypes(program) == [torch.float32] * 4
    after = ops(program)
    assert before.count("mm_fp32") == 0 and after.count("mm_fp32") == 1  # that of w; y y^T and its gradients stay
    assert after.count("mm") == before.count("mm") - 1
    sums = [n for n in program.graph.nodes if "sum.dim_IntList" in str(n.target)]
    assert sums and all(n.kwargs["dtype"] == torch.float32 for n in sums)
    found = run(program, values)
    for name in ("w", "b", "scale"):  # the same, but for the last rounding
        assert torch.equal(found[name].to(BF16), plain[name]) and not torch.equal(found[name], plain[name].float()), (
            name
        )


def test_else_what_is_made_is_cast() -> None:
    values = weights()
    program = joint(values)
    plain, count = run(program, values), ops(program).count("mm")
    assert gradients_in_fp32(program, make_context(config=CAST)) == 4
    assert gradient_dtypes(program) == [torch.float32] * 4 and ops(program).count("mm") == count
    found = run(program, values)
    assert torch.equal(found["w"], plain["w"].float()) and torch.equal(found["table"], plain["table"].float())


@pytest.mark.parametrize(("config", "dtype"), [(Config(), BF16), (FUSED, torch.float32), (CAST, torch.float64)])
def test_what_is_wide_or_not_asked_for_is_left(config: Config, dtype: torch.dtype) -> None:
    program = joint(weights(dtype))
    before = str(program.graph)
    assert gradients_in_fp32(program, make_context(config=config)) == 0 and str(program.graph) == before


def test_a_cast_of_autocast_is_seen_from_its_other_end() -> None:
    def cast(w: Any, x: Any) -> tuple[Any, ...]:
        return (F.linear(x, w.to(BF16)),)

    values = {"w": nn.Parameter(torch.randn(6, H)), "x": torch.randn(5, H).to(BF16)}
    program = joint(values, cast)
    shape = torch.randn(5, 6).to(BF16)
    plain = run_logical(program, {**values, "0": shape}, {}, 1).gradients["w"]
    assert "_to_copy" in ops(program)[-1] and gradients_in_fp32(program, make_context(config=FUSED)) == 1
    assert ops(program)[-1] == "mm_fp32"
    found = run_logical(program, {**values, "0": shape}, {}, 1).gradients["w"]
    torch.testing.assert_close(found, shape.float().t() @ values["x"].float())
    assert torch.equal(found.to(BF16).float(), plain)


def test_ranks_sum_fp32() -> None:
    """A replicated weight on tokens that are sharded: what the transition sums is fp32, before it is rounded."""
    move, rows = torch.ops.megafx.transition, Layout.contiguous(6, T).flat()

    def sharded(w: Any, x: Any) -> tuple[Any, ...]:
        w = move(w, "I", "R", [], [], "tp", T)
        y = F.linear(move(x, "I", "S0", [], rows, "tp", T), w)
        return (move(y, "S0", "I", rows, [], "tp", T),)

    values = {"w": nn.Parameter(torch.randn(6, H).to(BF16)), "x": torch.randn(6, H).to(BF16)}
    program = joint(values, sharded)
    assert gradients_in_fp32(program, make_context(config=FUSED)) == 1
    (total,) = (n for n in program.graph.nodes if n.target is move.default and n.args[1:3] == ("P", "I"))
    assert total.args[0].meta[VAL].dtype == total.meta[VAL].dtype == torch.float32
    tangent = torch.randn(6, 6).to(BF16)
    found = run_logical(program, {**values, "0": tangent}, {}, T).gradients["w"]
    torch.testing.assert_close(found, tangent.float().t() @ values["x"].float())


def pending(program: Program, config: Config, gradients: Any) -> tuple[Program, int]:
    program = program.copy()
    return program, add_pending(program, make_context(config=config, gradients=gradients))


def test_products_add_to_what_is_there() -> None:
    """Of two linears that were merged, each on its own rows; a weight that two products share, by a sum."""

    def merged(w: Any, v: Any, u: Any, x: Any) -> tuple[Any, ...]:
        y = F.linear(x, torch.ops.megafx.join_parameters([w, v]))
        return (F.linear(F.linear(y[:, :3].sin() * y[:, 3:6], u).cos(), u),)

    torch.manual_seed(0)
    values: dict[str, Any] = {
        "w": nn.Parameter(torch.randn(3, H).double()),
        "v": nn.Parameter(torch.randn(5, H).double()),
    }
    values |= {"u": nn.Parameter(torch.randn(3, 3).double()), "x": torch.randn(6, H).double()}
    program = joint(values, merged)
    accumulate_products(program, make_context())
    plain = run(program, values)
    added, changes = pending(program, FUSED, "accumulate")
    assert changes == 3 and [i.kind for i in added.inputs][-3:] == ["pending"] * 3
    *_, w, v, u = added.results()
    slices = [n for n in (w.args[1], v.args[1]) if n.target is torch.ops.aten.slice.Tensor]
    assert w.target is v.target is torch.ops.aten.addmm.default and len(slices) == 2
    assert u.target is torch.ops.aten.add.Tensor
    tangent = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)).double()
    there = [torch.randn_like(values[n]).detach() for n in ("w", "v", "u")]
    added.gm.recompile()
    got = added.gm(*(x.detach() for x in values.values()), tangent, *there)[-3:]
    for name, old, new in zip(("w", "v", "u"), there, got, strict=True):
        torch.testing.assert_close(new, old + plain[name], rtol=1e-12, atol=1e-13)
    without, changes = pending(program, Config(), "add")
    assert changes == 3 and all(n.target is torch.ops.aten.add.Tensor for n in without.results()[-3:])
    for gradients in ("reduce", "hold"):
        same, changes = pending(program, FUSED, gradients)
        assert changes == 0 and len(same.inputs) == len(program.inputs)


def test_a_product_that_is_transposed_twice_adds_too() -> None:
    """As weights that lie the other way (Conv1D of GPT-2) have it."""
    values = {"w": nn.Parameter(torch.randn(H, 6).double()), "x": torch.randn(5, H).double()}
    program = joint(values, lambda w, x: (torch.mm(x, w),))
    (gradient,) = (r for r, o in zip(program.results(), program.outputs, strict=True) if o.kind == "gradient")
    with program.graph.inserting_after(gradient):
        once = program.graph.call_function(torch.ops.aten.t.default, (gradient,))
    with program.graph.inserting_after(once):
        twice = program.graph.call_function(torch.ops.aten.transpose.int, (once, 0, 1))
    once.meta, twice.meta = gradient.meta | {VAL: gradient.meta[VAL].t()}, dict(gradient.meta)
    program.output_node().replace_input_with(gradient, twice)
    added, changes = pending(program, FUSED, "accumulate")
    result = added.results()[-1]
    assert changes == 1 and result.target is torch.ops.aten.addmm.default
    there, tangent = torch.randn(H, 6).double(), torch.randn(5, 6).double()
    added.gm.recompile()
    got = added.gm(values["w"].detach(), values["x"], tangent, there)[-1]
    torch.testing.assert_close(got, there + values["x"].t() @ tangent, rtol=1e-12, atol=1e-13)


def test_the_product_of_low_precision_is_exact() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(8, 33).to(BF16), torch.randn(33, 5).to(BF16)
    torch.testing.assert_close(product(a, b).double(), a.double() @ b.double(), rtol=1e-6, atol=1e-6)
    total = torch.randn(8, 5)
    wanted = 0.5 * total.double() + 2.0 * (a.double() @ b.double())
    assert add_product_(total, a, b, 0.5, 2.0) is total
    torch.testing.assert_close(total.double(), wanted, rtol=1e-6, atol=1e-5)
    assert product(a.double(), b.double()).dtype == torch.float64
