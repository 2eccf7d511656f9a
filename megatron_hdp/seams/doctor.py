"""The launcher's `doctor`: the script's run is looked at instead of started, section by section."""

import os
from typing import Any, NoReturn

import torch

from megatron_hdp import cpu
from megatron_hdp.doctor import Section, exit_code, render
from megatron_hdp.doctor_request import DoctorRequest
from megatron_hdp.errors import ConfigError
from megatron_hdp.memory import sized
from megatron_hdp.offload.host_memory import require_host_memory
from megatron_hdp.rank_layout import RankLayout
from megatron_hdp.seams.costs import arena_bytes, pad_multiple_from_args
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.flags import config_from_args
from megatron_hdp.seams.memory import RunMemory, host, memory_of_run, parts, peak, processes_of_node, refusal, warning

_request: list[DoctorRequest] = []
"""At most one: the launcher's wish, which the seam "pretrain" finds."""


def ask(request: DoctorRequest) -> None:
    """Have the next pretrain() answer ``request`` instead of training, as rank 0 of a run of that size.

    Raises `ConfigError` where Megatron's flags cannot be checked on this machine.
    """
    if not cpu.is_enabled() and not torch.cuda.is_available():
        raise ConfigError(
            "doctor: this machine has no GPU, which Megatron's checks of the flags ask: add --cpu, and --device-gib G "
            "to count for GPUs of G GiB"
        )
    ranks = request.gpus or int(os.environ.get("WORLD_SIZE", "1"))
    here = ranks if cpu.is_enabled() else torch.cuda.device_count()
    per_node = request.gpus_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", here))
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(min(ranks, per_node)),
        "WANDB_MODE": "disabled",  # a run of one rank would tell the service that it starts
    }
    _request[:] = [request]


def asked() -> DoctorRequest | None:
    """What `ask` was given, if anything."""
    return _request[-1] if _request else None


def answer(request: DoctorRequest, args: Any, model_config: Any) -> NoReturn:
    """Print all sections and end the process: with 0 if training could start, else with 1."""
    run, long = _run(args)
    memory, tight = _memory(request, args, model_config)
    sections = [run, Section("layout", tuple(_layout(args).rows())), memory]
    code = exit_code(sections)
    doubts = [doubt for doubt in (tight, long) if doubt is not None and code == 0]
    print(render(sections) + (", but " + ", and ".join(doubts) if doubts else ""), flush=True)
    raise SystemExit(code)


def _run(args: Any) -> tuple[Section, str | None]:
    """How large the run is; and for the verdict, what may stop it."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    pool = args.world_size // (tp * pp)
    rows = [
        ("ranks", f"{args.world_size:,} on {_nodes(args.world_size, _per_node())}"),
        ("column", f"{tp} tensor-parallel x {pp} pipeline stages"),
        ("pool", f"{pool:,} ranks x {args.hdp_tokens_per_rank:,} tokens"),
        ("context", f"{args.seq_length:,} tokens, {_ring(-(-args.seq_length // args.hdp_tokens_per_rank))}"),
    ]
    most = pool * args.hdp_tokens_per_rank
    if most >= args.seq_length:
        return Section("run", tuple(rows)), None
    rows.append(("warning", _too_long(args, pool)))
    doubt = f"stops if a document is longer than {most:,} tokens (pool x capacity)"
    return Section("run", tuple(rows)), doubt


def _too_long(args: Any, pool: int) -> str:
    """What a pool that cannot hold --seq-length means, and what to change. The data is not read, so it may be fine."""
    context, capacity = args.seq_length, args.hdp_tokens_per_rank
    pad, group = pad_multiple_from_args(args), expert_group_from_args(args)
    needed = -(-context // (pool * pad)) * pad
    ranks = -(-context // (capacity * group)) * group * (args.world_size // pool)
    return (
        f"the pool holds {pool:,} x {capacity:,} = {pool * capacity:,} tokens, and --seq-length is {context:,}: "
        "training stops at the start if a document is longer than the pool holds. Set --hdp-tokens-per-rank to "
        f"{needed:,}, use {ranks:,} ranks, or lower --seq-length to {pool * capacity:,}"
    )


def _nodes(ranks: int, per_node: int) -> str:
    """How many nodes, and that the last one has fewer ranks where it has."""
    nodes, last = -(-ranks // per_node), ranks % per_node
    return f"{nodes:,} node{'s' * (nodes != 1)} of {per_node}{f', the last of {last}' if last else ''}"


def _ring(size: int) -> str:
    return "on one rank" if size == 1 else f"a ring of {size:,} ranks"


def _layout(args: Any) -> RankLayout:
    """Who sits where."""
    columns = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    return RankLayout(
        tensor_parallel=args.tensor_model_parallel_size,
        stages=args.pipeline_model_parallel_size,
        pool=args.world_size // columns,
        expert_group=expert_group_from_args(args),
        per_node=_per_node(),
        stages_first=args.use_tp_pp_dp_mapping,
    )


def _memory(request: DoctorRequest, args: Any, model_config: Any) -> tuple[Section, str | None]:
    """What the rank that needs most needs, part by part; and for the verdict, that it may not have it."""
    given, config = request.device_gib, config_from_args(args)
    try:
        arena = arena_bytes(config) if config.offload else None
        found = memory_of_run(args, model_config, gpu_bytes=None if given is None else int(given * 2**30))
    except ConfigError as error:  # training is refused with the same words
        rows = [("estimate", "none, as host memory for activations is refused")]
        return Section("memory", tuple(rows), (str(error),)), None
    on_host = [] if arena is None else [("host", host(arena, processes_of_node(args)))]
    problems = [] if arena is None or given is not None else _host_problems(arena, processes_of_node(args))
    if isinstance(found, str):
        reason = ("estimate", found.removeprefix("no memory estimate: "))
        return Section("memory", (reason, *on_host), tuple(problems)), None
    rows = [*_device(found), *on_host, *(("note", note) for note in found.notes)]
    if given is not None and cpu.is_enabled():
        rows.append(("note", "flags that --cpu changes, listed above, are not those of the GPUs"))
    refused, doubtful = refusal(found), warning(found)
    if refused is not None:
        return Section("memory", tuple(rows), (refused, *problems)), None
    if doubtful is None:
        return Section("memory", tuple(rows), tuple(problems)), None
    rows.append(("warning", doubtful))
    return Section("memory", tuple(rows), tuple(problems)), "may run out of memory"


def _device(found: RunMemory) -> list[tuple[str, str]]:
    """Rows of what one device has to hold."""
    stage = "" if found.likely.stage == "only" else f" of the {found.likely.stage} stage, which needs most"
    rows = [("of each", found.device + stage), *((name, sized(number)) for name, number in parts(found))]
    rows.append(("peak", f"{peak(found)} (working + attention and logits do not exist together)"))
    return [*rows, ("", "the memory of this device is not known")] if found.device_bytes is None else rows


def _host_problems(arena: int, processes: int) -> list[str]:
    """As training asks when it takes its arenas; this machine stands for the run's nodes."""
    try:
        require_host_memory(arena, processes)
    except ConfigError as error:
        return [str(error)]
    return []


def _per_node() -> int:
    return int(os.environ["LOCAL_WORLD_SIZE"])
