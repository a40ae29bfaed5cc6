"""What has another value for a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def meanwhile(owner: Any, **values: Any) -> Iterator[None]:
    """Within, these attributes of `owner` have these values; afterwards those of before."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def replacing(function: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """function(..., old, *arguments): what is called in place of `old`. Called with all before `arguments`, it gives that."""

    @functools.wraps(function)
    def of(*given: Any) -> Callable[..., Any]:
        return functools.partial(function, *given)

    return of


@contextlib.contextmanager
def in_modes(modes: Mapping[Any, bool]) -> Iterator[None]:
    """Within, each module is in training (True) or in evaluation; afterwards as before."""
    with contextlib.ExitStack() as stack:
        for module, training in modes.items():
            stack.enter_context(meanwhile(module, training=training))
        yield
