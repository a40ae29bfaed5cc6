"""What a family of kernels hands to benchmarks/kernels.py: a file kernel_cases/<family>.py with `cases() -> list[Case]`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda"
BF16 = torch.bfloat16

# Rows such that a bf16 tensor [rows, hidden] has 128 MiB: the size of the published baselines.
HIDDEN = (768, 1024, 1600, 2048, 2560, 4096, 5120, 7168, 8192, 12288, 16384)
DECODE_ROWS = (1, 64)


def rows_for(hidden: int, mebibytes: int = 128) -> int:
    """Rows of a bf16 tensor [rows, hidden] of about this size."""
    return max(1, mebibytes * 2**20 // (2 * hidden))


@dataclass(frozen=True)
class Case:
    """One op on one shape.

    inputs() makes a fresh set of arguments on DEVICE; tensors that require a gradient get one. ours and eager are called with
    them and return a tensor or a tuple of tensors. eager is the plain formula: it is timed, compiled by torch.compile, and on
    fp32 inputs it is the reference of the errors (none where `random`). peers: name -> function that imports the peer and
    returns its callable; ImportError means 'not installed', an attribute `synchronises` that it is to be timed by events.
    Bytes: the fewest that device memory must move, each input read once and each output written once; backward's count
    gradients of outputs and of inputs. flops_*: of matrix products.
    """

    name: str
    inputs: Callable[[], tuple[Any, ...]]
    ours: Callable[..., Any]
    eager: Callable[..., Any] | None
    forward_bytes: int
    backward_bytes: int
    peers: Mapping[str, Callable[[], Callable[..., Any]]] = field(default_factory=dict)
    random: bool = False
    forward_flops: int = 0
    backward_flops: int = 0
    headline: bool = False  # one of the few that a run short of time does first, with all peers


def randn(*shape: int, dtype: torch.dtype = BF16, grad: bool = True, scale: float = 1.0) -> Tensor:
    x = (torch.randn(shape, device=DEVICE, dtype=torch.float32) * scale).to(dtype)
    return x.requires_grad_(grad)
