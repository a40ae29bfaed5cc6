"""The Hugging Face Trainer with a parallelized model: everything but two lines is what it is without megafx.

    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output runs/trainer          # CPU (gloo) or GPUs
    torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output runs/trainer --steps 40 --resume
    torchrun --standalone --nproc-per-node 4 examples/hf_trainer.py --dp 2 --data-parallel fsdp
    python examples/hf_trainer.py                                                                  # one process

A small Llama learns synthetic sequences: with gradient clipping and accumulation, evaluation, a scheduler, checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
from accelerate import Accelerator
from shared import end, first, sequences, small_llama, start
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

import megafx
from megafx.integrations.hf_trainer import attach


def arguments(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="runs/trainer", help="folder of checkpoints")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fp16", action="store_true", help="with a GradScaler")
    parser.add_argument("--dropout", type=float, default=0.0, help="of attention")
    parser.add_argument("--batch", type=int, default=4, help="rows of a step and of each data-parallel rank")
    parser.add_argument("--eval-rows", type=int, default=10, help="in batches of 3 for each data-parallel rank")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks; the others are tensor-parallel")
    parser.add_argument("--data-parallel", choices=("ddp", "zero1", "fsdp"), default="ddp", help="what they shard")
    parser.add_argument("--eager", action="store_true", help="do not parallelize: the plain Trainer, to compare with")
    return parser.parse_args()


def allow_cpu() -> None:
    """accelerate refuses tensor parallelism on CPUs; this is the check that does, and it checks nothing else here."""
    from accelerate.parallelism_config import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def scale_on_cpu(accelerator: Accelerator) -> None:
    """On CPUs accelerate takes mixed precision fp16 and does nothing for it: no autocast, no GradScaler, no word.

    Call it before models and optimizers are prepared (by `Trainer.train`): `native_amp` has `prepare` put autocast around the
    model and `clip_grad_norm_` unscale first, `scaler` goes to `backward` and to the prepared optimizer, which skips steps that
    overflow. The scale starts too high and grows every other step, so that a short run sees skipped steps and growth.
    """
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)


class LogScale(TrainerCallback):
    """The scale after each step, and whether the step was skipped, among what is logged."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        scale, skipped = self.accelerator.scaler.get_scale(), self.accelerator.optimizer_step_was_skipped
        state.log_history.append({"step": state.global_step + 1, "scale": scale, "skipped": skipped})


def main() -> None:
    args = arguments(__doc__)
    device = start()
    on_gpu = device.type == "cuda"
    if not on_gpu:
        allow_cpu()
    model = small_llama(attention_dropout=args.dropout).to(device)
    if not args.eager:
        config = megafx.Config(
            data_parallel_size=args.dp, data_parallel=args.data_parallel, context_parallel_size=args.cp
        )
        model = megafx.parallelize(model, config)
    training = TrainingArguments(
        output_dir=args.output,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=2,
        max_steps=args.steps,
        max_grad_norm=0.5,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        lr_scheduler_kwargs={"num_cycles": 0.25},
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_only_model=True,  # what the Trainer cannot save of a sharded model, `attach` does
        bf16=args.bf16,
        fp16=args.fp16,
        # fused, it skips a step by itself: accelerate takes the step for made, and the learning rate goes on
        optim="adamw_torch" if args.fp16 else "adamw_torch_fused",
        use_cpu=not on_gpu,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=training, train_dataset=sequences(48, seed=3), eval_dataset=sequences(args.eval_rows, seed=4)
    )
    if args.fp16:
        if not on_gpu:
            scale_on_cpu(trainer.accelerator)
        trainer.add_callback(LogScale(trainer.accelerator))
    attach(trainer)  # resumable checkpoints; every sample once in what is evaluated
    trainer.train(resume_from_checkpoint=args.resume or None)
    trainer.save_model(os.path.join(args.output, "final"))
    if first():
        print("log", json.dumps([{k: float(v) for k, v in entry.items()} for entry in trainer.state.log_history]))
    end()


if __name__ == "__main__":
    main()
