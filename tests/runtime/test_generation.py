"""Covers: text generation with a key-value cache: eager's tokens, one graph for prompts and one for tokens, caches that stay
sharded over heads.

Run as a script, this file is one rank of a gloo group.
"""

from __future__ import annotations

import copy
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
import transformers
from harness import promote_casts
from torch.utils._python_dispatch import TorchDispatchMode

T = 2
VOCAB = 61
BASE = {"hidden_size": 24, "num_hidden_layers": 1, "intermediate_size": 34, "vocab_size": VOCAB}
BASE |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=24, n_layer=1, n_head=3, vocab_size=VOCAB, n_positions=64, bos_token_id=1, eos_token_id=2
        )
    ),
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**BASE, num_attention_heads=6, num_key_value_heads=3)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**BASE, num_attention_heads=4, num_key_value_heads=2, sliding_window=11)
    ),
}
MODELS["bart"] = lambda: transformers.BartForConditionalGeneration(
    transformers.BartConfig(
        d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=34, decoder_ffn_dim=34, vocab_size=VOCAB, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )
)  # fmt: skip
MODELS["t5"] = lambda: transformers.T5ForConditionalGeneration(
    transformers.T5Config(
        num_layers=1, d_model=24, num_heads=3, d_kv=6, vocab_size=VOCAB, d_ff=34, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2,
    )
)  # fmt: skip
MODELS["whisper"] = lambda: transformers.WhisperForConditionalGeneration(
    transformers.WhisperConfig(
        d_model=24, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=34, decoder_ffn_dim=34, vocab_size=VOCAB, num_mel_bins=8, max_source_positions=20,
        max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )
)  # fmt: skip
CALLS: dict[str, Any] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"do_sample": False, "num_beams": 2},
}


def build(name: str) -> Any:
    """A model with weights large enough that tokens depend on what came before."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for p in model.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.3)
    return model


def prompt(padded: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))
    if padded:
        ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def seed_of_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def generate(model: Any, call: str, padded: bool = False, tokens: int = 20) -> torch.Tensor:
    torch.manual_seed(5 + seed_of_rank() * hasattr(model, "megafx"))  # rank 0's is what counts
    return model.generate(**prompt(padded), **CALLS[call], max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_graphs_give_eagers_tokens(name: str) -> None:
    """Twenty tokens of every kind of search, and one graph for all prompts and one for all tokens after them."""
    import megafx

    model = build(name)
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    for call in CALLS:
        assert torch.equal(generate(model, call), generate(eager, call)), call
        assert model.megafx.captures == 2
    longer = {"input_ids": torch.randint(3, VOCAB, (3, 12))}
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(**longer, **options), eager.generate(**longer, **options))
    assert model.megafx.captures == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder(name: str) -> None:
    """One graph makes the memory's keys and values beside the first token, one all other tokens."""
    import megafx

    model = build(name)
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    for call in CALLS:
        assert torch.equal(*(transcribe(m, name, call) for m in (model, eager))), call
        assert model.megafx.captures == 2


@pytest.mark.slow
def test_chunks_of_a_decoders_prompt() -> None:
    import megafx

    model = build("t5")
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    first = torch.cat([torch.zeros(2, 1, dtype=torch.long), prompt()["input_ids"]], dim=1)
    ids, options = prompt()["input_ids"], {"decoder_input_ids": first, "prefill_chunk_size": 3, "max_new_tokens": 5}
    assert torch.equal(*(m.generate(ids, **options) for m in (model, eager)))


def transcribe(model: Any, name: str, call: str, tokens: int = 9, seq: int = 40) -> torch.Tensor:
    """generate() of a model with an encoder, after a seed that differs between ranks."""
    features = torch.randn(2, 8, seq, generator=torch.Generator().manual_seed(1))
    given = {"input_features": features} if name == "whisper" else prompt(padded=True)
    options = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(5 + seed_of_rank() * hasattr(model, "megafx"))
    return model.generate(**given, **CALLS[call], **options)


@pytest.mark.slow
@pytest.mark.parametrize("form", [{"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"use_cache": False}])
def test_other_caches(form: dict[str, Any]) -> None:
    """Static caches, prompts in chunks, none: eager's tokens, and no graph a token."""
    import megafx

    model = build("llama")
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **prompt(padded=True), **form}
    for tokens in (8, 12):
        assert torch.equal(*(m.generate(**options, max_new_tokens=tokens) for m in (model, eager)))
    assert model.megafx.captures <= 4


def test_padding_is_masked_in_every_step() -> None:
    import megafx

    model = build("llama")
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    assert torch.equal(generate(model, "greedy", padded=True), generate(eager, "greedy", padded=True))
    assert model.megafx.captures == 2


@pytest.mark.slow
def test_window_slides_without_a_graph_a_token() -> None:
    """Some graphs while the window fills, and no more afterwards: the number of tokens seen is no constant of a graph."""
    import megafx

    model = build("mistral")
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    generate(model, "greedy", tokens=8)
    captures = model.megafx.captures
    assert torch.equal(generate(model, "greedy"), generate(eager, "greedy"))
    assert model.megafx.captures == captures <= 5


def test_the_cache_is_the_users_object() -> None:
    import megafx

    model = build("llama")
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    ids = prompt()["input_ids"]
    mine, its = transformers.DynamicCache(), transformers.DynamicCache()
    with torch.no_grad():
        for part in (ids, ids[:, :1], ids[:, 1:2]):
            found, wanted = model(part, past_key_values=mine), eager(part, past_key_values=its)
            assert found.past_key_values is mine
            assert mine.get_seq_length() == its.get_seq_length()
            torch.testing.assert_close(found.logits, wanted.logits)
            for a, b in zip(mine.layers, its.layers, strict=True):
                torch.testing.assert_close(a.keys, b.keys)
                torch.testing.assert_close(a.values, b.values)
        fresh = model(ids, use_cache=True).past_key_values
        assert type(fresh) is transformers.DynamicCache and fresh.get_seq_length() == 7
        kept = copy.deepcopy(fresh)
        model(ids[:, :1], past_key_values=fresh)
        assert (kept.get_seq_length(), fresh.get_seq_length()) == (7, 8)


@pytest.mark.parametrize("t", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_prompt_and_token_on_simulated_ranks(t: int) -> None:
    """Logits and caches of both graphs in fp64 against the graphs on one rank; caches are cut over heads, also where t is more
    than there are heads of keys, and no collective of the token's graph moves one."""
    from megafx.analysis.communication import communication
    from megafx.capture.export import capture_call
    from megafx.checks.simulate import relative_error, run_logical
    from megafx.compiler.pipeline import Request, compile_program
    from megafx.config import Config
    from megafx.planner.hardware import Hardware

    model = build("llama").double()
    ids = prompt()["input_ids"]
    config = Config(passes=(("after canonicalize", promote_casts),))
    wants: Any = lambda index, spec: spec.kind == "param"  # noqa: E731
    hardware = Hardware.load("h100-nvlink")
    stored = {
        ranks: compile_program(
            capture_call(model, (), {"input_ids": ids}), Request(config, ranks, hardware, {}, None, wants)
        )
        for ranks in (1, t)
    }
    caches: dict[str, Any] = {}
    held: dict[str, torch.Tensor] = {}
    for step in (ids, ids[:, :1]):
        past = transformers.DynamicCache()
        for i in range(1 if held else 0):
            past.update(held[f"layers.{i}.keys"], held[f"layers.{i}.values"], i)
        kwargs = {"input_ids": step, "past_key_values": past, "use_cache": True}
        with torch.no_grad():
            program = capture_call(model, (), kwargs)
        found = {}
        for ranks in (1, t):
            given = {i.name: caches[p] for i in program.inputs if (p := i.name[24:-1]) in caches and ranks > 1}
            placed = dict(stored[ranks].plan.params) | given
            request = Request(config, ranks, hardware, placed, caches=caches if ranks > 1 else {})
            compiled = compile_program(program.copy(), request)
            assert compiled.program.call is not None
            from megafx.capture.caches import states_for_caches

            call = compiled.program.call.flatten(*states_for_caches((), kwargs)[:2])
            state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            users = iter(call)
            values = {
                i.name: next(users) if i.kind == "user" else state[i.name].detach()
                for i in compiled.program.inputs
                if i.kind != "constant"
            }
            found[ranks] = run_logical(compiled.program, values, placed, ranks).outputs
            if ranks > 1:
                leaving = {o.cache: o.placement for o in compiled.program.outputs if o.cache}
                assert all(p is not None and p.is_shard and p.dim == 1 for p in leaving.values())
                assert not caches or caches == leaving
                caches = leaving  # type: ignore[assignment]
                moved = {c.collective for c in communication(compiled.program, t) if "attn" in c.fqn}
                assert moved == {"all_reduce"}
        for name, value in found[1].items():
            assert relative_error(found[t][name], value) < 1e-10, name
        held = {name[10:]: value for name, value in found[1].items() if name.startswith("caches")}
    assert len(held) == 2


# -- on processes


@pytest.mark.dist
def test_on_two_processes(tmp_path: Path) -> None:
    processes.run_ranks(__file__, tmp_path, T, timeout=240)


@pytest.mark.slow
@pytest.mark.dist
def test_other_forms_on_processes(tmp_path: Path) -> None:
    """Static caches, prompts in chunks, padding, no cache; and what a step of one token sends is what its graph says."""
    texts = processes.run_ranks(__file__, tmp_path, T, timeout=900, environment={"FORMS": "1"})
    assert all(re.search(r"a token moves (\d+) bytes, as its graph says", text) for text in texts), texts


@pytest.mark.slow
@pytest.mark.dist
def test_on_four_processes(tmp_path: Path) -> None:
    """More ranks than heads of keys."""
    processes.run_ranks(__file__, tmp_path, 4, timeout=900, environment={"NAMES": "gpt2,llama"})


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_and_decoder_on_processes(name: str, tmp_path: Path) -> None:
    """The encoder, which `generate` calls by itself, is one more graph; keys and values of both attentions are cut."""
    texts = processes.run_ranks(__file__, tmp_path, T, timeout=900, environment={"ENCODER": name})
    assert all(re.search(r"3 graphs, (\d+) parameters of the encoder cut", text) for text in texts), texts


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


def other_forms(folder: Path, rank: int, ranks: int) -> None:
    import megafx
    from megafx.analysis.communication import communication
    from megafx.runtime.cache_shard import CacheShard

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
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
    print(f"a token moves {sum(n for _, n in planned)} bytes, as its graph says: {planned}")
    dist.destroy_process_group()


def with_an_encoder(folder: Path, rank: int, ranks: int, name: str) -> None:
    import megafx
    from megafx.runtime.cache_shard import CacheShard

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600))
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
    print(f"{model.megafx.captures} graphs, {len(cut)} parameters of the encoder cut")
    dist.destroy_process_group()


def main(folder: Path, rank: int, ranks: int = T, names: tuple[str, ...] = ("llama",)) -> None:
    import megafx
    from megafx.errors import UsageError
    from megafx.runtime.cache_shard import CacheShard

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    for name in names:
        model = build(name)
        eager = copy.deepcopy(model)
        model = megafx.parallelize(model)
        for call in CALLS:
            assert torch.equal(generate(model, call, tokens=9), generate(eager, call, tokens=9)), (name, call)
            assert model.megafx.captures == 2
    ids = prompt()["input_ids"]
    wanted = eager(ids).past_key_values.layers[0].keys.detach()
    cache = model(ids, use_cache=True).past_key_values
    keys = cache.layers[0].keys
    assert isinstance(keys, CacheShard) and keys.shape == wanted.shape
    assert keys.local.shape[1] == -(-wanted.shape[1] // ranks)
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
    dist.destroy_process_group()


if __name__ == "__main__":
    here = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("FORMS"):
        other_forms(*here)
    elif os.environ.get("ENCODER"):
        with_an_encoder(*here, os.environ["ENCODER"])
    else:
        main(*here, tuple(os.environ.get("NAMES", "llama").split(",")))
