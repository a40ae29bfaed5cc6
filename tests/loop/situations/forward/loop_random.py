"""Noise in the model. Its bits are not eager's: means over many draws are compared, and all ranks have to draw the same."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

import megafx


def same_on_ranks(loop: Loop, value: Tensor) -> None:
    """Tensor-parallel ranks have computed the same bits."""
    value = value.detach()
    if loop.eager or loop.parts > 1 or not dist.is_initialized():
        return
    others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(others, value.contiguous())
    assert all(torch.equal(x, value) for x in others)


class DropPath(nn.Module):
    """Stochastic depth: whole rows of the branch are dropped."""

    def __init__(self, keep: float = 0.75) -> None:
        super().__init__()
        self.up, self.down, self.keep = nn.Linear(6, 10), nn.Linear(10, 6), keep

    def forward(self, x: Tensor) -> Tensor:
        branch = self.down(torch.relu(self.up(x)))
        if self.training:
            keep = self.keep
            mask = x.new_empty(x.shape[0], 1).bernoulli_(keep)
            branch = branch * mask / keep
        return x + branch


@situation("https://github.com/huggingface/pytorch-image-models/issues/380", slow=(2,), rtol=0.05)
def whole_branches_are_dropped(loop: Loop) -> None:
    """A share that changes between calls, at first bernoulli_'s own default."""
    model, x = loop.model(DropPath(0.5)), torch.ones(9000, 6)
    loop.see(first=((model(x) - 1).abs().sum(-1) > 0).double().mean())
    model.keep = 0.75
    out = model(x)
    same_on_ranks(loop, out)
    rows = (out - 1).abs().sum(-1) > 0
    again = (model(x) - 1).abs().sum(-1) > 0
    loop.see(kept=rows.double().mean(), mean=out.mean(0), other=bool((rows != again).any()))
    out.square().mean().backward()
    loop.see_gradients(model)
    model.eval()
    loop.see(evaluated=model(x[:3]))


class Gumbel(nn.Module):
    """A straight-through choice among three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(6, 3), nn.Linear(6, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        soft = ((logits + noise) / 0.7).softmax(-1)
        hard = F.one_hot(soft.argmax(-1), 3).to(soft.dtype)
        choice = hard + soft - soft.detach()
        return (self.experts(x).unflatten(-1, (3, 4)) * choice[..., None]).sum(-2), hard


@situation("https://github.com/pytorch/pytorch/issues/22442", slow=(2,), rtol=0.1)
def a_choice_by_gumbel_noise(loop: Loop) -> None:
    model, x = loop.model(Gumbel()), torch.ones(3000, 6)
    out, hard = model(x)
    same_on_ranks(loop, out)
    out.square().mean().backward()
    loop.see(chosen=hard.mean(0), mean=out.mean(0))
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        if name.startswith("experts"):
            loop.see(**{name: grad})


@situation("https://github.com/dropreg/R-Drop/issues/11", rtol=0.05, like="a_choice_by_gumbel_noise")
def two_dropouts_of_one_batch(loop: Loop) -> None:
    """R-Drop: the divergence of two calls that drop different units."""
    net = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Dropout(0.3), nn.Linear(40, 5))
    model, x = loop.model(net), torch.ones(1500, 6)
    p, q = (model(x).log_softmax(-1) for _ in range(2))
    divergence = (
        F.kl_div(p, q, log_target=True, reduction="batchmean") + F.kl_div(q, p, log_target=True, reduction="batchmean")
    ) / 2
    same_on_ranks(loop, p)
    divergence.backward()
    loop.see(divergence=divergence, mean=p.mean(0))


class Dropping(nn.Module):
    """Writes into what dropout that is off has returned: the value itself, or a copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.drops = nn.ModuleList(
            [nn.Dropout(0.5, inplace=True), nn.AlphaDropout(0.5, inplace=True), nn.Dropout2d(0.5, True)]
        )
        self.drops += [nn.FeatureAlphaDropout(0.5, inplace=True), nn.Dropout(0.5), nn.Dropout(0.0, inplace=True)]

    def forward(self, x: Tensor) -> Tensor:
        for drop in self.drops:
            h = self.up(x)
            y = drop(h)
            y[..., 0] = 7.0
            x = self.down(h + y)
        for p, train in ((0.5, False), (0.0, True)):
            h = self.up(x)
            y, _ = torch.native_dropout(h, p, train)
            y[..., 0] = 7.0
            x = self.down(h + y)
        return x


@situation("https://github.com/pytorch/pytorch/issues/22124")
def dropout_that_works_in_place_is_off_in_evaluation(loop: Loop) -> None:
    model = loop.model(Dropping().eval())
    out = model(torch.randn(2, 3, 4, 6))
    out.square().mean().backward()
    loop.see(out=out)
    loop.see_gradients(model)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], p: float, **options: bool) -> None:
        super().__init__()
        self.rnn = kind(3, 8, num_layers=3, dropout=p, **options)
        self.out = nn.Linear(16 if self.rnn.bidirectional else 8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = self.rnn.batch_first
        out, states = self.rnn(x if first else x.transpose(0, 1))
        last = out[:, -1] if first else out[-1]
        extra = sum(h.square().mean() for h in (states if isinstance(states, tuple) else [states]))
        return F.cross_entropy(self.out(last), y) + extra


@situation("https://github.com/pytorch/pytorch/issues/58114", data=("ddp", "fsdp"), slow=(1, 2, "fsdp"))
def dropout_between_layers_of_recurrent_modules(loop: Loop) -> None:
    x, y = torch.randn(6, 4, 3), torch.randint(0, 5, (6,))
    for kind, options in ((nn.LSTM, {"batch_first": True, "bidirectional": True}), (nn.GRU, {}), (nn.RNN, {})):
        torch.manual_seed(1)
        model = loop.model(Recurrent(kind, 1e-12, **options))  # drops none of the few values: what is left is compared
        loss = model(loop.rows(x), loop.rows(y))
        loss.backward()
        loop.see(loss=loop.mean(loss).round(decimals=9))
        gradients = {n: p.grad for n, p in model.named_parameters()} if loop.eager else megafx.full_gradients(model)
        loop.see(**{n: g.round(decimals=9) for n, g in sorted(gradients.items())})
    model = loop.model(Recurrent(nn.LSTM, 0.5))
    one, other = (model(loop.rows(x), loop.rows(y)) for _ in range(2))
    loop.see(drawn_again=bool(one != other))
    model.eval()
    assert model(loop.rows(x), loop.rows(y)) == model(loop.rows(x), loop.rows(y))
