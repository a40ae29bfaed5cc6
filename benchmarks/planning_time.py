"""Time and memory to capture and plan large Llama shapes from the meta device: no GPU, no process group, no weights.

python benchmarks/planning_time.py            # Llama-8B, 32 layers, and 405B, 126 layers, on 8 ranks
python benchmarks/planning_time.py --model 8b --layers 4
"""

import argparse
import resource
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import megafx

SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405b": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


def model_of(name: str, layers: int | None) -> LlamaForCausalLM:
    shape = dict(SHAPES[name], num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
    if layers:
        shape["num_hidden_layers"] = layers
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--explain", action="store_true")
    options = parser.parse_args()
    for name in SHAPES if options.model == "all" else [options.model]:
        model = model_of(name, options.layers)
        start = time.perf_counter()
        plan = megafx.plan(model, megafx.Config(tensor_model_parallel_size=options.ranks))
        seconds = time.perf_counter() - start
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"llama-{name} {model.config.num_hidden_layers} layers tp={options.ranks}: {seconds:.1f} s in all, "
            f"planner {plan.statistics['planning_seconds']:.1f} s (solver {plan.statistics['solver_seconds']:.2f} s, "
            f"{plan.statistics['variables']} variables, width {plan.statistics['width']}), peak {peak_gib:.2f} GiB"
        )
        if options.explain:
            print(megafx.explain(plan))


if __name__ == "__main__":
    main()
