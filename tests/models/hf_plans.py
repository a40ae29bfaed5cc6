"""The tensor-parallel plans that transformers ships, written by hand for each architecture, as an oracle for ours."""

from __future__ import annotations

import re

import transformers
from catalogue import Architecture

from megafx.planner.plan import Plan

# Style -> dim of the weight that it cuts, counted from the end. A gather behind it or a split in front of it is of the
# activation, and decided by cost. Others (experts as a module, norms) cut no weight of their own.
CUTS = {"colwise": -2, "packed_colwise": -2, "colwise_gather_output": -2, "rowwise": -1, "rowwise_split_input": -1}
WHOLE = ("replicated_with_grad_allreduce",)


def shipped(row: Architecture) -> dict[str, str]:
    """Glob over modules -> style, as transformers has it; empty without a plan."""
    if row.make is not None:
        return {}
    model = getattr(transformers, row.model)
    base = getattr(getattr(transformers, row.config), "base_model_tp_plan", None) or {}
    return {f"{model.base_model_prefix}.{name}": style for name, style in base.items()} | (model._tp_plan or {})


def compare(row: Architecture, plan: Plan, dims: dict[str, int]) -> tuple[int, list[str]]:
    """(weights compared, where we differ). dims: of each parameter. A tied head bears the embedding's name: not compared."""
    compared, different = 0, []
    for glob, style in shipped(row).items():
        pattern = re.compile(re.escape(glob).replace(r"\*", r"\d+") + r"(\.weight)?")
        for name in filter(pattern.fullmatch, plan.params):
            placement = plan.params[name]
            if style in CUTS:
                wanted = f"S{dims[name] + CUTS[style]}"
            elif style in WHOLE:
                wanted = "I"
            else:
                continue
            compared += 1
            if placement.tag != wanted:
                different.append(f"{name}: {style} in transformers, {placement} here")
    return compared, different
