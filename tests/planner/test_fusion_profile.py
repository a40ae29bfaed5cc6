"""Covers: planner/fusion_profile.py, passes/fuse/fuse.py, benchmarks/profile_fusions.py: fusions chosen by measurement."""

from __future__ import annotations

from collections import Counter

import harness
import pytest
import torch
import torch.nn.functional as F
import yaml
from profile_fusions import CASES, Setting, Widths, elements, main, prepare
from small_plans import FAST, SLOW, measured, profile, saved
from torch import nn

import megafx
from megafx.capture.export import capture_call
from megafx.compiler.pipeline import compile_program
from megafx.config import Config
from megafx.errors import ConfigError
from megafx.planner.fusion_profile import FOLDER, MERGE_GATE_UP, MERGE_LINEARS, MODES, FusionProfile, Measured, Times
from megafx.planner.hardware import Hardware, profiles_in
from megafx.rewrite.pattern import registered_patterns
from megafx.testing import make_context


class Block(nn.Module):
    """add + norm, MLP with bias and GeLU, dropout and residual."""

    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.mix, self.p = nn.LayerNorm(32), nn.Linear(32, 32), p
        self.up, self.down = nn.Linear(32, 66), nn.Linear(66, 32)

    def forward(self, x, target):
        total = x + self.mix(x)
        y = self.down(F.gelu(self.up(self.norm(total))))
        return F.mse_loss(total + F.dropout(y, self.p, self.training), target)


def case_of(p):
    torch.manual_seed(0)
    model = Block(p).double()

    def inputs(batch, seq):
        generator = torch.Generator().manual_seed(batch * 100 + seq)
        return {n: torch.randn(batch, seq, 32, generator=generator, dtype=torch.float64) for n in ("x", "target")}

    return harness.Case(model, inputs, capture_call(model, (), inputs(2, 8)))


@pytest.fixture(scope="module")
def cases():
    return {p: case_of(p) for p in (0.0, 0.25)}


def counts(compiled):
    return Counter(f.pattern for f in compiled.program.fusions)


ALL = {"layer_norm", "linear_add_norm", "linear_bias_activation"}
DROPPED = "linear_bias_dropout_add"


def test_without_measurements_everything_is_fused_and_the_report_says_so(cases):
    compiled = cases[0.0].compile(2)
    assert counts(compiled).keys() == ALL
    assert compiled.plan.report.header["fusions"] == "all (no measurements for h100-nvlink)"
    assert cases[0.0].compile(2, fusion_profile="all").plan.report.header["fusions"] == "all (fusion_profile)"


def test_what_is_slower_is_not_fused_and_the_report_says_why(cases, tmp_path):
    path = saved(tmp_path / "p.yaml", act=measured("linear_bias_activation"))
    compiled = cases[0.0].compile(2, fusion_profile=path)
    assert counts(compiled).keys() == ALL - {"linear_bias_activation"}
    (note,) = [n for n in map(str, compiled.program.notes) if "linear_bias_activation" in n]
    reason = "slower by measurement on a test's device (2 ms against 1 ms, eager training)"
    assert f"linear_bias_activation not fused: {reason}" in note and "planner/test_fusion_profile.py" in note
    assert compiled.plan.report.header["fusions"] == "all but those that were slower as measured on a test's device"


def test_a_local_pattern_is_declined_too(cases, tmp_path):
    path = saved(tmp_path / "p.yaml", sum=measured("linear_add_norm", "add_norm"))
    compiled = cases[0.0].compile(2, fusion_profile=path)
    assert counts(compiled).keys() == ALL - {"linear_add_norm"}
    assert any("linear_add_norm not fused: slower" in str(n) for n in compiled.program.notes)


def test_the_size_of_the_workload_decides(cases, tmp_path):
    path = saved(tmp_path / "p.yaml", act=measured("linear_bias_activation", large=FAST))
    for batch, seq, made in ((1, 8, False), (8, 4096, True)):
        compiled = cases[0.0].compile(1, fusion_profile=path, micro_batch_size=batch, seq_length=seq)
        assert ("linear_bias_activation" in counts(compiled)) == made


def test_eager_and_inductor_are_judged_apart(cases, tmp_path):
    rows = Times(1000, {m: SLOW if m.startswith("compiled") else FAST for m in MODES})
    path = saved(tmp_path / "p.yaml", act=Measured(("linear_bias_activation",), (), (rows,)))
    assert "linear_bias_activation" in counts(cases[0.0].compile(1, fusion_profile=path))
    assert "linear_bias_activation" not in counts(cases[0.0].compile(1, fusion_profile=path, compile=True))


def test_a_part_is_made_where_what_is_built_of_it_pays(cases, tmp_path):
    norm = measured("layer_norm")
    together = measured("linear_add_norm", small=FAST, large=FAST, needs=("layer_norm",))
    alone = saved(tmp_path / "alone.yaml", norm=norm)
    both = saved(tmp_path / "both.yaml", norm=norm, sum=together)
    assert counts(cases[0.0].compile(1, fusion_profile=alone)).keys() == {"linear_bias_activation"}
    assert counts(cases[0.0].compile(1, fusion_profile=both)).keys() == ALL


@pytest.mark.parametrize("t", [1, 2, 3])
def test_numbers_do_not_depend_on_the_choice(cases, tmp_path, t):
    """Dropout too: an op draws the bits of the dropout that it replaces."""
    case = cases[0.25]
    none = saved(tmp_path / "p.yaml", all=measured(*ALL, DROPPED, "bias_dropout_add", "add_norm"))
    plain = case.compile(t, fusion_profile=none)
    fused = case.compile(1)
    assert counts(plain) == {} and counts(fused)[DROPPED] == 1
    inputs = case.inputs(3, 5)
    harness.assert_equal(case.run(plain, inputs), case.run(fused, inputs))


class Attention(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.qkv, self.p = nn.Linear(32, 96), p

    def forward(self, x, target):
        q, k, v = (t.view(*x.shape[:2], 4, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 8**-0.5, -1)
        return F.mse_loss(torch.matmul(F.dropout(weights, self.p), v).transpose(1, 2).reshape(x.shape), target)


@pytest.mark.parametrize("p, made", [(0.25, {"scale_softmax", "attention"}), (0.0, set())])
def test_what_would_draw_other_bits_is_not_chosen_by_speed(tmp_path, p, made):
    path = saved(
        tmp_path / "p.yaml",
        softmax=measured("scale_mask_softmax", "scale_softmax"),
        attention=measured("attention", needs=("scale_mask_softmax", "scale_softmax")),
    )
    x = torch.randn(2, 8, 32)
    plan = megafx.plan(Attention(p), Config(fusion_profile=path), example_inputs=(x, x))
    assert {f.pattern for f in plan.report.fusions} == made


# -- profiles


def test_a_profile_is_saved_and_loaded(tmp_path):
    made = profile(act=measured("a", "b", large=FAST, needs=("c",)))
    made.save(tmp_path / "p.yaml")
    assert FusionProfile.load(tmp_path / "p.yaml") == made
    assert made.slower("a", 10, MODES[0]) == SLOW and made.slower("a", 10**9, MODES[0]) is None
    assert made.slower("a", 31_000, MODES[0]) == SLOW and made.slower("a", 32_000, MODES[0]) is None  # nearest factor
    assert made.slower("unknown", 10, MODES[0]) is None and not made.measured("unknown")
    tie = profile(act=measured("a", small=(1.01, 1.0)))
    assert tie.slower("a", 10, MODES[0]) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.pop("device"), "p.yaml lacks 'device'"),
        (lambda d: d["fusions"]["act"].update(sizes=[]), "a fusion without sizes"),
        (lambda d: d["fusions"]["act"]["sizes"][0].update(fast=[1, 2]), "'fast' is none of eager training"),
        (lambda d: d["fusions"]["act"]["sizes"][0].update({MODES[0]: [0, 2]}), "times are positive milliseconds"),
    ],
)
def test_a_profile_that_cannot_be_read_says_why(tmp_path, change, message):
    data = profile(act=measured("a")).to_dict()
    change(data)
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(ConfigError, match="benchmarks/profile_fusions.py --out mine.yaml") as error:
        FusionProfile.load(path)
    assert message in str(error.value)


def test_a_profile_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="no such fusion profile"):
        Config(fusion_profile=str(tmp_path / "absent.yaml")) and FusionProfile.load(tmp_path / "absent.yaml")
    with pytest.raises(ConfigError, match="no fusion profile 'h2000'"):
        FusionProfile.choose("h2000", "cpu-gloo")
    with pytest.raises(ConfigError, match="fusion_profile = 3"):
        Config(fusion_profile=3)
    assert FusionProfile.choose(None, "cpu-gloo") is None


def test_shipped_profiles_name_patterns_and_hardware_that_exist():
    known = {p.name for p in registered_patterns()} | {MERGE_GATE_UP, MERGE_LINEARS}
    for name in profiles_in(FOLDER):
        found = FusionProfile.load(name)
        assert "measured" in found.source and {*found.hardware} <= {*Hardware.names()}
        assert {p for m in found.fusions.values() for p in (*m.patterns, *m.needs)} <= known
        assert all(t.modes.keys() == {*MODES} for m in found.fusions.values() for t in m.times)
        assert FusionProfile.choose(None, found.hardware[0]) == found
    assert profiles_in(FOLDER)


# -- measuring


@pytest.mark.parametrize("name", CASES)
def test_every_chain_has_what_it_measures(name):
    case = CASES[name]
    module, last = case.build(Widths(64, 8, 96))
    inputs = [torch.randn(2, 8, n).bfloat16() for n in last] + [torch.zeros(2, 8).long()] * case.ids
    program = capture_call(module.bfloat16(), tuple(inputs))
    compiled = compile_program(
        program, make_context(1, Config(fusion_profile="all"), hardware="cpu-gloo", training=False)
    )
    assert {f.pattern for f in compiled.program.fusions} & {*case.patterns}
    known = {p.name for p in registered_patterns()} | {MERGE_GATE_UP, MERGE_LINEARS}
    assert {*case.patterns, *case.needs} <= known


def test_chains_are_compiled_fused_and_not():
    job = prepare("glu", Setting(Hardware.load("cpu-gloo"), torch.device("cpu"), widths=Widths(64), compiled=False))
    assert [f.pattern for f in job.runs[True, True, False][1].fusions] == ["glu"]
    assert not job.runs[False, False, False][1].fusions
    assert elements(job, 2, 50) == 2 * 50 * 64


def test_the_script_measures(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    options = ["--only", "glu", "--tokens", "4,64", "--hidden", "16", "--dtype", "float32", "--eager-only"]
    assert main(["--out", str(path), *options]) == 0
    assert "Config(fusion_profile=" in capsys.readouterr().out
    found = FusionProfile.load(path)
    assert found.hardware == ("cpu-gloo",) and [t.elements for t in found.fusions["glu"].times] == [64, 1024]
    assert main(["--out", str(path), "--only", "gluu"]) == 1
    assert "no chain 'gluu' is measured" in capsys.readouterr().err
