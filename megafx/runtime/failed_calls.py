"""A call that the model's own code ends with an exception: what it raises, and what it leaves behind.

Where all ranks raise, the call is run up to the exception in eager mode, so that counters, hooks and lists are what they would
be. Where one rank raises alone, or data-parallel ranks have rows of their own, nothing of the call is left: buffers and
counters stay the same on all ranks, and the next call is as if the failed one had not been.
"""

from __future__ import annotations

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
    raised = _raised_by_the_model(error, trace)
    on_all = together and agreement.first_rank(raised is None, group) is None
    if raised is None:
        return error
    return in_users_code(_up_to(raised, run, model) if on_all else raised)


def _raised_by_the_model(error: CaptureError, trace: Callable[[], Any]) -> Exception | None:
    """What the model's code raises, where that is why the call cannot be captured. Its message may hold the call's sizes."""
    if error.raised is None:
        return None
    try:
        trace()
    except CaptureError as again:
        return again.raised
    return None


def _up_to(raised: Exception, run: Callable[[], Any], model: nn.Module) -> Exception:
    """Run a call that raises this in eager mode: what it does before is done. Collective."""
    try:
        with whole_parameters(model):
            run()
    except type(raised) as error:
        return error
    return raised
