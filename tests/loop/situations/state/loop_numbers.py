"""Numbers of tensors' data that a model returns or keeps: `.item()`, `float()`, `.tolist()`, and arithmetic with them."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from math import isinf, log
from typing import Any

import torch
import torch.nn.functional as F
from loop import Loop, situation
from torch import Tensor, nn

LOGS = "https://discuss.pytorch.org/t/pytorch-lightning-training-step-returns-loss-item/122567"


class Kind(enum.Enum):
    TRAINING = 1


@dataclasses.dataclass
class Result:
    loss: Tensor
    accuracy: float
    wrong: list[int]
    kind: Kind


class Net(nn.Module):
    """forward gives what `returned` makes of (the model, logits [rows, 5], labels [rows])."""

    def __init__(self, returned: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(7, 12), nn.Linear(12, 5)
        self.returned = returned

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.returned(self, self.down(F.gelu(self.up(x))), y)


def train(loop: Loop, returned: Callable[[Any, Tensor, Tensor], Any], lengths: tuple[int, ...] = (6, 6, 8)) -> Any:
    """Steps of SGD; the first tensor that the model gives is the loss. All that it gives is compared."""
    model = loop.model(Net(returned))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in lengths:
        x, y = loop.rows(torch.randn(length, 7)), loop.rows(torch.randint(0, 5, (length,)))
        out = model(x, y)
        leaves = torch.utils._pytree.tree_leaves([vars(o) if isinstance(o, Result) else o for o in out])
        loss = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        numbers = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        loop.see(numbers=numbers, kinds=[type(each).__name__ for each in numbers], loss=loop.mean(loss))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loop.see_state(model)
    return model


@situation(LOGS, data=("ddp", "fsdp"))
def a_loss_is_returned_beside_its_number(loop: Loop) -> None:
    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(h, y)
        with torch.no_grad():
            correct = (h.argmax(-1) == y).double().mean().item()
        return loss, loss.item(), {"accuracy": 100 * correct, "sum": h.sum().item(), "norm": h.norm().item()}

    train(loop, returned)


@situation(LOGS, like="a_loss_is_returned_beside_its_number")
def numbers_are_in_a_dataclass(loop: Loop) -> None:
    """Truth values, numbers below 0, lists, a number of rows among dtypes and members of an Enum."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(h, y)
        result = Result(loss, (h.argmax(-1) == y).double().mean().item(), y[:3].tolist(), Kind.TRAINING)
        lowest = (y - 9).min().item()
        return result, h.mean(0).tolist(), (h > 100).any().item(), lowest, len(h), h.shape, h.dtype

    train(loop, returned)


@situation("https://github.com/pytorch/pytorch/issues/139583", data=("zero1",))
def tensors_are_converted_by_float_int_and_bool(loop: Loop) -> None:
    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(h, y)
        most = max(1, int((y > 2).sum()))
        few = [float(row) for row in h.detach().mean(0)]
        some = bool((y > 2).sum())
        few.append(float(len(h[y > 3]) / len(y)))
        per_row = h[y > 1].square().sum() / (len((y > 1).nonzero()) + 1)
        return loss + per_row, float(loss.detach()), most, some, int(h.detach().sum() * 10), few, len(h[y > 1])

    train(loop, returned)


@situation(LOGS, like="functions_of_math_of_what_is_computed_of_numbers")
def numbers_are_computed_with_and_kept(loop: Loop) -> None:
    """What is left in attributes, lists and dicts is as what is returned."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(h, y)
        value = loss.item()
        m.last, m.best, m.above = round(value, 3), min(value, 1.5), value > 1
        m.history.append(value / len(y))
        m.seen["worst"] = -h.min().item()
        return loss, value / 2 + 1, round(value, 2), value**2, -abs(value), int((y > 2).sum()) / len(y), value // 1 % 2

    model = Net(returned)
    model.history, model.seen = [], {}  # type: ignore[assignment]  # plain attributes
    model = loop.model(model)
    for length in (6, 8):
        x, y = torch.randn(length, 7), torch.randint(0, 5, (length,))
        out = model(x, y)
        out[0].backward()
        kept = (model.last, model.best, model.above)
        loop.see(numbers=out[1:], kept=kept, history=[*model.history], seen=dict(model.seen))
    loop.see_gradients(model)


@situation("https://github.com/huggingface/transformers/issues/24979")
def there_may_be_no_rows(loop: Loop) -> None:
    """What code does where nothing is selected: a limit, another value, another way, a mean that is left out."""

    def of_losses(counted: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
        return lambda m, h, y: counted(F.cross_entropy(h, y, reduction="none"), y > 3)

    def limited(losses: Tensor, mask: Tensor) -> Tensor:
        return (losses * mask).sum() / max(1, mask.sum().item())

    def added(losses: Tensor, mask: Tensor) -> Tensor:
        chosen = losses[mask]
        total = losses.square().mean()
        if chosen.shape[0] > 0:
            total = total + chosen.sum()
        return total

    for counted in (limited, added):
        with_some_rows_and_none(loop, Net(of_losses(counted)))


def with_some_rows_and_none(loop: Loop, plain: Net) -> None:
    """Gradients of three calls: labels above 3 are in the second alone."""
    model = loop.model(plain)
    for most in (3, 5, 2):
        x, y = torch.randn(6, 7), torch.arange(6) % most
        loss = model(x, y)
        loss.backward()
        loop.see(loss=loss)
    loop.see_gradients(model)


class Chosen(nn.Module):
    """A loss over chosen rows, in a submodule. None of them: what `code` says."""

    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, losses: Tensor, mask: Tensor) -> Tensor:
        return self.code(losses, mask)


class OfChosen(Net):
    def __init__(self, code: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda m, h, y: m.chosen(F.cross_entropy(h, y, reduction="none"), y > 3))
        self.chosen = Chosen(code)


def _mean_or_nothing(losses: Tensor, mask: Tensor) -> Tensor:
    chosen = losses[mask]
    return chosen.mean() if chosen.numel() > 0 else losses.sum() * 0


def _left_out(losses: Tensor, mask: Tensor) -> Tensor:
    total, chosen = losses.mean(), losses[mask]
    if len(chosen) > 0:
        total = total + chosen.mean()
    return total


def _another_way(losses: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().item()
    if n == 0:
        return losses.square().mean()
    return (losses * mask).sum() / n


def _at_least_one(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / (int(mask.sum()) or 1)


def _a_factor(losses: Tensor, mask: Tensor) -> Tensor:
    return losses.mean() * (2 if mask.nonzero().shape[0] > 0 else 3)


@situation("https://github.com/huggingface/transformers/issues/24979", slow=(2,))
def code_asks_whether_there_are_rows_and_does_something_else_for_none(loop: Loop) -> None:
    for code in (_mean_or_nothing, _left_out, _another_way, _at_least_one, _a_factor):
        with_some_rows_and_none(loop, OfChosen(code))


@situation(
    "https://github.com/huggingface/transformers/issues/34048", like="functions_of_math_of_what_is_computed_of_numbers"
)
def functions_of_math_of_numbers(loop: Loop) -> None:
    """A perplexity, a level in dB; those of plain numbers are Python's own."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(h, y)
        m.rms = math.sqrt(h.square().mean().item())
        return loss, {"perplexity": math.exp(loss.item()), "dB": 10 * math.log10(loss.item()), "k": math.log(len(h[0]))}

    model = train(loop, returned)
    loop.see(rms=model.rms)


@situation("https://github.com/huggingface/transformers/issues/34048")
def functions_of_math_of_what_is_computed_of_numbers(loop: Loop) -> None:
    """A perplexity with a limit, a standard deviation, whether a loss is a number."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        loss, accuracy = F.cross_entropy(h, y), (h.argmax(-1) == y).double().mean().item()
        value = loss.item()
        m.deviation = math.sqrt(max(h.var().item(), 1e-12))
        m.bad = isinf(value / 2)
        logs = {"perplexity": math.exp(min(value, 20)), "log": round(log(value + 1), 4), "nan": math.isnan(value)}
        odds = math.log(accuracy + 0.1, 2) - math.log1p(0.1 - accuracy / 20), math.atan2(value, accuracy + 1)
        return loss, logs, odds, math.hypot(value, 2) ** 0.5, math.isfinite(value), math.degrees(-value)

    model = train(loop, returned)
    loop.see(deviation=model.deviation, bad=model.bad)


class Cooling(nn.Module):
    """A temperature and a rate that forward computes by math of its own counter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.step, self.temperature = nn.Linear(7, 5), 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        self.temperature = max(0.7, math.exp(-0.1 * self.step))
        rate = 0.5 * (1 + math.cos(math.pi * self.step / 10))
        return self.up(x) / self.temperature * math.pow(rate, 2)


@situation(
    "https://github.com/karpathy/deep-vector-quantization/blob/main/dvq/vqvae.py", like="forward_counts_its_steps"
)
def a_temperature_follows_from_a_counter(loop: Loop) -> None:
    """Two graphs: above the limit, and at it."""
    model = loop.model(Cooling())
    for _ in range(6):
        y = model(torch.randn(3, 7))
        y.square().sum().backward()
        loop.see(y=y, temperature=model.temperature)
    loop.see_gradients(model)
    if not loop.eager:
        assert model.megafx.captures <= 2


@situation("https://github.com/pytorch/pytorch/issues/115774", like="numbers_that_forward_counts_are_returned")
def names_are_made_of_sizes(loop: Loop) -> None:
    """Keys with sizes in them, in what is returned and what is kept; what is printed changes nothing."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        print(f"rows {h.shape[0]} of {h.shape}, {h.sum().item():.3f}, {h}")
        m.seen[f"rows {h.shape[0]}"] = 1
        m.text = str(h.shape)
        return {f"loss of {len(h)}": F.cross_entropy(h, y)}

    model = Net(returned)
    model.seen = {}  # type: ignore[assignment]  # a plain attribute
    model = loop.model(model)
    for length in (6, 8, 6):
        out = model(torch.randn(length, 7), torch.randint(0, 5, (length,)))
        loop.see(out=out, seen=sorted(model.seen), text=model.text)


@situation(
    "https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py"
)
def a_check_has_a_message_with_numbers(loop: Loop) -> None:
    """The text is made in each call, and is nobody's unless the check raises."""

    def check_counts(holds: Any, message: str) -> None:
        torch._check(holds, lambda: message)

    def returned(net: Any, logits: Tensor, labels: Tensor) -> Any:
        few = (labels < 3).sum()
        check_counts(logits.shape[0] == labels.shape[0], f"{few} of {labels.shape[0]} labels, {logits.shape[0]} rows")
        return F.cross_entropy(logits, labels), logits

    train(loop, returned)


@situation(LOGS, ranks=(1,))
def a_text_of_a_number_is_refused(loop: Loop) -> None:
    for code in (lambda h: f"{h.sum().item():.3f}", lambda h: str(h.sum().item()), lambda h: f"{h.sum()}"):
        model = loop.model(Net(lambda m, h, y, code=code: (h, code(h))))  # type: ignore[misc]  # one code each
        x, y = torch.randn(6, 7), torch.randint(0, 5, (6,))
        if loop.eager:
            model(x, y)
            loop.see(refused=True, line=True)
            continue
        try:
            model(x, y)
        except Exception as error:
            loop.see(refused="becomes a text" in str(error), line="loop_numbers.py" in str(error))


# -- numbers that forward counts, as arguments of functions of torch

ANNEALED = "https://discuss.pytorch.org/t/annealing-a-parameter-of-the-model-during-training/91416"


class Annealed(nn.Module):
    """A number that each call of forward counts up, where torch takes numbers alone, and where it takes tensors too."""

    def __init__(self, use: Callable[[Tensor, Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.use, self.calls = nn.Linear(7, 5), use, 0
        self.register_buffer("mean", torch.linspace(-1, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.use(self.linear(x), self.calls, self.mean)


def _trains(loop: Loop, use: Callable[[Tensor, Any, Tensor], Tensor]) -> Any:
    model = loop.model(Annealed(use))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optimizer.step()
        loop.see(loss=loss)
    loop.see_state(model)
    return model


@situation(ANNEALED)
def factors_that_forward_counts(loop: Loop) -> None:
    """One graph for all values."""

    def use(y: Tensor, n: Any, mean: Tensor) -> Tensor:
        decay = min(0.9, (1 + n) / (10 + n))
        mean.mul_(decay).add_(y.detach().mean(0), alpha=1 - decay).addcmul_(mean, mean, value=0.1 / n)
        y = torch.baddbmm(y[None], y[None], torch.eye(5)[None], beta=1 / n, alpha=n)[0] - torch.sub(mean, mean, alpha=n)
        return y * torch.tensor(1 / n) + torch.full((5,), 1 / n) * torch.tensor([1.0, n, 1 / n, 2.0, n])

    model = _trains(loop, use)
    assert loop.eager or model.megafx.captures <= 2


@situation(ANNEALED, slow=(2,))
def numbers_that_forward_counts_and_torch_wants_as_numbers(loop: Loop) -> None:
    _trains(loop, lambda y, n, mean: F.dropout(F.leaky_relu(y, 1 / n), 0.0 * n) + F.huber_loss(y, y * 0, delta=1 / n))
    _trains(loop, lambda y, n, mean: F.cross_entropy(y, torch.arange(4) % 5, label_smoothing=0.1 / n) + F.elu(y, 1 / n))


@situation("https://github.com/fungtion/DANN/blob/master/train/main.py")
def numbers_that_forward_counts_are_returned(loop: Loop) -> None:
    """The weight of a domain loss, as its papers have it, beside the loss: in a tuple, a dict, a dataclass. One graph."""

    def returned(m: Any, h: Tensor, y: Tensor) -> Any:
        old, weight = m.calls, 2 / (1 + math.exp(-10 * m.calls / 100)) - 1
        m.calls += 1
        result = Result(F.cross_entropy(h, y) * (1 + weight), round(weight / 3, 2), [old, m.calls], Kind.TRAINING)
        return result, weight, {"log": (-old, m.calls // 2)}

    model = Net(returned)
    model.calls = 0
    model = loop.model(model)
    for calls in (1, 2, 3, 8, 9):
        result, weight, logs = model(torch.randn(4, 7), torch.randint(0, 5, (4,)))
        result.loss.backward()
        loop.see(result=[*vars(result).values()], weight=weight, logs=logs, kind=type(weight).__name__)
        model.calls = 7 if calls == 3 else model.calls
    loop.see_gradients(model)
    assert loop.eager or model.megafx.captures == 1
