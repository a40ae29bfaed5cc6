"""`TPTensor`: the DTensor that parameters, their gradients and optimizer state are at t > 1.

Its shape is the logical one; its local tensor is the physical shard of `placements.Layout`: block-permuted, and zero padded
where units do not divide. Operations speak the logical layout; which run on local tensors, and which gather the whole tensor,
is in tensor_dispatch.py.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.nn.utils import parametrize
from torch.utils._foreach_utils import _foreach_supported_types

from megafx.distributed.saved_shards import saved
from megafx.distributed.tensor_dispatch import DispatchedTensor
from megafx.distributed.tensor_layout import cuts_of, is_permuted, new_shard, shard_of, spec_of
from megafx.distributed.tensor_whole import NAME, Whole, Wholes
from megafx.errors import UsageError
from megafx.placements.slices import ShardSlice, shard_slices

_data: Any = torch.Tensor.data  # a descriptor of C


def wrap(local: torch.Tensor, spec: DTensorSpec) -> TPTensor:
    """Local tensor -> TPTensor without gradient; `spec` from `make_spec`, for the same dtype."""
    return new_shard(TPTensor, local, spec, requires_grad=False)


class TPTensor(DispatchedTensor):
    """See the module docstring. Made by `wrap`, or from a parameter by `parameters.replicate_parameters`."""

    @property
    def main_grad(self) -> torch.Tensor | None:
        """`.grad`, by Megatron's name."""
        return self.grad

    @main_grad.setter
    def main_grad(self, value: torch.Tensor | None) -> None:
        self.grad = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain tensor, which torch.load reads without megafx: distributed/saved_shards.py."""
        return saved(self).requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def __copy__(self) -> TPTensor:
        copy: Any = wrap(self._local_tensor, self._spec).requires_grad_(self.requires_grad)
        vars(copy).update(vars(self))
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> TPTensor:
        """As torch's: a parameter's copy has no gradient, another leaf's has a copy of it."""
        if id(self) not in memo:
            copy: Any = wrap(self._local_tensor.clone(), self._spec).requires_grad_(self.requires_grad)
            vars(copy).update(vars(self))
            memo[id(self)] = copy
            if self.is_leaf and self.grad is not None:
                copy.grad_dtype = self.grad_dtype
                if isinstance(self, torch.nn.Parameter):
                    return copy
                copy.grad = self.grad.__deepcopy__(memo)
        return cast(TPTensor, memo[id(self)])

    @property
    def data(self) -> torch.Tensor:
        """As Tensor.data: the same shard without autograd. It can be set to a tensor of the same shape: of a whole one, this
        rank's part is taken (which is a copy where it is cut), and of another sharded one its shard, which is then shared."""
        return _data.__get__(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
        if value.shape != self.shape:
            raise UsageError(
                f"{_named(self)} of shape {tuple(self.shape)} is set to data of shape {tuple(value.shape)}: the plan of a "
                "parallelized model holds for the shape that it had",
                fix="change shapes before megafx.parallelize(model); or in `with megafx.whole_parameters(model):`, and call "
                "megafx.parallelize(model) again after it",
            )
        value = value.detach()
        if isinstance(value, DTensor) and value._spec.placements == self._spec.placements:
            local = value._local_tensor
        else:
            local = shard_of(Wholes()(value), self._spec)
        spec = spec_of(self._spec, value.dtype)
        _data.__set__(self, wrap(local, spec))
        self._local_tensor, self._spec = local, spec

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """A copy of the logical tensor on every rank. Collective; differentiable."""
        whole = cast(torch.Tensor, Whole.apply(self))
        return whole if self._spec.placements[0].is_shard() else whole.clone()

    def data_ptr(self) -> int:
        """Where this rank's shard lies. (A DTensor's own memory is empty; accelerate finds an optimizer's parameters by it.)"""
        return self._local_tensor.data_ptr()

    def storage(self) -> Any:
        """What safetensors' functions for plain models ask for: of a shard it would be memory of another size."""
        raise UsageError(
            f"the storage of {_named(self)} is asked for, which is in parts on several ranks",
            fix="of safetensors.torch call save_file(megafx.full_state_dict(model), file) on every rank in place of "
            "save_model or save_file(model.state_dict()), or megafx.save_pretrained(model, folder); and "
            "megafx.load_safetensors(model, file) in place of load_model",
        )

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """This rank's physical shard."""
        if not is_permuted(self) or not torch.is_grad_enabled():
            return super().to_local(grad_placements=grad_placements)
        return cast(torch.Tensor, _Local.apply(self))

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> DTensor:
        if not is_permuted(self) or placements is None:
            return super().redistribute(device_mesh, placements, **options)
        if tuple(placements) == self._spec.placements:
            return self
        if all(p.is_replicate() for p in placements):
            return DTensor.from_local(self.full_tensor(), self._spec.mesh, list(placements), run_check=False)
        found = f"{self._spec.placements[0]} cannot be redistributed to {tuple(placements)}"
        raise UsageError(found, fix="use full_tensor(), then torch.distributed.tensor.distribute_tensor")

    # -- torch.distributed.checkpoint: chunks in logical coordinates, one for each box that this rank holds

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(x.offsets), torch.Size(x.sizes)) for x in slices_of(self)]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local_tensor)
        chunks, kind = self.__create_chunk_list__(), WriteItemType.SHARD
        about = [TensorWriteData(chunk=chunk, properties=properties, size=self.size()) for chunk in chunks]
        return [WriteItem(MetadataIndex(fqn, a.chunk.offsets), kind, tensor_data=a) for a in about]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for box in slices_of(self):
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return self._local_tensor[box.local]
        raise UsageError(f"this rank holds no chunk of '{index.fqn}' at {index.offset}")


class _Slots(torch.Tensor):
    __slots__ = ["_local_tensor", "_spec"]


class WholeParameter(_Slots):
    """What a TPTensor is inside of `megafx.whole_parameters`: a plain parameter."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return cast(nn.Parameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch declares no name
        return repr(nn.Parameter(self.detach(), self.requires_grad))


_foreach_supported_types.extend([TPTensor, WholeParameter])  # clipping reduces all norms together then
_set: Any = parametrize._maybe_set


def _set_value(dest: torch.Tensor, src: torch.Tensor) -> None:
    """What `remove_parametrizations` leaves in a parameter. torch would swap the two, which have to be of one class."""
    if isinstance(dest, TPTensor):
        dest.data = src
    else:
        _set(dest, src)


parametrize._maybe_set = _set_value


def _named(tensor: TPTensor) -> str:
    return f"'{vars(tensor)[NAME]}'" if NAME in vars(tensor) else "a parameter"


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter, buffer, gradient or optimizer state on this rank, without autograd."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def slices_of(tensor: torch.Tensor) -> list[ShardSlice]:
    """Where the values that this rank holds lie in the original tensor; a tensor that is no DTensor is whole."""
    if not isinstance(tensor, DTensor):
        return shard_slices(tensor.shape, (), 0)
    return shard_slices(tensor.shape, cuts_of(tensor), tensor._spec.mesh.get_local_rank())


def slices_by_rank(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dict[int, list[ShardSlice]]:
    """`slices_of` on each rank that shares a tensor with this one, by its number in `group`, from the placement alone: replicas
    of these ranks are left out. Nothing of a tensor that is no DTensor, which each rank has for itself."""
    if not isinstance(tensor, DTensor) or group is None:
        return {}
    ranks = dist.get_process_group_ranks(tensor._spec.mesh.get_group())
    return {
        dist.get_group_rank(group, rank): shard_slices(tensor.shape, cuts_of(tensor), i) for i, rank in enumerate(ranks)
    }


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: TPTensor) -> torch.Tensor:
        ctx.spec = x._spec
        ctx.set_materialize_grads(False)
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> TPTensor | None:
        return None if grad is None else wrap(grad, ctx.spec)
