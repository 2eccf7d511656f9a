"""Seams "pretrain", "data", "schedule", "log" and "scheduler": pass-through wrappers around Megatron's own loop.

Each wrapper looks at the run that `wrap_pretrain` opened; without one (no --hdp) it calls the original and does
nothing else.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.training import get_args

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.seams.state import HdpRun, active_run, open_run
from megatron_hdp.seams.step import forward_step


def wrap_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "pretrain": our attention and forward step in, then Megatron's loop as it is."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        if not getattr(get_args(), "hdp", False):
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        model_config = getattr(bound.arguments["cfg_container"], "model", None)
        if not hasattr(model_config, "transformer_layer_spec"):
            raise ConfigError(
                "--hdp builds the model from megatron.training's GPTModelConfig: pass "
                "pretrain_cfg_container_from_args(args, gpt_config_from_args(args)) to pretrain(), "
                "not a model_provider"
            )
        if not getattr(get_args(), "hdp_validated", False):
            raise SeamError("--hdp was parsed but never checked: parse arguments with parse_and_validate_args()")
        bound.arguments["forward_step_func"] = forward_step
        with open_run(get_args()) as run:
            run.prepare_model(model_config)
            result = original(*bound.args, **bound.kwargs)
            run.assert_ran()
        return result

    return pretrain


def wrap_data_iterators(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "data": iterators that yield one whole step."""

    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        run = active_run()
        return original(provider) if run is None else run.data_iterators()

    return build_train_valid_test_data_iterators


def wrap_schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "schedule": Megatron's schedule, with this rank's own number of micro-batches."""

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule: Callable[..., Any] = original(*args, **kwargs)
        run = active_run()
        return schedule if run is None else functools.partial(_run_schedule, run, schedule)

    return get_forward_backward_func


def _run_schedule(run: HdpRun, schedule: Callable[..., Any], **kwargs: Any) -> Any:
    """Draw one step from the iterator and run all of it through ``schedule``."""
    iterator = kwargs["data_iterator"]
    if isinstance(iterator, list):  # one per model chunk of an interleaved pipeline, all with the same step
        bundle = [next(each) for each in iterator][-1]
        micro_batches: Any = [iter(bundle.micro_batches) for _ in iterator]
    else:
        bundle = next(iterator)
        micro_batches = iter(bundle.micro_batches)
    training = not kwargs.get("forward_only", False)
    if training:
        run.begin_step(bundle)
    kwargs.update(data_iterator=micro_batches, num_microbatches=len(bundle.micro_batches))
    result = schedule(**kwargs)
    if training:
        run.end_step()
    return result


def wrap_training_log(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "log": add hdp/* to the log line and TensorBoard, write --hdp-log, and insist that HDP ran."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        run = active_run()
        if run is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        run.assert_ran()
        if values["loss_dict"]:  # filled on the last pipeline stage, which logs
            run.log_step(values["iteration"], values["loss_dict"], values["grad_norm"], values["learning_rate"])
            device = next(iter(values["loss_dict"].values())).device
            extra = {k: torch.tensor(v, dtype=torch.float, device=device) for k, v in run.scalars().items()}
            values["loss_dict"] = {**values["loss_dict"], **extra}
        return original(*bound.args, **bound.kwargs)

    return training_log


def wrap_param_scheduler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "scheduler": learning rate and checkpoints count real sequences per step, whatever the pool size.

    Megatron's loop steps the schedule by its rounded-up batch size; the schedule sees the true one, so that a
    checkpoint resumes on another pool, and in stock Megatron with the same --global-batch-size, on the same curve.
    """

    @functools.wraps(original)
    def get_optimizer_param_scheduler(optimizer: Any) -> Any:
        args = get_args()
        rounded = args.global_batch_size
        if active_run() is None or args.hdp_sequences_per_step == rounded:
            return original(optimizer)
        real = args.hdp_sequences_per_step
        args.global_batch_size = real
        try:
            scheduler = original(optimizer)
        finally:
            args.global_batch_size = rounded
        _count_real_sequences(scheduler, rounded, real)
        return scheduler

    return get_optimizer_param_scheduler


def _count_real_sequences(scheduler: Any, rounded: int, real: int) -> None:
    """Make ``scheduler.step(rounded)`` advance by ``real``; loading a checkpoint keeps its own count."""
    step, load = scheduler.step, scheduler.load_state_dict

    def step_real(increment: int) -> None:
        step(increment // rounded * real)

    def load_state_dict(state: Any) -> None:
        scheduler.step = step  # the saved count is in real sequences already
        try:
            load(state)
        finally:
            scheduler.step = step_real

    scheduler.step, scheduler.load_state_dict = step_real, load_state_dict
