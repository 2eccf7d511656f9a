"""Seams "flags" and "validate": the --hdp-* flag group, and what a run with --hdp changes or refuses.

Only plain numbers, strings and booleans are put on Megatron's args: they are pickled into checkpoints, which must
load where this package is not installed.
"""

import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megatron_hdp import cpu
from megatron_hdp.attention.kernels import BlockKernel, chosen_kernel
from megatron_hdp.batch_rule import BatchRule, first_rule, resumed_rule
from megatron_hdp.config import HdpConfig, flag, option_names, resolve
from megatron_hdp.errors import ConfigError, HdpError
from megatron_hdp.planner.columns import Layout
from megatron_hdp.planner.entry import MAX_BATCH_TOKENS
from megatron_hdp.seams.costs import (
    arena_bytes,
    cost_from_args,
    head_size_from_args,
    pad_multiple_from_args,
    stages_from_args,
)
from megatron_hdp.seams.data import check_data_flags
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.flag_group import add_group, mend_help
from megatron_hdp.seams.output import check_loss_chunk
from megatron_hdp.seams.refuse import (
    refuse_attention,
    refuse_conflicts,
    refuse_heads,
    refuse_numbers,
    refuse_offload,
)
from megatron_hdp.seams.resume import saved_run
from megatron_hdp.seams.timeline_setting import layout_from_args
from megatron_hdp.timeline_writer import check_folder


def wrap_add_arguments(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "flags": add our group after Megatron's own flags, whose help is made printable."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        mend_help(parser)
        return add_group(parser)

    return add_megatron_arguments


def wrap_validate_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "validate": prepare the args before Megatron's checks, complete them after."""

    @functools.wraps(original)
    def validate_args(args: Any, defaults: Any = {}) -> Any:  # noqa: B006 (Megatron's signature)
        if not getattr(args, "hdp", False):
            refuse_without_hdp()
            _drop_options(args)
            return original(args, defaults)
        config = resolve(_explicit_options(args), args.hdp_config)
        refuse_conflicts(args, defaults)
        refuse_numbers(args)
        refuse_attention(args)
        check_data_flags(args)
        check_loss_chunk(args, config)
        config = _prepare(args, config)
        result = _megatron_checks(original, args, defaults)
        _complete(args, config)
        return result

    return validate_args


def refuse_without_hdp() -> None:
    """Raise `ConfigError` where the launcher is to measure, or look at, a run that turns out to be without --hdp."""
    profile_asked, doctor_asked = _asked()
    if profile_asked:
        raise ConfigError("profile measures a run with --hdp: add --hdp and --hdp-tokens-per-rank")
    if doctor_asked:
        raise ConfigError("doctor looks at a run with --hdp: add --hdp and --hdp-tokens-per-rank")


def _asked() -> tuple[bool, bool]:
    """Is the launcher to measure the run, is it to look at it?"""
    from megatron_hdp.seams import doctor, profile  # both need this module

    return profile.asked() is not None, doctor.asked() is not None


def _megatron_checks(original: Callable[..., Any], args: Any, defaults: Any) -> Any:
    """Megatron's own checks: what they refuse is one line, as what we refuse is.

    `doctor` ends with code 2 then: the command line is wrong. Raises `ConfigError` otherwise.
    """
    try:
        return original(args, defaults)
    except HdpError:
        raise
    except (AssertionError, ValueError, ZeroDivisionError) as error:
        said = " ".join(str(error).split()) or traceback.extract_tb(error.__traceback__)[-1].line
        if not _asked()[1]:
            raise ConfigError(f"Megatron refuses these flags: {said}") from error
        print(f"megatron_hdp: Megatron refuses these flags: {said}", file=sys.stderr, flush=True)
        raise SystemExit(2) from error


def config_from_args(args: Any) -> HdpConfig:
    """The run's options, as stored on validated args."""
    return HdpConfig(**{name: getattr(args, f"hdp_{name}") for name in option_names()})


def kernel_from_args(args: Any) -> BlockKernel:
    """The attention kernel of --hdp-kernel on this rank's device.

    Raises `ConfigError`, with the kernels that can run, for one that is unknown or cannot.
    """
    return chosen_kernel(args.hdp_kernel, device_from_args(args), args.params_dtype, head_size_from_args(args))


def device_from_args(args: Any) -> torch.device:
    """Where this rank's model computes."""
    return torch.device("cpu") if cpu.is_enabled() else torch.device("cuda", args.local_rank)


def _explicit_options(args: Any) -> dict[str, Any]:
    """Options that were given on the command line."""
    return {name: getattr(args, f"hdp_{name}") for name in option_names() if hasattr(args, f"hdp_{name}")}


def _drop_options(args: Any) -> None:
    """Without --hdp the other --hdp-* flags do nothing, so that one flag turns a run into its own baseline."""
    ignored = _explicit_options(args)
    if getattr(args, "hdp_config", None) is not None:
        ignored["config"] = args.hdp_config
    if ignored:
        log(args, f"--hdp is off: {', '.join(flag(name) for name in ignored)} ignored")
    for name in ignored:
        delattr(args, f"hdp_{name}")


def _prepare(args: Any, config: HdpConfig) -> HdpConfig:
    """Everything that Megatron's own checks must already see; the options, completed from a checkpoint."""
    if args.context_parallel_size > 1:
        log(args, f"--context-parallel-size {args.context_parallel_size} is folded into the pool")
        args.context_parallel_size = 1
    if args.micro_batch_size not in (None, 1):
        log(args, f"--micro-batch-size {args.micro_batch_size} becomes 1: a micro-batch is filled up to its capacity")
    args.micro_batch_size = 1
    args.eval_micro_batch_size = 1
    args.calculate_per_token_loss = True
    args.dataloader_type = "external"
    args.create_attention_mask_in_dataloader = False
    pool_size = _pool_size(args)
    _check_balance(args, config)
    _check_capacity(args, config)
    rule = _batch_rule(args, config, pool_size)
    config = dataclasses.replace(config, batch_tokens=rule.batch_tokens)
    _check_budget(args, config)
    args.hdp_sequences_per_step = rule.sequences
    # Megatron counts in "samples per step" that must divide by the data-parallel size. Ours need not: round up
    # here, and let the learning-rate schedule count real ones (see wrap_param_scheduler).
    args.global_batch_size = -(-args.hdp_sequences_per_step // pool_size) * pool_size
    if args.eval_global_batch_size not in (None, args.hdp_sequences_per_step):
        raise ConfigError(
            "--eval-global-batch-size is not supported with --hdp: evaluation uses the training batch size"
        )
    args.eval_global_batch_size = args.global_batch_size
    return config


def _pool_size(args: Any) -> int:
    """Data-parallel columns once context parallelism is folded in."""
    columns = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    if args.world_size % columns:
        raise ConfigError(
            f"{args.world_size} processes cannot form columns of tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size} x pipeline-model-parallel-size {args.pipeline_model_parallel_size}"
        )
    return int(args.world_size // columns)


def _check_balance(args: Any, config: HdpConfig) -> None:
    if config.balance == "dp" and args.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"--hdp-balance dp with --pipeline-model-parallel-size {args.pipeline_model_parallel_size}: unequal counts "
            "would let rings wait on each other inside the pipeline schedule; use --hdp-balance pp or auto"
        )
    group = expert_group_from_args(args)  # refuses layouts that cannot be, whatever the balance
    if config.balance == "dp" and group > 1:
        raise ConfigError(
            f"--hdp-balance dp with experts spread over {group} pool ranks, which need equal numbers of micro-batches: "
            "use --hdp-balance pp or auto"
        )


def _check_capacity(args: Any, config: HdpConfig) -> None:
    capacity = config.tokens_per_rank
    assert capacity is not None  # resolve() requires it
    multiple = pad_multiple_from_args(args)
    if capacity % multiple:
        below = capacity // multiple * multiple
        why = "a piece is two chunks of equal size"
        if multiple > 2:
            why += f", and --sequence-parallel cuts its tokens over {args.tensor_model_parallel_size} ranks"
        raise ConfigError(
            f"--hdp-tokens-per-rank is {capacity}: it must be a multiple of {multiple}, because {why}; use "
            + " or ".join(str(value) for value in (below, below + multiple) if value)
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length


def _check_budget(args: Any, config: HdpConfig) -> None:
    if config.batch_tokens is not None and config.batch_tokens < args.seq_length:
        raise ConfigError(
            f"--hdp-batch-tokens {config.batch_tokens} is smaller than the context --seq-length {args.seq_length}: "
            "a step must be able to hold one whole sequence"
        )
    if config.batch_tokens is not None and config.batch_tokens + args.seq_length > MAX_BATCH_TOKENS:
        raise ConfigError(
            f"--hdp-batch-tokens {config.batch_tokens}: Megatron counts the tokens of a step in 32 bits, "
            f"so a step may hold at most {MAX_BATCH_TOKENS} tokens"
        )


def _batch_rule(args: Any, config: HdpConfig, pool_size: int) -> BatchRule:
    """What cuts the data into steps: as asked for, or as in the checkpoint that the run goes on from."""
    asked = (config.batch_tokens, args.global_batch_size)
    saved = saved_run(args)
    if saved is None:
        return first_rule(*asked, context=args.seq_length, pool_size=pool_size)
    where = f"--load {args.load}, iteration {saved.iteration}"
    for name in ("seq_length", "seed"):
        old, new = getattr(saved.args, name, None), getattr(args, name)
        if old != new:
            shown = f"--{name.replace('_', '-')}"
            log(args, f"WARNING: {where}, had {shown} {old}, this run has {new}: the data goes on in another order")
    if saved.rule is None:
        log(args, f"{where}, was made without --hdp: data goes on at step {saved.iteration} of this run's own order")
        return first_rule(*asked, context=args.seq_length, pool_size=pool_size)
    rule = resumed_rule(*asked, saved.rule, checkpoint=where)
    if asked == (None, None):
        log(args, f"{rule.flags}, as in the checkpoint")
    return rule


def _complete(args: Any, config: HdpConfig) -> None:
    """Store the resolved options, after Megatron's checks passed."""
    for name, value in dataclasses.asdict(config).items():
        setattr(args, f"hdp_{name}", value)
    layout = Layout(*stages_from_args(args), expert_group_from_args(args))
    args.hdp_balance = layout.balance(args.hdp_balance)
    cost = cost_from_args(args, config)  # refuses a profile that cannot be read, before anything is set up
    if config.exchange == "heads":
        refuse_heads(cost, _pool_size(args))
    if config.timeline is not None:
        check_folder(config.timeline, layout_from_args(args))
    if config.offload:
        refuse_offload(args)
        arena_bytes(config)  # refuses what neither flag nor profile says
    if config.kernel != "auto":  # asking for the fastest would start CUDA before Megatron chooses the device
        kernel_from_args(args)
    args.hdp_validated = True


def log(args: Any, message: str) -> None:
    """One line on rank 0."""
    if int(getattr(args, "rank", os.environ.get("RANK", 0))) == 0:
        print(f"megatron_hdp: {message}", flush=True)
