"""Covers: checks/rules.py, and with it every row of rules/aten.py, of rules/families.py and of megafx's own ops.

Planted faults must be found.
"""

import pytest
import torch

from megafx.checks.rules import POLICIES, Finding, check_rules
from megafx.ir.facts import declared
from megafx.passes.localize import rewrites
from megafx.rules.aten import RULES
from megafx.rules.families import FAMILIES, VIEWS
from megafx.rules.grammar import register_rule, registered
from tests.support.flash_attention import on_cpu

# Ops with a rule that no CPU can run in fp64; their CPU counterparts are checked.
NO_CPU = {
    "aten._efficient_attention_backward.default",
    "aten._efficient_attention_forward.default",
    "aten._flash_attention_backward.default",
    "aten._flash_attention_forward.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._fused_rms_norm_backward.default",
    "megafx.efficient_documents.default",
    "megafx.flash_documents.default",
}
# Numbers that say where documents end are no random ones: tests/equivalence/test_varlen.py runs them on all ranks.
OF_DOCUMENTS = {"torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"}
# Complex or without elements that are defined; what moves on another axis.
NO_SAMPLE = {
    "megafx.transition.default",
    "aten._conj.default",
    "aten._fft_c2c.default",
    "aten._fft_c2r.default",
    "aten._fft_r2c.default",
    "aten._reshape_alias.default",
    "aten.argsort.default",
    "aten.empty_like.default",
    "aten.mode.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.view_as_real.default",
}


def found(report, verdict):
    return [f"{f.op.split('.')[1]}: {f.row}" for f in report.of(verdict)]


@pytest.mark.parametrize("t", [2, 3])
def test_no_row_is_wrong_and_none_is_missing(t):
    own = [op for op, facts in declared().items() if facts.rule and "._test" not in op]  # others' tests define some
    report = check_rules([*RULES, *FAMILIES, *VIEWS, *own], t=[t])
    assert not report.of("wrong") and not report.of("missing"), str(report)
    assert {f.op for f in report.of("unchecked")} <= NO_CPU | NO_SAMPLE | OF_DOCUMENTS
    assert len(report.of("ok")) > 1000
    assert {(f.op, f.row) for f in report.of("policy")} <= set(POLICIES)
    assert {f.op for f in report.findings} >= {*RULES, *FAMILIES, *VIEWS, *own}


@pytest.mark.parametrize("t", [2, 3])
def test_attention_that_no_cpu_has_is_tried_in_plain_torch(t):
    """Also of packed rows, whose documents end at the same tokens on every rank."""
    with on_cpu():
        report = check_rules(
            [
                op
                for op in NO_CPU
                if "_documents" in op or op.startswith(("aten._flash_attention_f", "aten._efficient_a"))
            ],
            [t],
        )
    assert report.ok, str(report)
    assert len(report.of("ok")) >= 12


def test_what_localize_shapes_writes_is_tried(monkeypatch):
    monkeypatch.setitem(rewrites.REWRITES, "aten.mean.dim", lambda *given: None)
    assert found(check_rules(["aten.mean.dim"], [2]), "wrong") == ["mean: S2 -> P"]


def test_mm_has_its_six_rows():
    assert found(check_rules(["aten.mm"], [2]), "ok") == [
        "mm: I I -> I",
        "mm: R R -> R",
        "mm: P R -> P",
        "mm: R P -> P",
        "mm: S0 R -> S0",
        "mm: S1 S0 -> P",
        "mm: R S1 -> S1",
    ]


def test_a_norm_without_its_mark_is_wrong():
    report = check_rules({"aten.rms_norm.default": "nl[1]: ... c, c -> ... c"}, [2])
    assert found(report, "wrong") == ["rms_norm: S2 S0 -> S2"]
    assert not report.ok


def test_a_norm_that_forgets_linearity_in_its_weight_misses_a_row():
    report = check_rules({"aten.rms_norm.default": "nl: ... c!, c! -> ... c!"}, [2])
    assert found(report, "missing") == ["rms_norm: R P -> P"]


def test_an_add_with_the_linearity_of_a_product_is_wrong_and_misses_a_row():
    report = check_rules({"aten.sub.Tensor": "lin: ..., ... -> ..."}, [2])
    assert found(report, "wrong") == ["sub: P R -> P", "sub: R P -> P"]
    assert found(report, "missing") == ["sub: P P -> P"]


def test_a_reduction_that_is_no_sum_is_wrong():
    report = check_rules({"aten.logsumexp.default": "lin: f0 f1 f2 -> f0 f2"}, [2])
    assert found(report, "wrong") == ["logsumexp: P -> P", "logsumexp: S1 -> P"]


def test_a_bias_that_every_rank_adds_is_wrong():
    report = check_rules({"aten.linear.default": "lin: ... k, n k, n -> ... n"}, [2])
    assert "linear: S2 S1 R -> P" in found(report, "wrong")
    assert "linear: S2 S1 P -> P" in found(report, "missing")


def test_what_is_right_forward_only_is_wrong():
    """A whole operand that enters a shard's row as I: the result is right, its gradient is partial, not complete."""
    from megafx.checks.rule_samples import samples_of
    from megafx.checks.rules import Trial, text
    from megafx.placements.types import I, Layout, R, S

    trial = Trial(samples_of("aten.mm.default")[0], None, 2)
    shard = S(1, Layout.contiguous(trial.whole[1].shape[1], 2))
    assert trial.fault((R, shard), (shard,)) == ""
    assert trial.fault((I, shard), (shard,)) == "the gradient of operand 0 is not I"
    assert text(((I, shard), (shard,))) == "I S1 -> S1"


def test_a_rule_that_fits_no_call_is_wrong():
    report = check_rules({"aten.mm.default": "lin: b m k, k n -> b m n"}, [2])
    assert "does not fit a tensor of 2 dims" in report.of("wrong")[0].detail


def test_an_op_without_a_sample_is_reported():
    report = check_rules(["aten.mode.default"], [2])
    assert [f.verdict for f in report.findings] == ["unchecked"] and report.ok


def test_the_report_is_readable():
    report = check_rules({"aten.rms_norm.default": "nl: ... c!, c! -> ... c!"}, [2])
    assert str(report) == (
        "missing   aten.rms_norm.default                            R P -> P\n"
        "4 rows of 1 ops are right, 0 wrong, 1 missing"
    )
    assert report.findings[0] == Finding("aten.rms_norm.default", "ok", "I I -> I", "")


def test_users_ops_can_be_checked():
    @torch.library.custom_op("megafx_tests::scale_rows", mutates_args=())
    def scale_rows(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x * by[:, None]

    scale_rows.register_autograd(
        lambda ctx, g: (g * ctx.saved_tensors[1][:, None], (g * ctx.saved_tensors[0]).sum(1)),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    name = "megafx_tests.scale_rows.default"
    register_rule(name, "nl: r c!, r -> r c!")
    assert found(check_rules([name], [2]), "missing") == [
        "scale_rows: R P -> P",
        "scale_rows: P R -> P",
        "scale_rows: S1 R -> S1",
    ]
    assert name in registered()
    assert check_rules({name: "lin: r c, r -> r c"}, [2]).ok
    assert found(check_rules({name: "nl: r c, r -> r c"}, [2]), "missing") == [
        "scale_rows: R P -> P",
        "scale_rows: P R -> P",
    ]
