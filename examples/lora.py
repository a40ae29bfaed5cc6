"""LoRA with peft: adapters go into the model first, then megafx parallelizes it; only adapters get gradients and state.

torchrun --standalone --nproc-per-node 2 examples/lora.py       # CPU (gloo) or GPUs
python examples/lora.py                                         # one process
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import megafx

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
}


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    options = parser.parse_args(arguments)
    device = torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    sizes = SIZES | {"num_hidden_layers": options.layers, "num_key_value_heads": 2, "max_position_embeddings": 64}
    base = LlamaForCausalLM(LlamaConfig(**sizes))
    model = get_peft_model(base, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=targets)).to(
        device
    )
    ids = torch.randint(0, SIZES["vocab_size"], (8, 32), device=device)
    batch = {"input_ids": ids, "labels": ids}

    model = megafx.parallelize(model, example_inputs=batch)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(options.steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.item())
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{len(trained)} adapter matrices trained; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
