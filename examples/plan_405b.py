"""Plan a Llama of 405B before a GPU is rented: no GPU, no ranks, no weights. The page opens in any browser.

python examples/plan_405b.py --html plan.html            # 126 layers: about a minute on two cores
python examples/plan_405b.py --layers 4 --gpus 8         # and which configuration of 8 GPUs is the fastest for 4 layers
"""

from __future__ import annotations

import argparse

import megafx
from megafx.report.stages import pipeline_stages

SIZES = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--stages", type=int, default=4, help="of a pipeline, to see how they would be balanced")
    parser.add_argument("--gpus", type=int, help="search configurations of so many")
    parser.add_argument("--memory", default="80GiB", help="of each of them")
    parser.add_argument("--html", default="plan.html")
    options = parser.parse_args(arguments)

    sizes = SIZES | {"num_hidden_layers": options.layers, "vocab_size": 128256}
    model, _ = megafx.load_model("LlamaForCausalLM", sizes)
    config = megafx.Config(
        tensor_model_parallel_size=options.tp, seq_length=options.seq, params_dtype="bf16", hardware="h100-nvlink"
    )
    report = megafx.explain(megafx.plan(model, config))
    step = report.step
    print(f"a step: {step.total_us / 1e3:.1f} ms, of which {step.exposed_us / 1e3:.1f} ms wait for collectives")
    for kind, size in report.costed.memory.items():
        print(f"{kind}: {size / 2**30:.1f} GiB a rank")
    print(*pipeline_stages(report, options.stages), sep="\n")
    report.html(options.html)
    print(f"wrote {options.html}")
    if options.gpus:
        whole = config.replace(tensor_model_parallel_size=None)
        print(megafx.search(model, options.gpus, options.memory, whole, batches=(1,)))


if __name__ == "__main__":
    main()
