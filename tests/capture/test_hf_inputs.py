"""Covers: megafx/capture/libraries/huggingface.py, and capture with canonicalize on Hugging Face models: loss and gradients,
train mode, dropout off.

Own arithmetic of the models in fp32 (`.float()` inside) limits the comparison; bert and t5 have none and are exact to fp64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpret import run_program

from megafx.capture.export import capture_call
from megafx.capture.libraries.caches import Updated
from megafx.capture.libraries.huggingface import synthesize_inputs
from megafx.errors import CaptureError
from megafx.ir.nodes import draw_of, is_draw
from megafx.ir.program import Program
from megafx.passes.canonicalize.canonicalize import canonicalize_program

transformers = pytest.importorskip("transformers")

PLAIN = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 80,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2}
GPT2 = {
    "vocab_size": 96,
    "n_layer": 1,
    "n_head": 4,
    "n_embd": 32,
    "n_positions": 80,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_layers": 1,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION = {**{k: PLAIN[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}}
VISION |= {"image_size": 16, "patch_size": 8}
SPEECH = {
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 30,
    "max_target_positions": 64,
    "num_mel_bins": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

# class, config, names of the inputs made, names of the dynamic sizes, relative gradient error allowed
EXACT, FLOAT = 1e-10, 1e-6
MODELS: dict[str, tuple[str, dict[str, Any], str, str, float]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, "attention_mask input_ids labels", "batch seq", FLOAT),
    "llama": ("LlamaForCausalLM", GROUPED, "attention_mask input_ids labels", "batch seq", FLOAT),
    "falcon": (
        "FalconForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
        "attention_mask input_ids labels",
        "batch seq",
        FLOAT,
    ),
    "bloom": (
        "BloomForCausalLM",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 1, "n_head": 4},
        "attention_mask input_ids labels",
        "batch seq",
        FLOAT,
    ),
    "bert": ("BertForMaskedLM", PLAIN, "attention_mask input_ids labels", "batch seq", EXACT),
    "bert_classes": ("BertForSequenceClassification", PLAIN, "attention_mask input_ids labels", "batch seq", EXACT),
    "bert_choices": ("BertForMultipleChoice", PLAIN, "attention_mask input_ids labels", "batch seq", EXACT),
    "bert_pretraining": (
        "BertForPreTraining",
        PLAIN,
        "attention_mask input_ids labels next_sentence_label",
        "batch seq",
        EXACT,
    ),
    "bert_answers": (
        "BertForQuestionAnswering",
        PLAIN,
        "attention_mask end_positions input_ids start_positions",
        "batch seq",
        EXACT,
    ),
    "t5": (
        "T5ForConditionalGeneration",
        T5,
        "attention_mask decoder_input_ids input_ids labels",
        "batch seq target",
        EXACT,
    ),
    "vit": ("ViTForImageClassification", VISION, "labels pixel_values", "batch", EXACT),
    "whisper": (
        "WhisperForConditionalGeneration",
        SPEECH,
        "decoder_input_ids input_features labels",
        "batch seq",
        EXACT,
    ),
    "clip": (
        "CLIPModel",
        {"text_config": {**PLAIN, "projection_dim": 32}, "vision_config": VISION, "projection_dim": 32},
        "attention_mask input_ids pixel_values return_loss",
        "seq",
        EXACT,
    ),
}


def _model(name: str) -> Any:
    cls = getattr(transformers, MODELS[name][0])
    config = cls.config_class(**MODELS[name][1])
    for part in (config, *(c for c in vars(config).values() if hasattr(c, "to_dict"))):
        for key, value in list(vars(part).items()):
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
    torch.manual_seed(0)
    return cls(config).double().train()


def _inputs(model: Any, batch: int, sizes: dict[int, int]) -> dict[str, Any]:
    """Real values for the synthesised inputs, at another batch and with the lengths replaced as `sizes` says."""
    made = {}
    for name, value in synthesize_inputs(model)[1].items():
        if not isinstance(value, torch.Tensor):
            made[name] = value
            continue
        shape = [batch, *(sizes.get(n, n) if not value.is_floating_point() else n for n in value.shape[1:])]
        if value.is_floating_point():
            made[name] = torch.randn(shape, dtype=torch.float64)
        elif "mask" in name:
            made[name] = torch.ones(shape, dtype=torch.int64)
        else:
            made[name] = torch.randint(3, 90, shape) if len(shape) > 1 else torch.randint(0, 2, shape)
    if "labels" in made and made["labels"].dim() == 2:
        made["labels"][0, :2] = -100
    return made


def _meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    _, _, inputs, symbols, tolerance = MODELS[name]
    model = _model(name)
    args, kwargs = synthesize_inputs(model)
    assert args == ()
    assert " ".join(sorted(kwargs)) == inputs
    assert all(v.is_meta for v in kwargs.values() if isinstance(v, torch.Tensor))
    configs = [dict(vars(m.config)) for m in model.modules() if hasattr(m, "config")]
    program = capture_call(model, args, _meta(kwargs))
    assert [dict(vars(m.config)) for m in model.modules() if hasattr(m, "config")] == configs
    assert " ".join(program.sizes.symbols) == symbols
    assert [o.name for o in program.outputs if o.loss] == ["loss"]
    canonicalize_program(program)
    calls = [(3, {64: 17, 48: 9})] if "batch" in symbols else [(2, {64: 17})]
    for batch, lengths in [(2, {}), *calls]:
        _compare(model, program, _inputs(model, batch, lengths), tolerance)


def _compare(model: Any, program: Program, kwargs: dict[str, Any], tolerance: float) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    found, wanted = run_program(program, model, (), kwargs), model(**kwargs)
    found = found.output if isinstance(found, Updated) else found  # some leave `config.problem_type` behind
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=tolerance, atol=0)
    ours = torch.autograd.grad(found.loss, parameters, allow_unused=True)
    eager = torch.autograd.grad(wanted.loss, parameters, allow_unused=True)
    greatest = max(float(g.norm()) for g in eager if g is not None)
    for a, b in zip(ours, eager, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert float((a - b).norm()) <= tolerance * max(float(b.norm()), 1e-4 * greatest)


@pytest.mark.slow
def test_t5_without_decoder_ids_shifts_labels() -> None:
    model = _model("t5")
    kwargs = {k: v for k, v in synthesize_inputs(model)[1].items() if k != "decoder_input_ids"}
    program = capture_call(model, (), kwargs)
    canonicalize_program(program)
    real = {k: v for k, v in _inputs(model, 3, {64: 17, 48: 9}).items() if k != "decoder_input_ids"}
    _compare(model, program, real, EXACT)


def test_padding_on_the_left_and_bf16() -> None:
    model = _model("llama").to(torch.bfloat16)
    program = capture_call(model, *synthesize_inputs(model))
    canonicalize_program(program)
    kwargs = _inputs(model, 2, {64: 12})
    kwargs["attention_mask"][0, :5] = 0
    found, wanted = run_program(program, model, (), kwargs), model(**kwargs)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-4, atol=0)  # attention rounds to bf16 less often


def test_mixture_of_experts() -> None:
    cls = transformers.MixtralForCausalLM
    torch.manual_seed(0)
    model = cls(cls.config_class(**GROUPED, num_local_experts=4, num_experts_per_tok=2)).train()
    program = capture_call(model, *synthesize_inputs(model))
    canonicalize_program(program)
    _compare(model, program, _inputs(model, 3, {64: 17}), 1e-4)


def test_dropout_gets_numbers_and_a_seed() -> None:
    cls = transformers.GPT2LMHeadModel
    model = cls(cls.config_class(**GPT2)).train()
    program = capture_call(model, *synthesize_inputs(model))
    canonicalize_program(program)
    dropouts = [draw_of(n) for n in program.graph.nodes if is_draw(n)]
    assert [d.op_id for d in dropouts] == list(range(4))  # embedding, attention, projection, MLP
    assert program.inputs[-1].kind == "seed"
    assert all(d.seed is program.placeholders()[-1] for d in dropouts)
    kwargs = _inputs(model, 2, {64: 16})
    first, again, other = (run_program(program, model, (), kwargs, seed=seed).loss for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    program = capture_call(model.eval(), *synthesize_inputs(model))
    canonicalize_program(program)
    assert program.inputs[-1].kind == "user"


def _leaves(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    return [leaf for part in (output if isinstance(output, tuple) else output.values()) for leaf in _leaves(part)]


@pytest.mark.slow
def test_calls_in_other_forms() -> None:
    """Tuple outputs, hidden states, a number of items, embedded inputs: all graphs of their own."""
    model = _model("gpt2")
    ids = torch.randint(3, 90, (2, 12))
    for kwargs in (
        {"input_ids": ids, "labels": ids, "return_dict": False},
        {"input_ids": ids, "labels": ids, "output_hidden_states": True},
        {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(20)},
        {"input_ids": ids, "logits_to_keep": 3},
        {"inputs_embeds": torch.randn(2, 12, 32, dtype=torch.float64), "labels": ids},
    ):
        program = capture_call(model, (), kwargs)
        canonicalize_program(program)
        found, wanted = run_program(program, model, (), kwargs), model(**kwargs, use_cache=False)
        assert type(found) is type(wanted)
        for a, b in zip(_leaves(found), _leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_error_for_a_model_that_is_not_hf() -> None:
    with pytest.raises(CaptureError) as caught:
        synthesize_inputs(torch.nn.Linear(2, 2))
    assert str(caught.value) == (
        "the inputs of a Linear are unknown\n"
        "  fix: pass example_inputs= (a tuple of args, a dict of kwargs, or both), or call the model once"
    )


def test_error_for_a_cache() -> None:
    cache = transformers.DynamicCache()
    cache.policy = object()
    with pytest.raises(CaptureError) as caught:
        capture_call(_model("gpt2"), (torch.ones(2, 8, dtype=torch.int64),), {"past_key_values": cache})
    assert str(caught.value) == (
        "a cache holds 'policy', a builtins.object, which cannot enter a graph\n"
        "  fix: generate with a DynamicCache (cache_implementation='dynamic', the default) or with use_cache=False"
    )
