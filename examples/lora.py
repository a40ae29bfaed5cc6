"""LoRA with peft: adapters go into the model first, then megafx parallelizes it; only adapters get gradients and state.

torchrun --standalone --nproc-per-node 2 examples/lora.py       # CPU (gloo) or GPUs
python examples/lora.py                                         # one process
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from shared import end, first, sequences, small_llama, start
from torch.utils.data import default_collate

import megafx


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    options = parser.parse_args(arguments)
    device = start()

    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapters = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets)
    model = get_peft_model(small_llama(num_hidden_layers=options.layers), adapters).to(device)
    batch = {name: ids.to(device) for name, ids in default_collate(sequences(8, seed=3)).items()}

    model = megafx.parallelize(model, example_inputs=batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(options.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    if first():
        print(f"{len(trained)} adapter matrices trained; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    end()
    return losses


if __name__ == "__main__":
    main()
