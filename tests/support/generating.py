"""Models that generate text, and calls of `generate`, for tests on one process and on ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers

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


def transcribe(model: Any, name: str, call: str, tokens: int = 9, seq: int = 40) -> torch.Tensor:
    """generate() of a model with an encoder, after a seed that differs between ranks."""
    features = torch.randn(2, 8, seq, generator=torch.Generator().manual_seed(1))
    given = {"input_features": features} if name == "whisper" else prompt(padded=True)
    options = {"max_new_tokens": tokens, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(5 + seed_of_rank() * hasattr(model, "megafx"))
    return model.generate(**given, **CALLS[call], **options)
