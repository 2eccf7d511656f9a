"""What memory one GPU of a rank will need, by part, before a run is started. Formulas and sources: docs/memory.md.

No torch, no Megatron: counts of a dense GPT or LLaMA-like model and of a plan.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError
from megatron_hdp.planner.host import host_peaks, most_in_flight
from megatron_hdp.types import Plan

GIB = 2**30
CHUNK_BYTES = 256 * 2**20
"""fp32 logits that exist at a time by default, as in `megatron_hdp.loss`."""
RESERVE_BYTES = 4 * GIB
"""What no formula here counts: the CUDA context, NCCL's buffers, workspaces of kernels, and what the allocator holds
back in pieces that are too small. An assumption; say what yours takes."""
_VOCABULARY_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense GPT; by default LLaMA-like, with RMSNorm, rotary positions and no biases."""

    layers: int
    hidden: int
    ffn: int
    """Width of the MLP, of one of its two input products if it is gated."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    tied: bool = False
    """Embedding and output layer are one tensor."""
    element_bytes: int = 2
    """Of weights and activations: 2 for bf16, 4 for fp32."""
    layer_norm: bool = False
    """Norms have a shift besides their scale, and keep the mean."""
    bias: bool = False
    """All linear layers have one, but for the output layer."""
    qkv_bias: bool = False
    """The projection to q, k and v has one, whatever the others have."""
    qk_norm: bool = False
    """Each head's q and k pass a norm; what it keeps for backward is counted for RMSNorm."""
    positions: int = 0
    """Rows of a table of learned positions."""
    vocabulary_multiple: int = _VOCABULARY_MULTIPLE
    """Megatron pads the vocabulary to a multiple of this times the tensor-parallel size."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the model is spread, and what is kept of its activations."""

    ranks: int
    """Of the pool."""
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    stages: int = 1
    virtual_stages: int = 1
    distributed_optimizer: bool = True
    """Every rank of the pool keeps its part of the optimizer's state."""
    gradient_bytes: int = 4
    """Of a parameter: Megatron sums gradients in fp32, unless told not to."""
    optimizer_bytes: int | None = None
    """State of a parameter. None: Adam with fp32 moments, and a fp32 copy of weights that are not fp32."""
    recompute: Literal["none", "full"] = "none"
    recompute_attention: bool = False
    """Core attention runs again in backward (selective recompute): its saved v is a view that keeps q and k alive as
    they were before their positions."""
    recompute_layers: int | None = None
    """With full recompute: so many layers of each model part run again, the others keep theirs. None: all run again."""
    recompute_group: int = 1
    """With full recompute: one input is kept for so many layers."""
    fused_kernels: bool = True
    """Norms, gated activations and rotary positions keep their inputs only, as Transformer Engine's and Megatron's
    fused ones; torch's on CPU keep more."""
    exchange: str = "ring"
    """How rings share attention: ring, gather or heads."""
    window: int | None = None
    loss_chunk: int | None = None
    """Tokens whose logits exist at a time; None: as many as fit `CHUNK_BYTES`; 0: all of a micro-batch."""
    reserve_bytes: int = RESERVE_BYTES


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one GPU, by part."""

    stage: str
    """Which pipeline stage: the one that needs most."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """What micro-batches in flight keep for backward."""
    working: int
    """The layer that runs backward: gradients inside it, with full recompute its activations, with offload what one
    layer's copies hold."""
    attention: int
    """Slices, stores and gradients of rings while a piece is computed."""
    logits: int
    """Output layer and loss, while nothing of `working` and `attention` exists."""
    reserve: int
    host: int
    """Activations in host memory; not part of `device`. The arena's size where there is no plan."""

    @property
    def device(self) -> int:
        """Peak of all parts together."""
        passing = max(self.working + self.attention, self.logits)
        return self.weights + self.gradients + self.optimizer + self.activations + passing + self.reserve


def estimate(
    model: ModelShape,
    parallel: Parallel,
    capacity: int,
    *,
    longest: int | None = None,
    cost: CostModel | None = None,
    plan: Plan | None = None,
    measured: bool = False,
    arena: int = 0,
) -> MemoryEstimate:
    """Peak memory of the GPU that needs most.

    Args:
        model: what is trained.
        parallel: how.
        capacity: tokens that one rank holds in one micro-batch.
        longest: tokens of the longest sequence, which bounds what gather fetches; the pool's most when None.
        cost: of one pipeline stage, for host memory and ``measured``.
        plan: for what it offloads: its largest piece, and with ``cost`` its host memory. None: nothing leaves.
        measured: what a layer keeps for backward is that of the profile of ``cost`` (`measured_layer.choose` says if
            it is of this model), else it is counted.
        arena: without a plan, host memory that activations may leave for: pieces are then taken to be as long as that
            and ``longest`` let them be, which is the most that any plan needs.

    Raises:
        ConfigError: a shape that cannot be.
    """
    _check(model, parallel, capacity)
    most = capacity * parallel.ranks
    asked = _Asked(
        model, parallel, capacity, most if longest is None else min(longest, most), cost, plan, measured, arena
    )
    stages = ["only"] if parallel.stages == 1 else ["first", "last"]
    return max((_stage(asked, stage) for stage in stages), key=_device)


def largest_capacity(
    model: ModelShape,
    parallel: Parallel,
    device_bytes: int,
    *,
    longest: int | None = None,
    cost: CostModel | None = None,
    measured: bool = False,
    arena: int = 0,
    pad_multiple: int = 2,
) -> int:
    """Largest capacity, a multiple of ``pad_multiple``, whose `estimate` fits the device; 0 if none does."""
    low, high = 0, (1 << 31) // pad_multiple
    while low < high:
        middle = (low + high + 1) // 2
        asked = middle * pad_multiple
        found = estimate(model, parallel, asked, longest=longest, cost=cost, measured=measured, arena=arena)
        low, high = (middle, high) if found.device <= device_bytes else (low, middle - 1)
    return low * pad_multiple


def layer_bytes_per_token(model: ModelShape, parallel: Parallel) -> int:
    """What one layer keeps of a token for backward, without recompute, on one GPU; see docs/memory.md."""
    tp, e = parallel.tensor_parallel, model.element_bytes
    split = tp if parallel.sequence_parallel else 1
    heads, kv = _heads(model, tp)
    # a norm's input and output; unfused its input in fp32, that times its scale, and the output. And the scale
    norm = model.hidden * (2 * e if parallel.fused_kernels else 8 + e) // split + 4
    # q and k with positions, v with memory of its own; output; log-sum-exp. Unfused, cosine and sine of both q and k
    positions = 0 if parallel.fused_kernels or model.positions else 4 * model.head_dim * e
    attention = (2 * heads + 2 * kv) * model.head_dim * e + 4 * heads + positions
    if model.qk_norm:  # what their norms are given, or as above that in fp32 and times its scale; and the scale
        attention += (heads + kv) * (model.head_dim * (e if parallel.fused_kernels else 8) + 4)
    # of two products the gate, the other, and what they make; unfused also the gate's activation, and the other again
    widths = (3 if parallel.fused_kernels else 5) if model.gated else 2
    return 2 * norm + attention + widths * model.ffn * e // tp


def parameters(model: ModelShape, parallel: Parallel, stage: str) -> int:
    """Parameters of one GPU of a stage: only, first or last; layers are spread evenly, rounded up.

    Weights of key/value heads are cut over all GPUs, also where there are fewer heads than GPUs.
    """
    tp, h, d = parallel.tensor_parallel, model.hidden, model.head_dim
    products = 2 if model.gated else 1
    norm = 2 * h if model.layer_norm else h
    qkv = (model.heads + 2 * model.kv_heads) * d // tp
    layer = h * (qkv + model.heads * d // tp + (products + 1) * model.ffn // tp) + 2 * norm
    if model.bias:
        layer += products * model.ffn // tp + 2 * h
    if model.bias or model.qkv_bias:
        layer += qkv
    if model.qk_norm:
        layer += 2 * norm // h * d
    total = -(-model.layers // parallel.stages) * layer
    table = h * _vocabulary(model, tp)
    if stage != "last":
        total += table + h * model.positions
    if stage != "first":
        total += norm + (0 if model.tied and stage == "only" else table)
    return total


@dataclass(frozen=True)
class _Asked:
    """Arguments of `estimate`; ``longest`` is at most what the pool holds."""

    model: ModelShape
    parallel: Parallel
    capacity: int
    longest: int
    cost: CostModel | None
    plan: Plan | None
    measured: bool
    arena: int


def _stage(asked: _Asked, stage: str) -> MemoryEstimate:
    model, parallel, capacity, plan = asked.model, asked.parallel, asked.capacity, asked.plan
    number, e = parameters(model, parallel, stage), model.element_bytes
    layers = -(-model.layers // parallel.stages)
    layer, constant = counted_layer(model, parallel), 0
    if asked.measured and asked.cost is not None:
        profile = asked.cost.layer_profile
        layer, constant = math.ceil(profile.activation_per_token), math.ceil(profile.activation_constant)
    kept, most_of_layer, again = _kept(parallel, layers, layer, _checkpoint(model, parallel))
    fixed, of_one, again_fixed = _kept(parallel, layers, constant, 0)  # bytes of a micro-batch, whatever its tokens
    flight = most_in_flight(parallel.stages, parallel.virtual_stages) if stage != "last" else _last(parallel)
    piece, leaves = _largest_piece(asked, kept)
    of_layer = min(1.0, leaves * layers / max(layers - 2, 1))  # two of the layers keep theirs
    working = capacity * again + again_fixed + piece * _gradient_row(model, parallel)
    working += math.ceil((piece * most_of_layer + of_one) * of_layer)
    optimizer = number * _optimizer_bytes(model, parallel)
    host = asked.arena
    if plan is not None and asked.cost is not None:
        host = int(host_peaks(plan, asked.cost, parallel.stages, parallel.virtual_stages).max())
    return MemoryEstimate(
        stage=stage,
        weights=number * e,
        gradients=number * parallel.gradient_bytes,
        optimizer=-(-optimizer // parallel.ranks) if parallel.distributed_optimizer else optimizer,
        activations=flight * (capacity * kept + fixed),
        working=working,
        attention=_attention(model, parallel, capacity, piece, asked.longest, layers),
        logits=0 if stage == "first" else _logits(model, parallel, piece),
        reserve=parallel.reserve_bytes,
        host=host,
    )


def counted_layer(model: ModelShape, parallel: Parallel) -> int:
    """`layer_bytes_per_token` for the norm that the model has, and what selective recompute holds on to.

    LayerNorm's own kernel keeps input, mean and scale.
    """
    layer = layer_bytes_per_token(model, parallel)
    if parallel.recompute_attention:
        layer += sum(_heads(model, parallel.tensor_parallel)) * model.head_dim * model.element_bytes
    if not model.layer_norm:
        return layer
    split = parallel.tensor_parallel if parallel.sequence_parallel else 1
    unfused = 0 if parallel.fused_kernels else (8 - model.element_bytes) * model.hidden // split
    return layer + 2 * (4 - unfused)


def _kept(parallel: Parallel, layers: int, layer: int, checkpoint: int) -> tuple[int, int, int]:
    """Bytes of a token: what a stage of ``layers`` layers keeps, most that one of them keeps, and what layers that run
    forward again in backward hold at a time."""
    if parallel.recompute == "none":
        return layers * layer, layer, 0
    part = -(-layers // parallel.virtual_stages)
    again = part if parallel.recompute_layers is None else min(parallel.recompute_layers, part)
    group = min(parallel.recompute_group, max(again, 1))
    whole = (part - again) * parallel.virtual_stages
    kept = whole * layer + parallel.virtual_stages * -(-again // group) * checkpoint
    return kept, layer if whole else checkpoint, group * layer if again else 0


def _largest_piece(asked: _Asked, kept: int) -> tuple[int, float]:
    """Tokens of the largest piece, and the largest share of a sequence's activations that leaves."""
    capacity = asked.capacity
    if asked.plan is not None:
        return max(capacity, int((2 * asked.plan.chunk_tokens).max())), float(asked.plan.offload.max())
    piece = max(capacity, min(asked.longest, capacity + asked.arena // kept))
    return piece, 1 - capacity / piece


def _optimizer_bytes(model: ModelShape, parallel: Parallel) -> int:
    if parallel.optimizer_bytes is not None:
        return parallel.optimizer_bytes
    return 8 if model.element_bytes == 4 else 12


def _last(parallel: Parallel) -> int:
    """Micro-batches in flight on the last stage: one, or as many as pass its other model parts."""
    if parallel.virtual_stages == 1:
        return 1
    return -(-((parallel.virtual_stages - 1) * parallel.stages + 1) // parallel.virtual_stages)


def _heads(model: ModelShape, tensor_parallel: int) -> tuple[int, int]:
    """Query heads and key/value heads of one GPU; the latter are repeated where there are fewer than GPUs."""
    return model.heads // tensor_parallel, max(1, model.kv_heads // tensor_parallel)


def _vocabulary(model: ModelShape, tensor_parallel: int) -> int:
    """Entries of one GPU, padding counted."""
    multiple = model.vocabulary_multiple
    return -(-model.vocabulary // (multiple * tensor_parallel)) * multiple


def _checkpoint(model: ModelShape, parallel: Parallel) -> int:
    """What full recompute keeps of a token and layer: the layer's input."""
    return model.hidden * model.element_bytes // (parallel.tensor_parallel if parallel.sequence_parallel else 1)


def _gradient_row(model: ModelShape, parallel: Parallel) -> int:
    """Gradients of a token inside the MLP, where a layer is widest: of its two products' outputs, and of its input."""
    tp = parallel.tensor_parallel
    return ((3 if model.gated else 2) * model.ffn // tp + 2 * model.hidden) * model.element_bytes


def _attention(model: ModelShape, parallel: Parallel, capacity: int, piece: int, longest: int, layers: int) -> int:
    """Buffers of a ring's piece in backward, where they are largest; 0 if no sequence can have a ring."""
    if parallel.ranks == 1 or longest <= capacity:
        return 0
    heads, kv = _heads(model, parallel.tensor_parallel)
    e, row = model.element_bytes, 2 * kv * model.head_dim
    query = heads * model.head_dim
    if parallel.exchange == "heads":
        return piece * (2 * query + row) * (e * layers + 4)
    gathered = longest - longest // (2 * -(-longest // capacity))
    if parallel.exchange == "gather":
        return gathered * row * (e + 4)
    if parallel.window is not None and parallel.window < longest:
        return min(2 * (parallel.window - 1), gathered) * row * (e + 4)
    return 2 * piece * row * (e + 4) + piece * query * 4


def _logits(model: ModelShape, parallel: Parallel, tokens: int) -> int:
    """Of the rows that exist at a time: logits, softmax in fp32, gradient; and the weight's gradient if in chunks."""
    vocabulary, e = _vocabulary(model, parallel.tensor_parallel), model.element_bytes
    asked = chunk_rows(vocabulary) if parallel.loss_chunk is None else parallel.loss_chunk
    rows = min(tokens, asked) if asked else tokens
    per_row = vocabulary * (4 + e + (e if e < 4 else 0))
    chunked = vocabulary * model.hidden * (4 + e) if rows < tokens else 0
    return rows * per_row + chunked + tokens * model.hidden * e


def chunk_rows(vocabulary: int) -> int:
    """As `megatron_hdp.loss.chunk_rows`, which needs torch: rows of fp32 logits in `CHUNK_BYTES`."""
    rows = max(1, CHUNK_BYTES // (4 * vocabulary))
    return rows // 64 * 64 if rows > 64 else rows


def sized(number: int) -> str:
    """Bytes for people."""
    if number >= GIB:
        return f"{number / GIB:.2f} GiB"
    return f"{number / 2**20:.2f} MiB" if number >= 2**20 else f"{number:,} byte{'s' * (number != 1)}"


def _device(found: MemoryEstimate) -> int:
    return found.device


def _check(model: ModelShape, parallel: Parallel, capacity: int) -> None:
    """Refuse shapes that cannot be, in the words of the command's flags."""
    for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocabulary"):
        if getattr(model, name) < 1:
            raise ConfigError(f"{name} is {getattr(model, name)}: it must be at least 1")
    if model.element_bytes not in (2, 4):
        raise ConfigError(f"element_bytes is {model.element_bytes}: 2 for bf16, 4 for fp32")
    tp = parallel.tensor_parallel
    if min(tp, parallel.ranks, parallel.stages, parallel.virtual_stages, capacity) < 1:
        raise ConfigError("ranks, tensor_parallel, stages, virtual_stages and the capacity must all be at least 1")
    if model.heads % tp or model.ffn % tp:
        raise ConfigError(
            f"tensor_parallel is {tp}, which does not divide {model.heads} heads and an MLP of {model.ffn}"
        )
    if parallel.stages * parallel.virtual_stages > model.layers:
        raise ConfigError(
            f"{parallel.stages} stages of {parallel.virtual_stages} parts, and {model.layers} layers: each needs one"
        )
