"""A parallelized model on gloo ranks, called in all the ways that its signature allows, or does not."""

from __future__ import annotations

import copy
import io
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import Pair, check, config, gradients, logits_of, loss_of, near, raises, same_gradients, same_parameters
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import megafx
from megafx.distributed.tensor import TPTensor
from megafx.errors import AgreementError, UsageError
from megafx.runtime.outputs import LazyTensor


class Collectives(TorchDispatchMode):
    """The collectives called within. seen: their names."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@check(2, slow=True)
def logits_beside_the_loss_are_lazy() -> str:
    pair = Pair("nanogpt", example=True).parallelize()
    inputs = pair.inputs(3, 13)
    wanted, _ = pair.plain(**inputs)
    logits, loss = pair.model(**inputs)
    assert isinstance(logits, LazyTensor) and logits.requires_grad
    with Collectives() as query:
        assert logits.shape == wanted.shape and logits.dtype == wanted.dtype and logits.size(-1) == 67
        assert len(logits) == 3 and "made whole on first use" in repr(logits)
    with Collectives() as use:
        near(logits + 0, wanted.detach(), "the logits")
        near(logits.argmax(-1).double(), wanted.argmax(-1).double(), "the prediction")
    assert (query.seen, len(use.seen)) == ([], 1), (query.seen, use.seen)
    with Collectives() as forward:
        loss_of(pair.model(**inputs))
    forward.seen = [name for name in forward.seen if name.startswith("_c10d_functional.")]  # not the checks of inputs
    assert len(forward.seen) == 4, forward.seen  # embedding, attention, mlp; one of the loss, none of the logits
    loss.backward()
    return f"none in a query, {len(use.seen)} when touched, {len(forward.seen)} in a forward that leaves them alone"


@check(2, slow=True)
def logits_are_made_from_the_weights_of_their_step() -> str:
    """No rank makes logits of a training call without somebody reading them; once the weights changed it is an error."""
    pair = Pair("nanogpt", example=True, sequence_parallel=True).parallelize()
    inputs = pair.inputs(3, 13)
    assert "linear_cross_entropy" in {f.pattern for f in megafx.explain(pair.model).fusions}
    found, stale = pair.model(**inputs), pair.model(**inputs)
    (graph,) = next(iter(pair.model.megafx.graphs.values()))
    names = {getattr(n.target, "__name__", "") for n in graph.executable.parts.forward.graph.nodes}  # called directly
    assert {"linear_ce_stats", "linear_ce_loss"} <= names, names
    near(logits_of(found) + 0, logits_of(pair.plain(**inputs)).detach(), "the logits")
    loss_of(stale).backward()
    torch.optim.SGD(pair.model.parameters(), lr=0.1).step()
    raises(UsageError, "was changed in place .by an optimizer's step", lambda: logits_of(stale) + 0)
    assert (logits_of(found) + 0).isfinite().all()
    return "right before the step, refused after it"


@check(2)
def weights_that_change_before_backward_are_noticed() -> str:
    """Backward needs them as they were in forward; a change of a DTensor does not count as one of its local tensor."""
    pair = Pair("nanogpt", example=True).parallelize()
    loss = loss_of(pair.model(**pair.inputs(2, 9)))
    with torch.no_grad():
        pair.model.h[0].mlp.proj.weight.mul_(2.0)
    raises(UsageError, "'h.0.mlp.proj.weight' was changed in place between forward and backward", loss.backward)
    return "refused"


@check(2, slow=True)
def the_loss_of_the_users_loop() -> str:
    """`loss_fn=` brings it into the graph; calls with loss_inputs return (loss, output)."""

    def loss_fn(output: Any, target: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(output[0].flatten(0, 1), target.flatten(), label_smoothing=0.1) * weight.mean()

    pair = Pair("nanogpt")
    inputs = pair.inputs(2, 16)
    given = {"target": inputs["targets"], "weight": torch.arange(1.0, 4.0, dtype=torch.float64)}
    example = {"idx": inputs["idx"], "loss_inputs": given}
    megafx.parallelize(pair.model, config(sequence_parallel=True), example_inputs=example, loss_fn=loss_fn)
    inputs = pair.inputs(3, 7)
    given["target"] = inputs["targets"]
    loss, (logits, none) = pair.model(inputs["idx"], loss_inputs=given)
    wanted = loss_fn(pair.plain(inputs["idx"]), **given)
    near(loss.detach(), wanted.detach(), "the loss")
    assert isinstance(logits, LazyTensor) and none is None
    loss.backward()
    wanted.backward()
    assert pair.model.megafx.captures == 1
    return same_gradients(pair.model, gradients(pair.plain))


@check(2, slow=True)
def frozen_parameters() -> str:
    """Freezing after the plan is a new graph; parameters stay where they are; frozen ones get no gradient."""
    pair = Pair("nanogpt", example=True).parallelize()
    for model in (pair.model, pair.plain):
        model.wpe.requires_grad_(False)
        model.h[0].attn.requires_grad_(False)
    pair.step(2, 9)
    assert pair.model.h[0].attn.qkv.weight.grad is None
    assert pair.model.megafx.captures == 2
    return same_gradients(pair.model, gradients(pair.plain))


@check(2)
@mock.patch("megafx.runtime.keys.COMPARED", 0)  # values that lie on a GPU: their hashes are compared now and then
def other_inputs_on_one_rank_are_refused() -> str:
    pair = Pair("nanogpt", example=True, check_inputs_every=5).parallelize()
    inputs = pair.inputs(2, 16)
    mine = {**inputs, "targets": inputs["targets"].roll(dist.get_rank())}
    causes = "got different batches, as from a DistributedSampler over all ranks, another shuffle seed on each"
    text = f"^step 0: input targets is not the same on all tensor-parallel ranks .rank 1 against rank 0.: they {causes}"
    raises(AgreementError, text, lambda: pair.model(**mine))
    shorter = {k: v[:, : 16 - dist.get_rank()] for k, v in inputs.items()}
    raises(
        AgreementError, f"^call 0: tensor-parallel ranks {causes}.* size 1 of 'idx' is", lambda: pair.model(**shorter)
    )
    with torch.set_grad_enabled(dist.get_rank() == 0):
        text = r"^call 0: tensor-parallel ranks are in different modes, as after model.eval\(\) or torch.no_grad\(\) on one"
        raises(AgreementError, text, lambda: pair.model(**inputs))
    other = forms_of(seed=0)
    if dist.get_rank() == 1:
        other.up = nn.Linear(6, 10)
    raises(AgreementError, "differ in the model: 'up.weight", lambda: megafx.parallelize(other, config()))
    for _ in range(4):
        pair.model(**inputs)
    step = pair.model.megafx.state.step
    while step % 5:
        pair.model(**inputs)
        step += 1
    raises(AgreementError, f"step {step}: input targets", lambda: pair.model(**mine))
    return "on the first steps, and later every 5"


@check(2)
def misuse_is_refused() -> str:
    pair = Pair("nanogpt", example=True).parallelize()
    model = pair.model
    x = torch.ones(2, 24, dtype=torch.float64)
    text = r"a call of a copy of 'h.0.mlp.fc', a submodule of a parallelized model: its parameters are shards\n"
    raises(UsageError, text, lambda: copy.deepcopy(model.h[0].mlp.fc)(x))
    advice = r"\n  fix: .*data parallelism is Config\(data_parallel_size="
    text = "DistributedDataParallel around a model that megafx has parallelized" + advice
    raises(UsageError, text, lambda: nn.parallel.DistributedDataParallel(model))
    text = "fully_shard around a model that megafx has parallelized" + advice
    for part in (model, model.h[0].mlp):
        raises(UsageError, text, lambda part=part: fully_shard(part))
    text = "tensor_model_parallel_size=3, but the world has 2 ranks\n  fix: start 3 ranks, or set data_parallel_size"
    raises(AgreementError, text, lambda: megafx.parallelize(copy.deepcopy(pair.plain), config(t=3)))
    raises(UsageError, "parallelized already", lambda: megafx.parallelize(model, config()))
    late = megafx.parallelize(pair.plain, config())
    raises(UsageError, "parallelized already", lambda: megafx.parallelize(nn.ModuleList([*late.children()]), config()))
    return "copies of submodules, DDP, fully_shard, a wrong world size, twice"


@check(2, slow=True)
def direct_calls_of_submodules() -> str:
    """Each is a graph of its own for all sizes, with gradients that add up with those of calls of the whole model."""
    pair = Pair("nanogpt", example=True)
    hooked: list[int] = []
    pair.model.h[0].register_forward_hook(lambda *_: hooked.append(1))
    model = pair.parallelize().model
    captures, capturing = model.megafx.captures, len(hooked)
    parts = ("h.0", "h.0.mlp", "lm_head")
    for batch, seq in ((2, 9), (3, 5)):
        drawn = torch.randn(batch, seq, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        for part in parts:
            inputs = [drawn.clone().requires_grad_() for _ in range(2)]
            results = [m.get_submodule(part)(x) for m, x in zip((model, pair.plain), inputs, strict=True)]
            near(results[0].detach() + 0, results[1].detach(), part)
            for result in results:
                result.square().sum().backward()
            near(inputs[0].grad, inputs[1].grad, f"the gradient of the input of {part}")
        pair.step(batch, seq)
        same_gradients(model, gradients(pair.plain))
        assert model.megafx.captures == captures + len(parts), model.megafx.captures
    assert len(hooked) == capturing + 4, "direct calls and those of the whole model run the hooks of what is called"
    ids = pair.inputs(2, 6)["idx"]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            near(model.wte(ids) + 0, pair.plain.wte(ids), "an embedding")
            near(model.h[0].forward(drawn) + 0, pair.plain.h[0](drawn), "the forward of a block")
    with torch.no_grad():
        near(copy.deepcopy(model).h[0](drawn) + 0, pair.plain.h[0](drawn), "a block of a copy of the model")
    return same_gradients(model, gradients(pair.plain))


class Forms(nn.Module):
    """Takes a dict of tensors and a list, keeps a running mean, returns a dict. No size divides by 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor], extra: list[Tensor], labels: Tensor | None = None) -> dict[str, Any]:
        x = self.embed(batch["ids"]) + batch["positions"] + extra[0] * extra[1]
        x = x + self.down(torch.relu(self.up(x)))
        if self.training:
            self.calls += 1
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        logits = self.head(x - self.mean)
        if labels is None:
            return {"logits": logits, "parts": (x,)}
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits, "parts": (x,)}


def call_of(batch: int, seq: int, labels: bool = True) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(batch * seq)
    floats = [torch.randn(batch, seq, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    ids = torch.randint(0, 11, (batch, seq), generator=generator)
    call = {"batch": {"ids": ids, "positions": floats[0]}, "extra": floats[1:]}
    return call | {"labels": ids.roll(1)} if labels else call


def forms_of(seed: int) -> Forms:
    torch.manual_seed(seed)
    return Forms().double()


def forms(**options: Any) -> tuple[nn.Module, nn.Module]:
    plain = forms_of(seed=0)
    return megafx.parallelize(copy.deepcopy(plain), config(**options)), plain


@check(2)
def nested_inputs_and_mutated_buffers() -> str:
    model, plain = forms()
    for batch, seq in ((2, 8), (3, 5), (1, 7)):
        mine, theirs = model(**call_of(batch, seq)), plain(**call_of(batch, seq))
        assert list(mine) == list(theirs) and type(mine["parts"]) is tuple
        near(mine["loss"].detach(), theirs["loss"].detach(), "the loss")
        near(mine["logits"] + 0, theirs["logits"].detach(), "the logits")
        near(mine["parts"][0] + 0, theirs["parts"][0].detach(), "the hidden state")
        mine["loss"].backward()
        theirs["loss"].backward()
        near(model.mean, plain.mean, "the running mean")
    assert model.calls == plain.calls == 3
    assert model.megafx.captures == 1
    return same_gradients(model, gradients(plain))


@check(2)
def gradients_of_inputs() -> str:
    model, plain = forms(sequence_parallel=True)
    leaves = []
    for m in (model, plain):
        call = call_of(2, 7)
        leaves.append([call["batch"]["positions"].requires_grad_(), call["extra"][1].requires_grad_()])
        m(**call)["loss"].backward()
    for a, b in zip(*leaves, strict=True):
        near(a.grad, b.grad, "the gradient of an input")
    return same_gradients(model, gradients(plain))


@check(2)
def a_loss_outside_of_the_model() -> str:
    """Without a loss outputs are whole and differentiable."""
    model, plain = forms()
    for batch, seq in ((2, 8), (3, 5)):
        for m in (model, plain):
            call = call_of(batch, seq)
            labels = call.pop("labels")
            out = m(**call)
            loss = cross_entropy(out["logits"].flatten(0, 1), labels.flatten()) + out["parts"][0].square().mean()
            loss.backward()
    assert model.megafx.captures == 1
    return same_gradients(model, gradients(plain))


@check(2)
def differentiable_outputs_beside_the_loss() -> str:
    model, plain = forms(differentiable_outputs=True)
    for m in (model, plain):
        out = m(**call_of(3, 5))
        (out["loss"] * 2 + (out["logits"] ** 2).mean() + out["parts"][0].sum()).backward()
    return same_gradients(model, gradients(plain))


@check(2)
def outputs_left_sharded() -> str:
    """gather_outputs=False: DTensors, whose gradients come back sharded."""
    model, plain = forms(gather_outputs=False)
    call = call_of(3, 5, labels=False)
    for loss_of_shards in (lambda x: x.full_tensor().exp().sum(), lambda x: x.exp().sum()):
        model.zero_grad(), plain.zero_grad()
        mine, theirs = model(**call)["logits"], plain(**call)["logits"]
        assert isinstance(mine, TPTensor) and mine.shape == theirs.shape
        assert mine.to_local().numel() < theirs.numel()
        near(mine.full_tensor().detach(), theirs.detach(), "the logits")
        loss, wanted = loss_of_shards(mine), theirs.exp().sum()
        near(loss.detach(), wanted.detach(), "the loss")
        loss.backward()
        wanted.backward()
        seen = same_gradients(model, gradients(plain))
    return seen


@check(2)
def gradients_by_autograd_grad() -> str:
    """Hooks of parameters see shards; nothing is left in `.grad`. A hook after accumulation runs once a step."""
    model, plain = forms()
    wanted = torch.autograd.grad(plain(**call_of(3, 5))["loss"], list(plain.parameters()))
    seen: list[Any] = []
    model.up.weight.register_hook(lambda gradient: seen.append(type(gradient)))
    found = torch.autograd.grad(model(**call_of(3, 5))["loss"], list(model.parameters()))
    assert seen == [TPTensor] and all(p.grad is None for p in model.parameters())
    for a, b in zip(found, wanted, strict=True):
        near(a.full_tensor(), b, "a gradient")
    model.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    model(**call_of(3, 5))["loss"].backward()
    assert seen[1:] == [TPTensor, model.down.weight.shape]
    return f"{len(found)} gradients"


@check(2)
def a_meta_model_is_sharded_and_filled_later() -> str:
    plain = forms_of(seed=0)
    with torch.device("meta"):
        model = Forms().double()
    model = megafx.parallelize(model, config(), example_inputs=call_of(2, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.up.weight.is_meta and model.up.weight.to_local().shape == (5, 6) and model.tp_size == 2
    model.load_state_dict(plain.state_dict())
    found, wanted = model(**call_of(2, 8))["loss"], plain(**call_of(2, 8))["loss"]
    near(found.detach(), wanted.detach(), "the loss")
    found.backward()
    before = model.up.weight.full_tensor().clone()
    optimizer.step()
    assert not torch.equal(model.up.weight.full_tensor(), before)
    return "an optimizer that is older than the values steps them"


@check(2)
def gradients_accumulate_into_kept_memory() -> str:
    """zero_grad(set_to_none=False), scaled losses, two backwards of one graph."""
    model, plain = forms()
    for m in (model, plain):
        m(**call_of(2, 8))["loss"].backward()
        m.zero_grad(set_to_none=False)
        for batch, seq in ((2, 8), (3, 5)):
            (m(**call_of(batch, seq))["loss"] / 2).backward()
        loss = m(**call_of(1, 6))["loss"]
        loss.backward(retain_graph=True)
        (3 * loss).backward()
    return same_gradients(model, gradients(plain))


@check(2, slow=True)
def autocast_has_a_graph_of_its_own() -> str:
    model, plain = forms()
    model.float()
    plain.float()

    def call(m: nn.Module) -> Tensor:
        inputs = torch.utils._pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, call_of(2, 8))
        m.zero_grad()
        loss: Tensor = m(**inputs)["loss"]
        loss.backward()
        return loss.detach()

    near(call(model), call(plain), "the loss", 1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(call(model), call(plain), "the loss under autocast", 2e-2)
    assert model.megafx.captures == 2
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return same_gradients(model, gradients(plain), 5e-2)


@check(2, slow=True)
def a_run_is_saved_and_resumed() -> str:
    """model and optimizer state through files of each rank; weights through the whole state dict; a deep copy goes on."""
    model, plain = forms()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain)]

    def steps(m: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch, seq in ((2, 8), (3, 5)):
            optimizer.zero_grad()
            m(**call_of(batch, seq))["loss"].backward()
            optimizer.step()

    for m, optimizer in zip((model, plain), optimizers, strict=True):
        steps(m, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizers[0].state_dict()}, file)
    other, _ = forms()
    resumed = torch.optim.AdamW(other.parameters(), lr=1e-2)
    file.seek(0)
    state = torch.load(file, weights_only=False)
    other(**call_of(2, 8))  # plans: the shards of the file are those of this plan
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    copied = copy.deepcopy(model)
    steps(other, resumed)
    steps(plain, optimizers[1])
    same_parameters(other, plain)
    whole = forms_of(seed=1)
    whole.load_state_dict(megafx.full_state_dict(other))
    same_parameters(other, whole)
    other.load_state_dict(forms_of(seed=2).state_dict())
    same_parameters(other, forms_of(seed=2))
    call = call_of(2, 8)
    near(other(**call)["loss"].detach(), forms_of(seed=2)(**call)["loss"].detach(), "the loss of whole values given")
    near(copied(**call_of(2, 8))["loss"].detach(), model(**call_of(2, 8))["loss"].detach(), "the loss of a copy")
    return "equal to the run that was not interrupted"
