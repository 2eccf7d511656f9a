"""`megatron_hdp profile`: the built model is measured, and the run ends, instead of training."""

import contextlib
from collections.abc import Callable, Iterator
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

from megatron_hdp.config import HdpConfig
from megatron_hdp.errors import SeamError
from megatron_hdp.profiler.agree import Everyone
from megatron_hdp.profiler.match import check_nodes, check_profile
from megatron_hdp.profiler.request import ProfileRequest, check_out
from megatron_hdp.profiler.run import run_profile
from megatron_hdp.seams.costs import cost_from_args, layer_of_args, local_processes
from megatron_hdp.seams.flags import kernel_from_args, log
from megatron_hdp.seams.profile_work import ModelWork, bare_model, hardware_of_args
from megatron_hdp.seams.spec import HdpCoreAttention
from megatron_hdp.seams.state import HdpRun

_LAYERS = 4
"""Measured of a model part with more, if they are alike: enough to push each other out of caches, and soon done."""

_request: list[ProfileRequest] = []
"""At most one: the launcher's wish, which the seam "pretrain" finds."""


class _MeasuredError(Exception):
    """Ends Megatron's pretrain() once everything is measured."""


def ask(request: ProfileRequest) -> None:
    """Have the next pretrain() measure instead of training."""
    _request[:] = [request]


def asked() -> ProfileRequest | None:
    """What `ask` was given, if anything."""
    return _request[-1] if _request else None


def require_own_profile(args: Any, config: HdpConfig) -> None:
    """A measured --hdp-profile must be of this machine and model; no process group need exist. Where it knows nodes of
    another size, a line says so.

    Raises:
        ConfigError: it is of others, and there is no --hdp-force-profile.
    """
    cost = cost_from_args(args, config)
    profile = cost.profile
    warnings = (
        check_profile(
            profile, hardware_of_args(args), layer_of_args(args), given=config.profile, force=config.force_profile
        ),
        check_nodes(profile, cost.layer_profile, local_processes(args.world_size)),
    )
    for warning in warnings:
        if warning is not None:
            log(args, warning)


def measure_instead(request: ProfileRequest, run: HdpRun, model_config: Any, pretrain: Callable[[], Any]) -> None:
    """Call ``pretrain`` up to the point where the model is built and wrapped: before optimizer, checkpoint and data.

    Raises:
        ConfigError: the profile cannot be written there, or the model cannot be measured.
        SeamError: ``pretrain`` built no model.
    """
    check_out(request.out)

    def measure(chunks: list[Any]) -> list[Any]:
        _measure(request, run, chunks)
        raise _MeasuredError

    model_config.post_wrap_hooks = [*model_config.post_wrap_hooks, measure]
    try:
        pretrain()
    except _MeasuredError:
        dist.barrier()  # nobody leaves while another one still needs the store of rank 0
        return
    raise SeamError("profile: pretrain() ended without building a model through GPTModelConfig; nothing was measured")


def _measure(request: ProfileRequest, run: HdpRun, chunks: list[Any]) -> None:
    """Measure on all ranks; rank 0 writes and prints."""
    args, models = run.args, [bare_model(chunk) for chunk in chunks]
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            if hasattr(chunk, "no_sync"):  # gradients are added up as in a step's first micro-batches, and not sent
                stack.enter_context(chunk.no_sync())
        stack.enter_context(_without_full_recompute(models))
        stack.enter_context(_few_layers(models))
        work = ModelWork(args, models, run.pool, kernel_from_args(args))
        run_profile(request, work, run.pool.comm, Everyone(work.device), date.today().isoformat())


@contextlib.contextmanager
def _without_full_recompute(models: list[Any]) -> Iterator[None]:
    """The cost model adds full recompute itself; selective recompute is a part of the model's backward."""
    configs = {id(model.config): model.config for model in models}.values()
    changed = [config for config in configs if config.recompute_granularity == "full"]
    for config in changed:
        config.recompute_granularity = None
    try:
        yield
    finally:
        for config in changed:
            config.recompute_granularity = "full"


@contextlib.contextmanager
def _few_layers(models: list[Any]) -> Iterator[None]:
    """Cut decoders whose layers are all alike to `_LAYERS` for a moment."""
    whole = [model.decoder.layers for model in models]
    if len({_kind(layer) for layers in whole for layer in layers}) == 1:
        for model, layers in zip(models, whole, strict=True):
            model.decoder.layers = torch.nn.ModuleList(list(layers)[:_LAYERS])
    try:
        yield
    finally:
        for model, layers in zip(models, whole, strict=True):
            model.decoder.layers = layers


def _kind(layer: Any) -> tuple[Any, ...]:
    """What makes layers take different times: their modules, the shapes of their parameters, their windows."""
    modules = tuple(type(module) for module in layer.modules())
    shapes = tuple(tuple(parameter.shape) for parameter in layer.parameters())
    return modules, shapes, tuple(m.window for m in layer.modules() if isinstance(m, HdpCoreAttention))
