"""FlexAttention in a trace: what `score_mod` and `mask_mod` compute, as ops of whole tensors.

torch's flex_attention hands functions of single elements to a compiler. While a model is traced they are called once, with
indices [b, 1, 1, 1], [1, h, 1, 1], [1, 1, q, 1] and [1, 1, 1, k], so that elementwise code gives the values of all pairs by
broadcasting; what is not elementwise is an error. A mask is then the mask of attention, and what it is (causal, a window,
documents, a prefix) is read as of any other model (analysis/masks.py). A score that is scaled, soft-capped and added to is
attention with a bias; another one is computed in full, [b, h, q, k], and so are log-sum-exps.

A BlockMask is its mask_mod here: no table of blocks is made or read.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megafx.capture.eager_parts import calling
from megafx.errors import CaptureError
from megafx.ir.block_masks import MODULE, mask_argument
from megafx.ir.source_lines import current_user_line
from megafx.meanwhile import meanwhile

# Functions of elements: their names as methods, functions and operators.
_OF_TWO = (
    "add sub subtract mul multiply div divide truediv true_divide floordiv floor_divide mod remainder fmod pow "
    "eq ne lt le gt ge greater greater_equal less less_equal not_equal and or xor logical_and logical_or logical_xor "
    "bitwise_and bitwise_or bitwise_xor lshift rshift minimum maximum rsub where masked_fill lerp"
)
_OF_ONE = (
    "neg negative pos abs absolute invert logical_not bitwise_not clamp clip clamp_min clamp_max exp exp2 expm1 log log2 log10 "
    "log1p sqrt rsqrt square reciprocal tanh sigmoid sin cos tan erf relu gelu silu softplus leaky_relu floor ceil round trunc "
    "sign isinf isnan isneginf isposinf to type float double half bfloat16 int long short bool detach clone "
    "ones_like zeros_like full_like"
)
_ELEMENTWISE = frozenset(
    form for name in f"{_OF_TWO} {_OF_ONE}".split() for form in (name, f"__{name}__", f"__r{name}__")
)
_ATTRIBUTES = (Tensor.device, Tensor.dtype, Tensor.is_cuda, Tensor.requires_grad)  # what code may ask of an element
_MADE = ("new_zeros", "new_ones", "new_full", "new_tensor")  # constants: of one element


class _Elements(TorchFunctionMode):
    """Within, functions of elements (tensors that were made from indices) are run on all of them, and others refused."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.known: dict[int, Tensor] = {}

    def of(self, *elements: Tensor) -> tuple[Tensor, ...]:
        self.known.update((id(x), x) for x in elements)
        return elements

    def has(self, value: Any) -> bool:
        return isinstance(value, Tensor) and id(value) in self.known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if not any(map(self.has, leaves)):
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", str(func))
        whole = [x for x in leaves if isinstance(x, Tensor) and not self.has(x) and x.dim()]
        if name == "__get__":
            allowed = any(getattr(func, "__self__", None) is each for each in _ATTRIBUTES)
        elif name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            single = all(self.has(i) or isinstance(i, int) or (isinstance(i, Tensor) and not i.dim()) for i in index)
            allowed = not self.has(args[0]) and single and len(index) == args[0].dim()
        else:
            allowed = (name in _ELEMENTWISE and not whole) or name in _MADE
        if not allowed:
            raise CaptureError(
                f"{self.name} calls {name.strip('_')!r} of an element, which megafx does not read as a function of elements",
                source=current_user_line(),
                fix="write it with arithmetic, comparisons and torch.where, and index a tensor by as many indices as it has "
                "dims (table[h, q_idx], not table[h][q_idx])",
            )
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.of(found)
        return found


class _Beyond(Exception):
    """A score that attention has no words for."""


class _Score:
    """outer tanh(inner s) + bias, or inner s + bias, of a score s = q k. hidden: where it is -inf, or None."""

    def __init__(
        self, inner: float, outer: float | None = None, bias: Any = None, hidden: Tensor | None = None
    ) -> None:
        self.inner, self.outer, self.bias, self.hidden = inner, outer, bias, hidden

    def _times(self, factor: Any) -> _Score:
        if not isinstance(factor, (int, float)) or self.bias is not None or (self.hidden is not None and factor <= 0):
            raise _Beyond
        if self.outer is None:
            return _Score(self.inner * factor, None, None, self.hidden)
        return _Score(self.inner, self.outer * factor, None, self.hidden)

    def _plus(self, other: Any, sign: int = 1) -> _Score:
        if isinstance(other, _Score) or not isinstance(other, (int, float, Tensor)):
            raise _Beyond
        more = other if sign == 1 else -other
        return _Score(self.inner, self.outer, more if self.bias is None else self.bias + more, self.hidden)

    def __add__(self, other: Any) -> _Score:
        return self._plus(other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> _Score:
        return self._plus(other, -1)

    def __mul__(self, other: Any) -> _Score:
        return self._times(other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> _Score:
        return self._times(1 / other if isinstance(other, (int, float)) and other else None)

    def tanh(self) -> _Score:
        if self.outer is not None or self.bias is not None or self.hidden is not None:
            raise _Beyond
        return _Score(self.inner, 1.0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if func is torch.where and len(args) == 3 and isinstance(args[1], _Score) and args[2] == -math.inf:
            score, cond = args[1], args[0]
            hidden = ~cond if score.hidden is None else score.hidden | ~cond
            return _Score(score.inner, score.outer, score.bias, hidden)
        by_name = {"add": "__radd__", "sub": None, "mul": "__rmul__"}.get(func.__name__.strip("_"))
        if by_name is not None and len(args) == 2 and isinstance(args[1], _Score) and not kwargs:
            return getattr(args[1], by_name)(args[0])
        raise _Beyond

    def __getattr__(self, name: str) -> Any:
        raise _Beyond(name)


class _Pairs(NamedTuple):
    """The pairs of queries and keys of a call: sizes, and where its tensors are."""

    sizes: tuple[Any, Any, Any, Any]
    device: torch.device

    def indices(self) -> tuple[Tensor, ...]:
        made = [torch.arange(n, device=self.device) for n in self.sizes]
        return tuple(x.view(*[1] * d, -1, *[1] * (3 - d)) for d, x in enumerate(made))

    def of(self, function: Callable[..., Any], *first: Any) -> Any:
        """function(*first, b, h, q, k) of all pairs, broadcastable to [b, h, q, k]."""
        elements = _Elements(getattr(function, "__name__", "a function of FlexAttention"))
        indices = elements.of(*self.indices())
        elements.of(*(x for x in first if isinstance(x, Tensor)))
        with elements:
            found = function(*first, *indices)
        if isinstance(found, Tensor):
            for _ in range(4 - found.dim()):
                found = found.unsqueeze(0)
        return found


def _mask_of(block_mask: Any, pairs: _Pairs, note: Callable[[str], None]) -> Tensor | None:
    from torch.nn.attention import flex_attention as flex

    if block_mask is None or block_mask.mask_mod is flex.noop_mask:
        made_here = block_mask is None or isinstance(block_mask, _described())
        if not made_here and block_mask.BLOCK_SIZE[0] < flex._LARGE_SPARSE_BLOCK_SIZE:
            raise CaptureError(
                "a BlockMask that was made from a table of blocks, without a mask_mod",
                source=current_user_line(),
                fix="make it by create_block_mask, with a mask_mod that says which keys a query sees",
            )
        return None
    if block_mask.mask_mod is flex._sliced_mask_mod_error:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    if not isinstance(block_mask, (_described(), mask_argument())):
        note("of a BlockMask that is made outside of forward mask_mod is read, and not its table of blocks")
    wanted, found = (pairs.sizes[2], pairs.sizes[3]), tuple(block_mask.seq_lengths)
    if any(bool(a != b) for a, b in zip(wanted, found, strict=True)):
        raise ValueError(f"block_mask was created for {found} queries and keys but got {wanted}")
    mask: Tensor = pairs.of(block_mask.mask_mod)
    return mask


def flex_attention(
    note: Callable[[str], None], query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None,
    scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
    return_aux: Any = None,
) -> Any:  # fmt: skip
    """torch's, its refusals included, except note(text), which informs the user."""
    from torch.nn.attention import flex_attention as flex

    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError(
            "Expect query and key/value to have the same number of heads. Try setting enable_gqa=True for GQA."
        )
    pairs = _Pairs((*query.shape[:3], key.shape[2]), query.device)
    mask = _mask_of(block_mask, pairs, note)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    if key.shape[0] == 1:
        key, value = (x.expand(query.shape[0], -1, -1, -1) for x in (key, value))
    if not return_lse and return_aux is None:
        try:
            score = _Score(scale) if score_mod in (None, flex._identity) else pairs.of(score_mod, _Score(scale))
            if isinstance(score, _Score):
                return _attention(query, key, value, score, mask)
        except _Beyond:
            pass
    name = getattr(score_mod, "__name__", "score_mod")
    note(f"flex_attention with {name}: the scores of all pairs of tokens are made, [batch, heads, queries, keys]")
    out, lse, largest = _in_full(query, key, value, score_mod, mask, scale, pairs)
    return _results(out, lse, largest, return_lse, return_aux)


def _results(out: Tensor, lse: Tensor, largest: Tensor, return_lse: bool, return_aux: Any) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    if return_aux is None:
        return (out, lse) if return_lse else out
    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=largest if return_aux.max_scores else None)


def _attention(q: Tensor, k: Tensor, v: Tensor, score: _Score, mask: Tensor | None) -> Tensor:
    if score.hidden is not None:
        mask = ~score.hidden if mask is None else mask & ~score.hidden
    # a number that is added to all scores changes no weight
    bias = score.bias if isinstance(score.bias, Tensor) else None
    grouped = q.shape[1] != k.shape[1]
    if bias is not None:
        for _ in range(4 - bias.dim()):
            bias = bias.unsqueeze(0)
        bias = bias.to(_wide(q))  # that of the scores
        mask = bias if mask is None else torch.where(mask, bias, -math.inf)
    if score.outer is None and (bias is None or bias.dtype == q.dtype):
        return F.scaled_dot_product_attention(q, k, v, mask, scale=score.inner, enable_gqa=grouped)
    cap = score.outer or 0.0
    if cap < 0 or score.outer == 0:
        raise _Beyond
    options: Any = (score.inner * (cap or 1.0), False, 0, cap, 0, 0.0, -1, -1, [], "tp")
    found: Tensor = torch.ops.megafx.attention(q, k, v, mask, None, None, None, None, *options)
    return found


def _wide(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _in_full(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask: Tensor | None, scale: float, pairs: _Pairs
) -> tuple[Tensor, Tensor, Tensor]:
    """out, log-sum-exps and largest scores, as torch's math_attention has them."""
    wide = _wide(q)
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q.to(wide) @ k.to(wide).transpose(-2, -1)) * scale
    if score_mod is not None:
        scores = pairs.of(score_mod, scores)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf)
    unseen = (scores == -math.inf).all(-1, keepdim=True)
    shown = torch.where(unseen, 0.0, scores)
    weights = torch.where(unseen, 0.0, shown.softmax(-1))
    lse = torch.where(unseen, -math.inf, shown.logsumexp(-1, keepdim=True)).squeeze(-1)
    return weights.to(q.dtype) @ v, lse, scores.amax(-1)


@functools.cache
def _described() -> type:
    from torch.nn.attention.flex_attention import BlockMask

    class Described(BlockMask):
        """A BlockMask of which a trace knows its mask_mod and its lengths."""

        def __init__(self, mask_mod: Any, sizes: tuple[Any, ...], block: Any) -> None:
            self.mask_mod, self.seq_lengths = mask_mod, (sizes[2], sizes[3])
            self.BLOCK_SIZE = (block, block) if isinstance(block, int) else block
            self._sizes = sizes

        @property
        def shape(self) -> tuple[Any, ...]:
            return self._sizes

        def to(self, device: Any) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:
            raise CaptureError(
                f"forward reads '{name}' of a BlockMask, whose table of blocks a graph does not have",
                source=current_user_line(),
                fix="give the BlockMask to flex_attention as it is",
            )

        def __getitem__(self, index: Any) -> Any:
            return self.__getattr__("[...]")

    return Described


def create_block_mask(
    note: Any, mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None, BLOCK_SIZE: Any = 128, *rest: Any,
    **more: Any,
) -> Any:  # fmt: skip
    return _described()(mask_mod, (B or 1, H or 1, Q_LEN, KV_LEN), BLOCK_SIZE)


def create_mask(note: Any, mod_fn: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any = None) -> Tensor:
    from torch.nn.attention import flex_attention as flex

    pairs = _Pairs((B or 1, H or 1, Q_LEN, KV_LEN), torch.device(device or "cpu"))
    if flex._get_mod_type(mod_fn) == flex._ModificationType.SCORE_MOD:
        scores: Tensor = pairs.of(mod_fn, torch.zeros(pairs.sizes, device=pairs.device))
        return ~torch.isneginf(scores).expand(pairs.sizes)
    mask: Tensor = pairs.of(mod_fn)
    return mask.expand(pairs.sizes)


@contextlib.contextmanager
def flex_on_cpu() -> Iterator[None]:
    """Within, torch's flex_attention has gradients on CPUs, where it refuses them: by torch's own plain form of it."""
    module: Any = sys.modules.get(MODULE)
    if module is None:
        yield
        return
    function = module.flex_attention
    before = function.__code__
    own = FunctionType(before, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__

    def called(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        needs = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        return (_plain if needs and query.device.type == "cpu" else own)(query, key, value, *args, **kwargs)

    with meanwhile(function, __code__=calling(called, before)), as_written():
        yield


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within, torch.compile(flex_attention) runs flex_attention: its compiler cannot trace what replaces it."""
    compiles = MODULE in sys.modules and "torch._dynamo.eval_frame" in sys.modules
    stance: Any = torch.compiler.set_stance("force_eager") if compiles else contextlib.nullcontext()
    with stance:
        yield


def _plain(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention import flex_attention as flex

    blocks = block_mask or flex._create_empty_block_mask(query, key)
    scale = query.size(-1) ** -0.5 if scale is None else scale
    mod = score_mod or flex._identity
    out, lse, largest = math_attention(query, key, value, mod, blocks.as_tuple(), scale, {})
    return _results(out, lse * math.log(2), largest * math.log(2), return_lse, return_aux)


def flex_replacements(note: Callable[[str], None]) -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """(function of torch, '__code__', what its code is meanwhile): names under which they were imported lead there, too."""
    module: Any = sys.modules.get(MODULE)
    if module is None:
        return []
    pairs = ((getattr(module, f.__name__), f) for f in (flex_attention, create_block_mask, create_mask))
    return [(old, "__code__", functools.partial(_code, old, functools.partial(new, note))) for old, new in pairs]


def _code(function: FunctionType, new: Callable[..., Any], old: CodeType) -> CodeType:
    """Code that calls `new` in this thread, and what was there in others."""
    own = FunctionType(old, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    thread = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == thread else own)(*args, **kwargs)

    return calling(called, old)
