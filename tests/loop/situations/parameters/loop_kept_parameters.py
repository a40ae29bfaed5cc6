"""Parameters that were kept from before `parallelize`: in lists, dicts, optimizers, closures and hooks. On several ranks the
model has others in their place."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

import megafx

OPTIMIZER = "https://discuss.pytorch.org/t/should-the-optimizer-be-created-before-or-after-wrapping-the-model/66672"
EMA = "https://github.com/fadel/pytorch_ema"
FORMS = ("ddp", "fsdp")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def _batch(loop: Loop, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return loop.rows(torch.randn(4, 7))


def _train(loop: Loop, model: nn.Module, optimizer: Any, seeds: range) -> None:
    for seed in seeds:
        loss = model(_batch(loop, seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.see(loss=loop.mean(loss))


@situation(OPTIMIZER, data=FORMS)
def an_optimizer_and_a_scheduler_are_made_before(loop: Loop) -> None:
    plain = Model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    model = loop.model(plain)
    for seed in range(3):
        _train(loop, model, optimizer, range(seed, seed + 1))
        scheduler.step()
        loop.see(lr=optimizer.param_groups[0]["lr"])
    loop.see_state(model)


@situation(OPTIMIZER, like="groups_of_kept_parameters_are_added")
def optimizers_have_stepped_before(loop: Loop) -> None:
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"momentum": 0.9}),
    ]
    for kind, options in kinds:
        torch.manual_seed(0)
        plain = Model()
        optimizer = kind(plain.parameters(), lr=0.01, **options)
        plain(torch.randn(4, 7)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model = loop.model(plain)
        _train(loop, model, optimizer, range(3))
        loop.see_state(model)


@situation(OPTIMIZER)
def gradients_of_before_are_stepped_after(loop: Loop) -> None:
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(torch.randn(4, 7)).backward()
    model = loop.model(plain)
    optimizer.step()
    optimizer.zero_grad()
    _train(loop, model, optimizer, range(2))
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/1489", data=FORMS)
def groups_of_kept_parameters_are_added(loop: Loop) -> None:
    plain = Model()
    kept = list(plain.parameters())
    model = loop.model(plain)
    optimizer = torch.optim.AdamW(kept[:2], lr=0.1)
    optimizer.add_param_group({"params": kept[2:3], "lr": 0.01})
    _train(loop, model, optimizer, range(2))
    optimizer.add_param_group({"params": kept[3:], "lr": 0.01})
    _train(loop, model, optimizer, range(2, 4))
    loop.see_state(model)


@situation(EMA, data=FORMS)
def averages_and_target_networks_of_kept_parameters(loop: Loop) -> None:
    plain = Model()
    kept = list(plain.parameters())
    averages = [p.detach().clone() for p in kept]
    model = loop.model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        _train(loop, model, optimizer, range(seed, seed + 1))
        with torch.no_grad():
            for average, p in zip(averages, kept, strict=True):
                average.lerp_(p, 0.5)
    loop.see(averages=averages)
    for average, p in zip(averages, kept, strict=True):
        p.data.copy_(average)
    _train(loop, model, optimizer, range(3, 4))
    for average, p in zip(averages, kept, strict=True):
        p.data = average * 0.5
    _train(loop, model, optimizer, range(4, 5))
    loop.see_state(model)


@situation("https://github.com/moskomule/ewc.pytorch", data=FORMS)
def penalties_clipping_and_gradients_of_kept_parameters(loop: Loop) -> None:
    plain = Model()
    kept, old = dict(plain.named_parameters()), {n: p.detach().clone() for n, p in plain.named_parameters()}
    model = loop.model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for seed in range(3):
        penalty = sum((p - old[name]).square().sum() for name, p in kept.items())
        (model(_batch(loop, seed)) + 0.1 * penalty).backward()
        loop.see(norm=torch.nn.utils.clip_grad_norm_(kept.values(), 0.5), penalty=penalty)
        loop.see(gradients=[p.grad for p in kept.values()])
        optimizer.step()
        for p in kept.values():
            p.grad = None
    for p in kept.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    loop.see_state(model)


@situation("https://discuss.pytorch.org/t/how-the-pytorch-freeze-network-in-some-layers/7088", data=FORMS)
def kept_parameters_are_frozen(loop: Loop) -> None:
    plain = Model()
    kept = list(plain.up.parameters())
    model = loop.model(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(loop, model, optimizer, range(1))
    for p in kept:
        p.requires_grad = False
    _train(loop, model, optimizer, range(1, 2))
    loop.see(frozen=[p.requires_grad for p in model.parameters()])
    for p in kept:
        p.requires_grad_(True)
    _train(loop, model, optimizer, range(2, 3))
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/117758", data=FORMS)
def hooks_of_kept_parameters(loop: Loop) -> None:
    plain, seen = Model(), list[int]()
    weight, bias = plain.up.weight, plain.up.bias
    weight.register_hook(lambda g: g + 0.1 * weight.detach())
    model = loop.model(plain)
    model(_batch(loop, 0)).backward()
    bias.register_hook(lambda g: (seen.append(1), g * 2)[1])
    model(_batch(loop, 1)).backward()
    loop.see(seen=len(seen))
    loop.see_gradients(model)


@situation("https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html", data=FORMS)
def steps_in_backward_by_optimizers_of_before(loop: Loop) -> None:
    plain = Model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in plain.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in plain.parameters():
        p.register_post_accumulate_grad_hook(step)
    model = loop.model(plain)
    for seed in range(3):
        loss = model(_batch(loop, seed))
        loss.backward()
        loop.see(loss=loop.mean(loss))
    loop.see_state(model)


@situation("https://github.com/davda54/sam")
def sharpness_aware_steps_by_an_optimizer_of_before(loop: Loop) -> None:
    plain = Model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    model = loop.model(plain)
    for seed in range(2):
        batch, moved = _batch(loop, seed), dict[Any, Tensor]()
        model(batch).backward()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        with torch.no_grad():
            for p in held:
                moved[p] = p.grad * (0.05 / norm)
                p.add_(moved[p])
        optimizer.zero_grad()
        model(batch).backward()
        with torch.no_grad():
            for p in held:
                p.sub_(moved[p])
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)


@situation("https://github.com/pytorch/pytorch/issues/144289")
def kept_parameters_are_read_written_and_copied(loop: Loop) -> None:
    plain = Model()
    kept = list(plain.parameters())
    other = nn.Linear(7, 12)
    other.weight = kept[0]  # of a model that is not parallelized
    model = loop.model(plain)
    loss = model(torch.randn(4, 7)) + other(torch.randn(4, 7)).square().mean()
    loop.see(gradients=torch.autograd.grad(loss, kept, retain_graph=True))
    loss.backward()
    loop.see(
        sizes=[(tuple(p.shape), len(p), p.numel(), p.dtype, p.is_leaf, isinstance(p, nn.Parameter)) for p in kept],
        vector=nn.utils.parameters_to_vector(kept),
        rows=[row.sum() for row in kept[0]][:2],
        product=kept[0] @ kept[0].T,
        number=kept[1].sum().item(),
    )
    with torch.no_grad():
        kept[0][:, 2] = 1.0
        kept[1] -= 0.5
        kept[2].copy_(torch.ones(6, 12))
        torch._foreach_mul_([p.data for p in kept], 0.5)
    nn.utils.clip_grad_value_(kept, 0.001)
    kept[1].grad.zero_()
    nn.init.normal_(kept[2])
    copies = copy.deepcopy(kept)
    copies[0].data.zero_()
    loop.see_gradients(model)
    loop.see_state(model)


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.again, self.average = nn.LayerNorm(7), nn.Linear(7, 12), nn.BatchNorm1d(7)
        self.again.weight, self.norm.bias = self.up.weight, self.norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(self.average(x))) + self.again(x).square().mean()


@situation(
    "https://discuss.pytorch.org/t/saving-model-state-dict-the-best-model-is-overwritten/107013",
    data=FORMS,
    like="a_part_of_a_buffer_is_written_through_data",
)
def whole_tensors_of_the_best_step_are_kept(loop: Loop) -> None:
    model = loop.model(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(loop, model, optimizer, range(1))
    model(_batch(loop, 1)).backward()
    best = copy.deepcopy(model.state_dict()) if loop.eager else megafx.full_state_dict(model)
    first = {n: p.grad for n, p in model.named_parameters()}
    first = copy.deepcopy(first) if loop.eager else megafx.full_gradients(model)
    norm = model.norm.weight.detach()
    norm = norm.clone() if not hasattr(norm, "full_tensor") else norm.full_tensor()
    optimizer.step()
    _train(loop, model, optimizer, range(2, 4))
    loop.see(best=best, gradients=first, norm=norm)
    memory = [value.data_ptr() for value in best.values()]
    loop.see(tied=[memory.index(each) for each in memory])
    model.load_state_dict(best)
    _train(loop, model, optimizer, range(1, 2))
    loop.see_state(model)
