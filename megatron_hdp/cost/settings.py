"""One pipeline stage of a model on a cluster: settings, checked, and the integers that are made of them."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np

from megatron_hdp.cost.fixed import FRACTION_BITS, OFFLOAD_STEPS
from megatron_hdp.cost.profile import LayerProfile, LinkProfile, Profile, Tier
from megatron_hdp.cost.stage import StageCoefficients, stage_coefficients
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import IntArray

type Ints = int | np.integer[Any] | Sequence[int] | IntArray
LIMIT = 1 << 62
"""No result, sum or product inside this module reaches it, so int64 never wraps."""
_MOST = {
    "layers_per_stage": 1 << 16,
    "window": (1 << 31) - 1,
    "pad_multiple": 1 << 16,
    "heads": 1 << 16,
    "kv_heads": 1 << 16,
    "stages": 1 << 16,
    "gather_picoseconds": 1 << 56,
    "reduce_picoseconds": 1 << 56,
}
"""What the settings are at most, far above what any model asks for."""
_OPTIONAL = ("window", "heads", "kv_heads")


def ranks_of_node(profile: Profile, layer: LayerProfile) -> int:
    """Pool ranks whose GPUs share a node of the profile, at least 1; each is a tensor-parallel group of the layer."""
    return max(1, profile.gpus_per_node // layer.tensor_parallel)


@dataclass(frozen=True)
class StageSettings:
    """What `megatron_hdp.cost.CostModel` is made from; see there."""

    profile: Profile
    layers_per_stage: int
    window: int | None = None
    """Tokens that a query sees, itself included; None for full causal attention."""
    recompute: Literal["none", "full"] = "none"
    layer: str | None = None
    """Which layer of the profile; None for its default."""
    pad_multiple: int = 2
    """Pieces are multiples of this, as in `megatron_hdp.types.Plan`."""
    heads: int | None = None
    """Query heads of one tensor-parallel rank; with `kv_heads`, for exchanges other than the ring."""
    kv_heads: int | None = None
    """Key/value heads of one tensor-parallel rank."""
    stages: int = 1
    """Pipeline stages of the model. One computes embedding and loss; of several each is charged the longer of the two,
    as all wait for the slowest."""
    gather_picoseconds: int = 0
    """Parameters of the stage come in this time, layer by layer, while the first micro-batch runs forward; 0 if that is
    not known, or not beside compute."""
    reduce_picoseconds: int = 0
    """Gradients of the stage are summed over the pool in this time, layer by layer, while last micro-batches run
    backward; 0 as above. Neither is a part of a piece's cost: they tell plans apart whose ranks end alike."""

    def __post_init__(self) -> None:
        self._take_whole_numbers()
        if self.layers_per_stage < 1:
            raise ConfigError(f"layers_per_stage is {self.layers_per_stage}: a stage has at least 1 layer")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}: a query sees at least itself; use None for full attention")
        if self.recompute not in ("none", "full"):
            raise ConfigError(f"recompute is {self.recompute!r}: choose none or full")
        if min(self.gather_picoseconds, self.reduce_picoseconds) < 0:
            raise ConfigError(
                f"gather_picoseconds is {self.gather_picoseconds} and reduce_picoseconds is {self.reduce_picoseconds}: "
                "neither can be below 0"
            )
        if self.stages < 1:
            raise ConfigError(f"stages is {self.stages}: a model has at least 1 pipeline stage")
        if self.pad_multiple < 2 or self.pad_multiple % 2:
            raise ConfigError(f"pad_multiple is {self.pad_multiple}: it must be positive and even")
        self._check_heads()
        _ = self.max_length  # refuses a profile that integers cannot hold, before anything is planned with it

    def _take_whole_numbers(self) -> None:
        """The settings of `_MOST` as int, refused if they are none or too large."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} is {value!r}: it must be a whole number")
            if value > most:
                raise ConfigError(f"{name} is {int(value):,}: too large, it can be at most {most:,}")
            object.__setattr__(self, name, int(value))

    def _check_heads(self) -> None:
        """Both or none, and equal groups of query heads to a key/value head."""
        heads, kv_heads = self.heads, self.kv_heads
        if (heads is None) != (kv_heads is None):
            raise ConfigError(f"heads is {heads} and kv_heads is {kv_heads}: give both, of one tensor-parallel rank")
        if heads is None or kv_heads is None:
            return
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ConfigError(
                f"heads is {heads} and kv_heads is {kv_heads}: both must be at least 1, and kv_heads must divide heads"
            )

    @property
    def layer_profile(self) -> LayerProfile:
        """The layer whose coefficients are used."""
        return self.profile.layer(self.layer)

    @cached_property
    def _stage(self) -> StageCoefficients:
        return stage_coefficients(self.profile, self.layer_profile, self.layers_per_stage, self.recompute, self.stages)

    @property
    def ranks_per_node(self) -> int:
        """Pool ranks whose GPUs share a node, at least 1."""
        return ranks_of_node(self.profile, self.layer_profile)

    @cached_property
    def max_length(self) -> int:
        """Longest sequence, and largest capacity, whose costs fit the integers of this module."""
        low, high = 0, 1 << 31
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle - 1)
        if low < 1 << 14:
            raise ConfigError(
                f"profile {self.profile.name} with {self.layers_per_stage} layers per stage is so slow or so large "
                f"that integers hold sequences of {low} tokens at most: check the units of its coefficients"
            )
        return low

    def _fits(self, length: int) -> bool:
        """Are all costs of sequences up to ``length``, on any ring, sure to stay below `LIMIT`? Python integers."""
        s, padded = self._stage, length + self.pad_multiple
        # A ring of d makes at most 2 d + 2 transfers of (length / d + pad_multiple) tokens or less, and d <= length.
        byte = 2 * (int(s.kv_time.max()) + int(s.both_time.max()) + int(s.gradient_time.max()))
        swapped = 0 if self.heads is None or self.kv_heads is None else 2 * self.heads // self.kv_heads
        linear = sum(s.linear) + byte * (1 + self.pad_multiple + swapped) + 6 * int(s.latency.max())
        linear += sum(s.ring_step)
        time = sum(s.attention) * padded * padded + linear * padded + sum(s.sequence) + sum(s.microbatch)
        work = padded * s.kept_per_token + s.kept_constant
        memory = self.layers_per_stage * work + padded * s.working_per_token + s.working_constant
        copied = memory * max(int(s.d2h_time.max()), int(s.h2d_time.max()))
        forward = 1 if self.recompute == "none" else 2  # full recompute runs the forward pass twice
        return forward * max(time, copied * OFFLOAD_STEPS) < LIMIT << FRACTION_BITS and memory * OFFLOAD_STEPS < LIMIT

    def with_free_links(self, tiers: Literal["inside", "all"]) -> Self:
        """This model with links, inside nodes or all, and steps of rings that take no time; made once."""
        if tiers not in self._free_links:
            free = LinkProfile(0.0, sys.float_info.max)
            across = free if tiers == "all" else self.profile.across_nodes
            layers = {
                name: replace(layer, ring_step_forward=0.0, ring_step_backward=0.0)
                for name, layer in self.profile.layers.items()
            }
            profile = replace(self.profile, inside_node=free, across_nodes=across, layers=layers)
            self._free_links[tiers] = replace(self, profile=profile)
        return self._free_links[tiers]

    @cached_property
    def _free_links(self) -> "dict[str, Self]":
        return {}

    def with_stages(self, stages: int) -> Self:
        """This model as one of so many pipeline stages; itself where they change nothing, else made once."""
        layer = self.layer_profile
        if stages == self.stages or not (layer.loss_per_token or layer.embedding_per_token):
            return self
        if stages not in self._of_stages:
            self._of_stages[stages] = replace(self, stages=stages)
        return self._of_stages[stages]

    @cached_property
    def _of_stages(self) -> "dict[int, Self]":
        return {}

    def _arguments(
        self, length: Ints, ring: Ints, tier: Ints, names: tuple[str, str] = ("length", "ring")
    ) -> tuple[Any, Any, Any]:
        """The arguments as int64, refused if out of range."""
        arrays = [np.asarray(value) for value in (length, ring, tier)]
        for name, array in zip((*names, "tier"), arrays):
            if not np.issubdtype(array.dtype, np.integer):
                raise PlanError(f"{name} must be whole numbers, got {array.dtype}")
            low, high = (0, len(Tier) - 1) if name == "tier" else (1, self.max_length)
            if array.size and not low <= int(array.min()) <= int(array.max()) <= high:
                wrong = int(array.min()) if array.min() < low else int(array.max())
                why = "" if name == "tier" or wrong < low else " for this profile and this many layers per stage"
                raise PlanError(f"{name} is {wrong}, must be in {low} .. {high}{why}")
        first, second, third = (array.astype(np.int64) for array in arrays)
        return first[()], second[()], third[()]
