"""What decides what a call is compiled to, as far as it is known before the model is traced: the names of entries of the cache.

Versions and settings of the process, the modules and parameters of the model, the function that makes the loss. What cannot be
compared with another process raises `Unstorable`.

And what an entry depends on beyond its name: code of the model, installed packages, variables of the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import platform
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megafx.capture.reads import LIBRARIES
from megafx.debugging import current
from megafx.ir.program import Program
from megafx.ir.source_lines import frame_behind, is_installed
from megafx.ir.stored import Unstorable
from megafx.kernels.common.ahead import compiles_here
from megafx.rewrite.pattern import registered_patterns
from megafx.rules.grammar import registered
from megafx.runtime.program_cache.fingerprint import Fingerprint, class_code, code_digest, digest
from megafx.runtime.program_cache.stored_state import lines
from megafx.versions import version_of

# -- code, packages and the environment

TORCH = str(Path(torch.__file__).parent) + os.sep


def _started() -> float:
    """When this process started, in seconds since the epoch; a little later at most where that is not to be had."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        return time.time() - age - 0.1
    except (OSError, ValueError, AttributeError):
        return time.time() - time.process_time()


STARTED = _started()
STDLIB = tuple({sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")})


@cache
def own_roots() -> tuple[str, ...]:
    names = ("megafx", "megafx.passes", "megafx.patterns")
    return tuple(str(Path(next(iter(sys.modules[n].__path__))).resolve()) + os.sep for n in names if n in sys.modules)


def _is_users(path: str) -> bool:
    """True for code that is neither Python's, nor an installed package's, nor megafx's."""
    return (
        not is_installed(path)
        and not path.startswith((*STDLIB, TORCH))
        and not str(Path(path).resolve()).startswith(own_roots())
    )


def code_files(own: Fingerprint, model: nn.Module, state: Any, program: Program) -> list[tuple[str, str]]:
    """(file, digest) of all code that the graph may come from: the model's, and what the process has loaded of the user's."""
    found = {*own.files, *lines(state)}
    for module in {c.__module__ for m in model.modules() for c in type(m).__mro__} | own.modules:
        if module.partition(".")[0] not in LIBRARIES:
            file = getattr(sys.modules.get(module), "__file__", None)
            if file is None:
                raise Unstorable(f"code of the module '{module}', which is in no file")
            found.add(file)
    for node in program.graph.nodes:
        if (source := node.meta.get("source")) is not None:
            found.add(source.file)
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        users = name != "__main__" and name.partition(".")[0] not in LIBRARIES
        if users and isinstance(file, str) and file.endswith(".py") and _is_users(file):
            found.add(file)
    rows = []
    for path in sorted(found):
        python = path.startswith(STDLIB) and not is_installed(path)
        if python or path.startswith(("<", TORCH)) or str(Path(path).resolve()).startswith(own_roots()):
            continue
        text = file_digest(path)
        if not text:
            raise Unstorable(f"code in '{path}', which is no file, or has changed since this process started")
        rows.append((path, text))
    return rows


def file_digest(path: str) -> str:
    """'' where the file is not there, or may be another than the one that was imported."""
    try:
        if written_at(path) >= STARTED:
            return ""
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def written_at(path: str | Path) -> float:
    """When this machine last wrote the file or what is known of it. The time of its last change may be that of another clock:
    who copies a tree keeps it."""
    found = Path(path).stat()
    return found.st_ctime if os.name == "posix" else found.st_mtime


def packages() -> list[Any]:
    """(file, time, size) of the first file of each installed package that is loaded: another version has another."""
    rows = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and isinstance(file, str) and is_installed(file):
            rows.append([file, *stat_of(file)])
    return rows


def stat_of(path: str) -> list[int]:
    try:
        found = Path(path).stat()
    except OSError:
        return []
    return [found.st_mtime_ns, found.st_size]


def hidden(value: str | None) -> str:
    """A variable of the environment may be a secret."""
    return "" if value is None else hashlib.sha256(value.encode()).hexdigest()


def asked_by_megafx() -> bool:
    frame = frame_behind(sys._getframe(2), lambda file: file.startswith(("<frozen", *STDLIB)))
    return frame is not None and str(frame.f_code.co_filename).startswith(own_roots())


_watching: list[dict[str, str]] = []  # of the threads that compile now
_lock = threading.Lock()


@contextlib.contextmanager
def watching(read: dict[str, str] | None) -> Iterator[None]:
    """Within, variables of the environment that code reads, megafx's own aside, are noted in `read`, with digests of what they
    hold."""
    if read is None:
        yield
        return
    # A first capture imports this, and networkx with it, which reads the whole environment.
    __import__("torch.export._trace")
    with _lock:
        _watching.append(read)
        _Environment.__getitem__ = _watched_item
    try:
        yield
    finally:
        with _lock:
            _watching[:] = [other for other in _watching if other is not read]
            if not _watching:
                _Environment.__getitem__ = _plain_item


_Environment: Any = type(os.environ)
_plain_item = _Environment.__getitem__


def _watched_item(environment: Any, name: Any) -> Any:
    value = None
    try:
        value = _plain_item(environment, name)
        return value
    finally:
        if environment is os.environ and isinstance(name, str) and not (compiles_here() or asked_by_megafx()):
            for read in _watching:
                read[name] = hidden(value)


# -- the process and the model


@cache
def own_source() -> str:
    """Digest of megafx's own code."""
    found = hashlib.sha256()
    for module in ("megafx.config", "megafx.passes.plan.plan_sharding", "megafx.patterns.attention"):
        __import__(module)
    roots = {Path(next(iter(sys.modules[name].__path__))) for name in ("megafx", "megafx.passes", "megafx.patterns")}
    for root in sorted(roots):
        for path in sorted([*root.rglob("*.py"), *root.rglob("*.yaml")]):
            if written_at(path) >= STARTED:
                raise Unstorable(f"code of megafx that has changed since this process started ({path})")
            found.update(f"{path.relative_to(root)}".encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def of_process() -> Any:
    """Versions, and what is set for the whole process."""
    versions: list[Any] = [platform.python_version(), torch.__version__, version_of("megafx"), own_source()]
    versions += [getattr(sys.modules.get(name), "__version__", None) for name in ("transformers", "triton", "sympy")]
    for pattern in registered_patterns():
        if not pattern.__module__.startswith("megafx."):
            raise Unstorable(f"the pattern '{pattern.name}', code of your own")
    if registered():
        raise Unstorable(f"rules of your own ({', '.join(registered()[:3])})")
    flags = current()
    backends = torch.backends
    settings = [
        torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), backends.cudnn.enabled, backends.cudnn.benchmark, backends.cuda.matmul.allow_tf32,
        backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(), backends.cuda.math_sdp_enabled(),
        backends.mha.get_fastpath_enabled(), flags.skip,
    ]  # fmt: skip
    cuda = [torch.cuda.get_device_name(), torch.cuda.get_device_capability()] if torch.cuda.is_available() else None
    return [*map(str, (*versions, *settings, cuda)), sys.flags.optimize, _replaced()]


_PLAIN_TENSORS = ("torch", "megafx")
_LOOKED_AT = (torch, torch.Tensor, torch.nn.functional, torch.nn.init, nn.Module)


def _replaced() -> list[tuple[str, str]]:
    """Functions that installed packages have put into torch, with digests of their code."""
    found = []
    kinds = {cls for cls in vars(nn.modules).values() if isinstance(cls, type)}
    for owner in (*_LOOKED_AT, *kinds):
        for name, value in vars(owner).items():
            code = getattr(
                inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None, "__code__", None
            )
            if code is not None and not code.co_filename.startswith((TORCH, "<", *STDLIB)) and name[:2] != "__":
                where = f"{getattr(owner, '__name__', '')}.{name}"
                if not is_installed(code.co_filename):
                    raise Unstorable(f"{where}, which was replaced")
                found.append((where, code_digest(code)))
    return found


def of_model(model: nn.Module) -> Any:
    """Modules, parameters and buffers, and which of them are one; variables of the environment that their packages may read."""
    numbers: dict[int, int] = {}
    packages = {type(m).__module__.partition(".")[0] for m in model.modules()} | {"torch", "pytorch", "triton"}
    prefixes = tuple(f"{name.upper()}_" for name in packages - {"megafx"})
    rows: list[Any] = sorted(item for item in os.environ.items() if item[0].startswith(prefixes))
    for fqn, module in model.named_modules(remove_duplicate=False):
        kinds = [
            (c.__module__, c.__qualname__) for c in type(module).__mro__ if c.__module__.partition(".")[0] != "megafx"
        ]
        rows.append((fqn, numbers.setdefault(id(module), len(numbers)), kinds, module.training))
        for table in (module._parameters, module._buffers):
            for name, x in table.items():
                if x is None:
                    rows.append((name, None))
                    continue
                if type(x) is not torch.Tensor and not type(x).__module__.startswith(_PLAIN_TENSORS):
                    raise Unstorable(f"'{fqn}.{name}', a {type(x).__name__}")
                number = numbers.setdefault(id(x), len(numbers))
                what = (type(x).__name__ if table is module._buffers else "", str(x.dtype), [*x.shape])
                rows.append(
                    (name, number, *what, x.requires_grad, x.device.type, name in module._non_persistent_buffers_set)
                )
    return rows


def code_of_classes(model: nn.Module) -> dict[str, str]:
    """Class of a module -> digest of the functions that it has now."""
    classes = dict.fromkeys(c for module in model.modules() for c in type(module).__mro__)
    users = [c for c in classes if c.__module__.partition(".")[0] not in LIBRARIES]
    return {f"{c.__module__}.{c.__qualname__}": digest(class_code(c)) for c in users}


def loss_text(loss_fn: Any, own: Fingerprint) -> Any:
    """What a function of the user's loop computes with: its code, and the values of the variables that it names."""
    if isinstance(loss_fn, nn.Module):
        if any(True for _ in loss_fn.parameters()):
            raise Unstorable("a loss with parameters")
        plain = {k: v for k, v in vars(loss_fn).items() if not k.startswith("_")}
        return [own(type(loss_fn)), code_digest(type(loss_fn).forward.__code__), own(plain)]
    code = getattr(loss_fn, "__code__", None)
    if code is None:
        return own(loss_fn)
    cells = [c.cell_contents for c in loss_fn.__closure__ or ()]
    named = {name: loss_fn.__globals__[name] for name in code.co_names if name in loss_fn.__globals__}
    inner = []
    for value in (*cells, *named.values()):
        is_own = getattr(value, "__code__", None) is not None and value is not loss_fn
        inner.append(
            loss_text(value, own) if is_own and str(value.__module__).partition(".")[0] not in LIBRARIES else own(value)
        )
    if any(isinstance(x, list) and x and x[0] == "object" for x in inner):
        raise Unstorable("a loss that reads an object")
    return [own(loss_fn), inner]
