"""Covers: the forms of calls that training loops and evaluations make of one model: on simulated ranks at fp64 against eager,
every output and gradient; and which calls of a parallelized model share a graph.

Without the slow ones, every fifth structure at one number of ranks. On real ranks: dist/on_ranks/call_structures.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from calls import captured, compare, compiled, wanted_gradients
from structures import IDS, LABELS, RIGHT, STRUCTURES, llama
from torch import Tensor, nn

import megafx
from megafx.analysis.communication import communication
from megafx.ir.program import VAL

RTOL = 1e-10
TRAIN = {"input_ids": IDS, "labels": LABELS, "attention_mask": RIGHT}


def each(names: Iterable[str]) -> Iterator[Any]:
    """(name, ranks): all pairs; every fifth name at one number of ranks, the others marked slow."""
    for i, name in enumerate(names):
        for t in (2, 3):
            yield pytest.param(name, t, marks=[] if i % 5 == 1 and t == 2 + i // 5 % 2 else pytest.mark.slow)


def assert_exact(model: nn.Module, call: dict[str, Any], t: int, **config: Any) -> Any:
    """-> what ran."""
    off, made = compare(model, call, t, **config)
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= RTOL, f"{worst} is off by {off[worst]:.1e}"
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("name", "t"), list(each(STRUCTURES)))
def test_structure(name: str, t: int) -> None:
    build, call = STRUCTURES[name]
    made = assert_exact(build(), call(), t)
    assert any(p.is_shard for p in made.plan.params.values())
    given = {f"kwargs[{k}]" for k, v in call().items() if isinstance(v, Tensor) and v.requires_grad}
    assert given <= {o.name for o in made.program.outputs if o.kind == "gradient"}


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize(
    "mode", [pytest.param("eval", marks=SLOW), pytest.param("no_grad", marks=SLOW), "inference_mode"]
)
def test_mode(mode: str, t: int) -> None:
    model = llama().eval()
    context: contextlib.AbstractContextManager[Any] = (
        contextlib.nullcontext() if mode == "eval" else getattr(torch, mode)()
    )
    with context:
        made = assert_exact(model, TRAIN, t)
    assert bool(made.wrt) == (mode == "eval")


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=SLOW)])
def test_autocast(t: int) -> None:
    """Products in bf16, norms, softmax and loss in fp32 as eager has them; what is left is rounding of sums."""
    model = llama().float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        off, made = compare(model, TRAIN, t, promoted=False)
        wanted = copy.deepcopy(model)(**TRAIN)
    plain, _ = compare(model, TRAIN, t, promoted=False)
    assert off["output loss"] < 2e-3 and max(off.values()) < 5e-2 and max(plain.values()) < 1e-4
    values = {o.name: n.meta[VAL].dtype for o, n in zip(made.program.outputs, made.program.results(), strict=True)}
    assert (
        (values["loss"], values["logits"])
        == (wanted.loss.dtype, wanted.logits.dtype)
        == (torch.float32, torch.bfloat16)
    )
    assert {values[n] for n, _ in model.named_parameters()} == {torch.float32}  # gradients are as their parameters
    products = [n for n in made.program.graph.nodes if str(n.target) in ("aten.linear.default", "aten.mm.default")]
    assert len(products) >= 14 and {n.meta[VAL].dtype for n in products} == {torch.bfloat16}


def freeze(model: nn.Module, part: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(part in name)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("part", "t"), [pytest.param("mlp", 2, marks=SLOW), ("lm_head", 3)])
def test_frozen_parameters(part: str, t: int) -> None:
    """No gradient of theirs is computed, nothing is propagated further down than needed, and less is communicated."""
    made = assert_exact(freeze(llama(), part), TRAIN, t)
    gradients = {o.name for o in made.program.outputs if o.kind == "gradient"}
    assert gradients and all(part in name for name in gradients)
    whole = llama()
    program = captured(whole, TRAIN)
    everything = compiled(program, t, wanted_gradients(whole, program, TRAIN))

    def backward(graph: Any) -> int:
        return sum(c.direction == "backward" for c in communication(graph.program, t))

    assert backward(made) < backward(everything)
    assert len(made.program.graph.nodes) < len(everything.program.graph.nodes)
    if part == "lm_head":
        assert "self_attn" not in "".join(c.fqn for c in communication(made.program, t) if c.direction == "backward")


def test_all_parameters_frozen() -> None:
    """A graph without a backward, as under no_grad."""
    made = assert_exact(freeze(llama(), "nothing"), TRAIN, 2)
    assert made.wrt == []


@pytest.mark.slow
def test_prompt_tuning() -> None:
    """All parameters are frozen; embeddings that the caller gives get their gradient, through the shards."""
    build, call = STRUCTURES["embeddings with gradients"]
    made = assert_exact(freeze(build(), "nothing"), call(), 3)
    assert [o.name for o in made.program.outputs if o.kind == "gradient"] == ["kwargs[inputs_embeds]"]


# -- low-rank adapters


class LoRA(nn.Module):
    """A linear layer and a low-rank sum beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.up(self.down(x))


ADAPTED = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def with_adapters() -> nn.Module:
    model = llama().requires_grad_(False)
    torch.manual_seed(3)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ADAPTED:
                setattr(module, name, LoRA(child, 5))
    return model


def with_peft() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=5, lora_alpha=10, target_modules=list(ADAPTED), lora_dropout=0.0)
    model = peft.get_peft_model(llama(), config).double().train()
    torch.manual_seed(3)
    for name, p in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, pytest.param(3, marks=SLOW)])
@pytest.mark.parametrize("build", [pytest.param(with_adapters, marks=SLOW), with_peft])
def test_adapters(build: Any, t: int) -> None:
    """Adapters alone get gradients, and they are eager's."""
    made = assert_exact(build(), TRAIN, t)
    gradients = {o.name for o in made.program.outputs if o.kind == "gradient"}
    assert len(gradients) == 2 * len(ADAPTED)


@pytest.mark.parametrize("called", [False, True])
def test_adapters_that_come_late(called: bool) -> None:
    """They are trained as in eager mode, and not left out of a graph that is there already."""
    peft = pytest.importorskip("peft")
    plain = llama().float()
    model = megafx.parallelize(copy.deepcopy(plain))
    if called:
        model(**TRAIN)
    lora = peft.LoraConfig(r=5, target_modules=["q_proj"], init_lora_weights=False)
    late, eager = peft.get_peft_model(model, lora), peft.get_peft_model(plain, lora)
    eager.load_state_dict(late.state_dict())
    for _ in range(2):
        found, wanted = late(**TRAIN).loss, eager(**TRAIN).loss
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        found.backward()
        wanted.backward()
    gradients = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert gradients and all("lora_" in n for n in gradients)
    for name, param in late.named_parameters():
        torch.testing.assert_close(param.grad, gradients.get(name), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_adapters_are_sharded_with_their_linears() -> None:
    """At a size at which sharding pays: the wide side of an adapter is cut as its linear's is; nothing is made."""
    peft = pytest.importorskip("peft")
    import transformers

    with torch.device("meta"):
        config = transformers.LlamaConfig(
            hidden_size=4096, num_hidden_layers=1, intermediate_size=14336, vocab_size=32000, num_attention_heads=32,
            num_key_value_heads=8, max_position_embeddings=4096, use_cache=False,
        )  # fmt: skip
        lora = peft.LoraConfig(r=16, target_modules=["q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
        call = {name: torch.zeros(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
    planned = megafx.plan(
        model, megafx.Config(tensor_model_parallel_size=4, hardware="h100-nvlink"), example_inputs=call
    )
    found = {n: str(p).split("/")[0] for n, p in planned.params.items() if "_proj" in n}
    for name, style in (
        ("q_proj", "S0"),
        ("gate_proj", "S0"),
        ("up_proj", "S0"),
        ("o_proj", "S1"),
        ("down_proj", "S1"),
    ):
        (base,) = (n for n in found if f"{name}.base_layer" in n)
        assert found[base] == style
        wide = base.replace("base_layer.weight", "lora_B.default.weight" if style == "S0" else "lora_A.default.weight")
        assert found[wide] == style


# -- calls of one object


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = llama().float()
    eager = copy.deepcopy(model)
    return megafx.parallelize(model), eager


def assert_same_gradients(model: Any, eager: Any) -> None:
    pairs = zip(model.named_parameters(), eager.named_parameters(), strict=True)
    for (name, a), (_, b) in pairs:
        assert (a.grad is None) == (b.grad is None), name
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_accumulate_with_a_changing_number_of_items(pair: tuple[Any, Any]) -> None:
    """num_items_in_batch of every call its own: after its second value it is an input of one graph."""
    model, eager = pair
    for m in pair:
        m.zero_grad()
        for items in (30, 17, 23, 41):
            m(input_ids=IDS, labels=LABELS, num_items_in_batch=items).loss.backward()
    assert_same_gradients(model, eager)
    before = model.megafx.captures
    model(input_ids=IDS, labels=LABELS, num_items_in_batch=99)
    assert model.megafx.captures == before


def test_masks_share_a_graph_and_tuples_come_back(pair: tuple[Any, Any]) -> None:
    model = pair[0]
    model(**TRAIN)
    before = model.megafx.captures
    for mask in (RIGHT, torch.ones_like(RIGHT), RIGHT.flip(1)):
        found, wanted = (m(input_ids=IDS, labels=LABELS, attention_mask=mask) for m in pair)
        torch.testing.assert_close(found.loss, wanted.loss)
        torch.testing.assert_close(found.logits + 0, wanted.logits.detach())
    assert model.megafx.captures == before
    found, wanted = (m(**TRAIN, return_dict=False, output_hidden_states=True) for m in pair)
    assert type(found) is tuple and [type(x) for x in found][2:] == [type(x) for x in wanted][2:] == [tuple]
    for a, b in zip(found[2], wanted[2], strict=True):
        torch.testing.assert_close(a + 0, b.detach())


@SLOW
def test_prefix_tuning() -> None:
    """peft fills a cache with its prompt, and gives it to the model: only the prompt has a gradient."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    ids = torch.randint(20, (2, 7))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    verdict = megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=batch)
    assert verdict and [*verdict.gradients] == ["prompt_encoder.default.embedding.weight"], verdict
