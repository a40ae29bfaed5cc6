"""The models of fuzz/grammar.py, written as people write them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from grammar import Attention, Block, Case, Mlp
from torch import Tensor, nn

ACTIVATION = {
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "relu squared": lambda x: F.relu(x) ** 2,
    "softplus": F.softplus,
    "elu": F.elu,
    "hardswish": F.hardswish,
    "mish": F.mish,
    "tanh": torch.tanh,
}
PADDING = 0  # the id of padding tokens


class HandWrittenNorm(nn.Module):
    def __init__(self, hidden: int, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden)) if centred else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


def norm(kind: str, hidden: int) -> nn.Module:
    made: dict[str, Any] = {
        "layer": lambda: nn.LayerNorm(hidden),
        "layer without bias": lambda: nn.LayerNorm(hidden, bias=False),
        "layer without weights": lambda: nn.LayerNorm(hidden, elementwise_affine=False),
        "rms": lambda: nn.RMSNorm(hidden, eps=1e-6),
        "hand-written layer": lambda: HandWrittenNorm(hidden, True),
        "hand-written rms": lambda: HandWrittenNorm(hidden, False),
        "none": nn.Identity,
    }
    return made[kind]()


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """x: [b, heads, s, width]."""
    half = x.shape[-1] // 2
    frequency = 100.0 ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[2], device=x.device, dtype=x.dtype)[:, None] * frequency
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class SelfAttention(nn.Module):
    def __init__(self, spec: Attention, hidden: int, position: str, longest: int) -> None:
        super().__init__()
        self.spec, self.position = spec, position
        all_heads, groups = spec.heads * spec.width, spec.key_value_heads * spec.width
        self.sizes = [all_heads, groups, groups]
        if spec.projection == "apart":
            self.q, self.k, self.v = (nn.Linear(hidden, n, bias=spec.bias) for n in self.sizes)
        elif spec.projection == "three of the input":
            self.weight = nn.Parameter(torch.randn(3, all_heads, hidden) / math.sqrt(hidden))
        elif spec.projection == "transposed":
            self.weight = nn.Parameter(torch.randn(hidden, sum(self.sizes)) / math.sqrt(hidden))
            self.bias = nn.Parameter(torch.randn(sum(self.sizes)))
        else:
            self.qkv = nn.Linear(hidden, sum(self.sizes), bias=spec.bias)
        if spec.query_key_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(spec.width, eps=1e-6), nn.RMSNorm(spec.width, eps=1e-6)
        if spec.mask == "learned bias":
            self.table = nn.Parameter(torch.randn(spec.heads, longest, longest))
        self.out = nn.Linear(all_heads, hidden, bias=spec.bias)

    def project(self, x: Tensor) -> list[Tensor]:
        """-> q, k, v: [b, heads, s, width]."""
        spec, (b, s, _) = self.spec, x.shape
        heads = (spec.heads, spec.key_value_heads, spec.key_value_heads)
        if spec.projection == "apart":
            parts = [self.q(x), self.k(x), self.v(x)]
        elif spec.projection == "three of the input":
            parts = list(torch.einsum("bsh,noh->nbso", x, self.weight))
        elif spec.projection == "transposed":
            flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
            parts = list(flat.view(b, s, -1).split(self.sizes[0], dim=2))
        else:
            whole = self.qkv(x)
            if spec.projection == "unbind":
                return [t.transpose(1, 2) for t in whole.view(b, s, 3, spec.heads, spec.width).unbind(2)]
            if spec.projection == "by head":
                return [t.transpose(1, 2) for t in whole.view(b, s, spec.heads, 3 * spec.width).chunk(3, -1)]
            if spec.projection == "slices":
                a, c = self.sizes[0], self.sizes[0] + self.sizes[1]
                parts = [whole[..., :a], whole[..., a:c], whole[..., c:]]
            elif spec.projection == "split":
                parts = list(whole.split(self.sizes, -1))
            else:
                parts = list(whole.chunk(3, -1))
        return [t.view(b, s, n, spec.width).transpose(1, 2) for t, n in zip(parts, heads, strict=True)]

    def additive(self, x: Tensor, padding: Tensor) -> Tensor | None:
        """The mask as numbers to be added to scores, [1 or b, 1 or heads, s, s]."""
        s, kind = x.shape[1], self.spec.mask
        at = torch.arange(s, device=x.device)
        allowed = torch.ones(1, 1, s, s, dtype=torch.bool, device=x.device)
        if kind == "none":
            return None
        if kind in ("causal", "causal and padding", "alibi", "learned bias"):
            allowed = torch.tril(allowed)
        if kind == "window":
            allowed = ((at[:, None] >= at) & (at[:, None] - at < 3))[None, None]
        if kind in ("padding", "causal and padding"):
            allowed = allowed & padding[:, None, None, :]
        scores = torch.zeros(allowed.shape, dtype=x.dtype, device=x.device).masked_fill(~allowed, -1e9)
        if kind == "alibi":
            slopes = 2.0 ** -torch.arange(1, self.spec.heads + 1, device=x.device, dtype=x.dtype)
            scores = scores - slopes[:, None, None] * (at[:, None] - at).abs()
        if kind == "learned bias":
            scores = scores + self.table[:, :s, :s]
        return scores

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        spec = self.spec
        q, k, v = self.project(x)
        if spec.query_key_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if "rope" in self.position:
            q, k = (rotate(t, "interleaved" in self.position) for t in (q, k))
        if spec.key_value_heads != spec.heads:
            k, v = (t.repeat_interleave(spec.heads // spec.key_value_heads, dim=1) for t in (k, v))
        p = spec.dropout if self.training else 0.0
        mask = self.additive(x, padding)
        if spec.scores == "sdpa" and spec.mask in ("causal", "none"):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=spec.mask == "causal")
        elif spec.scores.startswith("sdpa"):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        else:
            out = F.dropout(self.scores(q, k, mask).softmax(-1), p, self.training) @ v
        return self.out(out.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        kind, scale = self.spec.scores, 1 / math.sqrt(self.spec.width)
        if kind == "einsum":
            scores = torch.einsum("bnsw,bntw->bnst", q, k) * scale
        elif kind == "baddbmm":
            b, n, s, _ = q.shape
            start = q.new_zeros(b * n, s, s) if mask is None else mask.expand(b, n, s, s).reshape(b * n, s, s)
            flat = (t.reshape(b * n, s, -1) for t in (q, k.transpose(2, 3).transpose(2, 3)))
            first, second = flat
            return torch.baddbmm(start, first, second.transpose(1, 2), alpha=scale).view(b, n, s, s)
        else:
            scores = (q * scale) @ k.transpose(-1, -2)
        if kind == "softcap":
            scores = torch.tanh(scores / 5) * 5
        if mask is None:
            return scores
        if kind == "masked_fill" and self.spec.mask not in ("alibi", "learned bias"):
            return scores.masked_fill(mask < 0, torch.finfo(scores.dtype).min)
        return scores + mask


class FeedForward(nn.Module):
    def __init__(self, spec: Mlp, hidden: int) -> None:
        super().__init__()
        self.spec, width = spec, spec.width

        def linear(a: int, b: int) -> nn.Linear:
            return nn.Linear(a, b, bias=spec.bias)

        if spec.kind == "glu of two linears":
            self.gate, self.up, self.down = linear(hidden, width), linear(hidden, width), linear(width, hidden)
        elif spec.kind in ("glu of halves", "interleaved glu"):
            self.up, self.down = linear(hidden, 2 * width), linear(width, hidden)
        elif spec.kind == "low rank":
            self.a, self.up, self.down = linear(hidden, 4), linear(4, width), linear(width, hidden)
        elif spec.kind in ("convolution", "depthwise"):
            groups = hidden if spec.kind == "depthwise" else 1
            self.conv = nn.Conv1d(hidden, hidden, 3, padding=2, groups=groups, bias=spec.bias)
            self.up, self.down = linear(hidden, width), linear(width, hidden)
        elif spec.kind == "mixture":
            self.router = nn.Linear(hidden, 4, bias=False)
            self.up = nn.Parameter(torch.randn(4, hidden, width) / math.sqrt(hidden))
            self.down = nn.Parameter(torch.randn(4, width, hidden) / math.sqrt(width))
        elif spec.kind == "plain":
            self.up, self.down = linear(hidden, width), linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        kind, act = self.spec.kind, ACTIVATION[self.spec.activation]
        if kind == "none":
            return x * 0.5
        if kind == "mixture":
            weights = self.router(x).softmax(-1)
            each = torch.einsum("bsh,ehw->bsew", x, self.up)
            out = torch.einsum("bsew,ewh->bseh", act(each), self.down)
            return (out * weights[..., None]).sum(2)
        if kind == "glu of two linears":
            inner = act(self.gate(x)) * self.up(x)
        elif kind == "glu of halves":
            a, b = self.up(x).chunk(2, dim=-1)
            inner = act(a) * b
        elif kind == "interleaved glu":
            whole = self.up(x)
            inner = act(whole[..., ::2]) * whole[..., 1::2]
        elif kind == "low rank":
            inner = act(self.up(self.a(x)))
        elif kind in ("convolution", "depthwise"):
            inner = act(self.up(self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)))
        else:
            inner = act(self.up(x))
        return F.dropout(self.down(inner), self.spec.dropout, self.training)


class Layer(nn.Module):
    def __init__(self, spec: Block, case: Case) -> None:
        super().__init__()
        self.spec, hidden = spec, case.hidden
        self.attention = (
            SelfAttention(spec.attention, hidden, case.position, case.sequence + 3) if spec.attention else None
        )
        self.mlp = FeedForward(spec.mlp, hidden)
        self.norms = nn.ModuleList(norm(spec.norm, hidden) for _ in range(4))
        self.gate = nn.Linear(hidden, hidden) if spec.residual in ("gated", "highway") else None
        self.join = nn.Linear(2 * hidden, hidden) if spec.residual == "concatenated" else None
        self.register_buffer("order", torch.randperm(hidden))
        if spec.view in ("token shift", "recurrence"):
            self.mix = nn.Parameter(torch.rand(hidden))
        if spec.view == "running mean":
            self.register_buffer("mean", torch.zeros(hidden))
        self.memory: Tensor | None = None
        self.calls = 0

    def add(self, x: Tensor, branch: Any, first: int) -> Tensor:
        """The residual around a branch, which is a function."""
        kind, p = self.spec.residual, self.spec.dropout
        norm, second = self.norms[first], self.norms[first + 1]

        def drop(y: Tensor) -> Tensor:
            return F.dropout(y, p, self.training)

        if kind == "post":
            return norm(x + drop(branch(x)))
        if kind == "sandwich":
            return x + second(drop(branch(norm(x))))
        if kind == "scaled":
            return x * 1.3 + 0.7 * drop(branch(norm(x)))
        if kind == "gated":
            return x + torch.sigmoid(self.gate(x)) * drop(branch(norm(x)))
        if kind == "highway":
            g = torch.sigmoid(self.gate(x))
            return g * x + (1 - g) * drop(branch(norm(x)))
        if kind == "concatenated":
            return self.join(torch.cat((x, drop(branch(norm(x)))), dim=-1))
        if kind == "none":
            return drop(branch(norm(x)))
        return x + drop(branch(norm(x)))

    def both(self, x: Tensor, padding: Tensor) -> Tensor:
        if self.spec.residual == "parallel":
            y = self.norms[0](x)
            attended = self.attention(y, padding) if self.attention is not None else 0
            return x + attended + self.mlp(y)
        if self.attention is not None:
            x = self.add(x, lambda y: self.attention(y, padding), 0)
        return self.add(x, self.mlp, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        view, (b, s, h) = self.spec.view, x.shape
        if view == "flat tokens":
            x = self.norms[0](x.reshape(b * s, h)).view(b, s, h)
        elif view == "sequence first":
            x = self.norms[0](x.transpose(0, 1) * 1.5).transpose(0, 1)
        elif view == "there and back":
            x = x.permute(2, 0, 1).reshape(h, b * s).t().reshape(b, s, h)
        elif view == "split and cat":
            first, second = x.split([h // 2, h - h // 2], dim=-1)
            x = torch.cat((second, first), dim=-1)
        elif view == "token shift":
            x = x * self.mix + F.pad(x, (0, 0, 1, -1)) * (1 - self.mix)
        elif view == "rolled":
            x = self.norms[0](torch.roll(x, 1, dims=1)) + x
        elif view == "flipped":
            x = x + x.flip(1) * 0.5
        elif view == "gathered":
            x = x.index_select(-1, self.order)
        elif view == "recurrence":
            state, states = torch.zeros_like(x[:, 0]), []
            for t in range(s):
                state = self.mix * state + (1 - self.mix) * x[:, t]
                states.append(state)
            x = torch.stack(states, 1)
        elif view == "running mean":
            if self.training:
                with torch.no_grad():
                    self.mean.lerp_(x.mean((0, 1)), 0.1)
            x = x - self.mean
        elif view == "memory":
            before, self.memory = self.memory, x.detach().mean((0, 1))
            x = x if before is None else x + 0.1 * before
        elif view == "counter":
            self.calls += 1
            x = x * (1 + 1 / self.calls)
        elif view == "sizes of one":
            x = x + x.mean(1, keepdim=True) if s > 1 else 2 * x
            x = x - 0.1 if b == 1 else x
        elif view == "padded":
            return self.both(F.pad(x, (0, 0, 0, 2)), F.pad(padding, (0, 2), value=False))[:, :s]
        return self.both(x, padding)


@dataclass
class Output:
    """As Hugging Face's models return it."""

    loss: Tensor | None
    value: Tensor


torch.utils._pytree.register_dataclass(Output)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, hidden = case, case.hidden
        self.scale, self.flag = 1.0, False  # of loops
        rows = case.vocab + (3 if case.head == "rows of the table" else 0)
        self.table = nn.Embedding(rows, hidden)
        longest = case.sequence + 3
        if case.position == "table":
            self.positions = nn.Embedding(longest, hidden)
        elif case.position.startswith("parameter"):
            self.places = nn.Parameter(torch.randn(1, longest, hidden))
        elif case.position == "sinusoids":
            angles = torch.arange(longest)[:, None] * 50.0 ** (-torch.arange(hidden // 2) / hidden)
            self.register_buffer("waves", torch.cat((angles.sin(), angles.cos()), -1))
        self.embedding_norm = nn.LayerNorm(hidden) if case.embedding_norm else None
        self.layers = nn.ModuleList(Layer(b, case) for b in case.blocks)
        self.final_norm = norm(case.final_norm, hidden)
        if case.head in ("logits", "mean pooling", "masked mean", "first token", "maximum"):
            self.out = nn.Linear(hidden, case.vocab, bias=case.head != "logits")
        elif case.head == "tied":
            self.out = nn.Linear(hidden, case.vocab, bias=False)
            self.out.weight = self.table.weight
        elif case.head == "two layers":
            self.dense, self.out = nn.Linear(hidden, hidden), nn.Linear(hidden, case.vocab)
        elif case.head == "spans":
            self.out = nn.Linear(hidden, 2)
        elif case.head == "multiple choice":
            self.out = nn.Linear(hidden, 1)
        if case.frozen_embedding:
            self.table.weight.requires_grad_(False)
        for name, p in self.named_parameters():
            if case.frozen and case.frozen in name:
                p.requires_grad_(False)

    def embed(self, ids: Tensor) -> Tensor:
        case, s = self.case, ids.shape[1]
        x = self.table(ids)
        if case.embedding_scale:
            x = x * math.sqrt(case.hidden)
        if case.position == "table":
            x = x + self.positions(torch.arange(s, device=ids.device))
        elif case.position.startswith("parameter"):
            x = x + self.places[:, :s]
        elif case.position == "sinusoids":
            x = x + self.waves[:s]
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def pooled(self, x: Tensor, padding: Tensor) -> Tensor:
        """-> [b, s, v], [b, v] or [b, s, 2]."""
        head, vocab = self.case.head, self.case.vocab
        if head == "rows of the table":
            return x @ self.table.weight[:vocab].t()
        if head == "transposed table":
            return torch.matmul(x, self.table.weight.transpose(0, 1))
        if head == "two layers":
            return self.out(F.gelu(self.dense(x)))
        if head == "mean pooling":
            return self.out(x.mean(1))
        if head == "masked mean":
            weights = padding.to(x.dtype)[..., None]
            return self.out((x * weights).sum(1) / weights.sum(1).clamp(min=1))
        if head == "first token":
            return self.out(torch.tanh(x[:, 0]))
        if head == "maximum":
            return self.out(x.amax(1))
        if head == "multiple choice":
            return self.out(x).squeeze(-1)
        return self.out(x)

    def loss(self, value: Tensor, labels: Tensor) -> Tensor:
        kind = self.case.loss
        if kind == "regression" or (value.dim() == 2 and self.case.head == "multiple choice"):
            return F.mse_loss(value, torch.ones_like(value))
        if self.case.head == "spans":
            starts, ends = value.unbind(-1)
            where = labels[:, 0] % value.shape[1]
            # without the squares, gradients of what adds a number to all places are zero, and only rounding is compared
            return (F.cross_entropy(starts, where) + F.cross_entropy(ends, where)) / 2 + 0.1 * value.pow(2).mean()
        if value.dim() == 2:
            return F.cross_entropy(value, labels[:, 0])
        logits, target = value, labels
        if kind in ("shifted", "ignored", "two losses"):
            logits, target = value[:, :-1].contiguous(), labels[:, 1:].contiguous()
        if kind == "ignored":
            target = target.masked_fill(target < 3, -100)
        flat, target = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
        if kind == "plain":
            return F.cross_entropy(value.transpose(1, 2), labels)
        if kind == "smoothed":
            return F.cross_entropy(flat, target, label_smoothing=0.1)
        if kind == "weights of classes":
            weight = torch.linspace(0.5, 1.5, flat.shape[-1], dtype=flat.dtype, device=flat.device)
            return F.cross_entropy(flat, target, weight=weight)
        loss = F.cross_entropy(flat, target)
        if kind == "z-loss":
            loss = loss + 1e-2 * torch.logsumexp(flat, -1).pow(2).mean()
        if kind == "two losses":
            loss = loss + 0.1 * value.pow(2).mean()
        return loss

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        padding = ids != PADDING
        x = self.embed(ids)
        if self.case.events:
            x = x * self.scale
            if self.flag:
                x = torch.tanh(x)
        for layer in self.layers:
            x = layer(x, padding)
            if self.case.shared_blocks:
                x = layer(x, padding)
        value = self.pooled(self.final_norm(x), padding)
        if self.case.loss == "logits alone":
            return value if self.case.outputs == "tensor" else {"value": value}
        loss = self.loss(value, labels)
        shown: dict[str, Any] = {
            "tensor": loss,
            "tuple": (loss, value),
            "dict": {"loss": loss, "value": value},
            "dataclass": Output(loss, value),
        }
        return shown[self.case.outputs]


def build(case: Case) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """-> the model at fp64 in training mode, and its arguments (ids, labels), [batch, sequence] each."""
    torch.manual_seed(case.seed)
    model = Model(case).double()
    ids = torch.randint(1, case.vocab, (case.batch, case.sequence))
    if case.sequence > 3:
        ids[-1, -2:] = PADDING
    return model, (ids, torch.randint(0, case.vocab, (case.batch, case.sequence)))
