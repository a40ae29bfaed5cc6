"""Covers: the texts of errors, and fallbacks that are reported. (Among ranks: dist/on_ranks/call_forms.py.)"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import errors_page
import pytest
import torch
import zoo
from torch import nn

import megafx
from megafx.errors import AgreementError, CaptureError, ConfigError, PlanError, UsageError
from megafx.planner.plan import Plan

HARDWARE = {"hardware": "h100-nvlink"}


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.lin(x).sum() > 0:
            return x
        return self.lin(x)


BRANCH = Branch.forward.__code__.co_firstlineno + 1
X = torch.ones(2, 3, 4)


def text_of(kind: type[Exception], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).replace(__file__, "FILE")


def plan(name: str, t: int, *, model: dict[str, Any] | None = None, **options: Any) -> Plan:
    built, inputs = zoo.build(name, **(model or {}))
    config = megafx.Config(tensor_model_parallel_size=t, **HARDWARE, **options)
    return megafx.plan(built, config, example_inputs=inputs(2, 16))


# -- errors


@pytest.mark.parametrize("when", ["plan", "parallelize", "the first call"])
def test_capture_failure_names_the_users_line(when: str) -> None:
    model = nn.Sequential(nn.Identity(), Branch())
    one = megafx.Config(tensor_model_parallel_size=1, uncaptured="error")
    calls = {
        "plan": lambda: megafx.plan(model, one, example_inputs=(X,)),
        "parallelize": lambda: megafx.parallelize(model, one, example_inputs=(X,)),
        "the first call": lambda: megafx.parallelize(model, one)(X),
    }
    assert text_of(CaptureError, calls[when]) == (
        "a Python decision (`if`, `while`, `assert`, `bool()`, `int()`) depends on the data of a tensor\n"
        f"  in module '1' at FILE:{BRANCH} `if self.lin(x).sum() > 0:`\n"
        "  fix: use torch.where or a mask, or decide by a Python value that is known before the call; or leave the module "
        'out of the graph, if it holds few parameters: Config(eager_modules=["1"])'
    )


def test_a_model_that_failed_is_still_whole() -> None:
    """After an error the object is not half changed: hooks, training mode and weights are as they were."""
    model = Branch().train()
    megafx.parallelize(model, megafx.Config(tensor_model_parallel_size=1))
    for _ in range(2):
        with pytest.raises(CaptureError):
            model(X)
    assert model.training and model.megafx.captures == 0 and not model.megafx.turns.capturing
    assert isinstance(model, Branch) and type(model.lin.weight) is nn.Parameter


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            {"h.*.mlp.fcc": "colwise"},
            "override 'h.*.mlp.fcc' matches no parameter and no module of the model\n  fix: did you mean h.0.mlp.fc",
        ),
        ({"nowhere_at_all": "replicate"}, "override 'nowhere_at_all' matches no parameter and no module of the model"),
        (
            {"h.0.ln_1": "colwise"},
            "override 'h.0.ln_1' is colwise, but nothing that it matches can be colwise: it matches h.0.ln_1",
        ),
    ],
)
def test_overrides_that_do_nothing(overrides: dict[str, str], text: str) -> None:
    assert text_of(PlanError, lambda: plan("nanogpt", 2, overrides=overrides)).startswith(text)


def test_ranks_without_a_process_group() -> None:
    model, inputs = zoo.build("nanogpt")
    before = dict(model.named_parameters())
    config = megafx.Config(tensor_model_parallel_size=2)
    assert text_of(AgreementError, lambda: megafx.parallelize(model, config, example_inputs=inputs(2, 16))) == (
        "tensor_model_parallel_size=2, but there is no process group\n"
        "  fix: start with `torchrun --standalone --nproc-per-node 2`"
    )
    assert not hasattr(model, "megafx")
    assert all(p is before[n] for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("tensor_model_parallel_size", 0, "a whole number of at least 1, or None"),
        ("tensor_model_parallel_size", 2.0, "a whole number of at least 1, or None"),
        ("micro_batch_size", -1, "a whole number of at least 1, or None"),
        ("sequence_parallel", "yes", "True or False or 'auto'"),
        ("planner_policy", "megatrom", "'megatron' or 'free'"),
    ],
)
def test_config_out_of_range(field: str, value: Any, allowed: str) -> None:
    assert text_of(ConfigError, lambda: megafx.Config(**{field: value})) == (
        f"Config.{field} = {value!r} is out of range\n  fix: {field} must be {allowed}"
    )


def test_hardware_that_nobody_measured() -> None:
    text = text_of(
        ConfigError, lambda: megafx.plan(nn.Linear(4, 4), megafx.Config(hardware="h100-nvlnk"), example_inputs=(X,))
    )
    assert "h100-nvlnk" in text and "h100-nvlink" in text


def test_wrapping_in_data_parallel() -> None:
    from megafx.runtime.guards import DATA_PARALLEL

    model = megafx.parallelize(nn.Linear(4, 4), megafx.Config(tensor_model_parallel_size=1))
    fix = f"\n  fix: {DATA_PARALLEL}"
    wrapped = " around a model that megafx has parallelized" + fix
    assert text_of(UsageError, lambda: model._ddp_params_and_buffers_to_ignore) == "DistributedDataParallel" + wrapped
    assert text_of(UsageError, lambda: setattr(model, "_is_fsdp_managed_module", True)) == (
        "FullyShardedDataParallel" + wrapped
    )
    fsdp = type("FSDPModule", (), {})
    assert text_of(UsageError, lambda: type("FSDPLinear", (fsdp, type(model)), {})) == "fully_shard" + wrapped


def test_what_is_asked_too_early() -> None:
    model, _ = zoo.build("nanogpt")
    assert text_of(UsageError, lambda: megafx.explain(model)) == (
        "GPT is not parallelized\n  fix: call megafx.parallelize(model, ...) or megafx.plan"
    )
    assert text_of(CaptureError, lambda: megafx.plan(model)) == (
        "the inputs of a GPT are unknown\n"
        "  fix: pass example_inputs= (a tuple of args, a dict of kwargs, or both), or call the model once"
    )
    megafx.parallelize(model, megafx.Config(tensor_model_parallel_size=1))
    later = "\n  fix: call the model once, or pass example_inputs="
    assert text_of(UsageError, lambda: megafx.explain(model)) == "no call is planned yet" + later
    assert text_of(UsageError, lambda: model.print_readable("h.0")) == "no call is compiled yet" + later


def test_the_page_of_errors_is_that_of_the_sources() -> None:
    """The texts of all errors are pinned by the page: after a change, write it anew and read what changed."""
    assert errors_page.PAGE.read_text() == errors_page.page(), "run `python tests/house/errors_page.py`"
    page = errors_page.PAGE.read_text()
    for name, cls in errors_page.CLASSES.items():
        assert f"\n| `{name}` | " in page and f" | `{name}` |\n" in page, name
        assert name == "MegafxError" or "what_to_do" in vars(cls), f"{name} does not say what to do"
    assert "| `there is no file '<path>'` |" in page, "texts stand there with what they are filled with"
    assert page.count("\n| ") > 200


# -- fallbacks


@pytest.mark.parametrize(
    ("heads", "t", "shared"),
    [(2, 4, "2 units of 12 are shared by 2 of 4"), (4, 3, "4 units of 6 are shared by 2 of 3")],
)
def test_fewer_heads_than_ranks(heads: int, t: int, shared: str) -> None:
    report = megafx.explain(plan("nanogpt", t, model={"heads": heads, "layers": 2}))
    note = f"padding [h.*.attn.qkv.weight]: {shared} ranks; the others hold padding, and compute on it"
    assert note in report.notes
    assert not any("mlp" in n for n in report.notes)


def test_heads_that_no_rank_can_have_a_part_of() -> None:
    """Under replicate overrides the attention is computed whole; the report says for what reason."""
    overrides = {"h.*.attn": "replicate"}
    made = plan("nanogpt", 2, overrides=overrides)
    assert not any(p.is_shard for n, p in made.params.items() if ".attn." in n)
    assert made.params["h.0.mlp.fc.weight"].is_shard
    text = str(megafx.explain(made))
    assert "override" in text


@cache
def unusual() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    example = zoo.example("unusual")
    torch.manual_seed(0)
    model = example.Unusual(example.UnusualConfig(n_layer=1)).double()
    nn.init.normal_(model.mix)
    ids = torch.randint(0, 101, (2, 13))
    return model, {"ids": ids, "targets": ids.roll(1, 1)}


@pytest.mark.parametrize(("t", "sequence_parallel"), [(2, True), (3, False)])
def test_an_unusual_model_is_right(t: int, sequence_parallel: bool) -> None:
    model, call = unusual()
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel, **HARDWARE)
    verdict = megafx.verify(model, config, example_inputs=call)
    assert verdict, str(verdict)
    assert verdict.reference == "eager"
    assert verdict.gradients.keys() == {n for n, _ in model.named_parameters()}


def test_an_op_without_a_rule_is_reported_with_its_line() -> None:
    model, call = unusual()
    made = megafx.plan(model, megafx.Config(tensor_model_parallel_size=2, **HARDWARE), example_inputs=call)
    assert made.params["layers.0.q.weight"].is_shard, "the rest of the model is sharded all the same"
    assert made.replicated["decaying_sum"] == "no rule for unusual.decaying_sum.default"
    file = Path(sys.modules[type(model).__module__].__file__ or "")
    code = "x = x + self.mix * decaying_sum(x, 0.5)  # no sharding rule"
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if code in text)
    (note,) = [n for n in megafx.explain(made).notes if n.startswith("replicated")]
    assert note == (
        "replicated: unusual.decaying_sum.default: no rule for unusual.decaying_sum.default; computed whole on every rank "
        f"({file}:{line} `{code}`)"
    )


def test_the_note_of_an_op_without_a_rule_names_its_module() -> None:
    class Sorted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.renorm(x, 2, 2, 1.0)

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Sorted())
    made = megafx.plan(model, megafx.Config(tensor_model_parallel_size=2, **HARDWARE), example_inputs=(X,))
    (note,) = [n for n in megafx.explain(made).notes if n.startswith("replicated")]
    assert note.startswith("replicated [3]: aten.renorm.default: no rule")
    assert "return torch.renorm(x, 2, 2, 1.0)" in note


def test_the_note_of_an_element_names_the_op() -> None:
    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sort(x, 1).values.square()

    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), Largest())
    made = megafx.plan(model, megafx.Config(tensor_model_parallel_size=2, **HARDWARE), example_inputs=(X,))
    (note,) = [n for n in megafx.explain(made).notes if n.startswith("replicated")]
    assert note.startswith("replicated [3]: aten.sort.default: an element of an op with several results")
