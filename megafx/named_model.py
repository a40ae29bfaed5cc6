"""Models by name, as the `megafx` command takes them. On the meta device weights take no memory.

load_model("llama/config.json")                      a Hugging Face config: its file, or the folder with it
load_model("LlamaForCausalLM", {"hidden_size": 512})  a Hugging Face architecture, or a model type ("llama")
load_model("my_package.models:GPT", {"layers": 2})   a class or a function of your own; also "models/gpt.py:GPT"
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megafx.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

WAYS = (
    "give a Hugging Face config.json, its folder or an architecture (LlamaForCausalLM), "
    "or 'module:name' of a class or function"
)
SETTINGS = "change the sizes that do not fit, with settings= or --set NAME=VALUE"


def load_model(
    name: str, settings: Mapping[str, Any] | None = None, *, device: str | torch.device = "meta"
) -> tuple[nn.Module, Any]:
    """(model on `device`, example inputs or None).

    settings: fields of a Hugging Face config, or arguments of the class or function. A class with one parameter that is
    annotated with a class (`def __init__(self, config: GPTConfig)`) gets such an object, made of the settings. A function may
    return a pair (model, example_inputs). Raises UsageError where there is no such model, file or setting.
    """
    check_name(name, settings or ())
    import torch
    from torch import nn

    make = _maker(name, dict(settings or {}))
    try:
        with torch.device(device):
            made = make()
    except Exception as error:  # of the model's own code
        raise UsageError(f"'{name}' cannot be made: {_said(error)}", fix=SETTINGS) from error
    model, inputs = made if isinstance(made, tuple) else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"'{name}' makes a {type(model).__name__}, not a torch.nn.Module", fix=WAYS)
    return model, inputs


def _said(error: Exception) -> str:
    """What an error of somebody else's code says, and where it was raised."""
    last = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), "")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {last}" + f" ({frame.filename}:{frame.lineno} `{frame.line}`)"


def _maker(name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    path, (file, _, attribute) = Path(name), name.rpartition(":")
    if file and attribute.isidentifier():
        return _own(file, attribute, settings)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        try:
            fields = json.loads(path.read_text())
        except ValueError as error:
            raise UsageError(f"'{path}' is not JSON: {error}", fix=WAYS) from error
        return _hugging_face(name, fields, settings)
    return _hugging_face(name, {}, settings)


# -- what can be known of a name without importing torch


def check_name(name: str, settings: Iterable[str] = ()) -> None:
    """Raise UsageError where files show that no model has this name, or that transformers has no field of a name in settings.
    Neither torch nor the user's module is imported."""
    path, (module, _, attribute) = Path(name), name.rpartition(":")
    if module and attribute.isidentifier():
        file = Path(module) if module.endswith(".py") else _file_of(name, module)
        if file is not None and not file.is_file():
            raise _no_file(file)
        known = None if file is None else _names_in(file)
        if known is not None and attribute not in known:
            raise _no_attribute(name, str(file), attribute, known)
    elif path.is_dir() or path.suffix == ".json":
        file = path / "config.json" if path.is_dir() else path
        if not file.is_file():
            raise _no_file(file)
    elif not name.isidentifier():
        raise UsageError(f"'{name}' names no model", fix=WAYS)
    elif (models := _transformers_models()) is not None:
        names = _auto_names(models)
        home = _home(models, names.get(name, name))
        if names and name not in names and home is None:
            raise _no_architecture(name, names)
        texts = [] if home is None else _texts(models, home)
        for key in settings if texts else ():
            if not any(re.search(rf"\b{re.escape(key)}\b", text) for text in texts):
                configs = [text for text in texts if "PreTrainedConfig" in text]
                fields = {f for text in configs for f in re.findall(r"^    (\w+): ", text, re.MULTILINE)}
                raise _no_field(name, key, fields | {f for text in texts for f in re.findall(r"\bconfig\.(\w+)", text)})


def _no_attribute(name: str, home: str, attribute: str, known: Iterable[str]) -> UsageError:
    found = f"'{name}' cannot be imported: '{home}' has no attribute '{attribute}'"
    return UsageError(found, fix=did_you_mean(attribute, known) + WAYS)


def _file_of(name: str, module: str) -> Path | None:
    """The file of 'package.module', None where it cannot be found without importing the package. Raises UsageError where there
    is no such package."""
    _look_here()
    package, *rest = module.split(".")
    if (spec := importlib.util.find_spec(package)) is None:
        raise UsageError(f"'{name}' cannot be imported: No module named '{package}'", fix=WAYS)
    for part in rest:
        spec = importlib.machinery.PathFinder.find_spec(part, [*(spec.submodule_search_locations or ())])
        if spec is None:
            return None
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _names_in(file: Path) -> set[str] | None:
    """The names in a module's file, at least those that it gives; None where it may give others (`import *`)."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None  # importing it says what is wrong
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(id=name):
                names.add(name)
    return None if names & {"*", "__getattr__", "globals", "vars", "setattr", "exec"} else names


def _transformers_models() -> Path | None:
    spec = importlib.util.find_spec("transformers")
    return None if spec is None or not spec.origin else Path(spec.origin).parent / "models"


def _auto_names(models: Path) -> dict[str, str]:
    """Model types and architectures that transformers' Auto classes know -> the class that has the name, or the config."""
    files = [models / "auto" / f"{name}.py" for name in ("auto_mappings", "configuration_auto", "modeling_auto")]
    pairs = [pair for f in files if f.is_file() for pair in re.findall(r'\("([\w-]+)", \(?"(\w+)"', f.read_text())]
    return {name: name for _, name in pairs if not name.endswith("Config")} | {
        kind: name for kind, name in pairs if name.endswith("Config")
    }


def _home(models: Path, name: str) -> Path | None:
    """The folder of transformers' models that has a class of this name."""
    wanted = f"class {name}(".encode()
    files = models.glob("*/configuration_*.py" if name.endswith("Config") else "*/modeling_*.py")
    return next((file.parent for file in files if wanted in file.read_bytes()), None)


def _texts(models: Path, home: Path) -> list[str]:
    """The code of a model and of the configs that it builds on: every field of its config is a word of it."""
    texts = [file.read_text() for file in home.glob("*.py")]
    homes = {name for text in texts for name in re.findall(r"from \.\.(\w+)\.", text)}
    texts += [file.read_text() for name in homes for file in (models / name).glob("configuration_*.py")]
    return texts + [file.read_text() for file in models.parent.glob("configuration_utils.py")]


def _no_field(name: str, key: str, known: Iterable[str]) -> UsageError:
    fix = did_you_mean(key, known).strip() or f"fields: {', '.join(sorted(known))}"
    return UsageError(f"the config of '{name}' has no field '{key}'", fix=fix)


def _no_architecture(name: str, known: Iterable[str]) -> UsageError:
    found = f"'{name}' is no architecture and no model type of transformers"
    return UsageError(found, fix=did_you_mean(name, known) + WAYS)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'did you mean these? ', or '' where none is near."""
    near = ", ".join(difflib.get_close_matches(name, [*known], n=3))
    return f"did you mean {near}? " if near else ""


def _no_file(path: Path) -> UsageError:
    beside = [str(other) for other in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
    return UsageError(f"there is no file '{path}'", fix=did_you_mean(str(path), beside) + WAYS)


# -- Hugging Face


def _hugging_face(name: str, fields: dict[str, Any], settings: dict[str, Any]) -> Callable[[], Any]:
    """Of the fields of a config.json, or of none: `name` is then an architecture or a model type."""
    try:
        import transformers
    except ImportError as error:
        raise UsageError("a Hugging Face model needs transformers", fix="pip install megafx[hf]") from error
    known = transformers.CONFIG_MAPPING
    architecture = (fields.get("architectures") or [name])[0]
    cls = getattr(transformers, architecture, None) if architecture.endswith(("Model", "s", "M", "ion")) else None
    cls = cls if isinstance(getattr(cls, "config_class", None), type) else None
    if fields:
        if fields.get("model_type") not in known:
            found = f"'{name}' says model_type {fields.get('model_type')!r}, which transformers does not know"
            raise UsageError(found, fix="if it has code of its own, give 'module:name' of a class or function")
        kind = known[fields["model_type"]]
    elif cls is not None:
        kind = cls.config_class
    elif name in known:
        kind = known[name]
    else:
        raise _no_architecture(name, known)
    fields = {k: v for k, v in fields.items() if k != "model_type"}
    made = _config_of(name, kind, fields)
    for key in settings:
        if not hasattr(made, key) and not _reads(cls, key):
            raise _no_field(name, key, made.to_dict())
    config = _config_of(name, kind, fields | settings)
    build = cls or transformers.AutoModelForCausalLM.from_config
    dtype = getattr(config, "dtype", None)  # as from_pretrained does it; without one, torch's default
    return lambda: build(config) if dtype is None else build(config).to(dtype)


def _reads(cls: type | None, key: str) -> bool:
    """True if the code of an architecture reads a field that its config has not unless it is given
    (decoder_start_token_id of T5)."""
    module = sys.modules.get(getattr(cls, "__module__", ""))
    read = rf"\bconfig(\.|, *[\"'])\b{re.escape(key)}\b"  # config.key, getattr(config, "key", None)
    return module is not None and re.search(read, inspect.getsource(module)) is not None


def _config_of(name: str, kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except Exception as error:  # transformers checks sizes and types
        reason = str(error).splitlines()[-1].strip() if str(error) else type(error).__name__
        raise UsageError(f"the config of '{name}' ({kind.__name__}) cannot be made: {reason}", fix=SETTINGS) from error


# -- a class or a function of the user's


def _own(module: str, attribute: str, settings: dict[str, Any]) -> Callable[[], Any]:
    name = f"{module}:{attribute}"
    try:
        home = _imported(module)
    except ImportError as error:
        raise UsageError(f"'{name}' cannot be imported: {error}", fix=WAYS) from error
    except Exception as error:  # of the module's own code
        raise UsageError(f"'{name}' cannot be imported: {_said(error)}", fix="correct this line") from error
    if not hasattr(home, attribute):
        raise _no_attribute(name, module, attribute, vars(home))
    made = getattr(home, attribute)
    if not callable(made):
        raise UsageError(f"'{name}' is a {type(made).__name__}, not a class or a function", fix=WAYS)
    try:
        takes = ", ".join(inspect.signature(made).parameters) or "nothing"
    except ValueError as error:
        raise UsageError(f"'{name}' cannot be called by name: {error}", fix=WAYS) from error
    arguments = _arguments(made, settings)
    try:
        inspect.signature(made).bind(*arguments[0], **arguments[1])
    except TypeError as error:
        fix = f"it takes {takes}; give them with settings= or --set NAME=VALUE"
        raise UsageError(f"'{name}' cannot be called: {error}", fix=fix) from error
    return lambda: made(*arguments[0], **arguments[1])


def _look_here() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as for `python -m`


def _imported(module: str) -> Any:
    if not module.endswith(".py"):
        _look_here()
        return importlib.import_module(module)
    path = Path(module)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    loaded = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def _arguments(made: Callable[..., Any], settings: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call it with: the settings, or one object that is made of them."""
    parameters = [p for p in inspect.signature(made).parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL]
    if len(needed) != 1 or needed[0].name in settings:
        return (), settings
    target = made.__init__ if isinstance(made, type) else made  # type: ignore[misc]  # no subclass is called
    kind = typing.get_type_hints(target).get(needed[0].name)
    if not isinstance(kind, type) or kind.__module__ == "builtins":
        return (), settings
    own = {k: settings[k] for k in settings if k in {p.name for p in parameters}}
    return (kind(**{k: v for k, v in settings.items() if k not in own}),), own


# -- example inputs


_SPEC = re.compile(r"(?:(\w+)=)?(\w+)\[([\d,\s]*)\](?:<(\d+))?")
DTYPES = ["int64", "int32", "int16", "int8", "uint8", "bool"]
DTYPES += ["float64", "float32", "float16", "bfloat16", "complex64", "complex128"]


def input_spec(text: str) -> tuple[str | None, str, list[int], int | None]:
    """'ids=int64[2,64]<1000' -> ('ids', 'int64', [2, 64], 1000). Raises UsageError."""
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"'{text}' describes no input", fix="write NAME=DTYPE[SIZES], for example 'ids=int64[2,64]'")
    if found[2] not in DTYPES:
        fix = did_you_mean(found[2], DTYPES) + f"dtypes: {', '.join(DTYPES)}"
        raise UsageError(f"the input '{text}' has the dtype '{found[2]}', which torch does not know", fix=fix)
    return found[1], found[2], [int(n) for n in found[3].split(",") if n.strip()], int(found[4]) if found[4] else None


def example_inputs(specs: Sequence[str], model: nn.Module, *, device: str | torch.device = "meta") -> Any:
    """('ids=int64[2,64]', ...) -> (args, kwargs) of tensors, drawn at random where `device` is not meta.

    A spec is NAME=DTYPE[SIZES], or without a name for a positional argument. Whole numbers are below the bound of
    'int64[2,64]<1000', by default below the rows of the model's smallest embedding. Raises UsageError for other texts.
    """
    import torch
    from torch import nn

    rows = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for spec in specs:
        name, kind, shape, bound = input_spec(spec)
        dtype = getattr(torch, kind)
        if torch.device(device).type == "meta":
            value = torch.empty(shape, dtype=dtype, device="meta")
        elif dtype.is_floating_point or dtype.is_complex:
            value = torch.randn(shape, dtype=dtype, device=device)
        elif dtype == torch.bool:
            value = torch.ones(shape, dtype=dtype, device=device)
        else:
            value = torch.randint(bound or min(rows, default=2), shape, dtype=dtype, device=device)
        if name:
            kwargs[name] = value
        else:
            args.append(value)
    return tuple(args), kwargs
