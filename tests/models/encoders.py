"""Encoders, encoder-decoders and vision models of the model matrix."""

from __future__ import annotations

from typing import Any

import torch
from catalogue import (
    BATCH,
    PADDED,
    SEQ,
    TARGET_SEQ,
    VOCAB,
    Architecture,
    Inputs,
    floats,
    ids,
    padding,
    text,
    token_labels,
)
from torch import nn

BERT = {  # fields of BERT and of those that name theirs alike
    "vocab_size": VOCAB,
    "hidden_size": 30,
    "intermediate_size": 53,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "max_position_embeddings": 31,
    "pad_token_id": 0,
}
PATCHES = {"hidden_size": 30, "intermediate_size": 53, "num_hidden_layers": 1, "num_attention_heads": 5}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}


def row(name: str, kind: str, prefix: str, head: str, inputs: Inputs, **fields: Any) -> Architecture:
    """An architecture with classes <prefix>Config and <prefix><head>."""
    attention = fields.pop("attention", ("eager", "sdpa"))
    return Architecture(name, kind, f"{prefix}Config", f"{prefix}{head}", fields, inputs, attention, least_sharded=0.0)


def encoder(name: str, prefix: str, **fields: Any) -> Architecture:
    return row(name, "encoder", prefix, "ForMaskedLM", text, **(BERT | fields))


def source_and_target(model: nn.Module) -> dict[str, Any]:
    """Token ids for the encoder, labels for the decoder, which starts from them shifted."""
    return {
        "input_ids": ids(BATCH, SEQ),
        "attention_mask": padding(BATCH, SEQ),
        "labels": token_labels(BATCH, TARGET_SEQ),
    }


def pixels(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    size = (BATCH, config.num_channels, config.image_size, config.image_size)
    return {"pixel_values": floats(*size), "labels": torch.tensor([0, 2, 1])}


def text_and_pixels(model: nn.Module) -> dict[str, Any]:
    size = model.config.vision_config.image_size  # type: ignore[union-attr]
    tokens = ids(BATCH, SEQ)
    tokens[:, -PADDED] = VOCAB - 1  # where the text ends
    return {"input_ids": tokens, "pixel_values": floats(BATCH, 3, size, size), "return_loss": True}


def sound(model: nn.Module) -> dict[str, Any]:
    config: Any = model.config
    frames = floats(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": frames, "labels": token_labels(BATCH, TARGET_SEQ)}


T5 = {
    "vocab_size": VOCAB, "d_model": 30, "d_kv": 6, "d_ff": 53, "num_layers": 1, "num_heads": 5,
    "relative_attention_num_buckets": 7, "relative_attention_max_distance": 11, "attention": ("eager",),
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
BART = {
    "vocab_size": VOCAB, "d_model": 30, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 5,
    "decoder_attention_heads": 5, "encoder_ffn_dim": 53, "decoder_ffn_dim": 47, "max_position_embeddings": 31, **SPECIAL,
}  # fmt: skip
TOWERS = {
    "text_config": {**BERT, "eos_token_id": VOCAB - 1, "projection_dim": 22},
    "vision_config": {**PATCHES, "image_size": 12, "patch_size": 4},
}
PAIR, VISION = "encoder-decoder", "vision"

ROWS = (
    encoder("BERT", "Bert"),
    encoder("RoBERTa", "Roberta", max_position_embeddings=35),
    encoder("ALBERT", "Albert", embedding_size=14, num_hidden_layers=2, attention_probs_dropout_prob=0.0),
    row(
        "DistilBERT", "encoder", "DistilBert", "ForMaskedLM", text, vocab_size=VOCAB, dim=30, hidden_dim=53, n_layers=1,
        n_heads=5, max_position_embeddings=31, pad_token_id=0,
    ),
    encoder("ELECTRA", "Electra", embedding_size=14),
    encoder("DeBERTa-v2", "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], attention=("eager",)),
    encoder(
        "ModernBERT", "ModernBert", num_hidden_layers=2, local_attention=6, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2, layer_types=["full_attention", "sliding_attention"],
    ),
    row("ViT", VISION, "ViT", "ForImageClassification", pixels, **PATCHES, image_size=12, patch_size=4, num_labels=3),
    row("CLIP", VISION, "CLIP", "Model", text_and_pixels, **TOWERS, projection_dim=22),
    row("SigLIP", VISION, "Siglip", "Model", text_and_pixels, **TOWERS),
    row(
        "Swin", VISION, "Swin", "ForImageClassification", pixels, embed_dim=10, depths=[2], num_heads=[5], window_size=2,
        image_size=16, patch_size=4, num_labels=3, drop_path_rate=0.0,
    ),
    row("T5", PAIR, "T5", "ForConditionalGeneration", source_and_target, **T5),
    row("mT5", PAIR, "MT5", "ForConditionalGeneration", source_and_target, **T5),
    row("BART", PAIR, "Bart", "ForConditionalGeneration", source_and_target, **BART),
    row("Pegasus", PAIR, "Pegasus", "ForConditionalGeneration", source_and_target, **BART),
    row(
        "Whisper", PAIR, "Whisper", "ForConditionalGeneration", sound, num_mel_bins=7, max_source_positions=11,
        max_target_positions=31, **{k: v for k, v in BART.items() if k != "max_position_embeddings"},
    ),
)  # fmt: skip
