"""Covers: what_if.py (`megafx.search`) and report/stages.py."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
import zoo

import megafx
from megafx.cli import main
from megafx.errors import UsageError
from megafx.planner.hardware import PROFILES
from megafx.planner.pipeline_step import Split, balanced, share_of, under_way
from megafx.report.stages import pipeline_stages
from megafx.units import bytes_text
from megafx.what_if import TWINS, Candidate, SearchResult

CONFIG = megafx.Config(hardware="pcie", seq_length=64)
LARGE = 2**50, (2**16,)  # so much work that forms of data parallelism take about the same time


@cache
def found(memory: int = 2**30, batches: tuple[int, ...] = (1, 4), shown: int = 1000) -> SearchResult:
    model, inputs = zoo.build("nanogpt", layers=2)
    return megafx.search(model, 4, memory, CONFIG, example_inputs=inputs(2, 16), batches=batches, shown=shown)


def every(tried: SearchResult) -> list[Candidate]:
    """Twins too."""
    return [c for row in tried.best for c in (row, *row.twins)]


def test_every_way_to_share_the_gpus_is_tried() -> None:
    tried = found()
    ways = {
        (
            c.config.tensor_model_parallel_size,
            c.config.data_parallel_size or 1,
            c.config.data_parallel,
            c.config.sequence_parallel,
        )
        for c in every(tried)
    }
    assert {(t, d) for t, d, _, _ in ways} == {(1, 4), (2, 2), (4, 1)}
    assert {form for t, _, form, _ in ways if t == 2} == {"ddp", "zero1", "fsdp"}
    assert {sp for t, _, _, sp in ways if t > 1} == {False, True}
    assert {c.config.micro_batch_size for c in tried.best} == {1, 4}
    assert [c.us_a_row for c in tried.best] == sorted(c.us_a_row for c in tried.best)
    assert not tried.refused


@pytest.mark.parametrize(("t", "sequence", "batch"), [(2, True, 1), (4, False, 4)])
def test_a_layout_is_priced_as_its_plan(t: int, sequence: bool, batch: int) -> None:
    model, inputs = zoo.build("nanogpt", layers=2)
    options = CONFIG.replace(tensor_model_parallel_size=t, sequence_parallel=sequence, micro_batch_size=batch)
    report = megafx.explain(megafx.plan(model, options, example_inputs=inputs(2, 16)))
    (same,) = [
        c
        for c in every(found())
        if c.config.tensor_model_parallel_size == t and c.config.sequence_parallel == sequence
        and c.config.micro_batch_size == batch and c.config.data_parallel == "ddp"
    ]  # fmt: skip
    step, costed = report.step, report.costed
    assert same.parts["tensor-parallel collectives"] == pytest.approx(step.exposed_us)
    assert same.parts["computing"] + same.parts["the optimizer"] == pytest.approx(step.compute_us + step.host_us)
    assert same.memory["parameters"] == costed.memory["parameters"] and same.rows == batch * 4 // t
    if t == 4:
        assert same.step_us == pytest.approx(step.total_us)


def test_the_config_is_to_be_pasted_and_reasons_are_given() -> None:
    tried = found()
    for candidate in tried.best[:5]:
        assert eval(candidate.text(), {"megafx": megafx}) == candidate.config
    assert tried.why(tried.best[0]) == "the fastest"
    assert "% slower: " in tried.why(tried.best[-1]) and "s more a row for " in tried.why(tried.best[-1])
    text = str(tried)
    assert tried.best[0].text() in text and "configurations of 4 GPUs tried" in text


def test_forms_of_data_parallelism_that_take_the_same_time_are_one_row() -> None:
    tried = found(*LARGE)
    assert len({id(c) for c in every(tried)}) > len(tried.best), "there are twins"
    assert not any(twin.twins for row in tried.best for twin in row.twins)
    for row in tried.best:
        assert row.twins == tuple(sorted(row.twins, key=lambda c: (c.us_a_row, c.bytes)))
        for twin in row.twins:
            assert twin.config != row.config
            assert twin.config.replace(data_parallel=row.config.data_parallel) == row.config, (
                "on one host a copy is held by all"
            )
            assert 0 <= twin.slower_than(row) <= TWINS
    for row, other in itertools.combinations(tried.best, 2):  # what is left are other choices, or other times
        alike = other.config.replace(data_parallel=row.config.data_parallel) == row.config
        assert not alike or other.slower_than(row) > TWINS
    few = found(*LARGE, shown=3)
    assert few.best == tried.best[:3], "so many rows are shown, not so many with those that were folded"


def test_a_row_and_the_json_tell_of_its_twins() -> None:
    tried = found(*LARGE)
    row = next(c for c in tried.best if c.twins)
    text, data = str(tried), json.loads(tried.to_json())
    for twin in row.twins:
        slower = 100 * (twin.us_a_row / row.us_a_row - 1)
        assert f"or {twin.config.data_parallel}: {slower:.1f}% slower, {bytes_text(twin.bytes)}" in text
    assert f"at most {100 * TWINS:.0f}% slower than its row" in text
    assert len(data["configurations"]) == len(tried.best)
    for told, c in zip(data["configurations"], tried.best, strict=True):
        assert megafx.Config.from_dict(told["config"]) == c.config
        assert (told["step_us"], told["bytes"], told["why"]) == (c.step_us, c.bytes, tried.why(c))
        for twin, of in zip(told["twins"], c.twins, strict=True):
            assert megafx.Config.from_dict(twin["config"]) == of.config
            assert (twin["bytes"], twin["slower"]) == (of.bytes, of.slower_than(c))
    alone = SearchResult(4, 2**30, tried.tried, [replace(c, twins=()) for c in tried.best])
    assert "slower than its row" not in str(alone)


class Attention(torch.nn.Module):
    """Nothing but causal attention of long sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unflatten(-1, (8, 128)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(x, x * self.scale, x, is_causal=True).sum()


def test_no_more_is_computed_than_the_hardware_can() -> None:
    config = megafx.Config(hardware="h100-nvlink", seq_length=65536, params_dtype="bfloat16")
    tried = megafx.search(Attention(), 1, "1000GiB", config, example_inputs=torch.randn(2, 256, 1024).bfloat16())
    assert all(0.3 < c.mfu < 1 for c in tried.best), "what a causal mask takes away is not computed"


def test_what_does_not_fit_gets_a_budget_or_is_left_out() -> None:
    everything = every(found())
    limit = sorted(c.bytes for c in everything)[len(everything) // 3]
    tight = found(limit)
    assert tight.best and all(c.bytes <= limit for c in every(tight))
    assert any(c.config.activation_memory_budget is not None for c in every(tight))
    for c in every(tight):
        assert (c.parts["computing again in backward"] > 0) == (c.config.activation_memory_budget is not None)
    nothing = found(1000)
    assert not nothing.best and "nothing fits into 1000 B on 4 GPUs; the least is" in str(nothing)
    with pytest.raises(UsageError, match="nothing fits"):
        _ = nothing.config


def test_from_a_shell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = ["llama", "--quiet", "--seq", "128", "--batch", "2"]
    sizes = ["hidden_size=64", "intermediate_size=96", "num_hidden_layers=1", "num_attention_heads=4", "vocab_size=96"]
    model += [word for size in [*sizes, "num_key_value_heads=2"] for word in ("--set", size)]
    written = tmp_path / "found.json"
    assert main(["plan", *model, "--gpus", "2", "--memory", "10MiB", "--json", str(written)]) == 0
    assert "megafx.Config(tensor_model_parallel_size=" in capsys.readouterr().out
    configurations = json.loads(written.read_text())["configurations"]
    assert all(row["twins"] == [] or row["twins"][0]["slower"] <= TWINS for row in configurations)
    assert main(["plan", *model, "--tp", "2", "--json", str(written)]) == 2
    assert "--json without --gpus" in capsys.readouterr().err
    assert main(["plan", *model, "--gpus", "2", "--memory", "1000B"]) == 1
    assert main(["plan", *model, "--gpus", "2"]) == 2
    assert "--gpus and --memory go together" in capsys.readouterr().err
    assert main(["plan", *model, "--gpus", "2", "--memory", "lots"]) == 2
    assert "memory='lots' is no size" in capsys.readouterr().err
    assert main(["plan", *model, "--tp", "2", "--pipeline-stages", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def a_profile(path: Path, **fields: object) -> str:
    data = yaml.safe_load((PROFILES / "pcie.yaml").read_text()) | fields
    path.write_text(yaml.safe_dump(data))
    return str(path)


def test_an_axis_is_priced_by_its_place_in_the_mesh(tmp_path: Path) -> None:
    """With two GPUs on a host: tensor-parallel ranks share one, those that cut a sequence are on two."""
    model, inputs = zoo.build("nanogpt", layers=1)
    network = {"network_bytes_per_second": 1e9, "network_seconds": 1e-3}
    profiles = {
        hosts: a_profile(tmp_path / f"{hosts}.yaml", gpus_per_host=n, **more)
        for hosts, n, more in (("one", 4, network), ("two", 2, network), ("unknown", 2, {}))
    }
    reports = {
        hosts: megafx.plan(
            model,
            CONFIG.replace(tensor_model_parallel_size=2, context_parallel_size=2, hardware=profile),
            example_inputs=inputs(2, 16),
        ).report
        for hosts, profile in profiles.items()
    }
    moves = {hosts: [n.move for n in r.costed.nodes if n.move is not None] for hosts, r in reports.items()}
    for one, two, unknown in zip(moves["one"], moves["two"], moves["unknown"], strict=True):
        assert (one.axis, one.ranks, one.inner) == (two.axis, 2, 1 if one.axis == "tp" else 2)
        assert (two.cost_us > one.cost_us + 900) == (one.axis == "cp") and unknown.cost_us == one.cost_us
    assert {m.axis for m in moves["two"]} == {"tp", "cp"}
    assert reports["two"].step.exposed_by_axis["cp"] > 1000 + reports["one"].step.exposed_by_axis["cp"]
    assert any("ranks of 'cp' are on several hosts of 2 GPUs" in note for note in reports["unknown"].notes)
    assert not any("several hosts" in note for hosts in ("one", "two") for note in reports[hosts].notes)


def test_a_copy_in_each_host_is_gathered_by_the_link() -> None:
    """Sixteen data-parallel ranks on two hosts: with shards of eight, all but a sum of gradients stays in a host."""
    config = megafx.Config(hardware="h100-nvlink", seq_length=128, params_dtype="bfloat16", data_parallel="fsdp")
    config = config.replace(data_parallel_shard_size=8)
    example = {"example_inputs": torch.zeros(2, 8, dtype=torch.long)}
    copies, whole = (
        next(
            c
            for c in every(megafx.search(Uneven(), 16, "80GiB", k, shown=1000, batches=(1,), **example))
            if c.config.tensor_model_parallel_size == 1 and c.config.data_parallel == "fsdp"
        )
        for k in (config, config.replace(data_parallel_shard_size=16))
    )
    assert copies.config.data_parallel_shard_size == 8 and whole.config.data_parallel_shard_size is None
    both = every(
        megafx.search(
            Uneven(),
            16,
            "80GiB",
            config.replace(data_parallel="ddp", data_parallel_shard_size=None),
            shown=1000,
            **example,
        )
    )
    shards = {c.config.data_parallel_shard_size for c in both if c.config.tensor_model_parallel_size == 1}
    assert shards == {None, 8}, "copies of whole hosts"
    assert copies.memory["gradients"] == pytest.approx(2 * whole.memory["gradients"], abs=2)
    assert copies.parts["data-parallel collectives"] != whole.parts["data-parallel collectives"]


def test_between_hosts_data_parallel_ranks_use_the_network() -> None:
    config = megafx.Config(hardware="h100-nvlink", seq_length=128, params_dtype="bfloat16")
    example = {"example_inputs": torch.zeros(2, 8, dtype=torch.long)}
    tried = megafx.search(Uneven(), 16, "80GiB", config, **example)
    assert "one host, which has 8 GPUs" in tried.refused["tp=16"]
    assert {c.config.tensor_model_parallel_size for c in every(tried)} <= {1, 2, 4, 8}
    with pytest.raises(UsageError, match="network_bytes_per_second"):
        _ = megafx.search(Uneven(), 16, "80GiB", config.replace(hardware="pcie"), **example).config


def test_sequences_are_cut_where_they_are_long() -> None:
    model, inputs = zoo.build("nanogpt", layers=1)
    example = {"example_inputs": inputs(2, 16)}
    config = CONFIG.replace(seq_length=8192)
    tried = every(megafx.search(model, 4, "80GiB", config, batches=(1,), shown=1000, **example))
    axes = [(c.config.tensor_model_parallel_size, c.config.context_parallel_size) for c in tried]
    assert {*axes} == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)}, "4 ranks would have fewer than 4,096 tokens each"
    for c in tried:
        k = c.config
        assert (k.data_parallel_size or 1) * k.tensor_model_parallel_size * k.context_parallel_size == 4
        assert (c.parts["context-parallel collectives"] > 0) == (k.context_parallel_size > 1)
        shares_gradients = (k.data_parallel_size or 1) * k.context_parallel_size > 1
        assert (c.parts["data-parallel collectives"] > 0) == shares_gradients
    two_by_two = [c for c in tried if c.config.context_parallel_size == c.config.tensor_model_parallel_size == 2]
    one = next(c for c in two_by_two if c.config.data_parallel == "ddp")
    plan = megafx.plan(model, one.config, **example)
    step = plan.report.step
    exposed = one.parts["context-parallel collectives"] + one.parts["tensor-parallel collectives"]
    assert exposed == pytest.approx(step.exposed_us) and step.exposed_by_axis["cp"] > 0
    fsdp = next(c for c in two_by_two if c.config == one.config.replace(data_parallel="fsdp"))
    assert fsdp.memory["gradients"] == plan.report.costed.memory["gradients"] // 2, "ranks of a sequence hold shards"
    given = megafx.search(model, 4, "80GiB", CONFIG.replace(context_parallel_size=4), batches=(1,), **example)
    assert {c.config.context_parallel_size for c in every(given)} == {4}, "a number that is asked for"


PIPELINES = megafx.Config(hardware="h100-nvlink", seq_length=4096, params_dtype="bfloat16")


@cache
def pipelines(global_batch: int | None = None) -> list[Candidate]:
    """Of six layers of 64 x 4096 on 16 GPUs of two hosts."""
    example = {"example_inputs": torch.zeros(2, 8, dtype=torch.long), "global_batch": global_batch}
    return every(megafx.search(Uneven(), 16, "80GiB", PIPELINES, shown=10000, batches=(2,), **example))


def test_beyond_one_host_pipelines_are_tried() -> None:
    tried = [c for c in pipelines() if c.config.tensor_model_parallel_size == 1]
    splits = {(c.split.ranks, c.split.chunks) for c in tried}
    assert splits == {(1, 1), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)}, (
        "eight parts: six layers, embedding and head"
    )
    for c in tried:
        assert (c.config.data_parallel_size or 1) * c.split.ranks == 16
        assert c.split.microbatches == (1 if c.split.ranks == 1 else 4 * c.split.ranks)
        assert c.rows == 2 * (16 // c.split.ranks) * c.split.microbatches
        assert (c.parts["idle pipeline ranks"] > 0) == (c.parts["messages between stages"] > 0) == (c.split.ranks > 1)
    one, two = (
        next(c for c in tried if (c.split.ranks, c.split.chunks) == (2, k) and c.config.data_parallel == "ddp")
        for k in (1, 2)
    )
    assert two.parts["messages between stages"] == pytest.approx(2 * one.parts["messages between stages"])
    text = "stages=4, microbatches=8, schedule='Interleaved1F1B')"
    assert two.text().startswith("megafx.pipeline(model, megafx.Config(") and two.text().endswith(text)
    assert two.to_dict()["stages"] == 4 and " 2x2 " in str(SearchResult(16, 2**40, 1, [two]))


def test_pipelines_of_stages_that_cut_sequences() -> None:
    """What a stage sends is a rank's own tokens."""
    model, inputs = zoo.build("nanogpt", layers=2)
    config, example = PIPELINES.replace(seq_length=8192), inputs(2, 16)
    tried = every(megafx.search(model, 16, "80GiB", config, batches=(1,), shown=1000, example_inputs=example))
    one, two = (
        next(x for x in tried if (x.split.ranks, x.split.chunks, x.config.context_parallel_size) == (2, 1, c))
        for c in (1, 2)
    )
    assert one.config.data_parallel_size == 2 * two.config.data_parallel_size
    assert two.parts["messages between stages"] < one.parts["messages between stages"]
    assert two.parts["context-parallel collectives"] > 0 and "context_parallel_size=2" in two.text()


def test_a_global_batch_is_shared_out_in_micro_batches() -> None:
    tried = pipelines(64)
    assert tried and {c.rows for c in tried} == {64}
    plain = [c for c in tried if c.split.ranks == 1 and c.config.tensor_model_parallel_size == 1]
    assert {c.split.microbatches for c in plain} == {2}
    once = [c for c in pipelines() if c.config in [p.config for p in plain]]
    for many in plain:  # gradients of ddp and zero1 add up, and are reduced once; fsdp gathers parameters for each
        single = next(c for c in once if c.config == many.config)
        assert many.parts["computing"] == pytest.approx(2 * single.parts["computing"])
        waits = many.parts["data-parallel collectives"] / single.parts["data-parallel collectives"]
        assert (waits > 1.5) == (many.config.data_parallel == "fsdp") and waits < 2.001
        held = many.memory["gradients"] / single.memory["gradients"]
        assert (held > 1) == (many.config.data_parallel == "zero1")


def test_the_busiest_rank_of_a_pipeline() -> None:
    plan = megafx.plan(
        Uneven(), PIPELINES.replace(tensor_model_parallel_size=1), example_inputs=torch.zeros(2, 8, dtype=torch.long)
    )
    costed, step = plan.report.costed, plan.report.step
    whole = share_of(costed, step, Split())
    assert (whole.time, whole.held) == (1.0, 1.0)
    assert sum(r.times * r.held for r in costed.regions) == pytest.approx(costed.memory["parameters"])
    for ranks in (2, 4):
        stages = pipeline_stages(plan.report, ranks)
        share = share_of(costed, step, Split(ranks, 1, 4 * ranks))
        assert share.time == pytest.approx(max(s.us for s in stages) / sum(s.us for s in stages))
        assert 1 / ranks <= share.held < 1
    assert share_of(costed, step, Split(9, 1, 9)) is None, "eight parts"


def test_micro_batches_under_way() -> None:
    assert [under_way(Split(4, 1, 8), r) for r in range(4)] == [4, 3, 2, 1]
    assert under_way(Split(4, 1, 2), 0) == 2, "there are no more"
    assert under_way(Split(4, 2, 8), 0) == (4 + 6 + 1) / 2, "Megatron's number of forwards before the first backward"


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a_balanced_cut_is_the_best_of_all(count: int) -> None:
    for costs in ([5.0, 1, 1, 1, 9], [1.0] * 7, [0.0, 3, 0, 3, 0, 0], [9.0, 1, 1, 1, 1]):
        slowest = lambda begins: max(sum(costs[a:b]) for a, b in itertools.pairwise((*begins, len(costs))))  # noqa: B023
        cuts = [(0, *cut) for cut in itertools.combinations(range(1, len(costs)), count - 1)]
        found = balanced(costs, count)
        assert len({*found}) == count and found == sorted(found) and found[0] == 0
        assert slowest(found) == pytest.approx(min(map(slowest, cuts)))


def test_utilization_is_that_of_the_datasheet() -> None:
    row = found().best[0]
    assert row.mfu == pytest.approx(row.flops / (row.step_us * 1e-6) / 3.12e14)
    assert row.of_products == pytest.approx(row.flops / (row.step_us * 1e-6) / 2.2e14)
    assert "MFU: of the datasheet's 312 TFLOP/s" in str(found()) and "without fp32 copies" in str(found())
    assert replace(row, peak=0.0).mfu is None


class Uneven(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        layer = lambda: torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        self.layers = torch.nn.ModuleList(layer() for _ in range(6))
        self.head = torch.nn.Linear(8, 5000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).logsumexp(-1).sum()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_are_balanced_and_hold_each_module_once(count: int) -> None:
    config = megafx.Config(tensor_model_parallel_size=1, hardware="pcie")
    report = megafx.explain(megafx.plan(Uneven(), config, example_inputs=torch.zeros(2, 16, dtype=torch.int64)))
    stages, each = pipeline_stages(report, count), pipeline_stages(report, 8)  # parts that have modules
    assert len(stages) == count
    assert sum(s.us for s in stages) == pytest.approx(sum(s.us for s in each))
    cuts = itertools.combinations(range(1, len(each)), count - 1)
    best = min(max(sum(s.us for s in each[a:b]) for a, b in itertools.pairwise((0, *cut, len(each)))) for cut in cuts)
    assert max(s.us for s in stages) == pytest.approx(best)
    modules = [m for s in stages for m in s.modules if m.startswith("layers.") and m.count(".") == 1]
    assert modules == [f"layers.{i}" for i in range(6)]
    assert "embed" in stages[0].modules and "head" in stages[-1].modules
    if count == 2:  # the head is as long as several layers
        assert len(stages[1].modules) < len(stages[0].modules) and "layers.[0-" in str(stages[0])
    with pytest.raises(UsageError, match="stages for a model of"):
        pipeline_stages(report, 100)
