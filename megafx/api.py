"""The public calls: `parallelize`, `plan`, `explain`, `verify`. The pipeline they run is compiler.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megafx.capture import capture_call
from megafx.capture_dims import max_length
from megafx.compiler import Compiled, Request, compile_program
from megafx.config import Config
from megafx.errors import UsageError
from megafx.hardware import Hardware
from megafx.hf import is_hf_model, synthesize_inputs
from megafx.ir import Input
from megafx.placements import Placement
from megafx.plan import Plan
from megafx.report import Report

Call = tuple[tuple[Any, ...], dict[str, Any]]


def plan(
    model: nn.Module,
    config: Config | None = None,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    loss_inputs: dict[str, Any] | None = None,
) -> Plan:
    """The plan of a training call, without ranks, a GPU or memory for weights: the model may be on the meta device.

    config.tensor_model_parallel_size is the number of ranks planned for. example_inputs: (args, kwargs), a tuple of args
    or a dict of kwargs; Hugging Face models need none. loss_fn, loss_inputs: as in `parallelize`. The Plan can be printed,
    saved, loaded and compared; `megafx.explain(plan)` is its report. Raises CaptureError, PlanError, ConfigError.
    """
    config = resolve(config or Config(), model)
    args, kwargs = example_call(model, example_inputs)
    program = capture_call(model, args, kwargs, loss_fn=loss_fn, loss_inputs=loss_inputs)
    compiled = plan_program(program, config)
    return compiled


def plan_program(program: Any, config: Config) -> Plan:
    """Captured program -> Plan with its report; stops before shapes become local."""
    from megafx.compiler import plan_only

    request = Request(config, config.tensor_model_parallel_size or 1, hardware_of(config, None), {}, None, _all_params)
    return plan_only(program, request)


def explain(subject: nn.Module | Plan) -> Report:
    """What was done and why: of a parallelized model, or of a plan. str(), .table(), .html(path), .to_json()."""
    if isinstance(subject, Plan):
        if subject.report is None:
            raise UsageError("this plan was loaded, so it has no graph to explain", fix="print(plan), or plan again")
        return subject.report
    runtime = getattr(subject, "megafx", None)
    if runtime is None:
        raise UsageError(
            f"{type(subject).__name__} is not parallelized", fix="call megafx.parallelize(model, ...) or megafx.plan"
        )
    return runtime.report()


def example_call(model: nn.Module, example_inputs: Any) -> Call:
    """example_inputs in its three forms -> (args, kwargs); made up for Hugging Face models when there are none."""
    if example_inputs is None:
        return synthesize_inputs(model)
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if not isinstance(example_inputs, (tuple, list)):
        return (example_inputs,), {}
    items = tuple(example_inputs)
    if len(items) == 2 and isinstance(items[0], (tuple, list)) and isinstance(items[1], dict):
        return tuple(items[0]), items[1]
    return items, {}


def resolve(config: Config, model: nn.Module) -> Config:
    """Fill in the workload: the model's maximum sequence length where the user gives none."""
    if config.seq_length is None:
        longest = max_length(model)
        if longest is not None:
            return config.replace(seq_length=longest)
    return config


def hardware_of(config: Config, device: torch.device | None) -> Hardware:
    """The profile named in the config, else that of the device; h100-nvlink where there is none to ask."""
    if config.hardware is not None:
        return Hardware.load(config.hardware)
    if device is None or device.type == "meta":
        return Hardware.load("h100-nvlink")
    if device.type != "cuda":
        return Hardware.load("cpu-gloo")
    name = torch.cuda.get_device_name(device).lower()
    known = {"h200": "h200-nvlink", "h100": "h100-nvlink", "a100": "a100-nvlink"}
    return Hardware.load(next((profile for key, profile in known.items() if key in name), "pcie"))


def _all_params(index: int, spec: Input) -> bool:
    return spec.kind == "param"


__all__ = ["Compiled", "Placement", "explain", "is_hf_model", "plan"]
