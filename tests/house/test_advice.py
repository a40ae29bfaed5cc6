"""Covers: every fix on docs/errors.md. A test raises the error and follows its advice (`refused`, tests/support/advice.py), or
a line here says which older test does, or why none can."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from advice import rows, rows_of

TESTS = Path(__file__).resolve().parents[1]


ELSEWHERE: dict[str, str] = {}  # row -> the test file that follows its advice
NOT_FOLLOWED: dict[str, list[str]] = {  # reason -> rows
    "the ranks of a job part: the advice is to do the same on every rank, as all of tests/dist does": [
        "<asked>, but the world has <world> ranks",
        "<sizes>, but there is no process group",
        "<start> <OTHER_BATCHES>: <what> is <k> on rank <",
        "<start> <j>",
        "<start> are in different contexts of torch.autoc",
        "<start> are in different modes, as after model.e",
        "<start> hold other values in attributes, globals",
        "<start> make different calls: <which>",
        "call <step>: <kind> ranks have not made the same",
        "call <step>: parameter '<name>'<more>, which ten",
        "data-parallel ranks <i> and <j> differ in the sh",
        "data-parallel ranks run different graphs, whose ",
        "data_parallel_shard_size=<data_parallel_shard_si",
        "data_parallel_size=<data_parallel_size>, but the",
        "mesh <mesh> has <ndim> dims, none of them named ",
        "mesh <mesh> has no dim '<TENSOR_AXIS>'",
        "rank <other> and rank 0 differ in <what>: <first",
        "ranks wrote different values into <different> in",
        "step <step>: input <wrong> is not the same on al",
        "step <step>: replicas <same> and <a> of dim '<na",
        "tensor-parallel ranks make different calls: rank",
        "tensor_model_parallel_size=<size>, but dim '<TEN",
        "<what> is a call of ranks <ranks>, but rank <mis",
        "rank <mine> calls <what>, rank <other> <other>",
        "rank <rank> stopped in <what>: <reason> (<splitl",
        "<what> not finite<which>",
    ],
    "the machine, files or packages of a job, which a test cannot change": [
        "FlexAttention has no backward on a CPU in torch",
        "the model does not fit: <room> GiB are to be had",
        "<call> of a model whose weights are on several r",
        "a Hugging Face model needs transformers",
        "no layout of <gpus> GPUs can be planned (<why>)",
        "nothing fits into <memory> on <gpus> GPUs; the l",
        "one process cannot measure the link between rank",
        "'<folder>' was removed while it was written: ano",
        "'<path>' could not be read to its end, and part ",
        "<TORCH_METADATA> of a checkpoint <what>, which m",
        "<folder> does not exist: the Trainer resumes at ",
        "<name>, which another rank wrote, is not to be s",
        "<what>: <found>",
        "checkpoint <path> was read, and could not be tak",
        "there is no valid checkpoint in '<source>'",
    ],
    "a fault of a pass or rule of one's own, or of megafx: the advice is where to look": [
        "<target> writes into memory, which cannot be wri",
        "differentiating the model fixes the sizes <fixed",
        "output '<lost>' requires a gradient in eager mod",
        "pass '<name>' changed numbers: <worst> by <worst",
        "pass '<name>' changes program.graph after it was",
        "pass '<name>' fixes the size <what>, which varie",
        "pass '<name>' left phase <name>, but its contrac",
        "<name>: <message>",
        "autocast makes <target> compute <wanted>, and no",
        "parameter '<fqn>' is to be stored at <placement>",
        "the plan is for <t> ranks, not for <t>",
        "the plan is for another graph: it does not place",
        "the plan places %<name> (<target>) as <ins> -> <",
        "the plan uses %<name> at <placement>, but it is ",
        "%<name> (<target>) of <held>: <found>",
        "%<name>: a <op> cannot be simulated",
        "<target> gives a local shape <shape> where its p",
        "no transition from <src> to <dst>",
        "the call is not right as it is",
        "there is no way yet to sabotage <target>",
        "a graph for mesh axis '<axis>' runs outside of t",
        "transition to <dst>: where its operand is placed",
    ],
    "not followed by a test yet": [
        "activation_memory_budget=<activation_memory_budget>",
        "<name>=<text> is out of range",
        "<where> <what>",
        "no such fusion profile: <path>",
        "<target> selects by data, and what follows needs",
        "<what><more>: quantised layers cannot enter a gr",
        "a Python loop runs over a tensor whose length th",
        "a Python loop runs over what the data of a tenso",
        "a cache holds '<path>', a <__module__>.<__qualna",
        "a draw was compared with layerdrop, and no layer",
        "a hook is set under autocast or no_grad on a val",
        "a hook on a module whose call has no tensors: a ",
        "a hook on a value computes with a tensor that fo",
        "a hook would get a <__module__>.<__qualname__>, ",
        "a layer that layerdrop may leave out does not re",
        "a module that is left eager gets a number that d",
        "accelerate's <__name__> moves weights and inputs",
        "as_strided reads the memory of a tensor that doe",
        "forward stores a tensor in the module: <message>",
        "the model computes with sizes that the call does",
        "the model returns or takes something that is no ",
        "the module is a Float8Linear<more>: it scales a ",
        "the shape of a result depends on the data of a t",
        "<style>, but <target> cannot be sharded so",
        "cpu_offloading with a budget is priced by the li",
        "data parallelism cannot cut the batch: %<name> (",
        "no plan satisfies every policy and override: the",
        "no plan was found in <PATIENCE> s: <variables> c",
        "override '<pattern>' is expert, but '<key>' take",
        "override '<pattern>' is expert, but '<name>' of ",
        "override '<pattern>' is expert, but '<path>' has",
        "override '<pattern>' is expert, but experts that",
        "override '<pattern>' is expert, but what '<key>'",
        "override '<pattern>' is expert: it names several",
        "override: <name> is split over experts, but <wha",
        "the batch of this call is no size that may vary,",
        "<what> reads a gradient that `no_sync` holds: it",
        "'<name>' is on the meta device: it has no values",
        "'<name>' was changed in place between forward an",
        "--import <name>: <error>",
        "<__name__>.step()<how> takes no fp32 gradients o",
        "<count> stages for a model of <places> parts",
        "<func> <does> <what> of shape <shape>, of which ",
        "<func> on a cache that is sharded <placement> ov",
        "<name> of shape <shape> is set to data of shape ",
        "<option> <text> has no value",
        "<placements> cannot be redistributed to <placeme",
        "<what> is called on rank <get_rank> for a model ",
        "<what> is the shard of rank <rank> of <ranks> of",
        "<where>: it is computed in eager mode, and hooks",
        "<where>: it is computed in eager mode, from what",
        "<where>: the backward graph of several ranks has",
        "<wrapper> around a model that megafx has paralle",
        "a call of a copy of '<fqn>', a submodule of a pa",
        "a call of a parallelized model inside of <around",
        "a direct call of '<part>' (<__name__>), a submod",
        "a hook draws random numbers, which its code does",
        "a hook on a parameter holds the parameter as it ",
        "a hook returned <result> where there was <traced",
        "a loss depends on what a hook recorded in a part",
        "a loss of what hooks recorded in an earlier call",
        "a module that is left eager returned <result>, i",
        "a module that is left eager writes into one of i",
        "a plan alone has no graphs whose memory could be",
        "a shard of a cache cannot be pickled",
        "an optimizer (<__name__>) has parameters that we",
        "an optimizer (<__name__>) was made of this model",
        "gradients arrive at outputs beside the loss, and",
        "logits of a training call are read after '<name>",
        "parameter '<fqn>' is parallelized already",
        "parameter '<name>' was replaced after megafx.par",
        "real ranks are compared with one process for ten",
        "save_pretrained(distributed_checkpoint=True) wou",
        "the Trainer's loss would be of each data-paralle",
        "the dump was made with passes of somebody's own ",
        "the gradient of '<name>' was changed in place wh",
        "the gradient of a parameter of <shape> is <__nam",
        "the graphs of this model name no modules",
        "the model is not planned yet, so it is not known",
        "the model returns nothing that takes a gradient",
        "this module is left eager and changes its buffer",
        "this report has no graph",
        "torch asked for <self> as if its shards were tor",
        "two threads call one model at the same time on s",
        "what a hook, or a module that stays eager, retur",
        "'<name>', whose ranks hold summands, is to be sa",
        "'<source>' has no <lacking>",
        "tensors of dtype <name> are not read",
    ],
}


@cache
def followed() -> set[str]:
    """The rows that tests name in `refused("...")`, or in the tables of advice tests."""
    found = set()
    for file in (TESTS / "errors").glob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 8:
                found |= {node.value} if rows_of(node.value) else set()
    return found


def test_every_advice_is_followed_by_a_test() -> None:
    named = [*followed(), *ELSEWHERE, *(row for listed in NOT_FOLLOWED.values() for row in listed)]
    left = [row for _, row, fix in rows() if fix and not any(row.startswith(name) for name in named)]
    assert not left, "\n".join(left)
