"""A mixture of experts in plain PyTorch with the options of Megatron's router, under the same names.

Every expert sees every token's place, and tokens that it did not get weigh nothing: no shape depends on the data.
Sources: Switch Transformer (2101.03961) for the balancing loss, ST-MoE (2202.08906) for the z-loss, BASE layers (2103.16716)
for balanced assignment by Sinkhorn's iteration.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer import TransformerConfig


@dataclass
class MoEConfig(TransformerConfig):
    num_moe_experts: int | None = 4
    moe_router_topk: int = 2
    moe_router_load_balancing_type: str = "aux_loss"  # or "sinkhorn", "none"
    moe_router_pre_softmax: bool = False  # probabilities over all experts, or over the chosen ones
    moe_aux_loss_coeff: float = 0.0
    moe_z_loss_coeff: float = 0.0
    moe_input_jitter_eps: float | None = None
    moe_expert_capacity_factor: float | None = None  # None: no token is dropped
    moe_token_drop_policy: str = "probs"  # or "position": who stays where too many chose an expert


def sinkhorn(cost: Tensor, iterations: int = 8) -> Tensor:
    """Scores of tokens (rows) and experts (columns) -> nearly doubly stochastic."""
    cost = cost.exp()
    rows = torch.ones_like(cost[:, :1])
    for _ in range(iterations):
        columns = 1 / (cost.shape[1] * (rows * cost).sum(0, keepdim=True) / cost.shape[0] + 1e-8)
        rows = 1 / ((columns * cost).sum(1, keepdim=True) + 1e-8)
    return rows * cost * columns


class Router(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> weight of each token at each expert [tokens, experts], and the router's losses."""
        config = self.config
        if config.moe_input_jitter_eps is not None and self.training:
            x = x * (1 - config.moe_input_jitter_eps + 2 * config.moe_input_jitter_eps * torch.rand_like(x))
        logits = F.linear(x, self.weight).float()
        k, experts = config.moe_router_topk, logits.shape[1]
        if config.moe_router_load_balancing_type == "sinkhorn":
            with torch.no_grad():
                chosen = sinkhorn(logits).topk(k, dim=1).indices
            scores = logits.sigmoid() if k == 1 else logits.softmax(-1)
            weight = scores.gather(1, chosen)
        elif config.moe_router_pre_softmax:
            weight, chosen = logits.softmax(-1).topk(k, dim=1)
        else:
            top, chosen = logits.topk(k, dim=1)
            weight = top.softmax(-1)
        taken = F.one_hot(chosen, experts).to(logits.dtype)  # [tokens, k, experts]
        loss = logits.new_zeros(())
        if config.moe_router_load_balancing_type == "aux_loss" and config.moe_aux_loss_coeff:
            share, mean = taken.sum((0, 1)), logits.softmax(-1).sum(0)  # tokens of each expert, and their probabilities
            loss = loss + config.moe_aux_loss_coeff * experts / (k * logits.shape[0] ** 2) * (share * mean).sum()
        if config.moe_z_loss_coeff:
            loss = loss + config.moe_z_loss_coeff * logits.logsumexp(-1).square().mean()
        weights = (taken * weight[..., None]).sum(1)
        return weights * self.kept(weights, taken.sum(1)), loss

    def kept(self, weights: Tensor, taken: Tensor) -> Tensor:
        """1 where an expert has room for the token, among all tokens; else 0. taken [tokens, experts]: who was chosen."""
        config = self.config
        if config.moe_expert_capacity_factor is None:
            return torch.ones_like(taken)
        places = weights.shape[0] * config.moe_router_topk / weights.shape[1] * config.moe_expert_capacity_factor
        if config.moe_token_drop_policy == "position":
            return (taken.cumsum(0) <= places).to(taken.dtype)
        before = weights.detach()[None] > weights.detach()[:, None]  # [tokens, tokens, experts]
        return (before.sum(1) < places).to(taken.dtype)


class MoELayer(nn.Module):
    """Experts are gated or plain MLPs in stacked weights. self.loss: the router's, of the last call."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config, self.router = config, Router(config)
        width, gated = config.ffn_hidden_size or 4 * config.hidden_size, 2 if config.gated_linear_unit else 1
        self.linear_fc1 = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size, gated * width))
        self.linear_fc2 = nn.Parameter(torch.empty(config.num_moe_experts, width, config.hidden_size))
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, self.loss = self.router(tokens)
        hidden = torch.einsum("th,ehf->etf", tokens, self.linear_fc1)
        if self.config.gated_linear_unit:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = self.config.activation_func(gate) * up
        else:
            hidden = self.config.activation_func(hidden)
        y = torch.bmm(hidden, self.linear_fc2)  # [experts, tokens, hidden]
        return torch.einsum("eth,te->th", y, weights.to(y.dtype)).view_as(x)
