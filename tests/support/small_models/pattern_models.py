"""Tiny models for equivalence/test_patterns_in_models.py: Hugging Face's from configs, and two by hand.
`MODELS[name]()` -> model, call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import zoo
from torch import nn

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 67}
COMMON = {**SIZES, "num_hidden_layers": 1, "max_position_embeddings": 64}
NO_TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
IDS = torch.arange(32).view(2, 16) + 1
CALL = {"input_ids": IDS, "labels": IDS}
PADDED = CALL | {"attention_mask": torch.ones_like(IDS)}


def hugging_face(
    kind: str, head: str = "ForCausalLM", call: dict[str, Any] = CALL, **config: Any
) -> Callable[..., Any]:
    """The class <kind><head> from <kind>Config(**config)."""

    def make(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
        import transformers

        torch.manual_seed(0)
        built = getattr(transformers, f"{kind}Config")(**config, **options)
        built.use_cache = False
        return getattr(transformers, kind + head)(built), call

    return make


class Attention(nn.Module):
    """nanoGPT's: fused q, k, v, a causal buffer or the library's attention."""

    def __init__(self, width: int, heads: int, p: float, library: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.p, self.library, self.drop = heads, p, library, nn.Dropout(p)
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).split(c, dim=2))
        if self.library:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
            att = F.dropout(F.softmax(att, dim=-1), self.p, self.training)
            y = att @ v
        return self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class NanoGPT(nn.Module):
    def __init__(self, library: bool, p: float = 0.1, width: int = 32) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(67, width), nn.Embedding(64, width), nn.Dropout(p)
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width, 4, p, library), nn.LayerNorm(width)
        self.up, self.down, self.ln_f = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, 67, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device)))
        x = x + self.attn(self.ln_1(x))
        x = x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))
        logits = self.head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Llama(nn.Module):
    """Meta's: complex-free rotary pairs, heads repeated before the transpose, a mask of triu(-inf), the softmax in fp32."""

    def __init__(self, width: int = 32, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.d = heads, kv, width // heads
        self.tokens = nn.Embedding(67, width)
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(3)])
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = (nn.Linear(width, kv * self.d, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, 48, bias=False) for _ in range(2))
        self.w2, self.output = nn.Linear(48, width, bias=False), nn.Linear(width, 67, bias=False)

    def norm(self, x: torch.Tensor, i: int) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.norms[i]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        s = x.shape[1]
        angles = torch.outer(torch.arange(s), 1.0 / 10000 ** (torch.arange(0, self.d, 2) / self.d))
        cos, sin = angles.cos()[None, :, None, :], angles.sin()[None, :, None, :]
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).type_as(x)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        b, s = tokens.shape
        h = self.tokens(tokens)
        x = self.norm(h, 0)
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k = self.rotate(q.view(b, s, self.heads, self.d)), self.rotate(k.view(b, s, self.kv, self.d))
        v, g = v.view(b, s, self.kv, self.d), self.heads // self.kv
        k, v = (y[:, :, :, None, :].expand(b, s, self.kv, g, self.d).reshape(b, s, self.heads, self.d) for y in (k, v))
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        mask = torch.triu(torch.full((s, s), float("-inf")), diagonal=1)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.d) + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        h = h + self.wo(torch.matmul(weights, v).transpose(1, 2).reshape(b, s, -1))
        x = self.norm(h, 1)
        h = h + self.w2(F.silu(self.w1(x)) * self.w3(x))
        logits = self.output(self.norm(h, 2))
        return F.cross_entropy(logits.view(-1, 67).float(), targets.view(-1))


def t5(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 1, "d_model": 32, "num_heads": 4, "d_kv": 8, "vocab_size": 67, "d_ff": 48}
    config = T5Config(**sizes, use_cache=False, decoder_start_token_id=0, pad_token_id=0, **options)
    return T5ForConditionalGeneration(config), CALL


FALCON = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 67, **NO_TOKENS}
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MODELS: dict[str, Callable[..., Any]] = {
    "gpt2": hugging_face(
        "GPT2", "LMHeadModel", n_layer=1, n_embd=32, n_head=4, vocab_size=67, n_positions=64, **NO_TOKENS
    ),
    "bert": hugging_face("Bert", "ForMaskedLM", PADDED, **COMMON),
    "llama": hugging_face("Llama", **COMMON, num_key_value_heads=2),
    "t5": t5,
    "gemma": hugging_face("Gemma", **COMMON, num_key_value_heads=1, head_dim=8),
    "qwen3": hugging_face("Qwen3", **COMMON, num_key_value_heads=2, head_dim=8),
    "gemma2": hugging_face("Gemma2", **COMMON, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "gpt_neox": hugging_face("GPTNeoX", **COMMON, **NO_TOKENS),
    "falcon": hugging_face("Falcon", **FALCON),
    "falcon new": hugging_face("Falcon", **FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon alibi": hugging_face("Falcon", call=PADDED, **FALCON, **DROPS, alibi=True, parallel_attn=False, bias=True),
    "phi": hugging_face("Phi", **COMMON, **NO_TOKENS),
    "phi3": hugging_face("Phi3", **COMMON, **NO_TOKENS, resid_pdrop=0.1),
    "opt": hugging_face(
        "OPT", hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=67,
        max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    "bloom": hugging_face("Bloom", call=PADDED, hidden_size=32, n_layer=1, n_head=4, vocab_size=67, **DROPS, **NO_TOKENS),
    "gpt_neo": hugging_face(
        "GPTNeo", hidden_size=32, num_layers=1, attention_types=[[["global"], 1]], num_heads=4, vocab_size=67,
        max_position_embeddings=64, **NO_TOKENS,
    ),
    "gptj": hugging_face("GPTJ", n_embd=32, n_layer=1, n_head=4, vocab_size=67, rotary_dim=4, n_positions=64, **NO_TOKENS),
    "nanogpt": lambda: (NanoGPT(library=False), {"idx": IDS, "targets": IDS}),
    "nanogpt sdpa": lambda: (NanoGPT(library=True), {"idx": IDS, "targets": IDS}),
    "llama by hand": lambda: (Llama(), {"tokens": IDS, "targets": IDS}),
    "example": lambda: (lambda m, inputs: (m, inputs(2, 16)))(*zoo.nanogpt(dropout=0.1)),
}  # fmt: skip
