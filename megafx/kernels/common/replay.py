"""Run a launcher of Triton kernels once for each form of call, then only repeat what it did.

What a launcher does (which memory it allocates, which kernels it starts on which grids with which numbers) is a function of
the form of its operands: shapes, strides, dtypes, devices, starts modulo 16 bytes, numbers, and this rank's place on the
axis that is named last. `Replay` runs it as it is at the first call of a form, records it at the second, and from then on
repeats the recording: allocations, and compiled kernels started with new addresses. That leaves out the launcher's Python
and Triton's dispatch, which are most of the host time of a call (benchmarks/host_overhead.py --kernels).

Forms are finer than Triton's specialisation (dtypes, starts and numbers that 16 divides, numbers equal to 1, 64-bit numbers):
calls of one form start the same compiled kernel. What a recording cannot hold (an operator that is not in recording.CALLS,
results that are views of other memory, anything that reads a value) is not recorded, and runs as it is each time. So do calls
under a torch dispatch mode, with tensor subclasses, with hooks on Triton's launches, or in Triton's interpreter.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megafx.kernels.common.recording import ALIGNMENT, Recorder, Recording, triton_runtime
from megafx.ops import axes

# Versions whose compiled kernels are started as recording.Launch does: the first, and the first that is not (3.6 and 3.9 were
# tried).
KNOWN_TRITON = ((3, 6), (3, 10))
MOST_FORMS = 4096  # of one op; then all are forgotten

PLAIN = (Tensor, torch.nn.Parameter)
_NUMBERS = (int, float, bool, str, type(None), torch.dtype)
_mode_count = torch._C._len_torch_dispatch_stack


class Replay:
    """launcher(*operands), repeated from a recording where there is one. placed: the last operand names a mesh axis."""

    def __init__(self, launcher: Callable[..., Any], placed: bool = False) -> None:
        self.launcher, self.placed = launcher, placed
        self.forms: dict[Any, Recording | str] = {}  # or 'once' (called once), or why it is not recorded

    def __call__(self, *operands: Any, place: tuple[int, Tensor] | None = None) -> Any:
        """place: a result, by number, and memory for it, which is used where a recording is repeated."""
        if _mode_count():
            return self.launcher(*operands)
        tensors: list[Tensor] = []
        form: list[Any] = []
        for x in operands:
            kind = type(x)
            if kind in PLAIN:
                if x.is_neg():  # kernels read memory, where the sign is not
                    return self(*[y.resolve_neg() if isinstance(y, Tensor) else y for y in operands])
                tensors.append(x)
                form.append((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT))
            elif kind in _NUMBERS:
                form.append(x)
            elif isinstance(x, list) and all(type(n) is int for n in x):
                form.append(tuple(x))
            else:
                return self.launcher(*operands)
        if self.placed and operands[-1]:
            form.append(axes.place_on(operands[-1]))
        key = tuple(form)
        found = self.forms.get(key)
        if type(found) is Recording:
            fits = place if place is not None and found.fits(*place) else None
            return found.play(tensors, fits) if _unhooked() else self.launcher(*operands)
        if found is None:
            if len(self.forms) >= MOST_FORMS:
                self.forms.clear()
            self.forms[key] = "once"
        elif found == "once":
            recorder = Recorder(tensors)
            result = recorder.run(self.launcher, operands)
            self.forms[key] = recorder.finish()
            return result
        return self.launcher(*operands)


def _unhooked() -> bool:
    """True if nothing observes launches (profilers do)."""
    runtime = triton_runtime()[1]
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return (enter is None or not getattr(enter, "calls", True)) and (leave is None or not getattr(leave, "calls", True))


@functools.cache
def supported() -> bool:
    """True if this Triton's compiled kernels are started as recording.Launch does; says so if not."""
    import triton

    version = tuple(int(n) for n in triton.__version__.split(".")[:2])
    known = KNOWN_TRITON[0] <= version < KNOWN_TRITON[1]
    if not known:
        warnings.warn(
            f"megafx has not been tried with Triton {triton.__version__}: calls of fused ops go through Triton's own "
            "dispatch, and take more host time",
            stacklevel=2,
        )
    return known and torch.version.hip is None and not triton.knobs.runtime.interpret
