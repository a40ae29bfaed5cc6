"""Covers: passes/fuse/fuse_linear_loss.py. Golden text, numbers, what is left alone and why, models that have it."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import megafx
from megafx.analysis.lazy import only_for_lazy
from megafx.capture.export import capture_call
from megafx.capture.libraries.huggingface import synthesize_inputs
from megafx.compiler.pipeline import compile_program
from megafx.compiler.runner import Runner
from megafx.compiler.stages import EVERY_RANK, passes_of
from megafx.config import Config
from megafx.ir import dump
from megafx.ir.program import VAL, Phase, Program
from megafx.passes.fuse.fuse_linear_loss import fuse_linear_loss
from megafx.testing import assert_same, canonical, expect, make_context, run_pass


def shifted(x, w, y):
    """Logits and labels against each other, as older models write it."""
    return F.cross_entropy(F.linear(x, w)[..., :-1, :].contiguous().view(-1, 16), y[..., 1:].contiguous().view(-1))


def padded(x, w, y):
    """Labels alone, as Hugging Face's loss does."""
    return F.cross_entropy(F.linear(x, w).view(-1, 16), F.pad(y, (0, 1), value=-100)[:, 1:].reshape(-1))


HEAD = {"x": "f32[b s k=8]", "w": "param f32[v=16 k=8]", "y": "i64[b s]"}
FLAT = {"x": "f32[t k=8]", "w": "param f32[v=16 k=8]", "y": "i64[t]"}


def fused(loss, config=None, **values) -> tuple[Program, Program]:
    """(before, after) on one rank."""
    before = canonical(loss, **values)
    before.phase = Phase.LOCAL
    return before, run_pass(fuse_linear_loss, before, make_context(1, config))


def ops_of(program: Program) -> list[str]:
    return [dump.target_text(n.target) for n in program.graph.nodes if n.op == "call_function"]


def test_golden():
    def loss(x, w, y):
        return F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), reduction="sum")

    before, after = fused(loss, **HEAD)
    expect(
        after,
        """\
        %0 = x                                                  # f32[b s 8]
        %1 = w                                                  # f32[16 8] param
        %2 = y                                                  # i64[b s]
        %3 = sym_size.int(%0, 0)                                # int b
        %4 = sym_size.int(%0, 1)                                # int s
        %5 = operator.mul(%3, %4)                               # int b*s
        %6 = reshape(%2, [%5])                                  # i64[b*s]
        %7 = reshape(%0, [%5, 8])                               # f32[b*s 8]
        %8 = linear_cross_entropy(%7, %1, None, %6, -100, 0.0)  # f32[]
        return %8""",
    )
    assert_same(before, after)
    assert [f.pattern for f in after.fusions] == ["linear_cross_entropy"]


@pytest.mark.parametrize(
    "loss, values",
    [
        (lambda x, w, y: F.cross_entropy(F.linear(x, w), y), FLAT),
        (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), label_smoothing=0.1), HEAD),
        (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), ignore_index=3), HEAD),
        (
            lambda x, w, b, y: F.cross_entropy(F.linear(x, w, b).view(-1, 16), y.view(-1)),
            {**{k: HEAD[k] for k in ("x", "w")}, "b": "param f32[v=16]", "y": "i64[b s]"},
        ),
        (shifted, HEAD),
        (padded, HEAD),
    ],
)
def test_forms(loss, values):
    before, after = fused(loss, **values)
    assert "linear_cross_entropy" in ops_of(after) and not {"linear", "cross_entropy"} & set(ops_of(after))
    assert_same(before, after)


def test_casts_to_fp32_go():
    def loss(x, w, y):
        return F.cross_entropy(F.linear(x, w).float()[:, 1:].float().reshape(-1, 16), y[:, 1:].reshape(-1))

    _, after = fused(loss, **{**HEAD, "x": "bf16[b s k=8]", "w": "param bf16[v=16 k=8]"})
    assert "linear_cross_entropy" in ops_of(after) and "to.dtype" not in ops_of(after)


@pytest.mark.parametrize(
    "loss, reason",
    [
        (lambda x, w, y: F.cross_entropy(F.linear(x, w).view(-1, 16), y.view(-1), reduction="none"),
         "the losses of single tokens are used by the output, not their sum"),
        (lambda x, w, y: F.cross_entropy((torch.tanh(F.linear(x, w) / 30) * 30).view(-1, 16), y.view(-1)),
         "its logits come from mul (%mul), not from a linear layer"),
        (lambda x, w, y: F.cross_entropy(x @ w.mT.softmax(-1), y), "its logits come from matmul"),
        (lambda x, w, y: F.cross_entropy(F.linear(x, w[:8]).view(-1, 8), y.view(-1)), "its logits are no larger than"),
    ],
)  # fmt: skip
def test_near_misses(loss, reason):
    values = FLAT if "matmul" in reason else HEAD
    before, after = fused(loss, **values)
    assert dump.text(before) == dump.text(after) and not after.fusions
    assert len(after.notes) == 1 and after.notes[0].topic == "fuse" and reason in after.notes[0].message


def both(x, w, y):
    logits = F.linear(x, w)
    return F.cross_entropy(logits.view(-1, 16), y.view(-1)), logits


def with_loss(config, fn, gather=True):
    before = canonical(fn, **HEAD)
    before.phase = Phase.LOCAL
    from dataclasses import replace

    before.outputs[0] = replace(before.outputs[0], loss=True)
    return before, run_pass(fuse_linear_loss, before, make_context(1, config))


def test_logits_that_leave_are_lazy():
    before, after = with_loss(Config(), both)
    assert ops_of(after)[-1] == "linear" and "linear_cross_entropy" in ops_of(after)
    assert [o.lazy for o in after.outputs] == [False, True]
    assert_same(before, after)


@pytest.mark.parametrize(
    "config, fn, reason",
    [
        (Config(lazy_outputs=False), both, "also used by the output, and lazy_outputs is off"),
        (Config(differentiable_outputs=True), both, "also used by the output, and differentiable_outputs is on"),
        (Config(), lambda x, w, y: (both(x, w, y)[0], F.linear(x, w).argmax(-1)), None),
        (
            Config(),
            lambda x, w, y: (lambda z: (F.cross_entropy(z.view(-1, 16), y.view(-1)), z.argmax(-1)))(F.linear(x, w)),
            "also used by argmax (%argmax)",
        ),
    ],
)
def test_logits_that_must_be_there(config, fn, reason):
    before, after = with_loss(config, fn)
    if reason is None:  # two layers
        assert "linear_cross_entropy" in ops_of(after)
        return
    assert dump.text(before) == dump.text(after) and not any(o.lazy for o in after.outputs)
    assert reason in after.notes[0].message


def test_off():
    before = canonical(lambda x, w, y: F.cross_entropy(F.linear(x, w), y), **FLAT)
    before.phase = Phase.LOCAL
    after = run_pass(fuse_linear_loss, before, make_context(1, Config(cross_entropy_fusion=False)))
    assert dump.text(before) == dump.text(after) and not after.notes


def joint(model, t=1, **config):
    context = make_context(t, Config(**config), wants_grad=lambda spec: spec.kind == "param")
    return compile_program(capture_call(model, *synthesize_inputs(model)), context).program


SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67}
MODELS = {
    "GPT2LMHeadModel": {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": 67},
    "LlamaForCausalLM": {**SMALL, "intermediate_size": 48},
    "OPTForCausalLM": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "PhiForCausalLM": {**SMALL, "intermediate_size": 48},  # its head has a bias
    "GPTNeoXForCausalLM": {**SMALL, "intermediate_size": 48},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 67},
    "BertForMaskedLM": {**SMALL, "intermediate_size": 48},
}  # fmt: skip


def build(name, sizes):
    import transformers

    config = getattr(transformers, name).config_class(**sizes)
    with torch.device("meta"):
        return getattr(transformers, name)(config).to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name):
    program = joint(build(name, MODELS[name]))
    assert [f.pattern for f in program.fusions].count("linear_cross_entropy") == 1
    assert [o.name for o in program.outputs if o.lazy] == ["logits"]


def test_soft_capped_logits_stay():
    sizes = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8}
    program = joint(build("Gemma2ForCausalLM", sizes))
    assert "linear_cross_entropy" not in {f.pattern for f in program.fusions}
    assert any("linear_cross_entropy does not match: its logits come from mul" in n.message for n in program.notes)


class Head(nn.Module):
    """Hidden states to loss, as trainers that need no logits write it."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(12, 24), nn.Linear(24, 37, bias=False)

    def forward(self, x, y):
        return F.cross_entropy(self.head(torch.tanh(self.up(x))).view(-1, 37), y.view(-1))


@pytest.mark.parametrize("t", [1, 2, 3, 4])
def test_compiled_forward_and_backward(t):
    """On ranks that the vocabulary of 37 is cut for unevenly too."""
    torch.manual_seed(0)
    batch = (torch.randn(2, 5, 12, dtype=torch.float64), torch.randint(0, 37, (2, 5)))
    assert megafx.verify(Head().double(), megafx.Config(tensor_model_parallel_size=t), example_inputs=batch)


def collectives(program):
    return [n.args[1:3] for n in program.graph.nodes if str(n.target) == "megafx.transition.default"]


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_sharded_vocabularies(name, sequence_parallel):
    """Three ranks, 67 classes: no [tokens, vocabulary] value but the lazy output's, and the collectives of the unfused plan."""
    model = build(name, MODELS[name])
    config = {"sequence_parallel": sequence_parallel, "micro_batch_size": 8, "seq_length": 4096}
    fused, unfused = (placed(model, 3, cross_entropy_fusion=on, **config) for on in (True, False))
    names = ops_of(fused)
    assert [n for n in names if "ce_stats" in n or "ce_loss" in n] == [
        "linear_ce_stats",
        "linear_ce_loss",
        "linear_ce_loss_backward",
    ]
    assert [n for n in ops_of(unfused) if "ce_stats" in n or "ce_loss" in n] == [
        "ce_stats",
        "ce_loss",
        "ce_loss_backward",
    ]
    assert Counter(collectives(fused)) == Counter(collectives(unfused))
    later = set(only_for_lazy(fused))
    wide = [n for n in fused.graph.nodes if n not in later and is_wide(n, 23)]
    assert not wide and any(is_wide(n, 23) for n in unfused.graph.nodes)


def is_wide(node, columns):
    """Whether a value has this rank's classes in one dim and tokens in another."""
    value = node.meta.get(VAL)
    if not isinstance(value, torch.Tensor):
        return False
    static = [n for n in value.shape if isinstance(n, int)]
    return columns in static and len(static) < value.dim()


def placed(model, t, **config):
    """The joint graph before transitions are written out."""
    config = Config(tensor_model_parallel_size=t, **config)
    context = make_context(t, config, wants_grad=lambda spec: spec.kind == "param")
    program = capture_call(model, *synthesize_inputs(model))
    passes = passes_of(context, *EVERY_RANK)
    Runner(context).run(program, passes[: [p.name for p in passes].index("check_types") + 1])
    assert not [n for n in program.notes if n.topic == "types"]
    return program
