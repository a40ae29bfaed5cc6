"""Code that decides by data, for capture/test_checks.py; apart from it, since pytest rewrites the asserts of tests."""

from __future__ import annotations

import logging
import warnings

import torch

logger = logging.getLogger(__name__)


def asserted(ids: torch.Tensor) -> None:
    assert torch.all(ids >= 0).item(), "negative"


def asserted_of_two(ids: torch.Tensor) -> None:
    assert ids.dim() == 1 and (ids < 9).all() and not (ids < 0).any()


def raised(ids: torch.Tensor) -> None:
    if ids is not None and ids.max() >= 9:
        message = "too large"
        raise ValueError(message)


def raised_unless(ids: torch.Tensor) -> None:
    if not (ids >= 0).all() or ids.min().item() < 0:
        raise ValueError("negative")
    elif (ids > 100).any():
        raise ValueError("too large")


def warned(ids: torch.Tensor) -> None:
    if (ids == 8).any():
        logger.warning("there is an 8")
    if ids.sum() == 3:
        warnings.warn("three", stacklevel=1)


def changes_something(ids: torch.Tensor) -> torch.Tensor:
    if ids.max() >= 9:
        ids = ids * 0
    return ids


def raises_else_changes(ids: torch.Tensor) -> torch.Tensor:
    return ids if ids.max() >= 9 else ids * 0


def returns_before_it_raises(ids: torch.Tensor) -> torch.Tensor | None:
    if ids.max() < 9:
        return ids
    raise ValueError("too large")


def decides_inside_of_a_check(ids: torch.Tensor) -> None:
    assert [*range(int(ids.max()))]  # the range decides, not the check
