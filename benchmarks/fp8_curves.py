"""Losses of FP8 beside those of bf16, and how much of the gradients FP8 keeps. One GPU of compute capability 8.9 or higher.

    python benchmarks/fp8_curves.py                  # 12 layers of 768, 124M parameters, 1,000 steps, three seeds of bf16
    python benchmarks/fp8_curves.py --tiny           # two small layers on the CPU, a few steps: does it run

All layers in FP8 (`fp8="hybrid"`), tensorwise and rowwise, and tensorwise with the head too, and with inputs of activations
kept in e4m3, with the first seed's weights and batches. Text: Python's standard library, a byte a token (of a vocabulary of
50,304, about GPT-2's). Printed: the mean loss of the last 50 steps of each run, and whether that of FP8 is within the spread of
the seeds of bf16: the largest of them minus the smallest, on either side of the first seed's.

Then, at the weights that the first run of bf16 ends with, on one batch: the ratio of gradients in fp32 to their difference from
those of each mode, in dB (SQNR), by kind of weight. 6 dB are a bit of the mantissa.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_gpt

import megafx

LAST = 50  # steps of which the mean is taken
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": False},
    "rowwise": {"fp8": "hybrid", "fp8_recipe": "rowwise", "first_last_layers_bf16": False},
}
MODES["head"] = {**MODES["tensorwise"], "fp8_head": True}
MODES["stored"] = {**MODES["head"], "activation_func_fp8_input_store": True}


def built(mode: str, args: argparse.Namespace, data: Tensor, device: torch.device) -> nn.Module:
    model = train_gpt.new_model(args, device, 0.0, args.vocabulary)
    config = megafx.Config(micro_batch_size=args.batch, seq_length=args.seq, **MODES[mode])
    return megafx.parallelize(model, config, example_inputs=next(train_gpt.batches(data, args, device)))


def curve(model: nn.Module, args: argparse.Namespace, data: Tensor, device: torch.device) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warmup, total_iters=args.warmup)
    losses = []
    for _, batch in zip(range(args.steps), train_gpt.batches(data, args, device), strict=False):
        loss = model(*batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def gradients(model: nn.Module, weights: dict[str, Tensor], batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    model.zero_grad()
    model(*batch)[1].backward()
    return {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None and p.dim() == 2}


def sqnr(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Kind of weight -> dB."""
    signal: dict[str, float] = {}
    noise: dict[str, float] = {}
    for name, value in wanted.items():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        signal[kind] = signal.get(kind, 0.0) + float(value.square().sum())
        noise[kind] = noise.get(kind, 0.0) + float((found[name] - value).square().sum())
    return {kind: 10 * math.log10(signal[kind] / max(noise[kind], 1e-30)) for kind in signal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape = {"batch": 16, "seq": 1024, "layers": 12, "heads": 12, "embd": 768, "vocabulary": 50304}
    if args.tiny:
        shape |= {"batch": 2, "seq": 32, "layers": 2, "heads": 2, "embd": 32, "vocabulary": 256}
        args.steps, args.seeds = 3, args.seeds[:2]
    vars(args).update(shape, dtype="bfloat16", learning_rate=6e-4, warmup=100)
    device = torch.device("cpu" if args.tiny else "cuda")
    data = train_gpt.standard_library()

    means: dict[str, float] = {}
    weights: dict[str, Tensor] = {}
    for mode, seed in [("bf16", s) for s in args.seeds] + [(m, args.seeds[0]) for m in MODES if m != "bf16"]:
        args.seed = seed
        torch.manual_seed(seed)
        model = built(mode, args, data, device)
        losses = curve(model, args, data, device)
        name = f"{mode}, seed {seed}"
        means[name] = sum(losses[-LAST:]) / len(losses[-LAST:])
        if not weights:
            weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        print(f"{name}: first {losses[0]:.4f}, step {len(losses) // 10} {losses[len(losses) // 10]:.4f}, "
              f"mean of the last {LAST} {means[name]:.4f}", flush=True)  # fmt: skip
        del model
    bf16 = [means[f"bf16, seed {s}"] for s in args.seeds]
    spread = max(bf16) - min(bf16)
    for mode in MODES:
        if mode != "bf16":
            gap = means[f"{mode}, seed {args.seeds[0]}"] - bf16[0]
            inside = "within" if abs(gap) <= spread else "outside of"
            print(f"{mode}: {gap:+.4f} from bf16, {inside} the spread of {len(bf16)} seeds ({spread:.4f})")

    args.seed = args.seeds[0]
    batch = next(train_gpt.batches(data, args, device))
    args.dtype = "float32"
    wanted = gradients(built("bf16", args, data, device), weights, batch)
    args.dtype = "bfloat16"
    found = {mode: sqnr(gradients(built(mode, args, data, device), weights, batch), wanted) for mode in MODES}
    print(f"{'SQNR of gradients, dB':40s}" + "".join(f"{mode:>12s}" for mode in MODES))
    for kind in found["bf16"]:
        print(f"{kind:40s}" + "".join(f"{found[mode][kind]:12.1f}" for mode in MODES))


if __name__ == "__main__":
    main()
