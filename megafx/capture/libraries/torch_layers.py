"""Layers of torch.nn that ask for values of masks, while a model is captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import transformer

_CAUSAL = (
    "whether a mask is causal is asked of its values: attention takes the mask, and describe_masks reads what it is"
)
_NESTED = "padding that nn.TransformerEncoder leaves out in evaluation is zero behind its layers: it asks for values"


def layer_replacements(model: nn.Module) -> Iterator[tuple[Any, str, Callable[[Any], Any], str]]:
    """(object, name, old -> new, why)."""
    if any(isinstance(m, (nn.TransformerEncoder, nn.TransformerDecoder)) for m in model.modules()):
        yield transformer, "_detect_is_causal_mask", lambda old: _is_causal, _CAUSAL
        yield nn.TransformerEncoder, "forward", _without_padding, _NESTED


def _is_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    return is_causal is True


def _without_padding(old: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(old)
    def forward(
        self: nn.TransformerEncoder, src: Tensor, mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None, is_causal: bool | None = None,
    ) -> Tensor:  # fmt: skip
        if not _nests(self, src, mask, src_key_padding_mask):
            return old(self, src, mask, src_key_padding_mask, is_causal)
        assert src_key_padding_mask is not None
        norm = self._modules.get("norm")
        try:
            if norm is not None:
                self._modules["norm"] = None
            output = old(self, src, mask, src_key_padding_mask, is_causal)
        finally:
            if norm is not None:
                self._modules["norm"] = norm
        keep = src_key_padding_mask.logical_not()
        gone = ~keep
        if getattr(self, "mask_check", True):  # else no row has padding before a token
            gone = gone & ~(keep[:, 1:] & ~keep[:, :-1]).any()
        output = output.masked_fill(gone[..., None], 0.0)
        return output if norm is None else norm(output)

    return forward


def _nests(encoder: nn.TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None) -> bool:
    """True if the layers compute with a nested tensor, if padding is behind the tokens in all rows: as torch decides."""
    first: Any = encoder.layers[0]
    if not torch.backends.mha.get_fastpath_enabled() or not getattr(encoder, "use_nested_tensor", False):
        return False
    if first.training or src.dim() != 3 or padding is None or mask is not None or torch.is_autocast_enabled():
        return False
    return not (torch.is_grad_enabled() and (src.requires_grad or any(p.requires_grad for p in first.parameters())))
