"""What a piece costs on its rank: picoseconds and bytes, vectorised and exact; formulas in docs/cost-model.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost.area import own_area, step_area
from megatron_hdp.cost.fixed import FRACTION_BITS, OFFLOAD_STEPS, PICOSECONDS, scaled
from megatron_hdp.cost.profile import LayerProfile, Profile, Tier
from megatron_hdp.cost.stage import StageCoefficients, stage_coefficients
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import IntArray, chunk_tokens

type Ints = int | np.integer[Any] | Sequence[int] | IntArray
type Floats = float | Sequence[float] | npt.NDArray[np.float64]
Phase = Literal["forward", "backward", "total"]
LIMIT = 1 << 62
"""No result, sum or product inside this module reaches it, so int64 never wraps."""
_MOST = {"layers_per_stage": 1 << 16, "window": (1 << 31) - 1, "pad_multiple": 1 << 16}
"""What the settings are at most, far above what any model asks for."""


@dataclass(frozen=True)
class CostModel:
    """Costs of pieces for one pipeline stage of ``layers_per_stage`` layers.

    Arguments of the methods broadcast like numpy's: ``length`` real tokens of whole sequences, ``ring`` ranks that
    share each, ``tier`` the links of that ring (`Tier`). Results are of one rank's piece and have the broadcast shape.
    Everything that a planner may decide on is an integer; `seconds` is for people.

    Raises:
        ConfigError: (construction) a setting that cannot be, or coefficients too large for integers.
        PlanError: (methods) a length or ring below 1 or above `max_length`, a tier or offload fraction out of range.
    """

    profile: Profile
    layers_per_stage: int
    window: int | None = None
    """Tokens that a query sees, itself included; None for full causal attention."""
    recompute: Literal["none", "full"] = "none"
    layer: str | None = None
    """Which layer of the profile; None for its default."""
    pad_multiple: int = 2
    """Pieces are multiples of this, as in `megatron_hdp.types.Plan`."""

    def __post_init__(self) -> None:
        self._take_whole_numbers()
        if self.layers_per_stage < 1:
            raise ConfigError(f"layers_per_stage is {self.layers_per_stage}: a stage has at least 1 layer")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window is {self.window}: a query sees at least itself; use None for full attention")
        if self.recompute not in ("none", "full"):
            raise ConfigError(f"recompute is {self.recompute!r}: choose none or full")
        if self.pad_multiple < 2 or self.pad_multiple % 2:
            raise ConfigError(f"pad_multiple is {self.pad_multiple}: it must be positive and even")
        _ = self.max_length  # refuses a profile that integers cannot hold, before anything is planned with it

    def _take_whole_numbers(self) -> None:
        """The settings of `_MOST` as int, refused if they are none or too large."""
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name == "window":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name} is {value!r}: it must be a whole number")
            if value > most:
                raise ConfigError(f"{name} is {int(value):,}: too large, it can be at most {most:,}")
            object.__setattr__(self, name, int(value))

    @property
    def layer_profile(self) -> LayerProfile:
        """The layer whose coefficients are used."""
        return self.profile.layer(self.layer)

    @cached_property
    def _stage(self) -> StageCoefficients:
        return stage_coefficients(self.profile, self.layer_profile, self.layers_per_stage, self.recompute)

    @property
    def ranks_per_node(self) -> int:
        """Pool ranks whose GPUs share a node, at least 1."""
        return max(1, self.profile.gpus_per_node // self.layer_profile.tensor_parallel)

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
        linear = sum(s.linear) + byte * (1 + self.pad_multiple) + 6 * int(s.latency.max())
        time = sum(s.attention) * padded * padded + linear * padded + sum(s.sequence) + sum(s.microbatch)
        work = padded * s.kept_per_token + s.kept_constant
        memory = self.layers_per_stage * work + padded * s.working_per_token + s.working_constant
        copied = memory * max(s.d2h_time, s.h2d_time)
        forward = 1 if self.recompute == "none" else 2  # full recompute runs the forward pass twice
        return forward * max(time, copied * OFFLOAD_STEPS) < LIMIT << FRACTION_BITS and memory * OFFLOAD_STEPS < LIMIT

    # Time

    def picoseconds(self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total") -> Any:
        """Time of one rank's piece through the stage, int64: ring attention, linear part, the constant per sequence."""
        length, ring, tier = self._arguments(length, ring, tier)
        tokens = self.piece_tokens(length, ring)
        result = 0 * tokens
        for direction in self._directions(phase):
            result = result + self._attention(tokens, ring, tier, direction)
            result = result + scaled(tokens, self._stage.linear[direction])
            result = result + (self._stage.sequence[direction] >> FRACTION_BITS)
        return result

    def seconds(self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total") -> Any:
        """`picoseconds` as float64 seconds: for reports, not for decisions."""
        return self.picoseconds(length, ring, tier, phase) / PICOSECONDS

    def attention_picoseconds(
        self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total"
    ) -> Any:
        """The part of `picoseconds` that a ring spends in core attention, waiting for transfers included."""
        length, ring, tier = self._arguments(length, ring, tier)
        tokens = self.piece_tokens(length, ring)
        result = 0 * tokens
        for direction in self._directions(phase):
            result = result + self._attention(tokens, ring, tier, direction)
        return result

    def microbatch_picoseconds(self, phase: Phase = "total") -> int:
        """The constant of one micro-batch; its time is this plus the `picoseconds` of its pieces."""
        return sum(self._stage.microbatch[direction] >> FRACTION_BITS for direction in self._directions(phase))

    def packed_attention_picoseconds(
        self, lengths: Ints, ring: int, tier: Tier = Tier.ACROSS_NODES, phase: Phase = "total"
    ) -> int:
        """Attention of many sequences cut over one ring that moves all their keys and values in one slice per step.

        That is how static context parallelism runs a pack. ``lengths`` has the shape [num_sequences]. A dull loop over
        the ring's steps.
        """
        length, _, _ = self._arguments(np.atleast_1d(np.asarray(lengths)), ring, tier)
        self._arguments(int(length.sum()), 1, 0)  # work of the pack is at most that of one sequence of all its tokens
        tokens = self.piece_tokens(length, ring)
        total = 0
        for direction in self._directions(phase):
            a = self._stage.attention[direction]
            steps = [int(scaled(own_area(tokens // 2, self.window), a).sum())]
            for step in range(1, ring):
                steps.append(int(scaled(step_area(tokens // 2, self.window, min(step, ring - step)), a).sum()))
            kv, both, gradient = (int(x) for x in self._transfers(tokens.sum(), int(tier), direction))
            moved = [kv] + [both] * (ring - 2) if ring > 1 else []
            total += sum(max(compute, transfer) for compute, transfer in zip(steps, moved))
            total += max(steps[-1], gradient) + gradient if ring > 1 else steps[0]
        return total

    def _attention(self, tokens: Any, ring: Any, tier: Any, direction: int) -> Any:
        """Closed form of a ring's walk. Step k computes while a transfer moves; the last steps differ.

        Forward: K/V of step k + 1 move during step k. Backward: K/V of step k + 1 and gradients of step k - 1 move
        during step k, and after the last step the gradients make one more hop, home, that nothing hides.
        """
        a, chunk = self._stage.attention[direction], tokens // 2
        kv, both, gradient = self._transfers(tokens, tier, direction)
        own = scaled(own_area(chunk, self.window), a)
        last = scaled(step_area(chunk, self.window, 1 + 0 * chunk), a)
        middle = self._middle(chunk, ring, a, both)
        walk = np.maximum(own, kv) + middle + np.maximum(last, gradient) + gradient
        return np.where(ring > 1, walk, own)

    def _middle(self, chunk: Any, ring: Any, a: int, transfer: Any) -> Any:
        """Sum over steps k = 1 .. d - 2 of max(compute of step k, transfer); junk for d < 2."""
        if self.window is None:
            return (ring - 2) * np.maximum(scaled(4 * chunk * chunk, a), transfer)

        def step(distance: Any) -> Any:
            return np.maximum(scaled(step_area(chunk, self.window, distance), a), transfer)

        def nearer(distance: Any) -> Any:
            """How many of the steps 1 .. d - 1 have min(k, d - k) <= distance."""
            return np.clip(2 * distance, 0, ring - 1)

        whole = self.window // chunk  # chunks that the window covers entirely; only three distances are cut by its edge
        total = nearer(whole - 2) * step(1 + 0 * chunk)
        for distance in (whole - 1, whole, whole + 1):
            total = total + (nearer(distance) - nearer(distance - 1)) * step(np.maximum(distance, 1))
        total = total + (ring - 1 - nearer(whole + 1)) * transfer
        return total - step(1 + 0 * chunk)

    def _transfers(self, tokens: Any, tier: Any, direction: int) -> tuple[Any, Any, Any]:
        """Picoseconds in which slices of ``tokens`` move: K/V; K/V and gradients; gradients (none in forward)."""
        s = self._stage
        latency = s.latency[tier] >> FRACTION_BITS
        kv = latency + scaled(tokens, s.kv_time[tier])
        if direction == 0:
            return kv, kv, 0 * kv
        return kv, latency + scaled(tokens, s.both_time[tier]), latency + scaled(tokens, s.gradient_time[tier])

    def _directions(self, phase: Phase) -> tuple[int, ...]:
        """Passes over the stage: 0 forward, 1 backward. Full recompute runs forward again ahead of backward."""
        again = (0,) if self.recompute == "full" else ()
        table: dict[str, tuple[int, ...]] = {"forward": (0,), "backward": (*again, 1), "total": (0, *again, 1)}
        if phase not in table:
            raise ConfigError(f"phase is {phase!r}: choose forward, backward or total")
        return table[phase]

    # Rings

    def piece_tokens(self, length: Ints, ring: Ints) -> Any:
        """Tokens that each rank of the ring holds, padding counted."""
        return 2 * chunk_tokens(np.asarray(length, np.int64), np.asarray(ring, np.int64), self.pad_multiple)

    def tier(self, start: Ints, ring: Ints) -> Any:
        """Tier of rings of ``ring`` ranks from pool rank ``start``; nodes hold `ranks_per_node` consecutive ranks."""
        first = np.asarray(start, np.int64)
        crosses = first // self.ranks_per_node != (first + np.asarray(ring, np.int64) - 1) // self.ranks_per_node
        return np.where(crosses, int(Tier.ACROSS_NODES), int(Tier.INSIDE_NODE))

    def hides(self, length: Ints, ring: Ints, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total") -> Any:
        """Does every transfer that runs beside a step end within it, in every pass of ``phase``? bool.

        True for local sequences. The gradients' last hop runs beside no step of its own ring and is not counted.
        """
        lengths, rings, tiers = self._arguments(length, ring, tier)
        return self._hidden(self.piece_tokens(lengths, rings), rings, tiers, phase)

    def widest_hiding_ring(
        self, length: Ints, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total", max_ring: int | None = None
    ) -> Any:
        """Largest d up to ``max_ring`` such that `hides` holds for every ring of up to d ranks; at least 1, int64."""
        lengths, _, tiers = self._arguments(length, 1, tier)
        limit = np.maximum(-(-lengths // self.pad_multiple), 1) + 0 * tiers
        if max_ring is not None:
            limit = np.minimum(limit, self._arguments(max_ring, 1, 0)[0])
        if self.window is not None:
            return self._widest_by_walking(lengths, tiers, phase, limit)
        # The pieces of d ranks have at least m units of padding if d < length / (unit (m - 1)).
        units = self._narrowest(phase)[tiers] // self.pad_multiple
        widest = -(-lengths // (self.pad_multiple * np.maximum(units - 1, 1))) - 1
        widest = np.where(units <= 1, limit, widest)
        pair = self._hidden(self.piece_tokens(lengths, 2), 2, tiers, phase)  # moves less at a time than wider rings do
        return np.clip(np.where((widest < 2) & pair, 2, widest), 1, limit)[()]

    def _widest_by_walking(self, lengths: Any, tiers: Any, phase: Phase, limit: Any) -> Any:
        """A window's edge cuts each ring's chunks elsewhere, so hiding may end and begin again: try one by one."""
        widest, hiding = np.ones_like(limit), np.ones(np.shape(limit), dtype=bool)
        while np.any(hiding):
            hiding = hiding & (widest < limit)
            candidate = widest + hiding
            hiding = hiding & self._hidden(self.piece_tokens(lengths, candidate), candidate, tiers, phase)
            widest = widest + hiding
        return widest

    def _narrowest(self, phase: Phase) -> Any:
        """Tokens of the smallest piece (in units of padding) whose full-attention ring of 3 or more hides, per tier.

        A step's compute grows with the square of its piece, its transfers by a line: they cross once.
        """
        if phase not in self._narrowest_found:
            low = np.ones(len(Tier), dtype=np.int64)
            high = np.full_like(low, self.max_length // self.pad_multiple + 1)
            while np.any(low < high):
                middle = (low + high) // 2
                good = self._hidden(middle * self.pad_multiple, 3, np.arange(len(Tier)), phase)
                low, high = np.where(good, low, np.minimum(middle + 1, high)), np.where(good, middle, high)
            self._narrowest_found[phase] = low * self.pad_multiple
        return self._narrowest_found[phase]

    @cached_property
    def _narrowest_found(self) -> dict[str, IntArray]:
        return {}

    def _hidden(self, tokens: Any, rings: Any, tiers: Any, phase: Phase) -> Any:
        """`hides` for pieces of ``tokens``."""
        result = np.ones(np.shape(tokens + 0 * (rings + tiers)), dtype=bool)
        for direction in self._directions(phase):
            kv, both, gradient = self._transfers(tokens, tiers, direction)
            chunk, a = tokens // 2, self._stage.attention[direction]
            own = scaled(own_area(chunk, self.window), a)
            last = scaled(step_area(chunk, self.window, 1 + 0 * chunk), a)
            least = scaled(step_area(chunk, self.window, np.maximum(rings // 2, 1)), a)
            hidden = (own >= kv) & (last >= gradient) & ((least >= both) | (rings < 3))
            result = result & (hidden | (rings < 2))
        return result

    # Memory

    def bytes(self, length: Ints, ring: Ints = 1, offload: Floats = 0.0) -> Any:
        """Device bytes of activations that one rank keeps for backward of its piece, int64, rounded up.

        ``offload`` is the fraction r of a layer's activations that leaves; two layers stay whole, so the stage keeps
        2 + (1 - r)(l - 2) layers' worth. With full recompute that is of layer inputs, plus one layer at work.
        """
        length, ring, _ = self._arguments(length, ring, 0)
        tokens, s = self.piece_tokens(length, ring), self._stage
        kept = tokens * s.kept_per_token + s.kept_constant
        working = tokens * s.working_per_token + s.working_constant
        return -(-kept * self._held_steps(offload) // OFFLOAD_STEPS) + working

    def held_fraction(self, offload: Floats) -> Any:
        """Share of a piece's activations that stays on the device, (2 + (1 - r)(l - 2)) / l; 1 minus `Plan.offload`."""
        return self._held_steps(offload) / (OFFLOAD_STEPS * self.layers_per_stage)

    def smallest_ring(self, length: Ints, capacity: Ints, offload: Floats = 0.0) -> Any:
        """Fewest ranks on which each keeps at most the bytes of a local sequence of ``capacity`` tokens, int64.

        This is ByteScale's D(s, r) = ceil((2 + (1 - r)(l - 2)) Act(s) / (l Act(C))), except that padding is counted and
        that every rank pays Act's constant. With r = 0 and a capacity that is a multiple of ``pad_multiple`` it is
        ceil(s / C).

        Raises:
            PlanError: not even the smallest piece fits.
        """
        lengths, local, _ = self._arguments(length, capacity, 0, names=("length", "capacity"))
        s, held = self._stage, self._held_steps(offload)
        budget = OFFLOAD_STEPS * (
            self.layers_per_stage * (local * s.kept_per_token + s.kept_constant) + local * s.working_per_token
        )
        tokens = (budget - held * s.kept_constant) // (held * s.kept_per_token + OFFLOAD_STEPS * s.working_per_token)
        units = tokens // self.pad_multiple
        if np.any(units < 1):
            raise PlanError(
                f"a capacity of {int(np.min(local))} tokens does not hold the smallest piece, {self.pad_multiple} "
                "tokens: raise --hdp-tokens-per-rank"
            )
        return -(-lengths // (self.pad_multiple * units))

    def largest_free_offload(self, length: Ints) -> Any:
        """Largest r whose copy hides behind the forward pass: T(s) >= r Act(s) / min(B_d2h, B_h2d); float64, 0 .. 1.

        A multiple of 1/1024, so that it is exact. The ring's size cancels where the ring hides its transfers.
        """
        length, _, _ = self._arguments(length, 1, 0)
        s = self._stage
        kept = self.layers_per_stage * (self.piece_tokens(length, 1) * s.kept_per_token + s.kept_constant)
        copy = np.maximum(scaled(kept, max(s.d2h_time, s.h2d_time)), 1)
        time = np.minimum(self.picoseconds(length, 1, 0, "forward"), copy)
        return time * OFFLOAD_STEPS // copy / OFFLOAD_STEPS

    def offload_stall_picoseconds(
        self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, offload: Floats = 0.0
    ) -> Any:
        """What copying adds to a piece's forward and backward where it takes longer than computing, int64.

        Each of l - 2 layers copies r of its activations out during a layer's forward, and in during a layer's backward.
        """
        length, ring, tier = self._arguments(length, ring, tier)
        layers, s = max(self.layers_per_stage - 2, 0), self._stage
        kept = self.piece_tokens(length, ring) * s.kept_per_token + s.kept_constant
        moved = kept * layers * _offload_steps(offload) // OFFLOAD_STEPS
        out = scaled(moved, s.d2h_time) - self._per_layer(length, ring, tier, "forward") * layers
        back = scaled(moved, s.h2d_time) - self._per_layer(length, ring, tier, "backward") * layers
        return np.maximum(out, 0) + np.maximum(back, 0)

    def _per_layer(self, length: Ints, ring: Ints, tier: Ints, phase: Phase) -> Any:
        return self.picoseconds(length, ring, tier, phase) // self.layers_per_stage

    def _held_steps(self, offload: Floats) -> Any:
        """Layers' worth of activations that stay, in 1/1024."""
        return self.layers_per_stage * OFFLOAD_STEPS - max(self.layers_per_stage - 2, 0) * _offload_steps(offload)

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


def _offload_steps(offload: Floats) -> Any:
    """Offload fractions in 1/1024, rounded down; exact, because scaling by a power of two is."""
    fraction = np.asarray(offload, dtype=np.float64)
    if not np.all((fraction >= 0) & (fraction <= 1)):
        raise PlanError(f"offload is {offload}, must be in 0 .. 1")
    return np.floor(fraction * OFFLOAD_STEPS).astype(np.int64)[()]
