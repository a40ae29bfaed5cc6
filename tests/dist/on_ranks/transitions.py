"""Covers the transition op, and graphs expanded and bound, on real gloo ranks: each row, forward and backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lowered import bound
from ranks import check

from megafx.ir.program import Program
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.communicate.expand_transitions import expand_transitions
from megafx.placements.tensors import shard_tensor, unshard_tensors
from megafx.placements.types import TRANSITIONS, Layout, Placement, S, dual
from megafx.testing import graph, run_pass, transition, with_backward

T = 2
SHAPE = [4, 7, 6]
CUTS = {0: Layout.contiguous(4, T), 1: Layout.contiguous(7, T), 2: Layout.of([(2, 1), (1, 2), (2, 1)], T)}


def moves() -> list[tuple[Placement, Placement]]:
    found = []
    for a, b in TRANSITIONS:
        if a == "M":  # no gradient: tests/placements/test_maxima.py
            continue
        for i, j in (
            [(0, 1), (1, 2), (2, 0)] if (a, b) == ("S", "S") else [(0, 0), (1, 1)] if "S" in (a, b) else [(0, 0)]
        ):
            found.append(tuple(S(d, CUTS[d]) if k == "S" else Placement(k) for k, d in ((a, i), (b, j))))
    return found  # type: ignore[return-value]


def local_of(whole: torch.Tensor, placement: Placement, rank: int) -> torch.Tensor:
    if placement.kind == "P":  # summands that differ
        return whole * (0.25 if rank == 0 else 0.75)
    return shard_tensor(whole, placement, rank, T).clone()


def together(local: torch.Tensor, placement: Placement) -> torch.Tensor:
    parts = [torch.empty_like(local) for _ in range(T)]
    dist.all_gather(parts, local.contiguous())
    if placement.kind in ("I", "R"):
        assert torch.equal(parts[0], parts[1])
    return unshard_tensors(parts, placement, T)


def expanded(src: Placement, dst: Placement, shape: torch.Size, mesh: dict[str, AxisContext]) -> Program:
    program = graph(
        lambda x: torch.ops.aten.mul(transition(x, str(dst)), 1.0),
        x=f"f64[{' '.join(map(str, shape))}] {src}@tp",
        out=f"{dst}@tp",
        local=True,
    )
    return bound(run_pass(expand_transitions, with_backward(program)), mesh)


@check(2)
def every_transition_forward_and_backward() -> str:
    assert dist.group.WORLD is not None
    rank = dist.get_rank()
    mesh = {"tp": AxisContext(rank, T, dist.group.WORLD.group_name)}
    generator = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    for src, dst in moves():
        x = local_of(whole, src, rank).requires_grad_()
        tangent = local_of(gradient, dual(dst), rank)
        with on_mesh(mesh):
            y = torch.ops.megafx.transition(x, src.tag, dst.tag, src.flat_layout, dst.flat_layout, "tp", T)
            (g,) = torch.autograd.grad(y, x, tangent)
        torch.testing.assert_close(together(y.detach(), dst), whole, msg=f"{src} -> {dst}")
        torch.testing.assert_close(together(g, dual(src)), gradient, msg=f"{src} -> {dst}, backward")
        y2, g2 = expanded(src, dst, whole.shape, mesh).gm(x.detach(), tangent)
        assert torch.equal(y2, y) and torch.equal(g2, g), f"{src} -> {dst}, expanded"
    return f"{len(moves())} moves"
