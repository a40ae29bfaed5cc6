"""Which tensor, or which module, it is: `id(x)` in forward, tables by modules and by addresses, `self is first`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from loop import Loop, situation
from torch import Tensor, nn

BY_ID = "https://github.com/sgl-project/sglang/pull/32541"  # entries of a cache by id(tensor)
SHIFTED = "https://discuss.huggingface.co/t/where-does-the-transformers-do-the-target-text-shifting-in-causal-lm/32408"
TABLES = "https://github.com/facebookresearch/fairseq/blob/main/fairseq/incremental_decoding_utils.py"


class Net(nn.Module):
    """forward gives what `computes` makes of (the model, two batches [rows, 5])."""

    def __init__(self, computes: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 5)
        self.computes, self.memo, self.calls = computes, dict[Any, Any](), 0
        self.scale = {id(self.up): 2.0, id(self.up.weight): 3.0, id(self.down.weight): 0.5}

    def of(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.computes(self, x, y)


def by_id(model: Any, x: Tensor, y: Tensor) -> Tensor:
    if id(x) not in model.memo:
        model.memo[id(x)] = x.detach().mean(0)
    return model.of(x) * model.memo[id(x)] + model.of(y)


def counts(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.memo[id(x)] = model.memo.get(id(x), 0) + 1
    return model.of(x) * model.memo[id(x)] + model.of(y)


def the_last(model: Any, x: Tensor, y: Tensor) -> Tensor:
    if model.memo.get("last") != id(x):
        model.memo["last"], model.calls = id(x), model.calls + 1
    return model.of(x) * model.calls + model.of(y)


def within_a_call(model: Any, x: Tensor, y: Tensor) -> Tensor:
    seen: dict[int, Tensor] = {}
    for each in (x, y, x):
        if id(each) not in seen:
            seen[id(each)] = model.of(each)
    return sum((seen[id(each)] for each in (x, y, x)), torch.zeros(()))


def of_one_call(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.memo.clear()
    h = model.up(x)
    model.memo[id(h)] = h.relu()
    return model.down(model.memo[id(h)]) + model.of(y)


def of_parameters(model: Any, x: Tensor, y: Tensor) -> Tensor:
    up, down = model.scale[id(model.up.weight)], model.scale[id(model.down.weight)]
    return model.of(x) * up + model.of(y) * down * model.scale[id(model.up)]


def _calls(loop: Loop, computes: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    model, some = loop.model(Net(computes)), [torch.randn(4, 5) for _ in range(3)]
    for a, b in ((0, 1), (0, 1), (1, 0), (2, 2), (0, 1)):
        loss = model(some[a], some[b]).square().mean()
        loss.backward()
        loop.see(loss=loss, kept=len(model.memo), calls=model.calls)
    loop.see_gradients(model)


for _computes in (by_id, counts, the_last, within_a_call, of_one_call, of_parameters):

    def _situation(loop: Loop, computes: Callable[[Any, Tensor, Tensor], Tensor] = _computes) -> None:
        _calls(loop, computes)

    _situation.__name__ = f"addresses_{_computes.__name__}"
    # what is kept by an address has other names on other ranks, which is an error there
    _ranks = (1,) if _computes in (by_id, counts, of_one_call) else (1, 2)
    situation(BY_ID, ranks=_ranks, like="addresses_by_id" if _computes is counts else "")(_situation)


TABLE: dict[Any, Any] = {}


class Layer(nn.Module):
    def __init__(self, scale: Callable[[Layer], Any]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5), scale

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).relu() * self.scale(self)


def _layers(loop: Loop, scale: Callable[[Layer], Any]) -> None:
    plain = nn.Sequential(*[Layer(scale) for _ in range(4)])
    TABLE.clear()
    for number, layer in enumerate(plain):
        TABLE[layer] = TABLE[id(layer)] = TABLE[id(layer.linear.weight)] = number + 1.0
    TABLE["first"], TABLE["all"] = plain[0], [*plain]
    model, x = loop.model(plain), torch.randn(4, 5)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


_SCALES: dict[str, Callable[[Layer], Any]] = {
    "by_itself": lambda layer: TABLE[layer],
    "by_its_address": lambda layer: TABLE[id(layer)],
    "by_the_address_of_a_weight": lambda layer: TABLE[id(layer.linear.weight)],
    "that_is_the_first": lambda layer: 3 if layer is TABLE["first"] else 1,
    "by_its_place": lambda layer: 1 + TABLE["all"].index(layer),
}
_LIKE = {
    "by_itself": "by_its_place",
    "by_its_address": "by_the_address_of_a_weight",
    "that_is_the_first": "by_its_place",
}
for _name, _scale in _SCALES.items():

    def _of_layers(loop: Loop, scale: Callable[[Layer], Any] = _scale) -> None:
        _layers(loop, scale)

    _of_layers.__name__ = f"a_layer_{_name}"
    situation(TABLES, like=f"a_layer_{_LIKE[_name]}" if _name in _LIKE else "")(_of_layers)


class Shifting(nn.Module):
    """A language model that shifts its labels by itself where they are the very input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(ids))
        if labels is ids:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Plain(Shifting):
    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.embed(ids))
        assert labels is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _train(loop: Loop, model: nn.Module) -> Any:
    ids, labels = torch.randint(16, (2, 3, 5))
    model = loop.model(model, example_inputs=(ids, ids))
    for of_loss in (ids, labels, ids.clone(), ids):
        loss = model(ids, of_loss)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)
    return model


@situation(SHIFTED, like="one_graph_serves_labels_that_are_the_input")
def labels_are_the_input_itself(loop: Loop) -> None:
    _train(loop, Shifting())


@situation(SHIFTED, slow=(2,))
def one_graph_serves_labels_that_are_the_input(loop: Loop) -> None:
    model = _train(loop, Plain())
    loop.see(graphs=1 if loop.eager else len(model.megafx.graphs))
