"""megafx::embedding_sum: y = dropout(a[a_ids] + b[b_ids] + c[c_ids]), rows of tables and tensors, one write of [B, S, H].

    a, b, c    a table [V, H] with ids [B or 1, S], or without ids a tensor [B or 1, S, H]; c may be missing
    y [B, S, H] in the promoted dtype
    y = keep(i) (a_ + b_ + c_) scale     keep, scale: kernels/philox.py; i = index in the whole tensor, as megafx::dropout
    backward: d = keep(i) dy scale; a tensor gets d, one that is the same for all of the batch d summed over it, a table
              the sums of the rows of d that took each of its rows (aten.embedding_dense_backward; none to padding_idx)

Word + position (GPT-2, OPT), word + type + position (BERT). Arithmetic in fp32 (fp64 for fp64), rounded once. Saved: ids
and seed. p = 0 draws nothing. padding: of each table, -1 for none. Ids outside of a table are an error on CPU; on CUDA,
where a kernel cannot raise, their rows are nan.

Made on one rank's shapes, after planning, where tables are whole or cut on the hidden dim (t = 1, small tables, `colwise`).
Tables that are cut on their rows (vocabulary-parallel) keep their lookups: these are partial sums, which the planner adds up
before the one transition that completes them, so that a fused op in front of it would change nothing but the lookups, and
one behind it is left with the dropout alone. So a fused graph has the collectives of an unfused one.
CPU and fp64: the plain torch below. CUDA: embedding_sum_triton.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megafx.ir.facts import DRAWN, SEED, UNDRAWN, ids, real
from megafx.kernels.common.op import define_gradient, define_op, wide
from megafx.kernels.dropout.bias_dropout_add import check_draw, draws, dropped_reference
from megafx.rules.families import Arg, OpCall

_DRAWING = "Tensor? seed, float p, int op_id, int shard_dim, SymInt[] layout, str axis"


class Part(NamedTuple):
    """One summand: a table with ids, or a tensor."""

    value: Tensor
    ids: Tensor | None

    def rows(self) -> Tensor:
        """[B or 1, S, H]."""
        return self.value if self.ids is None else torch.ops.aten.embedding(self.value, self.ids)

    def lead(self) -> torch.Size:
        """(B or 1, S)."""
        return self.value.shape[:2] if self.ids is None else self.ids.shape


def parts_of(operands: Sequence[Tensor | None]) -> list[Part]:
    """a, a_ids, b, b_ids, c, c_ids -> those that are there."""
    pairs = zip(operands[::2], operands[1::2], strict=True)
    return [Part(value, ids) for value, ids in pairs if value is not None]


def check_parts(parts: Sequence[Part], seed: Tensor | None, p: float, op_id: int) -> None:
    check_draw("embedding_sum", seed, p, op_id)
    for value, index in parts:
        if not value.is_floating_point() or value.dim() != (3 if index is None else 2):
            wanted = "a floating tensor [B, S, H]" if index is None else "a floating table [V, H] beside its ids"
            raise ValueError(f"embedding_sum takes {wanted}, got {value.dtype} {tuple(value.shape)}")
        if index is not None and (index.dim() != 2 or index.dtype not in (torch.int64, torch.int32)):
            raise ValueError(f"embedding_sum takes ids [B, S] of integers, got {index.dtype} {tuple(index.shape)}")
        if value.shape[-1] != parts[0].value.shape[-1]:
            raise ValueError("embedding_sum: its operands differ in the last dim")


def result_like(parts: Sequence[Part]) -> Tensor:
    """An empty [B, S, H] of the promoted dtype."""
    dtype = parts[0].value.dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.value.dtype)
    lead = torch.broadcast_shapes(*(part.lead() for part in parts))
    first = parts[0].value
    return torch.empty((*lead, first.shape[-1]), dtype=dtype, device=first.device)


def embedding_sum_reference(*args: Any) -> Tensor:
    operands, _, drawing = args[:6], args[6], args[7:]
    parts = parts_of(operands)
    check_parts(parts, *drawing[:3])
    out = result_like(parts)
    compute = wide(out.dtype)
    total = parts[0].rows().to(compute)
    for part in parts[1:]:
        total = total + part.rows().to(compute)
    return dropped_reference(total.expand(out.shape).contiguous(), *drawing).to(out.dtype, copy=True)


def embedding_sum_backward_reference(grad: Tensor, dtype: torch.dtype, *drawing: Any) -> tuple[Tensor, Tensor]:
    d = dropped_reference(grad.to(wide(grad.dtype)).contiguous(), *drawing)
    return d.to(dtype, copy=True), d.sum(0, keepdim=True).to(dtype)


def _fake(*args: Any) -> Tensor:
    parts = parts_of(args[:6])
    check_parts(parts, *args[7:10])
    return result_like(parts)


def _rule(call: OpCall) -> str:
    """Batch, sequence and width; rows of tables stay whole. Linear in all summands together."""
    operands = []
    for name in ("a", "b", "c"):
        table = isinstance(call.get(f"{name}_ids"), Arg)
        operands += [("" if name == "a" else "+") + (f"v{name}! h" if table else "b s h"), "~b s"]
    return f"lin: {', '.join(operands)}, ~ -> b s h"


define_op(
    "embedding_sum(Tensor a, Tensor? a_ids, Tensor b, Tensor? b_ids, Tensor? c, Tensor? c_ids, int[] padding, "
    f"{_DRAWING}) -> Tensor",
    rule=_rule,
    samples=[
        (real(4, 6, 6), None, real(12, 6), ids(12, 1, 6), real(4, 6), ids(4, 4, 6), [-1, -1, -1], SEED, *DRAWN),
        (real(12, 6), ids(12, 4, 6), real(1, 6, 6), *[None] * 3, [-1, -1, -1], None, *UNDRAWN),
    ],
    reference=embedding_sum_reference,
    triton="dropout.embedding_sum_triton:embedding_sum",
    fake=_fake,
)
define_op(
    f"embedding_sum_backward(Tensor grad, ScalarType dtype, {_DRAWING}) -> (Tensor d, Tensor over_batch)",
    rule="lin: b s h, ~ -> b s h; 1 s h",
    samples=[(real(4, 6, 6), torch.float64, SEED, *DRAWN)],
    reference=embedding_sum_backward_reference,
    triton="dropout.embedding_sum_triton:embedding_sum_backward",
    fake=lambda grad, dtype, *_: (
        torch.empty(grad.shape, dtype=dtype, device=grad.device),
        torch.empty((1, *grad.shape[1:]), dtype=dtype, device=grad.device),
    ),
)


def _saves(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    operands, ctx.padding, seed, ctx.rest = inputs[:6], inputs[6], inputs[7], inputs[8:]
    values, ids = operands[::2], operands[1::2]
    ctx.shapes = [None if v is None else tuple(v.shape) for v in values]
    ctx.dtypes = [None if v is None else v.dtype for v in values]
    ctx.save_for_backward(seed, *ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    seed, *ids = ctx.saved_tensors
    wanted = [k for k in range(3) if ctx.needs_input_grad[2 * k]]
    leads = [ctx.shapes[k][:2] if ids[k] is None else ids[k].shape for k in wanted]
    shared = {k for k, lead in zip(wanted, leads, strict=True) if _is_one(lead[0]) and not _is_one(grad.shape[0])}
    d, over_batch = grad, None
    if shared and draws(ctx.rest[0]):
        d, over_batch = torch.ops.megafx.embedding_sum_backward(grad, grad.dtype, seed, *ctx.rest)
    elif shared:
        over_batch = grad.sum(0, keepdim=True, dtype=wide(grad.dtype)).to(grad.dtype)
    elif draws(ctx.rest[0]):
        d = torch.ops.megafx.dropout_add_backward(grad, grad.dtype, seed, *ctx.rest)
    found: list[Any] = [None] * len(ctx.needs_input_grad)
    for k in wanted:
        part = over_batch if k in shared else d
        if ids[k] is not None:
            part = torch.ops.aten.embedding_dense_backward(part, ids[k], ctx.shapes[k][0], ctx.padding[k], False)
        found[2 * k] = part.to(ctx.dtypes[k])  # type: ignore[union-attr]
    return tuple(found)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


define_gradient("embedding_sum", _backward, _saves)
