"""Covers: casts of weights to FP8 that are kept between micro-batches (compiler/kept_values.py), on real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fp8_models import EVERY, Model, batch
from ranks import check, config
from torch import Tensor
from weight_writes import unnoticed

import megafx


@check(2, 3, slow=(3,), seed=0)
def every_write_to_a_weight_is_noticed_on_ranks() -> str:
    """Uneven: 50 columns, 4 heads and 7 tokens; the largest of a weight is that of all ranks, in the kept form too."""
    t = dist.get_world_size()
    recipe = "rowwise" if t == 2 else "tensorwise"
    model = megafx.parallelize(Model(50, 1).double(), config(fp8_recipe=recipe, **EVERY))
    assert unnoticed(model, batch(7), model.layers[0].up.weight) == []
    health = megafx.fp8_health(model, batch(7))
    texts: list[str] = [""] * t
    dist.all_gather_object(texts, str(health))
    assert len(set(texts)) == 1, texts
    largest = {c.largest for c in health.casts if (c.module, c.operand) == ("layers.0.up", "weight")}
    assert largest == {float(model.layers[0].up.weight.full_tensor().abs().max())}
    return f"{model.megafx.settled.casts.made} casts"


@check(2, seed=0)
def data_parallel_ranks_keep_casts_of_weights() -> str:
    """With gradients that no_sync holds back; of parameters that ZeRO-1 gathers, and of this rank's rows, whose bytes fsdp
    gathers: the same numbers, to the bit."""
    said, of_forms = [], []
    for form in ("zero1", "fsdp"):
        losses: list[list[Tensor]] = []
        for keeps in (True, False) if form == "fsdp" else (True,):  # the other form has its numbers
            torch.manual_seed(0)
            options = {"data_parallel": form, "data_parallel_size": 2, "micro_batch_size": 1, **EVERY}
            model = megafx.parallelize(Model(50, 1).double(), config(t=1, **options))
            casts = model.megafx.settled.casts
            if not keeps:
                casts.look = lambda weights: False
            optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
            for _ in range(2):
                with model.no_sync():
                    for k in range(2):
                        ids, labels = batch(6 + k)
                        loss = model(ids[:1], labels[:1])
                        loss.backward()
                        found.append(loss.detach())
                model(*(x[1:] for x in batch(8))).backward()
                optimizer.step()
                optimizer.zero_grad()
            found += [p.full_tensor() for p in model.parameters()]
            losses.append(found)
            assert casts.made == (2 if keeps else 0), (form, keeps, casts.made)
        assert all(torch.equal(a, b) for a, b in zip(losses[0], losses[-1], strict=True)), form
        said.append(form)
        of_forms.append(losses[0])
    assert all(torch.equal(a, b) for a, b in zip(*of_forms, strict=True))
    return ", ".join(said)
