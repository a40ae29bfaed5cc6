"""Covers: a padded mask, and a number of items that changes with every call: one graph, and eager's loss and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import megafx

VOCAB, HIDDEN = 37, 24


def build() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            intermediate_size=34,
            vocab_size=VOCAB,
            num_attention_heads=6,
            num_key_value_heads=3,
            max_position_embeddings=64,
            pad_token_id=0,
            use_cache=False,
        )
    )


IDS = torch.randint(1, VOCAB, (3, 10), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones_like(IDS)
PADDED[0, 7:] = 0

STRUCTURES: dict[str, Any] = {
    "labels": {"input_ids": IDS, "labels": IDS},
    "padded_mask": {"input_ids": IDS, "labels": IDS, "attention_mask": PADDED},
}


def assert_same_step(model: Any, eager: Any, kwargs: dict[str, Any]) -> None:
    """One forward and backward of both; outputs and every gradient."""
    found, wanted = model(**kwargs), eager(**kwargs)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found.logits, wanted.logits.detach(), check_device=False)
    found.loss.backward()
    wanted.loss.backward()
    assert_same_gradients(model, eager)


def assert_same_gradients(model: Any, eager: Any) -> None:
    pairs = zip(model.named_parameters(), eager.named_parameters(), strict=True)
    for (name, a), (_, b) in pairs:
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = build()
    eager = copy.deepcopy(model)
    return megafx.parallelize(model), eager


def test_padded_mask(pair: tuple[Any, Any]) -> None:
    model, eager = pair
    for m in pair:
        m.zero_grad()
    assert_same_step(model, eager, STRUCTURES["padded_mask"])


def test_gradients_accumulate_with_a_changing_number_of_items(pair: tuple[Any, Any]) -> None:
    """num_items_in_batch of every call its own: after its second value it is an input of one graph."""
    model, eager = pair
    for m in pair:
        m.zero_grad()
        for items in (30, 17, 23, 41):
            m(**STRUCTURES["labels"], num_items_in_batch=items).loss.backward()
    assert_same_gradients(model, eager)
    before = model.megafx.captures
    model(**STRUCTURES["labels"], num_items_in_batch=99)
    assert model.megafx.captures == before
