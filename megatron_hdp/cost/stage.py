"""From a profile's decimal coefficients to the integers of one pipeline stage: exact fractions, each rounded once."""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megatron_hdp.cost.fixed import fixed
from megatron_hdp.cost.profile import LayerProfile, Profile
from megatron_hdp.types import IntArray


@dataclass(frozen=True, slots=True)
class StageCoefficients:
    """Integers for all layers of a stage. Pairs are (forward, backward); times are in 2^-12 ps, memory in bytes."""

    attention: tuple[int, int]
    """Per token^2 of a local causal sequence."""
    linear: tuple[int, int]
    """Per token of a piece, with `ends` in backward."""
    ends: int
    """Embedding and loss, per token of a piece, both passes."""
    sequence: tuple[int, int]
    microbatch: tuple[int, int]
    ring_step: tuple[int, int]
    latency: IntArray
    """Indexed by tier, like the next three, which are per token of a slice."""
    kv_time: IntArray
    gradient_time: IntArray
    both_time: IntArray
    d2h_time: IntArray
    """Per byte of one layer, not multiplied by the layers: without a NIC at work, and beside one."""
    h2d_time: IntArray
    kept_per_token: int
    """Of one layer, with `kept_constant`: what stays for backward."""
    kept_constant: int
    working_per_token: int
    """Once per stage, with `working_constant`: the layer that is being recomputed."""
    working_constant: int


def stage_coefficients(
    profile: Profile, layer: LayerProfile, layers: int, recompute: str, stages: int
) -> StageCoefficients:
    """The integers for ``layers`` layers, one of ``stages`` pipeline stages.

    Embedding and loss run once for a token, between its passes over the layers or at their ends, and are not run again
    with the layers by full recompute: all their time is in the backward pass.

    Raises:
        ConfigError: coefficients that integers cannot hold.
    """

    def pair(field: str, value: float, backward_factor: float = 1.0) -> tuple[int, int]:
        forward = Fraction(value) * layers  # exact: a binary float is a fraction
        return fixed(forward, field), fixed(forward * Fraction(backward_factor), field)

    kv, gradient = Fraction(layer.kv_per_token) * layers, Fraction(layer.kv_gradient_per_token) * layers
    links = (profile.inside_node, profile.across_nodes)  # in the order of Tier

    def per_link(amount: Fraction, field: str) -> IntArray:
        return np.array([fixed(amount / Fraction(link.bandwidth), field) for link in links], dtype=np.int64)

    def copies(alone: float, shared: float | None, field: str) -> IntArray:
        both = (alone, alone if shared is None else shared)
        return np.array([fixed(1 / Fraction(bandwidth), field) for bandwidth in both], dtype=np.int64)

    loss, embedding = Fraction(layer.loss_per_token), Fraction(layer.embedding_per_token)
    ends = fixed(loss + embedding if stages == 1 else max(loss, embedding), "loss_per_token")
    forward, backward = pair("linear_forward", layer.linear_forward, layer.linear_backward_factor)
    full = recompute == "full"
    act, constant = math.ceil(layer.activation_per_token), math.ceil(layer.activation_constant)
    return StageCoefficients(
        attention=pair("attention_forward", layer.attention_forward, layer.attention_backward_factor),
        linear=(forward, backward + ends),
        ends=ends,
        sequence=pair("sequence_constant", layer.sequence_constant),
        microbatch=pair("microbatch_constant", layer.microbatch_constant),
        ring_step=(
            pair("ring_step_forward", layer.ring_step_forward)[0],
            pair("ring_step_backward", layer.ring_step_backward)[0],
        ),
        latency=np.array([fixed(Fraction(link.latency) * layers, "latency") for link in links], dtype=np.int64),
        kv_time=per_link(kv, "kv_per_token"),
        gradient_time=per_link(gradient, "kv_gradient_per_token"),
        both_time=per_link(kv + gradient, "kv_per_token"),
        d2h_time=copies(profile.d2h_bandwidth, profile.d2h_bandwidth_shared, "d2h_bandwidth"),
        h2d_time=copies(profile.h2d_bandwidth, profile.h2d_bandwidth_shared, "h2d_bandwidth"),
        kept_per_token=math.ceil(layer.checkpoint_per_token) if full else act,
        kept_constant=0 if full else constant,
        working_per_token=act if full else 0,
        working_constant=constant if full else 0,
    )
