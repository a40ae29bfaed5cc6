"""batch_norm in training, which updates its running statistics without saying so in its schema.

Before:  %y = batch_norm(%x, %w, %b, %mean, %var, True, 0.1, 1e-5)        # changes %mean and %var
After:   %y = batch_norm(%x, %w, %b, None, None, True, 0.1, 1e-5); copy_(%mean, 0.9 * %mean + 0.1 * mean(%x)); ...
Legal because: in training the batch's own statistics normalise the result. The copies become outputs, as other writes do.
"""

from __future__ import annotations

import torch
from torch import fx

from megafx.errors import CaptureError
from megafx.ir import VAL, fqn_of, source_of
from megafx.passes.canonicalize_common import Editor, arguments, respell

aten = torch.ops.aten


def write_out_running_statistics(editor: Editor, node: fx.Node) -> bool:
    """batch_norm that trains with running statistics -> one without, and their updates."""
    if node.target is aten.instance_norm.default:
        return _check_instance_norm(node)
    if node.target is not aten.batch_norm.default:
        return False
    x, weight, bias, mean, var, training, momentum, eps, cudnn = arguments(
        node, "input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps", "cudnn_enabled"
    )
    if not training or mean is None:
        return False
    emit = editor.at(node)
    dims = [d for d in range(x.meta[VAL].dim()) if d != 1]
    still = emit(aten.detach.default, x)
    for running, now in (
        (mean, emit(aten.mean.dim, still, dims)),
        (var, emit(aten.var.correction, still, dims, correction=1)),
    ):
        kept = emit(aten.mul.Tensor, running, 1.0 - momentum)
        emit(aten.copy_.default, running, emit(aten.add.Tensor, kept, emit(aten.mul.Tensor, now, momentum)))
    return respell(node, aten.batch_norm.default, (x, weight, bias, None, None, True, momentum, eps, cudnn))


def _check_instance_norm(node: fx.Node) -> bool:
    mean, use_input_stats = arguments(node, "running_mean", "use_input_stats")
    if use_input_stats and mean is not None:
        raise CaptureError(
            "instance_norm updates running statistics in training",
            fix="use track_running_stats=False",
            module=fqn_of(node),
            source=source_of(node),
        )
    return False
