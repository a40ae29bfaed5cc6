"""Weights of parallelized meta models on real gloo ranks: loaded from safetensors, initialised by their constructors."""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import zoo
from ranks import check
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import megafx
from megafx.errors import AgreementError, CheckpointError, UsageError
from megafx.runtime import module as parallel_class
from megafx.weights import save as save_weights

# Key-value heads fewer than ranks, tied heads, vocabularies and widths that no degree divides, fused QKV in two layouts.
OPTIONS = {"llama": {"kv": 2, "heads": 4}, "gpt2": {"heads": 4}, "t5": {}, "nanogpt": {}}


def make(name: str) -> nn.Module:
    if name == "neox":
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 50}
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=67, max_position_embeddings=64))
    return zoo.ZOO[name](**OPTIONS[name])[0]


def call_of(name: str, batch: int = 2, seq: int = 8) -> dict:
    return zoo.ZOO["llama" if name == "neox" else name](**OPTIONS.get(name, {}))[1](batch, seq)


def eager(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make(name)


def check_saved(name: str, folder: Path) -> None:
    """What the ranks wrote, each some of the files, in one process: as transformers loads it."""
    assert len([*folder.glob("model-*.safetensors")]) > 3 and not [*folder.glob(".*")]
    wanted = eager(name, seed=4)
    if name == "nanogpt":
        found = megafx.load_safetensors(eager(name, seed=0), folder)
    else:
        found, info = type(wanted).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert "distributed_config" not in (folder / "config.json").read_text()
    for key, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


def parallel_on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        model = make(name)
    example = call_of(name) if name == "nanogpt" else None
    return megafx.parallelize(model.train(), megafx.Config(), example_inputs=example)


def same(model: nn.Module, wanted: nn.Module, what: str) -> None:
    found = megafx.full_state_dict(model)
    for key, value in wanted.state_dict().items():
        assert torch.equal(found[key], value), f"{what}: {key}"
    buffers = dict(model.named_buffers())
    for key, value in wanted.named_buffers():
        assert torch.equal(buffers[key], value), f"{what}: {key}"
    assert any(p._spec.placements[0].is_shard() for p in model.parameters()), "nothing is sharded"


def loaded(name: str, model: nn.Module, folder: Path) -> None:
    wanted = eager(name, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    megafx.load_safetensors(model, folder / name, factory=(lambda: make(name)) if name == "nanogpt" else None)
    same(model, wanted, f"{name} loaded")
    losses = []
    for module in (model, wanted):
        out = module.train()(**call_of(name))
        losses.append(out[1] if isinstance(out, tuple) else out.loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
    before = megafx.full_state_dict(model)
    optimizer.step()
    plain = torch.optim.SGD(wanted.parameters(), lr=0.1)
    plain.step()
    after = megafx.full_state_dict(model)
    assert any(not torch.equal(before[n], after[n]) for n in after), "the optimizer has other parameters"
    for key, value in wanted.state_dict().items():
        torch.testing.assert_close(after[key], value, rtol=1e-4, atol=1e-5)


def initialised(name: str, model: nn.Module, folder: Path) -> None:
    wanted = eager(name, seed=4)
    drawn = torch.get_rng_state()
    torch.manual_seed(4 + dist.get_rank())  # rank 0's generator counts
    megafx.initialize(model, (lambda: make(name)) if name == "nanogpt" else None)
    assert torch.equal(torch.get_rng_state(), drawn)
    same(model, wanted, f"{name} initialised")
    with whole_tensors_one_at_a_time() as made:
        megafx.save_pretrained(model, folder / f"{name}_saved", max_shard_size="8KB")
    assert 0 < sum(made) < sum(x.numel() for x in wanted.state_dict().values()), "this rank made all tensors whole"
    if name != "nanogpt":
        by_its_method(model, folder, folder / f"{name}_saved")
    with torch.device("meta"):
        whole = make(name)
    megafx.initialize(whole, lambda: make(name), seed=9)
    megafx.initialize(model, lambda: make(name), seed=9)
    same(model, whole, f"{name} by index")


@contextlib.contextmanager
def whole_tensors_one_at_a_time() -> Iterator[list[int]]:
    """Yields the sizes of the tensors that this rank makes whole; an earlier one is gone when the next one is made."""
    gatherer = save_weights._gatherer
    sizes: list[int] = []
    alive: list[weakref.ref] = []

    def counting(tensors, group):
        fetch = gatherer(tensors, group)

        def counted(name: str, writer: int) -> torch.Tensor | None:
            assert not any(r() is not None for r in alive), f"an earlier tensor is still held when '{name}' comes"
            value = fetch(name, writer)
            if value is not None:
                sizes.append(value.numel())
                alive.append(weakref.ref(value))
            return value

        return counted

    with mock.patch.object(save_weights, "_gatherer", counting):
        yield sizes


def by_its_method(model: nn.Module, folder: Path, wanted: Path) -> None:
    """transformers' own method writes the same files, each rank some of them; its arguments mean what they mean there."""
    rank = dist.get_rank()
    whole, parallel_class.full_state_dict = parallel_class.full_state_dict, None  # no rank gathers the model
    model.save_pretrained(folder / "method", rank == 0, max_shard_size="8KB")  # as the Trainer calls it
    model.save_pretrained(folder / "variant", max_shard_size="8KB", variant="half")
    model.save_pretrained(folder / "nowhere", is_main_process=False)
    parallel_class.full_state_dict = whole
    for options, text in (
        ({"push_to_hub": True}, "upload_folder"),
        ({"distributed_checkpoint": True}, "save_checkpoint"),
    ):
        with pytest.raises(UsageError, match=text):
            model.save_pretrained(folder / "nowhere", **options)
    with pytest.raises(UsageError, match="upload_folder"):
        model.push_to_hub("nobody/nothing")
    with pytest.raises(AgreementError, match=r"differ in the folder of model\.save_pretrained"):
        model.save_pretrained(folder / f"nowhere{rank}")
    dist.barrier()
    names = sorted(p.name for p in wanted.iterdir())
    assert sorted(p.name for p in (folder / "method").iterdir()) == names
    assert all((folder / "method" / n).read_bytes() == (wanted / n).read_bytes() for n in names)
    assert not [*folder.glob("nowhere*")]
    found = type(model).__mro__[3].from_pretrained(folder / "variant", variant="half")
    assert "model.safetensors.index.half.json" in os.listdir(folder / "variant")
    same(model, found, "variant")
    given = megafx.full_state_dict(model)
    model.save_pretrained(folder / "given", state_dict={n: v + 1 for n, v in given.items()})
    dist.barrier()
    again = type(model).__mro__[3].from_pretrained(folder / "given").state_dict()
    assert all(torch.equal(again[n], v + 1) for n, v in given.items() if v.is_floating_point())


def refused(name: str, model: nn.Module, folder: Path) -> None:
    """What is wrong on one rank only stops all of them, and nothing is changed."""
    with torch.device("meta"):
        unplanned = zoo.ZOO["nanogpt"]()[0]
    megafx.parallelize(unplanned)
    with pytest.raises(UsageError, match="the model is not planned yet"):
        megafx.initialize(unplanned, lambda: make("nanogpt"))
    own = folder / (name if dist.get_rank() == 0 else "nowhere")
    with pytest.raises(CheckpointError, match="there is no file or folder|on rank 1: there is no file or folder"):
        megafx.load_safetensors(model, own)
    assert all(p.is_meta for p in model.parameters())


def from_files_and_from_its_constructor(name: str, folder: Path) -> None:
    """A meta model is refused, loaded and initialised; what the ranks then write is read in one process."""
    if dist.get_rank() == 0:
        model = eager(name, seed=1)
        if name == "nanogpt":
            (folder / name).mkdir()
            save_model(model, str(folder / name / "model.safetensors"))
        else:
            model.save_pretrained(folder / name, max_shard_size="10KB")
    dist.barrier()
    model = parallel_on_meta(name)
    refused(name, model, folder)
    loaded(name, model, folder)
    initialised(name, model, folder)
    dist.barrier()
    if dist.get_rank() == 0:
        check_saved(name, folder / f"{name}_saved")


for case in ("gpt2", "llama", "t5", "neox", "nanogpt"):
    check(2, 3, slow=(3,) if case == "llama" else True, name=f"weights_of_{case}")(
        partial(from_files_and_from_its_constructor, case)
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(10, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.embed(ids)))).square().mean()


@check(2, seed=0)
def assigned_states_are_refused_where_more_than_values_change() -> None:
    """With `assign=True` one process gets two parameters over the memory of a tied one, and the dtypes of the state."""
    plain, other, ids = Tied().double(), Tied().double(), torch.arange(10).view(2, 5)
    model = megafx.parallelize(copy.deepcopy(plain), megafx.Config())
    state = {"embed.weight": other.embed.weight.detach(), "head.weight": other.head.weight.detach()}
    with pytest.raises(UsageError, match="would part 'embed.weight' and 'head.weight'"):
        model.load_state_dict(state, strict=False, assign=True)
    model(ids).backward()
    with pytest.raises(UsageError, match="would make 'mix.bias' a tensor of torch.float32; it has torch.float64"):
        model.load_state_dict({"mix.bias": torch.ones(6)}, strict=False, assign=True)
    assert all(torch.equal(value, plain.state_dict()[n]) for n, value in megafx.full_state_dict(model).items())

    mixed = {n: value.detach() for n, value in other.state_dict().items() if "mix" in n}
    for each, options in ((model, {"assign": True}), (plain, {})):
        each.load_state_dict(mixed, strict=False, **options)
        each.load_state_dict(state, strict=False)  # the way out
        each.zero_grad()
        each(ids).backward()
    assert model.head.weight is model.embed.weight
    for name, gradient in megafx.full_gradients(model).items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


@check(2, seed=0)
def functions_of_safetensors_are_refused_with_advice_that_works(folder: Path) -> None:
    """safetensors asks for storages, to see which tensors are tied. It would write a shard as if it were the whole."""
    plain, file = Tied(), folder / f"plain{dist.get_rank()}.safetensors"
    wanted = copy.deepcopy(plain.state_dict())
    save_model(plain, str(file))
    model = megafx.parallelize(plain, megafx.Config(), example_inputs=(torch.arange(10).view(2, 5),))
    with torch.no_grad():
        model.mix.weight.zero_()
    for call in (
        partial(load_model, model, file),
        partial(save_model, model, "_"),
        partial(save_file, model.state_dict(), "_"),
    ):
        with pytest.raises(
            UsageError, match=r"(?s)the storage of .*full_state_dict.*save_pretrained.*load_safetensors"
        ):
            call()
    megafx.load_safetensors(model, file)
    state = {n: value for n, value in megafx.full_state_dict(model).items() if n != "head.weight"}
    save_file(state, file)
    megafx.save_pretrained(model, folder / "saved")
    for found in (load_file(file), load_file(folder / "saved" / "model.safetensors")):
        assert all(torch.equal(value, wanted[n]) for n, value in found.items()) and len(found) == len(wanted) - 1
