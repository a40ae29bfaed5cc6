"""Errors of torch.export in the user's terms: which module, which line, what was found, what to change. Refused models.

Quantised weights are refused, since a graph has no rule for their packed bytes. bitsandbytes (nf4, int8), torchao's tensor
subclasses and the layers of GPTQ, AWQ and HQQ keep a weight in a form of which a rank cannot take rows or columns, and compute
with kernels that look at the packed tensor itself. torchao's own `unwrap_tensor_subclass` turns its weights into plain integers
and scales that the module multiplies in forward, which a graph holds as it is. torchao's float8 training keeps its weights
plain but scales a whole tensor by its largest element, which a shard does not know.
"""

from __future__ import annotations

import dis
import linecache
import os
import re
import traceback
import types
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Set, ValuesView
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nn.modules import module as torch_module

from megafx.capture.conversions import conversions_of
from megafx.capture.eager_parts import functions_of
from megafx.capture.libraries.records import is_leaf, is_record
from megafx.errors import CaptureError, SourceLine, or_leave_eager
from megafx.ir.call_spec import user_name
from megafx.ir.source_lines import frames_of, is_user_file
from megafx.meanwhile import replacing
from megafx.ops.eager_call import in_eager_code
from megafx.ops.eager_probes import MADE_UP_INPUTS

_CLASS_OF_OUTPUT = re.compile(r"Found <class '(.*?)'> in output")
_OF_TRUTH = re.compile(r"'(Equality|Unequality|(Strict)?(Less|Greater)Than)'")  # sympy's, in an error of Python's
_CALL = nn.Module._call_impl.__code__.co_name
_BRANCH = (
    "a Python decision (`if`, `while`, `assert`, `bool()`, `int()`) depends on the data of a tensor",
    "use torch.where or a mask, or decide by a Python value that is known before the call",
)
_COUNT = (
    "a Python decision (`if`, `while`, `assert`, `len()`) depends on how many rows the data of a tensor selects",
    "do not ask: code on zero rows contributes nothing; or ask only whether there are any, by `rows.numel() == 0`",
)
_COUNTS = ("len(", ".numel()", ".shape[", ".size(")  # what asks for a number of rows
_ANY = (
    "a Python decision (`if`, `while`, `assert`) depends on whether an element of a tensor is true (`.any()`)",
    "do not ask: code on zero rows contributes nothing, and a mask in which nothing is true changes nothing; or select the "
    "rows and ask by `rows.numel() == 0` whether there are any",
)
_DRAW = (
    "a Python decision (`if`, `while`) depends on a number that forward draws: a graph would keep the answer",
    "compute both, and let the number choose, for example x = torch.where(torch.rand(()) < p, x, layer(x)); or draw before the "
    "call, and pass the answer as an argument",
)
_DRAWS = re.compile(r"\b(rand|rand_like|randn|randint|bernoulli)\(")
_LOOP = (
    "a Python loop runs over a tensor whose length the data decides",
    "loop over all that there may be (`for e, expert in enumerate(self.experts)`): code on zero rows contributes nothing",
)
_ITEM = (
    "a tensor's data becomes a Python number (`.item()`, `.tolist()`, `.numpy()`, `int(tensor)`)",
    "keep it a tensor, or pass the number as an argument of the call",
)
GENERATOR = (
    "a torch.Generator (or another object) is an argument of an op: a graph cannot hold its state",
    "draw from torch's default generator (`torch.manual_seed`), or draw before the call and pass what was drawn",
)
_SELECT = (
    "the shape of a result depends on the data of a tensor (nonzero, x[mask], unique)",
    "compute on the whole tensor with torch.where or a mask; a loss that does so can be computed from the model's output in "
    "your own loop (Hugging Face: call the model without labels)",
)
_LSTSQ = (
    "torch.linalg.lstsq: whether it returns residuals depends on the data of a tensor",
    "solve by torch.linalg.pinv(a) @ b, or with a of full rank by torch.linalg.solve(a.mT @ a, a.mT @ b)",
)
_PACKED = (
    "sequences are packed (torch.nn.utils.rnn): the data of their lengths decides how many rows each step has",
    "give the recurrent module the padded batch, or put what packs and unpacks into a submodule, which is left eager",
)


_NESTED = (
    "tensors are nested (torch.nested): the data of their lengths decides how many rows each has",
    "compute on padded tensors and a mask, or put what makes and takes nested tensors into a submodule, which is left eager",
)
_SPARSE = (
    "forward makes a sparse tensor (torch.sparse): a trace knows no values that are left out",
    "compute on dense tensors, keep the sparse tensor as a buffer, or put what makes and takes it into a submodule, which is "
    "left eager",
)


TRANSFORM = (
    "a transform of torch.func (vmap, grad, vjp, jvp) inside of the model",
    "write the function for all rows at once (broadcasting, einsum), and differentiate outside of the model: "
    "torch.autograd.grad(model(x).sum(), x, create_graph=True); or put what transforms into a submodule, which is left eager",
)


class Differentiates(Exception):
    """Code of the model computes a gradient."""


DIFFERENTIATES = (
    "forward differentiates (torch.autograd.grad): what autograd keeps for it leaves no trace",
    "return the value, and take its gradient outside of the model, where it is computed in eager mode: "
    "torch.autograd.grad(model(x).sum(), x, create_graph=True)",
)


class OneBatch(Exception):
    """Code of the model packs or nests sequences, of which a trace would have the lengths of one batch, or makes a sparse
    tensor."""


@replacing
def packing(what: str, old: Any, /, *args: Any, **kwargs: Any) -> Any:
    """A function of torch that packs ('packs') or nests ('nests') sequences, or makes a sparse tensor ('sparse'), while a model
    is traced."""
    if in_eager_code():
        return old(*args, **kwargs)
    raise OneBatch(what)


NESTING = [name for name in torch.nested.__all__ if name != "to_padded_tensor"]
SPARSE = [
    (owner, name) for owner, start in ((torch, "sparse_"), (torch.Tensor, "to_sparse")) for name in dir(owner)
    if name.startswith(start) and (owner is torch.Tensor or name.endswith("_tensor"))
]  # fmt: skip


@replacing
def product(old: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`torch.sparse.mm` of a sparse buffer, which a trace takes for a dense one: torch.mm multiplies both."""
    return old(*args, **kwargs) if in_eager_code() or len(args) + len(kwargs) != 2 else torch.mm(*args, **kwargs)


def is_other_form(x: Any) -> bool:
    """True of what `refuse_forms` refuses."""
    if type(x) is torch.Tensor:
        return x.layout is not torch.strided or x.is_nested
    return type(x) is not nn.Parameter and (type(x) is NestedTensor or is_of_the_users_class(x))


def is_of_the_users_class(x: Any) -> bool:
    """True of a tensor whose class has a `__torch_function__` of the user's."""
    function = getattr(type(x), "__torch_function__", None)
    module = str(getattr(getattr(function, "__func__", function), "__module__", "torch")).partition(".")[0]
    return isinstance(x, torch.Tensor) and module not in ("torch", "megafx")


def refuse_forms(named: Iterable[tuple[str, Any]]) -> None:
    """Raise for tensors among the arguments of a call that are no strided ones, or whose class defines what functions of torch
    do. named: (name, argument)."""
    for name, x in named:
        if is_of_the_users_class(x):
            raise CaptureError(
                f"argument {name} is a {type(x).__qualname__}, whose __torch_function__ a graph does not call",
                fix=f"give the model {name}.as_subclass(torch.Tensor), and make its result one of the class again: "
                f"y.as_subclass({type(x).__qualname__})",
            )
        if not is_other_form(x):
            continue
        if x.is_nested:
            fix = f"give the model a padded one, and a mask where tokens see one another: {name}.to_padded_tensor(0.0)"
            if x.layout is torch.jagged:
                fix += f"; what treats each token alone may be given all tokens as one row: {name}.values()[None]"
            raise CaptureError(f"argument {name} is a nested tensor, whose lengths a graph does not know", fix=fix)
        raise CaptureError(
            f"argument {name} is a sparse tensor ({x.layout}), which has no place in a graph",
            fix=f"give the model {name}.to_dense(), or the indices and values, as tensors of their own",
        )


def translate(error: Exception, model: nn.Module) -> CaptureError:
    """The CaptureError for an exception raised while exporting."""
    module, source = _where(error, model)
    found, fix = _what(error, source)
    by_data = (found, fix) in (
        _BRANCH,
        _COUNT,
        _ANY,
        _LOOP,
        _ITEM,
        _SELECT,
        _LSTSQ,
        _PACKED,
        _NESTED,
        _SPARSE,
        TRANSFORM,
        DIFFERENTIATES,
    )
    if by_data or (found, fix) == GENERATOR:
        fix = or_leave_eager(fix, module)
        if not module and "submodule" not in fix:
            fix += "; or put the lines that do so into a submodule (an nn.Module of its own), which is left eager"
    made = CaptureError(found, fix=fix, module=module, source=source)
    if not by_data and (found, fix) != GENERATOR:
        made = made.caught_as(type(error))
    if by_data:
        made.part, made.functions = called_part(error, model), functions_of(error)
        made.converts = conversions_of(error)
    made.raised = error if _is_of_the_model(error) else None
    return made


def _is_of_the_model(error: Exception) -> bool:
    """True if code of the model (or of torch.nn) raises this: by `raise` or `assert`, or since a key is not there, or a value
    does not fit."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if _LEAF in str(error):
        return True
    if not frames or type(error).__module__.partition(".")[0] in ("torch", "sympy", "megafx"):
        return False
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    assert tb is not None
    code, file = tb.tb_frame.f_code, tb.tb_frame.f_code.co_filename
    if not is_user_file(file) and not file.startswith(_OF_NN):
        return False
    raises = any(i.offset == tb.tb_lasti and i.opname == "RAISE_VARARGS" for i in dis.get_instructions(code))
    return raises or isinstance(error, (LookupError, ValueError, ZeroDivisionError))


def in_users_code(error: Exception) -> Exception:
    """The exception with a traceback that shows the frames of the model alone."""
    frames, tb = [], error.__traceback__
    while tb is not None:
        if is_user_file(tb.tb_frame.f_code.co_filename):
            frames.append((tb.tb_frame, tb.tb_lasti, tb.tb_lineno))
        tb = tb.tb_next
    made: types.TracebackType | None = None
    for frame, last, line in reversed(frames):
        made = types.TracebackType(made, frame, last, line)
    error.__suppress_context__ = True
    return error.with_traceback(made)


_LEAF = "leaf Variable that requires grad"  # is written in place: a trace knows as well as eager mode
_OF_NN = (os.path.dirname(torch.nn.__file__) + os.sep, torch._ops.__file__)  # ops, too: what their C++ raises


def refuse_leaves(named: Iterable[tuple[str, Any]]) -> None:
    """Raise for arguments that are no tensor and no plain value. named: (name, one of them)."""
    for name, value in named:
        if not is_leaf(value):
            raise _unsupported(name, value)


def _unsupported(name: str, value: Any) -> CaptureError:
    kind = type(value)
    if is_record(value):  # one that is being taken apart
        return CaptureError(
            f"argument {user_name(name)} is the {kind.__qualname__} that it is part of: a graph takes no circles",
            fix="pass what forward reads of the object, or an object without the reference to itself",
        )
    fix = "pass tensors, numbers, strings, or lists, tuples and dicts of them"
    if kind.__module__ in ("numpy", "array"):
        fix = f"pass torch.as_tensor({user_name(name)}), and let forward compute with functions of torch"
    elif isinstance(value, (Iterator, KeysView, ValuesView, ItemsView)):
        fix = f"pass a list: list({user_name(name)})"
    elif isinstance(value, Mapping):
        fix = f"pass a dict: dict({user_name(name)})"
    elif isinstance(value, Set):
        fix = "pass a list of its members: a set has an order of its own in each process"
    elif callable(value):
        fix = "set it as an attribute of the model, which forward reads and calls; or call it on what the model returns"
    if "Cache" in kind.__name__:
        fix = "call with use_cache=False and without past_key_values: this is none of transformers' caches"
    found = f"argument {user_name(name)} is a {kind.__module__}.{kind.__qualname__}, which cannot enter a graph"
    return CaptureError(found, fix=fix)


def _what(error: Exception, source: SourceLine | None) -> tuple[str, str]:
    name, message = type(error).__name__, str(error)
    code = source.code if source else ""
    for note in getattr(error, "__notes__", ()):
        if note.startswith(MADE_UP_INPUTS):
            return (
                f"{note}, and fails on them: {name}: {_first_line(message)}",
                "leave only code eager that takes any numbers and sizes; what needs certain numbers, compute before the call, "
                "and give the result to the model as an argument",
            )
    if isinstance(error, OneBatch):
        if str(error) == "sparse":
            return _SPARSE
        return _PACKED if str(error) == "packs" else _NESTED
    if isinstance(error, Differentiates):
        return DIFFERENTIATES
    if "TensorWrapper" in message:
        return TRANSFORM
    if "GuardOnDataDependent" in name or "data-dependent" in message:
        if _DRAWS.search(code) and re.search(r"\b(if|while)\b", code):
            return _DRAW
        if ".item(" in code or ".tolist(" in code:
            return _ITEM
        if "nonzero" in code or "unique" in code:
            return _SELECT
        if code.startswith("for "):
            return _LOOP
        if ".any()" in code:
            return _ANY
        return _COUNT if any(text in code for text in _COUNTS) else _BRANCH
    if name == "TypeError" and _OF_TRUTH.search(message):  # `a == b` of truth values that a tensor holds
        return _BRANCH
    if "DynamicOutputShape" in name or "dynamic shape operator" in message:
        return _LSTSQ if "lstsq" in message else _SELECT
    if "DataDependentOutput" in name or message.startswith(".numpy() is not supported"):
        return _ITEM
    if "torch._C.Generator" in message or ("generator" in code and "concrete integers" in message):
        return GENERATOR
    if "Constraints violated" in message:
        return (
            "the model computes with sizes that the call does not determine: " + _first_line(message, "  - "),
            "pass example inputs whose batch and sequence sizes are at least 2 and differ from each other",
        )
    if (kind := _CLASS_OF_OUTPUT.search(message)) is not None:
        if kind[1].endswith(("generator", "zip", "map", "filter", "enumerate", "reversed", "iterator")):
            return (
                f"forward returns a {kind[1]}: what it gives out is computed, or taken, after the call",
                "return a list or a tuple of it (in place of `yield`: collect the values, and return them)",
            )
        return (
            f"forward returns a {kind[1]}, whose parts a graph does not know",
            "return tensors in tuples, lists, dicts or dataclasses, or let torch know how to take the class apart: "
            "torch.utils._pytree.register_pytree_node(...)",
        )
    if "pytree" in message or "Unsupported input type" in message or "not a known type" in message:
        return (
            f"the model returns or takes something that is no container of tensors: {_first_line(message)}",
            "return tensors in tuples, lists, dicts or dataclasses (torch.utils._pytree.register_pytree_node for other types)",
        )
    if "assigned during export" in message:
        return (
            f"forward stores a tensor in the module: {_first_line(message)}",
            "register it as a buffer (register_buffer) and change it in place, or return it",
        )
    if name == "TypeError" and "forward()" in message:
        return f"the call does not fit the model: {_first_line(message)}", "give forward the arguments that it takes"
    if message.startswith("Cannot access data pointer"):
        return (
            "forward asks where a tensor's memory is (data_ptr, numpy, code that takes a pointer), which a graph does not know",
            "tell tensors apart by a name or a number that is passed on with them, and keep as an array what is read as one; "
            "put what computes by pointers into a submodule, and leave that eager: Config(eager_modules=[...])",
        )
    if _LEAF in message:
        return (
            f"{name}: {_first_line(message)}",
            "pass x.detach(), which shows the same memory, where the call needs no gradient of it, else x.clone()",
        )
    fix = "if the model runs in eager mode on these inputs, change this line so that torch.export(strict=False) can trace it; "
    return f"{name}: {_first_line(message)}", fix + "otherwise the inputs do not fit the model, or its code"


def _first_line(message: str, prefix: str = "") -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip() and line.startswith(prefix)]
    return lines[0] if lines else message.strip()[:200]


def _where(error: BaseException, model: nn.Module) -> tuple[str | None, SourceLine | None]:
    """Module path and line of the deepest frame of the user's code in the traceback, causes included."""
    has_forward = lambda m: type(m).forward is not nn.Module.forward  # unlike a list of modules
    paths = {id(m): path for path, m in model.named_modules() if has_forward(m)}
    module: str | None = None
    source: SourceLine | None = None
    for frame, line in frames_of(error):
        file = frame.f_code.co_filename
        module = paths.get(id(frame.f_locals.get("self")), module)
        if is_user_file(file):
            source = SourceLine(file, line, linecache.getline(file, line).strip())
    return module, source


def called_part(error: BaseException, model: nn.Module) -> str:
    """FQN of the deepest submodule of the model whose call is on the error's stack; '' where it is the model itself.

    A method of a submodule that the code calls by name is part of the module whose forward calls it.
    """
    paths = {id(m): path for path, m in model.named_modules()}
    found = ""
    for frame, _ in frames_of(error):
        if frame.f_code.co_filename == torch_module.__file__ and frame.f_code.co_name == _CALL:
            found = paths.get(id(frame.f_locals.get("self")), found)
    return found


def refuse_scripted(model: nn.Module) -> None:
    """Raise CaptureError where a module is one of TorchScript."""
    found = [(path, module) for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if found:
        path, module = found[0]
        raise CaptureError(
            f"the module is a {type(module).__name__} of torch.jit: it has no Python code that could be captured",
            module=path,
            fix="use the Python module that it was made from; one whose parameters all have requires_grad_(False) may stay, if "
            "it is no submodule but in a list: self.teacher = [scripted]",
        )


# -- quantised weights

_MAKERS = "bitsandbytes torchao hqq auto_gptq gptqmodel awq quanto optimum compressed_tensors"
_PACKAGES = _MAKERS.split()
_NAMES = {"Linear4bit", "Linear8bitLt", "QuantLinear", "WQLinear", "HQQLinear", "QLinear"}
FIX = (
    "load the model without a quantization_config (in bf16), and give it adapters as before: frozen weights are split over the "
    "ranks, 2 bytes a weight divided by their number; or train it in this form without megafx"
)

FIX_TORCHAO = (
    "call torchao.utils.unwrap_tensor_subclass(model) first: integers and scales become plain frozen parameters, which are "
    "split over the ranks like other weights"
)


def refuse_quantised(model: nn.Module, ranks: int = 1) -> None:
    """Raise CaptureError where a module holds a quantised weight; the first is named, and how many there are.

    ranks: over which weights are to be split. On several, layers for float8 training are refused, too.
    """
    scaled = [path for path, module in model.named_modules() if type(module).__name__ == "Float8Linear"]
    if ranks > 1 and scaled:
        more = f" (and {len(scaled) - 1} more modules)" if len(scaled) > 1 else ""
        raise CaptureError(
            f"the module is a Float8Linear{more}: it scales a whole tensor by its largest element, of which a rank has a part",
            fix="leave out convert_to_float8_training, or use ranks for data alone: Config(tensor_model_parallel_size=1)",
            module=scaled[0],
        )
    found = [(path, what) for path, module in model.named_modules() if (what := _quantised(module))]
    if found:
        path, what = found[0]
        more = f" (and {len(found) - 1} more modules)" if len(found) > 1 else ""
        fix = FIX_TORCHAO if "a torchao " in what else FIX
        raise CaptureError(f"{what}{more}: quantised layers cannot enter a graph", fix=fix, module=path)


def _quantised(module: nn.Module) -> str | None:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        kind = type(tensor)
        data = type(tensor.data) if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) else kind
        for one in (kind, data):
            if tensor is not None and one.__module__.partition(".")[0] in _PACKAGES:
                return f"'{name}' is a {one.__module__.partition('.')[0]} {one.__name__}"
    layer = type(module)
    package = layer.__module__.partition(".")[0]
    return f"the module is a {package} {layer.__name__}" if package in _PACKAGES and layer.__name__ in _NAMES else None
