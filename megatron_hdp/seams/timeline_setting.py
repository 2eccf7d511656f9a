"""What --hdp-timeline writes down of a run, from Megatron's args."""

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from megatron_hdp.config import HdpConfig
from megatron_hdp.memory import ModelShape
from megatron_hdp.pool import Pool, Service, together
from megatron_hdp.profiler.machine import hardware
from megatron_hdp.seams.costs import cost_from_args, stages_from_args
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.model_shape import UNKNOWN, shape_from_args
from megatron_hdp.seams.timeline import TimelineRecorder
from megatron_hdp.timeline import lane_file
from megatron_hdp.timeline_setting import RunSetting
from megatron_hdp.timeline_writer import TimelineWriter


def layout_from_args(args: Any) -> dict[str, int]:
    """The fields of `RunSetting` that say which lanes there are; known before anything is set up."""
    stages, virtual_stages = stages_from_args(args)
    return {
        "pool": int(args.world_size // (args.tensor_model_parallel_size * stages)),
        "stages": stages,
        "virtual_stages": virtual_stages,
        "expert_group": expert_group_from_args(args),
        "tensor_parallel": args.tensor_model_parallel_size,
    }


def connect_timeline(
    recorder: TimelineRecorder, args: Any, config: HdpConfig, pool: Pool, device: torch.device, service: Service
) -> None:
    """Open the files of --hdp-timeline. Collective; raises `ConfigError` on every process if one cannot."""
    assert config.timeline is not None, "called with --hdp-timeline only"
    folder, is_first = config.timeline, dist.get_rank() == 0
    place = (pool.rank, mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    told = [time.time_ns()]
    dist.broadcast_object_list(told, src=0)
    setting = setting_from_args(args, config, device) if is_first else None
    writer = together(lambda: TimelineWriter(folder, lane_file(*place), told[0], setting))
    recorder.connect(writer, pool.comm, service.submit if is_first else None)


def setting_from_args(args: Any, config: HdpConfig, device: torch.device) -> RunSetting:
    """The run, once Megatron has completed its args."""
    cost = cost_from_args(args, config)
    return RunSetting(
        **layout_from_args(args),
        capacity=config.tokens_per_rank or 0,
        context=args.seq_length,
        algorithm=config.algorithm,
        device="cuda" if device.type == "cuda" else "cpu",
        hardware=hardware(device),
        profile=cost.profile,
        layer=cost.layer,
        layers_per_stage=cost.layers_per_stage,
        window=cost.window,
        recompute=cost.recompute,
        pad_multiple=cost.pad_multiple,
        heads=cost.heads,
        kv_heads=cost.kv_heads,
        model=model_from_args(args),
        experts=args.num_experts or 1,
        experts_per_token=args.moe_router_topk if args.num_experts else 1,
        overlap_grad_reduce=bool(args.overlap_grad_reduce),
        overlap_param_gather=bool(args.overlap_param_gather),
    )


def model_from_args(args: Any) -> ModelShape | None:
    """None for a model whose parameters and FLOPs the simulator cannot count."""
    if any(applies(args) for name, applies in UNKNOWN if name != "--num-experts"):
        return None
    shape = shape_from_args(args)
    if not args.num_experts:
        return shape
    if args.moe_layer_freq != 1:  # some layers have experts, some none
        return None
    return dataclasses.replace(shape, ffn=args.moe_ffn_hidden_size or shape.ffn)
