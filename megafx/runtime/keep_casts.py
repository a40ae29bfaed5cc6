"""The form of a call that keeps casts of weights to FP8, where the device has room for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megafx.capture.prepare import alone
from megafx.distributed import agreement
from megafx.progress import stage
from megafx.runtime.bound_graph import BoundGraph, CompiledCall


def keep_casts(
    runtime: Any, compiled: CompiledCall, about: str, autocast: Sequence[dict[str, Any]]
) -> BoundGraph | None:
    """compiled: the form of a `Runtime`'s call that does not. None where there is no room. Collective."""
    assert compiled.keeping_casts is not None
    fits, numbers = compiled.casts_fit()
    if agreement.on_any_rank([not fits], runtime.state.device, runtime.everyone)[0]:
        text = f"weights serve several calls, and are cast in each: there is no room to keep casts ({numbers})"
        runtime.note("fp8", text)
        return None
    text = f"weights serve several calls (micro-batches), so that their casts are kept until they change ({numbers})"
    runtime.note("fp8", text)
    with stage("keep casts of weights"), runtime._capturing(True), alone():
        other = compiled.keeping_casts()
    bound: BoundGraph = runtime._bind(other, about, autocast)
    return bound
