"""Covers: capture/libraries/huggingface.py. Which masks are told apart, that none is made, and that numbers and registries are
as before."""

import copy
from typing import Any

import pytest
import torch
from interpret import run_program

import megafx
from megafx.capture.export import capture_call
from megafx.ir import source_lines
from megafx.ir.nodes import argument, draw_of, is_draw
from megafx.ir.program import Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.passes.fuse.describe_masks import describe_masks
from megafx.planner.context import CompileContext
from megafx.testing import make_context

transformers = pytest.importorskip("transformers")
SIZES = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 50, "vocab_size": 67,
    "max_position_embeddings": 64,
}  # fmt: skip
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 6}
T5 = {
    "d_model": 24,
    "num_heads": 4,
    "d_kv": 6,
    "d_ff": 50,
    "num_layers": 1,
    "vocab_size": 67,
    "decoder_start_token_id": 0,
}
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 1, "vocab_size": 67, "n_positions": 64}


def _model(name: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**config, attn_implementation="sdpa")).double().eval()


def _inputs(batch: int, seq: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 67, (batch, seq), generator=torch.Generator().manual_seed(seq))
    mask = torch.ones(batch, seq, dtype=torch.long)
    mask[0, -3:] = 0
    return {"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if padded else {})


def _attentions(program: Any) -> list[Any]:
    names = (torch.ops.megafx.attention.default, torch.ops.aten.scaled_dot_product_attention.default)
    return [n for n in program.graph.nodes if n.target in names]


def _flags(node: Any) -> tuple[Any, ...]:
    """(shape of the mask, causal, window)."""
    mask = argument(node, "mask")
    return None if mask is None else mask.meta["val"].dim(), argument(node, "causal"), argument(node, "window")


# model, config, (dims of the mask, causal, window) without and with a padding mask
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2, (None, True, 0), (2, True, 0)),
    "llama": ("LlamaForCausalLM", GROUPED, (None, True, 0), (2, True, 0)),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 5}, (None, True, 5), (2, True, 5)),
    "bert": ("BertForMaskedLM", SIZES, None, (2, False, 0)),
    "t5": ("T5ForConditionalGeneration", T5, (4, False, 0), (4, False, 0)),
    "neox": ("GPTNeoXForCausalLM", SIZES | {"hidden_size": 64}, (None, True, 0), (2, True, 0)),
    "phi": ("PhiForCausalLM", SIZES | {"hidden_size": 64}, (None, True, 0), (2, True, 0)),
    "gemma": ("GemmaForCausalLM", GROUPED, (None, True, 0), (2, True, 0)),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_masks_are_flags(name: str, padded: bool) -> None:
    kind, config, alone, with_padding = MODELS[name]
    model = _model(kind, config)
    program = capture_call(model, (), _inputs(2, 16, padded))
    canonicalize_program(program)
    wanted = with_padding if padded else alone
    if wanted is not None:
        found = [_flags(n) for n in _attentions(program) if n.target is torch.ops.megafx.attention.default]
        assert found and found[0] == wanted
    for batch, seq in ((2, 16), (3, 11)):
        inputs = _inputs(batch, seq, padded)
        found_out, wanted_out = run_program(program, model, (), inputs), model(**inputs, use_cache=False)
        torch.testing.assert_close(found_out.loss, wanted_out.loss, rtol=1e-6, atol=0)  # the loss is in fp32
        kept = torch.ones(batch, seq, dtype=torch.bool)
        kept[0, -3:] = not padded
        torch.testing.assert_close(found_out.logits[kept], wanted_out.logits[kept], rtol=1e-7, atol=1e-9)


def test_no_square_of_the_sequence_is_left() -> None:
    """In a causal model nothing has two dims of the sequence, in forward."""
    model = _model("LlamaForCausalLM", GROUPED)
    program = capture_call(model, (), _inputs(2, 16, True))
    canonicalize_program(program)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            dynamic = [str(n) for n in value.shape if not isinstance(n, int)]
            assert len(dynamic) == len(set(dynamic)), f"{node} {tuple(value.shape)}"


@pytest.mark.slow
def test_t5_keeps_one_bias_for_the_batch() -> None:
    """With padding the mask is the bias of [1, n, s, t], and the key_mask is [b, t]: nothing of [b, n, s, t] is made."""
    program = capture_call(_model("T5ForConditionalGeneration", T5), (), _inputs(2, 16, True))
    canonicalize_program(program)
    describe_masks(program, make_context())
    found = [n for n in _attentions(program) if n.target is torch.ops.megafx.attention.default]
    masks = [
        tuple(None if a is None else a.meta["val"].dim() for a in (argument(node, "mask"), argument(node, "key_mask")))
        for node in found
    ]
    assert masks == [(4, 2), (4, None), (2, None)]  # the decoder's own is causal; cross attention's bias is all zeros
    assert all(argument(node, "mask").meta["val"].shape[0] == 1 for node in found[:2])
    lengths = {str(node.args[i].meta["val"].shape[2]) for node in found for i in (0, 1)}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() == 4:
            assert value.shape[0] == 1 or str(value.shape[2]) not in lengths or str(value.shape[3]) not in lengths, node


@pytest.mark.slow
def test_packed_positions_are_segments_and_a_users_mask_stays() -> None:
    """Packed sequences by position_ids: their documents are segments; a 4-D mask: as transformers computes it."""
    model, inputs = _model("LlamaForCausalLM", GROUPED), _inputs(2, 16, False) | {"use_cache": False}
    square = (torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(16).bool()
    for extra in ({"position_ids": _packed()}, {"attention_mask": square}):
        program = capture_call(model, (), inputs | extra)
        canonicalize_program(program)
        assert all(n.target is torch.ops.aten.scaled_dot_product_attention.default for n in _attentions(program))
        describe_masks(program, make_context())
        for node in _attentions(program):
            packed = node.target is torch.ops.megafx.attention.default and argument(node, "segments") is not None
            assert packed == ("position_ids" in extra)
            assert not packed or (argument(node, "mask"), argument(node, "causal")) == (None, True)
        found, wanted = run_program(program, model, (), inputs | extra), model(**inputs, **extra)
        torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-7, atol=1e-9)


def test_packed_sequences_with_a_window_on_ranks_that_cut_them() -> None:
    """Places in a document count as positions within it: causal and window are flags, and nothing of [s, s] is made."""
    kept: list[Program] = []

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    model = _model("MistralForCausalLM", GROUPED | {"sliding_window": 5})
    inputs = _inputs(2, 16, False) | {"use_cache": False, "position_ids": _packed()}
    config = megafx.Config(passes=(("after scaled_products", keep),))
    verdict = megafx.verify(model, config, example_inputs=inputs, mesh={"cp": 2})
    assert verdict, str(verdict)
    found = [n for n in kept[0].graph.nodes if n.target is torch.ops.megafx.attention_forward.default]
    assert found and all(argument(n, "segments") for n in found)
    flags = [[argument(n, name) for name in ("mask", "causal", "window")] for n in found]
    assert flags == [[None, True, 5]] * len(found)
    shapes = [n.meta["val"].shape for n in kept[0].graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert not any(list(shape[-2:]) in ([16, 16], [8, 16]) for shape in shapes)


def _packed() -> torch.Tensor:
    return torch.cat([torch.arange(9), torch.arange(7)])[None].expand(2, 16).contiguous()


@pytest.mark.parametrize("how", ["default", "argument", "config", "checkpointing", "wrapped"])
@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_packed_positions_with_and_without_a_cache(kind: str, how: str) -> None:
    """transformers separates packed sequences only where it makes no cache, and by default it makes one."""
    model = _model(kind, GROUPED if "Llama" in kind else GPT2)
    inputs = _inputs(2, 16, False) | {"position_ids": _packed()}
    if how == "argument":
        inputs["use_cache"] = False
    if how == "config":
        model.config.use_cache = False
    if how == "checkpointing":
        model.train().gradient_checkpointing_enable()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        model.config.attn_pdrop = 0.0
    called = _Wrapped(model) if how == "wrapped" else model
    program = capture_call(called, (), inputs)
    canonicalize_program(program)
    found, wanted = run_program(program, called, (), inputs), called(**inputs)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0)  # the loss is in fp32
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-7, atol=1e-9)
    notes = [n for n in program.notes if "packed" in n.message]
    assert len(notes) == (how in ("default", "wrapped"))
    assert model.config.use_cache is (how != "config")


class _Wrapped(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_graph_serves_no_other_use_cache() -> None:
    model = _model("LlamaForCausalLM", GROUPED)
    inputs = _inputs(2, 16, False) | {"position_ids": _packed()}
    ours = megafx.parallelize(copy.deepcopy(model), megafx.Config(tensor_model_parallel_size=1, compile=False))
    for use_cache in (True, False, True):
        ours.config.use_cache = model.config.use_cache = use_cache
        torch.testing.assert_close(ours(**inputs).loss, model(**inputs).loss, rtol=1e-6, atol=0)
    assert megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=inputs)


def test_dropout_is_drawn_by_the_seed() -> None:
    model = _model("GPT2LMHeadModel", GPT2 | {"attn_pdrop": 0.5, "resid_pdrop": 0.0, "embd_pdrop": 0.0}).train()
    program = capture_call(model, (), _inputs(2, 16, True))
    canonicalize_program(program)
    (attention,) = (n for n in program.graph.nodes if is_draw(n))
    assert draw_of(attention).op_id == 0 and draw_of(attention).p == 0.5
    first, again, other = (run_program(program, model, (), _inputs(2, 16, True), seed=s).loss for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_registries_are_as_before() -> None:
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = (
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        masking_utils.find_packed_sequence_indices,
    )
    capture_call(_model("LlamaForCausalLM", GROUPED), (), _inputs(2, 16, True))
    assert before == (
        ALL_ATTENTION_FUNCTIONS["sdpa"],
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"],
        masking_utils.find_packed_sequence_indices,
    )
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_a_checkout_of_transformers_is_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code asks whether it is traced: as the user's own it would decide by the data of masks."""
    monkeypatch.setattr(source_lines, "is_installed", lambda path: False)
    program = capture_call(_model(*MODELS["llama"][:2]), (), _inputs(2, 16, False))
    canonicalize_program(program)
    found = [_flags(n) for n in _attentions(program) if n.target is torch.ops.megafx.attention.default]
    assert found and found[0] == MODELS["llama"][2]
