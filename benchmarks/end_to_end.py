"""Training steps of Hugging Face models on one GPU: megafx at t=1 against eager, torch.compile and Liger-Kernel, in one run.

    python benchmarks/end_to_end.py                       # GPT-2 medium and a 1.5B Llama, all masks, all modes
    python benchmarks/end_to_end.py --models llama --modes megafx,liger --masks none --steps 10
    python benchmarks/end_to_end.py --tiny --modes megafx,eager     # two small layers on the CPU: does it run, are losses equal

bf16 parameters, AdamW (fused), labels = input ids, dropout 0.1 in GPT-2. Tokens/s from the median step; MFU counts
6 * matmul parameters * tokens + 6 * layers * seq * hidden * tokens (causal half) over --peak-tflops. Modes start from the same
weights and see the same batches; dropout masks differ, losses of GPT-2 therefore too. Modes run one after another in one
process, each after the memory of the last is freed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import megafx

SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "kv": 16,
        "ffn": 4096,
        "vocab": 50257,
        "batch": 32,
        "seq": 1024,
    },
    "llama": {
        "layers": 16,
        "hidden": 2048,
        "heads": 32,
        "kv": 8,
        "ffn": 8192,
        "vocab": 128256,
        "batch": 8,
        "seq": 2048,
    },
}
TINY = {"layers": 2, "hidden": 64, "heads": 4, "kv": 2, "ffn": 128, "vocab": 128, "batch": 2, "seq": 32}
MASKS = ("none", "ones", "padded")
MODES = ("megafx", "megafx-compile", "eager", "compile", "compile-nomask", "liger")


def build(name: str, shape: dict[str, int], device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    common = {"vocab_size": shape["vocab"], "use_cache": False}
    with torch.device(device):
        if name == "gpt2":
            sizes = {"n_layer": shape["layers"], "n_embd": shape["hidden"], "n_head": shape["heads"]}
            model: Any = GPT2LMHeadModel(GPT2Config(n_positions=shape["seq"], **sizes, **common))
        else:
            sizes = {
                "num_hidden_layers": shape["layers"],
                "hidden_size": shape["hidden"],
                "num_attention_heads": shape["heads"],
                "num_key_value_heads": shape["kv"],
                "intermediate_size": shape["ffn"],
            }
            model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=shape["seq"], **sizes, **common))
    return model.to(torch.bfloat16).train()


def batch(shape: dict[str, int], mask: str, device: torch.device, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(shape["vocab"], (shape["batch"], shape["seq"]), generator=generator)
    call = {"input_ids": ids, "labels": ids.clone()}
    if mask != "none":
        call["attention_mask"] = torch.ones_like(ids)
    if mask == "padded":
        call["attention_mask"][: shape["batch"] // 2, -shape["seq"] // 8 :] = 0
        call["labels"] = ids.masked_fill(call["attention_mask"] == 0, -100)
    return {key: value.to(device) for key, value in call.items()}


def prepared(mode: str, name: str, model: Any, call: dict[str, torch.Tensor]) -> Callable[..., Any]:
    """The model as the mode runs it. Raises ImportError where a peer is not installed."""
    if mode.startswith("megafx"):
        return megafx.parallelize(model, megafx.Config(compile=mode.endswith("compile")), example_inputs=((), call))
    if mode == "liger":
        if name != "llama":
            raise ImportError("Liger-Kernel has no patch for GPT-2")
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if mode == "compile-nomask":  # transformers makes an explicit mask when it is traced; None keeps the causal kernel
        module: Any = importlib.import_module(type(model).__module__)
        module.create_causal_mask = lambda *args, **kwargs: None
    return torch.compile(model) if mode.startswith("compile") else model


class Stages:
    """Host time until each stage of a step was queued, and device time from one mark to the next, in ms."""

    def __init__(self, on_gpu: bool):
        self.on_gpu = on_gpu
        self.marks: list[tuple[str, float, Any]] = []
        self.end("start")

    def end(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True) if self.on_gpu else None
        if event is not None:
            event.record()
        self.marks.append((name, time.perf_counter(), event))

    def __str__(self) -> str:
        parts = []
        for (_, t0, e0), (name, t1, e1) in itertools.pairwise(self.marks):
            device = f" device {e0.elapsed_time(e1):.1f}" if self.on_gpu else ""
            parts.append(f"{name} host {1e3 * (t1 - t0):.1f}{device}")
        return ", ".join(parts)


def print_profile(step: Callable[[], Any], rows: int) -> None:
    """Where the time of one step goes: kernels by time, and where the device waited for the host."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
    on_device = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in on_device if "#" not in e.key]  # Optimizer.step#... spans kernels
    kernels.sort(key=lambda e: -e.self_device_time_total)
    busy = sum(e.self_device_time_total for e in kernels) / 1e3
    print(f"profiled step: {1e3 * wall:.1f} ms, host {1e3 * host:.1f} ms, kernels {busy:.1f} ms")
    for e in kernels[:rows]:
        print(f"  {e.self_device_time_total / 1e3:8.2f} ms {e.count:6d} x {e.key[:110]}")
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    gaps, end, last = [], spans[0][0], "start"
    for begin, stop, name in spans:
        gaps.append((begin - end, last, name))
        if stop > end:
            end, last = stop, name
    gaps.sort(key=lambda gap: -gap[0])
    print(
        f"  device idle {sum(max(0, g[0]) for g in gaps) / 1e3:.1f} ms of {(end - spans[0][0]) / 1e3:.1f} ms; longest:"
    )
    for gap, before, after in gaps[:6]:
        print(f"  {gap / 1e3:8.2f} ms between {before[:50]} and {after[:50]}")


def run(name: str, mode: str, mask: str, shape: dict[str, int], args: argparse.Namespace) -> dict[str, Any]:
    device = torch.device("cpu" if args.tiny else "cuda")
    model = build(name, shape, device)
    module = importlib.import_module(type(model).__module__)
    own_mask = module.create_causal_mask
    try:
        start = time.perf_counter()
        forward = prepared(mode, name, model, batch(shape, mask, device, 0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not args.tiny)
        losses, times = [], []
        if not args.tiny:
            torch.cuda.reset_peak_memory_stats()
        for step in range(args.warmup + args.steps):
            call = batch(shape, mask, device, step)
            begin = time.perf_counter()
            stages = Stages(not args.tiny)
            loss = forward(**call).loss
            stages.end("forward")
            loss.backward()
            stages.end("backward")
            optimizer.step()
            optimizer.zero_grad()
            stages.end("optimizer")
            losses.append(loss.item())  # waits for the device
            times.append(time.perf_counter() - begin)
            if args.profile:
                print(f"  step {step}: {1e3 * times[-1]:.1f} ms; {stages}")
            if step == 0:
                first = time.perf_counter() - start
        if args.profile:
            print_profile(lambda: optimizer.step() if forward(**call).loss.backward() is None else None, args.profile)
    finally:
        module.create_causal_mask = own_mask
    seconds = sorted(times[args.warmup :])[args.steps // 2]
    tokens = shape["batch"] * shape["seq"]
    matmuls = sum(
        p.numel() for n, p in model.named_parameters() if p.dim() == 2 and "wpe" not in n and "embed" not in n
    )
    flops = 6 * tokens * (matmuls + shape["layers"] * shape["seq"] * shape["hidden"])
    return {
        "tokens/s": tokens / seconds,
        "MFU": flops / seconds / 1e12 / args.peak_tflops,
        "peak GB": 0.0 if args.tiny else torch.cuda.max_memory_allocated() / 1e9,
        "step ms": 1e3 * seconds,
        "first step s": first,
        "loss": losses[0],
        "last loss": losses[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--masks", default=",".join(MASKS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="dense bf16 of the device (H100, H200)")
    parser.add_argument("--profile", type=int, default=0, help="kernels of a step to list, by time")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    for name in args.models.split(","):
        shape = TINY if args.tiny else SHAPES[name]
        for mask in args.masks.split(","):
            for mode in args.modes.split(","):
                try:
                    row = run(name, mode, mask, shape, args)
                    text = "  ".join(f"{key} {value:,.4g}" for key, value in row.items())
                except (ImportError, torch.OutOfMemoryError) as error:
                    text = f"not run: {str(error).splitlines()[0]}"
                print(f"{name:6s} mask {mask:7s} {mode:15s} {text}", flush=True)
                gc.collect()
                torch._dynamo.reset()
                if not args.tiny:
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
