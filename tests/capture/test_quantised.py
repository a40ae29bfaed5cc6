"""Covers: capture/errors.py, and embeddings whose options a graph cannot have (passes/canonicalize/inplace.py)."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import megafx
from megafx.errors import CaptureError


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def bitsandbytes_nf4(model: Mlp) -> None:
    found = pytest.importorskip("bitsandbytes")
    made = found.nn.Linear4bit(64, 128, compute_dtype=torch.float32, quant_type="nf4")
    made.load_state_dict({"weight": model.up.weight.data, "bias": model.up.bias.data})
    model.up = made.to("cpu")


def torchao_int8(model: Mlp) -> None:
    found = pytest.importorskip("torchao.quantization")
    found.quantize_(model, found.Int8WeightOnlyConfig(), filter_fn=lambda module, name: name == "up")


@pytest.mark.parametrize(
    ("quantise", "fix"), [(bitsandbytes_nf4, "quantization_config"), (torchao_int8, "unwrap_tensor_subclass")]
)
def test_quantised_weights_are_refused_by_name(quantise, fix) -> None:
    model = Mlp()
    quantise(model)
    for call in (megafx.parallelize, lambda m: megafx.verify(m, example_inputs=(torch.randn(2, 64),))):
        with pytest.raises(CaptureError, match="quantised layers cannot enter a graph") as caught:
            call(model)
        assert caught.value.module == "up" and fix in caught.value.fix


class WithLora(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(64, 4, bias=False), nn.Linear(4, 128, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Dequantised(nn.Module):
    """What torchao's unwrap_tensor_subclass registers: a parametrization of integers and scales."""

    def forward(self, integers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return integers.to(scales.dtype) * scales

    def right_inverse(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = weight.detach().abs().amax(1, keepdim=True) / 127
        return (weight / scales).round().to(torch.int8), scales


def unwrapped_int8(model: Mlp) -> None:
    """As `torchao_weight_only`, without torchao."""
    for layer in (model.up, model.down):
        nn.utils.parametrize.register_parametrization(layer, "weight", Dequantised())


def torchao_weight_only(form: str) -> Callable[[Mlp], None]:
    def quantise(model: Mlp) -> None:
        found = pytest.importorskip("torchao.quantization")
        found.quantize_(model, getattr(found, form)())
        pytest.importorskip("torchao.utils").unwrap_tensor_subclass(model)

    return quantise


@pytest.mark.parametrize(
    "quantise",
    [unwrapped_int8, torchao_weight_only("Int8WeightOnlyConfig"), torchao_weight_only("Float8WeightOnlyConfig")],
    ids=["plain", "int8", "float8"],
)
def test_unwrapped_weights_train_adapters(quantise) -> None:
    """The advice for torchao's weights: followed, on 1 and 2 ranks; int8 weights are split by row and by column."""
    model = Mlp().requires_grad_(False)
    quantise(model)
    model.requires_grad_(False)
    model.up = WithLora(model.up)
    x = torch.randn(2, 8, 64)
    for ranks in (1, 2):
        config = megafx.Config(tensor_model_parallel_size=ranks, hardware="h100-nvlink")
        verdict = megafx.verify(model, config, example_inputs=(x,))
        assert verdict and {*verdict.gradients} == {"up.a.weight", "up.b.weight"}, verdict
    if quantise is unwrapped_int8:
        wide = Mlp(1024).requires_grad_(False)
        quantise(wide)
        params = megafx.plan(wide, config, example_inputs=(torch.randn(1, 1024, 1024),)).params
        found = [str(params[f"{layer}.parametrizations.weight.original0"]) for layer in ("up", "down")]
        assert found == ["S0", "S1"]


def test_float8_training_is_for_one_rank() -> None:
    found = pytest.importorskip("torchao.float8")
    model = Mlp()
    found.convert_to_float8_training(model, module_filter_fn=lambda module, name: name == "up")
    x = torch.randn(4, 64)
    assert megafx.verify(model, megafx.Config(tensor_model_parallel_size=1), example_inputs=(x,))
    with pytest.raises(CaptureError, match="scales a whole tensor by its largest element"):
        megafx.verify(model, megafx.Config(tensor_model_parallel_size=2), example_inputs=(x,))


class Embedding(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embed(ids).square().mean()


def test_embeddings_with_sparse_gradients_are_refused() -> None:
    with pytest.raises(CaptureError, match="sparse gradient"):
        megafx.parallelize(Embedding(sparse=True))(torch.randint(9, (2, 3)))


def test_a_weight_that_is_written_through_detach_after_it_is_read() -> None:
    """In eager mode, backward of what read it before would see the new value."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * self.w
            self.w.detach().clamp_(-0.1, 0.1)
            return (y * self.w).sum()

    with pytest.raises(CaptureError, match=r"has read parameter 'w', and writes into it by detach\(\) or \.data"):
        megafx.parallelize(Clamped())(torch.randn(2, 3))
