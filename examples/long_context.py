"""Long sequences: sequence parallelism, and layers that backward computes again, so that a rank keeps little.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py --seq 2048      # CPU (gloo) or GPUs
    python examples/long_context.py                                                   # one process

It prints what a rank keeps from forward to backward, without and with recompute; loss and gradients have the same bits.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import megafx

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    ids = torch.randint(0, SIZES["vocab_size"], (1, options.seq), generator=torch.Generator().manual_seed(1)).to(device)
    sizes = SIZES | {
        "num_hidden_layers": options.layers,
        "num_key_value_heads": 2,
        "max_position_embeddings": options.seq,
    }
    losses = {}
    for granularity in (None, "full"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(device)
        config = megafx.Config(seq_length=options.seq, recompute_granularity=granularity)
        model = megafx.parallelize(model, config, example_inputs={"input_ids": ids, "labels": ids})
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses[str(granularity)] = loss.item()
        if not dist.is_initialized() or dist.get_rank() == 0:
            kept = megafx.explain(model).header.get("kept for backward", "all that backward reads")
            print(f"recompute_granularity={granularity}: loss {loss.item():.6f}, kept for backward: {kept}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
