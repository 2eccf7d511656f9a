"""Seams "pretrain", "data", "schedule", "log" and "scheduler": pass-through wrappers around Megatron's own loop.

Each wrapper looks at the run that `wrap_pretrain` opened; without one (no --hdp) it calls the original and does
nothing else.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import _build_default_pg_collection
from megatron.training import get_args

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.seams import doctor
from megatron_hdp.seams.flags import refuse_without_hdp
from megatron_hdp.seams.memory import check_memory
from megatron_hdp.seams.param_gather import start_param_gathers
from megatron_hdp.seams.profile import asked, measure_instead, require_own_profile
from megatron_hdp.seams.refuse import refuse_checked
from megatron_hdp.seams.state import HdpRun, active_run, open_run
from megatron_hdp.seams.step import forward_step


def wrap_pretrain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Seam "pretrain": our attention and forward step in, then Megatron's loop as it is."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        request, question = asked(), doctor.asked()
        if not getattr(get_args(), "hdp", False):
            refuse_without_hdp()
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        model_config = _model_config(bound.arguments["cfg_container"])
        if not getattr(get_args(), "hdp_validated", False):
            raise SeamError("--hdp was parsed but never checked: parse arguments with parse_and_validate_args()")
        refuse_checked(get_args(), model_config)
        if question is not None:
            doctor.answer(question, get_args(), model_config)
        if request is None:  # a profile takes neither optimizer nor the whole capacity
            check_memory(get_args(), model_config)
        if bound.arguments.get("p2p_communicator") is not None or bound.arguments.get("pg_collection") is not None:
            raise ConfigError(
                "--hdp passes messages between pipeline stages itself, in Megatron's own process groups: call "
                "pretrain() without p2p_communicator and pg_collection"
            )
        bound.arguments["forward_step_func"] = forward_step
        with open_run(get_args()) as run:
            run.prepare_model(model_config)
            if request is not None:
                return measure_instead(request, run, model_config, lambda: original(*bound.args, **bound.kwargs))
            require_own_profile(run.args, run.config)
            bound.arguments["forward_step_func"] = run.noted(forward_step)
            result = original(*bound.args, **bound.kwargs)
            run.assert_ran()
        return result

    return pretrain


def _model_config(given: Any) -> Any:
    """The GPTModelConfig in the first argument of pretrain(). Raises `ConfigError`, with what came, if it has none."""
    model_config = getattr(given, "model", None)
    if not hasattr(model_config, "transformer_layer_spec"):
        came = f"a {type(given).__name__}" + ("" if model_config is None else f" with a {type(model_config).__name__}")
        raise ConfigError(
            "--hdp builds the model from megatron.training's GPTModelConfig (hybrid models and model providers are not "
            f"supported), and pretrain() was given {came}: pass it pretrain_cfg_container_from_args(args, "
            "gpt_config_from_args(args))"
        )
    return model_config


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
    training = not kwargs.get("forward_only", False)
    if training and run.timeline is not None:
        run.timeline.ask()
    if isinstance(iterator, list):  # one per model chunk of an interleaved pipeline, all with the same step
        bundle = [next(each) for each in iterator][-1]
        micro_batches: Any = [iter(bundle.micro_batches) for _ in iterator]
    else:
        bundle = next(iterator)
        micro_batches = iter(bundle.micro_batches)
    model = kwargs["model"]
    parts = model if isinstance(model, list) else [model]
    if training:
        run.begin_step(bundle, parts)
        start_param_gathers(parts)
    kwargs.update(data_iterator=micro_batches, num_microbatches=len(bundle.micro_batches))
    communicator = run.communicator(parts[0])
    if communicator is None:
        result = schedule(**kwargs)
    else:  # Megatron takes groups and communicator together; the groups are those that it would take itself
        kwargs.update(p2p_communicator=communicator, pg_collection=_build_default_pg_collection())
        with communicator.step([each.tokens_1T.shape[1] for each in bundle.micro_batches], forward_only=not training):
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
