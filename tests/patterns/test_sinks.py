"""Attention with a score of each head that takes weight and gives nothing: as models write it, on any ranks, no [s, s]."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import megafx
from megafx.config import Config
from megafx.ir.nodes import argument
from megafx.ir.program import Program
from megafx.planner.context import CompileContext

FORWARD, BACKWARD = (getattr(torch.ops.megafx, f"attention_{name}").default for name in ("forward", "sink_backward"))


def _causal(z: Tensor, shown: Tensor) -> Tensor:
    """Hugging Face's mask: causal, and padding on the left, of which rows see no key."""
    s = z.shape[-1]
    seen = torch.ones(s, s, dtype=torch.bool, device=z.device).tril() & shown[:, None, None]
    return z + torch.zeros_like(seen, dtype=z.dtype).masked_fill(~seen, torch.finfo(z.dtype).min)


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, shown: Tensor) -> Tensor:
    z = _causal(q @ k.transpose(2, 3) * 0.5, shown)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    z = torch.cat([z, column], dim=-1)
    z = z - z.max(dim=-1, keepdim=True).values
    return F.dropout(F.softmax(z, dim=-1, dtype=z.dtype)[..., :-1], 0.2) @ v


def by_factor(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, shown: Tensor) -> Tensor:
    z = _causal(q @ k.transpose(2, 3) * 0.5, shown)
    factor = (torch.logsumexp(z, -1) - sinks.view(1, -1, 1)).sigmoid()
    return z.softmax(-1) @ v * factor[..., None]


def off_by_one(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, shown: Tensor) -> Tensor:
    """The sinks go into q, so that they have a gradient."""
    z = (q + sinks[:, None, None]) @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    hidden = ~torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
    z = z.masked_fill(hidden, -math.inf)
    high = z.max(-1, keepdim=True).values
    powers = (z - high).exp()
    return powers / (powers.sum(-1, keepdim=True) + (-high).exp()) @ v


FORMS: list[Callable[..., Tensor]] = [gpt_oss, by_factor, off_by_one]


class Block(nn.Module):
    """Two layers, six heads on three."""

    def __init__(self, form: Callable[..., Tensor]) -> None:
        super().__init__()
        self.form, self.tokens = form, nn.Embedding(11, 12)
        self.qkv, self.out = (
            nn.ModuleList(nn.Linear(12, 24) for _ in "ab"),
            nn.ModuleList(nn.Linear(12, 12) for _ in "ab"),
        )
        self.sinks = nn.ParameterList(torch.randn(6) for _ in "ab")

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for qkv, out, sinks in zip(self.qkv, self.out, self.sinks, strict=True):
            q, k, v = (y.unflatten(-1, (-1, 2)).transpose(1, 2) for y in qkv(x).split((12, 6, 6), -1))
            k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
            x = x + out(self.form(q, k, v, sinks, ids > 0).transpose(1, 2).flatten(2))
        loss: Tensor = F.cross_entropy((x @ self.tokens.weight.t()).flatten(0, 1), labels.flatten())
        return loss


@pytest.mark.parametrize("axes", ["cp and tp", "tp", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_sinks_are_operands_of_attention_on_any_ranks(form: Callable[..., Tensor], axes: str) -> None:
    torch.manual_seed(0)
    ids, kept = torch.randint(1, 11, (2, 9)), list[Program]()
    ids[0, :3] = 0

    def keep(program: Program, context: CompileContext) -> int:
        kept.append(program.copy())
        return 0

    call, config = {"ids": ids, "labels": ids.roll(-1, 1)}, Config(passes=(("after scaled_products", keep),))
    model = Block(form).double()
    mesh = {"none": {"tp": 1}, "tp": {"tp": 2 if form is gpt_oss else 4}, "cp and tp": {"cp": 2, "tp": 3}}[axes]
    verdict = megafx.verify(model, config, example_inputs=call, mesh=mesh, tolerance=1e-10)
    assert verdict, str(verdict)
    assert kept
    for program in kept:
        found = program.graph.find_nodes(op="call_function", target=FORWARD)
        assert len(found) == 2 and all(argument(node, "sink") is not None for node in found)
        assert all(argument(node, "causal") and argument(node, "hidden") == 0 for node in found)
        sinks = program.graph.find_nodes(op="call_function", target=BACKWARD)
        assert len(sinks) == (0 if form is off_by_one else 2)
        for node in program.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                assert list(value.shape[-2:]) not in ([9, 9], [9, 10], [5, 9], [5, 10]), f"{node} {tuple(value.shape)}"
