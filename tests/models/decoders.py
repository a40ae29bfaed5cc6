"""Decoders of the model matrix."""

from __future__ import annotations

from typing import Any

from catalogue import VOCAB, Architecture, short_text, text

LLAMA = {  # fields of Llama and of the many that name theirs alike
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def decoder(name: str, prefix: str, kind: str = "dense decoder", **fields: Any) -> Architecture:
    """A causal LM with classes <prefix>Config and <prefix>ForCausalLM."""
    options = {k: fields.pop(k) for k in ("attention", "least_sharded", "nested", "tried", "degrees") if k in fields}
    inputs = fields.pop("inputs", text)
    model = fields.pop("model", f"{prefix}ForCausalLM")
    return Architecture(name, kind, fields.pop("config", f"{prefix}Config"), model, TOKENS | fields, inputs, **options)


def llama_like(name: str, prefix: str, kind: str = "dense decoder", **fields: Any) -> Architecture:
    return decoder(name, prefix, kind, **(LLAMA | {"max_position_embeddings": 31} | fields))


def moe(name: str, prefix: str, **fields: Any) -> Architecture:
    return llama_like(name, prefix, "MoE decoder", **fields)


ROWS = (
    decoder("GPT-2", "GPT2", model="GPT2LMHeadModel", n_embd=30, n_head=5, n_layer=1, n_inner=53, n_positions=31),
    decoder(
        "GPT-Neo", "GPTNeo", hidden_size=30, num_heads=5, num_layers=2, intermediate_size=53, window_size=5,
        max_position_embeddings=31, attention_types=[[["global", "local"], 1]], attention=("eager",),
    ),
    decoder(
        "GPT-NeoX", "GPTNeoX", hidden_size=40, num_attention_heads=5, num_hidden_layers=1, intermediate_size=53,
        max_position_embeddings=31,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    decoder(
        "GPT-J", "GPTJ", n_embd=30, n_head=5, n_layer=1, n_inner=53, n_positions=31, rotary_dim=4,
        attention=("eager",)
    ),
    decoder(
        "GPT-BigCode", "GPTBigCode", n_embd=40, n_head=8, n_layer=1, n_inner=53, n_positions=31,
        degrees=(2, 3, 4, 8),
    ),
    decoder(
        "OPT", "OPT", hidden_size=30, word_embed_proj_dim=30, ffn_dim=53, num_attention_heads=5, num_hidden_layers=1,
        max_position_embeddings=31,
    ),
    decoder("Bloom", "Bloom", hidden_size=30, n_head=5, n_layer=1, attention=("eager",)),
    decoder(
        "Falcon (old decoder)", "Falcon", hidden_size=30, num_attention_heads=5, num_hidden_layers=1,
        ffn_hidden_size=53,
        multi_query=True, parallel_attn=True, bias=True, alibi=False, max_position_embeddings=31,
    ),
    decoder(
        "Falcon (new decoder)", "Falcon", hidden_size=36, num_attention_heads=6, num_kv_heads=3, num_hidden_layers=1,
        ffn_hidden_size=53, new_decoder_architecture=True, alibi=False, max_position_embeddings=31,
    ),
    decoder(
        "MPT", "Mpt", d_model=30, n_heads=5, n_layers=1, expansion_ratio=2, max_seq_len=31,
        attn_config={"attn_pdrop": 0},
        attention=("eager",),
    ),
    llama_like(
        "Phi", "Phi", hidden_size=48,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    llama_like("Phi-3", "Phi3", original_max_position_embeddings=31),
    llama_like("Llama", "Llama", num_hidden_layers=2),
    llama_like("Mistral", "Mistral", head_dim=8, sliding_window=5),
    moe("Mixtral", "Mixtral", num_local_experts=5, num_experts_per_tok=2, output_router_logits=True),
    llama_like("Qwen2", "Qwen2"),
    moe(
        "Qwen2-MoE", "Qwen2Moe", num_experts=5, num_experts_per_tok=2, moe_intermediate_size=23,
        shared_expert_intermediate_size=29, output_router_logits=True,
    ),
    llama_like("Qwen3", "Qwen3", head_dim=8),
    moe(
        "Qwen3-MoE", "Qwen3Moe", num_hidden_layers=2, head_dim=8, num_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=23,
        output_router_logits=True, mlp_only_layers=[0],
    ),
    llama_like("Gemma", "Gemma", head_dim=8, num_key_value_heads=1),
    llama_like(
        "Gemma 2", "Gemma2", num_hidden_layers=2, attention=("eager",), head_dim=8, sliding_window=5,
        query_pre_attn_scalar=8,
    ),
    llama_like(
        "Gemma 3", "Gemma3", num_hidden_layers=2, config="Gemma3TextConfig", head_dim=8, sliding_window=5,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
    ),
    llama_like("OLMo 2", "Olmo2"),
    llama_like("Cohere", "Cohere"),
    llama_like("Granite", "Granite", embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3),
    moe(
        "DeepSeek-V3", "DeepseekV3", num_hidden_layers=2, num_key_value_heads=6, n_routed_experts=6, n_group=3,
        topk_group=2, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=23, kv_lora_rank=11, q_lora_rank=13,
        qk_rope_head_dim=4, qk_nope_head_dim=5, v_head_dim=7, num_mtp_layers=0,
    ),
    moe(
        "GPT-OSS", "GptOss", num_hidden_layers=2, head_dim=8, num_local_experts=5, num_experts_per_tok=2,
        sliding_window=5, attention=("eager",),
        layer_types=["sliding_attention", "full_attention"], output_router_logits=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    llama_like("StarCoder2", "Starcoder2", sliding_window=5),
    llama_like(
        "SmolLM3", "SmolLM3", num_hidden_layers=2, no_rope_layers=[1, 0],
        layer_types=["full_attention", "full_attention"],
    ),
    decoder(
        "Mamba", "Mamba", "state space", hidden_size=30, state_size=5, num_hidden_layers=1, time_step_rank=3,
        expand=2, inputs=short_text, attention=("eager",),
    ),
    decoder(
        "XLNet", "XLNet", model="XLNetLMHeadModel", d_model=30, n_layer=1, n_head=5, d_inner=53, attention=("eager",),
        tried=True,
    ),
    decoder(
        "XGLM", "XGLM", d_model=30, ffn_dim=53, num_layers=1, attention_heads=5, max_position_embeddings=31, tried=True,
        attention=("eager",),
    ),
    moe(
        "DeepSeek-V2", "DeepseekV2", num_hidden_layers=2, num_key_value_heads=6, n_routed_experts=6, n_group=3,
        topk_group=2, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, moe_intermediate_size=23,
        kv_lora_rank=12, q_lora_rank=13, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=7, tried=True,
    ),
    llama_like("Apertus", "Apertus", tried=True),
)  # fmt: skip
