"""Sizes that decide: branches on one and none, numbers that the model reads from tensors and uses as sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loop import Loop, situation
from torch import Tensor, nn

from megafx.errors import CaptureError

LAYOUT = "https://pytorch.org/docs/stable/tensor_view.html"
SPECIALIZED = "https://github.com/pytorch/pytorch/issues/133653"  # sizes of 0 and 1 are not those of other sizes


class Mixer(nn.Module):
    """x [batch, length, 8] -> whatever `head` makes of the hidden values [batch, length, 8]."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 12), nn.Linear(12, 8), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def _calls(loop: Loop, head: Callable[[torch.Tensor], torch.Tensor], *sizes: tuple[int, int]) -> None:
    model = loop.model(Mixer(head))
    for batch, length in sizes:
        out = model(torch.randn(batch, length, 8))
        out.square().sum().backward()
        loop.see(out=out)
    loop.see_gradients(model)


@situation(SPECIALIZED)
def a_branch_on_a_length_of_one(loop: Loop) -> None:
    def change(h: torch.Tensor) -> torch.Tensor:
        return h[:, 1:] - h[:, :-1] if h.shape[1] > 1 else 3 * h

    _calls(loop, change, (3, 5), (3, 1), (1, 5), (1, 1))


@situation("https://github.com/pytorch/pytorch/issues/150842")
def a_first_call_with_one_row(loop: Loop) -> None:
    _calls(loop, lambda h: h * 2 if h.shape[0] == 1 else h, (1, 4), (3, 4), (1, 6))


@situation("https://github.com/pytorch/pytorch/pull/170264", like="an_even_length")
def squeeze_takes_the_batch_away_where_it_is_one_row(loop: Loop) -> None:
    _calls(loop, lambda h: h.mean(1).squeeze().cumsum(0), (3, 5), (1, 5))


@situation(SPECIALIZED)
def an_even_length(loop: Loop) -> None:
    _calls(loop, lambda h: h if h.shape[1] % 2 == 0 else -h, (3, 4), (3, 1), (2, 3))


@situation(SPECIALIZED, like="a_branch_on_a_length_of_one")
def a_deviation_that_needs_two_tokens(loop: Loop) -> None:
    _calls(loop, lambda h: h / (1 + h.std(1, keepdim=True)) if h.size(1) > 1 else h, (3, 5), (3, 1))


@situation(SPECIALIZED, slow=(2,))
def an_empty_batch(loop: Loop) -> None:
    _calls(loop, lambda h: h.sum() if h.size(0) == 0 else h * 2, (3, 5), (0, 5), (1, 5))


@situation(SPECIALIZED, like="tables_are_kept_by_sizes_in_tuples")
def scales_are_looked_up_by_length(loop: Loop) -> None:
    scales = {1: 2.0, 4: 0.5}
    _calls(loop, lambda h: h * scales.get(h.shape[1], 1.0), (3, 4), (3, 1), (3, 5))


ITEM = "https://github.com/pytorch/pytorch/issues/108195"  # GuardOnDataDependentSymNode where `.item()` is a size


class Trimmed(nn.Module):
    """The batch is cut to its longest sequence before the layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        n = lengths.max().item()
        return self.down(torch.relu(self.up(x[:, :n]))).square().mean()


@situation(ITEM)
def a_batch_is_cut_to_its_longest_sequence(loop: Loop) -> None:
    model = loop.model(Trimmed())
    for batch, length, longest in ((4, 9, 9), (4, 9, 5), (2, 7, 1)):
        x, lengths = torch.randn(batch, length, 8), torch.randint(1, longest + 1, (batch,))
        lengths[0] = longest
        loss = model(x, lengths)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Counting(nn.Module):
    """A mixture that sums the load of its experts in a buffer, and returns how often each class was chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = x.flatten(0, 1)
        weights, chosen = self.gate(rows).softmax(-1).topk(2)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
        counts = torch.bincount(chosen.flatten(), minlength=4)
        self.load = self.load + counts
        mass = torch.bincount(chosen.flatten(), weights=weights.detach().flatten(), minlength=4)
        return (out * (counts / counts.sum()).max()).square().mean(), mass, torch.bincount(chosen[:, 0])


@situation(ITEM)
def a_mixture_counts_the_load_of_its_experts(loop: Loop) -> None:
    model = loop.model(Counting())
    for batch, length in ((2, 5), (3, 4)):
        loss, mass, first = model(torch.randn(batch, length, 8))
        loss.backward()
        loop.see(loss=loss, mass=mass, first=first, load=model.load)
    loop.see_gradients(model)


class Asks(nn.Module):
    """Of how its argument lies in memory."""

    def __init__(self, strides: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.strides = nn.Linear(6, 12), nn.Linear(12, 6), strides

    def forward(self, x: Tensor) -> Tensor:
        if self.strides:
            x = x.as_strided((x.shape[0], 2, x.shape[1] - 1), (x.stride(0), x.stride(1), x.stride(1))).sum(1)
            x = torch.cat([x, x[:, :1]], 1)
        elif not x.is_contiguous():
            x = x * 2
        return self.down(self.up(x).relu()).square().mean()


@situation(LAYOUT)
def forward_asks_whether_its_argument_is_contiguous(loop: Loop) -> None:
    model = loop.model(Asks())
    for x in (
        torch.randn(4, 6),
        torch.randn(6, 5).t(),
        torch.randn(3, 6),
        torch.randn(8, 6)[::2],
        torch.randn(6, 7).t(),
    ):
        loss = model(x)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@situation(LAYOUT)
def forward_asks_for_strides_of_its_argument(loop: Loop) -> None:
    """Refused where they are not those of a contiguous tensor; the advice is followed."""
    model = loop.model(Asks(strides=True))
    for x in (torch.randn(4, 6), torch.randn(6, 5).t()):
        if not loop.eager and not x.is_contiguous():
            with pytest.raises(
                CaptureError, match=r"(?s)strides of its argument 'x'.*as_strided.*pass x.contiguous\(\)"
            ):
                model(x)
        loss = model(x.contiguous())
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


@situation("https://pytorch.org/docs/stable/generated/torch.nn.PixelShuffle.html")
def an_input_is_given_a_fixed_grid(loop: Loop) -> None:
    """Whose strides in backward are products of three sizes of the call."""
    model = loop.model(Grid())
    for _ in range(2):
        loss = model(torch.randn(2, 5, 6))
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Grid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.shuffle = nn.Linear(6, 6), nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.up(x).view(1, 4, 5, 3).tanh()).square().mean()


class Crops(nn.Module):
    """DINO's MultiCropWrapper: the backbone over crops of the same size at once, the head over all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Linear(1, 9), nn.Tanh()), nn.Linear(9, 7)

    def forward(self, crops: list[Tensor]) -> Tensor:
        sizes = torch.tensor([crop.shape[-1] for crop in crops])
        ends = torch.cumsum(torch.unique_consecutive(sizes, return_counts=True)[1], 0)
        start, output = 0, torch.empty(0).to(crops[0].device)
        for end in ends:
            output = torch.cat((output, self.backbone(torch.cat(crops[start:end])[..., None]).mean(1)))
            start = end
        return self.head(output)


@situation("https://github.com/facebookresearch/dino/blob/main/utils.py")
def crops_of_several_sizes_are_batched_by_size(loop: Loop) -> None:
    """A student sees all crops, its teacher, which follows it, the large ones."""
    model, copied = Crops(), Crops()
    copied.load_state_dict(model.state_dict())
    student, teacher = loop.model(model), loop.model(copied.requires_grad_(False))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for small in (4, 3, 6):
        crops = [torch.randn(3, size) for size in (6, 6, small, small, small)]
        wanted = teacher(crops[:2]).softmax(-1).chunk(2)
        found = (student(crops) / 0.1).log_softmax(-1).chunk(5)
        terms = [-(q * p).sum(-1).mean() for i, q in enumerate(wanted) for j, p in enumerate(found) if i != j]
        loss = torch.stack(terms).mean()
        optimizer.zero_grad()
        loss.backward()
        loop.see(loss=loss)
        loop.see_gradients(student)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.data.mul_(0.9).add_(0.1 * q.detach().data)
    loop.see_state(teacher)


@situation(ITEM)
def numbers_of_tensors_made_of_sizes_and_constants_decide(loop: Loop) -> None:
    def change(h: Tensor) -> Tensor:
        for rate in [x.item() for x in torch.linspace(0, 1, 3)]:
            h = h * (1 + rate) if rate > 0.1 else h
        h = 2 * h if (torch.arange(h.shape[1]) > 3).any() else h
        for _ in range(torch.tensor([h.shape[1], 2]).min()):
            h = h.tanh()
        return h

    _calls(loop, change, (3, 5), (3, 2), (2, 3), (1, 1))
