"""What models outside of the matrix's list brought up, each as the smallest model that shows it.

Covers: sizes.py (ranges with a step), passes/canonicalize/names.py and passes/canonicalize/views.py (dtypes and memory
that eager decides), passes/canonicalize/editor.py (sizes that depend on data), rules/families_math.py (convolutions without
bias), capture/prepare.py, passes/canonicalize/inplace.py (shapes that change in place), planner/policy.py (policies that give
way, routers), passes/canonicalize/random.py (recurrent layers).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from interpret import run_program
from torch import nn
from torch.nn import functional as F

import megafx
from megafx.capture.export import capture_call
from megafx.errors import CaptureError
from megafx.ir.program import VAL
from megafx.ir.sizes import SizeEmitter
from megafx.passes.canonicalize.canonicalize import canonicalize_program
from megafx.rules.families import Arg, OpCall
from megafx.rules.families_math import _conv_backward
from megafx.testing import canonical

TWO = megafx.Config(tensor_model_parallel_size=2)


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class RelativeShift(nn.Module):
    """Scores by distance, shifted into place as XLNet does it: distances count down from seq to -seq."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.r = nn.Linear(6, 12), nn.Linear(6, 12, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        distance = torch.arange(s, -s, -1.0, dtype=x.dtype)[:, None] * torch.ones(6, dtype=x.dtype)
        q, r = self.q(x).view(b, s, 2, 6), self.r(distance).view(-1, 2, 6)
        scores = torch.einsum("bind,jnd->bnij", q, r)
        b, n, i, j = scores.shape
        shifted = scores.reshape(b, n, j, i)[:, :, 1:, :].reshape(b, n, i, j - 1)
        loss: torch.Tensor = shifted[..., :s].softmax(-1).square().sum()
        return loss


def test_range_with_a_step() -> None:
    """Its length is a rounded quotient, which is computed from the inputs' sizes as all others are."""
    found = megafx.verify(RelativeShift().double(), TWO, example_inputs=(floats(3, 5, 6),))
    assert found.ok, str(found)


def test_a_length_of_floats_is_emitted_as_it_was_traced() -> None:
    """As torch 2.15 traces a range with a step: (end - start) / step, with end and start as floats."""
    program = canonical(lambda x: x.relu(), x="f32[s k=4]")
    s: Any = program.placeholders()[0].meta[VAL].shape[0]
    length: Any = math.ceil((torch.sym_float(-s) - torch.sym_float(s)) / -1.0)
    node: Any = SizeEmitter(program.graph, program.sizes)(program.sizes.of(length))
    assert node.meta[VAL].node.expr == length.node.expr
    program.graph.output_node().args = ((node,),)
    program.gm.recompile()
    assert torch.fx.Interpreter(program.gm).run(torch.zeros(5, 4)) == (10,)


def test_gradient_of_a_convolution_without_bias() -> None:
    """Its third result is None, or a tensor without dims, as the trace has it."""
    image, out, kernel = (Arg(shape) for shape in ((2, 3, 8, 8), (2, 5, 2, 2), (5, 3, 4, 4)))
    for missing, bias in ((None, "*"), ((), "*"), ((5,), "o")):
        names = ("grad_output", "input", "weight", "transposed", "groups")
        call = OpCall(
            "aten.convolution_backward", names, (out, image, kernel, False, 1), (None, (5, 3, 4, 4), missing), True
        )
        made = _conv_backward(call)
        assert made is not None and made.text.endswith(f"; {bias}")


class LargeNumber(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(x, torch.full((), torch.finfo(x.dtype).min))


def test_new_tensors_keep_the_default_dtype_of_the_capture() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        program = capture_call(LargeNumber(), (floats(2, 3),))
    finally:
        torch.set_default_dtype(torch.float32)
    canonicalize_program(program)
    outputs = run_program(program, LargeNumber(), (floats(2, 3),), {})
    torch.testing.assert_close(outputs, floats(2, 3))  # in fp32 the number is none


class Rotated(nn.Module):
    """Queries turned as complex numbers, beside another linear of the same input, of odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.latent, self.q, self.out = nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.view_as_complex(self.q(x).unflatten(-1, (2, 2)))
        turned = torch.view_as_real(q * torch.polar(torch.ones_like(q.real), torch.ones_like(q.real)))
        loss: torch.Tensor = self.out(torch.cat([self.latent(x), turned.flatten(-2)], -1)).square().sum()
        return loss


def test_complex_rotation_of_a_part_of_a_joint_product() -> None:
    found = megafx.verify(Rotated().double(), TWO, example_inputs=(floats(3, 5, 6),))
    assert found.ok, str(found)


class SpanOfData(nn.Module):
    """Relative positions as DeBERTa has them: the span, a size, has been through a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(floats(8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        span = torch.min(torch.tensor(x.shape[1]), torch.tensor(4))
        near = self.positions[4 - span : 4 + span, :].unsqueeze(0)
        return torch.matmul(x, near.transpose(1, 2)).sum()


def test_slice_by_a_tensor() -> None:
    """A number that is read from a tensor is a size of the graph: one graph serves all spans."""
    model = SpanOfData().double()
    if torch.__version__.startswith("2.11"):  # its slices take no number of data
        with pytest.raises(CaptureError, match="depends on the data of a tensor"):
            megafx.verify(model, TWO, example_inputs=(floats(2, 5, 6),))
        return
    found = megafx.verify(model, TWO, example_inputs=(floats(2, 5, 6),))
    assert found.ok, str(found)
    parallel = megafx.parallelize(copy.deepcopy(model), megafx.Config(tensor_model_parallel_size=1))
    for length in (5, 3, 7, 1):
        x = floats(2, length, 6)
        wanted, got = model(x), parallel(x)
        assert torch.allclose(got, wanted, rtol=1e-10, atol=0)
        (expected,) = torch.autograd.grad(wanted, [model.positions])
        (gradient,) = torch.autograd.grad(got, [parallel.positions])
        assert torch.allclose(gradient, expected, rtol=1e-10, atol=1e-14)
    assert parallel.megafx.captures == 1


class ReshapesInPlace(nn.Module):
    """A mask whose shape changes in place, as BigBird's does; and a write into a view that was made so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        mask = torch.ones_like(x[..., 0])
        mask[:, 2:] = 0
        mask.unsqueeze_(-1)
        turned = hidden.clone()
        turned.transpose_(0, 1)
        turned[1] = 0
        loss: torch.Tensor = self.down(hidden * mask + turned.transpose(0, 1)).square().sum()
        return loss


def test_shapes_that_change_in_place() -> None:
    found = megafx.verify(ReshapesInPlace().double(), TWO, example_inputs=(floats(3, 5, 6),))
    assert found.ok and len(found.gradients) == 4, str(found)


class Converting(nn.Module):
    """As the routers of Switch Transformers and NLLB-MoE do it in each call."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.classifier, self.dtype = nn.Linear(6, 5), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.classifier = self.classifier.to(self.dtype)
        loss: torch.Tensor = self.classifier(x).square().sum()
        return loss


def test_converting_a_module_to_what_it_is_changes_nothing() -> None:
    found = megafx.verify(Converting(torch.float64).double(), TWO, example_inputs=(floats(3, 5, 6),))
    assert found.ok and {"classifier.weight", "classifier.bias"} <= set(found.gradients), str(found)


def test_converting_a_module_in_forward_is_refused() -> None:
    with pytest.raises(CaptureError) as caught:
        capture_call(nn.Sequential(Converting(torch.float32)).double(), (floats(3, 5, 6),))
    assert (
        "0.classifier.weight is torch.float64, and would be torch.float32 from the first call on" in caught.value.found
    )
    assert 'model.get_submodule("0.classifier").to(torch.float32)' in str(caught.value)
    source: Any = caught.value.source
    assert "self.classifier.to(self.dtype)" in source.code


class OneTable(nn.Module):
    """An embedding of which only some rows are the head ("rows"), or whose rows are two more linears ("split")."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table, self.norm = kind, nn.Embedding(24, 12), nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        first, second = self.table.weight.split([12, 12])
        if self.kind == "split":
            x = x + F.linear(F.gelu(F.linear(self.norm(x), first)), second)
        head = self.table.weight[:20] if self.kind == "rows" else self.table.weight
        return F.cross_entropy(F.linear(self.norm(x), head).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.parametrize("kind", ["rows", "split"])
def test_a_table_of_which_only_rows_are_a_linear(kind: str, t: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    model, ids = OneTable(kind).double(), torch.randint(0, 20, (3, 5))
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel)
    found = megafx.verify(model, config, example_inputs=(ids, ids), tolerance=1e-10)
    assert found.ok, str(found)
    if t == 2 and not sequence_parallel:
        plan = megafx.plan(model, config, example_inputs=(ids, ids))
        assert sum("neither gathered nor stored whole" in str(n) for n in megafx.explain(plan).notes) == 1


class Dispatch(nn.Module):
    """GShard's mixture: a one-hot [tokens, experts, capacity] sends tokens to the experts' stacked weights and back."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.batched, self.norm, self.gate = batched, nn.LayerNorm(12), nn.Linear(12, 4, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(4, 12, 20) / 4), nn.Parameter(torch.randn(4, 20, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).reshape(-1, 12)
        weight, expert = self.gate(y).softmax(-1).max(-1)
        chosen = F.one_hot(expert, 4).to(y.dtype)
        place = (chosen.cumsum(0) - 1) * chosen
        kept = chosen * (place < 5) * weight[:, None]
        combine = torch.einsum("te,tc->tec", kept, F.one_hot(place.sum(-1).long().clamp(max=4), 5).to(y.dtype))
        sent = torch.einsum("tec,th->ech", (combine > 0).to(y.dtype), y)
        hidden = F.gelu(torch.bmm(sent, self.up) if self.batched else torch.einsum("ech,ehf->ecf", sent, self.up))
        made = torch.bmm(hidden, self.down) if self.batched else torch.einsum("ecf,efh->ech", hidden, self.down)
        return (x + torch.einsum("tec,ech->th", combine, made).view(x.shape)).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 3])
@pytest.mark.parametrize("batched", [False, True])
def test_experts_behind_an_einsum_dispatch_are_sharded(batched: bool, t: int) -> None:
    torch.manual_seed(0)
    model, config = Dispatch(batched).double(), megafx.Config(tensor_model_parallel_size=t, sequence_parallel=t == 2)
    found = megafx.verify(model, config, example_inputs=(floats(2, 5, 12),), tolerance=1e-10)
    assert found.ok, str(found)
    params = megafx.plan(model, config, example_inputs=(floats(2, 5, 12),)).params
    assert params["up"].is_shard and params["down"].is_shard and not params["gate.weight"].is_shard


class Recurrent(nn.Module):
    """A GRU that drops nothing, which has a rule of its own kind: none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gru, self.down = nn.Linear(6, 12), nn.GRU(12, 8, batch_first=True), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gru(self.up(x))[0]).square().mean()


@pytest.mark.slow
def test_a_recurrent_layer_without_dropout_draws_nothing() -> None:
    found = megafx.verify(Recurrent().double(), TWO, example_inputs=(floats(3, 5, 6),), tolerance=1e-10)
    assert found.ok, str(found)


class Scan(nn.Module):
    """A selective scan as mamba-minimal writes it, whose rates are in fp32; and a sparse buffer, as Whisper has one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.of_state = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 8)
        self.rates = nn.Parameter(torch.rand(8, 4))
        self.register_buffer("alignment", torch.eye(3, dtype=torch.bool).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.up(x)
        step, (into, out) = F.softplus(u), self.of_state(u).chunk(2, -1)
        kept = torch.exp(torch.einsum("bld,dn->bldn", step, -torch.exp(self.rates.float())))
        added = torch.einsum("bld,bln,bld->bldn", step, into, u)
        state, ys = torch.zeros_like(added[:, 0]), []
        for i in range(3):
            state = kept[:, i] * state + added[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, out[:, i]))
        return self.down(torch.stack(ys, 1)).square().mean()


@pytest.mark.parametrize("t", [2, 3])
def test_a_selective_scan_of_two_dtypes(t: int) -> None:
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=t)
    found = megafx.verify(Scan().double(), config, example_inputs=(floats(2, 3, 6),), tolerance=1e-10)
    assert found.ok, str(found)


class Diffusion(nn.Module):
    """Forward draws each row's time and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.up, self.down = nn.Embedding(50, 12), nn.Linear(6, 12), nn.Linear(12, 6)
        self.register_buffer("kept", torch.linspace(1, 0.1, 50))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        t = torch.randint(0, 50, (len(x),), device=x.device).long()
        kept, noise = self.kept[t][:, None], torch.randn_like(x)
        y = self.down(F.silu(self.up(kept * x + (1 - kept) * noise) + self.times(t)))
        return (y - noise).square().mean(), t


@pytest.mark.slow
@pytest.mark.parametrize("t", [2, 3])
def test_times_drawn_by_forward_are_those_of_one_rank(t: int) -> None:
    torch.manual_seed(0)
    found = megafx.verify(
        Diffusion().double(),
        megafx.Config(tensor_model_parallel_size=t),
        example_inputs=(floats(7, 6),),
        tolerance=1e-10,
    )
    assert found.ok, str(found)


class Spectral(nn.Module):
    """A Fourier neural operator: low frequencies, and one more, are written into a complex tensor of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.skip = nn.Linear(3, 8), nn.Linear(8, 2), nn.Conv1d(8, 8, 1)
        self.weights = nn.Parameter(torch.randn(8, 8, 3, dtype=torch.complex128) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).transpose(1, 2)
        found = torch.fft.rfft(h)
        kept = torch.zeros_like(found)
        kept[..., :3] = torch.einsum("bix,iox->box", found[..., :3], self.weights)
        kept[..., -1] = found[..., 0].conj()
        h = torch.fft.irfft(kept, n=h.shape[-1]) + self.skip(h)
        return self.down(h.transpose(1, 2).relu()).square().mean()


@pytest.mark.parametrize("t", [2, 3])
def test_frequencies_are_written_into_a_complex_tensor(t: int) -> None:
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=t)
    found = megafx.verify(Spectral().double(), config, example_inputs=(floats(2, 12, 3),), tolerance=1e-10)
    assert found.ok, str(found)


class Windows(nn.Module):
    """Titans: attention in windows, the last of which is filled up; their number is the ceiling of a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.memories, self.qkv, self.out = nn.Parameter(torch.randn(2, 8)), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        windows = math.ceil(n / 5)
        w = F.pad(x, (0, 0, 0, windows * 5 - n)).reshape(b * windows, 5, 8)
        w = torch.cat([self.memories.expand(b * windows, -1, -1), w], 1)
        q, k, v = self.qkv(w).chunk(3, -1)
        y = F.scaled_dot_product_attention(
            *(z.unflatten(-1, (2, 4)).transpose(1, 2) for z in (q, k, v)), is_causal=True
        )
        y = self.out(y.transpose(1, 2).flatten(2))[:, 2:].reshape(b, windows * 5, 8)[:, :n]
        return (x + y[:, : math.floor(n / 2) * 2].sum(1, keepdim=True)).square().mean()


@pytest.mark.parametrize("n", [10, 13])
def test_windows_are_as_many_as_a_ceiling_says(n: int) -> None:
    torch.manual_seed(0)
    found = megafx.verify(Windows().double(), TWO, example_inputs=(floats(2, n, 8),), tolerance=1e-10)
    assert found.ok, str(found)


class Images(nn.Module):
    """Patches of images take the places of some tokens: nanoVLM, whose number of places is a product of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.patches, self.head = nn.Embedding(9, 8), nn.Linear(6, 8), nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        y = self.embed(ids).clone()
        patches = self.patches(images)
        y[ids == 3] = patches.view(-1, patches.size(-1)).to(y.dtype)
        return F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


@pytest.mark.parametrize("t", [2, 3])
def test_patches_take_the_places_of_tokens(t: int) -> None:
    torch.manual_seed(0)
    ids = torch.tensor([[3, 3, 1, 3, 3, 0, 2], [4, 3, 3, 3, 5, 3, 8]])
    config = megafx.Config(tensor_model_parallel_size=t)
    found = megafx.verify(Images().double(), config, example_inputs=(ids, floats(2, 4, 6)), tolerance=1e-10)
    assert found.ok, str(found)


class Masked(nn.Module):
    """torch's own encoder and decoder layers, which ask of a mask's values whether it is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 12), nn.Linear(12, 17)
        self.transformer = nn.Transformer(12, 2, 1, 1, 20, dropout=0.0, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        y = self.transformer(x, x.flip(1), src_mask=mask, tgt_mask=mask)
        return F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("t, sequence_parallel", [(2, True), (3, False)])
def test_a_transformer_of_torch_with_its_own_mask(t: int, sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    config = megafx.Config(tensor_model_parallel_size=t, sequence_parallel=sequence_parallel)
    ids = torch.randint(0, 17, (3, 5))
    found = megafx.verify(Masked().double(), config, example_inputs=(ids,), tolerance=1e-10)
    assert found.ok, str(found)


class Heads(nn.Module):
    """Scores of heads by einsum or baddbmm."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.heads = by, nn.ModuleList(nn.Linear(12, 24) for _ in range(3))
        self.out = nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, 4, 6).transpose(1, 2) for f in self.heads)
        if self.by == "einsum":
            scores = torch.einsum("bnsw,bntw->bnst", q, k)
        else:
            flat, start = (t.reshape(b * 4, s, 6) for t in (q, k)), q.new_zeros(b * 4, s, s)
            first, second = flat
            scores = torch.baddbmm(start, first, second.transpose(1, 2)).view(b, 4, s, s)
        made: torch.Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))
        return made.square().mean()


class Biased(nn.Module):
    """Weights and biases of heads: a rank's bias is one row of [heads, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(12, 4, 6) / 4) for _ in range(3))
        self.biases = nn.ParameterList(nn.Parameter(torch.randn(4, 6)) for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 6, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.weights, self.biases, strict=True)
        q, k, v = (torch.einsum("bsh,hnd->bsnd", x, w) + bias for w, bias in pairs)
        mixed = torch.einsum("bnst,btnd->bsnd", torch.einsum("bsnd,btnd->bnst", q, k).softmax(-1), v)
        return torch.einsum("bsnd,ndh->bsh", mixed, self.out).square().mean()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 4) for shape in ((12, 24), (24, 12)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        each = F.gelu(torch.einsum("bsh,ehw->bsew", x, self.up))
        out = torch.einsum("bsew,ewh->bseh", each, self.down) * self.router(x).softmax(-1)[..., None]
        return out.sum(2).square().mean()


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.down = nn.Conv1d(12, 12, 3, padding=2, groups=12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.down(F.gelu(self.up(inner))).square().mean()


class Spelled(nn.Module):
    """Products of heads with dims that have no letter, and the diagonals of their matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix = nn.Parameter(torch.randn(12, 4, 6) / 3), nn.Parameter(torch.randn(4, 6, 6) / 2)
        self.down = nn.Parameter(torch.randn(4, 6, 12) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("...h,hnd->...nd", x, self.up)
        y = y * torch.einsum("ndd->nd", self.mix) + torch.einsum("...nd,nde->...ne", y, self.mix)
        return torch.einsum("...nd,ndh->...h", y, self.down).square().mean()


class RowParallel(nn.Module):
    """A convolution whose input channels are cut; its bias is added once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Conv1d(24, 12, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.transpose(1, 2) + self.down(F.gelu(self.up(x)).transpose(1, 2))).square().mean()


MAKE = {
    **{"einsum": lambda: Heads("einsum"), "baddbmm": lambda: Heads("baddbmm"), "biases": Biased, "spelled": Spelled},
    **{"experts": Experts, "depthwise": Depthwise, "row-parallel": RowParallel},
}


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MAKE)
def test_types_confirm_what_is_exact(name: str, t: int) -> None:
    """On four ranks each has one head or expert, a dim of one row that ops of torch treat as none."""
    torch.manual_seed(0)
    with megafx.debug(check=1):  # a graph that types cannot confirm is an error
        found = megafx.verify(
            MAKE[name]().double(), megafx.Config(tensor_model_parallel_size=t), example_inputs=(floats(3, 6, 12),)
        )
    assert found.ok, str(found)
