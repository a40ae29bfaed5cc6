"""Parameters of a model become TPTensors, first whole, then sharded as the plan says; joined ones are moved side by side.

Object identity is kept from `replicate_parameters` on, so that an optimizer made then stays valid when the plan comes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.optim.optimizer import _foreach_supported_types, register_optimizer_step_pre_hook

from megafx.distributed import optimizers
from megafx.distributed.kept_parameters import stand_in
from megafx.distributed.mesh import Meshes
from megafx.distributed.tensor import TPTensor, wrap
from megafx.distributed.tensor_layout import make_spec, shard_of
from megafx.distributed.tensor_whole import NAME
from megafx.errors import PlanError, UsageError
from megafx.placements.tensors import cut_tensor
from megafx.placements.types import Cuts, I, Placement, cut_further, experts_held


@dataclass(frozen=True)
class Slot:
    """Where a parameter lives: `module._parameters[key]`."""

    module: nn.Module
    key: str

    def get(self) -> nn.Parameter | None:
        return self.module._parameters[self.key]

    def put(self, parameter: Any) -> None:
        """Set it, also to a tensor that is no Parameter."""
        self.module._parameters[self.key] = parameter
        if isinstance(self.module, nn.RNNBase):  # it computes with a list of its own
            self.module._flat_weights = [getattr(self.module, n, None) for n in self.module._flat_weights_names]


def parameter_slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """(FQN, slot) of every parameter, each alias of a tied one included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                yield (f"{prefix}.{key}" if prefix else key), Slot(module, key)


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def as_parameter(tensor: torch.Tensor, like: torch.Tensor) -> nn.Parameter:
    """A parameter of `tensor` with the attributes and the hooks that users set on `like`; handles of the hooks stay valid."""
    param = nn.Parameter(tensor, requires_grad=like.requires_grad)
    for name, value in vars(like).items():
        setattr(param, name, value)
    for table in _HOOK_TABLES:
        hooks = getattr(like, table, None)
        if hooks is not None:
            setattr(param, table, hooks)
    return param


_HOOK_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


class MainGradParameter(nn.Parameter):
    """A parameter whose gradient Megatron's optimizers find too."""

    main_grad = TPTensor.main_grad


class CountedParameter(nn.Parameter):
    """A parameter on one rank whose every change is counted: by `_version`, also through `.data`, and by `replaced_memory`."""

    @property
    def data(self) -> Tensor:
        """As Tensor.data, but that a write to it counts as one to the parameter."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a descriptor
        vars(self)[_REPLACED_MEMORY] = replaced_memory(self) + 1


class CountedMainGradParameter(CountedParameter):
    """Both."""

    main_grad = TPTensor.main_grad


_REPLACED_MEMORY = "_megafx_replaced_memory"
_PLAIN = (nn.Parameter, MainGradParameter, CountedParameter, CountedMainGradParameter)
_foreach_supported_types.extend(_PLAIN[1:])  # optimizers ask for the exact type


@cache
def _make_parameters_of_ours() -> None:
    """Let nn.Parameter(p) take such a parameter as it takes a plain one: torch asks for the exact type."""
    new = nn.Parameter.__new__

    def of_ours(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        return new(cls, data.detach() if isinstance(data, _PLAIN[1:]) else data, requires_grad)

    setattr(nn.Parameter, new.__name__, staticmethod(of_ours))


def replaced_memory(parameter: Tensor) -> int:
    """How often `.data` was assigned to a CountedParameter."""
    return int(vars(parameter).get(_REPLACED_MEMORY, 0))


def count_changes(parameters: Iterable[nn.Parameter | None]) -> None:
    """Let plain parameters count their changes."""
    counted: dict[type, type] = {nn.Parameter: CountedParameter, MainGradParameter: CountedMainGradParameter}
    for parameter in parameters:
        if type(parameter) in counted:
            _make_parameters_of_ours()
            parameter.__class__ = counted[type(parameter)]


_LOW = (torch.bfloat16, torch.float16)
# torch optimizers that lerp moments, which have the parameter's dtype, towards the gradient, which must have it too.
_ONE_DTYPE = (torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam)


def take_fp32_gradients(parameters: Iterable[nn.Parameter | None]) -> None:
    """Let `.grad` of bf16 and fp16 parameters be fp32, and `main_grad` be another name of every parameter's `.grad`."""
    for parameter in parameters:
        if parameter is None:
            continue
        if parameter.dtype in _LOW:
            parameter.grad_dtype = torch.float32
            _refuse_low_moments()
        if type(parameter) in (nn.Parameter, CountedParameter):
            _make_parameters_of_ours()
            counted = isinstance(parameter, CountedParameter)
            parameter.__class__ = CountedMainGradParameter if counted else MainGradParameter


@cache
def _refuse_low_moments() -> None:
    """Raise before a step in which torch would fail midway."""

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            if not (isinstance(optimizer, _ONE_DTYPE) or group.get("fused")):
                continue
            for p in group["params"]:
                if p.grad is None or p.dtype not in _LOW or p.grad.dtype != torch.float32:
                    continue
                moment = optimizer.state.get(p, {}).get("exp_avg")
                if group.get("fused") or moment is None or moment.dtype in _LOW:
                    how = " (fused)" if group.get("fused") else ""
                    raise UsageError(
                        f"{type(optimizer).__name__}.step(){how} takes no fp32 gradients of {p.dtype} parameters",
                        fix="keep the parameters in fp32, and call the model under torch.autocast; or step fp32 copies of "
                        "them, with copy.grad = parameter.main_grad",
                    )

    register_optimizer_step_pre_hook(check)


def replicate_parameters(model: nn.Module, mesh: DeviceMesh, *, added: bool = False) -> None:
    """Replace each parameter by a replicated TPTensor over the same memory; ties are kept. added: those that are none yet."""
    optimizers.prepare()
    made: dict[int, nn.Parameter] = {}
    new: set[int] = set()
    replaced: list[tuple[nn.Parameter, nn.Parameter]] = []
    for fqn, slot in list(parameter_slots(model)):
        param = slot.get()
        assert param is not None
        if id(param) in new:
            continue  # of a module with several names
        if isinstance(param, TPTensor):
            if added:
                continue
            fix = "call megafx.parallelize once a model; models that share parameters, put into one module and parallelize that"
            raise UsageError(f"parameter '{fqn}' is parallelized already", fix=fix)
        if id(param) not in made:
            spec = make_spec(mesh, (), param.shape, param.dtype)
            made[id(param)] = as_parameter(wrap(param.detach().contiguous(), spec), param)
            vars(made[id(param)])[NAME] = fqn
            new.add(id(made[id(param)]))
            if param.grad is not None:
                made[id(param)].grad = wrap(param.grad, spec)
            replaced.append((param, made[id(param)]))
        slot.module._parameters[slot.key] = made[id(param)]
    for param, other in replaced:
        stand_in(param, other)


@torch.no_grad()
def shard_parameters(
    model: nn.Module,
    placements: Mapping[str, Placement],
    meshes: Meshes | None = None,
    experts: Mapping[str, int] = MappingProxyType({}),
    added: Collection[str] | None = None,
) -> None:
    """Cut each replicated parameter, and its gradient, in place: only the local tensor and the spec of the TPTensor change, its
    logical shape does not.

    placements: FQN -> I or S, how tensor-parallel ranks hold it; any alias of a tied one. meshes: of data-parallel ranks, which
    cut again what they hold shards of. Of parameters named in `experts` each rank keeps its experts: those of a stack (-1), or
    the one whose rank is named. added: names of those that alone are cut; None for all.
    """
    placed: dict[int, tuple[str, Placement]] = {}
    of_experts: dict[int, int] = {}
    for fqn, slot in parameter_slots(model):
        key = id(slot.get())
        if fqn in placements:
            name, placement = placed.setdefault(key, (fqn, placements[fqn]))
            if placement != placements[fqn]:
                raise PlanError(f"tied parameters '{name}' and '{fqn}' are placed at {placement} and {placements[fqn]}")
            if placement.kind not in ("I", "S"):
                raise PlanError(
                    f"parameter '{fqn}' is to be stored at {placement}", fix="parameters are stored at I or S"
                )
        if fqn in experts:
            of_experts[key] = experts[fqn]
    chosen = model.parameters() if added is None else {id(p): p for p in map(model.get_parameter, added)}.values()
    for param in chosen:
        assert isinstance(param, TPTensor)
        (_, placement), mesh = placed.get(id(param), ("", I)), param._spec.mesh
        if meshes is not None or id(param) in placed:
            vars(param)[_PLAN] = placement, of_experts.get(id(param))
        cuts: Cuts = ((placement, mesh.size()),) if placement.is_shard else ()
        if meshes is not None:
            cuts, mesh = _over_data(placement, param, meshes, of_experts.get(id(param))) or (cuts, mesh)
        if cuts or mesh is not param._spec.mesh:
            spec = make_spec(mesh, cuts, param.shape, param.dtype)
            _cut(param, spec, cuts)


def _over_data(
    tensor: Placement, param: TPTensor, meshes: Meshes, expert: int | None
) -> tuple[Cuts, DeviceMesh] | None:
    """How a parameter that tensor-parallel ranks hold at `tensor` is cut with data-parallel ranks, and on which mesh; None
    where these hold what one of them holds."""
    t = param._spec.mesh.size()
    if expert is not None:
        assert meshes.data is not None
        cuts = experts_held(tensor, param.shape, t, meshes.data.experts, meshes.data.same_experts, expert)
        mesh = meshes.experts_tensor if tensor.is_shard and t > 1 else meshes.experts
        assert mesh is not None
        return cuts, mesh
    if meshes.shards is not None:
        return cut_further(tensor, param.shape, t, meshes.shards.size() // t), meshes.shards
    return None


_PLAN = "_megafx_plan"  # attribute of a parameter that was cut: what the plan said of the place where it was then


def planned_as(param: TPTensor) -> tuple[Placement, int | None]:
    """(how tensor-parallel ranks hold a parameter, of one of an expert what `shard_parameters` was given in `experts`)."""
    found: tuple[Placement, int | None] = vars(param).get(_PLAN, (I, None))
    return found


def _cut(param: TPTensor, spec: DTensorSpec, cuts: Cuts) -> None:
    """Cut a parameter and its gradient, which are whole; `spec` describes what is left."""
    grad, param.grad = cast("TPTensor | None", param.grad), None
    rank = spec.mesh.get_local_rank()
    param._local_tensor = cut_tensor(param._local_tensor, cuts, rank)  # of a meta tensor: a meta shard
    param._spec = spec
    if grad is not None:
        param.grad = wrap(cut_tensor(grad._local_tensor, cuts, rank), spec)


def shard_like(full: torch.Tensor, param: TPTensor) -> TPTensor:
    """Logical tensor -> TPTensor placed as `param` is, in `param`'s dtype."""
    return wrap(shard_of(full.to(param.dtype), param._spec), param._spec)


RUNTIME = "_megafx_runtime"  # the attribute of a parallelized model that holds its runtime


def runtime_of(model: nn.Module) -> Any:
    """The runtime of a parallelized model; None of any other."""
    return vars(model).get(RUNTIME)


def everyone_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The group of all ranks of a parallelized model; None of any other."""
    runtime = runtime_of(model)
    return None if runtime is None else runtime.everyone


def side_by_side(parameters: Sequence[Tensor]) -> Tensor | None:
    """One view of parameters that follow each other in memory, joined on dim 0; else None."""
    first = parameters[0]
    memory, at = first.untyped_storage().data_ptr(), first.data_ptr()
    for p in parameters:
        follows = p.data_ptr() == at and p.untyped_storage().data_ptr() == memory
        if not follows or p.dtype != first.dtype or not p.is_contiguous():
            return None
        at += p.numel() * p.element_size()
    rows = sum(p.shape[0] for p in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


class JoinedParameters:
    """The concatenation on dim 0 of some of a graph's inputs, at each call.

    A view where they lie side by side in one memory (that of the last call while they have not moved), else a copy.
    """

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self.where: tuple[int, ...] = ()
        self.view: Tensor | None = None

    def __call__(self, inputs: Sequence[Any]) -> Tensor:
        parameters = [inputs[i] for i in self.indices]
        where = tuple(p.data_ptr() for p in parameters)
        if self.view is None or where != self.where:
            self.view, self.where = side_by_side(parameters), where
        return torch.cat(parameters) if self.view is None else self.view


@torch.no_grad()
def place_joined(model: nn.Module, slots: Mapping[str, Slot], groups: Iterable[list[str]]) -> list[list[str]]:
    """Move the local tensors of each group's parameters, which stay the same objects, side by side into one memory. Returns the
    groups that stay apart: those with tensor subclasses, or parameters whose storage is shared."""
    users: Counter[int] = Counter()
    for tensor in [*model.parameters(), *model.buffers()]:
        users[_memory(_local(tensor))] += 1
    apart = []
    for names in groups:
        params = [slots[name].get() for name in names]
        locals_ = [_local(p) for p in params if p is not None]
        if side_by_side(locals_) is not None:
            continue
        if len(locals_) < len(names) or not all(_is_plain(p) and users[_memory(p)] == 1 for p in locals_):
            apart.append(names)
            continue
        memory = locals_[0].new_empty(sum(p.numel() for p in locals_))
        at = 0
        for param, local in zip(params, locals_, strict=True):
            place = memory[at : at + local.numel()].view(local.shape)
            place.copy_(local)
            if isinstance(param, TPTensor):
                param._local_tensor = place
            else:
                cast(nn.Parameter, param).data = place
            at += local.numel()
    return apart


def _local(x: torch.Tensor) -> torch.Tensor:
    return x._local_tensor if isinstance(x, TPTensor) else x


def _memory(x: torch.Tensor) -> int:
    """Storage address; tensors without one all differ."""
    apart = x.is_meta or x.numel() == 0 or x.layout is not torch.strided
    return id(x) if apart else x.untyped_storage().data_ptr()


def _is_plain(x: torch.Tensor) -> bool:
    """True if x is an ordinary contiguous tensor that fills its memory."""
    if type(x) not in (torch.Tensor, *_PLAIN) or x.is_meta or not x.is_contiguous() or x.is_inference():
        return False
    return x.untyped_storage().nbytes() == x.numel() * x.element_size()
