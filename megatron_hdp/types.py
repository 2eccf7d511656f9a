"""The words of the project as frozen data: ring, piece, micro-batch, plan. No torch, no Megatron.

Glossary (one noun per thing, in code, flags, docs and JSON):

sequence     one document, or one part of a document longer than the context; length in tokens
context      longest sequence allowed (Megatron's --seq-length)
capacity     tokens that one rank holds in one micro-batch (--hdp-tokens-per-rank)
pool         the data-parallel columns of the run; a *rank* here is a column (all its TP x PP processes)
ring         ordered ranks that share one sequence; size 1 is *local*
piece        the part of one sequence that one rank holds in one micro-batch
micro-batch  the pieces that a rank runs forward and backward together
plan         for one global batch, every rank's ordered list of micro-batches
"""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hdp.errors import PlanError

IntArray = npt.NDArray[np.int64]

PLAN_SCHEMA = 2
"""Version of the JSON that `Plan.to_json` writes."""

EXCHANGES = ("ring", "gather", "heads")
"""How the ranks of a ring share a sequence's attention; a plan holds the index.

ring    keys and values walk round the ring, each rank computes on what is at hand
gather  each rank gets all keys and values it needs at once, from their owners
heads   ranks swap rows for heads, `Plan.head_ranks` of them at a time; such groups form a ring among each other
"""

_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Ring:
    """The contiguous pool ranks ``start .. start + size - 1`` that share one sequence.

    The ring walks the even offsets up and the odd offsets down (0, 2, 4, 5, 3, 1 for size 6), so that neighbours
    on the ring are never more than two ranks apart and a rank meets at most four peers in a whole run.
    """

    start: int
    size: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Pool ranks in walking order; index = position on the ring."""
        return tuple(self.start + offset for offset in _walk(self.size))

    def position(self, rank: int) -> int:
        """Position of a pool rank on the ring, 0 .. size - 1."""
        offset = rank - self.start
        if not 0 <= offset < self.size:
            raise PlanError(f"rank {rank} is not on the ring of ranks {self.start} to {self.start + self.size - 1}")
        return offset // 2 if offset % 2 == 0 else self.size - 1 - offset // 2

    def neighbours(self, rank: int) -> tuple[int, int]:
        """Pool ranks before and after ``rank`` in walking order."""
        ranks = self.ranks
        position = self.position(rank)
        return ranks[position - 1], ranks[(position + 1) % self.size]


@functools.lru_cache(maxsize=4096)
def _walk(size: int) -> tuple[int, ...]:
    """Offsets of a ring in walking order: even ones up, odd ones down."""
    evens = tuple(range(0, size, 2))
    odds = tuple(range(1, size, 2))
    return evens + odds[::-1]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of sequence ``sequence`` that one rank holds: chunks ``position`` and ``2 size - 1 - position``.

    The sequence is padded at its tail to ``2 * ring.size * chunk_tokens`` tokens and cut into ``2 * ring.size`` equal
    chunks; the rank at position p holds chunks p and 2d - 1 - p (zigzag), so causal work is equal on every rank.
    A local piece (size 1) is the whole padded sequence.
    """

    sequence: int
    """Index of the sequence in the plan's batch."""
    length: int
    """Real tokens of the whole sequence, padding not counted."""
    ring: Ring
    position: int
    chunk_tokens: int
    """Tokens of one of the 2d chunks, padding counted."""
    offload: float = 0.0
    """Fraction of the activations that leaves for host memory, 0 .. 1."""
    exchange: str = "ring"
    """One of `EXCHANGES`; "ring" for local pieces."""
    head_ranks: int = 1
    """Ranks that swap rows for heads, a divisor of the ring's size; 1 unless the exchange is "heads"."""

    @property
    def tokens(self) -> int:
        """Tokens that the rank holds, padding counted."""
        return 2 * self.chunk_tokens

    @property
    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Token positions [begin, end) in the padded sequence of the piece's two chunks, in order of position."""
        low, high = self.position, 2 * self.ring.size - 1 - self.position
        chunk = self.chunk_tokens
        return (low * chunk, (low + 1) * chunk), (high * chunk, (high + 1) * chunk)

    @property
    def real_tokens(self) -> int:
        """Tokens that the rank holds, padding not counted."""
        return sum(max(0, min(end, self.length) - begin) for begin, end in self.spans)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The pieces that one rank runs together, in the order in which they lie in its tensors.

    Ring pieces come in the same relative order on every rank, which is what keeps rings from waiting on each other.
    An empty micro-batch is legal: the rank runs padding with no loss.
    """

    pieces: tuple[Piece, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the rank holds, padding counted."""
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, eq=False)
class Plan:
    """Who runs what for one global batch; pure data in columns, so that huge batches stay cheap.

    Piece ``i`` of micro-batch ``m`` is sequence ``piece_sequence[i]`` for i in
    ``microbatch_offsets[m] .. microbatch_offsets[m + 1]``; the micro-batches of rank ``r`` are
    ``rank_offsets[r] .. rank_offsets[r + 1]``. What a rank holds of a sequence follows from its place on the ring.
    """

    num_ranks: int
    capacity: int
    """Tokens one rank may hold in one micro-batch."""
    pad_multiple: int
    """Piece sizes are multiples of this: 2, or lcm(2, TP) with sequence parallelism."""
    lengths: IntArray
    """Real tokens of every sequence of the batch, shape [num_sequences]."""
    ring_start: IntArray
    ring_size: IntArray
    offload: npt.NDArray[np.float64]
    rank_offsets: IntArray
    microbatch_offsets: IntArray
    piece_sequence: IntArray
    exchange: IntArray = None  # type: ignore[assignment]
    """Index into `EXCHANGES` of every sequence, shape [num_sequences]; all "ring" if not given."""
    head_ranks: IntArray = None  # type: ignore[assignment]
    """See `Piece.head_ranks`, shape [num_sequences]; all 1 if not given."""

    def __post_init__(self) -> None:
        for name, value in (("exchange", 0), ("head_ranks", 1)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.full(np.size(self.lengths), value, dtype=np.int64))
        for name in self._scalars():
            value = getattr(self, name)
            if isinstance(value, np.integer):  # JSON knows no numbers of NumPy
                object.__setattr__(self, name, int(value))
        for name in self._columns():
            array = _own_column(name, getattr(self, name))
            array.setflags(write=False)
            object.__setattr__(self, name, array)  # freezing the columns is part of construction

    @staticmethod
    def _scalars() -> tuple[str, ...]:
        return "num_ranks", "capacity", "pad_multiple"

    @staticmethod
    def _columns() -> tuple[str, ...]:
        return (
            "lengths",
            "ring_start",
            "ring_size",
            "offload",
            "rank_offsets",
            "microbatch_offsets",
            "piece_sequence",
            "exchange",
            "head_ranks",
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return int.from_bytes(self.digest()[:8], "little")

    @property
    def num_sequences(self) -> int:
        """Sequences of the batch."""
        return int(self.lengths.size)

    @property
    def tokens(self) -> int:
        """Real tokens of the batch."""
        return int(self.lengths.sum())

    @property
    def chunk_tokens(self) -> IntArray:
        """Tokens of one of the 2d chunks of every sequence, padding counted, shape [num_sequences]."""
        return np.asarray(chunk_tokens(self.lengths, self.ring_size, self.pad_multiple), dtype=np.int64)

    @property
    def microbatch_counts(self) -> IntArray:
        """Micro-batches of every rank, shape [num_ranks]."""
        return np.diff(self.rank_offsets)

    def ring(self, sequence: int) -> Ring:
        """The ring that shares ``sequence``."""
        return Ring(int(self.ring_start[sequence]), int(self.ring_size[sequence]))

    def piece(self, sequence: int, rank: int) -> Piece:
        """What ``rank`` holds of ``sequence``."""
        ring = self.ring(sequence)
        length = int(self.lengths[sequence])
        chunk = int(chunk_tokens(length, ring.size, self.pad_multiple))
        return Piece(
            sequence,
            length,
            ring,
            ring.position(rank),
            chunk,
            float(self.offload[sequence]),
            EXCHANGES[int(self.exchange[sequence])],
            int(self.head_ranks[sequence]),
        )

    def micro_batch(self, rank: int, slot: int) -> MicroBatch:
        """The ``slot``-th micro-batch of ``rank``."""
        index = int(self.rank_offsets[rank]) + slot
        begin, end = self.microbatch_offsets[index : index + 2]
        return MicroBatch(tuple(self.piece(int(s), rank) for s in self.piece_sequence[begin:end]))

    def micro_batches(self, rank: int) -> tuple[MicroBatch, ...]:
        """Every micro-batch of ``rank``, in the order in which it runs them."""
        return tuple(self.micro_batch(rank, slot) for slot in range(int(self.microbatch_counts[rank])))

    def __iter__(self) -> Iterator[tuple[MicroBatch, ...]]:
        return (self.micro_batches(rank) for rank in range(self.num_ranks))

    def digest(self) -> bytes:
        """SHA-256 of the plan's canonical bytes: equal on every rank, process and platform for equal plans."""
        sha = hashlib.sha256(f"{PLAN_SCHEMA} {self.num_ranks} {self.capacity} {self.pad_multiple}".encode())
        for name in self._columns():
            array = getattr(self, name)
            sha.update(f" {name} {array.size} ".encode())
            sha.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
        return sha.digest()

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces; `from_json` gives back an equal plan."""
        data: dict[str, Any] = {
            "schema": PLAN_SCHEMA,
            "num_ranks": self.num_ranks,
            "capacity": self.capacity,
            "pad_multiple": self.pad_multiple,
        }
        data.update({name: getattr(self, name).tolist() for name in self._columns()})
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Inverse of `to_json`; spaces and the order of the fields do not matter. `planner.check` judges the plan.

        Raises:
            PlanError: not JSON, another schema, fields missing, unknown or twice, or a field that does not hold whole
                numbers of 64 bits (offload: finite numbers).
        """
        data = _parse(text)
        schema = data.pop("schema", None) if isinstance(data, dict) else None
        if type(schema) is not int or schema != PLAN_SCHEMA:  # true and 1.0 equal 1
            raise PlanError(f"not a plan of schema {PLAN_SCHEMA}: write it again with this version")
        wanted = {*cls._scalars(), *cls._columns()}
        if data.keys() != wanted:
            missing, unknown = sorted(wanted - data.keys()), [_shown(name) for name in sorted(data.keys() - wanted)]
            raise PlanError(
                f"plan JSON does not have the fields of schema {PLAN_SCHEMA}: missing {', '.join(missing) or 'none'}; "
                f"unknown {', '.join(unknown) or 'none'}"
            )
        for name in cls._scalars():
            _require_numbers(name, [data[name]], (int,))
        for name in cls._columns():
            if type(data[name]) is not list:
                raise PlanError(f"plan JSON: {name} is {_shown(data[name])}, must be a list")
            _require_numbers(name, data[name], (int, float) if name == "offload" else (int,))
        return cls(**data)


def _own_column(name: str, values: Any) -> npt.NDArray[Any]:
    """A copy that nobody else can write: int64, or float64 without -0.0 (offload), in C order."""
    kinds, words = ("iuf", "numbers") if name == "offload" else ("iu", "whole numbers of 64 bits")
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise PlanError(f"columns: {name} must be a flat list of {words}: {error}") from error
    if given.size and given.dtype.kind not in kinds:
        raise PlanError(f"columns: {name} has values of type {given.dtype}, must be {words}")
    if name == "offload":
        # -0.0 + 0.0 is 0.0, so that equal plans have equal bytes
        return np.array(given, dtype=np.float64, order="C") + 0.0
    if given.size and int(given.max()) > _LARGEST:
        raise PlanError(f"columns: {name} has the value {given.max()}, must be {words}, at most {_LARGEST}")
    return np.array(given, dtype=np.int64, order="C")


def _parse(text: str) -> Any:
    """The JSON, or an error that says where it is none, or which field comes twice."""
    try:
        try:
            return json.loads(text, object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            raise PlanError(f"plan JSON cannot be read: {error}") from error
        except PlanError:
            raise
        except ValueError:  # more digits than Python converts: cut them, so that the field can be named
            return json.loads(text, object_pairs_hook=_object, parse_int=lambda digits: int(digits[:40]))
    except RecursionError as error:
        raise PlanError("plan JSON cannot be read: lists or objects inside each other too deep") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"plan JSON has the field {_shown(twice)} twice")
    return result


def _require_numbers(name: str, values: list[Any], kinds: tuple[type, ...]) -> None:
    """Only numbers of these very types (a bool is no int), finite and within int64."""
    if set(map(type, values)) <= set(kinds) and all(_is_bounded(v) for v in values):
        return
    where, value = next((i, v) for i, v in enumerate(values) if type(v) not in kinds or not _is_bounded(v))
    words = "a whole number" if kinds == (int,) else "a finite number"
    place = name if name in Plan._scalars() else f"value {where} of {name}"
    raise PlanError(f"plan JSON: {place} is {_shown(value)}, must be {words} from -2^63 to 2^63 - 1")


def _is_bounded(value: float) -> bool:
    return -_LARGEST - 1 <= value <= _LARGEST  # false for NaN


def _shown(value: Any) -> str:
    """As JSON, cut to what a message can hold."""
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} values"
    text = json.dumps(value)
    return text if len(text) <= 48 else f"{text[:44]} ..."


def chunk_tokens(length: Any, ring_size: Any, pad_multiple: int) -> Any:
    """Tokens of one of the 2d chunks of a sequence padded to a multiple of d * pad_multiple (ints or arrays).

    With pad_multiple 2 (no sequence parallelism) the sequence is padded to a multiple of 2d.
    """
    unit = ring_size * pad_multiple
    return -(-length // unit) * pad_multiple // 2
