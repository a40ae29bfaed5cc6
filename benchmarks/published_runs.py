"""Modelled beside published steps of Llama 3 on H100 (megafx/planner/whole_step.py), and what a search proposes. Needs no GPU.

    python benchmarks/published_runs.py                          # a table of published runs
    python benchmarks/published_runs.py --only 8B                # of one model
    python benchmarks/published_runs.py --search 405B 4096 2048  # ten configurations for so many GPUs and rows a step
    python benchmarks/published_runs.py --search 30B-A3B 64 128  # of Qwen3-30B-A3B

Each run is priced in its own layout, by the profile h100-nvlink, whose GPUs take up to 700 W; its network was not measured.
Runs in FP8 are priced with FP8 in the linears of layers. Compared are tokens a second and GPU. Sources: `SOURCES`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import megafx
from megafx.named_model import load_model
from megafx.planner.hardware import Hardware
from megafx.planner.pipeline_step import Split
from megafx.what_if import modelled_step

# hidden, intermediate, heads, key-value heads, layers
SHAPES = {"8B": (4096, 14336, 32, 8, 32), "70B": (8192, 28672, 64, 8, 80), "405B": (16384, 53248, 128, 8, 126)}
SOURCES = {
    "torchtitan": "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: GPUs limited to 500 W, HBM2e",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, 25.11, DGX-H100",
    "Meta": "The Llama 3 Herd of Models (arXiv 2407.21783), table 4: BF16, TFLOP/s a GPU over 2.53e12 a token",
}


@dataclass(frozen=True)
class Run:
    """dp: data-parallel ranks; batch: rows of a micro-batch. budget: for backward, 0 where layers are recomputed."""

    source: str
    model: str
    gpus: int
    published: float
    tp: int = 1
    cp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    form: str = "fsdp"
    batch: int = 1
    microbatches: int = 1
    budget: float | None = None
    fp8: bool = False
    tokens: int = 8192
    exact: bool = True  # its layout is known in full


RUNS = (
    Run("torchtitan", "8B", 8, 6667, dp=8, batch=2, budget=0.5),
    Run("torchtitan", "8B", 128, 6514, dp=128, batch=2, budget=0.5),
    Run("Megatron-Bridge", "8B", 8, 14451, dp=8, microbatches=16, fp8=True),
    Run("torchtitan", "70B", 256, 829, tp=8, dp=32, batch=16, budget=0.0, fp8=True),
    Run("Megatron-Bridge", "70B", 64, 1602, tp=4, pp=8, chunks=5, dp=2, form="zero1", microbatches=64, fp8=True),
    Run("torchtitan", "405B", 512, 100, tp=8, pp=8, dp=8, microbatches=32, budget=0.0, fp8=True),
    Run("torchtitan", "405B", 512, 128, tp=8, pp=8, chunks=2, dp=8, microbatches=32, budget=0.0, fp8=True, exact=False),
    Run(
        "Megatron-Bridge", "405B", 1024, 292, tp=8, cp=2, pp=8, chunks=8, dp=8, form="zero1", microbatches=64, fp8=True
    ),
    Run("Meta", "405B", 8192, 170, tp=8, pp=16, chunks=4, dp=64, form="zero1", microbatches=32, exact=False),
    Run("Meta", "405B", 16384, 158, tp=8, pp=16, chunks=4, dp=128, form="zero1", microbatches=16, exact=False),
)


MIXTURE = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
}  # fmt: skip


def llama(name: str) -> object:
    """The model on the meta device."""
    hidden, intermediate, heads, kv, layers = SHAPES[name]
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "vocab_size": 128256,
    }
    settings = sizes | {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 131072}
    return load_model("LlamaForCausalLM", settings, device="meta")[0]


def modelled(run: Run, model: object, plans: dict) -> tuple[float, dict[str, float]]:
    """(tokens a second and GPU, microseconds of a step by cause). plans: of runs that differ in data-parallel ranks alone."""
    config = megafx.Config(
        tensor_model_parallel_size=run.tp,
        context_parallel_size=run.cp,
        sequence_parallel=run.tp > 1,
        micro_batch_size=run.batch,
        seq_length=run.tokens,
        params_dtype="bfloat16",
        fp8="hybrid" if run.fp8 else None,
        hardware="h100-nvlink",
    )
    key = (run.model, run.tp, run.cp, run.batch, run.tokens, run.fp8)
    if key not in plans:
        plans[key] = megafx.explain(megafx.plan(model, config))
    report = plans[key]
    whole = config.replace(data_parallel_size=run.dp, data_parallel=run.form, activation_memory_budget=run.budget)
    split = Split(run.pp, run.chunks, run.microbatches)
    parts, _ = modelled_step(report.costed, report.step, whole, Hardware.load("h100-nvlink"), split)
    tokens = run.batch * run.dp * run.microbatches * run.tokens
    return tokens / (sum(parts.values()) * 1e-6) / run.gpus, parts


def text_of(run: Run) -> str:
    pipeline = f" pp={run.pp}{f'x{run.chunks}' if run.chunks > 1 else ''}" if run.pp > 1 else ""
    tensor = f"tp={run.tp} " * (run.tp > 1) + f"cp={run.cp} " * (run.cp > 1)
    kept = "" if run.budget is None else ", recomputed" if not run.budget else ", half recomputed"
    return f"{tensor}{run.form} {run.dp}{pipeline}, {run.microbatches} x {run.batch}{kept}{', FP8' if run.fp8 else ''}"


def print_runs(only: str | None) -> None:
    print(
        "| model | GPUs | layout, micro-batches | source | published tokens/s | modelled | off |\n|---|---|---|---|---|---|---|"
    )
    models: dict = {}
    plans: dict = {}
    for run in RUNS:
        if only is not None and run.model != only:
            continue
        models.setdefault(run.model, llama(run.model) if run.model not in models else None)
        rate, _ = modelled(run, models[run.model], plans)
        layout = text_of(run) + ("" if run.exact else " (stages a rank: assumed)")
        numbers = f"{run.published:.0f} | {rate:.0f} | {rate / run.published - 1:+.0%}"
        print(f"| {run.model} | {run.gpus} | {layout} | {run.source} | {numbers} |", flush=True)


def print_search(name: str, gpus: int, rows: int) -> None:
    mixture = name == "30B-A3B"
    model = load_model("Qwen3MoeForCausalLM", MIXTURE, device="meta")[0] if mixture else llama(name)
    start = time.process_time()
    config = megafx.Config(
        seq_length=4096 if mixture else 8192, params_dtype="bfloat16", hardware="h100-nvlink", cache=False
    )
    found = megafx.search(model, gpus, "74GiB", config, batches=(1, 2), global_batch=rows)
    print(found)
    print(f"{time.process_time() - start:.0f} s of a core, without imports")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=SHAPES, help="runs of this model")
    parser.add_argument("--search", nargs=3, metavar=("MODEL", "GPUS", "ROWS"), help="what a search proposes")
    args = parser.parse_args()
    if args.search:
        return print_search(args.search[0], *map(int, args.search[1:]))
    print_runs(args.only)


if __name__ == "__main__":
    main()
