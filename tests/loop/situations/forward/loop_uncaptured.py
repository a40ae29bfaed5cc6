"""Modules that decide by data, which no graph holds: they run as they are, between parts that are compiled."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import transformers
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError, UsageError

BY_DATA = "https://github.com/pytorch/pytorch/issues/93579"  # export refuses control flow that depends on data


class Gate(nn.Module):
    """Early exit: rows that are certain are not refined. It notes what it does."""

    def __init__(self) -> None:
        super().__init__()
        self.certain, self.refine, self.seen = nn.Linear(8, 1), nn.Linear(8, 8), []

    def forward(self, x: Tensor, *, often: int = 2) -> Tensor:
        for _ in range(often):
            doubtful = self.certain(x)[..., 0] < 0
            self.seen.append(int(doubtful.sum()))
            if not doubtful.any():
                break
            x = torch.where(doubtful[..., None], x + self.refine(x), x)
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(8, 24), Gate(), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(self.gate(x)))).square().mean()


class Doubles(nn.Module):
    """Lines of a model's own forward, as a submodule."""

    def forward(self, h: Tensor) -> Tensor:
        if h.mean() > 0.1:
            return h * 2
        return h.clamp(min=-0.5)


class Decides(nn.Module):
    def __init__(self, decide: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down, self.decide = nn.Linear(8, 24), nn.Linear(24, 8), decide

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.decide is not None:
            h = self.decide(h)
        elif h.mean() > 0.1:
            h = h * 2
        else:
            h = h.clamp(min=-0.5)
        return self.down(h).square().mean()


@situation(BY_DATA)
def the_models_own_forward_decides_by_data(loop: Loop) -> None:
    """Refused with its line; the advice is followed."""
    x = torch.randn(4, 8)
    if loop.eager:
        model = Decides()
    else:
        with pytest.raises(CaptureError, match=r"(?s)`elif h.mean\(\) > 0.1:`.* put the lines .* into a submodule"):
            loop.model(Decides())(x)
        model = Decides(Doubles())
    model.load_state_dict({n: torch.linspace(-1, 1, p.numel()).view_as(p) for n, p in model.named_parameters()})
    model = loop.model(model)
    for scale in (1.0, -5.0):
        loss = model(x * scale + scale)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Periods(nn.Module):
    """TimesNet's block: the strongest periods of the batch, as numpy has them, are the widths of its folds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        strength = torch.fft.rfft(x, dim=1).abs().mean((0, 2))
        strength[0] = 0
        found = x.shape[1] // strength.topk(2).indices.detach().cpu().numpy()
        folds = []
        for period in found:
            length = -(-x.shape[1] // int(period)) * int(period)
            fold = nn.functional.pad(x, (0, 0, 0, length - x.shape[1])).unflatten(1, (-1, int(period)))
            folds.append(self.down(self.up(fold.cumsum(1)).relu()).flatten(1, 2)[:, : x.shape[1]])
        return x + sum(folds)


@situation(
    "https://github.com/thuml/Time-Series-Library/issues/73",
    slow=(2,),
    like="a_function_of_torchscript_decides_by_data",
)
def periods_that_numpy_holds(loop: Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loop.model(nn.Sequential(nn.Linear(8, 8), Periods(), nn.Linear(8, 3)))
        for length in (12, 15):
            time = torch.arange(length)[None, :, None] * torch.tensor([0.5, 2.0])[:, None, None]
            loss = model(time.sin() + torch.randn(2, length, 8) * 0.1).square().mean()
            loss.backward()
            loop.see(loss=loss)
        loop.see_gradients(model)


@situation(BY_DATA, like="a_part_that_stays_eager_raises_for_some_data")
def an_early_exit_by_data(loop: Loop) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loop.model(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for batch in (4, 2, 4):
            loss = model(torch.randn(batch, 5, 8))
            loss.backward()
            loop.see(loss=loss, seen=list(model.gate.seen))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            loop.see(evaluated=model.eval()(torch.randn(3, 5, 8)))
        loop.see_state(model)


class Balanced(nn.Module):
    """Decides by data; keeps statistics in buffers, which it writes or replaces, and counts."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.up, self.replaces, self.calls = nn.Linear(8, 8), replaces, 0
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.rows += x.shape[0]
            if self.replaces:
                self.seen = self.seen * 0.9 + x.mean(0)
            else:
                self.seen.mul_(0.9).add_(x.mean(0))
        y: Tensor = self.up(x)
        return (y * 2 if y.sum() > 0 else y) - self.seen


@situation(BY_DATA, like="parameters_are_filled_by_the_first_batch")
def a_module_that_decides_keeps_statistics(loop: Loop) -> None:
    for replaces in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = loop.model(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Balanced(replaces), nn.Linear(8, 8)))
            for rows in (3, 4):
                y = model(torch.randn(rows, 8))
                y.square().mean().backward()
                with torch.no_grad():
                    loop.see(y=y, evaluated=model(torch.randn(2, 8)))
                loop.see(rows=model[2].rows, seen=model[2].seen, calls=model[2].calls)
        loop.see_gradients(model)
        loop.see_state(model)


@situation("https://github.com/huggingface/transformers/issues/25104", rtol=1e-6)  # transformers' norms are of fp32
def positions_beyond_the_longest_sequence_so_far(loop: Loop) -> None:
    """rope_type "dynamic": frequencies follow the longest sequence, and go back at one of the original length."""
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, pad_token_id=0,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    )  # fmt: skip
    model = loop.model(transformers.LlamaForCausalLM(config).double())
    for length in (5, 12, 10, 6, 12):  # 10: the frequencies of 12
        y = model(torch.randint(1, 20, (2, length)), use_cache=False).logits
        y.square().mean().backward()
        loop.see(y=y)
    loop.see_gradients(model)


class ActNorm(nn.Module):
    """Takes its first scale and shift from the first batch (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(10)), nn.Parameter(torch.ones(10))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if self.ready.item() == 0:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
                self.ready.fill_(1)
        return self.scale * (x + self.shift)


@situation("https://github.com/openai/glow")
def parameters_are_filled_by_the_first_batch(loop: Loop) -> None:
    """Refused after `parallelize`; the advice, a call before it, is followed."""
    made, batch = nn.Sequential(nn.Linear(7, 10), ActNorm(), nn.Linear(10, 5)), torch.randn(6, 7)
    if not loop.eager:
        with pytest.raises(
            UsageError, match=r"writes into one of its inputs[\s\S]*once on a batch before megafx.parallelize"
        ):
            loop.model(copy.deepcopy(made))(batch)
    made(batch)
    model = loop.model(made)
    for _ in range(2):
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Curtails(nn.Module):
    """Text embeddings of as many positions as the longest row of the mask has, whether text is longer or shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        longest = int(lengths.max().item())
        text = text[:, :longest]
        text = nn.functional.pad(text, (0, longest - text.shape[1]), value=0)
        known = torch.arange(longest)[None] < lengths[:, None]
        return self.table(text.masked_fill(~known, 0)).masked_fill(~known[..., None], 0.0)


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.up, self.down = Curtails(), nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        h = torch.cat([x, self.text(text, mask.sum(1))], -1)
        return self.down(torch.relu(self.up(h))).square().mean()


@situation("https://github.com/SWivid/F5-TTS/blob/main/src/f5_tts/model/backbones/dit.py", like="nested_batches")
def text_is_cut_at_a_length_that_data_has(loop: Loop) -> None:
    """How many positions a slice has, neither its start nor its end says: the module is left eager."""
    model = loop.model(Speech())
    for rows, length, words in ((2, 9, 5), (3, 7, 11)):
        mask = torch.arange(length)[None] < torch.tensor([length, 4, length - 1])[:rows, None]
        loss = model(torch.randn(rows, length, 8), torch.randint(12, (rows, words)), mask)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Energy(nn.Module):
    """An energy and its forces, by which models of molecules are trained. Evaluation under no_grad differentiates as well."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x if self.training else x.detach().requires_grad_()
            energy = self.down(torch.tanh(self.up(x))).sum()
            return energy, -torch.autograd.grad(energy, x, create_graph=self.training)[0]


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.energy = nn.Linear(6, 6), Energy()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x))
        energy, forces = self.energy(h)
        return energy + (forces * h).square().mean()


class Relaxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        self.linear(x.detach()).sum().backward()
        return self.linear(x).sum()


@situation("https://github.com/atomistic-machine-learning/schnetpack/issues/446")
def forces_are_gradients_inside_of_a_submodule(loop: Loop) -> None:
    """The submodule is left eager; backward() in it would leave gradients nowhere, and is refused."""
    model = loop.model(Molecule())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for rows in (3, 4, 3):
        loss = model(torch.randn(rows, 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss)
    loop.see_gradients(model)
    loop.see_state(model)
    model.eval()
    with torch.no_grad():
        loop.see(evaluated=model(torch.randn(3, 6)))
    if not loop.eager:
        with pytest.raises(CaptureError, match="a module that is left eager calls backward"):
            loop.model(nn.Sequential(nn.Linear(6, 6), Relaxes()), eager_modules=["1"])(torch.randn(3, 6))
