"""Make a model ready for export without changing it: all that is changed or replaced for a trace is undone afterwards.

    with prepared(model, fake_mode, device, ...): export(...)

The model's parameters become fakes, caches are switched off, and some functions of torch and transformers
are replaced. What is replaced, and why, is the table of `replacements`: nothing of it is active outside of a capture, nor in
another thread. One thread captures at a time.

Two replacements are not of a capture and are elsewhere: `torch.utils.swap_tensors` while constructors run whose initial
values are recorded (weights/constructor_log.py), and DTensor's `_custom_op_handlers`, for good, so that operations on sharded
parameters work (distributed/tensor_dispatch.py).
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _autograd as autograd
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.sym_node import SymNode
from torch.fx.proxy import TracerBase
from torch.nn.modules import batchnorm
from torch.nn.modules import module as of_all
from torch.utils import _contextlib, checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from megafx.capture import tensor_hooks
from megafx.capture.code_names import names_of
from megafx.capture.conversions import (
    MATH,
    OF_NUMPY,
    Converting,
    as_numpy_asks,
    comparison,
    functions_with,
    hash_for_users,
    imported_by_name,
    limits,
    made_number,
    of_numbers,
    quotient,
    rounded,
    with_conversions,
)
from megafx.capture.draws import LayerDraws, draws_in_torch, droppable_layers, following, unrepeatable
from megafx.capture.eager_parts import LeftFunction, left_functions
from megafx.capture.errors import NESTING, SPARSE, packing, product
from megafx.capture.functions import (
    APPLY_OF,
    GENERATOR,
    Applied,
    Regions,
    checkpointing_of_capture,
    classes_bound_early,
    of_rows,
    op_by_op,
)
from megafx.capture.hook_stores import code_run_by, places_written_by
from megafx.capture.hooks import HOOK_TABLES, around, hooked_modules
from megafx.capture.libraries.copies import copying
from megafx.capture.libraries.flex import as_written, flex_replacements
from megafx.capture.libraries.huggingface import CachesLeftOut, attention_replacements, is_hf_model, no_cache
from megafx.capture.libraries.torch_layers import layer_replacements
from megafx.capture.like_layers import LikeLayers, like_layers
from megafx.capture.messages import only_skips, passing_checks, text_of_number, text_of_tensor, unheard
from megafx.capture.quick_fakes import QuickFakeTensorMode
from megafx.capture.reads import LIBRARIES, Reads, is_looked_at
from megafx.capture.traced_nodes import made_where_it_was, of_wrapped, with_user_line
from megafx.errors import CaptureError
from megafx.ir.data_sizes import DataShapeEnv
from megafx.ir.holders import FUNCTIONAL, LEFT_BY_CAPTURES, SETTINGS, flag_of_the_call, own_method, replaced_in
from megafx.ir.python_state import ABSENT, content_of, put_back, unchanged
from megafx.ir.source_lines import current_user_line, frame_behind, is_user_file
from megafx.meanwhile import replacing
from megafx.ops.eager_call import Order, matching
from megafx.ops.eager_probes import LeftEager, Probes, forget_made_up
from megafx.ops.hook_call import Around
from megafx.progress import uncollected

Note = Callable[[str], None]

# Attention implementations of transformers that export can trace; the others call kernels that have no fake.
_TRACEABLE_ATTENTION = ("eager", "sdpa")
# One thread traces at a time, models and patterns: what is replaced is seen by all, and torch has one stack of modes for all
# threads below autograd (torch._ops._ModeStackStateForPreDispatch).
_LOCK: Any = threading.RLock()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Within, no other thread captures or compiles. What waits for other ranks in it has to be in `released`."""
    with _LOCK, uncollected():
        yield


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Others may compile within: another rank may have begun with another thread's model."""
    held = _LOCK._release_save() if _LOCK._is_owned() else None
    try:
        yield
    finally:
        if held is not None:
            _LOCK._acquire_restore(held)


@contextlib.contextmanager
def without_hooks_on_saved() -> Iterator[None]:
    """Without the user's hooks on what autograd saves, and without anomaly detection: it reads values, and there are none."""
    saving = []
    while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
        saving.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        with torch.autograd.set_detect_anomaly(False):
            yield
    finally:
        for pair in reversed(saving):
            autograd._push_saved_tensors_default_hooks(*pair)


class Replacement(NamedTuple):
    """An attribute of `owner` (an item, where that is a dict). new: the value there before -> the value there meanwhile."""

    owner: Any
    name: str
    new: Callable[[Any], Any]
    why: str

    def now(self) -> Any:
        """The value there: the very object, not what the class's protocol makes of it."""
        if isinstance(self.owner, FunctionType):
            return getattr(self.owner, self.name)
        return (self.owner if isinstance(self.owner, dict) else vars(self.owner)).get(self.name, ABSENT)


def replacements(
    model: nn.Module,
    note: Note,
    eager: Sequence[LeftEager],
    draws: LayerDraws,
    reads: Reads | None = None,
    hooks: Sequence[Around] = (),
    functions: Sequence[LeftFunction] = (),
    converting: Converting | None = None,
    layers: LikeLayers | None = None,
) -> list[Replacement]:
    """The table. A later line may replace what an earlier one has put in place."""
    from torch._export import non_strict_utils  # importing megafx need not import it
    from torch.export import _trace as export_trace

    table: list[Replacement] = []

    def asked(answer: bool) -> bool:
        if not only_skips(answer):
            return False
        source = current_user_line()
        text = "whether there are any rows is taken for granted; where there are none, the graph computes on none"
        note(f"{source}: {text}" if source else text)
        return True

    why = "checks of data that only raise or warn are taken to pass"
    table += [Replacement(SymNode, "guard_bool", lambda old: passing_checks(old, note), why)]

    why = "a Function whose backward is not the derivative of its forward becomes one node"
    reads = reads or Reads(model)
    regions = Regions(note, reads.left)
    applied = Applied(note, regions, reads.look_through_class, code_run_by)
    table += [Replacement(APPLY_OF, "apply", lambda old: classmethod(applied.apply), why)]
    table += [Replacement(c, "forward", partial(applied.forward, c), why) for c in classes_bound_early()]

    why = "the hooks of checkpointing cannot be traced: what is computed inside is marked, for the graph to compute it again"
    new: Callable[[Any], Any] = lambda old: checkpointing_of_capture(note, regions)
    table += [Replacement(checkpoint, GENERATOR, new, why)]

    why = "`x.data` of a traced tensor leaves no trace: it is x.detach(), and what is assigned to it is written there"
    table += [Replacement(Tensor, "data", lambda old: property(_data_of(old), _set_data(old)), why)]

    why = "a hook on a value inside of the model becomes a node; what a graph does not keep is an error"
    registers = partial(tensor_hooks.register_hook, note, partial(of_rows, code_run_by))
    table += [Replacement(Tensor, "register_hook", registers, why)]
    table += [Replacement(Tensor, "retain_grad", tensor_hooks.retain_grad, why)]
    for owner, name in ((torch.autograd, "grad"), (torch.autograd, "backward"), (Tensor, "backward")):
        table += [Replacement(owner, name, tensor_hooks.no_gradients, why)]

    why = "a trace has the lengths of one batch: the module that packs or nests sequences is left eager"
    table += [Replacement(torch._VF, "_pack_padded_sequence", partial(packing, "packs"), why)]
    table += [Replacement(torch.nested, name, partial(packing, "nests"), why) for name in NESTING]
    why = "a trace has no sparse tensors: the module that makes one is left eager, and those that are buffers are multiplied"
    table += [Replacement(owner, name, partial(packing, "sparse"), why) for owner, name in SPARSE]
    table += [Replacement(torch.sparse, "mm", product, why)]

    why = "a graph computes with parameters as they are: code that converts a module is an error"
    table += [Replacement(nn.Module, "_apply", lambda old: _refusing_conversions(model), why)]

    why = "export makes its own, whatever the inputs have; ours names the sizes that data decides"
    table += [Replacement(non_strict_utils, "ShapeEnv", lambda old: partial(DataShapeEnv, asked), why)]

    why = "it makes results of the same form sooner"
    table += [Replacement(non_strict_utils, "FakeTensorMode", lambda old: QuickFakeTensorMode, why)]

    why = "it unpacks the arguments of the call, of which there may be none"
    table += [Replacement(export_trace, "make_constraints", _constraints, why)]

    why = "what it tells of a value is in the value, and to find out takes longer than to compute it"
    table += [Replacement(proxy_tensor, "_extract_tensor_metadata", lambda old: lambda value: None, why)]

    why = "of a node's stack trace the user's line is kept alone: the whole stack takes an eighth of a capture"
    table += [Replacement(TracerBase, "create_node", with_user_line, why)]

    why = "an op that returns its operand, under no_grad, does not make it"
    table += [Replacement(proxy_tensor, "track_tensor_tree", made_where_it_was, why)]

    why = "torch 2.11 knows only fakes, not what torch.func.grad has put around them"
    table += [Replacement(symbolic_shapes, "_free_unbacked_symbols_with_path", of_wrapped, why)]

    why = "a size that code looks up in a dict is a number there: each has a graph of its own"
    table += [Replacement(torch.SymInt, "__hash__", hash_for_users, why)]

    why = "what code finds out by comparing sizes is a bool, as torch's functions want one"
    table += [Replacement(torch.SymInt, f"__{x}__", comparison, why) for x in ("eq", "ne", "lt", "le", "gt", "ge")]

    why = "numpy's functions of a size call methods of these names"
    for name in OF_NUMPY:
        table += [Replacement(size, name, as_numpy_asks(name), why) for size in (torch.SymInt, torch.SymFloat)]

    why = "backward has no node for the ceiling of a quotient of sizes"
    table += [Replacement(torch.SymInt, f"__{x}truediv__", partial(quotient, x == "r"), why) for x in ("", "r")]
    table += [Replacement(torch.SymFloat, f"__{x}__", partial(rounded, x == "ceil"), why) for x in ("ceil", "floor")]

    why = "a text of a size, a number or a tensor would be that of the trace"
    for kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
        table += [Replacement(kind, name, text_of_number, why) for name in ("__repr__", "__format__")]
    table += [Replacement(Tensor, name, text_of_tensor, why) for name in ("__repr__", "__format__")]

    table += [Replacement(*line) for line in layer_replacements(model)]
    table += [Replacement(*line) for line in unheard(note, reads.warned)]

    if is_hf_model(model):
        why = "masks that are causal, windows or padding are described to attention, not made"
        table += [Replacement(*found, why) for found in attention_replacements()]

    why = "only without a cache do transformers' masks separate packed sequences; a graph has none where eager mode has one"
    table += [Replacement(*found, why) for found in CachesLeftOut(note).replacements(model)]

    why = "layers that are alike are traced once"
    if layers is not None:
        layers.bordered = [*(each.module for each in eager), *(each.module for each in hooks)]
        for layer, group in like_layers(model):
            table.append(Replacement(layer, "_call_impl", partial(layers.call_for, layer, group), why))

    why = "Config.eager_modules: a call is one node"
    table += [Replacement(each.module, "_call_impl", each.call_for, why) for each in eager]

    why = "a number that is read from a tensor may be 0; sizes are taken to be at least 1"
    table.append(Replacement(non_strict_utils, "_tensor_min_max", limits, why))

    why = "a mean over all batches, momentum=None, takes the number of batches from a buffer: torch's code reads it as a float"
    table += [Replacement(batchnorm._BatchNorm, "forward", _cumulative, why)]

    why = "TorchScript differentiates by itself what it has optimised: a trace would find results without a gradient"
    table += [Replacement(kind, "__call__", op_by_op, why) for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod)]

    why = "export knows no inference mode: what is computed in it is a constant to autograd"
    table += [Replacement(torch.inference_mode, name, _inference_mode, why) for name in ("__enter__", "__exit__")]

    why = "`float(tensor)` has to be a number, of which a trace has none"
    converting = converting or Converting()
    for function, sizes in {f: sizes for code, sizes in converting.codes.items() for f in functions_with(code)}.items():
        table.append(Replacement(function, "__code__", partial(with_conversions, sizes), why))

    why = "code that makes a number of a size is noted: where that fixes the batch, it is traced with sizes kept"
    makes = partial(made_number, converting.numbered)
    table += [Replacement(torch.SymInt, f"__{x}__", makes, why) for x in ("index", "int")]
    table += [Replacement(torch.SymFloat, f"__{x}__", makes, why) for x in ("float", "int")]

    why = "functions of math want a number, of which a trace has none"
    table += [Replacement(math, name, partial(of_numbers, name, converting.numbered), why) for name in MATH]
    table += [
        Replacement(names, own, partial(of_numbers, name, converting.numbered), why)
        for names, own, name in imported_by_name(math, MATH, LIBRARIES)
    ]

    why = "a function that decides by data is one node, whatever it is called by: its code is another meanwhile"
    for left in functions:
        for each_of in left.functions():
            table.append(Replacement(each_of, "__code__", partial(_code_of, left, each_of), why))

    why = "FlexAttention's functions of elements are read as ops of whole tensors"
    table += [Replacement(*line, why) for line in flex_replacements(note)]

    why = "whether a compiler is at work: the user's own code does in a graph what it does in eager mode"
    table += [Replacement(torch.compiler.is_compiling, "__code__", lambda old: _is_compiling.__code__, why)]
    table += [Replacement(torch.compiler.is_exporting, "__code__", lambda old: _is_exporting.__code__, why)]

    why = "torch gives modes, of which a capture has several, what is called `silu` now: one that calls torch's would run often"
    for name in replaced_in(nn.functional):
        table.append(Replacement(nn.functional, name, partial(_once, FUNCTIONAL[name]), why))
    for name, other in replaced_in(Tensor).items():
        if isinstance(other, FunctionType) and (own := own_method(name)) is not None:
            table.append(Replacement(Tensor, name, partial(_once, own), why))

    if nn.Module.__call__ is not _symbolic_trace._orig_module_call:
        why = "torch calls what `nn.Module.__call__` was when it was imported"
        call = nn.Module.__call__
        table += [Replacement(_symbolic_trace, "_orig_module_call", lambda old: call, why)]

    why = "a capture leaves modes that the call is made in: code that asks for them is given those of the call"
    table += [Replacement(torch, name, partial(_of_the_call, name), why) for name in LEFT_BY_CAPTURES]
    named = imported_by_name(torch, LEFT_BY_CAPTURES, LIBRARIES)
    table += [Replacement(names, own, partial(_of_the_call, name), why) for names, own, name in named]
    table += [Replacement(torch.backends.ContextProp, "__get__", _flag_of_the_call, why)]
    table += [Replacement(Tensor, "is_inference", _no_inference_tensors, why)]
    table += [Replacement(*line) for line in reads.asked.replacements()]

    why = "hooks run in each call: a call of them is one node"
    table += [Replacement(each.module, "_call_impl", each.call_for, why) for each in hooks]

    why = "what forward reads and writes of Python objects is noted, for a graph serves calls with the same state alone"
    table.append(Replacement(nn.Module, "__getattribute__", reads.getattribute, why))
    table.append(Replacement(nn.Module, "__setattr__", reads.setattribute, why))
    table += [Replacement(*line) for line in (*unrepeatable(reads), *copying(reads))]

    why = "layerdrop: the draw chooses between the layer's input and its output"
    for fqn, layer in droppable_layers(model):
        table += [Replacement(layer, "_call_impl", partial(draws.forward_for, fqn), why)]
    return table


@replacing
def _constraints(old: Callable[..., Any], fake_mode: Any, gm: Any, args: Any, dynamic: Any, *more: Any) -> Any:
    return old(fake_mode, gm, args, dynamic if tree_leaves(args) else None, *more)


def _is_compiling() -> bool:
    import sys

    from megafx.ir.source_lines import compiles_for

    return compiles_for(sys._getframe(1), "_is_compiling_flag")


def _is_exporting() -> bool:
    import sys

    from megafx.ir.source_lines import compiles_for

    return compiles_for(sys._getframe(1), "_is_exporting_flag")


@replacing
def _cumulative(old: Callable[..., Any], self: Any, x: Tensor) -> Tensor:
    """`forward` of batch norms, with the factor of running statistics as a tensor where momentum is None."""
    mean, var, seen = self.running_mean, self.running_var, self.num_batches_tracked
    if self.momentum is not None or not self.training or mean is None or var is None or seen is None:
        result: Tensor = old(self, x)
        return result
    self._check_input_dim(x)
    seen.add_(1)
    now = torch.zeros_like(mean), torch.zeros_like(var)  # becomes the batch's
    result = nn.functional.batch_norm(x, *now, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        for running, of_batch in zip((mean, var), now, strict=True):
            running.lerp_(of_batch, 1.0 / seen.to(running.dtype))
    return result


def _inference_mode(old: Callable[..., Any]) -> Callable[..., Any]:
    """`__enter__` or `__exit__` of torch.inference_mode, which the user's code enters (also as a decorator)."""
    entering = old.__name__ == "__enter__"

    def method(self: Any, *args: Any) -> Any:
        if not entering:
            return old(self, *args) if (before := _INFERENCE.pop(id(self), None)) is None else _set_grad(before)
        frame: Any = frame_behind(sys._getframe(2), lambda file: file == _contextlib.__file__)  # behind _here_alone
        if frame is None or not is_user_file(frame.f_code.co_filename):
            return old(self)
        _INFERENCE[id(self)] = torch.is_grad_enabled()
        return _set_grad(not self.mode)

    return method


_INFERENCE: dict[int, bool] = {}  # by id of a context that is entered: whether gradients were on before


def _set_grad(on: bool) -> None:
    torch.set_grad_enabled(on)


def _once(own: Callable[..., Any], old: Callable[..., Any]) -> Callable[..., Any]:
    """A function that somebody has put in the place of torch's own, but for modes."""

    def function(*args: Any, **kwargs: Any) -> Any:
        of_mode = sys._getframe(2).f_code.co_name == "__torch_function__"
        return (own if of_mode else old)(*args, **kwargs)

    return function


def _of_the_call(name: str, old: Callable[[], Any]) -> Callable[[], Any]:
    """A function that gives a setting of torch."""

    def answer() -> Any:
        # behind _here_alone
        return SETTINGS[name].value if is_looked_at(sys._getframe(2).f_code.co_filename) else old()

    answer.__name__ = name
    return answer


@replacing
def _flag_of_the_call(old: Callable[..., Any], self: Any, holder: Any, kind: Any) -> Any:
    """`__get__` of the flags of torch.backends."""
    asked = self is vars(kind).get("enabled") and is_looked_at(sys._getframe(2).f_code.co_filename)
    plain = partial(old, self, holder, kind)
    return flag_of_the_call(holder, plain) if asked else plain()


@replacing
def _no_inference_tensors(old: Callable[[Tensor], bool], x: Tensor) -> bool:
    """`x.is_inference()`, of which a trace knows nothing."""
    if isinstance(x, FakeTensor) and is_looked_at(sys._getframe(2).f_code.co_filename):
        raise CaptureError(
            "forward asks whether a tensor was made in inference mode (is_inference), which a graph does not know",
            source=current_user_line(),
            fix="ask for the mode of the call: torch.is_inference_mode_enabled()",
        )
    return old(x)


def _code_of(left: LeftFunction, function: FunctionType, old: CodeType) -> CodeType:
    return left.code_for(function)


def _here_alone(line: Replacement) -> Any:
    """The replacement: for this thread the function that `line.new` makes, for others the one that was there before."""
    old = line.owner.get(line.name) if isinstance(line.owner, dict) else getattr(line.owner, line.name, None)
    new, thread = line.new(old), threading.get_ident()
    if isinstance(line.owner, nn.Module) or not callable(old):
        return new  # a module that is captured has fakes for parameters: it is of no use to other threads

    def of_class(cls: Any, *args: Any, **kwargs: Any) -> Any:
        here = threading.get_ident() == thread
        return (partial(new.__func__, cls) if here else getattr(super(line.owner, cls), line.name))(*args, **kwargs)

    def plain(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else old)(*args, **kwargs)

    return classmethod(of_class) if isinstance(new, classmethod) else plain


@contextlib.contextmanager
def replaced(table: Sequence[Replacement]) -> Iterator[None]:
    """Within, the table holds in this thread; afterwards, also after an exception, the very objects of before are back."""
    done: list[tuple[Replacement, Any]] = []
    with _LOCK:
        try:
            for line in table:
                before = line.now()
                new = _here_alone(line)
                if isinstance(line.owner, dict):
                    line.owner[line.name] = new
                else:
                    setattr(line.owner, line.name, new)
                done.append((line, before))
            yield
        finally:
            for line, before in reversed(done):
                if isinstance(line.owner, dict):
                    line.owner.pop(line.name) if before is ABSENT else line.owner.update({line.name: before})
                elif before is ABSENT:
                    delattr(line.owner, line.name)
                else:
                    setattr(line.owner, line.name, before)


@replacing
def _data_of(old: Any, x: Tensor) -> Tensor:
    """What reads `x.data` while a model is traced: of fakes, which no other thread has, as `x.detach()` does."""
    return x.detach() if isinstance(x, FakeTensor) else old.__get__(x)


@replacing
def _set_data(old: Any, x: Tensor, value: Tensor) -> None:
    """What `x.data = value` does while a model is traced."""
    source = current_user_line() if isinstance(x, FakeTensor) else None
    if source is None:
        old.__set__(x, value)
    elif x.shape != value.shape or x.dtype != value.dtype:
        raise CaptureError(
            f"forward assigns to `.data` of a tensor of {[*x.shape]} ({x.dtype}) one of {[*value.shape]} ({value.dtype})",
            source=source,
            fix="keep shape and dtype, or assign between calls",
        )
    else:
        x.detach().copy_(value.detach())


@replacing
def _refusing_conversions(
    model: nn.Module, self: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> Any:
    """A `Module._apply` (`.to()`, `.float()`, `.cuda()`) that does nothing where nothing would change, and else raises: eager
    code would change the model's parameters in its first call, for good."""
    for module in self.modules() if recurse else [self]:
        for key, before in (*module._parameters.items(), *module._buffers.items()):
            if before is None:
                continue
            with _disable_current_modes(), FakeTensorMode():  # the trace would take the result for the parameter
                after = function(torch.empty([1] * before.dim(), dtype=before.dtype, device=before.device))
            if (after.dtype, after.device) == (before.dtype, before.device):
                continue
            names = {m: name for name, m in model.named_modules()}
            name = f"{names.get(module, '')}.{key}".lstrip(".")
            was, made = str(before.dtype), str(after.dtype)
            if was == made:
                was, made = repr(str(before.device)), repr(str(after.device))
            raise CaptureError(
                f"forward converts a module: {name} is {was}, and would be {made} from the first call on",
                module=names.get(self, ""),
                source=current_user_line(),
                fix=f'convert it before: model.get_submodule("{names.get(self, "")}").to({made})',
            )
    return self


@contextlib.contextmanager
def prepared(
    model: nn.Module,
    fake_mode: FakeTensorMode,
    device: torch.device,
    stand_ins: Mapping[str, Tensor],
    note: Note,
    eager: Sequence[str] = (),
    note_eager: Callable[[str, str, str], None] = lambda topic, text, fqn: None,
    reads: Reads | None = None,
    order: Order | None = None,
    unhooked: Sequence[nn.Module] = (),
    storing: Collection[Hashable] = (),
    functions: Sequence[CodeType] = (),
    probes: Probes | None = None,
    converting: Converting | None = None,
    layers: LikeLayers | None = None,
) -> Iterator[None]:
    """Within: parameters and buffers are fakes on `device`, and the table of `replacements` holds. After: all as before.

    eager: globs of submodules that are one node each. note_eager(topic, text, fqn): called with what they are, and which
    modules have hooks, once the trace is done. reads: notes what forward reads and writes. order: of the hooks. unhooked:
    modules whose own hooks the caller runs. storing: identities of hooks that store what forward reads. functions: code
    of those that are one node each. probes: real inputs of what stays eager. converting: code whose conversions to numbers
    are traced. layers: makes the traces of layers that are alike.
    """
    with _LOCK:
        configs = configs_of(model)
        saved = [(x, dict(vars(x))) for x in (*model.modules(), *configs)]
        # The modules' own containers: parameters, buffers, hooks (transformers installs some in forward), lists.
        containers = [c for m in model.modules() for c in vars(m).values() if isinstance(c, (dict, set, list))]
        containers += [getattr(of_all, f"_global{name}") for name in HOOK_TABLES]
        contents = [*map(content_of, containers)]
        try:
            for config in configs:
                _prepare_config(config, model, note)
            _prepare_modules(model, note)
            forget_made_up()
            watched = {} if reads is None else {"sets": reads.sets}
            left = [LeftEager(module, fqn, probes=probes, **watched) for fqn, module in matching(model, eager).items()]
            inside = [m for each in left for m in each.module.modules()]
            hooks = around(model, hooked_modules(model, {*inside, *unhooked}, storing), order or Order())
            _make_fake(model, fake_mode, device, stand_ins)
            draws = LayerDraws(device, note)
            dropping = any(True for _ in droppable_layers(model))
            alone = left_functions(functions, probes)
            table = replacements(model, note, left, draws, reads, hooks, alone, converting, layers)
            written = places_written_by(
                [*(each.module for each in left), *(f for each in alone for f in each.functions())]
            )
            with unchanged(written), replaced(table), as_written(), following(draws if dropping else None):
                yield
            whole = sum(p.numel() for p in model.parameters())
            for each in left:
                note_eager("eager", each.note(whole), each.fqn)
            for border in hooks:
                text = "hooks of this module run at its border in each call, on whole tensors, on every rank"
                note_eager("hooks", text, border.fqn)
        finally:
            if reads is not None:
                reads.undo()
            for owner, attributes in saved:
                vars(owner).clear()
                vars(owner).update(attributes)
            for container, content in zip(containers, contents, strict=True):
                put_back(container, content)


def configs_of(model: nn.Module) -> list[Any]:
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
        attributes["use_cache"] = no_cache(config, model)
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
    for path, module in model.named_modules():
        if module.training and not draws_in_torch(module):
            _keep_layers(module, path, note)


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
    model: nn.Module, fake_mode: FakeTensorMode, device: torch.device, stand_ins: Mapping[str, Tensor]
) -> None:
    memo: dict[int, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or (id(tensor) in memo and table[name] is memo[id(tensor)]):
                    continue
                if id(tensor) not in memo:
                    like = stand_ins.get(f"{prefix}.{name}" if prefix else name, tensor)
                    fake = fake_like(like, fake_mode, device, keep=tensor)
                    # by torch.func.functional_call
                    if table is module._parameters and not isinstance(fake, nn.Parameter):
                        fake = nn.Parameter(fake.detach(), requires_grad=tensor.requires_grad)
                    memo[id(tensor)] = fake
                    memo[id(memo[id(tensor)])] = memo[id(tensor)]  # a shared module is met again with its fakes
                table[name] = memo[id(tensor)]


def fake_like(
    like: Tensor, fake_mode: FakeTensorMode, device: torch.device, keep: Tensor, shape: tuple[int, ...] | None = None
) -> Tensor:
    """A fake of `like` (or of `shape`), a parameter if `keep` is one; a meta tensor becomes one on `device`."""
    where = device if like.device.type == "meta" else like.device
    with fake_mode, torch.no_grad():
        fake = torch.empty(tuple(like.shape) if shape is None else shape, dtype=like.dtype, device=where)
    if isinstance(keep, nn.Parameter):
        return nn.Parameter(fake, requires_grad=keep.requires_grad)
    if keep.is_leaf or not keep.requires_grad:
        return fake.requires_grad_(keep.requires_grad)
    with fake_mode, torch.enable_grad():
        return fake.requires_grad_().clone()  # no leaf, so that the model may write into it


def target_device(model: nn.Module, leaves: list[Any]) -> torch.device:
    """Where the graph will run: the first real device of the model or of the inputs; for meta alone, CUDA if there is any."""
    for tensor in (*model.parameters(), *model.buffers(), *(x for x in leaves if isinstance(x, Tensor))):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
