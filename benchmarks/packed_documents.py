"""Attention of documents packed in one row beside the same documents as rows of a batch: 32 heads on 8 of 128, causal, bf16.

    python benchmarks/packed_documents.py                    # 8 x 1024, 16 x 512 and 8 x 4096 tokens
    python benchmarks/packed_documents.py --documents 8x1024

Milliseconds of forward and backward of the op, medians of `do_bench`, which take turns; the goal is 1.15 of the library's rows.
Errors: the largest difference of output and gradients between the packed row and the rows, of the largest number there.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.testing import do_bench

import megafx.kernels.attention.attention  # noqa: F401  registers the op

HEADS, KV, WIDTH = 32, 8, 128


def ours(q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.megafx.attention_forward(
        q, k, v, None, None, segments, None, None, WIDTH**-0.5, True, 0, 0.0, 0, 0.0, 0, -1, [], "tp"
    )[0]
    return out


def library(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def step(attend: Callable[..., Tensor], *operands: Tensor | None) -> Callable[[], list[Tensor]]:
    leaves = [x for x in operands if x is not None and x.is_floating_point()]
    grad = torch.ones_like(leaves[0])

    def run() -> list[Tensor]:
        out = attend(*operands)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return run


def compare(count: int, length: int) -> None:
    torch.manual_seed(0)
    rows = [
        torch.randn(count, n, length, WIDTH, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for n in (HEADS, KV, KV)
    ]
    row = [x.detach().transpose(0, 1).flatten(1, 2)[None].requires_grad_() for x in rows]
    segments = torch.arange(count, device="cuda").repeat_interleave(length)[None]
    steps = {
        "rows, library": step(library, *rows),
        "rows, megafx": step(ours, *rows, None),
        "packed, megafx": step(ours, *row, segments),
        "one row, library": step(library, *row),
    }
    apart = [x.transpose(0, 1).flatten(1, 2)[None] for x in steps["rows, library"]()]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(steps["packed, megafx"](), apart, strict=True)]
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3):
        for name, run in steps.items():
            times[name].append(do_bench(run, return_mode="median"))
    found = {name: statistics.median(each) for name, each in times.items()}
    print(f"{count} x {length}: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in found.items()))
    print(f"  packed of the library's rows: {found['packed, megafx'] / found['rows, library']:.3f} (goal 1.15)")
    print("  errors of out, dq, dk, dv: " + ", ".join(f"{x:.1e}" for x in errors), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", default="8x1024,16x512,8x4096", help="documents x tokens, comma separated")
    for one in parser.parse_args().documents.split(","):
        compare(*map(int, one.split("x")))


if __name__ == "__main__":
    main()
