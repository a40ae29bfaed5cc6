"""Calls inside of torch.func's transforms: graphs know backward alone, so they take no part in these."""

from __future__ import annotations

from torch._C._functorch import peek_interpreter_stack

_NAMES = {"Vmap": "torch.func.vmap", "Grad": "torch.func.grad, vjp or jacrev", "Jvp": "torch.func.jvp or jacfwd"}
FIX = (
    "use a copy of the model that is not parallelized, with the values of megafx.full_state_dict(model); on one rank without "
    "a process group such calls work as they are"
)


def transform() -> str | None:
    """The transform of torch.func within which this call is made."""
    inner = peek_interpreter_stack()
    return None if inner is None else _NAMES.get(inner.key().name, "a transform of torch.func")
