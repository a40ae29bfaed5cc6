"""Which calls share a graph."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import megafx
from megafx.capture.prepare import configs_of
from megafx.runtime.keys import Call, KeyMaker, Normalizer, autocast_state, describe, module_state, parameter_state
from megafx.runtime.module import announce


def key_of(maker: KeyMaker, *args, grad=True, state=None, **kwargs):
    call = Call.of(args, kwargs)
    state = (module_state([], []), parameter_state([])) if state is None else state
    return maker.key(maker.skeleton(call, state, grad), call)


IDS = torch.zeros(2, 3, dtype=torch.int64)


def test_sizes_and_keyword_order_are_not_in_the_key():
    maker = KeyMaker()
    first = key_of(maker, ids=IDS, labels=IDS)
    assert key_of(maker, labels=IDS[:1], ids=IDS[:1]) == first


@pytest.mark.parametrize(
    "change",
    [
        {"ids": IDS.float()},
        {"ids": IDS[0]},
        {"ids": [IDS]},
        {"ids": IDS, "more": IDS},
        {"ids": IDS, "flag": True},
        {"ids": IDS.float().requires_grad_()},
    ],
    ids=["dtype", "rank", "structure", "another input", "Python value", "requires_grad"],
)
def test_what_capture_bakes_in_is_in_the_key(change):
    maker = KeyMaker()
    others = [key_of(maker, ids=IDS), key_of(maker, ids=IDS.float())]
    assert key_of(maker, **change) not in (
        others if change["ids"] is IDS or isinstance(change["ids"], list) else others[:1]
    )


def test_requires_grad_of_inputs_counts_with_grad_mode_only():
    maker = KeyMaker()
    x = torch.ones(2)
    y = torch.ones(2, requires_grad=True)
    assert key_of(maker, x) != key_of(maker, y)
    assert key_of(maker, x, grad=False) == key_of(maker, y, grad=False)
    assert key_of(maker, x, grad=False) != key_of(maker, x)


def test_state_of_modules_and_parameters_is_in_the_key():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    maker = KeyMaker()

    def key():
        return key_of(
            maker, IDS, state=(module_state(list(model.modules()), []), parameter_state(list(model.parameters())))
        )

    keys = [key()]
    model[1].eval()
    keys.append(key())
    model[0].bias.requires_grad_(False)
    keys.append(key())
    model.double()
    keys.append(key())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(key())
        assert autocast_state() == (("cpu", torch.bfloat16, True),)
    assert len(set(keys)) == 5
    assert key() == keys[3]


def test_a_number_that_varies_becomes_an_input():
    maker = KeyMaker()
    first, none = key_of(maker, IDS, scale=1.0, n=3)
    second, scale = key_of(maker, IDS, scale=2.0, n=3)
    third, still = key_of(maker, IDS, scale=5.0, n=3)
    assert not none and len(scale) == 1
    assert first != second
    assert (second, scale) == (third, still)
    assert key_of(maker, IDS, scale=5.0, n=4)[1] > scale


def test_a_number_that_cannot_be_an_input_has_one_graph_a_value():
    maker = KeyMaker()
    call = Call.of((IDS, 1), {})
    skeleton = maker.skeleton(call, (), True)
    maker.key(skeleton, call)
    assert maker.key(skeleton, Call.of((IDS, 2), {}))[1] == {1}
    maker.numbers.bake(skeleton)
    keys = [maker.key(skeleton, Call.of((IDS, n), {})) for n in (1, 2, 3)]
    assert len({k for k, _ in keys}) == 3
    assert all(not varying for _, varying in keys)


class Model(nn.Module):
    def forward(self, ids, labels=None, *, scale=1.0):
        return ids


class Positional(nn.Module):
    def forward(self, *args, **kwargs):
        return args


def test_spellings_of_one_call_are_one():
    normalize = Normalizer(Model().forward)
    expected = ((), {"ids": 1})
    assert normalize((1,), {}) == normalize((), {"ids": 1}) == normalize((1, None), {}) == expected
    assert normalize((1, 2), {"scale": 3}) == ((), {"ids": 1, "labels": 2, "scale": 3})
    assert Normalizer(Positional().forward)((1,), {"b": 2}) == ((1,), {"b": 2})


def test_an_argument_given_twice_is_left_for_forward_to_refuse():
    assert Normalizer(Model().forward)((1,), {"ids": 2}) == ((1,), {"ids": 2})


def test_ranks_compare_values_of_any_strides() -> None:
    """A column of ids, as generation with a static cache passes it, has the numbers of its copy."""
    ids = torch.arange(14).reshape(2, 7)
    column, other = ids[:, -1:], ids[:, :1]
    numbers = [Call.of((x,), {}).numbers() for x in (column, column.clone(), other)]
    assert numbers[0] == numbers[1] != numbers[2]


class Naming(nn.Module):
    """Names each step, in forward or outside of it."""

    def __init__(self, names: bool) -> None:
        super().__init__()
        self.linear, self.step, self.names, self.name = nn.Linear(2, 2), 0, names, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.names:
            self.name = f"step {self.step}"
        return self.linear(x) / self.step


def test_a_graph_for_each_call_is_noted_once() -> None:
    config = megafx.Config(tensor_model_parallel_size=1, cache=False)
    naming, plain = (megafx.parallelize(Naming(names), config) for names in (True, False))
    with pytest.warns(UserWarning, match="captured this model 9 times .* forward reads 'step', which changed") as seen:
        for _ in range(11):
            naming(torch.ones(1, 2))
    assert len(seen) == 1 and naming.name == "step 11"
    for _ in range(11):
        plain(torch.ones(1, 2))
    assert plain.megafx.captures < 4


def test_ranks_agree_where_one_alone_has_imported_transformers(monkeypatch):
    """`announce` gives the model's config the sizes in a class of transformers where that is there."""
    import transformers.distributed.configuration_utils as of_transformers

    def said():
        model = nn.Linear(2, 2)
        model.config = SimpleNamespace(use_cache=True)
        announce(model, 2, 1)
        call = Call.of((), {"x": torch.ones(3, 2)})
        text = describe(call, list(model.modules()), configs_of(model), dict(model.named_parameters()), True)
        return type(model.config.distributed_config), text

    (kind, with_it), _ = said(), monkeypatch.delitem(sys.modules, of_transformers.__name__)
    other, without = said()
    assert kind is of_transformers.DistributedConfig and other is not kind
    assert with_it == without
