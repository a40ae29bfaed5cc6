"""Covers: what patterns/ finds in models, op by op: the forward graph of one layer after both fuse passes; and that graphs with
a family of fusions compute what those without it do, with the same collectives.

A row is everything active that is left of a model besides linears and views: an op that a reader expects fused, and is not,
would stand in its row. What stands there has a reason:
    add          parallel attention and MLP (GPT-NeoX, Falcon, Phi, GPT-J): three summands, of which two go with the norm;
                 sums of embeddings, of which the last goes with a norm that follows
    layer_norm, rms_norm   not after a sum: the first of the model, norms of q and k, of a branch, of MLM heads; and the second
                 norm of one sum (GPT-NeoX)
    gelu, relu   of linears without bias: the library's kernel is one pass already
    dropout      after an activation, a norm or a sum of embeddings: not beside a residual
    embedding    a library kernel
    mul, div, tanh, sum, cross_entropy    embedding scales, the loss's mean, soft-capped logits
    index        heads picked by a constant
"""

from collections import Counter

import harness
import pattern_models
import pytest
import torch

from megafx.analysis.communication import collective_nodes
from megafx.capture.export import capture_call
from megafx.compiler.runner import Runner
from megafx.compiler.stages import EVERY_RANK, passes_of
from megafx.ir import dump
from megafx.ir.nodes import argument
from megafx.ir.program import VAL, active_nodes
from megafx.testing import make_context

VIEWS = (
    "linear",
    "reshape",
    "transpose.int",
    "slice",
    "select.int",
    "permute",
    "unsqueeze",
    "expand",
    "operator.getitem",
)


def fused(name, training=True, dtype=torch.float32, **options):
    """The program of one call after fuse_local, on one rank."""
    model, call = pattern_models.MODELS[name](**options)
    program = capture_call(model.to(dtype).train(training), (), call)
    context = make_context(training=training)
    passes = passes_of(context, *EVERY_RANK)
    last = [p.name for p in passes].index("fuse_local")
    Runner(context, [p.name for p in passes]).run(program, passes[: last + 1])
    return program


def ops_of(program):
    active = active_nodes(program)
    names = (dump.target_text(n.target) for n in program.graph.nodes if n.op == "call_function" and n in active)
    return dict(Counter(n for n in names if n not in VIEWS))


def row(**counts):
    return counts


LOSS = {"linear_cross_entropy": 1, "div": 1}
EMBEDDED = row(embedding=2, add=1, dropout=1)
GPT2 = LOSS | EMBEDDED | row(layer_norm=1, attention=1, bias_act=1, bias_dropout_add_layer_norm=2)
LLAMA = LOSS | row(embedding=1, rms_norm=1, rope_qk=1, attention=1, glu=1, bias_dropout_add_rms_norm=2)
PARALLEL = LOSS | row(embedding=1, layer_norm=1, rope_qk=1, attention=1, add=1, bias_dropout_add_layer_norm=1)
T5 = row(embedding=4, rms_norm=2, attention=3, relu=2, bias_dropout_add_rms_norm=5, mul=1, **LOSS)
IN_TRAINING = {
    "gpt2": GPT2,
    "bert": LOSS
    | row(embedding=3, add=2, layer_norm=2, dropout=1, attention=1, bias_act=2, bias_dropout_add_layer_norm=2),
    "llama": LLAMA,
    "t5": T5 | row(dropout=6),
    "gemma": LLAMA | row(mul=1),
    "qwen3": LLAMA | row(rms_norm=3),
    "gemma2": LLAMA | row(mul=2, rms_norm=3, div=2, tanh=1, cross_entropy=1, sum=1, linear_cross_entropy=0),
    "gpt_neox": PARALLEL | row(layer_norm=2, bias_act=1),
    "falcon": PARALLEL | row(gelu=1, index=2),
    "falcon new": PARALLEL | row(layer_norm=2, gelu=1, index=2),
    "falcon alibi": LOSS
    | row(embedding=1, layer_norm=1, index=2, attention=1, bias_act=1, bias_dropout_add_layer_norm=2),
    "phi": PARALLEL | row(bias_act=1),
    "phi3": LOSS | row(embedding=1, rms_norm=1, rope_qk=1, attention=1, glu_packed=1, bias_dropout_add_rms_norm=2),
    "opt": GPT2 | row(add=0, dropout=0, layer_norm=0, bias_dropout_add_layer_norm=3),
    "bloom": LOSS | row(embedding=1, layer_norm=2, attention=1, bias_act=1, bias_dropout_add_layer_norm=2),
    "gpt_neo": GPT2 | row(dropout=0),
    "gptj": PARALLEL | row(bias_act=1),
    "nanogpt": GPT2,
    "nanogpt sdpa": GPT2,
    "llama by hand": LLAMA,
}
RETURNED = row(linear_cross_entropy=0, cross_entropy=1, sum=1)  # without gradients the logits are made and returned
IN_EVAL = {
    "gpt2": GPT2 | RETURNED | row(dropout=0),
    "bert": IN_TRAINING["bert"] | RETURNED | row(dropout=0),
    "llama": LLAMA | RETURNED,
    "t5": T5 | RETURNED,
    "nanogpt": GPT2 | row(dropout=0),
}
EAGER = ("gpt2", "bert", "llama", "t5", "falcon new", "gpt_neox", "gptj")
IN_BF16 = ("gpt2", "llama", "gemma", "gpt_neox")


def check(name, wanted, **options):
    found = ops_of(fused(name, **options))
    assert found == {op: n for op, n in wanted.items() if n}


@pytest.mark.parametrize("name", IN_TRAINING)
def test_what_is_left_in_training(name):
    check(name, IN_TRAINING[name])


@pytest.mark.parametrize("name", IN_EVAL)
def test_what_is_left_in_eval(name):
    check(name, IN_EVAL[name], training=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", EAGER)
def test_eager_attention_is_the_same(name):
    """Where transformers hands a 4-D mask to a chain that is written out."""
    check(name, IN_TRAINING[name], attn_implementation="eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_casts_of_models_in_bf16_go_with_their_patterns(name, attention):
    check(name, IN_TRAINING[name], dtype=torch.bfloat16, attn_implementation=attention)


MASKED = {
    "gemma2": (True, 4),
    "gpt_neo": (True, 0),
    "gptj": (True, 0),
    "nanogpt": (True, 0),
    "llama by hand": (True, 0),
}


@pytest.mark.parametrize("name", MASKED)
def test_no_mask_has_queries_and_keys(name):
    """Causal masks and windows are flags; nothing that has both dims of the sequence is left."""
    program = fused(name)
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    attention = next(n for n in calls if dump.target_text(n.target) == "attention")
    assert [argument(attention, a) for a in ("mask", "causal", "window")] == [None, *MASKED[name]]
    values = (n.meta[VAL] for n in calls)
    twice = [
        v for v in values if isinstance(v, torch.Tensor) and v.dim() > 1 and repr(v.shape[-1]) == repr(v.shape[-2])
    ]
    assert not [v for v in twice if not isinstance(v.shape[-1], int)]


# Family, model of the zoo and its options, ranks, other options of the config, op -> how many with the family.
FAMILIES = [
    ("norm", "nanogpt", {}, 1, {}, {"bias_dropout_add_layer_norm": 2}),
    ("norm", "llama", {}, 3, {"sequence_parallel": True}, {"bias_dropout_add_rms_norm": 2}),
    pytest.param(
        "norm", "t5", {}, 2, {"sequence_parallel": True}, {"bias_dropout_add_rms_norm": 5}, marks=pytest.mark.slow
    ),
    ("bias_dropout", "bert", {}, 3, {"sequence_parallel": True, "norm_fusion": False}, {"bias_dropout_add": 2}),
    ("bias_activation", "bert", {}, 3, {"sequence_parallel": True}, {"bias_act": 2}),
    ("bias_activation", "llama", {}, 4, {"sequence_parallel": True}, {"glu_packed": 1}),
    ("apply_rope", "llama", {}, 2, {}, {"rope_qk": 1, "rope_qk_backward": 1}),
    ("masked_softmax", "gpt2", {"attn": "eager"}, 3, {"attention_fusion": False}, {"scale_mask_softmax_forward": 1}),
]


@pytest.mark.parametrize(("family", "name", "built", "t", "options", "found"), FAMILIES)
def test_a_family_changes_no_number_and_no_collective(family, name, built, t, options, found):
    """Forward, backward and the bits of dropout, on all ranks."""
    case = harness.Case.of(name, dropout=0.1, **built)
    inputs = case.inputs(2, 13)
    with_it, without = (case.compile(t, **{f"{family}_fusion": on}, **options) for on in (True, False))
    names, plain = ([str(n.target) for n in c.program.graph.nodes] for c in (with_it, without))
    for op, count in found.items():
        assert names.count(f"megafx.{op}.default") == count and f"megafx.{op}.default" not in plain, names
    harness.assert_equal(case.run(with_it, inputs), case.run(without, inputs))
    collectives = [sorted(str(n.target) for n in collective_nodes(c.program.graph)) for c in (with_it, without)]
    assert collectives[0] == collectives[1]
