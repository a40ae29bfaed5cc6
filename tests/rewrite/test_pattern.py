"""Covers: rewrite/pattern.py, rewrite/trace.py. What a declaration means, and what is refused with which words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from toys import half_turn

import megafx
from megafx.ir.nodes import Draw
from megafx.rewrite.pattern import (
    DimSpec,
    Pattern,
    PatternError,
    TensorSpec,
    check_pattern,
    parse_spec,
    registered_patterns,
    unregister,
    variants_of,
)
from megafx.rewrite.trace import TraceNumber, TraceSize, trace_of

toy = torch.ops.toy
BF16 = {"D": torch.bfloat16}


class Gelu(Pattern):
    name = "test_gelu"
    tensors = {"x": "D[... h]", "bias": "param D[h]?"}
    variants = {"approximate": ("none", "tanh")}

    def match(x, bias, *, approximate):
        return F.gelu(x if bias is None else x + bias, approximate=approximate)

    def make(x, bias):
        return toy.act(x, bias)


def test_specs():
    assert parse_spec("D[... h]") == TensorSpec("D", True, (DimSpec(1, ("h",)),))
    assert parse_spec("param f32[n 2k]?") == TensorSpec(
        "f32", False, (DimSpec(1, ("n",)), DimSpec(2, ("k",))), param=True, optional=True
    )
    assert parse_spec("bool[b 1 1|s n*d]").dims == (
        DimSpec(1, ("b",)),
        DimSpec(1, ()),
        DimSpec(1, ("s",), or_one=True),
        DimSpec(1, ("n", "d")),
    )
    assert parse_spec("i64[]") == TensorSpec("i64", False, ())


@pytest.mark.parametrize(
    "text, message",
    [
        ("float32[h]", "'float32.h.' describes no tensor"),
        ("D", "'D' describes no tensor"),
        ("D[h ...]", "'...' in 'D.h ....' is no dim"),
        ("D[H]", "'H' in 'D.H.' is no dim"),
    ],
)
def test_wrong_specs(text, message):
    with pytest.raises(PatternError, match=message):
        parse_spec(text)


def test_variants_are_the_product_with_optional_tensors():
    assert list(map(str, variants_of(Gelu))) == [
        "approximate='none'",
        "approximate='none', bias=None",
        "approximate='tanh'",
        "approximate='tanh', bias=None",
    ]


def trace(pattern, number=0, dtypes=BF16, lead=2):
    return trace_of(pattern, list(variants_of(pattern))[number], dtypes, lead)


def test_a_trace_is_canonical_and_made_once():
    first = trace(Gelu)
    assert [str(c.target) for c in first.calls.values()] == ["aten.add.Tensor", "aten.gelu.default"]
    assert list(first.inputs.values()) == ["x", "bias"] and first.size == 2
    assert trace(Gelu) is first
    assert list(trace(Gelu, 1).inputs.values()) == ["x"]


def test_a_cast_that_is_none_makes_equal_traces():
    class Cast(Pattern):
        name = "test_cast"
        tensors = {"x": "D[... h]"}
        variants = {"cast": (True, False)}

        def match(x, *, cast):
            return torch.exp(x.float() if cast else x).to(x.dtype)

        def make(x):
            return x

    full = {"D": torch.float32}
    assert trace(Cast, 0, full).key == trace(Cast, 1, full).key
    assert trace(Cast, 0).key != trace(Cast, 1).key


def test_sizes_and_numbers_are_recognised():
    class Heads(Pattern):
        name = "test_heads"
        tensors = {"x": "D[b s n*d]"}
        scalars = {"factor": float}

        def match(x, *, factor):
            return (x.reshape(x.shape[0] * x.shape[1], -1) * factor)[:, : x.shape[2]].expand(3, -1, -1)

        def make(x):
            return x

    arguments = {name: value for call in trace(Heads).calls.values() for name, value in call.arguments}
    assert [(s.coefficient, "".join(sorted(s.letters))) for s in arguments["shape"]] == [(1, "bs"), (1, "dn")]
    assert arguments["other"] == TraceNumber("factor")
    assert arguments["size"][0] == 3


def test_products_in_dims():
    class Half(Pattern):
        name = "test_half"
        tensors = {"x": "D[... 2h]"}

        def match(x):
            return half_turn(x)

        def make(x):
            return x

    ends = [dict(c.arguments)["end"] for c in trace(Half).calls.values() if "end" in dict(c.arguments)]
    assert ends == [TraceSize(1, ("h",)), TraceSize(2, ("h",))]


def test_dropout_of_any_probability_and_number():
    class Dropped(Pattern):
        name = "test_dropped"
        tensors = {"x": "D[... h]"}
        scalars = {"p": float}

        def match(x, *, p):
            return F.dropout(x, p, True)

        def make(x, *, drop):
            return toy.drop_add(x, None, x, *drop.args)

    found = trace(Dropped)
    assert [str(n.target) for n in found.drops] == ["megafx.dropout.default"]
    assert [name for name, _ in next(iter(found.calls.values())).arguments] == ["x"]
    assert Draw().args == (None, 0.0, 0, -1, [], "tp")


def declare(**parts):
    parts = {"name": "wrong", "tensors": {"x": "D[... h]"}, "match": lambda x: x.exp(), "make": lambda x: x, **parts}
    return type("Wrong", (Pattern,), parts)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"name": ""}, "Wrong has no name"),
        ({"make": None}, "pattern 'wrong' has no make"),
        ({"tensors": None}, "pattern 'wrong' has no tensors"),
        ({"match": lambda x, y: x + y}, "match takes 'y', which is not declared"),
        ({"make": lambda x, dorp: x}, "make takes 'dorp', which is not declared\n  fix: did you mean 'drop'?"),
        ({"match": lambda: torch.ones(2)}, "match does not take x, which `tensors` describes"),
    ],
)
def test_declarations_that_cannot_work(parts, message):
    with pytest.raises(PatternError, match=message):
        check_pattern(declare(**parts))


def test_a_pattern_is_a_class():
    with pytest.raises(PatternError, match="derive a class from megafx.rewrite.pattern.Pattern"):
        check_pattern(lambda x: x)


@pytest.mark.parametrize(
    "parts, message",
    [
        ({"match": lambda x: x}, "match computes nothing"),
        ({"match": lambda x: 3}, "match returns something that is no tensor"),
        ({"tensors": {"x": "D[h]", "y": "D[h]"}, "match": lambda x, y: x.exp()}, "match does not use 'y'"),
        ({"match": lambda x: x.no_such_method()}, "match cannot be traced: AttributeError"),
        ({"match": lambda x: x if x.sum() > 0 else -x}, "match cannot be traced"),
        (
            {"scalars": {"p": float}, "match": lambda x, p: x * (1 / p)},
            "match computes with a declared number before an op takes it",
        ),
    ],
)
def test_matches_that_cannot_be_traced(parts, message):
    with pytest.raises(PatternError, match=message):
        trace(declare(**parts))


def test_dtypes_that_do_not_mix_are_left_out():
    class Linear(Pattern):
        name = "test_linear"
        tensors = {"x": "D[... k]", "w": "E[n k]"}

        def match(x, w):
            if x.dtype != w.dtype:
                raise TypeError("some ops refuse this")
            return F.linear(x, w)

        def make(x, w):
            return x

    assert trace(Linear, dtypes={"D": torch.float32, "E": torch.bfloat16}) is None
    assert trace(Linear, dtypes={"D": torch.float32, "E": torch.float32}) is not None


def test_registering_replaces_by_name():
    try:
        assert megafx.register_pattern(Gelu) is Gelu
        other = declare(name="test_gelu")
        megafx.register_pattern(other)
        assert [p for p in registered_patterns() if p.name == "test_gelu"] == [other]
        names = [p.name for p in registered_patterns()]
        assert names == sorted(names)
    finally:
        unregister("test_gelu")
    assert "test_gelu" not in [p.name for p in registered_patterns()]


def test_every_pattern_of_the_library_is_sound():
    for pattern in registered_patterns():
        check_pattern(pattern)
        assert pattern.__doc__, f"{pattern.name} has no docstring"
        assert pattern.knob is None or pattern.knob in megafx.Config.__dataclass_fields__
