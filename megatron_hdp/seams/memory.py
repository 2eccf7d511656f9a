"""Memory estimate of a run, from Megatron's args: said when training starts, which ends there if it cannot fit."""

import os
from dataclasses import dataclass, replace
from typing import Any

from megatron_hdp import cpu
from megatron_hdp.errors import ConfigError
from megatron_hdp.measured_layer import choose
from megatron_hdp.memory import MemoryEstimate, estimate, largest_capacity, sized
from megatron_hdp.profiler.machine import device_memory
from megatron_hdp.seams.costs import arena_bytes, cost_from_args, layer_of_args, pad_multiple_from_args
from megatron_hdp.seams.flags import config_from_args, device_from_args, log
from megatron_hdp.seams.model_shape import (
    parallel_from_args,
    possible_exchanges,
    shape_from_args,
    unknown,
    upper_bounds,
)

PARTS = ("weights", "gradients", "optimizer", "activations", "working", "attention", "logits", "reserve")


@dataclass(frozen=True)
class RunMemory:
    """What one device of a run needs, and what it has."""

    likely: MemoryEstimate
    """With the reserve, the exchange that needs most, and pieces as long as offloading can make them."""
    least: int
    """Bytes without all that may not come: more is surely needed, if a micro-batch is ever full."""
    device: str
    """What it is called: GPU or CPU rank."""
    device_bytes: int | None
    """Memory of one; None if not known."""
    capacity: int
    largest: int
    """The largest capacity for which ``likely`` fits; 0 if none does, or the device is not known."""
    needed: int
    """Capacity that the pool needs for the longest sequence."""
    arena: int
    """Bytes of host memory that each process takes for activations."""
    processes: int
    """Of each node."""
    beside: int
    """Bytes of ``arena`` that the device itself has to hold, besides ``likely``; in ``least``. All of it on CPU ranks,
    whose memory is the host's."""
    notes: tuple[str, ...]

    @property
    def most(self) -> int:
        """Bytes that the device may have to hold."""
        return self.likely.device + self.beside


def check_memory(args: Any, model_config: Any) -> None:
    """Log what the run needs on rank 0. Before any process group is made; nodes are taken to be alike.

    Raises:
        ConfigError: on every rank, if that is more than the device has, whatever the assumptions.
    """
    found = memory_of_run(args, model_config)
    if isinstance(found, str):
        log(args, found)
        return
    for line in (summary(found), *found.notes):
        log(args, line)
    refused = refusal(found)
    if refused is not None:
        raise ConfigError(refused)
    doubtful = warning(found)
    if doubtful is not None:
        log(args, f"WARNING: {doubtful}")


def memory_of_run(args: Any, model_config: Any = None, *, gpu_bytes: int | None = None) -> RunMemory | str:
    """The estimate for validated args, or one line that says why there is none.

    Args:
        args: Megatron's, checked with --hdp.
        model_config: what pretrain() builds the model from, compared with the args.
        gpu_bytes: count for GPUs of that memory, whatever this process runs on.

    Raises:
        ConfigError: --hdp-offload without host memory that it could use.
    """
    config = config_from_args(args)
    cost = cost_from_args(args, config)
    reason = unknown(args, model_config)
    if reason is not None:
        return f"no memory estimate: {reason}"
    on_gpu = gpu_bytes is not None or not cpu.is_enabled()
    model, parallel = shape_from_args(args), parallel_from_args(args, config, on_gpu=on_gpu)
    arena = arena_bytes(config) if config.offload else 0
    beside, processes = 0 if on_gpu else arena, processes_of_node(args)
    device = gpu_bytes if gpu_bytes is not None else _device_bytes(args, processes)
    exchanges = possible_exchanges(args, config, cost)
    layouts = [replace(parallel, exchange=exchange) for exchange in exchanges]
    capacity, pad = int(config.tokens_per_rank or 0), pad_multiple_from_args(args)
    own = (cost.layer or cost.profile.default_layer) == layer_of_args(args)
    choice = choose(model, parallel, capacity, cost) if own else None
    measured = choice is not None and choice.measured
    known: dict[str, Any] = {"longest": args.seq_length, "cost": cost, "measured": measured}
    likely = max((estimate(model, one, capacity, arena=arena, **known) for one in layouts), key=_device_of)
    ways = [(one, known | {"measured": way}) for one in layouts for way in {measured, False}]
    surely = min((estimate(model, one, capacity, **way) for one, way in ways), key=_device_of)
    bounds = upper_bounds(args, on_gpu)
    state = surely.weights + surely.gradients + surely.optimizer
    notes = [f"activations of a layer: {'measured by the profile' if measured else 'counted from the flags'}"]
    notes += [choice.note] if choice is not None and choice.note is not None else []
    notes += [f"the estimate is an upper bound: {bound}" for bound in bounds]
    if len(exchanges) > 1:
        notes.append(f"attention: of {', '.join(exchanges)}, which --hdp-exchange auto may choose, the one with most")
    return RunMemory(
        likely=likely,
        least=beside + (state if bounds else surely.device - surely.reserve),
        device="GPU" if on_gpu else "CPU rank",
        device_bytes=device,
        capacity=capacity,
        largest=0
        if device is None
        else min(
            largest_capacity(model, one, device - beside, arena=arena, pad_multiple=pad, **known) for one in layouts
        ),
        needed=-(-args.seq_length // (parallel.ranks * pad)) * pad,
        arena=arena,
        processes=processes,
        beside=beside,
        notes=tuple(notes),
    )


def summary(found: RunMemory) -> str:
    """One line: the parts, their peak and what the device has; host memory."""
    listed = ", ".join(f"{name} {sized(number)}" for name, number in parts(found))
    taken = f"; host memory for activations {host(found.arena, found.processes)}" if found.arena else ""
    return f"memory of each {found.device}{_stage(found)}: {listed}; peak {peak(found)}{taken}"


def parts(found: RunMemory) -> list[tuple[str, int]]:
    """Names and bytes of what a device may have to hold."""
    own = [(name, int(getattr(found.likely, name))) for name in PARTS]
    return [*own, ("arena", found.beside)] if found.beside else own


def peak(found: RunMemory) -> str:
    """The sum, and what there is."""
    limit = "" if found.device_bytes is None else f" of {sized(found.device_bytes)}"
    return f"{sized(found.most)}{limit}"


def refusal(found: RunMemory) -> str | None:
    """Why the run cannot fit; None if it can, or the device is not known."""
    if found.device_bytes is None or found.least <= found.device_bytes:
        return None
    listed = ", ".join(f"{name} {sized(number)}" for name, number in parts(found) if name != "reserve")
    return (
        f"--hdp-tokens-per-rank is {found.capacity:,}: each {found.device}{_stage(found)} would need at least "
        f"{sized(found.least)} ({listed}) and has {sized(found.device_bytes)}: {_remedy(found)}"
    )


def warning(found: RunMemory) -> str | None:
    """Why the run may not fit; None if it should."""
    if found.device_bytes is None or found.most <= found.device_bytes:
        return None
    return (
        f"the memory of a {found.device} may not be enough: {peak(found)}, of which {sized(found.least)} is sure: "
        f"{_remedy(found)}"
    )


def host(arena: int, processes: int) -> str:
    """Host memory for activations: ``arena`` bytes of each of ``processes`` on a node."""
    return f"{sized(arena)} a process, {sized(arena * processes)} a node"


def processes_of_node(args: Any) -> int:
    """Processes that torchrun started, or will start, on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))


def _stage(found: RunMemory) -> str:
    return "" if found.likely.stage == "only" else f" of the {found.likely.stage} stage, which needs most"


def _remedy(found: RunMemory) -> str:
    most = f"the largest --hdp-tokens-per-rank that fits is {found.largest:,}"
    if not found.largest:
        most = "no --hdp-tokens-per-rank fits"
    elif found.largest < found.needed:
        most += f", too few for --seq-length, which needs {found.needed:,} on this pool"
    if found.beside:
        most += "; or lower --hdp-offload-gib, which takes the same memory"
    return (
        f"{most}; or use more --tensor-model-parallel-size or --pipeline-model-parallel-size, --recompute-granularity "
        "full, or --use-distributed-optimizer"
    )


def _device_bytes(args: Any, processes: int) -> int | None:
    """Memory of this rank's device; None where it cannot be seen."""
    try:
        return int(device_memory(device_from_args(args), processes))
    except (AssertionError, RuntimeError, ValueError, OSError):  # no such GPU, or no number from the system
        return None


def _device_of(found: MemoryEstimate) -> int:
    return found.device
