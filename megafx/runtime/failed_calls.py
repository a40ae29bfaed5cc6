"""A call that the model's own code ends with an exception: what it raises, and what it leaves behind.

Where all ranks raise, the call is run up to the exception in eager mode, so that counters, hooks and lists are what they would
be. Where one rank raises alone, or data-parallel ranks have rows of their own, nothing of the call is left: buffers and
counters stay the same on all ranks, and the next call is as if the failed one had not been.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from megafx.capture.errors import in_users_code
from megafx.distributed import agreement
from megafx.errors import CaptureError
from megafx.weights.whole import whole_parameters


def failed_call(
    error: CaptureError,
    trace: Callable[[], Any],
    run: Callable[[], Any],
    model: nn.Module,
    group: dist.ProcessGroup | None,
    together: bool,
) -> Exception:
    """The exception of a call whose capture gave `error`: the model's own, where that is why. Collective.

    trace: captures the call once more, with its own sizes and numbers. run: makes it in eager mode. group: of the ranks that
    hold parts of the parameters; together: they have the same rows.
    """
    if error.raised is not None or _SYMBOL.search(error.found):
        error = _with_the_calls_sizes(error, trace)
    raised = error.raised
    on_all = together and agreement.first_rank(raised is None, group) is None
    if raised is None:
        return error
    return in_users_code(_up_to(raised, run, model) if on_all else raised)


_SYMBOL = re.compile(r"\bs\d+\b")  # of a size


def _with_the_calls_sizes(error: CaptureError, trace: Callable[[], Any]) -> CaptureError:
    """The error, whose message holds sizes of the call where it held symbols. Without `raised`, if the model raises nothing at
    the call's own sizes."""
    try:
        trace()
    except CaptureError as again:
        return again
    error.raised = None
    return error


def _up_to(raised: Exception, run: Callable[[], Any], model: nn.Module) -> Exception:
    """Run a call that raises this in eager mode: what it does before is done. Collective."""
    try:
        with whole_parameters(model):
            run()
    except type(raised) as error:
        return error
    return raised
