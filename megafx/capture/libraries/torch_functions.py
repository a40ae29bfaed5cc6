"""Functions of torch that torch.export cannot trace as they are, while a model is captured.

    torch.cov, corrcoef, combinations, multinomial,         are written out, as torch computes them
    embedding_bag of [rows, n]
    ctc_loss, unique, unique_consecutive, histogram         a call is a node: torch's own code, on whole tensors on every rank
    scatter_add, scatter_reduce, scatter, index_reduce      with a constant index: the graph is for the size of that

torch.export reads values for the first, has no form of their results for the second (sizes that values decide), and takes the
index of one trace for one of any size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from megafx.ir.call_spec import ambient_autocast
from megafx.ir.source_lines import current_user_line
from megafx.ops.eager_call import DataSize, EagerCall, ResultSize, as_node, differentiable
from megafx.ops.eager_probes import kept_leaf


def in_place_of(
    name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], note: Callable[[str], None]
) -> Any:
    """What a call of a function of torch, or of a method of this name, gives in a trace; None where it can be traced."""
    if name in _WITH_INDEX:
        _for_the_index(*args, **kwargs)
        return None
    made = _WRITTEN_OUT.get(name) or (_node if name in _RESULTS else None)
    if made is None or not any(isinstance(x, FakeTensor) for x in args):
        return None
    if made is not _node:
        return made(*args, **kwargs)
    note(f"{current_user_line()}: torch.{name} is not captured: it runs in each call, on whole tensors, on every rank")
    return _node(name, function, args, kwargs)


# -- written out


def _cov(x: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None) -> Tensor:
    """x [variables, observations] -> [variables, variables]."""
    x = x if x.dim() == 2 else x.reshape(1, -1)
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    count: Any = x.shape[1] if weights is None else weights.sum()
    mean = (x if weights is None else x * weights).sum(1) / count
    factor = count - correction
    if weights is not None and aweights is not None and correction != 0:
        factor = count - correction * (weights * aweights).sum() / count
    if isinstance(factor, Tensor):
        factor = factor.clamp(min=0)
    x = x - mean[:, None]
    products = x @ (x if weights is None else x * weights).t().conj()
    return (products / factor).squeeze()


def _corrcoef(x: Tensor) -> Tensor:
    found = _cov(x)
    if found.dim() == 0:
        return found / found
    diagonal = found.diagonal()
    deviations = (diagonal.real if found.is_complex() else diagonal).sqrt()
    found = found / deviations[:, None] / deviations[None]
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


def _combinations(x: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor | None:
    """x [n] -> [combinations, r]; None where it is left to torch."""
    n: Any = x.shape[0]
    if x.dim() != 1 or r < 1 or (isinstance(n, torch.SymInt) and r > 2):
        return None
    if r == 1:
        return x[:, None]
    if r == 2:
        rows, columns = torch.triu_indices(n, n, int(not with_replacement), device=x.device)
        return torch.stack([x[rows], x[columns]], 1)
    choose = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    return x[torch.tensor([*choose(range(n), r)], dtype=torch.int64, device=x.device).reshape(-1, r)]


def _multinomial(
    x: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor | None:
    """x [..., classes], weights -> [..., num_samples], indices: those of the least exponential times, as torch draws one."""
    if generator is not None or not x.is_floating_point():
        return None
    x = x.detach()
    if replacement and num_samples != 1:
        x = x[..., None, :].expand(*x.shape[:-1], num_samples, x.shape[-1])
        return (x / torch.empty_like(x).exponential_()).argmax(-1)
    return (x / torch.empty_like(x).exponential_()).topk(num_samples, -1).indices


def _bags(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    """ids [rows, n] -> [rows, h]; None where it is left to torch, which numbers the bags of all rows."""
    other = offsets is not None or max_norm is not None or scale_grad_by_freq or sparse or include_last_offset
    if other or ids.is_floating_point() or ids.dim() != 2 or (padding_idx is not None and mode == "max"):
        return None
    found = nn.functional.embedding(ids, weight)
    if mode == "max":
        return found.max(1).values
    if padding_idx is not None:
        keep = (ids != padding_idx % weight.shape[0])[..., None]
        found = found * keep
    if per_sample_weights is not None:
        found = found * per_sample_weights[..., None]
    if mode == "sum" or padding_idx is None:
        return found.sum(1) if mode == "sum" else found.mean(1)
    return found.sum(1) / keep.sum(1).clamp(min=1)


_WRITTEN_OUT: dict[str, Callable[..., Tensor | None]] = {
    "cov": _cov,
    "corrcoef": _corrcoef,
    "combinations": _combinations,
    "embedding_bag": _bags,
    "multinomial": _multinomial,
}


# -- as a node


class _Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


_modules: dict[Any, _Call] = {}  # graphs hold weak references


@dataclass(frozen=True)
class _Result:
    """A tensor that a call returns."""

    dtype: torch.dtype
    sizes: tuple[ResultSize | DataSize, ...]


def _node(name: str, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    results, out_spec = pytree.tree_flatten(_RESULTS[name](*args, **kwargs))
    module = _modules.setdefault(function, _Call(function))
    held = tuple(kept_leaf(x, tensors, name) for x in leaves)
    call = EagerCall(
        weakref.ref(module), f"torch.{name}", spec, held, (), tuple(ambient_autocast()), differentiable(tensors),
        results=tuple((r.dtype, r.sizes) for r in results), out_spec=out_spec, out_leaves=(None,) * len(results),
        on_host=(tensors[0].device.type == "cpu",) * len(results),
    )  # fmt: skip
    found = as_node(call, tensors)
    if name in ("unique", "unique_consecutive") and len(results) > 1 and isinstance(results[-1].sizes[0], DataSize):
        rows = results[0].sizes.index(DataSize(0))
        torch._check(found[-1].shape[0] == found[0].shape[rows])
    return found


def _sizes(x: Tensor, number: int = 0) -> list[Any]:
    """Those of x, the number-th tensor of the call."""
    return [ResultSize(sympy.Integer(1), ((number, d),)) for d in range(x.dim())]


def _ctc_loss(
    log_probs: Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str | int = "mean", zero_infinity: bool = False,
) -> _Result:  # fmt: skip
    """log_probs [length, batch, classes], or without batch."""
    each = reduction in ("none", 0) and log_probs.dim() == 3
    return _Result(log_probs.dtype, (_sizes(log_probs)[1],) if each else ())


def _unique(
    x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    own = _sizes(x)
    sizes: list[Any] = [DataSize(0)]
    if dim is not None:
        sizes = [DataSize(0) if d == dim % x.dim() else size for d, size in enumerate(own)]
        own = [own[dim]]
    found = [_Result(x.dtype, tuple(sizes))]
    found += [_Result(torch.int64, tuple(own))] if return_inverse else []
    found += [_Result(torch.int64, (DataSize(1),))] if return_counts else []
    return tuple(found) if len(found) > 1 else found[0]


def _unique_consecutive(
    x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    return _unique(x, True, return_inverse, return_counts, dim)


def _histogram(x: Tensor, bins: Tensor | int, **options: Any) -> Any:
    if isinstance(bins, Tensor):
        (edges,) = _sizes(bins, 1)
        counts = ResultSize(sympy.Integer(bins.shape[0] - 1), ())
    else:
        counts, edges = (ResultSize(sympy.Integer(n), ()) for n in (bins, bins + 1))
    found: Any = (_Result(x.dtype, (counts,)), _Result(x.dtype, (edges,)))  # in place of tensors
    return torch.return_types.histogram(found)


_RESULTS: dict[str, Callable[..., Any]] = {
    "ctc_loss": _ctc_loss,
    "unique": _unique,
    "unique_consecutive": _unique_consecutive,
    "histogram": _histogram,
}


# -- for one size

_WITH_INDEX = (
    *("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"),
    *("index_reduce", "index_reduce_"),
)


def _for_the_index(*args: Any, **kwargs: Any) -> None:
    """Ask whether sizes of what is scattered are those of the index, where these are constants: backward takes them to be."""
    places = dict(zip(("self", "dim", "index", "src"), args, strict=False)) | kwargs
    dim, index = places.get("dim"), places.get("index")
    source = places.get("source", places.get("src"))
    if not isinstance(index, Tensor) or not isinstance(source, Tensor) or not isinstance(dim, int):
        return
    sizes = [source.shape[dim]] if index.dim() < source.dim() else source.shape
    for size, of_index in zip(sizes, index.shape, strict=False):
        if isinstance(size, torch.SymInt) and not isinstance(of_index, torch.SymInt) and size.node.has_hint():
            bool(size == of_index)  # a condition under which the graph serves a call
