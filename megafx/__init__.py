"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one."""

from megafx.api import (
    diff,
    explain,
    parallelize,
    plan,
    predict_memory,
    profile,
    replay,
    sabotage,
    search,
    verify,
)
from megafx.checkpoint.checkpoint import LoadedCheckpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from megafx.config import Config
from megafx.debugging import debug
from megafx.distributed.data import broadcast_data, check_data
from megafx.errors import MegafxError
from megafx.measure import profile_hardware
from megafx.named_model import load_model
from megafx.rewrite.pattern import Pattern
from megafx.rewrite.pattern import register as register_pattern
from megafx.rules.grammar import register_rule
from megafx.weights.initialize import initialize
from megafx.weights.load import load_safetensors
from megafx.weights.save import save_pretrained
from megafx.weights.state import full_gradients, full_state_dict
from megafx.weights.whole import whole_parameters

__all__ = [
    "Config",
    "LoadedCheckpoint",
    "MegafxError",
    "Pattern",
    "broadcast_data",
    "check_data",
    "debug",
    "diff",
    "explain",
    "full_gradients",
    "full_state_dict",
    "initialize",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "load_safetensors",
    "parallelize",
    "plan",
    "predict_memory",
    "profile",
    "profile_hardware",
    "register_pattern",
    "register_rule",
    "replay",
    "sabotage",
    "save_checkpoint",
    "save_pretrained",
    "search",
    "verify",
    "whole_parameters",
]
