"""Parameters in the user's own code outside of the model: penalties, weight averages, initialisation, surgery."""

from __future__ import annotations

import math

import torch
from loop import Loop, situation
from torch import nn

EMA = "https://github.com/pytorch/pytorch/issues/144289"
NOISE = "https://github.com/pytorch/pytorch/issues/168058"
PENALTY = "https://github.com/pytorch/pytorch/issues/121020"
SLICES = "https://github.com/pytorch/pytorch/issues/152249"


class Mlp(nn.Module):
    """Two linears with a norm. hidden: divides by the ranks, or does not."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.norm(torch.relu(self.up(x))))).square().mean()


BOTH = (16, 13)  # widths that two ranks divide, and do not


def started(loop: Loop, hidden: int, **options: object) -> nn.Module:
    """A parallelized model whose parameters are cut."""
    example = (torch.randn(3, 8),)
    return loop.model(Mlp(hidden), example_inputs=example, **options)


# -- penalties


@situation(PENALTY, like="elastic_weights_stay_near_those_of_an_earlier_task")
def penalties_are_added_to_the_loss(loop: Loop) -> None:
    """L2 of squares and of norms, L1, the largest weight, a mean and a deviation."""
    for hidden in BOTH:
        model, x = started(loop, hidden), torch.randn(3, 8)
        for penalty in (
            lambda ps: sum(p.pow(2).sum() for p in ps),
            lambda ps: sum(p.norm() for p in ps),
            lambda ps: sum(p.abs().sum() for p in ps),
            lambda ps: sum(torch.norm(p, 1) for p in ps),
            lambda ps: sum(p.sum() * 0.1 for p in ps) + sum((3 * p).mean() for p in ps),
            lambda ps: sum(p.abs().max() + p.std() for p in ps),
            lambda ps: torch.stack([p.norm(3) for p in ps]).norm(),
            lambda ps: torch.cat([p.flatten() for p in ps]).square().mean(),
            lambda ps: sum(torch.linalg.vector_norm(p, float("inf")) for p in ps),
            lambda ps: sum(p.logsumexp(0).sum() + p.sum(0).square().sum() for p in ps),
        ):
            model.zero_grad()
            term = penalty([*model.parameters()])
            assert type(term) is torch.Tensor
            loss = model(x) + 0.01 * term
            loss.backward()
            loop.see(loss=loss, penalty=term)
            loop.see_gradients(model)


@situation(PENALTY)
def elastic_weights_stay_near_those_of_an_earlier_task(loop: Loop) -> None:
    """The Fisher information is squared gradients; anchors are clones, whole copies, or a frozen copy of the state."""
    for hidden in BOTH:
        model, x = started(loop, hidden), torch.randn(3, 8)
        model(x).backward()
        fisher = {n: p.grad.detach().clone() ** 2 for n, p in model.named_parameters()}
        old = {n: p.detach().clone() for n, p in model.named_parameters()}
        whole = {n: torch.ones(p.shape) for n, p in model.named_parameters()}
        for p in model.parameters():
            p.data.add_(0.1)
        model.zero_grad()
        ewc = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in model.named_parameters())
        toward = sum(
            nn.functional.mse_loss(p, whole[n]) + nn.functional.l1_loss(p, whole[n])
            for n, p in model.named_parameters()
        )
        loss = model(x) + 5.0 * ewc + toward
        loss.backward()
        loop.see(loss=loss, ewc=ewc, toward=toward)
        loop.see_gradients(model)


@situation(PENALTY, slow=(1,))
def weights_are_kept_orthogonal(loop: Loop) -> None:
    for hidden in BOTH:
        model, x = started(loop, hidden), torch.randn(3, 8)
        total = model(x)
        for w in (model.up.weight, model.down.weight):
            total = total + (w @ w.T - torch.eye(w.shape[0])).square().sum()
            total = total + torch.mm(w.t(), w).fill_diagonal_(0).abs().sum() + torch.linalg.matrix_norm(w, "nuc")
        cosine = nn.functional.normalize(model.up.weight, dim=1)
        total = total + (cosine @ cosine.t()).triu(1).sum() + torch.einsum("ij,kj->ik", cosine, cosine).mean()
        total.backward()
        loop.see(loss=total)
        loop.see_gradients(model)


class Penalised(Mlp):
    """The penalty is part of forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.up.weight
        eye = torch.eye(w.shape[0], device=w.device, dtype=w.dtype)
        return super().forward(x) + 0.1 * (w @ w.t() - eye).square().sum()


@situation(PENALTY, like="embedding_with_padding_and_scaled_gradients")
def weights_are_kept_orthogonal_inside_of_forward(loop: Loop) -> None:
    for hidden in BOTH:
        model = loop.model(Penalised(hidden))
        loss = model(torch.randn(3, 8))
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)


@situation(PENALTY)
def a_penalty_before_the_first_call(loop: Loop) -> None:
    """The first call cuts the parameters that the penalty was computed of."""
    model, x = loop.model(Mlp()), torch.randn(3, 8)
    for _ in range(2):
        model.zero_grad()
        penalty = sum(p.sum() + p.norm() for p in model.parameters())
        (model(x) + penalty).backward()
        loop.see(penalty=penalty)
        loop.see_gradients(model)


@situation(
    "https://discuss.pytorch.org/t/how-does-one-implement-weight-regularization-l1-or-l2-manually-without-optimum/7951",
    slow=(1,),
)
def arithmetic_of_parameters_mixes_with_plain_tensors(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        w, b = model.up.weight, model.up.bias
        extra = torch.randn(w.shape, requires_grad=True)
        scale = torch.tensor(2.0, requires_grad=True)
        out = (w * extra + scale * w - b[:, None] * extra).tanh() * torch.ones(8) + torch.where(w > 0, w, extra)
        loop.see(out=out)
        total = out.square().sum() + (w.mean() * scale).exp() + torch.addmm(b, torch.ones(2, 8), w.t()).sum()
        total.backward()
        loop.see(total=total, extra=extra.grad, scale=scale.grad)
        loop.see_gradients(model)
        (found,) = torch.autograd.grad((w * extra).sum() + w.sum(), [w])
        loop.see(found=found)


@situation("https://discuss.pytorch.org/t/gradient-penalty-on-weights/62397")
def a_penalty_is_differentiated_twice(loop: Loop) -> None:
    model = started(loop, 13)
    w = model.up.weight
    (grad,) = torch.autograd.grad((w**3).sum() + (w @ w.t()).sum(), [w], create_graph=True)
    grad.square().sum().backward()
    loop.see_gradients(model)


# -- values that are assigned


@situation(EMA, like="a_target_network_follows")
def averaged_weights_are_swapped_in_and_out(loop: Loop) -> None:
    """An average of weights (EMA), kept as clones and as whole tensors, evaluated by swapping `.data`."""
    for hidden in BOTH:
        model, x = started(loop, hidden), torch.randn(3, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        whole = {n: torch.full(p.shape, 0.1) for n, p in model.named_parameters()}
        for _ in range(2):
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()
            for n, p in model.named_parameters():
                shadow[n] = 0.9 * shadow[n] + 0.1 * p.data
        for averages in (shadow, whole):
            backup = {n: p.data for n, p in model.named_parameters()}
            for n, p in model.named_parameters():
                p.data = averages[n]
            loop.see(averaged=model(x))
            loop.see_state(model)
            for n, p in model.named_parameters():
                p.data = backup[n]
            loop.see(loss=model(x))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        loop.see_state(model)


@situation(EMA, slow=(1,))
def a_target_network_follows(loop: Loop) -> None:
    for hidden in BOTH:
        online, target = started(loop, hidden), started(loop, hidden)
        for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
            mine.data.copy_(0.995 * mine.data + 0.005 * theirs.data)
            mine.data.mul_(0.5).add_(theirs.data, alpha=0.5)
            mine.data.lerp_(theirs.data, 0.25)
        loop.see_state(target)
        for mine, theirs in zip(target.parameters(), online.parameters(), strict=True):
            mine.data = theirs.data.clone()
        target.load_state_dict(online.state_dict())
        loop.see_state(target)
        loop.see(value=target(torch.ones(2, 8)))


@situation(EMA, like="a_penalty_before_the_first_call")
def parameters_become_a_vector_and_back(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        vector = nn.utils.parameters_to_vector(model.parameters())
        loop.see(vector=vector)
        nn.utils.vector_to_parameters(vector.detach() * 2 + 1, model.parameters())
        loop.see_state(model)
        vector.square().sum().backward()
        loop.see(gradient=nn.utils.parameters_to_vector(p.grad for p in model.parameters()))
        loop.see(loss=model(torch.ones(2, 8)))


@situation(SLICES, like="elastic_weights_stay_near_those_of_an_earlier_task")
def slices_of_weights_are_written(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        w = model.up.weight
        with torch.no_grad():
            w[:, 2] = 1.0
            w[0].zero_()
            w[1:5, ::2] += torch.arange(4.0)
            w[-1] = w[2]
            w[[3, 4], [0, 1]] = torch.tensor([7.0, 8.0])
            w[w > 0.9] = 0.9
            w.t()[1].mul_(3)
            w.view(-1)[5:9].fill_(0.25)
            w[6].normal_(generator=torch.Generator().manual_seed(1))
            w.index_fill_(0, torch.tensor([7]), 0.5)
            w.masked_fill_(w < -0.2, -0.2)
            w.clamp_(max=0.8)
            w.fill_diagonal_(0.3)
            torch.add(w, 1.0, out=w)
            for row in w:
                row.div_(row.norm())
            w.renorm_(2, 0, 0.5)
            model.down.weight.data[1] = torch.arange(float(hidden))
            model.norm.weight[2] = 5.0
            model.up.bias.index_add_(0, torch.tensor([1, 2]), torch.ones(2))
        loop.see_state(model)
        loop.see(loss=model(torch.ones(2, 8)))


@situation("https://github.com/pytorch/pytorch/issues/58969", slow=(1,))
def weights_are_pruned_by_size(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        with torch.no_grad():
            for p in model.parameters():
                threshold = p.abs().flatten().kthvalue(p.numel() // 2).values
                p.mul_(p.abs() > threshold)
            loop.see(left=[int((p != 0).sum()) for p in model.parameters()])
            top = model.up.weight.abs().view(-1).topk(5)
            loop.see(top=(top.values, top.indices), rank=torch.linalg.matrix_rank(model.up.weight))
        loop.see_state(model)


# -- random numbers


@situation(NOISE, like="elastic_weights_stay_near_those_of_an_earlier_task")
def weights_are_initialised_after_they_are_cut(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        for fill in (
            nn.init.normal_,
            nn.init.uniform_,
            nn.init.xavier_uniform_,
            nn.init.xavier_normal_,
            nn.init.kaiming_normal_,
            lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)),
            lambda w: nn.init.trunc_normal_(w, std=0.02),
            lambda w: nn.init.trunc_normal_(w, std=0.02, a=-0.03, b=0.03),
            lambda w: nn.init.trunc_normal_(w, std=1.0, a=1.5, b=2.5),
            nn.init.orthogonal_,
            nn.init.eye_,
            lambda w: nn.init.sparse_(w, 0.3),
            lambda w: w.data.bernoulli_(0.3),
            lambda w: w.data.exponential_(),
            lambda w: w.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(3)),
            lambda w: w.data.random_(5),
        ):
            for linear in (model.up, model.down):
                fill(linear.weight)
            nn.init.normal_(model.norm.bias)
            loop.see_state(model)
            loop.see(next_draw=torch.rand(2))
        model.up.reset_parameters()
        loop.see_state(model)


@situation(NOISE, like="elastic_weights_stay_near_those_of_an_earlier_task")
def noise_is_added_to_weights(loop: Loop) -> None:
    for hidden in BOTH:
        model = started(loop, hidden)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
                p.add_(torch.rand_like(p) * 0.1 + torch.randint_like(p, 3))
                p.mul_(torch.bernoulli(torch.full_like(p, 0.7)))
                p.add_(torch.normal(p, 0.1)).add_(torch.randn(p.shape) * 0.01)
                p.copy_(torch.nn.functional.dropout(p, 0.2))
        loop.see_state(model)
        dropped = torch.nn.functional.dropout(model.up.weight, 0.3)
        dropped.square().sum().backward()
        loop.see(next_draw=torch.rand(2), grad=model.up.weight.grad)


# -- one module at two places


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.layers, self.alias = nn.ModuleList([block, block]), block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.alias(x).square().mean()


@situation("https://github.com/pytorch/pytorch/issues/95203")
def one_block_is_used_at_several_places(loop: Loop) -> None:
    model = loop.model(Shared())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(torch.randn(3, 8))
        loss.backward()
        optimizer.step()
        loop.see(loss=loss)
    loop.see_state(model)
