"""Covers: text generation on gloo ranks: eager's tokens from graphs whose caches stay sharded over heads, in every form of
search and of cache; what a step of one token sends is what its graph says."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from generating import BASE, CALLS, build, generate, prompt, transcribe
from ranks import Pair, check
from torch.utils._python_dispatch import TorchDispatchMode

import megafx
from megafx.analysis.communication import communication
from megafx.errors import UsageError
from megafx.runtime.cache_shard import CacheShard


class Bytes(TorchDispatchMode):
    """What this rank sends in the collectives within, by the ring algorithm. sent: (collective, bytes)."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and "wait" not in str(func):
            name = str(func).split(".")[1].replace("_into_tensor", "").replace("_tensor", "").rstrip("_")
            share = (self.ranks - 1) * {
                "all_reduce": 2 / self.ranks,
                "all_gather": 1,
                "reduce_scatter": 1 / self.ranks,
            }[name]
            tensors = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.sent.append((name, round(sum(x.numel() * x.element_size() for x in tensors) * share)))
        return func(*args, **(kwargs or {}))


@check(2, slow=True)
def other_caches_and_searches() -> str:
    """Static caches, prompts in chunks, padding, no cache."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    options = {"max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0}
    forms: dict[str, Any] = {
        "padded": {},
        "static": {"cache_implementation": "static"},
        "chunks": {"prefill_chunk_size": 3},
        "no cache": {"use_cache": False},
        "sampled": {"do_sample": True},
        "beams": {"num_beams": 2},
    }
    model = build("llama")
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    for form, extra in forms.items():
        given = {**prompt(padded=True), **options, "do_sample": False, **extra}
        tokens = []
        for m in (model, eager):
            torch.manual_seed(5 + rank * (m is model))
            tokens.append(m.generate(**given))
        assert torch.equal(*tokens), form
    model = megafx.parallelize(build("llama"))
    ids = prompt()["input_ids"][:1]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        assert isinstance(cache.layers[0].keys, CacheShard)
        model(ids[:, :1], past_key_values=cache)
        seen = []
        for _ in range(2):  # one token later, as much is sent: nothing of the cache is
            with Bytes(ranks) as moved:
                model(ids[:, :1], past_key_values=cache)
            seen.append(moved.sent)
    graphs = [g for found in model.megafx.graphs.values() for g in found]
    assert len(graphs) == model.megafx.captures == 2
    planned = [(c.collective, c.bytes_moved) for c in communication(graphs[-1].compiled.program, ranks)]
    assert seen[0] == seen[1] and sum(n for _, n in seen[0]) == sum(n for _, n in planned), (seen, planned)
    return f"a token moves {sum(n for _, n in planned)} bytes, as its graph says: {planned}"


def with_an_encoder(name: str) -> str:
    """The encoder, which `generate` calls by itself, is one more graph; keys and values of both attentions are cut."""
    ranks = dist.get_world_size()
    model = build(name)
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    for call in CALLS:
        for tokens in (9, 12):
            assert torch.equal(*(transcribe(m, name, call, tokens) for m in (model, eager))), (call, tokens)
            assert model.megafx.captures == 3, "the encoder, the first token, all others"
    options: Any = {"return_dict_in_generate": True, "max_new_tokens": 4, "do_sample": False}
    given = prompt() if name != "whisper" else {"input_features": torch.ones(2, 8, 40)}
    found, wanted = (m.generate(**given, **options) for m in (model, eager))
    for attention in ("self_attention_cache", "cross_attention_cache"):
        mine, its = (getattr(x.past_key_values, attention).layers[0].keys for x in (found, wanted))
        assert isinstance(mine, CacheShard) and mine.shape == its.shape
        assert mine.local.shape[1] == -(-its.shape[1] // ranks)
        torch.testing.assert_close(mine.full_tensor(), its)
    cut = [p for p in model.get_encoder().parameters() if p.to_local().numel() < p.numel()]
    return f"{len(cut)} parameters of the encoder cut"


for name in ("t5", "bart", "whisper"):
    check(2, slow=True, name=f"generate_{name}")(partial(with_an_encoder, name))


def two_graphs(name: str) -> tuple[Any, Any]:
    """(parallelized model, eager): the same tokens in every search."""
    model = build(name)
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    for call in CALLS:
        assert torch.equal(generate(model, call, tokens=9), generate(eager, call, tokens=9)), (name, call)
        assert model.megafx.captures == 2
    return model, eager


@check(2, 4, slow=(4,))
def tokens_of_llama() -> None:
    """At 4 more ranks than heads of keys."""
    model, eager = two_graphs("llama")
    ids = prompt()["input_ids"]
    wanted = eager(ids).past_key_values.layers[0].keys.detach()
    cache = model(ids, use_cache=True).past_key_values
    keys = cache.layers[0].keys
    assert isinstance(keys, CacheShard) and keys.shape == wanted.shape
    assert keys.local.shape[1] == -(-wanted.shape[1] // dist.get_world_size())
    torch.testing.assert_close(keys.full_tensor(), wanted)
    for operation in (
        lambda x: x.index_select(0, torch.tensor([1, 1, 0])),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: x[torch.tensor([1]), ...],
        lambda x: x[..., :-2, :],
        lambda x: torch.cat([x, x], dim=-2),
        copy.deepcopy,
        lambda x: torch.cat([torch.tensor([]), x[1][None].cpu()], dim=-2),
        lambda x: x.unsqueeze(-1).select(0, 0),
    ):
        found = operation(keys)
        assert isinstance(found, CacheShard)
        torch.testing.assert_close(found.full_tensor(), operation(wanted))
    with pytest.raises(UsageError, match="full_tensor"):
        keys + 1


LARGE: dict[str, Any] = {"micro_batch_size": 64, "seq_length": 8192}


def shared_heads(heads: int, groups: int, hidden: int) -> str:
    """All ranks at work in training."""
    sizes = {"heads": heads, "kv": groups, "hidden": hidden}
    pair = Pair("llama", model=sizes, sequence_parallel=heads == 14, **LARGE).parallelize()
    seen = pair.train(torch.optim.SGD, lr=0.1)
    cut = pair.model.megafx.settled.plan.params["model.layers.0.self_attn.o_proj.weight"].cut
    assert cut.local_size(4) == -(-heads // 4) * 6
    return seen


def tokens_of_shared_heads(heads: int, groups: int, hidden: int) -> None:
    """Tokens, and a cache in the model's own heads."""
    torch.manual_seed(0)
    own = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 6, "hidden_size": hidden}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | own)).eval()
    eager = copy.deepcopy(model)
    megafx.parallelize(model, megafx.Config(hardware="h100-nvlink", **LARGE))
    for call in CALLS:
        assert torch.equal(generate(model, call, tokens=9), generate(eager, call, tokens=9)), (heads, call)
    ids = prompt()["input_ids"]
    mine, its = (m(ids, use_cache=True).past_key_values.layers[0].keys for m in (model, eager))
    torch.testing.assert_close(mine.full_tensor() if isinstance(mine, CacheShard) else mine, its)


@check(2, 3, seed=0, slow=(3,))
def gradients_go_through_caches() -> None:
    """A call with what the one before has left in the cache, then one more: gradients reach the first. Ranks share the heads
    out unevenly."""
    heads = 3 if dist.get_world_size() == 2 else 4
    config = transformers.GPT2Config(
        n_embd=24, n_head=heads, n_layer=1, vocab_size=31, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    plain = transformers.GPT2LMHeadModel(config).double()
    model = megafx.parallelize(copy.deepcopy(plain))
    first, second, third = (torch.randint(31, (2, n)) for n in (3, 4, 4))
    for m in (plain, model):
        cache = m(first, use_cache=True).past_key_values
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        losses = [m(x, past_key_values=c).logits.square().mean() for x, c in ((second, cache), (third, other))]
        sum(losses).backward()
    assert isinstance(cache.layers[0].keys, CacheShard)
    for name, gradient in megafx.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-13)


@check(4, slow=True)
def ranks_share_key_value_heads() -> str:
    return shared_heads(14, 2, 28)


@check(4, slow=True)
def tokens_of_ranks_that_share_heads() -> None:
    tokens_of_shared_heads(14, 2, 28)


@check(4, slow=True)
def ranks_share_the_one_key_value_head() -> str:
    tokens_of_shared_heads(8, 1, 24)
    return shared_heads(8, 1, 24)


@check(4, slow=True)
def tokens_of_gpt2() -> None:
    two_graphs("gpt2")
