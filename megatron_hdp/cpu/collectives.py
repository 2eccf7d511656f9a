"""torch.distributed on CPU ranks: gloo in place of NCCL, and what scripts use that gloo does not have."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hdp.cpu.devices import cpu_device


def apply() -> None:
    """Replace the functions in torch.distributed and in the module that defines them. Call once."""
    _replace("init_process_group", _init_process_group)
    _replace("new_group", _new_group)
    _replace("barrier", _barrier)
    _replace("all_to_all_single", _all_to_all_single)
    _replace("all_reduce", _all_reduce)
    _replace("all_gather", _all_gather)
    _replace("reduce_scatter", _reduce_scatter_list)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # old and new name
        if hasattr(distributed_c10d, name):
            _replace(name, _reduce_scatter)
    _wrap_device_mesh()


def _replace(name: str, maker: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(distributed_c10d, name)
    ours = functools.wraps(original)(maker(original))
    for module in (dist, distributed_c10d):
        setattr(module, name, ours)


def _gloo(backend: Any) -> Any:
    """gloo for backends that need a GPU ('nccl', 'cpu:gloo,cuda:nccl', 'ucc'); others ('fake', None) unchanged."""
    name = str(backend).lower()
    return "gloo" if "nccl" in name or "ucc" in name or "cuda:" in name else backend


def _init_process_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)  # binds the group to a GPU
        _drop_nccl_options(kwargs)
        return original("gloo" if backend is None else _gloo(backend), *args, **kwargs)

    return init_process_group


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        if args:  # pg_options is the fourth parameter
            args = (None, *args[1:])
        _drop_nccl_options(kwargs)
        return original(ranks, timeout, _gloo(backend), *args, **kwargs)

    return new_group


def _drop_nccl_options(kwargs: dict[str, Any]) -> None:
    options = kwargs.get("pg_options")
    if options is not None and "NCCL" in type(options).__qualname__:
        kwargs["pg_options"] = None


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
        return original(group, async_op, **kwargs)

    return barrier


def _all_to_all_single(original: Callable[..., Any]) -> Callable[..., Any]:
    """Split sizes may come as tensors: what a GPU run copies to the host 'is' on the host already."""

    def all_to_all_single(
        output: Any,
        input: Any,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), *args, **kwargs)

    return all_to_all_single


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo has no average: divide first, then sum, which also works for calls that return before they are done."""

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        if op == dist.ReduceOp.AVG:
            tensor.div_(dist.get_world_size(group))
            op = dist.ReduceOp.SUM
        return original(tensor, op, group, async_op)

    return all_reduce


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: Any, input: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op == dist.ReduceOp.AVG:
            input = input / dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return original(output, input, op, group, async_op)

    return reduce_scatter


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    """gloo gathers equal shapes only, NCCL others as well: rows are filled up to the most, and cut off again."""

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        rows = [each.shape[0] if each.dim() else 1 for each in tensor_list]
        if len(set(rows)) <= 1:
            return original(tensor_list, tensor, group, async_op)
        if async_op:
            raise NotImplementedError("all_gather of unequal shapes on CPU ranks cannot return before it is done")
        filled = tensor.new_zeros(max(rows), *tensor.shape[1:])
        filled[: tensor.shape[0]] = tensor
        gathered = [torch.empty_like(filled) for _ in rows]
        original(gathered, filled, group, False)
        for output, each, count in zip(tensor_list, gathered, rows):
            output.copy_(each[:count])
        return None

    return all_gather


def _reduce_scatter_list(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for `reduce_scatter` of a list of tensors: their sum everywhere, of which each rank keeps its own."""

    def reduce_scatter(
        output: Any, input_list: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({each.shape for each in input_list}) <= 1:
            return original(output, input_list, op, group, async_op)
        if async_op:
            raise NotImplementedError("reduce_scatter of unequal shapes on CPU ranks cannot return before it is done")
        total = torch.cat(list(input_list))
        dist.all_reduce(total, op, group)
        rows = [each.shape[0] for each in input_list]
        output.copy_(total.split(rows)[dist.get_rank(group)])
        return None

    return reduce_scatter


def _wrap_device_mesh() -> None:
    from torch.distributed import device_mesh

    original = device_mesh.init_device_mesh

    @functools.wraps(original)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return original(str(cpu_device(device_type)), *args, **kwargs)

    module: Any = device_mesh
    module.init_device_mesh = init_device_mesh
    package: Any = dist
    package.init_device_mesh = init_device_mesh
