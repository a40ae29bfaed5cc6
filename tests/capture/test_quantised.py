"""Covers: capture/quantised.py, and embeddings whose options a graph cannot have (passes/canonicalize/inplace.py)."""

import pytest
import torch
from torch import nn

import megafx
from megafx.errors import CaptureError


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

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


@pytest.mark.parametrize("quantise", [bitsandbytes_nf4, torchao_int8])
def test_quantised_weights_are_refused_by_name(quantise) -> None:
    model = Mlp()
    quantise(model)
    for call in (megafx.parallelize, lambda m: megafx.verify(m, example_inputs=(torch.randn(2, 64),))):
        with pytest.raises(CaptureError, match="quantised layers cannot enter a graph") as caught:
            call(model)
        assert caught.value.module == "up" and "quantization_config" in caught.value.fix


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


@pytest.mark.parametrize(
    ("options", "text"),
    [({"max_norm": 1.0}, "max_norm of an embedding writes into its weight"), ({"sparse": True}, "sparse gradient")],
)
def test_options_of_embeddings_that_a_graph_cannot_have(options, text) -> None:
    model = Embedding(**options)
    with pytest.raises(CaptureError, match=text):
        megafx.parallelize(model)(torch.randint(9, (2, 3)))


def test_a_weight_that_is_written_through_detach() -> None:
    """The gradient would end there."""

    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.w.detach().clamp_(-0.1, 0.1)
            return (x * self.w).sum()

    with pytest.raises(CaptureError, match=r"writes by detach\(\) or \.data"):
        megafx.parallelize(Clamped())(torch.randn(2, 3))
