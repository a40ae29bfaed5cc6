"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one."""

from megafx.api import explain, parallelize, plan, verify
from megafx.config import Config
from megafx.debug import debug
from megafx.pattern import Pattern
from megafx.pattern import register as register_pattern
from megafx.rules import register_rule
from megafx.state import full_gradients, full_state_dict

__all__ = [
    "Config",
    "Pattern",
    "debug",
    "explain",
    "full_gradients",
    "full_state_dict",
    "parallelize",
    "plan",
    "register_pattern",
    "register_rule",
    "verify",
]
