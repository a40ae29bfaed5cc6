"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one."""

from megafx.api import explain, parallelize, plan, verify
from megafx.checkpoint import LoadedCheckpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from megafx.config import Config
from megafx.data import broadcast_data, check_data
from megafx.debug import debug
from megafx.initialize import initialize
from megafx.load_weights import load_safetensors
from megafx.pattern import Pattern
from megafx.pattern import register as register_pattern
from megafx.rules import register_rule
from megafx.save_weights import save_pretrained
from megafx.state import full_gradients, full_state_dict

__all__ = [
    "Config",
    "LoadedCheckpoint",
    "Pattern",
    "broadcast_data",
    "check_data",
    "debug",
    "explain",
    "full_gradients",
    "full_state_dict",
    "initialize",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "parallelize",
    "plan",
    "register_pattern",
    "register_rule",
    "save_checkpoint",
    "save_pretrained",
    "verify",
]
