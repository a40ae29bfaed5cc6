"""Files that a fault or an enemy made: each case changes a good folder. What reads them refuses, or reads what was saved.

`WEIGHTS` are of safetensors files and their index, `METADATA` of a checkpoint's `metadata.json` with its digest made anew (the
digest is no secret), `PICKLES` of the `.metadata` that torch.distributed.checkpoint writes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import megafx
from megafx.checkpoint.content import METADATA as METADATA_FILE
from megafx.checkpoint.content import _digest
from megafx.weights.files import INDEX, SINGLE

Case = Callable[[Path], None]
WEIGHTS: dict[str, Case] = {}
METADATA: dict[str, Case] = {}
PICKLES: dict[str, Case] = {}
LOADS = {  # cases whose values are those that were saved
    "trailing spaces in the header", "as float64", "a link to a file", "an unknown field in the header",
}  # fmt: skip
SECONDS = 10  # a reader that takes longer hangs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("order", torch.arange(4))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


class Hung(BaseException):
    pass


@contextlib.contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Raises Hung where what is within takes longer."""

    def end(*_: Any) -> None:
        raise Hung(f"after {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- safetensors


def good_weights(folder: Path, files: int = 1) -> Net:
    model = net(1)
    megafx.save_pretrained(model, folder, max_shard_size="5GB" if files == 1 else 60)
    return model


def header_of(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def put(folder: Path, header: Any, data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def _header(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """change: of the header in place, or what takes its place."""

    def case(folder: Path) -> None:
        good_weights(folder)
        header, data = header_of(folder)
        found = change(header)
        put(folder, header if found is None else found, data)

    WEIGHTS[name] = case


def _entry(name: str, **fields: Any) -> None:
    """Fields of one tensor; None: without it."""

    def change(header: dict[str, Any]) -> None:
        for field, value in fields.items():
            if value is None:
                del header["up.weight"][field]
            else:
                header["up.weight"][field] = value

    _header(name, change)


def _bytes(name: str, change: Callable[[bytes], bytes]) -> None:
    def case(folder: Path) -> None:
        good_weights(folder)
        (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))

    WEIGHTS[name] = case


def _tensors(name: str, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    def case(folder: Path) -> None:
        from safetensors.torch import save_file

        values = {n: x.detach().clone() for n, x in good_weights(folder).state_dict().items()}
        change(values)
        save_file(values, folder / SINGLE)

    WEIGHTS[name] = case


def _index(name: str, change: Callable[[Path, dict[str, Any]], Any]) -> None:
    """change: (folder, index) -> another index, or None where it was changed in place. Bytes are written as they are."""

    def case(folder: Path) -> None:
        good_weights(folder, files=3)
        index = json.loads((folder / INDEX).read_text())
        found = change(folder, index)
        text = json.dumps(index if found is None else found) if not isinstance(found, bytes) else found.decode()
        if (folder / INDEX).exists():
            (folder / INDEX).write_text(text)

    WEIGHTS[name] = case


def _all_to(file: str) -> Callable[[Path, dict[str, Any]], None]:
    def change(folder: Path, index: dict[str, Any]) -> None:
        index["weight_map"] = dict.fromkeys(index["weight_map"], file)

    return change


def _first_file(folder: Path, index: dict[str, Any]) -> Path:
    return folder / sorted(index["weight_map"].values())[0]


def _replaced(make: Callable[[Path], Any]) -> Callable[[Path, dict[str, Any]], None]:
    """The first file is another thing."""

    def change(folder: Path, index: dict[str, Any]) -> None:
        path = _first_file(folder, index)
        os.rename(path, folder / "kept")
        make(path)

    return change


DEEP = b'{"weight_map": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"

_bytes("an empty file", lambda raw: b"")
_bytes("three bytes", lambda raw: raw[:3])
_bytes("a header of no bytes", lambda raw: struct.pack("<Q", 0) + raw[8:])
_bytes("a header of 2**63 bytes", lambda raw: struct.pack("<Q", 2**63) + raw[8:])
_bytes("a header longer than the file", lambda raw: struct.pack("<Q", len(raw)) + raw[8:])
_bytes("a shorter header", lambda raw: struct.pack("<Q", 9) + raw[8:])
_bytes("one byte less", lambda raw: raw[:-1])
_bytes("half of it", lambda raw: raw[: len(raw) // 2])
_bytes("bytes behind it", lambda raw: raw + b"12345678")
_bytes("random bytes", lambda raw: bytes(i * 37 % 256 for i in range(len(raw))))
_bytes("a pickle", lambda raw: pickle.dumps({"up.weight": 1}))
_header("no JSON", lambda header: b"{'up.weight': 1}")
_header("no UTF-8", lambda header: b'{"\xff\xfe": 1}')
_header("a list", lambda header: [])
_header("null", lambda header: b"null")
_header("deep", lambda header: DEEP)
_header("a tensor twice", lambda header: json.dumps(header).replace('"down.weight"', '"up.weight"').encode())
_header("no tensors", lambda header: {})
_header("trailing spaces in the header", lambda header: json.dumps(header).encode() + b" " * 64)
_header("its metadata are a list", lambda header: header.update(__metadata__=[]))
_header("its metadata are numbers", lambda header: header.update(__metadata__={"format": 1}))
_header("a tensor is a number", lambda header: header.update({"up.weight": 1}))
_entry("a negative offset", data_offsets=[-8, 40])
_entry("offsets beyond the end", data_offsets=[10**6, 10**6 + 48])
_entry("offsets of 2**64", data_offsets=[2**64, 2**64 + 48])
_entry("offsets in the wrong order", data_offsets=[48, 0])
_entry("offsets of another tensor", data_offsets=[0, 48])
_entry("fractions as offsets", data_offsets=[0.5, 48.5])
_entry("one offset", data_offsets=[0])
_entry("no offsets", data_offsets=None)
_entry("an unknown dtype", dtype="F33")
_entry("a small dtype name", dtype="f32")
_entry("another dtype", dtype="F64")
_entry("integers of the same size", dtype="I32")
_entry("no dtype", dtype=None)
_entry("a negative shape", shape=[-4, -3])
_entry("another shape", shape=[4, 4])
_entry("an overflowing shape", shape=[2**40, 2**40])
_entry("no shape", shape=None)
_entry("a shape of strings", shape=["4", "3"])
_entry("turned", shape=[3, 4])
_entry("flat", shape=[12])
_entry("with a dim of one", shape=[1, 4, 3])
_entry("an unknown field in the header", more=1)
_tensors("a tensor too few", lambda values: values.pop("up.bias"))
_tensors("a tensor too many", lambda values: values.update(more=torch.zeros(2)))
_tensors("another name", lambda values: values.update({"up.bias\n": values.pop("up.bias")}))
_tensors("no name", lambda values: values.update({"": values.pop("up.bias")}))
_tensors("floats for integers", lambda values: values.update(count=torch.tensor(7.0)))
_tensors("integers for floats", lambda values: values.update({"up.bias": torch.ones(4, dtype=torch.int32)}))
_tensors("bools for floats", lambda values: values.update({"up.bias": torch.ones(4, dtype=torch.bool)}))
_tensors("as float64", lambda values: values.update({"up.bias": values["up.bias"].double()}))
_index("the index is a list", lambda folder, index: [index])
_index("the index is null", lambda folder, index: b"null")
_index("the index is no JSON", lambda folder, index: b"{")
_index("the index is deep", lambda folder, index: DEEP)
_index("the index has no map", lambda folder, index: {"metadata": {}})
_index("its map is a list", lambda folder, index: {"weight_map": [*index["weight_map"]]})
_index("its map has numbers", lambda folder, index: {"weight_map": dict.fromkeys(index["weight_map"], 5)})
_index("its map has null", lambda folder, index: {"weight_map": dict.fromkeys(index["weight_map"])})
_index("its map has lists", lambda folder, index: {"weight_map": {name: [[]] for name in index["weight_map"]}})
_index("its map is empty", lambda folder, index: {"weight_map": {}})
_index("a file that is not there", _all_to("other.safetensors"))
_index("a file of the folder above", lambda f, index: _all_to(f"../{f.name}/{_first_file(f, index).name}")(f, index))
_index("an absolute file", lambda folder, index: _all_to(str(_first_file(folder, index)))(folder, index))
_index("a device", _all_to("/dev/zero"))
_index("the folder itself", _all_to("."))
_index("names in the wrong file", lambda folder, index: _all_to(_first_file(folder, index).name)(folder, index))
_index("a pipe", _replaced(os.mkfifo))
_index("a folder", _replaced(os.mkdir))
_index("a link to nothing", _replaced(lambda path: path.symlink_to("nothing")))
_index("a link to a device", _replaced(lambda path: path.symlink_to("/dev/zero")))
_index("a link to a file", _replaced(lambda path: path.symlink_to("kept")))
_index("a pipe beside the index", lambda folder, index: os.mkfifo(folder / SINGLE))
_index("no index", lambda folder, index: (folder / INDEX).unlink())


# -- metadata.json


class Schedule:
    """A user's object that is strict about its state."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = -1  # before it looks: it is half loaded where the next line raises
        self.at = state["at"] + 0


class Run:
    """Everything that a load may change."""

    def __init__(self, seed: int) -> None:
        self.model = net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01 * (seed + 1))
        self.schedule = Schedule()
        for _ in range(seed):
            self.model.down(self.model.up(torch.randn(2, 3))).square().sum().backward()
            self.optimizer.step()
            self.schedule.at += 1

    def state(self) -> Any:
        parts = [self.model.state_dict(), self.optimizer.state_dict(), self.schedule.state_dict()]
        return copy.deepcopy([*parts, torch.get_rng_state()])

    def save(self, root: Path) -> Path:
        extra = {"schedule": self.schedule, "ema": torch.ones(3), "note": {"a": (1, 2.5)}}
        return megafx.save_checkpoint(root, self.model, self.optimizer, step=1, extra=extra)

    def load(self, root: Path) -> Any:
        return megafx.load_checkpoint(root, self.model, self.optimizer, extra={"schedule": self.schedule})


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the content of a checkpoint's `metadata.json`, and make its digest anew."""
    whole = json.loads((path / METADATA_FILE).read_text())
    change(whole["content"])
    whole["digest"] = _digest(whole["content"])
    (path / METADATA_FILE).write_text(json.dumps(whole))


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    METADATA[name] = lambda path: rewrite(path, change)


def _tensor(name: str, tensor: str = "model.up.weight", **fields: Any) -> None:
    _edit(f"{tensor}: {name}", lambda content: content["tensors"][tensor].update(fields))


def _chunk(name: str, place: int, value: Any) -> None:
    def change(content: dict[str, Any]) -> None:
        content["tensors"]["model.up.weight"]["chunks"][0][place] = value

    _edit(f"a slice: {name}", change)


def _object(name: str, *keys: Any, value: Any) -> None:
    """Set objects[keys[0]][keys[1]]... to the value."""

    def change(content: dict[str, Any]) -> None:
        at = content["objects"]
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    _edit(f"objects: {name}", change)


def _file(name: str, **about: Any) -> None:
    """The one file gets other names or facts: {name: None: as it is, else what is said}."""

    def change(content: dict[str, Any]) -> None:
        (known,) = content["files"].values()
        content["files"] = {file: known if said is None else said for file, said in about.items()}

    _edit(f"files: {name}", change)


def _nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def _exchange(data: dict[str, Any], a: str, b: str) -> None:
    data[a], data[b] = data[b], data[a]


PARAMETERS = [f"{module}.{name}" for module in ("up", "down") for name in ("weight", "bias")]
RANK = "rank_00000.safetensors"
_tensor("no slices", chunks=[])
_tensor("slices are null", chunks=None)
_tensor("a slice twice", chunks=[[[0, 0], [4, 3], RANK, "model.up.weight"]] * 2)
_tensor("half of it", chunks=[[[0, 0], [2, 3], RANK, "model.up.weight[0:2, 0:3]"]])
_tensor("another shape", shape=[3, 4])
_tensor("a negative shape", shape=[-4, -3])
_tensor("a shape of strings", shape=["4", "3"])
_tensor("an unknown dtype", dtype="F33")
_tensor("another dtype", dtype="I32")
_tensor("a dtype that is a list", dtype=[])
_tensor("a huge one", "extra.ema", shape=[10**13], chunks=[[[0], [10**13], RANK, "extra.ema"]])
_tensor("a huge one in part", "extra.ema", shape=[10**13])
_chunk("another place", 0, [1, 0])
_chunk("a negative place", 0, [-1, 0])
_chunk("a place of fractions", 0, [0.0, 0.0])
_chunk("one number", 0, [0])
_chunk("larger", 1, [5, 3])
_chunk("of 2**70", 1, [2**70, 3])
_chunk("of another file", 2, "rank_00001.safetensors")
_chunk("of the folder above", 2, "../../secret.safetensors")
_chunk("of /etc", 2, "/etc/passwd")
_chunk("of no file", 2, None)
_chunk("of another tensor", 3, "model.down.weight")
_chunk("of no tensor", 3, "nothing")
_file("a device", **{RANK: None, "/dev/zero": [0, "00"]})
_file("the folder above", **{RANK: None, "../x": [0, "00"]})
_file("the metadata", **{RANK: None, METADATA_FILE: [0, "00"]})
_file("none")
_file("other bytes", **{RANK: [1, "00"]})
_file("bytes as text", **{RANK: ["1", "00"]})
_file("negative bytes", **{RANK: [-1, "00"]})
_file("no digest", **{RANK: [1]})
_file("a list of lists", **{RANK: [[], []]})
_edit("files: a list", lambda content: content.update(files=[]))
_edit("tensors: a list", lambda content: content.update(tensors=[]))
_edit("tensors: one less", lambda content: content["tensors"].pop("model.up.bias"))
_edit(
    "tensors: one more", lambda content: content["tensors"].update({"model.more": content["tensors"]["model.up.bias"]})
)
_edit("tensors: two exchanged", lambda content: _exchange(content["tensors"], "model.up.weight", "model.down.weight"))
for _value in (-1, "1", 1.5, None, True):
    _edit(f"step: {_value!r}", lambda content, value=_value: content.update(step=value))
for _key in ("aliases", "model", "optimizers", "rng", "extra"):
    _object(f"{_key} is a number", _key, value=3)
    _edit(f"objects: no {_key}", lambda content, key=_key: content["objects"].pop(key))
_object("an alias of nothing", "aliases", "up.bias", value="nothing")
_object("an optimizer without groups", "optimizers", 0, value={"state": {}})
_object("a group without names", "optimizers", 0, "groups", 0, value={"lr": 1.0})
_object("a group with numbers", "optimizers", 0, "groups", 0, "names", value=[1, 2])
_object("a group without learning rate", "optimizers", 0, "groups", 0, value={"names": PARAMETERS})
_object("a state that is a list", "optimizers", 0, "state", value=[])
_object("the state of nothing", "optimizers", 0, "state", "nothing", value={"step": 1})
_object(
    "state of another parameter",
    "optimizers",
    0,
    "state",
    "up.weight",
    "exp_avg",
    value={"$tensor": "model.down.weight"},
)
_object("a short generator", "rng", "cpu", value={"$tensor": "extra.ema"})
_object("a generator of text", "rng", "cpu", value="none")
_object("an unknown tag", "extra", "note", value={"$code": "print()"})
_object("an unknown tensor", "extra", "note", value={"$tensor": "nothing"})
_object("a tensor that is a list", "extra", "note", value={"$tensor": []})
_object("pairs that are none", "extra", "note", value={"$dict": [[1]]})
_object("keys that are lists", "extra", "note", value={"$dict": [[[1], 1]]})
_object("a dtype that is none", "extra", "note", value={"$dtype": "os"})
_object("a number that is none", "extra", "note", value={"$float": "one"})
_object("101 deep", "extra", "note", value=_nested(101))
_object("state that its object refuses", "extra", "schedule", value={"at": "x"})
_object("state without a part", "extra", "schedule", value={})
_object("of a module that takes none", "model", "_extra_state", value={"a": 1})


def _text(name: str, text: str | None) -> None:
    def case(path: Path) -> None:
        (path / METADATA_FILE).unlink()
        if text is None:
            os.mkfifo(path / METADATA_FILE)
        else:
            (path / METADATA_FILE).write_text(text)

    METADATA[f"metadata.json: {name}"] = case


_text("a pipe", None)
_text("empty", "")
_text("a list", "[]")
_text("deep", "[" * 200_000 + "]" * 200_000)
_text("another version", '{"format": "megafx checkpoint", "version": 99}')
_text("no content", f'{{"format": "megafx checkpoint", "version": 1, "digest": "{_digest(None)}"}}')


# -- .metadata


def good_torch(run: Run, folder: Path) -> None:
    optimizer = get_optimizer_state_dict(run.model, run.optimizer)
    dcp.save({"model": run.model.state_dict(), "optim": optimizer}, checkpoint_id=folder, no_dist=True)


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def _pickle(name: str, made: bytes | Callable[[], Any]) -> None:
    def case(folder: Path) -> None:
        (folder / ".metadata").write_bytes(made if isinstance(made, bytes) else pickle.dumps(made()))

    PICKLES[name] = case


def _described(name: str, change: Callable[[Metadata], Any]) -> None:
    def case(folder: Path) -> None:
        found = pickle.loads((folder / ".metadata").read_bytes())
        change(found)
        (folder / ".metadata").write_bytes(pickle.dumps(found))

    PICKLES[name] = case


def _build(module: str, name: str, attribute: str) -> bytes:
    """Sets an attribute of what is imported."""
    state = b"N}(" + b"\x8c" + bytes([len(attribute)]) + attribute.encode() + b"ctorch\nfloat32\nu\x86"
    return b"\x80\x04c" + f"{module}\n{name}\n".encode() + state + b"b."


AT, OTHER = MetadataIndex("model.up.weight", (0, 0)), MetadataIndex("model.down.bias", (0,))


def _place(name: str, **fields: Any) -> None:
    _described(name, lambda found: vars(found.storage_data[AT]).update(fields))


def _about(name: str, change: Callable[[Any], Any]) -> None:
    _described(name, lambda found: change(found.state_dict_metadata["model.up.weight"]))


_pickle("a command", Bomb)
_pickle("a command within", lambda: {"state": Bomb()})
_pickle("no metadata", lambda: {"state": 1})
_pickle("eval", b'cbuiltins\neval\n(S\'open("ran", "w")\'\ntR.')
_pickle("getattr", b"cbuiltins\ngetattr\n.")
_pickle("an attribute by getattr", b"cbuiltins\ngetattr\n(ctorch\nSize\nS'__init__'\ntR.")
_pickle("truncated", b"\x80\x04nonsense")
_pickle("empty", b"")
_pickle("a memo of 2**31", b"\x80\x04Nr\xff\xff\xff\x7f.")
_pickle("a string of 2**60 bytes", b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b".")
_pickle("attributes of paths", _build("pathlib", "PosixPath", "exists"))
_pickle("attributes of Metadata", _build("torch.distributed.checkpoint.metadata", "Metadata", "version"))
_pickle("attributes of a function", _build("torch.serialization", "_get_layout", "__doc__"))
_pickle("attributes of an enum", _build("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "x"))
_about("no slices", lambda about: about.chunks.clear())
_about("a slice twice", lambda about: about.chunks.extend(about.chunks))
_about("a huge tensor", lambda about: setattr(about, "size", torch.Size((2**40, 2**20))))
_about("a dtype that is none", lambda about: setattr(about.properties, "dtype", "float32"))
_described("no place", lambda found: found.storage_data.pop(AT))
_place("the folder above", relative_path="../secret")
_place("an absolute place", relative_path="/etc/passwd")
_place("a file that is not there", relative_path="other.distcp")
_place("a place beyond the end", offset=10**9)
_place("a negative place", offset=-5)
_place("a length that is none", length="all")
_described(
    "bytes of another tensor", lambda found: vars(found.storage_data[AT]).update(vars(found.storage_data[OTHER]))
)
_described("places that are none", lambda found: setattr(found, "storage_data", None))
_described("tensors that are none", lambda found: found.state_dict_metadata.update({"model.up.weight": 3}))
