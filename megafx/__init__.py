"""megafx: a plain eager PyTorch transformer becomes a fused, tensor-parallel one.

Names are imported when they are first read: `import megafx` takes no time, and the command answers a wrong option without
torch.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megafx.api import (
        diff,
        explain,
        fp8_health,
        parallelize,
        plan,
        predict_memory,
        profile,
        rehearse,
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
    from megafx.meter import Meter
    from megafx.named_model import load_model
    from megafx.pipelining import pipeline
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
    "Meter",
    "Pattern",
    "broadcast_data",
    "check_data",
    "debug",
    "diff",
    "explain",
    "fp8_health",
    "full_gradients",
    "full_state_dict",
    "initialize",
    "latest_checkpoint",
    "load_checkpoint",
    "load_model",
    "load_safetensors",
    "parallelize",
    "pipeline",
    "plan",
    "predict_memory",
    "profile",
    "profile_hardware",
    "register_pattern",
    "register_rule",
    "rehearse",
    "replay",
    "sabotage",
    "save_checkpoint",
    "save_pretrained",
    "search",
    "verify",
    "whole_parameters",
]

_HOME = {
    "api": "diff explain fp8_health parallelize plan predict_memory profile rehearse replay sabotage search verify",
    "checkpoint.checkpoint": "LoadedCheckpoint latest_checkpoint load_checkpoint save_checkpoint",
    "config": "Config",
    "debugging": "debug",
    "distributed.data": "broadcast_data check_data",
    "errors": "MegafxError",
    "measure": "profile_hardware",
    "meter": "Meter",
    "named_model": "load_model",
    "pipelining": "pipeline",
    "rewrite.pattern": "Pattern register_pattern",
    "rules.grammar": "register_rule",
    "weights.initialize": "initialize",
    "weights.load": "load_safetensors",
    "weights.save": "save_pretrained",
    "weights.state": "full_gradients full_state_dict",
    "weights.whole": "whole_parameters",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
_OWN_NAME = {"register_pattern": "register"}  # where it is made


def _check_tree() -> None:
    """megafx.passes and megafx.patterns are folders beside this one in a checkout, and inside of it in a wheel. A checkout
    that is not installed would run with the folders of the one that is."""
    here = Path(__file__).resolve().parent
    checkout = here.parent if (here.parent / "passes").is_dir() and not (here / "passes").is_dir() else None
    for name in ("passes", "patterns"):
        spec = importlib.util.find_spec(f"megafx.{name}")
        found = spec and spec.origin and Path(spec.origin).resolve().parent
        if found != (checkout or here) / name:
            where = f"megafx.{name} from {found}" if found else f"megafx.{name} is not installed"
            mend = f"pip install -e {checkout}" if checkout else "pip install --force-reinstall megafx"
            raise ImportError(f"megafx is imported from {here}, but {where}\n  fix: {mend}")


_check_tree()


def _imported(module: str) -> Any:
    """The module. That of the public calls takes seconds to import, which is shown."""
    if module != "megafx.api" or module in sys.modules:
        return importlib.import_module(module)
    from megafx.progress import stage, uncollected

    with stage("import megafx"), uncollected():
        return importlib.import_module(module)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from megafx.versions import version_of

        return version_of("megafx")
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'megafx' has no attribute '{name}'")
    value = getattr(_imported(f"megafx.{_MODULE_OF[name]}"), _OWN_NAME.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
