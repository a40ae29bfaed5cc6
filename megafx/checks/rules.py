"""Brute-force check of the sharding rules: every row of every op against the real op, forward and gradient.

For a sample call, each claimed row is run on every rank of a small axis: operands are cut, summed apart or copied as the row
says (pads hold anything), the op runs on each rank alone, and results and gradients must be what the row's placements say
of the whole call's. A row that is not is WRONG. All other combinations of placements are tried too: one that is right but
not claimed is MISSING. Gradients decide between I and R: a result that is right with a gradient that is not is wrong.

    P P -> P     of add: ranks hold summands of both operands and of the result, gradients are complete (R) on each rank
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from megafx.checks.rule_samples import SAMPLES, Sample, samples_of
from megafx.checks.rule_trials import Row, Trial
from megafx.errors import UsageError
from megafx.ir.facts import declared
from megafx.progress import stage
from megafx.rules.aten import RULES
from megafx.rules.families import FAMILIES, VIEWS
from megafx.rules.grammar import op_key, registered, registered_rule

# Rows that are right on finite numbers, and are not claimed on purpose.
POLICIES: dict[tuple[str, str], str] = {
    ("aten.nan_to_num.default", "P -> P"): "linear on finite numbers only",
    ("aten.nll_loss_backward.default", "R P I I I -> R"): "operand 1 is read for its shape only",
    ("aten.nll_loss_backward.default", "P P I I I -> P"): "operand 1 is read for its shape only",
    ("megafx.linear_cross_entropy.default", "S0 R R S0 -> P"): "made after planning, where tokens are whole",
}


@dataclass(frozen=True)
class Finding:
    """verdict: 'ok', 'wrong', 'missing', 'policy' (right, not claimed on purpose) or 'unchecked'."""

    op: str
    verdict: str
    row: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:9} {self.op:48} {self.row}" + (f"   ({self.detail})" if self.detail else "")


@dataclass
class RuleReport:
    findings: list[Finding] = field(default_factory=list)

    def of(self, verdict: str) -> list[Finding]:
        return [f for f in self.findings if f.verdict == verdict]

    @property
    def ok(self) -> bool:
        return not self.of("wrong") and not self.of("missing")

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(op, verdict, row, detail) of everything found, for tables."""
        return [(f.op, f.verdict, f.row, f.detail) for f in self.findings]

    def __str__(self) -> str:
        shown = [str(f) for v in ("wrong", "missing", "policy", "unchecked") for f in self.of(v)]
        ops = len({f.op for f in self.findings if f.verdict != "unchecked"})
        counts = ", ".join(f"{len(self.of(v))} {v}" for v in ("wrong", "missing"))
        return "\n".join([*shown, f"{len(self.of('ok'))} rows of {ops} ops are right, {counts}"])


@stage("check_rules")
def check_rules(rules: Mapping[str, str] | Iterable[str] | None = None, t: Iterable[int] = (2, 3)) -> RuleReport:
    """rules: ops to check (all by default), or op -> rule string to check in place of the op's own."""
    given = dict(rules) if isinstance(rules, Mapping) else {}
    importlib.import_module("megafx.compiler.pipeline")  # ops are declared in the files that define them
    fused = {op for op, facts in declared().items() if facts.rule}
    every = sorted({*RULES, *FAMILIES, *VIEWS, *fused, *SAMPLES})
    ops = [op_key(op) for op in ([*every, *registered()] if rules is None else rules)]
    report = RuleReport()
    for op in ops:
        if op not in given and op not in every and not registered_rule(op):
            near = ", ".join(difflib.get_close_matches(op, every, n=3))
            raise UsageError(
                f"'{op}' has no sharding rule", fix=f"did you mean {near}?" if near else "docs/extending.md"
            )
    for op in dict.fromkeys(ops):
        own = given.get(op) or registered_rule(op)
        samples = samples_of(op, own)
        if not samples:
            why = "no sample call (`samples` of its definition, or rule_samples.py)"
            report.findings.append(Finding(op, "unchecked", "-", why))
        with stage(op):
            for sample in samples:
                for size in t:
                    report.findings += _check(sample, own, size)
    report.findings = list(dict.fromkeys(report.findings))
    return report


def _check(sample: Sample, own: str | None, t: int) -> Iterator[Finding]:
    try:
        trial = Trial(sample, own, t)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as e:
        yield Finding(sample.op, "wrong" if own else "unchecked", "-", str(e).splitlines()[0][:70])
        return
    if trial.rule.kind == "none":
        yield Finding(sample.op, "wrong", "-", trial.rule.reason)
        return
    claimed = dict.fromkeys(trial.claims())
    for claim in claimed:
        why = trial.fault(*claim)
        yield Finding(sample.op, "wrong" if why else "ok", text(claim), why)
    for tried in trial.combinations():
        if tried not in claimed and not trial.fault(*tried):
            policy = POLICIES.get((sample.op, text(tried)), "")
            yield Finding(sample.op, "policy" if policy else "missing", text(tried), policy)


def text(claim: Row) -> str:
    ins, outs = claim
    return f"{' '.join(map(str, ins))} -> {' '.join(str(o) for o in outs if o is not None)}"
