"""Losses that are no plain mean over rows, where data-parallel ranks have rows of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import PlanError

FORMS = ("ddp", "zero1", "fsdp")


class Objective(nn.Module):
    """What `terms` makes of (the model, logits [rows, 5], labels [rows])."""

    def __init__(self, terms: Callable[[nn.Module, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(13, 5)
        self.terms = terms

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.terms(self, self.down(F.gelu(self.up(self.norm(x)))), y)


def penalty(model: nn.Module) -> Tensor:
    return 0.01 * torch.stack([p.norm() for p in model.parameters()]).sum()


def train(
    loop: Loop, terms: Callable[[nn.Module, Tensor, Tensor], object], total: Callable[..., Tensor], steps: int = 1
) -> None:
    """total(what the model gives, the model, labels): a rank's loss; those of the ranks are averaged."""
    model = loop.model(Objective(terms))
    for _ in range(steps):
        x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
        loss = total(model(x, y), model, y)
        loss.backward()
        loop.see(loss=loop.mean(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    loop.see_gradients(model)


@situation("https://github.com/marrlab/DomainLab/pull/368", slow=(1, 2, "fsdp"), data=("ddp", "fsdp"))
def a_penalty_on_parameters_inside_of_the_model(loop: Loop) -> None:
    train(loop, lambda m, h, y: F.cross_entropy(h, y) + penalty(m), lambda out, m, y: out)


@situation(
    "https://github.com/NVIDIA/Megatron-LM/pull/3768",
    data=("ddp", "zero1"),
    like="statistics_beside_rows_without_a_loss",
)
def terms_beside_rows_and_beside_a_loss(loop: Loop) -> None:
    """A dict with a loss, rows, statistics of the batch, a norm of a parameter and a perplexity, all in one objective."""

    def terms(m: nn.Module, h: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = F.cross_entropy(h, y) + 0.1 * h.logsumexp(-1).square().mean()
        statistics = {"mean": h.mean(0), "scale": h.norm(dim=0), "weight": m.up.weight.norm()}
        return {"loss": loss, "rows": h, "perplexity": loss.exp(), **statistics}

    def total(out: dict[str, Tensor], m: nn.Module, y: Tensor) -> Tensor:
        spread = (out["rows"] - out["mean"]).square().mean()
        terms = 0.1 * out["perplexity"] + 0.2 * out["scale"].sum() + out["weight"]
        return out["loss"] * (1 + 0.1 * y.double().mean()) + spread + terms

    train(loop, terms, total, steps=2)


@situation("https://github.com/lightly-ai/lightly/issues/1977", slow=(1, 2, "ddp"), data=("ddp", "fsdp"))
def a_correlation_over_the_batch(loop: Loop) -> None:
    """Barlow Twins, with columns normalised over the batch."""

    def terms(m: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        z = (h - h.mean(0)) / h.std(0)
        off = z.T @ z / z.shape[0] - torch.eye(5, dtype=z.dtype)
        return off.square().sum() + 0.1 * h.square().mean()

    train(loop, terms, lambda out, m, y: out)


@situation("https://github.com/facebookresearch/barlowtwins/issues/8", slow=(1, 2, "ddp"), data=("ddp", "zero1"))
def statistics_beside_rows_without_a_loss(loop: Loop) -> None:
    """VICReg's variance and covariance, computed outside from what the model gives of the whole batch."""

    def terms(m: nn.Module, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        centred = h - h.mean(0, keepdim=True)
        return h, h.std(0), centred.T @ centred / (h.shape[0] - 1)

    def total(out: tuple[Tensor, Tensor, Tensor], m: nn.Module, y: Tensor) -> Tensor:
        rows, deviation, covariance = out
        variance = F.relu(2 - deviation).mean() + (rows / deviation).square().mean()
        return F.cross_entropy(rows, y) + variance + covariance.square().sum() - covariance.diagonal().square().sum()

    train(loop, terms, total)


@situation(
    "https://discuss.pytorch.org/t/simple-l2-regularization/139",
    data=FORMS,
    like="a_penalty_on_parameters_inside_of_the_model",
)
def a_penalty_on_parameters_outside_of_the_model(loop: Loop) -> None:
    train(loop, lambda m, h, y: h, lambda out, m, y: F.cross_entropy(out, y) + penalty(m))
    train(loop, lambda m, h, y: F.cross_entropy(h, y), lambda out, m, y: 0.5 * out + penalty(m))


@situation(
    "https://github.com/huggingface/transformers/issues/28255",
    data=FORMS,
    like="weighted_and_smoothed_labels_and_probabilities",
)
def soft_labels_and_means_by_class(loop: Loop) -> None:
    """Labels as one-hot rows; the mean of each class is that of the whole batch."""

    def terms(m: nn.Module, h: Tensor, y: Tensor) -> Tensor:
        one = F.one_hot(y, 5).to(h.dtype)
        centres = one.T @ h / (one.sum(0)[:, None] + 1)
        soft = F.binary_cross_entropy_with_logits(h, 0.9 * one + 0.02)
        return soft + (h - one @ centres).square().mean() + 0.1 * centres.square().sum()

    train(loop, terms, lambda out, m, y: out)


@situation(
    "https://discuss.pytorch.org/t/forward-hooks-and-distributeddataparallel/75205",
    ranks=(1,),
    data=("ddp", "fsdp"),
    like="hooks_change_outputs",
)
def a_hook_records_where_each_rank_has_its_own_batch(loop: Loop) -> None:
    """Refused with one loss of all rows, whose activations a hook would see in part; the advice is followed."""
    seen: list[Tensor] = []

    def record(module: nn.Module, args: object, out: Tensor) -> None:
        seen.append(out.detach().mean())

    def hooked() -> nn.Module:
        model = Objective(lambda m, h, y: F.cross_entropy(h, y))
        model.up.register_forward_hook(record)
        return model

    x, y = loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,)))
    if loop.parts > 1:
        try:
            loop.model(hooked())(x, y)
        except PlanError as error:
            assert "record (" in str(error) and "loop_data_parallel.py:" in str(error) and "average" in error.fix
        else:
            raise AssertionError("a hook sees a rank's rows")
    torch.manual_seed(7)
    model = loop.model(hooked(), data_parallel_loss="average" if loop.parts > 1 else "batch")
    for _ in range(2):
        loss = model(x, y)
        loss.backward()
        loop.see(loss=loop.mean(loss), seen=loop.mean(seen[-1]))
    loop.see_gradients(model)


@situation(
    "https://github.com/Lightning-AI/pytorch-lightning/discussions/6501",
    data=("ddp", "fsdp"),
    like="tensors_are_converted_by_float_int_and_bool",
)
def numbers_of_the_whole_batch_for_the_log(loop: Loop) -> None:
    """Whether any row, or all rows, are so, how many there are, and what Python makes of such numbers."""

    def terms(m: nn.Module, h: Tensor, y: Tensor) -> tuple[Tensor, dict[str, object]]:
        seen = {"any": (y == 4).any().item(), "all": bool((h > -9).all()), "count": int((h > 0).sum())}
        seen |= {
            "nonzero": y.count_nonzero().item(),
            "by class": (h > 0.1).any(0),
            "all by class": (h > -0.3).all(dim=0),
        }
        seen |= {"rounded": round(h.square().sum().item(), 3), "norm": float(h.norm()), "nan": h.isnan().any().item()}
        return F.cross_entropy(h, y), seen | {"half": h.mean().item() / 2}

    model = loop.model(Objective(terms))
    for _ in range(3):
        loss, seen = model(loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,))))
        loss.backward()
        loop.see(loss=loss, **seen)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/16201", ranks=(1,), data=("ddp",))
def the_largest_value_of_all_rows(loop: Loop) -> None:
    """Refused with data parallelism; both parts of the advice are followed."""
    terms = lambda m, h, y: (F.cross_entropy(h, y), h.max().item())
    x, y = torch.randn(6, 7), torch.randint(0, 5, (6,))
    if loop.parts > 1:
        model = loop.model(Objective(terms))
        with pytest.raises(PlanError, match="return its rows, and take it in your own loop"):
            model(loop.rows(x), loop.rows(y))
        own = loop.model(Objective(terms), data_parallel_loss="average")(loop.rows(x), loop.rows(y))[1]
    torch.manual_seed(0)
    model = loop.model(Objective((lambda m, h, y: (F.cross_entropy(h, y), h)) if loop.parts > 1 else terms))
    loss, largest = model(loop.rows(x), loop.rows(y))
    if loop.parts > 1:
        largest = largest.detach().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        assert own <= 100
    loop.see(loss=loss, largest=float(largest))


@situation("https://github.com/pytorch/pytorch/issues/97155", slow=(1, 2, *FORMS[1:]), data=FORMS)
def parameters_are_given_as_arguments(loop: Loop) -> None:
    """Themselves, in a dict, and what is computed of them; a prompt of the user's own, of another number of rows."""

    class Given(Objective):
        def forward(self, x: Tensor, a_prompt: Tensor, given: dict[str, Tensor]) -> Tensor:
            h = (
                self.up(self.norm(x))
                + F.linear(x, given["w"])
                + given["twice"].sum()
                + x @ a_prompt.T @ a_prompt[:, :1]
            )
            return self.down(F.gelu(h)).square().mean()

    model = loop.model(Given(lambda m, h, y: h))
    prompt = torch.randn(13, 7, requires_grad=True)
    for _ in range(2):
        given = {"w": model.up.weight, "twice": 2 * model.down.weight}
        loss = model(loop.rows(torch.randn(6, 7)), prompt, given)
        loss.backward()
        loop.see(loss=loop.mean(loss), prompt=loop.mean(prompt.grad))
    loop.see_gradients(model)


@situation("https://github.com/huggingface/trl/issues/3207", slow=(1, 2, "zero1", "ddp"), data=FORMS)
def parameters_meet_rows_outside_of_the_model(loop: Loop) -> None:
    """Heads applied in a loss of the user's, temperatures, norms times a number of the batch, a submodule called by itself."""

    def total(out: Tensor, m: nn.Module, y: Tensor) -> Tensor:
        x = torch.stack([y, y * y, *[y.double().cos() + k for k in range(5)]], 1).double()
        head = F.cross_entropy(F.linear(F.linear(x, m.up.weight, m.up.bias), m.down.weight), y)
        scaled = (
            (x @ x.new_ones(7) * m.down.bias[0].exp()).mean() + x.mean() * m.up.bias.norm() + (m.norm.weight * x).mean()
        )
        return out + head + scaled + 0.1 * m.up.weight.square().mean()

    train(loop, lambda m, h, y: F.cross_entropy(h, y), total, steps=2)
    model = loop.model(Objective(lambda m, h, y: F.cross_entropy(h, y)))
    for part in (nn.Identity(), model.norm):  # a submodule only after the first call of the model
        loss = model(part(loop.rows(torch.randn(6, 7))), loop.rows(torch.randint(0, 5, (6,))))
        loss.backward()
        loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)


class Smoothed(nn.Module):
    """A loss of labels by classes of different weights, or of probabilities of classes (mixup)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.register_buffer("weight", torch.arange(1.0, 6.0))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.linear(x), target, weight=self.weight, label_smoothing=0.1)


@situation("https://github.com/pytorch/pytorch/issues/104776", data=("ddp", "fsdp"))
def weighted_and_smoothed_labels_and_probabilities(loop: Loop) -> None:
    model = loop.model(Smoothed())
    for target in (torch.tensor([0, 3, -100, 4]), torch.rand(4, 5).softmax(-1)):
        loss = model(loop.rows(torch.randn(4, 6)), loop.rows(target))
        loss.backward()
        loop.see(loss=loop.mean(loss))
    loop.see_gradients(model)


class Tagger(nn.Module):
    """Tokens [rows, length] -> scores [rows, classes, length], and how alike both directions are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.both = nn.Embedding(11, 6), nn.LSTM(6, 5, batch_first=True, bidirectional=True)
        self.cell, self.head = nn.GRUCell(10, 7), nn.Linear(7, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.both(self.embed(ids))
        state, states = torch.where(ids[:, :1] > 5, 0.5, -0.5).to(y.dtype).expand(-1, 7), []
        for i in range(ids.shape[1]):
            state = self.cell(y[:, i], state)
            states.append(state)
        alike = F.cosine_similarity(*y.chunk(2, -1), dim=-1)
        return F.cross_entropy(self.head(torch.stack(states, 1)).transpose(1, 2), labels, ignore_index=3), alike


@situation(
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.LSTM.html",
    data=("ddp", "fsdp"),
    like="statistics_beside_rows_without_a_loss",
)
def a_tagger_of_recurrent_modules(loop: Loop) -> None:
    model = loop.model(Tagger())
    for _ in range(2):
        ids, labels = loop.rows(torch.randint(0, 11, (4, 3))), loop.rows(torch.randint(0, 4, (4, 3)))
        loss, alike = model(ids, labels)
        (loss + (1 - alike).mean()).backward()
        loop.see(loss=loss, alike=loop.mean(alike.mean()))
    loop.see_gradients(model)
