"""Models whose modules and parameters are added, replaced, tied or cut between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn
from torch.nn import functional as F

LAST_LAYER = "https://discuss.pytorch.org/t/how-to-modify-the-final-fc-layer-based-on-the-torch-model/766"
SHARING = "https://discuss.pytorch.org/t/how-to-create-model-with-sharing-weight/398"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Ids [rows, length] -> logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(8))])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        for scale in self.scales:
            x = x * scale
        if (offset := getattr(self, "offset", None)) is not None:
            x = x + offset
        return self.head(x)


def trained(loop: Loop, model: nn.Module, ids: Tensor) -> None:
    """Two steps. The optimizer is made once the model was called as it is now."""
    model(ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(model)
        optimizer.step()
    loop.see_state(model)


@situation(LAST_LAYER)
def layers_are_replaced(loop: Loop) -> None:
    """A new head, a block that does nothing, and a parameter of another value."""
    model, ids = loop.model(Net()), torch.randint(12, (2, 5))
    trained(loop, model, ids)
    model.head = nn.Linear(8, 12)
    model.blocks[0] = nn.Identity()
    trained(loop, model, ids)
    model.head.bias = nn.Parameter(torch.linspace(0, 1, 12))
    model.blocks[1].up.bias = None
    trained(loop, model, ids)


@situation("https://github.com/google-research/bert/issues/1063", like="neurons_are_cut_out")
def a_model_grows_and_shrinks(loop: Loop) -> None:
    """Blocks are removed, put into another order, copied and appended; parameters come in lists and by name."""
    model, ids = loop.model(Net()), torch.randint(12, (2, 5))
    trained(loop, model, ids)
    del model.blocks[1]
    model.blocks = nn.ModuleList([*model.blocks][::-1])
    trained(loop, model, ids)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    model.blocks.append(Block())
    model.scales.append(nn.Parameter(torch.full((8,), 0.5)))
    model.offset = nn.Parameter(torch.linspace(0, 1, 8))
    trained(loop, model, ids)


@situation(SHARING)
def weights_are_tied_and_untied(loop: Loop) -> None:
    """Head and embedding; two blocks that were one."""
    plain = Net()
    plain.blocks[1], plain.head.weight = plain.blocks[0], plain.embed.weight
    model, ids = loop.model(plain), torch.randint(12, (2, 5))
    trained(loop, model, ids)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone() * 2)
    trained(loop, model, ids)
    model.head.weight = model.embed.weight
    model.blocks[1] = copy.deepcopy(model.blocks[1])
    trained(loop, model, ids)


@situation(SHARING, like="layers_are_replaced")
def matrices_change_places(loop: Loop) -> None:
    """Ranks have cut the two along different dims."""
    plain: nn.Module = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 12))
    model, ids = loop.model(plain), torch.randint(12, (2, 5))
    trained(loop, model, ids)
    model[1].weight, model[3].weight = model[3].weight, model[1].weight
    trained(loop, model, ids)
    model[3].weight = model[1].weight
    trained(loop, model, ids)


@situation("https://github.com/VainF/Torch-Pruning")
def neurons_are_cut_out(loop: Loop) -> None:
    model, ids = loop.model(Net()), torch.randint(12, (2, 5))
    trained(loop, model, ids)
    for block in model.blocks:
        block.up.weight, block.up.bias, block.down.weight = (
            nn.Parameter(x.detach().clone())
            for x in (block.up.weight[:10], block.up.bias[:10], block.down.weight[:, :10])
        )
    trained(loop, model, ids)


@situation(LAST_LAYER, ranks=(2,))
def blocks_are_called_by_themselves_in_another_order(loop: Loop) -> None:
    model, ids, x = loop.model(Net()), torch.randint(12, (2, 5)), torch.randn(2, 5, 8)
    trained(loop, model, ids)
    loop.see(before=[block(x) for block in model.blocks])
    model.blocks = nn.ModuleList([*model.blocks][::-1])
    loop.see(after=[block(x) for block in model.blocks])
    trained(loop, model, ids)
    loop.see(trained=[block(x) for block in model.blocks])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids)))).square().mean()


@situation("https://github.com/huggingface/transformers/issues/35862", data=("ddp", "fsdp"), slow=(1, "fsdp"))
def a_state_is_assigned_to_tied_weights(loop: Loop) -> None:
    """They part: into two over one memory, two with values of their own, or one that the state does not have."""
    for how in ("shared", "own", "one", "tied again"):
        torch.manual_seed(0)
        model, other = loop.model(Tied()), Tied()

        def train(steps: int, model: nn.Module = model) -> None:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
            for _ in range(steps):
                loss = model(loop.rows(torch.randint(11, (4, 5))))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loop.see(loss=loop.mean(loss))

        train(2)
        state = {n: v if how == "shared" else v.clone() for n, v in other.state_dict().items()}
        if how == "one":
            del state["embed.weight"]
        model.load_state_dict(state, strict=False, assign=True)
        if how == "tied again":
            model.head.weight = model.embed.weight
        train(2)
        loop.see(count=len([*model.parameters()]))
        loop.see_state(model)


class Adapted(nn.Module):
    """A linear layer with an adapter of two dims."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(7, 12), nn.Linear(12, 5)
        self.gain: nn.Parameter | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x).tanh()
        h = h if self.gain is None else h * self.gain
        h = h + self.extra(h) if hasattr(self, "extra") else h
        return F.cross_entropy(self.head(h), y)


@situation(
    "https://github.com/huggingface/peft/issues/1115", data=("ddp", "zero1", "fsdp"), slow=(1, 2, "zero1", "fsdp")
)
def heads_modules_adapters_and_parameters_come_between_steps(loop: Loop) -> None:
    changes: list[Callable[[Any], object]] = [
        lambda m: setattr(m, "head", nn.Linear(12, 6)),
        lambda m: setattr(m, "head", nn.Linear(12, 5)),
        lambda m: m.add_module("extra", nn.Linear(12, 12)),
        lambda m: (m.requires_grad_(False), setattr(m, "up", Adapted(m.up))),
        lambda m: setattr(m, "gain", nn.Parameter(torch.ones(12))),
    ]
    for change in changes:
        torch.manual_seed(0)
        model = loop.model(Grows())
        for _ in range(2):
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
            for _ in range(2):
                loss = model(loop.rows(torch.randn(6, 7)), loop.rows(torch.randint(0, 5, (6,))))
                optimizer.zero_grad()
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                loop.see(loss=loop.mean(loss), norm=norm)
            if not hasattr(model, "changed"):
                model.changed = True
                change(model)
        loop.see_state(model)
