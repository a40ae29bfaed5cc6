"""Optimizers other than AdamW and SGD, beside a model on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.optimization import Adafactor


class Net(nn.Module):
    """13 features inside: no number of ranks divides them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down, self.head = nn.Linear(8, 13), nn.Linear(13, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, 11, (2, 6), generator=draw) for _ in range(2))
    return ids, labels


def train(loop: Loop, model: Any, *optimizers: torch.optim.Optimizer, steps: int = 5) -> None:
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        loop.see(loss=loss)
    loop.see_state(model)


@situation("https://github.com/huggingface/accelerate/issues/3855", ranks=(1, 2, 3), slow=(1, 3))
def state_is_made_before_the_first_call(loop: Loop) -> None:
    model = loop.model(Net())
    train(loop, model, torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True))


@situation("https://github.com/pytorch/pytorch/issues/152249", ranks=(1, 2, 3), slow=(1, 3))
def optimizers_that_do_not_work_by_element(loop: Loop) -> None:
    model = loop.model(Net())
    start = None
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.Rprop(p, lr=0.01, foreach=True),
        lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
        lambda p: Adafactor(p, scale_parameter=True, relative_step=True, warmup_init=True, beta1=0.9),
    ]
    for make in kinds:
        train(loop, model, make(model.parameters()))
        start = copy.deepcopy(model.state_dict()) if start is None else start
        model.load_state_dict(start)


@situation("https://github.com/facebookresearch/fairscale/issues/767", ranks=(1, 2, 3), slow=(1, 3))
def lbfgs_calls_the_model_in_a_closure(loop: Loop) -> None:
    model = loop.model(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
    ids, labels = batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(ids, labels)
        loss.backward()
        return loss

    for _ in range(3):
        loop.see(loss=optimizer.step(closure))
    loop.see_state(model)


@situation(
    "https://github.com/NVIDIA/Megatron-LM/issues/6676", ranks=(1, 2, 3), like="optimizers_that_do_not_work_by_element"
)
def muon_steps_matrices_and_adamw_the_rest(loop: Loop) -> None:
    model = loop.model(Net())
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and not n.startswith(("embed", "head"))]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    train(loop, model, torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01))


@situation("https://github.com/pytorch/pytorch/issues/183207", ranks=(1, 2, 3), slow=(1, 3))
def an_optimizer_has_parameters_beside_the_models(loop: Loop) -> None:
    model, scale = loop.model(Net()), nn.Linear(3, 3)
    for form in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizer = torch.optim.AdamW([*scale.parameters(), *model.parameters()], lr=0.01, **form)
        for step in range(3):
            (model(*batch(step)) + scale(torch.ones(2, 3)).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        loop.see(weight=scale.weight)
    loop.see_state(model)
