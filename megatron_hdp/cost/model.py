"""What a piece costs on its rank: picoseconds and bytes, vectorised and exact; formulas in docs/cost-model.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost.attention import Pieces, gather_attention, heads_attention, hides, ring_attention
from megatron_hdp.cost.fixed import FRACTION_BITS, OFFLOAD_STEPS, PICOSECONDS, scaled
from megatron_hdp.cost.packed import Pack, packed_gather, packed_heads, packed_walk
from megatron_hdp.cost.profile import Tier
from megatron_hdp.cost.settings import Ints, StageSettings
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.types import EXCHANGES, IntArray, chunk_tokens

type Floats = float | Sequence[float] | npt.NDArray[np.float64]
Phase = Literal["forward", "backward", "total"]
_GATHER, _HEADS = EXCHANGES.index("gather"), EXCHANGES.index("heads")


@dataclass(frozen=True)
class CostModel(StageSettings):
    """Costs of pieces for one pipeline stage of ``layers_per_stage`` layers.

    Arguments of the methods broadcast like numpy's: ``length`` real tokens of whole sequences, ``ring`` ranks that
    share each, ``tier`` the links of that ring (`Tier`). Results are of one rank's piece and have the broadcast shape.
    Everything that a planner may decide on is an integer; `seconds` is for people.

    Raises:
        ConfigError: (construction) a setting that cannot be, or coefficients too large for integers.
        PlanError: (methods) a length or ring below 1 or above `max_length`, a tier or offload fraction out of range.
    """

    # Time

    def picoseconds(self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total") -> Any:
        """Time of one rank's piece through the stage, int64: ring attention, linear part, the constant per sequence."""
        pieces = self._pieces(length, ring, tier)
        result = 0 * pieces.tokens
        for direction in self._directions(phase):
            result = result + ring_attention(self._stage, self.window, pieces, direction)
            result = result + self._besides(pieces.tokens, direction)
        return result

    def exchange_picoseconds(
        self,
        length: Ints,
        ring: Ints,
        tier: Ints,
        exchange: Ints,
        head_ranks: Ints = 1,
        phase: Phase = "total",
    ) -> Any:
        """`picoseconds` where attention is shared by an exchange, an index into `EXCHANGES`, with `Plan.head_ranks`.

        Raises:
            ConfigError: another exchange than the ring, and the model does not know `heads` and `kv_heads`.
            PlanError: no such exchange, or head ranks that the ring or the heads cannot be cut into.
        """
        kind, swapping = np.asarray(exchange), np.asarray(head_ranks)
        self._check_exchange(kind, swapping, np.asarray(ring))
        pieces = self._pieces(length, ring, tier)
        groups = np.where(kind == _HEADS, swapping, 1)
        result = 0 * (pieces.tokens + kind)
        for direction in self._directions(phase):
            attention = ring_attention(self._stage, self.window, pieces, direction)
            if np.any(kind == _GATHER):
                gathered = gather_attention(self._stage, self.window, pieces, direction)
                attention = np.where(kind == _GATHER, gathered, attention)
            if np.any(kind == _HEADS) and self.heads is not None and self.kv_heads is not None:
                counts = (self.heads, self.kv_heads)
                swapped = heads_attention(self._stage, self.window, pieces, direction, groups, counts)
                attention = np.where(kind == _HEADS, swapped, attention)
            result = result + attention + self._besides(pieces.tokens, direction)
        return result

    def swaps_heads(self, head_ranks: int) -> bool:
        """Can so many ranks swap rows for heads? They must cut the query heads evenly, and the key/value heads or
        groups of them that are replicated.
        """
        if self.heads is None or self.kv_heads is None:
            return False
        even = self.kv_heads % head_ranks == 0 or head_ranks % self.kv_heads == 0
        return self.heads % head_ranks == 0 and even

    def _check_exchange(self, exchange: IntArray, head_ranks: IntArray, ring: IntArray) -> None:
        """Refuse what `exchange_picoseconds` must not be asked."""
        if not np.all((exchange >= 0) & (exchange < len(EXCHANGES))):
            raise PlanError(f"exchange is {exchange}, must be in 0 .. {len(EXCHANGES) - 1}")
        if np.any(exchange > 0) and self.heads is None:
            raise ConfigError(
                "exchanges other than the ring cost what the numbers of heads say: give CostModel heads and kv_heads, "
                "those of one tensor-parallel rank"
            )
        for ranks in np.unique(np.where(exchange == _HEADS, head_ranks, 1)[()]).tolist():
            if ranks < 1 or (ranks > 1 and not self.swaps_heads(ranks)):
                raise PlanError(
                    f"head_ranks is {ranks}, but {self.heads} heads and {self.kv_heads} key/value heads cannot be cut "
                    "over so many ranks: it must divide the heads, and divide the key/value heads or be a multiple"
                )
        if np.any((exchange == _HEADS) & (ring % np.maximum(head_ranks, 1) != 0)):
            raise PlanError(f"head_ranks is {head_ranks}, which does not divide rings of {ring} ranks")

    def _besides(self, tokens: Any, direction: int) -> Any:
        """What a piece takes besides core attention."""
        return scaled(tokens, self._stage.linear[direction]) + (self._stage.sequence[direction] >> FRACTION_BITS)

    def seconds(self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total") -> Any:
        """`picoseconds` as float64 seconds: for reports, not for decisions."""
        return self.picoseconds(length, ring, tier, phase) / PICOSECONDS

    def attention_picoseconds(
        self, length: Ints, ring: Ints = 1, tier: Ints = Tier.ACROSS_NODES, phase: Phase = "total"
    ) -> Any:
        """The part of `picoseconds` that a ring spends in core attention, waiting for transfers included."""
        pieces = self._pieces(length, ring, tier)
        result = 0 * pieces.tokens
        for direction in self._directions(phase):
            result = result + ring_attention(self._stage, self.window, pieces, direction)
        return result

    def microbatch_picoseconds(self, phase: Phase = "total") -> int:
        """The constant of one micro-batch; its time is this plus the `picoseconds` of its pieces."""
        return sum(self._stage.microbatch[direction] >> FRACTION_BITS for direction in self._directions(phase))

    def packed_attention_picoseconds(
        self,
        lengths: Ints,
        ring: int,
        tier: Tier = Tier.ACROSS_NODES,
        phase: Phase = "total",
        exchange: int = 0,
        head_ranks: int = 1,
    ) -> int:
        """Attention of many sequences cut over one ring whose keys and values move together, see `cost.packed`.

        That is how static context parallelism runs a pack. ``lengths`` has the shape [num_sequences]; ``exchange`` and
        ``head_ranks`` are as for `exchange_picoseconds`, and refused alike.
        """
        length, _, _ = self._arguments(np.atleast_1d(np.asarray(lengths)), ring, tier)
        self._arguments(int(length.sum()), 1, 0)  # work of the pack is at most that of one sequence of all its tokens
        self._check_exchange(np.asarray(exchange), np.asarray(head_ranks), np.asarray(ring))
        swap_tier = Tier.INSIDE_NODE if head_ranks <= self.ranks_per_node else tier
        pack = Pack(self.piece_tokens(length, ring), ring, int(tier), int(swap_tier))
        total = 0
        for direction in self._directions(phase):
            if exchange == _GATHER:
                total += packed_gather(self._stage, self.window, pack, direction)
            elif exchange == _HEADS and self.heads is not None and self.kv_heads is not None:
                counts = (self.heads, self.kv_heads)
                total += packed_heads(self._stage, self.window, pack, direction, head_ranks, counts)
            else:
                total += packed_walk(self._stage, self.window, pack, direction)
        return total

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
        return self._hidden(self._pieces(length, ring, tier), phase)

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
        pair = self._hidden(self._pieces(lengths, 2, tiers), phase)  # moves less at a time than wider rings do
        return np.clip(np.where((widest < 2) & pair, 2, widest), 1, limit)[()]

    def _widest_by_walking(self, lengths: Any, tiers: Any, phase: Phase, limit: Any) -> Any:
        """With a window hiding may end and begin again, where padding makes fewer hops: try one by one."""
        widest, hiding = np.ones_like(limit), np.ones(np.shape(limit), dtype=bool)
        while np.any(hiding):
            hiding = hiding & (widest < limit)
            candidate = widest + hiding
            hiding = hiding & self._hidden(self._pieces(lengths, candidate, tiers), phase)
            widest = widest + hiding
        return widest

    def narrowest_hiding_piece(self, tier: int) -> int:
        """Tokens of the smallest piece of a full-attention ring on these links that hides every transfer."""
        return int(self._narrowest("total")[tier])

    def _narrowest(self, phase: Phase) -> Any:
        """Tokens of the smallest piece (in units of padding) whose full-attention ring of 3 or more hides, per tier.

        A step's compute grows with the square of its piece, its transfers by a line: they cross once.
        """
        if phase not in self._narrowest_found:
            low = np.ones(len(Tier), dtype=np.int64)
            high = np.full_like(low, self.max_length // self.pad_multiple + 1)
            while np.any(low < high):
                middle = (low + high) // 2
                tokens = middle * self.pad_multiple
                good = self._hidden(Pieces(3 * tokens, tokens, 3, np.arange(len(Tier))), phase)
                low, high = np.where(good, low, np.minimum(middle + 1, high)), np.where(good, middle, high)
            self._narrowest_found[phase] = low * self.pad_multiple
        return self._narrowest_found[phase]

    @cached_property
    def _narrowest_found(self) -> dict[str, IntArray]:
        return {}

    def _hidden(self, pieces: Pieces, phase: Phase) -> Any:
        """`hides` of pieces."""
        result = np.ones(np.shape(pieces.tokens + 0 * (pieces.ring + pieces.tier)), dtype=bool)
        for direction in self._directions(phase):
            result = result & hides(self._stage, self.window, pieces, direction)
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

    def largest_free_offload(self, length: Ints, ring: Ints = 1, tier: Ints = Tier.INSIDE_NODE) -> Any:
        """Largest r whose copies hide: T(t) >= r Act(t) / min(B_d2h, B_h2d) for a piece of t tokens; float64, 0 .. 1.

        T is one layer's forward pass, or its backward if that is shorter. Copies of a ring that sends across nodes
        share PCIe with the NIC. A multiple of 1/1024, so that it is exact: `offload_stall_picoseconds` of it is 0.
        """
        length, ring, tier = self._arguments(length, ring, tier)
        s, beside = self._stage, self._beside_nic(ring, tier)
        kept = self.piece_tokens(length, ring) * s.kept_per_token + s.kept_constant
        copy = scaled(kept, np.maximum(s.d2h_time, s.h2d_time)[beside]) + 1
        time = np.minimum(*(self._per_layer(length, ring, tier, phase) for phase in ("forward", "backward")))
        return np.minimum(time, copy) * OFFLOAD_STEPS // copy / OFFLOAD_STEPS

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
        beside = self._beside_nic(ring, tier)
        out = scaled(moved, s.d2h_time[beside]) - self._per_layer(length, ring, tier, "forward") * layers
        back = scaled(moved, s.h2d_time[beside]) - self._per_layer(length, ring, tier, "backward") * layers
        return np.maximum(out, 0) + np.maximum(back, 0)

    def host_bytes(self, length: Ints, ring: Ints, share: Floats) -> Any:
        """Bytes of a piece that are in host memory between its passes, int64, rounded up; ``share``: `Plan.offload`."""
        length, ring, _ = self._arguments(length, ring, 0)
        kept = self.piece_tokens(length, ring) * self._stage.kept_per_token + self._stage.kept_constant
        return np.ceil(self.layers_per_stage * kept * np.asarray(share, np.float64)).astype(np.int64)[()]

    def _per_layer(self, length: Ints, ring: Ints, tier: Ints, phase: Phase) -> Any:
        """Time of one of the stage's layers, embedding and loss not counted."""
        time = self.picoseconds(length, ring, tier, phase)
        if phase == "backward":
            time = np.maximum(time - scaled(self.piece_tokens(length, ring), self._stage.ends), 0)
        return time // self.layers_per_stage

    @staticmethod
    def _beside_nic(ring: Any, tier: Any) -> Any:
        """Index of the copies' bandwidth: 1 for rings that send across nodes."""
        return np.where((np.asarray(ring) > 1) & (np.asarray(tier) == Tier.ACROSS_NODES), 1, 0)

    def _held_steps(self, offload: Floats) -> Any:
        """Layers' worth of activations that stay, in 1/1024."""
        return self.layers_per_stage * OFFLOAD_STEPS - max(self.layers_per_stage - 2, 0) * _offload_steps(offload)

    def _pieces(self, length: Ints, ring: Ints, tier: Ints) -> Pieces:
        """Arguments, refused if out of range, and the tokens of a piece."""
        lengths, rings, tiers = self._arguments(length, ring, tier)
        return Pieces(lengths, self.piece_tokens(lengths, rings), rings, tiers)


def _offload_steps(offload: Floats) -> Any:
    """Offload fractions in 1/1024, rounded down; exact, because scaling by a power of two is."""
    fraction = np.asarray(offload, dtype=np.float64)
    if not np.all((fraction >= 0) & (fraction <= 1)):
        raise PlanError(f"offload is {offload}, must be in 0 .. 1")
    return np.floor(fraction * OFFLOAD_STEPS).astype(np.int64)[()]
