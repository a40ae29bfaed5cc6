"""Training steps of a mixture of experts on all GPUs of a host: experts shared out over ranks, and the other ways, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/expert_parallel.py
    torchrun --standalone --nproc-per-node 2 benchmarks/expert_parallel.py --modes ep,tp --batch 4
    torchrun --standalone --nproc-per-node 2 benchmarks/expert_parallel.py --tiny      # CPU: does it run, are losses equal

Layers as those of Qwen3-30B-A3B (128 experts of 2048 x 768, 8 of them a token), a small vocabulary, bf16, no optimizer.
`ep`: expert_model_parallel_size is the number of GPUs, data_parallel ddp; `ep-fsdp`: with fsdp; `dp-fsdp`: fsdp alone; `tp`:
tensor parallelism; all by megafx, with `-graphs` at the end as CUDA graphs, with `-compile` by Inductor too. `fully_shard`:
torch's FSDP2 of transformers' layers with its grouped products (experts_implementation grouped_mm); `fully_shard-eager`: with
its loop over experts.

Modes take turns in each round. Milliseconds of a step: the median over rounds of the slowest rank. 'exposed' is the time of a
step's collectives during which no other kernel runs, from one profiled step of rank 0.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data_parallel import collectives_of, live_at_peak, start
from torch.distributed.fsdp import fully_shard

import megafx

MODES = ("ep", "ep-graphs", "ep-fsdp", "dp-fsdp", "tp", "tp-graphs", "fully_shard", "fully_shard-eager")
SHAPE: dict[str, Any] = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 8192, "intermediate_size": 6144,
}  # fmt: skip
TINY: dict[str, Any] = {
    "hidden_size": 32, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "intermediate_size": 64,
}  # fmt: skip


def build(mode: str, args: argparse.Namespace, device: torch.device) -> Any:
    torch.manual_seed(0)
    config: Any = transformers.Qwen3MoeConfig(
        num_hidden_layers=args.layers, tie_word_embeddings=False, use_cache=False, **(TINY if args.tiny else SHAPE)
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager" if mode.endswith("-eager") or args.tiny else "grouped_mm"
    with device:
        model = transformers.Qwen3MoeForCausalLM(config)
    return model.to(torch.float32 if args.tiny else torch.bfloat16).train()


def prepared(mode: str, model: Any, call: dict[str, torch.Tensor]) -> Any:
    """The model as the mode runs it."""
    n = dist.get_world_size()
    if mode.startswith("fully_shard"):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    sizes: dict[str, Any] = {"tensor_model_parallel_size": n} if mode.startswith("tp") else {
        "tensor_model_parallel_size": 1, "data_parallel_size": n,
        "data_parallel": "fsdp" if "fsdp" in mode else "ddp",
        "expert_model_parallel_size": n if mode.startswith("ep") else 1,
    }  # fmt: skip
    sizes |= {"cuda_graphs": mode.endswith("graphs"), "compile": mode.endswith("compile")}
    return megafx.parallelize(model, megafx.Config(cache=False, **sizes), example_inputs=((), call))


def batch(mode: str, args: argparse.Namespace, device: torch.device, number: int) -> dict[str, torch.Tensor]:
    """The rows of this rank; with tensor parallelism, those of all."""
    rows, length = args.batch * dist.get_world_size(), 16 if args.tiny else args.seq
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint((TINY if args.tiny else SHAPE)["vocab_size"], (rows, length), generator=generator)
    if not mode.startswith("tp"):
        ids = ids[dist.get_rank() * args.batch :][: args.batch]
    return {"input_ids": ids.to(device), "labels": ids.to(device)}


def stepping(mode: str, args: argparse.Namespace, device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function that takes a step on the batch of a number."""
    model = prepared(mode, build(mode, args, device), batch(mode, args, device, 0))

    def step(number: int) -> torch.Tensor:
        loss: torch.Tensor = model(**batch(mode, args, device, number)).loss
        loss.backward()
        model.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--batch", type=int, default=2, help="rows for each rank")
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--live", action="store_true", help="what rank 0 has allocated at the peak of a step")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = start(args.tiny)
    say = print if dist.get_rank() == 0 else lambda *_, **__: None
    steps: dict[str, Callable[[int], torch.Tensor]] = {}
    losses: dict[str, float] = {}
    for mode in args.modes.split(","):
        begin = time.perf_counter()
        before = 0 if args.tiny else torch.cuda.memory_allocated()
        steps[mode] = stepping(mode, args, device)
        if not args.tiny:
            torch.cuda.reset_peak_memory_stats()  # to build a model takes more than its steps
        for number in range(4 * args.steps):  # rooms of experts have grown then, and CUDA graphs are recorded
            loss = steps[mode](number % args.steps)
        dist.all_reduce(loss)
        losses[mode] = loss.item() / dist.get_world_size()
        peak = "" if args.tiny else f", peak {(torch.cuda.max_memory_allocated() - before) / 1e9:.1f} GB"
        say(f"{mode:18s} ready in {time.perf_counter() - begin:.0f} s, loss {losses[mode]:.5f}{peak}", flush=True)
    times: dict[str, list[float]] = {mode: [] for mode in steps}
    for _ in range(args.rounds):
        for mode, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            for number in range(args.steps):
                step(number)
            if not args.tiny:
                torch.cuda.synchronize()
            spent = torch.tensor((time.perf_counter() - begin) / args.steps * 1e3, device=device)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            times[mode].append(spent.item())
    first = statistics.median(times[next(iter(times))])
    for mode, step in steps.items():
        ms = statistics.median(times[mode])
        more = "" if args.tiny else f", {collectives_of(functools.partial(step, 0))}"
        say(f"{mode:18s} {ms:.1f} ms, {ms / first:.2f} of the first{more}", flush=True)
        if args.live:
            say(live_at_peak(functools.partial(step, 0)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
