"""Hugging Face attention while a model is captured: masks that are causal, windows or padding are not made.

    with attention_of_capture(): ...        # transformers' "sdpa" attention and mask functions are ours

transformers makes a [b, 1, s, t] mask when it is traced, which shuts out the flash kernels. Here the mask function returns
that same mask with a tag that says what it is (`Shape`); if the model hands it to attention untouched, attention is
megafx.attention (or torch's, where that does) by the tag, and the mask is dead code. A mask that the model has changed, or
whose function is not known, has no tag: then all is as transformers has it. Does not import transformers before it is used.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

_TAG = "_megafx_shape"
_NAME = "sdpa"


class Shape(NamedTuple):
    """What a mask lets be seen: keys up to the query, |query - key| < window (0: all), keys where padding [b, t] is True."""

    causal: bool
    window: int
    padding: Tensor | None


@contextlib.contextmanager
def attention_of_capture() -> Iterator[None]:
    """Replaces the entries "sdpa" of transformers' registries, and puts them back."""
    try:
        from transformers import masking_utils
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as attentions
    except ImportError:  # no transformers, or one without these interfaces: its models are captured as they are
        yield
        return
    old_mask, old_attention = masks[_NAME], attentions[_NAME]
    old_packed = getattr(masking_utils, "find_packed_sequence_indices", None)
    masks[_NAME], attentions[_NAME] = _mask_function(old_mask), _attention_function(old_attention)
    if old_packed is not None:
        masking_utils.find_packed_sequence_indices = _packed_function(old_packed)
    try:
        yield
    finally:
        if old_packed is not None:
            masking_utils.find_packed_sequence_indices = old_packed
        for registry, old in ((masks, old_mask), (attentions, old_attention)):
            del registry[_NAME]  # the local entry: the library's own shows again
            if registry[_NAME] is not old:
                registry[_NAME] = old


def _mask_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        if isinstance(made, Tensor) and not args:
            shape = _shape_of(made, kwargs)
            if shape is not None:
                setattr(made, _TAG, shape)
        return made

    return mask


def _shape_of(made: Tensor, kwargs: dict[str, Any]) -> Shape | None:
    """The arguments of transformers' mask functions -> what the mask is; None where that cannot be told."""
    seen = _seen_by(kwargs.get("mask_function"))
    padding = kwargs.get("attention_mask")
    at_zero = all(isinstance(kwargs.get(k, 0), int) and kwargs.get(k, 0) == 0 for k in ("q_offset", "kv_offset"))
    if seen is None or not at_zero or made.dim() != 4:
        return None
    if padding is not None and (padding.dim() != 2 or padding.dtype != torch.bool):
        return None
    if padding is not None and padding.shape[1] != made.shape[3]:
        return None
    return Shape(*seen, padding)


def _seen_by(function: Any) -> tuple[bool, int] | None:
    """(causal, window) of the mask functions that transformers makes itself."""
    from transformers import masking_utils as hf

    if function is None or function is hf.causal_mask_function:
        return True, 0
    if function is hf.bidirectional_mask_function:
        return False, 0
    parts = _cell(function, "and_masks", "mask_functions")
    if not isinstance(parts, tuple) or len(parts) != 2:
        return None
    overlay, rest = parts
    width = _cell(overlay, "sliding_window_overlay", "sliding_window")
    if isinstance(width, int) and rest is hf.causal_mask_function:
        return True, width
    width = _cell(overlay, "sliding_window_bidirectional_overlay", "sliding_window")
    if isinstance(width, int) and rest is hf.bidirectional_mask_function:
        return False, width + 1
    return None


_SAME_STEPS = ("unsqueeze", "expand", "view", "reshape", "clone", "to", "_to_copy", "detach", "alias", "add")


def _packed_function(original: Callable[..., Any]) -> Callable[..., Any]:
    """Positions 0, 1, 2, ... are one sequence a row. transformers sees that by their values, which a trace has not."""

    def packed(position_ids: Tensor) -> Any:
        return None if _counts(position_ids) else original(position_ids)

    return packed


def _counts(position_ids: Tensor) -> bool:
    """Whether each row of a traced tensor is an arange, whatever it starts at."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(position_ids, mode.tracer, None)
    node = getattr(getattr(slot, "proxy", None), "node", None)
    while isinstance(node, fx.Node) and node.op == "call_function":
        name = str(node.target).split(".")[1] if "." in str(node.target) else ""
        if name == "arange":
            return len(node.args) < 3 or bool(node.args[2] == 1)
        plain = name != "add" or isinstance(node.args[1], int)
        node = node.args[0] if name in _SAME_STEPS and plain else None
    return False


def _cell(function: Any, maker: str, variable: str) -> Any:
    """A variable that a function which `maker` returned has closed over."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>"):
        return None
    names = function.__code__.co_freevars
    return function.__closure__[names.index(variable)].cell_contents if variable in names else None


def _attention_function(original: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        shape: Shape | None = getattr(attention_mask, _TAG, None)
        if shape is None and attention_mask is None and (position_bias is not None or softcap):
            given = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            shape = Shape(given is True, 0, None) if isinstance(given, bool) else None
        same_batch = key.shape[0] == query.shape[0] == value.shape[0]
        if shape is None or kwargs.get("cache") is not None or not same_batch or query.shape[2] == 1:
            extra = {} if softcap is None else {"softcap": softcap}
            return original(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal,
                position_bias=position_bias, **extra, **kwargs,
            )  # fmt: skip
        mask, key_mask = shape.padding, None
        if position_bias is not None:
            mask = position_bias
            if shape.padding is not None:
                hidden = torch.finfo(position_bias.dtype).min
                key_mask = torch.zeros_like(shape.padding, dtype=position_bias.dtype).masked_fill(
                    ~shape.padding, hidden
                )
        scale = scaling if scaling is not None else 1.0 / math.sqrt(query.shape[-1])
        rest: tuple[Any, ...] = (
            key_mask,
            None,
            float(scale),
            shape.causal,
            shape.window,
            float(softcap or 0.0),
            float(dropout),
            -1,
            -1,
            [],
            "tp",
        )
        out = torch.ops.megafx.attention(query, key, value, mask, *rest)
        return out.transpose(1, 2).contiguous(), None

    return attention
