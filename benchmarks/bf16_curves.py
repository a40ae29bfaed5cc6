"""How far rounding alone takes a bf16 loss curve, beside how far two ranks are from one. Two GPUs.

torchrun --standalone --nproc-per-node 2 benchmarks/bf16_curves.py [--warmup 20] [--dropout 0.1] [--seeds 1234 1 2]

For each seed, against one process: two ranks; one process whose weights start perturbed by half a bf16 rounding; and one
process whose linears are cut into halves that are rounded and added, as two ranks do. Printed: the difference of the mean
loss from step 15 on, and the largest relative difference of a step.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_gpt

import megafx


class ColumnHalves(nn.Module):
    """A linear whose input gradient is the sum of two rounded ones."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([F.linear(x, w) for w in self.linear.weight.chunk(2, 0)], -1)
        return y if self.linear.bias is None else y + self.linear.bias


class RowHalves(ColumnHalves):
    """A linear whose result is the sum of two rounded ones."""

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(x.chunk(2, -1), self.linear.weight.chunk(2, 1), strict=True)
        return sum(F.linear(a, w) for a, w in parts) + self.linear.bias


def in_halves(model: nn.Module) -> nn.Module:
    for block in model.h:
        block.attn.qkv, block.attn.proj = ColumnHalves(block.attn.qkv), RowHalves(block.attn.proj)
        block.mlp.fc, block.mlp.proj = ColumnHalves(block.mlp.fc), RowHalves(block.mlp.proj)
    model.lm_head = ColumnHalves(model.lm_head)
    return model


def perturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + (torch.rand(p.shape, generator=generator).to(p) - 0.5) * 2**-7)
    return model


def curve(kind: str, args: argparse.Namespace, data: Tensor, device: torch.device) -> list[float]:
    model = train_gpt.new_model(args, device, args.dropout)
    model = {"halves": in_halves, "perturbed": perturbed}.get(kind, lambda m: m)(model)
    config = megafx.Config(
        tensor_model_parallel_size=2 if kind == "two ranks" else 1, micro_batch_size=args.batch, seq_length=args.seq
    )
    model = megafx.parallelize(model, config, example_inputs=next(train_gpt.batches(data, args, device)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / args.warmup, total_iters=args.warmup)
    torch.manual_seed(args.seed)
    losses = []
    for _, batch in zip(range(args.steps), train_gpt.batches(data, args, device), strict=False):
        loss = model(*batch)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1, 2])
    parser.add_argument("--warmup", type=int, default=1, help="steps; 1: none")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=60)
    shape = {"batch": 16, "seq": 512, "layers": 6, "heads": 8, "embd": 512, "dtype": "bfloat16"}
    args = argparse.Namespace(**vars(parser.parse_args()), **shape)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    data = train_gpt.standard_library()
    for seed in args.seeds:
        args.seed = seed
        curves = {"two ranks": curve("two ranks", args, data, device)}
        for kind in (("one", "perturbed"), ("halves",))[rank]:  # these need one process each
            curves[kind] = curve(kind, args, data, device)
        gathered: list[dict[str, list[float]]] = [{}, {}]
        dist.all_gather_object(gathered, curves)
        one = gathered[0].pop("one")
        for kind, losses in {**gathered[1], **gathered[0]}.items():
            mean = sum(a - b for a, b in zip(losses[15:], one[15:], strict=True)) / len(one[15:])
            worst = max(abs(a - b) / b for a, b in zip(losses, one, strict=True))
            if rank == 0:
                print(f"seed {seed}: {kind:10s} mean difference {mean:+.3f}, largest relative {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
