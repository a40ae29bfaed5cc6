"""The main forms of calls of parallelized Hugging Face models on gloo ranks, beside eager ones."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from ranks import PromoteCasts, check, config, gradients, near, same_gradients
from structures import IDS, LABELS, RIGHT, STRUCTURES, llama
from torch import Tensor, nn

import megafx
from megafx.distributed.tensor import local_of

TRAIN = {"input_ids": IDS, "labels": LABELS, "attention_mask": RIGHT}


def promoting(eager: bool) -> contextlib.AbstractContextManager[Any]:
    """For eager code; graphs have casts promoted by a pass, and refuse calls within a mode."""
    return PromoteCasts() if eager else contextlib.nullcontext()


class Twins:
    """A parallelized model and its plain twin."""

    def __init__(self, plain: nn.Module) -> None:
        self.plain = plain
        self.model = megafx.parallelize(copy.deepcopy(plain), config(), example_inputs=TRAIN)

    def step(self, call: Any, backward: bool = True) -> tuple[Any, Any]:
        """The same call of both; a form whose tensors collect gradients is made anew for each."""
        results = []
        for m in (self.model, self.plain):
            with promoting(m is self.plain):
                results.append(m(**call()))
            if backward:
                results[-1].loss.backward()
        near(results[0].logits + 0, results[1].logits.detach(), "the logits")
        return results[0], results[1]

    def same_gradients(self) -> str:
        return same_gradients(self.model, gradients(self.plain))


@check(2, slow=True)
def forms_of_one_object() -> str:
    """Masks, packed positions, embeddings and hidden states: their gradients add up as eager's do."""
    twins = Twins(llama())
    for name in ("labels", "padded on the left", "packed", "hidden states"):
        call = STRUCTURES[name][1]
        found, wanted = twins.step(call)
        for a, b in zip(found.get("hidden_states") or (), wanted.get("hidden_states") or (), strict=True):
            near(a + 0, b.detach(), "a hidden state")
    made: list[dict[str, Any]] = []

    def embeddings() -> dict[str, Any]:
        made.append(STRUCTURES["embeddings with gradients"][1]())
        return made[-1]

    twins.step(embeddings)
    near(made[0]["inputs_embeds"].grad, made[1]["inputs_embeds"].grad, "the gradient of the embeddings")
    return f"{twins.same_gradients()}, {twins.model.megafx.captures} graphs"


@check(2, slow=True)
def without_gradients() -> str:
    twins = Twins(llama())
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, wanted = twins.step(lambda: TRAIN, backward=False)
            near(found.loss, wanted.loss, "the loss")
    return "no_grad and inference_mode"


@check(2, slow=True)
def encoder_outputs_with_gradients() -> str:
    build, call = STRUCTURES["encoder outputs"]
    plain = build()
    model = megafx.parallelize(copy.deepcopy(plain), config())
    memories = []
    for m in (model, plain):
        given = call()
        memories.append(given["encoder_outputs"].last_hidden_state)
        with promoting(m is plain):
            m(**given).loss.backward()
    near(memories[0].grad, memories[1].grad, "the gradient of the encoder's output")
    return same_gradients(model, gradients(plain))


@check(2, slow=True)
def an_encoder_called_by_itself() -> str:
    """What it returns goes into a call of the whole model, whose gradient comes back through it."""
    build, call = STRUCTURES["encoder outputs"]
    plain = build()
    model = megafx.parallelize(copy.deepcopy(plain), config())
    for m in (model, plain):
        given = call()
        ids = IDS[:, :7]
        with promoting(m is plain):
            given["encoder_outputs"] = m.get_encoder()(input_ids=ids, attention_mask=(ids > 3).long(), return_dict=True)
            given["attention_mask"] = (ids > 3).long()
            m(**given).loss.backward()
    return same_gradients(model, gradients(plain))


@check(2, slow=True)
def adapters_train_on_shards() -> str:
    """peft's: only they change, by an optimizer's steps, and the result is eager's."""
    import peft

    def build() -> nn.Module:
        lora = peft.LoraConfig(r=5, target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(llama(), lora).double().train()
        torch.manual_seed(3)
        for name, p in model.named_parameters():
            if "lora" in name:
                nn.init.normal_(p, std=0.3)
        return model

    twins = Twins(build())
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (twins.model, twins.plain)
    ]
    text = ""
    for _ in range(2):
        twins.step(lambda: TRAIN)
        text = twins.same_gradients()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state, wanted = megafx.full_state_dict(twins.model), twins.plain.state_dict()
    for name, value in wanted.items():
        near(state[name], value, name)
    cut = [n for n, p in twins.model.named_parameters() if "base_layer" in n and p.to_local().numel() < p.numel()]
    assert len(cut) == 4, cut
    return text


@check(2, slow=True)
def a_module_left_eager() -> str:
    """Loops over what the data says, between captured parts."""
    import eager_parts as eager

    plain = eager.build()
    options = {"eager_modules": ["layers.*.chosen"]}
    model = megafx.parallelize(copy.deepcopy(plain), config(**options), example_inputs=eager.CALL)
    losses = [m(**eager.CALL) for m in (model, plain)]
    near(losses[0].detach(), losses[1].detach(), "the loss")
    for loss in losses:
        loss.backward()
    dist.barrier()
    return same_gradients(model, gradients(plain))


@check(2, slow=True)
def experts_that_take_their_tokens_by_index() -> str:
    """The number of rows of each expert differs by call; one expert gets none."""
    import index_dispatch as moe

    plain = moe.Model(moe.where_add_in_place).double()
    moe.turn_off(plain, [2])
    model = megafx.parallelize(copy.deepcopy(plain), config())
    for batch, seq in ((2, 5), (3, 4), (1, 1)):
        x = torch.randn(batch, seq, moe.HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seq))
        found, wanted = model(x), plain(x)
        near(found["loss"].detach(), wanted["loss"].detach(), "the loss")
        for result in (found, wanted):
            result["loss"].backward()
    assert model.megafx.captures == 1
    return same_gradients(model, gradients(plain))


class Rounds(nn.Module):
    """Rounds otherwise on each rank, as sums in no fixed order do. Its values decide."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1 + 1e-13 * dist.get_rank()) if bool(x.abs().sum() > 0) else x


@check(2)
def a_module_left_eager_that_rounds_by_rank() -> str:
    """All ranks compute with rank 0's results and gradients, in the first calls and later, so that weights stay alike."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), Rounds(), nn.Linear(6, 6)).double()
    model = megafx.parallelize(plain, config(eager_modules=["1"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(6):
        x = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        own = [loss.detach(), local_of(model[1].scale.grad)]
        first = [value.clone() for value in own]
        for value in first:
            dist.broadcast(value, 0)
        assert all(torch.equal(a, b) for a, b in zip(own, first, strict=True)), step
        optimizer.step(), optimizer.zero_grad()
    return "the same bits on both ranks in six steps"
