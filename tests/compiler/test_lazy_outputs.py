"""Covers: lazy.py, compiler/executable.py, passes/backward/postpone_lazy_outputs.py, those in partition and executable
(logits beside a loss)."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import megafx
import megafx.kernels.loss.logits_chunks as kernels
from megafx.compiler import executable as executables
from megafx.errors import UsageError
from megafx.ir.program import VAL
from megafx.runtime.outputs import LazyTensor

VOCABULARY = 331


def tiny(name, **sizes):
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=VOCABULARY, **off, **sizes)
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=VOCABULARY, intermediate_size=32, **sizes
    )
    return transformers.LlamaForCausalLM(config)


def batch(rows=2, length=11):
    ids = torch.randint(0, VOCABULARY, (rows, length))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module", params=[pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def models(request):
    model = tiny(request.param)
    return megafx.parallelize(copy.deepcopy(model)), model


def test_same_as_eager(models):
    model, eager = models
    given = batch()
    out, wanted = model(**given), eager(**given)
    assert isinstance(out.logits, LazyTensor) and type(out) is type(wanted)
    assert out.logits.shape == wanted.logits.shape and out.logits.dtype == wanted.logits.dtype
    torch.testing.assert_close(out.loss, wanted.loss)
    out.loss.backward(), wanted.loss.backward()
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(out.logits + 0, wanted.logits.detach())  # after backward too


@pytest.mark.parametrize(
    "read",
    [
        lambda out: out.logits,
        lambda out: out[1],
        lambda out: out["logits"],
        lambda out: out.to_tuple()[1],
        lambda out: dict(out)["logits"],
        lambda out: out.logits.float().argmax(-1),
        lambda out: out.logits.detach().cpu().numpy(),
        lambda out: pickle.loads(pickle.dumps(out.logits)),
        lambda out: copy.deepcopy(out.logits),
    ],
)
def test_however_it_is_read(models, read):
    model, eager = models
    given = batch()
    found = read(model(**given))
    with torch.no_grad():
        wanted = read(eager(**given))
    torch.testing.assert_close(torch.as_tensor(found) + 0, torch.as_tensor(wanted))


def test_evaluation_is_as_before(models):
    model, eager = models
    given = batch()
    model.eval(), eager.eval()
    with torch.no_grad():
        found, wanted = model(**given), eager(**given)
    model.train(), eager.train()
    assert type(found.logits) is torch.Tensor
    torch.testing.assert_close(found.logits, wanted.logits)


def test_never_from_changed_weights(models):
    model, _ = models
    model = copy.deepcopy(model)
    out, read = model(**batch()), model(**batch())
    assert read.logits.sum().isfinite()
    out.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(
        UsageError, match=r"'\S*(lm_head|wte).weight' was changed in place.*\n.*read them before"
    ) as caught:
        out.logits.sum()
    assert "Config(lazy_outputs=False)" in str(caught.value)
    assert read.logits.sum().isfinite()  # what was made before stays


@pytest.mark.parametrize("config", [{"lazy_outputs": False}, {"differentiable_outputs": True}])
def test_off(config):
    model = megafx.parallelize(tiny("llama"), megafx.Config(**config))
    out = model(**batch())
    assert type(out.logits) is torch.Tensor
    assert out.logits.requires_grad
    assert any("linear_cross_entropy does not match" in note.message for note in model.megafx.notes)


def test_what_it_needs_dies_with_it(models, monkeypatch):
    """The hidden states live as long as the output object does, and no longer than until the logits are made."""
    model, _ = models
    kept = []
    make = executables.LazyOutputs.__init__

    def watched(self, saved, values, run, inputs):
        make(self, saved, values, run, inputs)
        kept.extend(weakref.ref(v) for s, v in zip(saved, values, strict=True) if s.kind == "value")

    monkeypatch.setattr(executables.LazyOutputs, "__init__", watched)
    for read in (False, True):
        kept.clear()
        out = model(**batch())
        out.loss.backward()
        assert len(kept) == 1 and kept[0]().shape[-1] == 16
        if read:
            out.logits.sum()
        else:
            del out
        gc.collect()
        assert kept[0]() is None


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_take_over_memory(fused):
    """Those that forward made are scaled in place; unfused, the logits' gradient is written over the logits."""
    config = megafx.Config(cross_entropy_fusion=fused)
    model = megafx.parallelize(nn.Sequential(nn.Linear(8, 16), Loss()), config, example_inputs=(torch.randn(5, 8),))
    (graph,) = next(iter(model.megafx.graphs.values()))
    names = graph.executable._last_backward.__code__.co_names
    wanted = "_op_linear_cross_entropy_backward_" if fused else "_op_cross_entropy_backward_"
    assert any(name.endswith(wanted) for name in names), names


class Loss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 37)

    def forward(self, x):
        return nn.functional.cross_entropy(self.head(x), torch.arange(5))


def shapes_of_step(model, given):
    """Shapes of every tensor that an op of a training step takes, ops inside of megafx's own included. What stands for outputs
    that nobody has computed has their shape, and goes through a function of autograd (runtime/hooks_on_outputs.py)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        model(**given).loss.backward()
    events = [e for e in profile.events() if e.name != "_Above"]
    return [tuple(s) for e in events for s in e.input_shapes if s and all(isinstance(n, int) for n in s)]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_logits_in_a_training_step(name, monkeypatch):
    """No op takes or keeps tokens x vocabulary: at most a chunk of it. Unfused, the same look finds them."""
    monkeypatch.setattr(kernels, "CHUNK_BYTES", 1)
    tokens = 1056
    given = batch(16, tokens // 16)
    found = {}
    for fused in (True, False):
        model = megafx.parallelize(tiny(name), megafx.Config(cross_entropy_fusion=fused))
        model(**given).loss.backward()
        shapes = shapes_of_step(model, given)
        found[fused] = max(torch.Size(s).numel() for s in shapes if VOCABULARY in s)
        graph = next(g for gs in model.megafx.graphs.values() for g in gs)
        parts = graph.executable.parts
        for gm in (parts.forward, parts.backward):
            values = [n.meta[VAL] for n in gm.graph.nodes if isinstance(n.meta.get(VAL), torch.Tensor)]
            wide = [v for v in values if v.dim() > 1 and VOCABULARY in v.shape and v.shape != (VOCABULARY, 16)]
            wide = [v for v in wide if tuple(v.shape) != (16, VOCABULARY)]
            assert bool(wide) != fused, (name, fused, wide)
    assert found[True] == 256 * VOCABULARY and found[False] == tokens * VOCABULARY
