"""Quantised weights are refused, in words: a graph has no rule for their packed bytes.

bitsandbytes (nf4, int8), torchao's tensor subclasses and the layers of GPTQ, AWQ and HQQ keep a weight in a form of which a
rank cannot take rows or columns, and compute with kernels that look at the packed tensor itself. torchao's own
`unwrap_tensor_subclass` turns its weights into plain integers and scales that the module multiplies in forward, which a graph
holds as it is. torchao's float8 training keeps its weights plain but scales a whole tensor by its largest element, which a
shard does not know.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafx.errors import CaptureError

_PACKAGES = (
    "bitsandbytes",
    "torchao",
    "hqq",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "quanto",
    "optimum",
    "compressed_tensors",
)
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
