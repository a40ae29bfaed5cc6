"""Vision-language models of transformers that select by data: exact to the fp32 in which they compute their loss."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import megafx

IMAGE = 60


def idefics3() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    text = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
        "patch_size": 2,
    }  # fmt: skip
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, scale_factor=2, image_token_id=IMAGE)
    config.use_cache = False
    torch.manual_seed(0)
    return transformers.Idefics3ForConditionalGeneration(config).double()


def call(images: list[int], seed: int) -> dict[str, Tensor]:
    """A row for each number of images; what a row lacks to two is black, and the model leaves it out."""
    pixels = torch.randn(len(images), 2, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows = [[5, *[IMAGE] * (4 * n), 7, 9] + [8] * (4 * (2 - n)) for n in images]
    for row, n in enumerate(images):
        pixels[row, n:] = 0
    ids = torch.tensor(rows)
    real = (pixels != 0).all(2)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids, "pixel_values": pixels,
        "pixel_attention_mask": real,
    }  # fmt: skip


@pytest.mark.slow
def test_real_images_are_selected() -> None:
    """One graph, however many images are real."""
    plain = idefics3()
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config(), example_inputs=call([2, 1], 0))
    for inputs in (call([2, 1], 1), call([2, 2], 2), call([1, 1], 3)):
        found, wanted = model(**inputs), plain(**inputs)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)
    assert model.megafx.captures == 1


@pytest.mark.slow
def test_real_images_on_ranks() -> None:
    config = megafx.Config(tensor_model_parallel_size=2)
    verdict = megafx.verify(idefics3(), config, example_inputs=call([2, 1], 0), tolerance=1e-6)
    assert verdict and verdict.reference == "eager", verdict
