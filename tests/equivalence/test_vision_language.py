"""Vision-language models of transformers that select by data, or need the values of images' grids, with images and text."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from typing import Any

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


# -- Qwen2-VL and its successors: what needs the values of the grids stays eager; Gemma 3: masks by the image

TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 80, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 8,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
VISION = {
    "depth": 2,
    "num_heads": 4,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "spatial_merge_size": 2,
}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32}
QWEN: dict[str, dict[str, Any]] = {
    "Qwen2VL": {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
    "Qwen2_5_VL": SIZES | {"window_size": 8, "fullatt_block_indexes": [1]},
    "Qwen3VL": SIZES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}


def qwen(name: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    tokens = {"image_token_id": IMAGE, "video_token_id": 71, "vision_start_token_id": 72, "vision_end_token_id": 73}
    rope = MROPE | ({"mrope_interleaved": True} if name == "Qwen3VL" else {})
    text = TEXT | {"rope_parameters": rope}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=VISION | QWEN[name], **tokens)
    config.get_text_config().use_cache = False
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).double()


def qwen_call(*rows: list[tuple[int, int, int]], seq: int = 24, seed: int = 0) -> dict[str, Tensor]:
    """Rows of text with images of these grids; the first row has two tokens of padding."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 55, (len(rows), seq), generator=g)
    for row, grids in enumerate(rows):
        at = 2
        for grid in grids:
            ids[row, at : at + math.prod(grid) // 4] = IMAGE
            at += math.prod(grid) // 4 + 2
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    grids = [grid for row in rows for grid in row]
    pixels = torch.randn(sum(map(math.prod, grids)), 24, generator=g, dtype=torch.float64)
    labels = ids.masked_fill((ids == IMAGE) | (mask == 0), -100)
    return {
        "input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": pixels, "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip


def gemma3() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers")
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 8,
        "patch_size": 2, "vision_use_head": False,
    }  # fmt: skip
    text = TEXT | {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=72
    )
    config.get_text_config().use_cache = False
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).double()


def gemma3_call() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 55, (2, 16), generator=g)
    ids[0, 3:7] = ids[1, 4:8] = IMAGE
    pixels = torch.randn(2, 3, 8, 8, generator=g, dtype=torch.float64)
    types = (ids == IMAGE).long()
    labels = ids.masked_fill(types == 1, -100)
    mask = torch.ones_like(ids)
    return {
        "input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels, "pixel_values": pixels,
    }  # fmt: skip


@pytest.fixture
def promoted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Casts to fp32 are casts to fp64, also in code that stays eager."""
    to = Tensor.to
    wide = lambda x: torch.float64 if x is torch.float32 else x
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(
        Tensor, "to", lambda x, *args, **kwargs: to(x, *map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", message="megafx cannot capture")
    yield
    torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QWEN, "Gemma3"])
def test_images_and_text_on_ranks(name: str, promoted: None) -> None:
    """On two ranks, and on one in several calls (`verify`)."""
    made = (
        (gemma3(), gemma3_call()) if name == "Gemma3" else (qwen(name), qwen_call([(1, 4, 4), (1, 2, 4)], [(1, 4, 6)]))
    )
    config = megafx.Config(tensor_model_parallel_size=2, cache=False)
    verdict = megafx.verify(made[0], config, example_inputs=made[1], tolerance=1e-10)
    assert verdict and verdict.reference == "eager", verdict


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:megafx cannot capture")
def test_grids_leave_all_but_the_attention_sharded() -> None:
    plan = megafx.plan(
        qwen("Qwen2VL"), megafx.Config(tensor_model_parallel_size=2), example_inputs=qwen_call([(1, 4, 4)], [(1, 4, 6)])
    )
    whole = {n for n, p in plan.params.items() if not p.is_shard}
    assert not any(n.endswith(("mlp.fc1.weight", "mlp.fc2.weight", "_proj.weight")) for n in whole), whole
