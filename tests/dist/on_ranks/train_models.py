"""The models of zoo.py, trained on gloo ranks and compared with plain eager after each step, in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks import Pair, PromoteCasts, check, config, gradients, logits_of, loss_of, near, same_gradients
from torch import nn

import megafx
from megafx.distributed import exchange
from megafx.runtime.outputs import LazyTensor

ADAMW = {"lr": 1e-2, "weight_decay": 0.1}


def evaluate(pair: Pair, batch: int, seq: int) -> None:
    """Logits of a call in eval mode without gradients."""
    inputs = {k: v for k, v in pair.inputs(batch, seq).items() if k not in ("labels", "targets")}
    pair.model.eval()
    pair.plain.eval()
    with torch.no_grad():
        mine = logits_of(pair.model(**inputs))
        with PromoteCasts():
            theirs = logits_of(pair.plain(**inputs))
    assert not isinstance(mine, LazyTensor), "without a loss outputs are whole"
    assert not mine.requires_grad
    near(mine, theirs, f"logits of {batch}x{seq}")
    pair.model.train()
    pair.plain.train()


@check(2, slow=True)
def nanogpt_made_at_the_first_call() -> str:
    """The first call is one of eval mode; the optimizer is older than the plan; no sequence parallelism."""
    pair = Pair("nanogpt", sequence_parallel=False).parallelize()
    optimizers = [torch.optim.AdamW(m.parameters(), foreach=True, **ADAMW) for m in (pair.model, pair.plain)]
    before = {n: id(p) for n, p in pair.model.named_parameters()}
    evaluate(pair, 2, 11)
    assert pair.model.megafx.captures == 1
    seen = pair.train(torch.optim.AdamW, optimizers)
    evaluate(pair, 3, 5)
    assert pair.model.megafx.captures == 2, "batch and sequence were captured again"
    assert before == {n: id(p) for n, p in pair.model.named_parameters()}, "parameters are other objects"
    cut = [n for n, p in pair.model.named_parameters() if p.to_local().numel() < p.numel()]
    assert {"h.0.attn.qkv.weight", "h.0.mlp.fc.weight", "wte.weight"} <= {*cut}, cut
    assert pair.model.lm_head.weight is pair.model.wte.weight
    return seen


@check(2, 3, slow=(3,))
def nanogpt_sequence_parallel() -> str:
    """Example inputs given; AdamW fused, then SGD; odd sequences, gradients accumulated, one graph."""
    pair = Pair("nanogpt", example=True, sequence_parallel=True).parallelize()
    assert pair.model.megafx.settled.plan.sequence_parallel
    seen = pair.train(torch.optim.AdamW, fused=True, **ADAMW)
    pair.zero()
    for batch, seq in ((2, 9), (1, 16), (4, 3), (1, 1), (2, 1)):
        pair.step(batch, seq)
    same_gradients(pair.model, gradients(pair.plain))
    pair.train(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1)
    assert pair.model.megafx.captures == 1
    return seen


@check(2, slow=True)
def gpt2_whole_sequence() -> str:
    """A Hugging Face model without any inputs. The ranks are given other weights: rank 0's count."""
    pair = Pair("gpt2", sequence_parallel=False)
    if dist.get_rank() == 1:
        with torch.no_grad():
            pair.model.transformer.h[0].mlp.c_fc.weight.add_(1)
    pair.parallelize()
    notes = [n.message for n in pair.model.megafx.notes if n.topic == "agreement"]
    name = "transformer.h.0.mlp.c_fc.weight"
    assert notes == [f"'{name}' differed between ranks: rank 0's value is used"], notes
    assert notes[0] in str(megafx.explain(pair.model))
    seen = pair.train(torch.optim.AdamW, foreach=True, **ADAMW)
    return seen + "; rank 0's weights taken"


@check(2, slow=True)
def gpt2_sequence_parallel() -> str:
    return Pair("gpt2", sequence_parallel=True).parallelize().train(torch.optim.AdamW, fused=True, **ADAMW)


@check(2, slow=True)
def llama_whole_sequence() -> str:
    pair = Pair("llama", sequence_parallel=False).parallelize()
    seen = pair.train(torch.optim.AdamW, foreach=True, **ADAMW)
    evaluate(pair, 3, 5)
    return seen


@check(2, slow=True)
def llama_sequence_parallel() -> str:
    return Pair("llama", sequence_parallel=True).parallelize().train(torch.optim.AdamW, fused=True, **ADAMW)


@check(2, slow=True)
def llama_as_written() -> str:
    """Its own casts to fp32 in both: equal within fp32's rounding."""
    pair = Pair("llama", sequence_parallel=True)
    megafx.parallelize(pair.model, config(sequence_parallel=True).replace(passes=()))
    inputs = pair.inputs(3, 13)
    mine, theirs = loss_of(pair.model(**inputs)), loss_of(pair.plain(**inputs))
    near(mine.detach(), theirs.detach(), "the loss", 1e-6)
    mine.backward()
    theirs.backward()
    return same_gradients(pair.model, gradients(pair.plain), 1e-6)


# -- dropout


def _dropout(name: str, **options: Any) -> str:
    """Ranks are seeded apart: the masks are those of one process with rank 0's seed, which rank 0 computes."""
    pair = Pair(name, model={"dropout": 0.1}, **options).parallelize()

    def losses(model: nn.Module, seed: int) -> list[float]:
        torch.manual_seed(seed)
        found = []
        for batch, seq in ((2, 16), (3, 13), (3, 13)):
            loss = loss_of(model(**pair.inputs(batch, seq)))
            loss.backward()
            found.append(loss.item())
        return found

    found, given = losses(pair.model, 7 + 100 * dist.get_rank()), [([0.0], {})]
    if dist.get_rank() == 0:
        alone = megafx.parallelize(copy.deepcopy(pair.plain), config(t=1, data_parallel_size=1))
        given = [(losses(alone, 7), gradients(alone))]
    dist.broadcast_object_list(given)
    wanted, wanted_gradients = given[0]
    near(found, wanted, "a loss")
    assert abs(wanted[1] - wanted[2]) > 1e-6, "two steps drew one mask"
    seen = same_gradients(pair.model, wanted_gradients)
    assert losses(pair.model, 7 + 100 * dist.get_rank()) == found, "torch.manual_seed does not reproduce the run"
    return seen


@check(2, 3, slow=True)
def dropout_of_nanogpt_sequence_parallel() -> str:
    return _dropout("nanogpt", sequence_parallel=True)


@check(2, 3, slow=(3,))
def dropout_of_nanogpt_with_overlap() -> str:
    """Gathers and scatters in pieces, through files that the ranks share."""
    return _dropout("nanogpt", sequence_parallel=True, tp_comm_overlap=True)


@check(2, slow=True)
def llama_with_overlap() -> str:
    options = {"sequence_parallel": True, "tp_comm_overlap": True}
    seen = Pair("llama", **options).parallelize().train(torch.optim.AdamW, fused=True, **ADAMW)
    assert exchange._exchanges, "no exchange was made"
    return seen


@check(2, slow=True)
def dropout_of_gpt2() -> str:
    return _dropout("gpt2", sequence_parallel=False)
