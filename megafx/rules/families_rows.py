"""Families of ops that compute each row by itself, for the axes that cut a batch into equal parts.

On the other axes such an op is whole: its dims may be padded there, at which some of these have poles, and its gradient is
an op of its own. Dims are f0, f1, ... by position, as in the other families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from megafx.rules.families import Arg, OpCall

Rows = Callable[[OpCall], "str | None"]
BY_ROWS: dict[str, Rows] = {}


def _rows(ops: str) -> Callable[[Rows], Rows]:
    def register(function: Rows) -> Rows:
        BY_ROWS.update({f"aten.{op}" if "." in op else f"aten.{op}.default": function for op in ops.split()})
        return function

    return register


def _but(shape: Sequence[int], whole: Iterable[int], letter: str = "x") -> str:
    """Dims of a shape, of which those at some positions are whole, and have a name of their own."""
    whole = {d % max(len(shape), 1) for d in whole}
    return " ".join(f"{letter}{i}!" if i in whole else f"f{i}" for i in range(len(shape)))


@_rows(
    "frexp.Tensor i0 ldexp.Tensor mvlgamma polygamma special_entr special_erfcx special_i0e special_i1 special_i1e "
    "special_log_ndtr special_ndtri angle complex"
)
def _elementwise(call: OpCall) -> str:
    return (
        f"nl: {', '.join('...' for v in call.values if isinstance(v, Arg))} -> {'; '.join('...' for _ in call.results)}"
    )


@_rows(
    "_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d max_pool2d_with_indices max_pool3d_with_indices "
    "max_unpool2d max_unpool3d upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec "
    "upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec _upsample_nearest_exact1d.vec "
    "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec _upsample_bilinear2d_aa.vec"
)
def _over_space(call: OpCall) -> str:
    """The last n dims are read together, and come out with other sizes."""
    n = int(re.findall(r"(\d)d", call.op)[0])
    last = range(len(call.first.shape) - n, len(call.first.shape))
    operands = [_but(v.shape, last) for v in call.values if isinstance(v, Arg)]
    return f"nl: {', '.join(operands)} -> {'; '.join(_but(r, last, 'y') for r in call.results)}"


@_rows("pixel_shuffle pixel_unshuffle im2col col2im channel_shuffle")
def _channels_and_space(call: OpCall) -> str:
    kept = len(call.first.shape) - (2 if call.op.startswith("aten.col2im") else 3)
    whole = [range(kept, len(shape)) for shape in (call.first.shape, call.results[0])]
    return f"nl: {_but(call.first.shape, whole[0])} -> {_but(call.results[0], whole[1], 'y')}"


@_rows("grid_sampler_2d grid_sampler_3d")
def _grid_sampler(call: OpCall) -> str:
    """Each place of the grid reads anywhere of its image."""
    inside, grid = range(2, len(call.first.shape)), call.get("grid").shape
    places = _but(grid, range(1, len(grid)), "g")
    return f"nl: {_but(call.first.shape, inside)}, {places} -> {_but(call.results[0], inside, 'y')}"


@_rows("lstm.input gru.input rnn_tanh.input rnn_relu.input")
def _recurrent(call: OpCall) -> str | None:
    if len(call.first.shape) != 3:
        return None
    x, y = ("b s! c!", "b s! h!") if call.get("batch_first") else ("s! b c!", "s! b h!")
    states = [f"l! b k{i}!" for i in range(2 if "lstm" in call.op else 1)]
    weights = [" ".join(f"w{i}d{d}!" for d in range(len(p.shape))) for i, p in enumerate(call.get("params"))]
    return f"nl: {', '.join([x, *states, *weights])} -> {'; '.join([y, *states])}"


@_rows("_trilinear")
def _trilinear(call: OpCall) -> str:
    """The products of three operands, each with dims of size one at `expand`, summed over `sumdim`."""
    every, out, operands = "noij", [], []
    for operand, expanded in zip(call.values[:3], ("expand1", "expand2", "expand3"), strict=True):
        operands.append(" ".join(c for d, c in enumerate(every) if d not in call.get(expanded)))
        assert len(operands[-1].split()) == len(operand.shape)
    out = [c for d, c in enumerate(every) if d not in call.get("sumdim")]
    return f"lin: {', '.join(operands)} -> {' '.join(out)}"


@_rows("cosine_similarity linalg_cross renorm unfold")
def _along(call: OpCall) -> str | None:
    """One dim is read together; of renorm, all others. A dim comes out with another size, or is gone."""
    shape, op = call.first.shape, call.op.split(".")[1]
    given = [v.shape for v in call.values if isinstance(v, Arg)]
    if any(len(s) != len(shape) for s in given):
        return None
    shape = tuple(map(max, *given)) if len(given) > 1 else shape
    dim = call.dim("dimension" if op == "unfold" else "dim")
    whole = [d for d in range(len(shape)) if d != dim] if op == "renorm" else [dim]
    out = _but(shape, whole) if op in ("renorm", "linalg_cross") else _but(shape, whole, "y")
    if op == "cosine_similarity":
        out = " ".join(f"f{i}" for i in range(len(shape)) if i != dim)
    ones = [
        [d for d in range(len(shape)) if s[d] != shape[d]] for s in given
    ]  # of which one row is for all of the other's
    operands = [
        _but(s, [*whole, *one], "x" if not one else f"o{i}_")
        for i, (s, one) in enumerate(zip(given, ones, strict=True))
    ]
    return f"nl: {', '.join(operands)} -> {out}{' k!' if op == 'unfold' else ''}"


@_rows("nanmedian.dim quantile.scalar nanquantile.scalar")
def _statistics(call: OpCall) -> str:
    shape, named = call.first.shape, call.get("dim")
    over = range(len(shape)) if named is None else [named % max(len(shape), 1)]
    out = " ".join("1" if i in over else f"f{i}" for i in range(len(shape)) if i not in over or call.get("keepdim"))
    return f"nl: {_but(shape, over)} -> {'; '.join([out] * len(call.results))}"


@_rows("multi_margin_loss multilabel_margin_loss")
def _margins(call: OpCall) -> str | None:
    """A row of classes and its own target, or targets; weights of the classes are whole."""
    if len(call.first.shape) != 2 or not call.results[0]:
        return None
    target = "n" if call.op.startswith("aten.multi_") else "n t!"
    weights = ", w!" if isinstance(call.get("weight"), Arg) else ""
    return f"nl: n c!, ~{target}{weights} -> n"


@_rows("scatter_reduce.two index_reduce")
def _scattered(call: OpCall) -> str:
    shape, d = call.first.shape, call.dim()
    source = _but(shape, [d], "i")
    index = f"i{d}!" if "index" in call.op else source
    return f"nl: {_but(shape, [d])}, ~{index}, {source} -> {_but(shape, [d])}"


@_rows("diag_embed diagonal_scatter")
def _on_diagonals(call: OpCall) -> str:
    """Two dims of the result, of which a diagonal is written."""
    out = call.results[0]
    pair = [call.dim(name, len(out)) for name in ("dim1", "dim2")]
    part = " ".join([*(f"f{i}" for i in range(len(out)) if i not in pair), "y!"])
    return f"nl: {part if 'embed' in call.op else f'{_but(out, pair)}, {part}'} -> {_but(out, pair)}"


@_rows("searchsorted.Tensor bucketize.Tensor isin.Tensor_Tensor")
def _looked_up(call: OpCall) -> str | None:
    """Each value by itself, in a table that is whole."""
    tables = {"searchsorted": "sorted_sequence", "bucketize": "boundaries", "isin": "test_elements"}
    op = call.op.split(".")[1]
    table = call.get(tables[op])
    if op == "searchsorted" and len(table.shape) > 1:
        return None
    whole = "~" + " ".join(f"t{i}!" for i in range(len(table.shape)))
    return f"nl: {f'{whole}, ...' if op == 'searchsorted' else f'..., {whole}'} -> ..."


@_rows(
    "_linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_matrix_exp linalg_qr _linalg_eigh _linalg_svd "
    "_linalg_solve_ex linalg_solve_triangular"
)
def _of_matrices(call: OpCall) -> str:
    """[..., m, n]: each matrix by itself."""
    given = [v.shape for v in call.values if isinstance(v, Arg)]
    lead = len(given[0]) - 2
    operands = [_but(s, range(lead, len(s)), f"m{i}_") for i, s in enumerate(given)]
    results = [_but(s, range(lead, len(s)), f"r{i}_") for i, s in enumerate(call.results)]
    return f"nl: {', '.join(operands)} -> {'; '.join(results)}"
