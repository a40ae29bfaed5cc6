"""The `megafx` command. Each of its commands is a call of the Python function that its help names.

    megafx plan llama.json --tp 8 --sp auto --seq 8192 --batch 1 --hardware h100-nvlink    no GPU, no ranks, no weights
    megafx explain my_package.models:GPT --set layers=2 --input 'int64[2,64]' --tp 4 --html plan.html
    megafx verify LlamaForCausalLM --set hidden_size=64 --set num_hidden_layers=2 --tp 2

MODEL is a Hugging Face config (its .json file or folder), an architecture (LlamaForCausalLM), or 'module:name' of a class or
a function of yours that makes the model, or a (model, example_inputs) pair ('models/gpt.py:GPT' works too).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from megafx.config import STYLES, Config, choices_of, grouped_fields, is_whole
from megafx.errors import ConfigError, MegafxError, UsageError
from megafx.named_model import check_name, did_you_mean, example_inputs, input_spec, load_model
from megafx.progress import progress, stage
from megafx.units import bytes_of, device_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done; 2 arguments, files or a config that do not fit; 1 another error, or something was found (verify,
    check-rules, diff, replay), does not fit (rehearse), or nothing was (plan --gpus)."""
    given = sys.argv[1:] if argv is None else argv
    try:
        args, unknown = _parser().parse_known_args(given or ["--help"])
        if unknown:
            args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        with progress(lambda *_: None) if getattr(args, "quiet", False) else stage(args.command):
            status: int = args.run(args)
            return status
    except BrokenPipeError:  # `megafx plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except MegafxError as error:
        print(f"megafx: {type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, (UsageError, ConfigError)) else 1


# -- what the commands take


class _Parser(argparse.ArgumentParser):
    """Says what a misspelt option, command or choice may have been."""

    def error(self, message: str) -> NoReturn:
        wrong, known = re.match(r"unrecognized arguments: .*?(--[\w-]+)", message), [*self._option_string_actions]
        if wrong is None and (wrong := re.search(r"invalid choice: '(.+?)' \(choose from (.*)\)", message)):
            known = re.findall(r"[\w-]+", wrong[2])
        near = did_you_mean(wrong[1], known) if wrong else ""
        super().error(message + f"\n  fix: {near}`{self.prog} --help` lists what there is")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="megafx", description=__doc__, formatter_class=raw)
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print versions, as the command does")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int], python: str, help_text: str, **more: Any) -> Any:
        name = run.__name__.strip("_").replace("_", "-")
        command = commands.add_parser(name, help=help_text, description=f"{help_text}. In Python: {python}.", **more)
        command.set_defaults(run=run, command=name, parser=command)
        return command.add_argument, command

    def add_for_model(run: Callable[[argparse.Namespace], int], python: str, help_text: str) -> Any:
        name = run.__name__.strip("_")
        argument, command = add(run, python, help_text, usage=f"megafx {name} MODEL [options]")
        _add_model(argument)
        argument("--config", type=Path, help="YAML file of Config fields; the options below override it")
        argument("--quiet", action="store_true", help="show no progress")
        _add_fields(command.add_argument_group)
        return argument

    argument = add_for_model(_plan, "megafx.plan", "plan a model and print where everything is")
    argument("--save", type=_output, metavar="FILE", help="write the plan as JSON")
    argument("--predict-memory", action="store_true", help="memory of a rank over a step (megafx.predict_memory)")
    argument(
        "--gpus", type=_count, metavar="N", help="megafx.search: the ten best configurations of N GPUs; needs --memory"
    )
    argument("--memory", type=device_memory, metavar="SIZE", help="of each, for example 80GiB")
    about = "with --gpus: rows of a step of all GPUs, in as many micro-batches as it takes"
    argument("--global-batch", type=_count, metavar="N", help=about)
    argument("--json", type=_output, metavar="FILE", help="with --gpus: write what was found as JSON")
    about = "cut the model into N balanced stages (megafx.report.stages.pipeline_stages)"
    argument("--pipeline-stages", type=_count, metavar="N", help=about)
    argument = add_for_model(_explain, "megafx.explain(megafx.plan(...))", "plan a model and print the report")
    argument("--html", type=_output, metavar="FILE", help="write the report as a page")
    argument("--json", type=_output, metavar="FILE", help="write the report as JSON")
    argument("--trace", type=_output, metavar="FILE", help="write the modelled step as a Chrome trace, for Perfetto")
    about = "compile the call, and show what its graphs hold over the step (megafx.predict_memory)"
    argument("--predict-memory", action="store_true", help=about)
    argument("--model-explorer", type=_output, metavar="FILE", help="write the graph as JSON of Model Explorer")
    about = "prove a run of many ranks: order of collectives, memory of each class of ranks, modelled step"
    argument = add_for_model(_rehearse, "megafx.rehearse", about)
    argument("--world", type=_count, metavar="N", help="ranks in all (default: the product of the sizes)")
    argument(
        "--pipeline-stages", type=_count, metavar="N", help="of a pipeline (megafx.pipeline), cut as evenly as can be"
    )
    argument("--microbatches", type=_count, metavar="N", help="of a pipeline: parts of a rank's batch in a step")
    argument("--schedule", default="1F1B", help="of a pipeline: GPipe, 1F1B (default) or Interleaved1F1B")
    argument("--json", type=_output, metavar="FILE", help="write what was found as JSON")
    argument = add_for_model(
        _verify,
        "megafx.verify",
        "run all ranks of one call (here, or under torchrun on real ranks), and compare with eager",
    )
    argument("--types", action="store_true", help="check the types of the graph alone; nothing is computed")
    about = "megafx.sabotage: leave out each collective, and replace it by another; is every change noticed?"
    argument("--sabotage", action="store_true", help=about)

    argument, _ = add(_passes, "megafx.compiler.stages.pipeline", "print the pipeline: every pass in its order")
    argument("--config", type=Path, help="YAML file of Config fields: with the passes that it adds")
    argument, _ = add(_check_rules, "megafx.checks.rules.check_rules", "try every sharding rule against the real op")
    argument("ops", nargs="*", metavar="OP", help="only these, for example aten.linear.default")
    where = "where ops and rules of your own are made"
    argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=where)
    both_ways = "turn a checkpoint folder into safetensors files, or such files into one"
    argument, _ = add(_convert, "megafx.checkpoint.convert.convert", both_ways)
    argument("source", type=Path, help="folder of megafx, of torch.distributed.checkpoint, or with safetensors")
    argument("target", type=Path, help="folder to write")
    argument("--model", help="as for plan; default: in SOURCE")
    _add_settings(argument)
    argument(
        "--max-shard-size",
        type=lambda text: bytes_of(text, "max_shard_size"),
        default="5GB",
        metavar="SIZE",
        help="of a safetensors file (default: 5GB)",
    )
    argument, _ = add(_diff, "megafx.diff", "compare two saved plans, two reports, or two dump folders graph by graph")
    argument("before", type=Path)
    argument("after", type=Path)
    argument("--html", type=_output, metavar="FILE", help="write two reports side by side")
    argument, _ = add(_profile_hardware, "megafx.profile_hardware", "measure this machine, for --hardware FILE")
    argument("file", type=_output, metavar="FILE", help="YAML file to write")
    argument("--link", metavar="PROFILE", help="in one process (without torchrun): whose link is taken over")
    usage = "megafx replay FOLDER MODEL [options]"
    argument, _ = add(_replay, "megafx.replay", "compile as a dump folder says, and compare its graphs", usage=usage)
    argument("folder", type=Path, metavar="FOLDER", help="a folder that MEGAFX_DUMP wrote")
    _add_model(argument)
    add(_version, "megafx.__version__", "print versions, for bug reports")
    return parser


def _told(found: Any) -> int:
    """Print a result; the exit status that says whether it is true."""
    print(found)
    return 0 if found else 1


def _output(text: str) -> Path:
    """A file that can be written. A wrong path is an error before the work, not after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        found = f"'{path}' is a folder" if path.is_dir() else f"there is no folder '{path.parent}'"
        raise argparse.ArgumentTypeError(f"{found}; give a file to write")
    return path


def _input(text: str) -> str:
    input_spec(text)  # a wrong one is an error before torch is imported and the model built
    return text


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number of at least 1")
    return int(text)


_INPUT = (
    "an example input: NAME=DTYPE[SIZES], or without a name for a positional one ('ids=int64[2,64]'); once for each. "
    "Hugging Face models need none"
)
SWITCH: dict[Any, str] = {True: "on", False: "off"}
# fields of which an option gives one item
LISTS = {"overrides": "PATTERN=STYLE", "eager_modules": "GLOB", "recompute_modules": "NAME"}


def _add_model(argument: Callable[..., Any]) -> None:
    argument("model", metavar="MODEL", help="Hugging Face config or architecture, or module:name of your own")
    _add_settings(argument)
    argument("--input", type=_input, action="append", default=[], dest="inputs", metavar="SPEC", help=_INPUT)


def _add_settings(argument: Callable[..., Any]) -> None:
    about = "a field of the Hugging Face config, or an argument of the class or function; once for each"
    argument("--set", action="append", default=[], dest="settings", metavar="NAME=VALUE", help=about)


def _add_fields(add_group: Callable[[str], argparse._ArgumentGroup]) -> None:
    """An option for each field of Config that a shell can give: `--seq-length` for seq_length. Switches are on or off."""
    for title, f in [(title, f) for title, fields in grouped_fields().items() for f in fields]:
        if f is grouped_fields()[title][0]:
            group = add_group(f"fields of megafx.Config: {title}")
        how: dict[str, Any] = {"dest": f.name, "metavar": f.name.rpartition("_")[2].upper()}
        choices, text = choices_of(f.name), f.metadata["doc"]
        if choices:
            how |= {"choices": [SWITCH.get(c, c) for c in choices if c is not None], "metavar": None}
        elif is_whole(f.name):
            how |= {"type": int, "metavar": "N"}
        elif f.name in LISTS:
            how |= {"action": "append", "metavar": LISTS[f.name]}
            text += "; once for each" + (f" ({', '.join(STYLES)})" if f.name == "overrides" else "")
        elif f.default is dataclasses.MISSING:  # functions: for the file of --config
            continue
        default = None if f.name in LISTS else f.default
        shown = SWITCH.get(default, default) if choices else default
        names = [f"--{f.metadata['short']}"] * bool(f.metadata["short"]) + ["--" + f.name.replace("_", "-")]
        group.add_argument(*names, help=text + ("" if shown is None else f" (default: {shown})"), **how)


def _pairs(texts: Sequence[str], option: str, form: str = "NAME=VALUE") -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise UsageError(f"{option} {text} has no value", fix=f"write {option} {form}")
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _value(text: str) -> Any:
    """JSON, or else YAML, which takes words without quotes, and 1e-5 for one."""
    try:
        return json.loads(text)
    except ValueError:
        return yaml.safe_load(text)


def _config(args: argparse.Namespace) -> Config:
    config, values = Config.from_yaml(args.config) if args.config else Config(), {"on": True, "off": False}
    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Config)}
    if given["overrides"]:
        given["overrides"] = _pairs(given["overrides"], "--overrides", LISTS["overrides"])
    plain = {n: values.get(v, v) if isinstance(v, str) else v for n, v in given.items() if v is not None}
    config = config.replace(**plain)
    if config.hardware is not None:
        from megafx.planner.hardware import Hardware

        Hardware.load(config.hardware)  # a wrong name is an error before the model is built
    if config.fusion_profile is not None:
        from megafx.planner.fusion_profile import FusionProfile

        FusionProfile.choose(config.fusion_profile, "")
    return config


def _model(args: argparse.Namespace, device: str = "meta") -> tuple[Any, Any]:
    """(model, example inputs or None) that the arguments name."""
    settings = {name: _value(value) for name, value in _pairs(args.settings, "--set").items()}
    check_name(args.model, settings)
    with stage("import torch"):
        from megafx.capture.libraries.huggingface import is_hf_model
    with stage("build the model"):
        model, inputs = load_model(args.model, settings, device=device)
    given = getattr(args, "inputs", [])
    if given:
        inputs = example_inputs(given, model, device=device)
    elif inputs is None and hasattr(args, "inputs") and not is_hf_model(model):
        takes = str(inspect.signature(model.forward)).partition(" ->")[0]
        fix = f"describe a call of forward{takes}: --input NAME=DTYPE[SIZES] for each argument, as --input 'ids=int64[2,64]'"
        raise UsageError(f"the inputs of a {type(model).__name__} are unknown", fix=fix)
    return model, inputs


# -- the commands


def _plan(args: argparse.Namespace) -> int:
    import megafx

    if (args.gpus is None) != (args.memory is None):
        raise UsageError("--gpus and --memory go together", fix="for example --gpus 8 --memory 80GiB")
    if args.global_batch is not None and args.gpus is None:
        raise UsageError(
            "--global-batch without --gpus: a plan is of one micro-batch",
            fix="--micro-batch-size N, or --gpus N --memory SIZE",
        )
    if args.json and args.gpus is None:
        raise UsageError(
            "--json without --gpus: a plan is written by --save", fix="--save FILE, or megafx explain --json FILE"
        )
    config = _config(args)
    model, inputs = _model(args)
    if args.gpus is not None:
        batches = (1, 2, 4, 8) if args.micro_batch_size is None else (args.micro_batch_size,)
        options = {"example_inputs": inputs, "batches": batches, "global_batch": args.global_batch}
        found = megafx.search(model, args.gpus, args.memory, config, **options)
        print(found)
        if args.json:
            args.json.write_text(found.to_json())
        return 0 if found.best else 1
    plan = megafx.plan(model, config, example_inputs=inputs)
    if args.pipeline_stages is not None:
        from megafx.report.stages import pipeline_stages

        stages = pipeline_stages(megafx.explain(plan), args.pipeline_stages)
        print("forward and backward of a micro-batch, and the modules of each stage", *stages, sep="\n")
        return 0
    print(plan)
    if args.predict_memory:
        print(megafx.predict_memory(model, config, example_inputs=inputs))
    if args.save:
        plan.save(args.save)
    return 0


def _explain(args: argparse.Namespace) -> int:
    import megafx

    config = _config(args)
    model, inputs = _model(args)
    report = megafx.explain(megafx.plan(model, config, example_inputs=inputs))
    if args.predict_memory:
        predict = functools.partial(megafx.predict_memory, model, config, example_inputs=inputs)
        report.predict = functools.cache(predict)  # each of the files below takes it
    print(report)
    if args.predict_memory:
        print(report.memory())
    if args.html:
        report.html(args.html)
    if args.json:
        args.json.write_text(report.to_json())
    if args.trace:
        report.trace(args.trace)
    if args.model_explorer:
        from megafx.report.exports import graph_collection

        args.model_explorer.write_text(json.dumps(graph_collection(report.costed, args.model)))
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    import megafx

    config = _config(args)
    model, inputs = _model(args)
    pipeline = {"stages": args.pipeline_stages, "microbatches": args.microbatches, "schedule": args.schedule}
    found = megafx.rehearse(model, config, args.world, **pipeline, example_inputs=inputs)
    if args.json:
        args.json.write_text(json.dumps(found.to_dict(), indent=1))
    return _told(found)


def _verify(args: argparse.Namespace) -> int:
    """In float64, unless --params-dtype says otherwise: rounding then explains nothing."""
    import megafx

    config = _config(args)
    check_name(args.model)
    import torch

    torch.manual_seed(0)
    model, inputs = _model(args, device="meta" if args.types else "cpu")
    dtype = torch.float64 if config.params_dtype is None else getattr(torch, config.params_dtype)
    inputs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, inputs
    )
    if args.sabotage:
        return _told(megafx.sabotage(model.to(dtype), config, example_inputs=inputs))
    if args.types or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return _told(megafx.verify(model.to(dtype), config, example_inputs=inputs, types=args.types))
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        model = model.to(device, dtype)
        inputs = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), inputs)
        verdict = megafx.verify(model, config, example_inputs=inputs, on_ranks=True)
        if torch.distributed.get_rank() == 0:
            print(verdict)
    finally:
        torch.distributed.destroy_process_group()
    return 0 if verdict else 1


def _passes(args: argparse.Namespace) -> int:
    from megafx.compiler.stages import pipeline

    for name, passes in pipeline(_config(args)).items():
        print(name)
        for step in passes:
            module = sys.modules[step.run.__module__]
            text = module.__doc__ if module.__name__.endswith(f".{step.name}") else step.run.__doc__
            phase = "" if step.ensures is None else step.ensures.name
            print(f"  {step.name:<26}{phase:<13}{(text or '').splitlines()[0]}")
    return 0


def _check_rules(args: argparse.Namespace) -> int:
    from megafx.checks.rules import check_rules

    sys.path.insert(0, os.getcwd())  # as for `python -m`
    for name in args.imports:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"--import {name}: {error}", fix="name a module that can be imported from here") from error
    report = check_rules(args.ops or None)
    print(report)
    return 0 if report.ok else 1


def _convert(args: argparse.Namespace) -> int:
    if not args.source.exists():  # as `convert` says it, before torch is imported
        raise UsageError(f"there is no file or folder '{args.source}'", fix="give a checkpoint or safetensors files")
    from megafx.checkpoint.convert import convert

    args.model = args.model or (str(args.source) if (args.source / "config.json").is_file() else None)
    model = None if args.model is None else _model(args)[0]
    print(f"wrote {convert(args.source, args.target, model, max_shard_size=args.max_shard_size)}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    import megafx

    found = megafx.diff(args.before, args.after, html=args.html)
    print(found or "no difference")
    return 1 if found else 0


def _profile_hardware(args: argparse.Namespace) -> int:
    import megafx

    found = megafx.profile_hardware(args.file, link=args.link)
    if os.environ.get("RANK", "0") == "0":
        print(f"wrote {args.file}: {found}")
    return 0


def _replay(args: argparse.Namespace) -> int:
    check_name(args.model)
    import megafx
    from megafx.replaying import read_about

    read_about(args.folder)  # a wrong folder is an error before the model is built
    model, inputs = _model(args)
    return _told(megafx.replay(args.folder, model, example_inputs=inputs))


def _version(args: argparse.Namespace) -> int:
    from megafx.versions import version_of

    print(f"megafx {version_of('megafx')}, torch {version_of('torch')}, Python {platform.python_version()}")
    return 0


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.exit(_version(argparse.Namespace()))


if __name__ == "__main__":
    sys.exit(main())
