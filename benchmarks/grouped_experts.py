"""A mixture whose experts are a ModuleList called one by one: as it is, and with grouped products (moe_grouped_gemm).

python benchmarks/grouped_experts.py --experts 8 64

ms of a training step (forward and backward of one layer), medians over rounds in which the modes take turns; peak memory.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megafx

MODES = ("eager", "megafx, one by one", "megafx, grouped")


class Expert(nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Mixtral's, of transformers 4."""

    def __init__(self, hidden: int, ffn: int, experts: int, topk: int) -> None:
        super().__init__()
        self.topk, self.router = topk, nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(Expert(hidden, ffn) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        weights, chosen = self.router(tokens).softmax(-1).topk(self.topk, -1)
        out = torch.zeros_like(tokens)
        mask = F.one_hot(chosen, len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            which, rows = torch.where(mask[e])
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, which, None])
        return x + out.view_as(x)


def step_ms(model: nn.Module, x: Tensor, steps: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        model(x).float().square().mean().backward()
        for p in model.parameters():
            p.grad = None
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, {options.tokens} tokens, h={options.hidden}"
    )
    for experts in options.experts:
        ffn = 4 * options.hidden // max(1, experts // 8)
        x = torch.randn(2, options.tokens // 2, options.hidden, device="cuda", dtype=torch.bfloat16)
        models, times, peaks = {}, {mode: [] for mode in MODES}, {}
        for mode in MODES:
            torch.manual_seed(0)
            model = Mixture(options.hidden, ffn, experts, options.topk).to("cuda", torch.bfloat16)
            if mode != "eager":
                config = megafx.Config(moe_grouped_gemm="grouped" in mode)
                model = megafx.parallelize(model, config, example_inputs=(x,))
            models[mode] = model
            step_ms(model, x, 3)
        for mode, model in models.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step_ms(model, x, 1)
            peaks[mode] = (torch.cuda.max_memory_allocated() - before) / 2**30
        for _ in range(options.rounds):
            for mode, model in models.items():
                times[mode].append(step_ms(model, x, options.steps))
        shown = [f"{m} {statistics.median(times[m]):.2f} ms ({peaks[m]:.2f} GiB above weights)" for m in MODES]
        print(f"{experts} experts, ffn {ffn}: " + "; ".join(shown), flush=True)


if __name__ == "__main__":
    main()
