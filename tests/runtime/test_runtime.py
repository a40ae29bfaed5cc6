"""The parallelized object on one rank: graphs, autograd, keys, refusals. (Several ranks: dist/on_ranks/call_forms.py.)"""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megafx.api import parallelize
from megafx.config import Config
from megafx.errors import UsageError
from megafx.runtime.runtime import Runtime
from megafx.weights.state import full_gradients, full_state_dict

ONE = Config(tensor_model_parallel_size=1)


@dataclass
class Result:
    loss: torch.Tensor | None
    logits: torch.Tensor
    name: str = "result"


class Model(nn.Module):
    """Tied head, a mutated buffer, dropout, several spellings of calls."""

    def __init__(self, vocab: int = 11, width: int = 6, p: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 10)
        self.down = nn.Linear(10, width)
        self.drop = nn.Dropout(p)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids, labels=None, scale=1.0):
        self.calls += 1
        x = self.embed(ids)
        x = x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))
        logits = self.head(x)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * scale
        return Result(loss, logits)


IDS = torch.arange(15).view(3, 5) % 11
LABELS = IDS.roll(1)


@pytest.fixture
def pair():
    """(eager reference, parallelized copy of it)"""
    torch.manual_seed(0)
    reference = Model().double()
    return reference, parallelize(copy.deepcopy(reference), ONE)


def assert_same_gradients(model, reference):
    found = full_gradients(model)
    assert found.keys() == {n for n, p in reference.named_parameters() if p.grad is not None}
    for name, value in found.items():
        torch.testing.assert_close(value, reference.get_parameter(name).grad, rtol=1e-10, atol=1e-12)


def test_it_is_the_same_object_and_trains_like_eager(pair):
    reference, model = pair
    assert isinstance(model, Model) and type(model).__name__ == "Model"
    assert model.head.weight is model.embed.weight and not hasattr(model.embed.weight, "full_tensor")
    assert list(model.state_dict()) == list(reference.state_dict())
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, reference))
    for step in range(3):
        a, b = model(IDS, LABELS), reference(IDS, LABELS)
        assert type(a) is Result and a.name == "result"
        torch.testing.assert_close(a.loss, b.loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(a.logits + 0, b.logits.detach())
        assert a.logits.requires_grad
        a.loss.backward()
        b.loss.backward()
        assert_same_gradients(model, reference)
        mine.step()
        theirs.step()
        if step:  # accumulates over the first two steps
            mine.zero_grad()
            theirs.zero_grad()
    assert model.calls == 3
    assert model.megafx.captures == 1
    for name, value in full_state_dict(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def test_sizes_and_spellings_share_a_graph_and_modes_do_not(pair):
    reference, model = pair

    def captures(*args, **kwargs):
        torch.testing.assert_close(model(*args, **kwargs).logits + 0, reference(*args, **kwargs).logits)
        return model.megafx.captures

    assert captures(IDS, LABELS) == 1
    assert captures(IDS[:1, :4], labels=LABELS[:1, :4]) == 1
    assert captures(labels=LABELS[:2], ids=IDS[:2]) == 1
    assert captures(IDS) == 2  # outputs are whole and differentiable without a loss
    assert captures(IDS, None) == 2
    with torch.no_grad():
        assert captures(IDS) == 3
        with torch.inference_mode():
            assert captures(IDS) == 3
    model.drop.eval()
    assert captures(IDS) == 4
    model.drop.train()
    model.norm.requires_grad_(False)
    assert captures(IDS) == 5
    model.norm.requires_grad_(True)
    assert captures(IDS) == 5


def test_outputs_without_a_loss_are_differentiable(pair):
    reference, model = pair
    for m in (model, reference):
        m(IDS).logits.square().sum().backward()
    assert_same_gradients(model, reference)


def test_numbers_that_vary_are_captured_once(pair):
    reference, model = pair
    found = [model(IDS, LABELS, scale=s).loss.item() for s in (1.0, 2.0, 3.0, 0.5)]
    expected = [reference(IDS, LABELS, scale=s).loss.item() for s in (1.0, 2.0, 3.0, 0.5)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert model.megafx.captures == 2


def test_frozen_parameters_get_no_gradient(pair):
    reference, model = pair
    for m in (model, reference):
        m.up.requires_grad_(False)
        m(IDS, LABELS).loss.backward()
    assert model.up.weight.grad is None
    assert_same_gradients(model, reference)


def test_gradients_of_inputs():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x, y):
            return ((x * self.weight + y) ** 2).sum()

    torch.manual_seed(0)
    reference = Scale()
    model = parallelize(copy.deepcopy(reference), ONE)
    xs = [torch.ones(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    y = torch.ones(3, 4, dtype=torch.float64)
    for m, x in zip((model, reference), xs, strict=True):
        m(x, y).backward()
    torch.testing.assert_close(xs[0].grad, xs[1].grad)
    assert_same_gradients(model, reference)


def test_hooks_of_parameters_and_of_the_root(pair):
    _, model = pair
    seen = []
    model.up.weight.register_hook(lambda g: seen.append("gradient"))
    model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    model.register_forward_hook(lambda *_: seen.append("forward"))
    model(IDS, LABELS).loss.backward()
    assert seen == ["forward", "gradient", "accumulated"]


def test_backward_twice(pair):
    reference, model = pair
    loss = model(IDS, LABELS).loss
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * reference(IDS, LABELS).loss).backward()
    assert_same_gradients(model, reference)
    with pytest.raises((UsageError, RuntimeError), match="backward"):
        loss.backward()


def test_double_backward(pair):
    reference, model = pair
    for each in (reference, model):
        out = each(IDS, LABELS)
        found = torch.autograd.grad(out.loss + out.logits.mean(), list(each.parameters()), create_graph=True)
        sum(g.square().sum() for g in found).backward()
    assert_same_gradients(model, reference)
    assert any("in eager mode" in note.message for note in model.megafx.notes)


def test_hooks_key_a_graph(pair):
    """One for each set of modules and kinds of hooks; another hook of a kind that is there needs none."""
    _, model = pair
    seen, captures = [], []

    def record(module, args, output):
        seen.append(output.shape)

    first = model.up.register_forward_hook(record)
    model(IDS)
    second = model.up.register_forward_hook(lambda *given: record(*given))
    model(IDS)
    captures.append(model.megafx.captures)
    assert len(seen) == 3 and any(n.topic == "hooks" and n.fqn == "up" for n in model.megafx.notes)
    first.remove()
    second.remove()
    model(IDS)
    model.up.register_forward_hook(record)
    model(IDS)
    model.drop.register_forward_hook(record)
    model(IDS)
    captures.append(model.megafx.captures)
    assert len(seen) == 6 and captures == [1, 3]


def test_a_hook_that_only_computes_is_traced():
    torch.manual_seed(0)
    reference = Model().double()
    reference.up.register_forward_hook(lambda module, args, output: output * 2)
    model = parallelize(copy.deepcopy(reference), ONE)
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits)
    assert not any(n.topic == "hooks" for n in model.megafx.notes)


def test_wrapping_for_data_parallelism_is_refused(pair):
    _, model = pair
    with pytest.raises(UsageError, match="DistributedDataParallel around a model"):
        _ = model._ddp_params_and_buffers_to_ignore  # what DDP reads first (dist/on_ranks/call_forms.py wraps for real)


def test_conversion_captures_anew(pair):
    reference, model = pair
    model(IDS, LABELS)
    model.float()
    out = model(IDS, LABELS)
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, reference.float()(IDS, LABELS).loss)
    assert model.megafx.captures == 2


@pytest.mark.slow
def test_autocast_has_its_own_graph(pair):
    reference, model = pair
    reference.float()
    model.float()
    model(IDS, LABELS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine, theirs = model(IDS, LABELS), reference(IDS, LABELS)
    assert model.megafx.captures == 2
    torch.testing.assert_close(mine.loss, theirs.loss, rtol=1e-2, atol=0)  # fused ops round to bf16 less often
    assert (mine.logits + 0).dtype == theirs.logits.dtype == torch.bfloat16


def test_deep_copies_are_independent(pair):
    reference, model = pair
    model(IDS, LABELS)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.up.weight.zero_()
    torch.testing.assert_close(model(IDS).logits, reference(IDS).logits)
    with torch.no_grad():
        reference.up.weight.zero_()
    torch.testing.assert_close(other(IDS).logits, reference(IDS).logits)
    assert other.head.weight is other.embed.weight


def test_pickling_is_refused(pair):
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(pair[1])


def test_parallelizing_twice_is_refused(pair):
    with pytest.raises(UsageError, match="parallelized already"):
        parallelize(pair[1], ONE)


def test_dropout_follows_the_default_generator():
    torch.manual_seed(0)
    model = parallelize(Model(p=0.5), ONE)

    def losses(seed):
        torch.manual_seed(seed)
        return [model(IDS, LABELS).loss.item() for _ in range(3)]

    first = losses(1)
    assert losses(1) == first
    assert len(set(first)) == 3
    assert losses(2) != first


def test_first_call_in_inference_mode_does_not_spoil_training():
    torch.manual_seed(0)
    reference = Model().double()
    model = parallelize(copy.deepcopy(reference), ONE)
    with torch.inference_mode():
        model(IDS)
    for m in (model, reference):
        m(IDS, LABELS).loss.backward()
    assert_same_gradients(model, reference)


def test_a_meta_model_can_be_filled_after_planning():
    torch.manual_seed(0)
    reference = Model()
    with torch.device("meta"):
        model = Model()
    model = parallelize(model, ONE, example_inputs=(IDS, LABELS))
    model.load_state_dict(reference.state_dict(), assign=True)
    torch.testing.assert_close(model(IDS, LABELS).loss, reference(IDS, LABELS).loss)


class Wide(nn.Module):
    """Dropout, and a value that is kept transposed."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 14), nn.Linear(14, 6), nn.LayerNorm(6)

    def forward(self, x):
        y = torch.nn.functional.gelu(self.up(self.norm(x)).transpose(0, 1))
        return (x + torch.nn.functional.dropout(self.down(y).transpose(0, 1), 0.3, self.training)).square().mean()


def test_hooks_on_saved_tensors_are_called():
    """In the first call too, whose tracing they do not see; with `save_on_cpu`, and with checkpointing of the whole model."""
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    torch.manual_seed(0)
    first = Wide().double()

    def gradients(model, around, run=None, retain=False):
        model.zero_grad()
        torch.manual_seed(5)
        with around:
            loss = (run or model)(x)
        if retain:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = gradients(parallelize(copy.deepcopy(first)), contextlib.nullcontext())
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(type(tensor))
        return tensor.numpy(force=True)

    def unpack(array):
        unpacked.append(array.shape)
        return torch.from_numpy(array.copy())  # contiguous, whatever it was

    hooks = torch.autograd.graph.saved_tensors_hooks
    model = parallelize(copy.deepcopy(first))
    for calls in (1, 2):
        for mine, theirs in zip(gradients(model, hooks(pack, unpack)), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert packed == [torch.Tensor] * len(packed) and len(packed) == len(unpacked) > 3 * calls
    before = len(packed)
    gradients(model, hooks(pack, unpack), retain=True)
    assert len(unpacked) - before == 2 * (len(packed) - before) > 0
    for fresh in (parallelize(copy.deepcopy(first)), model):
        again = lambda x, fresh=fresh: checkpoint(fresh, x, use_reentrant=False)
        for found in (
            gradients(fresh, torch.autograd.graph.save_on_cpu()),
            gradients(fresh, contextlib.nullcontext(), again),
        ):
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    step = model.megafx.state.step
    gradients(model, contextlib.nullcontext(), again)
    assert model.megafx.state.step == step + 2, "backward computes the checkpointed call again"


@pytest.mark.parametrize("change", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_call_takes_what_the_model_was_planned_by(change, monkeypatch):
    """Hugging Face models are planned ahead by an example of a call: one of the same form is not captured again."""
    captures = []
    capture = Runtime._capture_alone
    monkeypatch.setattr(Runtime, "_capture_alone", lambda self, *a, **k: captures.append(a) or capture(self, *a, **k))
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    torch.manual_seed(0)
    reference = transformers.LlamaForCausalLM(config).double().eval()  # as from_pretrained leaves it
    model = parallelize(copy.deepcopy(reference), ONE.replace(cache=False))
    ids = torch.randint(32, (3, 8))
    call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    for m in (reference, model):
        m.train()
        if change:
            m.model.norm.variance_epsilon = 0.5
    want, got = reference(**call).loss, model(**call).loss
    want.backward(), got.backward()
    torch.testing.assert_close(got, want)
    for name, value in full_gradients(model).items():  # its loss is computed in fp32
        torch.testing.assert_close(value, reference.get_parameter(name).grad, rtol=1e-5, atol=1e-7)
    assert len(captures) == (2 if change else 1)
