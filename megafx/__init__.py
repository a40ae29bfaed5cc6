"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one."""

from megafx.api import explain, plan
from megafx.config import Config

__all__ = ["Config", "explain", "plan"]
