"""Training steps on long sequences over all GPUs of a host: ranks that cut the sequence, ranks that cut weights, torch's own.

    torchrun --standalone --nproc-per-node 4 benchmarks/long_context.py --tokens 131072
    torchrun --standalone --nproc-per-node 2 benchmarks/long_context.py --tokens 32768 --modes 2x1-all_gather,2x1-a2a,1x2
    torchrun --standalone --nproc-per-node 2 benchmarks/long_context.py --tiny     # CPU: does it run, are losses equal

Layers of Llama-8B's shape without embedding and head, one sequence, bf16, AdamW. A mode `CxT` is context_parallel_size=C and
tensor_model_parallel_size=T, with sequence parallelism where T > 1; a cp_comm_type may follow. `torch` is
torch.distributed.tensor.experimental's context_parallel with keys gathered, in eager mode, its gradients all-reduced one by
one.

Modes take turns in each round; milliseconds of a step on each rank are medians. Peak: of one mode's own tensors and steps;
predicted: by megafx.predict_memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from data_parallel import start
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import megafx

Step = Callable[[], Tensor]


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, kv: int, ffn: int) -> None:
        super().__init__()
        self.sizes = [hidden, hidden * kv // heads, hidden * kv // heads]
        self.width = hidden // heads
        self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, sum(self.sizes), bias=False), nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, -1, self.width).transpose(1, 2) for y in self.qkv(self.before(x)).split(self.sizes, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Layers(nn.Module):
    def __init__(self, count: int, *sizes: int) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer(*sizes) for _ in range(count)), nn.RMSNorm(sizes[0])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x).float().square().mean()


def of_megafx(mode: str, model: nn.Module, x: Tensor, say: Callable[..., None]) -> Step:
    sizes, _, by = mode.partition("-")
    context, tensor = map(int, sizes.split("x"))
    config = megafx.Config(
        context_parallel_size=context, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, cache=False,
        cp_comm_type=by or "auto",
    )  # fmt: skip
    if x.is_cuda and dist.get_rank() == 0:
        say(f"{mode}: {megafx.predict_memory(model, config, example_inputs=(x,)).peak / 1e9:.1f} GB predicted")
    model = megafx.parallelize(model, config)

    def step() -> Tensor:
        loss: Tensor = model(x)
        loss.backward()
        return loss.detach()

    return step


def of_torch(model: nn.Module, x: Tensor) -> Step:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("allgather")
    ranks = dist.get_world_size()
    mesh = init_device_mesh(x.device.type, (ranks,), mesh_dim_names=("cp",))

    def add_up(p: Tensor) -> None:
        assert p.grad is not None
        dist.all_reduce(p.grad)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(add_up)

    def step() -> Tensor:
        mine = x.clone()
        with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[1]):
            loss = model(mine) / ranks
            loss.backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--modes", help="default: every C x T, and torch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device, dtype = start(args.tiny), torch.float64 if args.tiny else torch.bfloat16
    ranks, rank = dist.get_world_size(), dist.get_rank()
    say: Callable[..., None] = print if rank == 0 else lambda *_, **__: None
    sizes, tokens = ((4096, 32, 8, 14336), args.tokens) if not args.tiny else ((16, 4, 2, 24), 16)
    every = [f"{c}x{ranks // c}" for c in range(ranks, 0, -1) if ranks % c == 0]
    modes = args.modes.split(",") if args.modes else [*every, *([] if args.tiny else ["torch"])]
    steps: dict[str, Step] = {}
    for mode in modes:
        torch.manual_seed(0)
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        with device:
            model = Layers(args.layers, *sizes).to(dtype)
            x = torch.randn(1, tokens, sizes[0], dtype=dtype)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        forward = of_torch(model, x) if mode == "torch" else of_megafx(mode, model, x, say)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")

        def step(forward: Step = forward, optimizer: Any = optimizer) -> Tensor:
            loss = forward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [float(step()) for _ in range(2)]
        peak = f", peak {(torch.cuda.max_memory_allocated() - before) / 1e9:.1f} GB" if device.type == "cuda" else ""
        say(f"{mode}: losses {losses[0]:.7f} {losses[1]:.7f}{peak}", flush=True)
        steps[mode] = step
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for turn in range(3 * args.rounds):
        for mode, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[mode] += [(time.perf_counter() - begin) * 1e3] if turn % 3 else []  # the first of three is a warm-up
    for mode, mine in times.items():
        each: list[Any] = [None] * ranks
        dist.all_gather_object(each, statistics.median(mine))
        say(
            f"{tokens} tokens, {mode}: {max(each):.1f} ms a step, the slowest rank {max(each) / min(each):.4f} of the fastest"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
