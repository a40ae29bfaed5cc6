"""Gradients of gradients, and other forms of differentiation around a model."""

from __future__ import annotations

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

PENALTY = "https://github.com/pytorch/pytorch/issues/159959"


def critic(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LayerNorm(width), nn.Linear(width, 1))


@situation(PENALTY)
def a_gradient_penalty_is_part_of_the_loss(loop: Loop) -> None:
    model = loop.model(critic())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.randn(5, 8).t().contiguous().t().requires_grad_()
        score = model(x)
        (found,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        penalty = ((found.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        (score.mean() + 10 * penalty).backward()
        loop.see(score=score, penalty=penalty)
        loop.see_gradients(model)
        optimizer.step()


@situation("https://github.com/NVlabs/stylegan2-ada-pytorch/issues/6")
def a_penalty_has_a_step_of_its_own(loop: Loop) -> None:
    """StyleGAN2's lazy regularisation. Biases that it does not depend on have no gradient, and no momentum moves them."""
    model = loop.model(critic())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        x = torch.randn(5, 8, requires_grad=True)
        score = model(x)
        optimizer.zero_grad()
        if step == 1:
            (found,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            found.square().sum().backward()
        else:
            score.square().mean().backward()
        loop.see(without=[name for name, p in model.named_parameters() if p.grad is None])
        loop.see_gradients(model)
        optimizer.step()
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/hessian-vector-product-optimization/12581")
def a_hessian_times_a_vector(loop: Loop) -> None:
    model = loop.model(critic(15))
    loss = model(torch.randn(5, 8)).square().mean()
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    second = torch.autograd.grad(sum((g * torch.ones_like(g)).sum() for g in first), parameters)
    loop.see(first=list(first), second=list(second))


@situation(PENALTY)
def a_jvp_by_two_backwards(loop: Loop) -> None:
    model = loop.model(critic())
    x = torch.randn(5, 8)
    value, tangent = torch.autograd.functional.jvp(model, x, torch.ones_like(x))
    loop.see(value=value, tangent=tangent)


@situation(PENALTY)
def a_penalty_taken_under_autocast_of_a_call_outside_it(loop: Loop) -> None:
    model, x = loop.model(critic()), torch.randn(5, 8, requires_grad=True)
    score = model(x).sum()
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = torch.autograd.grad(score, x, create_graph=True)
    (score + found.square().sum()).backward()
    loop.see(found=found)
    loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/91469", like="a_gradient_penalty_is_part_of_the_loss")
def forces_are_the_gradient_of_an_energy(loop: Loop) -> None:
    model, x = loop.model(critic()), torch.randn(5, 8, requires_grad=True)
    energy = model(x).sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    loop.see(energy=energy, forces=forces)
    (energy + forces.square().sum()).backward()
    loop.see_gradients(model)


class Recurrent(nn.Module):
    """Leaves tensors behind, counts, and reads an attribute that the user changes."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out, self.scale, self.calls = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 1), 1.0, 0
        self.norms: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(x)
        self.calls += 1
        self.energy = h.square().mean()
        self.norms.append(h.norm())
        return self.out(h) * self.scale


@situation("https://github.com/pytorch/pytorch/issues/91469")
def a_penalty_of_a_model_with_hooks_on_tensors_and_state(loop: Loop) -> None:
    model = loop.model(Recurrent())
    model.out.weight.register_hook(lambda g: 3 * g)
    for scale in (1.0, 0.5):
        model.scale = scale
        x = torch.randn(5, 2, 8, requires_grad=True)
        x.register_hook(lambda g: 2 * g)
        y = model(x)
        energy = model.energy
        wanted = [x, model.out.weight]
        first = torch.autograd.grad(y.square().mean() + energy, wanted, create_graph=True)
        (sum(g.square().sum() for g in first) + energy).backward()
        loop.see(first=first, x=x.grad, energy=model.energy, norms=model.norms, calls=model.calls)
        loop.see_gradients(model)


class Critic(nn.Module):
    """Batch norm in training and spectral norm write buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6)
        self.up = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(24, 12))
        self.score = torch.nn.utils.spectral_norm(nn.Linear(12, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.score(torch.tanh(self.up(F.leaky_relu(self.norm(self.conv(x)), 0.2).flatten(1))))


@situation(
    "https://github.com/caogang/wgan-gp/issues/11",
    like="a_penalty_of_a_critic_whose_statistics_are_means_over_all_batches",
)
def a_penalty_of_a_critic_with_batch_norm_and_spectral_norm(loop: Loop) -> None:
    model = loop.model(Critic())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
    for _ in range(2):
        real, fake, share = torch.randn(5, 2, 4), torch.randn(5, 2, 4), torch.rand(5, 1, 1)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        scores = model(real), model(fake), model(mixed)
        (found,) = torch.autograd.grad(scores[2].sum(), mixed, create_graph=True)
        penalty = ((found.flatten(1).norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        (scores[1].mean() - scores[0].mean() + 10 * penalty).backward()
        loop.see(penalty=penalty)
        loop.see_gradients(model)
        optimizer.step()
    loop.see_state(model)
    model.eval()
    loop.see(score=model(real))


@situation("https://github.com/caogang/wgan-gp/issues/11", ranks=(1,))
def a_penalty_of_a_critic_whose_statistics_are_means_over_all_batches(loop: Loop) -> None:
    critic = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 1))
    model = loop.model(critic)
    for _ in range(2):
        x = torch.randn(5, 4, requires_grad=True)
        score = model(x)
        (found,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        (score.square().mean() + found.square().sum()).backward()
    loop.see_gradients(model)
    loop.see_state(model)


class Writing(nn.Module):
    """Writes a frozen parameter, a buffer, a tensor of an attribute, and twice its argument; counts, and decides by that."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.slow = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(6))
        self.alias, self.kept, self.calls, self.scale = self.mean, torch.ones(6), 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scale *= 0.9
        with torch.no_grad():
            self.slow.weight.mul_(0.9).add_(self.up.weight, alpha=0.1)
            self.mean.mul_(0.5).add_(x.mean(0))
            self.kept.mul_(1.5)
        x.mul_(self.kept)
        h = torch.tanh(self.up(x + self.mean) + self.slow(x)) * self.scale
        y = self.down(h if self.calls % 2 else h * 2)
        x.add_(y.sum())
        self.energy = y.square().mean()
        return y


@situation(PENALTY)
def a_penalty_of_a_call_that_writes(loop: Loop) -> None:
    model = loop.model(Writing())
    for _ in range(3):
        leaf = torch.randn(5, 6, requires_grad=True)
        x = leaf * 3
        y = model(x)
        wanted = [leaf, *(p for p in model.parameters() if p.requires_grad)]
        first = torch.autograd.grad(y.square().sum() + x.sum() + model.energy, wanted, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        loop.see(first=first, leaf=leaf.grad, x=x, kept=model.kept, counted=[model.calls, model.scale])
        loop.see_gradients(model)
    loop.see_state(model)


class Signed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor, offset: float) -> Tensor:
        return torch.copysign(self.up(x).abs(), torch.full_like(x, offset))


@situation("https://github.com/pytorch/pytorch/issues/112567")
def zeros_of_both_signs_are_given(loop: Loop) -> None:
    model, x = loop.model(Signed()), torch.randn(3, 4)
    for offset in (0.0, -0.0, 0.0):
        loop.see(out=model(x, offset))


@situation("https://github.com/pytorch/pytorch/issues/109052")
def anomalies_are_looked_for(loop: Loop) -> None:
    model = loop.model(critic())
    with torch.autograd.detect_anomaly(check_nan=True):
        model(torch.randn(5, 8)).square().mean().backward()
    loop.see_gradients(model)


class Tied(nn.Module):
    """A loss and logits of tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.head = nn.Embedding(12, 8), nn.Linear(8, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.up(self.embedding(tokens))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}


@situation("https://github.com/pytorch/pytorch/issues/96655")
def weights_are_adapted_by_differentiable_steps(loop: Loop) -> None:
    """MAML: the second step, and the meta loss, are of weights that are no parameters any more once the call is over."""
    model = loop.model(Tied())
    for _ in range(2):
        weights = dict(model.named_parameters())
        for _ in range(2):
            loss = torch.func.functional_call(model, weights, (torch.randint(0, 12, (2, 5)),))["loss"]
            found = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            loop.see(loss=loss, found=[g.norm() for g in found])
            weights = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), found, strict=True)}
        result = torch.func.functional_call(model, weights, (torch.randint(0, 12, (2, 5)),))
        model.zero_grad()
        (result["loss"] + 0.1 * result["logits"].square().mean()).backward()
        loop.see(result=result)
        loop.see_gradients(model)


@situation("https://github.com/pytorch/pytorch/issues/96655", like="weights_are_adapted_by_differentiable_steps")
def a_weight_is_replaced_before_backward(loop: Loop) -> None:
    """Of a loss and of logits, whose gradient is computed by one call more: of the weight that the call had."""
    model = loop.model(Tied())
    for _ in range(3):
        result, before = model(torch.randint(0, 12, (2, 5))), model.up.weight
        model.up.weight = nn.Parameter(before.detach() * 2)
        model.zero_grad()
        (result["loss"] + 0.1 * result["logits"].square().mean()).backward()
        loop.see(result=result, before=before.grad)
        loop.see_gradients(model)
