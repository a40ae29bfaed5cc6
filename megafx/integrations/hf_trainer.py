"""The Hugging Face Trainer and accelerate with a parallelized model: checkpoints that can be resumed, samples counted once.

    arguments = TrainingArguments(save_only_model=True, ...)
    trainer = attach(Trainer(model=megafx.parallelize(model), args=arguments, ...))
    trainer.train(resume_from_checkpoint=True)

Both know tensor-parallel models (`tp_size`) and give all ranks of a group the same batches. Two things are left: the Trainer
cannot save the optimizer of a sharded model (it says so unless `save_only_model=True`), and what is gathered for metrics comes
from every rank, so that each sample is there t times, but those of a last smaller batch fewer times. (Import this module by
its name: it needs transformers.)
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from megafx.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from megafx.distributed.parameters import RUNTIME
from megafx.errors import CheckpointError, UsageError
from megafx.meanwhile import meanwhile

FOLDER = "megafx"  # in each checkpoint-<step>


def attach(trainer: Any) -> Any:
    """The same trainer, with `TrainerCheckpoints` among its callbacks and metrics that see each sample once.

    trainer: a `transformers.Trainer`, or an instance of a subclass, of a parallelized model. With data-parallel ranks losses
    are those of all their rows. UsageError where the trainer would count the rows of each of these ranks alone.
    """
    runtime = getattr(trainer.model, RUNTIME, None)
    if runtime is not None and runtime.meshes.data is not None:
        _whole_batch_losses(trainer, runtime.meshes.data.ranks, runtime.config.data_parallel_loss)
    trainer.add_callback(TrainerCheckpoints())
    gather_once(trainer.accelerator, trainer.get_tp_size())
    if not trainer.args.eval_use_gather_object:
        looped = trainer.evaluation_loop

        @functools.wraps(looped)
        def evaluation_loop(*args: Any, **kwargs: Any) -> Any:
            trainer.gather_function = trainer.accelerator.gather_for_metrics  # Seq2SeqTrainer sets one at each call
            return looped(*args, **kwargs)

        trainer.evaluation_loop = evaluation_loop
    return trainer


def _whole_batch_losses(trainer: Any, replicas: int, form: str) -> None:
    """Have a trainer take the losses of a data-parallel model for what they are: of the batches of all `replicas`.

    The Trainer divides a sum over its rank's tokens by the number of all ranks' tokens, and multiplies by the number of
    replicas, since gradients are averaged elsewhere.
    """
    if form != "batch" or not trainer.args.average_tokens_across_devices:
        raise UsageError(
            "the Trainer's loss would be of each data-parallel rank's own rows: "
            + ("data_parallel_loss='average'" if form != "batch" else "average_tokens_across_devices=False"),
            fix="leave Config.data_parallel_loss 'batch' and TrainingArguments.average_tokens_across_devices True",
        )
    multiplied = trainer.compute_loss

    @functools.wraps(multiplied)
    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        found = multiplied(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        counted = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func
        if num_items_in_batch is None or not counted:
            return found
        return (found[0] / replicas, found[1]) if return_outputs else found / replicas

    trainer.compute_loss = compute_loss


def gather_once(accelerator: Any, t: int) -> None:
    """Have `accelerator.gather_for_metrics` give the rows of one rank of each tensor-parallel group of t."""
    everything, everyone = accelerator.gather_for_metrics, accelerator.gather
    if t == 1:
        return

    def gather(tensor: Any) -> Any:
        # [ranks * n, ...], ranks one after another and groups of t side by side -> [ranks / t * n, ...]
        once = lambda rows: rows.unflatten(0, (accelerator.num_processes, -1))[::t].flatten(0, 1)
        return recursively_apply(once, everyone(tensor))

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            return everything(input_data, use_gather_object=True)
        # `gather_for_metrics` calls `gather`; others, such as the sum of token counts, are left alone
        with meanwhile(accelerator, gather=gather):
            return everything(input_data)

    accelerator.gather_for_metrics = gather_for_metrics


class TrainerCheckpoints(TrainerCallback):
    """Optimizer, scheduler, GradScaler and generators of all ranks in each checkpoint of a Trainer; see the module docstring.

    Resuming at a `checkpoint-<step>` of the output folder that has no part of this callback raises CheckpointError: training
    would go on with a new optimizer.
    """

    def __init__(self) -> None:
        self.generators: torch.Tensor | None = None  # where the resumed run's draws begin

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        drawn: Any = np.random.get_state()
        extra = _with_states(given) | {"python": random.getstate(), "numpy": [drawn[1].tolist(), *drawn[2:]]}
        save_checkpoint(_folder(args, state), given["model"], given["optimizer"], step=state.global_step, extra=extra)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if state.global_step == 0:
            return
        folder, extra = _folder(args, state), _with_states(given)
        found = load_checkpoint(folder, given["model"], given["optimizer"], extra=extra, rng=True, missing_ok=True)
        if found is None:
            raise CheckpointError(
                f"{folder} does not exist: the Trainer resumes at step {state.global_step} without the optimizer",
                fix="resume from a checkpoint-<step> of output_dir that was saved with TrainerCheckpoints",
            )
        self.generators = torch.get_rng_state()
        random.setstate(found.extra["python"])
        np.random.set_state(("MT19937", np.array(found.extra["numpy"][0], np.uint32), *found.extra["numpy"][1:]))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Batches that were used are skipped by now, which draws from the generator."""
        if self.generators is not None:
            torch.set_rng_state(self.generators)
            self.generators = None


def _with_states(given: dict[str, Any]) -> dict[str, Any]:
    """The scheduler, and the GradScaler where there is one (the Trainer keeps that one beside the optimizer or not at all)."""
    scaler = getattr(given["optimizer"], "scaler", None)  # of accelerate's wrapper
    return {"scheduler": given["lr_scheduler"]} | ({} if scaler is None else {"scaler": scaler})


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FOLDER
