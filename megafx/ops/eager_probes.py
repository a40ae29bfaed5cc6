"""What code that stays eager returns, found before the graph runs (ops/eager_call.py): `LeftEager`, a module in a trace.

The code is run outside of the trace: on the call's own integers where these are known (`Probes`), else on made-up inputs of two
sets of sizes, and of two sets of data. A dim of a result is what holds in all runs: a constant, a product of dims of the inputs
(times a number), or a size that data decides.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megafx.errors import CaptureError, MegafxError
from megafx.ir.call_spec import ambient_autocast
from megafx.ir.python_state import ABSENT
from megafx.meanwhile import replacing
from megafx.ops.eager_call import (
    ByRows,
    Constant,
    DataSize,
    EagerCall,
    ResultSize,
    Size,
    as_node,
    differentiable,
    size_leaf,
)

MADE_UP = ((5, 7, 11, 13, 17, 19, 23), (29, 31, 37, 41, 43, 47, 53))  # sizes of the two runs, one for each symbol
_KINDS_OF_DATA = 4  # of `made_up`
MADE_UP_INPUTS = "code that stays eager is run on made-up inputs, to learn the sizes of its results"


class Probes(Protocol):
    """Real inputs of code that stays eager (capture/eager_parts.py).

    scaled: whether a size of a result is taken to be fixed, too, where it grows as a fixed size of the inputs does.
    """

    scaled: bool

    def runs(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], tuple[int, ...]]]:
        """Each time as many as `tensors`, and what fixed sizes of the graph's inputs are there; nothing where none are
        known."""


_OWN = frozenset(vars(nn.Module()))  # tables of every module


def _contents(module: nn.Module) -> dict[str, list[int]]:
    """Attribute that is a container -> what is in it, by identity."""
    found = {name: value for name, value in vars(module).items() if name not in _OWN}
    return {
        name: [id(x) for x in (value.values() if isinstance(value, dict) else value)]
        for name, value in found.items()
        if isinstance(value, (list, dict, set))
    }


Sets = Callable[[nn.Module, str, str], None]


@contextlib.contextmanager
def noting_sets(modules: Iterable[nn.Module], sets: Sets, fqn: str) -> Iterator[None]:
    """Calls sets(module, name, fqn) with what is set or changed within of attributes of these modules and of those in them."""
    inside = {m: None for module in modules for m in module.modules()}
    before = [(m, dict(vars(m)), _contents(m)) for m in inside]
    yield
    for module, attributes, contents in before:
        for name, value in vars(module).items():
            if name == "_call_impl":
                continue
            if attributes.get(name, ABSENT) is not value or contents.get(name) != _contents(module).get(name):
                sets(module, name, fqn)


class LeftEager:
    """A submodule whose calls are nodes of what is traced. calls: how many there were. sets(module, name, fqn): is
    called with each attribute of it and of modules in it that its code sets or changes."""

    def __init__(
        self, module: nn.Module, fqn: str, sets: Sets = lambda module, name, fqn: None, probes: Probes | None = None
    ) -> None:
        self.module, self.fqn, self.calls, self.sets, self.probes = module, fqn, 0, sets, probes
        self.buffers = dict(module.named_buffers())  # as they are before capture makes fakes of them

    @replacing
    def call_for(self, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What a call of the module is while a model is traced. Its hooks run in the node."""
        replaced = vars(self.module).pop("_call_impl")
        try:
            with noting_sets([self.module], self.sets, self.fqn):
                call, tensors = _probed_call(self.module, self.fqn, self.buffers, args, kwargs, self.probes)
        finally:
            vars(self.module)["_call_impl"] = replaced
        self.calls += 1
        return as_node(call, tensors)

    def note(self, whole: int) -> str:
        """What was left eager. whole: the number of the model's parameters."""
        own = sum(p.numel() for p in self.module.parameters())
        return (
            f"left eager: {self.calls} calls run its own code on every rank, on whole tensors; {own} parameters "
            f"({own / max(whole, 1):.1%} of the model's) are stored whole"
        )


def kept_leaf(leaf: Any, inputs: Sequence[Tensor], fqn: str) -> Constant | Size | None:
    """A leaf of the arguments of a call, as `EagerCall.leaves` has it. fqn: for messages."""
    if isinstance(leaf, Tensor):
        return None
    found = size_leaf(leaf, inputs) if isinstance(leaf, torch.SymInt) else None
    if found is None and isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        what = "a module that is left eager gets a number that depends on sizes"
        raise CaptureError(what, module=fqn, fix="let it read the size from a tensor")
    return found or Constant(leaf)


def _probed_call(
    module: nn.Module,
    fqn: str,
    buffers: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    probes: Probes | None = None,
) -> tuple[EagerCall, list[Tensor]]:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    leaves = [x.entering() if hasattr(type(x), "entering") else x for x in leaves]  # numbers that forward counts
    inputs = [x for x in leaves if isinstance(x, Tensor)]
    parameters = dict(module.named_parameters())

    constants = tuple(kept_leaf(leaf, inputs, fqn) for leaf in leaves)
    tensors = [*inputs, *parameters.values()]
    names, autocast = tuple(parameters), tuple(ambient_autocast())
    call = EagerCall(weakref.ref(module), fqn, spec, constants, names, autocast, differentiable(tensors))
    return probed(call, tensors, buffers, probes), tensors


FindsRows = Callable[[EagerCall, Sequence[Tensor]], ByRows | None]


def eager_call_of(module: nn.Module, name: str, args: tuple[Any, ...], by_rows: FindsRows | None = None) -> Any:
    """module(*args) as one node of what is traced. The module has to live as long as the graph; name: for messages. by_rows:
    finds out whether the code computes each row by itself."""
    call, tensors = _probed_call(module, name, {}, args, {})
    return as_node(call if by_rows is None else replace(call, by_rows=by_rows(call, tensors)), tensors)


# -- what comes out


class _Made(TorchDispatchMode):
    """Notes what runs on made-up inputs make: none of it may get into the graph."""

    tensors: ClassVar[list[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, FakeTensor) for x in pytree.tree_leaves((args, kwargs))):
            raise RuntimeError("it reads a tensor of the model's, or of what called it")
        result = func(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(result) if type(x) is Tensor and x.layout is torch.strided]
        self.tensors.extend(x.detach() for x in made)
        return result


def forget_made_up() -> None:
    _Made.tensors.clear()


def refuse_made_up(constants: Iterable[Any]) -> None:
    """Raise CaptureError where code that is captured has read a tensor that code that is left eager has put somewhere."""
    made = {x.untyped_storage()._cdata for x in _Made.tensors}
    strided = [x for x in constants if isinstance(x, Tensor) and x.layout is torch.strided]
    if any(x.untyped_storage()._cdata in made for x in strided):
        raise CaptureError(
            "forward reads a tensor that a module that is left eager has put into a global or an object",
            fix="let the module return it",
        )


def probed(
    call: EagerCall, tensors: list[Tensor], buffers: dict[str, Tensor], probes: Probes | None = None
) -> EagerCall:
    """The call with what it returns, found by running it: on real inputs where `probes` has these, else on made-up tensors, of
    two sets of sizes, and of two sets of data where the code takes the second."""
    state = torch.get_rng_state()
    try:
        real = [] if probes is None else [*probes.runs(tensors)]
        runs, fixed = [], []
        for number, (values, theirs) in enumerate(real):
            try:
                runs.append((values, *_run(call, values, buffers, True)))
                fixed.append(theirs)
            except MegafxError:
                raise
            except Exception:  # other numbers may be none that the code takes; the first run says enough then
                if number == 0:
                    raise
        if not real:
            runs = _on_made_up(call, tensors, buffers)
    finally:
        torch.set_rng_state(state)
    spec, count = runs[0][2], itertools.count()
    if any(other != spec for _, _, other, _ in runs):
        what = "a module that is left eager returns another structure for other inputs"
        raise CaptureError(what, module=call.fqn, fix="return as many tensors in every case")
    results: list[tuple[torch.dtype, tuple[ResultSize | DataSize, ...]]] = []
    out_leaves: list[Constant | None] = []
    on_host: list[bool] = []
    inputs = [values for values, *_ in runs]
    for each in zip(*(leaves for _, leaves, _, _ in runs), strict=True):
        if isinstance(each[0], Tensor):
            if len({x.dim() for x in each}) > 1:
                what = "a module that is left eager returns another structure for other inputs"
                raise CaptureError(what, module=call.fqn, fix="return as many tensors in every case")
            found = ([x.shape[d] for x in each] for d in range(each[0].dim()))
            if real:
                scaled = probes is not None and probes.scaled
                dims = [size_by_runs(sizes, tensors, inputs, fixed, scaled) for sizes in found]
            else:
                dims = [_size(sizes, inputs[0], inputs[1]) for sizes in found]
            results.append((each[0].dtype, tuple(DataSize(next(count)) if d is None else d for d in dims)))
            on_host.append(each[0].device.type == "cpu")
            out_leaves.append(None)
        else:
            out_leaves.append(Constant(each[0]))
    return replace(
        call,
        results=tuple(results),
        out_spec=spec,
        out_leaves=tuple(out_leaves),
        random=any(drawn for *_, drawn in runs),
        on_host=tuple(on_host),
    )


def _on_made_up(call: EagerCall, tensors: list[Tensor], buffers: dict[str, Tensor]) -> list[Any]:
    """The runs on the first two sets of made-up data that the code takes, each in two sets of sizes."""
    runs: list[Any] = []
    refused: Exception | None = None
    for data in range(_KINDS_OF_DATA):
        try:
            each = [made_up(tensors, sizes, data) for sizes in MADE_UP]
            runs += [(values, *_run(call, values, buffers, False)) for values in each]
        except MegafxError:
            raise
        except Exception as error:  # whatever the code raises of such data, it may take others
            refused = refused or error
        if len(runs) == 2 * len(MADE_UP):
            break
    if not runs and refused is not None:
        raise refused
    return runs


def _run(
    call: EagerCall, values: list[Tensor], buffers: dict[str, Tensor], real: bool
) -> tuple[list[Any], pytree.TreeSpec, bool]:
    """(the leaves of what the call returns, their structure, whether it has drawn random numbers)."""
    tracer = getattr(get_proxy_mode(), "tracer", None)
    entered = getattr(tracer, "module_stack", {})  # of modules; where one raises, torch leaves it there
    inside = entered.copy()
    for differentiates in (False, True):
        try:
            return _run_outside(call, values, buffers, real, differentiates)
        except Exception as error:  # any: it is raised again, without the modules that it has left on the stack
            entered.clear()
            entered.update(inside)
            if differentiates or not torch.is_grad_enabled() or "does not require grad" not in str(error):
                raise
    raise AssertionError("the second run has raised")


def _run_outside(
    call: EagerCall, values: list[Tensor], buffers: dict[str, Tensor], real: bool, differentiates: bool
) -> tuple[list[Any], pytree.TreeSpec, bool]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.set_grad_enabled(differentiates):
        if differentiates:
            values = [x.detach().requires_grad_(wanted) for x, wanted in zip(values, call.wanted, strict=True)]
        meta = {n for n, b in buffers.items() if b.device.type == "meta"}
        own = {n: torch.ones_like(b, device="cpu") if n in meta else b.clone() for n, b in buffers.items()}
        before = torch.get_rng_state()
        with _Made():
            output = _tried(call, values, own, real)
        if any(x.grad is not None for x in values):
            raise CaptureError(
                "a module that is left eager calls backward(), whose gradients its parameters would not keep",
                module=call.fqn,
                fix="let it take gradients by torch.autograd.grad",
            )
        drawn = not torch.equal(before, torch.get_rng_state())
        leaves, spec = pytree.tree_flatten(output)
        return [x.detach() if isinstance(x, Tensor) else x for x in leaves], spec, drawn


def _tried(call: EagerCall, values: list[Tensor], buffers: dict[str, Tensor], real: bool) -> Any:
    try:
        return call.run(values, buffers)
    except Exception as error:  # other sizes may work: capture tries some
        shapes = ", ".join(str(tuple(x.shape)) for x in values[: call.leaves.count(None)])
        integers = "integers of the call" if real else "integers that are 0"
        error.add_note(f"{MADE_UP_INPUTS} (normal numbers, {integers}) of shapes {shapes}")
        raise


def made_up(
    tensors: Sequence[Tensor], sizes: tuple[int, ...], data: int = 0, given: Mapping[sympy.Symbol, int] | None = None
) -> list[Tensor]:
    """Real tensors like these; their k-th symbol is sizes[k], but for those that are given. Numbers are normal, indices 0, and
    truth values True. data: 1 for other numbers, indices of 0 and 1, and truth values of both kinds; 2 and 3 for numbers above
    and below 0."""
    symbols: dict[sympy.Symbol, int] = dict(given or {})
    made = []
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        generator = torch.Generator().manual_seed(data)
        for tensor in tensors:
            shape = []
            for size in tensor.shape:
                if isinstance(size, torch.SymInt):
                    expr = size.node.expr
                    for symbol in sorted(expr.free_symbols, key=str):
                        symbols.setdefault(symbol, sizes[len(symbols) % len(sizes)])
                    shape.append(int(expr.xreplace({s: sympy.Integer(n) for s, n in symbols.items()})))
                else:
                    shape.append(int(size))
            if tensor.dtype.is_floating_point:
                value = torch.randn(shape, generator=generator).to(tensor.dtype)
                value = value if data < 2 else value.abs() if data == 2 else -value.abs()
            elif data == 1:
                value = torch.randint(0, 2, shape, generator=generator).to(tensor.dtype)
            else:
                value = torch.full(shape, int(tensor.dtype == torch.bool), dtype=tensor.dtype)
            made.append(value.to(tensor.device))
    return made


_TRIED = (2, 3, 5, 8, 16, 63, 100, 257, 1024, 12345, 2**17, 2**20)


def sizes_decide(run: Callable[[list[Tensor]], Any], tensors: Sequence[Tensor], made: Sequence[Tensor]) -> bool:
    """Whether sizes that vary between calls decide what `run` does: it compares them with numbers, or takes their digits.
    A size of 1 may decide. made: tensors like `tensors`, without symbols."""
    from torch._dynamo.source import ConstantSource  # these import sympy's printers and all of Dynamo
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    if not any(isinstance(n, torch.SymInt) for x in tensors for n in x.shape):
        return False
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    given: list[Tensor] = []
    for number, (like, x) in enumerate(zip(tensors, made, strict=True)):
        kinds = [DimDynamic.DUCK if isinstance(n, torch.SymInt) else DimDynamic.STATIC for n in like.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        given.append(mode.from_tensor(x, symbolic_context=context, source=ConstantSource(f"x{number}")))
    with mode:
        run(given)
    for guard, n in itertools.product(env.guards, _TRIED):
        symbols = sorted(guard.expr.free_symbols, key=str)
        if guard.expr.xreplace({s: sympy.Integer(n + k) for k, s in enumerate(symbols)}) != sympy.true:
            return True
    return False


def _size(found: list[int], first: list[Tensor], second: list[Tensor]) -> ResultSize | None:
    """What a dim is that has these sizes in the runs: on the first tensors, the second ones, and again with other data. None
    where data decides it."""
    a, b, *again = found
    if any(one != other for one, other in zip(again, (a, b), strict=False)):
        return None
    if a == b:
        return ResultSize(sympy.Rational(a), ())
    varying: dict[tuple[int, int], tuple[int, int]] = {}
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        for d, pair in enumerate(zip(x.shape, y.shape, strict=True)):
            if pair[0] != pair[1] and pair not in varying.values():
                varying[i, d] = pair
    for number in range(1, len(varying) + 1):
        for dims in itertools.combinations(varying, number):
            one, two = (math.prod(varying[k][j] for k in dims) for j in (0, 1))
            if a * two == b * one:
                return ResultSize(sympy.Rational(a, one), dims)
    return None


def size_by_runs(
    found: list[int],
    traced: Sequence[Tensor],
    runs: Sequence[Sequence[Tensor]],
    fixed: Sequence[tuple[int, ...]],
    scaled: bool,
) -> ResultSize | None:
    """What a dim is that has these sizes in runs on real inputs. None where data decides it.

    It is a product of dims of inputs where it is so in all runs; one size in all of them is a constant. So is a size that the
    graph's inputs have in all runs, if the graph holds for this size alone. A single run cannot tell these apart: then it is
    the first dim of an input that has this size. Each call checks what is found here. fixed: of each run. scaled: see Probes.
    """
    constant = ResultSize(sympy.Integer(found[0]), ())
    dims = [(i, d) for i, x in enumerate(traced) for d in range(x.dim())]
    if len(runs) == 1:
        same = next(((i, d) for i, d in dims if runs[0][i].shape[d] == found[0]), None)
        if same is None or isinstance(traced[same[0]].shape[same[1]], torch.SymInt):
            return None if same is None else ResultSize(sympy.Integer(1), (same,))
        return constant
    varying: dict[Any, tuple[int, int]] = {}
    for i, d in dims:
        if isinstance(size := traced[i].shape[d], torch.SymInt):
            varying.setdefault(size.node.expr, (i, d))
    for number in range(1, min(len(varying), 3) + 1):
        for chosen in itertools.combinations(varying.values(), number):
            if all(math.prod(run[i].shape[d] for i, d in chosen) == n for run, n in zip(runs, found, strict=True)):
                return ResultSize(sympy.Integer(1), chosen)
    if len({*found}) == 1:
        return constant
    for sizes in zip(*fixed, strict=True):
        if sizes == tuple(found) or (
            scaled and all(n * sizes[0] == found[0] * m for n, m in zip(found, sizes, strict=True))
        ):
            return constant
    return None
