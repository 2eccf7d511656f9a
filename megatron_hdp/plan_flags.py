"""The flags of `megatron-hdp plan`, and what they mean to the planner. Imports the planner only when it is asked."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from megatron_hdp.errors import ConfigError
from megatron_hdp.plan_memory import MemoryFlags

if TYPE_CHECKING:
    from megatron_hdp.cost import CostModel, Profile
    from megatron_hdp.plan_step import PlanOptions

Size = Annotated[str, tyro.conf.arg(metavar="SIZE")]
"""Tokens: 8192, 8K or 2M."""
_Out = Annotated[Path | None, tyro.conf.arg(metavar="OUT")]

LAYERS = 32
"""Layers over all stages, where no flag says how many a stage has: LLaMA-7B's."""
_MOST_RANKS = 1 << 20
_MOST_GIB = 1 << 20
_MOST_TOKENS = (1 << 31) - 1
"""Megatron counts tokens in int32."""

_WORDS = (
    ("--hdp-offload-gib", "--host-gib"),
    ("--hdp-", "--"),
    ("--seq-length", "--context"),
    ("--global-batch-size or ", ""),
    ("--expert-model-parallel-size", "--expert-group"),
)
_NAMES = re.compile(
    r"(?<![\w-])(stages|virtual_stages|layers_per_stage|pad_multiple|window|recompute|profile|kv_heads|heads)"
    r"(?= (?:is|\d|'))"
)


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """Flags of `megatron-hdp plan`."""

    lengths: Annotated[str, tyro.conf.arg(metavar="FILE|NAME")]
    """A file or a mix, as for `megatron-hdp lengths`. Steps of a file hold the sequences that a run with the same
    context, batch tokens and seed trains on, all documents in the train split."""
    ranks: int
    """Ranks of the pool (data-parallel x context-parallel size)."""
    tokens_per_rank: Size
    """Capacity, tokens that one rank holds in one micro-batch (--hdp-tokens-per-rank)."""
    context: Size
    """Longest sequence (--seq-length); longer documents are cut."""
    batch_tokens: Size
    """Tokens of a step (--hdp-batch-tokens)."""
    stages: int = 1
    """Pipeline stages."""
    virtual_stages: int = 1
    """Model parts of a stage, for interleaved schedules."""
    layers_per_stage: int | None = None
    """Layers of one pipeline stage. Default: 32 over the stages."""
    expert_group: int = 1
    """Consecutive ranks that share experts and need equal numbers of micro-batches."""
    profile: Annotated[str, tyro.conf.arg(metavar="NAME|FILE")] = "bytescale"
    """What things cost: bytescale, h100, or a profile's JSON file."""
    layer: str | None = None
    """Layer of the profile, by name. Default: the profile's own default."""
    recompute: Literal["none", "full"] = "none"
    """Full: every stage runs forward again ahead of backward."""
    window: int | None = None
    """Sliding window: tokens that a query sees. Default: full causal attention."""
    heads: int | None = None
    """Query heads of one tensor-parallel rank, with --kv-heads: lets rings inside a node use gather or heads."""
    kv_heads: int | None = None
    """Key/value heads of one tensor-parallel rank."""
    exchange: str = "auto"
    """How a ring shares attention. auto: what is fastest inside a node, the ring elsewhere; ring, gather or heads: that
    for all. See docs/planner.md."""
    offload: bool = False
    """Let activations of long sequences leave for host memory where the copy is free."""
    host_gib: float | None = None
    """Host memory for that, of one GPU, all micro-batches in flight. Default: the profile's share of its node, or no
    limit."""
    estimate: Annotated[MemoryFlags, tyro.conf.arg(name="")] = dataclasses.field(default_factory=MemoryFlags)
    algorithm: str = "hdp"
    """hdp, or one to compare with: naive and bytescale (ByteScale's algorithms 1 and 2), static-smallest (context
    parallelism over the fewest ranks that hold the context), static (over the whole pool), pow2 (rings of powers of
    two), megatron (its own scheduler)."""
    balance: str | None = None
    """dp: counts of micro-batches may differ between ranks; pp: a ring has the same slot on all its ranks. Default: pp
    with pipeline stages or expert groups, else dp."""
    megatron_checkout: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """For megatron: a tree of Megatron-LM's dev branch, whose scheduler then plans. Default: the installed one."""
    pad_multiple: int = 2
    """Pieces are multiples of this: 2, or lcm(2, TP) with sequence parallelism."""
    compare: bool = False
    """Plan by every algorithm and print one table."""
    steps: int = 1
    """Steps to plan; with more than one, the distribution is shown."""
    seed: int = 1234
    """Seed of the data order (--seed), or of the draw from a mix."""
    field: str | None = None
    """Field or column of the file, as for `megatron-hdp lengths`."""
    json: _Out = None
    """Write the plan here as canonical JSON; with more than one step, a list of plans. See docs/plan-schema.md."""
    json_pieces: _Out = None
    """The same, written out rank by rank and piece by piece."""

    def sizes(self) -> tuple[int, int, int]:
        """Tokens per rank, context, tokens of a batch. Raises `ConfigError`."""
        return parse_sizes(self.tokens_per_rank, self.context, self.batch_tokens)

    def check(self) -> None:
        """Refuse before lengths are read what would be refused after, or not in the words of this command."""
        from megatron_hdp.length_source import check_seed
        from megatron_hdp.plan_step import ALGORITHMS, MEGATRON

        if self.algorithm not in ALGORITHMS:
            raise ConfigError(f"--algorithm is {self.algorithm!r}: choose one of {', '.join(ALGORITHMS)}")
        if self.megatron_checkout is not None and self.algorithm != MEGATRON and not self.compare:
            raise ConfigError(
                f"--megatron-checkout does nothing with --algorithm {self.algorithm}: use --algorithm {MEGATRON} or "
                "--compare"
            )
        if self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}: plan at least 1")
        if self.ranks > _MOST_RANKS:
            raise ConfigError(f"--ranks is {self.ranks:,}: plan for at most {_MOST_RANKS:,}")
        if self.window is not None and self.window < 1:
            raise ConfigError(
                f"--window is {self.window}: a query sees at least itself; leave --window out for full attention"
            )
        check_seed(self.seed)
        self._check_exchange()
        self._check_layers()
        self._check_outputs()

    def _check_exchange(self) -> None:
        """Refuse exchanges that are none, and what a cost of heads lacks."""
        from megatron_hdp.planner.exchange import CHOICES

        if self.exchange not in CHOICES:
            raise ConfigError(f"--exchange is {self.exchange!r}: choose one of {', '.join(CHOICES)}")
        if (self.heads is None) != (self.kv_heads is None):
            given, missing = ("--heads", "--kv-heads") if self.kv_heads is None else ("--kv-heads", "--heads")
            raise ConfigError(f"{given} without {missing}: give both, those of one tensor-parallel rank")
        if self.exchange in ("gather", "heads") and self.heads is None:
            raise ConfigError(
                f"--exchange {self.exchange}: what it costs depends on --heads and --kv-heads of one tensor-parallel "
                "rank: give both"
            )

    @property
    def stage_layers(self) -> int:
        """Layers of one stage, given or assumed."""
        return max(1, LAYERS // self.stages) if self.layers_per_stage is None else self.layers_per_stage

    def _check_layers(self) -> None:
        """Refuse stages that cannot be, and virtual stages that the layers of a stage cannot be cut into."""
        if self.stages < 1:
            raise ConfigError(f"--stages is {self.stages}: a model has at least 1 pipeline stage")
        layers, parts = self.stage_layers, self.virtual_stages
        if layers < 1 or parts <= 1 or self.stages == 1:
            return  # refused elsewhere, or nothing is cut
        given = self.layers_per_stage is not None
        if parts > layers or (given and layers % parts):
            raise ConfigError(
                f"--virtual-stages is {parts}, and a stage has {layers} layers ({self.layers_source}): "
                + ("a model part has at least one" if parts > layers else "they must divide into equal parts")
                + "; change --virtual-stages or --layers-per-stage"
            )

    @property
    def layers_source(self) -> str:
        """Where the number of layers of a stage comes from."""
        if self.layers_per_stage is not None:
            return "--layers-per-stage"
        return f"assumed: {LAYERS} over {self.stages} stage{'s' * (self.stages > 1)}"

    def _check_outputs(self) -> None:
        """Refuse files that cannot be written, before minutes are spent on what goes into them."""
        for flag, out in (("--json", self.json), ("--json-pieces", self.json_pieces)):
            if out is not None and self.compare:
                raise ConfigError(f"{flag} with --compare: whose plan? Choose one with --algorithm instead")
            check_output(flag, out)
        if self.json is not None and self.json_pieces is not None and self.json.resolve() == self.json_pieces.resolve():
            raise ConfigError(f"--json and --json-pieces are both {self.json}: one would overwrite the other")

    def host_bytes(self, cost: "CostModel") -> int | None:
        """Host memory of one GPU for activations; None for no limit. Raises `ConfigError`."""
        return host_bytes(self.host_gib, self.offload, cost.profile)

    def cost(self) -> "CostModel":
        """Cost of a stage. Raises `ConfigError`."""
        from megatron_hdp.cost import CostModel, load_profile

        return CostModel(
            load_profile(self.profile),
            self.stage_layers,
            window=self.window,
            recompute=self.recompute,
            layer=self.layer,
            pad_multiple=self.pad_multiple,
            heads=self.heads,
            kv_heads=self.kv_heads,
        )

    def options(self) -> "PlanOptions":
        """What the planner takes. Raises `ConfigError`."""
        from megatron_hdp.plan_step import PlanOptions
        from megatron_hdp.planner.columns import Layout

        layout = Layout(self.stages, self.virtual_stages, self.expert_group)
        cost = self.cost()
        return PlanOptions(
            num_ranks=self.ranks,
            tokens_per_rank=self.sizes()[0],
            cost=cost,
            algorithm=self.algorithm,
            balance=layout.balance(self.balance or "auto"),
            stages=self.stages,
            virtual_stages=self.virtual_stages,
            expert_group=self.expert_group,
            offload=self.offload,
            host_bytes=self.host_bytes(cost) if self.offload or self.host_gib is not None else None,
            exchange=self.exchange,
        )


def parse_sizes(tokens_per_rank: str, context: str, batch_tokens: str) -> tuple[int, int, int]:
    """Tokens per rank, context, tokens of a batch, as --tokens-per-rank, --context and --batch-tokens give them.

    Raises `ConfigError`.
    """
    from megatron_hdp.lengths import parse_size
    from megatron_hdp.planner.entry import MAX_BATCH_TOKENS

    capacity = parse_size(tokens_per_rank, "--tokens-per-rank", _MOST_TOKENS)
    longest = parse_size(context, "--context", _MOST_TOKENS)
    budget = parse_size(batch_tokens, "--batch-tokens")
    if budget > MAX_BATCH_TOKENS:
        limit = f"{MAX_BATCH_TOKENS:,}"
        raise ConfigError(f"--batch-tokens is {budget:,}: Megatron counts them in int32, at most {limit}")
    return capacity, longest, budget


def check_output(flag: str, out: Path | None) -> None:
    """Refuse a file that cannot be written, before minutes are spent on what goes into it. Raises `ConfigError`."""
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"{flag} {out}: cannot be written (it is a folder)")
    if not out.parent.is_dir():
        raise ConfigError(f"{flag} {out}: no folder {out.parent}")


def host_bytes(host_gib: float | None, offload: bool, profile: "Profile") -> int | None:
    """Host memory of one GPU for activations, of --host-gib or else the profile; None for no limit.

    Raises `ConfigError`.
    """
    if host_gib is None:
        memory = profile.host_memory
        return None if memory is None else int(memory) // profile.gpus_per_node
    if not offload:
        raise ConfigError(f"--host-gib {host_gib:g} without --offload: nothing would use it")
    if not 0 <= host_gib <= _MOST_GIB:
        raise ConfigError(f"--host-gib is {host_gib:g}: it must be from 0 to {_MOST_GIB:,}")
    if 0 < host_gib * 2**30 < 1:
        raise ConfigError(f"--host-gib is {host_gib:g}, less than a byte: give more, or 0 for none")
    return int(host_gib * 2**30)


def own_words(message: str) -> str:
    """A message about a run's flags or a function's arguments in the words of this command's flags."""
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return _NAMES.sub(lambda name: "--" + name[1].replace("_", "-"), message)
