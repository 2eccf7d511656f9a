"""`megatron-hdp plan --memory`: what memory a GPU needs, and whether the capacity fits. Imports the rest when asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_hdp.errors import ConfigError

if TYPE_CHECKING:
    from megatron_hdp.memory import MemoryEstimate, ModelShape, Parallel
    from megatron_hdp.plan_flags import PlanFlags
    from megatron_hdp.plan_step import PlanOptions
    from megatron_hdp.types import Plan

_GIB = 2**30
_NEEDED = ("hidden", "ffn", "vocab", "heads", "kv_heads")
_PARTS = ("weights", "gradients", "optimizer", "activations", "working", "attention", "logits", "reserve")


@dataclass(frozen=True, kw_only=True)
class MemoryFlags:
    """Flags of the memory estimate, a part of those of `megatron-hdp plan`."""

    memory: bool = False
    """Also say what memory a GPU needs, by part, and refuse a capacity that does not fit. See docs/memory.md. Needs
    --hidden, --ffn, --vocab, --heads and --kv-heads, the last two of one tensor-parallel rank."""
    hidden: int | None = None
    """Hidden size (--hidden-size)."""
    ffn: int | None = None
    """Width of the MLP (--ffn-hidden-size)."""
    vocab: int | None = None
    """Entries of the vocabulary."""
    head_dim: int | None = None
    """Size of a head. Default: the hidden size over all heads."""
    tp: int = 1
    """Tensor-parallel size."""
    sequence_parallel: bool = False
    """Norms and residuals are cut over the tensor-parallel ranks (--sequence-parallel)."""
    distributed_optimizer: bool = True
    """The optimizer's state is cut over the pool (--use-distributed-optimizer)."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of weights and activations."""
    tied: bool = False
    """Embedding and output layer are one tensor."""
    device_gib: float | None = None
    """Memory of a GPU. Default: the profile's."""
    reserve_gib: float = 4.0
    """What the estimate does not count: the CUDA context, NCCL, workspaces, fragmentation."""


def require_memory(flags: "PlanFlags", options: "PlanOptions") -> None:
    """Raise `ConfigError` where flags are missing, or the capacity needs more memory than a GPU has."""
    from megatron_hdp.measured_layer import choose
    from megatron_hdp.memory import estimate, largest_capacity, sized

    model, parallel = _shapes(flags, options)
    longest, measured = options.longest, choose(model, parallel, options.tokens_per_rank, options.cost).measured
    found = estimate(model, parallel, options.tokens_per_rank, longest=longest, cost=options.cost, measured=measured)
    device = _device_bytes(flags, options)
    if device is None or found.device <= device:
        return
    most = largest_capacity(
        model,
        parallel,
        device,
        longest=longest,
        cost=options.cost,
        measured=measured,
        pad_multiple=options.cost.pad_multiple,
    )
    remedy = f"the largest --tokens-per-rank that fits is {most:,}" if most else "no --tokens-per-rank fits"
    raise ConfigError(
        f"--tokens-per-rank is {options.tokens_per_rank:,}: a GPU of the {found.stage} stage would need "
        f"{sized(found.device)} ({_listed(found)}) and has {sized(device)}: {remedy}; or use more --tp or --stages, or "
        "--recompute full"
    )


def render_memory(flags: "PlanFlags", options: "PlanOptions", plans: "Sequence[Plan]") -> str:
    """Table of the parts, for the plan that needs most: pieces whose activations leave may be longer.

    Raises `ConfigError` if that does not fit the GPU.
    """
    from megatron_hdp.measured_layer import choose
    from megatron_hdp.memory import estimate, sized

    model, parallel = _shapes(flags, options)
    choice = choose(model, parallel, options.tokens_per_rank, options.cost)
    for_plans: list[Plan | None] = [*plans] or [None]
    found = [
        estimate(
            model,
            parallel,
            options.tokens_per_rank,
            longest=options.longest,
            cost=options.cost,
            plan=plan,
            measured=choice.measured,
        )
        for plan in for_plans
    ]
    most = max(found, key=lambda each: each.device)
    stage = "" if most.stage == "only" else f" of the {most.stage} stage"
    unit, of = ("GiB", _GIB) if most.device >= _GIB else ("MiB", 2**20)
    lines = [f"memory of a GPU{stage}, {unit}"]
    lines += [f"  {name:<14}{getattr(most, name) / of:>10.2f}" for name in _PARTS]
    device = _device_bytes(flags, options)
    if device is not None and most.device > device:
        raise ConfigError(
            f"with --offload pieces are longer than the capacity, and a GPU would need {sized(most.device)} "
            f"({_listed(most)}) of the {sized(device)} that it has: lower --tokens-per-rank or --host-gib"
        )
    limit = "" if device is None else f"  of {device / of:.2f}"
    lines.append(f"  {'peak':<14}{most.device / of:>10.2f}{limit}")
    if options.offload:
        lines.append(f"  {'host':<14}{max(each.host for each in found) / of:>10.2f}")
    lines += [f"The profile's activations are not used: {choice.note}."] if choice.note is not None else []
    counted = "measured by the profile" if choice.measured else "counted from the model's shape"
    return "\n".join([*lines, f"Activations: {counted}. working + attention and logits do not exist together."])


def _listed(found: "MemoryEstimate") -> str:
    from megatron_hdp.memory import sized

    return ", ".join(f"{name} {sized(getattr(found, name))}" for name in _PARTS)


def _device_bytes(flags: "PlanFlags", options: "PlanOptions") -> int | None:
    """Memory of a GPU; None if nobody says."""
    given = flags.estimate.device_gib
    if given is not None:
        if not 0 < given < 1 << 20:
            raise ConfigError(f"--device-gib is {given:g}: it must be positive, in GiB")
        return int(given * _GIB)
    memory = options.cost.profile.device_memory
    return None if memory is None else int(memory)


def _shapes(flags: "PlanFlags", options: "PlanOptions") -> "tuple[ModelShape, Parallel]":
    """Model and layout of the run. Raises `ConfigError`."""
    from megatron_hdp.memory import ModelShape, Parallel

    asked = flags.estimate
    given = {name: getattr(flags if name in ("heads", "kv_heads") else asked, name) for name in _NEEDED}
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(f"--memory without {', '.join(missing)}: the estimate counts the model's parts, give them")
    tp, heads, hidden = asked.tp, int(given["heads"]), int(given["hidden"])
    if min(tp, heads, hidden) < 1:
        raise ConfigError(f"--tp is {tp}, --heads {heads} and --hidden {hidden}: all must be at least 1")
    if asked.head_dim is None and hidden % (heads * tp):
        raise ConfigError(f"--hidden is {hidden}, which {heads} x {tp} heads do not divide: give --head-dim")
    if not 0 <= asked.reserve_gib < 1 << 20:
        raise ConfigError(f"--reserve-gib is {asked.reserve_gib:g}: it must be at least 0, in GiB")
    model = ModelShape(
        layers=flags.stage_layers * flags.stages,
        hidden=hidden,
        ffn=int(given["ffn"]),
        heads=heads * tp,
        kv_heads=int(given["kv_heads"]) * tp,
        head_dim=hidden // (heads * tp) if asked.head_dim is None else asked.head_dim,
        vocabulary=int(given["vocab"]),
        tied=asked.tied,
        element_bytes=2 if asked.dtype == "bf16" else 4,
    )
    parallel = Parallel(
        ranks=options.num_ranks,
        tensor_parallel=tp,
        sequence_parallel=asked.sequence_parallel,
        stages=options.stages,
        virtual_stages=options.virtual_stages,
        distributed_optimizer=asked.distributed_optimizer,
        recompute=options.cost.recompute,
        exchange=options.exchange,
        window=options.cost.window,
        reserve_bytes=int(asked.reserve_gib * _GIB),
    )
    return model, parallel
