"""A setting of the paper, or a variation of one, and its batches."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hdp.cost import LinkProfile, Profile, load_profile
from megatron_hdp.cost import calibrate as c
from megatron_hdp.mixes import Mix, bucket_mix, draw, figure_4, parse_mix
from megatron_hdp.reproduce.paper import BATCH_TOKENS
from megatron_hdp.reproduce.static import packs
from megatron_hdp.simulator.strategies import Setting
from megatron_hdp.types import IntArray

SEED = 2502
"""Batches are drawn by (SEED, step)."""
_TRIM = 128 << 10
"""Tokens that a batch is shortened by until static packs hold it."""
LAYER = "llama-7b"
STAGES = {"llama-70b": 2, "mixtral-8x22b": 4}
"""Pipeline stages that are assumed here, not published. The paper's clusters grow with its models: with these, and
what `simulator.models` assumes for the others, all six pools have the 512 ranks that LLaMA-7B has by Figure 18."""


Bars = Literal["end", "middle", "begin"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of the paper; what it does not publish can be varied. None: as `STAGES` and `simulator.models` assume."""

    model: str
    data: str
    context: int
    tensor_parallel: int | None = None
    stages: int | None = None
    virtual_stages: int | None = None
    tokens_per_rank: int = 8192
    recompute: Literal["none", "full"] = "none"
    offload: bool = False
    """By Equation 3 as printed: as much as hides."""
    gradient_bytes: int = 4
    """Of an element of keys' and values' gradients on a ring."""
    backward_factor: float | None = None
    """Of core attention; None: the profile's."""
    transfer_ms: float | None = None
    """Of 8192 tokens on a ring of LLaMA-7B; None: the profile's."""
    extra_s: float = 0.0
    """What every 8192 tokens of a rank of LLaMA-7B take besides, forward and backward together."""
    bars: Bars = "end"
    """What the labels of Figure 4 are to its bars; the mixes of `megatron_hdp.mixes` end at them."""
    last_bars: tuple[float, float, float] | None = None
    """Percent of tokens in Figure 4's last three bars, which are published together for GitHub; None: as in `mixes`."""


def large_run(case: Case) -> Profile:
    """The shipped profile as the paper's large runs use it, with what the case varies.

    The constant of a call with one sequence counts once per micro-batch: these runs pack sequences into one call
    (section 7 of the paper), which our profile, made for any plan, does not take for granted.
    """
    profile = load_profile("bytescale")
    layer = profile.layer(LAYER)
    factor = layer.attention_backward_factor if case.backward_factor is None else case.backward_factor
    extra = case.extra_s / c.LAYERS_7B / c.FIGURE_18A_TOKENS
    layer = dataclasses.replace(
        layer,
        sequence_constant=0.0,
        microbatch_constant=layer.sequence_constant + layer.microbatch_constant,
        linear_forward=layer.linear_forward + extra / (1 + layer.linear_backward_factor),
        attention_backward_factor=factor,
        kv_gradient_per_token=layer.kv_per_token * case.gradient_bytes / 2,
    )
    across = profile.across_nodes
    if case.transfer_ms is not None:
        moved = layer.kv_per_token * c.FIGURE_18A_TOKENS
        across = LinkProfile(across.latency, moved / (1e-3 * case.transfer_ms - across.latency))
    return dataclasses.replace(profile, across_nodes=across, layers={**profile.layers, LAYER: layer})


@functools.lru_cache(maxsize=64)
def setting_of(case: Case) -> Setting:
    """The run as the simulator takes it."""
    return Setting(
        model=case.model,
        context=case.context,
        tensor_parallel=case.tensor_parallel,  # type: ignore[arg-type]
        stages=STAGES.get(case.model) if case.stages is None else case.stages,  # type: ignore[arg-type]
        virtual_stages=case.virtual_stages,  # type: ignore[arg-type]
        tokens_per_rank=case.tokens_per_rank,
        hardware=large_run(case),
        recompute=case.recompute,
        offload=case.offload,
    )


def mix_of(case: Case) -> Mix:
    """The case's documents, none longer than 2M. Bars that begin at their labels leave 2M alone to the last."""
    if case.bars == "end" and case.last_bars is None:
        return parse_mix(case.data)
    labels = [2048 << k for k in range(11)]
    longest = labels[-1]
    if case.bars == "end":
        edges = [labels[0] // 2, *labels]
    elif case.bars == "middle":
        edges = [*(round(label / 2**0.5) for label in labels), longest]
    else:
        edges = [*labels[:-1], longest - 2, longest]
    shares = figure_4(case.data)
    if case.last_bars is not None:
        shares = (*shares[:-3], *case.last_bars)
    return bucket_mix(f"{case.data}, {case.bars}", "Figure 4", edges, shares)


def whole_batch(case: Case, step: int) -> IntArray:
    """Sequences of a step of 32M tokens, int64 [num_sequences]."""
    return draw(mix_of(case), BATCH_TOKENS, case.context, (SEED, step))


@functools.lru_cache(maxsize=512)
def batch(case: Case, step: int) -> IntArray:
    """Sequences of a step that fill the packs of the static mesh, int64 [num_sequences]; a little less than 32M tokens.

    The paper's static run has 32M tokens in 8 micro-batches with its padding; one more would be 1/8 longer. So a batch
    ends where the static packs are full, and all strategies get the same one.
    """
    setting, tokens = setting_of(case), BATCH_TOKENS
    while True:
        lengths = draw(mix_of(case), tokens, case.context, (SEED, step))
        of, ring = packs(lengths, setting)
        most = BATCH_TOKENS // (ring * case.tokens_per_rank)
        if int(of.max()) < most:
            lengths.flags.writeable = False
            return lengths
        held = ring * int(np.asarray(setting.cost.piece_tokens(lengths, ring)).sum())
        tokens -= max(_TRIM, (held - BATCH_TOKENS) // _TRIM * _TRIM)


def work_seconds(case: Case, lengths: IntArray) -> float:
    """Time that a batch takes of each rank on its smallest rings, if it could be shared out evenly."""
    cost, ranks = setting_of(case).cost, setting_of(case).ranks
    ring = -(-lengths // case.tokens_per_rank)
    rank_time = np.asarray(cost.seconds(lengths, ring), dtype=np.float64) * ring
    waves = float(lengths.sum()) / case.tokens_per_rank / ranks
    return float(rank_time.sum()) / ranks + waves * cost.microbatch_picoseconds() * 1e-12
