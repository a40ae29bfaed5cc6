"""Covers the transition op, and graphs expanded and bound, on real gloo ranks: each row, forward and backward.

Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist

from megafx.ops.axes import AxisContext, on_mesh
from megafx.distributed.failures import wait_at_exit
from megafx.ir.program import Program
from megafx.placements.types import TRANSITIONS, Layout, Placement, S, dual
from megafx.placements.tensors import shard_tensor, unshard_tensors

T = 2
SHAPE = [4, 7, 6]
CUTS = {0: Layout.contiguous(4, T), 1: Layout.contiguous(7, T), 2: Layout.of([(2, 1), (1, 2), (2, 1)], T)}


@pytest.mark.dist
def test_every_row_on_two_processes(tmp_path: Path) -> None:
    texts = processes.run_ranks(__file__, tmp_path / "store", T, timeout=120)
    assert all(f"{len(moves())} moves" in text for text in texts), texts


def moves() -> list[tuple[Placement, Placement]]:
    found = []
    for a, b in TRANSITIONS:
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
    from megafx.passes.lower.bind_mesh import bind_mesh
    from megafx.passes.communicate.expand_transitions import expand_transitions
    from megafx.testing import graph, run_pass, transition, with_backward

    program = graph(
        lambda x: torch.ops.aten.mul(transition(x, str(dst)), 1.0),
        x=f"f64[{' '.join(map(str, shape))}] {src}@tp",
        out=f"{dst}@tp",
        local=True,
    )
    return bind_mesh(run_pass(expand_transitions, with_backward(program)), mesh)


def rank_main(store: str, rank: int) -> None:
    wait_at_exit()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=T)
    assert dist.group.WORLD is not None
    mesh = {"tp": AxisContext(rank, T, dist.group.WORLD.group_name)}
    generator = torch.Generator().manual_seed(0)
    whole, gradient = (torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(2))
    count = 0
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
        count += 1
    print(f"{count} moves")
    dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(sys.argv[1], int(sys.argv[2]))
