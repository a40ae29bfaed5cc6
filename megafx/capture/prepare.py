"""Make a model ready for export without changing it: fake parameters, switched options, all undone afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from megafx.capture.functions import KEPT
from megafx.capture.huggingface import attention_of_capture, is_hf_model
from megafx.capture.layerdrop import draws_in_torch, layers_dropped, names_of
from megafx.errors import CaptureError
from megafx.ir.source_lines import current_user_line
from megafx.ops.eager_call import left_eager

Note = Callable[[str], None]

# Attention implementations of transformers that export can trace; the others call kernels that have no fake.
_TRACEABLE_ATTENTION = ("eager", "sdpa")


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    device: torch.device,
    stand_ins: Mapping[str, torch.Tensor],
    note: Note,
    eager: Sequence[str] = (),
    note_eager: Callable[[str, str], None] = lambda text, fqn: None,
) -> Iterator[None]:
    """Within: parameters and buffers are fakes on `device`, caches and checkpointing are off. After: all as before.

    eager, note_eager: as `left_eager` has them.
    """
    configs = _configs(model)
    modules = [(m, dict(vars(m)), _contents(m)) for m in model.modules()]
    saved_configs = [(c, dict(vars(c))) for c in configs]
    try:
        for config in configs:
            _prepare_config(config, model, note)
        _prepare_modules(model, note)
        with contextlib.ExitStack() as stack:
            stack.enter_context(left_eager(model, eager, note_eager))
            _make_fake(model, fake_mode, device, stand_ins)
            if is_hf_model(model):
                stack.enter_context(attention_of_capture())
            stack.enter_context(layers_dropped(model, device, note))
            yield
    finally:
        for module, attributes, contents in modules:
            vars(module).clear()
            vars(module).update(attributes)
            for key, content in contents.items():
                _refill(vars(module)[key], content)
        for config, attributes in saved_configs:
            vars(config).clear()
            vars(config).update(attributes)


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the module's own containers: parameters, buffers, hooks (transformers installs some in forward), lists."""
    return {k: copy.copy(v) for k, v in vars(module).items() if isinstance(v, (dict, set, list))}


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, list) else container.update(content)


def _configs(model: nn.Module) -> list[Any]:
    """Every config object that a submodule reads, each once, nested ones included."""
    found: dict[int, Any] = {}
    todo = [m.config for m in model.modules() if hasattr(m, "config") and hasattr(m.config, "__dict__")]
    while todo:
        config = todo.pop()
        if id(config) not in found:
            found[id(config)] = config
            todo += [v for v in vars(config).values() if type(v).__name__.endswith("Config") and hasattr(v, "__dict__")]
    return list(found.values())


def _prepare_config(config: Any, model: nn.Module, note: Note) -> None:
    attributes = vars(config)
    if attributes.get("use_cache"):
        attributes["use_cache"] = False
    implementation = attributes.get("_attn_implementation_internal")
    if isinstance(implementation, str) and implementation not in _TRACEABLE_ATTENTION:
        usable = "sdpa" if getattr(model, "_supports_sdpa", False) else "eager"
        attributes["_attn_implementation_internal"] = usable
        note(f"attn_implementation '{implementation}' cannot be captured: '{usable}' is captured in its place")
    if attributes.get("_experts_implementation_internal") == "eager":
        attributes["_experts_implementation_internal"] = "grouped_mm"
        if any(hasattr(m, "has_bias") and hasattr(m, "is_transposed") for m in model.modules()):  # ask the interface
            note("experts_implementation 'eager' depends on data: 'grouped_mm' is captured in its place")


def _prepare_modules(model: nn.Module, note: Note) -> None:
    checkpointed = 0
    for path, module in model.named_modules():
        if vars(module).get("gradient_checkpointing"):
            vars(module)["gradient_checkpointing"] = False
            checkpointed += 1
        if module.training and not draws_in_torch(module):
            _keep_layers(module, path, note)
    if checkpointed and model.training:
        note(f"gradient checkpointing is on in the model: it has no effect on a captured graph: {KEPT}")


def _keep_layers(module: nn.Module, path: str, note: Note) -> None:
    """Set a layerdrop to 0 that forward compares with a number which is not torch's: a trace would take one draw for all."""
    for key in sorted(n for n in names_of(module) if n.endswith("layerdrop")):
        for owner in (module, getattr(module, "config", None)):
            value = None if owner is None else vars(owner).get(key)
            if isinstance(value, float) and value > 0:
                vars(owner)[key] = 0.0
                note(
                    f"{key}={value} of module '{path}': its layers are not dropped (captured with 0), since its code does not "
                    f"draw with torch.rand"
                )


def _make_fake(
    model: nn.Module, fake_mode: FakeTensorMode, device: torch.device, stand_ins: Mapping[str, torch.Tensor]
) -> None:
    memo: dict[int, torch.Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or (id(tensor) in memo and table[name] is memo[id(tensor)]):
                    continue
                if id(tensor) not in memo:
                    like = stand_ins.get(f"{prefix}.{name}" if prefix else name, tensor)
                    memo[id(tensor)] = fake_like(like, fake_mode, device, keep=tensor)
                    memo[id(memo[id(tensor)])] = memo[id(tensor)]  # a shared module is met again with its fakes
                table[name] = memo[id(tensor)]


def fake_like(
    like: torch.Tensor,
    fake_mode: FakeTensorMode,
    device: torch.device,
    keep: torch.Tensor,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """A fake of `like` (or of `shape`), a parameter if `keep` is one; a meta tensor becomes one on `device`."""
    where = device if like.device.type == "meta" else like.device
    with fake_mode, torch.no_grad():
        fake = torch.empty(tuple(like.shape) if shape is None else shape, dtype=like.dtype, device=where)
    if isinstance(keep, nn.Parameter):
        return nn.Parameter(fake, requires_grad=keep.requires_grad)
    return fake.requires_grad_(keep.requires_grad)


def target_device(model: nn.Module, leaves: list[Any]) -> torch.device:
    """Where the graph will run: the first real device of the model or of the inputs; for meta alone, CUDA if there is any."""
    for tensor in (*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, torch.Tensor))):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


# -- capture casts
#
# Modules that forward converts (`self.classifier = self.classifier.to(torch.float32)`), while they are captured.
#
# Where parameters and buffers are already as they are to be, nothing happens. Where they are not, eager code changes the dtype
# or device of the model's parameters in its first call, for good: a graph computes with parameters, it does not change
# what they
# are, so that this is an error.


@contextlib.contextmanager
def conversions_refused(model: nn.Module) -> Iterator[None]:
    """Within: `.to()`, `.float()`, `.cuda()` of a module that changes it raise CaptureError."""
    names = {module: name for name, module in model.named_modules()}
    apply = nn.Module._apply

    def refusing(self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for module in self.modules() if recurse else [self]:
            for key, before in (*module._parameters.items(), *module._buffers.items()):
                if before is None:
                    continue
                after = _converted(before, function)
                if (after.dtype, after.device) != (before.dtype, before.device):
                    raise _refused(names.get(self, ""), f"{names.get(module, '')}.{key}".lstrip("."), before, after)
        return self

    nn.Module._apply = refusing  # type: ignore[method-assign]  # for the time of a trace
    try:
        yield
    finally:
        nn.Module._apply = apply  # type: ignore[method-assign]  # as it was


def _converted(before: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """What becomes of a tensor like this one. (The trace sees nothing of it: it would take the result for the parameter.)"""
    with _disable_current_modes(), FakeTensorMode():
        return function(torch.empty([1] * before.dim(), dtype=before.dtype, device=before.device))


def _refused(module: str, name: str, before: Tensor, after: Tensor) -> CaptureError:
    was, made = str(before.dtype), str(after.dtype)
    if was == made:
        was, made = repr(str(before.device)), repr(str(after.device))
    return CaptureError(
        f"forward converts a module: {name} is {was}, and would be {made} from the first call on",
        module=module,
        source=current_user_line(),
        fix=f'convert it before: model.get_submodule("{module}").to({made})',
    )


HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within, calls of the module run none of its own hooks."""
    tables = {name: vars(module)[name] for name in HOOK_TABLES}
    vars(module).update({name: OrderedDict() for name in tables})
    try:
        yield
    finally:
        vars(module).update(tables)
