"""A GPT in plain PyTorch with the options of Megatron's TransformerConfig, under the same names.

Attention is written out (products, mask, softmax), so that every option is a line of its own. With `cross_attention_size`
each layer also attends to an encoder's output.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class TransformerConfig:
    num_layers: int = 2
    hidden_size: int = 128
    num_attention_heads: int = 4
    vocab_size: int = 256
    max_position_embeddings: int = 128
    ffn_hidden_size: int | None = None  # 4 * hidden_size
    kv_channels: int | None = None  # hidden_size // num_attention_heads
    num_query_groups: int | None = None  # num_attention_heads
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    normalization: str = "LayerNorm"  # or "RMSNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    apply_residual_connection_post_layernorm: bool = False
    fp32_residual_connection: bool = False
    add_bias_linear: bool = True
    add_qkv_bias: bool = False  # where add_bias_linear is off
    gated_linear_unit: bool = False
    activation_func: Callable[[Tensor], Tensor] = F.gelu
    position_embedding_type: str = "learned_absolute"  # or "rope", "none"
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False
    rotary_base: float = 10000.0
    window_size: tuple[int, int] | None = None  # keys seen to the left and to the right; -1: all
    apply_query_key_layer_scaling: bool = False
    attention_softmax_in_fp32: bool = True
    cross_attention_size: int | None = None  # width of the encoder's output
    share_embeddings_and_output_weights: bool = True
    init_method_std: float = 0.02
    num_moe_experts: int | None = None  # moe.py


class Norm(nn.Module):
    """LayerNorm or RMSNorm; zero-centred gamma is weight + 1."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.rms, self.eps = config.normalization == "RMSNorm", config.layernorm_epsilon
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = nn.Parameter(torch.full((config.hidden_size,), 1.0 - self.offset))
        self.bias = None if self.rms else nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.offset else self.weight
        if not self.rms:
            return F.layer_norm(x, x.shape[-1:], weight, self.bias, self.eps)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * weight


def rotate(x: Tensor, config: TransformerConfig) -> Tensor:
    """Rotary embedding of the first rotary_percent of the last dim. x [batch, seq, heads, dim]."""
    width = int(x.shape[-1] * config.rotary_percent)
    inverse = config.rotary_base ** (-torch.arange(0, width, 2, device=x.device).float() / width)
    angle = torch.outer(torch.arange(x.shape[1], device=x.device).float(), inverse)[:, None]  # [seq, 1, width / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    turned, rest = x[..., :width], x[..., width:]
    if config.rotary_interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned.chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((turned, rest), dim=-1)


class CoreAttention(nn.Module):
    """Scores, mask, softmax, dropout, values. layer: counts from 1."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        self.drop = nn.Dropout(config.attention_dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        """q [batch, heads, seq, dim]; k, v [batch, groups, keys, dim] -> [batch, heads, seq, dim]."""
        config, share = self.config, q.shape[1] // k.shape[1]
        if share > 1:
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        scale, coefficient = 1 / math.sqrt(q.shape[-1]), 1.0
        if config.apply_query_key_layer_scaling:  # smaller scores in half precision, undone in fp32
            scale, coefficient = scale / self.layer, float(self.layer)
        scores = torch.matmul(q, k.transpose(-1, -2)) * scale
        if config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling:
            scores = scores.float()
        scores = scores * coefficient
        hidden = self.hidden(q.shape[2], k.shape[2], causal, q.device)
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return torch.matmul(self.drop(scores.softmax(-1).to(q.dtype)), v)

    def hidden(self, queries: int, keys: int, causal: bool, device: torch.device) -> Tensor | None:
        """[queries, keys], True where a query may not look; None where it may look everywhere."""
        if not causal:
            return None
        distance = torch.arange(queries, device=device)[:, None] - torch.arange(keys, device=device)
        mask = distance < 0
        left, right = self.config.window_size or (-1, -1)
        if left >= 0:
            mask = mask | (distance > left)
        return mask if right < 0 else mask | (distance < -right)


class SelfAttention(nn.Module):
    """One linear makes queries, keys and values: for each group its queries, then its key and value."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.groups = config.num_query_groups or config.num_attention_heads
        self.dim = config.kv_channels or config.hidden_size // config.num_attention_heads
        width = (config.num_attention_heads + 2 * self.groups) * self.dim
        self.linear_qkv = nn.Linear(config.hidden_size, width, bias=config.add_bias_linear or config.add_qkv_bias)
        self.core_attention = CoreAttention(config, layer)
        inner = config.num_attention_heads * self.dim
        self.linear_proj = nn.Linear(inner, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        share = self.config.num_attention_heads // self.groups
        mixed = self.linear_qkv(x).view(batch, seq, self.groups, (share + 2) * self.dim)
        q, k, v = mixed.split((share * self.dim, self.dim, self.dim), dim=-1)
        q = q.reshape(batch, seq, -1, self.dim)
        if self.config.position_embedding_type == "rope":
            q, k = rotate(q, self.config), rotate(k, self.config)
        y = self.core_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True)
        return self.linear_proj(y.transpose(1, 2).reshape(batch, seq, -1))


class CrossAttention(nn.Module):
    """Queries from the decoder, keys and values from the encoder, grouped as in self attention."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.groups = config.num_query_groups or config.num_attention_heads
        self.dim = config.kv_channels or config.hidden_size // config.num_attention_heads
        inner, bias = config.num_attention_heads * self.dim, config.add_bias_linear
        assert config.cross_attention_size is not None
        self.linear_q = nn.Linear(config.hidden_size, inner, bias=bias)
        self.linear_kv = nn.Linear(config.cross_attention_size, 2 * self.groups * self.dim, bias=bias)
        self.core_attention = CoreAttention(config, layer)
        self.linear_proj = nn.Linear(inner, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = self.linear_q(x).view(batch, seq, -1, self.dim).transpose(1, 2)
        mixed = self.linear_kv(memory).view(batch, memory.shape[1], self.groups, 2 * self.dim).transpose(1, 2)
        y = self.core_attention(q, *mixed.chunk(2, dim=-1), causal=False)
        return self.linear_proj(y.transpose(1, 2).reshape(batch, seq, -1))


class MLP(nn.Module):
    """Gated: one linear makes gate and up, side by side."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.ffn_hidden_size or 4 * config.hidden_size
        gated = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = nn.Linear(config.hidden_size, gated * width, bias=config.add_bias_linear)
        self.linear_fc2 = nn.Linear(width, config.hidden_size, bias=config.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear_fc1(x)
        if self.config.gated_linear_unit:
            gate, up = x.chunk(2, dim=-1)
            return self.linear_fc2(self.config.activation_func(gate) * up)
        return self.linear_fc2(self.config.activation_func(x))


class TransformerLayer(nn.Module):
    """norm, attention, dropout, add; [norm, cross attention, dropout, add]; norm, MLP, dropout, add."""

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.input_layernorm, self.self_attention = Norm(config), SelfAttention(config, layer)
        if config.cross_attention_size is not None:
            self.pre_cross_attn_layernorm, self.cross_attention = Norm(config), CrossAttention(config, layer)
        self.pre_mlp_layernorm = Norm(config)
        if config.num_moe_experts is None:
            self.mlp: nn.Module = MLP(config)
        else:
            from moe import MoELayer

            self.mlp = MoELayer(config)
        self.drop = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        x = self.add(x, self.input_layernorm, self.self_attention)
        if memory is not None:
            x = self.add(x, self.pre_cross_attn_layernorm, lambda y: self.cross_attention(y, memory))
        return self.add(x, self.pre_mlp_layernorm, self.mlp)

    def add(self, x: Tensor, norm: nn.Module, branch: Callable[[Tensor], Tensor]) -> Tensor:
        """The residual is what goes into the norm, or what comes out of it; in fp32 if asked for."""
        normed = norm(x.to(norm.weight.dtype))
        residual = normed if self.config.apply_residual_connection_post_layernorm else x
        return residual + self.drop(branch(normed))


class Transformer(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(TransformerLayer(config, i + 1) for i in range(config.num_layers))
        self.final_layernorm = Norm(config)
        self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.share_embeddings_and_output_weights:
            self.output_layer.weight = self.word_embeddings.weight
        self.initialise()

    def initialise(self) -> None:
        """N(0, std); what writes into the residual stream N(0, std / sqrt(2 L)); biases 0."""
        std = self.config.init_method_std
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
                nn.init.normal_(p, std=std / math.sqrt(2 * self.config.num_layers) if residual else std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: Tensor, targets: Tensor, memory: Tensor | None = None) -> Tensor:
        """idx, targets [batch, seq]; memory [batch, keys, cross_attention_size] -> the loss."""
        x = self.word_embeddings(idx)
        if self.config.position_embedding_type == "learned_absolute":
            x = x + self.position_embeddings(torch.arange(idx.shape[1], device=idx.device))
        x = self.drop(x)
        if self.config.fp32_residual_connection:
            x = x.float()
        for layer in self.layers:
            x = layer(x, memory)
        logits = self.output_layer(self.final_layernorm(x.to(self.final_layernorm.weight.dtype)))
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        extra = [layer.mlp.loss for layer in self.layers if getattr(layer.mlp, "loss", None) is not None]
        return loss + sum(extra) if extra else loss
