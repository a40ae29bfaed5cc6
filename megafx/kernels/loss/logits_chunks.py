"""Logits of a linear layer, a chunk of tokens at a time, in one buffer; and the products of their gradient.

A vocabulary that is no multiple of CLASS_ALIGNMENT is padded with zero rows of the weight, copied once a call: products with
50257 columns, or over 50257 rows, run in kernels without vector loads, several times slower, and rows of the logits that are
apart by a multiple of 64 do not change that (benchmarks/head_products.py). The padding's logits are zero, and so are their
gradients.

fp16: gradients of logits are held times FP16_FACTOR, so that small probabilities survive; products divide by it in fp32,
before they round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megafx.kernels.common.op import wide
from megafx.kernels.products_fp32 import add_product_

CLASS_ALIGNMENT = 64
CHUNK_BYTES = 1 << 30  # benchmarks/head_products.py compares
MOST_CHUNKS = 8
FP16_FACTOR = 1024.0


def chunk_rows(tokens: int, classes: int, itemsize: int) -> int:
    """Tokens a chunk, a multiple of 128; chunks are of about the same size."""
    fit = max(1, CHUNK_BYTES // max(1, classes * itemsize))
    chunks = min(MOST_CHUNKS, max(1, -(-tokens // fit)))
    return max(128, -(-tokens // (chunks * 128)) * 128)


def chunk_bytes(x: Sequence[int], weight: Sequence[int], itemsize: int) -> int:
    """Bytes of the buffer of logits, and of a padded weight, for operands of these shapes on CUDA."""
    classes = -(-weight[0] // CLASS_ALIGNMENT) * CLASS_ALIGNMENT
    copied = classes * weight[1] if classes != weight[0] else 0
    return (min(chunk_rows(x[0], weight[0], itemsize), x[0]) * classes + copied) * itemsize


def class_padding(classes: int, device: torch.device) -> int:
    """Rows of zeros behind the weight."""
    return -classes % CLASS_ALIGNMENT if device.type == "cuda" else 0


class LogitsChunks:
    """x [T, K] and a linear layer (weight [V, K], bias [V] or none), whose logits [T, V] are made a chunk at a time.

    dtype: of the logits, that of x by default.
    """

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None) -> None:
        self.x, self.classes, self.dtype = x.contiguous(), weight.shape[0], dtype or x.dtype
        padding = class_padding(self.classes, x.device)
        self.weight, self.bias = padded(weight, padding), None if bias is None else padded(bias, padding)
        self.rows = chunk_rows(len(x), self.classes, self.dtype.itemsize)
        self.buffer = x.new_empty(min(self.rows, len(x)), self.classes + padding, dtype=self.dtype)

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, their logits); the logits are overwritten by the next ones."""
        for start in range(0, len(self.x), self.rows):
            rows = slice(start, min(start + self.rows, len(self.x)))
            out = self.buffer[: rows.stop - rows.start]
            self.fill(rows, out)
            yield rows, out[:, : self.classes]

    def fill(self, rows: slice, out: Tensor) -> None:
        """out: the logits of these tokens."""
        if self.bias is None:
            torch.mm(self.x[rows], self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, self.x[rows], self.weight.t(), out=out)

    def gradients(self, factor: float, fp32: bool, largest: Callable[[], Tensor]) -> LayerGradients:
        """largest: gives a bound of the magnitude of the logits' gradients, times factor, for who needs one."""
        return LayerGradients(self, factor, fp32)


def padded(x: Tensor, rows: int) -> Tensor:
    """With zero rows behind its own."""
    return torch.cat([x, x.new_zeros(rows, *x.shape[1:])]) if rows else x


class LayerGradients:
    """Gradients of x, weight and bias (None without one), from those of the logits by chunks.

    factor: what the gradients of the logits are held times. fp32: the weight's gradient is never rounded to bf16 or fp16.
    """

    def __init__(self, chunks: LogitsChunks, factor: float = 1.0, fp32: bool = False) -> None:
        self.chunks, self.alpha, self.started = chunks, 1.0 / factor, False
        x, bias, dtype = chunks.x, chunks.bias, chunks.dtype
        self.x = torch.empty(x.shape, dtype=dtype, device=x.device)
        self._weight = torch.empty(chunks.weight.shape, dtype=wide(dtype) if fp32 else dtype, device=x.device)
        self._bias = None if bias is None else torch.zeros(bias.shape, dtype=wide(dtype), device=x.device)
        if not len(x):
            self._weight.zero_()

    @property
    def weight(self) -> Tensor:
        return self._weight[: self.chunks.classes]

    @property
    def bias(self) -> Tensor | None:
        return None if self._bias is None else self._bias[: self.chunks.classes]

    def add(self, rows: slice) -> None:
        """What these tokens give: the gradient of their logits has taken the logits' place."""
        grad = self.chunks.buffer[: rows.stop - rows.start]
        self.add_products(rows, grad)
        if self._bias is not None:
            self._bias += grad.sum(0, dtype=self._bias.dtype) * self.alpha
        self.started = True

    def add_products(self, rows: slice, grad: Tensor) -> None:
        _product(grad, self.chunks.weight, self.x[rows], self.alpha, 0.0)
        _product(grad.t(), self.chunks.x[rows], self._weight, self.alpha, 1.0 if self.started else 0.0)


def _product(a: Tensor, b: Tensor, out: Tensor, alpha: float, beta: float) -> None:
    """out = beta out + alpha a b."""
    if out.dtype != a.dtype:
        add_product_(out, a, b, beta, alpha)
    elif alpha == 1.0 and beta == 0.0:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
