"""Long sequences: sequence parallelism, and layers that backward computes again, so that a rank keeps little.

    torchrun --standalone --nproc-per-node 2 examples/long_context.py --seq 2048      # CPU (gloo) or GPUs
    python examples/long_context.py                                                   # one process

It prints what a rank keeps from forward to backward, without and with recompute; loss and gradients have the same bits.
"""

from __future__ import annotations

import argparse

import torch
from shared import end, first, small_llama, start

import megafx


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args(arguments)
    device = start()
    ids = torch.randint(0, 61, (1, options.seq), generator=torch.Generator().manual_seed(1)).to(device)
    losses = {}
    for granularity in (None, "full"):
        model = small_llama(num_hidden_layers=options.layers, max_position_embeddings=options.seq).to(device)
        config = megafx.Config(seq_length=options.seq, recompute_granularity=granularity)
        model = megafx.parallelize(model, config, example_inputs={"input_ids": ids, "labels": ids})
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses[str(granularity)] = loss.item()
        if first():
            kept = megafx.explain(model).header.get("kept for backward", "all that backward reads")
            print(f"recompute_granularity={granularity}: loss {loss.item():.6f}, kept for backward: {kept}")
    end()
    return losses


if __name__ == "__main__":
    main()
