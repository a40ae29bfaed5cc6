"""Small models that the tests parallelize. Sizes are odd on purpose: few of them divide by 2, 3 and 4.

`ZOO[name](**options)` gives (model, inputs), inputs(batch, seq) being the kwargs of a call with labels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "models"
Inputs = Callable[..., dict[str, Any]]


def example(name: str) -> Any:
    """The module examples/models/<name>.py."""
    import sys

    full = f"megafx_example_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[full] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full])
    return sys.modules[full]


def _ids(vocab: int, batch: int, seq: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))


def _labels(vocab: int, batch: int, seq: int) -> torch.Tensor:
    labels = _ids(vocab, batch, seq, seed=1)
    labels[:, 1::5] = -100
    return labels


def nanogpt(*, dropout: float = 0.0, layers: int = 1, heads: int = 4, vocab: int = 67, embd: int = 24) -> Any:
    """Fused QKV, GELU, dropout, tied head, learned positions (examples/models/gpt.py)."""
    gpt = example("gpt")
    config = gpt.GPTConfig(vocab_size=vocab, n_layer=layers, n_head=heads, n_embd=embd, block_size=64, dropout=dropout)
    model = gpt.GPT(config)
    return model, lambda b, s: {"idx": _ids(vocab, b, s), "targets": _labels(vocab, b, s)}


def gpt2(*, dropout: float = 0.0, layers: int = 1, heads: int = 4, vocab: int = 67, attn: str = "sdpa") -> Any:
    """Hugging Face GPT-2: Conv1D, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_embd=24, n_head=heads, vocab_size=vocab, n_positions=64, n_inner=50,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        attn_implementation=attn, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), lambda b, s: {"input_ids": _ids(vocab, b, s), "labels": _labels(vocab, b, s)}


def llama(
    *,
    dropout: float = 0.0,
    layers: int = 1,
    heads: int = 4,
    kv: int = 2,
    vocab: int = 67,
    attn: str = "sdpa",
    hidden: int = 24,
) -> Any:
    """Hugging Face Llama: grouped queries, rotary positions, SwiGLU, RMSNorm."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=6,
        vocab_size=vocab, intermediate_size=50, max_position_embeddings=64, attention_dropout=dropout,
        attn_implementation=attn,
    )  # fmt: skip
    return LlamaForCausalLM(config), lambda b, s: {"input_ids": _ids(vocab, b, s), "labels": _labels(vocab, b, s)}


def bert(*, dropout: float = 0.0, layers: int = 1, heads: int = 4, vocab: int = 67, attn: str = "sdpa") -> Any:
    """Hugging Face BERT: post-norm, token types, padded batch, MLM head."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        num_hidden_layers=layers, hidden_size=24, num_attention_heads=heads, vocab_size=vocab, intermediate_size=50,
        max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation=attn,
    )  # fmt: skip

    def inputs(b: int, s: int) -> dict[str, Any]:
        mask = torch.ones(b, s, dtype=torch.long)
        mask[0, -2:] = 0
        types = torch.zeros(b, s, dtype=torch.long)
        types[:, s // 2 :] = 1
        ids, labels = _ids(vocab, b, s), _labels(vocab, b, s)
        return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types, "labels": labels}

    return BertForMaskedLM(config), inputs


def t5(*, dropout: float = 0.0, layers: int = 1, heads: int = 4, vocab: int = 67) -> Any:
    """Hugging Face T5: encoder and decoder, relative position bias, cross attention, tied."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers, d_model=24, num_heads=heads, d_kv=6, vocab_size=vocab, d_ff=50, dropout_rate=dropout,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip

    def inputs(b: int, s: int) -> dict[str, Any]:
        return {"input_ids": _ids(vocab, b, s), "labels": _labels(vocab, b, s - 2)}

    return T5ForConditionalGeneration(config), inputs


ZOO: dict[str, Callable[..., tuple[nn.Module, Inputs]]] = {
    "nanogpt": nanogpt,
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
}


def build(name: str, **options: Any) -> tuple[nn.Module, Inputs]:
    """A model of the zoo in fp64 training mode, its weights drawn with seed 0 and made large enough to matter."""
    torch.manual_seed(0)
    model, inputs = ZOO[name](**options)
    model = model.double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype) * 0.2)
    return model, inputs
