"""More of megafx.pipeline on 2 to 8 ranks: calls in several forms, stored shards, experts, checkpoints at another cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import listed_mixtures
import sorted_mixtures
import torch
import torch.distributed as dist
import zoo
from pipelines import Net, batch, close
from ranks import PromoteCasts, check, config
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import megafx


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}


def same_gradients(pipe: nn.Module, wanted: dict[str, Tensor]) -> None:
    found = megafx.full_gradients(pipe)
    assert found
    for name, value in found.items():
        close(value, wanted[name], name)


@check(2, slow=True, seed=0)
def pipeline_of_a_hugging_face_model() -> None:
    """Without an example; steps add up, in calls of several lengths and forms; the loss of a function."""
    with torch.random.fork_rng():
        model, inputs = zoo.build("llama", layers=3)
    eager = copy.deepcopy(model)
    pipe = megafx.pipeline(model, config(t=1), stages=2, microbatches=2)
    for call in (inputs(4, 8), inputs(2, 13), {**inputs(4, 8), "attention_mask": torch.ones(4, 8, dtype=torch.long)}):
        with PromoteCasts():
            loss = eager(**call).loss
            loss.backward()
        close(pipe.step(**call), loss.detach())
        same_gradients(pipe, gradients(eager))


@check(2, seed=0)
def pipeline_with_a_loss_function() -> None:
    def loss_of(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2))).double()
    eager, x, y = copy.deepcopy(model), torch.randn(4, 5).double(), torch.randn(4, 5).double()
    pipe = megafx.pipeline(
        model,
        config(t=1),
        stages=2,
        microbatches=4,
        schedule="GPipe",
        loss_fn=loss_of,
        example_inputs={"input": x, "loss_inputs": {"target": y}},
    )
    loss = loss_of(eager(x), y)
    loss.backward()
    close(pipe.step(x, loss_inputs={"target": y}), loss.detach())
    same_gradients(pipe, gradients(eager))
    assert "stages are compiled at each start" in str(megafx.explain(pipe))


@check(4, slow=True, seed=0)
def pipeline_of_sharded_parameters() -> None:
    for form in ("zero1", "fsdp"):
        torch.manual_seed(0)
        model = Net(2, 0.0).double()
        eager = copy.deepcopy(model)
        options = {"data_parallel_size": 2, "data_parallel": form}
        pipe = megafx.pipeline(model, config(t=1, **options), stages=2, microbatches=2, example_inputs=batch())
        rows = {n: x.chunk(2)[dist.get_rank() % 2] for n, x in batch().items()}
        for _ in range(2):
            loss = eager(**batch())[0]
            loss.backward()
            close(pipe.step(**rows), loss.detach())
            same_gradients(pipe, gradients(eager))
        close(pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1))


class Mixtures(sorted_mixtures.Model):
    """Without router losses, which multiply sums over the rows of the whole batch."""

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        for layer, form in zip(self.layers, self.forms, strict=True):
            x = x + layer(x, form)[0]
        return F.mse_loss(x, wanted)


class ListedMixtures(listed_mixtures.Model):
    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        y = self.first(x)
        for layer in self.layers:
            y = y + layer(y)[0]
        return F.mse_loss(y, wanted)


def two_mixtures() -> nn.Module:
    return Mixtures(sorted_mixtures.as_transformers, sorted_mixtures.added_to_tokens)


def experts_shared_out(made: Callable[[], nn.Module], **options: Any) -> None:
    """Within each of two stages, on two data-parallel ranks. No rank holds more than its part of its stage's experts."""
    eager, x, y = made().double(), *sorted_mixtures.a_call(8)
    options |= {"data_parallel_size": 2, "expert_model_parallel_size": 2}
    pipe = megafx.pipeline(
        made().double(), config(t=1, **options), stages=["layers.1"], microbatches=2, example_inputs=(x, y)
    )
    own = dist.get_rank() * 4 // dist.get_world_size() % 2
    for _ in range(2):
        loss = eager(x, y)
        loss.backward()
        close(pipe.step(x.chunk(2)[own], y.chunk(2)[own]), loss.detach())
        same_gradients(pipe, gradients(eager))
        close(pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1))
        for model in (eager, pipe):
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
    assert sum(p.to_local().numel() for p in pipe.parameters()) < 0.4 * sum(p.numel() for p in eager.parameters())


@check(4, slow=True, seed=0)
def pipeline_of_experts_shared_out() -> None:
    experts_shared_out(two_mixtures)


@check(4, slow=True, seed=0)
def pipeline_of_lists_of_experts_shared_out() -> None:
    experts_shared_out(lambda: ListedMixtures("one_hot_of_hugging_face", "above"))
    experts_shared_out(two_mixtures, data_parallel="fsdp")


@check(8, slow=True, seed=0)
def pipeline_of_experts_beside_context_parallel() -> None:
    experts_shared_out(two_mixtures, context_parallel_size=2)


@check(4, slow=True, seed=0)
def pipeline_of_averages_of_sequences() -> None:
    averages(2)


@check(2, seed=0)
def pipeline_of_averages() -> None:
    averages(1)


def averages(c: int) -> None:
    torch.manual_seed(0)
    model = Net(2, 0.0).double()
    eager = copy.deepcopy(model)
    options = config(t=1, data_parallel_loss="average", context_parallel_size=c)
    pipe = megafx.pipeline(model, options, stages=2, microbatches=4, example_inputs=batch())
    parts = [{n: x.chunk(4)[i] for n, x in batch().items()} for i in (0, 2, 3)]
    rows = {n: torch.cat([p[n] for p in (*parts, parts[0])]) for n in parts[0]}
    losses = [eager(**{n: x.chunk(4)[i] for n, x in rows.items()})[0] / 4 for i in range(4)]
    sum(losses).backward()
    close(pipe.step(**rows), sum(losses).detach())
    same_gradients(pipe, gradients(eager))


@check(2, 4, slow=(4,), seed=0)
def pipeline_resumes_at_another_cut(folder: Path) -> None:
    """Saved by stages, loaded by others, on 4 ranks by 2 of 2 tensor-parallel ones, and by one process: equal steps follow."""
    ranks = dist.get_world_size()

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Net(ranks, 0.1).double()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        decay = [p for p in model.parameters() if p.dim() > 1]
        return torch.optim.AdamW(
            [{"params": decay}, {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.01}]
        )

    def stepped(pipe: Any, optimizer: torch.optim.Optimizer, count: int) -> list[Tensor]:
        losses = []
        for _ in range(count):
            losses.append(pipe.step(**batch()))
            optimizer.step(), optimizer.zero_grad()
        return losses

    four = megafx.pipeline(made(), config(t=1), stages=ranks, microbatches=4, example_inputs=batch())
    optimizer = adamw(four)
    stepped(four, optimizer, 1)
    megafx.save_checkpoint(folder, four, optimizer, step=1)
    wanted = stepped(four, optimizer, 2)
    t, begins = (1, ["norm"]) if ranks == 2 else (2, ["layers.1"])
    two = megafx.pipeline(made(), config(t=t), stages=begins, microbatches=2, schedule="GPipe", example_inputs=batch())
    optimizer = adamw(two)
    assert megafx.load_checkpoint(folder, two, optimizer).step == 1
    for found, loss in zip(stepped(two, optimizer, 2), wanted, strict=True):
        torch.testing.assert_close(found, loss, rtol=1e-8, atol=0)
    alone = made()
    optimizer = adamw(alone)
    megafx.load_checkpoint(folder, alone, optimizer)
    alone = megafx.parallelize(alone, config(t=1))
    for loss in wanted:
        found = alone(**batch())[0]
        found.backward()
        torch.testing.assert_close(found.detach(), loss, rtol=1e-8, atol=0)
        optimizer.step(), optimizer.zero_grad()


@check(2, seed=0)
def pipeline_of_a_model_on_meta(folder: Path) -> None:
    """Each stage reads its own tensors of the files."""
    torch.manual_seed(0)
    eager = Net(2, 0.0).double()
    if dist.get_rank() == 0:
        save_file({n: p.detach().contiguous() for n, p in eager.named_parameters()}, folder / "model.safetensors")
    dist.barrier()
    with torch.device("meta"):
        model = Net(2, 0.0).double()
    model.head.weight = model.embed.weight
    pipe = megafx.pipeline(model, config(t=1), stages=2, microbatches=2, example_inputs=batch())
    megafx.load_safetensors(pipe, folder / "model.safetensors")
    loss = eager(**batch())[0]
    loss.backward()
    close(pipe.step(**batch()), loss.detach())
    same_gradients(pipe, gradients(eager))
