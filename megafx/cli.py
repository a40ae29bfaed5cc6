"""The `megafx` command.

    megafx plan llama-8b.json --tp 8 --seq-length 8192 --save plan.json    plan a model; needs no GPU, ranks or weights
    megafx explain my_package.models:build --tp 4 --html plan.html         the same as a report: placements, bytes, reasons
    megafx passes                                                          the pipeline: every pass in its order
    megafx check-rules                                                     try every sharding rule against the real op
    megafx convert runs/gpt hf/ --model gpt/config.json                    a checkpoint to Hugging Face files, or back
    megafx diff before/ after/                                             compare two folders that MEGAFX_DUMP wrote
    megafx version                                                         versions, for bug reports

MODEL is a Hugging Face config (its .json file or folder), or 'module:factory', where factory() returns a model, or a
(model, example_inputs) pair. It is built on the meta device, so that its weights take no memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafx.config import Config, choices_of, is_whole
from megafx.errors import MegafxError, UsageError

if TYPE_CHECKING:
    from torch import nn


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 an error or (check-rules, diff) something found, 2 wrong arguments."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except MegafxError as error:
        print(f"megafx: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="megafx", description=__doc__, formatter_class=raw)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help_text: str, **more: Any) -> Any:
        command = commands.add_parser(name, help=help_text, **more)
        command.set_defaults(run=run)
        return command.add_argument, command

    model_help = "Hugging Face config (.json or folder), or module:factory"
    for name, run, help_text in (
        ("plan", _plan, "plan a model and print where everything is"),
        ("explain", _explain, "plan a model and print the report"),
    ):
        argument, command = add(name, run, help_text, usage=f"megafx {name} [options] MODEL")
        argument("model", metavar="MODEL", help=model_help)
        argument("--config", type=Path, help="YAML file of Config fields; the options below override it")
        if name == "plan":
            argument("--save", type=Path, metavar="FILE", help="write the plan as JSON")
        else:
            argument("--html", type=Path, metavar="FILE", help="write the report as a page")
            argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
        _add_fields(command.add_argument_group("fields of megafx.Config"))
    argument, _ = add("passes", _passes, "print the pipeline: every pass in its order")
    argument("--config", type=Path, help="YAML file of Config fields: with the passes that it adds")
    argument, _ = add("check-rules", _check_rules, "try every sharding rule against the real op")
    argument("ops", nargs="*", metavar="OP", help="only these, for example aten.linear.default")
    where = "where ops and rules of your own are made"
    argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help=where)
    argument, _ = add("convert", _convert, "turn a checkpoint folder into safetensors files, or such files into one")
    argument("source", type=Path, help="folder of megafx, of torch.distributed.checkpoint, or with safetensors")
    argument("target", type=Path, help="folder to write")
    argument("--model", help=f"{model_help}; default: in SOURCE")
    argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a safetensors file (default: 5GB)")
    argument, _ = add("diff", _diff, "compare two dump folders, graph by graph")
    argument("before", type=Path)
    argument("after", type=Path)
    add("version", _version, "print versions")
    return parser


SWITCH: dict[Any, str] = {True: "on", False: "off"}


def _add_fields(group: argparse._ArgumentGroup) -> None:
    """An option for each field of Config that a shell can give: `--seq-length` for seq_length. Switches are on or off."""
    for f in dataclasses.fields(Config):
        how: dict[str, Any] = {"dest": f.name, "metavar": f.name.rpartition("_")[2].upper()}
        choices = choices_of(f.name)
        if choices:
            how |= {"choices": [SWITCH.get(c, c) for c in choices], "metavar": None}
        elif is_whole(f.name):
            how |= {"type": int, "metavar": "N"}
        elif f.default is dataclasses.MISSING:  # a mapping or a list: for the file of --config
            continue
        shown = SWITCH.get(f.default, f.default) if choices else f.default
        names = ["--tp"] * (f.name == "tensor_model_parallel_size") + ["--" + f.name.replace("_", "-")]
        text = f.metadata["doc"] + ("" if shown is None else f" (default: {shown})")
        group.add_argument(*names, help=text, **how)


def _plan(args: argparse.Namespace) -> int:
    import megafx

    model, inputs = load_model(args.model)
    plan = megafx.plan(model, _config(args), example_inputs=inputs)
    print(plan)
    if args.save:
        plan.save(args.save)
    return 0


def _explain(args: argparse.Namespace) -> int:
    import megafx

    model, inputs = load_model(args.model)
    report = megafx.explain(megafx.plan(model, _config(args), example_inputs=inputs))
    print(report)
    if args.html:
        report.html(args.html)
    if args.json:
        args.json.write_text(report.to_json())
    return 0


def _passes(args: argparse.Namespace) -> int:
    from megafx.compiler.pipeline import pipeline

    for stage, passes in pipeline(_config(args)).items():
        print(stage)
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
        importlib.import_module(name)
    report = check_rules(args.ops or None)
    print(report)
    return 0 if report.ok else 1


def _convert(args: argparse.Namespace) -> int:
    from megafx.checkpoint.convert import convert

    name = args.model or (str(args.source) if (args.source / "config.json").is_file() else None)
    model = None if name is None else load_model(name)[0]
    print(f"wrote {convert(args.source, args.target, model, max_shard_size=args.max_shard_size)}")
    return 0


def _diff(args: argparse.Namespace) -> int:
    from megafx.ir.dump import diff_folders

    found = diff_folders(args.before, args.after)
    print(found or "the two folders hold the same graphs")
    return 1 if found else 0


def _version(args: argparse.Namespace) -> int:
    from importlib.metadata import version

    import torch

    print(f"megafx {version('megafx')}, torch {torch.__version__}, Python {platform.python_version()}")
    return 0


def _config(args: argparse.Namespace) -> Config:
    config, values = Config.from_yaml(args.config) if args.config else Config(), {"on": True, "off": False}
    given = {f.name: getattr(args, f.name, None) for f in dataclasses.fields(Config)}
    return config.replace(**{name: values.get(value, value) for name, value in given.items() if value is not None})


def load_model(name: str) -> tuple[nn.Module, Any]:
    """'config.json', a folder with one, or 'module:factory' -> (model on meta, example inputs or None)."""
    import torch

    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        if not path.is_file():
            raise UsageError(f"there is no file '{path}'", fix="give a Hugging Face config.json, or module:factory")
        try:
            import transformers
        except ImportError as error:
            found = "planning from a Hugging Face config needs transformers"
            raise UsageError(found, fix="pip install megafx[hf]") from error
        fields = json.loads(path.read_text())
        config = transformers.AutoConfig.for_model(**fields)
        architecture = (fields.get("architectures") or [None])[0]
        with torch.device("meta"):
            if architecture is not None and hasattr(transformers, architecture):
                return getattr(transformers, architecture)(config), None
            return transformers.AutoModelForCausalLM.from_config(config), None
    module, _, attribute = name.partition(":")
    if not attribute:
        raise UsageError(f"'{name}' names no model", fix="give a Hugging Face config.json, or module:factory")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"'{name}' cannot be imported: {error}", fix="write module:factory") from error
    with torch.device("meta"):
        made = factory()
    return made if isinstance(made, tuple) else (made, None)


if __name__ == "__main__":
    sys.exit(main())
