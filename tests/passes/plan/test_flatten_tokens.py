"""Covers: passes/plan/flatten_tokens.py, and what comes of it: collectives whose operands and results nothing copies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from simulated_ranks import rank_of
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megafx
from megafx.analysis.communication import collective_nodes
from megafx.capture.export import capture_call
from megafx.compiler.compiled import Compiled
from megafx.compiler.executable import Executable
from megafx.compiler.pipeline import compile_program
from megafx.ir.dump import target_text
from megafx.ir.nodes import is_view
from megafx.ir.program import TOKENS, VAL
from megafx.ops.axes import AxisContext, on_mesh
from megafx.passes.plan.flatten_tokens import flatten_tokens
from megafx.planner.plan import Plan
from megafx.testing import assert_same, canonical, expect, make_context, run_pass

T = 2
PLANNER = make_context(T, megafx.Config(sequence_parallel=True))
COPIES = {"clone", "contiguous", "cat", "copy", "permute", "transpose", "_to_copy", "index", "rank_place"}


def _block(ids: Any, table: Any, positions: Any, norm: Any, up: Any) -> Any:
    x = F.embedding(ids, table) + positions
    y = F.linear(F.layer_norm(x, [4], norm), up)
    return y.view(*ids.shape, 2, 3).transpose(1, 2)


def test_tokens_are_one_dim_as_far_as_ops_work_token_by_token() -> None:
    shapes = {"ids": "i64[b s=3]", "table": "param f64[5 4]", "positions": "param f64[3 4]", "norm": "param f64[4]"}
    before = canonical(_block, **shapes, up="param f64[6 4]")
    after = run_pass(flatten_tokens, before, PLANNER)
    expect(
        after,
        """\
        %0 = ids                               # i64[b 3]
        %1 = table                             # f64[5 4] param
        %2 = positions                         # f64[3 4] param
        %3 = norm                              # f64[4] param
        %4 = up                                # f64[6 4] param
        %5 = sym_size.int(%0, 0)               # int b
        %6 = operator.mul(3, %5)               # int 3*b
        %7 = reshape(%0, [%6])                 # i64[3*b]
        %8 = embedding(%1, %7)                 # f64[3*b 4]
        %9 = arange(3, dtype=i64, device=cpu)  # i64[3]
        %10 = expand(%9, [%5, 3])              # i64[b 3]
        %11 = reshape(%10, [%6])               # i64[3*b]
        %12 = embedding(%2, %11)               # f64[3*b 4]
        %13 = add(%8, %12)                     # f64[3*b 4]
        %14 = layer_norm(%13, [4], %3)         # f64[3*b 4]
        %15 = linear(%14, %4)                  # f64[3*b 6]
        %16 = reshape(%15, [%5, 3, 2, 3])      # f64[b 3 2 3]
        %17 = transpose.int(%16, 1, 2)         # f64[b 2 3 3]
        return %17""",
    )
    assert_same(before, after)
    assert flatten_tokens(after, PLANNER) == 0


def _query_norm(x: Any, w: Any) -> Any:
    return F.layer_norm(F.linear(x, w).view(2, 3, 2, 3), [3]).transpose(1, 2)


def _norm_of_tokens(x: Any, w: Any) -> Any:
    return F.linear(F.group_norm(x, 1), w)


def _norm_of_features(x: Any, w: Any) -> Any:
    return F.linear(F.layer_norm(x, [4]), w)


def _row_of_each_sequence(x: Any, y: Any, w: Any) -> Any:
    return F.linear(F.layer_norm(x.cumsum(1), [4]), w) * (2 * y).unsqueeze(1)


@pytest.mark.parametrize(
    ("fn", "x"), [(_query_norm, "f64[2 3 4]"), (_norm_of_tokens, "f64[2 3 4]"), (_norm_of_features, "f64[6 4]")]
)
def test_what_is_left_as_it_is(fn: Any, x: str) -> None:
    """A norm of queries, head by head; a norm over tokens; tokens that are one dim already."""
    before = canonical(fn, x=x, w="param f64[6 4]")
    assert not [n for n in run_pass(flatten_tokens, before, PLANNER).graph.nodes if TOKENS in n.meta]


def test_an_op_that_mixes_tokens_reads_them_in_their_dims() -> None:
    shapes = {"x": "f64[b s 4]", "y": "f64[b 6]", "w": "param f64[6 4]"}
    before = canonical(_row_of_each_sequence, **shapes)
    after = run_pass(flatten_tokens, before, PLANNER)
    made = [n for n in after.graph.nodes if isinstance(n.meta.get(VAL), torch.Tensor)]
    dims = {target_text(n.target): n.meta[VAL].dim() for n in made}
    assert (dims["cumsum"], dims["layer_norm"], dims["linear"], dims["mul"]) == (3, 2, 2, 3)
    assert_same(before, after)


def _padded(x: Any, w: Any) -> Any:
    return F.linear(F.pad(F.layer_norm(x, [4]), (1, 1, 0, 0)), w)  # Swin pads like this, by nothing where sizes divide


def _shifted(x: Any, w: Any) -> Any:
    return F.linear(F.pad(F.layer_norm(x, [4]), (1, 1, 1, -1)), w)


def test_padding_of_tokens() -> None:
    for fn, dims in ((_padded, 2), (_shifted, 3)):
        before = canonical(fn, x="f64[b 3 4]", w="param f64[6 6]")
        after = run_pass(flatten_tokens, before, PLANNER)
        (pad,) = (n for n in after.graph.nodes if target_text(n.target) == "constant_pad_nd")
        assert pad.meta[VAL].dim() == dims
        assert_same(before, after)


def test_only_where_it_is_wanted() -> None:
    before = canonical(_norm_of_features, x="f64[b s 4]", w="param f64[6 4]")
    for context in (make_context(1), make_context(T, megafx.Config(sequence_parallel=False))):
        assert flatten_tokens(before.copy(), context) == 0
    given = Plan(T, flat_tokens=True)
    assert flatten_tokens(before.copy(), make_context(T, megafx.Config(sequence_parallel=False), given=given)) == 2


# -- models


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, *, gpt: bool, first: bool = False) -> None:
        super().__init__()
        d = width // heads
        self.d, self.gpt, self.first = d, gpt, first
        self.norms = nn.ModuleList(nn.LayerNorm(width) if gpt else nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(width, n * d, bias=gpt) for n in (heads, kv_heads, kv_heads))
        self.o, self.up, self.gate = nn.Linear(width, width, bias=gpt), *(nn.Linear(width, 24, gpt) for _ in range(2))
        self.down, self.drop = nn.Linear(24, width, bias=gpt), nn.Dropout(0.1 if gpt else 0.0)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        there, back = ((1, 2, 0, 3), (2, 0, 1, 3)) if self.first else ((0, 2, 1, 3),) * 2
        q, k, v = (w(x).unflatten(-1, (-1, self.d)).permute(there) for w in (self.q, self.k, self.v))
        p = self.drop.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p, enable_gqa=True)
        return self.o(y.permute(back).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attend(self.norms[0](x)))
        y = self.norms[1](x)
        y = F.gelu(self.up(y)) if self.gpt else F.silu(self.gate(y)) * self.up(y)
        return x + self.drop(self.down(y))


class Model(nn.Module):
    """positions: '' none, 'arange' of the length, 'table' of a fixed length, 'input' of a fixed length. first: [s, b]."""

    def __init__(self, positions: str = "", *, gpt: bool = False, tied: bool = False, first: bool = False) -> None:
        super().__init__()
        self.how, self.first = positions, first
        self.tokens, self.at = nn.Embedding(30, 16), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Block(16, 4, 4 if gpt else 2, gpt=gpt, first=first) for _ in range(1))
        self.norm, self.head = nn.LayerNorm(16) if gpt else nn.RMSNorm(16, eps=1e-5), nn.Linear(16, 30, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, where: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids)
        if self.how:
            length = ids.shape[0 if self.first else 1]
            rows = {"arange": lambda: self.at(torch.arange(length)), "table": lambda: self.at.weight}
            found = rows[self.how]() if self.how in rows else self.at(where)
            x = x + (found[:, None] if self.first else found)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def _inputs(b: int, s: int, model: Model) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(0, 30, (s, b) if model.first else (b, s))
    return (ids, ids, torch.arange(s)) if model.how == "input" else (ids, ids)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": {"positions": "arange", "gpt": True, "tied": True},
    "gpt of fixed length": {"positions": "table", "gpt": True},
    "gpt of given positions": {"positions": "input", "gpt": True},
    "sequence first": {"positions": "arange", "gpt": True, "first": True},
}


@cache
def _compiled(name: str, t: int = T, b: int = 3) -> Compiled:
    torch.manual_seed(0)
    model = Model(**MODELS[name])
    config = megafx.Config(sequence_parallel=True)
    context = make_context(t, config, wants_grad=lambda spec: spec.kind == "param")
    return compile_program(capture_call(model, _inputs(b, 8, model), {}), context)


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    """What a value is a view of, views included."""
    while is_view(node) or target_text(node.target) in ("contiguous", "wait_tensor"):
        yield node
        node = node.args[0]  # type: ignore[assignment]
    yield node


def _read_by(node: fx.Node) -> Iterator[fx.Node]:
    """What reads a value through views, views included."""
    for user in node.users:
        yield user
        if is_view(user) or target_text(user.target) in ("contiguous", "wait_tensor"):
            yield from _read_by(user)


@pytest.mark.parametrize("name", list(MODELS))
def test_gathers_and_scatters_copy_nothing(name: str) -> None:
    """Between a collective of activations and what computes its operand, or reads its result, there are views alone."""
    compiled = _compiled(name)
    assert compiled.plan.sequence_parallel and compiled.plan.flat_tokens
    moved = [n for n in collective_nodes(compiled.program.graph) if target_text(n.target) != "all_reduce"]
    moved = [n for n in moved if n.meta[VAL].shape[-1] == 16]  # not the statistics of the loss
    kinds = [target_text(n.target) for n in moved]
    assert kinds.count("all_gather_into_tensor") >= 5 and kinds.count("reduce_scatter_tensor") >= 5
    for node in moved:
        near = [target_text(n.target).partition(".")[0] for n in (*_made_of(node.args[0]), *_read_by(node))]  # type: ignore[arg-type]
        assert not COPIES.intersection(near), (node, near)


@pytest.mark.parametrize(
    ("name", "t", "b", "s"),
    [
        ("llama", 4, 3, 3),
        ("gpt", 3, 2, 7),
        ("sequence first", 2, 3, 5),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("llama", 2, 1, 5),
                ("gpt", 2, 4, 8),
                ("gpt of fixed length", 3, 2, 8),
                ("gpt of given positions", 2, 3, 8),
            ]
        ),
    ],
)
def test_numbers_are_those_of_one_process(name: str, t: int, b: int, s: int) -> None:
    """Outputs, losses and gradients in fp64, with the dropout of one process."""
    torch.manual_seed(0)
    model = Model(**MODELS[name]).double()
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=True)
    assert (verdict := megafx.verify(model, config, example_inputs=_inputs(b, s, model))), verdict


class _Watch(TorchDispatchMode):
    """scattered: what made each operand of a reduce-scatter or gather. copied: what copied a result of one."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}
        self.moved: set[int] = set()
        self.scattered: list[str] = []
        self.copied: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func._schema.name.split("::")[1]
        given = [_memory(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in COPIES and self.moved.intersection(given):
            self.copied.append(name)
        for memory in [_memory(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]:
            if memory not in given:
                self.made[memory] = name
                self.moved.discard(memory)
            if name in ("all_gather_into_tensor", "reduce_scatter_tensor") and args[0].shape[-1] == 16:
                self.scattered.append(self.made.get(given[0], "input"))
                self.moved.add(memory)
        return result


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "s"), [("llama", 8), ("gpt", 8), ("llama", 7)])
def test_nothing_is_copied_when_it_runs(name: str, s: int) -> None:
    """One rank's forward and backward, with collectives that do nothing; 24 or 21 tokens of dynamic sizes on 2 ranks.

    The first scatter of the backward may be of what the loss gives, no product: it is padded by a copy.
    """
    with rank_of(0, T):
        group = torch.distributed.group.WORLD.group_name  # type: ignore[union-attr]
        compiled = _compiled(name)
        axes = {"tp": AxisContext(0, T, group)}
        executable = Executable(compiled.for_rank(axes), lambda: on_mesh(axes))
        now = {symbol: {"batch": 3, "seq": s}[n] for n, symbol in compiled.program.sizes.symbols.items()}
        values = []
        for node, spec in compiled.program.input_nodes():
            if spec.kind != "tangent":
                shape = [n if isinstance(n, int) else int(n.node.expr.xreplace(now)) for n in node.meta[VAL].shape]
                floats = node.meta[VAL].is_floating_point()
                values.append(torch.randn(shape) if floats else torch.zeros(shape, dtype=torch.int64))
        with _Watch() as watch:
            _, kept = executable.forward(values)
            assert kept is not None
            executable.backward(kept, [torch.ones(())])
    copied = [made for made in watch.scattered if made in COPIES]
    assert len(watch.scattered) >= 10 and len(copied) <= (s % 2), watch.scattered
    assert not watch.copied
