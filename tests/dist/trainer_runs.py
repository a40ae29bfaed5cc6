"""Runs of trainers of transformers, trl and accelerate, with their defaults: what test_trainer_runs.py compares.

    python tests/dist/trainer_runs.py folder --eager names              # one process, the plain model
    torchrun --nproc-per-node 2 tests/dist/trainer_runs.py folder names

Prints "log" and a dict as JSON: name -> losses and gradient norms of 10 steps and sums over the weights
after them, or the error. Models are fp64, in which trl's default of bf16 autocast changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "examples")]

from hf_trainer import allow_cpu  # noqa: E402
from shared import end, first, sequences, small_llama, start  # noqa: E402

import megafx  # noqa: E402
from megafx.integrations.hf_trainer import attach  # noqa: E402

STEPS = 10
RUNS: dict[str, Callable[[Runs], dict[str, list[float]]]] = {}


def register(code: Callable[[Runs], dict[str, list[float]]]) -> Callable[[Runs], dict[str, list[float]]]:
    RUNS[code.__name__] = code
    return code


class Runs:
    """folder: for what is written. eager: whether the model is left as it is."""

    def __init__(self, folder: Path, eager: bool) -> None:
        self.folder, self.eager = folder, eager

    def model(self, model: nn.Module, **options: Any) -> Any:
        model = model.double()
        return model if self.eager else megafx.parallelize(model, **options)

    def arguments(self, kind: Any, **options: Any) -> Any:
        """TrainingArguments or a subclass of it, the defaults but for what a short run on a CPU needs."""
        needed = {"max_steps": STEPS, "use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1}
        if os.environ.get("NOGC"):
            needed["gradient_checkpointing"] = False
        return kind(output_dir=str(self.folder), save_strategy="no", learning_rate=1e-2, **(needed | options))

    def trained(self, trainer: Any) -> dict[str, list[float]]:
        """Train; the losses of the steps, as backward has them, and what became of the weights."""
        losses: list[float] = []
        step = trainer.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:
            loss = step(*args, **kwargs)
            losses.append(float(loss))
            return loss

        trainer.training_step = training_step
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return {"losses": losses, "norms": norms, "weights": self.weights(trainer.model)}

    def weights(self, model: nn.Module) -> list[float]:
        """Sum and sum of squares of each trained parameter."""
        whole = model.state_dict() if self.eager else megafx.full_state_dict(model)
        names = sorted(name for name, p in model.named_parameters() if p.requires_grad)
        return [float(x) for name in names for x in (whole[name].sum(), whole[name].square().sum())]


def lora(model: nn.Module, **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], **options))


def tokenizer() -> Any:
    """Words w0 .. w56 and four special tokens: the 61 of `small_llama`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(57))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    )


def words(start: int, step: int, count: int) -> str:
    return " ".join(f"w{(start + step * i) % 57}" for i in range(count))


# -- the Trainer


@register
def trainer(runs: Runs) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    model = runs.model(small_llama())
    return runs.trained(Trainer(model, runs.arguments(TrainingArguments), train_dataset=sequences(48, seed=3)))


@register
def trainer_with_lora(runs: Runs) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    model = runs.model(lora(small_llama()))
    return runs.trained(Trainer(model, runs.arguments(TrainingArguments), train_dataset=sequences(48, seed=3)))


class Own(nn.Module):
    """A module of one's own, as the Trainer takes it: named inputs, a dict with the loss first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(61, 24), nn.LayerNorm(24)
        self.up, self.down, self.head = nn.Linear(24, 50), nn.Linear(50, 24), nn.Linear(24, 61)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        logits = self.head(x + self.down(torch.relu(self.up(self.norm(x)))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@register
def trainer_of_own_module(runs: Runs) -> dict[str, list[float]]:
    from transformers import Trainer, TrainingArguments

    arguments = runs.arguments(TrainingArguments, eval_strategy="steps", eval_steps=5)
    made = Trainer(
        runs.model(Own()), arguments, train_dataset=sequences(48, seed=3), eval_dataset=sequences(16, seed=4)
    )
    found = runs.trained(made)
    return found | {"eval": [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]}


@register
def accelerate_in_one_call(runs: Runs) -> dict[str, list[float]]:
    """Model, optimizer and loader in one call of `prepare`, as accelerate's pages have it."""
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    sizes = None if runs.eager else ParallelismConfig(tp_size=dist.get_world_size())
    accelerator = Accelerator(cpu=True, parallelism_config=sizes, gradient_accumulation_steps=2)
    model = runs.model(Own())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    loader = torch.utils.data.DataLoader(sequences(2 * 4 * STEPS, seed=3), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if accelerator.sync_gradients:
                scheduler.step()  # not prepared: accelerate steps a prepared one once for each rank
            optimizer.zero_grad()
        losses.append(float(loss))
    return {"losses": losses, "weights": runs.weights(accelerator.unwrap_model(model))}


@register
def seq2seq_with_generation(runs: Runs) -> dict[str, list[float]]:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model = runs.model(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)))
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"][:8]} for row in sequences(64, seed=3)]
    generated: list[float] = []

    def metrics(prediction: Any) -> dict[str, float]:
        generated.extend(float(x) for x in prediction.predictions.flatten())
        return {}

    arguments = runs.arguments(
        Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=9, generation_num_beams=2
    )
    made = Seq2SeqTrainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8], compute_metrics=metrics)
    if not runs.eager:
        attach(made)  # each sample once in what is evaluated
    found = runs.trained(made)
    made.evaluate()
    return found | {"generated": generated}


# -- trl


def texts(count: int) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{"text": words(3 * i, i % 5 + 1, 9 + i % 4)} for i in range(count)])


def preferences(count: int) -> Any:
    from datasets import Dataset

    rows = [(3 * i, i % 5 + 1) for i in range(count)]
    return Dataset.from_list(
        [
            {
                "prompt": words(start, step, 5),
                "chosen": words(start + 5 * step, step, 4 + step),
                "rejected": words(start + 7, step + 1, 6),
            }
            for start, step in rows
        ]
    )


@register
def sft(runs: Runs) -> dict[str, list[float]]:
    from trl import SFTConfig, SFTTrainer

    made = SFTTrainer(
        runs.model(small_llama()), runs.arguments(SFTConfig), train_dataset=texts(96), processing_class=tokenizer()
    )
    return runs.trained(made)


@register
def sft_with_lora(runs: Runs) -> dict[str, list[float]]:
    from trl import SFTConfig, SFTTrainer

    model = runs.model(lora(small_llama()))
    made = SFTTrainer(model, runs.arguments(SFTConfig), train_dataset=texts(96), processing_class=tokenizer())
    return runs.trained(made)


def saved(runs: Runs) -> Path:
    """A folder with `small_llama`, from which trl makes its reference model."""
    folder = runs.folder / "llama"
    if first() and not folder.exists():
        small_llama().double().save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    if dist.is_initialized():
        dist.barrier()
    return folder


@register
def dpo(runs: Runs) -> dict[str, list[float]]:
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    model = runs.model(AutoModelForCausalLM.from_pretrained(saved(runs), dtype=torch.float64))
    arguments = runs.arguments(DPOConfig)
    return runs.trained(DPOTrainer(model, args=arguments, train_dataset=preferences(96), processing_class=tokenizer()))


@register
def dpo_with_lora(runs: Runs) -> dict[str, list[float]]:
    from trl import DPOConfig, DPOTrainer

    model = runs.model(lora(small_llama()))
    arguments = runs.arguments(DPOConfig)
    return runs.trained(DPOTrainer(model, args=arguments, train_dataset=preferences(96), processing_class=tokenizer()))


def grpo_run(runs: Runs, model: nn.Module) -> dict[str, list[float]]:
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [sum(len(word) == 3 for word in text.split()) / 8 for text in completions]

    arguments = runs.arguments(GRPOConfig, max_completion_length=8)
    rows = preferences(32).remove_columns(["chosen", "rejected"])
    made = GRPOTrainer(model, reward, args=arguments, train_dataset=rows, processing_class=tokenizer())
    found = runs.trained(made)
    return found | {"rewards": [entry["reward"] for entry in made.state.log_history if "reward" in entry]}


@register
def grpo(runs: Runs) -> dict[str, list[float]]:
    return grpo_run(runs, runs.model(small_llama()))


@register
def grpo_with_lora(runs: Runs) -> dict[str, list[float]]:
    return grpo_run(runs, runs.model(lora(small_llama())))


def main() -> None:
    eager = "--eager" in sys.argv
    folder, *names = (x for x in sys.argv[1:] if x != "--eager")
    start()
    torch.set_num_threads(1)
    allow_cpu()
    from accelerate.state import AcceleratorState

    found: dict[str, Any] = {}
    for name in names or RUNS:
        torch.manual_seed(0)
        AcceleratorState._reset_state(False)  # one process trains several times here
        try:
            found[name] = RUNS[name](Runs(Path(folder), eager))
        except Exception:
            found[name] = traceback.format_exc()
            if not eager:
                print(found[name], flush=True)
                os._exit(1)  # the other ranks may wait for this one
    if first():
        print("log", json.dumps(found))
    end()


if __name__ == "__main__":
    main()
