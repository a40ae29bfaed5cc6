"""A training loop with accelerate and a parallelized model: accumulation, clipping, a scheduler, evaluation, checkpoints.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --output runs/accelerate
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --output runs/accelerate --steps 40 --resume
python examples/accelerate_loop.py                                               # one process
"""

from __future__ import annotations

import json
import os

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import set_seed
from hf_trainer import allow_cpu, arguments, scale_on_cpu
from shared import end, sequences, small_llama
from torch.utils.data import DataLoader

import megafx
from megafx.integrations.hf_trainer import gather_once


def main() -> None:
    args = arguments(__doc__)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not on_gpu:
        allow_cpu()
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if args.bf16 else "fp16" if args.fp16 else "no",
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(tp_size=ranks) if ranks > 1 else None,
    )
    if args.fp16 and not on_gpu:
        scale_on_cpu(accelerator)
    set_seed(0)
    model = small_llama(attention_dropout=args.dropout).to(accelerator.device)
    if not args.eager:
        model = megafx.parallelize(model)  # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    data = DataLoader(sequences(48, seed=3), batch_size=4, shuffle=True)
    held_out = DataLoader(sequences(10, seed=4), batch_size=3)
    model = accelerator.prepare(
        model
    )  # by itself: with an optimizer, accelerate would look parameters up by their address
    optimizer, data, held_out = accelerator.prepare(optimizer, data, held_out)
    gather_once(accelerator, ranks)

    step, losses, scales = 0, [], []
    extra = {"scheduler": scheduler} | ({"scaler": accelerator.scaler} if args.fp16 else {})
    if args.resume:
        loaded = megafx.load_checkpoint(args.output, model, optimizer, extra=extra, missing_ok=True)
        step = loaded.step if loaded is not None else 0
    while step < args.steps:
        for batch in data:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if accelerator.sync_gradients:
                if not accelerator.optimizer_step_was_skipped:  # where a gradient overflowed, on all ranks
                    scheduler.step()
                if args.fp16:
                    scales.append(accelerator.scaler.get_scale())
                step += 1
                if step % args.save_steps == 0:  # every rank saves its part
                    megafx.save_checkpoint(args.output, model, optimizer, step=step, extra=extra, keep=2)
                if step == args.steps:
                    break

    model.eval()
    seen = []
    with torch.no_grad():
        for batch in held_out:
            loss = model(**batch).loss
            seen.append(accelerator.gather_for_metrics(loss.repeat(len(batch["labels"]))))
    evaluated = torch.cat(seen)
    log = {"losses": losses, "scales": scales, "eval_loss": evaluated.mean().item(), "samples": len(evaluated)}
    accelerator.print("log", json.dumps(log))
    end()


if __name__ == "__main__":
    main()
