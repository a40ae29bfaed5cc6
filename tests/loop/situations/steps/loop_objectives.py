"""Losses that users write around a model's outputs, logits, hidden states and several calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from loop import Loop, situation
from loop_models import Block, Classifier, Language, tokens
from torch import Tensor, nn

FORMS = ("ddp", "zero1", "fsdp")


@situation("https://github.com/huggingface/transformers/issues/7024", slow=(1, 2), data=("ddp",))
def weighted_classes_with_label_smoothing(loop: Loop) -> None:
    model = loop.model(Classifier())
    weights = torch.tensor([0.2, 1.0, 3.0, 1.0, 0.7])
    for _ in range(2):
        x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
        losses = F.cross_entropy(model(x), y, weight=weights, label_smoothing=0.1, reduction="none")
        losses.mean().backward()
        loop.see(loss=loop.mean(losses.mean()))
    loop.see_gradients(model)


class SoftCapped(Language):
    """Gemma's caps on logits."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return 3.0 * torch.tanh(super().forward(ids, mask) / 3.0)


@situation("https://github.com/huggingface/transformers/issues/32877")
def logits_with_a_soft_cap(loop: Loop) -> None:
    model, ids = loop.model(SoftCapped()), tokens()
    logits = model(ids)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    loop.see(loss=loss, logits=logits)
    loop.see_gradients(model)


class WithZLoss(Language):
    """PaLM's z-loss in the model, on logits of a tied head."""

    def __init__(self) -> None:
        super().__init__(tied=True)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # its base takes other arguments
        logits = super().forward(ids)
        z = torch.logsumexp(logits, -1).square().mean()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) + 1e-2 * z, z.detach()


@situation("https://github.com/pytorch/torchtitan/issues/1209", slow=(1,))
def tied_embeddings_with_z_loss(loop: Loop) -> None:
    model = loop.model(WithZLoss())
    labels = tokens()
    labels[:, ::3] = -100
    loss, z = model(tokens(), labels)
    loss.backward()
    loop.see(loss=loss, z=z)
    loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/22885", like="tied_embeddings_with_z_loss")
def z_loss_outside_of_a_model_with_tied_embeddings(loop: Loop) -> None:
    model, ids = loop.model(Language(tied=True)), tokens()
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten()) + 1e-2 * logits.logsumexp(-1).square().mean()
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation(
    "https://github.com/pytorch/vision/issues/3250", data=("fsdp",), like="weighted_classes_with_label_smoothing"
)
def focal_loss(loop: Loop) -> None:
    model = loop.model(Classifier())
    x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
    log_p = F.log_softmax(model(x), -1).gather(1, y[:, None]).squeeze(1)
    loss = (-((1 - log_p.exp()) ** 2.0) * log_p).mean()
    loss.backward()
    loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/online-hard-example-mining/19064")
def the_hardest_tokens_alone(loop: Loop) -> None:
    model, ids = loop.model(Language()), tokens()
    losses = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten(), reduction="none")
    hardest = losses.topk(7).values
    hardest.mean().backward()
    loop.see(hardest=hardest)
    loop.see_gradients(model)


class WithLoss(Language):
    """(loss, logits), as models of libraries have it."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # its base takes other arguments
        logits = super().forward(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100), logits


@situation("https://github.com/huggingface/transformers/issues/12005", data=("ddp",))
def all_labels_are_ignored(loop: Loop) -> None:
    """NaN, as eager has it; and the next batch is not touched by it."""
    model = loop.model(WithLoss())
    loss, _ = model(loop.rows(tokens()), loop.rows(torch.full((4, 6), -100)))
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)
    model.zero_grad()
    loss, _ = model(loop.rows(tokens()), loop.rows(tokens()))
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://github.com/huggingface/trl/issues/2175", like="logits_with_a_soft_cap")
def tokens_are_weighted_by_advantages_and_clipped_ratios(loop: Loop) -> None:
    """PPO's objective: log-probabilities before and after a step."""
    model, ids = loop.model(Language()), tokens()
    advantages = torch.randn(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def log_probabilities() -> Tensor:
        return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    with torch.no_grad():
        old = log_probabilities()
    for _ in range(3):
        new = log_probabilities()
        ratio = (new - old).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss, clipped=((ratio - 1).abs() > 0.2).sum())
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/62260", slow=(2,))
def two_views_of_one_batch(loop: Loop) -> None:
    """A model called twice, and one loss of both results (SimCLR)."""
    model = loop.model(Classifier())
    x = torch.randn(5, 7)
    a, b = (F.normalize(model(x + 0.1 * torch.randn(5, 7)), dim=-1) for _ in range(2))
    loss = F.cross_entropy(a @ b.T / 0.2, torch.arange(5))
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://discuss.pytorch.org/t/triplet-loss-with-shared-weights/17453", like="two_views_of_one_batch")
def anchor_positive_and_negative(loop: Loop) -> None:
    model = loop.model(Classifier())
    anchor, near, far = (model(torch.randn(3 + i, 7))[:3] for i in range(3))
    loss = F.triplet_margin_loss(anchor, near, far, margin=0.5) + 0.1 * F.cosine_embedding_loss(
        anchor, far, -torch.ones(3)
    )
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://github.com/mlfoundations/open_clip/issues/616", ranks=(), slow=("ddp", "zero1"), data=FORMS)
def contrastive_loss_over_the_rows_of_all_ranks(loop: Loop) -> None:
    """CLIP: features are gathered with gradients, and each rank has the whole batch's loss."""
    from torch.distributed.nn.functional import all_gather

    model = loop.model(Classifier())
    features = F.normalize(model(loop.rows(torch.randn(6, 7))), dim=-1)
    targets = F.normalize(torch.randn(6, 5), dim=-1)
    everyone = features if loop.parts == 1 else torch.cat(all_gather(features))
    loss = F.cross_entropy(everyone @ targets.T / 0.1, torch.arange(6))
    loss.backward()
    loop.see(loss=loss.detach())
    loop.see_gradients(model)


@situation("https://github.com/huggingface/trl/issues/4235", slow=(1, 2), data=("fsdp",))
def distillation_from_a_second_parallelized_model(loop: Loop) -> None:
    student, teacher = loop.model(Classifier()), loop.model(Classifier(width=31).eval().requires_grad_(False))
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    for _ in range(3):
        x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
        with torch.no_grad():
            wanted = teacher(x)
        found = student(x)
        soft = F.kl_div(F.log_softmax(found / 2, -1), F.softmax(wanted / 2, -1), reduction="batchmean") * 4
        loss = 0.7 * soft + 0.3 * F.cross_entropy(found, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss))
    loop.see_state(student)
    loop.see(teacher=[p.grad is None for p in teacher.parameters()])


class WithExits(nn.Module):
    """Logits after each block, and a loss that balances a router."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 12), nn.Linear(12, 19)
        self.blocks, self.router = nn.ModuleList(Block() for _ in range(2)), nn.Linear(12, 2)

    def forward(self, ids: Tensor) -> tuple[list[Tensor], Tensor]:
        h, exits = self.embed(ids), []
        weights = self.router(h).softmax(-1)
        for i, block in enumerate(self.blocks):
            h = h + weights[..., i, None] * block(h)
            exits.append(self.head(h))
        return exits, 2 * weights.flatten(0, 1).mean(0).square().sum()


@situation("https://github.com/huggingface/transformers/issues/24225", slow=(2,))
def early_exits_and_an_auxiliary_loss(loop: Loop) -> None:
    model, ids = loop.model(WithExits()), tokens()
    for depth in ((1.0, 0.5), (0.1, 1.0)):
        exits, balance = model(ids)
        losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) for x in exits]
        loss = sum(w * x for w, x in zip(depth, losses, strict=True)) + 0.01 * balance
        loss.backward()
        loop.see(losses=losses, balance=balance)
    loop.see_gradients(model)


@situation(
    "https://github.com/yaringal/multi-task-learning-example/issues/5",
    like="an_optimizer_has_parameters_beside_the_models",
)
def weights_of_tasks_are_learned_outside_of_the_model(loop: Loop) -> None:
    model = loop.model(Classifier())
    uncertainty = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([{"params": model.parameters()}, {"params": [uncertainty], "lr": 0.1}], lr=1e-2)
    for _ in range(3):
        out = model(torch.randn(6, 7))
        tasks = torch.stack([out[:, 0].square().mean(), F.cross_entropy(out[:, 1:], torch.randint(0, 4, (6,)))])
        loss = (tasks * (-uncertainty).exp() + uncertainty).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss)
    loop.see(uncertainty=uncertainty.detach())
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/97436", slow=(2,))
def the_loss_is_compiled(loop: Loop) -> None:
    @torch.compile(backend="aot_eager")
    def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) + 1e-3 * logits.square().mean()

    model, ids = loop.model(Language()), tokens()
    loss = loss_of(model(ids), ids)
    loss.backward()
    loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/38487", slow=(2,))
def inputs_are_mixed_and_attacked(loop: Loop) -> None:
    """mixup, then FGSM: the gradient of the input is used, that of the parameters dropped."""
    model = loop.model(Classifier())
    x, y, order = torch.randn(6, 7), torch.randint(0, 5, (6,)), torch.randperm(6)
    mixed = (0.7 * x + 0.3 * x[order]).requires_grad_()
    F.cross_entropy(model(mixed), y).backward()
    assert mixed.grad is not None
    attacked = (mixed + 0.1 * mixed.grad.sign()).detach()
    model.zero_grad()
    out = model(attacked)
    loss = 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y[order])
    loss.backward()
    loop.see(loss=loss, gradient=mixed.grad)
    loop.see_gradients(model)


@situation("https://github.com/lyakaap/VAT-pytorch/issues/4", like="inputs_are_mixed_and_attacked")
def virtual_adversarial_training(loop: Loop) -> None:
    model = loop.model(Classifier())
    x = torch.randn(6, 7)
    with torch.no_grad():
        clean = model(x).softmax(-1)
    step = (1e-1 * F.normalize(torch.randn(6, 7), dim=-1)).requires_grad_()
    distance = F.kl_div(model(x + step).log_softmax(-1), clean, reduction="batchmean")
    (direction,) = torch.autograd.grad(distance, step)
    loss = F.kl_div(model(x + 0.5 * F.normalize(direction, dim=-1)).log_softmax(-1), clean, reduction="batchmean")
    loss.backward()
    loop.see(loss=loss, direction=direction)
    loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/34242", slow=(1, "ddp"), data=("ddp", "fsdp"))
def a_mean_over_the_tokens_of_all_micro_batches(loop: Loop) -> None:
    """Sums of losses are divided by the number of labels in the whole step, with uneven numbers of labels in each part."""
    model = loop.model(Language())
    batches = [(tokens(), tokens()) for _ in range(3)]
    for i, (_, labels) in enumerate(batches):
        labels[i:, : i + 1] = -100
    count = sum(int((labels != -100).sum()) for _, labels in batches)
    for ids, labels in batches:
        total = F.cross_entropy(
            model(loop.rows(ids)).flatten(0, 1), loop.rows(labels).flatten(), ignore_index=-100, reduction="sum"
        )
        (total * loop.parts / count).backward()  # data-parallel ranks average
        loop.see(total=loop.mean(total) * loop.parts)
    loop.see_gradients(model)


class Tiled(nn.Module):
    """Statistics of the result by tiles in one buffer, as trl's fused heads make them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        sums, tile = x.new_zeros(x.shape[0]), x.new_empty(x.shape[0], 3)
        with torch.no_grad():
            for start in (0, 3):
                torch.mm(x, self.linear.weight[start : start + 3].t(), out=tile)
                torch.add(sums, tile.exp().sum(1), out=sums)
        return self.linear(x).square().mean(), sums


@situation("https://github.com/huggingface/trl/issues/2880", slow=(2,))
def results_are_written_with_out(loop: Loop) -> None:
    model = loop.model(Tiled())
    loss, sums = model(torch.randn(5, 7))
    loss.backward()
    loop.see(loss=loss, sums=sums)
    loop.see_gradients(model)


class Regression(nn.Module):
    """Two linears; returns (loss, prediction)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.down(torch.relu(self.up(x)))
        return (out - y).square().mean(), out


@situation("https://discuss.pytorch.org/t/how-to-do-gradient-accumulation/25570")
def losses_are_scaled_and_accumulated(loop: Loop) -> None:
    model = loop.model(Regression())
    for _ in range(3):
        loss, _ = model(torch.randn(5, 8), torch.randn(5, 4))
        (loss / 3).backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Several(Classifier):
    """Losses of torch whose decomposition is wrong, or that check their arguments."""

    def forward(self, x: Tensor, labels: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]  # its base takes other arguments
        scores = super().forward(x)
        of_labels = F.multilabel_margin_loss(scores, labels) + F.multilabel_margin_loss(scores[0], labels[0])
        each = F.multilabel_margin_loss(scores, labels, reduction="none").square().sum()
        of_each = F.gaussian_nll_loss(scores, target, scores[:, :1].exp()) + F.multi_margin_loss(
            scores, labels[:, 1].abs()
        )
        return of_labels + each + of_each


@situation("https://github.com/pytorch/pytorch/blob/main/torch/_decomp/decompositions.py", slow=(1,))
def losses_that_torch_decomposes_wrongly(loop: Loop) -> None:
    """Labels after the first -1 do not count."""
    model = loop.model(Several())
    labels = torch.tensor([[1, 2, -1, 0, 4], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [4, -1, -1, 2, 1]])
    for _ in range(2):
        loss = model(torch.randn(4, 7), labels, torch.randn(4, 5))
        loss.backward()
        loop.see(loss=loss)
        labels = labels.flip(0)
    loop.see_gradients(model)
