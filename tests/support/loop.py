"""Situations of users: plain PyTorch code around a model, run in eager mode and with the model parallelized.

A module below tests/loop/situations registers functions with `@situation(thread)`:

    @situation("https://github.com/pytorch/pytorch/issues/115774")
    def an_attribute_changes_between_calls(loop: Loop) -> None:
        model, x = loop.model(Scaled()), torch.randn(4, 8)
        for scale in (1.0, 0.5):
            model.scale = scale
            loss = model(x).square().mean()
            loss.backward()
            loop.see(loss=loss)
        loop.see_gradients(model)

`loop.model` gives the model back as it is in eager mode, and parallelized otherwise; all else is the user's code, run from the
same seed in fp64. What the code saw has to be the same: values, whether they require a gradient, types of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import megafx

RTOL = 1e-10
SITUATIONS: dict[str, Situation] = {}


@dataclass(frozen=True)
class Situation:
    """code(loop): the user's code. source: where such code, and what went wrong with it, is described.

    ranks: numbers of ranks on which it runs. data: forms of data parallelism in which it runs on two ranks more, each with half
    of the rows (`Loop.rows`). slow: at these only in the slow tests. like: another situation, which exercises the same
    mechanism and runs by default; this one runs in the slow tests alone.
    """

    code: Callable[[Loop], None]
    source: str
    ranks: tuple[int, ...]
    slow: tuple[int | str, ...]
    rtol: float
    data: tuple[str, ...] = ()
    like: str = ""


def situation(
    source: str,
    *,
    ranks: tuple[int, ...] = (1, 2),
    slow: tuple[int | str, ...] = (),
    rtol: float = RTOL,
    data: tuple[str, ...] = (),
    like: str = "",
) -> Callable[[Callable[[Loop], None]], Callable[[Loop], None]]:
    """Register a situation under the name of its function."""

    def register(code: Callable[[Loop], None]) -> Callable[[Loop], None]:
        assert code.__name__ not in SITUATIONS, f"two situations are called {code.__name__}"
        SITUATIONS[code.__name__] = Situation(code, source, ranks, slow, rtol, data, like)
        return code

    return register


@dataclass
class Loop:
    """One run of a situation. config: of the parallelized model; None in eager mode. seen: (name, value) in order."""

    config: megafx.Config | None
    seen: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def eager(self) -> bool:
        return self.config is None

    def model(self, model: nn.Module, *, example_inputs: Any = None, **options: Any) -> Any:
        """The model, parallelized unless in eager mode. options: fields of Config."""
        if self.config is None:
            return model
        config = megafx.Config.from_dict(self.config.to_dict() | options)
        return megafx.parallelize(model, config, example_inputs=example_inputs)

    @property
    def parts(self) -> int:
        """Numbers of data-parallel ranks."""
        return 1 if self.config is None else self.config.data_parallel_size or 1

    def rows(self, batch: Tensor) -> Tensor:
        """This rank's rows of a batch [rows, ...]: all of them but with data parallelism."""
        return batch if self.parts == 1 else batch.chunk(self.parts)[dist.get_rank()]

    def mean(self, value: Tensor) -> Tensor:
        """Of what data-parallel ranks computed of their own rows: a loss outside of the graph. Without a gradient."""
        if self.parts == 1:
            return value.detach()
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / self.parts

    def see(self, **values: Any) -> None:
        """Note values that have to be the same in eager mode: tensors, or structures with tensors and plain values."""
        self.seen += [(name, pytree.tree_map(_whole, value)) for name, value in values.items()]

    def see_gradients(self, model: nn.Module) -> None:
        """Note the gradient of each parameter, whole."""
        if self.eager:
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        else:
            found = megafx.full_gradients(model)
        self.see(**{f"gradient of {name}": found[name] for name in sorted(found)})

    def see_state(self, model: nn.Module) -> None:
        """Note all parameters and buffers, whole."""
        found = model.state_dict() if self.eager else megafx.full_state_dict(model)
        self.see(**{f"state {name}": found[name] for name in sorted(found)})

    def see_error(self, code: Callable[[], Any]) -> None:
        """Run code, and note the type of the error that it raises, if any."""
        error = None
        try:
            code()
        except Exception as raised:
            error = type(raised).__name__
        self.see(error=error)


def _whole(value: Any) -> Any:
    """(a plain copy, requires_grad) of a tensor; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    needs = value.requires_grad
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return torch.clone(value.detach()), needs


def run(name: str, config: megafx.Config) -> str:
    """Run a situation in eager mode and by `config`; what was compared, in words. AssertionError where anything differs."""
    each = SITUATIONS[name]
    runs = []
    for options in (None, config):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        try:
            loop = Loop(options)
            each.code(loop)
        finally:
            torch.set_default_dtype(before)
            torch.set_grad_enabled(True)
        runs.append(loop.seen)
    wanted, found = runs
    assert [n for n, _ in found] == [n for n, _ in wanted], f"eager saw {_names(wanted)}, megafx {_names(found)}"
    assert wanted, "the situation looks at nothing"
    for (what, a), (_, b) in zip(wanted, found, strict=True):
        for path, x, y in _pairs(a, b, what):
            _check_same(path, x, y, each.rtol)
    return f"{len(wanted)} values are eager's"


def _names(seen: list[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in seen]


def _pairs(wanted: Any, found: Any, what: str) -> Iterator[tuple[str, Any, Any]]:
    a, b = (pytree.tree_flatten_with_path(x)[0] for x in (wanted, found))
    assert [p for p, _ in a] == [p for p, _ in b], f"{what} is {found} where eager has {wanted}"
    for (path, x), (_, y) in zip(a, b, strict=True):
        yield f"{what}{pytree.keystr(path)}", x, y


def _check_same(what: str, wanted: Any, found: Any, rtol: float) -> None:
    if not isinstance(wanted, Tensor):
        same = wanted == found or (isinstance(wanted, float) and abs(wanted - found) <= rtol * abs(wanted))
        assert same, f"{what} is {found!r} where eager has {wanted!r}"
        return
    assert isinstance(found, Tensor) and found.shape == wanted.shape, f"{what}: {found} where eager has {wanted}"
    assert found.dtype == wanted.dtype, f"{what} is {found.dtype} where eager has {wanted.dtype}"
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), f"{what} differs"
        return
    assert torch.equal(found.isnan(), wanted.isnan()), f"{what} is NaN in other places"
    difference = float((found - wanted).nan_to_num(0.0, 0.0, 0.0).norm())
    scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).norm())
    assert difference <= rtol * max(scale, 1e-6), f"{what} is off by {difference / max(scale, 1e-300):.1e}"
