"""Masks of hand-written attention: every spelling with every fill, rows that are masked in part and throughout.

Source of the class: https://github.com/NVIDIA/apex/issues/1311
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

APEX = "https://github.com/NVIDIA/apex/issues/1311"
SDPA = "https://github.com/pytorch/pytorch/issues/103749"
LEFT = "https://github.com/huggingface/transformers/issues/29525"
Mask = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # scores, bool [b, 1, 1, t] True: a token, bool [s, t] True: in the past


class Attention(nn.Module):
    """Two heads; `mask` makes the weights of scores, or all of it with `library`."""

    def __init__(self, mask: Mask | None, library: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mask, self.library = mask, library

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        keep = keep[:, None, None, :]
        past = torch.ones(t, t, dtype=torch.bool, device=x.device).tril()
        if self.library is not None:
            y = self.library(q, k, v, keep, past)
        else:
            y = torch.softmax(self.mask(q @ k.transpose(-1, -2) / 2, keep, past), -1) @ v
        return self.out(y.transpose(1, 2).reshape(b, t, 8)).sin()


KEEP = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).bool()


def run(loop: Loop, *masks: Mask, library: Callable[..., Tensor] | None = None, rows: int = 4) -> None:
    """rows: how many of the batch; the third is padding alone."""
    for mask in masks or (None,):
        torch.manual_seed(1)
        model = loop.model(Attention(mask, library))
        y = model(torch.randn(4, 5, 8)[:rows], KEEP[:rows])
        (y * torch.randn(4, 5, 8)[:rows]).sum().backward()
        loop.see(y=y)
        loop.see_gradients(model)


@situation(APEX, like="padding_and_causal_are_filled")
def padding_is_filled(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: z.masked_fill(~keep, -1e4),
        lambda z, keep, past: torch.where(keep, z, torch.finfo(z.dtype).min),
    )


@situation(APEX, like="padding_and_causal_are_filled")
def padding_is_filled_by_tensors_and_minus_infinity(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: z.masked_fill(keep == 0, torch.tensor(-1e9)),
        lambda z, keep, past: torch.where(keep, z, torch.full_like(z, -1e4)),
        lambda z, keep, past: z.masked_fill(~keep, -math.inf),
    )


@situation(APEX, like="padding_and_causal_are_filled")
def padding_is_added(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: z + (1.0 - keep.to(z.dtype)) * -1e4,
        lambda z, keep, past: z + torch.zeros_like(z).masked_fill(~keep, -math.inf),
    )


@situation(LEFT)
def padding_and_causal_are_filled(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: z.masked_fill(~(keep & past), -1e9),
        lambda z, keep, past: z.masked_fill(~past, -1e9).masked_fill(~keep, -1e9),
    )


@situation(LEFT, like="padding_and_causal_are_filled")
def padding_and_causal_are_filled_in_other_ways(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: torch.where(keep & past, z, -math.inf),
        lambda z, keep, past: z.masked_fill(~past, -math.inf).masked_fill(~keep, -1e4),
        lambda z, keep, past: z.masked_fill((keep * past) == 0, torch.finfo(z.dtype).min),
    )


@situation(LEFT, like="padding_and_causal_are_filled")
def padding_and_causal_are_added(loop: Loop) -> None:
    """Hugging Face's eager mask; and the sum of two masks, which is another number where both hide."""
    run(
        loop,
        lambda z, keep, past: z + torch.where(keep & past, 0.0, torch.finfo(z.dtype).min),
        lambda z, keep, past: z + (1.0 - keep.to(z.dtype)) * -1e9 + torch.where(past, 0.0, -1e9),
    )


@situation(LEFT, like="padding_and_causal_are_filled")
def padding_and_causal_are_added_in_other_ways(loop: Loop) -> None:
    def twice(z: Tensor, keep: Tensor, past: Tensor) -> Tensor:
        low = torch.finfo(z.dtype).min
        return torch.where(past, z, low) + torch.where(keep, 0.0, low)

    run(
        loop,
        twice,
        lambda z, keep, past: z + torch.where(keep, 0.0, -1e9) + torch.where(past, 0.0, -math.inf),
        lambda z, keep, past: z + torch.where(keep & past, 0.0, -1e4),
        lambda z, keep, past: z.masked_fill(~past, -math.inf) + torch.where(keep, 0.0, -1e4),
    )


@situation(SDPA)
def the_librarys_masks(loop: Loop) -> None:
    """Rows without a key are zeros there."""
    run(loop, library=lambda q, k, v, keep, past: F.scaled_dot_product_attention(q, k, v, keep & past))

    def added(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, past: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.where(keep & past, 0.0, -1e4))

    run(loop, library=added)


@situation(APEX, slow=(1, 2))
def a_soft_cap_or_a_bias_under_a_mask(loop: Loop) -> None:
    run(
        loop,
        lambda z, keep, past: torch.tanh(z / 3.0) * 3.0 + torch.where(keep & past, 0.0, torch.finfo(z.dtype).min),
        lambda z, keep, past: (z + 0.1 * past.cumsum(1)).masked_fill(~(keep & past), torch.finfo(z.dtype).min),
    )


class LearnedBias(nn.Module):
    """Attention with a trained bias [heads, s, s], of one head a rank on two; rows of a mask may see nothing."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(8, 24), nn.Linear(8, 8), fused
        self.bias = nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        bias = self.bias + mask[:, None, None, :]
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:  # T5's, without a scale
            y = F.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v
        return self.out(y.transpose(1, 2).flatten(-2)).square().mean()


@situation("https://github.com/huggingface/transformers/issues/20826", slow=(1,))
def a_trained_bias_of_one_head_a_rank(loop: Loop) -> None:
    for fused in (True, False):
        model = loop.model(LearnedBias(fused))
        mask = torch.zeros(3, 5)
        mask[1, 3:] = mask[2] = torch.finfo(mask.dtype).min  # the last row sees nothing
        for _ in range(2):
            loss = model(torch.randn(3, 5, 8), mask)
            loss.backward()
            loop.see(loss=loss)
        loop.see_gradients(model)


class Encoder(nn.Module):
    """torch's, with a norm behind its layers, and slopes that are drawn in training."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8))
        self.act = nn.RReLU()

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.act(self.encoder(x, src_key_padding_mask=padding))


@situation("https://pytorch.org/docs/stable/generated/torch.nn.TransformerEncoder.html", slow=(2,))
def torchs_encoder_leaves_padding_out_in_evaluation(loop: Loop) -> None:
    """Behind its layers padding is zero where no gradient is wanted and it ends all rows, and is not where gradients are."""
    net = Encoder().eval()
    nn.init.normal_(net.encoder.norm.bias)
    model, x = loop.model(net), torch.randn(3, 5, 8)
    behind = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]).bool()
    with torch.no_grad():
        for padding in (behind, behind.flip(1), torch.zeros(3, 5).masked_fill(behind, float("-inf")), behind[:, :4]):
            loop.see(found=model(x[:, : padding.shape[1]], padding))
    y = model(x, behind)
    y.square().mean().backward()
    loop.see(y=y)
    loop.see_gradients(model)
    model.encoder.use_nested_tensor = False
    with torch.no_grad():
        loop.see(found=model(x, behind))
    model.act.lower = model.act.upper = 0.25  # so that training draws what is known
    y = model.train()(x, behind)
    y.square().mean().backward()
    loop.see(y=y)
    loop.see_gradients(model)
