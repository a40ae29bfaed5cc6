"""Covers: runtime/program_cache/program_cache.py, cache_key.py, cache_files.py, fingerprint.py, stored_state.py."""

import functools
import importlib.util
import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

import megafx
from megafx.distributed import agreement
from megafx.ir.stored import Unstorable
from megafx.runtime.program_cache import cache_files, cache_key, program_cache
from megafx.runtime.program_cache.fingerprint import Fingerprint

SOURCE = """
import os
import torch
from torch import nn

FACTOR = 2.0

class Options:
    def __init__(self):
        self.scale = 1.0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.options, self.table = Options(), torch.arange(6.0)
        self.act = nn.functional.relu

    def forward(self, x, y):
        h = self.act(self.up(x)) * self.options.scale
        if os.environ.get("NET_DOUBLE"):
            h = h * FACTOR
        out = self.down(h) + self.table + torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
        return {"loss": (out - y).square().mean(), "out": out}
"""


@pytest.fixture(autouse=True)
def nothing_of_other_tests(monkeypatch):
    """Rules, patterns and modules of users are for the whole process, and decide what is kept."""
    ours = [p for p in cache_key.registered_patterns() if p.__module__.startswith("megafx.")]
    monkeypatch.setattr(cache_key, "STARTED", cache_key.STARTED)
    monkeypatch.setattr(cache_key, "registered", lambda: [])
    monkeypatch.setattr(cache_key, "registered_patterns", lambda: ours)
    monkeypatch.setattr(cache_key, "_is_users", lambda path: path.endswith("users_net.py"))


class Project:
    """A user's module in a file, and a cache of its own. run(): what a new start of the program sees."""

    def __init__(self, folder: Path) -> None:
        self.file, self.cache = folder / "users_net.py", folder / "cache"
        self.write(SOURCE)

    def write(self, source: str) -> None:
        self.module = self.load("users_net", self.file, source)

    @staticmethod
    def load(name: str, file: Path, source: str) -> types.ModuleType:
        file.write_text(source)
        os.utime(file, (4e9, 4e9))  # of another clock
        cache_key.STARTED = time.time() + 1  # this process
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def run(self, change=lambda model: None, rows=4, loss_fn=None, **config):
        """(what the cache did, loss, gradients, notes)."""
        model = self.module.Net()
        change(model)
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)
        parallel = megafx.parallelize(model, megafx.Config(**config), loss_fn=loss_fn)
        if loss_fn is None:
            loss = parallel(x, y)["loss"]
        else:
            loss, _ = parallel(x, y, loss_inputs={"y": y})
        loss.backward()
        notes = [note.message for note in parallel.megafx.notes if note.topic == "cache"]
        return parallel.megafx.cached, loss.detach(), [p.grad for p in parallel.parameters()], notes


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGAFX_CACHE", str(tmp_path / "cache"))
    yield Project(tmp_path)
    sys.modules.pop("users_net", None), sys.modules.pop("users_net_patches", None)


def test_a_second_start_computes_the_same_bits(project):
    did, loss, gradients, _ = project.run()
    again, other, others, notes = project.run()
    assert (did, again, notes) == ("written", "read", [])
    assert torch.equal(loss, other)
    assert all(map(torch.equal, gradients, others))
    assert cache_files.folder().stat().st_mode & 0o777 == 0o700
    assert project.run(cache=False)[0] == ""


def test_constructors_that_call_super(project):
    """Where each looks is a cell that nothing writes to; code names it from Python 3.12 on, as transformers' losses."""
    made = "".join(
        f"class {name}(nn.Module):\n    def __init__(self):\n        super(__class__, self).__init__()\n\n"
        for name in ("One", "Two")
    )
    net = SOURCE.replace(
        "if os.environ", 'if os.environ.get("NET_NONE"):\n            One(), Two()\n        if os.environ'
    )
    project.write(net.replace("class Options:", f"{made}class Options:"))
    assert [project.run()[0] for _ in range(2)] == ["written", "read"]


def test_what_differs_on_another_rank_is_said(project, monkeypatch):
    project.run()
    of = lambda value, group, rank=0: "'net.scale'" if rank else agreement.broadcast_object(value, group)
    of_cache = types.SimpleNamespace(first_rank=lambda failed, group: 1, broadcast_object=of)
    monkeypatch.setattr(program_cache, "agreement", of_cache)
    did, _, _, notes = project.run()
    assert did == "written"
    assert notes == ["compiled anew, since on rank 1 'net.scale' is not what the entry has"]


def test_other_sizes_are_served_by_the_same_entry(project):
    project.run()
    did, loss, _, _ = project.run(rows=7)
    assert did == "read"
    assert torch.equal(loss, project.run(rows=7, cache=False)[1])


def test_arguments_that_forward_writes_into(project):
    project.write(SOURCE.replace("h = self.act(", "x.mul_(2), self.table.add_(1)\n        h = self.act("))
    for did in ("written", "read"):
        model, x = project.module.Net(), torch.ones(4, 6)
        parallel = megafx.parallelize(model, megafx.Config())
        parallel(x, x.clone())
        assert parallel.megafx.cached == did
        assert (float(x[0, 0]), float(model.table[0])) == (2.0, 1.0)


def test_a_batch_of_one(tmp_path, monkeypatch):
    """The graph serves it once the model was found to compute the same there: the entry says so."""
    monkeypatch.setenv("MEGAFX_CACHE", str(tmp_path / "cache"))
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model, inputs = zoo.nanogpt()
        parallel = megafx.parallelize(model, megafx.Config(), example_inputs=inputs(1, 8))
        found.append((parallel.megafx.cached, parallel(**inputs(1, 8))[1].item()))
    assert found == [("written", found[0][1]), ("read", found[0][1])]


def scale(model):
    model.options.scale = 3.0


def table(model):
    model.table = model.table * 2


def act(model):
    model.act = nn.functional.gelu


def frozen(model):
    model.up.bias.requires_grad_(False)


def evaluated(model):
    model.eval()


def wider(model):
    model.up, model.down = nn.Linear(6, 12), nn.Linear(12, 6)


def tied(model):
    model.down.weight = nn.Parameter(model.up.weight.t().contiguous())
    model.up.bias = nn.Parameter(torch.zeros(10))


@pytest.mark.parametrize("change", [scale, table, act, frozen, evaluated, wider])
def test_what_forward_reads_makes_an_entry_of_its_own(project, change):
    project.run()
    first, wanted, wanted_gradients, _ = project.run(change)
    again, loss, gradients, _ = project.run(change)
    assert (first, again) == ("written", "read")
    assert torch.equal(loss, wanted)
    assert [g is None for g in gradients] == [g is None for g in wanted_gradients]
    assert project.run()[0] == "read"  # the first one is still there


def test_what_functions_with_a_cache_give(project, monkeypatch):
    """Another process calls them, and compares."""
    cached = "import functools\n\n@functools.lru_cache\ndef factor(n):\n    return torch.full((n,), float(os.environ['N']))\n"
    source = SOURCE.replace("\nclass Options", f"{cached}\nclass Options").replace("* FACTOR", "* factor(10)")
    monkeypatch.setenv("NET_DOUBLE", "1")
    found = []
    for factor in ("2.0", "2.0", "3.0", "3.0"):
        monkeypatch.setenv("N", factor)
        project.write(source)
        found.append(project.run())
    assert [did for did, *_ in found] == ["written", "read", "written", "read"]
    assert torch.equal(found[0][1], found[1][1]) and torch.equal(found[2][1], found[3][1])
    assert found[0][1] != found[2][1]


PATCHES = """
import functools

def tanh(self, x, y):
    out = self.down(self.up(x).tanh())
    return {"loss": (out - y).square().mean(), "out": out}

def sigmoid(self, x, y):
    out = self.down(self.up(x).sigmoid())
    return {"loss": (out - y).square().mean(), "out": out}

def decorated(forward):
    def inner(self, x, y):
        return forward(self, x, y)
    return inner
"""


def test_functions_that_are_put_into_a_class(project, monkeypatch, tmp_path):
    """`Net.forward = f`: the file of the class is as it was."""
    patches = project.load("users_net_patches", tmp_path / "patches_of_users_net.py", PATCHES)
    forwards = [patches.tanh, *map(patches.decorated, (patches.tanh, patches.sigmoid))]
    project.run()
    wanted = {}
    for kept in (False, True):
        for forward in forwards:
            monkeypatch.setattr(project.module.Net, "forward", forward)
            did, loss, _, notes = project.run()
            assert did == ("read" if kept else "written") and (
                kept or "the code of the class 'users_net.Net'" in notes[0]
            )
            if not kept:
                wanted[forward] = project.run(cache=False)[1]
            assert torch.equal(loss, wanted[forward])


def test_a_forward_that_is_replaced_between_two_calls(project, monkeypatch, tmp_path):
    patches = project.load("users_net_patches", tmp_path / "patches_of_users_net.py", PATCHES)
    plain = project.module.Net()
    model = megafx.parallelize(project.module.Net(), megafx.Config())
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for forward in (project.module.Net.forward, patches.tanh, patches.sigmoid, patches.tanh):
        monkeypatch.setattr(project.module.Net, "forward", forward)
        torch.testing.assert_close(model(x, y)["loss"], plain(x, y)["loss"])
    assert model.megafx.captures == 3


def test_two_classes_of_one_name(project, tmp_path):
    """A notebook's or a script's `__main__`, a module that is loaded from another file."""
    first, code = project.module, SOURCE.replace("self.act(self.up(x))", "self.up(x).tanh()")
    assert project.run()[0] == "written"
    project.file = tmp_path / "other_users_net.py"
    for source in (
        code,
        SOURCE,
        SOURCE.replace("FACTOR = 2.0", "FACTOR = 3.0"),
    ):  # another program, and the same one elsewhere
        project.write(source)
        did, loss, _, _ = project.run()
        assert did == "written" and torch.equal(loss, project.run(cache=False)[1])
    project.module = first  # its globals are no longer those of the module of this name
    did, loss, _, _ = project.run()
    assert "Net" in did and "another module" in did and torch.equal(loss, project.run(cache=False)[1])


@pytest.mark.parametrize("where, did", [("site-packages", "read"), ("mine", "written")])
def test_the_order_of_a_table(project, tmp_path, where, did):
    """A library may have filled its table from a set, whose order differs between processes; that of a user's table is read."""
    library = tmp_path / where / "users_net_patches.py"
    library.parent.mkdir()
    project.load("users_net_patches", library, "TABLE = {'scale': 2.0, 'shift': 1.0}")
    reads = SOURCE.replace("* self.options", '* library.TABLE["scale"] * self.options')
    project.write(reads.replace("import os", "import os\nimport users_net_patches as library"))
    assert project.run()[0] == "written"
    table = project.module.library.TABLE
    table["scale"] = table.pop("scale")
    again = project.run()
    assert again[0] == did, again[-1]
    table["scale"] = 3.0
    assert project.run()[0] == "written"


def test_a_class_that_forward_makes_an_object_of(project):
    """Python 3.12 reads the cell `__class__` wherever `super()` is called."""
    scale = "class Scale:\n    def __init__(self):\n        assert __class__ is type(self)\n        self.by = 2.0\n\n"
    project.write(
        SOURCE.replace("class Options", scale + "class Options").replace(
            "* self.options", "* Scale().by * self.options"
        )
    )
    assert project.run()[0] == "written"
    assert project.run()[0] == "read"


def test_a_changed_line_of_the_model(project):
    _, before, _, _ = project.run()
    project.write(
        SOURCE.replace("FACTOR = 2.0", "FACTOR = 2.0\nMORE = 1.0").replace("* self.options", "* 3 * self.options")
    )
    did, loss, _, notes = project.run()
    assert (did, len(notes)) == ("written", 1)
    assert "users_net.py" in notes[0]
    assert not torch.equal(loss, before)
    assert project.run()[0] == "read"


def test_a_file_that_changed_since_the_process_started_is_not_trusted(project):
    cache_key.STARTED = project.file.stat().st_ctime
    assert project.run()[0].startswith("nothing is kept: code in")


def test_a_variable_of_the_environment_that_forward_reads(project, monkeypatch):
    project.run()
    monkeypatch.setenv("NET_DOUBLE", "1")
    did, loss, _, notes = project.run()
    assert did == "written"
    assert "NET_DOUBLE" in notes[0]
    assert torch.equal(project.run()[1], loss)
    project.module.FACTOR = 5.0
    assert project.run()[0] == "written"  # a global


def test_another_config_or_version(project, monkeypatch):
    project.run()
    assert project.run(norm_fusion=False)[0] == "written"
    for owner, name in ((torch, "__version__"), (cache_key, "version_of")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, "9.9" if owner is torch else lambda package: "9.9")
            assert project.run()[0] == "written"
    monkeypatch.setattr(cache_key, "own_source", lambda: "other code")
    assert project.run()[0] == "written"


@pytest.mark.parametrize("damage", [lambda d: d[: len(d) // 2], lambda d: d[:200] + b"x" + d[201:], lambda d: b""])
def test_a_damaged_entry_is_made_anew(project, damage):
    _, loss, _, _ = project.run()
    for path in project.cache.iterdir():
        path.write_bytes(damage(path.read_bytes()))
    did, other, _, notes = project.run()
    assert did == "written"
    assert "damaged" in notes[0]
    assert torch.equal(loss, other)
    assert project.run()[0] == "read"


def test_what_is_well_formed_and_means_nothing_is_made_anew(project):
    project.run()
    (path,) = project.cache.iterdir()
    data = path.read_bytes()
    form, tensors = cache_files.unpacked(data)
    form["program"]["program"][1][-2][2] = "os.system.default"
    path.write_bytes(cache_files.packed(form, tensors))
    did, _, _, notes = project.run()
    assert did == "written"
    assert "cannot be read" in notes[0]


def test_outputs_beside_the_loss_have_gradients(project):
    def gradients(**config):
        model = project.module.Net()
        parallel = megafx.parallelize(model, megafx.Config(**config))
        out = parallel(torch.ones(2, 6), torch.zeros(2, 6))
        (out["loss"] + out["out"].sum()).backward()
        return [p.grad for p in parallel.parameters()], parallel.megafx.cached

    whole, _ = gradients(cache=False)
    first, _ = gradients()
    second, did = gradients()
    assert did == "read"
    assert all(map(torch.equal, whole, first)) and all(map(torch.equal, first, second))


def test_the_report_is_that_of_the_first_start(project):
    def report():
        parallel = megafx.parallelize(project.module.Net(), megafx.Config())
        parallel(torch.ones(2, 6), torch.zeros(2, 6))["loss"].backward()
        found = megafx.explain(parallel)
        found.header["cache"] = ""
        return found.to_json(), str(found), found.memory().peak

    assert report() == report()


def smoothed(amount):
    return lambda output, y: output["loss"] * amount


def test_variables_of_a_loss_function(project):
    assert project.run(loss_fn=smoothed(1.0))[0] == "written"
    assert project.run(loss_fn=smoothed(1.0))[0] == "read"
    assert project.run(loss_fn=smoothed(2.0))[0] == "written"


def test_what_cannot_be_kept_is_named(project):
    def hooked(model):
        model.up.register_forward_hook(lambda module, args, output: output * 2)

    assert project.run(hooked)[0].startswith("nothing is kept: hooks")
    assert project.run(eager_modules=("up",))[0].startswith("nothing is kept: code that is not captured")
    assert not project.cache.exists() or not [*project.cache.iterdir()]


def test_the_oldest_entries_go(project, monkeypatch):
    monkeypatch.setattr(cache_files, "TRIED", 2)
    for value in (1.0, 2.0, 3.0):
        project.run(lambda model, value=value: setattr(model.options, "scale", value))
    assert len([*project.cache.iterdir()]) == 2
    monkeypatch.setattr(cache_files, "LARGEST", 1)
    project.run(norm_fusion=False)
    assert len([*project.cache.iterdir()]) == 1


def test_variables_of_functions_that_are_made():
    def scaled(factor):
        return lambda x: x * factor

    class Held:
        factor = 2.0

    own = Fingerprint(nn.Linear(2, 2))
    assert own(scaled(2.0)) == own(scaled(2.0)) != own(scaled(3.0))
    assert own(functools.partial(torch.relu, True)) != own(functools.partial(torch.relu, False))
    assert own(nn.functional.gelu) != own(nn.functional.relu)
    for unguarded in (
        functools.partial(torch.relu, Held()),
        functools.wraps(torch.relu)(scaled(Held())),
        torch.Generator(),
    ):
        with pytest.raises(Unstorable):
            own(unguarded)


def test_named_tuples_that_forward_returns(project):
    named = SOURCE.replace(
        'return {"loss": (out - y).square().mean(), "out": out}', "return Result((out - y).square().mean(), out)"
    )
    named = named.replace("import os", "import os\nfrom typing import NamedTuple", 1)
    project.write(
        named.replace("class Options", "class Result(NamedTuple):\n    loss: object\n    out: object\n\nclass Options")
    )

    def call():
        parallel = megafx.parallelize(project.module.Net(), megafx.Config())
        return parallel(torch.ones(2, 6), torch.zeros(2, 6)), parallel.megafx.cached

    (first, _), (second, did) = call(), call()
    assert did == "read"
    assert type(second) is project.module.Result
    assert torch.equal(first.loss, second.loss) and torch.equal(first.out, second.out)


@pytest.mark.parametrize("value", ["off", "0", "False"])
def test_the_variable_switches_it_off(monkeypatch, tmp_path, value):
    monkeypatch.setenv("MEGAFX_CACHE", value)
    monkeypatch.chdir(tmp_path)
    assert cache_files.folder() is None and not [*tmp_path.iterdir()]
