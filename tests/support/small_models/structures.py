"""Tiny Hugging Face models at fp64, with weights that matter, and the calls that tests of call structures make of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB, BATCH, SEQ, MEMORY = 67, 3, 13, 11
IDS = torch.randint(3, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[:, ::5] = -100
ONES = torch.ones_like(IDS)
RIGHT, LEFT = ONES.clone(), ONES.clone()  # masks: what is padded
RIGHT[0, 9:] = 0
LEFT[1, :4] = 0
PACKED = torch.cat([torch.arange(n) for n in (4, 6, 3)]).repeat(BATCH, 1)  # three sequences in a row
TYPES = (torch.arange(SEQ) > 5).long().repeat(BATCH, 1)


def ready(model: nn.Module) -> nn.Module:
    """fp64, training mode; norms and biases drawn too, which fresh models have at 1 and 0."""
    with torch.no_grad():
        for p in model.double().train().parameters():
            p.add_(0.1 * torch.randn(p.shape, dtype=p.dtype))
    return model


def llama(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=36, num_hidden_layers=1, intermediate_size=53, vocab_size=VOCAB, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=64, pad_token_id=0, use_cache=False, **fields,
    )  # fmt: skip
    return ready(transformers.LlamaForCausalLM(config))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=30, n_layer=1, n_head=5, n_inner=53, vocab_size=VOCAB, n_positions=31, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, use_cache=False,
    )  # fmt: skip
    return ready(transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=30, num_attention_heads=5, vocab_size=VOCAB, intermediate_size=53,
        max_position_embeddings=31, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ready(transformers.BertForMaskedLM(config))


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.T5Config(
        num_layers=1, d_model=30, num_heads=5, d_kv=6, vocab_size=VOCAB, d_ff=53, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return ready(transformers.T5ForConditionalGeneration(config))


def bart(**fields: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=30, encoder_layers=1, decoder_layers=1, encoder_attention_heads=5, decoder_attention_heads=5,
        encoder_ffn_dim=53, decoder_ffn_dim=53, vocab_size=VOCAB, max_position_embeddings=31, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, use_cache=False, **fields,
    )  # fmt: skip
    return ready(transformers.BartForConditionalGeneration(config))


def numbers(*shape: int, grad: bool = False) -> torch.Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return drawn.requires_grad_(grad)


def encoded(grad: bool = False) -> Any:
    """An encoder's output [batch, MEMORY, 30] that the caller has made himself."""
    return transformers.modeling_outputs.BaseModelOutput(last_hidden_state=numbers(BATCH, MEMORY, 30, grad=grad))


def memory_mask() -> torch.Tensor:
    mask = torch.ones(BATCH, MEMORY, dtype=torch.int64)
    mask[1, 7:] = 0
    return mask


def lower_triangle(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool).tril()


# name -> (model, kwargs of its call). The calls are made anew for each test: some have leaves that collect gradients.
STRUCTURES: dict[str, tuple[Any, Any]] = {
    "labels": (llama, lambda: {"input_ids": IDS, "labels": LABELS}),
    "no labels": (llama, lambda: {"input_ids": IDS}),
    "padded on the right": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "attention_mask": RIGHT}),
    "padded on the left": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "attention_mask": LEFT}),
    "mask of ones": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "attention_mask": ONES}),
    "mask of pairs": (
        llama, lambda: {"input_ids": IDS, "labels": LABELS, "attention_mask": lower_triangle(BATCH, 1, SEQ, SEQ)},
    ),
    "mask to add": (
        llama,
        lambda: {"input_ids": IDS, "attention_mask": torch.zeros(BATCH, 1, SEQ, SEQ, dtype=torch.float64).masked_fill(
            ~lower_triangle(SEQ, SEQ), -1e9)},
    ),
    "positions": (
        llama, lambda: {"input_ids": IDS, "labels": LABELS, "position_ids": torch.arange(2, 15).repeat(BATCH, 1)}
    ),
    "packed": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "position_ids": PACKED}),
    "packed, eager attention": (
        lambda: llama(attn_implementation="eager"),
        lambda: {"input_ids": IDS, "labels": LABELS, "position_ids": PACKED},
    ),
    "embeddings": (llama, lambda: {"inputs_embeds": numbers(BATCH, SEQ, 36), "labels": LABELS}),
    "embeddings with gradients": (
        llama, lambda: {"inputs_embeds": numbers(BATCH, SEQ, 36, grad=True), "labels": LABELS}
    ),
    "hidden states": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "output_hidden_states": True}),
    "hidden states, no labels": (llama, lambda: {"input_ids": IDS, "output_hidden_states": True}),
    "attentions": (
        lambda: llama(attn_implementation="eager"),
        lambda: {"input_ids": IDS, "labels": LABELS, "output_attentions": True},
    ),
    "attentions, no labels": (
        lambda: llama(attn_implementation="eager"), lambda: {"input_ids": IDS, "output_attentions": True},
    ),
    "tuple": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "return_dict": False}),
    "items": (llama, lambda: {"input_ids": IDS, "labels": LABELS, "num_items_in_batch": 17}),
    "last logits": (llama, lambda: {"input_ids": IDS, "logits_to_keep": 1}),
    "token types": (
        bert,
        lambda: {"input_ids": IDS, "labels": LABELS, "attention_mask": RIGHT, "token_type_ids": TYPES,
                 "position_ids": torch.arange(SEQ).flip(0).repeat(BATCH, 1)},
    ),
    "no token types": (bert, lambda: {"input_ids": IDS}),
    "embeddings of an encoder": (
        bert,
        lambda: {"inputs_embeds": numbers(BATCH, SEQ, 30, grad=True), "labels": LABELS, "attention_mask": RIGHT},
    ),
    "types in a decoder": (gpt2, lambda: {"input_ids": IDS, "labels": LABELS, "token_type_ids": TYPES}),
    "two sequences": (t5, lambda: {"input_ids": IDS, "labels": LABELS[:, :10].contiguous(), "attention_mask": RIGHT}),
    "decoder ids and mask": (
        t5, lambda: {"input_ids": IDS, "decoder_input_ids": IDS[:, :10], "decoder_attention_mask": RIGHT[:, :10]}
    ),
    "encoder outputs": (
        bart, lambda: {"encoder_outputs": encoded(grad=True), "labels": LABELS, "attention_mask": memory_mask()}
    ),
    "encoder outputs in a tuple": (
        t5, lambda: {"encoder_outputs": (numbers(BATCH, MEMORY, 30),), "labels": LABELS}
    ),
}  # fmt: skip
