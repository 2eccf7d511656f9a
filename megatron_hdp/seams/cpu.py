"""The Megatron side of the CPU mode: flags that CPU ranks need, and the few places that need a GPU all the same.

Call `megatron_hdp.cpu.enable()` first. Nothing here changes numbers on purpose: fused kernels become the plain
functions that they fuse; a switched-off flag is reported by one line.
"""

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training import arguments, initialize, training

from megatron_hdp.seams import wheel

_MARK = "__megatron_hdp_cpu__"


def apply() -> None:
    """Put the Megatron side in place; a second call does nothing.

    Call it after `seams.install.install()` when both are used: install() insists on unwrapped functions.
    """
    if hasattr(training.set_jit_fusion_options, _MARK):
        return
    wheel.apply()
    arguments.validate_args = _validate_args(arguments.validate_args)
    for module in (initialize, training):
        module.set_jit_fusion_options = _set_jit_fusion_options
    WrappedTorchNorm.__new__ = _new_norm(WrappedTorchNorm.__new__)
    layers.reduce_from_tensor_model_parallel_region = _reduce(layers.reduce_from_tensor_model_parallel_region)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_about_cpu_rng)


@dataclass(frozen=True)
class Flag:
    """One of Megatron's parsed flags that CPU ranks cannot take as it is.

    Attributes:
        name: attribute on the parsed args.
        value: what CPU ranks get.
        why: completes the printed line.
        keep: values that are fine as they are, besides `value`.
    """

    name: str
    value: Any
    why: str
    keep: tuple[Any, ...] = ()


_NO_KERNEL = "the kernel exists for GPUs only, the plain torch path computes the same"
_NO_TE = "needs Transformer Engine on a GPU"
_NO_NCCL = "NCCL only"
_NO_GRAPH = "there are no CUDA graphs"

FLAGS = (
    Flag("distributed_backend", "gloo", "NCCL needs GPUs", keep=("fake",)),
    Flag("use_cpu_initialization", True, "weights are initialised alike for every tensor-parallel size"),
    Flag("transformer_impl", "local", "Transformer Engine needs a GPU"),
    Flag("gradient_accumulation_fusion", False, _NO_KERNEL),
    Flag("no_persist_layer_norm", True, _NO_KERNEL),
    Flag("masked_softmax_fusion", False, _NO_KERNEL),
    Flag("bias_gelu_fusion", False, _NO_KERNEL),
    Flag("bias_swiglu_fusion", False, _NO_KERNEL),
    Flag("bias_dropout_fusion", False, _NO_KERNEL),
    Flag("apply_rope_fusion", False, _NO_KERNEL),
    Flag("fused_residual_rmsnorm", False, _NO_KERNEL),
    Flag("use_fused_weighted_squared_relu", False, _NO_KERNEL),
    Flag("mla_down_proj_fusion", False, _NO_KERNEL),
    Flag("moe_grouped_gemm", False, "experts run one after the other, with the same result"),
    Flag("use_grouped_gemm_for_dense_mlp", False, _NO_KERNEL),
    Flag("use_grouped_gemm_for_shared_expert", False, _NO_KERNEL),
    Flag("moe_permute_fusion", False, _NO_KERNEL),
    Flag("moe_router_fusion", False, _NO_KERNEL),
    Flag("moe_permute_fusion_into_hybridep", False, _NO_KERNEL),
    Flag("moe_enable_deepep", False, "DeepEP needs GPUs"),
    Flag("use_te_activation_func", False, _NO_TE),
    Flag("use_transformer_engine_op_fuser", False, _NO_TE),
    Flag("te_rng_tracker", False, _NO_TE),
    Flag("use_kitchen_attention", False, _NO_KERNEL),
    Flag("use_flash_attn", False, _NO_KERNEL),
    Flag("tp_comm_overlap", False, _NO_TE),
    Flag("delay_wgrad_compute", False, _NO_TE),
    Flag("fine_grained_activation_offloading", False, "there is no device memory to save"),
    Flag("cpu_offloading_num_layers", 0, "there is no device memory to save"),
    Flag("optimizer_cpu_offload", False, "there is no device memory to save"),
    Flag("use_precision_aware_optimizer", False, _NO_TE),
    Flag("fp8", None, "CPUs have no FP8: the run computes in the precision of the other flags"),
    Flag("fp8_param_gather", False, "CPUs have no FP8"),
    Flag("fp4", None, "CPUs have no FP4: the run computes in the precision of the other flags"),
    Flag("fp4_param_gather", False, "CPUs have no FP4"),
    Flag("reuse_grad_buf_for_mxfp8_param_ag", False, "CPUs have no FP8"),
    Flag("moe_router_padding_for_fp8", False, "CPUs have no FP8"),
    Flag("qk_clip", False, _NO_TE),
    Flag("log_max_attention_logit", False, _NO_TE),
    Flag("cuda_graph_impl", "none", _NO_GRAPH),
    Flag("enable_cuda_graph", False, _NO_GRAPH),
    Flag("external_cuda_graph", False, _NO_GRAPH),
    Flag("cuda_graph_modules", [], _NO_GRAPH),
    Flag("cuda_graph_scope_deprecated", None, _NO_GRAPH),
    Flag("optimizer_cuda_graph", False, _NO_GRAPH),
    Flag("deterministic_mode", False, "CPU kernels are deterministic; the checks are for NCCL and cuBLAS"),
    Flag("batch_invariant_mode", False, _NO_KERNEL),
    Flag("nccl_ub", False, _NO_NCCL),
    Flag("use_sharp", False, _NO_NCCL),
    Flag("nccl_communicator_config_path", None, _NO_NCCL),
    Flag("symmetric_ar_type", None, _NO_NCCL),
    Flag("pipeline_model_parallel_comm_backend", None, _NO_NCCL),
    Flag("record_memory_history", False, "there is no device memory to watch"),
    Flag("log_energy", False, "reads GPU power meters"),
    Flag("log_straggler", False, "reads GPU clocks"),
    Flag("gpu_sniff_test_interval", None, "tests GPUs"),
)
"""Flags that Megatron's later versions drop, or earlier ones lack, are skipped."""

# recomputing these frees their outputs in place, with helpers of Transformer Engine and a compiler
_DISCARDED_OUTPUTS = ("layernorm", "moe_act", "mla_up_proj", "gdn_norm_out")
_FP32_STATES = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


def adjust_args(args: Any) -> list[str]:
    """Change parsed flags, before Megatron's validate_args, to what CPU ranks can run.

    Returns:
        One line for people per change.
    """
    flags = list(FLAGS)
    if getattr(args, "moe_token_dispatcher_type", None) == "flex":
        flags.append(Flag("moe_token_dispatcher_type", "alltoall", "DeepEP and HybridEP need GPUs"))
    if getattr(args, "use_precision_aware_optimizer", False):
        flags += [Flag(name, _fp32_like(args, name), _NO_TE) for name in _FP32_STATES]
    modules = getattr(args, "recompute_modules", None)
    if modules:
        flags.append(Flag("recompute_modules", [name for name in modules if name not in _DISCARDED_OUTPUTS], _NO_TE))
    return [line for flag in flags if (line := _set(args, flag)) is not None]


def _fp32_like(args: Any, name: str) -> Any:
    """fp32 in the type that the flag has: its name before Megatron's checks, the dtype after."""
    return torch.float32 if isinstance(getattr(args, name, None), torch.dtype) else "fp32"


def _set(args: Any, flag: Flag) -> str | None:
    """Set one flag; the line to print, or None when nothing changed."""
    if not hasattr(args, flag.name):
        return None
    before = getattr(args, flag.name)
    if before == flag.value or before in flag.keep:
        return None
    setattr(args, flag.name, list(flag.value) if isinstance(flag.value, list) else flag.value)
    return f"{flag.name} {before} becomes {flag.value}: {flag.why}"


def _validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        lines = adjust_args(args)
        if lines and int(os.environ.get("RANK", "0")) == 0:
            print("\n  ".join(["megatron_hdp --cpu changes these flags:", *lines]), flush=True)
        return original(args, *rest, **kwargs)

    return validate_args


def _set_jit_fusion_options(*args: Any, **kwargs: Any) -> None:
    """Nothing is fused, so there is nothing to warm up."""


setattr(_set_jit_fusion_options, _MARK, True)


def _new_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    """`WrappedTorchNorm` for sequence parallelism too.

    Each rank then normalises its part of the sequence, so weight gradients are partial sums. Megatron adds them up over
    the tensor-parallel ranks for parameters that carry the mark `sequence_parallel`.
    """

    @functools.wraps(original)
    def new(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = True
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    """Without tensor parallelism the sum over ranks is its input. Megatron's autograd function returns a view of it,
    which local experts with a bias may not change in place, as they do.
    """

    @functools.wraps(original)
    def reduce(input_: torch.Tensor, group: Any = None) -> Any:
        return input_ if group is not None and group.size() == 1 else original(input_, group=group)

    return reduce


def _not_about_cpu_rng(record: logging.LogRecord) -> bool:
    """The tracker warns that the CPU's random state moved inside a GPU context: here the two are one generator."""
    return "CPU RNG state changed" not in record.getMessage()
