"""Functions of torch that torch.export does not take, in the model's own forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

VICREG = "https://github.com/facebookresearch/vicreg/blob/main/main_vicreg.py"
CTC = "https://github.com/huggingface/transformers/blob/main/src/transformers/models/wav2vec2/modeling_wav2vec2.py"
UNIQUE = "https://github.com/pytorch/pytorch/issues/109642"
SAMPLED = "https://github.com/pytorch/pytorch/issues/30968"


class Net(nn.Module):
    """What `of` makes of hidden values [rows, 8], and of further arguments."""

    def __init__(self, of: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.of = nn.Linear(6, 12), nn.Linear(12, 8), of

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return self.of(self.down(torch.tanh(self.up(x))), *more)


def run(
    loop: Loop, of: Callable[..., Tensor], *arguments: Callable[[int], Tensor], rows: tuple[int, ...] = (4, 7)
) -> None:
    """arguments: of a number of rows."""
    model = loop.model(Net(of))
    for n in rows:
        loss = model(loop.rows(torch.randn(n, 6)), *(f(n) for f in arguments))
        model.zero_grad()
        loss.backward()
        loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)


@situation(VICREG)
def covariances_and_correlations(loop: Loop) -> None:
    def of(h: Tensor, weights: Tensor) -> Tensor:
        weighted = torch.cov(h.T, aweights=weights.to(h), fweights=weights) + torch.cov(
            h.T, fweights=weights, correction=0
        )
        spread = torch.cov(h.T).square().sum() + torch.cov(h[:, 0]) + h.T.cov(correction=2).sum()
        return spread + weighted.sin().sum() + torch.corrcoef(h.T)[0, 1:].square().sum() + torch.corrcoef(h)[0].sum()

    run(loop, of, lambda n: torch.arange(1, n + 1))


@situation("https://github.com/pytorch/pytorch/issues/31942")
def pairs_of_rows(loop: Loop) -> None:
    def of(h: Tensor) -> Tensor:
        first, second = torch.combinations(torch.arange(h.shape[0])).unbind(1)
        pairs = (h[first] - h[second]).square().sum(-1).add(1).log().sum()
        return (
            pairs
            + torch.combinations(h[:, 0], with_replacement=True).prod(1).sum()
            + torch.combinations(h[0], 3).tanh().sum()
        )

    run(loop, of, rows=(4, 6, 1))


@situation(CTC)
def a_loss_of_alignments(loop: Loop) -> None:
    """CTC: lengths in tensors, targets in rows and one behind another, a loss for each row."""
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def of(h: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        h = h.reshape(-1, 2, 8).log_softmax(-1)
        whole = torch.full((2,), h.shape[0])
        each = F.ctc_loss(h, targets, whole, lengths, reduction="none")
        packed = targets[torch.arange(2)[None] < lengths[:, None]]
        return criterion(h, targets, whole, lengths) + each.square().sum() + F.ctc_loss(h, packed, whole, lengths)

    generator = torch.Generator().manual_seed(0)
    targets = lambda n: torch.randint(1, 8, (2, 2), generator=generator)
    run(loop, of, targets, lambda n: torch.tensor([2, 1]), rows=(8, 12))


@situation(UNIQUE)
def embeddings_of_distinct_ids(loop: Loop) -> None:
    def of(h: Tensor, ids: Tensor) -> Tensor:
        _, places, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        means = torch.zeros(counts.shape[0], 8).index_add(0, places, h) / counts[:, None]
        runs, lengths = torch.unique_consecutive(ids, return_counts=True)
        rows = torch.unique(torch.stack([ids, ids], 1), dim=0)
        return (means[places] - h).square().sum() + means.cos().sum() + (runs * lengths).sum() + rows.sum() * h.sum()

    run(loop, of, lambda n: torch.arange(n) % 3)


@situation(UNIQUE)
def histograms_of_activations_are_kept(loop: Loop) -> None:
    class Watched(Net):
        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            h = super().forward(x)
            self.counts, self.edges = torch.histogram(h.detach(), 5, range=(-1.0, 1.0))
            self.between = torch.histogram(h.detach(), torch.linspace(-1, 1, 4)).hist
            return h.square().mean()

    model = loop.model(Watched(lambda h: h))
    for n in (4, 7):
        model(torch.randn(n, 6)).backward()
        loop.see(counts=model.counts, edges=model.edges, between=model.between)


@situation(SAMPLED)
def what_is_sampled_is_sure(loop: Loop) -> None:
    """Weights of one class alone: by multinomial and by a distribution, with and without replacement."""

    def of(h: Tensor) -> Tensor:
        weights = F.one_hot(h.argmax(-1), 8).to(h)
        several = torch.multinomial(weights, 3, replacement=True)
        taken = torch.distributions.Categorical(probs=weights.detach()).sample()
        return h.gather(-1, weights.multinomial(1)).sum() + h.gather(-1, several).tanh().sum() + h[0, taken].sum()

    run(loop, of, rows=(5,))


@situation(SAMPLED, ranks=(1,), like="what_is_sampled_is_sure")
def classes_are_sampled_by_their_weights(loop: Loop) -> None:
    model = loop.model(Net(lambda h, weights: torch.cat([weights.multinomial(2), weights.multinomial(3, True)], 1)))
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = model(torch.randn(2, 6), weights.expand(20000, 4))
    for column in (0, 2, 4):
        shares = torch.bincount(drawn[:, column], minlength=4) / 20000
        loop.see(close=bool(torch.allclose(shares, weights, atol=0.02)))
    loop.see(others=bool((drawn[:, 0] != drawn[:, 1]).all()))


@situation("https://github.com/pytorch/pytorch/issues/70140")
def an_index_of_the_batchs_size(loop: Loop) -> None:
    """A constant index fixes the number of rows; other numbers of rows get other code."""
    halves = torch.tensor([0, 1, 0, 1])

    def of(h: Tensor) -> Tensor:
        index = halves[:, None].expand(4, 8)
        sums = torch.zeros(2, 8).scatter_add(0, index, h) + torch.ones(2, 8).scatter_reduce(0, index, h, "prod")
        most = torch.zeros(2, 8).index_reduce(0, halves, h, "amax")
        return (sums + most + torch.zeros(2, 8).scatter_reduce_(0, index, h, "mean")).sin().sum()

    run(loop, of, rows=(4, 4))


@situation("https://github.com/pytorch/pytorch/issues/103120", data=("ddp",), slow=(2, "ddp"))
def images_are_resized_by_antialiased_cubics(loop: Loop) -> None:
    def of(h: Tensor) -> Tensor:
        images, resize = h.unflatten(1, (1, 2, 4)), partial(F.interpolate, mode="bicubic", antialias=True)
        found = [
            resize(images, (3, 2)),
            resize(images, (1, 7), align_corners=True),
            resize(images, scale_factor=(1.7, 0.6)),
        ]
        return sum(x.sin().flatten(1).sum(1).square().mean() for x in found)

    run(loop, of, rows=(4, 6))


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(20, 12, mode=mode, padding_idx=padding), nn.Linear(12, 5)

    def forward(self, ids: Tensor, weights: Tensor | None) -> Tensor:
        return self.out(self.bags(ids, per_sample_weights=weights)).sin().mean()


@situation("https://github.com/pytorch/pytorch/issues/43499", data=("ddp", "fsdp"), slow=(2, "ddp", "fsdp"))
def bags_of_ids_in_rows(loop: Loop) -> None:
    for mode, padding in (("mean", None), ("mean", 2), ("sum", -1), ("max", None)):
        model = loop.model(Bags(mode, padding))
        for n in (4, 3, 1):
            weights = loop.rows(torch.rand(6, n)) if mode == "sum" else None
            loss = model(loop.rows(torch.randint(0, 20, (6, n))), weights)
            loss.backward()
            loop.see(loss=loop.mean(loss))
        loop.see_gradients(model)


class Solves(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.linalg.lstsq(a, b).solution


@situation("https://github.com/pytorch/pytorch/issues/71222", like="forces_are_gradients_inside_of_a_submodule")
def least_squares_in_a_submodule(loop: Loop) -> None:
    """Left eager. Its last bits depend on the address of its operands, and so on the rank."""
    solves = Solves()
    model = Net(lambda h: solves(h.reshape(-1, 4), h.reshape(-1, 4)[:, :1].tanh()).square().sum())
    model.solves = solves
    model = loop.model(model)
    for n in (4, 7, 4):
        model(torch.randn(n, 6)).backward()
        loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/4320")
def deviations_of_one_row_have_gradients(loop: Loop) -> None:
    """Not a number in eager mode, where autograd divides by a size of 0; and with a part that does not use them."""
    for deviation in (
        lambda h: h.std(0),
        lambda h: h.var(0, keepdim=True),
        lambda h: torch.var_mean(h, 0)[0],
        lambda h: torch.nan_to_num(h.std(0)) if h.shape[0] > 1 else h * 0,
    ):
        model = loop.model(Deviates(deviation))
        for rows in (3, 1, 4):
            loss = model(torch.randn(rows, 7))
            model.zero_grad()
            loss.backward()
            loop.see(loss=loss)
            loop.see_gradients(model)


class Deviates(nn.Module):
    def __init__(self, deviation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.deviation = nn.Linear(7, 8), nn.Linear(8, 5), deviation

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.down(h + self.deviation(h)).square().mean() + self.down.bias.sum()


@situation("https://github.com/pytorch/pytorch/issues/104296")
def images_are_turned_by_angles_that_are_learned(loop: Loop) -> None:
    """A spatial transformer. The gradient of torch's op takes numbers for sizes alone."""

    def of(h: Tensor, images: Tensor) -> Tensor:
        turned = h[:, :6].unflatten(1, (2, 3)) + torch.eye(2, 3)
        found = torch.zeros(())
        for whole in (False, True):
            grid = F.affine_grid(turned, images.shape, align_corners=whole)
            found = found + F.grid_sample(images, grid, align_corners=whole).sin().sum()
        solid = F.affine_grid(
            torch.cat([turned, turned[:, :1]], 1).repeat(1, 1, 2)[..., :4], (len(h), 1, 2, 1, 3), False
        )
        return found + solid.square().sum()

    run(loop, of, lambda n: torch.randn(n, 2, n, 5))


@situation("https://github.com/yenchenlin/nerf-pytorch/blob/master/run_nerf.py")
def light_that_reaches_each_sample(loop: Loop) -> None:
    """Products of what is left: along a dim whose size varies; with no zero, one and several in a row."""

    def of(h: Tensor) -> Tensor:
        opaque = torch.sigmoid(h)
        light = torch.cumprod(torch.cat([torch.ones(len(h), 1), 1 - opaque[:, :-1] + 1e-10], -1), -1)
        some = h * (torch.arange(h.numel()).view_as(h) % 11 != 5)
        fewer = h * (torch.arange(h.numel()).view_as(h) % 3 != 1)
        narrow = torch.cumprod(h.float() / 2, 0, dtype=torch.float64)
        return (opaque * light).sum() + some.cumprod(0).sin().sum() + fewer.cumprod(0).square().sum() + narrow.sum()

    run(loop, of)


@situation("https://github.com/pytorch/pytorch/issues/172026")
def powers_are_taken_in_place(loop: Loop) -> None:
    def of(h: Tensor) -> Tensor:
        h = h * 1.5
        h.pow_(2)
        h[..., -1] **= 3
        still = h.detach().clone()
        still.pow_(still.abs()).float_power_(2).float_power_(still * 0.1).ldexp_(torch.tensor(1))
        still //= torch.tensor(3.0)
        return (h * still).sum()

    run(loop, of)
