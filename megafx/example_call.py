"""A call of a model that is not parallelized: what is asked of it (its plan, its memory, is it right) starts from here."""

from __future__ import annotations

import functools
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from megafx.capture.dims import with_sizes
from megafx.capture.errors import refuse_quantised
from megafx.capture.libraries.huggingface import synthesize_inputs
from megafx.compiler.captured import Uncaptured
from megafx.config import Config
from megafx.distributed.parameters import device_of
from megafx.ir.call_spec import call_tree, leaf_name
from megafx.ir.model_copies import deep_copy
from megafx.ir.program import Input, Program
from megafx.planner.context import in_training
from megafx.planner.hardware import Hardware

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ExampleCall:
    """The model, a call of it, and what it is planned for.

    config: with the sizes that are priced
    loss_fn: loss_fn(output, **loss_inputs) -> loss, where the model makes none itself
    given: whether the inputs are the user's; else they are made up
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    config: Config
    hardware: Hardware
    loss_fn: Callable[..., Tensor] | None = None
    loss_inputs: Mapping[str, Any] | None = None
    given: bool = True

    @classmethod
    def of(
        cls,
        model: nn.Module,
        config: Config | None,
        example_inputs: Any,
        loss_fn: Any,
        *,
        runs: bool,
        draw: bool = False,
    ) -> ExampleCall:
        """From the arguments of the public calls. runs: it computes on the model's device, with its own parameters; else
        nothing is computed, and parameters take no memory. draw: give made-up inputs values. Raises ConfigError, UsageError."""
        args, kwargs = inputs_of(model, example_inputs)
        config = with_sizes(config or Config(), model, None if example_inputs is None else (args, kwargs))
        if example_inputs is None and draw:
            kwargs = draw_inputs(model, kwargs)
        loss_inputs = kwargs.pop("loss_inputs", None) if loss_fn is not None else None
        if not runs and config.params_dtype is not None:
            refuse_quantised(model, config.tensor_model_parallel_size or 1)
            model = _in_dtype(model, getattr(torch, config.params_dtype))
        hardware = hardware_of(config, device_of(model) if runs else None)
        return cls(model, args, kwargs, config, hardware, loss_fn, loss_inputs, example_inputs is not None)

    @property
    def t(self) -> int:
        return self.config.tensor_model_parallel_size or 1

    @functools.cached_property
    def uncaptured(self) -> Uncaptured:
        return Uncaptured(self.model, self.config)

    @functools.cached_property
    def trained(self) -> set[str]:
        """Names of parameters that require a gradient; with tied weights, all of their names."""
        return {name for name, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}

    def program(self, ranks: int = 0, data_ranks: int = 1) -> Program:
        """CAPTURED, for the ranks of the config, or others. data_ranks: into how many parts the batch is cut. Raises
        CaptureError."""
        refuse_quantised(self.model, ranks or self.t)
        loss = {"loss_fn": self.loss_fn, "loss_inputs": self.loss_inputs}
        program = self.uncaptured.capture(self.args, self.kwargs, data_ranks=data_ranks, **loss)
        if not self.given and "batch" in program.sizes.symbols:
            program.sizes.of_call[program.sizes.symbols["batch"]] = 1  # nobody has given a batch: one row is priced
        return program

    def wants_grad(self) -> Callable[[Input], bool]:
        """Of every parameter, and of the inputs that require one."""
        leaves = pytree.tree_flatten_with_path(call_tree(self.args, self.kwargs, self.loss_inputs))[0]
        return in_training(
            frozenset(leaf_name(path) for path, x in leaves if isinstance(x, Tensor) and x.requires_grad)
        )


def inputs_of(model: nn.Module, example_inputs: Any) -> Call:
    """example_inputs in its three forms -> (args, kwargs); made up for Hugging Face models when there are none."""
    if example_inputs is None:
        return synthesize_inputs(model)
    if isinstance(example_inputs, (dict, UserDict)):
        return (), dict(example_inputs)
    if not isinstance(example_inputs, (tuple, list)):
        return (example_inputs,), {}
    items = tuple(example_inputs)
    if len(items) == 2 and isinstance(items[0], (tuple, list)) and isinstance(items[1], dict):
        return tuple(items[0]), dict(items[1])
    return items, {}


def draw_inputs(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Values for made-up (meta) inputs: ids below the vocabulary size, ones for masks, normal numbers for floats."""
    config: Any = model.config
    vocab = int(getattr(config, "vocab_size", 2))
    device = next(model.parameters()).device
    drawn = {}
    for name, value in kwargs.items():
        if not isinstance(value, torch.Tensor):
            drawn[name] = value
        elif value.dtype.is_floating_point:
            drawn[name] = torch.randn(value.shape, dtype=value.dtype, device=device)
        elif "mask" in name:
            drawn[name] = torch.ones(value.shape, dtype=value.dtype, device=device)
        else:
            drawn[name] = torch.randint(0, vocab, value.shape, dtype=value.dtype, device=device)
    return drawn


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


def _in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """What `model.to(dtype)` would be, as a model of its own whose parameters take no memory."""
    made: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        floating = tensor.is_floating_point()
        if isinstance(tensor, nn.Parameter):
            empty = torch.empty_like(tensor, device="meta", dtype=dtype if floating else None)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        else:
            made[id(tensor)] = tensor.detach().to(dtype) if floating else tensor
    return deep_copy(model, made)
