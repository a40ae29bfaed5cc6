"""Covers: text generation with a key-value cache: eager's tokens, one graph for prompts and one for tokens, caches that stay
sharded over heads. On ranks: dist/on_ranks/generation.py."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from generating import CALLS, VOCAB, build, generate, prompt
from harness import promote_casts

import megafx
from megafx.testing import make_context


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_graphs_give_eagers_tokens(name: str) -> None:
    """Twenty tokens of every kind of search after prompts with padding, and one graph for all prompts and one for all tokens
    after them."""
    model = build(name)
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    for call in CALLS:
        assert torch.equal(generate(model, call, padded=True), generate(eager, call, padded=True)), call
        assert model.megafx.captures == 2
    ids, mask = torch.randint(3, VOCAB, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
    mask[1, :4] = 0
    longer = {"input_ids": ids, "attention_mask": mask}
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(**longer, **options), eager.generate(**longer, **options))
    assert model.megafx.captures == 2


@pytest.mark.slow
def test_chunks_of_a_decoders_prompt() -> None:
    model = build("t5")
    eager = copy.deepcopy(model)
    megafx.parallelize(model)
    first = torch.cat([torch.zeros(2, 1, dtype=torch.long), prompt()["input_ids"]], dim=1)
    ids, options = prompt()["input_ids"], {"decoder_input_ids": first, "prefill_chunk_size": 3, "max_new_tokens": 5}
    assert torch.equal(*(m.generate(ids, **options) for m in (model, eager)))


@pytest.mark.slow
def test_prompts_without_padding() -> None:
    model = build("llama")
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    assert torch.equal(generate(model, "greedy"), generate(eager, "greedy"))
    assert model.megafx.captures == 2


@pytest.mark.slow
def test_window_slides_without_a_graph_a_token() -> None:
    """Some graphs while the window fills, and no more afterwards: the number of tokens seen is no constant of a graph."""
    model = build("mistral")
    eager = copy.deepcopy(model)
    model = megafx.parallelize(model)
    generate(model, "greedy", tokens=8)
    captures = model.megafx.captures
    assert torch.equal(generate(model, "greedy"), generate(eager, "greedy"))
    assert model.megafx.captures == captures <= 5


def test_the_cache_is_the_users_object() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_prompt_and_token_on_simulated_ranks(t: int) -> None:
    """Logits and caches of both graphs in fp64 against the graphs on one rank; caches are cut over heads, also where t is more
    than there are heads of keys, and no collective of the token's graph moves one."""
    from megafx.analysis.communication import communication
    from megafx.capture.export import capture_call
    from megafx.checks.simulate import relative_error, run_logical
    from megafx.compiler.pipeline import compile_program
    from megafx.config import Config

    model = build("llama").double()
    ids = prompt()["input_ids"]
    config = Config(passes=(("after canonicalize", promote_casts),))

    def of_parameters(spec: Any) -> bool:
        return spec.kind == "param"

    stored = {
        ranks: compile_program(
            capture_call(model, (), {"input_ids": ids}), make_context(ranks, config, wants_grad=of_parameters)
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
            context = make_context(ranks, config, training=False, fixed=placed, caches=caches if ranks > 1 else {})
            compiled = compile_program(program.copy(), context)
            assert compiled.program.call is not None
            from megafx.capture.libraries.caches import states_for_caches

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
