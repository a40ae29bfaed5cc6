"""Covers: megafx/capture/, ir/call_spec.py. Own models; Hugging Face's are in capture/test_hf_inputs.py."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functions import D, Lambda, _x
from interpret import run_program
from torch import nn
from torch.utils import _pytree as pytree

from megafx.capture import export
from megafx.capture.export import capture_call
from megafx.errors import CaptureError, UsageError
from megafx.ir.dump import text
from megafx.ir.program import FQN, MADE_BY, SOURCE, VAL, Phase
from megafx.passes.canonicalize.canonicalize import canonicalize_program


@dataclass
class Result:
    loss: Any = None
    logits: Any = None
    rest: Any = None


def _dataclass_output(m: Any, x: torch.Tensor) -> Result:
    y = m.lin(x)
    return Result(y.pow(2).mean(), y, [y.sum(-1), 3, None, "tag"])


def _nested_inputs(m: Any, batch: dict[str, Any], scale: float = 1.0, flag: bool = True, n: int = 2) -> dict[str, Any]:
    y = m.lin(batch["x"]) * scale + batch["more"][0][:, None, None]
    for _ in range(n):
        y = y + 1
    return {"y": y if flag else -y, "loss": y.mean(), "aux": y.sum()}


def _running_mean(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x)
    with torch.no_grad():
        m.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
    return y + m.mean


def _replaced_buffer(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.lin(x)
    m.mean = m.mean * 0.9 + y.detach().mean((0, 1)) * 0.1
    return y + m.mean


def _checkpointed(m: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.utils.checkpoint.checkpoint(lambda z: m.lin(z).relu(), x, use_reentrant=False).sum()


def _masked(m: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q = m.lin(x).unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def _branching(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.lin(x) if x.shape[1] > 8 else m.lin(x) * 2


def _nested(b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ({"x": torch.randn(b, s, D), "more": [torch.randn(b)]},), {"scale": 2.5, "n": 3}


def _with_mask(b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(b, s, D), torch.ones(b, 1, s, s, dtype=torch.bool).tril()), {}


def _with_square_mask(b: int, s: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(b, s, D), torch.ones(s, s, dtype=torch.bool).tril()), {}


class BatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


def _layer() -> nn.Module:
    return nn.TransformerEncoderLayer(D, 4, 32, dropout=0.0, batch_first=True)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "dataclass_output": (lambda: Lambda(_dataclass_output), _x),
    "nested_inputs": (lambda: Lambda(_nested_inputs), _nested),
    "running_mean": (lambda: Lambda(_running_mean), _x),
    "replaced_buffer": (lambda: Lambda(_replaced_buffer), _x),
    "checkpointed": (lambda: Lambda(_checkpointed), _x),
    "mask": (lambda: Lambda(_masked), _with_mask),
    "square_mask": (lambda: Lambda(_masked), _with_square_mask),
    "branching": (lambda: Lambda(_branching), _x),
    "batch_norm": (BatchNorm, _x),
    "batch_norm_eval": (lambda: BatchNorm().eval(), _x),
    "attention_with_weights": (Attention, _x),
    "encoder_layer": (_layer, _x),
    "encoder_eval": (lambda: nn.TransformerEncoder(_layer(), 2).eval(), _x),
    "decoder_layer": (
        lambda: nn.TransformerDecoderLayer(D, 4, 32, dropout=0.0, batch_first=True),
        lambda b, s: ((torch.randn(b, s, D), torch.randn(b, s + 3, D)), {}),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_graph_computes_what_the_model_does(name: str) -> None:
    """Outputs, buffers and gradients, canonicalized, at the captured sizes and at others."""
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    args, kwargs = _double(inputs(2, 6))
    program = capture_call(model, args, kwargs)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"capture changed {key}"
    canonicalize_program(program)
    for sizes in ((2, 6), (3, 7), (1, 5)):
        if name == "batch_norm" and sizes[0] == 1:
            continue
        args, kwargs = _double(inputs(*sizes))
        assert program.call is not None
        if program.call.undecided(args, kwargs):  # torch's own modules branch on a batch of one
            program = capture_call(model, args, kwargs)
            canonicalize_program(program)
        ours, eager = copy.deepcopy(model), copy.deepcopy(model)
        found, wanted = run_program(program, ours, args, kwargs), eager(*args, **kwargs)
        assert type(found) is type(wanted)
        for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True):
            _assert_same(a, b)
        for (_, a), (_, b) in zip(ours.named_buffers(), eager.named_buffers(), strict=True):
            _assert_same(a, b)
        for a, b in zip(_gradients(ours, found), _gradients(eager, wanted), strict=True):
            _assert_same(a, b)


def _double(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, call)


def _assert_same(a: Any, b: Any) -> None:
    if isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    else:
        assert a == b


def _gradients(model: nn.Module, output: Any) -> list[Any]:
    leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
    return list(torch.autograd.grad(sum(t.pow(2).sum() for t in leaves), list(model.parameters()), allow_unused=True))


# -- what the program says


def test_program_of_a_dataclass_output() -> None:
    program = capture_call(Lambda(_dataclass_output), *_x(2, 6))
    assert program.phase is Phase.CAPTURED
    assert [(i.kind, i.name) for i in program.inputs] == [
        ("param", "lin.weight"),
        ("param", "lin.bias"),
        ("buffer", "mean"),
        ("user", "args[0]"),
    ]
    assert [(o.name, o.loss) for o in program.outputs] == [("loss", True), ("logits", False), ("rest[0]", False)]
    assert list(program.sizes.symbols) == ["batch", "seq"]
    assert {program.sizes.workload_of[s] for s in program.sizes.symbols.values()} == {19, 67}


def test_nodes_know_line_and_module() -> None:
    program = capture_call(nn.Sequential(nn.Linear(D, D), Lambda(_dataclass_output)), *_x(2, 6))
    linears = [n for n in program.graph.nodes if n.target is torch.ops.aten.linear.default]
    assert [n.meta[FQN] for n in linears] == ["0", "1.lin"]
    assert linears[1].meta[SOURCE].file.endswith("support/functions.py")
    assert linears[1].meta[SOURCE].code == "return self.fn(self, *args, **kwargs)"
    assert all(n.meta[MADE_BY] == () and n.meta.get(VAL) is not None for n in linears)


def test_tied_parameters_are_one_input() -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    model[1].weight = model[0].weight
    program = capture_call(model, *_x(2, 6))
    assert [(i.name, i.aliases) for i in program.inputs[:3]] == [
        ("0.weight", ("1.weight",)),
        ("0.bias", ()),
        ("1.bias", ()),
    ]
    assert len(program.placeholders()[0].users) == 2


def test_meta_model_gets_the_target_device() -> None:
    with torch.device("meta"):
        model = Lambda(lambda m, x: m.lin(x) + torch.arange(x.shape[1], device=x.device)[:, None])
    args = (torch.empty(2, 6, D, device="meta"),)
    program = capture_call(model, args, device=torch.device("cpu"))
    assert {n.meta[VAL].device.type for n in program.placeholders()} == {"cpu"}
    assert all(p.device.type == "meta" for p in model.parameters())


def test_stand_ins_give_the_shapes() -> None:
    """A recapture sees the logical shape of a parameter whose storage is padded."""
    model = Lambda(lambda m, x: m.lin(x))
    model.lin.weight = nn.Parameter(torch.empty(0))
    program = capture_call(model, *_x(2, 6), stand_ins={"lin.weight": torch.empty(D, D, device="meta")})
    assert tuple(program.placeholders()[0].meta[VAL].shape) == (D, D)
    assert model.lin.weight.numel() == 0


def test_loss_fn_is_in_the_graph() -> None:
    labels = torch.randint(0, D, (2, 6))
    model = Lambda(lambda m, x: m.lin(x)).double()

    def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    (x,), _ = _double(_x(2, 6))
    program = capture_call(model, (x,), loss_fn=loss_fn, loss_inputs={"labels": labels})
    assert [(o.name, o.loss) for o in program.outputs] == [("[0]", True), ("[1]", False)]
    loss, output = run_program(program, model, (x,), loss_inputs={"labels": labels})
    _assert_same(loss, loss_fn(model(x), labels))
    _assert_same(output, model(x))
    program = capture_call(model, (x[:, 0],), loss_fn=nn.CrossEntropyLoss(), loss_inputs={"target": labels[:, 0]})
    assert program.outputs[0].loss


def test_ambient_modes_are_captured() -> None:
    model = Lambda(lambda m, x: m.lin(x).sum())
    contexts = [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)]
    for context in contexts:
        with context:
            (x,), _ = _x(3, 5)
            program = capture_call(model, (x,))
            canonicalize_program(program)
            wanted, found = model(x), run_program(program, model, (x,))
        assert found.dtype == wanted.dtype
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# -- calls and sizes


def test_call_that_the_graph_cannot_serve() -> None:
    program = capture_call(Lambda(_nested_inputs), *_nested(2, 6))
    assert program.call is not None
    (batch,), kwargs = _nested(3, 5)
    assert program.call.mismatch((batch,), {"n": 3, "scale": 2.5}) is None
    for args, changed, reason in (
        ((batch,), {"n": 4, "scale": 2.5}, "kwargs[n] is 4, captured as 3"),
        ((batch,), {"n": 3}, "the structure of the call differs"),
        (({**batch, "x": batch["x"].double()},), kwargs, "args[0][x] is torch.float64, captured as torch.float32"),
        (({**batch, "x": batch["x"][0]},), kwargs, "args[0][x] has 2 dims, captured with 3"),
        (({**batch, "more": [torch.randn(2)]},), kwargs, "dim 0 of args[0][x] is 3, captured as"),
        (({**batch, "x": torch.randn(3, 5, 9)},), kwargs, "dim 2 of args[0][x] is 9, captured as 16"),
    ):
        problem = program.call.mismatch(args, changed)
        assert problem is not None
        if "more" not in reason and "dim 0" not in reason:
            assert problem == reason
    with pytest.raises(UsageError, match=r"this call is not the one that was captured: kwargs\[n\]"):
        program.call.flatten((batch,), {"n": 9, "scale": 2.5})


def test_conditions_on_sizes_hold_at_each_call() -> None:
    """A branch on the length makes two graphs, and each refuses the other's calls."""
    model = Lambda(_branching)
    short = capture_call(model, *_x(2, 6))
    long = capture_call(model, *_x(2, 20))
    assert short.call is not None
    assert long.call is not None
    assert short.call.mismatch(*_x(2, 8)) is None
    assert long.call.mismatch(*_x(2, 9)) is None
    assert "outside of" in str(short.call.mismatch(*_x(2, 9)))
    assert "outside of" in str(long.call.mismatch(*_x(2, 8)))


def test_condition_that_is_no_range() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.lin(x) if x.shape[1] % 4 == 0 else -m.lin(x)

    program = capture_call(Lambda(fn), *_x(2, 6))
    assert program.call is not None
    assert program.call.mismatch(*_x(3, 7)) is None
    assert "the trace assumed" in str(program.call.mismatch(*_x(3, 8)))


def test_condition_between_inputs_that_the_hints_do_not_meet() -> None:
    """The first trace works, but is of the branch that this call does not take: it is traced with the call's own sizes."""

    def fn(m: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return m.lin(x) if x.shape[1] + y.shape[1] > z.shape[1] else -m.lin(x)

    call = tuple(torch.randn(2, n, 16) for n in (4, 9, 20))
    program = capture_call(Lambda(fn), call)
    assert program.call is not None and "neg" in text(program)
    assert program.call.mismatch(call) is None
    assert "the trace assumed" in str(program.call.mismatch((call[2].clone(), *call[1:])))


def test_asserted_length_becomes_a_bound() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] <= 32, "too long"
        return m.lin(x)

    program = capture_call(Lambda(fn), *_x(2, 6))
    assert program.call is not None
    assert list(program.sizes.symbols) == ["batch", "seq"]
    assert program.call.mismatch(*_x(1, 32)) is None
    assert program.call.mismatch(*_x(1, 33)) is not None


def _tries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, int], str]]:
    """The sizes and the mode of each trace from now on."""
    tries: list[tuple[dict[str, int], str]] = []
    attempt = export._Capture._attempt

    def counted(self: Any, sizes: dict[str, int], mode: str) -> Any:
        tries.append((sizes, mode))
        return attempt(self, sizes, mode)

    monkeypatch.setattr(export._Capture, "_attempt", counted)
    return tries


def _with_table(rows: int) -> Lambda:
    model = Lambda(lambda m, x: m.lin(x) + m.table[: x.shape[1]])
    model.table = nn.Parameter(torch.randn(rows, D))
    return model


def test_a_second_capture_begins_as_the_first_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 9 positions: the sizes of the first trace do not fit, and the bound is learned from those that follow."""
    model = _with_table(9)
    tries, earlier = _tries(monkeypatch), dict[Any, Any]()
    first = capture_call(model, *_x(2, 6), earlier=earlier)
    assert len(tries) > 1
    ended = tries[-1]
    for length in (6, 4, 8):
        tries.clear()
        args, kwargs = _x(2, length)
        again = capture_call(model, args, kwargs, earlier=earlier)
        assert tries == [ended] and text(again) == text(first)
        torch.testing.assert_close(run_program(again, model, args, kwargs), model(*args))


def test_what_does_not_work_any_more_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has become shorter since the capture before: all attempts are made."""
    model = _with_table(90)
    tries, earlier = _tries(monkeypatch), dict[Any, Any]()
    capture_call(model, *_x(2, 6), earlier=earlier)
    begun = tries[-1]
    model.table = _with_table(9).table
    tries.clear()
    args, kwargs = _x(2, 6)
    program = capture_call(model, args, kwargs, earlier=earlier)
    assert tries[0] == begun and len(tries) > 1
    torch.testing.assert_close(run_program(program, model, args, kwargs), model(*args))


def test_fixed_dim_is_noted() -> None:
    def fn(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.lin(x) + torch.ones(len(x), 1, 1).repeat(1, 1, 1) * (1 if x.shape[0] == 2 else 2)

    program = capture_call(Lambda(fn), *_x(2, 6))
    assert list(program.sizes.symbols) == ["seq"]
    assert [n.message for n in program.notes] == [
        "dim 0 (batch) of args[0] is fixed to 2: the model's code depends on it, so another size is captured anew"
    ]


def test_static_capture() -> None:
    program = capture_call(Lambda(_branching), *_x(2, 6), dynamic=False)
    assert not program.sizes.symbols
    assert "f32[2 6 16]" in text(program)


def test_varying_number_becomes_an_input() -> None:
    model = Lambda(_nested_inputs)
    program = capture_call(model, *_nested(2, 6), varying=frozenset({"kwargs[scale]"}))
    assert [i.name for i in program.inputs if i.kind == "user"] == ["args[0][x]", "args[0][more][0]", "kwargs[scale]"]
    (batch,), _ = _nested(3, 4)
    _assert_same(
        run_program(program, model, (batch,), {"scale": -1.5, "n": 3})["y"], model(batch, scale=-1.5, n=3)["y"].detach()
    )


def test_number_that_cannot_vary_is_baked_with_a_note() -> None:
    program = capture_call(Lambda(_nested_inputs), *_nested(2, 6), varying=frozenset({"kwargs[n]"}))
    assert "kwargs[n]" not in [i.name for i in program.inputs]
    assert program.notes[0].message.startswith("kwargs[n]: baked into the graph, captured anew for each value")

    def by_type(m: Any, x: torch.Tensor, keep: int) -> torch.Tensor:
        return m.lin(x)[:, keep:] if isinstance(keep, int) else m.lin(x).mean(1) * keep

    program = capture_call(Lambda(by_type), (torch.randn(2, 6, D), 2), varying=frozenset({"args[1]"}))
    assert "they mean something else to the model" in program.notes[0].message


# -- the model is left alone


class Restless(Lambda):
    """Touches everything in forward."""

    def __init__(self, fail: bool) -> None:
        super().__init__(lambda m, x: x)
        self.fail, self.calls, self.cache, self.gradient_checkpointing, self.layerdrop = fail, 0, None, True, 0.5
        self.constant, self.log = torch.arange(4.0), [0]
        self.lin.register_forward_hook(lambda m, a, out: out + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.register_forward_hook(lambda m, a, out: out)
        assert self.gradient_checkpointing  # its regions are read from the calls
        assert self.layerdrop == 0.0
        self.cache = self.lin(x)
        if self.fail:
            raise ValueError("no")
        return self.cache + self.constant.sum()


@pytest.mark.parametrize("fail", [False, True])
def test_model_is_as_before(fail: bool) -> None:
    model = Restless(fail)
    before = {k: v for k, v in vars(model).items() if k != "_parameters"}
    parameters = [id(p) for p in model.parameters()]
    with pytest.raises(CaptureError) if fail else contextlib.nullcontext():
        program = capture_call(model, *_x(2, 6))
    assert {k: v for k, v in vars(model).items() if k != "_parameters"} == before
    assert [id(p) for p in model.parameters()] == parameters
    assert (model.calls, model.log, len(model._forward_hooks)) == (0, [0], 0)
    assert model.cache is None
    assert all(type(b) is torch.Tensor for b in model.buffers())
    if not fail:
        assert [n.message.split(":")[0] for n in program.notes] == ["layerdrop=0.5 of module ''"]
        assert program.call is not None and program.call.state.writes.keys() == {"calls", "log", "cache"}
