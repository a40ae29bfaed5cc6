"""Covers: candidates.py. Which cuts come up where: fused projections, uneven heads, grouped and single K/V heads."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from megafx.ir.program import VAL
from megafx.ir.sizes import Sizes
from megafx.placements.types import Layout
from megafx.rules.candidates import Candidates, find_candidates, strategies
from megafx.rules.strategies import OpRule, rule_of


def trace(function, **tensors: torch.Tensor) -> tuple[dict[str, fx.Node], dict[fx.Node, OpRule]]:
    """Inputs by name, and the rules of all ops, of a function of whole ATen ops."""
    names = list(tensors)
    gm = make_fx(lambda *args: function(**dict(zip(names, args, strict=True))), pre_dispatch=True)(*tensors.values())
    nodes = dict(zip(names, gm.graph.find_nodes(op="placeholder"), strict=True))
    active = {
        n for n in gm.graph.nodes if isinstance(n.meta.get(VAL), torch.Tensor) and n.meta[VAL].is_floating_point()
    }
    return nodes, {n: rule_of(n, Sizes(), active) for n in gm.graph.nodes if n.op == "call_function" and n in active}


def cuts(function, t: int, **tensors: torch.Tensor) -> tuple[dict[str, set[str]], Candidates, dict[fx.Node, OpRule]]:
    """'dim:layout' of each input's candidates."""
    nodes, rules = trace(function, **tensors)
    found = find_candidates(rules, nodes.values(), Sizes(), t)
    return {name: {f"{d}:{layout}" for d, layout in found.of(n)} for name, n in nodes.items()}, found, rules


def rows_of(op: str, rules: dict[fx.Node, OpRule], found: Candidates, t: int) -> list[str]:
    rule = next(r for n, r in rules.items() if op in str(n.target))
    return [f"{s.factor}: {s}" for s in strategies(rule, found, t) if s.factor]


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def heads(y: torch.Tensor, n: int) -> torch.Tensor:
    return y.view(*y.shape[:2], n, y.shape[2] // n).transpose(1, 2)


def gpt_attention(n: int, x, qkv, bias, proj):
    y = F.linear(x, qkv, bias)
    width = y.shape[2] // 3
    q, k, v = (heads(y[:, :, i * width : (i + 1) * width], n) for i in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(out.transpose(1, 2).reshape(x.shape), proj)


def test_fused_projection_of_heads_that_divide():
    """Three blocks, each cut by heads: Megatron's layout of a fused q|k|v, weight and bias."""
    found, *_ = cuts(lambda **k: gpt_attention(4, **k), 2, x=x(3, 5, 64), qkv=x(192, 64), bias=x(192), proj=x(64, 64))
    assert {"0:3*(2x32)", "1:2x32"} <= found["qkv"]
    assert "0:3*(2x32)" in found["bias"]
    assert "1:2x32" in found["proj"]


def test_fused_projection_of_25_heads_on_4_ranks():
    found, candidates, rules = cuts(
        lambda **k: gpt_attention(25, **k), 4, x=x(3, 5, 1600), qkv=x(4800, 1600), bias=x(4800), proj=x(1600, 1600)
    )
    assert "0:3*(25x64)" in found["qkv"] and "0:3*(25x64)" in found["bias"]
    assert "1:25x64" in found["proj"]
    linear = rows_of("linear", rules, candidates, 4)
    assert "n: R S0/3*(25x64) S0/3*(25x64) -> S2/3*(25x64)" in linear
    attention = next(r for n, r in rules.items() if "attention" in str(n.target))
    by_heads = [s for s in strategies(attention, candidates, 4) if s.factor == "h"]
    assert [str(s.out.cut) for s in by_heads] == ["25"]


def grouped_attention(n: int, kv: int, x, qkv, proj):
    """q|k|v of unequal sizes in one weight, K/V heads shared by groups of queries."""
    y = F.linear(x, qkv)
    d = y.shape[2] // (n + 2 * kv)
    q, k, v = y[:, :, : n * d], y[:, :, n * d : (n + kv) * d], y[:, :, (n + kv) * d :]
    q, k, v = heads(q, n), heads(k, kv), heads(v, kv)
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return F.linear(out.transpose(1, 2).reshape(*x.shape[:2], n * d), proj)


def test_fused_projection_of_unequal_parts():
    found, *_ = cuts(lambda **k: grouped_attention(12, 4, **k), 2, x=x(3, 5, 64), qkv=x(160, 64), proj=x(64, 96))
    assert "0:2x48+2x16+2x16" in found["qkv"]
    found, *_ = cuts(lambda **k: grouped_attention(15, 5, **k), 2, x=x(3, 5, 64), qkv=x(200, 64), proj=x(64, 120))
    assert "0:5x24+5x8+5x8" in found["qkv"], "a K/V head and its 3 query heads stay on one rank"
    assert "1:5x24" in found["proj"]


def test_fewer_kv_heads_than_ranks():
    """K and V whole, the query heads of each group split."""
    _, candidates, rules = cuts(
        lambda **k: grouped_attention(8, 2, **k), 4, x=x(3, 5, 64), qkv=x(96, 64), proj=x(64, 64)
    )
    assert "g: S1/2*(4) R R -> S1/2*(4)" in rows_of("attention", rules, candidates, 4)
    assert "k: S2/2*(4x8) S1/2*(4x8) -> P" in [f"{s.factor}: {s}" for s in last_linear(rules, candidates, 4)]


def last_linear(rules: dict[fx.Node, OpRule], found: Candidates, t: int):
    return strategies([r for n, r in rules.items() if "linear" in str(n.target)][-1], found, t)


def test_heads_interleaved_with_qkv():
    """GPT-NeoX: [n, 3, d] in one weight; a contiguous cut keeps heads whole, also where they do not divide."""

    def attention(x, qkv, proj):
        y = F.linear(x, qkv).view(*x.shape[:2], 5, 24).transpose(1, 2)
        q, k, v = y[..., :8], y[..., 8:16], y[..., 16:]
        return F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], 40), proj)

    found, *_ = cuts(attention, 2, x=x(3, 7, 64), qkv=x(120, 64), proj=x(64, 40))
    assert "0:5x24" in found["qkv"] and "1:5x8" in found["proj"]


def test_one_kv_head_behind_the_queries():
    """Falcon: [n + 2, d] with one K and one V head: queries are split, K and V stay on a rank and are gathered."""

    def attention(x, qkv):
        y = F.linear(x, qkv).view(*x.shape[:2], 6, 8)
        q, k, v = y[:, :, :4], y[:, :, 4:5], y[:, :, 5:]
        k, v = (z.expand(-1, -1, 4, -1).transpose(1, 2) for z in (k, v))
        return F.scaled_dot_product_attention(q.transpose(1, 2), k, v)

    found, *_ = cuts(attention, 2, x=x(3, 5, 64), qkv=x(48, 64))
    assert "0:2x16+1x8+1x8" in found["qkv"]


def test_gated_mlp_in_one_weight():
    def mlp(x, up, down):
        gate, value = (F.linear(x, up)[..., i * 50 : (i + 1) * 50] for i in range(2))
        return F.linear(F.silu(gate) * value, down)

    found, *_ = cuts(mlp, 4, x=x(3, 5, 16), up=x(100, 16), down=x(16, 50))
    assert "0:2*(50)" in found["up"] and "1:50" in found["down"]


def test_weights_concatenated_by_the_user():
    def both(x, a, b):
        return F.linear(x, torch.cat([a, b]))

    _, candidates, rules = cuts(both, 2, x=x(3, 16), a=x(8, 16), b=x(4, 16))
    assert "f0: S0 S0 -> S0/2x4+2x2" in rows_of("cat", rules, candidates, 2)


def test_flattened_tokens_keep_the_sequence_cut():
    def flat(x, w):
        return F.linear(x.reshape(-1, 16), w)

    _, candidates, rules = cuts(flat, 2, x=x(3, 8, 16), w=x(4, 16))
    assert "_1: S0/3*(2x4) R -> S0/3*(2x4)" in rows_of("linear", rules, candidates, 2)


def test_values_without_a_rule_start_and_end_cuts():
    def odd(x, w):
        return F.linear(torch.linalg.cholesky(x), w)

    found, candidates, rules = cuts(odd, 2, x=torch.eye(4), w=x(6, 4))
    assert rows_of("cholesky", rules, candidates, 2) == []
    assert found["x"] == {"0:2x2", "1:2x2"}


def test_same_graph_same_order():
    """Strategies come in an order that all ranks share: the plan is broadcast by position."""
    tensors = dict(x=x(3, 5, 64), qkv=x(192, 64), bias=x(192), proj=x(64, 64))
    listings = []
    for _ in range(2):
        nodes, rules = trace(lambda **k: gpt_attention(4, **k), **tensors)
        found = find_candidates(rules, nodes.values(), Sizes(), 2)
        listings.append([str(s) for r in rules.values() for s in strategies(r, found, 2)])
    assert listings[0] == listings[1]


def deep(layers: int) -> tuple[list[fx.Node], dict[fx.Node, OpRule], float]:
    """Rules of a Llama-like stack; each op's value is made once, layers share shapes."""
    graph = fx.Graph()
    params: list[fx.Node] = []
    active: set[fx.Node] = set()
    values: dict[Any, torch.Tensor] = {}

    def param(*shape: int) -> fx.Node:
        node = graph.placeholder(f"p{len(params)}")
        node.meta[VAL] = torch.empty(shape, device="meta")
        params.append(node)
        active.add(node)
        return node

    def op(name: str, *args: Any) -> fx.Node:
        target = torch.ops.aten
        for part in name.split("."):
            target = getattr(target, part)
        node = graph.call_function(target, args)
        key = (name, fx.node.map_arg(args, lambda n: tuple(n.meta[VAL].shape)).__repr__())
        if key not in values:
            values[key] = target(*fx.node.map_arg(args, lambda n: n.meta[VAL]))
        node.meta[VAL] = values[key]
        active.add(node)
        return node

    b, s, h, n, kv, d, ff = 1, 4096, 16384, 128, 8, 128, 53248
    residual = param(b, s, h)
    for _ in range(layers):
        w = [param(*shape) for shape in ((h,), (n * d, h), (kv * d, h), (kv * d, h), (h, n * d), (h,))]
        gate, up, down = param(ff, h), param(ff, h), param(h, ff)
        y = op("rms_norm.default", residual, [h], w[0])
        q, k, v = (op("linear.default", y, m) for m in w[1:4])
        q = op("transpose.int", op("view.default", q, [b, s, n, d]), 1, 2)
        k, v = (op("transpose.int", op("view.default", m, [b, s, kv, d]), 1, 2) for m in (k, v))
        turned = []
        for m in (q, k):
            low, high = op("slice.Tensor", m, 3, 0, d // 2), op("slice.Tensor", m, 3, d // 2, d)
            half = op("cat.default", [op("neg.default", high), low], -1)
            turned.append(op("add.Tensor", op("mul.Tensor", m, 1.5), op("mul.Tensor", half, 0.5)))
        k, v = (
            op(
                "reshape.default",
                op("expand.default", op("unsqueeze.default", m, 2), [b, kv, n // kv, s, d]),
                [b, n, s, d],
            )
            for m in (turned[1], v)
        )
        y = op("scaled_dot_product_attention.default", turned[0], k, v)
        y = op("reshape.default", op("transpose.int", y, 1, 2), [b, s, n * d])
        residual = op("add.Tensor", residual, op("linear.default", y, w[4]))
        y = op("rms_norm.default", residual, [h], w[5])
        y = op("mul.Tensor", op("silu.default", op("linear.default", y, gate)), op("linear.default", y, up))
        residual = op("add.Tensor", residual, op("linear.default", y, down))
    sizes = Sizes()
    start = time.process_time()
    rules = {node: rule_of(node, sizes, active) for node in graph.nodes if node.op == "call_function"}
    return params, rules, start


def test_126_layers_take_seconds():
    """CPU seconds: 0.9 on an idle core; the bound leaves room for a slow or busy host."""
    params, rules, start = deep(126)
    sizes = Sizes()
    found = find_candidates(rules, params, sizes, 8)
    rows = {n: strategies(r, found, 8) for n, r in rules.items()}
    seconds = time.process_time() - start
    assert len(rules) > 5000 and not [r for r in rules.values() if r.kind == "none"]
    assert seconds < 10, f"{seconds:.1f} s"
    assert max(map(len, rows.values())) <= 20
    layer = [i for i, n in enumerate(rules) if "rms_norm" in str(n.target)]
    names = list(rules)
    middle = [[len(rows[n]) for n in names[layer[k] : layer[k + 2]]] for k in (40, 100)]
    assert middle[0] == middle[1], "equal layers have equal choices"


def test_uneven_contiguous_cuts_exist_but_stay_out_of_views():
    def split(x, w):
        return F.linear(x, w).view(3, 5, 25, 4)

    found, candidates, rules = cuts(split, 2, x=x(3, 5, 16), w=x(100, 16))
    assert found["w"] == {"0:2x50", "0:25x4", "1:2x8", "0:25*(2x2)"}
    assert Layout.contiguous(100, 2) not in [s.ins[0].layout for s in strategies_of("view", rules, candidates)]


def strategies_of(op: str, rules: dict[fx.Node, OpRule], found: Candidates):
    return strategies(next(r for n, r in rules.items() if op in str(n.target)), found, 2)
