"""The three products of a language model's head, by how an odd vocabulary is laid out; and the fused loss against them.

    python benchmarks/head_products.py [--head 32768x1024x50257 ...] [--out heads.json]  # tokens x hidden x vocabulary; CUDA

as is     logits [T, V], rows V elements apart
rows      logits in a buffer whose rows are a multiple of 64 elements apart
padded    weight with zero rows up to that multiple, and all of the buffer (its copy is timed apart)
split     the largest multiple of 64 classes, and the rest by itself
fused     megafx::linear_cross_entropy_forward: loss and the gradients of x and weight; against its products in its chunks

Medians in ms of the three together, each variant in turn; bf16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

import megafx.kernels.loss.linear_cross_entropy  # noqa: F401  registers the op
from megafx.kernels.loss.logits_chunks import CLASS_ALIGNMENT, chunk_rows

HEADS = ("32768x1024x50257", "16384x2048x50257", "16384x2048x128256", "8192x4096x128256", "16384x2048x32000")
CHUNK = 8192  # tokens at a time in the comparison of layouts
ROUNDS = 7


def milliseconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def in_turns(variants: dict[str, Callable[[], object]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(ROUNDS):
        for name, run in variants.items():
            time = milliseconds(run)
            if round_:
                times[name].append(time)
    return {name: median(each) for name, each in times.items()}


def products(x: Tensor, weight: Tensor, logits: Tensor, dx: Tensor, dw: Tensor) -> None:
    """Over all tokens, in chunks of as many as `logits` has rows."""
    for start in range(0, len(x), len(logits)):
        rows = x[start : start + len(logits)]
        z = logits[: len(rows)]
        torch.mm(rows, weight.t(), out=z)
        torch.mm(z, weight, out=dx[start : start + len(rows)])
        if start:
            dw.addmm_(z.t(), rows)
        else:
            torch.mm(z.t(), rows, out=dw)


def split_products(x: Tensor, weight: Tensor, logits: Tensor, dx: Tensor, dw: Tensor, at: int) -> None:
    products(x, weight[:at], logits[:, :at], dx, dw[:at])
    products(x, weight[at:], logits[:, at:], torch.empty_like(dx), dw[at:])


def layouts(tokens: int, hidden: int, classes: int) -> dict[str, float]:
    """ms of the three products of all tokens, chunk by chunk, for each layout."""
    x, weight = _randn(tokens, hidden), _randn(classes, hidden)
    apart = -(-classes // CLASS_ALIGNMENT) * CLASS_ALIGNMENT
    whole = classes // CLASS_ALIGNMENT * CLASS_ALIGNMENT
    flat, buffer = _randn(CHUNK, classes), _randn(CHUNK, apart)
    padded, dx = torch.cat([weight, weight.new_zeros(apart - classes, hidden)]), torch.empty_like(x)
    dw, dw_padded = torch.empty_like(weight), torch.empty_like(padded)
    rows = buffer[:, :classes]
    return in_turns(
        {
            "as is": lambda: products(x, weight, flat, dx, dw),
            "rows": lambda: products(x, weight, rows, dx, dw),
            "padded": lambda: products(x, padded, buffer, dx, dw_padded),
            "copy of the weight": lambda: padded[:classes].copy_(weight),
            **({"split": lambda: split_products(x, weight, rows, dx, dw, whole)} if whole != classes else {}),
        }
    )


def fused(tokens: int, hidden: int, classes: int) -> dict[str, float]:
    """ms of the fused loss with its gradients, and of its products alone."""
    x, weight = _randn(tokens, hidden), _randn(classes, hidden)
    target = torch.randint(0, classes, (tokens,), device="cuda")
    apart = -(-classes // CLASS_ALIGNMENT) * CLASS_ALIGNMENT
    padded = torch.cat([weight, weight.new_zeros(apart - classes, hidden)])
    buffer = _randn(min(tokens, chunk_rows(tokens, classes, 2)), apart)
    dx, dw = torch.empty_like(x), torch.empty_like(padded)
    args = (x, weight, None, target, -100, 0.0, True)
    found = in_turns(
        {
            "fused": lambda: torch.ops.megafx.linear_cross_entropy_forward(*args),
            "products": lambda: products(x, padded, buffer, dx, dw),
        }
    )
    return {**found, "ratio": found["fused"] / found["products"], "chunks": -(-tokens // len(buffer))}


def _randn(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * 0.1).bfloat16()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--head", nargs="*", default=HEADS, help="tokens x hidden x vocabulary, as 32768x1024x50257")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    options = parser.parse_args()
    rows = []
    for text in options.head:
        sizes = [int(n) for n in text.split("x")]
        row = {"head": text, **layouts(*sizes), **fused(*sizes)}
        rows.append(row)
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    if options.out:
        found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "heads": rows}
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
