"""Parameters that forward writes under no_grad: momentum encoders, codebooks, weights that are clamped before they are used."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

MOCO = "https://github.com/facebookresearch/moco/issues/33"
Follow = Callable[[Tensor, Tensor], object]


class Contrast(nn.Module):
    """Queries against keys of an encoder that follows the first one by `follow(its parameter, the other's)`."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
        self.key, self.follow = copy.deepcopy(self.query).requires_grad_(False), follow
        self.register_buffer("queue", F.normalize(torch.randn(9, 4), dim=1))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        queries = F.normalize(self.query(a), dim=1)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.follow(mine, theirs)
            keys = F.normalize(self.key(b), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().detach().T], 1)
        self.queue.copy_(torch.cat([keys, self.queue[: -len(keys)]]))
        return F.cross_entropy(scores / 0.2, torch.zeros(len(a), dtype=torch.long))


def assigned(mine: Tensor, theirs: Tensor) -> None:
    mine.data = mine.data * 0.9 + theirs.data * 0.1


class Codes(nn.Module):
    """The nearest code of each row, with a straight-through gradient; codes are a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.codes = nn.Parameter(torch.randn(5, 8), requires_grad=False)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        x = self.up(a)
        chosen = F.one_hot(torch.cdist(x, self.codes).argmin(1), 5).to(x.dtype)
        nearest = chosen @ self.codes
        with torch.no_grad():
            counts = chosen.sum(0)[:, None]
            self.codes.copy_(
                torch.where(counts > 0, 0.9 * self.codes + 0.1 * chosen.T @ x / counts.clamp(min=1), self.codes)
            )
        return F.mse_loss(self.down(x + (nearest - x).detach()), b) + F.mse_loss(x, nearest.detach())


def trained(loop: Loop, plain: nn.Module) -> None:
    model = loop.model(plain)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        found = model(loop.rows(torch.randn(4, 6)), loop.rows(torch.randn(4, 6)))
        loss = found if isinstance(found, Tensor) else found["codes"] + found["rows"].square().mean()
        loss.backward()
        optimizer.step()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        loop.see_state(model)


@situation(MOCO)
def an_encoder_follows_in_forward(loop: Loop) -> None:
    trained(loop, Contrast(lambda mine, theirs: mine.mul_(0.9).add_(theirs, alpha=0.1)))


@situation(MOCO, like="an_encoder_follows_in_forward")
def an_encoder_is_assigned_in_forward(loop: Loop) -> None:
    trained(loop, Contrast(assigned))


@situation("https://github.com/lucidrains/vector-quantize-pytorch/issues/27", data=("ddp", "fsdp"))
def codes_are_a_frozen_parameter(loop: Loop) -> None:
    trained(loop, Codes())


class CodesAndLoss(Codes):
    """The loss of the rows is the user's; the first backward computes the call once more, from the codes of before."""

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return {"codes": super().forward(a, b), "rows": self.down(self.codes[self.up(a).argmax(1) % 5] + self.up(a))}


@situation("https://github.com/lucidrains/vector-quantize-pytorch/issues/27", like="codes_are_a_frozen_parameter")
def codes_with_a_loss_outside(loop: Loop) -> None:
    trained(loop, CodesAndLoss())


class ByPointer(Contrast):
    """The queue is a ring: a pointer in a buffer says where the keys go."""

    def __init__(self) -> None:
        super().__init__(assigned)
        self.register_buffer("queue", F.normalize(torch.randn(12, 4), dim=1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        begin, n = int(self.pointer), keys.shape[0]
        assert len(self.queue) % n == 0
        self.queue[begin : begin + n] = keys
        self.pointer[0] = (begin + n) % len(self.queue)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        queries, keys = F.normalize(self.query(a), dim=1), F.normalize(self.key(b), dim=1).detach()
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().detach().T], 1)
        self.enqueue(keys)
        return F.cross_entropy(scores / 0.2, torch.zeros(len(a), dtype=torch.long))


@situation(MOCO, like="losses_of_clusters_are_written_one_after_another")
def a_queue_is_written_at_a_pointer(loop: Loop) -> None:
    """Also with gc.freeze(), after which the garbage collector does not know the code whose numbers are traced."""
    gc.freeze()
    trained(loop, ByPointer())


class Clip(nn.Module):
    def __init__(self, write: Callable[[Clip], object]) -> None:
        super().__init__()
        self.a, self.b, self.scale = nn.Linear(7, 12), nn.Linear(7, 12), nn.Parameter(torch.tensor(4.7))
        self.write = write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.write(self)
        a, b = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        return (self.scale.exp() * a * b).tanh().mean()


def _train_clip(loop: Loop, write: Callable[[Clip], object]) -> None:
    torch.manual_seed(0)
    model = loop.model(Clip(write))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(loop.rows(torch.randn(4, 7)), loop.rows(torch.randn(4, 7)))
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loop.see(evaluated=model.eval()(torch.randn(4, 7), torch.randn(4, 7)))
    loop.see_state(model)


@situation("https://github.com/openai/CLIP/issues/48", data=("ddp", "fsdp"))
def a_scale_is_clamped_before_it_is_used(loop: Loop) -> None:
    _train_clip(loop, torch.no_grad()(lambda m: m.scale.clamp_(0, 4.6)))
    _train_clip(loop, lambda m: m.scale.data.clamp_(0, 4.6))


@situation("https://docs.pytorch.org/docs/stable/generated/torch.nan_to_num.html", data=("ddp", "fsdp"))
def weights_that_are_not_finite_are_mended_before_they_are_used(loop: Loop) -> None:
    """Once: three steps, of which the first finds infinity and NaN."""

    def mend(model: Clip) -> None:
        with torch.no_grad():
            model.scale.clamp_(0, 4.6)
            model.a.weight.nan_to_num_(nan=0.1, posinf=0.2)

    torch.manual_seed(0)
    plain = Clip(mend)
    with torch.no_grad():
        plain.scale.fill_(torch.inf)
        plain.a.weight[1, 2], plain.a.weight[3, 4] = torch.inf, torch.nan
    model = loop.model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(loop.rows(torch.randn(4, 7)), loop.rows(torch.randn(4, 7)))
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation(
    "https://github.com/facebookresearch/dino/issues/37",
    data=("ddp", "fsdp"),
    like="a_scale_is_clamped_before_it_is_used",
)
def weights_are_normalised_before_they_are_used(loop: Loop) -> None:
    """The last layer's prototypes; parts of a weight; twice; in training alone; by nn.init."""
    _train_clip(
        loop, torch.no_grad()(lambda m: m.a.weight.copy_(F.normalize(m.a.weight, dim=1)) if m.training else None)
    )
    _train_clip(loop, torch.no_grad()(lambda m: (m.a.weight.mul_(0.9), m.a.weight[:3].clamp_(-0.1, 0.1))))
    _train_clip(loop, lambda m: (m.a.weight.data[:, 2].fill_(0.1), nn.init.constant_(m.b.bias, 0.2)))


@situation(
    "https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html",
    like="a_scale_is_clamped_before_it_is_used",
)
def rows_of_an_embedding_are_bounded_by_max_norm(loop: Loop) -> None:
    torch.manual_seed(0)
    bounded = nn.Embedding(11, 6, max_norm=0.5)
    model = loop.model(nn.Sequential(bounded, nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(loop.rows(torch.randint(11, (4, 3)))).square().mean()
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)
        loop.see_state(model)
        optimizer.step()
        optimizer.zero_grad()


class Reads(nn.Module):
    """write(model): after the first layer, or after all."""

    def __init__(self, write: Callable[[Any], Any], last: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 5)
        self.table = nn.Embedding(4, 12)
        self.average = nn.Linear(7, 12).requires_grad_(False)
        self.write, self.last = torch.no_grad()(write), last

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) + self.table(torch.tensor([0, 1, 3])).sum(0)
        if not self.last:
            self.write(self)
        h = h + self.up(x) * self.average(x) + self.table(torch.tensor([1, 2])).sum(0)
        loss = self.down(h.tanh()).square().mean()
        if self.last:
            self.write(self)
        return loss


@situation(
    "https://discuss.pytorch.org/t/proper-way-to-do-weight-clipping-in-forward/111453",
    data=("ddp", "fsdp"),
    slow=(2, "fsdp"),
)
def weights_are_written_after_they_were_read(loop: Loop) -> None:
    """Clipped, averaged, centred, replaced by a normalised one: where eager mode's backward does not need what was read."""

    def average(model: Any) -> None:
        for mean, now in zip(model.average.parameters(), model.up.parameters(), strict=True):
            mean.lerp_(now, 0.1)

    uses: list[tuple[Callable[[Any], Any], bool]] = [
        (lambda m: m.up.weight.clamp_(-0.2, 0.2), False),
        (lambda m: m.up.bias.mul_(0.9), False),
        (average, True),
        (lambda m: m.down.bias.sub_(m.down.bias.mean()), True),
        (lambda m: m.up.weight.copy_(F.normalize(m.up.weight, dim=1)), True),
    ]
    for write, last in uses:
        torch.manual_seed(0)
        model = loop.model(Reads(write, last))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        for _ in range(3):
            loss = model(loop.rows(torch.randn(4, 7)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loop.see(loss=loop.mean(loss))
        loop.see_state(model)


@situation("https://docs.pytorch.org/docs/stable/generated/torch.nn.Embedding.html")
def rows_are_bounded_by_max_norm_after_they_were_read(loop: Loop) -> None:
    for frozen in (False, True):
        module = Reads(lambda m: None, True)
        module.table = nn.Embedding(4, 12, max_norm=0.5).requires_grad_(not frozen)
        model = loop.model(module)
        for _ in range(2):
            loss = model(torch.randn(4, 7))
            loss.backward()
            loop.see(loss=loss)
        loop.see_gradients(model)
        loop.see_state(model)
